"""Report of `bench`: a sentence, figures, and sections with plots and tables.

Terminal and page show the same tables, each within 80 columns. Acceptance on degenerate output is
blank, and such output gives no speed-up.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from trtspec.bench.report.page import Figure, Page, Plot, Section, Value, plot
from trtspec.bench.results import (
    BY_LENGTH,
    BY_MINUTE,
    BY_REUSE,
    BenchResults,
    Comparison,
    DraftChoice,
    EndpointResult,
    LatencySpread,
    StatedWorkload,
    user_speed,
)
from trtspec.bench.statistics import MIN_EARLIER_RUNS
from trtspec.checkpoint.published import known_head
from trtspec.report import Table

BLANK = ""
DASH = "\u2014"
PER_QUESTION = (
    "per question = tokens per iteration of each question, turns pooled and prefills counted, "
    "averaged over questions, as NVIDIA's cards have it"
)


def bench_html(results: BenchResults) -> str:
    """Returns the page of a run as HTML."""
    server = results.server
    page = Page(
        f"trtspec bench: {server.model} on {server.kind}",
        sentence(results),
        figures(results),
        sections(results),
        subtitle=workload_line(results),
        created=results.created,
        versions=results.versions,
    )
    return page.html()


def subject(results: BenchResults) -> EndpointResult:
    """Returns the endpoint that the sentence is about: the first that speculates.

    If no endpoint speculates, it is the first.
    """
    return next((endpoint for endpoint in results.all if endpoint.speculates), results)


def sentence(results: BenchResults) -> str:
    """Returns the result in one sentence: figures with their ranges, and the workload."""
    endpoint = subject(results)
    parts = []
    for figure in figures(results):
        part = f"{figure.value} {figure.label}"
        parts.append(f"{part} ({figure.range})" if figure.range else part)
    if endpoint.degenerate():
        parts.append("no figure of acceptance, because the output is degenerate")
    measured = ", ".join(parts) or "nothing was measured"
    work = results.workload
    questions = f"on {work.questions} questions of {work.dataset}"
    return f"{endpoint.name}: {measured}, {questions}, {condition(results)}."


def figures(results: BenchResults) -> list[Figure]:
    """Returns the main figures: speed-up, tokens per verification step, and speed for a user.

    Figures that were not measured are left out. The speed for a user is at the first load. The
    speed-up is at the first load that has one.
    """
    endpoint = subject(results)
    label = results.concurrency[0].label
    shown = []
    gains = [gain for gain in results.speedups if gain.of == endpoint.name]
    for gain in gains[:1]:
        ratio = gain.ratio
        times = f"times as fast as {gain.over} at {gain.level}"
        shown.append(Figure(f"{ratio.value:.2f}", ratio.words, times))
    if endpoint.speculates and not endpoint.degenerate():
        ends = endpoint.acceptance_length_interval
        ends_text = "{:.2f} to {:.2f}".format(*ends) if ends else ""
        shown.append(Figure(number(endpoint.acceptance_length), ends_text, "tokens per step"))
    speed = user_speed(endpoint, label)
    if speed:
        ends_text = f"{speed.low:,.1f} to {speed.high:,.1f}"
        shown.append(Figure(f"{speed.value:,.1f}", ends_text, f"tokens/s for a user at {label}"))
    return shown


def sections(results: BenchResults) -> list[Section]:
    """Returns the sections of the report.

    They are speed, acceptance, draft length, comparison and findings.
    """
    conditions = condition(results)

    def titled(*tables: Table) -> list[Table]:
        """Adds the conditions of the figures to the titles, and drops empty tables."""
        filled = [table for table in tables if table.rows]
        return [replace(table, title=f"{table.title}, {conditions}") for table in filled]

    speeds = titled(speedup_table(results), *speed_tables(results))
    speed = Section(title="Speed", plots=[speed_plot(results)], tables=speeds)
    speculating = [endpoint for endpoint in results.all if endpoint.speculates]
    caption = f"Tokens per step by category, {conditions}, with 95 % intervals."
    by_category = [acceptance_table(endpoint, results.workload) for endpoint in speculating]
    tables = titled(
        card_table(results),
        *by_category,
        position_table(speculating),
        slice_table(results, BY_LENGTH, "tokens up to"),
        slice_table(results, BY_REUSE, "% from"),
        slice_table(results, BY_MINUTE, "from minute"),
    )
    bars = category_plot(speculating, caption)
    text = quality_line(results)
    acceptance = Section(title="Acceptance", text=text, plots=[bars], tables=tables)
    choice = results.draft_choice
    comparison = results.comparison
    lengths: Sequence[Table] = ()
    if choice:
        lengths = titled(draft_table(choice))
    changes: Sequence[Table] = ()
    if comparison:
        changes = titled(comparison_table(comparison))
    return [
        speed,
        acceptance,
        Section(title="Draft length", tables=lengths),
        Section(title="Comparison", tables=changes),
        Section(title="Findings", problems=results.problems),
    ]


def speed_plot(results: BenchResults) -> Plot:
    """Returns the plot of a user's tokens per second by load. It is empty for a single load."""
    series: dict[str, dict[str, Value]] = {}
    for endpoint in results.all:
        for level in endpoint.concurrency:
            speed = user_speed(endpoint, level.label)
            if speed and len(results.concurrency) > 1:
                speeds = series.setdefault(endpoint.name, {})
                speeds[level.label] = (speed.value, speed.low, speed.high)
    caption = f"Tokens/s for a user by load, {condition(results)}, with 95 % intervals."
    return plot(caption, "tokens/s", series, baseline=0.0)


