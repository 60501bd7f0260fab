"""Passes that replay (engine/graphs.py): with a stand-in for the capture that keeps what CUDA graphs need, buffers that
never move and are overwritten by each run, the engine's tokens stay the same."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.command_line import trtspec
from tests.engine.conftest import HEAD_KINDS, token_ids
from tests.engine.test_lossless import HeadOf
from trtspec.engine.engine import Engine, EngineOptions
from trtspec.engine.graphs import Captured, Graphs, Pass, graphs_for, rounded_up
from trtspec.engine.request import GenerationRequest
from trtspec.engine.server import ServerOptions, compute_dtype, described, warm_up
from trtspec.errors import UsageError
from trtspec.models.kimi import KimiModel

KINDS = [HEAD_KINDS[0], *(pytest.param(*p.values, id=p.id, marks=pytest.mark.slow) for p in HEAD_KINDS[1:])]


class OnTheCpu(Graphs):
    """A graph without CUDA: the same function over the same inputs, its results put where the first ones were. Before
    each run the old results are spoilt: nobody may still read them."""

    def __init__(self) -> None:
        super().__init__()
        self.replays = 0

    def capture(self, function: Pass, inputs: tuple[Tensor, ...]) -> Captured:
        static = tuple(value.clone(memory_format=torch.contiguous_format) for value in inputs)
        outputs = tuple(value.clone() for value in function(*static))
        places = [value.data_ptr() for value in (*static, *outputs)]

        def replay() -> None:
            self.replays += 1
            assert [value.data_ptr() for value in (*static, *outputs)] == places
            for kept in outputs:
                kept.fill_(float("nan"))
            for kept, made in zip(outputs, function(*static), strict=True):
                kept.copy_(made)

        return Captured(static, outputs, replay)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("temperature", [0.0, pytest.param(0.8, marks=pytest.mark.slow)])
def test_replayed_passes_change_no_token(
    kind: tuple[str, str, int | None],
    temperature: float,
    target: KimiModel,
    head_of: HeadOf,
    requests: list[GenerationRequest],
) -> None:
    wanted = [replace(request, temperature=temperature, seed=n) for n, request in enumerate(requests[:6])]
    options = EngineOptions("eagle3", max_batch_size=4, max_seq_len=128, draft_sampling="probabilistic")
    expected = token_ids(Engine(target, head_of(kind), options).generate(wanted))
    engine, graphs = Engine(target, head_of(kind), options), OnTheCpu()
    engine.use_graphs(graphs)
    buffers = [engine.batch.block, engine.batch.start, engine.cache.data, engine.drafter.cache.data]
    places = [buffer.data_ptr() for buffer in buffers]
    assert token_ids(engine.generate(wanted)) == expected
    assert places == [buffer.data_ptr() for buffer in buffers]
    print(f"{kind}: {graphs.replays} replays of {len(graphs.captured)} graphs, {graphs.output_bytes} bytes of outputs")
    assert graphs.replays > 3 * len(graphs.captured) > 0


class Refused(Graphs):
    def capture(self, function: Pass, inputs: tuple[Tensor, ...]) -> Captured:
        raise RuntimeError("operation not permitted when stream is capturing\nand more")


def test_a_pass_that_cannot_be_captured_runs_as_before(
    target: KimiModel, requests: list[GenerationRequest], expected: dict[str, list[int]], capsys: pytest.CaptureFixture
) -> None:
    engine, graphs = Engine(target, options=EngineOptions(max_batch_size=4)), Refused()
    engine.use_graphs(graphs)
    some = requests[:4]
    assert token_ids(engine.generate(some)) == {request.id: expected[request.id] for request in some}
    assert graphs.told == "no CUDA graphs: operation not permitted when stream is capturing"
    assert capsys.readouterr().err.count("cannot be captured") == 1


def test_graphs_are_refused_where_there_is_nothing_to_capture(target: KimiModel) -> None:
    with pytest.raises(UsageError, match="need a GPU"):
        Engine(target, options=EngineOptions(cuda_graphs=True))
    with pytest.raises(UsageError, match="2 ranks"):
        graphs_for(torch.device("cuda"), 2)


@pytest.mark.parametrize("kind", [OnTheCpu, Refused])
def test_the_ready_line_says_whether_there_are_graphs(target: KimiModel, kind: type[Graphs]) -> None:
    engine = Engine(target, options=EngineOptions(max_batch_size=2, max_seq_len=64))
    assert "graphs" not in described(engine, ServerOptions())
    engine.use_graphs(graphs := kind())
    warm_up(engine)  # the first capture, before the line is written
    assert described(engine, ServerOptions()).endswith(f", {graphs.told}")
    assert graphs.told.startswith("CUDA graphs" if graphs.captured else "no CUDA graphs: operation not permitted")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("", "--cuda-graphs needs a GPU, not --device cpu"),
        ("--device cuda --tp-size 2", "--cuda-graphs is for one GPU, not --tp-size 2"),
        ("--backend vllm", "--cuda-graphs"),
    ],
)
def test_serve_refuses_graphs_by_name(target_dir: Path, words: str, message: str) -> None:
    done = trtspec("serve", target_dir, "--backend", "reference", "--cuda-graphs", "--dry-run", *words.split())
    assert done.status == 2 and message in done.stderr, done.stderr
    with pytest.raises(UsageError, match="need a GPU"):
        compute_dtype(ServerOptions(cuda_graphs=True))


def test_a_graph_serves_many_lengths() -> None:
    assert [rounded_up(length, 1000) for length in (1, 256, 257, 513, 1000)] == [256, 256, 512, 1000, 1000]
