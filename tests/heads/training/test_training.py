"""A whole run on a tiny target learns, resumes to the same curve and refuses what changed."""

import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from tests.command_line import wait_for
from tests.json_files import edit_json, read_lines
from trtspec.errors import TrtspecError, UsageError
from trtspec.heads.training.train_options import TrainingRun, TrainOptions, feature_source
from trtspec.heads.training.training_plan import make_plan
from trtspec.heads.training.training_run import run_training
from trtspec.models.head_weights import load_head
from trtspec.models.weights import load_target

OPTIONS = TrainOptions(seq_len=96, batch_size=8, epochs=4, held_out=0.2, precision="fp32", lr=3e-3)


def train_once(
    target_dir: Path,
    data: Path,
    output: Path,
    options: TrainOptions,
    init: Path | None = None,
    **more,
):
    model = load_target(target_dir, dtype=torch.float32)
    plan = make_plan(target_dir, model.spec, (str(data),), options, feature_source("memory"))
    on_step = more.pop("on_step", lambda _: None)
    run = TrainingRun(target_dir, data.name, output, init, **{"save_every": 2, **more})
    return run_training(run, model, plan, options, on_step=on_step)


def curve(path: Path) -> list[dict]:
    return read_lines(path / "training.jsonl")


def after_steps(process: subprocess.Popen, output: Path, count: int) -> None:
    log = output / "training.jsonl"
    wait_for(
        lambda: (
            process.poll() is not None or (log.exists() and log.read_bytes().count(b"\n") >= count)
        ),
    )


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory, target_dir, data):
    output = tmp_path_factory.mktemp("whole") / "head"
    return output, train_once(target_dir, data, output, OPTIONS)


def test_the_head_learns_and_is_described(whole_run, target_dir):
    output, record = whole_run
    losses = [row["loss"] for row in curve(output) if "loss" in row]
    assert losses[-1] < losses[0] - 0.2
    assert record["training"]["samples"] + record["training"]["held_out"] == 40
    assert record["training"]["tokens_seen"] == sum(
        row["tokens"] for row in curve(output) if "loss" in row
    )
    assert len(record["training"]["held_out_accuracy"]) == 3
    card = (output / "README.md").read_text()
    assert "No acceptance was measured on this head" in card and "estimated at 3 drafts" in card
    head = load_head(output, load_target(target_dir), dtype=torch.float32)
    assert head.spec.attention == "mla"
    assert [path.name for path in (output / ".trtspec").iterdir()] == ["state.safetensors"]


def test_an_interrupted_run_refuses_other_options(tmp_path, target_dir, data):
    output = tmp_path / "head"

    def stop(point):
        if point.step == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train_once(target_dir, data, output, OPTIONS, on_step=stop)
    other = TrainOptions(**{**OPTIONS.__dict__, "lr": 1e-3})
    with pytest.raises(UsageError, match="lr was 0.003, now 0.001$"):
        train_once(target_dir, data, output, other)


def test_init_continues_from_a_head(tmp_path, whole_run, target_dir, data):
    trained = [row["loss"] for row in curve(whole_run[0]) if "loss" in row]
    short = TrainOptions(**{**OPTIONS.__dict__, "steps": 2, "lr": 1e-5})
    train_once(target_dir, data, tmp_path / "head", short, init=whole_run[0])
    begun = [row["loss"] for row in curve(tmp_path / "head") if "loss" in row]
    assert abs(begun[0] - trained[-1]) < 0.3 < trained[0] - begun[0]
    other = TrainOptions(**{**OPTIONS.__dict__, "steps": 2, "eagle": "3.1"})
    spoilt = shutil.copytree(whole_run[0], tmp_path / "spoilt")
    edit_json(spoilt / "config.json", hidden_act="gelu")
    with pytest.raises(TrtspecError, match="TS-HEAD-FUNCTION"):
        train_once(target_dir, data, tmp_path / "from-spoilt", short, init=spoilt)
    with pytest.raises(TrtspecError, match=r"fc_norm.0.weight is missing"):
        train_once(target_dir, data, tmp_path / "other", other, init=whole_run[0])


def test_a_run_that_diverges_says_so(tmp_path, target_dir, data):
    wild = TrainOptions(**{**OPTIONS.__dict__, "lr": 1e18, "warmup": 0.0, "grad_clip": 1e30})
    with pytest.raises(TrtspecError, match="TS-TRAIN-DIVERGED"):
        train_once(target_dir, data, tmp_path / "head", wild)
