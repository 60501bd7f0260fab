"""A CUDA device that computes nothing: operators are checked and give tensors of the right shape.

torch's fake tensors carry the device cuda on a build without CUDA. What would wait for a real
device, because a number or a shape has to be read back, raises: `.item()`, `.tolist()`, a boolean
index, `nonzero`. So does an operator that is given tensors of a CPU and of the device. The CPU
build has no device guard for CUDA, which Python's indexing asks for; it is lent the one of the meta
device, which does nothing either.
"""

import ctypes
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

CUDA, META, KINDS = 1, 14, 22  # c10/core/DeviceType.h
GUARDS = "_ZN3c104impl26device_guard_impl_registryE"  # c10::impl::device_guard_impl_registry


class Transfers(TorchDispatchMode):
    """Counts what crosses between host and device.

    "read" waits for the device, and so does "written"; "sent" does not (`non_blocking`: torch waits
    for the stream after any other copy, whichever way it goes).
    """

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        out = function(*args, **(kwargs or {}))
        copies = function.overloadpacket is torch.ops.aten.copy_
        source, made = (args[1], args[0]) if copies else (args[0] if args else None, out)
        both = isinstance(source, torch.Tensor) and isinstance(made, torch.Tensor)
        if both and source.device.type != made.device.type:
            free = (kwargs or {}).get("non_blocking") or (copies and len(args) > 2 and args[2])
            self.found["read" if not source.is_cpu else "sent" if free else "written"] += 1
        return out


@contextmanager
def fake_cuda() -> Iterator[Transfers]:
    """New tensors are fake, those of the device cuda too; yields a count of transfers."""
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
    guards = (ctypes.c_void_p * KINDS).in_dll(library, GUARDS)
    before = guards[CUDA]
    guards[CUDA] = before or guards[META]
    try:
        with pytest.MonkeyPatch.context() as patch, FakeTensorMode(), Transfers() as transfers:
            patch.setattr(
                fake_tensor, "CONSTANT_NUMEL_LIMIT", 0
            )  # tensors of one element would be computed
            yield transfers
    finally:
        guards[CUDA] = before
