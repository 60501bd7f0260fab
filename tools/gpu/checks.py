"""The checks of `make test-gpu`, each a function from the models to rows of the table."""

from __future__ import annotations

import json
import statistics
import time
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import torch
from scipy.stats import chi2_contingency
from torch import Tensor

from tests.engine.near_ties import first_divergence, rounding_at
from trtspec.checkpoint.tokenizer import KimiTokenizer
from trtspec.engine.drafters import DraftSampling
from trtspec.engine.engine import Engine, EngineOptions
from trtspec.engine.request import GenerationRequest
from trtspec.engine.sequence import Output
from trtspec.models.eagle3 import Eagle3Head
from trtspec.models.fast import prepare_for_decoding
from trtspec.models.head_weights import load_head
from trtspec.models.k2 import KimiModel
from trtspec.models.moe import Experts
from trtspec.models.precision import dtype_name
from trtspec.models.weights import load_target

# Root mean square of the difference to float32 on a CPU, over that of the logits.
MOST_APART = {torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 2e-2}
LEAST_P = 1e-4  # of the six tests for equal distributions
GROUPS = 8  # of rare tokens
DRAFTS = 3


@dataclass(frozen=True)
class Row:
    """One figure; the verdict is ok, FAILED, or empty where nothing is judged."""

    check: str
    setting: str
    figure: str
    verdict: str = ""


def judged(check: str, setting: str, figure: str, good: bool) -> Row:
    return Row(check, setting, figure, "ok" if good else "FAILED")


@dataclass(frozen=True)
class Sizes:
    """Prompts, tokens and repetitions of each check."""

    texts: int = 16
    text_tokens: int = 128
    answers: int = 32
    answer_tokens: int = 64
    samples: int = 3000
    concurrency: tuple[int, ...] = (1, 4, 16)
    turns: int = 5
    copied_bytes: int = 2**28

    @staticmethod
    def tiny() -> Sizes:
        return Sizes(2, 24, 2, 4, 60, (1, 4), 1, 2**20)


class Models:
    """Target and head: on the device as served and in float32, and in float32 on the CPU."""

    def __init__(
        self, target: Path, head: Path, device: torch.device, dtype: torch.dtype, sizes: Sizes
    ) -> None:
        self.paths, self.device, self.dtype, self.sizes = (target, head), device, dtype, sizes
        self.loaded: dict[tuple[str, torch.dtype], tuple[KimiModel, Eagle3Head]] = {}

    def on(self, device: torch.device | str, dtype: torch.dtype) -> tuple[KimiModel, Eagle3Head]:
        key = str(device), dtype
        if key not in self.loaded:
            with torch.inference_mode(False):
                target = load_target(self.paths[0], dtype=dtype, device=str(device))
                self.loaded[key] = (
                    target,
                    load_head(self.paths[1], target, dtype=dtype, device=str(device)),
                )
        return self.loaded[key]

    @property
    def dtypes(self) -> list[torch.dtype]:
        return list(dict.fromkeys((torch.float32, self.dtype)))

    @cached_property
    def prompts(self) -> list[list[int]]:
        tokenizer = KimiTokenizer(self.paths[0])
        held_out = self.paths[0] / "prompts_heldout.jsonl"
        if not held_out.exists():
            return [
                tokenizer.encode(f"Question {number}: why is the sky blue?") for number in range(64)
            ]
        rows = [json.loads(line) for line in held_out.read_text(encoding="utf-8").splitlines()]
        return [tokenizer.encode_chat(row["messages"])[1] for row in rows]

    def requests(self, count: int, **fields: float) -> list[GenerationRequest]:
        prompts = [self.prompts[number % len(self.prompts)][-256:] for number in range(count)]
        made = [
            GenerationRequest(
                str(number), prompt, self.sizes.answer_tokens, seed=number, ignore_eos=True
            )
            for number, prompt in enumerate(prompts)
        ]
        return [request.model_copy(update=fields) for request in made]

    def engine(
        self, drafts: int, rows: int, dtype: torch.dtype | None = None, **options: object
    ) -> Engine:
        target, head = self.on(self.device, dtype or self.dtype)
        sizes = EngineOptions(drafts or DRAFTS, rows, 512)
        return Engine(
            target,
            head if drafts else None,
            replace(sizes, **options),  # type: ignore[arg-type]
        )

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


