"""`trtspec quantize`: a BF16, FP8-block or INT4 Kimi checkpoint -> NVFP4, and what it reports.

It takes bounded memory and can be resumed. The fields of its results are the keys of `--json`.
"""

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
from trtspec.quant.content import (
    ALL_ZERO,
    MIN_REPEATED_BYTES,
    Findings,
    content_problems,
    repeated,
)
from trtspec.quant.conversion_plan import Conversion, ConversionOptions, ShardPlan, Weight, prepare
from trtspec.quant.policy import KV_CACHES, WEIGHT_SCALES, Policy
from trtspec.quant.shards import (
    ERROR_ROWS,
    Errors,
    Record,
    choose_packer,
    convert_shards,
    summed,
    thread_count,
    weight_class,
)
from trtspec.report import (
    OutputOptions,
    ProgressBar,
    file_sha256,
    peak_rss,
    provenance,
    write_atomic,
    write_json,
)

# The layout is ModelOpt's, version for version, and loaders look for this name. provenance.json
# says who wrote the file.
PRODUCER = {"name": "modelopt", "version": "0.47.0"}


def quantize_checkpoint(
    source: Path | Checkpoint,
    output: Path,
    policy: Policy | None,
    options: ConversionOptions = ConversionOptions(),
    output_options: OutputOptions = OutputOptions(),
    bar: ProgressBar = ProgressBar(),
) -> Quantized | QuantizePlan:
    """Converts `source` to `output`. A dry run returns a QuantizePlan and writes nothing.

    After a kill the same call resumes. It keeps shards whose checksum is in the journal and whose
    sources were not written since. Raises TrtspecError or UsageError before the first byte for
    everything that headers, options, disk and permissions show.

    Args:
        policy: None for the policy of the source's release.
        bar: shows the source bytes that are done.
    """
    start = time.monotonic()
    conversion = prepare(source, output, policy, options)
    checkpoint = conversion.checkpoint
    names = (*checkpoint.shards, *WRITTEN, *carried_names(checkpoint.path))
    directory = OutputDirectory(output, "quantize", frozenset(names), conversion.bytes_out)
    # A missing device or package is reported before anything is written.
    choose_packer(conversion.weight_scales, options.device, options.by_modelopt)
    if output_options.dry_run:
        resumes = directory.check(output_options)
        if resumes:
            directory.refuse_other(_header(conversion))
        return _estimate(conversion, resumes)
    header = _header(conversion)
    with directory.claim(header, output_options) as journal:
        kept = _kept_shards(conversion, journal)
        remaining = [plan for plan in conversion.plans if plan.shard not in kept]
        remaining_bytes = sum(plan.bytes_in for plan in remaining)
        bar.show(conversion.bytes_in - remaining_bytes, conversion.bytes_in)
        threads = thread_count(options.workers, remaining)
        hashes = recorded_hashes(checkpoint.path)
        for plan, record in convert_shards(conversion, remaining, threads, hashes, bar):
            journal.record(plan.shard, **record)
        records: dict[str, Record] = {
            plan.shard: journal.done[plan.shard] for plan in conversion.plans
        }
        result = _summary(conversion, records)
        _finish(conversion, records, result, header)
    seconds = round(time.monotonic() - start, 3)
    return replace(result, seconds=seconds, peak_rss_bytes=peak_rss(), shards_resumed=len(kept))


@dataclass(frozen=True, kw_only=True)
class QuantizeSize:
    """The size of a quantization: counts of tensors by action, bytes read and written.

    `deviations`: a sentence for each difference from what the policy's publisher did.
    """

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
class LinearErrors:
    """Rounding error of one class of linears, relative to the norm of the source's weights."""

    tensors: int
    relative_error: float
    zero_blocks: int


@dataclass(frozen=True, kw_only=True)
class Quantized(QuantizeSize):
    """A finished quantization.

    `classes`: rounding error by class of linear. `problems`: of the source, from its headers and
    from the bytes that were read.
    """

    classes: dict[str, LinearErrors]
    problems: list[Problem]
    seconds: float = 0.0
    peak_rss_bytes: int = 0
    shards_resumed: int = 0


