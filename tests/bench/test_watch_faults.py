"""What `trtspec watch` makes of traffic and servers that are not as they should be: heads that accept nothing, clocks
that are set back, several servers behind one address, health probes."""

from __future__ import annotations

import json
import random
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.bench.test_watch import sample
from tests.command_line import trtspec
from trtspec.bench.sequential import SeriesReference, drift_test
from trtspec.bench.watch import ProbeAnswer, Watch, WatchSettings, WatchState
from trtspec.bench.watch_baseline import baseline_of
from trtspec.bench.watch_run import WatchCollector
from trtspec.bench.watch_sources import Increment, MetricsMemory, read_body

SHORT = WatchSettings(batch_s=1, min_steps=50, learn_days=0.0)
SETTINGS = WatchSettings(learn_days=0.15)


def watch(settings: WatchSettings = SHORT) -> Watch:
    found = Watch(WatchState("http://x", 0.0, settings), settings, None)
    found.scraped(0.0, Increment(first_look=True))
    return found


def traffic(steps: float, each: float) -> Increment:
    """Verification steps that accept `each` drafts."""
    return Increment(steps=steps, accepted=steps * each, tokens=steps * (1 + each))


def vllm(engines: dict[int, int], born: float = 0, more: int = 0, answers: int = 0) -> str:
    """Steps of each engine, which accept 2 of 3 drafts; tokens of theirs and `more`."""
    lines = []
    for engine, steps in engines.items():
        counts = {"spec_decode_num_drafts_total": steps, "spec_decode_num_draft_tokens_total": 3 * steps,
                  "spec_decode_num_accepted_tokens_total": 2 * steps, "generation_tokens_total": 3 * steps + more,
                  "time_to_first_token_seconds_count": answers}  # fmt: skip
        lines += [f'vllm:{name}{{engine="{engine}"}} {count}' for name, count in counts.items()]
    lines += [f"process_start_time_seconds {born}"] if born else []
    return "\n".join(lines) + "\n"


def trtllm(drafted: int, accepted: int, config: bool = True) -> str:
    names = ("draft", drafted), ("accepted", accepted)
    text = "".join(f"trtllm_spec_decode_num_{name}_tokens_total {count}\n" for name, count in names)
    return text + 'trtllm_speculative_config_info{spec_num_tokens="3"} 1.0\n' * config


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


def test_several_servers_behind_one_address_are_an_alert_and_nothing_is_taken_from_them() -> None:
    """Two vLLM servers at random: with their start times from the first that is older, else after three that count
    less. Each has millions of steps behind it."""
    for births in ((0, 0), (1000, 2000)):
        found, memory, choose = watch(SETTINGS), MetricsMemory(), random.Random(1)
        totals, first = [5_000_000, 3_000_000], 0
        for look in range(1, 400):
            totals = [total + 200 for total in totals]
            which = choose.randrange(2)
            found.scraped(15.0 * look, read_body(vllm({0: totals[which]}, births[which]), memory))
            first = first or (look if found.alerts(15.0 * look) else 0)
        assert 0 < first < 12 and codes(found, 6000) == ["TS-WATCH-SEVERAL-SERVERS"]
        assert not found.state.totals.batches and found.state.totals.resets < 3
        assert found.summary(6000)["not_measured"][0].startswith("every series of the metrics")
        for look in range(400, 500):  # one of them is gone
            found.scraped(15.0 * look, read_body(vllm({0: 6_000_000 + 200 * look}, births[1]), memory))
        assert not codes(found, 7500) and "one server answers again" in [what for _, what in found.state.events]
        assert found.state.last_batch["acceptance"] == 2.0 and 500 <= found.state.last_batch["steps"] < 10_000


def test_a_restart_or_two_are_not_several_servers() -> None:
    found, memory, steps = watch(SETTINGS), MetricsMemory(), 0
    for look in range(1, 400):
        steps = 50 if look in (100, 110, 300) else steps + 200
        found.scraped(15.0 * look, read_body(vllm({0: steps}), memory))
        assert not codes(found, 15.0 * look)
    assert found.state.totals.resets == 3 and found.state.totals.batches == 9


def test_a_series_that_is_missing_once_does_not_bring_its_whole_life() -> None:
    memory = MetricsMemory()
    found = [
        read_body(vllm(engines), memory)
        for engines in ({0: 10**6, 1: 10**6}, {0: 10**6 + 100}, {0: 10**6 + 200, 1: 10**6 + 300}, {0: 5, 1: 7})
    ]
    assert [one.steps for one in found] == [0, 100, 400, 12] and [one.resets for one in found] == [0, 0, 0, 1]


def test_one_reading_without_the_configuration_forgets_nothing() -> None:
    found, memory = watch(SETTINGS), MetricsMemory()
    for look in range(1, 400):
        found.scraped(600.0 * look, read_body(trtllm(9000 * look, 6000 * look, config=look != 200), memory))
    series = found.state.series["acceptance"]
    assert series.batches == 397 and series.test is not None and series.last == pytest.approx(2.0)
    for look in range(400, 405):
        found.scraped(600.0 * look, read_body(trtllm(9000 * look, 6000 * look, config=False), memory))
    assert found.state.per == "draft token" and found.state.series["acceptance"].batches == 3


