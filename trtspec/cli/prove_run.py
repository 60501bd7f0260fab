"""Runs a proof: one command after the other, each noted in a journal when its output is kept, so that a killed run
resumes with the first command that has none. Nothing that it started outlives it: the servers are started, waited for
and ended here, and the one that a killed run left behind. Verdict and page are made of the outputs of the steps."""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import httpx

from trtspec import files, report
from trtspec.bench.prove import (
    URL,
    WORK,
    ProveEvidence,
    ProveLine,
    ProveSetup,
    ProveStep,
    judge,
    launches,
    prompts_of,
    serve_words,
    speed_of,
    steps_of,
    taken,
)
from trtspec.bench.prove_page import prove_html
from trtspec.checkpoint.writer import Journal
from trtspec.cli.demo_process import child, duration, stop, tail, until_ready, wait
from trtspec.client.client import generate_once, health
from trtspec.errors import TrtspecError, UsageError
from trtspec.launch.preflight import used_memory
from trtspec.records import variable

LEFT_OVER = 180.0  # seconds that the server of a killed run gets to end
LIBC = ctypes.CDLL(None)
SMALL = 8 * 2**20  # bytes; up to this size a file is known by its hash, above by its size and the time of its change
# options of serve that a proof sets, or with which a launch would not be one server on this machine
OWN_OPTIONS = (
    *("--head", "--draft-len", "--backend", "--tp-size", "--host", "--port", "--config", "--dry-run"),
    *("--draft-sampling", "--disaggregated", "--role", "--nodes", "--gpus-per-node"),
    *("--launcher", "--launcher-args"),
)
# the same of trtllm-serve and vllm serve, in every spelling, without leading dashes and with dashes for underscores
ENGINE_OPTIONS = (
    *("tensor-parallel-size", "tp-size", "tp", "pipeline-parallel-size", "pp-size", "pp", "data-parallel-size", "dp"),
    *("context-parallel-size", "cp-size", "prefill-context-parallel-size", "pcp"),
    *("data-parallel-size-local", "dpl", "data-parallel-rank", "dpn", "data-parallel-start-rank", "dpr"),
    *("data-parallel-address", "dpa", "gpus-per-node", "nnodes", "n", "node-rank", "r", "headless", "grpc"),
    *("speculative-config", "sc", "spec-model", "spec-method", "spec-tokens", "config", "extra-llm-api-options"),
    *("server-role", "disagg-cluster-uri", "metadata-server-config-file"),
)


def refuse_own_options(words: Sequence[str]) -> None:
    """Raises UsageError for the first of a user's words for `serve` that would change what is proved. What follows a
    `--` among them is the engine's."""
    cut = list(words).index("--") if "--" in words else len(words)
    for at, word in enumerate(words):
        flag = word.partition("=")[0]
        name = flag.partition(".")[0].lstrip("-").replace("_", "-")
        if flag in OWN_OPTIONS if at < cut else flag.startswith("-") and name in ENGINE_OPTIONS:
            remedy = "leave it out; a proof sets head, draft length, GPUs and address of its servers by its own options"
            raise UsageError(f"{flag} cannot be passed to the servers of a proof", remedy)


def proof_header(setup: ProveSetup) -> dict[str, Any]:
    """What a proof is begun with, as its journal notes it: the options, the engine, and the files that they name. The
    words for the servers may hold a key, and are noted as a hash."""
    words = hashlib.sha256("\0".join(setup.serve_words).encode()).hexdigest()[:16]
    return {
        "proof": asdict(setup) | {"serve_words": words},
        "engine": engine_version(setup.backend),
        "files": files_of(setup),
    }


def engine_version(backend: str) -> str | None:
    """Of the engine that is installed here; the reference backend is trtspec itself."""
    from trtspec.trtllm.deployment import installed_version
    from trtspec.vllm import installed_vllm

    versions = {"trtllm": installed_version, "vllm": installed_vllm}
    return versions[backend]() if backend in versions else report.package_versions()["trtspec"]


