"""Penalties, biases, bans, lengths and grammars against transformers' own processors.

All of it with and without drafts.
"""

import asyncio
import json
from typing import Any, Literal

import httpx
import openai
import pytest
import torch
from pydantic import BaseModel
from transformers import LogitsProcessorList, MinNewTokensLengthLogitsProcessor

from tests.engine.conftest import HeadOf, Running, choice_of
from tests.engine.test_sampled_engine import before_penalties
from trtspec.checkpoint.tokenizer import KimiTokenizer
from trtspec.engine import grammars
from trtspec.engine.bodies import Function, tool_call_grammar
from trtspec.engine.engine import Engine, EngineOptions
from trtspec.engine.grammars import Grammar, Grammars, GrammarsBusy
from trtspec.engine.request import GenerationRequest
from trtspec.models.eagle3 import Eagle3Head
from trtspec.models.k2 import KimiModel

PROMPT = [1, 2, 3, 1, 2, 3, 40, 41]
CONSTRAINTS: dict[str, dict[str, Any]] = {
    "frequency": {"frequency_penalty": 0.7},
    "presence": {"presence_penalty": 1.5},
    "repetition": {"repetition_penalty": 1.4},
    "bias": {"logit_bias": {7: 3.0, 9: -100.0}},
    "all": {
        "frequency_penalty": 0.3,
        "presence_penalty": 0.4,
        "repetition_penalty": 1.2,
        "min_tokens": 6,
        "logit_bias": {7: 1.0, 200: 2.0},
    },
}


@torch.inference_mode()
def by_definition(target: KimiModel, wish: dict[str, Any], count: int) -> list[int]:
    """Greedy tokens by forwards of the whole text.

    Transformers' processors and OpenAI's penalty formula decide each one.
    """
    constraints = GenerationRequest("", PROMPT, count, **wish)
    processors = LogitsProcessorList(before_penalties(constraints))
    if constraints.min_tokens:
        ends = list(target.spec.eos_token_ids)
        processors.append(
            MinNewTokensLengthLogitsProcessor(len(PROMPT), constraints.min_tokens, ends)
        )
    tokens = list(PROMPT)
    for _ in range(count):
        logits = target(torch.tensor([tokens]), last_only=True).logits[:, -1].float()
        scores = processors(torch.tensor([tokens]), logits)
        counts = torch.bincount(
            torch.tensor(tokens[len(PROMPT) :], dtype=torch.int64), minlength=scores.shape[-1]
        )
        scores = (
            scores
            - constraints.frequency_penalty * counts
            - constraints.presence_penalty * (counts > 0)
        )
        tokens.append(int(scores.argmax()))
        if tokens[-1] in target.spec.eos_token_ids:
            break
    return tokens[len(PROMPT) :]


def generate(
    target: KimiModel, head: Eagle3Head | None, constraints: list[dict[str, Any]], **fields: Any
) -> list[list[int]]:
    options = EngineOptions(max_batch_size=3, max_seq_len=96)
    requests = [
        GenerationRequest(str(n), PROMPT, 24, **wish, **fields)
        for n, wish in enumerate(constraints)
    ]
    done = Engine(target, head, options).generate(requests)
    return [done[str(n)].token_ids for n in range(len(constraints))]


def test_every_wish_is_what_transformers_does(target: KimiModel, head_of: HeadOf) -> None:
    free = by_definition(target, {}, 24)
    constraints = list(CONSTRAINTS.values())
    expected = [by_definition(target, wish, 24) for wish in constraints]
    assert sum(tokens != free for tokens in expected) >= 4
    assert generate(target, None, constraints) == expected
    for kind in (("mla", "3.1", None), ("mha", "3", 100)):
        assert generate(target, head_of(kind), constraints) == expected


SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"enum": ["ab", "cd"]},
        "n": {"type": "integer", "maximum": 99, "minimum": 0},
    },
    "required": ["name", "n"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_grammar_holds_with_and_without_drafts(
    temperature: float, target: KimiModel, tokenizer: KimiTokenizer, head_of: HeadOf
) -> None:
    grammars = Grammars(tokenizer, tokenizer.eos_ids)
    schema = json.dumps(SCHEMA)

    def constraints() -> list[dict[str, Any]]:
        return [
            {"grammar": Grammar(grammars.compile("json", schema))},
            {"grammar": Grammar(grammars.compile("regex", "[ab]{3,9}c"))},
            {"grammar": Grammar(grammars.compile("json", schema)), "frequency_penalty": 0.5},
        ]

    found = []
    for head in (None, head_of(("mla", "3.1", None)), head_of(("mha", "3", 100))):
        options = EngineOptions(max_batch_size=3, max_seq_len=128)
        engine = Engine(target, head, options, tokenizer)
        requests = [
            GenerationRequest(str(n), PROMPT, 80, **wish, temperature=temperature, seed=n)
            for n, wish in enumerate(constraints())
        ]
        texts = [engine.generate([request])[request.id] for request in requests]
        for answer in (texts[0], texts[2]):
            value = json.loads(answer.text)
            assert value["name"] in ("ab", "cd") and 0 <= value["n"] <= 99 and len(value) == 2
            assert answer.finish_reason == "stop"
        assert texts[1].text.strip("ab") == "c"
        found.append([answer.token_ids for answer in texts])
    if not temperature:
        assert found[0] == found[1] == found[2]


def test_a_grammar_that_cannot_be(tokenizer: KimiTokenizer) -> None:
    grammars = Grammars(tokenizer, tokenizer.eos_ids)
    for kind, text in (
        ("json", '{"type": "nothing"}'),
        ("json", "{"),
        ("regex", "("),
        ("lark", "start: nowhere"),
    ):
        with pytest.raises(ValueError):
            grammars.compile(kind, text)
    assert (
        grammars.compile("lark", tool_call_grammar([Function(name="get.it")], several=True))
        is not None
    )


async def in_turn(made: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = ("|".join(f"{name}{word:x}" for word in range(5000)) for name in "ab")
    used = await made.compiled("regex", first)
    monkeypatch.setattr(grammars, "LIVE_BYTES", used.size)
    with pytest.raises(GrammarsBusy):
        await made.compiled("regex", second)
    del used
    assert (await made.compiled("regex", second)).size > 1 << 20
    made.close()


def test_a_grammar_waits_for_room_among_those_in_use(
    tokenizer: KimiTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    asyncio.run(in_turn(Grammars(tokenizer, tokenizer.eos_ids), monkeypatch))


ASK = [{"role": "user", "content": "hello"}]
TOOLS = [
    {
        "type": "function",
        "function": {"name": name, "parameters": {**SCHEMA, "properties": SCHEMA["properties"]}},
    }
    for name in ("get_weather", "set_alarm")
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("thinking", [False, True])
def test_a_demanded_tool_is_called(
    client: openai.OpenAI, tokenizer: KimiTokenizer, stream: bool, thinking: bool
) -> None:
    named = {"type": "function", "function": {"name": "set_alarm"}}
    think_end = {
        str(tokenizer.special_tokens["</think>"]): 100
    }  # ends the reasoning of a random model at once
    for choice, names in (("required", {"get_weather", "set_alarm"}), (named, {"set_alarm"})):
        answer = client.chat.completions.create(
            model="tiny-kimi",
            messages=ASK,
            tools=TOOLS,
            tool_choice=choice,
            stream=stream,
            parallel_tool_calls=False,
            temperature=0,
            max_tokens=400,
            extra_body={"chat_template_kwargs": {"thinking": thinking}},
            logit_bias=think_end if thinking else {},
        )
        if stream:
            parts = list(answer)
            calls = [call for part in parts for call in choice_of(part).delta.tool_calls or []]
            reason = choice_of(parts[-1]).finish_reason
        else:
            calls, reason = (
                choice_of(answer).message.tool_calls or [],
                choice_of(answer).finish_reason,
            )
        assert reason == "tool_calls" and len(calls) == 1
        assert calls[0].function.name in names
        assert set(json.loads(calls[0].function.arguments)) == {"name", "n"}


@pytest.mark.parametrize("stream", [False, True])
def test_a_demanded_call_that_is_cut_off_is_a_partial_call(
    client: openai.OpenAI, stream: bool
) -> None:
    asked: dict[str, Any] = {
        "model": "tiny-kimi",
        "messages": ASK,
        "tools": TOOLS[:1],
        "tool_choice": "required",
    }
    answer = client.chat.completions.create(**asked, max_tokens=36, temperature=0, stream=stream)
    if stream:
        parts = list(answer)
        (call,) = [call for part in parts for call in choice_of(part).delta.tool_calls or []]
        content, reason = (
            "".join(choice_of(part).delta.content or "" for part in parts),
            choice_of(parts[-1]).finish_reason,
        )
    else:
        (call,) = choice_of(answer).message.tool_calls or []
        content, reason = choice_of(answer).message.content or "", choice_of(answer).finish_reason
    assert call.function.name == "get_weather" and not content and reason == "length"
    assert '{"name":"ab","n":99}'.startswith(call.function.arguments[:2])


class Lookup(BaseModel):
    city: Literal["Oslo", "Rome"]


def test_a_strict_function_is_called_as_it_says(
    client: openai.OpenAI, tokenizer: KimiTokenizer
) -> None:
    """A strict function of openai's parse is called as it says, if the model opens a call.

    parse leaves the choice to the model.
    """
    tools = [openai.pydantic_function_tool(Lookup)]
    asked: dict[str, Any] = {"model": "tiny-kimi", "messages": ASK, "tools": tools}
    begin = str(tokenizer.special_id("<|tool_calls_section_begin|>"))
    one = {"max_tokens": 200, "logit_bias": {begin: 100}, "parallel_tool_calls": False}
    called = client.chat.completions.parse(**asked, **one)
    (call,) = choice_of(called).message.tool_calls or []
    assert call.function.name == "Lookup" and isinstance(call.function.parsed_arguments, Lookup)
    free = client.chat.completions.create(**asked, max_tokens=8)
    assert choice_of(free).message.content and not choice_of(free).message.tool_calls


def test_structured_output(client: openai.OpenAI) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}}
    answer = client.chat.completions.create(
        model="tiny-kimi", messages=ASK, max_tokens=300, n=2, response_format=form
    )
    assert all(
        set(json.loads(choice.message.content)) == {"name", "n"} for choice in answer.choices
    )
    ended = client.completions.create(
        model="tiny-kimi",
        prompt="x",
        n=8,
        max_tokens=9,
        extra_body={"response_format": {"type": "regex", "regex": "[ab]c"}},
    )
    assert all(
        choice.text in ("ac", "bc") and choice.finish_reason == "stop" for choice in ended.choices
    )
    free = client.chat.completions.create(
        model="tiny-kimi",
        messages=ASK,
        max_tokens=300,
        temperature=0,
        response_format={"type": "json_object"},
    )
    assert choice_of(free).finish_reason == "length" or isinstance(
        json.loads(choice_of(free).message.content), dict
    )


def test_echo_scores_the_prompt(
    client: openai.OpenAI, target: KimiModel, tokenizer: KimiTokenizer
) -> None:
    """What lm-eval asks for: the log-probability of each token of a given text."""
    text = "the quick brown fox"
    ids = tokenizer.encode(text)
    logits = target(torch.tensor([ids])).logits[0].float().log_softmax(-1)
    expected = logits[:-1].gather(1, torch.tensor(ids[1:]).unsqueeze(1)).squeeze(1).tolist()
    common = {"model": "tiny-kimi", "prompt": text, "echo": True, "logprobs": 2, "temperature": 0}
    for max_tokens in (0, 1, 5):
        answer = client.completions.create(**common, max_tokens=max_tokens)
        scores = choice_of(answer).logprobs
        assert scores is not None and choice_of(answer).text.startswith(text)
        assert scores.token_logprobs[0] is None and len(scores.tokens) == len(ids) + max_tokens
        assert scores.token_logprobs[1 : len(ids)] == pytest.approx(expected, abs=1e-4)
        assert answer.usage.completion_tokens == max_tokens
        stream = list(client.completions.create(**common, max_tokens=max_tokens, stream=True))
        assert "".join(choice_of(part).text for part in stream) == choice_of(answer).text
        scored = [choice_of(part).logprobs for part in stream if choice_of(part).logprobs]
        told = [value for scores in scored for value in scores.token_logprobs]
        assert told[1:] == pytest.approx(scores.token_logprobs[1:])


def test_usage_in_every_chunk(client: openai.OpenAI) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = list(
        client.chat.completions.create(
            model="tiny-kimi",
            messages=ASK,
            max_tokens=9,
            stream=True,
            stream_options=options,
            temperature=0,
        )
    )
    counts = [chunk.usage.completion_tokens for chunk in chunks]
    assert counts == sorted(counts) and counts[-1] == counts[-2] > 0


def test_text_options(server: Running) -> None:
    def ask(**fields: Any) -> dict:
        body = {"prompt": "abc", "max_tokens": 30, "temperature": 0, **fields}
        return httpx.post(f"{server.url}/v1/completions", json=body).json()

    assert ask(max_tokens=8, logit_bias={"300": 100})["choices"][0]["text"] == ""
    told = ask(max_tokens=2, logit_bias={"300": 100}, return_token_ids=True)["choices"][0]
    assert told["token_ids"] == [300, 300] and told["prompt_token_ids"] == [97, 98, 99]
