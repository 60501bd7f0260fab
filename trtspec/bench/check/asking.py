"""Asks a server the exchanges of a check, and lets the target alone score the answers.

The server without speculation says how likely each token of an answer was. A request in the journal
is never asked again. A server that speculates is never asked for
log-probabilities: some releases die of it.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter
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
from trtspec.bench.check.rows import FAIL_NATS, MAX_TIPPED, form_looks, is_greedy, speculates
from trtspec.checkpoint.chat_parser import END_OF_TURN
from trtspec.checkpoint.writer import Journal
from trtspec.client.client import RAW, RequestFailed, complete, finite
from trtspec.client.exchange import LINES, Exchange, Score, ask, to_line
from trtspec.client.servers import DetectedServer
from trtspec.errors import UsageError
from trtspec.report import ProgressBar

if TYPE_CHECKING:
    from trtspec.checkpoint.tokenizer import KimiTokenizer

CROWD = 4  # times the concurrency: requests at once in the crowd


async def record(asker: Asker, prompts: Prompts) -> list[Exchange]:
    """Sends all prompts of a check to one server and returns the answers.

    The order is: first prompts, prompts made from their answers, a crowd at CROWD times the
    concurrency, some after it.
    """
    first = list(prompts.first())
    asker.bar.show(0, len(first))
    answers = await asker.all(first)
    together = CROWD * asker.concurrency
    warm = repeated(answers, "warm", "long", "limit", "text")
    later_warm = warm[prompts.samples // 3 :]
    second = [*prompts.second(answers), *later_warm]
    crowd = repeated(answers, "crowd", "text")[:together]
    later = repeated(answers, "later", "text")[: together // 2]
    total = sum(map(len, (first, second, crowd, later)))
    asker.bar.show(len(first), total)
    answers += await asker.all(second)
    answers += await asker.all(crowd, together)
    answers += await asker.all(later)
    return answers


# --- one server ---

MAX_FAILURES = 8  # in a row, after which nothing more is sent
BUSY_WAITS_S = (0, 1, 4, 16)  # before each attempt at a request that a busy server refuses
# fields with which an answer may end without an end of turn
OTHER_ENDS = ("stop", "stop_token_ids", "response_format", "tool_choice")


@dataclass(frozen=True)
class ExchangeRecord:
    """A record of the journal of a recording."""

    exchange: Exchange


@dataclass(kw_only=True)
class Asker:
    """One server and its answers so far.

    `known`: answers in the journal, by request. `timeout`: seconds.
    """

    client: httpx.AsyncClient
    server: DetectedServer
    tokenizer: KimiTokenizer
    concurrency: int = 4
    timeout: float = 120.0
    journal: Journal | None = None
    known: dict[bytes, Exchange] = field(default_factory=dict)
    bar: ProgressBar = field(default_factory=ProgressBar)
    requests: int = 0
    tokens: int = 0
    failures: int = 0  # in a row

    def use(self, journal: Journal) -> None:
        """Reads the answers in a journal.

        Raises UsageError if another server gave them, or if one is not an exchange.
        """
        self.journal = journal
        journal.answered_by({"server": self.server.identity})
        for entry in journal.entries(ExchangeRecord).values():
            line = to_line(request_of(entry.exchange))
            self.known[line] = entry.exchange

    async def all(self, wanted: Iterable[Exchange], concurrency: int = 0) -> list[Exchange]:
        """Returns the exchanges with their answers, in order. `concurrency`: 0 for the server's."""
        free = asyncio.Semaphore(concurrency or self.concurrency)

        async def ask_when_free(request: Exchange) -> Exchange:
            async with free:
                answer = await self._ask(request)
            return answer

        answers = await asyncio.gather(*map(ask_when_free, wanted))
        return list(answers)

    async def _ask(self, request: Exchange) -> Exchange:
        line = to_line(request)
        if request.run == "withheld":
            return request
        if line in self.known:
            return self.known[line]
        if self.failures >= MAX_FAILURES:
            return replace(request, error=f"not asked, after {MAX_FAILURES} failures in a row")
        for seconds in BUSY_WAITS_S:
            await asyncio.sleep(seconds)
            answer = await ask(self.client, self.server.model, request, self.timeout)
            if answer.status != 503:
                break
        answer = self._finished(answer)
        self.requests += 1
        self.tokens += answer.size
        self.bar.advance(1)
        if answer.error and not answer.refused:
            self.failures += 1
        else:
            self.failures = 0
        if answer.error:
            return answer
        self.known[line] = answer
        if self.journal:
            fields = LINES.dump_python(answer, mode="json", exclude_defaults=True)
            key = hashlib.sha256(line).hexdigest()
            # a thread waits for the disk, so that no arrival of a chunk does
            await asyncio.to_thread(self.journal.record, key, exchange=fields)
        return answer

    def _finished(self, answer: Exchange) -> Exchange:
        """Adds the text before any parser, and the end of turn if the server left it out."""
        ids = answer.token_ids
        if not ids:
            return answer
        tokenizer = self.tokenizer
        end = tokenizer.special_tokens.get(END_OF_TURN)
        ends = {end, *tokenizer.eos_ids}
        ended_turn = answer.finish == "stop" and answer.body.keys().isdisjoint(OTHER_ENDS)
        if ended_turn and ids[-1] not in ends and end:
            ids = (*ids, end)
        return replace(answer, token_ids=ids, raw=raw_text(tokenizer, answer, ids))


