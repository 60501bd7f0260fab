"""Sampling against transformers' logit warpers, and its inverse distribution against counts."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare
from transformers import TopKLogitsWarper, TopPLogitsWarper

from trtspec.engine.sampling import BatchSampling, draw


def probabilities(logits: torch.Tensor, *parameters: torch.Tensor) -> torch.Tensor:
    return BatchSampling(torch.arange(len(logits)), *parameters).probabilities(logits)


@settings(max_examples=60)
@given(
    seed=st.integers(0, 2**31),
    temperature=st.floats(0.1, 3),
    top_p=st.floats(0.05, 1),
    top_k=st.integers(0, 40),
    size=st.integers(2, 60),
)
def test_like_transformers(
    seed: int, temperature: float, top_p: float, top_k: int, size: int
) -> None:
    logits = torch.randn(3, size, generator=torch.Generator().manual_seed(seed))
    scores = logits / temperature
    if top_k:
        scores = TopKLogitsWarper(top_k)(None, scores)
    if top_p < 1:
        scores = TopPLogitsWarper(top_p)(None, scores)
    rows = torch.ones(3)
    ours = probabilities(logits, rows * temperature, rows * top_p, (rows * top_k).long())
    torch.testing.assert_close(ours, scores.softmax(-1), atol=1e-5, rtol=1e-4)


def test_rows_have_their_own_parameters() -> None:
    logits = torch.randn(3, 2, 50, generator=torch.Generator().manual_seed(0))
    temperature, top_p, top_k = (
        torch.tensor([0.5, 1.0, 2.0]),
        torch.tensor([1.0, 0.3, 0.9]),
        torch.tensor([0, 5, 1]),
    )
    together = probabilities(logits, temperature, top_p, top_k)
    for row in range(3):
        one = slice(row, row + 1)
        torch.testing.assert_close(
            together[one], probabilities(logits[one], temperature[one], top_p[one], top_k[one])
        )
    assert torch.equal(together[2].max(-1).values, torch.ones(2))


def test_draw_follows_the_distribution_and_never_takes_zero() -> None:
    probs = torch.tensor([0.0, 0.5, 0.0, 0.3, 0.15, 0.05, 0.0])
    uniform = torch.rand(20000, generator=torch.Generator().manual_seed(2))
    counts = torch.bincount(draw(probs.expand(20000, -1), uniform), minlength=7)
    assert counts[[0, 2, 6]].sum() == 0
    assert (
        chisquare(
            counts[[1, 3, 4, 5]].numpy(), (probs[[1, 3, 4, 5]] * 20000).numpy().astype(float)
        ).pvalue
        > 1e-3
    )


@pytest.mark.parametrize("uniform", [0.0, 1 - 2**-24])
def test_draw_at_the_ends(uniform: float) -> None:
    """The largest number below one draws a token with a probability, in Kimi's vocabulary size."""
    probs = torch.zeros(1, 163840)
    probs[0, 1000:2000] = torch.rand(1000, generator=torch.Generator().manual_seed(3)) + 0.1
    token = int(draw(probs, torch.tensor([uniform])))
    assert token == (1000 if uniform == 0 else 1999)
