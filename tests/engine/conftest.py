"""A tiny float32 target, heads of every kind, its tokenizer, mixed requests and a server."""

import atexit
import contextlib
import functools
import json
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import torch
import yaml

from tests.command_line import wait_for
from tests.tiny import make_head, make_target
from trtspec.checkpoint.tokenizer import KimiTokenizer
from trtspec.engine.engine import Engine
from trtspec.engine.request import GenerationRequest
from trtspec.engine.sequence import Output
from trtspec.models.eagle3 import Eagle3Head
from trtspec.models.head_weights import load_head
from trtspec.models.k2 import KimiModel
from trtspec.models.weights import load_target

Kind = tuple[str, str, int | None]  # attention, eagle version, draft vocabulary
HeadOf = Callable[[Kind], Eagle3Head]
HEAD_KINDS = [
    pytest.param((attention, eagle, vocab), id=f"{attention}-eagle{eagle}-vocab{vocab or 'full'}")
    for attention in ("mha", "mla")
    for eagle in ("3", "3.1")
    for vocab in (None, 100)
]


@pytest.fixture(scope="session")
def target_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_target(tmp_path_factory.mktemp("target"), shards=1)


@pytest.fixture(scope="session")
def tokenizer(target_dir: Path) -> KimiTokenizer:
    return KimiTokenizer(target_dir)


@pytest.fixture(scope="session")
def target(target_dir: Path) -> KimiModel:
    torch.set_num_threads(1)
    return load_target(target_dir, dtype=torch.float32)


@pytest.fixture(scope="session")
def head_of(
    tmp_path_factory: pytest.TempPathFactory, target_dir: Path, target: KimiModel
) -> HeadOf:
    """Loads a random head of a kind."""
    heads: dict[Kind, Eagle3Head] = {}

    def head(kind: Kind) -> Eagle3Head:
        if kind not in heads:
            attention, eagle, vocab = kind
            directory = tmp_path_factory.mktemp("head")
            made = make_head(
                directory, target_dir, attention=attention, eagle=eagle, draft_vocab=vocab
            )
            heads[kind] = load_head(made, target, dtype=torch.float32)
        return heads[kind]

    return head


@pytest.fixture(scope="session")
def requests() -> list[GenerationRequest]:
    """20 greedy requests, prompts of 3 to 60 tokens, 1 to 24 new ones.

    Rows start and end at different times.
    """
    random = torch.Generator().manual_seed(7)

    def integer(low: int, high: int) -> int:
        return int(torch.randint(low, high, (1,), generator=random))

    return [
        GenerationRequest(
            id=str(number),
            prompt_ids=torch.randint(0, 256, (integer(3, 60),), generator=random).tolist(),
            max_tokens=integer(1, 25),
            ignore_eos=number % 2 == 0,
        )
        for number in range(20)
    ]


@torch.inference_mode()
def greedy_by_definition(target: KimiModel, request: GenerationRequest) -> list[int]:
    """Greedy tokens by one forward of the whole text for each: no cache, no batch, no engine."""
    tokens = list(request.prompt_ids)
    produced: list[int] = []
    ends = set() if request.ignore_eos else set(target.spec.eos_token_ids)
    while len(produced) < request.max_tokens:
        token = int(target(torch.tensor([tokens]), last_only=True).logits[0, -1].argmax())
        tokens.append(token)
        produced.append(token)
        if token in ends:
            break
    return produced


@pytest.fixture(scope="session")
def expected(target: KimiModel, requests: list[GenerationRequest]) -> dict[str, list[int]]:
    return {request.id: greedy_by_definition(target, request) for request in requests}


def token_ids(completions: dict[str, Output]) -> dict[str, list[int]]:
    return {name: completion.token_ids for name, completion in completions.items()}


def drive(engine: Engine, before: Callable[[], None] = lambda: None) -> dict[str, Output]:
    """Answers to what was submitted, whole or not; `before` is called before each step."""
    done: dict[str, Output] = {}
    while engine.has_work:
        before()
        for output in engine.step():
            done.setdefault(output.id, Output(output.id)).add(output)
    return done


BODIES = yaml.safe_load(Path(__file__).with_name("bodies.yaml").read_text())
SERVER = [sys.executable, str(Path(__file__).with_name("serve_tiny.py"))]


@dataclass
class Running:
    url: str
    process: subprocess.Popen[str]
    log: list[str] = field(default_factory=list)


def launch(target: Path, head: str, *options: str) -> Running:
    """Starts a server on a free port and waits for the line that says it is ready.

    Its other lines are in `log`.
    """
    command = [*SERVER, str(target), head, "0", *options]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    atexit.register(process.kill)  # where a test fails before it ends the server
    assert process.stderr is not None
    for line in process.stderr:
        if line.startswith("trtspec: serving tiny-kimi on "):
            running = Running(line.split(" on ")[1].split()[0], process)
            threading.Thread(target=running.log.extend, args=(process.stderr,), daemon=True).start()
            return running
    raise AssertionError(f"the server ended with status {process.wait()}")


def end(running: Running, status: int = 0) -> None:
    """The process ends by itself with this status, without a traceback."""
    assert running.process.wait(300) == status
    assert "Traceback" not in "".join(running.log), "".join(running.log)


@contextlib.contextmanager
def streamed(server: Running, **body: object) -> Iterator[Iterator[str]]:
    """The lines of a completion that is streamed, but for empty ones."""
    body = {"prompt": "x", "stream": True, **body}
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=300) as stream:
        yield filter(None, stream.iter_lines())


def error_of(line: str) -> dict[str, Any]:
    """The error of a stream's last line."""
    return json.loads(line.removeprefix("data: "))["error"]


def choice_of(answer: Any) -> Any:
    """The first choice of an answer, or of a chunk of a stream."""
    return answer.choices[0]


@contextlib.contextmanager
def served(target: Path, head: str, *options: str) -> Iterator[Running]:
    """A server for as long as the block runs; it ends in peace."""
    running = launch(target, head, *options)
    try:
        yield running
    finally:
        running.process.terminate()
        end(running)


def wait_until_idle(server: Running) -> None:
    def idle() -> bool:
        text = httpx.get(f"{server.url}/prometheus/metrics").text
        return "trtspec_requests_running 0.0" in text and "trtspec_requests_waiting 0.0" in text

    wait_for(idle)


@pytest.fixture(scope="session")
def tiny_server(tmp_path_factory: pytest.TempPathFactory, target_dir: Path) -> Iterator[Running]:
    head = make_head(tmp_path_factory.mktemp("head"), target_dir, attention="mla")
    with served(target_dir, str(head), "max_batch_size=4", "max_seq_len=1024") as running:
        yield running


@pytest.fixture
def server(tiny_server: Running) -> Running:
    """What `client` asks; a module may have its own."""
    return tiny_server


Ask = Callable[..., Any]


@pytest.fixture
def complete(client: openai.OpenAI) -> Ask:
    """A greedy completion, unless it is asked for another."""
    return functools.partial(client.completions.create, model="tiny-kimi", temperature=0)


@pytest.fixture
def chat(client: openai.OpenAI) -> Ask:
    """An answer to "hello"."""
    hello = [{"role": "user", "content": "hello"}]
    return functools.partial(client.chat.completions.create, model="tiny-kimi", messages=hello)


@pytest.fixture
def client(server: Running) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=300)
