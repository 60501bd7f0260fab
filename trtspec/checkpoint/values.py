"""What the values of a head's and of a target's tensors say, read in numpy without torch.

Of a head: NaN and infinity, vocabulary maps, lm_head rows. Reading a whole head takes seconds per GB, so large tensors
are looked at in pieces unless all is asked for. Of a target: every small tensor always (scales, norms, router biases),
large ones by sample. Without its source, a value can be judged only by what all exporters have in common: scales are
positive, gate and up share one, and `weight_scale_2` is the largest magnitude of BF16 weights over 2688, so that 2688
times it is a BF16 number again.
"""

from __future__ import annotations

import hashlib
import random
import statistics
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from trtspec import files
from trtspec.checkpoint.headers import (
    DTYPE_BITS,
    NOT_FINITE_BITS,
    Checkpoint,
    ShardReader,
    TensorInfo,
)
from trtspec.checkpoint.identity import recorded
from trtspec.checkpoint.target_problems import ReadTarget
from trtspec.checkpoint.target_tensors import EXPERT_NUMBER, LAYER_NUMBER, finding, grouped
from trtspec.errors import Problem, Severity
from trtspec.formats import NVFP4_RANGE, SIDE_PARTS, WeightFormat, shared_partners
from trtspec.specs import HeadSpec, ModelSpec

FLOATS = ("BF16", "F16", "F32")
CACHED = 1 << 16  # values looked at together, so that they stay in the cache
PIECE = 1 << 18  # bytes
PIECES = 64
MAP_DTYPES = {"d2t": ("I64", "I32"), "t2d": ("BOOL", "U8", "I8")}
WHOLE = 1 << 24  # a tensor up to this size is read entirely
KINDS = {
    "F16": "<f2",
    "F32": "<f4",
    "I64": "<i8",
    "I32": "<i4",
    "BOOL": "?",
    "U8": "u1",
    "I8": "i1",
}
SMALL = 1 << 16  # bytes; a tensor up to this size is always read
READ = 1 << 23  # bytes of one read, and of a piece of a large tensor
GAP = 1 << 12  # bytes that are read along, because that is cheaper than another read
READERS = 8  # shards read side by side: each small read waits for the storage
BF16_MOST = 3.39e38
ON_GRID = 2.0**-22  # relative; a quotient of float32 and back is within 2^-23
MOST = 0.9  # of the linears follow a rule: the others break it
FAR, ABSURD = 1e3, 1e5  # times or parts of the median input_scale of the same kind of linear
Fault = tuple[
    str, Severity, str
]  # code, severity, and the tensor or a sentence that begins with it


def read_values(checkpoint: Checkpoint, info: TensorInfo) -> np.ndarray:
    """A small tensor's values as float32 or its own integers, read from its bytes without torch."""
    return decode(checkpoint.bytes_at(info.shard, info.begin, info.nbytes), info.dtype).reshape(
        info.shape
    )


def decode(raw: bytes, dtype: str) -> np.ndarray:
    """Bytes of a safetensors dtype as a flat array; BF16 becomes float32."""
    if dtype == "BF16":
        return (np.frombuffer(raw, "<u2").astype(np.uint32) << 16).view(np.float32)
    return np.frombuffer(raw, KINDS[dtype])


def count_not_finite(raw: memoryview | np.ndarray, dtype: str) -> tuple[int, int | None]:
    """How many values of a safetensors dtype are NaN or infinite, and the index of the first; 0 and None where none is,
    or the dtype has neither."""
    count, index = 0, None
    if dtype in NOT_FINITE_BITS:
        mask, least = NOT_FINITE_BITS[dtype]
        codes = np.frombuffer(raw, f"<u{DTYPE_BITS[dtype] // 8}")
        for begin in range(0, codes.size, CACHED):
            part = codes[begin : begin + CACHED] & codes.dtype.type(mask)
            if part.max() >= least:
                index = begin + int((part >= least).argmax()) if index is None else index
                count += int(np.count_nonzero(part >= least))
    return count, index


