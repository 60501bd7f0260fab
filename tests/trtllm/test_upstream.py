"""The schemas against TensorRT-LLM's own manifests, judged by pydantic itself."""

import itertools
import json
import re
import typing
from pathlib import Path
from typing import Any

import pytest
import yaml
from annotated_types import Ge, Gt
from pydantic import TypeAdapter, ValidationError

from tests.oracles.mutations import paths_ever
from trtspec.trtllm.deployment import Deployment, parse_passed
from trtspec.trtllm.lint import lint
from trtspec.trtllm.rules.keys import check_value
from trtspec.trtllm.schema import DISCRIMINATORS, Field, schema_for

NEWEST, OLDER = "1.3.0rc27.dev0", "1.3.0rc20"  # the first is the commit of the manifest
OPTION_LISTS = [("main", NEWEST), ("older", OLDER)]
SAMPLES: list[Any] = [
    None, 0, 1, -1, 2, 7.0, 0.5, 1e6, True, False, "abc", "5", "-5", "true", "1.5", "",
    [], [1, 2], [-1], ["abc"], [[1], [2]], {}, {"a": 1}, {1: 2},
]  # fmt: skip
KEY_CODES = {
    "TS-LINT-UNKNOWN-KEY",
    "TS-LINT-RENAMED-KEY",
    "TS-LINT-REMOVED-KEY",
    "TS-LINT-WRONG-TYPE",
    "TS-LINT-BAD-VALUE",
    "TS-LINT-OUT-OF-RANGE",
    "TS-LINT-WRONG-VARIANT",
}
# Keys that the class of the manifest's own commit takes and the manifest leaves out, so that it
# cannot judge them. The text is tensorrt_llm/llmapi/llm_args.py at
# 0004396720054fd8e205cbf616f21f0b57c6b412:
# - KvCacheConfig: `mamba_state_cache_interval: Optional[NonNegativeInt] = Field(default=None,
#   status="deprecated", telemetry=False, exclude=True, description="Deprecated alias for
#   mamba_state_config.periodic_snapshot_interval.")`; Field's own words: "telemetry=False to opt a
#   type-safe field out"; the manifest holds what telemetry captures
# - MoeConfig: `load_balancer: Optional[Union[object, str]]`, in its schema
#   "Union[MoeLoadBalancerConfig, dict, str]"; MoeLoadBalancerConfig has `num_slots: Optional[int]`,
#   `layer_updates_per_iter: int`, `initial_global_assignments`
NOT_LISTED = ("kv_cache_config.mamba_state_cache_interval", "moe_config.load_balancer")
# Keys for which the serve reference's `Choice(...)` counts beside the manifest's values:
# TorchLlmArgs is the class of the PyTorch backend alone, and an allowlist is what telemetry may
# report of a text
SERVED_CHOICES = ("backend", "reasoning_parser")
LISTED_TYPES = {
    "int",
    "float",
    "bool",
    "int|null",
    "float|null",
    "bool|null",
}  # free text is never listed


def leaves(manifests: Path) -> list[dict[str, Any]]:
    return json.loads((manifests / "main" / "llm_args_golden_manifest.json").read_text())[
        "TorchLlmArgs"
    ]


def serve_options(manifests: Path, which: str) -> dict[str, Any]:
    text = (manifests / which / "trtllm_serve_cli.yaml").read_text()
    return yaml.safe_load(text)["commands"]["serve"]["options"]


def adapter(leaf: dict[str, Any]) -> TypeAdapter[Any]:
    """The field's annotation as a pydantic type; enums and choices are their listed values."""
    text = leaf["annotation"]
    text = re.sub(r"<class '(\w+)'>", r"\1", text).replace("NoneType", "None")
    listed = leaf["allowed_values"]
    choices = f"Literal[{', '.join(map(repr, listed))}]" if listed else ""
    if choices and (
        "enum" in text or "tensorrt_llm" in text or text == "str" or "Optional[str]" in text
    ):
        text = f"Optional[{choices}]" if "Optional" in text else choices
    elif choices and text.startswith(("Literal", "Optional[Literal")):
        text = f"Union[{text}, {choices}]"
    names = {
        **vars(typing),
        "Gt": Gt,
        "Ge": Ge,
        "int": int,
        "float": float,
        "bool": bool,
        "str": str,
    }
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


