"""The recipes of published heads, and what their runs need: counts against published ones."""

import json
import shlex
from dataclasses import replace
from pathlib import Path

import pytest

from trtspec.checkpoint.hub import resolve
from trtspec.cli.train import TrainCommand, with_file
from trtspec.errors import UsageError
from trtspec.heads.training.loop import CHUNK_ELEMENTS, LOGIT_BYTES
from trtspec.heads.training.needs import decoded_layer_bytes, needs, training_bytes
from trtspec.heads.training.train_options import TrainingRecipe, TrainOptions, feature_source
from trtspec.heads.training.training_plan import plan_without_data
from trtspec.records import fill
from trtspec.specs import gpu_spec

RECIPES = sorted((Path(__file__).parents[3] / "configs" / "train").glob("*.yaml"))


@pytest.mark.parametrize(("gpu", "holding"), [("h200", 8), ("b200", 4), ("gb200", 4)])
@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_is_read_and_reckoned_without_target_or_data(path, gpu, holding):
    typed, recipe, _ = with_file(TrainCommand(output=Path("head"), config=path))
    options = fill(TrainOptions, typed, aux_layers=typed.aux_layers.values)
    resolved = resolve(typed.target, weights=False)
    spec, data = resolved.target_spec(), str(*typed.data)
    sizes = plan_without_data(spec, options, recipe, data, feature_source(typed.features))
    plan = sizes.to_dict()
    found = needs(sizes, spec, options, resolved.known.bytes, gpu_spec(gpu), typed.target, data)
    assert (plan["samples"], plan["aux_layers"]) == (112_000, [1, 29, 57])
    assert plan["feature_bytes"] == 112_000 * 2000 * 4 * 7168 * 2  # the 13 TB of a real run
    assert plan["parameters"] - 1_841_199_104 == (
        3 * 7168 if plan["eagle"] == "3.1" else 0
    )  # NVIDIA's MLA layout
    assert found["storage"]["state_bytes_per_token"] == 4 * 7168 * 2
    training, ways = found["phases"]["training"], found["ways"]
    assert (
        training["peak_bytes"] < 0.9 * gpu_spec(gpu).memory_bytes and training["least_gpus"] <= 8
    )  # rows of a batch
    assert (
        ways["online"]["why"].startswith("one GPU would have to hold")
        and not ways["online"]["possible"]
    )
    assert all(ways[name]["possible"] for name in ("stream", "dumps", "server"))
    small = needs(
        sizes,
        spec,
        options,
        resolved.known.bytes,
        replace(gpu_spec(gpu), memory_bytes=2**30),
        "x",
        data,
    )
    assert not any(
        way["possible"] for way in small["ways"].values()
    )  # not the head with one sequence either
    assert ways["dumps"]["disk_bytes"] == plan["feature_bytes"]
    assert ways["server"]["gpus"] == holding + training["least_gpus"]
    assert ways["stream"]["peak_bytes"] >= found["storage"]["decoded_layer_bytes"][1]
    trtllm = found["dump_commands"]["trtllm"]
    refused = (
        gpu == "h200" or spec.quant.format == "int4"
    )  # as plan says: no FP4 on Hopper, no INT4 anywhere
    assert trtllm.startswith("# ") if refused else "--aux-layers 1,29,57" in trtllm
    line = shlex.split(found["server_commands"]["vllm"])
    capture = json.loads(line[line.index("--speculative-config") + 1])["draft_model_config"][
        "hf_config"
    ]
    assert capture == {
        "eagle_aux_hidden_state_layer_ids": [2, 30, 58, 61]
    }  # layers that ran, of 61
    assert json.loads(line[line.index("--kv-transfer-config") + 1])["kv_role"] == "kv_producer"


def test_a_decoded_layer_is_34_gigabytes():
    """384 experts of three 7168 x 2048 matrices in bfloat16, and what stands beside them."""
    spec = resolve("moonshotai/Kimi-K2.5", weights=False).target_spec()
    assert decoded_layer_bytes(spec) == pytest.approx(384 * 3 * 7168 * 2048 * 2, rel=0.02)
    assert 34e9 < decoded_layer_bytes(spec) < 34.2e9


def test_without_counts_a_target_elsewhere_cannot_be_reckoned():
    spec = resolve("moonshotai/Kimi-K2.5", weights=False).target_spec()
    with pytest.raises(UsageError, match="cannot be counted"):
        plan_without_data(
            spec, TrainOptions(), TrainingRecipe(), Path("answers.jsonl"), feature_source("memory")
        )


def test_a_longer_sequence_needs_no_more_logits():
    """A longer sequence adds layer activations and no logits, which the loop computes by chunk.

    A chunk's are 3.8 GB over the whole vocabulary.
    """
    spec = resolve("moonshotai/Kimi-K2.5", weights=False).target_spec()
    counts, source = TrainingRecipe(samples=100, mean_tokens=100), feature_source("memory")
    peaks = []
    for length in (2048, 4096, 8192):
        options = TrainOptions(seq_len=length)
        plan = plan_without_data(spec, options, counts, "answers.jsonl", source)
        peaks.append(training_bytes(plan, spec, options, rows=8))
    assert peaks[2] - peaks[1] == 2 * (peaks[1] - peaks[0]) == 8 * 4096 * 2 * 24 * 3 * 7168
    assert LOGIT_BYTES * CHUNK_ELEMENTS["cuda"] == pytest.approx(3.76e9, rel=0.01)
