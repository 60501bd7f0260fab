"""One row of the gate's verdict, and what it takes to state how much the row can see."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

from trtspec.bench.power import RARE, answers_needed, chance_to_see

Status = Literal["pass", "fail", "skipped"]
REQUIRED = "TS-CHECK-REQUIRED"


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
        return None if self.seen is None else round(chance_to_see(self.seen), 4)

    def to_dict(self) -> dict[str, Any]:
        found = {key: value for key, value in asdict(self).items() if key != "seen"}
        if self.status != "fail":
            found = {key: value for key, value in found.items() if key not in ("code", "remedy")}
        if self.seen is not None:
            power = {"answers": self.seen, "rare_fault": RARE, "chance_to_see_it": self.power}
            found["power"] = {**power, "answers_for_95_percent": answers_needed()}
        return found


def result(name: str, status: Status, message: str, code: str = "", remedy: str = "", **detail: Any) -> CheckResult:
    return CheckResult(name, status, message, code, remedy, detail)


def required(found: CheckResult) -> CheckResult:
    """A row that could not be measured, where it must be."""
    if found.status != "skipped":
        return found
    remedy = "make it measurable (the message says what is missing), or leave it out of --require"
    return replace(
        found, status="fail", message=f"required and not measured: {found.message}", code=REQUIRED, remedy=remedy
    )
