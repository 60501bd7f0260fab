"""`trtspec demo`: the whole chain on a small Kimi-shaped model, command by command, ending in a report."""

from __future__ import annotations

import json
import shutil
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Annotated, Any

import typer

from trtspec import data_files, report
from trtspec.cli import demo_first_answer as first_answer
from trtspec.cli.demo_process import Chain, duration, free_ports
from trtspec.errors import CheckFailed, MissingDependency, TrtspecError
from trtspec.records import ForceOption

REAL_TARGET = "nvidia/Kimi-K2.5-NVFP4"
REAL_HEAD = "nvidia/Kimi-K2.5-Eagle3"
DRAFT_LEN = 3
# Found on kimi-nano: small batches, because the data is small; two training-time-test steps in place of
# three, because the time they leave for more epochs is worth more at draft length 3.
TRAIN_BATCH, TRAIN_LR, TTT_STEPS = 4, 0.004, 2
ROWS = "32"  # answers written at once: a step for 32 costs little more than one for 16
PORTS = 4
STAGES = 10
DISTINCT_UNITS = 64  # words and marks; about what a 128-token answer holds
NEEDED = {
    "torch": "trtspec[reference]",
    "transformers": "trtspec[reference]",
    "fastapi": "trtspec[reference]",
    "uvicorn": "trtspec[reference]",
    "modelopt": "trtspec[modelopt]",
}


@dataclass(frozen=True, kw_only=True)
class DemoOptions:
    output: Annotated[Path, typer.Option("--output", "-o", help="Directory for everything the demo writes.")] = Path(
        "trtspec-demo"
    )
    port: Annotated[int, typer.Option(min=1, max=65000, help="First of four consecutive ports on 127.0.0.1.")] = 8310
    quick: Annotated[bool, typer.Option("--quick", help="Use small sizes; takes about five minutes.")] = False
    force: ForceOption = False


def demo(options: DemoOptions) -> None:
    """Run the whole workflow on a small Kimi-shaped model on this CPU, and write a report.

    The first stage streams an answer with and without speculation. Every other one is an ordinary trtspec command,
    printed before it runs: inspect, quantize, synthesize, train, build-config, lint, serve, bench, check. Takes about
    twelve minutes on two cores.
    """
    output = options.output
    preflight()
    prepare(output, options.force)
    free_ports(options.port, PORTS)
    sizes = QUICK if options.quick else FULL
    chain = Chain(output, STAGES, quiet=report_quiet())
    chain.say(f"trtspec demo: {STAGES} stages, about {duration(sum(sizes.seconds.values()))} on two cores, in {output}")
    stamp = report.provenance("demo", {"target": str(data_files.kimi_nano_dir())}, {"quick": options.quick})
    data: dict[str, Any] = {"quick": options.quick, "bench": {}, "checks": [], "machine": machine()}
    began = time.monotonic()
    with termination_as_interrupt():
        run_stages(Demo(chain, output, options.port, sizes, data))
    data |= {"created": stamp["created"], "versions": stamp["versions"], "steps": chain.to_dicts()}
    data["seconds"] = time.monotonic() - began
    finish(output, data)
    chain.say(f"\n{duration(data['seconds'])} in all. Report: {(output / 'report.html').resolve()}")
    failed = [entry["title"] for entry in data["checks"] if entry["gate"] and not entry["verdict"]["ok"]]
    if failed:
        raise CheckFailed(f"the demo ran to its end, but check failed: {', '.join(failed)}", "see the report")


def preflight() -> None:
    """Raises MissingDependency naming the extra before anything is started."""
    from importlib.util import find_spec

    missing = [(name, extra) for name, extra in NEEDED.items() if find_spec(name) is None]
    if missing:
        names = ", ".join(name for name, _ in missing)
        raise MissingDependency(f"the demo needs {names}, not installed here", f"pip install '{missing[-1][1]}'")
    if not (data_files.kimi_nano_dir() / "config.json").is_file():
        raise TrtspecError(
            "kimi-nano, the demo's target, is not in this installation", "install trtspec from its wheel"
        )


def prepare(output: Path, force: bool) -> None:
    """An empty directory; with --force, one that an earlier demo made is emptied, and no other."""
    report.refuse_overwrite(output, force)
    if output.is_dir() and any(output.iterdir()):
        if not (output / "logs").is_dir():
            raise TrtspecError(
                f"{output} is not the directory of an earlier demo; it is left alone", "choose another -o"
            )
        shutil.rmtree(output)
    (output / "logs").mkdir(parents=True)


