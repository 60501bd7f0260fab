"""Heads that exist only as pickles (SafeAILab's pytorch_model.bin, a trainer's .pt), read without running code."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from trtspec.checkpoint.headers import Checkpoint, read_config
from trtspec.checkpoint.writer import write_shard
from trtspec.errors import TrtspecError
from trtspec.report import write_json

PATTERNS = ("*.bin", "*.pt", "*.pth")
NESTED = ("state_dict", "model_state_dict", "model", "draft_model")


@contextmanager
def opened(path: Path, scratch: Path | None = None) -> Iterator[Checkpoint]:
    """The head's checkpoint; pickled weights are rewritten as safetensors below `scratch` for as long as it is open."""
    pickles = [] if any(path.glob("*.safetensors")) else _pickles(path)
    if not pickles:
        yield Checkpoint.open(path)
        return
    config = read_config(path / "config.json")
    with TemporaryDirectory(prefix="trtspec-head-", dir=scratch) as directory:
        for number, file in enumerate(pickles):
            write_shard(Path(directory) / f"model-{number:05d}.safetensors", load_tensors(file))
        write_json(Path(directory) / "config.json", config)
        yield Checkpoint.open(directory)


def load_tensors(file: Path) -> dict[str, torch.Tensor]:
    """The tensors of a pickled state dict, mapped and not read; raises TrtspecError where it holds anything else.

    `weights_only=True` admits tensors and plain containers; whatever else a pickle would run is refused.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the pickle's protocol
            try:
                value = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
            except RuntimeError:  # the format before torch 1.6 cannot be mapped
                value = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # torch.load raises many kinds for a damaged or foreign file
        raise TrtspecError(
            f"{file} is not a plain file of tensors: {_reason(error)}",
            "ask its author for the head as safetensors, which run nothing; do not open this file by other means",
        ) from None
    tensors = _state_dict(value)
    if not tensors:
        raise TrtspecError(f"{file} holds no tensors by name", "pass a directory with the head's state_dict")
    if all(name.startswith("module.") for name in tensors):  # as DistributedDataParallel names them
        tensors = {name.removeprefix("module."): tensor for name, tensor in tensors.items()}
    return tensors


def _reason(error: Exception) -> str:
    """Why the restricted loader stopped. Its own text is not repeated: it says how to load the file all the same."""
    named = re.search(r"GLOBAL ([\w.]+)", str(error))
    if named is not None:
        return f"it names {named[1]}, which would be imported and may be run while it is opened"
    return "it is damaged, or was not written by torch.save"


def _state_dict(value: Any) -> dict[str, torch.Tensor]:
    if not isinstance(value, Mapping):
        return {}
    for key in NESTED:
        if isinstance(value.get(key), Mapping):
            return _state_dict(value[key])
    return {str(name): tensor for name, tensor in value.items() if isinstance(tensor, torch.Tensor)}


def _pickles(path: Path) -> list[Path]:
    """Weight files; optimizer and scheduler states beside them are left alone."""
    found = sorted({file for pattern in PATTERNS for file in path.glob(pattern)})
    other = ("optimizer", "scheduler", "training_args", "rng_state", "trainer_state")
    return [file for file in found if not file.name.startswith(other)]
