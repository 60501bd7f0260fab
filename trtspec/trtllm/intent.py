"""What the user wants, before it is written for one engine version; it stands on the first line of every file."""

from __future__ import annotations

import shlex
from dataclasses import dataclass, replace
from typing import Any, Literal

from packaging.version import Version

from trtspec.errors import UsageError
from trtspec.trtllm.schema import parse_version

Goal = Literal["latency", "throughput"]
Role = Literal["context", "generation", "front"]
PREFIX = "# TensorRT-LLM "
ATTENTION_DP_FROM = 8  # ranks: below, replicating attention weights costs more KV cache than it saves
GPUS_PER_NODE = {"gb200": 4, "gb300": 4}  # of one tray; every other kind comes in boards of eight
CONTEXT_BATCH = 4  # prompts at a time on a prefill server, as in Dynamo's recipe
SPARE = 128  # tokens that a generation server keeps beside its full batch, for requests that arrive


@dataclass(frozen=True)
class Intent:
    """One server. Sizes that are None follow the workload, else the goal. `settings` are the user's own `--set` values.

    `role` is the part of a disaggregated deployment; `nodes` says over how many machines the ranks spread. `isl` and
    `osl` are tokens of a prompt and of an answer, `concurrency` requests at a time in the whole server.
    """

    target: str
    version: str
    head: str | None = None
    goal: Goal = "latency"
    tp_size: int = 4
    max_batch_size: int | None = None
    max_num_tokens: int | None = None
    max_seq_len: int | None = None
    draft_len: int = 3
    settings: tuple[str, ...] = ()
    trust_remote_code: bool = False
    gpu: str | None = None
    nodes: int = 1
    role: Role | None = None
    spread_attention: bool | None = None
    experts_over: int | None = None
    isl: int | None = None
    osl: int | None = None
    concurrency: int | None = None
    context_urls: tuple[str, ...] = ()
    generation_urls: tuple[str, ...] = ()

    @property
    def gpus_per_node(self) -> int:
        return self.tp_size // self.nodes

    @property
    def attention_dp(self) -> bool:
        if self.spread_attention is not None:
            return self.spread_attention
        return self.goal == "throughput" and self.tp_size >= ATTENTION_DP_FROM

    @property
    def ep_size(self) -> int | None:
        """Experts are spread over the ranks where throughput counts; None leaves the choice to the engine."""
        if self.experts_over is not None:
            return self.experts_over
        return self.tp_size if self.goal == "throughput" or self.attention_dp else None

    @property
    def batch(self) -> int:
        """Requests per step and rank. What the workload asks for; without one the model cards' 32 for latency, and for
        throughput the curated Kimi recipe's 128 per rank with attention DP, else 64: four B200 hold 96 sequences of
        8k in the FP8 cache."""
        if self.max_batch_size is not None:
            return self.max_batch_size
        if self.role == "context":
            return CONTEXT_BATCH
        if self.concurrency is not None:
            return -(-self.concurrency // self.tp_size) if self.attention_dp else self.concurrency
        return 32 if self.goal == "latency" else 128 if self.attention_dp else 64

    @property
    def step_tokens(self) -> int:
        """Tokens of one decode step of a full batch."""
        return self.batch * (self.draft_len + 1 if self.head else 1)

    @property
    def tokens(self) -> int:
        if self.max_num_tokens is not None:
            return self.max_num_tokens
        if self.role == "generation":
            return -(-(self.step_tokens + SPARE) // SPARE) * SPARE
        return max(8192, self.step_tokens)

    @property
    def seq_len(self) -> int:
        if self.max_seq_len is not None:
            return self.max_seq_len
        return self.isl + self.osl if self.isl is not None and self.osl is not None else 8192

    def fitted(self, positions: int) -> Intent:
        """The same with a default max_seq_len that the model's positions hold; a typed one stays as it is."""
        return self if self.max_seq_len is not None else replace(self, max_seq_len=min(self.seq_len, positions))

    def checked(self) -> Intent:
        """Itself. Raises UsageError for sizes that contradict each other."""
        if self.tp_size % self.nodes:
            message = f"{self.tp_size} ranks do not spread evenly over {self.nodes} nodes"
            raise UsageError(message, f"use --tp-size {-(-self.tp_size // self.nodes) * self.nodes}")
        here = GPUS_PER_NODE.get(self.gpu or "", 8)
        if self.gpu and self.gpus_per_node > here:
            message = f"{self.gpus_per_node} ranks on one node, but a node of {self.gpu.upper()} has {here} GPUs"
            raise UsageError(message, f"use --nodes {-(-self.tp_size // here)}")
        if self.experts_over and self.tp_size % self.experts_over:
            message = f"experts over {self.experts_over} of {self.tp_size} ranks"
            raise UsageError(message, "give --ep-size a divisor of --tp-size")
        if (self.isl is None) != (self.osl is None):
            raise UsageError("--isl and --osl make the sequence length together", "give both")
        return self

    def command(self) -> str:
        """The command that writes the same file again."""
        words = ["trtspec", "build-config", self.target]
        words += ["--head", self.head] if self.head else []
        words += ["--trtllm-version", self.version, "--goal", self.goal, "--tp-size", str(self.tp_size)]
        words += ["--max-batch-size", str(self.batch), "--max-num-tokens", str(self.tokens)]
        words += ["--max-seq-len", str(self.seq_len)]
        words += ["--draft-len", str(self.draft_len)] if self.head else []
        words += self._optional_words()
        words += [word for item in self.settings for word in ("--set", item)]
        words += ["--trust-remote-code"] if self.trust_remote_code else []
        return shlex.join(words)

    def _optional_words(self) -> list[str]:
        words = [] if self.nodes == 1 else ["--nodes", str(self.nodes)]
        for flag, value in (
            ("--gpu", self.gpu), ("--role", self.role), ("--ep-size", self.experts_over),
            ("--isl", self.isl), ("--osl", self.osl), ("--concurrency", self.concurrency),
        ):  # fmt: skip
            words += [] if value is None else [flag, str(value)]
        if self.spread_attention is not None:
            words.append("--attention-dp" if self.spread_attention else "--no-attention-dp")
        words += [word for url in self.context_urls for word in ("--context-url", url)]
        return words + [word for url in self.generation_urls for word in ("--generation-url", url)]

    def first_line(self) -> str:
        return f"{PREFIX}{Version(self.version)}: {self.command()}"


def parse_intent(text: str) -> Intent | None:
    """The intent on the first line of a file that build-config wrote; None for any other file."""
    first = text.partition("\n")[0]
    if not first.startswith(PREFIX) or ": trtspec build-config " not in first:
        return None
    version, _, command = first.removeprefix(PREFIX).partition(": ")
    parse_version(version)
    found = _parse(shlex.split(command)[2:])
    found["version"] = found["version"] or version
    values: dict[str, Any] = {key: tuple(v) if isinstance(v, list) else v for key, v in found.items()}
    return Intent(**values)


def _parse(words: list[str]) -> dict[str, Any]:
    """Raises UsageError for words that build-config does not take."""
    import argparse  # here, because only files that were written before need it

    parser = argparse.ArgumentParser(add_help=False, exit_on_error=False)
    parser.add_argument("target")
    parser.add_argument("--head")
    parser.add_argument("--trtllm-version", dest="version")
    parser.add_argument("--goal", choices=("latency", "throughput"), default="latency")
    parser.add_argument("--role", choices=("context", "generation", "front"))
    parser.add_argument("--gpu")
    parser.add_argument("--attention-dp", action=argparse.BooleanOptionalAction, dest="spread_attention")
    parser.add_argument("--ep-size", type=int, dest="experts_over")
    for name, default in (
        ("tp-size", 4), ("max-batch-size", None), ("max-num-tokens", None), ("max-seq-len", None), ("draft-len", 3),
        ("nodes", 1), ("isl", None), ("osl", None), ("concurrency", None),
    ):  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=default)
    for flag, name in (("set", "settings"), ("context-url", "context_urls"), ("generation-url", "generation_urls")):
        parser.add_argument(f"--{flag}", dest=name, action="append", default=[])
    parser.add_argument("--trust-remote-code", action="store_true")
    parser.add_argument("--format")  # of chart values; says nothing about the server
    try:
        found, unknown = parser.parse_known_args(words)
    except (argparse.ArgumentError, SystemExit) as error:
        raise UsageError(
            f"the first line of the configuration does not parse: {error}", "write the file again"
        ) from None
    if unknown:
        message = f"the first line of the configuration does not parse: {' '.join(unknown)}"
        raise UsageError(message, "write the file again")
    values = vars(found)
    del values["format"]
    return values
