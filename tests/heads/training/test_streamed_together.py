"""Several processes stream one target, a part of each chunk, to the bits of one process."""

import json
import os
import subprocess
import sys

import pytest
import torch

from tests.command_line import ROOT, free_port
from trtspec import machine
from trtspec.errors import TrtspecError
from trtspec.heads.training.ranks import Ranks
from trtspec.heads.training.streamed import open_stream

SCRIPT = """
import hashlib, json, sys
from pathlib import Path
import torch
from trtspec.heads.training.samples import batches_of_epoch, split_held_out
from trtspec.heads.training.streamed import open_stream, stream_features
from trtspec.heads.training.train_options import TrainOptions, feature_source
from trtspec.heads.training.training_plan import make_plan
from trtspec.heads.training.ranks import process_group

target, data, work = map(Path, sys.argv[1:4])
epochs = int(sys.argv[4])
options = TrainOptions(epochs=epochs, batch_size=4, seq_len=96, held_out=0.1, precision="fp32")
with process_group("cpu") as ranks:
    stream = open_stream(target, torch.float32, "cpu", ranks)
    plan = make_plan(target, stream.spec, (str(data),), options, feature_source("stream"))
    features = stream_features(
        stream, plan, options, work, "target", chunk_bytes=200_000, ranks=ranks
    )
    ids, lengths = [s.id for s in plan.samples], [len(s.tokens) for s in plan.samples]
    train, held = split_held_out(ids, options.held_out, options.seed)
    batches = batches_of_epoch(lengths, train, options.batch_size, options.seed, 0)
    found = {}
    for batch in [held, *batches, held]:
        mine = ranks.share(batch)
        for index in mine or batch[:1]:
            digest = hashlib.sha256()
            for part in features.states(index):
                digest.update(part.contiguous().view(torch.uint8).numpy().data)
            found[index] = digest.hexdigest()
        ranks.sum(torch.zeros(1))  # as a step does
    print(json.dumps({"states": found, "chunks": len(features.chunks)}))
"""


def processes(count: int, *arguments: object) -> list[dict]:
    port = str(free_port())
    group = {
        "WORLD_SIZE": str(count),
        "LOCAL_WORLD_SIZE": str(count),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
    }
    started = [
        subprocess.Popen(
            [sys.executable, "-c", SCRIPT, *map(str, arguments)],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ
            | group
            | {"RANK": str(rank), "LOCAL_RANK": str(rank), "OMP_NUM_THREADS": "1"},
        )
        for rank in range(count)
    ]
    found = []
    for process in started:
        out, err = process.communicate(timeout=900)
        assert process.returncode == 0, err[-3000:]
        found.append(json.loads(out.splitlines()[-1]))
    return found


def states(found: list[dict]) -> dict[str, str]:
    joined: dict[str, str] = {}
    for one in found:
        assert all(joined.get(index, digest) == digest for index, digest in one["states"].items())
        joined |= one["states"]
    return joined


@pytest.mark.slow
@pytest.mark.parametrize("epochs", [1, 2])
def test_two_processes_compute_the_bits_of_one(tmp_path, target_dir, data, epochs):
    """Two processes compute the bits of one: they meet at each chunk, or keep all of them.

    One epoch alternates chunks and steps; several epochs keep all chunks.
    """
    (alone,) = processes(1, target_dir, data, tmp_path / "one", epochs)
    together = processes(2, target_dir, data, tmp_path / "two", epochs)
    assert len(states(together)) == 40
    assert states(together) == alone["states"]
    assert alone["chunks"] > 3
    left = sorted(path.name for path in (tmp_path / "two/features").glob("chunk-*"))
    assert all(name.endswith(("0-of-2.safetensors", "1-of-2.safetensors")) for name in left)
    assert len(left) == 2 * (
        3 if epochs == 1 else alone["chunks"]
    )  # the held-out chunk and the last two
    times = {path: path.stat().st_mtime_ns for path in (tmp_path / "two/features").glob("chunk-*")}
    if epochs > 1:  # another number of processes takes the finished chunks up
        (again,) = processes(1, target_dir, data, tmp_path / "two", epochs)
        assert again == alone
        assert {
            path: path.stat().st_mtime_ns for path in (tmp_path / "two/features").glob("chunk-*")
        } == times


def test_more_layers_than_memory_are_refused_at_the_start(target_dir, monkeypatch):
    """Each process holds a decoded layer; the message has the figures."""
    open_stream(target_dir, torch.float32, "cpu", Ranks(0, 8, 0, local_size=8))
    monkeypatch.setattr(machine, "free_memory", lambda: 1e6)
    with pytest.raises(
        TrtspecError, match=r"TS-FEATURES-MEMORY a decoded layer .* each of 8 processes"
    ):
        open_stream(target_dir, torch.float32, "cpu", Ranks(0, 8, 0, local_size=8))
