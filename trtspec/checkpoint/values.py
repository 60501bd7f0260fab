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
from dataclasses import dataclass, field, replace

import numpy as np

from trtspec import files
from trtspec.checkpoint.headers import DTYPE_BITS, NOT_FINITE_BITS, Checkpoint, ShardReader, TensorInfo
from trtspec.checkpoint.identity import recorded
from trtspec.checkpoint.target_problems import ReadTarget
from trtspec.checkpoint.target_tensors import EXPERT_NUMBER, LAYER_NUMBER, grouped, shared_partners
from trtspec.errors import Problem
from trtspec.formats import NVFP4_RANGE, SIDE_PARTS, WeightFormat
from trtspec.specs import HeadSpec, ModelSpec

FLOATS = ("BF16", "F16", "F32")
PIECE = 1 << 18  # bytes
PIECES = 64
MAP_DTYPES = {"d2t": ("I64", "I32"), "t2d": ("BOOL", "U8", "I8")}
WHOLE = 1 << 24  # a tensor up to this size is read entirely
KINDS = {"F16": "<f2", "F32": "<f4", "I64": "<i8", "I32": "<i4", "BOOL": "?", "U8": "u1", "I8": "i1"}
SMALL = 1 << 16  # bytes; a tensor up to this size is always read
READ = 1 << 23  # bytes of one read, and of a piece of a large tensor
GAP = 1 << 12  # bytes that are read along, because that is cheaper than another read
READERS = 8  # shards read side by side: each small read waits for the storage
BF16_MOST = 3.39e38
ON_GRID = 2.0**-22  # relative; a quotient of float32 and back is within 2^-23
MOST = 0.9  # of the linears follow a rule: the others break it
FAR, ABSURD = 1e3, 1e5  # times or parts of the median input_scale of the same kind of linear
NOT_FINITE, BAD_SCALE = "TS-TARGET-NOT-FINITE", "TS-TARGET-BAD-SCALE"
ZERO = "TS-TARGET-ZERO"  # a warning unless a norm is: some published experts are never used and all zero
WHAT = {
    NOT_FINITE: "tensors hold NaN or infinity",
    BAD_SCALE: "scales hold zero, a negative number, NaN or infinity",
    "TS-TARGET-WEIGHT-SHAPE": "recorded shapes are not those of the packed weights",
    ZERO: "tensors hold only zeros, as where a file was never filled",
}


def read_values(checkpoint: Checkpoint, info: TensorInfo) -> np.ndarray:
    """A small tensor's values as float32 or its own integers, read from its bytes without torch."""
    return decode(checkpoint.bytes_at(info.shard, info.begin, info.nbytes), info.dtype).reshape(info.shape)


def decode(raw: bytes, dtype: str) -> np.ndarray:
    """Bytes of a safetensors dtype as a flat array; BF16 becomes float32."""
    if dtype == "BF16":
        return (np.frombuffer(raw, "<u2").astype(np.uint32) << 16).view(np.float32)
    return np.frombuffer(raw, KINDS[dtype])


def count_not_finite(raw: bytes | memoryview, dtype: str) -> int:
    """How many values of BF16, F16 or F32 bytes are NaN or infinite."""
    return int(np.count_nonzero(_not_finite(_codes(raw, dtype), dtype)))


def _codes(raw: bytes | memoryview, dtype: str) -> np.ndarray:
    return np.frombuffer(raw, f"<u{DTYPE_BITS[dtype] // 8}")


def _not_finite(codes: np.ndarray, dtype: str) -> np.ndarray:
    mask, least = NOT_FINITE_BITS[dtype]
    return (codes & codes.dtype.type(mask)) >= least


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
                problems.append(Problem("TS-HEAD-ZERO", "error", name, message))
            elif digest and whole and found.hexdigest() != digest:
                message = "its bytes are not those that provenance.json notes: they changed since `trtspec convert`"
                problems.append(Problem("TS-HEAD-DIGEST", "error", name, message))
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
    return Problem("TS-HEAD-NOT-FINITE", "error", name, message)


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
        problems.append(Problem("TS-HEAD-T2D-VALUES", "error", "t2d", message))
    if spec.draft_vocab_size != spec.vocab_size and "lm_head.weight" in tensors:
        problems += _rows_by_offset(checkpoint, tensors["lm_head.weight"], offsets)
    return problems