def finish(output: Path, data: dict[str, Any]) -> None:
    """demo.json, report.html, and the same tables on the terminal."""
    from trtspec.bench import demo_report

    report.write_json(output / "demo.json", data)
    report.write_atomic(output / "report.html", demo_report.demo_html(data))
    if not report_quiet():
        report.print_tables(demo_report.all_tables(data), demo_report.verdict_lines(data))


@contextmanager
def termination_as_interrupt() -> Iterator[None]:
    """SIGTERM unwinds like Ctrl-C, so that servers are stopped either way."""

    def interrupt(_: int, __: FrameType | None) -> None:
        raise KeyboardInterrupt

    previous = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


def machine() -> dict[str, Any]:
    """What the figures were measured on."""
    import platform

    from trtspec.machine import cores, total_memory

    return {
        "processor": cpu_name() or platform.processor() or platform.machine(),
        "cores": cores(),
        "memory_gib": round(total_memory() / 2**30, 1),
        "system": f"{platform.system()} {platform.release()}",
    }


def cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8", errors="replace").splitlines() if info.is_file() else []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")


def report_quiet() -> bool:
    import os

    return os.environ.get("TRTSPEC_QUIET") == "1"


@dataclass(frozen=True)
class Sizes:
    """How much each stage does, and about how many seconds it takes on two cores."""

    answers: int  # training prompts answered by the target
    answer_tokens: int
    answer_temperature: float
    train_epochs: int
    card_prompts: int  # held-out prompts of the figures in the head's model card
    record: int  # prompts of check
    record_tokens: int
    concurrency: str  # of the speed comparison
    samples: str  # questions per concurrency
    bench_tokens: int
    sampled_concurrency: str
    sampled_samples: str
    nvfp4_samples: int
    seconds: dict[str, float]  # expected, by command


FULL = Sizes(
    answers=360,
    answer_tokens=112,
    answer_temperature=0.8,
    train_epochs=6,
    card_prompts=8,
    record=12,
    record_tokens=48,
    concurrency="1,4,16",
    samples="9,18,36",
    bench_tokens=96,
    sampled_concurrency="1,4",
    sampled_samples="4,12",
    nvfp4_samples=10,
    seconds={
        "first": 12,
        "inspect": 2, "quantize": 4, "synthesize": 90, "check": 55, "train": 260, "greedy": 100, "sampled": 50,
        "nvfp4": 50, "config": 2, "figures": 16,
    },
)  # fmt: skip
QUICK = Sizes(
    answers=160,
    answer_tokens=96,
    answer_temperature=0.8,
    train_epochs=7,
    card_prompts=4,
    record=12,
    record_tokens=48,
    concurrency="1,4",
    samples="6,12",
    bench_tokens=48,
    sampled_concurrency="4",
    sampled_samples="12",
    nvfp4_samples=10,
    seconds={
        "first": 12,
        "inspect": 2, "quantize": 4, "synthesize": 45, "check": 30, "train": 105, "greedy": 30, "sampled": 18,
        "nvfp4": 30, "config": 2, "figures": 8,
    },
)  # fmt: skip


