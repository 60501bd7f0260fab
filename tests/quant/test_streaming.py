"""`quantize` end to end on tiny checkpoints: bytes, names, configs, resume, refusals."""

import os
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.cases import slow
from tests.command_line import calls_of, inspected, killed_at
from tests.json_files import read_json, write_json
from tests.quant.scale_files import write_scales
from tests.quant.test_full_disk import files
from tests.quant.test_modelopt_export import different
from tests.tiny import make_target, read_tensors, write_tensors
from tests.tiny_formats import pack_int4
from trtspec.checkpoint.headers import Checkpoint
from trtspec.checkpoint.target_problems import read_target, target_spec
from trtspec.checkpoint.tensors import LazyTensors
from trtspec.errors import TrtspecError, UsageError
from trtspec.quant import nvfp4
from trtspec.quant.conversion_plan import ConversionOptions
from trtspec.quant.decode import decoded
from trtspec.quant.policy import load_policy
from trtspec.quant.run import quantize_checkpoint
from trtspec.report import OutputOptions

FORMATS = ["bf16", "int4", "fp8-block"]
K25 = load_policy("k2.5")
K26 = load_policy("k2.6")
JOURNAL_NAME = ".trtspec-quantize.jsonl"


def weights(path: Path) -> dict[str, bytes]:
    return {shard.name: shard.read_bytes() for shard in sorted(path.glob("*.safetensors"))}


@pytest.mark.parametrize("nested", [True, False])
@pytest.mark.parametrize("policy", [K25, K26], ids=["k2.5", "k2.6"])
@pytest.mark.parametrize("format", FORMATS)
def test_every_tensor_is_what_its_source_decodes_to(
    tmp_path, format, policy, nested, out, new_target
):
    source = new_target(format=format, layers=3, shards=3, nested=nested, vision=nested)
    result = quantize_checkpoint(source, out, policy, ConversionOptions(workers=1))
    origin, got = LazyTensors(Checkpoint.open(source)), read_tensors(out)
    expected, roles = {}, read_target(source).roles
    plain = read_tensors(make_target(tmp_path / "plain", layers=3, nested=nested, vision=nested))
    for name in plain:
        weight = decoded(origin, name)
        if roles.get(name.removesuffix(".weight")) not in policy.quantize:
            expected[name] = weight
            continue
        pair = {"gate_proj": "up_proj", "up_proj": "gate_proj"}.get(name.split(".")[-2])
        amax = weight.abs().max()
        if pair:
            amax = torch.maximum(
                amax, decoded(origin, name.replace(name.split(".")[-2], pair)).abs().max()
            )
        packed = nvfp4.quantize(weight, amax.float(), policy.weight_scales)
        expected[name] = packed.packed
        expected[f"{name}_scale"], expected[f"{name}_scale_2"] = packed.scale, packed.scale_2
        expected[name.replace(".weight", ".input_scale")] = torch.tensor(1.0)
    assert set(got) == set(expected)
    assert different(expected, got) == []
    assert result.quantized == sum(role in policy.quantize for role in roles.values())
    assert result.quantized + result.decoded + result.copied == len(plain)


def test_nvfp4_of_the_same_weights_is_the_hand_made_checkpoint(tmp_path, out, new_target):
    quantize_checkpoint(new_target(layers=3), out, K25)
    expected = read_tensors(make_target(tmp_path / "nvfp4", format="nvfp4", layers=3))
    got = read_tensors(out)
    assert set(got) == set(expected) and different(expected, got) == []


