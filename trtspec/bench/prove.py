"""A proof of a target and its head: a script of plain trtspec commands, run and resumed; typed evidence; one page.

Two launches follow each other on the same GPUs. The speculating server comes first: what it said is then scored by the
target alone. A journal notes each step when its result is on the disk, so that the same command after a kill resumes
with the first step that has none.
"""

from __future__ import annotations

import hashlib
import shlex
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from pydantic import TypeAdapter

from trtspec import files, report
from trtspec.bench.check.rows import Row
from trtspec.bench.load.assemble import speedups
from trtspec.bench.report import bench
from trtspec.bench.report.page import Section, render
from trtspec.bench.results import BenchResults, LevelResult, SpeedUp, read_results
from trtspec.checkpoint.hub import resolve
from trtspec.checkpoint.identity import identity_digest
from trtspec.checkpoint.writer import Journal
from trtspec.errors import TrtspecError, UsageError, errors_in
from trtspec.foreign import PlainName
from trtspec.launch.preflight import read_gpus
from trtspec.launch.processes import duration, require_free_ports, run_trtspec, served
from trtspec.report import Table

SPECULATING, PLAIN = "spec", "plain"
CHECKED, RECORDED, SCORED = (
    20,
    11,
    8,
)  # questions of check at most, and how many requests it makes of each
LEFT_OVER = 180.0  # seconds that the server of a killed run gets to end


@dataclass(frozen=True)
class ProveSetup:
    """What is proved, and with how much. `serve_words` go to both launches; without `gpu` there is no plan. `card`:
    whether the head's published figures are shown beside the measured ones."""

    target: str
    head: str
    backend: str
    draft_len: int
    gpu: str | None
    gpus: int
    dataset: str
    samples: int
    max_tokens: int
    concurrency: tuple[int, ...]
    port: int
    accept_unmeasured: tuple[str, ...] = ()
    serve_words: tuple[str, ...] = ()
    thinking: str | None = None
    card: bool = False

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"


@dataclass(frozen=True)
class Step:
    """One command: `words` after `trtspec`, and why it runs. `launch` is the server that it asks, "" for none. Its JSON
    is `result`, a file of the proof; status 3 is a finding, not a failure. `tokens` are asked for at most."""

    name: str
    why: str
    words: tuple[str, ...]
    result: str
    launch: str = ""
    tokens: int = 0


def script(setup: ProveSetup, directory: Path) -> list[Step]:
    """All steps in their order. The tokens are those of questions with one turn."""
    levels = ("--concurrency", ",".join(map(str, setup.concurrency)))
    asked: tuple[str, ...] = (
        "--dataset",
        setup.dataset,
        "--samples",
        str(setup.samples),
        "--max-tokens",
        str(setup.max_tokens),
    )
    if setup.thinking:
        asked += ("--thinking", setup.thinking)
    if setup.card:
        asked += ("--card", setup.head)
    checked, most = min(setup.samples, CHECKED), min(setup.max_tokens, 128)
    recording = str(directory / "spec.jsonl")
    judged = ("--dataset", setup.dataset, "--samples", str(checked), "--max-tokens", str(most))
    accepted = tuple(
        word for row in setup.accept_unmeasured for word in ("--accept-unmeasured", row)
    )

    def bench_step(launch: str) -> Step:
        out = ("-o", str(directory / launch), "--resume")
        words = ("bench", f"{launch}={setup.url}", *asked, *levels, "--wait-ready", "7200", *out)
        return Step(
            f"bench-{launch}",
            "acceptance and speed",
            words,
            f"{launch}/results.json",
            launch,
            setup.samples * setup.max_tokens * len(setup.concurrency),
        )

    def check(name: str, why: str, launch: str, requests: int, *words: str) -> Step:
        words = ("check", setup.url, "--tokenizer", setup.target, *words, "--force", "--json")
        return Step(name, why, words, f"{name}.json", launch, requests * checked * most)

    plain_words = ("--score", recording, "--record", str(directory / "plain.jsonl"), *accepted)
    steps = [
        bench_step(SPECULATING),
        check("record", "what users get", SPECULATING, RECORDED, "--record", recording, *judged),
        bench_step(PLAIN),
        check("score", "whether the target alone says the same", PLAIN, SCORED, *plain_words),
    ]
    if setup.gpu is not None:
        gpus = ("--gpu", setup.gpu, "--gpus", str(setup.gpus))
        drafts = ("--max-draft", str(setup.draft_len))
        words = ("plan", setup.target, "--head", setup.head, *gpus, *levels, *drafts, "--json")
        steps.insert(0, Step("plan", "how long a step should take", words, "plan.json"))
    return steps


