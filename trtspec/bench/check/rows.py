"""The rows of the gate: pure functions of one or two recordings.

A look judges one exchange for one kind of fault. A row fails if a look has a fault. A row is
unmeasured if a kind of fault was not seen, or if fewer than half of its looks could be judged. Else
it passes. A fault that the baseline server shows for the same request never counts.
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
    """Returns the seven rows.

    Args:
        candidate: Exchanges of the server under test.
        baseline: Exchanges of the server without speculation. Empty without such a server.
        min_acceptance: Tokens per step that are wanted.
        exact: Both servers compute in float32, so every difference fails.
    """
    known = [*candidate, *baseline]
    answer_looks = [*answers(candidate), *_streams(candidate)]
    looks: dict[str, tuple[Iterable[Look], str]] = {
        "answers": (answer_looks, ""),
        "prompts": (prompts(candidate), ""),
        "greedy": greedy(candidate, baseline, exact),
        "sampled": sampled(candidate, baseline),
        "transport": (transport(candidate, known), ""),
        "parameters": (parameters(candidate, baseline), ""),
        "acceptance": acceptance(candidate, min_acceptance),
    }
    excusable = baseline
    # without a baseline server, nobody knows whether it would honour a refused request
    if not baseline:
        excusable = [exchange for exchange in candidate if exchange.refused]
    baseline_looks = form_looks(excusable, known)
    excused = {(look.probe, look.name) for look in baseline_looks if look.fault}
    skipped = not_asked(candidate)
    return [_row(name, looks, why, excused, skipped) for name, (looks, why) in looks.items()]


# --- every threshold of the gate ---

# behind the best token: the answer counts as different; rounding seldom does it
SUSPECT_NATS = 0.25
# behind the best token: one answer fails; bfloat16 reaches 1.1 if the target is unsure
FAIL_NATS = 2.0
MAX_TIPPED = 2  # failing tokens of an answer that rounding may explain
EXACT_NATS = 1e-3  # behind the best token with --exact; float32 rounds far below
ALPHA = 1.25e-4  # false alarms of one test; a check makes eight tests at most
DOUBTFUL_P = 0.01  # probability by chance below which the effect of a penalty counts
CLEAR_P = 1e-12  # probability by chance of an effect that every honest server has
KEPT_DRAFTS = 0.8  # accepted drafts over the first ones of the same texts; below is a regression
# accepted drafts of long prompts over drafts of short ones, whose texts differ
COLLAPSED_DRAFTS = 0.05
COLLAPSE_STEPS = 8  # steps in which a drafter shows that it accepts next to nothing
MIN_STEPS = 50  # steps below which acceptance says nothing
# share of steps; rarer sizes are last steps, which the end of an answer cuts
RARE_STEP_SHARE = 0.02
SPECULATES = 1.1  # tokens per step; a busy server without speculation also joins a few chunks
TOKENS_PER_ARRIVAL = 16  # more than any drafter yields in a step: a proxy buffers

NO_EFFECT = "no effect, and has one without speculation"
NO_SCORES = "needs the scores of the server without speculation (`score`, `against`)"
Name = tuple[str, str]  # key and run of an exchange
PROBES = defaultdict[str, dict[str, str]](dict)  # by row: probe -> kind of fault
for line in KINDS:
    PROBES[line.row] |= dict.fromkeys(line.probes.split(), line.name)
GREEDY = PROBES["greedy"].keys()
REPEATS = ("warm", "crowd", "later")  # runs that are probes by themselves


class Look(NamedTuple):
    """One exchange judged by one probe.

    `fault`: "" if nothing is wrong, None if it could not be judged.
    """

    probe: str
    name: Name
    fault: str | None = ""


@dataclass(frozen=True, kw_only=True)
class GateRow:
    """One row of the report.

    `status`: pass, fail or unmeasured. `seen` of `of` looks could be judged. `unmeasured`: kinds of
    faults that no look could judge. `why`: what was missing, or what was measured.
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
    looks: Iterable[Look],
    why: str,
    excused: set[tuple[str, Name]],
    skipped: Mapping[str, str],
) -> GateRow:
    """Returns the row of these looks.

    Args:
        excused: Probes and exchanges whose faults the baseline server shows too.
        skipped: Probes that were not asked, with the reason.
    """
    kinds = PROBES[name]
    relevant = [look for look in looks if look.probe in kinds]
    judged = [look for look in relevant if look.fault is not None]
    seen = {kinds[look.probe] for look in judged}
    seen |= {kind_name for probe, kind_name in kinds.items() if probe in skipped}
    missing = [kind_name for kind_name in dict.fromkeys(kinds.values()) if kind_name not in seen]
    faults = []
    for probe, (key, run), fault in judged:
        if fault and (probe, (key, run)) not in excused:
            faults.append(f"{kinds[probe]}: {key} ({run}): {fault}")
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
    """Reasons why a fault cannot reach a user, by probe.

    The target lacks something, or the server refuses the request by name.
    """
    skipped = {exchange.kind: "refused by the server" for exchange in candidate if exchange.refused}
    for exchange in candidate:
        if exchange.run == "withheld":
            skipped[exchange.kind] = exchange.error or ""
    return skipped