def head_value_problems(
    checkpoint: Checkpoint, tensors: dict[str, TensorInfo], *, everything: bool = False
) -> list[Problem]:
    """NaN, infinity, nothing but zeros, and bytes that are not those which provenance.json notes: one problem for each
    tensor. Of large tensors 64 evenly spread pieces unless `everything`. An embedding of zeros is left to the
    comparison with the target's."""
    problems, noted = [], noted_digests(checkpoint)
    with ShardReader(checkpoint.path) as reader:
        for name, info in tensors.items():
            nbytes, digest = info.nbytes, noted.get(info.name)
            floats = info.dtype in FLOATS and name not in MAP_DTYPES
            if not nbytes or not (floats or digest):
                continue
            whole = everything or nbytes <= WHOLE
            found, bad, seen, zero = hashlib.sha256(), 0, 0, not name.startswith("embed_tokens")
            for piece in reader.pieces(info, 4 * PIECE) if whole else _sampled(reader, info):
                bad += count_not_finite(piece, info.dtype)[0] if floats else 0
                zero = zero and not bytes(piece).strip(b"\x00\x80")  # 0x80: the sign of -0.0
                seen += len(piece)
                if digest:
                    found.update(piece)
            values = seen * info.numel // nbytes
            if bad:
                problems.append(not_finite(name, bad, values))
            elif zero and floats:
                problems.append(finding("TS-HEAD-ZERO", name))
            elif digest and whole and found.hexdigest() != digest:
                problems.append(finding("TS-HEAD-DIGEST", name))
    return problems


def noted_digests(checkpoint: Checkpoint) -> dict[str, str]:
    """Tensor -> SHA-256 as provenance.json notes it; {} where it notes none."""
    entries = recorded(checkpoint.path).get("tensors")
    noted = entries.items() if isinstance(entries, dict) else ()
    return {
        name: str(entry["sha256"])
        for name, entry in noted
        if isinstance(entry, dict) and entry.get("sha256")
    }


def not_finite(name: str, bad: int, seen: int) -> Problem:
    message = f"{bad:,} of {seen:,} values looked at are NaN or infinite"
    if bad == seen:
        message += "; the tensor was never filled (speculators starts unloaded weights as NaN)"
    return Problem("TS-HEAD-NOT-FINITE", "error", name, message)


def _sampled(reader: ShardReader, info: TensorInfo) -> Iterator[memoryview]:
    """Evenly spread pieces of a large tensor; each is overwritten by the next."""
    buffer, step = memoryview(bytearray(PIECE)), (info.nbytes - PIECE) // (PIECES - 1) // 64 * 64
    for number in range(PIECES):
        reader.read_bytes(info, info.begin + number * step, buffer)
        yield buffer


def vocabulary_values(
    checkpoint: Checkpoint, tensors: dict[str, TensorInfo], spec: HeadSpec
) -> list[Problem]:
    """d2t, t2d and the rows of lm_head against each other."""
    maps = {name: tensors[name] for name in MAP_DTYPES if name in tensors}
    # a map of floats is cut to integers by some loaders and refused by others
    wrong = [
        name
        for name, info in maps.items()
        if info.dtype not in MAP_DTYPES[name] or len(info.shape) != 1
    ]
    if problems := [finding("TS-HEAD-MAP-DTYPE", name) for name in wrong]:
        return problems
    sizes = {
        "d2t": spec.draft_vocab_size,
        "t2d": spec.vocab_size,
        "lm_head.weight": spec.draft_vocab_size,
    }
    if "d2t" not in tensors or any(
        tensors[name].shape[0] != size for name, size in sizes.items() if name in tensors
    ):
        return []
    offsets = read_values(checkpoint, tensors["d2t"])
    problem = _d2t(offsets, spec)
    if problem is not None:
        return [problem]
    targets = np.arange(len(offsets)) + offsets
    if "t2d" in tensors and not np.array_equal(
        np.flatnonzero(read_values(checkpoint, tensors["t2d"])), targets
    ):
        problems.append(finding("TS-HEAD-T2D-VALUES", "t2d"))
    if spec.is_pruned and "lm_head.weight" in tensors:
        problems += _rows_by_offset(checkpoint, tensors["lm_head.weight"], offsets)
    return problems


