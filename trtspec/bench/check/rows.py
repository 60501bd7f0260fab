"""Judges the recordings of `trtspec check`: one row of the report per group of faults.

Every row is a pure function of one or two recordings. A `Judgement` says whether one exchange shows
one fault. A row fails if a judgement has a fault. Otherwise it is unmeasured if it has a fault that
no exchange could show, or if fewer than half of its judgements were possible. Every other row
passes. A fault that the baseline server shows for the same request never counts.
"""

from __future__ import annotations

import json
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from os.path import commonprefix
from statistics import median
from typing import Any, NamedTuple

from trtspec.bench.check.evidence import SAMPLERS, collect, mixed
from trtspec.bench.check.kinds import KINDS, NEVER_ASKED
from trtspec.bench.check.prompts import CALLED, PENALTIES, SAID, SEEDS, TRUNCATIONS, VALUES
from trtspec.checkpoint.chat_parser import parse_reply
from trtspec.client.exchange import Exchange


def judge(
    candidate: Sequence[Exchange],
    baseline: Sequence[Exchange],
    *,
    min_acceptance: float | None = None,
    exact: bool = False,
) -> list[GateRow]:
    """Returns the seven rows of the report, one per group of faults.

    Args:
        candidate: Exchanges of the server under test.
        baseline: Exchanges of the server without speculation. Empty without such a server.
        min_acceptance: Smallest number of tokens per verification step that passes.
        exact: Both servers compute in float32, so every difference fails.
    """
    all_exchanges = [*candidate, *baseline]
    answer_judgements = [*answers(candidate), *_streams(candidate)]
    # judgements, and measured figures in words, by row
    measurements: dict[str, tuple[Iterable[Judgement], str]] = {
        "answers": (answer_judgements, ""),
        "prompts": (prompts(candidate), ""),
        "greedy": greedy(candidate, baseline, exact),
        "sampled": sampled(candidate, baseline),
        "transport": (transport(candidate, all_exchanges), ""),
        "parameters": (parameters(candidate, baseline), ""),
        "acceptance": acceptance(candidate, min_acceptance),
    }
    excusable = baseline
    # without a baseline server, a refusal and other faults of a refused request do not count
    if not baseline:
        excusable = [exchange for exchange in candidate if exchange.refused]
    baseline_judgements = standalone_judgements(excusable, all_exchanges)
    excused = {
        (judgement.probe, judgement.name) for judgement in baseline_judgements if judgement.fault
    }
    skipped = not_asked(candidate)
    rows = []
    for name, (judgements, why) in measurements.items():
        rows.append(_row(name, judgements, why, excused, skipped))
    return rows


# --- every threshold of the gate ---

# A distance in nats is the target's log-probability of its best token, minus its log-probability of
# the token in the answer.
SUSPECT_NATS = 0.25  # an answer with a larger distance is suspect; rounding seldom causes one
FAIL_NATS = 2.0  # a larger distance fails by itself; bfloat16 reaches 1.1 if the target is unsure
MAX_TIPPED = 2  # failing tokens of an answer that rounding may explain
EXACT_NATS = 1e-3  # replaces FAIL_NATS with --exact; rounding in float32 is far smaller
ALPHA = 1.25e-4  # false-alarm rate of one test; a check makes eight tests at most
DOUBTFUL_P = 0.01  # p-value below which a penalty has an effect
CLEAR_P = 1e-12  # p-value below which an effect is so large that every correct server shows it
# A repeated text fails if fewer drafts are accepted than this share of its first answer's.
KEPT_DRAFTS = 0.8
# Long prompts fail if fewer drafts are accepted than this share of the short prompts'. The share is
# small because the texts differ.
COLLAPSED_DRAFTS = 0.05
COLLAPSE_STEPS = 8  # steps that suffice to see that next to no draft is accepted
MIN_STEPS = 50  # with fewer verification steps, acceptance is not judged
# Step sizes below this share of all steps are ignored: the end of an answer cuts its last step.
RARE_STEP_SHARE = 0.02
SPECULATES = 1.1  # tokens per step; a busy server without speculation also joins a few chunks
TOKENS_PER_ARRIVAL = 16  # more than any drafter yields in a step, so a proxy buffers the stream

NO_EFFECT = "no effect, and has one without speculation"
NO_SCORES = "needs the scores of the server without speculation (`score`, `against`)"
Name = tuple[str, str]  # key and run of an exchange
# Name of the fault that a probe can show, by row and probe. A probe is what a request tests.
PROBES = defaultdict[str, dict[str, str]](dict)
for fault_kind in KINDS:
    PROBES[fault_kind.row] |= dict.fromkeys(fault_kind.probes.split(), fault_kind.name)
GREEDY = PROBES["greedy"].keys()
REPEATS = ("warm", "crowd", "later")  # values of Exchange.run that are also names of probes


class Judgement(NamedTuple):
    """Judgement of one exchange by one probe.

    probe: name of what was tested, a key of PROBES[row]
    name: key and run of the exchange
    fault: description of the fault, "" if nothing is wrong, None if the exchange shows neither
    """

    probe: str
    name: Name
    fault: str | None = ""


