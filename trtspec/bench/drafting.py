"""Rows of the gate on acceptance: the floor, what is claimed, what is forced, and where it collapses."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

from trtspec.bench.gate import SHOWN, CheckResult, Status, pass_or_fail, result
from trtspec.bench.statistics import AcceptanceSummary, summarize
from trtspec.bench.steps import (
    AGREE,
    ENOUGH_ANSWERS,
    ENOUGH_STEPS,
    LONGEST_DRAFT,
    can_tell_forced,
    claimed_steps,
    compare_passes,
    counters_fault,
    counts_of_streams,
    fell_from,
    fewer_than_chance,
    forced,
    hopeless,
    increments,
    mean_rate,
    pooled_histogram,
    steps_of,
)  # fmt: skip
from trtspec.bench.transcript import Recording, Transcript
from trtspec.client.servers import FROM_COUNTERS, FROM_SGLANG, LEAST_AVERAGE, choice_histogram, is_count
from trtspec.client.text_quality import judge_run

LITTLE = 0.1  # accepted drafts per step; below it there is nothing that could collapse
LONG_SHARE = 0.25  # a length that accepts less than this share of what short prompts do
UNTOLD = "neither the answers nor their streams tell how many steps they took"
CLAIMS = "acceptance-claims"
BELIEVE_NONE = "believe no acceptance figure of this server; measure its speed against the plain one with trtspec bench"
FEW_DECIMALS = 3  # an average printed with fewer digits does not show whether it belongs to a whole number of steps


def check_acceptance(got: Recording, floor: float | None) -> CheckResult:
    """Acceptance length at or above the floor; always with a word on the output it was measured on."""
    found, claimed = _measured(got)
    length = found.acceptance_length
    looping = judge_run([transcript.text for transcript in got.answered]).degenerate
    told = ("acceptance_length", "steps", "drafted", "accepted", "histogram", "source")
    detail = {key: getattr(found, key) for key in told}
    if length is None or not (found.drafted or found.accepted):
        status: Status = "fail" if floor is not None else "skipped"
        message = "the server tells nothing about speculation, or runs without it"
    else:
        status = "skipped" if floor is None else "pass" if length >= floor else "fail"
        against = "no floor given (--min-acceptance)" if floor is None else f"floor {floor:g}"
        message = f"acceptance length {length:.3f} over {found.turns} greedy answers, {against}"
        if claimed is not None:
            message += f"; by the {found.source}, where {claimed.source} says {claimed.acceptance_length:.3f}"
            detail["claimed"] = claimed.acceptance_length
        if looping:
            message += "; the output is degenerate (see above), which flatters acceptance"
    remedy = "trtspec bench URL for acceptance by category; trtspec inspect HEAD --against TARGET"
    return result("acceptance", status, message, "TS-CHECK-ACCEPTANCE", remedy, **detail)


def _measured(got: Recording) -> tuple[AcceptanceSummary, AcceptanceSummary | None]:
    """Acceptance as it is judged, and what the server said where its streams are believed instead: they show fewer
    tokens per step than that, or it keeps a mean since its start alone."""
    told, shown = summarize(got.counts), summarize(counts_of_streams(got.streamed))
    if shown.acceptance_length is None:
        return told, None
    if told.acceptance_length is None:
        return shown, None
    own = all(counts.source != FROM_SGLANG for counts in got.counts)
    if own and told.acceptance_length <= AGREE * shown.acceptance_length:
        return told, None
    return shown, told


def check_claims(got: Recording) -> CheckResult:
    """What the server says about its steps agrees with itself, with the tokens and with the stream."""
    told = [
        i
        for i in [*got.answered, *got.streams]
        if i.error is None and (i.average is not None or i.spec_decode is not None)
    ]
    if not told:
        return _counters_row(got)
    faults = claim_faults(told)
    shown = [f"{question}: {fault}" for question, fault in faults]
    streamed = sum(bool(item.counted) for item in told)
    message = (
        f"what {len(told)} answers say of their steps agrees with their tokens, {streamed} of them with their stream"
    )
    if faults:
        message = f"{len(faults)} of {len(told)} answers claim what cannot be: {shown[0]}"
    return pass_or_fail(CLAIMS, faults, message, "TS-CHECK-CLAIM", BELIEVE_NONE, len(told), faults=shown[:SHOWN])


def _counters_row(got: Recording) -> CheckResult:
    """The counters of a server whose answers say nothing, against the streams around which they were read."""
    pooled = got.streamed_counts or [counts for counts in got.counts if counts.source == FROM_COUNTERS]
    if not pooled:
        return result(CLAIMS, "skipped", "neither the answers nor counters claim anything about speculation")
    shown = mean_rate(got.streamed)
    if shown is None:
        return result(CLAIMS, "skipped", "the streams do not tell how many steps they took, to hold the counters to")
    if shown[1] < ENOUGH_STEPS or any(item.error for item in got.streamed):
        few = f"{shown[1]} steps of streams, and those of failed ones, are no measure of the counters"
        return result(CLAIMS, "skipped", few)
    fault = counters_fault(pooled[0], got.streamed)
    message = f"the counters agree with the {1 + shown[0]:.3f} tokens per step that {len(got.streamed)} streams brought"
    remedy = f"{BELIEVE_NONE}; counters hold everybody's requests: ask alone"
    return result(CLAIMS, "fail" if fault else "pass", fault or message, "TS-CHECK-CLAIM", remedy)


def claim_faults(transcripts: Sequence[Transcript]) -> list[tuple[str, str]]:
    """(question, what is wrong) for every answer whose claims contradict each other, its tokens or its stream."""
    decimals = max((_decimals(t.average) for t in transcripts if t.average), default=0)
    found = [
        (transcript.question, fault)
        for transcript in transcripts
        if transcript.error is None
        for fault in itertools.islice(_faults(transcript, decimals), 1)
    ]
    return found or _one_average(transcripts) or _many_pieces(transcripts)


def _faults(transcript: Transcript, decimals: int) -> Iterator[str]:
    tokens, average, spec = transcript.completion_tokens or 0, transcript.average, transcript.spec_decode
    if spec is not None:
        yield from _spec_faults(spec, tokens)
    if average is not None and average < LEAST_AVERAGE:
        yield f"{average:g} tokens per iteration are fewer than one"
    if average is not None and tokens and decimals >= FEW_DECIMALS and not _whole(tokens, average, decimals):
        yield f"{average:g} tokens per iteration of {tokens} tokens are no whole number of iterations"
    if average is not None and average > tokens > 0:
        yield f"{average:g} tokens per iteration are more than the {tokens} tokens of the answer"
    claimed, seen = claimed_steps(transcript), increments(transcript.counted, transcript.completion_tokens)
    if claimed is not None and len(seen) > 1.05 * (claimed + 1) + 1:
        yield f"{claimed} steps are claimed and the stream brought tokens {len(seen)} times"
    elif claimed is not None and not seen and (transcript.pieces or 0) > 1.2 * (claimed + 1) + 4:
        yield f"{claimed} steps are claimed and the stream came in {transcript.pieces} pieces"
    if spec is not None and average is not None and is_count(spec.get("steps")) and tokens:
        told = tokens / (spec["steps"] + 1)
        if not 0.9 * told <= average <= 1.1 * told + 0.1:
            yield f"{average:g} tokens per iteration are claimed, and {spec['steps']} steps for {tokens} tokens"


def _spec_faults(spec: dict[str, Any], tokens: int) -> Iterator[str]:
    named = {key: spec.get(key) for key in ("steps", "drafted", "accepted")}
    if not all(is_count(value) for value in named.values()):
        wrong = ", ".join(key for key, value in named.items() if not is_count(value))
        yield f"of spec_decode, {wrong} are no counts"
        return
    steps, drafted, accepted = (int(value or 0) for value in named.values())
    if accepted and not steps:
        yield f"{accepted} drafts are accepted without a step"
    if accepted > drafted:
        yield f"{accepted} drafts are accepted of {drafted}"
    histogram, longest = choice_histogram(spec), LONGEST_DRAFT
    if histogram:
        longest = len(histogram) - 1
        if sum(histogram) != steps or sum(j * count for j, count in enumerate(histogram)) != accepted:
            yield "the histogram does not add up to its own steps and accepted drafts"
    if tokens > 1 + steps + accepted:
        yield f"{tokens} tokens are more than {steps} steps and {accepted} accepted drafts make"
    elif tokens and 1 + steps + accepted - tokens > longest + 1:
        yield f"{steps} steps and {accepted} accepted drafts make more than the {tokens} tokens that came"


def _decimals(value: float) -> int:
    return len(repr(round(value, 6)).rpartition(".")[2])


def _whole(tokens: int, average: float, decimals: int) -> bool:
    """Whether some whole number of iterations gives this average; an engine may count the end of the answer or not."""
    slack = 0.5 * 10.0 ** -min(decimals, 5)
    for counted in (tokens - 1, tokens, tokens + 1):
        iterations = counted / average
        if abs(iterations - round(iterations)) <= 1e-3 + slack * iterations / average:
            return True
    return False


def _one_average(transcripts: Sequence[Transcript]) -> list[tuple[str, str]]:
    """Answers of different lengths that all claim one average, though it makes no whole number of iterations."""
    told = [t for t in transcripts if t.error is None and t.average and t.completion_tokens]
    averages = {round(t.average or 0.0, 4) for t in told}
    if len(told) < ENOUGH_ANSWERS or len(averages) != 1 or averages == {1.0}:
        return []
    average = averages.pop()
    broken = [t for t in told if not _whole(t.completion_tokens or 0, average, FEW_DECIMALS + 1)]
    said = f"all {len(told)} answers claim {average:g} tokens per iteration, whatever their length"
    return [(t.question, said) for t in broken] if len(broken) > len(told) / 4 else []


def _many_pieces(transcripts: Sequence[Transcript]) -> list[tuple[str, str]]:
    """Streams without counts that together came in more pieces than the steps that they claim: no step is two pieces,
    but for one at the end of an answer."""
    told = [
        (item, claimed + 1)
        for item in transcripts
        if item.error is None and item.pieces and not item.counted and (claimed := claimed_steps(item)) is not None
    ]
    pieces, steps = sum(item.pieces or 0 for item, _ in told), sum(steps for _, steps in told)
    if len(told) < ENOUGH_ANSWERS or steps < ENOUGH_STEPS or pieces <= AGREE * (steps + len(told)):
        return []
    said = f"{len(told)} streams claim {steps} steps together and came in {pieces} pieces"
    return [(item.question, said) for item, _ in told]


def check_forced(got: Recording) -> CheckResult:
    """Acceptance varies as that of a drafter does."""
    name, code = "forced-acceptance", "TS-CHECK-FORCED-ACCEPTANCE"
    remedy = "unset TLLM_SPEC_DECODE_FORCE_NUM_ACCEPTED_TOKENS (or the engine's equivalent) and start the server again"
    everything = [item for item in [*got.answered, *got.streams] if item.error is None]
    rate = mean_rate(everything)
    if rate is None:
        return result(name, "skipped", UNTOLD)
    if rate[0] < LITTLE:
        return result(name, "skipped", "next to nothing is accepted: the server runs without speculation")
    reason = forced(everything)
    risen = _risen(got)
    if reason or risen:
        reason = reason or f"{len(risen)} answers accepted far more at one time than at another, among them {risen[0]}"
        return result(name, "fail", reason, code, remedy, risen=risen[:SHOWN], histogram=pooled_histogram(everything))
    if not can_tell_forced(everything):
        few = f"fewer than {ENOUGH_STEPS} steps of text that does not repeat itself, or only averages, below two tokens"
        return result(name, "skipped", few, histogram=pooled_histogram(everything))
    counted = [item for item in everything if steps_of(item) is not None]
    histogram = pooled_histogram(everything)
    message = f"acceptance varies over {len(counted)} answers as a drafter's does"
    message += f" (steps by accepted drafts: {histogram})" if histogram else ""
    return result(name, "pass", message, histogram=histogram, seen=len(counted))


def _risen(got: Recording) -> list[str]:
    """Questions whose same text was accepted far more readily in one pass than in the two others: nothing honest makes
    drafts better for once."""
    passes = [{item.question: item for item in one} for one in (got.answered, got.streamed, got.later)]
    found = []
    for question in passes[0]:
        each = [steps for one in passes if question in one and (steps := steps_of(one[question])) is not None]
        each.sort(key=lambda steps: steps.steps)
        same = len(each) == len(passes) and len({steps.text for steps in each}) == 1
        if same and fell_from(each[0], each[1]):
            found.append(question)
    return found


def check_passes(got: Recording) -> list[CheckResult]:
    """Acceptance on prompts that were asked before, and after a burst."""
    warm = _pass_row(
        "acceptance-warm", "TS-CHECK-ACCEPTANCE-WARM", [(got.answered, got.streamed), (got.long_cold, got.long_warm)],
        "on prompts asked before",
        "serve with kv_cache_config.enable_block_reuse: false, or a release whose drafter reuses its cache as well",
    )  # fmt: skip
    burst = _pass_row(
        "acceptance-after-burst", "TS-CHECK-ACCEPTANCE-BURST", [(got.streamed, got.later)], "after a burst",
        "compare acceptance before and after load with trtspec bench; look for draft_len_schedule and max_concurrency",
    )  # fmt: skip
    return [warm, burst]


def _pass_row(
    name: str, code: str, passes: Sequence[tuple[Sequence[Transcript], Sequence[Transcript]]], where: str, remedy: str
) -> CheckResult:
    found = [compared for before, after in passes if (compared := compare_passes(before, after)) is not None]
    if not found:
        return result(name, "skipped", UNTOLD)
    if max(compared.before for compared in found) < LITTLE:
        return result(name, "skipped", "next to nothing is accepted, so nothing can collapse")
    fallen = [question for compared in found for question in compared.fallen]
    fell = [compared for compared in found if compared.fell]
    worst = min(found, key=lambda compared: compared.after / max(compared.before, 1e-9))
    count = sum(compared.answers for compared in found)
    message = (
        f"{worst.after:.3f} drafts accepted per step {where}, {worst.before:.3f} before, over {worst.answers} answers"
    )
    if fallen:
        message += f"; {len(fallen)} of {count} answers collapse: {fallen[0]}"
    status: Status = "fail" if fallen or fell else "pass"
    return result(
        name, status, message, code, remedy, fallen=fallen[:SHOWN], before=worst.before, after=worst.after, seen=count
    )


def check_long(got: Recording) -> CheckResult:
    """Acceptance at each length of context, against that on short prompts."""
    name = "acceptance-long-context"
    lengths = list(dict.fromkeys(item.group for item in got.long_cold))
    if not lengths:
        return result(name, "skipped", "no long prompt was asked (--contexts)")
    refused = [i for i in got.long_cold if i.error]
    short = got.streamed if mean_rate(got.streamed) else got.answered
    usual = mean_rate(short)
    judged = sum(steps_of(item) is not None for item in got.long)
    table, bad, count = [], [], 0
    for length in lengths:
        here = [item for item in [*got.long_cold, *got.long_warm] if item.group == length and item.error is None]
        rate = mean_rate(here)
        if rate is None or usual is None:
            continue
        count += len(here)
        lost = hopeless(here, usual[0], short, judged) if usual[0] >= LITTLE else []
        read = max((item.prompt_tokens or 0) for item in here)
        table.append(
            {"asked_for": int(length), "prompt_tokens": read, "accepted_per_step": round(rate[0], 4), "steps": rate[1]}
        )
        few = rate[1] >= ENOUGH_STEPS and rate[0] < LONG_SHARE * usual[0]
        if lost or (few and usual[0] >= LITTLE and fewer_than_chance(here, short, len(lengths))):
            bad.append(
                f"{length} tokens: {rate[0]:.3f} drafts accepted per step" + (f", none for {lost[0]}" if lost else "")
            )
    said = (
        f"refused: {', '.join(dict.fromkeys(i.group for i in refused))} tokens ({str(refused[0].error)[:100]})"
        if refused
        else ""
    )
    if not table or usual is None or usual[0] < LITTLE:
        why = UNTOLD if not table and not refused else said or "next to nothing is accepted, so nothing can collapse"
        return result(name, "skipped", why, lengths=table)
    rates = ", ".join(f"{row['accepted_per_step']:g} at {row['prompt_tokens']}" for row in table)
    message = f"{usual[0]:.3f} drafts accepted per step on short prompts; {rates} tokens" + (
        f"; {said}" if said else ""
    )
    if bad:
        message += f"; collapsed: {bad[0]}"
    remedy = "train the head on longer contexts, or check its rope scaling: trtspec inspect HEAD --against TARGET"
    return pass_or_fail(name, bad, message, "TS-CHECK-ACCEPTANCE-LONG", remedy, count, lengths=table)
