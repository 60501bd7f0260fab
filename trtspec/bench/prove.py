"""`prove`: which commands make a proof, with which prompts. Runs nothing.

A proof is a list of steps, each one command of trtspec with its output. Steps that need a server name its launch; the
launches follow each other, the plain one first, because they want the same GPUs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

PLAIN = "plain"
URL = "{url}"  # in a step's words: where its server answers
WORK = "{work}"  # the directory of the whole proof's outputs


@dataclass(frozen=True)
class ProveSetup:
    """What is to be proved, and with how much. `serve_words` go to `trtspec serve` in each launch."""

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
    contexts: tuple[int, ...]
    serve_words: tuple[str, ...] = ()

    @property
    def dated(self) -> bool:
        """Whether the backend is one whose releases schemas describe."""
        return self.backend == "trtllm"


@dataclass(frozen=True)
class ProveStep:
    """One command: `words` after `trtspec`, or after `python -m MODULE`. `launch` is the server that it needs (""
    without one). `statuses` are those that count as done: 3 is a finding, not a failure. Seconds are an estimate."""

    name: str
    words: tuple[str, ...]
    launch: str = ""
    module: str = "trtspec"
    statuses: tuple[int, ...] = (0, 3)
    seconds: float = 5.0


def launches(setup: ProveSetup) -> list[str]:
    """Names of the servers in their order: plain, the longest draft, then the shorter ones."""
    return [PLAIN, *(f"k{length}" for length in range(setup.draft_len, 0, -1))]


def serve_words(setup: ProveSetup, launch: str, port: int | None = None) -> tuple[str, ...]:
    """After `trtspec serve`; at this port of localhost if there is one. What the user passes comes last, since it may
    end in a `--` with words for the engine."""
    words: tuple[str, ...] = (setup.target, "--backend", setup.backend)
    if port is not None:
        words += ("--host", "127.0.0.1", "--port", str(port))
    if launch != PLAIN:
        words += ("--head", setup.head, "--draft-len", launch.removeprefix("k"))
    if setup.backend != "reference":
        words += ("--tp-size", str(setup.gpus))
    return words + setup.serve_words


def steps_of(setup: ProveSetup) -> list[ProveStep]:
    """All steps in their order."""
    return [*_offline(setup), *(step for launch in launches(setup) for step in _measured(setup, launch))]


def _offline(setup: ProveSetup) -> Iterator[ProveStep]:
    pair = ("--head", setup.head)
    yield ProveStep("doctor", ("doctor", "--json"))
    yield ProveStep("inspect-target", ("inspect", setup.target, "--json"))
    yield ProveStep("inspect-head", ("inspect", setup.head, "--against", setup.target, "--json"))
    if setup.gpu is not None:
        levels = ",".join(map(str, setup.concurrency))
        sizes = ("--gpu", setup.gpu, "--gpus", str(setup.gpus), "--concurrency", levels, "--json")
        yield ProveStep("plan", ("plan", setup.target, *pair, *sizes), statuses=(0, 1, 3))
    if setup.dated:
        schema = ("from-installed", "-o", f"{WORK}/schema.yaml")
        yield ProveStep("schema", schema, module="trtspec.trtllm.schema_tools", statuses=(0, 4), seconds=60)
        for name, head in (("plain", ()), ("head", pair)):
            file = f"{WORK}/engine-{name}.yml"
            size = ("--tp-size", str(setup.gpus), "--force")
            yield ProveStep(f"config-{name}", ("build-config", setup.target, *head, *size, "-o", file), statuses=(0,))
            lint = ("lint", file, "--target", setup.target, *head, "--installed", "--json")
            yield ProveStep(f"lint-{name}", lint, statuses=(0, 3, 4), seconds=60)


def _measured(setup: ProveSetup, launch: str) -> Iterator[ProveStep]:
    """The commands that ask one server."""
    levels = ",".join(map(str, setup.concurrency))
    asked = ("--dataset", setup.dataset, "--samples", str(setup.samples), "--max-tokens", str(setup.max_tokens))

    def bench(name: str, *words: str, answers: float, at: int) -> ProveStep:
        where = ("-o", f"{WORK}/{name}", "--force")
        seconds = answers * setup.max_tokens / (RATES[setup.backend] * min(at, 8))
        return ProveStep(name, ("bench", f"{launch}={URL}", *words, *where), launch, seconds=seconds)

    each, middle = 2 * setup.samples, sorted(setup.concurrency)[len(setup.concurrency) // 2]
    speed = bench(f"bench-{launch}", *asked, "--concurrency", levels, answers=each * len(setup.concurrency), at=middle)
    checked = ("--dataset", setup.dataset, "--samples", str(min(setup.samples, 40)), "--max-tokens", "128", "--json")
    cost = min(setup.samples, 40) * 128 / RATES[setup.backend] / 3
    if launch == PLAIN:
        record = ("check", URL, "--record", f"{WORK}/recording.json", "--force", *checked)
        yield ProveStep("record", record, launch, seconds=cost)
        yield speed
        return
    if launch == launches(setup)[1]:
        against = ("check", URL, "--against", f"{WORK}/recording.json", "--min-acceptance", "1.05", "--json")
        yield ProveStep("check", against, launch, seconds=cost)
        yield speed
        hot = (*asked, "--concurrency", str(setup.concurrency[0]), "--temperature", "1")
        yield bench("bench-sampled", *hot, answers=setup.samples, at=setup.concurrency[0])
        for name, pairs in (("warm", 8), ("long", 4 * len(setup.contexts))):
            alone = ("--dataset", f"{WORK}/{name}.jsonl", "--concurrency", "1", "--max-tokens", str(setup.max_tokens))
            yield bench(f"bench-{name}", *alone, answers=2 * pairs, at=1)
        return
    yield speed


RATES = {"reference": 60.0, "vllm": 80.0, "trtllm": 120.0}  # output tokens per second of one request, for estimates
STARTS = {"reference": 15.0, "vllm": 600.0, "trtllm": 900.0}  # seconds until a server is ready


def prompts_of(setup: ProveSetup, questions: Sequence[str]) -> dict[str, list[dict[str, Any]]]:
    """The rows of the prompt files that a proof makes: `warm` asks each question twice in a row, so that the second
    time its prefix is in the cache; `long` puts real text before a question, up to about the number of tokens that its
    category names (four characters each). Raises ValueError without questions."""
    if not questions:
        raise ValueError("no questions")
    text = "\n\n".join(questions)
    warm = [
        {"id": f"{n}-{state}", "category": state, "prompt": f"{_filler(text, 600, n)}\n\n{question}"}
        for n, question in enumerate(questions[:8])
        for state in ("cold", "warm")
    ]
    long = [
        {"id": f"{size}-{n}", "category": f"{size} tokens", "prompt": f"{_filler(text, size, n)}\n\n{question}"}
        for size in setup.contexts
        for n, question in enumerate(questions[:4])
    ]
    return {"warm": warm, "long": long}


def _filler(text: str, tokens: int, number: int) -> str:
    """Another part of the text for each number, so that no prompt is a prefix of another."""
    wanted, start = 4 * tokens, (number * 997) % max(1, len(text))
    return ((text[start:] + "\n\n") + (text + "\n\n") * (wanted // len(text) + 1))[:wanted]
