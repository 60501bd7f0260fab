"""The report of `bench`: its sentence, its figures, its sections and their tables. Terminal and page show the same
tables, each within 80 columns.

Acceptance on degenerate output is blank, and no speed-up is made of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from trtspec.bench.report.page import Figure, Plot, Section, Value, plot, render
from trtspec.bench.results import (
    BY_LENGTH,
    BY_MINUTE,
    BY_REUSE,
    BenchResults,
    Comparison,
    DraftChoice,
    EndpointResult,
    LatencySpread,
    Workload,
    user_speed,
)
from trtspec.bench.statistics import LEAST_RUNS
from trtspec.checkpoint.published import known_head
from trtspec.report import Table

BLANK = ""
DASH = "\u2014"
PER_QUESTION = (
    "per question = tokens per iteration of each question, turns pooled and prefills counted, averaged over questions, "
    "as NVIDIA's cards have it"
)


def subject(results: BenchResults) -> EndpointResult:
    """The endpoint that the sentence is about: the first that speculates, else the first."""
    return next((endpoint for endpoint in results.all if endpoint.speculates), results)


def sentence(results: BenchResults) -> str:
    """The result in one sentence: its figures with their ranges, on what."""
    about = subject(results)
    parts = [
        f"{one.value} {one.label}{f' ({one.range})' if one.range else ''}"
        for one in figures(results)
    ]
    if about.degenerate():
        parts.append("no figure of acceptance, because the output is degenerate")
    what = f"on {results.workload.questions} questions of {results.workload.dataset}"
    return (
        f"{about.name}: {', '.join(parts) or 'nothing was measured'}, {what}, {condition(results)}."
    )


def figures(results: BenchResults) -> list[Figure]:
    """What the sentence says and the top of the page shows: speed-up, acceptance, speed of a user at the first load."""
    about, at = subject(results), results.concurrency[0].label
    ups = [up for up in results.speedups if up.of == about.name][:1]
    found = [
        Figure(f"{up.ratio.value:.2f}", up.ratio.words, f"times as fast as {up.over} at {up.level}")
        for up in ups
    ]
    if about.speculates and not about.degenerate():
        ends = about.acceptance_length_interval
        between = "{:.2f} to {:.2f}".format(*ends) if ends else ""
        found.append(Figure(number(about.acceptance_length), between, "tokens per step"))
    if user := user_speed(about, at):
        between = f"{user.low:,.1f} to {user.high:,.1f}"
        found.append(Figure(f"{user.value:,.1f}", between, f"tokens/s for a user at {at}"))
    return found


def sections(results: BenchResults) -> list[Section]:
    speculating = [endpoint for endpoint in results.all if endpoint.speculates]
    where, work = condition(results), results.workload
    acceptance = [acceptance_table(endpoint, work) for endpoint in speculating]

    def titled(*tables: Table) -> list[Table]:
        """Tables that have rows, each with the conditions of its figures in the title."""
        return [replace(table, title=f"{table.title}, {where}") for table in tables if table.rows]

    return [
        Section(
            title="Speed",
            plots=[speed_plot(results)],
            tables=titled(speedup_table(results), *speed_tables(results)),
        ),
        Section(
            title="Acceptance",
            text=quality_line(results),
            plots=[
                category_plot(
                    speculating, f"Tokens per step by category, {where}, with 95 % intervals."
                )
            ],
            tables=titled(
                card_table(results),
                *acceptance,
                position_table(speculating),
                slice_table(results, BY_LENGTH, "tokens up to"),
                slice_table(results, BY_REUSE, "% from"),
                slice_table(results, BY_MINUTE, "from minute"),
            ),
        ),
        Section(
            title="Draft length",
            tables=titled(draft_table(results.draft_choice)) if results.draft_choice else (),
        ),
        Section(
            title="Comparison",
            tables=titled(comparison_table(results.comparison)) if results.comparison else (),
        ),
        Section(title="Findings", problems=results.problems),
    ]


def bench_html(results: BenchResults) -> str:
    return render(
        f"trtspec bench: {results.server.model} on {results.server.kind}",
        sentence(results),
        figures(results),
        sections(results),
        about=workload_line(results),
        created=results.created,
        versions=results.versions,
    )


def speed_plot(results: BenchResults) -> Plot:
    """Tokens per second of a user by load; empty for one load."""
    series: dict[str, dict[str, Value]] = {}
    for endpoint in results.all if len(results.concurrency) > 1 else ():
        for level in endpoint.concurrency:
            if user := user_speed(endpoint, level.label):
                speeds = series.setdefault(endpoint.name, {})
                speeds[level.label] = user.value, user.low, user.high
    caption = f"Tokens/s for a user by load, {condition(results)}, with 95 % intervals."
    return plot(caption, "tokens/s", series, baseline=0.0)


def category_plot(endpoints: Sequence[EndpointResult], caption: str) -> Plot:
    series: dict[str, dict[str, Value]] = {
        endpoint.name: {
            name: (group.acceptance_length, *(group.acceptance_length_interval or (None, None)))
            for name, group in endpoint.groups.items()
            if group.acceptance_length is not None and not endpoint.degenerate(name)
        }
        for endpoint in endpoints
    }
    series = {name: values for name, values in series.items() if values}
    return plot(caption, "tokens per step", series, baseline=1.0)


def number(value: float | None, digits: int = 2, unit: str = "") -> str:
    """A figure, or an em dash where there is none."""
    return DASH if value is None else f"{value:,.{digits}f}{unit}"


def interval(value: float | None, low_high: Sequence[float] | None, digits: int = 2) -> str:
    if value is None or not low_high:
        return number(value, digits)
    return f"{value:,.{digits}f} ({low_high[0]:,.{digits}f} to {low_high[1]:,.{digits}f})"


def median_ms(spread: LatencySpread | None) -> str:
    return number(1000 * spread.p50 if spread else None, 1)


def condition(results: BenchResults) -> str:
    """Part of every figure's name: the temperature, how drafts were drawn above 0, whether the model thinks, and the
    beginning of its system prompt."""
    work, mode = results.workload, results.server.draft_sampling
    drawn = (
        f" ({f'{mode} drafts' if mode else 'how drafts are drawn is not reported'})"
        if work.temperature or work.recorded
        else ""
    )
    thinking = f", thinking {work.thinking}" if work.thinking else ""
    system = f', system prompt "{work.system:.24}"' if work.system else ""
    sampling = "sampled as recorded" if work.recorded else f"temperature {work.temperature:g}"
    return f"{sampling}{drawn}{thinking}{system}"


def workload_line(results: BenchResults) -> str:
    """One sentence: server, data set, load and sampling of this benchmark."""
    work, version = results.workload, results.server.version
    return (
        f"{results.server.model} at {results.url}{f' (version {version})' if version else ''}; dataset {work.dataset} "
        f"(sha256 {work.dataset_sha256[:12]}), {work.questions} questions at load "
        f"{work.loads}, {condition(results)}, {work.budget}, {work.template}, seed "
        f"{work.seed}"
    )


def quality_line(endpoint: EndpointResult) -> str:
    """One sentence on the output itself; printed wherever acceptance is."""
    d = endpoint.degeneration
    verdict = "DEGENERATE OUTPUT, acceptance on it says little: " if d.degenerate else "output: "
    return (
        f"{verdict}{d.answers} answers, {d.loop} loops, {d.empty} empty, {d.noise} noise; distinct 4-grams "
        f"{number(d.distinct_4gram_ratio)}"
    )


def acceptance_table(endpoint: EndpointResult, workload: Workload) -> Table:
    """By category and for all: N, acceptance length with its interval, and NVIDIA's mean over questions."""
    rows = []
    for name, group in endpoint.groups.items():
        cells = [
            interval(group.acceptance_length, group.acceptance_length_interval),
            number(group.per_question_mean),
        ]
        counts = [name, str(group.questions), number(group.steps, 0)]
        rows.append([*counts, *([BLANK] * 2 if endpoint.degenerate(name) else cells)])
    note = (
        f"{workload.dataset}, {workload.budget}; source: {endpoint.source}. Acceptance length = 1 + "
        f"accepted / steps, 95 % interval over questions; {PER_QUESTION}. Blank: degenerate output."
    )
    if endpoint.surplus:
        note += f" {endpoint.surplus} drafts accepted past the end of answers, which nobody received, are taken out."
    columns = ["category", "N", "steps", "acceptance length", "per question"]
    return Table(f"Acceptance of {endpoint.name}", columns, rows, note)