@dataclass
class Demo:
    """The chain with its paths; each method is one stage and adds what it found to `data`, which becomes demo.json."""

    chain: Chain
    directory: Path
    port: int
    sizes: Sizes
    data: dict[str, Any]

    @property
    def target(self) -> str:
        return str(data_files.kimi_nano_dir())

    @property
    def quantized(self) -> str:
        return str(self.directory / "kimi-nano-nvfp4")

    @property
    def head(self) -> str:
        return str(self.directory / "kimi-nano-eagle3")

    @property
    def answers(self) -> str:
        return str(self.directory / "answers.jsonl")

    @property
    def recording(self) -> str:
        return str(self.directory / "plain-answers.json")

    def expected(self, *names: str) -> float:
        return sum(self.sizes.seconds[name] for name in names)

    def serve(self, stack: ExitStack, name: str, offset: int, *options: str, target: str | None = None) -> str:
        """Starts a reference server for the life of `stack`; returns its URL."""
        arguments = [target or self.target, "--backend", "reference", *options]
        return stack.enter_context(self.chain.server(name, arguments, self.port + offset))

    def first_answer(self, plain: str, eagle: str) -> None:
        self.data["first_answer"] = first_answer.answers(plain, eagle, self.chain.quiet)
        self.chain.say(f"    {first_answer.verdict(self.data['first_answer'])}")

    def inspect(self) -> None:
        self.chain.begin(
            "Look at the target",
            "kimi-nano: Kimi-K2.5's architecture at a size that two cores can run, trained on Python's own library.",
            self.expected("inspect"),
        )
        self.data["target"] = self.chain.run_json(["inspect", self.target], "inspect", self.expected("inspect"))

    def quantize(self) -> None:
        self.chain.begin(
            "Quantize it to NVFP4",
            "Streams the checkpoint shard by shard under the published policy, then compares a sample with the source.",
            self.expected("quantize", "inspect"),
        )
        command = ["quantize", self.target, "-o", self.quantized]
        self.data["quantize"] = self.chain.run_json(command, "quantize", self.expected("quantize"))
        self.data["quantized"] = self.chain.run_json(
            ["inspect", self.quantized, "--against", self.target],
            "compare with the source",
            self.expected("inspect"),
        )

    def synthesize(self, plain: str) -> None:
        self.chain.begin(
            "Let the target answer the training prompts",
            "A head must learn what this target says, so the target writes the training data itself.",
            self.expected("synthesize"),
        )
        prompts = str(data_files.kimi_nano_dir() / "prompts_train.jsonl")
        sizes = self.sizes
        self.chain.run(
            [
                "synthesize", prompts, "-o", self.answers, "--base-url", plain, "--concurrency", ROWS,
                "--samples", str(sizes.answers), "--max-tokens", str(sizes.answer_tokens),
                "--temperature", str(sizes.answer_temperature),
            ],
            "synthesize",
            self.expected("synthesize"),
        )  # fmt: skip

    def record(self, plain: str) -> None:
        self.chain.begin(
            "Record what the target says without speculation",
            "Greedy answers with the gap between the two best tokens: the yardstick for losslessness.",
            self.expected("check"),
        )
        command = ["check", plain, "--record", self.recording, "--samples", str(self.sizes.record)]
        command += ["--max-tokens", str(self.sizes.record_tokens), "--contexts", "512"]
        verdict = self.chain.run_json(command, "check", self.expected("check"), allowed=(0, 3))
        self.data["checks"].append({"title": "Plain server", "gate": False, "verdict": verdict})

    def train(self) -> None:
        self.chain.begin(
            "Train an Eagle3 head",
            "One MLA layer over three captured states (EAGLE-3.1), trained with ModelOpt on the target's answers.",
            self.expected("train", "inspect"),
        )
        command = ["train", self.target, self.answers, "-o", self.head, "--attention", "mla", "--eagle", "3.1"]
        command += ["--batch-size", str(TRAIN_BATCH), "--lr", str(TRAIN_LR)]
        command += ["--epochs", str(self.sizes.train_epochs), "--ttt-steps", str(TTT_STEPS)]
        command += ["--acceptance-prompts", str(self.sizes.card_prompts)]
        self.chain.run(command, "train", self.expected("train"))
        self.data["training"] = read_jsonl(Path(self.head) / "training.jsonl")
        self.data["head"] = self.chain.run_json(
            ["inspect", self.head, "--against", self.target], "check the pair", self.expected("inspect")
        )

    def measure(self, plain: str, eagle: str) -> None:
        self.chain.begin(
            "Measure: no speculation, Eagle3",
            "Two servers, one loaded at a time in alternating rounds, on prompts that training never saw; "
            "greedy and at temperature 1.",
            self.expected("greedy", "sampled", "check"),
        )
        sizes = self.sizes
        for name, concurrency, samples, temperature in (
            ("greedy", sizes.concurrency, sizes.samples, "0"),
            ("sampled", sizes.sampled_concurrency, sizes.sampled_samples, "1"),
        ):
            out = self.directory / f"bench-{name}"
            command = ["bench", f"eagle3={eagle}", "--against-url", f"plain={plain}"]
            command += ["--concurrency", concurrency, "--samples", samples]
            command += ["--max-tokens", str(sizes.bench_tokens), "--temperature", temperature, "-o", str(out)]
            # status 3: measured, with findings that the report shows
            self.chain.run(command, f"bench {name}", self.expected(name), allowed=(0, 3))
            self.data["bench"][name] = json.loads((out / "results.json").read_text(encoding="utf-8"))
        verdict = self.chain.run_json(
            ["check", eagle, "--against", self.recording, "--min-acceptance", "1.5"],
            "check",
            self.expected("check"),
            allowed=(0, 3),
        )
        self.data["checks"].append({"title": "Eagle3 against the plain server", "gate": True, "verdict": verdict})

    def measure_nvfp4(self, eagle: str) -> None:
        self.chain.begin(
            "The same head on the NVFP4 target",
            "Four-bit weights and activations change the states that the head reads; acceptance shows how much.",
            self.expected("nvfp4"),
        )
        for name, temperature in (("nvfp4-greedy", "0"), ("nvfp4-sampled", "1")):
            out = self.directory / f"bench-{name}"
            command = ["bench", f"nvfp4={eagle}", "--concurrency", "4", "--samples", str(self.sizes.nvfp4_samples)]
            command += ["--max-tokens", str(self.sizes.bench_tokens), "--temperature", temperature, "-o", str(out)]
            self.chain.run(command, f"bench {name}", self.expected("nvfp4") / 2, allowed=(0, 3))
            self.data["bench"][name] = json.loads((out / "results.json").read_text(encoding="utf-8"))

    def configure(self) -> None:
        self.chain.begin(
            "Configure the real pair",
            f"{REAL_TARGET} with {REAL_HEAD} on four B200: engine YAML, lint, and the trtllm-serve command line.",
            3 * self.expected("config"),
        )
        config = str(self.directory / "kimi-k2.5" / "extra-llm-api-config.yml")
        seconds = self.expected("config")
        pair = [REAL_TARGET, "--head", REAL_HEAD, "--tp-size", "4"]
        self.chain.run(["build-config", *pair, "-o", config], "build-config", seconds)
        lint = self.chain.run_json(
            ["lint", config, "--target", REAL_TARGET, "--head", REAL_HEAD], "lint", seconds, allowed=(0, 3)
        )
        command = ["serve", *pair, "--config", config, "--host", "0.0.0.0", "--trust-remote-code", "--dry-run"]
        dry = self.chain.run_json(command, "serve --dry-run", seconds, allowed=(0, 3))
        text = Path(config).read_text(encoding="utf-8")
        self.data["config"] = {"yaml": text, "lint": lint, "serve": dry, "pair": [REAL_TARGET, REAL_HEAD]}

    def figures(self) -> None:
        self.chain.begin(
            "Figures that keep the comparison honest, and the report",
            "Cost of a draft step, experts touched, bits per byte on held-out text, repetition.",
            self.expected("figures"),
        )
        output = self.chain.run_module(
            "trtspec.models.figures",
            [self.target, "--head", self.head, "--samples", str(self.sizes.nvfp4_samples)],
            "figures",
            self.expected("figures"),
        )
        self.data["honesty"] = json.loads(output) | repetition(self.directory)


