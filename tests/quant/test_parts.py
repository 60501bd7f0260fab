"""Several machines on one conversion: parts and merge give what one run gives, and refuse what would not."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.tiny import make_target
from trtspec.checkpoint.writer import Journal
from trtspec.errors import TrtspecError, UsageError
from trtspec.quant.conversion import ConversionOptions
from trtspec.quant.policy import load_policy
from trtspec.quant.streaming import journal_name, journal_of, parse_part, quantize_checkpoint
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
        assert result.part == f"{index}/3" and not (out / "config.json").exists()
    with pytest.raises(TrtspecError, match=r"parts 1/3 of .* were never begun") as caught:
        quantize(source, out, merge=True)
    assert "--shard 1/3" in caught.value.remedy and not (out / "config.json").exists()
    quantize(source, out, part=(1, 3))
    quantize(source, out, merge=True)
    assert files(out) == expected
    assert compare(out, source, 0).problems == []
    shards = json.loads((out / "provenance.json").read_text())["shards"]
    assert len(shards) == 5
    stamps = {path.name: path.stat().st_mtime_ns for path in out.glob("*.safetensors")}
    assert quantize(source, out, part=(0, 3)).shards_resumed == 2  # nothing is done twice
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
        ({"part": (0, 2), "weight_scales": "mse"}, r'jsonl was begun .*: options.weight_scales was "max", now "mse"$'),
        (
            {"part": (1, 2), "weight_scales": "mse"},
            r'part 0/2 of .* begun .*: options.weight_scales was "max", now "mse"$',
        ),
    ):
        with pytest.raises(UsageError, match=text):
            quantize(source, out, **options)
    quantize(source, out, part=(1, 2))
    with pytest.raises(UsageError, match='part 0/2 of .*: options.weight_scales was "max", now "mse"$'):
        quantize(source, out, merge=True, weight_scales="mse")
    (out / "old.safetensors").write_bytes(b"")
    with pytest.raises(TrtspecError, match="also holds old.safetensors"):
        quantize(source, out, merge=True)
    (out / "old.safetensors").unlink()
    damaged = out / "model-00002-of-00005.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"?")
    with pytest.raises(TrtspecError, match=f"first {damaged.name}"):
        quantize(source, out, merge=True)
    assert not (out / "config.json").exists()
    assert quantize(source, out, part=(1, 2)).shards_resumed == 1
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


def begin_part(source: Path, out: Path, index: int, delay: float, barrier: Any, found: Any) -> None:
    """One machine; its probe for permissions stays for a while."""
    unlink = Path.unlink

    def late(path: Path, missing_ok: bool = False) -> None:
        if path.name.endswith(".partial") and path.name.count(".") == 2:
            time.sleep(delay)
        unlink(path, missing_ok)

    Path.unlink = late  # type: ignore[method-assign]
    barrier.wait()
    try:
        found.put(quantize(source, out, part=(index, 2)).part)
    except Exception as error:
        found.put(f"refused: {error}")


def together(source: Path, out: Path, delays: tuple[float, float]) -> list[str]:
    fork = multiprocessing.get_context("fork")
    barrier, found = fork.Barrier(2), fork.Queue()
    parts = [fork.Process(target=begin_part, args=(source, out, i, delays[i], barrier, found)) for i in range(2)]
    for part in parts:
        part.start()
    told = sorted(found.get(timeout=120) for _ in parts)
    for part in parts:
        part.join()
    return told


@pytest.mark.parametrize("count", [5, pytest.param(200, marks=[pytest.mark.slow, pytest.mark.timeout(1800)])])
def test_parts_that_start_together_never_refuse_each_other(tmp_path, count):
    source = make_target(tmp_path / "in", layers=2, shards=2)
    quantize(source, tmp_path / "out")
    expected, draw = files(tmp_path / "out"), random.Random(0)
    for number in range(count):
        out = tmp_path / str(number) / "out"
        delays = (draw.choice([0, 0.01, 0.05]), draw.choice([0, 0.01, 0.05]))
        assert together(source, out, delays) == ["0/2", "1/2"]
        quantize(source, out, merge=True)
        assert files(out) == expected
    print(f"{count} times two parts together: none refused, all outputs identical")


def test_parts_of_other_options_that_start_together_do_not_both_go_on(source, tmp_path):
    """Whichever comes second says what differs, and leaves no trace that would refuse its correction."""
    out = tmp_path / "out"
    quantize(source, out, part=(0, 2))
    for again in (None, OutputOptions(dry_run=True), OutputOptions(restart=True)):
        with pytest.raises(UsageError, match='part 0/2 of .*: options.kv_cache was "fp8", now null'):
            quantize(source, out, again, part=(1, 2), kv_cache=None)
    assert not (out / journal_name((1, 2))).exists()
    header = {"source": {}, "options": {}}
    with pytest.raises(UsageError, match="part 0/2 of"), journal_of(out, (1, 2), header, restart=False):
        pass
    assert not (out / journal_name((1, 2))).exists()
    quantize(source, out, part=(1, 2))
    quantize(source, out, merge=True)
