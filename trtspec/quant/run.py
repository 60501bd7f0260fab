"""`trtspec quantize`: BF16, FP8-block or INT4 Kimi checkpoint -> NVFP4, in bounded memory, resumable; and the records
that it reports, whose fields are the keys of `--json`."""

from __future__ import annotations

import copy
import shlex
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from trtspec import machine
from trtspec.checkpoint.headers import HF_QUANT_NAME, Checkpoint
from trtspec.checkpoint.hub import commit_record, source_name
from trtspec.checkpoint.identity import identity, recorded_hashes
from trtspec.checkpoint.output import WRITTEN, OutputDirectory, carried_names, carry_files
from trtspec.checkpoint.writer import Journal, write_index
from trtspec.data_files import DATA
from trtspec.errors import Problem
from trtspec.formats import NVFP4_BLOCK
from trtspec.quant.content import REPEATED, ZERO, Found, content_problems, repeated
from trtspec.quant.convert import (
    ERROR_ROWS,
    Record,
    choose_packer,
    convert_shards,
    summed,
    thread_count,
    weight_class,
)
from trtspec.quant.plan import Conversion, ConversionOptions, ShardPlan, prepare
from trtspec.quant.policy import KV_CACHES, WEIGHT_SCALES, Policy
from trtspec.report import (
    Bar,
    OutputOptions,
    file_sha256,
    peak_rss,
    provenance,
    write_atomic,
    write_json,
)

# The layout is ModelOpt's, version for version; loaders look for this name. provenance.json says who wrote the file.
PRODUCER = {"name": "modelopt", "version": "0.47.0"}


def quantize_checkpoint(
    source: Path | Checkpoint,
    output: Path,
    policy: Policy | None,
    options: ConversionOptions = ConversionOptions(),
    again: OutputOptions = OutputOptions(),
    bar: Bar = Bar(),
) -> Quantized | QuantizePlan:
    """Converts `source` to `output`; with `again.dry_run` it only says what it would do.

    Run again after a kill it continues: shards are kept whose checksum is in the journal, and whose sources have the
    times at which they were read.
    `bar` shows the source bytes that are done. Raises TrtspecError or UsageError before the first byte for
    everything that headers, options, disk and permissions can tell.
    """
    start = time.monotonic()
    conversion = prepare(source, output, policy, options)
    names = frozenset(
        (*conversion.checkpoint.shards, *WRITTEN, *carried_names(conversion.checkpoint.path))
    )
    directory = OutputDirectory(output, "quantize", names, conversion.bytes_out)
    # a missing device or package is reported before anything is written
    choose_packer(conversion.weight_scales, options.device, options.by_modelopt)
    if again.dry_run:
        resumes = directory.check(again)
        if resumes:
            directory.refuse_other(_header(conversion))
        return _estimate(conversion, resumes)
    header = _header(conversion)
    with directory.claim(header, again) as journal:
        kept = _kept(conversion, journal)
        todo = [plan for plan in conversion.plans if plan.shard not in kept]
        bar.show(conversion.bytes_in - sum(plan.bytes_in for plan in todo), conversion.bytes_in)
        threads, hashes = (
            thread_count(options.workers, todo),
            recorded_hashes(conversion.checkpoint.path),
        )
        for plan, record in convert_shards(conversion, todo, threads, hashes, bar):
            journal.record(plan.shard, **record)
        records: dict[str, Record] = {
            plan.shard: journal.done[plan.shard] for plan in conversion.plans
        }
        result = _summary(conversion, records)
        _finish(conversion, records, result, header)
    seconds = round(time.monotonic() - start, 3)
    return replace(result, seconds=seconds, peak_rss_bytes=peak_rss(), shards_resumed=len(kept))


def _header(conversion: Conversion) -> dict[str, Any]:
    """What the journal is begun with: all that decides the bytes."""
    checkpoint = conversion.checkpoint
    source = identity(checkpoint) | commit_record(checkpoint.path)
    return {"source": source, "options": conversion.decisive}


def _kept(conversion: Conversion, journal: Journal) -> set[str]:
    """Shards that need no work: recorded, present, of the recorded content, their source not written since."""

    def is_whole(plan: ShardPlan) -> bool:
        record, path = journal.done.get(plan.shard), conversion.output / plan.shard
        if record is None or record.get("times") != plan.source_times(conversion.checkpoint.path):
            return False
        return path.is_file() and file_sha256(path) == record["sha256"]

    with ThreadPoolExecutor(machine.cores()) as pool:
        whole = pool.map(is_whole, conversion.plans)
        return {plan.shard for plan, kept in zip(conversion.plans, whole, strict=True) if kept}


def _finish(
    conversion: Conversion, records: dict[str, Record], result: Quantized, header: dict[str, Any]
) -> None:
    """Index, carried files, card, provenance, then the configs that make the directory a checkpoint."""
    output, source = conversion.output, conversion.checkpoint.path
    if list(records) != ["model.safetensors"]:
        weight_map = {name: plan.shard for plan in conversion.plans for name in plan.layout()}
        write_index(output, weight_map, conversion.bytes_out)
    carried = carried_names(source)
    carry_files(source, output, carried)
    found = content_problems(_found(conversion, records))
    write_atomic(output / "README.md", _model_card(conversion, result, found))
    origin, shards = (
        {"path": str(source), **header["source"]},
        {shard: records[shard]["sha256"] for shard in records},
    )
    made = {"shards": shards, "carried": carried, "classes": asdict(result)["classes"]}
    made["problems"] = [one.to_dict() for one in found]
    write_json(
        output / "provenance.json", provenance("quantize", origin, conversion.decisive, **made)
    )
    _write_configs(conversion)


