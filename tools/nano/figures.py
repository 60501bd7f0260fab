"""Context for a small model's speed-up: cost of a draft step, experts touched, bits per byte."""

from __future__ import annotations

import json
import math
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from trtspec import data_files
from trtspec.checkpoint.tokenizer import KimiTokenizer
from trtspec.models.eagle3 import Eagle3Head
from trtspec.models.fast import prepare_for_decoding
from trtspec.models.k2 import KimiModel
from trtspec.models.moe import Router

CONTEXT = 128  # cached tokens while steps are timed
REPEATS = 60
BLOCK = 4  # tokens verified at once with draft length 3


def held_out(tokenizer: KimiTokenizer, samples: int) -> list[tuple[list[int], list[int], int]]:
    """(prompt ids, reference ids, reference bytes) of shipped texts, spread over the file."""
    path = data_files.kimi_nano_dir() / "prompts_heldout.jsonl"
    records = [
        json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line.strip()
    ]
    records = [record for record in records if record.get("reference")]
    found = []
    for record in records[:: max(1, len(records) // samples)][:samples]:
        prompt = tokenizer.encode_chat(record["messages"])[1]
        found.append(
            (prompt, tokenizer.encode(record["reference"]), len(record["reference"].encode()))
        )
    return found


@torch.inference_mode()
def step_costs(target: KimiModel, head: Eagle3Head, rows: int = 1) -> dict[str, float]:
    """Median milliseconds of processor time of a step, for `rows` sequences.

    A target step, a draft step with its logits and a step that verifies BLOCK tokens. The three
    take turns, so that a busy machine slows them alike.
    """
    prepare_for_decoding(target)
    prepare_for_decoding(head)
    cache = target.new_cache(rows, CONTEXT + BLOCK)
    draft_cache = head.new_cache(rows, CONTEXT + BLOCK)
    start = torch.full((rows,), CONTEXT)
    block = torch.randint(300, (rows, BLOCK))
    token = block[:, :1]
    state = torch.zeros(rows, 1, head.spec.hidden_size, dtype=target.dtype)
    steps: dict[str, Callable[[], Any]] = {
        "target_step": lambda: target(token, start, cache, length=CONTEXT + 1),
        "draft_step": lambda: head.logits(
            head(state, token, start, draft_cache, length=CONTEXT + 1)[1]
        ).argmax(-1),
        "verify_step": lambda: target(block, start, cache, length=CONTEXT + BLOCK),
    }
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(REPEATS):
        for name, step in steps.items():
            began = time.process_time()
            step()
            times[name].append(1000 * (time.process_time() - began))
    # the first rounds pay for allocation
    medians = {name: statistics.median(values[REPEATS // 4 :]) for name, values in times.items()}
    return {
        **{f"{name}_ms": round(value, 4) for name, value in medians.items()},
        "draft_over_target": round(medians["draft_step"] / medians["target_step"], 4),
        "verify_over_target": round(medians["verify_step"] / medians["target_step"], 4),
    }


def experts_touched(
    target: KimiModel, texts: list[tuple[list[int], list[int], int]]
) -> dict[str, float]:
    """Distinct routed experts of BLOCK consecutive tokens over those of one token.

    Averaged over layers and text.
    """
    ratios: list[float] = []

    def count(_: Any, __: Any, output: tuple[torch.Tensor, torch.Tensor]) -> None:
        ids = output[0]
        whole = len(ids) // BLOCK * BLOCK
        for group in ids[:whole].view(-1, BLOCK * ids.shape[1]):
            ratios.append(len(group.unique()) / ids.shape[1])

    hooks = [
        module.register_forward_hook(count)
        for module in target.modules()
        if isinstance(module, Router)
    ]
    for prompt, answer, _ in texts[:8]:
        target(torch.tensor([(prompt + answer)[:512]]))
    for hook in hooks:
        hook.remove()
    return {"experts_4_over_1": round(statistics.mean(ratios), 4)} if ratios else {}


def bits_per_byte(
    target: KimiModel, texts: list[tuple[list[int], list[int], int]]
) -> dict[str, float]:
    """Cross-entropy of held-out answers given their prompts, in bits per byte of the answers."""
    bits, size = 0.0, 0
    for prompt, answer, length in texts:
        ids = prompt + answer
        if not answer or len(ids) > target.spec.max_position_embeddings:
            continue
        logits = target(torch.tensor([ids])).logits[0, len(prompt) - 1 : -1]
        loss = torch.nn.functional.cross_entropy(logits, torch.tensor(answer), reduction="sum")
        bits += loss.item() / math.log(2)
        size += length
    return {"heldout_bits_per_byte": round(bits / size, 4), "heldout_bytes": size} if size else {}
