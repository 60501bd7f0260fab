"""What a packer sees and gives (rows of a weight as stored, the scale of a group, NVFP4 bytes), and the one in C.

A packer reads what lies on disk (BF16, INT4 with group scales, FP8 with block scales), so that a source need not be
decoded where it can be translated. The one here is compiled where a compiler is found and loaded through ctypes; its
calls release the interpreter lock, so that reading, computing and writing overlap. Nothing depends on it: without
a compiler, or with TRTSPEC_KERNEL=torch, the same bytes come from the one in decode, 30 to 1,000 times slower.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import mmap
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from trtspec.checkpoint.headers import DTYPE_BITS, ShardReader, TensorInfo
from trtspec.errors import TrtspecError, UsageError
from trtspec.formats import FP8_BLOCK_SIZE, NVFP4_BLOCK, NVFP4_RANGE, WeightFormat

Array = np.ndarray[Any, np.dtype[Any]]
BLOCK = NVFP4_BLOCK

SOURCE = Path(__file__).with_name("nvfp4_kernel.c")
# contraction would fuse a product and a sum into one rounding; then the bytes would depend on the processor.
# Nobody looks at errno or floating-point exceptions; to keep them would forbid vectors.
FLAGS = ("-O3", "-march=native", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math", "-Wno-psabi",
         "-shared", "-fPIC")  # fmt: skip
COMPILERS = ("cc", "gcc", "clang")

POINTER, SIZE, FLOAT, UINT32 = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_float, ctypes.c_uint32
SIGNATURES: dict[str, tuple[type | None, tuple[type, ...]]] = {
    "bf16_amax": (UINT32, (POINTER, SIZE)),
    "bf16_pack": (SIZE, (POINTER, SIZE, FLOAT, POINTER, POINTER)),
    "bf16_pack_mse": (SIZE, (POINTER, SIZE, FLOAT, FLOAT, POINTER, POINTER)),
    "int4_amax": (UINT32, (POINTER, POINTER, SIZE, SIZE)),
    "int4_pack": (SIZE, (POINTER, POINTER, SIZE, SIZE, FLOAT, POINTER, POINTER, POINTER)),
    "int4_pack_mse": (
        SIZE,
        (POINTER, POINTER, SIZE, SIZE, FLOAT, FLOAT, POINTER, POINTER, POINTER),
    ),
    "int4_decode": (None, (POINTER, POINTER, SIZE, SIZE, POINTER)),
    "fp8_decode": (None, (POINTER, POINTER, SIZE, SIZE, SIZE, POINTER)),
    "error_sums": (None, (POINTER, POINTER, POINTER, SIZE, FLOAT, POINTER)),
    "tables_bytes": (SIZE, ()),
    "searches_bytes": (SIZE, ()),
}


@dataclass(frozen=True)
class Rows:
    """Some rows of a weight as stored: `values` [n, K] BF16, [n, K/8] INT4 or [n, K] FP8, unsigned integers of the
    width of `dtype`, the safetensors code.

    `scale` is [n, K/group] for INT4, [ceil(n/128), ceil(K/128)] for FP8.
    """

    format: WeightFormat
    dtype: str
    values: Array
    scale: Array | None = None
    scale_dtype: str = ""

    @property
    def shape(self) -> tuple[int, int]:
        rows, columns = self.values.shape
        return rows, columns * self.format.values_per_element

    def head(self, rows: int) -> Rows:
        """The first `rows` of prepared ones."""
        scale = None if self.scale is None else self.scale[:rows]
        return Rows(self.format, self.dtype, self.values[:rows], scale, self.scale_dtype)


def read_rows(
    read: Callable[[TensorInfo], Array], format: WeightFormat, parts: Sequence[TensorInfo]
) -> Rows:
    """A linear from its stored tensors. Raises TrtspecError if they contradict each other."""
    views: list[Array] = []
    for info, kind in zip(parts, format.storage.kinds, strict=False):
        view = read(info).view(f"u{DTYPE_BITS[info.dtype] // 8}").reshape(-1, info.shape[-1])
        if kind == "shape":
            rows, columns = views[0].shape
            shape = [rows, columns * format.values_per_element]
            if view.reshape(-1).tolist() != shape:
                text = f"{info.name} is {view.tolist()}, the packed tensor holds {shape}"
                raise TrtspecError(text, "download the checkpoint again")
        views.append(view)
    if len(views) == 1:
        return Rows(format, parts[0].dtype, views[0])
    return Rows(format, parts[0].dtype, views[0], views[1], parts[1].dtype)


def read_bytes(reader: ShardReader, info: TensorInfo) -> Array:
    """All bytes of a tensor."""
    data: Array = np.empty(info.nbytes, np.uint8)
    reader.read_bytes(info, info.begin, data.data)
    return data


class Scaling(NamedTuple):
    """What a group of linears shares: their largest magnitude and `scale_2`, both exact in float32."""

    amax: float
    scale_2: float

    @staticmethod
    def of(amax: float) -> Scaling:
        """As `nvfp4.scale_2_of`."""
        return Scaling(amax, float32(amax / NVFP4_RANGE) or float32(1.0 / NVFP4_RANGE))


def float32(value: float) -> float:
    """Rounded to float32; for one operation on float32 values in double this is the float32 result."""
    return ctypes.c_float(value).value


class Packer(Protocol):
    """`weight_scales` is max or mse; `name` is c or torch. `amax`, `pack` and `errors` take prepared rows."""

    name: str
    weight_scales: str

    def translates(self, rows: Rows) -> bool:
        """Whether it packs these quantized rows as they are stored."""

    def decode(self, rows: Rows, result: Array) -> None:
        """Fills uint16 `result` [n, K] with BF16 values."""

    def amax(self, rows: Rows) -> float:
        """max|w|; NaN or infinity where the weight is not finite."""

    def pack(self, rows: Rows, scaling: Scaling, packed: Array, scale: Array) -> int:
        """Fills uint8 `packed` [n, K/2] and `scale` [n, K/16]; returns how many blocks are zero."""

    def errors(
        self, rows: Rows, scaling: Scaling, packed: Array, scale: Array
    ) -> tuple[float, float]:
        """Squared error of the packed rows and squared norm of the source's."""


