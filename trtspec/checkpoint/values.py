"""Checks the values of a head's and of a target's tensors, read in numpy without torch.

In a head: NaN and infinity, vocabulary maps, lm_head rows. Reading a whole head takes seconds per
GB, so large tensors are read in chunks unless all is asked for. In a target: every small tensor
(scales, norms, router biases), and a sample of large ones. Without its source, a value can be
judged only by rules that all exporters have in common: scales are positive, gate and up share one,
and `weight_scale_2` is the largest magnitude of BF16 weights over 2688, so that 2688 times it is a
BF16 number again.
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
CHUNK_BYTES = 1 << 18
SAMPLED_CHUNKS = 64
MAP_DTYPES = {"d2t": ("I64", "I32"), "t2d": ("BOOL", "U8", "I8")}
WHOLE_BYTES = 1 << 24  # a tensor up to this size is read entirely
NUMPY_DTYPES = {
    "F16": "<f2",
    "F32": "<f4",
    "I64": "<i8",
    "I32": "<i4",
    "BOOL": "?",
    "U8": "u1",
    "I8": "i1",
}
SMALL_BYTES = 1 << 16  # a tensor up to this size is always read
READ_BYTES = 1 << 23  # of one read, and of a chunk of a large tensor
GAP_BYTES = 1 << 12  # that are read along, because that is cheaper than another read
READERS = 8  # shards read side by side: each small read waits for the storage
BF16_MAX = 3.39e38
GRID_TOLERANCE = 2.0**-22  # relative; a quotient of float32 and back is within 2^-23
RULE_SHARE = 0.9  # of the linears follow a rule: the others break it
# Times or parts of the median input_scale of the same class of linear.
FAR = 1e3
ABSURD = 1e5
# Code, severity, and the tensor or a sentence that begins with it.
Fault = tuple[str, Severity, str]


def read_values(checkpoint: Checkpoint, info: TensorInfo) -> np.ndarray:
    """A small tensor's values as float32 or its own integers, in its shape."""
    raw = checkpoint.bytes_at(info.shard, info.begin, info.nbytes)
    return decode(raw, info.dtype).reshape(info.shape)


def decode(raw: bytes, dtype: str) -> np.ndarray:
    """Bytes of a safetensors dtype as a flat array. BF16 becomes float32."""
    if dtype == "BF16":
        return (np.frombuffer(raw, "<u2").astype(np.uint32) << 16).view(np.float32)
    return np.frombuffer(raw, NUMPY_DTYPES[dtype])


def count_not_finite(raw: memoryview | np.ndarray, dtype: str) -> tuple[int, int | None]:
    """(number of NaN and infinite values, index of the first).

    (0, None) if all values are finite or the safetensors dtype has no others.
    """
    count = 0
    first: int | None = None
    if dtype in NOT_FINITE_BITS:
        mask, least = NOT_FINITE_BITS[dtype]
        codes = np.frombuffer(raw, f"<u{DTYPE_BITS[dtype] // 8}")
        for begin in range(0, codes.size, CACHED):
            magnitudes = codes[begin : begin + CACHED] & codes.dtype.type(mask)
            if magnitudes.max() >= least:
                bad = magnitudes >= least
                if first is None:
                    first = begin + int(bad.argmax())
                count += int(np.count_nonzero(bad))
    return count, first


def head_value_problems(
    checkpoint: Checkpoint, tensors: dict[str, TensorInfo], *, everything: bool = False
) -> list[Problem]:
    """One problem for each tensor with NaN, infinity, only zeros, or another digest than noted.

    provenance.json notes digests. Large tensors are sampled unless `everything`. An embedding of
    zeros is left to the comparison with the target's.
    """
    problems = []
    digests = noted_digests(checkpoint)
    with ShardReader(checkpoint.path) as reader:
        for name, info in tensors.items():
            nbytes = info.nbytes
            digest = digests.get(info.name)
            floats = info.dtype in FLOATS and name not in MAP_DTYPES
            if not nbytes or not (floats or digest):
                continue
            whole = everything or nbytes <= WHOLE_BYTES
            sha256 = hashlib.sha256()
            bad = 0
            seen = 0
            zero = not name.startswith("embed_tokens")
            chunks = reader.pieces(info, 4 * CHUNK_BYTES) if whole else _sampled(reader, info)
            for chunk in chunks:
                if floats:
                    bad += count_not_finite(chunk, info.dtype)[0]
                zero = zero and not bytes(chunk).strip(b"\x00\x80")  # 0x80: the sign of -0.0
                seen += len(chunk)
                if digest:
                    sha256.update(chunk)
            values = seen * info.numel // nbytes
            if bad:
                problems.append(not_finite(name, bad, values))
            elif zero and floats:
                problems.append(finding("TS-HEAD-ZERO", name))
            elif digest and whole and sha256.hexdigest() != digest:
                problems.append(finding("TS-HEAD-DIGEST", name))
    return problems


