"""Runs the reference server: loads a target and a head, binds the port, serves until a signal ends it."""

from __future__ import annotations

import os
import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import psutil
import torch
import uvicorn

from trtspec.checkpoint.tokenizer import KimiTokenizer
from trtspec.engine.app import create_app
from trtspec.engine.drafters import DrafterName
from trtspec.engine.engine import Engine, EngineOptions
from trtspec.engine.sequence import GenerationRequest
from trtspec.engine.stats import Totals
from trtspec.errors import TrtspecError, UsageError
from trtspec.models.head_weights import load_head
from trtspec.models.precision import default_dtype, dtype_name
from trtspec.models.weights import load_target

DTYPES = ("auto", "bfloat16", "float32")
DEFAULT_MAX_SEQ_LEN = 4096
SHARED_PRODUCTS_HIDDEN = 1024  # below, a step on one thread is faster than on two (docs/LOG.md)
GRACE_SECONDS = 30


@dataclass(frozen=True)
class ServerOptions:
    """`dtype` auto is bfloat16 where the device computes it natively, else float32; the ready line names the choice.
    `drafter` None is eagle3 with a head. `max_seq_len` None: the target's own maximum, at most 4096."""

    host: str = "localhost"
    port: int = 8000
    dtype: str = "auto"
    device: str = "cpu"
    drafter: DrafterName | None = None
    draft_len: int = 3
    max_batch_size: int = 16
    max_seq_len: int | None = None
    served_model_name: str | None = None


def run(target: Path, head: Path | None, options: ServerOptions) -> None:
    """Serves until SIGTERM (returns) or SIGINT (raises KeyboardInterrupt); requests in flight are finished first.

    Raises TrtspecError when something does not load or the port is taken.
    """
    listener = bind(options.host, options.port)  # before the weights: a taken port should not cost a load
    engine, tokenizer = build_engine(target, head, options)
    torch.set_num_threads(thread_count(engine.target.spec.hidden_size))
    warm_up(engine)
    name = options.served_model_name or target.resolve().name
    how = (
        f"drafter {options.drafter or 'eagle3'}, draft length {engine.draft_len}"
        if engine.draft_len
        else "no speculation"
    )
    how = f"{dtype_name(engine.target.dtype)}, {how}"
    config = uvicorn.Config(
        create_app(engine, tokenizer, name), log_level="warning", timeout_graceful_shutdown=GRACE_SECONDS, lifespan="on"
    )
    server = AnnouncingServer(
        config, f"trtspec: serving {name} on http://{options.host}:{listener.getsockname()[1]} ({how})"
    )
    server.run(sockets=[listener])
    if server.ended_by == signal.SIGINT:
        raise KeyboardInterrupt


def build_engine(target: Path, head: Path | None, options: ServerOptions) -> tuple[Engine, KimiTokenizer]:
    """Loads checkpoint directories into an engine with its tokenizer."""
    dtype, device = options.dtype, options.device
    if dtype not in DTYPES:
        raise UsageError(f"dtype {dtype!r} is not one of {', '.join(DTYPES)}", "use --dtype auto")
    compute: torch.dtype = default_dtype(device) if dtype == "auto" else getattr(torch, dtype)
    tokenizer = KimiTokenizer(target)
    model = load_target(target, dtype=compute, device=device)
    draft_head = None if head is None else load_head(head, model, dtype=compute, device=device)
    sizes = EngineOptions(
        drafter=options.drafter or ("eagle3" if head else None),
        draft_len=options.draft_len,
        max_batch_size=options.max_batch_size,
        max_seq_len=options.max_seq_len or min(model.spec.max_position_embeddings, DEFAULT_MAX_SEQ_LEN),
    )
    return Engine(model, draft_head, sizes, tokenizer), tokenizer


def warm_up(engine: Engine) -> None:
    """One short generation, so that the first request does not pay for tables and lazy initialisation."""
    engine.generate([GenerationRequest("warm-up", [0] * 8, max_tokens=2 + engine.draft_len, ignore_eos=True)])
    engine.totals = Totals(histogram=[0] * (engine.draft_len + 1))
    engine.iteration = None


def thread_count(hidden_size: int) -> int:
    """TRTSPEC_THREADS, else the physical cores this process may use; one for a small model."""
    wanted = os.environ.get("TRTSPEC_THREADS", "")
    if wanted:
        if not wanted.isdigit() or int(wanted) < 1:
            raise UsageError(f"TRTSPEC_THREADS is {wanted!r}", "set it to a positive number or unset it")
        return int(wanted)
    if hidden_size < SHARED_PRODUCTS_HIDDEN:
        return 1
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(usable, psutil.cpu_count(logical=False) or usable)


def bind(host: str, port: int) -> socket.socket:
    """A listening socket. Raises TrtspecError when the address is taken or not ours."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        return listener
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise TrtspecError(
            f"cannot listen on {host}:{port}: {reason}", "stop what uses the port, or pass --port"
        ) from None


class AnnouncingServer(uvicorn.Server):
    """uvicorn, announcing itself when ready, and remembering which signal ended it instead of raising it again."""

    def __init__(self, config: uvicorn.Config, ready: str) -> None:
        super().__init__(config)
        self.ready = ready
        self.ended_by: int | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            sys.stderr.write(self.ready + "\n")
            sys.stderr.flush()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        previous = {number: signal.signal(number, self._end) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)

    def _end(self, number: int, frame: FrameType | None) -> None:
        self.ended_by = number
        self.handle_exit(number, frame)
