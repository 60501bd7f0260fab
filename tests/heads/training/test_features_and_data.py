"""Data as the target saw it, states computed once, ModelOpt's dumps, batches by the seed."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from trtspec.checkpoint.tokenizer import KimiTokenizer
from trtspec.errors import TrtspecError
from trtspec.heads.training.samples import (
    batches_of_epoch,
    coverage,
    draft_vocabulary,
    read_samples,
    split_held_out,
)
from trtspec.heads.training.states import Features, collate, compute_features, dumps_of

LAYERS = (1, 3, 4)


@pytest.fixture(scope="module")
def tokenizer(target_dir):
    return KimiTokenizer(target_dir)


@pytest.fixture(scope="module")
def samples(data, tokenizer):
    return read_samples(data, tokenizer, 96)


def test_a_sample_is_the_generation_prompt_then_the_answer(tmp_path, tokenizer):
    path = tmp_path / "one.jsonl"
    turns = [
        {"role": "user", "content": "hello there"},
        {"role": "assistant", "content": "good day"},
    ]
    rows = [{"conversations": turns}, {"conversations": turns, "finish_reason": "length"}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    whole, cut = read_samples(path, tokenizer, 512)
    prompt = tokenizer.encode_chat(turns[:1])[1]
    written = [*tokenizer.encode("good day"), tokenizer.special_id("<|im_end|>")]
    assert list(whole.tokens) == prompt + written
    assert list(whole.answer) == [0] * whole.prompt + [1] * len(written)
    # an answer cut off by the token limit has no end mark
    assert cut.tokens == whole.tokens[:-1]


def test_an_empty_file_is_refused(tmp_path, tokenizer):
    path = tmp_path / "bad.jsonl"
    path.write_text("\n")
    with pytest.raises(TrtspecError, match="TS-DATA-EMPTY"):
        read_samples(path, tokenizer, 512)


def test_states_equal_one_sequence_at_a_time(target, samples):
    """Padding and batching change nothing: float32, then one bf16 rounding."""
    features = compute_features(target, samples, LAYERS)
    for index in (0, 7, 39):
        tokens = torch.tensor([samples[index].tokens])
        output = target(tokens, None, None, aux_layers=LAYERS)
        hidden, aux = features.states(index)
        assert torch.allclose(hidden.float(), output.hidden[0], rtol=1e-2, atol=1e-2)
        assert torch.allclose(aux.float(), output.aux[0], rtol=1e-2, atol=1e-2)


def write_dumps(features: Features, directory: Path, cut: dict[int, int] | None = None) -> None:
    """Writes dumps as ModelOpt's scripts do, named by conversation id.

    `cut`: tokens of a sample, fewer than ours.
    """
    for index, sample in enumerate(features.samples):
        hidden, aux = features.states(index)
        count = (cut or {}).get(index, len(sample.tokens))
        record = {
            "input_ids": torch.tensor(sample.tokens)[:count],
            "hidden_states": hidden[:count].clone(),
        }
        record |= {
            "aux_hidden_states": aux[:count].clone(),
            "loss_mask": torch.tensor(sample.answer)[:count],
        }
        torch.save(record | {"conversation_id": sample.id}, directory / f"{sample.id}.pt")


def test_dumps_come_back_bit_for_bit(tmp_path, target, samples):
    features = compute_features(target, samples, LAYERS)
    write_dumps(features, tmp_path)
    again = dumps_of(samples, tmp_path, target.spec, 3)
    assert again.samples == samples
    for index in range(len(samples)):
        assert all(map(torch.equal, features.states(index), again.states(index)))
    (tmp_path / f"{samples[3].id}.pt").unlink()
    with pytest.raises(
        TrtspecError, match=f"TS-FEATURES-NONE .* 1 of {len(samples)} .* first {samples[3].id}.pt"
    ):
        dumps_of(samples, tmp_path, target.spec, 3)


def test_dumps_of_other_tokens_are_trained_on_as_they_are(tmp_path, target, samples):
    """Another template or a cut: the states belong to the dump's own tokens."""
    features = compute_features(target, samples[:3], LAYERS)
    write_dumps(features, tmp_path, cut={1: 5})
    found = dumps_of(samples[:3], tmp_path, target.spec, 3)
    assert [len(sample.tokens) for sample in found.samples] == [
        len(samples[0].tokens),
        5,
        len(samples[2].tokens),
    ]
    assert found.samples[0] == samples[0]
    assert all(map(torch.equal, found.states(2), features.states(2)))


