"""Asks kimi-nano held-out exercises through the reference engine, in BF16 and as NVFP4.

    python -m tools.nano.evaluate DIR [--each 16] [-o DIR/evaluation.json]

judges its answers: prints right answers by kind (greedy), greedy answers that loop or run on,
agreement of the two forms, the figures that speed-ups must be read with, and one answer of each
kind. tools.benchmarks.engine prints the cost of a draft step.
"""

from __future__ import annotations

import argparse
import itertools
import json
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import trtspec
from tools.nano import exercises, figures
from trtspec.checkpoint.chat_parser import parse_reply
from trtspec.checkpoint.tokenizer import KimiTokenizer
from trtspec.client.text_quality import degeneration, mean_distinct_ratio
from trtspec.engine.engine import Engine, EngineOptions
from trtspec.engine.request import GenerationRequest
from trtspec.models.precision import default_dtype, dtype_name
from trtspec.models.weights import load_target
from trtspec.report import write_json

MAX_TOKENS = 256  # references have up to 180
DISTINCT_UNITS = 64  # words and marks of an answer whose 4-grams are compared, as in the demo
Row = dict[str, Any]


@dataclass(frozen=True)
class Answer:
    """`text` is what a user sees: the content, or a tool call as JSON."""

    text: str
    token_ids: list[int]
    finish_reason: str | None

    @property
    def fault(self) -> str | None:
        return "runs on" if self.finish_reason == "length" else degeneration(self.text)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("target", type=Path)
    parser.add_argument("--each", type=int, default=16, help="exercises of each kind")
    parser.add_argument(
        "-o", "--output", type=Path, help="default: evaluation.json in the target's directory"
    )
    options = parser.parse_args()
    rows = exercises.prompts(options.each)
    dtype = default_dtype()
    found: dict[str, Any] = {"dtype": dtype_name(dtype), "prompts": len(rows)}
    greedy = answer_all(options.target, rows, dtype)
    found["bf16"] = by_kind(rows, greedy)
    with tempfile.TemporaryDirectory() as temporary:
        output = Path(temporary) / "nvfp4"
        trtspec.quantize(options.target, output)
        quantized = answer_all(output, rows, dtype)
    found["nvfp4"] = by_kind(rows, quantized) | agreement(greedy, quantized)
    figures_of_text = distinct(options.target, rows, greedy, dtype)
    found["figures"] = costs(options.target, rows) | figures_of_text
    write_json(options.output or options.target / "evaluation.json", found)
    print_table(found, rows, greedy)


def answer_all(
    directory: Path, rows: Sequence[Row], dtype: torch.dtype, temperature: float = 0.0
) -> list[Answer]:
    """The engine's answer to each row, in order."""
    tokenizer = KimiTokenizer(directory)
    engine = Engine(
        load_target(directory, dtype=dtype),
        options=EngineOptions(max_batch_size=16),
        tokenizer=tokenizer,
    )
    requests = [
        GenerationRequest(
            str(index),
            prompt_ids(tokenizer, row),
            MAX_TOKENS,
            temperature=temperature,
            seed=index,
            stop=row.get("stop", []),
        )
        for index, row in enumerate(rows)
    ]
    done = engine.generate(requests)
    found = []
    for index, row in enumerate(rows):
        answer = done[str(index)]
        message = parse_reply(answer.text, row.get("thinking", False))
        text = message["content"] or ""
        if message.get("tool_calls"):
            call = message["tool_calls"][0]["function"]
            text = f'{{"name": {json.dumps(call["name"])}, "arguments": {call["arguments"]}}}'
        found.append(Answer(text, answer.token_ids, answer.finish_reason))
    return found


def prompt_ids(tokenizer: KimiTokenizer, row: Row) -> list[int]:
    return tokenizer.encode_chat(
        row["messages"], row.get("tools"), thinking=row.get("thinking", False)
    )[1]


