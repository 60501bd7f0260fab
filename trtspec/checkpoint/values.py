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
from trtspec.families.family import Family
from trtspec.formats import NVFP4_RANGE, SIDE_PARTS, WeightFormat, stored_format
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
    theirs = target.tensors.get(f"{spec.family.prefix}model.embed_tokens.weight")
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
    scales: Scales = {"weight_scale_2": {}, "input_scale": {}}
    by_shard: dict[str, list[TensorInfo]] = {}
    for info in target.checkpoint.tensors.values():
        if 0 < info.nbytes <= SMALL:
            by_shard.setdefault(info.shard, []).append(info)
    with ThreadPoolExecutor(READERS) as pool:
        parts = pool.map(
            lambda infos: list(_small(target.checkpoint, infos, scales)), by_shard.values()
        )
        found = [fault for part in parts for fault in part]
    found += [
        fault
        for info in _chosen(target.checkpoint, sample)
        for fault in _large(target.checkpoint, info)
    ]
    scaled = [module for module, format in target.formats.items() if format.is_fp4]
    ours = {suffix: {m: v[m] for m in scaled if m in v} for suffix, v in scales.items()}
    found += [
        *_pairs(ours, target.spec.family),
        *_grid(ours["weight_scale_2"]),
        *_inputs(ours["input_scale"]),
    ]
    groups: dict[tuple[str, Severity], list[str]] = {}
    for code, severity, text in dict.fromkeys(found):  # a large tensor comes in pieces
        groups.setdefault((code, severity), []).append(text)
    return [grouped(code, names, severity) for (code, severity), names in groups.items()]


Scales = dict[str, dict[str, float]]  # suffix -> module -> the one number of that tensor
Alike = dict[tuple[str, str, int], list[tuple[TensorInfo, bytes]]]


def _small(checkpoint: Checkpoint, infos: list[TensorInfo], scales: Scales) -> Iterator[Fault]:
    """Faults of one shard's small tensors; adds the scalars of NVFP4 linears to `scales`."""
    alike: Alike = {}
    size = 0
    with files.open_regular(checkpoint.path / infos[0].shard) as stream:
        for run in _runs(infos):
            begin = run[0].begin
            stream.seek(begin)
            raw = stream.read(run[-1].end - begin)
            for info in run:
                key = (info.name.rpartition(".")[2], info.dtype, info.nbytes)
                entry = (info, raw[info.begin - begin : info.end - begin])
                alike.setdefault(key, []).append(entry)
            size += len(raw)
            if size > READ:
                yield from _alike_faults(checkpoint, alike, scales)
                alike, size = {}, 0
    yield from _alike_faults(checkpoint, alike, scales)


def _alike_faults(checkpoint: Checkpoint, alike: Alike, scales: Scales) -> Iterator[Fault]:
    """Tensors of one suffix, dtype and size are judged together."""
    for (suffix, dtype, nbytes), entries in alike.items():
        infos = [info for info, _ in entries]
        raw = np.frombuffer(b"".join(data for _, data in entries), np.uint8).reshape(-1, nbytes)
        yield from byte_faults(infos, raw)
        if suffix == "weight_shape":
            values = raw.view(KINDS[dtype]) if dtype in ("I64", "I32") else raw[:, :0]
            for info, stated in zip(infos, values.tolist(), strict=True):
                module = info.name.removesuffix(f".{suffix}")
                format = stored_format(checkpoint.tensors, module)
                packed = checkpoint.tensors.get(f"{module}.{format.parts[0]}")
                if packed and len(packed.shape) == 2 and not _is_shape_of(packed, stated, format):
                    text = f"{info.name} is {stated}, the weight {list(packed.shape)}"
                    yield "TS-TARGET-WEIGHT-SHAPE", "error", text
        if suffix in ("weight_scale_2", "input_scale") and (dtype, nbytes) == ("F32", 4):
            numbers = zip(infos, raw.view("<f4")[:, 0].tolist(), strict=True)
            scales[suffix] |= {info.name[: -len(suffix) - 1]: value for info, value in numbers}


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


