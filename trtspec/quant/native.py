"""The interface of packers, which convert stored rows of a weight to NVFP4, and the packer in C.

A packer reads stored rows (BF16, INT4 with group scales, FP8 with block scales). Some formats are
packed directly, without decoding to BF16 first. The kernel in C is compiled on this machine, and
loaded through ctypes. Its calls release the interpreter lock, so that reading, computing and
writing overlap. Without a compiler, or with the environment variable TRTSPEC_KERNEL=torch, the
packer in decode.py gives the same bytes, 30 to 1,000 times slower.
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


class Packer(Protocol):
    """Interface of packers, which convert rows of a weight to NVFP4.

    `amax`, `pack` and `errors` need rows that `packable_rows` returned.

    name: "c", "torch" or "modelopt".
    weight_scales: rule for the block scales, "max" or "mse".
    """

    name: str
    weight_scales: str

    def translates(self, rows: Rows) -> bool:
        """Whether the packer packs these quantized rows without decoding them first."""

    def decode(self, rows: Rows, result: Array) -> None:
        """Decodes rows into `result` [n, K], which holds BF16 values as uint16."""

    def amax(self, rows: Rows) -> float:
        """Returns max|w|. NaN or infinity if the weight is not finite."""

    def pack(self, rows: Rows, scaling: Scaling, packed: Array, scale: Array) -> int:
        """Packs rows into uint8 `packed` [n, K/2] and uint8 `scale` [n, K/16].

        Returns the number of blocks that are entirely zero.
        """

    def errors(
        self, rows: Rows, scaling: Scaling, packed: Array, scale: Array
    ) -> tuple[float, float]:
        """Returns two sums of squares: differences of packed rows and source, and the source."""


@dataclass(frozen=True)
class Rows:
    """Some rows of a weight [N, K], as they are stored.

    Args:
        format: storage format of the weight.
        dtype: safetensors code of the values' dtype.
        values: [n, K] BF16, [n, K/8] INT4 or [n, K] FP8, as unsigned integers of the dtype's width.
        scale: [n, K/group] for INT4, [ceil(n/128), ceil(K/128)] for FP8, None for plain values.
        scale_dtype: safetensors code of the scales' dtype.
    """

    format: WeightFormat
    dtype: str
    values: Array
    scale: Array | None = None
    scale_dtype: str = ""

    @property
    def shape(self) -> tuple[int, int]:
        """Shape of the decoded rows, (n, K)."""
        rows, elements = self.values.shape
        return rows, elements * self.format.values_per_element

    def head(self, count: int) -> Rows:
        """Returns the first `count` rows. The format must not share scales between rows."""
        scale = None
        if self.scale is not None:
            scale = self.scale[:count]
        return Rows(self.format, self.dtype, self.values[:count], scale, self.scale_dtype)


class Scaling(NamedTuple):
    """Largest magnitude and NVFP4 scale per tensor, which the linears of a group share.

    Both are float32 values.

    amax: largest magnitude of all weights of the group.
    scale_2: `weight_scale_2` of the tensors, amax / (6 * 448).
    """

    amax: float
    scale_2: float

    @staticmethod
    def of(amax: float) -> Scaling:
        """Returns the scaling for a largest magnitude, as `nvfp4.scale_2_of` computes it."""
        scale_2 = float32(amax / NVFP4_RANGE)
        if scale_2 == 0:  # all weights are zero, and a scale must not be zero
            scale_2 = float32(1.0 / NVFP4_RANGE)
        return Scaling(amax, scale_2)


def float32(value: float) -> float:
    """Returns `value` rounded to float32.

    A single operation on float32 values in double precision, rounded by this function, equals the
    operation in float32.
    """
    return ctypes.c_float(value).value


def read_rows(
    read: Callable[[TensorInfo], Array], format: WeightFormat, parts: Sequence[TensorInfo]
) -> Rows:
    """Returns all rows of a linear, read from its stored tensors.

    Raises TrtspecError if a stored shape contradicts the packed tensor.

    Args:
        read: function that returns all bytes of a stored tensor.
        format: storage format of the linear.
        parts: the stored tensors, in the order of `format.parts`.
    """
    views: list[Array] = []
    for info, content in zip(parts, format.storage.kinds, strict=False):
        element_bytes = DTYPE_BITS[info.dtype] // 8
        view = read(info).view(f"u{element_bytes}").reshape(-1, info.shape[-1])
        if content == "shape":
            rows, elements = views[0].shape
            shape = [rows, elements * format.values_per_element]
            if view.reshape(-1).tolist() != shape:
                text = f"{info.name} is {view.tolist()}, the packed tensor holds {shape}"
                raise TrtspecError(text, "download the checkpoint again")
        views.append(view)
    if len(views) == 1:
        return Rows(format, parts[0].dtype, views[0])
    return Rows(format, parts[0].dtype, views[0], views[1], parts[1].dtype)


def read_bytes(reader: ShardReader, info: TensorInfo) -> Array:
    """Returns all bytes of a stored tensor, as a uint8 array."""
    data: Array = np.empty(info.nbytes, np.uint8)
    reader.read_bytes(info, info.begin, data.data)
    return data


def packable_rows(rows: Rows, packer: Packer) -> Rows:
    """Returns rows that `packer` can pack.

    Plain rows and quantized rows that the packer translates stay unchanged. Others become BF16.
    """
    if rows.scale is None or packer.translates(rows):
        return rows
    return decoded_rows(rows, packer)


def decoded_rows(rows: Rows, packer: Packer) -> Rows:
    """Returns the rows decoded to BF16."""
    if rows.scale is None and rows.dtype == "BF16":
        return rows
    values: Array = np.empty(rows.shape, np.uint16)
    packer.decode(rows, values)
    return Rows(WeightFormat.BF16, "BF16", values)


def native_packer(weight_scales: str, other: Callable[[], Packer]) -> NativePacker | None:
    """Returns the packer in C. None if there is no kernel, or if this thread flushes denormals.

    Raises TrtspecError if the compiled kernel computes other bytes than torch.

    Args:
        weight_scales: rule for the block scales, "max" or "mse".
        other: function that creates the packer for formats that C does not decode.
    """
    kernel = load_kernel()
    # The kernel needs denormals. torch.set_flush_denormal(True) turns them off for a thread.
    denormals_are_flushed = sys.float_info.min / 2 == 0.0
    if kernel is None or denormals_are_flushed:
        return None
    packer = NativePacker(kernel, weight_scales, other)
    # A compiler that rounds differently would give other weights.
    if proof_of(packer) != PROOFS[weight_scales]:
        text = "the C kernel computes other bytes than torch on this machine"
        raise TrtspecError(text, "set TRTSPEC_KERNEL=torch")
    return packer


class NativePacker:
    """Packer that uses the C kernel. Only one thread may use it at a time.

    Args:
        kernel: the loaded kernel.
        weight_scales: rule for the block scales, "max" or "mse".
        other: function that creates the packer for formats that C does not decode.
    """

    name = "c"

    def __init__(
        self, kernel: ctypes.CDLL, weight_scales: str, other: Callable[[], Packer]
    ) -> None:
        self.kernel = kernel
        self.weight_scales = weight_scales
        self._make_other = other
        size = kernel.searches_bytes() if weight_scales == "mse" else kernel.tables_bytes()
        # Scratch memory of calls. An anonymous map begins as zeros, and only written pages take
        # memory.
        self._tables = np.frombuffer(mmap.mmap(-1, size), dtype=np.uint8)

    @functools.cached_property
    def _other(self) -> Packer:
        """The packer for other formats. Created on first use, because its import takes seconds."""
        return self._make_other()

    def translates(self, rows: Rows) -> bool:
        """Whether the rows are INT4 in groups that the kernel can pack."""
        is_int4 = rows.format.is_grouped_integer and rows.scale_dtype == "BF16"
        return is_int4 and _block_pairs_per_scale(rows) > 0

    def decode(self, rows: Rows, result: Array) -> None:
        """Decodes rows into `result` [n, K], which holds BF16 values as uint16."""
        has_blocks = rows.scale is not None and "blocks" in rows.format.storage.kinds
        if self.translates(rows):
            self.kernel.int4_decode(*_int4_arguments(rows), _address(result))
        elif has_blocks and rows.scale_dtype == "F32":
            self._decode_fp8(rows, result)
        else:
            self._other.decode(rows, result)

    def _decode_fp8(self, rows: Rows, result: Array) -> None:
        """Decodes FP8 rows into `result`, one band of 128 rows with common scales at a time."""
        assert rows.scale is not None
        count, columns = rows.shape
        height, width = FP8_BLOCK_SIZE
        for band, start in enumerate(range(0, count, height)):
            values = _address(rows.values[start])
            scale = _address(rows.scale[band])
            band_rows = min(height, count - start)
            target = _address(result[start])
            self.kernel.fp8_decode(values, scale, band_rows, columns, width, target)

    def amax(self, rows: Rows) -> float:
        """Returns max|w|. NaN or infinity if the weight is not finite."""
        if rows.scale is None:
            bf16_bits = self.kernel.bf16_amax(_address(rows.values), rows.values.size)
        else:
            bf16_bits = self.kernel.int4_amax(*_int4_arguments(rows))
        float32_bits = np.uint32(bf16_bits << 16)
        return float(float32_bits.view(np.float32))

    def pack(self, rows: Rows, scaling: Scaling, packed: Array, scale: Array) -> int:
        """Packs rows into `packed` and `scale`. Returns the number of zero blocks."""
        searches = self.weight_scales == "mse"
        arguments = [scaling.scale_2]
        if searches:
            arguments.append(_search_unit(scaling.amax))
        targets = (_address(packed), _address(scale))
        if rows.scale is None:
            pack = self.kernel.bf16_pack_mse if searches else self.kernel.bf16_pack
            blocks = rows.values.size // BLOCK
            return int(pack(_address(rows.values), blocks, *arguments, *targets))
        pack = self.kernel.int4_pack_mse if searches else self.kernel.int4_pack
        return int(pack(*_int4_arguments(rows), *arguments, _address(self._tables), *targets))

    def errors(
        self, rows: Rows, scaling: Scaling, packed: Array, scale: Array
    ) -> tuple[float, float]:
        """Returns two sums of squares: differences of packed rows and source, and the source."""
        weight = decoded_rows(rows, self).values
        blocks = weight.size // BLOCK
        sources = (_address(weight), _address(packed), _address(scale))
        sums = (ctypes.c_double * 2)()
        self.kernel.error_sums(*sources, blocks, scaling.scale_2, ctypes.addressof(sums))
        return sums[0], sums[1]


def _address(array: Array) -> int:
    """Address of the array's first byte."""
    address: int = array.ctypes.data
    return address