def test_a_clock_that_is_set_back_costs_no_batch() -> None:
    found = watch(SETTINGS)
    for look in range(1, 200):
        found.scraped(1e6 + 60.0 * look, traffic(1000, 2))
    batches = found.state.totals.batches
    back = 1e6 - 86400
    for look in range(1, 1000):
        found.scraped(back + 60.0 * look, traffic(1000, 2 if look < 500 else 0.2))
    assert found.state.totals.batches - batches == 99 and "TS-WATCH-ACCEPTANCE" in codes(found, back + 60000)
    assert sum("the clock was set back by 98280 s" in what for _, what in found.state.events) == 1
    found.probed(back, ProbeAnswer("code", 9, None, None, "HTTP 500", None, None), alone=False)
    assert found.state.last_batch["ended"] == back and found.state.last_look == back
    for look in range(3):
        found.missed(back - 500 + look, "nothing accepts connections there")
    gone = found.alerts(back - 498)[-1]
    assert gone.code == "TS-WATCH-GONE" and gone.message.startswith("no answer for 2 s, 3 scrapes in a row")


def test_answers_of_one_token_are_no_sign_that_speculation_stopped() -> None:
    """A health probe: its only token comes from the prefill."""
    found, memory = watch(SETTINGS), MetricsMemory()
    found.scraped(1, read_body(vllm({0: 1000}, answers=10), memory))
    found.scraped(2, read_body(vllm({0: 2000}, answers=20), memory))
    for look in range(1, 1000):
        found.scraped(2.0 + look, read_body(vllm({0: 2000}, more=look, answers=20 + look), memory))
        assert not codes(found, 2.0 + look)
    found.scraped(2000, read_body(vllm({0: 2000}, more=1400, answers=1100), memory))
    assert codes(found, 2000) == ["TS-WATCH-NOT-SPECULATING"]
    assert "320 tokens or more" in found.alerts(2000)[0].message


def test_answers_are_counted_by_the_reference_server_and_by_tensorrt_llm() -> None:
    text = "trtspec_spec_decode_%s_total 5\n"
    body = "".join(text % name for name in ("steps", "draft_tokens", "accepted_tokens"))
    body += "trtspec_generation_tokens_total %d\ntrtspec_requests_total %d\n"
    memory = MetricsMemory()
    read_body(body % (100, 10), memory)
    found = read_body(body % (150, 50), memory)
    assert (found.tokens, found.answers) == (50, 40)
    more = "trtllm_generation_tokens_total %d\ntrtllm_time_to_first_token_seconds_count %d\n"
    memory = MetricsMemory()
    read_body(trtllm(9, 6) + more % (100, 10), memory)
    found = read_body(trtllm(9, 6) + more % (150, 50), memory)
    assert (found.tokens, found.answers) == (50, 40)


def test_iteration_statistics_give_seconds_per_token_of_a_request() -> None:
    memory, told = MetricsMemory(), []
    for accepted in (3, 0):
        records = [
            {
                "iter": len(told) + number,
                "iterLatencyMS": 30.0,
                "inflightBatchingStats": {"numGenRequests": 1},
                "specDecodingStats": {
                    "numDraftTokens": 3,
                    "numAcceptedTokens": accepted,
                    "numRequestsWithDraftTokens": 1,
                },
            }
            for number in range(20)
        ]
        found = read_body(json.dumps(records), memory)
        told.append(found.slow_s / found.slow_n)
    assert told == [pytest.approx(0.0075), pytest.approx(0.03)]


def test_failing_probes_are_told_with_their_own_reason() -> None:
    found = watch(SETTINGS)
    for _ in range(8):
        found.probed(0.0, ProbeAnswer("c", 10, None, None, "HTTP 500", None, None), alone=False)
    found.scraped(1.0, Increment(resets=1))
    assert [alert.message for alert in found.alerts(1)] == ["8 of 8 probes failed; the last one: HTTP 500"]


def test_the_time_at_which_the_watch_began_is_exported_before_any_batch() -> None:
    found, collector = watch(SETTINGS), WatchCollector()
    found.state.began = 1234.5
    found.scraped(2000.0, traffic(10, 1))
    collector.update(found, [])
    values = {metric.name: metric.samples[0].value for metric in collector.collect() if metric.samples}
    assert values["trtspec_watch_started_seconds"] == 1234.5


@pytest.mark.parametrize("option", ["URL", "--metrics-url"])
@pytest.mark.parametrize("address", ["http://bob:hunter2@127.0.0.1:9", "http://[::1"])
def test_addresses_with_a_password_and_such_that_are_none_are_refused_without_a_trace(
    option: str, address: str, tmp_path: Path
) -> None:
    words = [address] if option == "URL" else ["http://127.0.0.1:9", option, address]
    done = trtspec("watch", *words, "--once", "--state", tmp_path / "s.json")
    assert done.status == 2 and "unexpected" not in done.stderr
    assert "hunter2" not in done.stdout + done.stderr and not list(tmp_path.iterdir())


@pytest.mark.slow
def test_the_alerts_of_an_earlier_run_are_exported_until_the_first_look(tmp_path: Path) -> None:
    """The server takes connections and answers nothing, so the first look ends after seconds only."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        words = ["watch", f"http://127.0.0.1:{server.getsockname()[1]}", "--state", str(tmp_path / "s.json")]
        assert [trtspec(*words, "--once").status for _ in range(3)] == [1, 1, 3]
        server.listen()
        process = subprocess.Popen(
            [sys.executable, "-m", "trtspec", *words, "--listen", "0"], stderr=subprocess.PIPE, text=True
        )
        try:
            assert process.stderr is not None
            address = process.stderr.readline().split()[-1]
            assert sample(address, "trtspec_watch_alert", code="TS-WATCH-GONE") == 1
            assert sample(address, "trtspec_watch_scrapes_total", result="missed") == 3
        finally:
            process.kill()
            process.wait()
