"""`trtspec inspect HEAD --against TARGET --run` through the command line: verdict, figures, status, refusals."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.command_line import Done, trtspec
from tests.tiny import make_head, make_target, write_json
from trtspec.bench.acceptance import summarize
from trtspec.checkpoint.tokenizer import KimiTokenizer
from trtspec.cli.inspect_run import Expectation, judge
from trtspec.data_files import DATA, kimi_nano_dir
from trtspec.engine.head_check import Baseline, HeadCheck
from trtspec.heads.training.features import compute_features, write_dumps
from trtspec.heads.training.samples import Sample
from trtspec.models.weights import load_target

NANO, SHIPPED = kimi_nano_dir(), DATA / "kimi-nano-eagle3"


def run(head: Path, *options: object, target: Path = NANO) -> Done:
    return trtspec("inspect", head, "--against", target, "--run", "--samples", 16, *options)


def swapped(place: Path) -> Path:
    """The shipped head with gate_proj and up_proj under each other's names, and nothing that says how it was made."""
    shutil.copytree(SHIPPED, place, ignore=shutil.ignore_patterns("*.jsonl", "provenance.json"))
    tensors = load_file(place / "model.safetensors")
    gate, up = "layers.0.mlp.gate_proj.weight", "layers.0.mlp.up_proj.weight"
    tensors[gate], tensors[up] = tensors[up], tensors[gate]
    save_file(tensors, place / "model.safetensors", {"format": "pt"})
    return place


@pytest.fixture(scope="module")
def dumps(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """States of kimi-nano over 17 conversations, as `trtspec train` dumps them."""
    place, tokenizer, samples = tmp_path_factory.mktemp("dumps"), KimiTokenizer(NANO), []
    for line in (NANO / "prompts_heldout.jsonl").read_text(encoding="utf-8").splitlines():
        record = json.loads(line)
        prompt = tokenizer.apply_chat_template(record["messages"], add_generation_prompt=True)
        answer = tokenizer.encode(record.get("reference") or "")[:24]
        if len(prompt) < 60 and len(answer) == 24 and len(samples) < 17:
            mask = [0] * len(prompt) + [1] * len(answer)
            samples.append(Sample(record["id"], (*prompt, *answer), tuple(mask), len(prompt)))
    write_dumps(compute_features(load_target(NANO, dtype=torch.float32), samples, (1, 7, 12)), place)
    return place


@pytest.mark.slow
def test_a_swap_is_named_on_captured_states_and_ends_with_3(tmp_path: Path, dumps: Path) -> None:
    done = run(swapped(tmp_path / "head"), "--states", dumps, "--json")
    report = json.loads(done.stdout)
    ran, problems = report["run"], {problem["code"]: problem for problem in report["problems"]}
    assert done.status == 3
    assert (ran["verdict"], ran["source"], ran["greedy"], ran["texts"]) == ("broken", "states", False, 16)
    assert [fault["kind"] for fault in ran["faults"]] == ["gate-up"]
    assert "gate_proj and up_proj look swapped: agreement 0." in problems["TS-HEAD-RUN-FAULT"]["message"]
    assert ran["untried"] == ["layer-ids +1", "layer-ids -1"]  # the dumps hold the head's own three layers
    counts = ran["acceptance"]
    assert counts["acceptance_length"] == pytest.approx(1 + counts["accepted"] / counts["steps"], abs=1e-4)


@pytest.mark.slow
def test_the_shipped_head_is_healthy_and_says_what_it_was_compared_with(tmp_path: Path) -> None:
    done = run(SHIPPED, "--samples", 64)
    assert done.status == 0
    for words in ("healthy", "64 texts of kimi-nano's held-out prompts", "provenance.json, 24 held-out", "0 named"):
        assert words in " ".join(done.stdout.split())
    assert run(swapped(tmp_path / "head"), "--samples", 64).status == 3


def test_an_untrained_head_is_no_better_than_chance(tmp_path: Path) -> None:
    target = make_target(tmp_path / "target")
    head = make_head(tmp_path / "head", target, draft_vocab=128)
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"what is {number}"}) + "\n" for number in range(16)))
    done = run(head, "--prompts", prompts, "--json", target=target)
    report = json.loads(done.stdout)
    assert done.status == 3 and report["run"]["verdict"] == "broken"
    assert "TS-HEAD-RUN-CHANCE" in {problem["code"] for problem in report["problems"]}


def test_what_cannot_run_says_why(tmp_path: Path, dumps: Path) -> None:
    few = tmp_path / "few.jsonl"
    few.write_text('{"prompt": "hello"}\n')
    cases = [
        (run(SHIPPED, "--prompts", few), 2, "too few to tell a fault from chance"),
        (run(SHIPPED, "--states", tmp_path), 1, "holds no .pt dumps"),
        (run(SHIPPED, "--states", dumps, "--prompts", few), 2, "--prompts is not used"),
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
    assert "GiB" in done.stderr and "--states DIR" in done.stderr


def figures(agreement: float, bigram_chance: float = 0.0) -> HeadCheck:
    sure = Baseline(0.01, 0.0)
    return HeadCheck(
        1000, agreement, {"random_head": sure, "unigram": sure, "bigram": Baseline(0.3, bigram_chance)}, [], [], []
    )


@pytest.mark.parametrize(
    ("low", "drafts", "interval", "first", "bigram", "verdict"),
    [
        (2.8, 3, [2.5, 2.9], 0.7, 0.0, "healthy"),
        (2.8, 3, [2.0, 2.2], 0.5, 0.0, "weak"),  # 1.8 drafts accepted elsewhere, at most 1.2 here
        (2.8, 4, [2.0, 2.2], 0.5, 0.0, "healthy"),  # another draft length is no measure
        (None, 3, [1.3, 1.5], 0.35, 0.0, "weak"),
        (None, 3, [1.9, 2.1], 0.6, 0.2, "weak"),  # no better than a table of token pairs
    ],
)
def test_the_verdict(low, drafts, interval, first, bigram, verdict) -> None:
    found = {"acceptance_length": sum(interval) / 2, "acceptance_length_interval": interval, "cumulative": [first]}
    acceptance = replace(summarize([]), **found)
    expected = None if low is None else Expectation(low, low + 0.3, drafts, "somewhere")
    found, problems = judge("head", acceptance, expected, figures(0.6, bigram), 3)
    assert found == verdict and [problem.severity for problem in problems] == ["warning"] * (verdict == "weak")
