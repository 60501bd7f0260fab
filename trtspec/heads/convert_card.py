"""README.md of a converted head, and the command that serves it with each engine that can read its layout."""

from __future__ import annotations

import json
from typing import Any

from trtspec.heads.card import LICENCE
from trtspec.heads.convert_rules import NAMES
from trtspec.specs import HeadSpec

# which engines read a layout as it is, layer ids included; TensorRT-LLM takes ids from its YAML only
READERS = {
    "modelopt": ("trtllm", "sglang"), "vllm": ("vllm", "trtllm", "sglang"), "sglang": ("sglang", "trtllm"),
    "speculators": ("vllm",), "torchspec": ("sglang", "trtllm"), "specforge": ("sglang", "trtllm"), "safeailab": (),
}  # fmt: skip
TITLES = {"trtllm": "TensorRT-LLM", "vllm": "vLLM", "sglang": "SGLang"}
DRAFT_LEN = 3
TENSOR_PARALLEL = {"trtllm": 4, "vllm": 8, "sglang": 8}


def serving_commands(spec: HeadSpec, head: str, target: str | None, capture: list[int] | None) -> dict[str, str]:
    """A shell command (and YAML) for each engine; for a layout that an engine misreads, the conversion that it needs.

    `capture` holds the layer outputs that TensorRT-LLM must be told, or None where its default is right or unknown.
    """
    model = target or "<target>"
    return {engine: _command(engine, spec, head, model, capture) for engine in TITLES}


def readable(spec: HeadSpec, engine: str) -> bool:
    """Whether `engine` computes this head from this layout; SGLang counts ids that start with another number than 1
    from one, so that ModelOpt-like layouts with such ids need its own."""
    if engine not in READERS[spec.dialect]:
        return False
    counts_outputs = spec.dialect in ("modelopt", "torchspec", "specforge")
    return not (engine == "sglang" and counts_outputs and spec.aux_layers and spec.aux_layers[0] != 1)


def _command(engine: str, spec: HeadSpec, head: str, model: str, capture: list[int] | None) -> str:
    if not readable(spec, engine):
        return f"trtspec convert {head} -o {head}-{engine} --to {engine}    # {TITLES[engine]} misreads this layout"
    size = TENSOR_PARALLEL[engine]
    if engine == "vllm":
        settings = {"model": head, "method": "eagle3", "num_speculative_tokens": DRAFT_LEN}
        return (
            f"vllm serve {model} --tensor-parallel-size {size} "
            f"--speculative-config '{json.dumps(settings)}' --trust-remote-code"
        )
    if engine == "sglang":
        return (
            f"python -m sglang.launch_server --model-path {model} --tp-size {size} --trust-remote-code "
            f"--speculative-algorithm EAGLE3 --speculative-draft-model-path {head} "
            f"--speculative-num-steps {DRAFT_LEN} --speculative-eagle-topk 1 --speculative-num-draft-tokens 4"
        )
    return (
        f"cat > extra-llm-api-config.yml <<'END'\n{engine_yaml(head, capture)}END\n"
        f"trtllm-serve {model} --host 0.0.0.0 --port 8000 --backend pytorch --max_batch_size 32 "
        f"--max_num_tokens 8192 --max_seq_len 8192 --tp_size {size} "
        "--extra_llm_api_options extra-llm-api-config.yml"
    )


def engine_yaml(head: str, capture: list[int] | None) -> str:
    """TensorRT-LLM's settings for this head; it reads the layers from here and never from the head."""
    lines = ["speculative_config:", "    decoding_type: Eagle", f"    max_draft_len: {DRAFT_LEN}"]
    lines.append(f"    speculative_model_dir: {head}")
    if capture:
        lines.append(f"    eagle3_layers_to_capture: {capture}")
    return "\n".join(lines) + "\n"


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
    parts = [f"# Eagle3 draft head for {target}", _table(rows), "## Serve"]
    parts += [f"{TITLES[engine]}:\n\n```sh\n{command}\n```" for engine, command in result["serve"].items()]
    parts.append(
        "`trtspec build-config TARGET --head HEAD` writes TensorRT-LLM's YAML for one version and checks it, "
        "`eagle3_layers_to_capture` included."
    )
    if spec.eagle == "3.1":
        parts.append(
            "EAGLE-3.1 needs an engine that reads `fc_norm` and `norm_output`: vLLM 0.22.0 or newer, TensorRT-LLM with "
            "its change of June 2026. An older one computes another function and accepts little."
        )
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


def _table(rows: list[tuple[str, str]]) -> str:
    return "\n".join(["| | |", "| --- | --- |", *(f"| {label} | {text} |" for label, text in rows)])
