"""Headers against the safetensors library, and every way a directory can be broken."""

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.numpy import save_file

from tests.json_files import read_json, write_json
from tests.tiny import make_target
from trtspec.checkpoint.headers import Checkpoint
from trtspec.checkpoint.tensors import LazyTensors
from trtspec.errors import TrtspecError

FORMATS = ("bf16", "int4", "fp8-block", "nvfp4")


def small(directory: Path, shards: int = 2) -> Path:
    """Two or three tensors in `shards` files, with an index and a config."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text('{"model_type": "kimi_k2"}')
    weight_map = {}
    for number in range(shards):
        name = f"model-{number + 1:05d}-of-{shards:05d}.safetensors"
        save_file({f"w{number}": np.arange(6, dtype=np.float32).reshape(2, 3)}, directory / name)
        weight_map[f"w{number}"] = name
    write_json(directory / "model.safetensors.index.json", {"weight_map": weight_map})
    return directory


@pytest.mark.parametrize("format", FORMATS)
def test_matches_the_safetensors_library(tmp_path: Path, format: str) -> None:
    path = make_target(tmp_path, format=format, shards=3, vision=True)
    checkpoint = Checkpoint.open(path)
    seen = 0
    for shard in checkpoint.shards:
        with safe_open(path / shard, "pt") as theirs, LazyTensors(checkpoint) as lazy:
            for name in theirs.keys():  # noqa: SIM118 - safe_open is not a mapping
                info, view = checkpoint.tensors[name], theirs.get_slice(name)
                assert (info.shape, info.dtype, info.shard) == (
                    tuple(view.get_shape()),
                    view.get_dtype(),
                    shard,
                )
                ours, tensor = lazy[name], theirs.get_tensor(name)
                assert (ours.dtype, ours.shape) == (tensor.dtype, tensor.shape)
                assert torch.equal(
                    ours.reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8)
                ), name
                seen += 1
    assert seen == len(checkpoint.tensors)
    index = read_json(path / "model.safetensors.index.json")
    total = sum(info.nbytes for info in checkpoint.tensors.values())
    assert total == index["metadata"]["total_size"]


def test_reads_a_single_file_and_loose_shards(tmp_path: Path) -> None:
    path = small(tmp_path, shards=2)
    (path / "model.safetensors.index.json").unlink()
    assert sorted(Checkpoint.open(path).tensors) == ["w0", "w1"]
    save_file({"only": np.zeros(1, np.float32)}, path / "model.safetensors")
    assert list(Checkpoint.open(path).tensors) == ["only"]


ONE, TWO = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


def edit(path: Path, change: Callable[[bytes], bytes]) -> None:
    path.write_bytes(change(path.read_bytes()))


def list_in(directory: Path, name: str, shard: str) -> None:
    """Makes the index place tensor `name` in `shard`."""
    index = directory / "model.safetensors.index.json"
    value = read_json(index)
    value["weight_map"][name] = shard
    write_json(index, value)


def without_weights(directory: Path, other: str = "") -> None:
    for shard in directory.glob("*.safetensors*"):
        shard.unlink()
    if other:
        (directory / other).write_bytes(b"\x80\x04.")


def in_two_shards(directory: Path) -> None:
    (directory / "model.safetensors.index.json").unlink()
    save_file({"w0": np.zeros(1, np.float32)}, directory / TWO)


MORE = {"w0": np.zeros((2, 3), np.float32), "more": np.zeros(2)}
BROKEN: list[tuple[str, Callable[[Path], object]]] = [
    ("has no config.json", lambda d: (d / "config.json").unlink()),
    ("not valid JSON", lambda d: (d / "config.json").write_text("{not json")),
    (f"{TWO} is missing", lambda d: (d / TWO).unlink()),
    ("file not fully covered", lambda d: edit(d / TWO, lambda raw: raw[:-4])),
    ("(0 bytes)", lambda d: edit(d / TWO, lambda raw: b"")),
    (
        "is truncated, damaged or not a safetensors file",
        lambda d: edit(d / TWO, lambda raw: raw + b"1234"),
    ),
    (
        "invalid UTF-8 in header",
        lambda d: edit(d / TWO, lambda raw: raw[:9] + b"\xff\xff\xff" + raw[12:]),
    ),
    ("header too large", lambda d: edit(d / TWO, lambda raw: b"<html>404</html>" * 20)),
    ("first ghost", lambda d: list_in(d, "ghost", ONE)),
    ("first w0", lambda d: list_in(d, "w0", TWO)),
    ("not a plain name inside its directory", lambda d: list_in(d, "w0", "../secret.safetensors")),
    ("does not list 1 tensors", lambda d: save_file(MORE, d / ONE)),
    (
        "invalid shape, data type, or offset for tensor",
        lambda d: edit(d / ONE, lambda raw: raw.replace(b'"shape":[2,3]', b'"shape":[2,4]')),
    ),
    ("pickle", lambda d: without_weights(d, "pytorch_model.bin")),
    ("has no *.safetensors", without_weights),
    ("w0 is in both", in_two_shards),
    ("is not a directory", shutil.rmtree),
]


@pytest.mark.parametrize(("says", "damage"), BROKEN, ids=[says for says, _ in BROKEN])
def test_broken_directories_are_named(
    tmp_path: Path, says: str, damage: Callable[[Path], object]
) -> None:
    path = small(tmp_path / "checkpoint")
    damage(path)
    with pytest.raises(TrtspecError) as caught:
        Checkpoint.open(path)
    assert says in caught.value.message
    assert caught.value.remedy and caught.value.exit_code == 1


def test_unknown_name_and_a_file_that_shrank_or_vanished_are_messages(tmp_path):
    path = make_target(tmp_path, layers=1, shards=1)
    lazy = LazyTensors(Checkpoint.open(path))
    with pytest.raises(TrtspecError, match="no tensor nonsense"):
        lazy["nonsense"]
    last = max(lazy.checkpoint.tensors.values(), key=lambda info: info.end)
    edit(path / last.shard, lambda raw: raw[:-1])
    with pytest.raises(TrtspecError, match=f"ends before {last.name} does"):
        lazy[last.name]
    (path / last.shard).unlink()
    with pytest.raises(TrtspecError, match=f"shard {last.shard} is missing"):
        LazyTensors(lazy.checkpoint)[last.name]
