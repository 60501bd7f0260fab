"""Which tensors a Kimi target has, and whether those of a checkpoint fit its architecture and its quantization config.

Everything follows from headers. Each name is looked at once: it is a weight, a scale, a norm or a router bias that the
config demands, part of the vision tower, or unknown. An engine believes the exclude list of quantization_config: one
that does not fit the tensors produces nonsense without an error message.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

from trtspec.checkpoint.headers import Checkpoint, TensorInfo
from trtspec.checkpoint.target_config import VISION_SIZES
from trtspec.data_files import documented
from trtspec.errors import Problem, Severity
from trtspec.families.family import Role
from trtspec.formats import (
    PLAIN_DTYPES,
    SIDE_PARTS,
    VALUE_SUFFIXES,
    VALUES,
    WeightFormat,
    recognised,
)
from trtspec.specs import ID, ModelSpec, Values

INNER = re.compile(r"(?:.*?\.)?((?:layers\.\d+|embed_tokens|norm|lm_head)\..*)")  # below a prefix
KV_SCALES = ("k_scale", "v_scale")  # of a calibrated FP8 cache
UNREAD = ("rotary_emb.inv_freq",)  # a buffer that early exports stored and every loader skips
VISION = re.compile(r"(^|\.)(vision_tower|mm_projector|multi_modal_projector)\.")
COLOURS, MAX_BLOCKS = 3, 1000
VALUE_FAULTS, SCALE_FAULTS = (
    ("TS-TARGET-DTYPE", "TS-TARGET-SHAPE"),
    ("TS-TARGET-SCALE-DTYPE", "TS-TARGET-SCALE-SHAPE"),
)
Faults = dict[str, list[str]]


def tensor_problems(
    checkpoint: Checkpoint, spec: ModelSpec
) -> tuple[list[Problem], dict[str, WeightFormat], dict[str, Role]]:
    """One problem for each kind of fault, with the first tensor and their number; format and role of each linear."""
    faults: Faults = defaultdict(list)
    tensors, renamed = _in_hub_names(checkpoint.tensors, spec)
    unseen = _by_module(tensors)
    formats, roles = dict[str, WeightFormat](), dict[str, Role]()
    for name, part in spec.family.tensors(spec):
        if len(part.shape) != 2:
            _check_plain(faults, unseen, name, part.shape, "TS-TARGET-NORM-MISSING")
            continue
        module = name.removesuffix(".weight")
        stored = _check_linear(faults, unseen.pop(module, {}), module, part.shape, spec)
        if stored is not None:
            formats[module], roles[module] = stored, part.role
    for name, shape in vision_shapes(checkpoint.config) if spec.has_vision else ():
        _check_plain(faults, unseen, name, shape, "TS-TARGET-VISION")
    left = [info.name for parts in unseen.values() for info in parts.values()]
    vision = [name for name in left if spec.has_vision and VISION.search(name)]
    absent = faults["TS-TARGET-VISION"]
    if absent and vision:
        reason = (
            f"and {len(vision):,} tensors of a vision tower have other names, first {vision[0]}"
        )
        absent[:] = [f"{absent[0]} is absent, {reason}"]
    elif vision:
        faults["TS-TARGET-EXTRA"] += vision
    ours = (f"{spec.family.prefix}model.", f"{spec.family.prefix}lm_head")
    rest = [
        name
        for name in left
        if name not in set(vision)
        and not name.endswith(UNREAD)
        and not (".self_attn." in name and name.rpartition(".")[2] in KV_SCALES)
    ]
    faults["TS-TARGET-EXTRA"] += [name for name in rest if name.startswith(ours)]
    problems = [grouped(code, names) for code, names in faults.items() if names]
    problems += renamed
    if unknown := [name for name in rest if not name.startswith(ours)]:
        problems.append(grouped("TS-TARGET-TENSOR-UNKNOWN", unknown, "warning"))
    return problems, formats, roles


def _in_hub_names(
    tensors: dict[str, TensorInfo], spec: ModelSpec
) -> tuple[dict[str, TensorInfo], list[Problem]]:
    """The tensors by the names that the config demands, if another prefix explains those that they have; and a problem
    that says so."""
    model = f"{spec.family.prefix}model."
    if f"{model}norm.weight" in tensors:
        return tensors, []
    names = {}
    for name in tensors:
        inner = None if VISION.search(name) else INNER.fullmatch(name)
        prefix = spec.family.prefix if ".lm_head." in f".{name}" else model
        names[name] = prefix + inner[1] if inner else name
    changed = [old for old, new in names.items() if old != new]
    if not changed or len(set(names.values())) < len(names):
        return tensors, []
    message = f"{len(changed):,} tensors have another prefix than {model}, first {changed[0]}"
    remedy = (
        f"name them as the publisher does: {names[changed[0]]}; values and config.json may stay"
    )
    problem = Problem("TS-TARGET-TENSOR-UNKNOWN", "error", changed[0], message, remedy)
    return {names[name]: info for name, info in tensors.items()}, [problem]


def grouped(code: str, names: list[str], severity: Severity = "error", what: str = "") -> Problem:
    """One problem for all `names`, each a tensor or a sentence that begins with one. `what` is wrong with them; left
    out, it is the first sentence of the code's summary."""
    count = "" if len(names) == 1 else f"{len(names):,}, first "
    return Problem(
        code, severity, names[0].split(" ")[0], f"{what or summary(code)}: {count}{names[0]}"
    )


