"""The learning rate of each step, as a share of the peak."""

from __future__ import annotations

import math

from trtspec.heads.training.options import TrainOptions


def learning_rate(step: int, total: int, peak: float, options: TrainOptions) -> float:
    """Of `step`, counted from 1, of `total`.

    A linear warm-up, `peak` at its last step, then by `schedule`: `cosine`, half a cosine down to 0 at the last step;
    `linear`, a straight line to 0; `constant`; `wsd` (warm-up, stable, decay: arXiv 2404.06395), constant, then a
    straight line to 0 over the last `decay` of all steps.
    """
    rising = warmup_steps(total, options.warmup)
    if step <= rising:
        return peak * step / rising
    done = (step - rising) / max(1, total - rising)
    match options.schedule:
        case "cosine":
            return peak * 0.5 * (1 + math.cos(math.pi * done))
        case "linear":
            return peak * (1 - done)
        case "wsd":
            falling = max(1, min(round(options.decay * total), total - rising))
            return peak * min(1.0, (total - step) / falling)
    return peak


def warmup_steps(total: int, warmup: float) -> int:
    """`warmup`: below 1 a share of all steps, from 1 on a number of them. One step at the least, which has the peak."""
    return max(1, round(warmup * total)) if warmup < 1 else min(round(warmup), total)
