"""What deployers met in the field: each trap on the releases that have it, with its thread, and not on the others."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import yaml

from trtspec.checkpoint.hub import load_head, load_target
from trtspec.errors import Severity
from trtspec.trtllm.build import compose
from trtspec.trtllm.deployment import Deployment, Finding
from trtspec.trtllm.intent import Intent
from trtspec.trtllm.lint.linter import lint
from trtspec.trtllm.lint.speculation import REJECTION, request_limits
from trtspec.trtllm.schema import schema_for

EAGLE = {"decoding_type": "Eagle", "max_draft_len": 3, "speculative_model_dir": "/h"}
V2 = {"kv_cache_config": {"use_kv_cache_manager_v2": True}}
PIECEWISE = {"enable_piecewise_cuda_graph": True, "max_num_streams": 3}
GUIDED = {"guided_decoding_backend": "xgrammar", "max_batch_size": 64}
HOST = {"kv_cache_config": {"host_cache_size": 2**30}}


def found(version: str, *tops: dict[str, Any], head: Any = None, **spec: Any) -> dict[str, Finding]:
    values: dict[str, Any] = {"speculative_config": {**EAGLE, **spec}}
    for top in tops:
        values |= top
    target = load_target("nvidia/Kimi-K2.6-NVFP4").spec if head is not None else None
    return {f.code: f for f in lint(yaml.safe_dump(values), Deployment(schema_for(version), target, "", head, ""))}


# (trap, release, file, keys of speculative_config, severity; "" where the release does not have it)
CASES: list[tuple[str, str, dict[str, Any], dict[str, Any], Severity | str]] = [
    ("TS-LINT-PREFIX-REUSE", "1.3.0rc20", {}, {}, "warning"),  # reuse is on by default
    ("TS-LINT-PREFIX-REUSE", "1.4.0rc1", {}, {}, "warning"),
    ("TS-LINT-PREFIX-REUSE", "1.3.0rc24", V2, {}, "warning"),
    ("TS-LINT-PREFIX-REUSE", "1.3.0rc26", V2, {}, ""),  # mended for cache manager V2
    ("TS-LINT-PREFIX-REUSE", "1.4.0rc1", {**V2, "pipeline_parallel_size": 2}, {}, "warning"),
    ("TS-LINT-PREFIX-REUSE", "1.4.0rc1", {"enable_attention_dp": True}, {}, ""),
    ("TS-LINT-PREFIX-REUSE", "1.4.0rc1", {"kv_cache_config": {"enable_block_reuse": False}}, {}, ""),
    ("TS-LINT-PREFIX-REUSE", "1.4.0rc1", {"kv_cache_config": {"enable_block_reuse": True}}, {}, "info"),  # decided
    ("TS-LINT-REJECTION-CRASH", "1.3.0rc17", {}, {"use_rejection_sampling": True}, "error"),
    ("TS-LINT-REJECTION-CRASH", "1.3.0rc20", {}, {"use_rejection_sampling": True}, "warning"),
    ("TS-LINT-REJECTION-CRASH", "1.4.0rc1", {}, {"use_rejection_sampling": True}, ""),
    ("TS-LINT-REJECTION-CRASH", "1.3.0rc17", {}, {}, ""),
    ("TS-LINT-GUIDED-SCHEDULE", "1.4.0rc1", GUIDED, {"draft_len_schedule": {"4": 3, "64": 0}}, "warning"),
    ("TS-LINT-GUIDED-SCHEDULE", "1.4.0rc1", GUIDED, {"draft_len_schedule": {4: 3, 32: 1}}, "warning"),  # 0 above 32
    ("TS-LINT-GUIDED-SCHEDULE", "1.4.0rc1", GUIDED, {"draft_len_schedule": {4: 3, 64: 1}}, ""),
    ("TS-LINT-GUIDED-SCHEDULE", "1.4.0rc1", {"max_batch_size": 64}, {"draft_len_schedule": {4: 3, 64: 0}}, ""),
    ("TS-LINT-CACHE-BUDGET-TWICE", "1.3.0rc7", V2, {}, "warning"),
    ("TS-LINT-CACHE-BUDGET-TWICE", "1.3.0rc20", V2, {}, ""),
    ("TS-LINT-HOST-CACHE-TWICE", "1.3.0rc13", HOST, {}, "warning"),
    ("TS-LINT-HOST-CACHE-TWICE", "1.3.0rc13", {**HOST, "enable_attention_dp": True}, {}, ""),
    ("TS-LINT-HOST-CACHE-TWICE", "1.4.0rc1", HOST, {}, ""),
    ("TS-LINT-PIECEWISE-STREAMS", "1.3.0rc20", {"torch_compile_config": PIECEWISE}, {}, "warning"),
    ("TS-LINT-PIECEWISE-STREAMS", "1.3.0rc20", {"torch_compile_config": {**PIECEWISE, "max_num_streams": 1}}, {}, ""),
    ("TS-LINT-PIECEWISE-STREAMS", "1.4.0rc1", {"prefill_cuda_graph_backend": "piecewise", "torch_compile_config": {}},
     {}, "warning"),  # three streams are this line's default
    ("TS-LINT-DRAFT-CACHE-LOST", "1.4.0rc1", {"cache_transceiver_config": {"backend": "NIXL"}}, {}, "info"),
    ("TS-LINT-DRAFT-CACHE-LOST", "1.4.0rc1", {}, {}, ""),
    ("TS-LINT-SAMPLED-ACCEPTANCE", "1.4.0rc1", {}, {"use_rejection_sampling": False}, "info"),
    ("TS-LINT-SAMPLED-ACCEPTANCE", "1.4.0rc1", {}, {}, ""),
    ("TS-LINT-REQUEST-ENDS-ENGINE", "1.2.1", {}, {}, "info"),
    ("TS-LINT-REQUEST-ENDS-ENGINE", "1.3.0rc13", {}, {}, ""),
    ("TS-LINT-EXCLUSIVE-KEYS", "1.3.0rc20", {}, {"max_concurrency": 8}, "error"),  # Eagle becomes Eagle3 too late
    ("TS-LINT-EXCLUSIVE-KEYS", "1.4.0rc1", {}, {"max_concurrency": 8, "decoding_type": "Eagle3"}, ""),
    ("TS-LINT-EXCLUSIVE-KEYS", "1.4.0rc1", {}, {"draft_len_schedule": {8: 3}, "max_concurrency": 8}, "error"),
    ("TS-LINT-PENALTIES-OFF", "1.4.0rc1", {}, {"enable_penalty": False}, "info"),
]  # fmt: skip


@pytest.mark.parametrize(("code", "version", "top", "spec", "severity"), CASES)
def test_a_trap_is_reported_on_the_releases_that_have_it(
    code: str, version: str, top: dict[str, Any], spec: dict[str, Any], severity: str
) -> None:
    finding = found(version, top, **spec).get(code)
    assert (finding.severity if finding else "") == severity
    if finding is not None:
        known_by = ("TensorRT-LLM", "DecodingBaseConfig", "TorchLlmArgs")
        assert any(source in finding.message for source in known_by)
        assert finding.remedy


def test_what_rejection_sampling_is_worth_is_said_with_both_figures() -> None:
    worth = ("3.10 tokens per step instead of 1.94 at temperature 0.6", "2.93 tokens per step instead of 1.41")
    message = found("1.4.0rc1", use_rejection_sampling=False)["TS-LINT-SAMPLED-ACCEPTANCE"].message
    assert all(figures in message for figures in worth)
    for version, told in (("1.3.0rc17", False), ("1.3.0rc20", False), ("1.3.0rc22", True), ("1.4.0rc1", True)):
        for settings in ((), (f"{REJECTION}=true",)):
            made = Intent(target="nvidia/Kimi-K2.5-NVFP4", head="nvidia/Kimi-K2.5-Eagle3", version=version,
                          settings=settings, tp_size=4)  # fmt: skip
            text = compose(made, load_target(made.target).spec, load_head(made.head or "").spec).replace("\n# ", " ")
            assert all(figures in text for figures in worth) == (told and not settings), version


def test_a_pruned_mla_head_is_not_taken_by_the_loader() -> None:
    head = load_head("nvidia/Kimi-K2.6-Eagle3").spec
    pruned = replace(head, draft_vocab_size=32_000)
    assert found("1.4.0rc1", head=pruned)["TS-LINT-PRUNED-MLA-HEAD"].severity == "error"
    assert "TS-LINT-PRUNED-MLA-HEAD" not in found("1.4.0rc1", head=head)
    assert "TS-LINT-PRUNED-MLA-HEAD" not in found("1.4.0rc1", head=replace(pruned, attention="mha"))


@pytest.mark.parametrize(
    ("version", "penalties", "end", "ignored", "refused"),
    [
        ("1.3.0rc5", False, True, "min_length", ""),
        ("1.3.0rc20", False, False, "logprobs", ""),
        ("1.3.0rc20", False, False, "repetition_penalty", ""),
        ("1.4.0rc1", False, False, "", "logprobs"),
        ("1.4.0rc1", False, False, "", "repetition_penalty"),
        ("1.3.0rc27", False, False, "logprobs", "logprobs"),  # inside the interval it may be either
    ],
)
def test_request_parameters_by_release(version: str, penalties: bool, end: bool, ignored: str, refused: str) -> None:
    limits = request_limits(Deployment(schema_for(version)), penalties)
    assert ("logprobs" in limits["end_engine"]) == end
    assert (not ignored or ignored in limits["ignored"]) and (not refused or refused in limits["refused"])


def test_penalties_are_honoured_where_the_key_allows_them() -> None:
    limits = request_limits(Deployment(schema_for("1.4.0rc1")), penalties=True)
    assert not any("repetition_penalty" in listed for listed in limits.values())


@pytest.mark.parametrize("version", ["1.2.1", "1.3.0rc20", "1.3.0rc22", "1.4.0rc1"])
def test_without_speculation_no_trap_is_reported(version: str) -> None:
    text = yaml.safe_dump({**HOST, **GUIDED, "moe_config": {"backend": "TRTLLM"}})
    assert [f for f in lint(text, Deployment(schema_for(version))) if f.severity == "error"] == []
    assert not {f.code for f in lint(text, Deployment(schema_for(version)))} & {code for code, *_ in CASES}