def files_of(setup: ProveSetup) -> dict[str, str]:
    """By path, what tells each file from another: those of target, head and data set, and those that the words for the
    servers name, such as a chat template. What the hub names has none here."""
    names = (setup.target, setup.head, setup.dataset)
    named = [Path(name if name.startswith("/") else name.partition("=")[2]) for name in names]  # as `absolute` has them
    found = [file for path in named if path.is_absolute() for file in (path.iterdir() if path.is_dir() else [path])]
    for word in setup.serve_words:
        place = os.path.expanduser(word.partition("=")[2] if word.startswith("-") else word)
        if os.path.isfile(place):  # Path's own methods raise for a long text
            found.append(Path(place))
    marks = {}
    for file in found:
        if file.is_file() and not file.name.startswith("."):
            size, changed = file.stat().st_size, file.stat().st_mtime_ns
            small = size <= SMALL and os.access(file, os.R_OK)
            marks[str(file)] = report.file_sha256(file)[:16] if small else f"{size} bytes, changed at {changed} ns"
    return marks


def prove_all(setup: ProveSetup, directory: Path, startup: float, restart: bool) -> list[ProveLine]:
    """Runs what is not done yet, then writes verdict and page. `startup`: seconds for a server to become ready."""
    run = run_proof(setup, directory, startup, restart)
    evidence = evidence_of(run)
    lines = [
        *(ProveLine(name, "fail", why) for name, why in run.broken.items()),
        *(line for line in judge(evidence) if line.name not in run.broken),
    ]
    verdict = {"ok": not any(line.status == "fail" for line in lines), "results": [asdict(line) for line in lines]}
    made = {"verdict.json": report.json_text(verdict), "report.html": prove_html(evidence, lines)}
    for name, text in made.items():  # they quote the ends of logs
        with report.open_private(run.directory / name) as stream:
            stream.write(text.encode())
    return lines


@dataclass
class ProofRun:
    """A proof under way in `directory`; `broken` holds what failed in this run, and why."""

    setup: ProveSetup
    directory: Path
    startup: float
    journal: Journal
    broken: dict[str, str] = field(default_factory=dict)
    idle: list[int] | None = None  # bytes in use on each GPU before a launch, the least that was seen

    @property
    def work(self) -> Path:
        return self.directory / "work"

    def done(self, name: str) -> bool:
        return name in self.journal.done and not self.journal.done[name].get("lost")

    def note_lost(self) -> None:
        """Steps that the journal has as done, and whose output cannot be read any more, are to be run again."""
        for step in steps_of(self.setup):
            if self.done(step.name) and (
                missing := unreadable(self.work, step, self.journal.done[step.name]["status"])
            ):
                report.announce(f"{step.name} runs again: {missing}")
                self.journal.record(step.name, lost=True)

    def run(self, step: ProveStep, url: str = "") -> None:
        """One step. A status that does not count as done is noted and left for the next run."""
        words = [word.replace(URL, url).replace(WORK, str(self.work)) for word in step.words]
        log, errors = self.work / f"{step.name}.out", self.work / f"{step.name}.err"
        report.say(f"{step.name} (about {duration(step.seconds)})")
        began = time.monotonic()
        with (
            report.open_private(log) as out,
            report.open_private(errors) as err,
            child([sys.executable, "-m", "trtspec", *words], stdout=out, stderr=err, **tied()) as process,
        ):
            wait(process)
            os.fsync(out.fileno())
        missing = unreadable(self.work, step, process.returncode)
        if process.returncode in step.statuses and missing:
            self.broken[step.name] = f"status {process.returncode}, but {missing}"
            report.say(f"{step.name} failed: {self.broken[step.name]}")
        elif process.returncode in step.statuses:
            report.fsync_directory(self.work)
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
        self.idle = least(self.idle, used_memory())
        try:
            with served(self.setup, launch, self.work, self.startup) as (process, url, seconds):
                if not self.done(name):
                    self.journal.record(name, seconds=round(seconds, 3), **memory_of(process.pid, self.idle))
                for step in left:
                    if process.poll() is not None:
                        raise TrtspecError(f"the server ended with status {process.returncode} while it was measured")
                    self.run(step, url)
        except TrtspecError as error:
            self.broken[name] = error.message
            report.say(f"{name} failed: {error.message}")


