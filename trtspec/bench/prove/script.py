"""A proof as a script of plain trtspec commands: two launches, one after the other on the same GPUs, and their clients.
The speculating server comes first: what it said is then scored by the target alone."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

SPECULATING, PLAIN = "spec", "plain"
# for estimates: output tokens per second of one request, seconds until a server is ready, requests of check a question
RATE = {"reference": 50.0, "vllm": 80.0, "trtllm": 120.0}
START = {"reference": 8.0, "vllm": 600.0, "trtllm": 900.0}
RECORDED, SCORED = 11, 8
CHECKED = 20  # questions of check at most


@dataclass(frozen=True)
class ProveSetup:
    """What is proved, and with how much. `serve_words` go to both launches; without `gpu` there is no plan."""

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

    @property
    def prints(self) -> bool:
        return "--json" in self.words


def script(setup: ProveSetup, directory: Path, answers: int) -> list[Step]:
    """All steps in their order. `answers`: how many one bench asks."""
    levels = ",".join(map(str, setup.concurrency))
    asked = ("--dataset", setup.dataset, "--samples", str(setup.samples), "--max-tokens", str(setup.max_tokens))
    checked, recording = min(setup.samples, CHECKED), str(directory / "spec.jsonl")
    judged = ("--dataset", setup.dataset, "--samples", str(checked), "--max-tokens", str(min(setup.max_tokens, 128)))
    judge = ("check", setup.url, "--tokenizer", setup.target)
    accepted = tuple(word for row in setup.accept_unmeasured for word in ("--accept-unmeasured", row))

    def bench(launch: str) -> Step:
        where = ("--wait-ready", "7200", "-o", str(directory / launch), "--resume")
        words = ("bench", f"{launch}={setup.url}", *asked, "--concurrency", levels, *where)
        tokens = answers * setup.max_tokens
        return Step(f"bench-{launch}", "acceptance and speed", words, f"{launch}/results.json", launch, tokens)

    def check(name: str, why: str, launch: str, requests: int, *words: str) -> Step:
        tokens = requests * checked * min(setup.max_tokens, 128)
        return Step(name, why, (*judge, *words, "--force", "--json"), f"{name}.json", launch, tokens)

    plain_words = ("--score", recording, "--record", str(directory / "plain.jsonl"), *accepted)
    steps = [
        bench(SPECULATING),
        check("record", "what users get", SPECULATING, RECORDED, "--record", recording, *judged),
        bench(PLAIN),
        check("score", "whether the target alone says the same", PLAIN, SCORED, *plain_words),
    ]
    if setup.gpu is not None:
        sizes = ("--gpu", setup.gpu, "--gpus", str(setup.gpus), "--concurrency", levels)
        words = ("plan", setup.target, "--head", setup.head, *sizes, "--json")
        steps.insert(0, Step("plan", "how long a step should take", words, "plan.json"))
    return steps


def serve_words(setup: ProveSetup, launch: str) -> tuple[str, ...]:
    """After `trtspec`. What the user passes comes last, since it may end in a `--` with options of the engine."""
    words = ("serve", setup.target, "--backend", setup.backend, *f"--host 127.0.0.1 --port {setup.port}".split())
    if setup.backend != "reference":
        words += ("--tp-size", str(setup.gpus))
    if launch == SPECULATING:
        words += ("--head", setup.head, "--draft-len", str(setup.draft_len))
        if setup.backend == "reference":  # as build-config sets it for the engines
            words += ("--draft-sampling", "probabilistic")
    return words + setup.serve_words


def seconds(setup: ProveSetup, steps: Sequence[Step]) -> float:
    """An estimate: two starts, and the tokens, of which up to eight answers in flight share a step."""
    together = sum(min(level, 8) for level in setup.concurrency) / len(setup.concurrency)
    return 2 * START[setup.backend] + sum(step.tokens for step in steps) / (RATE[setup.backend] * together)


def shell_text(setup: ProveSetup, directory: Path, steps: Sequence[Step]) -> str:
    """The script for a shell: all that a proof does, but for resuming and the page."""
    lines, launch = [f"mkdir -p {shlex.quote(str(directory))}"], ""
    for step in steps:
        if step.launch != launch:
            lines += ["kill $! && wait $!"] if launch else []
            lines.append(f"trtspec {shlex.join(serve_words(setup, step.launch))} &")
            launch = step.launch
        into = f" > {shlex.quote(str(directory / step.result))}" if step.prints else ""
        lines.append(f"trtspec {shlex.join(step.words)}{into}")
    return "\n".join([*lines, "kill $!"]) + "\n"
