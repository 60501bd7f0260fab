"""Answers of the two endpoints, whole and as chunks of a stream."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict, replace
from typing import Any

from trtspec.checkpoint.chat_parser import ReplyParser, parse_reply
from trtspec.engine.prepare import ApiCall
from trtspec.engine.sequence import Output, Stats, TokenLogprobs

DONE = "data: [DONE]\n\n"
PIECE_CHARS = 1 << 16


def body(call: ApiCall, completions: list[Output]) -> Iterator[str]:
    """The response to a request that is not streamed, as JSON in parts. Small parts: one call that makes them all would
    keep every other thread waiting."""
    asked = call.asked
    completions = [shown(call, completion) for completion in completions]
    yield f'{_json(head(call, "chat.completion"))[:-1]},"choices":['
    for index, (completion, request) in enumerate(zip(completions, call.requests, strict=True)):
        choice: dict[str, Any] = {"index": index}
        reason: str | None = completion.finish_reason
        if asked.chat:
            choice["message"] = parse_reply(completion.text, call.thinking)
            reason = (
                "tool_calls" if choice["message"].get("tool_calls") and reason == "stop" else reason
            )
        else:
            choice["text"] = (
                call.tokenizer.decode(request.prompt_ids) if asked.echo else ""
            ) + completion.text
        if asked.return_token_ids:
            choice |= {"prompt_token_ids": request.prompt_ids, "token_ids": completion.token_ids}
        choice |= {"finish_reason": reason} | speculation(completion)
        yield f'{"," if index else ""}{_json(choice)[:-1]},"logprobs":'
        if asked.top is None:
            yield "null}"
            continue
        entries = [*completion.prompt_logprobs, *completion.logprobs]
        for at, (name, items) in enumerate(
            scores(call, entries, request.prompt_ids if asked.echo else []).items()
        ):
            yield f'{"," if at else "{"}"{name}":'
            yield from _listed(items)
        yield "}}"
    yield f'],"usage":{_json(usage(call.prompt_tokens, completions, asked.n))}}}'


def shown(call: ApiCall, output: Output) -> Output:
    """The output; of an echo alone without the one token that was generated for it."""
    if call.asked.shown:
        return output
    return replace(
        output, token_ids=[], text="", logprobs=[], finish_reason="length", stats=Stats()
    )


def head(call: ApiCall, kind: str) -> dict[str, Any]:
    """What all parts of one response share."""
    if not call.asked.chat:
        kind = "text_completion"
    return {"id": call.id, "object": kind, "created": call.created, "model": call.model}


def speculation(completion: Output) -> dict[str, Any]:
    """What each choice says about its speculation: trtllm-serve's figure, and the counters it is made of."""
    return {
        "avg_decoded_tokens_per_iter": completion.avg_decoded_tokens_per_iter,
        "spec_decode": asdict(completion.stats),
    }


def usage(prompt_tokens: int, completions: list[Output], n: int = 1) -> dict[str, Any]:
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


def scores(
    call: ApiCall, entries: list[TokenLogprobs], echoed: list[int]
) -> dict[str, Iterable[Any]]:
    """The members of a choice's `logprobs`: lists, whose items are made when they are taken. Of an echoed prompt the
    first token has no log-probability."""
    top, table = call.asked.top, call.tokenizer.token_bytes

    def raw(token: int) -> bytes:
        return table[token] if token < len(table) else b""  # padding rows of lm_head have no text

    def text(token: int) -> str:
        return raw(token).decode("utf-8", "replace")

    def scored(token: int, value: float) -> dict[str, Any]:
        return {"token": text(token), "bytes": list(raw(token)), "logprob": value}

    def others(entry: TokenLogprobs) -> Iterator[tuple[int, float]]:
        return zip(entry.ids[:top], entry.values[:top], strict=True)

    if call.asked.chat:
        return {
            "content": (
                {
                    **scored(entry.token, entry.logprob),
                    "top_logprobs": [scored(*other) for other in others(entry)],
                }
                for entry in entries
            )
        }
    texts = [text(token) for token in (*echoed[:1], *(entry.token for entry in entries))]
    none = [None] * len(echoed[:1])
    # several tokens may have one text, as parts of characters do: the likeliest keeps it
    tops = (
        {text(token): value for token, value in reversed([*others(entry)])} for entry in entries
    )
    return {
        "tokens": texts,
        "token_logprobs": [*none, *(entry.logprob for entry in entries)],
        "top_logprobs": itertools.chain(none, tops),
        "text_offset": itertools.accumulate(map(len, texts[:-1]), initial=0) if texts else [],
    }


