"""Recordings and results that somebody changed: an error that names the file and the place."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.command_line import trtspec
from trtspec.bench.results import read_results, read_whole
from trtspec.bench.transcript import SCHEMA, read_recording
from trtspec.errors import UsageError

COUNTS = {"question": "1", "category": "all", "tokens": 4, "steps": 2, "accepted": 2, "drafted": None,
          "histogram": [1, 1], "source": "header"}  # fmt: skip
ANSWER = {"question": "1", "category": "all", "messages": [{"role": "user", "content": "Why?"}], "text": "So.",
          "finish_reason": "stop", "tokens": [{"text": "So.", "second": "No.", "gap": 1}]}  # fmt: skip
RECORDING = {"schema": SCHEMA, "url": "http://a", "server": {}, "max_tokens": 4, "transcripts": [ANSWER],
             "tools": [{"calls": [], "content": "", "error": None}], "counts": [COUNTS]}  # fmt: skip
RESULTS = {"workload": {}, "categories": {}, "turns_detail": [COUNTS]}


def write(path: Path, value: dict[str, Any]) -> Path:
    path.write_text(json.dumps(value))
    return path


def test_what_was_recorded_is_read(tmp_path: Path) -> None:
    read = read_recording(write(tmp_path / "a.json", RECORDING))
    assert read.counts[0].histogram == (1, 1) and read.transcripts[0].tokens[0].gap == 1.0  # type: ignore[index]
    shown = [{"type": "image_url", "image_url": {"url": "data:,"}}, {"type": "text", "text": "What is it?"}]
    picture = {**ANSWER, "messages": [{"role": "user", "content": shown}]}
    pictures = read_recording(write(tmp_path / "c.json", {**RECORDING, "transcripts": [picture]}))
    assert pictures.transcripts[0].messages[0]["content"] == shown
    results = read_results(write(tmp_path / "b.json", RESULTS))
    assert results.turns_detail[0].accepted == 2


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"max_tokens": float("inf")}, "Out of range float"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"max_tokens": 0}, "no prompt that was answered"),
        ({"transcripts": []}, "no prompt that was answered"),
        ({"transcripts": [{**ANSWER, "messages": 1e308}]}, "transcripts.0.messages"),
        ({"transcripts": [{**ANSWER, "messages": []}]}, "not a recording"),
        ({"transcripts": [{**ANSWER, "messages": [{"role": "user"}]}]}, "'content' is missing"),
        ({"transcripts": [{**ANSWER, "text": 3}]}, "transcripts.0.text"),
        ({"tools": [{"calls": [{"name": "lookup", "arguments": [1]}]}]}, "tools.0.calls.0.arguments"),
        ({"tools": [{"calls": [{"name": "lookup"}]}]}, "no name or no arguments"),
        ({"tools": [{"content": [{}]}]}, "tools.0.content"),
        ({"schema": 99}, "its schema is '99'"),
        ({"schema": 1}, "its schema is '1', and this release reads 3"),
        ({"transcripts": [ANSWER, ANSWER]}, "2 answers to the question"),
        ({"repeats": [{"concurrency": 1, "transcripts": [ANSWER, ANSWER]}]}, "2 answers to the question"),
    ],
)
def test_a_recording_with_other_kinds_of_values_is_refused(tmp_path: Path, change: dict[str, Any], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        read_recording(write(tmp_path / "a.json", {**RECORDING, **change}))


@pytest.mark.parametrize("key", ["categories", "turns_detail", "quality"])
def test_results_with_other_kinds_of_values_are_refused(tmp_path: Path, key: str) -> None:
    with pytest.raises(UsageError, match=key):
        read_results(write(tmp_path / "b.json", {**RESULTS, key: 3}))


@pytest.mark.parametrize("value", [-3, 2**53, 10**30, 10**400])
@pytest.mark.parametrize("key", ["steps", "accepted", "tokens", "histogram"])
def test_counts_that_are_none_are_refused(tmp_path: Path, key: str, value: int) -> None:
    changed = {**COUNTS, key: [1, value] if key == "histogram" else value}
    with pytest.raises(UsageError, match=f"turns_detail.0.{key}"):
        read_results(write(tmp_path / "b.json", {**RESULTS, "turns_detail": [changed]}))
    with pytest.raises(UsageError, match=f"counts.0.{key}"):
        read_recording(write(tmp_path / "a.json", {**RECORDING, "counts": [changed]}))


def test_another_schema_and_a_workload_that_tables_cannot_state_are_refused(tmp_path: Path, whole: Path) -> None:
    """Before anything is measured: they ended in a KeyError when the report was made."""
    found = json.loads((whole / "results.json").read_text())
    assert read_whole(whole).workload == found["workload"]
    for read in (read_results, read_whole):
        with pytest.raises(UsageError, match="its schema is '99', and this release reads 1"):
            read(write(tmp_path / "b.json", {**found, "schema": 99}))
    for key in ("dataset", "dataset_sha256", "questions", "rates", "concurrency", "temperature", "template", "seed"):
        for workload in ({k: v for k, v in found["workload"].items() if k != key}, found["workload"] | {key: None}):
            with pytest.raises(UsageError, match=f"workload.{key}"):
                read_whole(write(tmp_path / "b.json", {**found, "workload": workload}))


@pytest.fixture(scope="module")
def whole(stand_in: Callable[..., str], dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a real run wrote."""
    out = tmp_path_factory.mktemp("whole") / "out"
    done = trtspec("bench", stand_in(), "--dataset", dataset, "--samples", 3, "--concurrency", 1, "-o", out)
    assert done.status == 0, done.stderr
    return out
