"""Runs a proof's script and resumes it: a journal notes each step when its result is on the disk, so that the same
command after a kill resumes with the first step that has none."""

from __future__ import annotations

import hashlib
import shutil
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from trtspec import files, report
from trtspec.bench.check.rows import Row
from trtspec.bench.load.assemble import speedups
from trtspec.bench.prove.evidence import ProofEvidence, proof_html, sentence, step_times
from trtspec.bench.prove.script import PLAIN, SPECULATING, ProveSetup, Step, serve_words
from trtspec.bench.report.page import Section
from trtspec.bench.results import read_results
from trtspec.checkpoint.hub import resolve
from trtspec.checkpoint.identity import identity_digest
from trtspec.checkpoint.writer import Journal
from trtspec.errors import TrtspecError, UsageError
from trtspec.launch.preflight import read_gpus
from trtspec.launch.processes import duration, require_free_ports, run_trtspec, served

LEFT_OVER = 180.0  # seconds that the server of a killed run gets to end


def prove(
    setup: ProveSetup, steps: Sequence[Step], directory: Path, about: dict[str, Any], startup: float, restart: bool
) -> ProofEvidence:
    """Runs what is not done yet, then writes evidence.json and report.html. `about`: more that a resumed run must have
    in common with this one. `startup`: seconds for a server to become ready.

    Raises UsageError where `directory` holds anything but this proof, and TrtspecError for a step that fails."""
    path = directory / "journal.jsonl"
    patience = LEFT_OVER if path.exists() else 0.0
    if not path.exists() and directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise UsageError(f"{directory} holds something else", "choose another -o")
    identities = {name: _identity(name) for name in (setup.target, setup.head)}
    words = hashlib.sha256("\0".join(setup.serve_words).encode()).hexdigest()[:16]  # they may hold a key
    header = {"proof": asdict(setup) | {"serve_words": words}, "identities": identities, **about}
    with Journal(path, header, restart=restart, private=True) as journal:
        for name in (SPECULATING, PLAIN, "logs") if restart else ():
            shutil.rmtree(directory / name, ignore_errors=True)
        (directory / "logs").mkdir(exist_ok=True)
        done = [step for step in steps if step.name in journal.done and _result(step, directory)]
        if done:
            report.announce(f"already done: {', '.join(step.name for step in done)}")
        for launch in dict.fromkeys(step.launch for step in steps if step not in done):
            with ExitStack() as stack:
                if launch:
                    require_free_ports(setup.port, 1, patience)
                    _serve(setup, launch, journal, directory, startup, stack)
                for step in steps:
                    if step.launch == launch and step not in done:
                        _run(step, journal, directory)
        seconds = {name: entry["seconds"] for name, entry in journal.done.items()}
    found = {step.name: _result(step, directory) for step in steps}
    evidence = _evidence(setup, found, directory) | {"identities": identities, "seconds": seconds, **about}
    report.write_json(directory / "evidence.json", asdict(_typed(evidence)))
    write_page(directory, directory / "report.html")
    return _typed(evidence)


def write_page(proof: Path, page: Path, more: Sequence[Section] = ()) -> None:
    """The page of a finished proof, with `more` behind it."""
    spec, plain = (read_results(proof / launch) for launch in (SPECULATING, PLAIN))
    evidence = _typed(files.read_object(proof / "evidence.json"))
    report.write_atomic(page, proof_html(evidence, spec, plain, more))


def _typed(found: dict[str, Any]) -> ProofEvidence:
    return TypeAdapter(ProofEvidence).validate_python(found)


def _identity(name: str) -> str:
    """The fingerprint of a checkpoint that is on this machine; of any other its name is known."""
    path = resolve(name, allow_download=False).path
    return identity_digest(path)[:16] if path else "not on this machine"


def _result(step: Step, directory: Path) -> dict[str, Any]:
    """What a step left; {} where that cannot be read, as after a power loss: the step then runs again."""
    try:
        return files.read_object(directory / step.result)
    except (TrtspecError, OSError):
        return {}


def _serve(setup: ProveSetup, launch: str, journal: Journal, directory: Path, startup: float, stack: ExitStack) -> None:
    """A server for the life of `stack`."""
    report.announce(f"serve-{launch}: the target {'with its head' if launch == SPECULATING else 'alone'}")
    began, log = time.monotonic(), directory / "logs" / f"serve-{launch}.log"
    stack.enter_context(served(serve_words(setup, launch), setup.url, log, startup))
    journal.record(f"serve-{launch}", seconds=round(time.monotonic() - began, 1))
    report.announce(f"  ready after {duration(time.monotonic() - began)}")


def _run(step: Step, journal: Journal, directory: Path) -> None:
    report.announce(f"{step.name}: {step.why}")
    began = time.monotonic()
    status = run_trtspec(step.words, directory / (step.result if step.prints else f"logs/{step.name}.out"))
    found = _result(step, directory)
    if not found or status not in ((0, 3) if step.launch else (0,)):  # a finding is a result, but for a plan
        message = f"{step.name} ended with status {status}; its message is above"
        raise TrtspecError(message, "give the same command again to resume")
    journal.record(step.name, seconds=round(time.monotonic() - began, 1))
    verdict = f": {found['verdict']}" if "verdict" in found else ""
    length = f": {found['acceptance_length']:.2f} tokens per step" if found.get("drafted") else verdict
    report.announce(f"  done in {duration(time.monotonic() - began)}{length}")


def _evidence(setup: ProveSetup, found: dict[str, Any], directory: Path) -> dict[str, Any]:
    """The fields of ProofEvidence that the steps' results give."""
    spec, plain = (read_results(directory / launch) for launch in (SPECULATING, PLAIN))
    ups = [up for up in speedups([spec, plain]) if up.of == spec.name]
    verdict, message = found["score"]["verdict"], found["score"]["message"]
    invalid = {problem.code for run in (spec, plain) for problem in run.problems if problem.severity == "error"}
    if verdict == "SAFE" and (invalid or not ups):
        said = f"bench: {', '.join(sorted(invalid))}" if invalid else "the same output"
        verdict, message = "NOT PROVEN", f"NOT PROVEN: {said}"
    sound = not spec.degenerate()
    return {
        "verdict": verdict,
        "sentence": sentence(verdict, message, ups),
        "setup": replace(setup, serve_words=()),
        "draft_sampling": spec.server.draft_sampling,
        "hardware": [f"{gpu.name}, driver {gpu.driver}" for gpu in read_gpus() or ()],
        "acceptance_length": spec.acceptance_length if sound else None,
        "acceptance_interval": spec.acceptance_length_interval if sound else None,
        "steps": spec.steps,
        "speedups": ups,
        "step_times": step_times(spec, plain, found.get("plan", {}), setup.draft_len),
        "rows": [Row(**row) for row in found["score"]["results"]],
        "logs": sorted(f"logs/{path.name}" for path in (directory / "logs").iterdir()),
        "created": report.now(),
        "versions": report.versions(),
    }
