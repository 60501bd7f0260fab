"""Shards of NVFP4 from the source's tensors: groups of linears that share a scale, each whole, on a pool of threads.

A thread reads a group, computes it in C and writes it where the shard's layout says. All three release the
interpreter lock, and no more groups are in memory than there are threads. Results come back in the plan's order, so
nothing depends on which thread was first.
"""

from __future__ import annotations

import math
import struct
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from trtspec import machine
from trtspec.checkpoint.headers import DTYPE_BITS, ShardReader, TensorInfo
from trtspec.checkpoint.values import count_not_finite
from trtspec.checkpoint.writer import ShardFile, publish
from trtspec.errors import TrtspecError, UsageError
from trtspec.formats import TINIEST_AMAX
from trtspec.quant.content import ERROR, HASH, ROUNDING, Content, Found
from trtspec.quant.native import (
    BLOCK,
    Array,
    Packer,
    Rows,
    Scaling,
    decoded,
    native_packer,
    prepared,
    read_bytes,
    read_rows,
)
from trtspec.quant.plan import Conversion, Group, ShardPlan, Weight
from trtspec.report import Bar, file_sha256

REMEDY = "download that file again and compare its sha256 with the hub's"
ERROR_ROWS = 64  # the rows of each tensor on which the rounding error is measured
COPY_BYTES = 16 << 20  # of a copied tensor in memory at a time
THREAD_BYTES = (
    1 << 30
)  # more than a thread holds of any Kimi: the dense layer's gate and up, stored and packed
Record = dict[
    str, Any
]  # of a shard, for the journal; `classes` sums errors and blocks by class of linear


def convert_shards(
    conversion: Conversion, plans: list[ShardPlan], threads: int, hashes: dict[str, str], bar: Bar
) -> Iterator[tuple[ShardPlan, Record]]:
    """Yields each shard's plan and journal record once the shard is durable. The first failure stops the rest.

    `hashes` are the recorded SHA-256 of source files; each is taken out and compared after the first shard that its
    file is read for. `bar` gets source bytes as they are done. Raises TrtspecError naming the tensor that cannot be
    converted; then no unfinished file is left behind.
    """
    source, reader, files = (
        conversion.checkpoint.path,
        ShardReader(conversion.checkpoint.path),
        list[ShardFile](),
    )
    publishing: deque[tuple[ShardPlan, Future[Record]]] = deque()
    pool, torch_threads = (
        ThreadPoolExecutor(threads, thread_name_prefix="convert"),
        _set_torch_threads(1),
    )
    try:
        options = conversion.options
        converter = Converter(
            reader,
            partial(choose_packer, conversion.weight_scales, options.device, options.by_modelopt),
        )
        for plan in plans:
            times, results = (
                plan.source_times(source),
                [],
            )  # before the first read: a resumed run sees later writes
            file = ShardFile(conversion.output / plan.shard, plan.layout())
            files.append(file)
            for group, result in zip(
                plan.groups, pool.map(partial(converter.convert, file), plan.groups), strict=True
            ):
                results.append(result)
                bar.advance(sum(weight.bytes_in for weight in group.weights))
                while publishing and publishing[0][1].done():
                    yield publishing[0][0], publishing.popleft()[1].result()
            file.close()
            whole = {source / name: hashes.pop(name) for name in plan.sources if name in hashes}
            record = {
                "read": [digest for result in results for digest in result.read],
                "found": list(dict.fromkeys(one for result in results for one in result.found)),
                "classes": summed(errors for result in results for errors in result.errors),
                "times": times,
            }
            publishing.append((plan, pool.submit(_publish, file, record, whole)))
        for plan, future in publishing:
            yield plan, future.result()
    finally:
        pool.shutdown(cancel_futures=True)
        for file in files:
            file.abandon()  # of a published one nothing is left
        reader.close()
        _set_torch_threads(torch_threads)


