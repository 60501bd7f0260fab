"""Makes the report of `trtspec inspect`: type, size, storage and problems of a checkpoint.

A directory is read, and if the user asks for it, the SHA-256 of every weight file is compared with
the recorded one. A checkpoint on the hub is read by its headers (remote.py).
"""

from __future__ import annotations

from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from trtspec import machine
from trtspec.checkpoint.headers import RangedFiles
from trtspec.checkpoint.heads.read import head_facts, no_eagle3_head, read_head
from trtspec.checkpoint.heads.shapes import canonical_names
from trtspec.checkpoint.hub import Resolved
from trtspec.checkpoint.identity import recorded_hashes
from trtspec.checkpoint.published import PublishedHead, PublishedTarget
from trtspec.checkpoint.remote import is_online
from trtspec.checkpoint.remote_code import RemoteCode, read_code
from trtspec.checkpoint.target_problems import detect
from trtspec.checkpoint.target_tensors import finding, grouped, parameters_per_element
from trtspec.checkpoint.values import head_value_problems
from trtspec.errors import Problem, UsageError
from trtspec.report import file_sha256
from trtspec.specs import HeadSpec, ModelSpec

# keys of JSON reports that are null for a draft that is not an Eagle3 head
HEAD_KEYS = (
    "family",
    "model_type",
    "architecture",
    "format",
    "eagle",
    "attention",
    "dialect",
    "aux_layers",
    "draft_vocab_size",
)


def describe(
    resolved: Resolved, *, all_values: bool = False, sample: int | None = None, hashes: bool = False
) -> CheckpointReport:
    """Returns the report of a checkpoint.

    A checkpoint on this machine is read. A published checkpoint is otherwise answered from
    data/models.yaml, and any other id from its headers on the hub. Raises UsageError if `sample` or
    `hashes` is given and the weights are not on this machine.

    Args:
        all_values: whether the tensors of a head are read entirely instead of sampled.
        sample: number of large tensors of a target that are read besides the small ones. 0: all.
            None: none.
        hashes: whether every byte is read and compared with the recorded SHA-256.
    """
    if resolved.weights is not None:
        report = _from_checkpoint(resolved, all_values, sample)
        if hashes:
            shards = resolved.checkpoint.shards
            verified, problems = hash_problems(resolved.weights, shards)
            return replace(report, hashes_verified=verified, problems=report.problems + problems)
        return report
    if hashes or sample is not None:
        message = f"{resolved.name} is not on this machine, so its bytes cannot be read"
        raise UsageError(message, f"{resolved.fetch}, or leave `sample` and `hashes` out")
    if resolved.hub_id is not None and resolved.known is None and is_online():
        report = _from_checkpoint(resolved)
        remedy = f"{resolved.fetch}, then inspect again"
        unseen = finding("TS-HUB-HEADERS-ONLY", str(resolved.hub_id), "info", remedy=remedy)
        return replace(report, hub=resolved.checkpoint.remote, problems=[*report.problems, unseen])
    return _from_config(resolved)


@dataclass(frozen=True, kw_only=True)
class CheckpointReport:
    """Report of a checkpoint.

    path: directory. None if no files are on this machine.
    source: origin of the facts.
    spec: record of the target or head. None for a draft that is not an Eagle3 head, or if the
        config is not known.
    known: record of a published checkpoint. None if the id is not listed.
    parameters: number of parameters. None if it is not known.
    bytes: bytes of all tensors. None if they are not known.
    shards: number of weight files. None if it is not known.
    dtypes: bytes of tensors by safetensors dtype. None if the tensors were not read.
    code: Python code that the checkpoint brings.
    hashes_verified: number of files with the recorded SHA-256. None if they were not compared.
    hub: weight files on the hub. None if the weights were not read from the hub.
    """

    path: str | None
    source: Literal["files", "hub", "catalogue", "config.json"]
    spec: ModelSpec | HeadSpec | None
    config: dict[str, Any] = field(repr=False)
    known: PublishedTarget | PublishedHead | None = field(repr=False)
    parameters: int | None
    bytes: int | None
    shards: int | None
    dtypes: dict[str, int] | None
    code: RemoteCode
    problems: list[Problem] = field(repr=False)
    hashes_verified: int | None = None
    hub: RangedFiles | None = None

    @property
    def kind(self) -> Literal["target", "head"]:
        """Type of the checkpoint."""
        return "target" if isinstance(self.spec, ModelSpec) else "head"

    def to_dict(self) -> dict[str, Any]:
        """Returns the JSON object of `trtspec inspect --json`.

        It is flat and leaves out keys that do not apply.
        """
        names = ("kind", "path", "source", "parameters", "bytes", "shards", "dtypes")
        facts: dict[str, Any] = {name: getattr(self, name) for name in names}
        if isinstance(self.spec, ModelSpec):
            facts.update(target_facts(self.spec, self.config))
        elif self.spec:
            facts.update(head_facts(self.spec, self.config))
        else:
            facts.update(dict.fromkeys(HEAD_KEYS))
        if self.known is not None:
            facts.update(published_facts(self.known))
            if self.source == "catalogue":
                facts["unverified"] = self.known.unverified
        facts["remote_code"] = bool(self.code)
        facts["problems"] = [problem.to_dict() for problem in self.problems]
        optional = {
            "code_files": self.code.hashes() or None,
            "hashes_verified": self.hashes_verified,
            "hub": self.hub.to_dict() if self.hub else None,
        }
        stated = {name: value for name, value in optional.items() if value is not None}
        return facts | stated


