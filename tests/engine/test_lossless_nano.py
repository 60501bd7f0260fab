"""kimi-nano with its trained head: greedy speculative against plain output on held-out prompts.

Plain output is at batch 1. float32: token for token. bfloat16 and NVFP4: every first divergence is
a near-tie under the rounding measured at that very position. NVFP4 is computed in bfloat16 where
the CPU has it natively, else in float32; bfloat16 always as such, which a CPU without it computes
in float32 and rounds.
"""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.cases import slow
from tests.command_line import process
from tests.engine.near_ties import first_divergence, rounding_at
from trtspec.checkpoint.tokenizer import KimiTokenizer
from trtspec.data_files import DATA, kimi_nano_dir
from trtspec.engine.engine import Engine, EngineOptions
from trtspec.engine.request import GenerationRequest
from trtspec.engine.sequence import Output
from trtspec.models.eagle3 import Eagle3Head
from trtspec.models.head_weights import load_head
from trtspec.models.k2 import KimiModel
from trtspec.models.precision import default_dtype
from trtspec.models.weights import load_target

HEAD = DATA / "kimi-nano-eagle3"
PROMPTS = kimi_nano_dir() / "prompts_heldout.jsonl"
PROMPT_TOKENS, NEW_TOKENS = 96, 32  # the prompt's end, with the assistant's turn opened
EVERY = pytest.mark.parametrize("count", [8, slow(200)])

pytestmark = pytest.mark.skipif(
    not (
        PROMPTS.is_file()
        and (kimi_nano_dir() / "config.json").is_file()
        and (HEAD / "config.json").is_file()
    ),
    reason="kimi-nano and its head are not in trtspec/data",
)

Models = Callable[[str], tuple[KimiModel, Eagle3Head]]
Plain = Callable[[str, int], dict[str, Output]]


@pytest.fixture(scope="module")
def nvfp4_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """kimi-nano quantized by the command that users run."""
    output = tmp_path_factory.mktemp("quantized") / "kimi-nano-nvfp4"
    assert process("quantize", kimi_nano_dir(), "-o", output).status == 0
    return output


@pytest.fixture(scope="module")
def models(request: pytest.FixtureRequest) -> Models:
    """Target and head by format, loaded once."""
    loaded: dict[str, tuple[KimiModel, Eagle3Head]] = {}

    def load(format: str) -> tuple[KimiModel, Eagle3Head]:
        if format not in loaded:
            nvfp4 = format == "nvfp4"
            directory = request.getfixturevalue("nvfp4_dir") if nvfp4 else kimi_nano_dir()
            dtype = default_dtype() if nvfp4 else getattr(torch, format)
            target = load_target(directory, dtype=dtype)
            loaded[format] = target, load_head(HEAD, target, dtype=dtype)
        return loaded[format]

    return load


@pytest.fixture(scope="module")
def plain(models: Models) -> Plain:
    """Answers without speculation at batch 1, computed once per format."""
    made: dict[tuple[str, int], dict[str, Output]] = {}

    def answers(format: str, count: int) -> dict[str, Output]:
        if (format, count) not in made:
            made[format, count] = generate(models(format)[0], None, held_out(count), 1)[0]
        return made[format, count]

    return answers


def held_out(count: int) -> list[GenerationRequest]:
    tokenizer = KimiTokenizer(kimi_nano_dir())
    lines = PROMPTS.read_text(encoding="utf-8").splitlines()[:count]
    assert len(lines) == count
    prompts = [
        tokenizer.encode_chat(json.loads(line)["messages"])[1][-PROMPT_TOKENS:] for line in lines
    ]
    return [
        GenerationRequest(str(number), prompt, NEW_TOKENS) for number, prompt in enumerate(prompts)
    ]


def generate(
    target: KimiModel, head: Eagle3Head | None, requests: list[GenerationRequest], rows: int
) -> tuple[dict[str, Output], Engine]:
    length = PROMPT_TOKENS + NEW_TOKENS + 8
    engine = Engine(
        target, head, EngineOptions(max_batch_size=rows, max_seq_len=length, record_gaps=True)
    )
    return engine.generate(requests), engine


@pytest.mark.parametrize("rows", [slow(1), 16])
@EVERY
def test_float32_token_for_token(count: int, rows: int, models: Models, plain: Plain) -> None:
    requests = held_out(count)
    speculative, engine = generate(*models("float32"), requests, rows)
    expected = plain("float32", count)
    different = {r.id: first_divergence(expected[r.id], speculative[r.id]) for r in requests}
    assert {name: divergence for name, divergence in different.items() if divergence} == {}
    assert 1 + engine.totals.accepted / engine.totals.steps > 1.5, (
        "a trained head accepts more than this"
    )


@pytest.mark.timeout(3600)  # 200 prompts, without native bfloat16
@pytest.mark.parametrize("rows", [16, slow(1)])
@pytest.mark.parametrize(
    ("format", "count"),
    [
        slow("bfloat16", 2),
        slow("bfloat16", 200),
        slow("nvfp4", 200),
    ],
)
def test_divergences_are_near_ties(
    format: str,
    count: int,
    rows: int,
    models: Models,
    plain: Plain,
    capsys: pytest.CaptureFixture[str],
) -> None:
    requests = held_out(count)
    speculative, engine = generate(*models(format), requests, rows)
    expected = plain(format, count)
    found = [(r, d) for r in requests if (d := first_divergence(expected[r.id], speculative[r.id]))]
    judged = [(d, rounding_at(engine.target, r.prompt_ids, expected[r.id], d)) for r, d in found]
    with capsys.disabled():
        print(f"\n{format} in {engine.target.dtype}, batch {rows}: {len(found)} of {count} diverge")
        for d, m in judged:
            print(
                f"  token {d.index}: gap {d.gap:.4f}, clean lead {m.behind:.4f}, "
                f"margin moves {m.change:.4f}"
            )
    assert all(measured.explains(divergence) for divergence, measured in judged)
