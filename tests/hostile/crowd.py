"""Clients of a server under attack: good streams, a crowd of attackers, and a watch on health.

The streams know their right answers.
"""

import asyncio
import json
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from tests.hostile.requests import COMPLETIONS, LARGE, Attack, Attacks, post

PATIENCE = 300.0  # seconds that an attacker waits for an answer
LEAVES_AFTER = 1.0
BLOCK = b" " * 65536


@dataclass
class Right:
    """Greedy requests, and what serial decoding without drafts makes of them."""

    prompts: list[list[int]]
    lengths: list[int]
    texts: list[str]

    def body(self, index: int, stream: bool) -> dict[str, object]:
        asked = {"prompt": self.prompts[index], "max_tokens": self.lengths[index], "temperature": 0}
        return {**asked, "stream": stream}


@dataclass
class Good:
    """Clients whose streams are asked again and again."""

    url: str
    known: Right
    right: int = 0
    refused: int = 0
    wrong: list[str] = field(default_factory=list)

    def run(self, number: int, stop: threading.Event) -> None:
        with httpx.Client(timeout=300) as client:
            while not stop.is_set():
                self.ask(client, number % len(self.known.prompts))
                number += 7

    def ask(self, client: httpx.Client, index: int) -> None:
        body = self.known.body(index, stream=True)
        text, ended = "", False
        try:
            with client.stream("POST", f"{self.url}/v1/completions", json=body) as answer:
                if answer.status_code == 429:
                    self.refused += 1
                    return
                for line in answer.iter_lines():
                    ended = ended or line == "data: [DONE]"
                    if line.startswith("data: {"):
                        text += json.loads(line[6:])["choices"][0]["text"]
        except Exception as error:
            self.wrong.append(f"prompt {index}: {error!r}")
            return
        if ended and text == self.known.texts[index]:
            self.right += 1
        else:
            self.wrong.append(f"prompt {index}: {text!r} instead of {self.known.texts[index]!r}")


def streamed_text(answer: bytes) -> str | None:
    """The text of a stream that came to its end, else None."""
    lines = [line for line in answer.split(b"\n") if line.startswith(b"data: ")]
    if not lines or lines[-1] != b"data: [DONE]":
        return None
    chunks = [json.loads(line[6:]) for line in lines[:-1]]
    return "".join(choice["text"] for chunk in chunks for choice in chunk["choices"])


@dataclass
class Watch:
    """Watches /health and a process's memory (bytes) from a process of its own, until ended."""

    host: str
    port: int
    pid: int
    longest: float = 0.0
    failed: list[str] = field(default_factory=list)
    memory: list[int] = field(default_factory=list)

    def start(self) -> None:
        words = [
            sys.executable,
            "-m",
            "tests.hostile.watch",
            self.host,
            str(self.port),
            str(self.pid),
        ]
        root = Path(__file__).parents[2]
        self.process = subprocess.Popen(
            words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=root
        )

    def end(self) -> None:
        told = json.loads(self.process.communicate("")[0])
        self.longest, self.failed, self.memory = told["longest"], told["failed"], told["memory"]


@dataclass
class Crowd:
    """Attackers of one server, `width` at once.

    `statuses` counts the answers, None where there was none.
    """

    host: str
    port: int
    width: int = 32
    sent: int = 0
    kinds: Counter[str] = field(default_factory=Counter)
    statuses: Counter[int | None] = field(default_factory=Counter)
    bad: list[str] = field(default_factory=list)

    async def run(self, make: Callable[[], Attack], count: int) -> None:
        async def attacker() -> None:
            while self.sent < count:
                self.sent += 1
                await self.attack(make())

        await asyncio.gather(*(attacker() for _ in range(self.width)))

    async def attack(self, attack: Attack) -> None:
        self.kinds[attack.name] += 1
        try:
            answer = await asyncio.wait_for(self._exchange(attack), PATIENCE)
        except TimeoutError:
            self.bad.append(f"{attack.name}: no end within {PATIENCE:g} s: {attack.data[:300]!r}")
            return
        except OSError:
            answer = b""
        status = int(answer[9:12]) if answer[:7] == b"HTTP/1." and answer[9:12].isdigit() else None
        self.statuses[status] += 1
        failed = status is not None and (
            status >= 500 or b'"type":"server_error"' in answer.replace(b'": ', b'":')
        )
        if failed and not (
            status == 503 and b"retry-after" in answer
        ):  # grammars wait for their turn to compile
            self.bad.append(f"{attack.name}: {answer[-300:]!r} for {attack.data[:600]!r}")

    async def ask(self, body: dict[str, object]) -> bytes:
        """The whole answer to one completion, headers included."""
        data = post(COMPLETIONS, json.dumps(body).encode())
        return await asyncio.wait_for(self._exchange(Attack("good", data)), PATIENCE)

    async def _exchange(self, attack: Attack) -> bytes:
        reader, writer = await asyncio.open_connection(self.host, self.port)
        try:
            writer.write(attack.data)
            if attack.manner == "leaves":
                await asyncio.wait_for(reader.read(200), LEAVES_AFTER)
                return b""
            if attack.manner == "large":
                await self._pour(writer, chunked=b"chunked" in attack.data)
            if attack.manner == "half-closed":
                writer.write_eof()
            return await reader.read()
        except TimeoutError:
            if attack.manner != "leaves":
                raise
            return b""
        finally:
            writer.transport.abort()

    async def _pour(self, writer: asyncio.StreamWriter, chunked: bool) -> None:
        for _ in range(LARGE // len(BLOCK)):
            writer.write(b"%x\r\n%b\r\n" % (len(BLOCK), BLOCK) if chunked else BLOCK)
            await writer.drain()


@dataclass
class Soak:
    """Many requests at once: a tenth malformed, a third abandoned; the others want the truth."""

    crowd: Crowd
    known: Right
    attacks: Attacks
    ended: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)

    async def run(self, count: int, width: int) -> None:
        numbers = iter(range(count))

        async def client() -> None:
            for number in numbers:
                await self._one(number)

        await asyncio.gather(*(client() for _ in range(width)))

    async def _one(self, number: int) -> None:
        kind = (
            "malformed"
            if number % 10 == 0
            else "leaves"
            if number % 3 == 0 or number % 30 == 1
            else "good"
        )
        index, stream = number % len(self.known.prompts), number % 4 < 2
        try:
            if kind == "malformed":
                answer = await self.crowd.ask(
                    {**self.known.body(index, stream), "temperature": "warm"}
                )
                right = answer.startswith(b"HTTP/1.1 400 ")
            elif kind == "leaves":
                answer, right = b"", True
                data = post(COMPLETIONS, json.dumps(self.known.body(index, stream)).encode())
                await self.crowd.attack(Attack(kind, data[: len(data) - number % 2], "leaves"))
            else:
                answer = await self.crowd.ask(self.known.body(index, stream))
                told = answer.partition(b"\r\n\r\n")[2]
                text = streamed_text(answer) if stream else json.loads(told)["choices"][0]["text"]
                right = text == self.known.texts[index]
        except (TimeoutError, OSError, ValueError, KeyError) as error:
            answer, right = repr(error).encode(), False
        self.ended[kind] += 1
        if not right:
            self.wrong.append(f"request {number}, {kind}: {answer[-300:]!r}")
