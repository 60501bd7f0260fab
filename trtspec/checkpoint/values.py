"""Checks the values of a head's and of a target's tensors, read in numpy without torch.

In a head, the checks concern NaN and infinity, vocabulary maps and rows of lm_head. Reading a whole
head takes seconds per GB, so large tensors are sampled unless the caller asks for all. In a target,
the checks read every small tensor (scales, norms, router biases) and large ones up to a limit.

Values are judged without the source of the quantization, so only by rules that all exporters share.
Scales are positive, and gate and up share one. `weight_scale_2` is the largest magnitude of BF16
weights divided by 2688, so 2688 times the scale is a BF16 number again.
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
CACHED = 1 << 16  # values checked together, few enough for the CPU's cache
CHUNK_BYTES = 1 << 18  # of one sampled chunk, and of a chunk of a target's large tensor
SAMPLED_CHUNKS = 64  # of a large tensor
# safetensors codes that each vocabulary map may have
MAP_DTYPES = {"d2t": ("I64", "I32"), "t2d": ("BOOL", "U8", "I8")}
WHOLE_BYTES = 1 << 24  # a head's tensor up to this size is read entirely
NUMPY_DTYPES = {
    "F16": "<f2",
    "F32": "<f4",
    "I64": "<i8",
    "I32": "<i4",
    "BOOL": "?",
    "U8": "u1",
    "I8": "i1",
}
SMALL_BYTES = 1 << 16  # a target's tensor up to this size is always read
READ_BYTES = 1 << 23  # most bytes of small tensors that are read at once
# Bytes between two tensors that are read too, because that is faster than another read.
GAP_BYTES = 1 << 12
# Shards that are read at the same time, because each small read waits for the storage.
READERS = 8
BF16_MAX = 3.39e38
# Relative. Dividing a float32 by 2688 and multiplying it again changes it by at most 2^-23.
GRID_TOLERANCE = 2.0**-22
# Fraction of the linears that must follow a rule. If fewer do, the exporter does not apply it.
RULE_SHARE = 0.9
# Ratios of an input_scale to the median of its class of linears, in either direction, from which
# the scale is a warning (FAR) or an error (ABSURD).
FAR = 1e3
ABSURD = 1e5
# code and severity of a problem, and the tensor's name or a sentence that begins with the name
Fault = tuple[str, Severity, str]


def read_values(checkpoint: Checkpoint, info: TensorInfo) -> np.ndarray:
    """Reads a small tensor as float32, float16 or its own integers, in its own shape."""
    raw = checkpoint.bytes_at(info.shard, info.begin, info.nbytes)
    return decode(raw, info.dtype).reshape(info.shape)


def decode(raw: bytes, dtype: str) -> np.ndarray:
    """Returns the bytes of a tensor as a flat array. numpy has no BF16, so it becomes float32."""
    if dtype == "BF16":
        return (np.frombuffer(raw, "<u2").astype(np.uint32) << 16).view(np.float32)
    return np.frombuffer(raw, NUMPY_DTYPES[dtype])


def count_not_finite(raw: memoryview | np.ndarray, dtype: str) -> tuple[int, int | None]:
    """Returns the number of NaN and infinite values, and the index of the first.

    The index is None if all values are finite. Some dtypes have only finite values.

    Args:
        raw: bytes of the values.
        dtype: safetensors code.
    """
    count = 0
    first: int | None = None
    if dtype in NOT_FINITE_BITS:
        mask, least = NOT_FINITE_BITS[dtype]
        codes = np.frombuffer(raw, f"<u{DTYPE_BITS[dtype] // 8}")
        for begin in range(0, codes.size, CACHED):
            magnitudes = codes[begin : begin + CACHED] & codes.dtype.type(mask)
            # A maximum is faster than a comparison, and nearly all chunks are finite.
            if magnitudes.max() >= least:
                bad = magnitudes >= least
                if first is None:
                    first = begin + int(bad.argmax())
                count += int(np.count_nonzero(bad))
    return count, first


def head_value_problems(
    checkpoint: Checkpoint, tensors: dict[str, TensorInfo], *, everything: bool = False
) -> list[Problem]:
    """Returns at most one problem for each tensor of a head.

    Problems are NaN or infinity, only zeros, and another SHA-256 than provenance.json records. An
    embedding may be all zeros, because the comparison with the target's embedding judges it.

    Args:
        tensors: header entries by canonical name.
        everything: whether large tensors are read entirely instead of sampled.
    """
    problems = []
    digests = noted_digests(checkpoint)
    with ShardReader(checkpoint.path) as reader:
        for name, info in tensors.items():
            nbytes = info.nbytes
            digest = digests.get(info.name)
            floats = info.dtype in FLOATS and name not in MAP_DTYPES
            # An empty tensor, or integers without a digest, have nothing to check.
            if not nbytes or not (floats or digest):
                continue
            whole = everything or nbytes <= WHOLE_BYTES
            sha256 = hashlib.sha256()
            bad = 0
            seen = 0
            all_zero = not name.startswith("embed_tokens")
            chunks = reader.pieces(info, 4 * CHUNK_BYTES) if whole else _sampled(reader, info)
            for chunk in chunks:
                if floats:
                    bad += count_not_finite(chunk, info.dtype)[0]
                # The byte 0x80 is the sign of -0.0.
                all_zero = all_zero and not bytes(chunk).strip(b"\x00\x80")
                seen += len(chunk)
                if digest:
                    sha256.update(chunk)
            values = seen * info.numel // nbytes
            if bad:
                problems.append(not_finite(name, bad, values))
            elif all_zero and floats:
                problems.append(finding("TS-HEAD-ZERO", name))
            # The digest is of all bytes, so only a tensor that was read entirely is compared.
            elif digest and whole and sha256.hexdigest() != digest:
                problems.append(finding("TS-HEAD-DIGEST", name))
    return problems


def noted_digests(checkpoint: Checkpoint) -> dict[str, str]:
    """Returns the SHA-256 of each tensor that provenance.json records, by the tensor's name.

    {} if provenance.json records none.
    """
    entries = recorded(checkpoint.path).get("tensors")
    digests: dict[str, str] = {}
    if isinstance(entries, dict):
        for name, entry in entries.items():
            if isinstance(entry, dict) and entry.get("sha256"):
                digests[name] = str(entry["sha256"])
    return digests


def not_finite(name: str, bad: int, seen: int) -> Problem:
    """Returns the problem of a tensor with NaN or infinite values.

    Args:
        bad: number of such values.
        seen: number of values that were read.
    """
    message = f"{bad:,} of {seen:,} values looked at are NaN or infinite"
    if bad == seen:
        message += "; the tensor was never filled (speculators starts unloaded weights as NaN)"
    return Problem("TS-HEAD-NOT-FINITE", "error", name, message)


def _sampled(reader: ShardReader, info: TensorInfo) -> Iterator[memoryview]:
    """Yields SAMPLED_CHUNKS evenly spread chunks of a large tensor.

    All chunks share a buffer, so each overwrites the chunk before it.
    """
    buffer = memoryview(bytearray(CHUNK_BYTES))
    # A multiple of 64 bytes never splits a value.
    distance = (info.nbytes - CHUNK_BYTES) // (SAMPLED_CHUNKS - 1) // 64 * 64
    for number in range(SAMPLED_CHUNKS):
        reader.read_bytes(info, info.begin + number * distance, buffer)
        yield buffer


def vocabulary_values(
    checkpoint: Checkpoint, tensors: dict[str, TensorInfo], spec: HeadSpec
) -> list[Problem]:
    """Returns problems of the values of d2t, t2d and lm_head, which must agree with each other.

    Returns no problem if a map is missing or has another size than the record, because other checks
    report this.
    """
    maps = {name: tensors[name] for name in MAP_DTYPES if name in tensors}
    # Some loaders truncate a map of floats to integers, others refuse it.
    wrong_dtypes = [
        name
        for name, info in maps.items()
        if info.dtype not in MAP_DTYPES[name] or len(info.shape) != 1
    ]
    problems = [finding("TS-HEAD-MAP-DTYPE", name) for name in wrong_dtypes]
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
    problem = _d2t_problem(offsets, spec)
    if problem is not None:
        return [problem]
    targets = np.arange(len(offsets)) + offsets
    if "t2d" in tensors:
        marked = np.flatnonzero(read_values(checkpoint, tensors["t2d"]))
        if not np.array_equal(marked, targets):
            problems.append(finding("TS-HEAD-T2D-VALUES", "t2d"))
    if spec.is_pruned and "lm_head.weight" in tensors:
        problems += _wrong_rows(checkpoint, tensors["lm_head.weight"], offsets)
    return problems


def _d2t_problem(offsets: np.ndarray, spec: HeadSpec) -> Problem | None:
    """Returns a problem if d2t does not hold valid offsets, else None.

    Draft token i is target token i + d2t[i], and these target tokens rise strictly.
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


