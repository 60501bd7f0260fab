"""What the prefix cache gives equals what would be computed, for the target and for its head."""

import random
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.engine.conftest import HeadOf, Kind
from tests.engine.oracle import drafts_from_scratch, with_oracle
from trtspec.engine.engine import Engine, EngineOptions
from trtspec.engine.prefix import PREFIX_BYTES, PrefixCache
from trtspec.engine.request import GenerationRequest
from trtspec.errors import UsageError
from trtspec.models.k2 import KimiModel
from trtspec.models.state import LatentCache

REUSE = EngineOptions(
    max_batch_size=4, max_seq_len=128, prefill_tokens=16, prefix_bytes=PREFIX_BYTES, block_tokens=4
)
MLA, MHA = ("mla", "3.1", None), ("mha", "3", 100)
TARGET_WORDS, HEAD_WORDS = 3, 1  # bytes per token of the caches of the next test


def entry(text: list[int], tokens: int, word: int) -> int:
    """A byte that depends on the first `tokens` of a text."""
    return random.Random(f"{word}:{text[:tokens]}").randrange(1, 256)


@settings(max_examples=60)
@given(
    st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=14), min_size=1, max_size=25),
    st.integers(1, 9),
)
def test_loaded_entries_are_those_of_the_text(texts: list[list[int]], blocks: int) -> None:
    """Two-letter texts share beginnings often, and few blocks are evicted often.

    Every entry says which text made it: a target's at t depends on the tokens up to t, a head's on
    those up to t+1.
    """
    target = LatentCache(1, 2, 16, TARGET_WORDS, torch.uint8, "cpu")
    head = LatentCache(1, 2, 16, HEAD_WORDS, torch.uint8, "cpu")
    prefix = PrefixCache(target, head, blocks * 2 * (TARGET_WORDS + HEAD_WORDS), 2)
    for number, text in enumerate(texts):
        row = number % 2
        target.data.fill_(0)
        head.data.fill_(0)
        reused = prefix.load(text, row)
        assert reused < len(text)
        for place in range(len(text)):
            made = [entry(text, place + 1, word) for word in range(TARGET_WORDS)]
            if place < reused:
                assert target.data[0, row, place].tolist() == made
                assert int(head.data[0, row, place]) == entry(text, place + 2, 9)
            target.data[0, row, place] = torch.tensor(made, dtype=torch.uint8)
            head.data[0, row, place] = entry(text, place + 2, 9)
        assert not target.data[0, 1 - row].any()
        prefix.save(text, row)
        assert len(prefix.blocks) <= prefix.capacity == blocks
        if len(text) // 2 <= blocks:
            assert len(prefix._chain(text)) == len(text) // 2, "the text just saved is found whole"


def test_the_least_recently_used_text_leaves_first() -> None:
    cache = LatentCache(1, 1, 16, 1, torch.float32, "cpu")
    prefix = PrefixCache(cache, None, 4 * 16, 4)
    for text in ([1] * 8, [2] * 4, [3] * 4):
        prefix.save(text, 0)
    assert prefix.load([1] * 9, 0) == 8
    prefix.save([4] * 8, 0)
    assert [prefix.load([token] * 9, 0) for token in (1, 2, 3, 4)] == [8, 0, 0, 8]
    assert prefix.stats.evicted_blocks == 2
    with pytest.raises(UsageError, match="hold no block"):
        PrefixCache(cache, None, 15, 4)


def conversations(count: int, turns: int) -> list[list[GenerationRequest]]:
    """Turns by conversation, each beginning with the one before; all share 10 first tokens."""
    numbers = random.Random(5)
    system = [numbers.randrange(256) for _ in range(10)]
    made = []
    for which in range(count):
        text, requests = list(system), []
        for turn in range(turns):
            text = text + [numbers.randrange(256) for _ in range(numbers.randrange(1, 24))]
            tokens = numbers.randrange(1, 12)
            requests.append(GenerationRequest(f"{which}.{turn}", text, tokens, ignore_eos=True))
        made.append(requests)
    return made


