"""The scripts of the chart, run: the leader of several nodes, the liveness probe, the drain before a stop."""

from __future__ import annotations

import http.server
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.docker.chart import CHART
from trtspec.trtllm.serve.command import lws_hosts

SCRIPTS = CHART / "scripts"


@pytest.mark.parametrize("name", ["leader.sh", "worker.sh"])
def test_scripts_parse(name: str) -> None:
    subprocess.run(["bash", "-n", str(SCRIPTS / name)], check=True)


def test_the_leader_waits_for_its_workers_and_hands_on_what_belongs_to_all(tmp_path: Path) -> None:
    """leader.sh for real, with an ssh that fails at first, and trtspec and mpirun that print what they are given."""
    programs = tmp_path / "bin"
    programs.mkdir()
    once = f"[ -e {tmp_path}/tried ] || {{ touch {tmp_path}/tried; exit 1; }}"
    bodies = {"ssh": once, "sleep": "true", "mpirun": "true", "trtspec": 'printf "%s\\n" "$@"'}
    for name, body in bodies.items():
        (programs / name).write_text(f"#!/bin/sh\n{body}\n")
        (programs / name).chmod(0o755)
    (tmp_path / "id_ed25519").write_text("key\n")
    environ = {
        "PATH": f"{programs}:/usr/bin:/bin", "HOME": str(tmp_path), "TRTSPEC_SSH_KEYS": str(tmp_path),
        "LWS_LEADER_ADDRESS": "kimi-0.kimi.serving", "LWS_GROUP_SIZE": "3", "PYTHONUNBUFFERED": "1",
        "NCCL_DEBUG": "WARN", "HOSTNAME": "kimi-0", "KUBERNETES_SERVICE_HOST": "10.0.0.1",
    }  # fmt: skip
    command = ["bash", str(SCRIPTS / "leader.sh"), "trtspec", "serve", "model", "--launcher", "lws", "--nodes", "3"]
    done = subprocess.run(
        [*command, "--", "--log_level", "info"], env=environ, capture_output=True, text=True, check=True
    )
    said, words = done.stdout.splitlines()[0], done.stdout.splitlines()[1:]
    assert said == "waiting for kimi-0-1.kimi.serving"
    assert words[:2] == ["serve", "--launcher-args"] and words[3:] == [*command[4:], "--", "--log_level", "info"]
    import shlex

    given = shlex.split(words[2])
    assert given[:2] == ["--prefix", str(tmp_path)] and given[2:4] == ["--mca", "plm_rsh_args"]
    assert f"-i {tmp_path}/ssh/id_ed25519" in given[4] and "-p 2222" in given[4]
    exported = {after for word, after in zip(given, given[1:], strict=False) if word == "-x"}
    assert {"NCCL_DEBUG", "PATH"} <= exported
    assert not {"HOSTNAME", "KUBERNETES_SERVICE_HOST", "LWS_GROUP_SIZE", "PYTHONUNBUFFERED"} & exported
    assert (tmp_path / "ssh" / "id_ed25519").stat().st_mode & 0o77 == 0
    assert lws_hosts(environ)[1:] == ["kimi-0-1.kimi.serving", "kimi-0-2.kimi.serving"]


class Engine(http.server.BaseHTTPRequestHandler):
    """Answers /health always; generates as its server's `mode` says; counts finished requests of others."""

    def do_GET(self) -> None:
        bodies = {"/health": "", "/v1/models": json.dumps({"data": [{"id": "kimi"}]})}
        if self.path == "/prometheus/metrics" and self.server.metrics:  # type: ignore[attr-defined]
            self.server.count += self.server.mode == "busy"  # type: ignore[attr-defined]
            count = self.server.count  # type: ignore[attr-defined]
            bodies[self.path] = f'# HELP x\ntrtllm_request_success_total{{model_name="kimi k"}} {count}\n'
        self.send_response(200 if self.path in bodies else 404)
        self.end_headers()
        self.wfile.write(bodies.get(self.path, "").encode())

    def do_POST(self) -> None:
        mode = self.server.mode  # type: ignore[attr-defined]
        if mode in ("busy", "hung"):
            self.server.released.wait(60)  # type: ignore[attr-defined]
            return
        self.send_response(429 if mode == "full" else 500 if mode == "broken" else 200)
        self.end_headers()
        self.wfile.write(b"{}")

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def engine(mode: str, metrics: bool = True) -> Iterator[int]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Engine)
    server.mode, server.metrics, server.count, server.released = mode, metrics, 7, threading.Event()  # type: ignore
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield server.server_address[1]
    finally:
        server.released.set()  # type: ignore[attr-defined]
        server.shutdown()
        server.server_close()


