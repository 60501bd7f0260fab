"""An OpenAI-like server that cheats or is broken in one chosen way, always or in a share of its answers.

    python cheating_server.py PORT_FILE

One process plays every server: the path says which one, `/KIND,CHEAT,SHARE[,OPTION...]/v1/...`. KIND says which fields
a client sees: `reference` (spec_decode and an average on each choice, log-probabilities), `trtllm` (trtllm-serve's:
the average, usage in every chunk where it is asked for, no log-probabilities under speculation), `vllm` (counters in
/metrics), `plain` (no speculation), `unknown` (plain text alone: no usage either). Answers are a fixed function of the
conversation: what an honest target would write. The port is written to PORT_FILE once the socket listens.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

WORDS = [
    "the",
    "a",
    "of",
    "to",
    "in",
    "is",
    "that",
    "for",
    "on",
    "with",
    "as",
    "by",
    "this",
    "from",
    "or",
    "be",
    "are",
    "an",
    "it",
    "at",
    "not",
    "which",
    "have",
    "has",
    "was",
    "can",
    "will",
    "if",
    "when",
    "one",
    "all",
    "been",
    "their",
    "there",
    "would",
    "what",
    "so",
    "up",
    "out",
    "about",
    "who",
    "get",
    "make",
    "time",
    "just",
    "him",
    "know",
    "take",
    "people",
    "into",
    "year",
    "your",
    "some",
    "could",
    "them",
    "see",
    "other",
    "than",
    "then",
    "now",
    "look",
    "only",
    "come",
    "its",
    "over",
    "think",
    "also",
    "back",
    "after",
    "use",
    "two",
    "how",
    "our",
    "work",
    "first",
    "well",
    "way",
    "even",
    "new",
    "want",
    "because",
    "any",
    "these",
    "give",
    "day",
    "most",
    "module",
    "function",
    "class",
    "object",
    "string",
    "value",
    "list",
    "returns",
]
TEXT_CHEATS = ("text-altered", "text-emptied", "text-truncated", "stream-altered")
TOKEN_CHEATS = ("sampling", "different-tokens", "loops")
TOOL_CHEATS = ("tool-dropped", "tool-malformed", "tool-stream-altered", "tool-stream-dropped", "tool-unindexed",
               "tool-arguments", "follow-up-refused", "follow-up-empty", "follow-up-calls")  # fmt: skip
ACCEPTANCE_CHEATS = ("forced-constant", "forced-fractional", "claimed", "claimed-against-usage", "inflated-usage",
                     "collapse-burst", "collapse-warm", "collapse-long")  # fmt: skip
TIME_CHEATS = ("slow-later", "slower", "buffering", "pieces", "hang")
TRANSPORT_CHEATS = ("http-429", "http-503", "reset", "html", "cut-stream")
LONG_CHEATS = ("long-altered", "long-errors", "warm-truncated")
FORM_CHEATS = ("form-broken", "form-altered", "stop-ignored", "stop-altered", "not-utf8", "other-context",
               "system-refused", "finish-wrong", "features-error", "probe-kills")  # fmt: skip
CHEATS = (
    *TEXT_CHEATS, *TOKEN_CHEATS, *TOOL_CHEATS, *ACCEPTANCE_CHEATS, *TIME_CHEATS, *TRANSPORT_CHEATS, *LONG_CHEATS,
    *FORM_CHEATS,
)  # fmt: skip
NEAR_TIES = ("open_file", "sort_rows")  # tools to look up by whose end another letter is as likely
DRAFT = 3
STEP = 0.002  # seconds; `unhurried`, `buffering`, `pieces` and `slower` take ten times as long, `slower` thirty later
LATER, LATER_RARE = 24, 70  # answers after which servers get slow: behind the first pass of few and of many prompts
CROWD = 20  # requests at once that `collapse-burst` does not get over
LONG = 600  # words of a prompt from which `collapse-long` and the LONG_CHEATS begin
KEPT = 2000  # characters of it that `warm-truncated` reads when it is asked again
PIECES = 3
MOST_WORDS = 12_000  # longer prompts are refused
OWNERS = {"reference": "trtspec", "trtllm": "tensorrt_llm", "vllm": "vllm", "plain": "somebody", "unknown": "somebody"}


@dataclass
class Played:
    """One of the servers that the process plays."""

    kind: str
    cheat: str
    share: float
    options: frozenset[str]
    luck: random.Random = field(default_factory=lambda: random.Random(5))
    noise: random.Random = field(default_factory=lambda: random.Random(6))  # its own, so that luck is drawn per answer
    answers: int = 0
    busy: int = 0
    crowded: bool = False
    dead: bool = False
    seen: set[str] = field(default_factory=set)
    drafts: int = 0
    accepted: int = 0  # as vLLM counts them: also behind the end of an answer
    full: int = 0  # steps that accepted every draft

    def cheats(self, *names: str) -> bool:
        """Whether this answer is one of those."""
        return self.cheat in names and (self.share >= 1 or self.luck.random() < self.share)


@dataclass
class Made:
    """One answer before it is sent. A token is (text, runner-up, gap); `shown` are the tokens that a client sees."""

    tokens: list[tuple[str, str, float]]
    reasoned: int = 0
    calls: list[dict[str, Any]] = field(default_factory=list)
    finish: str = "stop"
    prompt_tokens: int = 0
    steps: list[int] = field(default_factory=list)
    altered: str = ""


class Refused(Exception):
    def __init__(self, status: int, body: str, kind: str = "application/json") -> None:
        super().__init__(body)
        self.status, self.body, self.kind = status, body, kind


def error(status: int, message: str) -> Refused:
    return Refused(status, json.dumps({"error": {"message": message, "code": status}}))


def written(key: str, limit: int, options: frozenset[str]) -> list[tuple[str, str, float]]:
    """What the target writes greedily; one gap in fifty is a near-tie. `swapped` takes the runner-up there, `defect`
    once where the target is sure of itself."""
    dice = random.Random(key)
    found = []
    for place in range(min(limit, 50 + dice.randrange(60))):
        pick = dice.randrange(len(WORDS))
        gap = 2e-4 if dice.random() < 0.02 else 0.3 + 3 * dice.random()
        best, second = WORDS[pick] + " ", WORDS[(pick + 17) % len(WORDS)] + " "
        if ("swapped" in options and gap < 1e-3) or ("defect" in options and place == 7 and gap > 1):
            best, second = second, best
            dice = random.Random(key + "swapped")  # another token, another continuation
        found.append((best, second, gap))
    return found


def noisy(tokens: list[tuple[str, str, float]], played: Played) -> list[tuple[str, str, float]]:
    """Rounding: gaps move by up to 3e-4 from pass to pass; `wild`: by 3 nats, which is none."""
    most = 3.0 if "wild" in played.options else 3e-4 if "rounding" in played.options else 0.0
    return [(text, second, gap + most * played.noise.random()) for text, second, gap in tokens]


def make(played: Played, body: dict[str, Any]) -> Made:
    """The answer of the target, and then what the cheat makes of its tokens."""
    messages = body["messages"]
    text = json.dumps(messages)
    words = len(text.split())
    if words > MOST_WORDS:
        raise error(400, "the prompt is longer than the context")
    if words > LONG and played.cheats("long-errors"):
        raise error(500, "CUDA error: an illegal memory access was encountered")
    if words > LONG and text in played.seen and played.cheats("warm-truncated"):
        text = text[-KEPT:]
        words = len(text.split())
    if any(message["role"] == "system" for message in messages) and played.cheats("system-refused"):
        raise error(400, "this template has no system messages")
    special = any(body.get(field) for field in ("tools", "response_format", "stop"))
    if special and played.cheats("features-error"):
        raise error(500, "CUDA error: an illegal memory access was encountered")
    if any(isinstance(message.get("content"), list) for message in messages):
        raise error(400, "this model reads text only")
    changing = {k: body[k] for k in ("frequency_penalty", "presence_penalty", "repetition_penalty", "bad") if k in body}
    if body.get("temperature"):
        changing["seed"] = body.get("seed")
    if changing and played.cheats("probe-kills"):
        played.dead = True
        raise ConnectionResetError
    key = text + json.dumps(body.get("chat_template_kwargs", {}), sort_keys=True)
    key += json.dumps(changing, sort_keys=True) if changing else ""
    if played.cheats("sampling"):
        key += str(played.luck.random())
    if played.cheats("different-tokens"):
        key += "other"
    limit = body.get("max_tokens", 128)
    tokens = written(key, limit, played.options)
    if body.get("min_tokens"):
        tokens = (tokens * 4)[: max(len(tokens), body["min_tokens"])]
    if played.cheats("loops") or "looping" in played.options:
        tokens = [(WORDS[i % 3] + " ", WORDS[9] + " ", 2.0) for i in range(len(tokens))]
    made = Made(tokens, prompt_tokens=words + 7 * played.cheats("other-context"))
    if played.cheats("not-utf8"):
        made.tokens = [("\ufffd", "a ", 2.0) for _ in tokens]
    thinks = body.get("chat_template_kwargs", {}).get("thinking", messages[-1]["role"] == "tool")
    if thinks and len(tokens) > 12:
        made.tokens = [*tokens[:8], ("</think>", WORDS[3], 2.0), *tokens[8 : limit - 1]]
        made.reasoned = 8
    if "thinks-long" in played.options and (body.get("tools") or body.get("response_format")):
        made = thinking_long(tokens, limit, words)
        if made.finish == "length":
            return made
    made.finish = "length" if len(made.tokens) >= limit else "stop"
    if body.get("response_format"):
        form = '{"name": "x", "count": 7}' if not played.cheats("form-broken") else '{"name": "x", "count'
        form = '{"name": "y", "count": 9}' if played.cheats("form-altered") else form
        made.tokens, made.reasoned, made.finish = [(form, WORDS[0], 3.0)], 0, "stop"
    elif body.get("tools"):
        answer_tools(played, messages, made)
    stop(played, body.get("stop") or [], made)
    if body.get("stop") and played.cheats("stop-altered"):
        made.tokens = [("bananas ", second, gap) for _, second, gap in made.tokens]
    if made.finish == "stop" and played.cheats("finish-wrong"):
        made.finish = "length"
    made.tokens = noisy(made.tokens, played)
    return made


def thinking_long(tokens: list[tuple[str, str, float]], limit: int, words: int) -> Made:
    """An answer behind 400 tokens of reasoning, or what of it the limit lets through."""
    reasoning, text = (tokens * 400)[:400], [("</think>", WORDS[3], 2.0), *tokens]
    shown = [*reasoning, *text][:limit]
    return Made(shown, min(limit, 400), finish="length" if limit <= 401 else "stop", prompt_tokens=words)


def answer_tools(played: Played, messages: list[dict[str, Any]], made: Made) -> None:
    """A call of the tool for a question, text behind its result."""
    if messages[-1]["role"] == "tool":
        if played.cheats("follow-up-refused"):
            raise error(400, "messages of the role tool are not supported")
        if played.cheats("follow-up-empty") or "silent" in played.options:
            made.tokens = made.tokens[: made.reasoned + 1]
        if not played.cheats("follow-up-calls"):
            return
    if "no-tools" in played.options:
        raise error(400, "tools need a parser")
    if "no-calls" in played.options:
        return
    name = messages[0]["content"].split("`")[1]
    arguments = json.dumps({"name": name})
    call = ("functions.lookup:0", "<|tool_call_argument_begin|>", '{"name": "', *spelled(name), '"}')
    made.tokens = [(text, WORDS[0], 3.0) for text in ("<|tool_calls_section_begin|>", *call)]
    if name in NEAR_TIES and "swapped" in played.options:
        arguments = json.dumps({"name": f"{name}s"})
    if name in NEAR_TIES:  # another letter is as likely as the end of the name
        made.tokens[-1] = ('"}', 's"}', 2e-5)
    made.reasoned, made.finish = 0, "tool_calls"
    if played.cheats("tool-dropped"):
        return
    arguments = json.dumps({"name": "another_name"}) if played.cheats("tool-arguments") else arguments
    arguments = arguments[:-3] if played.cheats("tool-malformed") else arguments
    made.calls = [{"id": "functions.lookup:0", "type": "function", "index": 0,
                   "function": {"name": "lookup", "arguments": arguments}}]  # fmt: skip


def spelled(name: str) -> list[str]:
    return [name[place : place + 4] for place in range(0, len(name), 4)]


def stop(played: Played, words: list[str], made: Made) -> None:
    text = "".join(token for token, _, _ in made.tokens)
    found = [text.index(word) for word in words if word in text]
    if not found or played.cheats("stop-ignored"):
        return
    room, kept = min(found), []
    for token, second, gap in made.tokens:
        if room <= 0:
            break
        kept.append((token[:room] if token != "</think>" else token, second, gap))
        room -= len(token)
    made.tokens, made.finish = kept, "stop"


def step_sizes(played: Played, key: str, made: Made, words: int) -> list[int]:
    """Tokens of each verification step after the prefill's one."""
    if played.kind == "plain" or "undrafted" in played.options:
        return [1] * (len(made.tokens) - 1)
    dice = random.Random(key + "draft")
    warm = key in played.seen
    played.seen.add(key)
    hopeless = played.cheat == "collapse-burst" and played.crowded
    hopeless = (
        hopeless or (played.cheat == "collapse-warm" and warm) or (played.cheat == "collapse-long" and words > LONG)
    )
    hopeless = hopeless and (played.share >= 1 or played.luck.random() < played.share)
    constant, fractional = played.cheats("forced-constant"), played.cheats("forced-fractional")
    left, found = len(made.tokens) - 1, []
    while left > 0:
        accepted = 0
        while accepted < DRAFT and dice.random() < 0.72 - 0.1 * accepted:
            accepted += 1
        accepted = 0 if hopeless else 2 if constant else 1 + (dice.random() < 0.78) if fractional else accepted
        found.append(min(accepted + 1, left))
        left -= found[-1]
        played.accepted += accepted
        played.full += accepted == DRAFT
    return found


