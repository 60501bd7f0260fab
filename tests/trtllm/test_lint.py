"""Each trap is caught by its code on the file that has it, and the same file without the trap passes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import yaml

from trtspec.checkpoint.hub import load_head, load_target
from trtspec.specs import HeadSpec, ModelSpec, QuantSpec
from trtspec.trtllm.deployment import Deployment
from trtspec.trtllm.lint.linter import fix, lint
from trtspec.trtllm.schema import schema_for

GOOD = """\
speculative_config:
  decoding_type: Eagle
  max_draft_len: 3
  speculative_model_dir: nvidia/Kimi-K2.6-Eagle3
moe_config: {backend: TRTLLM}
"""
NEW, MID, OLD = "1.4.0rc1", "1.3.0rc20", "1.2.1"


def k26() -> ModelSpec:
    return load_target("nvidia/Kimi-K2.6-NVFP4").spec


def head(**changes: Any) -> HeadSpec:
    return replace(load_head("nvidia/Kimi-K2.6-Eagle3").spec, **changes)


def found(text: str, version: str = NEW, **deployment: Any) -> dict[str, Any]:
    return {finding.code: finding for finding in lint(text, Deployment(schema_for(version), **deployment))}


def with_spec(**values: Any) -> str:
    data = yaml.safe_load(GOOD)
    data["speculative_config"].update(values)
    return yaml.safe_dump(data)


def with_top(**values: Any) -> str:
    return yaml.safe_dump({**yaml.safe_load(GOOD), **values})


def test_a_clean_file_has_no_errors_and_no_warnings() -> None:
    decided = with_top(kv_cache_config={"enable_block_reuse": False})  # on by default, at the cost of acceptance
    for version in (NEW, "1.3.0rc22"):
        findings = lint(decided, Deployment(schema_for(version), k26(), "nvidia/Kimi-K2.6-NVFP4", head(), ""))
        assert [f for f in findings if f.severity != "info"] == []


# (code, file, version): what a file alone shows
FILE_TRAPS = [
    ("TS-LINT-SYNTAX", "a: [1, 2", NEW),
    ("TS-LINT-SYNTAX", "- 1\n- 2\n", NEW),
    ("TS-LINT-DUPLICATE-KEY", "max_batch_size: 1\nmax_batch_size: 2\n", NEW),
    ("TS-LINT-UNKNOWN-KEY", "max_batch_sise: 8\n", NEW),
    ("TS-LINT-UNKNOWN-KEY", with_spec(allow_advanced_sampling=True), "1.1.0"),
    ("TS-LINT-UNKNOWN-KEY", with_spec(use_sa_specs=True), NEW),
    ("TS-LINT-RENAMED-KEY", with_spec(use_sa_spec=True), NEW),
    ("TS-LINT-RENAMED-KEY", "speculative_config: {decoding_type: Eagle, speculative_model: x}\n", "1.1.0"),
    ("TS-LINT-RENAMED-KEY", with_spec(acceptance_window=100), NEW),
    ("TS-LINT-RENAMED-KEY", "kv_cache_dtype: fp8\n", MID),
    ("TS-LINT-REMOVED-KEY", "sampler_type: auto\n", NEW),
    ("TS-LINT-REMOVED-KEY", "pytorch_backend_config: {use_cuda_graph: true}\n", MID),
    ("TS-LINT-KEY-UNCERTAIN", "env_overrides: {A: b}\n", OLD),
    ("TS-LINT-KEY-UNCERTAIN", "sparse_attention_config: {somewhere: 1}\n", OLD),
    ("TS-LINT-VERSION-UNCERTAIN", "telemetry_config: {disabled: true}\n", "1.3.0rc9"),
    ("TS-LINT-VERSION-NEWER", GOOD, "2.0.0"),
    ("TS-LINT-BAD-VALUE", "moe_config: {backend: WIDEEP}\n", NEW),
    ("TS-LINT-BAD-VALUE", with_spec(decoding_type="Eagle3"), "1.0.0"),
    ("TS-LINT-WRONG-TYPE", "enable_attention_dp: maybe\n", NEW),
    ("TS-LINT-WRONG-TYPE", "kv_cache_config:\n", NEW),
    ("TS-LINT-OUT-OF-RANGE", "kv_cache_config: {free_gpu_memory_fraction: 1.5}\n", NEW),
    ("TS-LINT-CONVERTED-VALUE", "max_batch_size: '8'\n", NEW),
    ("TS-LINT-DEPRECATED", with_spec(allow_advanced_sampling=True), NEW),
    ("TS-LINT-WRONG-VARIANT", with_spec(is_keep_all=True), NEW),
    ("TS-LINT-NO-DECODING-TYPE", "speculative_config: {max_draft_len: 3}\n", NEW),
    ("TS-LINT-EAGLE-NO-HEAD", "speculative_config: {decoding_type: Eagle, max_draft_len: 3}\n", NEW),
    ("TS-LINT-EAGLE-NO-DRAFT-LEN", with_spec(max_draft_len=0), NEW),
    ("TS-LINT-NO-EFFECT", with_spec(num_eagle_layers=3), NEW),
    ("TS-LINT-NO-EFFECT", "build_config: {max_batch_size: 8}\n", OLD),
    ("TS-LINT-TWO-MODEL", with_spec(eagle3_one_model=False), NEW),
    ("TS-LINT-DYNAMIC-TREE", with_spec(use_dynamic_tree=True, dynamic_tree_max_topK=2), NEW),
    ("TS-LINT-EXCLUSIVE-KEYS", with_spec(draft_len_schedule={4: 3, 64: 1}, max_concurrency=8), NEW),
    ("TS-LINT-HEAD-ARCH", with_spec(eagle3_model_arch="mistral_large3"), NEW),
    ("TS-LINT-SCHEDULE-MEANING", with_spec(draft_len_schedule={1: 3}), "1.3.0rc9"),
    ("TS-LINT-SCHEDULE-ENDS-AT-ZERO", with_spec(draft_len_schedule={4: 3, 64: 1}), NEW),
    ("TS-LINT-SCHEDULE-ENDS-AT-ZERO", with_spec(max_concurrency=8), NEW),
    ("TS-LINT-BAD-SCHEDULE", with_spec(draft_len_schedule={4: 2, 2048: 1}), NEW),
    ("TS-LINT-BAD-SCHEDULE", with_spec(draft_len_schedule={2: 3}), OLD),
    ("TS-LINT-GREEDY-ONLY", GOOD, OLD),
    ("TS-LINT-GREEDY-ONLY", GOOD, "1.3.0rc16"),
    ("TS-LINT-BACKEND", with_top(backend="trt"), MID),
    ("TS-LINT-UNTESTED", with_top(pipeline_parallel_size=2), NEW),
    ("TS-LINT-UNTESTED", with_top(max_beam_width=2), NEW),
    ("TS-LINT-TOKEN-BUDGET", with_top(max_batch_size=128, max_num_tokens=128), NEW),
    ("TS-LINT-LONG-PROMPTS", with_top(max_seq_len=262144), NEW),
    ("TS-LINT-GRAPH-SIZES", "cuda_graph_config: {batch_sizes: [1, 2, 4], max_batch_size: 8}\n", NEW),
    ("TS-LINT-GRAPHS-TOO-SMALL", with_top(max_batch_size=256, cuda_graph_config={"max_batch_size": 64}), NEW),
    ("TS-LINT-GRAPHS-OFF", with_top(max_batch_size=8, cuda_graph_config=None), NEW),
    ("TS-LINT-EPLB-SLOTS", "moe_expert_parallel_size: 32\nmoe_config: {load_balancer: {num_slots: 400}}\n", NEW),
    ("TS-LINT-EPLB-FILE", "moe_config: {load_balancer: /nowhere/eplb.yaml}\n", NEW),
    ("TS-LINT-TRANSCEIVER", "cache_transceiver_config: {backend: UCX, transceiver_runtime: PYTHON}\n", NEW),
    ("TS-LINT-KV-CONNECTOR", "kv_connector_config: {connector: kvbm}\nenable_attention_dp: true\n", NEW),
    ("TS-LINT-COMBINATION", "load_format: gms\nmoe_config: {load_balancer: {num_slots: 384}}\n", NEW),
    ("TS-LINT-COMBINATION", "enable_iter_req_stats: true\n", NEW),
    ("TS-LINT-TRANSFER-BLOCKS", "cache_transceiver_config: {backend: NIXL, max_tokens_in_buffer: 8212}\n", NEW),
    ("TS-LINT-STATIC-TREE", with_spec(eagle_choices=[[0], [1]]), NEW),
    ("TS-LINT-DRAFT-PIPELINE",
     "pipeline_parallel_size: 2\nspeculative_config: {decoding_type: NGram, max_draft_len: 4}\n", NEW),
    ("TS-LINT-PARSER-TOO-NEW", "reasoning_parser: kimi_k25\n", OLD),
    ("TS-LINT-NO-SIZE", "tensor_parallel_size: 0\n", NEW),
    ("TS-LINT-FORCED-ACCEPTANCE",
     "env_overrides: {TLLM_SPEC_DECODE_FORCE_NUM_ACCEPTED_TOKENS: '2'}\n", NEW),
]  # fmt: skip


@pytest.mark.parametrize(("code", "text", "version"), FILE_TRAPS, ids=lambda value: str(value)[:40])
def test_a_trap_in_the_file_is_caught(code: str, text: str, version: str) -> None:
    codes = found(text, version)
    assert code in codes
    finding = codes[code]
    assert finding.message and (finding.severity == "info" or finding.remedy)
    assert code == "TS-LINT-VERSION-NEWER" or (finding.line and finding.line <= text.count("\n") + 1)


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("tensor_parallel_size: 6\n", "TS-ROUTE-HEADS"),
        ("tensor_parallel_size: 6\nenable_attention_dp: true\nmoe_expert_parallel_size: 6\n", None),
        ("tensor_parallel_size: 8\nmoe_expert_parallel_size: 5\n", "TS-ROUTE-EXPERTS"),
        ("tensor_parallel_size: 8\nmoe_expert_parallel_size: 8\n", None),
        ("max_batch_size: 8\n", None),
    ],
)
def test_parallel_sizes_over_which_a_target_does_not_spread(text: str, code: str | None) -> None:
    target = load_target("nvidia/Kimi-K2.6-NVFP4").spec
    errors = {f.code for f in lint(text, Deployment(schema_for(NEW), target)) if f.severity == "error"}
    assert code in errors if code else not errors


BUFFER = "cache_transceiver_config: {{backend: NIXL, max_tokens_in_buffer: {}{}}}\n"


@pytest.mark.parametrize(
    ("text", "whole"),
    [
        (BUFFER.format(8212, ""), 8224),
        (BUFFER.format(8224, "") + "kv_cache_config: {tokens_per_block: 64}\n", 8256),
        (BUFFER.format(8224, ""), None),
        (BUFFER.format(0, ""), None),
        (BUFFER.format(8212, ", transceiver_runtime: PYTHON"), None),
    ],
)
def test_a_transfer_buffer_holds_whole_blocks(text: str, whole: int | None) -> None:
    """cacheTransBuffer.cpp asserts it; the Python transceiver has no such buffer."""
    deployment = Deployment(schema_for(NEW))
    assert ("TS-LINT-TRANSFER-BLOCKS" in {finding.code for finding in lint(text, deployment)}) == (whole is not None)
    better, _ = fix(text, deployment)
    written = yaml.safe_load(better.text)["cache_transceiver_config"]["max_tokens_in_buffer"]
    assert whole is None or written == whole


@pytest.mark.parametrize("here", [True, False])
def test_a_path_that_is_not_here_is_an_error_where_the_engine_is(here: bool) -> None:
    text = "moe_config: {load_balancer: /nowhere/eplb.yaml}\n"
    text += "kv_cache_config: {disk_cache_size: 1024, disk_cache_path: /nowhere/cache}\n"
    severities = {f.code: f.severity for f in lint(text, Deployment(schema_for(NEW), here=here))}
    wanted = "error" if here else "warning"
    assert severities["TS-LINT-EPLB-FILE"] == severities["TS-LINT-DISK-CACHE-PATH"] == wanted


# (code, version, file, target changes, head changes): what needs the target or the head
MODEL_TRAPS: list[tuple[str, str, str, dict[str, Any], dict[str, Any]]] = [
    ("TS-LINT-MODEL-TOO-NEW", "1.3.0rc5", GOOD, {}, {}),
    ("TS-LINT-GUIDED-KIMI", "1.3.0rc17", with_top(guided_decoding_backend="xgrammar"), {}, {}),
    ("TS-LINT-WRONG-PARSER", NEW, with_top(reasoning_parser="kimi_k2"), {}, {}),
    ("TS-LINT-CAPTURE-LAYERS-MISSING", NEW, GOOD, {}, {"aux_layers": (2, 30, 58)}),
    ("TS-LINT-CAPTURE-LAYERS-WRONG", NEW, with_spec(eagle3_layers_to_capture=[2, 30, 58]), {}, {}),
    ("TS-LINT-CAPTURE-LAYERS-FIXED", "1.0.0", GOOD, {"model_type": "kimi_k2"}, {"aux_layers": (2, 30, 58)}),
    ("TS-LINT-EAGLE31-OLD-ENGINE", "1.3.0rc16", GOOD, {}, {"eagle": "3.1"}),
    ("TS-LINT-MLA-TWO-MODEL", NEW, with_spec(eagle3_one_model=False), {}, {}),
    ("TS-LINT-MLA-HEAD-OLD-ENGINE", "1.1.0", GOOD, {}, {}),
    ("TS-LINT-HEAD-NAMES-OLD-ENGINE", "1.1.0", GOOD, {}, {}),
    ("TS-LINT-MTP-KIMI", NEW, "speculative_config: {decoding_type: MTP, max_draft_len: 1}\n", {}, {}),
    ("TS-LINT-FP8-KV-CHUNKED", "1.1.0", with_top(enable_chunked_prefill=True), {}, {}),
    ("TS-LINT-ATTENTION-QUANTIZED", NEW, GOOD, {"quant": QuantSpec("nvfp4", 16, ("lm_head",))}, {}),
    ("TS-LINT-INT4-TARGET", NEW, GOOD, {"quant": QuantSpec("int4", 32)}, {}),
    ("TS-LINT-REMOTE-CODE-OFF", NEW, with_top(trust_remote_code=False), {}, {}),
    ("TS-LINT-MOE-AUTO", NEW, "max_batch_size: 8\n", {}, {}),
    ("TS-LINT-SEQUENCE-TOO-LONG", NEW, with_top(max_seq_len=300000, max_num_tokens=300000), {}, {}),
    ("TS-LINT-HEAD-UNUSED", NEW, "max_batch_size: 8\n", {}, {}),
    ("TS-LINT-DISAGGREGATED-NO-HEAD", NEW, "cache_transceiver_config: {backend: NIXL}\n", {}, {}),
    ("TS-LINT-HEAD-FUNCTION", NEW, GOOD, {}, {"norm_before_residual": True}),
    ("TS-PAIR-WIDTH", NEW, GOOD, {}, {"target_hidden_size": 4096}),
    ("TS-PAIR-TP", NEW, with_top(tensor_parallel_size=3), {}, {}),
]


@pytest.mark.parametrize(("code", "version", "text", "target", "draft"), MODEL_TRAPS, ids=lambda value: str(value)[:32])
def test_a_trap_of_the_pair_is_caught(
    code: str, version: str, text: str, target: dict[str, Any], draft: dict[str, Any]
) -> None:
    assert code in found(text, version, target=replace(k26(), **target), head=head(**draft))


def test_a_head_that_the_command_names_differently_is_reported() -> None:
    assert "TS-LINT-HEAD-DIFFERS" in found(GOOD, NEW, target=k26(), head=head(), head_name="other/head")
    assert "TS-LINT-HEAD-DIFFERS" not in found(
        GOOD, NEW, target=k26(), head=head(), head_name="nvidia/Kimi-K2.6-Eagle3"
    )


def test_one_setting_in_file_and_argv_is_an_error_in_every_version() -> None:
    for version in (OLD, NEW):
        finding = found("max_batch_size: 8\n", version, argv={"max_batch_size": 32})["TS-LINT-SET-TWICE"]
        assert finding.severity == "error"


def test_all_problems_come_at_once_with_their_lines() -> None:
    text = "max_batch_sise: 8\nmoe_config:\n  backend: WIDEEP\nkv_cache_config:\n  free_gpu_memory_fraction: 2\n"
    assert {(f.code, f.line) for f in lint(text, Deployment(schema_for(NEW)))} == {
        ("TS-LINT-UNKNOWN-KEY", 1),
        ("TS-LINT-BAD-VALUE", 3),
        ("TS-LINT-OUT-OF-RANGE", 5),
    }


def test_an_unknown_boundary_is_a_warning_that_names_the_interval() -> None:
    findings = lint("telemetry_config: {disabled: true}\n", Deployment(schema_for("1.3.0rc9")))
    assert [f.severity for f in findings] == ["warning"]
    assert "after 1.3.0rc5, by 1.3.0rc20" in findings[0].message


def test_fix_corrects_what_is_certain_and_keeps_comments() -> None:
    text = """\
