"""`trtspec demo`: the whole chain on a small Kimi-shaped model, made of ordinary commands and ending in a proof."""

from __future__ import annotations

import asyncio
import json
import shlex
import sys
import time
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
MADE = (
    "logs", "nvfp4", "answers.jsonl", ".answers.jsonl.synthesize", "answers.jsonl.provenance.json", "head", "proof",
    "extra-llm-api-config.yml", "report.html",
)  # fmt: skip
NANO, SHIPPED = "kimi-nano", "kimi-nano-eagle3"
REAL_TARGET, REAL_HEAD = "nvidia/Kimi-K2.5-NVFP4", "nvidia/Kimi-K2.5-Eagle3"
ANSWERS, ANSWER_TOKENS, ROWS, DRAFTS = "900", "96", "32", "2"
# Small batches, because the data is small, and as many training-time-test steps as drafts (DRAFTS).
TRAINING = (
    "--batch-size",
    "4",
    "--lr",
    "0.004",
    "--epochs",
    "3",
    "--ttt-steps",
    DRAFTS,
    "--acceptance-prompts",
    "8",
)
KIND = "story"  # long enough to watch
TOKENS = 160
TITLES = ("without speculation", "with Eagle3")
REFRESH = 12  # drawings a second
PROOF = (
    "--samples", "48", "--max-tokens", "96", "--concurrency", "1,4", "--draft-len", DRAFTS, "--accept-slower",
)  # fmt: skip


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

    The first stage streams an answer with and without speculation. All other stages are ordinary trtspec commands:
    inspect, quantize, synthesize, train, prove, build-config, lint, serve. Takes about seven minutes on two cores.
    """
    from trtspec.cli.doctor import require

    require("demo")
    prepare(options.output, options.force)
    processes.require_free_ports(options.port, 2)
    made = Demo(options.output, options.port)
    with termination_as_interrupt():
        made.all_stages()
    page = (options.output / "report.html").resolve()
    made.say(
        f"\n{made.evidence['sentence']}\n{processes.duration(made.seconds)} in all. Report: {page}"
    )
    if not made.evidence["ok"]:
        raise CheckFailed("the demo ran to its end, but its proof failed", f"see {page}")


def prepare(output: Path, force: bool) -> None:
    """Makes an empty directory. With `force`, empties one that holds nothing but an earlier demo.

    Raises UsageError if the directory holds anything else.
    """
    report.refuse_overwrite(output, force)
    present = sorted(path.name for path in output.iterdir()) if output.is_dir() else []
    if foreign := [name for name in present if name not in MADE]:
        message = f"{output} holds {foreign[0]}, which a demo did not write"
        raise UsageError(message, "choose another `output`")
    for name in present:
        report.remove_folder(output, PlainName(name))
    with report.writing(output):
        (output / "logs").mkdir(parents=True)


@dataclass
class Demo:
    """The stages with their paths and servers. `commands`: each as it was run, with its seconds."""

    directory: Path
    port: int
    commands: list[tuple[str, float]] = field(default_factory=list)
    stage: int = 0
    seconds: float = 0.0
    evidence: dict[str, Any] = field(default_factory=dict)
    command_line: str = ""

    def all_stages(self) -> None:
        """In order; a server lives exactly as long as it is needed."""
        began = time.monotonic()
        self.say(
            f"trtspec demo: {STAGES} stages, about 7 min on two quiet cores, in {self.directory}"
        )
        with ExitStack() as servers:
            plain = self.first_answer(servers)
            self.quantize()
            self.synthesize(plain)
        self.train()
        self.prove()
        self.configure()
        self.seconds = time.monotonic() - began
        self.write_page()

    def first_answer(self, servers: ExitStack) -> str:
        """Leaves the plain server running, and returns its URL."""
        about = "the same question to the target alone and with its head"
        self.begin("A first answer", about)
        with ExitStack() as shipped:
            plain = self.serve(servers, "plain", 0, NANO, "--max-batch-size", ROWS)
            eagle = self.serve(shipped, "eagle3", 1, NANO, "--head", SHIPPED)
            found = answers(plain, eagle, report.quiet())
        self.say(f"    {verdict(found)}")
        return plain

    def quantize(self) -> None:
        about = "a quarter of the bytes, compared with the source tensor by tensor"
        self.begin("Quantize to NVFP4", about)
        self.run("inspect", NANO)
        made = self.run("quantize", NANO, "-o", self.path("nvfp4"))
        self.run("inspect", self.path("nvfp4"), "--against", NANO)
        self.say(
            f"    {made['quantized']} tensors: {made['bytes_in'] / 1e6:.1f} MB became {made['bytes_out'] / 1e6:.1f} MB"
        )

    def synthesize(self, plain: str) -> None:
        prompts = str(data_files.kimi_nano_dir() / "prompts_train.jsonl")
        self.begin("Let the target write training data", "a head learns what this target says")
        sizes = ("--samples", ANSWERS, "--max-tokens", ANSWER_TOKENS, "--temperature", "0.8")
        asked = ("--base-url", plain, "--concurrency", ROWS)
        made = self.run("synthesize", prompts, "-o", self.path("answers.jsonl"), *asked, *sizes)
        self.say(f"    {made['answered']} answers in answers.jsonl")

    def train(self) -> None:
        about = "one MLA layer that drafts from three captured hidden states"
        self.begin("Train an Eagle3 head", about)
        shape = ("--attention", "mla", "--eagle", "3.1", *TRAINING)
        made = self.run("train", NANO, self.path("answers.jsonl"), "-o", self.path("head"), *shape)
        self.run("inspect", self.path("head"), "--against", NANO)
        share = made["training"]["held_out_accuracy"][0]
        self.say(f"    its first draft is the target's choice at {share:.0%} of held-out tokens")

    def prove(self) -> None:
        about = "is it faster, and is the output the same? Sampled drafts come from the head's distribution"
        self.begin("Prove the pair", about)
        place = ("--backend", "reference", "-o", self.path("proof"), "--port", str(self.port))
        pair = (NANO, "--head", self.path("head"))
        self.evidence = self.run("prove", *pair, *place, *PROOF, allowed=(0, 3))
        self.say(f"    {self.evidence['sentence']}")

    def configure(self) -> None:
        pair = (REAL_TARGET, "--head", REAL_HEAD)
        self.begin("Configure NVIDIA's published pair", "the end of the same chain on four B200")
        file = self.path("extra-llm-api-config.yml")
        self.run("build-config", *pair, "--tp-size", "4", "-o", file)
        lint = self.run("lint", file, "--target", *pair, allowed=(0, 3))
        serve = ("--config", file, "--host", "0.0.0.0", "--trust-remote-code", "--dry-run")
        self.command_line = shlex.join(self.run("serve", *pair, *serve, allowed=(0, 3))["argv"])
        self.say(
            f"    TensorRT-LLM {lint['version']} {'takes' if lint['ok'] else 'REFUSES'} the file: {file}"
        )

    def write_page(self) -> None:
        """The proof's page with the chain behind it."""
        from trtspec.bench.prove import write_page
        from trtspec.bench.report.page import Section
        from trtspec.report import Table

        rows = [[command, f"{seconds:.1f}\u00a0s"] for command, seconds in self.commands]
        config = Path(self.path("extra-llm-api-config.yml")).read_text(encoding="utf-8")
        chain = [
            Section(title="The chain", tables=[Table("The chain", ["command", "took"], rows)]),
            Section(
                title=f"{REAL_TARGET} with {REAL_HEAD}", code=f"{self.command_line}\n\n{config}"
            ),
        ]
        write_page(Path(self.path("proof")), self.directory / "report.html", chain)

    def path(self, name: str) -> str:
        return str(self.directory / name)

    def begin(self, title: str, about: str) -> None:
        """One line of what and why, above the commands of a stage."""
        self.stage += 1
        self.say(f"\n[{self.stage}/{STAGES}] {title}: {about}")

    def run(self, *words: str, allowed: tuple[int, ...] = (0,)) -> dict[str, Any]:
        """The JSON object of `trtspec WORDS`. Raises TrtspecError with the end of its log where it fails."""
        words = (*words, "--json")
        logs = self.directory / "logs"
        log, output = (
            logs / f"{len(self.commands) + 1:02d}-{words[0]}.{end}" for end in ("log", "json")
        )
        self.say(f"    trtspec {' '.join(words[:2])} ...")
        began = time.monotonic()
        status = processes.run_trtspec(words, output, log)
        self.commands.append((f"trtspec {shlex.join(words)}", time.monotonic() - began))
        if status not in allowed:
            message = f"`{self.commands[-1][0]}` ended with status {status}; {log} ends:\n{processes.tail(log)}"
            raise TrtspecError(message, "run that command by hand to look closer")
        return files.read_object(output)

    def serve(self, stack: ExitStack, name: str, offset: int, *words: str) -> str:
        """A reference server for the life of `stack`; its URL."""
        url = f"http://127.0.0.1:{self.port + offset}"
        where = ("--backend", "reference", "--host", "127.0.0.1", "--port", str(self.port + offset))
        command = ("serve", *words, *where)
        self.commands.append((f"trtspec {shlex.join(command)} &", 0.0))
        stack.enter_context(
            processes.served(command, url, self.directory / "logs" / f"serve-{name}.log", 180)
        )
        return url

    def say(self, text: str) -> None:
        if not report.quiet():
            print(text, flush=True)


