"""Greedy speculative output equals greedy output by definition, whatever the batch does."""

import pytest

from tests.cases import slow
from tests.engine.conftest import HEAD_KINDS, HeadOf, Kind, drive, greedy_by_definition, token_ids
from tests.engine.oracle import drafts_from_scratch, with_oracle
from trtspec.checkpoint.tokenizer import KimiTokenizer
from trtspec.engine.engine import Engine, EngineOptions
from trtspec.engine.request import GenerationRequest
from trtspec.models.k2 import KimiModel


@pytest.mark.parametrize("rows", [1, 4, 16])
def test_plain_engine_computes_the_definition(
    rows: int, target: KimiModel, requests: list[GenerationRequest], expected: dict[str, list[int]]
) -> None:
    assert (
        token_ids(Engine(target, options=EngineOptions(max_batch_size=rows)).generate(requests))
        == expected
    )


@pytest.mark.parametrize("kind", HEAD_KINDS)
@pytest.mark.parametrize("rows", [slow(1), 4, slow(16)])
def test_every_head_kind(
    kind: Kind,
    rows: int,
    target: KimiModel,
    head_of: HeadOf,
    requests: list[GenerationRequest],
    expected: dict[str, list[int]],
) -> None:
    engine = Engine(target, head_of(kind), EngineOptions(max_batch_size=rows, max_seq_len=128))
    some = requests[: 2 + rows]
    assert token_ids(engine.generate(some)) == {
        request.id: expected[request.id] for request in some
    }
    assert engine.totals.drafted > 0


@pytest.mark.parametrize("rows", [4, *(slow(rows) for rows in (1, 16))])
@pytest.mark.parametrize("draft_len", [1, 3, 6])
def test_every_acceptance_pattern(
    rows: int,
    draft_len: int,
    target: KimiModel,
    head_of: HeadOf,
    requests: list[GenerationRequest],
    expected: dict[str, list[int]],
) -> None:
    engine = Engine(
        target,
        head_of(("mla", "3", None)),
        EngineOptions(draft_len=draft_len, max_batch_size=rows, max_seq_len=128, prefill_tokens=16),
    )
    with_oracle(engine, expected)
    assert token_ids(engine.generate(requests)) == expected
    assert all(count > 0 for count in engine.totals.histogram), (
        "some acceptance count never happened"
    )


def test_batch_of_64(
    target: KimiModel,
    head_of: HeadOf,
    requests: list[GenerationRequest],
    expected: dict[str, list[int]],
) -> None:
    repeated = [(copy, request) for copy in range(8) for request in requests][:96]
    copies = [
        request.model_copy(update={"id": f"{copy}:{request.id}"}) for copy, request in repeated
    ]
    engine = Engine(
        target, head_of(("mla", "3.1", None)), EngineOptions(max_batch_size=64, max_seq_len=128)
    )
    for name, tokens in token_ids(engine.generate(copies)).items():
        assert tokens == expected[name.partition(":")[2]]