def _d2t(offsets: np.ndarray, spec: HeadSpec) -> Problem | None:
    """d2t holds offsets: draft token i is target token i + d2t[i], and those rise strictly within the vocabulary."""
    targets = np.arange(len(offsets)) + offsets
    if (
        len(offsets) < spec.vocab_size
        and len(offsets) == spec.draft_vocab_size
        and not offsets.any()
    ):
        return finding("TS-HEAD-D2T-ZERO", "d2t")
    inside = len(targets) == 0 or (targets.min() >= 0 and targets.max() < spec.vocab_size)
    if len(offsets) == spec.draft_vocab_size and inside and bool(np.all(np.diff(targets) > 0)):
        return None
    absolute = (
        len(offsets) and bool(np.all(np.diff(offsets) > 0)) and offsets.max() < spec.vocab_size
    )
    message = "d2t does not map the draft tokens to rising target tokens"
    if absolute:
        message += "; its values look like target ids where offsets are expected"
    return Problem("TS-HEAD-D2T-VALUES", "error", "d2t", message)


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
    return [finding("TS-HEAD-LM-HEAD-ROWS", "lm_head.weight")]


def embedding_problems(
    head: Checkpoint, own: TensorInfo, target: Checkpoint, spec: ModelSpec
) -> list[Problem]:
    """A head's own embedding against its target's, by 64 rows: equal, trained on, or not related at all."""
    theirs = target.tensors.get(f"{spec.name_prefix}model.embed_tokens.weight")
    if theirs is None or theirs.shape != own.shape or {own.dtype, theirs.dtype} - set(FLOATS):
        return []
    rows = embedding_rows(own.shape[0])
    return compare_embeddings(_rows(head, own, rows), _rows(target, theirs, rows))


def embedding_rows(count: int) -> np.ndarray:
    """The rows of an embedding of `count` tokens, a sample of all."""
    return np.linspace(0, count - 1, min(64, count)).astype(int)


BF16_STEP, FP16_LEAST = 2.0**-8, 2.0**-24  # what storing the same number in another type changes


def compare_embeddings(ours: np.ndarray, theirs: np.ndarray) -> list[Problem]:
    """The same rows of a head's and a target's embedding, [N, H]; NaN and infinity are for `head_value_problems`."""
    if not np.isfinite(ours).all() or np.allclose(ours, theirs, rtol=BF16_STEP, atol=FP16_LEAST):
        return []
    lengths = np.linalg.norm(ours, axis=1) * np.linalg.norm(theirs, axis=1)
    cosine = float(np.median((ours * theirs).sum(1) / np.maximum(lengths, 1e-30)))
    readers = "vLLM drafts with it, TensorRT-LLM and SGLang with the target's"
    if not cosine >= 0.5:
        message = f"the head's embedding has nothing to do with the target's (median cosine {cosine:.2f}); {readers}"
        return [Problem("TS-PAIR-EMBED-RANDOM", "error", "embed_tokens.weight", message)]
    message = f"the head's embedding was trained on from the target's (median cosine {cosine:.4f}); {readers}"
    return [Problem("TS-PAIR-EMBED-TRAINED", "warning", "embed_tokens.weight", message)]


def _rows(checkpoint: Checkpoint, info: TensorInfo, rows: np.ndarray) -> np.ndarray:
    width, found = info.nbytes // info.shape[0], []
    for row in rows:
        raw = checkpoint.bytes_at(info.shard, info.begin + int(row) * width, width)
        found.append(decode(raw, info.dtype).astype(np.float64))
    return np.stack(found)


