"""The tensors of a converted head, and where the bytes of each come from."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from trtspec.checkpoint.headers import (
    DTYPE_BITS,
    PIECE,
    Checkpoint,
    ShardReader,
    TensorInfo,
    same_bytes,
)
from trtspec.checkpoint.heads.dialects import Dialect
from trtspec.checkpoint.heads.shapes import (
    MAPS,
    OPTIONAL,
    canonical_names,
    tensor_names,
)
from trtspec.checkpoint.values import FLOATS, MAP_DTYPES, count_not_finite, not_finite, read_values
from trtspec.checkpoint.writer import ShardFile
from trtspec.errors import CheckFailed, Problem
from trtspec.report import ProgressBar
from trtspec.specs import HeadSpec, ModelSpec

Choice = Literal["auto", "target"]
LM_HEAD = "lm_head.weight"
EMBED = "embed_tokens.weight"
WEIGHTS_REMEDY = "pass `target` DIR with the target's weights"


@dataclass(frozen=True)
class SharedWeights:
    """The target's own embedding and lm_head, which a head may use.

    `checkpoint`: the target's weights, on this machine.
    """

    checkpoint: Checkpoint
    spec: ModelSpec

    def tensor(self, name: str) -> OutputTensor | None:
        """`embed_tokens.weight` or `lm_head.weight` of the text model. None if it is missing."""
        inner = "model." if name == EMBED else ""
        info = self.checkpoint.tensors.get(f"{self.spec.family.prefix}{inner}{name}")
        return OutputTensor.copied(self.checkpoint, info) if info else None


@dataclass(frozen=True)
class OutputTensor:
    """One tensor of the output: tensor `info` of `checkpoint`, or the rebuilt map `values`."""

    dtype: str
    shape: tuple[int, ...]
    checkpoint: Checkpoint | None = None
    info: TensorInfo | None = None
    values: torch.Tensor | None = None

    @staticmethod
    def copied(checkpoint: Checkpoint, info: TensorInfo) -> OutputTensor:
        return OutputTensor(info.dtype, info.shape, checkpoint, info)

    @staticmethod
    def from_array(array: np.ndarray) -> OutputTensor:
        """Keeps a bool or int64 array as the tensor's values."""
        values = torch.from_numpy(np.ascontiguousarray(array))
        dtype = "BOOL" if values.dtype == torch.bool else "I64"
        return OutputTensor(dtype, tuple(values.shape), values=values)


def plan_tensors(
    source: Checkpoint,
    spec: HeadSpec,
    dialect: Dialect,
    shared_weights: SharedWeights | None,
    embed: Choice,
) -> tuple[dict[str, OutputTensor], list[Problem]]:
    """(name in the destination -> tensor, every reason why the plan cannot be carried out)."""
    tensors = canonical_names(source.tensors)
    names = tensor_names(spec)
    entries: dict[str, OutputTensor] = {}
    for name in names:
        if name in tensors:
            renamed = name
            if name.startswith("layer."):
                renamed = dialect.prefix + name.removeprefix("layer.")
            entries[renamed] = OutputTensor.copied(source, tensors[name])
    known = {*names, *OPTIONAL}
    unknown = [
        name for name in tensors if name not in known and not name.endswith("rotary_emb.inv_freq")
    ]
    problems = []
    if unknown:
        message = f"{len(unknown)} tensors have no place in {dialect.title}, first {unknown[0]}"
        problems.append(Problem("TS-CONVERT-TENSORS", "error", unknown[0], message))
    stored = {}
    shared = {}
    for name in (LM_HEAD, EMBED):
        if name in tensors:
            stored[name] = OutputTensor.copied(source, tensors[name])
        if shared_weights:
            shared[name] = shared_weights.tensor(name)
    lm_head, lm_head_problems = _lm_head(spec, dialect, stored.get(LM_HEAD), shared.get(LM_HEAD))
    if lm_head is not None:
        entries[LM_HEAD] = lm_head
    embedding, embedding_problems = _embedding(
        spec, dialect, stored.get(EMBED), shared.get(EMBED), embed
    )
    if embedding is not None:
        entries[EMBED] = embedding
    problems += lm_head_problems + embedding_problems
    return entries | _maps(source, tensors, spec, dialect), problems


