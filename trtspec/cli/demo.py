"""Defines `trtspec demo`, which runs the whole workflow on a small Kimi model.

The workflow consists of ordinary trtspec commands. The result is a report with a proof.
"""

from __future__ import annotations

import asyncio
import shlex
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from trtspec import data_files, files, report
from trtspec.client.client import Answer, RequestSampling, chat_body, new_client, stream_answer
from trtspec.errors import CheckFailed, TrtspecError, UsageError, termination_as_interrupt
from trtspec.foreign import PlainName
from trtspec.launch import processes
from trtspec.records import ForceOption, option

STAGES = 6
# names of the files and folders that a demo writes into its directory
OUTPUT_NAMES = (
    "logs",
    "nvfp4",
    "answers.jsonl",
    ".answers.jsonl.synthesize",
    "answers.jsonl.provenance.json",
    "head",
    "bench",
    "proof",
    "extra-llm-api-config.yml",
    "report.html",
)
NANO = "kimi-nano"  # target in the package
SHIPPED = "kimi-nano-eagle3"  # head in the package
REAL_TARGET = "nvidia/Kimi-K2.5-NVFP4"
REAL_HEAD = "nvidia/Kimi-K2.5-Eagle3"
ANSWERS = "900"  # conversations for training
ANSWER_TOKENS = "96"
BATCH = "32"  # requests in flight
DRAFTS = "2"  # tokens drafted per verification step
# Small batches, because the data is small. One training-time-test step per drafted token.
TRAINING = (
    f"--batch-size 4 --lr 0.004 --epochs 3 --ttt-steps {DRAFTS} --acceptance-prompts 8".split()
)
COMPARED = shlex.split("--samples 32 --max-tokens 96 --concurrency 4")  # options of `bench`
# options of `prove`
PROVED = shlex.split("--samples 32 --max-tokens 96 --concurrency 1,4 --accept-slower")
# the first answer is long enough to watch its speed
QUESTION = "Tell me a short story about Marcus, Yvonne and a mushroom in Coppermouth."
TOKENS = 160
PLAIN = "plain"  # name of the server without a head
SERVER_START_S = 180  # seconds within which a server must be ready


@dataclass(frozen=True, kw_only=True)
class DemoOptions:
    """Options of `trtspec demo`."""

    output: Annotated[Path, option("Directory for everything the demo writes.", "-o")] = Path(
        "trtspec-demo"
    )
    port: Annotated[
        int, option("First of two consecutive ports on 127.0.0.1.", min=1, max=65000)
    ] = 8310
    force: ForceOption = False


def demo(options: DemoOptions) -> None:
    """Run the whole workflow on a small Kimi-shaped model on this CPU, and write a report.

    The first stage streams an answer with and without speculation. All other stages are ordinary
    trtspec commands: inspect, quantize, synthesize, train, bench, prove, build-config, lint, serve.
    Takes about seven minutes on two cores.
    """
    from trtspec.verbs.doctor import require

    require("demo")
    prepare(options.output, options.force)
    processes.require_free_ports(options.port, 2)
    run = Demo(options.output, options.port)
    with termination_as_interrupt():
        run.all_stages()
    page = (options.output / "report.html").resolve()
    run.say(f"\n{NANO} with {SHIPPED}: {run.evidence['sentence']}")
    run.say(f"{processes.duration(run.seconds)} in all. Report: {page}")
    if not run.evidence["ok"]:
        raise CheckFailed("the demo ran to its end, but its proof failed", f"see {page}")


def prepare(output: Path, force: bool) -> None:
    """Creates the directory of a demo, with an empty folder `logs`.

    With `force`, removes the files of an earlier demo. Raises UsageError if the directory contains
    a file that no demo writes, or if an earlier demo is there and `force` is false.
    """
    present = sorted(path.name for path in output.iterdir()) if output.is_dir() else []
    foreign = [name for name in present if name not in OUTPUT_NAMES]
    if foreign:
        message = f"{output} holds {foreign[0]}, which a demo did not write"
        raise UsageError(message, "choose another `output`")
    report.refuse_overwrite(output, force)
    for name in present:
        report.remove_folder(output, PlainName(name))
    with report.writing(output):
        (output / "logs").mkdir(parents=True)


