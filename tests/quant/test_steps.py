"""Tensors larger than a step go by in tiles and come out the same."""

from __future__ import annotations

import pytest

from tests.quant.test_streaming import weights
from tests.tiny import make_target
from trtspec.checkpoint.headers import Checkpoint
from trtspec.quant import shard
from trtspec.quant.conversion import ConversionOptions
from trtspec.quant.plan import plan_conversion
from trtspec.quant.policy import load_policy
from trtspec.quant.streaming import quantize_checkpoint


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
