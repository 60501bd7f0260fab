"""The rows of the gate: pure functions of one or two recordings.

A row states how much it looked at, and its status follows: fail where it has faults; unmeasured where it looked at
nothing, or at less than half; else pass. A fault that the plain server shows for the same request never counts.
"""

from __future__ import annotations

import json
import math
import random
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from trtspec.checkpoint.chat_parser import parse_reply
from trtspec.client.exchange import Exchange, Score

# every threshold of the gate
NEAR = 0.25  # nats behind the best token from which an answer counts as different; rounding seldom reaches it
CERTAIN = 2.0  # nats behind from which one answer fails; bfloat16 reaches 1.1 where the target itself is unsure
EXACT = 1e-3  # nats, with --exact: float32 rounds far below
ALPHA = 1e-3 / 5  # false alarms of one test; a check makes five of them at most
SURE = 0.9  # probability of the best token from which a token says little about the sampler
KEPT_DRAFTS = (
    0.8  # accepted drafts per step over those of the same texts before: below it is a regression
)
COLLAPSE = 0.05  # the same for long prompts, which are other texts, over short ones
MIN_STEPS = 50  # below, acceptance says nothing
RARE = 0.02  # share of the steps below which a size is that of last steps, which the end of an answer cuts
SPECULATES = 1.1  # tokens per step; a busy server without speculation joins a few chunks as well
TOKENS_PER_ARRIVAL = 16  # more than any drafter yields in a step: a proxy buffers

Status = Literal["pass", "fail", "unmeasured"]
Name = tuple[str, str]
GREEDY = ("text", "long", "turn-2", "call", "follow-up", "prompt", "stop")


@dataclass(frozen=True, kw_only=True)
class Row:
    """`seen` of `of` things were looked at; `why` says what was missing, or what was measured."""

    name: str
    status: Status
    seen: int = 0
    of: int = 0
    faults: tuple[str, ...] = ()
    why: str = ""


def judged(name: str, seen: int = 0, of: int = 0, faults: Sequence[str] = (), why: str = "") -> Row:
    """The row with the status that follows from what was seen."""
    status: Status = "fail" if faults else "pass" if seen and 2 * seen >= of else "unmeasured"
    return Row(name=name, status=status, seen=seen, of=of, faults=tuple(faults), why=why)


def judge(
    got: Sequence[Exchange],
    plain: Sequence[Exchange] | None,
    *,
    min_acceptance: float | None = None,
    exact: bool = False,
) -> list[Row]:
    """The seven rows. `plain`: exchanges of the server without speculation, None where there is none. `exact`: both
    servers compute in float32, so every difference fails."""
    theirs = plain or []
    if plain and speculates(plain):
        why = "the server named as plain speculates: it brings several tokens in one step"
        unknown = [judged(name, why=why) for name in ("greedy", "sampled", "parameters")]
        theirs = []
    else:
        why = "" if plain else "needs the server without speculation (`score`, `against`)"
        first = greedy(got, theirs, exact, why)
        if first.faults:  # one cause, one row
            why = "greedy answers differ already"
            unknown = [first, judged("sampled", why=why), judged("parameters", why=why)]
        else:
            unknown = [first, sampled(got, theirs, why), parameters(got, theirs, why)]
    return [answers(got, theirs), prompts(got, theirs), *unknown[:2], transport(got, theirs), unknown[2],
            acceptance(got, min_acceptance)]  # fmt: skip


def faulty(got: Sequence[Exchange]) -> set[Name]:
    """The requests whose faults count unless the plain server shows them too."""
    return {*_failures(got), *_misread(got, _prompts(got)), *_garbled(got, got)}


def _new(mine: dict[Name, str], theirs: dict[Name, str]) -> tuple[str, ...]:
    return tuple(
        f"{key} ({run}): {fault}" for (key, run), fault in mine.items() if (key, run) not in theirs
    )


# --- answers ---


