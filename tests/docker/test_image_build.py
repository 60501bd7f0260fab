"""The CPU and the quantize image, really built and run by Debian's buildah.

Their base is a Debian that stands in for the public one.
"""

import ast
import contextlib
import json
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.command_line import free_port, ran
from tests.docker.buildah import REALLY_BUILT, Buildah

pytestmark = REALLY_BUILT


PYPI = ("--build-arg", "TORCH_INDEX=https://pypi.org/simple", "--build-arg", "BASE=localhost/base")


@pytest.fixture(scope="module")
def built(buildah: Buildah) -> Iterator[Buildah]:
    started = time.monotonic()
    buildah.build("docker/cpu.Dockerfile", "trtspec:cpu", *PYPI)
    print(f"\nbuilt in {time.monotonic() - started:.0f} s")
    yield buildah
    buildah("rmi", "--force", "trtspec:cpu")


def test_the_image_says_what_it_is(built: Buildah) -> None:
    config = built.config("trtspec:cpu", "localhost/base")
    assert config["Entrypoint"] == ["trtspec"] and config["StopSignal"] == "SIGTERM"
    assert config["ExposedPorts"] == {"8000/tcp": {}}


def test_it_brings_its_bill_of_materials(built: Buildah) -> None:
    components(built, "trtspec:cpu", {"torch", "transformers", "fastapi", "trtspec"})


def components(buildah: Buildah, image: str, wanted: set[str]) -> None:
    """The SBOM names what is installed, with the versions that are."""
    freeze = "import importlib.metadata as m; print({d.name: d.version for d in m.distributions()})"
    installed = ast.literal_eval(buildah.run(image, "python3", "-c", freeze))
    bill = json.loads(buildah.run(image, "cat", "/opt/trtspec/sbom.cdx.json"))
    named = {item["name"]: item["version"] for item in bill["components"]}
    assert bill["bomFormat"] == "CycloneDX" and wanted <= named.keys()
    assert named == installed, named.items() ^ installed.items()
    print(f"\n{image}: {len(named)} components in the SBOM")


def test_it_runs_as_nobody_special_and_answers(built: Buildah) -> None:
    port = free_port()
    container = built("from", "--pull-never", "trtspec:cpu")
    assert built("run", container, "--", "id", "-u") == "1000"
    words = ("run", container, "--", "sh", "-c", "touch /opt/trtspec/x")
    refused = ran(*built.command, *words, env=built.environ)
    assert refused.status != 0 and "Permission denied" in refused.stderr
    entrypoint, default = (
        "trtspec",
        json.loads(built("inspect", container))["Docker"]["config"]["Cmd"],
    )
    assert default[:2] == ["serve", "/opt/kimi-nano"]
    command = [*built.command, "run", container, "--", entrypoint, *default, "--port", str(port)]
    log = built.scratch / "serve.log"
    with log.open("w") as stream:
        server = subprocess.Popen(command, env=built.environ, stdout=stream, stderr=stream)
        try:
            wait_until_healthy(port, server, log)
            answer = complete(port)
            owners = {
                p.uids().real
                for p in psutil.Process(server.pid).children(recursive=True)
                if "serve" in p.cmdline()
            }
        finally:
            for process in [*psutil.Process(server.pid).children(recursive=True), server]:
                with contextlib.suppress(psutil.Error, ProcessLookupError):
                    process.terminate()
            server.wait(timeout=300)
    print(f"\nanswer: {answer['choices'][0]['text']!r}")
    assert answer["usage"]["completion_tokens"] == 8 and answer["choices"][0]["text"]
    assert 1000 in owners


def wait_until_healthy(port: int, server: subprocess.Popen[bytes], log: Path) -> None:
    for _ in range(600):
        assert server.poll() is None, log.read_text()[-3000:]
        with (
            contextlib.suppress(OSError),
            urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5),
        ):
            return
        time.sleep(0.5)
    raise AssertionError(log.read_text()[-3000:])


def complete(port: int) -> dict:
    base = f"http://127.0.0.1:{port}/v1"
    with urllib.request.urlopen(f"{base}/models", timeout=30) as response:
        model = json.load(response)["data"][0]["id"]
    body = json.dumps(
        {"model": model, "prompt": "The sea", "max_tokens": 8, "temperature": 0}
    ).encode()
    request = urllib.request.Request(
        f"{base}/completions", body, {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=300) as response:
        return json.load(response)


def test_the_quantize_image_imports_and_quantizes(buildah: Buildah) -> None:
    """The image quantizes kimi-nano by the stream engine and imports what we use of ModelOpt."""
    started = time.monotonic()
    buildah.build("docker/quantize.Dockerfile", "trtspec:quantize", *PYPI)
    print(f"\nbuilt in {time.monotonic() - started:.0f} s")
    try:
        imports = (
            "import modelopt.torch.quantization, modelopt.torch.speculative, accelerate, datasets"
        )
        buildah.run("trtspec:quantize", "python3", "-c", imports)
        nano = "from trtspec.data_files import DATA; print(DATA / 'kimi-nano')"
        source = buildah.run("trtspec:quantize", "python3", "-c", nano).splitlines()[-1]
        told = buildah.run(
            "trtspec:quantize", "trtspec", "quantize", source, "-o", "/work/out", "--json"
        )
        assert json.loads(told)["quantized"] > 0
        components(buildah, "trtspec:quantize", {"nvidia-modelopt", "torch", "trtspec"})
    finally:
        buildah("rmi", "--force", "trtspec:quantize")
