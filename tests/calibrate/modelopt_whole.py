"""Exports ModelOpt's max calibration of a whole model on given batches.

A script, one quantization per process:

    python -m tests.calibrate.modelopt_whole SOURCE CONFIG BATCHES.json DTYPE OUT
"""

import sys
from pathlib import Path
from typing import Any

import modelopt.torch.quantization as mtq
import torch
from modelopt.torch.export import export_hf_checkpoint

from tests.json_files import read_json
from tests.quant.modelopt_oracle import load


def main(source: str, config: str, batches: str, dtype: str, out: str) -> None:
    torch.set_num_threads(1)
    tokens = [torch.tensor(batch) for batch in read_json(Path(batches))]

    def calibrate(model: Any) -> None:
        with torch.no_grad():
            for batch in tokens:
                model(input_ids=batch)

    model = load(Path(source), getattr(torch, dtype))
    if dtype == "float32":
        torch.nn.Module.float(model)  # INT4 experts come decoded to bf16 whatever dtype says
    model = mtq.quantize(model, getattr(mtq, config), calibrate)
    export_hf_checkpoint(model, dtype=getattr(torch, dtype), export_dir=out)


if __name__ == "__main__":
    main(*sys.argv[1:])
