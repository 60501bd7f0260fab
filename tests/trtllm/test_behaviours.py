"""What a release does with its input: by name, inherited, dated; no rule knows a release."""

import ast
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.cases import table
from tests.oracles.mutations import paths_ever
from trtspec.trtllm.deployment import Deployment, eagle3, methods
from trtspec.trtllm.lint import lint
from trtspec.trtllm.rules.speculation import request_limits
from trtspec.trtllm.schema import SCHEMAS, schema_for

CASES = table(__file__)

TRTLLM = SCHEMAS.parent
RELEASE = re.compile(r"1\.\d+(\.\d+)?(rc\d+)?(\.post\d+)?")
SAMPLED = """\
speculative_config: {decoding_type: Eagle, max_draft_len: 3, \
speculative_model_dir: /h, use_rejection_sampling: false}
"""


def found(text: str, version: str) -> dict[str, Any]:
    return {finding.code: finding for finding in lint(text, Deployment(schema_for(version)))}


def reuse(**values: Any) -> str:
    return yaml.safe_dump({"kv_cache_config": values})


@pytest.mark.parametrize(
    ("version", "winner", "bounds", "first", "beyond"),
    [
        ("1.2.1", "yaml", "lower", 1, "last"),
        ("1.3.0rc9", None, None, None, None),
        ("1.3.0rc20", "cli", "upper", "smallest", "zero"),
        ("1.4.0rc1", "cli", "upper", "smallest", "zero"),
    ],
)
def test_a_meaning_is_inherited_until_a_line_states_another(
    version: str, winner: Any, bounds: Any, first: Any, beyond: Any
) -> None:
    def word(name: str, key: str) -> Any:
        states = schema_for(version).behaviours[name]
        return states[0].get(key) if len(states) == 1 else None

    schedule = tuple(word("draft_len_schedule", key) for key in ("bounds", "first", "beyond"))
    assert (word("precedence", "winner"), *schedule) == (winner, bounds, first, beyond)


def test_what_was_mended_is_gone_and_what_may_be_is_asked_with_its_interval() -> None:
    states = {}
    for version in (
        "1.3.0rc5",
        "1.3.0rc16",
        "1.3.0rc17",
        "1.3.0rc18",
        "1.3.0rc20",
        "1.3.0rc22",
        "1.4.0rc1",
    ):
        rules = schema_for(version).rules["rejection_sampling_crashes"]
        states[version] = [rule is not None for rule in rules]
    assert states == {
        "1.3.0rc5": [False], "1.3.0rc16": [False, True], "1.3.0rc17": [True], "1.3.0rc18": [True],
        "1.3.0rc20": [True, False], "1.3.0rc22": [False], "1.4.0rc1": [False],
    }  # fmt: skip


def test_every_behaviour_says_how_it_is_known() -> None:
    for path in SCHEMAS.glob("*.yaml"):
        line, data = path.stem, yaml.safe_load(path.read_text())
        for name, entry in (data["behaviours"] | data["rules"]).items():
            if entry is not None:
                assert (
                    entry["evidence"] in ("verified", "inferred", "unknown") and entry["source"]
                ), (line, name)
                assert set(entry) - {"evidence", "source", "since", "until"} or "until" in entry, (
                    line,
                    name,
                )


@pytest.mark.parametrize(
    ("version", "flat", "conversation", "nested"),
    CASES["block_reuse"],
)
def test_block_reuse_has_the_key_of_its_release(
    version: str, flat: str, conversation: str, nested: str
) -> None:
    def verdict(text: str) -> str:
        severities = {finding.severity for finding in found(text, version).values()}
        return (
            "refuses" if "error" in severities else "doubts" if "warning" in severities else "takes"
        )

    assert verdict(reuse(block_reuse_policy="per_request")) == flat
    assert verdict(reuse(block_reuse_policy="per_conversation")) == conversation
    assert verdict(reuse(block_reuse_config={"policy": "per_conversation"})) == nested


@pytest.mark.parametrize(
    ("text", "version", "sources"),
    CASES["one_source"],
)
def test_what_only_one_source_takes_is_a_warning_that_names_both(
    text: str, version: str, sources: list[str]
) -> None:
    findings = [finding for finding in found(text, version).values() if finding.severity != "info"]
    assert [finding.severity for finding in findings] == ["warning"]
    assert all(source in findings[0].message for source in sources), findings[0].message


