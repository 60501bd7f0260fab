"""Rows of the gate on how answers end: at stop strings, and with the `finish_reason` of the plain server."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from trtspec.bench.asking import NOT_ASKED, declined
from trtspec.bench.battery import stop_word
from trtspec.bench.gate import SHOWN, UNLIKELY, CheckResult, more_often, pass_or_fail, result
from trtspec.bench.transcript import Recording, ToolReply, Transcript
from trtspec.bench.visible import by_question, own_rounding, parted


def check_stops(got: Recording, expected: Recording | None, limit: float) -> CheckResult:
    """An answer ends where a stop string begins, and not before. Where it took another way than without the string, it
    did so at a near-tie under `limit` nats, of which the plain server's answers tell."""
    name, remedy = "stop-strings", "ask with speculation off; a stop string may lie across the end of a draft"
    mine, theirs = _asked(got), _asked(expected) if expected else []
    if not mine:
        return result(name, "skipped", "no answer is long enough to be cut by a stop string")
    plain = _stop_faults(expected, theirs) if expected else {}
    also = {question for question, fault in plain.items() if fault}
    found = {question: fault for question, fault in _stop_faults(got, mine).items() if question not in also}
    ways = _other_ways(got, [q for q, fault in found.items() if fault is None], expected, limit)
    p = more_often(len(ways["unjudged"]), len(found), list(plain.values()).count(None), len(plain))
    refused = [reply for reply in mine if reply.error]
    alone = [reply for reply in refused if _refused_stop(reply, mine, theirs)]
    faults = [f"{reply.question}: {'refused' if declined(reply.error) else 'failed'}: {reply.error}" for reply in alone]
    faults += [f"{question}: {fault}" for question, fault in found.items() if fault]
    wrong = ways["real"] + (ways["unjudged"] if p < UNLIKELY else [])
    faults += [f"{question}: another text than without the stop string, and not by a near-tie" for question in wrong]
    judged = sum(fault is not None for fault in found.values()) + len(alone) + len(wrong)
    told = f"; {len(ways['near-tie'])} parted before it at a near-tie" if ways["near-tie"] else ""
    if ways["unjudged"] and not faults:
        told += f"; {len(ways['unjudged'])} parted before it, and no log-probabilities tell why"
        return result(name, "skipped", f"{judged} of {len(mine)} answers end at their stop string{told}")
    if not judged:
        message = "every answer parted from the earlier one before its stop string"
        message = f"not shown: the server refused stop: {refused[0].error}" if refused else message
        message += "; the plain server is wrong as well" if also else ""
        return result(name, "skipped", message)
    message = f"{judged - len(faults)} of {judged} answers end at their stop string{told}"
    message += f"; {faults[0]}" if faults else ""
    return pass_or_fail(name, faults, message, "TS-CHECK-STOP", remedy, judged, faults=faults[:SHOWN])


def _asked(recording: Recording) -> list[ToolReply]:
    return [reply for reply in recording.stops if reply.error != NOT_ASKED]


def _other_ways(
    got: Recording, questions: Sequence[str], plain: Recording | None, limit: float
) -> dict[str, list[str]]:
    """Questions by verdict, whose answer with a stop string is another one than all without it. An answer of the plain
    server's own is none; a recording has no plain server beside it, but passes of its own."""
    passes = [one.transcripts for one in (plain or got).repeats]
    if plain:
        passes += [plain.transcripts, [reply.transcript for reply in plain.stops if not reply.error]]
    known = by_question(got.answered, *passes)
    items = [reply.transcript for reply in got.stops if reply.question in questions]
    found: dict[str, list[str]] = {"near-tie": [], "real": [], "unjudged": []}
    for question, verdict in parted(items, known, (own_rounding(plain or got), limit)):
        found[verdict].append(question)
    return found


def _refused_stop(reply: ToolReply, mine: Sequence[ToolReply], theirs: Sequence[ToolReply]) -> bool:
    """Whether a refusal is this server's own. A server may stop at another phrase, so questions may differ."""
    if theirs:
        return any(not other.error for other in theirs)
    return any(not other.error for other in mine) or not declined(reply.error)


def _stop_faults(recording: Recording, replies: Sequence[ToolReply]) -> dict[str, str | None]:
    """By question: "" where the answer is right, None where it took another way before; without those that were
    refused."""
    answers = {item.question: item for item in recording.answered}
    pairs = [(reply, answers[reply.question]) for reply in replies if reply.question in answers and not reply.error]
    return {whole.question: _stop_fault(reply, whole, word) for reply, whole in pairs if (word := stop_word(whole))}


