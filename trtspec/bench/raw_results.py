"""The journal of a run of `bench`, raw.jsonl: every answer with its texts, usage and the time of each chunk.

It is written as soon as an answer is complete, so that a run which is interrupted or killed loses none. `--resume`
keeps those of conversations that came to their end and holds the others again from their beginning, because the
server's cache of their prefix is gone. It is written by a thread, because a slow disk must not delay the clock of the
other answers.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from trtspec.checkpoint.writer import Journal, differences
from trtspec.client.client import Answer
from trtspec.client.servers import DetectedServer, TurnCounts
from trtspec.errors import TrtspecError, UsageError

RAW_FILE = "raw.jsonl"
RESUME_REMEDY = "give the URLs and options that it was started with, or start over with --force"


@dataclass(frozen=True)
class PartName:
    """Which part of a run: an endpoint, a level (or a category), a round of it."""

    endpoint: str
    level: str
    number: int

    def key(self, segment: int, *rest: object) -> str:
        return "|".join(map(str, (self.endpoint, self.level, self.number, segment, *rest)))


@dataclass(frozen=True)
class StoredPart:
    """What one process recorded of a part: answers with times from its own beginning, and the counters' word where it
    came to the end."""

    answers: list[Answer]
    counts: list[TurnCounts]
    seconds: float | None

    @property
    def asked_again(self) -> bool:
        """Whether its answers were counted together and some of them failed or are lost."""
        return bool(self.counts) and sum(count.answers for count in self.counts) != len(self.answers)


class RawResults:
    """The journal of a run; without a path nothing is kept. `segment` counts the processes that worked on it, `servers`
    holds what answered as each endpoint."""

    def __init__(self, path: Path | None, header: Mapping[str, Any], restart: bool = False) -> None:
        self.journal = Journal(path, dict(header), restart=restart, remedy=RESUME_REMEDY) if path else None
        self._thread = ThreadPoolExecutor(1)
        self._written: list[Future[None]] = []
        self.stored: dict[PartName, dict[int, list[dict[str, Any]]]] = {}
        self.servers: dict[str, dict[str, Any]] = {}
        starts = 0
        for key, entry in (self.journal.done if self.journal else {}).items():
            if key.startswith("begin "):
                starts += 1
            elif key.startswith("server "):
                self.servers[entry["endpoint"]] = entry["server"]
            else:
                name = PartName(entry["endpoint"], entry["level"], entry["round"])
                self.stored.setdefault(name, {}).setdefault(entry["segment"], []).append(entry)
        self.segment = starts
        self._write(f"begin {starts}", {})

    def served_by(self, endpoint: str, server: DetectedServer) -> None:
        """Notes what answers as `endpoint`. Raises UsageError where its recorded answers are another server's."""
        found, before = server.to_dict(), self.servers.get(endpoint, {})
        if any(part.endpoint == endpoint for part in self.stored):
            known = {key: value for key, value in before.items() if None not in (value, found.get(key))}
            changed = differences(known, {key: found[key] for key in known}, endpoint)
            if changed:
                message = f"{self.journal.path if self.journal else ''} holds answers of another server"
                raise UsageError(f"{message}: {'; '.join(changed)}", RESUME_REMEDY)
            found = {key: before.get(key) if value is None else value for key, value in found.items()}
        self.servers[endpoint] = found
        self._write(f"server {endpoint}", {"endpoint": endpoint, "server": found})

    def record(self, part: PartName, answer: Answer, origin: float) -> None:
        """One complete answer; its times are kept from `origin`, the beginning of its part."""
        fields = asdict(answer)
        fields |= {"started": answer.started - origin, "finished": answer.finished - origin}
        fields["chunks"] = [[round(when - origin, 6), size] for when, size in answer.chunks]
        self._write(part.key(self.segment, answer.question, answer.turn), {**self._named(part), "answer": fields})

    def end(self, part: PartName, seconds: float, counts: list[TurnCounts]) -> None:
        """A part came to its end after so many seconds; `counts` from the server's counters."""
        fields = {"seconds": seconds, "counts": [asdict(count) for count in counts]}
        self._write(part.key(self.segment, "end"), {**self._named(part), **fields})
        self.flush()

    def parts(self, part: PartName) -> list[StoredPart]:
        """What earlier processes recorded of a part, in their order."""
        found = []
        for entries in dict(sorted(self.stored.get(part, {}).items())).values():
            answers = [_answer(entry["answer"]) for entry in entries if "answer" in entry]
            ends = [entry for entry in entries if "counts" in entry]
            counts = [TurnCounts(**_tupled(count)) for entry in ends for count in entry["counts"]]
            found.append(StoredPart(answers, counts, ends[-1]["seconds"] if ends else None))
        return found

    def kept(self, requests: Mapping[str, int]) -> int:
        """Answers of earlier processes that are not asked again; `requests` of each question."""
        stored = itertools.chain.from_iterable(self.parts(name) for name in self.stored)
        return sum(len(whole_conversations(part.answers, requests)) for part in stored if not part.asked_again)

    def flush(self) -> None:
        """Waits until all is on disk. Raises TrtspecError when it could not be written."""
        written, self._written = self._written, []
        try:
            for future in written:
                future.result()
        except OSError as error:
            path = self.journal.path if self.journal else ""
            remedy = "make room, then give the same command with --resume"
            raise TrtspecError(f"{path} cannot be written: {error.strerror or error}", remedy) from None

    def close(self) -> None:
        """Ends the run. A journal without a single answer is removed: there is nothing to continue."""
        self._thread.shutdown(wait=True)
        if self.journal:
            if not any("answer" in entry for entry in self.journal.done.values()):
                self.journal.path.unlink(missing_ok=True)
            self.journal.close()

    def __enter__(self) -> RawResults:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _named(self, part: PartName) -> dict[str, Any]:
        return {"endpoint": part.endpoint, "level": part.level, "round": part.number, "segment": self.segment}

    def _write(self, key: str, fields: dict[str, Any]) -> None:
        if self.journal:
            self._written.append(self._thread.submit(self.journal.record, key, **fields))


def _answer(fields: dict[str, Any]) -> Answer:
    return Answer(**{**fields, "chunks": [(when, size) for when, size in fields["chunks"]]})


def _tupled(count: dict[str, Any]) -> dict[str, Any]:
    return {**count, "histogram": tuple(count["histogram"]) if count["histogram"] is not None else None}


def whole_conversations(answers: list[Answer], requests: Mapping[str, int]) -> list[Answer]:
    """The answers of conversations that came to their end without an error; the others are held again."""
    done: dict[str, set[int]] = {}
    for answer in answers:
        if not answer.error:
            done.setdefault(answer.question, set()).add(answer.turn)
    whole = {question for question, turns in done.items() if len(turns) == requests.get(question, -1)}
    return [answer for answer in answers if answer.question in whole and not answer.error]