def _wrong_rows(checkpoint: Checkpoint, info: TensorInfo, offsets: np.ndarray) -> list[Problem]:
    """Returns a problem if row i of lm_head is row d2t[i] of the target's lm_head.

    The right row is i + d2t[i]. TorchSpec prunes lm_head in the wrong way. Its mistake shows
    without the target, because draft tokens with the same offset have equal rows.
    """
    # neighbouring draft tokens with the same offset, a few of which are enough
    pairs = np.flatnonzero(np.diff(offsets) == 0)[:16]
    row_bytes = info.nbytes // max(info.shape[0], 1)
    for row in pairs:
        begin = info.begin + int(row) * row_bytes
        rows = checkpoint.bytes_at(info.shard, begin, 2 * row_bytes)
        if rows[:row_bytes] != rows[row_bytes:]:
            return []
    # One equal pair may be chance, and rows of zeros are another problem.
    if len(pairs) < 2 or not any(rows):
        return []
    return [finding("TS-HEAD-LM-HEAD-ROWS", "lm_head.weight")]


def embedding_problems(
    head: Checkpoint, info: TensorInfo, target: Checkpoint, spec: ModelSpec
) -> list[Problem]:
    """Compares a sample of rows of a head's embedding with the target's.

    Returns a problem if the head's embedding is not the target's. Returns [] if the embeddings have
    other shapes or dtypes, which other checks report.
    """
    target_info = target.tensors.get(f"{spec.family.prefix}model.embed_tokens.weight")
    if target_info is None or target_info.shape != info.shape:
        return []
    if {info.dtype, target_info.dtype} - set(FLOATS):
        return []
    indices = embedding_rows(info.shape[0])
    return compare_embeddings(_rows(head, info, indices), _rows(target, target_info, indices))


