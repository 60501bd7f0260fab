"""Rows of the gate on what reaches a user: answers at all, their text, their stream, their token counts."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from trtspec.bench.asking import NOT_ASKED, declined
from trtspec.bench.gate import SHOWN, UNLIKELY, CheckResult, binomial_at_least, more_often, pass_or_fail, result
from trtspec.bench.lossless import (
    RoundingBound,
    first_divergence,
    judge,
    measure_rounding,
    same_context,
    tokens_show,
    what_rare_is,
)
from trtspec.bench.transcript import TOOL_MARKERS, BurstReply, Recording, Transcript

COUNT_SLACK = 1  # tokens: some servers count the end of the answer, some do not
HIDDEN_TOKENS = 8  # markers that stand in no text
VERDICTS = ("near-tie", "rare", "real", "unjudged")  # the kindest first
FIRST = ("transcripts", "long_cold")  # passes of a recording that ask a question for the first time
PASSES = (*FIRST, "confirmed", "streamed", "later", "long_warm", "after_probes")


def check_answers(got: Recording, expected: Recording | None) -> CheckResult:
    """Every question is answered, and the server lives through a burst. What the plain server refused or failed at in
    the same pass may fail here too: that is named, and does not count."""
    shared = _failed_by_the_plain_server(got, expected) if expected else set()
    everything = [(name, item) for name in PASSES for item in getattr(got, name)]
    asked = [item for name, item in everything if item.error is None or (name, item.question) not in shared]
    errors = [item for item in asked if item.error and item.error != NOT_ASKED]
    harmless = [item for item in errors if expected is None and _optional(item)]
    failed = [item for item in errors if item not in harmless]
    burst, both_stopped = got.burst, expected is not None and expected.stopped is not None
    crowded = burst is not None and _burst_fails(burst, expected.burst if expected else None)
    kinds = Counter(str(item.error)[:120] for item in failed)
    detail: dict[str, Any] = {
        "asked": len(asked),
        "failed": len(failed),
        "kinds": dict(kinds),
        "questions": [item.question for item in failed][:SHOWN],
        "refused_by_the_plain_server": sorted({question for _, question in shared}),
    }
    message = f"{sum(item.error is None for item in asked)} of {len(asked)} requests answered"
    if burst and burst.refused:
        message += f"; {burst.refused} of {burst.asked} at once refused"
        message += "" if crowded else ", as a full server may"
    also = len(everything) - len(asked)
    if also:
        message += f"; {also} failed that the plain server does not answer either"
    if harmless:
        message += f"; {len(harmless)} variants refused ({str(harmless[0].error)[:80]})"
    bad = bool(failed) or crowded or (got.stopped is not None and not both_stopped)
    if failed:
        message += f"; the commonest failure ({kinds.most_common(1)[0][1]}): {kinds.most_common(1)[0][0]}"
    if burst and burst.failed:
        message += f"; {burst.failed} of {burst.asked} at once failed{'' if crowded else ' on both servers'}: "
        message += burst.first_failure[:120]
    if got.stopped:
        message += f"; the rest was not asked: {got.stopped}"
    if got.stopped and not bad:
        return result("answers", "skipped", f"{message}, as of the plain server", **detail)
    remedy = "look at the server's log, and at any proxy in front of it; --timeout sets how long an answer may take"
    return pass_or_fail("answers", bad, message, "TS-CHECK-ANSWERS", remedy, len(asked), **detail)


def _failed_by_the_plain_server(got: Recording, expected: Recording) -> set[tuple[str, str]]:
    """(pass, question) of what the plain server did not answer either. What failed at first it was not asked again, nor
    a length whose first prompt failed; where it gave up within a pass, all of that pass had failed."""
    found: set[tuple[str, str]] = set()
    for name in PASSES:
        theirs = [item for item in getattr(expected, name) if item.error]
        gave_up = any(item.error != NOT_ASKED for item in theirs)
        found |= {(name, item.question) for item in theirs if gave_up}
    never = {question for name, question in found if name in FIRST}
    unasked = {item.question for item in got.long_cold} - {item.question for item in expected.long_cold}
    for name in PASSES:
        there = {item.question for item in getattr(expected, name)}
        found |= {(name, question) for question in never | unasked if question not in there}
    return found


def _burst_fails(mine: BurstReply, theirs: BurstReply | None) -> bool:
    """Whether requests of a burst fail, and more often than on the plain server; or all are refused, or most of them
    and more often than there."""
    if theirs is None:
        return mine.failed > 0 or mine.refused == mine.asked
    refused = more_often(mine.refused, mine.asked, theirs.refused, theirs.asked) < UNLIKELY
    failed = not theirs.failed or more_often(mine.failed, mine.asked, theirs.failed, theirs.asked) < UNLIKELY
    return (refused and 2 * mine.refused > mine.asked) or (failed and mine.failed > 0)


def _optional(item: Transcript) -> bool:
    """Variants that a server may refuse by name where nobody knows better: fields of a template that it does not have,
    system prompts, prompts longer than its context. A plain server that answers them knows better."""
    return declined(item.error) and (item.group in ("thinking", "system") or item.group.isdigit())


def check_context(got: Recording, expected: Recording | None) -> CheckResult:
    """Both servers read the same prompt: a template, a tokenizer or a thinking mode that differs changes its length, as
    does cutting it when it is asked again. Alone, a server is compared with itself."""
    mine, theirs = _prompt_lengths(got), _prompt_lengths(expected) if expected else {}
    known = {question: set(theirs[question].values()) for question in mine if question in theirs}
    if expected is None:
        known = {question: {next(iter(lengths.values()))} for question, lengths in mine.items()}
    if not known:
        return result("context", "skipped", "a server does not tell prompt_tokens")
    other = {
        question: f"{question}{when}: {min(known[question])} tokens {'before' if expected is None else 'without'}"
        f"{'' if expected is None else ' speculation'}, {now} {'now' if expected is None else 'with'}"
        for question in known
        for when, now in mine[question].items()
        if now not in known[question]
    }
    if expected is None and not other:
        return result("context", "skipped", "nothing to compare with")
    message = f"{len(known) - len(other)} of {len(known)} prompts have the same length "
    message += "on both servers" if expected else "whenever they are asked"
    if other:
        message += f"; left out of the comparison: {next(iter(other.values()))}"
    remedy = "serve both with the same chat template, tokenizer and thinking mode, and record the plain server again"
    shown = list(other.values())[:SHOWN]
    return pass_or_fail("context", other, message, "TS-CHECK-CONTEXT", remedy, len(known), different=shown)


def _prompt_lengths(recording: Recording) -> dict[str, dict[str, int]]:
    """By question: in which pass its prompt had how many tokens, the first pass first."""
    again = itertools.chain(*(one.transcripts for one in recording.repeats), recording.long_whole)
    passes = {"": [*recording.transcripts, *recording.long_cold], " as a stream": recording.streamed}
    passes |= {" after a burst": recording.later, " asked again": [*recording.long_warm, *again]}
    found: dict[str, dict[str, int]] = {}
    for when, items in passes.items():
        for item in items:
            if item.error is None and item.prompt_tokens:
                found.setdefault(item.question, {})[when] = item.prompt_tokens
    return found


def check_visible_text(got: Recording, expected: Recording | None) -> CheckResult:
    """The text says what the tokens say, and is not shorter than its count of tokens allows, save where the tokens of
    some pass of either server begin a call, which a parser takes out."""
    told = [item for item in got.answered if tokens_show(item) is not None]
    wrong = [item.question for item in told if tokens_show(item) is False]
    everything = [item for item in [*got.answered, *got.streams] if not item.error and item.completion_tokens]
    calling = _calling(got) | (_calling(expected) if expected else set())
    empty = [item.question for item in everything if _too_short(item) and item.question not in calling]
    shown = list(dict.fromkeys([*wrong, *empty]))
    detail: dict[str, Any] = {"not_what_the_tokens_say": wrong[:SHOWN], "fewer_bytes_than_tokens": empty[:SHOWN]}
    remedy = "compare text and logprobs of one answer; look at what is between engine and user (parsers, proxies)"
    if shown:
        message = f"{len(wrong)} answers read otherwise than their tokens, {len(empty)} are too short for their counts"
        message += f": {shown[0]}"
        return result("visible-text", "fail", message, "TS-CHECK-TEXT", remedy, **detail)
    if not told:
        why = got.withheld or "pieces of characters alone"
        message = f"no token texts to compare with ({why}); {len(everything)} answers are as long as their counts"
        return result("visible-text", "skipped", message, **detail)
    message = f"{len(told)} of {len(told)} answers read as their tokens do"
    return result("visible-text", "pass", message, seen=len(told), **detail)


def _calling(recording: Recording) -> set[str]:
    """Questions whose tokens, where some pass tells them, hold the marker of a call."""
    again = itertools.chain(*(one.transcripts for one in recording.repeats), recording.long_whole, recording.confirmed)
    return {
        item.question
        for item in (*recording.answered, *again)
        if any(marker in token.text for token in item.tokens or () for marker in TOOL_MARKERS)
    }


def _too_short(item: Transcript) -> bool:
    """Each token writes at least a byte, save for markers."""
    return (item.completion_tokens or 0) > len(item.text.encode()) + HIDDEN_TOKENS


def check_stream(got: Recording, expected: Recording | None, limit: float) -> list[CheckResult]:
    """Streamed answers equal unstreamed ones, and the same question has the same answer each time. A recording has no
    plain server beside it, but passes of its own."""
    if not got.streamed:
        reason = "no answer was streamed"
        return [result("stream", "skipped", reason), result("repeatable", "skipped", reason)]
    plain = expected or got
    bounds = own_rounding(plain), limit
    before = by_question(got.answered, *_passes(plain, plain.transcripts))
    streamed = parted(got.streamed, before, bounds)
    later = parted(got.later, before, bounds)
    again = {item.question: item.trimmed for item in got.confirmed if item.error is None}
    texts = {item.question: item.trimmed for item in got.streamed}
    alone = [q for q, verdict in streamed if verdict == "real" and again.get(q) != texts[q]]
    moved = [q for q, verdict in streamed if verdict == "real" and again.get(q) == texts[q]]
    moved += [q for q, verdict in later if verdict == "real"]
    unjudged = [q for q, verdict in [*streamed, *later] if verdict == "unjudged"]
    cold = {item.question: item.trimmed for item in got.answered}
    open_ = [q for q, verdict in streamed if verdict == "unjudged" and q in again]
    only = [q for q in open_ if again[q] == cold.get(q)]
    if open_ and binomial_at_least(len(only), len(open_), 0.5) < UNLIKELY:  # asked again unstreamed, all as they were
        alone, unjudged = alone + only, [q for q in unjudged if q not in only]
    count = sum(item.error is None for item in got.streamed)
    return [
        _stream_row(alone, divided_otherwise(got, expected, True), count),
        _repeatable_row(moved, unjudged, count + len(got.later), got),
    ]


def own_rounding(expected: Recording | None) -> RoundingBound | None:
    """How far the plain server's rounding reaches, by its own passes; None where it was recorded once."""
    if expected is None or not expected.repeats:
        return None
    again = [{item.question: item for item in one.transcripts if item.error is None} for one in expected.repeats]
    first = [item for item in [*expected.transcripts, *expected.long_whole] if item.error is None]
    return measure_rounding([(a, one[a.question]) for a in first for one in again if a.question in one], True)