# --- the first stage: one streamed answer without and with speculation, side by side ---


def question() -> list[dict[str, Any]]:
    """The messages that are asked: the first held-out prompt of KIND."""
    with (data_files.kimi_nano_dir() / "prompts_heldout.jsonl").open(encoding="utf-8") as lines:
        rows = map(json.loads, lines)
        return next(row["messages"] for row in rows if row["category"] == KIND)


def answers(plain_url: str, eagle_url: str, quiet: bool) -> list[Answer]:
    """Asks both servers the same question, greedily, one after the other, and draws the answers beside each other
    while they arrive. Raises TrtspecError when a server fails."""
    from rich.console import Console
    from rich.live import Live

    console, messages = Console(file=sys.stdout, quiet=quiet), question()
    console.print(f"\n{messages[-1]['content']}\n", markup=False, highlight=False, style="dim")
    found: list[Answer] = []
    # on anything but a terminal, rich draws once at the end
    with Live(console=console, refresh_per_second=REFRESH) as live:
        for url in (plain_url, eagle_url):

            def draw(so_far: Answer) -> None:
                live.update(panels([*found, so_far]))

            found.append(asyncio.run(_ask(url, messages, draw)))
    if not console.is_terminal:
        console.line()
    return found


async def _ask(url: str, messages: list[dict[str, Any]], draw: Any) -> Answer:
    async with new_client(url, 1, headers={}) as client:
        body = chat_body("kimi-nano", messages, RequestSampling(TOKENS), 0)
        found = await stream_answer(client, body, "first", "demo", limit_s=120, on_event=draw)
    if found.error:
        raise TrtspecError(
            f"{url} stopped answering: {found.error}", "see its log in the demo's directory"
        )
    return found


