"""What makes a measurement worth less than it looks. The gate judges servers; these name what a figure cannot say."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from statistics import median

from trtspec.bench.check.rows import forced_sizes
from trtspec.bench.check.thresholds import MIN_STEPS, TOKENS_PER_ARRIVAL
from trtspec.bench.load.loops import Round
from trtspec.bench.statistics import AcceptanceSummary, add_histograms, per_question, ratio
from trtspec.client.client import Answer
from trtspec.client.servers import TurnCounts
from trtspec.client.text_quality import judge_run
from trtspec.errors import Problem, TrtspecError, UsageError

# request parameters that a server's release handles badly under speculation: "end_engine", "ignored", "refused"
RequestLimits = Mapping[str, Sequence[str]]
ENOUGH_ANSWERS = 16  # of a run, in whose quarters waiting is compared
WIDE = 0.1  # half an interval over its value: more is too few questions to judge by
AIM = 0.05
SHOWN = 3
SETS = {"reasoning_effort": "--thinking on or off: this server takes no mode"}  # key of a request -> another option


def refuse_all_failed(name: str, answers: Sequence[Answer]) -> None:
    """Raises TrtspecError with the server's own words when no request succeeded."""
    if answers and all(answer.error for answer in answers):
        refused = next((option for key, option in SETS.items() if key in (answers[0].error or "")), None)
        raise TrtspecError(
            f"all {len(answers)} requests to {name} failed; the first said: {answers[0].error}",
            f"give {refused}" if refused else "look at the server's log; send one request by hand (curl)",
        )


def refuse_what_ends_engines(name: str, limits: RequestLimits, asked: Iterable[str]) -> None:
    """Raises UsageError, before anything is sent, for parameters that end an engine of this release."""
    if deadly := sorted(set(asked) & set(limits.get("end_engine", ()))):
        message = f"{', '.join(deadly)}: under speculation such a request ends the engine of {name} for everybody"
        raise UsageError(message, "leave it out of `extra_body`, or use a later release")


def limited_parameters(name: str, limits: RequestLimits, asked: Iterable[str]) -> list[Problem]:
    """Parameters that this release drops or refuses under speculation: the answers are not what was asked for."""
    found = []
    for key, what in (("ignored", "ignores"), ("refused", "refuses")):
        if named := sorted(set(asked) & set(limits.get(key, ()))):
            message = f"this release {what} {', '.join(named)} under speculation"
            remedy = "measure without it, or without speculation"
            found.append(Problem("TS-BENCH-PARAMETER", "warning", name, message, remedy))
    return found


def failed_requests(name: str, answers: Sequence[Answer]) -> list[Problem]:
    errors = [answer.error for answer in answers if answer.error]
    if not errors:
        return []
    message = f"{len(errors)} of {len(answers)} requests failed; the first said: {errors[0]}"
    return [Problem("TS-BENCH-ERRORS", "error", name, message, "look at the server's log; lower `concurrency`")]


def degenerate_output(name: str, answers: Sequence[Answer]) -> list[Problem]:
    verdict = judge_run([answer.written for answer in answers if not answer.error])
    if not verdict.degenerate:
        return []
    message = (
        f"{verdict.loop} loops, {verdict.empty} empty, {verdict.noise} noise among {verdict.answers} answers (distinct "
        f"4-grams {verdict.distinct_4gram_ratio}): loops flatter every drafter"
    )
    remedy = "read answers.jsonl; measure at the temperature that users have, with the right chat template"
    return [Problem("TS-BENCH-DEGENERATE", "warning", name, message, remedy)]


def ignored_end(name: str, asked: Mapping[str, object]) -> list[Problem]:
    if not asked.get("ignore_eos"):
        return []
    message = "ignore_eos makes the model write past its own end: acceptance there is not that of real answers"
    remedy = "measure acceptance without ignore_eos"
    return [Problem("TS-BENCH-IGNORE-EOS", "warning", name, message, remedy)]


def no_acceptance(
    name: str, kind: str, counts: Sequence[TurnCounts], unmeasured: Sequence[str] = (), uncounted: Sequence[str] = ()
) -> list[Problem]:
    """That acceptance is not measured, in whole or in part: `unmeasured` is what the server said that is no figure,
    `uncounted` which answers its counters do not cover."""
    code = "TS-BENCH-NO-ACCEPTANCE"
    found, start = [], f"acceptance is {'' if counts else 'not '}measured{' in part' if counts else ''}"
    if unmeasured:
        by_hand = "read the server's metrics by hand; ask it, not a proxy"
        found.append(Problem(code, "warning", name, f"{start}: {unmeasured[0]}", by_hand))
    if uncounted:
        more = f", and {len(uncounted) - SHOWN} more" if len(uncounted) > SHOWN else ""
        message = f"{start}: the server counts all requests together, and {'; '.join(uncounted[:SHOWN])}{more}"
        found.append(Problem(code, "warning", name, message, "measure again with `force` for all of it"))
    if found or counts:
        return found
    message = f"the server ({kind}) reports nothing about speculation: acceptance is not measured"
    return [Problem(code, "info", name, message, "only throughput and latency are shown")]


