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

from pydantic import TypeAdapter

from trtspec.bench.results import level_label
from trtspec.checkpoint.writer import Journal, differences
from trtspec.client.client import Answer
from trtspec.client.servers import DetectedServer, TurnCounts
from trtspec.errors import TrtspecError, UsageError

ANSWERS = "answers.jsonl"
ANSWERS_IN, COUNTS_IN = TypeAdapter(list[Answer]), TypeAdapter(list[TurnCounts])
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

    `seconds` of wall time. `most`: conversations that were in flight at once. `counts`: speculation in its answers.
    `complete`: False if the process ended before all were answered."""

    level: LoadLevel
    number: int
    answers: list[Answer]
    seconds: float
    most: int
    counts: list[TurnCounts] = field(default_factory=list)
    complete: bool = True


class RunJournal:
    """The journal of a run; without a path it keeps nothing. `segment` counts the processes that worked on it."""

    def __init__(self, path: Path | None, header: Mapping[str, Any], restart: bool = False) -> None:
        self.journal = (
            Journal(path, dict(header), restart=restart, remedy=RESUME_REMEDY) if path else None
        )
        self._thread = ThreadPoolExecutor(1)
        self._written: list[Future[None]] = []
        # entries by round (endpoint, label of the load and number), and by the process that wrote them
        self.stored: dict[str, dict[int, list[dict[str, Any]]]] = {}
        self.servers: dict[str, dict[str, Any]] = {}
        self.segment = 0
        for key, entry in (self.journal.done if self.journal else {}).items():
            if key.startswith("begin "):
                self.segment += 1
            elif key.startswith("server "):
                self.servers[entry["endpoint"]] = entry["server"]
            else:
                self.stored.setdefault(entry["round"], {}).setdefault(entry["segment"], []).append(
                    entry
                )
        self._write(f"begin {self.segment}")

    def served_by(self, endpoint: str, server: DetectedServer) -> None:
        """Notes what answers as `endpoint`. Raises UsageError if another server gave its recorded answers."""
        found, before = asdict(server), self.servers.get(endpoint, {})
        if any(name.startswith(f"{endpoint}|") for name in self.stored):
            known = {
                key: value for key, value in before.items() if None not in (value, found.get(key))
            }
            if changed := differences(known, {key: found[key] for key in known}, endpoint):
                where = self.journal.path if self.journal else ""
                raise UsageError(
                    f"{where} holds answers of another server: {'; '.join(changed)}", RESUME_REMEDY
                )
            found = {
                key: before.get(key) if value is None else value for key, value in found.items()
            }
        self.servers[endpoint] = found
        self._write(f"server {endpoint}", endpoint=endpoint, server=found)

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
        self._write_of(round_name, "end", seconds=found.seconds, most=found.most, counts=counts)
        written, self._written = self._written, []
        try:
            for future in written:
                future.result()
        except OSError as error:
            path = self.journal.path if self.journal else ""
            remedy = "make room, then give the same command with `resume`"
            raise TrtspecError(
                f"{path} cannot be written: {error.strerror or error}", remedy
            ) from None

    def rounds(self, round_name: str, level: LoadLevel, number: int) -> list[Round]:
        """What each earlier process recorded of a round: answers without an error, with times from its beginning."""
        found = []
        for _, entries in sorted(self.stored.get(round_name, {}).items()):
            answers = good(
                ANSWERS_IN.validate_python(
                    [entry["answer"] for entry in entries if "answer" in entry]
                )
            )
            if not answers:
                continue
            end = next((entry for entry in entries if "counts" in entry), None)
            # a process that was killed has left no end
            last = end or {
                "seconds": max(answer.finished for answer in answers),
                "most": level.concurrency,
            }
            counts = COUNTS_IN.validate_python(last.get("counts", []))
            found.append(
                Round(
                    level,
                    number,
                    answers,
                    last["seconds"],
                    last["most"],
                    counts,
                    complete=end is not None,
                )
            )
        return found

    def kept(self) -> int:
        """Answers of earlier processes, which are not asked again."""
        entries = [
            entry for each in self.stored.values() for entries in each.values() for entry in entries
        ]
        return sum("answer" in entry and not entry["answer"]["error"] for entry in entries)

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
