"""What `bench` and `demo` found, as rows of text: the same rows stand on the terminal and in the HTML report.

Behind the tables of one run stand those in the layouts in which heads are published, filled from runs under their own
names:

- acceptance by category in one row, by NVIDIA's definition (mean over questions): model cards on MT-Bench, SPEED-Bench;
- accept_length by data set with N: lightseek's cards;
- output per user with and without speculation by concurrency: EAGLE 3.1's announcement;
- two heads side by side by condition (context length, template, system prompt): EAGLE 3.1 against 3.

What was measured on degenerate output is left blank, but for the timings in the table of speeds, of which no ratio is
made then. Figures that others published stand in tables of their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from trtspec.bench.acceptance import LEAST_RUNS, AcceptanceSummary
from trtspec.bench.results import BenchResults, Comparison, EndpointResult, LevelResult
from trtspec.data_files import load_yaml
from trtspec.report import Table

BLANK = ""
ALL = "all"
DEFINITION = (
    "Tokens per iteration of each question, turns pooled and prefills counted, averaged over questions, as ModelOpt's "
    "specdec_bench has it. Blank: the output was degenerate, or the server tells only of all answers together."
)


def all_tables(results: BenchResults) -> list[Table]:
    """Everything that the terminal, the report and Markdown show of one run."""
    found = [acceptance_by_category(results, e) for e in speculating(results)]
    found.append(throughput_table(results))
    found += [table for name in results.endpoints if (table := ratio_table(results, name))]
    found += [comparison_table(results, results.comparison)] if results.comparison else []
    return [*found, *([draft_table(results, results.draft_choice)] if results.draft_choice else [])]


def speculating(results: BenchResults) -> list[EndpointResult]:
    return [endpoint for endpoint in results.all if endpoint.steps and endpoint.drafted != 0]


def workload_line(results: BenchResults) -> str:
    """What was asked of what, in a sentence."""
    work, version = results.workload, results.server.version
    loads = [f"{rate:g}/s" for rate in work["rates"]] or [str(level) for level in work["concurrency"]]
    lengths = "".join(f", {key} {work[key.lower()]}" for key in ("ISL", "OSL") if work.get(key.lower()))
    return (
        f"{results.url}{f' (version {version})' if version else ''}; dataset {work['dataset']} "
        f"(sha256 {work['dataset_sha256'][:12]}), {' / '.join(map(str, work['questions']))} questions at load "
        f"{' / '.join(loads)}, {condition(results)}, at most {work['max_tokens']} tokens{lengths}, "
        f"{work['template']}, seed {work['seed']}"
    )


def number(value: float | None, digits: int = 2, unit: str = "") -> str:
    """A figure, or an em dash where there is none."""
    return "\u2014" if value is None else f"{value:,.{digits}f}{unit}"


def interval(value: float | None, low_high: Sequence[float] | None, digits: int = 2) -> str:
    if value is None or not low_high:
        return number(value, digits)
    return f"{value:.{digits}f} [{low_high[0]:.{digits}f}, {low_high[1]:.{digits}f}]"


def milliseconds(seconds: float | None) -> str:
    return number(None if seconds is None else 1000 * seconds, 1)


def acceptance_by_category(results: BenchResults, endpoint: EndpointResult) -> Table:
    """Acceptance length with its interval, NVIDIA's mean over questions, and N, by category and for all."""
    rows = []
    for name, group in groups_of(endpoint).items():
        cells = [
            interval(group.acceptance_length, group.acceptance_length_interval),
            number(group.per_question_mean),
            " / ".join(number(p) for p in group.cumulative) if group.cumulative else "\u2014",
        ]
        counts = [name, str(group.questions), str(group.turns), number(group.steps, 0)]
        rows.append([*counts, *([BLANK] * len(cells) if is_degenerate(endpoint, name) else cells)])
    columns = [
        "category",
        "questions",
        "turns",
        "steps",
        "acceptance length",
        "per question",
        "accepted at position 1 / 2 / \u2026",
    ]
    return Table(
        f"Acceptance of {endpoint.name}, {condition(results)}", columns, rows, acceptance_note(results, endpoint)
    )


def groups_of(endpoint: EndpointResult) -> dict[str, AcceptanceSummary]:
    """Acceptance by category, and of all answers under "all"."""
    return {**endpoint.categories, ALL: endpoint}


def is_degenerate(endpoint: EndpointResult, category: str) -> bool:
    """Whether the output of a category, or of all, is such that its acceptance is not shown."""
    quality = endpoint.degeneration if category == ALL else endpoint.quality.get(category)
    return quality is not None and quality.degenerate


def is_degenerate_at(endpoint: EndpointResult, label: str) -> bool:
    """Whether the output at one level is such that no speed-up and no headline is made of its speed."""
    level = next((level for level in endpoint.concurrency if level.label == label), None)
    return level is not None and level.degeneration.degenerate


