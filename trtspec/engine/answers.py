"""Answers of the two endpoints, whole and as chunks of a stream."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict, replace
from typing import Any

from trtspec.checkpoint.chat_parser import Delta, ReplyParser, parse_reply
from trtspec.engine.prepare import ApiCall
from trtspec.engine.sequence import Output, Stats, TokenLogprobs

DONE = "data: [DONE]\n\n"
PIECE_CHARS = 1 << 16


def body(call: ApiCall, completions: list[Output]) -> Iterator[str]:
    """Yields the JSON response to a request that is not streamed, in parts.

    The parts are small: one call that makes them all would keep every other thread waiting.
    """
    asked = call.asked
    completions = [shown(call, completion) for completion in completions]
    yield f'{_json(head(call, "chat.completion"))[:-1]},"choices":['
    separator = ""
    for index, (completion, request) in enumerate(zip(completions, call.requests, strict=True)):
        choice: dict[str, Any] = {"index": index}
        reason: str | None = completion.finish_reason
        if asked.chat:
            message = parse_reply(completion.text, call.thinking)
            choice["message"] = message
            if message.get("tool_calls") and reason == "stop":
                reason = "tool_calls"
        else:
            text = completion.text
            if asked.echo:
                text = call.tokenizer.decode(request.prompt_ids) + text
            choice["text"] = text
        if asked.return_token_ids:
            choice |= {"prompt_token_ids": request.prompt_ids, "token_ids": completion.token_ids}
        choice |= {"finish_reason": reason} | speculation(completion)
        yield f'{separator}{_json(choice)[:-1]},"logprobs":'
        separator = ","
        if asked.top is None:
            yield "null}"
            continue
        entries = [*completion.prompt_logprobs, *completion.logprobs]
        echoed = request.prompt_ids if asked.echo else []
        opening = "{"
        for name, items in scores(call, entries, echoed).items():
            yield f'{opening}"{name}":'
            opening = ","
            yield from _listed(items)
        yield "}}"
    yield f'],"usage":{_json(usage(call.prompt_tokens, completions, asked.n))}}}'


def shown(call: ApiCall, output: Output) -> Output:
    """The output as the client sees it. An echo alone has no generated token."""
    if call.asked.shown:
        return output
    return replace(
        output, token_ids=[], text="", logprobs=[], finish_reason="length", stats=Stats()
    )


def head(call: ApiCall, object_type: str) -> dict[str, Any]:
    """The members that all parts of one response share. `object_type`: the type if it is a chat."""
    if not call.asked.chat:
        object_type = "text_completion"
    return {"id": call.id, "object": object_type, "created": call.created, "model": call.model}


def speculation(completion: Output) -> dict[str, Any]:
    """The members of a choice about speculation: trtllm-serve's figure, and its counters."""
    return {
        "avg_decoded_tokens_per_iter": completion.avg_decoded_tokens_per_iter,
        "spec_decode": asdict(completion.stats),
    }


def usage(prompt_tokens: int, completions: list[Output], n: int = 1) -> dict[str, Any]:
    """Token counts of an answer of `n` choices per prompt. Each prompt counts once.

    Cached tokens are the prompt tokens that the first choice did not have to compute.
    """
    generated = sum(len(completion.token_ids) for completion in completions)
    cached = sum(completion.cached_tokens for completion in completions[::n])
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": generated,
        "total_tokens": prompt_tokens + generated,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


def scores(
    call: ApiCall, entries: list[TokenLogprobs], echoed: list[int]
) -> dict[str, Iterable[Any]]:
    """The members of a choice's `logprobs`: lists, whose items are made when they are taken.

    The first token of an echoed prompt has no log-probability.
    """
    top = call.asked.top
    table = call.tokenizer.token_bytes

    def raw(token: int) -> bytes:
        if token < len(table):
            return table[token]
        return b""  # padding rows of lm_head have no text

    def text(token: int) -> str:
        return raw(token).decode("utf-8", "replace")

    def scored(token: int, value: float) -> dict[str, Any]:
        return {"token": text(token), "bytes": list(raw(token)), "logprob": value}

    def others(entry: TokenLogprobs) -> Iterator[tuple[int, float]]:
        return zip(entry.ids[:top], entry.values[:top], strict=True)

    def of_chat(entry: TokenLogprobs) -> dict[str, Any]:
        item = scored(entry.token, entry.logprob)
        item["top_logprobs"] = [scored(*other) for other in others(entry)]
        return item

    def by_text(entry: TokenLogprobs) -> dict[str, float]:
        # Several tokens may have one text, as parts of characters do: the likeliest keeps it.
        likeliest_last = reversed([*others(entry)])
        return {text(token): value for token, value in likeliest_last}

    if call.asked.chat:
        return {"content": map(of_chat, entries)}
    first = echoed[:1]
    unscored = [None] * len(first)
    texts = [text(token) for token in first + [entry.token for entry in entries]]
    offsets: Iterable[int] = []
    if texts:
        offsets = itertools.accumulate(map(len, texts[:-1]), initial=0)
    return {
        "tokens": texts,
        "token_logprobs": [*unscored, *(entry.logprob for entry in entries)],
        "top_logprobs": itertools.chain(unscored, map(by_text, entries)),
        "text_offset": offsets,
    }