def _lm_head(
    spec: HeadSpec, dialect: Dialect, stored: OutputTensor | None, shared: OutputTensor | None
) -> tuple[OutputTensor | None, list[Problem]]:
    """(lm_head to write, problems): the head's own, or the target's if the dialect needs one.

    `stored` is the head's own tensor, `shared` the target's.
    """
    code = "TS-CONVERT-LM-HEAD"
    if stored is not None or not dialect.needs_lm_head:
        return stored, []
    if spec.is_pruned:
        message = (
            "the target's lm_head has a row for each of its tokens, and this head drafts from fewer"
        )
        return None, [Problem(code, "error", LM_HEAD, message, "use a head with its own lm_head")]
    if shared is None:
        message = (
            f"{dialect.title} needs an lm_head, "
            "and the target's weights to borrow it from are not here"
        )
        return None, [Problem(code, "error", LM_HEAD, message, WEIGHTS_REMEDY)]
    return shared, _misfit(shared, spec, LM_HEAD, code)


def _embedding(
    spec: HeadSpec,
    dialect: Dialect,
    stored: OutputTensor | None,
    shared: OutputTensor | None,
    choice: Choice,
) -> tuple[OutputTensor | None, list[Problem]]:
    """(embedding to write, problems). `stored` is the head's own tensor, `shared` the target's.

    `choice` auto writes the tensor that the dialect's own writer would. It never loses an embedding
    that differs from the target's.
    """
    code = "TS-CONVERT-EMBED"
    has_target_width = spec.target_hidden_size == spec.hidden_size
    if choice == "target" or (stored is None and dialect.embed_tokens and shared is not None):
        if shared is None:
            message = "the target's weights to borrow the embedding from are not here"
            return stored, [Problem(code, "error", EMBED, message, WEIGHTS_REMEDY)]
        return shared, _misfit(shared, spec, EMBED, code)
    if stored is None:
        if has_target_width and not dialect.trains_embedding:
            return None, []
        message = (
            "the head has no embedding of its own; "
            "training continues from the target's; servers share it"
        )
        remedy = "pass `target` DIR to write the target's"
        return None, [Problem(code, "info", EMBED, message, remedy)]
    # Every reader needs the head's own embedding if the target's has another width.
    if not has_target_width or dialect.uses_embedding:
        return stored, []
    if shared is None:
        message = (
            f"{dialect.title} drafts with the target's embedding; "
            "whether the head's is the same is not known"
        )
        remedy = "pass `target` DIR to compare them"
        return stored, [Problem(code, "warning", EMBED, message, remedy)]
    assert stored.checkpoint and stored.info and shared.checkpoint and shared.info
    if same_bytes(stored.checkpoint, stored.info, shared.checkpoint, shared.info):
        return None, []
    message = (
        f"the head's embedding is not the target's, and {dialect.title} drafts with the target's"
    )
    remedy = "convert to vllm, which uses the head's, or accept the loss with `embed_tokens` target"
    return stored, [Problem(code, "error", EMBED, message, remedy)]


def _misfit(shared: OutputTensor, spec: HeadSpec, name: str, code: str) -> list[Problem]:
    """An error if the target's tensor has another shape than the head needs, or is not floats."""
    needed = (spec.vocab_size, spec.hidden_size)
    if shared.shape == needed and shared.dtype in FLOATS:
        return []
    message = (
        f"the target's is {shared.dtype} {list(shared.shape)}, "
        f"the head needs {list(needed)} in BF16"
    )
    return [Problem(code, "error", name, message, "pass the target that the head was trained for")]


def vocabulary_targets(source: Checkpoint, tensors: dict[str, TensorInfo]) -> np.ndarray | None:
    """Target id of each draft id, int64 [Vd], from d2t, or from t2d if d2t is absent.

    None if both are absent, or if one has an invalid dtype.
    """
    for name, dtypes in MAP_DTYPES.items():
        if name in tensors and tensors[name].dtype not in dtypes:
            return None
    if "d2t" in tensors:
        offsets = read_values(source, tensors["d2t"]).astype(np.int64)
        return offsets + np.arange(len(offsets))
    if "t2d" in tensors:
        return np.flatnonzero(read_values(source, tensors["t2d"]))
    return None


