"""The rows of the gate: pure functions of one or two recordings.

A look is at one exchange, for one kind of fault. A row fails if a look has a fault. It is unmeasured if one of its
kinds was not seen, or if fewer than half of its looks could be judged. Else it passes. A fault that the plain server
shows for the same request never counts.
"""

from __future__ import annotations

import json
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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

# every threshold of the gate
NEAR = 0.25  # nats behind the best token from which an answer counts as different; rounding seldom reaches it
CERTAIN = 2.0  # nats behind from which one answer fails; bfloat16 reaches 1.1 where the target itself is unsure
EXACT = 1e-3  # nats, with --exact: float32 rounds far below
ALPHA = 1.25e-4  # false alarms of one test; a check makes eight of them at most
DOUBTFUL = 0.01  # probability by chance of an effect of a penalty, below which it counts
CLEAR = 1e-12  # the same of an effect that no honest server lacks
KEPT_DRAFTS = 0.8  # accepted drafts over those of the same texts before: below it is a regression
COLLAPSE = 0.05  # the same for long prompts, which are other texts, over short ones
COLLAPSE_STEPS = 8  # in which a drafter that accepts next to nothing shows
MIN_STEPS = 50  # below, acceptance says nothing
RARE = 0.02  # share of the steps below which a size is that of last steps, which the end of an answer cuts
SPECULATES = 1.1  # tokens per step; a busy server without speculation joins a few chunks as well
TOKENS_PER_ARRIVAL = 16  # more than any drafter yields in a step: a proxy buffers

NO_EFFECT = "no effect, and has one without speculation"
NO_SCORES = "needs the scores of the server without speculation (`score`, `against`)"
Name = tuple[str, str]
PROBES = defaultdict[str, dict[str, str]](dict)  # by row: probe -> kind of fault
for kind in KINDS:
    PROBES[kind.row] |= dict.fromkeys(kind.probes.split(), kind.name)
GREEDY = PROBES["greedy"].keys()
REPEATS = ("warm", "crowd", "later")  # runs that are probes of their own


class Look(NamedTuple):
    """What one exchange shows of one kind. `fault`: "" if nothing is wrong, None if it could not be judged."""

    probe: str
    name: Name
    fault: str | None = ""


@dataclass(frozen=True, kw_only=True)
class Row:
    """`status`: pass, fail or unmeasured. `seen` of `of` looks could be judged. `unmeasured`: kinds of faults that were
    asked for in vain. `why` says what was missing, or what was measured."""

    name: str
    status: str
    seen: int = 0
    of: int = 0
    faults: tuple[str, ...] = ()
    unmeasured: tuple[str, ...] = ()
    why: str = ""


def judge(
    got: Sequence[Exchange],
    plain: Sequence[Exchange],
    *,
    min_acceptance: float | None = None,
    exact: bool = False,
) -> list[Row]:
    """The seven rows. `plain`: exchanges of the server without speculation. `exact`: both servers compute in float32,
    so every difference fails."""
    known = [*got, *plain]
    looks: dict[str, tuple[Iterable[Look], str]] = {
        "answers": ([*answers(got), *_streams(got)], ""),
        "prompts": (prompts(got), ""),
        "greedy": greedy(got, plain, exact),
        "sampled": sampled(got, plain),
        "transport": (transport(got, known), ""),
        "parameters": (parameters(got, plain), ""),
        "acceptance": acceptance(got, min_acceptance),
    }
    # a refusal counts where the plain server honours the request
    unknown = [] if plain else [one for one in got if one.refused]
    excused = {
        (look.probe, look.name) for look in form_looks([*plain, *unknown], known) if look.fault
    }
    skipped = not_asked(got)
    return [_row(name, looks, why, excused, skipped) for name, (looks, why) in looks.items()]


def _row(
    name: str,
    looks: Iterable[Look],
    why: str,
    excused: set[tuple[str, Name]],
    skipped: Mapping[str, str],
) -> Row:
    """The row with the status that follows from its looks."""
    kinds = PROBES[name]
    counted = [look for look in looks if look.probe in kinds]
    judged = [look for look in counted if look.fault is not None]
    seen = {kinds[look.probe] for look in judged}
    seen |= {kind for probe, kind in kinds.items() if probe in skipped}
    missing = [kind for kind in dict.fromkeys(kinds.values()) if kind not in seen]
    faults = []
    for probe, (key, run), fault in judged:
        if fault and (probe, (key, run)) not in excused:
            faults.append(f"{kinds[probe]}: {key} ({run}): {fault}")
    status = "fail" if faults else "unmeasured" if missing else "pass"
    if not faults and 2 * len(judged) < len(counted):
        status = "unmeasured"
    if missing and judged:
        why = f"{why}; not seen: {', '.join(missing)}".removeprefix("; ")
    return Row(name=name, status=status, seen=len(judged), of=len(counted), faults=tuple(faults),
               unmeasured=tuple(missing), why=why)  # fmt: skip


