"""The child subreaper between trtspec and a server, which no process of the server outlives.

Standard library only.

It is run by path (it starts in a hundredth of a second): `python -I -S reaper.py GRACE CONTROL`.
GRACE: seconds between a request to end and SIGKILL. CONTROL: read end of a pipe. On it trtspec
writes the server's command, a line of JSON, so that a `pkill -f` of the server's name does not
match the subreaper. Then trtspec holds the pipe open. Its end means that trtspec has ended in any
way. Process groups do not hold an MPI job together: Open MPI's daemon gives every rank a group of
its own. A child subreaper (prctl(2)) adopts what the server starts and leaves behind, and ends it
too. trtspec does the same for the subreaper.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import signal
import subprocess
import sys
import time

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
FORWARDED = (  # every signal that would end a process and can be caught
    signal.SIGINT,
    signal.SIGTERM,
    signal.SIGHUP,
    signal.SIGQUIT,
    signal.SIGUSR1,
    signal.SIGUSR2,
    signal.SIGALRM,
)
UNKILLABLE = 10.0  # seconds after SIGKILL until a process counts as stuck in the kernel


def main(grace: float, control: int) -> int:
    """Runs the engine and returns its exit status.

    128 + n if signal n ended it, 127 if it could not be started.
    """
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    with open(control, "rb", closefd=False) as pipe:
        line = pipe.readline()
    if not line.endswith(b"\n"):
        return 128 + signal.SIGTERM  # trtspec is gone already
    argv = json.loads(line)
    asked: list[int] = []
    wake = _wake_on_signals(asked)
    try:
        engine = subprocess.Popen(
            argv, process_group=0, preexec_fn=lambda: prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        )
    except OSError as error:
        _report(f"{argv[0]} cannot be started: {error.strerror}")
        return 127
    status = _until_it_ends(engine.pid, control, wake, asked, grace)
    engine.returncode = status
    stuck = _end_descendants(wake, grace)
    if stuck:
        _report(f"these processes do not end, not even by SIGKILL: {stuck}")
    return status if status >= 0 else 128 - status


def _report(text: str) -> None:
    """Prints to the log, if somebody reads it."""
    with contextlib.suppress(OSError):
        print(text, flush=True)


def prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value)


def _wake_on_signals(asked: list[int]) -> int:
    """Notes signals that ask for the end in `asked`.

    They and SIGCHLD make the returned pipe readable.
    """
    wake, write = os.pipe()
    os.set_blocking(wake, False)
    os.set_blocking(write, False)
    signal.set_wakeup_fd(write, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    for number in FORWARDED:
        signal.signal(number, lambda number, _frame: asked.append(number))
    return wake


def _until_it_ends(engine: int, control: int, wake: int, asked: list[int], grace: float) -> int:
    """Passes signals on until the engine ends, and returns its exit code.

    Kills everything `grace` seconds after the first signal, or at once after a second one.
    """
    watched = [control, wake]
    deadline = None
    passed_on = 0
    while True:
        status = _reap(engine)
        if status is not None:
            return status
        for number in asked[passed_on:]:
            passed_on += 1
            patience = grace if deadline is None else 0
            deadline = time.monotonic() + patience
            _signal_group(engine, number)
        if deadline is not None and time.monotonic() >= deadline:
            _signal_group(engine, signal.SIGKILL)
            _signal_all(signal.SIGKILL)
            # stuck in a driver; _end_descendants reports it
            if time.monotonic() > deadline + UNKILLABLE:
                return -signal.SIGKILL
        timeout = None if deadline is None else max(0.05, deadline - time.monotonic())
        ready = select.select(watched, [], [], timeout)[0]
        _drain(wake)
        if control in ready:
            watched.remove(control)
            asked.append(signal.SIGTERM)


def _reap(engine: int = -1) -> int | None:
    """Collects ended processes.

    Returns the exit code of `engine` (negative: its signal) if it has ended, else None.
    """
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            if ended[0] == engine:
                return os.waitstatus_to_exitcode(ended[1])
    return None


def _end_descendants(wake: int, grace: float) -> list[int]:
    """Ends the processes that the engine left: SIGTERM, SIGKILL after `grace` seconds.

    Returns those that remain.
    """
    _signal_all(signal.SIGTERM)
    started = time.monotonic()
    while left := descendants():
        waited = time.monotonic() - started
        if waited > grace + UNKILLABLE:
            return left
        if waited > grace:
            _signal_all(signal.SIGKILL)
        select.select([wake], [], [], 0.05)
        _drain(wake)
        _reap()
    return []


def _drain(wake: int) -> None:
    with contextlib.suppress(BlockingIOError):
        while os.read(wake, 512):
            pass


def _signal_group(leader: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, number)


def _signal_all(number: int) -> None:
    for pid in descendants():
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


def descendants() -> list[int]:
    """Ids of all processes below this one, with zombies until they are collected."""
    parents: dict[int, int] = {}
    for name in filter(str.isdecimal, os.listdir("/proc")):
        with contextlib.suppress(OSError), open(f"/proc/{name}/stat", "rb") as stat:
            # the name of a program may hold spaces and brackets; the fields after its last bracket
            # do not
            parents[int(name)] = int(stat.read().rpartition(b")")[2].split()[1])
    below: list[int] = []
    level = [os.getpid()]
    while level:
        level = [pid for pid, parent in parents.items() if parent in level]
        below += level
    return below


if __name__ == "__main__":
    # at once: while an interpreter ends, its signal handlers are gone
    os._exit(main(float(sys.argv[1]), int(sys.argv[2])))
