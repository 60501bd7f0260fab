"""The NVFP4 kernel in C, compiled once where a compiler is found and loaded through ctypes.

Its calls release the interpreter lock, so that reading, computing and writing overlap. Nothing depends on it: without
a compiler, or with TRTSPEC_KERNEL=torch, the same bytes come from torch, several times slower.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

from trtspec.errors import MissingDependency, UsageError

SOURCE = Path(__file__).with_name("nvfp4_kernel.c")
# contraction would fuse a product and a sum into one rounding; then the bytes would depend on the processor.
# Nobody looks at errno or floating-point exceptions; to keep them would forbid vectors.
FLAGS = ("-O3", "-march=native", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math", "-shared", "-fPIC")
COMPILERS = ("cc", "gcc", "clang")
CHOICES = ("auto", "c", "torch")

POINTER, SIZE, FLOAT, UINT32 = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_float, ctypes.c_uint32
SIGNATURES: dict[str, tuple[type | None, tuple[type, ...]]] = {
    "bf16_amax": (UINT32, (POINTER, SIZE)),
    "bf16_pack": (SIZE, (POINTER, SIZE, FLOAT, POINTER, POINTER)),
    "bf16_pack_mse": (SIZE, (POINTER, SIZE, FLOAT, POINTER, POINTER)),
    "int4_amax": (UINT32, (POINTER, POINTER, SIZE, SIZE)),
    "int4_pack": (SIZE, (POINTER, POINTER, SIZE, SIZE, FLOAT, POINTER, POINTER, POINTER)),
    "int4_decode": (None, (POINTER, POINTER, SIZE, SIZE, POINTER)),
    "fp8_decode": (None, (POINTER, POINTER, SIZE, SIZE, SIZE, POINTER)),
    "error_sums": (None, (POINTER, POINTER, POINTER, SIZE, FLOAT, POINTER)),
    "tables_bytes": (SIZE, ()),
}


@functools.cache
def load_kernel() -> ctypes.CDLL | None:
    """The compiled kernel, or None where there is no compiler; TRTSPEC_KERNEL=c makes its absence an error."""
    wanted = os.environ.get("TRTSPEC_KERNEL", "auto")
    if wanted not in CHOICES:
        raise UsageError(f"TRTSPEC_KERNEL={wanted} is not one of {', '.join(CHOICES)}", "unset it")
    if wanted == "torch":
        return None
    try:
        return _open(_built())
    except (OSError, subprocess.SubprocessError) as error:
        if wanted == "c":
            raise MissingDependency(f"the C kernel cannot be built: {error}", "install a C compiler (gcc)") from None
        return None


def _open(path: Path) -> ctypes.CDLL:
    library = ctypes.CDLL(str(path))
    for name, (result, arguments) in SIGNATURES.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, list(arguments)
    return library


def _built() -> Path:
    """The shared object for this source, these flags, this compiler and this processor, compiled when it is not there.

    Raises OSError or subprocess.SubprocessError.
    """
    compiler = next(filter(None, (shutil.which(name) for name in (os.environ.get("CC", ""), *COMPILERS))), None)
    if compiler is None:
        raise FileNotFoundError("no C compiler on PATH")
    key = hashlib.sha256("\0".join([SOURCE.read_text(), *FLAGS, compiler, _processor()]).encode()).hexdigest()
    directory = _cache_directory()
    path = directory / f"nvfp4-{key[:24]}.so"
    if not path.exists():
        handle, temporary = tempfile.mkstemp(dir=directory, suffix=".so")
        os.close(handle)
        try:
            command = [compiler, *FLAGS, "-o", temporary, str(SOURCE)]
            subprocess.run(command, check=True, capture_output=True, timeout=120)
            os.replace(temporary, path)  # several processes may compile; the last one wins with the same content
        finally:
            Path(temporary).unlink(missing_ok=True)
    return path


def _processor() -> str:
    """What -march=native means here: a home directory may be shared by machines that differ."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    marks = ("model name", "flags", "Features", "CPU part")
    found = {line.split(":")[0].strip(): line for line in lines if line.startswith(marks)}
    return "\n".join([platform.machine(), *found.values()])


def _cache_directory() -> Path:
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    directory = root / "trtspec" / "kernels"
    try:
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        if os.access(directory, os.W_OK):
            return directory
    except OSError:
        pass
    return Path(tempfile.mkdtemp(prefix="trtspec-kernels-"))