def form_looks(exchanges: Sequence[Exchange], known: Sequence[Exchange]) -> list[Look]:
    """Looks that need no other server.

    `known`: all exchanges whose tokens may explain a message.
    """
    return [
        *answers(exchanges),
        *_streams(exchanges),
        *prompts(exchanges),
        *_choices(exchanges),
        *_seeds(exchanges),
        *transport(exchanges, known),
        *_overruns(exchanges),
        *_penalties(exchanges, DOUBTFUL_P),
    ]


# --- answers ---


def answers(exchanges: Sequence[Exchange]) -> Iterator[Look]:
    """Checks that every request is answered, or a parameter is refused by name."""
    for exchange in exchanges:
        honest_refusal = exchange.refused and exchange.kind in PROBES["parameters"]
        if exchange.run != "withheld" and not honest_refusal:
            fault = ""
            if not exchange.answered:
                fault = exchange.error or "the answer has no finish_reason"
            yield Look("request", exchange.name, fault)


def _streams(exchanges: Sequence[Exchange]) -> Iterator[Look]:
    """Checks that streams arrive while they are made."""
    streams = [
        exchange for exchange in exchanges if exchange.answered and exchange.body.get("stream")
    ]
    long = [exchange for exchange in streams if exchange.size > TOKENS_PER_ARRIVAL]
    # a proxy holds back every stream; if only some are late, they waited for a busy machine
    fault = ""
    if all(exchange.size > TOKENS_PER_ARRIVAL * exchange.arrivals for exchange in long):
        fault = "came at once: a proxy or the server holds streams back"
    for exchange in long:
        yield Look("streams", exchange.name, fault)


# --- prompts ---


def prompts(exchanges: Sequence[Exchange]) -> Iterator[Look]:
    """Checks that the server reads a conversation as our own chat template writes it."""
    for exchange in exchanges:
        if exchange.answered and exchange.prompt:
            yield Look(exchange.kind, exchange.name, _misread(exchange))


def _misread(exchange: Exchange) -> str | None:
    """Compares token ids, or their number if the server returns no ids.

    None if it returns neither.
    """
    expected = tuple(exchange.prompt)
    ids = exchange.prompt_ids
    count = len(ids) or exchange.prompt_tokens
    if not count:
        return None
    same_ids = ids in ((), expected)
    if count == len(expected) and same_ids:
        return ""
    return f"read {count} tokens that are not the {len(expected)} of the chat template"


# --- greedy ---


def is_greedy(exchange: Exchange) -> bool:
    """Whether this is an answer at temperature 0 that no grammar and no parameter changed."""
    changed = exchange.kind not in GREEDY or exchange.body.get("stop")
    return exchange.answered and bool(exchange.token_ids) and not changed


