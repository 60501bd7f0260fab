"""Speculation on a recurrent state keeps the greedy text: eviction, chunks, stops and aborts.

In float64 the text is judged by one forward of the whole, without a cache: each token must be the
best one behind those before. In float32 runs may part where rounding decides: every difference is
printed with the lead that rounding turned around, of the logits and of the experts, and the bound
on it.
"""

import random
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.cases import slow
from tests.engine.conftest import drive
from tests.engine.near_ties import explained, first_divergence, leads_and_bounds
from tests.engine.oracle import drafts_from_scratch, with_oracle
from tests.recurrent import HybridModel
from tests.tiny import make_head
from trtspec.engine.engine import Engine, EngineOptions
from trtspec.engine.request import GenerationRequest
from trtspec.engine.sequence import Output
from trtspec.models.head_weights import load_head
from trtspec.models.k2 import KimiModel
from trtspec.models.weights import load_target

CLOSE = 1e-5  # of logits in float64, which are returned as float32
LONG = [(dtype, rows, 1000) for dtype in (torch.float64, torch.float32) for rows in (1, 8, 32)]


def prompted(rows: int, tokens: int) -> list[GenerationRequest]:
    """Prompts of 20 to 130 tokens, half of which begin alike; a third of the answers are short."""
    dice = random.Random(rows)
    system = dice.choices(range(256), k=60)
    return [
        GenerationRequest(
            str(n),
            system[: n % 2 * 60] + dice.choices(range(256), k=dice.randrange(20, 70)),
            tokens if n % 3 else 6,
            ignore_eos=True,
        )
        for n in range(rows + 4)
    ]


def beginning(answer: Output, tokens: int) -> Output:
    return replace(answer, token_ids=answer.token_ids[:tokens], gaps=answer.gaps[:tokens])


@torch.inference_mode()
def check_greedy(target: KimiModel, prompt: list[int], answer: Output) -> None:
    """By one forward of the whole text, without a cache."""
    logits = target(torch.tensor([prompt + answer.token_ids])).logits[0, len(prompt) - 1 : -1]
    values, tokens = logits.topk(2)
    assert tokens[:, 0].tolist() == answer.token_ids
    assert answer.gaps == pytest.approx((values[:, 0] - values[:, 1]).tolist(), abs=CLOSE)


@pytest.mark.parametrize(
    ("dtype", "rows", "tokens"), [(torch.float64, 8, 20), *(slow(*case) for case in LONG)]
)
def test_everything_at_once_against_plain_decoding(
    dtype: torch.dtype,
    rows: int,
    tokens: int,
    target_dir: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Requests, run twice, the second time to a stop token, equal plain decoding.

    A fifth of the first runs are aborted.
    """
    target, exact = HybridModel(load_target(target_dir, dtype=dtype)), dtype == torch.float64
    head = load_head(make_head(tmp_path, target_dir, attention="mla"), target, dtype=dtype)
    requests = prompted(rows, tokens)
    options = EngineOptions(max_batch_size=rows, record_gaps=True)
    plain = Engine(target, options=options).generate(requests)
    for one in requests if exact else ():
        check_greedy(target, one.prompt_ids, plain[one.id])
    for one in requests[:]:
        answer, changes = plain[one.id], {"id": f"{one.id} again"}
        end = answer.token_ids.index(answer.token_ids[4]) + 1
        plain[changes["id"]] = beginning(answer, end)
        requests.append(one.model_copy(update=changes | {"stop_token_ids": answer.token_ids[4:5]}))
    block_bytes = sum(model.new_cache(1, 1).bytes(8) for model in (target, head))
    options = EngineOptions(
        max_batch_size=rows, record_gaps=True, prefill_tokens=32, block_tokens=8,
        prefix_bytes=4 * (rows + 4) * block_bytes,
    )  # fmt: skip
    engine, dice = Engine(target, head, options), random.Random(1)
    oracle = with_oracle(engine, {name: output.token_ids for name, output in plain.items()})
    for one in requests:
        engine.submit(one)
    engine.cancelled.add(requests[-1].id)

    def abort() -> None:
        running = [*engine.batch.sequences, *filter(None, [engine.prefilling])]
        engine.cancelled |= {one.id for one in running if one.id in aborted and dice.random() < 0.1}

    aborted = {one.id for one in requests[1 : rows + 4 : 5]}
    done = drive(engine, abort)
    different = []
    for one in requests:
        wanted, other = plain[one.id], done[one.id]
        if other.finish_reason == "cancelled":
            wanted = beginning(wanted, len(other.token_ids))
        assert len(other.token_ids) == len(other.gaps) == len(other.margins)
        if divergence := first_divergence(wanted, other):
            different.append(leads_and_bounds(target, one.prompt_ids, wanted, other, divergence))
        elif exact:
            assert other.gaps == pytest.approx(wanted.gaps, abs=CLOSE)
    ends, prefix = Counter(output.finish_reason for output in done.values()), engine.prefix.stats
    with capsys.disabled():
        print(
            f"\n{dtype} {rows} rows {tokens} tokens: {dict(ends)}, {prefix}, "
            f"accepted {engine.totals.histogram}, "
            f"leads and bounds of {len(different)} differences: {different}"
        )
    assert not (exact and different) and all(map(explained, different))
    assert set(ends) == {"length", "stop", "cancelled"} and all(engine.totals.histogram)
    assert prefix.cached_tokens > 100 and prefix.evicted_blocks
    reused = [one for one in oracle.proposals if done[one.id].cached_tokens]
    texts = {one.id: one.prompt_ids + plain[one.id].token_ids for one in requests}
    for proposal in reused[:: 1 + len(reused) // 10] if exact else ():
        certain = drafts_from_scratch(target, head, texts[proposal.id], proposal)
        assert proposal.drafts[: len(certain)] == certain, "the head has not seen the true text"
