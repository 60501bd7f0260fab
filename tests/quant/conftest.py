"""Where a test's target and the output of its conversion lie."""

import functools
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.tiny import make_target


@pytest.fixture
def new_target(tmp_path: Path) -> Callable[..., Path]:
    return functools.partial(make_target, tmp_path / "in")


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "out"