def serve_words(setup: ProveSetup, launch: str) -> tuple[str, ...]:
    """After `trtspec`. What the user passes comes last, since it may end in a `--` with options of the engine."""
    words = (
        "serve",
        setup.target,
        "--backend",
        setup.backend,
        *f"--host 127.0.0.1 --port {setup.port}".split(),
    )
    if setup.backend != "reference":
        words += ("--tp-size", str(setup.gpus))
    if launch == SPECULATING:
        words += ("--head", setup.head, "--draft-len", str(setup.draft_len))
        if setup.backend == "reference":  # as build-config sets it for the engines
            words += ("--draft-sampling", "probabilistic")
    return words + setup.serve_words


def shell_text(setup: ProveSetup, directory: Path, steps: Sequence[Step]) -> str:
    """The script for a shell: all that a proof does, but for resuming and the page."""
    lines, launch = [f"mkdir -p {shlex.quote(str(directory))}"], ""
    for step in steps:
        if step.launch != launch:
            lines += ["kill $! && wait $!"] if launch else []
            lines.append(f"trtspec {shlex.join(serve_words(setup, step.launch))} &")
            launch = step.launch
        into = f" > {shlex.quote(str(directory / step.result))}" if "--json" in step.words else ""
        lines.append(f"trtspec {shlex.join(step.words)}{into}")
    return "\n".join([*lines, "kill $!"]) + "\n"


# --- run and resume ---


def prove(
    setup: ProveSetup,
    steps: Sequence[Step],
    directory: Path,
    about: dict[str, Any],
    startup: float,
    restart: bool,
) -> ProofEvidence:
    """Runs what is not done yet, then writes evidence.json and report.html. `about`: more that a resumed run must have
    in common with this one. `startup`: seconds for a server to become ready.

    Raises UsageError where `directory` holds anything but this proof, and TrtspecError for a step that fails."""
    path = directory / "journal.jsonl"
    patience = LEFT_OVER if path.exists() else 0.0
    if (
        not path.exists()
        and directory.exists()
        and (not directory.is_dir() or any(directory.iterdir()))
    ):
        raise UsageError(f"{directory} holds something else", "choose another -o")
    paths = {name: resolve(name, weights=False).path for name in (setup.target, setup.head)}
    identities = {
        name: identity_digest(at)[:16] if at else "not on this machine"
        for name, at in paths.items()
    }
    words = hashlib.sha256("\0".join(setup.serve_words).encode()).hexdigest()[
        :16
    ]  # they may hold a key
    header = {"proof": asdict(setup) | {"serve_words": words}, "identities": identities, **about}
    with Journal(path, header, restart=restart, private=True) as journal:
        for name in (SPECULATING, PLAIN, "logs") if restart else ():
            report.remove_folder(directory, PlainName(name))
        for recording in directory.glob("*.part") if restart else ():
            report.remove_file(directory, PlainName(recording.name))
        with report.writing(directory):
            (directory / "logs").mkdir(exist_ok=True)
        done = [step for step in steps if step.name in journal.done and _result(step, directory)]
        if done:
            report.announce(f"already done: {', '.join(step.name for step in done)}")
        for launch in dict.fromkeys(step.launch for step in steps if step not in done):
            with ExitStack() as stack:
                if launch:
                    require_free_ports(setup.port, 1, patience)
                    what = (
                        "the target with its head" if launch == SPECULATING else "the target alone"
                    )
                    report.announce(f"serve-{launch}: {what}")
                    began, log = time.monotonic(), directory / "logs" / f"serve-{launch}.log"
                    stack.enter_context(served(serve_words(setup, launch), setup.url, log, startup))
                    journal.record(f"serve-{launch}", seconds=round(time.monotonic() - began, 1))
                    report.announce(f"  ready after {duration(time.monotonic() - began)}")
                for number, step in enumerate(steps, 1):
                    if step.launch == launch and step not in done:
                        report.announce(f"[{number}/{len(steps)}] {step.name}: {step.why}")
                        _run(step, journal, directory)
        seconds = {name: entry["seconds"] for name, entry in journal.done.items()}
    found = {step.name: _result(step, directory) for step in steps}
    evidence = gathered(setup, found, directory, identities=identities, seconds=seconds, **about)
    report.write_json(directory / "evidence.json", asdict(evidence))
    write_page(directory, directory / "report.html")
    return evidence