def category_plot(endpoints: Sequence[EndpointResult], caption: str) -> Plot:
    """Returns the plot of tokens per verification step by category.

    Categories with degenerate output are left out.
    """
    series: dict[str, dict[str, Value]] = {}
    for endpoint in endpoints:
        for name, group in endpoint.groups.items():
            length = group.acceptance_length
            if length is None or endpoint.degenerate(name):
                continue
            low, high = group.acceptance_length_interval or (None, None)
            series.setdefault(endpoint.name, {})[name] = (length, low, high)
    return plot(caption, "tokens per step", series, baseline=1.0)


# --- figures as text, for sentences and tables ---


def number(value: float | None, digits: int = 2, unit: str = "") -> str:
    """Returns a figure as text, with `digits` decimals. An em dash for None."""
    return DASH if value is None else f"{value:,.{digits}f}{unit}"


def interval(value: float | None, ends: Sequence[float] | None, digits: int = 2) -> str:
    """Returns a figure as text, with the ends of its interval if they are known."""
    if value is None or not ends:
        return number(value, digits)
    low, high = ends
    return f"{value:,.{digits}f} ({low:,.{digits}f} to {high:,.{digits}f})"


def median_ms(spread: LatencySpread | None) -> str:
    """Returns the median latency in milliseconds as text. An em dash for None."""
    return number(1000 * spread.p50 if spread else None, 1)


def condition(results: BenchResults) -> str:
    """Returns the conditions without which a figure has no meaning, in words.

    They are the temperature, the method of draft sampling above 0, the thinking level, and the
    beginning of the system prompt.
    """
    work = results.workload
    words = f"temperature {work.temperature:g}"
    if work.recorded:
        words = "sampled as recorded"
    if work.temperature or work.recorded:
        mode = results.server.draft_sampling
        drawn = "how drafts are drawn is not reported"
        if mode:
            drawn = f"{mode} drafts"
        words += f" ({drawn})"
    if work.thinking:
        words += f", thinking {work.thinking}"
    if work.system:
        words += f', system prompt "{work.system:.24}"'
    return words


def workload_line(results: BenchResults) -> str:
    """Returns one line with server, data set, load and sampling of a run."""
    work = results.workload
    version = results.server.version
    server = f"{results.server.model} at {results.url}"
    if version:
        server += f" (version {version})"
    dataset = f"dataset {work.dataset} (sha256 {work.dataset_sha256[:12]})"
    load = f"{work.questions} questions at load {work.loads}"
    sampling = f"{condition(results)}, {work.budget}, {work.template}, seed {work.seed}"
    return f"{server}; {dataset}, {load}, {sampling}"


def quality_line(endpoint: EndpointResult) -> str:
    """Returns one line on the quality of the output, for reports that show acceptance."""
    quality = endpoint.degeneration
    output = "output"
    if quality.degenerate:
        output = "DEGENERATE OUTPUT, acceptance on it says little"
    return f"{output}: {quality.words}"


# --- tables of the sections ---


