"""Writes schema-differences.md: our schema of the newest line against TensorRT-LLM's own manifests, field by field.

`TRTSPEC_UPSTREAM_DATA=<folder> python tools/schema_differences.py`; the manifests are not part of this project.
"""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import yaml

from trtspec.trtllm.rules.keys import ITEMS
from trtspec.trtllm.schema import Field, Schema, schema_for

PAGE = Path(__file__).resolve().parent.parent / "docs" / "schema-differences.md"
NEWEST, OLDER = "1.3.0rc27.dev0", "1.3.0rc20"
PLAIN = {"int": "int", "float": "float", "bool": "bool", "str": "str"}


def page(manifests: Path) -> str:
    listed = json.loads((manifests / "main" / "llm_args_golden_manifest.json").read_text())[
        "TorchLlmArgs"
    ]
    leaves, schema = {leaf["path"]: leaf for leaf in listed}, schema_for(NEWEST)
    missing = sorted(set(leaves) - set(schema.fields))
    lines = [
        "<!-- Written by tools/schema_differences.py from upstream's manifests. -->\n",
        "# Schema against manifest\n",
        f"The snapshot of the manifest's commit ({NEWEST}) has {len(schema.fields)} fields. Upstream's manifest lists "
        f"{len(leaves)}; {len(missing)} of these are not in the schema. The manifest is made for telemetry: it omits "
        "free text, mappings, defaults, and limits that are only in validators. What it omits here comes from the "
        "classes of its own commit (`sources` in the schema files).\n",
        "## Listed values that differ\n\n| field | only in the schema | only in the manifest |\n|---|---|---|",
        *sorted(values(schema, leaves)),
        "\n## Types that differ\n\n| field | schema | manifest |\n|---|---|---|",
        *sorted(kinds(schema, leaves)),
        "\n## Limits that the manifest does not state\n\n| field | limit |\n|---|---|",
        *sorted(limits(schema, leaves)),
        "\n## In the schema only\n\n| field | type |\n|---|---|",
        *(
            f"| `{path}` | {show(field.type)} |"
            for path, field in sorted(schema.fields.items())
            if path not in leaves
        ),
        "\n## Options of trtllm-serve\n\n| release | option | difference |\n|---|---|---|",
        *options(manifests),
    ]
    return "\n".join(lines) + "\n"


def show(text: Any) -> str:
    return str(text).replace("|", "\\|")


def values(schema: Schema, leaves: dict[str, Any]) -> list[str]:
    rows = []
    for path, leaf in leaves.items():
        ours, theirs = (
            {str(v) for v in schema.fields[path].allowed},
            {str(v) for v in leaf["allowed_values"]},
        )
        if ours != theirs:
            rows.append(
                f"| `{path}` | {', '.join(sorted(ours - theirs))} | {', '.join(sorted(theirs - ours))} |"
            )
    return rows


def kinds(schema: Schema, leaves: dict[str, Any]) -> list[str]:
    """Annotations in plain types, compared where they can be written so; enums and choices are compared by value."""
    rows = []
    for path, leaf in leaves.items():
        text = re.sub(r"<class '(\w+)'>", r"\1", leaf["annotation"])
        text = re.sub(r"Annotated\[(\w+), [^\]]*\]", r"\1", text)
        if leaf["allowed_values"] or not re.fullmatch(
            r"(Optional\[)?(List\[|Set\[)*(int|float|bool|str)\]*", text
        ):
            continue
        inner = (
            text.removeprefix("Optional[").removesuffix("]")
            if text.startswith("Optional[")
            else text
        )
        theirs = inner.replace("List[", "list[").replace("Set[", "list[") + (
            "|null" if inner != text else ""
        )
        if sorted(theirs.split("|")) != sorted(schema.fields[path].type.split("|")):
            rows.append(f"| `{path}` | {show(schema.fields[path].type)} | {show(theirs)} |")
    return rows


def limits(schema: Schema, leaves: dict[str, Any]) -> list[str]:
    rows = []
    for path, leaf in leaves.items():
        field = schema.fields[path]
        if limit(field) and "Gt(" not in leaf["annotation"] and "Ge(" not in leaf["annotation"]:
            rows.append(f"| `{path}` | {limit(field)} |")
    return rows


def limit(field: Field) -> str:
    parts = (
        ("at least", field.min),
        ("at most", field.max),
        ("above", field.above),
        ("below", field.below),
    )
    words = [f"{word} {value}" for word, value in parts if value is not None]
    words += ["not an empty list"] if field.not_empty else []
    return ", ".join([*words, *([f"must {ITEMS[field.items][0]}"] if field.items else [])])


def options(manifests: Path) -> list[str]:
    rows = []
    for version, folder in ((NEWEST, "main"), (OLDER, "older")):
        ours = schema_for(version).options
        text = (manifests / folder / "trtllm_serve_cli.yaml").read_text()
        theirs = yaml.safe_load(text)["commands"]["serve"]["options"]
        found = [
            f"| {version} | {name} | in one of the two only |"
            for name in sorted(set(ours) ^ set(theirs))
        ]
        for name in sorted(set(ours) & set(theirs)):
            choices = re.findall(r"'([^']*)'", theirs[name]["type"])
            extra = sorted(set(ours[name].choices) - set(choices)) if choices else []
            if extra:
                found.append(f"| {version} | {name} | the schema also takes {', '.join(extra)} |")
            if ours[name].default != theirs[name]["default"]:
                found.append(
                    f"| {version} | {name} | default {ours[name].default!r}, not {theirs[name]['default']!r} |"
                )
        rows += found or [
            f"| {version} | | none: {len(theirs)} options agree in flags, type and default |"
        ]
    return rows


def main() -> None:
    root = Path(os.environ.get("TRTSPEC_UPSTREAM_DATA", ""))
    place = root / "trtllm" if (root / "trtllm").is_dir() else root
    if not (place / "main" / "llm_args_golden_manifest.json").is_file():
        sys.exit("set TRTSPEC_UPSTREAM_DATA to the folder with upstream's manifests")
    PAGE.write_text(page(place), encoding="utf-8")


if __name__ == "__main__":
    main()
