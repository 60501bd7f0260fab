"""The CPU image, really built and run: by Debian's buildah, over a Debian base that stands in for the public one."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

ROOT = Path(__file__).resolve().parents[2]
INCLUDED = "python3,python3-venv,ca-certificates"  # what the public Python image has
# the machine's own way to its package index, given to the build and absent from the image
MOUNTS = [Path("/etc/ssl/certs"), Path("/etc/pip.conf"), Path.home() / ".config" / "pip"]


def missing() -> str | None:
    if sys.platform != "linux" or os.geteuid() != 0:
        return "building a base image with debootstrap needs root on Linux"
    return next((f"{name} is not installed" for name in ("buildah", "debootstrap") if not shutil.which(name)), None)


pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600), pytest.mark.skipif(bool(missing()), reason=str(missing()))]


class Buildah:
    """buildah with everything it writes below one directory."""

    def __init__(self, scratch: Path) -> None:
        self.scratch = scratch
        self.command = ["buildah", "--root", str(scratch / "root"), "--runroot", str(scratch / "run")]
        self.environ = {**os.environ, "STORAGE_DRIVER": "vfs", "BUILDAH_ISOLATION": "chroot"}

    def __call__(self, *words: str, timeout: float = 1800) -> str:
        done = subprocess.run(
            [*self.command, *words], env=self.environ, cwd=ROOT, capture_output=True, text=True, timeout=timeout,
            check=False,
        )  # fmt: skip
        assert done.returncode == 0, f"{words}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
        return done.stdout.strip()


def mounts() -> list[str]:
    """Also every directory that pip's settings name."""
    settings = subprocess.run([sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True).stdout
    named = {Path(word) for word in re.findall(r"(?:file://)?(/[^\s'\"\\]+)", settings)}
    # an index's pages lie in `simple` and point at files beside it
    places = [*MOUNTS, *sorted({path.parent if path.name == "simple" else path for path in named if path.is_dir()})]
    return [word for path in places if path.exists() for word in ("--volume", f"{path}:{path}:ro")]


def debian_mirror() -> str:
    """The mirror of this machine's own apt sources."""
    listed = subprocess.run(
        ["apt-get", "indextargets", "--format", "$(SITE)", "Created-By: Packages"], capture_output=True, text=True,
        check=False,
    ).stdout.split()  # fmt: skip
    found = [site for site in listed if site.rstrip("/").endswith("/debian")]
    return found[0] if found else "http://deb.debian.org/debian"


def debian(scratch: Path) -> Path:
    """A Debian with Python: made here, or the tar that TRTSPEC_DEBIAN_TAR names."""
    if ready := os.environ.get("TRTSPEC_DEBIAN_TAR"):
        return Path(ready)
    base = scratch / "base"
    subprocess.run(
        ["debootstrap", "--variant=minbase", f"--include={INCLUDED}", "bookworm", str(base), debian_mirror()],
        check=True, stdout=subprocess.DEVNULL, timeout=1800,
    )  # fmt: skip
    return base


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Buildah]:
    scratch = tmp_path_factory.mktemp("buildah")
    buildah = Buildah(scratch)
    container = buildah("from", "scratch")
    buildah("add", "--quiet", container, str(debian(scratch)), "/")
    buildah("commit", "--quiet", container, "localhost/base")
    buildah("rm", container)
    shutil.rmtree(scratch / "base", ignore_errors=True)
    started = time.monotonic()
    buildah(
        "bud", "--pull-never", "--format", "docker", *mounts(), "--build-arg", "BASE=localhost/base",
        "--build-arg", "TORCH_INDEX=https://pypi.org/simple", "-f", "docker/cpu.Dockerfile", "-t", "trtspec:cpu", ".",
        timeout=3000,
    )  # fmt: skip
    print(f"\nbuilt in {time.monotonic() - started:.0f} s")
    yield buildah
    subprocess.run([*buildah.command, "rm", "--all"], env=buildah.environ, capture_output=True, check=False)
    shutil.rmtree(scratch, ignore_errors=True)


def test_the_image_says_what_it_is(built: Buildah) -> None:
    config = json.loads(built("inspect", "--type", "image", "trtspec:cpu"))["Docker"]["config"]
    assert config["User"] == "1000" and config["Entrypoint"] == ["trtspec"] and config["StopSignal"] == "SIGTERM"
    assert config["Healthcheck"]["Test"][0] == "CMD" and config["ExposedPorts"] == {"8000/tcp": {}}
    assert not [value for value in config["Env"] if value.startswith(("PIP_", "SSL_", "HF_TOKEN"))]


def test_it_runs_as_nobody_special_and_answers(built: Buildah) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    container = built("from", "--pull-never", "trtspec:cpu")
    assert built("run", container, "--", "id", "-u") == "1000"
    refused = subprocess.run(
        [*built.command, "run", container, "--", "sh", "-c", "touch /opt/trtspec/x"], env=built.environ,
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert refused.returncode != 0 and "Permission denied" in refused.stderr
    entrypoint, default = ("trtspec", json.loads(built("inspect", container))["Docker"]["config"]["Cmd"])
    assert default[:2] == ["serve", "/opt/kimi-nano"]
    command = [*built.command, "run", container, "--", entrypoint, *default, "--port", str(port)]
    log = built.scratch / "serve.log"
    with log.open("w") as stream:
        server = subprocess.Popen(command, env=built.environ, stdout=stream, stderr=stream)
        try:
            wait_until_healthy(port, server, log)
            answer = complete(port)
            owners = {
                p.uids().real for p in psutil.Process(server.pid).children(recursive=True) if "serve" in p.cmdline()
            }
        finally:
            for process in [*psutil.Process(server.pid).children(recursive=True), server]:
                with contextlib.suppress(psutil.Error, ProcessLookupError):
                    process.terminate()
            server.wait(timeout=60)
    print(f"\nanswer: {answer['choices'][0]['text']!r}")
    assert answer["usage"]["completion_tokens"] == 8 and answer["choices"][0]["text"]
    assert 1000 in owners


def wait_until_healthy(port: int, server: subprocess.Popen[bytes], log: Path) -> None:
    for _ in range(600):
        assert server.poll() is None, log.read_text()[-3000:]
        with contextlib.suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5):
            return
        time.sleep(0.5)
    raise AssertionError(log.read_text()[-3000:])


def complete(port: int) -> dict:
    base = f"http://127.0.0.1:{port}/v1"
    with urllib.request.urlopen(f"{base}/models", timeout=30) as response:
        model = json.load(response)["data"][0]["id"]
    body = json.dumps({"model": model, "prompt": "The sea", "max_tokens": 8, "temperature": 0}).encode()
    request = urllib.request.Request(f"{base}/completions", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=300) as response:
        return json.load(response)
