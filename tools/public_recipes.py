"""Writes docs/reference/public-recipes.md from public_recipes.yaml and what build-config writes.

`--check` exits 1 when the document is stale, a difference is not explained, an explanation has no
difference, or lint misjudges one of the public files that worked or failed.
"""

from __future__ import annotations

import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from trtspec.trtllm.build import build_named
from trtspec.trtllm.deployment import deployment_of
from trtspec.trtllm.document import Document
from trtspec.trtllm.intent import PREFIX, parse_intent
from trtspec.trtllm.lint import lint

HERE = Path(__file__).resolve().parent
DOCS = HERE.parent / "docs" / "reference"
# options that are no setting of the YAML under another name
OPTIONS = ("--reasoning_parser", "--tool_parser", "--no-telemetry")


@dataclass(frozen=True)
class Compared:
    """Setting -> (theirs, ours), only where they differ; None means "not stated"."""

    name: str
    recipe: dict[str, Any]
    same: int
    differences: dict[str, tuple[Any, Any]]
    reasons: dict[str, str]


def flat(settings: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in settings.items():
        path = f"{prefix}{key}"
        found |= (
            flat(value, f"{path}.")
            if isinstance(value, dict)
            else {path: "null" if value is None else value}
        )
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
    data = yaml.safe_load((HERE / "public_recipes.yaml").read_text(encoding="utf-8"))
    found = []
    for recipe in data["recipes"]:
        theirs, mine = flat(recipe["theirs"]), ours(recipe["command"])
        keys = [*theirs, *(key for key in mine if key not in theirs)]
        differing = {
            key: (theirs.get(key), mine.get(key))
            for key in keys
            if theirs.get(key) != mine.get(key)
        }
        reasons = {
            key: recipe["differences"].get(key) or data["common"].get(key, "") for key in differing
        }
        found.append(
            Compared(recipe["name"], recipe, len(keys) - len(differing), differing, reasons)
        )
    return found


def complaints(found: list[Compared]) -> list[str]:
    """Differences without a reason and reasons without a difference."""
    wrong = []
    for item in found:
        wrong += [
            f"{item.name}: {key} is not explained"
            for key, reason in item.reasons.items()
            if not reason
        ]
        idle = set(item.recipe["differences"]) - set(item.differences)
        wrong += [f"{item.name}: {key} no longer differs" for key in sorted(idle)]
    return wrong


def judged() -> list[dict[str, Any]]:
    """The other public files with lint's reports; `errors` by code, their options' too."""
    found = []
    for item in yaml.safe_load((HERE / "public_recipes.yaml").read_text(encoding="utf-8"))[
        "judged"
    ]:
        passed = shlex.split(item["options"]) if "options" in item else None
        text, names = (
            yaml.safe_dump(item["settings"], sort_keys=False),
            (item.get("target"), item.get("head")),
        )
        deployment, _, wrong = deployment_of(
            Document.parse(text),
            version=item["version"],
            target=names[0],
            head=names[1],
            passed=passed,
        )
        problems: list[Any] = [*wrong, *lint(text, deployment)]
        found.append(
            {
                **item,
                "errors": [problem.code for problem in problems if problem.severity == "error"],
            }
        )
    return found


def misjudged(found: list[dict[str, Any]]) -> list[str]:
    """Working files with an error, and failing ones without theirs."""
    wrong = []
    for item in found:
        works, errors = item["verdict"] == "works", item["errors"]
        if bool(errors) == works or not (works or item["verdict"] in errors):
            wrong.append(
                f"{item['name']} on {item['version']}: "
                f"{item['verdict']} and lint says {errors or 'nothing'}"
            )
    return wrong


def table(found: list[dict[str, Any]]) -> list[str]:
    lines = [
        "",
        "## Files that are judged only",
        "",
        "Written for a release and run, or reported with their failure.",
    ]
    lines += ["", "| file | release | became of it | source |", "|---|---|---|---|"]
    for item in found:
        verdict = "works" if item["verdict"] == "works" else f"fails: `{item['verdict']}`"
        lines.append(f"| {item['name']} | {item['version']} | {verdict} | {item['source']} |")
    return lines


def document(found: list[Compared]) -> str:
    lines = [
        "<!-- Written by tools/public_recipes.py; edit public_recipes.yaml instead. -->",
        "",
        "# Public recipes and what build-config writes",
        "",
        (
            "Each public recipe beside the file and options that "
            "`trtspec build-config` gives for the same sizes, with a"
        ),
        (
            "reason for every difference. "
            "A dash means that the setting is left at the engine's default."
        ),
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
    return "\n".join([*lines, *table(judged())]) + "\n"


def main() -> None:
    found = compare()
    wrong, path = [*complaints(found), *misjudged(judged())], DOCS / "public-recipes.md"
    if "--check" not in sys.argv:
        path.write_text(document(found))
    elif not path.is_file() or path.read_text() != document(found):
        wrong.append(
            "docs/reference/public-recipes.md is not up to date: python tools/public_recipes.py"
        )
    sys.exit("\n".join(wrong) if wrong else 0)


if __name__ == "__main__":
    main()