def _result(step: Step, directory: Path) -> dict[str, Any]:
    """What a step left; {} where that cannot be read, as after a power loss: the step then runs again."""
    try:
        return files.read_object(directory / step.result)
    except (TrtspecError, OSError):
        return {}


def _run(step: Step, journal: Journal, directory: Path) -> None:
    began = time.monotonic()
    printed = step.result if "--json" in step.words else f"logs/{step.name}.out"
    status = run_trtspec(step.words, directory / printed)
    found = _result(step, directory)
    if not found or status not in (
        (0, 3) if step.launch else (0,)
    ):  # a finding is a result, but for a plan
        message = f"{step.name} ended with status {status}; its message is above"
        raise TrtspecError(message, "give the same command again to resume")
    journal.record(step.name, seconds=round(time.monotonic() - began, 1))


# --- evidence and page ---


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """Milliseconds of one step at a concurrency, without and with drafts, measured and planned; None: not known."""

    concurrency: int
    plain_ms: float | None
    step_ms: float | None
    planned_plain_ms: float | None
    planned_step_ms: float | None


@dataclass(frozen=True, kw_only=True)
class ProofEvidence:
    """`setup` is without the words for the servers, which may hold a key. `identities`: fingerprints of the
    checkpoints; `seconds`: of each step and start; `logs`: files of the proof's directory."""

    verdict: str
    sentence: str
    setup: ProveSetup
    identities: dict[str, str]
    engine: str | None
    draft_sampling: str | None
    hardware: list[str]
    dataset_sha256: str
    acceptance_length: float | None
    acceptance_interval: list[float] | None
    steps: int | None
    speedups: list[SpeedUp]
    step_times: list[StepTime]
    rows: list[Row]
    seconds: dict[str, float]
    logs: list[str]
    created: str
    versions: dict[str, str]

    @property
    def proved(self) -> bool:
        """The same output, and slower at no load."""
        return self.verdict == "SAFE" and not slower(self.speedups)


def gathered(
    setup: ProveSetup, found: Mapping[str, Any], directory: Path, **more: Any
) -> ProofEvidence:
    """The evidence in the results of the steps, by their names; `more` are its other fields."""
    spec, plain = (read_results(directory / launch) for launch in (SPECULATING, PLAIN))
    ups = [up for up in speedups([spec, plain]) if up.of == spec.name]
    verdict, message = found["score"]["verdict"], found["score"]["message"]
    invalid = {problem.code for problem in errors_in([*spec.problems, *plain.problems])}
    if verdict == "SAFE" and (invalid or not ups):
        said = f"bench: {', '.join(sorted(invalid))}" if invalid else "the same output"
        verdict, message = "NOT PROVEN", f"NOT PROVEN: {said}"
    planned = {(point["concurrency"], point["draft_len"]): point["step_ms"]
               for point in found.get("plan", {}).get("points", ())}  # fmt: skip
    step_times = [
        StepTime(
            concurrency=fast.concurrency,
            plain_ms=_step_ms(slow, 1.0),
            step_ms=_step_ms(fast, fast.acceptance_length),
            planned_plain_ms=planned.get((fast.concurrency, 0)),
            planned_step_ms=planned.get((fast.concurrency, setup.draft_len)),
        )
        for fast, slow in zip(spec.concurrency, plain.concurrency, strict=True)
    ]
    sound = not spec.degenerate()
    return ProofEvidence(
        verdict=verdict,
        sentence=sentence(verdict, message, ups),
        setup=replace(setup, serve_words=()),
        draft_sampling=spec.server.draft_sampling,
        hardware=[f"{gpu.name}, driver {gpu.driver}" for gpu in read_gpus() or ()],
        acceptance_length=spec.acceptance_length if sound else None,
        acceptance_interval=spec.acceptance_length_interval if sound else None,
        steps=spec.steps,
        speedups=ups,
        step_times=step_times,
        rows=[Row(**row) for row in found["score"]["results"]],
        logs=sorted(f"logs/{path.name}" for path in (directory / "logs").iterdir()),
        created=report.now(),
        versions=report.versions(),
        **more,
    )


