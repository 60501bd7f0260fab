"""`trtspec quantize`: BF16, FP8-block or INT4 Kimi checkpoint -> NVFP4, in bounded memory, resumable; and the records
that it reports, whose fields are the keys of `--json`."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from trtspec import machine
from trtspec.checkpoint.headers import Checkpoint, ShardReader
from trtspec.checkpoint.identity import identity
from trtspec.checkpoint.output import WRITTEN, OutputDirectory, carried_names, carry_files
from trtspec.checkpoint.writer import Journal, write_index
from trtspec.errors import Problem, UsageError
from trtspec.quant import card
from trtspec.quant.content import REPEATED, ZERO, Found, content_problems, repeated
from trtspec.quant.convert import ERROR_ROWS, Record, convert_shards, source_digests, thread_count
from trtspec.quant.native import choose_packer, seconds_per_element
from trtspec.quant.plan import Conversion, ConversionOptions, ShardPlan, class_counts, prepare
from trtspec.quant.policy import Policy
from trtspec.report import (
    OutputOptions,
    file_sha256,
    peak_rss,
    provenance,
    say,
    write_atomic,
    write_json,
)

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

    Run again after a kill it continues: shards whose size and checksum are in the journal are kept as they are.
    `progress` is called with source bytes done and in all. Raises TrtspecError or UsageError before the first byte for
    everything that headers, options, disk and permissions can tell.
    """
    start = time.monotonic()
    options, again = options or ConversionOptions(), again or OutputOptions()
    conversion = prepare(source, output, policy, options)
    directory = _directory(conversion)
    choose_packer(conversion.weight_scales, options.device)  # a missing device is reported before anything is written
    if options.by_modelopt:
        from trtspec.quant import modelopt  # only now: it imports torch

        modelopt.check_engine(conversion)
        if directory.journal.exists() and not again.restart:
            raise UsageError(f"{output} holds an earlier conversion, which this engine cannot resume", "pass `restart`")
        again = replace(again, restart=True)
    if again.dry_run:
        resumes = directory.check(again)
        if resumes:
            directory.refuse_other(_header(conversion))
        return _estimate(conversion, resumes)
    header = _header(conversion)
    with directory.claim(header, again) as journal:
        kept = _kept(conversion, journal)
        todo = [plan for plan in conversion.plans if plan.shard not in kept]
        done, times = conversion.bytes_in - sum(plan.bytes_in for plan in todo), _times(conversion)

        def advance(count: int) -> None:
            nonlocal done
            done += count
            if progress:
                progress(done, conversion.bytes_in)

        advance(0)
        for plan, record in convert_shards(conversion, todo, thread_count(options.workers, todo), advance):
            journal.record(plan.shard, **record, times=_of(plan, times))
        records = {plan.shard: journal.done[plan.shard] for plan in conversion.plans}
        if options.by_modelopt:
            modelopt.replace_linears(conversion)
            for shard, record in records.items():
                record["sha256"] = file_sha256(output / shard)
        result = _summary(conversion, records)
        _finish(conversion, records, result, header)
    seconds = round(time.monotonic() - start, 3)
    return replace(result, seconds=seconds, peak_rss_bytes=peak_rss(), shards_resumed=len(kept))


def _directory(conversion: Conversion) -> OutputDirectory:
    source = conversion.checkpoint
    names = frozenset((*source.shards, *WRITTEN, *carried_names(source.path)))
    return OutputDirectory(conversion.output, "quantize", names, conversion.bytes_out)


def _header(conversion: Conversion) -> dict[str, Any]:
    """What the journal is begun with: all that decides the bytes."""
    header = {"source": identity(conversion.checkpoint), "options": conversion.decisive}
    return header | {"engine": "modelopt"} if conversion.options.by_modelopt else header


def _kept(conversion: Conversion, journal: Journal) -> set[str]:
    """Shards that need no work: recorded, present, of the recorded size and content.

    Raises UsageError for a shard whose source has other times than it was read with, and other content too.
    """

    def is_whole(plan: ShardPlan) -> bool:
        record, path = journal.done.get(plan.shard), conversion.output / plan.shard
        if record is None or not path.is_file() or path.stat().st_size != record["bytes"]:
            return False
        return bool(file_sha256(path) == record["sha256"])

    with ThreadPoolExecutor(machine.cores()) as pool:
        whole = list(pool.map(is_whole, conversion.plans))
    kept, times = list(itertools.compress(conversion.plans, whole)), _times(conversion)
    other = [plan for plan in kept if journal.done[plan.shard].get("times") != _of(plan, times)]
    if other:
        count = len(other)
        say(f"reading the source of {count} finished shards again: its files have other times than when they were read")
    with ShardReader(conversion.checkpoint.path) as reader:
        for plan in other:
            record = journal.done[plan.shard]
            if source_digests(reader, plan) != record["read"]:
                names = ", ".join(plan.sources)
                text = f"{plan.shard} was converted from something else than {names} of the source now hold"
                raise UsageError(text, "pass `restart` to start over")
            fields = {name: value for name, value in record.items() if name != "key"}
            journal.record(plan.shard, **fields | {"times": _of(plan, times)})
    return {plan.shard for plan in kept}


def _times(conversion: Conversion) -> dict[str, int]:
    """Modification times of the source's shard files, in nanoseconds."""
    source = conversion.checkpoint.path
    return {name: (source / name).stat().st_mtime_ns for name in conversion.checkpoint.shards}


def _of(plan: ShardPlan, times: dict[str, int]) -> dict[str, int]:
    return {name: times[name] for name in plan.sources}