def card_table(results: BenchResults) -> Table:
    """What was published of the card's head on this data set, beside what was measured; no rows without a card."""
    about, rows = subject(results), []
    record = known_head(results.card) if results.card else None
    for published in record.acceptance if record is not None else ():
        for name, figure in published.of(results.workload.dataset.partition(":")[0]).items():
            group = None if about.degenerate(name) else about.groups.get(name)
            measured = getattr(group, published.mean, None)
            apart = DASH if measured is None else f"{measured - figure:+.2f}"
            drafts = str(published.draft_len)
            rows.append([name, number(figure), number(measured), apart, drafts, published.protocol])
    note = "Tokens per step; those of NVIDIA's cards are means over questions."
    columns = ["category", "published", "measured", "difference", "drafts", "published by"]
    return Table(f"Published of {results.card}", columns, rows, note, frozenset({0, 5}))


def slice_table(results: BenchResults, by: str, column: str) -> Table:
    """Acceptance and speed by one property of answers, endpoints beside each other; no rows if all answers share it."""
    parts = [(part, endpoint) for endpoint in results.all for part in endpoint.slices]
    parts = sorted((pair for pair in parts if pair[0].by == by), key=lambda pair: pair[0].value)
    rows = []
    for part, endpoint in parts if len({part.value for part, _ in parts}) > 1 else ():
        length = interval(part.acceptance_length, part.acceptance_length_interval)
        rows.append([
            f"{part.value:,}",
            endpoint.name,
            str(part.answers),
            number(part.steps, 0),
            BLANK if endpoint.degenerate() else length,
            number(part.tokens_per_s, 1),
            median_ms(part.ttft_s),
        ])  # fmt: skip
    note = (
        f"All loads. Per user = output tokens over the time from request to end. {DASH}: the server counts all answers "
        "together."
    )
    columns = [column, "endpoint", "N", "steps", "acceptance length", "per user", "TTFT ms"]
    return Table(f"By {by}", columns, rows, note, frozenset({1}))