def greedy(
    candidate: Sequence[Exchange], baseline: Sequence[Exchange], exact: bool
) -> tuple[list[Look], str]:
    """Checks that no greedy token is further behind the target's best than rounding explains.

    Returns the looks, and the measured distances in words.
    """
    greedy_answers = [exchange for exchange in candidate if is_greedy(exchange)]
    regrets = _regrets(greedy_answers)
    baseline_regrets = _regrets(exchange for exchange in baseline if is_greedy(exchange))
    limit = FAIL_NATS
    if exact:
        limit = EXACT_NATS
    suspects = sum(nats > SUSPECT_NATS for nats in regrets)
    baseline_suspects = sum(nats > SUSPECT_NATS for nats in baseline_regrets)
    # more suspects than rounding explains: each of them fails
    if more_often(suspects, len(regrets), baseline_suspects, len(baseline_regrets)):
        limit = min(limit, SUSPECT_NATS)
    tipped: list[Exchange] = []
    if not exact:
        tipped = _tipped(greedy_answers, limit)
    looks = [_greedy_look(exchange, limit) for exchange in greedy_answers if exchange not in tipped]
    looks += [_greedy_look(exchange, math.inf) for exchange in tipped]
    if not regrets:
        return looks, NO_SCORES
    rounding = max(baseline_regrets, default=0.0)
    why = f"at most {max(regrets):.2f} of {limit:g} nats behind, without speculation {rounding:.2f}"
    if tipped:
        same_prompt = sum(exchange.key == tipped[0].key for exchange in greedy_answers)
        why += f", in {len(tipped)} of {same_prompt} answers to {tipped[0].key}"
    return looks, why


def _tipped(greedy_answers: Sequence[Exchange], limit: float) -> list[Exchange]:
    """Returns the failing answers if all are to one prompt, to which most answers do not fail.

    [] if rounding does not explain them. Rounding can tip a router at a near-tie, which moves a
    token by several nats in one answer.
    """
    failing = [exchange for exchange in greedy_answers if regret(exchange) > limit]
    keys = {exchange.key for exchange in failing}
    same_prompt = [exchange for exchange in greedy_answers if exchange.key in keys]
    counts = [sum(score.nats_behind > limit for score in each.scores) for each in failing]
    is_rare = len(keys) == 1 and 2 * len(failing) < len(same_prompt)
    if is_rare and max(counts) <= MAX_TIPPED:
        return failing
    return []


def _regrets(exchanges: Iterable[Exchange]) -> list[float]:
    """Regrets in nats of the scored answers. Equal answers to one request count once."""
    distinct = {_identity(exchange): exchange for exchange in exchanges if exchange.scores}
    return list(map(regret, distinct.values()))


def _greedy_look(exchange: Exchange, limit: float) -> Look:
    """`limit`: nats that a token may be behind."""
    probe = exchange.run if exchange.run in REPEATS else exchange.kind
    fault: str | None = None
    if exchange.scores:
        fault = ""
    nats = regret(exchange)
    if nats > limit:
        token = [score.nats_behind for score in exchange.scores].index(nats)
        fault = f"token {token} is {nats:.2f} of {limit:g} nats behind the target's best"
    return Look(probe, exchange.name, fault)


def _identity(exchange: Exchange) -> tuple[str, tuple[int, ...]]:
    return exchange.key, exchange.token_ids


def regret(exchange: Exchange) -> float:
    """Nats by which the worst token is behind the target's best."""
    return max((score.nats_behind for score in exchange.scores), default=0.0)


def more_often(
    count: int, total: int, baseline_count: int, baseline_total: int, alpha: float = ALPHA
) -> bool:
    """Whether `count` of `total` is too many for the baseline's rate.

    Fisher's exact test, one-sided. `alpha`: its rate of false alarms.
    """
    marked = count + baseline_count
    tail = 0
    for drawn in range(count, min(total, marked) + 1):
        ways = math.comb(total, drawn)
        tail += ways * math.comb(baseline_total, marked - drawn)
    return tail / math.comb(total + baseline_total, marked) < alpha


# --- sampled ---


