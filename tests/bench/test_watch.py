"""`trtspec watch` against servers on loopback: what it reads, what it keeps, what it alerts, and what it exports."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.command_line import Done, trtspec
from trtspec.bench.datasets import load_dataset
from trtspec.bench.watch_sources import MetricsMemory, NoSpeculation, read_body


class MetricsServer(ThreadingHTTPServer):
    """Gives the text that `bodies` holds for a path; 404 for others. vLLM's counters by `count`."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.bodies: dict[str, str] = {}
        self.sums = [0.0, 0.0, 0.0, 0.0]
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def count(self, steps: float, accepted: float, tokens: float | None = None) -> None:
        """This much happened since the last call."""
        grown = (steps, 3 * steps, accepted, steps + accepted if tokens is None else tokens)
        self.sums = [before + more for before, more in zip(self.sums, grown, strict=True)]
        names = ("spec_decode_num_drafts", "spec_decode_num_draft_tokens", "spec_decode_num_accepted_tokens",
                 "generation_tokens")  # fmt: skip
        label = 'engine="0",model_name="m"'
        lines = [f"vllm:{name}_total{{{label}}} {value}" for name, value in zip(names, self.sums, strict=True)]
        for position in range(3):
            share = self.sums[2] * (0.5, 0.3, 0.2)[position]
            lines.append(f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{{label},position="{position}"}} {share}')
        self.bodies["/metrics"] = "\n".join(lines) + "\n"

    def restart(self) -> None:
        self.sums = [0.0, 0.0, 0.0, 0.0]


class _Handler(BaseHTTPRequestHandler):
    server: MetricsServer

    def log_message(self, format: str, *words: Any) -> None:
        pass

    def do_GET(self) -> None:
        body = self.server.bodies.get(self.path, "").encode()
        self.send_response(200 if self.path in self.server.bodies else 404)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


@pytest.fixture
def server() -> Iterator[MetricsServer]:
    made = MetricsServer()
    yield made
    made.shutdown()
    made.server_close()


@pytest.fixture
def baseline(tmp_path: Path) -> Path:
    """Two categories of 40 answers with 100 steps each: 1.5 and 2.1 accepted drafts per step."""
    turns, categories = [], {}
    for category, ratio in (("docs", 1.5), ("code", 2.1)):
        for number in range(40):
            accepted = round(100 * ratio) + (-8, 8)[number % 2]
            turns.append(
                {
                    "question": f"{category}{number}",
                    "category": category,
                    "tokens": 100 + accepted,
                    "steps": 100,
                    "accepted": accepted,
                    "drafted": 300,
                    "histogram": None,
                    "source": "x",
                }
            )
        categories[category] = {"steps": 4000, "accepted": round(4000 * ratio), "histogram": None}
    path = tmp_path / "results.json"
    body = {"name": "endpoint", "url": "http://x", "server": {}, "workload": {}, "categories": categories,
            "concurrency": [], "turns_detail": turns}  # fmt: skip
    path.write_text(json.dumps(body))
    return path


@pytest.fixture
def look(server: MetricsServer, tmp_path: Path) -> Callable[..., Done]:
    """One `watch --once`; batches end as soon as they have 100 steps."""

    def run(*words: object) -> Done:
        short = ("--batch", "0.05", "--min-steps", "100", "--state", tmp_path / "state.json")
        return trtspec("watch", server.url, "--once", "--json", *short, *words)

    return run


def codes(done: Done) -> list[str]:
    return [problem["code"] for problem in json.loads(done.stdout)["problems"]]


def test_a_head_that_no_longer_fits_is_found_against_the_baseline_from_the_first_minutes(
    server: MetricsServer, baseline: Path, look: Callable[..., Done]
) -> None:
    server.count(5000, 9000)  # before the watch: not looked at
    assert look("--baseline", baseline).status == 0
    for _ in range(4):
        server.count(400, 720)
        time.sleep(0.06)
        done = look("--baseline", baseline)
        assert done.status == 0, done.stdout
    said = json.loads(done.stdout)
    assert said["last_batch"]["steps"] == 400 and said["last_batch"]["acceptance"] == 1.8
    assert said["positions"]["1"] == pytest.approx(0.9) and said["series"]["baseline"]["normal"] == 1.5
    damaged = 0
    while done.status == 0 and damaged < 12:
        server.count(400, 60)
        time.sleep(0.06)
        done, damaged = look("--baseline", baseline), damaged + 1
    assert codes(done) == ["TS-WATCH-BASELINE"] and damaged <= said["series"]["baseline"]["found_within_batches"]
    message = json.loads(done.stdout)["problems"][0]["message"]
    assert "0.150 accepted drafts per step" in message and "lowest category had 1.500" in message


