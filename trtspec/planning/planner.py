"""Puts memory, the step model and the user's acceptance together: does it fit, how fast, with which sizes."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from trtspec.planning.acceptance import Acceptance
from trtspec.planning.kernels import HEADS, Kernels, kernels
from trtspec.planning.layout import Layout
from trtspec.planning.memory import Memory, memory
from trtspec.planning.step import StepModel, distinct_experts
from trtspec.specs import GpuSpec, HeadSpec, ModelSpec

HOST_US = 1000.0  # what a 4 x B200 server without speculation took beyond its kernels (6.6 ms against 5.6 ms)
LONGEST_DRAFT = 7
MEASURED_SHAPE = (7168, 384, 2048, 8)  # width, experts, expert width, experts per token of every Kimi-K2


@dataclass(frozen=True)
class Workload:
    isl: int
    osl: int
    concurrency: tuple[int, ...]

    @property
    def tokens(self) -> int:
        """Tokens of the cache that one request holds at its end."""
        return self.isl + self.osl

    @property
    def context(self) -> int:
        """Tokens that a request holds in the middle of its answer."""
        return self.isl + self.osl // 2


@dataclass(frozen=True)
class Point:
    """One concurrency and draft length. Without acceptance the length, the speed-up and the rate are None."""

    concurrency: int
    draft_len: int
    cost_ratio: float
    plain_ms: float
    step_ms: float
    experts: float
    held: bool
    acceptance_length: float | None = None

    @property
    def speedup(self) -> float | None:
        return None if self.acceptance_length is None else self.acceptance_length / self.cost_ratio

    @property
    def tokens_per_s_per_user(self) -> float | None:
        length = 1.0 if self.draft_len == 0 else self.acceptance_length
        return None if length is None else 1000 * length / self.step_ms

    def to_dict(self) -> dict[str, Any]:
        rounded = {"cost_ratio": 3, "plain_ms": 3, "step_ms": 3, "experts": 1, "acceptance_length": 3}
        values = {name: getattr(self, name) for name in self.__dataclass_fields__}
        values |= {"speedup": self.speedup, "tokens_per_s_per_user": self.tokens_per_s_per_user}
        digits = rounded | {"speedup": 3, "tokens_per_s_per_user": 1}
        return {name: round(v, digits[name]) if isinstance(v, float) else v for name, v in values.items()}


@dataclass(frozen=True)
class Plan:
    """`model` is None where no kernels are measured: then only memory is known. `by_workload` has bench categories."""

    memory: Memory
    workload: Workload
    model: StepModel | None
    points: tuple[Point, ...]
    format: str
    acceptance: Acceptance | None = None
    by_workload: dict[str, tuple[Point, ...]] = field(default_factory=dict)

    @property
    def fits(self) -> bool:
        """Whether the weights fit and the cache holds at least one request of this length."""
        return self.memory.sequences(self.workload.tokens) >= 1

    def best(self, concurrency: int) -> Point:
        """The fastest point of a concurrency; plain decoding (draft length 0) when nothing beats it."""
        return max(self.at(concurrency), key=lambda point: point.tokens_per_s_per_user or 0)

    def at(self, concurrency: int) -> list[Point]:
        return [point for point in self.points if point.concurrency == concurrency]


def layouts(model: ModelSpec, gpus: int) -> list[Layout]:
    """What a server on that many GPUs can choose from."""
    found = [Layout(gpus), Layout(gpus, ep=True), Layout(gpus, ep=True, attention_dp=True)]
    return found if gpus > 1 and model.num_attention_heads % gpus == 0 else found[:1]


def plan(
    model: ModelSpec,
    head: HeadSpec | None,
    gpu: GpuSpec,
    layout: Layout,
    workload: Workload,
    acceptance: dict[str, Acceptance] | None,
    *,
    fraction: float = 0.9,
    longest: int = LONGEST_DRAFT,
    kernel: str | None = None,
) -> Plan:
    """The plan of one layout; `acceptance` as parse_acceptance gives it, or None."""
    room = memory(model, head, gpu, layout, fraction=fraction)
    found = kernels(gpu, model.quant.format, kernel)
    if found is None or not measured(found, model, layout):
        return Plan(room, workload, None, (), model.quant.format)
    steps = StepModel(model, head, layout, found, workload.context)
    overall = acceptance["all"] if acceptance else None
    points = tuple(curve(steps, room, workload, overall, longest))
    others = {
        name: tuple(with_acceptance(point, item) for point in points)
        for name, item in (acceptance or {}).items()
        if name != "all"
    }
    return Plan(room, workload, steps, points, model.quant.format, overall, others)


def measured(found: Kernels, model: ModelSpec, layout: Layout) -> bool:
    """Whether every kernel was measured: for Kimi-K2's shapes only, and no collectives of more than 8 ranks."""
    shape = (model.hidden_size, model.n_routed_experts, model.moe_intermediate_size, model.num_experts_per_tok)
    if shape != MEASURED_SHAPE or model.num_attention_heads != HEADS or layout.gpus > 8:
        return False
    return found.has_layout(layout.moe) and f"tp{layout.attention_tp}" in found.tables["mla_decode"]


