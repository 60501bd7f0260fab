"""What `trtspec watch --probe` sends, and that a server which does not finish its answers holds nothing up."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.command_line import trtspec
from trtspec.bench import watch_run
from trtspec.bench.client import Answer
from trtspec.bench.datasets import load_dataset

CATEGORY = load_dataset("nano").questions[0].category
CHUNK = b'data: {"choices": [{"index": 0, "delta": {"content": "word "}, "finish_reason": null}]}\n\n'
LAST = b'data: {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}\n\ndata: [DONE]\n\n'


class ProbedServer(ThreadingHTTPServer):
    """Keeps what it is asked. Answers are whole, or with `manner` "drip" never end, with "silent" never begin, with
    "counted" and "joined" have usage in pieces of one and of several steps, with "strict" cannot have that. `metrics`
    is what it tells; "drip" never ends, and "" is none."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Probed)
        self.asked: list[dict[str, Any]] = []
        self.scrapes, self.manner, self.metrics = 0, "whole", ""
        self.closed = threading.Event()
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class _Probed(BaseHTTPRequestHandler):
    server: ProbedServer

    def log_message(self, format: str, *words: Any) -> None:
        pass

    def _told(self, body: bytes, status: int = 200) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _drip(self, piece: bytes) -> None:
        self.send_response(200)
        self.end_headers()
        try:
            while not self.server.closed.wait(0.05):
                self.wfile.write(piece)
        except OSError:
            self.close_connection = True

    def do_GET(self) -> None:
        if self.path == "/v1/models":
            self._told(b'{"data": [{"id": "m"}]}')
        elif self.path == "/metrics" and self.server.metrics == "drip":
            self._drip(b"# still\n")
        elif self.path == "/metrics" and self.server.metrics:
            self.server.scrapes += 1
            self._told(self.server.metrics.encode())
        else:
            self._told(b"", 404)

    def do_POST(self) -> None:
        self.server.asked.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        if self.server.manner == "drip":
            self._drip(CHUNK)
        elif self.server.manner == "silent":
            self.server.closed.wait()
        elif self.server.manner == "strict" and "continuous_usage_stats" in self.server.asked[-1]["stream_options"]:
            self._told(b'{"error": {"message": "unknown field"}}', 400)
        elif self.server.manner in ("counted", "joined"):
            self._told(pieces([2, 3] * 30 if self.server.manner == "counted" else [9] * 20) + LAST)
        else:
            self._told(CHUNK + LAST)


@pytest.fixture
def server() -> Iterator[ProbedServer]:
    made = ProbedServer()
    yield made
    made.closed.set()
    made.shutdown()
    made.server_close()


def counters(steps: int) -> str:
    names = ("num_drafts", "num_draft_tokens", "num_accepted_tokens")
    return "".join(f"vllm:spec_decode_{name}_total {steps}\n" for name in names)


def pieces(sizes: list[int]) -> bytes:
    """A stream of the prefill's token and these; each word is another, so that the text is no loop."""
    done, found = 1, CHUNK.replace(b"null}]}", b'null}], "usage": {"prompt_tokens": 9, "completion_tokens": 1}}')
    for number, size in enumerate(sizes):
        done += size
        usage = {"prompt_tokens": 9, "completion_tokens": done}
        delta = {"content": f"{number * 7919 % 1009:x} "}
        found += f"data: {json.dumps({'choices': [{'index': 0, 'delta': delta}], 'usage': usage})}\n\n".encode()
    return found


def a_baseline(path: Path, drafted: int | None = None, **workload: Any) -> Path:
    category = {"steps": 4000, "accepted": 6000, "drafted": drafted, "histogram": None}
    body = {"name": "x", "url": "x", "server": {}, "workload": workload, "concurrency": [],
            "categories": {CATEGORY: category}}  # fmt: skip
    path.write_text(json.dumps(body))
    return path


def test_probes_are_sent_as_the_baseline_was_measured(server: ProbedServer, tmp_path: Path) -> None:
    recorded = {"chat_template_kwargs": {"thinking": True, "tools": "x"}, "top_k": 7}
    base = a_baseline(tmp_path / "base.json", max_tokens=33, temperature=0.25, thinking="on", extra_body=recorded)
    words = ("--once", "--probe", "60", "--json", "--state", tmp_path / "state.json")
    done = trtspec("watch", server.url, *words, "--baseline", base, "--thinking", "on")
    assert done.status == 0, done.stderr
    sent = server.asked[0]
    assert {key: sent[key] for key in recorded} == recorded
    assert (sent["max_tokens"], sent["temperature"]) == (33, 0.25)
    for mode in ("off", "medium"):
        refused = trtspec("watch", server.url, *words, "--baseline", base, "--thinking", mode)
        assert refused.status == 2 and f"--thinking {mode} contradicts" in refused.stderr, refused.stderr
        assert "thinking was on" in refused.stderr
    for workload in ({"osl": 64}, {"isl": 64}, {"under": ["structured"]}):
        other = a_baseline(tmp_path / "other.json", **workload)
        assert f"--{next(iter(workload))}" in trtspec("watch", server.url, *words, "--baseline", other).stderr
    elsewhere = tmp_path / "elsewhere.json"
    elsewhere.write_text(base.read_text().replace(CATEGORY, "mt-bench/roleplay"))
    assert "no category of --dataset nano" in trtspec("watch", server.url, *words, "--baseline", elsewhere).stderr
    assert len(server.asked) == 1
    trtspec("watch", server.url, *words, "--thinking", "medium", "--restart")
    assert server.asked[-1]["reasoning_effort"] == "medium"


