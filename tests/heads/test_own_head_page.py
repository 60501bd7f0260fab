"""The commands of docs/train-your-own-head.md: dry runs as printed, the others on a small pair."""

import json
import shlex

import pytest

from tests.command_line import ROOT, succeeded, trtspec
from tests.tiny import make_head

PAGE = ROOT / "docs" / "train-your-own-head.md"
TORCHRUN = "torchrun --nproc-per-node 8 -m "
LINES = [
    line.strip().removeprefix(TORCHRUN)
    for line in PAGE.read_text().splitlines()
    if line.startswith(("    trtspec ", f"    {TORCHRUN}"))
]
TARGET, SPLITS = "nvidia/Kimi-K2.6-NVFP4", "math"


def words(line: str) -> list[str]:
    """Without `trtspec` and a redirection."""
    return shlex.split(line.partition(" > ")[0])[1:]


def of(command: str) -> list[list[str]]:
    return [words(line) for line in LINES if words(line)[0] == command]


@pytest.fixture(autouse=True)
def at_the_root(monkeypatch):
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def test_every_command_is_on_the_page():
    found = [words(line)[0] for line in LINES]
    assert list(dict.fromkeys(found)) == ["synthesize", "train", "inspect", "convert"]
    assert [line[line.index("--split") + 1] for line in of("synthesize")] == [SPLITS]


@pytest.mark.parametrize("line", of("train"), ids=lambda line: " ".join(line[-3:]))
def test_dry_runs_run_as_printed(line):
    if "--dry-run" not in line:  # of a torchrun line
        line = [*line, "--dry-run"]
    done = succeeded(*line, "--json")
    told = done.json
    assert [name for name, way in told["ways"].items() if way["possible"]] == [
        "stream",
        "dumps",
        "server",
    ]
    assert told["storage"]["state_bytes"] == 12_845_056_000_000


def test_a_target_that_does_not_fit_one_gpu_is_refused_with_figures():
    train = [
        "train",
        TARGET,
        "a.jsonl",
        "-o",
        "head",
        "--config",
        "configs/train/nvidia-kimi-k2.6-eagle3.yaml",
    ]
    done = trtspec(*train, "--dry-run", "--gpu", "h200", "--features", "memory")
    assert done.status == 1
    assert "TS-TRAIN-FIT --features memory on h200: one GPU would have to hold" in done.stderr
    assert "--features stream" in done.stderr


def test_the_other_commands_on_a_small_pair(tmp_path, target_dir, monkeypatch):
    """synthesize, inspect and convert of the page, on a small target and head."""
    import datasets

    split = tmp_path / "split.jsonl"
    split.write_text(
        "".join(
            json.dumps({"messages": [{"role": "user", "content": f"q{n}"}]}) + "\n"
            for n in range(5)
        )
    )
    load = datasets.load_dataset
    monkeypatch.setattr(  # the hub's set lies here
        datasets,
        "load_dataset",
        lambda name, config, split, revision, streaming: load(
            "json",
            data_files={split: str(tmp_path / "split.jsonl")},
            split=split,
            streaming=streaming,
        ),
    )
    for line in of("synthesize"):
        done = succeeded(*line, "--dry-run", "--json")
        assert done.json["prompts"] == 5
    make_head(tmp_path / "head", target_dir, attention="mla")
    monkeypatch.chdir(tmp_path)
    for command in ("inspect", "convert"):
        for line in of(command):
            done = trtspec(*(str(target_dir) if word == TARGET else word for word in line))
            assert done.status in (0, 3), f"{line}: {done.stderr}"
            assert "unexpected" not in done.stderr
