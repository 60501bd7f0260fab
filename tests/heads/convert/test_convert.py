"""Conversion between all pairs of dialects: what is written, identity there and back, refusals.

The expected files come from foreign_heads.py, which knows the projects' layouts and nothing of
trtspec.
"""

import itertools
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.cases import slow
from tests.command_line import inspected
from tests.heads.convert.foreign_heads import DIALECTS, IDS, expressible, write_head
from tests.json_files import read_json, write_json
from tests.tiny import read_tensors
from trtspec.checkpoint.headers import Checkpoint
from trtspec.checkpoint.heads.read import read_head
from trtspec.checkpoint.hub import resolve
from trtspec.heads.convert.conversion import HeadConversion, Options, convert_head
from trtspec.models.head_weights import load_head

TO = {"modelopt": "trtllm"}
KINDS = list(itertools.product(("mha", "mla"), ("3", "3.1"), (None, 128)))


@pytest.fixture(scope="module")
def sources(room: Path, target_dir: Path):
    """Head of a kind in a dialect, made on first use."""
    made: dict[tuple[Any, ...], Path] = {}

    def source(dialect: str, attention: str, eagle: str, vocab: int | None) -> Path:
        key = (dialect, attention, eagle, vocab)
        if key not in made:
            options = {"attention": attention, "eagle": eagle, "draft_vocab": vocab}
            made[key] = write_head(room / "-".join(map(str, key)), target_dir, dialect, **options)
        return made[key]

    return source


def convert(
    source: Path, output: Path, dialect: str, target_dir: Path | None, **options: Any
) -> HeadConversion:
    pair = resolve(str(target_dir)) if target_dir else None
    return convert_head(
        resolve(str(source)), output, Options(TO.get(dialect, dialect), **options), pair
    )


def errors(result: HeadConversion) -> set[str]:
    return {problem.code for problem in result.problems if problem.severity == "error"}


def assert_same_tensors(path: Path, expected: Path) -> None:
    found, wanted = read_tensors(path), read_tensors(expected)
    assert {name: (t.dtype, t.shape) for name, t in found.items()} == {
        name: (t.dtype, t.shape) for name, t in wanted.items()
    }
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def there_and_back(
    room: Path, target_dir: Path, sources: Any, one: str, other: str, kind: tuple[Any, ...]
) -> None:
    """A -> B is what B's own exporter would write, and B -> A is A again, config included."""
    begin, end = sources(one, *kind), sources(other, *kind)
    middle, back, canonical = (
        room / "-".join(map(str, ("out", one, other, *kind, step))) for step in "mbc"
    )
    assert not errors(convert(begin, middle, other, target_dir))
    assert_same_tensors(middle, end)
    assert not errors(convert(middle, back, one, target_dir))
    assert_same_tensors(back, begin)
    assert not errors(convert(begin, canonical, one, target_dir))
    assert read_json(back / "config.json") == read_json(canonical / "config.json")
    assert (back / "model.safetensors").read_bytes() == (
        canonical / "model.safetensors"
    ).read_bytes()


@pytest.mark.parametrize("rest", [False, slow(True)])  # from ModelOpt's, all others
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: "-".join(map(str, kind)))
def test_there_and_back_is_the_identity(
    room: Path, target_dir: Path, sources: Any, kind: tuple[Any, ...], rest: bool
) -> None:
    for one, other in itertools.permutations(
        (name for name in DIALECTS if expressible(name, *kind)), 2
    ):
        if (one != "modelopt") == rest:
            there_and_back(room, target_dir, sources, one, other, kind)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: "-".join(map(str, kind)))