# mine
max_batch_sise: 64   # as measured
kv_cache_dtype: fp8
speculative_config:
    decoding_type: Eagle3  # here
    speculative_model: nvidia/Kimi-K2.6-Eagle3  # the head
    num_eagle_layers: 3  # old
    # three tokens
    max_draft_len: 3
cuda_graph_config: {batch_sizes: [1, 2, 64], max_batch_size: 8}
"""
    deployment = Deployment(schema_for("1.1.0"))
    fixed, corrected = fix(text, deployment)
    assert {f.code for f in corrected} >= {"TS-LINT-RENAMED-KEY", "TS-LINT-GRAPH-SIZES", "TS-LINT-NO-EFFECT"}
    assert (
        fixed.text
        == """\
# mine
max_batch_sise: 64   # as measured
speculative_config:
    decoding_type: Eagle3  # here
    speculative_model_dir: nvidia/Kimi-K2.6-Eagle3  # the head
    # old
    # three tokens
    max_draft_len: 3
cuda_graph_config: {batch_sizes: [1, 2, 64]}
kv_cache_config:
  dtype: fp8
"""
    )
    # what was meant by these is a guess
    left = {(f.key, f.remedy, f.fix) for f in lint(fixed, deployment) if f.severity == "error"}
    assert left == {
        ("max_batch_sise", "did you mean max_batch_size?", None),
        ("speculative_config.decoding_type", "did you mean Eagle?", None),
    }
    assert fix(fixed, deployment) == (fixed, [])


def test_fix_writes_the_capture_layers_of_the_head() -> None:
    deployment = Deployment(schema_for(NEW), k26(), "", head(aux_layers=(2, 30, 58)))
    fixed, _ = fix(GOOD, deployment)
    assert fixed.get("speculative_config.eagle3_layers_to_capture") == [2, 30, 58]


def test_every_code_is_documented() -> None:
    import re
    from pathlib import Path

    import trtspec.trtllm as room
    from trtspec.data_files import DATA

    sources = [
        path
        for part in ("trtllm", "launch", "cli")
        for pattern in ("*.py", "*.yaml")
        for path in (Path(room.__file__).parent.parent / part).rglob(pattern)
    ]
    code_of = re.compile(r'(?:"|code: )(TS-(?:LINT|SERVE)-[A-Z0-9-]+)')
    used = {code for path in sources for code in code_of.findall(path.read_text())}
    fragments = [yaml.safe_load(path.read_text()) for path in (DATA / "problems").glob("*.yaml")]
    documented = {
        code: entry for part in fragments for code, entry in part.items() if code[:8] in ("TS-LINT-", "TS-SERVE")
    }
    assert used == set(documented)
    assert all(set(entry) == {"summary", "remedy"} and all(entry.values()) for entry in documented.values())


# ai-dynamo's aggregated Kimi-K2.5 recipe with an Eagle head on 8 B200, restated
DYNAMO = """\
tensor_parallel_size: 8
moe_expert_parallel_size: 8
max_batch_size: 64
trust_remote_code: true
enable_chunked_prefill: true
moe_config: {backend: TRTLLM}
cuda_graph_config: {enable_padding: true, max_batch_size: 64}
kv_cache_config: {free_gpu_memory_fraction: 0.8, enable_block_reuse: false, dtype: fp8}
speculative_config:
  decoding_type: Eagle
  max_draft_len: 3
  speculative_model_dir: /models/eagle3
  allow_advanced_sampling: true
