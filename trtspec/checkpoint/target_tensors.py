"""The tensors of a Kimi target against its architecture: all there, of the right shape and type, and nothing else.

Told from headers. Every name is looked at once: it is a weight, a scale, a norm or a router bias that the config
demands, part of the vision tower, or unknown.
"""

from __future__ import annotations

from collections.abc import Iterable

from trtspec.checkpoint.headers import Checkpoint, TensorInfo
from trtspec.checkpoint.target_shapes import linear_shapes, vector_shapes
from trtspec.errors import Problem
from trtspec.formats import PLAIN_DTYPES, WeightFormat, format_of_dtype, packed_format
from trtspec.specs import ModelSpec

AGAIN = "fetch the checkpoint again"
THEIRS = "check that config.json belongs to these weights"
FAULTS = {
    "TS-TARGET-WEIGHT-MISSING": ("weights are absent", AGAIN),
    "TS-TARGET-SCALE-MISSING": ("scales are absent", AGAIN),
    "TS-TARGET-NORM-MISSING": ("norms or router biases are absent", AGAIN),
    "TS-TARGET-DTYPE": ("weights have a type that no Kimi format uses", AGAIN),
    "TS-TARGET-SHAPE": ("weights have another shape", THEIRS),
    "TS-TARGET-SCALE-DTYPE": ("scales have another type than their format demands", AGAIN),
    "TS-TARGET-SCALE-SHAPE": (
        "scales have another shape than their weights demand",
        "check group_size or weight_block_size of quantization_config, or fetch the checkpoint again",
    ),
    "TS-TARGET-SIBLING": (
        "tensors accompany a weight but belong to no format that it is stored in",
        "they would change what the weight means; use a checkpoint without them",
    ),
    "TS-TARGET-EXTRA": ("tensors belong to no layer, expert or projection that config.json names", THEIRS),
    "TS-TARGET-VISION": ("parts of the vision tower are absent", AGAIN),
}
UNKNOWN = "TS-TARGET-TENSOR-UNKNOWN"
KV_SCALES = ("k_scale", "v_scale")  # of a calibrated FP8 cache
UNREAD = ("rotary_emb.inv_freq",)  # a buffer that early exports stored and every loader skips
VISION = ("vision_tower.", "mm_projector.")
BLOCKS = "vision_tower.encoder.blocks."
Faults = dict[str, list[str]]


def tensor_problems(checkpoint: Checkpoint, spec: ModelSpec) -> tuple[list[Problem], dict[str, WeightFormat]]:
    """One problem for each kind of fault, naming the first tensor and counting all; and the format of each linear."""
    faults: Faults = {code: [] for code in FAULTS}
    unseen = _by_module(checkpoint.tensors)
    formats: dict[str, WeightFormat] = {}
    for name, length in vector_shapes(spec):
        _check_vector(faults, unseen, name, length)
    for module, shape in linear_shapes(spec):
        stored = _check_linear(faults, unseen.pop(module, {}), module, shape, spec)
        if stored is not None:
            formats[module] = stored
    left = [info.name for parts in unseen.values() for info in parts.values()]
    vision = [name for name in left if spec.has_vision and name.startswith(VISION)]
    if vision:
        faults["TS-TARGET-VISION"] += _missing_in_tower(checkpoint.config, vision)
    ours = (f"{spec.name_prefix}model.", f"{spec.name_prefix}lm_head")
    rest = [name for name in left if name not in set(vision) and not name.endswith(UNREAD) and not _is_kv_scale(name)]
    faults["TS-TARGET-EXTRA"] += [name for name in rest if name.startswith(ours)]
    problems = [grouped(code, names, *FAULTS[code]) for code, names in faults.items() if names]
    return problems + _unknown([name for name in rest if not name.startswith(ours)]), formats


def grouped(code: str, names: list[str], what: str, remedy: str) -> Problem:
    """One problem for all `names`, each a tensor or a sentence that begins with one."""
    count = "" if len(names) == 1 else f"{len(names):,}, first "
    return Problem(code, "error", names[0].split(" ")[0], f"{what}: {count}{names[0]}", remedy)