def _step_ms(level: LevelResult, length: float | None) -> float | None:
    """The time of a token after the first, times the tokens of a step."""
    gap = level.throughput.inter_token_s
    return gap.mean * length * 1000 if gap and length else None


def slower(speedups: Sequence[SpeedUp]) -> list[str]:
    """The loads at which the whole interval of the speed-up lies below 1."""
    return [up.level for up in speedups if up.ratio.high < 1]


def sentence(verdict: str, message: str, speedups: Sequence[SpeedUp]) -> str:
    """`SAFE: the same output, 1.40 times as fast (1.24 to 1.57) at concurrency 1, 1.28 (...) at concurrency 4`, or
    `SAFE but slower at concurrency 4: the same output, ...`."""
    said = message
    if verdict == "SAFE":
        loads = " and ".join(slower(speedups))
        said = f"SAFE{f' but slower at {loads}' if loads else ''}: the same output"
    if not speedups:
        return f"{said}; the speed was not measured"
    speeds = ", ".join(f"{up.ratio.value:.2f} ({up.ratio.words}) at {up.level}" for up in speedups)
    return f"{said}, {speeds.replace(' (', ' times as fast (', 1)}"


def write_page(proof: Path, page: Path, more: Sequence[Section] = ()) -> None:
    """The page of a finished proof, with `more` behind it."""
    spec, plain = (read_results(proof / launch) for launch in (SPECULATING, PLAIN))
    evidence = TypeAdapter(ProofEvidence).validate_python(
        files.read_object(proof / "evidence.json")
    )
    report.write_atomic(page, proof_html(evidence, spec, plain, more))


def proof_html(
    evidence: ProofEvidence,
    with_head: BenchResults,
    alone: BenchResults,
    more: Sequence[Section] = (),
) -> str:
    """The page of a proof: its verdict in a sentence, up to three figures, then speed, acceptance, the rows of check,
    and `more`. The results are bench's of either server."""
    # as if bench had measured both in one run, so that its sections show them side by side
    both = replace(with_head, endpoints={alone.name: alone}, speedups=evidence.speedups)
    speed, acceptance = bench.sections(both)[:2]
    rows = [
        [row.status, row.name, f"{row.seen} of {row.of}", (row.faults or [row.why])[0]]
        for row in evidence.rows
    ]
    same = Table(
        "Is the output the same?",
        ["", "row", "seen", "why"],
        rows,
        text_columns=frozenset({0, 1, 3}),
    )
    drawn = f" ({evidence.draft_sampling} where sampled)" if evidence.draft_sampling else ""
    times = [
        [
            str(at.concurrency),
            *map(bench.number, (at.planned_plain_ms, at.plain_ms, at.planned_step_ms, at.step_ms)),
        ]
        for at in evidence.step_times
        if at.planned_plain_ms
    ]
    columns = ["concurrency", "alone, planned", "alone", "with the head, planned", "with the head"]
    planned = Table("Milliseconds of one step", columns, times)
    colour: Literal["pass", "fail", "unmeasured"] = "pass" if evidence.proved else "unmeasured"
    if evidence.verdict == "NOT SAFE":
        colour = "fail"
    return render(
        f"trtspec prove: {evidence.setup.target} with {evidence.setup.head}",
        evidence.sentence,
        bench.figures(both),
        [replace(speed, tables=[*speed.tables, planned]), acceptance,
         Section(title=same.title, tables=[same]), *more],
        about=f"{evidence.setup.draft_len} drafts per step{drawn}. {bench.workload_line(with_head)}.",
        verdict=colour,
        created=evidence.created,
        versions=evidence.versions,
    )  # fmt: skip
