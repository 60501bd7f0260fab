"""Rows of the gate on what reaches a user: answers at all, their text, their stream, their token counts, their pace."""

from __future__ import annotations

import itertools
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from trtspec.bench.asking import NOT_ASKED, declined
from trtspec.bench.gate import SHOWN, UNLIKELY, CheckResult, binomial_at_least, more_often, pass_or_fail, result
from trtspec.bench.lossless import RoundingBound, first_divergence, judge, measure_rounding, same_context, tokens_show
from trtspec.bench.transcript import Recording, Transcript

COUNT_SLACK = 1  # tokens: some servers count the end of the answer, some do not
HIDDEN_TOKENS = 8  # markers that stand in no text
BUFFERED_SPAN = 0.05  # all pieces of a stream within this share of its time came at once
SHORTEST_STREAM = 0.1  # seconds; below it nothing can be said about how an answer arrives
MANY_TOKENS = 24
VERDICTS = ("near-tie", "real", "unjudged")  # the kindest first
SLOW_ALL, SLOW_ONE, SLOW_EXTRA = 4.0, 8.0, 0.5  # times; times; seconds


def check_answers(got: Recording, expected: Recording | None) -> CheckResult:
    """Every question is answered, and the server lives through a burst. What the plain server refused as well is named
    and does not count."""
    refused = {t.question for t in [*expected.transcripts, *expected.long_cold] if t.error} if expected else set()
    everything = [*got.transcripts, *got.confirmed, *got.streamed, *got.later, *got.long_cold, *got.long_warm]
    if expected:  # a length whose first prompt is refused is not asked again
        refused |= {i.question for i in got.long_cold} - {i.question for i in expected.long_cold}
    asked = [item for item in everything if item.question not in refused]
    failed = [item for item in asked if item.error]
    harmless = [item for item in failed if _optional(item, alone=expected is None)]
    failed = [item for item in failed if item not in harmless and item.error != NOT_ASKED]
    burst = got.burst
    kinds = Counter(str(item.error)[:120] for item in failed)
    detail = {
        "asked": len(asked),
        "failed": len(failed),
        "kinds": dict(kinds),
        "questions": [item.question for item in failed][:SHOWN],
        "refused_by_the_plain_server": sorted(refused),
    }
    message = f"{len(asked) - len(failed)} of {len(asked)} requests answered"
    if burst and burst.refused:
        message += f"; {burst.refused} of {burst.asked} at once refused, as a full server may"
    if harmless:
        message += f"; {len(harmless)} variants refused ({str(harmless[0].error)[:80]})"
    bad = bool(failed) or bool(burst and burst.failed) or got.stopped is not None
    if failed:
        message += f"; the commonest failure ({kinds.most_common(1)[0][1]}): {kinds.most_common(1)[0][0]}"
    if burst and burst.failed:
        message += f"; {burst.failed} of {burst.asked} at once failed: {burst.first_failure[:120]}"
    if got.stopped:
        message += f"; the rest was not asked: {got.stopped}"
    remedy = "look at the server's log, and at any proxy in front of it; --timeout sets how long an answer may take"
    return pass_or_fail("answers", bad, message, "TS-CHECK-ANSWERS", remedy, len(asked), **detail)


def _optional(item: Transcript, alone: bool) -> bool:
    """Variants that a server may refuse by name, such as fields of a template that it does not have, or, where nobody
    knows better, prompts longer than its context."""
    return declined(item.error) and (item.group in ("thinking", "system") or (alone and item.group.isdigit()))


def check_context(got: Recording, expected: Recording | None) -> CheckResult:
    """Both servers read the same prompt: a template, a tokenizer or a thinking mode that differs changes its length."""
    if expected is None:
        return result("context", "skipped", "nothing to compare with")
    prompts = [*expected.transcripts, *expected.long_cold]
    theirs = {item.question: item.prompt_tokens for item in prompts if item.prompt_tokens}
    pairs = [
        (i.question, theirs[i.question], i.prompt_tokens)
        for i in [*got.answered, *got.long_cold]
        if i.prompt_tokens and i.question in theirs
    ]
    if not pairs:
        return result("context", "skipped", "a server does not tell prompt_tokens")
    other = [
        f"{question}: {before} tokens without speculation, {now} with"
        for question, before, now in pairs
        if before != now
    ]
    message = f"{len(pairs) - len(other)} of {len(pairs)} prompts have the same length on both servers"
    if other:
        message += f"; left out of the comparison: {other[0]}"
    remedy = "serve both with the same chat template, tokenizer and thinking mode, and record the plain server again"
    return pass_or_fail("context", other, message, "TS-CHECK-CONTEXT", remedy, len(pairs), different=other[:SHOWN])


