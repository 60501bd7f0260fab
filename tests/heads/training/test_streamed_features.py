"""`--features stream` has the bits and losses of states in memory, also after a kill.

The kill comes between chunks.
"""

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.command_line import printed
from tests.heads.training.test_training import curve
from trtspec.errors import TrtspecError
from trtspec.heads.training import module as train
from trtspec.heads.training.loop import Stepper, train_head
from trtspec.heads.training.ranks import Ranks, Stop
from trtspec.heads.training.samples import split_data
from trtspec.heads.training.states import Features, HeldFeatures, compute_features
from trtspec.heads.training.streamed import StreamedFeatures, chunks_in_order, stream_features
from trtspec.heads.training.train_options import (
    FeatureSource,
    TrainingRun,
    TrainOptions,
    feature_source,
)
from trtspec.heads.training.training_plan import TrainingPlan, make_plan
from trtspec.models.stream import LayerStream

ROOT = Path(__file__).parents[3]
OPTIONS = TrainOptions(
    epochs=1, batch_size=4, intermediate_size=64, seq_len=96, held_out=0.1, precision="fp32"
)
SMALL = 200_000  # bytes of a chunk: a handful of samples


@pytest.fixture(scope="module")
def stream(target_dir):
    with LayerStream(target_dir, dtype=torch.float32) as opened:
        yield opened


@pytest.fixture(scope="module")
def plan(target_dir, data, stream) -> TrainingPlan:
    return make_plan(target_dir, stream.spec, (str(data),), OPTIONS, feature_source("stream"))


def by_chunks(target, plan: TrainingPlan, chunks: list[list[int]]) -> Features:
    """The in-memory states of the same chunks, each computed as one set of batches."""
    layers = plan.spec.aux_layers
    whole = HeldFeatures(plan.samples, target.spec.hidden_size, len(layers))
    for chunk in chunks:
        part = compute_features(target, [plan.samples[index] for index in sorted(chunk)], layers)
        whole.held |= {index: part.states(place) for place, index in enumerate(sorted(chunk))}
    return whole


def same(streamed: Features, memory: Features, indices: range | list[int]) -> bool:
    pairs = ((streamed.states(index), memory.states(index)) for index in indices)
    return all(torch.equal(a, c) and torch.equal(b, d) for (a, b), (c, d) in pairs)


def test_one_chunk_has_the_bits_of_the_dump_in_memory(tmp_path, stream, plan, target):
    streamed = stream_features(stream, plan, OPTIONS, tmp_path, "target")
    assert len(streamed.chunks) == 1
    assert same(
        streamed,
        compute_features(target, plan.samples, plan.spec.aux_layers),
        range(len(plan.samples)),
    )


@pytest.mark.slow
def test_many_chunks_have_the_bits_of_the_same_batches(tmp_path, stream, plan, target):
    streamed = stream_features(stream, plan, OPTIONS, tmp_path, "target", chunk_bytes=SMALL)
    assert len(streamed.chunks) > 3
    assert same(
        streamed,
        by_chunks(target, plan, streamed.chunks),
        sorted(index for c in streamed.chunks for index in c),
    )


def losses(
    features: Features,
    stream,
    plan: TrainingPlan,
    directory: Path,
    options: TrainOptions = OPTIONS,
    stop: int = 0,
):
    """The curve of a training run on these states."""
    torch.manual_seed(0)
    ends = stream.model_without_layers()
    module = train.build(plan.spec, stream.spec, ends.embed.weight, ends.lm_head.weight)

    def on_step(point) -> None:
        if point.step == stop:
            raise KeyboardInterrupt

    data = split_data(features.samples, options)
    stepper = Stepper(module, features, options, data.total, Ranks())
    run = TrainingRun(Path(), "data", directory, save_every=1)
    train_head(stepper, data, run, {}, on_step=on_step, export=lambda _: None, stop=Stop())
    return curve(directory)


def test_training_on_chunks_gives_the_losses_of_the_online_run(tmp_path, stream, plan, target):
    streamed = stream_features(stream, plan, OPTIONS, tmp_path / "s", "target", chunk_bytes=SMALL)
    got = losses(streamed, stream, plan, tmp_path / "stream")
    online = losses(by_chunks(target, plan, streamed.chunks), stream, plan, tmp_path / "memory")
    assert got == online and sum("loss" in row for row in got) == plan.steps
    plain = losses(
        compute_features(target, plan.samples, plan.spec.aux_layers),
        stream,
        plan,
        tmp_path / "plain",
    )
    apart = max(abs(a["loss"] - b["loss"]) for a, b in zip(got, plain, strict=True) if "loss" in a)
    print(
        "other batches of the target, one bf16 rounding apart: "
        f"losses differ by {apart:.1e} at most"
    )
    assert apart < 1e-2
    kept = sorted(path.name[:10] for path in (tmp_path / "s/features").glob("chunk-*"))
    assert len(kept) == 3 < len(streamed.chunks), kept  # the held-out chunk and the last two