def _json(value: Any) -> str:
    """Raises ValueError for NaN and infinity."""
    return json.dumps(value, allow_nan=False, separators=(",", ":"))


def _listed(items: Iterable[Any]) -> Iterator[str]:
    yield "["
    separator = ""
    for item in items:
        yield separator + _json(item)
        separator = ","
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
            waiting = []
            size = 0
    return [*pieces, "".join(waiting).encode()]


class ChoiceStream:
    """Chunks of one streamed choice: one per engine step with text, then one with the reason."""

    def __init__(self, call: ApiCall, index: int) -> None:
        self.call = call
        self.index = index
        self.prompt = call.requests[index].prompt_ids
        self.parser = ReplyParser(call.thinking) if call.asked.chat else None
        self.completion = Output("")
        self.opened = False

    def push(self, output: Output) -> str:
        """All chunks that follow from one engine step, as one string.

        A chat's first chunk, which names the role, comes with the first token: a client that takes
        the one for the other measures the right time.
        """
        asked = self.call.asked
        first = not self.opened
        self.opened = True
        output = shown(self.call, output)
        # The completion so far needs counts, not texts.
        self.completion.add(replace(output, text="", logprobs=[], prompt_logprobs=[]))
        opening: list[dict[str, Any]] = []
        if first and asked.chat:
            opening = [{"delta": {"role": "assistant", "content": ""}}]
        if first and asked.echo:
            logprobs = None
            if asked.top is not None:
                logprobs = self._scores(output.prompt_logprobs, self.prompt)
            opening = [{"text": self.call.tokenizer.decode(self.prompt), "logprobs": logprobs}]
        chunks = list(self._texts(output))
        metadata = self._metadata(output, first)
        reason: str | None = output.finish_reason
        if reason:
            if reason == "stop" and self.parser is not None and self.parser.calls:
                reason = "tool_calls"
            chunks.append({**self._empty, "finish_reason": reason, **speculation(self.completion)})
        elif metadata and not chunks:
            # Tokens of an unfinished character are reported too.
            chunks.append(self._empty)
        if chunks:
            chunks[0] |= metadata
        return "".join(map(self._chunk, opening + chunks))

    @property
    def _empty(self) -> dict[str, Any]:
        return {"text": ""} if self.parser is None else {"delta": {}}

    def _texts(self, output: Output) -> Iterator[dict[str, Any]]:
        """Yields the text of a step, in the member of a chunk that it belongs to."""
        if self.parser is None:
            if output.text:
                yield {"text": output.text}
            return
        deltas: list[Delta] = []
        if output.text:
            deltas += self.parser.push(output.text)
        if output.finish_reason:
            deltas += self.parser.finish()
        for delta in deltas:
            if delta.call is None:
                yield {"delta": {delta.kind: delta.text}}
            else:
                yield {"delta": {"tool_calls": [{"index": delta.index, **delta.call.to_dict()}]}}

    def _metadata(self, output: Output, first: bool) -> dict[str, Any]:
        """Members with the log-probabilities and ids of a step's tokens."""
        metadata: dict[str, Any] = {}
        if self.call.asked.return_token_ids:
            if first:
                metadata["prompt_token_ids"] = self.prompt
            metadata["token_ids"] = output.token_ids
        if self.call.asked.top is not None and output.logprobs:
            metadata["logprobs"] = self._scores(output.logprobs, [])
        return metadata

    def _scores(self, entries: list[TokenLogprobs], echoed: list[int]) -> dict[str, Any]:
        return {name: list(items) for name, items in scores(self.call, entries, echoed).items()}

    def _chunk(self, choice: dict[str, Any]) -> str:
        whole_choice = {"index": self.index, "logprobs": None, "finish_reason": None, **choice}
        value = {**head(self.call, "chat.completion.chunk"), "choices": [whole_choice]}
        usage_wanted = self.call.asked.usage_wanted
        if usage_wanted != "no":
            counts = None
            if usage_wanted == "each":
                counts = usage(len(self.prompt), [self.completion])
            value["usage"] = counts
        return f"data: {_json(value)}\n\n"


def usage_chunk(call: ApiCall, completions: list[Output]) -> str:
    """The last chunk of a stream with `stream_options.include_usage`."""
    total = usage(call.prompt_tokens, completions, call.asked.n)
    value = {**head(call, "chat.completion.chunk"), "choices": [], "usage": total}
    return f"data: {_json(value)}\n\n"
