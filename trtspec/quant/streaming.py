"""BF16, FP8-block or INT4 Kimi checkpoint -> NVFP4, shard by shard, in bounded memory, resumable."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from trtspec.checkpoint.journal import Journal
from trtspec.checkpoint.writer import write_index
from trtspec.errors import TrtspecError
from trtspec.quant import export_files, parts
from trtspec.quant.conversion import (
    Conversion,
    ConversionOptions,
    begun_in,
    claim_output,
    clear_output,
    estimate,
    fingerprint,
    prepare,
)
from trtspec.quant.packing import choose_packer
from trtspec.quant.policy import Policy
from trtspec.quant.shard import ERROR_ROWS
from trtspec.quant.workers import Job, convert_all, worker_count
from trtspec.report import OutputOptions, file_sha256, peak_rss, provenance, write_json

Progress = Callable[[int, int], None]
WEIGHT_SCALES = {"max": "by the maximum of each block", "mse": "of least squared error for each block"}


def quantize_checkpoint(
    source: Path,
    output: Path,
    policy: Policy,
    options: ConversionOptions | None = None,
    again: OutputOptions | None = None,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Converts `source` to `output` and returns the `quantize` JSON object.

    Run again after a kill it continues: shards whose size and checksum are in the journal are kept as they are. A part
    leaves the other shards, index and configs to other machines and to `merge`. `progress` is called with source bytes
    done and in all. Raises TrtspecError or UsageError before the first byte for everything that headers, options, disk
    and permissions can tell.
    """
    start = time.monotonic()
    options, again = options or ConversionOptions(), again or OutputOptions()
    part = options.part
    whole = prepare(source, output, policy, options)
    conversion = parts.part_of(whole, part)
    choose_packer(options.weight_scales, options.device)  # a missing device is reported before anything is written
    parts.check_sharing(output, part, options.merge)
    if again.dry_run:
        begun = begun_in(output, parts.journal_name(part), again.force)
        return estimate(conversion, options.workers) | {
            "device": options.device,
            "resumes": begun and not again.restart,
        }
    header = {"source": fingerprint(whole.checkpoint), "options": whole.options}
    if options.merge:
        return _merge(whole, header) | {"seconds": round(time.monotonic() - start, 3), "peak_rss_bytes": peak_rss()}
    name = parts.journal_name(part)
    fresh = claim_output(conversion, again.restart, again.force, name)
    with Journal(output / name, header, restart=again.restart) as journal:
        clear_output(conversion, fresh, whole=part is None)
        kept = _verified(conversion, journal.done)
        resumed = _convert(conversion, journal, kept, options.workers, options.device, progress)
        records = {plan.shard: journal.done[plan.shard] for plan in conversion.plans}
        result = summarize(conversion, records)
        if part is None:
            finish(conversion, records, result, header)
    return result | {
        "part": part and f"{part[0]}/{part[1]}",
        "seconds": round(time.monotonic() - start, 3),
        "peak_rss_bytes": max(peak_rss(), *(record.get("worker_peak_rss_bytes", 0) for record in records.values())),
        "shards_resumed": resumed,
    }


def _merge(conversion: Conversion, header: dict[str, Any]) -> dict[str, Any]:
    """Index, card, provenance and configs once every part is there, whole and unchanged."""
    parts.check_strays(conversion)
    with parts.finished_parts(conversion, header) as records:
        damaged = sorted(records.keys() - _verified(conversion, records))
        if damaged:
            text = f"{len(damaged)} shards are not what their part recorded, first {damaged[0]}"
            raise TrtspecError(text, "run that part's command again, then --merge")
        records = {plan.shard: records[plan.shard] for plan in conversion.plans}
        result = summarize(conversion, records)
        finish(conversion, records, result, header)
    return result | {"part": "merge", "shards_resumed": len(records)}


def _verified(conversion: Conversion, done: dict[str, dict[str, Any]]) -> set[str]:
    """Shards that need no work: recorded, present, of the recorded size and content. Read by one thread per core."""

    def is_whole(shard: str) -> bool:
        record, path = done.get(shard), conversion.output / shard
        present = record is not None and path.is_file() and path.stat().st_size == record["bytes"]
        return present and record is not None and file_sha256(path) == record["sha256"]

    shards = [plan.shard for plan in conversion.plans]
    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        return {shard for shard, whole in zip(shards, pool.map(is_whole, shards), strict=True) if whole}