def _passes(expected: Recording, first: Sequence[Transcript]) -> list[Sequence[Transcript]]:
    return [first, *(again.transcripts for again in expected.repeats)]


def by_question(*passes: Sequence[Transcript]) -> dict[str, list[Transcript]]:
    """The answers to each question, in the order of the passes."""
    found: dict[str, list[Transcript]] = {}
    for item in itertools.chain(*passes):
        if item.error is None:
            found.setdefault(item.question, []).append(item)
    return found


def divided_otherwise(got: Recording, expected: Recording | None, streamed: bool) -> list[str]:
    """Questions whose answer has the text of an earlier one, with another part of it as reasoning than each of those.
    Earlier ones are the plain server's; where it never wrote the text, or there is none, this server's unstreamed ones.
    Parsers may divide an answer that was cut off otherwise in a stream, so such ones are compared with their like."""
    plain = _whole_and_streamed(expected) if expected else ({}, {})
    tiers = [(plain[streamed], plain[not streamed]), (by_question(), _whole_and_streamed(got)[0])]
    found = []
    for item in got.streams if streamed else [*got.answered, *got.confirmed]:
        alike = next((same for like, other in tiers if (same := _same_text(item, like, other))), [])
        if item.error is None and alike and _reasoned(item) not in map(_reasoned, alike):
            found.append(item.question)
    return list(dict.fromkeys(found))


