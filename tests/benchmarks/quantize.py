"""How fast `quantize` is: the packing kernel beside ModelOpt's, and the whole job beside `cp` of the same files.

    python -m tests.benchmarks.quantize [--rounds 5] [--experts 24] [--shards 4] [--workers 1]

Contestants alternate inside each round and medians are printed, because a shared machine's speed drifts from minute to
minute: trust the ratios, not the seconds. One torch thread per process. Both whole jobs end with fsync, `quantize` with
its journal and checksums too.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from compressed_tensors.compressors.pack_quantized.helpers import unpack_from_int32
from modelopt.torch.quantization.qtensor.nvfp4_tensor import NVFP4QTensor

from tests.benchmarks.full_size_layer import make_layer
from tests.tiny_formats import pack_int4
from trtspec.formats import WeightFormat
from trtspec.quant.conversion import ConversionOptions
from trtspec.quant.packing import Rows, Scaling, TorchPacker, choose_packer
from trtspec.quant.policy import load_policy
from trtspec.quant.streaming import quantize_checkpoint
from trtspec.report import file_sha256

Contest = dict[str, Callable[[], object]]


def medians(contest: Contest, rounds: int, clock: Callable[[], float] = time.perf_counter) -> dict[str, float]:
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
    target = torch.empty(2048, 3584, dtype=torch.uint8), torch.empty(2048, 448, dtype=torch.uint8)
    sources = {
        "BF16": Rows(WeightFormat.BF16, weight),
        "INT4": Rows(WeightFormat.INT4, parts["weight_packed"], parts["weight_scale"]),
    }

    def modelopt_from_int4() -> None:
        codes = unpack_from_int32(parts["weight_packed"], 4, shape).to(torch.bfloat16).view(2048, -1, 32)
        NVFP4QTensor.quantize((codes * parts["weight_scale"].unsqueeze(-1)).view(shape), 16)

    def ours(packer: TorchPacker, rows: Rows) -> Callable[[], object]:
        return lambda: packer.pack(rows, Scaling.of(packer.amax(rows)), *target)

    theirs = {"BF16": lambda: NVFP4QTensor.quantize(weight.clone(), 16), "INT4": modelopt_from_int4}
    print("packing 2048 x 7168 in memory, 1 thread, CPU seconds   ours  ModelOpt   ratio   GB/s of source")
    for name, rows in sources.items():
        packers = {"C": choose_packer(), "torch": TorchPacker(), "C, mse": choose_packer("mse")}
        contest: Contest = {kind: ours(packer, rows) for kind, packer in packers.items()}
        times = medians(contest | {"ModelOpt": theirs[name]}, rounds, time.thread_time)
        size = rows.values.nbytes + (0 if rows.scale is None else rows.scale.nbytes)
        for kind in contest:
            ratio, rate = times["ModelOpt"] / times[kind], size / times[kind] / 1e9
            label = f"{name} -> NVFP4, {kind}"
            print(f"{label:<52}{times[kind]:7.4f}{times['ModelOpt']:10.3f}{ratio:8.1f}{rate:12.2f}", flush=True)


def copy(source: Path, target: Path) -> None:
    """cp with fsync."""
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir()
    for path in source.glob("*.safetensors"):
        shutil.copyfile(path, target / path.name)
        descriptor = os.open(target / path.name, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)


def whole_job(format: str, root: Path, arguments: argparse.Namespace) -> None:
    """Prints one line; runs in a process of its own, so that the peak is this job's."""
    source = root / format
    target, results = root / "out", list[dict[str, Any]]()

    cpu, copying = list[tuple[float, float]](), list[float]()

    def cp() -> None:
        begin = time.thread_time()
        copy(source, root / "copy")
        copying.append(time.thread_time() - begin)

    def quantize() -> None:
        shutil.rmtree(target, ignore_errors=True)
        begin = time.thread_time(), time.process_time()
        results.append(
            quantize_checkpoint(source, target, load_policy("k2.5"), ConversionOptions(workers=arguments.workers))
        )
        cpu.append((time.thread_time() - begin[0], time.process_time() - begin[1]))

    size = sum(path.stat().st_size for path in source.glob("*.safetensors"))
    times = medians({"cp": cp, "quantize": quantize}, arguments.rounds)
    print(
        f"{format:<10}{size / 1e9:8.3f} GB{times['cp']:10.2f}{times['quantize']:10.2f}"
        f"{times['quantize'] / times['cp']:10.2f}{size / times['quantize'] / 1e9:10.3f}"
        f"{results[-1]['peak_rss_bytes'] / 2**20:10.0f}"
    )
    print(f"          CPU s: cp {statistics.median(copying):.2f}", end=", ")
    profile(source, target, statistics.median(part[0] for part in cpu), statistics.median(part[1] for part in cpu))


def profile(source: Path, target: Path, main_thread: float, process: float) -> None:
    """CPU seconds of the job's threads; reading and hashing measured alone on the same files."""
    buffer, begin = bytearray(16 << 20), time.thread_time()
    for path in source.glob("*.safetensors"):
        with path.open("rb", buffering=0) as stream:
            while stream.readinto(buffer):
                pass
    reading, begin = time.thread_time() - begin, time.thread_time()
    for path in target.glob("*.safetensors"):
        file_sha256(path)
    hashing = time.thread_time() - begin
    rest = process - main_thread - reading - hashing
    print(
        f"computing and Python {main_thread:.2f}, reading {reading:.2f}, checksums {hashing:.2f}, "
        f"writing and the rest {rest:.2f}; in all {process:.2f}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("rounds", 5), ("experts", 24), ("shards", 4), ("workers", 1)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--formats", nargs="+", default=["bf16", "int4", "fp8-block"])
    parser.add_argument("--directory", type=Path, help="where the files lie; default: the system's")
    parser.add_argument("--no-kernels", action="store_true", help="whole jobs only")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if not arguments.no_kernels:
        kernels(arguments.rounds)
    print(f"\nwhole job, {arguments.workers} worker(s)")
    print("source          size      cp s  quantize s  ratio   GB/s in  peak RSS MiB", flush=True)
    with tempfile.TemporaryDirectory(prefix="quantize-benchmark-", dir=arguments.directory) as root:
        for format in arguments.formats:
            # as many bytes of BF16 as of INT4, so that both columns of cp mean the same
            experts = arguments.experts if format == "int4" else max(1, arguments.experts * 9 // 32)
            source = make_layer(Path(root) / format, format, experts, arguments.shards)
            job = multiprocessing.get_context("spawn").Process(target=whole_job, args=(format, Path(root), arguments))
            job.start()
            job.join()
            shutil.rmtree(source)


if __name__ == "__main__":
    main()