@pytest.mark.slow
def test_an_interrupted_run_goes_on_without_making_a_chunk_twice(tmp_path, stream, plan):
    whole = losses(
        stream_features(stream, plan, OPTIONS, tmp_path / "a", "t", chunk_bytes=SMALL),
        stream,
        plan,
        tmp_path / "whole",
    )
    cut = stream_features(stream, plan, OPTIONS, tmp_path / "b", "t", chunk_bytes=SMALL)
    with pytest.raises(KeyboardInterrupt):
        losses(cut, stream, plan, tmp_path / "cut", stop=plan.steps // 2)
    times = {path: path.stat().st_mtime_ns for path in (tmp_path / "b/features").glob("chunk-*")}
    again = stream_features(stream, plan, OPTIONS, tmp_path / "b", "t", chunk_bytes=SMALL)
    assert losses(again, stream, plan, tmp_path / "cut") == whole
    assert all(path.stat().st_mtime_ns == when for path, when in times.items() if path.exists())


@pytest.mark.slow
def test_several_epochs_keep_every_chunk(tmp_path, stream, plan):
    options = replace(OPTIONS, epochs=2)
    streamed = stream_features(stream, plan, options, tmp_path / "s", "t", chunk_bytes=SMALL)
    losses(streamed, stream, plan, tmp_path / "run", options)
    assert len(list((tmp_path / "s/features").glob("chunk-*"))) == len(streamed.chunks)


def test_another_target_never_gets_these_chunks(tmp_path, stream, plan):
    one, other = (
        stream_features(stream, plan, OPTIONS, tmp_path, name) for name in ("one", "other")
    )
    assert isinstance(one, StreamedFeatures) and one.path(0) != other.path(0)


@pytest.mark.parametrize(
    ("text", "source"),
    [
        ("auto", ("memory", None, ())),
        ("memory", ("memory", None, ())),
        ("stream", ("stream", None, ())),
        ("streams", ("dumps", Path("streams"), ())),
        ("stream:/data", ("stream", Path("/data"), ())),
        ("/dumps", ("dumps", Path("/dumps"), ())),
        ("http://a:8000,https://b", ("server", None, ("http://a:8000", "https://b"))),
    ],
)
def test_what_features_names(text: str, source: tuple) -> None:
    assert feature_source(text) == FeatureSource(text, *source)


def test_chunks_follow_the_first_epoch(plan, stream):
    chunks, kept = chunks_in_order(
        plan.samples, split_data(plan.samples, OPTIONS), stream.spec, 3, SMALL
    )
    used = [index for chunk in chunks for index in chunk]
    assert kept == 1 and sorted(used) == sorted(set(used)) == list(range(len(plan.samples)))
    size = 4 * 64 * 2
    assert all(
        sum(len(plan.samples[i].tokens) for i in chunk) * size <= SMALL or len(chunk) == 1
        for chunk in chunks
    )


def test_a_disk_too_small_for_every_epoch_is_named(tmp_path, stream, plan):
    huge = replace(plan, feature_bytes=1 << 60)
    with pytest.raises(TrtspecError, match="TS-FEATURES-DISK .*kept for later epochs"):
        stream_features(stream, huge, replace(OPTIONS, epochs=2), tmp_path, "t")


@pytest.mark.slow
def test_the_command_killed_and_resumed(tmp_path, target_dir, data):
    config = tmp_path / "train.yaml"
    config.write_text("precision: fp32\nintermediate_size: 64\nbatch_size: 4\nepochs: 2\n")
    base = [
        sys.executable,
        "-m",
        "trtspec",
        "train",
        str(target_dir),
        str(data),
        "--config",
        str(config),
        "--json",
    ]
    base += ["--save-every", "1"]

    for name, way in (("memory", ["memory", "--acceptance-prompts", "0"]), ("whole", ["stream"])):
        line = [*base, "-o", str(tmp_path / name), "--features", *way]
        printed(*line, cwd=ROOT)
    assert curve(tmp_path / "whole") == curve(tmp_path / "memory")
    killed = tmp_path / "killed"
    line = [*base, "-o", str(killed), "--features", "stream"]
    process = subprocess.Popen(line, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd=ROOT)
    while process.poll() is None and (
        not (killed / "training.jsonl").exists() or len(curve(killed)) < 3
    ):
        time.sleep(0.05)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    printed(*line, cwd=ROOT)
    assert curve(killed) == curve(tmp_path / "whole")
    weights = [
        (tmp_path / name / "model.safetensors").read_bytes()
        for name in ("killed", "whole", "memory")
    ]
    assert weights[0] == weights[1] == weights[2]