def thread_count(asked: int, plans: list[ShardPlan]) -> int:
    """0 means as many as cores and memory allow."""
    most = asked or min(machine.cores(), machine.free_memory() // THREAD_BYTES)
    return max(1, min(most, sum(len(plan.groups) for plan in plans)))


Errors = dict[
    str, float
]  # `tensors`; `error` and `norm`, squared, of their first rows; `zero_blocks`


@dataclass
class Converted:
    """A group that is written: the digest of each weight that was read, what is wrong with them, and the rounding
    errors of its linears, each with its class."""

    read: list[str] = field(default_factory=list)
    found: Found = field(default_factory=list)
    errors: list[tuple[str, Errors]] = field(default_factory=list)


class Converter:
    """Converts groups of one checkpoint, in any number of threads at once."""

    def __init__(self, reader: ShardReader, new_packer: Callable[[], Packer]) -> None:
        self.reader, self._own = reader, _OwnPacker(new_packer)

    def convert(self, file: ShardFile, group: Group) -> Converted:
        """Writes what becomes of the group's weights into `file`."""
        done, packer, weight = Converted(), self._own.packer, group.weights[0]
        if weight.action == "copy":
            self._copy(file, weight, done)
            return done
        if weight.action == "decode":
            values = decoded(self._read(weight, done), packer).values.reshape(-1)
            if (index := count_not_finite(values, "BF16")[1]) is not None:
                raise _refusal(weight, index)
            file.append(weight.name, values.view(np.uint8).data)
            return done
        rows = [prepared(self._read(weight, done), packer) for weight in group.weights]
        amax = [
            _amax(weight, each, packer) for weight, each in zip(group.weights, rows, strict=True)
        ]
        amax += [
            _amax(partner, prepared(self._read(partner, done), packer), packer)
            for partner in group.partners
        ]
        del done.read[len(group.weights) :]  # partners are weights of other groups
        # float32's range would be left while block scales are searched
        if 0 < max(amax) < TINIEST_AMAX:
            raise TrtspecError(
                f"{weight.name} in {weight.parts[0].shard} has no weight above 2^-88",
                REMEDY,
                "TS-CONTENT-MAGNITUDE",
            )
        scaling = Scaling.of(max(amax))
        for weight, each in zip(group.weights, rows, strict=True):
            kind, errors = (
                weight_class(weight.name),
                _pack(file, weight, each, packer, scaling, group.input_scale),
            )
            done.errors.append((kind, errors))
            if errors["error"] > ERROR**2 * errors["norm"]:
                done.found.append((ROUNDING, weight.module))
        return done

    def _copy(self, file: ShardFile, weight: Weight, done: Converted) -> None:
        """A tensor as it is, looked at a chunk at a time; embeddings are large."""
        info, before, content = weight.parts[0], 0, Content(weight.parts[0])
        digest = xxhash.xxh3_128()
        for chunk in self.reader.pieces(info, COPY_BYTES):
            digest.update(chunk)
            content.add(np.frombuffer(chunk, np.uint8))
            if content.may_be_nan and (index := count_not_finite(chunk, info.dtype)[1]) is not None:
                raise _refusal(weight, before // (DTYPE_BITS[info.dtype] // 8) + index)
            file.append(weight.name, chunk)
            before += len(chunk)
        done.found += content.found()
        done.read.append(digest.hexdigest())

    def _read(self, weight: Weight, done: Converted) -> Rows:
        """The stored tensors of a weight. Raises TrtspecError where they contradict each other."""
        digest = xxhash.xxh3_128()

        def read(info: TensorInfo) -> Array:
            data = read_bytes(self.reader, info)
            digest.update(data.data)
            content = Content(info)
            content.add(data)
            done.found += content.found()
            return data

        rows = read_rows(read, weight.format, weight.parts)
        done.read.append(digest.hexdigest())
        scale = rows.scale if rows.scale_dtype != "U8" else None  # an exponent has no sign
        if scale is not None and bool((scale >> 8 * scale.itemsize - 1).any()):
            info = weight.parts[1]
            text = f"{info.name} in {info.shard} holds a negative scale"
            raise TrtspecError(text, "download that file again", "TS-TARGET-BAD-SCALE")
        return rows


def choose_packer(
    weight_scales: str = "max", device: str = "cpu", by_modelopt: bool = False
) -> Packer:
    """C where it is compiled and proves itself, else torch; a GPU where `device` names one; or ModelOpt's own class.

    Raises UsageError for scales that ModelOpt's class does not search.
    """
    if by_modelopt:
        from trtspec.quant.modelopt import ModelOptPacker  # only now: it imports torch

        if weight_scales != "max":
            message = f"`engine` modelopt computes no `weight_scales` {weight_scales}"
            raise UsageError(message, "use `engine` stream, or pass `weight_scales` max")
        return ModelOptPacker(weight_scales, device)

    def in_torch() -> Packer:
        from trtspec.quant.decode import TorchPacker  # only now: importing torch takes seconds

        return TorchPacker(weight_scales, device)

    return (native_packer(weight_scales, in_torch) if device == "cpu" else None) or in_torch()


class _OwnPacker(threading.local):
    """A packer for each thread: a call uses its tables."""

    def __init__(self, new_packer: Callable[[], Packer]) -> None:
        self.packer = new_packer()


def _amax(weight: Weight, rows: Rows, packer: Packer) -> float:
    amax = packer.amax(rows)
    if not math.isfinite(amax):
        raise _refusal(weight, count_not_finite(decoded(rows, packer).values, "BF16")[1])
    return amax


CLASSES = {
    ".experts.": "routed experts ",
    ".shared_experts.": "shared experts ",
    ".mlp.": "dense MLP ",
    ".self_attn.": "attention ",
}


def weight_class(name: str) -> str:
    """The kind of linear, for figures by class: `routed experts down_proj`, `shared experts up_proj`, `dense ...`."""
    module = name.removesuffix(".weight")
    title = next((title for part, title in CLASSES.items() if part in module), "")
    return title + module.rpartition(".")[2]


def _pack(
    file: ShardFile,
    weight: Weight,
    rows: Rows,
    packer: Packer,
    scaling: Scaling,
    input_scale: float,
) -> Errors:
    count, columns = rows.shape
    packed, scale = (
        np.empty((count, columns // 2), np.uint8),
        np.empty((count, columns // BLOCK), np.uint8),
    )
    zeros, head = packer.pack(rows, scaling, packed, scale), min(ERROR_ROWS, count)
    error, norm = packer.errors(rows.head(head), scaling, packed[:head], scale[:head])
    for suffix, data in (
        ("weight", packed.reshape(-1).data),
        ("weight_scale", scale.reshape(-1).data),
        ("weight_scale_2", memoryview(struct.pack("<f", scaling.scale_2))),
        ("input_scale", memoryview(struct.pack("<f", input_scale))),
    ):
        file.append(f"{weight.module}.{suffix}", data)
    return {"tensors": 1, "error": error, "norm": norm, "zero_blocks": zeros}


def _refusal(weight: Weight, index: int | None) -> TrtspecError:
    """For NaN or infinity at the flat `index` of a weight."""
    where = ""
    if index is not None and math.prod(weight.shape) > 1:
        where = f" at {[int(part) for part in np.unravel_index(index, weight.shape)]}"
    return TrtspecError(
        f"TS-QUANT-NOT-FINITE {weight.name} in {weight.parts[0].shard} holds NaN or infinity{where}",
        REMEDY,
    )


def summed(entries: Iterable[tuple[str, Errors]]) -> dict[str, Errors]:
    """The figures of each class added up."""
    found: dict[str, Errors] = {}
    for name, entry in entries:
        total = found.setdefault(name, dict.fromkeys(entry, 0))
        for key, value in entry.items():
            total[key] += value
    return found


def _publish(file: ShardFile, record: Record, sources: dict[Path, str]) -> Record:
    """The checksum of what the kernel will write, then durable under its name. `sources` are the files that were read
    for it, which are in the page cache now, with their recorded SHA-256."""
    digest = file_sha256(file.temporary)
    changed = [
        (HASH, path.name) for path, recorded in sources.items() if file_sha256(path) != recorded
    ]
    publish(file.temporary, file.path)
    return record | {"sha256": digest, "found": [*record["found"], *changed]}


def _set_torch_threads(count: int) -> int:
    """Torch's own threads would wait for each other at every step. Returns how many there were; where C computes, torch
    is not even imported."""
    torch = sys.modules.get("torch")
    if torch is None:
        return count
    before: int = torch.get_num_threads()
    torch.set_num_threads(count)
    return before