def run_stages(demo: Demo) -> None:
    """All stages in order; servers live exactly as long as they are needed."""
    draft = ["--draft-len", str(DRAFT_LEN)]
    with ExitStack() as servers:
        demo.chain.begin(
            "A first answer",
            "kimi-nano alone, then with the Eagle3 head that ships with it: the same question, greedily.",
            demo.expected("first"),
        )
        plain = demo.serve(servers, "plain", 0, "--max-batch-size", ROWS)
        with ExitStack() as shipped:
            head = str(data_files.kimi_nano_head_dir())
            demo.first_answer(plain, demo.serve(shipped, "shipped-head", 1, "--head", head, *draft))
        demo.inspect()
        demo.quantize()
        demo.synthesize(plain)
        demo.record(plain)
        demo.train()
        eagle = demo.serve(servers, "eagle3", 1, "--head", demo.head, *draft)
        demo.measure(plain, eagle)
    with ExitStack() as servers:
        options = ["--head", demo.head, *draft]
        demo.measure_nvfp4(demo.serve(servers, "nvfp4", 3, *options, target=demo.quantized))
    demo.configure()
    demo.figures()


def repetition(directory: Path) -> dict[str, float | None]:
    """Distinct 4-grams of the target's own answers over those of the held-out text, at equal length."""
    from trtspec.client.text_quality import mean_distinct_ratio

    held_out = [
        prompt["reference"]
        for prompt in read_jsonl(data_files.kimi_nano_dir() / "prompts_heldout.jsonl")
        if prompt.get("reference")
    ]
    found: dict[str, float | None] = {"distinct_heldout": mean_distinct_ratio(held_out, DISTINCT_UNITS)}
    for name in ("greedy", "sampled"):
        answers = read_jsonl(directory / f"bench-{name}" / "answers.jsonl")
        texts = [answer["text"] for answer in answers if answer["endpoint"] == "plain"]
        found[f"distinct_{name}"] = mean_distinct_ratio(texts, DISTINCT_UNITS)
    return found


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """A line ends at a line feed only: an answer may hold U+2028 as it is."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line.strip()]
