"""What sources around a release say of a key, the known releases, and the files' contents."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import TypeAdapter, ValidationError

from trtspec.errors import UsageError
from trtspec.trtllm import schema
from trtspec.trtllm.deployment import Deployment
from trtspec.trtllm.lint import lint
from trtspec.trtllm.schema import UNKNOWN, Rule, parse_version, schema_for

CACHED = (
    "snapshots",
    "classes",
    "_key_support",
    "_names",
    "_variants",
    "option_names",
    "_schema",
    "releases",
)


@pytest.fixture
def sources(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """An empty folder in place of the snapshots."""
    monkeypatch.setattr(schema, "SNAPSHOTS", tmp_path)
    forget()
    yield tmp_path
    forget()


def forget() -> None:
    for name in CACHED:
        getattr(schema, name).cache_clear()


def source(folder: Path, release: str, coverage: str, *names: str) -> None:
    """A source of the top level: `whole`, `part`, or `silent`, which shows no key."""
    fields = {name: {"type": "int", "min": 1} for name in names}
    classes = {
        "": {"whole": coverage == "whole", "fields": fields},
        "--": {"whole": True, "fields": {}},
    }
    data = {"release": release, "source": ["invented"], "classes": classes}
    (folder / f"{release}.json").write_text(json.dumps(data))


TAKES, REFUSES, SILENT = ("whole", "stream_interval"), ("whole",), ("part",)


@pytest.mark.parametrize(
    ("before", "at", "after", "verdict"),
    [
        (TAKES, None, TAKES, ""),
        (REFUSES, None, REFUSES, "error"),
        (TAKES, None, REFUSES, "warning VERSION-UNCERTAIN"),
        (REFUSES, None, TAKES, "warning VERSION-UNCERTAIN"),
        (REFUSES, TAKES, REFUSES, ""),
        (TAKES, REFUSES, TAKES, "error"),
        (TAKES, SILENT, SILENT, ""),
        (TAKES, SILENT, REFUSES, "warning VERSION-UNCERTAIN"),
        (REFUSES, SILENT, SILENT, "warning KEY-UNCERTAIN"),
        (SILENT, SILENT, SILENT, "warning KEY-UNCERTAIN"),
        (SILENT, SILENT, TAKES, "warning VERSION-UNCERTAIN"),
        (REFUSES, ("part", "stream_interval"), REFUSES, ""),
    ],
)
def test_a_key_is_judged_by_the_sources_around_a_release(
    before: Any, at: Any, after: Any, verdict: str, sources: Path
) -> None:
    for release, said in (("1.3.0rc20", before), ("1.3.0rc22", at), ("1.3.0rc24", after)):
        if said is not None:
            source(sources, release, *said)
    findings = lint("stream_interval: 2\n", Deployment(schema_for("1.3.0rc22")))
    codes = [f"{f.severity} {f.code.removeprefix('TS-LINT-')}" for f in findings]
    assert len(codes) == bool(verdict) and all(code.startswith(verdict) for code in codes), codes
    wrong = lint("stream_interval: 0\n", Deployment(schema_for("1.3.0rc22")))
    if verdict in ("", "error"):
        settled = at not in (None, SILENT) or SILENT not in (before, after)
        assert wrong[0].severity == ("error" if settled else "warning")


@pytest.mark.parametrize(
    "row",
    [
        "{when: {a: 1}, message: m, remedy: r, evidence: verified}",
        "{when: {a: 1}, message: m, remedy: r, evidence: verified, source: s, othewise: 1}",
        "{when: [a], message: m, remedy: r, evidence: verified, source: s}",
    ],
)
def test_a_row_that_is_no_rule_is_refused(row: str) -> None:
    with pytest.raises(ValidationError):
        TypeAdapter(Rule).validate_python(yaml.safe_load(row))


def test_every_row_is_a_rule() -> None:
    for path in schema.SCHEMAS.glob("*.yaml"):
        rows = yaml.safe_load(path.read_text())["rules"]
        every = {**rows, **schema.issue_rules()}
        rules = TypeAdapter(dict[str, Rule | None]).validate_python(every).values()
        features = [rule for rule in rules if rule and rule.feature]
        assert all(rule.until and str(rule.until.by) in rule.remedy for rule in features)


@pytest.mark.parametrize(
    ("text", "remedy"),
    [
        ("", "for example 1.4.0rc1"),
        ("latest", "for example 1.4.0rc1"),
        ("1.3.x", "for example 1.4.0rc1"),
        ("0.21.0", "`trtllm_version` 1.4.0rc1"),
        ("1.2.0rc8", "`trtllm_version` 1.4.0rc1"),
        ("1.3", "use 1.3.0rc29 or 1.4.0rc0"),
        ("1.3.0", "use 1.3.0rc29 or"),
        ("1.2", "use 1.2.0 or 1.2.1"),
        ("1.4", "use 1.4.0rc4"),
        ("1.3.0rc33", "use 1.3.0rc29 or 1.4.0rc0"),
        ("1.3.0rc20.post1", "use 1.3.0rc20 or 1.3.0rc21"),
    ],
)
def test_a_release_that_does_not_exist_is_refused_with_the_nearest(text: str, remedy: str) -> None:
    with pytest.raises(UsageError) as refused:
        parse_version(text)
    assert remedy in refused.value.remedy


@pytest.mark.parametrize(
    "text", ["1.2.0", "1.3.0rc23.post1", "1.4.0rc4", "1.4.0rc9", "1.5.0", "1.3.0rc20+cu13"]
)
def test_a_release_that_exists_or_is_newer_than_all_is_taken(text: str) -> None:
    assert str(parse_version(text)) == text.partition("+")[0]


def test_every_field_has_a_type_and_every_object_its_parent() -> None:
    kind = re.compile(r"(list\[|dict\[(int|str),)*(int|float|bool|str|object|null|any)\]*")
    for release in schema.releases():
        known = schema_for(str(release))
        for field in known.fields.values():
            assert all(map(kind.fullmatch, field.types)), field
            if field.default is not UNKNOWN and field.allowed and isinstance(field.default, str):
                assert field.default in field.allowed, field
        for option in known.options.values():
            assert option.flags and option.type in ("int", "float", "bool", "str"), option


def test_kinds_follow_the_classes() -> None:
    """`decoding_type: Eagle` has another class than Eagle3; defaults are those of the class."""
    known = schema_for("1.3.0rc27")
    assert known.fields["speculative_config.sa_config"].variants == ("Eagle3", "MTP", "PARD")
    assert "Eagle" in known.fields["speculative_config.enable_penalty"].variants
    assert known.fields["kv_cache_config.mamba_state_cache_interval"].status == "deprecated"
    defaults = {
        kind: known.key_support("sparse_attention_config", "index_topk", kind).taken[0].default
        for kind in ("dsa", "deepseek_v4")
    }
    assert defaults == {"dsa": None, "deepseek_v4": 512}
