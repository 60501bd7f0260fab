"""The figures that say whether kimi-nano flatters speculation: `python -m trtspec.nano.measure TARGET [--head HEAD]`.

Held-out bits per byte, experts touched by 4 tokens over 1, the cost of a draft step over a target step, and the share
of distinct 4-grams in held-out text (the yardstick for generated text).
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from trtspec.checkpoint.tokenizer import KimiTokenizer
from trtspec.models.head_weights import load_head
from trtspec.models.kimi import KimiModel
from trtspec.models.moe import MoE
from trtspec.models.weights import load_target
from trtspec.report import print_json

CONTEXT = 128  # tokens in the cache when steps are timed
ROUNDS = 60


def heldout_rows(directory: Path) -> list[dict[str, Any]]:
    """The held-out prompts with the corpus's own answers."""
    text = (directory / "prompts_heldout.jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]


def distinct_ngrams(tokens: list[int], size: int = 4) -> float:
    """Distinct n-grams over all n-grams of one text; 1 means that nothing repeats."""
    grams = [tuple(tokens[i : i + size]) for i in range(len(tokens) - size + 1)]
    return len(set(grams)) / len(grams) if grams else 1.0


@torch.inference_mode()
def bits_per_byte(model: KimiModel, tokenizer: KimiTokenizer, rows: list[dict[str, Any]]) -> float:
    """Cross entropy of the held-out answers given their prompts, in bits over the answers' UTF-8 bytes."""
    bits, size = 0.0, 0
    for row in rows:
        prompt = tokenizer.apply_chat_template(row["messages"])
        answer = tokenizer.encode(row["reference"])
        logits = model(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1]
        losses = nn.functional.cross_entropy(logits, torch.tensor(answer), reduction="sum")
        bits += losses.item() / math.log(2)
        size += len(row["reference"].encode())
    return bits / size


@torch.inference_mode()
def experts_touched(model: KimiModel, tokenizer: KimiTokenizer, rows: list[dict[str, Any]], window: int = 4) -> float:
    """Distinct experts of `window` consecutive tokens over those of one token, mean over layers and held-out text."""
    ratios: list[float] = []
    per_token = model.spec.num_experts_per_tok

    def record(_gate: nn.Module, _inputs: Any, output: tuple[Tensor, Tensor]) -> None:
        ids = output[0]
        for begin in range(0, len(ids) - window + 1, window):
            ratios.append(len(ids[begin : begin + window].unique()) / per_token)

    hooks = [layer.mlp.gate.register_forward_hook(record) for layer in model.layers if isinstance(layer.mlp, MoE)]
    for row in rows:
        model(torch.tensor([tokenizer.encode(row["reference"])]))
    for hook in hooks:
        hook.remove()
    return statistics.mean(ratios)


@torch.inference_mode()
def step_seconds(model: KimiModel, head_path: Path) -> dict[str, float]:
    """Medians of one target step of 1 and of 4 tokens and of one draft step, batch 1, taken in turn."""
    head = load_head(head_path, model, dtype=model.dtype, device="cpu")
    cache, draft_cache = model.new_cache(1, CONTEXT + 8), head.new_cache(1, CONTEXT + 8)
    start, one, four = torch.tensor([CONTEXT]), torch.zeros(1, 1, dtype=torch.long), torch.zeros(1, 4, dtype=torch.long)
    state = torch.zeros(1, 1, model.spec.hidden_size, dtype=model.dtype)
    head.logits(head(state, one, start, draft_cache)[1]).argmax(-1)

    def draft() -> None:
        head.logits(head(state, one, start, draft_cache)[1]).argmax(-1)

    timed: dict[str, Callable[[], Any]] = {
        "target_step": lambda: model(one, start, cache),
        "verify_4": lambda: model(four, start, cache),
        "draft_step": draft,
    }
    seconds: dict[str, list[float]] = {name: [] for name in timed}
    for _ in range(ROUNDS):
        for name, run in timed.items():
            began = time.perf_counter()
            run()
            seconds[name].append(time.perf_counter() - began)
    return {name: statistics.median(values) for name, values in seconds.items()}


def measure(target: Path, head: Path | None, samples: int) -> dict[str, Any]:
    """All figures of this module for one target, with N."""
    model, tokenizer = load_target(target), KimiTokenizer(target)
    rows = heldout_rows(target)[:samples]
    texts = [distinct_ngrams(tokenizer.encode(row["reference"])) for row in rows]
    figures: dict[str, Any] = {
        "samples": len(rows),
        "bits_per_byte": bits_per_byte(model, tokenizer, rows),
        "experts_touched_4_over_1": experts_touched(model, tokenizer, rows),
        "distinct_4grams_heldout_text": statistics.mean(texts),
    }
    if head is not None:
        seconds = step_seconds(model, head)
        figures["step_ms"] = {name: 1000 * value for name, value in seconds.items()}
        figures["draft_step_over_target_step"] = seconds["draft_step"] / seconds["target_step"]
        figures["verify_4_over_target_step"] = seconds["verify_4"] / seconds["target_step"]
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("target", type=Path)
    parser.add_argument("--head", type=Path)
    parser.add_argument("--samples", type=int, default=100)
    options = parser.parse_args()
    print_json(measure(options.target, options.head, options.samples))


if __name__ == "__main__":
    main()
