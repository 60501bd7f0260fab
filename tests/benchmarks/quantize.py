"""How fast `quantize` is: the packing kernel beside ModelOpt's, and the whole job beside `cp` of the same files.

    python -m tests.benchmarks.quantize [--rounds 5] [--hidden 1024] [--experts 48] [--layers 4] [--workers 1]

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

import torch
from compressed_tensors.compressors.pack_quantized.helpers import unpack_from_int32
from modelopt.torch.quantization.qtensor.nvfp4_tensor import NVFP4QTensor

from tests.tiny import make_target
from tests.tiny_formats import pack_int4
from trtspec.quant import int4, nvfp4
from trtspec.quant.policy import load_policy
from trtspec.quant.streaming import quantize_checkpoint

Contest = dict[str, Callable[[], object]]


def medians(contest: Contest, rounds: int) -> dict[str, float]:
    """Median seconds of each contestant, run in turn `rounds` times after one warm-up."""
    seconds: dict[str, list[float]] = {name: [] for name in contest}
    for number in range(rounds + 1):
        for name, run in contest.items():
            begin = time.perf_counter()
            run()
            if number:
                seconds[name].append(time.perf_counter() - begin)
    return {name: statistics.median(values) for name, values in seconds.items()}


def kernels(rounds: int) -> None:
    """One Kimi expert matrix, in memory."""
    weight = torch.randn(2048, 7168).to(torch.bfloat16)
    parts = pack_int4(weight)
    shape = torch.Size(weight.shape)

    def modelopt_from_int4() -> None:
        codes = unpack_from_int32(parts["weight_packed"], 4, shape).to(torch.bfloat16).view(2048, -1, 32)
        NVFP4QTensor.quantize((codes * parts["weight_scale"].unsqueeze(-1)).view(shape), 16)

    bf16 = medians(
        {"ours": lambda: nvfp4.quantize(weight), "ModelOpt": lambda: NVFP4QTensor.quantize(weight.clone(), 16)}, rounds
    )
    from_int4 = medians(
        {"ours": lambda: nvfp4.quantize(int4.dequantize(*parts.values())), "ModelOpt": modelopt_from_int4}, rounds
    )
    print("packing 2048 x 7168 in memory, 1 thread           ours s  ModelOpt s   ratio   ours GB/s of source")
    for name, result, size in (
        ("BF16 -> NVFP4", bf16, weight.nbytes),
        ("INT4 -> BF16 -> NVFP4 (there: compressed-tensors)", from_int4, sum(part.nbytes for part in parts.values())),
    ):
        ratio, rate = result["ModelOpt"] / result["ours"], size / result["ours"] / 1e9
        print(f"{name:<50}{result['ours']:6.3f}{result['ModelOpt']:12.3f}{ratio:8.1f}{rate:13.2f}")


def copy(source: Path, target: Path) -> None:
    """cp with fsync."""
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir()
    for path in source.glob("*.safetensors"):
        shutil.copyfile(path, target / path.name)
        descriptor = os.open(target / path.name, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)


def source_of(format: str, root: Path, arguments: argparse.Namespace) -> Path:
    sizes = {"hidden": arguments.hidden, "experts": arguments.experts, "layers": arguments.layers}
    return make_target(root / format, format=format, shards=8, **sizes)


def whole_job(format: str, root: Path, arguments: argparse.Namespace) -> None:
    """Prints one line; runs in a process of its own, so that the peak is this job's."""
    source = root / format
    target, results = root / "out", []

    def quantize() -> None:
        shutil.rmtree(target, ignore_errors=True)
        results.append(quantize_checkpoint(source, target, load_policy("k2.5"), workers=arguments.workers))

    size = sum(path.stat().st_size for path in source.glob("*.safetensors"))
    times = medians({"cp": lambda: copy(source, root / "copy"), "quantize": quantize}, arguments.rounds)
    print(
        f"{format:<10}{size / 1e9:8.3f} GB{times['cp']:10.2f}{times['quantize']:10.2f}"
        f"{times['quantize'] / times['cp']:10.2f}{size / times['quantize'] / 1e9:10.3f}"
        f"{results[-1]['peak_rss_bytes'] / 2**20:10.0f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("rounds", 5), ("hidden", 1024), ("experts", 48), ("layers", 4), ("workers", 1)):
        parser.add_argument(f"--{name}", type=int, default=default)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    kernels(arguments.rounds)
    print(f"\nwhole job, {arguments.workers} worker(s)")
    print("source          size      cp s  quantize s  ratio   GB/s in  peak RSS MiB", flush=True)
    with tempfile.TemporaryDirectory(prefix="quantize-benchmark-") as root:
        for format in ("bf16", "int4", "fp8-block"):
            source = source_of(format, Path(root), arguments)
            job = multiprocessing.get_context("spawn").Process(target=whole_job, args=(format, Path(root), arguments))
            job.start()
            job.join()
            shutil.rmtree(source)


if __name__ == "__main__":
    main()
