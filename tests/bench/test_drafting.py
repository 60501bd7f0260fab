"""Rows on acceptance, from recordings: counters are held to the streams, and a weak drafter is no collapse."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from dataclasses import replace

import pytest

from trtspec.bench.check import GateLimits, run_checks
from trtspec.bench.drafting import check_acceptance, check_claims, check_long, check_passes
from trtspec.bench.statistics import without_surplus
from trtspec.bench.transcript import Recording, Transcript
from trtspec.client.servers import FROM_COUNTERS, FROM_SGLANG, FROM_STREAMS, TurnCounts

Drafter = Callable[[random.Random], int]
TOKENS = 100
WORDS = ("alpha", "beta", "gamma", "delta", "epsilon", "zeta", "eta", "theta")
CHECKS = int(os.environ.get("TRTSPEC_WEAK_CHECKS", "6"))


def eagle(rate: float) -> Drafter:
    """Each of three drafts is accepted with one chance, as long as those before it are."""
    return lambda dice: next((place for place in range(3) if dice.random() >= rate), 3)


def lookup(rate: float) -> Drafter:
    """As prompt lookup: three drafts now and then, and mostly none."""
    return lambda dice: 3 if dice.random() < rate / 3 else 0


def answer(
    name: str, drafter: Drafter, dice: random.Random, tokens: int = TOKENS, group: str = "prompts"
) -> Transcript:
    counted = [1]
    while counted[-1] < tokens:
        counted.append(min(tokens, counted[-1] + 1 + drafter(dice)))
    text = " ".join(dice.choice(WORDS) for _ in range(60))
    return Transcript(name, "c", [], text, "stop", None, group, completion_tokens=tokens, counted=counted)


def streams(drafter: Drafter, count: int = 30, tokens: int = TOKENS) -> list[Transcript]:
    dice = random.Random(1)
    return [answer(str(place), drafter, dice, tokens) for place in range(count)]


def recording(streamed: list[Transcript], steps: int, accepted: int, source: str = FROM_COUNTERS) -> Recording:
    tokens = sum(item.completion_tokens or 0 for item in streamed)
    counts = TurnCounts("all", "all", tokens, steps, accepted, None, None, source)
    counts = without_surplus(counts, len(streamed), len(streamed))
    cold = [replace(item, counted=[]) for item in streamed]
    return Recording("u", {}, 128, cold, counts=[counts], streamed=streamed, streamed_counts=[counts])


def merged(item: Transcript, each: int = 3) -> Transcript:
    """One piece of three waited for the next one, as with a client that is slow to read."""
    kept = [total for place, total in enumerate(item.counted) if place % each != 2 or total == item.counted[-1]]
    return replace(item, counted=kept)


def test_counters_are_held_to_the_streams() -> None:
    """Honest: all steps, with accepted drafts past the end of answers; steps without a draft are in no counter (prompt
    lookup); pieces sent together. Forged: half of the steps, as few as can hold the accepted drafts, and only those
    that accepted every draft."""
    told = streams(eagle(0.65))
    taken = [b - a - 1 for item in told for a, b in zip(item.counted, item.counted[1:], strict=False)]
    steps, accepted, full = len(taken), sum(taken), sum(size == 3 for size in taken)
    rare = streams(lookup(0.15))
    drafted = [
        size
        for item in rare
        for size in (b - a - 1 for a, b in zip(item.counted, item.counted[1:], strict=False))
        if size
    ]
    length = 1 + accepted / steps
    for honest in (recording(told, steps, accepted + 20), recording([merged(item) for item in told], steps, accepted),
                   recording([merged(item, 8) for item in rare], len(drafted), sum(drafted)),
                   recording(rare, len(drafted), sum(drafted))):  # fmt: skip
        assert check_claims(honest).status == "pass", check_claims(honest).message
    assert check_acceptance(recording(told, steps, accepted + 20), 2.0).detail["source"] == FROM_COUNTERS
    for forged in (
        recording(told, steps // 2, 3 * (steps // 2)),
        recording(told, accepted // 3, accepted),
        recording(told, full, 3 * full),
    ):
        found = check_claims(forged)
        assert (found.status, found.code) == ("fail", "TS-CHECK-CLAIM"), found.message
        row = check_acceptance(forged, length + 0.1)
        assert (
            row.status == "fail"
            and row.detail["claimed"] == pytest.approx(4.0, abs=0.01)
            and row.detail["source"] == FROM_STREAMS
        )
        assert row.detail["acceptance_length"] == pytest.approx(length, abs=1e-3)
        assert check_claims(replace(forged, streamed=[])).status == "skipped"


def test_a_server_that_keeps_a_mean_alone_is_judged_by_its_streams() -> None:
    told = streams(eagle(0.65))
    without = replace(recording(told, 1, 1), counts=[], streamed_counts=[])
    mean = recording(told, 1500, 1500, FROM_SGLANG)
    for got in (without, replace(mean, streamed_counts=[])):
        row = check_acceptance(got, 2.0)
        assert row.status == "pass" and row.detail["source"] == FROM_STREAMS, row.message
        assert check_claims(got).status == "skipped"
    silent = replace(mean, streamed=[], streamed_counts=[])
    assert check_acceptance(silent, 1.5).detail["source"] == FROM_SGLANG
    assert check_acceptance(replace(silent, counts=[]), 1.5).status == "fail"


def long_row(short: Drafter, far: Drafter, tokens: int, seed: int, answers: int = 4) -> str:
    dice = random.Random(seed)
    told = [answer(str(place), short, dice, tokens) for place in range(30)]
    long = [answer(f"{at} {n}", far, dice, tokens, at) for at in ("512", "2048", "8192") for n in range(answers)]
    return check_long(Recording("u", {}, 128, [], streamed=told, long_cold=long, long_warm=long)).status


WEAK = [(lookup, rate, tokens) for rate in (0.15, 0.25, 0.4) for tokens in (24, 60, 110)] + [(eagle, 0.13, 24)]


@pytest.mark.parametrize(("kind", "rate", "tokens"), WEAK)
def test_a_weak_drafter_does_not_collapse(kind: Callable[[float], Drafter], rate: float, tokens: int) -> None:
    """The same drafter on short and on long prompts. TRTSPEC_WEAK_CHECKS is the number of checks, 6."""
    found = [long_row(kind(rate), kind(rate), tokens, seed) for seed in range(CHECKS)]
    assert "fail" not in found


@pytest.mark.parametrize("rate", [0.3, 0.65])
def test_a_drafter_that_is_blind_on_long_prompts_collapses(rate: float) -> None:
    assert [long_row(eagle(rate), lambda dice: 0, TOKENS, seed) for seed in range(2)] == ["fail"] * 2


def test_one_blind_answer_of_many_is_named() -> None:
    dice = random.Random(3)
    told = streams(eagle(0.65))
    long = [answer(f"2048 {n}", eagle(0.65), dice, TOKENS, "2048") for n in range(29)]
    lost = answer("2048 29", lambda dice: 0, dice, TOKENS, "2048")
    found = check_long(Recording("u", {}, 128, [], streamed=told, long_cold=[*long, lost]))
    assert found.status == "fail" and "none for 2048 29" in found.message
    assert check_long(Recording("u", {}, 128, [], streamed=told, long_cold=long)).status == "pass"


@pytest.mark.parametrize("size", [10**7, 2**50])
def test_a_count_that_is_none_is_left_out(size: int) -> None:
    """A chunk, a whole answer or an average that cannot be: rows end, soon, and name the wrong count."""
    told = streams(eagle(0.65))
    first = told[0]
    chunk = replace(first, counted=[*first.counted[:-1], first.counted[-2] + size])
    whole = replace(chunk, completion_tokens=chunk.counted[-1])
    averages = [replace(item, counted=[], average=5e-309) for item in told]
    for wrong in ([chunk, *told[1:]], [whole, *told[1:]], averages):
        got = Recording("u", {}, 128, wrong, streamed=wrong, later=wrong, long_cold=[replace(wrong[1], group="512")])
        verdict = run_checks(got, None, GateLimits())
        rows = {found.name: found for found in verdict.results}
        assert rows["forced-acceptance"].status == ("skipped" if wrong is averages else "pass")
        assert rows["acceptance-claims" if wrong is averages else "usage"].status == "fail"


def after_a_burst(drafter: Drafter, share: float, later: Drafter, seed: int) -> str:
    """Streams of which a share of the pieces was sent with the next one, and the same text again, one by one."""
    dice, drawn = random.Random(seed), random.Random(seed + 1000)
    first = [answer(str(place), drafter, dice, 128) for place in range(60)]
    together = [
        replace(item, counted=[n for n in item.counted if n in (1, 128) or drawn.random() >= share]) for item in first
    ]
    again = [
        replace(item, counted=answer("", later, drawn, 128).counted) if later is not drafter else item for item in first
    ]
    return check_passes(Recording("u", {}, 128, [], streamed=together, later=again))[1].status


@pytest.mark.parametrize(("drafter", "share"), [(eagle(0.6), 0.12), (eagle(0.35), 0.07), (eagle(0.13), 0.15)])
def test_pieces_sent_together_before_a_burst_are_no_fall(drafter: Drafter, share: float) -> None:
    assert {after_a_burst(drafter, share, drafter, seed) for seed in range(10)} == {"pass"}
    one: Drafter = lambda dice: dice.random() < 0.7  # noqa: E731
    assert {after_a_burst(one, 0.1, one, seed) for seed in range(10)} == {"pass"}


@pytest.mark.parametrize("rate", [0.35, 0.65])
def test_acceptance_that_is_gone_after_a_burst_is_a_fall(rate: float) -> None:
    assert {after_a_burst(eagle(rate), 0.1, lambda dice: 0, seed) for seed in range(5)} == {"fail"}


@pytest.mark.parametrize(("inflated", "wanted"), [(1.0, "pass"), (1.15, "fail"), (1.2, "fail")])
def test_averages_that_are_all_a_little_too_high(inflated: float, wanted: str) -> None:
    """Of a server whose streams carry no counts: together they came in more pieces than the claimed steps."""
    told = []
    for item in streams(eagle(0.65)):
        iterations = max(1, round(len(item.counted) / inflated))
        told.append(replace(item, counted=[], pieces=len(item.counted) + 1, average=TOKENS / iterations))
    found = check_claims(Recording("u", {}, 128, [], streamed=told))
    assert found.status == wanted, found.message
