"""What an answer must look like (a JSON schema, a regular expression, a Kimi tool call), compiled where it harms none.

A grammar comes from a stranger, and a short one may take minutes and gigabytes. So each is first tried in a process of
lowest priority, which the kernel ends after COMPILE_SECONDS of processor time or beyond COMPILE_BYTES: a fork of one of
two workers that hold the vocabulary (`main`). What passed there is compiled once more here, in a thread of lowest
priority that leaves Python's lock alone, and kept for the next request.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import resource
import signal
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trtspec.checkpoint.tokenizer import KimiTokenizer
from trtspec.engine.request import RequestRefused
from trtspec.errors import MissingDependency

if TYPE_CHECKING:
    from trtspec.engine.bodies import Function

WORKERS = 2
MOST_WAITING = 4  # grammars that wait for a worker; further ones are refused at once
COMPILE_SECONDS, COMPILE_BYTES = 0.5, 256 << 20  # of processor time and of memory, for one grammar
ANSWER_SECONDS = 10.0  # on the clock: a busy machine may give the lowest priority next to nothing
TRIED_TOKENS = 16  # of an answer, so that what is slow after its first token shows
MASK_SECONDS = 0.05  # of processor time for one mask
KEPT_BYTES = 16 << 20  # of compiled grammars
# processor time of all masks of a request, its choices together
REQUEST_SECONDS, REQUEST_SECONDS_PER_TOKEN = 0.25, 0.005
LOWEST = 19  # nice(2)


class GrammarsBusy(Exception):
    """Too many grammars wait to be compiled."""


class Grammar:
    """A grammar on its way through one answer. `spent`: [seconds, masks] of the whole request, shared by its copies."""

    def __init__(self, matcher: Any, spent: list[float] | None = None) -> None:
        self.matcher = matcher
        self.spent = spent if spent is not None else [0.0, 0.0]

    def copy(self) -> Grammar:
        """For another choice of the same request."""
        return Grammar(self.matcher.deep_copy(), self.spent)

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
        self._jobs: asyncio.Queue[tuple[str, str, asyncio.Future[dict[str, Any]]]] = asyncio.Queue()
        self._waiting: set[asyncio.Future[dict[str, Any]]] = set()
        self._running: dict[asyncio.Future[dict[str, Any]], asyncio.subprocess.Process] = {}
        self._workers: list[asyncio.Task[None]] = []
        self._kept: OrderedDict[tuple[str, str], tuple[Any, int]] = OrderedDict()
        self._threads = ThreadPoolExecutor(WORKERS, "grammar", lambda: os.setpriority(os.PRIO_PROCESS, 0, LOWEST))
        self._vocabulary: Any = None
        self._lock = threading.Lock()

    async def compiled(self, kind: str, text: str) -> Grammar:
        """A grammar: a JSON schema (`kind` "json"), a regular expression ("regex") or Lark ("lark").

        Raises ValueError with the reason for a grammar that cannot be or takes too much, GrammarsBusy, and
        MissingDependency without llguidance. Cancelled, it ends what it began.
        """
        found = self._kept.pop((kind, text), None)
        if found is None:
            size = await self._tried(kind, text)
            matcher = await asyncio.get_running_loop().run_in_executor(self._threads, self.compile, kind, text)
            found = matcher, size + len(text)
        self._kept[kind, text] = found
        while sum(size for _, size in self._kept.values()) > KEPT_BYTES:
            self._kept.popitem(last=False)
        return Grammar(found[0].deep_copy())

    async def _tried(self, kind: str, text: str) -> int:
        """Bytes that the grammar takes."""
        _library()
        if len(self._waiting) >= MOST_WAITING:
            raise GrammarsBusy
        while len(self._workers) < WORKERS:
            self._workers.append(asyncio.create_task(self._work()))
        result: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._waiting.add(result)
        self._jobs.put_nowait((kind, text, result))
        try:
            reply = await result
        finally:
            self._waiting.discard(result)
            if result.cancelled() and result in self._running:  # the client left
                self._running[result].send_signal(signal.SIGUSR1)
        if "error" in reply:
            raise ValueError(reply["error"])
        return int(reply["bytes"])

    async def _work(self) -> None:
        """Gives one worker process its jobs, and starts another when it has ended."""
        process: asyncio.subprocess.Process | None = None
        try:
            while True:
                kind, text, result = await self._jobs.get()
                try:
                    process = process or await self._started()
                except OSError as error:
                    if not result.done():
                        result.set_result({"error": f"no process can compile it: {error.strerror}"})
                if result.done() or process is None:
                    continue
                assert process.stdin is not None and process.stdout is not None
                self._waiting.discard(result)
                self._running[result] = process
                process.stdin.write(json.dumps([kind, text]).encode() + b"\n")
                late = asyncio.get_running_loop().call_later(ANSWER_SECONDS, _give_up, result, process)
                line = await process.stdout.readline()
                late.cancel()
                del self._running[result]
                if not line:
                    process = None
                if not result.done():
                    result.set_result(json.loads(line) if line else {"error": "it ended the process that compiles"})
        finally:
            if process is not None:
                process.kill()

    async def _started(self) -> asyncio.subprocess.Process:
        words = [sys.executable, "-m", __name__, str(self.tokenizer.directory), json.dumps(self.ends)]
        pipe, null = asyncio.subprocess.PIPE, asyncio.subprocess.DEVNULL
        process = await asyncio.create_subprocess_exec(*words, stdin=pipe, stdout=pipe, stderr=null)
        assert process.stdout is not None
        await process.stdout.readline()  # it holds the vocabulary
        return process

    def compile(self, kind: str, text: str) -> Any:
        """A matcher, here and now. Raises ValueError."""
        library = _library()
        with self._lock:
            if self._vocabulary is None:
                self._vocabulary = library.tiktoken.lltokenizer_from_encoding(
                    self.tokenizer.encoding, n_vocab=self.tokenizer.vocab_size, eos_token=self.ends
                )
        from_text = {"json": "grammar_from_json_schema", "regex": "grammar_from_regex", "lark": "grammar_from_lark"}
        made = getattr(library.LLMatcher, from_text[kind])(compact_schema(text) if kind == "json" else text)
        limits = library.LLParserLimits(
            step_lexer_fuel=50_000, step_max_items=20_000, max_lexer_states=20_000, verbose_errors=False
        )
        matcher = library.LLMatcher(self._vocabulary, made, log_level=0, limits=limits)
        matcher.compute_bitmask()  # the first is the dearest, and shows what compiling does not
        if matcher.is_error():
            raise ValueError(matcher.get_error().splitlines()[0])
        return matcher

    def close(self) -> None:
        """Ends the workers."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        for worker in self._workers:
            worker.cancel()


