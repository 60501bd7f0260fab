"""Our files against ModelOpt's export, tensor by tensor, and our W4A4 against its fake-quant."""

import os
import shutil
import sys
from pathlib import Path

import pytest
import torch
from compressed_tensors.compressors.pack_quantized.helpers import unpack_from_int32
from safetensors.torch import load_file, save_file

from tests.cases import slow
from tests.command_line import ROOT, inspected, printed
from tests.json_files import read_json, write_json
from tests.quant.scale_files import write_scales
from tests.tiny import read_tensors, write_tensors
from trtspec.quant import nvfp4
from trtspec.quant.conversion_plan import ConversionOptions
from trtspec.quant.policy import load_policy
from trtspec.quant.run import quantize_checkpoint

# the Python of an environment with ModelOpt 0.48: `make test-oracles` makes one
OTHER = "TRTSPEC_MODELOPT_048_PYTHON"
VERSIONS = {"0.47": sys.executable, "0.48": os.environ.get(OTHER, "")}
K25, K26, K27 = (
    "nvfp4_mlp_only-kv_fp8_cast",
    "nvfp4_experts_only_mse-kv_fp8_cast",
    "nvfp4_experts_only_input_scale1",
)
RECIPES = {
    "k2.5": f"general/ptq/{K25}",
    "k2.6": f"general/ptq/{K26}",
    "k2.7-code": f"general/ptq/{K27}-kv_fp8_cast",
}


def modelopt(
    mode: str, source: Path, config: str, out: Path, version: str = "0.47"
) -> dict[str, torch.Tensor]:
    """Runs the oracle on a copy, because it has to rewrite model_type for transformers."""
    if not VERSIONS[version]:
        pytest.skip(f"{OTHER} names no Python with ModelOpt {version}")
    copy = out.with_name(f"{out.name}-source")
    shutil.copytree(source, copy)
    oracle = [VERSIONS[version], "-m", "tests.quant.modelopt_oracle"]
    printed(*oracle, mode, copy, config, out, cwd=ROOT)
    return read_tensors(out)


def scales_of(exported: dict[str, torch.Tensor], source: Path, folder: Path) -> ConversionOptions:
    """ModelOpt's own scales, in a file as `calibrate` writes it."""
    tensors = {name: tensor for name, tensor in exported.items() if name.endswith("input_scale")}
    return ConversionOptions(input_scales=write_scales(folder / "s.safetensors", source, tensors))