def not_asked(got: Sequence[Exchange]) -> dict[str, str]:
    """By probe, why a fault cannot reach a user: the target lacks something, or the server refuses it by name."""
    skipped = {one.kind: "refused by the server" for one in got if one.refused}
    return skipped | {one.kind: one.error or "" for one in got if one.run == "withheld"}


def form_looks(exchanges: Sequence[Exchange], known: Sequence[Exchange]) -> list[Look]:
    """Looks at what needs no other server."""
    return [
        *answers(exchanges),
        *_streams(exchanges),
        *prompts(exchanges),
        *_unsure(exchanges),
        *transport(exchanges, known),
        *_overruns(exchanges),
        *_penalties(exchanges, DOUBTFUL),
    ]


# --- answers ---


def answers(exchanges: Sequence[Exchange]) -> Iterator[Look]:
    """Every request is answered, or a parameter is refused by name."""
    for one in exchanges:
        if one.run != "withheld" and not (one.refused and one.kind in PROBES["parameters"]):
            fault = "" if one.answered else one.error or "the answer has no finish_reason"
            yield Look("request", one.name, fault)


def _streams(exchanges: Sequence[Exchange]) -> Iterator[Look]:
    """Streams come as they are made. A proxy holds back every stream; where some came as they were made, the others
    waited for a busy machine."""
    long = [
        one
        for one in exchanges
        if one.answered and one.body.get("stream") and one.size > TOKENS_PER_ARRIVAL
    ]
    held = all(one.size > TOKENS_PER_ARRIVAL * one.arrivals for one in long)
    fault = "came at once: a proxy or the server holds streams back" if held else ""
    for one in long:
        yield Look("streams", one.name, fault)


# --- prompts ---


def prompts(exchanges: Sequence[Exchange]) -> Iterator[Look]:
    """The server reads a conversation as our own chat template writes it: token ids, or else their number."""
    for one in exchanges:
        if one.answered and one.prompt:
            yield Look(one.kind, one.name, _misread(one))


def _misread(one: Exchange) -> str | None:
    want = tuple(one.prompt)
    count = len(one.prompt_ids) or one.prompt_tokens
    if not count:
        return None
    if count == len(want) and (one.prompt_ids or want) == want:
        return ""
    return f"read {count} tokens that are not the {len(want)} of the chat template"


# --- greedy ---


def is_greedy(one: Exchange) -> bool:
    """An answer at temperature 0 that no grammar and no parameter changed."""
    return one.answered and bool(one.token_ids) and one.kind in GREEDY and not one.body.get("stop")


def greedy(
    got: Sequence[Exchange], plain: Sequence[Exchange], exact: bool
) -> tuple[list[Look], str]:
    """No token of a greedy answer is further behind the target's best than rounding explains."""
    asked = [one for one in got if is_greedy(one)]
    regrets = {_identity(one): regret(one) for one in asked if one.scores}
    own = {_identity(one): regret(one) for one in plain if is_greedy(one) and one.scores}
    limit = EXACT if exact else CERTAIN
    different = sum(value > NEAR for value in regrets.values())
    theirs = sum(value > NEAR for value in own.values())
    if more_often(different, len(regrets), theirs, len(own)):
        limit = min(limit, NEAR)
    looks = []
    for one in asked:
        fault: str | None = "" if one.scores else None
        if (behind := regret(one)) > limit:
            token = _behind(one).index(behind)
            fault = f"token {token} is {behind:.2f} of {limit:g} nats behind the target's best"
        looks.append(Look(one.run if one.run in REPEATS else one.kind, one.name, fault))
    if not regrets:
        return looks, NO_SCORES
    rounding = max(own.values(), default=0.0)
    worst = max(regrets.values())
    return (
        looks,
        f"at most {worst:.2f} of {limit:g} nats behind, without speculation {rounding:.2f}",
    )


