"""`trtspec doctor`: a stand-in nvidia-smi, an environment with a trap, no secret in the output."""

import os
import stat
from pathlib import Path

import pytest

from tests.command_line import Done, program, succeeded, trtspec
from trtspec.verbs.doctor import FORCED, package_state


def run(**environment: str) -> Done:
    return trtspec("doctor", "--json", **environment)


def stand_in(directory: Path, line: str) -> str:
    """A PATH whose nvidia-smi prints `line`."""
    script = directory / "nvidia-smi"
    script.write_text(f"#!/bin/sh\nprintf '%s\\n' '{line}'\n")
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    return f"{directory}{os.pathsep}{os.environ['PATH']}"


def test_this_environment_is_whole() -> None:
    done = run()
    report = done.json
    assert done.status == 0
    assert report["commands"]["train"]["ready"]
    assert report["commands"]["bench --dataset HUB_ID"]["ready"]
    assert report["packages"]["nvidia-modelopt"].startswith("0.47")
    assert report["problems"] == []


def test_every_built_command_is_listed() -> None:
    from trtspec.cli.app import COMMANDS

    listed = {command.split(" ")[0] for command in run().json["commands"]}
    built = {name for names in COMMANDS.values() for name in names} - {"doctor"}
    assert listed == built


def test_gpus_come_from_nvidia_smi(tmp_path: Path) -> None:
    report = run(PATH=stand_in(tmp_path, "NVIDIA B200, 183359 MiB, 580.65, 10.0")).json
    assert report["gpus"] == [
        {
            "name": "NVIDIA B200",
            "memory": "183359 MiB",
            "driver": "580.65",
            "compute_capability": "10.0",
        }
    ]
    assert report["problems"] == []


def test_a_gpu_without_fp4_is_a_warning(tmp_path: Path) -> None:
    done = run(PATH=stand_in(tmp_path, "NVIDIA H200, 143771 MiB, 570.12, 9.0"))
    assert [problem["code"] for problem in done.json["problems"]] == ["TS-DOCTOR-NO-FP4"]
    assert done.status == 0


def test_forced_acceptance_is_an_error() -> None:
    done = run(**{FORCED: "2"})
    assert [problem["code"] for problem in done.json["problems"]] == ["TS-DOCTOR-FORCED-ACCEPTANCE"]
    assert done.status == 3


def test_the_token_is_never_printed() -> None:
    done = run(HF_TOKEN="hf_verysecret")
    assert "hf_verysecret" not in done.stdout
    assert done.json["hub"]["token"] == "set"


def test_a_wrong_version_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.metadata.version", lambda name: "0.1")
    problems = package_state()[1]
    assert {problem.code for problem in problems} == {"TS-DOCTOR-VERSION"}
    assert "transformers" in {problem.where for problem in problems}


def test_it_fits_a_terminal_of_80_columns_and_names_what_is_missing(tmp_path: Path) -> None:
    """Without a GPU or engines, table lines fit 80 columns and remedies below are whole lines."""
    empty = str(tmp_path)
    done = succeeded("doctor", PATH=empty, COLUMNS="80", FORCE_COLOR="1", TERM="dumb")
    table, _, remedies = done.stdout.partition("\nfor ")
    assert max(map(len, table.splitlines())) <= 80, table
    assert "trtllm-serve, an NVIDIA GPU" in table and "nvidia-smi is missing" in table
    assert (
        "serve --backend trtllm, prove --backend trtllm:\n    run trtspec in the image" in remedies
    )
    for raw in ("Errno", "pydantic.dev", "Traceback"):
        assert raw not in done.stdout + done.stderr


def test_an_engine_without_a_gpu_is_not_ready(tmp_path: Path) -> None:
    engine = program(tmp_path / "trtllm-serve", "")
    report = run(PATH=str(tmp_path)).json
    state = report["commands"]["serve --backend trtllm"]
    assert (
        not state["ready"]
        and state["missing"] == ["an NVIDIA GPU"]
        and "--gpus all" in state["install"]
    )
    assert report["trtllm_serve"] == str(engine)