def by_kind(rows: Sequence[Row], answers: Sequence[Answer]) -> dict[str, Any]:
    """Right answers of each kind as [right, asked], their share, and faulty answers by fault."""
    right: dict[str, list[int]] = {}
    faults: dict[str, int] = {}
    for row, answer in zip(rows, answers, strict=True):
        count = right.setdefault(row["category"], [0, 0])
        count[0] += exercises.is_right(row["check"], row["reference"], answer.text)
        count[1] += 1
        if answer.fault:
            faults[answer.fault] = faults.get(answer.fault, 0) + 1
    share = sum(count[0] for count in right.values()) / len(rows)
    return {"right": round(share, 4), "by_kind": right, "faults": faults}


def agreement(first: Sequence[Answer], second: Sequence[Answer]) -> dict[str, float]:
    """Share of equal answers, and share of the first's tokens before the first difference."""
    same = shared = 0
    for one, other in zip(first, second, strict=True):
        same += one.token_ids == other.token_ids
        pairs = zip(one.token_ids, other.token_ids, strict=False)
        shared += len(list(itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)))
    total = sum(len(one.token_ids) for one in first)
    return {
        "same_answers": round(same / len(first), 4),
        "shared_tokens": round(shared / max(1, total), 4),
    }


@torch.inference_mode()
def costs(directory: Path, rows: Sequence[Row]) -> dict[str, Any]:
    """Experts touched by four tokens over one, and held-out bits per byte (figures.py)."""
    target = load_target(directory, dtype=torch.float32)
    tokenizer = KimiTokenizer(directory)
    texts = []
    for row in [row for row in rows if row["check"] != "call" and not row.get("thinking")][::4]:
        texts.append(
            (
                prompt_ids(tokenizer, row),
                tokenizer.encode(row["reference"]),
                len(row["reference"].encode()),
            )
        )
    return figures.experts_touched(target, texts) | figures.bits_per_byte(target, texts)


def distinct(
    directory: Path, rows: Sequence[Row], greedy: Sequence[Answer], dtype: torch.dtype
) -> dict[str, Any]:
    """Distinct 4-grams of stories over their references'; other answers are too short."""
    at = [index for index, row in enumerate(rows) if row["category"] == "story"]
    sampled = answer_all(directory, [rows[index] for index in at], dtype, temperature=1.0)
    held = mean_distinct_ratio([rows[index]["reference"] for index in at], DISTINCT_UNITS)
    found = {
        "distinct_greedy": mean_distinct_ratio(
            [greedy[index].text for index in at], DISTINCT_UNITS
        ),
        "distinct_sampled": mean_distinct_ratio(
            [answer.text for answer in sampled], DISTINCT_UNITS
        ),
    }
    return {
        f"{name}_over_heldout": round(value / held, 4)
        for name, value in found.items()
        if value and held
    }


def print_table(found: dict[str, Any], rows: Sequence[Row], greedy: Sequence[Answer]) -> None:
    forms = ("bf16", "nvfp4")
    print(f"{'kind':12}" + "".join(f"{form:>12}" for form in forms))
    for kind in found["bf16"]["by_kind"]:
        print(
            f"{kind:12}"
            + "".join("{:>9}/{}".format(*found[form]["by_kind"][kind]) for form in forms)
        )
    print(f"{'all':12}" + "".join(f"{found[form]['right']:>12.1%}" for form in forms))
    for kind in found["bf16"]["by_kind"]:
        at = next(index for index, row in enumerate(rows) if row["category"] == kind)
        print(
            f"\n[{kind}] {(rows[at]['messages'][-1]['content'] or '')[-300:]}\n"
            f"  -> {greedy[at].text[:300]}"
        )
        print(f"   = {rows[at]['reference'][:300]}")
    brief = {
        form: {key: value for key, value in found[form].items() if key != "by_kind"}
        for form in forms
    }
    print("\n" + json.dumps(brief | {"figures": found["figures"]}, indent=2))


if __name__ == "__main__":
    main()
