"""Bodies and stream chunks of the two endpoints. A chunk costs one json.dumps of its new text."""

from __future__ import annotations

import itertools
import json
import math
import time
import uuid
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from trtspec.checkpoint.chat_parser import Delta, ReplyParser, parse_reply
from trtspec.checkpoint.tokenizer import KimiTokenizer
from trtspec.engine.sequence import Completion, Output, Stats, TokenLogprobs

DONE = "data: [DONE]\n\n"
PIECE_CHARS = 1 << 16
NOTHING_ABOUT = '"logprobs":null'


@dataclass
class CompletionAnswer:
    """What all parts of one response share. `top` is how many alternatives a logprobs entry lists; `usage` says in
    which chunks of a stream the token counts stand; `token_ids` adds those of prompt and answer under vLLM's names;
    `echo` gives the prompt back before the answer, which is left out where it is not `shown`; every prompt has `n`
    choices."""

    tokenizer: KimiTokenizer
    model: str
    chat: bool
    n: int = 1
    logprobs: bool = False
    top: int = 0
    usage: Literal["no", "last", "each"] = "no"
    token_ids: bool = False
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
) -> Iterator[str]:
    """The response to a request that is not streamed, as JSON in parts; `prompts` are the token ids of each choice's
    prompt. Small parts: one call that makes them all would keep every other thread waiting."""
    yield f'{_json(answer.head(streaming=False))[:-1]},"choices":['
    scored = Scored(answer)
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
        if answer.token_ids:
            choice |= {"prompt_token_ids": prompt, "token_ids": completion.token_ids}
        choice |= {"finish_reason": reason} | speculation(completion)
        yield f'{"," if index else ""}{_json(choice)[:-1]},"logprobs":'
        if answer.logprobs:
            entries = [*completion.prompt_logprobs, *completion.logprobs]
            yield from scored.parts(entries, prompt if answer.echo else [])
        else:
            yield "null"
        yield "}"
    yield f'],"usage":{_json(usage(prompt_tokens, completions, answer.n))}}}'


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))


def encoded(parts: Iterable[str]) -> list[bytes]:
    """The parts in UTF-8, in pieces of 64 KiB or a little more."""
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


class Scored:
    """Writes log-probabilities as JSON, in the form of the endpoint. What it writes of a token is made once."""

    def __init__(self, answer: CompletionAnswer) -> None:
        self.answer = answer
        self._names: dict[int, str] = {}
        self._begun: dict[int, str] = {}

    def text(self, entries: list[TokenLogprobs], echoed: list[int]) -> str:
        return "".join(self.parts(entries, echoed))

    def parts(self, entries: list[TokenLogprobs], echoed: list[int]) -> Iterator[str]:
        """JSON in parts; of an echoed prompt the first token has no log-probability. Raises ValueError where one is
        not finite."""
        for entry in entries:
            if not math.isfinite(entry.logprob + sum(entry.values)):
                raise ValueError(f"the log-probabilities of token {entry.token} are not finite")
        if self.answer.chat:
            yield '{"content":['
            yield from _listed(map(self._chat_entry, entries))
            yield "]}"
            return
        tokens = [*echoed[:1], *(entry.token for entry in entries)]
        none = ["null"] * len(echoed[:1])
        yield '{"tokens":['
        yield from _listed(map(self._name, tokens))
        yield '],"token_logprobs":['
        yield from _listed(itertools.chain(none, (repr(entry.logprob) for entry in entries)))
        yield '],"top_logprobs":['
        yield from _listed(itertools.chain(none, map(self._top, entries)))
        yield '],"text_offset":['
        lengths = (len(self._text(token)) for token in tokens[:-1])
        yield from _listed(map(str, itertools.accumulate(lengths, initial=0) if tokens else ()))
        yield "]}"

    def _bytes(self, token: int) -> bytes:
        """A token's bytes; ids outside the vocabulary (padding rows of lm_head) have none."""
        table = self.answer.tokenizer.token_bytes
        return table[token] if token < len(table) else b""

    def _text(self, token: int) -> str:
        return self._bytes(token).decode("utf-8", "replace")

    def _name(self, token: int) -> str:
        """A token's text as JSON."""
        found = self._names.get(token)
        if found is None:
            found = self._names[token] = _json(self._text(token))
        return found

    def _begin(self, token: int) -> str:
        """A token's record in a chat, up to the value."""
        found = self._begun.get(token)
        if found is None:
            raw = _json(list(self._bytes(token)))
            found = self._begun[token] = f'{{"token":{self._name(token)},"bytes":{raw},"logprob":'
        return found

    def _chat_entry(self, entry: TokenLogprobs) -> str:
        begin, top = self._begin, self.answer.top
        pairs = zip(entry.ids[:top], entry.values[:top], strict=True)
        others = ",".join([f"{begin(token)}{value!r}}}" for token, value in pairs])
        return f'{begin(entry.token)}{entry.logprob!r},"top_logprobs":[{others}]}}'

    def _top(self, entry: TokenLogprobs) -> str:
        # several tokens may have one name, as parts of characters do: the likeliest keeps it
        top = self.answer.top
        named = dict(zip(map(self._name, reversed(entry.ids[:top])), reversed(entry.values[:top]), strict=True))
        return "{" + ",".join([f"{name}:{value!r}" for name, value in named.items()]) + "}"


