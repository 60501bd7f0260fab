from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file

from tests.tiny import make_target
from trtspec.checkpoint.headers import Checkpoint
from trtspec.checkpoint.tensors import LazyTensors
from trtspec.errors import TrtspecError


@pytest.mark.parametrize("format", ["bf16", "int4", "fp8-block", "nvfp4"])
def test_every_tensor_equals_what_safetensors_reads(tmp_path, format):
    path = make_target(tmp_path, format=format, layers=2, shards=3)
    expected = {}
    for shard in sorted(path.glob("*.safetensors")):
        expected |= load_file(shard)
    with LazyTensors(Checkpoint.open(path)) as lazy:
        assert set(lazy.names()) == set(expected)
        for name, tensor in expected.items():
            got = lazy[name]
            assert got.dtype == tensor.dtype and got.shape == tensor.shape
            assert torch.equal(got.reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8)), name


def test_unknown_name_and_a_file_that_shrank_are_messages(tmp_path):
    path = make_target(tmp_path, layers=1, shards=1)
    lazy = LazyTensors(Checkpoint.open(path))
    with pytest.raises(TrtspecError, match="no tensor nonsense"):
        lazy["nonsense"]
    last = max(lazy.checkpoint.tensors.values(), key=lambda info: info.end)
    with (path / last.shard).open("r+b") as stream:
        stream.truncate(last.end - 1)
    with pytest.raises(TrtspecError, match=f"ends before {last.name} does"):
        lazy[last.name]