def test_a_mix_that_the_baseline_explains_is_no_alert(
    server: MetricsServer, baseline: Path, look: Callable[..., Done]
) -> None:
    server.count(1, 1)
    look("--baseline", baseline)
    for _ in range(12):  # all traffic became the category that accepts least
        server.count(400, 600)
        time.sleep(0.06)
        assert look("--baseline", baseline).status == 0


def test_restarts_missed_looks_and_an_endpoint_that_is_gone_are_named(
    server: MetricsServer, look: Callable[..., Done]
) -> None:
    server.count(400, 720)
    assert look().status == 0
    server.restart()
    server.count(150, 270)
    time.sleep(0.06)
    said = json.loads(look().stdout)
    assert said["restarts"] == 1 and "restarted" in said["events"][-1]["what"]
    assert said["last_batch"] == {"ended": said["last_batch"]["ended"], "steps": 150, "acceptance": 1.8}
    body = server.bodies.pop("/metrics")
    assert look().status == 0 and look().status == 0
    gone = look()
    assert gone.status == 3 and codes(gone) == ["TS-WATCH-GONE"]
    assert "3 scrapes in a row" in json.loads(gone.stdout)["problems"][0]["message"]
    server.bodies["/metrics"] = body
    back = look()
    assert back.status == 0 and "after 3 missed" in json.loads(back.stdout)["events"][-1]["what"]
    assert json.loads(back.stdout)["missed_scrapes"] == 3


def test_a_server_that_stopped_speculating_is_named(server: MetricsServer, look: Callable[..., Done]) -> None:
    server.count(100, 150)
    look()
    server.count(300, 500)
    time.sleep(0.06)
    assert look().status == 0
    server.count(0, 0, tokens=900)
    assert codes(look()) == ["TS-WATCH-NOT-SPECULATING"]
    server.count(300, 500)
    assert look().status == 0
    server.bodies["/metrics"] = "vllm:generation_tokens_total 5000\n"
    done = look()
    assert codes(done) == ["TS-WATCH-NOT-SPECULATING"] and "none of speculation" in done.stdout


def test_a_state_of_something_else_and_a_server_without_metrics_are_refused(
    server: MetricsServer, baseline: Path, look: Callable[..., Done], tmp_path: Path
) -> None:
    refused = look()
    assert refused.status == 1 and json.loads(refused.stdout)["error"]["code"] == "TS-WATCH-NO-METRICS"
    server.count(100, 100)
    assert look().status == 0
    for words in (("--fall", "0.2"), ("--baseline", baseline)):
        other = look(*words)
        assert other.status == 2 and "--restart" in other.stderr
        assert look(*words, "--restart").status == 0
        assert look("--restart").status == 0
    for broken in ("{}", "[]", '{"url": 3', json.dumps({"url": server.url, "began": "x"})):
        (tmp_path / "state.json").write_text(broken)
        assert look().status == 2
    poor = tmp_path / "poor.json"
    poor.write_text(baseline.read_text().replace("4000", "40"))
    assert "--samples 80" in look("--baseline", poor, "--restart").stderr


def iterations(first: int, count: int, **spec: int) -> str:
    return json.dumps(
        [
            {
                "iter": n,
                "iterLatencyMS": 20.0,
                "numActiveRequests": 4,
                "numQueuedRequests": 1,
                "inflightBatchingStats": {"numGenRequests": 4},
                "specDecodingStats": {"numDraftTokens": 12, "numAcceptedTokens": 8, "numRequestsWithDraftTokens": 4}
                | spec,
            }
            for n in range(first, first + count)
        ]
    )


