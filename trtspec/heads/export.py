"""Writes a trained head: config.json, model.safetensors in ModelOpt's names, provenance.json and a model card."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from trtspec.checkpoint.writer import write_shard
from trtspec.heads.architecture import head_config
from trtspec.heads.card import model_card
from trtspec.report import write_atomic, write_json
from trtspec.specs import HeadSpec, ModelSpec


def write_head(output: Path, tensors: dict[str, torch.Tensor], spec: HeadSpec, target: ModelSpec) -> None:
    """The checkpoint itself; config.json comes last, so a directory that has one holds a whole head."""
    output.mkdir(parents=True, exist_ok=True)
    write_shard(output / "model.safetensors", tensors, {"format": "pt"})
    write_json(output / "config.json", head_config(spec, target))


def write_record(output: Path, spec: HeadSpec, provenance: dict[str, Any]) -> None:
    """provenance.json and README.md beside the checkpoint; rewritten when a measurement is added."""
    write_json(output / "provenance.json", provenance)
    write_atomic(output / "README.md", model_card(spec, provenance))
