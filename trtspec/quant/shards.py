"""Conversion of shards to NVFP4 by a pool of threads, one group of linears at a time.

The linears of a group share their scale. A thread reads a group, packs it in C, and writes it into
the shard. All of these release the interpreter lock. At most one group per thread is in memory.
Results are returned in the plan's order, so they do not depend on the speed of the threads.
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
from trtspec.quant.content import HASH_DIFFERS, MAX_ROUNDING_ERROR, ROUNDING, Content, Findings
from trtspec.quant.conversion_plan import Conversion, Group, ShardPlan, Weight
from trtspec.quant.native import (
    BLOCK,
    Array,
    Packer,
    Rows,
    Scaling,
    decoded_rows,
    native_packer,
    packable_rows,
    read_bytes,
    read_rows,
)
from trtspec.report import ProgressBar, file_sha256

REMEDY = "download that file again and compare its sha256 with the hub's"
ERROR_ROWS = 64  # number of first rows of a tensor on which the rounding error is measured
COPY_BYTES = 16 << 20  # bytes of a copied tensor in memory at a time
# Memory for each thread. The largest group of any Kimi (gate and up projections of the dense
# layer, stored and packed) needs less.
THREAD_BYTES = 1 << 30
# Journal record of a shard. `read`: digest of each weight. `found`: findings. `classes`: Errors by
# class of linear. `times`: last write of each source in nanoseconds. `sha256`: of the shard.
Record = dict[str, Any]
# Sums over linears. `tensors`: number of linears. `error` and `norm`: squared norms of difference
# and source in the measured rows. `zero_blocks`: number of blocks that are entirely zero.
Errors = dict[str, float]


def convert_shards(
    conversion: Conversion,
    plans: list[ShardPlan],
    threads: int,
    hashes: dict[str, str],
    bar: ProgressBar,
) -> Iterator[tuple[ShardPlan, Record]]:
    """Converts shards. Yields plan and journal record of each shard after it is durably on disk.

    Raises TrtspecError if a tensor cannot be converted. Unfinished files are then removed.

    Args:
        conversion: the conversion.
        plans: the shards to write.
        threads: number of threads.
        hashes: recorded SHA-256 by source file. An entry is removed and compared after the first
            shard that reads the file.
        bar: progress bar, which advances by converted source bytes.
    """
    source = conversion.checkpoint.path
    options = conversion.options
    new_packer = partial(
        choose_packer, conversion.weight_scales, options.device, options.by_modelopt
    )
    reader = ShardReader(source)
    files = list[ShardFile]()
    publishing: deque[tuple[ShardPlan, Future[Record]]] = deque()
    pool = ThreadPoolExecutor(threads, thread_name_prefix="convert")
    torch_threads = _set_torch_threads(1)
    try:
        converter = Converter(reader, new_packer)
        for plan in plans:
            # Taken before the first read, so that a resumed run notices any later write.
            times = plan.source_times(source)
            file = ShardFile(conversion.output / plan.shard, plan.layout())
            files.append(file)
            results = []
            converted = pool.map(partial(converter.convert, file), plan.groups)
            for group, result in zip(plan.groups, converted, strict=True):
                results.append(result)
                bar.advance(sum(weight.bytes_in for weight in group.weights))
                # Shards are published in the background, and reported in their order.
                while publishing and publishing[0][1].done():
                    published, future = publishing.popleft()
                    yield published, future.result()
            file.close()
            record = _shard_record(results, times)
            recorded = {source / name: hashes.pop(name) for name in plan.sources if name in hashes}
            publishing.append((plan, pool.submit(_publish, file, record, recorded)))
        for plan, future in publishing:
            yield plan, future.result()
    finally:
        pool.shutdown(cancel_futures=True)
        for file in files:
            file.abandon()  # does nothing for a published file
        reader.close()
        _set_torch_threads(torch_threads)


def thread_count(requested: int, plans: list[ShardPlan]) -> int:
    """Number of threads for these shards, at most one per group of linears.

    `requested`: number of threads that the user wants. 0: as many as cores and memory allow.
    """
    groups = sum(len(plan.groups) for plan in plans)
    fitting = min(machine.cores(), machine.free_memory() // THREAD_BYTES)
    return max(1, min(requested or fitting, groups))


def _set_torch_threads(count: int) -> int:
    """Sets torch's number of threads, and returns the previous number.

    The conversion has threads of its own, and torch's threads in each of them would wait for each
    other. If torch is not imported, because C computes, returns `count`.
    """
    torch = sys.modules.get("torch")
    if torch is None:
        return count
    previous: int = torch.get_num_threads()
    torch.set_num_threads(count)
    return previous


@dataclass
class Converted:
    """Result of a converted group.

    Args:
        read: digest of the stored bytes of each weight.
        findings: faults of the weights' bytes, as code and tensor name.
        errors: class and rounding error of each linear.
    """

    read: list[str] = field(default_factory=list)
    findings: Findings = field(default_factory=list)
    errors: list[tuple[str, Errors]] = field(default_factory=list)


class Converter:
    """Converter of the groups of one checkpoint. Several threads may use it at once.

    Args:
        reader: reader of the source's shards.
        new_packer: function that creates a packer, which is called once per thread.
    """

    def __init__(self, reader: ShardReader, new_packer: Callable[[], Packer]) -> None:
        self.reader = reader
        self._thread = _ThreadPacker(new_packer)

    def convert(self, file: ShardFile, group: Group) -> Converted:
        """Converts the weights of a group, and writes the resulting tensors into `file`."""
        result = Converted()
        weight = group.weights[0]  # the only weight, unless the group is quantized
        if weight.action == "copy":
            self._copy(file, weight, result)
        elif weight.action == "decode":
            self._decode(file, weight, result)
        else:
            self._quantize(file, group, result)
        return result

    def _copy(self, file: ShardFile, weight: Weight, result: Converted) -> None:
        """Copies a tensor unchanged, in chunks, because embeddings are large.

        Raises TrtspecError if the tensor holds NaN or infinity.
        """
        info = weight.parts[0]
        content = Content(info)
        digest = xxhash.xxh3_128()
        for chunk in self.reader.pieces(info, COPY_BYTES):
            offset = content.seen
            digest.update(chunk)
            content.add(np.frombuffer(chunk, np.uint8))
            if content.may_be_nan:
                _, index = count_not_finite(chunk, info.dtype)
                if index is not None:
                    value_bytes = DTYPE_BITS[info.dtype] // 8
                    raise _not_finite(weight, offset // value_bytes + index)
            file.append(weight.name, chunk)
        result.findings += content.findings()
        result.read.append(digest.hexdigest())

    def _decode(self, file: ShardFile, weight: Weight, result: Converted) -> None:
        """Writes a quantized tensor that the policy excludes as BF16.

        Raises TrtspecError if the decoded tensor holds NaN or infinity.
        """
        rows = decoded_rows(self._read(weight, result), self._thread.packer)
        values = rows.values.reshape(-1)
        _, index = count_not_finite(values, "BF16")
        if index is not None:
            raise _not_finite(weight, index)
        file.append(weight.name, values.view(np.uint8).data)

    def _quantize(self, file: ShardFile, group: Group, result: Converted) -> None:
        """Quantizes the linears of a group with the scale that they and their partners share.

        Raises TrtspecError if a weight holds NaN or infinity, or if all weights are too small.
        """
        packer = self._thread.packer
        rows = [packable_rows(self._read(weight, result), packer) for weight in group.weights]
        maxima = [
            _finite_amax(weight, weight_rows, packer)
            for weight, weight_rows in zip(group.weights, rows, strict=True)
        ]
        for partner in group.partners:
            partner_rows = packable_rows(self._read(partner, result), packer)
            maxima.append(_finite_amax(partner, partner_rows, packer))
        # The digests of partners are dropped, because the partners' own groups record them.
        del result.read[len(group.weights) :]
        amax = max(maxima)
        if 0 < amax < TINIEST_AMAX:
            # The search of block scales would underflow in float32.
            first = group.weights[0]
            text = f"{first.name} in {first.parts[0].shard} has no weight above 2^-88"
            raise TrtspecError(text, REMEDY, "TS-CONTENT-MAGNITUDE")
        scaling = Scaling.of(amax)
        for weight, weight_rows in zip(group.weights, rows, strict=True):
            errors = _pack(file, weight, weight_rows, packer, scaling, group.input_scale)
            result.errors.append((weight_class(weight.name), errors))
            if errors["error"] > MAX_ROUNDING_ERROR**2 * errors["norm"]:
                result.findings.append((ROUNDING, weight.module))

    def _read(self, weight: Weight, result: Converted) -> Rows:
        """Reads the stored tensors of a weight, and adds their digest and findings to `result`.

        Raises TrtspecError if the stored shapes contradict each other, or if a scale is negative.
        """
        digest = xxhash.xxh3_128()

        def read(info: TensorInfo) -> Array:
            data = read_bytes(self.reader, info)
            digest.update(data.data)
            content = Content(info)
            content.add(data)
            result.findings += content.findings()
            return data

        rows = read_rows(read, weight.format, weight.parts)
        result.read.append(digest.hexdigest())
        # U8 scales are exponents, which have no sign.
        if rows.scale is not None and rows.scale_dtype != "U8":
            sign_bit = 8 * rows.scale.itemsize - 1
            if bool((rows.scale >> sign_bit).any()):
                info = weight.parts[1]
                text = f"{info.name} in {info.shard} holds a negative scale"
                raise TrtspecError(text, "download that file again", "TS-TARGET-BAD-SCALE")
        return rows


class _ThreadPacker(threading.local):
    """Thread-local packer. Each thread has a packer of its own, because calls use its tables."""

    def __init__(self, new_packer: Callable[[], Packer]) -> None:
        self.packer = new_packer()


def choose_packer(
    weight_scales: str = "max", device: str = "cpu", by_modelopt: bool = False
) -> Packer:
    """Returns the packer for these options.

    On a CPU it is the packer in C if it compiles. Otherwise it is the packer in torch. Raises
    UsageError if ModelOpt's class does not compute the scales. Raises TrtspecError if the C packer
    gives other bytes than torch.

    Args:
        weight_scales: "max" or "mse".
        device: torch device.
        by_modelopt: whether ModelOpt's own class packs.
    """
    if by_modelopt:
        from trtspec.quant.modelopt import ModelOptPacker  # here, because it imports torch

        if weight_scales != "max":
            message = f"`engine` modelopt computes no `weight_scales` {weight_scales}"
            raise UsageError(message, "use `engine` stream, or pass `weight_scales` max")
        return ModelOptPacker(weight_scales, device)

    def torch_packer() -> Packer:
        from trtspec.quant.decode import TorchPacker  # here, because importing torch takes seconds

        return TorchPacker(weight_scales, device)

    if device == "cpu":
        packer = native_packer(weight_scales, torch_packer)
        if packer is not None:
            return packer
    return torch_packer()


def _finite_amax(weight: Weight, rows: Rows, packer: Packer) -> float:
    """Returns max|w|. Raises TrtspecError with the index if the weight holds NaN or infinity."""
    amax = packer.amax(rows)
    if not math.isfinite(amax):
        _, index = count_not_finite(decoded_rows(rows, packer).values, "BF16")
        raise _not_finite(weight, index)
    return amax


def _not_finite(weight: Weight, index: int | None) -> TrtspecError:
    """Returns the error for a weight with NaN or infinity.

    `index`: flat index of the value in the weight. None: the message has no index.
    """
    text = f"TS-QUANT-NOT-FINITE {weight.name} in {weight.parts[0].shard} holds NaN or infinity"
    if index is not None and math.prod(weight.shape) > 1:
        position = [int(axis) for axis in np.unravel_index(index, weight.shape)]
        text += f" at {position}"
    return TrtspecError(text, REMEDY)


def _pack(
    file: ShardFile,
    weight: Weight,
    rows: Rows,
    packer: Packer,
    scaling: Scaling,
    input_scale: float,
) -> Errors:
    """Packs a linear, and writes its four tensors into `file`.

    Returns the rounding error, measured on the first ERROR_ROWS rows.
    """
    count, columns = rows.shape
    packed = np.empty((count, columns // 2), np.uint8)
    scale = np.empty((count, columns // BLOCK), np.uint8)
    zero_blocks = packer.pack(rows, scaling, packed, scale)
    measured = min(ERROR_ROWS, count)
    head = rows.head(measured)
    error, norm = packer.errors(head, scaling, packed[:measured], scale[:measured])
    for suffix, data in (
        ("weight", packed.reshape(-1).data),
        ("weight_scale", scale.reshape(-1).data),
        ("weight_scale_2", memoryview(struct.pack("<f", scaling.scale_2))),
        ("input_scale", memoryview(struct.pack("<f", input_scale))),
    ):
        file.append(f"{weight.module}.{suffix}", data)
    return {"tensors": 1, "error": error, "norm": norm, "zero_blocks": zero_blocks}


# Beginning of a class's name, by a part of the linear's name. The first match counts.
CLASSES = {
    ".experts.": "routed experts ",
    ".shared_experts.": "shared experts ",
    ".mlp.": "dense MLP ",
    ".self_attn.": "attention ",
}


def weight_class(name: str) -> str:
    """Name of a linear's class in reports, such as `routed experts down_proj`."""
    module = name.removesuffix(".weight")
    title = next((title for part, title in CLASSES.items() if part in module), "")
    return title + module.rpartition(".")[2]


