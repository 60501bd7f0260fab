"""Output tokens per second with and without speculation, side by side, and against transformers' generate.

    python -m tools.benchmarks.engine --target DIR --head DIR [--prompts FILE] [--temperature 0 1]

Variants take turns on the same requests, slots are refilled, prefill is included; figures are medians over the turns
and every ratio is taken inside one turn, of wall time and of the process's own CPU time (the steadier one where others
use the machine too). Prompts are JSON lines with `messages`; transformers decodes batch 1 only.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from trtspec.checkpoint.tokenizer import KimiTokenizer
from trtspec.engine.drafters import DraftSampling
from trtspec.engine.engine import Engine, EngineOptions
from trtspec.engine.request import GenerationRequest
from trtspec.engine.server import thread_count
from trtspec.models.eagle3 import Eagle3Head
from trtspec.models.fast import prepare_for_decoding
from trtspec.models.head_weights import load_head
from trtspec.models.k2 import KimiModel
from trtspec.models.precision import default_dtype
from trtspec.models.weights import load_target

CONTEXT_STEPS = 60


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--target", type=Path, required=True)
    parser.add_argument("--head", type=Path, required=True)
    parser.add_argument("--prompts", type=Path, help="default: prompts_heldout.jsonl of the target")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--draft-len", type=int, default=3)
    parser.add_argument("--new-tokens", type=int, default=96)
    parser.add_argument("--temperature", type=float, nargs="+", default=[0.0, 1.0])
    parser.add_argument(
        "--draft-sampling", nargs="+", choices=["argmax", "probabilistic"], default=["argmax"]
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dtype", choices=["auto", "bfloat16", "float32"], default="auto")
    parser.add_argument("--no-transformers", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(thread_count(256))
    dtype = default_dtype() if options.dtype == "auto" else getattr(torch, options.dtype)
    target = load_target(options.target, dtype=dtype)
    head = load_head(options.head, target, dtype=dtype)
    print(f"{dtype}, {torch.get_num_threads()} threads, draft length {options.draft_len}, "
          f"{options.new_tokens} new tokens at most, {options.rounds} turns")  # fmt: skip

    def engine(
        drafting: Eagle3Head | None, concurrency: int, draft_sampling: DraftSampling = "argmax"
    ) -> Engine:
        return Engine(
            target,
            drafting,
            EngineOptions(
                draft_len=options.draft_len,
                draft_sampling=draft_sampling,
                max_batch_size=concurrency,
            ),
        )

    for temperature in options.temperature:
        requests = read_requests(options, temperature)
        for concurrency in options.concurrency:
            engines: dict[str, Callable[[], Engine]] = {"plain": partial(engine, None, concurrency)}
            for sampling in options.draft_sampling:
                label = "eagle3" if sampling == "argmax" else f"eagle3, {sampling}"
                engines[label] = partial(engine, head, concurrency, sampling)
            print(f"\ntemperature {temperature:g}, concurrency {concurrency}")
            compare(engines, requests, concurrency, options.rounds)
    for rows in options.concurrency:
        draft_cost(target, options.head, rows)
    if not options.no_transformers:
        transformers_speed(options, head, target, read_requests(options, 0.0))


def read_requests(options: argparse.Namespace, temperature: float) -> list[GenerationRequest]:
    tokenizer = KimiTokenizer(options.target)
    path = options.prompts or options.target / "prompts_heldout.jsonl"
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    prompts = [tokenizer.encode_chat(row["messages"])[1] for row in rows]
    return [
        GenerationRequest(str(n), prompt, options.new_tokens, temperature=temperature, seed=n)
        for n, prompt in enumerate(prompts)
        if len(prompt) + options.new_tokens < 2048
    ]


def compare(
    engines: dict[str, Callable[[], Engine]],
    requests: list[GenerationRequest],
    concurrency: int,
    rounds: int,
) -> None:
    """Runs every variant in turn, in rotating order; a turn has 2 or more waves of fresh requests."""
    wave = max(4, 2 * concurrency)
    runs: dict[str, list[Run]] = {name: [] for name in engines}
    for turn in range(rounds + 1):
        some = [requests[(turn * wave + n) % len(requests)] for n in range(wave)]
        first = turn % len(engines)
        for name in list(engines)[first:] + list(engines)[:first]:
            run = timed(engines[name](), some)
            if turn:  # the first one warms up
                runs[name].append(run)
    for name, ours in runs.items():
        wall = [
            run.wall_speed / plain.wall_speed
            for run, plain in zip(ours, runs["plain"], strict=True)
        ]
        cpu = [
            run.cpu_speed / plain.cpu_speed for run, plain in zip(ours, runs["plain"], strict=True)
        ]
        print(
            f"  {name:14} {statistics.median(run.wall_speed for run in ours):8.1f} tok/s   "
            f"{statistics.median(wall):5.2f}x plain ({min(wall):.2f}-{max(wall):.2f})   "
            f"CPU time {statistics.median(cpu):5.2f}x ({min(cpu):.2f}-{max(cpu):.2f})   "
            f"acceptance length {statistics.mean(run.acceptance_length for run in ours):.2f} "
            f"({sum(run.steps for run in ours)} steps)",
            flush=True,
        )


@dataclass(frozen=True)
class Run:
    """Tokens per second of wall time and of CPU time, and emitted tokens per verification."""

    wall_speed: float
    cpu_speed: float
    acceptance_length: float
    steps: int


def timed(engine: Engine, requests: list[GenerationRequest]) -> Run:
    wall, cpu = time.perf_counter(), time.process_time()
    engine.generate(requests)
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    totals = engine.totals
    return Run(
        totals.tokens / wall,
        totals.tokens / cpu,
        1 + totals.accepted / max(totals.steps, 1),
        totals.steps,
    )


@torch.inference_mode()
def draft_cost(target: KimiModel, head_dir: Path, rows: int) -> None:
    """Median CPU time of a draft step and of verifying 4 tokens, over one target step (128 of context)."""
    head = load_head(head_dir, target, dtype=target.dtype)
    prepare_for_decoding(head)
    cache, draft_cache, start = (
        target.new_cache(rows, 160),
        head.new_cache(rows, 160),
        torch.full((rows,), 128),
    )
    one, four = (torch.randint(300, (rows, width)) for width in (1, 4))
    state = torch.zeros(rows, 1, target.spec.hidden_size, dtype=target.dtype)
    steps: dict[str, Callable[[], Any]] = {
        "target step": lambda: target(one, start, cache, length=129),
        "verify 4": lambda: target(four, start, cache, length=132),
        "draft step": lambda: head.logits(
            head(state, one, start, draft_cache, length=129)[1]
        ).argmax(-1),
    }
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(CONTEXT_STEPS):
        for name, step in steps.items():
            began = time.process_time()
            step()
            seconds[name].append(time.process_time() - began)
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    print(f"\n{rows} rows")
    for name, value in medians.items():
        print(
            f"  {name:14} {1000 * value:6.2f} ms   {value / medians['target step']:.3f} target steps"
        )


def transformers_speed(
    options: argparse.Namespace,
    head: Eagle3Head,
    target: KimiModel,
    requests: list[GenerationRequest],
) -> None:
    """transformers' own greedy generate and both engines, in turn on the same prompts, batch 1."""
    import transformers

    transformers.logging.set_verbosity_error()
    config = json.loads((options.target / "config.json").read_text())
    kind = (
        transformers.AutoModelForImageTextToText
        if "text_config" in config
        else transformers.AutoModelForCausalLM
    )
    model = kind.from_pretrained(options.target, dtype=target.dtype).eval()
    ends = list(KimiTokenizer(options.target).eos_ids)

    def generate(request: GenerationRequest) -> int:
        prompt = torch.tensor([request.prompt_ids])
        with torch.inference_mode():
            made = model.generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                max_new_tokens=request.max_tokens,
                do_sample=False,
                eos_token_id=ends,
                pad_token_id=0,
            )
        return made.shape[1] - prompt.shape[1]

    def ours(request: GenerationRequest, drafting: Eagle3Head | None) -> int:
        engine = Engine(
            target, drafting, EngineOptions(draft_len=options.draft_len, max_batch_size=1)
        )
        return len(engine.generate([request])[request.id].token_ids)

    variants: dict[str, Callable[[GenerationRequest], int]] = {
        "generate": generate,
        "plain engine": partial(ours, drafting=None),
        "engine with the head": partial(ours, drafting=head),
    }
    speeds: dict[str, list[float]] = {name: [] for name in variants}
    for turn, request in enumerate(requests[: 1 + 2 * options.rounds]):
        for name, run in variants.items():
            began = time.perf_counter()
            made = run(request)
            if turn:  # the first one warms up
                speeds[name].append(made / (time.perf_counter() - began))
    print(f"\ntransformers, batch 1, {2 * options.rounds} prompts")
    for name, values in speeds.items():
        ratios = [value / theirs for value, theirs in zip(values, speeds["generate"], strict=True)]
        print(
            f"  {name:24} {statistics.median(values):8.1f} tok/s   {statistics.median(ratios):5.2f}x generate"
        )


if __name__ == "__main__":
    main()