def _convert(
    conversion: Conversion, journal: Journal, kept: set[str], workers: int, device: str, progress: Progress | None
) -> int:
    """Converts what is not kept, recording each shard; returns how many were kept."""
    todo = [plan for plan in conversion.plans if plan.shard not in kept]
    done = conversion.bytes_in - sum(plan.bytes_in for plan in todo)

    def advance(count: int) -> None:
        nonlocal done
        done += count
        if progress:
            progress(done, conversion.bytes_in)

    advance(0)
    policy, input_scales = conversion.policy, conversion.input_scales
    path = conversion.checkpoint.path
    job = Job(path, conversion.output, policy, input_scales, conversion.weight_scales, device)
    if todo:
        for plan, record in convert_all(job, todo, worker_count(workers, todo), advance):
            journal.record(plan.shard, **record)
    return len(kept)


def summarize(conversion: Conversion, records: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """The counts and errors of all shards, from their journal records."""
    classes: dict[str, dict[str, float]] = {}
    for record in records.values():
        for name, entry in record["classes"].items():
            total = classes.setdefault(name, dict.fromkeys(entry, 0))
            for key, value in entry.items():
                total[key] += value
    summary = {
        name: {
            "tensors": int(entry["tensors"]),
            "relative_error": round((entry["error"] / entry["norm"]) ** 0.5 if entry["norm"] else 0.0, 6),
            "zero_blocks": int(entry["zero_blocks"]),
        }
        for name, entry in sorted(classes.items())
    }
    return {
        "output": str(conversion.output),
        "policy": conversion.policy.name,
        "weight_scales": conversion.weight_scales,
        **{key: sum(record[key] for record in records.values()) for key in ("quantized", "decoded", "copied")},
        "bytes_in": conversion.bytes_in,
        "bytes_out": conversion.bytes_out,
        "classes": summary,
        "zero_tensors": sorted(name for record in records.values() for name in record["zero_tensors"]),
    }


def finish(
    conversion: Conversion, records: dict[str, dict[str, Any]], result: dict[str, Any], header: dict[str, Any]
) -> None:
    """Index, carried files, card, provenance, then the configs that make the directory a checkpoint."""
    output, source = conversion.output, conversion.checkpoint.path
    exclude = conversion.policy.exclude_patterns(conversion.spec)
    shards = [plan.shard for plan in conversion.plans]
    if shards != ["model.safetensors"]:
        weight_map = {name: plan.shard for plan in conversion.plans for name in plan.layout()}
        write_index(output, weight_map, conversion.bytes_out)
    carried = export_files.carry_files(source, output)
    export_files.write_card(output, _card(conversion, result))
    written = {shard: records[shard]["sha256"] for shard in shards}
    origin = {"path": str(source), **header["source"]}
    more = {"shards": written, "carried": carried, "classes": result["classes"]}
    write_json(output / "provenance.json", provenance("quantize", origin, conversion.options, **more))
    export_files.write_configs(output, conversion.checkpoint.config, exclude, conversion.kv_cache)


def _card(conversion: Conversion, result: dict[str, Any]) -> str:
    spec, policy = conversion.spec, conversion.policy
    kv = "FP8 E4M3 by a plain cast, no scales" if conversion.kv_cache == "fp8" else "as the engine chooses"
    scales = "1.0 for every linear (uncalibrated)" if conversion.input_scales is None else conversion.scales.source
    facts = {
        "base": conversion.checkpoint.path.name,
        "title": conversion.checkpoint.path.name,
        "output": conversion.output.name,
        "policy": policy.name,
        "summary": policy.summary,
        "quantized": result["quantized"],
        "copied": result["copied"],
        "decoded": result["decoded"],
        "kv": kv,
        "scales": scales,
        "weight_scales": WEIGHT_SCALES[conversion.weight_scales],
        "size": f"{result['bytes_out']:,}",
        "size_in": f"{result['bytes_in']:,}",
        "format": spec.quant.format.upper(),
        "rows": ERROR_ROWS,
    }
    return export_files.model_card(spec, facts, result["classes"], result["zero_tensors"])
