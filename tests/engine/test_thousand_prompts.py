"""1,000 prompts of conversations on kimi-nano with its head: all at once against serial decoding.

In float32, with prefix reuse and eviction, chunked prefill, aborts, and a draft length by batch
size. Half an hour of one quiet core; fewer prompts by TRTSPEC_TEST_PROMPTS.
"""

import json
import os
import random
from dataclasses import dataclass, field

import pytest
import torch

from trtspec.checkpoint.tokenizer import KimiTokenizer
from trtspec.data_files import DATA, kimi_nano_dir
from trtspec.engine.engine import Engine, EngineOptions
from trtspec.engine.request import GenerationRequest
from trtspec.models.head_weights import load_head
from trtspec.models.k2 import KimiModel
from trtspec.models.weights import load_target

PROMPTS = int(os.environ.get("TRTSPEC_TEST_PROMPTS", "1000"))
TURNS, MAX_SEQ_LEN = 4, 512
ABORTED = 0.1
SYSTEMS = [
    "You answer questions about Python.",
    "You write docstrings, briefly.",
    "Continue the code. " * 12,
]


@dataclass
class Conversation:
    """Texts of its user, and its requests; each prompt has the serial answer to the one before."""

    messages: list[dict[str, str]]
    says: list[str]
    requests: list[GenerationRequest] = field(default_factory=list)


@pytest.fixture(scope="module")
def target() -> KimiModel:
    torch.set_num_threads(1)
    return load_target(kimi_nano_dir(), dtype=torch.float32)


@pytest.fixture(scope="module")
def conversations(target: KimiModel) -> tuple[list[Conversation], dict[str, list[int]]]:
    """The requests by conversation, and their answers by serial decoding.

    It runs one request at a time, with no drafts and no reuse.
    """
    tokenizer, numbers = KimiTokenizer(kimi_nano_dir()), random.Random(11)
    texts = [
        json.loads(line)["messages"][0]["content"]
        for name in ("prompts_heldout.jsonl", "prompts_train.jsonl")
        for line in (kimi_nano_dir() / name).read_text(encoding="utf-8").splitlines()
    ]
    short = iter([text for text in texts if len(text) < 160])
    serial = Engine(target, options=EngineOptions(max_batch_size=1, max_seq_len=MAX_SEQ_LEN))
    made, expected = [], {}
    for number in range(PROMPTS // TURNS):
        system = {"role": "system", "content": SYSTEMS[number % len(SYSTEMS)]}
        one = Conversation([system], [next(short) for _ in range(TURNS)])
        for turn, says in enumerate(one.says):
            one.messages.append({"role": "user", "content": says})
            prompt = tokenizer.encode_chat(one.messages)[1]
            request = GenerationRequest(
                f"{number}.{turn}", prompt[-MAX_SEQ_LEN + 64 :], numbers.randrange(8, 40)
            )
            answer = serial.generate([request])[request.id].token_ids
            one.requests.append(request)
            one.messages.append(
                {"role": "assistant", "content": tokenizer.decode(answer, skip_special=True)}
            )
            expected[request.id] = answer
        made.append(one)
    return made, expected


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("rows", [16, 64])
def test_everything_at_once_against_serial_decoding(
    rows: int,
    target: KimiModel,
    conversations: tuple[list[Conversation], dict[str, list[int]]],
    capsys: pytest.CaptureFixture[str],
) -> None:
    made, expected = conversations
    options = EngineOptions(
        draft_len=4, max_batch_size=rows, max_seq_len=MAX_SEQ_LEN, prefill_tokens=48,
        max_num_tokens=48 + 5 * rows, prefix_bytes=16 << 20,
    )  # fmt: skip
    engine = Engine(
        target, load_head(DATA / "kimi-nano-eagle3", target, dtype=torch.float32), options
    )
    numbers, got, ended = random.Random(rows), {name: [] for name in expected}, {}
    rest = [list(one.requests) for one in made]
    doomed = {name: numbers.randrange(1, 12) for name in expected if numbers.random() < ABORTED}
    for one in rest:
        engine.submit(one.pop(0))
    while engine.has_work:
        for output in engine.step():
            got[output.id] += output.token_ids
            if output.finish_reason:
                ended[output.id] = output.finish_reason
                if following := rest[int(output.id.partition(".")[0])]:
                    engine.submit(following.pop(0))
            elif len(got[output.id]) >= doomed.get(output.id, 10**6):
                engine.cancelled.add(output.id)
    different = [name for name, tokens in got.items() if tokens != expected[name][: len(tokens)]]
    whole = [name for name, reason in ended.items() if reason != "cancelled"]
    cut = [name for name in whole if got[name] != expected[name]]
    totals, prefix = engine.totals, engine.prefix
    assert prefix is not None
    with capsys.disabled():
        print(
            f"\n{len(expected)} prompts, concurrency {rows}: {len(different) + len(cut)} "
            f"different; {len(ended) - len(whole)} aborted; {prefix.stats.cached_tokens} of "
            f"{prefix.stats.tokens} prompt tokens reused, {prefix.stats.evicted_blocks} blocks "
            f"evicted; accepted drafts per round {totals.histogram}"
        )
    assert (different, cut) == ([], [])
    assert len(ended) == len(expected)
    assert prefix.stats.cached_tokens > 0 and all(totals.histogram)
    if PROMPTS >= 1000:
        assert len(ended) - len(whole) > 40 and prefix.stats.evicted_blocks > 0