def _map_dtype(name: str, info: TensorInfo) -> Problem | None:
    """A map of floats is cut to integers by some loaders and refused by others."""
    if info.dtype in MAP_DTYPES[name] and len(info.shape) == 1:
        return None
    message = f"{name} is stored as {info.dtype} {list(info.shape)}; loaders expect {' or '.join(MAP_DTYPES[name])}"
    remedy = f"store {name} as one {MAP_DTYPES[name][0]} for each token"
    return Problem("TS-HEAD-MAP-DTYPE", "error", name, message, remedy)


def _d2t(offsets: np.ndarray, spec: HeadSpec) -> Problem | None:
    """d2t holds offsets: draft token i is target token i + d2t[i], and those rise strictly within the vocabulary."""
    targets = np.arange(len(offsets)) + offsets
    if len(offsets) < spec.vocab_size and len(offsets) == spec.draft_vocab_size and not offsets.any():
        message = f"d2t holds nothing but zeros: the draft tokens would be the first {len(offsets):,} ids"
        return Problem("TS-HEAD-D2T-ZERO", "error", "d2t", message)
    inside = len(targets) == 0 or (targets.min() >= 0 and targets.max() < spec.vocab_size)
    if len(offsets) == spec.draft_vocab_size and inside and bool(np.all(np.diff(targets) > 0)):
        return None
    absolute = len(offsets) and bool(np.all(np.diff(offsets) > 0)) and offsets.max() < spec.vocab_size
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
    message = "draft tokens with the same offset have the same lm_head row: the rows were taken by offset, not by token"
    return [Problem("TS-HEAD-LM-HEAD-ROWS", "error", "lm_head.weight", message)]


def embedding_problems(head: Checkpoint, own: TensorInfo, target: Checkpoint, spec: ModelSpec) -> list[Problem]:
    """A head's own embedding against its target's, by 64 rows: equal, trained on, or not related at all."""
    theirs = target.tensors.get(f"{spec.name_prefix}model.embed_tokens.weight")
    if theirs is None or theirs.shape != own.shape or {own.dtype, theirs.dtype} - set(FLOATS):
        return []
    rows = embedding_rows(own.shape[0])
    return compare_embeddings(_rows(head, own, rows), _rows(target, theirs, rows))


def embedding_rows(count: int) -> np.ndarray:
    """The rows of an embedding of `count` tokens, a sample of all."""
    return np.linspace(0, count - 1, min(64, count)).astype(int)


def compare_embeddings(ours: np.ndarray, theirs: np.ndarray) -> list[Problem]:
    """The same rows of a head's and a target's embedding, [N, H]; NaN and infinity are for `head_value_problems`."""
    if np.array_equal(ours, theirs) or not np.isfinite(ours).all():
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


@dataclass
class _Seen:
    """Faults by code, and the scalars of NVFP4 linears."""

    faults: dict[str, list[str]] = field(default_factory=lambda: {code: [] for code in WHAT})
    scalars: dict[str, float] = field(default_factory=dict)


def target_value_problems(target: ReadTarget, sample: int | None = None) -> list[Problem]:
    """Of the small tensors, and of `sample` large ones (0: all; None: none). Raises TrtspecError for a failing disk."""
    seen = _Seen()
    by_shard: dict[str, list[TensorInfo]] = {}
    for info in target.checkpoint.tensors.values():
        if 0 < info.nbytes <= SMALL:
            by_shard.setdefault(info.shard, []).append(info)
    with ThreadPoolExecutor(READERS) as pool:
        for found in pool.map(lambda infos: _read_small(target.checkpoint, infos), by_shard.values()):
            for code, names in found.faults.items():
                seen.faults[code] += names
            seen.scalars |= found.scalars
    for info in _chosen(target.checkpoint, sample):
        _judge_large(target.checkpoint, info, seen)
    problems = [grouped(code, names, WHAT[code]) for code, names in seen.faults.items() if names]
    norm = any("norm" in name for name in seen.faults[ZERO])  # without one the model is silent: never an unused expert
    problems = [replace(one, severity="warning") if one.code == ZERO and not norm else one for one in problems]
    scaled = [module for module, format in target.formats.items() if format.is_fp4]
    if scaled:
        for judge in (_pairs, _grid, _inputs):
            problems += judge(scaled, seen.scalars)
    return problems


