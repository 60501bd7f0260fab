"""answers.jsonl, the journal of a run of `bench`.

It holds every answer with its texts, usage and the time of each chunk. A thread writes an answer as
soon as it is complete, so that a slow disk delays no clock and a killed run loses nothing.
`--resume` asks for no answer again: an interrupted conversation resumes behind its last recorded
answer.
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
    """One load: conversations in flight, or a rate of new ones.

    `concurrency`: conversations in flight, 0 with a rate. `rate`: new ones per second. `category`:
    the only category that is asked, "" for all.
    """

    concurrency: int
    rate: float | None = None
    category: str = ""

    @property
    def label(self) -> str:
        return self.category or level_label(self.concurrency, self.rate)


@dataclass(frozen=True)
class Round:
    """The answers of one endpoint to one process in a round of a load. A resumed round has several.

    `seconds`: wall time. `counts`: speculation in its answers. `complete`: False if the process
    ended before all were answered.
    """

    level: LoadLevel
    number: int
    answers: list[Answer]
    seconds: float
    counts: list[TurnCounts] = field(default_factory=list)
    complete: bool = True


@dataclass(frozen=True)
class AnswerRecord:
    """A line of the journal: the start of a process, an answer, or the end of a round.

    A start has no `round`. An end has `counts`.
    """

    round: str = ""
    segment: Count = 0
    answer: Answer | None = None
    seconds: NonNegativeFloat = 0.0
    counts: list[TurnCounts] | None = None


class RunJournal:
    """The journal of a run.

    It keeps nothing without a path. `segment`: earlier processes that worked on the run.
    """

    def __init__(self, path: Path | None, header: Mapping[str, Any], restart: bool = False) -> None:
        self.journal = None
        if path:
            self.journal = Journal(path, dict(header), restart=restart, remedy=RESUME_REMEDY)
        self._thread = ThreadPoolExecutor(1)
        self._written: list[Future[None]] = []
        # by name of the round, and by the process that wrote the entries
        self.stored: dict[str, dict[int, list[AnswerRecord]]] = {}
        self.segment = 0

    def answered_by(self, servers: Mapping[str, DetectedServer]) -> None:
        """Reads the records of earlier processes.

        Raises UsageError if other servers gave those answers.
        """
        if self.journal is None:
            return
        identities = {name: server.identity for name, server in servers.items()}
        self.journal.answered_by(identities)
        for entry in self.journal.entries(AnswerRecord).values():
            if entry.round:
                segments = self.stored.setdefault(entry.round, {})
                segments.setdefault(entry.segment, []).append(entry)
            else:
                self.segment += 1
        self._write(f"begin {self.segment}")

    def record(self, round_name: str, answer: Answer, origin: float) -> None:
        """Writes one complete answer of a round.

        Its times count from `origin`, the beginning of the round.
        """
        fields = asdict(answer)
        fields["started"] = answer.started - origin
        fields["finished"] = answer.finished - origin
        chunks = [[round(when - origin, 6), size] for when, size in answer.chunks]
        fields["chunks"] = chunks
        self._write_of(round_name, f"{answer.question}|{answer.turn}", answer=fields)

    def end(self, round_name: str, ended: Round) -> None:
        """Writes the end of a round. Raises TrtspecError if the journal could not be written."""
        counts = [asdict(count) for count in ended.counts]
        self._write_of(round_name, "end", seconds=ended.seconds, counts=counts)
        written = self._written
        self._written = []
        for future in written:
            future.result()

    def rounds(self, round_name: str, level: LoadLevel, number: int) -> list[Round]:
        """Returns the answers of each earlier process to a round, without failed ones.

        Their times count from the beginning of the round in that process.
        """
        rounds = []
        for _, entries in sorted(self.stored.get(round_name, {}).items()):
            answers = good([entry.answer for entry in entries if entry.answer is not None])
            if not answers:
                continue
            # a process that was killed left no end
            seconds = max(answer.finished for answer in answers)
            stored = Round(level, number, answers, seconds, complete=False)
            for entry in entries:
                if entry.counts is not None:
                    stored = Round(level, number, answers, entry.seconds, entry.counts)
                    break
            rounds.append(stored)
        return rounds

    def __enter__(self) -> RunJournal:
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.shutdown(wait=True)
        if self.journal:
            # without a single answer there is nothing to continue
            if not any("answer" in entry for entry in self.journal.done.values()):
                self.journal.path.unlink(missing_ok=True)
            self.journal.close()

    def _write_of(self, round_name: str, key: str, **fields: Any) -> None:
        full_key = f"{round_name}|{self.segment}|{key}"
        self._write(full_key, round=round_name, segment=self.segment, **fields)

    def _write(self, key: str, **fields: Any) -> None:
        if self.journal:
            future = self._thread.submit(self.journal.record, key, **fields)
            self._written.append(future)


def good(answers: Sequence[Answer]) -> list[Answer]:
    """Returns the answers without an error. `--resume` asks the others again."""
    return [answer for answer in answers if not answer.error]