def _identity(one: Exchange) -> tuple[str, tuple[int, ...]]:
    return one.key, one.token_ids


def regret(one: Exchange) -> float:
    """Nats that a token is behind the target's best one at most."""
    return max(_behind(one), default=0.0)


def _behind(one: Exchange) -> list[float]:
    return [score.top[0] - score.chosen for score in one.scores]


def more_often(mine: int, of: int, theirs: int, among: int, alpha: float = ALPHA) -> bool:
    """Whether `mine` of `of` are more than `theirs` of `among` explain: Fisher's exact test, one-sided."""
    total, found = of + among, mine + theirs
    ways = math.comb(total, found)
    tail = sum(
        math.comb(of, k) * math.comb(among, found - k) for k in range(mine, min(of, found) + 1)
    )
    return tail / ways < alpha


# --- sampled ---


def sampled(got: Sequence[Exchange], plain: Sequence[Exchange]) -> tuple[list[Look], str]:
    """Answers at a temperature are drawn from the target's distribution; seeds repeat and differ; choices differ."""
    looks = list(_unsure(got))
    found = collect(got)
    if not any(one.scores for one in got):
        return looks, NO_SCORES
    limit, won, theirs = -math.log(ALPHA), mixed(found), mixed(collect(plain))
    why = (
        f"log e {won:.1f} of {limit:.1f}, without speculation {theirs:.1f}, "
        f"a faulty sampler {min(found).faulty:.1f} or more"
    )
    for probe in SAMPLERS:
        bets = [bet for bet in found if bet.probe == probe]
        best = max(bets, key=lambda bet: bet.won)
        shown = min(won, best.won)
        fault: str | None = ""
        if theirs > limit or max(shown, min(bets).faulty) <= limit:
            fault = None
        elif shown > limit:
            fault = f"tokens are not drawn from the target's distribution, as with {best.fault}"
        looks.append(Look(probe, ("sampled", "all"), fault))
    return looks, why


def _unsure(exchanges: Sequence[Exchange]) -> Iterator[Look]:
    """At a high temperature, most choices of one `n` differ, some seed repeats its answer, and seeds differ."""
    answers = defaultdict[Any, list[tuple[int, ...]]](list)
    seeds = [one for one in exchanges if one.kind == "seed" and one.token_ids]
    for one in seeds:
        answers[one.body["seed"]].append(one.token_ids)
    for one in exchanges:
        if one.kind == "n" and one.answered:
            count, different = len(one.choices), len({*one.choices})
            wrong = count < one.body["n"] or different <= count // 2
            fault = f"{different} different choices"
            yield Look("n", one.name, fault * wrong)
    repeated = {seed for seed, texts in answers.items() if len({*texts}) < len(texts)}
    fault = "" if repeated - {None} else "no seed repeats its answer"
    if None in repeated:
        fault = "answers without a seed are equal"
    if len({texts[0] for texts in answers.values()}) < 2:
        fault = "all seeds give one answer"
    # without one of the answers, little is known of the others
    for one in seeds if len(seeds) == 2 * len(SEEDS) else ():
        yield Look("seed", one.name, fault)


# --- transport ---

Parts = list[str]  # reasoning, text, calls


def transport(exchanges: Sequence[Exchange], known: Sequence[Exchange]) -> Iterator[Look]:
    """A message, whole or streamed, is what the Kimi parser makes of the tokens."""
    raws = defaultdict[str, list[Exchange]](list)
    for one in known:
        if one.raw:
            raws[one.key].append(one)
    ids = Counter(call["id"] for one in exchanges for call in one.calls)
    for one in exchanges:
        if not one.answered:
            continue
        yield Look("finish", one.name, _finish_fault(one))
        if one.token_ids and one.completion_tokens:
            wrong = abs(len(one.token_ids) - one.completion_tokens) > 1
            fault = f"counts {one.completion_tokens} tokens of {len(one.token_ids)}"
            yield Look("usage", one.name, fault if wrong else "")
        if "prompt" in one.body:
            other = bool(one.raw) and one.content.strip() not in one.raw
            yield Look(one.kind, one.name, "the text is not that of its tokens" if other else "")
            continue
        if one.calls:
            yield Look("ids", one.name, _call_id_fault(one, ids))
        yield from _message(one, raws[one.key])