def test_the_function_is_the_same_from_every_dialect(
    room: Path, target_dir: Path, sources: Any, target: Any, kind: tuple[Any, ...]
) -> None:
    torch.manual_seed(0)
    states, tokens = torch.randn(2, 6, 3 * 64), torch.randint(0, 512, (2, 6))

    def logits(path: Path) -> torch.Tensor:
        head = load_head(path, target, dtype=torch.float32)
        feedback, normed = head(head.fuse(states), tokens, None, None)
        again = head(feedback, tokens, None, None)[1]
        return torch.cat((head.logits(normed), head.logits(again)))

    expected = logits(sources("modelopt", *kind))
    for dialect in DIALECTS:
        if expressible(dialect, *kind):
            output = room / "-".join(map(str, ("function", dialect, *kind)))
            convert(sources("modelopt", *kind), output, dialect, target_dir)
            assert torch.equal(logits(output), expected), dialect


REFUSED = [
    (dialect, attention, eagle)
    for dialect, attention, eagle in itertools.product(DIALECTS, ("mha", "mla"), ("3", "3.1"))
    if not expressible(dialect, attention, eagle)
]


@pytest.mark.parametrize(("dialect", "attention", "eagle"), REFUSED)
def test_an_impossible_pair_is_refused_with_its_reason(
    room: Path, target_dir: Path, sources: Any, dialect: str, attention: str, eagle: str
) -> None:
    output = room / f"refused-{dialect}-{attention}-{eagle}"
    result = convert(sources("vllm", attention, eagle, None), output, dialect, target_dir)
    wanted = ({"TS-CONVERT-MLA"} if attention == "mla" else set()) | (
        {"TS-CONVERT-NORMS"} if eagle == "3.1" and dialect == "safeailab" else set()
    )
    assert wanted <= errors(result) <= wanted | {"TS-CONVERT-ROPE"}
    assert result.output is None
    assert not output.exists()
    assert all(problem.message and problem.remedy for problem in result.problems)


@pytest.mark.parametrize("layers", [(1, 3, 4), (2, 3, 6), (3, 5, 6)])
def test_layer_ids_follow_each_convention(
    room: Path, target_dir: Path, layers: tuple[int, ...]
) -> None:
    """Layer outputs are numbered by each dialect's convention.

    They are outputs, numbers of layers that ran, or ids by SGLang's first-id rule.
    """
    source = write_head(room / f"ids-{layers}", target_dir, "modelopt", aux_layers=layers)
    outputs, inputs = list(layers), [layer + 1 for layer in layers]
    for dialect in DIALECTS[:-1]:
        output = room / f"ids-{layers}-{dialect}"
        result = convert(source, output, dialect, target_dir)
        config = read_json(output / "config.json")
        nested = (config.get("eagle_config") or {}).get(IDS)
        if dialect in ("vllm", "speculators"):
            assert config[IDS] == inputs
        if dialect in ("modelopt", "torchspec", "specforge"):
            assert nested == outputs
        if dialect == "vllm":
            assert nested == inputs
        if dialect == "sglang":
            assert nested == (outputs if outputs[0] == 1 else inputs)
        assert read_head(Checkpoint.open(output))[0].aux_layers == layers
        assert result.capture == (None if layers == (1, 3, 4) else outputs)
    safeailab = convert(source, room / f"ids-{layers}-safeailab", "safeailab", target_dir)
    assert errors(safeailab) == (set() if layers == (1, 3, 4) else {"TS-CONVERT-LAYERS"})


STORED = [dialect for dialect in DIALECTS if dialect != "safeailab"]


def restated(source: Path, output: Path, nested: list[int] | None, top: list[int] | None) -> Path:
    """The head with these layer ids in eagle_config and at the top level of config.json."""
    shutil.copytree(source, output)
    config = read_json(source / "config.json")
    config.pop(IDS, None)
    (config.get("eagle_config") or {}).pop(IDS, None)
    if nested is not None:
        config.setdefault("eagle_config", {})[IDS] = nested
    if top is not None:
        config[IDS] = top
    write_json(output / "config.json", config)
    return output


