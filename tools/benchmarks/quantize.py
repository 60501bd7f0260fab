"""How fast `quantize` is, from start to end, beside `cp` of the same bytes.

    python -m tools.benchmarks.quantize [--rounds 5] [--gb 3.5] [--directory DIR]

Contestants alternate inside each round and medians are printed, because a shared machine's speed
drifts from minute to minute: trust the ratios, not the seconds. A command is a fresh process,
start-up included; `cp` ends with fsync, and `quantize` with its journal and checksums too. Bytecode
is written to a folder of the benchmark's own and warm.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from tools.benchmarks.full_size_layer import HIDDEN, INNER, make_layer

BYTES_PER_WEIGHT = {"bf16": 2.0, "int4": 0.5625, "fp8-block": 1.0}
WEIGHT_SCALES = ("max", "mse")
SHARDS = 4


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--gb", type=float, default=3.5, help="of each source")
    parser.add_argument("--directory", type=Path, help="where the files lie; default: the system's")
    options = parser.parse_args()
    print(
        f"{'source':<10}{'scales':<7}{'GB':>7}{'cp s':>9}{'s':>9}{'ratio':>8}{'CPU s':>9}{'MiB':>9}"
    )
    with tempfile.TemporaryDirectory(dir=options.directory) as name:
        root = Path(name)
        for format, size in BYTES_PER_WEIGHT.items():
            experts = max(4, round(options.gb * 1e9 / (3 * HIDDEN * INNER * size)))
            source = make_layer(root / "in", format, experts, SHARDS)
            race(format, source, root, options.rounds)
            shutil.rmtree(source)


def race(format: str, source: Path, root: Path, rounds: int) -> None:
    """Prints a line for each way to choose scales: medians beside cp's in the same rounds."""
    contest: dict[str, Callable[[], int]] = {"cp": partial(copy, source, root / "copy")}
    contest |= {name: partial(quantize, source, root / "out", name) for name in WEIGHT_SCALES}
    runs: dict[str, list[tuple[float, float, int]]] = {name: [] for name in contest}
    for number in range(rounds + 1):
        for name, run in contest.items():
            wall = time.perf_counter()
            processor = processor_seconds()
            peak = run()
            if number:  # the first round warms up
                taken = time.perf_counter() - wall, processor_seconds() - processor, peak
                runs[name].append(taken)
    gigabytes = sum(path.stat().st_size for path in source.glob("*.safetensors")) / 1e9
    medians = {
        name: list(map(statistics.median, zip(*many, strict=True))) for name, many in runs.items()
    }
    cp = medians["cp"][0]
    for name in WEIGHT_SCALES:
        seconds, processor, peak = medians[name]
        print(
            f"{format:<10}{name:<7}{gigabytes:7.2f}{cp:9.2f}{seconds:9.2f}{seconds / cp:8.2f}"
            f"{processor:9.2f}{peak / 2**20:9.0f}",
            flush=True,
        )


def copy(source: Path, target: Path) -> int:
    """cp with fsync, in a process of its own as the command is."""
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir()
    subprocess.run(["cp", *map(str, sorted(source.glob("*.safetensors"))), str(target)], check=True)
    subprocess.run(["sync", *map(str, target.iterdir())], check=True)
    return 0


def quantize(source: Path, target: Path, weight_scales: str) -> int:
    """The whole command; returns its peak memory."""
    shutil.rmtree(target, ignore_errors=True)
    options = ["--policy", "k2.5", "--weight-scales", weight_scales, "--json"]
    command = [
        sys.executable,
        "-m",
        "trtspec",
        "quantize",
        str(source),
        "-o",
        str(target),
        *options,
    ]
    environment = os.environ | {"PYTHONPYCACHEPREFIX": str(target.parent / "bytecode")}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    done = subprocess.run(command, capture_output=True, env=environment, check=True)
    return json.loads(done.stdout)["peak_rss_bytes"]


def processor_seconds() -> float:
    """Of finished child processes."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    main()