def claims(played: Played, made: Made, tokens: int) -> dict[str, Any]:
    """What the choice says about speculation, the cheat's claims among it."""
    steps = made.steps
    accepted = sum(size - 1 for size in steps)
    played.drafts += len(steps)
    if played.kind not in ("reference", "trtllm"):
        return {}
    spec: dict[str, Any] = {"steps": len(steps), "drafted": DRAFT * len(steps), "accepted": accepted,
                            "histogram": [sum(s - 1 == j for s in steps) for j in range(DRAFT + 1)]}  # fmt: skip
    average = tokens / (len(steps) + 1)
    if played.cheats("claimed"):
        spec, average = {"steps": 0, "drafted": 0, "accepted": 3 * tokens, "histogram": None}, 4.0
    if played.cheats("claimed-against-usage"):
        spec = {**spec, "accepted": 3 * len(steps), "histogram": [0, 0, 0, len(steps)]}
        average = 1.37 * average
    found: dict[str, Any] = {"avg_decoded_tokens_per_iter": average}
    return found | {"spec_decode": spec} if played.kind == "reference" else found


def alter(played: Played, made: Made, streamed: bool) -> tuple[str, str]:
    """(reasoning, content) as they are shown."""
    texts = [token for token, _, _ in made.tokens if token != "</think>"]
    if made.calls or (made.tokens and made.tokens[0][0].startswith("<|tool_calls")):
        return "", ""
    reasoning, content = "".join(texts[: made.reasoned]), "".join(texts[made.reasoned :])
    stuffed = ["text-altered", *(["stream-altered"] if streamed else [])]
    stuffed += ["long-altered"] if made.prompt_tokens > LONG else []
    if played.cheats(*stuffed):
        content = content.replace(" ", " um ", 3)
    elif played.cheats("text-emptied"):
        content = ""
    elif played.cheats("text-truncated"):
        content = content[: len(content) // 2]
    return reasoning, content


def entry(token: str, second: str, gap: float) -> dict[str, Any]:
    top = [{"token": token, "logprob": -0.1}, {"token": second, "logprob": -0.1 - gap}]
    return {"token": token, "logprob": -0.1, "bytes": list(token.encode()), "top_logprobs": top}


async def respond(played: Played, body: dict[str, Any]) -> AsyncIterator[bytes]:
    """The response's bytes as they become ready, head and body. None in place of bytes would close the connection."""
    played.answers += 1
    transport(played)
    if played.cheats("hang"):
        await asyncio.sleep(3600)
    if body.get("logprobs") and "deadly" in played.options:
        os._exit(1)
    drafted = played.kind == "trtllm" and "undrafted" not in played.options
    if body.get("logprobs") and ("no-logprobs" in played.options or drafted):
        raise error(400, "logprobs are not available under speculation")
    if body.get("top_logprobs", 0) > 2 and "few-told" in played.options:
        raise error(400, "top_logprobs is at most 2")
    made = make(played, body)
    key = json.dumps(body["messages"])
    made.steps = step_sizes(played, key, made, len(key.split()))
    slower, later = (25, LATER) if played.share >= 1 else (80, LATER_RARE)
    slow = slower if played.answers > later and played.cheats("slow-later") else 1
    if played.cheat in ("buffering", "pieces", "slower") or "unhurried" in played.options:
        slow = 30 if played.cheat == "slower" and played.answers > later else 10
    tokens = len(made.tokens) * (3 if played.cheats("inflated-usage") else 1)
    usage = {} if played.kind == "unknown" else {"prompt_tokens": made.prompt_tokens, "completion_tokens": tokens}
    extra = claims(played, made, tokens)
    if body.get("stream"):
        async for piece in stream(played, body, made, usage, extra, slow):
            yield piece
        return
    await asyncio.sleep(STEP * slow * len(made.steps))
    reasoning, content = alter(played, made, streamed=False)
    message: dict[str, Any] = {"role": "assistant", "content": content, "tool_calls": made.calls}
    if reasoning:
        message["reasoning_content"] = reasoning
    choice = {"index": 0, "message": message, "finish_reason": made.finish, **extra}
    if body.get("logprobs"):
        choice["logprobs"] = {"content": [entry(*token) for token in made.tokens]}
    yield plain(200, sent(played, {"choices": [choice], "usage": usage}))


async def stream(
    played: Played, body: dict[str, Any], made: Made, usage: dict[str, int], extra: dict[str, Any], slow: int
) -> AsyncIterator[bytes]:
    """One chunk per step; the altered text is spread over the steps as the tokens are."""
    yield b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n"
    reasoning, content = alter(played, made, streamed=True)
    each = (body.get("stream_options") or {}).get("continuous_usage_stats")
    buffered, cut, clumped = played.cheats("buffering"), played.cheats("cut-stream"), played.cheats("pieces")
    sizes, held, done, factor = [1, *made.steps], b"", 0, usage.get("completion_tokens", 0) // max(1, len(made.tokens))
    for index, size in enumerate(sizes):
        await asyncio.sleep(STEP * slow)
        if cut and index == len(sizes) // 2:
            return
        before, done = done, done + size
        start, end = ((len(reasoning) + len(content)) * part // len(made.tokens) for part in (before, done))
        delta = {
            "reasoning_content": reasoning[start:end],
            "content": content[max(0, start - len(reasoning)) : max(0, end - len(reasoning))],
        }
        choice: dict[str, Any] = {"index": 0, "delta": {k: v for k, v in delta.items() if v}}
        if index == len(sizes) - 1:
            choice |= {"finish_reason": made.finish, **extra}
            held += b"".join(f"data: {sent(played, piece)}\n\n".encode() for piece in call_pieces(played, made))
        chunk: dict[str, Any] = {"choices": [choice]}
        if each and usage:
            chunk["usage"] = {**usage, "completion_tokens": done * factor}
        held += f"data: {sent(played, chunk)}\n\n".encode()
        if not buffered and not (clumped and (index + 1) % -(-len(sizes) // PIECES)):
            yield held
            held = b""
    yield held + f": a comment\n\ndata: {json.dumps({'choices': [], 'usage': usage})}\n\ndata: [DONE]\n\n".encode()


def call_pieces(played: Played, made: Made) -> list[dict[str, Any]]:
    """A call as engines stream it: the name, then its arguments bit by bit."""
    pieces: list[dict[str, Any]] = []
    for call in made.calls:
        name, arguments = call["function"]["name"], call["function"]["arguments"]
        if played.cheats("tool-stream-dropped"):
            continue
        if played.cheats("tool-stream-altered"):
            arguments = json.dumps({"name": "another_name"})
        cuts = [arguments[i : i + 5] for i in range(0, len(arguments), 5)]
        indexed = {} if played.cheats("tool-unindexed") else {"index": call["index"]}
        pieces.append({**indexed, "id": call["id"], "type": "function", "function": {"name": name, "arguments": ""}})
        pieces += [{**indexed, "function": {"arguments": cut}} for cut in cuts]
    return [{"choices": [{"index": 0, "delta": {"tool_calls": [piece]}}]} for piece in pieces]


def transport(played: Played) -> None:
    if played.dead:
        raise ConnectionResetError
    if played.cheats("http-429"):
        raise error(429, "too many requests")
    if played.cheats("http-503"):
        raise error(503, "the engine is down")
    if played.cheats("reset"):
        raise ConnectionResetError
    if played.cheats("html"):
        raise Refused(200, "<html><body>Bad gateway</body></html>", "text/html")


def plain(status: int, body: str, kind: str = "application/json") -> bytes:
    data = body.encode()
    head = f"HTTP/1.1 {status} X\r\nContent-Type: {kind}\r\nContent-Length: {len(data)}\r\nConnection: close\r\n\r\n"
    return head.encode() + data


JUNK: tuple[Any, ...] = (None, True, -1, 0, 10**400, 1e308, "", "\ud800", "x" * 50, [], [None], {}, {"a": []}, "NaN")


def fuzzed(value: Any, dice: random.Random) -> Any:
    """The same JSON with one place replaced, left out or wrapped."""
    if isinstance(value, dict) and value and dice.random() < 0.9:
        key = dice.choice(list(value))
        if dice.random() < 0.15:
            return {k: v for k, v in value.items() if k != key}
        return {**value, key: fuzzed(value[key], dice)}
    if isinstance(value, list) and value and dice.random() < 0.9:
        index = dice.randrange(len(value))
        return [fuzzed(item, dice) if i == index else item for i, item in enumerate(value)]
    return dice.choice((*JUNK, [value], {"value": value}))


def sent(played: Played, value: Any) -> str:
    """JSON as it is sent; fuzzing servers damage every second object, and now and then its text."""
    if "fuzz" not in played.options or played.luck.random() < 0.5:
        return json.dumps(value)
    text = json.dumps(fuzzed(value, played.luck))
    return text if played.luck.random() < 0.8 else text[: played.luck.randrange(len(text))] + "\x00"


def counters(played: Played) -> tuple[int, int]:
    """Steps and accepted drafts as vLLM's counters tell them. `claimed`: half of the steps, with every draft accepted;
    `claimed-against-usage`: only those steps that accepted every draft. Of all answers, whatever the share."""
    if played.cheat == "claimed":
        return played.drafts // 2, DRAFT * (played.drafts // 2)
    if played.cheat == "claimed-against-usage":
        return played.full, DRAFT * played.full
    return played.drafts, played.accepted


def get(played: Played, path: str) -> bytes:
    if path == "/v1/models":
        entry = {"id": "cheat", "object": "model", "owned_by": OWNERS[played.kind]}
        return plain(200, json.dumps({"data": [entry]}))
    if path == "/version":
        named = [word.removeprefix("version=") for word in played.options if word.startswith("version=")]
        return plain(200, json.dumps({"version": named[0] if named else "1.4.0rc1"}))
    if path == "/metrics" and played.kind == "vllm":
        drafts, accepted = counters(played)
        names = {"drafts": drafts, "draft_tokens": DRAFT * drafts, "accepted_tokens": accepted}
        return plain(
            200, "".join(f"vllm:spec_decode_num_{k}_total {float(v)}\n" for k, v in names.items()), "text/plain"
        )
    return plain(404, "{}")


servers: dict[str, Played] = {}


def played_at(name: str) -> Played:
    if name not in servers:
        kind, cheat, share, *options = name.split(",")
        seed = next((int(word.removeprefix("seed=")) for word in options if word.startswith("seed=")), 5)
        servers[name] = Played(kind, cheat, float(share), frozenset(options), random.Random(seed))
    return servers[name]


async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        method, target, _ = head.split("\r\n")[0].split(" ")
        length = next(
            (int(line.split(":")[1]) for line in head.split("\r\n") if line.lower().startswith("content-length")), 0
        )
        body = json.loads(await reader.readexactly(length)) if length else {}
        _, name, path = target.split("/", 2)
        await answer(played_at(name), method, f"/{path}", body, writer)
    except (ConnectionError, asyncio.IncompleteReadError):
        writer.transport.abort()
    finally:
        writer.close()


async def answer(played: Played, method: str, path: str, body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
    if method == "GET":
        writer.write(get(played, path))
        return
    played.busy += 1
    played.crowded = played.crowded or played.busy >= CROWD
    try:
        async for piece in respond(played, body):
            writer.write(piece)
            await writer.drain()
    except Refused as refused:
        writer.write(plain(refused.status, refused.body, refused.kind))
    finally:
        played.busy -= 1


async def main(port_file: Path) -> None:
    server = await asyncio.start_server(serve, "127.0.0.1", 0, limit=2**24)
    waiting = port_file.with_suffix(".tmp")
    waiting.write_text(str(server.sockets[0].getsockname()[1]))
    waiting.rename(port_file)
    async with server:
        await server.serve_forever()


if __name__ == "__main__":
    began = time.monotonic()
    asyncio.run(main(Path(sys.argv[1])))
