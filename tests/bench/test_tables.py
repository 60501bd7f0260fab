"""The tables of a run and of model cards: what was measured on degenerate output is blank in all of them and in the
charts, and every title names how the figures were measured."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from trtspec.bench import assembly, demo_report, measure, report, tables
from trtspec.bench.datasets import load_dataset
from trtspec.bench.results import BenchResults, Comparison, EndpointResult
from trtspec.client.client import RequestSampling
from trtspec.report import Table

LENGTHS = {"concurrency": 1, "draft_len": 3, "tokens_per_step": 2.0, "step_s": 0.01, "tokens_per_s": 200.0}
CHOICE = {
    "loads": [{"concurrency": 1, "best": 3, "lengths": [LENGTHS]}],
    "schedule": None, "draft_len": 3, "options": ["--draft-len", "3"], "notes": ["SAMPLE"],
}  # fmt: skip
COMPARED = Comparison(old={"name": "old"}, differs=[], max_regression=0.05, confidence=0.99, figures=[], problems=[])


@pytest.fixture(scope="module")
def whole(stand_in: Callable[..., str], dataset: Path) -> BenchResults:
    """Two servers that speculate and a plain one, measured with thinking off."""
    urls = {"eagle3": stand_in(), "plain": stand_in(kind="plain"), "prompt-lookup": stand_in(draft_len=2)}
    work = measure.BenchWorkload(load_dataset(str(dataset)), RequestSampling(48), (1,), (6,), thinking="off")
    return assembly.assemble(*asyncio.run(measure.measure(urls, work)))


def broken(whole: BenchResults, *categories: str, all_of_it: bool = False) -> BenchResults:
    """The same run with degenerate output in these categories of the first endpoint."""
    bad = replace(whole.degeneration, degenerate=True)
    quality = {**whole.quality, **dict.fromkeys(categories, bad)}
    levels = [replace(level, degeneration=bad) if all_of_it else level for level in whole.concurrency]
    return replace(whole, quality=quality, concurrency=levels, degeneration=bad if all_of_it else whole.degeneration)


def row(table: Table | None, name: str) -> list[str]:
    assert table is not None
    return list(next(found for found in table.rows if found[0] == name))


def test_degenerate_categories_are_blank_in_tables_and_charts(whole: BenchResults) -> None:
    found = broken(whole, "code")
    by_category = tables.acceptance_by_category(found, found)
    assert row(by_category, "code")[4:] == ["", "", ""] and row(by_category, "code")[3] != ""
    assert all(row(by_category, "docs")[4:]) and all(row(by_category, "all")[4:])
    cards = tables.categories_table(found)
    assert cards is not None and list(cards.columns) == ["", "code", "docs", "list", "average"]
    assert row(cards, "eagle3")[1] == "" and float(row(cards, "eagle3")[2]) > 1
    assert row(cards, "eagle3")[4] == tables.number(whole.per_question_mean)
    assert all(row(cards, "prompt-lookup")), "the other endpoint's output was sound"
    shown, left = (report.category_plot({"a": results}) for results in (whole, found))
    length = whole.categories["code"].acceptance_length
    assert f">{length:.2f}<" in shown and ">code<" in shown and ">code<" not in left and ">docs<" in left
    assert report.category_plot({"a": found}, degenerate=True) == shown, "the demo states both, beside its quality line"


def test_a_degenerate_run_shows_no_acceptance_at_all(whole: BenchResults) -> None:
    found = broken(whole, *whole.categories, all_of_it=True)
    assert all(cells[4:] == ["", "", ""] for cells in tables.acceptance_by_category(found, found).rows)
    assert row(tables.throughput_table(found), "eagle3")[8] == ""
    assert row(tables.throughput_table(whole), "eagle3")[8] != ""
    assert row(tables.data_sets_table([found, whole]), whole.workload["dataset"])[2] == ""
    assert report.category_plot({"a": found}) == report.position_plot({"a": found}) == ""
    assert f">{whole.acceptance_length:.2f}<" in report.category_plot({"a": whole})


def test_no_speed_up_and_no_headline_on_degenerate_output(whole: BenchResults) -> None:
    """A drafter is right on every loop, so speed on loops is no figure for a comparison."""
    found = broken(whole, *whole.categories, all_of_it=True)
    sound, bad = tables.ratio_table(whole, "prompt-lookup"), tables.ratio_table(found, "prompt-lookup")
    assert all(row(sound, "eagle3")) and row(sound, "eagle3")[4].endswith("x")
    assert row(bad, "eagle3") == ["eagle3", "1", row(sound, "eagle3")[2], "", "", "", "1"]
    assert row(bad, "plain") == row(sound, "plain"), "neither side of this ratio loops"
    beside = replace(found, name="other", endpoints={**found.endpoints, "eagle3": found})
    over_it = tables.ratio_table(beside, "eagle3")
    assert row(over_it, "plain")[2:6] == ["", row(sound, "plain")[3], "", ""], "nor a ratio over loops"
    speed = [key for key in report.key_figures(found) if key["label"].startswith("tokens/s")]
    assert [key["value"] for key in speed] == ["\u2014"] and "not shown" in speed[0]["label"]
    shown = next(key for key in report.key_figures(whole) if key["label"].startswith("tokens/s"))
    assert float(shown["value"].replace(",", "")) > 0
    assert report.speed_plot(found, [found]) == "" != report.speed_plot(found, [found], degenerate=True)
    assert ">plain<" in report.speed_plot(found, found.all) and ">eagle3<" not in report.speed_plot(found, found.all)
    users = tables.per_user_table(replace(whole, endpoints=with_loops(whole, "plain")))
    assert users is not None and set(users.rows[0][2:]) & {"\u2014"} and not any("x" in cell for cell in users.rows[0])


def test_results_hold_no_ratio_of_degenerate_output_and_the_demo_marks_its_own(
    stand_in: Callable[..., str], dataset: Path
) -> None:
    urls = {"eagle3": stand_in(loop=True), "plain": stand_in(kind="plain"), "prompt-lookup": stand_in(draft_len=2)}
    work = measure.BenchWorkload(load_dataset(str(dataset)), RequestSampling(48), (1,), (6,))
    found = assembly.assemble(*asyncio.run(measure.measure(urls, work)))
    assert found.interleaved
    held = {(pair.of, pair.over): (pair.median, pair.low, pair.high) for pair in found.interleaved[0].ratios}
    assert len(held) == 6 and all(None not in held[pair] for pair in held if "eagle3" not in pair)
    assert {held[pair] for pair in held if "eagle3" in pair} == {(None, None, None)}
    assert row(tables.ratio_table(found, "plain"), "eagle3")[6] == "1", "it was measured in one round"
    cells = demo_report.speed_tables({"bench": {"greedy": found}})[0].rows[0]
    assert "x (" in cells[3] and cells[3].endswith(", degenerate output") and cells[5].endswith(")")
    shown = demo_report.key_figures({"bench": {"greedy": found}, "checks": []})
    assert any(key["label"].endswith("concurrency 1, degenerate output") and "x" in key["value"] for key in shown)


def with_loops(whole: BenchResults, name: str) -> dict[str, EndpointResult]:
    """The endpoints beside the first, one of them with degenerate output at every load."""
    bad = replace(whole.degeneration, degenerate=True)
    levels = [replace(level, degeneration=bad) for level in whole.endpoints[name].concurrency]
    return {**whole.endpoints, name: replace(whole.endpoints[name], concurrency=levels)}


def test_data_sets_stand_beside_each_other_with_n(whole: BenchResults) -> None:
    """lightseek's layout: 1 + accepted / steps with N, each with the condition that it was measured under."""
    other = replace(whole, workload={**whole.workload, "dataset": "gsm8k", "thinking": "on"}, questions=3)
    table = tables.data_sets_table([whole, other])
    assert row(table, "gsm8k") == ["gsm8k", "3", f"{whole.acceptance_length:.3f}", "temperature 0, thinking on"]
    assert table in tables.card_tables(whole, [other]) and "Acceptance by data set" in report.bench_html(whole, [other])
    assert whole.steps and whole.accepted and whole.acceptance_length == round(1 + whole.accepted / whole.steps, 4)


def test_published_figures_stand_alone_with_their_source(whole: BenchResults) -> None:
    def of(dataset: str) -> list[Table]:
        return tables.published_tables(replace(whole, workload={**whole.workload, "dataset": dataset}))

    assert tables.published_tables(whole) == of("questions.jsonl") != of("mt-bench") and of("nano") == []
    for table in [*of("mt-bench"), *of("speed-bench"), *of("gsm8k")]:
        assert "Source: " in (table.note or "") and all(len(cells) == len(table.columns) for cells in table.rows)
    assert len(tables.published_tables(whole, [replace(whole, workload={**whole.workload, "dataset": "mt-bench"})])) > 0


def test_every_title_of_a_figure_names_how_it_was_measured(whole: BenchResults) -> None:
    found = replace(whole, draft_choice=CHOICE, comparison=COMPARED)
    titles = [table.title for table in [*tables.all_tables(found), *tables.card_tables(found)]]
    assert len(titles) == 9, titles
    assert all(title.endswith(", temperature 0, thinking off") for title in titles), titles
