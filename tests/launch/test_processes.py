"""Processes that commands start, for real: failures speak, and nothing is left running."""

import contextlib
import os
import random
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import psutil
import pytest

from tests.bench.conftest import STAND_IN
from tests.command_line import free_port, wait_for
from trtspec.errors import TrtspecError
from trtspec.launch.processes import duration, require_free_ports, run_trtspec, served


def test_a_command_leaves_its_output_and_its_messages(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    status = run_trtspec(["--version"], tmp_path / "out")
    assert status == 0 and (tmp_path / "out").read_text().startswith("trtspec ")
    status = run_trtspec(["check", "127.0.0.1:9", "--score", "nowhere"], tmp_path / "out")
    assert status == 2 and "nowhere" in capfd.readouterr().err


def test_a_server_that_dies_is_quoted(tmp_path: Path) -> None:
    with (
        pytest.raises(TrtspecError, match=r"before it was ready; (.|\n)*nowhere") as failure,
        served(
            ["serve", "/nowhere", "--backend", "reference"],
            f"http://127.0.0.1:{free_port()}",
            tmp_path / "log",
            60,
        ),
    ):
        pass
    assert failure.value.remedy == "trtspec serve /nowhere --backend reference"


def test_a_taken_port_is_named_before_work_begins(tmp_path: Path) -> None:
    port = free_port()
    process = subprocess.Popen([sys.executable, str(STAND_IN), str(port), "{}"])
    try:

        def refusal() -> str:
            try:
                require_free_ports(port, 1)
            except TrtspecError as error:
                return error.message
            return ""

        wait_for(refusal)
        assert str(port) in refusal()
    finally:
        process.terminate()
        process.wait()


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.clock
def test_an_interrupt_leaves_no_process(tmp_path: Path, sent: signal.Signals) -> None:
    interrupt_a_chain(tmp_path, sent, 0.05)


@pytest.mark.slow
@pytest.mark.clock
def test_interrupts_at_any_moment_leave_no_process(tmp_path: Path) -> None:
    """A signal at any moment of a start or of a wait leaves no process.

    One just before a blocking read was lost once in 250 times, another inside Popen once in 1,600.
    """
    moments = random.Random(0)
    for trial in range(400):
        interrupt_a_chain(
            tmp_path / str(trial),
            signal.SIGTERM,
            moments.choice([0, 0.002, 0.01]) * moments.random(),
        )


def interrupt_a_chain(directory: Path, sent: signal.Signals, delay: float) -> None:
    """Interrupts a chain `delay` seconds after its command began; all of it must end.

    The chain waits for the command while a server runs in its own session. One signal ends all
    three.
    """
    script = textwrap.dedent(
        f"""
        import signal, subprocess, sys
        from pathlib import Path
        from trtspec.errors import termination_as_interrupt
        from trtspec.launch import processes

        signal.signal(signal.SIGINT, signal.default_int_handler)  \
# ignored where a shell started the tests with &
        directory = Path({str(directory)!r})
        with termination_as_interrupt():
            server = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], \
start_new_session=True)
            try:
                print(server.pid, flush=True)
                with processes.child([sys.executable, "-m", "http.server", \
"--bind", "127.0.0.1", "0"]) as one:
                    processes.wait(one)
            finally:
                processes.stop(server)
        """
    )
    process = subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    started: list[int] = []
    try:
        assert process.stdout is not None
        server = int(process.stdout.readline())
        wait_for(lambda: len(children_of(process.pid)) == 2)
        started = children_of(process.pid)
        assert server in started
        time.sleep(delay)
        process.send_signal(sent)
        assert process.wait(timeout=300) != 0
        assert not [pid for pid in started if psutil.pid_exists(pid)]
    except BaseException:  # where the test fails, its processes must not outlive it
        for pid in [process.pid, *started]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        raise
    finally:
        process.communicate()


def children_of(pid: int) -> list[int]:
    """The kernel's own list if there is one: psutil is too slow to come inside Popen.

    It reads all processes.
    """
    listed = Path(f"/proc/{pid}/task/{pid}/children")
    if listed.is_file():
        return [int(child) for child in listed.read_text().split()]
    return [child.pid for child in psutil.Process(pid).children()]


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("started", ["command", "server"])
def test_an_interrupt_during_a_start_leaves_no_process(
    tmp_path: Path, sent: signal.Signals, started: str
) -> None:
    """A signal leaves no child that runs before Popen has returned, when nobody knows it."""
    interrupt_inside(
        f"""
        def __init__(self, *arguments, **options):
            super().__init__(*arguments, **options)
            os.kill(os.getpid(), {int(sent)})
        """,
        SERVED.format(log=str(tmp_path / "log")) if started == "server" else WAITED,
    )


def test_an_interrupt_inside_popen_leaves_no_lock() -> None:
    """An interrupt where Popen holds its lock leaves it free, so that the process can be ended."""
    interrupt_inside(
        """
        polls = 0
        def poll(self):
            Interrupted.polls += 1
            if Interrupted.polls == 3:
                self._waitpid_lock.acquire()
                signal.raise_signal(signal.SIGTERM)
                self._waitpid_lock.release()
            return super().poll()
        """,
        WAITED,
    )


def interrupt_inside(methods: str, block: str) -> None:
    """Runs `block` with a Popen of these methods, which send the signal: no child may be left."""
    script = (
        BEGINNING + textwrap.indent(textwrap.dedent(methods), "    ") + ENDING.format(block=block)
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=300
    )
    assert done.stdout.splitlines()[-1:] == ["left: []"], done.stdout + done.stderr


BEGINNING = """
import os, signal, subprocess, sys
from pathlib import Path
import psutil
from trtspec.errors import termination_as_interrupt
from trtspec.launch import processes

signal.signal(signal.SIGINT, signal.default_int_handler)
class Interrupted(subprocess.Popen):
"""
ENDING = """
subprocess.Popen = Interrupted
try:
    with termination_as_interrupt(), {block}
except KeyboardInterrupt:
    print("left:", [process.pid for process in psutil.Process().children()])
"""
SERVED = """processes.served(["serve", "/nowhere"], "http://127.0.0.1:9", Path({log!r}), 9):
        raise AssertionError("served")"""
WAITED = """processes.child([sys.executable, "-m", "http.server", \
"--bind", "127.0.0.1", "0"]) as one:
        processes.wait(one)"""


def test_durations_read_well() -> None:
    assert [duration(s) for s in (2.34, 42.4, 125)] == ["2.3 s", "42 s", "2 min 05 s"]
