"""A decision as JSON, and as a ranked table, the command, and what the figures rest on."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from trtspec.errors import CheckFailed
from trtspec.planning.acceptance import EXAMPLE, most_published
from trtspec.planning.decision import Decision, RankedPlan, command
from trtspec.planning.points import EXTRAPOLATED, NO_ACCEPTANCE, NO_DRAFTS, LayoutPlan, Point
from trtspec.report import Table

GB = 1e9
# 76 columns wide as a table.
HEADINGS = (
    "load",
    "layout",
    "draft",
    "tok/s/user",
    "tokens/s",
    "speed-up (range)",
    "trust",
)
LIMIT_HEADINGS = ("TTFT ms", "TPOT ms")
UNKNOWN_SPEED = (
    "holds it, but its speed is not known: no kernels of this format, shape and layout are in the "
    "tables, which end at 8 ranks"
)


def to_dict(decision: Decision) -> dict[str, Any]:
    """The JSON contract, with `layouts` for all layouts and what everything rests on.

    Figures are of the recommended layout, else of the first.
    """
    setting = decision.setting
    chosen = decision.chosen
    context = None
    if setting.head:
        context = setting.head.max_position_embeddings
    recommended: dict[str, Any] = {}
    for concurrency in setting.workload.concurrency:
        row = decision.of_concurrency(concurrency)
        recommended[str(concurrency)] = row.to_dict() if row else None
    best = None
    if decision.best:
        best = {**decision.best.to_dict(), "command": command(decision.best)}
    acceptance = None
    if setting.acceptance:
        acceptance = {"source": setting.acceptance.source}
    return {
        "target": setting.target,
        "head": setting.head_name,
        "context": context,
        "gpu": setting.gpu.name,
        "gpus": chosen.layout.gpus,
        **plan_dict(chosen),
        "recommended": recommended,
        "best": best,
        "refused": [problem.to_dict() for problem in decision.refused],
        "layouts": [plan_dict(plan) for plan in decision.plans],
        "acceptance": acceptance,
        "sources": sources(chosen),
    }


def plan_dict(plan: LayoutPlan) -> dict[str, Any]:
    """Sizes in bytes on one GPU. `kv_tokens` counts the whole group."""
    memory = plan.memory
    per_gpu: dict[str, Any] = {
        "weights": round(memory.weights_total),
        "head": round(memory.head),
        "kv": round(memory.kv),
        "reserve": round(memory.reserve),
        "weights_by_class": {name: round(size) for name, size in memory.weights.items()},
    }
    return {
        "layout": plan.layout.short,
        "fits": plan.fits,
        "per_gpu": per_gpu,
        "kv_tokens": memory.kv_tokens,
        "kv_dtype": memory.kv_dtype,
        "kv_bytes_per_token": memory.kv_bytes_per_token,
        "max_sequences": memory.sequences(plan.setting.workload.tokens),
        "points": [point.to_dict() for point in plan.points],
    }


def sources(plan: LayoutPlan) -> list[str]:
    """Where the figures of the GPU and of its kernels come from."""
    result = [plan.setting.gpu.source]
    if plan.steps:
        result += plan.steps.kernels.sources
    return result


def tables_and_lines(decision: Decision) -> tuple[list[Table], list[str]]:
    """For people: the ranked table, the memory in a line, and the command."""
    setting = decision.setting
    chosen = decision.chosen
    rows = ranked_rows(decision)
    pair = setting.target
    if setting.head_name:
        pair += f" with {setting.head_name}"
    title = f"{pair} on {chosen.layout.gpus} x {setting.gpu.name.upper()}, "
    title += f"{setting.workload.isl:,} tokens in and {setting.workload.osl:,} out"
    tables = []
    lines = []
    if decision.fits and rows:
        tables.append(ranked_table(title, rows, decision))
    else:
        lines.append(title)
    lines.append(memory_line(chosen))
    if decision.fits:
        lines += [*below_table(rows, decision), "", *choice_lines(decision)]
    return tables, lines


def ranked_rows(decision: Decision) -> list[RankedPlan]:
    """The best row of each concurrency, in rank order.

    Rows that TensorRT-LLM refuses are shown only if it refuses all of them.
    """
    best: dict[int, RankedPlan] = {}
    for row in decision.rows:
        if row.fits_cache and row.point:
            best.setdefault(row.concurrency, row)
    accepted = [row for row in best.values() if row.refused is None]
    return accepted or list(best.values())


def ranked_table(title: str, rows: list[RankedPlan], decision: Decision) -> Table:
    """The ranked rows. Where the user limits TTFT or TPOT, with a column for each."""
    columns: tuple[str, ...] = HEADINGS
    if decision.setting.has_limits:
        columns += LIMIT_HEADINGS
    cells = []
    for row in rows:
        assert row.point is not None
        load = str(row.concurrency)
        if row is decision.best:
            load += " best"
        drafts = "-" if row.trust == NO_ACCEPTANCE else str(row.point.draft_len)
        user_rate = f"{1000 / row.tpot_ms:.0f}" if row.tpot_ms else "-"
        rate = f"{row.tokens_per_s or 0:,.0f}"
        gain = "plain decoding"
        if row.trust != NO_DRAFTS:
            gain = speedup(row.plan, row.point)
        row_cells = [load, row.layout.short, drafts, user_rate, rate, gain, row.trust]
        if decision.setting.has_limits:
            row_cells += [milliseconds(row.ttft_ms), milliseconds(row.tpot_ms)]
        cells.append(row_cells)
    text_columns = frozenset(range(len(columns)))
    return Table(title, columns, cells, text_columns=text_columns, ruled=False)


def speedup(plan: LayoutPlan, point: Point) -> str:
    """Speed-up over plain decoding with its range. The range alone if it is extrapolated."""
    limits = plan.speedup_range(point)
    if limits is None:
        return "-"
    between = f"{limits[0]:.2f} to {limits[1]:.2f}"
    if point.speedup is None:
        return between
    return f"{point.speedup:.2f}x ({between})"


def milliseconds(value: float | None) -> str:
    return "-" if value is None else f"{value:,.1f}"


def memory_line(plan: LayoutPlan) -> str:
    """How much memory the weights take, and how many requests the cache holds."""
    memory = plan.memory
    tokens = plan.setting.workload.tokens
    fixed = (memory.weights_total + memory.head + memory.reserve) / GB
    capacity = memory.capacity / GB
    if memory.free < 0:
        return (
            f"Does NOT fit: weights, head and reserve take {fixed:.1f} of {capacity:.1f} GB per GPU"
        )
    cached = f"{memory.kv_tokens:,} tokens"
    if not plan.fits:
        return f"Does NOT fit: the cache holds {cached}, one request needs {tokens:,}"
    weights = f"{fixed:.0f} of {capacity:.0f} GB without the KV cache"
    text = f"Memory per GPU, {plan.layout.short}: {weights}, "
    return text + f"which holds {cached}: {memory.sequences(tokens):,} requests"


def below_table(rows: list[RankedPlan], decision: Decision) -> Iterator[str]:
    """Yields concurrencies without a row, the source of the acceptance, and extrapolations."""
    setting = decision.setting
    if rows:
        yield from _missing_concurrencies(rows, decision)
    acceptance = setting.acceptance
    if acceptance is not None and any(plan.steps for plan in decision.plans):
        yield f"Acceptance: {acceptance.source}."
        for doubt in acceptance.doubts:
            yield f"  bench doubted this measurement: {doubt}"
    if setting.head is not None and any(row.trust == EXTRAPOLATED for row in rows):
        concurrency, drafts = most_published(setting.target)
        yield (
            "Extrapolated, so a range: beyond the measured draft length, the "
            f"{setting.head.max_position_embeddings:,} tokens of the head's context, or what was "
            f"published for a head of this target (concurrency {concurrency}, {drafts} drafts)."
        )


def _missing_concurrencies(rows: list[RankedPlan], decision: Decision) -> Iterator[str]:
    """A line for each concurrency without a row."""
    ranked = {row.concurrency for row in rows}
    for concurrency in decision.setting.workload.concurrency:
        if concurrency in ranked:
            continue
        servable = decision.of_concurrency(concurrency)
        reason = "no layout's cache holds it"
        if servable is not None:
            reason = f"{servable.layout.short} holds it, its speed is not known"
        yield f"Concurrency {concurrency}: {reason}."


def choice_lines(decision: Decision) -> Iterator[str]:
    """The command, and what it leaves open.

    There is no command if speeds are not known, or for the reason of `no_choice`.
    """
    row = decision.best
    if row is None:
        if no_choice(decision) is None:
            yield f"No command: {decision.servable[0].layout.short} {UNKNOWN_SPEED}"
        return
    yield "Next:"
    yield f"  {command(row)}"
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
    setting = decision.setting
    where = f"{decision.chosen.layout.gpus} x {setting.gpu.name.upper()}"
    requests = f"requests of {setting.workload.tokens} tokens"
    remedy = "use more GPUs or larger ones"
    if any(plan.memory.free >= 0 for plan in decision.plans):
        remedy += ", or shorter requests"
    if decision.refused:
        problem = decision.refused[0]
        return CheckFailed(problem.message, problem.remedy, problem.code)
    if not decision.fits:
        return CheckFailed(f"{setting.target} does not fit on {where} with {requests}", remedy)
    servable = decision.servable
    if not servable:
        message = f"no layout on {where} holds that many {requests}"
        return CheckFailed(message, f"lower `concurrency`, {remedy}")
    if decision.best or servable[0].point is None:
        return None
    limits = []
    for name, limit in (("TTFT", setting.ttft_ms), ("TPOT", setting.tpot_ms)):
        if limit:
            limits.append(f"{name} {limit:g} ms")
    message = f"nothing on {where} meets {' and '.join(limits)} at these concurrencies"
    return CheckFailed(message, "lower `concurrency`, use more GPUs, or shorter prompts")
