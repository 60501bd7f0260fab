"""`bench` against real loopback servers: counts, rates, interleaving, findings, exit statuses."""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.bench.conftest import measured, timed
from tests.command_line import problem_codes, succeeded, trtspec
from tests.json_files import read_json, write_json
from trtspec.bench.load import assemble, measure
from trtspec.bench.questions.datasets import Dataset, load_dataset
from trtspec.client import servers
from trtspec.client.client import RequestSampling

Start = Callable[..., str]


def run(urls: dict[str, str], dataset: Path, **options: Any) -> dict[str, Any]:
    return measured(urls, dataset, **{"concurrency": (1, 4), "samples": 24, **options}).to_dict()


def codes(results: dict[str, Any]) -> set[str]:
    return problem_codes(results)


def test_every_source_agrees_on_the_same_answers(stand_in: Start, dataset: Path) -> None:
    """The three kinds of server speculate alike, so their counts lead to the same acceptance."""
    exact = run({"e": stand_in(kind="reference")}, dataset)
    average = run({"e": stand_in(kind="trtllm")}, dataset)
    counters = run({"e": stand_in(kind="vllm")}, dataset)
    assert exact["source"] == servers.FROM_CHOICE and exact["server"]["kind"] == "reference"
    assert average["source"] == servers.FROM_AVERAGE and average["server"]["kind"] == "trtllm"
    assert counters["source"] == servers.FROM_COUNTERS and counters["server"]["kind"] == "vllm"
    for key in ("steps", "drafted", "accepted", "histogram", "acceptance_length"):
        assert counters[key] == exact[key], key
    # trtllm-serve counts the prefill as a step, which is taken out again
    assert average["steps"] == exact["steps"] and average["accepted"] == exact["accepted"]
    assert (
        average["per_question_mean"] == exact["per_question_mean"]
        and counters["per_question_mean"] is None
    )
    assert counters["turns"] == exact["turns"]
    assert average["histogram"] is None and average["drafted"] is None
    assert set(counters["categories"]) == set(exact["categories"]) == {"code", "docs", "list"}


def test_counts_of_one_answer_match_the_servers_arithmetic(stand_in: Start, dataset: Path) -> None:
    results = run({"e": stand_in(kind="reference")}, dataset, concurrency=(2,), samples=36)
    level = results["concurrency"][0]
    # every token but the first comes out of a verification step
    assert level["tokens"] == level["steps"] + level["accepted"] + level["turns"]
    assert sum(level["histogram"]) == level["steps"] and level["drafted"] == 3 * level["steps"]
    assert results["turns"] == 39, "three questions have a second turn"
    assert (
        level["throughput"]["output_tokens"] == level["tokens"]
        and level["throughput"]["errors"] == 0
    )


def test_a_speed_up_is_the_ratio_of_steps(stand_in: Start, dataset: Path) -> None:
    """Where each step takes as long: 25 tokens in 1 + 8 steps of 3 or in 25.

    The measured times give another ratio.
    """
    urls = {"spec": stand_in(kind="reference", forced=2), "plain": stand_in(kind="plain")}
    first = [
        replace(question, turns=question.turns[:1])
        for question in load_dataset(str(dataset), 6).questions
    ]
    once = Dataset("once", "0" * 64, tuple(first))
    work = measure.BenchWorkload(once, RequestSampling(max_tokens=25), (2,), rounds=2, warmup=2)
    results = assemble.assemble(asyncio.run(measure.measure(urls, work)))
    plain = results.endpoints["plain"]
    (found,) = results.speedups
    assert (found.of, found.over, found.ratio.units) == ("spec", "plain", 6)
    assert found.ratio.low <= found.ratio.value <= found.ratio.high
    assert results.per_question_mean == pytest.approx(25 / 9, abs=1e-3)
    (found,) = assemble.speedups([timed(results, 0.05), timed(plain, 0.05)])
    assert found.ratio.value == pytest.approx(25 / 9, abs=1e-3)
    asked = [run.concurrency[0].throughput.requests for run in (results, plain)]
    assert asked[0] == asked[1]


