"""One layout of a target: whether it fits, and the cost and gain of each draft length.

The gain follows from the user's acceptance, at each concurrency.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from trtspec.planning.acceptance import Acceptance, most_published
from trtspec.planning.layout import Layout
from trtspec.planning.memory import Memory, memory
from trtspec.planning.step import HEADS, Kernels, StepModel, kernels
from trtspec.specs import GpuSpec, HeadSpec, ModelSpec

# Microseconds that a step of a 4 x B200 server without speculation took beyond its kernels (6.6 ms
# against 5.6 ms).
HOST_US = 1000.0
LONGEST_COMPARED = 8  # tokens of the longest draft without a measured or given length
NO_ACCEPTANCE = "no acceptance"
NO_DRAFTS = "no drafts"
EXTRAPOLATED = "extrapolated"  # the speed-up is only a range
# Share of a rate that the kernel tables cannot resolve: neighbouring rows differ by a few percent
# of noise.
CLOSE = 0.005
# hidden size, experts, expert width and experts per token of every Kimi-K2, whose kernels were
# measured
MEASURED_SHAPE = (7168, 384, 2048, 8)


@dataclass(frozen=True)
class Workload:
    """The load that a server is planned for.

    Args:
        isl: number of tokens of a prompt.
        osl: number of tokens of an answer.
        concurrency: numbers of concurrent requests to plan for.
    """

    isl: int
    osl: int
    concurrency: tuple[int, ...]

    @property
    def tokens(self) -> int:
        """Number of tokens in the cache that one request needs at its end."""
        return self.isl + self.osl

    @property
    def context(self) -> int:
        """Number of tokens that a request holds in the middle of its answer."""
        return self.isl + self.osl // 2


@dataclass(frozen=True)
class Setting:
    """The target, the machine and the workload that a plan is made for.

    Args:
        target: name of the target.
        model: shapes and formats of the target.
        head_name: name of the draft head. None for plain decoding.
        acceptance: acceptance of the head. None if the user gave none.
        fraction: share of the free memory for the KV cache, as in `memory`.
        longest_draft: number of tokens of the longest draft to consider. None for the lengths whose
            acceptance was measured.
        ttft_ms: longest time to the first token, in milliseconds. None for no limit.
        tpot_ms: longest time per output token, in milliseconds. None for no limit.
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
        """Draft lengths to consider, in tokens. 0 is plain decoding."""
        if self.head is None:
            return [0]
        if self.longest_draft is None and self.acceptance is not None:
            return [0, *self.acceptance.measured_lengths]
        longest = self.longest_draft or LONGEST_COMPARED
        return list(range(longest + 1))

    def trust(self, concurrency: int, drafts: int) -> str:
        """Basis of the speed-up at one concurrency and draft length, for the user.

        It is EXTRAPOLATED beyond the measured draft length, the head's context, or the figures
        published for any head of the target.
        """
        if self.head is not None and self.acceptance is None:
            return NO_ACCEPTANCE
        if self.acceptance is None or drafts == 0:
            return NO_DRAFTS
        most_concurrent, longest = most_published(self.target)
        beyond_published = concurrency > most_concurrent or drafts > longest
        measured = drafts in self.acceptance.measured_lengths
        if beyond_published or self.beyond_context or not measured:
            return EXTRAPOLATED
        return "model card" if self.acceptance.published else "measured"

    @property
    def beyond_context(self) -> bool:
        """Whether requests exceed the context of a head whose acceptance is a published figure."""
        if self.head is None or self.acceptance is None or not self.acceptance.published:
            return False
        return self.workload.tokens > self.head.max_position_embeddings

    @property
    def has_limits(self) -> bool:
        """Whether the user limits TTFT or TPOT."""
        return self.ttft_ms is not None or self.tpot_ms is not None


@dataclass(frozen=True)
class Point:
    """The figures of one layout at one concurrency and draft length.

    Args:
        cost_ratio: time of a speculative step divided by the time of a plain step.
        step_ms: time of a speculative step, in milliseconds.
        acceptance_length: tokens per step of one request. None without acceptance.
        trust: basis of the speed-up, for the user.
    """

    concurrency: int
    draft_len: int
    cost_ratio: float
    step_ms: float
    acceptance_length: float | None
    trust: str

    @property
    def speedup(self) -> float | None:
        """Speed-up over plain decoding. None without acceptance, and if it is extrapolated.

        An extrapolated speed-up only has a range.
        """
        if self.acceptance_length is None or self.trust == EXTRAPOLATED:
            return None
        return self.acceptance_length / self.cost_ratio

    @property
    def decode_rate(self) -> float | None:
        """Tokens per second of one request while no prompt is prefilled.

        None without acceptance.
        """
        length = 1.0 if self.draft_len == 0 else self.acceptance_length
        return None if length is None else 1000 * length / self.step_ms

    def to_dict(self) -> dict[str, Any]:
        """The point for `--json`, with numbers rounded to three places."""
        values = {**vars(self), "speedup": self.speedup}
        for name, value in values.items():
            if isinstance(value, float):
                values[name] = round(value, 3)
        return values


