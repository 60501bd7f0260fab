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
from trtspec.checkpoint.target_config import VISION_SIZES, quantization_blocks
from trtspec.data_files import documented
from trtspec.errors import Problem, Severity
from trtspec.formats import BY_DTYPE, PACKED, PLAIN_DTYPES, SIDE_PARTS, WeightFormat
from trtspec.specs import ID, HeadSpec, ModelSpec, Values

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
) -> tuple[list[Problem], dict[str, WeightFormat]]:
    """One problem for each kind of fault, naming the first tensor and counting all; and the format of each linear."""
    faults: Faults = defaultdict(list)
    tensors, renamed = _in_hub_names(checkpoint.tensors, spec)
    unseen = _by_module(tensors)
    formats: dict[str, WeightFormat] = {}
    for module, shape in logical_shapes(spec):
        if len(shape) == 1:
            name = module if module.endswith("_bias") else f"{module}.weight"
            _check_plain(faults, unseen, name, shape, "TS-TARGET-NORM-MISSING")
        elif (
            stored := _check_linear(faults, unseen.pop(module, {}), module, shape, spec)
        ) is not None:
            formats[module] = stored
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
    ours = (f"{spec.name_prefix}model.", f"{spec.name_prefix}lm_head")
    rest = [
        name
        for name in left
        if name not in set(vision) and not name.endswith(UNREAD) and not _is_kv_scale(name)
    ]
    faults["TS-TARGET-EXTRA"] += [name for name in rest if name.startswith(ours)]
    problems = [grouped(code, names) for code, names in faults.items() if names]
    problems += renamed
    if unknown := [name for name in rest if not name.startswith(ours)]:
        problems.append(grouped("TS-TARGET-TENSOR-UNKNOWN", unknown, "warning"))
    return problems, formats


def _in_hub_names(
    tensors: dict[str, TensorInfo], spec: ModelSpec
) -> tuple[dict[str, TensorInfo], list[Problem]]:
    """The tensors by the names that the config demands, if another prefix explains those that they have; and a problem
    that says so."""
    model = f"{spec.name_prefix}model."
    if f"{model}norm.weight" in tensors:
        return tensors, []
    names = {}
    for name in tensors:
        inner = None if VISION.search(name) else INNER.fullmatch(name)
        prefix = spec.name_prefix if ".lm_head." in f".{name}" else model
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
    """A problem that the first sentence of its code's summary says all of."""
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
    stored = _stored(parts)
    if not isinstance(stored, WeightFormat):
        code = "TS-TARGET-WEIGHT-MISSING" if stored is None else "TS-TARGET-DTYPE"
        faults[code].append(module if stored is None else f"{module}.weight is {stored}")
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


def _stored(parts: dict[str, TensorInfo]) -> WeightFormat | str | None:
    if "weight" in parts:
        code = parts["weight"].dtype
        return BY_DTYPE.get(code) or code
    return next((format for suffix in parts if (format := PACKED.get(suffix))), None)


def _is_kv_scale(name: str) -> bool:
    return ".self_attn." in name and name.rpartition(".")[2] in KV_SCALES


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
    format = PACKED.get(suffix) or (BY_DTYPE.get(dtype) if suffix == "weight" else None)
    return format.values_per_element if format else 1


