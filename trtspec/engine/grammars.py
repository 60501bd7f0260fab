"""What an answer must look like (a JSON schema, a regular expression, a Kimi tool call), compiled where it harms none.

A grammar comes from a stranger, and a short one may take minutes and gigabytes. So each is first tried in a fork of a
process that holds the vocabulary (`main`). The fork has a low priority. The kernel ends it after COMPILE_SECONDS
of processor time or beyond COMPILE_BYTES. What passed there is compiled once more here and kept for the next request,
in a thread of low priority that leaves Python's lock alone.
"""

from __future__ import annotations

import asyncio
import ctypes
import json
import os
import random
import resource
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import llguidance.tiktoken
import psutil
from llguidance import LLMatcher, LLParserLimits

from trtspec.checkpoint.tokenizer import KimiTokenizer
from trtspec.engine.request import RequestRefused

MOST_WAITING = 4  # grammars that wait for their turn; further ones are refused at once
COMPILE_SECONDS, COMPILE_BYTES = 0.5, 256 << 20  # of processor time and of memory, for one grammar
TOO_DEAR = (
    f"it takes more than {COMPILE_SECONDS:g} s or {COMPILE_BYTES >> 20} MB to compile: simplify it"
)
# On the clock, before a client is asked to come again: for its turn, and for its try. On a busy machine a try gets a
# tenth of a core, and one that is given up begins again: given up too early, it would never end.
TURN_SECONDS, ANSWER_SECONDS = 0.5, 10.0
TRIED_TOKENS = 16  # of an answer, so that what is slow after its first token shows
MASK_SECONDS = 0.05  # of processor time for one mask
# Compiled grammars, and the bytes of the largest. One that was used in the last seconds is not pushed out by a flood.
KEPT, KEPT_BYTES, KEPT_SECONDS = 8, 1 << 20, 5.0
LIVE_BYTES = 1 << 30  # of the grammars that requests wait or run with
# processor time of all masks of a request, its choices together
REQUEST_SECONDS, REQUEST_SECONDS_PER_TOKEN = 0.25, 0.005
LOW = 5  # nice(2): where processors lack, a third of what the engine gets


class GrammarsBusy(Exception):
    """Too many grammars wait to be compiled."""


class Grammar:
    """A grammar of one request, of which each answer follows a copy. `ends`: the tokens that end an answer; `spent`:
    [seconds, masks] of all copies; `size`: bytes, 0 where it was not compiled for this request alone."""

    def __init__(
        self,
        matcher: Any,
        ends: Sequence[int] = (),
        spent: list[float] | None = None,
        size: int = 0,
    ) -> None:
        self.matcher, self.ends, self.size = matcher, ends, size
        self.spent = spent if spent is not None else [0.0, 0.0]

    def copy(self) -> Grammar:
        """For one answer, from its first token."""
        return Grammar(self.matcher.deep_copy(), self.ends, self.spent)

    @property
    def slow(self) -> bool:
        """Whether its masks have taken more than their share so far."""
        return self.spent[0] > REQUEST_SECONDS_PER_TOKEN * (1 + self.spent[1])

    def mask(self) -> bytes:
        """One bit per token of the vocabulary: what may follow. Raises RequestRefused where that takes too long."""
        if self.spent[0] > REQUEST_SECONDS + REQUEST_SECONDS_PER_TOKEN * self.spent[1]:
            raise RequestRefused("the form of the answer takes too long to follow: simplify it")
        began = time.thread_time()
        mask: bytes = self.matcher.compute_bitmask()
        self.spent[0] += time.thread_time() - began
        self.spent[1] += 1
        return mask

    def consume(self, token: int) -> bool:
        """Whether `token` may follow; if so, it does."""
        return bool(self.matcher.try_consume_tokens([token]))

    def rollback(self, count: int) -> None:
        self.matcher.rollback(count)

    @property
    def fault(self) -> str:
        """The first line of what is wrong, "" where nothing is."""
        return str(self.matcher.get_error()).partition("\n")[0]


