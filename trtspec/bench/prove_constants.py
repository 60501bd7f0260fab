"""What measured step times say about the plan's host time, the time of a step beyond its kernels, as a patch.

The plan's steps are kernels alone, and the host time is an assumption beside them. Where plain steps at several
concurrencies exceed the plan by the same time, that is the host time. Where they do not, kernels or the layout are
otherwise than planned, and no single constant is to be changed.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from pathlib import Path

from trtspec.bench.prove import PLAIN, PLAN_TOLERANCE, PlanFinding
from trtspec.planning import points


def refuted_host_us(findings: Sequence[PlanFinding]) -> float | None:
    """The host time in microseconds that the plain steps of one proof show; None where it is that of the plan within
    PLAN_TOLERANCE, where fewer than two were measured, or where their differences from the plan do not agree."""
    missed = [f.measured - f.planned for f in findings if f.what.startswith(f"step time, {PLAIN},")]
    if len(missed) < 2:
        return None
    mean = sum(missed) / len(missed)
    agree = mean > 0 and max(missed) - min(missed) <= PLAN_TOLERANCE * mean
    found = round(1000 * mean, -1)
    return found if agree and abs(found / points.HOST_US - 1) > PLAN_TOLERANCE else None


def host_patch(host_us: float, bundle: str) -> str:
    """A unified diff of the constant's line, for review."""
    path = Path(points.__file__)
    before = path.read_text(encoding="utf-8").splitlines()
    line = f"HOST_US = {host_us}  # what a server without speculation took beyond its kernels, in the proof {bundle}"
    after = [line if row.startswith("HOST_US = ") else row for row in before]
    name = "trtspec/planning/points.py"
    made = difflib.unified_diff(before, after, f"a/{name}", f"b/{name}", lineterm="", n=1)
    return "".join(f"{row}\n" for row in made)
