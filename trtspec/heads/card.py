"""The README.md of a trained or converted head: what it is, how it was made, what was measured, how to serve it. The
text is data/head_card.md."""

from __future__ import annotations

import shlex
from dataclasses import replace
from typing import Any

import jinja2

from trtspec.checkpoint.heads.dialects import DIALECTS, ENGINES, OPTIONS
from trtspec.data_files import DATA
from trtspec.specs import HeadSpec


def model_card(spec: HeadSpec, provenance: dict[str, Any]) -> str:
    """Markdown made from the record alone, so that the card and provenance.json never differ."""
    target = provenance["source"]["target"]
    return _rendered(
        spec,
        provenance,
        target=target,
        parameters=f"{provenance['parameters']:,}",
        serve=_serving(spec, target),
        measured=provenance.get("acceptance"),
    )


def conversion_card(spec: HeadSpec, result: dict[str, Any], record: dict[str, Any]) -> str:
    """Markdown from the result and the provenance record; a measurement of the source is repeated with its origin."""
    size = f"{result['parameters']:,} in {result['tensors']} tensors, {result['bytes_out']:,} bytes"
    return _rendered(
        spec,
        record,
        converted=True,
        target=record["source"]["target"],
        parameters=size,
        serve=result["serve"],
        repairs=result["repairs"],
        measured=(record["source"].get("provenance") or {}).get("acceptance"),
    )


def _rendered(spec: HeadSpec, record: dict[str, Any], *, converted: bool = False, **values: Any) -> str:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(DATA), trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True
    )
    return environment.get_template("head_card.md").render(
        spec=spec, record=record, source=record["source"], converted=converted, dialects=DIALECTS, engines=ENGINES,
        interval=interval_text, numbers=lambda found: ", ".join(f"{value:.3f}" for value in found), **values,
    )  # fmt: skip


def _serving(spec: HeadSpec, target: str) -> dict[str, str]:
    """For each engine the command that serves this head, after the conversion where the engine misreads this layout."""
    found, layers = {}, list(spec.aux_layers or ())
    for name, engine in ENGINES.items():
        found[name] = serving_commands(spec, "HEAD", target, layers)[name]
        if not DIALECTS[spec.dialect].served_by(engine, spec) and not engine.cannot_load(spec):
            converted = replace(spec, dialect=OPTIONS[name].name)
            found[name] += "\n" + serving_commands(converted, f"HEAD-{name}", target, layers)[name]
    return found


def serving_commands(spec: HeadSpec, head: str, target: str | None, capture: list[int] | None) -> dict[str, str]:
    """A shell command (and YAML) for each engine; for a layout that an engine misreads, the conversion that it needs;
    for a head that it cannot load, a comment with the reason.

    `capture` holds the layer outputs that TensorRT-LLM needs in its configuration; None if its default is right
    or unknown.
    """
    dialect, commands = DIALECTS[spec.dialect], {}
    for name, engine in ENGINES.items():
        if reason := engine.cannot_load(spec):
            commands[name] = f"# {reason}"
        elif dialect.served_by(engine, spec):
            commands[name] = engine.start(head, target or "<target>", capture)
        else:
            convert = shlex.join(["trtspec", "convert", head, "-o", f"{head}-{name}", "--to", name])
            commands[name] = f"{convert}    # {engine.title} misreads this layout"
    return commands


def interval_text(row: dict[str, Any]) -> str:
    """The 95 % interval of a row's acceptance length over its prompts."""
    interval = row.get("acceptance_length_interval")
    return "{:.3f} to {:.3f}".format(*interval) if interval else "too few prompts"
