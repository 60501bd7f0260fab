"""Ways to speculate: rows that rules ask, against what each release's class takes."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from trtspec.checkpoint.hub import load_head, load_target
from trtspec.trtllm.deployment import Deployment, eagle3, methods
from trtspec.trtllm.lint.linter import lint
from trtspec.trtllm.schema import LINES, line_fields, schema_for

NEW, MID, OLD = "1.4.0rc1", "1.3.0rc20", "1.2.1"
TARGET = load_target("nvidia/Kimi-K2.6-NVFP4").spec


def found(version: str = NEW, target: bool = True, top: dict[str, Any] | None = None, **spec: Any) -> dict[str, Any]:
    text = yaml.safe_dump({"speculative_config": spec, **(top or {})})
    deployment = Deployment(schema_for(version), TARGET if target else None)
    return {finding.code: finding for finding in lint(text, deployment)}


def test_every_decoding_type_of_every_line_has_one_row() -> None:
    rows = [name for method in methods().values() for name in method.spellings]
    known = {name for line in LINES for name in line_fields(line, "speculative_config.decoding_type", "allowed")}
    assert known == set(rows) and len(rows) == len(set(rows))
    for method in methods().values():
        keys = [key for key in (method.capture, *method.trees) if key is not None]
        fields = set().union(*(line_fields(line) for line in LINES))
        assert {f"speculative_config.{key}" for key in keys} <= fields, method.key
        assert method.kimi["runs"] in ("yes", "no", "unknown") and method.kimi["why"] and method.source


def test_the_spelling_that_is_written_parses_in_every_line() -> None:
    for line in LINES:
        assert eagle3().spellings[0] in line_fields(line, "speculative_config.decoding_type", "allowed")


@pytest.mark.parametrize(
    ("spec", "code"),
    [
        ({"decoding_type": "Draft_Target", "max_draft_len": 3}, "TS-LINT-NO-DRAFT-MODEL"),
        ({"decoding_type": "NGram"}, "TS-LINT-NO-DRAFT-LENGTH"),
        ({"decoding_type": "SA", "max_draft_len": 0}, "TS-LINT-NO-DRAFT-LENGTH"),
        ({"decoding_type": "User_Provided", "max_draft_len": 3}, "TS-LINT-NO-DRAFT-MODEL"),
        ({"decoding_type": "Eagle3", "max_draft_len": 3}, "TS-LINT-EAGLE-NO-HEAD"),
        ({"decoding_type": "MTP", "max_draft_len": 1}, "TS-LINT-MTP-KIMI"),
        ({"decoding_type": "DFlash", "max_draft_len": 7, "speculative_model_dir": "/d"}, "TS-LINT-UNTESTED"),
        ({"decoding_type": "SA", "max_draft_len": 3, "global_pool_size": 64}, "TS-LINT-COMBINATION"),
    ],
)
def test_a_row_says_what_its_method_needs(spec: dict[str, Any], code: str) -> None:
    assert code in found(**spec)


def test_a_method_that_the_pytorch_backend_lacks_does_not_run_a_kimi() -> None:
    assert found(MID, decoding_type="Medusa", max_draft_len=3)["TS-LINT-METHOD-KIMI"].severity == "error"


def test_parallel_drafts_need_twice_the_tokens_per_step() -> None:
    sizes = {"max_batch_size": 8, "max_num_tokens": 8 * 5}
    pard = {"decoding_type": "PARD", "max_draft_len": 4, "speculative_model_dir": "/d"}
    assert "TS-LINT-TOKEN-BUDGET" in found(top=sizes, **pard)  # 8 x 2 x 4
    assert "TS-LINT-TOKEN-BUDGET" not in found(top=sizes, **{**pard, "decoding_type": "DFlash"})  # 8 x (4 + 1)


EAGLE = {"decoding_type": "Eagle", "max_draft_len": 3, "speculative_model_dir": "/h"}


@pytest.mark.parametrize(
    ("version", "schedule", "longest", "refused"),
    [
        (MID, {"1": 3}, 3, False),  # keys of text count as numbers
        (MID, {"4": "3", 2048: 1}, "3", False),
        (MID, {}, 3, True),
        (OLD, {}, 3, True),
        (MID, {0: 3}, 3, True),
        (MID, {4: 3, 8: 4}, 3, True),
        (MID, {4: 3, 8: -1}, 3, True),
        (MID, {8: 1, 4: 3}, 3, False),  # sorted by the engine
        (OLD, {4: 3}, 3, True),  # lower bounds must begin at 1
        (OLD, {"1": 3, 8: 1}, 3, False),
        (MID, None, 3, False),
    ],
)
def test_a_schedule_is_judged_as_the_engine_reads_it(version: str, schedule: Any, longest: Any, refused: bool) -> None:
    codes = found(version, target=False, **{**EAGLE, "max_draft_len": longest, "draft_len_schedule": schedule})
    assert any(finding.severity == "error" for finding in codes.values()) == refused, codes


@pytest.mark.parametrize(
    ("spec", "refused"),
    [
        ({"use_dynamic_tree": True, "dynamic_tree_max_topK": 2, "max_total_draft_tokens": 7}, "TS-LINT-COMBINATION"),
        ({"use_dynamic_tree": True, "dynamic_tree_max_topK": 2, "max_total_draft_tokens": 6}, ""),
        ({"use_dynamic_tree": True}, "TS-LINT-COMBINATION"),
        ({"use_dynamic_tree": "yes"}, "TS-LINT-COMBINATION"),
        ({"use_dynamic_tree": True, "dynamic_tree_max_topK": 0}, "TS-LINT-OUT-OF-RANGE"),
        ({"eagle_choices": [[0]], "use_dynamic_tree": True, "dynamic_tree_max_topK": 2}, "TS-LINT-EXCLUSIVE-KEYS"),
    ],
)
def test_trees_follow_the_validators(spec: dict[str, Any], refused: str) -> None:
    codes = found(target=False, **EAGLE, **spec)
    judged = {"TS-LINT-COMBINATION", "TS-LINT-OUT-OF-RANGE", "TS-LINT-EXCLUSIVE-KEYS"} & set(codes)
    assert refused in codes if refused else not judged
    assert "TS-LINT-DYNAMIC-TREE" in codes


def test_a_width_alone_switches_a_tree_on_in_the_older_line() -> None:
    assert "TS-LINT-DYNAMIC-TREE" in found(MID, target=False, **EAGLE, dynamic_tree_max_topK=2)
    assert "TS-LINT-DYNAMIC-TREE" not in found(NEW, target=False, **EAGLE, dynamic_tree_max_topK=2)


@pytest.mark.parametrize(
    ("choices", "refused"), [([[0], [0, 0]], False), ([[0], [1, 0]], True), ([], True), ("8", True), ("None", False)]
)
def test_static_trees_are_connected(choices: Any, refused: bool) -> None:
    codes = found(MID, target=False, **EAGLE, eagle_choices=choices)
    assert any(finding.severity == "error" for finding in codes.values()) == refused


@pytest.mark.parametrize(
    "text",
    [
        "kv_cache_config: {pool_ratio: [0.5, 0.4]}\n",
        "kv_cache_config: {free_gpu_memory_fraction: null}\n",
        "prometheus_metrics_config: {time_to_first_token_buckets: [0.5, 0.5]}\n",
        "cuda_graph_config: {mode: encode, num_tokens: [1, 2], max_num_token: 4}\n",
        "attention_dp_config: {enable_balance: true, timeout_iters: -1}\n",
        "skip_tokenizer_init: true\npost_processor_hook: a.B\n",
        "encoder_cuda_graph_config: {mode: encode}\n",
        "torch_compile_config: {capture_num_tokens: [1]}\nprefill_capture_num_tokens: [2]\n",
        "kv_cache_config: {mamba_state_config: {enable_branch_snapshot: true}, use_kv_cache_manager_v2: false}\n",
        "prefill_cuda_graph_backend: breakable\ntorch_compile_config: {}\n",
        "sparse_attention_config: {algorithm: deepseek_v4, index_head_dim: 64}\n",
        "sparse_attention_config: {algorithm: deepseek_v4, index_head_dim: null}\n",
        "speculative_config: {decoding_type: MTP, max_draft_len: 0}\n",
        "speculative_config: {decoding_type: MTP, num_nextn_predict_layers: 0}\n",
        "speculative_config: {decoding_type: NGram, max_draft_len: 4, max_matching_ngram_size: 0.0}\n",
        "kv_cache_config: {mamba_state_config: {additional_snapshot_offsets_from_start: ['8']}}\n",
        "ray_worker_nsight_options: {1: 2}\n",
        "ray_worker_extension_cls: ''\n",
        "speculative_config: {decoding_type: MTP, use_dynamic_tree: null}\n",
        "speculative_config: {decoding_type: SA, max_draft_len: 4, max_matching_ngram_size: 0}\n",
        "enable_attention_dp: true\nlora_config: {cuda_graph_specialize_lora: true}\n",
    ],
)
def test_validators_of_several_keys_are_followed(text: str) -> None:
    """Each is refused by the class of the newest line, and taken without its second setting."""
    assert any(finding.severity == "error" for finding in lint(text, Deployment(schema_for(NEW))))


@pytest.mark.parametrize(
    "text",
    [
        "sparse_attention_config: {algorithm: deepseek_v4}\n",
        "sparse_attention_config: {algorithm: deepseek_v4, index_head_dim: 64, indexer_k_dtype: fp8}\n",
        "speculative_config: {decoding_type: MTP}\n",
        "speculative_config: {decoding_type: SA, max_draft_len: 4, max_matching_ngram_size: -1}\n",
        "speculative_config: {decoding_type: SA, max_draft_len: 4, max_matching_ngram_size: -2}\n",
        "kv_cache_config: {mamba_state_config: {additional_snapshot_offsets_from_start: [8]}}\n",
        "ray_worker_nsight_options: {t: cuda}\n",
        "env_overrides: {1: 2}\n",
    ],
)
def test_what_the_validators_take_is_no_error(text: str) -> None:
    assert not [finding for finding in lint(text, Deployment(schema_for(NEW))) if finding.severity == "error"]


@pytest.mark.parametrize(
    ("text", "refused_by", "taken_by"),
    [
        ("prefill_cuda_graph_backend: piecewise\n", "1.3.0rc23", "1.4.0rc1"),
        ("kv_cache_config: {kv_events_config: {hwm: 8}}\n", "1.3.0rc23", "1.4.0rc1"),
        ("kv_cache_config: {dtype: fp8_ds_mla}\n", "1.3.0rc23", "1.4.0rc1"),
        ("cp_config: {cp_anchor_size: 8}\n", "1.4.0rc1", "1.3.0rc23"),
        ("sparse_attention_config: {algorithm: minimax_m3, sparse_index_dim: 0}\n", "1.4.0rc1", "1.3.0rc23"),
        ("kv_cache_config: {block_reuse_config: {policy: per_request}}\n", "1.3.0rc20", "1.3.0rc24"),
    ],
)
def test_a_key_is_judged_by_the_release_that_has_it(text: str, refused_by: str, taken_by: str) -> None:
    """As the classes of both releases judge them, run."""
    for version, refused in ((refused_by, True), (taken_by, False)):
        errors = [found for found in lint(text, Deployment(schema_for(version))) if found.severity == "error"]
        assert bool(errors) == refused, (version, errors)


def test_an_mla_head_loads_from_the_release_that_somebody_ran() -> None:
    head = load_head("nvidia/Kimi-K2.6-Eagle3").spec
    text = yaml.safe_dump({"speculative_config": EAGLE})
    for version, doubted in (("1.3.0rc12", True), ("1.3.0rc13", False)):
        codes = {finding.code for finding in lint(text, Deployment(schema_for(version), TARGET, "", head, ""))}
        assert ("TS-LINT-MLA-HEAD-OLD-ENGINE" in codes) == doubted
    for version, doubted in (("1.3.0rc6", True), ("1.3.0rc7", False)):
        codes = {finding.code for finding in lint(text, Deployment(schema_for(version), TARGET, "", head, ""))}
        assert ("TS-LINT-MODEL-TOO-NEW" in codes) == doubted
