"""Where the engine is importable its own classes judge, and a schema is read from them; here by a stand-in package."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.trtllm.lint.test_values import SAMPLES
from trtspec.trtllm.rules.keys import check_value
from trtspec.trtllm.schema import Field, line_fields

ENGINE = Path(__file__).parent / "standin_engine"
GOOD = """\
kv_cache_config: {free_gpu_memory_fraction: 0.8}
speculative_config: {decoding_type: Eagle, max_draft_len: 3, speculative_model_dir: nvidia/Kimi-K2.6-Eagle3}
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
    text = "speculative_config: {decoding_type: Eagle, max_draft_len: 3, speculative_model_dir: /h, nonsense: 1}\n"
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
    path = tmp_path_factory.mktemp("schema") / "new.yaml"
    done = run("tools.schema_tools", "from-installed", "-o", str(path))
    assert done.returncode == 0, done.stderr
    return yaml.safe_load(path.read_text())


def test_a_schema_read_from_the_classes_judges_as_they_do(
    read: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every field with every sample; the class itself is the oracle. A validator is code and cannot be read."""
    monkeypatch.syspath_prepend(str(ENGINE))
    from tensorrt_llm.llmapi.llm_args import TorchLlmArgs

    def takes(path: str, value: Any) -> bool:
        *parents, name = path.split(".")
        values: dict[str, Any] = {"model": "m"}
        place = values
        for parent in parents:
            place = place.setdefault(parent, {})
        if parents[:1] == ["speculative_config"]:
            variant = read["fields"][path].get("variants", ["Eagle"])[0]
            place |= (
                {"decoding_type": variant, "speculative_model": "h"}
                if name != "speculative_model_dir"
                else {"decoding_type": variant}
            )
        place[name] = value
        try:
            TorchLlmArgs(**values)
        except ValueError:
            return False
        return True

    judged = 0
    for path, entry in read["fields"].items():
        if path in (
            "load_format",
            "speculative_config.speculative_model",
            "speculative_config.speculative_model_dir",
        ):
            continue  # decided by a validator
        if "object" in entry["type"] or path == "speculative_config.decoding_type":
            continue  # what is inside decides
        field = Field(
            path=path,
            **{
                k: tuple(v) if isinstance(v, list) and k != "default" else v
                for k, v in entry.items()
            },
        )
        for value in SAMPLES:
            verdict = check_value(field, value)
            judged += 1
            assert (verdict is None or verdict[0] == "lax") == takes(path, value), (
                path,
                value,
                verdict,
            )
    assert judged > 200


def test_options_and_status_are_read_too(read: dict[str, Any]) -> None:
    assert read["fields"]["brand_new_key"] == {
        "type": "bool",
        "default": False,
        "status": "prototype",
    }
    assert read["fields"]["speculative_config.max_matching_ngram_size"]["variants"] == ["NGram"]
    assert read["options"]["tensor_parallel_size"]["flags"] == [
        "--tensor_parallel_size",
        "--tp_size",
    ]
    assert read["options"]["telemetry"]["flags"] == ["--no-telemetry", "--telemetry"]
    assert read["options"]["reasoning_parser"]["choices"] == ["kimi_k2", "kimi_k25"]


def test_a_new_line_states_only_what_differs(tmp_path: Path) -> None:
    path = tmp_path / "1.5.yaml"
    words = ("from-installed", "--inherits", "1.4", "--line", "1.5", "-o", str(path))
    assert run("tools.schema_tools", *words).returncode == 0
    data = yaml.safe_load(path.read_text())
    assert data["versions"]["begins"] == {
        "after": "1.4.0rc1",
        "by": data["versions"]["from"],
    }  # dates every entry
    assert data["fields"]["brand_new_key"]["type"] == "bool"
    assert "tensor_parallel_size" not in data["fields"]
    assert "allowed" not in data["fields"].get(
        "kv_cache_config.dtype", {}
    )  # a validator's list is not forgotten
    assert "moe_config" in data["removed"] and "host" in data["removed_options"]
    done = run("tools.schema_tools", "diff", "1.4", str(path))
    lines = done.stdout.splitlines()
    assert any(line.startswith("+ brand_new_key: {type: bool") for line in lines)
    assert any(line == "- moe_config" for line in lines)
    assert any(line.startswith("~ backend: allowed") for line in lines)


def test_diff_names_what_changed_between_two_releases() -> None:
    done = run("tools.schema_tools", "diff", "1.3.0rc20", "1.4.0rc1")
    lines = done.stdout.splitlines()
    renamed = "- speculative_config.acceptance_window (now speculative_config.acceptance_rate_window_size)"
    assert done.returncode == 0 and renamed in lines
    assert {line[0] for line in lines} == {"+", "-", "~"}
    gone = [line for line in lines if line.startswith("- ") and not line.startswith("- --")]
    assert len(gone) == len(set(line_fields("1.3")) - set(line_fields("1.4")))
    assert run("tools.schema_tools", "diff", "1.4", "nowhere.yaml").returncode == 2
    assert run("tools.schema_tools", "from-installed", engine=False).returncode == 4


def test_a_file_that_is_not_yaml_is_not_given_to_the_engine(tmp_path: Path) -> None:
    status, found = lint("[" * 50_000, tmp_path)
    assert (status, found["version"]) == (3, "1.4.0rc1")
    assert [problem["code"] for problem in found["problems"]] == ["TS-LINT-LIMIT"]
