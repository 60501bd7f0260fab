"""The README.md of a trained or converted head: what it is, how it was made, what was measured, how to serve it."""

from __future__ import annotations

import shlex
from dataclasses import replace
from typing import Any

from trtspec.checkpoint.heads.dialects import DIALECTS, ENGINES, OPTIONS
from trtspec.specs import HeadSpec

LICENCE = (
    "The head is derived from the target's answers and states, so the target's licence applies to it: for Kimi-K2 "
    "models a Modified MIT licence (products above 100 million monthly users or 20 million US dollars of monthly "
    'revenue must display "Kimi K2"). For a target quantized and published by NVIDIA, the NVIDIA Open Model License '
    "too."
)

LIMITS = (
    "- The head drafts, the target decides: answers and their risks are the target's, with or without it.\n"
    "- It was trained on the states of one target. With another version, another fine-tune or another quantization, "
    "fewer drafts are accepted.\n"
    "- Prompts unlike those of the training data, other languages, and contexts longer than the training sequences get "
    "fewer drafts accepted. Then speculation can be slower than none: measure with `trtspec bench`."
)


def model_card(spec: HeadSpec, provenance: dict[str, Any]) -> str:
    """Markdown made from the record alone, so that the card and provenance.json never differ."""
    source = provenance["source"]
    parts = [
        f"# Eagle3 draft head for {source['target']}",
        _what(spec, provenance),
        "## Serve",
        _serving(spec, source["target"]),
        "## Measured",
        _measured(provenance),
        "## Training",
        _training(provenance),
        "## Limits and risks",
        LIMITS,
        "## Licence",
        LICENCE,
    ]
    return "\n\n".join(parts) + "\n"


def _what(spec: HeadSpec, provenance: dict[str, Any]) -> str:
    rows = [
        *_shape_rows(spec, f"{provenance['parameters']:,}"),
        ("hidden size", spec.hidden_size),
        ("layout", "ModelOpt (`layers.0.` names), BF16"),
        ("trained with", f"trtspec train, ModelOpt {provenance['versions'].get('nvidia-modelopt', '')}"),
    ]
    return table(("", ""), rows)


def _shape_rows(spec: HeadSpec, parameters: str) -> list[tuple[str, Any]]:
    """The rows that the cards of a trained and of a converted head share."""
    layers = ", ".join(map(str, spec.aux_layers)) if spec.aux_layers else "the engine's default"
    return [
        ("version", f"EAGLE-{spec.eagle}"),
        ("attention", spec.attention.upper()),
        ("parameters", parameters),
        ("captured layer outputs (0-based)", layers),
        ("draft vocabulary", f"{spec.draft_vocab_size:,} of {spec.vocab_size:,}"),
        ("rope", f"{spec.rope.rope_type}, theta {spec.rope.theta:g}"),
    ]


def _serving(spec: HeadSpec, target: str) -> str:
    """For each engine the command that serves this head, after the conversion where the engine misreads this layout."""
    parts, layers = [], list(spec.aux_layers or ())
    for name, engine in ENGINES.items():
        commands, head, layout = [], "HEAD", spec
        if not DIALECTS[spec.dialect].served_by(engine, spec) and not engine.cannot_load(spec):
            commands.append(serving_commands(spec, head, target, layers)[name])
            head, layout = f"HEAD-{name}", replace(spec, dialect=OPTIONS[name].name)
        commands.append(serving_commands(layout, head, target, layers)[name])
        parts.append(f"{engine.title}, `HEAD` being this directory:\n\n```sh\n" + "\n".join(commands) + "\n```")
    parts.append(
        f"`trtspec build-config {target} --head HEAD` writes TensorRT-LLM's YAML for one version and checks it, and "
        f"`trtspec serve {target} --head HEAD --config extra-llm-api-config.yml` launches the pair. "
        f"`trtspec serve {target} --head HEAD-vllm --backend vllm` checks and launches it on vLLM."
    )
    if spec.eagle == "3.1":
        parts.append(needed_by_eagle31())
    return "\n\n".join(parts)


def _measured(provenance: dict[str, Any]) -> str:
    measured = provenance.get("acceptance")
    if not measured:
        return "No acceptance was measured yet: `trtspec bench` against a server with this head does it."
    rows = [
        (row["category"], row["prompts"], row["steps"], f"{row['acceptance_length']:.3f}", interval_text(row))
        + tuple(f"{share:.3f}" for share in row["by_position"])
        for row in measured["rows"]
    ]
    positions = [f"draft {index + 1}" for index in range(measured["draft_len"])]
    text = (
        f"Free running on {measured['prompts']} held-out prompts that were not trained on, in trtspec's reference "
        f"engine ({measured['dtype']}), temperature {measured['temperature']:g}, draft length {measured['draft_len']}, "
        f"at most {measured['max_tokens']} new tokens. Acceptance length = 1 + accepted drafts / verification steps; "
        "the last columns give the share of steps in which that draft was accepted."
    )
    return text + "\n\n" + table(("category", "prompts", "steps", "acceptance length", "95 %", *positions), rows)


def interval_text(row: dict[str, Any]) -> str:
    """The 95 % interval of a row's acceptance length over its prompts."""
    interval = row.get("acceptance_length_interval")
    return "{:.3f} to {:.3f}".format(*interval) if interval else "too few prompts"


