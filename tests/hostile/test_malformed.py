"""Every command ends by itself with a status of its own and a named reason, on any input files.

TRTSPEC_SEED chooses other inputs for the slow test (1 without), TRTSPEC_KEEP_MALFORMED=1 keeps the
files of all cases.
"""

import json
import os
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.bench.conftest import stand_in  # noqa: F401  # the server that bench and check are given
from tests.command_line import SEED
from tests.hostile.inputs import Case, Inputs

pytestmark = pytest.mark.clock
STATUSES = {0, 1, 2, 3, 4}
SLOW = [pytest.mark.slow, pytest.mark.timeout(3600)]
EVERY = 10  # each tenth case is a process of its own
OTHERS = dict.fromkeys(("TRTSPEC_QUIET", "OMP_NUM_THREADS", "HF_HUB_OFFLINE"), "1")
OTHERS |= {
    "TERM": "dumb",
    "PYTHONDONTWRITEBYTECODE": "",
}  # compiling installed packages is no command's time


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    from tests.tiny import make_head, make_target

    target = make_target(tmp_path_factory.mktemp("pair") / "target")
    return target, make_head(tmp_path_factory.mktemp("pair") / "head", target, attention="mla")


@pytest.fixture(scope="module")
def server(stand_in) -> str:  # type: ignore[no-untyped-def]  # noqa: F811
    return str(stand_in(kind="reference"))


class Runner:
    """Runs cases through a worker, and keeps how they ended.

    Each bad end is printed when it is found.
    """

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.statuses: Counter[object] = Counter()
        self.commands: Counter[str] = Counter()
        self.processes = 0
        self.longest = {
            "cpu": 0.0,
            "wall": 0.0,
        }  # of the forked ones; a fresh process loads libraries besides
        self.bad: list[str] = []

    def run(self, inputs: Inputs, count: int) -> None:
        for number in range(count):
            case = inputs.case(number)
            fresh = number % EVERY == EVERY - 1
            answer = self.answer(case, fresh)
            self.processes += fresh
            self.statuses[answer["status"]] += 1
            self.commands[case.argv[0]] += 1
            if not fresh:
                self.longest = {
                    key: max(before, answer[key]) for key, before in self.longest.items()
                }
            what = complaint(case, answer)
            if what:
                self.bad.append(
                    f"{number}: {case.name[:90]} | trtspec {' '.join(case.argv)[-160:]} | {what}"
                )
                print(self.bad[-1], flush=True)
            if not os.environ.get("TRTSPEC_KEEP_MALFORMED"):
                shutil.rmtree(case.directory, ignore_errors=True)

    def answer(self, case: Case, fresh: bool) -> dict:  # type: ignore[type-arg]
        assert self.process.stdin is not None and self.process.stdout is not None
        request = {"argv": case.argv, "out": str(case.directory), "process": fresh}
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())  # type: ignore[no-any-return]

    def ended(self, place: Path, *words: object) -> tuple[int | None, str]:
        """A command's status, and the fault in its end; `place` gets its stdout and stderr."""
        case = Case(place.name, [str(word) for word in words], place)
        answer = self.answer(case, False)
        return answer["status"], complaint(case, answer)

    def report(self) -> str:
        statuses = dict(sorted(self.statuses.items(), key=str))
        lines = [
            (
                f"{self.statuses.total()} inputs, {self.processes} processes, "
                f"statuses {statuses}, {len(self.bad)} bad"
            ),
            f"commands {dict(sorted(self.commands.items()))}",
            (
                f"longest {self.longest['cpu']:.1f} s of the processor, "
                f"{self.longest['wall']:.1f} s in all"
            ),
        ]
        return "\n".join([*lines, *self.bad])


@pytest.fixture
def runner() -> Iterator[Runner]:
    words = [sys.executable, "-m", "tests.hostile.worker"]
    root, environ = Path(__file__).parents[2], os.environ | OTHERS
    process = subprocess.Popen(
        words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environ, cwd=root
    )
    yield Runner(process)
    process.kill()
    process.wait()


def complaint(case: Case, answer: dict[str, object]) -> str:
    """What is wrong with how a case ended, or ""."""
    out = case.directory.joinpath("stdout").read_bytes().decode(errors="replace")
    err = case.directory.joinpath("stderr").read_bytes().decode(errors="replace")
    first = (err.strip().splitlines() or [""])[0][:300]
    if answer["hung"]:
        return f"hung: {answer['cpu']:.1f} s of the processor, {answer['wall']:.1f} s in all"
    if answer["signal"] is not None or answer["status"] not in STATUSES:
        return f"signal {answer['signal']}, status {answer['status']}: {first}"
    if "Error: unexpected " in err or "TS-ERROR-UNEXPECTED" in out or "Traceback" in err:
        return first
    if answer["status"] != 0 and not err.strip() and not out.strip():
        return f"status {answer['status']} without a word"
    if "--json" in case.argv:
        try:
            json.loads(out)
        except ValueError:
            return f"--json printed no JSON: {out[:200]!r} {first}"
    return ""


@pytest.mark.parametrize(("seed", "count"), [(7, 10), pytest.param(SEED, 2000, marks=SLOW)])
def test_malformed_inputs(
    tmp_path: Path, pair: tuple[Path, Path], server: str, runner: Runner, seed: int, count: int
) -> None:
    runner.run(Inputs(tmp_path, *pair, server, seed=seed), count)
    print(f"\nseed {seed}: {runner.report()}")
    assert not runner.bad, runner.report()
