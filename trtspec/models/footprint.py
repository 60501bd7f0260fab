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

# Size of a float32 weight's packed copy on a CPU (fast.PackedLinear), as a fraction of the weight.
PACKED_SHARE = 0.5
SPARE = 1.05  # memory of weights, loading and products, as a multiple of the size of the weights
LOGITS_COPIES = 4  # float32 copies of a round's logits: as computed, scaled, sorted, accepted
MIN_LENGTH = 64  # tokens of a context; a shorter one is not proposed in an error


def free_bytes(device: str) -> int:
    """Number of bytes that this process may still allocate on `device`.

    Limits of the cgroup and other processes on a GPU are taken into account.
    """
    if device == "cpu":
        return machine.free_memory()
    return int(torch.cuda.mem_get_info(device)[0])


def target_bytes(path: Path, spec: ModelSpec, dtype: torch.dtype, device: str) -> int:
    """Size in bytes of a loaded target with every weight in `dtype`.

    The size includes the packed copies of weights on a CPU. NVFP4 weights are also held in `dtype`,
    as products of codes and block scales (see `NVFP4Linear`), but have no packed copies.

    path: checkpoint of the target. Only its headers are read.
    """
    with torch.device("meta"):
        model = KimiModel(spec)
    elements = {name: parameter.numel() for name, parameter in model.named_parameters()}
    packed = 0  # elements of weights with a packed copy
    if device == "cpu" and (dtype == torch.float32 or through_float32(dtype)):
        stored = Checkpoint.open(path)
        mappings = [mapping for mapping in layout(spec) if is_nvfp4(stored, mapping.names[0])]
        fp4 = {mapping.parameter for mapping in mappings}
        packed = sum(count for name, count in elements.items() if name not in fp4)
    weight_bytes = sum(elements.values()) * dtype.itemsize
    packed_bytes = packed * 4 * PACKED_SHARE  # 4 bytes of each float32 element
    return int(weight_bytes + packed_bytes)


def head_bytes(checkpoint: Checkpoint, dtype: torch.dtype) -> int:
    """Size in bytes of a loaded head with all tensors in `dtype`."""
    return sum(info.numel for info in checkpoint.tensors.values()) * dtype.itemsize


@dataclass(frozen=True)
class MemoryLoad:
    """The load that a server must have memory for.

    Args:
        rows: number of concurrent requests.
        length: maximum number of tokens of a request, with its answer.
        draft_len: number of draft tokens per round.
        prefix_bytes: size of the cache of reused prefixes, in bytes.
    """

    device: str
    dtype: torch.dtype
    rows: int
    length: int
    draft_len: int
    prefix_bytes: int = 0


@dataclass(frozen=True)
class Footprint:
    """The memory that a server needs, in bytes.

    Args:
        weights: size of the weights of target and head.
        kept: memory of weights and reused prefixes, with a margin.
        row: memory of one request of `length` tokens, with its logits.
        logits: memory of the logits of one request, which does not grow with its length.
        length: maximum number of tokens of a request.
    """

    weights: int
    kept: int
    row: int
    logits: int
    length: int

    def needed(self, rows: int) -> int:
        """Number of bytes that a server of `rows` concurrent requests needs."""
        return self.kept + rows * self.row

    def fitting(self, free: int) -> tuple[int, int]:
        """Computes which load fits into `free` bytes.

        Returns the number of requests of the full length, and the maximum number of tokens of a
        single request. A number of tokens below MIN_LENGTH is returned as 0.
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
    """Computes the memory of a server, from the headers of the target and the head.

    head: checkpoint and specification of the head. None: the server has no head.
    """
    weights = target_bytes(path, spec, load.dtype, load.device)
    logits = LOGITS_COPIES * (1 + load.draft_len) * spec.vocab_size * 4
    # The caches of the target (FP8 if the checkpoint's config demands it) and of the head have an
    # entry for each token.
    entry_itemsize = 1 if spec.quant.kv_cache else load.dtype.itemsize
    token_bytes = spec.kv_elements_per_token * entry_itemsize
    if head is not None:
        checkpoint, head_spec = head
        weights += head_bytes(checkpoint, load.dtype)
        token_bytes += head_spec.kv_elements_per_token * load.dtype.itemsize
    row = token_bytes * (load.length + load.draft_len) + logits
    kept = int(SPARE * weights) + load.prefix_bytes
    return Footprint(weights, kept, row, logits, load.length)


def require_fitting(
    path: Path, spec: ModelSpec, head: tuple[Checkpoint, HeadSpec] | None, load: MemoryLoad
) -> None:
    """Raises MissingDependency if a server under `load` does not fit into the free memory.

    The error has the needed and the free memory, and a smaller load that fits.
    """
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