@torch.inference_mode()
def exactness(models: Models) -> list[Row]:
    """Logits of the target, and of the head's first drafts, against float32 on the CPU."""
    sizes, reference, rows = models.sizes, models.on("cpu", torch.float32), []
    for dtype in models.dtypes:
        found = models.on(models.device, dtype)
        apart: list[tuple[float, float]] = []
        same = positions = 0
        for prompt in models.prompts[: sizes.texts]:
            tokens = torch.tensor([prompt[: sizes.text_tokens]])
            wanted, got = logits_of(*reference, tokens), logits_of(*found, tokens)
            apart.append((relative(got[0], wanted[0]), relative(got[1], wanted[1])))
            same += int((got[0].argmax(-1) == wanted[0].argmax(-1)).sum())
            positions += tokens.numel()
        for what, worst in zip(("target", "head"), map(max, zip(*apart, strict=True)), strict=True):
            figure = f"logits apart by {worst:.1e} of their size at most"
            figure += (
                f", best token the same at {same} of {positions} positions"
                if what == "target"
                else ""
            )
            rows.append(
                judged(
                    "exactness", f"{what}, {dtype_name(dtype)}", figure, worst <= MOST_APART[dtype]
                )
            )
    return rows


def logits_of(target: KimiModel, head: Eagle3Head, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Logits of the target [T, V] and the head's first drafts [T - 1, Vd], on the CPU.

    They are teacher-forced.
    """
    tokens = tokens.to(target.embed.weight.device)
    layers = tuple(head.spec.aux_layers or target.spec.default_aux_layers)
    out = target(tokens, aux_layers=layers)
    assert out.aux is not None
    _, normed = head(head.fuse(out.aux[:, :-1]), tokens[:, 1:], None, None)
    return out.logits[0].float().cpu(), head.logits(normed)[0].float().cpu()


def relative(got: Tensor, wanted: Tensor) -> float:
    return float((got - wanted).square().mean().sqrt() / wanted.square().mean().sqrt())


def losslessness(models: Models) -> list[Row]:
    """Greedy answers with and without drafts differ only in near-ties of measured rounding."""
    rows, requests = [], models.requests(models.sizes.answers)
    for dtype in models.dtypes:
        plain = models.engine(0, 1, dtype, record_gaps=True).generate(requests)
        for batch in models.sizes.concurrency[1:]:
            other = models.engine(DRAFTS, batch, dtype, record_gaps=True).generate(requests)
            equal, explained = compared(models.on(models.device, dtype)[0], requests, plain, other)
            figure = f"{equal} of {len(requests)} answers equal, {explained} part at a near-tie"
            setting = f"greedy, {dtype_name(dtype)}, batch {batch} against 1"
            rows.append(judged("losslessness", setting, figure, equal + explained == len(requests)))
    return rows


def compared(
    target: KimiModel,
    requests: list[GenerationRequest],
    plain: dict[str, Output],
    other: dict[str, Output],
) -> tuple[int, int]:
    """(equal answers, answers that diverge within rounding)."""
    found = [
        (request, first_divergence(plain[request.id], other[request.id])) for request in requests
    ]
    parted = [(request, divergence) for request, divergence in found if divergence is not None]
    near = sum(rounding_at(target, r.prompt_ids, plain[r.id], d).explains(d) for r, d in parted)
    return len(found) - len(parted), near


def distribution(models: Models) -> list[Row]:
    """Tests tokens 2 to 4 of one prompt's sampled answers, with and without drafts.

    They must have one distribution.
    """
    rows, count = [], models.sizes.samples
    plain = sampled(models.engine(0, 64), models, count, first_seed=0)
    samplings: tuple[DraftSampling, ...] = ("argmax", "probabilistic")
    for sampling in samplings:
        drafted = sampled(
            models.engine(DRAFTS, 64, draft_sampling=sampling), models, count, first_seed=count
        )
        found = [homogeneous(left, right) for left, right in zip(plain, drafted, strict=True)]
        chances = [
            p for p in found if p is not None
        ]  # a token that was nearly always the same tells nothing
        told = ", ".join("-" if p is None else f"{p:.3f}" for p in found)
        figure = f"chi-squared, p = {told} for tokens 2, 3, 4"
        setting = f"temperature 1, {sampling} drafts, 2 x {count} answers"
        rows.append(
            judged("distribution", setting, figure, bool(chances) and min(chances) > LEAST_P)
        )
    return rows


def sampled(engine: Engine, models: Models, count: int, first_seed: int) -> list[Counter[int]]:
    """Counts of the second, third and fourth token."""
    prompt = models.prompts[0][8:40]  # from within a text, where many tokens may follow
    requests = [
        GenerationRequest(str(seed), prompt, 4, temperature=1.0, seed=seed, ignore_eos=True)
        for seed in range(first_seed, first_seed + count)
    ]
    done = engine.generate(requests).values()
    return [Counter(completion.token_ids[place] for completion in done) for place in (1, 2, 3)]


def homogeneous(left: Counter[int], right: Counter[int]) -> float | None:
    """p of both being drawn from one distribution, None where nothing can be compared.

    Tokens seen fewer than 10 times are counted together, in groups by their ids.
    """
    both = left + right
    groups: dict[int, list[int]] = {}
    for token, seen in both.items():
        group = groups.setdefault(token if seen >= 10 else -1 - token % GROUPS, [0, 0])
        group[0] += left[token]
        group[1] += right[token]
    kept = [group for group in groups.values() if sum(group) >= 10]
    return float(chi2_contingency(list(zip(*kept, strict=True))).pvalue) if len(kept) > 1 else None


def speed(models: Models) -> list[Row]:
    """Output tokens per second, prompts included, plain and speculative."""
    rows = []
    for batch in models.sizes.concurrency:
        requests = models.requests(2 * batch)
        engines = {"plain": models.engine(0, batch), "speculative": models.engine(DRAFTS, batch)}
        speeds: dict[str, list[float]] = {name: [] for name in engines}
        for turn in range(models.sizes.turns + 1):
            for name, engine in engines.items():
                per_second = timed(models, engine, requests)
                if turn:  # the first one warms up
                    speeds[name].append(per_second)
        for name, engine in engines.items():
            median = statistics.median(speeds[name])
            figure = (
                f"{median:.1f} tokens/s, {median / statistics.median(speeds['plain']):.2f} of plain"
            )
            if engine.draft_len:
                figure += (
                    f", acceptance length {1 + engine.totals.accepted / engine.totals.steps:.2f}"
                )
            rows.append(Row("speed", f"{name}, {batch} at once", figure))
    return rows


def timed(models: Models, engine: Engine, requests: list[GenerationRequest]) -> float:
    before = engine.totals.tokens
    models.wait()
    began = time.perf_counter()
    engine.generate(requests)
    models.wait()
    return (engine.totals.tokens - before) / (time.perf_counter() - began)


@torch.inference_mode()
def bandwidth(models: Models) -> list[Row]:
    """Bytes of a token's weights times plain steps per second, over a large copy's bandwidth.

    Batch size is 1.
    """
    target, _ = models.on(models.device, models.dtype)
    prepare_for_decoding(target)
    cache, start = target.new_cache(1, 512), torch.tensor([128], device=models.device)
    token = torch.zeros(1, 1, dtype=torch.int64, device=models.device)
    source = torch.empty(models.sizes.copied_bytes, dtype=torch.uint8, device=models.device)
    copy = torch.empty_like(source)
    reached = 2 * source.nbytes / seconds(models, lambda: copy.copy_(source))
    rows = [
        Row(
            "memory",
            f"copy of {source.nbytes / 2**20:.0f} MiB",
            f"{reached / 1e9:.0f} GB/s read and written",
        )
    ]
    read, took = (
        weights_of_a_token(target),
        seconds(models, lambda: target(token, start, cache, length=129)),
    )
    figure = (
        f"{1e3 * took:.2f} ms a step, {read / 1e6:.0f} MB: "
        f"{read / took / reached:.1%} of the copy's bandwidth"
    )
    return [*rows, Row("memory", "plain step", figure)]


def seconds(models: Models, step: Callable[[], object], runs: int = 20) -> float:
    """Median seconds of a step, waiting for the device each time."""
    found = []
    for run in range(runs + 3):
        models.wait()
        began = time.perf_counter()
        step()
        models.wait()
        if run >= 3:
            found.append(time.perf_counter() - began)
    return statistics.median(found)


def weights_of_a_token(target: KimiModel) -> float:
    """Bytes of a token's weights: no embedding, and only the routed experts that it takes."""
    routed = sum(
        p.nbytes for m in target.modules() if isinstance(m, Experts) for p in m.parameters()
    )
    whole = sum(parameter.nbytes for parameter in target.parameters()) - target.embed.weight.nbytes
    return (
        whole
        - routed
        + routed * target.spec.num_experts_per_tok / max(1, target.spec.n_routed_experts)
    )


def waits(models: Models) -> list[Row]:
    """Host synchronisations of rounds, as torch reports them (`torch.cuda.set_sync_debug_mode`)."""
    engine = models.engine(DRAFTS, 4)
    for request in models.requests(4, temperature=0.8):
        engine.submit(request)
    engine.step()  # the prompts' own waits
    rounds = 0
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        if models.device.type == "cuda":
            torch.cuda.set_sync_debug_mode("warn")
        try:
            while engine.has_work and rounds < 4:
                engine.step()
                rounds += 1
        finally:
            if models.device.type == "cuda":
                torch.cuda.set_sync_debug_mode("default")
    if models.device.type != "cuda":
        return [Row("host waits", f"{rounds} rounds", f"not counted on {models.device}")]
    counted = sum("synchroniz" in str(warning.message) for warning in found)
    spec = models.on(models.device, models.dtype)[0].spec
    most = rounds * (
        1 + spec.num_hidden_layers - spec.first_k_dense_replace
    )  # one more for each layer of experts
    return [
        judged(
            "host waits", f"{rounds} rounds, 4 sampled requests", f"{counted}", 0 < counted <= most
        )
    ]


CHECKS: list[Callable[[Models], list[Row]]] = [
    exactness, losslessness, distribution, waits, speed, bandwidth,
]  # fmt: skip
