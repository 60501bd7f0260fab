"""What a chat asks for is honoured or refused by name; what real clients send is taken."""

from __future__ import annotations

from typing import Any

import pytest

from trtspec.checkpoint.tokenizer import KimiTokenizer
from trtspec.engine.engine import Engine, EngineOptions
from trtspec.engine.prepare import ApiCall, Preparation
from trtspec.engine.protocol import ApiError, ChatBody, CompletionBody, parse_body
from trtspec.engine.request import GenerationRequest, RequestRefused, Wishes
from trtspec.models.kimi import KimiModel

HELLO = {"role": "user", "content": "hello"}
RETURN = {"role": "tool", "tool_call_id": "functions.f:0", "content": "x"}
CALL = {"id": "functions.f:0", "type": "function", "function": {"name": "f", "arguments": "{}"}}


@pytest.fixture(scope="module")
def preparation(target: KimiModel, tokenizer: KimiTokenizer) -> Preparation:
    engine = Engine(target, options=EngineOptions(max_batch_size=1, max_seq_len=512), tokenizer=tokenizer)
    return Preparation(engine, tokenizer, "tiny-kimi")


def chat(preparation: Preparation, **fields: Any) -> ApiCall:
    return preparation.chat(parse_body(ChatBody, {"messages": [HELLO], **fields}))


def tool(**fields: Any) -> dict:
    return {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}, **fields}}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"top_logprobs": 5}, "top_logprobs"),
        ({"response_format": {"type": "json_object", "json_schema": {"schema": {}}}}, "response_format"),
        ({"response_format": {"type": "text", "regex": "a"}}, "response_format"),
        ({"response_format": {"type": "regex"}}, "response_format"),
        ({"tools": [{**tool(), "cache": 1}]}, "tools[0].cache"),
        ({"tools": [tool(strikt=True)]}, "tools[0].function.strikt"),
        ({"tools": [tool(strict="yes")]}, "tools[0].function.strict"),
        ({"tools": [tool(strict=True)], "response_format": {"type": "json_object"}}, "response_format"),
        ({"tools": [tool(strict=True, parameters={"type": "no"})]}, "tools"),
        ({"tools": [tool()], "tool_choice": "required", "ignore_eos": True}, "ignore_eos"),
        ({"tools": [tool(strict=True)], "ignore_eos": True}, "ignore_eos"),
        ({"max_tokens": 3, "max_completion_tokens": 4}, "max_tokens"),
        ({"stream": True, "stream_options": {"include_obfuscation": True}}, "stream_options"),
        ({"bad": "a", "bad_words": ["b"]}, "bad_words"),
        ({"messages": [HELLO, {"role": "assistant", "content": "{", "partial": True}]}, "messages[1].partial"),
        ({"messages": [HELLO, {"role": "assistant", "content": "{", "prefix": True}]}, "messages[1].prefix"),
        ({"messages": [{**HELLO, "nonsense": 1}]}, "messages[0].nonsense"),
        ({"messages": [HELLO, {"role": "assistant", "content": None, "refusal": "no"}]}, "messages[1].refusal"),
        ({"messages": [HELLO, {"role": "assistant", "audio": {"id": "a"}}]}, "messages[1].audio"),
        ({"messages": [HELLO, {"role": "assistant", "function_call": {"name": "f"}}]}, "messages[1].function_call"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "function", "content": "x", "name": "f"}]}, "messages[0].role"),
    ],
)
def test_what_would_be_ignored_is_refused_by_name(preparation: Preparation, fields: dict, param: str) -> None:
    with pytest.raises(ApiError) as refused:
        chat(preparation, **fields)
    assert (refused.value.status, refused.value.param) == (400, param)


SENT_BACK = {  # an answer as openai's client gives it, sent back with the next question
    "role": "assistant",
    "content": "hi",
    "refusal": None,
    "annotations": [],
    "audio": None,
    "function_call": None,
    "tool_calls": None,
    "reasoning_content": "hm",
    "name": None,
}