def _whole_and_streamed(recording: Recording) -> tuple[Mapping[str, list[Transcript]], Mapping[str, list[Transcript]]]:
    passes = _passes(recording, recording.transcripts)
    return by_question(*passes, recording.confirmed, recording.long_whole), by_question(recording.streams)


def _same_text(
    item: Transcript, like: Mapping[str, list[Transcript]], other: Mapping[str, list[Transcript]]
) -> list[Transcript]:
    ended = [o for o in other.get(item.question, []) if "length" not in (item.finish_reason, o.finish_reason)]
    return [o for o in [*like.get(item.question, []), *ended] if _squeezed(o.text) == _squeezed(item.text)]


def _reasoned(item: Transcript) -> int:
    return len(_squeezed(item.text[: item.reasoned]))


def _squeezed(text: str) -> str:
    return "".join(text.split())


def _stream_row(alone: Sequence[str], divided: Sequence[str], count: int) -> CheckResult:
    message = f"{count - len(alone)} of {count} streamed answers are those that came unstreamed, up to near-ties"
    if alone:
        message += f"; another text only as a stream: {alone[0]}"
    if divided:
        message += f"; {len(divided)} give out reasoning as the answer, or the answer as reasoning: {divided[0]}"
    remedy = "look at the chunks of one answer (curl -N); a parser or proxy that rewrites chunks is the usual cause"
    shown = [*alone, *divided][:SHOWN]
    return pass_or_fail("stream", shown, message, "TS-CHECK-STREAM", remedy, count, questions=shown)


