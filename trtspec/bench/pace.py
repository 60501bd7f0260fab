"""Rows of the gate on when answers come: piece by piece, and as fast at the end of a check as at its beginning.

A server is rarely alone on its machine, and its last pass may take twice as long for reasons of others. So what is
judged are medians, and streams and answers that were delayed at separate times, beside those of the plain server.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from trtspec.bench.gate import SHOWN, CheckResult, binomial_at_least, pass_or_fail, result
from trtspec.bench.load.findings import TOKENS_PER_ARRIVAL
from trtspec.bench.transcript import TOOL_MARKERS, Recording, Transcript

BUFFERED_SPAN = 0.05  # all pieces of a stream within this share of its time came at once
SHORTEST_STREAM = 0.1  # seconds; below it nothing can be said about how an answer arrives
LONG_WAIT = 0.06  # seconds between pieces; this process notices when it is held up for so long itself
MANY_TOKENS = 24
SUSPECT = 0.02  # a chance below which moments that held streams are more than the plain server's
SLOW_ALL, SLOW_FIRST = 2.5, 4.0  # times the streams before; times the first pass, which is not streamed
SLOW_PLAIN = 1.5  # times what the plain server's own last pass took over its streams before
SLOW_ONE, SLOW_EXTRA = 8.0, 0.5  # times; seconds


def check_streaming(got: Recording, expected: Recording | None) -> CheckResult:
    """Pieces arrive as they are made, not all at the end, and not many at a time."""
    name, streams = "streaming", [item for item in got.streams if _judgeable(item)]
    plain = [item for item in expected.streams if _judgeable(item)] if expected else []
    if not streams:
        return result(name, "skipped", "no stream is long enough in tokens and time to say how it arrives")
    late, held = [item for item in streams if _at_once(item)], [item for item in streams if _in_pieces(item)]
    typical, usual = _per_arrival(streams), _per_arrival(plain)
    all_late = _episodes(late) >= 2 or len(late) == len(streams)
    bad = all_late or _held(streams, plain) or typical > TOKENS_PER_ARRIVAL
    named = [item.question for item in [*late, *held]][:SHOWN]
    message = f"{len(streams) - len(late) - len(held)} of {len(streams)} streams arrive piece by piece"
    message += f", {typical:.0f} tokens at a time (median)" if typical else ""
    if bad and late:
        message += f"; all at once: {late[0].question}"
    if bad and (held or not late):
        message += f"; many tokens at a time: {held[0].question if held else streams[0].question}"
    if bad and plain and (_episodes([item for item in plain if _at_once(item)]) >= 2 or usual > TOKENS_PER_ARRIVAL):
        return result(name, "skipped", f"not shown: {message}; those of the plain server too", questions=named)
    remedy = "turn buffering off in proxies (nginx: proxy_buffering off), and lower the server's stream_interval"
    return pass_or_fail(name, bad, message, "TS-CHECK-BUFFERED", remedy, len(streams), questions=named)


def _held(streams: Sequence[Transcript], plain: Sequence[Transcript]) -> bool:
    """Whether streams came in pieces at three separate times or more, and at more than those of the plain server. One
    busy moment holds all streams then in flight, so the moments are counted: two Poisson counts, given their sum, are
    binomial with the share of the streams watched (Przyborowski and Wilenski, Biometrika 31, 1940, 313-323)."""
    mine, theirs = (_episodes([item for item in side if _in_pieces(item)]) for side in (streams, plain))
    if not plain or mine < 3:
        return False
    return binomial_at_least(mine, mine + theirs, len(streams) / (len(streams) + len(plain))) < SUSPECT


def _judgeable(item: Transcript) -> bool:
    timing = item.timing
    if item.error is not None or timing is None or _tokens(item) < MANY_TOKENS or not item.text:
        return False
    if any(marker in item.text for marker in TOOL_MARKERS):  # a parser holds back what may become a call
        return False
    return timing.total >= SHORTEST_STREAM and timing.lag < 0.25 * timing.total


def _tokens(item: Transcript) -> int:
    return item.completion_tokens or len(item.text) // 4


def _at_once(item: Transcript) -> bool:
    return _span(item) < BUFFERED_SPAN * (item.timing.total if item.timing else 0)


def _in_pieces(item: Transcript) -> bool:
    """Whether a stream came in few pieces, at times so far apart that this process was not the cause."""
    times = _times(item)
    if not times or _at_once(item):
        return False
    return _tokens(item) / times > TOKENS_PER_ARRIVAL and _span(item) / max(1, times - 1) > LONG_WAIT


def _times(item: Transcript) -> int:
    """At how many times its pieces came."""
    return item.arrivals or 0


def _per_arrival(streams: Sequence[Transcript]) -> float:
    """The median of tokens in one arrival; 0 where no stream tells."""
    return statistics.median([_tokens(item) / _times(item) for item in streams if _times(item)] or [0.0])


def _span(item: Transcript) -> float:
    timing = item.timing
    return 0.0 if timing is None or timing.first is None or timing.last is None else timing.last - timing.first


def check_speed(got: Recording, expected: Recording | None) -> CheckResult:
    """Answers do not take longer and longer: the last pass against the streams before and the first pass, question by
    question, and beside what the plain server's last pass took. Streams are compared with streams first: on a machine
    that others use, each of their pieces waits for its turn."""
    before = {item.question: _pace(item) for item in got.transcripts if _pace(item)}
    after = [item for item in [*got.streamed, *got.later] if item.question in before and _pace(item)]
    if len(after) < 4:
        return result("steady-speed", "skipped", "too few answers were asked twice")
    usual = statistics.median([_pace(item) for item in after])
    slow = [item for item in after if _slow(item, before[item.question], usual)]
    episodes, slowdown = _episodes(slow), _slowdown(got)
    everywhere, message = False, "the last pass has no answer whose pace is known"
    if slowdown is not None:
        plain = _slowdown(expected) if expected else None
        extra = statistics.median([item.timing.total for item in got.later if item.timing])
        ratios = sorted(
            _pace(item) / before[item.question] for item in got.later if _pace(item) and item.question in before
        )
        later = bool(ratios) and ratios[len(ratios) // 10] > SLOW_FIRST
        everywhere = later or slowdown > max(SLOW_ALL, SLOW_PLAIN * (plain or 0.0))
        everywhere = everywhere and extra > SLOW_EXTRA / 2
        message = f"the last pass takes {slowdown:.2f} times as long per token as the streams before"
        message += f" ({plain:.2f} times without speculation)" if plain is not None else ""
        message += f", {statistics.median(ratios):.2f} times as long as the first pass" if ratios else ""
    if episodes:
        message += f"; {len(slow)} of {len(after)} answers stall, {episodes} times: {slow[0].question}"
    bad = everywhere or episodes >= 2
    if slowdown is None and not bad:
        return result("steady-speed", "skipped", message)
    remedy = (
        "watch the server's memory, cache and clocks while it is asked for longer; trtspec bench shows the latencies"
    )
    detail = {"questions": [item.question for item in slow][:SHOWN]}
    return pass_or_fail("steady-speed", bad, message, "TS-CHECK-SLOWER", remedy, len(after), **detail)


def _slowdown(recording: Recording) -> float | None:
    """The median over questions of the time per token in the last pass over that in the streams before it; None where
    no question has both."""
    before = {item.question: _pace(item) for item in recording.streamed if _pace(item)}
    last = [item for item in recording.later if item.question in before and _pace(item)]
    return statistics.median([_pace(item) / before[item.question] for item in last]) if last else None


def _pace(item: Transcript) -> float:
    """Seconds per token; 0 where it is not known."""
    timing, tokens = item.timing, _tokens(item)
    if timing is None or not tokens or item.error is not None:
        return 0.0
    return max(timing.total - timing.lag, 1e-6) / tokens


def _slow(item: Transcript, before: float, usual: float) -> bool:
    least = max(before, usual)
    return _pace(item) > SLOW_ONE * least and (_pace(item) - least) * _tokens(item) > SLOW_EXTRA


def _episodes(slow: Sequence[Transcript]) -> int:
    """How many separate times answers stalled: those that overlap in time may have one cause outside the server."""
    times = sorted((item.timing.started, item.timing.started + item.timing.total) for item in slow if item.timing)
    found, end = 0, float("-inf")
    for start, stop in times:
        found += start > end
        end = max(end, stop)
    return found
