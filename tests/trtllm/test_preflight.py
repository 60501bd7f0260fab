"""What preflight finds on this machine, one thing at a time."""

import os
import shutil
from pathlib import Path

import pytest

from tests.command_line import program
from trtspec.checkpoint.hub import find_target, resolve
from trtspec.launch.preflight import (
    InstalledGpu,
    as_in_dry_run,
    check_files,
    check_gpus,
    check_modules_cache,
    check_port,
    check_shared_memory,
    check_start,
    read_gpus,
)
from trtspec.launch.server_launch import LogPatterns, ServerAddress
from trtspec.trtllm.deployment import Deployment
from trtspec.trtllm.document import Document
from trtspec.trtllm.schema import parse_version, schema_for
from trtspec.trtllm.serve import command
from trtspec.trtllm.serve.command import check_driver, check_hardware

PATTERNS = LogPatterns.load(Path(command.__file__).with_name("log_patterns.yaml"))


def smi(directory: Path, gpus: int) -> None:
    program(directory / "nvidia-smi", "echo 'NVIDIA B200, 183359, 580.95.05, 10.0'\n" * gpus)


def seen(
    count: int, name: str = "NVIDIA B200", mib: int = 183359, capability: str = "10.0"
) -> list[InstalledGpu]:
    return [InstalledGpu(name, mib * 2**20, "580.95.05", capability)] * count


def kimi(
    tp_size: int, target: str = "nvidia/Kimi-K2.6-NVFP4", version: str = "1.3.0rc20", **argv: int
) -> Deployment:
    settings = {"tensor_parallel_size": tp_size, "max_seq_len": 8192, **argv}
    return Deployment(schema_for(version), find_target(target).spec, target, argv=settings)


def codes(
    gpus: list[InstalledGpu],
    deployment: Deployment,
    needed: int,
    environ: dict[str, str] | None = None,
) -> set[str]:
    found = [
        *check_gpus(needed, gpus, environ or {}),
        *check_hardware(gpus, deployment, Document.parse(""), environ or {}),
    ]
    return {problem.code for problem in found}


def test_gpus_are_read_with_memory_driver_and_capability(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    smi(tmp_path, 2)
    assert read_gpus() == seen(2)
    script = tmp_path / "nvidia-smi"
    script.write_text("#!/bin/sh\necho 'NVIDIA GB10, [N/A], 580.95.05, 12.1'\n")
    assert read_gpus() == [InstalledGpu("NVIDIA GB10", 0, "580.95.05", "12.1")]
    assert codes(read_gpus() or [], kimi(1), 1) == set()  # nobody knows whether it fits
    script.write_text(
        "#!/bin/sh\necho 'Field \"compute_cap\" is not a valid field to query.'\nexit 2\n"
    )
    assert read_gpus() is None


def test_four_b200_hold_kimi_in_nvfp4_and_four_h200_do_not() -> None:
    assert codes(seen(4), kimi(4), 4) == set()
    assert "TS-SERVE-NO-FIT" in codes(seen(4, "NVIDIA H200", 144384, "9.0"), kimi(4), 4)
    assert "TS-SERVE-NO-FIT" in codes(seen(2), kimi(2), 2)
    assert "TS-SERVE-SMALL-CACHE" in codes(seen(4), kimi(4, max_seq_len=10**7), 4)


def test_the_driver_is_judged_by_the_release() -> None:
    assert [p.code for p in check_driver("575.57", parse_version("1.2.1"))] == ["TS-SERVE-DRIVER"]
    assert list(check_driver("580.95.05", parse_version("1.4.0rc1"))) == []


def test_hidden_and_unseen_gpus_are_told() -> None:
    assert codes(seen(4), kimi(4), 4, {"CUDA_VISIBLE_DEVICES": "0,1"}) >= {"TS-SERVE-NO-GPU"}
    assert codes(seen(4), kimi(4), 4, {"CUDA_VISIBLE_DEVICES": "0,1,2,3"}) == set()
    assert [problem.code for problem in check_gpus(8, None)] == ["TS-SERVE-GPUS-UNSEEN"]


def test_host_limits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    assert list(check_modules_cache()) == []
    monkeypatch.setenv("HF_MODULES_CACHE", "/proc/modules-cache")
    assert [problem.code for problem in check_modules_cache()] == ["TS-SERVE-CACHE"]
    assert [p.code for p in check_shared_memory(tmp_path)] in ([], ["TS-SERVE-SHARED-MEMORY"])


def test_a_truncated_checkpoint_is_incomplete(tmp_path: Path, target_dir: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(target_dir, copy)
    assert list(check_files(resolve(str(copy)))) == []
    shard = sorted(copy.glob("*.safetensors"))[0]
    shard.write_bytes(shard.read_bytes()[:-100])
    assert [problem.code for problem in check_files(resolve(str(copy)))] == ["TS-SERVE-INCOMPLETE"]


def test_what_may_not_be_fetched_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    target = resolve("nvidia/Kimi-K2.6-NVFP4", weights=False)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert [problem.code for problem in check_files(target)] == ["TS-SERVE-OFFLINE"]
    monkeypatch.delenv("HF_HUB_OFFLINE")
    assert list(check_files(target)) == []


def test_a_dry_run_only_mentions_what_is_wrong_with_this_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free_port: int
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    target = resolve("nvidia/Kimi-K2.6-NVFP4", weights=False)
    address = ServerAddress("localhost", free_port)
    found = list(
        check_start(command.PROGRAM, [target], address, 0, [], trusted=False, launching=False)
    )
    dry = {problem.code: as_in_dry_run(problem).severity for problem in found}
    assert {problem.severity for problem in found} == {"error"}
    assert dry["TS-SERVE-NO-ENGINE"] == dry["TS-SERVE-REMOTE-CODE"] == "warning"


def test_a_free_port_is_free(free_port: int) -> None:
    for host in ("localhost", "0.0.0.0", "127.0.0.1"):
        assert list(check_port(host, free_port)) == []


@pytest.mark.parametrize(
    ("line", "says"),
    [
        (
            "speculative_config.Eagle.foo\n  Extra inputs are not permitted [type=extra_forbidden]",
            "refused a key",
        ),
        ("RuntimeError: Unknown architecture for AutoModelForCausalLM: X", "two-model"),
        (
            "AttributeError: 'KimiK25Config' object has no attribute 'vocab_size_padded'",
            "guided decoding",
        ),
        ("ERROR: [Errno 98] Address already in use", "port"),
        ("Bus error (core dumped)", "shared memory"),
    ],
)
def test_known_failures_are_explained(line: str, says: str) -> None:
    cause = PATTERNS.explain(["first", *line.splitlines(), "last"])
    assert cause is not None and says in cause[0] and cause[1]


def test_an_unknown_failure_is_not_guessed_at() -> None:
    assert (
        PATTERNS.explain(["INFO engine with trust_remote_code=False", "ValueError: something else"])
        is None
    )
