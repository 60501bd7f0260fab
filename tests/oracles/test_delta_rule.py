"""The recurrent test target's delta rule and gate against fla-core's naive forms.

fla-core's files are run alone, since its package wants Triton. TRTSPEC_FLA names a folder with
fla-core 0.6.0 and einops. Without it the test is skipped.
"""

import os
import runpy
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from tests.recurrent import GATE_BOUND, delta_rule, gate

FLA = os.environ.get("TRTSPEC_FLA", "")


@pytest.mark.skipif(not FLA, reason="TRTSPEC_FLA names no folder with fla-core")
@pytest.mark.parametrize("form", ["recurrent", "chunk"])
def test_outputs_and_state_are_those_of_the_naive_forms(
    form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(FLA)
    files = Path(FLA) / "fla/ops/kda"
    scope = runpy.run_path(str(files / "naive.py")) | {"F": F}
    begin, _, rest = (files / "gate.py").read_text().partition("def naive_kda_lowerbound_gate")
    exec("def naive_gate" + rest.partition("\n@")[0], scope)
    torch.manual_seed(0)
    rows, tokens, heads, size = 2, 192, 6, 64
    q, k = (F.normalize(torch.randn(rows, tokens, heads, size), dim=-1) for _ in range(2))
    v, x = torch.randn(2, rows, tokens, heads, size)
    rate, bias, beta = torch.randn(heads), torch.randn(heads, size), torch.rand(rows, tokens, heads)
    state = torch.randn(rows, heads, size, size)
    decay = gate(x, rate, bias)
    torch.testing.assert_close(decay, scope["naive_gate"](x, rate, bias.flatten(), GATE_BOUND))
    outputs, last = scope[f"naive_{form}_kda"](
        q, k, v, decay, beta, initial_state=state, output_final_state=True
    )
    read, states = delta_rule(q * size**-0.5, k, v, decay, beta, state)
    torch.testing.assert_close(read, outputs, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(states[:, -1], last, rtol=1e-4, atol=1e-5)
