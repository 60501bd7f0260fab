"""What a conversion to NVFP4 will do, tensor by tensor, decided from headers before the first byte is read."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from typing import Literal

from trtspec.checkpoint.headers import Checkpoint, TensorInfo
from trtspec.checkpoint.tensors import DTYPES
from trtspec.errors import TrtspecError
from trtspec.formats import PLAIN_DTYPES, WeightFormat, stored_format
from trtspec.quant.decode import parts_of, plain_names
from trtspec.quant.nvfp4 import BLOCK
from trtspec.quant.policy import Policy

Action = Literal["quantize", "decode", "copy"]
Entry = tuple[str, tuple[int, ...]]


@dataclass(frozen=True)
class Weight:
    """One tensor by its plain name. `parts` are the stored tensors it is read from, `shape` is [N, K] decoded."""

    name: str
    action: Action
    parts: tuple[TensorInfo, ...]
    shape: tuple[int, ...]
    format: WeightFormat = WeightFormat.BF16

    @property
    def module(self) -> str:
        return self.name.removesuffix(".weight")

    @property
    def bytes_in(self) -> int:
        return sum(part.nbytes for part in self.parts)

    def layout(self) -> dict[str, Entry]:
        """The tensors that are written for it: name -> dtype code and shape."""
        if self.action == "copy":
            return {self.name: (self.parts[0].dtype, self.parts[0].shape)}
        if self.action == "decode":
            return {self.name: ("BF16", self.shape)}
        rows, columns = self.shape
        return {
            f"{self.module}.weight": ("U8", (rows, columns // WeightFormat.NVFP4.values_per_element)),
            f"{self.module}.weight_scale": ("F8_E4M3", (rows, columns // BLOCK)),
            f"{self.module}.weight_scale_2": ("F32", ()),
            f"{self.module}.input_scale": ("F32", ()),
        }


@dataclass(frozen=True)
class ShardPlan:
    """An output shard has the name of the source shard that holds its tensors' values."""

    shard: str
    weights: tuple[Weight, ...]

    def layout(self) -> dict[str, Entry]:
        return {name: entry for weight in self.weights for name, entry in weight.layout().items()}

    @property
    def bytes_in(self) -> int:
        return sum(weight.bytes_in for weight in self.weights)

    @property
    def bytes_out(self) -> int:
        return sum(math.prod(shape) * DTYPES[code].itemsize for code, shape in self.layout().values())


def plan_conversion(checkpoint: Checkpoint, policy: Policy) -> list[ShardPlan]:
    """The output shards in source order.

    Raises TrtspecError naming the tensor for a missing part, a K that is no multiple of 16 or a dtype that is no
    weight's, and when the policy chooses nothing.
    """
    stored, shards = checkpoint.tensors, dict[str, list[Weight]]()
    for name, carrier in plain_names(stored).items():
        weight = _weight(stored, name, policy)
        shards.setdefault(stored[carrier].shard, []).append(weight)
    plans = [ShardPlan(shard, tuple(shards[shard])) for shard in checkpoint.shards if shard in shards]
    if not any(weight.action == "quantize" for plan in plans for weight in plan.weights):
        raise TrtspecError(
            f"policy {policy.name} chooses no tensor of {checkpoint.path}",
            "compare its patterns with the names in model.safetensors.index.json",
        )
    return plans


def quantized_weight(checkpoint: Checkpoint, name: str, policy: Policy) -> Weight | None:
    """The weight of that name when it exists and becomes NVFP4."""
    stored, stem = checkpoint.tensors, name.removesuffix(".weight")
    if not policy.quantizes(name) or f"{stem}.{stored_format(stored, stem).parts[0]}" not in stored:
        return None
    return _weight(stored, name, policy)


def _weight(stored: dict[str, TensorInfo], name: str, policy: Policy) -> Weight:
    chosen = name.endswith(".weight") and policy.quantizes(name)
    format = stored_format(stored, name.removesuffix(".weight"))
    if format.is_plain and not chosen:
        return Weight(name, "copy", (stored[name],), stored[name].shape)
    parts = tuple(stored[part] for part in parts_of(stored, name))
    shape = parts[0].shape
    if len(shape) == 2:
        shape = (shape[0], shape[1] * format.values_per_element)
    _check_parts(parts, format, shape)
    if chosen:
        _check_block(name, shape, parts[0].dtype if format.is_plain else "BF16")
    return Weight(name, "quantize" if chosen else "decode", parts, shape, format)


def _check_parts(parts: tuple[TensorInfo, ...], format: WeightFormat, shape: tuple[int, ...]) -> None:
    """dtypes and shapes of tensors that only mean something together."""
    again = "download the checkpoint again"
    for part, dtypes in zip(parts, () if format.is_plain else format.storage.dtypes, strict=False):
        if part.dtype not in dtypes:
            raise TrtspecError(f"{part.name} has dtype {part.dtype}, expected {' or '.join(dtypes)}", again)
    if format.is_grouped_integer:
        groups = parts[1].shape[1] if len(parts[1].shape) == 2 else 0
        if len(shape) != 2 or not groups or parts[1].shape[0] != shape[0] or shape[1] % groups or parts[2].numel != 2:
            raise TrtspecError(
                f"INT4 tensors do not belong together: {', '.join(f'{p.name} {list(p.shape)}' for p in parts)}", again
            )


def _check_block(name: str, shape: tuple[int, ...], dtype: str) -> None:
    if len(shape) != 2 or shape[1] % BLOCK:
        raise TrtspecError(
            f"{name} has shape {list(shape)}, which has no whole blocks of {BLOCK} along its rows",
            "use a policy that leaves it out",
        )
    if dtype not in PLAIN_DTYPES:
        raise TrtspecError(
            f"{name} has dtype {dtype} and no scales beside it, so its values are unknown",
            "download the checkpoint again, or use a policy that leaves it out",
        )


def weight_class(name: str) -> str:
    """The kind of linear, for figures by class: `routed experts down_proj`, `shared experts up_proj`, `dense ...`."""
    module = name.removesuffix(".weight")
    leaf = module.rpartition(".")[2]
    if ".mlp.experts." in module:
        return f"routed experts {leaf}"
    if ".mlp.shared_experts." in module:
        return f"shared experts {leaf}"
    return f"dense MLP {leaf}" if ".mlp." in module else f"attention {leaf}" if ".self_attn." in module else leaf


def class_counts(plans: list[ShardPlan]) -> dict[str, int]:
    """How many tensors of each class become NVFP4."""
    weights = (weight for plan in plans for weight in plan.weights if weight.action == "quantize")
    return dict(sorted(Counter(weight_class(weight.name) for weight in weights).items()))