@pytest.mark.parametrize("format", FORMATS)
def test_configs_index_and_files(tmp_path, format, new_target):
    source = new_target(format=format, layers=3, vision=True)
    (source / "LICENSE").write_bytes(b"licence\r\n")
    (source / "tokenization_kimi.py").write_text("print('code')\n")
    quantize_checkpoint(source, tmp_path / "out", K25)
    out, published = (
        tmp_path / "out",
        make_target(tmp_path / "nvfp4", format="nvfp4", layers=3, vision=True),
    )
    config, expected = (read_json(path / "config.json") for path in (out, published))
    config["quantization_config"].pop("producer"), expected["quantization_config"].pop("producer")
    assert config == expected
    quant, wanted = (read_json(path / "hf_quant_config.json") for path in (out, published))
    assert quant["quantization"] == wanted["quantization"]
    for name in (
        "LICENSE",
        "tokenization_kimi.py",
        "tiktoken.model",
        "tokenizer_config.json",
        "chat_template.jinja",
    ):
        assert (out / name).read_bytes() == (source / name).read_bytes()
    index = read_json(out / "model.safetensors.index.json")
    found = Checkpoint.open(out)
    assert index["weight_map"] == {name: info.shard for name, info in found.tensors.items()}
    assert index["metadata"]["total_size"] == sum(info.nbytes for info in found.tensors.values())
    assert target_spec(found).quant.format == "nvfp4" and target_spec(found).quant.kv_cache == "fp8"
    provenance = read_json(out / "provenance.json")
    assert provenance["command"] == "quantize" and provenance["options"]["policy"]["name"] == "k2.5"
    assert "routed experts down_proj" in (out / "README.md").read_text()
    assert not list(out.glob(".*.partial"))


def test_without_an_fp8_kv_cache(tmp_path, out, new_target):
    quantize_checkpoint(
        new_target(layers=2),
        out,
        K26,
        ConversionOptions(kv_cache=None),
    )
    assert "kv_cache_scheme" not in read_json(tmp_path / "out/config.json")["quantization_config"]
    assert target_spec(Checkpoint.open(out)).quant.kv_cache is None


def test_input_scales_from_a_file(tmp_path, out, new_target):
    source = new_target(layers=2)
    prefix = "language_model.model.layers.1.mlp.experts"
    amax = {"gate": 5.0, "up": 7.0, "down": 2.0}
    values = {
        f"{prefix}.{expert}.{name}_proj.input_scale": torch.tensor(most) / 2688
        for expert in range(4)
        for name, most in amax.items()
    }
    values[f"{prefix}.3.down_proj.input_scale"] = torch.tensor(0.25)
    path = write_scales(tmp_path / "scales.safetensors", source, values)
    quantize_checkpoint(source, out, K26, ConversionOptions(input_scales=path))
    got = read_tensors(out)
    for name in ("0.gate_proj", "1.up_proj"):
        assert torch.equal(got[f"{prefix}.{name}.input_scale"], torch.tensor(7.0) / 2688)
    assert torch.equal(got[f"{prefix}.2.down_proj.input_scale"], torch.tensor(2.0) / 2688)
    assert float(got[f"{prefix}.3.down_proj.input_scale"]) == 0.25
    del values[f"{prefix}.1.down_proj.input_scale"]
    write_scales(path, source, values)
    with pytest.raises(TrtspecError, match="no input scale for .*layers.1.mlp.experts.1.down_proj"):
        quantize_checkpoint(source, tmp_path / "out3", K26, ConversionOptions(input_scales=path))
    assert not (tmp_path / "out3").exists()


def test_dead_weights_get_positive_scales_and_are_reported(tmp_path, out, new_target):
    source = new_target(layers=2, shards=1)
    tensors = read_tensors(source)
    module = "language_model.model.layers.1.mlp.experts.2.down_proj"
    tensors[f"{module}.weight"].zero_()
    write_tensors(source, tensors)
    result = quantize_checkpoint(source, out, K26)
    got = load_file(tmp_path / "out/model.safetensors")
    (found,) = result.problems
    assert (found.code, found.severity, found.where) == (
        "TS-TARGET-ZERO",
        "error",
        f"{module}.weight",
    )
    assert (
        result.classes["routed experts down_proj"].zero_blocks
        == tensors[f"{module}.weight"].numel() // 16
    )
    assert (
        float(got[f"{module}.weight_scale_2"]) > 0
        and (got[f"{module}.weight_scale"].float() == 1).all()
    )
    assert module in (tmp_path / "out/README.md").read_text()


def test_dry_run_writes_nothing_and_tells_the_size(out, new_target):
    source = new_target(format="fp8-block", layers=3)
    plan = quantize_checkpoint(source, out, K26, output_options=OutputOptions(dry_run=True))
    assert not out.exists()
    done = quantize_checkpoint(source, out, K26)
    same = (
        "policy",
        "weight_scales",
        "deviations",
        "quantized",
        "decoded",
        "copied",
        "bytes_in",
        "bytes_out",
    )
    assert [getattr(plan, key) for key in same] == [getattr(done, key) for key in same]
    assert done.bytes_out == inspected(out).values["bytes"]