def _read_small(checkpoint: Checkpoint, infos: list[TensorInfo]) -> _Seen:
    seen = _Seen()
    with files.open_regular(checkpoint.path / infos[0].shard) as stream:
        for run in _runs(infos):
            begin = run[0].begin
            stream.seek(begin)
            raw = memoryview(stream.read(run[-1].end - begin))
            for info in run:
                _judge_small(checkpoint, info, raw[info.begin - begin : info.end - begin], seen)
    return seen


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


def _judge_small(checkpoint: Checkpoint, info: TensorInfo, raw: memoryview, seen: _Seen) -> None:
    module, _, suffix = info.name.rpartition(".")
    if suffix == "weight_shape":
        packed = checkpoint.tensors.get(f"{module}.{WeightFormat.INT4.parts[0]}")
        stated = decode(bytes(raw), info.dtype).tolist() if info.dtype in ("I64", "I32") else None
        if packed is not None and len(packed.shape) == 2 and (stated is None or not _holds(packed.shape, stated)):
            seen.faults["TS-TARGET-WEIGHT-SHAPE"].append(f"{info.name} is {stated}, the weight {list(packed.shape)}")
        return
    _judge_bytes(info, raw, seen)
    if suffix in ("weight_scale_2", "input_scale") and info.dtype == "F32" and info.numel == 1:
        seen.scalars[info.name] = float(np.frombuffer(raw, "<f4")[0])


