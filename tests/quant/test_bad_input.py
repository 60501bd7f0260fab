"""Whatever is wrong with source or output: one clear error, and nothing half-written."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.tiny import make_target
from trtspec.checkpoint.headers import Checkpoint
from trtspec.checkpoint.writer import Journal
from trtspec.errors import TrtspecError, UsageError
from trtspec.quant.output import JOURNAL_NAME, SPARE_BYTES
from trtspec.quant.policy import load_policy
from trtspec.quant.streaming import quantize_checkpoint
from trtspec.report import OutputOptions

EXPERT = "language_model.model.layers.1.mlp.experts.2.down_proj"
K26 = load_policy("k2.6")


def damage(source: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    tensors = load_file(source / "model.safetensors")
    change(tensors)
    save_file(tensors, source / "model.safetensors", {"format": "pt"})


def truncate(source: Path) -> None:
    path = source / "model.safetensors"
    os.truncate(path, path.stat().st_size - 100)


def index_names_a_missing_file(source: Path) -> None:
    names = Checkpoint.open(source).tensors
    index = {"weight_map": dict.fromkeys(names, "model-00001-of-00001.safetensors")}
    (source / "model.safetensors.index.json").write_text(json.dumps(index))


def wrong_dtype(source: Path) -> None:
    damage(source, lambda tensors: tensors.update({f"{EXPERT}.weight_packed": torch.zeros(64, 8)}))


def nan_scale(source: Path) -> None:
    damage(source, lambda tensors: tensors[f"{EXPERT}.weight_scale"][3].fill_(float("nan")))


def odd_width(source: Path) -> None:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        for part in ("weight_packed", "weight_scale", "weight_shape"):
            del tensors[f"{EXPERT}.{part}"]
        tensors[f"{EXPERT}.weight"] = torch.ones(64, 24).bfloat16()

    damage(source, change)


def wrong_shape_record(source: Path) -> None:
    damage(source, lambda tensors: tensors[f"{EXPERT}.weight_shape"].add_(8))


def missing_scale(source: Path) -> None:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        del tensors[f"{EXPERT}.weight_scale"]

    damage(source, change)


def kimi_k3(source: Path) -> None:
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | {"model_type": "kimi_k3"}))


def not_a_checkpoint(source: Path) -> None:
    shutil.rmtree(source)
    source.mkdir()


@pytest.mark.parametrize(
    ("spoil", "text"),
    [
        (truncate, "is truncated"),
        (index_names_a_missing_file, "model-00001-of-00001.safetensors is missing"),
        (wrong_dtype, r"weight_packed is F32, expected I32 \[TS-TARGET-DTYPE\]"),
        (nan_scale, f"{EXPERT}.weight in model.safetensors holds NaN or infinity at \\[3, 0\\]"),
        (odd_width, r"is \[64, 24\], \[64, 32\] needs .*\[TS-TARGET-SHAPE\]"),
        (wrong_shape_record, "weight_shape is"),
        (missing_scale, r"weight_scale \[TS-TARGET-SCALE-MISSING\]"),
        (kimi_k3, "kimi_k3"),
        (not_a_checkpoint, "has no config.json"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_bad_source(tmp_path, spoil, text):
    source = make_target(tmp_path / "in", format="int4", layers=2, shards=1)
    spoil(source)
    with pytest.raises(TrtspecError, match=text) as caught:
        quantize_checkpoint(source, tmp_path / "out", K26)
    assert caught.value.remedy
    left = list((tmp_path / "out").iterdir()) if (tmp_path / "out").exists() else []
    assert [path.name for path in left] in ([], [JOURNAL_NAME])


def test_two_runs_at_once_are_refused(tmp_path):
    source, out = make_target(tmp_path / "in", layers=2), tmp_path / "out"
    quantize_checkpoint(source, out, K26)
    header = json.loads((out / JOURNAL_NAME).read_text().splitlines()[0])["header"]
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    with Journal(out / JOURNAL_NAME, header), pytest.raises(UsageError, match="another run is writing"):
        quantize_checkpoint(source, out, K26)
    assert before == {path.name: path.read_bytes() for path in out.iterdir()}


@pytest.fixture
def small_disk(tmp_path):
    """A tmpfs with room for the check before the first byte, where mounting is allowed."""
    disk = tmp_path / "disk"
    disk.mkdir()
    size = f"size={(SPARE_BYTES >> 10) + 700}k"
    if os.geteuid() or not shutil.which("mount"):
        pytest.skip("mounting needs root")
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", size, "tmpfs", str(disk)], capture_output=True, check=False)
    if mounted.returncode:
        pytest.skip(f"cannot mount a tmpfs here: {mounted.stderr.decode().strip()}")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


def test_a_full_disk(small_disk, tmp_path):
    """The check counts the old shard as free, but a second link keeps its blocks: full at the first write."""
    source, out = make_target(tmp_path / "in", layers=2, shards=1), small_disk / "out"
    result = quantize_checkpoint(source, out, K26)
    free = shutil.disk_usage(out).free
    with (out / "model.safetensors").open("ab") as stream:  # a large old file, which also lies elsewhere
        stream.write(bytes(free - 4096))
    os.link(out / "model.safetensors", small_disk / "kept")
    with pytest.raises(TrtspecError, match="No space left on device") as caught:
        quantize_checkpoint(source, out, K26, again=OutputOptions(restart=True))
    assert (
        "free space" in caught.value.remedy and not list(out.glob("*.safetensors")) and not list(out.glob(".*partial"))
    )
    assert not (out / "config.json").exists()
    (small_disk / "kept").unlink()
    assert quantize_checkpoint(source, out, K26).bytes_out == result.bytes_out  # goes on once there is room


def test_too_small_a_disk_is_told_before_the_first_byte(small_disk, tmp_path):
    source = make_target(tmp_path / "in", layers=2, hidden=256, experts=8, shards=1)
    with pytest.raises(TrtspecError, match=r"needs [\d,]+ bytes and its disk has [\d,]+ free"):
        quantize_checkpoint(source, small_disk / "out", K26)
    assert not list((small_disk / "out").iterdir())