def acceptance_table(endpoint: EndpointResult, workload: StatedWorkload) -> Table:
    """Table of an endpoint's acceptance, by category and over all answers.

    The columns are questions, verification steps, acceptance length with its interval, and NVIDIA's
    mean over questions.
    """
    rows = []
    for name, group in endpoint.groups.items():
        length = interval(group.acceptance_length, group.acceptance_length_interval)
        mean = number(group.per_question_mean)
        if endpoint.degenerate(name):
            length = mean = BLANK
        counts = [str(group.questions), number(group.steps, 0)]
        rows.append([name, *counts, length, mean])
    note = (
        f"{workload.dataset}, {workload.budget}; source: {endpoint.source}. Acceptance length = 1 "
        f"+ accepted / steps, 95 % interval over questions; {PER_QUESTION}. Blank: degenerate "
        "output."
    )
    if endpoint.surplus:
        surplus = f"{endpoint.surplus} drafts accepted past the end of answers"
        note += f" {surplus}, which nobody received, are taken out."
    columns = ["category", "N", "steps", "acceptance length", "per question"]
    return Table(f"Acceptance of {endpoint.name}", columns, rows, note)


def card_table(results: BenchResults) -> Table:
    """Table of the published acceptance of a head on this data set, next to the measured one.

    It has no rows if no published head was named.
    """
    rows: list[list[str]] = []
    card = results.card
    record = None
    if card:
        record = known_head(card)
    dataset, _, _ = results.workload.dataset.partition(":")
    records = record.acceptance if record else ()
    for published in records:
        for name, figure in published.of(dataset).items():
            measured = _measured(subject(results), name, published.mean)
            difference = DASH if measured is None else f"{measured - figure:+.2f}"
            cells = [name, number(figure), number(measured), difference]
            rows.append([*cells, str(published.draft_len), published.protocol])
    note = "Tokens per step; those of NVIDIA's cards are means over questions."
    columns = ["category", "published", "measured", "difference", "drafts", "published by"]
    return Table(f"Published of {card}", columns, rows, note, frozenset({0, 5}))


def _measured(endpoint: EndpointResult, category: str, mean: str) -> float | None:
    """Returns the measured acceptance of a category.

    None if the category was not asked, or if its output is degenerate. `mean`: field with the type
    of mean that was published.
    """
    if endpoint.degenerate(category):
        return None
    return getattr(endpoint.groups.get(category), mean, None)


def slice_table(results: BenchResults, by: str, column: str) -> Table:
    """Table of acceptance and speed by one property of the answers and by endpoint.

    It has no rows if all answers have the same value. `by`: property, such as BY_MINUTE. `column`:
    heading of the values.
    """
    rows_by_value: dict[int, list[list[str]]] = {}
    for endpoint in results.all:
        for result_slice in endpoint.slices:
            if result_slice.by != by:
                continue
            ends = result_slice.acceptance_length_interval
            length = interval(result_slice.acceptance_length, ends)
            if endpoint.degenerate():
                length = BLANK
            row = [
                f"{result_slice.value:,}",
                endpoint.name,
                str(result_slice.answers),
                number(result_slice.steps, 0),
                length,
                number(result_slice.tokens_per_s, 1),
                median_ms(result_slice.ttft_s),
            ]
            rows_by_value.setdefault(result_slice.value, []).append(row)
    rows = []
    if len(rows_by_value) > 1:
        for _, value_rows in sorted(rows_by_value.items()):
            rows += value_rows
    note = (
        f"All loads. Per user = output tokens over the time from request to end. {DASH}: the "
        "server counts all answers together."
    )
    columns = [column, "endpoint", "N", "steps", "acceptance length", "per user", "TTFT ms"]
    return Table(f"By {by}", columns, rows, note, frozenset({1}))


def position_table(endpoints: Sequence[EndpointResult]) -> Table:
    """Table of the share of steps that accepted the draft at each position.

    An endpoint has two rows: the share of all verification steps, and the share of the steps that
    accepted all earlier drafts.
    """
    rows: list[list[str]] = []
    for endpoint in endpoints:
        if endpoint.cumulative and not endpoint.degenerate():
            cumulative = map(number, endpoint.cumulative)
            conditional = map(number, endpoint.conditional or ())
            rows.append([endpoint.name, "of all steps", *cumulative])
            rows.append([endpoint.name, "once reached", *conditional])
    # endpoints may have different draft lengths, and the first two columns are not positions
    width = max(map(len, rows), default=2)
    rows = [row + [BLANK] * (width - len(row)) for row in rows]
    positions = range(1, width - 1)
    columns = ["endpoint", "accepted", *map(str, positions)]
    return Table("Acceptance by draft position", columns, rows, "", frozenset({0, 1}))