def sampled(candidate: Sequence[Exchange], baseline: Sequence[Exchange]) -> tuple[list[Look], str]:
    """Checks that answers at a temperature are drawn from the target's distribution.

    Seeds must repeat and differ, and choices must differ. Returns the looks, and the evidence in
    words.
    """
    looks = [*_choices(candidate), *_seeds(candidate)]
    bets = collect(candidate)
    if not any(exchange.scores for exchange in candidate):
        return looks, NO_SCORES
    limit = -math.log(ALPHA)
    total = mixed(bets)
    baseline_total = mixed(collect(baseline))
    faulty = min(bets).faulty
    why = f"log e {total:.1f} of {limit:.1f}, without speculation {baseline_total:.1f}, "
    why += f"a faulty sampler {faulty:.1f} or more"
    for probe in SAMPLERS:
        probe_bets = [bet for bet in bets if bet.probe == probe]
        best = max(probe_bets, key=lambda bet: bet.won)
        evidence = min(total, best.won)
        would_show = max(evidence, min(probe_bets).faulty) > limit
        fault: str | None = ""
        if evidence > limit:
            fault = f"tokens are not drawn from the target's distribution, as with {best.fault}"
        # a baseline that fails the same test shows that the scores are wrong
        if baseline_total > limit or not would_show:
            fault = None
        looks.append(Look(probe, ("sampled", "all"), fault))
    return looks, why


def _choices(exchanges: Sequence[Exchange]) -> Iterator[Look]:
    """Checks that most choices of a request with `n` differ, at a high temperature."""
    for exchange in exchanges:
        if exchange.kind == "n" and exchange.answered:
            choices = exchange.choices
            different = len({*choices})
            fault = ""
            if len(choices) < exchange.body["n"] or different <= len(choices) // 2:
                fault = f"{different} different choices"
            yield Look("n", exchange.name, fault)


def _seeds(exchanges: Sequence[Exchange]) -> Iterator[Look]:
    """Checks that a seed repeats its answer and that seeds differ, at a high temperature."""
    seeded = [exchange for exchange in exchanges if exchange.kind == "seed" and exchange.token_ids]
    # if an answer is missing, little is known of the others
    if len(seeded) != 2 * len(SEEDS):
        return
    by_seed = defaultdict[Any, list[tuple[int, ...]]](list)
    for exchange in seeded:
        by_seed[exchange.body["seed"]].append(exchange.token_ids)
    repeated = {seed for seed, texts in by_seed.items() if len({*texts}) < len(texts)}
    fault = ""
    if not repeated - {None}:
        fault = "no seed repeats its answer"
    if None in repeated:
        fault = "answers without a seed are equal"
    if len({texts[0] for texts in by_seed.values()}) < 2:
        fault = "all seeds give one answer"
    for exchange in seeded:
        yield Look("seed", exchange.name, fault)


# --- transport ---

Parts = list[str]  # reasoning, text, calls


def transport(exchanges: Sequence[Exchange], known: Sequence[Exchange]) -> Iterator[Look]:
    """Checks that a message, whole or streamed, is what the Kimi parser makes of the tokens.

    `known`: exchanges whose tokens explain a message that comes without its own.
    """
    raws = defaultdict[str, list[Exchange]](list)
    for exchange in known:
        if exchange.raw:
            raws[exchange.key].append(exchange)
    ids = Counter[str]()
    for exchange in exchanges:
        ids.update(call["id"] for call in exchange.calls)
    for exchange in exchanges:
        if not exchange.answered:
            continue
        name = exchange.name
        yield Look("finish", name, _finish_fault(exchange))
        if exchange.token_ids and exchange.completion_tokens:
            yield Look("usage", name, _usage_fault(exchange))
        if "prompt" in exchange.body:
            raw = exchange.raw
            fault = ""
            if raw and exchange.content.strip() not in raw:
                fault = "the text is not that of its tokens"
            yield Look(exchange.kind, name, fault)
            continue
        if exchange.calls:
            yield Look("ids", name, _call_id_fault(exchange, ids))
        if exchange.kind in FORMS:
            yield from _forced_form(exchange)
        else:
            yield from _message(exchange, raws[exchange.key])


