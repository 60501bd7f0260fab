"""`--engine modelopt`: ModelOpt's own PTQ and export of a model that fits in memory, ending in the same files.

ModelOpt sees the text model alone, as transformers' DeepSeek-V3 class, in a process of its own: its failures leave
torch patched, and its export of the multimodal class writes other names than the hub's. Only the quantized linears are
taken from its export; everything else is carried over from the source as the streaming engine does.
"""

from __future__ import annotations

import copy
import math
import multiprocessing
import tempfile
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch

from trtspec.checkpoint.headers import Checkpoint
from trtspec.checkpoint.target_problems import target_spec
from trtspec.checkpoint.target_tensors import shared_partners
from trtspec.checkpoint.tensors import LazyTensors
from trtspec.checkpoint.writer import Journal, ShardFile
from trtspec.errors import MissingDependency, TrtspecError, UsageError
from trtspec.formats import WeightFormat
from trtspec.quant import nvfp4
from trtspec.quant.conversion import (
    Conversion,
    ConversionOptions,
    Quantized,
    QuantizePlan,
    estimate,
    prepare,
)
from trtspec.quant.decode import decoded
from trtspec.quant.output import JOURNAL_NAME, check_output, claim_output, clear_output, source_identity
from trtspec.quant.packing import Scaling, first_not_finite, not_finite
from trtspec.quant.plan import ShardPlan
from trtspec.quant.policy import TEXT_PREFIX, Policy
from trtspec.quant.shard import ERROR_ROWS, Statistics
from trtspec.quant.streaming import finish, summarize
from trtspec.quant.torch_packer import TorchPacker, rows_of
from trtspec.report import OutputOptions, file_sha256, peak_rss
from trtspec.specs import ModelSpec

CONSTANT_AMAX = 2688.0  # 6 * 448: input_scale becomes exactly 1 without a calibration forward
WEIGHT_SCALES = ("max",)  # what it computes on a CPU
CHECK_BYTES = 1 << 20
MEMORY_FACTOR = 1.4  # whole BF16 model, ModelOpt's own working set and the packed weights


