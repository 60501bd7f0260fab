"""From the plans of all layouts to one choice: every layout at every concurrency ranked, within the user's targets, and
the `trtspec build-config` command of the best.

Rows rank by tokens/s of the whole server: those that meet the targets first, of these the ones that are not
extrapolated. Nothing is recommended that the cache does
not hold or that TensorRT-LLM refuses (`layout.refusals`).
"""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from typing import Any

from trtspec.checkpoint.heads.pairing import pair_problems
from trtspec.errors import Problem, errors_in
from trtspec.planning.layout import Layout, refusals
from trtspec.planning.points import (
    EXTRAPOLATED,
    NO_ACCEPTANCE,
    LayoutPlan,
    Point,
    Setting,
    plan_layout,
)


@dataclass(frozen=True)
class Row:
    """One layout at one concurrency. `point` is None where no kernels were measured; `refused` says why TensorRT-LLM
    does not run it."""

    plan: LayoutPlan
    concurrency: int
    point: Point | None
    refused: Problem | None = None

    @property
    def layout(self) -> Layout:
        return self.plan.layout

    @property
    def held(self) -> bool:
        """Whether the cache holds this many requests."""
        return self.plan.memory.sequences(self.plan.setting.workload.tokens) >= self.concurrency

    @property
    def stall_ms(self) -> float:
        """What the prompt of one request keeps all others from decoding; ranks with attention DP prefill at once."""
        assert self.plan.steps is not None
        together = min(self.concurrency, self.layout.caches)
        return self.plan.steps.prefill(self.plan.setting.workload.isl, together) / 1000 / together

    @property
    def tpot_ms(self) -> float | None:
        """Mean time per output token: the decode step, and the prompts of the other requests, each of which stops it
        once per answer."""
        if self.point is None or self.point.decode_rate is None:
            return None
        return (
            1000 / self.point.decode_rate
            + (self.concurrency - 1) * self.stall_ms / self.plan.setting.workload.osl
        )

    @property
    def ttft_ms(self) -> float | None:
        """Mean time to the first token: the step that runs, the prompts that wait before (M/D/1 queue), the prompt."""
        if self.point is None or self.tpot_ms is None or self.plan.steps is None:
            return None
        alone = self.plan.steps.prefill(self.plan.setting.workload.isl) / 1000
        busy = (
            (self.concurrency - 1)
            * self.stall_ms
            / (self.plan.setting.workload.osl * self.tpot_ms + alone)
        )
        return self.point.step_ms + self.stall_ms * busy / (2 * (1 - busy)) + alone

    @property
    def tokens_per_s(self) -> float | None:
        """Output tokens per second of the whole server, prompts included in the time."""
        if self.ttft_ms is None or self.tpot_ms is None:
            return None
        osl = self.plan.setting.workload.osl
        return 1000 * self.concurrency * osl / (self.ttft_ms + (osl - 1) * self.tpot_ms)

    @property
    def trust(self) -> str:
        return self.point.trust if self.point is not None else "memory alone"

    @property
    def meets(self) -> bool:
        """Whether both times are within the user's limits."""
        setting = self.plan.setting
        pairs = ((self.ttft_ms, setting.ttft_ms), (self.tpot_ms, setting.tpot_ms))
        return all(time is not None and time <= limit for time, limit in pairs if limit)

    def to_dict(self) -> dict[str, Any]:
        """What is not known is None: all speeds without kernels, drafts and speed-up without acceptance."""
        point, plan, acceptance = self.point, self.plan, self.plan.setting.acceptance
        figures = {
            "tokens_per_s": self.tokens_per_s,
            "ttft_ms": self.ttft_ms,
            "tpot_ms": self.tpot_ms,
        }
        known = point is not None and self.trust != NO_ACCEPTANCE
        spread = plan.speedup_range(point) if point is not None else None
        return {
            "concurrency": self.concurrency,
            "tp_size": self.layout.gpus,
            "ep_size": self.layout.gpus if self.layout.ep else 1,
            "attention_dp": self.layout.attention_dp,
            "draft_len": point.draft_len if point is not None and known else None,
            "speedup": round(point.speedup, 3) if point and point.speedup and acceptance else None,
            "speedup_range": [round(value, 3) for value in spread] if spread else None,
            "tokens_per_s_per_user": round(1000 / self.tpot_ms, 1) if self.tpot_ms else None,
            **{name: None if value is None else round(value, 1) for name, value in figures.items()},
            "trust": self.trust,
            "max_sequences": plan.memory.sequences(plan.setting.workload.tokens),
        }