def finding(code: str, where: str, severity: Severity = "error", *, remedy: str = "") -> Problem:
    """A problem whose message is the first sentence of its code's summary."""
    return Problem(code, severity, where, summary(code), remedy)


def summary(code: str) -> str:
    return documented()[code]["summary"].rstrip(".").split(". ")[0]


def _by_module(tensors: dict[str, TensorInfo]) -> dict[str, dict[str, TensorInfo]]:
    modules: dict[str, dict[str, TensorInfo]] = {}
    for name, info in tensors.items():
        module, _, suffix = name.rpartition(".")
        modules.setdefault(module, {})[suffix] = info
    return modules


def _check_plain(
    faults: Faults,
    unseen: dict[str, dict[str, TensorInfo]],
    name: str,
    shape: tuple[int, ...],
    absent: str,
) -> None:
    """A tensor that no format packs; `absent` is the code where it is missing."""
    module, _, suffix = name.rpartition(".")
    codes = (absent, *VALUE_FAULTS)
    info = unseen.get(module, {}).pop(suffix, None)
    _check_part(faults, info, module, suffix, PLAIN_DTYPES, (shape,), codes, "config.json")


def _check_linear(
    faults: Faults,
    parts: dict[str, TensorInfo],
    module: str,
    shape: tuple[int, ...],
    spec: ModelSpec,
) -> WeightFormat | None:
    """The format by the tensors' names and types; None where the weight is absent or of no known type."""
    stored = recognised(parts)
    if stored is None:
        values = [info for suffix, info in parts.items() if suffix in VALUE_SUFFIXES]
        faults["TS-TARGET-DTYPE"] += [f"{info.name} is {info.dtype}" for info in values]
        faults["TS-TARGET-WEIGHT-MISSING"] += [] if values else [module]
        return None
    storage, group, block = stored.storage, spec.quant.group_size, spec.quant.block_size
    if stored is not spec.quant.format:
        group, block = 0, None
    shapes = stored.part_shapes(shape[0], shape[1], group, block)
    absent, codes = "TS-TARGET-SCALE-MISSING", VALUE_FAULTS
    for suffix, dtypes in zip(storage.all_parts, storage.dtypes, strict=True):
        info, wanted = parts.pop(suffix, None), shapes[suffix]
        _check_part(faults, info, module, suffix, dtypes, wanted, (absent, *codes), [*shape])
        codes = SCALE_FAULTS
    for suffix, info in parts.items():
        if suffix not in KV_SCALES:
            faults["TS-TARGET-SIBLING"].append(info.name)
    return stored