def _json(value: Any) -> str:
    """Raises ValueError for NaN and infinity."""
    return json.dumps(value, allow_nan=False, separators=(",", ":"))


def _listed(items: Iterable[Any]) -> Iterator[str]:
    yield "["
    for at, item in enumerate(items):
        yield f",{_json(item)}" if at else _json(item)
    yield "]"


def encoded(parts: Iterable[str]) -> list[bytes]:
    """The parts in pieces of 64 KiB or a little more."""
    pieces: list[bytes] = []
    waiting: list[str] = []
    size = 0
    for part in parts:
        waiting.append(part)
        size += len(part)
        if size >= PIECE_CHARS:
            pieces.append("".join(waiting).encode())
            waiting, size = [], 0
    return [*pieces, "".join(waiting).encode()]


class ChoiceStream:
    """Chunks of one streamed choice: one per engine step that made text, then one with the finish reason."""

    def __init__(self, call: ApiCall, index: int) -> None:
        self.call, self.index = call, index
        self.prompt = call.requests[index].prompt_ids
        self.parser = ReplyParser(call.thinking) if call.asked.chat else None
        self.completion = Output("")
        self.opened = False

    def push(self, output: Output) -> str:
        """All chunks that follow from one engine step, as one string. A chat's first chunk, which names the role, comes
        with the first token: a client that takes it for that measures the right time."""
        asked, first, self.opened = self.call.asked, not self.opened, True
        output = shown(self.call, output)
        # only the counts are needed
        self.completion.add(replace(output, text="", logprobs=[], prompt_logprobs=[]))
        opening: list[dict[str, Any]] = []
        if first and asked.chat:
            opening = [{"delta": {"role": "assistant", "content": ""}}]
        if first and asked.echo:
            known = None if asked.top is None else self._scores(output.prompt_logprobs, self.prompt)
            opening = [{"text": self.call.tokenizer.decode(self.prompt), "logprobs": known}]
        chunks = list(self._texts(output))
        about = self._about(output, first)
        if output.finish_reason:
            called = (
                self.parser is not None and self.parser.calls and output.finish_reason == "stop"
            )
            reason = "tool_calls" if called else output.finish_reason
            chunks.append({**self._empty, "finish_reason": reason, **speculation(self.completion)})
        elif about and not chunks:  # tokens of an unfinished character are reported too
            chunks.append(self._empty)
        if chunks:
            chunks[0] |= about
        return "".join(map(self._chunk, opening + chunks))

    @property
    def _empty(self) -> dict[str, Any]:
        return {"text": ""} if self.parser is None else {"delta": {}}

    def _texts(self, output: Output) -> Iterator[dict[str, Any]]:
        """The text of a step, in the member of a chunk that it belongs to."""
        if self.parser is None:
            if output.text:
                yield {"text": output.text}
            return
        deltas = self.parser.push(output.text) if output.text else []
        for delta in [*deltas, *(self.parser.finish() if output.finish_reason else [])]:
            if delta.call is None:
                yield {"delta": {delta.kind: delta.text}}
            else:
                yield {"delta": {"tool_calls": [{"index": delta.index, **delta.call.to_dict()}]}}

    def _about(self, output: Output, first: bool) -> dict[str, Any]:
        """Members with the log-probabilities and ids of a step's tokens."""
        about: dict[str, Any] = {}
        if self.call.asked.return_token_ids:
            about = {"prompt_token_ids": self.prompt} if first else {}
            about["token_ids"] = output.token_ids
        if self.call.asked.top is not None and output.logprobs:
            about["logprobs"] = self._scores(output.logprobs, [])
        return about

    def _scores(self, entries: list[TokenLogprobs], echoed: list[int]) -> dict[str, Any]:
        return {name: list(items) for name, items in scores(self.call, entries, echoed).items()}

    def _chunk(self, choice: dict[str, Any]) -> str:
        shared = head(self.call, "chat.completion.chunk")
        value = {
            **shared,
            "choices": [{"index": self.index, "logprobs": None, "finish_reason": None, **choice}],
        }
        if (wanted := self.call.asked.usage_wanted) != "no":
            value["usage"] = (
                usage(len(self.prompt), [self.completion]) if wanted == "each" else None
            )
        return f"data: {_json(value)}\n\n"


def usage_chunk(call: ApiCall, completions: list[Output]) -> str:
    """The last chunk of a stream with `stream_options.include_usage`."""
    total = usage(call.prompt_tokens, completions, call.asked.n)
    return (
        f"data: {_json({**head(call, 'chat.completion.chunk'), 'choices': [], 'usage': total})}\n\n"
    )
