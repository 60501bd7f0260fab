"""The README.md of a trained head: what it is, how it was made, what was measured, how to serve it."""

from __future__ import annotations

from typing import Any

from trtspec.specs import HeadSpec

LICENCE = (
    "The head is derived from the target's answers and states, so the target's licence applies to it: for Kimi-K2 "
    "models a Modified MIT licence (products above 100 million monthly users or 20 million US dollars of monthly "
    'revenue must display "Kimi K2"). For a target quantized and published by NVIDIA, the NVIDIA Open Model License '
    "too."
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
        "## Licence",
        LICENCE,
    ]
    return "\n\n".join(parts) + "\n"


def _what(spec: HeadSpec, provenance: dict[str, Any]) -> str:
    rows = [
        ("version", f"EAGLE-{spec.eagle}"),
        ("attention", spec.attention.upper()),
        ("parameters", f"{provenance['parameters']:,}"),
        ("hidden size", spec.hidden_size),
        ("captured layer outputs (0-based)", ", ".join(map(str, spec.aux_layers or ()))),
        ("draft vocabulary", f"{spec.draft_vocab_size:,} of {spec.vocab_size:,}"),
        ("rope", f"{spec.rope.rope_type}, theta {spec.rope.theta:g}"),
        ("layout", "ModelOpt (`layers.0.` names), BF16"),
    ]
    return _table(("", ""), rows)


def _serving(spec: HeadSpec, target: str) -> str:
    method = '{"method": "eagle3", "model": "<this head>", "num_speculative_tokens": 3}'
    lines = [
        "TensorRT-LLM: the engine YAML is written and checked by",
        "```sh\n"
        f"trtspec build-config {target} --head <this head> -o extra-llm-api-config.yml\n"
        f"trtspec serve {target} --head <this head> --config extra-llm-api-config.yml\n```",
        "vLLM:",
        f"```sh\nvllm serve {target} --speculative-config '{method}'\n```",
        "SGLang:",
        f"```sh\npython -m sglang.launch_server --model-path {target} --speculative-algorithm EAGLE3 "
        "--speculative-draft-model-path <this head> --speculative-num-steps 3\n```",
    ]
    if spec.eagle == "3.1":
        lines.append(
            "EAGLE-3.1 needs engines that read `fc_norm` and `norm_output`: vLLM 0.22.0 or newer, TensorRT-LLM with "
            "the EAGLE-3.1 change of June 2026. An older engine computes another function and accepts little."
        )
    return "\n\n".join(lines)


def _measured(provenance: dict[str, Any]) -> str:
    measured = provenance.get("acceptance")
    if not measured:
        return "No acceptance was measured yet: `trtspec bench` against a server with this head does it."
    rows = [
        (row["category"], row["prompts"], row["steps"], f"{row['acceptance_length']:.3f}")
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
    return text + "\n\n" + _table(("category", "prompts", "steps", "acceptance length", *positions), rows)


def _training(provenance: dict[str, Any]) -> str:
    options, training = provenance["options"], provenance["training"]
    accuracy = training.get("held_out_accuracy")
    lines = [
        f"- {training['samples']:,} conversations answered by the target, {training['tokens_seen']:,} tokens seen in "
        f"{training['steps']:,} steps of {options['batch_size']} sequences up to {options['seq_len']} tokens",
        f"- ModelOpt's objective: soft cross entropy over {options['ttt_steps']} training-time-test steps, "
        "weights 0.9^k",
        f"- AdamW, peak learning rate {training['peak_lr']:.2e}, seed {options['seed']}",
        f"- final loss {training['loss']:.3f}, agreement with the target per step "
        + ", ".join(f"{value:.3f}" for value in training["accuracy"]),
    ]
    if accuracy:
        lines.append("- on held-out conversations: " + ", ".join(f"{value:.3f}" for value in accuracy))
    lines.append("- versions: " + ", ".join(f"{name} {version}" for name, version in provenance["versions"].items()))
    return "\n".join(lines)


def _table(head: tuple[Any, ...], rows: list[tuple[Any, ...]]) -> str:
    lines = [head, tuple("---" for _ in head), *rows]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines)
