"""build-config: model cards' commands by version, and back from the first line byte for byte."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from trtspec.checkpoint.hub import find_target
from trtspec.errors import CheckFailed, UsageError
from trtspec.trtllm.build import build_named, disaggregated
from trtspec.trtllm.deployment import deployment_of
from trtspec.trtllm.document import Document
from trtspec.trtllm.intent import ENGINE_FILE, Goal, Intent, parse_intent
from trtspec.trtllm.kubernetes import helm_values
from trtspec.trtllm.lint import lint
from trtspec.trtllm.serve.command import build_command

ROOT = Path(__file__).resolve().parents[2]
CONFIGS = ROOT / "configs"
RECIPES = sorted(CONFIGS.glob("*.yml"))
CARDS = [
    ("nvidia/Kimi-K2.5-NVFP4", "nvidia/Kimi-K2.5-Eagle3"),
    ("nvidia/Kimi-K2.6-NVFP4", "nvidia/Kimi-K2.6-Eagle3"),
]
CARD_COMMAND = (
    "trtllm-serve {target} --host 0.0.0.0 --port 8000 --backend pytorch --max_batch_size 32 "
    "--max_num_tokens 8192 --max_seq_len 8192 --tp_size 4 "
    "--extra_llm_api_options extra-llm-api-config.yml"
)


def an_intent(
    target: str,
    version: str,
    head: str | None = None,
    goal: Goal = "latency",
    tp_size: int = 4,
    **more: Any,
) -> Intent:
    return Intent(target=target, version=version, head=head, goal=goal, tp_size=tp_size, **more)


def argv(intent: Intent, text: str) -> list[str]:
    return build_command(intent, find_target(intent.target).spec, Document.parse(text, ENGINE_FILE))


@pytest.mark.parametrize(("target", "head"), CARDS)
@pytest.mark.parametrize(
    ("version", "sampling"), [("1.3.0rc21", True), ("1.3.0rc22", False), ("1.4.0rc1", False)]
)
def test_the_model_cards_configuration_and_command(
    target: str, head: str, version: str, sampling: bool
) -> None:
    """Advanced sampling is written exactly where it may decide."""
    intent = an_intent(target, version, head, tp_size=4)
    config = build_named(intent)
    asked = {"decoding_type": "Eagle", "max_draft_len": 3, "speculative_model_dir": head}
    assert config.values["speculative_config"] == asked | (
        {"allow_advanced_sampling": True} if sampling else {}
    )
    ours, card = argv(intent, config.text), CARD_COMMAND.format(target=target).split()
    extra = [word for word in ours if word not in card]
    assert [word for word in ours if word in card] == card
    assert extra == ["--reasoning_parser", "kimi_k25", "--tool_parser", "kimi_k2", "--no-telemetry"]


def test_a_version_that_cannot_run_it_is_refused_with_every_reason() -> None:
    with pytest.raises(CheckFailed) as refused:
        build_named(
            an_intent("nvidia/Kimi-K2.6-NVFP4", "1.2.1", "lightseekorg/kimi-k2.6-eagle3.1-mla")
        )
    assert (
        "TS-LINT-MODEL-TOO-NEW" in refused.value.message
        and "TS-LINT-EAGLE31" in refused.value.message
    )


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_regenerates_byte_for_byte(path: Path) -> None:
    text = path.read_text()
    intent = parse_intent(text)
    assert intent is not None and (
        intent.role == "front" or (intent.trust_remote_code and intent.gpu)
    )
    assert build_named(intent).text == text
    deployment = deployment_of(Document.parse(text))[0]
    assert [each for each in lint(text, deployment) if each.severity != "info"] == []


@pytest.mark.parametrize("script", ["recipes.py", "public_recipes.py"])
def test_what_is_written_from_the_recipes_is_up_to_date(script: str) -> None:
    """configs/, the chart's values and the table of differences from public recipes are current.

    The table explains every difference.
    """
    done = subprocess.run(
        [sys.executable, str(ROOT / "tools" / script), "--check"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def test_every_value_carries_its_reason() -> None:
    config = build_named(
        an_intent("nvidia/Kimi-K2.6-NVFP4", "1.3.0rc20", "nvidia/Kimi-K2.6-Eagle3", "throughput", 8)
    )
    lines = [
        line
        for line in config.text.splitlines()
        if not line.startswith("#") and not line.endswith(":")
    ]
    assert lines and all("  # " in line for line in lines)


def test_own_settings_are_written_and_judged() -> None:
    target = "nvidia/Kimi-K2.6-NVFP4"
    config = build_named(
        an_intent(
            target, "1.4.0rc1", settings=("kv_cache_config.dtype=fp8", "moe_config.backend=CUTLASS")
        )
    )
    assert config.values["kv_cache_config"] == {"dtype": "fp8"}
    assert config.values["moe_config"] == {"backend": "CUTLASS"}
    with pytest.raises(CheckFailed, match="TS-LINT-UNKNOWN-KEY"):
        build_named(an_intent(target, "1.3.0rc20", settings=("kv_cache_config.dtyp=fp8",)))
    for text in ("[" * 50_000, "!!float y", "&a [*a]", "\0"):
        with pytest.raises(UsageError, match="is not YAML"):
            build_named(an_intent(target, "1.4.0rc1", settings=(f"stream_interval={text}",)))
    for bad in ("max_batch_size=8", "nothing", "a b=1", "x=[1", "moe_config=1"):
        with pytest.raises((UsageError, CheckFailed)):
            build_named(an_intent(target, "1.3.0rc20", settings=(bad,)))


def test_helm_values_carry_the_same_file() -> None:
    intent = an_intent(
        "nvidia/Kimi-K2.6-NVFP4",
        "1.3.0rc20",
        "nvidia/Kimi-K2.6-Eagle3",
        "throughput",
        8,
        gpu="b200",
    )
    recipe = build_named(intent)
    values = yaml.safe_load(helm_values(recipe))
    assert values["engineConfig"] == recipe.text
    assert values["image"]["tag"] == "1.3.0rc20" and (values["nodes"], values["gpusPerNode"]) == (
        1,
        8,
    )
    assert values["gpuProduct"] == "B200" and values["model"]["sizeGiB"] == 560  # 554.3 + 5.6 GiB
    assert "computeDomain" not in values and "quantize" not in values


def test_helm_values_of_several_servers_and_of_a_job_that_makes_the_target() -> None:
    intent = an_intent(
        "nvidia/Kimi-K2.6-NVFP4",
        "1.3.0rc20",
        "nvidia/Kimi-K2.6-Eagle3",
        "throughput",
        8,
        gpu="gb200",
        nodes=2,
    )
    context, generation = (
        build_named(replace(intent, role=role)) for role in ("context", "generation")
    )
    values = yaml.safe_load(helm_values(context, generation))
    assert values["computeDomain"] == {"enabled": True} and "engineConfig" not in values
    for config in (context, generation):
        part = {"nodes": 2, "gpusPerNode": 4, "engineConfig": config.text}
        assert values["disaggregated"][config.intent.role] == part
        alone = yaml.safe_load(helm_values(config))
        assert alone["disaggregated"] == {config.intent.role: part}
    with pytest.raises(UsageError, match="the chart writes the front's file itself"):
        helm_values(build_named(replace(intent, role="front")))
    made = yaml.safe_load(helm_values(build_named(intent), quantize_from="moonshotai/Kimi-K2.6"))
    assert made["quantize"] == {"enabled": True, "source": "moonshotai/Kimi-K2.6", "sourceGiB": 555}
    assert made["cache"] == {"size": "1227Gi"}  # 1.1 x (560 + 555)


def test_one_server_over_several_nodes() -> None:
    intent = an_intent(
        "nvidia/Kimi-K2.6-NVFP4", "1.3.0rc20", None, "throughput", 8, gpu="gb200", nodes=2
    )
    recipe = build_named(intent)
    assert recipe.intent.gpus_per_node == 4
    assert yaml.safe_load(recipe.text)["allreduce_strategy"] == "MNNVL"
    assert "allreduce_strategy" not in yaml.safe_load(build_named(replace(intent, gpu="b200")).text)
    for bad in ({"nodes": 3}, {"nodes": 1}, {"experts_over": 3}, {"isl": 4}):
        with pytest.raises((UsageError, CheckFailed)):
            build_named(replace(intent, **bad))


def test_the_parts_of_a_disaggregated_deployment() -> None:
    intent = an_intent(
        "nvidia/Kimi-K2.6-NVFP4",
        "1.3.0rc20",
        "nvidia/Kimi-K2.6-Eagle3",
        gpu="gb200",
        isl=8192,
        osl=1024,
        concurrency=128,
        context_urls=("a:1", "b:1"),
        generation_urls=("c:2",),
    )
    texts = {name: build_named(item).text for name, item in disaggregated(intent).items()}
    prefill, decode, front = (
        yaml.safe_load(texts[name]) for name in ("context.yml", "generation.yml", "front.yml")
    )
    assert prefill["speculative_config"] == decode["speculative_config"]
    assert prefill["cache_transceiver_config"] == decode["cache_transceiver_config"]
    assert prefill["cuda_graph_config"] is None and prefill["disable_overlap_scheduler"] is True
    assert decode["cuda_graph_config"]["max_batch_size"] == 128
    assert front["context_servers"] == {"num_instances": 2, "urls": ["a:1", "b:1"]}
    assert front["generation_servers"] == {"num_instances": 1, "urls": ["c:2"]}
    for text in texts.values():
        again = parse_intent(text)
        assert again is not None and build_named(again).text == text
    judged = [lint(text, deployment_of(Document.parse(text))[0]) for text in texts.values()]
    assert {finding.severity for found in judged for finding in found} == {"info"}
    step = parse_intent(texts["generation.yml"])
    assert step is not None and step.tokens >= step.batch * (step.draft_len + 1)


INTENTS = st.builds(
    an_intent,
    st.sampled_from(
        ["nvidia/Kimi-K2.5-NVFP4", "nvidia/Kimi-K2-Thinking-NVFP4", "moonshotai/Kimi-K2-Instruct"]
    ),
    st.sampled_from(
        [
            "1.2.0",
            "1.2.1",
            "1.3.0rc5",
            "1.3.0rc12",
            "1.3.0rc16",
            "1.3.0rc20",
            "1.3.0rc21",
            "1.3.0rc29",
            "1.4.0rc1",
        ]
    ),
    st.sampled_from(
        [
            None,
            "nvidia/Kimi-K2.5-Eagle3",
            "lightseekorg/kimi-k2.5-eagle3",
            "lightseekorg/kimi-k2.6-eagle3.1-mla",
        ]
    ),
    st.sampled_from(["latency", "throughput"]),
    st.sampled_from([4, 6, 8, 16, 32]),
    draft_len=st.integers(1, 7),
    settings=st.sampled_from(
        [(), ("stream_interval=10",), ("kv_cache_config.free_gpu_memory_fraction=0.5",)]
    ),
    trust_remote_code=st.booleans(),
    gpu=st.sampled_from([None, "b200", "gb200", "b300", "h200"]),
    nodes=st.sampled_from([1, 2, 4]),
    role=st.sampled_from([None, "context", "generation", "front"]),
    spread_attention=st.sampled_from([None, True, False]),
    experts_over=st.sampled_from([None, 1, 4, 8]),
    isl=st.sampled_from([None, 1024, 100_000]),
    osl=st.sampled_from([None, 1024, 8192]),
    concurrency=st.sampled_from([None, 1, 100, 3000]),
    context_urls=st.sampled_from([(), ("a:1", "b-2.c:65535")]),
)


@given(intent=INTENTS)
@settings(max_examples=100)
def test_any_intent_is_refused_with_a_reason_or_written_clean_and_written_again(
    intent: Intent,
) -> None:
    try:
        recipe = build_named(intent)
    except (UsageError, CheckFailed) as refused:
        assert refused.message and (
            refused.remedy or "->" in refused.message or "error" in refused.message
        )
        return
    again = parse_intent(recipe.text)
    assert again is not None and again.command() == intent.command()
    assert build_named(again).text == recipe.text
    assert not set(intent.settings_in_argv()) & set(Document.parse(recipe.text).entries)
    assert "draft_len_schedule" not in recipe.text
    assert not [finding for finding in recipe.findings if finding.severity == "error"]
    if intent.role is None:
        values = yaml.safe_load(helm_values(recipe))
        assert (
            values["engineConfig"] == recipe.text
            and values["nodes"] * values["gpusPerNode"] == intent.tp_size
        )


OLD_LINES = [
    "nvidia/Kimi-K2.6-NVFP4 --head nvidia/Kimi-K2.6-Eagle3 --trtllm-version 1.3.0rc20 "
    "--goal latency --tp-size 4 --max-batch-size 32 --max-num-tokens 8192 --max-seq-len 8192 "
    "--draft-len 3 --gpu b200 --trust-remote-code",
    "nvidia/Kimi-K2.6-NVFP4 --trtllm-version 1.3.0rc20 --goal throughput --tp-size 8 "
    "--max-batch-size 128 --max-num-tokens 8192 --max-seq-len 8192 --nodes 2 --gpu gb200 "
    "--ep-size 8 --isl 4096 --osl 4096 --concurrency 1024 --attention-dp "
    "--set kv_cache_config.dtype=fp8 --set 'stream_interval=10' --trust-remote-code",
    "nvidia/Kimi-K2.6-NVFP4 --trtllm-version 1.3.0rc20 --goal latency --tp-size 4 "
    "--max-batch-size 32 --max-num-tokens 8192 --max-seq-len 8192 --format helm-values",
]


@pytest.mark.parametrize("words", OLD_LINES)
def test_a_first_line_written_before_still_parses(words: str) -> None:
    line = f"# TensorRT-LLM 1.3.0rc20: trtspec build-config {words}"
    intent = parse_intent(f"{line}\n")
    assert intent is not None and intent.version == "1.3.0rc20"
    assert intent.first_line() == line.replace("'", "")
    with pytest.raises(UsageError, match="does not parse"):
        parse_intent(f"{line} --no-such-option 3\n")


def test_the_front_of_before_still_parses() -> None:
    line = (
        "# TensorRT-LLM 1.3.0rc20: "
        "trtspec build-config nvidia/Kimi-K2.6-NVFP4 --trtllm-version 1.3.0rc20"
    )
    intent = parse_intent(
        f"{line} --goal latency --tp-size 4 --draft-len 3 --role front --context-url a:1 "
        "--context-url b:2\n"
    )
    assert intent is not None and (intent.role, intent.context_urls) == ("front", ("a:1", "b:2"))


def test_sizes_follow_the_workload() -> None:
    target = "nvidia/Kimi-K2.6-NVFP4"
    intent = an_intent(target, "1.4.0rc1", isl=100_000, osl=4_000, concurrency=20)
    assert (intent.seq_len, intent.batch, intent.tokens) == (104_000, 20, 8192)
    spread = replace(intent, tp_size=8, spread_attention=True)
    assert (spread.batch, spread.ep_size) == (3, 8) and build_named(spread).values[
        "enable_attention_dp"
    ] is True
    assert (
        "enable_attention_dp"
        not in build_named(replace(spread, goal="throughput", spread_attention=False)).values
    )
    own = build_named(
        replace(intent, role="context", settings=("cuda_graph_config.max_batch_size=4",))
    ).values
    assert own["cuda_graph_config"] == {"max_batch_size": 4}
    assert (
        build_named(replace(intent, settings=("cuda_graph_config=null",))).values[
            "cuda_graph_config"
        ]
        is None
    )


def test_what_does_not_fit_is_refused() -> None:
    card = an_intent("nvidia/Kimi-K2.6-NVFP4", "1.3.0rc20", "nvidia/Kimi-K2.6-Eagle3", gpu="b200")
    assert "holds 96 requests of 8,192 tokens" in build_named(card).text
    with pytest.raises(CheckFailed, match="do not fit on 2 x B200"):
        build_named(replace(card, tp_size=2))
    assert "fewer than a full batch" in build_named(replace(card, max_seq_len=131072)).text


def test_a_default_length_fits_the_model_and_a_typed_one_is_judged() -> None:
    target = "nvidia/Kimi-K2.6-NVFP4"
    assert an_intent(target, "1.4.0rc1").fitted(2048).seq_len == 2048
    assert an_intent(target, "1.4.0rc1").fitted(262144).seq_len == 8192
    with pytest.raises(CheckFailed, match="TS-ROUTE-LENGTH"):
        build_named(an_intent(target, "1.4.0rc1", max_seq_len=300000).fitted(262144))