def alive(port: int, state: Path, seconds: float) -> subprocess.CompletedProcess[str]:
    environ = {
        **os.environ, "TRTSPEC_ALIVE_URL": f"http://127.0.0.1:{port}", "TRTSPEC_ALIVE_STATE": str(state),
        "TRTSPEC_ALIVE_PATIENCE": "0.3",
    }  # fmt: skip
    command = [sys.executable, str(SCRIPTS / "alive.py"), str(seconds)]
    return subprocess.run(command, env=environ, capture_output=True, text=True, check=False, timeout=60)


@pytest.mark.parametrize(("mode", "metrics", "lives"), [
    ("well", True, True), ("full", False, True), ("busy", True, True),
    ("hung", True, False), ("hung", False, False), ("broken", True, False),
])  # fmt: skip
def test_a_hung_engine_is_told_from_a_busy_one(mode: str, metrics: bool, lives: bool, tmp_path: Path) -> None:
    """`/health` is 200 in all of these; between the two probes, the recorded time is set back by 1000 s."""
    state = tmp_path / "state.json"
    with engine(mode, metrics) as port:
        assert alive(port, state, 900).returncode == 0
        since, count = json.loads(state.read_text())
        state.write_text(json.dumps([since - 1000, count]))
        done = alive(port, state, 900)
    assert done.returncode == (0 if lives else 1), done.stderr
    assert lives or "nothing was generated for 100" in done.stderr


def test_a_server_that_is_gone_is_not_alive(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    done = alive(port, tmp_path / "state.json", 600)
    assert done.returncode == 1 and "/health" in done.stderr


def drain(port: int, limit: float) -> subprocess.Popen[bytes]:
    environ = {**os.environ, "TRTSPEC_DRAIN_PORT": str(port), "TRTSPEC_DRAIN_SETTLE": "0"}
    return subprocess.Popen([sys.executable, str(SCRIPTS / "drain.py"), str(limit)], env=environ)


def test_the_drain_waits_for_the_last_connection_and_no_longer_than_its_limit() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert drain(port, 60).wait(30) == 0, "nobody is connected"
        client = socket.create_connection(("127.0.0.1", port))
        accepted, _ = server.accept()
        waiting = drain(port, 120)
        with pytest.raises(subprocess.TimeoutExpired):
            waiting.wait(3)
        client.close()
        accepted.close()
        assert waiting.wait(60) == 0
        with socket.create_connection(("127.0.0.1", port)):
            held, _ = server.accept()
            start = time.monotonic()
            assert drain(port, 2).wait(60) == 0 and time.monotonic() - start >= 2
            held.close()


def test_a_stopped_reference_server_is_noticed() -> None:
    """SIGSTOP of a real process that listens: the kernel still accepts, nobody answers."""
    code = "import http.server as h; s = h.HTTPServer(('127.0.0.1', 0), h.SimpleHTTPRequestHandler); "
    code += "print(s.server_address[1], flush=True); s.serve_forever()"
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, stderr=subprocess.DEVNULL
    )
    try:
        assert process.stdout is not None
        port = int(process.stdout.readline())
        process.send_signal(signal.SIGSTOP)
        done = alive(port, Path("/nonexistent/state"), 600)
        assert done.returncode == 1 and "timed out" in done.stderr
    finally:
        process.send_signal(signal.SIGCONT)
        process.kill()
        process.wait()