def _maps(
    source: Checkpoint, tensors: dict[str, TensorInfo], spec: HeadSpec, dialect: Dialect
) -> dict[str, OutputTensor]:
    """Makes d2t int64 [Vd] and t2d bool [V] as the dialect wants them.

    t2d follows from d2t. The map of an unpruned vocabulary is the identity.
    """
    targets = None
    if spec.is_pruned:
        targets = vocabulary_targets(source, tensors)
    elif dialect.d2t == "always":
        targets = np.arange(spec.vocab_size)
    if targets is None:
        return {}
    offsets = targets - np.arange(len(targets))
    entries = {"d2t": OutputTensor.from_array(offsets)}
    if dialect.t2d != "never":
        mask = np.zeros(spec.vocab_size, dtype=bool)
        mask[targets] = True
        entries["t2d"] = OutputTensor.from_array(mask)
    return entries


def sizes(entries: dict[str, OutputTensor]) -> tuple[int, int]:
    """(parameters without vocabulary maps, bytes of all tensors)."""
    parameters = 0
    size = 0
    for name, entry in entries.items():
        count = math.prod(entry.shape)
        size += count * DTYPE_BITS[entry.dtype] // 8
        if name not in MAPS:
            parameters += count
    return parameters, size


def with_ownership(spec: HeadSpec, dialect: Dialect, entries: dict[str, OutputTensor]) -> HeadSpec:
    """The record of the written head: its dialect, its prefix, and which tensors it holds."""
    return replace(
        spec,
        dialect=dialect.name,
        layer_prefix=dialect.prefix,
        has_lm_head=LM_HEAD in entries,
        has_embed_tokens=EMBED in entries,
        has_d2t="d2t" in entries,
    )


def write_tensors(
    path: Path, entries: dict[str, OutputTensor], bar: ProgressBar
) -> dict[str, dict[str, Any]]:
    """Writes model.safetensors. Raises CheckFailed for NaN and infinity among the floats.

    Returns the source of each tensor and the SHA-256 of its bytes.
    """
    layout = {name: (entry.dtype, entry.shape) for name, entry in sorted(entries.items())}
    written = 0  # bytes
    record: dict[str, dict[str, Any]] = {}
    with ShardFile(path, layout, {"format": "pt"}) as shard, _readers(entries) as readers:
        for name, entry in entries.items():
            digest = hashlib.sha256()
            bad = 0
            for chunk in _chunks(entry, readers):
                digest.update(chunk)
                if entry.dtype in FLOATS:
                    bad += count_not_finite(chunk, entry.dtype)[0]
                shard.append(name, chunk)
                written += len(chunk)
                bar.show(written, shard.size)
            if bad:
                problem = not_finite(name, bad, math.prod(entry.shape))
                raise CheckFailed(f"[{problem.code}] {name}: {problem.message}", problem.remedy)
            record[name] = {
                "source": entry.info.name if entry.info else None,
                "sha256": digest.hexdigest(),
            }
    return record


@contextmanager
def _readers(entries: dict[str, OutputTensor]) -> Iterator[dict[Path, ShardReader]]:
    """Opens a reader for each directory that tensors are copied from."""
    paths = {entry.checkpoint.path for entry in entries.values() if entry.checkpoint is not None}
    with ExitStack() as stack:
        yield {path: stack.enter_context(ShardReader(path)) for path in paths}


def _chunks(entry: OutputTensor, readers: dict[Path, ShardReader]) -> Iterator[memoryview]:
    """The bytes of a tensor in chunks. Each chunk is overwritten by the next."""
    if entry.checkpoint is None or entry.info is None:
        assert entry.values is not None
        return iter([entry.values.reshape(-1).view(torch.uint8).numpy().data])
    return readers[entry.checkpoint.path].pieces(entry.info, PIECE)