def position_table(endpoints: Sequence[EndpointResult]) -> Table:
    """Share of steps that accepted the draft at each position."""
    reported = [
        endpoint for endpoint in endpoints if endpoint.cumulative and not endpoint.degenerate()
    ]
    depth = max((len(endpoint.cumulative or ()) for endpoint in reported), default=0)
    rows = [
        [endpoint.name, words, *map(number, shares or ()), *([BLANK] * (depth - len(shares or ())))]
        for endpoint in reported
        for words, shares in (
            ("of all steps", endpoint.cumulative),
            ("once reached", endpoint.conditional),
        )
    ]
    columns = ["endpoint", "accepted", *map(str, range(1, depth + 1))]
    return Table("Acceptance by draft position", columns, rows, "", frozenset({0, 1}))


def speed_tables(results: BenchResults) -> list[Table]:
    """Rates and latencies of every endpoint at every load."""
    rates, latencies = list[list[str]](), list[list[str]]()
    levels = [(endpoint, level) for endpoint in results.all for level in endpoint.concurrency]
    for endpoint, level in levels:
        speed, user = level.throughput, user_speed(endpoint, level.label)
        first, where = speed.ttft_s, [endpoint.name, level.load]
        length = BLANK if level.degeneration.degenerate else number(level.acceptance_length)
        rates.append([
            *where,
            number(speed.tokens_per_s, 1),
            interval(user.value, (user.low, user.high), 1) if user else BLANK,
            length,
        ])  # fmt: skip
        latencies.append([
            *where,
            median_ms(first),
            number(1000 * first.p99 if first else None, 1),
            median_ms(speed.inter_token_s),
            median_ms(speed.itl_s),
        ])  # fmt: skip
    note = (
        "load = conversations in flight, or new ones per second (/s). tokens/s of all users together, over whole "
        "rounds; per user = output tokens over the time from request to end, with its 95 % interval over questions. "
        "Blank: degenerate output, or too few questions."
    )
    meaning = (
        "Medians, TTFT also p99. TTFT = to the first token; TPOT = between tokens after the first; ITL = between "
        "chunks, of several tokens each under speculation."
    )
    columns = ["endpoint", "load", "tokens/s", "per user", "length"]
    times = ["endpoint", "load", "TTFT", "p99", "TPOT", "ITL"]
    return [
        Table("Output tokens per second", columns, rates, note),
        Table("Latency in ms", times, latencies, meaning),
    ]


def speedup_table(results: BenchResults) -> Table:
    rows = [
        [
            f"{up.of} over {up.over}",
            up.level,
            number(up.ratio.value, 2, "x"),
            up.ratio.words,
        ]
        for up in results.speedups
    ]
    note = "Output tokens/s of a user, paired by question, with the 95 % interval"
    for up in results.speedups[:1]:
        note += f" over {up.covered}"
        note += "; another launch can differ by more." if up.launches == 1 else "."
    columns = ["endpoints", "load", "times as fast", "range"]
    return Table("Speed-up", columns, rows, note, frozenset({0, 1}))


def comparison_table(comparison: Comparison) -> Table:
    """`--compare`: new over old."""
    rows = [
        [
            f.figure,
            number(f.ratio, 3),
            DASH if f.low is None else f"{f.low:.3f} to {f.high:.3f}",
            f"{f.units} {f.paired_by}s" if f.units else DASH,
            f.verdict,
        ]
        for f in comparison.figures
    ]
    note = (
        f"Intervals of {100 * comparison.confidence:.1f} % each, so that equal runs raise an alarm in at most 5 % of "
        f"comparisons; a regression lies wholly below {1 - comparison.max_regression:g}. Speed is judged from "
        f"{LEAST_RUNS} earlier runs on; here {comparison.runs}."
    )
    columns = ["figure", "new / old", "interval", "over", "verdict"]
    return Table(f"This run over {comparison.old['name']}", columns, rows, note, frozenset({0, 4}))


def draft_table(choice: DraftChoice) -> Table:
    """`--choose-draft`: every length at every load, and what is proposed."""
    rows = [
        [
            str(load.concurrency),
            str(length.draft_len),
            number(length.acceptance_length),
            number(length.tokens_per_s, 1),
            f"{length.of_best.value:.2f} ({length.of_best.words})" if length.of_best else "fastest",
            "proposed" if length.draft_len == load.best else "",
        ]
        for load in choice.loads
        for length in load.lengths
    ]
    note = f"Proposed: trtspec build-config TARGET --head HEAD --draft-len {choice.draft_len}."
    if choice.draft_len == 0:
        note = "No drafts at all are fastest: serve without the head."
    columns = ["concurrency", "drafts", "length", "per user", "over the fastest", ""]
    return Table("Draft length by load", columns, rows, note, frozenset({5}))