def run_proof(setup: ProveSetup, directory: Path, startup: float, restart: bool) -> ProofRun:
    """Runs the steps that are not done yet. Raises UsageError where `directory` holds anything but this proof,
    begun with the same options, files and engine."""
    directory = directory.absolute()
    journal = directory / "journal.jsonl"
    if directory.exists() and not directory.is_dir():
        raise UsageError(f"{directory} is a file", "-o names the directory of the proof")
    if not journal.exists() and directory.exists() and any(directory.iterdir()):
        raise UsageError(f"{directory} holds something else", "choose another -o")
    with Journal(journal, proof_header(setup), restart=restart, private=True) as kept:
        run = ProofRun(setup, directory, startup, kept)
        prepare(run, restart)
        run.note_lost()
        for step in steps_of(setup):
            if not step.launch and not run.done(step.name):
                run.run(step)
        for launch in launches(setup):
            run.serve(launch)
    return run


def prepare(run: ProofRun, restart: bool) -> None:
    """The work directory with the prompts that the proof makes; the server of a killed run is ended."""
    import shutil

    from trtspec.bench.datasets import left_out, load_dataset, text_of

    end_left_over(run.work)
    if restart:
        shutil.rmtree(run.work, ignore_errors=True)
    run.work.mkdir(parents=True, exist_ok=True)
    questions = load_dataset(run.setup.dataset).questions
    texts = [text for question in questions if (text := text_of(question.first_request()[0][-1]))]
    if missing := left_out(questions, tools=False, pictures=False):
        report.announce(f"in the steps of prefix reuse and of long context, {missing}")
    if not texts:
        raise UsageError(f"no question of {run.setup.dataset} begins with words", "choose another --dataset")
    for name, rows in prompts_of(run.setup, texts).items():
        report.write_atomic(run.work / f"{name}.jsonl", "".join(json.dumps(row) + "\n" for row in rows))


@contextmanager
def served(
    setup: ProveSetup, launch: str, work: Path, startup: float
) -> Iterator[tuple[subprocess.Popen[bytes], str, float]]:
    """`trtspec serve` until the block ends: the process, its URL, and the seconds until it was ready. Raises
    TrtspecError where it ends, or is not ready after `startup` seconds."""
    port = free_port()
    words = ["serve", *serve_words(setup, launch, port)]
    log = work / f"serve-{launch}.log"
    report.say(f"trtspec serve, {launch}")
    began = time.monotonic()
    with (
        report.open_private(log) as stream,
        child([sys.executable, "-m", "trtspec", *words], stdout=stream, stderr=stream, **tied()) as process,
    ):
        note = {"pid": process.pid, "started": start_time(process.pid)}
        report.write_json(work / "server.json", note)
        url = f"http://127.0.0.1:{port}"
        until_ready(process, url, log, startup, generates)
        yield process, url, time.monotonic() - began
        stop(process)
    (work / "server.json").unlink(missing_ok=True)


async def generates(client: httpx.AsyncClient) -> None:
    """Raises RequestFailed until the server is healthy and a generation comes back."""
    await health(client)
    await generate_once(client)


def die_with_parent() -> None:
    """In a child between fork and exec: SIGTERM when its parent dies, even by SIGKILL (Linux's PR_SET_PDEATHSIG)."""
    LIBC.prctl(1, signal.SIGTERM)