@dataclass(frozen=True, kw_only=True)
class GateRow:
    """Row of the report: the verdict on one group of faults.

    status: pass, fail or unmeasured
    seen: number of judgements that were possible
    of: number of all judgements, including impossible ones
    faults: descriptions of the faults that count
    unmeasured: names of the faults that no exchange could show
    why: measured figures, or what was missing
    """

    name: str
    status: str
    seen: int = 0
    of: int = 0
    faults: tuple[str, ...] = ()
    unmeasured: tuple[str, ...] = ()
    why: str = ""


def _row(
    name: str,
    judgements: Iterable[Judgement],
    why: str,
    excused: set[tuple[str, Name]],
    skipped: Mapping[str, str],
) -> GateRow:
    """Returns the row of the report called `name`.

    Args:
        judgements: Judgements of the row. Judgements of other rows' probes are ignored.
        why: Measured figures in words, "" if there are none.
        excused: Probes and exchanges whose faults the baseline server shows too.
        skipped: Probes that were not asked, with the reason.
    """
    fault_names = PROBES[name]
    relevant = [judgement for judgement in judgements if judgement.probe in fault_names]
    judged = [judgement for judgement in relevant if judgement.fault is not None]
    seen = {fault_names[judgement.probe] for judgement in judged}
    # a fault that cannot reach a user needs no measurement
    seen |= {fault_name for probe, fault_name in fault_names.items() if probe in skipped}
    in_order = dict.fromkeys(fault_names.values())
    missing = [fault_name for fault_name in in_order if fault_name not in seen]
    faults = []
    for probe, exchange_name, fault in judged:
        if fault and (probe, exchange_name) not in excused:
            key, run = exchange_name
            faults.append(f"{fault_names[probe]}: {key} ({run}): {fault}")
    status = "pass"
    if missing or 2 * len(judged) < len(relevant):
        status = "unmeasured"
    if faults:
        status = "fail"
    if missing and judged:
        why = f"{why}; not seen: {', '.join(missing)}".removeprefix("; ")
    return GateRow(
        name=name,
        status=status,
        seen=len(judged),
        of=len(relevant),
        faults=tuple(faults),
        unmeasured=tuple(missing),
        why=why,
    )


def not_asked(candidate: Sequence[Exchange]) -> dict[str, str]:
    """Reasons why a fault cannot reach a user, by the probe that searches for it.

    The target lacks a feature, or the server refuses the request with a 4xx status.
    """
    skipped = {exchange.kind: "refused by the server" for exchange in candidate if exchange.refused}
    for exchange in candidate:
        if exchange.run == "withheld":
            skipped[exchange.kind] = exchange.error or ""
    return skipped


def standalone_judgements(
    exchanges: Sequence[Exchange], known: Sequence[Exchange]
) -> list[Judgement]:
    """Returns all judgements that need no other server to compare with.

    `known`: all exchanges that may hold the tokens of a message.
    """
    return [
        *answers(exchanges),
        *_streams(exchanges),
        *prompts(exchanges),
        *_choices(exchanges),
        *_seeds(exchanges),
        *transport(exchanges, known),
        *_length_limits(exchanges),
        *_penalties(exchanges, DOUBTFUL_P),
    ]


# --- row `answers`: requests without an answer, and streams that arrive at once ---


def answers(exchanges: Sequence[Exchange]) -> Iterator[Judgement]:
    """Judges that every request is answered, or refused because of its parameter."""
    for exchange in exchanges:
        # a server may honestly refuse a parameter that it does not support
        honest_refusal = exchange.refused and exchange.kind in PROBES["parameters"]
        if exchange.run != "withheld" and not honest_refusal:
            fault = ""
            if not exchange.answered:
                fault = exchange.error or "the answer has no finish_reason"
            yield Judgement("request", exchange.name, fault)


def _streams(exchanges: Sequence[Exchange]) -> Iterator[Judgement]:
    """Judges that the tokens of a long stream arrive while they are generated."""
    streams = [
        exchange for exchange in exchanges if exchange.answered and exchange.body.get("stream")
    ]
    # a short stream may rightly arrive in one read
    long_streams = [exchange for exchange in streams if exchange.size > TOKENS_PER_ARRIVAL]
    # a proxy holds back every stream; if only some are late, they waited for a busy machine
    fault = ""
    if all(exchange.size > TOKENS_PER_ARRIVAL * exchange.arrivals for exchange in long_streams):
        fault = "came at once: a proxy or the server holds streams back"
    for exchange in long_streams:
        yield Judgement("streams", exchange.name, fault)


# --- row `prompts`: prompt tokens that the server read ---


def prompts(exchanges: Sequence[Exchange]) -> Iterator[Judgement]:
    """Judges that the server reads every prompt as our own chat template writes it."""
    for exchange in exchanges:
        if exchange.answered and exchange.prompt:
            yield Judgement(exchange.kind, exchange.name, _prompt_fault(exchange))


def _prompt_fault(exchange: Exchange) -> str | None:
    """Returns the fault if the server read other prompt tokens than expected, "" if the same.

    Compares the token ids, or their number if the server returns no ids. None if the server returns
    neither.
    """
    expected = tuple(exchange.prompt)
    ids = exchange.prompt_ids
    count = len(ids) or exchange.prompt_tokens
    if not count:
        return None
    ids_agree = not ids or ids == expected
    if count == len(expected) and ids_agree:
        return ""
    return f"read {count} tokens that are not the {len(expected)} of the chat template"