def answers(got: Sequence[Exchange], plain: Sequence[Exchange]) -> Row:
    """Every request is answered, and streams come as they are made."""
    answered = {one.name for one in plain if one.answered}
    refused = {one.name for one in got if one.refused and one.name not in answered}
    mine = {name: fault for name, fault in _failures(got).items() if name not in refused}
    late, seen = _at_once(got)
    if late and not _at_once(plain)[0]:
        mine["streams", "all"] = (
            f"{late} of {seen} came at once: a proxy or the server holds them back"
        )
    asked = [one for one in got if not (one.refused and one.kind == "parameter")]
    looked = [one for one in asked if one.name not in refused]
    why = (
        f"refused by name: {', '.join(sorted({key for key, _ in refused}))}"
        if len(looked) < len(asked)
        else ""
    )
    return judged(
        "answers", seen=len(looked), of=len(asked), faults=_new(mine, _failures(plain)), why=why
    )


def _failures(exchanges: Sequence[Exchange]) -> dict[Name, str]:
    return {one.name: one.error or "the answer has no finish_reason" for one in exchanges
            if not one.answered and not (one.refused and one.kind == "parameter")}  # fmt: skip


def _at_once(exchanges: Sequence[Exchange]) -> tuple[int, int]:
    """(streams that came at once, streams that are long enough to tell). A proxy holds back every stream; where some
    came as they were made, the others waited for a busy machine, and the first figure is 0."""
    long = [
        one
        for one in exchanges
        if one.answered and one.body.get("stream") and _size(one) > TOKENS_PER_ARRIVAL
    ]
    late = sum(_size(one) > TOKENS_PER_ARRIVAL * one.arrivals for one in long)
    return (late if late == len(long) else 0), len(long)


def _size(one: Exchange) -> int:
    return len(one.token_ids) or one.completion_tokens or 0


# --- prompts ---


def prompts(got: Sequence[Exchange], plain: Sequence[Exchange]) -> Row:
    """The server reads a conversation as our own chat template writes it: token ids, or else their number."""
    expected = _prompts(got)
    asked = [one for one in got if one.answered and one.key in expected]
    counted = [one for one in asked if one.prompt_ids or one.prompt_tokens]
    faults = _new(_misread(got, expected), _misread(plain, expected))
    return judged(
        "prompts",
        seen=len(counted),
        of=len(asked),
        faults=faults,
        why="" if counted else "no token counts",
    )


def _prompts(exchanges: Sequence[Exchange]) -> dict[str, list[int]]:
    return {one.key: one.body["prompt"] for one in exchanges if "prompt" in one.body}


def _misread(exchanges: Sequence[Exchange], expected: dict[str, list[int]]) -> dict[Name, str]:
    found = {}
    for one in exchanges:
        if not one.answered or one.key not in expected:
            continue
        want = expected[one.key]
        count = len(one.prompt_ids) or one.prompt_tokens
        if count and count != len(want):
            found[one.name] = f"read {count} tokens, the chat template gives {len(want)}"
        elif one.prompt_ids and list(one.prompt_ids) != want:
            place = next(
                i for i, (a, b) in enumerate(zip(one.prompt_ids, want, strict=True)) if a != b
            )
            found[one.name] = f"token {place} of the prompt differs from the chat template's"
    return found


# --- greedy ---


def is_greedy(one: Exchange) -> bool:
    """An answer at temperature 0 that no grammar and no parameter changed."""
    return bool(one.token_ids) and one.answered and one.kind in GREEDY and not one.body.get("stop")


def greedy(got: Sequence[Exchange], plain: Sequence[Exchange], exact: bool, why: str) -> Row:
    """No token of a greedy answer is further behind the target's best than rounding explains."""
    asked = [one for one in got if is_greedy(one)]
    scored = {(one.key, one.token_ids): one for one in asked if one.scores}
    own = {(one.key, one.token_ids): regret(one) for one in plain if is_greedy(one) and one.scores}
    rounding = max(own.values(), default=0.0)
    limit = EXACT if exact else CERTAIN
    regrets = {key: regret(one) for key, one in scored.items()}
    wrong = [key for key, value in regrets.items() if value > limit]
    open_ = [key for key, value in regrets.items() if NEAR < value <= limit]
    theirs = sum(value > NEAR for value in own.values())
    if own and more_often(len(open_) + len(wrong), len(regrets), theirs, len(own)):
        wrong += open_
    faults = tuple(_differs(scored[key]) for key in wrong)
    seen = sum(bool(one.scores) for one in asked)
    if asked and seen and not why:
        why = f"at most {max(regrets.values()):.3f} nats behind, without speculation {rounding:.3f}"
    return judged(
        "greedy", seen=seen, of=len(asked), faults=faults, why=why or ("" if seen else "no scores")
    )


