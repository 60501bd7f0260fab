"""A decision as JSON, and as tables and lines for people: the ranked table and the command, and what the figures rest
on when asked."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from trtspec.errors import CheckFailed
from trtspec.planning.acceptance import EXAMPLE, most_published
from trtspec.planning.decision import Decision, Row, command
from trtspec.planning.points import EXTRAPOLATED, NO_ACCEPTANCE, LayoutPlan
from trtspec.report import Table

GB = 1e9
HEADINGS = (
    "load",
    "layout",
    "draft",
    "tok/s/user",
    "tokens/s",
    "speed-up (range)",
    "trust",
)  # 76 columns
UNKNOWN_SPEED = (
    "holds it, but its speed is not known: no kernels of this format, shape and layout are in the tables, "
    "which end at 8 ranks"
)


def to_dict(decision: Decision) -> dict[str, Any]:
    """The JSON contract for the recommended layout, else the first, with `layouts` for all and what everything rests
    on."""
    setting, first, best = decision.setting, decision.first, decision.best
    acceptance = setting.acceptance
    chosen = {str(c): decision.of_concurrency(c) for c in setting.workload.concurrency}
    return {
        "target": setting.target,
        "head": setting.head_name,
        "context": setting.head.max_position_embeddings if setting.head else None,
        "gpu": setting.gpu.name,
        "gpus": first.layout.gpus,
        **plan_dict(first),
        "recommended": {c: row.to_dict() if row else None for c, row in chosen.items()},
        "best": {**best.to_dict(), "command": command(best)} if best else None,
        "refused": [problem.to_dict() for problem in decision.refused],
        "layouts": [plan_dict(plan) for plan in decision.plans],
        "acceptance": {"source": acceptance.source} if acceptance else None,
        "sources": sources(first),
    }


def plan_dict(plan: LayoutPlan) -> dict[str, Any]:
    """Sizes in bytes on one GPU; `kv_tokens` counts the whole group."""
    room = plan.memory
    sizes = {
        "weights": room.weights_total,
        "head": room.head,
        "kv": room.kv,
        "reserve": room.reserve,
    }
    return {
        "layout": room.layout.short,
        "fits": plan.fits,
        "per_gpu": {name: round(size) for name, size in sizes.items()}
        | {"weights_by_class": {name: round(size) for name, size in room.weights.items()}},
        "kv_tokens": room.kv_tokens,
        "kv_dtype": room.kv_dtype,
        "kv_bytes_per_token": room.kv_bytes_per_token,
        "max_sequences": room.sequences(plan.setting.workload.tokens),
        "points": [point.to_dict() for point in plan.points],
    }


def sources(plan: LayoutPlan) -> list[str]:
    return [plan.setting.gpu.source, *(plan.steps.kernels.sources if plan.steps else [])]


def tables_and_lines(decision: Decision) -> tuple[list[Table], list[str]]:
    """For people: the ranked table, the memory in a line, and the command."""
    setting, first, rows = decision.setting, decision.first, ranked_rows(decision)
    pair = f"{setting.target} with {setting.head_name}" if setting.head_name else setting.target
    title = f"{pair} on {first.layout.gpus} x {setting.gpu.name.upper()}, {setting.workload.isl:,} tokens in and "
    title += f"{setting.workload.osl:,} out"
    tables = [ranked_table(title, rows, decision)] if decision.fits and rows else []
    lines = [*([] if tables else [title]), memory_line(first)]
    if decision.fits:
        lines += [*below_table(rows, decision), "", *choice_lines(decision)]
    return tables, lines


def ranked_rows(decision: Decision) -> list[Row]:
    """The best row of each concurrency, in rank order."""
    best: dict[int, Row] = {}
    for row in (row for row in decision.rows if row.held and row.point):
        best.setdefault(row.concurrency, row)
    return [row for row in best.values() if row.refused is None] or list(best.values())


def ranked_table(title: str, rows: list[Row], decision: Decision) -> Table:
    """The ranked rows; where the user limits TTFT or TPOT, with a column for each."""
    setting, cells = decision.setting, []
    for row in rows:
        assert row.point is not None
        cells.append([
            f"{row.concurrency} best" if row is decision.best else str(row.concurrency),
            row.layout.short,
            "-" if row.trust == NO_ACCEPTANCE else str(row.point.draft_len),
            f"{1000 / row.tpot_ms:.0f}" if row.tpot_ms else "-",
            f"{row.tokens_per_s or 0:,.0f}",
            "plain decoding" if row.trust == "no drafts" else speedup(row.plan, row.point),
            row.trust,
        ])  # fmt: skip
        if setting.has_limits:
            cells[-1] += [milliseconds(row.ttft_ms), milliseconds(row.tpot_ms)]
    columns = (*HEADINGS, "TTFT ms", "TPOT ms") if setting.has_limits else HEADINGS
    return Table(title, columns, cells, text_columns=frozenset(range(len(columns))), ruled=False)


def speedup(plan: LayoutPlan, point: Any) -> str:
    """Over plain decoding, with its range, for a cell of the table; of an extrapolated one the range alone."""
    spread = plan.speedup_range(point)
    if spread is None:
        return "-"
    between = f"{spread[0]:.2f} to {spread[1]:.2f}"
    return f"{point.speedup:.2f}x ({between})" if point.speedup is not None else between


def milliseconds(value: float | None) -> str:
    return "-" if value is None else f"{value:,.1f}"


def memory_line(plan: LayoutPlan) -> str:
    room, tokens = plan.memory, plan.setting.workload.tokens
    fixed = (room.weights_total + room.head + room.reserve) / GB
    if room.free < 0:
        return f"Does NOT fit: weights, head and reserve take {fixed:.1f} of {room.capacity / GB:.1f} GB per GPU"
    if not plan.fits:
        return (
            f"Does NOT fit: the cache holds {room.kv_tokens:,} tokens, one request needs {tokens:,}"
        )
    return (
        f"Memory per GPU, {room.layout.short}: {fixed:.0f} of {room.capacity / GB:.0f} GB without the KV cache, which "
        f"holds {room.kv_tokens:,} tokens: {room.sequences(tokens):,} requests"
    )


def below_table(rows: list[Row], decision: Decision) -> Iterator[str]:
    """Which concurrencies have no row, where the acceptance comes from, and what is extrapolated."""
    setting = decision.setting
    for concurrency in setting.workload.concurrency if rows else ():
        if concurrency not in {row.concurrency for row in rows}:
            other = decision.of_concurrency(concurrency)
            reason = (
                f"{other.layout.short} holds it, its speed is not known"
                if other
                else "no layout's cache holds it"
            )
            yield f"Concurrency {concurrency}: {reason}."
    acceptance = setting.acceptance
    if acceptance is not None and any(plan.steps for plan in decision.plans):
        yield f"Acceptance: {acceptance.source}."
        yield from (f"  bench doubted this measurement: {doubt}" for doubt in acceptance.doubts)
    if setting.head is not None and any(row.trust == EXTRAPOLATED for row in rows):
        concurrency, drafts = most_published(setting.target)
        yield (
            "Extrapolated, so a range: beyond the measured draft length, the "
            f"{setting.head.max_position_embeddings:,} tokens of the head's context, or what was published for a head "
            f"of this target (concurrency {concurrency}, {drafts} drafts)."
        )


def choice_lines(decision: Decision) -> Iterator[str]:
    """The one command, with what it leaves open. There is none where speeds are not known, or by `no_choice`."""
    row = decision.best
    if row is None:
        if no_choice(decision) is None:
            yield f"No command: {decision.able[0].layout.short} {UNKNOWN_SPEED}"
        return
    yield from ("Next:", f"  {command(row)}")
    if decision.setting.head_name is None or row.point is None:
        return
    if decision.setting.acceptance is None:
        points = [point for point in row.plan.at(row.concurrency) if 1 <= point.draft_len <= 5]
        costs = ", ".join(f"{point.draft_len}: {point.cost_ratio:.2f}" for point in points)
        yield f"Speculation wins there above this many tokens per step, by draft length: {costs}."
        yield f"A speed-up needs your acceptance, which is never assumed: {EXAMPLE}."
    elif row.point.draft_len == 0:
        yield "Without the head: no draft length is worth its cost at this concurrency."


def no_choice(decision: Decision) -> CheckFailed | None:
    """The reason why nothing is recommended. None if something is, or if its speed is not known."""
    setting, row = decision.setting, next(iter(decision.able), None)
    where = f"{decision.first.layout.gpus} x {setting.gpu.name.upper()}"
    requests = f"requests of {setting.workload.tokens} tokens"
    weights_fit = any(plan.memory.free >= 0 for plan in decision.plans)
    remedy = "use more GPUs or larger ones" + ", or shorter requests" * weights_fit
    if decision.refused:
        problem = decision.refused[0]
        return CheckFailed(problem.message, problem.remedy, problem.code)
    if not decision.fits:
        return CheckFailed(f"{setting.target} does not fit on {where} with {requests}", remedy)
    if row is None:
        message = f"no layout on {where} holds that many {requests}"
        return CheckFailed(message, f"lower `concurrency`, {remedy}")
    if decision.best is not None or row.point is None:
        return None
    asked = {"TTFT": setting.ttft_ms, "TPOT": setting.tpot_ms}
    limits = " and ".join(f"{name} {limit:g} ms" for name, limit in asked.items() if limit)
    remedy = "lower `concurrency`, use more GPUs, or shorter prompts"
    return CheckFailed(f"nothing on {where} meets {limits} at these concurrencies", remedy)
