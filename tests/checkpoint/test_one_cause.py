"""One cause gives one finding with the right remedy.

Causes: absent towers, renamed tensors, misplaced heads.
"""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.command_line import trtspec
from tests.tiny import make_head, make_target, write_json
from trtspec.checkpoint.conversations import read_conversations
from trtspec.checkpoint.headers import Checkpoint
from trtspec.checkpoint.heads.pairing import pair_problems
from trtspec.checkpoint.heads.problems import uncomputed
from trtspec.checkpoint.heads.read import read_head
from trtspec.checkpoint.target_problems import read_target
from trtspec.checkpoint.values import compare_embeddings
from trtspec.errors import TrtspecError
from trtspec.heads.training.training_plan import check_initial

WEIGHTS = "model.safetensors"


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("whole") / "target"
    return make_target(path, format="int4", layers=3, shards=1, vision=True)


def without(part: str):
    return lambda name: None if part in name else name


def renaming(*pairs: tuple[str, str]):
    def rename(name: str) -> str:
        for old, new in pairs:
            name = name.replace(old, new) if name.startswith(old) else name
        return name

    return rename


def of_transformers_5(name: str) -> str:
    name = name.replace("vision_tower.encoder.blocks", "model.vision_tower.layers")
    return name.replace("mlp.fc1", "mlp.fc2").replace("mlp.fc0", "mlp.fc1")


CASES = {
    "no tower": (without("vision_tower"), "TS-TARGET-VISION", "17, first vision_tower"),
    "no projector": (without("mm_projector"), "TS-TARGET-VISION", "6, first mm_projector"),
    "no bias": (without("blocks.0.wqkv.bias"), "TS-TARGET-VISION", "blocks.0.wqkv.bias"),
    "a renamed tower": (of_transformers_5, "TS-TARGET-VISION", "have other names"),
    "a renamed model": (
        renaming(
            ("language_model.model.", "model.language_model."),
            ("language_model.lm_head", "lm_head"),
        ),
        "TS-TARGET-TENSOR-UNKNOWN",
        "another prefix than language_model.model.",
    ),
    "no prefix": (renaming(("language_model.", "")), "TS-TARGET-TENSOR-UNKNOWN", "another prefix"),
}


@pytest.mark.parametrize(("rename", "code", "says"), CASES.values(), ids=CASES)
def test_names_that_one_cause_explains_are_one_finding(tmp_path, whole, rename, code, says):
    path = shutil.copytree(whole, tmp_path / "target")
    assert not read_target(path).problems
    tensors = {rename(name): value for name, value in load_file(path / WEIGHTS).items()}
    tensors.pop(None, None)
    save_file(tensors, path / WEIGHTS)
    (problem,) = read_target(path).problems
    assert (problem.code, problem.severity) == (code, "error")
    assert says in problem.message
    done = trtspec("quantize", path, "-o", tmp_path / "out", "--dry-run")
    assert done.status == 1 and code in done.stderr


def test_a_tower_has_the_shapes_of_vision_config(tmp_path, whole):
    path = shutil.copytree(whole, tmp_path / "target")
    config = json.loads((path / "config.json").read_text())
    config["vision_config"]["vt_intermediate_size"] += 1
    write_json(path / "config.json", config)
    (problem,) = read_target(path).problems
    assert (problem.code, "config.json needs" in problem.message) == ("TS-TARGET-SHAPE", True)


def test_a_head_in_place_of_a_target_is_called_a_head(tmp_path):
    target = make_target(tmp_path / "target", layers=3)
    head = make_head(tmp_path / "head", target)
    for words in (("quantize", head, "-o", tmp_path / "out"), ("serve", head, "--dry-run")):
        done = trtspec(*words)
        assert done.status != 0 and "is a draft head, not a target" in done.stderr
    done = trtspec("convert", target, "-o", tmp_path / "out", "--to", "vllm")
    assert done.status != 0 and "whole model" in done.stderr


def test_another_scheme_of_the_same_tool_is_no_broken_one(tmp_path, whole):
    path = shutil.copytree(whole, tmp_path / "target")
    config = json.loads((path / "config.json").read_text())
    config["text_config"]["quantization_config"]["format"] = "nvfp4-pack-quantized"
    write_json(path / "config.json", config)
    with pytest.raises(TrtspecError, match="nvfp4-pack-quantized") as refused:
        read_target(path)
    assert refused.value.code == "TS-TARGET-FORMAT-UNKNOWN"
    done = trtspec("inspect", path)
    assert "trtspec inspect" not in done.stderr.rpartition("->")[2]


