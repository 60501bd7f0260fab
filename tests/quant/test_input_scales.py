"""A scale file is bound to the source that it was measured on: every other one is refused, by name."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.command_line import trtspec
from tests.json_files import read_json, write_json
from tests.tiny import make_target
from trtspec.checkpoint.headers import Checkpoint
from trtspec.checkpoint.identity import MODEL, identity
from trtspec.errors import TrtspecError, UsageError
from trtspec.quant.plan import ConversionOptions
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


def write(
    path: Path, source: Path, tensors: dict[str, torch.Tensor] | None = None, **about: object
) -> Path:
    about = {"command": "calibrate", "source": source.name, "fingerprint": identity(Checkpoint.open(source)),
             "texts": 3, "tokens": 99, **about}  # fmt: skip
    save_file(
        entries(source) if tensors is None else tensors,
        path,
        {"format": "pt", "trtspec": json.dumps(about)},
    )
    return path


def plan(source: Path, scales: Path, accept: bool = False) -> QuantizePlan:
    options = ConversionOptions(input_scales=scales, accept_input_scales=accept)
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
    scales = write(tmp_path / "s.safetensors", source)
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
def test_another_source_is_refused_unless_accepted(source, tmp_path, how, message, out):
    scales, other = (
        write(tmp_path / "s.safetensors", source),
        changed(source, tmp_path / "copy", how),
    )
    with pytest.raises(UsageError, match=rf"measured on another source \(Kimi-K2.6\).*{message}"):
        plan(other, scales)
    assert plan(other, scales, accept=True).quantized == 2 * 12
    quantize_checkpoint(
        other,
        out,
        K26,
        ConversionOptions(input_scales=scales, accept_input_scales=True),
    )
    assert (
        "not bound to this source, accepted with `accept_input_scales`"
        in (tmp_path / "out/README.md").read_text()
    )


def test_a_file_that_names_no_source_is_refused_unless_accepted(source, tmp_path):
    path = tmp_path / "s.safetensors"
    save_file(entries(source), path)
    with pytest.raises(UsageError, match="does not say which source") as refused:
        plan(source, path)
    assert "`accept_input_scales`" in refused.value.remedy
    assert plan(source, path, accept=True).quantized == 2 * 12


@pytest.mark.parametrize("accept", [False, True])
@pytest.mark.parametrize("fault", ["another depth", "one expert more", "one expert less", "nan", "zero", "negative",
                                   "a vector", "infinite"])  # fmt: skip
def test_scales_that_fit_no_linear_or_are_no_scale_are_refused_even_then(
    source, tmp_path, fault, accept, out
):
    tensors = entries(source)
    name = "language_model.model.layers.1.mlp.experts.2.down_proj.input_scale"
    if fault == "another depth":
        tensors |= {name.replace("layers.1", "layers.9"): torch.tensor(0.5)}
    elif fault == "one expert more":
        tensors |= {name.replace("experts.2", "experts.4"): torch.tensor(0.5)}
    elif fault == "one expert less":
        del tensors[name]
    else:
        values = {
            "nan": torch.nan,
            "zero": 0.0,
            "negative": -1.0,
            "infinite": torch.inf,
            "a vector": [0.5, 0.5],
        }
        tensors[name] = torch.tensor(values[fault])
    with pytest.raises(TrtspecError) as refused:
        plan(source, write(tmp_path / "s.safetensors", source, tensors), accept)
    assert "Traceback" not in str(refused.value) and not out.exists()


def test_a_file_that_is_not_safetensors_is_refused(source, tmp_path):
    path = tmp_path / "s.json"
    path.write_text('{"a.input_scale": 1.0}')
    with pytest.raises(UsageError, match="not a file of input scales"):
        plan(source, path)


def test_accepting_without_a_file_is_refused(source, out):
    done = trtspec("quantize", source, "-o", out, "--accept-input-scales")
    assert (
        done.status == 2
        and "--accept-input-scales is not used with --input-scales one" in done.stderr
    )