def test_a_second_run_keeps_finished_shards_and_repairs_a_damaged_one(out, new_target):
    source = new_target(layers=3, shards=3)
    quantize_checkpoint(source, out, K26)
    before, times = (
        weights(out),
        {path.name: path.stat().st_mtime_ns for path in out.glob("*.safetensors")},
    )
    assert quantize_checkpoint(source, out, K26).shards_resumed == 3
    damaged = out / "model-00002-of-00003.safetensors"
    with damaged.open("r+b") as stream:
        stream.seek(-1, os.SEEK_END)
        last = stream.read(1)
        stream.seek(-1, os.SEEK_END)
        stream.write(bytes([last[0] ^ 1]))
    assert quantize_checkpoint(source, out, K26).shards_resumed == 2
    assert weights(out) == before
    assert all(
        (out / name).stat().st_mtime_ns == time
        for name, time in times.items()
        if name != damaged.name
    )


def test_changed_options_or_source_are_refused_until_restart(out, new_target):
    source = new_target(layers=2)
    quantize_checkpoint(source, out, K26)
    with pytest.raises(UsageError, match='options.policy.name was "k2.6", now "k2.5";') as caught:
        quantize_checkpoint(source, out, K25)
    with pytest.raises(UsageError, match='else: options.weight_scales was "mse", now "max"$'):
        quantize_checkpoint(source, out, K26, ConversionOptions(weight_scales="max"))
    with pytest.raises(
        UsageError, match='options.kv_cache was "fp8", now null$'
    ):  # a dry run runs the same checks
        quantize_checkpoint(
            source, out, K26, ConversionOptions(kv_cache=None), OutputOptions(dry_run=True)
        )
    assert "`restart`" in caught.value.remedy
    assert (
        quantize_checkpoint(
            source, out, K25, output_options=OutputOptions(restart=True)
        ).shards_resumed
        == 0
    )
    shard = source / "model-00001-of-00002.safetensors"
    size = shard.stat().st_size
    make_target(source, layers=3)
    with pytest.raises(UsageError, match=rf"source.shards.{shard.name} was {size}, now \d+"):
        quantize_checkpoint(source, out, K25)


def test_a_shard_whose_source_was_written_since_is_converted_again(tmp_path, new_target, out):
    """As after a download was repeated: no output mixes two sources."""
    source = new_target(layers=3, shards=3)
    quantize_checkpoint(source, out, K26)
    shard = source / "model-00002-of-00003.safetensors"
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1  # of the last tensor
    shard.write_bytes(data)
    assert quantize_checkpoint(source, out, K26).shards_resumed < 3
    quantize_checkpoint(source, tmp_path / "fresh", K26)
    assert weights(out) == weights(tmp_path / "fresh")


def test_force_replaces_a_conversion_and_nothing_else(tmp_path, new_target):
    source, foreign = (
        new_target(layers=2),
        make_target(tmp_path / "other", layers=1, shards=3),
    )
    before = {path.name: path.read_bytes() for path in foreign.iterdir()}
    with pytest.raises(UsageError, match="did not write"):
        quantize_checkpoint(source, foreign, K26)
    with pytest.raises(
        UsageError,
        match=r"holds .*config.json, .* and \d+ more, which `trtspec quantize` did not write",
    ):
        quantize_checkpoint(source, foreign, K26, output_options=OutputOptions(force=True))
    assert before == {path.name: path.read_bytes() for path in foreign.iterdir()}
    out, other = tmp_path / "out", make_target(tmp_path / "in2", layers=2, shards=3, seed=1)
    quantize_checkpoint(other, out, K25)
    (out / JOURNAL_NAME).unlink()
    (out / "adapter.safetensors").write_bytes(b"mine")
    for again in (OutputOptions(force=True), OutputOptions(force=True, dry_run=True)):
        with pytest.raises(
            UsageError, match=r"holds adapter.safetensors, which `trtspec quantize` did not write"
        ):
            quantize_checkpoint(source, out, K26, output_options=again)
    assert (out / "adapter.safetensors").read_bytes() == b"mine" and len(
        Checkpoint.open(other).shards
    ) == 3
    (out / "adapter.safetensors").unlink()
    quantize_checkpoint(source, out, K26, output_options=OutputOptions(force=True))
    assert len(Checkpoint.open(out).shards) == 2 and len(list(out.glob("*.safetensors"))) == 2
    (out / "adapter.safetensors").write_bytes(b"mine")
    for again in (OutputOptions(), OutputOptions(restart=True)):
        with pytest.raises(UsageError, match="also holds adapter.safetensors"):
            quantize_checkpoint(source, out, K26, output_options=again)
    assert (out / "adapter.safetensors").read_bytes() == b"mine"


