"""Converted heads in the projects' own classes: their config loads, their modules take every tensor, and compute ours.

transformers and ModelOpt are installed with trtspec. speculators is tested where it is installed. TorchSpec, SpecForge
and SafeAILab's EAGLE are no packages: TRTSPEC_UPSTREAM_SOURCES names a directory with checkouts called TorchSpec,
SpecForge and EAGLE; without it those tests are skipped.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.heads.convert.foreign_heads import write_head
from trtspec.checkpoint.hub import resolve
from trtspec.heads.convert.conversion import Options, convert_head
from trtspec.models.head_weights import load_head
from trtspec.models.weights import load_target

KINDS = [("mha", "3", None), ("mha", "3", 128), ("mha", "3.1", 128), ("mla", "3", None)]


def converted(room: Path, target_dir: Path, to: str, kind: tuple[Any, ...], theta: float | None = None) -> Path:
    attention, eagle, vocab = kind
    source = write_head(room / "source", target_dir, "modelopt", attention=attention, eagle=eagle, draft_vocab=vocab)
    options = Options(to, rope_theta=theta)
    result = convert_head(resolve(str(source)), room / to, options, resolve(str(target_dir)))
    assert result["output"], result["problems"]
    return room / to


def inputs() -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    return torch.randn(1, 9, 3 * 64), torch.randint(0, 512, (1, 9))


def ours(path: Path, target_dir: Path) -> torch.Tensor:
    """Our logits of the first draft step, float32 [1, 9, Vd]."""
    states, tokens = inputs()
    head = load_head(path, load_target(target_dir, dtype=torch.float32), dtype=torch.float32)
    return head.logits(head(head.fuse(states), tokens, None, None)[1])


def floats(path: Path) -> dict[str, torch.Tensor]:
    tensors = load_file(path / "model.safetensors")
    return {name: value.float() if value.is_floating_point() else value for name, value in tensors.items()}


def causal(length: int) -> torch.Tensor:
    return torch.full((1, 1, length, length), torch.finfo(torch.float32).min).triu(1)


@pytest.mark.parametrize("to", ["trtllm", "vllm", "sglang", "torchspec"])
@pytest.mark.parametrize("attention", ["mha", "mla"])
def test_transformers_reads_every_config(tmp_path: Path, target_dir: Path, to: str, attention: str) -> None:
    from transformers import DeepseekV3Config, LlamaConfig

    path = converted(tmp_path, target_dir, to, (attention, "3", 128))
    read = (LlamaConfig if attention == "mha" else DeepseekV3Config).from_pretrained(path)
    assert (read.hidden_size, read.vocab_size, read.draft_vocab_size, read.num_hidden_layers) == (64, 512, 128, 1)
    assert read.rope_parameters["rope_theta"] == (10000.0 if attention == "mha" else 50000.0)
    assert read.rope_parameters["rope_type"] == ("default" if attention == "mha" else "yarn")
    if attention == "mla":
        assert read.rope_parameters["factor"] == 4.0
    assert read.dtype == torch.bfloat16


@pytest.mark.slow
@pytest.mark.parametrize("attention", ["mha", "mla"])
def test_modelopt_exports_the_same_names(tmp_path: Path, target_dir: Path, attention: str) -> None:
    """ModelOpt's exporter names what a head must hold and admits only d2t and lm_head beside it."""
    path = converted(tmp_path, target_dir, "trtllm", (attention, "3", 128))
    name = "LLAMA" if attention == "mha" else "KIMIK2"
    script = (
        "import json, modelopt.torch.export.plugins.hf_spec_export as export\n"
        f"print(json.dumps(sorted(export.{name}_EAGLE_SINGLE_LAYER['required'])))\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    required = {f"{name}.weight" for name in json.loads(done.stdout.strip().splitlines()[-1])}
    assert set(load_file(path / "model.safetensors")) == required | {"lm_head.weight", "d2t"}


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind[0] == "mha"], ids=str)
def test_speculators_computes_the_same(tmp_path: Path, target_dir: Path, kind: tuple[Any, ...]) -> None:
    pytest.importorskip("speculators")
    from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig

    path = converted(tmp_path, target_dir, "speculators", kind)
    config = Eagle3SpeculatorConfig.from_pretrained(path)
    assert config.eagle_aux_hidden_state_layer_ids == [2, 4, 5]
    config.transformer_layer_config._attn_implementation = "eager"
    model = Eagle3DraftModel(config).float()
    missing, unexpected = model.load_state_dict(floats(path), strict=False)
    assert not unexpected
    assert {name.partition(".")[0] for name in missing} <= {"verifier_norm", "verifier_lm_head", "d2t", "t2d"}
    states, tokens = inputs()
    if model.fc_norm is not None:
        states = torch.cat([norm(part) for norm, part in zip(model.fc_norm, states.chunk(3, -1), strict=True)], -1)
    both = torch.cat((model.embed_tokens(tokens), model.fc(states)), -1)
    positions = torch.arange(9)[None]
    hidden = model.layers[0](
        both, attention_mask=causal(9), position_ids=positions, position_embeddings=model.rotary_emb(both, positions)
    )
    assert torch.allclose(model.lm_head(model.norm(hidden)), ours(path, target_dir), atol=1e-4)


