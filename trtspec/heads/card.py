"""The README.md of a trained or converted head, from the template data/head_card.md.

It names the head, how it was made, the measurements, and how to serve it.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import jinja2

from trtspec.checkpoint.heads.dialects import DIALECTS, ENGINES
from trtspec.data_files import DATA
from trtspec.specs import HeadSpec

if TYPE_CHECKING:
    from trtspec.heads.training.training_record import AcceptanceRow, TrainingRecord


def model_card(spec: HeadSpec, provenance: TrainingRecord) -> str:
    """Renders the model card of a trained head as Markdown.

    The card uses the provenance record only, so the card and provenance.json never differ.
    """
    target = provenance["source"]["target"]
    layers = list(spec.aux_layers or ())
    return _rendered(
        spec,
        provenance,
        target=target,
        parameters=f"{provenance['parameters']:,}",
        serve=serving_commands(spec, "HEAD", target, layers),
        measured=provenance.get("acceptance"),
    )


def conversion_card(spec: HeadSpec, result: dict[str, Any], record: dict[str, Any]) -> str:
    """Renders the model card of a converted head as Markdown.

    A measured acceptance of the source head is repeated as a figure of the source.

    Args:
        result: fields of `trtspec convert --json`.
        record: provenance record of the conversion.
    """
    size = f"{result['parameters']:,} in {result['tensors']} tensors, {result['bytes_out']:,} bytes"
    source = record["source"]
    source_provenance = source.get("provenance") or {}
    return _rendered(
        spec,
        record,
        converted=True,
        target=source["target"],
        parameters=size,
        serve=result["serve"],
        repairs=result["repairs"],
        measured=source_provenance.get("acceptance"),
    )


def _rendered(
    spec: HeadSpec, record: Mapping[str, Any], *, converted: bool = False, **values: Any
) -> str:
    """Renders the template data/head_card.md. `values`: further variables of the template."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(DATA),
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    template = environment.get_template("head_card.md")
    return template.render(
        spec=spec,
        record=record,
        source=record["source"],
        converted=converted,
        dialects=DIALECTS,
        engines=ENGINES,
        interval=interval_text,
        numbers=lambda rates: ", ".join(f"{rate:.3f}" for rate in rates),
        **values,
    )


def serving_commands(
    spec: HeadSpec, head: str, target: str | None, capture: list[int] | None
) -> dict[str, str]:
    """Shell commands (and YAML) that serve the head, by engine.

    An engine that misreads the head's layout gets a conversion first. An engine that cannot load
    the head gets a shell comment with the reason.

    Args:
        head: path of the head in the commands.
        target: name of the target in the commands. None: a placeholder.
        capture: layer outputs that TensorRT-LLM needs in its configuration. None if its default is
            right or the layers are unknown.
    """
    commands = {}
    for name, engine in ENGINES.items():
        reason = engine.cannot_load(spec)
        if reason:
            commands[name] = f"# {reason}"
            continue
        served = head
        convert = ""
        if not DIALECTS[spec.dialect].served_by(engine, spec):
            served = f"{head}-{name}"
            command = shlex.join(["trtspec", "convert", head, "-o", served, "--to", name])
            convert = f"{command}    # {engine.title} misreads this layout\n"
        commands[name] = convert + engine.start(served, target or "<target>", capture)
    return commands


def interval_text(row: AcceptanceRow) -> str:
    """Formats the 95 % interval of the acceptance length over the prompts of a measurement."""
    interval = row.get("acceptance_length_interval")
    if not interval:
        return "too few prompts"
    return "{:.3f} to {:.3f}".format(*interval)