def noted_digests(checkpoint: Checkpoint) -> dict[str, str]:
    """SHA-256 by tensor as provenance.json notes it. {} without notes."""
    entries = recorded(checkpoint.path).get("tensors")
    digests: dict[str, str] = {}
    if isinstance(entries, dict):
        for name, entry in entries.items():
            if isinstance(entry, dict) and entry.get("sha256"):
                digests[name] = str(entry["sha256"])
    return digests


def not_finite(name: str, bad: int, seen: int) -> Problem:
    """The problem of a tensor with `bad` values among those `seen`."""
    message = f"{bad:,} of {seen:,} values looked at are NaN or infinite"
    if bad == seen:
        message += "; the tensor was never filled (speculators starts unloaded weights as NaN)"
    return Problem("TS-HEAD-NOT-FINITE", "error", name, message)


def _sampled(reader: ShardReader, info: TensorInfo) -> Iterator[memoryview]:
    """Yields evenly spread chunks of a large tensor. Each is overwritten by the next."""
    buffer = memoryview(bytearray(CHUNK_BYTES))
    step = (info.nbytes - CHUNK_BYTES) // (SAMPLED_CHUNKS - 1) // 64 * 64
    for number in range(SAMPLED_CHUNKS):
        reader.read_bytes(info, info.begin + number * step, buffer)
        yield buffer


def vocabulary_values(
    checkpoint: Checkpoint, tensors: dict[str, TensorInfo], spec: HeadSpec
) -> list[Problem]:
    """Compares d2t, t2d and the rows of lm_head with each other."""
    maps = {name: tensors[name] for name in MAP_DTYPES if name in tensors}
    # A map of floats is cut to integers by some loaders and refused by others.
    wrong = [
        name
        for name, info in maps.items()
        if info.dtype not in MAP_DTYPES[name] or len(info.shape) != 1
    ]
    problems = [finding("TS-HEAD-MAP-DTYPE", name) for name in wrong]
    if problems:
        return problems
    sizes = {
        "d2t": spec.draft_vocab_size,
        "t2d": spec.vocab_size,
        "lm_head.weight": spec.draft_vocab_size,
    }
    if "d2t" not in tensors:
        return []
    for name, size in sizes.items():
        if name in tensors and tensors[name].shape[0] != size:
            return []
    offsets = read_values(checkpoint, tensors["d2t"])
    problem = _d2t(offsets, spec)
    if problem is not None:
        return [problem]
    targets = np.arange(len(offsets)) + offsets
    if "t2d" in tensors:
        marked = np.flatnonzero(read_values(checkpoint, tensors["t2d"]))
        if not np.array_equal(marked, targets):
            problems.append(finding("TS-HEAD-T2D-VALUES", "t2d"))
    if spec.is_pruned and "lm_head.weight" in tensors:
        problems += _rows_by_offset(checkpoint, tensors["lm_head.weight"], offsets)
    return problems


def _d2t(offsets: np.ndarray, spec: HeadSpec) -> Problem | None:
    """A problem if d2t does not hold offsets, else None.

    Draft token i is target token i + d2t[i]. The target tokens rise strictly in the vocabulary.
    """
    count = len(offsets)
    complete = count == spec.draft_vocab_size
    targets = np.arange(count) + offsets
    if count < spec.vocab_size and complete and not offsets.any():
        return finding("TS-HEAD-D2T-ZERO", "d2t")
    inside = count == 0 or (targets.min() >= 0 and targets.max() < spec.vocab_size)
    if complete and inside and bool(np.all(np.diff(targets) > 0)):
        return None
    message = "d2t does not map the draft tokens to rising target tokens"
    if count and bool(np.all(np.diff(offsets) > 0)) and offsets.max() < spec.vocab_size:
        message += "; its values look like target ids where offsets are expected"
    return Problem("TS-HEAD-D2T-VALUES", "error", "d2t", message)