def _training(provenance: dict[str, Any]) -> str:
    options, training = provenance["options"], provenance["training"]
    accuracy = training.get("held_out_accuracy")
    lines = [
        f"- {training['samples']:,} conversations answered by the target, {training['tokens_seen']:,} tokens seen in "
        f"{training['steps']:,} steps of {options['batch_size'] * options.get('accumulation', 1)} sequences up to "
        f"{options['seq_len']} tokens",
        f"- objective: cross-entropy to the target's distribution over "
        f"{options['ttt_steps']} training-time-test steps, weights {options.get('ttt_decay', 0.9):g}^k",
        f"- AdamW, peak learning rate {training['peak_lr']:.2e}, schedule {options.get('schedule', 'cosine')}, seed "
        f"{options['seed']}",
        f"- final loss {training['loss']:.3f}, agreement with the target per step "
        + ", ".join(f"{value:.3f}" for value in training["accuracy"]),
    ]
    if accuracy:
        lines.append("- on held-out conversations: " + ", ".join(f"{value:.3f}" for value in accuracy))
    if estimate := training.get("estimated_acceptance_length"):
        lines.append(
            f"- acceptance length {estimate:.3f}, estimated at {options['ttt_steps']} drafts: those that agree with "
            "the target's best token, walked along held-out answers as greedy decoding would; nothing was generated"
        )
    if not training.get("finished", True):
        lines.append(f"- **not finished**: this is the head after step {training['steps']:,} of {training['total']:,}")
    files = provenance["source"].get("files") or []
    for file in files if len(files) > 1 else [file for file in files if file["duplicates"]]:
        left = f", {file['duplicates']} duplicates left out" if file["duplicates"] else ""
        lines.append(f"- {file['file']}: {file['conversations']:,} conversations{left}")
    if training.get("processes", 1) > 1:
        lines.append(f"- {training['processes']} processes shared each batch")
    lines.append("- versions: " + ", ".join(f"{name} {version}" for name, version in provenance["versions"].items()))
    return "\n".join(lines) + _curve(training.get("curve") or [])


def _curve(points: list[dict[str, Any]]) -> str:
    """The course of the held-out measurement during training."""
    if not points:
        return ""
    steps = len(points[0]["accuracy"])
    head = ("step", "held-out loss", *(f"agreement {number + 1}" for number in range(steps)))
    rows = [(p["step"], f"{p['loss']:.3f}", *(f"{value:.3f}" for value in p["accuracy"])) for p in points]
    return "\n\n" + table(head, rows)


def conversion_card(spec: HeadSpec, result: dict[str, Any], record: dict[str, Any]) -> str:
    """Markdown from the result and the provenance record; a measurement of the source is repeated with its origin."""
    source = record["source"]
    target = source["target"] or "its target"
    rows = [
        ("converted from", f"{source['head']} ({DIALECTS[source['dialect']].title})"),
        ("layout", DIALECTS[spec.dialect].title),
        *_shape_rows(spec, f"{result['parameters']:,} in {result['tensors']} tensors, {result['bytes_out']:,} bytes"),
        ("embedding", "its own" if spec.has_embed_tokens else "the target's"),
        ("lm_head", "its own" if spec.has_lm_head else "the target's"),
    ]
    parts = [f"# Eagle3 draft head for {target}", table(("", ""), rows), "## Serve"]
    parts += [f"{ENGINES[engine].title}:\n\n```sh\n{command}\n```" for engine, command in result["serve"].items()]
    parts.append(
        "`trtspec build-config TARGET --head HEAD` writes TensorRT-LLM's YAML for one version and checks it, "
        "`eagle3_layers_to_capture` included."
    )
    if spec.eagle == "3.1":
        parts.append(needed_by_eagle31())
    parts += ["## Weights", "Conversion renames and copies: no weight was changed. SHA-256 by tensor: provenance.json."]
    repaired = [f"- {one['where']}: {one['message']} (`{one['code']}`)" for one in result["repairs"]]
    parts += ["## Repaired", "What the source had and this head has not:\n\n" + "\n".join(repaired)] if repaired else []
    parts += ["## Measured", _measured_before(source), "## Limits and risks", LIMITS, "## Licence", LICENCE]
    return "\n\n".join(parts) + "\n"


def _measured_before(source: dict[str, Any]) -> str:
    measured = (source.get("provenance") or {}).get("acceptance")
    if not measured:
        return "No acceptance was measured on this head: `trtspec bench` against a server with it does that."
    lengths = ", ".join(f"{row['category']} {row['acceptance_length']:.3f}" for row in measured["rows"])
    return (
        f"Measured on the head this one was converted from (the same weights), draft length {measured['draft_len']}, "
        f"temperature {measured['temperature']:g}, {measured['prompts']} held-out prompts: {lengths}. "
        "Acceptance length = 1 + accepted drafts / verification steps."
    )


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
            commands[name] = engine.command(head, target or "<target>", engine.tensor_parallel, capture)
        else:
            convert = shlex.join(["trtspec", "convert", head, "-o", f"{head}-{name}", "--to", name])
            commands[name] = f"{convert}    # {engine.title} misreads this layout"
    return commands


def needed_by_eagle31() -> str:
    versions = ", ".join(engine.eagle31 for engine in ENGINES.values())
    return (
        f"EAGLE-3.1 needs engines that read `fc_norm` and `norm_output`: {versions}. An older engine computes another "
        "function and accepts little."
    )


def table(head: tuple[Any, ...], rows: list[tuple[Any, ...]]) -> str:
    """Markdown."""
    lines = [head, tuple("---" for _ in head), *rows]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines)