def _by_module(tensors: dict[str, TensorInfo]) -> dict[str, dict[str, TensorInfo]]:
    modules: dict[str, dict[str, TensorInfo]] = {}
    for name, info in tensors.items():
        module, _, suffix = name.rpartition(".")
        modules.setdefault(module, {})[suffix] = info
    return modules


def _check_vector(faults: Faults, unseen: dict[str, dict[str, TensorInfo]], name: str, length: int) -> None:
    module, _, suffix = name.rpartition(".")
    info = unseen.get(module, {}).pop(suffix, None)
    if info is None:
        faults["TS-TARGET-NORM-MISSING"].append(name)
    elif info.shape != (length,):
        faults["TS-TARGET-SHAPE"].append(f"{name} is {list(info.shape)}, config.json needs {[length]}")
    elif info.dtype not in PLAIN_DTYPES:
        faults["TS-TARGET-DTYPE"].append(f"{name} is {info.dtype}")


def _check_linear(
    faults: Faults, parts: dict[str, TensorInfo], module: str, shape: tuple[int, int], spec: ModelSpec
) -> WeightFormat | None:
    """The format by the tensors' names and types; None where the weight is absent or of no known type."""
    stored = _stored(parts)
    if not isinstance(stored, WeightFormat):
        code = "TS-TARGET-WEIGHT-MISSING" if stored is None else "TS-TARGET-DTYPE"
        faults[code].append(module if stored is None else f"{module}.weight is {stored}")
        return None
    storage, group, block = stored.storage, spec.quant.group_size, spec.quant.block_size
    if stored is not spec.quant.format:
        group, block = 0, None
    shapes = stored.part_shapes(*shape, group, block)
    for index, (suffix, dtypes) in enumerate(zip(storage.all_parts, storage.dtypes, strict=True)):
        info = parts.get(suffix)
        kind = "SCALE-" if index else ""
        if info is None:
            faults["TS-TARGET-SCALE-MISSING"].append(f"{module}.{suffix}")
        elif info.dtype not in dtypes:
            faults[f"TS-TARGET-{kind}DTYPE"].append(f"{info.name} is {info.dtype}, expected {' or '.join(dtypes)}")
        elif info.shape not in shapes[suffix]:
            needed = " or ".join(str(list(each)) for each in shapes[suffix])
            faults[f"TS-TARGET-{kind}SHAPE"].append(f"{info.name} is {list(info.shape)}, {list(shape)} needs {needed}")
    known = {*storage.all_parts, *KV_SCALES}
    faults["TS-TARGET-SIBLING"] += [info.name for suffix, info in parts.items() if suffix not in known]
    return stored


def _stored(parts: dict[str, TensorInfo]) -> WeightFormat | str | None:
    if "weight" in parts:
        code = parts["weight"].dtype
        return format_of_dtype(code) or code
    return next((format for suffix in parts if (format := packed_format(suffix))), None)


def _is_kv_scale(name: str) -> bool:
    return ".self_attn." in name and name.rpartition(".")[2] in KV_SCALES


def _missing_in_tower(config: dict[str, object], names: Iterable[str]) -> list[str]:
    """Blocks of the vision encoder have the same tensors each, as many as vision_config says."""
    blocks: dict[str, set[str]] = {}
    for name in names:
        if name.startswith(BLOCKS):
            number, _, part = name.removeprefix(BLOCKS).partition(".")
            blocks.setdefault(number, set()).add(part)
    vision = config.get("vision_config")
    count = vision.get("vt_num_hidden_layers") if isinstance(vision, dict) else None
    wanted = [str(number) for number in range(count)] if isinstance(count, int) and 0 <= count <= 1000 else list(blocks)
    every = set().union(*blocks.values()) if blocks else {"mlp.fc0.weight"}
    return [f"{BLOCKS}{number}.{part}" for number in wanted for part in sorted(every - blocks.get(number, set()))]


def _unknown(names: list[str]) -> list[Problem]:
    if not names:
        return []
    message = f"{len(names):,} tensors are none of a Kimi's, first {names[0]}; what they mean to an engine is not known"
    return [Problem(UNKNOWN, "warning", names[0], message, "ask the publisher, or remove them")]
