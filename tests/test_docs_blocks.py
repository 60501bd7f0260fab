"""Every Python and YAML block of README and docs/: Python is run, an engine configuration is linted, objects of
Kubernetes and values of the chart are held against their schemas; the files of compose and CI that the pages name, too.
"""

from __future__ import annotations

import ast
import inspect
import os
import shutil
import subprocess
import textwrap
from collections import Counter
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

import pytest
import yaml

from tests.docker.chart import IMAGE, merged, objects
from tests.test_docs_commands import FENCE, PAGES, ROOT
from trtspec.engine.engine import Engine

LANGUAGES = {"console", "python", "yaml", "text", "json", ""}
SHOWN = {"reference-engine.md": "trtspec.engine.engine"}  # pages that show code of the package, and where it is
CHECKER = os.environ.get("TRTSPEC_CHECK_JSONSCHEMA", "")  # path of check-jsonschema, which brings the schemas
PUBLISHED = {"vendor.github-workflows": "configs/ci/*.yml", "vendor.compose-spec": "docker/compose.*.yml"}


@dataclass(frozen=True)
class Block:
    page: Path
    line: int
    language: str
    text: str

    @property
    def name(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def blocks(*languages: str) -> list[Block]:
    found = []
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for match in FENCE.finditer(text):
            line = text.count("\n", 0, match.start()) + 1
            found.append(Block(page, line, match[2], textwrap.dedent(match[3])))
    return [block for block in found if not languages or block.language in languages]


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
    judged = {block.name: judge_yaml(block.text) for block in blocks("yaml")}
    print(f"\n{len(judged)} YAML blocks: {dict(Counter(judged.values()))}")
    assert {"engine configuration", "chart values"} <= set(judged.values())


def test_blocks_name_a_language_that_something_checks() -> None:
    assert not [block.name for block in blocks() if block.language not in LANGUAGES]


@pytest.mark.slow
def test_every_python_block_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of a page one after the other, in one namespace and an empty directory."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    run = 0
    for page in PAGES:
        directory, names = tmp_path / page.stem, {"__name__": "__main__"}
        directory.mkdir()
        monkeypatch.chdir(directory)
        for block in (block for block in blocks("python") if block.page == page):
            if module := SHOWN.get(page.name):
                source = inspect.getsource(import_module(module))
                assert block.text.rstrip() in textwrap.dedent(method(source, block.text)), block.name
            else:
                exec(compile("\n" * block.line + block.text, str(page), "exec"), names)
            run += 1
    print(f"\n{run} Python blocks run or compared with the source")
    assert run == len(blocks("python")) >= 3


def method(source: str, shown: str) -> str:
    """The definition in `source` with the name of the one that is shown."""
    (wanted,) = ast.parse(shown).body
    assert isinstance(wanted, ast.FunctionDef)
    found = [
        node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef) and node.name == wanted.name
    ]
    lines = source.splitlines()
    return "\n".join(lines[found[0].lineno - 1 : found[0].end_lineno])


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which(CHECKER), reason="TRTSPEC_CHECK_JSONSCHEMA does not name check-jsonschema")
@pytest.mark.parametrize("schema", PUBLISHED)
def test_workflow_and_compose_files_follow_their_published_schemas(schema: str) -> None:
    files = sorted(ROOT.glob(PUBLISHED[schema]))
    assert files
    subprocess.run([CHECKER, "--builtin-schema", schema, *map(str, files)], check=True)


def test_the_page_shows_the_round_as_it_is() -> None:
    source = textwrap.dedent(inspect.getsource(Engine._round)).rstrip()
    assert f"```python\n{source}\n```" in (ROOT / "docs" / "reference-engine.md").read_text(encoding="utf-8")
    assert len(source.splitlines()) <= 40, "one screen"