def _rows_by_offset(checkpoint: Checkpoint, info: TensorInfo, offsets: np.ndarray) -> list[Problem]:
    """A problem if lm_head has row d2t[i] of the full one, as TorchSpec prunes it.

    The right row is i + d2t[i]. In the wrong ones equal offsets mean equal rows.
    """
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
    head: Checkpoint, info: TensorInfo, target: Checkpoint, spec: ModelSpec
) -> list[Problem]:
    """Compares a head's own embedding with its target's by 64 rows.

    It is equal, trained on, or not related at all.
    """
    theirs = target.tensors.get(f"{spec.family.prefix}model.embed_tokens.weight")
    if theirs is None or theirs.shape != info.shape or {info.dtype, theirs.dtype} - set(FLOATS):
        return []
    rows = embedding_rows(info.shape[0])
    return compare_embeddings(_rows(head, info, rows), _rows(target, theirs, rows))


def embedding_rows(count: int) -> np.ndarray:
    """The rows of an embedding of `count` tokens, a sample of all."""
    return np.linspace(0, count - 1, min(64, count)).astype(int)


# Storing the same number in another type changes it by this much.
BF16_STEP = 2.0**-8
FP16_MIN = 2.0**-24


def compare_embeddings(ours: np.ndarray, theirs: np.ndarray) -> list[Problem]:
    """Compares the same rows of a head's and a target's embedding, [N, H].

    NaN and infinity are left to `head_value_problems`.
    """
    if not np.isfinite(ours).all() or np.allclose(ours, theirs, rtol=BF16_STEP, atol=FP16_MIN):
        return []
    lengths = np.linalg.norm(ours, axis=1) * np.linalg.norm(theirs, axis=1)
    cosine = float(np.median((ours * theirs).sum(1) / np.maximum(lengths, 1e-30)))
    readers = "vLLM drafts with it, TensorRT-LLM and SGLang with the target's"
    if not cosine >= 0.5:
        relation = f"has nothing to do with the target's (median cosine {cosine:.2f})"
        message = f"the head's embedding {relation}; {readers}"
        return [Problem("TS-PAIR-EMBED-RANDOM", "error", "embed_tokens.weight", message)]
    relation = f"was trained on from the target's (median cosine {cosine:.4f})"
    message = f"the head's embedding {relation}; {readers}"
    return [Problem("TS-PAIR-EMBED-TRAINED", "warning", "embed_tokens.weight", message)]


def _rows(checkpoint: Checkpoint, info: TensorInfo, rows: np.ndarray) -> np.ndarray:
    """Rows of a stored embedding as float64, [N, H]."""
    width = info.nbytes // info.shape[0]
    values = []
    for row in rows:
        raw = checkpoint.bytes_at(info.shard, info.begin + int(row) * width, width)
        values.append(decode(raw, info.dtype).astype(np.float64))
    return np.stack(values)


def target_value_problems(target: ReadTarget, sample: int | None = None) -> list[Problem]:
    """Problems of the small tensors, and of `sample` large ones (0: all, None: none).

    Raises TrtspecError for a failing disk.
    """
    checkpoint = target.checkpoint
    scales: Scales = {"weight_scale_2": {}, "input_scale": {}}
    by_shard: dict[str, list[TensorInfo]] = {}
    for info in checkpoint.tensors.values():
        if 0 < info.nbytes <= SMALL_BYTES:
            by_shard.setdefault(info.shard, []).append(info)
    faults: list[Fault] = []
    with ThreadPoolExecutor(READERS) as pool:
        for shard_faults in pool.map(
            lambda infos: list(_small(checkpoint, infos, scales)), by_shard.values()
        ):
            faults += shard_faults
    for info in _chosen(checkpoint, sample):
        faults += _large(checkpoint, info)
    scaled = [module for module, format in target.formats.items() if format.is_fp4]
    ours: Scales = {}
    for suffix, values in scales.items():
        ours[suffix] = {module: values[module] for module in scaled if module in values}
    faults += _pairs(ours, target.spec.family)
    faults += _grid(ours["weight_scale_2"])
    faults += _inputs(ours["input_scale"])
    groups: dict[tuple[str, Severity], list[str]] = {}
    for code, severity, text in dict.fromkeys(faults):  # a large tensor comes in chunks
        groups.setdefault((code, severity), []).append(text)
    return [grouped(code, names, severity) for (code, severity), names in groups.items()]


