"""`trtspec quantize`: converts a BF16, FP8-block or INT4 Kimi checkpoint to NVFP4.

A quantization needs bounded memory and can be resumed. The fields of its results are the keys of
`--json`.
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

# The files have the layout of this ModelOpt version, and loaders look for this name. The true
# producer is recorded in provenance.json.
PRODUCER = {"name": "modelopt", "version": "0.47.0"}


def quantize_checkpoint(
    source: Path | Checkpoint,
    output: Path,
    policy: Policy | None,
    options: ConversionOptions = ConversionOptions(),
    output_options: OutputOptions = OutputOptions(),
    bar: ProgressBar = ProgressBar(),
) -> Quantized | QuantizePlan:
    """Converts a checkpoint to NVFP4. A dry run returns a QuantizePlan and writes nothing.

    If a call was interrupted, the same call resumes. It keeps finished shards whose checksum is in
    the journal and whose source files did not change. Headers, options, disk space and permissions
    are checked before the first byte is written. Raises TrtspecError or UsageError if one is wrong.

    Args:
        source: directory of the source, or an opened checkpoint.
        output: directory to write.
        policy: linears to quantize, and their scales. None: the policy of the source's release.
        options: options of the conversion.
        output_options: options of the output directory, such as a dry run.
        bar: progress bar, which shows the number of converted source bytes.
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
    """Properties and sizes that a finished quantization and a dry run both report.

    output: path of the output directory.
    policy: name of the policy.
    weight_scales: rule for the block scales, a key of WEIGHT_SCALES.
    deviations: one sentence for each difference from what the policy's publisher did.
    quantized: number of tensors that become NVFP4.
    decoded: number of quantized tensors that become BF16.
    copied: number of tensors that stay unchanged.
    bytes_in: number of bytes of the source's tensors.
    bytes_out: number of bytes of the output's tensors.
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
    """Rounding error of one class of linears.

    tensors: number of linears.
    relative_error: norm of the differences over norm of the source, in the measured rows.
    zero_blocks: number of NVFP4 blocks that are entirely zero.
    """

    tensors: int
    relative_error: float
    zero_blocks: int


@dataclass(frozen=True, kw_only=True)
class Quantized(QuantizeSize):
    """Result of a finished quantization.

    classes: rounding error by class of linear.
    problems: problems of the source, found in its headers and in its bytes.
    seconds: duration in seconds.
    peak_rss_bytes: largest resident memory of the process in bytes.
    shards_resumed: number of shards that an earlier run had finished.
    """

    classes: dict[str, LinearErrors]
    problems: list[Problem]
    seconds: float = 0.0
    peak_rss_bytes: int = 0
    shards_resumed: int = 0


@dataclass(frozen=True, kw_only=True)
class QuantizePlan(QuantizeSize):
    """Result of a dry run: what a quantization would do.

    tensors_by_class: number of tensors that become NVFP4, by class of linear.
    exclude_modules: ignore list for the output's configs.
    workers: number of threads.
    free_bytes: free disk space for the output in bytes.
    resumes: whether the call would resume an earlier one.
    hub: id, revision and bytes read if the headers came from the hub. None for a local source.
    """

    tensors_by_class: dict[str, int]
    exclude_modules: list[str]
    workers: int
    free_bytes: int
    resumes: bool
    hub: dict[str, Any] | None
    dry_run: bool = True


def to_json(result: Quantized | QuantizePlan) -> dict[str, Any]:
    """Returns the object for `--json`, without fields that are None.

    The problems are left out, because the command reports them separately.
    """
    values = asdict(result)
    values.pop("problems", None)
    return {key: value for key, value in values.items() if value is not None}


def _header(conversion: Conversion) -> dict[str, Any]:
    """Returns the journal's header: source and options, which together decide the output's bytes.

    A run resumes an earlier run only if the headers are equal.
    """
    checkpoint = conversion.checkpoint
    source = identity(checkpoint) | commit_record(checkpoint.path)
    return {"source": source, "options": conversion.decisive_options}


def _kept_shards(conversion: Conversion, journal: Journal) -> set[str]:
    """Returns the names of the shards that an earlier run finished.

    Such a shard is in the journal, has the recorded SHA-256, and its sources were not written
    since.
    """

    def is_finished(plan: ShardPlan) -> bool:
        record = journal.done.get(plan.shard)
        if record is None or record.get("times") != plan.source_times(conversion.checkpoint.path):
            return False
        path = conversion.output / plan.shard
        return path.is_file() and file_sha256(path) == record["sha256"]

    # Threads, because hashing large files takes long.
    with ThreadPoolExecutor(machine.cores()) as pool:
        finished = pool.map(is_finished, conversion.plans)
        return {plan.shard for plan, kept in zip(conversion.plans, finished, strict=True) if kept}


def _summary(conversion: Conversion, records: dict[str, Record]) -> Quantized:
    """Returns the result of all shards, from their journal records by shard name."""
    entries = list[tuple[str, Errors]]()
    for record in records.values():
        entries += record["classes"].items()
    classes = {}
    for name, total in sorted(summed(entries).items()):
        relative_error = 0.0
        # Both sums are squared. The norm is 0 if all weights of the class are zero.
        if total["norm"]:
            relative_error = (total["error"] / total["norm"]) ** 0.5
        classes[name] = LinearErrors(
            tensors=int(total["tensors"]),
            relative_error=round(relative_error, 6),
            zero_blocks=int(total["zero_blocks"]),
        )
    # The headers' check samples tensors for zeros. The conversion saw all bytes and reports zero
    # tensors itself.
    known = [problem for problem in conversion.problems if problem.code != ALL_ZERO]
    problems = known + content_problems(_findings(conversion, records))
    return Quantized(**_size(conversion), classes=classes, problems=problems)


def _findings(conversion: Conversion, records: dict[str, Record]) -> Findings:
    """Returns the findings in all shards' records, and findings of matrices with equal bytes."""
    findings = Findings()
    for record in records.values():
        # The journal's JSON has lists. Findings are tuples.
        findings += [(code, name) for code, name in record["found"]]
    zeros = {name for code, name in findings if code == ALL_ZERO}
    digests = []
    for plan in conversion.plans:
        # A record has one digest per weight, in the order of the groups.
        weights = list[Weight]()
        for group in plan.groups:
            weights += group.weights
        for weight, digest in zip(weights, records[plan.shard]["read"], strict=True):
            part = weight.parts[0]
            # Small tensors and zero tensors may be equal without a fault.
            is_large_matrix = len(part.shape) == 2 and part.nbytes >= MIN_REPEATED_BYTES
            if is_large_matrix and part.name not in zeros:
                digests.append((part.name, digest))
    return findings + repeated(digests)


