"""What a release does with what it is given: asked by name, inherited, dated; and no rule knows a release."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from trtspec.trtllm.deployment import Deployment
from trtspec.trtllm.lint.linter import lint
from trtspec.trtllm.schema import LINES, SCHEMAS, UNKNOWN, schema_for

TRTLLM = SCHEMAS.parent
OWNERS = {"schema.py", "schema_tools.py"}
RELEASE = re.compile(r"1\.\d+(\.\d+)?(rc\d+)?(\.post\d+)?")
METHODS = yaml.safe_load((TRTLLM / "speculation.yaml").read_text())["methods"]


def found(text: str, version: str) -> dict[str, Any]:
    return {finding.code: finding for finding in lint(text, Deployment(schema_for(version)))}


def reuse(**values: Any) -> str:
    return yaml.safe_dump({"kv_cache_config": values})


@pytest.mark.parametrize(
    ("version", "winner", "bounds", "first", "beyond"),
    [
        ("1.2.1", "yaml", "lower", 1, "last"),
        ("1.3.0rc9", UNKNOWN, UNKNOWN, UNKNOWN, UNKNOWN),
        ("1.3.0rc20", "cli", "upper", "smallest", "zero"),
        ("1.4.0rc1", "cli", "upper", "smallest", "zero"),
    ],
)
def test_a_meaning_is_inherited_until_a_line_states_another(
    version: str, winner: Any, bounds: Any, first: Any, beyond: Any
) -> None:
    schema = schema_for(version)
    meaning = schema.behaviour("draft_len_schedule")
    assert (schema.precedence, meaning.get("bounds"), meaning.get("first"), meaning.get("beyond")) == (
        winner, bounds, first, beyond,
    )  # fmt: skip
    assert bool(meaning.interval) == (bounds is UNKNOWN)
    assert not schema_for("1.1.0").behaviour("draft_len_schedule")


def test_what_was_mended_is_gone_and_what_may_be_is_asked_with_its_interval() -> None:
    states = {}
    for version in ("1.3.0rc5", "1.3.0rc16", "1.3.0rc17", "1.3.0rc18", "1.3.0rc20", "1.3.0rc22", "1.4.0rc1"):
        crash = schema_for(version).behaviour("rejection_sampling_crashes")
        states[version] = "unknown" if crash.interval else "yes" if crash else "no"
    assert states == {
        "1.3.0rc5": "no", "1.3.0rc16": "unknown", "1.3.0rc17": "yes", "1.3.0rc18": "yes",
        "1.3.0rc20": "unknown", "1.3.0rc22": "no", "1.4.0rc1": "no",
    }  # fmt: skip


def test_every_behaviour_says_how_it_is_known() -> None:
    for line in LINES:
        entries = yaml.safe_load((SCHEMAS / f"{line}.yaml").read_text())["behaviours"]
        for name, entry in entries.items():
            if entry is not None:
                assert entry["evidence"] in ("verified", "inferred", "unknown") and entry["source"], (line, name)
                assert set(entry) - {"evidence", "source", "since", "until"}, (line, name)  # it says something
                assert all(entry[key]["evidence"] for key in ("since", "until") if key in entry), (line, name)


@pytest.mark.parametrize(
    ("version", "flat", "conversation", "nested"),
    [
        ("1.3.0rc20", "takes", "refuses", "refuses"),
        ("1.3.0rc22", "takes", "doubts", "refuses"),
        ("1.3.0rc23.post1", "takes", "takes", "refuses"),
        ("1.3.0rc24", "refuses", "refuses", "takes"),
        ("1.4.0rc1", "refuses", "refuses", "takes"),
    ],
)
def test_block_reuse_has_the_key_of_its_release(version: str, flat: str, conversation: str, nested: str) -> None:
    def verdict(text: str) -> str:
        severities = {finding.severity for finding in found(text, version).values()}
        return "refuses" if "error" in severities else "doubts" if "warning" in severities else "takes"

    assert verdict(reuse(block_reuse_policy="per_request")) == flat
    assert verdict(reuse(block_reuse_policy="per_conversation")) == conversation
    assert verdict(reuse(block_reuse_config={"policy": "per_conversation"})) == nested


@pytest.mark.parametrize(
    ("text", "version", "interval"),
    [
        ("sampler_type: auto\n", "1.3.0rc26", "after 1.3.0rc24, by 1.3.0rc28"),
        ("disable_flashinfer_sampling: true\n", "1.3.0rc22", "after 1.3.0rc20, by 1.3.0rc24"),
        ("speculative_config: {decoding_type: NGram, max_draft_len: 1, enable_penalty: true}\n", "1.3.0rc25",
         "after 1.3.0rc24, by 1.3.0rc26"),
        ("enable_in_graph_sampling: true\n", "1.3.0rc24", "after 1.3.0rc23, by 1.4.0rc1"),
        ("moe_config: {backend: WIDEEP}\n", "1.3.0rc25", "after 1.3.0rc20, by 1.4.0rc1"),
    ],
)  # fmt: skip
def test_a_boundary_inside_a_line_is_a_warning_that_names_it(text: str, version: str, interval: str) -> None:
    findings = [finding for finding in found(text, version).values() if finding.severity != "info"]
    assert [finding.severity for finding in findings] == ["warning"] and interval in findings[0].message


@pytest.mark.parametrize(
    ("text", "version", "refused"),
    [
        ("speculative_config: {decoding_type: SaveState}\n", "1.4.0rc1", True),
        ("speculative_config: {decoding_type: SaveState, output_directory: /x}\n", "1.4.0rc1", False),
        ("speculative_config: {decoding_type: NGram, max_draft_len: 2}\n", "1.4.0rc1", False),
        ("kv_cache_compression_config: {algorithm: triattention}\n", "1.4.0rc1", True),
        ("kv_cache_compression_config: {algorithm: quantization_for_cold_page}\n", "1.4.0rc1", False),
        ("kv_cache_compression_config: {}\n", "1.4.0rc1", True),
        ("sparse_attention_config: {topk: 1}\n", "1.4.0rc1", True),
        ("max_batch_size: 8\n", "1.4.0rc1", False),
    ],
)
def test_what_a_class_requires_is_required_of_its_variant_alone(text: str, version: str, refused: bool) -> None:
    codes = found(text, version)
    assert ("TS-LINT-MISSING-KEY" in codes) == refused
    assert refused or all(finding.severity != "error" for finding in codes.values())


@pytest.mark.parametrize("path", sorted(TRTLLM.rglob("*.py")), ids=lambda path: str(path.relative_to(TRTLLM)))
def test_no_rule_knows_a_release_or_a_way_to_speculate(path: Path) -> None:
    """Outside their owners, no text of the code is the name of a line, a release or a decoding type, and nothing
    compares `line`."""
    if path.name in OWNERS and path.parent == TRTLLM:
        return
    names = {name for row in METHODS.values() for name in row["spellings"]} - {"AUTO"}  # also a word of other keys
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            assert node.value not in names, node.lineno
            assert not RELEASE.fullmatch(node.value), node.lineno
        if isinstance(node, ast.Compare):
            parts = [node.left, *node.comparators]
            assert not any(isinstance(p, ast.Attribute) and p.attr == "line" and "schema" in ast.dump(p) for p in parts)
