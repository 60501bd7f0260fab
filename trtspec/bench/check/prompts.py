"""What the gate asks. Everything is made from questions and counts, so two servers are asked the same.

Greedy and sampled answers are asked as token ids of our own chat template (run `ids`); the same conversations are asked
as chats, whole (`chat`) and streamed (`stream`). `first` needs no answer; `second` is made from the first answers.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from trtspec.checkpoint.chat_parser import END_OF_TURN, THINK, THINK_END, call_id, parse_reply
from trtspec.client.client import RAW
from trtspec.client.exchange import Exchange

if TYPE_CHECKING:
    from trtspec.bench.questions.datasets import Question
    from trtspec.checkpoint.tokenizer import KimiTokenizer

Message = dict[str, Any]
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
        },
    },
}
CALLS = (
    "What is the weather in Paris and in Rome?",
    "What is the weather in Oslo?",
    "Is it raining in Lima?",
)
FORM = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 20}, "count": {"type": "integer"}},
    "required": ["name", "count"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "thing", "schema": FORM}}
THINGS = ("a chair", "a spider", "a bicycle", "a week")
SYSTEM = ("You are a helpful assistant.", "You answer in one short paragraph and never use lists.")
THINKING_TOKENS = 2048  # of calls, JSON and stops where the template cannot turn thinking off


@dataclass(frozen=True, kw_only=True)
class Prompts:
    """Makes the exchanges of one check. `ids` are the request fields by which the server returns token ids, `withheld`
    the parameters that would end an engine of its release."""

    tokenizer: KimiTokenizer
    questions: Sequence[Question]
    samples: int
    max_tokens: int
    context: int
    ids: Mapping[str, Any]
    withheld: Set[str] = frozenset()

    def first(self) -> Iterator[Exchange]:
        """Everything that needs no earlier answer, in the order in which it is asked."""
        plain, few = self._plain(), max(1, self.samples // 5)
        text = plain[: self.samples]
        for index, messages in enumerate(text):
            yield self.raw(f"text {index}", "text", messages)
        for index, messages in enumerate(text):
            yield self.chat(f"text {index}", "text", messages, "stream")
        for index, messages in enumerate(text[: 2 * few]):
            yield self.chat(f"text {index}", "text", messages, "chat")
        for index, messages in enumerate(
            plain[: 2 * self.samples]
        ):  # one answer a prompt: they are independent
            drawn: dict[str, Any] = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "seed": index}
            asked = self.raw(f"sampled {index}", "sampled", messages, **drawn)
            if (
                index % 2
            ):  # a target that is sure of its answers shows no sampler; it is less sure of a user's words
                asked = replace(
                    asked, body=asked.body | {"prompt": self._opening(asked.body["prompt"])}
                )
            yield asked
        for index, messages in enumerate(self._long(text, few)):
            yield self.raw(f"long {index}", "long", messages)
        for index, (messages, tools) in enumerate(self._calls(few)):
            yield from self._parsed(f"call {index}", "call", messages, tools)
        for index, (messages, tools) in enumerate(self._calls(max(1, few // 2))):
            yield from self._parsed(
                f"follow-up {index}", "follow-up", [*messages, *_called(tools)], tools, ("stream",)
            )
        for index, thing in enumerate(THINGS[:few]):
            messages = [
                _user(
                    f"Describe {thing} as a JSON object with its name and the number of its legs or days."
                )
            ]
            for run in ("chat", "stream"):
                yield self.chat(
                    f"json {index}", "json", messages, run, quiet=True, response_format=FORMAT
                )
        for index, messages in enumerate(text[:few]):
            yield self.raw(f"stop {index}", "stop", messages, quiet=True)
        for index, (messages, quiet) in enumerate(self._read(text[0])):
            yield self.raw(f"prompt {index}", "prompt", messages, quiet=quiet)
            yield self.chat(f"prompt {index}", "prompt", messages, "chat", quiet=quiet)

    def second(self, answers: Sequence[Exchange]) -> Iterator[Exchange]:
        """What is made from the first answers: second turns, stop strings, parameters; then warm prompts."""
        known = {one.key: one for one in answers if one.run == "ids" and one.answered}
        plain, few = self._plain(), max(1, self.samples // 5)
        for index, messages in enumerate(plain[: 2 * few]):
            if base := known.get(f"text {index}"):
                said = {
                    "role": "assistant",
                    "content": parse_reply(base.raw, False)["content"] or "...",
                }
                more = [*messages, said, _user("Now say the same again, shorter.")]
                yield self.raw(f"turn-2 {index}", "turn-2", more)
        for index, messages in enumerate(plain[:few]):
            base = known.get(f"stop {index}")
            if base and (word := stop_word(parse_reply(base.raw, False)["content"] or "")):
                for run in ("chat", "stream"):
                    asked = self.chat(
                        f"stop {index}", "stop", messages, run, quiet=True, stop=[word]
                    )
                    yield replace(asked, run=f"{run} with stop")
        yield from self._parameters(known)
        for one in answers:
            if one.run == "ids" and one.answered and (one.kind == "long" or one.kind == "text"):
                yield replace(request_of(one), run="warm")

    def crowd(self, answers: Iterable[Exchange], size: int) -> list[Exchange]:
        """Short prompts again, to be asked all at once."""
        texts = [one for one in answers if one.kind == "text" and one.run == "ids" and one.answered]
        return [replace(request_of(one), run="crowd") for one in texts[:size]]

    def raw(self, key: str, kind: str, messages: list[Message], tools: Any = None, quiet: bool = False,
            **fields: Any) -> Exchange:  # fmt: skip
        """A streamed completion of our own template's token ids."""
        _, prompt = self.tokenizer.encode_chat(
            messages, tools, **{"thinking": None, **self._quiet(quiet)}
        )
        body = {
            "prompt": prompt,
            "max_tokens": self._limit(quiet),
            "temperature": 0.0,
            "stream": True,
            **self.ids,
        }
        return Exchange(key=key, kind=kind, run="ids", path=RAW, body=body | fields)

    def chat(self, key: str, kind: str, messages: list[Message], run: str, tools: Any = None, quiet: bool = False,
             **fields: Any) -> Exchange:  # fmt: skip
        body: dict[str, Any] = {
            "messages": messages,
            "max_tokens": self._limit(quiet),
            "temperature": 0.0,
        }
        body |= {"tools": tools, "tool_choice": "auto"} if tools else {}
        body |= {"chat_template_kwargs": found} if (found := self._quiet(quiet)) else {}
        body |= {"stream": True} if run == "stream" else {}
        body.update(
            {} if "detokenize" in self.ids else self.ids
        )  # without text there would be nothing to compare
        return Exchange(key=key, kind=kind, run=run, body=body | fields)

    def _parsed(
        self,
        key: str,
        kind: str,
        messages: list[Message],
        tools: Any,
        runs: Sequence[str] = ("chat", "stream"),
    ) -> Iterator[Exchange]:
        yield self.raw(key, kind, messages, tools, quiet=True)
        for run in runs:
            yield self.chat(key, kind, messages, run, tools, quiet=True)

    def _plain(self) -> list[list[Message]]:
        """Conversations of text without tools."""
        return [
            one.first_request()[0] for one in self.questions if not (one.tools or one.has_pictures)
        ]

    def _quiet(self, quiet: bool) -> dict[str, Any]:
        """Template variables that turn thinking off."""
        return (
            {"thinking": False} if quiet and "thinking" in self.tokenizer.template.variables else {}
        )

    def _limit(self, quiet: bool) -> int:
        return THINKING_TOKENS if quiet and not self._quiet(True) else self.max_tokens

    def _calls(self, count: int) -> list[tuple[list[Message], list[Message]]]:
        """Questions that offer tools: those of the data set, then our own."""
        own = [([_user(text)], [TOOL]) for text in CALLS]
        return [*own[:1], *(one.first_request() for one in self.questions if one.tools), *own[1:]][
            :count
        ]

    def _read(self, messages: list[Message]) -> list[tuple[list[Message], bool]]:
        """Conversations that templates render differently: with a system prompt, thinking on and off."""
        bare = [one for one in messages if one["role"] != "system"]
        return [
            *(([{"role": "system", "content": text}, *bare], False) for text in SYSTEM),
            (bare, True),
        ]

    def _long(self, texts: Sequence[list[Message]], count: int) -> Iterator[list[Message]]:
        """Documents of `context` tokens with a question behind; no two begin alike."""
        corpus = self.tokenizer.encode(
            "\n\n".join(str(one[-1]["content"]) for one in texts) + "\n\n"
        )
        for index in range(count if self.context else 0):
            start = len(corpus) * index // count
            words = (corpus[start:] + corpus * (1 + self.context // len(corpus)))[: self.context]
            document = f"Notes, part {index + 1}.\n\n{self.tokenizer.decode(words)}"
            yield [_user(f"{document}\n\n{texts[index % len(texts)][-1]['content']}")]

    def _opening(self, prompt: list[int]) -> list[int]:
        """A prompt up to the first quarter of the last user's words, for the target to write on."""
        end, begin = (
            self.tokenizer.special_tokens[mark] for mark in (END_OF_TURN, "<|im_middle|>")
        )
        last = len(prompt) - prompt[::-1].index(end) - 1
        first = last - prompt[:last][::-1].index(begin)
        return prompt[: first + (last - first) // 4]

    def _parameters(self, known: dict[str, Exchange]) -> Iterator[Exchange]:
        """Requests whose answer shows whether a parameter was honoured (`rows.honoured`)."""
        bases = sorted((one for one in known.values() if one.kind == "text" and len(one.token_ids) > 6),
                       key=lambda one: len(one.token_ids), reverse=True)[:2]  # fmt: skip
        for index, base in enumerate(bases):
            probes: dict[str, dict[str, Any]] = {
                "max_tokens": {"max_tokens": 5},
                "frequency_penalty": {"frequency_penalty": 2.0},
                "presence_penalty": {"presence_penalty": 2.0},
                "repetition_penalty": {"repetition_penalty": 1.5},
                "logit_bias": {"logit_bias": {str(base.token_ids[0]): -100}},
                "stop_token_ids": {"stop_token_ids": [base.token_ids[len(base.token_ids) // 2]]},
                "top_p": {"temperature": 1.0, "top_p": 1e-6, "seed": 7},
            }
            if base.finish == "stop":
                probes["min_tokens"] = {
                    "min_tokens": len(base.token_ids) + 8,
                    "max_tokens": len(base.token_ids) + 16,
                }
            for name, fields in probes.items():
                if name not in self.withheld:
                    body = base.body | fields
                    yield Exchange(
                        key=f"{name} {index}",
                        kind="parameter",
                        run="ids",
                        path=base.path,
                        body=body,
                    )


def request_of(asked: Exchange) -> Exchange:
    """The same without its answer."""
    return Exchange(key=asked.key, kind=asked.kind, run=asked.run, path=asked.path, body=asked.body)


def stop_word(content: str) -> str | None:
    """A phrase from the middle of a text that does not occur before it."""
    words = content.split(" ")
    for start in range(len(words) // 3, len(words) - 2):
        phrase = " ".join(words[start : start + 2])
        if (
            len(phrase) > 3
            and phrase == phrase.strip()
            and content.find(phrase) == len(" ".join(words[:start])) + 1
        ):
            return phrase
    return None


def raw_text(tokenizer: KimiTokenizer, asked: Exchange, token_ids: Sequence[int]) -> str:
    """An answer before any parser; it begins with the think tag that its prompt left open."""
    prompt = asked.body.get("prompt") or list(asked.prompt_ids)
    special, end = tokenizer.special_tokens, prompt[-2:]  # a line break may follow the tag
    text = tokenizer.decode(token_ids, skip_special=True)
    return THINK + text if special.get(THINK) in end and special.get(THINK_END) not in end else text


def _user(content: str) -> Message:
    return {"role": "user", "content": content}


def _called(tools: Sequence[Message]) -> list[Message]:
    """A call of the first tool, and its result."""
    function = tools[0]["function"]
    arguments = {name: "Paris" for name in function.get("parameters", {}).get("properties", {})}
    call = {"name": function["name"], "arguments": json.dumps(arguments)}
    name = call_id(function["name"], 0)
    said = {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": name, "type": "function", "function": call}],
    }
    return [
        said,
        {"role": "tool", "tool_call_id": name, "content": '{"result": "sunny, 24 degrees"}'},
    ]