def _from_checkpoint(
    resolved: Resolved, all_values: bool = False, sample: int | None = None
) -> CheckpointReport:
    """Returns the report of a checkpoint that is read, from its files or the hub.

    Values are checked only if the weights are on this machine.
    """
    checkpoint = resolved.checkpoint
    spec, problems = _spec_and_problems(resolved, all_values, sample)
    parameters = 0
    sizes: Counter[str] = Counter()
    for info in checkpoint.tensors.values():
        suffix = info.name.rpartition(".")[2]
        parameters += info.numel * parameters_per_element(suffix, info.dtype)
        sizes[info.dtype] += info.nbytes
    return CheckpointReport(
        path=str(resolved.path),
        source="hub" if checkpoint.remote else "files",
        spec=spec,
        config=checkpoint.config,
        known=resolved.known,
        parameters=parameters,
        bytes=sizes.total(),
        shards=len(checkpoint.shards),
        dtypes=dict(sizes.most_common()),
        code=read_code(checkpoint.path),
        problems=problems,
    )


def _spec_and_problems(
    resolved: Resolved, all_values: bool, sample: int | None
) -> tuple[ModelSpec | HeadSpec | None, list[Problem]]:
    """Returns the record and the problems of a checkpoint that is read.

    The record is None for a draft that is not an Eagle3 head.
    """
    checkpoint = resolved.checkpoint
    wrong = no_eagle3_head(checkpoint.config, checkpoint.tensors)
    # A full model is a target, which is judged below.
    if wrong is not None and wrong.code != "TS-HEAD-FULL-MODEL":
        return None, [wrong]
    if detect(checkpoint) == "head":
        head, problems = read_head(checkpoint)
        if checkpoint.remote is None:
            tensors = canonical_names(checkpoint.tensors)
            problems += head_value_problems(checkpoint, tensors, everything=all_values)
        return head, problems
    target = resolved.target
    # Imported late, because numpy loads slowly.
    from trtspec.checkpoint.values import target_value_problems

    problems = list(target.problems)
    if checkpoint.remote is None:
        problems += target_value_problems(target, sample)
    return target.spec, problems


def _from_config(resolved: Resolved) -> CheckpointReport:
    """Returns the report of a checkpoint whose weights are not read.

    Sizes come from the published record. A head whose config is not known has no other facts.
    """
    record = resolved.known
    spec: ModelSpec | HeadSpec | None = None
    config: dict[str, Any] = {}
    code = RemoteCode([], [], None)
    unknown = record is not None and record.config is None and resolved.path is None
    if not unknown:
        spec = resolved.head_spec() if resolved.kind == "head" else resolved.target_spec()
        config = resolved.config()
        code = resolved.code()
    sizes = {name: getattr(record, name, None) for name in ("parameters", "bytes", "shards")}
    return CheckpointReport(
        path=str(resolved.path) if resolved.path else None,
        source="catalogue" if record else "config.json",
        spec=spec,
        config=config,
        known=record,
        **sizes,
        dtypes=None,
        code=code,
        problems=[],
    )


def published_facts(record: PublishedTarget | PublishedHead) -> dict[str, Any]:
    """Returns the keys of `inspect --json` that only a published checkpoint has."""
    facts: dict[str, Any] = {
        "released": record.released,
        "licence": record.licence,
        "sources": record.sources,
    }
    if isinstance(record, PublishedTarget):
        return {"family": record.family, "quantized_from": record.base, **facts}
    return {
        "published_for": record.targets,
        "trained_with": record.trained_with,
        **facts,
        "draft_len": record.draft_len,
        "acceptance": [asdict(measured) for measured in record.acceptance],
    }


def target_facts(spec: ModelSpec, config: dict[str, Any]) -> dict[str, Any]:
    """Returns the keys of `inspect --json` that only a target has.

    producer: tool that quantized the target, as it calls itself.
    excluded_patterns: number of patterns of modules that are not quantized.
    """
    quantization = config.get("quantization_config") or {}
    return {
        "family": spec.version,
        "model_type": spec.model_type,
        "architecture": spec.architecture,
        "format": spec.quant.format,
        "kv_cache": spec.quant.kv_cache,
        "layers": spec.num_hidden_layers,
        "vocab_size": spec.vocab_size,
        "max_position_embeddings": spec.max_position_embeddings,
        "eos_token_ids": list(spec.eos_token_ids),
        "vision": spec.has_vision,
        "kv_elements_per_token": spec.kv_elements_per_token,
        "default_aux_layers": list(spec.default_aux_layers),
        "excluded_patterns": len(spec.quant.exclude),
        "producer": quantization.get("producer"),
    }


def hash_problems(directory: Path, shards: tuple[str, ...]) -> tuple[int, list[Problem]]:
    """Reads every byte of the shards and compares their SHA-256 with the recorded one.

    Returns the number of shards with the recorded hash, and problems. Problems are other hashes,
    shards without a record, and recorded files that are missing.
    """
    recorded = recorded_hashes(directory)
    known = [shard for shard in shards if shard in recorded]

    def is_whole(shard: str) -> bool:
        """Whether a shard has its recorded hash."""
        return file_sha256(directory / shard) == recorded[shard]

    with ThreadPoolExecutor(machine.cores()) as pool:
        whole = list(pool.map(is_whole, known))
    problems = []
    for shard, same in zip(known, whole, strict=True):
        if not same:
            problems.append(finding("TS-HASH-DIFFERS", shard))
    unknown = [shard for shard in shards if shard not in recorded]
    if unknown:
        first = unknown[0]
        counts = f"{len(unknown)} of {len(shards)} weight files"
        message = f"no hash is recorded for {counts}, first {first}"
        problems.append(Problem("TS-HASH-UNKNOWN", "warning", first, message))
    missing = sorted(name for name in recorded if name not in shards)
    if missing:
        problems.append(grouped("TS-HASH-LOST", missing))
    return sum(whole), problems