def _finish_fault(exchange: Exchange) -> str:
    limit = _limit(exchange)
    finish = exchange.finish
    size = exchange.size
    if finish == "length" and 0 < size < limit:
        return f"length after {size} of {limit} tokens"
    if _stopped_late(exchange):
        return f"stop after {limit} tokens, where the limit ended the answer"
    if exchange.calls and finish not in ("tool_calls", "length"):
        return f"{finish} after calls"
    return ""


def _usage_fault(exchange: Exchange) -> str:
    """The count may differ by one: a server may leave out the end of turn."""
    count = exchange.completion_tokens or 0
    tokens = len(exchange.token_ids)
    return f"counts {count} tokens of {tokens}" if abs(tokens - count) > 1 else ""


def _stopped_late(exchange: Exchange) -> bool:
    """Whether check had to add the end of turn behind the last token that was allowed."""
    tokens = len(exchange.token_ids) - 1
    return exchange.finish == "stop" and exchange.completion_tokens == _limit(exchange) == tokens


def _limit(exchange: Exchange) -> int:
    """Tokens that the request allows over all its choices."""
    body = exchange.body
    limit: int = body.get("max_tokens", 2**31) * body.get("n", 1)
    return limit


def _call_id_fault(exchange: Exchange, ids: Counter[str]) -> str:
    """`ids`: how often each call id occurs in all answers."""
    if exchange.unindexed:
        return "fragments of calls without an index"
    call_ids = [call["id"] for call in exchange.calls]
    for call_id in call_ids:
        if not call_id or call_ids.count(call_id) > max(1, exchange.raw.count(call_id)):
            return "calls without an id of their own"
    for call_id in call_ids:
        # Kimi's ids count the calls of a conversation, so two answers may share one
        if ids[call_id] > 1 and not call_id.startswith("functions."):
            return f"the id {call_id} is that of several answers"
    return ""


def _forced_form(exchange: Exchange) -> Iterator[Look]:
    """Looks at an answer whose form the request forces."""
    probe = exchange.kind
    fault: str | None = ""
    if not _has_form(exchange):
        fault = f"{_shown(_parts(exchange))} is not its form"
        if _cut_short(exchange):
            fault = None
    yield Look(probe, exchange.name, fault)
    if probe == "json":
        yield Look("characters", exchange.name, fault)


def _message(exchange: Exchange, raws: Sequence[Exchange]) -> Iterator[Look]:
    """Looks at a chat's text, reasoning and calls.

    `raws`: answers to the same prompt with their raw text.
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
    # a call or reasoning that did not occur shows nothing
    occurred = {"call": calls, "reasoning": reasoning}.get(exchange.kind, candidates)
    same = any(_agrees(parts, candidate) for candidate in candidates)
    agrees = same or _tied(exchange, raws)
    fault: str | None = None
    if candidates and not _cut_short(exchange):
        if not agrees:
            fault = f"{_shown(parts)} is not {_shown(expected)}"
        elif occurred:
            fault = ""
    for probe in probes:
        yield Look(probe, exchange.name, fault)


# probes whose requests force the form of the answer
FORMS = ("picture", "json", "arguments", "spoken", "calls")
# answers that show nothing if they end at the limit
CUT_SHORT = {"picture", "json", "arguments", "spoken", "call", "follow-up", "stop", "stops"}


def _has_form(exchange: Exchange) -> bool:
    """Whether the answer has the form that its request forces."""
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
    # calls in a row repeat until the limit
    return parts[2:4] == 2 * forced[2:]


def _cut_short(exchange: Exchange) -> bool:
    """Whether the answer ended at the limit and therefore shows nothing."""
    return exchange.finish == "length" and exchange.kind in CUT_SHORT


def _object(exchange: Exchange) -> dict[str, Any]:
    """The answer as a JSON object. {} for other text."""
    try:
        value = json.loads(exchange.content)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def _expected(exchange: Exchange, raws: Sequence[Exchange]) -> list[Parts]:
    """Parses the message's own tokens, else the tokens of every answer to the same prompt."""
    sources = [exchange] if exchange.raw else raws
    messages = []
    for source in sources:
        parts = _parsed(source.raw)
        reasoning, text = parts[:2]
        stops = exchange.body.get("stop", ())
        ends = [text.find(stop) for stop in stops if stop in text]
        if ends:
            parts = [reasoning, text[: min(ends)]]
        messages.append(parts)
    return messages