def test_sampled_answers_differ_between_questions_and_repeat_with_the_seed(
    stand_in: Start, dataset: Path
) -> None:
    url = stand_in(kind="reference")
    work = measure.BenchWorkload(
        load_dataset(str(dataset), 8), RequestSampling(32, 1.0, seed=5), (4,)
    )
    first, second = (asyncio.run(measure.measure({"e": url}, work))[0].answers() for _ in range(2))
    texts = [{(a.question, a.turn): a.text for a in answers} for answers in (first, second)]
    assert texts[0] == texts[1]
    assert len(set(texts[0].values())) == len(texts[0])


@pytest.mark.parametrize(
    ("settings", "code"),
    [
        ({"forced": 2}, "TS-BENCH-FORCED-ACCEPTANCE"),
        ({"accept_nothing": True}, "TS-BENCH-NOTHING-ACCEPTED"),
        ({"loop": True}, "TS-BENCH-DEGENERATE"),
        ({"fail_every": 5}, "TS-BENCH-ERRORS"),
        ({"kind": "other"}, "TS-BENCH-NO-ACCEPTANCE"),
    ],
)
def test_unsound_measurements_are_named(
    stand_in: Start, dataset: Path, settings: dict, code: str
) -> None:
    assert codes(run({"e": stand_in(**settings)}, dataset)) == {code}


def test_command_writes_results_report_and_compares(
    stand_in: Start, dataset: Path, tmp_path: Path
) -> None:
    url, out = stand_in(kind="reference"), tmp_path / "out"
    common = ["--dataset", dataset, "--concurrency", "1,4", "--samples", "24", "--max-tokens", "48"]
    first = succeeded("bench", url, *common, "-o", out)
    assert "distinct 4-grams" in first.stdout and "acceptance length" in first.stdout
    results = read_json(out / "results.json")
    assert [level["concurrency"] for level in results["concurrency"]] == [1, 4]
    page = (out / "report.html").read_text()
    assert f"{results['acceptance_length']:.2f}" in page and "http://" not in page.replace(
        url, ""
    ).replace("http://www.w3.org", "")
    assert (out / "answers.jsonl").read_text().count('"answer": {') == sum(
        level["throughput"]["requests"] for level in results["concurrency"]
    )
    refused = trtspec("bench", url, *common, "-o", out)
    assert refused.status == 2 and "--force" in refused.stderr
    again = trtspec("bench", url, *common, "--compare", out, "--json")
    comparison = again.json["comparison"]
    assert (
        comparison["figures"][0]["ratio"] == 1.0
        and comparison["figures"][0]["verdict"] == "no change found"
    )
    other = trtspec("bench", url, *common[:-2], "--compare", out)
    assert other.status == 2 and "max_tokens was 48, now 256" in other.stderr
    renamed = read_json(out / "results.json") | {"server": {"kind": "reference", "model": "other"}}
    write_json(tmp_path / "other.json", renamed)
    other = trtspec("bench", url, *common, "--compare", tmp_path / "other.json")
    assert other.status == 2 and "figures of the model other" in other.stderr, other.stderr


def test_command_says_what_is_wrong(stand_in: Start, dataset: Path, tmp_path: Path) -> None:
    nobody = trtspec("bench", "127.0.0.1:9", "--dataset", dataset)
    assert nobody.status == 1 and "does not answer" in nobody.stderr
    waited = trtspec("bench", "127.0.0.1:9", "--dataset", dataset, "--wait-ready", "1")
    assert waited.status == 1 and "after 1 s" in waited.stderr
    failing = trtspec(
        "bench", stand_in(fail_every=1), "--dataset", dataset, "--samples", 2, "--concurrency", 1
    )
    assert failing.status == 1 and "out of blocks" in failing.stderr
    ids = tmp_path / "ids.jsonl"
    ids.write_text('{"prompt": [17, 4, 99]}\n')
    random = trtspec("bench", stand_in(), "--dataset", ids)
    assert random.status == 2 and "a message that is not an object" in random.stderr
    assert trtspec("bench", stand_in(), "--dataset", dataset, "--samples", "1,2").status == 2