def decoded(rows: Rows, packer: Packer) -> Rows:
    """The rows as BF16."""
    if rows.scale is None and rows.dtype == "BF16":
        return rows
    values: Array = np.empty(rows.shape, np.uint16)
    packer.decode(rows, values)
    return Rows(WeightFormat.BF16, "BF16", values)


def prepared(rows: Rows, packer: Packer) -> Rows:
    """The rows as a packer packs them: plain, or quantized as it translates them; else decoded, once."""
    return rows if rows.scale is None or packer.translates(rows) else decoded(rows, packer)


@functools.cache
def load_kernel() -> ctypes.CDLL | None:
    """The kernel compiled for this processor, or None where there is no compiler, and with TRTSPEC_KERNEL=torch."""
    wanted = os.environ.get("TRTSPEC_KERNEL", "")
    if wanted not in ("", "torch"):
        raise UsageError(f"TRTSPEC_KERNEL={wanted} is not torch", "unset it")
    compiler = next(filter(None, map(shutil.which, COMPILERS)), None)
    if wanted == "torch" or compiler is None:
        return None
    with (
        contextlib.suppress(OSError, subprocess.SubprocessError),
        tempfile.TemporaryDirectory() as directory,
    ):
        path = Path(directory) / "kernel.so"
        command = [compiler, *FLAGS, "-o", str(path), str(SOURCE)]
        subprocess.run(command, check=True, capture_output=True, timeout=120)
        return _open(path)
    return None


def _open(path: Path) -> ctypes.CDLL:
    library = ctypes.CDLL(str(path))
    for name, (result, arguments) in SIGNATURES.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, list(arguments)
    return library


