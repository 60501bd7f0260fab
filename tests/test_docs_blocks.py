"""Every Python and YAML block of README and docs/.

Python is run, an engine configuration is linted, objects of Kubernetes and values of the chart are
compared with their schemas, and so are files of compose and CI that pages name.
"""

import inspect
import os
import shutil
import subprocess
import textwrap
from collections import Counter
from pathlib import Path

import pytest
import yaml

from tests.docker.chart import IMAGE, merged, objects
from tools.pages import PAGES, ROOT, blocks
from trtspec.engine import engine

LANGUAGES = {"console", "sh", "python", "yaml", "text", "json", ""}
SHOWN = {"reference-engine.md": engine}  # pages that show code of the package, and where it is
CHECKER = os.environ.get(
    "TRTSPEC_CHECK_JSONSCHEMA", ""
)  # path of check-jsonschema, which brings the schemas
PUBLISHED = {
    "vendor.github-workflows": "configs/ci/*.yml",
    "vendor.compose-spec": "docker/compose.*.yml",
}


def judge_yaml(text: str) -> str:
    """By what the mapping is; raises AssertionError or what the schema's validator raises."""
    found = yaml.safe_load(text)
    if "apiVersion" in found:
        validator = pytest.importorskip("kubernetes_validate")
        validator.validate(found, "1.31", strict=True)
        return "Kubernetes object"
    chart = yaml.safe_load((ROOT / "docker/helm/trtspec/values.yaml").read_text())
    if found.keys() <= chart.keys():
        recipe = next((ROOT / "docker/helm/trtspec/recipes").glob("*.yaml"))
        assert objects(merged(IMAGE, yaml.safe_load(recipe.read_text()), found))
        return "chart values"
    import trtspec

    judged = trtspec.lint(found, target="nvidia/Kimi-K2.5-NVFP4")
    assert judged.ok, judged.problems
    return "engine configuration"


def test_every_yaml_block_is_valid() -> None:
    judged = {block.where: judge_yaml(block.text) for block in blocks("yaml")}
    print(f"\n{len(judged)} YAML blocks: {dict(Counter(judged.values()))}")
    assert "engine configuration" in judged.values()


def test_blocks_name_a_language_that_something_checks() -> None:
    assert not [block.where for block in blocks() if block.language not in LANGUAGES]


def test_every_python_block_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of a page one after the other, in one namespace and an empty directory."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    run = 0
    for page in PAGES:
        directory, names = tmp_path / page.stem, {"__name__": "__main__"}
        directory.mkdir()
        monkeypatch.chdir(directory)
        for block in (
            block for block in blocks("python") if block.page == page and page.name not in SHOWN
        ):
            exec(compile("\n" * block.line + block.text, str(page), "exec"), names)
            run += 1
    print(f"\n{run} Python blocks run")
    assert run >= 2


@pytest.mark.skipif(
    not shutil.which(CHECKER), reason="TRTSPEC_CHECK_JSONSCHEMA does not name check-jsonschema"
)
@pytest.mark.parametrize("schema", PUBLISHED)
def test_workflow_and_compose_files_follow_their_published_schemas(schema: str) -> None:
    files = sorted(ROOT.glob(PUBLISHED[schema]))
    assert files
    subprocess.run([CHECKER, "--builtin-schema", schema, *map(str, files)], check=True)


def test_code_of_the_package_is_shown_as_it_is() -> None:
    shown = [block for block in blocks("python") if block.page.name in SHOWN]
    assert shown and max(len(block.text.splitlines()) for block in shown) <= 40, "one screen"
    for block in shown:
        assert textwrap.indent(block.text, " " * 4) in inspect.getsource(SHOWN[block.page.name]), (
            block.where
        )
