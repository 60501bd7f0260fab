"""Sends the requests of a check to a server, and scores the answers on the baseline server.

The baseline server serves the target without speculation. It says how likely each token of an
answer was. A request in the journal is never sent again. A server that speculates is never asked
for log-probabilities, because some releases crash.
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
from trtspec.bench.check.rows import (
    FAIL_NATS,
    MAX_TIPPED,
    is_greedy,
    speculates,
    standalone_judgements,
)
from trtspec.checkpoint.chat_parser import END_OF_TURN
from trtspec.checkpoint.writer import Journal
from trtspec.client.client import RAW, RequestFailed, complete, finite
from trtspec.client.exchange import LINES, Exchange, Score, ask, to_line
from trtspec.client.servers import DetectedServer
from trtspec.errors import UsageError
from trtspec.report import ProgressBar

if TYPE_CHECKING:
    from trtspec.checkpoint.tokenizer import KimiTokenizer

CROWD = 4  # requests sent at once in the crowd, in multiples of the concurrency


async def record(asker: Asker, prompts: Prompts) -> list[Exchange]:
    """Sends all requests of a check to one server and returns the answers.

    Requests that depend on no answer are sent first, followed by requests made from the answers.
    Texts are repeated last: many at once (the crowd), and some after the crowd.
    """
    first = list(prompts.first())
    asker.bar.show(0, len(first))
    answers = await asker.all(first)
    crowd_size = CROWD * asker.concurrency
    warm = repeated(answers, "warm", "long", "limit", "text")
    later_warm = warm[prompts.samples // 3 :]
    second = [*prompts.second(answers), *later_warm]
    crowd = repeated(answers, "crowd", "text")[:crowd_size]
    after_crowd = repeated(answers, "later", "text")[: crowd_size // 2]
    total = sum(map(len, (first, second, crowd, after_crowd)))
    asker.bar.show(len(first), total)
    answers += await asker.all(second)
    answers += await asker.all(crowd, crowd_size)
    answers += await asker.all(after_crowd)
    return answers


# --- one server and its journal ---

MAX_FAILURES = 8  # failures in a row after which nothing more is sent
BUSY_WAITS_S = (0, 1, 4, 16)  # before each attempt at a request that a busy server refuses
# request fields with which an answer may stop without an end-of-turn token
OTHER_ENDS = ("stop", "stop_token_ids", "response_format", "tool_choice")


@dataclass(frozen=True)
class ExchangeRecord:
    """Record in the journal of a check: one request with its answer."""

    exchange: Exchange


@dataclass(kw_only=True)
class Asker:
    """Sender of a check's requests to one server, with the answers so far.

    concurrency: number of requests that are open at once
    timeout: seconds after which an answer has failed
    journal: file in which every answer is recorded
    known: recorded answers by request, a JSON line
    requests: number of requests sent
    tokens: number of tokens in the answers
    failures: number of requests in a row that failed
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
    failures: int = 0

    def use(self, journal: Journal) -> None:
        """Takes the answers from a journal, to which new answers are appended.

        Raises UsageError if the answers are from another server, or if a record is not an exchange.
        """
        self.journal = journal
        journal.answered_by({"server": self.server.identity})
        for entry in journal.entries(ExchangeRecord).values():
            line = to_line(request_of(entry.exchange))
            self.known[line] = entry.exchange

    async def all(self, wanted: Iterable[Exchange], concurrency: int = 0) -> list[Exchange]:
        """Sends the requests and returns them with their answers, in the same order.

        `concurrency`: number of requests that are open at once, 0 for the usual number.
        """
        free = asyncio.Semaphore(concurrency or self.concurrency)

        async def ask_when_free(request: Exchange) -> Exchange:
            async with free:
                answer = await self._ask(request)
            return answer

        answers = await asyncio.gather(*map(ask_when_free, wanted))
        return list(answers)

    async def _ask(self, request: Exchange) -> Exchange:
        """Returns the request with its answer, from the journal or the server, and records it.

        After too many failures in a row, the request is returned with an error.
        """
        line = to_line(request)
        # the target or the release cannot answer a withheld request
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
        answer = self._with_raw_text(answer)
        self.requests += 1
        self.tokens += answer.size
        self.bar.advance(1)
        # a refusal shows that the server works
        if answer.error and not answer.refused:
            self.failures += 1
        else:
            self.failures = 0
        # a failed request is not recorded, so that it is sent again next time
        if answer.error:
            return answer
        self.known[line] = answer
        if self.journal:
            fields = LINES.dump_python(answer, mode="json", exclude_defaults=True)
            key = hashlib.sha256(line).hexdigest()
            # a thread waits for the disk, so that arrival times of other answers stay accurate
            await asyncio.to_thread(self.journal.record, key, exchange=fields)
        return answer

    def _with_raw_text(self, answer: Exchange) -> Exchange:
        """Returns the answer with its raw text, and with the end of turn if the server omitted it.

        The raw text is decoded from the token ids, without any parser.
        """
        ids = answer.token_ids
        if not ids:
            return answer
        tokenizer = self.tokenizer
        end_of_turn = tokenizer.special_tokens.get(END_OF_TURN)
        end_ids = {end_of_turn, *tokenizer.eos_ids}
        ended_turn = answer.finish == "stop" and answer.body.keys().isdisjoint(OTHER_ENDS)
        if ended_turn and ids[-1] not in end_ids and end_of_turn:
            ids = (*ids, end_of_turn)
        return replace(answer, token_ids=ids, raw=raw_text(tokenizer, answer, ids))


