"""Speculation on both types of memory: reuse with eviction, chunks, stops and aborts leave the greedy text as it is.

In float64 the text is judged by one forward of the whole, without a cache: each token must be the best one behind those
before. In float32 runs may part where rounding decides: every difference is printed with the lead that rounding turned
around, of the logits and of the experts, and the bound on it.
"""

import random
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.engine.near_ties import explained, first_divergence, leads_and_bounds
from tests.engine.oracle import drafts_from_scratch, with_oracle
from tests.recurrent import HybridModel
from tests.tiny import make_head
from trtspec.engine.engine import Engine, EngineOptions
from trtspec.engine.request import GenerationRequest
from trtspec.engine.sequence import Output
from trtspec.models.head_weights import load_head
from trtspec.models.kimi import KimiModel
from trtspec.models.weights import load_target

BLOCK_TOKENS, MAX_SEQ_LEN = 8, 1200
CLOSE = 1e-5  # of logits in float64, which are returned as float32
# by rows: the head, and the length of its drafts
HEADS = {
    1: ("mla", "3", None, 6), 8: ("mha", "3", 100, 3), 16: ("mla", "3", None, 1), 32: ("mha", "3.1", None, 3),
    64: ("mla", "3.1", None, 3),
}  # fmt: skip
CASES = [
    (torch.float64, 1, 60),
    (torch.float64, 8, 20),
    (torch.float64, 32, 12),
    (torch.float64, 64, 8),
    (torch.float32, 16, 12),
]
LONG = [(dtype, rows, 1000) for dtype in (torch.float64, torch.float32) for rows in (1, 8, 32)]


@pytest.fixture(params=["latents", "recurrent"])
def target(request: pytest.FixtureRequest, target_dir: Path) -> KimiModel:
    loaded = load_target(target_dir, dtype=torch.float32)
    return loaded if request.param == "latents" else HybridModel(loaded)


def conversations(
    target: KimiModel, rows: int, tokens: int
) -> tuple[list[GenerationRequest], dict[str, Output]]:
    """First turns of 20 to 130 tokens, half of which begin alike, and second turns behind their answers; with the plain
    answers. Some end at a stop token."""
    dice = random.Random(rows)
    options = EngineOptions(max_batch_size=rows, max_seq_len=MAX_SEQ_LEN, record_gaps=True)
    engine, system = Engine(target, options=options), dice.choices(range(256), k=60)
    prompts = [
        system[: 60 * (n % 2)] + dice.choices(range(256), k=dice.randrange(20, 70))
        for n in range(rows + 4)
    ]
    requests: list[GenerationRequest] = []
    plain: dict[str, Output] = {}
    for turn, limit in ("first", tokens), ("second", 30):
        asked = [
            GenerationRequest(f"{n} {turn}", prompt, limit if n % 3 else 6, ignore_eos=True)
            for n, prompt in enumerate(prompts)
        ]
        plain |= engine.generate(asked)
        requests += asked
        prompts = [
            one.prompt_ids + plain[one.id].token_ids[:40] + dice.choices(range(256), k=20)
            for one in asked
        ]
    for one in requests[3::5]:
        answer = plain[one.id]
        one.stop_token_ids = answer.token_ids[-2:-1]
        end = answer.token_ids.index(answer.token_ids[-2]) + 1
        del answer.token_ids[end:], answer.gaps[end:]
    return requests, plain


@torch.inference_mode()
def check_greedy(target: KimiModel, prompt: list[int], answer: Output) -> None:
    """By one forward of the whole text, without a cache."""
    logits = target(torch.tensor([prompt + answer.token_ids])).logits[0, len(prompt) - 1 : -1]
    values, tokens = logits.topk(2)
    assert tokens[:, 0].tolist() == answer.token_ids
    assert answer.gaps == pytest.approx((values[:, 0] - values[:, 1]).tolist(), abs=CLOSE)


def run_with_aborts(engine: Engine, requests: list[GenerationRequest]) -> dict[str, Output]:
    """The last one is aborted while it waits, a tenth of all within their prompts, a tenth within their answers."""
    done = {one.id: Output(one.id) for one in requests}
    for one in requests:
        engine.submit(one)
    engine.cancelled.update({requests[-1].id, "nobody"})
    in_prompt, in_answer = ({one.id for one in requests[first::10]} for first in (2, 7))
    while engine.has_work:
        if engine.prefilling and engine.prefilling.id in in_prompt:
            engine.cancelled.add(engine.prefilling.id)
        begun = {one.id for one in engine.batch.sequences if len(one.token_ids) > 5}
        engine.cancelled |= in_answer & begun
        for output in engine.step():
            done[output.id].add(output)
    return done


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
    head, exact = load_head(path, target, dtype=dtype), dtype == torch.float64
    requests, plain = conversations(target, rows, tokens)
    for one in requests if exact else ():
        check_greedy(target, one.prompt_ids, plain[one.id])
    block_bytes = sum(model.new_cache(1, 1).bytes(BLOCK_TOKENS) for model in (target, head))
    options = EngineOptions(
        max_batch_size=rows, max_seq_len=MAX_SEQ_LEN, record_gaps=True, draft_len=draft_len, prefill_tokens=32,
        block_tokens=BLOCK_TOKENS, prefix_bytes=6 * (rows + 4) * block_bytes,
    )  # fmt: skip
    engine = Engine(target, head, options)
    oracle = with_oracle(engine, {name: output.token_ids for name, output in plain.items()})
    done = run_with_aborts(engine, requests)
    different = []
    for one in requests:
        wanted, other = plain[one.id], done[one.id]
        if other.finish_reason == "cancelled":
            end = len(other.token_ids)
            wanted = replace(wanted, token_ids=wanted.token_ids[:end], gaps=wanted.gaps[:end])
        assert len(other.token_ids) == len(other.gaps) == len(other.margins)
        if divergence := first_divergence(wanted, other):
            different.append(leads_and_bounds(target, one.prompt_ids, wanted, other, divergence))
        elif exact:
            assert other.gaps == pytest.approx(wanted.gaps, abs=CLOSE)
    ends, prefix = Counter(output.finish_reason for output in done.values()), engine.prefix.stats
    with capsys.disabled():
        print(
            f"\n{type(target).__name__} {dtype} {rows} rows {tokens} tokens: {dict(ends)}, {prefix}, "
            f"accepted {engine.totals.histogram}, leads and bounds of differences: {different}"
        )
    assert not (exact and different) and all(map(explained, different))
    aborted = [one.token_ids for one in done.values() if one.finish_reason == "cancelled"]
    assert not all(aborted) and any(aborted)
    assert set(ends) == {"length", "stop", "cancelled"} and all(engine.totals.histogram)
    assert 100 < sum(one.cached_tokens for one in done.values()) <= prefix.cached_tokens
    assert prefix.evicted_blocks > 0
    reused = [one for one in oracle.proposals if done[one.id].cached_tokens]
    assert len(reused) >= 10
    checked = oracle.proposals[:: len(oracle.proposals) // 20] + reused[:: len(reused) // 10]
    texts = {one.id: one.prompt_ids + plain[one.id].token_ids for one in requests}
    for proposal in checked if exact else ():
        certain = drafts_from_scratch(target, head, texts[proposal.id], proposal)[:draft_len]
        assert proposal.drafts[: len(certain)] == certain, "the head has not seen the true text"