@pytest.mark.parametrize("manner", ["drip", "silent"])
def test_once_ends_within_the_limit_and_says_what_was_not_measured(
    server: ProbedServer, tmp_path: Path, manner: str
) -> None:
    server.metrics, state = counters(10), tmp_path / "state.json"
    words = ("watch", server.url, "--once", "--state", state, "--probe", "100000", "--timeout", "0.4")
    assert trtspec(*words).status == 0
    kept = json.loads(state.read_text())
    failed = kept["totals"]["probe_failures"]
    kept["last_look"] = time.time() - 3600  # many probes are due
    state.write_text(json.dumps(kept))
    server.manner = manner
    began = time.monotonic()
    done = trtspec(*words)
    assert done.status == 0 and time.monotonic() - began < 60
    assert "not measured: probes: 7 of 8 due" in done.stdout and "0.4 s of --timeout" in done.stdout
    kept = json.loads(state.read_text())
    assert kept["totals"]["probe_failures"] == failed + 1 and kept["totals"]["scrapes"] == 2
    assert any("not complete after 0.4 s" in what for _, what in kept["events"])


def test_a_scrape_has_a_limit_however_slowly_its_bytes_come(
    server: ProbedServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trtspec.bench.watch_sources.TIMEOUT", 0.5)
    server.metrics = "drip"
    done = trtspec("watch", server.url, "--once", "--probe", "60", "--json", "--state", tmp_path / "state.json")
    assert done.status == 1 and "not complete after 0.5 s" in done.stderr, done.stderr


def test_readings_go_on_while_a_probe_hangs(server: ProbedServer, tmp_path: Path) -> None:
    server.metrics, server.manner = counters(10), "silent"
    words = ["watch", server.url, "--state", str(tmp_path / "s.json"), "--probe", "100000", "--interval", "0.05"]
    process = subprocess.Popen([sys.executable, "-m", "trtspec", *words], stderr=subprocess.PIPE)
    try:
        deadline = time.monotonic() + 60
        while (server.scrapes < 10 or not server.asked) and time.monotonic() < deadline:
            time.sleep(0.02)
        assert server.scrapes >= 10 and len(server.asked) == 1
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=60)
        assert process.returncode == 0
    finally:
        process.kill()
        process.wait()
    assert json.loads((tmp_path / "s.json").read_text())["totals"]["probes"] == 0


def test_the_steps_of_probes_are_counted_by_the_pieces_of_their_streams(server: ProbedServer, tmp_path: Path) -> None:
    """vLLM and SGLang say nothing about speculation in an answer; with usage in each piece the pieces are the steps."""
    server.manner = "counted"
    words = ("watch", server.url, "--once", "--probe", "60", "--json", "--batch", "0.05", "--min-steps", "50")
    words = (*words, "--baseline", a_baseline(tmp_path / "base.json", drafted=12000), "--state", tmp_path / "s.json")
    for _ in range(2):
        said = json.loads(trtspec(*words).stdout)
    assert server.asked[0]["stream_options"] == {"include_usage": True, "continuous_usage_stats": True}
    assert said["contexts"] == {"<=1024": {"steps": 120.0, "accepted_per_step": 1.5}}
    assert said["series"]["probes"]["batches"] == 1 and said["series"]["probes"]["last"] == 1.0
    server.manner = "joined"  # a stream interval: a piece is no step
    said = json.loads(trtspec(*words, "--restart").stdout)
    assert said["contexts"] == {} and said["series"]["probes"]["batches"] == 0
    assert any("1 answers, and none tells its steps" in what for what in said["not_measured"])


def test_a_server_that_refuses_to_count_pieces_is_asked_without(server: ProbedServer, tmp_path: Path) -> None:
    server.manner = "strict"
    words = ("--once", "--probe", "60", "--state", tmp_path / "s.json")
    done = trtspec("watch", server.url, *words)
    assert done.status == 0 and "none tells its steps" in done.stdout
    assert [asked["stream_options"] for asked in server.asked] == [
        {"include_usage": True, "continuous_usage_stats": True}, {"include_usage": True},
    ]  # fmt: skip
    kept = json.loads((tmp_path / "s.json").read_text())
    assert kept["totals"]["probes"] == 1 and kept["totals"]["probe_failures"] == 0


@pytest.mark.parametrize(("counted", "tokens", "histogram"), [([1, 2**40, 4], 4, (0, 0, 1)), ([1, 2**40], 2**40, None)])
def test_a_count_that_cannot_be_fills_no_memory(
    counted: list[int], tokens: int, histogram: tuple[int, ...] | None
) -> None:
    found = watch_run._streamed_counts(Answer("q", "probe", 0, 0.0, completion_tokens=tokens, counted=counted))
    assert (found and found.histogram) == histogram


@pytest.mark.timeout(20)
def test_one_large_piece_among_many_takes_no_time() -> None:
    counted = [*range(1, 3000), 2**20]
    found = watch_run._streamed_counts(Answer("q", "probe", 0, 0.0, completion_tokens=2**20, counted=counted))
    assert found and (found.steps, found.accepted) == (2999, 2**20 - 3000)
