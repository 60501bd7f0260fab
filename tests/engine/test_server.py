"""The unmodified openai client against the reference server in a process of its own.

The server's manners are tested too.
"""

import json
import re
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import openai
import pytest
import torch

from tests.cases import slow
from tests.command_line import ran
from tests.engine.conftest import (
    BODIES,
    SERVER,
    Ask,
    Running,
    choice_of,
    end,
    error_of,
    launch,
    streamed,
    wait_until_idle,
)
from trtspec.checkpoint.headers import Checkpoint
from trtspec.checkpoint.target_problems import target_spec
from trtspec.checkpoint.tokenizer import KimiTokenizer
from trtspec.engine.server import ServerOptions, build_engine
from trtspec.errors import MissingDependency
from trtspec.models.footprint import MemoryLoad, require_fitting


def test_completion(complete: Ask) -> None:
    answer = complete(prompt="once upon", max_tokens=12)
    choice = choice_of(answer)
    assert choice.finish_reason in ("length", "stop")
    assert answer.usage is not None and answer.usage.prompt_tokens == 9
    assert answer.usage.prompt_tokens_details.cached_tokens == 0
    extra = choice.model_extra or {}
    speculation = extra["spec_decode"]
    assert speculation["steps"] == sum(speculation["histogram"]) > 0
    assert extra["avg_decoded_tokens_per_iter"] == answer.usage.completion_tokens / (
        1 + speculation["steps"]
    )
    assert choice_of(complete(prompt="once upon", max_tokens=12)).text == choice.text


def test_token_ids_of_prompt_and_answer_come_whole_and_streamed(chat: Ask) -> None:
    asked = {"max_tokens": 12, "temperature": 0, "extra_body": {"return_token_ids": True}}
    whole = chat(**asked)
    told = choice_of(whole).model_extra
    assert len(told["prompt_token_ids"]) == whole.usage.prompt_tokens
    assert len(told["token_ids"]) == whole.usage.completion_tokens
    ids, prompt = [], []
    for chunk in chat(**asked, stream=True):
        for choice in chunk.choices:
            ids += choice.model_extra.get("token_ids", [])
            prompt += choice.model_extra.get("prompt_token_ids", [])
    assert (prompt, ids) == (told["prompt_token_ids"], told["token_ids"])


def test_stream_equals_whole(chat: Ask) -> None:
    common = {"max_tokens": 40, "seed": 3, "temperature": 0.7}
    whole = chat(**common)
    chunks = list(chat(**common, stream=True, stream_options={"include_usage": True}))
    text = "".join(choice_of(chunk).delta.content or "" for chunk in chunks if chunk.choices)
    assert text == choice_of(whole).message.content
    assert choice_of(chunks[0]).delta.role == "assistant"
    assert chunks[-1].choices == [] and chunks[-1].usage == whole.usage
    assert choice_of(chunks[-2]).finish_reason == choice_of(whole).finish_reason
    assert choice_of(chunks[-2]).model_extra["spec_decode"]["steps"] > 0
    assert all(chunk.usage is None for chunk in chunks[:-1])


def test_stop_string(complete: Ask) -> None:
    free = choice_of(complete(prompt="abc", max_tokens=40)).text
    word = next(free[i : i + 2] for i in range(5, len(free) - 2) if "\ufffd" not in free[i : i + 2])
    for stream in (False, True):
        answer = complete(prompt="abc", max_tokens=40, stop=[word], stream=stream)
        parts = list(answer) if stream else [answer]
        assert "".join(choice_of(part).text for part in parts) == free[: free.index(word)]
        assert choice_of(parts[-1]).finish_reason == "stop"


def test_logprobs(chat: Ask, complete: Ask) -> None:
    answer = chat(max_tokens=6, temperature=0, logprobs=True, top_logprobs=3)
    entries = choice_of(answer).logprobs.content
    assert len(entries) == answer.usage.completion_tokens
    for entry in entries:
        assert len(entry.top_logprobs) == 3
        assert entry.logprob == entry.top_logprobs[0].logprob  # greedy takes the best
    legacy = complete(prompt="x", max_tokens=5, logprobs=2)
    assert len(choice_of(legacy).logprobs.tokens) == 5


def test_several_choices(complete: Ask) -> None:
    asked = {"prompt": ["ab", "cd"], "n": 2, "max_tokens": 8, "seed": 1, "temperature": 1}
    answer = complete(**asked)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert len({choice.text for choice in answer.choices}) > 1
    texts = ["", "", "", ""]
    for chunk in complete(**asked, stream=True):
        texts[choice_of(chunk).index] += choice_of(chunk).text
    assert texts == [choice.text for choice in answer.choices]


@pytest.mark.parametrize(
    ("param", "body"), [*BODIES["completions_refused"], ("prompt", {"prompt": "x" * 1025})]
)
def test_bad_requests_name_the_field(server: Running, param: str, body: dict) -> None:
    answer = httpx.post(f"{server.url}/v1/completions", json=body)
    error = answer.json()["error"]
    assert answer.status_code == 400
    assert (error["type"], error["param"]) == ("invalid_request_error", param)
    assert error["message"]