# --- row `greedy`: answers at temperature 0 ---


def is_greedy(exchange: Exchange) -> bool:
    """Returns whether this is an answer at temperature 0 with token ids.

    An answer that a grammar or another request parameter may have changed does not count.
    """
    # the greedy probes ask at temperature 0 and without a grammar
    changed = exchange.kind not in GREEDY or exchange.body.get("stop")
    return exchange.answered and bool(exchange.token_ids) and not changed


def greedy(
    candidate: Sequence[Exchange], baseline: Sequence[Exchange], exact: bool
) -> tuple[list[Judgement], str]:
    """Judges that every greedy token is as likely as the target's best, apart from rounding.

    Returns a judgement of each greedy answer, and the largest distances in words. `exact`: both
    servers compute in float32.
    """
    greedy_answers = [exchange for exchange in candidate if is_greedy(exchange)]
    regrets = _regrets(greedy_answers)
    baseline_regrets = _regrets(exchange for exchange in baseline if is_greedy(exchange))
    limit = FAIL_NATS
    if exact:
        limit = EXACT_NATS
    suspects = sum(nats > SUSPECT_NATS for nats in regrets)
    baseline_suspects = sum(nats > SUSPECT_NATS for nats in baseline_regrets)
    # each suspect fails if there are more than the baseline's rounding explains
    if more_often(suspects, len(regrets), baseline_suspects, len(baseline_regrets)):
        limit = min(limit, SUSPECT_NATS)
    tipped: list[Exchange] = []
    if not exact:
        tipped = _tipped_by_rounding(greedy_answers, limit)
    judgements = [
        _judge_greedy(exchange, limit) for exchange in greedy_answers if exchange not in tipped
    ]
    # answers that rounding tipped pass, whatever their distance
    judgements += [_judge_greedy(exchange, math.inf) for exchange in tipped]
    if not regrets:
        return judgements, NO_SCORES
    rounding = max(baseline_regrets, default=0.0)
    why = f"at most {max(regrets):.2f} of {limit:g} nats behind, without speculation {rounding:.2f}"
    if tipped:
        same_prompt = sum(exchange.key == tipped[0].key for exchange in greedy_answers)
        why += f", in {len(tipped)} of {same_prompt} answers to {tipped[0].key}"
    return judgements, why


def _tipped_by_rounding(greedy_answers: Sequence[Exchange], limit: float) -> list[Exchange]:
    """Returns all answers with a distance above `limit` nats if rounding explains them.

    [] if rounding does not explain all of them. Rounding can tip a router of experts at a near-tie,
    which moves a token by several nats. It affects few tokens, and a minority of the answers to one
    prompt.
    """
    failing = [exchange for exchange in greedy_answers if regret(exchange) > limit]
    failing_keys = {exchange.key for exchange in failing}
    same_prompt = [exchange for exchange in greedy_answers if exchange.key in failing_keys]
    token_counts = []
    for exchange in failing:
        token_counts.append(sum(score.nats_behind > limit for score in exchange.scores))
    one_prompt = len(failing_keys) == 1
    minority = 2 * len(failing) < len(same_prompt)
    if one_prompt and minority and max(token_counts) <= MAX_TIPPED:
        return failing
    return []


def _regrets(exchanges: Iterable[Exchange]) -> list[float]:
    """Regrets in nats of the scored answers. Equal answers to one request count once.

    The regret of an answer is the largest distance between the target's best token and its token.
    """
    distinct = {_identity(exchange): exchange for exchange in exchanges if exchange.scores}
    return list(map(regret, distinct.values()))


def _judge_greedy(exchange: Exchange, limit: float) -> Judgement:
    """Judges that no token of an answer is more than `limit` nats behind the target's best.

    The fault is None without scores.
    """
    # a repeated request tests the repetition, whatever its first request tested
    probe = exchange.run if exchange.run in REPEATS else exchange.kind
    fault: str | None = None
    if exchange.scores:
        fault = ""
    nats = regret(exchange)
    if nats > limit:
        token = [score.nats_behind for score in exchange.scores].index(nats)
        fault = f"token {token} is {nats:.2f} of {limit:g} nats behind the target's best"
    return Judgement(probe, exchange.name, fault)


def _identity(exchange: Exchange) -> tuple[str, tuple[int, ...]]:
    """Returns the key of the request and the token ids of the answer."""
    return exchange.key, exchange.token_ids


def regret(exchange: Exchange) -> float:
    """Largest distance in nats between the target's best token and the answer's token.

    0.0 if the answer has no scores.
    """
    return max((score.nats_behind for score in exchange.scores), default=0.0)


def more_often(
    count: int, total: int, baseline_count: int, baseline_total: int, alpha: float = ALPHA
) -> bool:
    """Returns whether the share `count` of `total` is significantly above the baseline's share.

    Uses Fisher's exact test, one-sided. `alpha`: rate of false alarms of the test.
    """
    events = count + baseline_count
    # ways to deal the events to the two groups, with at least `count` in the first group
    extreme_ways = 0
    for first_group in range(count, min(total, events) + 1):
        ways = math.comb(total, first_group)
        extreme_ways += ways * math.comb(baseline_total, events - first_group)
    all_ways = math.comb(total + baseline_total, events)
    return extreme_ways / all_ways < alpha


