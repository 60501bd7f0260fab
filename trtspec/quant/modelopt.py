"""`--engine modelopt`: ModelOpt's own PTQ and export of a model that fits in memory, ending in the same files.

ModelOpt sees the text model alone, as transformers' DeepSeek-V3 class, in a process of its own: its failures leave
torch patched, and its export of the multimodal class writes other names than the hub's. The streaming engine writes the
shards; then the quantized linears of ModelOpt's export take the place of its own.
"""

from __future__ import annotations

import copy
import math
import multiprocessing
import os
import tempfile
import warnings
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch

from trtspec import machine
from trtspec.checkpoint.headers import Checkpoint, read_header
from trtspec.checkpoint.target_problems import target_spec
from trtspec.checkpoint.tensors import LazyTensors
from trtspec.errors import TrtspecError, UsageError
from trtspec.formats import NVFP4_RANGE
from trtspec.quant.decode import decoded
from trtspec.quant.plan import Conversion
from trtspec.quant.policy import TEXT_PREFIX, Policy
from trtspec.specs import ModelSpec

FUSED = {
    "gate_up_proj": ("gate_proj", "up_proj"),
    "down_proj": ("down_proj",),
}  # of experts, by transformers
NAN_REMEDY = "look for NaN in the source's weights"
MEMORY_FACTOR = 1.4  # whole BF16 model, ModelOpt's own working set and the packed weights


def check_engine(conversion: Conversion) -> None:
    """Raises UsageError or TrtspecError for a conversion that ModelOpt cannot do on this machine."""
    if not conversion.policy.config:
        raise UsageError(
            f"ModelOpt has no configuration for policy {conversion.policy.name}",
            "use `engine` stream",
        )
    if conversion.weight_scales != "max":
        text = f"ModelOpt computes `weight_scales` {conversion.weight_scales} on a CUDA device with Triton only"
        raise UsageError(
            text,
            "use `engine` stream, which gives the same bytes anywhere, or pass `weight_scales` max",
        )
    elements = sum(math.prod(weight.shape) for plan in conversion.plans for weight in plan.weights)
    needed, free = int(2 * elements * MEMORY_FACTOR), machine.free_memory()
    if needed > free:
        text = f"ModelOpt holds the whole model, about {needed:,} bytes, and {free:,} are free"
        raise TrtspecError(text, "use `engine` stream, which needs less than 2 GB")


def replace_linears(conversion: Conversion) -> None:
    """Puts the quantized linears of ModelOpt's export into the shards of the output.

    An all-zero weight, whose scales ModelOpt exports as NaN, keeps the streaming engine's.
    """
    with tempfile.TemporaryDirectory(
        dir=conversion.output, prefix=".modelopt-", suffix=".partial"
    ) as export:
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
            pool.submit(
                _export, conversion.checkpoint.path, conversion.policy, Path(export)
            ).result()
        with LazyTensors(Checkpoint.open(export)) as theirs:
            for plan in conversion.plans:
                path = conversion.output / plan.shard
                places = read_header(path)
                with path.open("r+b", buffering=0) as stream:
                    for module in (
                        weight.module for weight in plan.weights if weight.action == "quantize"
                    ):
                        stem = module.removeprefix(TEXT_PREFIX)
                        if not bool(theirs[f"{stem}.weight_scale"].float().isfinite().all()):
                            continue
                        for part in ("weight", "weight_scale", "weight_scale_2"):
                            tensor, place = theirs[f"{stem}.{part}"], places[f"{module}.{part}"]
                            data = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
                            assert data.nbytes == place.nbytes, (
                                f"ModelOpt exported {stem}.{part} {list(tensor.shape)}"
                            )
                            stream.seek(place.begin)
                            stream.write(data.data)
                    os.fsync(stream.fileno())