def embedding_rows(count: int) -> np.ndarray:
    """Returns the indices of up to 64 evenly spread rows of an embedding of `count` tokens."""
    return np.linspace(0, count - 1, min(64, count)).astype(int)


# Largest relative change of a number stored as BF16, and absolute change of one stored as FP16.
BF16_STEP = 2.0**-8
FP16_MIN = 2.0**-24


def compare_embeddings(ours: np.ndarray, theirs: np.ndarray) -> list[Problem]:
    """Compares the same rows of a head's and a target's embedding, each [N, H].

    Returns an error if the rows are unrelated, a warning if the head trained them further, and []
    if they are equal. Also returns [] for NaN and infinity, which `head_value_problems` reports.
    """
    if not np.isfinite(ours).all() or np.allclose(ours, theirs, rtol=BF16_STEP, atol=FP16_MIN):
        return []
    norms = np.linalg.norm(ours, axis=1) * np.linalg.norm(theirs, axis=1)
    cosines = (ours * theirs).sum(1) / np.maximum(norms, 1e-30)
    cosine = float(np.median(cosines))
    readers = "vLLM drafts with it, TensorRT-LLM and SGLang with the target's"
    # `not`, so that NaN of the target's rows counts as unrelated.
    if not cosine >= 0.5:
        relation = f"has nothing to do with the target's (median cosine {cosine:.2f})"
        message = f"the head's embedding {relation}; {readers}"
        return [Problem("TS-PAIR-EMBED-RANDOM", "error", "embed_tokens.weight", message)]
    relation = f"was trained on from the target's (median cosine {cosine:.4f})"
    message = f"the head's embedding {relation}; {readers}"
    return [Problem("TS-PAIR-EMBED-TRAINED", "warning", "embed_tokens.weight", message)]