async def require_plain(asker: Asker, texts: Sequence[Exchange]) -> None:
    """Asks a few texts. Raises UsageError if the server that should not speculate does."""
    answers = await asker.all(texts[: asker.concurrency])
    if speculates(answers):
        message = (
            f"{asker.server.url} speculates, "
            "and the answers must be scored by a server that does not"
        )
        raise UsageError(
            message,
            "with `against` swap the URLs; else pass a server without the head",
        )


# --- the target scores the answers ---

TOP = 20  # alternatives that are asked for
MAX_CONTINUATIONS = 16  # tokens of an answer that are scored if each takes a request
# probes whose answers are scored beside those at temperature 0
SCORED = {*TRUNCATIONS, *SAMPLERS, "seed"}
# parameters whose effect the baseline server must show as well
COMPARED_PARAMETERS = ("min_tokens", "logit_bias", "stop_token_ids")
BEST_TOKEN = Score(0.0, (0.0,))  # of a token that the target chose too


async def score_answers(
    asker: Asker, candidate: Sequence[Exchange]
) -> tuple[list[Exchange], list[Exchange]]:
    """Returns `candidate` with scores, and the exchanges of the asker's server with scores.

    The server is asked the same prompts, every request that shows a fault in `candidate`, and every
    parameter.
    """
    baseline = await _baseline_answers(asker, candidate)
    exchanges = [*candidate, *baseline]
    # equal answers to equal prompts are scored once, and only if a row reads their scores
    distinct = {}
    for answer in exchanges:
        sampled = answer.kind in SCORED and bool(answer.token_ids)
        if sampled or is_greedy(answer):
            distinct[_identity(answer)] = answer
    texts = {answer.key: answer.token_ids for answer in baseline if answer.kind == "text"}
    scores: dict[Any, tuple[Score, ...]] = {}
    asker.bar.say(f"scoring {len(distinct)} answers")
    free = asyncio.Semaphore(asker.concurrency)
    method = asker.server.adapter.scores

    async def score(answer: Exchange) -> None:
        async with free:
            if method == "echo":
                scores[_identity(answer)] = await _confirmed(asker, answer)
            elif method == "continuations":
                baseline_ids = texts.get(answer.key, ())
                scores[_identity(answer)] = await _continued(asker, answer, baseline_ids)
            asker.bar.advance(1)

    await asyncio.gather(*map(score, distinct.values()))
    scored = [replace(answer, scores=scores.get(_identity(answer), ())) for answer in exchanges]
    return scored[: len(candidate)], scored[len(candidate) :]