@dataclass(frozen=True)
class Decision:
    """`rows` are ranked, the first is the choice unless `best` is None. `refused` is why none can be."""

    setting: Setting
    plans: list[LayoutPlan]
    rows: list[Row]
    refused: list[Problem]

    @property
    def first(self) -> LayoutPlan:
        """The plan of the choice, else of the first layout."""
        return self.best.plan if self.best else self.plans[0]

    @property
    def fits(self) -> bool:
        return any(plan.fits for plan in self.plans)

    @property
    def able(self) -> list[Row]:
        """The rows that could be served, best first."""
        return [row for row in self.rows if row.held and row.refused is None]

    @property
    def best(self) -> Row | None:
        """None where nothing can be served, where its speed is not known, or where nothing meets the targets."""
        first = next(iter(self.able), None)
        return first if first and first.point and first.meets else None

    def of_concurrency(self, concurrency: int) -> Row | None:
        return next((row for row in self.able if row.concurrency == concurrency), None)


def decide(chosen: list[Layout], setting: Setting) -> Decision:
    """Plans each layout and ranks."""
    plans = [plan_layout(layout, setting) for layout in chosen]
    rows, refused = [], []
    for plan in plans:
        reason = next(iter(route_refusals(plan.layout, setting)), None)
        refused += [reason] if reason else []
        for concurrency in setting.workload.concurrency:
            rows.append(
                Row(plan, concurrency, plan.best(concurrency) if plan.points else None, reason)
            )
    rows.sort(key=_rank, reverse=True)
    return Decision(setting, plans, rows, refused if len(refused) == len(plans) else [])


def _rank(row: Row) -> tuple[bool, bool, bool, float, int]:
    return (
        row.held and row.refused is None,
        row.meets,
        row.trust != EXTRAPOLATED,
        row.tokens_per_s or 0.0,
        row.concurrency,
    )


def route_refusals(layout: Layout, setting: Setting) -> list[Problem]:
    """Why TensorRT-LLM would not run such a server: the target, the GPU, the layout, or a head of another target."""
    model, head = setting.model, setting.head
    pair = pair_problems(head, model, tp_size=layout.attention_tp) if head is not None else []
    return errors_in(pair) + refusals(
        model,
        gpu=setting.gpu,
        tp_size=layout.gpus,
        ep_size=layout.gpus if layout.ep else 1,
        attention_dp=layout.attention_dp,
        tokens=setting.workload.tokens,
    )


def command(row: Row) -> str:
    """The complete `trtspec build-config` command of a row."""
    setting, layout = row.plan.setting, row.layout
    gpu, workload = setting.gpu, setting.workload
    words = ["trtspec", "build-config", setting.target]
    drafts = row.point.draft_len if row.point and setting.acceptance else None
    if setting.head_name and drafts != 0:
        words += ["--head", setting.head_name] + (["--draft-len", str(drafts)] if drafts else [])
    nodes = -(-layout.gpus // gpu.gpus_per_node)
    words += ["--gpu", gpu.name, "--tp-size", str(layout.gpus)] + (
        ["--nodes", str(nodes)] if nodes > 1 else []
    )
    words += ["--ep-size", str(layout.gpus if layout.ep else 1)]
    words += ["--attention-dp" if layout.attention_dp else "--no-attention-dp"]
    words += [
        "--isl",
        str(workload.isl),
        "--osl",
        str(workload.osl),
        "--concurrency",
        str(row.concurrency),
    ]
    if setting.fraction is not None:
        words += ["--set", f"kv_cache_config.free_gpu_memory_fraction={setting.fraction:g}"]
    return shlex.join(words)