def _int4_arguments(rows: Rows) -> tuple[int, int, int, int]:
    """Returns the first four arguments of the kernel's INT4 functions.

    They are the addresses of values and scales, the number of scales, and the number of block
    pairs per scale.
    """
    assert rows.scale is not None
    pairs = _block_pairs_per_scale(rows)
    return _address(rows.values), _address(rows.scale), rows.scale.size, pairs


def _block_pairs_per_scale(rows: Rows) -> int:
    """Number of pairs of NVFP4 blocks that share an INT4 scale.

    0 if a group is not a multiple of two blocks, because the kernel packs two blocks at a time.
    """
    assert rows.scale is not None
    group = rows.shape[1] // rows.scale.shape[1]
    pairs, remainder = divmod(group, 2 * BLOCK)
    return 0 if remainder else pairs


def _search_unit(amax: float) -> float:
    """Value of a block scale of 1.0 in the search, as in `nvfp4.search_unit`. 0 if amax is 0."""
    if not amax:
        return 0.0
    # torch divides a number by a tensor through the tensor's reciprocal. So each operation rounds
    # to float32.
    reciprocal = float32(1.0 / float32(amax / 6.0))
    return float32(1.0 / float32(reciprocal * 448.0))


SOURCE = Path(__file__).with_name("nvfp4_kernel.c")
COMPILERS = ("cc", "gcc", "clang")
COMPILE_TIMEOUT_S = 120
# Compiler flags. Contraction would fuse a product and a sum into one rounding, and the bytes would
# depend on the processor. Keeping errno and floating-point exceptions, which nobody reads, would
# forbid vector instructions.
FLAGS = (
    "-O3",
    "-march=native",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-Wno-psabi",
    "-shared",
    "-fPIC",
)

