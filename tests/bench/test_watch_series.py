"""Every series of `watch` on simulated traffic, through the watch itself: false alarms at most as often as stated, and
falls found within the batches stated, also where a server counts draft tokens only.

Traffic is a mix of six categories whose shares drift (correlated over 90 minutes) and follow the time of day, as does
the load. Answers have a level of their own around their category's. Each endpoint has its own baseline, made by
`baseline_of` from answers of the same kind.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest

from tests.bench.test_watch_statistics import ACCEPTED, PER_DAY, PHI, SHARES
from trtspec.bench.acceptance import TurnCounts
from trtspec.bench.watch import ProbeAnswer, Watch, WatchSettings, WatchState
from trtspec.bench.watch_baseline import WatchBaseline, baseline_of
from trtspec.bench.watch_sources import Increment

K = 4  # drafts of a step
STEPS = 40  # of an answer of live traffic
PROBED = 24  # of a probe's answer
SPREAD = 0.35  # standard deviation of an answer's accepted drafts per step around its category's
WITHIN = 1.3  # variance of a single step
SECONDS = 600.0


class Endpoint:
    """One endpoint of its own phase of the day. With `only_lowest` all its traffic is of the category that accepts
    least, which is where the series `baseline` has the least room. `accepts` and `slower` are factors of a change."""

    def __init__(self, seed: int, answers: int = 40, only_lowest: bool = False, unit: str = "step") -> None:
        self.rng = np.random.default_rng(seed)
        self.only_lowest, self.unit, self.accepts, self.slower = only_lowest, unit, 1.0, 1.0
        self.phase, self.hour = self.rng.uniform(0, 24), 0.0
        self.drift, self.load = 0.5 * self.rng.normal(size=6), 0.1 * self.rng.normal()
        self.questions = [(c, ACCEPTED[c] + SPREAD * self.rng.normal()) for c in range(6) for _ in range(answers)]
        self.rng.shuffle(self.questions)
        settings = WatchSettings()
        self.watch = Watch(WatchState("http://x", 0.0, settings), settings, self.baseline())
        self.watch.scraped(0.0, Increment(per=unit, first_look=True))
        self.asked = self.batches = 0

    def counts(self, category: int, level: float, steps: int) -> TurnCounts:
        got = self.rng.normal(steps * level * self.accepts, math.sqrt(steps * WITHIN))
        accepted = int(np.clip(round(got), 0, K * steps))
        return TurnCounts("q", str(category), steps + accepted, steps, accepted, K * steps, None, "simulated")

    def baseline(self) -> WatchBaseline:
        """Of one answer to each question."""
        turns = [self.counts(int(category), level, STEPS) for category, level in self.questions]
        groups: dict[str, dict[str, int]] = {}
        for turn in turns:
            group = groups.setdefault(turn.category, Counter())
            for key, value in (("steps", turn.steps), ("accepted", turn.accepted), ("drafted", turn.drafted or 0)):
                group[key] += value
        found = baseline_of("simulated", groups, turns)
        assert found is not None and found.draft_length == K
        return found

    def look(self, probes: int = 0) -> None:
        """Ten minutes."""
        rng, self.hour = self.rng, self.hour + 24 / PER_DAY
        self.drift = PHI * self.drift + math.sqrt(1 - PHI**2) * 0.5 * rng.normal(size=6)
        self.load = PHI * self.load + math.sqrt(1 - PHI**2) * 0.1 * rng.normal()
        day = math.sin(2 * math.pi * (self.hour - self.phase) / 24)
        shares = np.exp(np.log(SHARES) + self.drift + 0.35 * day * np.array([1, 1, 0, 0, -1, -1]))
        requests = int(rng.poisson(37 * (1 + 0.7 * day))) + 4
        if self.only_lowest:
            shares = np.eye(6)[ACCEPTED.argmin()]
        chosen = rng.choice(6, size=requests, p=shares / shares.sum())
        levels = (ACCEPTED[chosen] + SPREAD * rng.normal(size=requests)) * self.accepts
        accepted = float(rng.normal(STEPS * levels.sum(), math.sqrt(STEPS * requests * WITHIN)))
        steps = STEPS * requests
        tokens = steps + accepted
        token_s = self.slower * 0.05 * math.exp(0.25 * day + self.load) * steps / tokens
        units = steps if self.unit == "step" else K * steps
        found = Increment(units, K * steps, max(0.0, accepted), {}, tokens, token_s * tokens, tokens, self.unit)
        for _ in range(probes):
            category, level = self.questions[self.asked % len(self.questions)]
            counts = self.counts(int(category), level, PROBED)
            answer = ProbeAnswer(counts.category, 100, counts, None, None, 0.1, 0.01)
            self.watch.probed(self.hour * 3600, answer, alone=False)
            self.asked += 1
        self.watch.scraped(self.hour * 3600, found)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_false_alarms_of_every_series_are_no_more_than_stated(capsys: pytest.CaptureFixture[str]) -> None:
    """32 endpoints for 12 days; a third of them have traffic of the lowest category alone, half count draft tokens."""
    alarms, judged = Counter[str](), Counter[str]()
    for seed in range(32):
        endpoint = Endpoint(seed, only_lowest=seed % 3 == 0, unit=("step", "draft token")[seed % 2])
        series = endpoint.watch.state.series
        for _ in range(12 * PER_DAY):
            endpoint.look(probes=3)
            judged.update(name for name, one in series.items() if one.test is not None and one.batches)
        for name, one in series.items():
            alarms[name] += one.alarms
        assert series["baseline"].missing == series["latency"].missing == 0
        assert not endpoint.watch.summary(0)["not_measured"]
    days = {name: count / PER_DAY for name, count in judged.items()}
    with capsys.disabled():
        print("\n" + "; ".join(f"{name}: {alarms[name]} false alarms in {days[name]:.0f} days" for name in days))
    assert days.keys() == {"acceptance", "latency", "baseline", "probes"} and min(days.values()) > 250
    assert sum(days.values()) > 1000
    for name, count in days.items():
        assert alarms[name] <= 0.01 * count + 2 * math.sqrt(0.01 * count), name


def falls(endpoint: Endpoint) -> None:
    endpoint.accepts = 0.85


def slows(endpoint: Endpoint) -> None:
    endpoint.slower = 1.5


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    ("name", "unit", "change", "days"),
    [
        ("baseline", "step", falls, 0),
        ("baseline", "draft token", falls, 0),
        ("probes", "step", falls, 0),
        ("latency", "step", slows, 4),
    ],
)
def test_a_change_is_found_within_the_batches_stated(
    name: str, unit: str, change: Callable[[Endpoint], None], days: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """The baselines are of 400 answers in each category, so that they find a fall by 15 %; the traffic of `baseline` is
    of the lowest category, because a fall of a richer mix leaves it above what the baseline's lowest had."""
    took, stated, finds = [], [], set()
    for seed in range(100 if name != "latency" else 40):
        endpoint = Endpoint(1000 + seed, 400, only_lowest=name == "baseline", unit=unit)
        series = endpoint.watch.state.series[name]
        for _ in range(days * PER_DAY):
            endpoint.look()
        assert series.test is not None and not series.alarming
        before = series.batches
        finds.add(round(series.finds or 0, 4))
        stated.append(series.test.detect_within)
        change(endpoint)
        while not series.alarming and series.batches - before < 10 * stated[-1]:
            endpoint.look(probes=3 if name == "probes" else 0)
        took.append(series.batches - before)
    within = float(np.mean(np.array(took) <= np.array(stated)))
    with capsys.disabled():
        print(
            f"\n{name} per {unit}: found after {np.median(took):.0f} batches (95 %: {np.percentile(took, 95):.0f}), "
            f"stated {np.median(stated):.0f}; within: {within:.0%} of {len(took)}"
        )
    assert within >= 0.95 and finds <= {0.15, round(math.log(1.5), 4)}
