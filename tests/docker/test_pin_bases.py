"""docker/pin_bases.py against registries on this machine: one of ours that asks for a token, and Debian's real one."""

from __future__ import annotations

import base64
import hashlib
import http.client
import http.server
import json
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
INDEX = {"schemaVersion": 2, "mediaType": "application/vnd.oci.image.index.v1+json", "manifests": []}
MANIFEST = json.dumps(INDEX).encode()
DIGEST = f"sha256:{hashlib.sha256(MANIFEST).hexdigest()}"


class Registry(http.server.BaseHTTPRequestHandler):
    """The distribution API's read side: a token first, then the manifest of one tag."""

    def do_GET(self) -> None:
        server = self.server
        port = server.server_address[1]
        if self.path.startswith("/token"):
            basic = "Basic " + base64.b64encode(b"me:secret").decode()
            if server.private and self.headers.get("Authorization") != basic:  # type: ignore[attr-defined]
                return self.answer(401, b"{}")
            assert "scope=repository%3Alibrary%2Fpython%3Apull" in self.path
            return self.answer(200, json.dumps({"token": "one"}).encode())
        if self.headers.get("Authorization") != "Bearer one":
            scope = "repository:library/python:pull"
            realm = f'Bearer realm="http://127.0.0.1:{port}/token",service="here",scope="{scope}"'
            return self.answer(401, b"{}", {"WWW-Authenticate": realm})
        if self.path != "/v2/library/python/manifests/3.11-slim":
            return self.answer(404, b"{}")
        assert "vnd.oci.image.index" in self.headers["Accept"] and "manifest.list" in self.headers["Accept"]
        told = "sha256:" + 64 * "0" if server.lies else DIGEST  # type: ignore[attr-defined]
        return self.answer(200, MANIFEST, {"Docker-Content-Digest": told})

    def answer(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def registry() -> Iterator[http.server.ThreadingHTTPServer]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Registry)
    server.private = server.lies = False  # type: ignore[attr-defined]
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def pin(dockerfile: Path, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "docker" / "pin_bases.py"), str(dockerfile), *words]
    environ = {key: value for key, value in os.environ.items() if not key.startswith("REGISTRY_")} | environment
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environ, timeout=120)


def dockerfile(place: Path, base: str) -> Path:
    path = place / "some.Dockerfile"
    path.write_text(f"ARG TRTLLM_VERSION=1.3.0rc20\nARG BASE={base}\nFROM ${{BASE}}\n")
    return path


def test_the_digest_comes_from_the_registry(registry: http.server.ThreadingHTTPServer, tmp_path: Path) -> None:
    name = f"127.0.0.1:{registry.server_address[1]}/library/python"
    done = pin(dockerfile(tmp_path, f"{name}:3.11-slim"))
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"docker build -f docker/some.Dockerfile --build-arg BASE={name}@{DIGEST} .\n"
    assert json.loads(pin(tmp_path / "some.Dockerfile", "--json").stdout) == {"some.Dockerfile": f"{name}@{DIGEST}"}


def test_a_login_a_missing_tag_and_a_lie(registry: http.server.ThreadingHTTPServer, tmp_path: Path) -> None:
    name = f"127.0.0.1:{registry.server_address[1]}/library/python"
    registry.private = True  # type: ignore[attr-defined]
    assert pin(dockerfile(tmp_path, f"{name}:3.11-slim")).returncode == 1
    login = {"REGISTRY_USER": "me", "REGISTRY_PASSWORD": "secret"}
    assert pin(tmp_path / "some.Dockerfile", **login).returncode == 0
    registry.lies = True  # type: ignore[attr-defined]
    lied = pin(tmp_path / "some.Dockerfile", **login)
    assert lied.returncode == 1 and "of a manifest whose digest is" in lied.stderr
    gone = pin(dockerfile(tmp_path, f"{name}:${{TRTLLM_VERSION}}"), "--trtllm-version", "1.2.1", **login)
    assert gone.returncode == 1 and f"{name}:1.2.1" in gone.stderr and "404" in gone.stderr and not gone.stdout


@pytest.mark.skipif(shutil.which("docker-registry") is None, reason="docker-registry is not installed")
def test_a_real_registry(tmp_path: Path) -> None:
    """CNCF's distribution, as Debian packages it, with an image put there by its own API."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    config = tmp_path / "config.yml"
    storage = {"filesystem": {"rootdirectory": str(tmp_path / "data")}}
    config.write_text(json.dumps({"version": 0.1, "storage": storage, "http": {"addr": f"127.0.0.1:{port}"}}))
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    server = subprocess.Popen(["docker-registry", "serve", str(config)], **quiet)
    try:
        base = f"http://127.0.0.1:{port}/v2"
        for _ in range(600):
            try:
                urllib.request.urlopen(f"{base}/", timeout=5).close()
                break
            except OSError:
                assert server.poll() is None
                time.sleep(0.1)
        blob = b"{}"
        mark = f"sha256:{hashlib.sha256(blob).hexdigest()}"
        place = put(f"{base}/base/blobs/uploads/", b"", "POST").headers["Location"]
        put(f"{place}&digest={mark}", blob, "PUT", "application/octet-stream")
        kind = "application/vnd.docker.distribution.manifest.v2+json"
        config_entry = {"mediaType": "application/vnd.docker.container.image.v1+json", "size": 2, "digest": mark}
        manifest = json.dumps({"schemaVersion": 2, "mediaType": kind, "config": config_entry, "layers": []}).encode()
        digest = put(f"{base}/base/manifests/1.0", manifest, "PUT", kind).headers["Docker-Content-Digest"]
        done = pin(dockerfile(tmp_path, f"127.0.0.1:{port}/base:1.0"), "--json")
        assert json.loads(done.stdout) == {"some.Dockerfile": f"127.0.0.1:{port}/base@{digest}"}, done.stderr
    finally:
        server.terminate()
        server.wait()


def put(url: str, body: bytes, method: str, kind: str = "") -> http.client.HTTPResponse:
    request = urllib.request.Request(url, body, {"Content-Type": kind} if kind else {}, method=method)
    with urllib.request.urlopen(request, timeout=30) as answer:
        return answer
