"""Checks for damaged bytes of a source, made while the conversion reads each tensor.

    content = Content(info)
    content.add(chunk)             # the tensor's bytes in order
    content.findings()             # codes of the tensor's faults

If the SHA-256 of a file is recorded, the conversion compares it. Many sources have no record, so
the bytes of every tensor are checked too. The checks find runs of zero bytes (a download left a
hole) and extreme magnitudes (a bit of an exponent was flipped). They also find a large rounding
error of a linear, and tensors with equal bytes (a shard was written twice). NaN and infinity are
searched in every tensor, because one in a norm or a router spoils every token.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from trtspec.checkpoint.headers import TensorInfo
from trtspec.checkpoint.target_tensors import grouped
from trtspec.checkpoint.values import CACHED
from trtspec.errors import Problem
from trtspec.formats import SIDE_PARTS

Bytes = np.ndarray[Any, np.dtype[np.uint8]]
Findings = list[tuple[str, str]]  # code of a fault and name of the tensor or file, in plan order

# Shortest run of zero bytes that counts as a hole. Whole rows of zeros do not count, because they
# belong to tokens or neurons that are never used.
MIN_HOLE_BYTES = 1024
# Magnitudes of real weights and scales are between 2^-60 and 2^60, or a weight is 0.
MAX_EXPONENT = 60
# Largest rounding error, as a fraction of the linear's norm. Random weights have 0.095. A wrong
# scale or a wrong order of values is far above.
MAX_ROUNDING_ERROR = 0.2
MIN_REPEATED_BYTES = 4096  # smaller tensors may be equal by chance or by initialization

HASH_DIFFERS = "TS-HASH-DIFFERS"
HOLE = "TS-CONTENT-HOLE"
ALL_ZERO = "TS-TARGET-ZERO"
OUT_OF_RANGE = "TS-CONTENT-MAGNITUDE"
ROUNDING = "TS-QUANT-ERROR"
REPEATED = "TS-CONTENT-REPEATED"
# Message of a problem, by code. The number of findings and the first finding are written after it.
SUMMARIES = {
    HASH_DIFFERS: "files whose SHA-256 is not the recorded one",
    HOLE: f"tensors with {MIN_HOLE_BYTES:,} or more zero bytes in the middle of a row, as where a "
    "download left a hole",
    ALL_ZERO: "tensors hold only zeros, as where a file was never filled",
    OUT_OF_RANGE: f"tensors hold a value beyond 2^{MAX_EXPONENT} or below 2^-{MAX_EXPONENT}, or a "
    "scale of 0: a bit was flipped",
    ROUNDING: f"linears are more than {MAX_ROUNDING_ERROR:g} of their norm off after rounding: "
    "one value is far too large",
    REPEATED: "tensors have the bytes of another tensor, as where a shard was written twice",
}
MANTISSA_BITS = {"BF16": 7, "F32": 23}  # both have an exponent of eight bits with bias 127


@dataclass
class Content:
    """Check of one tensor's bytes, which may arrive in chunks.

    info: header entry of the tensor.
    seen: number of bytes so far.
    all_zero: whether all bytes so far are zero.
    has_hole: whether a run of zero bytes was found that is not a number of whole rows.
    out_of_range: whether a magnitude was too large or too small.
    """

    info: TensorInfo
    seen: int = 0
    all_zero: bool = True
    has_hole: bool = False
    out_of_range: bool = False

    @property
    def may_be_nan(self) -> bool:
        """Whether a value may be NaN or infinite. Other dtypes than BF16 and F32 are not checked.

        In BF16 and F32, NaN and infinity are out of range, because their exponent is the largest.
        """
        return self.out_of_range or self.info.dtype not in MANTISSA_BITS

    def add(self, chunk: Bytes) -> None:
        """Checks the next chunk of the tensor's bytes."""
        shape = self.info.shape
        # 64 bytes are checked first, because they decide for nearly every tensor.
        self.all_zero = self.all_zero and not chunk[:64].any() and not chunk.any()
        if len(shape) == 2 and not self.has_hole:
            row_bytes = self.info.nbytes // shape[0]
            self.has_hole = _has_hole(chunk, self.seen, row_bytes)
        if self.info.dtype in MANTISSA_BITS and not self.out_of_range:
            suffix = self.info.name.rpartition(".")[2]
            self.out_of_range = _is_out_of_range(chunk, self.info.dtype, suffix in SIDE_PARTS)
        self.seen += len(chunk)

    def findings(self) -> Findings:
        """Returns the faults of the bytes so far. A bias that is all zero is not a fault."""
        name = self.info.name
        if self.all_zero:
            return [] if name.endswith("bias") else [(ALL_ZERO, name)]
        findings = []
        if self.has_hole:
            findings.append((HOLE, name))
        if self.out_of_range:
            findings.append((OUT_OF_RANGE, name))
        return findings


