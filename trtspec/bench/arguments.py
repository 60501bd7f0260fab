"""Are calls and their arguments, the texts behind their results, and forms those of the plain server, up to near-ties?

First whether an answer calls or writes, then what. Arguments and forms are compared as JSON. Where they differ from
those of every pass of the plain server, its tokens tell how sure it was: they hold the whole answer with the markers of
its calls, in which other arguments are put in the place of its own. Where it told no tokens, or its parser rewrites the
arguments, only the number of differences can be judged.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from trtspec.bench.gate import UNLIKELY, more_often
from trtspec.bench.lossless import AnswerDivergence, RoundingBound, first_divergence, is_marker, judge, what_rare_is
from trtspec.bench.transcript import TOOL_MARKERS, Recording, ToolReply, Transcript
from trtspec.bench.visible import VERDICTS, by_question, own_rounding, parted

CONTENT = 1  # among the parts of an answer
CALL_MARKER = re.compile(rf"(?:{'|'.join(map(re.escape, TOOL_MARKERS))})[^<>{{]*>?")  # the whole of one


@dataclass(frozen=True, kw_only=True)
class ReplyComparison:
    """Questions by what became of their `what` (calls, arguments, text): `same`, or another one by verdict. `moved` of
    `repeated` questions have different ones in passes of the plain server; `p` is the chance of so many unjudged
    differences."""

    what: str
    same: list[str]
    near_ties: list[str]
    real: list[str]
    unjudged: list[str]
    moved: int
    repeated: int
    p: float

    @property
    def compared(self) -> int:
        return len(self.same) + len(self.near_ties) + len(self.real) + len(self.unjudged)

    @property
    def wrong(self) -> list[str]:
        """Differences that the plain server's rounding does not explain."""
        return self.real + (self.unjudged if self.p < UNLIKELY else [])

    @property
    def message(self) -> str:
        """A clause behind the count of good calls; empty where nothing was compared."""
        return f", {len(self.same)} of {self.compared} as without speculation{self.parted}" if self.compared else ""

    @property
    def parted(self) -> str:
        """The clauses on those that are not the same."""
        found = f", {len(self.near_ties)} part from it at a near-tie" if self.near_ties else ""
        if self.real:
            found += f", {len(self.real)} have other {self.what}, at more than a near-tie: {self.real[0]}"
        if self.unjudged:
            found += f", {len(self.unjudged)} have other {self.what} and no log-probabilities tell why (the plain "
            found += f"server's own differ for {self.moved} of {self.repeated}, p {self.p:.2g}): {self.unjudged[0]}"
        return found


Replies = Mapping[str, list[ToolReply]]  # by question, in the order of the passes


def replies_by_question(*passes: Sequence[ToolReply]) -> Replies:
    """Without those that failed, and those that were cut off while the model reasoned or called."""
    found: dict[str, list[ToolReply]] = {}
    for reply in (reply for one in passes for reply in one if not reply.error and not cut_off(reply)):
        found.setdefault(reply.question, []).append(reply)
    return found


def compare_turns(
    mine: Sequence[ToolReply], plain: Replies, rounding: RoundingBound | None, limit: float
) -> ReplyComparison:
    """Whether each reply calls the tools that some pass of the plain server called, or writes, or is silent, as it did;
    `limit` of the rounding bound in nats."""
    found: dict[str, list[str]] = {verdict: [] for verdict in ("same", *VERDICTS)}
    for reply in mine:
        known = plain.get(reply.question, [])
        if reply.error or cut_off(reply) or not known:
            continue
        if any(turn_of(reply) == turn_of(other) for other in known):
            found["same"].append(reply.question)
        else:
            found[_kindest(reply, known, rounding, limit)].append(reply.question)
    again = [{str(turn_of(r)) for r in one} for one in plain.values() if one[1:]]
    return _comparison("calls, or none,", _settled(found, rounding, limit), again)


def turn_of(reply: ToolReply) -> list[str] | str:
    return names_of(reply) or ("" if silent(reply) else "text")


def compare_arguments(got: Recording, expected: Recording, limit: float) -> ReplyComparison:
    """Calls by question, where both servers call the same tools; `limit` of the rounding bound in nats."""
    passes = (expected.tools, expected.repeated_tools, expected.streamed_tools, expected.confirmed_tools)
    plain: dict[str, list[ToolReply]] = {}
    for reply in (reply for one in passes for reply in one if reply.calls and not reply.error):
        plain.setdefault(reply.question, []).append(reply)
    rounding = own_rounding(expected)
    found: dict[str, list[str]] = {verdict: [] for verdict in ("same", *VERDICTS)}
    for reply in got.tools:
        known = [other for other in plain.get(reply.question, []) if names_of(other) == names_of(reply)]
        if known:
            found[answer_verdict(reply, known, rounding, limit)].append(reply.question)
    again = [{json.dumps(arguments_of(reply)) for reply in one} for one in plain.values() if one[1:]]
    return _comparison("arguments", _settled(found, rounding, limit), again)


