"""Loss, accumulation, schedules, data and the estimate, each against a calculation by hand."""

import math
import random
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.heads.training.test_exported_equals_trained import places_of, training_module
from tests.json_files import write_lines
from trtspec.checkpoint.tokenizer import KimiTokenizer
from trtspec.heads.training.loop import (
    Gradients,
    Objective,
    Stepper,
    Teacher,
    draft_states,
    learning_rate,
    losses,
    simulate_acceptance,
)
from trtspec.heads.training.ranks import Ranks
from trtspec.heads.training.samples import Sample, read_files, split_data
from trtspec.heads.training.states import compute_features
from trtspec.heads.training.train_options import TrainOptions, new_head_spec

LAYERS = (1, 3, 4)


def plain(target_logits: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    """The formula as papers write it, for autograd. [N, V] each -> [N]."""
    return -(target_logits.softmax(-1) * logits.log_softmax(-1)).sum(-1)


@pytest.mark.parametrize("chunk", [3, 1000])
def test_the_loss_and_its_gradients_equal_autograds(chunk):
    torch.manual_seed(0)
    hidden, vocab, rows, steps = 8, 30, 20, 3
    lm_head = torch.randn(vocab, hidden, requires_grad=True)
    states = [torch.randn(rows, hidden, requires_grad=True) for _ in range(steps)]
    places, weights = (
        torch.tensor([1, 2, 3, 5, 8, 9, 11, 12, 17, 19]),
        torch.tensor([0.5, 0.3, 0.2]),
    )
    teacher = Teacher(
        torch.randn(rows, hidden), torch.randn(vocab, hidden), places, places % 10 - 1, weights
    )
    want = torch.tensor(0.0)
    for step, state in enumerate(states):
        counts = (teacher.depth >= step) * weights[step]
        logits = state[places - 1] @ lm_head.T
        want = want + (counts * plain(teacher.hidden[places] @ teacher.lm_head.T, logits)).sum()
    want.backward()
    found = Gradients(torch.zeros(vocab, hidden), [torch.zeros(rows, hidden) for _ in states])
    with torch.no_grad():
        values, agree = losses(
            lm_head.detach(), tuple(s.detach() for s in states), teacher, found, chunk
        )
    assert values.sum().item() == pytest.approx(want.item(), rel=1e-5)
    assert torch.allclose(found.lm_head, lm_head.grad, atol=2e-6)
    assert all(
        torch.allclose(ours, state.grad, atol=2e-6)
        for ours, state in zip(found.states, states, strict=True)
    )
    best = (teacher.hidden[places] @ teacher.lm_head.T).argmax(-1) == (
        states[1][places - 1] @ lm_head.T
    ).argmax(-1)
    assert torch.equal(agree[1], best & (teacher.depth >= 1))


def some_samples(count: int, seed: int = 0) -> list[Sample]:
    shuffle = random.Random(seed)
    found = []
    for number in range(count):
        length, prompt = shuffle.randint(12, 30), shuffle.randint(3, 8)
        tokens = tuple(shuffle.randrange(512) for _ in range(length))
        found.append(Sample(str(number), tokens, (0,) * prompt + (1,) * (length - prompt), prompt))
    return found


@pytest.mark.parametrize("answer_only", [False, True])
def test_an_accumulated_step_weighs_every_token_alike(target, answer_only):
    """A step of three unequal batches equals one sum over all positions of the plain formula."""
    samples = some_samples(5)
    options = TrainOptions(
        ttt_steps=2,
        ttt_decay=0.7,
        lr=1e-3,
        precision="fp32",
        answer_only=answer_only,
        grad_clip=1e9,
    )
    features = compute_features(target, samples, LAYERS)
    spec = new_head_spec(target.spec, TrainOptions(attention="mla", eagle="3.1"))
    model = training_module(target, spec)
    stepper = Stepper(model, features, options, 10, Ranks())
    seen = {}
    stepper.optimizer.step = lambda: seen.update(
        {k: v.grad.clone() for k, v in stepper.parameters.items()}
    )
    point = stepper.step(1, [[0, 1], [2, 3], [4]])  # the last one is incomplete

    fresh = training_module(target, spec)
    sums, counts, right = [torch.tensor(0.0)] * 2, [0, 0], [0, 0]
    for index, sample in enumerate(samples):
        hidden, aux = (part.float()[None] for part in features.states(index))
        drafted = draft_states(fresh, torch.tensor([sample.tokens]), aux, 2)
        for step in range(2):
            for row in range(step, len(sample.tokens) - 1):
                follows = sample.answer[row + 2] if row + 2 < len(sample.tokens) else 0
                if answer_only and not follows:
                    continue
                wanted = target.lm_head.weight @ hidden[0, row + 1]
                logits = fresh.eagle_module.lm_head.weight @ drafted[step][0, row]
                sums[step] = sums[step] + plain(wanted[None], logits[None])[0]
                counts[step] += 1
                right[step] += int(wanted.argmax() == logits.argmax())
    loss = sums[0] / counts[0] + 0.7 * sums[1] / counts[1]
    loss.backward()
    assert point.loss == pytest.approx(loss.item(), rel=1e-5)
    assert point.accuracy == pytest.approx([r / c for r, c in zip(right, counts, strict=True)])
    assert point.tokens == sum(len(sample.tokens) for sample in samples)
    worst = max(
        float((seen[k] - v.grad).abs().max()) for k, v in fresh.eagle_module.named_parameters()
    )
    norm = math.sqrt(sum(float(v.grad.square().sum()) for v in fresh.eagle_module.parameters()))
    print(
        f"accumulated against by hand: loss {abs(point.loss - loss.item()):.1e}, "
        f"gradients {worst:.1e}"
    )
    assert worst < 1e-5 and point.grad_norm == pytest.approx(norm, rel=1e-4)


@pytest.mark.parametrize("attention", ["mha", "mla"])
def test_chunked_attention_changes_nothing(target, attention, monkeypatch):
    spec = new_head_spec(target.spec, TrainOptions(attention=attention, eagle="3"))
    torch.manual_seed(1)
    tokens, mask = torch.randint(0, 512, (2, 40)), torch.ones(2, 40, dtype=torch.bool)
    hidden, aux = torch.randn(2, 40, 64), torch.randn(2, 40, 192)
    results = []
    for scores in (2**26, 64):
        monkeypatch.setattr("trtspec.heads.training.module.MAX_SCORES", scores)
        model = training_module(target, spec)
        objective = Objective(model, TrainOptions(ttt_steps=4))
        loss, _ = objective(tokens, hidden, aux, places_of(mask), torch.tensor([78, 76, 74, 72]))
        loss.backward()
        results.append((loss.item(), {k: v.grad for k, v in model.eagle_module.named_parameters()}))
    (loss, gradients), *others = results
    for other, found in others:
        assert other == pytest.approx(loss, rel=1e-6)
        assert all(torch.allclose(found[k], gradients[k], atol=1e-6) for k in gradients)


def test_a_constant_rate_behind_the_warm_up():
    for warmup in (4, 0.4):
        options = TrainOptions(schedule="constant", warmup=warmup)
        assert [learning_rate(step, 10, 1.0, options) for step in range(1, 11)] == [
            0.25,
            0.5,
            0.75,
            *[1.0] * 7,
        ]


def test_transformers_schedule_is_the_same():
    """Our schedule equals transformers': both reach the peak at the last step of the warm-up."""
    from transformers import get_scheduler

    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    scheduler = get_scheduler("cosine", optimizer, num_warmup_steps=10, num_training_steps=100)
    theirs = []
    for _ in range(100):
        optimizer.step()
        scheduler.step()
        theirs.append(scheduler.get_last_lr()[0])
    options = TrainOptions(warmup=10)
    assert [learning_rate(step, 100, 1.0, options) for step in range(1, 101)] == pytest.approx(
        theirs, abs=1e-9
    )


@settings(max_examples=40)
@given(
    count=st.integers(1, 40),
    batch=st.integers(1, 5),
    accumulation=st.integers(1, 4),
    epochs=st.integers(1, 6),
)
def test_data_order(count, batch, accumulation, epochs):
    """An epoch has each sample once, without the held-out ones, and a longer run begins alike.

    Only the last window and the last batch of an epoch may be short.
    """
    options = TrainOptions(
        batch_size=batch, accumulation=accumulation, epochs=epochs, seed=3, held_out=0.2
    )
    samples = some_samples(count)
    data = split_data(samples, options)
    for number in range(epochs):
        windows = data.epoch(number)
        assert all(len(window) == accumulation for window in windows[:-1])
        seen = [index for window in windows for part in window for index in part]
        assert sorted(seen + data.held) == list(range(count)) and seen
    steps = list(data.steps())
    assert len(steps) == data.total
    longer = split_data(samples, TrainOptions(**{**options.__dict__, "epochs": epochs + 1}))
    assert list(longer.steps())[: len(steps)] == steps


def write(path: Path, rows: list[tuple[str, str]]) -> str:
    return str(write_lines(path, ({"prompt": a, "completion": b} for a, b in rows)))


def test_duplicates_are_counted_and_ids_differ(tmp_path, target_dir):
    words = [
        (f"question number {n} is", f" answered with {n} and some more words") for n in range(12)
    ]
    one, two = (
        write(tmp_path / "one.jsonl", words[:6] + words[:2]),
        write(tmp_path / "two.jsonl", words[4:10]),
    )
    samples, told = read_files([one, two], KimiTokenizer(target_dir), TrainOptions())
    assert told == [
        {"file": one, "conversations": 6, "duplicates": 2, "refused": 0, "refusals": []},
        {"file": two, "conversations": 4, "duplicates": 2, "refused": 0, "refusals": []},
    ]
    assert len({sample.id for sample in samples}) == len(samples) == 10


def test_a_walk_along_an_answer():
    """Ten tokens, the last seven the target's.

    The drafts of rows 2 to 8 agree as told; two drafts at a time.
    """
    answer = [0, 0, 0, 1, 1, 1, 1, 1, 1, 1]
    agree = [[False] * 10, [False] * 10]
    assert simulate_acceptance(agree, answer) == (6, 0)  # tokens 4 to 9 one by one
    for step, row in ((0, 2), (1, 3), (0, 5), (1, 6), (1, 8)):
        agree[step][row] = True
    # known 3: drafts 4 and 5 agree, the target adds 6; known 6: 7 and 8 agree, it adds 9
    assert simulate_acceptance(agree, answer) == (2, 4)
    assert simulate_acceptance([[True] * 10] * 2, answer) == (2, 4)
    assert simulate_acceptance([[True] * 10] * 2, [0] * 10) == (0, 0)
    assert simulate_acceptance([[True] * 6] * 3, [0, 1, 1, 0, 1, 1]) == (2, 2)
