"""Read, compute and write of one shard overlapped: one thread each, a few reused buffers between them.

Buffers are anonymous maps kept for the whole job: a fresh allocation of this size would cost a page fault per 4 KiB,
several times the arithmetic.
"""

from __future__ import annotations

import mmap
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch

from trtspec.checkpoint.tensors import LazyTensors
from trtspec.quant.steps import Step

SLOTS = 4  # one being computed, the others read ahead or written behind
HUGE = 2 << 20

Part = tuple[str, int, memoryview]  # tensor, byte offset in it, bytes


class Arena:
    """A reusable flat uint8 buffer that grows to what is asked for."""

    def __init__(self) -> None:
        self._tensor = torch.empty(0, dtype=torch.uint8)

    def take(self, size: int) -> torch.Tensor:
        if self._tensor.numel() < size:
            memory = mmap.mmap(-1, -(-size // HUGE) * HUGE)
            if hasattr(mmap, "MADV_HUGEPAGE"):
                memory.madvise(mmap.MADV_HUGEPAGE)
            self._tensor = torch.frombuffer(memory, dtype=torch.uint8)
        return self._tensor[:size]


class Slot:
    """The buffers of one step on its way: stored bytes in, converted bytes out."""

    def __init__(self) -> None:
        self.input, self.output = Arena(), Arena()


class Pipeline:
    """`run` reads steps ahead, lets `compute` turn each into parts, and writes these behind."""

    def __init__(self, tensors: LazyTensors) -> None:
        self.tensors = tensors
        self.slots = [Slot() for _ in range(SLOTS)]
        self.reader = ThreadPoolExecutor(1, thread_name_prefix="read")
        self.writer = ThreadPoolExecutor(1, thread_name_prefix="write")

    def run(
        self,
        steps: Iterator[Step],
        compute: Callable[[Step, torch.Tensor, torch.Tensor], list[Part]],
        write: Callable[[list[Part]], None],
    ) -> None:
        """Raises what reading, computing or writing raised first; then nothing of it goes on."""
        free, reading = deque(self.slots), deque[tuple[Step, Slot, Future[torch.Tensor]]]()
        writing = deque[tuple[Slot, Future[None]]]()
        try:
            while True:
                while free and (step := next(steps, None)) is not None:
                    slot = free.popleft()
                    reading.append((step, slot, self.reader.submit(self._read, step, slot)))
                if not reading:
                    break
                step, slot, future = reading.popleft()
                parts = compute(step, future.result(), slot.output.take(step.out))
                writing.append((slot, self.writer.submit(write, parts)))
                while writing and (not free or writing[0][1].done()):
                    slot, written = writing.popleft()
                    written.result()
                    free.append(slot)
            for _, written in writing:
                written.result()
        finally:
            pending: list[Future[Any]] = [entry[2] for entry in reading]
            pending += [entry[1] for entry in writing]
            for unfinished in pending:
                unfinished.cancel()
            for unfinished in pending:  # the buffers are used again
                if not unfinished.cancelled():
                    unfinished.exception()

    def _read(self, step: Step, slot: Slot) -> torch.Tensor:
        buffer = slot.input.take(step.size)
        view = buffer.numpy().data
        for read in step.reads:
            self.tensors.read_bytes(read.info, read.begin, view[read.at : read.at + read.size])
        return buffer

    def close(self) -> None:
        self.reader.shutdown()
        self.writer.shutdown()
        self.tensors.close()