@dataclass(frozen=True, kw_only=True)
class QuantizePlan(QuantizeSize):
    """A run that is not started: its output, and whether it would resume an earlier run.

    `hub`: id, revision and bytes read of a source whose headers were read from the hub.
    """

    tensors_by_class: dict[str, int]
    exclude_modules: list[str]
    workers: int
    free_bytes: int
    resumes: bool
    hub: dict[str, Any] | None
    dry_run: bool = True


def to_json(result: Quantized | QuantizePlan) -> dict[str, Any]:
    """The object of `--json`. `hub` is left out if it is None."""
    values = asdict(result)
    values.pop("problems", None)
    return {key: value for key, value in values.items() if value is not None}


def _header(conversion: Conversion) -> dict[str, Any]:
    """The journal's header: everything that decides the bytes."""
    checkpoint = conversion.checkpoint
    source = identity(checkpoint) | commit_record(checkpoint.path)
    return {"source": source, "options": conversion.decisive_options}


def _kept_shards(conversion: Conversion, journal: Journal) -> set[str]:
    """Shards that need no work.

    Such a shard is recorded, has the recorded content, and its sources were not written since.
    """

    def is_whole(plan: ShardPlan) -> bool:
        record = journal.done.get(plan.shard)
        if record is None or record.get("times") != plan.source_times(conversion.checkpoint.path):
            return False
        path = conversion.output / plan.shard
        return path.is_file() and file_sha256(path) == record["sha256"]

    with ThreadPoolExecutor(machine.cores()) as pool:
        whole = pool.map(is_whole, conversion.plans)
        return {plan.shard for plan, kept in zip(conversion.plans, whole, strict=True) if kept}


def _summary(conversion: Conversion, records: dict[str, Record]) -> Quantized:
    """The counts and errors of all shards, from their journal records."""
    entries = list[tuple[str, Errors]]()
    for record in records.values():
        entries += record["classes"].items()
    classes = {}
    for name, total in sorted(summed(entries).items()):
        relative_error = 0.0
        if total["norm"]:
            relative_error = (total["error"] / total["norm"]) ** 0.5
        classes[name] = LinearErrors(
            tensors=int(total["tensors"]),
            relative_error=round(relative_error, 6),
            zero_blocks=int(total["zero_blocks"]),
        )
    # The pass over all bytes reports zero tensors itself.
    known = [problem for problem in conversion.problems if problem.code != ALL_ZERO]
    problems = known + content_problems(_findings(conversion, records))
    return Quantized(**_size(conversion), classes=classes, problems=problems)


def _findings(conversion: Conversion, records: dict[str, Record]) -> Findings:
    """Findings of all shards' records, and matrices with the same bytes as another."""
    findings = Findings()
    for record in records.values():
        findings += [(code, name) for code, name in record["found"]]
    zeros = {name for code, name in findings if code == ALL_ZERO}
    digests = []
    for plan in conversion.plans:
        weights = list[Weight]()
        for group in plan.groups:
            weights += group.weights
        for weight, digest in zip(weights, records[plan.shard]["read"], strict=True):
            part = weight.parts[0]
            is_matrix = len(part.shape) == 2 and part.nbytes >= MIN_REPEATED_BYTES
            if is_matrix and part.name not in zeros:
                digests.append((part.name, digest))
    return findings + repeated(digests)


def _size(conversion: Conversion) -> dict[str, Any]:
    """The fields of QuantizeSize."""
    actions = Counter[str]()
    for plan in conversion.plans:
        actions.update(weight.action for weight in plan.weights)
    return {
        "output": str(conversion.output),
        "policy": conversion.policy.name,
        "weight_scales": conversion.weight_scales,
        "deviations": conversion.deviations,
        "quantized": actions["quantize"],
        "decoded": actions["decode"],
        "copied": actions["copy"],
        "bytes_in": conversion.bytes_in,
        "bytes_out": conversion.bytes_out,
    }


def _estimate(conversion: Conversion, resumes: bool) -> QuantizePlan:
    """The result of a dry run."""
    classes = Counter[str]()
    for plan in conversion.plans:
        quantized = [weight for weight in plan.weights if weight.action == "quantize"]
        classes.update(weight_class(weight.name) for weight in quantized)
    hub = conversion.checkpoint.remote
    return QuantizePlan(
        **_size(conversion),
        tensors_by_class=dict(sorted(classes.items())),
        exclude_modules=conversion.policy.exclude_patterns(conversion.spec),
        workers=thread_count(conversion.options.workers, conversion.plans),
        free_bytes=machine.free_disk(conversion.output),
        resumes=resumes,
        hub=hub.to_dict() if hub else None,
    )


