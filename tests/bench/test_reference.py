"""bench and check against the real reference server: its counters, the best draft length, the tables of model cards, no
false alarm, the CI workflow. Minutes, so all of it is slow. TRTSPEC_HONEST_CHECKS is the number of checks, 20."""

import contextlib
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.bench.conftest import ci_steps, measured
from tests.command_line import TRTSPEC, free_port, served
from tests.json_files import read_json
from trtspec import data_files
from trtspec.bench.choose_draft import choose
from trtspec.bench.results import BY_LENGTH, BY_REUSE, BenchResults, EndpointResult

NANO, HEAD = str(data_files.kimi_nano_dir()), str(data_files.DATA / "kimi-nano-eagle3")
pytestmark = [pytest.mark.clock, pytest.mark.slow]


@pytest.fixture
def reference() -> Iterator[Callable[..., str]]:
    """reference("--head", HEAD) -> base URL of a running reference server on kimi-nano."""
    with contextlib.ExitStack() as running:

        def start(*options: str) -> str:
            port = free_port()
            words = (*TRTSPEC, "serve", NANO, "--backend", "reference", "--port", port, *options)
            return running.enter_context(served(port, *words))[0]

        yield start


def run(urls: dict[str, str], **options: Any) -> BenchResults:
    return measured(
        urls, "nano", **{"concurrency": (4,), "samples": 24, "temperature": 1.0, **options}
    )


def counters(url: str) -> dict[str, float]:
    lines = httpx.get(f"{url}/prometheus/metrics", trust_env=False)
    text = (
        lines.text
        if lines.status_code == 200
        else httpx.get(f"{url}/metrics", trust_env=False).text
    )
    found = [
        line.split(" ")
        for line in text.splitlines()
        if line.startswith("trtspec_") and "{" not in line
    ]
    return {
        name.removesuffix("_total").removeprefix("trtspec_"): float(value) for name, value in found
    }


def test_steps_drafts_and_tokens_are_the_engines_own(reference: Callable[..., str]) -> None:
    url = reference("--head", HEAD)
    before = counters(url)
    results = run({"e": url}, warmup=0)
    gone = {name: value - before[name] for name, value in counters(url).items()}
    print({key: (getattr(results, key), gone[f"spec_decode_{name}"]) for key, name in
           (("steps", "steps"), ("drafted", "draft_tokens"), ("accepted", "accepted_tokens"))})  # fmt: skip
    assert (
        results.steps == gone["spec_decode_steps"]
        and results.drafted == gone["spec_decode_draft_tokens"]
    )
    assert (
        results.accepted == gone["spec_decode_accepted_tokens"]
        and results.tokens == gone["generation_tokens"]
    )
    assert not [problem for problem in results.problems if problem.severity == "error"]


def test_recorded_requests_by_length_and_reuse_add_up_to_the_counters(
    reference: Callable[..., str], tmp_path: Path
) -> None:
    """Chat requests, every second one behind more turns, and texts; all twice, so that prompts are reused."""
    lines = (Path(NANO) / "prompts_heldout.jsonl").read_text().splitlines()
    asked = [json.loads(line)["messages"][-1] for line in lines[:40]]
    sent: list[dict[str, Any]] = []
    for index, message in enumerate(asked[:24]):
        sent.append({"messages": [*asked[24 : 24 + index % 2 * 16], message], "temperature": 0})
        sent.append({"prompt": message["content"], "temperature": 0.5, "seed": index})
    bodies = [{"model": "recorded", "max_tokens": 24, **body} for body in sent * 2]
    file = tmp_path / "bodies.jsonl"
    file.write_text("".join(json.dumps(body) + "\n" for body in bodies))
    url = reference("--head", HEAD)
    before = counters(url)
    slices = measured({"e": url}, file, warmup=0).slices
    after = counters(url)
    for by in (BY_LENGTH, BY_REUSE):
        parts = [part for part in slices if part.by == by]
        told = [sum(getattr(part, key) for part in parts) for key in ("steps", "accepted")]
        names = "spec_decode_steps", "spec_decode_accepted_tokens"
        assert len(parts) > 1 and told == [after[name] - before[name] for name in names]


@pytest.mark.alone
def test_the_chosen_draft_length_is_within_3_percent_of_the_best_measured(
    reference: Callable[..., str],
) -> None:
    """Chosen on every other question of one run, judged on the questions between them, so that both see the same
    machine: a second run of the same servers is up to a quarter slower or faster."""
    urls = {f"draft-{k}": reference("--head", HEAD, "--draft-len", str(k)) for k in (1, 3, 5)}
    found = run(urls, concurrency=(1, 4), samples=32, rounds=4, temperature=0.0, max_tokens=48)

    def half(odd: int) -> dict[int, EndpointResult]:
        return {
            int(e.name.removeprefix("draft-")): replace(
                e, questions_detail=e.questions_detail[odd::2]
            )
            for e in found.all
        }

    for told, truth in zip(choose(half(0)).loads, choose(half(1)).loads, strict=True):
        speed = {figure.draft_len: figure.tokens_per_s for figure in truth.lengths}
        print(
            f"concurrency {told.concurrency}: {told.best} chosen, {speed} tokens/s on the other questions"
        )
        assert speed[told.best] >= 0.97 * max(speed.values())


def test_the_ci_workflow_runs_as_it_is_written(tmp_path: Path) -> None:
    """Every `run` step of configs/ci/endpoint.yml but the installation, in its order and with its environment."""
    urls = {name: f"http://127.0.0.1:{free_port()}" for name in ("ENDPOINT", "PLAIN")}
    steps, run_step = ci_steps(tmp_path, **urls, MODEL=NANO, HEAD_DIR=HEAD)
    names = [name for name, step in steps.items() if "run" in step and name != "install"]
    assert names == ["serve", "bench", "record", "stop", "score"]
    statuses = {}
    for name in names:
        done = run_step(name)
        print(name, done.status, done.stdout[-2000:], done.stderr[-2000:])
        statuses[name] = done.status
    assert not any(statuses.values()), statuses
    kept = list(steps.values())[-1]["with"]["path"].split()
    assert all((tmp_path / path).exists() for path in kept), kept
    verdict = read_json(tmp_path / "check.json")
    assert verdict["verdict"] == "SAFE", verdict
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{urls['PLAIN']}/health")
