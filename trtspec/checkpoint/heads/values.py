"""What the values of a head's tensors say, read in numpy: numbers that are none, vocabulary maps, lm_head rows.

Reading a whole head takes seconds per GB, so large tensors are looked at in pieces unless all is asked for.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import numpy as np

from trtspec.checkpoint.headers import Checkpoint, ShardReader, TensorInfo
from trtspec.checkpoint.heads.dialects import recorded
from trtspec.errors import Problem
from trtspec.specs import HeadSpec, ModelSpec

FLOATS = ("BF16", "F16", "F32")
PIECE = 1 << 18  # bytes
PIECES = 64
MAP_DTYPES = {"d2t": ("I64", "I32"), "t2d": ("BOOL", "U8", "I8")}
WHOLE = 1 << 24  # a tensor up to this size is read entirely
EXPONENTS = {"BF16": ("<u2", 0x7F80), "F16": ("<u2", 0x7C00), "F32": ("<u4", 0x7F800000)}
KINDS = {"F16": "<f2", "F32": "<f4", "I64": "<i8", "I32": "<i4", "BOOL": "?", "U8": "u1", "I8": "i1"}


def read_values(checkpoint: Checkpoint, info: TensorInfo) -> np.ndarray:
    """A small tensor's values as float32 or its own integers, read from its bytes without torch."""
    return decode(checkpoint.bytes_at(info.shard, info.begin, info.nbytes), info.dtype).reshape(info.shape)


def decode(raw: bytes, dtype: str) -> np.ndarray:
    """Bytes of a safetensors dtype as a flat array; BF16 becomes float32."""
    if dtype == "BF16":
        return (np.frombuffer(raw, "<u2").astype(np.uint32) << 16).view(np.float32)
    return np.frombuffer(raw, KINDS[dtype])


def count_not_finite(raw: bytes | memoryview, dtype: str) -> int:
    """How many values of BF16, F16 or F32 bytes are NaN or infinite (all exponent bits set)."""
    kind, mask = EXPONENTS[dtype]
    return int(np.count_nonzero((np.frombuffer(raw, kind) & mask) == mask))


def value_problems(
    checkpoint: Checkpoint, tensors: dict[str, TensorInfo], *, everything: bool = False
) -> list[Problem]:
    """NaN, infinity, nothing but zeros, and bytes that are not those which provenance.json notes: one problem for each
    tensor. Of large tensors 64 evenly spread pieces unless `everything`. An embedding of zeros is left to the
    comparison with the target's."""
    problems, noted = [], noted_digests(checkpoint)
    with ShardReader(checkpoint.path) as reader:
        for name, info in tensors.items():
            nbytes, digest = info.nbytes, noted.get(info.name)
            floats = info.dtype in EXPONENTS and name not in MAP_DTYPES
            if not nbytes or not (floats or digest):
                continue
            whole = everything or nbytes <= WHOLE
            found, bad, seen, zero = hashlib.sha256(), 0, 0, not name.startswith("embed_tokens")
            for piece in reader.pieces(info, 4 * PIECE) if whole else _sampled(reader, info):
                bad += count_not_finite(piece, info.dtype) if floats else 0
                zero = zero and not bytes(piece).strip(b"\x00\x80")  # 0x80: the sign of -0.0
                seen += len(piece)
                if digest:
                    found.update(piece)
            values = seen * info.numel // nbytes
            if bad:
                problems.append(not_finite(name, bad, values))
            elif zero and floats:
                message = f"all of {values:,} values looked at are zero; the tensor was never filled"
                problems.append(Problem("TS-HEAD-ZERO", "error", name, message, "fetch the head again"))
            elif digest and whole and found.hexdigest() != digest:
                message = "its bytes are not those that provenance.json notes: they changed since `trtspec convert`"
                remedy = "convert again; if the head was changed on purpose, remove provenance.json"
                problems.append(Problem("TS-HEAD-DIGEST", "error", name, message, remedy))
    return problems


