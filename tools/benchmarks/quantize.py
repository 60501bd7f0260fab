"""How fast `quantize` is: the packing kernel beside ModelOpt's, and the command from start to end beside `cp`.

    python -m tools.benchmarks.quantize [--rounds 5] [--gb 3.5] [--small-gb 0.7] [--workers 0] [--no-kernels]
    python -m tools.benchmarks.quantize --memory [--formats int4 bf16]      # peak RSS for shards of 0.5 to 4 GB

Contestants alternate inside each round and medians are printed, because a shared machine's speed drifts from minute to
minute: trust the ratios, not the seconds. A command is a fresh process, start-up included; `cp` ends with fsync, and
`quantize` with its journal and checksums too. Bytecode is written to a folder of the benchmark's own and warm.
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
from pathlib import Path

import numpy as np
import torch
from compressed_tensors.compressors.pack_quantized.helpers import unpack_from_int32
from modelopt.torch.quantization.qtensor.nvfp4_tensor import NVFP4QTensor

from tests.quant.stored_rows import rows_of
from tests.tiny_formats import pack_int4
from tools.benchmarks import full_size_layer
from trtspec.formats import WeightFormat
from trtspec.quant.convert import choose_packer
from trtspec.quant.decode import TorchPacker
from trtspec.quant.native import Packer, Rows, Scaling

Contest = dict[str, Callable[[], object]]


def medians(
    contest: Contest, rounds: int, clock: Callable[[], float] = time.perf_counter
) -> dict[str, float]:
    """Median seconds of each contestant, run in turn `rounds` times after one warm-up."""
    seconds: dict[str, list[float]] = {name: [] for name in contest}
    for number in range(rounds + 1):
        for name, run in contest.items():
            begin = clock()
            run()
            if number:
                seconds[name].append(clock() - begin)
    return {name: statistics.median(values) for name, values in seconds.items()}


def kernels(rounds: int) -> None:
    """One Kimi expert matrix, in memory: maximum and packing, each by both of ours and by ModelOpt."""
    weight = torch.randn(2048, 7168).to(torch.bfloat16)
    parts = pack_int4(weight)
    shape = torch.Size(weight.shape)
    target = np.empty((2048, 3584), dtype=np.uint8), np.empty((2048, 448), dtype=np.uint8)
    sources = {
        "BF16": rows_of(WeightFormat.BF16, weight),
        "INT4": rows_of(WeightFormat.INT4, parts["weight_packed"], parts["weight_scale"]),
    }

    def modelopt_from_int4() -> None:
        codes = (
            unpack_from_int32(parts["weight_packed"], 4, shape)
            .to(torch.bfloat16)
            .view(2048, -1, 32)
        )
        NVFP4QTensor.quantize((codes * parts["weight_scale"].unsqueeze(-1)).view(shape), 16)

    def ours(packer: Packer, rows: Rows) -> Callable[[], object]:
        return lambda: packer.pack(rows, Scaling.of(packer.amax(rows)), *target)

    theirs = {"BF16": lambda: NVFP4QTensor.quantize(weight.clone(), 16), "INT4": modelopt_from_int4}
    print(
        "packing 2048 x 7168 in memory, 1 thread, CPU seconds   ours  ModelOpt   ratio   GB/s of source"
    )
    for name, rows in sources.items():
        packers = {"C": choose_packer(), "torch": TorchPacker(), "C, mse": choose_packer("mse")}
        contest: Contest = {kind: ours(packer, rows) for kind, packer in packers.items()}
        times = medians(contest | {"ModelOpt": theirs[name]}, rounds, time.thread_time)
        size = rows.values.nbytes + (0 if rows.scale is None else rows.scale.nbytes)
        for kind in contest:
            ratio, rate = times["ModelOpt"] / times[kind], size / times[kind] / 1e9
            label = f"{name} -> NVFP4, {kind}"
            print(
                f"{label:<52}{times[kind]:7.4f}{times['ModelOpt']:10.3f}{ratio:8.1f}{rate:12.2f}",
                flush=True,
            )


def copy(source: Path, target: Path) -> None:
    """cp with fsync, in a process of its own as the command is."""
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir()
    subprocess.run(["cp", *map(str, sorted(source.glob("*.safetensors"))), str(target)], check=True)
    for path in target.iterdir():
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)


def command(source: Path, target: Path, weight_scales: str, workers: int) -> dict[str, object]:
    """The JSON object of the whole command."""
    shutil.rmtree(target, ignore_errors=True)
    words = [
        "quantize",
        str(source),
        "-o",
        str(target),
        "--policy",
        "k2.5",
        "--weight-scales",
        weight_scales,
    ]
    words += ["--workers", str(workers), "--json"]
    environment = {
        key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"
    }
    environment |= {"PYTHONPYCACHEPREFIX": str(target.parent / "bytecode")}
    done = subprocess.run(
        [sys.executable, "-m", "trtspec", *words], capture_output=True, env=environment, check=True
    )
    found: dict[str, object] = json.loads(done.stdout)
    return found


def children() -> float:
    """CPU seconds of finished child processes."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def whole_job(source: Path, arguments: argparse.Namespace, title: str) -> None:
    """One line for each way to choose scales: medians of wall time and of CPU time, beside cp in the same rounds."""
    target, rss = source.parent / "out", dict[str, float]()

    def run(weight_scales: str) -> Callable[[], object]:
        def once() -> None:
            rss[weight_scales] = float(
                str(command(source, target, weight_scales, arguments.workers)["peak_rss_bytes"])
            )

        return once

    contest: Contest = {"cp": lambda: copy(source, source.parent / "copy")}
    contest |= {name: run(name) for name in arguments.weight_scales}
    cpu: dict[str, list[float]] = {name: [] for name in contest}

    def counted(name: str, once: Callable[[], object]) -> Callable[[], object]:
        def both() -> None:
            begin = children()
            once()
            cpu[name].append(children() - begin)

        return both

    wall = medians({name: counted(name, once) for name, once in contest.items()}, arguments.rounds)
    size = sum(path.stat().st_size for path in source.glob("*.safetensors"))
    for name in arguments.weight_scales:
        used = statistics.median(cpu[name][1:])
        print(
            f"{title:<30}{name:<5}{size / 1e9:7.2f}{wall['cp']:9.2f}{wall[name]:9.2f}{wall[name] / wall['cp']:8.2f}"
            f"{used:9.2f}{used / size * 1e9:10.2f}{size / wall[name] / 1e9:8.2f}{rss[name] / 2**20:9.0f}",
            flush=True,
        )
    for directory in (target, source.parent / "copy"):
        shutil.rmtree(directory, ignore_errors=True)


