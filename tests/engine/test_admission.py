"""The one check of a request, as a caller of the engine meets it; over HTTP the servers' tests see the same rules."""

from __future__ import annotations

from typing import Any

import pytest

from trtspec.engine.engine import Engine, EngineOptions
from trtspec.engine.request import GenerationRequest, RequestRefused, Wishes
from trtspec.models.kimi import KimiModel


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt_ids": []}, "prompt"),
        ({"prompt_ids": [0] * 64}, "prompt"),
        ({"prompt_ids": [-1]}, "prompt"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"temperature": float("nan")}, "temperature"),
        ({"temperature": -0.1}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_k": 2**63}, "top_k"),
        ({"seed": 2**64}, "seed"),
        ({"stop": ["x"]}, "stop"),
        ({"stop_token_ids": (10**6,)}, "stop_token_ids"),
        ({"wishes": Wishes(repetition_penalty=0.0)}, "repetition_penalty"),
        ({"wishes": Wishes(min_p=1.5)}, "min_p"),
        ({"wishes": Wishes(logit_bias={10**6: 1.0})}, "logit_bias"),
    ],
)
def test_what_cannot_run_is_refused_by_field(target: KimiModel, fields: dict[str, Any], param: str) -> None:
    engine = Engine(target, options=EngineOptions(max_batch_size=1, max_seq_len=64))
    with pytest.raises(RequestRefused) as caught:
        engine.submit(GenerationRequest(**{"id": "x", "prompt_ids": [1, 2], "max_tokens": 4, **fields}))
    assert caught.value.param == param
    assert not engine.has_work