# --- row `sampled`: answers at higher temperatures ---


def sampled(
    candidate: Sequence[Exchange], baseline: Sequence[Exchange]
) -> tuple[list[Judgement], str]:
    """Judges that answers at a temperature are drawn from the target's distribution.

    An answer must repeat with its seed, and differ between seeds and between choices. Returns the
    judgements, and the evidence in words.
    """
    judgements = [*_choices(candidate), *_seeds(candidate)]
    tests = collect(candidate)
    if not any(exchange.scores for exchange in candidate):
        return judgements, NO_SCORES
    # the evidence is a log e-value, which an exact sampler exceeds at a rate of ALPHA at most
    limit = -math.log(ALPHA)
    total = mixed(tests)
    baseline_total = mixed(collect(baseline))
    least_with_fault = min(test.with_fault for test in tests)
    why = f"log e {total:.1f} of {limit:.1f}, without speculation {baseline_total:.1f}, "
    why += f"a faulty sampler {least_with_fault:.1f} or more"
    for probe in SAMPLERS:
        probe_tests = [test for test in tests if test.probe == probe]
        top_test = max(probe_tests, key=lambda test: test.log_e)
        evidence = min(total, top_test.log_e)
        fault: str | None = ""
        if evidence > limit:
            fault = f"tokens are not drawn from the target's distribution, as with {top_test.fault}"
        # the tokens are enough if every fault would exceed the limit
        would_show = max(evidence, min(test.with_fault for test in probe_tests)) > limit
        # a baseline that fails the same test shows that the scores are wrong
        if baseline_total > limit or not would_show:
            fault = None
        judgements.append(Judgement(probe, ("sampled", "all"), fault))
    return judgements, why


def _choices(exchanges: Sequence[Exchange]) -> Iterator[Judgement]:
    """Judges that a request with `n` returns `n` choices, and that most choices differ.

    The requests have a high temperature.
    """
    for exchange in exchanges:
        if exchange.kind == "n" and exchange.answered:
            choices = exchange.choices
            distinct_count = len({*choices})
            fault = ""
            too_few = len(choices) < exchange.body["n"]
            if too_few or distinct_count <= len(choices) // 2:
                fault = f"{distinct_count} different choices"
            yield Judgement("n", exchange.name, fault)


def _seeds(exchanges: Sequence[Exchange]) -> Iterator[Judgement]:
    """Judges that a seed repeats its answer, and that the answers to different seeds differ.

    Each seed, and None for no seed, was sent twice at a high temperature. Yields nothing if an
    answer is missing.
    """
    seeded = [exchange for exchange in exchanges if exchange.kind == "seed" and exchange.token_ids]
    # without all answers, the rules below do not apply
    if len(seeded) != 2 * len(SEEDS):
        return
    by_seed = defaultdict[Any, list[tuple[int, ...]]](list)
    for exchange in seeded:
        by_seed[exchange.body["seed"]].append(exchange.token_ids)
    repeating = {seed for seed, token_ids in by_seed.items() if len({*token_ids}) < len(token_ids)}
    first_answers = {token_ids[0] for token_ids in by_seed.values()}
    fault = ""
    # one seed suffices: rounding in a busy batch may change the others
    if not repeating - {None}:
        fault = "no seed repeats its answer"
    if None in repeating:
        fault = "answers without a seed are equal"
    if len(first_answers) < 2:
        fault = "all seeds give one answer"
    for exchange in seeded:
        yield Judgement("seed", exchange.name, fault)


# --- row `transport`: messages that the server parsed from tokens ---

Parts = list[str]  # of a message: reasoning, text, and each call as `name(arguments)`


def transport(exchanges: Sequence[Exchange], known: Sequence[Exchange]) -> Iterator[Judgement]:
    """Judges that a message, whole or streamed, is what the Kimi parser reads from its tokens.

    Also judges the finish reason, the usage and the ids of tool calls. `known`: exchanges with raw
    text, for messages that the server sends without their tokens.
    """
    raws = defaultdict[str, list[Exchange]](list)
    for exchange in known:
        if exchange.raw:
            raws[exchange.key].append(exchange)
    id_counts = Counter[str]()
    for exchange in exchanges:
        id_counts.update(call["id"] for call in exchange.calls)
    for exchange in exchanges:
        if not exchange.answered:
            continue
        name = exchange.name
        yield Judgement("finish", name, _finish_fault(exchange))
        if exchange.token_ids and exchange.completion_tokens:
            yield Judgement("usage", name, _usage_fault(exchange))
        # a raw completion has a text only, a chat also has reasoning and calls
        if "prompt" in exchange.body:
            raw = exchange.raw
            fault = ""
            if raw and exchange.content.strip() not in raw:
                fault = "the text is not that of its tokens"
            yield Judgement(exchange.kind, name, fault)
            continue
        if exchange.calls:
            yield Judgement("ids", name, _call_id_fault(exchange, id_counts))
        if exchange.kind in FORMS:
            yield from _forced_form(exchange)
        else:
            yield from _message(exchange, raws[exchange.key])


