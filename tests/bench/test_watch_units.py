"""What `trtspec watch` makes of TensorRT-LLM's Prometheus counters, which count draft tokens and no steps: the baseline
is judged by them or named as not measured, and speculation that stopped is seen."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from tests.bench.test_watch import MetricsServer
from tests.command_line import trtspec
from trtspec.bench.watch import Watch, WatchSettings, WatchState
from trtspec.bench.watch_baseline import WatchBaseline, baseline_of
from trtspec.bench.watch_sources import MetricsMemory, read_body
from trtspec.cli.watch import _baseline
from trtspec.errors import UsageError

CONFIG = 'trtllm_speculative_config_info{model_name="m",spec_enabled="true",spec_num_tokens="%s"} 1.0\n'
SHORT = WatchSettings(batch_s=1, min_steps=50)


def counters(drafted: float, accepted: float, answers: float = 0, extra: str = "") -> str:
    """As `tensorrt_llm/metrics/collector.py` names them; the histogram has one entry for each finished answer."""
    label = '{model_name="m",engine_type="trtllm"}'
    values = {
        "spec_decode_num_draft_tokens_total": drafted,
        "spec_decode_num_accepted_tokens_total": accepted,
        "time_per_output_token_seconds_sum": 0.01 * answers,
        "time_per_output_token_seconds_count": answers,
    }
    return "".join(f"trtllm_{name}{label} {value}\n" for name, value in values.items()) + extra


def categories(drafted: bool) -> dict[str, Any]:
    """1.5 and 2.1 accepted drafts per step, of 3."""
    found = {}
    for name, ratio in (("docs", 1.5), ("code", 2.1)):
        found[name] = {"steps": 4000, "accepted": round(4000 * ratio), "drafted": 12000 if drafted else None}
    return found


def watch(baseline: WatchBaseline | None, settings: WatchSettings = SHORT) -> Watch:
    return Watch(WatchState("http://x", 0, settings), settings, baseline)


def shown(found: Watch) -> dict[str, Any]:
    return found.summary(1e6)


@pytest.mark.parametrize("config", ["", CONFIG % 3], ids=["by the baseline's drafts", "by the server's draft length"])
def test_a_head_that_does_not_fit_is_found_by_counters_of_draft_tokens(config: str) -> None:
    base = baseline_of("b", categories(drafted=not config), [])
    found, memory = watch(base, WatchSettings()), MetricsMemory()
    for look in range(1, 40):  # half of the drafts: what the lowest category had
        found.scraped(600 * look, read_body(counters(3000 * look, 1500 * look, look, config), memory))
    assert not found.alerts(1e6)
    healthy = shown(found)["series"]["baseline"]
    unit = "step" if config else "draft token"
    assert shown(found)["unit"] == f"accepted drafts per {unit}" and healthy["batches"] == 38
    assert healthy["last"] == healthy["normal"] == (1.5 if config else 0.5)
    look = 39
    while not found.alerts(1e6) and look < 39 + healthy["found_within_batches"]:  # a tenth of a per cent is accepted
        look += 1
        found.scraped(600 * look, read_body(counters(3000 * look, 58500 + 3 * (look - 39), look, config), memory))
    assert [problem.code for problem in found.alerts(1e6)] == ["TS-WATCH-BASELINE"]
    assert f"accepted drafts per {unit}; the baseline's lowest category had" in found.alerts(1e6)[0].message


def test_a_state_that_was_learned_in_another_unit_begins_again() -> None:
    """A release that begins to tell its draft length must not look like a rise or a fall."""
    found, memory = watch(baseline_of("b", categories(drafted=True), [])), MetricsMemory()
    for look in range(1, 20):
        found.scraped(600 * look, read_body(counters(3000 * look, 1500 * look), memory))
    for look in range(20, 40):
        found.scraped(600 * look, read_body(counters(3000 * look, 1500 * look, extra=CONFIG % 3), memory))
    said = shown(found)
    assert said["series"]["acceptance"]["last"] == said["series"]["baseline"]["normal"] == 1.5
    assert not found.alerts(1e6) and "learned again" in said["events"][-1]["what"]
    for told in ("None", "0", "x", "9999"):
        assert read_body(counters(10, 5, extra=CONFIG % told), MetricsMemory()).per == "draft token"


def test_what_was_not_measured_is_never_normal(tmp_path: Path) -> None:
    """The baseline of TensorRT-LLM's own bench does not say how many drafts there were."""
    server = MetricsServer()
    base = tmp_path / "results.json"
    body = {"name": "x", "url": "x", "server": {}, "workload": {}, "concurrency": [], "categories": categories(False)}
    base.write_text(json.dumps(body))
    words = ("watch", server.url, "--once", "--state", tmp_path / "s.json", "--baseline", base, "--batch", "0.05")
    try:
        for look in (1, 2):
            server.bodies["/prometheus/metrics"] = counters(3000 * look, 3 * look)
            time.sleep(0.06)
            done = trtspec(*words)
        said = json.loads(trtspec(*words, "--json").stdout)
    finally:
        server.shutdown()
        server.server_close()
    assert done.status == 0 and "normal\n" not in done.stdout and done.stdout.count("not measured: ") >= 2
    rows = {line.split()[1]: line for line in done.stdout.splitlines() if len(line.split()) > 2}
    assert all("not measured" in rows[name] for name in ("baseline", "latency", "probes")), done.stdout
    told = {line.split(":")[0]: line for line in said["not_measured"]}
    assert told.keys() == {"baseline", "latency", "probes"} and "enable_iter_perf_stats" in told["baseline"]
    assert said["series"]["baseline"]["batches"] == 0 and said["series"]["acceptance"]["batches"] == 1


