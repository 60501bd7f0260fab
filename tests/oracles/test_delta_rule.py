"""The delta rule of the tests' recurrent target against fla-core's naive form, whose files are read, not imported.

TRTSPEC_FLA names a folder with fla-core 0.6.0; without it these tests are skipped.
"""

import ast
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tests.recurrent import GATE_BOUND, delta_rule, gate

FLA = os.environ.get("TRTSPEC_FLA")
pytestmark = pytest.mark.skipif(not FLA, reason="TRTSPEC_FLA names no folder with fla-core")


def naive(file: str, name: str) -> Callable[..., Any]:
    tree = ast.parse((Path(FLA or "") / "fla/ops/kda" / file).read_text())
    function = next(node for node in tree.body if getattr(node, "name", "") == name)
    scope: dict[str, Any] = {"torch": torch, "F": F}
    exec(compile(ast.Module([function], []), file, "exec"), scope)
    return scope[name]


def test_outputs_and_state_are_those_of_the_naive_form() -> None:
    torch.manual_seed(0)
    rows, tokens, heads, size = 2, 192, 6, 64
    q, k = (F.normalize(torch.randn(rows, tokens, heads, size), dim=-1) for _ in range(2))
    v, x = torch.randn(2, rows, tokens, heads, size)
    rate, bias, beta = torch.randn(heads), torch.randn(heads, size), torch.rand(rows, tokens, heads)
    state = torch.randn(rows, heads, size, size)
    decay = gate(x, rate, bias)
    wanted = naive("gate.py", "naive_kda_lowerbound_gate")(x, rate, bias.flatten(), GATE_BOUND)
    torch.testing.assert_close(decay, wanted)
    outputs, last = naive("naive.py", "naive_recurrent_kda")(
        q, k, v, decay, beta, initial_state=state, output_final_state=True
    )
    ours, states = delta_rule(q * size**-0.5, k, v, decay, beta, state)
    torch.testing.assert_close(ours, outputs, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(states[:, -1], last, rtol=1e-5, atol=1e-6)