def _listed(items: Iterable[str]) -> Iterator[str]:
    """The items, with a comma before each but the first."""
    for index, item in enumerate(items):
        yield f",{item}" if index else item


class ChoiceStream:
    """Chunks of one streamed choice: one per engine step that made text, then one with the finish reason."""

    def __init__(self, answer: CompletionAnswer, index: int, thinking: bool, prompt: list[int]) -> None:
        self.answer = answer
        self.prompt = prompt
        self.index = index
        self.parser = ReplyParser(thinking) if answer.chat else None
        self.completion = Completion("")
        self._scored = Scored(answer)
        self._opened = False
        head = json.dumps(answer.head(streaming=True), separators=(",", ":"))
        self._prefix = f'data: {head[:-1]},"choices":[{{"index":{index},'

    def push(self, output: Output) -> str:
        """All chunks that follow from one engine step, as one string. A chat's first chunk, which names the role, comes
        with the first token: a client that takes it for that measures the right time."""
        first, self._opened = not self._opened, True
        answer = self.answer
        if not answer.shown:
            output = replace(output, token_ids=[], text="", logprobs=[])
        self.completion.add(replace(output, text="", logprobs=[], prompt_logprobs=[]))  # its counts are what is needed
        about = self._about(output, first)
        chunks = [self._chunk('"delta":{"role":"assistant","content":""}')] if first and answer.chat else []
        if first and answer.echo:
            known = self._scored.text(output.prompt_logprobs, self.prompt) if answer.logprobs else "null"
            text = json.dumps(answer.tokenizer.decode(self.prompt))
            chunks.append(self._chunk(f'"text":{text}', f'"logprobs":{known}'))
        for fragment in self._fragments(output):
            chunks.append(self._chunk(fragment, about))
            about = NOTHING_ABOUT
        empty = '"delta":{}' if answer.chat else '"text":""'
        if output.finish_reason:
            called = self.parser is not None and self.parser.calls and output.finish_reason == "stop"
            reason = "tool_calls" if called else output.finish_reason
            rest = json.dumps({"finish_reason": reason} | speculation(self.completion))[1:-1]
            chunks.append(f"{self._prefix}{empty},{about},{rest}{self._suffix}")
        elif about != NOTHING_ABOUT:  # tokens that are no whole character yet are told all the same
            chunks.append(self._chunk(empty, about))
        return "".join(chunks)

    def _about(self, output: Output, first: bool) -> str:
        """Members with the log-probabilities and ids of a step's tokens."""
        answer = self.answer
        if not (answer.logprobs and output.logprobs or answer.token_ids):
            return NOTHING_ABOUT
        scores = self._scored.text(output.logprobs, []) if answer.logprobs and output.logprobs else "null"
        about = f'"logprobs":{scores}'
        if answer.token_ids:
            prompt = f'"prompt_token_ids":{json.dumps(self.prompt)},' if first else ""
            about = f'{prompt}"token_ids":{json.dumps(output.token_ids)},{about}'
        return about

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

    def _chunk(self, fragment: str, about: str = NOTHING_ABOUT) -> str:
        return f'{self._prefix}{fragment},{about},"finish_reason":null{self._suffix}'


def usage_chunk(answer: CompletionAnswer, prompt_tokens: int, completions: list[Completion]) -> str:
    """The last chunk of a stream with `stream_options.include_usage`."""
    value = answer.head(streaming=True) | {"choices": [], "usage": usage(prompt_tokens, completions, answer.n)}
    return f"data: {json.dumps(value)}\n\n"