def _repeatable_row(moved: Sequence[str], unjudged: Sequence[str], count: int, got: Recording) -> CheckResult:
    message = f"{count - len(moved) - len(unjudged)} of {count} greedy answers are repeated, up to near-ties"
    detail: dict[str, Any] = {"questions": list(moved)[:SHOWN], "unjudged": list(unjudged)[:SHOWN]}
    if moved:
        message += f"; {len(moved)} part, at more than a near-tie: {moved[0]}"
        remedy = "check that temperature 0 is greedy, and that prefix reuse restores the cache; ask once with reuse off"
        return result("repeatable", "fail", message, "TS-CHECK-NOT-REPEATABLE", remedy, **detail)
    if unjudged:
        why = got.withheld or "no answer of that text has log-probabilities"
        message += f"; {len(unjudged)} differ and cannot be judged without log-probabilities ({why})"
        return result("repeatable", "skipped", message, **detail)
    return result("repeatable", "pass", message, seen=count, **detail)


def parted(
    items: Sequence[Transcript], known: Mapping[str, list[Transcript]], bounds: tuple[RoundingBound | None, float]
) -> list[tuple[str, str]]:
    """(question, verdict) for those answers that equal none of the known ones to their question; rare divergences are
    near-ties, or real where they are too many."""
    rounding, limit = bounds
    found: list[tuple[str, str]] = []
    asked = {item.question for item in items if item.error is None and known.get(item.question)}
    for item in items:
        before = known.get(item.question, [])
        if item.error is not None or not before or any(item.trimmed == other.trimmed for other in before):
            continue
        divergences = [d for other in before if (d := first_divergence(_bare(other), _bare(item))) is not None]
        verdicts = {judge(divergence, rounding, limit) for divergence in divergences}
        found.append((item.question, next(v for v in VERDICTS if v in verdicts)))
    meant = what_rare_is([q for q, verdict in found if verdict == "rare"], len(asked), rounding, limit)
    return [(question, meant if verdict == "rare" else verdict) for question, verdict in found]


def _bare(item: Transcript) -> Transcript:
    """Without the white space that one server takes away and another leaves, which is no divergence."""
    return replace(item, text=item.trimmed, reasoned=len(item.text[: item.reasoned].strip()))


