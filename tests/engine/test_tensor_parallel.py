"""Several ranks against one: the same tokens from a real server, and what happens when a request or a rank fails."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import httpx
import openai
import psutil
import pytest
import torch
from torch import Tensor

from tests.engine.test_server import Running, launch
from tests.tiny import make_head
from trtspec import data_files
from trtspec.checkpoint.tokenizer import KimiTokenizer
from trtspec.engine.engine import Engine, EngineOptions
from trtspec.engine.parallel import ParallelEngine, Ranks, follow
from trtspec.engine.request import GenerationRequest, RequestRefused, Wishes
from trtspec.engine.sequence import Completion, Output, Sequence
from trtspec.engine.steering import Grammars
from trtspec.models.head_weights import load_head
from trtspec.models.sharding import WHOLE, Sharding
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


class Failing(ParallelEngine):
    """Requests called "RANK fails at COUNT" raise in that rank alone, once they have so many tokens."""

    def _annotate(self, output: Output, sequence: Sequence, logits: Tensor) -> None:
        rank, _, count = sequence.id.partition(" fails at ")
        if count and int(rank) == self.target.sharding.rank and len(sequence.token_ids) >= int(count):
            raise RuntimeError("half a character that is none")
        super()._annotate(output, sequence, logits)


OPTIONS = EngineOptions("prompt-lookup", 3, 4, 128, prefix_reuse="warm", block_tokens=8)


def build_failing(sharding: Sharding, directory: Path) -> Failing:
    torch.set_num_threads(1)
    target = load_target(directory, dtype=torch.float32, sharding=sharding)
    return Failing(target, None, OPTIONS, KimiTokenizer(directory))


def completed(engine: Engine, requests: list[GenerationRequest]) -> dict[str, Completion]:
    """All of them together; the ones called "cancelled" are, as soon as they have 3 tokens."""
    made = {request.id: Completion(request.id) for request in requests}
    for request in requests:
        engine.submit(request)
    while engine.has_work:
        for output in engine.step():
            made[output.id].add(output)
            if output.id == "cancelled" and len(made[output.id].token_ids) >= 3:
                engine.cancel(output.id)
    return made


def wanted(tokenizer: KimiTokenizer) -> list[GenerationRequest]:
    """Sampled and greedy ones with a common beginning, one with a JSON schema, one that is cancelled."""
    schema = '{"type": "object", "properties": {"n": {"type": "integer", "maximum": 9}}, "required": ["n"]}'
    common = list(range(30, 70))
    texts = [
        GenerationRequest(f"text {n}", [*common, n, n + 1, n], 16, float(n % 3), seed=n, ignore_eos=True)
        for n in range(6)
    ]
    grammar = Grammars(tokenizer, tokenizer.eos_ids).matcher("json", schema)
    guided = GenerationRequest("guided", [*common, 7], 24, 1.0, seed=3, wishes=Wishes(grammar=grammar))
    return [*texts[:3], guided, GenerationRequest("cancelled", common[:9], 60, ignore_eos=True), *texts[3:]]


@pytest.mark.slow
def test_what_fails_in_one_rank_leaves_all_of_them(target_dir: Path, tokenizer: KimiTokenizer) -> None:
    """At its first token and later, in rank 0 and in another, refused on the way, cancelled: the others' tokens are
    those of one process, and the ranks still serve."""
    ranks = Ranks(2, "cpu", follow, build_failing, target_dir)
    lost: list[str] = []
    ranks.on_loss = lambda: lost.append(str(ranks.lost))
    try:
        engine = build_failing(ranks.sharding, target_dir)
        engine.ranks = ranks
        alone = Engine(load_target(target_dir, dtype=torch.float32, sharding=WHOLE), None, OPTIONS, tokenizer)
        expected = completed(alone, wanted(tokenizer))
        everything = tuple((token,) for token in range(tokenizer.vocab_size))
        form = Grammars(tokenizer, tokenizer.eos_ids).matcher("regex", "ab")
        bad = {name: GenerationRequest(name, [5, 6, 7], 12, ignore_eos=True) for name in FAILURES}
        bad["dead end"] = replace(bad["dead end"], wishes=Wishes(bad_words=everything), ignore_eos=False)
        b = tuple(tokenizer.encode("b"))
        bad["dead end later"] = replace(bad["dead end later"], wishes=Wishes(grammar=form, bad_words=(b,)))
        mixed = [request for pair in zip(wanted(tokenizer), bad.values(), strict=False) for request in pair]
        mixed += wanted(tokenizer)[len(bad) :]
        made = completed(engine, mixed)
        for name in FAILURES:
            assert made[name].finish_reason == "error", name
            assert isinstance(made[name].error, RequestRefused) == name.startswith("dead"), made[name].error
        again = completed(engine, wanted(tokenizer))
        for name, completion in expected.items():
            for found in (made[name], again[name]):
                assert (found.token_ids, found.text) == (completion.token_ids, completion.text), name
                assert found.finish_reason == completion.finish_reason, name
        assert expected["guided"].text.startswith('{"n":')
        assert sum(completion.cached_tokens for completion in again.values()) > 0
        assert not lost
    finally:
        ranks.close()


FAILURES = ("0 fails at 1", "1 fails at 1", "0 fails at 4", "1 fails at 4", "dead end", "dead end later")


@pytest.mark.slow
def test_a_server_of_two_ranks_answers_as_one_process(
    target_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Clients of all kinds at once: sampled, with a schema, without a way on, gone; then it still serves."""
    head = str(make_head(tmp_path_factory.mktemp("head"), target_dir, attention="mha"))
    sizes = ("max_batch_size=4", "max_seq_len=256")
    alone, ranks = launch(target_dir, head, *sizes), launch(target_dir, head, *sizes, "tp_size=2")
    try:
        for server in (alone, ranks):
            assert refused(server) == 400
        bodies = [{"prompt": f"{'once upon a time ' * 6}{n}", "seed": n, "max_tokens": 24} for n in range(8)]
        for body in bodies[::3]:
            body["guided_json"] = {"type": "object", "properties": {"n": {"enum": [1, 2, 3]}}, "required": ["n"]}

        def text(server: Running, body: dict) -> str:
            answer = httpx.post(f"{server.url}/v1/completions", json={"temperature": 1, **body}, timeout=120)
            assert answer.status_code == 200, answer.text
            return answer.json()["choices"][0]["text"]

        def leave(server: Running) -> None:
            body = {"prompt": "x", "stream": True, "max_tokens": 200, "ignore_eos": True}
            with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=120) as stream:
                next(stream.iter_lines())

        found = []
        for server in (alone, ranks):
            with ThreadPoolExecutor(12) as pool:
                others = [pool.submit(what, server) for what in (refused, leave, refused, leave)]
                texts = list(pool.map(lambda body, server=server: text(server, body), bodies))
                assert [other.result() for other in others] == [400, None, 400, None]
            found.append((texts, [text(server, body) for body in bodies]))
        assert found[0] == found[1]
        assert found[0][0] == found[0][1]
        assert all(answer.startswith('{"n":') for answer in found[1][0][::3])
    finally:
        statuses = []
        for server in (alone, ranks):
            server.process.terminate()
            statuses.append(server.process.wait(120))
    assert statuses == [0, 0], "".join(ranks.log)


def refused(server: Running) -> int:
    """Status of a request that has no way on after its first letter."""
    body = {"prompt": "x", "guided_regex": "ab", "bad": "b", "temperature": 0}
    return httpx.post(f"{server.url}/v1/completions", json=body, timeout=120).status_code
