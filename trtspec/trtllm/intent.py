"""What the user wants, before it is written for one engine version; it stands on the first line of every file."""

from __future__ import annotations

import argparse
import shlex
from dataclasses import dataclass, replace
from typing import Literal, NoReturn

from packaging.version import Version

from trtspec.errors import UsageError
from trtspec.trtllm.schema import parse_version

Goal = Literal["latency", "throughput"]
PREFIX = "# TensorRT-LLM "
ATTENTION_DP_FROM = 8  # ranks: below, replicating attention weights costs more KV cache than it saves


@dataclass(frozen=True)
class Intent:
    """One deployment. Sizes that are None follow the goal (`sized`). `settings` are the user's own `--set` values."""

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

    @property
    def attention_dp(self) -> bool:
        return self.goal == "throughput" and self.tp_size >= ATTENTION_DP_FROM

    @property
    def ep_size(self) -> int | None:
        """Experts are spread over the ranks where throughput counts; None leaves the choice to the engine."""
        return self.tp_size if self.goal == "throughput" else None

    @property
    def batch(self) -> int:
        """The model cards' 32 for latency. For throughput the curated Kimi recipe's 128 per rank with attention DP,
        else 64: four B200 hold 96 sequences of 8k in the FP8 cache."""
        if self.max_batch_size is not None:
            return self.max_batch_size
        return 32 if self.goal == "latency" else 128 if self.attention_dp else 64

    @property
    def tokens(self) -> int:
        return self.max_num_tokens if self.max_num_tokens is not None else 8192

    @property
    def seq_len(self) -> int:
        return self.max_seq_len if self.max_seq_len is not None else 8192

    def fitted(self, positions: int) -> Intent:
        """The same with a default max_seq_len that the model's positions hold; a typed one stays as it is."""
        return self if self.max_seq_len is not None else replace(self, max_seq_len=min(self.seq_len, positions))

    def command(self) -> str:
        """The command that writes the same file again."""
        words = ["trtspec", "build-config", self.target]
        words += ["--head", self.head] if self.head else []
        words += ["--trtllm-version", self.version, "--goal", self.goal, "--tp-size", str(self.tp_size)]
        words += ["--max-batch-size", str(self.batch), "--max-num-tokens", str(self.tokens)]
        words += ["--max-seq-len", str(self.seq_len)]
        words += ["--draft-len", str(self.draft_len)] if self.head else []
        words += [word for item in self.settings for word in ("--set", item)]
        words += ["--trust-remote-code"] if self.trust_remote_code else []
        return shlex.join(words)

    def first_line(self) -> str:
        return f"{PREFIX}{Version(self.version)}: {self.command()}"


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(f"the first line of the configuration does not parse: {message}", "write the file again")


def parse_intent(text: str) -> Intent | None:
    """The intent on the first line of a file that build-config wrote; None for any other file."""
    first = text.partition("\n")[0]
    if not first.startswith(PREFIX) or ": trtspec build-config " not in first:
        return None
    version, _, command = first.removeprefix(PREFIX).partition(": ")
    parse_version(version)
    parser = _Parser(add_help=False)
    parser.add_argument("target")
    parser.add_argument("--head")
    parser.add_argument("--trtllm-version", dest="version", default=version)
    parser.add_argument("--goal", choices=("latency", "throughput"), default="latency")
    for name, default in (("tp-size", 4), ("max-batch-size", None), ("max-num-tokens", None), ("max-seq-len", None)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--draft-len", type=int, default=3)
    parser.add_argument("--set", dest="settings", action="append", default=[])
    parser.add_argument("--trust-remote-code", action="store_true")
    found = vars(parser.parse_args(shlex.split(command)[2:]))
    return Intent(**{**found, "settings": tuple(found["settings"])})
