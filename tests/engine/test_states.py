"""Speculation on both types of memory: reuse with eviction, chunks, stops and aborts leave the greedy text as it is.

The text is judged by one forward of the whole, without a cache: each token must be the best one behind those before.
"""

import random
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.engine.near_ties import first_divergence, router_tie
from tests.engine.oracle import drafts_from_scratch, with_oracle
from tests.recurrent import HybridModel
from tests.tiny import make_head
from trtspec.engine.engine import Engine, EngineOptions
from trtspec.engine.request import GenerationRequest
from trtspec.engine.sequence import Output
from trtspec.models.head_weights import load_head
from trtspec.models.kimi import KimiModel
from trtspec.models.weights import load_target

RECURRENT = (0, 1, 2, 4, 5)  # of seven layers; the others have latent attention
BLOCK, ROOM = 8, 1200  # tokens
# by rows: the head, and the length of its drafts
HEADS = {
    1: ("mla", "3", None, 6), 8: ("mha", "3", 100, 1), 32: ("mha", "3.1", None, 3), 64: ("mla", "3.1", None, 3),
}  # fmt: skip
CASES = [
    (torch.float64, 1, 60),
    (torch.float64, 8, 20),
    (torch.float64, 64, 8),
    (torch.float32, 32, 12),
]
LONG = [(dtype, rows, 1000) for dtype in (torch.float64, torch.float32) for rows in (1, 8, 32)]


@pytest.fixture(params=["latents", "recurrent"])
def target(request: pytest.FixtureRequest, target_dir: Path) -> KimiModel:
    loaded = load_target(target_dir, dtype=torch.float32)
    return loaded if request.param == "latents" else HybridModel(loaded, RECURRENT)


def requests_for(
    target: KimiModel, rows: int, tokens: int
) -> tuple[list[GenerationRequest], dict[str, Output]]:
    """With plain answers: prompts of 20 to 130 tokens, of which many begin alike, and these as a second turn has them.
    Some end at a token of their text, which the plain answer has beyond it."""
    dice = random.Random(rows)
    options = EngineOptions(max_batch_size=rows, max_seq_len=ROOM, record_gaps=True)
    engine, system = Engine(target, options=options), numbers(dice, 60)
    first = [
        GenerationRequest(
            f"{n} first", system[: 60 * (n % 2)] + numbers(dice, dice.randrange(20, 70)),
            tokens if n % 3 else 6, ignore_eos=True,
        )
        for n in range(rows + 4)
    ]  # fmt: skip
    plain = engine.generate(first)
    second = [
        GenerationRequest(
            f"{n} second", one.prompt_ids + plain[one.id].token_ids[:40] + numbers(dice, 20), 30, ignore_eos=True
        )
        for n, one in enumerate(first)
    ]  # fmt: skip
    plain |= engine.generate(second)
    for one in [*first, *second][3::5]:
        one.stop_token_ids = plain[one.id].token_ids[-2:-1]
    return first + second, plain


def numbers(dice: random.Random, count: int) -> list[int]:
    return [dice.randrange(256) for _ in range(count)]


@torch.inference_mode()
def is_greedy(target: KimiModel, prompt: list[int], answer: list[int]) -> bool:
    """By one forward of the whole text, without a cache."""
    best = target(torch.tensor([prompt + answer])).logits[0].argmax(-1).tolist()
    return best[len(prompt) - 1 : -1] == answer


def cut(one: GenerationRequest, plain: Output, other: Output) -> Output:
    """The plain answer up to the token that stops it, or to where the other one was cancelled."""
    end = len(plain.token_ids)
    for token in one.stop_token_ids:
        end = plain.token_ids.index(token) + 1
    if other.finish_reason == "cancelled":
        end = len(other.token_ids)
    return replace(plain, token_ids=plain.token_ids[:end], gaps=plain.gaps[:end])


@pytest.mark.parametrize(
    ("dtype", "rows", "tokens"),
    [*CASES, *(pytest.param(*case, marks=pytest.mark.slow) for case in LONG)],
)
def test_everything_at_once_against_plain_decoding(
    dtype: torch.dtype,
    rows: int,
    tokens: int,
    target: KimiModel,
    target_dir: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    target.to(dtype)
    attention, eagle, vocab, draft_len = HEADS[rows]
    path = make_head(tmp_path, target_dir, attention=attention, eagle=eagle, draft_vocab=vocab)
    head = load_head(path, target, dtype=dtype)
    requests, plain = requests_for(target, rows, tokens)
    exact = dtype == torch.float64
    if exact:
        assert all(is_greedy(target, one.prompt_ids, plain[one.id].token_ids) for one in requests)
    block_bytes = sum(model.new_cache(1, 1).bytes(BLOCK) for model in (target, head))
    options = EngineOptions(
        max_batch_size=rows, max_seq_len=ROOM, record_gaps=True, draft_len=draft_len, prefill_tokens=32,
        block_tokens=BLOCK, prefix_bytes=6 * (rows + 4) * block_bytes,
    )  # fmt: skip
    engine = Engine(target, head, options)
    oracle = with_oracle(engine, {name: output.token_ids for name, output in plain.items()})
    done = {one.id: Output(one.id) for one in requests}
    for one in requests:
        engine.submit(one)
    engine.cancelled.add(requests[-1].id)
    while engine.has_work:
        for sequence in [*engine.batch.sequences, *filter(None, [engine.prefilling])]:
            begun = len(sequence.token_ids) > 10 or sequence is engine.prefilling
            if int(sequence.id.split()[0]) % 5 == 2 and begun:
                engine.cancelled.add(sequence.id)
        for output in engine.step():
            done[output.id].add(output)
    different = []
    for one in requests:
        wanted, other = cut(one, plain[one.id], done[one.id]), done[one.id]
        if divergence := first_divergence(wanted, other):
            assert not exact, (one.id, divergence)
            different.append(router_tie(target, one.prompt_ids, wanted, other, divergence.index))
        elif exact:
            assert other.gaps == pytest.approx(wanted.gaps, abs=1e-4)
            assert len(other.margins) == len(other.gaps)
    texts = {one.id: one.prompt_ids + plain[one.id].token_ids for one in requests}
    for proposal in oracle.proposals[:: len(oracle.proposals) // 40] if exact else ():
        certain = drafts_from_scratch(target, head, texts[proposal.id], proposal)[:draft_len]
        assert proposal.drafts[: len(certain)] == certain, "the head has not seen the true text"
    ends, prefix = Counter(output.finish_reason for output in done.values()), engine.prefix.stats
    with capsys.disabled():
        print(
            f"\n{type(target).__name__} {dtype} {rows} rows {tokens} tokens: {dict(ends)}, {prefix}, "
            f"accepted {engine.totals.histogram}, (margin, bound) of differences: {different}"
        )
    assert all(margin <= bound for margin, bound in different)
    assert set(ends) == {"length", "stop", "cancelled"} and all(engine.totals.histogram)
    assert prefix.cached_tokens > 100 and prefix.evicted_blocks > 0