def regret(one: Exchange) -> float:
    return max((score.best - score.chosen for score in one.scores), default=0.0)


def _differs(one: Exchange) -> str:
    worst = max(
        range(len(one.scores)), key=lambda place: one.scores[place].best - one.scores[place].chosen
    )
    return (
        f"{one.key} ({one.run}): token {worst} is {regret(one):.2f} nats behind the target's best"
    )


def more_often(mine: int, of: int, theirs: int, among: int) -> bool:
    """Whether `mine` of `of` are more than `theirs` of `among` explain: Fisher's exact test, one-sided."""
    total, found = of + among, mine + theirs
    ways = math.comb(total, found)
    tail = sum(
        math.comb(of, k) * math.comb(among, found - k) for k in range(mine, min(of, found) + 1)
    )
    return mine > 0 and tail / ways < ALPHA


# --- sampled ---


def is_sampled(one: Exchange) -> bool:
    return bool(one.token_ids) and one.answered and one.kind == "sampled"


def sampled(got: Sequence[Exchange], plain: Sequence[Exchange], why: str) -> Row:
    """Answers at temperature 1 are drawn from the target's distribution."""
    asked = [one for one in got if is_sampled(one)]
    scored = [one for one in asked if one.scores]
    mine, theirs = log_e(scored), log_e([one for one in plain if is_sampled(one) and one.scores])
    if theirs > math.log(1 / ALPHA):
        return judged(
            "sampled",
            of=len(asked),
            why="the server without speculation does not sample exactly either",
        )
    tokens = sum(len(one.scores) for one in scored)
    if (
        scored
        and mine <= math.log(1 / ALPHA)
        and log_e(scored, greedily=True) <= math.log(1 / ALPHA)
    ):
        why = f"the target is so sure of these {tokens} tokens that an ignored temperature would not show: ask more"
        return judged("sampled", of=len(asked), why=why)
    if not why:
        why = (
            f"log e {mine:.1f} over {tokens} tokens, without speculation {theirs:.1f}"
            if scored
            else "no scores"
        )
    faults: tuple[str, ...] = ()
    if mine > math.log(1 / ALPHA):
        faults = (
            f"{tokens} tokens at temperature 1 are not drawn from the target's distribution (log e {mine:.1f})",
        )
    return judged("sampled", seen=len(scored), of=len(asked), faults=faults, why=why)


BETS = tuple(
    (shape, size)
    for shape in (
        lambda u: 2 * u - 1,
        lambda u: math.cos(2 * math.pi * u),
        lambda u: math.cos(4 * math.pi * u),
    )
    for size in (-0.6, -0.3, -0.1, 0.1, 0.3, 0.6)
)


def log_e(exchanges: Sequence[Exchange], greedily: bool = False) -> float:
    """Logarithm of a mixture of betting martingales over the tokens' places in the target's distribution, which are
    uniform for an exact sampler: above log 5000 by chance once in 5,000 checks at most. `greedily`: what it would be if
    each token had been the best one."""
    dice = random.Random(0)
    scores = [score for one in exchanges for score in one.scores]
    places = [
        dice.random() * math.exp(score.best) if greedily else _place(score, dice.random())
        for score in scores
    ]
    # where the target is sure, every sampler is right: half of the stake is on the other tokens alone
    unsure = [
        place for place, score in zip(places, scores, strict=True) if math.exp(score.best) < SURE
    ]
    bets = [(places, *bet) for bet in BETS] + [(unsure, *bet) for bet in BETS]
    logs = [
        sum(math.log1p(size * shape(place)) for place in chosen) for chosen, shape, size in bets
    ]
    most = max(logs)
    return most + math.log(sum(math.exp(value - most) for value in logs) / len(logs))


def _place(score: Score, u: float) -> float:
    """The mass of the likelier tokens, and a random share of that of those as likely."""
    low, mass = (score.likelier, score.same) if score.listed else (score.total, 1 - score.total)
    return min(1.0, low + u * max(0.0, mass))


# --- transport ---


