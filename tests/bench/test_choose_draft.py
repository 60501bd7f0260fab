"""--choose-draft: the measured length that is really best, in options that build-config takes."""

from __future__ import annotations

import itertools
import json
import shlex
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.command_line import trtspec
from trtspec.bench import choose_draft
from trtspec.bench.acceptance import summarize
from trtspec.bench.choose_draft import choose, one_length, propose, schedule_of
from trtspec.bench.results import BenchResults, EndpointResult, LevelResult, QuestionSpeed, Throughput
from trtspec.cli.bench import schedule_meaning
from trtspec.client.servers import DetectedServer, TurnCounts
from trtspec.client.text_quality import judge_run
from trtspec.errors import UsageError
from trtspec.trtllm.deployment import Deployment
from trtspec.trtllm.lint import lint
from trtspec.trtllm.schema import schema_for

RATES = (0.8, 0.7, 0.6, 0.5, 0.4)
LOADS = (1, 4, 16)
SPEED = Throughput(
    requests=1, errors=0, output_tokens=1, wall_s=1.0, tokens_per_s=1.0, steady_tokens_per_s=None,
    tokens_per_s_per_user=None, ttft_s=None, inter_token_s=None, request_s=None, cached_prompt_tokens=None,
)  # fmt: skip


def step_s(drafts: int, concurrency: int, per_draft: float = 0.08) -> float:
    """One step: a draft costs more the more requests share it."""
    return 0.01 * (1 + per_draft * drafts * concurrency**0.75)


def expected(drafts: int) -> float:
    return 1 + sum(itertools.accumulate(RATES[:drafts], lambda a, b: a * b))


def endpoint(drafts: int, tells: bool = True, per_draft: float = 0.08) -> EndpointResult:
    """A server that runs with so many drafts, exactly as the rates and the costs say."""
    steps = 10_000
    reached = [steps, *(round(steps * share) for share in itertools.accumulate(RATES[:drafts], lambda a, b: a * b)), 0]
    histogram = tuple(a - b for a, b in itertools.pairwise(reached))
    accepted = sum(place * count for place, count in enumerate(histogram))
    turn = TurnCounts(
        "q", "c", 1 + steps + accepted, steps, accepted, drafts * steps, histogram if tells else None, "x"
    )
    summary, levels, speeds = summarize([turn]), [], []
    for concurrency in LOADS:
        seconds = steps * step_s(drafts, concurrency, per_draft)
        for number in range(3):
            speeds.append(
                QuestionSpeed(
                    f"concurrency {concurrency}", "q", "c", turn.tokens, seconds, 0.1, turn.tokens - 1, seconds, number
                )
            )
        more = {"concurrency": concurrency, "categories": {}, "throughput": SPEED, "rounds": [1.0]}
        more |= {"degeneration": judge_run([])}
        levels.append(LevelResult(**vars(summary), **more))  # type: ignore[arg-type]
    return EndpointResult(
        **vars(summary), name=f"draft-{drafts}", url="u", server=DetectedServer("reference", "m"), categories={},
        degeneration=judge_run([]), concurrency=levels, questions_detail=speeds,
    )  # fmt: skip


def test_the_best_of_the_measured_lengths_is_found() -> None:
    for load in choose({k: endpoint(k) for k in (0, 2, 5)}):
        rates = {k: expected(k) / step_s(k, load.concurrency) for k in (0, 2, 5)}
        assert [figure.draft_len for figure in load.lengths] == [0, 2, 5]
        assert rates[load.best] >= 0.99 * max(rates.values())
        assert [f.tokens_per_s for f in load.lengths] == [pytest.approx(rate, rel=0.01) for rate in rates.values()]


def moody(drafts: int, moods: Sequence[float]) -> EndpointResult:
    """`endpoint` on a machine that takes so many times as long in each round."""
    found = endpoint(drafts)
    details = [
        replace(speed, round=number, decode_s=speed.decode_s * mood)
        for speed in found.questions_detail
        if speed.round == 0
        for number, mood in enumerate(moods)
    ]
    return replace(found, questions_detail=details)