def check_long_answers(got: Recording, expected: Recording | None, limit: float) -> CheckResult:
    """Answers to long prompts, cold and warm, are those of the plain server, up to near-ties."""
    name = "long-context"
    if not got.long_cold:
        return result(name, "skipped", "no long prompt was asked (--contexts)")
    if expected is None:
        return result(name, "skipped", "nothing to compare with: --against the plain server, with the same weights")
    plain = by_question(*_passes(expected, expected.long_whole), expected.long)
    pairs = [
        item for item in got.long if item.question in plain and all(same_context(item, a) for a in plain[item.question])
    ]
    left = [item.question for item in got.long if item.question in plain and item not in pairs]
    out = f"; {len(left)} answers are left out, whose prompts were read in another length: {left[0]}" if left else ""
    if not pairs:
        return result(name, "skipped", f"the two servers answered no common long prompt{out}", left_out=left[:SHOWN])
    verdicts = parted(pairs, plain, (own_rounding(expected), limit))
    named: dict[str, Any] = {
        kind: list(dict.fromkeys(q for q, verdict in verdicts if verdict == kind)) for kind in VERDICTS
    }
    asked = {item.question for item in pairs}
    moved = [q for q in asked if len({item.trimmed for item in plain[q]}) > 1]
    p = more_often(len(named["unjudged"]), len(asked), len(moved), len(asked))
    message = (
        f"{len(pairs) - len(verdicts)} of {len(pairs)} answers to long prompts are those of the plain server, "
        f"{sum(verdict == 'near-tie' for _, verdict in verdicts)} part at a near-tie"
    )
    if named["real"]:
        message += f"; {len(named['real'])} prompts have another answer, at more than a near-tie: "
        message += named["real"][0]
    if named["unjudged"]:
        message += f"; {len(named['unjudged'])} of {len(asked)} prompts have another answer, the plain server's own "
        message += f"answers differ for {len(moved)} (p {p:.2g}), and no log-probabilities tell why"
        message += "" if expected.long_whole else ": record the plain server again, which asks for them now"
    message, named["left_out"] = message + out, left[:SHOWN]
    unsure = bool(named["unjudged"]) and p >= UNLIKELY
    if not named["real"] and (unsure or (left and not named["unjudged"])):
        return result(name, "skipped", message, **named)
    remedy = (
        "compare the answers in --json; try --contexts one by one, and RoPE scaling, chunked prefill and prefix reuse"
    )
    return pass_or_fail(
        name, named["real"] or named["unjudged"], message, "TS-CHECK-NOT-LOSSLESS", remedy, len(pairs), **named
    )


def check_usage(got: Recording, expected: Recording | None) -> CheckResult:
    """Token counts agree with the tokens, with the limit asked for, with the stream, and between equal texts."""
    counted = [item for item in [*got.answered, *got.streams] if not item.error and item.completion_tokens is not None]
    if not counted:
        return result("usage", "skipped", "the server tells no completion_tokens")
    first: dict[tuple[str, str], tuple[int, int | None]] = {}
    for item in [*(expected.answered + expected.long if expected else []), *got.answered, *got.streams]:
        if item.error is None and item.completion_tokens is not None:
            first.setdefault((item.question, item.text), (item.completion_tokens, item.prompt_tokens))
    wrong = [f"{item.question}: {fault}" for item in counted for fault in _usage_faults(item, got.max_tokens, first)]
    message = f"token counts of {len(counted)} answers agree with tokens, text and stream"
    if wrong:
        message = f"{len(wrong)} token counts of {len(counted)} answers contradict what came: {wrong[0]}"
    remedy = "bills and acceptance figures rest on usage: compare it with the tokens of one answer"
    return pass_or_fail("usage", wrong, message, "TS-CHECK-USAGE", remedy, len(counted), faults=wrong[:SHOWN])


def _usage_faults(
    item: Transcript, max_tokens: int, first: dict[tuple[str, str], tuple[int, int | None]]
) -> Iterable[str]:
    count = item.completion_tokens or 0
    if count > max_tokens:
        yield f"{count} tokens counted, at most {max_tokens} were asked for"
    elif item.tokens is not None and abs(len(item.tokens) - count) > COUNT_SLACK:
        yield f"{count} tokens counted, {len(item.tokens)} came"
    elif any(b < a for a, b in itertools.pairwise([*item.counted, count])):
        yield "the count of tokens falls within the stream"
    else:
        known, prompt = first.get((item.question, item.text), (count, item.prompt_tokens))
        if abs(known - count) > COUNT_SLACK:
            yield f"{count} tokens counted, and {known} for the same text before"
        elif prompt and item.prompt_tokens and prompt != item.prompt_tokens and not item.group.isdigit():
            yield f"{item.prompt_tokens} prompt tokens counted, and {prompt} for the same prompt before"
