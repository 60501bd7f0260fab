"""Recordings and results that somebody changed: an error that names the file and the place."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.bench.conftest import ci_steps
from tests.command_line import free_port, succeeded, trtspec
from tests.json_files import read_json, write_json
from trtspec.bench.results import read_results
from trtspec.client.exchange import read_recording
from trtspec.errors import UsageError

COUNTS = {
    "question": "1",
    "category": "all",
    "tokens": 4,
    "steps": 2,
    "accepted": 2,
    "drafted": None,
    "histogram": [1, 1],
    "source": "header",
}
RECORDING = {
    "key": "text 0",
    "kind": "text",
    "run": "ids",
    "path": "/v1/completions",
    "finish": "stop",
    "steps": 1,
    "body": {"prompt": [1, 2], "max_tokens": 8},
    "token_ids": [3, 4],
    "counted": [1, 2],
}


def write(path: Path, value: dict[str, Any]) -> Path:
    write_json(path, value)
    return path


def test_what_was_recorded_is_read(tmp_path: Path) -> None:
    (read,) = read_recording(write(tmp_path / "a.json", RECORDING))
    assert read.token_ids == (3, 4) and read.answered and read.name == ("text 0", "ids")


@pytest.mark.parametrize(
    "change", [{"token_ids": "x"}, {"steps": 1.5}, {"key": None}, {"body": []}, {"calls": [3]}]
)
def test_a_recording_with_other_kinds_of_values_is_refused(
    tmp_path: Path, change: dict[str, Any]
) -> None:
    with pytest.raises(UsageError, match="line 1, is not an exchange"):
        read_recording(write(tmp_path / "a.json", {**RECORDING, **change}))


@pytest.mark.parametrize("key", ["categories", "turns_detail", "quality"])
def test_results_with_other_kinds_of_values_are_refused(
    tmp_path: Path, whole: Path, key: str
) -> None:
    found = read_json(whole / "results.json")
    with pytest.raises(UsageError, match=key):
        read_results(write(tmp_path / "b.json", {**found, key: 3}))


@pytest.mark.parametrize("value", [-3, 2**53, 10**30, 10**400])
@pytest.mark.parametrize("key", ["steps", "accepted", "tokens", "histogram"])
def test_counts_that_are_none_are_refused(
    tmp_path: Path, whole: Path, key: str, value: int
) -> None:
    found = read_json(whole / "results.json")
    changed = {**COUNTS, key: [1, value] if key == "histogram" else value}
    with pytest.raises(UsageError, match=f"turns_detail.0.{key}"):
        read_results(write(tmp_path / "b.json", {**found, "turns_detail": [changed]}))


def test_another_schema_and_a_workload_that_tables_cannot_state_are_refused(
    tmp_path: Path, whole: Path
) -> None:
    found = read_json(whole / "results.json")
    assert read_results(whole).workload.dataset == found["workload"]["dataset"]
    with pytest.raises(UsageError, match="its schema is '99', and this release reads 3"):
        read_results(write(tmp_path / "b.json", {**found, "schema": 99}))
    for key in (
        "dataset",
        "dataset_sha256",
        "questions",
        "rates",
        "concurrency",
        "temperature",
        "template",
        "seed",
    ):
        for workload in (
            {k: v for k, v in found["workload"].items() if k != key},
            found["workload"] | {key: None},
        ):
            with pytest.raises(UsageError, match=f"workload.{key}"):
                read_results(write(tmp_path / "b.json", {**found, "workload": workload}))


@pytest.fixture(scope="module")
def whole(
    stand_in: Callable[..., str], dataset: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """What a real run wrote."""
    out = tmp_path_factory.mktemp("whole") / "out"
    succeeded(
        "bench", stand_in(), "--dataset", dataset, "--samples", 3, "--concurrency", 1, "-o", out
    )
    return out


def test_a_server_that_is_not_there_is_no_obstacle(
    stand_in: Callable[..., str], dataset: Path, tmp_path: Path
) -> None:
    """A run without a server leaves no file, so the same command works once there is one."""
    out, url = tmp_path / "out", f"http://127.0.0.1:{free_port()}"
    words = ("--dataset", dataset, "--samples", 2, "--concurrency", 1, "--max-tokens", 8, "-o", out)
    dead = trtspec("bench", url, *words)
    assert dead.status == 1 and "nothing accepts connections" in dead.stderr
    assert not list(out.glob("*")), "a journal without answers is nothing to continue"
    succeeded("bench", stand_in(), *words)
    assert (out / "answers.jsonl").is_file()
    again = trtspec("bench", stand_in(), *words)
    assert again.status == 2 and "already exists" in again.stderr, (
        "what was measured is not overwritten"
    )


def test_the_ci_step_bench_fails_with_its_summary(
    stand_in: Callable[..., str], tmp_path: Path
) -> None:
    """On a server that fails every third request, the CI step ends with bench's status.

    The step is that of configs/ci/endpoint.yml. The tables are in the job's summary all the same,
    and the check behind it is not skipped.
    """
    summary = tmp_path / "summary.md"
    steps, run = ci_steps(
        tmp_path, ENDPOINT=stand_in(fail_every=3), GITHUB_STEP_SUMMARY=str(summary)
    )
    done = run("bench")
    assert done.status == 3, done
    assert (
        "TS-BENCH-ERRORS" in summary.read_text()
        and "Output tokens per second" in summary.read_text()
    )
    assert steps["record"]["if"] == "${{ !cancelled() }}", (
        "it judges the server whatever bench found"
    )
    (tmp_path / "baseline").mkdir()
    (tmp_path / "results").rename(tmp_path / "baseline" / "1")
    again = run("bench")
    assert again.status == 3 and "Usage error" not in again.stderr, again.stderr
