"""Renders the chart as `helm template` does; `python -m tests.docker.chart` writes the golden files again."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import yaml

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
CHART = ROOT / "docker" / "helm" / "trtspec"
LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
VALUES = sorted((HERE / "values").glob("*.yaml"))
RECIPES = sorted((CHART / "recipes").glob("*.yaml"))


@functools.cache
def chart() -> Any:
    import helm_python

    return helm_python.Chart.load(str(CHART))


def load(path: Path) -> dict[str, Any]:
    return yaml.load(path.read_text(encoding="utf-8"), Loader=LOADER)


def render(values: dict[str, Any]) -> dict[str, str]:
    """Text of each template that wrote an object, by file name."""
    rendered = chart().render(values, name="kimi", namespace="serving")
    return {
        Path(path).name: text
        for path, text in sorted(rendered.items())
        if text.strip() and not path.endswith(("NOTES.txt", ".tpl"))
    }


def objects(values: dict[str, Any]) -> list[dict[str, Any]]:
    return [found for text in render(values).values() for found in yaml.load_all(text, Loader=LOADER) if found]


@functools.cache
def objects_of(path: Path) -> tuple[dict[str, Any], ...]:
    """Objects of a values file; shared between tests, which leave them as they are."""
    return tuple(objects(load(path)))


def kind(values: dict[str, Any], name: str) -> list[dict[str, Any]]:
    return [found for found in objects(values) if found["kind"] == name]


def golden(values: dict[str, Any]) -> str:
    return "".join(f"# {name}\n{text.strip()}\n---\n" for name, text in render(values).items())


if __name__ == "__main__":
    for path in VALUES:
        (HERE / "goldens" / path.name).write_text(golden(load(path)), encoding="utf-8")
