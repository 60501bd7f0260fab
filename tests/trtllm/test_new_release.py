"""Adds a release of TensorRT-LLM, or a way to speculate, to a copy, and counts the files."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.package_copy import PACKAGE, copy_package, run_copy, touched

CONFIGS = PACKAGE.parent / "configs"
RELEASE, BASE = "1.5.0rc0", "1.3.0rc27.dev0"
RENAMED = {
    "stream_interval": "response_interval",
    "speculative_config.max_draft_len": "speculative_config.draft_tokens",
}
NEW_LINE = """\
versions: {begins: {after: 1.4.0rc4, by: 1.5.0rc0}}
behaviours:
  draft_len_schedule: {bounds: lower, first: 1, beyond: last, evidence: verified, source: invented}
rules:
  chunks_or_sleep: {when: {enable_chunked_prefill: set, sleep_config: set}, \
message: enable_chunked_prefill and
    sleep_config exclude each other, \
remedy: keep one of the two, evidence: verified, source: invented}
"""
NEW_METHOD = """\
  weaver:
    spellings: [Weaver]
    name: a Weaver draft
    draft: model
    draft_required: true
    length_required: true
    tokens_per_step: 2k
    own_cache: true
    one_model: true
    kimi: {runs: unknown, why: invented for a test}
    source: invented
