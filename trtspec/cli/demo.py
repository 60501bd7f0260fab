"""`trtspec demo`: the whole chain on a small Kimi-shaped model.

It consists of ordinary commands and ends in a proof.
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
# names of the files and folders that a demo writes
MADE = (
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
NANO = "kimi-nano"
SHIPPED = "kimi-nano-eagle3"
REAL_TARGET = "nvidia/Kimi-K2.5-NVFP4"
REAL_HEAD = "nvidia/Kimi-K2.5-Eagle3"
ANSWERS = "900"
ANSWER_TOKENS = "96"
ROWS = "32"  # requests in one batch
DRAFTS = "2"  # tokens drafted per step
# Small batches, because the data is small. One training-time-test step for each draft (DRAFTS).
TRAINING = (
    f"--batch-size 4 --lr 0.004 --epochs 3 --ttt-steps {DRAFTS} --acceptance-prompts 8".split()
)
COMPARED = shlex.split("--samples 32 --max-tokens 96 --concurrency 4")
PROVED = shlex.split("--samples 32 --max-tokens 96 --concurrency 1,4 --accept-slower")
# the answer takes long enough to watch
QUESTION = "Tell me a short story about Marcus, Yvonne and a mushroom in Coppermouth."
TOKENS = 160
PLAIN = "plain"  # the name of the server without a head


@dataclass(frozen=True, kw_only=True)
class DemoOptions:
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
    """Makes an empty directory. With `force`, empties a directory that holds only an earlier demo.

    Raises UsageError if the directory holds anything else.
    """
    present = sorted(path.name for path in output.iterdir()) if output.is_dir() else []
    foreign = [name for name in present if name not in MADE]
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
    """The stages of a demo, with their paths and servers.

    Args:
        commands: each command line that was run, with its seconds.

    Progress bars and messages of a command go to the terminal.
    """

    directory: Path
    port: int
    commands: list[tuple[str, float]] = field(default_factory=list)
    stage: int = 0
    seconds: float = 0.0
    evidence: dict[str, Any] = field(default_factory=dict)

    def all_stages(self) -> None:
        """Runs the stages in order. A server lives exactly as long as a stage needs it."""
        began = time.monotonic()
        self.say(f"trtspec demo: {STAGES} stages in {self.directory}")
        with ExitStack() as servers:
            plain = self.first_answer(servers)
            self.quantize()
            self.synthesize(plain)
            self.train(plain)
        self.prove()
        self.configure()
        self.seconds = time.monotonic() - began
        self.write_page()

    def first_answer(self, servers: ExitStack) -> str:
        """Leaves the plain server running, and returns its URL."""
        self.begin("A first answer", "the same question to the target alone and with its head")
        plain = self.serve(servers, PLAIN, "--max-batch-size", ROWS)
        self.say(f"\n{QUESTION}\n\n--- without speculation")
        alone = asyncio.run(ask(plain, self.write))
        with ExitStack() as shipped:
            eagle = self.serve(shipped, "eagle3", "--head", SHIPPED)
            self.say("\n\n--- with Eagle3")
            drafted = asyncio.run(ask(eagle, self.write))
        self.say(f"\n\n    {verdict(alone, drafted)}")
        return plain

    def quantize(self) -> None:
        purpose = "a quarter of the bytes, compared with the source tensor by tensor"
        self.begin("Quantize to NVFP4", purpose)
        self.run("inspect", NANO)
        result = self.run("quantize", NANO, "-o", self.path("nvfp4"))
        self.run("inspect", self.path("nvfp4"), "--against", NANO)
        before, after = (f"{result[key] / 1e6:.1f} MB" for key in ("bytes_in", "bytes_out"))
        self.say(f"    {result['quantized']} tensors: {before} became {after}")

    def synthesize(self, plain: str) -> None:
        self.begin("Let the target write training data", "a head learns what this target says")
        prompts = str(data_files.kimi_nano_dir() / "prompts_train.jsonl")
        sizes = ("--samples", ANSWERS, "--max-tokens", ANSWER_TOKENS, "--temperature", "0.8")
        endpoint = ("--base-url", plain, "--concurrency", ROWS)
        output = self.path("answers.jsonl")
        result = self.run("synthesize", prompts, "-o", output, *endpoint, *sizes)
        self.say(f"    {result['answered']} answers in answers.jsonl")

    def train(self, plain: str) -> None:
        """Trains the fresh head, and measures it beside the plain server."""
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
        with ExitStack() as fresh:
            url = self.serve(fresh, "fresh-head", "--head", head, "--draft-len", DRAFTS)
            urls = (f"fresh-head={url}", "--against-url", f"{PLAIN}={plain}")
            self.run("bench", *urls, *COMPARED, "-o", self.path("bench"), allowed=(0, 3))
        results = read_results(Path(self.path("bench")))
        self.say(f"    {bench.sentence(results)}")

    def prove(self) -> None:
        """Proves the pair that ships with trtspec, which is the demo's result."""
        self.begin("Prove the shipped pair", "is it faster, and is the output the same?")
        where = ("--backend", "reference", "-o", self.path("proof"), "--port", str(self.port))
        self.evidence = self.run("prove", NANO, "--head", SHIPPED, *where, *PROVED, allowed=(0, 3))
        self.say(f"    {self.evidence['sentence']}")

    def configure(self) -> None:
        self.begin("Configure NVIDIA's published pair", "the end of the same chain on four B200")
        pair = (REAL_TARGET, "--head", REAL_HEAD)
        file = self.path("extra-llm-api-config.yml")
        self.run("build-config", *pair, "--tp-size", "4", "-o", file)
        lint = self.run("lint", file, "--target", *pair)
        serve = ("--config", file, "--host", "0.0.0.0", "--trust-remote-code", "--dry-run")
        self.run("serve", *pair, *serve, allowed=(0, 3))
        self.say(f"    TensorRT-LLM {lint['version']} takes the file: {file}")

    def write_page(self) -> None:
        """Writes the proof's page, followed by the fresh head's results and the chain."""
        from trtspec.bench.prove import write_page
        from trtspec.bench.report import bench
        from trtspec.bench.report.page import Section
        from trtspec.bench.results import read_results
        from trtspec.report import Table

        fresh = read_results(Path(self.path("bench")))
        rows = [[command, f"{seconds:.1f}\u00a0s"] for command, seconds in self.commands]
        first, second = bench.sections(fresh)[:2]
        chain = [
            Section(
                title="Second result: the head that this demo trained",
                text=bench.sentence(fresh),
                tables=[*first.tables, *second.tables],
            ),
            Section(title="The chain", tables=[Table("The chain", ["command", "took"], rows)]),
        ]
        write_page(Path(self.path("proof")), self.directory / "report.html", chain)

    def path(self, name: str) -> str:
        return str(self.directory / name)

    def begin(self, title: str, purpose: str) -> None:
        self.stage += 1
        self.say(f"\n[{self.stage}/{STAGES}] {title}: {purpose}")

    def run(self, *words: str, allowed: tuple[int, ...] = (0,)) -> dict[str, Any]:
        """Runs `trtspec WORDS --json` and returns its JSON object.

        Raises TrtspecError if the exit status is not in `allowed`.
        """
        words = (*words, "--json")
        output = self.directory / "logs" / f"{len(self.commands) + 1:02d}-{words[0]}.json"
        began = time.monotonic()
        status = processes.run_trtspec(words, output)
        self.commands.append((f"trtspec {shlex.join(words)}", time.monotonic() - began))
        if status not in allowed:
            message = f"`{self.commands[-1][0]}` ended with status {status}"
            raise TrtspecError(f"{message}; its message is above", "run that command by hand")
        return files.read_object(output)

    def serve(self, stack: ExitStack, name: str, *words: str) -> str:
        """Starts a reference server of kimi-nano that lives as long as `stack`. Returns its URL."""
        port = self.port if name == PLAIN else self.port + 1
        url = f"http://127.0.0.1:{port}"
        where = f"--backend reference --host 127.0.0.1 --port {port}".split()
        command = ("serve", NANO, *words, *where)
        self.commands.append((f"trtspec {shlex.join(command)} &", 0.0))
        log = self.directory / "logs" / f"serve-{name}.log"
        stack.enter_context(processes.served(command, url, log, 180))
        return url

    def say(self, text: str) -> None:
        self.write(f"{text}\n")

    def write(self, text: str) -> None:
        if not report.quiet():
            print(text, end="", flush=True)