def _finish_fault(exchange: Exchange) -> str:
    """Returns how the finish_reason contradicts the answer, "" if it does not."""
    limit = _limit(exchange)
    finish = exchange.finish
    size = exchange.size
    if finish == "length" and 0 < size < limit:
        return f"length after {size} of {limit} tokens"
    if _stopped_late(exchange):
        return f"stop after {limit} tokens, although the limit ended the answer"
    if exchange.calls and finish not in ("tool_calls", "length"):
        return f"{finish} after calls"
    return ""


def _usage_fault(exchange: Exchange) -> str:
    """Returns the fault if the reported number of tokens is wrong, "" if it is right.

    The numbers may differ by one because a server may leave out the end of turn.
    """
    reported = exchange.completion_tokens or 0
    tokens = len(exchange.token_ids)
    return f"counts {reported} tokens of {tokens}" if abs(tokens - reported) > 1 else ""


def _stopped_late(exchange: Exchange) -> bool:
    """Returns whether the finish_reason is "stop" although max_tokens ended the answer.

    The recorded ids then have one token more: the end of turn that check itself appended.
    """
    tokens_received = len(exchange.token_ids) - 1
    reached_limit = exchange.completion_tokens == _limit(exchange) == tokens_received
    return exchange.finish == "stop" and reached_limit


def _limit(exchange: Exchange) -> int:
    """Number of tokens that the request allows, summed over its choices."""
    body = exchange.body
    limit: int = body.get("max_tokens", 2**31) * body.get("n", 1)
    return limit


def _call_id_fault(exchange: Exchange, id_counts: Counter[str]) -> str:
    """Returns what is wrong with the ids of an answer's tool calls, "" if nothing is.

    `id_counts`: number of calls in all answers by id.
    """
    if exchange.unindexed:
        return "fragments of calls without an index"
    call_ids = [call["id"] for call in exchange.calls]
    for call_id in call_ids:
        # the model itself may write an id several times
        allowed = max(1, exchange.raw.count(call_id))
        if not call_id or call_ids.count(call_id) > allowed:
            return "calls without an id of their own"
    for call_id in call_ids:
        # Kimi's ids count the calls of a conversation, so two answers may share one
        if id_counts[call_id] > 1 and not call_id.startswith("functions."):
            return f"the id {call_id} is that of several answers"
    return ""


def _forced_form(exchange: Exchange) -> Iterator[Judgement]:
    """Judges that an answer has the form that its request forces, such as a JSON schema."""
    probe = exchange.kind
    fault: str | None = ""
    if not _has_form(exchange):
        fault = f"{_excerpt(_parts(exchange))} does not have the form that the request forces"
        if _cut_short(exchange):
            fault = None
    yield Judgement(probe, exchange.name, fault)
    # the forced JSON has characters that span several tokens
    if probe == "json":
        yield Judgement("characters", exchange.name, fault)


def _message(exchange: Exchange, raws: Sequence[Exchange]) -> Iterator[Judgement]:
    """Judges that a chat's text, reasoning and calls agree with its raw text.

    `raws`: answers to the same prompt with their raw text. The fault is None if no raw text is
    known or the answer was cut short. It is also None if the answer lacks the call or reasoning
    that the probe is about.
    """
    parts = _parts(exchange)
    candidates = _expected(exchange, raws)
    expected = parts
    if candidates:
        expected = candidates[0]
    reasoning, text, *calls = expected
    probes = [exchange.kind]
    if reasoning:
        probes.append("reasoning")
    if not text.isascii():
        probes.append("characters")
    # a call or reasoning that did not occur cannot show that it is parsed correctly
    occurred = {"call": calls, "reasoning": reasoning}.get(exchange.kind, candidates)
    same = any(_agrees(parts, candidate) for candidate in candidates)
    agrees = same or _explained_by_tie(exchange, raws)
    fault: str | None = None
    if candidates and not _cut_short(exchange):
        if not agrees:
            fault = f"{_excerpt(parts)} is not {_excerpt(expected)}"
        elif occurred:
            fault = ""
    for probe in probes:
        yield Judgement(probe, exchange.name, fault)


# probes whose requests force the form of the answer
FORMS = ("picture", "json", "arguments", "spoken", "calls")
# answers that show nothing if they end at the limit
CUT_SHORT = {"picture", "json", "arguments", "spoken", "call", "follow-up", "stop", "stops"}


def _has_form(exchange: Exchange) -> bool:
    """Returns whether the answer has the form that its request forces.

    The requests are in bench/check/prompts.py.
    """
    probe = exchange.kind
    parts = _parts(exchange)
    forced = _parsed(SAID)
    if probe == "picture":
        return bool(exchange.content or exchange.reasoning)
    if probe == "json":
        value = _object(exchange)
        return value == {"name": value.get("name"), **VALUES}
    if probe == "arguments":
        call = _call(CALLED["function"])
        return parts == ["", "", call]
    if probe == "spoken":
        return parts[1:] == forced[1:]
    # the forced call repeats until the limit, so the first two calls are equal
    return parts[2:4] == 2 * forced[2:]


def _cut_short(exchange: Exchange) -> bool:
    """Returns whether the answer ended at max_tokens, before it could show its form."""
    return exchange.finish == "length" and exchange.kind in CUT_SHORT


