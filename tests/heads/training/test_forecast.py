"""The recipes of published heads, and what their runs would cost: counts against published ones."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest

from trtspec.checkpoint.hub import resolve
from trtspec.cli.train import TrainCommand, curve_options, with_file
from trtspec.data_files import gpu_spec
from trtspec.errors import UsageError
from trtspec.heads.training.forecast import UsersCommand, decoded_layer_bytes, forecast, forward_flops
from trtspec.heads.training.options import InMemory, TrainingRecipe, TrainOptions, feature_source
from trtspec.heads.training.plan import plan_without_data
from trtspec.heads.training.processes import TrainingNodes

RECIPES = sorted((Path(__file__).parents[3] / "configs" / "train").glob("*.yaml"))


def forecast_of(path: Path, gpu: str = "b200", cluster: TrainingNodes = TrainingNodes(1, 8)) -> tuple[dict, dict]:
    typed, recipe, _ = with_file(TrainCommand(output=Path("head"), config=path))
    options = curve_options(typed)
    resolved = resolve(typed.target, allow_download=False)
    spec = resolved.target_spec()
    plan = plan_without_data(spec, options, recipe, Path(*typed.data), feature_source(typed.features))
    command = UsersCommand(typed.target, *typed.data, lambda **changes: [typed.target, *map(str, changes.values())])
    return plan.to_dict(), forecast(plan, spec, options, resolved.known["bytes"], gpu_spec(gpu), cluster, command)


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_is_read_and_reckoned_without_target_or_data(path):
    plan, costs = forecast_of(path)
    assert plan["samples"] == 112_000
    assert plan["aux_layers"] == [1, 29, 57]
    assert plan["feature_bytes"] == 112_000 * 2000 * 4 * 7168 * 2  # the 13 TB of a real run
    assert plan["parameters"] - 1_841_199_104 == (3 * 7168 if plan["eagle"] == "3.1" else 0)  # NVIDIA's MLA layout
    assert costs["phases"]["training"]["peak_bytes"] < 0.9 * 183359 * 2**20
    assert costs["ways"]["dumps"]["disk_bytes"] == plan["feature_bytes"]
    assert not costs["ways"]["online"]["possible"]
    assert costs["ways"]["stream"]["possible"]
    assert "--aux-layers 1,29,57" in costs["dump_commands"]["trtllm"]
    line = shlex.split(costs["server_commands"]["vllm"])
    capture = json.loads(line[line.index("--speculative-config") + 1])["draft_model_config"]["hf_config"]
    assert capture == {"eagle_aux_hidden_state_layer_ids": [2, 30, 58, 61]}  # layers that ran, of 61
    assert json.loads(line[line.index("--kv-transfer-config") + 1])["kv_role"] == "kv_producer"


@pytest.mark.parametrize(
    ("gpu", "cluster"), [("h200", TrainingNodes(2, 8)), ("b200", TrainingNodes(1, 8)), ("gb200", TrainingNodes(4, 4))]
)
@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_team_of_sixteen_gpus_or_eight_sees_ranges(path, gpu, cluster):
    """Every hour is a range whose assumption is named, beside the published run on 32 GPUs."""
    _, costs = forecast_of(path, gpu, cluster)
    assert costs["published"]["gpu_hours"] == 32 * 14
    assert set(costs["assumptions"]) >= {"training", "states", "answers", "reading"}
    for name in ("stream", "dumps", "server"):
        way = costs["ways"][name]
        if not way["possible"]:
            assert (name, gpu) == ("server", "b200") or "GPUs" in way["why"]
            continue
        for least, most in way["hours"].values():
            assert 0 < least < most
        assert way["hours"]["total"][0] >= way["hours"]["training"][0]
        assert way["training_gpus"] <= 8  # a batch has 8 rows
    assert costs["ways"]["online"]["why"].startswith("one GPU would have to hold")
    assert costs["storage"]["state_bytes_per_token"] == 4 * 7168 * 2
    low, high = costs["ways"]["stream"]["host_bytes_per_node"]
    assert high == 2 * low == 2 * min(8, cluster.gpus_per_node) * costs["storage"]["decoded_layer_bytes"][0]


def test_a_cluster_that_is_too_small_is_told_by_way():
    _, costs = forecast_of(RECIPES[0], "b200", TrainingNodes(1, 2))
    assert "it needs 4 GPUs, the cluster has 2" in costs["ways"]["dumps"]["why"]
    assert "it needs" in costs["ways"]["server"]["why"]
    assert not costs["ways"]["stream"]["possible"]  # seven training-time-test steps of 8 x 4096 tokens need 4 GPUs


def test_a_decoded_layer_is_34_gigabytes():
    """384 experts of three 7168 x 2048 matrices in bfloat16, and what stands beside them."""
    spec = resolve("moonshotai/Kimi-K2.5", allow_download=False).target_spec()
    assert decoded_layer_bytes(spec) == pytest.approx(384 * 3 * 7168 * 2048 * 2, rel=0.02)
    assert 34e9 < decoded_layer_bytes(spec) < 34.2e9


def test_the_active_weights_are_the_published_32_billion():
    """Kimi-K2's card: 32 B activated parameters, embeddings and lm_head (2.3 B) among them."""
    spec = resolve("moonshotai/Kimi-K2.5", allow_download=False).target_spec()
    assert forward_flops(spec, 0) / 2 == pytest.approx(32e9 - 1.17e9, rel=0.03)


def test_without_counts_a_target_elsewhere_cannot_be_reckoned():
    spec = resolve("moonshotai/Kimi-K2.5", allow_download=False).target_spec()
    with pytest.raises(UsageError, match="cannot be counted"):
        plan_without_data(spec, TrainOptions(), TrainingRecipe(), Path("answers.jsonl"), InMemory())