def tied() -> dict[str, Any]:
    """Popen's options of every child; unlike the demo's commands, these may fetch a target from the hub. Variables that
    stand for an option of `serve` which a launch sets, such as a head, would reach the plain server too."""
    own = {variable("serve", flag) for flag in OWN_OPTIONS}
    kept = {name: value for name, value in os.environ.items() if name not in own}
    found: dict[str, Any] = {"env": {**kept, "PYTHONUNBUFFERED": "1", "TOKENIZERS_PARALLELISM": "false"}}
    return found | ({"preexec_fn": die_with_parent} if sys.platform == "linux" else {})


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def start_time(pid: int) -> float | None:
    import psutil

    try:
        return psutil.Process(pid).create_time()
    except psutil.Error:
        return None


def end_left_over(work: Path) -> None:
    """The server of a run that was killed holds the GPUs until it has ended. Raises TrtspecError when it does not."""
    path = work / "server.json"
    if not path.exists():
        return
    try:
        noted = files.read_object(path)
    except TrtspecError:
        noted = {}
    pid, started = noted.get("pid"), noted.get("started")
    deadline = time.monotonic() + LEFT_OVER
    while isinstance(pid, int) and started is not None and start_time(pid) == started:
        if time.monotonic() > deadline:
            raise TrtspecError(f"the server of an earlier run (process {pid}) does not end", f"kill {pid}")
        os.kill(pid, signal.SIGTERM)
        time.sleep(1.0)
    path.unlink(missing_ok=True)


def least(known: list[int] | None, seen: list[int] | None) -> list[int] | None:
    """Of each GPU the smaller figure: the server before may take a moment to give back what it held."""
    return [min(pair) for pair in zip(known, seen, strict=True)] if known and seen and len(known) == len(seen) else seen


def memory_of(pid: int, idle: list[int] | None) -> dict[str, Any]:
    """Bytes that a server took: of each GPU that it uses, where nvidia-smi tells, beyond those in use before it, and of
    its processes in the host's memory."""
    import psutil

    try:
        first = psutil.Process(pid)
        family = [first, *first.children(recursive=True)]
        resident = sum(process.memory_info().rss for process in family)
    except psutil.Error:
        resident = 0
    return {"per_gpu": taken(idle, used_memory()), "resident": resident}


def evidence_of(run: ProofRun) -> ProveEvidence:
    outputs = {step.name: found for step in steps_of(run.setup) if (found := _output(run, step)) is not None}
    served = launches(run.setup)
    speed = {launch: speed_of(found) for launch in served if (found := outputs.get(f"bench-{launch}"))}
    memory = {launch: run.journal.done[f"serve-{launch}"] for launch in served if run.done(f"serve-{launch}")}
    return ProveEvidence(run.setup, outputs, speed, memory)


def _output(run: ProofRun, step: ProveStep) -> Any:
    """The object that a step that is done left, if it leaves one."""
    path = result_file(run.work, step)
    if path is None or not run.done(step.name):
        return None
    try:
        return files.read_object(path)
    except (TrtspecError, OSError):
        return None


def result_file(work: Path, step: ProveStep) -> Path | None:
    """Where the JSON object of a step lies: the results.json of a directory, or what it wrote to its stdout."""
    if f"{WORK}/{step.name}" in step.words:
        return work / step.name / "results.json"
    return work / f"{step.name}.out" if "--json" in step.words else None


def unreadable(work: Path, step: ProveStep, status: int) -> str:
    """Which output of a step that ended with this status is missing or cannot be read, and why; "" where none is."""
    path = result_file(work, step)
    try:
        if path is not None:
            files.read_object(path)
        made = {a: b for a, b in zip(step.words, step.words[1:], strict=False)} if status == 0 else {}
        for flag in ("-o", "--record"):
            written = Path(made.get(flag, "").replace(WORK, str(work)))
            if flag in made and not written.is_dir() and not written.read_bytes():
                return f"{written.name} is empty"
    except FileNotFoundError as error:
        return f"{Path(error.filename).name} is missing"
    except (TrtspecError, OSError) as error:
        return str(error)
    return ""