def speed(root: Path, arguments: argparse.Namespace) -> None:
    print(
        "\nthe command from start to end; seconds, ratio to cp, CPU seconds, CPU seconds per GB of source, MiB"
    )
    print(
        f"{'source':<30}{'':<5}{'GB':>7}{'cp':>9}{'quantize':>9}{'ratio':>8}{'CPU':>9}{'CPU/GB':>10}{'GB/s':>8}{'RSS':>9}"
    )
    shape, full = full_size_layer.SHAPES, (full_size_layer.HIDDEN, full_size_layer.INNER)
    per_weight = {"int4": 0.5625, "fp8-block": 1.0, "bf16": 2.0}
    for title, hidden, inner, gigabytes in (
        ("Kimi", *full, arguments.gb),
        ("small", 2048, 1024, arguments.small_gb),
    ):
        full_size_layer.HIDDEN, full_size_layer.INNER = hidden, inner
        full_size_layer.SHAPES = {
            leaf: (inner, hidden) if leaf != "down_proj" else (hidden, inner) for leaf in shape
        }
        for format in arguments.formats if gigabytes else ():
            experts = max(4, round(gigabytes * 1e9 / (3 * hidden * inner * per_weight[format])))
            source = full_size_layer.make_layer(root / "in", format, experts, arguments.shards)
            whole_job(source, arguments, f"{title} {hidden} x {inner} {format}")
            shutil.rmtree(source)


def memory(root: Path, formats: list[str]) -> None:
    """One shard of each size, one worker. VmHWM counts no page cache, and files are read, not mapped."""
    print("peak RSS in MiB, one worker, one shard of    0.5       1       2       4 GB")
    for format in formats:
        per_expert = 3 * full_size_layer.HIDDEN * full_size_layer.INNER
        per_expert *= {"int4": 0.5625, "fp8-block": 1.0, "bf16": 2.0}[format]
        for weight_scales in ("max", "mse"):
            peaks = []
            for gigabytes in (0.5, 1, 2, 4):
                source = full_size_layer.make_layer(
                    root / "in", format, round(gigabytes * 1e9 / per_expert), 1
                )
                peaks.append(
                    float(str(command(source, root / "out", weight_scales, 1)["peak_rss_bytes"]))
                    / 2**20
                )
                for directory in (source, root / "out"):
                    shutil.rmtree(directory)
            print(
                f"{format:<12}{weight_scales:<28}" + "".join(f"{peak:8.0f}" for peak in peaks),
                flush=True,
            )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, default in (("rounds", 5), ("shards", 4), ("workers", 0)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--gb", type=float, default=3.5, help="of each source with Kimi's matrices")
    parser.add_argument(
        "--small-gb", type=float, default=0.7, help="of each source with 1024 x 2048; 0 for none"
    )
    parser.add_argument("--formats", nargs="+", default=["bf16", "int4", "fp8-block"])
    parser.add_argument("--weight-scales", nargs="+", default=["max", "mse"])
    parser.add_argument("--directory", type=Path, help="where the files lie; default: the system's")
    parser.add_argument("--no-kernels", action="store_true", help="whole commands only")
    parser.add_argument("--memory", action="store_true", help="peak memory instead of speed")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="quantize-benchmark-", dir=arguments.directory) as root:
        if arguments.memory:
            memory(Path(root), arguments.formats)
            return
        if not arguments.no_kernels:
            kernels(arguments.rounds)
        speed(Path(root), arguments)


if __name__ == "__main__":
    main()
