"""The package's own data files."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

DATA = Path(__file__).parent / "data"


def load_yaml(name: str | Path) -> Any:
    """Parses a YAML file, by its name in trtspec/data (such as `models.yaml`) or its whole path."""
    import yaml  # here, because `trtspec --help` needs none

    # libyaml's loader is ten times as fast, where PyYAML was built with it
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    return yaml.load((DATA / name).read_text(encoding="utf-8"), Loader=loader)


def kimi_nano_dir() -> Path:
    """The small Kimi-shaped target of the package: checkpoint, tokenizer, template, prompts."""
    return DATA / "kimi-nano"


def gpu_names() -> list[str]:
    return sorted(load_yaml("gpus.yaml")["gpus"])


@cache
def documented() -> dict[str, dict[str, str]]:
    """Every problem code with `summary`, `remedy` and `area`, from the files of data/problems."""
    return {
        code: {"area": fragment.stem, **entry}
        for fragment in sorted((DATA / "problems").glob("*.yaml"))
        for code, entry in load_yaml(f"problems/{fragment.name}").items()
    }
