"""`trtspec quantize` as a user types it."""

from pathlib import Path

import pytest

from tests.command_line import inspected, process, succeeded, trtspec
from tests.quant.test_modelopt_export import different
from tests.tiny import make_target, read_tensors


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "out"


def test_json_holds_the_contract_and_stdout_nothing_else(tmp_path, out):
    source = make_target(tmp_path / "Kimi-K2.5", format="int4", layers=2)
    run = process("quantize", source, "-o", out, "--json")
    assert (run.status, run.stderr) == (0, "")
    result = run.json
    contract = {
        "output",
        "quantized",
        "copied",
        "bytes_in",
        "bytes_out",
        "seconds",
        "peak_rss_bytes",
        "shards_resumed",
    }
    assert contract <= set(result)
    assert result["policy"] == "k2.5"  # by its config
    assert result["bytes_out"] == inspected(out).values["bytes"]
    again = succeeded("quantize", source, "-o", out)
    assert "2 shards resumed" in again.stdout and "routed experts" in again.stdout


@pytest.mark.parametrize(
    "words",
    [
        ("quantize", "moonshotai/Kimi-K2-Instruct"),
        ("convert", "lightseekorg/kimi-k2.5-eagle3", "--to", "trtllm"),
    ],
)
def test_a_dry_run_needs_the_headers(out, words):
    done = trtspec(*words, "-o", out, "--dry-run", HF_HUB_OFFLINE="1")
    assert done.status == 4 and "HF_HUB_OFFLINE is set" in done.stderr


def test_dry_run_then_inspect_against(tmp_path, out):
    source = make_target(tmp_path / "in", layers=2)
    run = succeeded("quantize", source, "-o", out, "--dry_run")  # underscores are fine too
    assert "routed experts down_proj 4" in " ".join(run.stdout.split())  # rows may wrap
    assert not out.exists()
    run = succeeded("quantize", source, "-o", out)
    assert f"next: trtspec inspect {out} --against {source}\n" in run.stdout
    run = succeeded("inspect", out, "--against", source, "--sample", "0", "--json")
    assert run.json["comparison"]["classes"]["routed experts up_proj"]["tensors"] == 4


@pytest.mark.parametrize(
    ("options", "status", "text"),
    [
        (["--policy", "k9"], 2, "--policy k9 is not one of 'k2.5', 'k2.6'"),
        (["--kv-cache", "int8"], 2, "--kv-cache int8 is not one of 'fp8', 'none'"),
        (["--engine", "magic"], 2, "--engine magic is not one of 'stream', 'modelopt'"),
        (["--input-scales", "missing.json"], 2, "missing.json is not a file"),
    ],
)
def test_wrong_options_are_usage_errors(tmp_path, options, status, text, out):
    run = trtspec("quantize", make_target(tmp_path / "in", layers=2), "-o", out, *options)
    assert run.status == status and text in run.stderr and "Traceback" not in run.stderr
    assert not out.exists()


def test_read_only_output_is_a_message(tmp_path):
    blocker = tmp_path / "file"
    blocker.write_text("")
    run = trtspec("quantize", make_target(tmp_path / "in", layers=2), "-o", blocker / "out")
    assert run.status == 1 and "cannot write" in run.stderr


@pytest.mark.parametrize("format", ["int4", "bf16", "fp8-block"])
@pytest.mark.parametrize("policy", ["k2.5", "k2.7-code"])
def test_the_modelopt_engine_writes_the_same_files(tmp_path, policy, format):
    source = make_target(tmp_path / "in", format=format, layers=3, vision=True)
    outputs = {engine: tmp_path / engine / "Kimi" for engine in ("stream", "modelopt")}
    for engine, output in outputs.items():
        words = ("quantize", source, "-o", output, "--policy", policy, "--engine", engine)
        succeeded(*words)
    files = sorted(path.name for path in outputs["stream"].iterdir() if path.suffix != ".jsonl")
    assert len(files) > 5
    for name in files:
        first, second = ((output / name).read_bytes() for output in outputs.values())
        assert first == second, name


def test_the_modelopt_engine_is_modelopts_class(tmp_path, monkeypatch):
    from modelopt.torch.quantization.qtensor.nvfp4_tensor import NVFP4QTensor

    source = make_target(tmp_path / "in", layers=2)
    words = ("quantize", source, "--policy", "k2.5", "--engine")
    succeeded(*words, "stream", "-o", tmp_path / "stream")
    original = NVFP4QTensor.quantize

    def changed(*inputs):
        tensor, scale, scale_2 = original(*inputs)
        tensor._quantized_data.zero_()
        return tensor, scale, scale_2

    monkeypatch.setattr(NVFP4QTensor, "quantize", changed)
    trtspec(*words, "modelopt", "-o", tmp_path / "modelopt")
    assert different(read_tensors(tmp_path / "stream"), read_tensors(tmp_path / "modelopt"))
