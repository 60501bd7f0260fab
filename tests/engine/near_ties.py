"""Judging a difference between two greedy runs: rounding at a near-tie, or a real one.

Two correct runs can only part where rounding turns the order of the two tokens around. How far
rounding moves them is measured at that very position: the same context is computed again in the
shapes that plain and speculative decoding use (rows together, tokens per call, place in both;
prefill alone, in two calls, beside other prompts), and the margin between the two tokens, one logit
minus the other, is compared. Its largest change is what rounding does there, at least one spacing
of the numbers that the logits are (a smaller change does not show); a near-tie must stay within
SAFETY times that, both in the runs and in the computations without a drafter.
"""

import math
from dataclasses import dataclass, replace
from unittest.mock import patch

import torch
from torch import Tensor

from trtspec.engine.sequence import Output
from trtspec.models.k2 import KimiModel
from trtspec.models.state import State, TextPiece
from trtspec.quant import nvfp4

# The largest change between a few dozen computations is not the largest there is: the runs may have
# used shapes and neighbours that were not tried. What a wrong engine does is far larger
# (tests/engine/test_near_ties.py).
SAFETY = 2.0
# (rows, tokens per call, place of the judged position in its call)
SHAPES = (
    *((1, 1, 0), (1, 2, 0), (1, 3, 2), (1, 4, 0), (1, 4, 1), (1, 4, 3)),
    *((4, 1, 0), (4, 4, 2), (16, 1, 0), (16, 4, 3)),
)
# (calls that a prompt is computed in, how many times it lies in each: other prompts are computed in
# the same pass)
PREFILLS = ((1, 1), (2, 1), (1, 4), (1, 16))
NOISE, DRAWS = (
    1e-6,
    16,
)  # relative; vLLM's float32 log-probabilities are within 1.9e-5 of ours, of logits about 16
# of a gap; rounding moves float32 logits of a tiny target by a tenth of that at most
VISIBLE = 1e-3
RECENT = 96  # tokens of an answer; those before them are computed as a prompt
# positions by which the last of several rows is ahead of the others, as neighbours in a batch are
LONGER = 24


@dataclass(frozen=True)
class Divergence:
    """The first token at which two runs differ.

    `gap` is the larger lead of best over second logit in the two runs. Where one run ends and the
    other does not, the tokens are -1 and the gap is infinite: no rounding does that.
    """

    index: int
    token: int
    other_token: int
    gap: float


@dataclass(frozen=True)
class Rounding:
    """What clean computations of one context say about two tokens.

    `change`: largest minus smallest margin between them, at least one spacing of their type.
    `behind`: how far the worse of the two is behind the best logit of all at most.
    """

    change: float
    behind: float

    def explains(self, divergence: Divergence) -> bool:
        """True for a near-tie: the runs' gap and the clean lead over either token are rounding."""
        return max(divergence.gap, self.behind) <= SAFETY * self.change


def first_divergence(plain: Output, other: Output) -> Divergence | None:
    """Compares two outputs of a greedy request, recorded with `record_gaps`; None if equal."""
    for index, (left, right) in enumerate(zip(plain.token_ids, other.token_ids, strict=False)):
        if left != right:
            return Divergence(index, left, right, max(plain.gaps[index], other.gaps[index]))
    if len(plain.token_ids) != len(
        other.token_ids
    ):  # equal tokens, so the end cannot be the model's doing
        index = min(len(plain.token_ids), len(other.token_ids))
        return Divergence(index, -1, -1, float("inf"))
    return None


def rounding_at(
    target: KimiModel, prompt: list[int], plain: Output, divergence: Divergence
) -> Rounding:
    """Computes a divergence's context again by the target alone, in SHAPES after PREFILLS."""
    if divergence.token < 0:
        return Rounding(0.0, float("inf"))
    emitted = plain.token_ids[: divergence.index]
    logits, _ = clean(target, prompt, emitted)
    found = _rounding_in(logits, divergence)
    largest = float(logits[:, [divergence.token, divergence.other_token]].abs().max())
    return replace(found, change=max(found.change, spacing(largest, target.dtype)))


def leads_and_bounds(
    target: KimiModel, prompt: list[int], plain: Output, other: Output, divergence: Divergence
) -> dict[str, tuple[float, float]]:
    """Leads that may have parted two runs, each with the bound below which rounding can turn it.

    Leads of the two logits, and of the experts chosen where the runs first computed something else.
    """
    if divergence.token < 0:
        return {}
    logits = rounding_at(target, prompt, plain, divergence)
    lead = max(divergence.gap, logits.behind)
    return {
        "logits": (lead, SAFETY * logits.change),
        "experts": router_tie(target, prompt, plain, other, divergence.index),
    }


def explained(leads: dict[str, tuple[float, float]]) -> bool:
    return any(lead <= bound for lead, bound in leads.values())


