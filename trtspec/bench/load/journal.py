"""Journal of a run of `bench`: the file answers.jsonl.

The journal contains every answer with its texts, usage and the time of each chunk. An answer is
written as soon as it is complete, so a killed run loses no complete answer. A thread writes the
journal, so a slow disk delays no time stamp. `--resume` does not request a recorded answer again.
An interrupted conversation continues after its last recorded answer.
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
    """Load on a server: a number of conversations in flight, or a rate of new conversations.

    concurrency: number of conversations in flight, 0 with a rate
    rate: new conversations per second, None without a rate
    category: only category of questions that is sent, "" for all
    """

    concurrency: int
    rate: float | None = None
    category: str = ""

    @property
    def label(self) -> str:
        """Name of the load in reports."""
        return self.category or level_label(self.concurrency, self.rate)


@dataclass(frozen=True)
class Round:
    """Answers of one endpoint in a round, received by one process.

    A round is a part of the questions at one load. A round that was interrupted and resumed has one
    `Round` per process.

    number: index of the round at its load
    seconds: wall time of the process for its answers
    counts: numbers of steps, drafted and accepted tokens in the answers
    complete: False if the process was killed before the end of the round
    """

    level: LoadLevel
    number: int
    answers: list[Answer]
    seconds: float
    counts: list[TurnCounts] = field(default_factory=list)
    complete: bool = True


@dataclass(frozen=True)
class AnswerRecord:
    """Line of the journal: the start of a process, an answer, or the end of a round.

    round: name of the round, "" for the start of a process
    segment: number of earlier processes that worked on the run
    answer: answer with times in seconds after the start of its round, None in other lines
    seconds: wall time of a round at its end
    counts: speculation in a round at its end, None in other lines
    """

    round: str = ""
    segment: Count = 0
    answer: Answer | None = None
    seconds: NonNegativeFloat = 0.0
    counts: list[TurnCounts] | None = None


class RunJournal:
    """Journal of a run, written by a thread. A journal without a path records nothing.

    path: file of the journal
    header: settings of the run, which must be equal if an existing journal is continued
    restart: whether an existing journal is replaced
    stored: records of earlier processes by name of the round, and by segment
    segment: number of earlier processes that worked on the run
    """

    def __init__(self, path: Path | None, header: Mapping[str, Any], restart: bool = False) -> None:
        self.journal = None
        if path:
            self.journal = Journal(path, dict(header), restart=restart, remedy=RESUME_REMEDY)
        self._thread = ThreadPoolExecutor(1)
        self._pending_writes: list[Future[None]] = []
        self.stored: dict[str, dict[int, list[AnswerRecord]]] = {}
        self.segment = 0

    def answered_by(self, servers: Mapping[str, DetectedServer]) -> None:
        """Reads the records of earlier processes and records the start of this process.

        `servers`: the servers of this run by endpoint name. Raises UsageError if the recorded
        answers are from other servers.
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

        `origin`: start of the round as time.perf_counter(), from which recorded times count.
        """
        fields = asdict(answer)
        fields["started"] = answer.started - origin
        fields["finished"] = answer.finished - origin
        chunks = [[round(when - origin, 6), size] for when, size in answer.chunks]
        fields["chunks"] = chunks
        self._write_in_round(round_name, f"{answer.question}|{answer.turn}", answer=fields)

    def end(self, round_name: str, ended: Round) -> None:
        """Writes the end of a round. Raises TrtspecError if the journal could not be written."""
        counts = [asdict(count) for count in ended.counts]
        self._write_in_round(round_name, "end", seconds=ended.seconds, counts=counts)
        pending_writes = self._pending_writes
        self._pending_writes = []
        # waits for the thread, whose errors are raised here
        for future in pending_writes:
            future.result()

    def rounds(self, round_name: str, level: LoadLevel, number: int) -> list[Round]:
        """Returns the recorded answers of a round, one `Round` per earlier process.

        Failed answers are left out. Times are seconds after the start of the round in the process.
        """
        rounds = []
        for _, entries in sorted(self.stored.get(round_name, {}).items()):
            answers = good([entry.answer for entry in entries if entry.answer is not None])
            # without an answer there is no time at which the round ended
            if not answers:
                continue
            # a process that was killed recorded no end of the round, so the last answer ends it
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
            # a journal without an answer is deleted, because there is nothing to resume
            if not any("answer" in entry for entry in self.journal.done.values()):
                self.journal.path.unlink(missing_ok=True)
            self.journal.close()

    def _write_in_round(self, round_name: str, key: str, **fields: Any) -> None:
        """Writes a record of a round. `key`: name of the record, unique in this process's round."""
        full_key = f"{round_name}|{self.segment}|{key}"
        self._write(full_key, round=round_name, segment=self.segment, **fields)

    def _write(self, key: str, **fields: Any) -> None:
        """Passes a record to the thread that writes the journal. `key`: unique in the journal."""
        if self.journal:
            future = self._thread.submit(self.journal.record, key, **fields)
            self._pending_writes.append(future)


def good(answers: Sequence[Answer]) -> list[Answer]:
    """Returns the answers without an error. `--resume` requests the other answers again."""
    return [answer for answer in answers if not answer.error]