def curve(
    steps: StepModel, room: Memory, workload: Workload, acceptance: Acceptance | None, longest: int
) -> list[Point]:
    points = []
    for sequences in workload.concurrency:
        plain = steps.step(sequences)
        held = room.sequences(workload.tokens) >= sequences
        for drafts in range((longest if steps.head is not None else 0) + 1):
            whole = steps.step(sequences, drafts + 1) + steps.draft(sequences, drafts)
            experts = distinct_experts(steps.model, sequences * (drafts + 1))
            point = Point(sequences, drafts, whole / plain, plain / 1000, whole / 1000, experts, held)
            points.append(with_acceptance(point, acceptance))
    return points


def with_acceptance(point: Point, acceptance: Acceptance | None) -> Point:
    if point.draft_len == 0:
        return replace(point, acceptance_length=1.0)
    return replace(point, acceptance_length=acceptance.length(point.draft_len) if acceptance else None)


def assumptions(steps: StepModel) -> dict[str, StepModel]:
    """The same steps under each assumption that the tables cannot settle, by name."""
    own = steps.kernels
    others = {
        "experts chosen evenly": steps.with_routing("balanced"),
        "experts chosen more unevenly": steps.with_routing("power_law_1.2"),
        "1 ms of host time in every step": replace(steps, host_us=HOST_US),
        "context twice as long": replace(steps, context=2 * steps.context),
    }
    for name in own.tables["moe"][own.format]:
        if name != own.moe_kernel:
            others[f"MoE kernel {name}"] = replace(steps, kernels=replace(own, moe_kernel=name))
    return others


def sensitivity(found: Plan, point: Point) -> dict[str, float | None]:
    """Speed-up of one point under each of `assumptions`, and with a little less acceptance."""
    assert found.model is not None
    if point.acceptance_length is None:
        return {}
    sequences, drafts, length = point.concurrency, point.draft_len, point.acceptance_length
    values = {name: length / item.cost_ratio(sequences, drafts) for name, item in assumptions(found.model).items()}
    values["acceptance length 0.1 lower"] = (length - 0.1) / point.cost_ratio
    return {name: round(value, 3) for name, value in values.items()}


def recommend(plans: list[Plan]) -> dict[str, Any]:
    """The layout and draft length that give a user the most tokens per second at each concurrency, and the largest
    batch that the cache of the first one's layout holds. With no acceptance: the cheapest plain step."""
    able = [item for item in plans if item.fits and item.model is not None]
    rows: dict[str, Any] = {}
    for concurrency in plans[0].workload.concurrency:
        holding = [item for item in able if item.at(concurrency)[0].held]
        if not holding:
            rows[str(concurrency)] = None
            continue
        best = max(holding, key=lambda item: item.best(concurrency).tokens_per_s_per_user or 0)
        point, layout = best.best(concurrency), best.memory.layout
        rows[str(concurrency)] = {
            "tp_size": layout.gpus,
            "ep_size": layout.gpus if layout.ep else 1,
            "attention_dp": layout.attention_dp,
            "draft_len": point.draft_len if best.acceptance else None,
            "speedup": round(point.speedup, 3) if best.acceptance and point.speedup else None,
            "tokens_per_s_per_user": round(point.tokens_per_s_per_user or 0, 1),
            "max_sequences": best.memory.sequences(best.workload.tokens),
        }
    return rows
