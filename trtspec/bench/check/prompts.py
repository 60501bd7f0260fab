"""What the gate asks. Everything is made from questions and counts, so two servers are asked the same.

A conversation is asked as token ids of our own chat template (run `ids`), as a chat and as a stream. What no question
can be trusted to evoke is forced: by a grammar, or by a high temperature.
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


def form(properties: Message) -> Message:
    """The schema of an object with these properties alone."""
    return {
        "type": "object",
        "properties": properties,
        "required": [*properties],
        "additionalProperties": False,
    }


def function(name: str, **properties: Any) -> Message:
    """A tool whose arguments are all required."""
    return {"type": "function", "function": {"name": name, "parameters": form(properties)}}


def call(index: int, name: str, **arguments: Any) -> Message:
    """A call as an assistant's message holds it."""
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
# answers that a grammar forces: characters that span tokens, order, escapes, text before a call, calls in a row
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
    "json": {"response_format": {"type": "json_schema", "json_schema": {"name": "thing", "schema": FORM}}},
    "arguments": {"tools": [function("f", **CONSTANTS)], "tool_choice": NAMED},
    "spoken": {"tools": [TOOL], "response_format": TEXT_AND_CALL},
}  # fmt: skip
PICTURE = (
    "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mP8z8BQDwAEhQGAhKmMIQ"
    "AAAABJRU5ErkJggg=="
)
NEVER = "\u2405"  # a character that no answer holds
LONG = 4  # prompts, so that a collapse of drafts shows
MIN_SAMPLED = 28  # answers by each sampler, so that enough tokens are unsure
HOT_TOKENS = 32
TRUNCATIONS: dict[str, dict[str, Any]] = {
    "top_k": {"top_k": 1},
    "top_p": {"top_p": 1e-6},
    "min_p": {"min_p": 1.0},
}
# values with which more tokens repeat, and fewer
PENALTIES = {
    "frequency_penalty": (-2.0, 2.0),
    "presence_penalty": (-2.0, 2.0),
    "repetition_penalty": (0.5, 2.0),
}
PENALTY_TOKENS = 152
CHOICES = 4
# beside other requests, rounding parts one in eight pairs of answers of one seed, most of them at the first token
SEEDS = (0, 1, 2, 3, 4, None)
SEED_TOKENS = 4
ODD_TOKENS = 8
FORCED_TOKENS = 128
LONG_ANSWER = 512  # tokens
MAX_CONTEXT = 16_384  # tokens of a prompt near the limit; more costs a busy server minutes
THINKING_TOKENS = 2048  # of calls, JSON and stops if the template cannot turn thinking off