class Grammars:
    """Compiles for one tokenizer; `ends` are the tokens that end an answer. Used from one event loop."""

    def __init__(self, tokenizer: KimiTokenizer, ends: Sequence[int]) -> None:
        self.tokenizer, self.ends = tokenizer, list(ends)
        self._kept: dict[tuple[str, str], tuple[Any, float]] = {}  # in the order of their last use
        self._live = weakref.WeakSet[Grammar]()
        self._thread = ThreadPoolExecutor(
            1, "grammar", lambda: os.setpriority(os.PRIO_PROCESS, 0, LOW)
        )
        self._turn, self._waiting = asyncio.Lock(), 0
        self._starting = asyncio.Lock()
        self._forking: subprocess.Popen[bytes] | None = (
            None  # `main`, which gets each try through `_control`
        )
        self._control: socket.socket | None = None
        self._vocabulary: Any = None

    async def compiled(self, kind: str, text: str) -> Grammar:
        """A grammar: a JSON schema (`kind` "json"), a regular expression ("regex") or Lark ("lark").

        Raises ValueError with the reason for a grammar that cannot be or takes too much, and GrammarsBusy. Cancelled,
        it ends what it began.
        """
        matcher, _ = self._kept.pop((kind, text), (None, 0.0))
        size = 0 if matcher else await self._tried(kind, text)
        matcher = matcher or await asyncio.get_running_loop().run_in_executor(
            self._thread, self.compile, kind, text
        )
        now, oldest = time.monotonic(), next(iter(self._kept), None)
        if len(self._kept) >= KEPT and oldest and now - self._kept[oldest][1] > KEPT_SECONDS:
            del self._kept[oldest]
        if len(self._kept) < KEPT and size + len(text) <= KEPT_BYTES:
            self._kept[kind, text] = matcher, now
        grammar = Grammar(matcher, self.ends, size=size)
        self._live.add(grammar)
        return grammar

    async def _tried(self, kind: str, text: str) -> int:
        """Bytes that the grammar takes."""
        if self._waiting > MOST_WAITING:
            raise GrammarsBusy
        self._waiting += 1
        try:
            control = await self._started()
            await asyncio.wait_for(self._turn.acquire(), TURN_SECONDS)
            try:
                reply = await asyncio.wait_for(
                    self._ask(control, json.dumps([kind, text]).encode()), ANSWER_SECONDS
                )
            finally:
                self._turn.release()
        except (TimeoutError, BlockingIOError):
            raise GrammarsBusy from None
        except OSError as error:
            raise ValueError(f"no process can compile it: {error.strerror}") from None
        finally:
            self._waiting -= 1
        if "error" in reply:
            raise ValueError(reply["error"])
        if reply["bytes"] + sum(grammar.size for grammar in self._live) > LIVE_BYTES:
            raise GrammarsBusy
        return int(reply["bytes"])

    async def _ask(self, control: socket.socket, asked: bytes) -> dict[str, Any]:
        """The reply of a new fork. To leave early ends the fork, which sees the connection close."""
        ours, theirs = socket.socketpair()
        with theirs:
            socket.send_fds(control, [b"."], [theirs.fileno()])
        reader, writer = await asyncio.open_connection(sock=ours)
        try:
            writer.write(asked)
            writer.write_eof()
            answer = await reader.read()
            # without an answer, the kernel ended the process
            return dict(json.loads(answer)) if answer else {"error": TOO_DEAR}
        finally:
            writer.close()

    async def _started(self) -> socket.socket:
        """The control socket of the process that forks, which is started where none runs."""
        async with self._starting:
            if self._control is None or self._forking is None or self._forking.poll() is not None:
                self._control, theirs = socket.socketpair()
                words = [
                    sys.executable,
                    "-m",
                    __name__,
                    str(self.tokenizer.directory),
                    json.dumps(self.ends),
                ]
                with theirs:
                    null = subprocess.DEVNULL
                    self._forking = subprocess.Popen(
                        words, stdin=theirs.fileno(), stdout=null, stderr=null
                    )
                self._control.setblocking(False)
                # a byte says that the process holds the vocabulary
                await asyncio.get_running_loop().sock_recv(self._control, 1)
            return self._control

    def compile(self, kind: str, text: str) -> Any:
        """A matcher, compiled in this process. Raises ValueError for a text that is no grammar, or a too large one."""
        if self._vocabulary is None:
            self._vocabulary = llguidance.tiktoken.lltokenizer_from_encoding(
                self.tokenizer.encoding, n_vocab=self.tokenizer.vocab_size, eos_token=self.ends
            )
        from_text = {
            "json": "grammar_from_json_schema",
            "regex": "grammar_from_regex",
            "lark": "grammar_from_lark",
        }
        made = getattr(LLMatcher, from_text[kind])(compact_schema(text) if kind == "json" else text)
        limits = LLParserLimits(  # a state of the lexer takes about 2 KB
            step_lexer_fuel=50_000,
            step_max_items=20_000,
            max_lexer_states=5_000,
            verbose_errors=False,
        )
        matcher = LLMatcher(self._vocabulary, made, log_level=0, limits=limits)
        matcher.compute_bitmask()  # the first mask builds most of the lexer, and fails where that is too large
        if matcher.is_error():
            raise ValueError(matcher.get_error().splitlines()[0])
        # glibc keeps freed memory; nothing to do elsewhere
        getattr(ctypes.CDLL(None), "malloc_trim", bool)(0)
        return matcher

    def close(self) -> None:
        """Ends what compiles."""
        self._thread.shutdown(wait=False, cancel_futures=True)
        if self._forking is not None:
            self._forking.kill()


