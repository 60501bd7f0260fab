"""Random kills over the processes of a launch: nothing survives, and the message names the cause.

They come in every phase, and the status is right too. TRTSPEC_KILLS (20; the slow test: 1000) is
their number, TRTSPEC_SEED (1) where the sequence begins.
"""

import contextlib
import os
import random
import signal
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.cases import slow
from tests.command_line import SEED, alive, free_port, wait_for
from trtspec.errors import TrtspecError
from trtspec.launch.server_launch import Limits, LogPatterns, ServerAddress, ServerLaunch
from trtspec.launch.supervisor import run

SERVER = Path(__file__).with_name("ranks_server.py")
SUBREAPER = "another process ended the subreaper"


def launched(log: Path) -> int:
    """Runs a launch in a fork of this process, as a command would; returns its pid."""
    port = free_port()
    pid = os.fork()
    if pid:
        return pid
    status = 70
    try:
        os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT), 2)
        sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
        words = [sys.executable, str(SERVER), str(port)]
        limits = Limits(startup=300, stop_grace=60)
        endpoint, patterns = ServerAddress("127.0.0.1", port), LogPatterns("stand-in")
        status = run(ServerLaunch(argv=words, endpoint=endpoint, patterns=patterns, limits=limits))
    except TrtspecError as error:
        sys.stderr.write(f"{error.code}: {error.message}\n")
        status = error.exit_code
    finally:
        os._exit(status)


def logged(log: Path, text: str) -> str:
    wait_for(lambda: log.exists() and text in log.read_text())
    return log.read_text()


def kill_one(number: int, log: Path) -> str | None:
    """One launch and one kill; what was wrong, or None."""
    draw = random.Random(f"{SEED} {number}")
    own = launched(log)
    victim = draw.choice(("trtspec", "subreaper", "engine", "rank 0", "rank 1", "rank 2"))
    phase = draw.choice(("loading", "ready", "stopping"))
    sent = draw.choice(
        (signal.SIGKILL, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
        if victim == "trtspec"
        else (signal.SIGKILL,)
    )
    seen = logged(log, "pids")
    pids = [
        int(word)
        for word in next(line for line in seen.splitlines() if line.startswith("pids")).split()[1:]
    ]
    subreaper = psutil.Process(own).children()[0].pid
    if phase != "loading":
        logged(log, "ready on")
    if phase == "stopping":
        os.kill(own, signal.SIGTERM)
    time.sleep(draw.random() * 0.1)
    names = {"trtspec": own, "subreaper": subreaper, "engine": pids[0]}
    names |= {f"rank {at}": pid for at, pid in enumerate(pids[1:])}
    with contextlib.suppress(ProcessLookupError):
        os.kill(names[victim], sent)
    _, code = os.waitpid(own, 0)
    status = os.waitstatus_to_exitcode(code)
    with contextlib.suppress(AssertionError):
        wait_for(lambda: not any(map(alive, (subreaper, *pids))))
    left = [pid for pid in (subreaper, *pids) if alive(pid)]
    text = log.read_text()
    by_trtspec = -sent if sent == signal.SIGKILL else 128 + sent
    causes = {
        "trtspec": {by_trtspec: ""},
        "subreaper": {137: SUBREAPER},
        "engine": {137: "or the kernel killed it"},
    }
    expected = causes.get(victim, {1: " with status 1"})
    if (
        phase == "stopping"
    ):  # the kill may come late, and after the one of trtspec's own when the grace is over
        expected = {143: "", 137: "", **({} if victim == "engine" else expected)}
    fault = "survivors" if left else "status" if status not in expected else ""
    fault = fault or ("" if expected[status] in text else "cause")
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    told = (
        f"kill {number}: {sent.name} to {victim}, {phase}: status {status}, left {left}\n"
        f"{text[-600:]}"
    )
    return f"{fault}: {told}" if fault else None


@pytest.mark.timeout(7200)
@pytest.mark.parametrize("count", [20, slow(1000)])
@pytest.mark.clock
def test_nothing_survives_a_kill(count: int, tmp_path: Path) -> None:
    count = int(os.environ.get("TRTSPEC_KILLS", count))
    wrong = [
        found for number in range(count) if (found := kill_one(number, tmp_path / f"{number}.log"))
    ]
    print(f"\nseed {SEED}: {count} kills, {len(wrong)} wrong")
    assert not wrong, "\n".join(wrong[:5])
