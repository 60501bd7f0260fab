"""Calibration against ModelOpt's on the whole model; kills; what is refused."""

import json
import os
import random
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from tests.command_line import ROOT, calls_of, killed_at, printed, printed_json
from tests.json_files import write_json, write_lines
from tests.tiny import make_target, read_tensors, write_tensors
from trtspec.calibrate import (
    CalibrationOptions,
    calibrate_checkpoint,
    equal_length_batches,
    read_texts,
)
from trtspec.checkpoint.tokenizer import KimiTokenizer
from trtspec.errors import TrtspecError, UsageError
from trtspec.quant.conversion_plan import ConversionOptions
from trtspec.quant.policy import load_policy
from trtspec.quant.run import quantize_checkpoint
from trtspec.report import OutputOptions, ProgressBar

FLOAT32 = CalibrationOptions(samples=24, seq_len=40, dtype=torch.float32)
K25, K26 = load_policy("k2.5"), load_policy("k2.6")
WORDS = [
    "the",
    "quick",
    "brown",
    "fox",
    "jumps",
    "over",
    "a",
    "lazy",
    "dog",
    "def",
    "return",
    "x",
    "=",
    "3",
    ";",
]
EVERYTHING = replace(K25, quantize=[*K25.quantize, "attention, by heads", "attention, latent"])


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    """Rows of every shape, of many lengths."""
    shuffle, rows = random.Random(0), []
    for number in range(30):
        text, answer = (
            " ".join(shuffle.choices(WORDS, k=shuffle.randint(2, 30))) for _ in range(2)
        )
        turns = [{"role": "user", "content": text}, {"role": "assistant", "content": answer}]
        rows.append(({"text": text}, {"messages": turns}, {"prompt": text})[number % 3])
    return write_lines(tmp_path_factory.mktemp("data") / "texts.jsonl", rows)


def modelopt(
    source: Path, data: Path, config: str, dtype: str, out: Path
) -> dict[str, torch.Tensor]:
    """ModelOpt's input scales on the very batches that trtspec runs."""
    texts = read_texts(data, KimiTokenizer(source), FLOAT32.samples, FLOAT32.seq_len)
    batches = out.with_suffix(".json")
    write_json(batches, [batch.tolist() for batch in equal_length_batches(texts)])
    copy = out.with_name(f"{out.name}-source")
    shutil.copytree(source, copy)
    oracle = [sys.executable, "-m", "tests.calibrate.modelopt_whole"]
    printed(*oracle, copy, config, batches, dtype, out, cwd=ROOT)
    tensors = read_tensors(out)
    return {name: tensor for name, tensor in tensors.items() if name.endswith(".input_scale")}


def starve(source: Path, layer: int, expert: int) -> None:
    """No token is routed to this expert any more."""
    name = f"model.layers.{layer}.mlp.gate.e_score_correction_bias"
    for path in source.glob("*.safetensors"):
        tensors = load_file(path)
        for key in tensors:
            if key.endswith(name):
                tensors[key][expert] = -100.0
        save_file(tensors, path, {"format": "pt"})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("format", "nested", "config", "policy"),
    [
        ("bf16", True, "NVFP4_MLP_ONLY_CFG", "k2.5"),
        ("int4", False, "NVFP4_MLP_ONLY_CFG", "k2.5"),
        ("bf16", False, "NVFP4_DEFAULT_CFG", "everything"),
        ("bf16", True, "NVFP4_EXPERTS_ONLY_CFG", "k2.6"),
    ],
)
def test_all_scales_equal_modelopts_whole_model_calibration(
    tmp_path, data, format, nested, config, policy
):
    source = make_target(
        tmp_path / "in", format=format, nested=nested, layers=4, experts=6, shards=3
    )
    starve(source, 2, 3)
    chosen = EVERYTHING if policy == "everything" else load_policy(policy)
    theirs = modelopt(source, data, config, "float32", tmp_path / "theirs")
    theirs = {
        name: value
        for name, value in theirs.items()
        if nested <= name.startswith("language_model.")
    }
    result = calibrate_checkpoint(source, data, tmp_path / "ours.safetensors", chosen, FLOAT32)
    ours = load_file(tmp_path / "ours.safetensors")
    assert set(ours) == set(theirs)
    assert result.linears == len(ours) and result.unreached == {"2": [3]}
    apart = {name: float((ours[name] / theirs[name] - 1).abs()) for name in ours}
    assert max(apart.values()) < 2e-6
    exact = sum(torch.equal(ours[name].bfloat16(), theirs[name].bfloat16()) for name in ours)
    print(f"{len(ours)} scales, {max(apart.values()):.1e} apart at most; {exact} equal in bf16")
    assert exact == len(ours)