def logical_shapes(spec: ModelSpec) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Hub name, without `.weight`, of every linear, router and embedding with its [out, in], and of every norm and
    router bias with its length."""
    hidden, prefix = spec.hidden_size, spec.name_prefix
    yield f"{prefix}model.embed_tokens", (spec.vocab_size, hidden)
    yield f"{prefix}lm_head", (spec.vocab_size, hidden)
    yield f"{prefix}model.norm", (hidden,)
    for layer in range(spec.num_hidden_layers):
        name = f"{prefix}model.layers.{layer}"
        yield f"{name}.input_layernorm", (hidden,)
        yield f"{name}.post_attention_layernorm", (hidden,)
        for part, shape in latent_attention(spec, hidden).items():
            yield f"{name}.self_attn.{part}", shape
        if layer < spec.first_k_dense_replace:
            yield from _mlp(f"{name}.mlp", hidden, spec.intermediate_size)
            continue
        yield (
            f"{name}.mlp.gate.e_score_correction_bias",
            (spec.n_routed_experts,),
        )  # before its module
        yield f"{name}.mlp.gate", (spec.n_routed_experts, hidden)
        for expert in range(spec.n_routed_experts):
            yield from _mlp(f"{name}.mlp.experts.{expert}", hidden, spec.moe_intermediate_size)
        yield from _mlp(
            f"{name}.mlp.shared_experts", hidden, spec.moe_intermediate_size * spec.n_shared_experts
        )


def latent_attention(spec: ModelSpec | HeadSpec, width: int) -> dict[str, tuple[int, ...]]:
    """Shapes of MLA whose first projections see `width` inputs."""
    heads, nope, rope = spec.num_attention_heads, spec.qk_nope_head_dim, spec.qk_rope_head_dim
    return {
        "q_a_proj": (spec.q_lora_rank, width),
        "q_a_layernorm": (spec.q_lora_rank,),
        "q_b_proj": (heads * (nope + rope), spec.q_lora_rank),
        "kv_a_proj_with_mqa": (spec.kv_lora_rank + rope, width),
        "kv_a_layernorm": (spec.kv_lora_rank,),
        "kv_b_proj": (heads * (nope + spec.v_head_dim), spec.kv_lora_rank),
        "o_proj": (spec.hidden_size, heads * spec.v_head_dim),
    }


def _mlp(name: str, hidden: int, inner: int) -> Iterator[tuple[str, tuple[int, int]]]:
    yield f"{name}.gate_proj", (inner, hidden)
    yield f"{name}.up_proj", (inner, hidden)
    yield f"{name}.down_proj", (hidden, inner)


def coverage_problems(
    checkpoint: Checkpoint, spec: ModelSpec, formats: dict[str, WeightFormat]
) -> Iterator[Problem]:
    """The config's format and exclude list against `formats`, those that the linears are stored in."""
    stated = spec.quant.format
    others = {
        module: format
        for module, format in formats.items()
        if format not in (stated, WeightFormat.BF16)
    }
    if others:
        yield grouped(
            "TS-TARGET-FORMAT",
            [f"{module} is {format}, not {stated}" for module, format in others.items()],
        )
    if stated.is_plain:
        return
    never = stated.storage.never
    routers = [
        module
        for module, format in formats.items()
        if not format.is_plain and module.endswith(never)
    ]
    if routers:
        yield grouped("TS-TARGET-ROUTER", routers)
    if stated not in formats.values():
        message = f"config.json states {stated} and no weight is stored so"
        yield Problem("TS-TARGET-FORMAT", "error", spec.quant.where or "config.json", message)
        return
    left_alone, wrong = (
        stated.unquantized_modules(_patterns(checkpoint, stated)),
        [],
    )  # an engine believes the list
    for module, format in formats.items():
        listed = left_alone.match(module) is not None
        if listed and format is stated:
            wrong.append(f"{module} is {stated} and listed as not quantized")
        if not listed and format.is_plain and not module.endswith(never):
            wrong.append(f"{module} is not {stated} and not listed as left alone")
    if wrong:
        yield grouped("TS-TARGET-EXCLUDE", wrong)


def _patterns(checkpoint: Checkpoint, format: WeightFormat) -> tuple[str, ...]:
    """The modules that the block in force leaves alone, by whatever key of the format."""
    block = next(iter(quantization_blocks(checkpoint)), ("", {}))[1]
    lists = [
        entries for key in format.storage.unquantized if isinstance(entries := block.get(key), list)
    ]
    return tuple(entry for entries in lists for entry in entries if isinstance(entry, str))