"""


@pytest.mark.parametrize("version", ["1.2.1", "1.3.0rc5", "1.3.0rc9", "1.3.0rc20", "1.3.0rc22", "1.4.0rc1"])
def test_no_false_alarm_on_a_public_recipe(version: str) -> None:
    assert [f for f in lint(DYNAMO, Deployment(schema_for(version))) if f.severity != "info"] == []
    card = "speculative_config:\n  decoding_type: Eagle\n  max_draft_len: 3\n  speculative_model_dir: /eagle3\n"
    assert [f for f in lint(card, Deployment(schema_for(version))) if f.severity == "error"] == []


# ai-dynamo's disaggregated Kimi-K2.5 recipe on GB200, restated: prefill and decode; and a user's 4 x B300 server
DYNAMO_PREFILL = """\
enable_attention_dp: true
max_seq_len: 200000
max_batch_size: 4
disable_overlap_scheduler: true
enable_chunked_prefill: true
cuda_graph_config: null
allreduce_strategy: MNNVL
moe_config: {backend: TRTLLM}
kv_cache_config: {free_gpu_memory_fraction: 0.6, dtype: fp8, host_cache_size: 107374182400}
cache_transceiver_config: {backend: DEFAULT, max_tokens_in_buffer: 0}
speculative_config: {decoding_type: Eagle, max_draft_len: 3, speculative_model_dir: /h, allow_advanced_sampling: true}
"""
DYNAMO_DECODE = """\
max_batch_size: 128
max_num_tokens: 640
max_seq_len: 200000
moe_config: {backend: CUTLASS, use_low_precision_moe_combine: true}
cuda_graph_config: {enable_padding: true, max_batch_size: 128}
kv_cache_config: {free_gpu_memory_fraction: 0.85, dtype: fp8, enable_block_reuse: false}
cache_transceiver_config: {backend: DEFAULT, max_tokens_in_buffer: 0}
speculative_config: {decoding_type: Eagle, max_draft_len: 3, speculative_model_dir: /h, allow_advanced_sampling: true}
"""
USER_B300 = """\
tensor_parallel_size: 4
moe_expert_parallel_size: 4
max_seq_len: 262144
max_num_tokens: 16384
enable_chunked_prefill: true
moe_config: {backend: CUTLASS}
"""


@pytest.mark.parametrize("text", [DYNAMO_PREFILL, DYNAMO_DECODE, USER_B300], ids=["prefill", "decode", "user"])
@pytest.mark.parametrize("version", ["1.3.0rc5", "1.3.0rc16", "1.3.0rc20", "1.4.0rc1"])
def test_no_false_alarm_on_the_other_public_files(text: str, version: str) -> None:
    assert [f for f in lint(text, Deployment(schema_for(version))) if f.severity != "info"] == []


def test_the_limit_of_one_variant_binds_that_variant_alone() -> None:
    for algorithm, expected in (("qsa", True), ("rocket", False)):
        text = f"sparse_attention_config:\n  algorithm: {algorithm}\n  seq_len_threshold: 0\n"
        found = lint(text, Deployment(schema_for("1.4.0rc1")))
        assert any("seq_len_threshold of qsa" in finding.message for finding in found) is expected
