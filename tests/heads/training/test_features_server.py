"""`--features http://...` against the reference server with ModelOpt's streaming protocol.

It runs over NIXL on loopback. The client is ModelOpt's own; the states it brings are those of the
target in memory.
"""

import json
import sys
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
import torch

from tests.command_line import FixedServer, free_port, served
from tests.heads.training.test_training import curve
from tests.tiny import make_target
from trtspec.checkpoint.writer import Journal
from trtspec.errors import MissingDependency, TrtspecError, UsageError
from trtspec.heads.training import module as train
from trtspec.heads.training import served as serving_states
from trtspec.heads.training.first_layers import check_first_layers
from trtspec.heads.training.ranks import Ranks
from trtspec.heads.training.served import ServedFeatures, state_servers
from trtspec.heads.training.sources import open_states
from trtspec.heads.training.states import compute_features
from trtspec.heads.training.train_options import TrainingRun, TrainOptions, feature_source
from trtspec.heads.training.training_plan import TrainingPlan, make_plan
from trtspec.heads.training.training_run import run_training
from trtspec.models.weights import load_target

OPTIONS = TrainOptions(
    epochs=2, batch_size=4, intermediate_size=64, seq_len=96, held_out=0.1, precision="fp32"
)


@contextmanager
def serving(target_dir: Path, layers: str, dtype: str, port: int = 0):
    """(URL, process) of a server that captures these layer outputs."""
    pytest.importorskip("nixl", reason="states come over NIXL: pip install nixl")
    port, server = (
        port or free_port(),
        (sys.executable, "-m", "tests.heads.training.hidden_states_server"),
    )
    with served(port, *server, target_dir, port, free_port(), layers, dtype) as running:
        yield running


@pytest.fixture(scope="module")
def plan(target_dir, data, target) -> TrainingPlan:
    return make_plan(target_dir, target.spec, (str(data),), OPTIONS, feature_source("memory"))


def captured(target, plan: TrainingPlan) -> str:
    """The layer outputs that a server must send: the head's, and the last."""
    return ",".join(map(str, (*plan.spec.aux_layers, target.spec.num_hidden_layers - 1)))


def losses(target_dir, target, plan, data, output: Path, **more) -> list[float]:
    run_training(
        TrainingRun(target_dir, data.name, output, save_every=1), target, plan, OPTIONS, **more
    )
    return [row["loss"] for row in curve(output) if "loss" in row]


def one_by_one(target, plan: TrainingPlan) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """States of each sample computed alone, as the server does."""
    layers = plan.spec.aux_layers
    return {s.id: compute_features(target, [s], layers).states(0) for s in plan.samples}


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "apart"), [("float32", 2**-12), ("bfloat16", 0.03)])
def test_states_and_losses_are_those_of_the_target_in_memory(
    tmp_path, target_dir, data, target, plan, dtype, apart
):
    """States and losses equal those in memory; in bf16 only the last state before its norm differs.

    A server that sends bf16, as vLLM does, has rounded it.
    """
    with serving(target_dir, captured(target, plan), dtype) as (url, _):
        served = replace(plan, features=feature_source(url))
        run = TrainingRun(target_dir, "data", tmp_path)
        with closing(open_states(run, target, served, OPTIONS, Ranks())) as features:
            unequal = 0.0
            for index, (hidden, aux) in enumerate(one_by_one(target, plan).values()):
                got_hidden, got_aux = features.states(index)
                unequal = max(unequal, float((got_aux != aux).float().mean()))
                torch.testing.assert_close(
                    got_aux, aux, rtol=2**-7, atol=2**-12
                )  # a neighbour in bf16
                torch.testing.assert_close(got_hidden, hidden, rtol=2**-7, atol=apart)
        ours = losses(target_dir, target, served, data, tmp_path / "served")
    memory = losses(target_dir, target, plan, data, tmp_path / "memory")
    worst = max(abs(a - b) for a, b in zip(ours, memory, strict=True))
    print(
        f"{dtype}: {unequal:.1e} of a sample's aux states round otherwise, "
        f"losses of {len(ours)} steps by {worst:.1e}"
    )
    assert worst < 1e-2


@pytest.mark.slow
def test_a_server_that_goes_away_is_named_and_the_run_goes_on(
    tmp_path, target_dir, data, target, plan, monkeypatch
):
    monkeypatch.setattr(serving_states, "RETRY_DELAY_S", 0.01)
    layers, port = captured(target, plan), free_port()
    memory = losses(target_dir, target, plan, data, tmp_path / "memory")
    with serving(target_dir, layers, "float32", port) as (url, process):

        def kill(point) -> None:
            if point.step == 5:
                process.kill()

        with pytest.raises(TrtspecError, match=r"TS-FEATURES-SERVER .* in 5 attempts"):
            losses(
                target_dir,
                target,
                replace(plan, features=feature_source(url)),
                data,
                tmp_path / "cut",
                on_step=kill,
            )
    with pytest.raises(TrtspecError, match="does not name its model"):
        losses(
            target_dir, target, replace(plan, features=feature_source(url)), data, tmp_path / "cut"
        )
    with serving(target_dir, layers, "float32", port) as (url, _):
        ours = losses(
            target_dir, target, replace(plan, features=feature_source(url)), data, tmp_path / "cut"
        )
    assert max(abs(a - b) for a, b in zip(ours, memory, strict=True)) < 1e-2


