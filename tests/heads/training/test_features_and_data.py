"""Data as the target saw it, states computed once, dumps in ModelOpt's format, batches as a function of the seed."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from trtspec.checkpoint.tokenizer import KimiTokenizer
from trtspec.errors import TrtspecError
from trtspec.heads.training.features import (
    all_dumps,
    check_room,
    collate,
    compute_features,
    dump_features,
    dump_path,
    dumps_of,
    find_dumps,
    states_of,
    write_dumps,
)
from trtspec.heads.training.samples import batches_of_epoch, coverage, draft_vocabulary, read_samples, split_held_out
from trtspec.models.weights import load_target

LAYERS = (1, 3, 4)


@pytest.fixture(scope="module")
def tokenizer(target_dir):
    return KimiTokenizer(target_dir)


@pytest.fixture(scope="module")
def model(target_dir):
    return load_target(target_dir, dtype=torch.float32)


@pytest.fixture(scope="module")
def samples(data, tokenizer):
    return read_samples(data, tokenizer, 96)


def test_a_sample_is_the_generation_prompt_then_the_answer(tmp_path, tokenizer):
    path = tmp_path / "one.jsonl"
    turns = [{"role": "user", "content": "hello there"}, {"role": "assistant", "content": "good day"}]
    rows = [{"conversations": turns}, {"conversations": turns, "finish_reason": "length"}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    whole, cut = read_samples(path, tokenizer, 512)
    prompt = tokenizer.apply_chat_template(turns[:1], add_generation_prompt=True)
    end = tokenizer.special_id("<|im_end|>")
    assert list(whole.tokens) == prompt + tokenizer.encode("good day") + [end]
    assert list(cut.tokens) == list(whole.tokens[:-1])  # an answer cut off by the token limit has no end mark
    assert whole.prompt == len(prompt)
    written = [token for token, mine in zip(whole.tokens, whole.answer, strict=True) if mine]
    assert written[-len(tokenizer.encode("good day")) - 1 :] == tokenizer.encode("good day") + [end]
    assert not any(whole.answer[: len(prompt) - 2])


def test_raw_text_needs_no_template(tmp_path, tokenizer):
    path = tmp_path / "raw.jsonl"
    path.write_text(json.dumps({"prompt": "def f(", "completion": "x): return x"}) + "\n")
    (sample,) = read_samples(path, tokenizer, 512)
    assert tokenizer.decode(sample.tokens) == "def f(x): return x"
    assert sum(sample.answer) == len(tokenizer.encode("x): return x"))


@pytest.mark.parametrize(
    ("text", "code"),
    [("{\n", "TS-DATA-ROW"), ('{"text": "x"}\n', "TS-DATA-ROW"), ("[1]\n", "TS-DATA-ROW"), ("\n", "TS-DATA-EMPTY")],
)
def test_bad_data_is_refused_by_line(tmp_path, tokenizer, text, code):
    path = tmp_path / "bad.jsonl"
    path.write_text(text)
    with pytest.raises(TrtspecError, match=code):
        read_samples(path, tokenizer, 512)


def test_states_equal_one_sequence_at_a_time(model, samples):
    """Padding and batching change nothing: float32, then one bf16 rounding."""
    features = compute_features(model, samples, LAYERS)
    for index in (0, 7, 39):
        tokens = torch.tensor([samples[index].tokens])
        output = model(tokens, None, None, aux_layers=LAYERS)
        rows = features.rows(index)
        assert torch.allclose(features.hidden[rows].float(), output.hidden[0], rtol=1e-2, atol=1e-2)
        assert torch.allclose(features.aux[rows].float(), output.aux[0], rtol=1e-2, atol=1e-2)
    assert features.bytes == sum(len(s.tokens) for s in samples) * 4 * 64 * 2


def test_dumps_come_back_bit_for_bit(tmp_path, model, samples):
    features = compute_features(model, samples, LAYERS)
    write_dumps(features, tmp_path)
    again = find_dumps(samples, tmp_path, model.spec, 3)
    assert again is not None
    assert again.samples == samples
    assert again.bytes == features.bytes
    for index in range(len(samples)):
        assert all(map(torch.equal, features.states(index), again.states(index)))
    dump_path(tmp_path, samples[3]).unlink()
    assert find_dumps(samples, tmp_path, model.spec, 3) is None


def test_an_engines_dumps_are_found_by_conversation(tmp_path, model, samples):
    """ModelOpt's scripts name files by conversation id; states of other tokens than ours bring their tokens along."""
    features = compute_features(model, samples[:3], LAYERS)
    for index, sample in enumerate(samples[:3]):
        hidden, aux = features.states(index)
        cut = 5 if index == 1 else len(sample.tokens)
        record = {"input_ids": torch.tensor(sample.tokens)[:cut], "hidden_states": hidden[:cut].clone()}
        record |= {"aux_hidden_states": aux[:cut].clone(), "conversation_id": sample.id}
        torch.save(record, tmp_path / f"{sample.id}.pt")
    found = find_dumps(samples[:3], tmp_path, model.spec, 3)
    assert found is not None
    assert [len(sample.tokens) for sample in found.samples] == [len(samples[0].tokens), 5, len(samples[2].tokens)]
    assert found.samples[0] == samples[0]
    assert all(map(torch.equal, found.states(2), features.states(2)))
    assert {sample.id for sample in all_dumps(tmp_path, model.spec, 3).samples} == {s.id for s in samples[:3]}


def test_dumps_of_another_target_are_refused(tmp_path, model, samples):
    write_dumps(compute_features(model, samples[:2], (1, 3)), tmp_path)
    with pytest.raises(TrtspecError, match="TS-FEATURES-DUMP"):
        all_dumps(tmp_path, model.spec, 3)
    with pytest.raises(TrtspecError, match="TS-FEATURES-NONE"):
        all_dumps(tmp_path / "nothing", model.spec, 3)


