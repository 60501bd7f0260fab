"""What `trtspec watch` makes of traffic and servers that are not as they should be: heads that accept nothing, clocks
that are set back, several servers behind one address, health probes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.command_line import trtspec
from trtspec.bench.sequential import SeriesReference, drift_test
from trtspec.bench.watch import Watch, WatchSettings, WatchState
from trtspec.bench.watch_baseline import baseline_of
from trtspec.bench.watch_sources import Increment

SHORT = WatchSettings(batch_s=1, min_steps=50, learn_days=0.0)
SETTINGS = WatchSettings(learn_days=0.15)


def watch(settings: WatchSettings = SHORT) -> Watch:
    found = Watch(WatchState("http://x", 0.0, settings), settings, None)
    found.scraped(0.0, Increment(first_look=True))
    return found


def traffic(steps: float, each: float) -> Increment:
    """Verification steps that accept `each` drafts."""
    return Increment(steps=steps, accepted=steps * each, tokens=steps * (1 + each))


def codes(found: Watch, now: float) -> list[str]:
    return [problem.code for problem in found.alerts(now)]


def test_a_head_that_accepts_nothing_is_an_alert_and_what_follows_is_learned() -> None:
    found = watch()
    for look in range(1, 41):
        found.scraped(2.0 * look, traffic(100, 0))
        assert codes(found, 2.0 * look) == (["TS-WATCH-NOTHING-ACCEPTED"] if look >= 10 else []), look
    assert any("acceptance: nothing is accepted" in what for what in found.summary(80)["not_measured"])
    assert "in the last 4000 steps" in found.alerts(80)[0].message
    for look in range(41, 61):  # with another head
        found.scraped(2.0 * look, traffic(100, 2 + 0.02 * (look % 3)))
        assert not codes(found, 2.0 * look)
    series = found.state.series["acceptance"]
    assert series.test is not None and series.reference is not None
    assert series.reference.mean == pytest.approx(2.02, abs=0.02)


def test_what_is_zero_cannot_fall() -> None:
    assert drift_test(SeriesReference(0.0, 0.0, 0.0, 16), 0.0, 144, 0.01) is None
    assert drift_test(SeriesReference(2.0, 0.0, 0.0, 16), 0.3, 144, 0.01) is not None


def test_a_baseline_with_a_category_that_accepted_nothing_is_refused_by_name(tmp_path: Path) -> None:
    groups: dict[str, Any] = {
        "code": {"steps": 300, "accepted": 0, "drafted": 900, "histogram": None},
        "docs": {"steps": 300, "accepted": 600, "drafted": 900, "histogram": None},
    }
    body = {"name": "x", "url": "x", "server": {}, "workload": {}, "categories": groups, "concurrency": []}
    path = tmp_path / "results.json"
    path.write_text(json.dumps(body))
    done = trtspec("watch", "http://127.0.0.1:9", "--once", "--baseline", path, "--state", tmp_path / "s.json")
    assert done.status == 2 and "no accepted draft in code:" in done.stderr and "inspect HEAD" in done.stderr
    for poor in (groups, {"code": groups["code"]}):
        found = Watch(WatchState("http://x", 0.0, SHORT), SHORT, baseline_of("b", poor, []))
        found.scraped(0.0, Increment(first_look=True))
        for look in range(1, 20):
            found.scraped(2.0 * look, traffic(100, 1.5))
        assert found.state.series["baseline"].test is None and not codes(found, 40)
        assert any(what.startswith("baseline: ") for what in found.summary(40)["not_measured"])