@pytest.mark.parametrize("layers", [(2, 3, 6), slow((1, 3, 4))])
@pytest.mark.parametrize("dialect", STORED)
def test_ids_in_both_conventions_are_reconciled(
    room: Path, target_dir: Path, dialect: str, layers: tuple[int, ...]
) -> None:
    """Outputs in eagle_config and one more at the top level agree, whatever the tensors' names."""
    plain = write_head(room / f"plain-{dialect}-{layers}", target_dir, dialect, aux_layers=layers)
    nested, top = list(layers), [layer + 1 for layer in layers]
    source = restated(plain, room / f"both-{dialect}-{layers}", nested, top)
    assert read_head(Checkpoint.open(source))[0].aux_layers == layers
    for other in STORED:
        there, back = (
            room / f"both-{dialect}-{layers}-{other}-{step}" for step in ("there", "back")
        )
        assert convert(source, there, other, target_dir).capture == (
            None if layers == (1, 3, 4) else nested
        )
        convert(there, back, dialect, target_dir)
        assert [read_head(Checkpoint.open(path))[0].aux_layers for path in (there, back)] == [
            layers,
            layers,
        ], other


@pytest.mark.parametrize(
    ("nested", "top", "readings"),
    [([2, 4, 5], [2, 4, 5], "[1, 3, 4] [2, 4, 5]"), (None, [2, 4, 5], "[1, 3, 4] [2, 4, 5]"),
     ([1, 3, 4], [1, 3, 4], "[0, 2, 3] [1, 3, 4]"), ([1, 3, 4], [2, 4, 6], "[1, 3, 5] [1, 3, 4]")],
)  # fmt: skip
def test_ids_with_two_readings_are_refused_with_both(
    room: Path, target_dir: Path, sources: Any, nested: Any, top: Any, readings: str
) -> None:
    source = restated(
        sources("torchspec", "mha", "3", None), room / f"doubt-{nested}-{top}", nested, top
    )
    result = convert(source, room / "doubt-out", "modelopt", target_dir)
    assert errors(result) == {"TS-HEAD-LAYER-IDS"}
    message = next(one.message for one in result.problems if one.severity == "error")
    assert re.findall(r"are the outputs (\[.*?\])", message) == re.findall(r"\[.*?\]", readings)


def test_sglang_cannot_be_told_of_the_first_layer(room: Path, target_dir: Path) -> None:
    source = write_head(room / "first", target_dir, "modelopt", aux_layers=(0, 3, 4))
    assert errors(convert(source, room / "first-sglang", "sglang", target_dir)) == {
        "TS-CONVERT-LAYERS"
    }


def test_a_pruned_mla_head_is_not_written_for_tensorrt_llm(
    room: Path, target_dir: Path, sources: Any
) -> None:
    """Its loader cannot read one. The refusal names who can, and what to train for TensorRT-LLM."""
    for dialect in ("vllm", "sglang", "torchspec"):
        output = room / f"pruned-{dialect}"
        result = convert(sources(dialect, "mla", "3.1", 128), output, "modelopt", target_dir)
        assert errors(result) == {"TS-CONVERT-PRUNED-MLA"}
        problem = next(problem for problem in result.problems if problem.severity == "error")
        assert "whole vocabulary, or an MHA head" in problem.message
        assert problem.remedy == "convert to vllm or sglang or torchspec"
        assert not output.exists()
    result = convert(
        sources("modelopt", "mla", "3", 128), room / "pruned-served", "vllm", target_dir
    )
    assert result.serve["trtllm"].startswith("# TensorRT-LLM cannot load")
    assert "trtllm-serve" not in (room / "pruned-served" / "README.md").read_text()


def test_clean_heads_of_every_kind_have_no_finding_above_info(
    target_dir: Path, sources: Any
) -> None:
    """But for TensorRT-LLM's own layout of a head that it cannot load."""
    for dialect, kind in itertools.product(DIALECTS, KINDS):
        if not expressible(dialect, kind[0], kind[1]):
            continue
        report = inspected(str(sources(dialect, *kind)), str(target_dir), sample=0)
        found = {problem.code for problem in report.problems if problem.severity != "info"}
        assert found == (set() if expressible(dialect, *kind) else {"TS-HEAD-PRUNED-MLA"}), (
            dialect,
            kind,
        )