def _write_configs(conversion: Conversion) -> None:
    """hf_quant_config.json, which TensorRT-LLM reads first, then the source's config.json with its own quantization
    removed, also inside text_config, and ours on top.

    config.json comes last: a directory without it is no checkpoint to any loader.
    """
    exclude, kv_cache = (
        conversion.policy.exclude_patterns(conversion.spec),
        conversion.options.kv_cache,
    )
    quantization = {
        "quant_algo": "NVFP4",
        "kv_cache_quant_algo": "FP8" if kv_cache else None,  # the scale-free cast: no scale tensors
        "group_size": NVFP4_BLOCK,
        "exclude_modules": exclude,
    }
    numbers = {"dynamic": False, "num_bits": 4, "type": "float", "group_size": NVFP4_BLOCK}
    group = {"input_activations": numbers, "weights": dict(numbers), "targets": ["Linear"]}
    block: dict[str, Any] = {
        "config_groups": {"group_0": group},
        "ignore": exclude,
        "quant_algo": "NVFP4",
    }
    if kv_cache:
        block["kv_cache_scheme"] = {"dynamic": False, "num_bits": 8, "type": "float"}
    config = copy.deepcopy(conversion.checkpoint.config)
    config.pop("quantization_config", None)
    if isinstance(config.get("text_config"), dict):
        config["text_config"].pop("quantization_config", None)
    config["quantization_config"] = block | {"producer": PRODUCER, "quant_method": "modelopt"}
    write_json(
        conversion.output / HF_QUANT_NAME, {"producer": PRODUCER, "quantization": quantization}
    )
    write_json(conversion.output / "config.json", config)


def _model_card(conversion: Conversion, result: Quantized, found: list[Problem]) -> str:
    """README.md of the output, with what is wrong with the bytes of the source (`found`); nothing in it depends on
    when or how fast the conversion ran."""
    policy, name = conversion.policy, source_name(conversion.checkpoint.path)
    rows = [
        f"| {name} | {one.tensors:,} | {one.relative_error:.4f} | {one.zero_blocks:,} |"
        for name, one in sorted(result.classes.items())
    ]
    lines = [f"- {one.message} (`{one.code}`)\n" for one in found]
    published = [f"- the policy is that of {policy.source}"]
    if policy.recipe:
        published.append(f"- recipe of ModelOpt: `modelopt_recipes/{policy.recipe}.yaml`")
    if policy.modelopt:
        same = ", ".join(policy.modelopt)
        published.append(f"- the bytes equal those of ModelOpt's export for the same amax: {same}")
    published += [f"- **otherwise than published**: {text}" for text in result.deviations]
    template = (DATA / "nvfp4_card.md").read_text(encoding="utf-8")
    return template.format(
        base=name,
        title=name.rpartition("/")[2],
        output=shlex.quote(conversion.output.name),
        spec=conversion.spec,
        format=conversion.spec.quant.format.upper(),
        policy=policy,
        published="\n".join(published),
        kv=KV_CACHES[conversion.options.kv_cache or "none"],
        scales=conversion.scales,
        weight_scales=WEIGHT_SCALES[conversion.weight_scales],
        result=result,
        rows=ERROR_ROWS,
        errors="\n".join(rows),
        found="\n## Found in the source\n\n" + "".join(lines) if lines else "",
    )


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
    """What a run would write, and whether it would resume an earlier one; nothing was written. `hub`: id, revision and
    bytes read of a source whose headers were read there."""

    tensors_by_class: dict[str, int]
    exclude_modules: list[str]
    workers: int
    free_bytes: int
    resumes: bool
    hub: dict[str, Any] | None
    dry_run: bool = True


def to_json(result: Quantized | QuantizePlan) -> dict[str, Any]:
    """The object of `--json`; `hub` only where the source was read there."""
    return {
        key: value
        for key, value in asdict(result).items()
        if key != "problems" and value is not None
    }


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
    classes = summed(entry for record in records.values() for entry in record["classes"].items())
    summary = {
        name: LinearErrors(
            tensors=int(entry["tensors"]),
            relative_error=round(
                (entry["error"] / entry["norm"]) ** 0.5 if entry["norm"] else 0.0, 6
            ),
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
        converted = [weight for group in plan.groups for weight in group.weights]
        for weight, digest in zip(converted, records[plan.shard]["read"], strict=True):
            part = weight.parts[0]
            if len(part.shape) == 2 and part.nbytes >= REPEATED and part.name not in zeros:
                digests.append((part.name, digest))
    return found + repeated(digests)


def _estimate(conversion: Conversion, resumes: bool) -> QuantizePlan:
    """Sizes and counts; writes nothing."""
    options, hub = conversion.options, conversion.checkpoint.remote
    weights = (weight for plan in conversion.plans for weight in plan.weights)
    classes = Counter(
        weight_class(weight.name) for weight in weights if weight.action == "quantize"
    )
    return QuantizePlan(
        **_size(conversion),
        tensors_by_class=dict(sorted(classes.items())),
        exclude_modules=conversion.policy.exclude_patterns(conversion.spec),
        workers=thread_count(options.workers, conversion.plans),
        free_bytes=machine.free_disk(conversion.output),
        resumes=resumes,
        hub=hub.to_dict() if hub else None,
    )
