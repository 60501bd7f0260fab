"""Runs the reference server: loads a target and a head, binds the port, serves until a signal ends it."""

from __future__ import annotations

import asyncio
import math
import os
import resource
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType
from typing import Literal

import psutil
import torch
import uvicorn

from trtspec.checkpoint.target_problems import require_target
from trtspec.checkpoint.tokenizer import KimiTokenizer
from trtspec.engine.app import AppOptions, create_app
from trtspec.engine.boundary import ClientConnection
from trtspec.engine.drafters import DrafterName, DraftSampling
from trtspec.engine.engine import Engine, EngineOptions
from trtspec.engine.graphs import graphs_for
from trtspec.engine.parallel import ParallelEngine, Ranks, device_of, follow
from trtspec.engine.prefix import BLOCK_TOKENS, PREFIX_BYTES, PrefixReuse
from trtspec.engine.request import GenerationRequest
from trtspec.errors import TrtspecError, UsageError
from trtspec.models.head_weights import load_head, open_head
from trtspec.models.memory import MemoryLoad, check_device, require_fitting
from trtspec.models.precision import dtype_name, serving_dtype
from trtspec.models.sharding import WHOLE, Sharding
from trtspec.models.weights import load_target
from trtspec.specs import ModelSpec

DTYPES = ("auto", "bfloat16", "float16", "float32")
DEFAULT_MAX_SEQ_LEN = 4096
SHARED_PRODUCTS_HIDDEN = 1024  # below, a step on one thread is faster than on two
GRACE_SECONDS = 30


@dataclass(frozen=True)
class ServerOptions:
    """`dtype` auto is bfloat16 where the device computes it natively, else float32; the ready line names the choice.
    `drafter` None is eagle3 with a head. `max_seq_len` None: the target's own maximum, at most 4096. `max_queue`
    requests wait beside those that run; further ones get status 429. A stop gives requests in
    flight `grace` seconds. With an `api_key`, requests below /v1 must carry it. `draft_schedule` to `block_tokens` are
    the engine's (EngineOptions); `kv_cache_dtype` auto is the checkpoint's
    own. `tp_size` processes share the target and the head, each on a GPU of its own or all on the CPU.
    `cuda_graphs`: on one GPU, the passes of a round are captured and replayed (graphs.py)."""

    host: str = "localhost"
    port: int = 8000
    dtype: str = "auto"
    device: str = "cpu"
    drafter: DrafterName | None = None
    draft_len: int = 3
    draft_sampling: DraftSampling = "argmax"
    max_batch_size: int = 16
    max_seq_len: int | None = None
    served_model_name: str | None = None
    max_queue: int = 512
    grace: int = GRACE_SECONDS
    api_key: str | None = field(default=None, repr=False)
    draft_schedule: tuple[tuple[int, int], ...] = ()
    max_num_tokens: int | None = None
    chunked_prefill: bool = True
    prefix_reuse: PrefixReuse | None = "warm"
    prefix_bytes: int = PREFIX_BYTES
    block_tokens: int = BLOCK_TOKENS
    kv_cache_dtype: Literal["auto", "fp8"] = "auto"
    tp_size: int = 1
    cuda_graphs: bool = False


def run(target: Path, head: Path | None, options: ServerOptions) -> None:
    """Serves until SIGTERM (returns) or SIGINT (raises KeyboardInterrupt); requests in flight are finished first.

    Raises TrtspecError when something does not load, the port is taken, or the engine dies.
    """
    listener = bind(options.host, options.port)  # before the weights: a taken port should not cost a load
    if options.tp_size == 1:
        engine, tokenizer = build_engine(target, head, options)
        serve(listener, target, engine, tokenizer, options)
        return
    options = replace(options, dtype=dtype_name(compute_dtype(options)))  # the same in every rank
    require_memory(target, head, options, compute_dtype(options))
    ranks = Ranks(options.tp_size, options.device, follow, build_part, target, head, options)
    try:
        engine = build_part(ranks.sharding, target, head, options)
        engine.ranks = ranks
        assert engine.tokenizer is not None
        serve(listener, target, engine, engine.tokenizer, options, ranks)
    finally:
        ranks.close()


def serve(
    listener: socket.socket,
    target: Path,
    engine: Engine,
    tokenizer: KimiTokenizer,
    options: ServerOptions,
    ranks: Ranks | None = None,
) -> None:
    """Serves with a loaded engine, as `run` does; with `ranks` until one of them ends, too."""
    torch.set_num_threads(threads_of(engine))
    warm_up(engine)
    name = options.served_model_name or target.resolve().name
    allow_many_connections()
    app = create_app(engine, tokenizer, AppOptions(name, options.api_key, options.max_queue, lambda: server.end()))
    config = uvicorn.Config(
        app, http=ClientConnection, log_level="error", timeout_graceful_shutdown=options.grace + 5, lifespan="on"
    )
    server = AnnouncingServer(
        config,
        f"trtspec: serving {name} on http://{options.host}:{listener.getsockname()[1]} ({described(engine, options)})",
        lambda: app.state.worker.give_up(f"the server was stopped, and the answer took more than {options.grace} s"),
        options.grace,
    )
    if ranks is not None:
        ranks.on_loss = server.end
    server.run(sockets=[listener])
    if ranks is not None and ranks.lost:
        raise TrtspecError(f"the engine stopped: {ranks.lost}", "start the server again")
    failure = app.state.worker.failure
    if failure is not None:
        raise TrtspecError(
            f"the engine stopped: {type(failure).__name__}: {failure}",
            "start the server again; with TRTSPEC_DEBUG=1 it prints where the error came from",
        )
    if server.ended_by == signal.SIGINT:
        raise KeyboardInterrupt


