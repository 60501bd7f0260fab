"""What drafting says about a head: the verdict of `trtspec inspect --run`, its findings and its lines."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from trtspec import files
from trtspec.errors import Problem

if TYPE_CHECKING:
    from trtspec.bench.acceptance import AcceptanceSummary
    from trtspec.checkpoint.hub import Resolved
    from trtspec.engine.head_check import HeadCheck, Trial

WEAK_SHARE = 0.7  # of the drafts accepted elsewhere
WEAK_FIRST = 0.4  # published heads have 0.78 to 0.89 of their first drafts accepted (data/acceptance_lengths.yaml)
SURE = 0.001  # chance below which a lead over a baseline counts
Verdict = Literal["healthy", "weak", "broken"]


@dataclass(frozen=True)
class Expectation:
    """The acceptance length that was measured elsewhere: the lowest and the highest of its workloads."""

    low: float
    high: float
    draft_len: int
    source: str


@dataclass(frozen=True)
class HeadRun:
    """What drafting showed. `acceptance` has bench's keys and definitions."""

    verdict: Verdict
    source: Literal["engine", "states"]
    texts: int
    prompts: str
    answer_tokens: int
    draft_len: int
    greedy: bool
    seed: int
    device: str
    dtype: str
    acceptance: AcceptanceSummary
    expected: Expectation | None
    check: HeadCheck
    problems: list[Problem] = field(repr=False)

    def to_dict(self) -> dict[str, Any]:
        """The key `run` of the JSON contract."""
        from trtspec.engine.head_check import FALSE_ALARMS, LEAST_GAIN

        plain = {name: value for name, value in vars(self).items() if name not in ("check", "problems", "expected")}
        return plain | {
            "acceptance": asdict(self.acceptance),
            "expected": asdict(self.expected) if self.expected else None,
            "positions": self.check.positions,
            "agreement": round(self.check.agreement, 4),
            "baselines": {name: round(one.agreement, 4) for name, one in self.check.baselines.items()},
            "faults": [_trial_dict(trial) for trial in self.check.faults],
            "tried": [_trial_dict(trial) for trial in self.check.trials],
            "untried": sorted({f"{one.kind} {one.detail}".strip() for one in self.check.untried}),
            "false_alarm_rate": FALSE_ALARMS,
            "least_gain": LEAST_GAIN,
        }


def expectation(head: Resolved) -> Expectation | None:
    """What its maker measured: in the head's own provenance.json, or in its published card."""
    record = {}
    if head.path is not None and (head.path / "provenance.json").is_file():
        record = files.read_object(head.path / "provenance.json", remedy="restore the file, or remove it")
    earlier = (record.get("source") or {}).get("provenance") or {}
    measured = record.get("acceptance") or earlier.get("acceptance")
    if measured:
        lengths = [row["acceptance_length"] for row in measured["rows"]]
        source = f"provenance.json, {measured['prompts']} held-out prompts"
        return Expectation(min(lengths), max(lengths), measured["draft_len"], source)
    published = (head.known or {}).get("acceptance")
    if published:
        lengths = list(published["values"].values())
        return Expectation(min(lengths), max(lengths), published["draft_len"], f"its card ({published['workload']})")
    return None


def judge(
    where: str, acceptance: AcceptanceSummary, expected: Expectation | None, check: HeadCheck, draft_len: int
) -> tuple[Verdict, list[Problem]]:
    """The verdict and what speaks for it. `broken`: a fault is named, or the head knows no more than no head."""
    problems = [_fault(where, trial) for trial in check.faults]
    for name, words in (("random_head", "a random head of its shape"), ("unigram", "the most frequent token")):
        baseline = check.baselines[name]
        if baseline.chance >= SURE:
            text = f"first drafts agree with the target at {check.agreement:.3f} of the positions, "
            text += f"{words} at {baseline.agreement:.3f}"
            remedy = "check that the head was trained for this target, and export it again"
            problems.append(Problem("TS-HEAD-RUN-CHANCE", "error", where, text, remedy))
            break
    if problems:
        return "broken", problems
    problems = [
        Problem("TS-HEAD-RUN-WEAK", "warning", where, text, "measure with `trtspec bench` on your own prompts")
        for text in weaknesses(acceptance, expected, check, draft_len)
    ]
    return ("weak" if problems else "healthy"), problems


