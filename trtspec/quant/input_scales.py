"""Activation scales: 1.0 everywhere, or read from a file of calibrated ones.

input_scale = amax / (6 * 448). NVIDIA's data-free recipes pin amax to 2688, so that it is 1.0; block scales are
computed per token anyway, so 1.0 costs only where a block's amax / 6 leaves E4M3's range.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from pathlib import Path

from safetensors import SafetensorError, safe_open

from trtspec.errors import TrtspecError, UsageError
from trtspec.quant.policy import TEXT_PREFIX

FP4_RANGE = 6.0 * 448.0
KINDS = ("input_scale", "input_amax")


class InputScales:
    """`scale(module)` is the float for that linear. `digest` goes into the journal: other scales, another output."""

    def __init__(self, values: dict[str, float] | None = None, digest: str = "one", source: str = "one") -> None:
        self._values, self.digest, self.source = values, digest, source

    @staticmethod
    def load(path: Path | None) -> InputScales:
        """None means 1.0 everywhere.

        A file is JSON or safetensors with `<module>.input_scale` (as in a ModelOpt export) or `<module>.input_amax`;
        `experts.*` in place of an expert's number stands for all experts of the layer.
        """
        if path is None:
            return InputScales()
        if not path.is_file():
            raise UsageError(f"--input-scales {path} is not a file", "pass `one` or the file that calibration wrote")
        raw = _read(path)
        values = {}
        for name, value in raw.items():
            module, _, kind = name.rpartition(".")
            if kind not in KINDS:
                continue
            if not math.isfinite(value) or value <= 0:
                raise TrtspecError(f"{path}: {name} is {value}, a scale must be positive", "calibrate again")
            values[module.removeprefix(TEXT_PREFIX)] = value if kind == "input_scale" else _divide(value)
        if not values:
            raise UsageError(f"{path} holds no *.input_scale or *.input_amax", "pass the file that calibration wrote")
        return InputScales(values, hashlib.sha256(path.read_bytes()).hexdigest(), path.name)

    def scale(self, modules: list[str]) -> float:
        """The one scale of linears that read the same input: the largest that the file gives for any of them."""
        if self._values is None:
            return 1.0
        found = [value for module in modules if (value := self._find(module)) is not None]
        if not found:
            raise TrtspecError(
                f"{self.source} has no input scale for {modules[0]}",
                "calibrate with the same policy, or pass --input-scales one",
            )
        return max(found)

    def _find(self, module: str) -> float | None:
        assert self._values is not None
        plain = module.removeprefix(TEXT_PREFIX)
        return self._values.get(plain, self._values.get(re.sub(r"\.experts\.\d+\.", ".experts.*.", plain)))


def _divide(amax: float) -> float:
    import torch  # one float32 division, as everywhere else

    return float(torch.tensor(amax) / FP4_RANGE)


def _read(path: Path) -> dict[str, float]:
    try:
        if path.suffix == ".json":
            return {name: float(value) for name, value in json.loads(path.read_text(encoding="utf-8")).items()}
        with safe_open(path, framework="pt") as stream:
            wanted = [name for name in stream.keys() if name.rpartition(".")[2] in KINDS]  # noqa: SIM118
            return {name: float(stream.get_tensor(name).max()) for name in wanted}
    except (ValueError, TypeError, AttributeError, SafetensorError) as error:
        raise UsageError(f"{path} is not a file of input scales: {error}", "pass JSON or safetensors") from None
