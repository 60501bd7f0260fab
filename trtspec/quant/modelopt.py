"""ModelOpt's own classes: the packer of `engine` modelopt, and the observer of calibration."""

from __future__ import annotations

import math
import warnings

import torch

from trtspec.errors import TrtspecError
from trtspec.quant.decode import TorchPacker
from trtspec.quant.native import BLOCK, Scaling
from trtspec.quant.nvfp4 import NVFP4Tensor

NAN_REMEDY = "look for NaN in the source's weights"


class ModelOptPacker(TorchPacker):
    """Packs each linear by the class that ModelOpt's export uses."""

    name = "modelopt"

    def quantized(self, weight: torch.Tensor, scaling: Scaling) -> NVFP4Tensor:
        from modelopt.torch.quantization.qtensor.nvfp4_tensor import NVFP4QTensor

        scale_2 = torch.tensor(scaling.scale_2, device=self.device)
        tensor, scale, _ = NVFP4QTensor.quantize(weight, BLOCK, None, scale_2)
        return NVFP4Tensor(tensor._quantized_data, scale, scale_2)


class InputObserver(torch.nn.Module):
    """ModelOpt's NVFP4 input quantizer while it calibrates.

    It keeps the largest |x| of linears that share an input. `name`: one of them, for messages.
    """

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
        attributes = mtq.config.QuantizerAttributeConfig(**config)
        self.quantizer = TensorQuantizer(attributes)
        enable_stats_collection(self.quantizer)

    def see(self, x: torch.Tensor) -> None:
        """Records max|x|, any shape. Ignores an empty x. Raises TrtspecError if x holds NaN."""
        if not x.numel():
            return
        try:
            self.quantizer(x)
        except AssertionError as error:
            raise TrtspecError(f"{self.name}: its input is NaN ({error})", NAN_REMEDY) from None

    def finish(self) -> tuple[float, bool]:
        """(input_scale = amax / (6 * 448), whether the input was ever anything but zero).

        An input that was always zero gets ModelOpt's substitute, amax = 6. Raises TrtspecError if
        no token was seen or if the amax is NaN.
        """
        from modelopt.torch.quantization.model_calib import finish_stats_collection
        from modelopt.torch.quantization.qtensor.nvfp4_tensor import NVFP4QTensor

        finish_stats_collection(self.quantizer)
        if self.quantizer.amax is None:
            message = f"{self.name}: no calibration token reached it"
            raise TrtspecError(message, "calibrate with more samples")
        amax = float(self.quantizer.amax)
        if not math.isfinite(amax):
            raise TrtspecError(f"{self.name}: its input's largest value is {amax}", NAN_REMEDY)
        with warnings.catch_warnings():
            # ModelOpt warns of an input that was always zero, which the caller reports.
            warnings.simplefilter("ignore")
            scale = float(NVFP4QTensor.get_activation_scaling_factor(self.quantizer))
        return scale, amax > 0