def check_visible_text(got: Recording) -> CheckResult:
    """The text says what the tokens say, and is not shorter than its count of tokens allows."""
    told = [item for item in got.answered if item.tokens is not None]
    wrong = [item.question for item in told if tokens_show(item) is False]
    everything = [item for item in [*got.answered, *got.streams] if not item.error and item.completion_tokens]
    empty = [item.question for item in everything if _too_short(item)]
    shown = list(dict.fromkeys([*wrong, *empty]))
    detail: dict[str, Any] = {"not_what_the_tokens_say": wrong[:SHOWN], "fewer_bytes_than_tokens": empty[:SHOWN]}
    remedy = "compare text and logprobs of one answer; look at what is between engine and user (parsers, proxies)"
    if shown:
        message = f"{len(wrong)} answers read otherwise than their tokens, {len(empty)} are too short for their counts"
        message += f": {shown[0]}"
        return result("visible-text", "fail", message, "TS-CHECK-TEXT", remedy, **detail)
    if not told:
        message = (
            f"no token texts to compare with ({got.withheld}); {len(everything)} answers are as long as their counts"
        )
        return result("visible-text", "skipped", message, **detail)
    message = f"{len(told)} of {len(told)} answers read as their tokens do"
    return result("visible-text", "pass", message, seen=len(told), **detail)


def _too_short(item: Transcript) -> bool:
    """Each token writes at least a byte, save for markers."""
    return (item.completion_tokens or 0) > len(item.text.encode()) + HIDDEN_TOKENS


def check_stream(got: Recording, expected: Recording | None, limit: float) -> list[CheckResult]:
    """Streamed answers equal unstreamed ones, and the same question has the same answer each time."""
    if not got.streamed:
        reason = "no answer was streamed"
        return [result("stream", "skipped", reason), result("repeatable", "skipped", reason)]
    bounds = own_rounding(expected), limit
    before = by_question(got.answered, *(_passes(expected, expected.transcripts) if expected else []))
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
    return [_stream_row(alone, count), _repeatable_row(moved, unjudged, count + len(got.later), got)]


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


def _stream_row(alone: Sequence[str], count: int) -> CheckResult:
    message = f"{count - len(alone)} of {count} streamed answers are those that came unstreamed, up to near-ties"
    if alone:
        message += f"; another text only as a stream: {alone[0]}"
    remedy = "look at the chunks of one answer (curl -N); a parser or proxy that rewrites chunks is the usual cause"
    return pass_or_fail("stream", alone, message, "TS-CHECK-STREAM", remedy, count, questions=list(alone)[:SHOWN])


def _repeatable_row(moved: Sequence[str], unjudged: Sequence[str], count: int, got: Recording) -> CheckResult:
    message = f"{count - len(moved) - len(unjudged)} of {count} greedy answers are repeated, up to near-ties"
    detail: dict[str, Any] = {"questions": list(moved)[:SHOWN], "unjudged": list(unjudged)[:SHOWN]}
    if moved:
        message += f"; {len(moved)} part where the target is sure of itself: {moved[0]}"
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
    """(question, verdict) for those answers that equal none of the known ones to their question."""
    rounding, limit = bounds
    found: list[tuple[str, str]] = []
    for item in items:
        before = known.get(item.question, [])
        if item.error is not None or not before or any(item.trimmed == other.trimmed for other in before):
            continue
        divergences = [d for other in before if (d := first_divergence(_bare(other), _bare(item))) is not None]
        verdicts = {judge(d, rounding.at(d.question, d.position, limit) if rounding else limit) for d in divergences}
        found.append((item.question, next(v for v in VERDICTS if v in verdicts)))
    return found


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
    if not pairs:
        return result(name, "skipped", "the two servers answered no common long prompt")
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
        message += f"; {len(named['real'])} prompts have another answer where the target is sure of itself: "
        message += named["real"][0]
    if named["unjudged"]:
        message += f"; {len(named['unjudged'])} of {len(asked)} prompts have another answer, the plain server's own "
        message += f"answers differ for {len(moved)} (p {p:.2g}), and no log-probabilities tell why"
        message += "" if expected.long_whole else ": record the plain server again, which asks for them now"
    if named["unjudged"] and not named["real"] and p >= UNLIKELY:
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
    elif item.counted and any(b < a for a, b in zip(item.counted, item.counted[1:], strict=False)):
        yield "the count of tokens falls within the stream"
    else:
        known, prompt = first.get((item.question, item.text), (count, item.prompt_tokens))
        if abs(known - count) > COUNT_SLACK:
            yield f"{count} tokens counted, and {known} for the same text before"
        elif prompt and item.prompt_tokens and prompt != item.prompt_tokens and not item.group.isdigit():
            yield f"{item.prompt_tokens} prompt tokens counted, and {prompt} for the same prompt before"


