"""Adapters of ModelOpt's classes: a packer for `engine` modelopt, and calibration's observer."""

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
    """Packer that quantizes with the class of ModelOpt's export."""

    name = "modelopt"

    def quantized(self, weight: torch.Tensor, scaling: Scaling) -> NVFP4Tensor:
        """Quantizes decoded rows of a weight, [n, K], with the scaling of its group."""
        from modelopt.torch.quantization.qtensor.nvfp4_tensor import NVFP4QTensor

        scale_2 = torch.tensor(scaling.scale_2, device=self.device)
        tensor, scale, _ = NVFP4QTensor.quantize(weight, BLOCK, None, scale_2)
        return NVFP4Tensor(tensor._quantized_data, scale, scale_2)


class InputObserver(torch.nn.Module):
    """Calibration of an activation scale with ModelOpt's NVFP4 input quantizer.

    It records the largest |x| of the input of one or several linears.

    Args:
        name: name of a linear that reads the input, for messages.
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
        """Records max|x| of an input of any shape. Raises TrtspecError if x holds NaN."""
        # A routed expert may get no token of a batch.
        if not x.numel():
            return
        try:
            self.quantizer(x)
        except AssertionError as error:
            raise TrtspecError(f"{self.name}: its input is NaN ({error})", NAN_REMEDY) from None

    def finish(self) -> tuple[float, bool]:
        """Ends the calibration. Returns the input scale, and whether any input was nonzero.

        The scale is amax / (6 * 448). If the input was always zero, ModelOpt takes amax = 6. Raises
        TrtspecError if no token was seen, or if the amax is not finite.
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
            # ModelOpt warns if the input was always zero. The caller reports this case itself.
            warnings.simplefilter("ignore")
            scale = float(NVFP4QTensor.get_activation_scaling_factor(self.quantizer))
        return scale, amax > 0
