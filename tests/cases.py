"""Cases of parametrized tests: those that take minutes, and tables, kept beside the test."""

import functools
from pathlib import Path
from typing import Any

import pytest
import yaml

slow = functools.partial(pytest.param, marks=pytest.mark.slow)


def table(file: str) -> Any:
    """The YAML file that has the name of a test module."""
    return yaml.safe_load(Path(file).with_suffix(".yaml").read_text())
