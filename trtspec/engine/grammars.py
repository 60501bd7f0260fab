"""Grammars of answers (a JSON schema, a regular expression, a Kimi tool call), compiled safely.

A grammar comes from a stranger, and a short one may take minutes and gigabytes. So each is first
tried in a fork of a process that holds the vocabulary (`main`). The fork has a low priority. The
kernel ends it after COMPILE_SECONDS of processor time or beyond COMPILE_BYTES. A grammar that
passed there is compiled once more here and kept for the next request. A thread of low priority does
it, without Python's lock.
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

MAX_WAITING = 4  # grammars that wait for their turn; further ones are refused at once
COMPILE_SECONDS = 0.5  # of processor time, for one grammar
COMPILE_BYTES = 256 << 20  # of memory, for one grammar
TOO_DEAR = (
    f"it takes more than {COMPILE_SECONDS:g} s or {COMPILE_BYTES >> 20} MB to compile: simplify it"
)
# Times on the clock, before a client is asked to come again: for its turn, and for its try. On a
# busy machine a try gets a tenth of a core. A try that is given up begins again: given up too
# early, it would never end.
TURN_SECONDS = 0.5
ANSWER_SECONDS = 10.0
TRIED_TOKENS = 16  # of an answer: some grammars are slow only after the first token
MASK_SECONDS = 0.05  # of processor time for one mask
CACHE_ENTRIES = 8  # compiled grammars
CACHE_ENTRY_BYTES = 1 << 20
CACHE_PIN_S = 5.0  # after its last use: a flood does not push a grammar out before
LIVE_BYTES = 1 << 30  # of the grammars that requests wait or run with
# processor time of all masks of a request, its choices together
REQUEST_SECONDS, REQUEST_SECONDS_PER_TOKEN = 0.25, 0.005
LOW = 5  # nice(2): where processors lack, a third of what the engine gets


class GrammarsBusy(Exception):
    """Too many grammars wait to be compiled."""


class Grammar:
    """A grammar of one request. Each answer follows its own copy.

    ends: the tokens that end an answer.
    spent: [seconds, masks] of all copies.
    size: bytes. 0 if it was not compiled for this request alone.
    """

    def __init__(
        self,
        matcher: Any,
        ends: Sequence[int] = (),
        spent: list[float] | None = None,
        size: int = 0,
    ) -> None:
        self.matcher = matcher
        self.ends = ends
        self.size = size
        self.spent = spent if spent is not None else [0.0, 0.0]

    def copy(self) -> Grammar:
        """A copy for one answer, from its first token."""
        return Grammar(self.matcher.deep_copy(), self.ends, self.spent)

    @property
    def slow(self) -> bool:
        """Whether its masks have taken more than their share so far."""
        return self.spent[0] > REQUEST_SECONDS_PER_TOKEN * (1 + self.spent[1])

    def mask(self) -> bytes:
        """The tokens that may follow, one bit per token of the vocabulary.

        Raises RequestRefused if the masks of this request took too long.
        """
        if self.spent[0] > REQUEST_SECONDS + REQUEST_SECONDS_PER_TOKEN * self.spent[1]:
            raise RequestRefused("the form of the answer takes too long to follow: simplify it")
        began = time.thread_time()
        mask: bytes = self.matcher.compute_bitmask()
        self.spent[0] += time.thread_time() - began
        self.spent[1] += 1
        return mask

    def consume(self, token: int) -> bool:
        """Appends `token` if it may follow. Returns whether it may."""
        return bool(self.matcher.try_consume_tokens([token]))

    def rollback(self, count: int) -> None:
        self.matcher.rollback(count)

    @property
    def fault(self) -> str:
        """The first line of the matcher's error. "" without an error."""
        return str(self.matcher.get_error()).partition("\n")[0]