def _object(exchange: Exchange) -> dict[str, Any]:
    """Returns the answer's text as a JSON object. {} if it is not a JSON object."""
    try:
        value = json.loads(exchange.content)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def _expected(exchange: Exchange, raws: Sequence[Exchange]) -> list[Parts]:
    """Returns the messages that the server could rightly send, parsed from raw text.

    If the answer itself has no raw text, every answer to the same prompt (`raws`) gives a message.
    A message ends before the first stop string of the request.
    """
    sources = [exchange] if exchange.raw else raws
    messages = []
    for source in sources:
        parts = _parsed(source.raw)
        reasoning, text = parts[:2]
        stops = exchange.body.get("stop", ())
        stop_positions = [text.find(stop) for stop in stops if stop in text]
        if stop_positions:
            parts = [reasoning, text[: min(stop_positions)]]
        messages.append(parts)
    return messages


def _parsed(raw: str) -> Parts:
    """Returns reasoning, text and calls of a message, as Kimi's parser reads them from raw text."""
    message = parse_reply(raw, False)
    functions = [call["function"] for call in message.get("tool_calls", ())]
    reasoning = message.get("reasoning_content", "")
    return [reasoning, message["content"] or "", *map(_call, functions)]


def _parts(exchange: Exchange) -> Parts:
    """Returns reasoning, text and calls of the message that the server sent."""
    return [exchange.reasoning, exchange.content, *map(_call, exchange.calls)]


def _call(function: Mapping[str, str]) -> str:
    """Returns a tool call as `name(arguments)`, with the white space of its JSON normalized."""
    arguments = function["arguments"]
    # arguments that are not JSON are compared as they are
    with suppress(ValueError):
        arguments = json.dumps(json.loads(arguments), ensure_ascii=False)
    return f"{function['name']}({arguments})"


def _agrees(parts: Parts, expected: Parts) -> bool:
    """Returns whether a message has the expected reasoning, text and calls.

    A server may drop white space at the ends of a part, but not add any.
    """
    if len(parts) != len(expected):
        return False
    pairs = zip(parts, expected, strict=True)
    return all(text in other and text.strip() == other.strip() for text, other in pairs)


def _excerpt(parts: Parts) -> str:
    """Returns the beginnings of a message's parts, for an error message."""
    return " ".join(repr(part[:60]) for part in parts if part) or "nothing"


def _explained_by_tie(exchange: Exchange, raws: Sequence[Exchange]) -> bool:
    """Returns whether a near-tie explains why a message differs from answers to the same prompt.

    False if the message comes with its own tokens, which need no comparison.
    """
    if exchange.raw:
        return False
    text = exchange.reasoning + exchange.content
    return any(_differs_at_tie(text, other) for other in raws)


def _differs_at_tie(text: str, other: Exchange) -> bool:
    """Returns whether `text` first differs from another answer at a near-tie.

    At a near-tie, the two likeliest tokens are at most FAIL_NATS apart.
    """
    other_text = "".join(_parsed(other.raw)[:2])
    same_characters = len(commonprefix([text, other_text]))
    # The index of the token is estimated from the share of equal characters, so the tokens around
    # it count too.
    token = len(other.token_ids) * same_characters // max(1, len(other_text))
    for score in other.scores[max(0, token - 2) : token + 2]:
        close_to_best = score.top[0] - FAIL_NATS
        close_count = sum(logprob >= close_to_best for logprob in score.top)
        if close_count > 1:
            return True
    return False


# --- row `parameters`: effects of request parameters ---


def parameters(candidate: Sequence[Exchange], baseline: Sequence[Exchange]) -> Iterator[Judgement]:
    """Judges that each request parameter has an effect, if it has one on the baseline server.

    max_tokens and TRUNCATIONS are judged without the baseline server. A server may instead refuse
    the parameter.
    """
    baseline_answers = {exchange.kind: exchange for exchange in baseline if exchange.answered}
    seed_regrets = [regret(exchange) for exchange in candidate if exchange.kind == "seed"]
    # regret in nats of answers to the same prompt that no parameter limits to the best token
    free_regret = median([0.0, *seed_regrets])
    yield from _length_limits(candidate)
    clear = {judgement.probe for judgement in _penalties(baseline, CLEAR_P) if not judgement.fault}
    for judgement in _penalties(candidate, DOUBTFUL_P):
        # a missing effect is a fault only if the baseline's effect is beyond doubt
        if judgement.fault and judgement.probe not in clear:
            judgement = judgement._replace(fault=None)
        yield judgement
    for exchange in candidate:
        probe = exchange.kind
        if probe in TRUNCATIONS:
            yield Judgement(probe, exchange.name, _truncation_fault(exchange, free_regret))
        elif exchange.answered and probe in baseline_answers:
            fault = _parameter_fault(exchange, baseline_answers[probe])
            yield Judgement(probe, exchange.name, fault)


def _truncation_fault(exchange: Exchange, free_regret: float) -> str | None:
    """Returns NO_EFFECT if top_k, top_p or min_p did not limit the answer to best tokens.

    Returns "" if it did, and None without scores. `free_regret`: regret in nats of answers without
    the parameter. If it is small, None is returned because no effect could be seen.
    """
    if not exchange.scores or free_regret <= FAIL_NATS:
        return None
    return NO_EFFECT if regret(exchange) > FAIL_NATS else ""