def _finish(
    conversion: Conversion, records: dict[str, Record], result: Quantized, header: dict[str, Any]
) -> None:
    """Writes index, carried files, card and provenance, then the configs.

    The configs make the directory a checkpoint, so they come last.
    """
    output = conversion.output
    source = conversion.checkpoint.path
    if list(records) != ["model.safetensors"]:
        weight_map: dict[str, str] = {}
        for plan in conversion.plans:
            weight_map |= dict.fromkeys(plan.layout(), plan.shard)
        write_index(output, weight_map, conversion.bytes_out)
    carried = carried_names(source)
    carry_files(source, output, carried)
    problems = content_problems(_findings(conversion, records))
    write_atomic(output / "README.md", _model_card(conversion, result, problems))
    origin = {"path": str(source), **header["source"]}
    contents = {
        "shards": {shard: record["sha256"] for shard, record in records.items()},
        "carried": carried,
        "classes": asdict(result)["classes"],
        "problems": [problem.to_dict() for problem in problems],
    }
    statement = provenance("quantize", origin, conversion.decisive_options, **contents)
    write_json(output / "provenance.json", statement)
    _write_configs(conversion)


def _write_configs(conversion: Conversion) -> None:
    """Writes hf_quant_config.json, which TensorRT-LLM reads first, then config.json.

    config.json is the source's with our quantization in place of its own, also of that inside
    text_config. It comes last: without it a directory is no checkpoint to any loader.
    """
    exclude = conversion.policy.exclude_patterns(conversion.spec)
    kv_cache = conversion.options.kv_cache
    quantization = {
        "quant_algo": "NVFP4",
        "kv_cache_quant_algo": "FP8" if kv_cache else None,  # the scale-free cast: no scale tensors
        "group_size": NVFP4_BLOCK,
        "exclude_modules": exclude,
    }
    numbers = {"dynamic": False, "num_bits": 4, "type": "float", "group_size": NVFP4_BLOCK}
    group = {"input_activations": numbers, "weights": dict(numbers), "targets": ["Linear"]}
    quantization_config: dict[str, Any] = {
        "config_groups": {"group_0": group},
        "ignore": exclude,
        "quant_algo": "NVFP4",
    }
    if kv_cache:
        kv_cache_scheme = {"dynamic": False, "num_bits": 8, "type": "float"}
        quantization_config["kv_cache_scheme"] = kv_cache_scheme
    quantization_config |= {"producer": PRODUCER, "quant_method": "modelopt"}
    config = copy.deepcopy(conversion.checkpoint.config)
    config.pop("quantization_config", None)
    text_config = config.get("text_config")
    if isinstance(text_config, dict):
        text_config.pop("quantization_config", None)
    config["quantization_config"] = quantization_config
    hf_quant_config = {"producer": PRODUCER, "quantization": quantization}
    write_json(conversion.output / HF_QUANT_NAME, hf_quant_config)
    write_json(conversion.output / "config.json", config)


def _model_card(conversion: Conversion, result: Quantized, problems: list[Problem]) -> str:
    """README.md of the output, with the `problems` of the source's bytes.

    It does not depend on when or how fast the conversion ran.
    """
    policy = conversion.policy
    name = source_name(conversion.checkpoint.path)
    rows = []
    for linears, errors in sorted(result.classes.items()):
        figures = f"{errors.tensors:,} | {errors.relative_error:.4f} | {errors.zero_blocks:,}"
        rows.append(f"| {linears} | {figures} |")
    published = [f"- the policy is that of {policy.source}"]
    if policy.recipe:
        published.append(f"- recipe of ModelOpt: `modelopt_recipes/{policy.recipe}.yaml`")
    if policy.modelopt:
        releases = ", ".join(policy.modelopt)
        text = f"- the bytes equal those of ModelOpt's export for the same amax: {releases}"
        published.append(text)
    published += [f"- **otherwise than published**: {text}" for text in result.deviations]
    section = ""
    if problems:
        lines = [f"- {problem.message} (`{problem.code}`)\n" for problem in problems]
        section = "\n## Found in the source\n\n" + "".join(lines)
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
        found=section,
    )
