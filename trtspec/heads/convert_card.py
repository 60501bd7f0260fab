"""README.md of a converted head."""

from __future__ import annotations

from typing import Any

from trtspec.heads.convert_rules import NAMES
from trtspec.heads.serving import LICENCE, NEEDED_BY, TITLES, table
from trtspec.specs import HeadSpec


def conversion_card(spec: HeadSpec, result: dict[str, Any], record: dict[str, Any]) -> str:
    """Markdown from the result and the provenance record; a measurement of the source is repeated with its origin."""
    source = record["source"]
    target = source["target"] or "its target"
    layers = ", ".join(map(str, spec.aux_layers)) if spec.aux_layers else "the engine's default"
    rows = [
        ("converted from", f"{source['head']} ({NAMES[source['dialect']]})"),
        ("layout", NAMES[spec.dialect]),
        ("version", f"EAGLE-{spec.eagle}"),
        ("attention", spec.attention.upper()),
        ("parameters", f"{result['parameters']:,} in {result['tensors']} tensors, {result['bytes_out']:,} bytes"),
        ("captured layer outputs (0-based)", layers),
        ("draft vocabulary", f"{spec.draft_vocab_size:,} of {spec.vocab_size:,}"),
        ("rope", f"{spec.rope.rope_type}, theta {spec.rope.theta:g}"),
        ("embedding", "its own" if spec.has_embed_tokens else "the target's"),
        ("lm_head", "its own" if spec.has_lm_head else "the target's"),
    ]
    parts = [f"# Eagle3 draft head for {target}", table(("", ""), rows), "## Serve"]
    parts += [f"{TITLES[engine]}:\n\n```sh\n{command}\n```" for engine, command in result["serve"].items()]
    parts.append(
        "`trtspec build-config TARGET --head HEAD` writes TensorRT-LLM's YAML for one version and checks it, "
        "`eagle3_layers_to_capture` included."
    )
    if needed := NEEDED_BY[spec.eagle]:
        parts.append(needed)
    parts += ["## Weights", "Conversion renames and copies: no weight was changed. SHA-256 by tensor: provenance.json."]
    parts += ["## Measured", _measured(source), "## Licence", LICENCE]
    return "\n\n".join(parts) + "\n"


def _measured(source: dict[str, Any]) -> str:
    measured = (source.get("provenance") or {}).get("acceptance")
    if not measured:
        return "No acceptance was measured on this head: `trtspec bench` against a server with it does that."
    lengths = ", ".join(f"{row['category']} {row['acceptance_length']:.3f}" for row in measured["rows"])
    return (
        f"Measured on the head this one was converted from (the same weights), draft length {measured['draft_len']}, "
        f"temperature {measured['temperature']:g}, {measured['prompts']} held-out prompts: {lengths}. "
        "Acceptance length = 1 + accepted drafts / verification steps."
    )
