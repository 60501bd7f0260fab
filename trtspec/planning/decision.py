"""From the plans of all layouts to one choice, and its `trtspec build-config` command.

Every layout at every concurrency is ranked by tokens/s of the whole server. Plans that meet the
user's limits rank first, and among them the plans that are not extrapolated. A plan is never
recommended if the cache does not hold its requests, or if TensorRT-LLM refuses it
(`layout.refusals`).
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


def decide(layouts: list[Layout], setting: Setting) -> Decision:
    """Plans each layout at each concurrency, and ranks the plans."""
    plans = [plan_layout(layout, setting) for layout in layouts]
    rows = []
    refused = []
    for plan in plans:
        reason = next(iter(route_refusals(plan.layout, setting)), None)  # the first reason
        if reason:
            refused.append(reason)
        for concurrency in setting.workload.concurrency:
            point = plan.best(concurrency) if plan.points else None
            rows.append(RankedPlan(plan, concurrency, point, reason))
    rows.sort(key=_rank, reverse=True)
    if len(refused) < len(plans):  # because another layout can be served
        refused = []
    return Decision(setting, plans, rows, refused)


@dataclass(frozen=True)
class Decision:
    """The ranked plans of all layouts at all concurrencies.

    Args:
        plans: plans of the layouts, in the order of the layouts.
        rows: plans of each layout at each concurrency, best first.
        refused: a reason for each layout if TensorRT-LLM refuses all layouts, else [].
    """

    setting: Setting
    plans: list[LayoutPlan]
    rows: list[RankedPlan]
    refused: list[Problem]

    @property
    def chosen(self) -> LayoutPlan:
        """Plan of the recommended layout.

        Without a recommendation, the plan of the first layout.
        """
        best = self.best
        return best.plan if best else self.plans[0]

    @property
    def fits(self) -> bool:
        """Whether a layout holds the weights and at least one request."""
        return any(plan.fits for plan in self.plans)

    @property
    def servable(self) -> list[RankedPlan]:
        """Plans that could be served, best first."""
        return [row for row in self.rows if row.is_servable]

    @property
    def best(self) -> RankedPlan | None:
        """Best plan, if its speed is known and within the user's limits. None otherwise."""
        first = next(iter(self.servable), None)
        if first and first.point and first.meets_limits:
            return first
        return None

    def of_concurrency(self, concurrency: int) -> RankedPlan | None:
        """Best servable plan at a concurrency. None if no plan is servable."""
        return next((row for row in self.servable if row.concurrency == concurrency), None)


