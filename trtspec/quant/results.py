"""What `quantize` and `calibrate` report: of a run, and of a dry run. The fields are the keys of their `--json`."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class LinearErrors:
    """Of one class of linears: how far the dequantized weights are from the source's, relative to their norm."""

    tensors: int
    relative_error: float
    zero_blocks: int


@dataclass(frozen=True, kw_only=True)
class QuantizeSize:
    """What a quantization covers: tensors by what happens to them, bytes read and written. `deviations` name what is
    done otherwise than the policy's publisher did."""

    output: str
    policy: str
    weight_scales: str
    deviations: list[str]
    quantized: int
    decoded: int
    copied: int
    bytes_in: int
    bytes_out: int


@dataclass(frozen=True, kw_only=True)
class Quantized(QuantizeSize):
    """What was written. `part` is i/n, merge or None for one machine; `classes` by kind of linear."""

    classes: dict[str, LinearErrors]
    zero_tensors: list[str]
    part: str | None = None
    seconds: float = 0.0
    peak_rss_bytes: int = 0
    shards_resumed: int = 0


@dataclass(frozen=True, kw_only=True)
class QuantizePlan(QuantizeSize):
    """What a run would write, and whether it would go on with an earlier one; nothing was written. `published` is the
    checkpoint that the policy was read from; `hub`: id, revision and bytes read of a source whose headers were read
    there."""

    published: str
    tensors_by_class: dict[str, int]
    exclude_modules: list[str]
    workers: int
    packing_seconds_estimate: float
    free_bytes: int
    device: str = "cpu"
    resumes: bool = False
    hub: dict[str, Any] | None = None
    dry_run: bool = True


@dataclass(frozen=True, kw_only=True)
class CalibrationSize:
    """What a calibration covers."""

    output: str
    policy: str
    dtype: str
    device: str
    texts: int
    tokens: int
    layers: int
    linears: int


@dataclass(frozen=True, kw_only=True)
class Calibrated(CalibrationSize):
    """The scales that were written. `unreached`: by layer, the experts that no token was given; `dead_inputs` were
    always zero; `input_scale`: min, median and max."""

    sha256: str
    experts: int
    experts_unreached: int
    unreached: dict[str, list[int]]
    dead_inputs: list[str]
    input_scale: dict[str, float]
    layers_resumed: int
    seconds: float
    peak_rss_bytes: int


@dataclass(frozen=True, kw_only=True)
class CalibrationPlan(CalibrationSize):
    """What a run would read, hold and write; nothing was written."""

    layer_bytes: int
    states_bytes: int
    states_in_memory: bool
    load_ahead: bool
    memory_bytes_estimate: int
    disk_bytes: int
    free_bytes: int
    bytes_read: int
    resumes: bool
    dry_run: bool = True


def to_json(result: Quantized | QuantizePlan | Calibrated | CalibrationPlan) -> dict[str, Any]:
    """The object of `--json`; `hub` only where the source was read there."""
    found = asdict(result)
    if found.get("hub", True) is None:
        del found["hub"]
    return found