Scales = dict[str, dict[str, float]]  # suffix -> module -> the one number of that tensor
Alike = dict[tuple[str, str, int], list[tuple[TensorInfo, bytes]]]


def _small(checkpoint: Checkpoint, infos: list[TensorInfo], scales: Scales) -> Iterator[Fault]:
    """Yields faults of one shard's small tensors. Adds the scalars of NVFP4 linears to `scales`."""
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
            if size > READ_BYTES:
                yield from _alike_faults(checkpoint, alike, scales)
                alike = {}
                size = 0
    yield from _alike_faults(checkpoint, alike, scales)


def _alike_faults(checkpoint: Checkpoint, alike: Alike, scales: Scales) -> Iterator[Fault]:
    """Yields faults of tensors. Tensors of one suffix, dtype and size are checked together."""
    for (suffix, dtype, nbytes), entries in alike.items():
        infos = [info for info, _ in entries]
        data = b"".join(stored for _, stored in entries)
        raw = np.frombuffer(data, np.uint8).reshape(-1, nbytes)
        yield from byte_faults(infos, raw)
        if suffix == "weight_shape":
            values = raw.view(NUMPY_DTYPES[dtype]) if dtype in ("I64", "I32") else raw[:, :0]
            for info, stated in zip(infos, values.tolist(), strict=True):
                module = info.name.removesuffix(f".{suffix}")
                format = stored_format(checkpoint.tensors, module)
                packed = checkpoint.tensors.get(f"{module}.{format.parts[0]}")
                if packed and len(packed.shape) == 2 and not _is_shape_of(packed, stated, format):
                    text = f"{info.name} is {stated}, the weight {list(packed.shape)}"
                    yield "TS-TARGET-WEIGHT-SHAPE", "error", text
        if suffix in ("weight_scale_2", "input_scale") and (dtype, nbytes) == ("F32", 4):
            numbers = raw.view("<f4")[:, 0].tolist()
            for info, number in zip(infos, numbers, strict=True):
                scales[suffix][info.name.removesuffix(f".{suffix}")] = number


def _runs(infos: list[TensorInfo]) -> Iterator[list[TensorInfo]]:
    """Yields neighbours in the file, which are read at once."""
    run: list[TensorInfo] = []
    for info in sorted(infos, key=lambda info: info.begin):
        if run and (info.begin - run[-1].end > GAP_BYTES or info.end - run[0].begin > READ_BYTES):
            yield run
            run = []
        run.append(info)
    if run:
        yield run


