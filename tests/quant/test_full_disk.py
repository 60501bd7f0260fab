"""A disk that fills up at any write of a conversion: one message, and nothing half-written.

The bytes are the same once there is room. `write` and its like fail through a preloaded library,
from the n-th call on files of the output on.
"""

import shutil
from pathlib import Path

import pytest
from safetensors import safe_open

from tests.cases import slow
from tests.command_line import Done, printed, process
from trtspec import machine
from trtspec.checkpoint.output import SPARE_BYTES
from trtspec.errors import TrtspecError
from trtspec.quant.policy import load_policy
from trtspec.quant.run import quantize_checkpoint

SHIM = Path(__file__).with_name("full_disk.c")


@pytest.fixture(scope="module")
def shim(tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiler = shutil.which("gcc")
    if compiler is None:
        pytest.skip("no gcc here")
    path = tmp_path_factory.mktemp("shim") / "full.so"
    printed(compiler, "-shared", "-fPIC", "-o", path, SHIM, "-ldl")
    return path


def quantize(source: Path, out: Path, **environment: str) -> Done:
    return process("quantize", source, "-o", out, "--policy", "k2.5", **environment)


def files(path: Path) -> dict[str, bytes]:
    kept = (file for file in path.iterdir() if not file.name.startswith("."))
    return {file.name: file.read_bytes() for file in kept}


@pytest.mark.parametrize("points", [3, slow(40)])
def test_full_at_points_from_the_first_write_to_the_last(tmp_path, shim, points, new_target):
    source = new_target(format="int4", layers=3, shards=3)
    expected, out = tmp_path / "expected" / "Kimi", tmp_path / "out" / "Kimi"
    count = tmp_path / "count"
    preload = {"LD_PRELOAD": str(shim), "FULL_OUTPUT": str(expected), "FULL_COUNT": str(count)}
    assert quantize(source, expected, **preload).status == 0
    calls = int(count.read_text())
    steps = sorted({1 + number * (calls - 1) // (points - 1) for number in range(points)})
    for at in steps:
        run = quantize(source, out, LD_PRELOAD=str(shim), FULL_OUTPUT=str(out), FULL_AT=str(at))
        assert run.status == 1 and "No space left on device" in run.stderr, (at, run.stderr)
        assert (
            "free space on that disk, then run the command again" in run.stderr
            and "unexpected" not in run.stderr
        )
        assert not list(out.glob(".*.partial")) and not list(out.glob(".*.tmp")), at
        for path in out.glob("*.safetensors"):  # what has a name is whole
            with safe_open(path, "pt") as shard:
                assert list(shard.keys())
        finished = {path.name: path.stat().st_mtime_ns for path in out.glob("*.safetensors")}
        assert not (out / "config.json").exists() or len(finished) == 3
        assert quantize(source, out).status == 0
        assert files(out) == files(expected), at
        shutil.rmtree(out)
    print(
        f"full at {len(steps)} of {calls} writes: each said, nothing half-written, "
        "the same bytes afterwards"
    )


def test_too_small_a_disk_is_told_before_the_first_byte(out, monkeypatch, new_target):
    source = new_target(layers=2, shards=1)
    monkeypatch.setattr(machine, "free_disk", lambda _: SPARE_BYTES)
    with pytest.raises(TrtspecError, match=r"needs [\d,]+ bytes and its disk has [\d,]+ free"):
        quantize_checkpoint(source, out, load_policy("k2.6"))
    assert not out.exists()
