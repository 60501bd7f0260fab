"""Findings come at once with lines, corrections keep the rest, public files raise no alarm."""

from dataclasses import replace
from typing import Any

import pytest
import yaml

from tests.trtllm.lint.engine_files import with_fixes
from trtspec.checkpoint.hub import find_target, load_head
from trtspec.specs import HeadSpec, ModelSpec
from trtspec.trtllm.deployment import Deployment
from trtspec.trtllm.lint import lint
from trtspec.trtllm.schema import schema_for

GOOD = """\
speculative_config:
  decoding_type: Eagle
  max_draft_len: 3
  speculative_model_dir: nvidia/Kimi-K2.6-Eagle3
moe_config: {backend: TRTLLM}
"""
NEW = "1.3.0rc27.dev0"  # the last release whose classes were read whole


def k26() -> ModelSpec:
    return find_target("nvidia/Kimi-K2.6-NVFP4").spec


def head(**changes: Any) -> HeadSpec:
    return replace(load_head("nvidia/Kimi-K2.6-Eagle3").spec, **changes)


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
    assert ("TS-LINT-TRANSFER-BLOCKS" in {finding.code for finding in lint(text, deployment)}) == (
        whole is not None
    )
    better, _ = with_fixes(text, deployment)
    written = yaml.safe_load(better.text)["cache_transceiver_config"]["max_tokens_in_buffer"]
    assert whole is None or written == whole


@pytest.mark.parametrize("here", [True, False])
def test_a_path_that_is_not_here_is_an_error_where_the_engine_is(here: bool) -> None:
    text = "moe_config: {load_balancer: /nowhere/eplb.yaml}\n"
    severities = {f.code: f.severity for f in lint(text, Deployment(schema_for(NEW), here=here))}
    assert severities["TS-LINT-EPLB-FILE"] == ("error" if here else "warning")


def test_all_problems_come_at_once_with_their_lines() -> None:
    text = (
        "max_batch_sise: 8\n"
        "moe_config:\n"
        "  backend: WIDEEP\n"
        "kv_cache_config:\n"
        "  free_gpu_memory_fraction: 2\n"
    )
    assert {(f.code, f.line) for f in lint(text, Deployment(schema_for(NEW)))} == {
        ("TS-LINT-UNKNOWN-KEY", 1),
        ("TS-LINT-BAD-VALUE", 3),
        ("TS-LINT-OUT-OF-RANGE", 5),
    }


def test_fix_corrects_what_is_certain_and_keeps_comments() -> None:
    text = """\
# mine
max_batch_sise: 64   # as measured
kv_cache_dtype: fp8
speculative_config:
    decoding_type: Eagle3  # here
    speculative_model: nvidia/Kimi-K2.6-Eagle3  # the head
    acceptance_window: 100  # answers
    num_eagle_layers: 3  # old
    # three tokens
    max_draft_len: 3
cuda_graph_config: {batch_sizes: [1, 2, 64], max_batch_size: 8}
"""
    deployment = Deployment(schema_for(NEW))
    fixed, corrected = with_fixes(text, deployment)
    assert {f.code for f in corrected} >= {
        "TS-LINT-RENAMED-KEY",
        "TS-LINT-GRAPH-SIZES",
        "TS-LINT-NO-EFFECT",
    }
    assert (
        fixed.text
        == """\
# mine
max_batch_sise: 64   # as measured
speculative_config:
    decoding_type: Eagle3  # here
    speculative_model: nvidia/Kimi-K2.6-Eagle3  # the head
    acceptance_rate_window_size: 100  # answers
    # old
    # three tokens
    max_draft_len: 3
cuda_graph_config: {batch_sizes: [1, 2, 64]}
kv_cache_config: {dtype: fp8}
"""
    )
    left = [(f.key, f.remedy, f.fix) for f in lint(fixed, deployment) if f.severity == "error"]
    assert left == [
        ("max_batch_sise", "did you mean max_batch_size?", None)
    ]  # what was meant is a guess
    assert with_fixes(fixed, deployment) == (fixed, [])


def test_fix_writes_the_capture_layers_of_the_head() -> None:
    deployment = Deployment(schema_for(NEW), k26(), "", head(aux_layers=(2, 30, 58)))
    fixed, _ = with_fixes(GOOD, deployment)
    assert fixed.get("speculative_config.eagle3_layers_to_capture") == [2, 30, 58]


def test_every_code_is_documented() -> None:
    import re

    from trtspec.data_files import DATA

    sources = [*DATA.parent.rglob("*.py"), *DATA.parent.rglob("*.yaml")]
    code_of = re.compile(r'(?:"|code: )(TS-(?:LINT|SERVE)-[A-Z0-9-]+)')
    used = {code for path in sources for code in code_of.findall(path.read_text())}
    fragments = [yaml.safe_load(path.read_text()) for path in (DATA / "problems").glob("*.yaml")]
    documented = {
        code: entry
        for part in fragments
        for code, entry in part.items()
        if code[:8] in ("TS-LINT-", "TS-SERVE")
    }
    assert used == set(documented)
    assert all(
        set(entry) == {"summary", "remedy"} and all(entry.values()) for entry in documented.values()
    )


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


# ai-dynamo's disaggregated Kimi-K2.5 recipe on GB200, restated: prefill and decode; and a user's 4
# x B300 server
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
speculative_config: {decoding_type: Eagle, max_draft_len: 3, \
speculative_model_dir: /h, allow_advanced_sampling: true}
"""
DYNAMO_DECODE = """\
max_batch_size: 128
max_num_tokens: 640
max_seq_len: 200000
moe_config: {backend: CUTLASS, use_low_precision_moe_combine: true}
cuda_graph_config: {enable_padding: true, max_batch_size: 128}
kv_cache_config: {free_gpu_memory_fraction: 0.85, dtype: fp8, enable_block_reuse: false}
cache_transceiver_config: {backend: DEFAULT, max_tokens_in_buffer: 0}
speculative_config: {decoding_type: Eagle, max_draft_len: 3, \
speculative_model_dir: /h, allow_advanced_sampling: true}
"""
USER_B300 = """\
tensor_parallel_size: 4
moe_expert_parallel_size: 4
max_seq_len: 262144
max_num_tokens: 16384
enable_chunked_prefill: true
moe_config: {backend: CUTLASS}
"""


CARD = (
    "speculative_config: {decoding_type: Eagle, max_draft_len: 3, speculative_model_dir: /eagle3}\n"
)
VERSIONS = ["1.3.0rc5", "1.3.0rc9", "1.3.0rc16", "1.3.0rc20", "1.3.0rc22", "1.4.0rc1"]


@pytest.mark.parametrize(
    ("text", "versions", "least"),
    [
        (DYNAMO, ["1.2.1", *VERSIONS], "info"),
        (DYNAMO_PREFILL, VERSIONS, "info"),
        (DYNAMO_DECODE, VERSIONS, "info"),
        (USER_B300, VERSIONS, "info"),
        (CARD, ["1.2.1", *VERSIONS], "warning"),
    ],
    ids=["aggregated", "prefill", "decode", "user", "card"],
)
def test_no_false_alarm_on_public_files(text: str, versions: list[str], least: str) -> None:
    for version in versions:
        found = {finding.severity for finding in lint(text, Deployment(schema_for(version)))}
        assert found <= {"info", least}, version
