"""One default release, read from trtspec/trtllm/releases.yaml by everything that names one."""

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.command_line import trtspec
from trtspec.data_files import load_yaml
from trtspec.trtllm.build import build_named
from trtspec.trtllm.deployment import ASSUMED, choose_version, deployment_of
from trtspec.trtllm.document import Document
from trtspec.trtllm.intent import Intent
from trtspec.trtllm.lint import lint
from trtspec.trtllm.schema import default_release

ROOT = Path(__file__).resolve().parent.parent.parent
RELEASE = r"1\.\d+\.\d+(?:rc\d+)?(?:\.post\d+)?"
# how a file names the release that it uses, rather than one that it tells about
USES = re.compile(
    r"(?:TRTLLM_VERSION=|tensorrt-llm/release:|\btrtspec:|--trtllm-version |trtllm_version=[\"']|"
    rf"^# TensorRT-LLM |\btag: |appVersion: |such as )({RELEASE})(?![\d.])",
    re.MULTILINE,
)
JUDGES_OTHER_RELEASES = ("tests/", "tools/fingerprint", "trtspec/trtllm/snapshots/", "CHANGELOG.md")
# (file, release): why this file uses another one
OTHERS = {
    ("docs/hardware.md", "1.3.0rc29"): "an engine that an image of Dynamo carries",
}


def used_releases() -> Iterator[tuple[str, str]]:
    """(file, release) in every tracked file."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    for name in listed.stdout.split():
        if name.startswith(JUDGES_OTHER_RELEASES):
            continue
        text = (ROOT / name).read_text(encoding="utf-8", errors="replace")
        yield from ((name, release) for release in USES.findall(text))


def test_one_release_is_the_default_everywhere() -> None:
    uses = set(used_releases())
    others = {use for use in uses if use[1] != default_release()}
    assert others == set(OTHERS), "a default of its own, or an exception that is gone"
    assert len(uses) > 60, "the words that name a release are no longer found"


def test_library_shell_and_table_name_the_default() -> None:
    assert choose_version(None) == (default_release(), ASSUMED)
    assert f"| `{default_release()}` |" in (ROOT / "docs/hardware.md").read_text()


@pytest.mark.parametrize(
    ("words", "classes"),
    [
        ("build-config nvidia/Kimi-K2.6-NVFP4 --gpu b200", "the top level, cuda_graph_config"),
        ("serve nvidia/Kimi-K2.6-NVFP4 --dry-run", "the top level, cuda_graph_config"),
        ("lint first.yml second.yml", "the top level, kv_cache_config"),
    ],
)
def test_an_assumed_release_is_told_once(
    words: str, classes: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The message names the file's classes not read whole there, and the known issue."""
    monkeypatch.chdir(tmp_path)
    for name in ("first.yml", "second.yml"):
        Path(name).write_text("kv_cache_config: {dtype: fp8}\n")
    done = trtspec(*words.split())
    printed = done.stdout + done.stderr
    assert printed.count("TS-LINT-RELEASE-ASSUMED") == 1, printed
    assert f"not read whole at this release: {classes}" in printed
    assert "known issue: in disaggregated serving" in printed
    asked = trtspec(*words.split(), "--trtllm-version", default_release())
    assert "RELEASE-ASSUMED" not in asked.stdout + asked.stderr


MODELS = load_yaml("models.yaml")
# what four GPUs can serve: the native weights are not loaded, and a head without a config is
# refused
PAIRS = [
    (target, head)
    for head, entry in MODELS["heads"].items()
    for target in entry["targets"]
    if entry["config"] and MODELS["targets"][target]["format"] == "nvfp4"
]


@pytest.mark.parametrize(("target", "head"), PAIRS)
def test_a_published_pair_on_four_gpus_is_lint_clean(target: str, head: str) -> None:
    default = default_release()
    intent = Intent(target=target, head=head, version=default, gpu="b200", trust_remote_code=True)
    text = build_named(intent).text
    deployment, _, problems = deployment_of(Document.parse(text))
    deployment = deployment.served_on("b200", {}, None)
    findings = [each for each in lint(text, deployment) if each.severity != "info"]
    assert (deployment.version, findings, problems) == (default, [], [])
