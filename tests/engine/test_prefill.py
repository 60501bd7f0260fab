"""Prompts that wait together are computed in one pass: equal numbers, no cost for a neighbour."""

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.engine.conftest import HeadOf, Kind, drive, token_ids
from trtspec.engine.engine import Engine, EngineOptions
from trtspec.engine.prefix import PREFIX_BYTES, PrefixCache
from trtspec.engine.request import GenerationRequest
from trtspec.engine.sampling import BatchSampling
from trtspec.engine.sequence import Sequence
from trtspec.models.eagle3 import Eagle3Head
from trtspec.models.k2 import KimiModel, TargetOutput
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


@pytest.mark.parametrize("kind", [("mha", "3", None), ("mla", "3.1", None)], ids=str)
def test_pieces_of_several_texts_give_what_each_gives_alone(
    kind: Kind, target: KimiModel, head_of: HeadOf
) -> None:
    head, layers = (
        head_of(kind),
        target.spec.default_aux_layers,
    )  # the heads are shared: not made in inference mode
    with torch.inference_mode():
        check_pieces(target, head, layers)


def check_pieces(target: KimiModel, head: Eagle3Head, layers: tuple[int, ...]) -> None:
    """Checks target and head from different positions against a forward of one text at a time."""
    texts = [
        torch.randint(0, 100, (1, n), generator=torch.Generator().manual_seed(n))
        for n in (40, 7, 23)
    ]
    pieces = [TextPiece(2, 11, 40), TextPiece(0, 0, 7), TextPiece(1, 22, 23)]
    packed, draft = target.new_cache(3, 64), head.new_cache(3, 64)
    packed.data.fill_(9.0)  # what other texts left behind must not be seen
    for piece, text in zip(pieces, texts, strict=True):
        if piece.begin:
            aux = target(text[:, : piece.begin], torch.tensor([0]), packed, piece.row, layers).aux
            head(head.fuse(aux), text[:, 1 : piece.begin + 1], torch.tensor([0]), draft, piece.row)
    tokens = torch.cat([text[:, p.begin : p.end] for p, text in zip(pieces, texts, strict=True)], 1)
    out = target.prompts(tokens, pieces, packed, layers, [28, 35, 36])
    feedback, normed = head.prompts(head.fuse(out.aux), tokens.roll(-1, 1), pieces, draft)
    end = 0
    for index, (piece, text) in enumerate(zip(pieces, texts, strict=True)):
        begin, end = end, end + piece.end - piece.begin
        alone, alone_draft, start = (
            target.new_cache(1, 64),
            head.new_cache(1, 64),
            torch.tensor([0]),
        )
        wanted = target(text, start, alone, 0, layers)
        following = torch.cat((text[:, 1 : piece.begin + 1], tokens.roll(-1, 1)[:, begin:end]), 1)
        fed, read = head(head.fuse(wanted.aux), following, start, alone_draft)
        close = {"rtol": 1e-4, "atol": 1e-5}
        torch.testing.assert_close(out.logits[0, index], wanted.logits[0, -1], **close)
        torch.testing.assert_close(out.aux[0, begin:end], wanted.aux[0, piece.begin :], **close)
        torch.testing.assert_close(
            packed.data[:, piece.row, : piece.end], alone.data[:, 0, : piece.end], **close
        )
        torch.testing.assert_close(feedback[0, index], fed[0, -1], **close)
        torch.testing.assert_close(normed[0, index], read[0, -1], **close)


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
        (Sequence, "emit", {2}),  # of the first token of an answer
        (Sequence, "emit", {7}),  # of others
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
    """A failing step ends its request alone, and the kept prefixes stay right.

    The same requests again give the same answers.
    """
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
    done = drive(engine)
    (failed,) = (name for name, one in done.items() if one.finish_reason == "error")
    assert sorted(one.finish_reason for one in done.values()) == ["error", *["length"] * 3]
    assert token_ids(done) | {failed: good[failed]} == good
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
