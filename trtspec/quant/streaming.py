"""BF16, FP8-block or INT4 Kimi checkpoint -> NVFP4, shard by shard, in bounded memory, resumable.

Several machines may share a conversion: `--shard i/n` for each of them, `--merge` once they are done. Part i converts
every n-th shard file, counted from i, and keeps a journal of its own in the common output directory. The lock on a
journal refuses a second machine on the same part.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from trtspec.checkpoint.headers import Checkpoint, ShardReader
from trtspec.checkpoint.writer import Journal, differences, header_of, refuse_changed, write_index
from trtspec.errors import TrtspecError, UsageError
from trtspec.quant.conversion import (
    Conversion,
    ConversionOptions,
    LinearErrors,
    Quantized,
    QuantizePlan,
    estimate,
    prepare,
)
from trtspec.quant.native import choose_packer
from trtspec.quant.output import (
    JOURNAL_NAME,
    JOURNALS,
    carry_files,
    check_output,
    claim_output,
    clear_output,
    disk_errors,
    model_card,
    publication,
    refuse_strays,
    source_identity,
    write_card,
    write_configs,
)
from trtspec.quant.plan import ShardPlan
from trtspec.quant.policy import KV_CACHES, WEIGHT_SCALES, Policy, source_name
from trtspec.quant.shard import ERROR_ROWS, ShardConverter
from trtspec.quant.workers import Job, convert_all, worker_count
from trtspec.report import OutputOptions, file_sha256, peak_rss, provenance, say, write_json

NAMES = re.compile(r"\.trtspec-quantize\.(\d+)-of-(\d+)\.jsonl")


def parse_part(text: str) -> tuple[int, int]:
    """`i/n`, i from 0 as in a Kubernetes indexed Job; raises UsageError."""
    index, count = (int(part) for part in text.split("/")) if re.fullmatch(r"\d+/\d+", text) else (0, 0)
    if not 0 <= index < count:
        raise UsageError(f"--shard {text!r} is not i/n with 0 <= i < n", "for example --shard 0/4")
    return index, count


def journal_name(part: tuple[int, int] | None) -> str:
    return JOURNAL_NAME if part is None else f".trtspec-quantize.{part[0]}-of-{part[1]}.jsonl"


def part_of(conversion: Conversion, part: tuple[int, int] | None) -> Conversion:
    """The conversion with this part's shard files only."""
    if part is None:
        return conversion
    plans = conversion.plans[part[0] :: part[1]]
    if not plans:
        text = f"--shard {part[0]}/{part[1]} has no work: the source has {len(conversion.plans)} shard files"
        raise UsageError(text, f"use at most {len(conversion.plans)} parts")
    return replace(conversion, plans=plans)


def parts_there(output: Path) -> dict[int, set[int]]:
    """Part numbers whose journals lie in `output`, by number of parts."""
    found: dict[int, set[int]] = {}
    for path in output.glob(JOURNALS):
        if match := NAMES.fullmatch(path.name):
            found.setdefault(int(match[2]), set()).add(int(match[1]))
    return found


def check_sharing(output: Path, part: tuple[int, int] | None, merge: bool, header: dict[str, Any]) -> None:
    """Refuses to mix a whole run with parts, parts of different numbers, and parts begun with another `header`.

    Called once before this run's journal is there, and again when it is locked: of two runs that do not go together
    and start at the same moment, at least one then sees the other.
    """
    there, remove = parts_there(output), f"resume that run, or remove {output}"
    if part is None and not merge and there:
        count = min(there)
        raise UsageError(f"{output} holds a conversion in {count} parts", "pass --shard i/n for a part, or --merge")
    if part is not None and (output / JOURNAL_NAME).exists():
        raise UsageError(f"{output} holds a conversion by one machine", remove)
    if part is not None and there.keys() - {part[1]}:
        raise UsageError(f"{output} holds a conversion in {min(there.keys() - {part[1]})} parts", remove)
    if merge and len(there) != 1:
        raise UsageError(
            f"{output} holds no conversion in parts", "run `trtspec quantize SRC -o OUT --shard i/n` first"
        )
    for count, numbers in there.items():
        for number in sorted(numbers - ({part[0]} if part else set())):
            _compare(output, (number, count), header)


