"""Tables in the layouts in which heads are published, filled from runs under their own names.

- acceptance by category in one row, by NVIDIA's definition (mean over questions): model cards on MT-Bench, SPEED-Bench;
- accept_length by data set with N: lightseek's cards;
- output per user with and without speculation by concurrency: EAGLE 3.1's announcement;
- two heads side by side by condition (context length, template, system prompt): EAGLE 3.1 against 3.

What was measured on degenerate output is left blank. Figures that others published stand in tables of their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from trtspec.bench.results import BenchResults, EndpointResult
from trtspec.bench.tables import condition, number
from trtspec.data_files import load_yaml
from trtspec.report import Table

BLANK = ""
DEFINITION = (
    "Tokens per iteration of each question, turns pooled and prefills counted, averaged over questions, as ModelOpt's "
    "specdec_bench has it. Blank: the output was degenerate, or the server tells only of all answers together."
)


def card_tables(results: BenchResults, others: Sequence[BenchResults] = ()) -> list[Table]:
    """Every layout that a run (and those on other data sets) can fill."""
    found = [categories_table(results), data_sets_table([results, *others]) if others else None, per_user_table(results)]
    return [table for table in [*found, conditions_table(results)] if table is not None]


def speculating(results: BenchResults) -> list[EndpointResult]:
    return [endpoint for endpoint in results.all if endpoint.steps and endpoint.drafted != 0]


def categories_table(results: BenchResults) -> Table | None:
    """One row per endpoint, one column per category, and the average over all questions."""
    endpoints = speculating(results)
    if not endpoints or all(endpoint.per_question_mean is None for endpoint in endpoints):
        return None
    names = list(dict.fromkeys(name for endpoint in endpoints for name in endpoint.categories))
    rows = []
    for endpoint in endpoints:
        cells = []
        for name in names:
            group = endpoint.categories.get(name)
            sound = group is not None and not _degenerate(endpoint, name)
            cells.append(number(group.per_question_mean) if group and sound else BLANK)
        whole = BLANK if endpoint.degeneration.degenerate else number(endpoint.per_question_mean)
        rows.append([endpoint.name, *cells, whole])
    title = f"Acceptance on {results.workload['dataset']} by category, {condition(results)}"
    return Table(title, ["", *names, "average"], rows, DEFINITION)


def _degenerate(endpoint: EndpointResult, category: str) -> bool:
    quality = endpoint.quality.get(category)
    return quality is not None and quality.degenerate


def data_sets_table(runs: Sequence[BenchResults]) -> Table:
    """accept_length by data set: 1 + accepted / steps."""
    rows = [
        [
            run.workload["dataset"],
            str(run.questions),
            BLANK if run.degeneration.degenerate else number(run.acceptance_length, 3),
            condition(run),
        ]
        for run in runs
    ]
    note = "accept_length = 1 + accepted / steps. Blank: the output was degenerate."
    return Table(
        "Acceptance by data set", ["data set", "N", "accept_length", "measured at"], rows, note, frozenset({0, 3})
    )


def per_user_table(results: BenchResults) -> Table | None:
    """Output per user of endpoints that speculate over one that does not, by concurrency."""
    endpoints = speculating(results)
    plain = next((endpoint for endpoint in results.all if endpoint not in endpoints), None)
    if plain is None or not endpoints:
        return None
    rows = []
    for level in plain.concurrency:
        base = level.throughput.tokens_per_s_per_user
        row = [level.label.removeprefix("concurrency "), number(base.mean if base else None, 1)]
        for endpoint in endpoints:
            same = next((other for other in endpoint.concurrency if other.label == level.label), None)
            user = same.throughput.tokens_per_s_per_user if same else None
            sound = same is not None and not (same.degeneration and same.degeneration.degenerate)
            ratio = user.mean / base.mean if user and base and base.mean and sound else None
            row += [number(user.mean if user and sound else None, 1), number(ratio, 2, "x")]
        rows.append(row)
    columns = ["concurrency", f"{plain.name} tokens/s per user"]
    for endpoint in endpoints:
        columns += [f"{endpoint.name} tokens/s per user", f"over {plain.name}"]
    note = "Mean over answers of output tokens over the time from request to end. A dash: the output was degenerate."
    return Table(f"Output per user by concurrency, {condition(results)}", columns, rows, note)


def conditions_table(results: BenchResults) -> Table | None:
    """Two or more heads under each condition of `--under`, with the ratio of the first two."""
    conditions, endpoints = results.workload.get("under") or [], speculating(results)
    if not conditions or not endpoints:
        return None
    rows = []
    for name in conditions:
        found = [endpoint.categories.get(name) for endpoint in endpoints]
        sound = [not _degenerate(endpoint, name) for endpoint in endpoints]
        lengths = [
            group.acceptance_length if group and fine else None for group, fine in zip(found, sound, strict=True)
        ]
        cells = [number(length) if length is not None else BLANK for length in lengths]
        ratio = lengths[0] / lengths[1] if len(lengths) > 1 and lengths[0] and lengths[1] else None
        counts = next((str(group.questions) for group in found if group), BLANK)
        rows.append([name, counts, *cells, *([number(ratio, 2, "x")] if len(endpoints) > 1 else [])])
    columns = ["condition", "N", *(endpoint.name for endpoint in endpoints)]
    columns += [f"{endpoints[0].name} over {endpoints[1].name}"] if len(endpoints) > 1 else []
    note = (
        "Acceptance length, 1 + accepted / steps, of the same questions under each condition. Blank: degenerate output."
    )
    return Table(f"Acceptance by condition, {condition(results)}", columns, rows, note)


def published_tables(results: BenchResults, others: Sequence[BenchResults] = ()) -> list[Table]:
    """What others published on the data sets of these runs, each with its source."""
    names = {run.workload["dataset"].partition(":")[0] for run in (results, *others)}
    entries: list[dict[str, Any]] = load_yaml("published_acceptance.yaml")["tables"]
    return [
        _published(entry)
        for entry in entries
        if entry["data_set"] in names or (names - {"nano"} and not entry["data_set"])
    ]


def _published(entry: dict[str, Any]) -> Table:
    rows = [[_cell(value) for value in row] for row in entry["rows"]]
    return Table(
        entry["title"], [str(name) for name in entry["columns"]], rows, f"{entry['note']}. Source: {entry['source']}."
    )


def _cell(value: Any) -> str:
    if value is None:
        return BLANK
    return f"{value:.2f}" if isinstance(value, float) and round(value, 2) == value else str(value)
