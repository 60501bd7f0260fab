"""Grammars of answers (a JSON schema, a regular expression, a Kimi tool call), compiled safely.

A grammar comes from a client, and even a short grammar may take minutes and gigabytes to compile.
So each grammar is first compiled on trial in a fork of a process that holds the vocabulary
(`main`). The fork has a low priority. The kernel ends the fork after COMPILE_SECONDS of processor
time, and gives it no more than COMPILE_BYTES of memory. A grammar that passed is compiled again in
the server's process, by a thread of low priority that releases Python's lock, and is cached.
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

MAX_WAITING = 4  # grammars that wait for a trial; further grammars are refused at once
COMPILE_SECONDS = 0.5  # seconds of processor time for one grammar
COMPILE_BYTES = 256 << 20  # bytes of memory for one grammar
TOO_DEAR = (
    f"it takes more than {COMPILE_SECONDS:g} s or {COMPILE_BYTES >> 20} MB to compile: simplify it"
)
# Wall-clock seconds that a grammar waits for its turn, and that its trial may take, before the
# client must try again. A busy machine gives the trial a tenth of a core. The limit is generous,
# because a repeated trial starts from the beginning and would never finish.
TURN_SECONDS = 0.5
ANSWER_SECONDS = 10.0
TRIED_TOKENS = 16  # tokens of the trial's answer: some grammars are slow only after the first token
MASK_SECONDS = 0.05  # seconds of processor time for one mask in the trial
CACHE_ENTRIES = 8  # number of compiled grammars in the cache
CACHE_ENTRY_BYTES = 1 << 20
CACHE_PIN_S = 5.0  # seconds after its last use in which a flood of others cannot evict a grammar
LIVE_BYTES = 1 << 30  # bytes of all grammars of waiting and running requests
# Seconds of processor time for all masks of a request and its choices: a base, and a part that
# grows with the number of masks.
REQUEST_SECONDS, REQUEST_SECONDS_PER_TOKEN = 0.25, 0.005
LOW = 5  # niceness: on a full machine such a thread gets a third of the engine's processor time


class GrammarsBusy(Exception):
    """Error: too many grammars wait or are in use, so the client should try again."""


class Grammar:
    """A compiled grammar of one request. Each answer follows its own copy.

    matcher: llguidance matcher at the current position of the answer.
    end_ids: ids of the tokens that end an answer.
    spent: [seconds of processor time, number of masks] of all copies, shared by them.
    size: number of bytes of memory. 0 if the grammar came from the cache.
    """

    def __init__(
        self,
        matcher: Any,
        end_ids: Sequence[int] = (),
        spent: list[float] | None = None,
        size: int = 0,
    ) -> None:
        self.matcher = matcher
        self.end_ids = end_ids
        self.size = size
        self.spent = spent if spent is not None else [0.0, 0.0]

    def copy(self) -> Grammar:
        """Returns a copy for one answer, at the same position. The copies share `spent`."""
        return Grammar(self.matcher.deep_copy(), self.end_ids, self.spent)

    @property
    def slow(self) -> bool:
        """Whether the masks of this request took more than REQUEST_SECONDS_PER_TOKEN on average."""
        seconds, masks = self.spent
        return seconds > REQUEST_SECONDS_PER_TOKEN * (1 + masks)

    def mask(self) -> bytes:
        """Returns the tokens that may follow, as one bit per token of the vocabulary.

        Raises RequestRefused if the masks of this request took too long.
        """
        seconds, masks = self.spent
        if seconds > REQUEST_SECONDS + REQUEST_SECONDS_PER_TOKEN * masks:
            raise RequestRefused("the form of the answer takes too long to follow: simplify it")
        began = time.thread_time()
        mask: bytes = self.matcher.compute_bitmask()
        self.spent[0] += time.thread_time() - began
        self.spent[1] += 1
        return mask

    def consume(self, token: int) -> bool:
        """Advances by `token` if the grammar allows it. Returns whether it does."""
        return bool(self.matcher.try_consume_tokens([token]))

    def rollback(self, count: int) -> None:
        """Takes back the last `count` consumed tokens."""
        self.matcher.rollback(count)

    @property
    def fault(self) -> str:
        """First line of the matcher's error. "" if there is no error."""
        return str(self.matcher.get_error()).partition("\n")[0]