def _compare(output: Path, other: tuple[int, int], header: dict[str, Any]) -> None:
    begun = header_of(output / journal_name(other))
    if begun is not None and (changed := differences(begun, header)):
        raise UsageError(
            f"part {other[0]}/{other[1]} of {output} was begun with something else: {'; '.join(changed)}",
            f"repeat the options of that part, or remove {output} and start all parts again",
        )


@contextmanager
def journal_of(
    output: Path, part: tuple[int, int] | None, header: dict[str, Any], *, restart: bool
) -> Iterator[Journal]:
    """This run's journal, locked, once it is sure that nothing else goes on in `output` that does not go with it."""
    path = output / journal_name(part)
    with Journal(path, header, restart=restart) as journal:
        try:
            check_sharing(output, part, False, header)
        except UsageError:
            if not journal.done:  # the refused run leaves no trace that would refuse its correction
                path.unlink(missing_ok=True)
            raise
        yield journal


@contextmanager
def finished_parts(conversion: Conversion, header: dict[str, Any]) -> Iterator[dict[str, dict[str, Any]]]:
    """Every shard's record from the parts' journals, which stay locked meanwhile.

    Raises UsageError when a part is still running or was begun with something else, TrtspecError when one is missing
    or unfinished.
    """
    (count, numbers), records = next(iter(parts_there(conversion.output).items())), dict[str, dict[str, Any]]()
    missing = sorted(set(range(min(count, len(conversion.plans)))) - numbers)
    if missing:
        text = f"parts {', '.join(f'{number}/{count}' for number in missing)} of {conversion.output} were never begun"
        raise TrtspecError(text, f"run `trtspec quantize` with --shard {missing[0]}/{count}, then --merge again")
    with ExitStack() as stack:
        for number in sorted(numbers):
            path = conversion.output / journal_name((number, count))
            journal = stack.enter_context(Journal(path, header, remedy=f"convert part {number}/{count} again"))
            wanted = [plan.shard for plan in conversion.plans[number::count]]
            if unfinished := [shard for shard in wanted if shard not in journal.done]:
                text = f"part {number}/{count} has not finished {len(unfinished)} shards, first {unfinished[0]}"
                raise TrtspecError(text, f"run `trtspec quantize` with --shard {number}/{count}, then --merge again")
            records |= {shard: journal.done[shard] for shard in wanted}
        yield records


Progress = Callable[[int, int], None]


