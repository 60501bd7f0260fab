"""Which line a version belongs to, what it inherits, and where nobody knows."""

import shutil
from pathlib import Path

import pytest
from pydantic import ValidationError

from trtspec.errors import UsageError
from trtspec.trtllm import schema
from trtspec.trtllm.deployment import choose_version
from trtspec.trtllm.schema import LINES, UNKNOWN, newest_known, parse_version, schema_for

BEGINS = {"1.3": "after 1.3.0rc5, by 1.3.0rc20", "1.4": "after 1.3.0rc20, by 1.3.0rc22"}


@pytest.mark.parametrize(
    ("version", "line", "doubted"),
    [
        ("1.2.0", "1.2", None),
        ("1.2.1", "1.2", None),
        ("1.3.0rc5", "1.2", None),
        ("1.3.0rc9", "1.3", "1.3"),
        ("1.3.0rc20", "1.3", None),
        ("1.3.0rc21", "1.3", "1.4"),
        ("1.3.0rc22", "1.4", None),
        ("1.4.0rc1", "1.4", None),
        ("1.4.0", "1.4", None),
    ],
)
def test_a_version_belongs_to_one_line(version: str, line: str, doubted: str | None) -> None:
    """`doubted`: the line of which nobody knows whether it began before this version."""
    schema = schema_for(version)
    assert schema.line == line
    intervals = {change.interval for change in schema.doubts}
    assert [name for name, begins in BEGINS.items() if begins in intervals] == [doubted] * (
        doubted is not None
    )


def test_between_two_sources_a_version_has_two_schemas() -> None:
    before, after = schema_for("1.3.0rc25").possibilities
    assert "speculative_config.enable_penalty" in after.fields and "sampler_type" in before.fields
    assert (
        "speculative_config.enable_penalty" not in before.fields
        and "sampler_type" not in after.fields
    )
    (change,) = (one for one in after.doubts if one.interval == "after 1.3.0rc24, by 1.3.0rc26")
    alone = after.assuming(change)
    assert "speculative_config.enable_penalty" in alone.fields and "sampler_type" in alone.fields
    assert after.agreed(lambda one: "sampler_type" in one.fields) is None


@pytest.mark.parametrize(
    "version", ["1.3.0rc5.post1", *(f"1.3.0rc{number}" for number in range(30))]
)
def test_each_change_in_doubt_may_have_happened_alone(version: str) -> None:
    """1.3.0rc5.post1 lies between a refinement of a key and the release that brought the key."""
    schema = schema_for(version)
    assert all(
        field.type for change in schema.doubts for field in schema.assuming(change).fields.values()
    )


@pytest.mark.parametrize("row", ["{when: {a: 1}, message: m, remedy: r, evidence: verified}",
                                 "{when: {a: 1}, message: m, remedy: r, evidence: verified, source: s, othewise: 1}",
                                 "{when: [a], message: m, remedy: r, evidence: verified, source: s}"])  # fmt: skip