def _is_shape_of(packed: TensorInfo, stated: list[int], format: WeightFormat) -> bool:
    """Whether the `stated` shape is the shape of the values in a packed weight."""
    rows, elements = packed.shape
    values = format.values_per_element
    return len(stated) == 2 and stated[0] == rows and -(-stated[1] // values) == elements


def byte_faults(infos: list[TensorInfo], raw: np.ndarray) -> Iterator[Fault]:
    """Yields NaN, infinity, invalid scales and all-zero tensors.

    `raw`: bytes [tensors, size] of one suffix and dtype. A zero float scale is valid: its group is
    all zeros.
    """
    dtype = infos[0].dtype
    if dtype not in (*FLOATS, "F8_E4M3"):
        return
    suffix = infos[0].name.rpartition(".")[2]
    is_scale = suffix in SIDE_PARTS
    mask, least = NOT_FINITE_BITS[dtype]
    codes = raw.view(f"<u{DTYPE_BITS[dtype] // 8}")
    bad = (codes & codes.dtype.type(mask)).max(1) >= least
    if is_scale:
        bad |= (codes > mask).any(1)  # negative
        if dtype not in FLOATS or suffix not in ("weight_scale", "weight_scale_inv"):
            bad |= ~codes.all(1)
    code = "TS-TARGET-BAD-SCALE" if is_scale else "TS-TARGET-NOT-FINITE"
    for index in np.flatnonzero(bad):
        yield code, "error", infos[index].name
    if not is_scale and dtype in FLOATS and not suffix.endswith("bias"):
        for index in np.flatnonzero(~codes.any(1)):
            yield _zero(infos[index])


def _zero(info: TensorInfo) -> Fault:
    """The fault of an all-zero tensor.

    Some published experts are never used and all zero. A norm of zeros silences the model.
    """
    severity: Severity = "error" if "norm" in info.name else "warning"
    return "TS-TARGET-ZERO", severity, info.name


def _chosen(checkpoint: Checkpoint, sample: int | None) -> list[TensorInfo]:
    """The large tensors to read: the same choice each time."""
    large = [info for info in checkpoint.tensors.values() if info.nbytes > SMALL_BYTES]
    if sample is None:
        return []
    if sample == 0 or sample >= len(large):
        return large
    return random.Random(0).sample(large, sample)


def _large(checkpoint: Checkpoint, info: TensorInfo) -> Iterator[Fault]:
    """Yields faults of one large tensor."""
    zeros = True
    with ShardReader(checkpoint.path) as reader:
        for chunk in reader.pieces(info, CHUNK_BYTES):
            raw = np.frombuffer(chunk, np.uint8)
            zeros = zeros and not raw.any()
            if not zeros:
                yield from byte_faults([info], raw[None])
    if zeros:
        yield _zero(info)


def _pairs(scales: Scales, family: Family) -> Iterator[Fault]:
    """Yields linears with another scale than their partner.

    Engines compute linears of one input as one, with one weight_scale_2. Then the other scales as
    many are off.
    """
    codes = {"weight_scale_2": "TS-TARGET-PAIR-SCALE", "input_scale": "TS-TARGET-PAIR-INPUT"}
    for suffix, code in codes.items():
        values = scales[suffix]
        for module, value in values.items():
            for partner in family.partners(module):
                other = values.get(partner, value)
                if value != other and module < partner:
                    name = partner.rpartition(".")[2]
                    text = f"{module}.{suffix} is {value:.7g}, {name} has {other:.7g}"
                    yield code, "error", text


def _grid(scales: dict[str, float]) -> Iterator[Fault]:
    """Yields each weight_scale_2 that no BF16 weights give.

    weight_scale_2 x 2688 is the largest of the weights, if they were BF16 before quantization.
    """
    amax = np.array(list(scales.values())) * NVFP4_RANGE
    inside = (amax > 0) & (amax < BF16_MAX)  # else reported as a bad scale
    bits = np.where(inside, amax, 0).astype(np.float32).view(np.uint32)
    nearest = (bits + np.uint32(0x8000) & np.uint32(0xFFFF0000)).view(np.float32)
    far = abs(nearest - amax) > GRID_TOLERANCE * amax
    off = np.flatnonzero(inside & far)
    if len(off) <= (1 - RULE_SHARE) * len(scales):
        modules = list(scales)
        for index in off:
            text = f"{modules[index]}.weight_scale_2 x 2688 is {amax[index]:.7g}"
            yield "TS-TARGET-SCALE-2", "error", text


def _inputs(scales: dict[str, float]) -> Iterator[Fault]:
    """Yields each input_scale far from the median of its class of linear.

    input_scale x 2688 is the largest activation. Linears of one class see similar ones in all
    layers.
    """
    classes: dict[str, dict[str, float]] = {}
    for module, value in scales.items():
        if 0 < value < float("inf"):
            name = LAYER_NUMBER.sub(".", EXPERT_NUMBER.sub(".", module))
            classes.setdefault(name, {})[module] = value
    for members in classes.values():
        median = statistics.median(members.values())
        for module, value in members.items():
            ratio = max(value / median, median / value)
            beyond = value * NVFP4_RANGE > BF16_MAX
            if beyond or ratio >= FAR:
                severity: Severity = "error" if beyond or ratio >= ABSURD else "warning"
                text = f"{module}.input_scale is {value:.3g}, the median of its kind {median:.3g}"
                yield "TS-TARGET-INPUT-SCALE", severity, text
