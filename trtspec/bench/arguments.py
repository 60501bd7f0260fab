"""Are the arguments of tool calls, and the texts behind their results, those of the plain server, up to near-ties?

Arguments are compared as JSON. Where they differ from those of every pass of the plain server, its tokens tell how sure
it was: they hold the whole answer with the markers of its calls, in which other arguments are put in the place of its
own. Where it told no tokens, or its parser rewrites the arguments, only the number of differences can be judged.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from trtspec.bench.gate import UNLIKELY, more_often
from trtspec.bench.lossless import AnswerDivergence, RoundingBound, first_divergence, judge
from trtspec.bench.transcript import Recording, ToolReply, Transcript
from trtspec.bench.visible import VERDICTS, by_question, own_rounding, parted


@dataclass(frozen=True, kw_only=True)
class ReplyComparison:
    """Questions by what became of their `what` (arguments, text): `same`, or another one by verdict. `moved` of
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
        if not self.compared:
            return ""
        found = f", {len(self.same)} of {self.compared} as without speculation"
        found += f", {len(self.near_ties)} part from it at a near-tie" if self.near_ties else ""
        if self.real:
            found += f", {len(self.real)} have other {self.what} where the target is sure of itself: {self.real[0]}"
        if self.unjudged:
            found += f", {len(self.unjudged)} have other {self.what} and no log-probabilities tell why (the plain "
            found += f"server's own differ for {self.moved} of {self.repeated}, p {self.p:.2g}): {self.unjudged[0]}"
        return found


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
            found[_verdict(reply, known, rounding, limit)].append(reply.question)
    again = [{json.dumps(arguments_of(reply)) for reply in one} for one in plain.values() if one[1:]]
    return _comparison("arguments", found, again)


def compare_follow_ups(got: Recording, expected: Recording, limit: float) -> ReplyComparison:
    """Texts behind the result of a tool, by question, where both servers wrote one; `limit` as for arguments."""
    passes = [[r.transcript for r in one if _text(r)] for one in (expected.follow_ups, expected.repeated_follow_ups)]
    plain = by_question(*passes)
    mine = [reply.transcript for reply in got.follow_ups if _text(reply) and reply.question in plain]
    verdicts = dict(parted(mine, plain, (own_rounding(expected), limit)))
    found: dict[str, list[str]] = {verdict: [] for verdict in ("same", *VERDICTS)}
    for item in mine:
        found[verdicts.get(item.question, "same")].append(item.question)
    return _comparison("text", found, [{item.trimmed for item in one} for one in plain.values() if one[1:]])


def _text(reply: ToolReply) -> bool:
    return not reply.error and not reply.calls and bool(reply.content.strip())


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


def _verdict(reply: ToolReply, known: Sequence[ToolReply], rounding: RoundingBound | None, limit: float) -> str:
    """`same`, or the kindest verdict beside the plain server's passes."""
    if any(arguments_of(reply) == arguments_of(other) for other in known):
        return "same"
    parted = [divergence for other in known if (divergence := _divergence(other, reply)) is not None]
    verdicts = {judge(d, rounding.at(d.question, d.position, limit) if rounding else limit) for d in parted}
    return next((verdict for verdict in VERDICTS if verdict in verdicts), "unjudged")


def _divergence(plain: ToolReply, got: ToolReply) -> AnswerDivergence | None:
    """Where the tokens of the plain server's answer part from the same answer with this one's reasoning, text and
    arguments; None where its own do not appear in its tokens as they were sent. Behind another reasoning, other
    arguments are no surprise, so the first difference counts."""
    text = "".join(token.text for token in plain.tokens or [])
    place = 0
    for old, new in zip(_parts(plain), _parts(got), strict=True):
        if old and (place := text.find(old, place)) < 0:
            return None
        if old != new and (not old or parsed(old) is None or parsed(old) != parsed(new)):
            whole = Transcript(plain.question, "tools", [], text, None, plain.tokens)
            changed = text[:place] + new + text[place + len(old) :]
            return first_divergence(whole, replace(whole, text=changed, tokens=None)) if old else None
        place += len(old)
    return None


def _parts(reply: ToolReply) -> list[str]:
    """What an answer consists of, in its order. White space around reasoning is no difference."""
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