@dataclass(frozen=True, kw_only=True)
class Prompts:
    """Makes the exchanges of one check. `limit`: tokens that the server takes, prompt and answer together. `ids`: the
    request fields by which it returns token ids. `withheld`: probe and reason of what is not asked."""

    tokenizer: KimiTokenizer
    questions: Sequence[Question]
    samples: int
    max_tokens: int
    context: int
    limit: int
    ids: Mapping[str, Any]
    withheld: Mapping[str, str]

    def first(self) -> Iterator[Exchange]:
        """Everything that needs no earlier answer, in the order in which it is asked."""
        text = self.texts[: self.samples]
        for index, messages in enumerate(self.texts[: max(MIN_SAMPLED, self.samples)]):
            if index < self.samples:
                yield from self.twins(f"text {index}", "text", messages)
            # beside greedy requests, because a batch may mix up their parameters
            yield from self._sampled(index, messages)
        yield from self._unsure(text[0])
        yield from self._lengths(text)
        offered = [one.first_request() for one in self.questions if one.tools]
        calls = [([_user(WEATHER)], [TOOL]), *offered]
        for index, (messages, tools) in enumerate(calls[: self.few]):
            yield from self.twins(f"call {index}", "call", messages, tools, False)
        more = [_user(WEATHER), *RESULT]
        yield from self.twins("follow-up", "follow-up", more, [TOOL], False)
        yield from self._forms()
        for index, messages in enumerate(text[: self.few]):
            yield self.raw(f"stop {index}", "stop", messages, thinking=False)
        yield from self.twins("system", "prompt", [SYSTEM, text[0][-1]])
        yield from self.twins("quiet", "prompt", text[0], thinking=False)
        # thoughts that do not end, because their end mark is forbidden
        endless = self._without(THINK_END)
        for asked in self.twins("", "", text[0], thinking=True):
            yield from self._steered(asked, {"reasoning": endless | {"max_tokens": HOT_TOKENS}})
        for kind, words in ODD_TEXTS.items():
            asked = self.chat(kind, kind, [_user(words)], "chat", max_tokens=ODD_TOKENS)
            yield asked
        parts = [_user([{"type": "text", "text": words}])]
        yield from self._steered(asked, {"parts": {"messages": parts}})
        for probe, reason in self.withheld.items():
            yield Exchange(key=probe, kind=probe, run="withheld", error=reason)

    def second(self, answers: Sequence[Exchange]) -> Iterator[Exchange]:
        """What is made from the first answers: second turns, stop strings, parameters."""
        known = {one.key: one for one in answers if one.run == "ids" and one.answered}
        texts = self.texts[: self.few]
        for index, messages in enumerate(texts):
            if content := _content(known.get(f"text {index}")):
                said = {"role": "assistant", "content": content}
                more = [*messages, said, _user("Now say the same again, shorter.")]
                yield from self.twins(f"turn-2 {index}", "turn-2", more)
        for index, messages in enumerate(texts[:2]):
            if content := _content(known.get(f"stop {index}")):
                yield from self._stops(f"stop {index}", messages, content)
        yield from self._parameters(known)

    def twins(self, key: str, kind: str, messages: list[Message], tools: Any = None,
              thinking: bool | None = None) -> Iterator[Exchange]:  # fmt: skip
        """A conversation as ids, as a chat and as a stream."""
        yield self.raw(key, kind, messages, tools, thinking)
        for run in ("chat", "stream"):
            yield self.chat(key, kind, messages, run, tools, thinking)

    def raw(self, key: str, kind: str, messages: list[Message], tools: Any = None,
            thinking: bool | None = None, **fields: Any) -> Exchange:  # fmt: skip
        """A streamed completion of our own template's token ids."""
        body = {
            "prompt": self._prompt(messages, tools, thinking),
            "max_tokens": self._limit(thinking),
            "temperature": 0.0,
            "stream": True,
            **self.ids,
        }
        return Exchange(key=key, kind=kind, run="ids", path=RAW, body=body | fields)

    def chat(self, key: str, kind: str, messages: list[Message], run: str, tools: Any = None,
             thinking: bool | None = None, **fields: Any) -> Exchange:  # fmt: skip
        body: dict[str, Any] = {
            "messages": messages,
            "max_tokens": self._limit(thinking),
            "temperature": 0.0,
        }
        if tools:
            body |= {"tools": tools, "tool_choice": "auto"}
        if variables := self._variables(thinking):
            body["chat_template_kwargs"] = variables
        if run.startswith("stream"):
            body["stream"] = True
        if "detokenize" not in self.ids:  # without text there would be nothing to compare
            body |= self.ids
        body |= fields
        prompt = self._prompt(messages, body.get("tools"), thinking)
        return Exchange(key=key, kind=kind, run=run, body=body, template_ids=tuple(prompt))

    def _prompt(
        self, messages: list[Message], tools: Any = None, thinking: bool | None = None
    ) -> list[int]:
        variables: dict[str, Any] = {"thinking": None, **self._variables(thinking)}
        return self.tokenizer.encode_chat(messages, tools, **variables)[1]

    def _variables(self, thinking: bool | None) -> dict[str, Any]:
        """Template variables that turn thinking on or off; {} leaves it to the template."""
        known = thinking is not None and "thinking" in self.tokenizer.template.variables
        return {"thinking": thinking} if known else {}

    def _limit(self, thinking: bool | None) -> int:
        quiet = thinking is not False or self._variables(False)
        return self.max_tokens if quiet else THINKING_TOKENS

    @cached_property
    def texts(self) -> list[list[Message]]:
        """Conversations of text without tools."""
        return [
            one.first_request()[0] for one in self.questions if not (one.tools or one.has_pictures)
        ]

    @property
    def few(self) -> int:
        return max(1, self.samples // 5)

    def _sampled(self, index: int, messages: list[Message]) -> Iterator[Exchange]:
        """An answer by each sampler to a question cut short: a target is less sure of a user's words than of its own,
        and one that is sure shows no sampler."""
        for kind, fields in SAMPLERS.items():
            asked = self.raw(f"{kind} {index}", kind, messages, seed=index, **fields)
            yield self._opened(asked, messages)

    def _unsure(self, messages: list[Message]) -> Iterator[Exchange]:
        """Requests where a target is unsure: a user's first words, most of them at a high temperature. A seed that
        is given shows choices that share it."""
        base = self._opened(self.raw("", "", messages, seed=0, **HOT), [_user("")])
        for run in ("ids", "again"):
            for seed in SEEDS:
                body = base.body | {"seed": seed, "max_tokens": SEED_TOKENS}
                yield replace(base, key="seed", kind="seed", run=f"{seed}, {run}", body=body)
        choices = {"n": CHOICES, "max_tokens": SEED_TOKENS, "stream": False}
        yield from self._steered(base, {"n": choices})
        body = base.body | {"max_tokens": HOT_TOKENS}
        yield from self._steered(replace(base, body=body), TRUNCATIONS)
        body |= SAMPLERS["tail"] | self._without(END_OF_TURN) | {"max_tokens": PENALTY_TOKENS}
        for index, run in enumerate(("more", "less")):
            fields = {kind: {kind: values[index]} for kind, values in PENALTIES.items()}
            yield from self._steered(replace(base, run=run, body=body), fields)

    def _lengths(self, texts: Sequence[list[Message]]) -> Iterator[Exchange]:
        """Long prompts, a prompt near the server's limit, and a long answer."""
        for index in range(LONG):
            messages = self._document(texts, index, self.context)
            yield from self.twins(f"long {index}", "long", messages)
        room = min(self.limit, MAX_CONTEXT) - self._limit(None)
        spare = 2 * len(self._prompt(self._document(texts, LONG, 0)))
        yield from self.twins("limit", "limit", self._document(texts, LONG, room - spare))
        asked = self.raw("answer", "answer", texts[0], ignore_eos=True)
        tokens = min(LONG_ANSWER, self.limit - len(asked.body["prompt"]))
        yield replace(asked, body=asked.body | {"max_tokens": tokens})

    def _document(self, texts: Sequence[list[Message]], number: int, size: int) -> list[Message]:
        """A document of `size` tokens with a question behind; no two begin alike."""
        words = self.tokenizer.encode("\n\n".join(str(one[-1]["content"]) for one in texts))
        document = self.tokenizer.decode((words * (1 + size // len(words)))[:size])
        question = texts[number % len(texts)][-1]["content"]
        return [_user(f"Notes, part {number + 1}.\n\n{document}\n\n{question}")]

    def _forms(self) -> Iterator[Exchange]:
        """Answers that a grammar forces, in part or whole, and a picture."""
        words = "Describe a spider: name and number of legs."
        asked = {kind: ([_user(words)], fields) for kind, fields in FORCED.items()}
        # calls that do not end, because their end mark is forbidden
        endless = {"tools": [TOOL], "tool_choice": "required", **self._without(SECTION_END)}
        asked["calls"] = [_user(WEATHER)], endless
        if "picture" not in self.withheld:
            shown = {"type": "image_url", "image_url": {"url": PICTURE}}
            asked["picture"] = ([_user([shown, {"type": "text", "text": "What is it?"}])], {})
        tokens = max(FORCED_TOKENS, self._limit(False))
        for kind, (messages, fields) in asked.items():
            for run in ("chat", "stream"):
                fields = fields | {"max_tokens": tokens}
                yield self.chat(kind, kind, messages, run, thinking=False, **fields)

    def _stops(self, key: str, messages: list[Message], content: str) -> Iterator[Exchange]:
        """Stop strings from a known answer: one, one behind a string that does not occur, and two that only begin."""
        middle = content[len(content) // 2 :][:6]
        kinds = {
            "stop": [middle],
            "stops": [NEVER, middle],
            "begun": [middle + NEVER, content[-4:] + NEVER],
        }
        for kind, stop in kinds.items():
            for run in ("chat", "stream"):
                yield self.chat(key, kind, messages, f"{run}, {kind}", thinking=False, stop=stop)

    def _opened(self, asked: Exchange, messages: list[Message]) -> Exchange:
        """The request with a prompt that ends within the last user's words, for the target to write on."""
        words = str(messages[-1]["content"])
        begun = [*messages[:-1], _user(words[: len(words) // 4])]
        _, prompt = self.tokenizer.encode_chat(begun, thinking=None, add_generation_prompt=False)
        # without the end of the turn
        return replace(asked, body=asked.body | {"prompt": prompt[:-1]})

    def _parameters(self, known: Mapping[str, Exchange]) -> Iterator[Exchange]:
        """Requests whose answer shows whether a parameter was honoured (`rows.parameters`)."""
        texts = [one for one in known.values() if one.kind == "text" and one.token_ids]
        if texts:
            base = max(texts, key=lambda one: (one.finish == "stop", one.size))
            ids = base.token_ids
            least = len(ids) + 32  # some ends are drafted behind other drafts
            direct: dict[str, Any] = {
                "logit_bias": {"logit_bias": {str(max(ids, key=ids.count)): -100}},
                "stop_token_ids": {"stop_token_ids": [ids[len(ids) // 2]]},
                "min_tokens": {"min_tokens": least, "max_tokens": least + 8},
            }
            yield from self._steered(base, direct)

    def _without(self, name: str) -> dict[str, Any]:
        """Request fields that forbid a special token."""
        return {"logit_bias": {str(self.tokenizer.special_tokens.get(name)): -100}}

    def _steered(self, base: Exchange, probes: Mapping[str, dict[str, Any]]) -> Iterator[Exchange]:
        """The request with more fields, by kind."""
        for kind, fields in probes.items():
            if kind not in self.withheld:
                yield replace(request_of(base), key=kind, kind=kind, body=base.body | fields)


def _content(answer: Exchange | None) -> str:
    return parse_reply(answer.raw, False)["content"] or "" if answer else ""


def request_of(asked: Exchange) -> Exchange:
    """The same without its answer."""
    return Exchange(key=asked.key, kind=asked.kind, run=asked.run, path=asked.path, body=asked.body,
                    template_ids=asked.template_ids)  # fmt: skip


def repeated(answers: Iterable[Exchange], run: str, *kinds: str) -> list[Exchange]:
    """The requests of these kinds again, under the name of another run."""
    asked = [one for one in answers if one.run == "ids" and one.answered and one.kind in kinds]
    return [replace(request_of(one), run=run) for one in asked]


def raw_text(tokenizer: KimiTokenizer, asked: Exchange, token_ids: Sequence[int]) -> str:
    """An answer before any parser; it begins with the think tag that its prompt left open."""
    special, end = tokenizer.special_tokens, asked.prompt[-2:]  # a line break may follow the tag
    text = tokenizer.decode(token_ids, skip_special=True)
    return THINK + text if special.get(THINK) in end and special.get(THINK_END) not in end else text


def _user(content: Any) -> Message:
    return {"role": "user", "content": content}
