"""An importable engine's own classes judge, and a schema is read from them.

Here it is a stand-in package.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.trtllm.lint.test_values import SAMPLES
from trtspec.trtllm.rules.keys import check_value
from trtspec.trtllm.schema import Field

ENGINE = Path(__file__).parent / "standin_engine"
GOOD = """\
kv_cache_config: {free_gpu_memory_fraction: 0.8}
speculative_config: {decoding_type: Eagle, max_draft_len: 3, \
speculative_model_dir: nvidia/Kimi-K2.6-Eagle3}
"""


def run(*words: str, engine: bool = True) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ENGINE) if engine else ""}
    return subprocess.run(
        [sys.executable, "-m", *words], capture_output=True, text=True, env=environment
    )


def lint(text: str, tmp_path: Path, *words: str, engine: bool = True) -> tuple[int, dict[str, Any]]:
    file = tmp_path / "engine.yml"
    file.write_text(text)
    done = run("trtspec", "lint", str(file), "--installed", "--json", *words, engine=engine)
    return done.returncode, json.loads(done.stdout) if done.stdout else {"error": done.stderr}


def test_the_engines_own_classes_judge(tmp_path: Path) -> None:
    status, found = lint(GOOD, tmp_path)
    assert (status, found["ok"], found["version"]) == (0, True, "1.4.0rc1")
    text = (
        GOOD + "stream_interval: 0\nload_format: gms\n"
    )  # the second is fine by our schema, not by this engine
    status, found = lint(text, tmp_path)
    refused = {
        (p["key"], p["line"]) for p in found["problems"] if p["code"] == "TS-LINT-ENGINE-REFUSES"
    }
    assert status == 3
    assert refused == {("stream_interval", 3), ("load_format", 4)}


def test_a_location_inside_a_union_is_the_key_of_the_file(tmp_path: Path) -> None:
    text = (
        "speculative_config: {decoding_type: Eagle, max_draft_len: 3, "
        "speculative_model_dir: /h, nonsense: 1}\n"
    )
    _, found = lint(text, tmp_path)
    keys = {p["key"] for p in found["problems"] if p["code"] == "TS-LINT-ENGINE-REFUSES"}
    assert keys == {"speculative_config.nonsense"}
    _, found = lint("speculative_config: {decoding_type: Eagle, max_draft_len: 3}\n", tmp_path)
    messages = [p["message"] for p in found["problems"] if p["code"] == "TS-LINT-ENGINE-REFUSES"]
    assert len(messages) == 1 and "Draft model must be provided" in messages[0]


def test_without_the_engine_the_status_is_4(tmp_path: Path) -> None:
    status, found = lint(GOOD, tmp_path, engine=False)
    assert status == 4 and "tensorrt_llm" in found["error"]["message"]


def test_another_version_than_the_installed_one_is_a_usage_error(tmp_path: Path) -> None:
    status, found = lint(GOOD, tmp_path, "--trtllm-version", "1.2.1")
    assert status == 2 and "1.4.0rc1 is installed" in found["error"]["message"]


@pytest.fixture(scope="module")
def read(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The classes of the snapshot that is read from the stand-in."""
    folder = tmp_path_factory.mktemp("snapshots")
    done = run("tools.snapshots", "installed", "-o", str(folder))
    assert done.returncode == 0, done.stderr
    snapshot = json.loads((folder / "1.4.0rc1.json").read_text())
    assert all(each["whole"] for each in snapshot["classes"].values())
    return {owner: each["fields"] for owner, each in snapshot["classes"].items()}


def test_a_schema_read_from_the_classes_judges_as_they_do(
    read: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every field with every sample; the class itself is the oracle.

    A validator is code and cannot be read.
    """
    monkeypatch.syspath_prepend(str(ENGINE))
    from tensorrt_llm.llmapi.llm_args import TorchLlmArgs

    def takes(path: str, kind: str, value: Any) -> bool:
        *parents, name = path.split(".")
        values: dict[str, Any] = {"model": "m"}
        place = values
        for parent in parents:
            place = place.setdefault(parent, {})
        if kind:
            place |= {"decoding_type": kind, "speculative_model": "h"}
        place[name] = value
        try:
            TorchLlmArgs(**values)
        except ValueError:
            return False
        return True

    judged = 0
    by_a_validator = ("load_format", "speculative_model", "speculative_model_dir", "decoding_type")
    for owner, fields in read.items():
        parent, _, kind = owner.partition(":")
        for name, facts in fields.items():
            if owner == "--" or name in by_a_validator or "object" in facts["type"]:
                continue
            path = f"{parent}.{name}".lstrip(".")
            lists = {
                k: tuple(v) for k, v in facts.items() if isinstance(v, list) and k != "default"
            }
            field = Field(path=path, **{**facts, **lists})
            for value in SAMPLES:
                verdict = check_value(field, value)
                judged += 1
                ours = verdict is None
                assert ours == takes(path, kind, value), (path, value, verdict)
    assert judged > 200


def test_options_status_and_kinds_are_read_too(read: dict[str, Any]) -> None:
    assert read[""]["brand_new_key"] == {"type": "bool", "default": False, "status": "prototype"}
    assert "max_matching_ngram_size" in read["speculative_config:NGram"]
    assert "max_matching_ngram_size" not in read["speculative_config:Eagle"]
    assert read["speculative_config"]["decoding_type"]["allowed"] == ["Eagle", "NGram"]
    options = read["--"]
    assert options["tensor_parallel_size"]["flags"] == ["--tensor_parallel_size", "--tp_size"]
    assert options["telemetry"]["flags"] == ["--no-telemetry", "--telemetry"]
    assert options["reasoning_parser"]["choices"] == ["kimi_k2", "kimi_k25"]


def test_differences_are_named_with_their_source() -> None:
    done = run("tools.snapshots", "compare", engine=False)
    lines = done.stdout.splitlines()
    start = (
        "1.4.0rc1 `cache_transceiver_config` `transceiver_runtime`: "
        "default 'auto' -> 'PYTHON' (documentation"
    )
    assert any(line.startswith(start) for line in lines)
    assert any(
        line.startswith("1.4.0rc1 `speculative_config:Eagle3` `eagle_choices`: gone")
        for line in lines
    )
    assert run("tools.snapshots", "installed", engine=False).returncode == 4


def test_a_file_that_is_not_yaml_is_not_given_to_the_engine(tmp_path: Path) -> None:
    status, found = lint("[" * 50_000, tmp_path)
    assert (status, found["version"]) == (3, "1.4.0rc1")
    assert [problem["code"] for problem in found["problems"]] == ["TS-LINT-LIMIT"]
