"""Cores, memory and disk that this process may use. CPU affinity and cgroup v2 limits count."""

from __future__ import annotations

import contextlib
import errno
import math
import os
import re
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path

from trtspec.errors import MissingDependency, TrtspecError, UsageError

CGROUP = Path("/sys/fs/cgroup")
MEMBERSHIP = Path("/proc/self/cgroup")


def cores(cgroup: Path = CGROUP, membership: Path = MEMBERSHIP) -> int:
    """Cores of the CPU affinity, within the CPU quotas of the cgroup and every cgroup above it."""
    allowed = len(os.sched_getaffinity(0))
    for directory in _cgroups(cgroup, membership):
        match _words(directory / "cpu.max"):
            case [quota, period] if quota.isdigit():
                allowed = min(allowed, math.ceil(int(quota) / int(period)))
    return max(1, allowed)


def physical_cores() -> int:
    """`cores`, two hardware threads of a core counted once."""
    import psutil  # here, because plan and lint do without it

    allowed = cores()
    return min(allowed, psutil.cpu_count(logical=False) or allowed)


def free_memory(cgroup: Path = CGROUP, membership: Path = MEMBERSHIP) -> int:
    """Bytes that this process may still take, by the machine and the limits of its cgroups."""
    import psutil

    free: int = psutil.virtual_memory().available
    for directory in _cgroups(cgroup, membership):
        match _words(directory / "memory.max"), _words(directory / "memory.current"):
            case [limit], [used] if limit.isdigit():
                words = _words(directory / "memory.stat")
                statistics = dict(zip(words[::2], words[1::2], strict=False))
                cache = int(statistics.get("inactive_file", 0))  # the kernel frees it on demand
                free = min(free, int(limit) - max(0, int(used) - cache))
    return max(0, free)


def check_device(device: str) -> None:
    """Raises UsageError if `device` is not a device, MissingDependency if it is not here."""
    if not re.fullmatch(r"cpu|cuda(:\d+)?", device):
        raise UsageError(f"`device` {device} is not one of cpu, cuda, cuda:N", "pass `device` cpu")
    if device == "cpu":
        return
    index = int(device.partition(":")[2] or 0)
    count = torch_gpus()
    if index >= count:
        message = f"`device` {device}: torch sees {count or 'no'} GPUs"
        raise MissingDependency(message, "use `device` cpu; `trtspec doctor` says what is missing")


def torch_gpus() -> int:
    """Number of GPUs that torch can use. Does not import a build for CPUs.

    Raises ModuleNotFoundError without torch.
    """
    from importlib.metadata import version  # here, because importing it takes long

    if version("torch").endswith("+cpu"):
        return 0
    import torch  # here, because it takes seconds

    return torch.cuda.device_count()


def listen(host: str, port: int) -> socket.socket:
    """A socket bound to an address.

    Raises TrtspecError naming the host if it is not this machine's, else the port.
    """
    try:
        family, protocol, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with contextlib.ExitStack() as stack:
            listener = stack.enter_context(socket.socket(family, protocol))
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            stack.pop_all()
        return listener
    except OSError as error:
        reason = error.strerror
        message = f"port {port} on {host} cannot be taken ({reason})"
        remedy = "stop what uses it, or pass another `port`"
        if error.errno in (errno.EADDRNOTAVAIL, socket.EAI_NONAME):
            message = f"{host} is not an address of this machine ({reason})"
            remedy = "pass `host` localhost, or 0.0.0.0 for every address"
        raise TrtspecError(message, remedy, "TS-SERVE-PORT") from None


def existing(path: Path) -> Path:
    """`path`, else the nearest directory above it that exists: where its free space is."""
    path = path.resolve()
    while not path.exists():
        path = path.parent
    return path


def free_disk(path: Path) -> int:
    """Free bytes of the file system on which `path` is, or would be."""
    return shutil.disk_usage(existing(path)).free


def disk_size(path: Path) -> int:
    """Bytes of the file system on which `path` is."""
    return shutil.disk_usage(path).total


def _cgroups(root: Path, membership: Path) -> Iterator[Path]:
    """Yields this process's group and all groups above it.

    In a container the root is its own group, whatever the path says.
    """
    with contextlib.suppress(OSError):
        for line in membership.read_text(encoding="utf-8").splitlines():
            if line.startswith("0::"):
                group = root / line[3:].strip("/")
                while group != root and group.is_relative_to(root):
                    yield group
                    group = group.parent
    yield root


def _words(path: Path) -> list[str]:
    """The words of a file. [] if it cannot be read."""
    try:
        return path.read_text(encoding="ascii").split()
    except (OSError, UnicodeDecodeError):
        return []
