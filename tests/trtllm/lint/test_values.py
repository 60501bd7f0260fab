"""Values are judged as pydantic judges them, and rules see what the engine makes of them."""

from typing import Annotated, Any, Literal

import pytest
from pydantic import Field as Limits
from pydantic import TypeAdapter, ValidationError

from tests.cases import table
from trtspec.trtllm.deployment import Deployment
from trtspec.trtllm.document import Document
from trtspec.trtllm.lint import as_the_engine_sees_it, lint
from trtspec.trtllm.rules.keys import check_value
from trtspec.trtllm.schema import Field, schema_for

SAMPLES: list[Any] = [
    None,
    0,
    1,
    -1,
    7,
    7.0,
    0.5,
    1.5,
    True,
    False,
    "",
    "abc",
    "5",
    "5.0",
    " 5 ",
    "1e3",
    "0.5",
    "nan",
    "yes",
    "Off",
    "auto",
    "AUTO",
    float("nan"),
    float("inf"),
    10**400,
    [],
    [1],
    ["1"],
    [0.5],
    [[1]],
    {},
    {"a": "b"},
    {1: 2},
    {"1": "2"},
    {"x": 1},
    [0.5, 0.5],
    [0.2, 0.8],
    [0.0, 1.0],
    [0.8, 0.2],
    ["0.1", 0.9],
]
# (the field, the annotation that the engine's class would have)
FIELDS: list[tuple[Field, Any]] = [
    (Field("a", "int", min=1, max=5), Annotated[int, Limits(ge=1, le=5)]),
    (Field("a", "int|null", min=0), Annotated[int, Limits(ge=0)] | None),
    (Field("a", "float", above=0, below=1), Annotated[float, Limits(gt=0, lt=1)]),
    (Field("a", "float|null", min=0, max=1), Annotated[float, Limits(ge=0, le=1)] | None),
    (Field("a", "bool"), bool),
    (Field("a", "bool|null"), bool | None),
    (Field("a", "str"), str),
    (Field("a", "str|null", allowed=("auto", "abc")), Literal["auto", "abc"] | None),
    (Field("a", "bool|str", allowed=("auto",)), bool | Literal["auto"]),
    (Field("a", "list[int]|null", min=1), list[Annotated[int, Limits(ge=1)]] | None),
    (Field("a", "list[int]", not_empty=True), Annotated[list[int], Limits(min_length=1)]),
    (Field("a", "list[float]"), list[float]),
    (Field("a", "list[list[int]]|str|null"), list[list[int]] | str | None),
    (Field("a", "dict[int,int]|null"), dict[int, int] | None),
    (Field("a", "dict[int,int]", not_empty=True), Annotated[dict[int, int], Limits(min_length=1)]),
    (Field("a", "object|str|null"), dict[Any, Any] | str | None),
    (Field("a", "float|object|null"), float | dict[Any, Any] | None),
]


@pytest.mark.parametrize(
    ("field", "annotation"), FIELDS, ids=lambda item: getattr(item, "type", "")
)
def test_every_type_takes_what_pydantic_takes(field: Field, annotation: Any) -> None:
    adapter = TypeAdapter(annotation)
    for value in SAMPLES:
        verdict = check_value(field, value)
        try:
            adapter.validate_python(value)
        except ValidationError:
            assert verdict is not None, (field.type, value)
            continue
        assert verdict is None, (field.type, value, verdict)


def test_case_counts_where_the_engine_says_so() -> None:
    assert check_value(Field("a", "str", allowed=("auto",), case_insensitive=True), "AUTO") is None
    verdict = check_value(Field("a", "str", allowed=("auto",)), "AUTO")
    assert verdict is not None and verdict[0] == "value"


def test_rules_see_what_the_engine_sees() -> None:
    text = """\
max_batch_size: "64"
speculative_config:
  draft_len_schedule: {"1": "3", "8": 1}
  use_dynamic_tree: "yes"
  max_draft_len: 3.0
moe_config:
  load_balancer: {num_slots: "416"}
  backend: NOTHING
kv_cache_config: {dtype: 3}
"""
    seen = as_the_engine_sees_it(Document.parse(text), schema_for("1.4.0rc1"))
    assert seen.get("max_batch_size") == 64
    assert seen.get("speculative_config.draft_len_schedule") == {1: 3, 8: 1}
    assert seen.get("speculative_config.use_dynamic_tree") is True
    assert repr(seen.get("speculative_config")["max_draft_len"]) == "3"
    assert seen.get("moe_config.load_balancer")["num_slots"] == 416
    assert seen.get("kv_cache_config.dtype") is None  # a type that is refused
    assert seen.get("moe_config.backend") == "NOTHING"  # a word that is refused
    assert seen.text == text


REMEDIES = table(__file__)


@pytest.mark.parametrize(("release", "text", "remedy"), REMEDIES, ids=[row[1] for row in REMEDIES])
def test_a_remedy_knows_where_a_key_went(release: str, text: str, remedy: str) -> None:
    errors = lint(text, Deployment(schema_for(release)))
    remedies = [f.remedy for f in errors if f.code.endswith(("-KEY", "-UNCERTAIN"))]
    assert [each.partition(" (")[0] for each in remedies] == [remedy]


def test_a_misspelt_key_does_not_also_miss_its_value() -> None:
    text = (
        "speculative_config: {decoding_type: Eagle, max_draft_length: 3, "
        "speculative_model_dir: /h}\n"
    )
    found = [
        f.code for f in lint(text, Deployment(schema_for("1.3.0rc20"))) if f.severity == "error"
    ]
    assert found == ["TS-LINT-UNKNOWN-KEY"]
