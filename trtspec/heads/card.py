"""The README.md of a trained or converted head: what it is, how it was made, what was measured, how to serve it. The
text is data/head_card.md."""

from __future__ import annotations

import shlex
from typing import Any

import jinja2

from trtspec.checkpoint.heads.dialects import DIALECTS, ENGINES
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
        serve=serving_commands(spec, "HEAD", target, list(spec.aux_layers or ())),
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


def _rendered(
    spec: HeadSpec, record: dict[str, Any], *, converted: bool = False, **values: Any
) -> str:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(DATA),
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    return environment.get_template("head_card.md").render(
        spec=spec, record=record, source=record["source"], converted=converted, dialects=DIALECTS, engines=ENGINES,
        interval=interval_text, numbers=lambda found: ", ".join(f"{value:.3f}" for value in found), **values,
    )  # fmt: skip


def serving_commands(
    spec: HeadSpec, head: str, target: str | None, capture: list[int] | None
) -> dict[str, str]:
    """Shell commands (and YAML) for each engine: what serves the head, behind a conversion if the engine misreads its
    layout; for a head that it cannot load, a comment with the reason.

    `capture` holds the layer outputs that TensorRT-LLM needs in its configuration; None if its default is right
    or unknown.
    """
    commands = {}
    for name, engine in ENGINES.items():
        if reason := engine.cannot_load(spec):
            commands[name] = f"# {reason}"
            continue
        served, convert = head, ""
        if not DIALECTS[spec.dialect].served_by(engine, spec):
            served = f"{head}-{name}"
            words = shlex.join(["trtspec", "convert", head, "-o", served, "--to", name])
            convert = f"{words}    # {engine.title} misreads this layout\n"
        commands[name] = convert + engine.start(served, target or "<target>", capture)
    return commands


def interval_text(row: dict[str, Any]) -> str:
    """The 95 % interval of a row's acceptance length over its prompts."""
    interval = row.get("acceptance_length_interval")
    return "{:.3f} to {:.3f}".format(*interval) if interval else "too few prompts"
