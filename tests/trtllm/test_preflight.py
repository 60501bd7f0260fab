"""What preflight finds on this machine, one thing at a time."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from trtspec.checkpoint.hub import resolve
from trtspec.trtllm import launch
from trtspec.trtllm.preflight import check_files, check_gpus, check_port, engine_version, preflight


def smi(directory: Path, gpus: int) -> None:
    script = directory / "nvidia-smi"
    lines = "".join(f"echo 'GPU {index}: NVIDIA B200 (UUID: GPU-{index})'\n" for index in range(gpus))
    script.write_text(f"#!/bin/sh\n{lines}")
    script.chmod(0o755)


def test_gpus_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    smi(tmp_path, 4)
    assert list(check_gpus(4)) == []
    assert [problem.code for problem in check_gpus(8)] == ["TS-SERVE-NO-GPU"]


def test_a_truncated_checkpoint_is_incomplete(tmp_path: Path, tiny_target: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(tiny_target, copy)
    assert list(check_files(resolve(str(copy)), {})) == []
    shard = sorted(copy.glob("*.safetensors"))[0]
    shard.write_bytes(shard.read_bytes()[:-100])
    assert [problem.code for problem in check_files(resolve(str(copy)), {})] == ["TS-SERVE-INCOMPLETE"]


def test_what_may_not_be_fetched_is_told() -> None:
    target = resolve("nvidia/Kimi-K2.6-NVFP4", allow_download=False)
    assert [problem.code for problem in check_files(target, {"HF_HUB_OFFLINE": "1"})] == ["TS-SERVE-OFFLINE"]
    assert list(check_files(target, {})) == []


def test_a_dry_run_only_mentions_what_is_wrong_with_this_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    target = resolve("nvidia/Kimi-K2.6-NVFP4", allow_download=False)

    def severities(launching: bool) -> dict[str, str]:
        found = preflight(
            [target], host="localhost", port=8000, gpus_needed=4, remote_code=True, trusted=False,
            environ={"TLLM_SPEC_DECODE_FORCE_NUM_ACCEPTED_TOKENS": "2"}, launching=launching,
        )  # fmt: skip
        return {problem.code: problem.severity for problem in found}

    dry, real = severities(False), severities(True)
    assert dry["TS-SERVE-NO-ENGINE"] == dry["TS-SERVE-REMOTE-CODE"] == "warning"
    assert real["TS-SERVE-NO-ENGINE"] == real["TS-SERVE-REMOTE-CODE"] == "error"
    assert dry["TS-SERVE-FORCED-ACCEPTANCE"] == real["TS-SERVE-FORCED-ACCEPTANCE"] == "error"


def test_a_free_port_is_free(free_port: int) -> None:
    for host in ("localhost", "0.0.0.0", "127.0.0.1"):
        assert list(check_port(host, free_port)) == []


def test_the_executable_tells_its_version(standin_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STANDIN_VERSION", "1.4.0rc1")
    assert engine_version() == "1.4.0rc1"


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("speculative_config.Eagle.foo\n  Extra inputs are not permitted [type=extra_forbidden]", "refused a key"),
        ("RuntimeError: Unknown architecture for AutoModelForCausalLM: X", "two-model"),
        ("AttributeError: 'KimiK25Config' object has no attribute 'vocab_size_padded'", "guided decoding"),
        ("ERROR: [Errno 98] Address already in use", "port"),
        ("Bus error (core dumped)", "shared memory"),
    ],
)
def test_known_failures_are_explained(line: str, says: str) -> None:
    cause = launch.explain(["first", *line.splitlines(), "last"])
    assert cause is not None and says in cause[0] and cause[1]


def test_an_unknown_failure_is_not_guessed_at() -> None:
    assert launch.explain(["INFO loading weights", "ValueError: something else"]) is None