def test_values_are_judged_as_pydantic_judges_them(manifests: Path) -> None:
    """Every leaf, every sample and every listed value.

    A limit that only a validator states is ours to add: where the annotation states one, values
    around it are judged too.
    """
    schema, wrong, judged = schema_for(NEWEST), [], 0
    for leaf in leaves(manifests):
        field, judge = schema.fields[leaf["path"]], adapter(leaf)
        limited = "Gt(" in leaf["annotation"] or "Ge(" in leaf["annotation"]
        for value in [
            *SAMPLES,
            *leaf["allowed_values"],
            *((-(2**31), -3, 2**40) if limited else ()),
        ]:
            verdict = check_value(field, value)
            if verdict is not None and verdict[0] == "range" and (not limited or value == []):
                continue
            judged += 1
            ours = verdict is None
            if ours != accepts(judge, value):
                wrong.append((leaf["path"], leaf["annotation"], value, verdict))
    assert judged > 6000
    assert len(wrong) <= judged // 100, wrong[:20]
    unexplained = [item for item in wrong if item[0] not in STATED_DIFFERENCES]
    assert not unexplained, unexplained


# the facts allow a file name for a static tree; the annotation of dtype is str, and its validator
# returns any text
STATED_DIFFERENCES = {"speculative_config.eagle_choices", "dtype"}


def choices(option: dict[str, Any]) -> list[str]:
    kind = option["type"]
    return yaml.safe_load(kind[len("Choice(") : -1]) if kind.startswith("Choice") else []


def nested(path: str, value: Any) -> dict[str, Any]:
    for part in reversed(path.split(".")):
        value = {part: value}
    return value


def taken(values: dict[str, Any], path: str) -> bool:
    """Whether lint lets the key at `path` pass."""
    found = lint(yaml.safe_dump(values), Deployment(schema_for(NEWEST)))
    return not any(
        f.severity == "error" and f.code in KEY_CODES and f"{path}.".startswith(f"{f.key}.")
        for f in found
    )


def with_its_variant(field: Field, value: Any) -> dict[str, Any]:
    """The key alone, but for the one without which the engine would not know whose field it is."""
    values, top = nested(field.path, value), field.path.partition(".")[0]
    if field.variants and field.path != f"{top}.{DISCRIMINATORS.get(top)}":
        values[top][DISCRIMINATORS[top]] = field.variants[0]
    return values


def test_every_key_is_taken_and_its_misspelling_is_not(manifests: Path) -> None:
    fields = schema_for(NEWEST).fields
    for leaf in leaves(manifests):
        field, judge = fields[leaf["path"]], adapter(leaf)
        listed = [*leaf["allowed_values"], *([word] for word in leaf["allowed_values"])]
        good = (one for one in [*listed, *SAMPLES] if accepts(judge, one))
        value = next(one for one in good if check_value(field, one) is None)
        values = with_its_variant(field, value)
        assert taken(values, field.path), field.path
        *parents, name = field.path.split(".")
        place: Any = values
        for parent in parents:
            place = place[parent]
        place[f"{name}x"] = place.pop(name)
        assert not taken(values, f"{field.path}x"), field.path


def test_keys_and_values_of_other_lines_are_judged_as_the_manifest_judges_them(
    manifests: Path,
) -> None:
    """Numbers, flags and listed words only, which a manifest would list.

    Each of them beside upstream's own recipe.
    """
    judges = {leaf["path"]: adapter(leaf) for leaf in leaves(manifests)}
    served = serve_options(manifests, "main")
    recipe = yaml.safe_load(
        (manifests / "recipes" / "trtllm-curated-kimi-k2-thinking.yaml").read_text()
    )
    asked: list[tuple[str, Any]] = []
    for path, field in paths_ever():
        top = path.partition(".")[0]
        if not_listed(path) or DISCRIMINATORS.get(top) == path.partition(".")[2]:
            continue
        asked += [(path, value) for value in field.allowed if path in judges]
        if field.type in LISTED_TYPES and path not in judges:
            asked.append((path, True if "bool" in field.type else 1))
    asked = list(dict.fromkeys(asked))  # sources repeat each other
    wrong = []
    for path, value in asked:
        theirs = path in judges and accepts(judges[path], value)
        theirs = theirs or (path in SERVED_CHOICES and value in choices(served[path]))
        own = nested(path, value)
        top = path.partition(".")[0]
        if isinstance(own[top], dict) and isinstance(recipe.get(top), dict):
            own[top] = recipe[top] | own[top]
        if taken(recipe | own, path) != theirs:
            wrong.append((path, value, theirs))
    print(f"\n{len(asked)} keys and values of other lines, {len(wrong)} judged otherwise")
    assert len(asked) > 200 and len(wrong) <= len(asked) // 100, wrong