@torch.inference_mode()
def router_tie(
    target: KimiModel, prompt: list[int], plain: Output, other: Output, index: int
) -> tuple[float, float]:
    """Of float32 runs that part at token `index`.

    What differs from the first answered token on may come from any token of the prompt.
    """
    gaps = zip(plain.gaps[:index], other.gaps, strict=False)
    visible = [place for place, (left, right) in enumerate(gaps) if abs(left - right) > VISIBLE]
    emitted = plain.token_ids[: min([*visible, index])]
    margins = target(torch.tensor([prompt + emitted])).margins[0]
    lead = margins[-1] if emitted else margins.min()
    _, measured = clean(target, prompt, emitted)
    change = max(float(measured.max() - measured.min()), spacing(1.0, torch.float32))
    return float(lead), SAFETY * change


def quantized_rounding_at(
    target: KimiModel, prompt: list[int], plain: Output, divergence: Divergence
) -> Rounding:
    """Returns `rounding_at` for quantized activations and another implementation of the target.

    Sums in another order move an activation by about NOISE, which takes some of them to the next of
    NVFP4's few values. The context is computed DRAWS times with that much noise before each
    quantization.
    """
    if divergence.token < 0:
        return Rounding(0.0, float("inf"))
    quantize, numbers = nvfp4.fake_quantize_activation, torch.Generator().manual_seed(1)

    def noisy(x: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
        return quantize(x * (1 + NOISE * torch.randn(x.shape, generator=numbers)), scale)

    context = torch.tensor([prompt + plain.token_ids[: divergence.index]])
    with torch.inference_mode(), patch.object(nvfp4, "fake_quantize_activation", noisy):
        return _rounding_in(
            torch.stack([target(context).logits[0, -1] for _ in range(DRAWS)]), divergence
        )


def _rounding_in(logits: Tensor, divergence: Divergence) -> Rounding:
    """Of computations [N, V] of one context."""
    pair = logits[:, [divergence.token, divergence.other_token]]
    margins = pair[:, 0] - pair[:, 1]
    behind = logits.max(-1).values - pair.min(-1).values
    return Rounding(float(margins.max() - margins.min()), float(behind.max()))


def spacing(value: float, dtype: torch.dtype) -> float:
    """Distance of neighbouring numbers of `dtype` at `value`: 2^2 * 2^-7 for bfloat16 at 5.0."""
    return math.ldexp(torch.finfo(dtype).eps, math.frexp(value)[1] - 1) if value else 0.0


@torch.inference_mode()
def clean(target: KimiModel, prompt: list[int], emitted: list[int]) -> tuple[Tensor, Tensor]:
    """Logits [N, V] and expert margins [N] after prompt and emitted tokens.

    One row per computation, after each of PREFILLS in all SHAPES.
    """
    text = prompt + emitted
    begin = max(len(prompt), len(text) - RECENT)
    prompt, emitted = text[:begin], text[begin:]
    room = len(text) + LONGER + max(width for _, width, _ in SHAPES)
    found = []
    for calls, copies in PREFILLS:
        filled = target.new_cache(max(copies, *(rows for rows, _, _ in SHAPES)), room)
        last = _prefill(target, filled, prompt, calls, copies)
        saved = filled.snapshot(0, 0, len(prompt))
        for rows, width, place in SHAPES if emitted else ():
            cache = target.new_cache(rows, room)
            for row in range(rows):
                cache.restore(row, [saved], len(prompt))
            found.append(_decode(target, cache, rows, len(prompt), emitted, width, place))
        if not emitted:
            found.append(last)
    logits, margins = zip(*found, strict=True)
    return torch.cat(logits), torch.cat(margins)


def _prefill(
    target: KimiModel, cache: State, prompt: list[int], calls: int, copies: int
) -> tuple[Tensor, Tensor]:
    """Fills the first `copies` rows; logits [1, V] and margins [1] after the prompt."""
    device = target.embed.weight.device
    size = -(-len(prompt) // calls)
    for begin in range(0, len(prompt), size):
        part = prompt[begin : begin + size]
        pieces = [TextPiece(row, begin, begin + len(part)) for row in range(copies)]
        tokens = torch.tensor([part * copies], device=device)
        out = target.prompts(tokens, pieces, cache, (), [len(part) - 1])
        cache.commit([len(part)] * copies)
    return out.logits[:, -1], out.margins[:, -1]


def _decode(
    target: KimiModel,
    cache: State,
    rows: int,
    start: int,
    emitted: list[int],
    width: int,
    place: int,
) -> tuple[Tensor, Tensor]:
    """Feeds `emitted` to all rows, `width` tokens a call; returns logits [N, V] and margins [N].

    The last token has `place` in its call, and tokens behind it stand for drafts. Of several rows
    the last is LONGER positions ahead and is not looked at.
    """
    device = target.embed.weight.device
    ahead = torch.zeros(rows, dtype=torch.int64, device=device)
    if rows > 1:
        ahead[-1] = LONGER
    padded = emitted + [0] * (width - 1 - place)
    first = len(padded) % width or width
    bounds = [0, *range(first, len(padded) + 1, width)]
    for begin, end in zip(bounds, bounds[1:], strict=False):
        tokens = torch.tensor(padded[begin:end], device=device).expand(rows, -1)
        out = target(tokens, ahead + start + begin, cache)
        cache.commit(torch.full((rows,), end - begin))
    position = len(emitted) - 1 - bounds[-2]
    judged = slice(max(1, rows - 1))
    return out.logits[judged, position], out.margins[judged, position]
