"""Renders the chart as `helm template` does.

`python -m tests.docker.chart` writes the golden files again.
"""

import copy
import dataclasses
import functools
import re
from pathlib import Path
from typing import Any

import yaml

from trtspec.records import parse

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
CHART = ROOT / "docker" / "helm" / "trtspec"
LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
VALUES = sorted((HERE / "values").glob("*.yaml"))
RECIPES = sorted((CHART / "recipes").glob("*.yaml"))
IMAGE = {"image": {"repository": "registry.example.com/trtspec"}}  # recipes leave it to the user


def named(name: str) -> Path:
    """A values file of the tests."""
    return HERE / "values" / f"{name}.yaml"


@functools.cache
def chart() -> Any:
    import helm_python

    return helm_python.Chart.load(str(CHART))


def merged(*files: dict[str, Any]) -> dict[str, Any]:
    """As Helm merges the files of several `-f`."""
    found: dict[str, Any] = {}
    for other in files:
        for key, value in other.items():
            both = isinstance(value, dict) and isinstance(found.get(key), dict)
            found[key] = merged(found[key], value) if both else copy.deepcopy(value)
    return found


@functools.cache
def _read(path: Path) -> dict[str, Any]:
    return merged(IMAGE, with_recipes(table(path.name, path.parent)))


def table(name: str, directory: Path = HERE) -> dict[str, Any]:
    """A YAML file of the tests."""
    return yaml.load((directory / name).read_text(encoding="utf-8"), Loader=LOADER)


def with_recipes(values: dict[str, Any]) -> dict[str, Any]:
    """Values over what build-config writes: `build` holds its words, one line for each file."""
    lines = values.pop("build", [])
    return merged(*(yaml.load(built(line), Loader=LOADER) for line in lines), values)


@functools.cache
def built(line: str) -> str:
    """What `trtspec build-config LINE --format helm-values` prints."""
    from trtspec.trtllm.build import build_named
    from trtspec.trtllm.intent import CACHES, Intent
    from trtspec.trtllm.kubernetes import helm_values

    intent = parse(Intent, line, "build-config")
    source = intent.quantize_from
    config = build_named(
        dataclasses.replace(intent, quantize_from=None), cache=CACHES["helm-values"]
    )
    return helm_values(config, quantize_from=source)


def load(path: Path) -> dict[str, Any]:
    return copy.deepcopy(_read(path))


def render(values: dict[str, Any], name: str = "kimi") -> dict[str, str]:
    """Text of each template that wrote an object, by file name."""
    rendered = chart().render(values, name=name, namespace="serving")
    return {
        Path(path).name: text
        for path, text in sorted(rendered.items())
        if text.strip() and not path.endswith(("NOTES.txt", ".tpl"))
    }


def objects(values: dict[str, Any], name: str = "kimi") -> list[dict[str, Any]]:
    return [
        found
        for text in render(values, name).values()
        for found in yaml.load_all(text, Loader=LOADER)
        if found
    ]


@functools.cache
def objects_of(path: Path) -> tuple[dict[str, Any], ...]:
    """Objects of a values file; shared between tests, which leave them as they are."""
    return tuple(objects(load(path)))


def kind(values: dict[str, Any], name: str) -> list[dict[str, Any]]:
    return [found for found in objects(values) if found["kind"] == name]


def golden(values: dict[str, Any]) -> str:
    """All objects as text; /etc/trtspec's files and hash are left out.

    Those are what build-config and the scripts say.
    """
    texts = []
    for name, text in render(values).items():
        if name == "configmap.yaml":
            head, _, data = text.partition("\ndata:\n")
            files = re.findall(r"^  ([\w.-]+): ", data, re.MULTILINE)
            text = f"{head}\ndata:  # {', '.join(files)}"
        text = re.sub(r"(checksum/config: )[0-9a-f]{64}", r"\1(of the files)", text)
        texts.append(
            f"# {name}\n{re.sub(r'-bench-[0-9a-f]{8}', '-bench-(hash)', text).strip()}\n---\n"
        )
    return "".join(texts)


if __name__ == "__main__":
    for path in VALUES:
        (HERE / "goldens" / path.name).write_text(golden(load(path)), encoding="utf-8")
    for stale in {path.name for path in (HERE / "goldens").glob("*.yaml")} - {
        path.name for path in VALUES
    }:
        (HERE / "goldens" / stale).unlink()
