"""Whether the bytes of a source are those of weights: looked at in the pass that reads each tensor anyway.

    content = Content(info)
    content.add(chunk)             # the tensor's bytes in order
    content.found()                # codes of what is wrong with it

A file whose SHA-256 is known is compared with it. NaN and infinity are looked for everywhere: one in a norm or a router
spoils every token and would be invisible until the model's first answer. Where no SHA-256 is known, three checks
remain, each with one threshold: runs of zero bytes (a download that left a hole), magnitudes (a scale that vanished, a
flipped bit of an exponent), and the rounding error of each linear. A tensor that is there twice is a shard that was
written twice.
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

ZERO_RUN = 1024  # bytes; whole rows of zeros are tokens or neurons that are never used
MAGNITUDE = 60  # no weight or scale is beyond 2^60 or, unless it is 0, below 2^-60
ERROR = 0.2  # of a linear's norm; random weights round with 0.095
REPEATED = 4096  # bytes; smaller tensors may be equal by chance or by initialization

Found = list[tuple[str, str]]  # code and tensor, in the order of the plan
HASH, HOLE, ZERO, RANGE, ROUNDING, TWICE = (
    "TS-HASH-DIFFERS", "TS-CONTENT-HOLE", "TS-TARGET-ZERO", "TS-CONTENT-MAGNITUDE", "TS-QUANT-ERROR",
    "TS-CONTENT-REPEATED",
)  # fmt: skip
WHAT = {
    HASH: "files whose SHA-256 is not the recorded one",
    HOLE: f"tensors with {ZERO_RUN:,} or more zero bytes in the middle of a row, as where a download left a hole",
    ZERO: "tensors hold only zeros, as where a file was never filled",
    RANGE: f"tensors hold a value beyond 2^{MAGNITUDE} or below 2^-{MAGNITUDE}, or a scale of 0: a bit was flipped",
    ROUNDING: f"linears are more than {ERROR:g} of their norm off after rounding: one value is far too large",
    TWICE: "tensors have the bytes of another tensor, as where a shard was written twice",
}
BIASES = {"BF16": 7, "F32": 23}  # bits of the mantissa; both have eight bits of exponent


@dataclass
class Content:
    """What one tensor's bytes show; they may come in chunks."""

    info: TensorInfo
    seen: int = 0
    zero: bool = True
    hole: bool = False
    out_of_range: bool = False

    @property
    def may_be_nan(self) -> bool:
        """False where no value is out of range, as NaN and infinity are."""
        return self.out_of_range or self.info.dtype not in BIASES

    def add(self, chunk: np.ndarray[Any, Any]) -> None:
        """`chunk` is uint8, and begins where the last one ended."""
        self.zero = self.zero and not chunk[:64].any() and not chunk.any()
        if len(self.info.shape) == 2 and not self.hole:
            self.hole = _has_hole(chunk, self.seen, self.info.nbytes // self.info.shape[0])
        if self.info.dtype in BIASES and not self.out_of_range:
            scale = self.info.name.rpartition(".")[2] in SIDE_PARTS
            self.out_of_range = _is_out_of_range(chunk, self.info.dtype, scale)
        self.seen += len(chunk)

    def found(self) -> Found:
        if self.zero:
            return [] if self.info.name.endswith("bias") else [(ZERO, self.info.name)]
        codes = [HOLE] * self.hole + [RANGE] * self.out_of_range
        return [(code, self.info.name) for code in codes]


def _has_hole(data: np.ndarray[Any, Any], begin: int, row: int) -> bool:
    """Whether ZERO_RUN bytes or more are zero, other than whole rows; `begin` is the chunk's place in the tensor."""
    step = ZERO_RUN // 2  # a run of ZERO_RUN bytes has a whole block of this size in it
    blocks = data[: len(data) // step * step].reshape(-1, step)
    zero = np.flatnonzero(blocks[:, 0] == 0)
    zero = zero[~blocks[zero].any(1)]
    for run in np.split(zero, np.flatnonzero(np.diff(zero) != 1) + 1) if zero.size else ():
        first, last = max(int(run[0]) - 1, 0) * step, min((int(run[-1]) + 2) * step, len(data))
        filled = np.flatnonzero(data[first:last])
        inner = np.diff(np.concatenate(([-1], filled, [last - first])))
        longest = int(inner.argmax())
        start = first + (int(filled[longest - 1]) + 1 if longest else 0)
        end = start + int(inner[longest]) - 1
        edges = {0, len(data)} if begin else {0}  # a run may continue into the chunk before
        whole = row >= ZERO_RUN and all(
            (begin + edge) % row == 0 or edge in edges for edge in (start, end)
        )
        if end - start >= ZERO_RUN and not whole:
            return True
    return False


def _is_out_of_range(data: np.ndarray[Any, Any], dtype: str, scale: bool) -> bool:
    shift = BIASES[dtype]
    bits = data.view(f"<u{(shift + 9) // 8}")
    least, most = ((127 + sign * MAGNITUDE) << shift for sign in (-1, 1))
    for begin in range(0, bits.size, CACHED):
        size = bits[begin : begin + CACHED] & bits.dtype.type((1 << shift + 8) - 1)
        # of a weight 0 is no wrong value: 0 - 1 is the largest number
        if size.max() >= most or (
            size.min() < least if scale else (size - bits.dtype.type(1)).min() < least - 1
        ):
            return True
    return False


def repeated(digests: Iterable[tuple[str, str]]) -> Found:
    """Of (name, digest) pairs, those whose digest an earlier name has."""
    first: dict[str, str] = {}
    return [
        (TWICE, f"{name} is {first[digest]}")
        for name, digest in digests
        if first.setdefault(digest, name) != name
    ]


def content_problems(found: Found) -> list[Problem]:
    """One problem for each code. An expert whose linears are all zero was never used: that is a warning."""
    zeros = [name for code, name in found if code == ZERO]
    unused = [name for name in zeros if _unused(name, zeros)]
    problems = []
    for code, what in WHAT.items():
        names = list(
            dict.fromkeys(
                name
                for each, name in found
                if each == code and (code != ZERO or name not in unused)
            )
        )
        problems += [grouped(code, names, what=what)] if names else []
    if unused:
        what = "linears of experts that are entirely zero, as those of experts that are never used"
        problems.append(grouped(ZERO, unused, "warning", what))
    return problems


def _unused(name: str, zeros: list[str]) -> bool:
    expert = name.rsplit(".", 2)[0]
    linears = {each.rsplit(".", 2)[1] for each in zeros if each.startswith(f"{expert}.")}
    return ".experts." in name and len(linears) == 3