def test_iteration_statistics_restart_and_name_what_another_reader_took(
    server: MetricsServer, look: Callable[..., Done]
) -> None:
    server.bodies["/metrics"] = iterations(1, 50)
    look()
    said = json.loads(look("--restart").stdout)
    assert said["source"] == "iteration statistics" and said["last_batch"] is None
    server.bodies["/metrics"] = iterations(61, 30)
    time.sleep(0.06)
    said = json.loads(look().stdout)
    assert said["last_batch"]["steps"] == 320 and said["last_batch"]["acceptance"] == 2.0
    assert said["last_batch"]["token_s"] == pytest.approx(0.02 / 3)  # each request gets 3 tokens in 20 ms
    assert "10 iterations were given to another reader" in said["events"][0]["what"]
    server.bodies["/metrics"] = iterations(1, 5)
    assert json.loads(look().stdout)["restarts"] == 1


@pytest.mark.parametrize(
    ("lines", "steps", "accepted", "per"),
    [
        ("trtllm:spec_decode_num_draft_tokens_total %d\ntrtllm:spec_decode_num_accepted_tokens_total %d",
         300, 180, "draft token"),
        ("sglang:spec_accept_length{m=\"a\"} 2.5\nsglang:generation_tokens_total{m=\"a\"} %d\nsglang:x %d",
         120, 180, "step"),
    ],
)  # fmt: skip
def test_servers_that_tell_less(lines: str, steps: int, accepted: int, per: str) -> None:
    memory = MetricsMemory()
    assert read_body(lines % (1000, 500) + "\n", memory).first_look
    found = read_body(lines % (1300, 680) + "\n", memory)
    assert (found.steps, found.accepted, found.per) == (pytest.approx(steps), pytest.approx(accepted), per)


def test_each_engine_of_a_server_restarts_by_itself_and_garbage_is_named() -> None:
    names = [f"vllm:spec_decode_num_{name}_total" for name in ("drafts", "draft_tokens", "accepted_tokens")]

    def text(first: int, second: int) -> str:
        return "".join(f'{n}{{engine="{e}"}} {v}\n' for n in names for e, v in enumerate((first, second)))

    memory = MetricsMemory()
    read_body(text(1000, 1000), memory)
    found = read_body(text(1100, 30), memory)
    assert (found.steps, found.resets) == (130, 1)
    stamp = 'vllm:spec_decode_num_drafts_created{engine="0"} %s\n'
    read_body(text(10, 10) + stamp % 1.7e9, memory)
    found = read_body(text(20, 20) + stamp % 1.8e9, memory)  # already past what was seen before the restart
    assert (found.steps, found.resets) == (40, 1)
    for body, words in (("<html>", "not Prometheus"), ("x 1\n", "no metrics of a server"), ("[1]", "no list")):
        with pytest.raises(ValueError, match=words):
            read_body(body, MetricsMemory())
    with pytest.raises(NoSpeculation):
        read_body("vllm:generation_tokens_total 3\n", MetricsMemory())


@pytest.mark.slow
def test_probes_judge_the_text_and_make_the_series_where_there_are_no_metrics(
    stand_in: Callable[..., str], tmp_path: Path
) -> None:
    """The stand-in accepts 0.7, 0.6 and 0.5 of what gets that far: 1.33 drafts a step in every category."""
    categories = {q.category for q in load_dataset("nano").questions}
    body = {
        "name": "endpoint",
        "url": "http://x",
        "server": {},
        "workload": {"max_tokens": 96},
        "concurrency": [],
        "categories": {c: {"steps": 4000, "accepted": 5320, "histogram": [1200, 1120, 840, 840]} for c in categories},
    }
    results = tmp_path / "results.json"
    results.write_text(json.dumps(body))

    def look(url: str, state: str) -> tuple[int, dict[str, Any]]:
        words = ("--probe", "1000000", "--baseline", results, "--batch", "0.05", "--min-steps", "50", "--json")
        done = trtspec("watch", url, "--once", "--state", tmp_path / state, *words)
        return done.status, json.loads(done.stdout)

    for _ in range(4):
        status, said = look(stand_in(kind="reference"), "good")
    assert status == 0 and said["source"] == "probes" and said["contexts"]["<=1024"]["steps"] > 50
    assert said["series"]["probes"]["batches"] >= 1 and 0.7 < said["series"]["probes"]["last"] < 1.4
    for _ in range(12):
        status, said = look(stand_in(kind="reference", loop=True, accept_nothing=True), "bad")
        found = {problem["code"] for problem in said["problems"]}
        if found == {"TS-WATCH-LOOPS", "TS-WATCH-BASELINE"}:
            break
    assert found == {"TS-WATCH-LOOPS", "TS-WATCH-BASELINE"} and status == 3