def _holds(packed: tuple[int, ...], stated: list[int]) -> bool:
    values = WeightFormat.INT4.values_per_element
    return len(stated) == 2 and stated[0] == packed[0] and -(-stated[1] // values) == packed[1]


def _judge_bytes(info: TensorInfo, raw: memoryview | bytes, seen: _Seen) -> None:
    """NaN, infinity, scales that are none, and nothing but zeros."""
    suffix = info.name.rpartition(".")[2]
    scale = suffix in SIDE_PARTS and suffix != "weight_shape"
    if info.dtype == "F8_E4M3":
        codes = np.frombuffer(raw, "u1")
        bad = _not_finite(codes, info.dtype)
        if scale:
            bad |= (codes == 0) | (codes >= 0x80)
        if bad.any():
            _note(seen, BAD_SCALE if scale else NOT_FINITE, info.name)
        return
    if info.dtype not in FLOATS:
        return
    codes = _codes(raw, info.dtype)
    if _not_finite(codes, info.dtype).any():
        _note(seen, BAD_SCALE if scale else NOT_FINITE, info.name)
    elif scale and not _positive(codes, zero=suffix in ("weight_scale", "weight_scale_inv")):
        _note(seen, BAD_SCALE, info.name)
    elif not codes.any() and not scale and not suffix.endswith("bias"):
        _note(seen, ZERO, info.name)


def _note(seen: _Seen, code: str, name: str) -> None:
    if name not in seen.faults[code][-1:]:  # a large tensor comes in pieces
        seen.faults[code].append(name)


def _positive(codes: np.ndarray, zero: bool) -> bool:
    """Whether no sign bit is set; a zero is the scale of a group of zeros, and of nothing else."""
    sign = 1 << (8 * codes.dtype.itemsize - 1)
    return not ((codes & sign) != 0).any() and (zero or bool(codes.all()))


def _chosen(checkpoint: Checkpoint, sample: int | None) -> list[TensorInfo]:
    """The same choice each time."""
    large = [info for info in checkpoint.tensors.values() if info.nbytes > SMALL]
    if sample is None or sample == 0 or sample >= len(large):
        return [] if sample is None else large
    return random.Random(0).sample(large, sample)


def _judge_large(checkpoint: Checkpoint, info: TensorInfo, seen: _Seen) -> None:
    zeros = True
    with files.open_regular(checkpoint.path / info.shard) as stream:
        stream.seek(info.begin)
        for first in range(0, info.nbytes, READ):
            raw = stream.read(min(READ, info.nbytes - first))
            zeros = zeros and not raw.strip(b"\0")
            if not zeros:
                _judge_bytes(info, raw, seen)
    if zeros:
        _note(seen, ZERO, info.name)


def _pairs(modules: list[str], scalars: dict[str, float]) -> Iterator[Problem]:
    """Engines compute linears of one input as one, with one weight_scale_2; the other scales as many are off."""
    weights: list[str] = []
    inputs: list[str] = []
    for module in modules:
        for partner in shared_partners(module):
            for suffix, names in (("weight_scale_2", weights), ("input_scale", inputs)):
                mine, theirs = scalars.get(f"{module}.{suffix}"), scalars.get(f"{partner}.{suffix}")
                if mine is not None and theirs is not None and mine != theirs and module < partner:
                    names.append(f"{module}.{suffix} is {mine:.7g}, {partner.rpartition('.')[2]} has {theirs:.7g}")
    if weights:
        what = "linears that engines compute as one have different weight_scale_2"
        yield grouped("TS-TARGET-PAIR-SCALE", weights, what)
    if inputs:
        what = "linears of one input have different input_scale"
        yield grouped("TS-TARGET-PAIR-INPUT", inputs, what)


def _grid(modules: list[str], scalars: dict[str, float]) -> Iterator[Problem]:
    """weight_scale_2 x 2688 is the largest of BF16 weights wherever the weights were BF16 when they were quantized."""
    scales = {name: scalars[name] for module in modules if (name := f"{module}.weight_scale_2") in scalars}
    off = {name: value * NVFP4_RANGE for name, value in scales.items() if not _is_bf16(value * NVFP4_RANGE)}
    if not off or len(off) > (1 - MOST) * len(scales):
        return
    names = [f"{name} x 2688 is {amax:.7g}" for name, amax in off.items()]
    what = f"scales are not the maximum of BF16 weights, as those of {len(scales) - len(off):,} other linears are"
    yield grouped("TS-TARGET-SCALE-2", names, what)


def _is_bf16(value: float) -> bool:
    if not 0 < value < BF16_MOST:
        return True  # reported as a bad scale
    bits = int(np.float32(value).view(np.uint32))
    nearest = np.uint32((bits + 0x8000) & 0xFFFF0000).view(np.float32)
    return bool(abs(float(nearest) - value) <= ON_GRID * value)


def _inputs(modules: list[str], scalars: dict[str, float]) -> Iterator[Problem]:
    """input_scale x 2688 is the largest activation; linears of one kind see similar ones in all layers."""
    kinds: dict[str, dict[str, float]] = {}
    for module in modules:
        name = f"{module}.input_scale"
        if 0 < scalars.get(name, 0.0) < float("inf"):
            kind = LAYER_NUMBER.sub(".", EXPERT_NUMBER.sub(".", module))
            kinds.setdefault(kind, {})[name] = scalars[name]
    absurd: list[str] = []
    far: list[str] = []
    for scales in kinds.values():
        median = statistics.median(scales.values())
        for name, value in scales.items():
            ratio = value / median
            text = f"{name} is {value:.3g}, the median of its kind {median:.3g}"
            if value * NVFP4_RANGE > BF16_MOST or not 1 / ABSURD < ratio < ABSURD:
                absurd.append(text)
            elif not 1 / FAR < ratio < FAR:
                far.append(text)
    if absurd:
        yield grouped("TS-TARGET-INPUT-SCALE", absurd, "input_scale is implausible")
    if far:
        found = grouped("TS-TARGET-INPUT-SCALE", far, "input_scale is far from that in other layers")
        yield replace(found, severity="warning")
