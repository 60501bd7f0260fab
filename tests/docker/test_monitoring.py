"""promtool accepts and plays rules and dashboard, and every metric they name is exported."""

import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from tests.command_line import printed, program
from tests.json_files import read_json
from trtspec.bench.watch import Watch, start_exporter
from trtspec.client.servers import TRTLLM, VLLM
from trtspec.data_files import kimi_nano_dir

MONITORING = Path(__file__).parents[2] / "docker" / "monitoring"
METRIC = re.compile(r"\b(?:trtspec|vllm|trtllm)[_:][a-zA-Z0-9_:]+")
VLLM_SCRAPE = """
import sys
from prometheus_client import generate_latest
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.metrics.loggers import PrometheusStatLogger
drafts = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3}
options = EngineArgs(
    model=sys.argv[1], trust_remote_code=True, skip_tokenizer_init=True, speculative_config=drafts
)
PrometheusStatLogger(options.create_engine_config(), [0])
print(generate_latest().decode())
"""


def queries() -> Iterator[tuple[str, str]]:
    """(title, PromQL) of every panel, with Grafana's variables filled in."""
    for panel in read_json(MONITORING / "dashboard.json")["panels"]:
        for target in panel["targets"]:
            filled = target["expr"].replace("$__rate_interval", "5m").replace("$instance", ".*")
            yield panel["title"], filled


