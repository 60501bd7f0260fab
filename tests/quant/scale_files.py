"""A file of activation scales as `trtspec calibrate` writes it."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from trtspec.checkpoint.headers import Checkpoint
from trtspec.checkpoint.identity import identity


def write_scales(path: Path, source: Path, tensors: dict[str, torch.Tensor]) -> Path:
    """Scales that were measured on `source`, as their metadata says."""
    metadata = {
        "command": "calibrate",
        "source": source.name,
        "fingerprint": identity(Checkpoint.open(source)),
        "texts": 3,
        "tokens": 99,
    }
    save_file(tensors, path, {"format": "pt", "trtspec": json.dumps(metadata)})
    return path