class Grammars:
    """Compiles for one tokenizer, from one event loop. `ends`: the tokens that end an answer."""

    def __init__(self, tokenizer: KimiTokenizer, ends: Sequence[int]) -> None:
        self.tokenizer = tokenizer
        self.ends = list(ends)
        # by (syntax, text), in the order of their last use: (matcher, time of the last use)
        self._cache: dict[tuple[str, str], tuple[Any, float]] = {}
        self._live = weakref.WeakSet[Grammar]()
        self._thread = ThreadPoolExecutor(
            1, "grammar", lambda: os.setpriority(os.PRIO_PROCESS, 0, LOW)
        )
        self._turn = asyncio.Lock()
        self._waiting = 0
        self._starting = asyncio.Lock()
        # the process of `main`, which gets each try through `_control`
        self._forking: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._vocabulary: Any = None

    async def compiled(self, syntax: str, text: str) -> Grammar:
        """The grammar of a text. `syntax`: "json" (a JSON schema), "regex" or "lark".

        Raises ValueError with the reason for an invalid or too expensive grammar. Raises
        GrammarsBusy. If cancelled, ends the try that it began.
        """
        matcher, _ = self._cache.pop((syntax, text), (None, 0.0))
        size = 0
        if not matcher:
            size = await self._tried(syntax, text)
            loop = asyncio.get_running_loop()
            matcher = await loop.run_in_executor(self._thread, self.compile, syntax, text)
        now = time.monotonic()
        oldest = next(iter(self._cache), None)
        is_full = len(self._cache) >= CACHE_ENTRIES
        if is_full and oldest and now - self._cache[oldest][1] > CACHE_PIN_S:
            del self._cache[oldest]
        if len(self._cache) < CACHE_ENTRIES and size + len(text) <= CACHE_ENTRY_BYTES:
            self._cache[syntax, text] = matcher, now
        grammar = Grammar(matcher, self.ends, size=size)
        self._live.add(grammar)
        return grammar

    async def _tried(self, syntax: str, text: str) -> int:
        """Tries a grammar in a fork. Returns the bytes that it takes. Raises as `compiled` does."""
        if self._waiting > MAX_WAITING:
            raise GrammarsBusy
        self._waiting += 1
        try:
            control = await self._started()
            await asyncio.wait_for(self._turn.acquire(), TURN_SECONDS)
            try:
                asked = json.dumps([syntax, text]).encode()
                reply = await asyncio.wait_for(self._ask(control, asked), ANSWER_SECONDS)
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
        """The reply of a new fork. Leaving early ends the fork, which sees the connection close."""
        ours, theirs = socket.socketpair()
        with theirs:
            socket.send_fds(control, [b"."], [theirs.fileno()])
        reader, writer = await asyncio.open_connection(sock=ours)
        try:
            writer.write(asked)
            writer.write_eof()
            answer = await reader.read()
            if not answer:
                # The kernel ended the process.
                return {"error": TOO_DEAR}
            return dict(json.loads(answer))
        finally:
            writer.close()

    async def _started(self) -> socket.socket:
        """The control socket of the process that forks. Starts the process if none runs."""
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
                # A byte says that the process holds the vocabulary.
                await asyncio.get_running_loop().sock_recv(self._control, 1)
            return self._control

    def compile(self, syntax: str, text: str) -> Any:
        """A matcher, compiled in this process. Raises ValueError if invalid or too large."""
        if self._vocabulary is None:
            self._vocabulary = llguidance.tiktoken.lltokenizer_from_encoding(
                self.tokenizer.encoding, n_vocab=self.tokenizer.vocab_size, eos_token=self.ends
            )
        from_text = {
            "json": "grammar_from_json_schema",
            "regex": "grammar_from_regex",
            "lark": "grammar_from_lark",
        }
        if syntax == "json":
            text = compact_schema(text)
        grammar = getattr(LLMatcher, from_text[syntax])(text)
        limits = LLParserLimits(  # a state of the lexer takes about 2 KB
            step_lexer_fuel=50_000,
            step_max_items=20_000,
            max_lexer_states=5_000,
            verbose_errors=False,
        )
        matcher = LLMatcher(self._vocabulary, grammar, log_level=0, limits=limits)
        # The first mask builds most of the lexer, and fails if the lexer is too large.
        matcher.compute_bitmask()
        if matcher.is_error():
            raise ValueError(matcher.get_error().splitlines()[0])
        # glibc keeps freed memory. Other C libraries have no malloc_trim.
        getattr(ctypes.CDLL(None), "malloc_trim", bool)(0)
        return matcher

    def close(self) -> None:
        """Ends the thread and the process that compile."""
        self._thread.shutdown(wait=False, cancel_futures=True)
        if self._forking is not None:
            self._forking.kill()


def main() -> None:
    """The process that forks: `python -m trtspec.engine.grammars DIRECTORY ENDS`.

    Its stdin is a socket that brings the socket of each try. There it reads [syntax, text] and
    writes {"bytes"} or {"error"}. It ends when its stdin closes.
    """
    control = socket.socket(fileno=0)
    grammars = Grammars(KimiTokenizer(Path(sys.argv[1])), json.loads(sys.argv[2]))
    grammars.compile("regex", "a")
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps the forks
    os.nice(LOW)
    control.send(b".")
    while fds := socket.recv_fds(control, 1, 1)[1]:
        with socket.socket(fileno=fds[0]) as connection:
            if os.fork() == 0:
                try:
                    asked = b"".join(iter(lambda: connection.recv(1 << 16), b""))
                    threading.Thread(target=_end_with, args=(connection,), daemon=True).start()
                    reply = _try_within_limits(grammars, *json.loads(asked))
                    connection.sendall(json.dumps(reply).encode())
                finally:
                    os._exit(0)


def _end_with(connection: socket.socket) -> None:
    """Ends the process when the other end closes the connection."""
    poll = select.poll()
    poll.register(connection, 0)  # hanging up is always reported
    poll.poll()
    os._exit(0)


def _try_within_limits(grammars: Grammars, syntax: str, text: str) -> dict[str, Any]:
    """Compiles a grammar, and follows one random answer for TRIED_TOKENS tokens. Returns the reply.

    Runs in a fork, because the limits stay. SIGPROF or the lack of memory may end the process.
    """
    before = _data_bytes()
    signal.setitimer(signal.ITIMER_PROF, COMPILE_SECONDS)
    resource.setrlimit(resource.RLIMIT_DATA, (before + COMPILE_BYTES, before + COMPILE_BYTES))
    try:
        matcher = grammars.compile(syntax, text)
        slowest = 0.0
        draw = random.Random(0)
        for _ in range(TRIED_TOKENS):
            began = time.thread_time()
            mask = matcher.compute_bitmask()
            slowest = max(slowest, time.thread_time() - began)
            allowed = [index for index, byte in enumerate(mask) if byte]  # eight tokens each
            if matcher.is_error() or not allowed:
                break
            index = draw.choice(allowed)
            token = draw.choice([8 * index + bit for bit in range(8) if mask[index] >> bit & 1])
            if not matcher.try_consume_tokens([token]):
                break
    except ValueError as error:
        return {"error": str(error)[:500]}
    except MemoryError:
        return {"error": TOO_DEAR}
    if slowest > MASK_SECONDS:
        return {"error": "it takes too long to follow: simplify it"}
    return {"bytes": max(1, _data_bytes() - before)}  # 0: a cached grammar


def _data_bytes() -> int:
    return int(psutil.Process().memory_info().data)


def compact_schema(schema: str) -> str:
    """The schema with one way to write each value.

    Where any white space is allowed, a small model writes nothing else. Raises ValueError if the
    schema is not a JSON object.
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
