"""The state file of `trtspec watch`: one writer at a time, nothing mixed, nothing believed, and a full disk named."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.bench import test_watch
from tests.bench.test_watch import MetricsServer, sample, waited
from tests.command_line import Done, trtspec
from trtspec.bench.watch_file import default_state

Look = Callable[..., Done]
server, look = test_watch.server, test_watch.look  # fixtures


def test_two_workers_behind_one_endpoint_have_states_of_their_own(
    server: MetricsServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    other = MetricsServer()
    server.count(10, 20)
    other.count(10, 1)
    try:
        for url in (server.url, other.url):
            assert trtspec("watch", "http://127.0.0.1:9", "--metrics-url", url, "--once").status == 0
        kept = [json.loads(path.read_text()) for path in (tmp_path / "trtspec").glob("watch-*.json")]
        assert {state["metrics_url"] for state in kept} == {server.url, other.url}
        words = ("watch", "http://127.0.0.1:9", "--once", "--state", tmp_path / "s.json", "--metrics-url")
        assert trtspec(*words, server.url).status == 0
        refused = trtspec(*words, other.url)
        assert refused.status == 2 and f"the metrics of {server.url}, not of {other.url}" in refused.stderr
    finally:
        other.shutdown()
        other.server_close()
    assert default_state("http://x", "http://x") != default_state("http://x", "http://y")


def test_a_second_watch_of_one_state_is_refused(server: MetricsServer, look: Look, tmp_path: Path) -> None:
    server.count(10, 15)
    words = [sys.executable, "-m", "trtspec", "watch", server.url, "--state", str(tmp_path / "state.json"), "--json"]
    process = subprocess.Popen([*words, "--batch", "0.05", "--min-steps", "100"], stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None and process.stdout.readline()
        refused = look()
        assert refused.status == 2 and "state.json is in use" in refused.stderr
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=60)
    finally:
        process.kill()
        process.wait()
    assert look().status == 0


def test_a_state_that_was_edited_or_is_of_another_release_is_refused(
    server: MetricsServer,
    look: Look,
    tmp_path: Path,
) -> None:
    server.count(10, 15)
    assert look().status == 0
    path = tmp_path / "state.json"
    kept = json.loads(path.read_text())
    test = {"mid": 1, "half_gap": 0.1, "threshold": 1, "days_between_false_alarms": 1, "detect_mean": 1,
            "detect_within": 1}  # fmt: skip
    reference = {"mean": 1, "error": 0, "variance": 0, "batches": 16}
    series = kept["series"]["acceptance"] | {"reference": reference, "batches": 20}

    def edited(**change: Any) -> Done:
        path.write_text(json.dumps(kept | change))
        return look()

    assert edited(series={"acceptance": series | {"test": test}}).status == 0
    for words, change in (
        ("schema 99, not 1", {"schema": 99}),
        ("threshold are positive", {"series": {"acceptance": series | {"test": test | {"threshold": 0}}}}),
        ("threshold are positive", {"series": {"acceptance": series | {"test": test | {"half_gap": -1}}}}),
        ("NaN or infinity", {"loops": float("nan")}),
        ("contradict each other", {"contexts": {"<=1024": [0, 0]}}),
    ):
        refused = edited(**change)
        assert refused.status == 2 and words in refused.stderr and "--restart" in refused.stderr, refused.stderr
    assert look("--restart").status == 0


@pytest.mark.parametrize("place", ["/proc/nope/x.json", "/dev/null/x.json"])
def test_a_place_where_no_file_can_be_is_named(place: str) -> None:
    done = trtspec("watch", "http://127.0.0.1:9", "--once", "--state", place)
    assert done.status == 2 and f"--state {place} cannot be written: " in done.stderr, done.stderr


def limited(words: list[str], size: int) -> list[str]:
    """The command with a limit on the size of the files it writes, which fails as a full disk does: by an OSError."""
    begin = f"import resource, runpy, signal, sys; signal.signal(signal.SIGXFSZ, signal.SIG_IGN); \
resource.setrlimit(resource.RLIMIT_FSIZE, ({size}, {size})); sys.argv = {words!r}; runpy.run_module('trtspec', \
run_name='__main__', alter_sys=True)"
    return [sys.executable, "-B", "-c", begin]


@pytest.mark.slow
def test_a_full_disk_costs_neither_the_alerts_nor_the_watch(
    server: MetricsServer,
    look: Look,
    tmp_path: Path,
) -> None:
    state = tmp_path / "state.json"
    server.count(100, 150)
    assert look().status == 0
    server.count(300, 450)
    assert look().status == 0
    before = state.read_bytes()
    short = ["trtspec", "watch", server.url, "--batch", "0.05", "--min-steps", "100", "--state", str(state), "--json"]
    done = subprocess.run(limited([*short, "--once"], 16), capture_output=True, text=True, timeout=120)
    assert done.returncode == 1 and json.loads(done.stdout)["ok"], done.stderr
    assert f"{state} cannot be written: File too large" in done.stderr
    server.count(0, 0, tokens=900)
    done = subprocess.run(limited([*short, "--once"], 16), capture_output=True, text=True, timeout=120)
    assert done.returncode == 3 and "cannot be written" in done.stderr
    assert json.loads(done.stdout)["problems"][0]["code"] == "TS-WATCH-NOT-SPECULATING"
    assert state.read_bytes() == before
    words = limited([*short, "--interval", "0.05", "--listen", "0"], 16)
    process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        address = process.stderr.readline().split()[-1]
        assert waited(lambda: sample(address, "trtspec_watch_batches_total") is not None)  # it has looked once
        first = sample(address, "trtspec_watch_batches_total") or 0
        for count in (1, 2):
            server.count(300, 450)
            assert waited(lambda: (sample(address, "trtspec_watch_batches_total") or 0) >= first + count)  # noqa: B023
            time.sleep(0.1)
        process.send_signal(signal.SIGTERM)
        _, told = process.communicate(timeout=60)
    finally:
        process.kill()
        process.wait()
    assert told.count("the watch continues") == 1 and process.returncode == 1, told
    assert state.read_bytes() == before and not [name for name in os.listdir(tmp_path) if name.endswith(".tmp")]
