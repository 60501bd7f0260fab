"""A head remembers the weights it learned from, and every command that pairs it names others."""

import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from tests.command_line import succeeded, trtspec
from tests.json_files import read_json, write_json
from tests.tiny import make_head, make_target
from trtspec.checkpoint.heads.pairing import learned_problems, target_record
from trtspec.checkpoint.hub import resolve

CODE = "TS-PAIR-OTHER-WEIGHTS"


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_target(tmp_path_factory.mktemp("base") / "Kimi-K2.5-base", format="bf16")


@pytest.fixture(scope="module")
def tuned(base: Path) -> Path:
    """The same config, names and shapes with other values."""
    return make_target(base.with_name("Kimi-K2.5-tuned"), format="bf16", seed=9)


@pytest.fixture
def head(base: Path, tmp_path: Path) -> Path:
    path = make_head(tmp_path / "head", base)
    learned(path, base)
    return path


def learned(head: Path, target: Path) -> None:
    marks = target_record(resolve(str(target)).checkpoint)
    recorded(head, {"target": "org/base", "commit": "abc", **marks})


def recorded(head: Path, source: Any) -> None:
    record = {"command": "train", "source": source}
    write_json(head / "provenance.json", record)


def severities(head: Path, target: Path) -> list[str]:
    pair = [resolve(str(path), weights=False) for path in (head, target)]
    return [problem.severity for problem in learned_problems(*pair)]


def test_other_weights_are_a_warning_that_names_both(base: Path, tuned: Path, head: Path) -> None:
    assert severities(head, base) == []
    (problem,) = learned_problems(resolve(str(head)), resolve(str(tuned)))
    assert "learned from org/base@abc" in problem.message and str(tuned) in problem.message
    other_format = make_target(head.parent / "int4", format="int4")
    assert severities(head, other_format) == ["info"]


@pytest.mark.parametrize(
    "kind", ["o_proj", "experts.0.down_proj", "mlp.gate.weight", "norm.weight"]
)
def test_a_fine_tune_of_one_kind_of_tensor_is_seen(base: Path, head: Path, kind: str) -> None:
    tuned = head.parent / "tuned"
    shutil.copytree(base, tuned)
    for shard in tuned.glob("*.safetensors"):
        tensors = load_file(shard)
        for name in [name for name in tensors if kind in name]:
            tensors[name] = tensors[name] * 1.5
        save_file(tensors, shard, {"format": "pt"})
    assert severities(head, tuned) == ["warning"]


def test_the_record_survives_a_conversion(base: Path, tuned: Path, head: Path) -> None:
    record = read_json(head / "provenance.json")
    converted = {"command": "convert", "source": {"provenance": record}}
    write_json(head / "provenance.json", converted)
    assert (severities(head, base), severities(head, tuned)) == ([], ["warning"])


def test_a_target_that_quantize_made_is_its_source(base: Path, tuned: Path, head: Path) -> None:
    for source, told in ((base, []), (tuned, ["info"])):
        out = head.parent / f"nvfp4-{source.name}"
        succeeded("quantize", source, "-o", out, "--policy", "k2.5")
        assert severities(head, out) == told
        learned(head, out)
        assert severities(head, source) == [], "learned from the quantized one"
        learned(head, base)


@pytest.mark.parametrize("source", [None, "x", {}, {"target_samples": "x"}, {"target_samples": 5}])
def test_without_a_record_nothing_is_read_or_said(head: Path, tuned: Path, source: Any) -> None:
    recorded(head, source)
    damaged = head.parent / "damaged"
    shutil.copytree(tuned, damaged)
    for shard in damaged.glob("*.safetensors"):
        shard.write_bytes(b"")
    assert severities(head, damaged) == []


opened: list[str] = []  # the target's index


def count(event: str, arguments: tuple[Any, ...]) -> None:
    if event == "open" and arguments[1] and str(arguments[0]).endswith(".index.json"):
        opened.append(event)


def test_every_command_that_pairs_them_says_so(base: Path, tuned: Path, head: Path) -> None:
    """After it read the headers of each once."""
    sys.addaudithook(count)
    serve = ("serve", "TARGET", "--head", str(head), "--dry-run", "--backend")
    for words in (
        ("inspect", str(head), "--against", "TARGET"),
        ("plan", "TARGET", "--head", str(head), "--acceptance", "3"),
        *((*serve, backend) for backend in ("trtllm", "vllm", "reference")),
    ):
        for target, times in ((tuned, 1), (base, 0)):
            opened.clear()
            given = [str(target) if word == "TARGET" else word for word in words]
            answer = trtspec(*given, "--json").json
            codes = [problem["code"] for problem in answer["problems"]]
            assert codes.count(CODE) == times, (given, answer.get("error"))
            assert len(opened) == 1, given