def noted_digests(checkpoint: Checkpoint) -> dict[str, str]:
    """Tensor -> SHA-256 as provenance.json notes it; {} where it notes none."""
    entries = recorded(checkpoint.path).get("tensors")
    noted = entries.items() if isinstance(entries, dict) else ()
    return {name: str(entry["sha256"]) for name, entry in noted if isinstance(entry, dict) and entry.get("sha256")}


def not_finite(name: str, bad: int, seen: int) -> Problem:
    message = f"{bad:,} of {seen:,} values looked at are NaN or infinite"
    if bad == seen:
        message += "; the tensor was never filled (speculators starts unloaded weights as NaN)"
    remedy = "fetch the head again; embed_tokens can be borrowed: `trtspec convert --embed-tokens target --target DIR`"
    return Problem("TS-HEAD-NOT-FINITE", "error", name, message, remedy)


def _sampled(reader: ShardReader, info: TensorInfo) -> Iterator[memoryview]:
    """Evenly spread pieces of a large tensor; each is overwritten by the next."""
    buffer, step = memoryview(bytearray(PIECE)), (info.nbytes - PIECE) // (PIECES - 1) // 64 * 64
    for number in range(PIECES):
        reader.read_bytes(info, info.begin + number * step, buffer)
        yield buffer


def vocabulary_values(checkpoint: Checkpoint, tensors: dict[str, TensorInfo], spec: HeadSpec) -> list[Problem]:
    """d2t, t2d and the rows of lm_head against each other."""
    wrong = [_map_dtype(name, tensors[name]) for name in MAP_DTYPES if name in tensors]
    if problems := [problem for problem in wrong if problem is not None]:
        return problems
    sizes = {"d2t": spec.draft_vocab_size, "t2d": spec.vocab_size, "lm_head.weight": spec.draft_vocab_size}
    if "d2t" not in tensors or any(tensors[name].shape[0] != size for name, size in sizes.items() if name in tensors):
        return []
    offsets = read_values(checkpoint, tensors["d2t"])
    problem = _d2t(offsets, spec)
    if problem is not None:
        return [problem]
    targets = np.arange(len(offsets)) + offsets
    if "t2d" in tensors and not np.array_equal(np.flatnonzero(read_values(checkpoint, tensors["t2d"])), targets):
        message = "t2d does not mark the tokens that d2t maps to"
        remedy = "`trtspec convert` rebuilds t2d from d2t; check that the map is the one of the training"
        problems.append(Problem("TS-HEAD-T2D-VALUES", "error", "t2d", message, remedy))
    if spec.draft_vocab_size != spec.vocab_size and "lm_head.weight" in tensors:
        problems += _rows_by_offset(checkpoint, tensors["lm_head.weight"], offsets)
    return problems


def _map_dtype(name: str, info: TensorInfo) -> Problem | None:
    """A map of floats is cut to integers by some loaders and refused by others."""
    if info.dtype in MAP_DTYPES[name] and len(info.shape) == 1:
        return None
    message = (
        f"{name} is stored as {info.dtype} {list(info.shape)}; loaders expect one of {', '.join(MAP_DTYPES[name])}"
    )
    return Problem(
        "TS-HEAD-MAP-DTYPE", "error", name, message, f"store {name} as one {MAP_DTYPES[name][0]} for each token"
    )


