"""Bodies and stream chunks of the two endpoints. A chunk costs one json.dumps of its new text."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from trtspec.checkpoint.tokenizer import KimiTokenizer
from trtspec.engine.reply import Delta, ReplyParser, parse_reply
from trtspec.engine.sequence import Completion, Output, TokenLogprobs

DONE = "data: [DONE]\n\n"


@dataclass
class CompletionAnswer:
    """What all parts of one response share. `top` is how many alternatives a logprobs entry lists."""

    tokenizer: KimiTokenizer
    model: str
    chat: bool
    logprobs: bool = False
    top: int = 0
    usage_in_stream: bool = False
    created: int = field(default_factory=lambda: int(time.time()))
    id: str = ""

    def __post_init__(self) -> None:
        self.id = f"{'chatcmpl' if self.chat else 'cmpl'}-{uuid.uuid4().hex}"

    def head(self, streaming: bool) -> dict[str, Any]:
        kind = ("chat.completion.chunk" if streaming else "chat.completion") if self.chat else "text_completion"
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}


def speculation(completion: Completion) -> dict[str, Any]:
    """What each choice says about its speculation: trtllm-serve's figure, and the counters it is made of."""
    return {
        "avg_decoded_tokens_per_iter": completion.avg_decoded_tokens_per_iter,
        "spec_decode": completion.stats.to_dict(),
    }


def usage(prompt_tokens: int, completions: list[Completion]) -> dict[str, int]:
    made = sum(len(completion.token_ids) for completion in completions)
    return {"prompt_tokens": prompt_tokens, "completion_tokens": made, "total_tokens": prompt_tokens + made}


def body(answer: CompletionAnswer, completions: list[Completion], prompt_tokens: int, thinking: bool) -> dict[str, Any]:
    """The response to a request that is not streamed."""
    choices = []
    for index, completion in enumerate(completions):
        choice: dict[str, Any] = {"index": index}
        reason: str | None = completion.finish_reason
        if answer.chat:
            choice["message"] = parse_reply(completion.text, thinking)
            reason = "tool_calls" if choice["message"].get("tool_calls") and reason == "stop" else reason
        else:
            choice["text"] = completion.text
        choice["logprobs"] = logprobs(answer, completion.logprobs) if answer.logprobs else None
        choices.append(choice | {"finish_reason": reason} | speculation(completion))
    return answer.head(streaming=False) | {"choices": choices, "usage": usage(prompt_tokens, completions)}


def logprobs(answer: CompletionAnswer, entries: list[TokenLogprobs]) -> dict[str, Any]:
    """Chat or completions form of the log-probabilities."""
    raw = answer.tokenizer.token_bytes

    def named(token: int, value: float) -> dict[str, Any]:
        return {"token": raw[token].decode("utf-8", "replace"), "logprob": value, "bytes": list(raw[token])}

    if answer.chat:
        return {
            "content": [
                named(e.token, e.logprob) | {"top_logprobs": [named(*pair) for pair in e.top[: answer.top]]}
                for e in entries
            ]
        }
    names = [raw[e.token].decode("utf-8", "replace") for e in entries]
    return {
        "tokens": names,
        "token_logprobs": [e.logprob for e in entries],
        "top_logprobs": [
            {raw[token].decode("utf-8", "replace"): value for token, value in e.top[: answer.top]} for e in entries
        ],
        "text_offset": [sum(map(len, names[:i])) for i in range(len(names))],
    }


class ChoiceStream:
    """Chunks of one streamed choice: one per engine step that made text, then one with the finish reason."""

    def __init__(self, answer: CompletionAnswer, index: int, thinking: bool) -> None:
        self.answer = answer
        self.index = index
        self.parser = ReplyParser(thinking) if answer.chat else None
        self.completion = Completion("")
        usage_null = ',"usage":null' if answer.usage_in_stream else ""
        head = json.dumps(answer.head(streaming=True), separators=(",", ":"))
        self._prefix = f'data: {head[:-1]},"choices":[{{"index":{index},'
        self._suffix = f"}}]{usage_null}}}\n\n"

    def opening(self) -> str:
        """The chat stream's first chunk, which names the role; nothing for completions."""
        return self._chunk('"delta":{"role":"assistant","content":""}') if self.answer.chat else ""

    def push(self, output: Output) -> str:
        """All chunks that follow from one engine step, as one string."""
        self.completion.add(output)
        scores = (
            json.dumps(logprobs(self.answer, output.logprobs)) if self.answer.logprobs and output.logprobs else "null"
        )
        chunks = []
        for fragment in self._fragments(output):
            chunks.append(self._chunk(fragment, scores))
            scores = "null"
        if output.finish_reason:
            reason = (
                "tool_calls"
                if self.parser and self.parser.calls and output.finish_reason == "stop"
                else output.finish_reason
            )
            rest = json.dumps({"finish_reason": reason} | speculation(self.completion))[1:-1]
            empty = '"delta":{}' if self.answer.chat else '"text":""'
            chunks.append(f'{self._prefix}{empty},"logprobs":{scores},{rest}{self._suffix}')
        return "".join(chunks)

    def _fragments(self, output: Output) -> Iterator[str]:
        """The changing member of each chunk, as JSON text."""
        if self.parser is None:
            if output.text:
                yield f'"text":{json.dumps(output.text)}'
            return
        deltas = self.parser.push(output.text) if output.text else []
        if output.finish_reason:
            deltas += self.parser.finish()
        for delta in deltas:
            yield f'"delta":{self._delta(delta)}'

    def _delta(self, delta: Delta) -> str:
        if delta.call is None:
            return f'{{"{delta.kind}":{json.dumps(delta.text)}}}'
        assert self.parser is not None
        return json.dumps({"tool_calls": [{"index": delta.index} | delta.call.to_dict()]})

    def _chunk(self, fragment: str, scores: str = "null") -> str:
        return f'{self._prefix}{fragment},"logprobs":{scores},"finish_reason":null{self._suffix}'


def usage_chunk(answer: CompletionAnswer, prompt_tokens: int, completions: list[Completion]) -> str:
    """The last chunk of a stream with `stream_options.include_usage`."""
    value = answer.head(streaming=True) | {"choices": [], "usage": usage(prompt_tokens, completions)}
    return f"data: {json.dumps(value)}\n\n"
