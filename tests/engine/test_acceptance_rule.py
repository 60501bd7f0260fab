"""Acceptance rules: greedy by definition, sampled by the distribution it must leave unchanged."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare

from trtspec.engine.sampling import accept_sampled, draw, leading, residual


@settings(max_examples=100)
@given(
    st.lists(
        st.tuples(
            st.lists(st.integers(0, 2), min_size=4, max_size=4),
            st.lists(st.integers(0, 2), min_size=3, max_size=3),
        ),
        min_size=1,
        max_size=5,
    ),
    st.integers(0, 3),
)
def test_greedy_accepts_the_common_prefix(
    rows: list[tuple[list[int], list[int]]], offered: int
) -> None:
    best, drafts = (
        torch.tensor([best for best, _ in rows]),
        torch.tensor([draft for _, draft in rows]),
    )
    counts = torch.full((len(rows),), offered)
    limited = leading(best[:, :-1] == drafts, counts).tolist()
    for row, (argmax, draft) in enumerate(rows):
        prefix = next((i for i in range(3) if argmax[i] != draft[i]), 3)
        assert int(leading(best[:, :-1] == drafts)[row]) == prefix
        assert limited[row] == min(prefix, offered)


def distributions(shape: tuple[int, ...], seed: int, sharpness: float) -> torch.Tensor:
    """float64, so that nothing but the rule itself is tested."""
    logits = torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * sharpness
    return logits.double().softmax(-1)


@settings(max_examples=60)
@given(seed=st.integers(0, 2**31), sharpness=st.floats(0.1, 5), vocab=st.integers(2, 12))
def test_one_draft_leaves_exactly_p(seed: int, sharpness: float, vocab: int) -> None:
    """P(token) = q(x) min(1, p/q) + P(reject) residual(x), without a random number, is p."""
    p, q = distributions((2, vocab), seed, sharpness)
    kept = torch.minimum(p, q)
    reconstructed = kept + (1 - kept.sum()) * residual(p.unsqueeze(0), q.unsqueeze(0))[0]
    torch.testing.assert_close(reconstructed, p, atol=1e-12, rtol=1e-9)


@pytest.mark.parametrize("case", ["drawn", "deterministic", "pruned", "counts"])
def test_joint_distribution_of_two_tokens(case: str) -> None:
    """Over 60000 rounds two tokens follow p(x) p(y|x), for drafts from a quite different q."""
    vocab, rounds = 5, 60000
    random = torch.Generator().manual_seed(5)
    first, second = distributions((vocab,), 1, 1.0), distributions((vocab, vocab), 2, 1.0)
    draft_ids = torch.tensor([0, 2, 3]) if case == "pruned" else None
    q1 = distributions((3 if case == "pruned" else vocab,), 3, 1.0)
    if case == "deterministic":
        drafts = torch.randint(0, vocab, (rounds, 1), generator=random)
        draft_probs = None
    else:
        drawn = draw(q1.expand(rounds, -1), torch.rand(rounds, generator=random)).unsqueeze(1)
        drafts = drawn if draft_ids is None else draft_ids[drawn]
        draft_probs = q1.expand(rounds, 1, -1)
    target = torch.stack((first.expand(rounds, -1), second[drafts[:, 0]]), 1)
    counts = torch.randint(0, 2, (rounds,), generator=random) if case == "counts" else None
    uniform = torch.rand(rounds, 2, generator=random)
    tokens, accepted = accept_sampled(
        target, drafts, draft_probs, uniform, draft_ids=draft_ids, counts=counts
    )
    assert 0 < int(accepted.sum()) < rounds

    seen = torch.bincount(tokens[:, 0], minlength=vocab).numpy()
    assert chisquare(seen, (first / first.sum()).numpy() * seen.sum()).pvalue > 1e-3
    for token in range(
        vocab
    ):  # rounds that kept the draft emit a second token, which must follow p(. | draft)
        follow = tokens[(accepted == 1) & (tokens[:, 0] == token), 1]
        if len(follow) > 200:
            want = second[token].double().numpy()
            counted = torch.bincount(follow, minlength=vocab).numpy()
            assert chisquare(counted, want / want.sum() * len(follow)).pvalue > 1e-3


def test_greedy_as_the_limit_of_sampling() -> None:
    """One-hot distributions accept exactly the argmax and emit the argmax."""
    best = torch.tensor([[1, 2, 3, 0], [1, 0, 3, 2]])
    drafts = torch.tensor([[1, 2, 0], [0, 0, 3]])
    target = torch.nn.functional.one_hot(best, 4).float()
    tokens, accepted = accept_sampled(target, drafts, None, torch.full((2, 4), 0.999))
    assert accepted.tolist() == [2, 0]
    assert tokens[0, :3].tolist() == [1, 2, 3]
    assert int(tokens[1, 0]) == 1


def test_no_drafts_is_plain_sampling() -> None:
    target = distributions((3, 1, 7), 4, 1.0)
    uniform = torch.rand(3, 1, generator=torch.Generator().manual_seed(6))
    tokens, accepted = accept_sampled(target, torch.empty(3, 0, dtype=torch.int64), None, uniform)
    assert accepted.tolist() == [0, 0, 0]
    assert torch.equal(tokens[:, 0], draw(target[:, 0], uniform[:, 0]))
