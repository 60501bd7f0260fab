"""Makes the requests of `trtspec check`.

The requests depend on questions and counts only, so two servers get the same requests.

A conversation is sent in three ways: as token ids of our own chat template (run `ids`), as a chat
and as a streamed chat. An answer that no question reliably evokes is forced by a grammar or by a
high temperature.
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
    """Maker of the requests of one check.

    questions: source of the conversations
    samples: number of texts that are sent
    max_tokens: limit of an answer
    context: number of tokens of a long prompt
    limit: number of tokens that the server accepts, prompt and answer together
    ids: request fields that make the server return token ids
    withheld: probes that are not sent, with the reason
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
        """Yields every request that does not depend on an answer, in the order of sending."""
        yield from self._texts_and_samples()
        texts = self.texts[: self.samples]
        text = texts[0]
        yield from self._unpredictable(text)
        yield from self._long_requests(texts)
        yield from self._calls()
        yield from self._forced_forms()
        for index, messages in enumerate(texts[: self.variant_count]):
            yield self.raw(f"stop {index}", "stop", messages, thinking=False)
        yield from self.three_ways("system", "prompt", [SYSTEM, text[-1]])
        yield from self.three_ways("quiet", "prompt", text, thinking=False)
        # The end mark of thoughts is forbidden, so the reasoning lasts until the limit.
        endless = self._without(THINK_END) | {"max_tokens": HOT_TOKENS}
        for request in self.three_ways("", "", text, thinking=True):
            yield from self._variants(request, {"reasoning": endless})
        yield from self._odd_texts()
        for probe, reason in self.withheld.items():
            yield Exchange(key=probe, kind=probe, run="withheld", error=reason)

    def second(self, answers: Sequence[Exchange]) -> Iterator[Exchange]:
        """Yields requests made from the answers to the first requests.

        They are second turns, stop strings and request parameters.
        """
        as_ids = [answer for answer in answers if answer.run == "ids" and answer.answered]
        known = {answer.key: answer for answer in as_ids}
        texts = self.texts[: self.variant_count]
        for index, messages in enumerate(texts):
            content = _content(known.get(f"text {index}"))
            if content:
                reply = {"role": "assistant", "content": content}
                conversation = [*messages, reply, _user("Now say the same again, shorter.")]
                yield from self.three_ways(f"turn-2 {index}", "turn-2", conversation)
        for index, messages in enumerate(texts[:2]):
            content = _content(known.get(f"stop {index}"))
            if content:
                yield from self._stop_strings(f"stop {index}", messages, content)
        yield from self._parameters(known)

    # --- what all requests are built with ---

    def three_ways(
        self,
        key: str,
        probe: str,
        messages: list[Message],
        tools: Any = None,
        thinking: bool | None = None,
    ) -> Iterator[Exchange]:
        """Yields a conversation as token ids, as a chat and as a streamed chat.

        `thinking`: None leaves it to the chat template.
        """
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
        """Returns a streamed raw completion of the token ids that the chat template gives here.

        `fields`: further request fields, which replace fields of the same name.
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
        """Returns a chat request, streamed if `run` begins with "stream".

        `fields`: further request fields, which replace equal ones.
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
        # `detokenize` would remove the text of the message, which is compared
        if "detokenize" not in self.ids:
            body |= self.ids
        body |= fields
        prompt = self._prompt(messages, body.get("tools"), thinking)
        return Exchange(key=key, kind=probe, run=run, body=body, template_ids=tuple(prompt))

    def _prompt(
        self, messages: list[Message], tools: Any = None, thinking: bool | None = None
    ) -> list[int]:
        """Returns the token ids of a conversation in our own chat template."""
        variables: dict[str, Any] = {"thinking": None, **self._variables(thinking)}
        _, ids = self.tokenizer.encode_chat(messages, tools, **variables)
        return ids

    def _variables(self, thinking: bool | None) -> dict[str, Any]:
        """Chat template variables that turn thinking on or off.

        {} if `thinking` is None or the template has no such variable.
        """
        if thinking is None or "thinking" not in self.tokenizer.template.variables:
            return {}
        return {"thinking": thinking}

    def _limit(self, thinking: bool | None) -> int:
        """Returns the max_tokens of an answer.

        The limit is higher if thinking should be off but the template cannot turn it off.
        """
        if thinking is False and not self._variables(False):
            return THINKING_TOKENS
        return self.max_tokens

    def _without(self, name: str) -> dict[str, Any]:
        """Returns the request field that forbids the special token called `name`."""
        token = str(self.tokenizer.special_tokens.get(name))
        return {"logit_bias": {token: -100}}

    def _variants(self, base: Exchange, probes: Mapping[str, dict[str, Any]]) -> Iterator[Exchange]:
        """Yields a variant of the request for each probe that is not withheld.

        `probes`: request fields that the variant adds, by probe.
        """
        for probe, fields in probes.items():
            if probe not in self.withheld:
                body = base.body | fields
                yield replace(request_of(base), key=probe, kind=probe, body=body)

    def _continuing_user(self, request: Exchange, messages: list[Message]) -> Exchange:
        """Returns the request with a prompt that ends after a quarter of the last user message."""
        content = str(messages[-1]["content"])
        first_quarter = content[: len(content) // 4]
        shortened = [*messages[:-1], _user(first_quarter)]
        _, prompt = self.tokenizer.encode_chat(
            shortened, thinking=None, add_generation_prompt=False
        )
        # without the last token, which would end the user's turn
        return replace(request, body=request.body | {"prompt": prompt[:-1]})

    # --- requests that depend on no answer ---

    @cached_property
    def texts(self) -> list[list[Message]]:
        """Conversations without tools and pictures, each up to its first answer."""
        plain = [item for item in self.questions if not (item.tools or item.has_pictures)]
        return [question.first_request()[0] for question in plain]

    @property
    def variant_count(self) -> int:
        """Number of texts that are also sent in other ways: a fifth of all texts."""
        return max(1, self.samples // 5)

    def _texts_and_samples(self) -> Iterator[Exchange]:
        """Yields greedy and sampled requests alternately.

        A server that mixes up the parameters of requests in a batch then shows it.
        """
        for index, messages in enumerate(self.texts[: max(MIN_SAMPLED, self.samples)]):
            if index < self.samples:
                yield from self.three_ways(f"text {index}", "text", messages)
            for probe, fields in SAMPLERS.items():
                request = self.raw(f"{probe} {index}", probe, messages, seed=index, **fields)
                # A target is less sure of a user's words than of its own. If it is sure, every
                # sampler returns the same tokens.
                yield self._continuing_user(request, messages)

    def _unpredictable(self, messages: list[Message]) -> Iterator[Exchange]:
        """Yields requests at a high temperature whose tokens the target cannot predict.

        They test seeds, choices, truncations (top_k, top_p, min_p) and penalties.
        """
        # a seed, because a faulty server repeats it in all choices of a request
        hot = self.raw("", "", messages, seed=0, **HOT)
        base = self._continuing_user(hot, [_user("")])
        for run in ("ids", "again"):
            for seed in SEEDS:
                body = base.body | {"seed": seed, "max_tokens": SEED_TOKENS}
                yield replace(base, key="seed", kind="seed", run=f"{seed}, {run}", body=body)
        choices = {"n": CHOICES, "max_tokens": SEED_TOKENS, "stream": False}
        yield from self._variants(base, {"n": choices})
        body = base.body | {"max_tokens": HOT_TOKENS}
        yield from self._variants(replace(base, body=body), TRUNCATIONS)
        # without an end of turn, answers with different penalties have equal lengths
        body |= SAMPLERS["tail"] | self._without(END_OF_TURN)
        body["max_tokens"] = PENALTY_TOKENS
        for index, run in enumerate(("more", "less")):
            probes = {name: {name: values[index]} for name, values in PENALTIES.items()}
            penalised = replace(base, run=run, body=body)
            yield from self._variants(penalised, probes)

    def _long_requests(self, texts: Sequence[list[Message]]) -> Iterator[Exchange]:
        """Yields long prompts, a prompt near the server's limit, and a long answer."""
        for index in range(LONG_PROMPTS):
            messages = self._document(texts, index, self.context)
            yield from self.three_ways(f"long {index}", "long", messages)
        available = min(self.limit, MAX_CONTEXT) - self._limit(None)
        without_document = self._document(texts, LONG_PROMPTS, 0)
        # room for the question and the template, twice because decoding and encoding a document may
        # change its number of tokens
        spare = 2 * len(self._prompt(without_document))
        near_limit = self._document(texts, LONG_PROMPTS, available - spare)
        yield from self.three_ways("limit", "limit", near_limit)
        request = self.raw("answer", "answer", texts[0], ignore_eos=True)
        body = request.body
        tokens = min(LONG_ANSWER_TOKENS, self.limit - len(body["prompt"]))
        yield replace(request, body=body | {"max_tokens": tokens})

    def _document(self, texts: Sequence[list[Message]], number: int, size: int) -> list[Message]:
        """Returns a conversation: a document of `size` tokens, followed by a question.

        The first words differ by `number`, so that no prefix is cached.
        """
        contents = [str(messages[-1]["content"]) for messages in texts]
        ids = self.tokenizer.encode("\n\n".join(contents))
        repeats = 1 + size // len(ids)
        document = self.tokenizer.decode((ids * repeats)[:size])
        question = texts[number % len(texts)][-1]["content"]
        return [_user(f"Notes, part {number + 1}.\n\n{document}\n\n{question}")]

    def _calls(self) -> Iterator[Exchange]:
        """Yields conversations with tools.

        They are a built-in question, the given questions that offer tools, and a built-in tool call
        with its result.
        """
        with_tools = [question.first_request() for question in self.questions if question.tools]
        calls = [([_user(WEATHER)], [TOOL]), *with_tools]
        for index, (messages, tools) in enumerate(calls[: self.variant_count]):
            yield from self.three_ways(f"call {index}", "call", messages, tools, False)
        with_result = [_user(WEATHER), *RESULT]
        yield from self.three_ways("follow-up", "follow-up", with_result, [TOOL], False)

    def _forced_forms(self) -> Iterator[Exchange]:
        """Yields requests whose answers a grammar forces, and a question about a picture."""
        describe = [_user("Describe a spider: name and number of legs.")]
        requests = {probe: (describe, fields) for probe, fields in FORCED.items()}
        # The end mark of the calls is forbidden, so calls repeat until the limit.
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
        """Yields requests with texts that a server may alter before the model reads them."""
        for probe, text in ODD_TEXTS.items():
            request = self.chat(probe, probe, [_user(text)], "chat", max_tokens=ODD_TOKENS)
            yield request
        # the last text once more, as a content part
        parts = [_user([{"type": "text", "text": text}])]
        yield from self._variants(request, {"parts": {"messages": parts}})

    # --- requests that depend on the first answers ---

    def _stop_strings(self, key: str, messages: list[Message], content: str) -> Iterator[Exchange]:
        """Yields the question of a known answer with stop strings from its `content`.

        The first list has a string of the answer. The second also has a string that does not occur,
        in front. The strings of the third list only begin like the answer.
        """
        half = len(content) // 2
        middle = content[half : half + STOP_CHARACTERS]
        only_beginnings = [middle + NEVER, content[-4:] + NEVER]
        stops = {"stop": [middle], "stops": [NEVER, middle], "begun": only_beginnings}
        for probe, stop in stops.items():
            for run in ("chat", "stream"):
                run_name = f"{run}, {probe}"
                yield self.chat(key, probe, messages, run_name, thinking=False, stop=stop)

    def _parameters(self, known: Mapping[str, Exchange]) -> Iterator[Exchange]:
        """Yields requests whose answers show whether the server obeys a parameter.

        They repeat a known answer's request with logit_bias, stop_token_ids or min_tokens.
        """
        texts = [answer for answer in known.values() if answer.kind == "text" and answer.token_ids]
        if not texts:
            return
        # an answer that stopped by itself, so that min_tokens can prolong it
        base = max(texts, key=lambda answer: (answer.finish == "stop", answer.size))
        ids = base.token_ids
        size = len(ids)
        most_frequent = str(max(ids, key=ids.count))
        middle = ids[size // 2]
        # many more tokens, because an end of turn may be drafted after other drafts
        min_tokens = size + 32
        probes: dict[str, Any] = {
            "logit_bias": {"logit_bias": {most_frequent: -100}},
            "stop_token_ids": {"stop_token_ids": [middle]},
            "min_tokens": {"min_tokens": min_tokens, "max_tokens": min_tokens + 8},
        }
        yield from self._variants(base, probes)


def form(properties: Message) -> Message:
    """Returns the JSON schema of an object with exactly these properties."""
    return {
        "type": "object",
        "properties": properties,
        "required": [*properties],
        "additionalProperties": False,
    }


def function(name: str, **properties: Any) -> Message:
    """Returns a tool for the `tools` field of a request. All its arguments are required."""
    return {"type": "function", "function": {"name": name, "parameters": form(properties)}}


def call(index: int, name: str, **arguments: Any) -> Message:
    """Returns a tool call as in an assistant's message. `index`: number of the call in its chat."""
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
# Values that a grammar forces into an answer. Their characters span several tokens, need escapes
# and have keys that are not in alphabetical order.
VALUES: dict[str, Any] = {"b": 'é 数学 🎉👩‍👧 "q"\\n', "a": 1}
CONSTANTS = {name: {"enum": [value]} for name, value in VALUES.items()}
FORM = form({"name": {"type": "string", "maxLength": 20}, **CONSTANTS})
CALLED = call(0, "f", **VALUES)
RESULT = [
    {"role": "assistant", "content": "", "tool_calls": [CALLED]},
    {"role": "tool", "tool_call_id": CALLED["id"], "content": "sunny, 24 degrees"},
]
# text of an answer that a grammar forces: a sentence before a call
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
NEVER = "\u2405"  # a character that does not occur in answers
STOP_CHARACTERS = 6
LONG_PROMPTS = 4  # enough to show that acceptance collapses in long prompts
# answers for each sampler; a smaller number has too few tokens that the target is unsure of
MIN_SAMPLED = 28
HOT_TOKENS = 32
# parameters that allow only the best token, by probe
TRUNCATIONS: dict[str, dict[str, Any]] = {
    "top_k": {"top_k": 1},
    "top_p": {"top_p": 1e-6},
    "min_p": {"min_p": 1.0},
}
# by penalty: the value with which more tokens repeat, and the value with which fewer tokens do
PENALTIES = {
    "frequency_penalty": (-2.0, 2.0),
    "presence_penalty": (-2.0, 2.0),
    "repetition_penalty": (0.5, 2.0),
}
PENALTY_TOKENS = 152
CHOICES = 4  # value of the request field `n`
# Several seeds, because rounding in a busy batch separates one in eight pairs of answers with one
# seed, mostly at the first token. None is a request without a seed.
SEEDS = (0, 1, 2, 3, 4, None)
SEED_TOKENS = 4
ODD_TOKENS = 8
FORCED_TOKENS = 128
LONG_ANSWER_TOKENS = 512
MAX_CONTEXT = 16_384  # tokens of a prompt near the limit; more costs a busy server minutes
# limit of answers with calls, JSON or stop strings if the template cannot turn thinking off
THINKING_TOKENS = 2048


def _content(answer: Exchange | None) -> str:
    """Returns the text of an answer without reasoning and calls. "" without an answer."""
    if answer is None:
        return ""
    return parse_reply(answer.raw, False)["content"] or ""


def request_of(exchange: Exchange) -> Exchange:
    """Returns the request of an exchange, without its answer."""
    return Exchange(
        key=exchange.key,
        kind=exchange.kind,
        run=exchange.run,
        path=exchange.path,
        body=exchange.body,
        template_ids=exchange.template_ids,
    )


def repeated(answers: Iterable[Exchange], run: str, *probes: str) -> list[Exchange]:
    """Returns requests of these probes that were answered, to be sent again as run `run`.

    Only raw completions (run `ids`) are repeated.
    """
    as_ids = [answer for answer in answers if answer.run == "ids" and answer.answered]
    return [replace(request_of(answer), run=run) for answer in as_ids if answer.kind in probes]


def raw_text(tokenizer: KimiTokenizer, exchange: Exchange, token_ids: Sequence[int]) -> str:
    """Returns the text of an answer's token ids, as a parser of reasoning and calls expects it.

    The text begins with the think tag if the prompt ends with an open think tag.
    """
    special = tokenizer.special_tokens
    text = tokenizer.decode(token_ids, skip_special=True)
    # two tokens, because a line break may follow the tag
    prompt_end = exchange.prompt[-2:]
    if special.get(THINK) in prompt_end and special.get(THINK_END) not in prompt_end:
        return THINK + text
    return text


def _user(content: Any) -> Message:
    """Returns a message of the user. `content`: text, or a list of content parts."""
    return {"role": "user", "content": content}
