"""A stand-in trtllm-serve on PATH, upstream's own manifests, and a tiny pair to serve."""

import os
import sys
from pathlib import Path

import pytest

from tests import command_line

STANDIN = Path(__file__).parent / "standin" / "trtllm-serve"


@pytest.fixture
def standin_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory in front of PATH that holds the stand-in, run by this interpreter."""
    directory = tmp_path / "bin"
    command_line.program(directory / "trtllm-serve", f'exec "{sys.executable}" "{STANDIN}" "$@"')
    (directory / "trtllm-llmapi-launch").symlink_to(STANDIN.with_name("trtllm-llmapi-launch"))
    monkeypatch.setenv("PATH", f"{directory}{os.pathsep}{os.environ['PATH']}")
    return directory


@pytest.fixture
def free_port() -> int:
    return command_line.free_port()


@pytest.fixture(scope="session")
def tiny_head(tmp_path_factory: pytest.TempPathFactory, target_dir: Path) -> Path:
    from tests.tiny import make_head

    return make_head(tmp_path_factory.mktemp("head"), target_dir, attention="mla")


@pytest.fixture(scope="session")
def manifests(upstream_data: Path) -> Path:
    """The directory of TensorRT-LLM's manifests within the upstream data."""
    inner = upstream_data / "trtllm"
    place = inner if inner.is_dir() else upstream_data
    if not (place / "main" / "llm_args_golden_manifest.json").is_file():
        pytest.skip("the upstream data has no TensorRT-LLM manifests")
    return place
