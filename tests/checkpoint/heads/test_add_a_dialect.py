"""Adding a dialect, really done on a copy of the package: a row of data."""

import json
from pathlib import Path

import pytest
import torch

from tests.json_files import read_json
from tests.package_copy import copy_package, run_copy, touched
from tests.tiny import make_head, make_target, read_tensors

IDS = "eagle_aux_hidden_state_layer_ids"
# a made-up project: SpecForge's names and mask, ids at the top that count the layers that ran
ROW = """  newcomer:
    title: Newcomer
    prefix: midlayer.
    counts: layers run
    expresses: [yarn, fc_norm, norm_output, mla, pruned mla, number of states, other width]
    read_by: [vllm]
    t2d: pruned
    embed_tokens: true
    eagle31: Newcomer 2.0
    config: {top: [eagle_aux_hidden_state_layer_ids], nested: {newcomer_version: "1.0"}}
    rank: 0
    wrote: [[eagle_config.newcomer_version]]
"""


@pytest.fixture(scope="module")
def copied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the package with one dialect more."""
    copy = copy_package(tmp_path_factory.mktemp("copy"))
    rows = copy / "data/dialects.yaml"
    rows.write_text(rows.read_text().replace("dialects:\n", f"dialects:\n{ROW}", 1))
    return copy


def run(copy: Path, *words: object) -> dict:
    return json.loads(run_copy(copy, "-m", "trtspec", *words, "--json"))


@pytest.mark.slow
def test_a_dialect_is_one_row(copied: Path, tmp_path: Path) -> None:
    """One file adds a dialect: offered, detected, written, read and served, there and back."""
    assert touched(copied) == ["data/dialects.yaml"]
    target = make_target(tmp_path / "target", layers=8)
    source = make_head(tmp_path / "head", target, attention="mha", eagle="3.1", draft_vocab=128)
    there, back = tmp_path / "there", tmp_path / "back"
    run(copied, "convert", source, "-o", there, "--to", "newcomer", "--target", target)
    config = read_json(there / "config.json")
    assert config[IDS] == [
        layer + 1 for layer in read_json(source / "config.json")["eagle_config"][IDS]
    ]
    names = set(read_tensors(there))
    assert {"t2d", "embed_tokens.weight", "midlayer.hidden_norm.weight"} <= names
    (there / "provenance.json").unlink()  # so that config.json alone tells the dialect
    found = run(copied, "inspect", there)
    assert (found["dialect"], found["aux_layers"]) == ("newcomer", [1, 3, 4])
    assert [problem for problem in found["problems"] if problem["severity"] != "info"] == []
    result = run(copied, "convert", there, "-o", back, "--to", "trtllm", "--target", target)
    assert result["from"] == "newcomer"
    ours, theirs = (read_tensors(path) for path in (back, source))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