"""
JUDGE = """\
import json, sys
from trtspec.trtllm.deployment import Deployment
from trtspec.trtllm.lint import lint
from trtspec.checkpoint.hub import find_target
from trtspec.trtllm.schema import schema_for
target = find_target("nvidia/Kimi-K2.6-NVFP4").spec
asked = json.load(sys.stdin)
print(json.dumps([
    [[f.code, f.severity, f.key, f.message] for f in lint(text, \
Deployment(schema_for(version), target))
     if f.code != "TS-LINT-KNOWN-ISSUE"]  # which ends with the last notes that were read
    for text, version in asked
]))
"""


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    return copy_package(tmp_path)


def add_release(copy: Path) -> list[str]:
    """Writes the newest commit's classes with two keys renamed, and the release's rows.

    The rows are the keys' old names and what the release does.
    """
    folder = copy / "trtllm"
    snapshot = json.loads((folder / "snapshots" / f"{BASE}.json").read_text()) | {
        "release": RELEASE
    }
    for old, new in RENAMED.items():
        parent, _, name = old.rpartition(".")
        for owner, read in snapshot["classes"].items():
            if owner.partition(":")[0] == parent and name in read["fields"]:
                read["fields"][new.rpartition(".")[2]] = read["fields"].pop(name)
    (folder / "snapshots" / f"{RELEASE}.json").write_text(json.dumps(snapshot))
    (folder / "schemas" / "1.5.yaml").write_text(NEW_LINE)
    rows = "".join(f"  {old}: {new}\n" for old, new in RENAMED.items())
    keys = folder / "keys.yaml"
    keys.write_text(keys.read_text().replace("renamed:\n", f"renamed:\n{rows}", 1))
    return touched(copy)


def judged(copy: Path, asked: list[tuple[str, str]]) -> list[list[list[str]]]:
    return json.loads(run_copy(copy, "-c", JUDGE, given=json.dumps(asked)))


def codes(findings: list[list[str]]) -> set[str]:
    return {finding[0] for finding in findings}


def eagle(**changes: Any) -> dict[str, Any]:
    return {
        "decoding_type": "Eagle",
        "max_draft_len": 3,
        "speculative_model_dir": "/head",
        **changes,
    }


def in_new_words(text: str, names: dict[str, str]) -> str:
    for old, new in names.items():
        text = text.replace(old, new)
    return text


def test_a_release_is_data_and_its_findings_follow(copy: Path) -> None:
    data = ["trtllm/keys.yaml", "trtllm/schemas/1.5.yaml", f"trtllm/snapshots/{RELEASE}.json"]
    assert add_release(copy) == data
    recipes = [path.read_text() for path in sorted(CONFIGS.glob("*.yml"))]
    schedules = [
        yaml.safe_dump({"speculative_config": eagle(draft_len_schedule=s)})
        for s in ({1: 3, 64: 1}, {4: 3})
    ]
    bad = [
        "moe_config: {backend: WIDEEP}\n",
        "max_batch_sise: 1\n",
        "sampler_type: auto\n",
        "max_seq_len: x\n",
        "max_batch_size: 64\nmax_num_tokens: 64\n" + schedules[0],
        yaml.safe_dump({"speculative_config": eagle(max_draft_len=0, eagle3_one_model=False)}),
    ]
    changed = [
        "stream_interval: 4\n",
        *schedules,
        "enable_chunked_prefill: true\nsleep_config: {}\n",
    ]
    asked = [(text, BASE) for text in changed + recipes + bad]
    new_names = {"max_draft_len": "draft_tokens", "stream_interval": "response_interval"}
    asked += [(in_new_words(text, {"max_draft_len": "draft_tokens"}), RELEASE) for text in changed]
    asked += [(in_new_words(text, new_names), RELEASE) for text in recipes + bad]
    found = judged(copy, [*asked, (recipes[0], RELEASE)])
    before, after = found[: len(asked) // 2], found[len(asked) // 2 : -1]
    ends, wrong = "TS-LINT-SCHEDULE-ENDS-AT-ZERO", "TS-LINT-BAD-SCHEDULE"
    for at, gone, new in (
        (0, set(), {"TS-LINT-RENAMED-KEY"}),
        (1, {ends}, set()),
        (2, {ends}, {wrong}),
        (3, set(), {"TS-LINT-COMBINATION"}),
    ):
        assert (
            codes(before[at]) - codes(after[at]) == gone
            and codes(after[at]) - codes(before[at]) == new
        ), at
    assert any(
        "enable_chunked_prefill and sleep_config exclude each other" in finding[3]
        for finding in after[3]
    )
    assert "TS-LINT-RENAMED-KEY" in codes(found[-1])
    for old, new in zip(before[len(changed) :], after[len(changed) :], strict=True):
        renamed = [[*finding[:2], in_new_words(finding[2], new_names)] for finding in old]
        ours = [finding[:3] for finding in new]
        assert renamed == ours
    assert len(recipes) > 20


def test_build_config_writes_the_names_of_the_new_line(copy: Path) -> None:
    add_release(copy)
    words = [
        "nvidia/Kimi-K2.6-NVFP4",
        "--head",
        "nvidia/Kimi-K2.6-Eagle3",
        "--trtllm-version",
        RELEASE,
    ]
    words += ["--tp-size", "8", "--role", "generation", "--goal", "throughput"]
    text = run_copy(copy, "-m", "trtspec", "build-config", *words)
    written = yaml.safe_load(text)
    assert (
        written["speculative_config"]["draft_tokens"] == 3 and written["response_interval"] == 100
    )
    assert "max_draft_len" not in written["speculative_config"] and "stream_interval" not in written
    assert [
        finding for finding in judged(copy, [(text, RELEASE)])[0] if finding[1] == "error"
    ] == []


def test_a_way_to_speculate_is_a_row_and_its_name_in_the_schema(copy: Path) -> None:
    rows = copy / "trtllm" / "speculation.yaml"
    newest = copy / "trtllm" / "snapshots" / f"{BASE}.json"
    rows.write_text(rows.read_text() + NEW_METHOD)
    snapshot = json.loads(newest.read_text())
    classes = snapshot["classes"]
    classes["speculative_config"]["fields"]["decoding_type"]["allowed"].append("Weaver")
    classes["speculative_config:Weaver"] = classes["speculative_config:Draft_Target"]
    newest.write_text(json.dumps(snapshot))
    data = [f"trtllm/snapshots/{BASE}.json", "trtllm/speculation.yaml"]
    assert touched(copy) == data  # and no code at all
    whole = {
        "speculative_config": eagle(decoding_type="Weaver"),
        "max_batch_size": 8,
        "max_num_tokens": 40,
    }
    whole["kv_cache_config"] = {
        "use_kv_cache_manager_v2": False
    }  # the manager in which a reused prefix is hidden
    nothing = {"speculative_config": {"decoding_type": "Weaver"}}
    good, empty = judged(copy, [(yaml.safe_dump(text), BASE) for text in (whole, nothing)])
    assert not {
        "TS-LINT-BAD-VALUE",
        "TS-LINT-NO-DRAFT-MODEL",
        "TS-LINT-CAPTURE-LAYERS-MISSING",
    } & codes(good)
    assert {"TS-LINT-UNTESTED", "TS-LINT-PREFIX-REUSE", "TS-LINT-TOKEN-BUDGET"} <= codes(
        good
    )  # 8 x 2 x 3 tokens
    assert {"TS-LINT-NO-DRAFT-MODEL", "TS-LINT-NO-DRAFT-LENGTH"} <= codes(empty)
