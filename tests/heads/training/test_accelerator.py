"""Training steps on a CUDA device that computes nothing (tests/fake_cuda.py).

No tensor strays to the CPU, and the host waits once in a step.
"""

import contextlib

import pytest
import torch
from torch import Tensor, nn

from tests.cases import slow
from tests.fake_cuda import fake_cuda
from tests.tiny import make_target
from trtspec.checkpoint.headers import Checkpoint
from trtspec.checkpoint.target_problems import target_spec
from trtspec.heads.training import loop
from trtspec.heads.training.loop import Objective, Stepper
from trtspec.heads.training.module import TrainingModule, build
from trtspec.heads.training.ranks import Ranks
from trtspec.heads.training.samples import Sample
from trtspec.heads.training.states import Features
from trtspec.heads.training.train_options import TrainOptions, new_head_spec
from trtspec.specs import ModelSpec

LENGTHS = (9, 14, 5)
OTHER_KINDS = [("mha", "3"), ("mha", "3.1"), ("mla", "3")]


class Reads:
    """Stands for the one transfer of a step; gives numbers that let it go on."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, figures: list[Tensor], norm: Tensor) -> tuple[Tensor, float]:
        assert norm.is_cuda and all(part.is_cuda for part in figures)
        self.calls += 1
        return torch.ones(len(figures[0]), dtype=torch.float64), 1.0


class FakeFeatures(Features):
    def states(self, index: int) -> tuple[Tensor, Tensor]:
        count = len(self.samples[index].tokens)
        widths = (self.hidden_size, self.num_aux * self.hidden_size)
        hidden, aux = (torch.zeros(count, width, dtype=torch.bfloat16) for width in widths)
        return hidden, aux


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> ModelSpec:
    return target_spec(Checkpoint.open(make_target(tmp_path_factory.mktemp("target"), layers=8)))


def module_for(target: ModelSpec, attention: str, eagle: str) -> TrainingModule:
    spec = new_head_spec(
        target, TrainOptions(attention=attention, eagle=eagle, draft_vocab_size=100)
    )
    embed, lm_head = (torch.zeros(target.vocab_size, target.hidden_size) for _ in range(2))
    return build(spec, target, embed, lm_head, target_ids=torch.arange(0, 500, 5))


def onto(device: str, model: TrainingModule) -> TrainingModule:
    """Replaces the module's tensors by fake ones of the device, as `build` would make them."""
    rope = model.eagle_module.layers[0].__dict__["rope"]  # no submodule
    for module in [*model.modules(), rope]:
        for name, value in module._parameters.items():
            if value is not None:
                fake = torch.empty(value.shape, dtype=value.dtype, device=device)
                module._parameters[name] = nn.Parameter(fake, requires_grad=value.requires_grad)
        for name, value in module._buffers.items():
            if value is not None:
                module._buffers[name] = torch.empty(value.shape, dtype=value.dtype, device=device)
    model.target_rows = torch.empty(model.target_rows.shape, device=device)
    return model


def stepper_for(model: TrainingModule, target: ModelSpec, options: TrainOptions) -> Stepper:
    samples = [
        Sample(str(n), tuple(range(count)), (0,) * 3 + (1,) * (count - 3), 3)
        for n, count in enumerate(LENGTHS)
    ]
    return Stepper(model, FakeFeatures(samples, target.hidden_size, 3), options, 10, Ranks())


@pytest.mark.parametrize(
    ("attention", "eagle", "precision"),
    [
        ("mla", "3.1", "bf16"),
        slow("mha", "3", "bf16"),
        slow("mha", "3.1", "fp32"),
        slow("mla", "3", "fp32"),
    ],
)
def test_a_training_step_reads_the_device_once(
    target: ModelSpec, monkeypatch: pytest.MonkeyPatch, attention: str, eagle: str, precision: str
) -> None:
    """Two batches of a step: their losses with the gradients of the logits, the clipping, AdamW.

    What autograd adds has its own test below: its engine runs nothing for a CUDA that is not there.
    """
    options = TrainOptions(ttt_steps=3, precision=precision, batch_size=2, answer_only=True)
    model, reads = module_for(target, attention, eagle), Reads()

    def backward(loss: Tensor) -> None:
        assert loss.is_cuda and loss.requires_grad
        for value in model.eagle_module.parameters():
            value.grad = torch.empty_like(value)

    monkeypatch.setattr(loop, "read_back", reads)
    monkeypatch.setattr(
        Stepper, "_means", lambda *_: (1.0, [1.0])
    )  # of numbers that are on the host by then
    monkeypatch.setattr(Tensor, "backward", backward)
    monkeypatch.setattr(torch.cuda.amp.common, "amp_definitely_not_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda: True)
    with fake_cuda() as transfers:
        stepper = stepper_for(onto("cuda", model), target, options)
        for step in (1, 2):
            stepper.step(step, [[0, 1], [2]])
    assert all(value.is_cuda and value.grad is None for value in stepper.parameters.values())
    found = dict(transfers.found)
    print(
        f"EAGLE-{eagle}, {attention}, {precision}: waits per training step {reads.calls / 2:g}; "
        f"in 2 steps {found}"
    )
    assert reads.calls == 2
    assert transfers.found["read"] == transfers.found["written"] == 0


@pytest.mark.parametrize(
    ("attention", "eagle"),
    [("mla", "3.1"), *(slow(*kind) for kind in OTHER_KINDS)],
)
def test_the_backward_pass_reads_nothing(
    target: ModelSpec, monkeypatch: pytest.MonkeyPatch, attention: str, eagle: str
) -> None:
    """The backward pass reads nothing, on torch's meta device.

    autograd's engine runs it without hardware, and it is as strictly apart from the CPU.
    """
    monkeypatch.setattr(torch, "autocast", lambda *_, **__: contextlib.nullcontext())
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda *_: False)
    model = module_for(target, attention, eagle)
    with fake_cuda() as transfers:
        objective = Objective(onto("meta", model), TrainOptions(ttt_steps=3))
        tokens, counted = (
            torch.zeros(size, dtype=torch.int64, device="meta") for size in ((2, 14), (3,))
        )
        places = torch.zeros(20, dtype=torch.int64, device="meta")
        hidden, aux = (torch.zeros(2, 14, n * target.hidden_size, device="meta") for n in (1, 3))
        loss, _ = objective(tokens, hidden, aux, places, counted)
        loss.backward()
    parameters = dict(model.eagle_module.named_parameters())
    assert [name for name, value in parameters.items() if value.grad is None] == []
    assert all(
        value.grad.is_meta and value.grad.shape == value.shape for value in parameters.values()
    )
    assert not transfers.found