def acceptance_note(results: BenchResults, endpoint: EndpointResult) -> str:
    """What the acceptance figures are of, and by which definition."""
    work = results.workload
    note = (
        f"{work['dataset']}, {sampling_words(results)}, at most {work['max_tokens']} tokens, "
        f"{work['template']}; source: {endpoint.source}. Acceptance length = 1 + accepted / steps with a 95 % "
        "bootstrap interval over questions; per question = tokens per iteration of each question, turns pooled and "
        "prefills counted, then the mean over questions, as NVIDIA's cards have it. Blank: the output was degenerate."
    )
    if endpoint.surplus:
        note += (
            f" {endpoint.surplus} drafts accepted past the end of answers, which nobody received, are taken out of the "
            "server's counters; they are still in the shares by position."
        )
    return note


def condition(results: BenchResults) -> str:
    """What is part of every figure's name: the temperature, and how the model was told to think."""
    return sampling_words(results) + thinking_words(results.workload.get("thinking"))


def thinking_words(mode: str | None) -> str:
    """What a title says of `--thinking`, with a comma before it."""
    return {None: "", "on": ", thinking on", "off": ", thinking off"}.get(mode, f", {mode} reasoning")


def sampling_words(results: BenchResults) -> str:
    """The temperature and, above 0, how drafts were chosen: without that a sampled acceptance means little."""
    temperature = results.workload["temperature"]
    if not temperature:
        return "temperature 0"
    mode = results.server.draft_sampling
    return f"temperature {temperature:g} ({f'{mode} drafts' if mode else 'how drafts are chosen is not known'})"


def interval_sd(mean: float | None, deviation: float | None) -> str:
    return number(mean) if mean is None or deviation is None else f"{mean:.2f} \u00b1 {deviation:.2f}"


def speed_of(results: BenchResults, endpoint: EndpointResult, level: LevelResult) -> list[float]:
    """Tokens/s of each round of a level: the one statistic of tables and charts. Where endpoints alternate it is the
    one that their ratios are made of, else that of the whole round."""
    for found in results.interleaved or []:
        if found.label == level.label and endpoint.name in found.tokens_per_s:
            return found.tokens_per_s[endpoint.name]
    return level.rounds


def throughput_table(results: BenchResults) -> Table:
    """Speed by level for the endpoint and the ones measured beside it."""
    promised = any(level.throughput.goodput for endpoint in results.all for level in endpoint.concurrency)
    rows = []
    for endpoint in results.all:
        for level in endpoint.concurrency:
            speed = level.throughput
            first, gap = speed.ttft_s, speed.inter_token_s
            user, chunk = speed.tokens_per_s_per_user, speed.itl_s
            row = [
                endpoint.name,
                str(level.concurrency) if level.rate is None else f"{level.rate:g}/s",
                number(mean(speed_of(results, endpoint, level)), 1),
                number(user.p50 if user else None, 1),
                milliseconds(first.p50 if first else None),
                milliseconds(first.p99 if first else None),
                milliseconds(gap.p50 if gap else None),
                milliseconds(chunk.p50 if chunk else None),
                BLANK if is_degenerate_at(endpoint, level.label) else number(level.acceptance_length),
                f"{speed.requests} / {speed.errors}",
            ]
            good = speed.goodput
            rows.append(
                [*row, f"{good.requests_per_s:.2f} ({100 * good.share:.0f} %)" if good else ""][: 10 + promised]
            )
    columns = ["endpoint", "load", "tokens/s", "per user", "TTFT ms", "p99", "TPOT ms", "ITL ms", "acceptance"]
    steady = any(found.metric.startswith("steady") for found in results.interleaved or [])
    note = (
        ("tokens/s in the steady state, every slot busy; " if steady else "tokens/s over whole rounds; ")
        + "load = conversations in flight, or new ones per second (/s). Medians: per user = output tokens over the "
        "time from request to end; TPOT = between tokens after the first; ITL = between chunks, of several tokens each "
        "under speculation."
    )
    if any(is_degenerate_at(endpoint, level.label) for endpoint in results.all for level in endpoint.concurrency):
        note += " Blank acceptance: the output was degenerate, and its timings do not show a speed-up."
    if promised:
        note += f" goodput: answers per second with {promise_of(results)}."
    columns += ["requests / errors", *(["goodput/s"] if promised else [])]
    return Table(f"Speed, {condition(results)}", columns, rows, note)


def promise_of(results: BenchResults) -> str:
    return next(
        (level.throughput.goodput.promise for e in results.all for level in e.concurrency if level.throughput.goodput),
        "",
    )