def _finish(conversion: Conversion, records: dict[str, Record], result: Quantized, header: dict[str, Any]) -> None:
    """Index, carried files, card, provenance, then the configs that make the directory a checkpoint."""
    output, source = conversion.output, conversion.checkpoint.path
    if list(records) != ["model.safetensors"]:
        weight_map = {name: plan.shard for plan in conversion.plans for name in plan.layout()}
        write_index(output, weight_map, conversion.bytes_out)
    carried = carry_files(source, output)
    classes, found = asdict(result)["classes"], content_problems(_found(conversion, records))
    facts = {key: getattr(result, key) for key in ("quantized", "decoded", "copied")}
    facts |= {"size": f"{result.bytes_out:,}", "size_in": f"{result.bytes_in:,}", "rows": ERROR_ROWS}
    write_atomic(output / "README.md", card.model_card(conversion, facts, classes, found))
    written = {shard: record["sha256"] for shard, record in records.items()}
    origin, more = (
        {"path": str(source), **header["source"]},
        {"shards": written, "carried": carried, "classes": classes},
    )
    more["problems"] = [one.to_dict() for one in found]
    write_json(output / "provenance.json", provenance("quantize", origin, conversion.decisive, **more))
    card.write_configs(conversion)


@dataclass(frozen=True, kw_only=True)
class LinearErrors:
    """Of one class of linears: how far the dequantized weights are from the source's, relative to their norm."""

    tensors: int
    relative_error: float
    zero_blocks: int


@dataclass(frozen=True, kw_only=True)
class QuantizeSize:
    """What a quantization covers: tensors by what happens to them, bytes read and written. `deviations` name what is
    done otherwise than the policy's publisher did."""

    output: str
    policy: str
    weight_scales: str
    deviations: list[str]
    quantized: int
    decoded: int
    copied: int
    bytes_in: int
    bytes_out: int


@dataclass(frozen=True, kw_only=True)
class Quantized(QuantizeSize):
    """What was written; `classes` by kind of linear. `problems` of the source, by inspect and by what was read."""

    classes: dict[str, LinearErrors]
    problems: list[Problem]
    seconds: float = 0.0
    peak_rss_bytes: int = 0
    shards_resumed: int = 0


@dataclass(frozen=True, kw_only=True)
class QuantizePlan(QuantizeSize):
    """What a run would write, and whether it would resume an earlier one; nothing was written. `published` is the
    checkpoint that the policy was read from; `hub`: id, revision and bytes read of a source whose headers were read
    there."""

    published: str
    tensors_by_class: dict[str, int]
    exclude_modules: list[str]
    workers: int
    packing_seconds_estimate: float
    free_bytes: int
    device: str = "cpu"
    resumes: bool = False
    hub: dict[str, Any] | None = None
    dry_run: bool = True


def to_json(result: Quantized | QuantizePlan) -> dict[str, Any]:
    """The object of `--json`; `hub` only where the source was read there."""
    values = {key: value for key, value in asdict(result).items() if key != "hub" or value is not None}
    return {key: value for key, value in values.items() if key != "problems"}


def _size(conversion: Conversion) -> dict[str, Any]:
    """The fields of QuantizeSize."""
    actions = [weight.action for plan in conversion.plans for weight in plan.weights]
    return {
        "output": str(conversion.output),
        "policy": conversion.policy.name,
        "weight_scales": conversion.weight_scales,
        "deviations": conversion.deviations,
        "quantized": actions.count("quantize"),
        "decoded": actions.count("decode"),
        "copied": actions.count("copy"),
        "bytes_in": conversion.bytes_in,
        "bytes_out": conversion.bytes_out,
    }


def _summary(conversion: Conversion, records: dict[str, Record]) -> Quantized:
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
    known = [one for one in conversion.problems if one.code != ZERO]
    problems = known + content_problems(_found(conversion, records))
    return Quantized(**_size(conversion), classes=summary, problems=problems)


def _found(conversion: Conversion, records: dict[str, Record]) -> Found:
    """What the shards' records say of the source's content, and the matrices that are there twice."""
    found = [(code, name) for record in records.values() for code, name in record["found"]]
    zeros, digests = {name for code, name in found if code == ZERO}, []
    for plan in conversion.plans:
        for group, digest in zip(plan.groups, records[plan.shard]["read"], strict=True):
            part = group.weights[0].parts[0]
            if len(part.shape) == 2 and part.nbytes >= REPEATED and part.name not in zeros:
                digests.append((part.name, digest))
    return found + repeated(digests)


def _estimate(conversion: Conversion, resumes: bool) -> QuantizePlan:
    """Sizes, counts and an estimate of the time; writes nothing."""
    options, hub = conversion.options, conversion.checkpoint.remote
    threads = 1 if options.by_modelopt else thread_count(options.workers, conversion.plans)
    quantized = [weight for plan in conversion.plans for weight in plan.weights if weight.action == "quantize"]
    elements = sum(weight.shape[0] * weight.shape[1] for weight in quantized)
    return QuantizePlan(
        **_size(conversion),
        published=conversion.policy.published_as,
        tensors_by_class=class_counts(quantized),
        exclude_modules=conversion.policy.exclude_patterns(conversion.spec),
        workers=threads,
        packing_seconds_estimate=round(seconds_per_element(conversion.weight_scales) * elements / threads, 1),
        free_bytes=machine.free_disk(conversion.output),
        device=options.device,
        resumes=resumes,
        hub=hub.to_dict() if hub else None,
    )
