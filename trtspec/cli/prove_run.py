"""Runs a proof: one command after the other, each noted in a journal when its output is kept, so that a killed run
resumes with the first command that has none. Nothing that it started outlives it."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

from trtspec import report
from trtspec.bench.prove import URL, WORK, ProveSetup, ProveStep, launches, prompts_of, steps_of
from trtspec.checkpoint.journal import Journal
from trtspec.cli.demo_process import child, duration, tail, wait
from trtspec.cli.prove_servers import end_left_over, memory_of, served, tied
from trtspec.errors import TrtspecError, UsageError


@dataclass
class ProofRun:
    """A proof under way in `directory`; `broken` holds what failed in this run, and why."""

    setup: ProveSetup
    directory: Path
    startup: float
    journal: Journal
    broken: dict[str, str] = field(default_factory=dict)

    @property
    def work(self) -> Path:
        return self.directory / "work"

    def done(self, name: str) -> bool:
        return name in self.journal.done

    def run(self, step: ProveStep, url: str = "") -> None:
        """One step. A status that does not count as done is noted and left for the next run."""
        words = [word.replace(URL, url).replace(WORK, str(self.work)) for word in step.words]
        log, errors = self.work / f"{step.name}.out", self.work / f"{step.name}.err"
        report.say(f"{step.name} (about {duration(step.seconds)})")
        began = time.monotonic()
        with (
            log.open("wb") as out,
            errors.open("wb") as err,
            child([sys.executable, "-m", step.module, *words], stdout=out, stderr=err, **tied()) as process,
        ):
            wait(process)
        if process.returncode in step.statuses:
            self.journal.record(step.name, status=process.returncode, seconds=round(time.monotonic() - began, 3))
        else:
            self.broken[step.name] = f"status {process.returncode}: {tail(errors.read_bytes())[-600:]}"
            report.say(f"{step.name} failed: {self.broken[step.name]}")

    def serve(self, launch: str) -> None:
        """One launch and the steps that need it, as far as they are not done."""
        name = f"serve-{launch}"
        left = [step for step in steps_of(self.setup) if step.launch == launch and not self.done(step.name)]
        if not left and self.done(name):
            return
        try:
            with served(self.setup, launch, self.work, self.startup) as (process, url, seconds):
                if not self.done(name):
                    self.journal.record(name, seconds=round(seconds, 3), **memory_of(process.pid))
                for step in left:
                    if process.poll() is not None:
                        raise TrtspecError(f"the server ended with status {process.returncode} while it was measured")
                    self.run(step, url)
        except TrtspecError as error:
            self.broken[name] = error.message
            report.say(f"{name} failed: {error.message}")


def run_proof(setup: ProveSetup, directory: Path, startup: float, restart: bool) -> ProofRun:
    """Runs the steps that are not done yet. Raises UsageError where `directory` holds anything but this proof."""
    journal = directory / "journal.jsonl"
    if not journal.exists() and directory.exists() and any(directory.iterdir()):
        raise UsageError(f"{directory} holds something else", "choose another -o")
    header = {"proof": json.loads(json.dumps(asdict(setup)))}
    with Journal(journal, header, restart=restart) as kept:
        run = ProofRun(setup, directory, startup, kept)
        prepare(run, restart)
        for step in steps_of(setup):
            if not step.launch and not run.done(step.name):
                run.run(step)
        for launch in launches(setup):
            run.serve(launch)
    return run


def prepare(run: ProofRun, restart: bool) -> None:
    """The work directory with the prompts that the proof makes; the server of a killed run is ended."""
    import shutil

    from trtspec.bench.datasets import load_dataset

    end_left_over(run.work)
    if restart:
        shutil.rmtree(run.work, ignore_errors=True)
    run.work.mkdir(parents=True, exist_ok=True)
    questions = [question.turns[0] for question in load_dataset(run.setup.dataset).questions]
    for name, rows in prompts_of(run.setup, questions).items():
        report.write_atomic(run.work / f"{name}.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
