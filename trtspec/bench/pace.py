"""Rows of the gate on time: streams arrive as they are made, and answers do not take longer and longer."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import replace

from trtspec.bench.gate import CheckResult, result
from trtspec.bench.transcript import Recording, Transcript

BUFFERED_SPAN = 0.05  # all pieces of a stream within this share of its time came at once
SHORTEST_STREAM = 0.1  # seconds; below it nothing can be said about how an answer arrives
MANY_TOKENS = 24
SLOW_ALL, SLOW_ONE, SLOW_EXTRA = 4.0, 8.0, 0.5  # times; times; seconds


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
    found = result(
        "streaming", "fail" if bad else "pass", message, "TS-CHECK-BUFFERED", remedy, questions=at_once[:SHOWN]
    )
    return replace(found, seen=len(streams))


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
    found = result("steady-speed", "fail" if bad else "pass", message, "TS-CHECK-SLOWER", remedy, **detail)
    return replace(found, seen=len(after))


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