def upstream(project: str, package: str, *folders: str) -> str:
    """Makes `package` importable from a checkout without its __init__ files running; returns the checkout."""
    place = Path(os.environ.get("TRTSPEC_UPSTREAM_SOURCES", "")) / project
    if not os.environ.get("TRTSPEC_UPSTREAM_SOURCES") or not place.is_dir():
        pytest.skip(f"TRTSPEC_UPSTREAM_SOURCES names no checkout of {project}")
    for name in ("", *folders):
        module = ModuleType(".".join((package, name)).rstrip("."))
        module.__path__ = [str(place / package / name.replace(".", "/"))]
        sys.modules.setdefault(module.__name__, module)
    return str(place)


def test_torchspec_computes_the_same_mla(tmp_path: Path, target_dir: Path) -> None:
    """With rope base 10000 in both: its MLA layer computes that whatever the config says."""
    upstream("TorchSpec", "torchspec", "models", "models.draft", "models.ops", "utils")
    sys.modules.setdefault("torchspec.utils.wandb", ModuleType("torchspec.utils.wandb"))  # a service it reports to
    from transformers import DeepseekV3Config

    draft = importlib.import_module("torchspec.models.draft.deepseek_eagle")
    path = converted(tmp_path, target_dir, "torchspec", ("mla", "3", 128), theta=10000.0)
    model = draft.Eagle3DeepseekV2ForCausalLM(DeepseekV3Config.from_pretrained(path)).float()
    model.load_state_dict(floats(path), strict=True)
    states, tokens = inputs()
    hidden, *_ = model.backbone(
        model.embed_input_ids(tokens), model.project_hidden_states(states), causal(9), torch.arange(9)[None]
    )
    assert torch.allclose(model.compute_logits(hidden), ours(path, target_dir), atol=1e-4)


def test_specforge_computes_the_same(tmp_path: Path, target_dir: Path) -> None:
    upstream("SpecForge", "specforge", "modeling", "modeling.draft")
    from transformers import LlamaConfig

    draft = importlib.import_module("specforge.modeling.draft.llama3_eagle")
    path = converted(tmp_path, target_dir, "specforge", ("mha", "3", 128))
    model = draft.LlamaForCausalLMEagle3(LlamaConfig.from_pretrained(path), attention_backend="sdpa").float()
    model.load_state_dict(floats(path), strict=True)
    states, tokens = inputs()
    hidden = model.backbone(
        model.embed_input_ids(tokens), model.project_hidden_states(states), [[], []], causal(9), torch.arange(9)[None]
    )
    assert torch.allclose(model.compute_logits(hidden), ours(path, target_dir), atol=1e-4)


def test_safeailab_computes_the_same(tmp_path: Path, target_dir: Path) -> None:
    place = upstream("EAGLE", "eagle", "model")
    from transformers import LlamaConfig

    nets = importlib.import_module("eagle.model.cnets")
    assert place in str(nets.__file__)
    path = converted(tmp_path, target_dir, "safeailab", ("mha", "3", 128))
    config = LlamaConfig.from_pretrained(path)
    config.pretraining_tp, config.rope_scaling = 1, None  # as its own config class has them
    config.rope_theta = 10000.0
    model = nets.Model(config).float()
    missing, unexpected = model.load_state_dict(floats(path), strict=False)
    assert (missing, unexpected) == (["embed_tokens.weight"], [])
    model.embed_tokens.weight.data = load_target(target_dir, dtype=torch.float32).embed.weight.data
    states, tokens = inputs()
    hidden = model(states, tokens)
    assert torch.allclose(model.lm_head(model.norm(hidden)), ours(path, target_dir), atol=1e-4)