async def _baseline_answers(asker: Asker, candidate: Sequence[Exchange]) -> list[Exchange]:
    """Asks the server that scores. Raises UsageError if it speculates."""
    texts = [answer for answer in candidate if answer.kind == "text" and answer.run == "ids"]
    text_requests = list(map(request_of, texts))
    await require_plain(asker, text_requests)
    sampled = [request_of(answer) for answer in candidate if answer.kind in SAMPLERS]
    baseline = await asker.all([*text_requests, *sampled[::4]])
    # a fault counts unless this server shows it too
    faults = {look.name for look in form_looks(candidate, candidate) if look.fault}
    compared = []
    for answer in candidate:
        request = request_of(answer)
        needed = answer.name in faults or answer.kind in COMPARED_PARAMETERS
        if needed and request not in text_requests:
            compared.append(request)
    baseline += await asker.all(compared)
    return baseline


def _identity(answer: Exchange) -> tuple[Any, ...]:
    return _prompt(answer), answer.token_ids


async def _echoed(asker: Asker, answer: Exchange) -> tuple[Score, ...]:
    """Scores all tokens by one prefill. () if a score is missing."""
    prompt = [*_prompt(answer), *answer.token_ids]
    body = {"prompt": prompt, "max_tokens": 0, "echo": True, "logprobs": TOP, "temperature": 0.0}
    logprobs = await _logprobs(asker, body)
    chosen = logprobs.get("token_logprobs") or []
    tops = logprobs.get("top_logprobs") or []
    pairs = list(zip(chosen, tops, strict=False))
    answer_pairs = pairs[len(_prompt(answer)) : len(prompt)]
    scores = [_score(logprob, top) for logprob, top in answer_pairs]
    known = tuple(score for score in scores if score)
    return known if len(known) == len(answer.token_ids) else ()


async def _confirmed(asker: Asker, answer: Exchange) -> tuple[Score, ...]:
    """Scores all tokens, and a failing token again as the last of a prefill.

    The better score counts.

    Rounding can tip a router in one prefill and not in another, which moves a sure token by several
    nats. More than MAX_TIPPED failing tokens are not explained by it.
    """
    scores = list(await _echoed(asker, answer))
    failing = [index for index, score in enumerate(scores) if score.nats_behind > FAIL_NATS]
    if not is_greedy(answer) or len(failing) > MAX_TIPPED:
        return tuple(scores)
    for index in failing:
        beginning = replace(answer, token_ids=answer.token_ids[: index + 1])
        for score in (await _echoed(asker, beginning))[-1:]:
            scores[index] = min(scores[index], score, key=attrgetter("nats_behind"))
    return tuple(scores)


async def _continued(
    asker: Asker, answer: Exchange, baseline_ids: tuple[int, ...]
) -> tuple[Score, ...]:
    """Scores up to MAX_CONTINUATIONS tokens from the first difference on.

    Each takes a continuation of one token. A sampled answer has no `baseline_ids`: its first tokens
    are scored, which are the least sure.
    """
    ids = answer.token_ids
    begin = len(commonprefix([ids, baseline_ids]))
    scores = [BEST_TOKEN] * begin
    for index in range(len(ids))[begin : begin + MAX_CONTINUATIONS]:
        prompt = [*_prompt(answer), *ids[:index]]
        body = {"prompt": prompt, "max_tokens": 1, "logprobs": TOP, "temperature": 0.0}
        logprobs = await _logprobs(asker, body)
        top = (logprobs.get("top_logprobs") or [None])[0] or {}
        text = asker.tokenizer.decode([ids[index]])
        score = _score(top.get(text, -math.inf), top)
        if score:
            scores.append(score)
    return tuple(scores)


async def _logprobs(asker: Asker, body: dict[str, Any]) -> dict[str, Any]:
    """The log-probabilities of a completion. {} if the request fails."""
    asker.requests += 1
    try:
        reply = await complete(asker.client, RAW, {"model": asker.server.model, **body})
        return reply["choices"][0].get("logprobs") or {}
    except RequestFailed:
        return {}


def _score(chosen: Any, top: Any) -> Score | None:
    """None if the response has no valid log-probabilities."""
    logprobs = map(finite, (top or {}).values())
    valid = [logprob for logprob in logprobs if logprob is not None]
    values = sorted(valid, reverse=True)[:TOP]
    if not values or chosen is None:
        return None
    # an unlisted token is far behind
    least = values[-1] - FAIL_NATS - 1
    return Score(max(float(chosen), least), tuple(values))


def _prompt(answer: Exchange) -> tuple[int, ...]:
    return answer.prompt_ids or tuple(answer.prompt)