def test_a_row_that_is_no_rule_is_refused(
    row: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "schemas"
    shutil.copytree(schema.SCHEMAS, folder)
    text = (folder / "1.4.yaml").read_text()
    (folder / "1.4.yaml").write_text(text.replace("\nrules:\n", f"\nrules:\n  mistaken: {row}\n"))
    monkeypatch.setattr(schema, "SCHEMAS", folder)
    monkeypatch.setattr(schema, "PARSED", folder / "__pycache__" / "lines.json")
    with pytest.raises(ValidationError):
        schema._files.__wrapped__()


@pytest.mark.parametrize("text", ["", "latest", "1.3.x", "0.21.0", "1.1.0", "1.2.0rc8"])
def test_what_is_no_known_version_is_refused(text: str) -> None:
    with pytest.raises(UsageError) as refused:
        parse_version(text)
    if text[:1].isdigit() and "x" not in text:
        assert (
            text in refused.value.message and "1.2.0 to 1.4.0rc1 are known" in refused.value.message
        )
        assert "`trtllm_version` 1.4.0rc1" in refused.value.remedy


def test_every_field_has_a_type_and_every_object_its_parent() -> None:
    kinds = {"int", "float", "bool", "str", "object", "null", "list[int]", "list[float]", "list[str]",
             "list[list[int]]",
             "dict[int,int]", "dict[str,str]", "dict[str,object]", "dict[int,list[int]]"}  # fmt: skip
    for line in LINES:
        schema = schema_for({"1.2": "1.2.1", "1.3": "1.3.0rc20", "1.4": "1.4.0rc1"}[line])
        for field in schema.fields.values():
            assert set(field.types) <= kinds, field
            if field.default is not UNKNOWN and field.allowed and isinstance(field.default, str):
                assert field.default in field.allowed, field
        for option in schema.options.values():
            assert option.flags and option.type in ("int", "float", "bool", "str"), option


def test_what_was_parsed_once_is_kept_until_a_file_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "schemas"
    shutil.copytree(schema.SCHEMAS, folder, ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(schema, "SCHEMAS", folder)
    monkeypatch.setattr(schema, "PARSED", folder / "__pycache__" / "lines.json")
    monkeypatch.setattr("sys.dont_write_bytecode", False)
    read = schema._files.__wrapped__
    parsed = read()
    assert schema.PARSED.is_file() and read() == parsed  # and what JSON keeps is what YAML said
    newest = folder / "1.4.yaml"
    newest.write_text(newest.read_text().replace("1.4.0rc1", "1.4.0rc2"))
    assert read()["1.4"]["versions"]["newest"] == "1.4.0rc2"
    schema.PARSED.write_text("{not json")
    assert read()["1.4"]["versions"]["newest"] == "1.4.0rc2"


def test_the_newest_line_states_everything() -> None:
    """Read from the classes of one commit: a default or "required" for every field, and no object left half known."""
    schema = schema_for("1.4.0rc1")
    silent = [
        path
        for path, field in schema.fields.items()
        if field.default is UNKNOWN and not field.required
    ]
    # taken out before validation; a mapping whose default depends on the machine
    assert set(silent) == {"disagg_cluster", "sleep_config.restore_modes"}
    assert {path for path, field in schema.fields.items() if field.open} <= {
        "disagg_cluster", "model_kwargs", "multimodal_config.encoder_cuda_graph", "sleep_config.restore_modes",
        "moe_config.load_balancer.initial_global_assignments", "decoding_config", "batched_logits_processor",
        "checkpoint_loader", "speculative_config.drafter", "speculative_config.resource_manager",
        "sparse_attention_config.threshold_scale_factor", "sparse_attention_config.target_sparsity",
    }  # fmt: skip
    assert schema.agreed(lambda one: one.fields) == schema.fields  # none is in doubt


def test_variants_follow_the_classes() -> None:
    """`decoding_type: Eagle` has another class than Eagle3; the deprecated and the removed keys of the newest line."""
    schema = schema_for("1.4.0rc1")
    assert schema.fields["speculative_config.sa_config"].variants == ("Eagle3", "MTP", "PARD")
    assert schema.fields["speculative_config.enable_penalty"].variants == ()
    assert schema.fields["kv_cache_config.mamba_state_cache_interval"].status == "deprecated"
    assert schema.removed["sampler_type"].tolerated == ("auto", "TorchSampler")


def test_a_dated_rule_holds_or_not_or_nobody_knows() -> None:
    wanted = {
        "1.2.1": True,
        "1.3.0rc5": True,
        "1.3.0rc6": None,
        "1.3.0rc7": False,
        "1.4.0rc1": False,
    }
    assert {
        v: schema_for(v).agreed(lambda one: "kimi_k25_does_not_load" in one.rules) for v in wanted
    } == wanted


def test_the_default_version_is_the_newest_known_and_said_to_be_assumed() -> None:
    version, reason = choose_version(None)
    assert version == str(newest_known()) and reason.startswith("assumed")
