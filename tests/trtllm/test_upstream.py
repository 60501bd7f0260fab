"""The engine's word, not ours: the schemas against TensorRT-LLM's own manifests, judged by pydantic itself."""

import json
import re
import typing
from pathlib import Path
from typing import Any

import pytest
import yaml
from annotated_types import Ge, Gt
from pydantic import TypeAdapter, ValidationError

from trtspec.trtllm.deployment import Deployment
from trtspec.trtllm.lint import lint
from trtspec.trtllm.rules.keys import check_value
from trtspec.trtllm.schema import schema_for

NEWEST = "1.4.0rc1"
SAMPLES: list[Any] = [
    None, 0, 1, -1, 2, 7.0, 0.5, 1e6, True, False, "abc", "5", "-5", "true", "1.5", "",
    [], [1, 2], [-1], ["abc"], [[1], [2]], {}, {"a": 1}, {1: 2},
]  # fmt: skip


def leaves(manifests: Path) -> list[dict[str, Any]]:
    return json.loads((manifests / "main" / "llm_args_golden_manifest.json").read_text())["TorchLlmArgs"]


def serve_options(manifests: Path, which: str) -> dict[str, Any]:
    text = (manifests / which / "trtllm_serve_cli.yaml").read_text()
    return yaml.safe_load(text)["commands"]["serve"]["options"]


def adapter(leaf: dict[str, Any]) -> TypeAdapter[Any]:
    """The field's annotation as a pydantic type; an enum or a documented choice counts by its listed values."""
    text = leaf["annotation"]
    text = re.sub(r"<class '(\w+)'>", r"\1", text).replace("NoneType", "None")
    listed = leaf["allowed_values"]
    choices = f"Literal[{', '.join(map(repr, listed))}]" if listed else ""
    if choices and ("enum" in text or "tensorrt_llm" in text or text == "str" or "Optional[str]" in text):
        text = f"Optional[{choices}]" if "Optional" in text else choices
    elif choices and text.startswith(("Literal", "Optional[Literal")):
        text = f"Union[{text}, {choices}]"
    names = {**vars(typing), "Gt": Gt, "Ge": Ge, "int": int, "float": float, "bool": bool, "str": str}
    return TypeAdapter(eval(text, {"__builtins__": {}}, names))


def accepts(judge: TypeAdapter[Any], value: Any) -> bool:
    try:
        judge.validate_python(value)
    except ValidationError:
        return False
    return True


def test_every_leaf_is_known_to_the_newest_line(manifests: Path) -> None:
    schema = schema_for(NEWEST)
    missing = [leaf["path"] for leaf in leaves(manifests) if leaf["path"] not in schema.fields]
    assert len(leaves(manifests)) > 300 and not missing
    assert schema.agreed(lambda one: one.fields) == schema.fields  # none is in doubt


def test_values_are_judged_as_pydantic_judges_them(manifests: Path) -> None:
    """Every leaf, every sample and every listed value; a limit that only a validator states is ours to add."""
    schema, wrong, judged = schema_for(NEWEST), [], 0
    for leaf in leaves(manifests):
        field, judge = schema.fields[leaf["path"]], adapter(leaf)
        for value in [*SAMPLES, *leaf["allowed_values"]]:
            verdict = check_value(field, value)
            if verdict is not None and verdict[0] == "range":
                continue
            judged += 1
            ours = verdict is None or verdict[0] == "lax"
            if ours != accepts(judge, value):
                wrong.append((leaf["path"], leaf["annotation"], value, verdict))
    assert judged > 6000
    assert len(wrong) <= judged // 100, wrong[:20]
    unexplained = [item for item in wrong if item[0] not in STATED_DIFFERENCES]
    assert not unexplained, unexplained


# the facts allow a file name for a static tree; the annotation lists only the tree itself
STATED_DIFFERENCES = {"speculative_config.eagle_choices"}


@pytest.mark.parametrize(("which", "version"), [("main", NEWEST), ("older", "1.3.0rc20")])
def test_every_serve_option_with_its_type_default_and_flags(manifests: Path, which: str, version: str) -> None:
    schema, options = schema_for(version), serve_options(manifests, which)
    assert set(schema.options) == set(options)
    for name, theirs in options.items():
        ours = schema.options[name]
        choices = re.findall(r"'([^']*)'", theirs["type"]) if theirs["type"].startswith("Choice") else []
        assert list(ours.flags) == theirs["flags"], name
        assert ours.default == theirs["default"], name
        assert ours.is_flag == theirs["is_flag"] and ours.multiple == theirs["multiple"], name
        assert ours.status == theirs["status"], name
        assert set(choices) <= set(ours.choices), name  # --backend also took the alias trt
        if not choices:
            assert ours.type == theirs["type"].lower().replace("path", "str"), name


def test_the_engines_own_kimi_recipes_pass(manifests: Path) -> None:
    recipes = manifests / "recipes"
    curated = (recipes / "trtllm-curated-kimi-k2-thinking.yaml").read_text()
    wide = yaml.safe_load((recipes / "trtllm-wide-ep-kimi-k2-thinking.yaml").read_text())["worker_config"]
    for version in ("1.3.0rc20", NEWEST):
        deployment = Deployment(schema_for(version))
        for text in (curated, yaml.safe_dump(wide["gen"]), yaml.safe_dump(wide["ctx"])):
            found = [finding for finding in lint(text, deployment) if finding.severity != "info"]
            assert not found, found


def test_the_list_of_differences_is_up_to_date(manifests: Path) -> None:
    import importlib.util

    root = Path(__file__).parents[2]
    found = importlib.util.spec_from_file_location("schema_differences", root / "tools" / "schema_differences.py")
    assert found is not None and found.loader is not None
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    assert (root / "docs" / "schema-differences.md").read_text(encoding="utf-8") == module.page(manifests)
