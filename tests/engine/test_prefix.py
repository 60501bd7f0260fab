"""Prefix reuse: what is taken from the cache is what would have been computed, for the target and for its head."""

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trtspec.engine.engine import Engine, EngineOptions
from trtspec.engine.prefix import PREFIX_BYTES, PrefixCache
from trtspec.engine.request import GenerationRequest
from trtspec.errors import UsageError
from trtspec.models.kimi import KimiModel
from trtspec.models.state import LatentCache

REUSE = EngineOptions(
    max_batch_size=4, max_seq_len=128, prefill_tokens=16, prefix_bytes=PREFIX_BYTES, block_tokens=4
)
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
    """Two-letter texts share beginnings often, and few blocks are evicted often. Every entry says which text made it:
    a target's at t depends on the tokens up to t, a head's on those up to t+1."""
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
