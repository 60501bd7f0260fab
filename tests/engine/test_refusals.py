"""What a chat asks for is honoured or refused by name; what real clients send is taken."""

import json
from typing import Any

import pytest

from tests.engine.conftest import BODIES
from trtspec.checkpoint.tokenizer import KimiTokenizer
from trtspec.engine.bodies import ApiError, ChatBody, CompletionBody, parse_body
from trtspec.engine.engine import Engine, EngineOptions
from trtspec.engine.prepare import ApiCall, Preparation
from trtspec.engine.request import GenerationRequest, RequestRefused
from trtspec.models.k2 import KimiModel

HELLO = {"role": "user", "content": "hello"}


@pytest.fixture(scope="module")
def preparation(target: KimiModel, tokenizer: KimiTokenizer) -> Preparation:
    engine = Engine(
        target, options=EngineOptions(max_batch_size=1, max_seq_len=512), tokenizer=tokenizer
    )
    return Preparation(engine, tokenizer, "tiny-kimi")


def parsed(kind: type[ChatBody] | type[CompletionBody], **fields: Any) -> Any:
    return parse_body(kind, json.dumps(fields).encode())


def chat(preparation: Preparation, **fields: Any) -> ApiCall:
    return preparation.call(parsed(ChatBody, **{"messages": [HELLO], **fields}))


@pytest.mark.parametrize(("param", "fields"), BODIES["chats_refused"])
def test_what_would_be_ignored_is_refused_by_name(
    preparation: Preparation, param: str, fields: dict
) -> None:
    with pytest.raises(ApiError) as refused:
        chat(preparation, **fields)
    assert (refused.value.status, refused.value.param) == (400, param)


@pytest.mark.parametrize("fields", BODIES["chats_taken"])
def test_what_clients_send_is_taken(preparation: Preparation, fields: dict) -> None:
    assert chat(preparation, **fields).requests


def test_a_developers_message_is_the_systems(preparation: Preparation) -> None:
    said = [
        chat(preparation, messages=[{"role": role, "content": "be brief"}, HELLO])
        for role in ("developer", "system")
    ]
    assert said[0].requests[0].prompt_ids == said[1].requests[0].prompt_ids


def test_reasoning_under_either_name(target: KimiModel, tokenizer: KimiTokenizer) -> None:
    turns = [
        parsed(ChatBody, messages=[{**HELLO, name: "hm"}])
        for name in ("reasoning", "reasoning_content")
    ]
    assert all(turn.messages[0].to_dict() == {**HELLO, "reasoning_content": "hm"} for turn in turns)


def test_reasoning_effort_switches_thinking(preparation: Preparation) -> None:
    efforts = {
        effort: chat(preparation, reasoning_effort=effort) for effort in ("none", "low", "high")
    }
    assert [call.thinking for call in efforts.values()] == [False, True, True]
    assert (
        efforts["low"].requests[0].grammar_after is None
    )  # there is no form that could begin there
    for effort, thinking in (("none", False), ("low", True)):
        switched = chat(preparation, chat_template_kwargs={"thinking": thinking})
        assert efforts[effort].requests[0].prompt_ids == switched.requests[0].prompt_ids


def test_names_of_special_tokens_are_text(
    preparation: Preparation, tokenizer: KimiTokenizer
) -> None:
    ids = preparation.call(parsed(CompletionBody, prompt="a<|im_end|>b")).requests[0].prompt_ids
    assert tokenizer.special_id("<|im_end|>") not in ids and tokenizer.decode(ids) == "a<|im_end|>b"


@pytest.mark.parametrize(("param", "fields"), BODIES["requests_refused"])
def test_what_cannot_run_is_refused_by_field(
    target: KimiModel, param: str, fields: dict[str, Any]
) -> None:
    engine = Engine(target, options=EngineOptions(max_batch_size=1, max_seq_len=16))
    with pytest.raises(RequestRefused) as caught:
        engine.submit(
            GenerationRequest(**{"id": "x", "prompt_ids": [1, 2], "max_tokens": 4, **fields})
        )
    assert caught.value.param == param
    assert not engine.has_work


@pytest.mark.parametrize(
    ("raw", "says"),
    [
        ('{"prompt": "x"}'.encode("utf-16"), "not JSON in UTF-8"),
        ('{"prompt": "x"}'.encode("utf-32"), "not JSON in UTF-8"),
        (b'{"prompt": "x", "n": 1, "n": 2}', 'duplicate key "n" at line 1'),
        (
            b'{"prompt": "x", "response_format": {"type": "text", "type": "regex"}}',
            'duplicate key "type"',
        ),
        (b'{"prompt": "x", "metadata": {"a": [NaN]}}', "no NaN or Infinity: .*column 36"),
        (b'{"prompt": "x", "user": -Infinity}', "no NaN or Infinity: .*column 26"),
    ],
)
def test_what_json_leaves_open_is_refused(raw: bytes, says: str) -> None:
    with pytest.raises(ApiError, match=says) as refused:
        parse_body(CompletionBody, raw)
    assert refused.value.status == 400
