"""Where the package's own data files lie."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

DATA = Path(__file__).parent / "data"


def load_yaml(name: str) -> Any:
    """Parses a file of trtspec/data, for example `models.yaml`."""
    return yaml.safe_load((DATA / name).read_text(encoding="utf-8"))


def kimi_nano_dir() -> Path:
    """The small Kimi-shaped target that ships with the package: checkpoint, tokenizer, template, prompts."""
    return DATA / "kimi-nano"