def serial(target: KimiModel, requests: list[GenerationRequest]) -> dict[str, list[int]]:
    engine = Engine(target, options=EngineOptions(max_batch_size=1, max_seq_len=128))
    return {name: done.token_ids for name, done in engine.generate(requests).items()}


@pytest.mark.parametrize("kind", [MHA, MLA])
def test_lossless_with_chunks_cancels_and_eviction(
    kind: Kind, target: KimiModel, head_of: HeadOf
) -> None:
    """Turns with chunks, cancels and eviction get the plain answers.

    A turn is sent when the one before has ended or was cancelled; 40 blocks of 4 tokens hold a part
    of it all.
    """
    left = conversations(8, 4)
    expected = serial(target, [request for one in left for request in one])
    block_bytes = sum(model.new_cache(1, 1).bytes(4) for model in (target, head_of(kind)))
    engine = Engine(target, head_of(kind), replace(REUSE, prefix_bytes=40 * block_bytes))
    with_oracle(engine, expected)
    numbers, got, cached, cancelled = random.Random(3), dict.fromkeys(expected, ()), 0, set()
    waiting = {str(which): one for which, one in enumerate(left)}
    for one in waiting.values():
        engine.submit(one.pop(0))
    while engine.has_work:
        running = [sequence.id for sequence in engine.batch.sequences]
        if running and numbers.random() < 0.1:
            engine.cancelled.add(numbers.choice(running))
        for output in engine.step():
            got[output.id] = (*got[output.id], *output.token_ids)
            cached += output.cached_tokens
            if output.finish_reason:
                cancelled |= {output.id} if output.finish_reason == "cancelled" else set()
                if rest := waiting[output.id.partition(".")[0]]:
                    engine.submit(rest.pop(0))
    assert engine.prefix is not None
    assert {
        name: tokens
        for name, tokens in expected.items()
        if name not in cancelled and list(got[name]) != tokens
    } == {}
    assert all(expected[name][: len(got[name])] == list(got[name]) for name in cancelled)
    assert 0 < len(cancelled) < len(expected) / 2
    assert engine.prefix.stats.cached_tokens == cached > 100
    assert engine.prefix.stats.evicted_blocks > 0
    assert engine.prefix.stats.cached_tokens < engine.prefix.stats.tokens


@pytest.mark.parametrize("kind", [MLA, MHA])
def test_drafts_behind_a_reused_prefix(kind: Kind, target: KimiModel, head_of: HeadOf) -> None:
    """They are those of a head that computed the whole text."""
    requests = [request for turn in zip(*conversations(4, 4), strict=True) for request in turn]
    expected = serial(target, requests)
    engine = Engine(target, head_of(kind), replace(REUSE, max_batch_size=2))
    oracle = with_oracle(engine, expected)
    done = engine.generate(requests)
    texts = {request.id: request.prompt_ids + expected[request.id] for request in requests}
    warm = [proposal for proposal in oracle.proposals if done[proposal.id].cached_tokens][::2]
    assert len(warm) >= 10
    for proposal in warm:
        certain = drafts_from_scratch(target, head_of(kind), texts[proposal.id], proposal)
        assert proposal.drafts[: len(certain)] == certain


def test_reported_tokens_and_prompt_logprobs(target: KimiModel) -> None:
    """A prompt whose own log-probabilities are asked for is computed whole."""
    engine = Engine(target, options=REUSE)
    request = GenerationRequest("first", list(range(40)), 4, ignore_eos=True)
    again = request.model_copy(update={"id": "again"})
    scored = request.model_copy(update={"id": "scored", "prompt_logprobs": True})
    assert engine.generate([request])["first"].cached_tokens == 0
    assert engine.generate([again])["again"].cached_tokens == 39
    done = engine.generate([scored])["scored"]
    assert (done.cached_tokens, len(done.prompt_logprobs)) == (0, 39)
    assert engine.prefix is not None and (
        engine.prefix.stats.cached_tokens,
        engine.prefix.stats.tokens,
    ) == (39, 80)