# --- the first stage: one answer without and with speculation, printed while it arrives ---


async def ask(url: str, show: Callable[[str], None]) -> Answer:
    """Returns the greedy answer of a server, and shows its text while it arrives.

    Raises TrtspecError if the server fails.
    """
    shown = 0  # characters
    messages = [{"role": "user", "content": QUESTION}]

    def draw(so_far: Answer) -> None:
        nonlocal shown
        show(so_far.text[shown:])
        shown = len(so_far.text)

    async with new_client(url, 1, headers={}) as client:
        body = chat_body(NANO, messages, RequestSampling(TOKENS), 0)
        answer = await stream_answer(client, body, "first", "demo", limit_s=120, on_event=draw)
    if answer.error:
        remedy = "see its log in the demo's directory"
        raise TrtspecError(f"{url} stopped answering: {answer.error}", remedy)
    return answer


def verdict(plain: Answer, eagle: Answer) -> str:
    """Returns a sentence: both rates, whether the texts are equal, and the speedup."""
    answers = (plain, eagle)
    rates = [answer.completion_tokens / (answer.finished - answer.started) for answer in answers]
    same = "the same text" if plain.text == eagle.text else "DIFFERENT text, which the proof judges"
    ratio = rates[1] / rates[0]
    return f"{rates[0]:.0f} and {rates[1]:.0f} tokens/s: {same}, {ratio:.1f} times as fast"
