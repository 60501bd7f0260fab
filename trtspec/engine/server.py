"""The reference server: binds the port, loads target and head, and serves until a signal."""

from __future__ import annotations

import asyncio
import gc
import math
import resource
import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType

import torch
import uvicorn
from fastapi import FastAPI

from trtspec import machine
from trtspec.checkpoint.target_problems import require_target
from trtspec.checkpoint.tokenizer import KimiTokenizer
from trtspec.engine.engine import Engine, EngineOptions
from trtspec.engine.http_api import create_app
from trtspec.engine.prefix import PREFIX_BYTES
from trtspec.engine.request import GenerationRequest
from trtspec.engine.worker import Worker
from trtspec.errors import TrtspecError, signals_handled
from trtspec.models.footprint import MemoryLoad, require_fitting
from trtspec.models.head_weights import load_head, open_head
from trtspec.models.precision import default_dtype, dtype_name
from trtspec.models.weights import load_target

DEFAULT_MAX_SEQ_LEN = 4096
# Smallest hidden size for several threads. Smaller models decode faster with one thread.
SHARED_PRODUCTS_HIDDEN = 1024


@dataclass(frozen=True)
class ServerOptions(EngineOptions):
    """Options of the engine and of its server.

    Args:
        host: host name or address to bind.
        port: port to bind. 0: a free port.
        dtype: data type of the computation. "auto" is bfloat16 if the device computes it natively,
            and float32 otherwise. The ready line names the choice.
        device: torch device.
        max_seq_len: largest number of tokens of a prompt and its output together. 0: the target's
            maximum, but at most 4,096.
        served_model_name: name of the model in requests. None: name of the target's directory.
        max_queue: largest number of waiting requests. Further requests get status 429.
        grace: seconds in which requests in flight may finish after a stop signal.
        api_key: key that requests for all paths but /health must have. None: no key.
        prefix_bytes: size of the prefix cache in bytes. 0: no prefix is reused.
    """

    host: str = "localhost"
    port: int = 8000
    dtype: str = "auto"
    device: str = "cpu"
    max_seq_len: int = 0
    served_model_name: str | None = None
    max_queue: int = 512
    grace: int = 30
    api_key: str | None = field(default=None, repr=False)
    prefix_bytes: int = PREFIX_BYTES


def run(target: Path, head: Path | None, options: ServerOptions) -> None:
    """Serves a target, with an Eagle3 head if given, until SIGTERM or SIGINT.

    Requests in flight are finished first. Raises KeyboardInterrupt after SIGINT. Raises
    TrtspecError if a checkpoint does not load, if the port is taken, or if the engine fails.
    """
    # The port is bound first, because loading the weights takes long and a taken port would waste
    # this time.
    listener = machine.listen(options.host, options.port)
    engine, tokenizer = build_engine(target, head, options)
    torch.set_num_threads(thread_count(engine.target.spec.hidden_size))
    warm_up(engine)
    name = options.served_model_name or target.resolve().name
    _, max_files = resource.getrlimit(resource.RLIMIT_NOFILE)
    # Each connection needs a file. At the usual soft limit, idle clients could block all others.
    resource.setrlimit(resource.RLIMIT_NOFILE, (max_files, max_files))
    app = create_app(engine, tokenizer, name, options.api_key, options.max_queue)
    worker: Worker = app.state.worker
    drafting = "no speculation"
    if engine.draft_len:
        drafting = f"drafter eagle3, draft length {engine.draft_len}"
    reuse = "prefix reuse" if options.prefix_bytes else "no prefix reuse"
    properties = f"{dtype_name(engine.target.dtype)}, {drafting}, {reuse}"
    port = listener.getsockname()[1]
    url = f"http://{options.host}:{port}"
    ready = f"trtspec: serving {name} on {url} ({properties}); next: trtspec bench {url}"
    server = AnnouncingServer(app, worker, ready, options.grace)
    # Garbage collection stops every thread. After `freeze` it skips all objects that exist now,
    # such as the weights.
    gc.collect()
    gc.freeze()
    server.run(sockets=[listener])
    if worker.failure is not None:
        raise TrtspecError(
            f"the engine stopped: {type(worker.failure).__name__}: {worker.failure}",
            "start the server again; with TRTSPEC_DEBUG=1 it prints where the error came from",
        )
    if server.ended_by == signal.SIGINT:
        raise KeyboardInterrupt


