"""bench and check against the real reference server.

Its counters, planted causes of low acceptance, and the CI workflow. Minutes, so all of it is slow.
"""

import contextlib
import json
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from tests.bench.conftest import ci_steps, measured
from tests.command_line import TRTSPEC, free_port, served
from tests.json_files import read_json
from trtspec import data_files
from trtspec.bench.results import BY_LENGTH, BY_MINUTE, BY_REUSE, BenchResults
from trtspec.bench.statistics import Ratio, paired_ratio

NANO, HEAD = str(data_files.kimi_nano_dir()), str(data_files.DATA / "kimi-nano-eagle3")
PLANTED = Path(__file__).with_name("planted_causes.py")
CAUSES = {
    "blind_prefix": ["reused"], "shifted_layers": ["everywhere"], "cold_start": ["first minute"],
}  # fmt: skip
CHARACTERS = 2.4  # of a token, or more
LOW = 0.8  # of the acceptance length elsewhere
USUAL = (
    1.95  # of these conversations, which end in the middle of a question; without a cause it is 2.2
)
pytestmark = [pytest.mark.clock, pytest.mark.slow]


@pytest.fixture
def reference() -> Iterator[Callable[..., str]]:
    """reference("--head", HEAD) -> base URL of a running reference server on kimi-nano."""
    with contextlib.ExitStack() as running:

        def start(*options: str, cause: str = "") -> str:
            port = free_port()
            program = (sys.executable, PLANTED, cause) if cause else TRTSPEC
            words = (*program, "serve", NANO, "--backend", "reference", "--port", port, *options)
            return running.enter_context(served(port, *words))[0]

        yield start


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