def _parsed(raw: str) -> Parts:
    message = parse_reply(raw, False)
    functions = [call["function"] for call in message.get("tool_calls", ())]
    reasoning = message.get("reasoning_content", "")
    return [reasoning, message["content"] or "", *map(_call, functions)]


def _parts(exchange: Exchange) -> Parts:
    return [exchange.reasoning, exchange.content, *map(_call, exchange.calls)]


def _call(function: Mapping[str, str]) -> str:
    """`name(arguments)`, with the arguments in one spelling of JSON and in their order."""
    arguments = function["arguments"]
    with suppress(ValueError):
        arguments = json.dumps(json.loads(arguments), ensure_ascii=False)
    return f"{function['name']}({arguments})"


def _agrees(parts: Parts, expected: Parts) -> bool:
    """A server may leave out white space at the ends, and add none."""
    if len(parts) != len(expected):
        return False
    pairs = zip(parts, expected, strict=True)
    return all(text in other and text.strip() == other.strip() for text, other in pairs)


def _shown(parts: Parts) -> str:
    return " ".join(repr(part[:60]) for part in parts if part) or "nothing"


def _tied(exchange: Exchange, raws: Sequence[Exchange]) -> bool:
    """Whether a message without its tokens leaves an answer to the same prompt at a near-tie."""
    if exchange.raw:
        return False
    text = exchange.reasoning + exchange.content
    return any(_leaves_at_tie(text, other) for other in raws)


def _leaves_at_tie(text: str, other: Exchange) -> bool:
    """Whether `text` parts from the other answer at a token whose best two candidates are close."""
    other_text = "".join(_parsed(other.raw)[:2])
    same = len(commonprefix([text, other_text]))
    # the index of the token is estimated from the index of its character
    token = len(other.token_ids) * same // max(1, len(other_text))
    for score in other.scores[max(0, token - 2) : token + 2]:
        least = score.top[0] - FAIL_NATS
        close = sum(value >= least for value in score.top)
        if close > 1:
            return True
    return False


# --- parameters ---


def parameters(candidate: Sequence[Exchange], baseline: Sequence[Exchange]) -> Iterator[Look]:
    """Checks that a parameter that the baseline server honours is honoured or refused."""
    baseline_answers = {exchange.kind: exchange for exchange in baseline if exchange.answered}
    seeds = [regret(exchange) for exchange in candidate if exchange.kind == "seed"]
    # how far answers to the same prompt stray if no parameter holds them to the best token
    stray = median([0.0, *seeds])
    yield from _overruns(candidate)
    clear = {look.probe for look in _penalties(baseline, CLEAR_P) if not look.fault}
    for look in _penalties(candidate, DOUBTFUL_P):
        if look.fault and look.probe not in clear:
            look = look._replace(fault=None)
        yield look
    for exchange in candidate:
        probe = exchange.kind
        if probe in TRUNCATIONS:
            yield Look(probe, exchange.name, _truncation_fault(exchange, stray))
        elif exchange.answered and probe in baseline_answers:
            fault = _parameter_fault(exchange, baseline_answers[probe])
            yield Look(probe, exchange.name, fault)


def _truncation_fault(exchange: Exchange, stray: float) -> str | None:
    """Each truncation allows only the best token.

    None if answers without it do not stray either.
    """
    if not exchange.scores or stray <= FAIL_NATS:
        return None
    return NO_EFFECT if regret(exchange) > FAIL_NATS else ""


