"""The recipes of published heads, and what their runs would cost: counts against published ones."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest

from trtspec.checkpoint.hub import resolve
from trtspec.data_files import gpu_spec
from trtspec.errors import UsageError
from trtspec.heads.training.forecast import forecast, forward_flops
from trtspec.heads.training.options import InMemory, TrainingRecipe, feature_source, read_options, read_recipe
from trtspec.heads.training.plan import plan_without_data

RECIPES = sorted((Path(__file__).parents[3] / "configs" / "train").glob("*.yaml"))


def forecast_of(path: Path) -> tuple[dict, dict]:
    recipe, options = read_recipe(path), read_options(path, {})
    resolved = resolve(recipe.target, allow_download=False)
    spec = resolved.target_spec()
    plan = plan_without_data(spec, options, recipe, Path(recipe.data), feature_source(recipe.features))
    return plan.to_dict(), forecast(plan, spec, options, resolved.known["bytes"], gpu_spec("b200"), recipe.target)


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_is_read_and_reckoned_without_target_or_data(path):
    plan, costs = forecast_of(path)
    assert plan["samples"] == 112_000
    assert plan["aux_layers"] == [1, 29, 57]
    assert plan["feature_bytes"] == 112_000 * 2000 * 4 * 7168 * 2  # the 13 TB of a real run
    assert plan["parameters"] - 1_841_199_104 == (3 * 7168 if plan["eagle"] == "3.1" else 0)  # NVIDIA's MLA layout
    assert costs["head_training"]["peak_bytes"] < 0.9 * 183359 * 2**20
    assert costs["ways"]["dumps"]["disk_bytes"] == plan["feature_bytes"]
    assert not costs["ways"]["online"]["possible"]
    assert costs["ways"]["stream"]["possible"]
    assert "--aux-layers 1,29,57" in costs["dump_commands"]["trtllm"]
    line = shlex.split(costs["server_commands"]["vllm"])
    capture = json.loads(line[line.index("--speculative-config") + 1])["draft_model_config"]["hf_config"]
    assert capture == {"eagle_aux_hidden_state_layer_ids": [2, 30, 58, 61]}  # layers that ran, of 61
    assert json.loads(line[line.index("--kv-transfer-config") + 1])["kv_role"] == "kv_producer"


def test_the_active_weights_are_the_published_32_billion():
    """Kimi-K2's card: 32 B activated parameters, embeddings and lm_head (2.3 B) among them."""
    spec = resolve("moonshotai/Kimi-K2.5", allow_download=False).target_spec()
    assert forward_flops(spec, 0) / 2 == pytest.approx(32e9 - 1.17e9, rel=0.03)


def test_without_counts_a_target_elsewhere_cannot_be_reckoned():
    spec = resolve("moonshotai/Kimi-K2.5", allow_download=False).target_spec()
    with pytest.raises(UsageError, match="cannot be counted"):
        plan_without_data(spec, read_options(None, {}), TrainingRecipe(), Path("answers.jsonl"), InMemory())
