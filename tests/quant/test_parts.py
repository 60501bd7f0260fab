"""Several machines on one conversion: parts and merge give what one run gives, and refuse what would not."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.tiny import make_target
from trtspec.checkpoint.journal import Journal
from trtspec.errors import TrtspecError, UsageError
from trtspec.quant.conversion import ConversionOptions
from trtspec.quant.parts import parse_part
from trtspec.quant.policy import load_policy
from trtspec.quant.streaming import quantize_checkpoint
from trtspec.quant.verify import compare
from trtspec.report import OutputOptions

K25 = load_policy("k2.5")


def quantize(source: Path, out: Path, again: OutputOptions | None = None, **options):
    return quantize_checkpoint(source, out, K25, ConversionOptions(workers=1, **options), again)


def files(path: Path) -> dict[str, bytes]:
    """Everything but the journals and the record of when it was made."""
    kept = (file for file in sorted(path.iterdir()) if file.name != "provenance.json" and not file.name.startswith("."))
    return {file.name: file.read_bytes() for file in kept}


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    return make_target(tmp_path_factory.mktemp("parts") / "in", format="int4", layers=3, shards=5, vision=True)


@pytest.fixture(scope="module")
def expected(source) -> dict[str, bytes]:
    quantize(source, source.with_name("whole"))
    return files(source.with_name("whole"))


def test_three_parts_and_a_merge_are_one_run(source, expected, tmp_path):
    out = tmp_path / "whole"
    for index in (2, 0):
        result = quantize(source, out, part=(index, 3))
        assert result["part"] == f"{index}/3" and not (out / "config.json").exists()
    with pytest.raises(TrtspecError, match=r"parts 1/3 of .* were never begun") as caught:
        quantize(source, out, merge=True)
    assert "--shard 1/3" in caught.value.remedy and not (out / "config.json").exists()
    quantize(source, out, part=(1, 3))
    quantize(source, out, merge=True)
    assert files(out) == expected
    assert compare(out, source, 0)["problems"] == []
    shards = json.loads((out / "provenance.json").read_text())["shards"]
    assert len(shards) == 5
    stamps = {path.name: path.stat().st_mtime_ns for path in out.glob("*.safetensors")}
    assert quantize(source, out, part=(0, 3))["shards_resumed"] == 2  # nothing is done twice
    quantize(source, out, merge=True)
    assert stamps == {path.name: path.stat().st_mtime_ns for path in out.glob("*.safetensors")}


def test_a_part_is_taken_once_and_others_run_beside_it(source, tmp_path):
    out = tmp_path / "out"
    quantize(source, out, part=(0, 2))
    begun = out / ".trtspec-quantize.0-of-2.jsonl"
    header = json.loads(begun.read_text().splitlines()[0])["header"]
    with Journal(begun, header):  # another machine is at it
        with pytest.raises(UsageError, match="another run is writing"):
            quantize(source, out, part=(0, 2))
        quantize(source, out, part=(1, 2))
        with pytest.raises(UsageError, match="another run is writing"):
            quantize(source, out, merge=True)
    quantize(source, out, merge=True)


def test_what_does_not_fit_together_is_refused(source, tmp_path):
    out = tmp_path / "out"
    with pytest.raises(UsageError, match="no conversion in parts"):
        quantize(source, out, merge=True)
    quantize(source, out, part=(0, 2))
    for options, text in (
        ({"part": (0, 3)}, "holds a conversion in 2 parts"),
        ({}, "holds a conversion in 2 parts"),
        ({"part": (0, 2), "weight_scales": "mse"}, "options was"),
    ):
        with pytest.raises(UsageError, match=text):
            quantize(source, out, **options)
    quantize(source, out, part=(1, 2))
    with pytest.raises(UsageError, match="options was"):
        quantize(source, out, merge=True, weight_scales="mse")
    (out / "old.safetensors").write_bytes(b"")
    with pytest.raises(TrtspecError, match="which no part wrote"):
        quantize(source, out, merge=True)
    (out / "old.safetensors").unlink()
    damaged = out / "model-00002-of-00005.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"?")
    with pytest.raises(TrtspecError, match=f"first {damaged.name}"):
        quantize(source, out, merge=True)
    assert not (out / "config.json").exists()
    assert quantize(source, out, part=(1, 2))["shards_resumed"] == 1
    quantize(source, out, merge=True)
    with pytest.raises(UsageError, match="has no work"):
        quantize(source, tmp_path / "other", part=(5, 6))


@pytest.mark.parametrize("text", ["4/4", "-1/4", "1", "a/b", "1/0"])
def test_part_numbers(text):
    assert parse_part("3/4") == (3, 4)
    with pytest.raises(UsageError, match=re.escape(f"--shard '{text}' is not i/n")):
        parse_part(text)


def test_a_killed_part_goes_on(source, expected, tmp_path):
    out = tmp_path / "whole"
    command = [sys.executable, "-m", "trtspec", "quantize", str(source), "-o", str(out), "--policy", "k2.5"]
    process = subprocess.Popen([*command, "--shard", "0/2"], stdout=subprocess.DEVNULL)
    while process.poll() is None and not (out / ".trtspec-quantize.0-of-2.jsonl").exists():
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    for options in (["--shard", "1/2"], ["--shard", "0/2"], ["--merge"]):
        run = subprocess.run([*command, *options], capture_output=True, text=True, check=False)
        assert run.returncode == 0, run.stderr
    assert files(out) == expected
    assert not list(out.glob(".*.partial"))