def rules() -> list[dict[str, Any]]:
    groups = yaml.safe_load((MONITORING / "alerts.yml").read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def promtool(*words: str | Path) -> str:
    found = os.environ.get("TRTSPEC_PROMTOOL") or shutil.which("promtool")
    if not found:
        pytest.skip("promtool is neither on PATH nor named by TRTSPEC_PROMTOOL")
    return printed(found, *words, cwd=MONITORING, timeout=600)


@pytest.mark.parametrize("target", ["test-oracles", "test-all"])
def test_make_names_the_promtool_among_the_oracles(target: str, tmp_path: Path) -> None:
    """make names promtool by an absolute path, the user's own first, none if not fetched."""
    fetched = tmp_path / ".oracles/promtool/usr/bin/promtool"
    program(tmp_path / ".venv/bin/python", 'echo "<$TRTSPEC_PROMTOOL>" "$@"')
    command = [
        "make",
        "-f",
        MONITORING.parents[1] / "Makefile",
        "-o",
        "lint",
        "-o",
        ".oracles/.made",
        target,
    ]
    plain = {
        name: value
        for name, value in os.environ.items()
        if name not in ("TRTSPEC_PROMTOOL", "MAKEFLAGS")
    }

    def said(**more: str) -> str:
        return printed(*command, cwd=tmp_path, env=plain | more)

    assert "<>" in said()
    fetched.parent.mkdir(parents=True)
    fetched.touch()
    assert f"<{fetched}>" in said() and "</mine>" in said(TRTSPEC_PROMTOOL="/mine")
    assert target == "test-all" or "tests/docker/test_monitoring.py" in said()


def test_promtool_takes_the_rules_and_the_scrape_configuration() -> None:
    assert f"{len(rules())} rules found" in promtool("check", "rules", "alerts.yml")
    assert "SUCCESS" in promtool("check", "config", "prometheus.yml")


def test_every_alert_fires_and_stays_silent_as_played_by_promtool() -> None:
    assert "SUCCESS" in promtool("test", "rules", "alerts_test.yml")
    played = (MONITORING / "alerts_test.yml").read_text()
    assert {rule["alert"] for rule in rules() if "alert" in rule} == set(
        re.findall(r"alertname: (\w+)", played)
    )


def test_promtool_parses_every_query_of_the_dashboard(tmp_path: Path) -> None:
    made = [{"record": f"panel:{n}", "expr": query} for n, (_, query) in enumerate(queries())]
    file = tmp_path / "queries.yml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "dashboard", "rules": made}]}))
    assert f"{len(made)} rules found" in promtool("check", "rules", file)


def named() -> set[str]:
    """Samples that rules, panels and dashboard variables name, without the rules' own records."""
    board = read_json(MONITORING / "dashboard.json")
    variables = [str(variable["query"]) for variable in board["templating"]["list"]]
    texts = [*(rule["expr"] for rule in rules()), *(query for _, query in queries()), *variables]
    return set(METRIC.findall(" ".join(texts)))


def scraped(text: str) -> set[str]:
    return {
        sample.name for family in text_string_to_metric_families(text) for sample in family.samples
    }


def recorded() -> set[str]:
    return {rule["record"] for rule in rules() if "record" in rule}


def test_records_that_are_named_are_made() -> None:
    texts = [*(rule["expr"] for rule in rules()), *(query for _, query in queries())]
    used = set(re.findall(r"\bspeculation:[a-z_0-9:]+", " ".join(texts)))
    assert used == recorded(), used ^ recorded()


def test_the_watchs_own_metrics_are_all_exported() -> None:
    """By a watch that has seen traffic, through its own HTTP server."""
    watch = Watch("http://x")
    watch.take(
        "trtspec_spec_decode_steps_total 100\ntrtspec_spec_decode_accepted_tokens_total 150\n"
    )
    text = httpx.get(start_exporter("127.0.0.1:0", watch), trust_env=False).text
    families = [family.name for family in text_string_to_metric_families(text)]
    assert len(families) == len(set(families)), "Prometheus refuses a scrape with a metric twice"
    own = {name for name in named() if name.startswith("trtspec_watch_")}
    assert len(own) > 5 and own <= scraped(text), own - scraped(text)


def test_the_reference_servers_metrics_are_all_exported(tmp_path: Path) -> None:
    from tests.tiny import make_target
    from trtspec.engine.engine import Engine, GenerationRequest
    from trtspec.engine.http_api import EngineCollector
    from trtspec.models.weights import load_target

    engine = Engine(load_target(make_target(tmp_path / "target")))
    engine.generate([GenerationRequest("a", [5, 6, 7], 4)])
    found = scraped(generate_latest(EngineCollector(engine)).decode())
    wanted = {
        name
        for name in named()
        if name.startswith("trtspec_") and not name.startswith("trtspec_watch_")
    }
    assert len(wanted) >= 5 and wanted <= found, wanted - found


def test_tensorrt_llms_metrics_are_all_exported() -> None:
    """By the samples that its collector makes, and what `watch` reads of it is among them."""
    listed = yaml.safe_load((Path(__file__).parent / "trtllm_samples.yaml").read_text())
    exported = set(listed["samples"])
    wanted = {name for name in named() if name.startswith("trtllm")}
    assert len(wanted) >= 6 and wanted <= exported, wanted - exported
    read = {f"{name}_total" for name in (TRTLLM.drafted, TRTLLM.accepted)}
    assert read <= exported, read - exported


@pytest.mark.slow
def test_vllms_metrics_are_all_exported() -> None:
    """vLLM's own logger, made for a speculating server that nobody has asked, exports every metric.

    No model is loaded.
    """
    python = os.environ.get("TRTSPEC_VLLM_PYTHON")
    if not python:
        pytest.skip("TRTSPEC_VLLM_PYTHON does not name an interpreter with vLLM")
    quiet = {**os.environ, "VLLM_LOGGING_LEVEL": "ERROR"}
    words = [python, "-c", VLLM_SCRAPE, kimi_nano_dir()]
    exported = scraped(printed(*words, timeout=600, env=quiet))
    wanted = {name for name in named() if name.startswith("vllm")}
    assert len(wanted) >= 6 and wanted <= exported, wanted - exported
    read = {f"{name}_total" for name in (VLLM.steps, VLLM.drafted, VLLM.accepted, VLLM.position)}
    assert read <= exported, read - exported


def test_the_dashboard_can_be_imported() -> None:
    """Grafana's import refuses no id and shows no empty panel: ids once, sources, no overlaps."""
    board = read_json(MONITORING / "dashboard.json")
    variables = {variable["name"] for variable in board["templating"]["list"]}
    assert board["uid"] and variables == {"source", "instance"}
    cells: set[tuple[int, int]] = set()
    for panel in board["panels"]:
        place = panel["gridPos"]
        mine = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not mine & cells and place["x"] + place["w"] <= 24, panel["title"]
        cells |= mine
        assert panel["targets"] and all(
            t["datasource"]["uid"] == "${source}" for t in panel["targets"]
        )
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])