def different(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> list[str]:
    """Names of the tensors that differ in dtype or in a byte."""
    return [
        name
        for name, tensor in ours.items()
        if tensor.dtype != theirs[name].dtype
        or not torch.equal(
            tensor.reshape(-1).view(torch.uint8), theirs[name].reshape(-1).view(torch.uint8)
        )
    ]


def decoded_copy(source: Path, out: Path) -> Path:
    """The source as BF16, decoded here in the plainest way.

    transformers decodes FP8 on a GPU only; ModelOpt 0.48 mixes packed INT4 tensors into its export
    (see below).
    """
    shutil.copytree(source, out)
    for path in sorted(out.glob("*.safetensors")):
        path.unlink()
    tensors, plain = read_tensors(source), {}
    for name, tensor in tensors.items():
        scale = tensors.get(f"{name}_scale_inv")
        if scale is not None:
            wide = scale.repeat_interleave(128, 0)[: tensor.shape[0]].repeat_interleave(128, 1)[
                :, : tensor.shape[1]
            ]
            tensor = (tensor.float() * wide).bfloat16()
        stem, _, suffix = name.rpartition(".")
        if suffix == "weight_packed":
            shape = torch.Size(tensors[f"{stem}.weight_shape"].tolist())
            codes = unpack_from_int32(tensor, 4, shape).to(torch.bfloat16).view(shape[0], -1, 32)
            plain[f"{stem}.weight"] = (codes * tensors[f"{stem}.weight_scale"].unsqueeze(-1)).view(
                shape
            )
        elif suffix not in ("weight_scale_inv", "weight_scale", "weight_shape"):
            plain[name] = tensor.contiguous()
    write_tensors(out, plain)
    (out / "model.safetensors.index.json").unlink()
    config = read_json(out / "config.json")
    config.pop("quantization_config")
    write_json(out / "config.json", config)
    return out


def cases() -> list:
    """Every policy, source and version; the default is the most demanding policy, by 0.47."""
    quick = ("int4", "k2.6", False)
    found = []
    for version in VERSIONS:
        for policy in RECIPES:
            for format in ("bf16", "int4", "fp8-block"):
                for nested in (
                    (False, True) if format == "bf16" else (False,)
                ):  # ModelOpt loads no packed K2.5
                    marks = (
                        ()
                        if version == "0.47" and (format, policy, nested) == quick
                        else (pytest.mark.slow,)
                    )
                    name = f"{version}-{policy}-{format}{'-nested' if nested else ''}"
                    found.append(
                        pytest.param(version, policy, format, nested, id=name, marks=marks)
                    )
    return found


@pytest.mark.parametrize(("version", "policy", "format", "nested"), cases())
def test_every_tensor_equals_modelopts_export(
    tmp_path, version, policy, format, nested, out, new_target
):
    """Tensors equal byte for byte under the policy's recipe, and so does hf_quant_config.json."""
    source = new_target(format=format, nested=nested, layers=3, shards=3)
    unreadable = format == "fp8-block" or (format == "int4" and version == "0.48")
    shown = decoded_copy(source, tmp_path / "plain") if unreadable else source
    theirs = modelopt("export", shown, RECIPES[policy], tmp_path / "modelopt", version)
    if nested:  # transformers adds a random vision tower, which the source does not have
        theirs = {
            name: tensor for name, tensor in theirs.items() if name.startswith("language_model.")
        }
    given = scales_of(theirs, source, tmp_path)
    if policy == "k2.7-code":
        given = ConversionOptions()  # pinned there: 1.0, from ModelOpt as from us
    quantize_checkpoint(source, out, load_policy(policy), given)
    ours = read_tensors(out)
    assert set(ours) == set(theirs)
    quantized = sum(name.endswith("weight_scale_2") for name in ours)
    assert quantized == {"k2.5": 3 + 2 * 15, "k2.6": 2 * 12, "k2.7-code": 2 * 12}[policy]
    assert different(ours, theirs) == []
    configs = [read_json(tmp_path / name / "hf_quant_config.json") for name in ("out", "modelopt")]
    quant, expected = (config["quantization"] | {"exclude_modules": None} for config in configs)
    assert quant == expected


@pytest.mark.parametrize("weight_scales", ["max", "mse"])
@pytest.mark.parametrize("version", [slow("0.47"), "0.48"])
def test_extreme_weights_equal_modelopts_export(tmp_path, version, weight_scales, out, new_target):
    """Extreme weights give ModelOpt's bytes, but for a tensor of zeros, where it stores NaN.

    Blocks and tensors of zeros, subnormals, huge values, one hot block and ties.
    """
    source = new_target(nested=False, layers=2, shards=1)
    path = next(source.glob("*.safetensors"))
    tensors, stem = load_file(path), "model.layers.1.mlp.experts."
    generator = torch.Generator().manual_seed(0)
    ties = torch.randint(-12, 13, (64, 32), generator=generator).bfloat16() / 64
    tensors[f"{stem}0.down_proj.weight"] = ties
    tensors[f"{stem}1.down_proj.weight"][:, 16:] = 0
    tensors[f"{stem}1.gate_proj.weight"][3] = 1e-39
    tensors[f"{stem}2.down_proj.weight"] *= 2.0**60
    tensors[f"{stem}2.gate_proj.weight"][5, 16:32] *= 1e4
    tensors[f"{stem}3.gate_proj.weight"] *= 2.0**-30
    tensors[f"{stem}3.up_proj.weight"] *= 2.0**-30
    zeros = (version, weight_scales) != (
        "0.47",
        "mse",
    )  # it fails to export one: "Changing shape when setting amax"
    if zeros:
        tensors[f"{stem}3.down_proj.weight"] = torch.zeros(64, 32, dtype=torch.bfloat16)
    save_file(tensors, path, {"format": "pt"})
    recipe = {"max": RECIPES["k2.7-code"], "mse": RECIPES["k2.6"]}[weight_scales]
    theirs = modelopt("export", source, f"{recipe},pinned", tmp_path / "modelopt", version)
    quantize_checkpoint(
        source,
        out,
        load_policy("k2.6"),
        ConversionOptions(weight_scales=weight_scales),
    )
    ours = read_tensors(out)
    allowed = {f"{stem}3.down_proj.{part}" for part in ("weight", "weight_scale", "weight_scale_2")}
    if (
        version == "0.47" and weight_scales == "mse"
    ):  # takes maxima below 4e-7 for zero while it searches
        leaves = ("gate_proj", "up_proj")
        allowed |= {
            f"{stem}3.{leaf}.{part}" for leaf in leaves for part in ("weight", "weight_scale")
        }
    assert set(ours) == set(theirs) and set(different(ours, theirs)) <= allowed
    assert bool(ours[f"{stem}3.down_proj.weight"].any()) != zeros


@pytest.mark.parametrize("policy", list(RECIPES))
def test_layerwise_export_holds_the_same_tensors(tmp_path, policy, out, new_target):
    """ModelOpt 0.48's shards by layer have our names and bytes, and inspect reads them."""
    source = new_target(nested=False, layers=3, shards=3)
    theirs = modelopt("layerwise", source, RECIPES[policy], tmp_path / "modelopt", "0.48")
    quantize_checkpoint(source, out, load_policy(policy), scales_of(theirs, source, tmp_path))
    ours = read_tensors(out)
    assert set(ours) == set(theirs) and different(ours, theirs) == []
    shards = sorted(path.name for path in (tmp_path / "modelopt").glob("*.safetensors"))
    assert shards == [
        *(f"model-layer-{layer:05d}.safetensors" for layer in range(3)),
        "model-tail.safetensors",
    ]
    for against in (None, str(source)):
        found = inspected(str(tmp_path / "modelopt"), against, sample=0).problems
        assert [problem for problem in found if problem.severity != "info"] == []


def test_what_modelopt_048_makes_of_packed_int4_is_found(tmp_path, new_target):
    """inspect finds packed INT4 values in ModelOpt 0.48's export.

    ModelOpt carries tensors into it that the model "never loaded": packed values stand beside the
    new ones, and the INT4 scales take the place of the NVFP4 scales of the same name.
    """
    source = new_target(format="int4", nested=False, layers=2)
    theirs = modelopt("export", source, RECIPES["k2.7-code"], tmp_path / "modelopt", "0.48")
    if not any(name.endswith("weight_packed") for name in theirs):
        pytest.skip("this version of ModelOpt does not")
    scale = theirs["model.layers.1.mlp.experts.0.down_proj.weight_scale"]
    assert (scale.dtype, scale.shape) == (
        torch.bfloat16,
        (64, 1),
    )  # NVFP4's are E4M3, one for 16 values
    found = {problem.code for problem in inspected(str(tmp_path / "modelopt")).problems}
    assert {"TS-TARGET-SIBLING", "TS-TARGET-SCALE-DTYPE"} <= found


@pytest.mark.slow
def test_w4a4_equals_modelopts_fake_quant_forward(tmp_path, new_target):
    source = new_target(nested=False, layers=3)
    seen = modelopt("forward", source, "NVFP4_MLP_ONLY_CFG", tmp_path / "modelopt")
    tensors = read_tensors(source)
    modules = sorted({name.removesuffix(".x") for name in seen if name.endswith(".x")})
    assert len(modules) == 9  # dense layer 0 and two shared experts; routed experts are fused
    for module in modules:
        x, y = seen[f"{module}.x"], seen[f"{module}.y"]
        weight = nvfp4.quantize(tensors[f"{module}.weight"], seen[f"{module}.weight_amax"])
        values, input_scale = nvfp4.fake_quantize_activation(x, seen[f"{module}.input_amax"] / 2688)
        product = values.float() @ nvfp4.codes_times_scale(weight).float().T
        ours = product * (input_scale * weight.scale_2)
        assert (ours - y).abs().max() <= 2e-6 * y.abs().max(), module
        plain = x @ tensors[f"{module}.weight"].float().T
        assert (plain - y).norm() > 0.05 * y.norm()  # the comparison sees quantization at all