@dataclass
class Demo:
    """Run of a demo, with a method for each stage.

    directory: output directory.
    port: port of the server without a head. The server with a head has the next port.
    commands: command lines that have run, with their durations in seconds.
    stage: number of the current stage, from 1.
    seconds: duration of all stages.
    evidence: JSON object of `trtspec prove`.
    """

    directory: Path
    port: int
    commands: list[tuple[str, float]] = field(default_factory=list)
    stage: int = 0
    seconds: float = 0.0
    evidence: dict[str, Any] = field(default_factory=dict)

    def all_stages(self) -> None:
        """Runs the stages in order, and writes the report."""
        start = time.monotonic()
        self.say(f"trtspec demo: {STAGES} stages in {self.directory}")
        # three stages share the server without a head
        with ExitStack() as servers:
            plain = self.first_answer(servers)
            self.quantize()
            self.synthesize(plain)
            self.train(plain)
        self.prove()
        self.configure()
        self.seconds = time.monotonic() - start
        self.write_page()

    def first_answer(self, servers: ExitStack) -> str:
        """Shows an answer without and with speculation.

        Returns the URL of the server without a head, which runs until `servers` is closed.
        """
        self.begin("A first answer", "the same question to the target alone and with its head")
        plain_url = self.serve(servers, PLAIN, "--max-batch-size", BATCH)
        self.say(f"\n{QUESTION}\n\n--- without speculation")
        plain_answer = asyncio.run(ask(plain_url, self.write))
        with ExitStack() as eagle_servers:
            eagle_url = self.serve(eagle_servers, "eagle3", "--head", SHIPPED)
            self.say("\n\n--- with Eagle3")
            eagle_answer = asyncio.run(ask(eagle_url, self.write))
        self.say(f"\n\n    {verdict(plain_answer, eagle_answer)}")
        return plain_url

    def quantize(self) -> None:
        """Quantizes the target to NVFP4, and inspects the target before and after."""
        purpose = "a quarter of the bytes, compared with the source tensor by tensor"
        self.begin("Quantize to NVFP4", purpose)
        self.run("inspect", NANO)
        result = self.run("quantize", NANO, "-o", self.path("nvfp4"))
        self.run("inspect", self.path("nvfp4"), "--against", NANO)
        before_mb = result["bytes_in"] / 1e6
        after_mb = result["bytes_out"] / 1e6
        tensors = result["quantized"]
        self.say(f"    {tensors} tensors: {before_mb:.1f} MB became {after_mb:.1f} MB")

    def synthesize(self, plain_url: str) -> None:
        """Generates training data with the server at `plain_url`, which has no head."""
        self.begin("Let the target write training data", "a head learns what this target says")
        prompts = str(data_files.kimi_nano_dir() / "prompts_train.jsonl")
        sizes = ("--samples", ANSWERS, "--max-tokens", ANSWER_TOKENS, "--temperature", "0.8")
        endpoint = ("--base-url", plain_url, "--concurrency", BATCH)
        output = self.path("answers.jsonl")
        result = self.run("synthesize", prompts, "-o", output, *endpoint, *sizes)
        self.say(f"    {result['answered']} answers in answers.jsonl")

    def train(self, plain_url: str) -> None:
        """Trains a head, and compares its server with the server at `plain_url`, without a head."""
        from trtspec.bench.report import bench
        from trtspec.bench.results import read_results

        purpose = "one MLA layer that drafts from three captured hidden states"
        self.begin("Train an Eagle3 head", purpose)
        head = self.path("head")
        shape = ("--attention", "mla", "--eagle", "3.1")
        record = self.run("train", NANO, self.path("answers.jsonl"), "-o", head, *shape, *TRAINING)
        self.run("inspect", head, "--against", NANO)
        share = record["training"]["held_out_accuracy"][0]
        self.say(f"    its first draft is the target's choice at {share:.0%} of held-out tokens")
        with ExitStack() as servers:
            url = self.serve(servers, "fresh-head", "--head", head, "--draft-len", DRAFTS)
            urls = (f"fresh-head={url}", "--against-url", f"{PLAIN}={plain_url}")
            # status 3: a head trained for a minute may be slower, and the report says so
            self.run("bench", *urls, *COMPARED, "-o", self.path("bench"), allowed=(0, 3))
        results = read_results(Path(self.path("bench")))
        self.say(f"    {bench.sentence(results)}")

    def prove(self) -> None:
        """Proves the target and the head of the package. The proof is the result of the demo."""
        self.begin("Prove the shipped pair", "is it faster, and is the output the same?")
        paths = ("--backend", "reference", "-o", self.path("proof"), "--port", str(self.port))
        # status 3: a failed proof is reported at the end of the demo
        self.evidence = self.run("prove", NANO, "--head", SHIPPED, *paths, *PROVED, allowed=(0, 3))
        self.say(f"    {self.evidence['sentence']}")

    def configure(self) -> None:
        """Writes and checks the engine YAML for NVIDIA's pair. A dry run of `serve` follows."""
        self.begin("Configure NVIDIA's published pair", "the end of the same chain on four B200")
        pair = (REAL_TARGET, "--head", REAL_HEAD)
        file = self.path("extra-llm-api-config.yml")
        self.run("build-config", *pair, "--tp-size", "4", "-o", file)
        lint = self.run("lint", file, "--target", *pair)
        serve = ("--config", file, "--host", "0.0.0.0", "--trust-remote-code", "--dry-run")
        # status 3: this machine may lack the GPUs or the engine
        self.run("serve", *pair, *serve, allowed=(0, 3))
        self.say(f"    TensorRT-LLM {lint['version']} takes the file: {file}")

    def write_page(self) -> None:
        """Writes the report: the proof, the results of the trained head, and the commands."""
        from trtspec.bench.prove import write_page
        from trtspec.bench.report import bench
        from trtspec.bench.report.page import Section
        from trtspec.bench.results import read_results
        from trtspec.report import Table

        fresh = read_results(Path(self.path("bench")))
        rows = [[command, f"{seconds:.1f}\u00a0s"] for command, seconds in self.commands]
        first, second = bench.sections(fresh)[:2]
        sections = [
            Section(
                title="Second result: the head that this demo trained",
                text=bench.sentence(fresh),
                tables=[*first.tables, *second.tables],
            ),
            Section(title="The chain", tables=[Table("The chain", ["command", "took"], rows)]),
        ]
        write_page(Path(self.path("proof")), self.directory / "report.html", sections)

    def path(self, name: str) -> str:
        """Returns the path of a file or folder in the demo's directory."""
        return str(self.directory / name)

    def begin(self, title: str, purpose: str) -> None:
        """Begins the next stage, and prints its title."""
        self.stage += 1
        self.say(f"\n[{self.stage}/{STAGES}] {title}: {purpose}")

    def run(self, *words: str, allowed: tuple[int, ...] = (0,)) -> dict[str, Any]:
        """Runs `trtspec WORDS --json` and returns its JSON object.

        Raises TrtspecError if the exit status is not in `allowed`.
        """
        words = (*words, "--json")
        output = self.directory / "logs" / f"{len(self.commands) + 1:02d}-{words[0]}.json"
        start = time.monotonic()
        status = processes.run_trtspec(words, output)
        command = f"trtspec {shlex.join(words)}"
        self.commands.append((command, time.monotonic() - start))
        if status not in allowed:
            message = f"`{command}` ended with status {status}"
            raise TrtspecError(f"{message}; its message is above", "run that command by hand")
        return files.read_object(output)

    def serve(self, stack: ExitStack, name: str, *words: str) -> str:
        """Starts a reference server of the target, which runs until `stack` is closed.

        Returns the URL of the server.

        name: name of the server's log. PLAIN for the server without a head.
        words: further options of `trtspec serve`.
        """
        # at most one other server runs beside the one without a head
        port = self.port if name == PLAIN else self.port + 1
        url = f"http://127.0.0.1:{port}"
        address = f"--backend reference --host 127.0.0.1 --port {port}".split()
        command = ("serve", NANO, *words, *address)
        self.commands.append((f"trtspec {shlex.join(command)} &", 0.0))
        log = self.directory / "logs" / f"serve-{name}.log"
        stack.enter_context(processes.served(command, url, log, SERVER_START_S))
        return url

    def say(self, text: str) -> None:
        """Prints a line on stdout, unless -q was given."""
        self.write(f"{text}\n")

    def write(self, text: str) -> None:
        """Prints text on stdout without a line feed, unless -q was given."""
        if not report.quiet():
            print(text, end="", flush=True)


