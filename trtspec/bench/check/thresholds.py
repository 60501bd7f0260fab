"""Every threshold of the gate."""

from __future__ import annotations

NEAR = 0.25  # nats behind the best token from which an answer counts as different; rounding seldom reaches it
CERTAIN = (0.5, 2.0)  # nats: at least, and at most, where a single answer fails; between them twice the server's own
EXACT = 1e-3  # nats, with --exact: float32 rounds far below
ALPHA = 1e-3  # false alarms of a whole check
TESTS = 5  # statistical tests of one check at most; each is made at ALPHA / TESTS
FALL = 0.8  # accepted drafts per step over those of the same texts before: below it is a regression
COLLAPSE = 0.05  # the same over short prompts' for long prompts, which are other texts
MIN_STEPS = 50  # below, acceptance says nothing
TOKENS_PER_ARRIVAL = 16  # more than any drafter yields in a step: a proxy buffers
MAX_FAULTS = 8  # failures in a row after which nothing more is sent