def _is_shape_of(packed: TensorInfo, stated: list[int], format: WeightFormat) -> bool:
    rows, elements = packed.shape
    values = format.values_per_element
    return len(stated) == 2 and stated[0] == rows and -(-stated[1] // values) == elements


def byte_faults(infos: list[TensorInfo], raw: np.ndarray) -> Iterator[Fault]:
    """NaN, infinity, invalid scales, all-zero tensors, in bytes [tensors, size] of one suffix and dtype.

    A zero float scale is valid: its group is all zeros.
    """
    name, dtype = infos[0].name, infos[0].dtype
    if dtype not in (*FLOATS, "F8_E4M3"):
        return
    suffix, (mask, least) = name.rpartition(".")[2], NOT_FINITE_BITS[dtype]
    scale = suffix in SIDE_PARTS
    codes = raw.view(f"<u{DTYPE_BITS[dtype] // 8}")
    bad = (codes & codes.dtype.type(mask)).max(1) >= least
    if scale:
        bad |= (codes > mask).any(1)  # negative
        if dtype not in FLOATS or suffix not in ("weight_scale", "weight_scale_inv"):
            bad |= ~codes.all(1)
    code = "TS-TARGET-BAD-SCALE" if scale else "TS-TARGET-NOT-FINITE"
    yield from ((code, "error", infos[index].name) for index in np.flatnonzero(bad))
    if not scale and dtype in FLOATS and not suffix.endswith("bias"):
        yield from (_zero(infos[index]) for index in np.flatnonzero(~codes.any(1)))


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
        for piece in reader.pieces(info, PIECE):
            raw = np.frombuffer(piece, np.uint8)
            zeros = zeros and not raw.any()
            if not zeros:
                yield from byte_faults([info], raw[None])
    if zeros:
        yield _zero(info)


def _pairs(scales: Scales, family: Family) -> Iterator[Fault]:
    """Engines compute linears of one input as one, with one weight_scale_2; the other scales as many are off."""
    for suffix, code in (
        ("weight_scale_2", "TS-TARGET-PAIR-SCALE"),
        ("input_scale", "TS-TARGET-PAIR-INPUT"),
    ):
        for module, mine in scales[suffix].items():
            for partner in family.partners(module):
                theirs = scales[suffix].get(partner, mine)
                if mine != theirs and module < partner:
                    other = partner.rpartition(".")[2]
                    text = f"{module}.{suffix} is {mine:.7g}, {other} has {theirs:.7g}"
                    yield code, "error", text


def _grid(scales: dict[str, float]) -> Iterator[Fault]:
    """weight_scale_2 x 2688 is the largest of BF16 weights wherever the weights were BF16 when they were quantized."""
    amax = np.array(list(scales.values())) * NVFP4_RANGE
    inside = (amax > 0) & (amax < BF16_MOST)  # else reported as a bad scale
    bits = np.where(inside, amax, 0).astype(np.float32).view(np.uint32)
    nearest = (bits + np.uint32(0x8000) & np.uint32(0xFFFF0000)).view(np.float32)
    off = np.flatnonzero(inside & (abs(nearest - amax) > ON_GRID * amax))
    if len(off) <= (1 - MOST) * len(scales):
        modules = list(scales)
        for index in off:
            text = f"{modules[index]}.weight_scale_2 x 2688 is {amax[index]:.7g}"
            yield "TS-TARGET-SCALE-2", "error", text


def _inputs(scales: dict[str, float]) -> Iterator[Fault]:
    """input_scale x 2688 is the largest activation; linears of one kind see similar ones in all layers."""
    kinds: dict[str, dict[str, float]] = {}
    for module, value in scales.items():
        if 0 < value < float("inf"):
            kind = LAYER_NUMBER.sub(".", EXPERT_NUMBER.sub(".", module))
            kinds.setdefault(kind, {})[module] = value
    for alike in kinds.values():
        median = statistics.median(alike.values())
        for module, value in alike.items():
            off = max(value / median, median / value)
            beyond = value * NVFP4_RANGE > BF16_MOST
            if beyond or off >= FAR:
                severity: Severity = "error" if beyond or off >= ABSURD else "warning"
                text = f"{module}.input_scale is {value:.3g}, the median of its kind {median:.3g}"
                yield "TS-TARGET-INPUT-SCALE", severity, text