def target_value_problems(target: ReadTarget, sample: int | None = None) -> list[Problem]:
    """Of the small tensors, and of `sample` large ones (0: all; None: none). Raises TrtspecError for a failing disk."""
    scalars: dict[str, float] = {}
    by_shard: dict[str, list[TensorInfo]] = {}
    for info in target.checkpoint.tensors.values():
        if 0 < info.nbytes <= SMALL:
            by_shard.setdefault(info.shard, []).append(info)
    with ThreadPoolExecutor(READERS) as pool:
        parts = pool.map(
            lambda infos: list(_small(target.checkpoint, infos, scalars)), by_shard.values()
        )
        found = [fault for part in parts for fault in part]
    found += [
        fault
        for info in _chosen(target.checkpoint, sample)
        for fault in _large(target.checkpoint, info)
    ]
    scaled = [module for module, format in target.formats.items() if format.is_fp4]
    found += [*_pairs(scaled, scalars), *_grid(scaled, scalars), *_inputs(scaled, scalars)]
    groups: dict[tuple[str, Severity], list[str]] = {}
    for code, severity, text in dict.fromkeys(found):  # a large tensor comes in pieces
        groups.setdefault((code, severity), []).append(text)
    return [grouped(code, names, severity) for (code, severity), names in groups.items()]


def _small(
    checkpoint: Checkpoint, infos: list[TensorInfo], scalars: dict[str, float]
) -> Iterator[Fault]:
    """Faults of one shard's small tensors; adds the scalars of NVFP4 linears to `scalars`."""
    with files.open_regular(checkpoint.path / infos[0].shard) as stream:
        for run in _runs(infos):
            begin = run[0].begin
            stream.seek(begin)
            raw = memoryview(stream.read(run[-1].end - begin))
            for info in run:
                data = raw[info.begin - begin : info.end - begin]
                module, _, suffix = info.name.rpartition(".")
                yield from _byte_faults(info, data)
                if suffix == "weight_shape":
                    packed = checkpoint.tensors.get(f"{module}.{WeightFormat.INT4.parts[0]}")
                    stated = (
                        decode(bytes(data), info.dtype).tolist()
                        if info.dtype in ("I64", "I32")
                        else []
                    )
                    if (
                        packed is not None
                        and len(packed.shape) == 2
                        and not _is_shape_of(packed.shape, stated)
                    ):
                        text = f"{info.name} is {stated}, the weight {list(packed.shape)}"
                        yield "TS-TARGET-WEIGHT-SHAPE", "error", text
                if (
                    suffix in ("weight_scale_2", "input_scale")
                    and info.dtype == "F32"
                    and info.numel == 1
                ):
                    scalars[info.name] = float(np.frombuffer(data, "<f4")[0])


def _runs(infos: list[TensorInfo]) -> Iterator[list[TensorInfo]]:
    """Neighbours in the file, read at once."""
    run: list[TensorInfo] = []
    for info in sorted(infos, key=lambda info: info.begin):
        if run and (info.begin - run[-1].end > GAP or info.end - run[0].begin > READ):
            yield run
            run = []
        run.append(info)
    if run:
        yield run


