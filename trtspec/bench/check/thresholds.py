"""Every threshold of the gate."""

from __future__ import annotations

NEAR = 0.25  # nats behind the best token from which an answer counts as different; rounding seldom reaches it
CERTAIN = (1.0, 2.0)  # nats: least and most of the regret from which one answer fails (bfloat16 reaches 0.8)
EXACT = 1e-3  # nats, with --exact: float32 rounds far below
ALPHA = 1e-3 / 5  # false alarms of one test; a check makes five of them at most
SURE = 0.9  # probability of the best token from which a token says little about the sampler
FALL = 0.8  # accepted drafts per step over those of the same texts before: below it is a regression
COLLAPSE = 0.05  # the same for long prompts, which are other texts, over short ones
MIN_STEPS = 50  # below, acceptance says nothing
RARE = 0.02  # share of the steps below which a size is that of last steps, which the end of an answer cuts
SPECULATES = 1.1  # tokens per step; a busy server without speculation joins a few chunks as well
TOKENS_PER_ARRIVAL = 16  # more than any drafter yields in a step: a proxy buffers
