"""Converted heads satisfy transformers' config classes and ModelOpt's exporter.

Both are installed with trtspec. tests/oracles/test_head_loaders.py loads the heads into the classes
of other projects.
"""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.command_line import printed_json
from tests.heads.convert.foreign_heads import write_head
from tests.tiny import read_tensors
from trtspec.checkpoint.hub import resolve
from trtspec.heads.convert.conversion import Options, convert_head


def converted(
    room: Path, target_dir: Path, to: str, kind: tuple[Any, ...], theta: float | None = None
) -> Path:
    attention, eagle, vocab = kind
    source = write_head(
        room / "source", target_dir, "modelopt", attention=attention, eagle=eagle, draft_vocab=vocab
    )
    options = Options(to, rope_theta=theta)
    result = convert_head(resolve(str(source)), room / to, options, resolve(str(target_dir)))
    assert result.output, result.problems
    return room / to


@pytest.mark.parametrize("to", ["trtllm", "vllm", "sglang", "torchspec"])
@pytest.mark.parametrize("attention", ["mha", "mla"])
def test_transformers_reads_every_config(
    tmp_path: Path, target_dir: Path, to: str, attention: str
) -> None:
    from transformers import DeepseekV3Config, LlamaConfig

    draft = 512 if (to, attention) == ("trtllm", "mla") else 128  # it loads no MLA head with fewer
    path = converted(tmp_path, target_dir, to, (attention, "3", draft if draft < 512 else None))
    read = (LlamaConfig if attention == "mha" else DeepseekV3Config).from_pretrained(path)
    assert (read.hidden_size, read.vocab_size, read.draft_vocab_size, read.num_hidden_layers) == (
        64,
        512,
        draft,
        1,
    )
    assert read.rope_parameters["rope_theta"] == (10000.0 if attention == "mha" else 50000.0)
    assert read.rope_parameters["rope_type"] == ("default" if attention == "mha" else "yarn")
    if attention == "mla":
        assert read.rope_parameters["factor"] == 4.0
    assert read.dtype == torch.bfloat16


@pytest.mark.slow
@pytest.mark.parametrize("attention", ["mha", "mla"])
def test_modelopt_exports_the_same_names(tmp_path: Path, target_dir: Path, attention: str) -> None:
    """ModelOpt's exporter names what a head must hold and admits only d2t and lm_head beside it."""
    path = converted(
        tmp_path, target_dir, "trtllm", (attention, "3", 128 if attention == "mha" else None)
    )
    name = "LLAMA" if attention == "mha" else "KIMIK2"
    script = (
        "import json, modelopt.torch.export.plugins.hf_spec_export as export\n"
        f"print(json.dumps(sorted(export.{name}_EAGLE_SINGLE_LAYER['required'])))\n"
    )
    required = {f"{name}.weight" for name in printed_json(sys.executable, "-c", script)}
    maps = {"d2t"} if attention == "mha" else set()
    assert set(read_tensors(path)) == required | {"lm_head.weight"} | maps
