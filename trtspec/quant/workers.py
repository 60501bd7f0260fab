"""Shards converted in this process or in several, one thread of computing each.

A worker writes a shard under a temporary name. Checksum, fsync and rename happen here, in threads of their own, while
the worker is at its next shard.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import threading
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, ThreadPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trtspec import machine
from trtspec.checkpoint.headers import ShardReader
from trtspec.checkpoint.writer import publish
from trtspec.errors import TrtspecError
from trtspec.quant.native import choose_packer, load_kernel
from trtspec.quant.plan import ShardPlan
from trtspec.quant.shard import ShardConverter
from trtspec.report import file_sha256, peak_rss

Written = tuple[Path, dict[str, Any]]  # under its temporary name, and the journal's record without the checksum
Done = tuple[ShardPlan, dict[str, Any]]
AUTO_BYTES = 2 << 30  # below it, starting processes costs more than they save
WORKER_BYTES = 1 << 30  # more than a worker ever holds: its buffers, tables and interpreter


@dataclass(frozen=True)
class Job:
    """What every worker needs; the plans say all that is decided by shard."""

    source: Path
    output: Path
    weight_scales: str = "max"
    device: str = "cpu"

    def converter(self) -> ShardConverter:
        return ShardConverter(ShardReader(self.source), choose_packer(self.weight_scales, self.device))


def worker_count(asked: int, plans: list[ShardPlan]) -> int:
    """0 means: for a large source as many as cores and memory allow, one for a small one."""
    if asked == 0:
        large = sum(plan.bytes_in for plan in plans) >= AUTO_BYTES
        asked = min(machine.cores(), machine.free_memory() // WORKER_BYTES) if large else 1
    return max(1, min(asked, len(plans)))


def convert_all(
    job: Job, plans: list[ShardPlan], workers: int, progress: Callable[[int], None] | None = None
) -> Iterator[Done]:
    """Yields each shard's plan and record once the shard is durable. The first failure stops the rest."""
    converted = _convert_here(job, plans, progress) if workers == 1 else _convert_apart(job, plans, workers, progress)
    publishing: dict[Future[dict[str, Any]], ShardPlan] = {}
    pool = ThreadPoolExecutor(workers, thread_name_prefix="publish")
    try:
        for plan, (temporary, record) in converted:
            publishing[pool.submit(_publish, temporary, job.output / plan.shard, record)] = plan
            yield from _finished(publishing, at_most=workers)
        yield from _finished(publishing, at_most=0)
    finally:
        converted.close()
        pool.shutdown(cancel_futures=True)
        for plan in plans:  # converted, but a failure came before it was published
            for path in job.output.glob(f".{plan.shard}.*.partial"):
                path.unlink(missing_ok=True)


def _publish(temporary: Path, path: Path, record: dict[str, Any]) -> dict[str, Any]:
    """The checksum of what the kernel will write, then durable under its name."""
    digest = file_sha256(temporary)
    publish(temporary, path)
    return record | {"sha256": digest}


def _finished(publishing: dict[Future[dict[str, Any]], ShardPlan], at_most: int) -> Iterator[Done]:
    """What is durable by now, waiting until at most so many shards are not."""
    while publishing:
        crowded = len(publishing) > at_most
        done, _ = wait(publishing, timeout=None if crowded else 0, return_when=FIRST_COMPLETED)
        if not done:
            return
        for future in done:
            yield publishing.pop(future), future.result()


def _convert_here(
    job: Job, plans: list[ShardPlan], progress: Callable[[int], None] | None
) -> Generator[tuple[ShardPlan, Written]]:
    converter = job.converter()
    threads = _set_torch_threads(1)
    try:
        for plan in plans:
            yield plan, converter.convert(plan, job.output, progress)
    finally:
        converter.close()
        _set_torch_threads(threads)


def _set_torch_threads(count: int) -> int:
    """Small chunks lose at barriers. Returns how many there were; where C computes, torch is not even imported."""
    torch = sys.modules.get("torch")
    if torch is None:
        return count
    before: int = torch.get_num_threads()
    torch.set_num_threads(count)
    return before


def _convert_apart(
    job: Job, plans: list[ShardPlan], workers: int, progress: Callable[[int], None] | None
) -> Generator[tuple[ShardPlan, Written]]:
    load_kernel()  # compiled once, before every worker would
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(workers, mp_context=context, initializer=_start_worker, initargs=(job,))
    try:
        futures: dict[Future[Written], ShardPlan] = {pool.submit(_work, plan): plan for plan in plans}
        while futures:
            done, _ = wait(futures, return_when=FIRST_COMPLETED)
            for future in done:
                plan, written = futures.pop(future), future.result()
                if progress:
                    progress(plan.bytes_in)
                yield plan, written
    except BrokenProcessPool:
        raise TrtspecError(
            "a worker process was killed, most likely because memory ran out",
            "run the same command again with fewer --workers; finished shards are kept",
        ) from None
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


_CONVERTER: list[tuple[ShardConverter, Path]] = []


def _start_worker(job: Job) -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    threading.Thread(target=_exit_with, args=(parent,), daemon=True).start()
    _CONVERTER.append((job.converter(), job.output))
    _set_torch_threads(1)


def _exit_with(parent: Any) -> None:
    """A killed parent cannot stop its workers; they would go on writing beside its successor."""
    parent.join()
    os._exit(1)


def _work(plan: ShardPlan) -> Written:
    converter, output = _CONVERTER[0]
    temporary, record = converter.convert(plan, output)
    return temporary, record | {"worker_peak_rss_bytes": peak_rss()}
