"""The gate of `trtspec check`: rows that each judge one property of a recording, put together to a verdict."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from trtspec.bench import baseline, drafting, endings, features, forms, pace, parameters, visible
from trtspec.bench.gate import (
    SHOWN,
    UNLIKELY,
    CheckResult,
    more_often,
    pass_or_fail,
    required,
    result,
)
from trtspec.bench.lossless import compare_transcripts
from trtspec.bench.transcript import Recording, Transcript
from trtspec.client.text_quality import RUN_SHARE, degeneration, judge_run
from trtspec.errors import UsageError

ALL = "all"


@dataclass(frozen=True, kw_only=True)
class GateVerdict:
    """What the gate says of a server; `against`: the one that it was compared with."""

    url: str
    server: dict[str, Any]
    against: dict[str, Any] | None
    prompts: int
    max_tokens: int
    results: list[CheckResult]

    @property
    def failed(self) -> list[str]:
        return [found.name for found in self.results if found.status == "fail"]

    def to_dict(self) -> dict[str, Any]:
        """The JSON contract of `check`: ok where nothing failed."""
        return {"ok": not self.failed, **vars(self), "results": [found.to_dict() for found in self.results]}


@dataclass(frozen=True, kw_only=True)
class GateLimits:
    """What must hold: the floor of acceptance, the ceiling of the rounding bound in nats, the rows that must be
    measured."""

    min_acceptance: float | None = None
    near_tie: float = 0.5
    require: tuple[str, ...] = ()


def run_checks(got: Recording, expected: Recording | None, limits: GateLimits) -> GateVerdict:
    """`expected` is the same model without speculation; where it shows drafts itself, nothing is compared with it.
    Raises UsageError for a required row that there is not."""
    shown = baseline.speculation(expected) if expected else None
    rows = _judged(got, None if shown else expected, limits)
    if shown:
        rows = baseline.uncompared(rows, shown)
    return GateVerdict(
        url=got.url,
        server=got.server,
        against={"url": expected.url, "server": expected.server} if expected else None,
        prompts=len(got.transcripts),
        max_tokens=got.max_tokens,
        results=_with_required(rows, limits.require),
    )


def refuse_unknown_rows(names: Sequence[str]) -> None:
    """Raises UsageError for the first of these that is no row of the gate."""
    _with_required(_judged(Recording("", {}, 1, []), None, GateLimits()), names)


def _judged(got: Recording, expected: Recording | None, limits: GateLimits) -> list[CheckResult]:
    return [
        visible.check_answers(got, expected),
        visible.check_context(got, expected),
        check_lossless(got, expected, limits),
        visible.check_visible_text(got, expected),
        *visible.check_stream(got, expected, limits.near_tie),
        visible.check_long_answers(got, expected, limits.near_tie),
        visible.check_usage(got, expected),
        check_degenerate(got, expected),
        features.check_tool_calls(got, expected, limits.near_tie),
        features.check_tool_streams(got, expected, limits.near_tie),
        features.check_follow_ups(got, expected, limits.near_tie),
        forms.check_forms(got, expected, limits.near_tie),
        endings.check_stops(got, expected, limits.near_tie),
        endings.check_finish(got, expected),
        features.check_image(got, expected),
        drafting.check_acceptance(got, limits.min_acceptance),
        drafting.check_claims(got),
        drafting.check_forced(got),
        *drafting.check_passes(got),
        drafting.check_long(got),
        pace.check_speed(got, expected),
        pace.check_streaming(got, expected),
        parameters.check_parameters(got, expected),
    ]


def _with_required(rows: Sequence[CheckResult], names: Sequence[str]) -> list[CheckResult]:
    known = [row.name for row in rows]
    unknown = [name for name in names if name not in (*known, ALL)]
    if unknown:
        raise UsageError(f"--require {unknown[0]} names no row of the gate", f"the rows are {', '.join(known)}, or all")
    return [required(row) if ALL in names or row.name in names else row for row in rows]


def check_lossless(got: Recording, expected: Recording | None, limits: GateLimits) -> CheckResult:
    """Greedy answers read as those of the other server, up to near-ties."""
    limit = limits.near_tie
    if expected is None:
        return result("lossless", "skipped", "nothing to compare with: pass --against FILE or URL of the plain server")
    passes = [again.transcripts for again in expected.repeats]
    found = compare_transcripts(expected.transcripts, got.transcripts, limit, passes)
    first = sorted(found.divergences, key=lambda d: d.verdict != "real")[:SHOWN]
    detail = asdict(replace(found, divergences=first))
    summary = (
        f"{found.identical} of {found.compared} greedy answers identical, {found.near_ties} part at a "
        f"near-tie (bound {found.bound:g} nats: {found.bound_reason})"
    )
    if not found.compared:
        return result("lossless", "skipped", "the two recordings share no question that both answered", **detail)
    if found.rounding.wild:
        summary += (
            f"; log-probabilities of {found.rounding.source} move by {found.rounding.largest:g} nats, which is no "
            f"rounding (--near-tie {limit:g}) and excuses nothing"
        )
    if rare := found.rare or found.too_often:
        own, asked = found.usually_rare
        chance = "too many for chance" if found.too_often else "as many as by chance"
        summary += f", {rare} beyond that bound and within the reach of rounding, {chance} "
        summary += f"({own} of {asked} of the plain server's own)"
    if sure := found.real - found.too_often:
        summary += f", {sure} part where the target is sure of itself"
    if found.unjudged:
        summary += f", {found.unjudged} cannot be judged because neither server gives logprobs"
        summary += f" (none were asked for: {got.withheld})" if got.withheld else ""
    divided = visible.divided_otherwise(got, expected, False)
    if divided:
        summary += f", {len(divided)} give out reasoning as the answer, or the answer as reasoning: {divided[0]}"
    bad, detail["divided_otherwise"] = found.real or found.unjudged or divided, divided[:SHOWN]
    if 2 * found.compared < len(got.answered):
        summary += f"; of {len(got.answered)} answers, fewer than half have one to be compared with"
        if not bad:
            return result("lossless", "skipped", summary, **detail)
    remedy = "compare the divergences in --json; serve without speculation until the cause is found"
    return pass_or_fail("lossless", bad, summary, "TS-CHECK-NOT-LOSSLESS", remedy, found.compared, **detail)


def check_degenerate(got: Recording, expected: Recording | None) -> CheckResult:
    """Answers are text that goes somewhere. A model that loops without speculation too is reported, not failed."""
    everything = [item for item in [*got.answered, *got.streams] if item.error is None]
    mine = judge_run([_shown(item) for item in everything])
    plain = [item for item in [*expected.answered, *expected.streams] if item.error is None] if expected else []
    theirs = judge_run([_shown(item) for item in plain]) if expected else None
    summary = f"{mine.loop} loops, {mine.empty} empty, {mine.noise} noise in {mine.answers} answers"
    worse = mine.degenerate
    if theirs and expected:
        summary += f"; without speculation {theirs.loop}, {theirs.empty}, {theirs.noise} in {theirs.answers}"
        long = _long_worse(got, expected)
        worse = mine.share > theirs.share + RUN_SHARE or len(long) > 1 or _empty_more_often(everything, plain)
        summary += f"; {len(long)} long prompts have such an answer with speculation only" if long else ""
        if mine.degenerate and not worse:
            summary += ": the target itself is like this"
    remedy = "read the answers; check chat template, quantization and the speculation settings"
    return pass_or_fail(
        "degenerate-output",
        worse,
        summary,
        "TS-CHECK-DEGENERATE",
        remedy,
        mine.answers,
        output=asdict(mine),
        without_speculation=asdict(theirs) if theirs else None,
        questions=[item.question for item in everything if degeneration(_shown(item))][:SHOWN],
    )


def _empty_more_often(mine: Sequence[Transcript], plain: Sequence[Transcript]) -> bool:
    """By question: the passes of one repeat each other."""
    empty, asked = [], []
    for side in (mine, plain):
        empty.append(len({item.question for item in side if degeneration(_shown(item)) == "empty"}))
        asked.append(len({item.question for item in side}))
    return more_often(empty[0], asked[0], empty[1], asked[1]) < UNLIKELY


def _shown(item: Transcript) -> str:
    """The text by which an answer is judged: none where it ended behind its reasoning. One that the limit of tokens cut
    off while the model reasoned is judged by its reasoning."""
    return item.text if item.visible.strip() or item.finish_reason == "length" else ""


def _long_worse(got: Recording, expected: Recording) -> list[str]:
    """Long prompts whose answer is degenerate on this server only, where there are more of them than of the reverse:
    they are too few to be seen among the short ones."""
    bad, plain = ({i.question for i in side.long if degeneration(_shown(i))} for side in (got, expected))
    both = {i.question for i in got.long} & {i.question for i in expected.long}
    lost, won = sorted((bad - plain) & both), (plain - bad) & both
    return lost[len(won) :]