def quantize_checkpoint(
    source: Path | Checkpoint,
    output: Path,
    policy: Policy,
    options: ConversionOptions | None = None,
    again: OutputOptions | None = None,
    progress: Progress | None = None,
) -> Quantized | QuantizePlan:
    """Converts `source` to `output`; with `again.dry_run` it only says what it would do.

    Run again after a kill it continues: shards whose size and checksum are in the journal are kept as they are. A part
    leaves the other shards, index and configs to other machines and to `merge`. `progress` is called with source bytes
    done and in all. Raises TrtspecError or UsageError before the first byte for everything that headers, options, disk
    and permissions can tell.
    """
    start = time.monotonic()
    options, again = options or ConversionOptions(), again or OutputOptions()
    part = options.part
    whole = prepare(source, output, policy, options)
    conversion, name = part_of(whole, part), journal_name(part)
    choose_packer(conversion.weight_scales, options.device)  # a missing device is reported before anything is written
    header = {"source": source_identity(whole.checkpoint), "options": whole.options}
    check_sharing(output, part, options.merge, header)
    if again.dry_run:
        resumes = check_output(conversion, name, restart=again.restart, force=again.force)
        if resumes and (begun := header_of(output / name)):
            refuse_changed(output / name, begun, header)
        hub = whole.checkpoint.remote
        planned = estimate(conversion, options.workers)
        return replace(planned, device=options.device, resumes=resumes, hub=hub.to_dict() if hub else None)
    if options.merge:
        with disk_errors(output):
            merged = _merge(whole, header)
        return replace(merged, seconds=round(time.monotonic() - start, 3), peak_rss_bytes=peak_rss())
    fresh = claim_output(conversion, name, restart=again.restart, force=again.force)
    with disk_errors(output), journal_of(output, part, header, restart=again.restart) as journal:
        clear_output(conversion, fresh, whole=part is None)
        kept = _verified(conversion, journal.done)
        _check_source(conversion, journal, kept)
        resumed = _convert(conversion, journal, kept, options.workers, options.device, progress)
        records = {plan.shard: journal.done[plan.shard] for plan in conversion.plans}
        result = summarize(conversion, records)
        if part is None:
            finish(conversion, records, result, header)
    return replace(
        result,
        part=f"{part[0]}/{part[1]}" if part else None,
        seconds=round(time.monotonic() - start, 3),
        peak_rss_bytes=max(peak_rss(), *(record.get("worker_peak_rss_bytes", 0) for record in records.values())),
        shards_resumed=resumed,
    )


def _merge(conversion: Conversion, header: dict[str, Any]) -> Quantized:
    """Index, card, provenance and configs once every part is there, whole and unchanged."""
    refuse_strays(conversion)
    with finished_parts(conversion, header) as records:
        damaged = sorted(records.keys() - _verified(conversion, records))
        if damaged:
            text = f"{len(damaged)} shards are not what their part recorded, first {damaged[0]}"
            raise TrtspecError(text, "run that part's command again, then --merge")
        records = {plan.shard: records[plan.shard] for plan in conversion.plans}
        result = summarize(conversion, records)
        finish(conversion, records, result, header)
    return replace(result, part="merge", shards_resumed=len(records))


def _verified(conversion: Conversion, done: dict[str, dict[str, Any]]) -> set[str]:
    """Shards that need no work: recorded, present, of the recorded size and content. Read by one thread per core."""

    def is_whole(shard: str) -> bool:
        record, path = done.get(shard), conversion.output / shard
        present = record is not None and path.is_file() and path.stat().st_size == record["bytes"]
        return present and record is not None and file_sha256(path) == record["sha256"]

    shards = [plan.shard for plan in conversion.plans]
    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        return {shard for shard, whole in zip(shards, pool.map(is_whole, shards), strict=True) if whole}


def _check_source(conversion: Conversion, journal: Journal, kept: set[str]) -> None:
    """Shards that were converted from files with other times than now are kept if the content is the same.

    Raises UsageError naming the first for which it is not.
    """
    times = _times(conversion)
    todo = [plan for plan in conversion.plans if plan.shard in kept and _changed(journal.done[plan.shard], plan, times)]
    if not todo:
        return
    say(f"reading the source of {len(todo)} finished shards again: its files have other times than when they were read")
    converter = ShardConverter(ShardReader(conversion.checkpoint.path), choose_packer(conversion.weight_scales))
    try:
        for plan in todo:
            record = journal.done[plan.shard]
            if converter.source_digest(plan) != record["read"]:
                names = ", ".join(plan.sources)
                text = f"{plan.shard} was converted from something else than {names} of the source now hold"
                raise UsageError(text, "pass --restart to start over")
            fields = {name: value for name, value in record.items() if name != "key"}
            journal.record(plan.shard, **fields | {"times": {name: times[name] for name in plan.sources}})
    finally:
        converter.close()