def _parameter_fault(exchange: Exchange, other: Exchange) -> str | None:
    """None if the baseline server's answer `other` does not keep to the parameter either."""
    if not _kept(other):
        return None
    return "" if _kept(exchange) else NO_EFFECT


def _penalties(exchanges: Sequence[Exchange], alpha: float) -> Iterator[Look]:
    """Checks that more tokens repeat with one sign of a penalty than with the other."""
    repeats: dict[Name, tuple[int, int]] = {}  # repeated tokens, tokens
    for exchange in exchanges:
        ids = exchange.token_ids
        if ids:
            size = len(ids)
            repeats[exchange.name] = size - len({*ids}), size
    for penalty in PENALTIES:
        more = (penalty, "more")
        less = (penalty, "less")
        if more in repeats and less in repeats:
            fault = NO_EFFECT
            if more_often(*repeats[more], *repeats[less], alpha):
                fault = ""
            yield Look(penalty, more, fault)
            yield Look(penalty, less, fault)


def _overruns(exchanges: Sequence[Exchange]) -> Iterator[Look]:
    """Checks that answers end at max_tokens."""
    for exchange in exchanges:
        if exchange.answered:
            size = exchange.size
            limit = _limit(exchange)
            fault = ""
            if size > limit and not _stopped_late(exchange):
                fault = f"{size} tokens, {limit} are allowed"
            yield Look("max_tokens", exchange.name, fault)


def _kept(exchange: Exchange) -> bool:
    """Whether an answer keeps to its parameters."""
    body = exchange.body
    ids = exchange.token_ids
    long_enough = len(ids) >= body.get("min_tokens", 0) - 1
    stops = body.get("stop_token_ids", ())
    biased = map(int, body.get("logit_bias", ()))
    return long_enough and {*ids[:-1]}.isdisjoint(stops) and {*ids}.isdisjoint(biased)


# --- acceptance ---


def acceptance(candidate: Sequence[Exchange], floor: float | None) -> tuple[list[Look], str]:
    """Checks that tokens per step reach the floor, vary, and stay as many when a text is repeated.

    Returns the looks, and tokens per step in words. No looks if there are too few steps or no
    drafts.
    """
    texts = [exchange for exchange in candidate if exchange.kind == "text" and exchange.answered]
    first = [exchange for exchange in texts if exchange.run in ("ids", "stream")]
    tokens, steps = _tokens_and_steps(first)
    wanted = ""
    if floor:
        wanted = f", {floor:g} tokens per step are wanted"
    if steps < MIN_STEPS:
        return [], f"{steps} steps are shown, {MIN_STEPS} are needed{wanted}"
    length = tokens / steps
    why = f"{length:.2f} tokens per step{wanted}"
    faults: dict[str, str | None] = {"floor": ""}
    if length < (floor or 0):
        faults["floor"] = why
    elif not speculates(first):
        return [], f"{why}: no draft was accepted"
    faults |= _repeat_faults(candidate)
    long = [exchange for exchange in candidate if exchange.kind == "long" and exchange.run == "ids"]
    faults["long"] = _slower(long, first, "for short texts", COLLAPSED_DRAFTS, COLLAPSE_STEPS)
    sizes = Counter[int]()
    for exchange in first:
        pairs = zip(exchange.counted, exchange.counted[1:-1], strict=False)
        sizes.update(after - before for before, after in pairs)
    forced = forced_sizes(sizes)
    faults["forced"] = f"every step brought {forced} tokens" if forced else ""
    looks = [Look(probe, ("text", probe), fault) for probe, fault in faults.items()]
    return looks, why