def _finish_fault(one: Exchange) -> str:
    limit = _limit(one)
    if one.finish == "length" and 0 < one.size < limit:
        return f"length after {one.size} of {limit} tokens"
    if _stopped_late(one):
        return f"stop after {limit} tokens, where the limit ended the answer"
    if one.calls and one.finish not in ("tool_calls", "length"):
        return f"{one.finish} after calls"
    return ""


def _stopped_late(one: Exchange) -> bool:
    """Whether check had to add the end of turn behind the last token that was allowed."""
    limit = _limit(one)
    return one.finish == "stop" and one.completion_tokens == limit == len(one.token_ids) - 1


def _limit(one: Exchange) -> int:
    limit: int = one.body.get("max_tokens", 2**31) * one.body.get("n", 1)
    return limit


def _call_id_fault(one: Exchange, ids: Counter[str]) -> str:
    """Kimi's own ids count the calls of a conversation, so two answers may share one."""
    own = [call["id"] for call in one.calls]
    if one.unindexed:
        return "fragments of calls without an index"
    if not all(own) or any(own.count(name) > max(1, one.raw.count(name)) for name in own):
        return "calls without an id of their own"
    shared = [name for name in own if ids[name] > 1 and not name.startswith("functions.")]
    return f"the id {shared[0]} is that of several answers" if shared else ""


def _message(one: Exchange, raws: Sequence[Exchange]) -> Iterator[Look]:
    """Looks at a chat's text, reasoning and calls."""
    mine, want = _parts(one), _expected(one, raws)
    cut = one.finish == "length" and one.kind in CUT_SHORT
    probes = [one.kind]
    if one.kind in FORMS:
        probes += ["characters"] * (one.kind == "json")
        right = FORMS[one.kind](one)
        shown = right or not cut
        wanted = "its form"
    else:
        right = any(_agrees(mine, parts) for parts in want) or _tied(one, raws)
        expected = want[0] if want else mine
        reasoning, text, *calls = expected
        probes += ["reasoning"] * bool(reasoning) + ["characters"] * (not text.isascii())
        needed = {"call": calls, "reasoning": reasoning}.get(one.kind, want)
        shown = bool(want) and not cut and bool(needed or not right)
        wanted = _shown(expected)
    fault = "" if right else f"{_shown(mine)} is not {wanted}"
    for probe in probes:
        yield Look(probe, one.name, fault if shown else None)


FORMS: dict[str, Callable[[Exchange], bool]] = {
    "picture": lambda one: bool(one.content or one.reasoning),
    "json": lambda one: _object(one) == {"name": _object(one).get("name"), **VALUES},
    "arguments": lambda one: _parts(one) == ["", "", _call(CALLED["function"])],
    "spoken": lambda one: _parts(one)[1:] == _parsed(SAID)[1:],
    "calls": lambda one: _parts(one)[2:4] == 2 * _parsed(SAID)[2:],
}  # fmt: skip
# answers that show nothing if they end at the limit
CUT_SHORT = {"picture", "json", "arguments", "spoken", "call", "follow-up", "stop", "stops"}


def _object(one: Exchange) -> dict[str, Any]:
    """The JSON object that an answer is; {} for other text."""
    try:
        value = json.loads(one.content)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def _expected(one: Exchange, raws: Sequence[Exchange]) -> list[Parts]:
    """What the message may be: the parse of its own tokens, else of the tokens of any answer to the same prompt."""
    found = []
    for raw in [one.raw] if one.raw else [other.raw for other in raws]:
        parts = _parsed(raw)
        text = parts[1]
        ends = [index for word in one.body.get("stop", ()) if (index := text.find(word)) >= 0]
        found.append([parts[0], text[: min(ends)]] if ends else parts)
    return found


def _parsed(raw: str) -> Parts:
    message = parse_reply(raw, False)
    calls = [call["function"] for call in message.get("tool_calls", ())]
    return [message.get("reasoning_content", ""), message["content"] or "", *map(_call, calls)]


def _parts(one: Exchange) -> Parts:
    return [one.reasoning, one.content, *map(_call, one.calls)]


def _call(call: Mapping[str, str]) -> str:
    """`name(arguments)`, the arguments in one spelling of JSON, with the order of their members."""
    arguments = call["arguments"]
    with suppress(ValueError):
        arguments = json.dumps(json.loads(arguments), ensure_ascii=False)
    return f"{call['name']}({arguments})"


