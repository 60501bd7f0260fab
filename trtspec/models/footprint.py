"""Memory of a target, a head and their caches, and whether requests fit: from headers alone."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from trtspec import machine
from trtspec.checkpoint.headers import Checkpoint
from trtspec.errors import MissingDependency
from trtspec.models.fast import through_float32
from trtspec.models.k2 import KimiModel
from trtspec.models.precision import dtype_name
from trtspec.models.weights import is_nvfp4, layout
from trtspec.specs import HeadSpec, ModelSpec

# of a float32 weight on a CPU: its copy for products of few rows (fast.PackedLinear)
PACKED_SHARE = 0.5
SPARE = 1.05  # weights plus what loading and products allocate, over the weights
LOGITS_COPIES = 4  # float32 logits of a round: as computed, scaled, sorted, accepted
MIN_LENGTH = 64  # a context below it is not worth proposing


def free_bytes(device: str) -> int:
    """Bytes that this process may still take on `device`.

    cgroup limits count, and so do other processes of a GPU.
    """
    if device == "cpu":
        return machine.free_memory()
    return int(torch.cuda.mem_get_info(device)[0])


def target_bytes(path: Path, spec: ModelSpec, dtype: torch.dtype, device: str) -> int:
    """Bytes of a loaded target, every weight in `dtype`.

    NVFP4 weights are stored as the products of their codes and block scales (`NVFP4Linear`). The
    packed copies of a CPU are included. NVFP4 weights have none.
    """
    with torch.device("meta"):
        model = KimiModel(spec)
    elements = {name: parameter.numel() for name, parameter in model.named_parameters()}
    packed = 0
    if device == "cpu" and (dtype == torch.float32 or through_float32(dtype)):
        stored = Checkpoint.open(path)
        mappings = [mapping for mapping in layout(spec) if is_nvfp4(stored, mapping.names[0])]
        fp4 = {mapping.parameter for mapping in mappings}
        packed = sum(count for name, count in elements.items() if name not in fp4)
    weight_bytes = sum(elements.values()) * dtype.itemsize
    return int(weight_bytes + packed * 4 * PACKED_SHARE)


def head_bytes(checkpoint: Checkpoint, dtype: torch.dtype) -> int:
    """Bytes of a loaded head, all tensors in `dtype`."""
    return sum(info.numel for info in checkpoint.tensors.values()) * dtype.itemsize


@dataclass(frozen=True)
class MemoryLoad:
    """A server's load: `rows` concurrent requests of up to `length` tokens."""

    device: str
    dtype: torch.dtype
    rows: int
    length: int
    draft_len: int
    prefix_bytes: int = 0


@dataclass(frozen=True)
class Footprint:
    """Memory of a server, in bytes. `length` is in tokens.

    kept: weights, reused prefixes and a margin.
    row: one request of `length` tokens, `logits` included.
    logits: of one request. They do not grow with its length.
    """

    weights: int
    kept: int
    row: int
    logits: int
    length: int

    def needed(self, rows: int) -> int:
        return self.kept + rows * self.row

    def fitting(self, free: int) -> tuple[int, int]:
        """Requests of the full length that fit, and tokens that a single request may have.

        The tokens are 0 if they are not worth proposing.
        """
        remaining = free - self.kept
        rows = max(0, remaining) // self.row
        tokens = (remaining - self.logits) * self.length // self.row
        if tokens < MIN_LENGTH:
            tokens = 0
        return rows, min(tokens, self.length)


def footprint(
    path: Path, spec: ModelSpec, head: tuple[Checkpoint, HeadSpec] | None, load: MemoryLoad
) -> Footprint:
    """Footprint of a target and a head. Reads only the headers of the target."""
    weights = target_bytes(path, spec, load.dtype, load.device)
    logits = LOGITS_COPIES * (1 + load.draft_len) * spec.vocab_size * 4
    # A token has an entry in each layer of the target (FP8 if the checkpoint asks for it) and one
    # in the head.
    token = spec.kv_elements_per_token * (1 if spec.quant.kv_cache else load.dtype.itemsize)
    if head is not None:
        weights += head_bytes(head[0], load.dtype)
        token += head[1].kv_elements_per_token * load.dtype.itemsize
    row = token * (load.length + load.draft_len) + logits
    kept = int(SPARE * weights) + load.prefix_bytes
    return Footprint(weights, kept, row, logits, load.length)


def require_fitting(
    path: Path, spec: ModelSpec, head: tuple[Checkpoint, HeadSpec] | None, load: MemoryLoad
) -> None:
    """Raises MissingDependency with the bytes needed and free, and the sizes that fit."""
    total = footprint(path, spec, head, load)
    free = free_bytes(load.device)
    needed = total.needed(load.rows)
    if needed <= free:
        return
    rows, length = total.fitting(free)
    if rows:
        remedy = f"use `max_batch_size` {rows}, or a `max_seq_len` below {load.length}"
    elif length:
        remedy = f"use `max_batch_size` 1 `max_seq_len` {length}"
    else:
        remedy = "use a machine with more memory, or a smaller target: its weights alone do not fit"
    message = (
        f"{path} takes {needed / 2**30:.2f} GiB on {load.device} "
        f"({total.weights / 2**30:.2f} of weights in {dtype_name(load.dtype)}, "
        f"{load.rows} requests of {load.length} tokens, "
        f"{load.prefix_bytes / 2**30:.2f} for reused prefixes), {free / 2**30:.2f} are free"
    )
    raise MissingDependency(message, remedy)