async def require_plain(asker: Asker, texts: Sequence[Exchange]) -> None:
    """Sends a few of the requests to a server that must not speculate.

    Raises UsageError if its answers have more than one token per verification step.
    """
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

TOP = 20  # log-probabilities that are requested for each token
MAX_CONTINUATIONS = 16  # tokens of an answer that are scored if each token takes a request
# probes whose answers are scored in addition to the answers at temperature 0
SCORED = {*TRUNCATIONS, *SAMPLERS, "seed"}
# parameters whose effect the baseline server must show as well
COMPARED_PARAMETERS = ("min_tokens", "logit_bias", "stop_token_ids")
BEST_TOKEN = Score(0.0, (0.0,))  # score of a token that the baseline server chose too


async def score_answers(
    asker: Asker, candidate: Sequence[Exchange]
) -> tuple[list[Exchange], list[Exchange]]:
    """Scores the answers by the server of `asker`, which does not speculate.

    Returns `candidate` with scores, and the baseline answers of the scoring server with scores. The
    scoring server answers the same texts, a quarter of the sampled requests, the requests with a
    faulty answer in `candidate`, and the requests with COMPARED_PARAMETERS.
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
    # "" if the server cannot score; all answers then keep empty scores
    method = asker.server.adapter.scores

    async def score(answer: Exchange) -> None:
        async with free:
            if method == "echo":
                scores[_identity(answer)] = await _confirmed_scores(asker, answer)
            elif method == "continuations":
                baseline_ids = texts.get(answer.key, ())
                scores[_identity(answer)] = await _scores_by_continuations(
                    asker, answer, baseline_ids
                )
            asker.bar.advance(1)

    await asyncio.gather(*map(score, distinct.values()))
    scored = [replace(answer, scores=scores.get(_identity(answer), ())) for answer in exchanges]
    return scored[: len(candidate)], scored[len(candidate) :]


async def _baseline_answers(asker: Asker, candidate: Sequence[Exchange]) -> list[Exchange]:
    """Returns the scoring server's answers to some requests of `candidate`.

    Raises UsageError if the scoring server speculates.
    """
    texts = [answer for answer in candidate if answer.kind == "text" and answer.run == "ids"]
    text_requests = list(map(request_of, texts))
    await require_plain(asker, text_requests)
    sampled = [request_of(answer) for answer in candidate if answer.kind in SAMPLERS]
    # a quarter of the samples suffices to see whether the scores are plausible
    baseline = await asker.all([*text_requests, *sampled[::4]])
    # a fault counts unless the scoring server shows it too
    judgements = standalone_judgements(candidate, candidate)
    faults = {judgement.name for judgement in judgements if judgement.fault}
    compared = []
    for answer in candidate:
        request = request_of(answer)
        needed = answer.name in faults or answer.kind in COMPARED_PARAMETERS
        if needed and request not in text_requests:
            compared.append(request)
    baseline += await asker.all(compared)
    return baseline


def _identity(answer: Exchange) -> tuple[Any, ...]:
    """Returns the token ids of the prompt and of the answer, which determine the scores."""
    return _prompt(answer), answer.token_ids


async def _scores_by_echo(asker: Asker, answer: Exchange) -> tuple[Score, ...]:
    """Scores all tokens of an answer by one prefill of prompt and answer.

    () if a score is missing.
    """
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


async def _confirmed_scores(asker: Asker, answer: Exchange) -> tuple[Score, ...]:
    """Scores all tokens of an answer, and failing greedy tokens twice.

    The second score is from a shorter prefill that ends at the token. The better score counts.
    Rounding can tip a router of experts in one prefill and not in another, which moves the
    log-probability of a token by several nats. Rounding does not explain more than MAX_TIPPED
    failing tokens.
    """
    scores = list(await _scores_by_echo(asker, answer))
    failing = [index for index, score in enumerate(scores) if score.nats_behind > FAIL_NATS]
    if not is_greedy(answer) or len(failing) > MAX_TIPPED:
        return tuple(scores)
    for index in failing:
        up_to_token = replace(answer, token_ids=answer.token_ids[: index + 1])
        # one score, or none if the request failed
        last_score = (await _scores_by_echo(asker, up_to_token))[-1:]
        for score in last_score:
            scores[index] = min(scores[index], score, key=attrgetter("nats_behind"))
    return tuple(scores)


async def _scores_by_continuations(
    asker: Asker, answer: Exchange, baseline_ids: tuple[int, ...]
) -> tuple[Score, ...]:
    """Scores tokens of an answer from its first difference to the baseline answer on.

    Returns scores of the equal tokens and of up to MAX_CONTINUATIONS further tokens. Each scored
    token takes a request for one token. A sampled answer has no `baseline_ids`, so its first tokens
    are scored.
    """
    ids = answer.token_ids
    first_difference = len(commonprefix([ids, baseline_ids]))
    scores = [BEST_TOKEN] * first_difference
    for index in range(len(ids))[first_difference : first_difference + MAX_CONTINUATIONS]:
        prompt = [*_prompt(answer), *ids[:index]]
        body = {"prompt": prompt, "max_tokens": 1, "logprobs": TOP, "temperature": 0.0}
        logprobs = await _logprobs(asker, body)
        match logprobs.get("top_logprobs"):
            case [dict(top), *_]:
                # the response lists tokens by their text
                text = asker.tokenizer.decode([ids[index]])
                score = _score(top.get(text, -math.inf), top)
                if score:
                    scores.append(score)
    return tuple(scores)


async def _logprobs(asker: Asker, body: dict[str, Any]) -> dict[str, Any]:
    """Sends a completion and returns its `logprobs` object. {} if the request fails."""
    asker.requests += 1
    try:
        reply = await complete(asker.client, RAW, {"model": asker.server.model, **body})
        logprobs = reply["choices"][0].get("logprobs")
        if isinstance(logprobs, dict):
            return logprobs
    except RequestFailed:
        pass  # an answer without scores is reported as not judged
    return {}


def _score(chosen: Any, top: Any) -> Score | None:
    """Returns the score of a token, from the JSON of a response.

    None if the response has no valid log-probabilities. `chosen`: log-probability of the token.
    `top`: log-probabilities of the likeliest tokens by text.
    """
    if not isinstance(top, dict) or not isinstance(chosen, int | float):
        return None
    logprobs = map(finite, top.values())
    valid = [logprob for logprob in logprobs if logprob is not None]
    top_logprobs = sorted(valid, reverse=True)[:TOP]
    if not top_logprobs:
        return None
    # an unlisted token, whose log-probability may be minus infinity, fails by any rule
    lowest = top_logprobs[-1] - FAIL_NATS - 1
    return Score(max(float(chosen), lowest), tuple(top_logprobs))


def _prompt(answer: Exchange) -> tuple[int, ...]:
    """Returns the token ids of the prompt as the server read it, or else as our template writes."""
    return answer.prompt_ids or tuple(answer.prompt)