def _d2t(offsets: np.ndarray, spec: HeadSpec) -> Problem | None:
    """d2t holds offsets: draft token i is target token i + d2t[i], and those rise strictly within the vocabulary."""
    targets = np.arange(len(offsets)) + offsets
    if len(offsets) < spec.vocab_size and len(offsets) == spec.draft_vocab_size and not offsets.any():
        message = (
            f"d2t holds nothing but zeros: the draft tokens would be the first {len(offsets):,} ids, whatever they mean"
        )
        remedy = "store the map that the head was trained with, d2t[i] = target id - i"
        return Problem("TS-HEAD-D2T-ZERO", "error", "d2t", message, remedy)
    inside = len(targets) == 0 or (targets.min() >= 0 and targets.max() < spec.vocab_size)
    if len(offsets) == spec.draft_vocab_size and inside and bool(np.all(np.diff(targets) > 0)):
        return None
    absolute = len(offsets) and bool(np.all(np.diff(offsets) > 0)) and offsets.max() < spec.vocab_size
    message = "d2t does not map the draft tokens to rising target tokens"
    if absolute:
        message += "; its values look like target ids where offsets are expected"
    return Problem("TS-HEAD-D2T-VALUES", "error", "d2t", message, "store d2t[i] = target id - i")


def _rows_by_offset(checkpoint: Checkpoint, info: TensorInfo, offsets: np.ndarray) -> list[Problem]:
    """TorchSpec's pruning takes row d2t[i] of the full lm_head, not row i + d2t[i]: equal offsets, equal rows."""
    pairs = np.flatnonzero(np.diff(offsets) == 0)[:16]
    width = info.nbytes // max(info.shape[0], 1)
    for row in pairs:
        rows = checkpoint.bytes_at(info.shard, info.begin + int(row) * width, 2 * width)
        if rows[:width] != rows[width:]:
            return []
    if len(pairs) < 2 or not any(rows):
        return []
    message = "draft tokens with the same offset have the same lm_head row: the rows were taken by offset, not by token"
    remedy = "prune again from the full head with ids i + d2t[i]; TorchSpec's own exporter makes this mistake"
    return [Problem("TS-HEAD-LM-HEAD-ROWS", "error", "lm_head.weight", message, remedy)]


def embedding_problems(head: Checkpoint, own: TensorInfo, target: Checkpoint, spec: ModelSpec) -> list[Problem]:
    """A head's own embedding against its target's, by 64 rows: equal, trained on, or not related at all."""
    theirs = target.tensors.get(f"{spec.name_prefix}model.embed_tokens.weight")
    if theirs is None or theirs.shape != own.shape or {own.dtype, theirs.dtype} - set(FLOATS):
        return []
    rows = embedding_rows(own.shape[0])
    return compare_embeddings(_rows(head, own, rows), _rows(target, theirs, rows))


def embedding_rows(count: int) -> np.ndarray:
    """The rows of an embedding of `count` tokens that stand for all."""
    return np.linspace(0, count - 1, min(64, count)).astype(int)


def compare_embeddings(ours: np.ndarray, theirs: np.ndarray) -> list[Problem]:
    """The same rows of a head's and a target's embedding, [N, H]; numbers that are none are for `value_problems`."""
    if np.array_equal(ours, theirs) or not np.isfinite(ours).all():
        return []
    lengths = np.linalg.norm(ours, axis=1) * np.linalg.norm(theirs, axis=1)
    cosine = float(np.median((ours * theirs).sum(1) / np.maximum(lengths, 1e-30)))
    readers = "vLLM drafts with it, TensorRT-LLM and SGLang with the target's"
    if not cosine >= 0.5:
        message = f"the head's embedding has nothing to do with the target's (median cosine {cosine:.2f}); {readers}"
        remedy = "`trtspec convert --embed-tokens target --target DIR` puts the target's in its place"
        return [Problem("TS-PAIR-EMBED-RANDOM", "error", "embed_tokens.weight", message, remedy)]
    message = f"the head's embedding was trained on from the target's (median cosine {cosine:.4f}); {readers}"
    return [Problem("TS-PAIR-EMBED-TRAINED", "warning", "embed_tokens.weight", message, "serve it with vLLM")]


def _rows(checkpoint: Checkpoint, info: TensorInfo, rows: np.ndarray) -> np.ndarray:
    width, found = info.nbytes // info.shape[0], []
    for row in rows:
        raw = checkpoint.bytes_at(info.shard, info.begin + int(row) * width, width)
        found.append(decode(raw, info.dtype).astype(np.float64))
    return np.stack(found)
