"""Checks the tensors of a Kimi target against its architecture and its quantization config.

Everything follows from headers. Each name is looked at once: it is a weight, a scale, a norm or a
router bias that the config demands, part of the vision tower, or unknown. An engine believes the
exclude list of quantization_config: a list that does not fit the tensors produces nonsense without
an error message.
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
COLOURS = 3
MAX_BLOCKS = 1000
# The codes of a wrong dtype and of a wrong shape.
VALUE_FAULTS = ("TS-TARGET-DTYPE", "TS-TARGET-SHAPE")
SCALE_FAULTS = ("TS-TARGET-SCALE-DTYPE", "TS-TARGET-SCALE-SHAPE")
Faults = dict[str, list[str]]  # tensors by code; the order of codes is the report's


def tensor_problems(
    checkpoint: Checkpoint, spec: ModelSpec
) -> tuple[list[Problem], dict[str, WeightFormat], dict[str, Role]]:
    """(problems, format of each linear, role of each linear), both by module.

    There is one problem for each code, with the first tensor and their number.
    """
    faults: Faults = defaultdict(list)
    tensors, renamed = _in_hub_names(checkpoint.tensors, spec)
    unseen = _by_module(tensors)
    formats: dict[str, WeightFormat] = {}
    roles: dict[str, Role] = {}
    for name, part in spec.family.tensors(spec):
        if len(part.shape) != 2:
            _check_plain(faults, unseen, name, part.shape, "TS-TARGET-NORM-MISSING")
            continue
        module = name.removesuffix(".weight")
        stored = _check_linear(faults, unseen.pop(module, {}), module, part.shape, spec)
        if stored is not None:
            formats[module] = stored
            roles[module] = part.role
    if spec.has_vision:
        for name, shape in vision_shapes(checkpoint.config):
            _check_plain(faults, unseen, name, shape, "TS-TARGET-VISION")
    left: list[str] = []
    for parts in unseen.values():
        left += (info.name for info in parts.values())
    vision = [name for name in left if spec.has_vision and VISION.search(name)]
    absent = faults["TS-TARGET-VISION"]
    if absent and vision:
        count = f"{len(vision):,} tensors of a vision tower have other names"
        absent[:] = [f"{absent[0]} is absent, and {count}, first {vision[0]}"]
    elif vision:
        faults["TS-TARGET-EXTRA"] += vision
    left = _unknown_names(left, set(vision))
    ours = (f"{spec.family.prefix}model.", f"{spec.family.prefix}lm_head")
    faults["TS-TARGET-EXTRA"] += [name for name in left if name.startswith(ours)]
    problems = [grouped(code, names) for code, names in faults.items() if names]
    problems += renamed
    unknown = [name for name in left if not name.startswith(ours)]
    if unknown:
        problems.append(grouped("TS-TARGET-TENSOR-UNKNOWN", unknown, "warning"))
    return problems, formats, roles


def _unknown_names(names: list[str], vision: set[str]) -> list[str]:
    """The names that are not in `vision`, not skipped by loaders and not scales of a cache."""
    unknown = []
    for name in names:
        kv_scale = ".self_attn." in name and name.rpartition(".")[2] in KV_SCALES
        if name not in vision and not name.endswith(UNREAD) and not kv_scale:
            unknown.append(name)
    return unknown


def _in_hub_names(
    tensors: dict[str, TensorInfo], spec: ModelSpec
) -> tuple[dict[str, TensorInfo], list[Problem]]:
    """(tensors by the names that the config demands, problems).

    Names change if another prefix explains the names that the tensors have. A problem says so.
    """
    model = f"{spec.family.prefix}model."
    if f"{model}norm.weight" in tensors:
        return tensors, []
    names = {}
    for name in tensors:
        names[name] = name
        inner = INNER.fullmatch(name)
        if inner and not VISION.search(name):
            prefix = spec.family.prefix if ".lm_head." in f".{name}" else model
            names[name] = prefix + inner[1]
    changed = [old for old, new in names.items() if old != new]
    if not changed or len(set(names.values())) < len(names):
        return tensors, []
    first = changed[0]
    message = f"{len(changed):,} tensors have another prefix than {model}, first {first}"
    remedy = f"name them as the publisher does: {names[first]}; values and config.json may stay"
    problem = Problem("TS-TARGET-TENSOR-UNKNOWN", "error", first, message, remedy)
    return {names[name]: info for name, info in tensors.items()}, [problem]


def grouped(code: str, names: list[str], severity: Severity = "error", what: str = "") -> Problem:
    """One problem for all `names`, each a tensor or a sentence that begins with a tensor.

    `what` is wrong with them. By default it is the first sentence of the code's summary.
    """
    first = names[0]
    count = "" if len(names) == 1 else f"{len(names):,}, first "
    message = f"{what or summary(code)}: {count}{first}"
    return Problem(code, severity, first.split(" ")[0], message)


def finding(code: str, where: str, severity: Severity = "error", *, remedy: str = "") -> Problem:
    """A problem whose message is the first sentence of its code's summary."""
    return Problem(code, severity, where, summary(code), remedy)