def not_listed(path: str) -> bool:
    return any(f"{path}.".startswith(f"{name}.") for name in NOT_LISTED)


@pytest.mark.parametrize(("which", "version"), OPTION_LISTS)
def test_options_that_are_passed_are_judged_as_the_reference_lists_them(
    manifests: Path, which: str, version: str
) -> None:
    """Every option of either release is judged as listed, right or misspelt, text or number."""
    known, schema = serve_options(manifests, which), schema_for(version)
    flags = {flag: option for option in known.values() for flag in option["flags"]}
    for option in [
        one for name, _ in OPTION_LISTS for one in serve_options(manifests, name).values()
    ]:
        for flag in () if option["is_flag"] else option["flags"]:
            for word, text in itertools.product(
                (flag, f"{flag}x"), ("8", "0.5", "nothing-of-it", *choices(option))
            ):
                problems = parse_passed(schema, [word, text])[1]
                ours = not any(problem.severity == "error" for problem in problems)
                assert ours == (word in flags and takes(flags[word], text)), (word, text)


def takes(option: dict[str, Any], text: str) -> bool:
    if choices(option):
        return text in choices(option)
    try:
        {"int": int, "float": float}.get(option["type"].lower(), str)(text)
    except ValueError:
        return False
    return True


@pytest.mark.parametrize(("which", "version"), OPTION_LISTS)
def test_every_serve_option_with_its_type_default_and_flags(
    manifests: Path, which: str, version: str
) -> None:
    schema, options = schema_for(version), serve_options(manifests, which)
    assert set(schema.options) == set(options)
    for name, theirs in options.items():
        ours = schema.options[name]
        assert list(ours.flags) == theirs["flags"], name
        assert ours.default == theirs["default"], name
        assert ours.is_flag == theirs["is_flag"] and ours.multiple == theirs["multiple"], name
        assert ours.status == theirs["status"], name
        assert set(choices(theirs)) <= set(ours.choices), name  # --backend also took the alias trt
        if not choices(theirs):
            assert ours.type == theirs["type"].lower().replace("path", "str"), name


def test_the_engines_own_kimi_recipes_pass(manifests: Path) -> None:
    recipes = manifests / "recipes"
    curated = (recipes / "trtllm-curated-kimi-k2-thinking.yaml").read_text()
    wide = yaml.safe_load((recipes / "trtllm-wide-ep-kimi-k2-thinking.yaml").read_text())[
        "worker_config"
    ]
    for version in (OLDER, NEWEST):
        deployment = Deployment(schema_for(version))
        for text in (curated, yaml.safe_dump(wide["gen"]), yaml.safe_dump(wide["ctx"])):
            found = [finding for finding in lint(text, deployment) if finding.severity != "info"]
            assert not found, found


@pytest.mark.parametrize("left_out", [None, "1.3.0rc27", "1.4.0rc1"])
def test_documented_classes_are_judged_as_their_pages_list_them(
    manifests: Path, left_out: str | None
) -> None:
    """By all sources, and by all but the release's own."""
    from tools import snapshots

    pages = json.loads((manifests / "documented" / "class_pages.json").read_text())
    with snapshots.without(left_out):
        *_, sums = snapshots.judged(pages, left_out)
    print(f"\n{left_out or 'nothing'} left out: {sums}")
    assert " 0 refused" in sums and " 0 passed" in sums
