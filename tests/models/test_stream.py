"""The layer stream has the whole model's bits, in every format, states in memory or on disk."""

import pytest
import torch

from tests.json_files import read_json, write_json
from tests.tiny import make_target
from trtspec.errors import TrtspecError
from trtspec.models.k2 import TargetOutput
from trtspec.models.stream import LayerStream, States
from trtspec.models.weights import load_target

AUX = (0, 2, 3)


def batches(seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randint(0, 500, shape, generator=generator)
        for shape in ((1, 17), (3, 9), (3, 9), (2, 40))
    ]


def streamed(stream: LayerStream, states: States) -> list[TargetOutput]:
    """Every batch's logits, final states and captured outputs, as the whole model returns them."""
    captured: dict[int, list[torch.Tensor]] = {}
    stream.embed(batches(), states)

    def keep(index: int, number: int, output: torch.Tensor) -> None:
        if index in AUX:
            captured.setdefault(number, []).append(output.clone())

    stream.run(batches(), states, on_output=keep)
    ends = stream.model_without_layers()
    with torch.inference_mode():
        hidden = [ends.norm(states.get(number)) for number in range(len(batches()))]
        logits = [
            torch.nn.functional.linear(state, ends.lm_head.weight).float() for state in hidden
        ]
    return [
        TargetOutput(logits[i], hidden[i], torch.cat(captured[i], -1), torch.empty(0))
        for i in range(len(hidden))
    ]


@pytest.mark.parametrize(
    ("format", "nested", "budget"),
    [
        ("bf16", True, float("inf")),
        ("int4", True, 0),
        ("fp8-block", False, 0),
        ("nvfp4", True, 0),
        ("int4", False, 0),
    ],
)
def test_the_same_bits_as_the_whole_model(tmp_path, format, nested, budget):
    path = make_target(tmp_path / "target", format=format, nested=nested, layers=4, experts=6)
    model = load_target(path, dtype=torch.float32)
    with LayerStream(path, threads=2) as stream:
        states = States(batches(), 64, torch.float32, budget=budget, directory=tmp_path / "states")
        for tokens, got in zip(batches(), streamed(stream, states), strict=True):
            with torch.inference_mode():
                whole = model(tokens, aux_layers=AUX)
            assert torch.equal(got.logits, whole.logits)
            assert torch.equal(got.hidden, whole.hidden)
            assert torch.equal(got.aux, whole.aux)
    assert states.on_disk == (budget == 0)
    assert len(list((tmp_path / "states").glob("*"))) == (budget == 0)  # one generation at a time


def test_nvfp4_as_plain_weights_is_another_function(tmp_path):
    path = make_target(tmp_path / "target", format="nvfp4", layers=4, experts=6)
    plain, packed = (
        streamed(LayerStream(path, activation=how), States(batches(), 64, torch.float32))[0].hidden
        for how in ("decoded", "w4a4")
    )
    assert not torch.equal(plain, packed)
    assert (plain - packed).norm() < packed.norm()


@pytest.mark.parametrize("budget", [0, float("inf")])
def test_a_killed_run_takes_up_the_last_generation(tmp_path, budget):
    path = make_target(tmp_path / "target", layers=4)

    def fresh(directory: str) -> States:
        return States(
            batches(),
            64,
            torch.float32,
            budget=budget,
            directory=tmp_path / directory,
            durable=True,
        )

    with LayerStream(path) as stream:
        whole = fresh("whole")
        stream.embed(batches(), whole)
        stream.run(batches(), whole)
        begun = fresh("begun")
        stream.embed(batches(), begun)
        records = []

        def stop(index: int) -> None:
            records.append(begun.record)
            begun.drop_older()
            if index == 1:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            stream.run(batches(), begun, after_layer=stop)
        resumed = fresh("begun")
        assert not resumed.restore(records[0])  # its file is gone
        assert resumed.restore(records[-1])
        stream.run(batches(), resumed, first=2)
    assert resumed.record == whole.record
    assert all(
        torch.equal(resumed.get(number), whole.get(number)) for number in range(len(batches()))
    )
    damaged = resumed.path(4)
    data = bytearray(damaged.read_bytes())
    data[5] ^= 1
    damaged.write_bytes(data)
    assert not fresh("begun").restore(resumed.record)


def test_a_missing_tensor_is_named_before_anything_runs(tmp_path):
    path = make_target(tmp_path / "target", layers=3)
    index = path / "model.safetensors.index.json"
    table = read_json(index)
    gone = "language_model.model.layers.2.self_attn.o_proj.weight"
    del table["weight_map"][gone]
    write_json(index, table)
    with pytest.raises(TrtspecError, match="o_proj"):
        LayerStream(path)


def test_states_beyond_the_budget_need_a_directory():
    with pytest.raises(ValueError, match="directory"):
        States(batches(), 64, torch.float32, budget=100)
