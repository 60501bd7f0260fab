"""Adding a dialect, really done on a copy of the package: a row, and a config writer where none of those there fits."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.package_copy import copy_package, run_copy, touched
from tests.tiny import make_head, make_target

IDS = "eagle_aux_hidden_state_layer_ids"
# a made-up project: SpecForge's names and mask, ids under a key of its own at the top that count the layers that ran
ROW = """    Dialect(
        "newcomer", "Newcomer", "newcomer", "midlayer.", "layers run",
        layout.write_newcomer, lambda traces: "newcomer_version" in traces.config, rank=0,
        expresses=_SERVED, read_by=("vllm",), t2d="pruned", embed_tokens=True, eagle31="Newcomer 2.0",
    ),
"""
WRITER = """

def write_newcomer(shared: dict[str, Any], spec: HeadSpec, ids: list[int] | None, _: Verifier) -> dict[str, Any]:
    return _flat(shared, spec) | _norms(spec) | {"newcomer_version": "1.0", IDS_KEY: ids}
"""


@pytest.fixture(scope="module")
def copied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the package with one dialect more."""
    copy = copy_package(tmp_path_factory.mktemp("copy"))
    rows, config = (copy / "checkpoint/heads" / name for name in ("dialects.py", "config.py"))
    text = rows.read_text()
    assert text.count("\n)  # fmt: skip\nDIALECTS") == 1
    rows.write_text(text.replace("\n)  # fmt: skip\nDIALECTS", f"\n{ROW})  # fmt: skip\nDIALECTS"))
    config.write_text(config.read_text().rstrip() + "\n" + WRITER)
    return copy


def run(copy: Path, *words: object) -> dict:
    return json.loads(run_copy(copy, "-m", "trtspec", *words, "--json"))


@pytest.mark.slow
def test_a_dialect_is_one_row_and_one_writer(copied: Path, tmp_path: Path) -> None:
    """Two files; then it is offered, detected, written, read and served, and a head comes back as it went."""
    assert touched(copied) == ["checkpoint/heads/config.py", "checkpoint/heads/dialects.py"]
    target = make_target(tmp_path / "target", layers=8)
    source = make_head(tmp_path / "head", target, attention="mha", eagle="3.1", draft_vocab=128)
    there, back = tmp_path / "there", tmp_path / "back"
    run(copied, "convert", source, "-o", there, "--to", "newcomer", "--target", target)
    config = json.loads((there / "config.json").read_text())
    assert config[IDS] == [layer + 1 for layer in json.loads((source / "config.json").read_text())["eagle_config"][IDS]]
    names = set(load_file(there / "model.safetensors"))
    assert {"t2d", "embed_tokens.weight", "midlayer.hidden_norm.weight"} <= names
    (there / "provenance.json").unlink()  # so that config.json alone tells the dialect
    found = run(copied, "inspect", there)
    assert (found["dialect"], found["aux_layers"]) == ("newcomer", [1, 3, 4])
    assert [problem for problem in found["problems"] if problem["severity"] != "info"] == []
    result = run(copied, "convert", there, "-o", back, "--to", "trtllm", "--target", target)
    assert result["from"] == "newcomer"
    ours, theirs = (load_file(path / "model.safetensors") for path in (back, source))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
