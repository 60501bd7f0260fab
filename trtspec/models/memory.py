"""What a loaded target, a head and their caches take on a device, and whether the requests of a server fit beside them:
from their headers, before anything is loaded."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch

from trtspec.checkpoint.headers import Checkpoint
from trtspec.errors import MissingDependency, UsageError
from trtspec.models.kimi import KimiModel
from trtspec.models.precision import dtype_name, through_float32
from trtspec.models.sharding import WHOLE, Sharding
from trtspec.models.weights import is_nvfp4, layout
from trtspec.quant.workers import usable_memory
from trtspec.specs import HeadSpec, ModelSpec

PACKED_SHARE = 0.5  # of a float32 weight on a CPU: its copy for products of few rows (precision.py)
SPARE = 1.05  # times the weights: what loading and products hold beside them
LOGITS_COPIES = 4  # float32 logits of a round: as computed, scaled, sorted, accepted
MIN_LENGTH = 64  # a context below it is not worth proposing
MOST_RANKS = 8  # that are proposed


def check_device(device: str, ranks: int = 1) -> None:
    """Raises MissingDependency for devices that are not here, UsageError for one that does not exist."""
    try:
        kind = torch.device(device).type
    except RuntimeError:
        kind = ""
    if kind not in ("cpu", "cuda"):
        raise UsageError(f"--device {device} is neither cpu nor cuda", "use cpu, cuda or cuda:1")
    if kind == "cuda" and not torch.cuda.is_available():
        raise MissingDependency(f"--device {device}: torch sees no GPU", "use --device cpu, or install CUDA")
    if ranks > 1 and kind == "cuda":
        if device != "cuda":
            raise UsageError(f"--tp-size {ranks} takes the first {ranks} GPUs, not {device}", "use --device cuda")
        if ranks > torch.cuda.device_count():
            raise MissingDependency(
                f"--tp-size {ranks}: torch sees {torch.cuda.device_count()} GPUs", "use a smaller --tp-size"
            )


def free_bytes(device: str) -> int:
    """Bytes that this process may still take on `device`: cgroup limits count, and so do other processes of a GPU."""
    if device == "cpu":
        return usable_memory()
    return int(torch.cuda.mem_get_info(device)[0])


def target_bytes(path: Path, spec: ModelSpec, dtype: torch.dtype, device: str, sharding: Sharding = WHOLE) -> int:
    """Of a rank's part of a loaded target, every weight as `dtype`: an NVFP4 one, too, is held as the products of its
    codes and block scales (`NVFP4Linear`). What a CPU keeps packed beside it is counted for all but those."""
    with torch.device("meta"):
        model = KimiModel(spec, sharding=sharding)
    elements = {name: parameter.numel() for name, parameter in model.named_parameters()}
    packed = 0
    if device == "cpu" and (dtype == torch.float32 or through_float32(dtype)):
        fp4 = fp4_parameters(path, spec) if spec.quant.format.is_fp4 else set()
        packed = sum(count for name, count in elements.items() if name not in fp4)
    return int(sum(elements.values()) * dtype.itemsize + packed * 4 * PACKED_SHARE)


def fp4_parameters(path: Path, spec: ModelSpec) -> set[str]:
    """Parameters of the model that the checkpoint stores as NVFP4, by its headers."""
    stored = Checkpoint.open(path).tensors
    return {source.parameter for source in layout(spec) if is_nvfp4(stored, source.names[0])}


def head_bytes(checkpoint: Checkpoint, dtype: torch.dtype) -> int:
    """Of a loaded head, all tensors as `dtype`."""
    return sum(info.numel for info in checkpoint.tensors.values()) * dtype.itemsize


def cache_token_bytes(spec: ModelSpec, head: HeadSpec | None, dtype: torch.dtype, *, fp8: bool = False) -> int:
    """Of the caches, per token: an entry in each layer of the target, FP8 where that or the checkpoint asks for it, and
    the head's."""
    target = spec.kv_elements_per_token * (1 if fp8 or spec.quant.kv_cache else dtype.itemsize)
    return target + (head.kv_elements_per_token * dtype.itemsize if head else 0)