def quantize_with_modelopt(
    source: Path | Checkpoint,
    output: Path,
    policy: Policy,
    options: ConversionOptions | None = None,
    again: OutputOptions | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Quantized | QuantizePlan:
    """Same arguments, files and result as `quantize_checkpoint`; not resumable, and one process whatever `workers`."""
    start = time.monotonic()
    if not policy.config:
        raise UsageError(f"ModelOpt has no configuration for policy {policy.name}", "use --engine stream")
    options, again = options or ConversionOptions(), again or OutputOptions()
    conversion = prepare(source, output, policy, options)
    if conversion.weight_scales not in WEIGHT_SCALES:
        raise UsageError(
            f"ModelOpt computes --weight-scales {conversion.weight_scales} on a CUDA device with Triton only",
            "use --engine stream, which gives the same bytes anywhere, or pass --weight-scales max",
        )
    _check_memory(conversion)
    if (output / JOURNAL_NAME).exists() and not again.restart:
        raise UsageError(f"{output} holds an earlier conversion, which this engine cannot resume", "pass --restart")
    if again.dry_run:
        check_output(conversion, JOURNAL_NAME, restart=True, force=again.force)
        return estimate(conversion, 1)
    claim_output(conversion, JOURNAL_NAME, restart=True, force=again.force)
    header = {"source": source_identity(conversion.checkpoint), "options": conversion.options, "engine": "modelopt"}
    with Journal(output / JOURNAL_NAME, header, restart=True) as journal:
        clear_output(conversion, fresh=True)
        _check_values(conversion.checkpoint)
        with tempfile.TemporaryDirectory(dir=output, prefix=".modelopt-", suffix=".partial") as export:
            _export_apart(conversion.checkpoint.path, policy, Path(export))
            done = 0
            for plan in conversion.plans:
                journal.record(plan.shard, **_write_shard(conversion, plan, Path(export)))
                done += plan.bytes_in
                if progress:
                    progress(done, conversion.bytes_in)
        records = {plan.shard: journal.done[plan.shard] for plan in conversion.plans}
        result = summarize(conversion, records)
        finish(conversion, records, result, header)
    seconds = round(time.monotonic() - start, 3)
    return replace(result, seconds=seconds, peak_rss_bytes=peak_rss())


def packed_by_modelopt(weight: torch.Tensor, scale: torch.Tensor, scale_2: torch.Tensor) -> torch.Tensor:
    """uint8 [N, K/2]: ModelOpt's codes of bf16 [N, K] under given scales (float8_e4m3fn [N, K/16], float32)."""
    try:
        from modelopt.torch.quantization.qtensor.nvfp4_tensor import NVFP4QTensor
    except ImportError:
        raise MissingDependency("nvidia-modelopt is not installed", "pip install 'trtspec[modelopt]'") from None
    return NVFP4QTensor.quantize(weight.clone(), 16, scale, scale_2)[0]._quantized_data


def _check_memory(conversion: Conversion) -> None:
    elements = 0
    for plan in conversion.plans:
        for weight in plan.weights:
            elements += torch.Size(weight.shape).numel()
    needed, free = int(2 * elements * MEMORY_FACTOR), psutil.virtual_memory().available
    if needed > free:
        raise TrtspecError(
            f"ModelOpt holds the whole model, about {needed:,} bytes, and {free:,} are free",
            "use --engine stream, which needs less than 2 GB",
        )


def _check_values(checkpoint: Checkpoint) -> None:
    """Raises TrtspecError for NaN or infinity in any tensor, before ModelOpt spends its time on it."""
    with LazyTensors(checkpoint) as source:
        for info in checkpoint.tensors.values():
            for number, chunk in enumerate(source.chunks(info.name, CHECK_BYTES)):
                found = first_not_finite(np.frombuffer(chunk, "u1"), info.dtype)
                if found is not None:
                    before = number * (CHECK_BYTES * info.numel // info.nbytes)
                    raise not_finite(info.name, info.shard, info.shape, before + found)


def _export_apart(source: Path, policy: Policy, export: Path) -> None:
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        pool.submit(_export, source, policy, export).result()


def _export(source: Path, policy: Policy, export: Path) -> None:
    """The child process: load, quantize without calibration data, export."""
    try:
        import modelopt.torch.quantization as mtq
        from modelopt.torch.export import export_hf_checkpoint
    except ImportError:
        raise MissingDependency("nvidia-modelopt is not installed", "pip install 'trtspec[modelopt]'") from None
    torch.set_num_threads(1)
    checkpoint = Checkpoint.open(source)
    model = _text_model(checkpoint, target_spec(checkpoint))
    config = copy.deepcopy(getattr(mtq, policy.config))
    for entry in config["quant_cfg"]:
        if entry["quantizer_name"].endswith("input_quantizer") and "cfg" in entry:
            entry["cfg"]["constant_amax"] = CONSTANT_AMAX
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
    model = DeepseekV3ForCausalLM._from_config(config, dtype=torch.bfloat16, experts_implementation="eager").eval()
    with LazyTensors(checkpoint) as tensors, torch.no_grad():
        for name, parameter in model.named_parameters():
            stem = spec.name_prefix + name
            if name.endswith("mlp.experts.gate_up_proj"):
                _fill_experts(parameter, tensors, spec, stem.removesuffix("gate_up_proj"), ("gate_proj", "up_proj"))
            elif name.endswith("mlp.experts.down_proj"):
                _fill_experts(parameter, tensors, spec, stem.removesuffix("down_proj"), ("down_proj",))
            else:
                parameter.copy_(decoded(tensors, spec, stem))
    return model


def _fill_experts(
    fused: torch.Tensor, tensors: LazyTensors, spec: ModelSpec, stem: str, leaves: tuple[str, ...]
) -> None:
    for expert in range(fused.shape[0]):
        parts = [decoded(tensors, spec, f"{stem}{expert}.{leaf}.weight") for leaf in leaves]
        fused[expert].copy_(torch.cat(parts))


def _write_shard(conversion: Conversion, plan: ShardPlan, export: Path) -> dict[str, Any]:
    """An output shard of ModelOpt's linears and the source's other tensors."""
    path, statistics = conversion.output / plan.shard, Statistics()
    file = ShardFile(path, plan.layout())
    with LazyTensors(Checkpoint.open(export)) as theirs, LazyTensors(conversion.checkpoint) as source:
        for weight in plan.weights:
            if weight.action == "copy":
                file.write_chunks(weight.name, source.chunks(weight.name))
                continue
            original = decoded(source, conversion.spec, weight.name)
            if weight.action == "decode":
                file.write(weight.name, original)
                continue
            stem = weight.module.removeprefix(TEXT_PREFIX)
            packed, scale, scale_2 = (theirs[f"{stem}.{part}"] for part in ("weight", "weight_scale", "weight_scale_2"))
            tensor = nvfp4.NVFP4Tensor(packed, scale, scale_2)
            if not bool(torch.isfinite(scale.float()).all()):  # an all-zero weight, which ModelOpt exports as NaN
                tensor = nvfp4.quantize(original)
            input_scale = conversion.scales.scale([weight.module, *shared_partners(weight.module)])
            for suffix, value in (
                ("weight", tensor.packed),
                ("weight_scale", tensor.scale),
                ("weight_scale_2", tensor.scale_2),
                ("input_scale", torch.tensor(input_scale)),
            ):
                file.write(f"{weight.module}.{suffix}", value)
            _count(statistics, weight.module, original, tensor)
    file.finish()
    return _record(plan, path, statistics)


def _count(statistics: Statistics, module: str, original: torch.Tensor, tensor: nvfp4.NVFP4Tensor) -> None:
    head = min(ERROR_ROWS, original.shape[0])
    scaling = Scaling(0.0, float(tensor.scale_2))
    packed, scale = tensor.packed[:head].numpy(), tensor.scale[:head].view(torch.uint8).numpy()
    rows = rows_of(WeightFormat.BF16, original[:head])
    statistics.add(module, *TorchPacker().errors(rows, scaling, packed, scale))
    maxima = nvfp4.block_amax(original)
    statistics.blocks(module, maxima.numel(), int((maxima == 0).sum()))


def _record(plan: ShardPlan, path: Path, statistics: Statistics) -> dict[str, Any]:
    actions = [weight.action for weight in plan.weights]
    return {
        "bytes": path.stat().st_size,
        "sha256": file_sha256(path),
        "quantized": actions.count("quantize"),
        "decoded": actions.count("decode"),
        "copied": actions.count("copy"),
        **statistics.record(),
    }


class InputObserver(torch.nn.Module):
    """ModelOpt's NVFP4 input quantizer while it calibrates: it keeps the largest |x| it has seen and changes nothing.

    One observer serves every linear that reads the same input, as ModelOpt's export makes them share a scale.
    """

    def __init__(self) -> None:
        super().__init__()
        try:
            import modelopt.torch.quantization as mtq
            from modelopt.torch.quantization.model_calib import enable_stats_collection
            from modelopt.torch.quantization.nn import TensorQuantizer
        except ImportError:
            raise MissingDependency("nvidia-modelopt is not installed", "pip install 'trtspec[modelopt]'") from None
        entries = mtq.NVFP4_DEFAULT_CFG["quant_cfg"]
        config = next(entry["cfg"] for entry in entries if entry["quantizer_name"].endswith("input_quantizer"))
        self.quantizer = TensorQuantizer(mtq.config.QuantizerAttributeConfig(**config))
        enable_stats_collection(self.quantizer)

    def see(self, x: torch.Tensor) -> None:
        """Takes note of x, any shape; an empty one says nothing. Raises TrtspecError when x holds NaN."""
        if not x.numel():
            return
        try:
            self.quantizer(x)
        except AssertionError as error:
            raise TrtspecError(f"its input is NaN ({error})", "look for NaN in the source's weights") from None

    def finish(self) -> tuple[float, bool]:
        """(input_scale = amax / (6 * 448), whether the input was ever anything but zero).

        An input that was always zero gets ModelOpt's substitute, amax = 6. Raises TrtspecError when nothing was seen
        or when the amax is no number.
        """
        from modelopt.torch.quantization.model_calib import finish_stats_collection
        from modelopt.torch.quantization.qtensor.nvfp4_tensor import NVFP4QTensor

        finish_stats_collection(self.quantizer)
        if self.quantizer.amax is None:
            raise TrtspecError("no calibration token reached it", "calibrate with more samples")
        amax = float(self.quantizer.amax)
        if not math.isfinite(amax):
            raise TrtspecError(f"its input's largest value is {amax}", "look for NaN in the source's weights")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the caller says it
            scale = float(NVFP4QTensor.get_activation_scaling_factor(self.quantizer))
        return scale, amax > 0