def described(engine: Engine, options: ServerOptions) -> str:
    """How a warm engine computes, for the line that says the server is ready."""
    parts = [dtype_name(engine.target.dtype)]
    if engine.draft_len:
        parts += [f"drafter {options.drafter or 'eagle3'}", f"draft length {engine.draft_len}"]
    else:
        parts.append("no speculation")
    parts.append(f"prefix reuse {options.prefix_reuse}" if options.prefix_reuse else "no prefix reuse")
    if engine.target.sharding.size > 1:
        parts.append(f"{engine.target.sharding.size} ranks")
    if engine.graphs is not None:
        parts.append(engine.graphs.told)
    return ", ".join(parts)


def allow_many_connections() -> None:
    """Raises the soft limit of open files to the hard one: idle clients should not keep out the others."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def compute_dtype(options: ServerOptions) -> torch.dtype:
    """The type to compute in. Raises UsageError or MissingDependency for types and devices that are not, and for CUDA
    graphs where there can be none."""
    if options.cuda_graphs:
        graphs_for(torch.device(options.device), options.tp_size)
    if options.dtype not in DTYPES:
        raise UsageError(f"dtype {options.dtype!r} is not one of {', '.join(DTYPES)}", "use --dtype auto")
    check_device(options.device, options.tp_size)
    return serving_dtype(options.device) if options.dtype == "auto" else getattr(torch, options.dtype)


def build_part(sharding: Sharding, target: Path, head: Path | None, options: ServerOptions) -> ParallelEngine:
    """A rank's engine: the whole of it, over the rank's part of the weights."""
    engine, _ = build_engine(target, head, options, sharding)
    assert isinstance(engine, ParallelEngine)
    torch.set_num_threads(threads_of(engine))
    return engine


def build_engine(
    target: Path, head: Path | None, options: ServerOptions, sharding: Sharding = WHOLE
) -> tuple[Engine, KimiTokenizer]:
    """Loads checkpoint directories into an engine with its tokenizer. Raises MissingDependency where memory lacks."""
    compute, device = compute_dtype(options), device_of(options.device, sharding)
    if sharding.size == 1:
        require_memory(target, head, options, compute)
    tokenizer = KimiTokenizer(target)
    model = load_target(target, dtype=compute, device=device, sharding=sharding)
    if options.kv_cache_dtype == "fp8":
        model.kv_dtype = torch.float8_e4m3fn
    draft_head = None if head is None else load_head(head, model, dtype=compute, device=device)
    sizes = EngineOptions(
        drafter=options.drafter or ("eagle3" if head else None),
        draft_len=options.draft_len,
        draft_sampling=options.draft_sampling,
        max_batch_size=options.max_batch_size,
        max_seq_len=sequence_length(model.spec, options),
        draft_schedule=options.draft_schedule,
        max_num_tokens=options.max_num_tokens,
        chunked_prefill=options.chunked_prefill,
        prefix_reuse=options.prefix_reuse,
        prefix_bytes=options.prefix_bytes,
        block_tokens=options.block_tokens,
        cuda_graphs=options.cuda_graphs,
    )
    kind = Engine if sharding.size == 1 else ParallelEngine
    return kind(model, draft_head, sizes, tokenizer), tokenizer


def require_memory(target: Path, head: Path | None, options: ServerOptions, dtype: torch.dtype) -> None:
    """Raises MissingDependency, before anything is loaded, with the bytes needed and free and the sizes that fit."""
    spec = require_target(target).spec
    load = MemoryLoad(
        options.device,
        dtype,
        options.max_batch_size,
        sequence_length(spec, options),
        options.draft_len,
        options.kv_cache_dtype == "fp8",
        options.prefix_bytes if options.prefix_reuse else 0,
        options.tp_size,
    )
    require_fitting(target, spec, None if head is None else open_head(head, spec), load)


def sequence_length(spec: ModelSpec, options: ServerOptions) -> int:
    """Tokens of prompt and answer together that a request may have."""
    return options.max_seq_len or min(spec.max_position_embeddings, DEFAULT_MAX_SEQ_LEN)


def warm_up(engine: Engine) -> None:
    """One short generation, so that the first request does not pay for tables and lazy initialisation."""
    made = engine.generate(
        [GenerationRequest("warm-up", [0] * 8, max_tokens=2 + engine.draft_len, ignore_eos=True, logprobs=1)]
    )
    if not all(math.isfinite(token.logprob) for token in made["warm-up"].logprobs):
        raise TrtspecError(
            f"the target computes NaN or infinity in {dtype_name(engine.target.dtype)}", "use --dtype float32"
        )
    engine.reset_counters()


def threads_of(engine: Engine) -> int:
    """CPU threads of a rank."""
    return max(1, thread_count(engine.target.spec.hidden_size) // engine.target.sharding.size)


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

    def __init__(self, config: uvicorn.Config, ready: str, give_up: Callable[[], None], grace: int) -> None:
        super().__init__(config)
        self.ready, self.give_up, self.grace = ready, give_up, grace
        self.ended_by: int | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            sys.stderr.write(self.ready + "\n")
            sys.stderr.flush()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Waits for what runs; what has not ended after the grace is told so, which ends it."""
        late = asyncio.get_running_loop().call_later(self.grace, self.give_up)
        await super().shutdown(sockets)
        late.cancel()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        previous = {number: signal.signal(number, self._end) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)

    def end(self) -> None:
        """Stops as a signal does; what is in flight is finished or told."""
        self.should_exit = True

    def _end(self, number: int, frame: FrameType | None) -> None:
        self.ended_by = number
        self.handle_exit(number, frame)
