"""`trtspec inspect` through the command line: its JSON contract, its exit status, its words."""

from pathlib import Path

import pytest

from tests.command_line import Done, problem_codes, trtspec
from tests.tiny import make_head, make_target

TARGET_KEYS = {
    "kind",
    "family",
    "model_type",
    "architecture",
    "format",
    "parameters",
    "bytes",
    "shards",
    "problems",
}
HEAD_KEYS = TARGET_KEYS | {"eagle", "attention", "dialect", "aux_layers", "draft_vocab_size"}


def run(*arguments: object) -> Done:
    return trtspec("inspect", *arguments)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_target(tmp_path_factory.mktemp("target"), shards=2)


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory, target: Path) -> Path:
    return make_head(
        tmp_path_factory.mktemp("head"), target, attention="mla", eagle="3.1", draft_vocab=128
    )


def test_target_contract(target: Path) -> None:
    done = run(target, "--json")
    report = done.json
    assert done.status == 0
    assert set(report) >= TARGET_KEYS
    assert (report["kind"], report["format"], report["shards"]) == ("target", "bf16", 2)
    assert report["parameters"] == 406536
    assert (
        report["bytes"] == 2 * 406536 + 2 * 6 * 4
    )  # the correction bias of six MoE layers is float32


def test_head_contract(head: Path, target: Path) -> None:
    report = run(head, "--against", target, "--json").json
    assert set(report) >= HEAD_KEYS
    assert report["tensor_parallel_sizes"] == [1, 2, 4]
    assert {"code", "severity", "where", "message", "remedy"} == set(report["problems"][0])


def test_the_readable_form_says_the_same(head: Path, target: Path) -> None:
    done = run(head, "--against", target)
    shown, code = " ".join(done.stdout.split()), "TS-HEAD-DOUBLE-NORM"
    for words in (
        "kind head",
        "eagle 3.1",
        "attention mla",
        "aux layers 1, 2, 3",
        "draft vocab size 128",
        code,
    ):
        assert words in shown
    assert "no problems found" in run(target).stdout


def test_a_published_pair_offline() -> None:
    done = run("nvidia/Kimi-K2.6-Eagle3", "--against", "nvidia/Kimi-K2.6-NVFP4", "--json")
    report = done.json
    assert done.status == 0
    assert (report["attention"], report["aux_layers"], report["source"]) == (
        "mla",
        [1, 29, 57],
        "catalogue",
    )
    assert report["problems"] == []
    other = run("nvidia/Kimi-K2.5-Eagle3", "--against", "nvidia/Kimi-K2.6-NVFP4", "--json").json
    assert "TS-PAIR-OTHER-TARGET" in problem_codes(other)


def test_a_target_against_a_head_is_turned_around(head: Path, target: Path) -> None:
    done = run(target, "--against", head)
    assert done.status == 2
    assert "turn them around" in done.stderr


def test_a_directory_without_weights_is_not_told_to_download_none(
    tmp_path: Path, target: Path
) -> None:
    (tmp_path / "config.json").write_bytes((target / "config.json").read_bytes())
    done = run(tmp_path, "--hashes")
    assert done.status == 2 and "pass the directory that holds its weights" in done.stderr
    assert "None" not in done.stderr