def _fault(where: str, trial: Trial) -> Problem:
    """Named: what it looks like, and the agreement before and after."""
    one = trial.suspicion
    measure = "share of drafts accepted" if one.later else "agreement"
    text = f"{one.what}: {measure} {trial.before:.3f} -> {trial.after:.3f} {one.undone}"
    return Problem("TS-HEAD-RUN-FAULT", "error", where, text, one.remedy)


def weaknesses(
    acceptance: AcceptanceSummary, expected: Expectation | None, check: HeadCheck, draft_len: int
) -> list[str]:
    """Reasons to call a head weak that has no fault that can be named."""
    found = []
    length, interval = acceptance.acceptance_length, acceptance.acceptance_length_interval
    if expected is not None and expected.draft_len == draft_len and interval is not None:
        if interval[1] < 1 + WEAK_SHARE * (expected.low - 1):
            found.append(f"acceptance length {length:.2f}, {expected.low:.2f} and more by {expected.source}")
    elif acceptance.cumulative and acceptance.cumulative[0] < WEAK_FIRST:
        found.append(f"{acceptance.cumulative[0]:.2f} of the first drafts are accepted, at least 0.78 by published")
    bigram = check.baselines["bigram"]
    if bigram.chance >= SURE:
        text = (
            f"first drafts agree at {check.agreement:.3f} of the positions, a table of token pairs of the same texts "
        )
        found.append(text + f"at {bigram.agreement:.3f}")
    return found


def _trial_dict(trial: Trial) -> dict[str, Any]:
    one = trial.suspicion
    figures = {"before": round(trial.before, 4), "after": round(trial.after, 4), "chance": float(f"{trial.chance:.2g}")}
    return {"kind": one.kind, "detail": one.detail, **figures, "named": trial.named}


def rows(run: HeadRun) -> list[tuple[str, str]]:
    """Label and text of each line."""
    measured, check = run.acceptance, run.check
    interval = measured.acceptance_length_interval
    spread = f" [{interval[0]:.2f}, {interval[1]:.2f}]" if interval else ""
    positions = ", ".join(f"{share:.2f}" for share in measured.cumulative or [])
    how = "greedy" if run.greedy else "a draft is accepted when the captured text continues with it"
    others = ", ".join(f"{name.replace('_', ' ')} {one.agreement:.2f}" for name, one in check.baselines.items())
    lines = [
        ("verdict", run.verdict),
        ("drafted on", f"{run.texts} texts of {run.prompts}, {run.answer_tokens} tokens each, draft length "
         f"{run.draft_len}, {how}, {run.dtype} on {run.device}, seed {run.seed}"),
        ("acceptance", f"{measured.acceptance_length or 1:.3f}{spread}, by position {positions}"),
    ]  # fmt: skip
    if run.expected is not None:
        span = f"{run.expected.low:.2f} to {run.expected.high:.2f}"
        lines.append(("elsewhere", f"{span} at draft length {run.expected.draft_len}: {run.expected.source}"))
    lines.append(("first draft agrees", f"{check.agreement:.3f} of {check.positions:,} positions; {others}"))
    best = check.trials[0]
    shown = f"best {best.before:.3f} -> {best.after:.3f} ({best.suspicion.kind})"
    lines.append(("faults undone", f"{len(check.trials)}, {len(check.faults)} named; {shown}"))
    if check.untried:
        kinds = ", ".join(sorted({one.kind for one in check.untried}))
        lines.append(("not tried", f"{kinds}: no states of those layers were captured"))
    return lines
