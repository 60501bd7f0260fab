"""Loads the data files of the package."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

DATA = Path(__file__).parent / "data"


def load_yaml(name: str | Path) -> Any:
    """Returns the parsed content of a YAML file.

    `name`: name in trtspec/data, such as `models.yaml`, or an absolute path.
    """
    import yaml  # here, because `trtspec --help` does not need the package

    # the loader of libyaml is ten times as fast, but PyYAML may be built without it
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    return yaml.load((DATA / name).read_text(encoding="utf-8"), Loader=loader)


def kimi_nano_dir() -> Path:
    """Directory of the package's small Kimi model, with its tokenizer, template and prompts."""
    return DATA / "kimi-nano"


def gpu_names() -> list[str]:
    """Returns the names of all known GPU types, sorted."""
    return sorted(load_yaml("gpus.yaml")["gpus"])


@cache
def documented() -> dict[str, dict[str, str]]:
    """Returns the documentation of every problem code: its `area`, `summary` and `remedy`.

    The area is the name of the code's file in data/problems.
    """
    entries = {}
    for file in sorted((DATA / "problems").glob("*.yaml")):
        for code, entry in load_yaml(file).items():
            entries[code] = {"area": file.stem, **entry}
    return entries