def test_dumps_of_another_target_are_refused(tmp_path, target, samples):
    write_dumps(compute_features(target, samples[:2], (1, 3)), tmp_path)
    with pytest.raises(TrtspecError, match="TS-FEATURES-DUMP"):
        dumps_of(samples[:2], tmp_path, target.spec, 3)
    with pytest.raises(TrtspecError, match="beyond the target's vocabulary"):
        dumps_of(samples[:2], tmp_path, replace(target.spec, vocab_size=100), 2)
    with pytest.raises(TrtspecError, match="TS-FEATURES-NONE"):
        dumps_of(samples[:2], tmp_path / "nothing", target.spec, 3)


def test_damaged_dumps_are_found(tmp_path, target, samples):
    """Sixty flipped bytes, twenty truncations and a NaN that was really written are found."""
    features = compute_features(target, samples[:1], LAYERS)
    write_dumps(features, tmp_path)
    path = tmp_path / f"{samples[0].id}.pt"
    first = [part.clone() for part in dumps_of(samples[:1], tmp_path, target.spec, 3).states(0)]
    whole, found = path.read_bytes(), 0
    places = range(0, len(whole), len(whole) // 60)
    for place in places:
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 64]) + whole[place + 1 :])
        try:
            states = dumps_of(samples[:1], tmp_path, target.spec, 3).states(0)
        except TrtspecError:
            found += 1
        else:  # a byte between the tensors
            assert all(map(torch.equal, states, first))
    print(f"{found} of {len(places)} flipped bytes refused, the others change nothing")
    assert found > len(places) / 2
    for size in range(0, len(whole) - 1, len(whole) // 20):
        path.write_bytes(whole[:size])
        with pytest.raises(TrtspecError, match="TS-FEATURES-DUMP"):
            dumps_of(samples[:1], tmp_path, target.spec, 3).states(0)
    features.held[0][1][2, 5] = float("nan")
    write_dumps(features, tmp_path)
    with pytest.raises(TrtspecError, match="TS-FEATURES-NAN"):
        dumps_of(samples[:1], tmp_path, target.spec, 3).states(0)


def test_a_pickle_that_runs_code_is_not_a_dump(tmp_path, target, samples):
    import os

    class Evil:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "owned"),)

    lists = {"input_ids": torch.ones(1), "hidden_states": [], "aux_hidden_states": []}
    for dump in ({"input_ids": Evil()}, lists):
        torch.save(dump, tmp_path / f"{samples[0].id}.pt")
        with pytest.raises(TrtspecError, match="TS-FEATURES-DUMP"):
            dumps_of(samples[:1], tmp_path, target.spec, 3)
    assert not (tmp_path / "owned").exists()


def test_batches_hold_every_sample_once_and_repeat_with_the_seed():
    lengths = [index % 17 + 3 for index in range(101)]
    train, held = split_held_out([f"s{index}" for index in range(101)], 0.2, 0)
    assert sorted(train + held) == list(range(101))
    assert len(held) == 20
    assert len(split_held_out([f"s{index}" for index in range(12)], 0.01, 0)[1]) == 1
    assert split_held_out(["one"], 0.4, 0) == ([0], [])
    epochs = [batches_of_epoch(lengths, train, 8, 3, epoch) for epoch in (0, 0, 1)]
    assert epochs[0] == epochs[1] != epochs[2]
    assert sorted(sum(epochs[0], [])) == sorted(train)


def test_a_batch_pads_right_and_masks_what_does_not_count(target, samples):
    features = compute_features(target, samples, LAYERS)
    batch = collate(features, [0, 1], answer_only=False)
    for row, index in enumerate((0, 1)):
        count = len(samples[index].tokens)
        length = batch.tokens.shape[1]
        assert batch.positions[batch.positions // length == row].tolist() == [
            row * length + at for at in range(1, count)
        ]
        assert torch.equal(batch.hidden[row, :count], features.states(index)[0])
        assert not batch.hidden[row, count:].any()
    answers = collate(features, [0], answer_only=True)
    answer = samples[0].answer
    assert answers.positions.tolist() == [at for at in range(1, len(answer) - 1) if answer[at + 1]]


def test_the_draft_vocabulary_is_what_the_target_wrote(samples):
    ids = draft_vocabulary(samples, 20, 512)
    assert ids == sorted(set(ids))
    assert len(ids) == 20
    assert coverage(samples, ids) > 0.85
    assert coverage(samples, draft_vocabulary(samples, 512, 512)) == 1.0
