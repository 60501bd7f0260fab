"""The report: a sentence, figures with ranges, equal tables on page and terminal.

Degenerate output is not in it.
"""

import re
from collections.abc import Callable
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

from tests.bench.conftest import measured
from tests.json_files import write_json
from trtspec.bench.report.bench import (
    DASH,
    acceptance_table,
    bench_html,
    card_table,
    category_plot,
    figures,
    sections,
    sentence,
    speed_plot,
    speedup_table,
)
from trtspec.bench.report.page import Figure, Page, Plot, PlotBar, Section, plot
from trtspec.bench.results import BenchResults, read_results
from trtspec.errors import Problem
from trtspec.report import Table


@pytest.fixture(scope="module")
def results(stand_in: Callable[..., str], dataset: Path) -> BenchResults:
    """A real measurement of three stand-in servers."""
    urls = {
        "eagle3": stand_in(),
        "plain": stand_in(kind="plain"),
        "prompt-lookup": stand_in(draft_len=2),
    }
    return measured(urls, dataset, samples=12, max_tokens=48, concurrency=(1, 4), thinking="off")


def broken(results: BenchResults) -> BenchResults:
    """The same run with degenerate output of the first endpoint."""
    bad = replace(results.degeneration, degenerate=True)
    levels = [replace(level, degeneration=bad) for level in results.concurrency]
    quality = dict.fromkeys(results.quality, bad)
    return replace(results, degeneration=bad, concurrency=levels, quality=quality, speedups=[])


class Wellformed(HTMLParser):
    """Every tag that opens closes, and nothing is loaded from elsewhere."""

    VOID = ("meta", "br")

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag not in ("script", "link", "img", "iframe"), tag
        for name, value in attrs:
            assert name not in ("src", "href", "xlink:href"), (tag, name, value)
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag in self.VOID, tag

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open.pop() == tag, tag


def parsed(page: str) -> str:
    parser = Wellformed()
    parser.feed(page)
    assert not parser.open and "@import" not in page and "url(" not in page
    return page


def test_the_page_begins_with_its_sentence_and_figures_with_ranges(
    results: BenchResults, tmp_path: Path
) -> None:
    page = parsed(bench_html(results))
    body = page[page.index("<main>") :]
    said = sentence(results)
    assert re.match(
        r"eagle3: [\d.]+ times as fast as plain at concurrency 1 \([\d.]+ to [\d.]+\), ", said
    ), said
    assert (
        "tokens per step (" in said
        and "questions of questions.jsonl, temperature 0, thinking off." in said
    )
    assert (
        body.index(said)
        < body.index('<div class="figures">')
        < body.index('class="bars"')
        < body.index("<table")
    )
    cards = re.findall(r'<b>([^<]+)</b><span class="range">([^<]+)</span>', page)
    assert len(cards) == 3 and all(re.search(r"\d to \d", found) for _, found in cards), cards
    assert page.count('class="bars"') == 2 and len(page) < 100_000
    write_json(tmp_path / "results.json", results.to_dict())
    assert read_results(tmp_path) == results


def test_terminal_and_page_have_the_same_tables_within_80_columns(results: BenchResults) -> None:
    page = bench_html(results)
    shown = [table for section in sections(results) for table in section.tables]
    assert len(shown) >= 6 and all(table.title in page for table in shown)
    for table in shown:
        cells = [table.columns, *table.rows]
        widths = [max(len(word) for row in cells for word in _unbroken(table, row, place))
                  for place in range(len(table.columns))]  # fmt: skip
        assert sum(widths) + 3 * len(widths) + 1 <= 80, (table.title, widths)
        assert table.title.endswith(", temperature 0, thinking off"), (
            "a title names how its figures were measured"
        )


def _unbroken(table: Table, row: list[str], place: int) -> list[str]:
    """What a terminal does not break: the words of text, a whole figure."""
    cell = row[place]
    return cell.split() or [""] if place in table.text_columns or row is table.columns else [cell]


def test_what_was_published_stands_beside_what_was_measured(results: BenchResults) -> None:
    """By category, with the mean that the card has; what is degenerate is left out."""
    card = "nvidia/Kimi-K2.5-Eagle3"
    summary = replace(results.categories["code"], acceptance_length=2.9, per_question_mean=2.64)
    of = replace(results.workload, dataset="mt-bench")
    found = replace(results, card=card, workload=of, categories={"coding": summary})
    rows = {row[0]: row[1:5] for row in card_table(found).rows}
    assert len(rows) == 8 and rows["coding"] == ["2.84", "2.64", "-0.20", "3"]
    assert rows["math"] == ["3.48", DASH, DASH, "3"]
    assert f"Published of {card}" in bench_html(found) and not card_table(results).rows


def test_degenerate_output_makes_no_headline_no_ratio_and_no_bar(results: BenchResults) -> None:
    found = broken(results)
    assert "output is degenerate" in sentence(found) and "times as fast" not in sentence(found)
    assert not figures(found)
    assert all(row[3:] == ["", ""] for row in acceptance_table(found, found.workload).rows)
    assert not speedup_table(found).rows and not category_plot([found], "").bars
    assert "eagle3" not in speed_plot(found).names and "eagle3" in speed_plot(results).names
    assert "DEGENERATE" in bench_html(found)


def test_what_is_missing_is_left_out() -> None:
    page = parsed(
        Page(
            "t",
            "It <works>.",
            [Figure("2x", "1 to 3", "fast")],
            [
                Section(title="Empty", plots=[Plot("none")], tables=[Table("t", ["a"], [])]),
                Section(
                    title="Full",
                    problems=[Problem("TS-X", "warning", "here", "why", "do")],
                    code="a: 1",
                ),
            ],
            verdict="pass",
        ).html()
    )
    assert "Empty" not in page and "Full" in page and page.count('class="figure"') == 1
    assert "It &lt;works&gt;." in page and 'class="sentence pass"' in page


def test_plots_hold_their_values_intervals_and_an_axis() -> None:
    series = {"a": {"code & co": (2.5, 2.0, 3.0)}, "b": {"code & co": (1.5, None, None)}}
    found = plot("c", "tokens per step", series, baseline=1.0)
    assert found.bars == {
        "code & co": [PlotBar(1, "2.50", 75.0, (50.0, 100.0)), PlotBar(2, "1.50", 25.0, None)]
    }
    page = parsed(Page("t", "s", [], [Section(title="Bars", plots=[found])]).html())
    assert "code &amp; co" in page and "left: 50.0%; width: 50.0%" in page
    assert page.count('class="track"') == 2 and "tokens per step" in page
    assert 'class="figures"' not in page
    for longest, end in ((2.0, "2"), (97.3, "100"), (0.061, "0.08"), (1200.0, "1500")):
        assert plot("c", "", {"a": {"x": (longest, None, None)}}, 0.0).ticks[-1] == end