def _has_hole(chunk: Bytes, begin: int, row_bytes: int) -> bool:
    """Whether a chunk has a run of MIN_HOLE_BYTES or more zero bytes that is not whole rows.

    If a row is shorter than MIN_HOLE_BYTES, any such run counts, even if it is whole rows.

    Args:
        chunk: bytes of a matrix.
        begin: offset of the chunk in the matrix, in bytes.
        row_bytes: size of a row of the matrix, in bytes.
    """
    # A run of MIN_HOLE_BYTES contains an aligned block of half this size. So only neighbourhoods of
    # zero blocks are searched byte by byte.
    block_bytes = MIN_HOLE_BYTES // 2
    blocks = chunk[: len(chunk) // block_bytes * block_bytes].reshape(-1, block_bytes)
    # Most blocks are excluded by their first byte.
    zero_blocks = np.flatnonzero(blocks[:, 0] == 0)
    zero_blocks = zero_blocks[~blocks[zero_blocks].any(1)]
    if not zero_blocks.size:
        return False
    # Consecutive zero blocks are one run, which may begin and end in the neighbouring blocks.
    breaks = np.flatnonzero(np.diff(zero_blocks) != 1) + 1
    for run in np.split(zero_blocks, breaks):
        first = max(int(run[0]) - 1, 0) * block_bytes
        last = min((int(run[-1]) + 2) * block_bytes, len(chunk))
        start, end = _longest_zeros(chunk, first, last)
        if end - start < MIN_HOLE_BYTES:
            continue
        if row_bytes < MIN_HOLE_BYTES:
            return True
        # Zeros at the edge of a chunk may continue in the neighbouring chunk, so an edge counts as
        # the edge of a row.
        starts_row = start == 0 or (begin + start) % row_bytes == 0
        ends_row = end == len(chunk) or (begin + end) % row_bytes == 0
        if not (starts_row and ends_row):
            return True
    return False


def _longest_zeros(chunk: Bytes, first: int, last: int) -> tuple[int, int]:
    """Returns begin and end, in `chunk`, of the longest run of zeros in chunk[first:last]."""
    nonzero = first + np.flatnonzero(chunk[first:last])
    # Each run of zeros lies between two neighbouring bounds.
    bounds = np.concatenate(([first - 1], nonzero, [last]))
    longest = int(np.diff(bounds).argmax())
    return int(bounds[longest]) + 1, int(bounds[longest + 1])


def _is_out_of_range(chunk: Bytes, dtype: str, is_scale: bool) -> bool:
    """Whether a magnitude is beyond 2^MAX_EXPONENT or below 2^-MAX_EXPONENT.

    Args:
        chunk: bytes of whole values.
        dtype: "BF16" or "F32".
        is_scale: whether the values are scales. A scale must not be 0, but a weight may be.
    """
    mantissa_bits = MANTISSA_BITS[dtype]
    value_bytes = (mantissa_bits + 9) // 8  # 9: sign and exponent
    values = chunk.view(f"<u{value_bytes}")
    unsigned = values.dtype.type
    without_sign = unsigned((1 << mantissa_bits + 8) - 1)
    # The bits of positive floats, read as integers, have the order of the floats. Subtracting 1
    # from the bits of 0 wraps around to the largest integer, so a weight of 0 is above `least`.
    offset = 0 if is_scale else 1
    least = ((127 - MAX_EXPONENT) << mantissa_bits) - offset
    most = (127 + MAX_EXPONENT) << mantissa_bits
    for begin in range(0, values.size, CACHED):
        magnitudes = values[begin : begin + CACHED] & without_sign
        if magnitudes.max() >= most:
            return True
        magnitudes -= unsigned(offset)
        if magnitudes.min() < least:
            return True
    return False


def repeated(digests: Iterable[tuple[str, str]]) -> Findings:
    """Returns a finding for each tensor with the same digest as an earlier tensor.

    `digests`: name and digest of each tensor.
    """
    first_names: dict[str, str] = {}
    findings = []
    for name, digest in digests:
        first = first_names.setdefault(digest, name)
        if first != name:
            findings.append((REPEATED, f"{name} is {first}"))
    return findings


def content_problems(findings: Findings) -> list[Problem]:
    """Returns one problem per code of the findings.

    Findings of zero tensors are a warning if all linears of the expert are zero. Such an expert may
    never have been used.
    """
    zeros = [name for code, name in findings if code == ALL_ZERO]
    unused = [name for name in zeros if _is_of_unused_expert(name, zeros)]
    warned = {(ALL_ZERO, name) for name in unused}
    errors = dict.fromkeys(finding for finding in findings if finding not in warned)
    problems = []
    for code, summary in SUMMARIES.items():
        names = [name for finding_code, name in errors if finding_code == code]
        if names:
            problems.append(grouped(code, names, what=summary))
    if unused:
        summary = (
            "linears of experts that are entirely zero, as those of experts that are never used"
        )
        problems.append(grouped(ALL_ZERO, unused, "warning", summary))
    return problems


def _is_of_unused_expert(name: str, zeros: list[str]) -> bool:
    """Whether `name` is a linear of an expert whose three linears are all in `zeros`."""
    expert = name.rsplit(".", 2)[0]
    siblings = [zero for zero in zeros if zero.startswith(f"{expert}.")]
    linears = {zero.rsplit(".", 2)[1] for zero in siblings}
    return ".experts." in name and len(linears) == 3