def _rows(checkpoint: Checkpoint, info: TensorInfo, indices: np.ndarray) -> np.ndarray:
    """Reads the rows with these indices from an embedding, as float64 [N, H]."""
    row_bytes = info.nbytes // info.shape[0]
    values = []
    for index in indices:
        raw = checkpoint.bytes_at(info.shard, info.begin + int(index) * row_bytes, row_bytes)
        values.append(decode(raw, info.dtype).astype(np.float64))
    return np.stack(values)


def target_value_problems(target: ReadTarget, sample: int | None = None) -> list[Problem]:
    """Returns problems of a target's values: of all small tensors and of some large ones.

    Raises TrtspecError if a shard cannot be read.

    `sample`: number of large tensors to read, chosen at random. 0: all. None: none.
    """
    checkpoint = target.checkpoint
    scales: Scales = {"weight_scale_2": {}, "input_scale": {}}
    by_shard: dict[str, list[TensorInfo]] = {}
    for info in checkpoint.tensors.values():
        if 0 < info.nbytes <= SMALL_BYTES:  # Empty tensors have no values.
            by_shard.setdefault(info.shard, []).append(info)
    faults: list[Fault] = []
    with ThreadPoolExecutor(READERS) as pool:
        for shard_faults in pool.map(
            lambda infos: list(_small_faults(checkpoint, infos, scales)), by_shard.values()
        ):
            faults += shard_faults
    for info in _large_tensors(checkpoint, sample):
        faults += _large_faults(checkpoint, info)
    # Only NVFP4 has rules for these scales.
    fp4_modules = [module for module, format in target.formats.items() if format.is_fp4]
    fp4_scales: Scales = {}
    for suffix, values in scales.items():
        fp4_scales[suffix] = {module: values[module] for module in fp4_modules if module in values}
    faults += _unequal_partners(fp4_scales, target.spec.family)
    faults += _scales_off_grid(fp4_scales["weight_scale_2"])
    faults += _outlying_input_scales(fp4_scales["input_scale"])
    groups: dict[tuple[str, Severity], list[str]] = {}
    # A large tensor is read in chunks, each of which may report the same fault.
    for code, severity, text in dict.fromkeys(faults):
        groups.setdefault((code, severity), []).append(text)
    return [grouped(code, names, severity) for (code, severity), names in groups.items()]


Scales = dict[str, dict[str, float]]  # numbers of scalar tensors by suffix and module
# tensors with their bytes, by suffix, dtype and size in bytes
TensorClasses = dict[tuple[str, str, int], list[tuple[TensorInfo, bytes]]]


def _small_faults(
    checkpoint: Checkpoint, infos: list[TensorInfo], scales: Scales
) -> Iterator[Fault]:
    """Yields the faults of one shard's small tensors.

    Adds the numbers of `weight_scale_2` and `input_scale` tensors to `scales`.
    """
    classes: TensorClasses = {}
    size = 0
    with files.open_regular(checkpoint.path / infos[0].shard) as stream:
        for neighbours in _neighbours(infos):
            begin = neighbours[0].begin
            stream.seek(begin)
            raw = stream.read(neighbours[-1].end - begin)
            for info in neighbours:
                key = (info.name.rpartition(".")[2], info.dtype, info.nbytes)
                entry = (info, raw[info.begin - begin : info.end - begin])
                classes.setdefault(key, []).append(entry)
            size += len(raw)
            # The bytes that were read so far are checked and released, to bound memory.
            if size > READ_BYTES:
                yield from _class_faults(checkpoint, classes, scales)
                classes = {}
                size = 0
    yield from _class_faults(checkpoint, classes, scales)