def _export(source: Path, policy: Policy, export: Path) -> None:
    """The child process: load, quantize without calibration data, export."""
    import modelopt.torch.quantization as mtq
    from modelopt.torch.export import export_hf_checkpoint

    torch.set_num_threads(1)
    checkpoint = Checkpoint.open(source)
    model = _text_model(checkpoint, target_spec(checkpoint))
    config = copy.deepcopy(getattr(mtq, policy.config))
    for entry in config["quant_cfg"]:
        if entry["quantizer_name"].endswith("input_quantizer") and "cfg" in entry:
            entry["cfg"]["constant_amax"] = (
                NVFP4_RANGE  # input_scale becomes 1 without a calibration forward
            )
    config["algorithm"] = {"method": "max", "skip_forward_without_activation_calib": True}
    export_hf_checkpoint(mtq.quantize(model, config), dtype=torch.bfloat16, export_dir=export)


def _text_model(checkpoint: Checkpoint, spec: ModelSpec) -> Any:
    """transformers' DeepSeek-V3 with the checkpoint's decoded weights; experts are fused as that class has them."""
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    text = dict(checkpoint.config.get("text_config") or checkpoint.config)
    for key in ("quantization_config", "auto_map", "model_type", "torch_dtype", "_name_or_path"):
        text.pop(key, None)
    config = DeepseekV3Config.from_dict(text | {"architectures": ["DeepseekV3ForCausalLM"]})
    config.use_cache = False
    model = DeepseekV3ForCausalLM._from_config(
        config, dtype=torch.bfloat16, experts_implementation="eager"
    ).eval()
    with LazyTensors(checkpoint) as tensors, torch.no_grad():
        for name, parameter in model.named_parameters():
            stem, _, leaf = f"{spec.name_prefix}{name}".rpartition(".")
            if stem.endswith(".mlp.experts"):
                for expert, fused in enumerate(parameter):
                    parts = [
                        decoded(tensors, spec, f"{stem}.{expert}.{one}.weight")
                        for one in FUSED[leaf]
                    ]
                    fused.copy_(torch.cat(parts))
            else:
                parameter.copy_(decoded(tensors, spec, f"{stem}.{leaf}"))
    return model


class InputObserver(torch.nn.Module):
    """ModelOpt's NVFP4 input quantizer while it calibrates: it keeps the largest |x| of linears that share an input.
    `name` is one of them, for messages."""

    def __init__(self, name: str = "") -> None:
        super().__init__()
        self.name = name
        import modelopt.torch.quantization as mtq
        from modelopt.torch.quantization.model_calib import enable_stats_collection
        from modelopt.torch.quantization.nn import TensorQuantizer

        entries = mtq.NVFP4_DEFAULT_CFG["quant_cfg"]
        config = next(
            entry["cfg"] for entry in entries if entry["quantizer_name"].endswith("input_quantizer")
        )
        self.quantizer = TensorQuantizer(mtq.config.QuantizerAttributeConfig(**config))
        enable_stats_collection(self.quantizer)

    def see(self, x: torch.Tensor) -> None:
        """Takes note of x, any shape; an empty one says nothing. Raises TrtspecError when x holds NaN."""
        if not x.numel():
            return
        try:
            self.quantizer(x)
        except AssertionError as error:
            raise TrtspecError(f"{self.name}: its input is NaN ({error})", NAN_REMEDY) from None

    def finish(self) -> tuple[float, bool]:
        """(input_scale = amax / (6 * 448), whether the input was ever anything but zero).

        An input that was always zero gets ModelOpt's substitute, amax = 6. Raises TrtspecError when nothing was seen
        or when the amax is NaN.
        """
        from modelopt.torch.quantization.model_calib import finish_stats_collection
        from modelopt.torch.quantization.qtensor.nvfp4_tensor import NVFP4QTensor

        finish_stats_collection(self.quantizer)
        if self.quantizer.amax is None:
            raise TrtspecError(
                f"{self.name}: no calibration token reached it", "calibrate with more samples"
            )
        amax = float(self.quantizer.amax)
        if not math.isfinite(amax):
            raise TrtspecError(f"{self.name}: its input's largest value is {amax}", NAN_REMEDY)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the caller says it
            scale = float(NVFP4QTensor.get_activation_scaling_factor(self.quantizer))
        return scale, amax > 0
