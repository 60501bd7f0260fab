"""answers.jsonl, the journal of a run of `bench`: every answer with its texts, usage and the time of each chunk.

A thread writes an answer as soon as it is complete, so that a slow disk delays no clock and a killed run loses nothing.
`--resume` asks for no answer again: an interrupted conversation resumes behind its last recorded answer.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from trtspec.checkpoint.writer import Journal, differences
from trtspec.client.client import Answer
from trtspec.client.servers import DetectedServer, TurnCounts
from trtspec.errors import TrtspecError, UsageError

ANSWERS = "answers.jsonl"
RESUME_REMEDY = "give the URLs and options that it was started with, or start over with `force`"


@dataclass(frozen=True)
class PartName:
    """A part of a run: an endpoint, a level (or a category), a round of it."""

    endpoint: str
    level: str
    number: int


@dataclass(frozen=True)
class StoredPart:
    """What one process recorded of a part: answers with times from its beginning; counters and seconds where it came to
    the end."""

    answers: list[Answer]
    counts: list[TurnCounts]
    seconds: float | None


class RunJournal:
    """The journal of a run; without a path it keeps nothing. `segment` counts the processes that worked on it."""

    def __init__(self, path: Path | None, header: Mapping[str, Any], restart: bool = False) -> None:
        self.journal = Journal(path, dict(header), restart=restart, remedy=RESUME_REMEDY) if path else None
        self._thread = ThreadPoolExecutor(1)
        self._written: list[Future[None]] = []
        self.stored: dict[PartName, dict[int, list[dict[str, Any]]]] = {}
        self.servers: dict[str, dict[str, Any]] = {}
        self.segment = 0
        for key, entry in (self.journal.done if self.journal else {}).items():
            if key.startswith("begin "):
                self.segment += 1
            elif key.startswith("server "):
                self.servers[entry["endpoint"]] = entry["server"]
            else:
                name = PartName(entry["endpoint"], entry["level"], entry["round"])
                self.stored.setdefault(name, {}).setdefault(entry["segment"], []).append(entry)
        self._write(f"begin {self.segment}")

    def served_by(self, endpoint: str, server: DetectedServer) -> None:
        """Notes what answers as `endpoint`. Raises UsageError if another server gave its recorded answers."""
        found, before = asdict(server), self.servers.get(endpoint, {})
        if any(part.endpoint == endpoint for part in self.stored):
            known = {key: value for key, value in before.items() if None not in (value, found.get(key))}
            if changed := differences(known, {key: found[key] for key in known}, endpoint):
                where = self.journal.path if self.journal else ""
                raise UsageError(f"{where} holds answers of another server: {'; '.join(changed)}", RESUME_REMEDY)
            found = {key: before.get(key) if value is None else value for key, value in found.items()}
        self.servers[endpoint] = found
        self._write(f"server {endpoint}", endpoint=endpoint, server=found)

    def record(self, part: PartName, answer: Answer, origin: float) -> None:
        """One complete answer; its times are kept from `origin`, the beginning of its part."""
        fields = asdict(answer) | {"started": answer.started - origin, "finished": answer.finished - origin}
        fields["chunks"] = [[round(when - origin, 6), size] for when, size in answer.chunks]
        self._write_of(part, f"{answer.question}|{answer.turn}", answer=fields)

    def end(self, part: PartName, seconds: float, counts: list[TurnCounts]) -> None:
        """A part came to its end after so many seconds; `counts` from the server's counters. Raises TrtspecError if the
        journal could not be written."""
        self._write_of(part, "end", seconds=seconds, counts=[asdict(count) for count in counts])
        written, self._written = self._written, []
        try:
            for future in written:
                future.result()
        except OSError as error:
            path = self.journal.path if self.journal else ""
            remedy = "make room, then give the same command with `resume`"
            raise TrtspecError(f"{path} cannot be written: {error.strerror or error}", remedy) from None

    def parts(self, part: PartName) -> list[StoredPart]:
        """What earlier processes recorded of a part, in their order."""
        found = []
        for entries in dict(sorted(self.stored.get(part, {}).items())).values():
            ends = [entry for entry in entries if "counts" in entry]
            answers = [
                Answer(**{**entry["answer"], "chunks": [tuple(chunk) for chunk in entry["answer"]["chunks"]]})
                for entry in entries
                if "answer" in entry
            ]
            counts = [
                TurnCounts(**{**count, "histogram": tuple(h) if (h := count["histogram"]) is not None else None})
                for entry in ends
                for count in entry["counts"]
            ]
            found.append(StoredPart(answers, counts, ends[-1]["seconds"] if ends else None))
        return found

    def kept(self) -> int:
        """Answers of earlier processes, which are not asked again."""
        return sum(len(good(part.answers)) for name in self.stored for part in self.parts(name))

    def __enter__(self) -> RunJournal:
        return self

    def __exit__(self, *_: object) -> None:
        """A journal without a single answer is removed: there is nothing to continue."""
        self._thread.shutdown(wait=True)
        if self.journal:
            if not any("answer" in entry for entry in self.journal.done.values()):
                self.journal.path.unlink(missing_ok=True)
            self.journal.close()

    def _write_of(self, part: PartName, key: str, **fields: Any) -> None:
        named = {"endpoint": part.endpoint, "level": part.level, "round": part.number, "segment": self.segment}
        self._write("|".join([*map(str, named.values()), key]), **named, **fields)

    def _write(self, key: str, **fields: Any) -> None:
        if self.journal:
            self._written.append(self._thread.submit(self.journal.record, key, **fields))


def good(answers: list[Answer]) -> list[Answer]:
    """Those without an error; `--resume` asks the others again."""
    return [answer for answer in answers if not answer.error]
