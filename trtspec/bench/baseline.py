"""Whether a recording can be a baseline, which is the plain server's, and the rows of the gate where it cannot."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from trtspec.bench.asking import declined
from trtspec.bench.gate import CheckResult
from trtspec.bench.steps import ENOUGH_STEPS, MERGED, steps_of
from trtspec.bench.transcript import Recording, Transcript

# rows that say how one server differs from the other
COMPARING = (
    "context", "lossless", "repeatable", "long-context", "tool-call", "tool-follow-up",
    "structured-output", "stop-strings", "finish-reason",
)  # fmt: skip
ROUNDED = 0.02  # accepted drafts per step that rounded averages may seem to show


def speculation(recording: Recording) -> str | None:
    """What shows that this server speculates, or None: the drafts that it tells of, or streams that bring different
    numbers of tokens at a time, and more of them than pieces that a busy server sends together."""
    told = [*recording.counts, *recording.streamed_counts]
    steps, accepted = sum(found.steps for found in told), sum(found.accepted for found in told)
    drafted = sum(found.drafted or 0 for found in told)
    if drafted:
        return f"{drafted} drafts, {accepted} of them accepted, are reported"
    if accepted > ROUNDED * max(1, steps):
        return f"{accepted} accepted drafts are reported"
    return None if told else _by_streams(recording.streams)


def failures(recording: Recording) -> str | None:
    """How many requests that a baseline is compared by failed, other than by a refusal, and with what; or None."""
    found = [item.error for item in [*recording.transcripts, *recording.long_cold]]
    found += [reply.error for reply in [*recording.tools, *recording.follow_ups, *recording.forms]]
    errors = [error for error in found if error and not declined(error)]
    return f"{len(errors)} requests failed ({errors[0][:120]})" if errors else None


def _by_streams(streams: Sequence[Transcript]) -> str | None:
    sizes = Counter(
        1 + size for item in streams if (steps := steps_of(item)) is not None for size in steps.accepted or ()
    )
    pieces, tokens = sizes.total(), sum(size * count for size, count in sizes.items())
    if pieces < ENOUGH_STEPS or tokens * MERGED <= pieces or max(sizes.values()) >= MERGED * pieces:
        return None  # too few, one token at a time, or a fixed number of them (stream_interval)
    return f"its streams bring {tokens / pieces:.2f} tokens at a time, and not always the same number"


def uncompared(rows: Sequence[CheckResult], shown: str) -> list[CheckResult]:
    """Rows that were judged without the baseline, since it speculates: nothing that compares has passed."""
    why = f"not compared: the baseline speculates ({shown}); record the server without speculation"
    return [
        replace(row, status="skipped", message=f"{why}; alone: {row.message}" if row.status == "pass" else why)
        if row.name in COMPARING and row.status != "fail"
        else row
        for row in rows
    ]