def answer_verdict(reply: ToolReply, known: Sequence[ToolReply], rounding: RoundingBound | None, limit: float) -> str:
    """`same` where it calls what one of these passes called, or writes what that wrote, else how it parts from them;
    `limit` as for turns."""
    if any(same_answer(reply, other) for other in known):
        return "same"
    return _kindest(reply, known, rounding, limit)


def same_answer(reply: ToolReply, other: ToolReply) -> bool:
    """The same calls, or no calls and the same text."""
    alike = names_of(reply) == names_of(other) and arguments_of(reply) == arguments_of(other)
    return alike and (bool(reply.calls) or reply.content.strip() == other.content.strip())


def left_in_text(reply: ToolReply) -> bool:
    """Whether its text begins a call that the parser did not take out: half a call, or a malformed one."""
    return not reply.calls and any(marker in reply.content for marker in TOOL_MARKERS)


def compare_texts(
    mine: Sequence[ToolReply], plain: Replies, rounding: RoundingBound | None, limit: float
) -> ReplyComparison:
    """Texts by question, where both servers wrote one: behind the result of a tool, or in a form; what is equal as JSON
    is the same. `limit` as for arguments."""
    known = by_question(*[[r.transcript for r in one if writes(r)] for one in plain.values()])
    written = [reply for reply in mine if writes(reply) and reply.question in known]
    verdicts = dict(parted([reply.transcript for reply in written], known, (rounding, limit)))
    found: dict[str, list[str]] = {verdict: [] for verdict in ("same", *VERDICTS)}
    for reply in written:
        value = parsed(reply.content)
        alike = value is not None and any(parsed(other.content) == value for other in plain[reply.question])
        found["same" if alike else verdicts.get(reply.question, "same")].append(reply.question)
    return _comparison("text", found, [{item.trimmed for item in one} for one in known.values() if one[1:]])


def writes(reply: ToolReply) -> bool:
    return not reply.error and not reply.calls and not silent(reply)


def silent(reply: ToolReply) -> bool:
    """No text that is meant for a user, and no further call."""
    return not reply.visible.strip() and not reply.calls


def cut_off(reply: ToolReply) -> bool:
    """Whether the limit of tokens came while the model still reasoned, or within its call: nothing is known of what
    would have followed."""
    if reply.error or reply.calls or reply.finish_reason != "length":
        return False
    reasoned = silent(reply) and bool((reply.reasoning + reply.content).strip())
    return reasoned or left_in_text(reply)


@dataclass(frozen=True, kw_only=True)
class EndComparison:
    """Whether replies end by themselves where the plain server's do. `alone`: questions whose reply the limit of tokens
    cut off here and in no pass of the plain server, `p` the chance of so many."""

    alone: list[str]
    asked: int
    cut_before: int
    asked_before: int
    p: float

    @property
    def wrong(self) -> list[str]:
        return self.alone if self.p < UNLIKELY else []

    @property
    def fault(self) -> str:
        return (
            f"it does not end, as {len(self.alone)} of {self.asked} do not, and {self.cut_before} of "
            f"{self.asked_before} without speculation (p {self.p:.2g})"
        )


def compare_ends(
    mine: Sequence[ToolReply], passes: Sequence[Sequence[ToolReply]], cut: Callable[[ToolReply], bool]
) -> EndComparison:
    """`passes` of the plain server; `cut` tells whether the limit of tokens ended a reply. Questions are compared, not
    passes, which repeat one another."""
    plain: dict[str, bool] = {}
    for reply in (reply for one in passes for reply in one if not reply.error):
        plain[reply.question] = plain.get(reply.question, False) or cut(reply)
    known = [reply for reply in mine if not reply.error and reply.question in plain]
    alone = [reply.question for reply in known if cut(reply) and not plain[reply.question]]
    before = sum(plain.values())
    return EndComparison(
        alone=alone,
        asked=len(known),
        cut_before=before,
        asked_before=len(plain),
        p=more_often(len(alone), len(known), before, len(plain)),
    )


def at_limit(reply: ToolReply) -> bool:
    """Whether the limit of tokens ended it: half a form is none."""
    return not reply.error and reply.finish_reason == "length"


def _comparison(what: str, found: dict[str, list[str]], again: Sequence[set[str]]) -> ReplyComparison:
    """`again`: the different replies of the plain server to each question that it was asked more than once."""
    moved, compared = sum(len(kinds) > 1 for kinds in again), sum(len(kind) for kind in found.values())
    return ReplyComparison(
        what=what,
        same=found["same"],
        near_ties=found["near-tie"],
        real=found["real"],
        unjudged=found["unjudged"],
        moved=moved,
        repeated=len(again),
        p=more_often(len(found["unjudged"]), compared, moved, len(again)),
    )


def _settled(found: dict[str, list[str]], rounding: RoundingBound | None, limit: float) -> dict[str, list[str]]:
    """With rare divergences among what they are taken for."""
    rare, asked = found["rare"], sum(map(len, found.values()))
    meant = what_rare_is(rare, asked, rounding, limit)
    return {**found, meant: found[meant] + rare, "rare": []}