async def ask(url: str, show: Callable[[str], None]) -> Answer:
    """Returns the greedy answer of a server to QUESTION.

    Raises TrtspecError if the server fails.

    show: called with each new part of the answer's text.
    """
    shown = 0  # number of characters
    messages = [{"role": "user", "content": QUESTION}]

    def draw(partial: Answer) -> None:
        """Shows the text that arrived since the last call."""
        nonlocal shown
        show(partial.text[shown:])
        shown = len(partial.text)

    async with new_client(url, 1, headers={}) as client:
        body = chat_body(NANO, messages, RequestSampling(TOKENS), 0)
        answer = await stream_answer(client, body, "first", "demo", limit_s=120, on_event=draw)
    if answer.error:
        remedy = "see its log in the demo's directory"
        raise TrtspecError(f"{url} stopped answering: {answer.error}", remedy)
    return answer


def verdict(plain: Answer, eagle: Answer) -> str:
    """Returns a sentence that compares two answers: their speeds, their texts and the speedup.

    plain, eagle: answers without and with speculation.
    """
    answers = (plain, eagle)
    # tokens per second
    speeds = [answer.completion_tokens / (answer.finished - answer.started) for answer in answers]
    same = "the same text" if plain.text == eagle.text else "DIFFERENT text, which the proof judges"
    speedup = speeds[1] / speeds[0]
    return f"{speeds[0]:.0f} and {speeds[1]:.0f} tokens/s: {same}, {speedup:.1f} times as fast"
