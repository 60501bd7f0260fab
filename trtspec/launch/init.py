"""What a container's process 1 has to do: pass signals on, collect every process that ends, end with its child."""

from __future__ import annotations

import os
import signal

# The kernel drops a signal to process 1 that has no handler there, SIGTERM too. Blocked ones wait to be collected.
HANDLED = {
    signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2,
}  # fmt: skip
FROM_KERNEL = 0x80  # si_code of a terminal's Ctrl-C, which the child in the same process group got already


def fork_below_init() -> None:
    """Returns at once, unless this is process 1 of a container: then it returns in a child alone, and the caller's
    process stays as an init that ends with the child's exit status (128 + n where signal n ended it)."""
    if os.getpid() != 1:
        return
    signal.pthread_sigmask(signal.SIG_BLOCK, HANDLED)
    child = os.fork()
    if child == 0:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, HANDLED)
        return
    os._exit(_until_it_ends(child))


def _until_it_ends(child: int) -> int:
    while True:
        found = signal.sigwaitinfo(HANDLED)
        if found.si_signo != signal.SIGCHLD:
            if found.si_code != FROM_KERNEL:
                os.kill(child, found.si_signo)
            continue
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                break
            if pid == 0:
                break
            if pid == child:
                code = os.waitstatus_to_exitcode(status)
                return code if code >= 0 else 128 - code