def summary(code: str) -> str:
    """The first sentence of a code's summary."""
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
    """Checks a tensor that no format packs. `absent`: its code if it is missing."""
    module, _, suffix = name.rpartition(".")
    codes = (absent, *VALUE_FAULTS)
    info = unseen.get(module, {}).pop(suffix, None)
    _check_part(faults, info, name, PLAIN_DTYPES, (shape,), codes, "config.json")


def _check_linear(
    faults: Faults,
    parts: dict[str, TensorInfo],
    module: str,
    shape: tuple[int, ...],
    spec: ModelSpec,
) -> WeightFormat | None:
    """The format by the tensors' names and types. None if the weight is absent or of no known type.

    Takes the checked tensors out of `parts`. `module`, `shape`: name and shape of the weight.
    """
    stored = recognised(parts)
    if stored is None:
        values = [info for suffix, info in parts.items() if suffix in VALUE_SUFFIXES]
        faults["TS-TARGET-DTYPE"] += [f"{info.name} is {info.dtype}" for info in values]
        missing = [] if values else [module]
        faults["TS-TARGET-WEIGHT-MISSING"] += missing
        return None
    storage = stored.storage
    group = 0
    block = None
    if stored is spec.quant.format:
        group = spec.quant.group_size
        block = spec.quant.block_size
    shapes = stored.part_shapes(shape[0], shape[1], group, block)
    codes = VALUE_FAULTS
    for suffix, dtypes in zip(storage.all_parts, storage.dtypes, strict=True):
        info = parts.pop(suffix, None)
        name = f"{module}.{suffix}"
        all_codes = ("TS-TARGET-SCALE-MISSING", *codes)
        _check_part(faults, info, name, dtypes, shapes[suffix], all_codes, [*shape])
        codes = SCALE_FAULTS
    for suffix, info in parts.items():
        if suffix not in KV_SCALES:
            faults["TS-TARGET-SIBLING"].append(info.name)
    return stored


def _check_part(
    faults: Faults,
    info: TensorInfo | None,
    name: str,
    dtypes: tuple[str, ...],
    shapes: tuple[tuple[int, ...], ...],
    codes: tuple[str, ...],
    by: object,
) -> None:
    """Notes in `faults` that a tensor is absent, or that its dtype or shape is wrong.

    `codes`: of these three faults. `by`: the config or weight that needs one of `shapes`.
    """
    absent, wrong_dtype, wrong_shape = codes
    if info is None:
        faults[absent].append(name)
    elif info.dtype not in dtypes:
        expected = " or ".join(dtypes)
        faults[wrong_dtype].append(f"{info.name} is {info.dtype}, expected {expected}")
    elif info.shape not in shapes:
        needed = " or ".join(str([*shape]) for shape in shapes)
        faults[wrong_shape].append(f"{info.name} is {[*info.shape]}, {by} needs {needed}")


def vision_shapes(config: dict[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yields name and shape of every tensor of a K2.5's vision tower and projector."""
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
    block: dict[str, tuple[int, ...]] = {
        "norm0": (width,),
        "norm1": (width,),
        "wqkv": (3 * width, width),
        "wo": (width, width),
        "mlp.fc0": (inner, width),
        "mlp.fc1": (width, inner),
    }
    for number in range(vision.whole("vt_num_hidden_layers", most=MAX_BLOCKS)):
        for part, shape in block.items():
            layers[f"vision_tower.encoder.blocks.{number}.{part}"] = shape
    yield "vision_tower.patch_embed.pos_emb.weight", (height, across, width)
    for name, shape in layers.items():
        yield f"{name}.weight", shape
        yield f"{name}.bias", shape[:1]


LAYER_NUMBER = re.compile(r"\.layers\.\d+\.")
EXPERT_NUMBER = re.compile(r"\.experts\.\d+\.")
SCALES = (*SIDE_PARTS, *KV_SCALES)


def parameters_per_element(suffix: str, dtype: str) -> int:
    """Model parameters in an element of a stored tensor.

    2 in a byte of NVFP4, 8 in a word of INT4, 0 in a scale.
    """
    if suffix in SCALES:
        return 0
    formats = VALUES.get((suffix, dtype))
    return formats[0].values_per_element if formats else 1


def coverage_problems(
    spec: ModelSpec, formats: dict[str, WeightFormat], roles: dict[str, Role]
) -> Iterator[Problem]:
    """Compares the config's format and exclude list with `formats`, in which linears are stored."""
    stated = spec.quant.format
    never = stated.storage.never
    others = []
    wrong = []
    routers = []
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