def _repeat_faults(candidate: Sequence[Exchange]) -> dict[str, str | None]:
    """Compares the same texts from a warm cache, in a crowd and after it with their first answers.

    Long prompts are also compared by themselves: they are few, and lose most if a drafter forgets
    what is reused.
    """
    first = {}
    for exchange in candidate:
        if exchange.run == "ids" and exchange.steps:
            first[_identity(exchange)] = exchange
    faults: dict[str, str | None] = {}
    for run in REPEATS:
        in_run = [exchange for exchange in candidate if exchange.run == run]
        repeats = [exchange for exchange in in_run if _identity(exchange) in first]
        long = [exchange for exchange in repeats if exchange.kind != "text"]
        faults[run] = None
        for group in (long, repeats):
            earlier = [first[_identity(exchange)] for exchange in group]
            fault = _slower(group, earlier, "at first", KEPT_DRAFTS, MIN_STEPS // 2)
            faults[run] = faults[run] or fault
    return faults


def speculates(exchanges: Sequence[Exchange]) -> bool:
    """Whether steps brought several tokens."""
    tokens, steps = _tokens_and_steps(exchanges)
    return tokens > SPECULATES * steps


def _tokens_and_steps(exchanges: Iterable[Exchange]) -> tuple[int, int]:
    """(tokens, steps) of the answers that show their steps.

    The first token comes from the prefill.
    """
    tokens = 0
    total = 0
    for exchange in exchanges:
        steps = exchange.steps
        if steps and exchange.size > 1:
            tokens += exchange.size - 1
            total += steps
    return tokens, total


def forced_sizes(sizes: Counter[int]) -> str:
    """`2 or 3` if steps brought no other number of tokens, never one alone.

    "" for a drafter that drafts.

    `sizes`: how many steps brought each number of tokens.
    """
    total = sizes.total()
    # the end of an answer cuts a step, so rare sizes do not count
    least = max(1, RARE_STEP_SHARE * total)
    common = sorted(size for size, count in sizes.items() if count >= least)
    if total < MIN_STEPS or 1 in common or len(common) > 2:
        return ""
    return " or ".join(map(str, common))


def _slower(
    later: Sequence[Exchange],
    earlier: Sequence[Exchange],
    basis: str,
    kept: float,
    min_steps: int,
) -> str | None:
    """A fault if a step accepted fewer drafts than `kept` of the earlier ones, beyond chance.

    `basis`: the earlier answers in words. None below `min_steps` steps.
    """
    tokens, steps = _tokens_and_steps(later)
    earlier_tokens, earlier_steps = _tokens_and_steps(earlier)
    if min(steps, earlier_steps) < min_steps:
        return None
    length = tokens / steps
    earlier_length = earlier_tokens / earlier_steps
    fell = length - 1 < kept * (earlier_length - 1)
    if fell and more_often(steps, tokens, earlier_steps, earlier_tokens):
        return f"{length:.2f} tokens per step, {earlier_length:.2f} {basis}"
    return ""


# --- the verdict ---


@dataclass(frozen=True, kw_only=True)
class CheckVerdict:
    """The verdict over all rows. `accepted`: names of rows that may stay unmeasured."""

    rows: tuple[GateRow, ...]
    accepted: frozenset[str] = frozenset()

    @property
    def missing(self) -> list[GateRow]:
        """Unmeasured rows that the user does not accept as such."""
        unmeasured = [row for row in self.rows if row.status == "unmeasured"]
        return [row for row in unmeasured if row.name not in self.accepted]

    @property
    def word(self) -> str:
        """SAFE, NOT SAFE or NOT PROVEN."""
        if any(row.faults for row in self.rows):
            return "NOT SAFE"
        return "NOT PROVEN" if self.missing else "SAFE"

    @property
    def line(self) -> str:
        """The verdict and its reasons in one sentence."""
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
    """Says what a verdict covers: kinds of faults, and lengths in tokens."""
    skipped = not_asked(candidate)
    absent = [f"{probe} ({reason})" for probe, reason in skipped.items()]
    unmeasured = sum(len(row.unmeasured) for row in rows)
    covered = len(KINDS) - unmeasured - len(absent)
    prompt = max(len(exchange.prompt) for exchange in candidate)
    answer = max(exchange.size for exchange in candidate)
    lengths = f"prompts up to {prompt:,} tokens, answers up to {answer:,}"
    left_out = ", ".join([*absent, NEVER_ASKED])
    return f"covered: {covered} of {len(KINDS)} kinds of faults, {lengths}; not asked: {left_out}"