def _class_faults(
    checkpoint: Checkpoint, classes: TensorClasses, scales: Scales
) -> Iterator[Fault]:
    """Yields faults of small tensors. Tensors of one class are checked in one array.

    Adds the numbers of `weight_scale_2` and `input_scale` tensors to `scales`.
    """
    for (suffix, dtype, nbytes), entries in classes.items():
        infos = [info for info, _ in entries]
        data = b"".join(stored for _, stored in entries)
        raw = np.frombuffer(data, np.uint8).reshape(-1, nbytes)
        yield from byte_faults(infos, raw)
        if suffix == "weight_shape":
            # A shape of another dtype is read as empty, so that it never agrees.
            values = raw.view(NUMPY_DTYPES[dtype]) if dtype in ("I64", "I32") else raw[:, :0]
            yield from _shape_faults(checkpoint, infos, values.tolist())
        if suffix in ("weight_scale_2", "input_scale") and (dtype, nbytes) == ("F32", 4):
            numbers = raw.view("<f4")[:, 0].tolist()
            for info, number in zip(infos, numbers, strict=True):
                scales[suffix][info.name.removesuffix(f".{suffix}")] = number


def _shape_faults(
    checkpoint: Checkpoint, infos: list[TensorInfo], stated_shapes: list[list[int]]
) -> Iterator[Fault]:
    """Yields a fault for each `weight_shape` tensor that is not the shape of its packed weight."""
    for info, stated in zip(infos, stated_shapes, strict=True):
        module = info.name.removesuffix(".weight_shape")
        format = stored_format(checkpoint.tensors, module)
        packed = checkpoint.tensors.get(f"{module}.{format.parts[0]}")
        # Header checks report a packed weight that is absent or not a matrix.
        if packed and len(packed.shape) == 2 and not _is_shape_of(packed, stated, format):
            text = f"{info.name} is {stated}, the weight {list(packed.shape)}"
            yield "TS-TARGET-WEIGHT-SHAPE", "error", text


def _neighbours(infos: list[TensorInfo]) -> Iterator[list[TensorInfo]]:
    """Yields groups of tensors that are near each other in the file, so that one read gets each.

    Tensors of a group are at most GAP_BYTES apart, and a group has at most READ_BYTES.
    """
    group: list[TensorInfo] = []
    for info in sorted(infos, key=lambda info: info.begin):
        if group:
            gap = info.begin - group[-1].end
            size = info.end - group[0].begin
            if gap > GAP_BYTES or size > READ_BYTES:
                yield group
                group = []
        group.append(info)
    if group:
        yield group


