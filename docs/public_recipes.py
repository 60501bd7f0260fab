"""Writes docs/public-recipes.md from public_recipes.yaml and what build-config writes: `python docs/public_recipes.py`.

`--check` exits 1 when the document is stale, a difference is not explained or an explanation has no difference.
"""

from __future__ import annotations

import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from trtspec.trtllm.build.config import build_named
from trtspec.trtllm.document import Document
from trtspec.trtllm.intent import PREFIX, parse_intent

DOCS = Path(__file__).resolve().parent
# options that are no setting of the YAML under another name
OPTIONS = ("--reasoning_parser", "--tool_parser", "--no-telemetry")


@dataclass(frozen=True)
class Compared:
    """Setting -> (theirs, ours), only where they differ; None stands for "not said"."""

    name: str
    recipe: dict[str, Any]
    same: int
    differences: dict[str, tuple[Any, Any]]
    reasons: dict[str, str]


def flat(settings: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in settings.items():
        path = f"{prefix}{key}"
        found |= flat(value, f"{path}.") if isinstance(value, dict) else {path: "null" if value is None else value}
    return found


def ours(words: str) -> dict[str, Any]:
    """Every setting of the file that the command writes, and of the options that go with it."""
    version = shlex.split(words)[shlex.split(words).index("--trtllm-version") + 1]
    intent = parse_intent(f"{PREFIX}{version}: trtspec build-config {words}")
    assert intent is not None
    recipe = build_named(intent)
    found = flat(Document.parse(recipe.text).value) | intent.settings_in_argv()
    argv = recipe.argv
    found["backend"] = argv[argv.index("--backend") + 1]
    for option in OPTIONS:
        if option in argv:
            following = argv[argv.index(option) + 1]
            found[f"option:{option}"] = True if following.startswith("--") else following
    return found


def compare() -> list[Compared]:
    data = yaml.safe_load((DOCS / "public_recipes.yaml").read_text(encoding="utf-8"))
    found = []
    for recipe in data["recipes"]:
        theirs, mine = flat(recipe["theirs"]), ours(recipe["command"])
        keys = [*theirs, *(key for key in mine if key not in theirs)]
        differing = {key: (theirs.get(key), mine.get(key)) for key in keys if theirs.get(key) != mine.get(key)}
        reasons = {key: recipe["differences"].get(key) or data["common"].get(key, "") for key in differing}
        found.append(Compared(recipe["name"], recipe, len(keys) - len(differing), differing, reasons))
    return found


def complaints(found: list[Compared]) -> list[str]:
    """Differences without a reason and reasons without a difference."""
    wrong = []
    for item in found:
        wrong += [f"{item.name}: {key} is not explained" for key, reason in item.reasons.items() if not reason]
        idle = set(item.recipe["differences"]) - set(item.differences)
        wrong += [f"{item.name}: {key} no longer differs" for key in sorted(idle)]
    return wrong


def document(found: list[Compared]) -> str:
    lines = [
        "<!-- Written by docs/public_recipes.py; edit public_recipes.yaml instead. -->",
        "",
        "# Public recipes and what build-config writes",
        "",
        "Each public recipe beside the file and options that `trtspec build-config` gives for the same sizes, with a",
        "reason for every difference. A dash means that the setting is left at the engine's default.",
    ]
    for item in found:
        recipe = item.recipe
        lines += [
            "",
            f"## {item.name[0].upper()}{item.name[1:]}",
            "",
            f"{recipe['hardware']}. Source: {recipe['source']}.",
        ]
        lines += [
            "",
            f"    trtspec build-config {recipe['command']}",
            "",
            f"{item.same} settings are the same. Different:",
            "",
        ]
        lines += ["| setting | theirs | ours | why |", "|---|---|---|---|"]
        for key, (theirs, mine) in item.differences.items():
            cells = ["-" if value is None else f"`{value}`" for value in (theirs, mine)]
            setting = key.removeprefix("option:").removeprefix("env:")
            lines.append(f"| `{setting}` | {cells[0]} | {cells[1]} | {item.reasons[key]} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    found = compare()
    wrong, path = complaints(found), DOCS / "public-recipes.md"
    if "--check" not in sys.argv:
        path.write_text(document(found))
    elif not path.is_file() or path.read_text() != document(found):
        wrong.append("docs/public-recipes.md is not up to date: python docs/public_recipes.py")
    sys.exit("\n".join(wrong) if wrong else 0)


if __name__ == "__main__":
    main()