def test_a_machine_that_changes_between_rounds_decides_nothing() -> None:
    """In one round of six the machine was three times slower, and 20 % slower still for the best length: pooled seconds
    would choose another one. Rounds are compared, and say how sure the order is."""
    calm = choose({k: endpoint(k) for k in range(1, 6)})
    best = {load.concurrency: load.best for load in calm}
    served = {k: moody(k, (1, 1.2, 0.9, 3.6 if k == best[1] else 3, 1.1, 1)) for k in range(1, 6)}
    load = choose(served)[0]
    assert load.best == best[1] and load.rounds == 6
    pooled = choose(served, apart=served)[0]
    assert pooled.best != best[1] and not pooled.rounds, "what pooling would have chosen"
    far = next(figure for figure in load.lengths if figure.draft_len == 1)
    assert far.of_best and far.of_best[1] < 1 and 1 not in load.alike and load.alike
    notes = propose([load], {}, None).notes
    assert any(f"6 rounds do not tell {', '.join(map(str, load.alike))} drafts from {load.best}" in n for n in notes)
    assert "were not all measured in turns" in propose([pooled], {}, None).notes[-1]


def test_few_rounds_do_not_show_how_sure_a_choice_is() -> None:
    load = choose({k: moody(k, (1, 1.3)) for k in (1, 5)})[0]
    assert all(figure.of_best is None for figure in load.lengths)
    assert "2 rounds do not show how sure the choice is: give --rounds 5" in propose([load], {}, None).notes


def test_acceptance_comes_from_all_loads_unless_one_contradicts_them() -> None:
    """The cost of a step depends on the load, acceptance does not: few answers at one load must not decide."""
    served = endpoint(3)
    lucky, less = (
        replace(served.concurrency[0], acceptance_length=1.2, acceptance_length_interval=interval)
        for interval in ([1.0, 4.0], [1.1, 1.3])
    )
    exact = choose({3: served})[0].lengths[0].tokens_per_step
    first = [replace(served, concurrency=[level, *served.concurrency[1:]]) for level in (lucky, less)]
    assert [choose({3: found})[0].lengths[0].tokens_per_step for found in first] == [exact, 1.2]


def test_servers_without_drafts_or_a_length_are_refused() -> None:
    with pytest.raises(UsageError, match="no server with drafts"):
        choose({0: endpoint(0)})
    with pytest.raises(UsageError, match="does not tell its draft length"):
        served = endpoint(3, tells=False)
        unknown = EndpointResult(**{**vars(served), "drafted": None})
        choose_draft.served_by([unknown], {}, {})


def test_a_schedule_in_the_words_of_both_kinds_of_release() -> None:
    loads = choose({0: endpoint(0), 2: endpoint(2), 5: endpoint(5)})
    assert [load.best for load in loads] == sorted((load.best for load in loads), reverse=True) and loads[0].best > 1
    lower, upper = schedule_of(loads, "lower"), schedule_of(loads, "upper")
    assert lower and upper and min(lower) == 1 and max(upper) >= 2048
    for batch in LOADS:
        from_lower = lower[max(key for key in lower if key <= batch)]
        from_upper = upper[min(key for key in upper if key >= batch)]
        assert from_lower == from_upper == max(1, next(load.best for load in loads if load.concurrency == batch))
    costly = choose({0: endpoint(0, per_draft=2), 3: endpoint(3, per_draft=2)})
    assert all(load.best == 0 for load in costly)
    proposal = propose(costly, {"bounds": "upper"}, "1.3.0rc21")
    assert proposal.schedule is None and proposal.draft_len >= 1 and "no drafts at all" in proposal.notes[-1]
    assert one_length(loads) in (2, 5)


