"""The passes of a round traced whole: dynamo takes each in one graph, with the cache written in place, and what it
traced computes the same bits.

`torch.compile(fullgraph=True, backend="eager")` and not export: it traces the Python of the very calls that the engine
makes, with the cache as an argument that is written to (export would want the cache as a buffer of the module), refuses
every graph break, and its eager backend runs the traced operators as they are, so that bits can be compared. Shapes are
static, as in a CUDA graph. Weights are not packed for the CPU here (models/precision.py), which is what a GPU runs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters

from trtspec.engine.drafters import DraftSampling
from trtspec.engine.sampling import accept_greedy, accept_sampled, probabilities
from trtspec.models import moe
from trtspec.models.eagle3 import Eagle3Head
from trtspec.models.kimi import KimiModel
from trtspec.models.weights import prepare_for_decoding

HeadOf = Callable[[tuple[str, str, int | None]], Eagle3Head]
Step = Callable[..., tuple[Tensor, ...]]
ROWS, MAX_LEN, LENGTH, DRAFTS = 3, 64, 32, 3
KINDS = [("mha", "3", 100), ("mla", "3.1", None)]
pytestmark = pytest.mark.slow


def same_traced(step: Step, make: Callable[[], tuple[Any, ...]], written: list[int]) -> None:
    """The traced step gives the bits of the step itself, and leaves them in the arguments that it has `written`."""
    torch._dynamo.reset()
    counters.clear()
    eager, traced = make(), make()
    with torch.inference_mode():
        wanted = step(*eager)
        found = torch.compile(step, fullgraph=True, backend="eager", dynamic=False)(*traced)
    assert counters["stats"]["unique_graphs"] == 1 and not counters["graph_break"]
    assert all(torch.equal(left, right) for left, right in zip(found, wanted, strict=True))
    for index in written:
        assert torch.equal(traced[index].data, eager[index].data) and eager[index].data.any()


@pytest.mark.parametrize("experts", ["together", "blocks"])
@pytest.mark.parametrize("width", [1, 1 + DRAFTS], ids=["decode", "verify"])
def test_the_target(target: KimiModel, width: int, experts: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the experts as few of them are computed, and as GPUs do that have no grouped product. That product itself
    is not among them: torch's shape function for it takes bfloat16 only, and a CPU computes it in float32."""
    if experts == "blocks":

        def by_blocks(self: moe.Experts, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
            def block_mlp(inputs: Tensor, chosen: Tensor) -> Tensor:
                gate, up = torch.bmm(inputs, self.gate_up[chosen].transpose(1, 2)).chunk(2, -1)
                return torch.bmm(torch.nn.functional.silu(gate) * up, self.down[chosen].transpose(1, 2))

            return moe.by_blocks(x, ids, weights, block_mlp, moe.BlockSizes.of(self.gate_up, self.down))

        monkeypatch.setattr(moe.Experts, "forward", by_blocks)
    prepare_for_decoding(target)
    if experts != "together":
        monkeypatch.setattr(moe, "DENSE_EXPERT_TOKENS", 0)
    target.rope(MAX_LEN)

    def make() -> tuple[Any, ...]:
        generator = torch.Generator().manual_seed(width)
        block = torch.randint(0, 100, (ROWS, 1 + DRAFTS), generator=generator)[:, :width]  # a view, as in the engine
        return block, torch.tensor([5, 9, 2]), target.new_cache(ROWS + 1, MAX_LEN)

    def step(block: Tensor, start: Tensor, cache: Any) -> tuple[Tensor, ...]:
        out = target(block, start, cache, 0, target.spec.default_aux_layers, length=LENGTH)
        assert out.aux is not None
        tokens = out.logits.argmax(-1)
        return out.logits, out.aux, tokens, accept_greedy(tokens, block[:, 1:])

    same_traced(step, make, [2])


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("width", [1, 1 + DRAFTS], ids=["draft", "learn"])
def test_the_head(kind: tuple[str, str, int | None], width: int, target: KimiModel, head_of: HeadOf) -> None:
    head = head_of(kind)
    head(torch.zeros(1, 1, head.spec.hidden_size), torch.zeros(1, 1, dtype=torch.int64), None, None)  # its tables

    def make() -> tuple[Any, ...]:
        generator = torch.Generator().manual_seed(width)
        size = head.fc.in_features if width > 1 else head.spec.hidden_size
        states = torch.randn(ROWS, width, size, generator=generator)
        tokens = torch.randint(0, 100, (ROWS, width), generator=generator)
        accepted = torch.tensor([3, 0, 1])
        return states, tokens, torch.tensor([5, 9, 2]), head.new_cache(ROWS + 1, MAX_LEN), accepted

    def step(states: Tensor, tokens: Tensor, start: Tensor, cache: Any, accepted: Tensor) -> tuple[Tensor, ...]:
        x = head.fuse(states) if width > 1 else states
        feedback, normed = head(x, tokens, start, cache, length=LENGTH, at=accepted if width > 1 else None)
        return feedback, normed, head.to_target_ids(head.logits(normed[:, -1]).argmax(-1))

    same_traced(step, make, [3])


@pytest.mark.parametrize("draft_sampling", ["argmax", "probabilistic"])
def test_the_sampled_acceptance(draft_sampling: DraftSampling) -> None:
    vocab, offered = 50, torch.tensor([3, 1, 2])

    def make() -> tuple[Any, ...]:
        generator = torch.Generator().manual_seed(3)
        logits = torch.randn(ROWS, 1 + DRAFTS, vocab, generator=generator)
        drafts = torch.randint(0, vocab, (ROWS, DRAFTS), generator=generator)
        q = torch.rand(ROWS, DRAFTS, vocab, generator=generator)
        return logits, drafts, q / q.sum(-1, keepdim=True), torch.rand(ROWS, 1 + DRAFTS, generator=generator)

    def step(logits: Tensor, drafts: Tensor, q: Tensor, uniform: Tensor) -> tuple[Tensor, ...]:
        temperature, top_k = torch.tensor([0.5, 1.0, 2.0]), torch.tensor([5, 10, 3])
        p = probabilities(logits, temperature, torch.tensor([0.9, 1.0, 0.8]), top_k, 10)
        return accept_sampled(p, drafts, q if draft_sampling == "probabilistic" else None, uniform, counts=offered)

    same_traced(step, make, [])
