"""`--features http://...` against the reference server speaking ModelOpt's streaming protocol, over NIXL on loopback.

The client is ModelOpt's own; the states it brings are those of the target in memory.
"""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
import torch

from trtspec.errors import MissingDependency, TrtspecError
from trtspec.heads.training import features_server
from trtspec.heads.training import module as train
from trtspec.heads.training.features import compute_features
from trtspec.heads.training.features_server import served_model
from trtspec.heads.training.options import InMemory, Served, TrainingRun, TrainOptions, feature_source
from trtspec.heads.training.plan import TrainingPlan, make_plan
from trtspec.heads.training.processes import World
from trtspec.heads.training.run import _features, run_training
from trtspec.models.weights import load_target

ROOT = Path(__file__).parents[3]
OPTIONS = TrainOptions(epochs=2, batch_size=4, intermediate_size=64, seq_len=96, held_out=0.1, precision="fp32")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextmanager
def serving(target_dir: Path, layers: str, dtype: str):
    """(URL, process) of a server that captures these layer outputs."""
    pytest.importorskip("nixl", reason="states come over NIXL: pip install nixl")
    port = free_port()
    line = [
        sys.executable,
        "-m",
        "tests.heads.training.hidden_states_server",
        str(target_dir),
        str(port),
        str(free_port()),
    ]
    process = subprocess.Popen([*line, layers, dtype], cwd=ROOT)
    url, deadline = f"http://127.0.0.1:{port}", time.monotonic() + 240
    try:
        while process.poll() is None and time.monotonic() < deadline:
            try:
                httpx.get(f"{url}/health").raise_for_status()
                break
            except httpx.HTTPError:
                time.sleep(0.2)
        yield url, process
    finally:
        process.kill()
        process.wait()


@pytest.fixture(scope="module")
def model(target_dir):
    return load_target(target_dir, dtype=torch.float32)


@pytest.fixture(scope="module")
def plan(target_dir, data, model) -> TrainingPlan:
    return make_plan(target_dir, model.spec, data, OPTIONS, InMemory())


def captured(model, plan: TrainingPlan) -> str:
    """The layer outputs that a server must send: the head's, and the last."""
    return ",".join(map(str, (*plan.spec.aux_layers, model.spec.num_hidden_layers - 1)))


def losses(target_dir, model, plan, data, output: Path, **more) -> list[float]:
    run_training(TrainingRun(target_dir, data, output, save_every=1), model, plan, OPTIONS, **more)
    return [
        row["loss"] for row in map(json.loads, (output / "training.jsonl").read_text().splitlines()) if "loss" in row
    ]


def one_by_one(model, plan: TrainingPlan) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """States of each sample computed alone, as the server does."""
    layers = plan.spec.aux_layers
    return {s.id: compute_features(model, [s], layers).states(0) for s in plan.samples}


@pytest.mark.timeout(1800)  # several processes that import ModelOpt, on a busy machine
@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "apart"), [("float32", 2**-12), ("bfloat16", 0.03)])
def test_states_and_losses_are_those_of_the_target_in_memory(tmp_path, target_dir, data, model, plan, dtype, apart):
    """A server that sends bf16, as vLLM does, has rounded the last state before its norm; nothing else differs."""
    with serving(target_dir, captured(model, plan), dtype) as (url, _):
        served = replace(plan, features=feature_source(url))
        with closing(_features(target_dir, model, served, OPTIONS, tmp_path, World())) as features:
            unequal = 0.0
            for index, (hidden, aux) in enumerate(one_by_one(model, plan).values()):
                got_hidden, got_aux = features.states(index)
                unequal = max(unequal, float((got_aux != aux).float().mean()))
                torch.testing.assert_close(got_aux, aux, rtol=2**-7, atol=2**-12)  # a neighbour in bf16
                torch.testing.assert_close(got_hidden, hidden, rtol=2**-7, atol=apart)
        ours = losses(target_dir, model, served, data, tmp_path / "served")
    memory = losses(target_dir, model, plan, data, tmp_path / "memory")
    worst = max(abs(a - b) for a, b in zip(ours, memory, strict=True))
    print(
        f"{dtype}: {unequal:.1e} of a sample's aux states round otherwise, losses of {len(ours)} steps by {worst:.1e}"
    )
    assert worst < 1e-2


@pytest.mark.timeout(1800)  # several processes that import ModelOpt, on a busy machine
@pytest.mark.slow
def test_a_server_that_goes_away_is_named_and_the_run_goes_on(tmp_path, target_dir, data, model, plan, monkeypatch):
    monkeypatch.setattr(features_server, "PATIENCE", 0.01)
    layers = captured(model, plan)
    memory = losses(target_dir, model, plan, data, tmp_path / "memory")
    with serving(target_dir, layers, "float32") as (url, process):

        def kill(point) -> None:
            if point.step == 5:
                process.kill()

        with pytest.raises(TrtspecError, match=r"TS-FEATURES-SERVER .* in 5 attempts"):
            losses(target_dir, model, replace(plan, features=feature_source(url)), data, tmp_path / "cut", on_step=kill)
    with pytest.raises(TrtspecError, match="does not name its model"):
        losses(target_dir, model, replace(plan, features=feature_source(url)), data, tmp_path / "cut")
    with serving(target_dir, layers, "float32") as (url, _):
        ours = losses(target_dir, model, replace(plan, features=feature_source(url)), data, tmp_path / "cut")
    assert max(abs(a - b) for a, b in zip(ours, memory, strict=True)) < 1e-2


@pytest.mark.timeout(1800)  # several processes that import ModelOpt, on a busy machine
@pytest.mark.slow
def test_a_server_that_captures_other_layers_is_refused(tmp_path, target_dir, data, model, plan):
    with serving(target_dir, "1,7", "bfloat16") as (url, _):
        run = TrainingRun(target_dir, tmp_path / "data", tmp_path)
        served = _features(run, model, replace(plan, features=feature_source(url)), OPTIONS, World())
        with closing(served) as features, pytest.raises(TrtspecError, match="captured .* wanted"):
            features.states(0)


def test_urls_are_told_from_directories(tmp_path):
    assert feature_source("http://a:8000, http://b:8000/") == Served(("http://a:8000", "http://b:8000"))
    with pytest.raises(TrtspecError, match="does not name its model"):
        served_model(f"http://127.0.0.1:{free_port()}")


def test_without_nixl_the_missing_package_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "nixl", None)  # as where it is not installed
    with pytest.raises(MissingDependency, match="nixl"):
        train.state_client(["http://a:8000"], "model", 128)
