"""`watch`: what a live endpoint does over time, judged against what it did before. No input or output here.

Increments of scrapes are gathered into batches; each batch gives one mean per series, and each series has its own
sequential test (trtspec.bench.sequential). Everything that a later run needs is in the WatchState.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from trtspec.bench.acceptance import TurnCounts
from trtspec.bench.adapters import FROM_STREAMS
from trtspec.bench.sequential import EventTest, SeriesReference, WatchedSeries, event_test
from trtspec.bench.watch_baseline import WatchBaseline
from trtspec.bench.watch_sources import Increment
from trtspec.bench.watch_state import OpenBatch, WatchSettings, WatchState
from trtspec.errors import Problem

CONTEXTS = (1024, 4096, 16384, 65536)  # upper ends of the groups of prompt lengths, in tokens
LOOPS = (0.02, 0.25)  # share of degenerate answers that is tolerated, and that is to be found
FAILURES = (0.02, 0.25)
GONE_AFTER = 3  # scrapes in a row
UNACCEPTED = 1000.0  # steps in ended batches without one accepted draft: the head does not fit
IDLE_TOKENS = 200.0  # generated without one verification step: the server does not speculate
UNIT_READINGS = 3  # in a row in another unit, from which the server counts in that
SWITCHES = 3  # times that counters went back, recently: several servers
RECENT = (600.0, 12)  # seconds, or readings where these are longer
MOST_JOINED = 0.1  # of the pieces of a stream
FALLEN = ("TS-WATCH-ACCEPTANCE", "TS-WATCH-BASELINE")
FALL_REMEDY = "trtspec check URL --against RECORDING, and trtspec inspect HEAD --against TARGET"
PROBES_LATE = 36  # ended batches without enough steps of probes, from which the series is told as not measured


@dataclass(frozen=True)
class ProbeAnswer:
    """One answer to a prompt of watch's own. `counts` where the answer tells them; `degenerate` says why, or is None.
    Times in seconds."""

    category: str
    prompt_tokens: int
    counts: TurnCounts | None
    degenerate: str | None
    error: str | None
    first_token_s: float | None
    token_s: float | None


class Watch:
    """A state with the settings and the baseline it is judged by."""

    def __init__(self, state: WatchState, settings: WatchSettings, baseline: WatchBaseline | None) -> None:
        self.state, self.settings, self.baseline = state, settings, baseline
        self.not_measured: list[str] = []  # by this look, and why
        self.streams_count = True  # whether probes ask for the number of tokens at each piece of the stream
        self._add_series()

    def _series(self, change: float, recorded: SeriesReference | None = None, absolute: bool = False) -> WatchedSeries:
        use = self.settings
        return WatchedSeries(
            change, use.learn_batches, use.batches_per_day, use.false_alarms, absolute=absolute, recorded=recorded
        )

    def _add_series(self) -> None:
        found, use = self.state.series, self.settings
        found.setdefault("acceptance", self._series(use.fall))
        found.setdefault("latency", self._series(math.log1p(use.slower), absolute=True))
        if self.baseline is None:
            return
        if "baseline" not in found or not found["baseline"].batches:
            found["baseline"] = self._baseline_series()
        probes = self.baseline.probes(self._probe_steps())
        if probes is not None:
            found.setdefault("probes", self._series(use.fall, probes))

    def _baseline_series(self) -> WatchedSeries:
        """In the server's unit. Where the baseline does not know it, one per step, which is given nothing."""
        assert self.baseline is not None
        use, per = self.settings, self.state.per
        floor = self.baseline.floor(per, use.min_steps) or self.baseline.floor("step", use.min_steps)
        return self._series(use.fall, floor)

    def _judges_baseline(self) -> bool:
        return self.baseline is not None and self.baseline.floor(self.state.per, 1) is not None

    def _in_unit(self, now: float, found: Increment) -> Increment:
        """In the unit of what was learned: a reading in another one (a server that left its configuration out) gives
        no counts, and from the third in a row what is in the old unit begins again."""
        state = self.state
        if found.per == state.per:
            state.other_unit = 0
            return found
        state.other_unit += 1
        begun = state.series["acceptance"].batches or (state.batch is not None and state.batch.steps)
        if begun and state.other_unit < UNIT_READINGS:
            return replace(found, per=state.per, steps=0.0, drafted=0.0, accepted=0.0, positions={}, tokens=None)
        self._use_unit(now, found.per)
        return found

    def _use_unit(self, now: float, per: str) -> None:
        state = self.state
        state.per, state.other_unit = per, 0
        if state.batch is not None:
            state.batch = replace(state.batch, steps=0.0, accepted=0.0, positions={})
        if state.series["acceptance"].batches:
            state.series["acceptance"] = self._series(self.settings.fall)
            self._note(now, f"the server now counts per {per}: what is normal is learned again")
        if self.baseline is not None:
            state.series["baseline"] = self._baseline_series()

    def _probe_steps(self) -> int:
        return max(50, self.settings.min_steps // 10)

    def _set_back(self, now: float) -> None:
        """What lies in the future, because the clock was set back, is taken for now: it would hold the batch up."""
        state, batch = self.state, self.state.batch
        times = [state.began, state.last_look or 0.0, batch.began if batch is not None else 0.0]
        if now >= max(times):
            return
        if max(times) - now > 1:
            self._note(now, f"the clock was set back by {max(times) - now:.0f} s")
        state.began, state.switches = min(state.began, now), []
        if state.last_look is not None:
            state.last_look = min(state.last_look, now)
        if batch is not None:
            batch.began = min(batch.began, now)
        if state.last_batch:
            state.last_batch["ended"] = min(state.last_batch["ended"], now)

    def _recent(self, now: float) -> int:
        """How often the counters went back."""
        seconds, readings = RECENT
        first = self.state.totals.scrapes - readings
        return sum(now - when <= seconds or number >= first for when, number in self.state.switches)

    def _is_several(self, now: float, increment: Increment) -> bool:
        """Whether several servers answer by turns. Their counters make no increments: what the open batch gathered from
        them is dropped."""
        state, before = self.state, self.state.several
        if increment.resets or increment.older:
            mark = (now, state.totals.scrapes)
            state.switches = [*state.switches, *[mark] * (SWITCHES if increment.older else 1)][-SWITCHES:]
        state.several = self._recent(now) >= SWITCHES
        if state.several != before:
            what = "several servers answer by turns: nothing is judged" if state.several else "one server answers again"
            self._note(now, what)
        if not state.several:
            return False
        probed = state.batch or OpenBatch(now)
        state.batch = OpenBatch(
            now, expected=probed.expected, probe_steps=probed.probe_steps, probe_accepted=probed.probe_accepted
        )
        return True

    def scraped(self, now: float, increment: Increment) -> None:
        """One successful look at the server's metrics at `now` (Unix seconds)."""
        state = self.state
        self._set_back(now)
        state.totals.scrapes += 1
        if state.missed_in_row:
            self._note(now, f"answers again after {state.missed_in_row} missed scrapes")
        state.last_look, state.missed_in_row, state.last_failure = now, 0, ""
        if self._is_several(now, increment):
            return
        increment = self._in_unit(now, increment)
        if increment.resets:
            state.totals.resets += 1
            self._note(now, "the server's counters started again: it was restarted")
        if increment.missed:
            state.totals.missed_iterations += increment.missed
            self._note(now, f"{increment.missed} iterations were given to another reader of /metrics")
        batch = state.batch or OpenBatch(now)
        state.batch = batch
        self._look_for_speculation(batch, increment)
        batch.steps += increment.steps
        batch.accepted += increment.accepted
        batch.slow_s += increment.slow_s
        batch.slow_n += increment.slow_n
        for position, count in increment.positions.items():
            batch.positions[position] = batch.positions.get(position, 0.0) + count
        self._close(now)

    def _look_for_speculation(self, batch: OpenBatch, increment: Increment) -> None:
        """By the tokens since the last verification step, less the first of each answer, which no step makes."""
        state = self.state
        if increment.steps:
            state.not_speculating, batch.idle_tokens = "", 0.0
        elif increment.tokens:
            batch.idle_tokens = max(0.0, batch.idle_tokens + increment.tokens - increment.answers)
            if batch.idle_tokens >= IDLE_TOKENS and self._speculated():
                told = f"{batch.idle_tokens:.0f} tokens or more were generated"
                state.not_speculating = f"{told} without a verification step"

    def _speculated(self) -> bool:
        batch = self.state.batch
        return self.baseline is not None or self.state.totals.steps > 0 or (batch is not None and batch.steps > 0)

    def without_speculation(self, now: float, reason: str) -> None:
        """The server answers, and its metrics no longer speak of speculation."""
        state = self.state
        self._set_back(now)
        state.totals.scrapes += 1
        state.last_look, state.missed_in_row, state.not_speculating = now, 0, reason

    @property
    def never_read(self) -> bool:
        """Whether every reading since the watch began failed."""
        state = self.state
        return (
            state.missed_in_row > 0 and not state.totals.scrapes and state.totals.probes == state.totals.probe_failures
        )

    def missed(self, now: float, reason: str) -> None:
        """A look that failed."""
        state = self.state
        self._set_back(now)
        state.totals.missed_scrapes += 1
        state.missed_in_row += 1
        if reason != state.last_failure:
            self._note(now, reason)
        state.last_failure = reason

    def probed(self, now: float, answer: ProbeAnswer, alone: bool) -> None:
        """One answer to a prompt of our own; `alone`: there are no metrics, so it also makes the other series."""
        self._set_back(now)
        state, batch = self.state, self.state.batch or OpenBatch(now)
        state.batch = batch
        state.totals.probes += 1
        failing, looping = self.event_tests()
        state.failures = failing.step(state.failures, answer.error is not None)
        if answer.error is not None:
            state.totals.probe_failures += 1
            state.last_probe_error = answer.error
            self._note(now, f"a probe failed: {answer.error}")
            return
        state.loops = looping.step(state.loops, answer.degenerate is not None)
        state.totals.degenerate += answer.degenerate is not None
        counts = answer.counts if self._one_step_each(answer.counts) else None
        if counts is not None and counts.steps:
            group = context_group(answer.prompt_tokens)
            steps, accepted = state.contexts.get(group, (0.0, 0.0))
            state.contexts[group] = (steps + counts.steps, accepted + counts.accepted)
            expected = (self.baseline.steps.mean if self.baseline else {}).get(answer.category)
            if expected is not None:
                batch.expected += expected * counts.steps
                batch.probe_steps += counts.steps
                batch.probe_accepted += counts.accepted
        if alone:
            state.last_look = now
            if counts is not None:
                batch.steps += counts.steps
                batch.accepted += counts.accepted
            if answer.token_s is not None:
                batch.slow_s, batch.slow_n = batch.slow_s + answer.token_s, batch.slow_n + 1
            self._close(now)

    def _one_step_each(self, counts: TurnCounts | None) -> bool:
        """Whether the pieces of a stream, where counts come from them, are single steps. Some are joined under load;
        with a stream interval above 1, most hold more tokens than a step of the baseline can give."""
        most = self.baseline.draft_length if self.baseline is not None else None
        if counts is None or counts.source != FROM_STREAMS or counts.histogram is None or most is None:
            return True
        return sum(counts.histogram[math.ceil(most) + 1 :]) <= MOST_JOINED * counts.steps

    def event_tests(self) -> tuple[EventTest, EventTest]:
        """Of failing probes, and of degenerate answers."""
        a_day, alarms = self.settings.batches_per_day * 10, self.settings.false_alarms
        return event_test(*FAILURES, a_day, alarms), event_test(*LOOPS, a_day, alarms)

    def _close(self, now: float) -> None:
        """Ends the batch when it is long enough and has enough steps, and gives its means to the tests."""
        batch, state = self.state.batch, self.state
        if batch is None or now - batch.began < self.settings.batch_s or batch.steps < self.settings.min_steps:
            return
        state.totals.batches += 1
        state.totals.steps += batch.steps
        state.totals.accepted += batch.accepted
        self._count_unaccepted(now, batch)
        means = {"acceptance": batch.accepted / batch.steps}
        if self._judges_baseline():
            means["baseline"] = means["acceptance"]
        if batch.slow_n and batch.slow_s > 0:
            means["latency"] = -math.log(batch.slow_s / batch.slow_n)
        if batch.probe_steps >= self._probe_steps() and batch.expected:
            means["probes"] = batch.probe_accepted / batch.expected
        for name, series in state.series.items():
            if name not in means:
                series.missing += 1
            elif series.add(means[name]):
                self._note(now, f"the series {name} began to alarm")
        state.positions = {k: count / batch.steps for k, count in sorted(batch.positions.items())}
        state.last_batch = {"ended": now, "steps": batch.steps, "acceptance": means["acceptance"]}
        if "latency" in means:
            state.last_batch["token_s"] = batch.slow_s / batch.slow_n
        kept = batch if "probes" not in means else OpenBatch(now)
        state.batch = OpenBatch(
            now, expected=kept.expected, probe_steps=kept.probe_steps, probe_accepted=kept.probe_accepted
        )

    def _count_unaccepted(self, now: float, batch: OpenBatch) -> None:
        """Batches in which nothing was accepted are no norm: what follows them is learned from its own first batch."""
        state = self.state
        if not batch.accepted:
            state.unaccepted += batch.steps
            return
        if state.unaccepted >= UNACCEPTED and state.series["acceptance"].test is None:
            state.series["acceptance"] = self._series(self.settings.fall)
            self._note(now, "drafts are accepted again: what is normal is learned from now on")
        state.unaccepted = 0.0

    def _note(self, now: float, text: str) -> None:
        self.state.events = [*self.state.events[-199:], (round(now, 3), text)]

    def alerts(self, now: float) -> list[Problem]:
        """What is wrong at this moment; counts the alerts that are new."""
        found = [*self._series_alerts(), *self._probe_alerts(), *self._server_alerts(now)]
        codes = [problem.code for problem in found]
        for code in set(codes) - set(self.state.firing):
            self.state.totals.alerts[code] = self.state.totals.alerts.get(code, 0) + 1
        self.state.firing = sorted(set(codes))
        return found

    def _series_alerts(self) -> list[Problem]:
        found, url = [], self.state.url
        for name, series in self.state.series.items():
            if not series.alarming or series.reference is None or series.last is None:
                continue
            normal, last = series.reference.mean, series.last
            if name == "latency":
                message = f"{math.exp(-last):.4g} s per token in the last batch; normal is {math.exp(-normal):.4g}"
                found.append(_problem("TS-WATCH-SLOW", url, message, "look at the load and at the server's log"))
                continue
            here = f"{last:.3f} accepted drafts per {self.state.per}; "
            where = {
                "acceptance": f"normal is {normal:.3f}, learned from {series.reference.batches} batches",
                "baseline": f"the baseline's lowest category had {normal:.3f}",
                "probes": f"as a share of the baseline's, category by category; 1 is normal, last {last:.3f}",
            }[name]
            shown = "accepted drafts fell: " if name == "probes" else here
            code = FALLEN[name != "acceptance"]
            found.append(_problem(code, url, shown + where, FALL_REMEDY))
        if self.state.unaccepted >= UNACCEPTED and not any(problem.code in FALLEN for problem in found):
            message = f"no draft was accepted in the last {self.state.unaccepted:.0f} {self.state.per}s"
            found.append(_problem("TS-WATCH-NOTHING-ACCEPTED", url, message, FALL_REMEDY))
        return found

    def _probe_alerts(self) -> list[Problem]:
        state, (failing, looping) = self.state, self.event_tests()
        found = []
        if looping.alarms(state.loops):
            message = f"{state.totals.degenerate} of {state.totals.probes} probes came back empty, as noise or as loops"
            found.append(_problem("TS-WATCH-LOOPS", state.url, message, "trtspec check URL shows which"))
        if failing.alarms(state.failures):
            share = f"{state.totals.probe_failures} of {state.totals.probes} probes failed"
            message = f"{share}; the last one: {state.last_probe_error}"
            found.append(_problem("TS-WATCH-ERRORS", state.url, message, "look at the server's log"))
        return found

    def _server_alerts(self, now: float) -> list[Problem]:
        state, found = self.state, []
        if state.missed_in_row >= GONE_AFTER:
            since = f"for {now - state.last_look:.0f} s" if state.last_look is not None else "since the watch began"
            message = f"no answer {since}, {state.missed_in_row} scrapes in a row: {state.last_failure}"
            found.append(_problem("TS-WATCH-GONE", state.url, message, "look at the server's log; start it again"))
        if state.several:
            told = f"the counters of {state.metrics_url or state.url} go back and forth; nothing is judged"
            message = f"{told}: several servers answer there by turns, or one is restarted again and again"
            remedy = "pass --metrics-url with the address of one server, and start one watch for each"
            found.append(_problem("TS-WATCH-SEVERAL-SERVERS", state.url, message, remedy))
        if state.not_speculating:
            message, remedy = state.not_speculating, "start the server with its head; look for a disabled speculation"
            found.append(_problem("TS-WATCH-NOT-SPECULATING", state.url, message, remedy))
        return found

    def summary(self, now: float) -> dict[str, Any]:
        """The object of --json, less the alerts."""
        state = self.state
        return {
            "url": state.url,
            "source": state.memory.source or ("probes" if state.totals.probes else None),
            "watched_s": round(now - state.began, 1),
            "last_batch": state.last_batch or None,
            "unit": f"accepted drafts per {state.per}",
            "positions": {str(k): round(share, 4) for k, share in state.positions.items()},
            "contexts": {g: {"steps": s, "accepted_per_step": round(a / s, 4)} for g, (s, a) in state.contexts.items()},
            "series": {name: self.series_summary(series) for name, series in state.series.items()},
            "missed_scrapes": state.totals.missed_scrapes,
            "missed_in_row": state.missed_in_row,
            "not_measured": [*self.not_measured, *self._unmeasured()],
            "restarts": state.totals.resets,
            "events": [{"time": when, "what": text} for when, text in state.events[-20:]],
        }

    def _unmeasured(self) -> Iterator[str]:
        """The series that ended batches, or probes, gave nothing to, each with the reason."""
        state, totals = self.state, self.state.totals
        if state.several:
            yield "every series of the metrics: several servers answer by turns (TS-WATCH-SEVERAL-SERVERS)"
        for name, series in state.series.items():
            late = PROBES_LATE if name == "probes" and series.batches else 1
            if name == "baseline" and not self._judges_baseline():
                why = "the server counts draft tokens and names no draft length, and the baseline does not say how "
                yield f"{name}: {why}many were drafted; iteration statistics (enable_iter_perf_stats) count steps"
            elif name == "baseline" and series.test is None:
                yield f"{name}: too few answers, or a category that accepted nothing: there is no fall to look for"
            elif name == "acceptance" and self.state.unaccepted >= UNACCEPTED and series.test is None:
                yield f"{name}: nothing is accepted, so there is no normal range to fall out of"
            elif series.missing < late:
                continue
            elif name == "latency":
                yield f"{name}: the last {series.missing} batches had no seconds per token"
            elif name == "probes" and not totals.probes:
                yield f"{name}: no prompt was sent (--probe TOKENS_PER_MINUTE)"
            elif name == "probes" and state.contexts:
                steps = state.batch.probe_steps if state.batch is not None else 0.0
                yield f"{name}: {steps:.0f} of {self._probe_steps()} steps of the baseline's categories are in"
        if totals.probes > totals.probe_failures and not state.contexts:
            yield f"acceptance of probes: {totals.probes - totals.probe_failures} answers, and none tells its steps"

    def series_summary(self, series: WatchedSeries) -> dict[str, Any]:
        test, reference = series.test, series.reference
        typical = self.state.totals.steps / self.state.totals.batches if self.state.totals.batches else None
        steps = max(typical or 0.0, self.settings.min_steps)
        seconds = series is self.state.series.get("latency")

        def shown(value: float | None) -> float | None:
            return math.exp(-value) if seconds and value is not None else value

        return {
            "batches": series.batches,
            "learned": None if series.recorded else f"{len(series.learned)} of {series.learn} batches",
            "last": shown(series.last),
            "normal": shown(reference.mean) if reference else None,
            "statistic": round(series.statistic, 6),
            "threshold": round(test.threshold, 6) if test else None,
            "finds": math.expm1(series.finds) if seconds and series.finds else series.finds,
            "false_alarms_per_day": series.false_alarms_per_day if test else None,
            "found_within_batches": test.detect_within if test else None,
            "found_within_steps": round(test.detect_within * steps) if test else None,
            "alarming": series.alarming,
            "missing_batches": series.missing,
        }


def _problem(code: str, url: str, message: str, remedy: str) -> Problem:
    return Problem(code, "error", url, message, remedy)


def context_group(prompt_tokens: int) -> str:
    """The group of prompt lengths, named by its upper end: "<=1024" ... ">65536"."""
    upper = next((end for end in CONTEXTS if prompt_tokens <= end), None)
    return f"<={upper}" if upper is not None else f">{CONTEXTS[-1]}"
