"""What this process may use of the machine: cores, memory, disk. CPU affinity and cgroup limits (version 2) count."""

from __future__ import annotations

import contextlib
import math
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

CGROUP, MEMBERSHIP = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


def cores(cgroup: Path = CGROUP, membership: Path = MEMBERSHIP) -> int:
    """The CPU affinity, and the CPU quota of the cgroup and of every one above it."""
    found = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    for directory in _cgroups(cgroup, membership):
        quota, period = (_numbers(directory / "cpu.max") + [None, None])[:2]
        if quota and period:
            found = min(found, math.ceil(quota / period))
    return max(1, found)


def physical_cores() -> int:
    """`cores`, two hardware threads of a core counted once."""
    import psutil  # here, because the import takes as long as a torch-free command

    found = cores()
    return min(found, psutil.cpu_count(logical=False) or found)


def free_memory(cgroup: Path = CGROUP, membership: Path = MEMBERSHIP) -> int:
    """Bytes that this process may still take: the machine's, and what the limits of its cgroups leave."""
    import psutil

    free = psutil.virtual_memory().available
    for directory in _cgroups(cgroup, membership):
        most, used = (_numbers(directory / name)[0] for name in ("memory.max", "memory.current"))
        if most is not None:
            free = min(free, most - max(0, (used or 0) - _cache_bytes(directory)))
    return max(0, free)


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
    """This process's group and those above it. In a container the root is its own group, whatever the path says."""
    with contextlib.suppress(OSError):
        for line in membership.read_text(encoding="utf-8").splitlines():
            if line.startswith("0::"):
                group = root / line[3:].strip("/")
                while group != root and group.is_relative_to(root):
                    yield group
                    group = group.parent
    yield root


def _numbers(path: Path) -> list[int | None]:
    """The words of a file as numbers; None for `max` and where there is no such file."""
    with contextlib.suppress(OSError, UnicodeDecodeError):
        return [int(word) if word.isdigit() else None for word in path.read_text("ascii").split()] or [None]
    return [None]


def _cache_bytes(directory: Path) -> int:
    """Page cache that counts as used but makes room."""
    with contextlib.suppress(OSError, ValueError):
        for line in (directory / "memory.stat").read_text(encoding="ascii").splitlines():
            name, _, value = line.partition(" ")
            if name == "inactive_file":
                return int(value)
    return 0
