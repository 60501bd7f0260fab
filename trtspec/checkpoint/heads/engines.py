"""The engines that serve Eagle3 heads, one row each: what they need and the command that starts them with a head."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from trtspec.specs import HeadSpec

DRAFT_LEN = 3
Command = Callable[[str, str, int, "list[int] | None"], str]


@dataclass(frozen=True)
class HeadEngine:
    """`command` takes the head, the target, the tensor-parallel size and the layer outputs that TensorRT-LLM must be
    told (None where its default is right or unknown).

    `guesses_ids`: layer ids that start with 1 are taken for layer outputs, all others for the number of layers that
    ran. `eagle31`: the first version that computes EAGLE-3.1's two norms. `theta_at_top`: the RoPE base is read from
    the top level of config.json only. `pruned_mla`: why an MLA head with a pruned vocabulary cannot be loaded, "" where
    it can.
    """

    name: str
    title: str
    tensor_parallel: int
    eagle31: str
    command: Command
    guesses_ids: bool = False
    theta_at_top: bool = False
    pruned_mla: str = ""

    def cannot_load(self, spec: HeadSpec) -> str:
        """Why this engine fails on such a head, whatever its layout; "" where it does not."""
        return self.pruned_mla if spec.attention == "mla" and spec.draft_vocab_size != spec.vocab_size else ""


def _trtllm(head: str, target: str, tensor_parallel: int, capture: list[int] | None) -> str:
    return (
        f"cat > extra-llm-api-config.yml <<'END'\n{engine_yaml(head, capture)}END\n"
        f"trtllm-serve {target} --host 0.0.0.0 --port 8000 --backend pytorch --max_batch_size 32 "
        f"--max_num_tokens 8192 --max_seq_len 8192 --tp_size {tensor_parallel} "
        "--extra_llm_api_options extra-llm-api-config.yml"
    )


def engine_yaml(head: str, capture: list[int] | None) -> str:
    """TensorRT-LLM's settings for this head; it reads the layers from here and never from the head."""
    lines = ["speculative_config:", "    decoding_type: Eagle", f"    max_draft_len: {DRAFT_LEN}"]
    lines.append(f"    speculative_model_dir: {head}")
    if capture:
        lines.append(f"    eagle3_layers_to_capture: {capture}")
    return "\n".join(lines) + "\n"


def vllm_speculation(head: str, draft_len: int | None = None) -> dict[str, Any]:
    """What vLLM's --speculative-config says of a head."""
    return {"model": head, "method": "eagle3", "num_speculative_tokens": draft_len or DRAFT_LEN}


def _vllm(head: str, target: str, tensor_parallel: int, _: list[int] | None) -> str:
    return (
        f"vllm serve {target} --tensor-parallel-size {tensor_parallel} "
        f"--speculative-config '{json.dumps(vllm_speculation(head))}' --trust-remote-code"
    )


def _sglang(head: str, target: str, tensor_parallel: int, _: list[int] | None) -> str:
    return (
        f"python -m sglang.launch_server --model-path {target} --tp-size {tensor_parallel} --trust-remote-code "
        f"--speculative-algorithm EAGLE3 --speculative-draft-model-path {head} "
        f"--speculative-num-steps {DRAFT_LEN} --speculative-eagle-topk 1 --speculative-num-draft-tokens {DRAFT_LEN + 1}"
    )


# read in every version of its sources that could be had, and never run
PRUNED_MLA = (
    "TensorRT-LLM cannot load an MLA head with a pruned vocabulary: where the model holds d2t, its loader of MLA "
    "weights copies every parameter below by name, and the fused ones are not in the file under theirs (read, never "
    "run; a head with the whole vocabulary, or an MHA head, loads)"
)
ENGINES = {
    engine.name: engine
    for engine in (
        HeadEngine(
            "trtllm",
            "TensorRT-LLM",
            4,
            "TensorRT-LLM with the EAGLE-3.1 change of June 2026",
            _trtllm,
            theta_at_top=True,
            pruned_mla=PRUNED_MLA,
        ),
        HeadEngine("vllm", "vLLM", 8, "vLLM 0.22.0 or newer", _vllm),
        HeadEngine("sglang", "SGLang", 8, "SGLang of June 2026 or newer", _sglang, guesses_ids=True),
    )
}