def _size(conversion: Conversion) -> dict[str, Any]:
    """Returns the values of QuantizeSize's fields, by name."""
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
    """Returns the result of a dry run. `resumes`: whether the call would resume an earlier one."""
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
    """Writes index, carried files, model card and provenance, and last the configs.

    Loaders need the configs, so an interrupted run leaves no directory that looks complete.

    Args:
        conversion: the conversion.
        records: journal record by shard.
        result: counts and errors for the model card.
        header: the journal's header.
    """
    output = conversion.output
    source = conversion.checkpoint.path
    # A checkpoint in a single file needs no index.
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
    """Writes hf_quant_config.json, which TensorRT-LLM reads first, and last config.json.

    config.json is the source's file with a new `quantization_config`. The source's own is removed,
    also inside text_config.
    """
    exclude = conversion.policy.exclude_patterns(conversion.spec)
    kv_cache = conversion.options.kv_cache
    quantization = {
        "quant_algo": "NVFP4",
        # FP8 without scale tensors is a plain cast.
        "kv_cache_quant_algo": "FP8" if kv_cache else None,
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
    """Returns the text of the output's README.md.

    The text has no times, so that equal conversions write equal files.

    Args:
        conversion: the conversion.
        result: counts and rounding errors.
        problems: problems of the source's bytes.
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
