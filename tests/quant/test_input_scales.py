"""A scale file is bound to its source: quantize refuses it for every other one, by name."""

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.json_files import read_json, write_json
from tests.quant.scale_files import write_scales
from tests.tiny import make_target
from trtspec.checkpoint.headers import Checkpoint
from trtspec.checkpoint.identity import MODEL, identity
from trtspec.errors import TrtspecError, UsageError
from trtspec.quant.conversion_plan import ConversionOptions
from trtspec.quant.policy import load_policy
from trtspec.quant.run import QuantizePlan, quantize_checkpoint
from trtspec.report import OutputOptions

K26 = load_policy("k2.6")


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    return make_target(
        tmp_path_factory.mktemp("in") / "Kimi-K2.6", format="int4", layers=3, shards=2
    )


def entries(source: Path) -> dict[str, torch.Tensor]:
    stems = {
        name.rpartition(".")[0]
        for name in Checkpoint.open(source).tensors
        if ".mlp.experts." in name
    }
    return {f"{stem}.input_scale": torch.tensor(0.5) for stem in stems}


def plan(source: Path, scales: Path) -> QuantizePlan:
    options = ConversionOptions(input_scales=scales)
    return quantize_checkpoint(
        source, scales.parent / "out", K26, options, OutputOptions(dry_run=True)
    )


def changed(source: Path, to: Path, how: str) -> Path:
    """A copy of the source that is another model, but for its name."""
    shutil.copytree(source, to / source.name)
    path = sorted((to / source.name).glob("*.safetensors"))[0]
    tensors = load_file(path)
    if how == "a weight":
        for name in (name for name in tensors if name.endswith("weight_packed")):
            tensors[name].view(-1).view(torch.uint8)[0] ^= 1
    elif how == "a dtype":
        name = next(name for name in tensors if name.endswith("layernorm.weight"))
        tensors[name] = tensors[name].float()
    else:
        config = read_json(to / source.name / "config.json")
        config["text_config"]["aux_loss_alpha"] = 0.002
        write_json(to / source.name / "config.json", config)
    save_file(tensors, path, {"format": "pt"})
    return to / source.name


def test_its_own_source_takes_it_wherever_it_lies_and_however_it_is_dealt_to_shards(
    source, tmp_path
):
    scales = write_scales(tmp_path / "s.safetensors", source, entries(source))
    assert "activation scales" not in " ".join(plan(source, scales).deviations)
    again = make_target(tmp_path / "elsewhere", format="int4", layers=3, shards=5)
    one, other = (identity(Checkpoint.open(path)) for path in (source, again))
    assert all(one[key] == other[key] for key in MODEL) and one["shards"] != other["shards"]
    assert plan(again, scales).quantized == 2 * 12


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("a weight", "the weights differ"),
        ("a dtype", "dtypes or shapes and the weights differ"),
        ("the config", "the config differ"),
    ],
)
def test_another_source_is_refused(source, tmp_path, how, message):
    scales = write_scales(tmp_path / "s.safetensors", source, entries(source))
    other = changed(source, tmp_path / "copy", how)
    with pytest.raises(UsageError, match=rf"measured on another source \(Kimi-K2.6\).*{message}"):
        plan(other, scales)


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"format": "pt"}, "was not written by `trtspec calibrate`"),
        ({"trtspec": "not JSON"}, "was not written by `trtspec calibrate`"),
        ({"trtspec": "[]"}, "does not say which source"),
        ({"trtspec": '{"fingerprint": 1}'}, "does not say which source"),
    ],
)
def test_a_file_that_names_no_source_is_refused(source, tmp_path, metadata, message):
    path = tmp_path / "s.safetensors"
    save_file(entries(source), path, metadata)
    with pytest.raises(UsageError, match=message) as refused:
        plan(source, path)
    assert "`trtspec calibrate`" in refused.value.remedy


@pytest.mark.parametrize(
    "value", [None, torch.nan, 0.0, -1.0, torch.inf, [0.5, 0.5]],
    ids=["absent", "nan", "zero", "negative", "infinite", "a vector"],
)  # fmt: skip
def test_a_linear_without_a_scale_and_what_is_no_scale_are_refused(source, tmp_path, value, out):
    tensors = entries(source)
    name = "language_model.model.layers.1.mlp.experts.2.down_proj.input_scale"
    if value is None:
        del tensors[name]
    else:
        tensors[name] = torch.tensor(value)
    with pytest.raises(TrtspecError) as refused:
        plan(source, write_scales(tmp_path / "s.safetensors", source, tensors))
    assert "Traceback" not in str(refused.value) and not out.exists()


def test_a_file_that_is_not_safetensors_is_refused(source, tmp_path):
    path = tmp_path / "s.json"
    path.write_text('{"a.input_scale": 1.0}')
    with pytest.raises(UsageError, match="not written by `trtspec calibrate`"):
        plan(source, path)
