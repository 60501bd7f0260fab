"""Several ranks against one: the same tokens from a real server, and what happens when one of them ends."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import openai
import psutil
import pytest
import torch

from trtspec import data_files
from trtspec.checkpoint.tokenizer import KimiTokenizer
from trtspec.engine.engine import Engine, EngineOptions
from trtspec.engine.request import GenerationRequest
from trtspec.models.head_weights import load_head
from trtspec.models.weights import load_target

TARGET, HEAD = data_files.kimi_nano_dir(), data_files.DATA / "kimi-nano-eagle3"
PROMPTS = ["The capital of France", "def add(a, b):", "Once upon a time there was", "1, 2, 3, 4,"]
NEW_TOKENS = 24


class Server:
    """`trtspec serve --tp-size N` on a free port, and its other ranks."""

    def __init__(self, ranks: int) -> None:
        command = [sys.executable, "-m", "trtspec", "serve", str(TARGET), "--head", str(HEAD), "--backend", "reference"]
        command += ["--tp-size", str(ranks), "--dtype", "float32", "--port", "0", "--max-seq-len", "256"]
        environment = {**os.environ, "TRTSPEC_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[2])}
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)
        assert self.process.stderr is not None
        self.log: list[str] = []
        for line in self.process.stderr:
            self.log.append(line)
            if "serving" in line and "http://" in line:
                self.url = line.split(" on ")[1].split()[0]
                break
        else:
            raise AssertionError("".join(self.log))
        spawned = psutil.Process(self.process.pid).children()
        self.ranks = [child for child in spawned if "spawn_main" in " ".join(child.cmdline())]

    def texts(self) -> list[str]:
        client = openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=300)
        made = client.completions.create(
            model="kimi-nano", prompt=PROMPTS, max_tokens=NEW_TOKENS, temperature=0, extra_body={"ignore_eos": True}
        )
        return [choice.text for choice in made.choices]

    def end(self) -> tuple[int, str]:
        """Status and last words, when the server and every rank are gone."""
        assert self.process.stderr is not None
        status, rest = self.process.wait(120), self.process.stderr.read()
        _, alive = psutil.wait_procs(self.ranks, 60)
        assert not alive
        return status, rest


@pytest.fixture(scope="module")
def expected() -> list[str]:
    """One process, one request at a time."""
    torch.set_num_threads(1)
    target, tokenizer = load_target(TARGET, dtype=torch.float32), KimiTokenizer(TARGET)
    head = load_head(HEAD, target, dtype=torch.float32)
    engine = Engine(target, head, EngineOptions("eagle3", 3, 1, 256), tokenizer)
    requests = [GenerationRequest(text, tokenizer.encode(text), NEW_TOKENS, ignore_eos=True) for text in PROMPTS]
    return [engine.generate([request])[request.id].text for request in requests]


@pytest.fixture
def server(request: pytest.FixtureRequest) -> Iterator[Server]:
    running = Server(request.param)
    yield running
    if running.process.poll() is None:
        running.process.kill()
        running.process.wait()


@pytest.mark.parametrize("server", [2, pytest.param(4, marks=pytest.mark.slow)], indirect=True)
def test_ranks_equal_one_and_end_on_sigterm(server: Server, expected: list[str]) -> None:
    assert server.texts() == expected
    assert len(server.ranks) in (1, 3)
    server.process.terminate()
    assert server.end()[0] == 0


@pytest.mark.slow
@pytest.mark.parametrize("server", [2], indirect=True)
def test_a_rank_that_is_killed_ends_the_server(server: Server) -> None:
    server.ranks[0].kill()
    status, words = server.end()
    assert status == 1
    assert "rank 1 ended with status -9" in words