def _is_shape_of(packed: tuple[int, ...], stated: list[int]) -> bool:
    values = WeightFormat.INT4.values_per_element
    return len(stated) == 2 and stated[0] == packed[0] and -(-stated[1] // values) == packed[1]


def _byte_faults(info: TensorInfo, raw: memoryview) -> Iterator[Fault]:
    """NaN, infinity, scales that are none, and nothing but zeros. A zero is the scale of a group of zeros in floats."""
    if info.dtype not in (*FLOATS, "F8_E4M3"):
        return
    suffix, codes = (
        info.name.rpartition(".")[2],
        np.frombuffer(raw, f"<u{DTYPE_BITS[info.dtype] // 8}"),
    )
    scale, (bad, _) = suffix in SIDE_PARTS, count_not_finite(raw, info.dtype)
    if scale:
        sign = codes.dtype.type(1 << (8 * codes.dtype.itemsize - 1))
        zero = info.dtype in FLOATS and suffix in ("weight_scale", "weight_scale_inv")
        if bad or (codes & sign).any() or not (zero or codes.all()):
            yield "TS-TARGET-BAD-SCALE", "error", info.name
    elif bad:
        yield "TS-TARGET-NOT-FINITE", "error", info.name
    elif info.dtype in FLOATS and not suffix.endswith("bias") and not codes.any():
        yield _zero(info)


def _zero(info: TensorInfo) -> Fault:
    """Some published experts are never used and all zero; a norm of zeros silences the model."""
    return "TS-TARGET-ZERO", "error" if "norm" in info.name else "warning", info.name


def _chosen(checkpoint: Checkpoint, sample: int | None) -> list[TensorInfo]:
    """The same choice each time."""
    large = [info for info in checkpoint.tensors.values() if info.nbytes > SMALL]
    if sample is None:
        return []
    if sample == 0 or sample >= len(large):
        return large
    return random.Random(0).sample(large, sample)


def _large(checkpoint: Checkpoint, info: TensorInfo) -> Iterator[Fault]:
    zeros = True
    with ShardReader(checkpoint.path) as reader:
        for raw in reader.pieces(info, READ):
            zeros = zeros and not np.frombuffer(raw, np.uint8).any()
            if not zeros:
                yield from _byte_faults(info, raw)
    if zeros:
        yield _zero(info)


def _pairs(modules: list[str], scalars: dict[str, float]) -> Iterator[Fault]:
    """Engines compute linears of one input as one, with one weight_scale_2; the other scales as many are off."""
    for module in modules:
        for partner in shared_partners(module):
            for suffix, code in (
                ("weight_scale_2", "TS-TARGET-PAIR-SCALE"),
                ("input_scale", "TS-TARGET-PAIR-INPUT"),
            ):
                mine, theirs = scalars.get(f"{module}.{suffix}"), scalars.get(f"{partner}.{suffix}")
                if mine is not None and theirs is not None and mine != theirs and module < partner:
                    other = partner.rpartition(".")[2]
                    yield (
                        code,
                        "error",
                        f"{module}.{suffix} is {mine:.7g}, {other} has {theirs:.7g}",
                    )


def _grid(modules: list[str], scalars: dict[str, float]) -> Iterator[Fault]:
    """weight_scale_2 x 2688 is the largest of BF16 weights wherever the weights were BF16 when they were quantized."""
    scales = {
        name: scalars[name] for module in modules if (name := f"{module}.weight_scale_2") in scalars
    }
    off = {
        name: value * NVFP4_RANGE
        for name, value in scales.items()
        if not _is_bf16(value * NVFP4_RANGE)
    }
    if len(off) <= (1 - MOST) * len(scales):
        yield from (
            ("TS-TARGET-SCALE-2", "error", f"{name} x 2688 is {amax:.7g}")
            for name, amax in off.items()
        )


def _is_bf16(value: float) -> bool:
    if not 0 < value < BF16_MOST:
        return True  # reported as a bad scale
    bits = int(np.float32(value).view(np.uint32))
    nearest = np.uint32((bits + 0x8000) & 0xFFFF0000).view(np.float32)
    return bool(abs(float(nearest) - value) <= ON_GRID * value)


def _inputs(modules: list[str], scalars: dict[str, float]) -> Iterator[Fault]:
    """input_scale x 2688 is the largest activation; linears of one kind see similar ones in all layers."""
    kinds: dict[str, dict[str, float]] = {}
    for module in modules:
        name = f"{module}.input_scale"
        if 0 < scalars.get(name, 0.0) < float("inf"):
            kind = LAYER_NUMBER.sub(".", EXPERT_NUMBER.sub(".", module))
            kinds.setdefault(kind, {})[name] = scalars[name]
    for scales in kinds.values():
        median = statistics.median(scales.values())
        for name, value in scales.items():
            off = max(value / median, median / value)
            if value * NVFP4_RANGE > BF16_MOST or off >= FAR:
                severity: Severity = (
                    "error" if value * NVFP4_RANGE > BF16_MOST or off >= ABSURD else "warning"
                )
                text = f"{name} is {value:.3g}, the median of its kind {median:.3g}"
                yield "TS-TARGET-INPUT-SCALE", severity, text
