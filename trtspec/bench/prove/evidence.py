"""What a proof found, as typed evidence: all that its bundle and its page are made of. Logs stay where they are; the
evidence names them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from trtspec.bench.check.rows import Row
from trtspec.bench.prove.script import ProveSetup
from trtspec.bench.report import bench
from trtspec.bench.report.page import Figure, Section, render
from trtspec.bench.results import BenchResults, LevelResult, SpeedUp
from trtspec.report import Table

DRAWN = {
    "argmax": "; those of sampled requests are the head's likeliest tokens",
    "probabilistic": "; those of sampled requests are drawn from the head's distribution",
}


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """Milliseconds of one step at a concurrency, without and with drafts, measured and planned; None: not known."""

    concurrency: int
    plain_ms: float | None
    step_ms: float | None
    planned_plain_ms: float | None
    planned_step_ms: float | None


@dataclass(frozen=True, kw_only=True)
class ProofEvidence:
    """`setup` is without the words for the servers, which may hold a key. `identities`: fingerprints of the
    checkpoints; `seconds`: of each step and start; `logs`: files of the proof's directory."""

    verdict: str
    sentence: str
    setup: ProveSetup
    identities: dict[str, str]
    engine: str | None
    draft_sampling: str | None
    hardware: list[str]
    dataset_sha256: str
    acceptance_length: float | None
    acceptance_interval: list[float] | None
    steps: int | None
    speedups: list[SpeedUp]
    step_times: list[StepTime]
    rows: list[Row]
    seconds: dict[str, float]
    logs: list[str]
    created: str
    versions: dict[str, str]

    @property
    def proved(self) -> bool:
        """The same output, and not slower at every load."""
        return self.verdict == "SAFE" and any(found.high >= 1 for found in self.speedups)


def step_times(spec: BenchResults, plain: BenchResults, plan: Mapping[str, Any], draft_len: int) -> list[StepTime]:
    """`plan`: the object of `trtspec plan --json`, empty without one."""
    planned = {(point["concurrency"], point["draft_len"]): point["step_ms"] for point in plan.get("points", ())}
    return [
        StepTime(
            concurrency=fast.concurrency,
            plain_ms=_step_ms(slow, 1.0),
            step_ms=_step_ms(fast, fast.acceptance_length),
            planned_plain_ms=planned.get((fast.concurrency, 0)),
            planned_step_ms=planned.get((fast.concurrency, draft_len)),
        )
        for fast, slow in zip(spec.concurrency, plain.concurrency, strict=True)
    ]


def _step_ms(level: LevelResult, length: float | None) -> float | None:
    """The time of a token after the first, times the tokens of a step."""
    gap = level.throughput.inter_token_s
    return gap.mean * length * 1000 if gap and length else None


def sentence(verdict: str, message: str, speedups: Sequence[SpeedUp]) -> str:
    """`SAFE: the same output, 1.40 times as fast (1.24 to 1.57) at concurrency 1, 1.28 (...) at concurrency 4`."""
    said = "SAFE: the same output" if verdict == "SAFE" else message
    speeds = ", ".join(f"{up.ratio:.2f} ({up.words}) at {up.level}" for up in speedups)
    return f"{said}, {speeds.replace(' (', ' times as fast (', 1)}" if speeds else f"{said}; the speed was not measured"


def proof_html(evidence: ProofEvidence, spec: BenchResults, plain: BenchResults, more: Sequence[Section] = ()) -> str:
    """The page of a proof: its sentence, up to three figures (speed-up at the lowest and the highest load, acceptance),
    then speed, acceptance, the rows of check, and `more`. `spec` and `plain` are what bench measured of either server.
    """
    ups, length, ends = evidence.speedups, evidence.acceptance_length, evidence.acceptance_interval
    both = replace(spec, endpoints={plain.name: plain}, speedups=ups)
    speed, acceptance = bench.sections(both)[:2]
    rows = [
        [row.status, row.name, f"{row.seen} of {row.of}", row.faults[0] if row.faults else row.why]
        for row in evidence.rows
    ]
    same = Table("Is the output the same?", ["", "row", "seen", "why"], rows, text_columns=frozenset({0, 1, 3}))
    figures = [Figure(f"{up.ratio:.2f}x", up.words, f"as fast as the target alone, {up.level}") for up in ups]
    if length and ends:
        accepted = Figure(f"{length:.2f}", f"{ends[0]:.2f} to {ends[1]:.2f}", "tokens per verification step")
        figures = [*figures[:1], *figures[1:][-1:], accepted]  # the section has those of the loads in between
    drawn = DRAWN.get(evidence.draft_sampling or "", "")
    return render(
        f"trtspec prove: {evidence.setup.target} with {evidence.setup.head}",
        evidence.sentence,
        figures,
        [replace(speed, tables=[*speed.tables, _plan_table(evidence)]), acceptance,
         Section(title=same.title, tables=[same]), *more],
        about=f"{evidence.setup.draft_len} drafts per step{drawn}. {bench.workload_line(spec)}.",
        verdict="pass" if evidence.proved else "unmeasured" if evidence.verdict == "NOT PROVEN" else "fail",
        created=evidence.created,
        versions=evidence.versions,
    )  # fmt: skip


def _plan_table(evidence: ProofEvidence) -> Table:
    """Step times beside the plan's; without rows where there is no plan."""
    rows = [
        [str(at.concurrency), *map(bench.number, (at.planned_plain_ms, at.plain_ms, at.planned_step_ms, at.step_ms))]
        for at in evidence.step_times
        if at.planned_plain_ms
    ]
    columns = ["concurrency", "alone, planned", "alone", "with the head, planned", "with the head"]
    return Table("Milliseconds of one step", columns, rows)
