"""Passes over the decoding rows as CUDA graphs: captured at the first use of a shape, replayed from then on.

At batch 1 a pass is a thousand small kernels, and launching them takes longer than computing them; a graph is launched
at once. A pass can be captured because its shapes follow from those of its inputs and from `length`, it reads nothing
back, and it writes the caches in place, by index. `length` is rounded up, so that few graphs serve a growing text.

Written against torch's documentation and tested with a stand-in for the capture; `make test-gpu` is its first run on
hardware, which is why it is off unless asked for.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from trtspec.errors import UsageError
from trtspec.models.kimi import TargetOutput
from trtspec.models.layers import LatentCache

if TYPE_CHECKING:
    from trtspec.models.eagle3 import Eagle3Head
    from trtspec.models.kimi import KimiModel

SHORTEST = 256  # cached positions that a graph attends to, at the least
OUTPUT_BYTES = 2**28  # that all graphs together keep for their outputs
WARM_UP_RUNS = 2  # cuBLAS chooses its kernels and workspaces before the capture

Pass = Callable[..., tuple[Tensor, ...]]


@dataclass(frozen=True)
class Captured:
    """A pass whose `inputs` are filled, and whose `outputs` hold its results after `replay` and until the next one."""

    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    replay: Callable[[], None]


class Graphs:
    """The graphs of one engine, by shape. After a capture that failed (`reason`) every pass runs as it would without.

    A pass must give the same outputs when it is run again at once: it is, before it is captured.
    """

    def __init__(self) -> None:
        self.captured: dict[Hashable, Captured] = {}
        self.output_bytes = 0
        self.reason: str | None = None
        self.pool: Any = None  # a handle of torch.cuda

    @property
    def told(self) -> str:
        """For the line that says how a server runs."""
        return "CUDA graphs" if self.reason is None else f"no CUDA graphs: {self.reason}"

    def run(self, key: Hashable, function: Pass, *inputs: Tensor) -> tuple[Tensor, ...]:
        """`function(*inputs)`, by a graph where there is one or may be one more. What is returned is overwritten by the
        next run with the same key."""
        found = self.captured.get(key)
        if self.reason is not None or (found is None and self.output_bytes >= OUTPUT_BYTES):
            return function(*inputs)
        if found is None:
            try:
                found = self.capture(function, inputs)
            except RuntimeError as error:
                self.reason = str(error).partition("\n")[0]
                sys.stderr.write(
                    f"trtspec: a pass cannot be captured as a CUDA graph ({self.reason}); all run without\n"
                )
                return function(*inputs)
            self.captured[key] = found
            self.output_bytes += sum(output.nbytes for output in found.outputs)
        for static, given in zip(found.inputs, inputs, strict=True):
            static.copy_(given)
        found.replay()
        return found.outputs

    def capture(self, function: Pass, inputs: tuple[Tensor, ...]) -> Captured:
        """Raises RuntimeError for what cannot be captured."""
        device = inputs[0].device
        current = torch.cuda.current_stream(device)
        static = tuple(value.clone(memory_format=torch.contiguous_format) for value in inputs)
        for _ in range(WARM_UP_RUNS):
            function(*static)
        if self.pool is None:
            self.pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, pool=self.pool, capture_error_mode="thread_local"):
                outputs = function(*static)
        finally:
            torch.cuda.set_stream(current)  # a capture that fails leaves its own stream behind
        return Captured(static, outputs, graph.replay)


def graphs_for(device: torch.device, ranks: int) -> Graphs:
    """Raises UsageError where nothing could be captured."""
    if device.type != "cuda":
        raise UsageError(f"CUDA graphs need a GPU, and the model is on {device.type}", "leave CUDA graphs out")
    if ranks > 1:
        raise UsageError(f"CUDA graphs are for one GPU, not for {ranks} ranks", "leave CUDA graphs out")
    return Graphs()


def rounded_up(length: int, most: int) -> int:
    """The next power of two, SHORTEST at the least and a cache's `most` positions at the most."""
    return min(most, max(SHORTEST, 1 << (length - 1).bit_length()))


@dataclass(frozen=True)
class GraphedTarget:
    """A target's pass over the decoding rows."""

    target: KimiModel
    graphs: Graphs

    def __call__(
        self, tokens: Tensor, start: Tensor, cache: LatentCache, row: int, aux_layers: tuple[int, ...], *, length: int
    ) -> TargetOutput:
        """As `KimiModel.forward`; the next call of the same shape overwrites what is returned."""
        end = rounded_up(length, cache.max_len)

        def whole(tokens: Tensor, start: Tensor) -> tuple[Tensor, ...]:
            out = self.target(tokens, start, cache, row, aux_layers, length=end)
            return (out.logits, out.hidden) if out.aux is None else (out.logits, out.hidden, out.aux)

        logits, hidden, *aux = self.graphs.run(("target", row, *tokens.shape, end), whole, tokens, start)
        return TargetOutput(logits, hidden, aux[0] if aux else None)


@dataclass(frozen=True)
class GraphedHead:
    """A head's pass over the decoding rows."""

    head: Eagle3Head
    graphs: Graphs

    def __call__(
        self, x: Tensor, tokens: Tensor, start: Tensor, cache: LatentCache, *, length: int, at: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """As `Eagle3Head.forward` from row 0; the next call of the same shape overwrites what is returned."""
        end = rounded_up(length, cache.max_len)

        def whole(x: Tensor, tokens: Tensor, start: Tensor, *at: Tensor) -> tuple[Tensor, ...]:
            return self.head(x, tokens, start, cache, length=end, at=at[0] if at else None)

        places = () if at is None else (at,)
        feedback, normed = self.graphs.run(("head", *tokens.shape, end, len(places)), whole, x, tokens, start, *places)
        return feedback, normed
