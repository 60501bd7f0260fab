"""Measures the cores, memory, disk and GPUs that this process may use.

CPU affinity and the limits of cgroup v2 are included.
"""

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

CGROUP = Path("/sys/fs/cgroup")  # root of the cgroup v2 hierarchy
MEMBERSHIP = Path("/proc/self/cgroup")  # names the cgroup of this process


def cores(cgroup: Path = CGROUP, membership: Path = MEMBERSHIP) -> int:
    """Number of cores that this process may use, at least 1.

    Limited by the CPU affinity, and by the CPU quota of the process's cgroup and its ancestors.
    """
    allowed = len(os.sched_getaffinity(0))
    for directory in _cgroups(cgroup, membership):
        match _words(directory / "cpu.max"):
            case [quota, period] if quota.isdigit():  # without a limit, the quota is `max`
                allowed = min(allowed, math.ceil(int(quota) / int(period)))
    return max(1, allowed)


def physical_cores() -> int:
    """Number of physical cores that this process may use, without hyperthreads."""
    import psutil  # here, because plan and lint do without it

    allowed = cores()
    return min(allowed, psutil.cpu_count(logical=False) or allowed)


def free_memory(cgroup: Path = CGROUP, membership: Path = MEMBERSHIP) -> int:
    """Number of bytes of memory that this process may still allocate.

    Limited by the machine, and by the memory limit of the process's cgroup and its ancestors.
    """
    import psutil

    free: int = psutil.virtual_memory().available
    for directory in _cgroups(cgroup, membership):
        match _words(directory / "memory.max"), _words(directory / "memory.current"):
            case [limit], [used] if limit.isdigit():  # without a limit, `limit` is `max`
                words = _words(directory / "memory.stat")
                names = words[::2]
                values = words[1::2]
                statistics = dict(zip(names, values, strict=False))
                cache = int(statistics.get("inactive_file", 0))  # the kernel frees it on demand
                free = min(free, int(limit) - max(0, int(used) - cache))
    return max(0, free)


def check_device(device: str) -> None:
    """Raises UsageError if `device` is not cpu, cuda or cuda:N.

    Raises MissingDependency if torch does not see that GPU on this machine.
    """
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
    """Number of GPUs that torch can use.

    Raises ModuleNotFoundError if torch is not installed.
    """
    from importlib.metadata import version  # here, because importing it takes long

    if version("torch").endswith("+cpu"):
        # a CPU build of torch has no GPUs, and its import would take seconds
        return 0
    import torch  # here, because it takes seconds

    return torch.cuda.device_count()


def listen(host: str, port: int) -> socket.socket:
    """Returns a TCP socket that is bound to `host` and `port`.

    Raises TrtspecError if the host is not an address of this machine or the port is in use.
    """
    try:
        family, protocol, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        # closes the socket if it cannot be bound
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
    """Returns `path` if it exists. Otherwise returns its nearest ancestor that exists."""
    path = path.resolve()
    while not path.exists():
        path = path.parent
    return path


def free_disk(path: Path) -> int:
    """Number of free bytes on the file system of `path`, which need not exist."""
    return shutil.disk_usage(existing(path)).free


def disk_size(path: Path) -> int:
    """Total size in bytes of the file system of `path`."""
    return shutil.disk_usage(path).total


def _cgroups(root: Path, membership: Path) -> Iterator[Path]:
    """Yields the directory of this process's cgroup, then the directories of its ancestors.

    The last is `root`. In a container, `root` is the cgroup of the container.
    """
    # without the file there are no cgroups, and `root` has no limits
    with contextlib.suppress(OSError):
        for line in membership.read_text(encoding="utf-8").splitlines():
            if line.startswith("0::"):  # the line of cgroup v2
                group = root / line[3:].strip("/")
                while group != root and group.is_relative_to(root):
                    yield group
                    group = group.parent
    yield root


def _words(path: Path) -> list[str]:
    """Returns the words of an ASCII file. [] if the file cannot be read."""
    try:
        return path.read_text(encoding="ascii").split()
    except (OSError, UnicodeDecodeError):
        return []
