"""The time that a run is given, as people and schedulers write it."""

from __future__ import annotations

import re

from trtspec.errors import UsageError

CLOCK = re.compile(r"(?:(\d+)-)?(\d+):([0-5]\d):([0-5]\d)")  # Slurm's [days-]hours:minutes:seconds
PARTS = re.compile(r"(?:(\d+(?:\.\d+)?)d)?(?:(\d+(?:\.\d+)?)h)?(?:(\d+(?:\.\d+)?)m)?(?:(\d+(?:\.\d+)?)s?)?")
SECONDS = (86400, 3600, 60, 1)


def seconds_of(text: str) -> float:
    """Of `90m`, `1h30m`, `3600`, `2d` or Slurm's `1-12:00:00`; UsageError for anything else."""
    found = CLOCK.fullmatch(text.strip()) or PARTS.fullmatch(text.strip().lower())
    total = sum(float(part or 0) * unit for part, unit in zip(found.groups(), SECONDS, strict=True)) if found else 0.0
    if total <= 0:
        raise UsageError(f"--max-time {text!r} is no time", "for example 90m, 3h30m, 7200 or 1-12:00:00")
    return total
