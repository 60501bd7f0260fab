"""A proof of a target and its head: a script of plain trtspec commands, run and resumed; typed
evidence; one page.

Where both servers fit at once, they are measured in alternating rounds. Else two launches follow
each other on the same GPUs, once or several times. What the speculating server said is then scored
by the target alone. A journal notes each step when its result is on the disk, so that the same
command after a kill resumes with the first step that has none.
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
from trtspec.bench.check.rows import GateRow
from trtspec.bench.report import bench
from trtspec.bench.report.page import Page, Section
from trtspec.bench.results import BenchResults, SpeedUp, read_results, speed_up
from trtspec.bench.statistics import MIN_ROUNDS
from trtspec.checkpoint.hub import resolve
from trtspec.checkpoint.identity import identity_digest
from trtspec.checkpoint.writer import Journal
from trtspec.errors import TrtspecError, UsageError, errors_in
from trtspec.launch.preflight import read_gpus
from trtspec.launch.processes import duration, require_free_ports, run_trtspec, served
from trtspec.report import Table

SPECULATING, PLAIN = "spec", "plain"
# by server: name and reason of what check does
CHECKS = {
    SPECULATING: ("record", "what users get"),
    PLAIN: ("score", "whether the target alone says the same"),
}
CHECKED, CHECK_TOKENS = 20, 128  # questions of check, and tokens of an answer, at most
STOP = "kill $(jobs -p) && wait"
REPEAT = "repeat the command as it was, or choose another -o"
MAX_ROUNDS = 8  # that the questions are divided into; more gain little
LEFT_OVER = 180.0  # seconds that the server of a killed run gets to end


@dataclass(frozen=True)
class ProveSetup:
    """What is proved, and with how much.

    `serve_words` go to all servers; without `gpu` there is no plan. `card`: whether the head's
    published figures are shown beside the measured ones. `launches`: of either server.
    """

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
    launches: int = 1

    @property
    def rounds(self) -> int:
        """As many as leave each enough questions for the highest load."""
        return max(MIN_ROUNDS, min(MAX_ROUNDS, self.samples // max(self.concurrency)))

    @property
    def groups(self) -> list[tuple[str, ...]]:
        """Names of the servers that run at once, whose rounds alternate, group after group."""
        found = list[tuple[str, ...]]()
        for number in range(1, self.launches + 1):
            suffix = f"-{number}" if number > 1 else ""
            names = [f"{name}{suffix}" for name in (SPECULATING, PLAIN)]
            at_once = self.backend == "reference"  # engines need all GPUs
            found += [tuple(names)] if at_once else [(name,) for name in names]
        return found

    @property
    def loads(self) -> str:
        return ",".join(map(str, self.concurrency))

    def port_of(self, server: str) -> int:
        return self.port if has_head(server) else self.port + 1

    def url(self, server: str) -> str:
        return f"http://127.0.0.1:{self.port_of(server)}"


def has_head(server: str) -> bool:
    """Whether it is a launch with the head."""
    return server.startswith(SPECULATING)


@dataclass(frozen=True)
class Step:
    """One command: `words` after `trtspec`, and why it runs.

    `servers`: names of all that run meanwhile. Its JSON is `result`, a file of the proof; status 3
    is a finding, not a failure.
    """

    name: str
    why: str
    words: tuple[str, ...]
    result: str
    servers: tuple[str, ...] = ()


def script(setup: ProveSetup, directory: Path) -> list[Step]:
    """All steps in their order."""
    steps = list[Step]()
    if setup.gpu is not None:
        gpus = ("--gpu", setup.gpu, "--gpus", str(setup.gpus))
        drafts = ("--max-draft", str(setup.draft_len), "--concurrency", setup.loads)
        words = ("plan", setup.target, "--head", setup.head, *gpus, *drafts, "--json")
        steps.append(Step("plan", "how long a step should take", words, "plan.json"))
    for group in setup.groups:
        steps.append(_bench(setup, directory, group))
        steps += [_check(setup, directory, group, name) for name in group if name in CHECKS]
    return steps


def _bench(setup: ProveSetup, directory: Path, group: tuple[str, ...]) -> Step:
    """Asks all questions of each server of a group, in alternating rounds."""
    first, *others = (f"{server}={setup.url(server)}" for server in group)
    words = ["bench", first]
    for other in others:
        words += ["--against-url", other]
    words += ["--dataset", setup.dataset, "--samples", str(setup.samples)]
    words += ["--max-tokens", str(setup.max_tokens)]
    if setup.thinking:
        words += ["--thinking", setup.thinking]
    if setup.card:
        words += ["--card", setup.head]
    words += ["--concurrency", setup.loads, "--rounds", str(setup.rounds), "--wait-ready", "7200"]
    words += ["-o", str(directory / group[0]), "--resume"]
    result = f"{group[0]}/results.json"
    return Step(f"bench-{group[0]}", "acceptance and speed", tuple(words), result, group)


def _check(setup: ProveSetup, directory: Path, group: tuple[str, ...], server: str) -> Step:
    """Records what the server with the head says, or scores it by the target alone."""
    name, why = CHECKS[server]
    recording, scores = str(directory / "spec.jsonl"), str(directory / "plain.jsonl")
    words = ["check", setup.url(server), "--tokenizer", setup.target]
    if server == SPECULATING:
        words += ["--record", recording, "--dataset", setup.dataset]
        words += ["--samples", str(min(setup.samples, CHECKED))]
        words += ["--max-tokens", str(min(setup.max_tokens, CHECK_TOKENS))]
    else:
        words += ["--score", recording, "--record", scores]
        for row in setup.accept_unmeasured:
            words += ["--accept-unmeasured", row]
    words += ["--force", "--json"]
    return Step(name, why, tuple(words), f"{name}.json", group)


def serve_words(setup: ProveSetup, server: str) -> tuple[str, ...]:
    """After `trtspec`.

    What the user passes comes last, since it may end in a `--` with options of the engine.
    """
    address = ("--host", "127.0.0.1", "--port", str(setup.port_of(server)))
    words: tuple[str, ...] = ("serve", setup.target, "--backend", setup.backend, *address)
    if setup.backend != "reference":
        words += ("--tp-size", str(setup.gpus))
    if has_head(server):
        words += ("--head", setup.head, "--draft-len", str(setup.draft_len))
        if setup.backend == "reference":  # as build-config sets it for the engines
            words += ("--draft-sampling", "probabilistic")
    return words + setup.serve_words


def shell_text(setup: ProveSetup, directory: Path, steps: Sequence[Step]) -> str:
    """The script for a shell: all that a proof does, but for resuming and the page."""
    lines, running = [f"mkdir -p {shlex.quote(str(directory))}"], tuple[str, ...]()
    for step in steps:
        if step.servers != running:
            lines += [STOP] if running else []
            lines += [f"trtspec {shlex.join(serve_words(setup, one))} &" for one in step.servers]
            running = step.servers
        into = f" > {shlex.quote(str(directory / step.result))}" if "--json" in step.words else ""
        lines.append(f"trtspec {shlex.join(step.words)}{into}")
    return "\n".join([*lines, STOP]) + "\n"


# --- run and resume ---


def prove(
    setup: ProveSetup,
    steps: Sequence[Step],
    directory: Path,
    about: dict[str, Any],
    startup: float,
) -> ProofEvidence:
    """Runs what is not done yet, then writes evidence.json and report.html.

    `about`: more that a resumed run must have in common with this one. `startup`: seconds for a
    server to become ready.

    Raises UsageError where `directory` holds anything but this proof, and TrtspecError for a step
    that fails.
    """
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
    with Journal(path, header, remedy=REPEAT, private=True) as journal:
        with report.writing(directory):
            (directory / "logs").mkdir(exist_ok=True)
        done = [step for step in steps if step.name in journal.done and _result(step, directory)]
        for step in done:
            report.announce(f"already done: {step.name}")
        for group in dict.fromkeys(step.servers for step in steps if step not in done):
            with ExitStack() as running:
                require_free_ports(setup.port, 2, patience)
                for server in group:
                    _launch(setup, server, directory, startup, running)
                for number, step in enumerate(steps, 1):
                    if step.servers == group and step not in done:
                        report.announce(f"[{number}/{len(steps)}] {step.name}: {step.why}")
                        _run(step, journal, directory)
    results = {step.name: _result(step, directory) for step in steps}
    evidence = gathered(setup, results, directory, identities=identities, **about)
    report.write_json(directory / "evidence.json", asdict(evidence))
    write_page(directory, directory / "report.html")
    return evidence


def _launch(
    setup: ProveSetup,
    server: str,
    directory: Path,
    startup: float,
    running: ExitStack,
) -> None:
    """Starts a server for the life of `running`."""
    report.announce(f"serve-{server}")
    began, log = time.monotonic(), directory / "logs" / f"serve-{server}.log"
    words, url = serve_words(setup, server), setup.url(server)
    running.enter_context(served(words, url, log, startup))
    report.announce(f"  ready after {duration(time.monotonic() - began)}")


def _result(step: Step, directory: Path) -> dict[str, Any]:
    """What a step left; {} where that cannot be read, as after a power loss: the step then runs
    again.
    """
    try:
        return files.read_object(directory / step.result)
    except (TrtspecError, OSError):
        return {}


def _run(step: Step, journal: Journal, directory: Path) -> None:
    printed = step.result if "--json" in step.words else f"logs/{step.name}.out"
    status = run_trtspec(step.words, directory / printed)
    allowed = (0, 3) if step.servers else (0,)  # a finding is a result, but for a plan
    if status not in allowed or not _result(step, directory):
        message = f"{step.name} ended with status {status}; its message is above"
        raise TrtspecError(message, "give the same command again to resume")
    journal.record(step.name)


# --- evidence and page ---


@dataclass(frozen=True, kw_only=True)
class ProofEvidence:
    """`setup` has `...` in place of the words for the servers, which may hold a key.

    `identities`: fingerprints of the checkpoints; `planned`: points of plan.
    """

    verdict: str
    sentence: str
    setup: ProveSetup
    identities: dict[str, str]
    engine: str | None
    hardware: list[str]
    dataset_sha256: str
    speedups: list[SpeedUp]
    planned: list[dict[str, Any]]
    rows: list[GateRow]
    created: str
    versions: dict[str, str]

    @property
    def proved(self) -> bool:
        """The same output, and slower at no load."""
        return self.verdict == "SAFE" and not slower(self.speedups)


def pooled_results(setup: ProveSetup, directory: Path) -> BenchResults:
    """All launches as one run of bench, so that its sections show them beside each other.

    The first has the head.
    """
    runs = [read_results(directory / group[0]) for group in setup.groups]
    endpoints = [endpoint for run in runs for endpoint in run.all]
    spec = [endpoint for endpoint in endpoints if has_head(endpoint.name)]
    plain = [endpoint for endpoint in endpoints if not has_head(endpoint.name)]
    ups = [speed_up(spec, plain, level.label) for level in runs[0].concurrency]
    return replace(
        runs[0],
        endpoints={endpoint.name: endpoint for endpoint in endpoints[1:]},
        speedups=[up for up in ups if up is not None],
        problems=[problem for run in runs for problem in run.problems],
    )


def gathered(
    setup: ProveSetup, found: Mapping[str, Any], directory: Path, **more: Any
) -> ProofEvidence:
    """The evidence in the results of the steps, by their names; `more` are its other fields."""
    results = pooled_results(setup, directory)
    ups = results.speedups
    verdict, message = found["score"]["verdict"], found["score"]["message"]
    invalid = {problem.code for problem in errors_in(results.problems)}
    if verdict == "SAFE" and (invalid or not ups):
        said = f"bench: {', '.join(sorted(invalid))}" if invalid else "the same output"
        verdict, message = "NOT PROVEN", f"NOT PROVEN: {said}"
    points = found.get("plan", {}).get("points", ())
    drafts = (0, setup.draft_len)
    return ProofEvidence(
        verdict=verdict,
        sentence=sentence(verdict, message, ups),
        setup=replace(setup, serve_words=("...",) if setup.serve_words else ()),
        hardware=[f"{gpu.name}, driver {gpu.driver}" for gpu in read_gpus() or ()],
        speedups=ups,
        planned=[point for point in points if point["draft_len"] in drafts],
        rows=[GateRow(**row) for row in found["score"]["results"]],
        created=report.now(),
        versions=report.versions(),
        **more,
    )


def slower(speedups: Sequence[SpeedUp]) -> list[str]:
    """The loads at which the whole interval of the speed-up lies below 1."""
    return [up.level for up in speedups if up.ratio.high < 1]


def sentence(verdict: str, message: str, speedups: Sequence[SpeedUp]) -> str:
    """`SAFE: the same output, 1.40 times as fast (1.24 to 1.57) at concurrency 1, 1.28 (...) at
    concurrency 4`, or `SAFE but slower at concurrency 4: the same output, ...`, and what the
    intervals are over.
    """
    said = message
    if verdict == "SAFE":
        loads = " and ".join(slower(speedups))
        said = f"SAFE{f' but slower at {loads}' if loads else ''}: the same output"
    if not speedups:
        return f"{said}; the speed was not measured"
    speeds = ", ".join(f"{up.ratio.value:.2f} ({up.ratio.words}) at {up.level}" for up in speedups)
    speeds = speeds.replace(" (", " times as fast (", 1)
    return f"{said}, {speeds}; 95 % intervals over {speedups[0].covered}"


def write_page(proof: Path, page: Path, more: Sequence[Section] = ()) -> None:
    """The page of a finished proof, with `more` behind it."""
    evidence = TypeAdapter(ProofEvidence).validate_python(
        files.read_object(proof / "evidence.json")
    )
    report.write_atomic(
        page, proof_html(evidence, pooled_results(evidence.setup, proof), proof, more)
    )


def proof_html(
    evidence: ProofEvidence, results: BenchResults, proof: Path, more: Sequence[Section] = ()
) -> str:
    """The page of a proof: its verdict in a sentence, up to three figures, then speed, acceptance,
    the rows of check, its commands, and `more`. `results`: of all launches.
    """
    speed, acceptance = bench.sections(results)[:2]
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
    colour: Literal["pass", "fail", "unmeasured"] = "pass" if evidence.proved else "unmeasured"
    if evidence.verdict == "NOT SAFE":
        colour = "fail"
    commands = shell_text(evidence.setup, proof, script(evidence.setup, proof))
    page = Page(
        f"trtspec prove: {evidence.setup.target} with {evidence.setup.head}",
        evidence.sentence,
        bench.figures(results),
        [
            replace(speed, tables=[*speed.tables, step_table(evidence.planned, results)]),
            acceptance,
            Section(title=same.title, tables=[same]),
            Section(title="Commands", code=commands),
            *more,
        ],
        subtitle=f"{evidence.setup.draft_len} drafts per step. {bench.workload_line(results)}.",
        verdict=colour,
        created=evidence.created,
        versions=evidence.versions,
    )
    return page.html()


def step_table(planned: Sequence[Mapping[str, Any]], results: BenchResults) -> Table:
    """The time of a step, planned and measured: between tokens after the first, times the tokens of
    a step.
    """
    rows = []
    for point in planned:
        drafts, load = point["draft_len"], point["concurrency"]
        side = results if drafts else results.endpoints[PLAIN]
        level = next(level for level in side.concurrency if level.concurrency == load)
        gap, length = level.throughput.inter_token_s, level.acceptance_length if drafts else 1.0
        measured = gap.mean * length * 1000 if gap and length else None
        rows.append(
            [str(load), str(drafts), bench.number(point["step_ms"]), bench.number(measured)]
        )
    columns = ["concurrency", "drafts", "planned", "measured"]
    return Table("Milliseconds of one step", columns, rows)
