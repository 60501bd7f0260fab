"""answers.jsonl, the journal of a run of `bench`: every answer with its texts, usage and the time of each chunk.

A thread writes an answer as soon as it is complete, so that a slow disk delays no clock and a killed run loses nothing.
`--resume` asks for no answer again: an interrupted conversation resumes behind its last recorded answer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from pydantic import NonNegativeFloat

from trtspec.bench.results import level_label
from trtspec.checkpoint.writer import Journal
from trtspec.client.client import Answer
from trtspec.client.servers import Count, DetectedServer, TurnCounts

ANSWERS = "answers.jsonl"
RESUME_REMEDY = "give the URLs and options that it was started with, or start over with `force`"


@dataclass(frozen=True)
class LoadLevel:
    """One load: `concurrency` conversations in flight, or with `rate` so many new ones per second and no `concurrency`.
    `category`: its questions are those of one category."""

    concurrency: int
    rate: float | None = None
    category: str = ""

    @property
    def label(self) -> str:
        return self.category or level_label(self.concurrency, self.rate)


@dataclass(frozen=True)
class Round:
    """What one process asked of one endpoint in a round of a load; a resumed round has several.

    `seconds` of wall time. `counts`: speculation in its answers.
    `complete`: False if the process ended before all were answered."""

    level: LoadLevel
    number: int
    answers: list[Answer]
    seconds: float
    counts: list[TurnCounts] = field(default_factory=list)
    complete: bool = True


@dataclass(frozen=True)
class AnswerRecord:
    """A line of the journal: a process begins (without a round), an answer, or the end of a round (with `counts`)."""

    round: str = ""
    segment: Count = 0
    answer: Answer | None = None
    seconds: NonNegativeFloat = 0.0
    counts: list[TurnCounts] | None = None


class RunJournal:
    """The journal of a run; without a path it keeps nothing. `segment` counts the processes that worked on it."""

    def __init__(self, path: Path | None, header: Mapping[str, Any], restart: bool = False) -> None:
        self.journal = (
            Journal(path, dict(header), restart=restart, remedy=RESUME_REMEDY) if path else None
        )
        self._thread = ThreadPoolExecutor(1)
        self._written: list[Future[None]] = []
        # entries by round (endpoint, label of the load and number), and by the process that wrote them
        self.stored: dict[str, dict[int, list[AnswerRecord]]] = {}
        self.segment = 0

    def answered_by(self, servers: Mapping[str, DetectedServer]) -> None:
        """Reads what earlier processes recorded. Raises UsageError if other servers gave those answers."""
        if self.journal is None:
            return
        self.journal.answered_by({name: server.identity for name, server in servers.items()})
        for entry in self.journal.entries(AnswerRecord).values():
            if entry.round:
                segments = self.stored.setdefault(entry.round, {})
                segments.setdefault(entry.segment, []).append(entry)
            else:
                self.segment += 1
        self._write(f"begin {self.segment}")

    def record(self, round_name: str, answer: Answer, origin: float) -> None:
        """One complete answer of a round; its times are kept from `origin`, the beginning of the round."""
        fields = asdict(answer) | {
            "started": answer.started - origin,
            "finished": answer.finished - origin,
        }
        fields["chunks"] = [[round(when - origin, 6), size] for when, size in answer.chunks]
        self._write_of(round_name, f"{answer.question}|{answer.turn}", answer=fields)

    def end(self, round_name: str, found: Round) -> None:
        """A round came to its end. Raises TrtspecError if the journal could not be written."""
        counts = [asdict(count) for count in found.counts]
        self._write_of(round_name, "end", seconds=found.seconds, counts=counts)
        written, self._written = self._written, []
        for future in written:
            future.result()

    def rounds(self, round_name: str, level: LoadLevel, number: int) -> list[Round]:
        """What each earlier process recorded of a round: answers without an error, with times from its beginning."""
        rounds = []
        for _, entries in sorted(self.stored.get(round_name, {}).items()):
            answers = good([entry.answer for entry in entries if entry.answer is not None])
            if not answers:
                continue
            end = next((entry for entry in entries if entry.counts is not None), None)
            if end is None:  # the process was killed
                seconds = max(answer.finished for answer in answers)
                killed = Round(level, number, answers, seconds, complete=False)
                rounds.append(killed)
            else:
                counts = end.counts or []
                rounds.append(Round(level, number, answers, end.seconds, counts))
        return rounds

    def kept(self) -> int:
        """Answers of earlier processes, which are not asked again."""
        entries = [
            entry for each in self.stored.values() for entries in each.values() for entry in entries
        ]
        return sum(entry.answer is not None and not entry.answer.error for entry in entries)

    def __enter__(self) -> RunJournal:
        return self

    def __exit__(self, *_: object) -> None:
        """A journal without a single answer is removed: there is nothing to continue."""
        self._thread.shutdown(wait=True)
        if self.journal:
            if not any("answer" in entry for entry in self.journal.done.values()):
                self.journal.path.unlink(missing_ok=True)
            self.journal.close()

    def _write_of(self, round_name: str, key: str, **fields: Any) -> None:
        self._write(
            f"{round_name}|{self.segment}|{key}", round=round_name, segment=self.segment, **fields
        )

    def _write(self, key: str, **fields: Any) -> None:
        if self.journal:
            self._written.append(self._thread.submit(self.journal.record, key, **fields))


def good(answers: Sequence[Answer]) -> list[Answer]:
    """Those without an error; `--resume` asks the others again."""
    return [answer for answer in answers if not answer.error]
