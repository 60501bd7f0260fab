"""NVFP4 checkpoints in TensorRT-LLM's own loaders (engine_loaders.py).

TRTSPEC_TRTLLM_LOADERS names a folder with its sources; without it these tests are skipped.
"""

import re
import sys
from pathlib import Path

import pytest

from tests.command_line import printed_json
from tests.oracles.test_head_loaders import ENGINE, needs_engine
from tests.tiny import make_target
from trtspec.checkpoint.headers import Checkpoint
from trtspec.checkpoint.hub import resolve
from trtspec.quant.policy import load_policy
from trtspec.quant.run import quantize_checkpoint

LOADERS = Path(__file__).with_name("engine_loaders.py")
# kimi-nano's down_proj has 48 columns, which INT4's groups of 32 do not divide
MADE = [("", "k2.5"), ("", "k2.6"), ("", "k2.7-code"), ("int4", "k2.6")]


def place(tensor: str) -> tuple[str, str, int]:
    """The module of the engine that a tensor belongs to, and its position there."""
    module = tensor.rpartition(".")[0]
    if re.search("(q_a|kv_b)_proj$|kv_a_proj_with_mqa$", module):
        return tensor, "", 0
    if ".experts." in module:
        return tensor, re.sub(r"(?<=\.experts)\..*", "", module), 0
    fused = re.sub(r"(?<=\.)(gate|up)_proj$", "gate_up_proj", module)
    return tensor, fused, int(module.endswith(".up_proj"))


@needs_engine
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("format", "policy"), MADE)
def test_each_tensor_reaches_its_place_once(tmp_path: Path, format: str, policy: str) -> None:
    source = resolve("kimi-nano").path
    if format:
        source = make_target(tmp_path / "in", format=format, layers=3)
    quantize_checkpoint(source, tmp_path / "out", load_policy(policy))
    tensors = Checkpoint.open(tmp_path / "out").tensors
    wanted = sorted(place(name.removeprefix("language_model.")) for name in tensors)
    scaled = {module for name, module, _ in wanted if name.endswith("weight_scale_2")}
    answers = printed_json(sys.executable, LOADERS, ENGINE, tmp_path / "out")
    assert len(answers) == 7
    for answer in answers:
        assert sorted(map(tuple, answer["places"])) == wanted
        assert set(answer["quantized"]) == scaled
        assert (answer["kv_cache"], answer["auto"]) == ("FP8", ["V2", "PYTHON"])