def nothing_accepted(name: str, counts: Sequence[TurnCounts]) -> list[Problem]:
    steps, drafted = sum(count.steps for count in counts), sum(count.drafted or 0 for count in counts)
    # a head drafts in every step; prompt lookup drafts now and then, and may honestly find nothing
    if drafted < max(steps, MIN_STEPS) or any(count.accepted for count in counts):
        return []
    message = (
        f"{drafted} tokens were drafted and none was accepted: the head does not belong to this target, or is served "
        "with another function than it was trained with"
    )
    return [Problem("TS-BENCH-NOTHING-ACCEPTED", "error", name, message, "trtspec inspect HEAD --against TARGET")]


def forced_acceptance(name: str, counts: Sequence[TurnCounts], answers: Sequence[Answer]) -> list[Problem]:
    """Acceptance that a server makes up, which no drafter yields but on a loop."""
    histogram = add_histograms(count.histogram for count in counts) or []
    sizes = forced_sizes(Counter({place + 1: count for place, count in enumerate(histogram)}))
    if not sizes or judge_run([answer.text for answer in answers if not answer.error]).degenerate:
        return []
    message = f"every step brought {sizes} tokens over {sum(histogram)} steps: the output is corrupt, the speed too"
    remedy = "unset TLLM_SPEC_DECODE_FORCE_NUM_ACCEPTED_TOKENS (or the engine's equivalent) and start the server again"
    return [Problem("TS-BENCH-FORCED-ACCEPTANCE", "error", name, message, remedy)]


def counters_disagree(name: str, counts: Sequence[TurnCounts]) -> list[Problem]:
    """Counters around a run that hold requests of others."""
    pooled = [count for count in counts if count.answers > 1 and count.drafted and count.steps]
    tokens, steps, asked, surplus = (
        sum(getattr(count, key) for count in pooled) for key in ("tokens", "steps", "answers", "surplus")
    )
    drafts = sum(count.drafted or 0 for count in pooled) / max(1, steps)
    if tokens < steps:
        reason = f"{steps} steps for {tokens} tokens in {asked} answers"
    elif surplus > asked * drafts:
        reason = f"{surplus} more accepted drafts than {asked} answers can leave behind"
    else:
        return []
    remedy = "measure alone on the server, whose counters hold everybody's requests"
    message = f"the counters and the answers disagree: {reason}"
    return [Problem("TS-BENCH-COUNTERS", "error", name, message, remedy)]


def buffered(name: str, answers: Sequence[Answer]) -> list[Problem]:
    """A warning where every long answer comes at once or in large chunks: a proxy between server and user holds them
    back."""
    long = [a for a in answers if not a.error and a.completion_tokens >= 2 * TOKENS_PER_ARRIVAL]
    sizes = [a.completion_tokens / max(1, len({when for when, _ in a.chunks})) for a in long]
    if not long or min(sizes) <= TOKENS_PER_ARRIVAL:
        return []
    message = (
        f"{len(long)} answers arrive in chunks of {median(sizes):.0f} tokens: time to first token and between tokens "
        "are not the server's"
    )
    remedy = "turn buffering off in the proxy (nginx: proxy_buffering off), or lower the server's stream_interval"
    return [Problem("TS-BENCH-BUFFERED", "warning", name, message, remedy)]


def overloaded(name: str, rounds: Sequence[Round]) -> list[Problem]:
    """A warning for a request rate that the server cannot keep: waiting grows with the length of the run."""
    for run in rounds:
        ordered = sorted((a for a in run.answers if not a.error and a.first_token), key=lambda a: a.started)
        if run.rate is None or len(ordered) < ENOUGH_ANSWERS:
            continue
        waits = [a.first_token - a.started for a in ordered]  # type: ignore[operator]
        quarter = len(ordered) // 4
        first, last = median(waits[:quarter]), median(waits[-quarter:])
        mean = sum(a.finished - a.started for a in ordered) / len(ordered)
        if last > 2 * first and last - first > 0.1 * mean:
            message = (
                f"{run.rate:g} requests/s are more than it serves: the time to the first token grew from "
                f"{1000 * first:.0f} to {1000 * last:.0f} ms during the run"
            )
            return [Problem("TS-BENCH-OVERLOAD", "warning", name, message, "lower `rate`")]
    return []


def underfilled(name: str, runs: Sequence[Round]) -> list[Problem]:
    """The highest load that a round had too few conversations to reach; one finding is enough."""
    held = [(run.concurrency, len({answer.question for answer in run.answers})) for run in runs if run.rate is None]
    missed = max(((load, count) for load, count in held if count < load), default=None)
    if missed is None:
        return []
    message = "concurrency {}: a round had {} questions, so that no more were ever in flight".format(*missed)
    remedy = "ask more questions (`dataset`, `samples`), or fewer `rounds`"
    return [Problem("TS-BENCH-FEW-QUESTIONS", "info", name, message, remedy)]


def too_few(name: str, summary: AcceptanceSummary, counts: Sequence[TurnCounts]) -> list[Problem]:
    """A note where the acceptance length is too uncertain to judge by, with how many questions would do."""
    length, units = summary.acceptance_length, list(per_question(counts).values())
    found = ratio([steps + accepted for steps, accepted, _ in units], [steps for steps, _, _ in units])
    if length is None or (found and found.high / found.value - 1 <= WIDE) or (not units and counts):
        return []
    needed, sure = (found.units_needed(AIM), f" ({found.words})") if found else (20, "")
    message = f"{summary.questions} questions are too few to judge by: acceptance length {length:.2f}{sure}"
    remedy = f"about {needed} questions give +- {100 * AIM:.0f} %"
    return [Problem("TS-BENCH-FEW-STEPS", "info", name, message, remedy)]