def build_engine(
    target: Path, head: Path | None, options: ServerOptions
) -> tuple[Engine, KimiTokenizer]:
    """Loads a target, and a head if given, and returns an engine and the target's tokenizer.

    Raises MissingDependency, before any weight is loaded, if the device is missing or its memory
    is too small.
    """
    device = options.device
    spec = require_target(target).spec
    machine.check_device(device)
    dtype = default_dtype(device) if options.dtype == "auto" else getattr(torch, options.dtype)
    length = options.max_seq_len or min(spec.max_position_embeddings, DEFAULT_MAX_SEQ_LEN)
    load = MemoryLoad(
        device, dtype, options.max_batch_size, length, options.draft_len, options.prefix_bytes
    )
    head_checkpoint = None
    if head is not None:
        head_checkpoint = open_head(head, spec)
    require_fitting(target, spec, head_checkpoint, load)
    tokenizer = KimiTokenizer(target)
    model = load_target(target, dtype=dtype, device=device)
    draft_head = None
    if head is not None:
        draft_head = load_head(head, model, dtype=dtype, device=device)
    return Engine(model, draft_head, replace(options, max_seq_len=length), tokenizer), tokenizer


def warm_up(engine: Engine) -> None:
    """Runs one short generation, so that the first request need not initialise anything.

    Raises TrtspecError if the target computes NaN or infinity.
    """
    # The prefill gives one token. The rest leaves room for a round that verifies all drafts.
    request = GenerationRequest(
        "warm-up", [0] * 8, max_tokens=2 + engine.draft_len, ignore_eos=True, logprobs=1
    )
    output = engine.generate([request])[request.id]
    if not all(math.isfinite(token.logprob) for token in output.logprobs):
        message = f"the target computes NaN or infinity in {dtype_name(engine.target.dtype)}"
        raise TrtspecError(message, "use `dtype` float32")
    engine.reset_counters()


def thread_count(hidden_size: int) -> int:
    """Number of threads for the model: the physical cores of this process, 1 for a small model."""
    if hidden_size < SHARED_PRODUCTS_HIDDEN:
        return 1
    return machine.physical_cores()


class AnnouncingServer(uvicorn.Server):
    """uvicorn server that prints a line after it is ready, and remembers which signal ended it.

    Args:
        app: the app to serve.
        worker: worker of the app's engine. If the engine fails, the server stops.
        ready: line to print to stderr.
        grace: seconds in which requests in flight may finish after a signal.
    """

    def __init__(self, app: FastAPI, worker: Worker, ready: str, grace: int) -> None:
        # `shutdown` ends the requests after the grace period. uvicorn's own, later timeout is for
        # requests that hang even then.
        timeout = grace + 60
        super().__init__(
            uvicorn.Config(
                app,
                http="h11",
                log_level="error",
                timeout_graceful_shutdown=timeout,
                lifespan="on",
            )
        )
        self.worker = worker
        self.ready = ready
        self.grace = grace
        self.ended_by: int | None = None
        worker.on_death = self.end

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Starts serving, and prints the ready line if the start succeeds."""
        await super().startup(sockets)
        if self.started:
            sys.stderr.write(self.ready + "\n")
            sys.stderr.flush()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Waits for requests in flight, and ends them after the grace period."""
        reason = f"the server was stopped, and the answer took more than {self.grace} s"
        late = asyncio.get_running_loop().call_later(self.grace, self.worker.give_up, reason)
        await super().shutdown(sockets)
        late.cancel()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Handles SIGTERM and SIGINT while the server runs, in place of uvicorn's handlers."""
        with signals_handled(self._end, signal.SIGTERM, signal.SIGINT):
            yield

    def end(self) -> None:
        """Stops the server. The worker calls it after the engine failed."""
        self.should_exit = True

    def _end(self, number: int, frame: FrameType | None) -> None:
        """Stops the server after the signal `number`."""
        self.ended_by = number
        self.handle_exit(number, frame)
