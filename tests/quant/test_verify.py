"""`compare` finds each fault on a converted checkpoint damaged that way."""

import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.cases import slow
from tests.checkpoint.test_clean_targets import above_info
from tests.command_line import inspected
from tests.json_files import read_json, write_json
from tests.tiny import make_target, read_tensors, write_tensors
from trtspec.checkpoint.describe import describe, hash_problems
from trtspec.checkpoint.headers import Checkpoint
from trtspec.checkpoint.hub import resolve
from trtspec.checkpoint.target_problems import read_target
from trtspec.errors import TrtspecError
from trtspec.quant.conversion_plan import ConversionOptions
from trtspec.quant.policy import load_policy
from trtspec.quant.run import quantize_checkpoint
from trtspec.quant.verify import compare

MODULE = "language_model.model.layers.1.mlp.experts.2.down_proj"
NORM = "language_model.model.layers.1.input_layernorm.weight"


@pytest.fixture(scope="module")
def pair(tmp_path_factory) -> tuple[Path, Path]:
    root = tmp_path_factory.mktemp("pair")
    source = make_target(root / "in", format="int4", layers=2, shards=1, vision=True)
    quantize_checkpoint(source, root / "out", load_policy("k2.5"))
    return source, root / "out"


def codes(out: Path, source: Path, sample: int = 0) -> set[str]:
    found = inspected(out, source, sample).problems
    return {
        problem.code
        for problem in found
        if problem.severity == "error" or problem.code.startswith("TS-QUANT")
    }


@pytest.mark.parametrize("format", ["bf16", "int4", "fp8-block"])
@pytest.mark.parametrize("policy", ["k2.5", "k2.6", "k2.7-code"])
def test_a_good_conversion_has_no_problem(format, policy, out, new_target):
    source = new_target(format=format, layers=3, vision=True)
    quantize_checkpoint(source, out, load_policy(policy))
    report = inspected(out, source, 0)
    found = report.values["comparison"]
    assert not report.problems and found["compared"] == found["tensors"]
    assert not above_info(out)
    assert describe(resolve(str(out)), hashes=True).hashes_verified == 2
    assert all(
        0.05 < entry["relative_error"] <= entry["worst"] < 0.12
        for entry in found["classes"].values()
    )
    assert inspected(out, source, 10).values["comparison"]["compared"] == 10


Changed = Callable[[torch.Tensor], torch.Tensor | None]


def nan_at_one_place(scale: torch.Tensor) -> torch.Tensor:
    scale.view(torch.uint8)[5, 1] = 0xFF
    return scale


# tensor, what becomes of it (None: it is lost), and how that is named
DAMAGES: list[tuple[str, Changed, str]] = [
    (NORM, lambda _: None, "TS-QUANT-TENSOR-LOST"),
    (f"{MODULE}.extra", lambda _: torch.ones(2), "TS-QUANT-TENSOR-NEW"),
    (NORM, lambda norm: norm.float(), "TS-QUANT-DTYPE"),
    (NORM, lambda norm: norm.index_fill(0, torch.tensor(3), 7), "TS-QUANT-CHANGED"),
    (f"{MODULE}.weight", lambda _: None, "TS-TARGET-WEIGHT-MISSING"),
    (f"{MODULE}.input_scale", lambda _: None, "TS-TARGET-SCALE-MISSING"),
    (f"{MODULE}.weight_scale", lambda scale: scale[:, :1].contiguous(), "TS-TARGET-SCALE-SHAPE"),
    (f"{MODULE}.weight_scale", nan_at_one_place, "TS-TARGET-BAD-SCALE"),
    (f"{MODULE}.weight_scale_2", lambda scale: scale * 1.5, "TS-QUANT-ERROR"),
    (f"{MODULE}.weight", lambda packed: (packed >> 4) | (packed << 4), "TS-QUANT-ERROR"),
]


@pytest.mark.parametrize(
    ("name", "change", "code"), DAMAGES, ids=[f"{name[-30:]}-{code}" for name, _, code in DAMAGES]
)
def test_each_damage_is_found(pair, tmp_path, name, change, code):
    source, good = pair
    for file in ("config.json", "hf_quant_config.json"):
        (tmp_path / file).write_bytes((good / file).read_bytes())
    tensors = read_tensors(good)
    changed = change(tensors.pop(name, torch.empty(0)))
    tensors |= {} if changed is None else {name: changed}
    write_tensors(tmp_path, tensors)
    assert code in codes(tmp_path, source)