def main() -> None:
    """The process that forks: `python -m trtspec.engine.grammars DIRECTORY ENDS`. Its stdin is a socket that brings the
    socket of each try: [kind, text] come in there, {"bytes"} or {"error"} go out. It ends with its stdin."""
    control = socket.socket(fileno=0)
    grammars = Grammars(KimiTokenizer(Path(sys.argv[1])), json.loads(sys.argv[2]))
    grammars.compile("regex", "a")
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel buries the forks
    os.nice(LOW)
    control.send(b".")
    while fds := socket.recv_fds(control, 1, 1)[1]:
        with socket.socket(fileno=fds[0]) as connection:
            if os.fork() == 0:
                try:
                    asked = b"".join(iter(lambda: connection.recv(1 << 16), b""))
                    threading.Thread(target=_end_with, args=(connection,), daemon=True).start()
                    connection.sendall(
                        json.dumps(_try_within_limits(grammars, *json.loads(asked))).encode()
                    )
                finally:
                    os._exit(0)


def _end_with(connection: socket.socket) -> None:
    """Ends the process when the other end closes the connection."""
    poll = select.poll()
    poll.register(connection, 0)  # hanging up is always reported
    poll.poll()
    os._exit(0)


def _try_within_limits(grammars: Grammars, kind: str, text: str) -> dict[str, Any]:
    """In a fork, whose limits stay: compiles, and follows one random answer for a few tokens. SIGPROF or the lack of
    memory may end the process."""
    before = _data_bytes()
    signal.setitimer(signal.ITIMER_PROF, COMPILE_SECONDS)
    resource.setrlimit(resource.RLIMIT_DATA, (before + COMPILE_BYTES, before + COMPILE_BYTES))
    try:
        matcher = grammars.compile(kind, text)
        slowest, draw = 0.0, random.Random(0)
        for _ in range(TRIED_TOKENS):
            began = time.thread_time()
            mask = matcher.compute_bitmask()
            slowest = max(slowest, time.thread_time() - began)
            allowed = [place for place, byte in enumerate(mask) if byte]  # eight tokens each
            if matcher.is_error() or not allowed:
                break
            place = draw.choice(allowed)
            token = draw.choice([8 * place + bit for bit in range(8) if mask[place] >> bit & 1])
            if not matcher.try_consume_tokens([token]):
                break
    except ValueError as error:
        return {"error": str(error)[:500]}
    except MemoryError:
        return {"error": TOO_DEAR}
    if slowest > MASK_SECONDS:
        return {"error": "it takes too long to follow: simplify it"}
    return {"bytes": max(1, _data_bytes() - before)}  # 0 is a grammar that was known


def _data_bytes() -> int:
    return int(psutil.Process().memory_info().data)


def compact_schema(schema: str) -> str:
    """The schema with one way to write each value: where any white space is allowed, a small model writes nothing else.

    Raises ValueError for what is no JSON object.
    """
    try:
        value = json.loads(schema)
    except RecursionError:
        raise ValueError("the schema is nested too deeply") from None
    if not isinstance(value, dict):
        raise ValueError("the schema is not a JSON object")
    return json.dumps({**value, "x-guidance": {"whitespace_flexible": False}})


if __name__ == "__main__":
    main()