POINTER = ctypes.c_void_p
SIZE = ctypes.c_size_t
FLOAT = ctypes.c_float
UINT32 = ctypes.c_uint32
# Types of the result and of the arguments, by function of the kernel.
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


@functools.cache
def load_kernel() -> ctypes.CDLL | None:
    """Compiles the kernel for this processor, and loads it. Later calls return the same kernel.

    None if there is no working compiler, or if the environment variable TRTSPEC_KERNEL is "torch".
    Raises UsageError if the variable has any other value.
    """
    choice = os.environ.get("TRTSPEC_KERNEL", "")
    if choice not in ("", "torch"):
        raise UsageError(f"TRTSPEC_KERNEL={choice} is not torch", "unset it")
    compiler = next(filter(None, map(shutil.which, COMPILERS)), None)
    if choice == "torch" or compiler is None:
        return None
    # If the compiler or the loader fails, torch computes the same bytes.
    with (
        contextlib.suppress(OSError, subprocess.SubprocessError),
        tempfile.TemporaryDirectory() as directory,
    ):
        library = Path(directory) / "kernel.so"
        command = [compiler, *FLAGS, "-o", str(library), str(SOURCE)]
        subprocess.run(command, check=True, capture_output=True, timeout=COMPILE_TIMEOUT_S)
        return open_kernel(library)
    return None


