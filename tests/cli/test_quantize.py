"""`trtspec quantize` as a user types it."""

import json

import pytest
from safetensors.torch import load_file, save_file

from tests.command_line import process, trtspec
from tests.quant.test_modelopt_export import different, tensors_of
from tests.tiny import make_target
from trtspec.checkpoint.headers import Checkpoint
from trtspec.quant.modelopt import replace_linears
from trtspec.quant.plan import ConversionOptions, prepare
from trtspec.quant.policy import load_policy


def test_json_holds_the_contract_and_stdout_nothing_else(tmp_path):
    source = make_target(tmp_path / "Kimi-K2.5", format="int4", layers=2)
    run = process("quantize", source, "-o", tmp_path / "out", "--json")
    assert (run.returncode, run.stderr) == (0, "")
    result = json.loads(run.stdout)
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
    assert result["policy"] == "k2.5"  # by the directory's name
    assert result["bytes_out"] == Checkpoint.open(tmp_path / "out").bytes
    again = trtspec("quantize", source, "-o", tmp_path / "out")
    assert (
        again.status == 0
        and "2 shards resumed" in again.stdout
        and "routed experts" in again.stdout
    )


def test_a_published_checkpoint_is_planned_without_network(tmp_path):
    words = ("-o", tmp_path / "out", "--dry-run", "--json")
    told = json.loads(
        trtspec("quantize", "moonshotai/Kimi-K2-Instruct", *words, HF_HUB_OFFLINE="1").stdout
    )
    assert (
        told["ok"]
        and told["bytes_out"] < 0.6 * told["bytes_in"]
        and told["problems"][0]["code"] == "TS-NAME-ABSENT"
    )
    head = ("convert", "lightseekorg/kimi-k2.5-eagle3", "--to", "trtllm", *words)
    told = json.loads(trtspec(*head, HF_HUB_OFFLINE="1").stdout)
    assert told["ok"] and (told["from"], told["to"], told["output"]) == (
        "torchspec",
        "trtllm",
        None,
    )


def test_dry_run_then_inspect_against(tmp_path):
    source = make_target(tmp_path / "in", layers=2)
    run = trtspec(
        "quantize", source, "-o", tmp_path / "out", "--dry_run"
    )  # underscores are fine too
    assert run.status == 0 and "routed experts down_proj 4" in " ".join(
        run.stdout.split()
    )  # rows may wrap
    assert not (tmp_path / "out").exists()
    run = trtspec("quantize", source, "-o", tmp_path / "out")
    assert (
        run.status == 0
        and f"next: trtspec inspect {tmp_path / 'out'} --against {source}\n" in run.stdout
    )
    run = trtspec("inspect", tmp_path / "out", "--against", source, "--sample", "0", "--json")
    assert run.status == 0, run.stdout
    assert json.loads(run.stdout)["comparison"]["classes"]["routed experts up_proj"]["tensors"] == 4


@pytest.mark.parametrize(
    ("options", "status", "text"),
    [
        (["--policy", "k9"], 2, "neither one of k2.5"),
        (["--kv-cache", "int8"], 2, "'--kv-cache': 'int8' is not one of 'fp8', 'none'"),
        (["--engine", "magic"], 2, "'--engine': 'magic' is not one of 'stream', 'modelopt'"),
        (["--input-scales", "missing.json"], 2, "missing.json is not a file"),
    ],
)
def test_wrong_options_are_usage_errors(tmp_path, options, status, text):
    run = trtspec(
        "quantize", make_target(tmp_path / "in", layers=2), "-o", tmp_path / "out", *options
    )
    assert run.status == status and text in run.stderr and "Traceback" not in run.stderr
    assert not (tmp_path / "out").exists()


def test_read_only_output_is_a_message(tmp_path):
    blocker = tmp_path / "file"
    blocker.write_text("")
    run = trtspec("quantize", make_target(tmp_path / "in", layers=2), "-o", blocker / "out")
    assert run.status == 1 and "cannot write" in run.stderr


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["k2.5", "k2.7-code"])
def test_the_modelopt_engine_writes_the_same_weights_and_configs(tmp_path, policy):
    source = make_target(tmp_path / "in", format="int4", layers=3, vision=True)
    stream, modelopt = tmp_path / "stream", tmp_path / "modelopt"
    assert trtspec("quantize", source, "-o", stream, "--policy", policy).status == 0
    run = trtspec("quantize", source, "-o", modelopt, "--policy", policy, "--engine", "modelopt")
    assert run.status == 0, run.stderr
    same = [
        *stream.glob("*.safetensors"),
        *stream.glob("*config.json"),
        stream / "model.safetensors.index.json",
    ]
    for path in same:
        assert path.read_bytes() == (modelopt / path.name).read_bytes(), path.name
    for shard in modelopt.glob("*.safetensors"):  # every NVFP4 byte is ModelOpt's
        tensors = load_file(shard)
        for name in [name for name in tensors if f"{name}_scale_2" in tensors]:
            for part in (name, f"{name}_scale", f"{name}_scale_2"):
                tensors[part].zero_()
        save_file(tensors, shard, {"format": "pt"})
        assert shard.read_bytes() != (stream / shard.name).read_bytes()
    replace_linears(prepare(source, modelopt, load_policy(policy), ConversionOptions()))
    ours, theirs = tensors_of(stream), tensors_of(modelopt)
    assert ours.keys() == theirs.keys() and different(ours, theirs) == []
