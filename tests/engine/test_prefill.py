"""Prompts that wait together are computed in one pass: the same numbers, and nobody pays for a neighbour."""

import itertools
from typing import Any

import pytest
from torch import Tensor

from tests.engine.conftest import HeadOf, Kind, drive, token_ids
from trtspec.engine.engine import Engine, EngineOptions
from trtspec.engine.prefix import PREFIX_BYTES, PrefixCache
from trtspec.engine.request import GenerationRequest
from trtspec.engine.sampling import BatchSampling
from trtspec.models.kimi import KimiModel, TargetOutput
from trtspec.models.state import LatentCache, TextPiece


class Counted:
    """The target's passes over prompts, each as the pieces in it."""

    def __init__(self, target: KimiModel, monkeypatch: pytest.MonkeyPatch) -> None:
        self.passes: list[list[TextPiece]] = []
        whole = target.prompts

        def prompts(tokens: Tensor, pieces: list[TextPiece], *rest: object) -> TargetOutput:
            self.passes.append(list(pieces))
            return whole(tokens, pieces, *rest)  # type: ignore[arg-type]

        monkeypatch.setattr(target, "prompts", prompts)


def test_waiting_prompts_share_a_pass(
    target: KimiModel,
    requests: list[GenerationRequest],
    expected: dict[str, list[int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All that fit into the budget; only the last one of a pass is cut."""
    counted = Counted(target, monkeypatch)
    engine = Engine(
        target, options=EngineOptions(max_batch_size=8, max_seq_len=128, prefill_tokens=100)
    )
    assert token_ids(engine.generate(requests[:8])) == {r.id: expected[r.id] for r in requests[:8]}
    assert len(counted.passes[0]) > 1 and sum(p.end - p.begin for p in counted.passes[0]) == 100
    tokens = sum(len(request.prompt_ids) for request in requests[:8])
    assert sum(p.end - p.begin for pieces in counted.passes for p in pieces) == tokens
    assert len(counted.passes) == -(-tokens // 100)


@pytest.mark.parametrize(
    ("owner", "step", "calls"),
    [
        (KimiModel, "prompts", {1, 2}),  # the pass of all prompts, then that of the first alone
        (LatentCache, "snapshot", {2}),  # of a prompt: the head's, after the target's
        (PrefixCache, "save", {6}),  # of an answer that ends
        (
            LatentCache,
            "move",
            {1},
        ),  # of a prompt, to the place of one that ended with its first token
        (BatchSampling, "of", {4}),  # of the batch with one more row
    ],
)
@pytest.mark.parametrize("kind", [("mha", "3", None)], ids=str)
def test_what_fails_ends_its_request_alone(
    kind: Kind,
    target: KimiModel,
    head_of: HeadOf,
    monkeypatch: pytest.MonkeyPatch,
    owner: type,
    step: str,
    calls: set,
) -> None:
    """What is kept of computed texts stays right, too: the same requests again give the same answers."""
    prompts = [list(range(n, n + 40)) for n in range(4)]
    requests = [
        GenerationRequest(str(n), p, (1, 9, 5, 7)[n], ignore_eos=True)
        for n, p in enumerate(prompts)
    ]
    options = EngineOptions(max_batch_size=4, max_seq_len=128, prefix_bytes=PREFIX_BYTES)
    good = token_ids(Engine(target, head_of(kind), options).generate(requests))
    engine, call, whole = (
        Engine(target, head_of(kind), options),
        itertools.count(1),
        getattr(owner, step),
    )

    def failing(*arguments: Any) -> Any:
        made = whole(*arguments)
        if next(call) in calls:
            raise RuntimeError("it fails at its end")
        return made

    monkeypatch.setattr(owner, step, failing)
    for request in requests:
        engine.submit(request)
    made, ended = drive(engine)
    (failed,) = (name for name, reason in ended.items() if reason == "error")
    assert sorted(ended.values()) == ["error", *["length"] * 3]
    assert {name: made[name] for name in good.keys() - {failed}} == {
        n: good[n] for n in good.keys() - {failed}
    }
    assert token_ids(engine.generate(requests)) == good


def test_a_beginning_that_is_being_computed_is_waited_for(
    target: KimiModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts with one beginning do not each compute it, although they arrive together."""
    counted = Counted(target, monkeypatch)
    shared = list(range(3, 83))
    requests = [
        GenerationRequest(str(n), [*shared, 90 + n, n], 4, ignore_eos=True) for n in range(4)
    ]
    plain = token_ids(Engine(target, options=EngineOptions(max_batch_size=4)).generate(requests))
    counted.passes.clear()
    engine = Engine(target, options=EngineOptions(max_batch_size=4, prefix_bytes=PREFIX_BYTES))
    assert token_ids(engine.generate(requests)) == plain
    assert [[p.begin for p in pieces] for pieces in counted.passes] == [[0], [64, 64, 64]]
