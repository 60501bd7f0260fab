"""Every command ends by itself, with one of its own statuses and a named reason, whatever its input files are."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.bench.conftest import stand_in  # noqa: F401  # the server that bench and check are given
from tests.hostile.inputs import Case, Inputs

STATUSES = {0, 1, 2, 3, 4}
SECONDS = 5.0
SOME, ALL = 150, 2000
OTHERS = {"TRTSPEC_QUIET": "1", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TERM": "dumb"}


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    from tests.tiny import make_head, make_target

    target = make_target(tmp_path_factory.mktemp("pair") / "target")
    return target, make_head(tmp_path_factory.mktemp("pair") / "head", target, attention="mla")


@pytest.fixture(scope="module")
def server(stand_in) -> str:  # type: ignore[no-untyped-def]  # noqa: F811
    return str(stand_in(kind="reference"))


class Worker:
    """One process that runs cases; replaced when it dies."""

    def __init__(self) -> None:
        environ = {**os.environ, **OTHERS}
        words = [sys.executable, "-m", "tests.hostile.worker"]
        self.process = subprocess.Popen(
            words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environ, cwd=Path(__file__).parents[2]
        )

    def run(self, case: Case) -> dict[str, object]:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(json.dumps({"argv": case.argv, "out": str(case.directory)}) + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())  # type: ignore[no-any-return]

    def end(self) -> None:
        self.process.kill()
        self.process.wait()


@pytest.fixture
def worker() -> Iterator[Worker]:
    made = Worker()
    yield made
    made.end()


def complaint(case: Case, answer: dict[str, object]) -> str:
    """What is wrong with how a case ended, or ""."""
    out = case.directory.joinpath("stdout").read_bytes().decode(errors="replace")
    err = case.directory.joinpath("stderr").read_bytes().decode(errors="replace")
    last = (err.strip().splitlines() or [""])[0][:300]
    if answer["hung"]:
        return f"ran longer than {SECONDS:.0f} s"
    if answer["signal"] is not None or answer["status"] not in STATUSES:
        return f"signal {answer['signal']}, status {answer['status']}: {last}"
    if "Error: unexpected " in err or "TS-ERROR-UNEXPECTED" in out or "Traceback" in err:
        return last
    if answer["status"] != 0 and not err.strip() and not out.strip():
        return f"status {answer['status']} without a word"
    if "--json" in case.argv and answer["status"] != 0:
        try:
            json.loads(out)
        except ValueError:
            return f"--json printed no JSON: {out[:200]!r} {last}"
    return ""


def report(found: list[tuple[Case, str]]) -> str:
    lines = [f"{case.name[:90]} | trtspec {' '.join(case.argv)[-160:]} | {what}" for case, what in found]
    return f"{len(found)} ended badly:\n" + "\n".join(lines)


def run_in_worker(inputs: Inputs, worker: Worker, numbers: range) -> list[tuple[Case, str]]:
    found = []
    for number in numbers:
        case = inputs.case(number)
        answer = worker.run(case)
        what = complaint(case, answer)
        if what:
            found.append((case, what))
        _clean(case)
    return found


def run_as_processes(inputs: Inputs, numbers: range) -> list[tuple[Case, str]]:
    found = []
    for number in numbers:
        case = inputs.case(number)
        begun = time.monotonic()
        with (case.directory / "stdout").open("wb") as out, (case.directory / "stderr").open("wb") as err:
            words = [sys.executable, "-m", "trtspec", *case.argv]
            environ = {**os.environ, **OTHERS}
            try:
                status = subprocess.run(
                    words, stdin=subprocess.DEVNULL, stdout=out, stderr=err, env=environ, timeout=60, check=False
                ).returncode
            except subprocess.TimeoutExpired:
                status = None
        answer: dict[str, object] = {
            "status": status if status is None or status >= 0 else None,
            "signal": -status if status is not None and status < 0 else None,
            "hung": status is None,
            "seconds": time.monotonic() - begun,
        }
        what = complaint(case, answer)
        if what:
            found.append((case, what))
        _clean(case)
    return found


def _clean(case: Case) -> None:
    if not os.environ.get("TRTSPEC_KEEP_MALFORMED"):
        shutil.rmtree(case.directory, ignore_errors=True)


def test_some_malformed_inputs(tmp_path: Path, pair: tuple[Path, Path], server: str, worker: Worker) -> None:
    inputs = Inputs(tmp_path, *pair, server, seed=7)
    found = run_in_worker(inputs, worker, range(SOME - 5)) + run_as_processes(inputs, range(SOME - 5, SOME))
    assert not found, report(found)


@pytest.mark.slow
def test_all_malformed_inputs(tmp_path: Path, pair: tuple[Path, Path], server: str, worker: Worker) -> None:
    inputs = Inputs(tmp_path, *pair, server, seed=int(os.environ.get("TRTSPEC_SEED", "1")))
    found = run_in_worker(inputs, worker, range(ALL - ALL // 10))
    found += run_as_processes(inputs, range(ALL - ALL // 10, ALL))
    assert not found, report(found)