def test_experts_share_a_scale_and_quantize_takes_the_file(tmp_path, data):
    source = make_target(tmp_path / "in", layers=3, experts=4)
    result = calibrate_checkpoint(source, data, tmp_path / "s.safetensors", K25, FLOAT32)
    quantize_checkpoint(
        source, tmp_path / "out", K25, ConversionOptions(input_scales=tmp_path / "s.safetensors")
    )
    scales = load_file(tmp_path / "s.safetensors")
    written = read_tensors(tmp_path / "out")
    assert {name for name in written if name.endswith("input_scale")} == set(scales)
    assert all(torch.equal(written[name], scale) for name, scale in scales.items())
    stem = "language_model.model.layers.1.mlp.experts."
    for leaf in ("gate_proj", "up_proj", "down_proj"):
        assert (
            len({float(scales[f"{stem}{expert}.{leaf}.input_scale"]) for expert in range(4)}) == 1
        )
    assert result.texts == 24 and result.experts == 8
    with safe_open(tmp_path / "s.safetensors", "pt") as file:
        about = json.loads(file.metadata()["trtspec"])
    assert about["options"]["seq_len"] == 40 and about["tokens"] == result.tokens


def test_twenty_kills_leave_the_same_bytes(tmp_path, data):
    source = make_target(tmp_path / "in", format="int4", layers=6, experts=6)
    whole = (source, data, tmp_path / "whole.safetensors", K26, FLOAT32)
    calibrate_checkpoint(*whole)  # what the first run imports is no part of the others
    (tmp_path / "whole.safetensors").unlink()
    calls = calls_of(lambda: calibrate_checkpoint(*whole))
    expected = (tmp_path / "whole.safetensors").read_bytes()
    record = (tmp_path / "whole.safetensors.provenance.json").read_bytes()
    output, shuffle, kills, finished = tmp_path / "scales.safetensors", random.Random(1), 0, 0
    arguments = (source, data, output, K26, FLOAT32)
    resumed = []
    while kills < 20 or not any(resumed):
        journal = tmp_path / ".scales.safetensors.calibrate/.trtspec-calibrate.jsonl"
        before = journal.read_bytes() if journal.exists() else b""
        if not killed_at(
            shuffle.uniform(0.02, 0.7) * calls, lambda: calibrate_checkpoint(*arguments)
        ):
            assert output.read_bytes() == expected
            output.unlink()
            finished += 1
            continue
        kills += 1
        if before.count(b"\n") > 1 and journal.exists():  # what was done is not done again
            assert journal.read_bytes().startswith(before[: before.rfind(b"\n") + 1])
            resumed.append(before.count(b"\n") - 1)
    calibrate_checkpoint(*arguments)
    assert output.read_bytes() == expected
    assert output.with_name(f"{output.name}.provenance.json").read_bytes() == record
    print(
        f"{kills} kills, {finished} runs ended between them, "
        f"resumed behind layers {sorted(resumed)}"
    )
    assert not list(tmp_path.glob(".*"))
    assert max(resumed) > 0


def test_states_on_disk_give_the_same_file(tmp_path, data, monkeypatch):
    source = make_target(tmp_path / "in", layers=3)
    calibrate_checkpoint(source, data, tmp_path / "memory.safetensors", K26, FLOAT32)
    monkeypatch.setattr("trtspec.calibrate.STATES_SHARE", 0)
    calibrate_checkpoint(source, data, tmp_path / "disk.safetensors", K26, FLOAT32)
    assert (tmp_path / "memory.safetensors").read_bytes() == (
        tmp_path / "disk.safetensors"
    ).read_bytes()


def interrupted(source: Path, data: Path, output: Path) -> None:
    def stop(completed: int, **_: int) -> None:
        if completed == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        calibrate_checkpoint(source, data, output, K26, FLOAT32, bar=ProgressBar(stop))


def test_changes_are_refused_and_damage_is_repaired(tmp_path, data):
    source, output = make_target(tmp_path / "in", layers=4), tmp_path / "scales.safetensors"
    whole = tmp_path / "whole.safetensors"
    calibrate_checkpoint(source, data, whole, K26, FLOAT32)
    interrupted(source, data, output)
    with pytest.raises(UsageError, match=r"options\.\S+ was") as caught:
        calibrate_checkpoint(source, data, output, K25, FLOAT32)
    assert "`restart`" in caught.value.remedy
    other = tmp_path / "other.jsonl"
    other.write_text('{"text": "something else entirely"}\n')
    with pytest.raises(UsageError, match="data was"):
        calibrate_checkpoint(source, other, output, K26, FLOAT32)
    (states,) = (tmp_path / ".scales.safetensors.calibrate").glob("states-*.bin")
    states.write_bytes(states.read_bytes()[:-1] + b"\0")
    assert calibrate_checkpoint(source, data, output, K26, FLOAT32).layers_resumed == 0
    assert output.read_bytes() == whole.read_bytes()
    with pytest.raises(UsageError, match="already exists"):
        calibrate_checkpoint(source, other, output, K26, FLOAT32)


