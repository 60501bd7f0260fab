"""The child subreaper between trtspec and a server. No process of the server outlives it.

Only uses the standard library.

trtspec runs this file by its path, which starts in a hundredth of a second: `python -I -S reaper.py
GRACE CONTROL`. GRACE is the time between a request to end and SIGKILL, in seconds. CONTROL is the
read end of a pipe. trtspec writes the server's command into the pipe, as a line of JSON, so that a
`pkill -f` of the server's name does not match the subreaper. trtspec keeps the pipe open, and its
end means that trtspec has ended in any way.

Process groups do not hold an MPI job together, because Open MPI's daemon gives every rank a group
of its own. A child subreaper (prctl(2)) adopts every process that the server starts and leaves
behind, and ends it too. trtspec does the same for the subreaper.
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
FORWARDED = (  # signals that would end a process and can be caught
    signal.SIGINT,
    signal.SIGTERM,
    signal.SIGHUP,
    signal.SIGQUIT,
    signal.SIGUSR1,
    signal.SIGUSR2,
    signal.SIGALRM,
)
UNKILLABLE = 10.0  # seconds after SIGKILL until a process counts as stuck in the kernel
POLL = 0.05  # seconds between two checks of processes that do not end


def main(grace: float, control: int) -> int:
    """Runs the engine and returns its exit status.

    The status is 128 + n if signal n ended the engine, and 127 if the engine could not be started.

    Args:
        grace: seconds between a request to end and SIGKILL.
        control: descriptor of the pipe.
    """
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    with open(control, "rb", closefd=False) as pipe:
        line = pipe.readline()
    if not line.endswith(b"\n"):
        return 128 + signal.SIGTERM  # because trtspec has already ended
    argv = json.loads(line)
    stop_signals: list[int] = []
    wake = _wake_on_signals(stop_signals)
    try:
        engine = subprocess.Popen(
            argv, process_group=0, preexec_fn=lambda: prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        )
    except OSError as error:
        _report(f"{argv[0]} cannot be started: {error.strerror}")
        return 127
    status = _until_it_ends(engine.pid, control, wake, stop_signals, grace)
    engine.returncode = status
    stuck = _end_descendants(wake, grace)
    if stuck:
        _report(f"these processes do not end, not even by SIGKILL: {stuck}")
    return status if status >= 0 else 128 - status


def _report(text: str) -> None:
    """Prints to the log. Does nothing if nobody reads the log any more."""
    with contextlib.suppress(OSError):
        print(text, flush=True)


def prctl(option: int, value: int) -> None:
    """Sets an option of this process by prctl(2). Does nothing on other systems than Linux."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value)


def _wake_on_signals(stop_signals: list[int]) -> int:
    """Makes the FORWARDED signals be collected in `stop_signals`. Returns the read end of a pipe.

    The pipe becomes readable at each of these signals and at SIGCHLD.
    """
    wake, write = os.pipe()
    os.set_blocking(wake, False)
    os.set_blocking(write, False)
    signal.set_wakeup_fd(write, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    for number in FORWARDED:
        signal.signal(number, lambda number, _frame: stop_signals.append(number))
    return wake


def _until_it_ends(
    engine: int, control: int, wake: int, stop_signals: list[int], grace: float
) -> int:
    """Passes signals on until the engine ends, and returns its exit code (negative: its signal).

    Kills everything `grace` seconds after the first signal, or at once after a second one.

    Args:
        engine: process id of the engine.
        control: descriptor of the pipe whose end means that trtspec has ended.
        wake: descriptor that is readable after a signal.
        stop_signals: signals so far, to which handlers append.
    """
    watched = [control, wake]
    deadline = None
    passed_on = 0
    while True:
        status = _reap(engine)
        if status is not None:
            return status
        for number in stop_signals[passed_on:]:
            passed_on += 1
            patience = grace if deadline is None else 0
            deadline = time.monotonic() + patience
            _signal_group(engine, number)
        if deadline is not None and time.monotonic() >= deadline:
            _signal_group(engine, signal.SIGKILL)
            _signal_all(signal.SIGKILL)
            # a process that SIGKILL does not end is stuck in a driver; _end_descendants reports it
            if time.monotonic() > deadline + UNKILLABLE:
                return -signal.SIGKILL
        timeout = None if deadline is None else max(POLL, deadline - time.monotonic())
        ready = select.select(watched, [], [], timeout)[0]
        _drain(wake)
        if control in ready:
            watched.remove(control)
            stop_signals.append(signal.SIGTERM)


def _reap(engine: int = -1) -> int | None:
    """Collects ended processes. Returns the exit code of the process `engine` if it has ended.

    The code is negative for a signal. None if the engine still runs.
    """
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            if ended[0] == engine:
                return os.waitstatus_to_exitcode(ended[1])
    return None


def _end_descendants(wake: int, grace: float) -> list[int]:
    """Ends the processes that the engine left, by SIGTERM, and SIGKILL after `grace` seconds.

    Returns the ids of processes that still run.
    """
    _signal_all(signal.SIGTERM)
    started = time.monotonic()
    while left := descendants():
        waited = time.monotonic() - started
        if waited > grace + UNKILLABLE:
            return left
        if waited > grace:
            _signal_all(signal.SIGKILL)
        select.select([wake], [], [], POLL)
        _drain(wake)
        _reap()
    return []


def _drain(wake: int) -> None:
    """Empties the pipe that signals write to, so that the next select waits."""
    with contextlib.suppress(BlockingIOError):
        while os.read(wake, 512):
            pass


def _signal_group(leader: int, number: int) -> None:
    """Sends a signal to a process group, if it still exists and may be signalled."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, number)


def _signal_all(number: int) -> None:
    """Sends a signal to every process below this one."""
    for pid in descendants():
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


def descendants() -> list[int]:
    """Ids of all processes below this one, also of ended ones that nobody has collected."""
    parents: dict[int, int] = {}
    for name in filter(str.isdecimal, os.listdir("/proc")):
        # OSError: the process has ended meanwhile
        with contextlib.suppress(OSError), open(f"/proc/{name}/stat", "rb") as stat:
            # the program's name may have spaces and brackets, so the fields begin after the last
            # bracket: the state, then the parent's id
            fields = stat.read().rpartition(b")")[2].split()
            parents[int(name)] = int(fields[1])
    below: list[int] = []
    level = [os.getpid()]
    while level:
        level = [pid for pid, parent in parents.items() if parent in level]
        below += level
    return below


if __name__ == "__main__":
    # _exit, because an interpreter that ends has no signal handlers any more
    os._exit(main(float(sys.argv[1]), int(sys.argv[2])))