def test_a_dump_tells_what_it_is_of(tmp_path, target_dir, model, samples):
    """Another target, another vocabulary, other layers of the same number: refused by name; engines' dumps say less."""
    of = states_of(target_dir, LAYERS)
    dump_features(model, samples[:3], tmp_path, of)
    assert len(all_dumps(tmp_path, model.spec, 3, of).samples) == 3
    for other, says in (
        (replace(of, layers=(1, 2, 4)), r"layers \[1, 3, 4\], and this head reads \[1, 2, 4\]"),
        (replace(of, target="x"), "another target"),
        (replace(of, target="x", tokenizer="y"), "another target and tokenizer"),
    ):
        with pytest.raises(TrtspecError, match=f"TS-FEATURES-OTHER .*{says}"):
            all_dumps(tmp_path, model.spec, 3, other)
        with pytest.raises(TrtspecError, match="TS-FEATURES-OTHER"):
            find_dumps(samples[:3], tmp_path, model.spec, 3, other)
    with pytest.raises(TrtspecError, match="beyond the target's vocabulary"):
        all_dumps(tmp_path, replace(model.spec, vocab_size=100), 3)


def test_damaged_dumps_are_found(tmp_path, target_dir, model, samples):
    """Sixty bytes flipped, one at a time, and twenty truncations; then NaN that was really written."""
    of = states_of(target_dir, LAYERS)
    dump_features(model, samples[:1], tmp_path, of)
    path = dump_path(tmp_path, samples[0])
    first = [part.clone() for part in all_dumps(tmp_path, model.spec, 3, of).states(0)]
    whole, found = path.read_bytes(), 0
    places = range(0, len(whole), len(whole) // 60)
    for place in places:
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 64]) + whole[place + 1 :])
        try:
            states = all_dumps(tmp_path, model.spec, 3, of).states(0)
        except TrtspecError:
            found += 1
        else:  # a byte between the tensors
            assert all(map(torch.equal, states, first))
    print(f"{found} of {len(places)} flipped bytes refused, the others change nothing")
    assert found > len(places) / 2
    for size in range(0, len(whole) - 1, len(whole) // 20):
        path.write_bytes(whole[:size])
        with pytest.raises(TrtspecError, match="TS-FEATURES-DUMP"):
            all_dumps(tmp_path, model.spec, 3, of).states(0)
    path.unlink()
    features = compute_features(model, samples[:1], LAYERS)
    features.aux[2, 5] = float("nan")
    write_dumps(features, tmp_path, of)
    with pytest.raises(TrtspecError, match="TS-FEATURES-NAN"):
        all_dumps(tmp_path, model.spec, 3, of).states(0)


def test_dumping_is_resumed_by_batch_with_the_same_bytes(tmp_path, target_dir, model, samples):
    of = states_of(target_dir, LAYERS)
    dump_features(model, samples, tmp_path / "whole", of)
    held = compute_features(model, samples, LAYERS)
    calls = []

    def killed(*args, **kwargs):
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return model(*args, **kwargs)

    killed.spec = model.spec
    with pytest.raises(KeyboardInterrupt):
        dump_features(killed, samples, tmp_path / "cut", of)
    left = {path: path.stat().st_mtime_ns for path in (tmp_path / "cut").glob("*.pt")}
    assert 0 < len(left) < len(samples)
    dump_features(model, samples, tmp_path / "cut", of)
    assert all(path.stat().st_mtime_ns == when for path, when in left.items())
    for rank in range(2):  # two processes
        dump_features(model, samples, tmp_path / "two", of, part=slice(rank, None, 2))
    for name in ("whole", "cut", "two"):
        dumped = dumps_of(samples, tmp_path / name, model.spec, 3, of)
        assert dumped is not None
        for index in range(len(samples)):
            assert all(map(torch.equal, held.states(index), dumped.states(index)))


def test_states_that_do_not_fit_the_disk_are_refused_with_figures(tmp_path):
    check_room(tmp_path / "new" / "dumps", 1000, 1)
    with pytest.raises(TrtspecError, match=r"TS-FEATURES-DISK the states of 224,000,000 tokens take 1,152,921,504,606"):
        check_room(tmp_path / "new" / "dumps", 1 << 60, 224_000_000)


def test_a_pickle_that_runs_code_is_not_a_dump(tmp_path, model):
    import os

    class Evil:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "owned"),)

    torch.save({"input_ids": Evil()}, tmp_path / "evil.pt")
    with pytest.raises(TrtspecError, match="TS-FEATURES-DUMP"):
        all_dumps(tmp_path, model.spec, 3)
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


def test_a_batch_pads_right_and_masks_what_does_not_count(model, samples):
    features = compute_features(model, samples, LAYERS)
    batch = collate(features, [0, 1], answer_only=False)
    for row, index in enumerate((0, 1)):
        count = len(samples[index].tokens)
        length = batch.tokens.shape[1]
        assert batch.places[batch.places // length == row].tolist() == [row * length + at for at in range(1, count)]
        assert torch.equal(batch.hidden[row, :count], features.hidden[features.rows(index)])
        assert not batch.hidden[row, count:].any()
    answers = collate(features, [0], answer_only=True)
    answer = samples[0].answer
    assert answers.places.tolist() == [at for at in range(1, len(answer) - 1) if answer[at + 1]]


def test_the_draft_vocabulary_is_what_the_target_wrote(samples):
    ids = draft_vocabulary(samples, 20, 512)
    assert ids == sorted(set(ids))
    assert len(ids) == 20
    assert coverage(samples, ids) > 0.85
    assert coverage(samples, draft_vocabulary(samples, 512, 512)) == 1.0