def _times(conversion: Conversion) -> dict[str, int]:
    """Modification times of the source's shard files, in nanoseconds."""
    source = conversion.checkpoint.path
    return {name: (source / name).stat().st_mtime_ns for name in conversion.checkpoint.shards}


def _changed(record: dict[str, Any], plan: ShardPlan, times: dict[str, int]) -> bool:
    return bool(record.get("times") != {name: times[name] for name in plan.sources})


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
    times = _times(conversion)  # before anything is read
    job = Job(conversion.checkpoint.path, conversion.output, conversion.weight_scales, device)
    if todo:
        for plan, record in convert_all(job, todo, worker_count(workers, todo), advance):
            journal.record(plan.shard, **record, times={name: times[name] for name in plan.sources})
    return len(kept)


def summarize(conversion: Conversion, records: dict[str, dict[str, Any]]) -> Quantized:
    """The counts and errors of all shards, from their journal records."""
    classes: dict[str, dict[str, float]] = {}
    for record in records.values():
        for name, entry in record["classes"].items():
            total = classes.setdefault(name, dict.fromkeys(entry, 0))
            for key, value in entry.items():
                total[key] += value
    summary = {
        name: LinearErrors(
            tensors=int(entry["tensors"]),
            relative_error=round((entry["error"] / entry["norm"]) ** 0.5 if entry["norm"] else 0.0, 6),
            zero_blocks=int(entry["zero_blocks"]),
        )
        for name, entry in sorted(classes.items())
    }
    return Quantized(
        output=str(conversion.output),
        policy=conversion.policy.name,
        weight_scales=conversion.weight_scales,
        deviations=conversion.deviations,
        quantized=sum(record["quantized"] for record in records.values()),
        decoded=sum(record["decoded"] for record in records.values()),
        copied=sum(record["copied"] for record in records.values()),
        bytes_in=conversion.bytes_in,
        bytes_out=conversion.bytes_out,
        classes=summary,
        zero_tensors=sorted(name for record in records.values() for name in record["zero_tensors"]),
    )


def finish(
    conversion: Conversion, records: dict[str, dict[str, Any]], result: Quantized, header: dict[str, Any]
) -> None:
    """Index, carried files, card, provenance, then the configs that make the directory a checkpoint."""
    output, source = conversion.output, conversion.checkpoint.path
    exclude = conversion.policy.exclude_patterns(conversion.spec)
    shards = [plan.shard for plan in conversion.plans]
    if shards != ["model.safetensors"]:
        weight_map = {name: plan.shard for plan in conversion.plans for name in plan.layout()}
        write_index(output, weight_map, conversion.bytes_out)
    carried = carry_files(source, output)
    write_card(output, _card(conversion, result))
    written = {shard: records[shard]["sha256"] for shard in shards}
    origin = {"path": str(source), **header["source"]}
    more = {"shards": written, "carried": carried, "classes": asdict(result)["classes"]}
    write_json(output / "provenance.json", provenance("quantize", origin, conversion.options, **more))
    write_configs(output, conversion.checkpoint.config, exclude, conversion.kv_cache)


def _card(conversion: Conversion, result: Quantized) -> str:
    spec, policy = conversion.spec, conversion.policy
    name = source_name(conversion.checkpoint.path)
    facts = {
        "base": name,
        "title": name.rpartition("/")[2],
        "output": conversion.output.name,
        "policy": policy.name,
        "summary": policy.summary,
        "quantized": result.quantized,
        "copied": result.copied,
        "decoded": result.decoded,
        "kv": KV_CACHES[conversion.kv_cache or "none"],
        "published": publication(policy, conversion.deviations),
        "scales": conversion.scales.description,
        "weight_scales": WEIGHT_SCALES[conversion.weight_scales],
        "size": f"{result.bytes_out:,}",
        "size_in": f"{result.bytes_in:,}",
        "format": spec.quant.format.upper(),
        "rows": ERROR_ROWS,
    }
    return model_card(spec, facts, result.classes, result.zero_tensors)