def _check_part(
    faults: Faults,
    info: TensorInfo | None,
    module: str,
    suffix: str,
    dtypes: tuple[str, ...],
    shapes: tuple[tuple[int, ...], ...],
    codes: tuple[str, ...],
    by: object,
) -> None:
    """`codes` are those of an absent tensor, a wrong dtype and a wrong shape; `by` needs the shape."""
    absent, dtype, shape = codes
    if info is None:
        faults[absent].append(f"{module}.{suffix}")
    elif info.dtype not in dtypes:
        faults[dtype].append(f"{info.name} is {info.dtype}, expected {' or '.join(dtypes)}")
    elif info.shape not in shapes:
        needed = " or ".join(str([*each]) for each in shapes)
        faults[shape].append(f"{info.name} is {[*info.shape]}, {by} needs {needed}")


def vision_shapes(config: dict[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Name and shape of every tensor of a K2.5's vision tower and projector."""
    vision = Values(config).mapping("vision_config")
    width, inner, text, patch, height, across, _heads = (
        vision.whole(key, least=1) for key in VISION_SIZES
    )
    merged = width * math.prod(vision.read("merge_kernel_size", list[ID], [2, 2]))
    layers: dict[str, tuple[int, ...]] = {
        "vision_tower.patch_embed.proj": (width, COLOURS, patch, patch),
        "vision_tower.encoder.final_layernorm": (width,),
        "mm_projector.pre_norm": (width,),
        "mm_projector.proj.0": (merged, merged),
        "mm_projector.proj.2": (text, merged),
    }
    block = {"norm0": (width,), "norm1": (width,), "wqkv": (3 * width, width), "wo": (width, width),
             "mlp.fc0": (inner, width), "mlp.fc1": (width, inner)}  # fmt: skip
    for number in range(vision.whole("vt_num_hidden_layers", most=MAX_BLOCKS)):
        for part, shape in block.items():
            layers[f"vision_tower.encoder.blocks.{number}.{part}"] = shape
    yield "vision_tower.patch_embed.pos_emb.weight", (height, across, width)
    for name, shape in layers.items():
        yield f"{name}.weight", shape
        yield f"{name}.bias", shape[:1]


LAYER_NUMBER, EXPERT_NUMBER = re.compile(r"\.layers\.\d+\."), re.compile(r"\.experts\.\d+\.")
SCALES = (*SIDE_PARTS, *KV_SCALES)


def parameters_per_element(suffix: str, dtype: str) -> int:
    """Model parameters in an element of a stored tensor: 2 in a byte of NVFP4, 8 in a word of INT4, 0 in a scale."""
    if suffix in SCALES:
        return 0
    formats = VALUES.get((suffix, dtype))
    return formats[0].values_per_element if formats else 1


def coverage_problems(
    spec: ModelSpec, formats: dict[str, WeightFormat], roles: dict[str, Role]
) -> Iterator[Problem]:
    """The config's format and exclude list against `formats`, those that the linears are stored in."""
    stated = spec.quant.format
    never = stated.storage.never
    others, wrong, routers = [], [], []
    for module, format in formats.items():
        role = roles[module]
        wanted = spec.quant.format_of(module, role)
        if format.is_plain:
            if not wanted.is_plain:
                wrong.append(f"{module} is not {wanted} and not listed as left alone")
            continue
        if role in never:
            routers.append(module)
        expected = stated if wanted.is_plain else wanted
        if format is not expected:
            others.append(f"{module} is {format}, not {expected}")
        elif wanted.is_plain and role not in never:
            wrong.append(f"{module} is {stated} and listed as not quantized")
    if others:
        yield grouped("TS-TARGET-FORMAT", others)
    if stated.is_plain:
        return
    if routers:
        yield grouped("TS-TARGET-ROUTER", routers)
    if stated not in formats.values():
        message = f"config.json states {stated} and no weight is stored so"
        yield Problem("TS-TARGET-FORMAT", "error", spec.quant.where or "config.json", message)
        return
    if wrong:
        yield grouped("TS-TARGET-EXCLUDE", wrong)