@pytest.mark.parametrize(
    "fields",
    [
        {"messages": [HELLO, SENT_BACK, HELLO]},
        {"messages": [{**HELLO, "name": "ann"}]},
        {"messages": [HELLO, {"role": "assistant", "tool_calls": [CALL]}, RETURN]},
        {"messages": [HELLO, {**RETURN, "name": "f"}]},
        {"messages": [HELLO, {"role": "assistant", "content": "x", "partial": False, "reasoning": "hm"}]},
        {"max_tokens": 4, "max_completion_tokens": 4, "ignore_eos": True},  # guidellm
        {"stream": True, "stream_options": {"include_usage": True, "include_obfuscation": False}},
        {"response_format": {"type": "text", "json_schema": None}, "logprobs": False, "top_logprobs": 0},
        {"tools": [tool(strict=True)], "tool_choice": {"type": "function", "function": {"name": "f"}}},  # langchain
        {"tools": [tool(strict=False, description="d")], "response_format": {"type": "json_object"}},
        {"tools": [tool(strict=True)], "tool_choice": "none", "ignore_eos": True},
    ],
)
def test_what_clients_send_is_taken(preparation: Preparation, fields: dict) -> None:
    assert chat(preparation, **fields).requests


def test_a_developers_message_is_the_systems(preparation: Preparation) -> None:
    said = [
        chat(preparation, messages=[{"role": role, "content": "be brief"}, HELLO]) for role in ("developer", "system")
    ]
    assert said[0].requests[0].prompt_ids == said[1].requests[0].prompt_ids


def test_reasoning_under_either_name(target: KimiModel, tokenizer: KimiTokenizer) -> None:
    turns = [parse_body(ChatBody, {"messages": [{**HELLO, name: "hm"}]}) for name in ("reasoning", "reasoning_content")]
    assert turns[0].messages == turns[1].messages == [{**HELLO, "reasoning_content": "hm"}]


def test_bad_words_under_either_name(preparation: Preparation) -> None:
    bans = [
        preparation.completion(parse_body(CompletionBody, {"prompt": "x", name: ["ab", "c"]})).requests[0].wishes
        for name in ("bad", "bad_words")
    ]
    assert bans[0] is not None and bans[0].bad_words and bans[0] == bans[1]


def test_names_of_special_tokens_are_tokens_where_they_are_allowed(
    preparation: Preparation, tokenizer: KimiTokenizer
) -> None:
    def ids(**fields: Any) -> list[int]:
        body = {"prompt": "a<|im_end|>b", **fields}
        return preparation.completion(parse_body(CompletionBody, body)).requests[0].prompt_ids

    end = tokenizer.special_id("<|im_end|>")
    assert ids(allow_special_tokens=True) == [*tokenizer.encode("a"), end, *tokenizer.encode("b")]
    assert end not in ids() and ids() == ids(allow_special_tokens=False)
    with pytest.raises(ApiError, match="allow_special_tokens"):
        chat(preparation, allow_special_tokens=True)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt_ids": []}, "prompt"),
        ({"prompt_ids": [0] * 64}, "prompt"),
        ({"prompt_ids": [-1]}, "prompt"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"temperature": float("nan")}, "temperature"),
        ({"temperature": -0.1}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_k": 2**63}, "top_k"),
        ({"seed": 2**64}, "seed"),
        ({"stop": ["x"]}, "stop"),
        ({"stop_token_ids": (10**6,)}, "stop_token_ids"),
        ({"wishes": Wishes(repetition_penalty=0.0)}, "repetition_penalty"),
        ({"wishes": Wishes(min_p=1.5)}, "min_p"),
        ({"wishes": Wishes(logit_bias={10**6: 1.0})}, "logit_bias"),
    ],
)
def test_what_cannot_run_is_refused_by_field(target: KimiModel, fields: dict[str, Any], param: str) -> None:
    engine = Engine(target, options=EngineOptions(max_batch_size=1, max_seq_len=64))
    with pytest.raises(RequestRefused) as caught:
        engine.submit(GenerationRequest(**{"id": "x", "prompt_ids": [1, 2], "max_tokens": 4, **fields}))
    assert caught.value.param == param
    assert not engine.has_work