def test_draft_counters_that_stand_still_while_answers_end_are_named() -> None:
    found, memory = watch(None), MetricsMemory()
    found.scraped(0, read_body(counters(1000, 600, 100), memory))
    found.scraped(2, read_body(counters(2000, 1200, 200), memory))
    for look in range(3):  # no traffic at all
        found.scraped(4 + look, read_body(counters(2000, 1200, 200), memory))
    assert not found.alerts(10)
    found.scraped(10, read_body(counters(2000, 1200, 320), memory))
    assert [problem.code for problem in found.alerts(10)] == ["TS-WATCH-NOT-SPECULATING"]
    assert "240 tokens or more" in found.alerts(10)[0].message
    found.scraped(11, read_body(counters(2300, 1350, 330), memory))
    assert not found.alerts(11)
    tokens = 'trtllm_generation_tokens_total{model_name="m",engine_type="trtllm"} %d\n'
    found.scraped(12, read_body(counters(2300, 1350, 330, tokens % 5000), memory))
    found.scraped(13, read_body(counters(2300, 1350, 331, tokens % 5300), memory))  # newer releases count tokens
    assert [problem.code for problem in found.alerts(13)] == ["TS-WATCH-NOT-SPECULATING"]


def test_a_server_that_has_accepted_nothing_yet_speculates_all_the_same() -> None:
    """TensorRT-LLM's counter of accepted tokens does not exist before the first one."""
    found, memory = watch(None, WatchSettings(batch_s=1, min_steps=50)), MetricsMemory()
    for look in range(1, 12):
        drafts = "".join(line for line in counters(3000 * look, 0, look).splitlines(True) if "accepted" not in line)
        found.scraped(2 * look, read_body(drafts, memory))
    assert [problem.code for problem in found.alerts(30)] == ["TS-WATCH-NOTHING-ACCEPTED"]


def test_a_category_of_degenerate_output_is_no_norm(tmp_path: Path) -> None:
    """Loops are accepted whole: 3 of 3 drafts in 500 steps; without the quality of its output it would be the norm."""
    steps = {"steps": 500, "drafted": 1500, "histogram": None}
    groups = {"code": steps | {"accepted": 600}, "loops": steps | {"accepted": 1500}}
    quality = {"code": {"degenerate": False}, "loops": {"degenerate": True}}
    run = {"name": "a", "url": "u", "server": {}, "workload": {}, "categories": groups, "concurrency": []}
    path = tmp_path / "results.json"
    path.write_text(json.dumps(run | {"quality": quality}))
    base, _ = _baseline(path)
    assert base is not None and base.steps.mean == {"code": pytest.approx(1.2)}
    path.write_text(json.dumps(run | {"quality": dict.fromkeys(groups, {"degenerate": True})}))
    with pytest.raises(UsageError, match="not degenerate"):
        _baseline(path)