@pytest.mark.slow
def test_a_server_that_captures_other_layers_is_refused(tmp_path, target_dir, data, target, plan):
    with serving(target_dir, "1,7", "bfloat16") as (url, _):
        run = TrainingRun(target_dir, "data", tmp_path)
        with pytest.raises(TrtspecError, match="captured .* wanted"):
            open_states(run, target, replace(plan, features=feature_source(url)), OPTIONS, Ranks())


def fetched(target, plan, change) -> ServedFeatures:
    """Features from a client that changes what it sends, in place of ModelOpt's."""
    layers = (*plan.spec.aux_layers, target.spec.num_hidden_layers - 1)

    def client():
        def fetch(sample):
            planes = target(
                torch.tensor([sample.tokens]), None, None, aux_layers=layers, last_only=True
            ).aux[0]
            return change(planes.unflatten(-1, (len(layers), -1)).clone())

        return fetch

    return ServedFeatures(plan.samples, target.spec, plan.spec.num_aux, target.norm, client)


def poisoned(planes: torch.Tensor) -> torch.Tensor:
    planes[3, 1, 5] = float("inf")
    return planes


def missing(planes: torch.Tensor) -> None:
    raise KeyError("kv_transfer_params")


def refused(planes: torch.Tensor) -> None:
    raise httpx.ReadTimeout("timed out")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (poisoned, "TS-FEATURES-NAN the server sent NaN"),
        (lambda planes: planes[:-2], "captured .* wanted"),
        (lambda planes: planes[:, 1:], "captured .* wanted"),
        (lambda planes: planes[..., :-1], "captured .* wanted"),
        (lambda planes: None, "in 5 attempts .no states for it"),
        (refused, "in 5 attempts .timed out"),
        (missing, "has no states .KeyError: 'kv_transfer_params'"),
    ],
)
def test_what_a_server_may_send_is_refused_by_name(target, plan, monkeypatch, change, says):
    monkeypatch.setattr(serving_states, "RETRY_DELAY_S", 0.001)
    with (
        closing(fetched(target, plan, change)) as features,
        pytest.raises(TrtspecError, match=says),
    ):
        features.states(0)


def test_states_of_another_model_or_layer_are_refused(tmp_path, target_dir, target, plan):
    """Right shapes all: a layer off by one, another model's weights."""
    sample, layers = plan.samples[0], plan.spec.aux_layers
    right = compute_features(target, [sample], layers).states(0)[1]
    assert check_first_layers(target_dir, sample, right, layers, torch.float32) < 0.01
    for shift, nearest in ((-1, 0), (1, 2)):
        wrong = compute_features(target, [sample], tuple(layer + shift for layer in layers)).states(
            0
        )[1]
        with pytest.raises(
            TrtspecError, match=f"labelled as layer 1 are the outputs of layer {nearest} "
        ):
            check_first_layers(target_dir, sample, wrong, layers, torch.float32)
    other = load_target(make_target(tmp_path / "other", layers=8, seed=7), dtype=torch.float32)
    foreign = compute_features(other, [sample], layers).states(0)[1]
    with pytest.raises(TrtspecError, match="match no early layer"):
        check_first_layers(target_dir, sample, foreign, layers, torch.float32)


@contextmanager
def naming(*models: dict):
    """Servers that only answer /v1/models."""
    version = {"/version": '{"version": "1.0"}'}
    servers = [
        FixedServer(version | {"/v1/models": json.dumps({"data": [model]})}) for model in models
    ]
    yield tuple(server.url for server in servers)
    for server in servers:
        server.shutdown()


def test_servers_are_looked_at_before_a_run():
    with naming({"id": "kimi"}, {"id": "kimi", "max_model_len": 129}, {"id": "other"}, {}) as urls:
        assert {server.model for server in state_servers(urls[:2], 128)} == {"kimi"}
        with pytest.raises(TrtspecError, match="takes 129 tokens, and the longest sample has 129"):
            state_servers(urls[:2], 129)
        with pytest.raises(TrtspecError, match="different models: .* has kimi, .* has other"):
            state_servers((urls[0], urls[2]), 128)
        with pytest.raises(TrtspecError, match="does not name its model"):
            state_servers((urls[0], urls[3]), 128)


@pytest.mark.parametrize(
    ("earlier", "says"),
    [
        ({"url": "http://a:8000"}, '1.url was "http://a:8000"'),
        ({"model": "other"}, '1.model was "other", now "kimi"'),
        ({"version": "0.9"}, '1.version was "0.9", now "1.0"'),
    ],
)
def test_states_of_other_servers_do_not_mix(tmp_path, target_dir, target, plan, earlier, says):
    with naming({"id": "kimi"}) as urls, Journal(tmp_path / "j", {}) as journal:
        journal.answered_by({"server 1": {"url": urls[0], "model": "kimi"} | earlier})
        served = replace(plan, features=feature_source(urls[0]))
        run = TrainingRun(target_dir, "data", tmp_path)
        with pytest.raises(UsageError, match=says) as refused:
            open_states(run, target, served, OPTIONS, Ranks(), journal)
        assert "`restart`" in refused.value.remedy


def test_without_nixl_the_missing_package_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "nixl", None)  # as where it is not installed
    with pytest.raises(MissingDependency, match="nixl"):
        train.state_client(["http://a:8000"], "model", 128)
