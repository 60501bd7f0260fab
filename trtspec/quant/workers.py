"""Shards converted in this process or in several; one torch thread each, because small chunks lose at barriers."""

from __future__ import annotations

import multiprocessing
import os
import resource
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from trtspec.checkpoint.detect import target_spec
from trtspec.checkpoint.headers import Checkpoint
from trtspec.checkpoint.tensors import LazyTensors
from trtspec.errors import TrtspecError
from trtspec.quant.input_scales import InputScales
from trtspec.quant.plan import ShardPlan
from trtspec.quant.policy import Policy
from trtspec.quant.shard import ShardConverter

Done = tuple[ShardPlan, dict[str, Any]]
AUTO_BYTES = 2 << 30  # below it, starting processes costs more than they save


@dataclass(frozen=True)
class Job:
    """What every worker needs to open the source for itself."""

    source: Path
    output: Path
    policy: Policy
    input_scales: Path | None

    def converter(self) -> ShardConverter:
        checkpoint = Checkpoint.open(self.source)
        scales = InputScales.load(self.input_scales)
        return ShardConverter(LazyTensors(checkpoint), target_spec(checkpoint), self.policy, scales)


def worker_count(asked: int, plans: list[ShardPlan]) -> int:
    """0 means: as many as there are cores for a large source, one for a small one."""
    if asked == 0:
        asked = (os.cpu_count() or 1) if sum(plan.bytes_in for plan in plans) >= AUTO_BYTES else 1
    return max(1, min(asked, len(plans)))


def convert_all(
    job: Job, plans: list[ShardPlan], workers: int, progress: Callable[[int], None] | None = None
) -> Iterator[Done]:
    """Yields each shard's plan and record once the shard is durable. The first failure stops the rest."""
    if workers == 1:
        yield from _convert_here(job, plans, progress)
    else:
        yield from _convert_apart(job, plans, workers, progress)


def _convert_here(job: Job, plans: list[ShardPlan], progress: Callable[[int], None] | None) -> Iterator[Done]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    converter = job.converter()
    try:
        for plan in plans:
            yield plan, converter.convert(plan, job.output, progress)
    finally:
        converter.tensors.close()
        torch.set_num_threads(threads)


def _convert_apart(
    job: Job, plans: list[ShardPlan], workers: int, progress: Callable[[int], None] | None
) -> Iterator[Done]:
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(workers, mp_context=context, initializer=_start_worker, initargs=(job,))
    try:
        futures: dict[Future[dict[str, Any]], ShardPlan] = {pool.submit(_work, plan): plan for plan in plans}
        while futures:
            done, _ = wait(futures, return_when=FIRST_COMPLETED)
            for future in done:
                plan = futures.pop(future)
                record = future.result()
                if progress:
                    progress(plan.bytes_in)
                yield plan, record
    except BrokenProcessPool:
        raise TrtspecError(
            "a worker process was killed, most likely because memory ran out",
            "run the same command again with fewer --workers; finished shards are kept",
        ) from None
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


_CONVERTER: list[tuple[ShardConverter, Path]] = []


def _start_worker(job: Job) -> None:
    torch.set_num_threads(1)
    parent = multiprocessing.parent_process()
    assert parent is not None
    threading.Thread(target=_exit_with, args=(parent,), daemon=True).start()
    _CONVERTER.append((job.converter(), job.output))


def _exit_with(parent: Any) -> None:
    """A killed parent cannot stop its workers; they would go on writing beside its successor."""
    parent.join()
    os._exit(1)


def _work(plan: ShardPlan) -> dict[str, Any]:
    converter, output = _CONVERTER[0]
    return converter.convert(plan, output) | {"worker_peak_rss_bytes": peak_rss()}


def peak_rss() -> int:
    """The largest resident set of this process so far, in bytes.

    Linux's ru_maxrss also remembers the process that started this one; VmHWM does not.
    """
    status = Path("/proc/self/status")
    if status.is_file():
        return 1024 * next(int(line.split()[1]) for line in status.read_text().splitlines() if line.startswith("VmHWM"))
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
