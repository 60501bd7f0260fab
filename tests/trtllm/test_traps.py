"""The known traps of TensorRT-LLM with Kimi and Eagle3, each as a file that has it and the same file without it.

Every case names its trap; the clean file must raise neither the code nor any error at all.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from trtspec.checkpoint.hub import load_head, load_target
from trtspec.errors import UsageError
from trtspec.specs import QuantSpec
from trtspec.trtllm.deployment import Deployment, Finding, compute_capability, deployment_of
from trtspec.trtllm.lint.linter import lint
from trtspec.trtllm.schema import schema_for

NEW, MID, OLD = "1.4.0rc1", "1.3.0rc20", "1.2.1"
SPEC = {"decoding_type": "Eagle", "max_draft_len": 3, "speculative_model_dir": "nvidia/Kimi-K2.6-Eagle3"}
OPTIONS = {"tool_parser": "kimi_k2"}
SERVED = {"trust_remote_code": True, "reasoning_parser": "kimi_k25"}
ATTENTION_TOO = QuantSpec("nvfp4", 16, ("lm_head",), "fp8")


@dataclass(frozen=True)
class File:
    """One deployment. `top` and `spec` are laid over a clean file; None in `spec` takes the key out."""

    version: str = NEW
    top: Mapping[str, Any] = field(default_factory=dict)
    spec: Mapping[str, Any] | None = field(default_factory=dict)
    target: Mapping[str, Any] = field(default_factory=dict)
    target_name: str = "nvidia/Kimi-K2.6-NVFP4"
    head: Mapping[str, Any] | None = field(default_factory=dict)
    more: Mapping[str, Any] = field(default_factory=dict)

    def findings(self) -> dict[str, Finding]:
        values: dict[str, Any] = {"moe_config": {"backend": "TRTLLM"}, **self.top}
        if self.spec is not None:
            values["speculative_config"] = {k: v for k, v in {**SPEC, **self.spec}.items() if v is not None}
        head = replace(load_head("nvidia/Kimi-K2.6-Eagle3").spec, **self.head) if self.head is not None else None
        target = replace(load_target(self.target_name).spec, **self.target)
        name = self.target_name if not self.target else ""
        deployment = Deployment(schema_for(self.version), target, name, head, "", **self.more)
        return {finding.code: finding for finding in lint(yaml.safe_dump(values), deployment)}


K2 = {"target_name": "nvidia/Kimi-K2-Thinking-NVFP4"}
MHA = {"attention": "mha", "layer_prefix": "midlayer.", "num_attention_heads": 64, "num_key_value_heads": 8}
TWO_SIDES = {"cache_transceiver_config": {"backend": "NIXL"}}
CONNECTOR = {"kv_connector_config": {"connector": "kvbm"}}
FORCED = {"TLLM_SPEC_DECODE_FORCE_NUM_ACCEPTED_TOKENS": "2"}
ADVANCED = {"allow_advanced_sampling": True}

# (the trap, code, file with it, file without it); the numbers are those of the list of known traps
TRAPS: list[tuple[str, str, File, File]] = [
    (
        "1 K2.5 and later on 1.2",
        "TS-LINT-MODEL-TOO-NEW",
        File(OLD, head=None, spec=None),
        File(MID, head=None, spec=None),
    ),
    (
        "1 K2.5 and later on 1.3.0rc5",
        "TS-LINT-MODEL-TOO-NEW",
        File("1.3.0rc5", head=None, spec=None),
        File("1.3.0rc16", head=None, spec=None),
    ),
    (
        "2 guided decoding up to 1.3.0rc17",
        "TS-LINT-GUIDED-KIMI",
        File("1.3.0rc17", {"guided_decoding_backend": "xgrammar"}),
        File(NEW, {"guided_decoding_backend": "xgrammar"}),
    ),
    ("3 accuracy reported on 1.3.0rc16", "TS-LINT-REPORTED", File("1.3.0rc16", spec=ADVANCED), File(MID)),
    (
        "4 speculation that ignores temperature",
        "TS-LINT-GREEDY-ONLY",
        File("1.3.0rc16"),
        File("1.3.0rc16", spec=ADVANCED),
    ),
    (
        "5 speculative_model in 1.1",
        "TS-LINT-RENAMED-KEY",
        File("1.1.0", spec={"speculative_model": "/h", "speculative_model_dir": None}, head=MHA, **K2),
        File("1.2.1", spec={"speculative_model": "/h", "speculative_model_dir": None, **ADVANCED}, head=MHA, **K2),
    ),
    (
        "5 allow_advanced_sampling in 1.1",
        "TS-LINT-UNKNOWN-KEY",
        File("1.1.0", spec=ADVANCED, head=MHA, **K2),
        File("1.2.1", spec=ADVANCED, head=MHA, **K2),
    ),
    (
        "5 WIDEEP on the newest line",
        "TS-LINT-BAD-VALUE",
        File(NEW, {"moe_config": {"backend": "WIDEEP"}}),
        File(MID, {"moe_config": {"backend": "WIDEEP"}, "enable_attention_dp": True}),
    ),
    (
        "5 sampler_type on the newest line",
        "TS-LINT-REMOVED-KEY",
        File(NEW, {"sampler_type": "TRTLLMSampler"}),
        File(MID, {"sampler_type": "TorchSampler"}),
    ),
    ("5 pytorch_backend_config", "TS-LINT-REMOVED-KEY", File(NEW, {"pytorch_backend_config": {"kv": 1}}), File(NEW)),
    (
        "6 K2-Thinking's parser for K2.6",
        "TS-LINT-WRONG-PARSER",
        File(NEW, {"reasoning_parser": "kimi_k2"}),
        File(NEW, {"reasoning_parser": "kimi_k25"}),
    ),
    (
        "6 K2.6's parser for K2-Thinking",
        "TS-LINT-WRONG-PARSER",
        File(NEW, {"reasoning_parser": "kimi_k25"}, **K2),
        File(NEW, {"reasoning_parser": "kimi_k2"}, **K2),
    ),
    (
        "7 layers other than the default",
        "TS-LINT-CAPTURE-LAYERS-MISSING",
        File(NEW, head={"aux_layers": (2, 30, 58)}),
        File(NEW, spec={"eagle3_layers_to_capture": [2, 30, 58]}, head={"aux_layers": (2, 30, 58)}),
    ),
    (
        "7 layers counted as inputs",
        "TS-LINT-CAPTURE-LAYERS-WRONG",
        File(NEW, spec={"eagle3_layers_to_capture": [2, 30, 58]}),
        File(NEW, spec={"eagle3_layers_to_capture": [1, 29, 57]}),
    ),
    (
        "8 EAGLE-3.1 on an older engine",
        "TS-LINT-EAGLE31-OLD-ENGINE",
        File("1.3.0rc16", head={"eagle": "3.1"}),
        File(NEW, head={"eagle": "3.1"}),
    ),
    (
        "9 MLA head in two-model mode",
        "TS-LINT-MLA-TWO-MODEL",
        File(MID, spec={"eagle3_one_model": False}),
        File(MID, spec={"eagle3_one_model": True}),
    ),
    (
        "10 MTP for Kimi",
        "TS-LINT-MTP-KIMI",
        File(NEW, spec={"decoding_type": "MTP", "max_draft_len": 1, "speculative_model_dir": None}, head=None),
        File(NEW),
    ),
    (
        "11 the engine backend with speculation",
        "TS-LINT-BACKEND",
        File(MID, {"backend": "trt"}),
        File(MID, {"backend": "pytorch"}),
    ),
    (
        "12 FP8 cache, BF16 head, chunked prefill",
        "TS-LINT-FP8-KV-CHUNKED",
        File("1.1.0", {"enable_chunked_prefill": True}, head=MHA, **K2),
        File(OLD, {"enable_chunked_prefill": True}, ADVANCED, head=MHA, **K2),
    ),
    (
        "13 two models on long prompts",
        "TS-LINT-TWO-MODEL",
        File(MID, spec={"eagle3_one_model": False}, head=MHA),
        File(MID, head=MHA),
    ),
    ("14 Eagle3 on SM120", "TS-LINT-GPU-EAGLE", File(NEW, more={"gpu": "12.0"}), File(NEW, more={"gpu": "10.3"})),
    ("15 quantized kv_b_proj", "TS-LINT-ATTENTION-QUANTIZED", File(NEW, target={"quant": ATTENTION_TOO}), File(NEW)),
    (
        "16 one side of two without the head",
        "TS-LINT-DISAGGREGATED-NO-HEAD",
        File(NEW, TWO_SIDES, spec=None),
        File(NEW, TWO_SIDES),
    ),
    (
        "17 forced acceptance in the file",
        "TS-LINT-FORCED-ACCEPTANCE",
        File(NEW, {"env_overrides": FORCED}),
        File(NEW, {"env_overrides": {"NCCL_MNNVL_ENABLE": "1"}}),
    ),
    (
        "17 forced acceptance in the environment",
        "TS-LINT-FORCED-ACCEPTANCE",
        File(NEW, more={"environ": FORCED}),
        File(NEW, more={"environ": {"NCCL_MNNVL_ENABLE": "1"}}),
    ),
    (
        "18 PYTHON transceiver with UCX",
        "TS-LINT-TRANSCEIVER",
        File(NEW, {"cache_transceiver_config": {"backend": "UCX", "transceiver_runtime": "PYTHON"}}),
        File(NEW, {"cache_transceiver_config": {"backend": "NIXL", "transceiver_runtime": "PYTHON"}}),
    ),
    (
        "20 no --trust_remote_code",
        "TS-LINT-REMOTE-CODE-OFF",
        File(NEW, more={"options": OPTIONS, "argv": {"reasoning_parser": "kimi_k25"}}),
        File(NEW, more={"options": OPTIONS, "argv": SERVED}),
    ),
    (
        "21 KV connector with attention DP",
        "TS-LINT-KV-CONNECTOR",
        File(NEW, {**CONNECTOR, "enable_attention_dp": True}),
        File(NEW, CONNECTOR),
    ),
    (
        "21 KV connector that evicts",
        "TS-LINT-KV-CONNECTOR",
        File(NEW, {**CONNECTOR, "scheduler_config": {"capacity_scheduler_policy": "MAX_UTILIZATION"}}),
        File(NEW, {**CONNECTOR, "scheduler_config": {"capacity_scheduler_policy": "GUARANTEED_NO_EVICT"}}),
    ),
    # what users of the neighbouring projects ran into
    (
        "K2.5's tool parser does not exist",
        "TS-LINT-WRONG-TOOL-PARSER",
        File(NEW, more={"options": {"tool_parser": "kimi_k25"}, "argv": SERVED}),
        File(NEW, more={"options": OPTIONS, "argv": SERVED}),
    ),
    (
        "no reasoning parser",
        "TS-LINT-NO-PARSER",
        File(NEW, more={"options": OPTIONS, "argv": {"trust_remote_code": True}}),
        File(NEW, more={"options": OPTIONS, "argv": SERVED}),
    ),
    (
        "a schedule that ends at 0",
        "TS-LINT-SCHEDULE-ENDS-AT-ZERO",
        File(NEW, spec={"draft_len_schedule": {4: 3, 64: 1}}),
        File(NEW),
    ),
    (
        "max_concurrency becomes such a schedule",
        "TS-LINT-SCHEDULE-ENDS-AT-ZERO",
        File(NEW, spec={"max_concurrency": 8}),
        File(NEW),
    ),
    (
        "acceptance_window was renamed",
        "TS-LINT-RENAMED-KEY",
        File(NEW, spec={"acceptance_window": 100}),
        File(NEW, spec={"acceptance_rate_window_size": 100}),
    ),
    (
        "speculation switches itself off for good",
        "TS-LINT-SWITCHES-OFF",
        File(NEW, spec={"acceptance_rate_window_size": 100, "acceptance_rate_threshold": 0.4}),
        File(NEW),
    ),
    (
        "tokens for the batch but not for its drafts",
        "TS-LINT-TOKEN-BUDGET",
        File(NEW, {"max_batch_size": 128, "max_num_tokens": 128}),
        File(NEW, {"max_batch_size": 128, "max_num_tokens": 640}),
    ),
    ("AUTO is CUTLASS for Kimi", "TS-LINT-MOE-AUTO", File(NEW, {"moe_config": {"backend": "AUTO"}}), File(NEW)),
    ("NVFP4 on Hopper", "TS-LINT-GPU-NVFP4", File(NEW, more={"gpu": "9.0"}), File(NEW, more={"gpu": "10.0"})),
    ("the native INT4 release", "TS-LINT-INT4-TARGET", File(NEW, target_name="moonshotai/Kimi-K2.6"), File(NEW)),
    (
        "build_config is dropped",
        "TS-LINT-NO-EFFECT",
        File(MID, {"build_config": {"max_batch_size": 8}}),
        File(MID, {"max_batch_size": 8}),
    ),
    (
        "one setting in the file and in argv",
        "TS-LINT-SET-TWICE",
        File(NEW, {"max_batch_size": 8}, more={"argv": {"max_batch_size": 32}}),
        File(NEW, more={"argv": {"max_batch_size": 32}}),
    ),
    (
        "norm_before_residual is not computed",
        "TS-LINT-HEAD-FUNCTION",
        File(NEW, head={"norm_before_residual": True}),
        File(NEW),
    ),
    (
        "layers.0 names before 1.3",
        "TS-LINT-HEAD-NAMES-OLD-ENGINE",
        File("1.1.0", head={**MHA, "layer_prefix": "layers.0."}, **K2),
        File(MID, head={**MHA, "layer_prefix": "layers.0."}, **K2),
    ),
    ("MLA heads before 1.3", "TS-LINT-MLA-HEAD-OLD-ENGINE", File("1.1.0", **K2), File(MID, **K2)),
    (
        "use_sa_spec is shown by the feature page and refused",
        "TS-LINT-RENAMED-KEY",
        File(MID, spec={"use_sa_spec": True}),
        File(MID),
    ),
    (
        "sa_config with Eagle, whose class has none",
        "TS-LINT-WRONG-VARIANT",
        File(NEW, spec={"sa_config": {}}),
        File(NEW, spec={"sa_config": {}, "decoding_type": "Eagle3"}),
    ),
    (
        "EPLB slots that do not divide",
        "TS-LINT-EPLB-SLOTS",
        File(
            NEW,
            {"moe_expert_parallel_size": 32, "moe_config": {"backend": "CUTEDSL", "load_balancer": {"num_slots": 400}}},
        ),
        File(
            NEW,
            {"moe_expert_parallel_size": 32, "moe_config": {"backend": "CUTEDSL", "load_balancer": {"num_slots": 416}}},
        ),
    ),
    (
        "a transfer buffer below the longest prompt",
        "TS-LINT-TRANSFER-BUFFER",
        File(
            NEW,
            {
                "max_seq_len": 8212,
                "max_num_tokens": 8448,
                "cache_transceiver_config": {"backend": "UCX", "max_tokens_in_buffer": 4096},
            },
        ),
        File(
            NEW,
            {
                "max_seq_len": 8212,
                "max_num_tokens": 8448,
                "cache_transceiver_config": {"backend": "UCX", "max_tokens_in_buffer": 8448},
            },
        ),
    ),
    (
        "graphs that end below the batch",
        "TS-LINT-GRAPHS-TOO-SMALL",
        File(NEW, {"max_batch_size": 256, "cuda_graph_config": {"max_batch_size": 64}}),
        File(NEW, {"max_batch_size": 256, "cuda_graph_config": {"max_batch_size": 256}}),
    ),
    (
        "HELIX with other blocks",
        "TS-LINT-COMBINATION",
        File(NEW, {"cp_config": {"cp_type": "HELIX", "tokens_per_block": 64}}),
        File(NEW, {"cp_config": {"cp_type": "HELIX", "tokens_per_block": 32}}),
    ),
    (
        "a disk cache without a place",
        "TS-LINT-COMBINATION",
        File(NEW, {"kv_cache_config": {"disk_cache_size": 1024}}),
        File(NEW, {"kv_cache_config": {"disk_cache_size": 1024, "disk_cache_path": "/cache"}}),
    ),
    (
        "a schedule longer than max_draft_len",
        "TS-LINT-BAD-SCHEDULE",
        File(OLD, spec={"draft_len_schedule": {1: 3, 8: 5}, **ADVANCED}, head=MHA, **K2),
        File(OLD, spec={"draft_len_schedule": {1: 3, 8: 1}, **ADVANCED}, head=MHA, **K2),
    ),
]


@pytest.mark.parametrize(("trap", "code", "bad", "clean"), TRAPS, ids=[trap for trap, *_ in TRAPS])
def test_each_trap_is_caught_and_its_clean_file_passes(trap: str, code: str, bad: File, clean: File) -> None:
    caught = bad.findings()
    assert code in caught, caught.keys()
    assert caught[code].message and caught[code].remedy
    passed = clean.findings()
    assert code not in passed, passed[code]
    assert [finding for finding in passed.values() if finding.severity == "error"] == []


def test_every_numbered_trap_has_a_case() -> None:
    """19 is about packaging: below."""
    numbered = {int(trap.split()[0]) for trap, *_ in TRAPS if trap[0].isdigit()}
    assert numbered | {19} == set(range(1, 22))


def test_trap_19_the_engine_is_no_dependency() -> None:
    """Its index entry is a stub that fetches the wheel from another index while metadata are read."""
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    everyday = [*project["dependencies"], *project["optional-dependencies"]["dev"]]
    assert not [name for name in everyday if "tensorrt" in name]


@pytest.mark.parametrize(
    ("gpu", "capability"),
    [("b200", "10.0"), ("GB300", "10.3"), ("h200", "9.0"), ("sm120", "12.0"), ("sm_100a", "10.0")],
)
def test_a_gpu_is_named_or_given_by_its_capability(gpu: str, capability: str) -> None:
    assert compute_capability(gpu) == capability


def test_an_unknown_gpu_is_a_usage_error() -> None:
    with pytest.raises(UsageError):
        compute_capability("b9000")


def test_options_after_the_dashes_are_settings_and_are_judged() -> None:
    text = "max_batch_size: 8\n"
    deployment, _, problems = deployment_of(
        text,
        version=NEW,
        target="nvidia/Kimi-K2.6-NVFP4",
        head=None,
        passed=["--max_batch_size", "32", "--no_such", "1"],
    )
    assert [problem.code for problem in problems] == ["TS-SERVE-UNKNOWN-OPTION"]
    assert deployment.argv["max_batch_size"] == 32
    assert {"TS-LINT-SET-TWICE", "TS-LINT-REMOTE-CODE-OFF"} <= {finding.code for finding in lint(text, deployment)}
