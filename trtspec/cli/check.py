"""Defines `trtspec check`, which compares an endpoint with a server without speculation."""

from __future__ import annotations

import asyncio
import shlex
from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING

from trtspec import report
from trtspec.bench.check.kinds import CODES
from trtspec.client.addresses import server_url
from trtspec.client.client import remedy_for
from trtspec.errors import CheckFailed, Problem, as_typed
from trtspec.records import checked
from trtspec.report import Result
from trtspec.verbs.check import AGAINST, ALONE, SCORE, CheckCost, CheckOptions, run_check

if TYPE_CHECKING:
    from trtspec.bench.check.rows import CheckVerdict

# first word of a row, by its status
MARKS = {"pass": "pass", "fail": "FAIL", "unmeasured": "-"}
MAX_FAULTS = 3  # faults of a row that are printed


def check(options: CheckOptions) -> Result:
    """Check an endpoint: the same output as without speculation, at the wanted acceptance.

    Record the speculating server, then let the server without speculation score what it said. The
    last line is the verdict: SAFE (status 0), NOT SAFE, or NOT PROVEN with what could not be
    measured (both 3).
    """
    options = checked(options, SCORE if options.score else ALONE)
    if options.against:
        # a bad URL is refused before any request is sent
        server_url(options.against, AGAINST)
    if options.record is not None:
        report.refuse_input(options.record, options.score, "record")
        report.refuse_existing(options.record, options.force, "recording.jsonl")
    outcome = asyncio.run(run_check(options))
    cost = outcome.cost
    verdict = outcome.verdict
    if verdict is None:
        lines = [
            f"{_cost_line(cost)}; {outcome.failed} without an answer",
            f"recorded {outcome.answered} answers in {options.record}",
            f"next: trtspec check URL --score {shlex.quote(str(options.record))}, with the URL of "
            "the server without speculation",
        ]
        values = {"recorded": str(options.record), "failed": outcome.failed, **cost}
        return Result(values, lines=lines)
    problems = []
    rows_with_faults = (row for row in verdict.rows if row.faults)
    for row in rows_with_faults:
        code = CODES[row.name]
        fault = row.faults[0]
        remedy = remedy_for(fault, f"trtspec explain {code}")
        problems.append(Problem(code, "error", row.name, fault, remedy))
    results = [asdict(row) for row in verdict.rows]
    covered = outcome.covered
    values = {
        "verdict": verdict.word,
        "message": verdict.line,
        "covered": covered,
        "results": results,
        **cost,
        "problems": [problem.to_dict() for problem in problems],
    }
    remedy = "record again with more `samples`, or pass `accept_unmeasured` ROW"
    if problems:
        remedy = problems[0].remedy
    failure = None
    if verdict.word != "SAFE":
        failure = CheckFailed(f"{options.url} is {verdict.word}", remedy)
    lines = [*_lines(verdict), covered, _cost_line(cost), verdict.line]
    return Result(values, lines=lines, failure=failure)


def _lines(verdict: CheckVerdict) -> Iterator[str]:
    """Yields the line of each row. For a row with faults, also the first faults and the count."""
    for row in verdict.rows:
        mark = "?" if row in verdict.missing else MARKS[row.status]
        yield f"{mark:5} {row.name:11} {row.seen:4} of {row.of:<4} {as_typed(row.why)}".rstrip()
        yield from (f"      {fault}" for fault in row.faults[:MAX_FAULTS])
        if row.faults:
            yield f"      {len(row.faults)} faults; trtspec explain {CODES[row.name]}"


def _cost_line(cost: CheckCost) -> str:
    """Returns the number of requests, the tokens and the duration of a check as text."""
    return f"{cost['requests']} requests, {cost['tokens']:,} tokens in {cost['seconds']:.0f} s"
