"""A disk that is full at any write of a conversion: one message, nothing half-written, the same bytes once there is
room. `write` and its like fail through a preloaded library, from the n-th call on files of the output on."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors import safe_open

from tests.tiny import make_target
from trtspec import machine
from trtspec.checkpoint.output import SPARE_BYTES
from trtspec.errors import TrtspecError
from trtspec.quant.policy import load_policy
from trtspec.quant.run import quantize_checkpoint

SHIM = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>
static int calls;
static int full(int file) {
    char link[64], path[4096];
    snprintf(link, sizeof link, "/proc/self/fd/%d", file);
    ssize_t length = readlink(link, path, sizeof path - 1);
    const char *output = getenv("FULL_OUTPUT"), *at = getenv("FULL_AT"), *count = getenv("FULL_COUNT");
    if (length < 0 || !output) return 0;
    path[length] = 0;
    if (strncmp(path, output, strlen(output))) return 0;
    int number = __sync_add_and_fetch(&calls, 1);
    if (count) { FILE *told = fopen(count, "w"); fprintf(told, "%d", number); fclose(told); }
    if (!at || number < atoi(at)) return 0;
    errno = ENOSPC;
    return 1;
}
#define NEXT(name) static __typeof__(&name) next; if (!next) next = dlsym(RTLD_NEXT, #name)
ssize_t write(int f, const void *b, size_t n) { NEXT(write); return full(f) ? -1 : next(f, b, n); }
ssize_t pwrite64(int f, const void *b, size_t n, off64_t o) { NEXT(pwrite64); return full(f) ? -1 : next(f, b, n, o); }
ssize_t pwritev64(int f, const struct iovec *v, int n, off64_t o) {
    NEXT(pwritev64);
    return full(f) ? -1 : next(f, v, n, o);
}
int fsync(int f) { NEXT(fsync); return full(f) ? -1 : next(f); }
ssize_t sendfile64(int to, int from, off64_t *o, size_t n);
ssize_t sendfile64(int to, int from, off64_t *o, size_t n) {
    NEXT(sendfile64);
    return full(to) ? -1 : next(to, from, o, n);
}
"""


@pytest.fixture(scope="module")
def shim(tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiler = shutil.which("gcc")
    if compiler is None:
        pytest.skip("no gcc here")
    path = tmp_path_factory.mktemp("shim") / "full.so"
    command = [compiler, "-shared", "-fPIC", "-o", path, "-xc", "-", "-ldl"]
    subprocess.run(command, input=SHIM.encode(), check=True)
    return path


def quantize(source: Path, out: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "trtspec", "quantize", str(source), "-o", str(out), "--policy", "k2.5"]
    return subprocess.run(command, capture_output=True, text=True, env=os.environ | environment, check=False)


def files(path: Path) -> dict[str, bytes]:
    kept = (file for file in path.iterdir() if not file.name.startswith("."))
    return {file.name: file.read_bytes() for file in kept}


@pytest.mark.parametrize("points", [4, pytest.param(40, marks=pytest.mark.slow)])
def test_full_at_points_from_the_first_write_to_the_last(tmp_path, shim, points):
    source = make_target(tmp_path / "in", format="int4", layers=3, shards=3)
    expected, out = tmp_path / "expected" / "Kimi", tmp_path / "out" / "Kimi"
    count = tmp_path / "count"
    preload = {"LD_PRELOAD": str(shim), "FULL_OUTPUT": str(expected), "FULL_COUNT": str(count)}
    done = quantize(source, expected, **preload)
    assert done.returncode == 0, done.stderr
    calls = int(count.read_text())
    steps = sorted({1 + number * (calls - 1) // (points - 1) for number in range(points)})
    for at in steps:
        run = quantize(source, out, LD_PRELOAD=str(shim), FULL_OUTPUT=str(out), FULL_AT=str(at))
        assert run.returncode == 1 and "No space left on device" in run.stderr, (at, run.stderr)
        assert "free space on that disk, then run the command again" in run.stderr and "unexpected" not in run.stderr
        assert not list(out.glob(".*.partial")) and not list(out.glob(".*.tmp")), at
        for path in out.glob("*.safetensors"):  # what has a name is whole
            with safe_open(path, "pt") as shard:
                assert list(shard.keys())
        finished = {path.name: path.stat().st_mtime_ns for path in out.glob("*.safetensors")}
        assert not (out / "config.json").exists() or len(finished) == 3
        again = quantize(source, out)
        assert again.returncode == 0, again.stderr
        assert files(out) == files(expected), at
        shutil.rmtree(out)
    print(f"full at {len(steps)} of {calls} writes: each said, nothing half-written, the same bytes afterwards")


def test_too_small_a_disk_is_told_before_the_first_byte(tmp_path, monkeypatch):
    source, out = make_target(tmp_path / "in", layers=2, shards=1), tmp_path / "out"
    monkeypatch.setattr(machine, "free_disk", lambda _: SPARE_BYTES)
    with pytest.raises(TrtspecError, match=r"needs [\d,]+ bytes and its disk has [\d,]+ free"):
        quantize_checkpoint(source, out, load_policy("k2.6"))
    assert not list(out.iterdir())