def test_a_warning_of_the_scheme_does_not_hide_what_cannot_be_read(tmp_path):
    path = make_target(tmp_path, format="nvfp4", nested=False, layers=3)
    write_json(path / "config.json", {"model_type": "kimi_k2"})
    with pytest.raises(TrtspecError, match=r"config.json has no key"):
        read_target(path)


def test_a_remedy_states_no_figure_that_nobody_measured(tmp_path, whole):
    head, _ = read_head(Checkpoint.open(make_head(tmp_path / "head", whole)))
    target = read_target(whole).spec
    for layers in (tuple(layer + 1 for layer in target.default_aux_layers), None):
        problems = pair_problems(replace(head, aux_layers=layers), target)
        assert problems and all("near 1.0" not in problem.remedy for problem in problems)


def test_another_version_of_the_producer_is_no_disagreement(tmp_path):
    path = make_target(tmp_path / "target", format="nvfp4", layers=3)
    stated = json.loads((path / "hf_quant_config.json").read_text())
    stated["producer"] = {"name": "modelopt", "version": "0.45.0"}
    write_json(path / "hf_quant_config.json", stated)
    assert not read_target(path).problems


def test_an_embedding_stored_in_another_type_is_the_same():
    theirs = torch.randn(64, 32).mul(1e-4).to(torch.bfloat16)
    for ours in (theirs.to(torch.float16), theirs.to(torch.float32)):
        assert not compare_embeddings(ours.double().numpy(), theirs.double().numpy())
    trained = theirs.double().numpy() * np.linspace(0.9, 1.1, 32)
    assert compare_embeddings(trained, theirs.double().numpy())[0].code == "TS-PAIR-EMBED-TRAINED"


def test_turns_of_aiperf_are_questions(tmp_path, capsys):
    path = tmp_path / "turns.jsonl"
    turns = [{"text": "one"}, {"text": "two", "delay": 5}]
    path.write_text(json.dumps({"session_id": "s", "turns": turns}) + "\n")
    (conversation,) = read_conversations(path)
    assert [message["content"] for message in conversation.messages] == ["one", "two"]
    assert conversation.id == "s" and "turns[].delay (1)" in capsys.readouterr().err


LEVELS = {
    "num_hidden_layers": 4,
    "hidden_size": 65,
    "vocab_size": 9,
    "rope_theta": 1.0,
    "num_experts_per_tok": 3,
}


@pytest.mark.parametrize(("key", "value"), LEVELS.items())
def test_two_levels_of_a_config_are_one_statement(tmp_path, whole, key, value):
    path = shutil.copytree(whole, tmp_path / "target")
    config = json.loads((path / "config.json").read_text())
    write_json(path / "config.json", config | {key: config["text_config"][key]})
    assert not read_target(path).problems
    write_json(path / "config.json", config | {key: value})
    (problem,) = read_target(path).problems
    assert (problem.severity, problem.where) == ("error", f"config.json: {key}")
    assert "at the top level and" in problem.message


UNCOMPUTED = {
    "sliding_window": {"sliding_window": 2048},
    "layer_types": {"layer_types": ["sliding_attention"]},
    "mla_use_nope": {"mla_use_nope": True},
    "parallel_drafting": {"parallel_drafting": True},
    "parallel_draft_step": {"eagle_config": {"parallel_draft_step": 4}},
}  # fmt: skip


@pytest.mark.parametrize(("key", "change"), UNCOMPUTED.items())
def test_a_function_that_is_not_computed_here_is_refused_where_it_would_be(tmp_path, key, change):
    """A warning where the head is only read or served by others."""
    from trtspec.models.head_weights import load_head
    from trtspec.models.weights import load_target

    target = make_target(tmp_path / "target", layers=7)
    head = make_head(tmp_path / "head", target)
    config = json.loads((head / "config.json").read_text())
    for other in ({"sliding_window": 2048, "use_sliding_window": False}, {"sliding_window": None}):
        write_json(head / "config.json", config | other)
        assert not uncomputed(config | other)
    nested = config["eagle_config"] | change.get("eagle_config", {})
    write_json(head / "config.json", config | change | {"eagle_config": nested})
    (problem,) = [p for p in read_head(Checkpoint.open(head))[1] if key in p.where]
    assert (problem.code, problem.severity) == ("TS-HEAD-FUNCTION", "warning")
    assert any(engine in problem.message for engine in ("vLLM", "no engine is known"))
    with pytest.raises(TrtspecError, match=f"`{key}: "):
        load_head(head, load_target(target, dtype=torch.float32))
    with pytest.raises(TrtspecError, match=f"`{key}: "):
        check_initial(head, read_head(Checkpoint.open(head))[0])
