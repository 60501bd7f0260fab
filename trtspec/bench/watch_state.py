"""The records of `watch`: how an endpoint is watched, and everything that is kept between runs."""

from __future__ import annotations

from dataclasses import dataclass, field

from trtspec.bench.sequential import WatchedSeries
from trtspec.bench.watch_sources import MetricsMemory

DAY = 86400.0
SCHEMA = 1  # of the state file


@dataclass(frozen=True)
class WatchSettings:
    """How an endpoint is watched. A batch lasts `batch_s` seconds or longer, until it has `min_steps` steps; what is
    normal is learned for `learn_days`. `fall` is the relative fall of accepted drafts per step to find, `slower` the
    relative rise of seconds per token. Each series alarms for nothing at most `false_alarms` times a day. `thinking` is
    the mode of the probes, as for bench; what is learned from them holds for this mode only."""

    batch_s: float = 600.0
    min_steps: int = 500
    learn_days: float = 1.0
    fall: float = 0.15
    slower: float = 0.5
    false_alarms: float = 0.01
    thinking: str | None = None

    @property
    def batches_per_day(self) -> float:
        return DAY / self.batch_s

    @property
    def learn_batches(self) -> int:
        return max(16, round(self.learn_days * self.batches_per_day))


@dataclass
class OpenBatch:
    """What has been gathered since the last batch was closed. `slow_s` over `slow_n`: seconds per token."""

    began: float
    steps: float = 0.0
    accepted: float = 0.0
    positions: dict[int, float] = field(default_factory=dict)
    slow_s: float = 0.0
    slow_n: float = 0.0
    idle_tokens: float = 0.0
    expected: float = 0.0  # accepted drafts that the baseline's categories give for the probes' steps
    probe_steps: float = 0.0
    probe_accepted: float = 0.0


@dataclass
class WatchTotals:
    """Counts since the watch began, for its own metrics."""

    scrapes: int = 0
    missed_scrapes: int = 0
    resets: int = 0
    missed_iterations: int = 0
    steps: float = 0.0
    accepted: float = 0.0
    batches: int = 0
    probes: int = 0
    probe_failures: int = 0
    degenerate: int = 0
    alerts: dict[str, int] = field(default_factory=dict)


@dataclass
class WatchState:
    """Everything that is kept between runs. `contexts` maps a group of prompt lengths to (steps, accepted)."""

    url: str
    began: float
    settings: WatchSettings
    baseline: str = ""
    schema: int = SCHEMA
    metrics_url: str = ""  # where they are not at `url`
    last_look: float | None = None
    missed_in_row: int = 0
    last_failure: str = ""
    not_speculating: str = ""
    unaccepted: float = 0.0  # steps of the ended batches since one had an accepted draft
    per: str = "step"
    other_unit: int = 0  # readings in a row in another unit
    switches: list[tuple[float, int]] = field(default_factory=list)  # when counters went back: time, number of readings
    several: bool = False  # servers answer by turns
    last_probe_error: str = ""
    memory: MetricsMemory = field(default_factory=MetricsMemory)
    batch: OpenBatch | None = None
    series: dict[str, WatchedSeries] = field(default_factory=dict)
    loops: float = 0.0
    failures: float = 0.0
    positions: dict[int, float] = field(default_factory=dict)
    contexts: dict[str, tuple[float, float]] = field(default_factory=dict)
    last_batch: dict[str, float] = field(default_factory=dict)
    totals: WatchTotals = field(default_factory=WatchTotals)
    events: list[tuple[float, str]] = field(default_factory=list)
    firing: list[str] = field(default_factory=list)