def _shard_record(results: list[Converted], times: dict[str, int]) -> Record:
    """Returns the journal record of a shard, still without the shard's checksum.

    Args:
        results: results of the shard's groups, in order.
        times: time of the last write of each source, in nanoseconds.
    """
    digests = list[str]()
    findings = Findings()
    errors = list[tuple[str, Errors]]()
    for result in results:
        digests += result.read
        findings += result.findings
        errors += result.errors
    unique_findings = list(dict.fromkeys(findings))
    return {
        "read": digests,
        "found": unique_findings,
        "classes": summed(errors),
        "times": times,
    }


def summed(entries: Iterable[tuple[str, Errors]]) -> dict[str, Errors]:
    """Returns the sums of the errors by class. `entries`: class and errors of each linear."""
    totals: dict[str, Errors] = {}
    for name, entry in entries:
        total = totals.setdefault(name, dict.fromkeys(entry, 0))
        for key, value in entry.items():
            total[key] += value
    return totals


def _publish(file: ShardFile, record: Record, recorded: dict[Path, str]) -> Record:
    """Makes a shard durable under its final name. Returns the completed journal record.

    Args:
        file: the written shard.
        record: journal record without the checksum.
        recorded: recorded SHA-256 by source file. A file that differs is added to the findings.
            The files were just read, so hashing them finds their bytes in the page cache.
    """
    digest = file_sha256(file.temporary)
    findings = list(record["found"])
    for path, recorded_digest in recorded.items():
        if file_sha256(path) != recorded_digest:
            findings.append((HASH_DIFFERS, path.name))
    publish(file.temporary, file.path)
    return record | {"sha256": digest, "found": findings}
