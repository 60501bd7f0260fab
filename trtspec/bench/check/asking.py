"""Asks a server the exchanges of a check. What reached the journal is never asked again."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

import httpx

from trtspec.bench.check.prompts import Prompts, raw_text, request_of
from trtspec.client.exchange import Exchange, ask, read_recording, to_line
from trtspec.client.servers import DetectedServer
from trtspec.report import Bar

if TYPE_CHECKING:
    from trtspec.bench.questions.datasets import Question
    from trtspec.checkpoint.tokenizer import KimiTokenizer

END_OF_TURN = "<|im_end|>"
MAX_FAILURES = 8  # in a row, after which nothing more is sent
CROWD = 4  # times the concurrency: requests at once in the crowd


@dataclass(kw_only=True)
class Asker:
    """One server, and what it has answered so far. `journal` is appended to; `known` holds its answers."""

    client: httpx.AsyncClient
    server: DetectedServer
    tokenizer: KimiTokenizer
    concurrency: int = 4
    timeout: float = 120.0
    journal: BinaryIO | None = None
    known: dict[bytes, Exchange] = field(default_factory=dict)
    bar: Bar = field(default_factory=Bar)
    requests: int = 0
    tokens: int = 0
    failures: int = 0  # in a row

    async def all(self, wanted: Iterable[Exchange], concurrency: int = 0) -> list[Exchange]:
        """The exchanges with their answers, in order."""
        room = asyncio.Semaphore(concurrency or self.concurrency)

        async def one(asked: Exchange) -> Exchange:
            async with room:
                return await self._ask(asked)

        return list(await asyncio.gather(*map(one, wanted)))

    async def _ask(self, asked: Exchange) -> Exchange:
        line = to_line(asked)
        if line in self.known:
            return self.known[line]
        if self.failures >= MAX_FAILURES:
            return replace(asked, error=f"not asked, after {MAX_FAILURES} failures in a row")
        found = self._finished(await ask(self.client, self.server.model, asked, self.timeout))
        self.failures = self.failures + 1 if found.error and not found.refused else 0
        self.requests += 1
        self.tokens += found.completion_tokens or len(found.token_ids)
        if self.journal and not found.error:
            self.journal.write(to_line(found))
            self.journal.flush()
        self.bar.advance(1)
        return found

    def _finished(self, found: Exchange) -> Exchange:
        """With the end of turn, which some servers leave out of the token ids, and the text before any parser."""
        ids, end = found.token_ids, self.tokenizer.special_tokens.get(END_OF_TURN)
        if not ids:
            return found
        ends = {end, *self.tokenizer.eos_ids}
        if found.finish == "stop" and found.kind not in ("stop", "json", "parameter") and ids[-1] not in ends and end:
            ids = (*ids, end)
        return replace(found, token_ids=ids, raw=raw_text(self.tokenizer, found, ids))


async def record(
    asker: Asker,
    questions: Sequence[Question],
    *,
    samples: int,
    max_tokens: int,
    context: int,
    withheld: Set[str] = frozenset(),
) -> list[Exchange]:
    """Sends all prompts of a check to one server and returns the answers: first prompts, those made from their answers,
    a crowd at CROWD times the concurrency, some after it. `withheld`: parameters that would end the engine."""
    prompts = Prompts(
        tokenizer=asker.tokenizer, questions=questions, samples=samples, max_tokens=max_tokens, context=context,
        crowd_size=CROWD * asker.concurrency, ids=dict(asker.server.adapter.ids), withheld=withheld,
    )  # fmt: skip
    first = list(prompts.first())
    asker.bar.show(0, len(first))
    found = await asker.all(first)
    second, crowd, later = list(prompts.second(found)), prompts.crowd(found), prompts.later(found)
    asker.bar.show(len(first), sum(map(len, (first, second, crowd, later))))
    found += await asker.all(second)
    found += await asker.all(crowd, CROWD * asker.concurrency)
    found += await asker.all(later)
    return found


def open_journal(path: Path) -> tuple[BinaryIO, dict[bytes, Exchange]]:
    """A file to append answers to, and those that it has already, by request. A half-written last line goes."""
    whole = path.read_bytes().rfind(b"\n") + 1 if path.is_file() else 0
    stream = path.open("ab")
    stream.truncate(whole)
    known = read_recording(path) if whole else []
    return stream, {to_line(request_of(one)): one for one in known}