def transport(got: Sequence[Exchange], plain: Sequence[Exchange]) -> Row:
    """A message, whole or streamed, is what the Kimi parser makes of the tokens."""
    asked = [one for one in got if one.answered and "prompt" not in one.body]
    compared = [one for one in asked if _expected(one, got) and not _cut(one)]
    faults = _new(_garbled(got, [*got, *plain]), _garbled(plain, plain))
    return judged("transport", seen=len(compared), of=len(asked), faults=faults)


def _cut(one: Exchange) -> bool:
    """Whether the answer ended before what was to be seen in it."""
    return one.finish == "length" and one.kind in ("call", "follow-up", "json", "stop")


def _garbled(exchanges: Sequence[Exchange], known: Sequence[Exchange]) -> dict[Name, str]:
    found = {one.name: fault for one in exchanges if one.answered and (fault := _form_fault(one))}
    for one in exchanges:
        if one.name in found or not one.answered or "prompt" in one.body or _cut(one):
            continue
        want = _expected(one, known)
        if want and _parts(one) not in want and not _tied(one, known):
            found[one.name] = _difference(one, want[0])
    return found


Parts = tuple[str, str, tuple[tuple[str, Any], ...]]


def _expected(one: Exchange, known: Sequence[Exchange]) -> list[Parts]:
    """What the message may be: the parse of its own tokens, else of the tokens of any answer to the same prompt."""
    if one.kind == "json":
        return [_parts(one)]  # its form is judged alone
    raws = (
        [one.raw]
        if one.raw
        else [other.raw for other in known if other.key == one.key and other.raw]
    )
    found = []
    for reasoning, text, calls in map(_parsed, raws):
        ends = [place for word in one.body.get("stop") or [] if (place := text.find(word)) >= 0]
        found.append(
            (reasoning, text[: min(ends)].strip(), ()) if ends else (reasoning, text, calls)
        )
    return found


def _parsed(raw: str) -> Parts:
    message = parse_reply(raw, False)
    calls = tuple(
        (call["function"]["name"], _normal(call["function"]["arguments"]))
        for call in message.get("tool_calls", ())
    )
    return message.get("reasoning_content", "").strip(), (message["content"] or "").strip(), calls


def _parts(one: Exchange) -> Parts:
    calls = tuple((call["name"], _normal(call["arguments"])) for call in one.calls)
    return one.reasoning.strip(), one.content.strip(), calls


