"""How each engine serves a head, and what every model card says alike: versions needed, licence, tables."""

from __future__ import annotations

import json
from typing import Any

from trtspec.specs import HeadSpec

LICENCE = (
    "The head is derived from the target's answers and states, so the target's licence applies to it: for Kimi-K2 "
    "models a Modified MIT licence (products above 100 million monthly users or 20 million US dollars of monthly "
    'revenue must display "Kimi K2"). For a target quantized and published by NVIDIA, the NVIDIA Open Model License '
    "too."
)
NEEDED_BY = {
    "3": "",
    "3.1": "EAGLE-3.1 needs engines that read `fc_norm` and `norm_output`: vLLM 0.22.0 or newer, TensorRT-LLM with "
    "the EAGLE-3.1 change of June 2026. An older engine computes another function and accepts little.",
}
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


def table(head: tuple[Any, ...], rows: list[tuple[Any, ...]]) -> str:
    """Markdown."""
    lines = [head, tuple("---" for _ in head), *rows]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines)
