"""Dockerfiles and compose files: linted, pinned, without root, and naming only files that are there."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
DOCKERFILES = sorted((ROOT / "docker").glob("*.Dockerfile"))
COMPOSE = sorted((ROOT / "docker").glob("compose.*.yml"))


def hadolint() -> str | None:
    beside = Path(sys.executable).with_name("hadolint")
    return str(beside) if beside.exists() else shutil.which("hadolint")


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_hadolint_finds_nothing(path: Path) -> None:
    if hadolint() is None:
        pytest.skip("hadolint is not installed")
    done = subprocess.run([str(hadolint()), str(path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0 and not done.stdout, done.stdout


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_images_are_pinned_and_without_root(path: Path) -> None:
    text = path.read_text()
    users = re.findall(r"^USER (\S+)$", text, re.MULTILINE)
    assert users[-1] == "1000" and "HEALTHCHECK" in text and "STOPSIGNAL SIGTERM" in text
    base = re.search(r"^ARG BASE=(\S+)$", text, re.MULTILINE)
    assert base and re.search(r":(\d+\.\d+\.\d+-|\$\{TRTLLM_VERSION\})", base[1]), "the base has no exact tag"
    installs = [line for line in text.splitlines() if re.search(r"pip install\b", line)]
    assert installs and all("-c constraints.txt" in line and "--no-cache-dir" in line for line in installs)


def test_torch_is_the_pinned_one() -> None:
    pinned = re.search(r"^torch==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    named = {version for path in DOCKERFILES for version in re.findall(r"TORCH_VERSION=(\S+)", path.read_text())}
    assert pinned and named == {pinned[1]}


def test_the_context_holds_what_is_copied_and_little_else() -> None:
    kept = [line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")]
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
            assert not source.startswith(".") or (path.parent / source).is_file(), source


def test_the_b200_node_serves_a_recipe_as_it_is() -> None:
    serve = yaml.safe_load((ROOT / "docker/compose.b200.yml").read_text())["services"]["serve"]
    (recipe,) = (volume.split(":")[0] for volume in serve["volumes"] if volume.startswith("../configs/"))
    first = (ROOT / "docker" / recipe).read_text().splitlines()[0]
    assert f" build-config {serve['command'][2]} " in first
    gpus = serve["deploy"]["resources"]["reservations"]["devices"][0]["count"]
    assert "--tp-size" not in serve["command"] and f"{gpus}xb200" in recipe
    done = subprocess.run(
        [sys.executable, "-m", *serve["command"][:3], "--config", str(ROOT / "docker" / recipe), "--dry-run"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert f"--tp_size {gpus} " in done.stdout and "--trust_remote_code" in done.stdout
