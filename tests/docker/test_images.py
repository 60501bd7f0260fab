"""Dockerfiles and compose files are linted, pinned, without root, and name existing files."""

import re
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.command_line import ROOT, printed, succeeded

DOCKERFILES = sorted((ROOT / "docker").glob("*.Dockerfile"))
COMPOSE = sorted((ROOT / "docker").glob("compose.*.yml"))


def hadolint() -> str | None:
    beside = Path(sys.executable).with_name("hadolint")
    return str(beside) if beside.exists() else shutil.which("hadolint")


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_hadolint_finds_nothing(path: Path) -> None:
    if hadolint() is None:
        pytest.skip("hadolint is not installed")
    assert not printed(hadolint(), path)


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_images_are_pinned_and_without_root(path: Path) -> None:
    text = path.read_text()
    users = re.findall(r"^USER (\S+)$", text, re.MULTILINE)
    assert users[-1] == "1000" and "HEALTHCHECK" in text and "STOPSIGNAL SIGTERM" in text
    base = re.search(r"^ARG BASE=(\S+)$", text, re.MULTILINE)
    assert base and re.search(r":(\d+\.\d+\.\d+-|\$\{TRTLLM_VERSION\})", base[1]), (
        "the base has no exact tag"
    )
    installs = [line for line in text.splitlines() if re.search(r"pip install\b", line)]
    assert installs and all("--no-cache-dir" in line for line in installs)
    assert all(
        "-c constraints.txt" in line or '"cyclonedx-bom==${CYCLONEDX_VERSION}"' in line
        for line in installs
    )
    labels = set(re.findall(r"(org\.opencontainers\.image\.[a-z.]+|trtspec\.[a-z-]+)=", text))
    named = {"title", "description", "licenses", "version", "revision", "base.name"}
    assert {f"org.opencontainers.image.{name}" for name in named} | {"trtspec.sbom"} <= labels
    assert "sha256:" not in text, "a digest that nobody looked up"


def test_torch_is_the_pinned_one() -> None:
    pinned = re.search(r"^torch==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    named = {
        version
        for path in DOCKERFILES
        for version in re.findall(r"TORCH_VERSION=(\S+)", path.read_text())
    }
    assert pinned and named == {pinned[1]}


def test_the_context_holds_what_is_copied_and_little_else() -> None:
    kept = [
        line[1:]
        for line in (ROOT / ".dockerignore").read_text().splitlines()
        if line.startswith("!")
    ]
    assert "*" in (ROOT / ".dockerignore").read_text().splitlines()
    copied = {
        word
        for path in DOCKERFILES
        for line in re.findall(r"^COPY (?!--from)(.+)$", path.read_text(), re.MULTILINE)
        for word in line.split()[:-1]
    }
    assert copied == set(kept) and all((ROOT / name).exists() for name in copied)


@pytest.mark.parametrize("path", COMPOSE, ids=lambda path: path.name)
def test_compose_files_name_what_is_there(path: Path) -> None:
    services: dict[str, Any] = yaml.safe_load(path.read_text())["services"]
    for service in services.values():
        build = service["build"]
        assert (path.parent / build["context"] / build["dockerfile"]).is_file()
        assert service["cap_drop"] == ["ALL"] and service.get("restart", "no") == "no"
        for volume in service["volumes"]:
            source = volume.partition(":")[0] if not volume.startswith("$") else ""
            variable = "${" in source  # of the env files, which have a test of their own
            assert not source.startswith(".") or variable or (path.parent / source).is_file(), (
                source
            )


ENV_FILES = sorted((ROOT / "docker").glob("kimi-*.env"))


@pytest.mark.parametrize("path", ENV_FILES, ids=lambda path: path.stem)
def test_a_b200_node_serves_a_recipe_as_it_is(path: Path) -> None:
    """With the variables of each env file in place, as compose puts them."""
    given = dict(line.split("=", 1) for line in path.read_text().splitlines())
    text = (ROOT / "docker/compose.b200.yml").read_text()
    for name, value in given.items():
        text = re.sub(rf"\$\{{{name}(:\?[^}}]*)?\}}", value, text)
    assert not re.findall(r"\$\{(?!HF_CACHE)", text)
    services = yaml.safe_load(text)["services"]
    serve, download = services["serve"], services["download"]
    assert serve["init"] is True and download["init"] is True
    assert download["command"][1:] == [given["TARGET"], given["HEAD"]]
    assert serve["image"] == f"trtspec:{given['TRTLLM_VERSION']}"
    (recipe,) = (
        volume.split(":")[0] for volume in serve["volumes"] if volume.startswith("../configs/")
    )
    first = (ROOT / "docker" / recipe).read_text().splitlines()[0]
    assert first.startswith(f"# TensorRT-LLM {given['TRTLLM_VERSION']}: ")
    assert f" build-config {serve['command'][2]} --head {given['HEAD']} " in first
    gpus = serve["deploy"]["resources"]["reservations"]["devices"][0]["count"]
    assert "--tp-size" not in serve["command"] and f"{gpus}xb200" in recipe
    done = succeeded(*serve["command"][1:3], "--config", ROOT / "docker" / recipe, "--dry-run")
    assert f"--tp_size {gpus} " in done.stdout and "--trust_remote_code" in done.stdout


def test_env_files_name_the_three_models() -> None:
    assert [path.name for path in ENV_FILES] == ["kimi-k2.5.env", "kimi-k2.6.env", "kimi-k2.7.env"]