def _is_shape_of(packed: TensorInfo, stated: list[int], format: WeightFormat) -> bool:
    """Whether `stated` is the shape of the matrix that a packed weight decodes to."""
    rows, elements = packed.shape
    values = format.values_per_element
    return len(stated) == 2 and stated[0] == rows and -(-stated[1] // values) == elements


def byte_faults(infos: list[TensorInfo], raw: np.ndarray) -> Iterator[Fault]:
    """Yields the faults of tensors: NaN, infinity, invalid scales and only zeros.

    A group of a floating-point scale may be all zeros, so zero is a valid scale in such a tensor.

    Args:
        infos: tensors of one suffix and dtype.
        raw: bytes of the tensors, [tensors, size].
    """
    dtype = infos[0].dtype
    if dtype not in (*FLOATS, "F8_E4M3"):
        return  # Integers and packed weights have no NaN, and zero is a usual value.
    suffix = infos[0].name.rpartition(".")[2]
    is_scale = suffix in SIDE_PARTS
    mask, least = NOT_FINITE_BITS[dtype]
    codes = raw.view(f"<u{DTYPE_BITS[dtype] // 8}")
    bad = (codes & codes.dtype.type(mask)).max(1) >= least
    if is_scale:
        bad |= (codes > mask).any(1)  # A code above the mask has the sign bit.
        # Only a scale of one group may be zero, and only as a plain float.
        if dtype not in FLOATS or suffix not in ("weight_scale", "weight_scale_inv"):
            bad |= ~codes.all(1)
    code = "TS-TARGET-BAD-SCALE" if is_scale else "TS-TARGET-NOT-FINITE"
    for index in np.flatnonzero(bad):
        yield code, "error", infos[index].name
    # A bias may be all zeros.
    if not is_scale and dtype in FLOATS and not suffix.endswith("bias"):
        for index in np.flatnonzero(~codes.any(1)):
            yield _zero(infos[index])


def _zero(info: TensorInfo) -> Fault:
    """Returns the fault of an all-zero tensor.

    It is a warning, because published checkpoints have experts of zeros that are never used. A norm
    of zeros is an error, because it makes every state zero.
    """
    severity: Severity = "error" if "norm" in info.name else "warning"
    return "TS-TARGET-ZERO", severity, info.name


def _large_tensors(checkpoint: Checkpoint, sample: int | None) -> list[TensorInfo]:
    """Returns the large tensors to read, the same choice for every call.

    `sample`: number of tensors. 0: all. None: none.
    """
    large = [info for info in checkpoint.tensors.values() if info.nbytes > SMALL_BYTES]
    if sample is None:
        return []
    if sample == 0 or sample >= len(large):
        return large
    return random.Random(0).sample(large, sample)


def _large_faults(checkpoint: Checkpoint, info: TensorInfo) -> Iterator[Fault]:
    """Yields the faults of one large tensor, which is read in chunks."""
    all_zero = True
    with ShardReader(checkpoint.path) as reader:
        for chunk in reader.pieces(info, CHUNK_BYTES):
            raw = np.frombuffer(chunk, np.uint8)
            all_zero = all_zero and not raw.any()
            # A chunk of zeros is no fault if another chunk has values.
            if not all_zero:
                yield from byte_faults([info], raw[None])
    if all_zero:
        yield _zero(info)


def _unequal_partners(scales: Scales, family: Family) -> Iterator[Fault]:
    """Yields linears whose scale differs from the scale of a linear with the same input.

    Engines compute such linears as one with a single weight_scale_2, so the weights with the other
    scale become wrong.
    """
    codes = {"weight_scale_2": "TS-TARGET-PAIR-SCALE", "input_scale": "TS-TARGET-PAIR-INPUT"}
    for suffix, code in codes.items():
        values = scales[suffix]
        for module, value in values.items():
            for partner in family.partners(module):
                other = values.get(partner, value)
                # Each pair occurs in both directions and is reported once.
                if value != other and module < partner:
                    name = partner.rpartition(".")[2]
                    text = f"{module}.{suffix} is {value:.7g}, {name} has {other:.7g}"
                    yield code, "error", text


def _scales_off_grid(scales: dict[str, float]) -> Iterator[Fault]:
    """Yields each weight_scale_2 that cannot come from BF16 weights.

    weight_scale_2 x 2688 is the largest magnitude of the weights, which is a BF16 number if they
    were BF16 before the quantization. Yields nothing if many scales break this rule, because then
    the source was not BF16.
    """
    amax = np.array(list(scales.values())) * NVFP4_RANGE
    inside = (amax > 0) & (amax < BF16_MAX)  # Others are reported as invalid scales.
    # BF16 is the upper half of float32. Adding half of its last bit rounds to the nearest.
    bits = np.where(inside, amax, 0).astype(np.float32).view(np.uint32)
    nearest = (bits + np.uint32(0x8000) & np.uint32(0xFFFF0000)).view(np.float32)
    far = abs(nearest - amax) > GRID_TOLERANCE * amax
    off_grid = np.flatnonzero(inside & far)
    if len(off_grid) <= (1 - RULE_SHARE) * len(scales):
        modules = list(scales)
        for index in off_grid:
            text = f"{modules[index]}.weight_scale_2 x 2688 is {amax[index]:.7g}"
            yield "TS-TARGET-SCALE-2", "error", text


def _outlying_input_scales(scales: dict[str, float]) -> Iterator[Fault]:
    """Yields each input_scale that is far from the median of its class of linear.

    input_scale x 2688 is the largest magnitude of the activations. Linears of the same name see
    similar activations in all layers and experts.
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
                text = f"{module}.input_scale is {value:.3g}, similar linears have {median:.3g}"
                yield "TS-TARGET-INPUT-SCALE", severity, text
