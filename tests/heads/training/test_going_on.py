"""A run that is stopped, killed or finished leaves heads that can be used, and goes on."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.command_line import ROOT, inspected, printed_json
from tests.heads.training.test_training import OPTIONS, after_steps, curve, train_once
from tests.json_files import read_json
from tests.tiny import read_tensors
from trtspec.engine.engine import Engine, EngineOptions, GenerationRequest
from trtspec.errors import UsageError
from trtspec.models.head_weights import load_head
from trtspec.models.weights import load_target

LASTING = replace(OPTIONS, schedule="constant", warmup=2, epochs=1, accumulation=2)


def assert_usable(head_dir: Path, target_dir: Path) -> None:
    """Without an error in inspect, against its target too; and it drafts losslessly."""
    found = inspected(str(head_dir), against=str(target_dir))
    assert [problem.code for problem in found.problems if problem.severity == "error"] == []
    model = load_target(target_dir, dtype=torch.float32)
    head = load_head(head_dir, model, dtype=torch.float32)
    options = EngineOptions(draft_len=3, max_batch_size=1, max_seq_len=64)
    drafted = Engine(model, head, options).generate([GenerationRequest("a", [1, 2, 3], 12)])["a"]
    alone = Engine(model, None, EngineOptions(max_batch_size=1, max_seq_len=64))
    assert (
        drafted.token_ids == alone.generate([GenerationRequest("a", [1, 2, 3], 12)])["a"].token_ids
    )


def same_weights(ours: Path, theirs: Path) -> bool:
    one, other = read_tensors(ours), read_tensors(theirs)
    return all(torch.equal(one[name], other[name]) for name in other)


@pytest.mark.slow
def test_a_finished_run_goes_on_to_what_a_longer_one_is(tmp_path, target_dir, data):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    train_once(target_dir, data, whole, replace(LASTING, epochs=3, eval_every=2))
    first = train_once(target_dir, data, parts, replace(LASTING, eval_every=2))
    assert first["training"]["finished"]
    with pytest.raises(UsageError, match="is finished: it has had all 2 steps"):
        train_once(target_dir, data, parts, replace(LASTING, eval_every=2))
    with pytest.raises(
        UsageError, match=r"options\.batch_size was 8, now 4; options\.lr was 0\.003, now 0\.001$"
    ):
        train_once(
            target_dir, data, parts, replace(LASTING, eval_every=2, batch_size=4, lr=1e-3, epochs=3)
        )
    train_once(target_dir, data, parts, replace(LASTING, epochs=3, eval_every=2))
    assert (parts / "training.jsonl").read_bytes() == (whole / "training.jsonl").read_bytes()
    assert same_weights(parts, whole)
    rates = {row["lr"] for row in curve(whole) if row.get("step", 0) > 2 and "lr" in row}
    assert rates == {3e-3}


@pytest.mark.slow
def test_the_best_head(tmp_path, target_dir, data):
    output = tmp_path / "head"
    options = replace(OPTIONS, steps=9, eval_every=3)
    train_once(target_dir, data, output, options, save_every=2)
    held = [row for row in curve(output) if "held_out" in row]
    figures = [row["held_out"]["loss"] for row in held]
    best = read_json(output / "best" / "provenance.json")["training"]
    assert best["held_out_figures"]["loss"] == min(figures)
    assert best["steps"] == held[figures.index(min(figures))]["step"]
    for name in ("best", "."):
        assert_usable(output / name, target_dir)
    assert all(
        {"loss", "accuracy", "lr", "grad_norm", "tokens"} <= row.keys()
        for row in curve(output)
        if "loss" in row
    )


@pytest.mark.slow
@pytest.mark.clock
def test_time_runs_out_and_the_run_goes_on(tmp_path, target_dir, data):
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    options = replace(OPTIONS, steps=6)
    train_once(target_dir, data, whole, options)
    record = train_once(target_dir, data, cut, options, deadline=time.monotonic(), save_every=100)
    assert (record["training"]["steps"], record["training"]["stopped"]) == (1, "time")
    assert_usable(cut, target_dir)
    train_once(target_dir, data, cut, options)
    assert curve(cut) == curve(whole) and same_weights(cut, whole)


def command(target_dir: Path, data: Path, output: Path) -> list[str]:
    words = [
        "train",
        str(target_dir),
        str(data),
        "-o",
        str(output),
        "--seq-len",
        "96",
        "--steps",
        "400",
    ]
    words += ["--save-every", "3", "--acceptance-prompts", "0", "--precision", "fp32", "--json"]
    return [sys.executable, "-m", "trtspec", *words]


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_a_signal_leaves_a_usable_head(tmp_path, target_dir, data, number):
    output = tmp_path / "head"
    process = subprocess.Popen(
        command(target_dir, data, output), cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    after_steps(process, output, 12)
    process.send_signal(number)
    out, err = process.communicate(timeout=900)
    if number == signal.SIGKILL:
        assert process.returncode == -number
        assert (output / ".trtspec" / "state.safetensors").is_file()
        return
    assert process.returncode == 130, err
    record = json.loads(out)
    assert record["training"]["finished"] is False and record["training"]["stopped"] == number.name
    assert f"after step {record['training']['steps']} of 400" in err.decode()
    assert "resume with `trtspec train" in err.decode()
    assert_usable(output, target_dir)


@pytest.mark.slow
def test_memory_of_twenty_thousand_tokens_grows_with_the_length(tmp_path):
    """Peak resident memory of a step grows with its length, from 5,000 to 20,000 tokens.

    Hidden size 64, 512 words, 3 training-time-test steps: what 15,000 more tokens take, each. glibc
    gives freed buffers back at once here; otherwise the peak is what it kept, which differs by a
    third from run to run.
    """
    peaks, environment = [], os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536"}
    for tokens in (5000, 20000):
        command = [sys.executable, "-c", LONG, tokens, tmp_path / f"t{tokens}"]
        peaks.append(printed_json(*command, cwd=ROOT, env=environment))
    slope = (peaks[1] - peaks[0]) / 15000
    logits = 3 * 512 * 4
    print(f"{peaks[0] >> 20} and {peaks[1] >> 20} MiB, {slope:,.0f} bytes per token")
    assert slope < 40_000
    assert 4 * (peaks[1] - peaks[0]) < 20000 * 20000 * 4 * 4, "scores of four heads at once"
    assert logits == 6_144  # of the draft alone, which are not in that slope


LONG = """
import sys, json, torch
from pathlib import Path
from tests.tiny import make_target
from trtspec.heads.training import module as train
from trtspec.heads.training.loop import Objective
from trtspec.heads.training.train_options import TrainOptions, new_head_spec
from trtspec.report import peak_rss
from trtspec.models.weights import load_target
torch.set_num_threads(1)
count = int(sys.argv[1])
target = load_target(make_target(Path(sys.argv[2]), layers=8), dtype=torch.float32)
spec = new_head_spec(target.spec, TrainOptions(attention="mla", eagle="3.1"))
torch.manual_seed(0)
model = train.build(spec, target.spec, target.embed.weight, target.lm_head.weight)
objective = Objective(model, TrainOptions(ttt_steps=3))
def step(length):
    tokens = torch.randint(0, spec.vocab_size, (1, length))
    hidden, aux = torch.randn(1, length, 64).bfloat16(), torch.randn(1, length, 192).bfloat16()
    loss, _ = objective(tokens, hidden, aux, torch.arange(1, length), torch.full((3,), length))
    loss.backward()
step(count)
print(json.dumps(peak_rss()))
"""