def test_two_runs_at_once_are_refused(out, new_target):
    import fcntl

    source = new_target(layers=2)
    quantize_checkpoint(source, out, K26)
    with (out / JOURNAL_NAME).open() as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        for restart in (False, True):
            with pytest.raises(UsageError, match="another run is writing"):
                quantize_checkpoint(source, out, K26, output_options=OutputOptions(restart=restart))
    assert weights(out)


@pytest.mark.parametrize(
    "case", ["no blocks", "integers", "float32", "tiny", "unknown", "nvfp4", "same directory"]
)
def test_bad_input_is_named_and_leaves_nothing(out, case, new_target):
    source = new_target(format="nvfp4" if case == "nvfp4" else "bf16", layers=2, shards=1)
    name = "language_model.model.layers.1.mlp.experts.1.down_proj.weight"
    tensors = read_tensors(source)
    if case == "no blocks":
        config = read_json(source / "config.json")
        config["text_config"]["moe_intermediate_size"] = 24
        write_json(source / "config.json", config)
        for key in tensors:
            if "experts." in key:
                narrow = tensors[key][:, :24] if "down_proj" in key else tensors[key][:24]
                tensors[key] = narrow.contiguous()
    elif case == "integers":
        tensors[name] = tensors[name].to(torch.int64)
    elif case == "float32":
        tensors[name] = tensors[name].float()
    elif case == "tiny":
        tensors[name] = tensors[name] * 2.0**-100
    elif case == "unknown":
        packed = pack_int4(torch.ones(64, 64))
        tensors |= {f"projector.{part}": tensor for part, tensor in packed.items()}
    write_tensors(source, tensors)
    message = {
        "no blocks": "down_proj.weight has shape .64, 24., which has no whole blocks",
        "integers": f"{name} is I64",
        "float32": f"{name} is F32, and BF16, FP8 or INT4 becomes NVFP4",
        "tiny": f"{name} in model.safetensors has no weight above 2\\^-88",
        "nvfp4": "is NVFP4 already",
        "unknown": "projector.weight_shape is stored as INT4 pack-quantized, and is not a linear",
        "same directory": "the same directory",
    }[case]
    with pytest.raises(TrtspecError, match=message):
        quantize_checkpoint(source, source if case == "same directory" else out, K26)
    assert not [
        name
        for pattern in ("*.safetensors", ".*.partial", "config.json")
        for name in out.glob(pattern)
    ]


@pytest.mark.parametrize(("workers", "attempts"), [(1, 3), (2, 2), (8, 1), slow(1, 20)])
def test_kill_and_resume_gives_the_same_bytes(tmp_path, workers, attempts, new_target):
    source = new_target(format="int4", layers=6, hidden=128, experts=16, shards=12)
    expected = tmp_path / "expected" / "Kimi"
    out, draw, kills = tmp_path / "out" / "Kimi", random.Random(workers), 0

    def quantize(output: Path) -> Any:
        return quantize_checkpoint(source, output, K25, ConversionOptions(workers=workers))

    calls = calls_of(lambda: quantize(expected))
    for _ in range(attempts):
        # a third of the calls come before the first shard
        killed = killed_at(draw.uniform(0.32, 0.5) * calls, lambda: quantize(out))
        kills += killed
        recorded = (out / JOURNAL_NAME).read_text().count("sha256")
        assert (out / "config.json").exists() != killed or recorded == 12
    assert kills
    times = {path.name: path.stat().st_mtime_ns for path in out.glob("*.safetensors")}
    journal = (out / JOURNAL_NAME).read_text()
    finished = {name for name in times if f'"key": "{name}"' in journal}
    assert quantize(out).shards_resumed == len(finished)
    assert files(out) == files(expected)
    assert all((out / name).stat().st_mtime_ns == times[name] for name in finished)
    assert not list(out.glob(".*.partial"))
