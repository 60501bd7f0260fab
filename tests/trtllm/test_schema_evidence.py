"""Bundles against the schemas: a stand-in package that says what the schema says bears it out; what is planted in it is
found, with a patch that applies."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.command_line import trtspec
from trtspec.bench.prove_bundle import write_bundle
from trtspec.bench.prove_redaction import Redactor
from trtspec.errors import UsageError
from trtspec.trtllm.schema import SCHEMAS
from trtspec.trtllm.schema_evidence import expected, patch, weigh
from trtspec.trtllm.schema_observed import Observation, RequestObservation, observation

ROOT = Path(__file__).parents[2]
RELEASES = Path(__file__).parent / "standin_releases"


def installed(release: str, planted: dict[str, Any] | None = None, options: dict[str, Any] | None = None) -> str:
    """The schema file that `from-installed` writes of the stand-in package."""
    env = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{RELEASES}", "STANDIN_VERSION": release,
           "STANDIN_PLANTED": json.dumps(planted or {}), "STANDIN_PLANTED_OPTIONS": json.dumps(options or {}),
           "PYTHONWARNINGS": "ignore"}  # fmt: skip
    command = [sys.executable, "-m", "trtspec.trtllm.schema_tools", "from-installed"]
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=240)
    assert done.returncode == 0, done.stderr
    return done.stdout


OPTIONS = {
    "enable_attention_dp": None,  # since 1.3, inferred: the release has it not
    "port": {"default": 7},
    "use_magic": {"flags": ["--use_magic"], "type": "int", "default": 1},
}
PLANTED = {
    "enable_sleep": {"type": "bool", "default": False},  # removed with 1.3, inferred: the release has it
    "sleep_config": None,  # since 1.3, inferred: the release has it not
    "stream_interval": {"default": 7},
    "kv_cache_config.tokens_per_block": {"type": "str"},
    "moe_config.use_magic": {"type": "bool", "default": False},
}


def test_a_planted_difference_from_the_schema_is_found_with_a_patch(tmp_path: Path) -> None:
    evidence = {
        "backend": "trtllm",
        "engine": "1.3.0rc20",
        "gpus": [],
        "outputs": {},
        "speed": {},
        "memory": {},
        "setup": {},
    }
    files = {"evidence.json": json.dumps(evidence), "verdict.json": json.dumps({"ok": True, "results": []}),
             "schema.yaml": installed("1.3.0rc20", PLANTED, OPTIONS)}  # fmt: skip
    write_bundle(tmp_path / "proof.tar.gz", files, Redactor({}))
    done = trtspec("prove", "--import", tmp_path / "proof.tar.gz", "--json", "-o", tmp_path / "out")
    told = json.loads(done.stdout)
    refuted = {finding["entry"]: finding["message"] for finding in told["schemas"] if finding["weight"] == "refuted"}
    assert set(refuted) == {*PLANTED, *OPTIONS}, refuted
    assert "removed after 1.2" in refuted["enable_sleep"] and "absent in" in refuted["enable_attention_dp"]
    assert told["not_weighed"] == {"behaviours": 26, "gates": 4}
    shown = trtspec("prove", "--import", tmp_path / "proof.tar.gz").stdout
    assert f"{told['weighed']} gates and inferred or unknown entries were weighed; not weighed: 26 behaviours" in shown
    assert "absent in 1.3.0rc20" in refuted["sleep_config"] and "is 7" in refuted["stream_interval"]
    assert "unknown to the schema" in refuted["moe_config.use_magic"]
    copy = tmp_path / "trtspec" / "trtllm" / "schemas"
    copy.mkdir(parents=True)
    for path in SCHEMAS.glob("*.yaml"):
        (copy / path.name).write_text(path.read_text())
    applied = subprocess.run(
        ["git", "apply", str(tmp_path / "out" / "schemas.patch")], cwd=tmp_path, capture_output=True, text=True
    )
    assert applied.returncode == 0, applied.stderr
    fields = {path.stem: yaml.safe_load(path.read_text())["fields"] for path in copy.glob("*.yaml")}
    assert "sleep_config" not in fields["1.3"] and fields["1.3"]["moe_config.use_magic"]["type"] == "bool"
    assert any(part.get("stream_interval", {}).get("default") == 7 for part in fields.values())
    whole = {path.stem: yaml.safe_load(path.read_text()) for path in copy.glob("*.yaml")}
    assert "enable_sleep" not in whole["1.3"]["removed"] and "use_magic" in whole["1.3"]["options"]
    assert "enable_attention_dp" not in whole["1.3"]["options"]
    assert any(part.get("options", {}).get("port", {}).get("default") == 7 for part in whole.values())


def asked(version: str, **outcomes: str) -> RequestObservation:
    return RequestObservation(version, outcomes, f"bundle of {version}")


def test_what_a_release_does_with_requests_is_weighed_by_the_probes_of_check() -> None:
    old = asked("1.3.0rc20", bad_words="no effect", frequency_penalty="no effect")
    new = asked("1.4.0rc1", bad_words="refused", frequency_penalty="refused")
    found = {finding.entry: finding for finding in weigh([], [old, new])}
    assert {entry: finding.weight for entry, finding in found.items()} == dict.fromkeys(
        ("requests_refused", "requests_ignored", "penalties_need_a_key"), "verified"
    )
    rows = [row for row in patch(list(found.values())).splitlines() if row.startswith("+  ")]
    assert len(rows) == 3 and all("by: 1.3.0rc2" in row and "evidence: verified" in row for row in rows)
    before = {name: yaml.safe_load((SCHEMAS / "1.4.yaml").read_text())["behaviours"][name] for name in found}
    for row in rows:
        name, after = next(iter(yaml.safe_load(row[1:]).items()))
        assert after == before[name] | {"since": before[name]["since"] | {"evidence": "verified"}}
    honoured = asked("1.4.0rc1", bad_words="no effect", frequency_penalty="honoured")
    assert {f.entry: (f.weight, f.replacement) for f in weigh([], [honoured])} == dict.fromkeys(
        ("requests_refused", "requests_ignored"), ("refuted", None)
    )
    inside = weigh([], [asked("1.3.0rc27", bad_words="refused")])
    assert {f.weight for f in inside} == {"narrowed"} and all("by: 1.3.0rc27" in (f.replacement or "") for f in inside)
    kept = weigh([], [asked("1.3.0rc20", bad_words="honoured")])
    assert {f.entry: f.weight for f in kept} == {"requests_ignored": "refuted", "requests_refused": "supported"}
    assert not weigh([], [asked("1.3.0rc20", seed="honoured"), asked("1.4.0rc1", frequency_penalty="honoured")][:1])


def test_a_field_that_became_something_else_is_weighed_by_the_releases_around_it() -> None:
    path, kept = "torch_compile_config.max_num_streams", {"type": "int", "default": 1}
    was, now = (yaml.safe_dump({"versions": {"seen": version}, "fields": {path: {**kept, "default": default}}})
                for version, default in (("1.3.0rc20", 1), ("1.4.0rc1", 3)))  # fmt: skip
    found = {f.entry: f for f in weigh([observation(was, "was"), observation(now, "now")])}[path]
    assert found.weight == "verified" and "changed: {after: 1.3.0rc23" in (found.replacement or "")
    early = was.replace("default: 1", "default: 3")
    wrong = [f for f in weigh([observation(early, "early")]) if f.entry == path]
    assert {f.weight for f in wrong} == {"refuted"} and any(
        "where the schema has it before" in f.message for f in wrong
    )


def releases_with(path: str, part: str = "fields", **there: dict[str, Any] | None) -> list[Observation]:
    """Releases (as r1_3_0rc24) with this entry, or without it where it is None."""
    found = []
    for name, entry in there.items():
        version = name.removeprefix("r").replace("_", ".")
        entries = copy.deepcopy(expected(version))
        told = entries[0 if part == "fields" else 2]
        told.pop(path, None)
        if entry is not None:
            told[path] = entry
        found.append(Observation(version, entries, version))
    return found


def test_releases_that_contradict_each_other_move_no_end() -> None:
    """Present before it is absent: no interval has that. The same of a change."""
    path, kind = "checkpoint_io_policy", {"type": "str"}
    since = yaml.safe_load((SCHEMAS / "1.4.yaml").read_text())["fields"][path]["since"]
    assert since["after"] == "1.3.0rc23" and since["evidence"] == "inferred"
    found = [f for f in weigh(releases_with(path, r1_3_0rc24=kind, r1_3_0rc26=None)) if f.entry == path]
    assert [(f.weight, f.replacement) for f in found] == [("refuted", None)] and "no interval has" in found[0].message
    backend = "moe_config.backend"
    old, new = (expected(version)[0][backend] for version in ("1.3.0rc20", "1.4.0rc1"))
    found = [f for f in weigh(releases_with(backend, r1_3_0rc21=new, r1_3_0rc23=old)) if f.entry == backend]
    assert [(f.weight, f.replacement) for f in found] == [("refuted", None)]


def test_choices_are_compared_without_their_order_and_others_refuted() -> None:
    path = "moe_config.backend"
    entry = expected("1.4.0rc1")[0][path]
    for allowed, weight in ((entry["allowed"][::-1], "supported"), ([*entry["allowed"], "NEW"], "refuted"),
                            (entry["allowed"][:-1], "refuted")):  # fmt: skip
        told = entry | {"allowed": allowed}
        assert {f.weight for f in weigh(releases_with(path, r1_4_0rc1=told)) if f.entry == path} == {weight}, allowed


def test_all_findings_of_an_entry_are_in_its_line_of_the_patch() -> None:
    path = "checkpoint_io_policy"
    findings = weigh(releases_with(path, r1_3_0rc26={"type": "bool"}))
    assert {f.weight for f in findings if f.entry == path} == {"refuted", "narrowed"}
    rows = [row for row in patch(findings).splitlines() if row.startswith(f"+  {path}:")]
    made = yaml.safe_load(rows[0][1:])[path]
    assert len(rows) == 1 and made["type"] == "bool" and made["since"]["by"] == "1.3.0rc26"


SMUGGLED = """zz: {type: int}
 removed:
--- a/pyproject.toml
+++ b/pyproject.toml
@@ -1,2 +1,3 @@
 [build-system]
+# smuggled"""


@pytest.mark.parametrize(
    "part",
    [
        {"fields": {SMUGGLED: {"type": "int"}}},
        {"fields": {"zz": {"type": SMUGGLED}}},
        {"fields": {"zz": {"type": "str", "allowed": ["a", SMUGGLED]}}},
        {"options": {"zz\x1b[2J": {"type": "int"}}},
        {"fields": {7: {"type": "int"}}},
    ],
)
def test_words_that_would_become_lines_of_a_patch_are_refused(part: dict[str, Any]) -> None:
    text = yaml.safe_dump({"versions": {"seen": "1.3.0rc20"}, **part})
    with pytest.raises(UsageError, match="is not one"):
        observation(text, "forged")


def test_a_schema_of_another_release_than_the_servers_is_refused() -> None:
    text = yaml.safe_dump({"versions": {"seen": "1.4.0rc1"}, "fields": {}})
    with pytest.raises(UsageError, match=r"of 1\.4\.0rc1, and the servers were 1\.3\.0rc20"):
        observation(text, "b", "1.3.0rc20")


@pytest.mark.slow
def test_three_honest_releases_refute_nothing_and_verify_what_was_inferred(capsys: pytest.CaptureFixture[str]) -> None:
    releases = ("1.2.1", "1.3.0rc20", "1.4.0rc1")
    findings = weigh([observation(installed(release), release) for release in releases])
    weights = [finding.weight for finding in findings]
    with capsys.disabled():
        print(f"\n{', '.join(f'{weights.count(w)} {w}' for w in ('verified', 'narrowed', 'supported', 'refuted'))}")  # type: ignore[arg-type]
    assert weights.count("refuted") == 0 and weights.count("verified") > 90
    assert {f.part for f in findings if f.weight == "verified"} == {"fields", "options", "removed"}
    assert sum("changed in 1.4.0rc1" in finding.message for finding in findings) >= 6
    changed = [row for row in patch(findings).splitlines() if row.startswith("+") and not row.startswith("+++")]
    assert len(changed) == sum(finding.replacement is not None for finding in findings)
