"""Engine files in Helm values, manifests and scripts: found, judged and corrected there."""

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.command_line import trtspec

NEW = "1.3.0rc27.dev0"  # the last release whose classes were read whole
PAIR = "nvidia/Kimi-K2.6-NVFP4 --head nvidia/Kimi-K2.6-Eagle3 --trust-remote-code"


def lint(text: str, folder: Path, *words: str) -> dict[str, Any]:
    (folder / "file").write_text(text)
    return json.loads(trtspec("lint", folder / "file", "--json", *words).stdout)


def found(report: dict[str, Any]) -> set[tuple[str, int | None]]:
    return {
        (item["code"].removeprefix("TS-"), item["line"])
        for item in report["problems"]
        if item["severity"] != "info"
    }


CASES = yaml.safe_load(Path(__file__).with_name("carriers.yaml").read_text())


@pytest.mark.parametrize("name", CASES)
def test_each_carrier_is_judged_at_its_own_lines(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    words = "" if "version" in case else f"--trtllm-version {NEW}"
    report = lint(case["text"], tmp_path, *shlex.split(case.get("words", words)))
    lines: dict[str, list[int | None]] = {}
    for item in report["problems"]:
        lines.setdefault(item["code"], []).append(item["line"])
    assert {code: lines.get(code) for code in case["findings"]} == case["findings"]
    assert report["version"] == case.get("version", report["version"])
    assert case["findings"] or report["ok"]


def test_a_directory_is_walked(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "run.sh").write_text("trtllm-serve M --tp_sise 8\n")
    (tmp_path / "engine.yml").write_text("kv_cache_config: {dtyp: fp8}\n")
    (tmp_path / "other.yml").write_text("name: x\nimage: y\n")
    done = trtspec("lint", tmp_path, "--json")
    (script, engine) = json.loads(done.stdout)["files"]
    assert script["problems"] and engine["problems"]
    assert "1 files without engine settings" in done.stderr


def test_a_correction_keeps_what_the_shell_puts_in(tmp_path: Path) -> None:
    text = "cat > e.yml <<EOF\nmoe_config: {backend: trtllm}\n$MORE\ndtype: ${D:-auto}\nEOF\n"
    lint(text, tmp_path, "--fix")
    assert (tmp_path / "file").read_text() == text.replace("trtllm}", "TRTLLM}")


@pytest.fixture(scope="module", params=["helm-values", "dynamo"])
def written(request: pytest.FixtureRequest) -> str:
    words = (*shlex.split(PAIR), "--format", request.param, "--trtllm-version", "1.3.0rc22")
    return trtspec("build-config", *words).stdout


def test_our_own_values_and_manifests_are_clean(written: str, tmp_path: Path) -> None:
    report = lint(written, tmp_path)
    assert report["ok"] and not found(report)
    assert (report["version"], report["version_reason"]) == ("1.3.0rc22", "the image's tag")


def test_a_finding_stands_at_its_line_and_is_corrected_there(written: str, tmp_path: Path) -> None:
    broken = written.replace("backend: TRTLLM", "backend: trtllm").replace(
        "enable_padding", "enable_paddin"
    )
    lines = [
        n
        for n, line in enumerate(broken.splitlines(), 1)
        if "trtllm  #" in line or "enable_paddin:" in line
    ]
    assert {line for _, line in found(lint(broken, tmp_path))} == set(lines)
    lint(broken, tmp_path, "--fix")
    assert (tmp_path / "file").read_text() == written.replace("enable_padding", "enable_paddin")


@pytest.mark.parametrize("text", ["#!/bin/bash\nmake: it\n", "a: {{ .Values.a }}\n"])
def test_a_script_or_template_without_engine_settings_is_not_judged(
    text: str, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text(text)
    failed = trtspec("lint", tmp_path / "file")
    assert failed.status == 2 and "script or template" in failed.stderr and not failed.stdout


# (name, error in a file, what an argument gets): one verdict for a name, wherever it stands
NAMES = [
    ("nvidia/Kimi-K2.6-Eagle3", False), ("kimi-nano-eagle3", False), ("/nowhere/head", False),
    ("nvidia/Kimi-K2.6-Eagel3", True), ("<eagle3 checkpoint>", True), ("moonshotai/Kimi-K3", True),
]  # fmt: skip
YAML = (
    "speculative_config: {{decoding_type: Eagle, max_draft_len: 3, speculative_model_dir: {!r}}}\n"
)
PLACES = {
    "yaml": YAML,
    "helm": (
        "image: {{tag: 1.4.0rc1}}\n"
        "model: {{head: {!r}}}\n"
        "engineConfig: |\n"
        "  kv_cache_config: {{dtype: fp8}}\n"
    ),
    "manifest": "data:\n  engine.yml: |\n    " + YAML,
    "script": "cat > e.yml <<'EOF'\n"
    + YAML
    + "EOF\ntrtllm-serve kimi-nano --config e.yml --trust_remote_code\n",
}


@pytest.mark.parametrize("place", PLACES)
def test_a_name_has_one_verdict_wherever_it_stands(place: str, tmp_path: Path) -> None:
    for number, (name, _) in enumerate(NAMES):
        (tmp_path / f"{number}").write_text(PLACES[place].format(name))
    report = json.loads(
        trtspec("lint", *(tmp_path / f"{n}" for n in range(len(NAMES))), "--json").stdout
    )
    for (name, wrong), file in zip(NAMES, report["files"], strict=True):
        named = [item for item in file["problems"] if item["code"].startswith("TS-NAME-")]
        assert any(item["severity"] == "error" for item in named) is wrong, (name, named)
        assert bool(named) is (wrong or name.startswith("/")), (name, named)