def test_an_endpoint_that_was_never_read_is_no_quiet_one(tmp_path: Path) -> None:
    words = ("watch", "http://127.0.0.1:9", "--once", "--state", tmp_path / "state.json")
    for _ in range(2):
        done = trtspec(*words)
        assert (
            done.status == 1
            and "nothing could be read: http://127.0.0.1:9 does not answer" in done.stderr
            and not done.stdout
        )
    done = trtspec(*words)
    assert done.status == 3 and "TS-WATCH-GONE" in done.stdout + done.stderr


def test_a_reading_that_failed_is_told_before_it_is_an_alert(server: MetricsServer, look: Callable[..., Done]) -> None:
    server.count(10, 15)
    assert look().status == 0
    server.shutdown()
    server.server_close()
    done = look()
    assert done.status == 0 and json.loads(done.stdout)["missed_in_row"] == 1


def test_it_goes_on_exports_its_own_metrics_and_keeps_its_state(
    server: MetricsServer, baseline: Path, tmp_path: Path
) -> None:
    server.count(10, 15)
    state = tmp_path / "state.json"
    words = ["watch", server.url, "--state", str(state), "--batch", "0.05", "--min-steps", "100", "--interval", "0.1"]
    words += ["--listen", "0", "--json", "--baseline", str(baseline)]
    process = subprocess.Popen(
        [sys.executable, "-m", "trtspec", *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        assert process.stderr is not None and process.stdout is not None
        address = process.stderr.readline().split()[-1]
        assert address.startswith("http://localhost:")
        assert json.loads(process.stdout.readline())["ok"] is True
        server.count(300, 540)
        assert waited(lambda: sample(address, "trtspec_watch_acceptance_per_step") == 1.8)
        assert sample(address, "trtspec_watch_up") == 1
        assert sample(address, "trtspec_watch_alert", code="TS-WATCH-GONE") == 0
        assert sample(address, "trtspec_watch_position_acceptance", position="3") == pytest.approx(0.36)
        server.bodies.clear()
        assert waited(lambda: sample(address, "trtspec_watch_alert", code="TS-WATCH-GONE") == 1)
        assert sample(address, "trtspec_watch_alerts_total", code="TS-WATCH-GONE") == 1
        process.send_signal(signal.SIGTERM)
        _, stderr = process.communicate(timeout=60)
        assert process.returncode == 0 and "TS-WATCH-GONE" in stderr
    finally:
        process.kill()
        process.wait()
    kept = json.loads(state.read_text())
    assert kept["totals"]["steps"] == 300 and kept["totals"]["alerts"] == {"TS-WATCH-GONE": 1}
    assert not list(tmp_path.glob(".state*")), "no temporary file is left"


def test_an_address_that_cannot_be_listened_on_is_a_usage_error(server: MetricsServer, tmp_path: Path) -> None:
    for listen in ("nowhere", "localhost:99999999", f"127.0.0.1:{server.server_port}"):
        done = trtspec("watch", server.url, "--listen", listen, "--state", tmp_path / "s.json")
        assert done.status == 2 and "--listen" in done.stderr, listen


def sample(address: str, name: str, **labels: str) -> float | None:
    text = httpx.get(address, trust_env=False).text
    for family in text_string_to_metric_families(text):
        for found in family.samples:
            if found.name == name and labels.items() <= found.labels.items():
                return found.value
    return None


def waited(holds: Callable[[], bool], seconds: float = 60) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if holds():
            return True
        time.sleep(0.05)
    return False
