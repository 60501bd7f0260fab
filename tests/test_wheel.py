"""The wheel and the source distribution: complete, without a stray file, working by themselves."""

import json
import os
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from tests.command_line import printed

ROOT = Path(__file__).parents[1]
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """(wheel, sdist), the wheel made from the sdist as an index's users get it."""
    directory = tmp_path_factory.mktemp("dist")
    printed(sys.executable, "-m", "build", "--no-isolation", "-o", directory, ROOT)
    return next(directory.glob("*.whl")), next(directory.glob("*.tar.gz"))


def tracked(*patterns: str) -> set[str]:
    listed = printed("git", "ls-files", *patterns, cwd=ROOT)
    return {name for name in listed.splitlines() if (ROOT / name).is_file()}


def test_the_wheel_holds_the_package_and_nothing_else(built: tuple[Path, Path]) -> None:
    names = set(zipfile.ZipFile(built[0]).namelist())
    package = {name for name in names if ".dist-info/" not in name}
    assert package == tracked("trtspec")
    assert any(name.endswith("licenses/LICENSE") for name in names) and any(
        name.endswith("NOTICE") for name in names
    )


def test_the_sdist_holds_what_is_tracked(built: tuple[Path, Path]) -> None:
    with tarfile.open(built[1]) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert (
        tracked("trtspec", "tests", "tools", "docs", "configs", "README.md", "constraints.txt")
        <= names
    )
    assert not [
        name
        for name in names
        if "__pycache__" in name or name.startswith((".venv", "demo-out", "site/"))
    ]


def test_the_wheel_works_alone(built: tuple[Path, Path], tmp_path: Path) -> None:
    """Unpacked beside the packages of this environment, far from the sources."""
    zipfile.ZipFile(built[0]).extractall(tmp_path / "installed")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "installed"), "HF_HUB_OFFLINE": "1"}

    def run(*words: str) -> str:
        return printed(sys.executable, "-P", "-m", "trtspec", *words, cwd=tmp_path, env=environment)

    where = (sys.executable, "-P", "-c", "import trtspec; print(trtspec.__file__)")
    assert str(tmp_path) in printed(*where, cwd=tmp_path, env=environment)
    target = tmp_path / "installed" / "trtspec" / "data" / "kimi-nano"
    assert json.loads(run("inspect", str(target), "--json"))["problems"] == []
    config = tmp_path / "engine.yml"
    pair = ["nvidia/Kimi-K2.5-NVFP4", "--head", "nvidia/Kimi-K2.5-Eagle3"]
    run("build-config", *pair, "--tp-size", "4", "-o", str(config))
    run("lint", str(config))
    run("serve", str(target), "--backend", "reference", "--dry-run", "--json")
    run("quantize", str(target), "-o", str(tmp_path / "nvfp4"))
