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
LM_HEAD, EMBED = "lm_head.weight", "embed_tokens.weight"


@dataclass(frozen=True)
class Lender:
    """The target's own embedding and lm_head, where its weights are on this machine."""

    checkpoint: Checkpoint
    spec: ModelSpec

    def lend(self, name: str) -> OutputTensor | None:
        """`embed_tokens.weight` or `lm_head.weight` of the text model."""
        inner = "model." if name == EMBED else ""
        info = self.checkpoint.tensors.get(f"{self.spec.family.prefix}{inner}{name}")
        return OutputTensor.copied(self.checkpoint, info) if info else None


@dataclass(frozen=True)
class OutputTensor:
    """One tensor of the output. `info` is its place in `source`, or None for a rebuilt map (`values`)."""

    dtype: str
    shape: tuple[int, ...]
    checkpoint: Checkpoint | None = None
    info: TensorInfo | None = None
    values: torch.Tensor | None = None

    @staticmethod
    def copied(checkpoint: Checkpoint, info: TensorInfo) -> OutputTensor:
        return OutputTensor(info.dtype, info.shape, checkpoint, info)

    @staticmethod
    def made(values: np.ndarray) -> OutputTensor:
        tensor = torch.from_numpy(np.ascontiguousarray(values))
        return OutputTensor(
            "BOOL" if tensor.dtype == torch.bool else "I64", tuple(tensor.shape), values=tensor
        )


def plan_tensors(
    source: Checkpoint, spec: HeadSpec, dialect: Dialect, lender: Lender | None, embed: Choice
) -> tuple[dict[str, OutputTensor], list[Problem]]:
    """Names in the destination -> where their bytes come from; with every reason why the plan cannot be carried out."""
    tensors, prefix = canonical_names(source.tensors), dialect.prefix
    entries, problems = {}, list[Problem]()
    names = tensor_names(spec)
    for name in names:
        if name in tensors:
            renamed = prefix + name.removeprefix("layer.") if name.startswith("layer.") else name
            entries[renamed] = OutputTensor.copied(source, tensors[name])
    known = {*names, *OPTIONAL}
    unknown = [
        name for name in tensors if name not in known and not name.endswith("rotary_emb.inv_freq")
    ]
    if unknown:
        message = f"{len(unknown)} tensors have no place in {dialect.title}, first {unknown[0]}"
        problems.append(Problem("TS-CONVERT-TENSORS", "error", unknown[0], message))
    own = {
        name: OutputTensor.copied(source, tensors[name])
        for name in (LM_HEAD, EMBED)
        if name in tensors
    }
    lent = {name: lender.lend(name) for name in (LM_HEAD, EMBED)} if lender else {}
    for name, (chosen, found) in {
        LM_HEAD: _lm_head(spec, dialect, own.get(LM_HEAD), lent.get(LM_HEAD)),
        EMBED: _embedding(spec, dialect, own.get(EMBED), lent.get(EMBED), embed),
    }.items():
        problems += found
        if chosen is not None:
            entries[name] = chosen
    return entries | _maps(source, tensors, spec, dialect), problems


def vocabulary_targets(source: Checkpoint, tensors: dict[str, TensorInfo]) -> np.ndarray | None:
    """Target id of each draft id, int64 [Vd], from d2t, or from t2d where d2t is absent."""
    if any(tensors[name].dtype not in MAP_DTYPES[name] for name in MAP_DTYPES if name in tensors):
        return None
    if "d2t" in tensors:
        offsets = read_values(source, tensors["d2t"]).astype(np.int64)
        return offsets + np.arange(len(offsets))
    return np.flatnonzero(read_values(source, tensors["t2d"])) if "t2d" in tensors else None


def _maps(
    source: Checkpoint, tensors: dict[str, TensorInfo], spec: HeadSpec, dialect: Dialect
) -> dict[str, OutputTensor]:
    """d2t int64 [Vd] and t2d bool [V], made here: t2d follows from d2t and an unpruned map is the identity."""
    pruned = spec.is_pruned
    if not pruned and dialect.d2t != "always":
        return {}
    targets = vocabulary_targets(source, tensors) if pruned else np.arange(spec.vocab_size)
    if targets is None:
        return {}
    entries = {"d2t": OutputTensor.made(targets - np.arange(len(targets)))}
    if dialect.t2d != "never":
        mask = np.zeros(spec.vocab_size, dtype=bool)
        mask[targets] = True
        entries["t2d"] = OutputTensor.made(mask)
    return entries


def _lm_head(
    spec: HeadSpec, dialect: Dialect, own: OutputTensor | None, lent: OutputTensor | None
) -> tuple[OutputTensor | None, list[Problem]]:
    """The head's own, else the target's where the dialect needs one."""
    where, code = LM_HEAD, "TS-CONVERT-LM-HEAD"
    if own is not None or not dialect.needs_lm_head:
        return own, []
    if spec.is_pruned:
        message = (
            "the target's lm_head has a row for each of its tokens, and this head drafts from fewer"
        )
        return None, [Problem(code, "error", where, message, "use a head with its own lm_head")]
    if lent is None:
        message = f"{dialect.title} needs an lm_head, and the target's weights to borrow it from are not here"
        return None, [
            Problem(code, "error", where, message, "pass `target` DIR with the target's weights")
        ]
    return lent, _misfit(lent, (spec.vocab_size, spec.hidden_size), where, code)


