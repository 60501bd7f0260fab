"""The demo's machinery with real commands and a real server: failures speak, nothing is left running or overwritten."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import textwrap
import time
from dataclasses import asdict
from pathlib import Path

import psutil
import pytest

from tests.bench.conftest import STAND_IN, free_port
from trtspec.cli.demo import PORTS, prepare
from trtspec.cli.demo_first_answer import StreamedAnswer, question, verdict
from trtspec.cli.demo_process import Chain, duration, free_ports
from trtspec.errors import TrtspecError, UsageError


def chain(directory: Path) -> Chain:
    (directory / "logs").mkdir(parents=True, exist_ok=True)
    return Chain(directory, 3)


def test_a_command_is_printed_logged_and_timed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = chain(tmp_path)
    made.begin("Look", "at the version", 1)
    output = made.run(["--version"], "version", 1)
    assert output.startswith("trtspec ")
    printed = capsys.readouterr().out
    assert "[1/3] Look (about 1.0 s)" in printed and "$ trtspec --version" in printed
    assert made.steps[0].status == 0 and 0 < made.steps[0].seconds < 30
    assert (tmp_path / "logs" / "01-version.out").read_text() == output


def test_the_first_answer_says_how_much_faster_and_whether_the_text_is_the_same() -> None:
    plain = StreamedAnswer("plain", "a b c", 97, 96, 0.5, 4.5)
    eagle = StreamedAnswer("eagle", "a b c", 97, 32, 0.5, 2.5)
    found = {"answers": [asdict(plain), asdict(eagle)], "same_text": True}
    said = verdict(found)
    assert "plain: 97 tokens, 24 tokens/s, 1.00 tokens per pass" in said and "3.00 tokens per pass" in said
    assert said.endswith("the same text, 2.0 times as fast")
    assert "DIFFERENT" in verdict(found | {"same_text": False})
    assert question()["messages"][-1]["role"] == "user"


def test_a_failing_command_stops_the_chain_with_its_words(tmp_path: Path) -> None:
    made = chain(tmp_path)
    with pytest.raises(TrtspecError) as failure:
        made.run(["check", "127.0.0.1:9", "--against", "nowhere"], "check", 1)
    assert "status 2" in failure.value.message and "trtspec check 127.0.0.1:9" in failure.value.message


def test_a_server_that_dies_is_quoted(tmp_path: Path) -> None:
    made = chain(tmp_path)
    with (
        pytest.raises(TrtspecError, match="before it was ready"),
        made.server("x", ["/nowhere", "--backend", "reference"], free_port()),
    ):
        pass


def test_a_taken_port_is_named_before_work_begins(tmp_path: Path) -> None:
    port = free_port()
    process = subprocess.Popen([sys.executable, str(STAND_IN), str(port), "{}"])
    try:
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline:
            try:
                free_ports(port, 1)
                time.sleep(0.1)
            except TrtspecError as error:
                assert str(port) in error.message
                return
        raise AssertionError("the taken port was not seen")
    finally:
        process.terminate()
        process.wait()


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_leaves_no_process(tmp_path: Path, sent: signal.Signals) -> None:
    interrupt_a_chain(tmp_path, sent, 0.05)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_interrupts_at_any_moment_leave_no_process(tmp_path: Path) -> None:
    """A signal just before a blocking read was lost once in 250 times, another inside Popen once in 1,600."""
    moments = random.Random(0)
    for trial in range(400):
        interrupt_a_chain(tmp_path / str(trial), signal.SIGTERM, moments.choice([0, 0.002, 0.01]) * moments.random())


def interrupt_a_chain(directory: Path, sent: signal.Signals, delay: float) -> None:
    """The chain waits for a command while a server runs in its own session; one signal ends all three. It comes
    `delay` seconds after the command began."""
    script = textwrap.dedent(
        f"""
        import signal, subprocess, sys
        from pathlib import Path
        from trtspec.cli import demo_process
        from trtspec.cli.demo import termination_as_interrupt

        signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where a shell started the tests with &
        directory = Path({str(directory)!r})
        (directory / "logs").mkdir(parents=True)
        chain = demo_process.Chain(directory, 1)
        with termination_as_interrupt():
            server = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
            try:
                print(server.pid, flush=True)
                chain.run_module("http.server", ["--bind", "127.0.0.1", "0"], "wait", 1)
            finally:
                demo_process.stop(server)
        """
    )
    process = subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    started: list[int] = []
    try:
        assert process.stdout is not None
        server = int(process.stdout.readline())
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline and len(started) < 2:
            started = children_of(process.pid)
        assert server in started and len(started) == 2
        time.sleep(delay)
        process.send_signal(sent)
        assert process.wait(timeout=30) != 0
        assert not [pid for pid in started if psutil.pid_exists(pid)]
    except BaseException:  # where the test fails, its processes must not outlive it
        for pid in [process.pid, *started]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        raise
    finally:
        process.communicate()


def children_of(pid: int) -> list[int]:
    """From the kernel's own list where there is one: psutil reads all processes, too slow to come inside Popen."""
    listed = Path(f"/proc/{pid}/task/{pid}/children")
    if listed.is_file():
        return [int(child) for child in listed.read_text().split()]
    return [child.pid for child in psutil.Process(pid).children()]


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("started", ["command", "server"])
def test_an_interrupt_during_a_start_leaves_no_process(tmp_path: Path, sent: signal.Signals, started: str) -> None:
    """The signal comes when the child runs and Popen has not returned: the moment in which nobody knows the child."""
    script = textwrap.dedent(
        f"""
        import os, signal, subprocess
        from pathlib import Path
        import psutil
        from trtspec.cli import demo_process
        from trtspec.cli.demo import termination_as_interrupt

        signal.signal(signal.SIGINT, signal.default_int_handler)
        class Interrupted(subprocess.Popen):
            def __init__(self, *arguments, **options):
                super().__init__(*arguments, **options)
                os.kill(os.getpid(), {int(sent)})

        subprocess.Popen = Interrupted
        directory = Path({str(tmp_path)!r})
        (directory / "logs").mkdir()
        chain = demo_process.Chain(directory, 1)
        try:
            with termination_as_interrupt():
                if {started!r} == "server":
                    with chain.server("x", ["/nowhere"], {free_port()}):
                        raise AssertionError("served")
                chain.run_module("http.server", ["--bind", "127.0.0.1", "0"], "wait", 1)
        except KeyboardInterrupt:
            print("left:", [process.pid for process in psutil.Process().children()])
        """
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert done.stdout.splitlines()[-1:] == ["left: []"], done.stdout + done.stderr


def test_an_interrupt_inside_popen_leaves_no_lock(tmp_path: Path) -> None:
    """Raised where Popen holds its lock, the interrupt would leave it locked, and the process could not be ended."""
    script = textwrap.dedent(
        f"""
        import signal, subprocess
        from pathlib import Path
        import psutil
        from trtspec.cli import demo_process
        from trtspec.cli.demo import termination_as_interrupt

        class Interrupted(subprocess.Popen):
            polls = 0
            def poll(self):
                Interrupted.polls += 1
                if Interrupted.polls == 3:
                    self._waitpid_lock.acquire()
                    signal.raise_signal(signal.SIGTERM)
                    self._waitpid_lock.release()
                return super().poll()

        subprocess.Popen = Interrupted
        directory = Path({str(tmp_path)!r})
        (directory / "logs").mkdir()
        try:
            with termination_as_interrupt():
                demo_process.Chain(directory, 1).run_module("http.server", ["--bind", "127.0.0.1", "0"], "wait", 1)
        except KeyboardInterrupt:
            print("left:", [process.pid for process in psutil.Process().children()])
        """
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert done.stdout.splitlines()[-1:] == ["left: []"], done.stdout + done.stderr


def test_only_a_demo_directory_is_ever_emptied(tmp_path: Path) -> None:
    mine = tmp_path / "thesis"
    mine.mkdir()
    (mine / "chapter.txt").write_text("dear to me")
    with pytest.raises(UsageError):
        prepare(mine, force=False)
    with pytest.raises(TrtspecError, match="left alone"):
        prepare(mine, force=True)
    assert (mine / "chapter.txt").exists()
    fresh = tmp_path / "demo"
    prepare(fresh, force=False)
    (fresh / "old").write_text("x")
    with pytest.raises(UsageError):
        prepare(fresh, force=False)
    prepare(fresh, force=True)
    assert not (fresh / "old").exists() and (fresh / "logs").is_dir()


def test_durations_read_well() -> None:
    assert [duration(s) for s in (2.34, 42.4, 125)] == ["2.3 s", "42 s", "2 min 05 s"]


def lasting_ports() -> int:
    """The first of the demo's ports, none of which the system gives to an outgoing connection minutes later."""
    for first in range(20000 + random.randrange(5000), 32000, PORTS):
        with contextlib.suppress(TrtspecError):
            free_ports(first, PORTS)
            return first
    raise AssertionError("no ports are free")


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_quick_demo_runs_through(tmp_path: Path) -> None:
    """Every command of the chain, in order, to a report; the figures in it come out of the run's own files."""
    out = tmp_path / "demo"
    command = [sys.executable, "-m", "trtspec", "demo", "--quick", "-o", str(out), "--port", str(lasting_ports())]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    for stage in range(1, 10):
        assert f"[{stage}/9]" in done.stdout
    data = json.loads((out / "demo.json").read_text())
    greedy = json.loads((out / "bench-greedy" / "results.json").read_text())
    page = (out / "report.html").read_text()
    assert f"{greedy['acceptance_length']:.2f}" in page
    assert data["honesty"]["heldout_bits_per_byte"] > 0 and data["honesty"]["draft_over_target"] > 0
    lossless = next(r for entry in data["checks"] if entry["gate"] for r in entry["verdict"]["results"])
    assert lossless["name"] == "lossless" and lossless["status"] == "pass" and lossless["detail"]["compared"] > 0
    left = [p for p in psutil.process_iter(["cmdline"]) if str(out) in " ".join(p.info["cmdline"] or [])]
    assert not left
