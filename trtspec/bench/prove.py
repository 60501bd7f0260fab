"""Proves that a target with its head gives the same output, and how much faster it is.

A proof is a sequence of trtspec commands, whose results become evidence.json and one page. The
servers with and without the head are measured in alternating rounds if both can run at once. If
they cannot, they run one after the other on the same GPUs, once or several times. The target alone
scores the answers of the speculating server. A journal records each command when its result is on
the disk. After a kill, the same proof resumes with the first command that has no result.
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
from trtspec.bench.results import (
    BenchResults,
    EndpointResult,
    SpeedUp,
    read_results,
    speed_up,
)
from trtspec.bench.statistics import MIN_ROUNDS
from trtspec.checkpoint.hub import resolve
from trtspec.checkpoint.identity import identity_digest
from trtspec.checkpoint.writer import Journal
from trtspec.errors import Problem, TrtspecError, UsageError, errors_in
from trtspec.launch.preflight import read_gpus
from trtspec.launch.processes import duration, require_free_ports, run_trtspec, served
from trtspec.report import Table


def prove(
    setup: ProveSetup,
    steps: Sequence[Step],
    directory: Path,
    common: dict[str, Any],
    startup: float,
) -> ProofEvidence:
    """Runs the commands of a proof that have no result yet, then writes evidence.json and a page.

    Raises UsageError if `directory` contains anything but this proof. Raises TrtspecError if a
    command fails.

    Args:
        steps: All commands of the proof.
        directory: Directory of the results.
        common: Fields `engine` and `dataset_sha256`, which must be equal if a proof is resumed.
        startup: Seconds until a server must be ready.
    """
    path = directory / "journal.jsonl"
    port_wait_s = _port_wait(path)
    paths = {name: resolve(name, weights=False).path for name in (setup.target, setup.head)}
    identities = {
        name: identity_digest(checkpoint)[:16] if checkpoint else "not on this machine"
        for name, checkpoint in paths.items()
    }
    # only a digest, because the user's arguments for the servers may contain a key
    digest = hashlib.sha256("\0".join(setup.serve_words).encode()).hexdigest()
    proof = asdict(setup) | {"serve_words": digest[:16]}
    header = {"proof": proof, "identities": identities, **common}
    with Journal(path, header, remedy=REPEAT, private=True) as journal:
        with report.writing(directory):
            (directory / "logs").mkdir(exist_ok=True)
        done = [step for step in steps if step.name in journal.done and _result(step, directory)]
        for step in done:
            report.announce(f"already done: {step.name}")
        # the groups of servers that have commands left, each once and in order
        for group in dict.fromkeys(step.servers for step in steps if step not in done):
            with ExitStack() as running:
                require_free_ports(setup.port, 2, port_wait_s)
                for server in group:
                    _launch(setup, server, directory, startup, running)
                for number, step in enumerate(steps, 1):
                    if step.servers == group and step not in done:
                        report.announce(f"[{number}/{len(steps)}] {step.name}: {step.why}")
                        _run(step, journal, directory)
    results = {step.name: _result(step, directory) for step in steps}
    evidence = gathered(setup, results, directory, identities=identities, **common)
    report.write_json(directory / "evidence.json", asdict(evidence))
    write_page(directory, directory / "report.html")
    return evidence


SHUTDOWN_S = 180.0  # time that the server of a killed run gets to end
REPEAT = "repeat the command as it was, or choose another -o"


def _port_wait(journal: Path) -> float:
    """Returns the seconds for which a proof waits until the ports of its servers are free.

    Raises UsageError if the directory of the journal contains anything but a proof.
    """
    # the server of a killed run may still occupy the ports and GPUs
    if journal.exists():
        return SHUTDOWN_S
    directory = journal.parent
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise UsageError(f"{directory} holds something else", "choose another -o")
    return 0.0


def _launch(
    setup: ProveSetup,
    server: str,
    directory: Path,
    startup: float,
    running: ExitStack,
) -> None:
    """Starts a server, waits until it is ready and leaves its end to `running`.

    `startup`: seconds until the server must be ready.
    """
    report.announce(f"serve-{server}")
    began = time.monotonic()
    log = directory / "logs" / f"serve-{server}.log"
    words = serve_words(setup, server)
    running.enter_context(served(words, setup.url(server), log, startup))
    report.announce(f"  ready after {duration(time.monotonic() - began)}")


def _result(step: Step, directory: Path) -> dict[str, Any]:
    """Returns the JSON that a command wrote. {} if the file is missing or cannot be read.

    A command without a result runs again, for example after a power loss.
    """
    try:
        return files.read_object(directory / step.result)
    except (TrtspecError, OSError):
        return {}


def _run(step: Step, journal: Journal, directory: Path) -> None:
    """Runs a command of the proof and records its end. Raises TrtspecError if the command fails."""
    output_file = step.result if "--json" in step.words else f"logs/{step.name}.out"
    status = run_trtspec(step.words, directory / output_file)
    success: tuple[int, ...] = (0,)
    # status 3 is a finding: a result of bench and check, but a failure of plan, which has no server
    if step.servers:
        success = (0, 3)
    if status not in success or not _result(step, directory):
        message = f"{step.name} ended with status {status}; its message is above"
        raise TrtspecError(message, "give the same command again to resume")
    journal.record(step.name)


# --- the setup, and its script ---

SPECULATING = "spec"
PLAIN = "plain"
# by server: name and reason of its `check` command
CHECKS = {
    SPECULATING: ("record", "what users get"),
    PLAIN: ("score", "whether the target alone says the same"),
}
MAX_CHECK_QUESTIONS = 20
MAX_CHECK_TOKENS = 128  # limit of an answer in `check`
STOP = "kill $(jobs -p) && wait"  # shell command that ends the servers
MAX_ROUNDS = 8  # more rounds hardly improve the intervals


@dataclass(frozen=True)
class ProveSetup:
    """Settings of a proof: target, head, servers and questions.

    backend: server program, such as reference or trtllm
    draft_len: number of draft tokens per verification step
    gpu: name of the GPU for `plan`, None to leave `plan` out
    gpus: number of GPUs of each server
    samples: number of questions
    port: port of the server with the head. The server without the head uses the next port
    accept_unmeasured: names of rows of `check` that may be unmeasured
    serve_words: the user's own arguments of `trtspec serve`, for all servers
    card: whether the head's published figures are shown with the measured figures
    launches: number of times that each server is started and measured
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
        """Number of rounds of bench, small enough for each to have questions for the highest load.

        The smallest number is MIN_ROUNDS.
        """
        return max(MIN_ROUNDS, min(MAX_ROUNDS, self.samples // max(self.concurrency)))

    @property
    def groups(self) -> list[tuple[str, ...]]:
        """Names of the servers that run at once, group after group.

        bench alternates between the servers of a group.
        """
        groups: list[tuple[str, ...]] = []
        for number in range(1, self.launches + 1):
            names = [SPECULATING, PLAIN]
            if number > 1:
                names = [f"{name}-{number}" for name in names]
            # an engine needs all GPUs for itself
            if self.backend == "reference":
                groups.append(tuple(names))
            else:
                groups += [(name,) for name in names]
        return groups

    @property
    def loads(self) -> str:
        """Concurrency levels as an argument of bench, such as "1,4"."""
        return ",".join(map(str, self.concurrency))

    def port_of(self, server: str) -> int:
        """Returns the port of a server, given its name."""
        return self.port if has_head(server) else self.port + 1

    def url(self, server: str) -> str:
        """Returns the URL of a server, given its name."""
        return f"http://127.0.0.1:{self.port_of(server)}"


def has_head(server: str) -> bool:
    """Returns whether the server called `server` runs with the head."""
    return server.startswith(SPECULATING)


@dataclass(frozen=True)
class Step:
    """Command of a proof.

    name: name of the command in the proof
    why: reason for the command, in a few words
    words: arguments after `trtspec`
    result: path of its JSON result, relative to the directory of the proof
    servers: names of the servers that must run during the command
    """

    name: str
    why: str
    words: tuple[str, ...]
    result: str
    servers: tuple[str, ...] = ()


def script(setup: ProveSetup, directory: Path) -> list[Step]:
    """Returns all commands of a proof, in their order. `directory`: directory of the results."""
    steps: list[Step] = []
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
    """Returns the `bench` command that measures the servers of a group in alternating rounds."""
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
    """Returns the `check` command for a server.

    The server with the head records its answers. The other server scores them.
    """
    name, why = CHECKS[server]
    recording = str(directory / "spec.jsonl")
    scores = str(directory / "plain.jsonl")
    words = ["check", setup.url(server), "--tokenizer", setup.target]
    if server == SPECULATING:
        words += ["--record", recording, "--dataset", setup.dataset]
        words += ["--samples", str(min(setup.samples, MAX_CHECK_QUESTIONS))]
        words += ["--max-tokens", str(min(setup.max_tokens, MAX_CHECK_TOKENS))]
    else:
        words += ["--score", recording, "--record", scores]
        for row in setup.accept_unmeasured:
            words += ["--accept-unmeasured", row]
    words += ["--force", "--json"]
    return Step(name, why, tuple(words), f"{name}.json", group)


def serve_words(setup: ProveSetup, server: str) -> tuple[str, ...]:
    """Returns the arguments after `trtspec` that start a server.

    The user's own arguments come last, because they may end in a `--` with options of the engine.
    """
    address = ("--host", "127.0.0.1", "--port", str(setup.port_of(server)))
    words: tuple[str, ...] = ("serve", setup.target, "--backend", setup.backend, *address)
    if setup.backend != "reference":
        words += ("--tp-size", str(setup.gpus))
    if has_head(server):
        words += ("--head", setup.head, "--draft-len", str(setup.draft_len))
        # the same draft sampling as build-config sets for the engines
        if setup.backend == "reference":
            words += ("--draft-sampling", "probabilistic")
    return words + setup.serve_words


def shell_text(setup: ProveSetup, directory: Path, steps: Sequence[Step]) -> str:
    """Returns a shell script with the commands of a proof. It does not resume and has no page."""
    lines = [f"mkdir -p {shlex.quote(str(directory))}"]
    running: tuple[str, ...] = ()
    for step in steps:
        if step.servers != running:
            if running:
                lines.append(STOP)
            for server in step.servers:
                lines.append(f"trtspec {shlex.join(serve_words(setup, server))} &")
            running = step.servers
        line = f"trtspec {shlex.join(step.words)}"
        if "--json" in step.words:
            line += f" > {shlex.quote(str(directory / step.result))}"
        lines.append(line)
    return "\n".join([*lines, STOP]) + "\n"


# --- evidence and page ---


@dataclass(frozen=True, kw_only=True)
class ProofEvidence:
    """Evidence of a proof: the contents of evidence.json.

    verdict: SAFE, NOT SAFE or NOT PROVEN
    sentence: verdict with the speed-ups
    setup: settings, with "..." in place of the user's arguments, which may contain a key
    identities: digests of the checkpoints by name
    hardware: name and driver of each GPU
    speedups: speed with the head over the speed without it, by load
    planned: times of a verification step that `plan` expects, by load and draft length
    rows: rows of `check`
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
        """Whether the output is the same and no load is significantly slower."""
        return self.verdict == "SAFE" and not slower(self.speedups)


def gathered(
    setup: ProveSetup, step_results: Mapping[str, Any], directory: Path, **more: Any
) -> ProofEvidence:
    """Returns the evidence from the results of all commands.

    `step_results`: JSON result by name of the command. `more`: other fields of the evidence.
    """
    results = pooled_results(setup, directory)
    speedups = results.speedups
    score = step_results["score"]
    verdict = score["verdict"]
    message = score["message"]
    invalid = {problem.code for problem in errors_in(results.problems)}
    # without valid speeds, the proof is incomplete
    if verdict == "SAFE" and (invalid or not speedups):
        verdict = "NOT PROVEN"
        message = "NOT PROVEN: the same output"
        if invalid:
            message = f"NOT PROVEN: bench: {', '.join(sorted(invalid))}"
    points = step_results.get("plan", {}).get("points", ())
    drafts = (0, setup.draft_len)
    shown_setup = setup
    if setup.serve_words:
        shown_setup = replace(setup, serve_words=("...",))
    return ProofEvidence(
        verdict=verdict,
        sentence=sentence(verdict, message, speedups),
        setup=shown_setup,
        hardware=[f"{gpu.name}, driver {gpu.driver}" for gpu in read_gpus() or ()],
        speedups=speedups,
        planned=[point for point in points if point["draft_len"] in drafts],
        rows=[GateRow(**row) for row in score["results"]],
        created=report.now(),
        versions=report.versions(),
        **more,
    )


def pooled_results(setup: ProveSetup, directory: Path) -> BenchResults:
    """Reads the results of all launches and returns them as one run of bench.

    The report of bench then shows all launches in the same tables. The first endpoint has the head.
    """
    runs = [read_results(directory / group[0]) for group in setup.groups]
    endpoints: list[EndpointResult] = []
    problems: list[Problem] = []
    for run in runs:
        endpoints += run.all
        problems += run.problems
    with_head = [endpoint for endpoint in endpoints if has_head(endpoint.name)]
    plain = [endpoint for endpoint in endpoints if not has_head(endpoint.name)]
    gains = [speed_up(with_head, plain, level.label) for level in runs[0].concurrency]
    return replace(
        runs[0],
        endpoints={endpoint.name: endpoint for endpoint in endpoints[1:]},
        speedups=[gain for gain in gains if gain is not None],
        problems=problems,
    )


def slower(speedups: Sequence[SpeedUp]) -> list[str]:
    """Labels of the loads at which the whole interval of the speed-up is below 1."""
    return [gain.level for gain in speedups if gain.ratio.high < 1]


def sentence(verdict: str, message: str, speedups: Sequence[SpeedUp]) -> str:
    """Returns a sentence with the verdict, and the speed-up at each load with its interval.

    An example is "SAFE: the same output, 1.40 times as fast (1.24 to 1.57) at concurrency 1".
    `message`: sentence for a verdict other than SAFE.
    """
    output = message
    if verdict == "SAFE":
        output = "SAFE: the same output"
        loads = " and ".join(slower(speedups))
        if loads:
            output = f"SAFE but slower at {loads}: the same output"
    if not speedups:
        return f"{output}; the speed was not measured"
    gains = [f"{gain.ratio.value:.2f} ({gain.ratio.words}) at {gain.level}" for gain in speedups]
    # only the first figure has the words, so that the sentence is short
    speeds = ", ".join(gains).replace(" (", " times as fast (", 1)
    return f"{output}, {speeds}; 95 % intervals over {speedups[0].covered}"


def write_page(proof: Path, page: Path, more: Sequence[Section] = ()) -> None:
    """Writes the page of a finished proof.

    `proof`: directory of the proof. `page`: HTML file. `more`: sections at the end of the page.
    """
    values = files.read_object(proof / "evidence.json")
    evidence = TypeAdapter(ProofEvidence).validate_python(values)
    results = pooled_results(evidence.setup, proof)
    report.write_atomic(page, proof_html(evidence, results, proof, more))


def proof_html(
    evidence: ProofEvidence, results: BenchResults, proof: Path, more: Sequence[Section] = ()
) -> str:
    """Returns the page of a proof: a sentence, up to three figures, and sections.

    The sections are speed, acceptance, the rows of `check`, the commands of the proof, and `more`.
    `results`: results of all launches as one run. `proof`: directory of the proof.
    """
    setup = evidence.setup
    speed, acceptance = bench.sections(results)[:2]
    step_times = step_table(evidence.planned, results)
    rows = []
    for row in evidence.rows:
        why = (row.faults or [row.why])[0]
        rows.append([row.status, row.name, f"{row.seen} of {row.of}", why])
    columns = ["", "row", "seen", "why"]
    gate = Table("Is the output the same?", columns, rows, text_columns=frozenset({0, 1, 3}))
    verdict: Literal["pass", "fail", "unmeasured"] = "unmeasured"
    if evidence.proved:
        verdict = "pass"
    elif evidence.verdict == "NOT SAFE":
        verdict = "fail"
    commands = shell_text(setup, proof, script(setup, proof))
    page = Page(
        f"trtspec prove: {setup.target} with {setup.head}",
        evidence.sentence,
        bench.figures(results),
        [
            replace(speed, tables=[*speed.tables, step_times]),
            acceptance,
            Section(title=gate.title, tables=[gate]),
            Section(title="Commands", code=commands),
            *more,
        ],
        subtitle=f"{setup.draft_len} drafts per step. {bench.workload_line(results)}.",
        verdict=verdict,
        created=evidence.created,
        versions=evidence.versions,
    )
    return page.html()


def step_table(planned: Sequence[Mapping[str, Any]], results: BenchResults) -> Table:
    """Table of the planned and measured time of a verification step, in milliseconds.

    The measured time is the mean time between tokens, multiplied by the tokens per step. `planned`:
    entries of `plan` by load and draft length.
    """
    rows = []
    for point in planned:
        draft_len = point["draft_len"]
        load = point["concurrency"]
        endpoint: EndpointResult = results
        if not draft_len:
            endpoint = results.endpoints[PLAIN]
        level = next(level for level in endpoint.concurrency if level.concurrency == load)
        inter_token_s = level.throughput.inter_token_s
        tokens_per_step: float | None = 1.0
        if draft_len:
            tokens_per_step = level.acceptance_length
        measured_ms = None
        if inter_token_s and tokens_per_step:
            measured_ms = inter_token_s.mean * tokens_per_step * 1000
        times = [bench.number(point["step_ms"]), bench.number(measured_ms)]
        rows.append([str(load), str(draft_len), *times])
    columns = ["concurrency", "drafts", "planned", "measured"]
    return Table("Milliseconds of one step", columns, rows)
