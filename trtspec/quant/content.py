"""Whether the bytes of a source are weights: checked in the pass that reads each tensor.

    content = Content(info)
    content.add(chunk)             # the tensor's bytes in order
    content.findings()             # codes of what is wrong with the tensor

A file whose SHA-256 is recorded is compared with it. NaN and infinity are searched everywhere: one
in a norm or a router spoils every token and would be invisible until the model's first answer.
Where no SHA-256 is recorded, three checks remain, each with one threshold: runs of zero bytes (a
download that left a hole), magnitudes (a scale that vanished, a flipped bit of an exponent), and
the rounding error of each linear. Two equal tensors mean that a shard was written twice.
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
Findings = list[tuple[str, str]]  # (code, tensor or file) in the order of the plan

MIN_HOLE_BYTES = 1024  # whole rows of zeros are no hole: such tokens or neurons are never used
MAX_EXPONENT = 60  # no weight or scale is beyond 2^60 or, unless it is 0, below 2^-60
MAX_ROUNDING_ERROR = 0.2  # of a linear's norm; random weights round with 0.095
MIN_REPEATED_BYTES = 4096  # smaller tensors may be equal by chance or by initialization

HASH_DIFFERS = "TS-HASH-DIFFERS"
HOLE = "TS-CONTENT-HOLE"
ALL_ZERO = "TS-TARGET-ZERO"
OUT_OF_RANGE = "TS-CONTENT-MAGNITUDE"
ROUNDING = "TS-QUANT-ERROR"
REPEATED = "TS-CONTENT-REPEATED"
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
    """Checks the bytes of one tensor, which may come in chunks. `seen`: bytes so far."""

    info: TensorInfo
    seen: int = 0
    all_zero: bool = True
    has_hole: bool = False
    out_of_range: bool = False

    @property
    def may_be_nan(self) -> bool:
        """False if every value is in range, which NaN and infinity are not."""
        return self.out_of_range or self.info.dtype not in MANTISSA_BITS

    def add(self, chunk: Bytes) -> None:
        """Checks a chunk that begins where the last one ended."""
        shape = self.info.shape
        # The first bytes decide for nearly every tensor.
        self.all_zero = self.all_zero and not chunk[:64].any() and not chunk.any()
        if len(shape) == 2 and not self.has_hole:
            row_bytes = self.info.nbytes // shape[0]
            self.has_hole = _has_hole(chunk, self.seen, row_bytes)
        if self.info.dtype in MANTISSA_BITS and not self.out_of_range:
            suffix = self.info.name.rpartition(".")[2]
            self.out_of_range = _is_out_of_range(chunk, self.info.dtype, suffix in SIDE_PARTS)
        self.seen += len(chunk)

    def findings(self) -> Findings:
        """Faults of the bytes so far, by code. A bias may be all zero."""
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
    """Whether MIN_HOLE_BYTES consecutive bytes or more are zero, other than whole matrix rows.

    `begin`: offset of the chunk in its tensor.
    """
    # A run of MIN_HOLE_BYTES contains a whole block of half that size, wherever it begins.
    step = MIN_HOLE_BYTES // 2
    blocks = chunk[: len(chunk) // step * step].reshape(-1, step)
    zero_blocks = np.flatnonzero(blocks[:, 0] == 0)
    zero_blocks = zero_blocks[~blocks[zero_blocks].any(1)]
    if not zero_blocks.size:
        return False
    breaks = np.flatnonzero(np.diff(zero_blocks) != 1) + 1
    for run in np.split(zero_blocks, breaks):
        first = max(int(run[0]) - 1, 0) * step
        last = min((int(run[-1]) + 2) * step, len(chunk))
        start, end = _longest_zeros(chunk, first, last)
        if end - start < MIN_HOLE_BYTES:
            continue
        if row_bytes < MIN_HOLE_BYTES:
            return True
        # Zeros at the edge of a later chunk may continue in the chunk beside it.
        starts_row = start == 0 or (begin + start) % row_bytes == 0
        ends_row = (begin > 0 and end == len(chunk)) or (begin + end) % row_bytes == 0
        if not (starts_row and ends_row):
            return True
    return False


def _longest_zeros(chunk: Bytes, first: int, last: int) -> tuple[int, int]:
    """Begin and end of the longest run of zero bytes in chunk[first:last]."""
    nonzero = first + np.flatnonzero(chunk[first:last])
    bounds = np.concatenate(([first - 1], nonzero, [last]))
    longest = int(np.diff(bounds).argmax())
    return int(bounds[longest]) + 1, int(bounds[longest + 1])


def _is_out_of_range(chunk: Bytes, dtype: str, is_scale: bool) -> bool:
    """Whether a magnitude is beyond 2^MAX_EXPONENT or below 2^-MAX_EXPONENT. A weight may be 0."""
    mantissa_bits = MANTISSA_BITS[dtype]
    values = chunk.view(f"<u{(mantissa_bits + 9) // 8}")
    unsigned = values.dtype.type
    without_sign = unsigned((1 << mantissa_bits + 8) - 1)
    # 0 - 1 wraps around to the largest number, so a weight of 0 is not below the limit.
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
    """One finding for each (name, digest) whose digest an earlier name has."""
    first_names: dict[str, str] = {}
    findings = []
    for name, digest in digests:
        first = first_names.setdefault(digest, name)
        if first != name:
            findings.append((REPEATED, f"{name} is {first}"))
    return findings


def content_problems(findings: Findings) -> list[Problem]:
    """One problem for each code. An expert whose linears are all zero was never used: a warning."""
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
    """Whether all three linears of the expert that `name` is of are among `zeros`."""
    expert = name.rsplit(".", 2)[0]
    siblings = [zero for zero in zeros if zero.startswith(f"{expert}.")]
    linears = {zero.rsplit(".", 2)[1] for zero in siblings}
    return ".experts." in name and len(linears) == 3