class Grammars:
    """Compiler and cache of grammars for one tokenizer. One event loop may use it.

    `end_ids`: ids of the tokens that end an answer.
    """

    def __init__(self, tokenizer: KimiTokenizer, end_ids: Sequence[int]) -> None:
        self.tokenizer = tokenizer
        self.end_ids = list(end_ids)
        # Matcher and monotonic time of its last use, by (syntax, text). Longest unused first.
        self._cache: dict[tuple[str, str], tuple[Any, float]] = {}
        self._live = weakref.WeakSet[Grammar]()
        self._thread = ThreadPoolExecutor(
            1, "grammar", lambda: os.setpriority(os.PRIO_PROCESS, 0, LOW)
        )
        self._turn = asyncio.Lock()
        self._waiting = 0
        self._starting = asyncio.Lock()
        # The process of `main`. It receives the socket of each trial through `_control`.
        self._forking: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._vocabulary: Any = None

    async def compiled(self, syntax: str, text: str) -> Grammar:
        """Returns the compiled grammar of `text`. `syntax`: "json" (schema), "regex" or "lark".

        Raises ValueError with the reason if the grammar is invalid or too expensive. Raises
        GrammarsBusy if too many grammars wait or are in use. Cancelling ends the trial.
        """
        # A cached grammar is taken out and stored again below, which makes it the latest entry.
        matcher, _ = self._cache.pop((syntax, text), (None, 0.0))
        size = 0
        if not matcher:
            size = await self._tried(syntax, text)
            loop = asyncio.get_running_loop()
            matcher = await loop.run_in_executor(self._thread, self.compile, syntax, text)
        now = time.monotonic()
        # A full cache evicts its oldest entry only after CACHE_PIN_S without use. Otherwise the new
        # grammar is not cached.
        oldest = next(iter(self._cache), None)
        is_full = len(self._cache) >= CACHE_ENTRIES
        if is_full and oldest and now - self._cache[oldest][1] > CACHE_PIN_S:
            del self._cache[oldest]
        if len(self._cache) < CACHE_ENTRIES and size + len(text) <= CACHE_ENTRY_BYTES:
            self._cache[syntax, text] = matcher, now
        grammar = Grammar(matcher, self.end_ids, size=size)
        self._live.add(grammar)
        return grammar

    async def _tried(self, syntax: str, text: str) -> int:
        """Compiles a grammar on trial in a fork, and returns its size in bytes.

        Raises ValueError and GrammarsBusy under the same conditions as `compiled`.
        """
        if self._waiting > MAX_WAITING:
            raise GrammarsBusy
        self._waiting += 1
        try:
            control = await self._started()
            await asyncio.wait_for(self._turn.acquire(), TURN_SECONDS)
            try:
                request = json.dumps([syntax, text]).encode()
                reply = await asyncio.wait_for(self._ask(control, request), ANSWER_SECONDS)
            finally:
                self._turn.release()
        except (TimeoutError, BlockingIOError):
            # BlockingIOError: the process takes no further socket, because it has too many trials.
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

    async def _ask(self, control: socket.socket, request: bytes) -> dict[str, Any]:
        """Sends a request to a new fork, and returns the reply: `bytes` or `error`.

        If this call is cancelled, the connection closes, which ends the fork.
        """
        server_end, fork_end = socket.socketpair()
        with fork_end:
            socket.send_fds(control, [b"."], [fork_end.fileno()])
        reader, writer = await asyncio.open_connection(sock=server_end)
        try:
            writer.write(request)
            writer.write_eof()
            reply = await reader.read()
            if not reply:
                # The fork ended without a reply, because it reached one of the limits.
                return {"error": TOO_DEAR}
            return dict(json.loads(reply))
        finally:
            writer.close()

    async def _started(self) -> socket.socket:
        """Returns the control socket of the process that forks. Starts the process if needed."""
        async with self._starting:
            if self._control is None or self._forking is None or self._forking.poll() is not None:
                self._control, child_end = socket.socketpair()
                command = [
                    sys.executable,
                    "-m",
                    __name__,
                    str(self.tokenizer.directory),
                    json.dumps(self.end_ids),
                ]
                with child_end:
                    null = subprocess.DEVNULL
                    self._forking = subprocess.Popen(
                        command, stdin=child_end.fileno(), stdout=null, stderr=null
                    )
                self._control.setblocking(False)
                # The process sends a byte after it has loaded the vocabulary.
                await asyncio.get_running_loop().sock_recv(self._control, 1)
            return self._control

    def compile(self, syntax: str, text: str) -> Any:
        """Returns a matcher of the grammar `text`, compiled in this process.

        Raises ValueError if the grammar is invalid or too large.
        """
        if self._vocabulary is None:
            self._vocabulary = llguidance.tiktoken.lltokenizer_from_encoding(
                self.tokenizer.encoding, n_vocab=self.tokenizer.vocab_size, eos_token=self.end_ids
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
        # glibc keeps freed memory until malloc_trim. Other C libraries have no such function.
        getattr(ctypes.CDLL(None), "malloc_trim", bool)(0)
        return matcher

    def close(self) -> None:
        """Ends the compiling thread and the process that forks."""
        self._thread.shutdown(wait=False, cancel_futures=True)
        if self._forking is not None:
            self._forking.kill()


def main() -> None:
    """Runs the process that forks: `python -m trtspec.engine.grammars DIRECTORY END_IDS`.

    DIRECTORY holds the tokenizer, and END_IDS is a JSON list of token ids. stdin is a socket that
    passes one further socket per trial. Each fork reads [syntax, text] from the further socket, and
    writes {"bytes": SIZE} or {"error": REASON}. The process ends if stdin closes.
    """
    control = socket.socket(fileno=0)
    grammars = Grammars(KimiTokenizer(Path(sys.argv[1])), json.loads(sys.argv[2]))
    grammars.compile("regex", "a")  # loads the vocabulary, which all forks share
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps the forks
    os.nice(LOW)
    control.send(b".")
    while fds := socket.recv_fds(control, 1, 1)[1]:
        with socket.socket(fileno=fds[0]) as connection:
            if os.fork() == 0:
                try:
                    request = b"".join(iter(lambda: connection.recv(1 << 16), b""))
                    threading.Thread(target=_end_with, args=(connection,), daemon=True).start()
                    syntax, text = json.loads(request)
                    reply = _try_within_limits(grammars, syntax, text)
                    connection.sendall(json.dumps(reply).encode())
                finally:
                    os._exit(0)  # a fork must not continue the loop of its parent


def _end_with(connection: socket.socket) -> None:
    """Ends this process as soon as the server closes its end of the connection."""
    poll = select.poll()
    poll.register(connection, 0)  # without event flags, only a closed connection is reported
    poll.poll()
    os._exit(0)


def _try_within_limits(grammars: Grammars, syntax: str, text: str) -> dict[str, Any]:
    """Compiles a grammar and follows a random answer of TRIED_TOKENS tokens, under limits.

    Returns {"bytes": size of the grammar} or {"error": reason}. It must run in a fork, because the
    limits stay set and the kernel may end the process.
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
            # Each byte of the mask has the bits of eight tokens.
            nonzero = [index for index, byte in enumerate(mask) if byte]
            if matcher.is_error() or not nonzero:
                break
            index = draw.choice(nonzero)
            token = draw.choice([8 * index + bit for bit in range(8) if mask[index] >> bit & 1])
            if not matcher.try_consume_tokens([token]):
                break
    except ValueError as error:
        return {"error": str(error)[:500]}
    except MemoryError:
        return {"error": TOO_DEAR}
    if slowest > MASK_SECONDS:
        return {"error": "it takes too long to follow: simplify it"}
    return {"bytes": max(1, _data_bytes() - before)}  # never 0, the size of a cached grammar


def _data_bytes() -> int:
    """Size of this process's data segment in bytes, which RLIMIT_DATA limits."""
    return int(psutil.Process().memory_info().data)


def compact_schema(schema: str) -> str:
    """Returns the JSON schema with an option of llguidance that forbids optional white space.

    If white space were allowed, a small model might write nothing else. Raises ValueError if the
    schema is not a JSON object, or is nested too deeply.
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