def _parameter_fault(exchange: Exchange, baseline_answer: Exchange) -> str | None:
    """Returns NO_EFFECT if the answer ignores a parameter that the baseline answer obeys.

    Returns "" if both obey it, and None if the baseline answer ignores it.
    """
    if not _obeys_parameters(baseline_answer):
        return None
    return "" if _obeys_parameters(exchange) else NO_EFFECT


def _penalties(exchanges: Sequence[Exchange], alpha: float) -> Iterator[Judgement]:
    """Judges that a low penalty gives significantly more repeated tokens than a high penalty.

    Only penalties that were sent with both values are judged. `alpha`: rate of false alarms of the
    test.
    """
    repeats: dict[Name, tuple[int, int]] = {}  # numbers of repeated tokens and of all tokens
    for exchange in exchanges:
        ids = exchange.token_ids
        if ids:
            size = len(ids)
            distinct_count = len({*ids})
            repeats[exchange.name] = size - distinct_count, size
    for penalty in PENALTIES:
        more = (penalty, "more")
        less = (penalty, "less")
        if more in repeats and less in repeats:
            fault = NO_EFFECT
            if more_often(*repeats[more], *repeats[less], alpha):
                fault = ""
            yield Judgement(penalty, more, fault)
            yield Judgement(penalty, less, fault)


def _length_limits(exchanges: Sequence[Exchange]) -> Iterator[Judgement]:
    """Judges that no answer is longer than max_tokens."""
    for exchange in exchanges:
        if exchange.answered:
            size = exchange.size
            limit = _limit(exchange)
            fault = ""
            if size > limit and not _stopped_late(exchange):
                fault = f"{size} tokens, {limit} are allowed"
            yield Judgement("max_tokens", exchange.name, fault)


def _obeys_parameters(exchange: Exchange) -> bool:
    """Returns whether an answer obeys min_tokens, stop_token_ids and logit_bias of its request."""
    body = exchange.body
    ids = exchange.token_ids
    # the end of turn may be missing from the ids
    long_enough = len(ids) >= body.get("min_tokens", 0) - 1
    stop_ids = body.get("stop_token_ids", ())
    forbidden_ids = map(int, body.get("logit_bias", ()))  # every bias of a check is -100
    # only the last token may be a stop token
    stops_at_once = {*ids[:-1]}.isdisjoint(stop_ids)
    return long_enough and stops_at_once and {*ids}.isdisjoint(forbidden_ids)


# --- row `acceptance`: tokens per verification step ---


def acceptance(candidate: Sequence[Exchange], floor: float | None) -> tuple[list[Judgement], str]:
    """Judges the tokens per verification step, and returns the judgements with a figure in words.

    The tokens per step must reach `floor`, vary between steps, and be as many if a text is repeated
    or long. There are no judgements with too few steps, or if no draft is accepted and the tokens
    per step reach `floor`.
    """
    texts = [exchange for exchange in candidate if exchange.kind == "text" and exchange.answered]
    first_answers = [exchange for exchange in texts if exchange.run in ("ids", "stream")]
    tokens, steps = _tokens_and_steps(first_answers)
    wanted = ""
    if floor:
        wanted = f", {floor:g} tokens per step are wanted"
    if steps < MIN_STEPS:
        return [], f"{steps} steps are shown, {MIN_STEPS} are needed{wanted}"
    tokens_per_step = tokens / steps
    why = f"{tokens_per_step:.2f} tokens per step{wanted}"
    faults: dict[str, str | None] = {"floor": ""}
    if tokens_per_step < (floor or 0):
        faults["floor"] = why
    elif not speculates(first_answers):
        return [], f"{why}: no draft was accepted"
    faults |= _repetition_faults(candidate)
    long = [exchange for exchange in candidate if exchange.kind == "long" and exchange.run == "ids"]
    collapse = _acceptance_drop(
        long, first_answers, "for short texts", COLLAPSED_DRAFTS, COLLAPSE_STEPS
    )
    faults["long"] = collapse
    step_sizes = Counter[int]()
    for exchange in first_answers:
        # the last step is left out, because the end of the answer cuts it
        pairs = zip(exchange.counted, exchange.counted[1:-1], strict=False)
        step_sizes.update(after - before for before, after in pairs)
    forced = forced_sizes(step_sizes)
    faults["forced"] = f"every step brought {forced} tokens" if forced else ""
    judgements = [Judgement(probe, ("text", probe), fault) for probe, fault in faults.items()]
    return judgements, why