def _agrees(mine: Parts, want: Parts) -> bool:
    """A server may leave out white space at the ends, and add none."""
    pairs = zip(mine, want, strict=False)
    same = all(text in other and text.strip() == other.strip() for text, other in pairs)
    return same and len(mine) == len(want)


def _shown(parts: Parts) -> str:
    return " ".join(repr(part[:60]) for part in parts if part) or "nothing"


def _tied(one: Exchange, raws: Sequence[Exchange]) -> bool:
    """Without tokens of its own: whether the message parts from an answer to the same prompt at a near-tie."""
    if one.raw:
        return False
    text = one.reasoning + one.content
    for other in raws:
        base = "".join(_parsed(other.raw)[:2])
        same = len(commonprefix([text, base]))
        token = len(other.token_ids) * same // max(1, len(base))
        for score in other.scores[max(0, token - 2) : token + 2]:
            if sum(value >= score.top[0] - CERTAIN for value in score.top) > 1:
                return True
    return False


# --- parameters ---


def parameters(got: Sequence[Exchange], plain: Sequence[Exchange]) -> Iterator[Look]:
    """What the plain server honours, this one honours or refuses."""
    theirs = {one.kind: one for one in plain if one.answered}
    # what most answers to the same prompt are behind at least, if no parameter leaves the best token alone
    loose = median([0.0, *(regret(one) for one in got if one.kind == "seed")])
    yield from _overruns(got)
    clear = {look.probe for look in _penalties(plain, CLEAR) if not look.fault}
    for look in _penalties(got, DOUBTFUL):
        yield look if look.probe in clear or not look.fault else look._replace(fault=None)
    for one in got:
        other = theirs.get(one.kind)
        if one.kind in TRUNCATIONS:  # each leaves the best token alone
            ignored = regret(one) > CERTAIN
            shown = bool(one.scores) and loose > CERTAIN
        elif other and one.answered:
            ignored = not _kept(one)
            shown = _kept(other)
        else:
            continue
        yield Look(one.kind, one.name, NO_EFFECT * ignored if shown else None)


def _penalties(exchanges: Sequence[Exchange], alpha: float) -> Iterator[Look]:
    """More tokens repeat with one sign of a penalty than with the other."""
    repeats: dict[Name, tuple[int, int]] = {}
    for one in exchanges:
        size = len(one.token_ids)
        if size:
            repeats[one.name] = size - len({*one.token_ids}), size
    for kind in PENALTIES:
        names = (kind, "more"), (kind, "less")
        more, less = (repeats.get(name) for name in names)
        if more and less:
            fault = "" if more_often(*more, *less, alpha) else NO_EFFECT
            for name in names:
                yield Look(kind, name, fault)


def _overruns(exchanges: Sequence[Exchange]) -> Iterator[Look]:
    for one in exchanges:
        if one.answered:
            over = f"{one.size} tokens, {_limit(one)} are allowed"
            right = one.size <= _limit(one) or _stopped_late(one)
            yield Look("max_tokens", one.name, "" if right else over)


def _kept(one: Exchange) -> bool:
    """Whether an answer keeps to its parameters."""
    body, ids = one.body, one.token_ids
    stops, biased = body.get("stop_token_ids", ()), map(int, body.get("logit_bias", ()))
    long_enough = len(ids) >= body.get("min_tokens", 0) - 1
    return long_enough and {*ids[:-1]}.isdisjoint(stops) and {*ids}.isdisjoint(biased)


# --- acceptance ---