def _stop_fault(reply: ToolReply, whole: Transcript, word: str) -> str | None:
    wanted = whole.content[: whole.content.index(word)]
    if reply.content.rstrip() == wanted.rstrip() or reply.content == wanted + word:
        return ""
    if word in reply.content:
        return f"the stop string {word!r} is in the text"
    return "the answer ends before its stop string" if wanted.startswith(reply.content) else None


@dataclass(frozen=True)
class AnswerEnd:
    """How one answer ended. `kind`: of the request; `said`: text and calls; `full`: as many tokens as were allowed;
    `called`: whether it holds a call."""

    kind: str
    question: str
    said: str
    reason: str | None
    full: bool = False
    called: bool = False


def check_finish(got: Recording, expected: Recording | None) -> CheckResult:
    """An answer ends with the finish_reason that some pass of the plain server gave the same text for the same kind of
    request: servers may name the ends of streams and of calls in ways of their own. Without a plain server, streamed
    answers are compared with the unstreamed ones."""
    name = "finish-reason"
    known: dict[tuple[str, str, str], list[AnswerEnd]] = {}
    whole = (replace(end, kind="streams") for end in _ends(got) if end.kind == "answers")
    for end in _ends(expected) if expected else whole:
        known.setdefault((end.kind, end.question, end.said), []).append(end)
    pairs = [(end, known.get((end.kind, end.question, end.said), [])) for end in _ends(got)]
    pairs = [(end, plain) for end, plain in pairs if plain and (expected or end.kind == "streams")]
    if not pairs:
        why = "no answer has the same text on both servers" if expected else "no streamed answer is the unstreamed one"
        return result(name, "skipped", why)
    faults = [
        f"{end.question} ({end.kind}): {end.reason!r} in place of {plain[0].reason!r}"
        for end, plain in pairs
        if not any(_alike(end, other) for other in plain)
    ]
    than = "without speculation" if expected else "unstreamed"
    message = f"{len(pairs) - len(faults)} of {len(pairs)} answers have the finish_reason of the same text {than}"
    message += f"; {faults[0]}" if faults else ""
    remedy = "look at finish_reason of one answer on both servers: clients take `length` for a text that was cut off"
    return pass_or_fail(name, faults, message, "TS-CHECK-FINISH-REASON", remedy, len(pairs), faults=faults[:SHOWN])


def _alike(end: AnswerEnd, plain: AnswerEnd) -> bool:
    """An end of the answer in the last place that the limit allows may be called either. Behind a call that the limit
    cut off nothing is shown, and calls that the plain server made are asked for again with room."""
    either = plain.reason == "stop" and end.reason == "length" and (end.full or plain.full)
    behind = plain.reason == "length" and plain.called
    return end.reason == plain.reason or either or behind


def _ends(recording: Recording) -> Iterator[AnswerEnd]:
    """Of every answer that says anything, all passes of a baseline among them."""
    again = [item for one in recording.repeats for item in one.transcripts]
    whole = [*recording.transcripts, *recording.confirmed, *recording.long_whole, *again]
    for kind, items in (("answers", whole), ("streams", recording.streams)):
        for item in items:
            if item.error is None and item.text.strip():
                full = (item.completion_tokens or 0) >= recording.max_tokens
                yield AnswerEnd(kind, item.question, item.text, item.finish_reason, full)
    yield from _reply_ends("tools", recording.tools, recording.confirmed_tools, recording.repeated_tools)
    yield from _reply_ends("streamed tools", recording.streamed_tools)
    yield from _reply_ends("follow-ups", recording.follow_ups, recording.repeated_follow_ups)
    yield from _reply_ends("forms", recording.forms, recording.repeated_forms)
    yield from _reply_ends("stop strings", recording.stops)


def _reply_ends(kind: str, *passes: Iterable[ToolReply]) -> Iterator[AnswerEnd]:
    for reply in (reply for one in passes for reply in one):
        if reply.error is None and (reply.calls or reply.content.strip()):
            said = json.dumps([reply.reasoning.strip(), reply.content.strip(), reply.calls])
            yield AnswerEnd(kind, reply.question, said, reply.finish_reason, called=bool(reply.calls))