def ratio_table(results: BenchResults, over: str) -> Table | None:
    """Ratios over one endpoint of an interleaved run, median and range over rounds."""
    named = {endpoint.name: endpoint for endpoint in results.all}
    rows = []
    for level in results.interleaved or []:
        for pair in (pair for pair in level.ratios if pair.over == over):
            loops = {name for name in (over, pair.of) if is_degenerate_at(named[name], level.label)}
            speeds = [BLANK if name in loops else number(mean(level.tokens_per_s[name]), 1) for name in (over, pair.of)]
            ratio = [number(pair.median, 2, "x"), f"{number(pair.low)} \u2013 {number(pair.high)}"]
            load = str(level.concurrency) if level.rate is None else f"{level.rate:g}/s"
            rows.append(
                [pair.of, load, *speeds, *([BLANK] * 2 if loops else ratio), str(len(level.tokens_per_s[over]))]
            )
    if not rows:
        return None
    note = (
        "Rounds alternate between endpoints, one loaded at a time, same questions in each; median and range of ratios. "
        "Blank: the output was degenerate."
    )
    columns = ["endpoint", "load", f"{over} tokens/s", "its tokens/s", "ratio", "range", "rounds"]
    return Table(f"Speed over {over}, {condition(results)}", columns, rows, note)


def comparison_table(results: BenchResults, comparison: Comparison) -> Table:
    """`--compare`: new over old."""
    rows = [
        [
            f.figure,
            number(f.ratio, 3),
            "\u2014" if f.low is None else f"{f.low:.3f} \u2013 {f.high:.3f}",
            f"{f.pairs} {f.paired_by}s" if f.pairs else "\u2014",
            f.verdict,
        ]
        for f in comparison.figures
    ]
    note = (
        f"Intervals of {100 * comparison.confidence:.1f} % each, so that all judged figures together raise an alarm in "
        f"at most 5 % of equal runs; a regression lies wholly below {1 - comparison.max_regression:g}. Speed is judged "
        f"with {LEAST_RUNS} earlier runs or more, against their mean; here {comparison.runs}."
    )
    columns = ["figure", "new / old", "interval", "over", "verdict"]
    title = f"This run over {comparison.old['name']}, {condition(results)}"
    return Table(title, columns, rows, note, frozenset({0, 4}))


def draft_table(results: BenchResults, choice: dict[str, Any]) -> Table:
    """`--choose-draft`: every length at every load, and what is proposed."""
    rows = [
        [
            str(load["concurrency"]),
            str(figures["draft_len"]),
            number(figures["tokens_per_step"]),
            number(1000 * figures["step_s"], 2),
            number(figures["tokens_per_s"], 1),
            over_best(figures),
            "best" if figures["draft_len"] == load["best"] else "",
        ]
        for load in choice["loads"]
        for figures in load["lengths"]
    ]
    schedule = choice["schedule"]
    what = f"schedule {schedule} (batch size: drafts)" if schedule else f"draft length {choice['draft_len']}"
    words = " ".join(f"'{word}'" if " " in word else word for word in choice["options"])
    note = f"Proposed: {what}; trtspec build-config TARGET --head HEAD {words}. " + ". ".join(choice["notes"])
    columns = ["concurrency", "drafts", "tokens per step", "step ms", "tokens/s per user", "of the best", ""]
    return Table(f"Draft length by load, {condition(results)}", columns, rows, note, frozenset({6}))


def over_best(figures: dict[str, Any]) -> str:
    """95 % interval of a length's speed in percent of the best one's, where rounds tell."""
    low_high = figures.get("of_best")
    return "[{:.0f}, {:.0f}] %".format(*(100 * end for end in low_high)) if low_high else number(None)


def quality_line(endpoint: EndpointResult) -> str:
    """One sentence on the output itself; printed wherever acceptance is."""
    d = endpoint.degeneration
    verdict = "DEGENERATE OUTPUT, acceptance on it says little: " if d.degenerate else "output: "
    return (
        f"{verdict}{d.answers} answers, {d.loop} loops, {d.empty} empty, {d.noise} noise; "
        f"distinct 4-grams {number(d.distinct_4gram_ratio)}"
    )


def mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def card_tables(results: BenchResults, others: Sequence[BenchResults] = ()) -> list[Table]:
    """Every layout that a run (and those on other data sets) can fill."""
    found = [
        categories_table(results),
        data_sets_table([results, *others]) if others else None,
        per_user_table(results),
    ]
    return [table for table in [*found, conditions_table(results)] if table is not None]


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
            sound = group is not None and not is_degenerate(endpoint, name)
            cells.append(number(group.per_question_mean) if group and sound else BLANK)
        whole = BLANK if is_degenerate(endpoint, ALL) else number(endpoint.per_question_mean)
        rows.append([endpoint.name, *cells, whole])
    title = f"Acceptance on {results.workload['dataset']} by category, {condition(results)}"
    return Table(title, ["", *names, "average"], rows, DEFINITION)


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
        plain_sound = not is_degenerate_at(plain, level.label)
        row = [level.label.removeprefix("concurrency "), number(base.mean if base and plain_sound else None, 1)]
        for endpoint in endpoints:
            same = next((other for other in endpoint.concurrency if other.label == level.label), None)
            user = same.throughput.tokens_per_s_per_user if same else None
            sound = not is_degenerate_at(endpoint, level.label)
            ratio = user.mean / base.mean if user and base and base.mean and sound and plain_sound else None
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
        sound = [not is_degenerate(endpoint, name) for endpoint in endpoints]
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