class NativePacker:
    """Decoding a format that C does not know is left to `other`, which is made only then.

    One thread at a time: the tables are the scratch space of a call.
    """

    name = "c"

    def __init__(
        self, kernel: ctypes.CDLL, weight_scales: str, other: Callable[[], Packer]
    ) -> None:
        self.kernel, self.weight_scales, self._make_other = kernel, weight_scales, other
        # zero pages of an anonymous map: resident only where classes occur
        size = kernel.searches_bytes() if weight_scales == "mse" else kernel.tables_bytes()
        self._tables = np.frombuffer(mmap.mmap(-1, size), dtype=np.uint8)

    @functools.cached_property
    def _other(self) -> Packer:
        return self._make_other()

    def translates(self, rows: Rows) -> bool:
        return rows.format.is_grouped_integer and rows.scale_dtype == "BF16" and _pairs(rows) > 0

    def decode(self, rows: Rows, result: Array) -> None:
        if self.translates(rows):
            self.kernel.int4_decode(*_grouped(rows), _at(result))
        elif (
            rows.scale is not None
            and "blocks" in rows.format.storage.kinds
            and rows.scale_dtype == "F32"
        ):
            (count, columns), (height, width) = rows.shape, FP8_BLOCK_SIZE
            for band, start in enumerate(range(0, count, height)):
                part = min(height, count - start)
                source = (_at(rows.values[start]), _at(rows.scale[band]), part, columns, width)
                self.kernel.fp8_decode(*source, _at(result[start]))
        else:
            self._other.decode(rows, result)

    def amax(self, rows: Rows) -> float:
        if rows.scale is not None:
            bits = self.kernel.int4_amax(*_grouped(rows))
        else:
            bits = self.kernel.bf16_amax(_at(rows.values), rows.values.size)
        return float(np.uint32(bits << 16).view(np.float32))

    def pack(self, rows: Rows, scaling: Scaling, packed: Array, scale: Array) -> int:
        searches, targets = self.weight_scales == "mse", (_at(packed), _at(scale))
        scales = (scaling.scale_2, _search_unit(scaling.amax)) if searches else (scaling.scale_2,)
        if rows.scale is not None:
            function = self.kernel.int4_pack_mse if searches else self.kernel.int4_pack
            return int(function(*_grouped(rows), *scales, _at(self._tables), *targets))
        function = self.kernel.bf16_pack_mse if searches else self.kernel.bf16_pack
        return int(function(_at(rows.values), rows.values.size // BLOCK, *scales, *targets))

    def errors(
        self, rows: Rows, scaling: Scaling, packed: Array, scale: Array
    ) -> tuple[float, float]:
        weight, sums = decoded(rows, self).values, (ctypes.c_double * 2)()
        arguments = (_at(weight), _at(packed), _at(scale), weight.size // BLOCK)
        self.kernel.error_sums(*arguments, scaling.scale_2, ctypes.addressof(sums))
        return sums[0], sums[1]


def _at(array: Array) -> int:
    address: int = array.ctypes.data
    return address


def _pairs(rows: Rows) -> int:
    """Pairs of blocks that share an INT4 scale; the kernel takes two blocks at a time. 0 where that is not whole."""
    assert rows.scale is not None
    size = rows.shape[1] // rows.scale.shape[1]
    return 0 if size % (2 * BLOCK) else size // (2 * BLOCK)


def _grouped(rows: Rows) -> tuple[int, int, int, int]:
    assert rows.scale is not None
    return _at(rows.values), _at(rows.scale), rows.scale.size, _pairs(rows)


def _search_unit(amax: float) -> float:
    """`nvfp4.search_unit`, each operation rounded to float32; torch divides a number by a tensor through the
    tensor's reciprocal. 0 for a tensor of zeros."""
    if not amax:
        return 0.0
    reciprocal = float32(1.0 / float32(amax / 6.0))
    return float32(1.0 / float32(reciprocal * 448.0))


def native_packer(weight_scales: str, other: Callable[[], Packer]) -> NativePacker | None:
    """The packer in C, once it has proved itself; None where C cannot be used."""
    kernel = load_kernel()
    # the kernel's arithmetic does not survive torch.set_flush_denormal(True), which is of a thread
    if kernel is None or sys.float_info.min / 2 == 0.0:
        return None
    packer = NativePacker(kernel, weight_scales, other)
    # a compiler that rounds differently must not decide anybody's weights
    if proof_of(packer) != PROOFS[weight_scales]:
        text = "the C kernel computes other bytes than torch on this machine"
        raise TrtspecError(text, "set TRTSPEC_KERNEL=torch")
    return packer


def proof_of(packer: Packer) -> str:
    """A digest of what a packer makes of a few thousand values of every magnitude, in BF16 and in INT4."""
    bits = np.arange(8192, dtype=np.uint32) * np.uint32(
        2654435761
    )  # scattered, the same everywhere
    exponents = (np.arange(32, dtype=np.uint32) + 107 << 7)[:, None]
    weight = (bits.reshape(32, 256) >> 16 & 0x807F | exponents).astype(np.uint16)
    scale = (bits[:256].reshape(32, 8) >> 20 & 0x7F | exponents).astype(np.uint16)
    digest = hashlib.sha256()
    for rows in (
        Rows(WeightFormat.BF16, "BF16", weight),
        Rows(WeightFormat.INT4, "I32", bits[:1024].reshape(32, 32), scale, "BF16"),
    ):
        scaling = Scaling.of(packer.amax(rows))
        packed, scales = np.empty((32, 128), dtype=np.uint8), np.empty((32, 16), dtype=np.uint8)
        zeros = packer.pack(rows, scaling, packed, scales)
        digest.update(repr((scaling, zeros)).encode() + packed.tobytes() + scales.tobytes())
    return digest.hexdigest()


# what the packer in torch makes of them, which a test computes again
PROOFS = {
    "max": "1fad1dd66a0ee87e555a6df9579f8769410d1a256ed8fc3be2a7b748d10357ea",
    "mse": "ea22220413d9fb104a94b86bea5646ff3820f40307d8b705728af8532b8413dc",
}
