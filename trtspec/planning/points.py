"""One layout of a target: does it fit, what each draft length costs, and what speculation with the user's acceptance is
worth at each concurrency."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from trtspec.planning.acceptance import Acceptance, most_published
from trtspec.planning.layout import Layout
from trtspec.planning.memory import Memory, memory
from trtspec.planning.step import HEADS, Kernels, StepModel, kernels
from trtspec.specs import GpuSpec, HeadSpec, ModelSpec

HOST_US = 1000.0  # what a 4 x B200 server without speculation took beyond its kernels (6.6 ms against 5.6 ms)
LONGEST_COMPARED = 8
NO_ACCEPTANCE = "no acceptance"
EXTRAPOLATED = "extrapolated"  # a speed-up is then a range
CLOSE = 0.005  # a loss that the kernel tables cannot show: neighbouring rows of them differ by a few percent of noise
MEASURED_SHAPE = (
    7168,
    384,
    2048,
    8,
)  # width, experts, expert width, experts per token of every Kimi-K2


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
    """One concurrency and draft length. Without acceptance the length, the speed-up and the rate are None.

    `trust`: what the speed-up rests on. An extrapolated one is None too: it has a range alone."""

    concurrency: int
    draft_len: int
    cost_ratio: float
    step_ms: float
    acceptance_length: float | None
    trust: str

    @property
    def speedup(self) -> float | None:
        if self.acceptance_length is None or self.trust == EXTRAPOLATED:
            return None
        return self.acceptance_length / self.cost_ratio

    @property
    def decode_rate(self) -> float | None:
        """Tokens per second of one request while nothing is prefilled."""
        length = 1.0 if self.draft_len == 0 else self.acceptance_length
        return None if length is None else 1000 * length / self.step_ms

    def to_dict(self) -> dict[str, Any]:
        values = {**vars(self), "speedup": self.speedup}
        return {
            name: round(value, 3) if isinstance(value, float) else value
            for name, value in values.items()
        }


@dataclass(frozen=True)
class Setting:
    """What a plan is made for: target and head with their names, a GPU, a workload; `fraction` as in `memory`.

    `longest_draft`: every draft length up to it is considered; None: those whose acceptance was measured. The longest
    that an answer may take is in milliseconds (None: it does not matter).
    """

    target: str
    model: ModelSpec
    head_name: str | None
    head: HeadSpec | None
    gpu: GpuSpec
    workload: Workload
    acceptance: Acceptance | None = None
    fraction: float | None = None
    longest_draft: int | None = None
    ttft_ms: float | None = None
    tpot_ms: float | None = None

    @property
    def draft_lengths(self) -> list[int]:
        """Every length up to the one that was asked for; else those whose acceptance was measured."""
        if self.head is None:
            return [0]
        if self.longest_draft is None and self.acceptance is not None:
            return [0, *self.acceptance.measured_lengths]
        return list(range((self.longest_draft or LONGEST_COMPARED) + 1))

    def trust(self, concurrency: int, drafts: int) -> str:
        """What the speed-up of a point rests on. EXTRAPOLATED: beyond the measured draft length, the head's context, or
        what was published for any head of the target."""
        if self.head is not None and self.acceptance is None:
            return NO_ACCEPTANCE
        if self.acceptance is None or drafts == 0:
            return "no drafts"
        most, longest = most_published(self.target)
        beyond = concurrency > most or drafts > longest or self.beyond_context
        if beyond or drafts not in self.acceptance.measured_lengths:
            return EXTRAPOLATED
        return "model card" if self.acceptance.published else "measured"

    @property
    def beyond_context(self) -> bool:
        """Whether requests are longer than a head knows whose acceptance is a published figure."""
        if self.head is None or self.acceptance is None or not self.acceptance.published:
            return False
        return self.workload.tokens > self.head.max_position_embeddings

    @property
    def has_limits(self) -> bool:
        return self.ttft_ms is not None or self.tpot_ms is not None


@dataclass(frozen=True)
class LayoutPlan:
    """`steps` is None where no kernels are measured: then only memory is known."""

    setting: Setting
    memory: Memory
    steps: StepModel | None = None
    points: tuple[Point, ...] = ()

    @property
    def layout(self) -> Layout:
        return self.memory.layout

    @property
    def fits(self) -> bool:
        """Whether the weights fit and the cache holds at least one request of this length."""
        return self.memory.sequences(self.setting.workload.tokens) >= 1

    def at(self, concurrency: int) -> list[Point]:
        return [point for point in self.points if point.concurrency == concurrency]

    def best(self, concurrency: int) -> Point:
        """The shortest draft within CLOSE of the fastest, which no table can tell apart; plain decoding is 0."""
        points = self.at(concurrency)
        rates = [point.decode_rate or 0 for point in points]
        return next(
            point
            for point, rate in zip(points, rates, strict=True)
            if rate >= (1 - CLOSE) * max(rates)
        )

    def speedup_range(self, point: Point) -> tuple[float, float] | None:
        """Least and largest speed-up of a point under each assumption, and under each published decay where its
        acceptance is extrapolated; no draft may be accepted beyond the head's context. None without acceptance."""
        acceptance = self.setting.acceptance
        if self.steps is None or acceptance is None:
            return None
        ratios = [
            item.cost_ratio(point.concurrency, point.draft_len)
            for item in assumptions(self.steps).values()
        ]
        drafts, middle = point.draft_len, point.acceptance_length or 1.0
        lengths = [
            middle,
            *(acceptance.length(drafts, decay) for decay in acceptance.decays(drafts).values()),
        ]
        if self.setting.beyond_context:
            lengths.append(1.0)
        ratios.append(point.cost_ratio)
        return min(lengths) / max(ratios), max(lengths) / min(ratios)