def _repetition_faults(candidate: Sequence[Exchange]) -> dict[str, str | None]:
    """Compares acceptance in repeated texts with their first answers.

    Returns the fault of each repetition: from a warm cache, in a crowd and after the crowd. A fault
    is "" if acceptance is as high, and None with too few steps. Long prompts are also compared
    separately: they are few, and lose most if a drafter ignores the cached prefix.
    """
    first_answers = {}
    for exchange in candidate:
        if exchange.run == "ids" and exchange.steps:
            first_answers[_identity(exchange)] = exchange
    faults: dict[str, str | None] = {}
    for run in REPEATS:
        in_run = [exchange for exchange in candidate if exchange.run == run]
        # acceptance depends on the text, so only equal answers are compared
        repeats = [exchange for exchange in in_run if _identity(exchange) in first_answers]
        long = [exchange for exchange in repeats if exchange.kind != "text"]
        faults[run] = None
        for group in (long, repeats):
            earlier = [first_answers[_identity(exchange)] for exchange in group]
            fault = _acceptance_drop(group, earlier, "at first", KEPT_DRAFTS, MIN_STEPS // 2)
            faults[run] = faults[run] or fault
    return faults


def speculates(exchanges: Sequence[Exchange]) -> bool:
    """Returns whether the answers have clearly more than one token per verification step."""
    tokens, steps = _tokens_and_steps(exchanges)
    return tokens > SPECULATES * steps


def _tokens_and_steps(exchanges: Iterable[Exchange]) -> tuple[int, int]:
    """Numbers of tokens and of verification steps, summed over answers that show their steps.

    The first token of an answer does not count, because the prefill generates it.
    """
    total_tokens = 0
    total_steps = 0
    for exchange in exchanges:
        steps = exchange.steps
        if steps and exchange.size > 1:
            total_tokens += exchange.size - 1
            total_steps += steps
    return total_tokens, total_steps


def forced_sizes(step_sizes: Counter[int]) -> str:
    """Returns the numbers of tokens per step if they are too few, such as "2 or 3".

    A faulty drafter yields one or two numbers of tokens, and never 1. "" is returned for other
    drafters, and for fewer than MIN_STEPS steps. `step_sizes`: number of steps by number of tokens.
    """
    total = step_sizes.total()
    # the end of an answer cuts a step, so rare sizes do not count
    min_count = max(1, RARE_STEP_SHARE * total)
    common = sorted(size for size, count in step_sizes.items() if count >= min_count)
    if total < MIN_STEPS or 1 in common or len(common) > 2:
        return ""
    return " or ".join(map(str, common))


def _acceptance_drop(
    later: Sequence[Exchange],
    earlier: Sequence[Exchange],
    basis: str,
    kept: float,
    min_steps: int,
) -> str | None:
    """Returns the fault if later answers accept significantly fewer drafts per step than earlier.

    Returns "" if they do not, and None if either group has fewer than `min_steps` steps.

    Args:
        basis: Name of the earlier answers for the message.
        kept: Share of the earlier answers' accepted drafts per step below which it is a fault.
    """
    tokens, steps = _tokens_and_steps(later)
    earlier_tokens, earlier_steps = _tokens_and_steps(earlier)
    if min(steps, earlier_steps) < min_steps:
        return None
    tokens_per_step = tokens / steps
    earlier_tokens_per_step = earlier_tokens / earlier_steps
    # one token of each step is the target's own and not a draft
    fell = tokens_per_step - 1 < kept * (earlier_tokens_per_step - 1)
    if fell and more_often(steps, tokens, earlier_steps, earlier_tokens):
        return f"{tokens_per_step:.2f} tokens per step, {earlier_tokens_per_step:.2f} {basis}"
    return ""


# --- the verdict over all rows ---


@dataclass(frozen=True, kw_only=True)
class CheckVerdict:
    """Verdict of a check over all rows of its report.

    rows: the seven rows
    accepted: names of the rows that may be unmeasured
    """

    rows: tuple[GateRow, ...]
    accepted: frozenset[str] = frozenset()

    @property
    def missing(self) -> list[GateRow]:
        """Unmeasured rows that the user does not accept as unmeasured."""
        unmeasured = [row for row in self.rows if row.status == "unmeasured"]
        return [row for row in unmeasured if row.name not in self.accepted]

    @property
    def word(self) -> str:
        """Verdict in capitals: SAFE, NOT SAFE or NOT PROVEN."""
        if any(row.faults for row in self.rows):
            return "NOT SAFE"
        return "NOT PROVEN" if self.missing else "SAFE"

    @property
    def line(self) -> str:
        """Sentence with the verdict and its reasons."""
        rows = [row for row in self.rows if row.faults] or self.missing
        if rows:
            reasons = []
            for row in rows:
                causes = [*row.faults, row.why or "too little was seen"]
                reasons.append(f"{row.name}: {causes[0]}")
            return f"{self.word}: {'; '.join(reasons)}"
        line = "SAFE: the same output as without speculation"
        unmeasured = [row.name for row in self.rows if row.status == "unmeasured"]
        if unmeasured:
            line += f"; not measured: {', '.join(unmeasured)}"
        return line


def coverage(candidate: Sequence[Exchange], rows: Sequence[GateRow]) -> str:
    """Returns a sentence on what a verdict covers: faults, and lengths in tokens."""
    skipped = not_asked(candidate)
    absent = [f"{probe} ({reason})" for probe, reason in skipped.items()]
    unmeasured = sum(len(row.unmeasured) for row in rows)
    covered = len(KINDS) - unmeasured - len(absent)
    prompt = max(len(exchange.prompt) for exchange in candidate)
    answer = max(exchange.size for exchange in candidate)
    lengths = f"prompts up to {prompt:,} tokens, answers up to {answer:,}"
    left_out = ", ".join([*absent, NEVER_ASKED])
    return f"covered: {covered} of {len(KINDS)} kinds of faults, {lengths}; not asked: {left_out}"