def _give_up(result: asyncio.Future[dict[str, Any]], process: asyncio.subprocess.Process) -> None:
    if not result.done():
        result.set_exception(GrammarsBusy())
    process.send_signal(signal.SIGUSR1)


def _library() -> Any:
    try:
        import llguidance
        import llguidance.tiktoken
    except ModuleNotFoundError:
        raise MissingDependency("structured output needs llguidance", "pip install llguidance") from None
    return llguidance


def main() -> None:
    """A worker: `python -m trtspec.engine.grammars DIRECTORY ENDS`. Reads [kind, text] lines, writes {"bytes"} or
    {"error"}. SIGUSR1 ends what it is at. It ends with its stdin."""
    child = 0
    grammars = Grammars(KimiTokenizer(Path(sys.argv[1])), json.loads(sys.argv[2]))
    grammars.compile("regex", "a")

    def end_child(*_: object) -> None:
        with contextlib.suppress(ProcessLookupError):
            if child:
                os.kill(child, signal.SIGKILL)

    signal.signal(signal.SIGUSR1, end_child)
    os.nice(LOWEST)
    print(flush=True)
    for line in sys.stdin:
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                os.write(write, json.dumps(_limited(grammars, *json.loads(line))).encode())
            finally:
                os._exit(0)
        os.close(write)
        with os.fdopen(read) as pipe:
            reply = pipe.read()
        _, status = os.waitpid(child, 0)
        child = 0
        if not reply:
            slow = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGPROF
            most = f"{COMPILE_SECONDS:g} s" if slow else f"{COMPILE_BYTES >> 20} MB"
            reply = json.dumps({"error": f"it takes more than {most} to compile: simplify it"})
        print(reply, flush=True)


def _limited(grammars: Grammars, kind: str, text: str) -> dict[str, Any]:
    """Compiles, and follows one random answer for a few tokens. SIGPROF or the lack of memory may end the process."""
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
            allowed = [at for at, byte in enumerate(mask) if byte]  # bytes of eight tokens, one of which may follow
            if matcher.is_error() or not allowed:
                break
            at = draw.choice(allowed)
            token = draw.choice([8 * at + bit for bit in range(8) if mask[at] >> bit & 1])
            if not matcher.try_consume_tokens([token]):
                break
    except ValueError as error:
        return {"error": str(error)[:500]}
    except MemoryError:
        return {"error": f"it takes more than {COMPILE_BYTES >> 20} MB to compile: simplify it"}
    if slowest > MASK_SECONDS:
        return {"error": "it takes too long to follow: simplify it"}
    return {"bytes": max(0, _data_bytes() - before)}


def _data_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[5]) * resource.getpagesize()


def compact_schema(schema: str) -> str:
    """The schema with one way to write each value: where any white space may stand, a small model writes nothing else.

    Raises ValueError for what is no JSON object.
    """
    try:
        value = json.loads(schema)
    except RecursionError:
        raise ValueError("the schema is nested too deeply") from None
    if not isinstance(value, dict):
        raise ValueError("the schema is not a JSON object")
    return json.dumps({**value, "x-guidance": {"whitespace_flexible": False}})


def tool_call_grammar(functions: Sequence[Function], several: bool, opened: bool = False) -> str:
    """Lark grammar of a Kimi tool-call section that calls these functions, one or several times; of what follows its
    first mark where that is already there (`opened`).

    Its marks are special tokens; a call's id is `functions.NAME:NUMBER`; arguments follow the function's own schema.
    """
    lines = []
    for index, function in enumerate(functions):
        schema = compact_schema(json.dumps(function.parameters or {"type": "object"}))
        lines += [
            f"call{index}: <|tool_call_begin|> name{index} <|tool_call_argument_begin|> args{index} <|tool_call_end|>",
            f"name{index}: {json.dumps('functions.' + function.name + ':')} /[0-9]{{1,3}}/",
            f"args{index}: %json {schema}",
        ]
    calls = " | ".join(f"call{index}" for index in range(len(functions)))
    begin = "" if opened else "<|tool_calls_section_begin|> "
    start = f"start: {begin}call{'+' if several else ''} <|tool_calls_section_end|>"
    return "\n".join([start, f"call: {calls}", *lines])


if __name__ == "__main__":
    main()