def recorded(file: Path, count: int, longest: int) -> Path:
    """Bodies of chat and completions requests up to about `longest` tokens, in powers of two.

    Three are asked twice before the next three, while the server still keeps what it computed.
    """
    lines = (Path(NANO) / "prompts_heldout.jsonl").read_text().splitlines()
    texts = [json.loads(line)["messages"][-1]["content"] for line in lines]
    bodies = list[dict[str, Any]]()
    for index in range(count // 2):
        size = int(CHARACTERS * (longest >> index % 10)) + 10
        text = " ".join(texts[index:] + texts * (size // 20_000 + 1))[:size]
        sampled = {"temperature": 0.5, "seed": index}
        chat: dict[str, Any] = {"messages": [{"role": "user", "content": text}], "temperature": 0}
        bodies.append(chat if index % 2 else {"prompt": text, **sampled})
    twice = [body for begin in range(0, len(bodies), 3) for body in bodies[begin : begin + 3] * 2]
    asked = [{"model": "recorded", "max_tokens": 24, **body} for body in twice]
    file.write_text("".join(json.dumps(body) + "\n" for body in asked))
    return file


@pytest.mark.parametrize(("count", "longest"), [(500, 2048), (50, 33_792)])
@pytest.mark.timeout(3600)
def test_recorded_requests_by_length_and_reuse_add_up_to_the_counters(
    reference: Callable[..., str], tmp_path: Path, count: int, longest: int
) -> None:
    file = recorded(tmp_path / "bodies.jsonl", count, longest)
    url = reference("--head", HEAD, "--max-seq-len", str(longest))
    before = counters(url)
    results = measured({"e": url}, file, warmup=0)
    gone = {name: value - before[name] for name, value in counters(url).items()}
    server = [gone[f"spec_decode_{name}"] for name in ("steps", "draft_tokens", "accepted_tokens")]
    assert [results.steps, results.drafted, results.accepted] == server
    assert results.tokens == gone["generation_tokens"]
    for by in (BY_LENGTH, BY_REUSE):
        parts = [part for part in results.slices if part.by == by]
        for part in parts:
            print(by, part.value, part.answers, part.steps, part.accepted, part.acceptance_length)
        told = [sum(getattr(part, key) for part in parts) for key in ("steps", "accepted")]
        assert len(parts) > 1 and told == [results.steps, results.accepted]
        assert sum(part.answers for part in parts) == count
    assert longest / 2 < max(part.value for part in results.slices if part.by == BY_LENGTH)
    assert not [problem for problem in results.problems if problem.severity == "error"]


@pytest.mark.parametrize("cause", ["", *CAUSES])
def test_a_planted_cause_has_the_shape_that_the_page_describes(
    reference: Callable[..., str], tmp_path: Path, cause: str
) -> None:
    """Acceptance is low where docs/long-context.md says, for each cause.

    Causes: reused prompts, everywhere from position 1, the first minute.
    """
    file = recorded(tmp_path / "bodies.jsonl", 192, 1000)
    rows = enumerate(row for row in file.read_text().splitlines() if "messages" in row)
    late = [f'{{"timestamp": {65_000 * (index % 2)}, "body": {row}}}\n' for index, row in rows]
    file.write_text("".join(late))
    url, times = reference("--head", HEAD, cause=cause), cause == "cold_start"
    found = measured({"e": url}, file, warmup=0, rates=(1.0,) * times, recorded_times=times)
    lengths = {
        (part.by, part.value): part.acceptance_length or 0.0 for part in found.slices if part.steps
    }
    print(cause, found.acceptance_length, found.cumulative, lengths)
    fresh, last_minute = (
        lengths[BY_REUSE, 0],
        lengths[max(key for key in lengths if key[0] == BY_MINUTE)],
    )
    low = {
        "reused": lengths[max(key for key in lengths if key[0] == BY_REUSE)] < LOW * fresh,
        "everywhere": max(fresh, last_minute) < USUAL,
        "first minute": lengths[BY_MINUTE, 1] < LOW * last_minute,
    }
    assert [name for name, holds in low.items() if holds] == CAUSES.get(cause, [])


def rounds_of(found: BenchResults, load: str) -> np.ndarray:
    """[rounds, 4]: tokens and seconds of each round with the head, then alone."""
    sides = []
    for endpoint in found.all:
        sums: dict[int, np.ndarray] = defaultdict(lambda: np.zeros(2))
        for speed in endpoint.speeds(load).values():
            sums[speed.round] += (speed.tokens, speed.seconds)
        sides.append([sums[number] for number in sorted(sums)])
    return np.concatenate(sides, axis=1)


def interval_of(rounds: np.ndarray) -> Ratio:
    sides = dict(enumerate(rounds[:, :2])), dict(enumerate(rounds[:, 2:]))
    found = paired_ratio(sides, alike=True)
    assert found
    return found


@pytest.mark.alone
@pytest.mark.timeout(3600)
def test_six_launches_and_resampled_proofs_hold_the_pooled_figure() -> None:
    """Launches are measured as a proof measures them, every second one beside four busy loops."""
    launches = []
    for number in range(6):
        with contextlib.ExitStack() as running:
            for _ in range(number % 2 * 4):
                busy = subprocess.Popen([sys.executable, "-c", "while True: pass"])
                running.callback(busy.kill)
            urls = {}
            for name, options in (("spec", ("--head", HEAD)), ("plain", ())):
                port = free_port()
                words = ("serve", NANO, "--backend", "reference", "--port", port, *options)
                urls[name] = running.enter_context(served(port, *TRTSPEC, *words))[0]
            asked = {"samples": 32, "max_tokens": 48, "concurrency": (1, 4), "rounds": 8}
            launches.append(measured(urls, "nano", **asked))
    rng = np.random.default_rng(0)
    for load in ("concurrency 1", "concurrency 4"):
        live = [rounds_of(found, load) for found in launches]
        pool = np.concatenate(live)
        pooled = interval_of(pool).value
        proofs = [interval_of(pool[rng.integers(0, len(pool), 8)]) for _ in range(1000)]
        inside = [
            sum(one.low <= pooled <= one.high for one in intervals)
            for intervals in (map(interval_of, live), proofs)
        ]
        width = np.median([(one.high - one.low) / one.value for one in proofs])
        print(
            f"{load}: {pooled:.2f}, in {inside[0]} of 6 and {inside[1]} of 1000, width {width:.2f}"
        )
        assert inside[0] >= 5 and 930 <= inside[1] <= 970


def test_the_ci_workflow_runs_as_it_is_written(tmp_path: Path) -> None:
    """All `run` steps of configs/ci/endpoint.yml but the installation pass in its environment."""
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