def _embedding(
    spec: HeadSpec,
    dialect: Dialect,
    own: OutputTensor | None,
    lent: OutputTensor | None,
    choice: Choice,
) -> tuple[OutputTensor | None, list[Problem]]:
    """auto: what the dialect's own writer does, without losing an embedding that is not the target's."""
    where, code = EMBED, "TS-CONVERT-EMBED"
    borrowed = spec.target_hidden_size == spec.hidden_size  # else every reader needs the head's own
    if choice == "target" or (own is None and dialect.embed_tokens and lent is not None):
        if lent is None:
            message = "the target's weights to borrow the embedding from are not here"
            return own, [
                Problem(
                    code, "error", where, message, "pass `target` DIR with the target's weights"
                )
            ]
        return lent, _misfit(lent, (spec.vocab_size, spec.hidden_size), where, code)
    if own is None:
        needed = not borrowed or dialect.trains_embedding
        message = "the head has no embedding of its own; training continues from the target's; servers share it"
        found = (
            [Problem(code, "info", where, message, "pass `target` DIR to write the target's")]
            if needed
            else []
        )
        return None, found
    if not borrowed or dialect.uses_embedding:
        return own, []
    if lent is None:
        message = f"{dialect.title} drafts with the target's embedding; whether the head's is the same is not known"
        return own, [Problem(code, "warning", where, message, "pass `target` DIR to compare them")]
    assert own.checkpoint and own.info and lent.checkpoint and lent.info
    if same_bytes(own.checkpoint, own.info, lent.checkpoint, lent.info):
        return None, []
    message = (
        f"the head's embedding is not the target's, and {dialect.title} drafts with the target's"
    )
    remedy = "convert to vllm, which uses the head's, or accept the loss with `embed_tokens` target"
    return own, [Problem(code, "error", where, message, remedy)]


def _misfit(lent: OutputTensor, wanted: tuple[int, int], where: str, code: str) -> list[Problem]:
    if lent.shape == wanted and lent.dtype in FLOATS:
        return []
    message = (
        f"the target's is {lent.dtype} {list(lent.shape)}, the head needs {list(wanted)} in BF16"
    )
    return [Problem(code, "error", where, message, "pass the target that the head was trained for")]


@contextmanager
def readers(*entries: OutputTensor) -> Iterator[dict[Path, ShardReader]]:
    """What reads the sources of these entries, by their directories."""
    with ExitStack() as stack:
        paths = {entry.checkpoint.path for entry in entries if entry.checkpoint is not None}
        yield {path: stack.enter_context(ShardReader(path)) for path in paths}


def pieces(entry: OutputTensor, opened: dict[Path, ShardReader]) -> Iterator[memoryview]:
    """The bytes of an entry; each piece is overwritten by the next."""
    if entry.checkpoint is None or entry.info is None:
        assert entry.values is not None
        return iter([entry.values.reshape(-1).view(torch.uint8).numpy().data])
    return opened[entry.checkpoint.path].pieces(entry.info, PIECE)


def sizes(entries: dict[str, OutputTensor]) -> tuple[int, int]:
    """Parameters, vocabulary maps not counted, and bytes."""
    counts = {name: math.prod(entry.shape) for name, entry in entries.items()}
    size = sum(counts[name] * DTYPE_BITS[entry.dtype] // 8 for name, entry in entries.items())
    return sum(count for name, count in counts.items() if name not in MAPS), size


def with_ownership(spec: HeadSpec, dialect: Dialect, entries: dict[str, OutputTensor]) -> HeadSpec:
    """The record of the head that is written: its dialect, prefix, and which tensors it holds."""
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
    """Writes model.safetensors and returns, for each tensor, its source and the SHA-256 of its bytes.

    Every float that passes is looked at: raises CheckFailed for NaN and infinity.
    """
    layout = {name: (entry.dtype, entry.shape) for name, entry in sorted(entries.items())}
    done, record = 0, dict[str, dict[str, Any]]()
    with ShardFile(path, layout, {"format": "pt"}) as shard, readers(*entries.values()) as opened:
        for name, entry in entries.items():
            digest, bad = hashlib.sha256(), 0
            for piece in pieces(entry, opened):
                digest.update(piece)
                bad += count_not_finite(piece, entry.dtype)[0] if entry.dtype in FLOATS else 0
                shard.append(name, piece)
                done += len(piece)
                bar.show(done, shard.size)
            if bad:
                problem = not_finite(name, bad, math.prod(entry.shape))
                raise CheckFailed(f"[{problem.code}] {name}: {problem.message}", problem.remedy)
            record[name] = {
                "source": entry.info.name if entry.info else None,
                "sha256": digest.hexdigest(),
            }
    return record
