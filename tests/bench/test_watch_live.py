"""`trtspec watch` on a real server: kimi-nano with its head, and then with the head's drafts damaged."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.bench.conftest import free_port
from tests.command_line import trtspec
from trtspec import data_files
from trtspec.cli.demo_process import Chain

BATCH = ("--batch", "0.5", "--min-steps", "150", "--json", "--once")


def damaged(head: Path, to: Path) -> Path:
    """The head with the captured states in another order, as layer ids that are exchanged give it."""
    import torch
    from safetensors.torch import load_file, save_file

    shutil.copytree(head, to)
    tensors = load_file(to / "model.safetensors")
    tensors["fc.weight"] = torch.cat(tuple(reversed(tensors["fc.weight"].chunk(3, dim=1))), dim=1).contiguous()
    save_file(tensors, to / "model.safetensors", {"format": "pt"})
    return to


@pytest.mark.slow
def test_a_damaged_head_on_a_live_server_is_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target, head = data_files.kimi_nano_dir(), data_files.kimi_nano_dir().with_name("kimi-nano-eagle3")
    port, state, results = free_port(), tmp_path / "state.json", tmp_path / "bench"
    (tmp_path / "logs").mkdir()
    chain = Chain(tmp_path, 1, quiet=True)
    prompts = [json.loads(line) for line in (target / "prompts_heldout.jsonl").read_text().splitlines()]
    chosen = sorted({prompt["category"] for prompt in prompts})[:2]
    questions = tmp_path / "questions.jsonl"
    questions.write_text("".join(json.dumps(prompt) + "\n" for prompt in prompts if prompt["category"] in chosen))
    load = ("--dataset", questions, "--samples", 24, "--concurrency", 8, "--max-tokens", 64)

    def look(url: str, *words: object) -> dict[str, Any]:
        done = trtspec("watch", url, "--state", state, "--baseline", results, *BATCH, *words)
        assert done.status in (0, 3), done.stderr
        return json.loads(done.stdout)

    def serve(which: Path) -> Any:
        words = [str(target), "--backend", "reference", "--head", str(which), "--draft-len", "3", "--dtype", "float32"]
        return chain.server(which.name, words, port)

    with serve(head) as url:
        assert trtspec("bench", url, *load, "-o", results).status in (0, 3)
        look(url)
        for _ in range(2):
            trtspec("bench", url, *load)
            healthy = look(url)
            assert healthy["ok"], healthy
    with serve(damaged(head, tmp_path / "damaged")) as url:
        found, damaged_looks = healthy, 0
        while found["ok"] and damaged_looks < 8:
            trtspec("bench", url, *load)
            found, damaged_looks = look(url), damaged_looks + 1
    stated = healthy["series"]["baseline"]["found_within_batches"]
    with capsys.disabled():
        print(
            f"\naccepted per step {healthy['last_batch']['acceptance']:.3f} with the head, "
            f"{found['last_batch']['acceptance']:.3f} damaged; lowest category of the baseline "
            f"{healthy['series']['baseline']['normal']:.3f}; found after {damaged_looks} batches (a fall by 15 %: "
            f"within {stated}), {found['last_batch']['steps']:.0f} steps in the last; restarts {found['restarts']}"
        )
    assert [problem["code"] for problem in found["problems"]] == ["TS-WATCH-BASELINE"]
    assert found["restarts"] == 1 and damaged_looks <= max(3, stated)
