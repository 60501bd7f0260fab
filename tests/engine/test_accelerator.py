"""The engine on a CUDA device that computes nothing (tests/fake_cuda.py).

No tensor strays to the CPU, and nothing but the one transfer of a round reads a number back. Routed
experts read the sizes of their groups, so they are replaced here.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.cases import slow
from tests.fake_cuda import fake_cuda
from trtspec import data_files
from trtspec.checkpoint.headers import Checkpoint
from trtspec.checkpoint.heads.read import read_head
from trtspec.checkpoint.target_problems import target_spec
from trtspec.engine import engine as engine_module
from trtspec.engine.engine import Engine, EngineOptions
from trtspec.engine.request import GenerationRequest
from trtspec.models.eagle3 import Eagle3Head
from trtspec.models.k2 import KimiModel
from trtspec.models.layers import Linear
from trtspec.models.moe import Experts
from trtspec.models.w4a4 import NVFP4Experts, NVFP4Linear
from trtspec.specs import HeadSpec, ModelSpec

CARDS = {"Turing": torch.float32, "Hopper": torch.bfloat16}
SAMPLING = [(0.0, 0, 1.0), (0.9, 5, 0.9), (1.0, 0, 1.0), (0.7, 9, 1.0)]


@pytest.fixture(scope="module")
def specs() -> tuple[ModelSpec, HeadSpec]:
    """kimi-nano and its head with fewer layers: fake operators cost as much as real ones."""
    head, _ = read_head(Checkpoint.open(data_files.DATA / "kimi-nano-eagle3"))
    target = target_spec(Checkpoint.open(data_files.kimi_nano_dir()))
    return replace(target, num_hidden_layers=3), replace(head, aux_layers=(0, 1, 2))


@contextmanager
def modules_on_cuda(dtype: torch.dtype) -> Iterator[None]:
    torch.set_default_dtype(dtype)
    try:
        with torch.device("cuda"):
            yield
    finally:
        torch.set_default_dtype(torch.float32)


def models(specs: tuple[ModelSpec, HeadSpec], dtype: torch.dtype) -> tuple[KimiModel, Eagle3Head]:
    with modules_on_cuda(dtype):
        target, head = KimiModel(specs[0]), Eagle3Head(specs[1])
    head.embed = target.embed
    return target.eval().requires_grad_(False), head.eval().requires_grad_(False)


def in_nvfp4(target: KimiModel, dtype: torch.dtype) -> None:
    """Puts NVFP4 modules of the same shapes in place of the MLPs and experts of NVIDIA's policy."""

    def linear(out_features: int, in_features: int) -> NVFP4Linear:
        return NVFP4Linear(
            torch.empty(out_features, in_features), torch.ones(()), torch.ones(()), "w4a4"
        )

    with modules_on_cuda(dtype):
        for name, module in list(target.named_modules()):
            if isinstance(module, Experts):
                pairs = [linear(*weight.shape) for weight in module.gate_up]
                target.set_submodule(
                    name, NVFP4Experts(pairs, [linear(*weight.shape) for weight in module.down])
                )
            elif isinstance(module, Linear) and ".mlp." in name:
                target.set_submodule(name, linear(*module.weight.shape))


class Rounds:
    """Stands for the transfer of a round: says which tokens stand, and counts.

    Every third row accepts all drafts.
    """

    engine: Engine

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, tokens: Tensor, accepted: Tensor) -> list[list[int]]:
        assert tokens.is_cuda and accepted.is_cuda
        self.calls += 1
        width = tokens.shape[1]
        if width == 1:
            return [[7]] * len(tokens)
        left = [sequence.remaining for sequence in self.engine.batch.sequences]
        return [
            [7] * (min(width, left[row]) if (row + self.calls) % 3 == 0 else 1)
            for row in range(len(tokens))
        ]


@pytest.mark.parametrize(
    ("card", "drafter", "nvfp4"),
    [
        slow("Turing", "eagle3", False),
        slow("Turing", None, False),
        slow("Hopper", "eagle3", False),
        slow("Hopper", "eagle3", True),
    ],
)
def test_a_round_reads_the_device_once(
    specs: tuple[ModelSpec, HeadSpec],
    card: str,
    drafter: str | None,
    nvfp4: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rounds = Rounds()
    monkeypatch.setattr(engine_module, "on_host", rounds)
    for routed in (Experts, NVFP4Experts):
        monkeypatch.setattr(
            routed,
            "forward",
            lambda _, x, ids, weights: x * weights.sum(1, keepdim=True).to(x.dtype),
        )
    with fake_cuda() as transfers:
        target, head = models(specs, CARDS[card])
        if nvfp4:
            in_nvfp4(target, CARDS[card])
        options = EngineOptions(
            max_batch_size=3, max_seq_len=128, prefill_tokens=40, draft_sampling="probabilistic"
        )
        engine = rounds.engine = Engine(target, head if drafter else None, options)
        for number, (temperature, top_k, top_p) in enumerate(SAMPLING):
            prompt = list(range(10 + 20 * number))
            sampling = {"temperature": temperature, "top_p": top_p, "top_k": top_k}
            engine.submit(
                GenerationRequest(str(number), prompt, 6, **sampling, seed=1, ignore_eos=True)
            )
        computed = finished = passes = 0
        while engine.has_work:
            outputs = engine.step()
            for output in outputs:
                if output.error is not None:
                    raise output.error
            finished += sum(output.finish_reason is not None for output in outputs)
            computed += any(output.round is not None for output in outputs)
            passes += any(output.round is None for output in outputs)
    assert finished == 4
    assert (
        rounds.calls == computed + passes
    )  # one in each round, and one for the first tokens of a pass over prompts
    assert passes < 4
    assert transfers.found["read"] == transfers.found["written"] == 0