def layouts(model: ModelSpec, gpus: int) -> list[Layout]:
    """What a server on that many GPUs can choose from."""
    found = [Layout(gpus), Layout(gpus, ep=True), Layout(gpus, ep=True, attention_dp=True)]
    return found if gpus > 1 and model.num_attention_heads % gpus == 0 else found[:1]


def plan_layout(layout: Layout, setting: Setting) -> LayoutPlan:
    """The plan of one layout; with no measured kernels, of its memory alone."""
    model, head, workload = setting.model, setting.head, setting.workload
    room = memory(model, head, setting.gpu, layout, fraction=setting.fraction)
    found = kernels(setting.gpu, model.quant.format)
    if found is None or not measured(found, model, layout):
        return LayoutPlan(setting, room)
    steps = StepModel(model, head, layout, found, workload.context)
    points = []
    for sequences in workload.concurrency:
        plain = steps.step(sequences)
        for drafts in setting.draft_lengths:
            whole = steps.whole(sequences, drafts)
            length = (
                1.0
                if drafts == 0
                else setting.acceptance.length(drafts)
                if setting.acceptance
                else None
            )
            points.append(
                Point(
                    sequences,
                    drafts,
                    whole / plain,
                    whole / 1000,
                    length,
                    setting.trust(sequences, drafts),
                )
            )
    return LayoutPlan(setting, room, steps, tuple(points))


def measured(found: Kernels, model: ModelSpec, layout: Layout) -> bool:
    """Whether every kernel was measured: for Kimi-K2's shapes only."""
    shape = (
        model.hidden_size,
        model.n_routed_experts,
        model.moe_intermediate_size,
        model.num_experts_per_tok,
    )
    if shape != MEASURED_SHAPE or model.num_attention_heads != HEADS:
        return False
    return found.has(layout.moe, layout.attention_tp, layout.gpus)


def assumptions(steps: StepModel) -> dict[str, StepModel]:
    """The same steps under each assumption that the tables cannot settle, by name."""
    own = steps.kernels
    others = {
        "experts chosen evenly": replace(steps, kernels=replace(own, routing="balanced")),
        "experts chosen more unevenly": replace(
            steps, kernels=replace(own, routing="power_law_1.2")
        ),
        "1 ms of host time in every step": replace(steps, host_us=HOST_US),
        "context twice as long": replace(steps, context=2 * steps.context),
    }
    for name in own.tables["moe"][own.format]:
        if name != own.moe_kernel:
            others[f"MoE kernel {name}"] = replace(steps, kernels=replace(own, moe_kernel=name))
    return others
