"""Output tokens per second with and without speculation, side by side, and against transformers' generate.

    python tests/benchmarks/engine.py --target DIR --head DIR [--prompts FILE] [--temperature 1]

Variants take turns on the same requests, slots are refilled, prefill is included; figures are medians over the turns
and every ratio is taken inside one turn. Prompts are JSON lines with `messages`; transformers decodes batch 1 only.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from trtspec.checkpoint.tokenizer import KimiTokenizer
from trtspec.engine.engine import Engine
from trtspec.engine.sequence import Request
from trtspec.engine.server import thread_count
from trtspec.models.head_weights import load_head
from trtspec.models.kimi import KimiModel
from trtspec.models.weights import load_target

CONTEXT_STEPS = 60


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", type=Path, required=True)
    parser.add_argument("--head", type=Path, required=True)
    parser.add_argument("--prompts", type=Path, help="default: prompts_heldout.jsonl of the target")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--draft-len", type=int, default=3)
    parser.add_argument("--new-tokens", type=int, default=96)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--no-transformers", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(thread_count(256))
    dtype = getattr(torch, options.dtype)
    target = load_target(options.target, dtype=dtype)
    head = load_head(options.head, target, dtype=dtype)
    requests = read_requests(options)
    print(f"{options.dtype}, {torch.get_num_threads()} threads, draft length {options.draft_len}, temperature "
          f"{options.temperature}, {options.new_tokens} new tokens at most, {options.rounds} turns")  # fmt: skip
    for concurrency in options.concurrency:
        engines: dict[str, Callable[[], Engine]] = {
            "plain": lambda: Engine(target, max_batch_size=concurrency),  # noqa: B023
            "eagle3": lambda: Engine(
                target,
                head,
                drafter="eagle3",
                draft_len=options.draft_len,
                max_batch_size=concurrency,  # noqa: B023
            ),
            "prompt-lookup": lambda: Engine(
                target,
                drafter="prompt-lookup",
                draft_len=options.draft_len,
                max_batch_size=concurrency,  # noqa: B023
            ),
        }
        compare(engines, requests, concurrency, options.rounds)
    draft_cost(target, options.head)
    if not options.no_transformers and options.temperature == 0:
        transformers_speed(options, dtype, requests)


def read_requests(options: argparse.Namespace) -> list[Request]:
    tokenizer = KimiTokenizer(options.target)
    path = options.prompts or options.target / "prompts_heldout.jsonl"
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    prompts = [tokenizer.apply_chat_template(row["messages"]) for row in rows]
    return [
        Request(str(n), prompt, options.new_tokens, temperature=options.temperature, seed=n)
        for n, prompt in enumerate(prompts)
        if len(prompt) + options.new_tokens < 2048
    ]


def compare(engines: dict[str, Callable[[], Engine]], requests: list[Request], concurrency: int, rounds: int) -> None:
    """Each turn runs 2 or more waves of fresh requests through every variant, in rotating order."""
    wave = max(4, 2 * concurrency)
    speeds: dict[str, list[float]] = {name: [] for name in engines}
    lengths: dict[str, list[float]] = {name: [] for name in engines}
    for turn in range(rounds + 1):
        some = [requests[(turn * wave + n) % len(requests)] for n in range(wave)]
        order = list(engines)[turn % 3 :] + list(engines)[: turn % 3]
        for name in order:
            engine = engines[name]()
            began = time.perf_counter()
            engine.generate(some)
            seconds = time.perf_counter() - began
            if turn:  # the first one warms up
                speeds[name].append(engine.totals.tokens / seconds)
                lengths[name].append(1 + engine.totals.accepted / max(engine.totals.steps, 1))
    print(f"\nconcurrency {concurrency}, {wave} requests per turn")
    for name in engines:
        ratios = [ours / plain for ours, plain in zip(speeds[name], speeds["plain"], strict=True)]
        print(
            f"  {name:14} {statistics.median(speeds[name]):8.1f} tok/s   {statistics.median(ratios):5.2f}x plain "
            f"({min(ratios):.2f}-{max(ratios):.2f})   acceptance length {statistics.mean(lengths[name]):.2f}",
            flush=True,
        )


@torch.inference_mode()
def draft_cost(target: KimiModel, head_dir: Path) -> None:
    """Median cost of one draft step and of verifying 4 tokens over one target step, batch 1, 128 tokens of context."""
    head = load_head(head_dir, target, dtype=target.dtype)
    cache, draft_cache, start = target.new_cache(1, 160), head.new_cache(1, 160), torch.tensor([128])
    one, four = torch.zeros(1, 1, dtype=torch.int64), torch.zeros(1, 4, dtype=torch.int64)
    state = torch.zeros(1, 1, target.spec.hidden_size, dtype=target.dtype)
    steps: dict[str, Callable[[], Any]] = {
        "target step": lambda: target(one, start, cache),
        "verify 4": lambda: target(four, start, cache),
        "draft step": lambda: head.logits(head(state, one, start, draft_cache)[1]).argmax(-1),
    }
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(CONTEXT_STEPS):
        for name, step in steps.items():
            began = time.perf_counter()
            step()
            seconds[name].append(time.perf_counter() - began)
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    print()
    for name, value in medians.items():
        print(f"  {name:14} {1000 * value:6.2f} ms   {value / medians['target step']:.3f} target steps")


def transformers_speed(options: argparse.Namespace, dtype: torch.dtype, requests: list[Request]) -> None:
    """transformers' own greedy generate and prompt lookup on the same prompts, batch 1, beside the plain engine."""
    import transformers

    transformers.logging.set_verbosity_error()
    config = json.loads((options.target / "config.json").read_text())
    kind = transformers.AutoModelForImageTextToText if "text_config" in config else transformers.AutoModelForCausalLM
    model = kind.from_pretrained(options.target, dtype=dtype).eval()
    target = load_target(options.target, dtype=dtype)
    ends = list(KimiTokenizer(options.target).eos_ids)
    speeds: dict[str, list[float]] = {"plain engine": [], "generate": [], "generate, prompt lookup": []}
    for request in requests[: 2 * options.rounds]:
        began = time.perf_counter()
        tokens = Engine(target, max_batch_size=1).generate([request])[request.id].token_ids
        speeds["plain engine"].append(len(tokens) / (time.perf_counter() - began))
        for name, lookup in (
            ("generate", {}),
            ("generate, prompt lookup", {"prompt_lookup_num_tokens": options.draft_len}),
        ):
            prompt = torch.tensor([request.prompt_ids])
            began = time.perf_counter()
            with torch.inference_mode():
                made = model.generate(
                    prompt,
                    attention_mask=torch.ones_like(prompt),
                    max_new_tokens=request.max_tokens,
                    do_sample=False,
                    eos_token_id=ends,
                    pad_token_id=0,
                    **lookup,
                )
            speeds[name].append((made.shape[1] - prompt.shape[1]) / (time.perf_counter() - began))
    print("\ntransformers, batch 1")
    for name, values in speeds.items():
        ratios = [value / plain for value, plain in zip(values, speeds["plain engine"], strict=True)]
        print(f"  {name:24} {statistics.median(values):8.1f} tok/s   {statistics.median(ratios):5.2f}x plain engine")


if __name__ == "__main__":
    main()
