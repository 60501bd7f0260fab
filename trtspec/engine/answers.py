"""Bodies and stream chunks of the two endpoints. A chunk costs one json.dumps of its new text."""

from __future__ import annotations

import itertools
import json
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from trtspec.checkpoint.tokenizer import KimiTokenizer
from trtspec.engine.reply import Delta, ReplyParser, parse_reply
from trtspec.engine.sequence import Completion, Output, Stats, TokenLogprobs

DONE = "data: [DONE]\n\n"


@dataclass
class CompletionAnswer:
    """What all parts of one response share. `top` is how many alternatives a logprobs entry lists; `usage` says in
    which chunks of a stream the token counts stand; `echo` gives the prompt back before the answer, which is left out
    where it is not `shown`; every prompt has `n` choices."""

    tokenizer: KimiTokenizer
    model: str
    chat: bool
    n: int = 1
    logprobs: bool = False
    top: int = 0
    usage: Literal["no", "last", "each"] = "no"
    echo: bool = False
    shown: bool = True
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


def usage(prompt_tokens: int, completions: list[Completion], n: int = 1) -> dict[str, Any]:
    """Token counts of an answer of `n` choices per prompt, each prompt counted once. Cached are those tokens of the
    prompts that the first choice did not have to compute."""
    made = sum(len(completion.token_ids) for completion in completions)
    cached = sum(completion.cached_tokens for completion in completions[::n])
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": made,
        "total_tokens": prompt_tokens + made,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


def body(
    answer: CompletionAnswer,
    completions: list[Completion],
    prompts: list[list[int]],
    prompt_tokens: int,
    thinking: bool,
) -> dict[str, Any]:
    """The response to a request that is not streamed; `prompts` are the token ids of each choice's prompt."""
    choices = []
    for index, (completion, prompt) in enumerate(zip(completions, prompts, strict=True)):
        choice: dict[str, Any] = {"index": index}
        if not answer.shown:
            completion = replace(completion, token_ids=[], text="", finish_reason="length", logprobs=[], stats=Stats())
            completions[index] = completion
        reason: str | None = completion.finish_reason
        if answer.chat:
            choice["message"] = parse_reply(completion.text, thinking)
            reason = "tool_calls" if choice["message"].get("tool_calls") and reason == "stop" else reason
        else:
            choice["text"] = (answer.tokenizer.decode(prompt) if answer.echo else "") + completion.text
        echoed = prompt if answer.echo else []
        scores = [*completion.prompt_logprobs, *completion.logprobs]
        choice["logprobs"] = logprobs(answer, scores, echoed) if answer.logprobs else None
        choices.append(choice | {"finish_reason": reason} | speculation(completion))
    return answer.head(streaming=False) | {"choices": choices, "usage": usage(prompt_tokens, completions, answer.n)}


def logprobs(answer: CompletionAnswer, entries: list[TokenLogprobs], echoed: list[int]) -> dict[str, Any]:
    """Chat or completions form of the log-probabilities; of an echoed prompt the first token has none."""
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
    tokens = [*echoed[:1], *(entry.token for entry in entries)]
    names = [raw[token].decode("utf-8", "replace") for token in tokens]
    none = [None] * len(echoed[:1])
    # several tokens may have one name, as parts of characters do: the likeliest keeps it
    top = [
        {raw[token].decode("utf-8", "replace"): value for token, value in reversed(e.top[: answer.top])}
        for e in entries
    ]
    return {
        "tokens": names,
        "token_logprobs": [*none, *(entry.logprob for entry in entries)],
        "top_logprobs": [*none, *top],
        "text_offset": list(itertools.accumulate(map(len, names), initial=0))[:-1],
    }


class ChoiceStream:
    """Chunks of one streamed choice: one per engine step that made text, then one with the finish reason."""

    def __init__(self, answer: CompletionAnswer, index: int, thinking: bool, prompt: list[int]) -> None:
        self.answer = answer
        self.prompt = prompt
        self.index = index
        self.parser = ReplyParser(thinking) if answer.chat else None
        self.completion = Completion("")
        self._opened = False
        head = json.dumps(answer.head(streaming=True), separators=(",", ":"))
        self._prefix = f'data: {head[:-1]},"choices":[{{"index":{index},'

    def push(self, output: Output) -> str:
        """All chunks that follow from one engine step, as one string. A chat's first chunk, which names the role, comes
        with the first token: a client that takes it for that measures the right time."""
        opening, echo = not self._opened and self.answer.chat, not self._opened and self.answer.echo
        self._opened = True
        if not self.answer.shown:
            output = replace(output, token_ids=[], text="", logprobs=[])
        self.completion.add(output)
        scores = (
            json.dumps(logprobs(self.answer, output.logprobs, []))
            if self.answer.logprobs and output.logprobs
            else "null"
        )
        chunks = [self._chunk('"delta":{"role":"assistant","content":""}')] if opening else []
        if echo:
            told = self.answer.logprobs
            known = json.dumps(logprobs(self.answer, output.prompt_logprobs, self.prompt)) if told else "null"
            chunks.append(self._chunk(f'"text":{json.dumps(self.answer.tokenizer.decode(self.prompt))}', known))
        for fragment in self._fragments(output):
            chunks.append(self._chunk(fragment, scores))
            scores = "null"
        empty = '"delta":{}' if self.answer.chat else '"text":""'
        if (
            scores != "null" and not output.finish_reason
        ):  # tokens that are no whole character yet are scored all the same
            chunks.append(self._chunk(empty, scores))
        if output.finish_reason:
            reason = (
                "tool_calls"
                if self.parser and self.parser.calls and output.finish_reason == "stop"
                else output.finish_reason
            )
            rest = json.dumps({"finish_reason": reason} | speculation(self.completion))[1:-1]
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

    @property
    def _suffix(self) -> str:
        """What closes a chunk, with the token counts where they are asked for."""
        if self.answer.usage == "no":
            return "}]}\n\n"
        so_far = usage(len(self.prompt), [self.completion]) if self.answer.usage == "each" else None
        return f'}}],"usage":{json.dumps(so_far)}}}\n\n'

    def _chunk(self, fragment: str, scores: str = "null") -> str:
        return f'{self._prefix}{fragment},"logprobs":{scores},"finish_reason":null{self._suffix}'


def usage_chunk(answer: CompletionAnswer, prompt_tokens: int, completions: list[Completion]) -> str:
    """The last chunk of a stream with `stream_options.include_usage`."""
    value = answer.head(streaming=True) | {"choices": [], "usage": usage(prompt_tokens, completions, answer.n)}
    return f"data: {json.dumps(value)}\n\n"
