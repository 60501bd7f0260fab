from __future__ import annotations

import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from trtspec.checkpoint.tensors import DTYPES
from trtspec.checkpoint.writer import ShardFile, ShardWriter, layout_of, write_shard
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


def test_shard_writer_names_shards_and_writes_an_index(tmp_path):
    tensors = {f"t{i}": torch.full((256,), float(i)) for i in range(5)}
    writer = ShardWriter(tmp_path, max_shard_bytes=2048)
    for name, tensor in tensors.items():
        writer.add(name, tensor)
    assert not list(tmp_path.glob("*.safetensors"))  # a killed writer leaves nothing that looks like a checkpoint
    weight_map = writer.finish()
    assert sorted(set(weight_map.values())) == [f"model-{i:05d}-of-00003.safetensors" for i in (1, 2, 3)]
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index == {"metadata": {"total_size": 5 * 1024}, "weight_map": weight_map}
    for name, file in weight_map.items():
        assert torch.equal(load_file(tmp_path / file)[name], tensors[name])
    assert not list(tmp_path.glob(".*partial"))


def test_one_shard_needs_no_index(tmp_path):
    writer = ShardWriter(tmp_path)
    writer.add("a", torch.ones(3))
    assert writer.finish() == {"a": "model.safetensors"}
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]
