"""The HTML reports: self-contained, complete, honest about what is missing. Data named SAMPLE is made up."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from trtspec.bench import assembly, demo_report, measure
from trtspec.bench.datasets import load_dataset
from trtspec.bench.report import bench_html
from trtspec.bench.results import BenchResults, from_dict
from trtspec.client.client import RequestSampling

SAMPLE_CLASSES = {"SAMPLE experts": {"tensors": 28, "relative_error": 0.0951, "worst": 0.0985}}


@pytest.fixture(scope="module")
def results(stand_in: Callable[..., str], dataset: Path) -> BenchResults:
    """A real measurement of three stand-in servers."""
    urls = {"eagle3": stand_in(), "plain": stand_in(kind="plain"), "prompt-lookup": stand_in(draft_len=2)}
    work = measure.BenchWorkload(load_dataset(str(dataset)), RequestSampling(48), (1, 4), (6, 12), rounds=2)
    return assembly.assemble(*asyncio.run(measure.measure(urls, work)))


@pytest.fixture
def sample(results: BenchResults) -> dict[str, Any]:
    """demo.json with real bench results and made-up everything else."""
    curve = [{"step": s, "loss": 9 / s, "accuracy": [0.1 * s, 0.05 * s]} for s in range(1, 9)]
    checkpoint = {"format": "SAMPLE", "parameters": 10, "bytes": 20, "problems": [], "eagle": "3", "attention": "mla"}
    verdict = {"ok": True, "results": [{"name": "lossless", "status": "skipped", "message": "SAMPLE", "detail": {}}]}
    serve = {"argv": ["trtllm-serve", "SAMPLE"], "problems": []}
    return {
        "quick": True,
        "machine": {"processor": "SAMPLE", "cores": 2, "memory_gib": 1.0, "system": "SAMPLE"},
        "bench": {name: results.to_dict() for name in ("greedy", "sampled", "nvfp4-greedy")},
        "checks": [{"title": "SAMPLE", "gate": True, "verdict": verdict}],
        "steps": [{"stage": 1, "command": "trtspec inspect <SAMPLE>", "expected": 1, "seconds": 2.0}],
        "seconds": 61.0,
        "target": checkpoint,
        "quantized": {**checkpoint, "comparison": {"classes": SAMPLE_CLASSES}},
        "head": checkpoint,
        "training": [*curve, {"step": 8, "held_out": {"loss": 1.0, "accuracy": [0.8, 0.4]}}],
        "honesty": {"draft_over_target": 0.07, "distinct_heldout": 0.9, "distinct_sampled": 0.81},
        "config": {"yaml": "a: 1", "lint": {"version": "0", "ok": True}, "serve": serve, "pair": ["T", "H"]},
        "created": "SAMPLE",
        "versions": {"trtspec": "0"},
    }


class Wellformed(HTMLParser):
    """Fails on tags that do not nest and on anything that a page would have to fetch."""

    VOID = ("meta", "br", "link", "img", "hr", "input")

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag not in ("script", "link", "img", "iframe"), tag
        for name, value in attrs:
            assert name not in ("src", "srcset"), (tag, name, value)
            assert not (name.endswith("href") and value and not value.startswith("#")), (tag, name, value)
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open.pop() == tag, tag


def assert_self_contained(page: str) -> None:
    parser = Wellformed()
    parser.feed(page)
    assert not parser.open
    assert "@import" not in page and "url(http" not in page


def test_bench_report(results: BenchResults) -> None:
    page = bench_html(results)
    assert_self_contained(page)
    assert page.count("<svg") == 3 and len(page) < 200_000
    assert "#0303" not in page and "#0101" not in page, "a plot kept its placeholder colours"
    for name in ("eagle3", "plain", "prompt-lookup", *results.categories):
        assert name in page
    # the plain server drafts nothing: no acceptance bars and no pretended figure for it
    assert results.endpoints["plain"].drafted is None


def test_what_was_written_is_read_again(results: BenchResults) -> None:
    assert from_dict(json.loads(json.dumps(results.to_dict()))) == results


def test_demo_report_shows_every_section(sample: dict[str, Any]) -> None:
    page = demo_report.demo_html(sample)
    assert_self_contained(page)
    for anchor in re.findall(r'href="#([\w-]+)"', page):
        if not anchor.startswith(("m", "p", "C", "h")) or anchor in ("chain", "checkpoints", "config"):
            assert f'id="{anchor}"' in page, anchor
    assert "trtspec inspect &lt;SAMPLE&gt;" in page, "commands are escaped"
    assert "0.0951" in page and "2.17x" not in page
    assert "0.90" in page, "0.81 over 0.9"
    assert page.count("<svg") == 5


def test_demo_report_leaves_out_what_was_not_run(sample: dict[str, Any]) -> None:
    for key in ("training", "honesty", "config", "quantized"):
        del sample[key]
    sample["bench"] = {}
    page = demo_report.demo_html(sample)
    assert_self_contained(page)
    assert "<svg" not in page and "Training the head" not in page and "Bits per byte" not in page


def test_without_matplotlib_the_report_says_so(results: BenchResults, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trtspec.bench.report.can_plot", lambda: False)
    page = bench_html(results)
    assert "<svg" not in page and "trtspec[report]" in page
    assert f"{results.acceptance_length:.2f}" in page


def test_curves_are_thinned_without_moving_their_mean() -> None:
    points = [(float(step), float(step % 7)) for step in range(1, 1001)]
    thin = demo_report.thinned(points)
    assert len(thin) <= demo_report.SMOOTH and thin[-1][0] == 1000
    assert sum(y for _, y in thin) / len(thin) == pytest.approx(sum(y for _, y in points) / len(points), abs=0.1)
