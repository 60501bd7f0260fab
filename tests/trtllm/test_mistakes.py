"""Mistakes as people make them: those the engine refuses are errors, harmless ones are not."""

import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from trtspec.cli.lint import LintOptions, lint

CATALOGUE = yaml.safe_load(Path(__file__).with_name("mistakes.yaml").read_text())
SEVERITIES, TARGET = ("error", "warning", "info"), "nvidia/Kimi-K2.6-NVFP4"


def changed(keys: dict[str, Any]) -> str:
    values = yaml.safe_load(CATALOGUE["base"])
    for path, value in keys.items():
        *parents, name = [path.strip('"')] if path.startswith('"') else path.split(".")
        place = values
        for parent in parents:
            place = place.setdefault(parent, {})
        place[name] = value
        if value == "<gone>":
            del place[name]
    return yaml.safe_dump(values, sort_keys=False, allow_unicode=True)


def mistakes(group: dict[str, Any]) -> Iterator[tuple[str, list[str]]]:
    """Each file of a group, with the options that it is served with."""
    options = shlex.split(group.get("served", ""))
    for keys in group.get("set", ()):
        yield changed(keys), options
    for old, new in group.get("swap", ()):
        yield CATALOGUE["base"].replace(old, new, 1), options
    for words in group.get("argv", ()):
        yield CATALOGUE["base"], shlex.split(words)
    yield from ((text, options) for text in group.get("text", ()))


def severity(group: dict[str, Any], text: str, words: list[str], file: Path) -> str:
    """The worst that lint says of one mistake."""
    file.write_text(text)
    served = {
        "trtllm_version": group.get("release", "1.3.0rc27.dev0"),
        "target": group.get("target", TARGET),
    }
    served = {} if "text" in group else served  # a whole file says it itself
    report = lint(LintOptions(files=(str(file), *words), gpu=group.get("gpu", "b200"), **served))
    said = {problem["severity"] for problem in report["problems"]} | (
        {"error"} if "error" in report.values else set()
    )
    return next((one for one in SEVERITIES if one in said), "nothing")


@pytest.mark.parametrize(
    ("truth", "least", "most"), [("refuses", 0.96, 1), ("wrong", 0.96, 1), ("harmless", 0, 0)]
)
def test_mistakes_are_judged_as_the_engine_takes_them(
    truth: str, least: float, most: float, tmp_path: Path
) -> None:
    """Of what is served wrongly, a warning is enough."""
    enough = SEVERITIES[: 2 if truth == "wrong" else 1]
    made = [(group, *one) for group in CATALOGUE[truth] for one in mistakes(group)]
    found = [severity(*one, tmp_path / "file") in enough for one in made]
    print(f"\n{truth}: {sum(found)} of {len(made)} reported as {' or '.join(enough)}")
    odd = [
        (group["why"], text, words)
        for (group, text, words), hit in zip(made, found, strict=True)
        if hit != most
    ]
    assert least * len(made) <= sum(found) <= most * len(made), odd