@dataclass(frozen=True)
class RankedPlan:
    """The plan of one layout at one concurrency.

    Args:
        point: figures of the best draft length. None if no kernels were measured.
        refused: reason why TensorRT-LLM does not run the layout, None if there is no reason.
    """

    plan: LayoutPlan
    concurrency: int
    point: Point | None
    refused: Problem | None = None

    @property
    def setting(self) -> Setting:
        """Setting that the plan is made for."""
        return self.plan.setting

    @property
    def layout(self) -> Layout:
        """Layout of the ranks."""
        return self.plan.layout

    @property
    def max_sequences(self) -> int:
        """Number of requests of full length that the cache holds."""
        return self.plan.memory.sequences(self.setting.workload.tokens)

    @property
    def fits_cache(self) -> bool:
        """Whether the cache holds as many requests of full length as run at a time."""
        return self.max_sequences >= self.concurrency

    @property
    def is_servable(self) -> bool:
        """Whether the cache holds the requests, and TensorRT-LLM runs the layout."""
        return self.fits_cache and self.refused is None

    @property
    def stall_ms(self) -> float:
        """Time for which the prompt of one request keeps all others from decoding, in milliseconds.

        Ranks with attention DP prefill their prompts at once.
        """
        assert self.plan.steps is not None
        prompts_at_once = min(self.concurrency, self.layout.caches)
        prefill_us = self.plan.steps.prefill(self.setting.workload.isl, prompts_at_once)
        return prefill_us / 1000 / prompts_at_once

    @property
    def tpot_ms(self) -> float | None:
        """Mean time per output token, in milliseconds. None if the rate is not known.

        It is the time of decoding, and the prompts of the other requests. Each prompt stops the
        decoding once per answer.
        """
        if self.point is None or self.point.decode_rate is None:
            return None
        stalls_ms = (self.concurrency - 1) * self.stall_ms / self.setting.workload.osl
        return 1000 / self.point.decode_rate + stalls_ms

    @property
    def ttft_ms(self) -> float | None:
        """Mean time to the first token, in milliseconds. None if the rate is not known.

        It is the current decode step, the prompts that wait before (an M/D/1 queue), and the
        prompt.
        """
        if self.point is None or self.tpot_ms is None or self.plan.steps is None:
            return None
        workload = self.setting.workload
        prompt_ms = self.plan.steps.prefill(workload.isl) / 1000
        request_ms = workload.osl * self.tpot_ms + prompt_ms
        utilization = (self.concurrency - 1) * self.stall_ms / request_ms
        waiting_ms = self.stall_ms * utilization / (2 * (1 - utilization))
        return self.point.step_ms + waiting_ms + prompt_ms

    @property
    def tokens_per_s(self) -> float | None:
        """Output tokens per second of the whole server, with the time of the prompts.

        None if the rate is not known.
        """
        if self.ttft_ms is None or self.tpot_ms is None:
            return None
        osl = self.setting.workload.osl
        request_ms = self.ttft_ms + (osl - 1) * self.tpot_ms
        return 1000 * self.concurrency * osl / request_ms

    @property
    def trust(self) -> str:
        """Basis of the speed, for the user."""
        return "memory alone" if self.point is None else self.point.trust

    @property
    def meets_limits(self) -> bool:
        """Whether TTFT and TPOT are within the user's limits."""
        setting = self.setting
        for time, limit in ((self.ttft_ms, setting.ttft_ms), (self.tpot_ms, setting.tpot_ms)):
            if limit and (time is None or time > limit):
                return False
        return True

    def to_dict(self) -> dict[str, Any]:
        """The plan for `--json`.

        Speeds are None without measured kernels. Draft length and speed-up are None without
        acceptance.
        """
        draft_len = speedup = speedup_range = None
        # without acceptance, a draft length of 0 would look like a recommendation
        if self.point is not None:
            if self.trust != NO_ACCEPTANCE:
                draft_len = self.point.draft_len
            if self.setting.acceptance is not None:
                speedup = _rounded(self.point.speedup, 3)
            limits = self.plan.speedup_range(self.point)
            if limits is not None:
                speedup_range = [round(limit, 3) for limit in limits]
        rate = None
        if self.tpot_ms is not None:
            rate = round(1000 / self.tpot_ms, 1)
        return {
            "concurrency": self.concurrency,
            "tp_size": self.layout.gpus,
            "ep_size": self.layout.gpus if self.layout.ep else 1,
            "attention_dp": self.layout.attention_dp,
            "draft_len": draft_len,
            "speedup": speedup,
            "speedup_range": speedup_range,
            "tokens_per_s_per_user": rate,
            "tokens_per_s": _rounded(self.tokens_per_s, 1),
            "ttft_ms": _rounded(self.ttft_ms, 1),
            "tpot_ms": _rounded(self.tpot_ms, 1),
            "trust": self.trust,
            "max_sequences": self.max_sequences,
        }


def _rounded(value: float | None, digits: int) -> float | None:
    """Rounded value, None for None."""
    return None if value is None else round(value, digits)


def _rank(row: RankedPlan) -> tuple[bool, bool, bool, float, int]:
    """Sort key of a plan. A better plan has a larger key."""
    is_measured = row.trust != EXTRAPOLATED
    rate = row.tokens_per_s or 0.0
    return row.is_servable, row.meets_limits, is_measured, rate, row.concurrency


def route_refusals(layout: Layout, setting: Setting) -> list[Problem]:
    """Reasons why TensorRT-LLM would not run a server with this layout.

    A reason is in the target, the GPU, the layout, or a head that was trained for another target.
    """
    problems = []
    if setting.head:
        pair = pair_problems(setting.head, setting.model, tp_size=layout.attention_tp)
        problems += errors_in(pair)
    problems += refusals(
        setting.model,
        gpu=setting.gpu,
        tp_size=layout.gpus,
        ep_size=layout.gpus if layout.ep else 1,
        attention_dp=layout.attention_dp,
        tokens=setting.workload.tokens,
    )
    return problems


def command(row: RankedPlan) -> str:
    """Complete `trtspec build-config` command of a plan."""
    setting = row.setting
    layout = row.layout
    workload = setting.workload
    words = ["trtspec", "build-config", setting.target]
    drafts = None
    if row.point and setting.acceptance:
        drafts = row.point.draft_len
    if setting.head_name and drafts != 0:  # without acceptance the user still decides on the head
        words += ["--head", setting.head_name]
        if drafts:
            words += ["--draft-len", str(drafts)]
    words += ["--gpu", setting.gpu.name, "--tp-size", str(layout.gpus)]
    nodes = -(-layout.gpus // setting.gpu.gpus_per_node)
    if nodes > 1:
        words += ["--nodes", str(nodes)]
    words += ["--ep-size", str(layout.gpus if layout.ep else 1)]
    words.append("--attention-dp" if layout.attention_dp else "--no-attention-dp")
    words += ["--isl", str(workload.isl), "--osl", str(workload.osl)]
    words += ["--concurrency", str(row.concurrency)]
    if setting.fraction is not None:
        words += ["--set", f"kv_cache_config.free_gpu_memory_fraction={setting.fraction:g}"]
    return shlex.join(words)