@pytest.mark.parametrize("version", ["1.3.0rc20", "1.3.0rc21", "1.3.0rc23"])
def test_build_config_takes_the_proposal_and_its_file_lints_clean(tmp_path: Path, version: str) -> None:
    meaning = schedule_meaning(version)
    loads = choose({0: endpoint(0), 2: endpoint(2), 5: endpoint(5)})
    proposal = propose(loads, meaning, version)
    assert proposal.schedule
    arguments = tmp_path / "build-config.args"
    arguments.write_text("".join(shlex.quote(word) + "\n" for word in proposal.options))
    made = tmp_path / "extra.yml"
    command = [
        sys.executable,
        "-m",
        "trtspec",
        "build-config",
        "nvidia/Kimi-K2.5-NVFP4",
        "--head",
        "nvidia/Kimi-K2.5-Thinking-Eagle3",
    ]
    built = subprocess.run(["xargs", "-a", arguments, *command, "-o", made], capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    linted = subprocess.run(
        [sys.executable, "-m", "trtspec", "lint", made, "--trtllm-version", version, "--json"],
        capture_output=True,
        text=True,
    )
    found = [p for p in json.loads(linted.stdout)["problems"] if "SCHEDULE" in p["code"] or p["severity"] == "error"]
    assert linted.returncode == 0 and not found, found
    assert "draft_len_schedule" in made.read_text()


@pytest.mark.parametrize(("version", "has_one"), [("1.2.0", True), ("1.3.0rc18", False)])
def test_older_releases_get_lower_bounds_or_one_length(version: str, has_one: bool) -> None:
    meaning = schedule_meaning(version)
    loads = choose({0: endpoint(0), 2: endpoint(2), 5: endpoint(5)})
    proposal = propose(loads, meaning, version)
    assert (proposal.schedule is not None) == has_one
    assert (
        any(f"{version} has no draft_len_schedule whose meaning is known" in note for note in proposal.notes) != has_one
    )
    entries = "".join(f"\n    {batch}: {drafts}" for batch, drafts in (proposal.schedule or {}).items())
    text = "speculative_config:\n  decoding_type: Eagle\n  speculative_model_dir: head\n"
    text += f"  max_draft_len: {proposal.draft_len}\n"
    text += f"  draft_len_schedule:{entries}\n" if entries else ""
    found = [finding.code for finding in lint(text, Deployment(schema_for(version)))]
    assert not [code for code in found if "SCHEDULE" in code]


@pytest.mark.slow
def test_a_server_that_does_not_tell_its_length_is_given_it(
    stand_in: Callable[..., str], dataset: Path, tmp_path: Path
) -> None:
    """The remedy of the error, tried: trtllm-serve tells an average and no draft length."""
    url, other, out = stand_in(kind="trtllm"), stand_in(kind="trtllm", draft_len=2), tmp_path / "out"
    command = ["bench", url, "--dataset", dataset, "--samples", 4, "--concurrency", 1, "--max-tokens", 24,
               "--choose-draft", "--at", f"2={other}", "-o", out]  # fmt: skip
    refused = trtspec(*command)
    assert refused.status == 2 and "does not tell its draft length" in refused.stderr
    assert f"--at K={url}" in refused.stderr.replace("\n", "") and "--resume" in refused.stderr
    done = trtspec(*command, "--resume", "--at", f"3={url}/v1/", "--json")
    found = json.loads(done.stdout)
    assert done.status == 0, done.stderr
    assert [figure["draft_len"] for figure in found["draft_choice"]["loads"][0]["lengths"]] == [2, 3]
    assert list(found["endpoints"]) == ["draft-2"], "the first server is measured once"
    twice = trtspec(*command, "--resume", "--at", f"3={url}", "--at", f"4={url}")
    assert twice.status == 2 and "it is also given 3 drafts" in twice.stderr


WORK: dict[str, Any] = {
    "dataset": "d", "dataset_sha256": "0", "questions": [1], "concurrency": list(LOADS), "rates": [], "max_tokens": 9,
    "temperature": 0.0, "template": "t", "seed": 0, "api": "chat", "thinking": None, "isl": None, "osl": None,
    "extra_body": {}, "under": [],
}  # fmt: skip


def earlier(drafts: int, **changed: Any) -> BenchResults:
    """Results of a run against `endpoint(drafts)`; `changed` fields are of its workload."""
    return BenchResults(**vars(endpoint(drafts)), workload=WORK | changed, endpoints={}, interleaved=None, problems=[])


LOOPS = judge_run(["loop " * 60] * 4)


@pytest.mark.parametrize(
    ("given", "results", "says"),
    [
        (5, earlier(1), "are of 1 drafts per step"),
        (0, earlier(1), "are of 1 drafts per step"),
        (3, earlier(3, dataset_sha256="1", temperature=1.0, thinking="on"), "in dataset_sha256, temperature, thinking"),
        (3, earlier(3, under=["system=briefly"]), "differ from this run in under"),
        (3, earlier(3, questions_sha256="2"), "differ from this run in questions_sha256"),
        (3, replace(earlier(3), degeneration=LOOPS), "100 % of its answers are degenerate"),
        (3, replace(earlier(3), acceptance_length=None, drafted=None), "does not say what it accepted"),
        (3, replace(earlier(3), concurrency=earlier(3).concurrency[:0]), r"in common \(1, 4, 16; none\)"),
    ],
)
def test_results_that_cannot_stand_beside_the_run_are_refused_before_it(
    given: int, results: BenchResults, says: str
) -> None:
    choose_draft.refuse_stored({3: earlier(3), 2: earlier(2)}, WORK)
    with pytest.raises(UsageError, match=says) as refused:
        choose_draft.refuse_stored({given: results}, WORK)
    assert refused.value.remedy


def test_output_that_says_nothing_of_drafts_chooses_nothing() -> None:
    """Of loops every draft is right: they would win."""
    with pytest.raises(UsageError, match="degenerate"):
        choose({1: endpoint(1), 3: replace(endpoint(3), degeneration=LOOPS)})
    silent = replace(endpoint(3), acceptance_length=None)
    with pytest.raises(UsageError, match="3 drafts, u: it does not say what it accepted"):
        choose({1: endpoint(1), 3: silent})
    proposal = propose(choose({k: endpoint(k) for k in (1, 3)}), {}, None, osl=200)
    assert any("forced to 200 tokens" in note for note in proposal.notes)


def test_a_server_that_tells_one_mean_of_all_answers_has_steps_of_that_many_tokens() -> None:
    """SGLang tells nothing by answer or by load; its steps were taken for ones of one token."""
    told = endpoint(3)
    mute = [replace(level, acceptance_length=None, acceptance_length_interval=None, cumulative=None, histogram=None)
            for level in told.concurrency]  # fmt: skip
    mean = replace(told, concurrency=mute, cumulative=None, histogram=None)
    for exact, found in zip(choose({3: told}), choose({3: mean}), strict=True):
        assert found.lengths[0].tokens_per_step == pytest.approx(exact.lengths[0].tokens_per_step)
        assert found.lengths[0].step_s == pytest.approx(step_s(3, found.concurrency), rel=0.01)


def test_one_length_is_compared_with_nothing() -> None:
    assert "nothing was compared" in propose(choose({3: endpoint(3)}), {}, None).notes[-1]
    assert not any("nothing was" in note for note in propose(choose({0: endpoint(0), 3: endpoint(3)}), {}, None).notes)


def test_a_mistyped_place_of_results_is_no_server(tmp_path: Path) -> None:
    for place in ("resuls-old", tmp_path / "resuls" / "old", "./old"):
        done = trtspec("bench", "http://127.0.0.1:9", "--choose-draft", "--at", f"1={place}")
        assert done.status == 2 and "there is no such file or directory" in done.stderr, done.stderr


def test_what_was_measured_is_kept_where_nothing_can_be_chosen(
    stand_in: Callable[..., str], dataset: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    words = ("--dataset", dataset, "--samples", 4, "--concurrency", 1, "--max-tokens", 48, "--choose-draft", "-o", out)
    done = trtspec("bench", stand_in(loop=True), *words)
    assert done.status == 2 and "degenerate" in done.stderr and "answers.jsonl" in done.stderr
    assert json.loads((out / "results.json").read_text())["draft_choice"] is None
    assert (out / "answers.jsonl").is_file() and not (out / "build-config.args").exists()