def _kindest(reply: ToolReply, known: Sequence[ToolReply], rounding: RoundingBound | None, limit: float) -> str:
    parted = [divergence for other in known if (divergence := _divergence(other, reply)) is not None]
    verdicts = {judge(divergence, rounding, limit) for divergence in parted}
    return next((verdict for verdict in VERDICTS if verdict in verdicts), "unjudged")


def _divergence(plain: ToolReply, got: ToolReply) -> AnswerDivergence | None:
    """Where the tokens of the plain server's answer part from the same answer with this one's reasoning, text and
    arguments; None where its own do not appear in its tokens as they were sent. Behind another reasoning, other
    arguments are no surprise, so the first difference counts."""
    text = "".join(token.text for token in plain.tokens or [])
    whole = Transcript(plain.question, "tools", [], text, None, plain.tokens)
    if (written := _as_written(plain, got, text)) is not None:
        return first_divergence(whole, replace(whole, text=written, tokens=None))
    place = 0
    for part, (old, new) in enumerate(zip(_parts(plain), _parts(got), strict=False)):
        before = place
        if old and (place := text.find(old, place)) < 0:
            return None
        if old != new and (not old or parsed(old) is None or parsed(old) != parsed(new)):
            if part < CONTENT and not old:
                return None
            if part <= CONTENT and new.startswith(old):
                return _where_it_ends(plain, place + len(old), new[len(old) :])
            if part == CONTENT and old.startswith(new):
                return _where_it_ends(plain, place + len(new) if new else before)
            changed = text[:place] + new + text[place + len(old) :]
            return first_divergence(whole, replace(whole, text=changed, tokens=None)) if old else None
        place += len(old)
    return _where_it_ends(plain, place) if len(plain.calls) != len(got.calls) else None


def _as_written(plain: ToolReply, got: ToolReply, text: str) -> str | None:
    """All that `got` wrote, with markers, where one of the two calls and the other begins a call that its parser left
    in the text; `text` is all that `plain` wrote. None elsewhere, and where the text of `got` holds the whole call of
    `plain`: then the parser is at fault."""
    left, calls = (got, plain) if plain.calls else (plain, got)
    marker = CALL_MARKER.search(left.content)
    if marker is None or left.calls or not calls.calls:
        return None
    at, arguments = text.find(marker.group()), calls.calls[0]["arguments"]
    before = left.reasoning + left.content[: marker.start()]
    if at < 0 or before.split() != (calls.reasoning + calls.content).split():
        return None
    if left is plain:
        at = text.find("{", at)
        return text[:at] + arguments if at >= 0 and len(got.calls) == 1 else None
    written, end = text[:at] + got.content[marker.start() :], text.find(arguments, at) + len(arguments)
    whole = written[:end] == text[:end] and written[end:].lstrip()[:1] == text[end:].lstrip()[:1]
    return None if whole or arguments not in text else written


def _where_it_ends(plain: ToolReply, at: int, rest: str | None = None) -> AnswerDivergence:
    """Behind character `at` of the plain server's tokens one answer calls, ends or writes on, and the other does not:
    `rest` is what the other writes there, None where it calls or ends. Markers and white space stand in no text, so
    another token may have been taken at each of them, up to the first one that is neither."""
    offset, places = 0, []
    for index, token in enumerate(plain.tokens or []):
        offset += len(token.text)
        if offset > at:
            places.append((index, token))
            if token.text.strip() and not is_marker(token.text):
                break
    said = "(a call, or the end of the answer)" if rest is None else rest[:12]
    if not places:
        return AnswerDivergence(plain.question, len(plain.tokens or []), "(unknown)", said, None, None, False)
    taken = [
        (gap, index) for index, token in places for text, gap in token.alternatives.items() if _goes_on(text, rest)
    ]
    gap, index = min(taken or [(places[0][1].gap, places[0][0])], key=lambda each: each[0] or 0.0)
    return AnswerDivergence(plain.question, index, (plain.tokens or [])[index].text, said, gap, None, bool(taken))


def _goes_on(text: str, rest: str | None) -> bool:
    """Whether a token begins `rest`, or, for None, may be a marker: of the end, of a call, of a call's JSON."""
    bare = text.strip()
    return not bare or (rest.lstrip().startswith(bare) if rest is not None else bare[0] in "<[{")


def _parts(reply: ToolReply) -> list[str]:
    """What an answer consists of, in its order: the text is part CONTENT. White space around reasoning is no
    difference."""
    return [reply.reasoning.strip(), reply.content.strip(), *(call["arguments"] for call in reply.calls)]


def names_of(reply: ToolReply) -> list[str]:
    return [call["name"] for call in reply.calls]


def arguments_of(reply: ToolReply) -> list[Any]:
    return [parsed(call["arguments"]) for call in reply.calls]


def parsed(text: str) -> Any:
    """None for what is not JSON."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None
