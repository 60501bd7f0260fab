"""Adds a weight format to a copy of the package: MXFP4 as compressed-tensors packs it, as a source.

Four bits in E2M1 and an E8M0 scale for 32 of them, under the suffixes of INT4: `weight_packed`
uint8 [N, K/2], low nibble first, `weight_scale` uint8 [N, K/32], biased by 127.
"""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.json_files import read_json, write_json
from tests.package_copy import copy_package, run_copy, touched
from tests.tiny import make_target, read_tensors
from trtspec.quant import nvfp4

ROW = """    "mxfp4": Storage(
        "MXFP4 in groups of 32", ("weight_packed", "weight_scale"), (("U8",), ("U8",)), \
("values", "groups"), 2, 32,
        method="compressed-tensors",
    ),
"""
DETECTED = """    if method == "compressed-tensors" \
and block.get("format") == "mxfp4-pack-quantized":
        return WeightFormat.MXFP4, 32, None
"""
CONFIG = {
    "quant_method": "compressed-tensors",
    "format": "mxfp4-pack-quantized",
    "ignore": [
        "re:.*self_attn.*",
        "re:.*shared_experts.*",
        r"re:.*mlp\.(gate|up|down)_proj.*",
        "lm_head",
    ],
}
DECODER = '''

def dequantize_mxfp4(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """MXFP4: E2M1 values with a power of two for each 32 of a row (OCP Microscaling Formats 1.0).

    uint8 [N, K/2] and uint8 [N, K/32] -> bf16 [N, K]; exact.
    """
    codes = nvfp4.E2M1_VALUES
    table = torch.tensor((*codes, *(-value for value in codes)), dtype=torch.float32)
    values = table[torch.stack((blocks & 15, blocks >> 4), -1).long()]\
.view(blocks.shape[0], scales.shape[1], -1)
    return torch.ldexp(values, scales.int().unsqueeze(-1) - 127).view(blocks.shape[0], -1)\
.to(torch.bfloat16)
'''


@pytest.fixture(scope="module")
def copied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return with_mxfp4(copy_package(tmp_path_factory.mktemp("copy")))


def with_mxfp4(copy: Path) -> Path:
    """The copy of the package with one format more."""
    edit(copy / "formats.py", '    "nvfp4": Storage(', ROW + '    "nvfp4": Storage(')
    edit(copy / "formats.py", '    NVFP4 = "nvfp4"\n', '    NVFP4 = "nvfp4"\n    MXFP4 = "mxfp4"\n')
    edit(copy / "formats.py", '    method = block.get("quant_method", "")\n',
         '    method = block.get("quant_method", "")\n' + DETECTED)  # fmt: skip
    edit(
        copy / "quant/decode.py",
        "    WeightFormat.INT4:",
        "    WeightFormat.MXFP4: lambda *parts: dequantize_mxfp4(*parts),\n    WeightFormat.INT4:",
    )
    edit(copy / "quant/decode.py", "\n\ndef dequantize_int4(", DECODER + "\n\ndef dequantize_int4(")
    return copy


def edit(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert text.count(old) == 1, (path, old)
    path.write_text(text.replace(old, new))


def pack_mxfp4(shape: Sequence[int], seed: int = 0) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Random stored parts, and what they decode to by a table of their own."""
    (rows, columns), generator = shape, torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 16, (rows, columns), generator=generator, dtype=torch.uint8)
    scales = torch.randint(117, 132, (rows, columns // 32), generator=generator, dtype=torch.uint8)
    sign, magnitude = codes // 8, codes % 8
    value = torch.where(
        magnitude < 2,
        magnitude * 0.5,
        (1 + magnitude % 2 * 0.5) * 2.0 ** (magnitude // 2 - 1.0),
    )
    factor = 2.0 ** (scales.double() - 127)
    values = (value * (1 - 2.0 * sign) * factor.repeat_interleave(32, -1)).bfloat16()
    return {"weight_packed": codes[:, ::2] | codes[:, 1::2] << 4, "weight_scale": scales}, values


def mxfp4_target(directory: Path) -> tuple[Path, dict[str, torch.Tensor]]:
    """A Kimi with MXFP4 experts, and what its tensors decode to."""
    source = make_target(directory, layers=2, shards=1)
    path = source / "model.safetensors"
    plain, stored = load_file(path), {}
    for seed, (name, tensor) in enumerate(list(plain.items())):
        if ".mlp.experts." not in name:
            stored[name] = tensor
            continue
        parts, plain[name] = pack_mxfp4(tensor.shape, seed)
        stored |= {f"{name.removesuffix('.weight')}.{key}": value for key, value in parts.items()}
    save_file(stored, path, {"format": "pt"})
    config = read_json(source / "config.json")
    write_json(source / "config.json", config | {"quantization_config": CONFIG})
    return source, plain


@pytest.mark.slow
def test_mxfp4_is_two_files(copied: Path, tmp_path: Path, out: Path) -> None:
    """Two files add a format: detected, inspected, converted to ModelOpt's values and decoded.

    ModelOpt's rule gives the values, and the decoded ones are for reference.
    """
    assert touched(copied) == ["formats.py", "quant/decode.py"]
    source, plain = mxfp4_target(tmp_path / "in")
    found = json.loads(run_copy(copied, "-m", "trtspec", "inspect", source, "--json"))
    assert (found["kind"], found["format"]) == ("target", "mxfp4")
    assert [problem for problem in found["problems"] if problem["severity"] != "info"] == []
    assert found["parameters"] == sum(tensor.numel() for tensor in plain.values())
    result = json.loads(
        run_copy(
            copied,
            "-m",
            "trtspec",
            "quantize",
            source,
            "-o",
            out,
            "--policy",
            "k2.7-code",
            "--json",
        )
    )
    assert result["quantized"] == 3 * 4 and result["policy"] == "k2.7-code"
    got = read_tensors(out)
    for name, weight in plain.items():
        if ".mlp.experts." not in name:
            assert torch.equal(got[name], weight), name
            continue
        leaf = name.split(".")[-2]
        pair = plain[
            name.replace(leaf, {"gate_proj": "up_proj", "up_proj": "gate_proj"}.get(leaf, leaf))
        ]
        expected = nvfp4.quantize(
            weight, torch.maximum(weight.abs().max(), pair.abs().max()).float()
        )
        assert torch.equal(got[name], expected.packed), name
        assert torch.equal(
            got[f"{name}_scale"].view(torch.uint8), expected.scale.view(torch.uint8)
        ), name
        assert torch.equal(got[f"{name}_scale_2"], expected.scale_2), name
    compared = json.loads(
        run_copy(
            copied, "-m", "trtspec", "inspect", out, "--against", source, "--sample", "0", "--json"
        )
    )
    assert [problem for problem in compared["problems"] if problem["severity"] != "info"] == []
    script = (
        "import sys, torch; from safetensors.torch import save_file; "
        "from trtspec.checkpoint.headers import Checkpoint;"
        "from trtspec.checkpoint.tensors import LazyTensors;"
        "from trtspec.quant.decode import decoded; "
        "from trtspec.quant.conversion_plan import plain_names;"
        "tensors = LazyTensors(Checkpoint.open(sys.argv[1]));"
        "names = plain_names(tensors.checkpoint.tensors);"
        "save_file({name: decoded(tensors, name) for name in names}, sys.argv[2])"
    )
    run_copy(copied, "-c", script, source, tmp_path / "decoded.safetensors")
    decoded = load_file(tmp_path / "decoded.safetensors")
    assert decoded.keys() == plain.keys() and all(
        torch.equal(decoded[name], plain[name]) for name in plain
    )