def acceptance(got: Sequence[Exchange], floor: float | None) -> tuple[list[Look], str]:
    """Tokens per step at or above the floor, never the same in each step, and no fewer where the same text comes from a
    warm cache, in a crowd or after it."""
    runs = ("ids", "stream")
    asked = [one for one in got if one.kind == "text" and one.run in runs and one.answered]
    tokens, steps = _tokens_and_steps(asked)
    wanted = f", {floor:g} tokens per step are wanted" if floor else ""
    if steps < MIN_STEPS:
        return [], f"{steps} steps are shown, {MIN_STEPS} are needed{wanted}"
    length = tokens / steps
    why = f"{length:.2f} tokens per step{wanted}"
    low = length < (floor or 0)
    if not (speculates(asked) or low):
        return [], f"{why}: no draft was accepted"
    sizes = Counter(
        b - a for one in asked for a, b in zip(one.counted, one.counted[1:-1], strict=False)
    )
    faults: dict[str, str | None] = {"floor": why if low else ""}
    first = {_identity(one): one for one in got if one.run == "ids" and one.steps}
    for run in REPEATS:
        again = [one for one in got if one.run == run and _identity(one) in first]
        before = [first[_identity(one)] for one in again]
        faults[run] = _slower(again, before, KEPT_DRAFTS, MIN_STEPS // 2)
    long = [one for one in got if one.kind == "long" and one.run == "ids"]
    faults["long"] = _slower(long, asked, COLLAPSE, COLLAPSE_STEPS)
    forced = forced_sizes(sizes)
    faults["forced"] = forced and f"every step brought {forced} tokens"
    return [Look(probe, ("text", probe), fault) for probe, fault in faults.items()], why


def speculates(exchanges: Sequence[Exchange]) -> bool:
    """Whether steps brought several tokens."""
    tokens, steps = _tokens_and_steps(exchanges)
    return tokens > SPECULATES * steps


def _tokens_and_steps(exchanges: Iterable[Exchange]) -> tuple[int, int]:
    """(tokens, steps) of the answers that show their steps; the first token comes from the prefill."""
    stepped = [one for one in exchanges if one.steps and one.size > 1]
    return sum(one.size - 1 for one in stepped), sum(one.steps or 0 for one in stepped)


def forced_sizes(sizes: Counter[int]) -> str:
    """`2 or 3` where steps brought no other number of tokens, never one alone; "" for a drafter that drafts. The end of
    an answer cuts a step, so that rare sizes do not count."""
    common = {size for size, count in sizes.items() if count >= max(1, RARE * sizes.total())}
    forced = sizes.total() >= MIN_STEPS and 1 not in common and len(common) <= 2
    return " or ".join(map(str, sorted(common))) if forced else ""


def _slower(
    now: Sequence[Exchange], before: Sequence[Exchange], kept: float, least: int
) -> str | None:
    """A fault where a step accepted fewer drafts than `kept` of those before, and beyond chance. None for fewer than
    `least` steps."""
    tokens, steps = _tokens_and_steps(now)
    tokens_before, steps_before = _tokens_and_steps(before)
    if min(steps, steps_before) < least:
        return None
    length, earlier = tokens / steps, tokens_before / steps_before
    fell = length - 1 < kept * (earlier - 1)
    if fell and more_often(steps, tokens, steps_before, tokens_before):
        return f"{length:.2f} tokens per step, {earlier:.2f} for the first short texts"
    return ""


# --- the verdict ---


@dataclass(frozen=True, kw_only=True)
class CheckVerdict:
    """`word` is SAFE, NOT SAFE or NOT PROVEN; `line` says why in one sentence."""

    rows: tuple[Row, ...]
    accepted: frozenset[str] = frozenset()

    @property
    def missing(self) -> list[Row]:
        """Unmeasured rows that the user does not accept as such."""
        return [
            row for row in self.rows if row.status == "unmeasured" and row.name not in self.accepted
        ]

    @property
    def word(self) -> str:
        if any(row.faults for row in self.rows):
            return "NOT SAFE"
        return "NOT PROVEN" if self.missing else "SAFE"

    @property
    def line(self) -> str:
        rows = [row for row in self.rows if row.faults] or self.missing
        if rows:
            none = "too little was seen"
            reasons = [f"{row.name}: {(*row.faults, row.why or none)[0]}" for row in rows]
            return f"{self.word}: {'; '.join(reasons)}"
        rest = [row.name for row in self.rows if row.status == "unmeasured"]
        left = f"; not measured: {', '.join(rest)}" if rest else ""
        return f"SAFE: the same output as without speculation{left}"


def coverage(got: Sequence[Exchange], rows: Sequence[Row]) -> str:
    """What a verdict is about: kinds of faults, and lengths."""
    absent = [f"{probe} ({reason})" for probe, reason in not_asked(got).items()]
    missing = sum(len(row.unmeasured) for row in rows)
    prompt = max(len(one.prompt) for one in got)
    answer = max(one.size for one in got)
    covered = len(KINDS) - missing - len(absent)
    lengths = f"prompts up to {prompt:,} tokens, answers up to {answer:,}"
    left = ", ".join([*absent, NEVER_ASKED])
    return f"covered: {covered} of {len(KINDS)} kinds of faults, {lengths}; not asked: {left}"