def figures(answer: Answer) -> str:
    """Tokens, tokens a second after the first one, and tokens for each pass of the target, as far as they are known."""
    from trtspec.bench.results import inter_token

    tokens, gap = answer.completion_tokens, inter_token(answer)
    if not gap:
        return f"{tokens} tokens"
    # passes of the target after the prompt's
    steps = (answer.spec_decode or {}).get("steps")
    passes = f", {(tokens - 1) / steps:.2f} tokens per pass" if steps else ""
    return f"{1 / gap:.0f} tokens/s{passes}"


def verdict(pair: list[Answer]) -> str:
    """How much faster, and whether the text is the same."""
    from trtspec.bench.results import inter_token

    (plain, eagle), gaps = pair, [inter_token(answer) for answer in pair]
    same = "the same text" if plain.text == eagle.text else "DIFFERENT text, which the proof judges"
    if not gaps[0] or not gaps[1]:
        return f"{figures(plain)}; {figures(eagle)}; {same}"
    return f"{1 / gaps[0]:.0f} and {1 / gaps[1]:.0f} tokens/s: {same}, {gaps[0] / gaps[1]:.1f} times as fast"


def panels(so_far: list[Answer]) -> Any:
    from rich.panel import Panel
    from rich.table import Table
    from rich.text import Text

    grid = Table.grid(expand=True)
    for _ in TITLES:
        grid.add_column(ratio=1)
    cells = list[Panel]()
    for title, answer in zip(TITLES, so_far, strict=False):
        cells.append(
            Panel(Text(answer.text), title=title, title_align="left", subtitle=figures(answer))
        )
    grid.add_row(*cells)
    return grid
