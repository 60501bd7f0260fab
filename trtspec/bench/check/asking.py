"""Asks a server the exchanges of a check, and the server without speculation how likely each token of an answer was.

What reached the journal is never asked again. A server that speculates is never asked for log-probabilities: some
releases die of it.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from os.path import commonprefix
from typing import TYPE_CHECKING, Any

import httpx

from trtspec.bench.check.evidence import SAMPLERS
from trtspec.bench.check.prompts import (
    TRUNCATIONS,
    Prompts,
    raw_text,
    repeated,
    request_of,
)
from trtspec.bench.check.rows import CERTAIN, form_looks, is_greedy, speculates
from trtspec.checkpoint.chat_parser import END_OF_TURN
from trtspec.checkpoint.writer import Journal
from trtspec.client.client import RAW, RequestFailed, complete, finite
from trtspec.client.exchange import LINES, Exchange, Score, ask, to_line
from trtspec.client.servers import DetectedServer
from trtspec.errors import UsageError
from trtspec.report import Bar

if TYPE_CHECKING:
    from trtspec.checkpoint.tokenizer import KimiTokenizer

MAX_FAILURES = 8  # in a row, after which nothing more is sent
BUSY_WAITS = (1, 4, 16)  # seconds before a request that a busy server refused is sent again
CROWD = 4  # times the concurrency: requests at once in the crowd
TOP = 20  # alternatives that are asked for
# fields with which an answer may end without an end of turn
OTHER_ENDS = ("stop", "stop_token_ids", "response_format", "tool_choice")
# whose answers are scored beside those at temperature 0
SCORED = {*TRUNCATIONS, *SAMPLERS, "seed"}
ONE_BY_ONE = 16  # tokens of an answer that are scored, where each takes a request
ASKED_AGAIN = ("min_tokens", "logit_bias", "stop_token_ids")
EQUAL = Score(0.0, (0.0,))


@dataclass(frozen=True)
class ExchangeRecord:
    """A record of the journal of a recording."""

    exchange: Exchange


@dataclass(kw_only=True)
class Asker:
    """One server, and what it has answered so far. `known` holds the answers in `journal`, by request."""

    client: httpx.AsyncClient
    server: DetectedServer
    tokenizer: KimiTokenizer
    concurrency: int = 4
    timeout: float = 120.0
    journal: Journal | None = None
    known: dict[bytes, Exchange] = field(default_factory=dict)
    bar: Bar = field(default_factory=Bar)
    requests: int = 0
    tokens: int = 0
    failures: int = 0  # in a row

    def use(self, journal: Journal) -> None:
        """Raises UsageError if another server gave the answers in the journal, or if one is not an exchange."""
        self.journal = journal
        journal.answered_by({"server": self.server.identity})
        for entry in journal.entries(ExchangeRecord).values():
            self.known[to_line(request_of(entry.exchange))] = entry.exchange

    async def all(self, wanted: Iterable[Exchange], concurrency: int = 0) -> list[Exchange]:
        """The exchanges with their answers, in order."""
        room = asyncio.Semaphore(concurrency or self.concurrency)

        async def one(asked: Exchange) -> Exchange:
            async with room:
                return await self._ask(asked)

        return list(await asyncio.gather(*map(one, wanted)))

    async def _ask(self, asked: Exchange) -> Exchange:
        line = to_line(asked)
        if asked.run == "withheld":
            return asked
        if line in self.known:
            return self.known[line]
        if self.failures >= MAX_FAILURES:
            return replace(asked, error=f"not asked, after {MAX_FAILURES} failures in a row")
        answer = await ask(self.client, self.server.model, asked, self.timeout)
        for seconds in BUSY_WAITS:
            if answer.status != 503:
                break
            await asyncio.sleep(seconds)
            answer = await ask(self.client, self.server.model, asked, self.timeout)
        found = self._finished(answer)
        self.failures = self.failures + 1 if found.error and not found.refused else 0
        self.requests += 1
        self.tokens += found.size
        self.bar.advance(1)
        if found.error:
            return found
        self.known[line] = found
        if self.journal:
            fields = LINES.dump_python(found, mode="json", exclude_defaults=True)
            key = hashlib.sha256(line).hexdigest()
            # a thread waits for the disk, so that no arrival of a chunk does
            await asyncio.to_thread(self.journal.record, key, exchange=fields)
        return found

    def _finished(self, found: Exchange) -> Exchange:
        """With the end of turn, which some servers leave out of the token ids, and the text before any parser."""
        ids, end = found.token_ids, self.tokenizer.special_tokens.get(END_OF_TURN)
        if not ids:
            return found
        ends = {end, *self.tokenizer.eos_ids}
        own_end = found.finish == "stop" and found.body.keys().isdisjoint(OTHER_ENDS)
        if own_end and ids[-1] not in ends and end:
            ids = (*ids, end)
        return replace(found, token_ids=ids, raw=raw_text(self.tokenizer, found, ids))


async def record(asker: Asker, prompts: Prompts) -> list[Exchange]:
    """Sends all prompts of a check to one server and returns the answers: first prompts, those made from their answers,
    a crowd at CROWD times the concurrency, some after it."""
    first = list(prompts.first())
    asker.bar.show(0, len(first))
    found = await asker.all(first)
    together = CROWD * asker.concurrency
    warm = repeated(found, "warm", "long", "limit", "text")
    second = [*prompts.second(found), *warm[prompts.samples // 3 :]]
    crowd = repeated(found, "crowd", "text")[:together]
    later = repeated(found, "later", "text")[: together // 2]
    asker.bar.show(len(first), sum(map(len, (first, second, crowd, later))))
    found += await asker.all(second)
    found += await asker.all(crowd, together)
    return [*found, *await asker.all(later)]


async def require_plain(asker: Asker, texts: Sequence[Exchange]) -> None:
    """Asks a few texts. Raises UsageError if the server that should not speculate does."""
    if speculates(await asker.all(texts[: asker.concurrency])):
        message = f"{asker.server.url} speculates, and the answers must be scored by a server that does not"
        raise UsageError(message, "swap the URLs, or serve the target there without its head")


# --- the target scores what was said ---


async def score_answers(
    asker: Asker, got: Sequence[Exchange]
) -> tuple[list[Exchange], list[Exchange]]:
    """`got` with scores, and the server's own exchanges: its answers to the same prompts, scored as well, and its
    answers to every request that shows a fault in `got`, and to every parameter."""
    texts = [request_of(one) for one in got if one.kind == "text" and one.run == "ids"]
    await require_plain(asker, texts)
    sampled = [request_of(one) for one in got if one.kind in SAMPLERS]
    own = await asker.all([*texts, *sampled[::4]])
    # the requests whose faults count unless the plain server shows them too
    faults = {look.name for look in form_looks(got, got) if look.fault}
    again = [request_of(one) for one in got if one.name in faults or one.kind in ASKED_AGAIN]
    own += await asker.all(one for one in again if one not in texts)
    both = [*got, *own]
    # equal answers to equal prompts are scored once
    distinct = {_identity(one): one for one in both if _judged(one)}
    plain = {one.key: one.token_ids for one in own if one.kind == "text"}
    scores: dict[tuple[Any, ...], tuple[Score, ...]] = {}
    asker.bar.say(f"scoring {len(distinct)} answers")
    room = asyncio.Semaphore(asker.concurrency)

    async def score(one: Exchange) -> None:
        async with room:
            if asker.server.adapter.scores == "echo":
                scores[_identity(one)] = await _echoed(asker, one)
            elif asker.server.adapter.scores == "continuations":
                scores[_identity(one)] = await _continued(asker, one, plain.get(one.key, ()))
            asker.bar.advance(1)

    await asyncio.gather(*map(score, distinct.values()))
    filled = [replace(one, scores=scores.get(_identity(one), ())) for one in both]
    return filled[: len(got)], filled[len(got) :]


def _judged(one: Exchange) -> bool:
    """Whether a row reads the scores of an answer."""
    return is_greedy(one) or (one.kind in SCORED and bool(one.token_ids))


def _identity(one: Exchange) -> tuple[Any, ...]:
    return _prompt(one), one.token_ids


async def _echoed(asker: Asker, one: Exchange) -> tuple[Score, ...]:
    """Scores of all tokens from one prefill."""
    prompt = [*_prompt(one), *one.token_ids]
    body = {"prompt": prompt, "max_tokens": 0, "echo": True, "logprobs": TOP, "temperature": 0.0}
    logprobs = await _logprobs(asker, body)
    lists = [logprobs.get(name) or [] for name in ("token_logprobs", "top_logprobs")]
    pairs = list(zip(*lists, strict=False))[len(_prompt(one)) : len(prompt)]
    found = [score for chosen, top in pairs if (score := _score(chosen, top))]
    return tuple(found) if len(found) == len(one.token_ids) else ()


async def _continued(asker: Asker, one: Exchange, plain: tuple[int, ...]) -> tuple[Score, ...]:
    """Scores of some tokens, each from a continuation of one token: of a sampled answer its first ones, which are the
    least sure, of another from its first difference on."""
    begin = len(commonprefix([one.token_ids, plain]))
    places = range(len(one.token_ids))[begin : begin + ONE_BY_ONE]
    found = [EQUAL] * begin
    for place in places:
        body = {
            "prompt": [*_prompt(one), *one.token_ids[:place]],
            "max_tokens": 1,
            "logprobs": TOP,
            "temperature": 0.0,
        }
        logprobs = await _logprobs(asker, body)
        top = (logprobs.get("top_logprobs") or [None])[0] or {}
        name = asker.tokenizer.decode([one.token_ids[place]])
        if score := _score(top.get(name, -math.inf), top):
            found.append(score)
    return tuple(found)


async def _logprobs(asker: Asker, body: dict[str, Any]) -> dict[str, Any]:
    asker.requests += 1
    try:
        reply = await complete(asker.client, RAW, {"model": asker.server.model, **body})
        return reply["choices"][0].get("logprobs") or {}
    except RequestFailed:
        return {}


def _score(chosen: Any, top: Any) -> Score | None:
    """None if these are not log-probabilities."""
    listed = map(finite, (top or {}).values())
    values = sorted((value for value in listed if value is not None), reverse=True)[:TOP]
    if not values or chosen is None:
        return None
    # a token that is not listed is far behind
    return Score(max(float(chosen), values[-1] - CERTAIN - 1), tuple(values))


def _prompt(one: Exchange) -> tuple[int, ...]:
    return one.prompt_ids or tuple(one.prompt)
