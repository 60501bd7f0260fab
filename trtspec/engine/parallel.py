"""One engine in several processes of one machine: rank 0 serves, the others take every step with it.

Every rank runs the whole engine over its part of the model (models/sharding.py): before a step rank 0 sends what was
submitted and cancelled, then all of them compute it and meet in the collectives of the model. What decides (drafts,
accepted tokens) is rank 0's. When a rank ends, all do.
"""

from __future__ import annotations

import multiprocessing as mp
import os
import signal
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from trtspec.engine.engine import Engine
from trtspec.engine.request import GenerationRequest
from trtspec.engine.sequence import Output, Sequence
from trtspec.errors import TrtspecError
from trtspec.models.sharding import Sharding

JOIN_SECONDS = 10.0
Command = GenerationRequest | str  # a request to submit, or the id of one to cancel


def device_of(device: str, sharding: Sharding) -> str:
    """`cuda` becomes the rank's own GPU."""
    return f"cuda:{sharding.rank}" if device == "cuda" and sharding.size > 1 else device


def join_group(sharding: Sharding, device: str, store: dist.Store) -> None:
    """Takes part in the collectives: NCCL between GPUs, gloo over the loopback interface between CPUs."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
    if device.startswith("cuda"):
        torch.cuda.set_device(device)
    backend = "nccl" if device.startswith("cuda") else "gloo"
    dist.init_process_group(backend, store=store, rank=sharding.rank, world_size=sharding.size)


class Ranks:
    """The processes of ranks 1 .. size-1, which rank 0 starts and ends."""

    def __init__(self, size: int, device: str, main: Callable[..., None], *arguments: Any) -> None:
        """Starts them with `main(sharding, device, port, pipe, *arguments)`, which ends when the pipe does; joins their
        group as rank 0, which waits for them."""
        context = mp.get_context("spawn")
        store = dist.TCPStore("127.0.0.1", 0, size, is_master=True, wait_for_workers=False)
        self.pipes: list[Connection] = []
        self.processes = []
        for rank in range(1, size):
            ours, theirs = context.Pipe()
            sharding = Sharding(rank, size)
            of_rank = (sharding, device_of(device, sharding), store.port, theirs, *arguments)
            process = context.Process(target=main, args=of_rank, name=f"rank {rank}", daemon=True)
            process.start()
            theirs.close()
            self.pipes.append(ours)
            self.processes.append(process)
        self.ending = threading.Event()
        self.lost: str | None = None
        self.sharding = Sharding(0, size)
        threading.Thread(target=self._watch, name="ranks", daemon=True).start()
        self.on_loss: Callable[[], None] = self._end_before_serving
        join_group(self.sharding, device_of(device, self.sharding), store)

    def send(self, message: object) -> None:
        """Hands every rank a message. Raises TrtspecError when one of them is gone."""
        try:
            for pipe in self.pipes:
                pipe.send(message)
        except OSError as error:
            raise TrtspecError(f"a rank of the engine is gone: {error}", "start the server again") from None

    def close(self) -> None:
        """Ends the ranks; kills those that do not end."""
        self.ending.set()
        for pipe in self.pipes:
            pipe.close()
        for process in self.processes:
            process.join(JOIN_SECONDS)
            if process.is_alive():
                process.kill()
                process.join()
        if dist.is_initialized():
            dist.destroy_process_group()

    def _watch(self) -> None:
        wait([process.sentinel for process in self.processes])
        if self.ending.is_set():
            return
        for process in self.processes:
            process.join(0.1)
        gone = [process for process in self.processes if process.exitcode is not None]
        self.lost = ", ".join(f"{process.name} ended with status {process.exitcode}" for process in gone)
        self.on_loss()

    def _end_before_serving(self) -> None:
        sys.stderr.write(f"trtspec: error: {self.lost} before the server was ready\n")
        sys.stderr.flush()
        for process in self.processes:
            process.kill()
        os._exit(1)


class ParallelEngine(Engine):
    """An engine that takes its steps together with the other ranks. `pending` goes to them before the next."""

    ranks: Ranks | None = None  # set in rank 0
    pending: tuple[Command, ...] = ()

    def enqueue(self, request: GenerationRequest) -> None:
        super().enqueue(request)
        # what a request wants of its tokens beyond sampling, rank 0 alone knows and decides
        self.pending = (*self.pending, replace(request, wishes=None))

    def cancel(self, request_id: str) -> None:
        super().cancel(request_id)
        self.pending = (*self.pending, request_id)

    @property
    def has_work(self) -> bool:
        return bool(self.pending) or super().has_work

    def step(self) -> list[Output]:
        assert self.ranks is not None
        commands, self.pending = self.pending, ()
        self.ranks.send((commands, self.running()))
        return super().step()

    def running(self) -> list[str]:
        """The requests in their rows: the same on every rank."""
        return [sequence.id for sequence in self.batch.sequences]

    def follow(self, pipe: Connection) -> None:
        """Takes rank 0's steps until it closes the pipe."""
        while True:
            try:
                commands, running = pipe.recv()
            except EOFError:
                return
            if running != self.running():
                raise RuntimeError(f"rank {self.target.sharding.rank} runs {self.running()}, rank 0 {running}")
            for command in commands:
                if isinstance(command, str):
                    super().cancel(command)
                else:
                    super().enqueue(command)
            super().step()

    def _first_tokens(self, sequences: list[Sequence], logits: Tensor) -> list[int]:
        """Rank 0's; a request that fails in a rank fails in all of them when it takes its token."""
        tokens = [0] * len(sequences)
        try:
            tokens = super()._first_tokens(sequences, logits)
        except Exception as error:
            for sequence in sequences:
                sequence.failure = sequence.failure or error
        decided = torch.tensor(tokens, device=self.device)
        self.target.sharding.follow_first(decided)
        first: list[int] = decided.tolist()
        return first


def follow(
    sharding: Sharding, device: str, port: int, pipe: Connection, build: Callable[..., ParallelEngine], *arguments: Any
) -> None:
    """The process of a rank above 0: builds its part of the engine with `build(sharding, *arguments)` and follows."""
    for number in (signal.SIGINT, signal.SIGTERM):  # rank 0 drains, and closes the pipe then
        signal.signal(number, signal.SIG_IGN)
    parent = mp.parent_process()
    assert parent is not None
    threading.Thread(target=_end_with, args=(parent.sentinel,), daemon=True).start()
    store = dist.TCPStore("127.0.0.1", port, sharding.size, is_master=False)
    join_group(sharding, device, store)
    build(sharding, *arguments).follow(pipe)


def _end_with(sentinel: int) -> None:
    wait([sentinel])
    os._exit(1)  # a collective that waits for rank 0 would not return