def plan_layout(layout: Layout, setting: Setting) -> LayoutPlan:
    """Plans one layout.

    If its kernels were not measured, the plan has memory figures but not times.
    """
    model = setting.model
    workload = setting.workload
    gpu_memory = memory(model, setting.head, setting.gpu, layout, fraction=setting.fraction)
    tables = kernels(setting.gpu, model.quant.format)
    if tables is None or not has_kernels(tables, model, layout):
        return LayoutPlan(setting, gpu_memory)
    steps = StepModel(model, setting.head, layout, tables, workload.context)
    points = []
    for concurrency in workload.concurrency:
        plain_step = steps.step(concurrency)
        for drafts in setting.draft_lengths:
            length = None
            if drafts == 0:
                length = 1.0
            elif setting.acceptance is not None:
                length = setting.acceptance.length(drafts)
            step = steps.speculative_step(concurrency, drafts)
            ratio = step / plain_step
            trust = setting.trust(concurrency, drafts)
            points.append(Point(concurrency, drafts, ratio, step / 1000, length, trust))
    return LayoutPlan(setting, gpu_memory, steps, tuple(points))


@dataclass(frozen=True)
class LayoutPlan:
    """The plan of one layout.

    Args:
        memory: memory of one GPU.
        steps: times of the server's steps. None if no kernels were measured.
        points: figures by concurrency and draft length. Empty if no kernels were measured.
    """

    setting: Setting
    memory: Memory
    steps: StepModel | None = None
    points: tuple[Point, ...] = ()

    @property
    def layout(self) -> Layout:
        """Layout of the ranks."""
        return self.memory.layout

    @property
    def fits(self) -> bool:
        """Whether the weights fit, and the cache holds at least one request of the workload."""
        return self.memory.sequences(self.setting.workload.tokens) >= 1

    def at(self, concurrency: int) -> list[Point]:
        """Points of one concurrency, shortest draft first."""
        return [point for point in self.points if point.concurrency == concurrency]

    def best(self, concurrency: int) -> Point:
        """Point with the shortest draft whose rate is within CLOSE of the highest rate.

        CLOSE is the accuracy of the kernel tables.
        """
        points = self.at(concurrency)
        rates = [point.decode_rate or 0 for point in points]
        close_to_best = (1 - CLOSE) * max(rates)
        pairs = zip(points, rates, strict=True)
        return next(point for point, rate in pairs if rate >= close_to_best)

    def speedup_range(self, point: Point) -> tuple[float, float] | None:
        """Least and largest speed-up of a point over plain decoding.

        None without acceptance or kernels.

        The range includes each assumption of `assumptions`. For an extrapolated acceptance it
        includes each published decay. Beyond the head's context it includes that no draft is
        accepted.
        """
        acceptance = self.setting.acceptance
        if self.steps is None or acceptance is None:
            return None
        concurrency = point.concurrency
        drafts = point.draft_len
        ratios = [point.cost_ratio]
        for steps in assumptions(self.steps).values():
            ratios.append(steps.cost_ratio(concurrency, drafts))
        lengths = [point.acceptance_length or 1.0]
        for decay in acceptance.decays(drafts).values():
            lengths.append(acceptance.length(drafts, decay))
        if self.setting.beyond_context:
            lengths.append(1.0)
        return min(lengths) / max(ratios), max(lengths) / min(ratios)


def layouts(model: ModelSpec, gpus: int) -> list[Layout]:
    """Layouts that a server on that many GPUs can choose from."""
    split = Layout(gpus)
    # if the ranks do not divide the heads, TensorRT-LLM refuses the only layout with the reason
    if gpus == 1 or model.num_attention_heads % gpus:
        return [split]
    return [split, Layout(gpus, ep=True), Layout(gpus, ep=True, attention_dp=True)]


def has_kernels(tables: Kernels, model: ModelSpec, layout: Layout) -> bool:
    """Whether every kernel of a layout was measured. Only kernels of Kimi-K2's shapes were."""
    shape = (
        model.hidden_size,
        model.n_routed_experts,
        model.moe_intermediate_size,
        model.num_experts_per_tok,
    )
    if shape != MEASURED_SHAPE or model.num_attention_heads != HEADS:
        return False
    return tables.has(layout.moe, layout.attention_tp, layout.gpus)


def assumptions(steps: StepModel) -> dict[str, StepModel]:
    """The same server's times under each assumption that the tables cannot decide, by its words."""
    tables = steps.kernels
    evenly = replace(tables, routing="balanced")
    unevenly = replace(tables, routing="power_law_1.2")
    variants = {
        "experts chosen evenly": replace(steps, kernels=evenly),
        "experts chosen more unevenly": replace(steps, kernels=unevenly),
        "1 ms of host time in every step": replace(steps, host_us=HOST_US),
        "context twice as long": replace(steps, context=2 * steps.context),
    }
    for name in tables.tables["moe"][tables.format]:
        if name != tables.moe_kernel:
            other = replace(tables, moe_kernel=name)
            variants[f"MoE kernel {name}"] = replace(steps, kernels=other)
    return variants