def check_streaming(got: Recording) -> CheckResult:
    """Pieces arrive as they are made, not all at the end."""
    streams = [item for item in got.streams if _judgeable(item)]
    if not streams:
        return result("streaming", "skipped", "no stream is long enough in tokens and time to say how it arrives")
    late = [item for item in streams if _span(item) < BUFFERED_SPAN * (item.timing.total if item.timing else 0)]
    at_once = [item.question for item in late]
    bad = _episodes(late) >= 2 or len(late) == len(streams)
    message = f"{len(streams) - len(late)} of {len(streams)} streams arrive piece by piece"
    if bad:
        message += f"; all at once: {at_once[0]}"
    remedy = "turn buffering off in proxies (nginx: proxy_buffering off), and lower the server's stream_interval"
    return pass_or_fail("streaming", bad, message, "TS-CHECK-BUFFERED", remedy, len(streams), questions=at_once[:SHOWN])


def _judgeable(item: Transcript) -> bool:
    timing = item.timing
    long = (item.completion_tokens or len(item.text) // 4) >= MANY_TOKENS
    if item.error is not None or timing is None or not long or not item.text:
        return False
    return timing.total >= SHORTEST_STREAM and timing.lag < 0.25 * timing.total


def _span(item: Transcript) -> float:
    timing = item.timing
    return 0.0 if timing is None or timing.first is None or timing.last is None else timing.last - timing.first


def check_speed(got: Recording) -> CheckResult:
    """Answers do not take longer and longer: the last pass against the first one, question by question."""
    before = {item.question: _pace(item) for item in got.transcripts if _pace(item)}
    after = [item for item in [*got.streamed, *got.later] if item.question in before and _pace(item)]
    if len(after) < 4:
        return result("steady-speed", "skipped", "too few answers were asked twice")
    usual = statistics.median([_pace(item) for item in after])
    slow = [item for item in after if _slow(item, before[item.question], usual)]
    episodes = _episodes(slow)
    last = [item for item in got.later if item.question in before and _pace(item)]
    ratios = sorted(_pace(item) / before[item.question] for item in last)
    everywhere, message = False, "the last pass has no answer whose pace is known"
    if ratios:
        extra = statistics.median([item.timing.total for item in last if item.timing])
        everywhere = ratios[len(ratios) // 10] > SLOW_ALL and extra > SLOW_EXTRA / 2
        message = f"the last pass takes {statistics.median(ratios):.2f} times as long per token as the first"
    if episodes:
        message += f"; {len(slow)} of {len(after)} answers stall, {episodes} times: {slow[0].question}"
    bad = everywhere or episodes >= 2
    if not ratios and not bad:
        return result("steady-speed", "skipped", message)
    remedy = (
        "watch the server's memory, cache and clocks while it is asked for longer; trtspec bench shows the latencies"
    )
    detail = {"questions": [item.question for item in slow][:SHOWN]}
    return pass_or_fail("steady-speed", bad, message, "TS-CHECK-SLOWER", remedy, len(after), **detail)


def _pace(item: Transcript) -> float:
    """Seconds per token; 0 where it is not known."""
    timing, tokens = item.timing, item.completion_tokens or len(item.text) // 4
    if timing is None or not tokens or item.error is not None:
        return 0.0
    return max(timing.total - timing.lag, 1e-6) / tokens


def _slow(item: Transcript, before: float, usual: float) -> bool:
    tokens = item.completion_tokens or len(item.text) // 4
    least = max(before, usual)
    return _pace(item) > SLOW_ONE * least and (_pace(item) - least) * tokens > SLOW_EXTRA


def _episodes(slow: Sequence[Transcript]) -> int:
    """How many separate times answers stalled: those that overlap in time may have one cause outside the server."""
    times = sorted((item.timing.started, item.timing.started + item.timing.total) for item in slow if item.timing)
    found, end = 0, float("-inf")
    for start, stop in times:
        found += start > end
        end = max(end, stop)
    return found
