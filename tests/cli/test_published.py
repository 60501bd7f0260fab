"""The records of published models: every command reads the same one, and every key of them."""

from dataclasses import fields
from typing import Any

import pytest
from packaging.version import Version
from pydantic import TypeAdapter, ValidationError

import trtspec
from tests.trtllm.test_default_release import PAIRS
from tools.generate import support_matrix
from trtspec.checkpoint.published import (
    Catalogue,
    PublishedAcceptance,
    PublishedHead,
    PublishedTarget,
    catalogue,
    known,
)

K25 = ("nvidia/Kimi-K2.5-NVFP4", "nvidia/Kimi-K2.5-Eagle3")


@pytest.mark.parametrize(("target", "head"), PAIRS)
def test_inspect_plan_and_build_config_agree(target: str, head: str) -> None:
    """On draft length, context and release; a head without figures is planned without drafts."""
    seen, planned = trtspec.inspect(head), trtspec.plan(target, head=head)
    built = trtspec.build_config(target, head=head, trust_remote_code=True)
    written = built["config"]["speculative_config"]["max_draft_len"]
    drafts = {row["draft_len"] for row in planned["recommended"].values()} - {0}
    assert drafts == {written if seen["acceptance"] else None} and seen["draft_len"] == written
    print(target, head, written, planned["context"], built["version"], sep=" | ")
    told = [each["message"] for each in built["problems"] if each["code"] == "TS-PAIR-CONTEXT"]
    assert all(f"to {planned['context']:,};" in message for message in told)
    assert (seen["context"], built["version"]) == (planned["context"], planned["version"])
    assert Version(seen["first_releases"]["TensorRT-LLM"]) <= Version(built["version"])


def test_the_headline_is_the_best_measured_point() -> None:
    """Beyond the known load, draft length or context there is a range and no figure."""
    best = trtspec.plan(K25[0], head=K25[1])["best"]
    assert (best["concurrency"], best["draft_len"], best["trust"]) == (16, 3, "model card")
    long_draft = {"max_draft": 8, "acceptance": "3.6@3", "concurrency": [1]}
    for asked in ({"isl": 32768}, {"concurrency": [64]}, long_draft):
        planned: Any = trtspec.plan(K25[0], head=K25[1], **asked)["best"]
        assert planned["trust"] == "extrapolated" and planned["speedup"] is None, asked
        low, high = planned["speedup_range"]
        assert (low < 1.0) == ("isl" in asked) and high > 1.0, asked


def test_a_key_that_nothing_reads_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """A key without a field is refused; a field that no command and no page reads is found here."""
    with pytest.raises(ValidationError, match="surprise"):
        row = vars(known(K25[1])) | {"surprise": 1}
        TypeAdapter(Catalogue).validate_python({"targets": {}, "heads": {"x": row}, "refused": {}})
    records, read = (PublishedTarget, PublishedHead, PublishedAcceptance), set[tuple[type, str]]()

    def noted(self: Any, name: str) -> Any:
        read.add((type(self), name))
        return object.__getattribute__(self, name)

    for record in records:
        monkeypatch.setattr(record, "__getattribute__", noted, raising=False)
    for name in (*catalogue().targets, *catalogue().heads):
        trtspec.inspect(name)
    trtspec.build_config(K25[0], head=K25[1], trust_remote_code=True)
    support_matrix()
    assert not {(kind, field.name) for kind in records for field in fields(kind)} - read
