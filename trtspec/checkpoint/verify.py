"""Is a checkpoint on disk whole? Told from headers and small reads, for any format."""

from __future__ import annotations

from fnmatch import fnmatchcase

from trtspec.checkpoint.headers import Checkpoint
from trtspec.errors import Problem
from trtspec.formats import WeightFormat
from trtspec.specs import QuantSpec

_NVFP4 = WeightFormat.NVFP4.storage
NVFP4_PARTS = {part: codes[0] for part, codes in zip(_NVFP4.all_parts, _NVFP4.dtypes, strict=True)}


def nvfp4_modules(checkpoint: Checkpoint) -> list[str]:
    """Modules that carry NVFP4 tensors, told by weight_scale_2."""
    suffix = ".weight_scale_2"
    return [name.removesuffix(suffix) for name in checkpoint.tensors if name.endswith(suffix)]


def part_problems(checkpoint: Checkpoint, module: str) -> list[Problem]:
    """Names, dtypes and shapes of one NVFP4 linear: weight [N, K/2], weight_scale [N, K/16], two scalars."""
    problems, stored = [], checkpoint.tensors
    for suffix, dtype in NVFP4_PARTS.items():
        name = f"{module}.{suffix}"
        if name not in stored:
            problems.append(_problem("TS-QUANT-PART-MISSING", name, "an NVFP4 linear lacks this tensor"))
        elif stored[name].dtype != dtype:
            problems.append(_problem("TS-QUANT-DTYPE", name, f"dtype is {stored[name].dtype}, NVFP4 has {dtype}"))
    if problems:
        return problems
    weight, scale = stored[f"{module}.weight"].shape, stored[f"{module}.weight_scale"].shape
    if len(weight) != 2 or scale != (weight[0], weight[1] // 8):
        problems.append(_problem("TS-QUANT-SHAPE", module, f"weight {list(weight)} and scale {list(scale)} disagree"))
    for suffix in ("weight_scale_2", "input_scale"):
        if stored[f"{module}.{suffix}"].numel != 1:
            problems.append(_problem("TS-QUANT-SHAPE", f"{module}.{suffix}", "is not one number"))
    return problems


def exclude_problems(modules: list[str], linears: list[str], quant: QuantSpec) -> list[Problem]:
    """The exclude list against the tensors: a loader believes the list, so both directions matter.

    `modules` are quantized; `linears` are plain two-dimensional weights' modules, of which those that a loader would
    build as quantized linears must be on the list.
    """
    problems, quantized = [], set(modules)
    for module in modules:
        pattern = _matching(module, quant.exclude)
        if pattern:
            text = f"is NVFP4 but excluded by {pattern!r}, so engines read its bytes as BF16"
            problems.append(_problem("TS-QUANT-EXCLUDED", module, text))
    for module in linears:
        if module not in quantized and not _matching(module, quant.exclude):
            text = "is not quantized and not on the exclude list, so engines look for its scales"
            problems.append(_problem("TS-QUANT-NOT-EXCLUDED", module, text))
    return problems


def _matching(module: str, patterns: tuple[str, ...]) -> str | None:
    return next((pattern for pattern in patterns if fnmatchcase(module, pattern)), None)


def _problem(code: str, where: str, message: str) -> Problem:
    return Problem(code, "error", where, message, "convert the source again with `trtspec quantize`")