@dataclass(frozen=True)
class MemoryLoad:
    """What is to be held: `rows` requests of up to `length` tokens, by `ranks` processes, on a GPU each or together in
    the memory of a CPU."""

    device: str
    dtype: torch.dtype
    rows: int
    length: int
    draft_len: int
    fp8_cache: bool = False
    prefix_bytes: int = 0
    ranks: int = 1


@dataclass(frozen=True)
class Footprint:
    """Bytes in one memory: of the weights, of reused prefixes, of what is held whatever the requests are (both of these
    and what is to spare), and of one request; `logits` are the part of the last that does not grow with its length."""

    weights: int
    prefixes: int
    kept: int
    row: int
    logits: int
    length: int

    def needed(self, rows: int) -> int:
        return self.kept + rows * self.row

    def rows_in(self, free: int) -> int:
        """Requests of the full length that fit."""
        return max(0, free - self.kept) // self.row

    def length_in(self, free: int) -> int:
        """Tokens that a single request may have; 0 where they are not worth proposing."""
        tokens = (free - self.kept - self.logits) * self.length // self.row
        return min(tokens, self.length) if tokens >= MIN_LENGTH else 0


def footprint(path: Path, spec: ModelSpec, head: tuple[Checkpoint, HeadSpec] | None, load: MemoryLoad) -> Footprint:
    """Of a target, of whose checkpoint no more than headers is read, and a head. Each rank keeps prefixes of its own.
    Raises UsageError for ranks that cannot share the target."""
    together = load.ranks if load.device == "cpu" else 1
    weights = target_bytes(path, spec, load.dtype, load.device, Sharding(0, load.ranks))
    weights = together * (weights + (head_bytes(head[0], load.dtype) if head else 0))
    logits = LOGITS_COPIES * (1 + load.draft_len) * spec.vocab_size * 4
    token = cache_token_bytes(spec, head[1] if head else None, load.dtype, fp8=load.fp8_cache)
    row = together * (token * (load.length + load.draft_len) + logits)
    prefixes = together * load.prefix_bytes
    return Footprint(weights, prefixes, int(SPARE * weights) + prefixes, row, together * logits, load.length)


def ranks_that_fit(
    path: Path, spec: ModelSpec, head: tuple[Checkpoint, HeadSpec] | None, load: MemoryLoad, free: int, gpus: int
) -> int | None:
    """The smallest number of GPUs, up to `gpus` with `free` bytes each, that hold the load together."""
    for ranks in (1, 2, 4, MOST_RANKS):
        if ranks <= gpus:
            try:
                each = footprint(path, spec, head, replace(load, ranks=ranks))
            except UsageError:
                continue
            if each.needed(load.rows) <= free:
                return ranks
    return None


def require_fitting(path: Path, spec: ModelSpec, head: tuple[Checkpoint, HeadSpec] | None, load: MemoryLoad) -> None:
    """Raises MissingDependency with the bytes needed and free, and the sizes or the number of GPUs that fit."""
    found, free = footprint(path, spec, head, load), free_bytes(load.device)
    needed = found.needed(load.rows)
    if needed <= free:
        return
    ways = []
    if load.device == "cuda":
        ranks = ranks_that_fit(path, spec, head, load, free, torch.cuda.device_count())
        ways += [f"--tp-size {ranks}"] if ranks else []
    if rows := found.rows_in(free):
        ways += [f"--max-batch-size {rows}", f"a --max-seq-len below {load.length}"]
    elif length := found.length_in(free):
        ways.append(f"--max-batch-size 1 --max-seq-len {length}")
    remedy = "use " + ", or ".join(ways) if ways else (
        "use a machine with more memory, or a smaller target: its weights alone do not fit"
    )  # fmt: skip
    raise MissingDependency(
        f"{path} takes {needed / 2**30:.2f} GiB on {load.device} ({found.weights / 2**30:.2f} of weights in "
        f"{dtype_name(load.dtype)}, {load.rows} requests of {load.length} tokens, "
        f"{found.prefixes / 2**30:.2f} for reused prefixes), {free / 2**30:.2f} are free",
        remedy,
    )
