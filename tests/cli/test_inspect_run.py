"""`trtspec inspect HEAD --against TARGET --run` through the command line: verdict, figures, status, refusals."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from tests.command_line import Done, trtspec
from tests.tiny import make_head, make_target, write_json
from trtspec.bench.statistics import summarize
from trtspec.cli.inspect_run import Expectation, judge
from trtspec.data_files import DATA, kimi_nano_dir
from trtspec.engine.head_check import Suspicion, Trial

NANO, SHIPPED = kimi_nano_dir(), DATA / "kimi-nano-eagle3"


def run(head: Path, *options: object, target: Path = NANO) -> Done:
    return trtspec("inspect", head, "--against", target, "--run", "--samples", 16, *options)


@pytest.mark.slow
def test_the_shipped_head_is_healthy_and_one_that_lost_its_norm_ends_with_3(tmp_path: Path) -> None:
    done = run(SHIPPED, "--samples", 64)
    assert done.status == 0
    for words in ("healthy", "64 texts of kimi-nano's held-out prompts", "provenance.json, 24 held-out", "0 named"):
        assert words in " ".join(done.stdout.split())
    head = tmp_path / "head"
    shutil.copytree(SHIPPED, head, ignore=shutil.ignore_patterns("*.jsonl", "provenance.json"))
    config = json.loads((head / "config.json").read_text())
    write_json(head / "config.json", config | {"norm_output": False})
    done = run(head, "--json")
    report = json.loads(done.stdout)
    ran, problems = report["run"], {problem["code"]: problem for problem in report["problems"]}
    assert done.status == 3
    assert (ran["verdict"], ran["texts"]) == ("broken", 16)
    assert [fault["kind"] for fault in ran["faults"]] == ["norm-output"]
    assert (
        "fed back without the final norm by mistake: share of drafts accepted 0."
        in problems["TS-HEAD-RUN-FAULT"]["message"]
    )
    counts = ran["acceptance"]
    assert counts["acceptance_length"] == pytest.approx(1 + counts["accepted"] / counts["steps"], abs=1e-4)


def test_an_untrained_head_is_no_better_than_chance(tmp_path: Path) -> None:
    target = make_target(tmp_path / "target")
    head = make_head(tmp_path / "head", target, draft_vocab=128)
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"what is {number}"}) + "\n" for number in range(16)))
    done = run(head, "--prompts", prompts, "--json", target=target)
    report = json.loads(done.stdout)
    assert done.status == 3 and report["run"]["verdict"] == "broken"
    assert "TS-HEAD-RUN-CHANCE" in {problem["code"] for problem in report["problems"]}


def test_what_cannot_run_says_why(tmp_path: Path) -> None:
    few = tmp_path / "few.jsonl"
    few.write_text('{"prompt": "hello"}\n')
    cases = [
        (run(SHIPPED, "--prompts", few), 2, "too few to tell a fault from chance"),
        (run(SHIPPED, target=Path("nvidia/Kimi-K2.5-NVFP4")), 3, "not drafted"),  # of another width: an error already
        (run(SHIPPED, target=SHIPPED), 2, "is a head"),
        (run(SHIPPED, "--device", "nowhere"), 2, "--device nowhere"),
        (trtspec("inspect", SHIPPED, "--run"), 2, "--run is not used"),
        (trtspec("inspect", NANO, "--run"), 2, "--run is not used"),
        (trtspec("inspect", SHIPPED, "--against", NANO, "--seed", 1), 2, "--seed is not used"),
    ]
    for done, status, words in cases:
        assert done.status == status and words in " ".join(done.stderr.split()), (done.stderr, words)


def test_a_target_that_does_not_fit_says_what_it_takes(tmp_path: Path) -> None:
    target = make_target(tmp_path / "target")
    head = make_head(tmp_path / "head", target)
    config = json.loads((target / "config.json").read_text())
    config["text_config"] |= {"n_routed_experts": 10_000, "moe_intermediate_size": 100_000}
    write_json(target / "config.json", config)
    done = run(head, target=target)
    assert done.status == 4 and "TS-HEAD-RUN-MEMORY" in done.stderr
    assert "GiB" in done.stderr


SUSPECTED = Suspicion("rope", "", "the rope looks wrong", "with another", "write it", None, {})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("low", "drafts", "interval", "first", "named", "verdict"),
    [
        (2.8, 3, [2.5, 2.9], 0.7, False, "healthy"),
        (2.8, 3, [2.0, 2.2], 0.5, False, "weak"),  # 1.8 drafts accepted elsewhere, at most 1.2 here
        (2.8, 4, [2.0, 2.2], 0.5, False, "healthy"),  # another draft length is no measure
        (None, 3, [1.3, 1.5], 0.35, False, "weak"),
        (None, 3, [1.0, 1.1], 0.02, False, "broken"),
        (2.8, 3, [2.5, 2.9], 0.7, True, "broken"),
    ],
)
def test_the_verdict(low, drafts, interval, first, named, verdict) -> None:
    found = {"acceptance_length": sum(interval) / 2, "acceptance_length_interval": interval, "cumulative": [first]}
    expected = None if low is None else Expectation(low, low + 0.3, drafts, "somewhere")
    best = Trial(SUSPECTED, 0.4, 0.8, 0.0, named)
    said, problems = judge("head", replace(summarize([]), **found), expected, best, 3)
    severities = {"healthy": [], "weak": ["warning"], "broken": ["error"]}
    assert said == verdict and [problem.severity for problem in problems] == severities[verdict]