@pytest.mark.parametrize(
    "kind", [("mha", "3", 100), ("mla", "3", None), ("mla", "3.1", None), ("mha", "3.1", None)]
)
def test_drafts_are_those_of_a_head_without_cache(
    kind: Kind,
    target: KimiModel,
    head_of: HeadOf,
    requests: list[GenerationRequest],
    expected: dict[str, list[int]],
) -> None:
    """The head proposes from the true text, as a head without a cache does.

    Before it came accepted and rejected drafts, moved rows and chunked prefill.
    """
    head = head_of(kind)
    engine = Engine(
        target, head, EngineOptions(max_batch_size=4, max_seq_len=128, prefill_tokens=16)
    )
    oracle = with_oracle(engine, expected)
    engine.generate(requests)
    texts = {request.id: request.prompt_ids + expected[request.id] for request in requests}
    checked = oracle.proposals[:: max(1, len(oracle.proposals) // 40)]
    assert len(checked) >= 40
    for proposal in checked:
        certain = drafts_from_scratch(target, head, texts[proposal.id], proposal)
        assert proposal.drafts[: len(certain)] == certain


@pytest.mark.parametrize("drafting", [False, True])
def test_context_end(drafting: bool, target: KimiModel, head_of: HeadOf) -> None:
    """A request that fills max_seq_len to the last position ends there with the right tokens."""
    request = GenerationRequest("end", list(range(40)), max_tokens=1000, ignore_eos=True)
    engine = Engine(
        target,
        head_of(("mha", "3", None)) if drafting else None,
        EngineOptions(max_batch_size=2, max_seq_len=64),
    )
    expected = greedy_by_definition(target, request.model_copy(update={"max_tokens": 24}))
    if drafting:
        with_oracle(engine, {"end": expected}, hit=0.9)
    completion = engine.generate([request])["end"]
    assert completion.finish_reason == "length"
    assert completion.token_ids == expected


def test_end_token_inside_the_drafts(target: KimiModel, head_of: HeadOf) -> None:
    """Tokens after an accepted end token are dropped and count neither as output nor accepted."""
    free = greedy_by_definition(target, GenerationRequest("e", list(range(9)), 12, ignore_eos=True))
    end = free[4]
    cut = free[: free.index(end) + 1]
    engine = Engine(
        target, head_of(("mha", "3", None)), EngineOptions(draft_len=6, max_batch_size=1)
    )
    with_oracle(engine, {"e": free}, hit=1.0)
    completion = engine.generate(
        [GenerationRequest("e", list(range(9)), 12, stop_token_ids=[end])]
    )["e"]
    assert completion.token_ids == cut
    assert completion.finish_reason == "stop"
    assert completion.stats.accepted <= len(cut) - 1


@pytest.mark.parametrize("drafting", [False, True])
def test_stop_strings(
    drafting: bool, target: KimiModel, head_of: HeadOf, tokenizer: KimiTokenizer
) -> None:
    """A stop string across two steps cuts tokens and text where plain decoding would."""
    prompt = tokenizer.encode("stop here please")
    free = greedy_by_definition(target, GenerationRequest("s", prompt, 40, ignore_eos=True))
    text = tokenizer.decode(free, skip_special=True)
    words = [
        text[i : i + size]
        for i in range(2, len(text) - 4)
        for size in (1, 2, 3)
        if "\ufffd" not in text[i : i + size]
    ]
    assert len(words) > 10
    requests = [
        GenerationRequest(f"{i}", prompt, 40, stop=[word], ignore_eos=True)
        for i, word in enumerate(words)
    ]
    engine = Engine(
        target,
        head_of(("mha", "3", None)) if drafting else None,
        EngineOptions(max_batch_size=8, max_seq_len=128),
        tokenizer=tokenizer,
    )
    if drafting:
        with_oracle(engine, {request.id: free for request in requests}, hit=0.8)
    done = engine.generate(requests)
    for request, word in zip(requests, words, strict=True):
        completion = done[request.id]
        assert completion.text == text[: text.index(word)]
        assert completion.finish_reason == "stop"
        used = next(
            n for n in range(len(free) + 1) if word in tokenizer.decode(free[:n], skip_special=True)
        )
        assert completion.token_ids == free[:used]


def test_cancel_and_refill(
    target: KimiModel, requests: list[GenerationRequest], expected: dict[str, list[int]]
) -> None:
    """Cancelling a waiting, a prefilling and a decoding request leaves the others' tokens."""
    engine = Engine(target, options=EngineOptions(max_batch_size=3, prefill_tokens=8))
    for request in requests:
        engine.submit(request)
    gone: set[str] = set()

    def cancel() -> None:
        if not gone and len(engine.batch) and engine.prefilling:
            gone.update({engine.batch.sequences[0].id, engine.prefilling.id, engine.waiting[-1].id})
            engine.cancelled.update({*gone, "nobody"})

    done = drive(engine, cancel)
    assert {name for name, one in done.items() if one.finish_reason == "cancelled"} == gone
    assert token_ids(done) | {name: expected[name] for name in gone} == expected


def test_statistics_add_up(
    target: KimiModel,
    head_of: HeadOf,
    requests: list[GenerationRequest],
    expected: dict[str, list[int]],
) -> None:
    engine = Engine(
        target, head_of(("mla", "3", None)), EngineOptions(max_batch_size=4, max_seq_len=128)
    )
    with_oracle(engine, expected)
    for completion in engine.generate(requests).values():
        stats = completion.stats
        assert sum(stats.histogram) == stats.steps
        assert (
            sum(j * count for j, count in enumerate(stats.histogram))
            == stats.accepted
            <= stats.drafted
        )
        # the prefill gives one token, each step its accepted drafts and one more; an end token may
        # be a draft itself
        tokens = 1 + stats.steps + stats.accepted
        assert tokens - len(completion.token_ids) in (
            (0, 1) if completion.finish_reason == "stop" else (0,)
        )
    assert engine.totals.steps == sum(engine.totals.histogram)