def _normal(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text.strip()


def _difference(one: Exchange, want: Parts) -> str:
    named = zip(("reasoning", "text", "tool calls"), _parts(one), want, strict=True)
    name, mine, theirs = next(each for each in named if each[1] != each[2])
    return f"{name} {str(mine)[:60]!r} where the tokens read {str(theirs)[:60]!r}"


def _tied(one: Exchange, known: Sequence[Exchange]) -> bool:
    """Without tokens of its own: whether the message parts from an answer to the same prompt at a near-tie."""
    if one.raw:
        return False
    for other in known:
        if other.key == one.key and other.scores and other.raw:
            text = one.reasoning + one.content
            base = "".join(_parsed(other.raw)[:2])
            same = next(
                (i for i, (a, b) in enumerate(zip(text, base, strict=False)) if a != b),
                min(len(text), len(base)),
            )
            token = len(other.token_ids) * same // max(1, len(base))
            if any(score.near for score in other.scores[max(0, token - 2) : token + 2]):
                return True
    return False


def _form_fault(one: Exchange) -> str | None:
    """What is wrong with an answer whatever the model wrote."""
    size = len(one.token_ids)
    limit = one.body.get("max_tokens", 2**31)
    if size and one.completion_tokens and abs(size - one.completion_tokens) > 1:
        return f"usage counts {one.completion_tokens} tokens of {size}"
    if one.finish == "length" and (one.completion_tokens or size or limit) < limit:
        return f"finish_reason is length after {one.completion_tokens or size} of {limit} tokens"
    if "prompt" in one.body:
        seen = one.content.strip()
        return (
            "the text is not that of its tokens"
            if seen and one.raw and seen not in one.raw
            else None
        )
    if one.unindexed:
        return "fragments of calls without an index"
    ids = [call["id"] for call in one.calls]
    if one.calls and (not all(ids) or len(set(ids)) < len(ids)):
        return "calls without an id of their own"
    if one.calls and one.finish not in ("tool_calls", "length"):
        return f"finish_reason is {one.finish} after calls"
    if one.kind == "json" and one.finish != "length" and not _fits(_normal(one.content)):
        return f"{one.content[:60]!r} does not fit the schema"
    if one.kind == "stop" and any(word in one.content for word in one.body.get("stop") or []):
        return "runs past its stop string"
    return None


def _fits(value: Any) -> bool:
    """Whether a value fits the schema of the JSON requests."""
    return (
        isinstance(value, dict)
        and value.keys() == {"name", "count"}
        and isinstance(value["name"], str)
        and isinstance(value["count"], int)
    )


# --- parameters ---


def parameters(got: Sequence[Exchange], plain: Sequence[Exchange], why: str) -> Row:
    """What the plain server honours, this one honours or refuses."""
    mine, theirs = _honoured(got), _honoured(plain)
    asked = {one.key.split()[0] for one in got if one.kind == "parameter"}
    refused = {one.key.split()[0] for one in got if one.kind == "parameter" and one.refused}
    seen = {name for name in mine.keys() | refused if name in theirs or name in refused}
    lost = [name for name, here in mine.items() if not here and theirs.get(name)]
    faults = tuple(
        f"{name} has no effect, and has one without speculation" for name in sorted(lost)
    )
    why = why or (f"refused by name: {', '.join(sorted(refused))}" if refused else "")
    return judged("parameters", seen=len(seen), of=len(asked), faults=faults, why=why)


def _honoured(exchanges: Sequence[Exchange]) -> dict[str, bool]:
    """By parameter, whether its answers show it. A penalty shows where any answer changes."""
    bases = {tuple(one.body["prompt"]): one for one in exchanges
             if one.kind == "text" and one.run == "ids" and one.answered}  # fmt: skip
    found: dict[str, list[bool]] = defaultdict(list)
    for one in exchanges:
        base = bases.get(tuple(one.body.get("prompt", ())))
        if one.kind == "parameter" and one.answered and one.token_ids and base:
            found[one.key.split()[0]].append(_shows(one, base))
    return {name: any(shown) if "penalty" in name else all(shown) for name, shown in found.items()}


def _shows(one: Exchange, base: Exchange) -> bool:
    body, ids = one.body, one.token_ids
    if "stop_token_ids" in body:
        return not {*ids[:-1]} & {*body["stop_token_ids"]}
    if "logit_bias" in body:
        return not {*map(str, ids)} & body["logit_bias"].keys()
    if "min_tokens" in body:
        return len(ids) >= body["min_tokens"] - 1
    if "top_p" in body:  # next to nothing of the distribution is left: the greedy answer
        return ids == base.token_ids or (bool(one.scores) and regret(one) <= CERTAIN)
    if body["max_tokens"] != base.body["max_tokens"]:
        return len(ids) <= body["max_tokens"]
    return ids != base.token_ids


# --- acceptance ---


def acceptance(got: Sequence[Exchange], floor: float | None) -> Row:
    """Tokens per step at or above the floor, never the same in each step, and no fewer where the same text comes from a
    warm cache, in a crowd or after it."""
    streams = [
        one
        for one in got
        if one.kind == "text" and one.body.get("stream") and one.run in ("ids", "stream")
    ]
    asked = [one for one in streams if one.answered]
    stepped = [one for one in asked if one.steps and _size(one) > 1]
    tokens, steps = _tokens_and_steps(stepped)
    if steps < MIN_STEPS:
        why = (
            f"{steps} steps, and {MIN_STEPS} are needed"
            if stepped
            else "neither chunks nor the server show steps"
        )
        why += f" (for {floor:g} tokens per step)" if floor else ""
        return judged("acceptance", of=len(asked), why=why)
    length = tokens / steps
    why = f"{length:.2f} tokens per step"
    faults = [f"{why}, {floor:g} wanted"] if floor and length < floor else []
    if not speculates(stepped) and not faults:
        return judged("acceptance", of=len(asked), why=f"{why}: no draft was accepted")
    sizes = Counter(
        b - a for one in stepped for a, b in zip(one.counted, one.counted[1:-1], strict=False)
    )
    faults += (
        [f"every step brought {forced} tokens: forced acceptance"]
        if (forced := forced_sizes(sizes))
        else []
    )
    faults += [fall for run in ("warm", "crowd", "later") for fall in _acceptance_fell(got, run)]
    faults += _collapsed(got, length)
    return judged("acceptance", seen=len(stepped), of=len(asked), faults=faults, why=why)


def speculates(exchanges: Sequence[Exchange]) -> bool:
    """Whether steps brought several tokens."""
    tokens, steps = _tokens_and_steps(exchanges)
    return steps > 0 and tokens > SPECULATES * steps


def _tokens_and_steps(exchanges: Iterable[Exchange]) -> tuple[int, int]:
    """(tokens, steps) of the answers that show their steps; the first token comes from the prefill."""
    stepped = [one for one in exchanges if one.steps and _size(one) > 1]
    return sum(_size(one) - 1 for one in stepped), sum(one.steps or 0 for one in stepped)


def forced_sizes(sizes: Counter[int]) -> str:
    """`2 or 3` where steps brought no other number of tokens, never one alone; "" for a drafter that drafts. The end of
    an answer cuts a step, so that rare sizes do not count."""
    common = {size for size, count in sizes.items() if count >= max(1, RARE * sizes.total())}
    forced = sizes.total() >= MIN_STEPS and 1 not in common and len(common) <= 2
    return " or ".join(map(str, sorted(common))) if forced else ""


def _acceptance_fell(got: Sequence[Exchange], run: str) -> list[str]:
    """A fault where equal texts saved fewer steps in this run than in the first one, whose name is "ids": under
    KEPT_DRAFTS of them, and beyond chance. A step that brings two tokens saves one."""
    first = {one.key: one for one in got if one.run == "ids" and one.steps}
    pairs = [
        (first[one.key], one) for one in got if one.run == run and one.steps and one.key in first
    ]
    pairs = [(a, b) for a, b in pairs if a.token_ids == b.token_ids]
    steps_before, steps_now = (sum(each[i].steps or 0 for each in pairs) for i in (0, 1))
    tokens = sum(_size(a) - 1 for a, _ in pairs)  # the first one comes from the prompt's own pass
    if steps_before < MIN_STEPS / 2 or tokens - steps_now >= KEPT_DRAFTS * (tokens - steps_before):
        return []
    if not more_often(steps_now, tokens, steps_before, tokens):
        return []
    return [
        f"{run}: {tokens / steps_now:.2f} tokens per step for the same texts, {tokens / steps_before:.2f} at first"
    ]


def _collapsed(got: Sequence[Exchange], length: float) -> list[str]:
    """Long prompts are other texts than short ones, so only a collapse is a fault."""
    tokens, steps = _tokens_and_steps(one for one in got if one.kind == "long" and one.run == "ids")
    accepted = tokens - steps
    if steps < MIN_STEPS / 2 or accepted > COLLAPSE * (length - 1) * steps:
        return []
    return [
        f"long prompts: {1 + accepted / steps:.2f} tokens per step, {length:.2f} for short ones"
    ]


# --- the verdict ---


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """`word` is SAFE, NOT SAFE or NOT PROVEN; `line` says why in one sentence."""

    rows: tuple[Row, ...]
    accepted: frozenset[str] = field(default=frozenset())

    @property
    def missing(self) -> list[Row]:
        """Unmeasured rows that the user does not accept as such."""
        return [
            row for row in self.rows if row.status == "unmeasured" and row.name not in self.accepted
        ]

    @property
    def word(self) -> str:
        return (
            "NOT SAFE"
            if any(row.faults for row in self.rows)
            else "NOT PROVEN"
            if self.missing
            else "SAFE"
        )

    @property
    def line(self) -> str:
        failed = [row for row in self.rows if row.status == "fail"]
        if failed:
            counts = {
                row.name: f"{len(row.faults)} fault{'s' if len(row.faults) > 1 else ''}"
                for row in failed
            }
            reasons = (f"{row.name}: {counts[row.name]} (first: {row.faults[0]})" for row in failed)
            return f"NOT SAFE: {'; '.join(reasons)}"
        if self.missing:
            reasons = (f"{row.name}: {row.why or 'too little was seen'}" for row in self.missing)
            return f"NOT PROVEN: {'; '.join(reasons)}"
        rest = [row.name for row in self.rows if row.status == "unmeasured"]
        return "SAFE: the same output as without speculation" + (
            f"; not measured: {', '.join(rest)}" if rest else ""
        )
