"""Makes the requests of the gate.

They depend on questions and counts alone, so two servers are asked the same.

A conversation is asked as token ids of our own chat template (run `ids`), as a chat and as a
stream. An answer that no question reliably evokes is forced: by a grammar, or by a high
temperature.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from trtspec.bench.check.evidence import HOT, SAMPLERS
from trtspec.checkpoint.chat_parser import (
    END_OF_TURN,
    SECTION_END,
    THINK,
    THINK_END,
    call_id,
    parse_reply,
    reply_text,
)
from trtspec.client.client import RAW
from trtspec.client.exchange import Exchange

if TYPE_CHECKING:
    from trtspec.bench.questions.datasets import Question
    from trtspec.checkpoint.tokenizer import KimiTokenizer

Message = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Prompts:
    """Makes the exchanges of one check.

    `samples`: texts that are asked. `context`: tokens of a long prompt. `limit`: tokens that the
    server takes, prompt and answer together. `ids`: request fields by which it returns token ids.
    `withheld`: probes that are not asked, with the reason.
    """

    tokenizer: KimiTokenizer
    questions: Sequence[Question]
    samples: int
    max_tokens: int
    context: int
    limit: int
    ids: Mapping[str, Any]
    withheld: Mapping[str, str]

    def first(self) -> Iterator[Exchange]:
        """Yields every request that needs no earlier answer, in the order of sending."""
        yield from self._texts_and_samples()
        texts = self.texts[: self.samples]
        text = texts[0]
        yield from self._unsure(text)
        yield from self._lengths(texts)
        yield from self._calls()
        yield from self._forms()
        for index, messages in enumerate(texts[: self.few]):
            yield self.raw(f"stop {index}", "stop", messages, thinking=False)
        yield from self.twins("system", "prompt", [SYSTEM, text[-1]])
        yield from self.twins("quiet", "prompt", text, thinking=False)
        # thoughts that do not end, because their end mark is forbidden
        endless = self._without(THINK_END) | {"max_tokens": HOT_TOKENS}
        for request in self.twins("", "", text, thinking=True):
            yield from self._steered(request, {"reasoning": endless})
        yield from self._odd_texts()
        for probe, reason in self.withheld.items():
            yield Exchange(key=probe, kind=probe, run="withheld", error=reason)

    def second(self, answers: Sequence[Exchange]) -> Iterator[Exchange]:
        """Yields requests made from the first answers: second turns, stop strings, parameters."""
        as_ids = [answer for answer in answers if answer.run == "ids" and answer.answered]
        known = {answer.key: answer for answer in as_ids}
        texts = self.texts[: self.few]
        for index, messages in enumerate(texts):
            content = _content(known.get(f"text {index}"))
            if content:
                reply = {"role": "assistant", "content": content}
                conversation = [*messages, reply, _user("Now say the same again, shorter.")]
                yield from self.twins(f"turn-2 {index}", "turn-2", conversation)
        for index, messages in enumerate(texts[:2]):
            content = _content(known.get(f"stop {index}"))
            if content:
                yield from self._stops(f"stop {index}", messages, content)
        yield from self._parameters(known)

    # --- requests ---

    def twins(
        self,
        key: str,
        probe: str,
        messages: list[Message],
        tools: Any = None,
        thinking: bool | None = None,
    ) -> Iterator[Exchange]:
        """Yields a conversation as ids, as a chat and as a stream."""
        yield self.raw(key, probe, messages, tools, thinking)
        for run in ("chat", "stream"):
            yield self.chat(key, probe, messages, run, tools, thinking)

    def raw(
        self,
        key: str,
        probe: str,
        messages: list[Message],
        tools: Any = None,
        thinking: bool | None = None,
        **fields: Any,
    ) -> Exchange:
        """Returns a streamed completion of our own template's token ids.

        `fields`: further request fields.
        """
        prompt = self._prompt(messages, tools, thinking)
        body = {
            "prompt": prompt,
            "max_tokens": self._limit(thinking),
            "temperature": 0.0,
            "stream": True,
            **self.ids,
        }
        return Exchange(key=key, kind=probe, run="ids", path=RAW, body=body | fields)

    def chat(
        self,
        key: str,
        probe: str,
        messages: list[Message],
        run: str,
        tools: Any = None,
        thinking: bool | None = None,
        **fields: Any,
    ) -> Exchange:
        """Returns a chat, streamed if the name of `run` begins so.

        `fields`: further request fields.
        """
        body: dict[str, Any] = {
            "messages": messages,
            "max_tokens": self._limit(thinking),
            "temperature": 0.0,
        }
        if tools:
            body |= {"tools": tools, "tool_choice": "auto"}
        variables = self._variables(thinking)
        if variables:
            body["chat_template_kwargs"] = variables
        if run.startswith("stream"):
            body["stream"] = True
        # without text there would be nothing to compare
        if "detokenize" not in self.ids:
            body |= self.ids
        body |= fields
        prompt = self._prompt(messages, body.get("tools"), thinking)
        return Exchange(key=key, kind=probe, run=run, body=body, template_ids=tuple(prompt))

    def _prompt(
        self, messages: list[Message], tools: Any = None, thinking: bool | None = None
    ) -> list[int]:
        variables: dict[str, Any] = {"thinking": None, **self._variables(thinking)}
        _, ids = self.tokenizer.encode_chat(messages, tools, **variables)
        return ids

    def _variables(self, thinking: bool | None) -> dict[str, Any]:
        """Template variables that turn thinking on or off. {} leaves it to the template."""
        if thinking is None or "thinking" not in self.tokenizer.template.variables:
            return {}
        return {"thinking": thinking}

    def _limit(self, thinking: bool | None) -> int:
        """Tokens of an answer, with room for thoughts that should be off and cannot be."""
        if thinking is False and not self._variables(False):
            return THINKING_TOKENS
        return self.max_tokens

    def _without(self, name: str) -> dict[str, Any]:
        """Request fields that forbid a special token."""
        token = str(self.tokenizer.special_tokens.get(name))
        return {"logit_bias": {token: -100}}

    def _steered(self, base: Exchange, probes: Mapping[str, dict[str, Any]]) -> Iterator[Exchange]:
        """Yields the request with more fields. `probes`: the fields by probe."""
        for probe, fields in probes.items():
            if probe not in self.withheld:
                body = base.body | fields
                yield replace(request_of(base), key=probe, kind=probe, body=body)

    def _opened(self, request: Exchange, messages: list[Message]) -> Exchange:
        """The request to continue the last user's words after their first quarter."""
        words = str(messages[-1]["content"])
        first_words = words[: len(words) // 4]
        begun = [*messages[:-1], _user(first_words)]
        _, prompt = self.tokenizer.encode_chat(begun, thinking=None, add_generation_prompt=False)
        # the last token ends the turn
        return replace(request, body=request.body | {"prompt": prompt[:-1]})

    # --- the first requests ---

    @cached_property
    def texts(self) -> list[list[Message]]:
        """Conversations of text without tools."""
        plain = [item for item in self.questions if not (item.tools or item.has_pictures)]
        return [question.first_request()[0] for question in plain]

    @property
    def few(self) -> int:
        """How many texts are asked in further ways."""
        return max(1, self.samples // 5)

    def _texts_and_samples(self) -> Iterator[Exchange]:
        """Yields greedy and sampled requests in turn, as a batch may mix up their parameters."""
        for index, messages in enumerate(self.texts[: max(MIN_SAMPLED, self.samples)]):
            if index < self.samples:
                yield from self.twins(f"text {index}", "text", messages)
            for probe, fields in SAMPLERS.items():
                request = self.raw(f"{probe} {index}", probe, messages, seed=index, **fields)
                # A target is less sure of a user's words than of its own, and a sure one shows no
                # sampler.
                yield self._opened(request, messages)

    def _unsure(self, messages: list[Message]) -> Iterator[Exchange]:
        """Yields requests that leave a target unsure: a user's words, at a high temperature."""
        # choices that share the request's seed would be equal
        hot = self.raw("", "", messages, seed=0, **HOT)
        base = self._opened(hot, [_user("")])
        for run in ("ids", "again"):
            for seed in SEEDS:
                body = base.body | {"seed": seed, "max_tokens": SEED_TOKENS}
                yield replace(base, key="seed", kind="seed", run=f"{seed}, {run}", body=body)
        choices = {"n": CHOICES, "max_tokens": SEED_TOKENS, "stream": False}
        yield from self._steered(base, {"n": choices})
        body = base.body | {"max_tokens": HOT_TOKENS}
        yield from self._steered(replace(base, body=body), TRUNCATIONS)
        body |= SAMPLERS["tail"] | self._without(END_OF_TURN)
        body["max_tokens"] = PENALTY_TOKENS
        for index, run in enumerate(("more", "less")):
            probes = {name: {name: values[index]} for name, values in PENALTIES.items()}
            penalised = replace(base, run=run, body=body)
            yield from self._steered(penalised, probes)

    def _lengths(self, texts: Sequence[list[Message]]) -> Iterator[Exchange]:
        """Yields long prompts, a prompt near the server's limit, and a long answer."""
        for index in range(LONG_PROMPTS):
            messages = self._document(texts, index, self.context)
            yield from self.twins(f"long {index}", "long", messages)
        available = min(self.limit, MAX_CONTEXT) - self._limit(None)
        empty = self._document(texts, LONG_PROMPTS, 0)
        # room for the question and the template, twice because tokens of a text vary
        spare = 2 * len(self._prompt(empty))
        near_limit = self._document(texts, LONG_PROMPTS, available - spare)
        yield from self.twins("limit", "limit", near_limit)
        request = self.raw("answer", "answer", texts[0], ignore_eos=True)
        body = request.body
        tokens = min(LONG_ANSWER_TOKENS, self.limit - len(body["prompt"]))
        yield replace(request, body=body | {"max_tokens": tokens})

    def _document(self, texts: Sequence[list[Message]], number: int, size: int) -> list[Message]:
        """A document of `size` tokens with a question behind it. No two begin alike."""
        contents = [str(messages[-1]["content"]) for messages in texts]
        ids = self.tokenizer.encode("\n\n".join(contents))
        repeats = 1 + size // len(ids)
        document = self.tokenizer.decode((ids * repeats)[:size])
        question = texts[number % len(texts)][-1]["content"]
        return [_user(f"Notes, part {number + 1}.\n\n{document}\n\n{question}")]

    def _calls(self) -> Iterator[Exchange]:
        """Yields conversations with tools.

        They are a question of ours, the questions that offer tools, and a call with its result.
        """
        with_tools = [question.first_request() for question in self.questions if question.tools]
        calls = [([_user(WEATHER)], [TOOL]), *with_tools]
        for index, (messages, tools) in enumerate(calls[: self.few]):
            yield from self.twins(f"call {index}", "call", messages, tools, False)
        answered = [_user(WEATHER), *RESULT]
        yield from self.twins("follow-up", "follow-up", answered, [TOOL], False)

    def _forms(self) -> Iterator[Exchange]:
        """Yields requests whose answers a grammar forces, in part or whole, and a picture."""
        describe = [_user("Describe a spider: name and number of legs.")]
        requests = {probe: (describe, fields) for probe, fields in FORCED.items()}
        # calls that do not end, because their end mark is forbidden
        endless = {"tools": [TOOL], "tool_choice": "required", **self._without(SECTION_END)}
        requests["calls"] = ([_user(WEATHER)], endless)
        if "picture" not in self.withheld:
            picture = {"type": "image_url", "image_url": {"url": PICTURE}}
            text = {"type": "text", "text": "What is it?"}
            message = _user([picture, text])
            requests["picture"] = ([message], {})
        tokens = max(FORCED_TOKENS, self._limit(False))
        for probe, (messages, fields) in requests.items():
            limited = fields | {"max_tokens": tokens}
            for run in ("chat", "stream"):
                yield self.chat(probe, probe, messages, run, thinking=False, **limited)

    def _odd_texts(self) -> Iterator[Exchange]:
        """Yields texts that a server may alter before the model reads them."""
        for probe, text in ODD_TEXTS.items():
            request = self.chat(probe, probe, [_user(text)], "chat", max_tokens=ODD_TOKENS)
            yield request
        # the last text once more, as a content part
        parts = [_user([{"type": "text", "text": text}])]
        yield from self._steered(request, {"parts": {"messages": parts}})

    # --- requests made from the first answers ---

    def _stops(self, key: str, messages: list[Message], content: str) -> Iterator[Exchange]:
        """Yields stop strings from a known answer.

        They are one string, one after a string that does not occur, and two that only begin.
        """
        middle = content[len(content) // 2 :][:6]
        begun = [middle + NEVER, content[-4:] + NEVER]
        stops = {"stop": [middle], "stops": [NEVER, middle], "begun": begun}
        for probe, stop in stops.items():
            for run in ("chat", "stream"):
                run_name = f"{run}, {probe}"
                yield self.chat(key, probe, messages, run_name, thinking=False, stop=stop)

    def _parameters(self, known: Mapping[str, Exchange]) -> Iterator[Exchange]:
        """Yields requests whose answers show if a parameter is honoured (`rows.parameters`)."""
        texts = [answer for answer in known.values() if answer.kind == "text" and answer.token_ids]
        if not texts:
            return
        base = max(texts, key=lambda answer: (answer.finish == "stop", answer.size))
        ids = base.token_ids
        size = len(ids)
        most_frequent = str(max(ids, key=ids.count))
        middle = ids[size // 2]
        min_tokens = size + 32  # some ends are drafted behind other drafts
        probes: dict[str, Any] = {
            "logit_bias": {"logit_bias": {most_frequent: -100}},
            "stop_token_ids": {"stop_token_ids": [middle]},
            "min_tokens": {"min_tokens": min_tokens, "max_tokens": min_tokens + 8},
        }
        yield from self._steered(base, probes)


def form(properties: Message) -> Message:
    """Returns the schema of an object with these properties alone."""
    return {
        "type": "object",
        "properties": properties,
        "required": [*properties],
        "additionalProperties": False,
    }


def function(name: str, **properties: Any) -> Message:
    """Returns a tool whose arguments are all required."""
    return {"type": "function", "function": {"name": name, "parameters": form(properties)}}


def call(index: int, name: str, **arguments: Any) -> Message:
    """Returns a call as an assistant's message holds it."""
    called = {"name": name, "arguments": json.dumps(arguments, ensure_ascii=False)}
    return {"id": call_id(name, index), "type": "function", "function": called}


TOOL = function("get_weather", city={"enum": ["Paris"]})
WEATHER = "What is the weather in Paris and in Rome?"
SYSTEM = {"role": "system", "content": "You answer in one short paragraph and never use lists."}
ODD_TEXTS = {
    "special": f"Copy: {END_OF_TURN} <|im_user|> {THINK_END} [EOS]",
    "blanks": "  \r\n\t Copy\r\n\r\nthe  blanks \r\n ",
    "composed": "Copy: \ufb01 \u2461 \u212b e\u0301 \uff57\uff49\uff44\uff45",
}
# Answers that a grammar forces: characters that span tokens, order, escapes, text before a call,
# calls in a row.
VALUES: dict[str, Any] = {"b": 'é 数学 🎉👩‍👧 "q"\\n', "a": 1}
CONSTANTS = {name: {"enum": [value]} for name, value in VALUES.items()}
FORM = form({"name": {"type": "string", "maxLength": 20}, **CONSTANTS})
CALLED = call(0, "f", **VALUES)
RESULT = [
    {"role": "assistant", "content": "", "tool_calls": [CALLED]},
    {"role": "tool", "tool_call_id": CALLED["id"], "content": "sunny, 24 degrees"},
]
SAID = reply_text(
    {"content": "Hm. 🎉", "tool_calls": [call(0, "get_weather", city="Paris")]}, True, False
)
TEXT_AND_CALL = {"type": "regex", "regex": re.escape(SAID)}
NAMED = {"type": "function", "function": {"name": "f"}}
FORCED: dict[str, dict[str, Any]] = {
    "json": {
        "response_format": {"type": "json_schema", "json_schema": {"name": "thing", "schema": FORM}}
    },
    "arguments": {"tools": [function("f", **CONSTANTS)], "tool_choice": NAMED},
    "spoken": {"tools": [TOOL], "response_format": TEXT_AND_CALL},
}
PICTURE = (
    "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mP8z8BQ"
    "DwAEhQGAhKmMIQAAAABJRU5ErkJggg=="
)
NEVER = "\u2405"  # a character that no answer holds
LONG_PROMPTS = 4  # so many show a collapse of drafts
MIN_SAMPLED = 28  # answers by each sampler, so that enough tokens are unsure
HOT_TOKENS = 32
TRUNCATIONS: dict[str, dict[str, Any]] = {
    "top_k": {"top_k": 1},
    "top_p": {"top_p": 1e-6},
    "min_p": {"min_p": 1.0},
}
# the value with which more tokens repeat, and the value with which fewer do
PENALTIES = {
    "frequency_penalty": (-2.0, 2.0),
    "presence_penalty": (-2.0, 2.0),
    "repetition_penalty": (0.5, 2.0),
}
PENALTY_TOKENS = 152
CHOICES = 4
# In a busy batch, rounding parts one in eight pairs of answers of one seed, most of them at the
# first token.
SEEDS = (0, 1, 2, 3, 4, None)
SEED_TOKENS = 4
ODD_TOKENS = 8
FORCED_TOKENS = 128
LONG_ANSWER_TOKENS = 512
MAX_CONTEXT = 16_384  # tokens of a prompt near the limit; more costs a busy server minutes
THINKING_TOKENS = 2048  # answers of calls, JSON and stops if the template cannot turn thinking off


def _content(answer: Exchange | None) -> str:
    """The content of a raw answer. "" without an answer."""
    if answer is None:
        return ""
    return parse_reply(answer.raw, False)["content"] or ""


def request_of(exchange: Exchange) -> Exchange:
    """Returns the exchange without its answer."""
    return Exchange(
        key=exchange.key,
        kind=exchange.kind,
        run=exchange.run,
        path=exchange.path,
        body=exchange.body,
        template_ids=exchange.template_ids,
    )


def repeated(answers: Iterable[Exchange], run: str, *probes: str) -> list[Exchange]:
    """Returns the answered requests of these probes once more, under the name of another run."""
    as_ids = [answer for answer in answers if answer.run == "ids" and answer.answered]
    return [replace(request_of(answer), run=run) for answer in as_ids if answer.kind in probes]


def raw_text(tokenizer: KimiTokenizer, exchange: Exchange, token_ids: Sequence[int]) -> str:
    """Returns an answer before any parser.

    It begins with the think tag that its prompt left open.
    """
    special = tokenizer.special_tokens
    text = tokenizer.decode(token_ids, skip_special=True)
    # a line break may follow the tag
    prompt_end = exchange.prompt[-2:]
    if special.get(THINK) in prompt_end and special.get(THINK_END) not in prompt_end:
        return THINK + text
    return text


def _user(content: Any) -> Message:
    return {"role": "user", "content": content}
