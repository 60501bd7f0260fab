"""kimi-nano with its trained head: greedy speculative output against plain output on held-out prompts.

float32: token for token. bfloat16 and NVFP4: every first divergence is a near-tie under the measured rounding bound.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from trtspec.checkpoint.tokenizer import KimiTokenizer
from trtspec.data_files import DATA, kimi_nano_dir
from trtspec.engine.engine import Engine
from trtspec.engine.near_ties import first_divergence, rounding_bound
from trtspec.engine.sequence import Completion, Request
from trtspec.models.head_weights import load_head
from trtspec.models.weights import load_target

HEAD = DATA / "kimi-nano-eagle3"
PROMPTS = kimi_nano_dir() / "prompts_heldout.jsonl"
NEW_TOKENS = 32

pytestmark = pytest.mark.skipif(
    not (PROMPTS.is_file() and (kimi_nano_dir() / "config.json").is_file() and (HEAD / "config.json").is_file()),
    reason="kimi-nano and its head are not in trtspec/data",
)


def held_out(count: int) -> list[Request]:
    tokenizer = KimiTokenizer(kimi_nano_dir())
    lines = PROMPTS.read_text(encoding="utf-8").splitlines()[:count]
    assert len(lines) == count
    prompts = [tokenizer.apply_chat_template(json.loads(line)["messages"])[-512:] for line in lines]
    return [Request(str(number), prompt, NEW_TOKENS) for number, prompt in enumerate(prompts)]


def run(
    dtype: torch.dtype, requests: list[Request], rows: int, target_dir: Path
) -> tuple[dict[str, Completion], dict[str, Completion], Engine]:
    """(plain at batch 1, with the head at batch `rows`, the engine with the head)."""
    target = load_target(target_dir, dtype=dtype)
    head = load_head(HEAD, target, dtype=dtype)
    common = {"max_seq_len": 640, "record_gaps": True}
    plain = Engine(target, max_batch_size=1, **common).generate(requests)  # type: ignore[arg-type]
    engine = Engine(target, head, drafter="eagle3", max_batch_size=rows, **common)  # type: ignore[arg-type]
    return plain, engine.generate(requests), engine


@pytest.mark.parametrize("rows", [1, 16])
@pytest.mark.parametrize("count", [16, pytest.param(200, marks=pytest.mark.slow)])
def test_float32_token_for_token(count: int, rows: int) -> None:
    requests = held_out(count)
    plain, speculative, engine = run(torch.float32, requests, rows, kimi_nano_dir())
    different = {r.id: first_divergence(plain[r.id], speculative[r.id]) for r in requests}
    assert {name: divergence for name, divergence in different.items() if divergence} == {}
    assert 1 + engine.totals.accepted / engine.totals.steps > 1.5, "a trained head accepts more than this"


@pytest.fixture(scope="module")
def nvfp4_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """kimi-nano quantized by the command that users run."""
    output = tmp_path_factory.mktemp("quantized") / "kimi-nano-nvfp4"
    command = [sys.executable, "-m", "trtspec", "quantize", str(kimi_nano_dir()), "-o", str(output)]
    subprocess.run(command, check=True, capture_output=True, timeout=250)
    return output


@pytest.mark.parametrize("rows", [1, 16])
@pytest.mark.parametrize("count", [16, pytest.param(200, marks=pytest.mark.slow)])
@pytest.mark.parametrize("format", ["bfloat16", pytest.param("nvfp4", marks=pytest.mark.slow)])
def test_divergences_are_near_ties(
    format: str, count: int, rows: int, nvfp4_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    requests = held_out(count)
    directory = nvfp4_dir if format == "nvfp4" else kimi_nano_dir()
    plain, speculative, engine = run(torch.bfloat16, requests, rows, directory)
    texts = [request.prompt_ids[-32:] + plain[request.id].token_ids for request in requests[: 4 if count > 16 else 1]]
    bound = rounding_bound(engine.target, texts, [(1, 1), (1, 4), (rows, 4)])
    found = [d for r in requests if (d := first_divergence(plain[r.id], speculative[r.id]))]
    with capsys.disabled():
        gaps = ", ".join(f"{divergence.gap:.4f}" for divergence in found) or "-"
        print(f"\n{format}, batch {rows}: {len(found)} of {count} diverge, rounding bound {bound:.4f}, gaps {gaps}")
    assert all(divergence.near_tie(bound) for divergence in found)
