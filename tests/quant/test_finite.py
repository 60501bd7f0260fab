"""NaN and infinity in any tensor of a source are refused with tensor, file and position.

The tensors are converted or copied.
"""

import random
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.json_files import read_json
from tests.tiny import read_tensors
from trtspec.checkpoint.headers import NOT_FINITE_BITS
from trtspec.checkpoint.tensors import CODES
from trtspec.checkpoint.values import count_not_finite
from trtspec.errors import TrtspecError
from trtspec.quant.conversion_plan import ConversionOptions
from trtspec.quant.policy import load_policy
from trtspec.quant.run import quantize_checkpoint

BAD = {"nan": torch.nan, "inf": torch.inf, "-inf": -torch.inf}


@pytest.mark.parametrize(
    "dtype",
    [kind for kind in CODES if CODES[kind] in NOT_FINITE_BITS],
    ids=lambda kind: CODES[kind],
)
def test_the_bits_of_every_float(dtype):
    """All patterns of 8 and 16 bits, and the edges of wider ones, are judged as torch does."""
    width = torch.empty(0, dtype=dtype).element_size()
    if width <= 2:
        raw = np.arange(2 ** (8 * width), dtype=f"u{width}").view("u1")
    else:
        edge = torch.finfo(dtype)
        values = torch.tensor(
            [0.0, -0.0, edge.max, edge.min, edge.tiny, torch.inf, -torch.inf, torch.nan],
            dtype=dtype,
        )
        raw = values.view(torch.uint8).numpy()
    values = torch.from_numpy(raw.copy()).view(dtype)
    bad = ~torch.isfinite(values.float() if width < 8 else values)
    for index in (
        range(values.numel())
        if width != 2
        else (0, 0x7F7F, 0x7F80, 0x7FFF, 0xFF80, 0x7BFF, 0x7C00, 0xFFFF)
    ):
        one = raw.view(f"u{width}")[index : index + 1].view("u1")
        assert count_not_finite(one, CODES[dtype]) == ((1, 0) if bad[index] else (0, None)), index
    assert count_not_finite(raw, CODES[dtype]) == (int(bad.sum()), int(bad.nonzero()[0]))


def spoiled(source: Path, name: str, value: float) -> tuple[str, list[int]]:
    """Puts the value somewhere into the tensor; returns the shard and the place."""
    shard = index_of(source)[name]
    path = source / shard
    tensors = load_file(path)
    tensor = tensors[name]
    place = [random.Random(name).randrange(size) for size in tensor.shape]
    if tensor.dtype == torch.float8_e4m3fn:
        tensor.view(torch.uint8)[tuple(place)] = 0x7F
    else:
        tensor[tuple(place)] = value
    save_file(tensors, path, {"format": "pt"})
    return shard, place


@pytest.mark.parametrize("format", ["bf16", "int4", "fp8-block"])
def test_every_floating_tensor_is_looked_at(tmp_path, format, new_target):
    """One fault is found in each type of tensor.

    Embedding, norms, router, attention, experts, scales, head, vision tower.
    """
    source = new_target(format=format, layers=2, experts=2, shards=3, vision=True)
    stored = read_tensors(source)
    kinds = {re.sub(r"\d+", "N", name): name for name, t in stored.items() if t.is_floating_point()}
    values, missed = random.Random(format), []
    for number, name in enumerate(kinds.values()):
        shard, place = spoiled(source, name, BAD[values.choice(list(BAD))])
        out = tmp_path / f"out-{number}"
        try:
            quantize_checkpoint(source, out, load_policy("k2.5"), ConversionOptions(workers=1))
            missed.append(name)
        except TrtspecError as error:
            stem = re.sub(r"_(packed|scale|scale_inv|shape)$", "", name)
            named = (
                error.code == "TS-QUANT-NOT-FINITE"
                and stem in error.message
                and "NaN or infinity" in error.message
            )
            exact = not name.endswith(".weight") or (
                f"in {shard} " in error.message and str(place) in error.message
            )
            if error.code.startswith(
                "TS-TARGET"
            ):  # inspect's checks, which come first, found it in a small tensor
                named = exact = name in error.message
            if not (named and exact):
                missed.append(f"{name}: {error.message}")
        assert not (out / "config.json").exists()
        shards = {n: t for n, t in stored.items() if index_of(source)[n] == shard}
        save_file(shards, source / shard, {"format": "pt"})
    print(f"{format}: {len(kinds)} kinds of tensors, {len(kinds) - len(missed)} refused")
    assert missed == []


def test_the_modelopt_engine_looks_too(out, new_target):
    source = new_target(nested=False, layers=2)
    shard, place = spoiled(source, "model.layers.1.self_attn.o_proj.weight", torch.nan)
    with pytest.raises(
        TrtspecError, match=re.escape(f"o_proj.weight in {shard} holds NaN or infinity at {place}")
    ):
        quantize_checkpoint(source, out, load_policy("k2.5"), ConversionOptions(by_modelopt=True))
    assert not list(out.glob("*.safetensors"))


def index_of(source: Path) -> dict[str, str]:
    return read_json(source / "model.safetensors.index.json")["weight_map"]