def open_kernel(path: Path) -> ctypes.CDLL:
    """Loads a compiled kernel, and declares the types of its functions."""
    library = ctypes.CDLL(str(path))
    for name, (result, arguments) in SIGNATURES.items():
        function = getattr(library, name)
        function.restype = result
        function.argtypes = list(arguments)
    return library


def proof_of(packer: Packer) -> str:
    """SHA-256 of a packer's results for fixed weights in BF16 and in INT4, as hex digits.

    The 8,192 values of each weight have 32 different exponents.
    """
    # Knuth's multiplier scatters the bits, and gives the same numbers on every machine.
    bits = np.arange(8192, dtype=np.uint32) * np.uint32(2654435761)
    # Each of the 32 rows has an exponent of its own, from 2^-20 to 2^11.
    exponents = np.arange(107, 139, dtype=np.uint32)[:, None] << 7
    sign_and_mantissa = bits.reshape(32, 256) >> 16 & 0x807F
    weight = (sign_and_mantissa | exponents).astype(np.uint16)
    scale_mantissa = bits[:256].reshape(32, 8) >> 20 & 0x7F
    scale = (scale_mantissa | exponents).astype(np.uint16)
    plain = Rows(WeightFormat.BF16, "BF16", weight)
    grouped = Rows(WeightFormat.INT4, "I32", bits[:1024].reshape(32, 32), scale, "BF16")
    digest = hashlib.sha256()
    for rows in (plain, grouped):
        scaling = Scaling.of(packer.amax(rows))
        packed = np.empty((32, 128), dtype=np.uint8)
        scales = np.empty((32, 16), dtype=np.uint8)
        zero_blocks = packer.pack(rows, scaling, packed, scales)
        digest.update(repr((scaling, zero_blocks)).encode())
        digest.update(packed.tobytes() + scales.tobytes())
    return digest.hexdigest()


# `proof_of` of the packer in torch, by rule for block scales. A test computes them.
PROOFS = {
    "max": "1fad1dd66a0ee87e555a6df9579f8769410d1a256ed8fc3be2a7b748d10357ea",
    "mse": "ea22220413d9fb104a94b86bea5646ff3820f40307d8b705728af8532b8413dc",
}
