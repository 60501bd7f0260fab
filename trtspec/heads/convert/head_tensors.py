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

# Choice of the embedding to write: as the dialect's own writer does, or the target's.
Choice = Literal["auto", "target"]
LM_HEAD = "lm_head.weight"
EMBED = "embed_tokens.weight"
WEIGHTS_REMEDY = "pass `target` DIR with the target's weights"


@dataclass(frozen=True)
class SharedWeights:
    """The target's embedding and lm_head, which a head may use in place of its own.

    Args:
        checkpoint: checkpoint of the target, with weights on this machine.
    """

    checkpoint: Checkpoint
    spec: ModelSpec

    def tensor(self, name: str) -> OutputTensor | None:
        """Finds the target's tensor EMBED or LM_HEAD. None if the target has no such tensor."""
        # The names of lm_head and embedding are `lm_head.weight` and `model.embed_tokens.weight`.
        inner = "model." if name == EMBED else ""
        info = self.checkpoint.tensors.get(f"{self.spec.family.prefix}{inner}{name}")
        return OutputTensor.copied(self.checkpoint, info) if info else None


@dataclass(frozen=True)
class OutputTensor:
    """A tensor of the converted head, with the source of its bytes.

    The bytes are copied from tensor `info` of `checkpoint`, or are the rebuilt `values`.

    Args:
        dtype: dtype in safetensors' spelling.
        values: values of a rebuilt vocabulary map. None for a copied tensor.
    """

    dtype: str
    shape: tuple[int, ...]
    checkpoint: Checkpoint | None = None
    info: TensorInfo | None = None
    values: torch.Tensor | None = None

    @staticmethod
    def copied(checkpoint: Checkpoint, info: TensorInfo) -> OutputTensor:
        """Describes a tensor that is copied unchanged from a checkpoint."""
        return OutputTensor(info.dtype, info.shape, checkpoint, info)

    @staticmethod
    def from_array(array: np.ndarray) -> OutputTensor:
        """Describes a tensor whose values are a bool or int64 array."""
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
    """Plans the tensors of the converted head.

    Returns the tensors by their names in the destination, and the problems that were found.

    Args:
        spec: specification of the source head.
        shared_weights: weights of the target. None if the weights are not on this machine.
        embed: choice of the embedding to write.
    """
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
    # inv_freq is a buffer of early exports that every loader skips.
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
    """Chooses the lm_head to write: the head's own, or the target's if the dialect needs one.

    Returns the tensor (None: no lm_head is written) and the problems.

    Args:
        stored: lm_head of the source head. None if the head has no lm_head.
        shared: lm_head of the target. None if the target's weights are not on this machine.
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
            "and the target's weights, which have one, are not on this machine"
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
    """Chooses the embedding to write: the head's own, the target's, or no embedding (None).

    Returns the tensor and the problems. The choice `auto` writes the tensor that the dialect's own
    writer would write, and never loses an embedding that differs from the target's.

    Args:
        stored: embedding of the source head. None if the head has no embedding.
        shared: embedding of the target. None if the target's weights are not on this machine.
    """
    code = "TS-CONVERT-EMBED"
    has_target_width = spec.target_hidden_size == spec.hidden_size
    if choice == "target" or (stored is None and dialect.embed_tokens and shared is not None):
        if shared is None:
            message = "the target's weights, which have the embedding, are not on this machine"
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
    # If the target's embedding has another width, every engine needs the head's own.
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
    # An equal copy is left out, because this dialect drafts with the target's embedding.
    if same_bytes(stored.checkpoint, stored.info, shared.checkpoint, shared.info):
        return None, []
    message = (
        f"the head's embedding is not the target's, and {dialect.title} drafts with the target's"
    )
    remedy = "convert to vllm, which uses the head's, or accept the loss with `embed_tokens` target"
    return stored, [Problem(code, "error", EMBED, message, remedy)]


def _misfit(shared: OutputTensor, spec: HeadSpec, name: str, code: str) -> list[Problem]:
    """Returns an error if the target's tensor `name` has a shape or a dtype that does not fit."""
    needed = (spec.vocab_size, spec.hidden_size)
    if shared.shape == needed and shared.dtype in FLOATS:
        return []
    message = (
        f"the target's is {shared.dtype} {list(shared.shape)}, "
        f"the head needs {list(needed)} in BF16"
    )
    return [Problem(code, "error", name, message, "pass the target that the head was trained for")]


def vocabulary_targets(source: Checkpoint, tensors: dict[str, TensorInfo]) -> np.ndarray | None:
    """Reads the target id of each draft id, int64 [Vd], from d2t, or from t2d if d2t is absent.

    None if both maps are absent, or if a map has an invalid dtype.

    Args:
        tensors: tensors of `source` by their canonical names.
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
    """Builds the vocabulary maps that the dialect needs: d2t int64 [Vd] and t2d bool [V].

    An unpruned head gets maps, from each token to itself, only if the dialect always has maps.
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
    """Counts the parameters without the vocabulary maps, and the bytes of all tensors."""
    parameters = 0
    size = 0
    for name, entry in entries.items():
        count = math.prod(entry.shape)
        size += count * DTYPE_BITS[entry.dtype] // 8
        if name not in MAPS:
            parameters += count
    return parameters, size


def with_ownership(spec: HeadSpec, dialect: Dialect, entries: dict[str, OutputTensor]) -> HeadSpec:
    """Returns the specification of the written head: its dialect, and the tensors that it holds."""
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
    """Writes model.safetensors, and checks all floats while it copies them.

    Returns, by tensor name, the `source` (name in the source's checkpoint, None for a rebuilt map)
    and the `sha256` of the bytes. Raises CheckFailed if a float is NaN or infinite.
    """
    layout = {name: (entry.dtype, entry.shape) for name, entry in sorted(entries.items())}
    written = 0  # bytes
    record: dict[str, dict[str, Any]] = {}
    with ShardFile(path, layout, {"format": "pt"}) as shard, _readers(entries) as readers:
        for name, entry in entries.items():
            digest = hashlib.sha256()
            bad = 0  # number of NaN and infinite values
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
    """Opens a reader for each checkpoint that tensors are copied from. Yields readers by path."""
    paths = {entry.checkpoint.path for entry in entries.values() if entry.checkpoint is not None}
    with ExitStack() as stack:
        yield {path: stack.enter_context(ShardReader(path)) for path in paths}


def _chunks(entry: OutputTensor, readers: dict[Path, ShardReader]) -> Iterator[memoryview]:
    """Yields the bytes of a tensor in chunks. The next chunk overwrites the buffer of a chunk."""
    if entry.checkpoint is None or entry.info is None:
        assert entry.values is not None
        return iter([entry.values.reshape(-1).view(torch.uint8).numpy().data])
    return readers[entry.checkpoint.path].pieces(entry.info, PIECE)