def speed_tables(results: BenchResults) -> list[Table]:
    """Returns two tables of the endpoints at each load: token rates, and latencies in ms."""
    rates: list[list[str]] = []
    latencies: list[list[str]] = []
    for endpoint in results.all:
        for level in endpoint.concurrency:
            speed = level.throughput
            load = [endpoint.name, level.load]
            user = user_speed(endpoint, level.label)
            per_user = BLANK
            if user:
                per_user = interval(user.value, (user.low, user.high), 1)
            length = number(level.acceptance_length)
            if level.degeneration.degenerate:
                length = BLANK
            tokens = number(speed.tokens_per_s, 1)
            rates.append([*load, tokens, per_user, length])
            first = speed.ttft_s
            first_p99 = number(1000 * first.p99 if first else None, 1)
            tpot = median_ms(speed.inter_token_s)
            itl = median_ms(speed.itl_s)
            latencies.append([*load, median_ms(first), first_p99, tpot, itl])
    note = (
        "load = conversations in flight, or new ones per second (/s). tokens/s of all users "
        "together, over whole rounds; per user = output tokens over the time from request to end, "
        "with its 95 % interval over questions. Blank: degenerate output, or too few questions."
    )
    meaning = (
        "Medians, TTFT also p99. TTFT = to the first token; TPOT = between tokens after the first; "
        "ITL = between chunks, of several tokens each under speculation."
    )
    columns = ["endpoint", "load", "tokens/s", "per user", "length"]
    times = ["endpoint", "load", "TTFT", "p99", "TPOT", "ITL"]
    return [
        Table("Output tokens per second", columns, rates, note),
        Table("Latency in ms", times, latencies, meaning),
    ]


def speedup_table(results: BenchResults) -> Table:
    """Table of the speed-ups of one endpoint over another, at each load."""
    rows = []
    for gain in results.speedups:
        pair = f"{gain.of} over {gain.over}"
        ratio = gain.ratio
        times = number(ratio.value, 2, "x")
        rows.append([pair, gain.level, times, ratio.words])
    note = "Output tokens/s of a user, paired by question, with the 95 % interval"
    # all speed-ups of a run cover the same questions, rounds and launches
    for gain in results.speedups[:1]:
        end = "."
        if gain.launches == 1:
            end = "; another launch can differ by more."
        note += f" over {gain.covered}{end}"
    columns = ["endpoints", "load", "times as fast", "range"]
    return Table("Speed-up", columns, rows, note, frozenset({0, 1}))


def comparison_table(comparison: Comparison) -> Table:
    """Table of the figures of this run divided by the earlier figures (`bench --compare`)."""
    rows = []
    for figure in comparison.figures:
        low = figure.low
        count = figure.units
        ends = DASH
        if low is not None:
            ends = f"{low:.3f} to {figure.high:.3f}"
        units = DASH
        if count:
            units = f"{count} {figure.paired_by}s"
        ratio = number(figure.ratio, 3)
        rows.append([figure.figure, ratio, ends, units, figure.verdict])
    percent = 100 * comparison.confidence
    limit = 1 - comparison.max_regression
    note = (
        f"Intervals of {percent:.1f} % each, so that equal runs raise an alarm in at most 5 % of "
        f"comparisons; a regression lies wholly below {limit:g}. Speed is judged from "
        f"{MIN_EARLIER_RUNS} earlier runs on; here {comparison.runs}."
    )
    columns = ["figure", "new / old", "interval", "over", "verdict"]
    return Table(f"This run over {comparison.old['name']}", columns, rows, note, frozenset({0, 4}))


def draft_table(choice: DraftChoice) -> Table:
    """Table of the speed with each draft length at each load (`bench --choose-draft`).

    The note says which draft length is proposed.
    """
    rows = []
    for load in choice.loads:
        for figures_of_length in load.lengths:
            draft_len = figures_of_length.draft_len
            ratio = figures_of_length.of_best
            over_fastest = "fastest"
            if ratio:
                over_fastest = f"{ratio.value:.2f} ({ratio.words})"
            proposed = ""
            if draft_len == load.best:
                proposed = "proposed"
            tokens_per_step = number(figures_of_length.acceptance_length)
            per_user = number(figures_of_length.tokens_per_s, 1)
            row = [str(load.concurrency), str(draft_len), tokens_per_step, per_user]
            rows.append([*row, over_fastest, proposed])
    note = f"Proposed: trtspec build-config TARGET --head HEAD --draft-len {choice.draft_len}."
    if choice.draft_len == 0:
        note = "No drafts at all are fastest: serve without the head."
    columns = ["concurrency", "drafts", "length", "per user", "over the fastest", ""]
    return Table("Draft length by load", columns, rows, note, frozenset({5}))
