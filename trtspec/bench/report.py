"""The HTML report of `bench`: one self-contained file, inline CSS and SVG, no scripts, light and dark."""

from __future__ import annotations

from functools import cache
from importlib import resources
from typing import Any

import jinja2

from trtspec.bench import plots, tables
from trtspec.bench.plots import PlotSeries


@cache
def environment() -> jinja2.Environment:
    """Templates of this package; everything is escaped unless marked safe."""

    def load(name: str) -> str:
        return (resources.files("trtspec.bench") / "templates" / name).read_text(encoding="utf-8")

    return jinja2.Environment(
        loader=jinja2.FunctionLoader(load),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )


def bench_html(results: dict[str, Any]) -> str:
    """The report of one results.json."""
    endpoints = [results, *results["endpoints"].values()]
    comparison = results.get("comparison")
    ratios = [table for name in results["endpoints"] if (table := tables.ratio_table(results, name))]
    drawn = plots.available()
    return (
        environment()
        .get_template("bench.html.j2")
        .render(
            title=f"{results['name']}: {results['server']['model']} on {results['server']['kind']}",
            workload=workload_line(results),
            keys=key_figures(results),
            quality=tables.quality_line(results),
            problems=results["problems"],
            acceptance_tables=[
                tables.acceptance_by_category({**results, **e}) for e in endpoints if e["steps"] and e["drafted"] != 0
            ],
            speed_tables=[tables.throughput_table(results), *ratios],
            comparison_table=tables.comparison_table(comparison) if comparison else None,
            category_plot=category_plot({e["name"]: e for e in endpoints}) if drawn else "",
            position_plot=position_plot({e["name"]: e for e in endpoints}) if drawn else "",
            speed_plot=speed_plot(endpoints) if drawn else "",
            plots=drawn,
            created=results.get("created", ""),
            versions=results.get("versions", {}),
        )
    )


def workload_line(results: dict[str, Any]) -> str:
    work = results["workload"]
    version = results["server"]["version"]
    return (
        f"{results['url']}{f' (version {version})' if version else ''}; dataset {work['dataset']} "
        f"(sha256 {work['dataset_sha256'][:12]}), {' / '.join(map(str, work['questions']))} questions at concurrency "
        f"{' / '.join(map(str, work['concurrency']))}, temperature {work['temperature']:g}, at most "
        f"{work['max_tokens']} tokens, {work['template']}, seed {work['seed']}"
    )


def key_figures(results: dict[str, Any]) -> list[dict[str, str]]:
    """The figures at the top: acceptance and speed at the lowest and the highest concurrency."""
    found = [
        {
            "value": tables.number(results["acceptance_length"]),
            "label": f"acceptance length over {results['turns']} answers to {results['questions']} questions",
        }
    ]
    levels = results["concurrency"]
    for level in dict.fromkeys((0, len(levels) - 1)):
        speed = levels[level]["throughput"]
        label = f"tokens/s at concurrency {levels[level]['concurrency']}"
        found.append({"value": tables.number(speed["tokens_per_s"], 1), "label": label})
    ttft = levels[0]["throughput"]["ttft_s"]
    found.append(
        {"value": tables.milliseconds(ttft, "p50"), "label": "median ms to the first token, lowest concurrency"}
    )
    return found


def category_plot(groups: dict[str, dict[str, Any]]) -> str:
    """Acceptance length by category for several measurements; "" when none tells it."""
    series = []
    for color, (name, group) in enumerate(groups.items()):
        entries = {**group["categories"], "all": group}
        values = {
            label: (entry["acceptance_length"], *(entry["acceptance_length_interval"] or (None, None)))
            for label, entry in entries.items()
            if entry["acceptance_length"] is not None
        }
        if values and group["drafted"] != 0:
            series.append(PlotSeries(name, values, color))
    return plots.grouped_bars(series, "tokens per step", baseline=1.0) if series else ""


def position_plot(groups: dict[str, dict[str, Any]]) -> str:
    """Cumulative acceptance by draft position; "" when no server gives a histogram."""
    series = [
        PlotSeries(
            name, {f"position {k}": (share, None, None) for k, share in enumerate(group["cumulative"], start=1)}, color
        )
        for color, (name, group) in enumerate(groups.items())
        if group["cumulative"] and group["drafted"]
    ]
    return plots.grouped_bars(series, "share of steps") if series else ""


def speed_plot(endpoints: list[dict[str, Any]]) -> str:
    """Tokens/s by concurrency, one colour per endpoint; the bar's line spans its rounds."""
    series = []
    for color, endpoint in enumerate(endpoints):
        values = {}
        for level in endpoint["concurrency"]:
            rounds = level["rounds"]
            ends = (min(rounds), max(rounds)) if len(rounds) > 1 else (None, None)
            values[f"concurrency {level['concurrency']}"] = (level["throughput"]["tokens_per_s"], *ends)
        series.append(PlotSeries(endpoint["name"], values, color))
    return plots.grouped_bars(series, "output tokens/s", digits=0)
