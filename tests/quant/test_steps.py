"""Tensors larger than a step go by in tiles and come out the same; how many workers a run starts by itself."""

from __future__ import annotations

import pytest

from tests.quant.test_streaming import weights
from tests.tiny import make_target
from trtspec import machine
from trtspec.checkpoint.headers import Checkpoint
from trtspec.quant import shard
from trtspec.quant.conversion import ConversionOptions
from trtspec.quant.plan import plan_conversion
from trtspec.quant.policy import load_policy
from trtspec.quant.streaming import quantize_checkpoint
from trtspec.quant.workers import worker_count


@pytest.mark.parametrize("format", ["bf16", "int4", "fp8-block"])
def test_tiles_give_the_same_bytes_as_whole_tensors(tmp_path, monkeypatch, format):
    source, policy = make_target(tmp_path / "in", format=format, layers=2, hidden=512, shards=2), load_policy("k2.5")
    quantize_checkpoint(source, tmp_path / "whole", policy, ConversionOptions(workers=1))
    for name, size in (("HOLD_BYTES", 1 << 10), ("TILE_BYTES", 1 << 15), ("BATCH_BYTES", 1 << 15), ("ROW_UNIT", 128)):
        monkeypatch.setattr(shard, name, size)
    plans = plan_conversion(Checkpoint.open(source), policy)
    assert max(step.size for plan in plans for step in shard.steps(plan)) < 3 << 18
    assert sum(step.done for plan in plans for step in shard.steps(plan)) == sum(plan.bytes_in for plan in plans)
    quantize_checkpoint(source, tmp_path / "tiles", policy, ConversionOptions(workers=1))
    assert weights(tmp_path / "tiles") == weights(tmp_path / "whole")


def test_a_large_source_gets_what_cores_and_memory_allow(monkeypatch):
    class Plan:
        bytes_in = 1 << 30

    plans = [Plan()] * 64
    monkeypatch.setattr(machine, "cores", lambda: 16)
    monkeypatch.setattr(machine, "free_memory", lambda: 5 << 30)
    assert worker_count(0, plans) == 5  # type: ignore[arg-type]
    assert worker_count(0, plans[:2]) == 2  # type: ignore[arg-type]
    assert worker_count(0, plans[:1]) == 1  # type: ignore[arg-type]
    assert worker_count(7, plans) == 7  # type: ignore[arg-type]
    monkeypatch.setattr(machine, "free_memory", lambda: 0)
    assert worker_count(0, plans) == 1  # type: ignore[arg-type]
