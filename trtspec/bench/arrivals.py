"""What the arrival of answers says: that something between server and user holds them back, or that the server cannot
keep up with what arrives."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from trtspec.bench.client import Answer
from trtspec.bench.load import Round
from trtspec.errors import Problem

LONG = 32  # tokens from which the arrival of an answer says something
TOKENS_PER_ARRIVAL = 16  # more than any drafter yields in a step
ENOUGH_ANSWERS = 4


def buffered(name: str, answers: Sequence[Answer]) -> list[Problem]:
    """A warning where most answers came at once or in large pieces: what is between server and user holds them back."""
    long = [a for a in answers if not a.error and a.completion_tokens >= LONG and a.first_token is not None]
    if len(long) < ENOUGH_ANSWERS:
        return []
    per_arrival = [answer.completion_tokens / len({when for when, _ in answer.chunks}) for answer in long]
    if median(per_arrival) <= TOKENS_PER_ARRIVAL:
        return []
    waited = median([(a.first_token - a.started) / max(a.finished - a.started, 1e-9) for a in long])  # type: ignore[operator]
    message = (
        f"answers arrive in pieces of {median(per_arrival):.0f} tokens (median of {len(long)}), the first after "
        f"{100 * waited:.0f} % of the time: time to first token and between tokens are not the server's"
    )
    remedy = "turn buffering off in the proxy (nginx: proxy_buffering off), or lower the server's stream_interval"
    return [Problem("TS-BENCH-BUFFERED", "warning", name, message, remedy)]


def overloaded(name: str, rounds: Sequence[Round]) -> list[Problem]:
    """A warning for a request rate that the server cannot keep: waiting grows with the length of the run."""
    found = []
    for run in rounds:
        ordered = sorted((a for a in run.answers if not a.error and a.first_token), key=lambda a: a.started)
        if run.rate is None or len(ordered) < 4 * ENOUGH_ANSWERS:
            continue
        quarter = len(ordered) // 4
        first, last = (
            median([a.first_token - a.started for a in part])  # type: ignore[operator]
            for part in (ordered[:quarter], ordered[-quarter:])
        )
        mean = sum(a.finished - a.started for a in ordered) / len(ordered)
        if last > 2 * first and last - first > 0.1 * mean:
            message = (
                f"{run.rate:g} requests/s are more than it serves: the time to the first token grew from "
                f"{1000 * first:.0f} to {1000 * last:.0f} ms during the run"
            )
            found.append(Problem("TS-BENCH-OVERLOAD", "warning", name, message, "lower --rate"))
    return found[:1]


def underfilled(name: str, runs: Sequence[Round]) -> list[Problem]:
    """The highest load that a round had too few conversations to reach; one finding is enough."""
    held = [(run.concurrency, len({answer.question for answer in run.answers})) for run in runs if run.rate is None]
    missed = max(((load, count) for load, count in held if count < load), default=None)
    if missed is None:
        return []
    message = "load {}: a round had {} questions, so that no more were ever in flight".format(*missed)
    remedy = "ask more questions (--dataset, --samples), or fewer --rounds"
    return [Problem("TS-BENCH-FEW-QUESTIONS", "info", name, message, remedy)]
