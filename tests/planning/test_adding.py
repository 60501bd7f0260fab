"""Adds a GPU and a model to a copy of the package, and counts the files that had to change."""

import json
from pathlib import Path

import pytest
import yaml

from tests.json_files import read_json, write_json
from tests.package_copy import copy_package, run_copy, touched

NVFP4, HEAD = "nvidia/Kimi-K2.6-NVFP4", "nvidia/Kimi-K2.6-Eagle3"
SMALL = "example/Kimi-K2-Small-NVFP4"


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    return copy_package(tmp_path)


def run(copy: Path, *arguments: str, status: int = 0) -> str:
    """The output of `trtspec` with these arguments, as the copy of the package answers."""
    return run_copy(copy, "-m", "trtspec", *arguments, status=status)


def add_row(copy: Path) -> None:
    """A GPU like B200, with half as much memory again."""
    path = copy / "data" / "gpus.yaml"
    rows = yaml.safe_load(path.read_text())["gpus"]
    row = rows["b200"] | {"memory_mib": rows["b200"]["memory_mib"] * 3 // 2}
    path.write_text(path.read_text() + f"  b250: {json.dumps(row)}\n")


def best(output: str) -> dict[str, object]:
    return json.loads(output)["best"]


@pytest.mark.slow
def test_a_gpu_is_two_data_files(copy: Path) -> None:
    add_row(copy)
    tables = read_json(copy / "data" / "kernels" / "b200.json")
    for grid in tables["mla_decode"].values():  # a GPU whose attention takes half as long
        for row in grid.values():
            row.update({batch: latency / 2 for batch, latency in row.items()})
    write_json(copy / "data" / "kernels" / "b250.json", tables)
    pair = (
        NVFP4,
        "--head",
        HEAD,
        "--acceptance",
        "2.62@3",
        "--concurrency",
        "16",
        "--tp",
        "4",
        "--json",
    )
    new, old = (
        best(run(copy, "plan", *pair, "--gpu", "b250")),
        best(run(copy, "plan", *pair, "--gpu", "b200")),
    )
    assert new["tokens_per_s_per_user"] > old["tokens_per_s_per_user"]  # type: ignore[operator]
    assert new["max_sequences"] > old["max_sequences"]  # type: ignore[operator]
    command = str(new["command"])
    assert "--gpu b250" in command
    run(copy, *command.split()[1:], "--output", "engine.yml")
    assert "no errors" in run(copy, "lint", "engine.yml", "--gpu", "b250")
    assert touched(copy) == ["data/gpus.yaml", "data/kernels/b250.json"]


def test_a_gpu_whose_kernels_nobody_measured_is_planned_by_its_memory(copy: Path) -> None:
    add_row(copy)
    output = run(copy, "plan", NVFP4, "--gpu", "b250")
    assert "speed is not known" in output and "trtspec build-config" not in output
    report = json.loads(run(copy, "plan", NVFP4, "--gpu", "b250", "--json"))
    assert report["fits"] and report["points"] == [] and report["best"] is None
    assert touched(copy) == ["data/gpus.yaml"]


@pytest.mark.slow
def test_a_model_of_other_sizes_is_one_data_file(copy: Path) -> None:
    path = copy / "data" / "models.yaml"
    data = yaml.safe_load(path.read_text())
    row = json.loads(json.dumps(data["targets"][NVFP4]))
    row["config"]["text_config"] |= {
        "hidden_size": 4096,
        "num_hidden_layers": 40,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "n_routed_experts": 128,
        "moe_intermediate_size": 1024,
        "intermediate_size": 8192,
        "max_position_embeddings": 131072,
    }
    text = path.read_text()
    entry = yaml.safe_dump({SMALL: row}, sort_keys=False)
    indented = "".join(f"  {line}\n" for line in entry.splitlines())
    path.write_text(text.replace("targets:\n", f"targets:\n{indented}", 1))
    report = json.loads(run(copy, "plan", SMALL, "--gpu", "b200", "--gpus", "1", "--json"))
    whole = json.loads(run(copy, "plan", NVFP4, "--gpu", "b200", "--gpus", "4", "--json"))
    assert report["fits"] and report["per_gpu"]["weights"] < whole["per_gpu"]["weights"]
    assert report["best"] is None  # kernels were measured for Kimi-K2's sizes
    run(
        copy,
        "build-config",
        SMALL,
        "--gpu",
        "b200",
        "--tp-size",
        "1",
        "--trust-remote-code",
        "--output",
        "engine.yml",
    )
    assert "no errors" in run(copy, "lint", "engine.yml", "--target", SMALL)
    assert "32 attention heads" in run(
        copy, "build-config", SMALL, "--tp-size", "64", "--nodes", "8", status=3
    )
    assert "131,072" in run(
        copy, "build-config", SMALL, "--isl", "131000", "--osl", "1000", "--tp-size", "1", status=3
    )
    assert touched(copy) == ["data/models.yaml"]