def test_errors_through_the_client(chat: Ask, server: Running) -> None:
    with pytest.raises(openai.BadRequestError):
        chat(top_p=7)
    with pytest.raises(openai.NotFoundError) as error:
        chat(model="gpt-9")
    assert error.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError, match="image_url|text"):
        image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,"}}
        chat(messages=[{"role": "user", "content": [image]}])
    broken = httpx.post(f"{server.url}/v1/completions", content=b"{").json()
    assert (
        "not JSON in UTF-8" in broken["error"]["message"]
        and "EOF while parsing" in broken["error"]["message"]
    )
    assert httpx.get(f"{server.url}/nothing").json()["error"]["type"] == "invalid_request_error"


def test_status_endpoints(server: Running, client: openai.OpenAI, complete: Ask) -> None:
    assert [model.id for model in client.models.list()] == ["tiny-kimi"]
    assert client.models.retrieve("tiny-kimi").id == "tiny-kimi"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("org/other")
    assert httpx.get(f"{server.url}/health").status_code == 200
    assert httpx.get(f"{server.url}/version").json()["version"]
    complete(prompt="count", max_tokens=9, extra_body={"ignore_eos": True})
    text = httpx.get(f"{server.url}/prometheus/metrics").text
    assert 'trtspec_spec_decode_accepted_tokens_per_position_total{position="3"}' in text


@pytest.mark.clock
def test_a_client_that_leaves_frees_its_slot(server: Running) -> None:
    body = {"prompt": "long", "max_tokens": 1000, "ignore_eos": True}
    with streamed(server, **body) as lines:
        next(lines)
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{server.url}/v1/completions", json=body, timeout=0.2)
    wait_until_idle(server)


def test_concurrent_requests_share_the_batch(complete: Ask) -> None:
    def ask(number: int) -> str:
        return choice_of(complete(prompt=f"p{number}", max_tokens=20)).text

    alone = [ask(number) for number in range(8)]
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(ask, range(8))) == alone


def test_prompt_tokens_are_those_of_the_template(chat: Ask, tokenizer: KimiTokenizer) -> None:
    parameters = {"type": "object", "properties": {}}
    tools = [{"type": "function", "function": {"name": "get", "parameters": parameters}}]
    hello = [{"role": "user", "content": "hello"}]
    for sent in (None, tools):
        answer = chat(max_tokens=1, extra_body={"tools": sent} if sent else None)
        assert answer.usage.prompt_tokens == len(tokenizer.encode_chat(hello, sent)[1])
    thinking = chat(max_tokens=8, extra_body={"chat_template_kwargs": {"thinking": True}})
    assert choice_of(thinking).message.model_extra["reasoning_content"]


@pytest.mark.parametrize(
    ("number", "status"),
    [(signal.SIGTERM, 0), slow(signal.SIGINT, 130)],
)
def test_signals_end_it_after_finishing(number: int, status: int, target_dir: Path) -> None:
    running = launch(target_dir, "-", "max_batch_size=1", "max_seq_len=128")
    with streamed(running, prompt="finish", max_tokens=100, ignore_eos=True) as lines:
        next(lines)
        running.process.send_signal(number)
        rest = list(lines)
    assert rest[-1] == "data: [DONE]"
    assert json.loads(rest[-2][6:])["choices"][0]["finish_reason"] == "length"
    assert running.process.wait(300) == status


@pytest.mark.clock
def test_a_stop_does_not_wait_for_ever(target_dir: Path) -> None:
    running = launch(target_dir, "-", "max_batch_size=4", "max_seq_len=4096", "grace=1")
    with streamed(running, max_tokens=4000, ignore_eos=True, n=4) as lines:
        next(lines)
        running.process.send_signal(signal.SIGTERM)
        last = list(lines)[-1]
    assert "the server was stopped" in error_of(last)["message"]
    end(running)


def test_what_does_not_fit_is_refused_before_it_is_loaded(target_dir: Path) -> None:
    """The sizes that the message proposes are accepted."""
    options = ServerOptions(dtype="float32", max_batch_size=10**7, max_seq_len=256)
    with pytest.raises(MissingDependency, match="requests of 256 tokens") as caught:
        build_engine(target_dir, None, options)
    found = re.search(r"`max_batch_size` (\d+)", caught.value.remedy or "")
    assert found is not None
    load = MemoryLoad(
        "cpu", torch.float32, int(found[1]) * 9 // 10, 256, options.draft_len, options.prefix_bytes
    )
    require_fitting(target_dir, target_spec(Checkpoint.open(target_dir)), None, load)
    if torch.cuda.is_available():
        return
    with pytest.raises(MissingDependency, match="sees no GPU"):
        build_engine(target_dir, None, ServerOptions(device="cuda"))


def test_a_taken_port_is_named(server: Running, target_dir: Path) -> None:
    port = server.url.rsplit(":", 1)[1]
    done = ran(*SERVER, target_dir, "-", port, timeout=300)
    assert done.status != 0
    assert f"port {port} on 127.0.0.1 cannot be taken" in done.stderr
