"""`--workers`: any number of threads writes the same bytes and the same journal.

A run chooses their number by itself.
"""

import pytest
from safetensors.torch import load_file, save_file

from tests.json_files import read_lines
from tests.quant.test_streaming import JOURNAL_NAME, K25, K26, weights
from trtspec import machine
from trtspec.errors import TrtspecError
from trtspec.quant import native
from trtspec.quant.conversion_plan import ConversionOptions
from trtspec.quant.run import quantize_checkpoint
from trtspec.quant.shards import thread_count


@pytest.mark.parametrize("weight_scales", ["max", "mse"])
@pytest.mark.parametrize("format", ["bf16", "int4", "fp8-block"])
def test_threads_write_the_same_bytes(tmp_path, format, weight_scales, new_target):
    """Matrices of different sizes, so that a thread's buffers grow and are used again."""
    source, outputs = (
        new_target(format=format, layers=3, hidden=256, shards=4),
        [],
    )
    for workers in (1, 2, 8):
        out = tmp_path / str(workers) / "out"
        result = quantize_checkpoint(
            source, out, K25, ConversionOptions(weight_scales=weight_scales, workers=workers)
        )
        journal = read_lines(out / JOURNAL_NAME)
        outputs.append((weights(out), (out / "README.md").read_text(), journal, result.classes))
    assert outputs[0] == outputs[1] == outputs[2]


def test_threads_of_torch_write_the_same_bytes(tmp_path, monkeypatch, new_target):
    source = new_target(format="fp8-block", layers=2, shards=2)
    quantize_checkpoint(source, tmp_path / "c", K26)
    native.load_kernel.cache_clear()
    monkeypatch.setenv("TRTSPEC_KERNEL", "torch")
    try:
        for workers in (1, 8):
            quantize_checkpoint(
                source, tmp_path / f"torch-{workers}", K26, ConversionOptions(workers=workers)
            )
            assert weights(tmp_path / f"torch-{workers}") == weights(tmp_path / "c")
    finally:
        native.load_kernel.cache_clear()


def test_the_first_bad_tensor_is_the_one_that_is_named(out, new_target):
    source, messages = new_target(layers=3, experts=8, shards=3), set()
    shard = source / "model-00002-of-00003.safetensors"
    tensors = load_file(shard)
    for name in (name for name in tensors if ".experts." in name):
        tensors[name][0, 0] = float("inf")
    save_file(tensors, shard, {"format": "pt"})
    for workers in (1, 2, 8):
        with pytest.raises(
            TrtspecError, match=r"model-00002-of-00003.* NaN or infinity at \[0, 0\]"
        ) as caught:
            quantize_checkpoint(source, out, K26, ConversionOptions(workers=workers))
        messages.add(caught.value.message)
        assert not list(out.glob(".*.partial"))
    assert len(messages) == 1 and caught.value.remedy


def test_cores_and_memory_decide_how_many(monkeypatch):
    class Plan:
        groups = range(4)

    plans = [Plan()] * 4
    monkeypatch.setattr(machine, "cores", lambda: 16)
    monkeypatch.setattr(machine, "free_memory", lambda: 5 << 30)
    assert thread_count(0, plans) == 5  # type: ignore[arg-type]
    assert thread_count(0, plans[:1]) == 4  # type: ignore[arg-type]
    assert thread_count(7, plans) == 7  # type: ignore[arg-type]
    assert thread_count(70, plans) == 16  # type: ignore[arg-type]
    assert thread_count(0, []) == 1
    monkeypatch.setattr(machine, "free_memory", lambda: 0)
    assert thread_count(0, plans) == 1  # type: ignore[arg-type]
