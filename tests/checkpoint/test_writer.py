from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from trtspec.checkpoint.tensors import DTYPES
from trtspec.checkpoint.writer import ShardFile, layout_of, write_shard
from trtspec.errors import TrtspecError


def random_tensor(dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    raw = torch.randint(0, 2, shape) if dtype == torch.bool else torch.randint(0, 100, shape)
    return raw.to(dtype)


@given(
    st.dictionaries(
        st.text("abc.é", min_size=1, max_size=8),
        st.tuples(st.sampled_from(sorted(DTYPES)), st.lists(st.integers(0, 5), max_size=3)),
        max_size=8,
    )
)
@settings(max_examples=60, deadline=None)
def test_safetensors_reads_back_every_byte(tmp_path_factory, layout):
    tensors = {name: random_tensor(DTYPES[code], tuple(shape)) for name, (code, shape) in layout.items()}
    path = tmp_path_factory.mktemp("shard") / "a.safetensors"
    write_shard(path, tensors)
    loaded = load_file(path)
    assert set(loaded) == set(tensors)
    for name, tensor in tensors.items():
        assert loaded[name].dtype == tensor.dtype and loaded[name].shape == tensor.shape
        assert torch.equal(loaded[name].reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8))


def test_a_shard_has_no_name_until_it_is_whole(tmp_path):
    tensors = {"a": torch.ones(4), "b": torch.zeros(2, dtype=torch.int64)}
    shard = ShardFile(tmp_path / "model.safetensors", layout_of(tensors))
    shard.write("a", tensors["a"])
    with pytest.raises(ValueError, match="1 tensors were not written, first b"):
        shard.finish()
    with pytest.raises(ValueError, match="the layout says I64"):
        shard.write("b", tensors["a"])
    assert not list(tmp_path.glob("*.safetensors"))
    shard.abandon()
    assert not list(tmp_path.iterdir())


def test_a_full_disk_is_a_message(tmp_path, monkeypatch):
    import resource
    import signal

    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    try:
        with pytest.raises(TrtspecError, match="cannot write .*model.safetensors"):
            write_shard(tmp_path / "model.safetensors", {"a": torch.ones(4096)})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not list(tmp_path.iterdir())