def in_doubt(text: str, version: str, key: str) -> list[Any]:
    return [f for f in lint(text, Deployment(schema_for(version))) if f.key.endswith(key)]


def test_what_two_changes_decide_is_no_error() -> None:
    """A key without the crash, or a crash without the key, gives a warning: nobody knows.

    The key may be older than the crash.
    """
    text = (
        "speculative_config: {decoding_type: NGram, max_draft_len: 1, "
        "use_rejection_sampling: true}\n"
    )
    assert {f.severity for f in in_doubt(text, "1.3.0rc9", "use_rejection_sampling")} == {"warning"}


def test_one_warning_names_what_a_value_means_before_and_after() -> None:
    text = (
        "speculative_config: {decoding_type: NGram, max_draft_len: 3, draft_len_schedule: {1: 3}}\n"
    )
    message = found(text, "1.3.0rc9")["TS-LINT-SCHEDULE-MEANING"].message
    assert "lower or upper bounds" in message and "after 1.3.0rc5, by 1.3.0rc20" in message
    assert not any("SCHEDULE" in code for code in found(text, "1.2.1"))


def test_a_key_that_an_object_needs_is_missed() -> None:
    text = "kv_cache_compression_config: {algorithm: triattention}\n"
    assert found(text, "1.3.0rc24")["TS-LINT-MISSING-KEY"].severity == "error"


def test_every_decoding_type_of_every_release_has_one_row() -> None:
    rows = [name for method in methods().values() for name in method.spellings]
    fields = list(paths_ever())
    key = "speculative_config.decoding_type"
    listed = [field.allowed for path, field in fields if path == key]
    assert {name for names in listed for name in names} == set(rows) and len(rows) == len(set(rows))
    assert all(eagle3().spellings[0] in names for names in listed)  # the spelling that is written
    paths = {path for path, _ in fields}
    for method in methods().values():
        assert method.capture is None or f"speculative_config.{method.capture}" in paths, method.key
        assert (
            method.kimi["runs"] in ("yes", "no", "unknown") and method.kimi["why"] and method.source
        )


@pytest.mark.parametrize(
    ("version", "penalties", "end", "ignored", "refused"),
    CASES["request_parameters"],
)
def test_request_parameters_by_release(
    version: str, penalties: bool, end: bool, ignored: str, refused: str
) -> None:
    limits = request_limits(schema_for(version), penalties)
    assert ("logprobs" in limits["end_engine"]) == end
    assert (not ignored or ignored in limits["ignored"]) and (
        not refused or refused in limits["refused"]
    )


def test_penalties_are_honoured_where_the_key_allows_them() -> None:
    limits = request_limits(schema_for("1.4.0rc1"), penalties=True)
    assert not any("repetition_penalty" in listed for listed in limits.values())


@pytest.mark.parametrize("version", ["1.2.1", "1.3.0rc20", "1.3.0rc22", "1.4.0rc1"])
def test_without_speculation_no_trap_of_it_is_reported(version: str) -> None:
    text = (
        "kv_cache_config: {host_cache_size: 1073741824}\n"
        "guided_decoding_backend: xgrammar\n"
        "max_batch_size: 64\n"
    )
    assert not found(text + "moe_config: {backend: TRTLLM}\n", version)


@pytest.mark.parametrize(
    "path", sorted(TRTLLM.rglob("*.py")), ids=lambda path: str(path.relative_to(TRTLLM))
)
def test_no_rule_knows_a_release_or_a_way_to_speculate(path: Path) -> None:
    """Outside their owners, no text names a line, release or decoding type.

    Nothing there compares `line`.
    """
    if path == TRTLLM / "schema.py":
        return
    names = {name for row in methods().values() for name in row.spellings} - {
        "AUTO"
    }  # also a word of other keys
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            assert node.value not in names, node.lineno
            assert not RELEASE.fullmatch(node.value), node.lineno
        if isinstance(node, ast.Compare):
            parts = [node.left, *node.comparators]
            assert not any(
                isinstance(p, ast.Attribute) and p.attr == "line" and "schema" in ast.dump(p)
                for p in parts
            )