def test_other_times_are_no_other_source_but_another_model_of_the_same_size_is(tmp_path, data):
    source, output = make_target(tmp_path / "in", layers=4), tmp_path / "scales.safetensors"
    sizes = {path.name: path.stat().st_size for path in source.iterdir()}
    interrupted(source, data, output)
    for path in source.glob("*.safetensors"):
        os.utime(path, (1, 1))
    assert calibrate_checkpoint(source, data, output, K26, FLOAT32).layers_resumed == 2
    output.unlink()
    interrupted(source, data, output)
    make_target(source, layers=4, seed=1)
    assert {path.name: path.stat().st_size for path in source.iterdir()} == sizes
    with pytest.raises(UsageError, match=r"source\.sample was"):
        calibrate_checkpoint(source, data, output, K26, FLOAT32)


def test_dry_run_tells_and_writes_nothing(tmp_path, data):
    source = make_target(tmp_path / "in", layers=3, experts=4)
    before = sorted(tmp_path.rglob("*"))
    plan = calibrate_checkpoint(
        source, data, tmp_path / "s.safetensors", K26, FLOAT32, OutputOptions(dry_run=True)
    )
    assert sorted(tmp_path.rglob("*")) == before
    assert plan.linears == 2 * 4 * 3 and plan.states_bytes == plan.tokens * 64 * 4


@pytest.mark.parametrize(
    ("text", "match"), [('{"title": 1}\n', "has none of"), ("\n", "holds no text")]
)
def test_bad_data_is_refused_by_line(tmp_path, text, match):
    source, path = make_target(tmp_path / "in", layers=2), tmp_path / "bad.jsonl"
    path.write_text(text)
    with pytest.raises(TrtspecError, match=match):
        calibrate_checkpoint(source, path, tmp_path / "s.safetensors", K26, FLOAT32)
    assert not (tmp_path / "s.safetensors").exists()


def test_a_weight_that_is_no_number_is_named(tmp_path, data):
    source = make_target(tmp_path / "in", layers=3, shards=1)
    tensors = read_tensors(source)
    tensors["language_model.model.layers.1.self_attn.o_proj.weight"][0, 0] = float("nan")
    write_tensors(source, tensors)
    with pytest.raises(TrtspecError, match=r"layers.1.*NaN|its input is NaN"):
        calibrate_checkpoint(source, data, tmp_path / "s.safetensors", K26, FLOAT32)
    assert not (tmp_path / "s.safetensors").exists()


MEMORY = """
import json, pathlib, re, sys, torch
from trtspec.calibrate import CalibrationOptions, calibrate_checkpoint
from trtspec.models import stream
from trtspec.quant.modelopt import InputObserver
from trtspec.quant.policy import load_policy
from trtspec.report import ProgressBar
def memory(key):
    return 1024 * int(re.search(key + r":\\s+(\\d+)", open("/proc/self/status").read())[1])
torch.set_num_threads(1)
source, data, output = map(pathlib.Path, sys.argv[1:4])
InputObserver()  # imports ModelOpt
layer = stream.LayerStream(source).layer_bytes(1)
stream.PREFETCH_MEMORY_LAYERS = 0 if sys.argv[4] == "ahead" else float("inf")
before = []
def update(completed, **_):
    if completed == 0:
        before.append(memory("VmRSS"))
        open("/proc/self/clear_refs", "w").write("5")  # the peak starts anew
options = CalibrationOptions(samples=8, seq_len=32, dtype=torch.float32)
calibrate_checkpoint(source, data, output, load_policy("k2.6"), options, bar=ProgressBar(update))
print(json.dumps({"grown": memory("VmHWM") - before[0], "layer": layer}))
"""


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "held"), [("one", 1), ("ahead", 2)])
def test_memory_stays_at_one_layer_or_two_whatever_the_depth(tmp_path, data, mode, held):
    # glibc keeps what is below its threshold, which grows to 32 MiB; a real layer's stacked experts
    # are gigabytes
    environment = os.environ | {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": "262144"}
    for layers in (4, 16):
        source = make_target(tmp_path / str(layers), layers=layers, hidden=512, experts=24)
        command = [
            sys.executable,
            "-c",
            MEMORY,
            source,
            data,
            tmp_path / f"{layers}.safetensors",
            mode,
        ]
        found = printed_json(*command, env=environment, cwd=ROOT)
        print(mode, layers, "layers", found)
        assert found["grown"] < (held + 1) * found["layer"]  # and what is being decoded
