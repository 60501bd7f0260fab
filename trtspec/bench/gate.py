"""One row of the gate's verdict, and how much it can show: exact statistics of what N answers can tell.

Everything is a finite sum over binomial coefficients, so there is no approximation to justify at N = 20.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

Status = Literal["pass", "fail", "skipped"]
REQUIRED = "TS-CHECK-REQUIRED"
SHOWN = 20  # entries of each list in the detail of a row
RARE = 0.05  # the share of answers in which a rare fault shows; power is stated for it
POWER = 0.95
UNLIKELY = 0.01  # a chance below which something is no accident


@dataclass(frozen=True)
class CheckResult:
    """One line of the verdict; `code` and `remedy` only where it failed. `seen` is how many answers it looked at."""

    name: str
    status: Status
    message: str
    code: str = ""
    remedy: str = ""
    detail: dict[str, Any] = field(default_factory=dict)
    seen: int | None = None

    @property
    def power(self) -> float | None:
        """Probability that the row shows a fault which 5 % of the answers have."""
        return None if self.seen is None else round(1.0 - (1.0 - RARE) ** self.seen, 4)

    def to_dict(self) -> dict[str, Any]:
        found = {key: value for key, value in asdict(self).items() if key != "seen"}
        if self.status != "fail":
            found = {key: value for key, value in found.items() if key not in ("code", "remedy")}
        if self.seen is not None:
            power = {"answers": self.seen, "rare_fault": RARE, "chance_to_see_it": self.power}
            found["power"] = {**power, "answers_for_95_percent": answers_needed()}
        return found


def result(
    name: str, status: Status, message: str, code: str = "", remedy: str = "", seen: int | None = None, **detail: Any
) -> CheckResult:
    return CheckResult(name, status, message, code, remedy, detail, seen)


def pass_or_fail(name: str, bad: object, message: str, code: str, remedy: str, seen: int, **detail: Any) -> CheckResult:
    """A row that looked at `seen` answers, and fails where `bad` is true of them."""
    return CheckResult(name, "fail" if bad else "pass", message, code, remedy, detail, seen)


def required(found: CheckResult) -> CheckResult:
    """A row that could not be measured, where it must be."""
    if found.status != "skipped":
        return found
    remedy = "make it measurable (the message says what is missing), or leave it out of --require"
    return replace(
        found, status="fail", message=f"required and not measured: {found.message}", code=REQUIRED, remedy=remedy
    )


def answers_needed() -> int:
    """Smallest number of answers of which at least one shows a rare fault with probability POWER."""
    return math.ceil(math.log(1.0 - POWER) / math.log(1.0 - RARE))


def binomial_at_least(successes: int, trials: int, chance: float) -> float:
    """P(X >= successes) for X ~ Bin(trials, chance)."""
    if successes <= 0:
        return 1.0
    terms = (math.comb(trials, k) * chance**k * (1.0 - chance) ** (trials - k) for k in range(successes, trials + 1))
    return min(1.0, sum(terms))


def more_often(found: int, asked: int, usual: int, among: int) -> float:
    """One-sided p of Fisher's exact test: `found` of `asked` or more where `usual` of `among` did the same, and both
    have one chance of it (Fisher, Statistical Methods for Research Workers, 5th ed., section 21.02)."""
    both = found + usual
    ways = (math.comb(asked, k) * math.comb(among, both - k) for k in range(found, min(asked, both) + 1))
    return sum(ways) / math.comb(asked + among, both)
