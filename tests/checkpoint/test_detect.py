"""Targets and heads told apart, described, and their faults found."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.json_files import edit_json
from tests.tiny import make_target, read_tensors
from trtspec.checkpoint.describe import describe
from trtspec.checkpoint.hub import resolve
from trtspec.checkpoint.target_problems import config_kind, read_target
from trtspec.errors import TrtspecError


def edit_shard(path: Path, change) -> None:
    """Rewrites the single-file checkpoint after `change(tensors)`."""
    file = path / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, {"format": "pt"})


@pytest.mark.parametrize("format", ["bf16", "int4", "fp8-block", "nvfp4"])
@pytest.mark.parametrize("nested", [True, False])
def test_every_format_is_recognised_and_clean(tmp_path: Path, format: str, nested: bool) -> None:
    """The formats hold the same weights, so they count the same parameters as BF16 has elements."""
    path = make_target(tmp_path / "it", format=format, nested=nested, vision=nested)
    facts = describe(resolve(str(path))).to_dict()
    kind, model_type = "target", "kimi_k25" if nested else "kimi_k2"
    assert (facts["kind"], facts["format"], facts["model_type"]) == (kind, format, model_type)
    assert facts["problems"] == []
    plain = read_tensors(make_target(tmp_path / "plain", nested=nested, vision=nested, shards=1))
    assert facts["parameters"] == sum(tensor.numel() for tensor in plain.values())


def test_other_models_are_refused_by_name() -> None:
    with pytest.raises(TrtspecError, match="'qwen3'"):
        config_kind({"model_type": "qwen3", "num_hidden_layers": 36}, "some/model")


def test_missing_companion_files_are_warnings(tmp_path: Path) -> None:
    path = make_target(tmp_path)
    (path / "tiktoken.model").unlink()
    (path / "chat_template.jinja").unlink()
    code = {"AutoConfig": "configuration_kimi_k25.KimiK25Config"}
    edit_json(path / "config.json", auto_map=code)
    assert [problem.code for problem in read_target(path).problems] == [
        "TS-TARGET-TOKENIZER",
        "TS-TARGET-TEMPLATE",
        "TS-CODE-ABSENT",
    ]


def test_half_precision_files_are_counted_by_dtype(tmp_path: Path) -> None:
    path = make_target(tmp_path, shards=1)
    name = "language_model.lm_head.weight"
    edit_shard(path, lambda t: t.update({name: t[name].to(torch.float16)}))
    report = describe(resolve(str(path)))
    assert report.dtypes is not None and report.dtypes["F16"] == 512 * 64 * 2
    assert sum(report.dtypes.values()) == report.bytes
