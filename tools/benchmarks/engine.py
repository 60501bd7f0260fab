"""Output tokens per second with and without speculation, and against transformers' generate.

    python -m tools.benchmarks.engine --target DIR --head DIR [--temperature 0 1] [--rounds 5]

Variants take turns on the same held-out prompts of the target, slots are refilled, prefill is
included; figures are medians over the turns and every ratio is taken inside one turn. transformers
decodes batch 1 only.
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

import torch

from tools.nano.figures import step_costs
from trtspec.checkpoint.tokenizer import KimiTokenizer
from trtspec.engine.drafters import DraftSampling
from trtspec.engine.engine import Engine, EngineOptions
from trtspec.engine.request import GenerationRequest
from trtspec.engine.server import thread_count
from trtspec.models.eagle3 import Eagle3Head
from trtspec.models.head_weights import load_head
from trtspec.models.precision import default_dtype
from trtspec.models.weights import load_target

CONCURRENCY = (1, 4, 16)
DRAFT_LENGTH, NEW_TOKENS = 3, 96
Engines = dict[str, Callable[[], Engine]]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--target", type=Path, required=True)
    parser.add_argument("--head", type=Path, required=True)
    parser.add_argument("--temperature", type=float, nargs="+", default=[0.0, 1.0])
    parser.add_argument(
        "--draft-sampling", nargs="+", choices=["argmax", "probabilistic"], default=["argmax"]
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dtype", choices=["auto", "bfloat16", "float32"], default="auto")
    options = parser.parse_args()
    torch.set_num_threads(thread_count(256))
    dtype = default_dtype() if options.dtype == "auto" else getattr(torch, options.dtype)
    target = load_target(options.target, dtype=dtype)
    head = load_head(options.head, target, dtype=dtype)
    print(f"{dtype}, {torch.get_num_threads()} threads, draft length {DRAFT_LENGTH}, "
          f"{NEW_TOKENS} new tokens at most, {options.rounds} turns")  # fmt: skip

    def engine(
        drafting: Eagle3Head | None, concurrency: int, draft_sampling: DraftSampling = "argmax"
    ) -> Engine:
        sizes = EngineOptions(DRAFT_LENGTH, concurrency, draft_sampling=draft_sampling)
        return Engine(target, drafting, sizes)

    for temperature in options.temperature:
        requests = read_requests(options.target, temperature)
        for concurrency in CONCURRENCY:
            engines: Engines = {"plain": partial(engine, None, concurrency)}
            for sampling in options.draft_sampling:
                engines[f"eagle3, {sampling}"] = partial(engine, head, concurrency, sampling)
            print(f"\ntemperature {temperature:g}, concurrency {concurrency}")
            compare(engines, requests, concurrency, options.rounds)
    for rows in CONCURRENCY:
        print(f"\n{rows} rows: {step_costs(target, head, rows)}")
    requests = read_requests(options.target, 0.0)[: 1 + 2 * options.rounds]
    engines = {
        "plain engine": partial(engine, None, 1),
        "engine with the head": partial(engine, head, 1),
    }
    transformers_speed(options.target, target.dtype, engines, requests)


def read_requests(target: Path, temperature: float) -> list[GenerationRequest]:
    tokenizer = KimiTokenizer(target)
    lines = (target / "prompts_heldout.jsonl").read_text(encoding="utf-8").splitlines()
    prompts = [tokenizer.encode_chat(json.loads(line)["messages"])[1] for line in lines]
    return [
        GenerationRequest(str(n), prompt, NEW_TOKENS, temperature=temperature, seed=n)
        for n, prompt in enumerate(prompts)
        if len(prompt) + NEW_TOKENS < 2048
    ]


def compare(
    engines: Engines, requests: list[GenerationRequest], concurrency: int, rounds: int
) -> None:
    """Runs every variant in turn, in rotating order, with 2 or more waves of fresh requests."""
    wave = max(4, 2 * concurrency)
    runs: dict[str, list[Run]] = {name: [] for name in engines}
    for turn in range(rounds + 1):
        some = [requests[(turn * wave + n) % len(requests)] for n in range(wave)]
        first = turn % len(engines)
        for name in list(engines)[first:] + list(engines)[:first]:
            run = timed(engines[name](), some)
            if turn:  # the first one warms up
                runs[name].append(run)
    for name, turns in runs.items():
        pairs = zip(turns, runs["plain"], strict=True)
        ratios = [run.tokens_per_second / plain.tokens_per_second for run, plain in pairs]
        print(
            f"  {name:22} {statistics.median(run.tokens_per_second for run in turns):8.1f} tok/s   "
            f"{statistics.median(ratios):5.2f}x plain ({min(ratios):.2f}-{max(ratios):.2f})   "
            f"acceptance length {statistics.mean(run.acceptance_length for run in turns):.2f} "
            f"({sum(run.steps for run in turns)} steps)",
            flush=True,
        )


@dataclass(frozen=True)
class Run:
    """Output tokens per second, emitted tokens per verification, and verifications."""

    tokens_per_second: float
    acceptance_length: float
    steps: int


def timed(engine: Engine, requests: list[GenerationRequest]) -> Run:
    began = time.perf_counter()
    engine.generate(requests)
    seconds = time.perf_counter() - began
    totals = engine.totals
    length = 1 + totals.accepted / max(totals.steps, 1)
    return Run(totals.tokens / seconds, length, totals.steps)


def transformers_speed(
    directory: Path, dtype: torch.dtype, engines: Engines, requests: list[GenerationRequest]
) -> None:
    """transformers' own greedy generate and both engines, in turn on the same prompts, batch 1."""
    import transformers

    transformers.logging.set_verbosity_error()
    model = transformers.AutoModelForImageTextToText.from_pretrained(directory, dtype=dtype).eval()
    ends = list(KimiTokenizer(directory).eos_ids)

    @torch.inference_mode()
    def generate(request: GenerationRequest) -> int:
        prompt = torch.tensor([request.prompt_ids])
        answer = model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=NEW_TOKENS,
            do_sample=False,
            eos_token_id=ends,
            pad_token_id=0,
        )
        return answer.shape[1] - prompt.shape[1]

    def engine_tokens(engine: Callable[[], Engine], request: GenerationRequest) -> int:
        return len(engine().generate([request])[request.id].token_ids)

    variants: dict[str, Callable[[GenerationRequest], int]] = {"generate": generate}
    variants |= {name: partial(engine_tokens, engine) for name, engine in engines.items()}
    speeds: dict[str, list[float]] = {name: [] for name in variants}
    for turn, request in enumerate(requests):
        for name, run in variants.items():
            began = time.perf_counter()
            tokens = run(request)
            if turn:  # the first one warms up
                speeds[name].append(tokens / (time.perf_counter() - began))
    print(f"\ntransformers, batch 1, {len(requests) - 1} prompts")
    for name, values in speeds.items():
        ratios = [value / base for value, base in zip(values, speeds["generate"], strict=True)]
        print(
            f"  {name:24} {statistics.median(values):8.1f} tok/s   "
            f"{statistics.median(ratios):5.2f}x generate"
        )


if __name__ == "__main__":
    main()