@pytest.mark.parametrize(
    "change",
    [
        lambda ignore: [*ignore, "language_model.model.layers.1.mlp.experts*"],
        lambda ignore: [entry for entry in ignore if "layers.1" not in entry],
    ],
)
def test_the_exclude_list_must_fit_the_tensors(pair, tmp_path, change):
    source, good = pair
    config = read_json(good / "config.json")
    config["quantization_config"]["ignore"] = change(config["quantization_config"]["ignore"])
    write_json(tmp_path / "config.json", config)
    for name in ("model.safetensors", "hf_quant_config.json"):
        (tmp_path / name).symlink_to(good / name)
    assert codes(tmp_path, source, 1) == {"TS-TARGET-EXCLUDE", "TS-TARGET-QUANT-CONFIGS"}


def flipped(good: Path, directory: Path, name: str, bit: int) -> Path:
    """A copy of the checkpoint in which one bit of one tensor is another."""
    shutil.copytree(good, directory, dirs_exist_ok=True)
    info = Checkpoint.open(good).tensors[name]
    with (directory / info.shard).open("r+b") as stream:
        stream.seek(info.begin + bit // 8)
        byte = stream.read(1)[0]
        stream.seek(info.begin + bit // 8)
        stream.write(bytes([byte ^ 1 << bit % 8]))
    return directory


@pytest.mark.parametrize("weight_scales", ["max", slow("mse")])
def test_one_flipped_bit_is_found_in_every_tensor(tmp_path, weight_scales, out, new_target):
    """A flipped bit is found by the source, except in input_scale, and by the recorded hashes.

    input_scale follows from no weight; the hashes find all.
    """
    source = new_target(format="int4", layers=2, experts=2, shards=1, vision=True)
    good, draw, unseen = out, random.Random(0), []
    quantize_checkpoint(
        source, good, load_policy("k2.6"), ConversionOptions(weight_scales=weight_scales)
    )
    assert not codes(good, source)
    for name, info in Checkpoint.open(good).tensors.items():
        bad = flipped(good, tmp_path / "bad", name, draw.randrange(8 * info.nbytes))
        verified, problems = hash_problems(bad, ("model.safetensors",))
        assert (verified, [problem.code for problem in problems]) == (0, ["TS-HASH-DIFFERS"]), name
        found = compare(read_target(bad), Checkpoint.open(source), 0).problems
        if not any(problem.severity == "error" for problem in found):
            unseen.append(name)
    assert all(name.endswith("input_scale") for name in unseen)


@pytest.mark.parametrize("factor", [1.1, 0.9, 1.5, 2.0, 1.0001])
def test_a_wrong_weight_scale_2_is_found_against_the_source(pair, tmp_path, factor):
    source, good = pair
    shutil.copytree(good, tmp_path / "bad")
    for module in (MODULE, MODULE.replace("down_proj", "gate_proj")):
        tensors = read_tensors(good)
        tensors[f"{module}.weight_scale_2"] *= factor
        save_file(tensors, tmp_path / "bad/model.safetensors", {"format": "pt"})
        found = [
            problem
            for problem in inspected(tmp_path / "bad", source, 0).problems
            if problem.code == "TS-QUANT-SCALE-2"
        ]
        assert [problem.where for problem in found] == [f"{module}.weight_scale_2"]
        assert f"{factor:g}"[:3] in found[0].message


def test_another_exporter_is_not_accused(pair, tmp_path):
    """Scales by another rule are what they are, unless the others follow from the source."""
    source, good = pair
    shutil.copytree(good, tmp_path / "theirs")
    (tmp_path / "theirs/provenance.json").write_text("{")
    with pytest.raises(
        TrtspecError, match="not valid JSON"
    ):  # a broken record makes no other exporter
        inspected(tmp_path / "theirs", source)
    (tmp_path / "theirs/provenance.json").unlink()
    tensors = read_tensors(good)
    for name in [name for name in tensors if name.endswith("weight_scale_2")]:
        tensors[name] *= 1.02
    save_file(tensors, tmp_path / "theirs/model.safetensors", {"format": "pt"})
    assert not codes(tmp_path / "theirs", source)
