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
    found = len(os.sched_getaffinity(0))
    for directory in _cgroups(cgroup, membership):
        match _words(directory / "cpu.max"):
            case [quota, period] if quota.isdigit():
                found = min(found, math.ceil(int(quota) / int(period)))
    return max(1, found)


def physical_cores() -> int:
    """`cores`, two hardware threads of a core counted once."""
    import psutil  # here, because plan and lint do without it

    found = cores()
    return min(found, psutil.cpu_count(logical=False) or found)


def free_memory(cgroup: Path = CGROUP, membership: Path = MEMBERSHIP) -> int:
    """Bytes that this process may still take: the machine's, and what the limits of its cgroups leave."""
    import psutil

    free = psutil.virtual_memory().available
    for directory in _cgroups(cgroup, membership):
        match _words(directory / "memory.max"), _words(directory / "memory.current"):
            case [limit], [used] if limit.isdigit():
                words = _words(directory / "memory.stat")
                cache = dict(zip(words[::2], words[1::2], strict=False)).get(
                    "inactive_file", 0
                )  # makes room
                free = min(free, int(limit) - max(0, int(used) - int(cache)))
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


def _words(path: Path) -> list[str]:
    """The words of a file; none where it cannot be read."""
    try:
        return path.read_text(encoding="ascii").split()
    except (OSError, UnicodeDecodeError):
        return []
