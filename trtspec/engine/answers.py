"""Responses of the two generation endpoints: whole JSON bodies, and chunks of streams."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict, replace
from typing import Any

from trtspec.checkpoint.chat_parser import Delta, ReplyParser, parse_reply
from trtspec.engine.prepare import ApiCall
from trtspec.engine.sequence import Output, Stats, TokenLogprobs

DONE = "data: [DONE]\n\n"  # the event that ends a stream
PIECE_CHARS = 1 << 16  # characters of JSON that are sent at a time


def response_parts(call: ApiCall, completions: list[Output]) -> Iterator[str]:
    """Yields the JSON response to a request that is not streamed, in consecutive parts of text.

    The parts are small, because other threads can run only between two calls of `json.dumps`.
    """
    body = call.body
    completions = [shown(call, completion) for completion in completions]
    # The closing brace is cut off, because further members of the object follow.
    opened_response = _json(head(call, "chat.completion"))[:-1]
    yield f'{opened_response},"choices":['
    separator = ""
    for index, (completion, request) in enumerate(zip(completions, call.requests, strict=True)):
        choice: dict[str, Any] = {"index": index}
        reason: str | None = completion.finish_reason
        if body.chat:
            message = parse_reply(completion.text, call.thinking)
            choice["message"] = message
            if message.get("tool_calls") and reason == "stop":
                reason = "tool_calls"
        else:
            text = completion.text
            if body.echo:
                text = call.tokenizer.decode(request.prompt_ids) + text
            choice["text"] = text
        if body.return_token_ids:
            choice |= {"prompt_token_ids": request.prompt_ids, "token_ids": completion.token_ids}
        choice |= {"finish_reason": reason} | speculation(completion)
        opened_choice = _json(choice)[:-1]
        yield f'{separator}{opened_choice},"logprobs":'
        separator = ","
        if body.top is None:
            yield "null}"
            continue
        entries = [*completion.prompt_logprobs, *completion.logprobs]
        echoed = request.prompt_ids if body.echo else []
        opening = "{"
        for name, items in scores(call, entries, echoed).items():
            yield f'{opening}"{name}":'
            opening = ","
            yield from _listed(items)
        yield "}}"
    yield f'],"usage":{_json(usage(call.prompt_tokens, completions, body.n))}}}'


def shown(call: ApiCall, output: Output) -> Output:
    """Returns the output that the client sees.

    If only the echoed prompt is wanted, that output has no generated token.
    """
    if call.body.shown:
        return output
    return replace(
        output, token_ids=[], text="", logprobs=[], finish_reason="length", stats=Stats()
    )


def head(call: ApiCall, object_type: str) -> dict[str, Any]:
    """Returns the first members of a response or of a stream's chunk: id, type, time, model.

    `object_type`: value of `object` in chats. Completions always have "text_completion".
    """
    if not call.body.chat:
        object_type = "text_completion"
    return {"id": call.id, "object": object_type, "created": call.created, "model": call.model}


def speculation(completion: Output) -> dict[str, Any]:
    """Returns the members of a choice about speculative decoding.

    avg_decoded_tokens_per_iter: trtllm-serve's measure, output tokens per engine step.
    spec_decode: counters of the request (see `Stats`).
    """
    return {
        "avg_decoded_tokens_per_iter": completion.avg_decoded_tokens_per_iter,
        "spec_decode": asdict(completion.stats),
    }


def usage(prompt_tokens: int, completions: list[Output], n: int = 1) -> dict[str, Any]:
    """Returns the member `usage`: numbers of prompt, generated and cached tokens.

    Each prompt counts once, although it has `n` choices. Cached tokens are the tokens of a prompt
    whose state came from the prefix cache when its first choice was computed.
    """
    generated = sum(len(completion.token_ids) for completion in completions)
    first_choices = completions[::n]
    cached = sum(completion.cached_tokens for completion in first_choices)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": generated,
        "total_tokens": prompt_tokens + generated,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


def scores(
    call: ApiCall, entries: list[TokenLogprobs], echoed: list[int]
) -> dict[str, Iterable[Any]]:
    """Returns the members of a choice's `logprobs` by name. Each is an iterable of list items.

    Args:
        call: the API call.
        entries: log-probabilities of the tokens, without the first token of an echoed prompt.
        echoed: ids of the prompt's tokens if the prompt is echoed, else []. The first one has no
            log-probability.
    """
    top = call.body.top
    table = call.tokenizer.token_bytes

    def raw(token: int) -> bytes:
        if token < len(table):
            return table[token]
        # lm_head may have more rows than the tokenizer has tokens. Such a token has no text.
        return b""

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
        # Several tokens may decode to the same text, as incomplete characters do. The likeliest
        # token comes last here, so that its value stays in the dict.
        likeliest_last = reversed([*others(entry)])
        return {text(token): value for token, value in likeliest_last}

    if call.body.chat:
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
    """Returns compact JSON. Raises ValueError if the value holds NaN or infinity."""
    return json.dumps(value, allow_nan=False, separators=(",", ":"))


def _listed(items: Iterable[Any]) -> Iterator[str]:
    """Yields a JSON list in parts of text, one item at a time."""
    yield "["
    separator = ""
    for item in items:
        yield separator + _json(item)
        separator = ","
    yield "]"


def encoded(parts: Iterable[str]) -> list[bytes]:
    """Joins parts of text, and returns the UTF-8 bytes in pieces of about 64 Ki characters."""
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
    """Writer of one choice's chunks in a stream.

    An engine step with text, token ids or log-probabilities to send gives one or several chunks.
    The last chunk has the finish reason.
    """

    def __init__(self, call: ApiCall, index: int) -> None:
        self.call = call
        self.index = index
        self.prompt = call.requests[index].prompt_ids
        self.parser = ReplyParser(call.thinking) if call.body.chat else None
        self.completion = Output("")
        self.opened = False

    def push(self, output: Output) -> str:
        """Returns the server-sent events of one engine step, "" if the step has nothing to send.

        The first chunk of a chat names the role. It is sent together with the first token, because
        clients take the time to the first chunk for the time to the first token.
        """
        body = self.call.body
        first = not self.opened
        self.opened = True
        output = shown(self.call, output)
        # Only token counts and statistics of the completion are read later. A copy of texts and
        # log-probabilities would cost memory.
        self.completion.add(replace(output, text="", logprobs=[], prompt_logprobs=[]))
        opening: list[dict[str, Any]] = []
        if first and body.chat:
            opening = [{"delta": {"role": "assistant", "content": ""}}]
        if first and body.echo:
            logprobs = None
            if body.top is not None:
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
            # A token may end inside a character. The step has no text, but ids and scores.
            chunks.append(self._empty)
        if chunks:
            chunks[0] |= metadata
        return "".join(map(self._chunk, opening + chunks))

    @property
    def _empty(self) -> dict[str, Any]:
        """The text member of a chunk without text."""
        return {"text": ""} if self.parser is None else {"delta": {}}

    def _texts(self, output: Output) -> Iterator[dict[str, Any]]:
        """Yields the text of a step as members of chunks: a text, or a delta of a chat."""
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
        """Returns the members with log-probabilities and ids of a step's tokens, if wanted.

        `first`: whether this is the choice's first step, which also reports the prompt's ids.
        """
        metadata: dict[str, Any] = {}
        if self.call.body.return_token_ids:
            if first:
                metadata["prompt_token_ids"] = self.prompt
            metadata["token_ids"] = output.token_ids
        if self.call.body.top is not None and output.logprobs:
            metadata["logprobs"] = self._scores(output.logprobs, [])
        return metadata

    def _scores(self, entries: list[TokenLogprobs], echoed: list[int]) -> dict[str, Any]:
        """Returns the member `logprobs` of a chunk. Takes the arguments of `scores`."""
        return {name: list(items) for name, items in scores(self.call, entries, echoed).items()}

    def _chunk(self, choice: dict[str, Any]) -> str:
        """Returns the server-sent event of a chunk with these members of the choice."""
        whole_choice = {"index": self.index, "logprobs": None, "finish_reason": None, **choice}
        value = {**head(self.call, "chat.completion.chunk"), "choices": [whole_choice]}
        usage_wanted = self.call.body.usage_wanted
        if usage_wanted != "no":
            counts = None
            if usage_wanted == "each":
                counts = usage(len(self.prompt), [self.completion])
            value["usage"] = counts
        return f"data: {_json(value)}\n\n"


def usage_chunk(call: ApiCall, completions: list[Output]) -> str:
    """Returns the event with the token counts of all choices, which ends a stream before DONE.

    Clients get it if they set `include_usage` or `continuous_usage_stats` in `stream_options`.
    """
    total = usage(call.prompt_tokens, completions, call.body.n)
    value = {**head(call, "chat.completion.chunk"), "choices": [], "usage": total}
    return f"data: {_json(value)}\n\n"
