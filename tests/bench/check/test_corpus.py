"""The gate on a corpus: every fault fails only the row that names it, and honest servers pass.

A new fault is a line of faults.yaml, below the row of check that must fail, with the kind that must
name it, and its effect in toy_server.py, where `self.fault` is the name:

    greedy:
      relaxed-acceptance: text
"""

import asyncio
import functools
import json
import os
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.bench.check.toy_server import Toy
from tests.cli.matrix import Recorder
from trtspec.bench.check.asking import Asker, record, score_answers
from trtspec.bench.check.prompts import Prompts
from trtspec.bench.check.rows import CheckVerdict, GateRow, coverage, judge
from trtspec.bench.questions.datasets import Question
from trtspec.checkpoint.tokenizer import KimiTokenizer
from trtspec.client.exchange import Exchange, read_recording
from trtspec.client.servers import detect_server
from trtspec.data_files import kimi_nano_dir
from trtspec.errors import UsageError

TOKENIZER = KimiTokenizer(kimi_nano_dir())
QUESTIONS = [
    Question(str(n), "all", (f"Tell me about the river number {n} and its bridges.",))
    for n in range(28)
]
SIZES = {"samples": 14, "max_tokens": 48, "context": 300, "limit": 900}
TABLE = yaml.safe_load(Path(__file__).with_name("faults.yaml").read_text())
FAULTS, BESIDE = TABLE["faults"], TABLE["beside"]


async def asker(toy: Toy) -> Asker:
    client = toy.client()
    return Asker(client=client, server=await detect_server(client), tokenizer=TOKENIZER)


def recorded(toy: Toy) -> list[Exchange]:
    async def run() -> list[Exchange]:
        one = await asker(toy)
        return await record(
            one,
            Prompts(
                tokenizer=TOKENIZER,
                questions=QUESTIONS,
                ids=one.server.adapter.ids,
                withheld={},
                **SIZES,
            ),
        )

    return asyncio.run(run())


def scored(got: list[Exchange], plain: Toy) -> tuple[list[Exchange], list[Exchange]]:
    async def run() -> tuple[list[Exchange], list[Exchange]]:
        return await score_answers(await asker(plain), got)

    return asyncio.run(run())


@functools.cache
def honest() -> tuple[list[Exchange], list[Exchange]]:
    return scored(recorded(Toy(TOKENIZER)), Toy(TOKENIZER, drafts=0))


def check(fault: str, kind: str = "reference", **limits: Any) -> list[GateRow]:
    got, plain = scored(
        recorded(Toy(TOKENIZER, fault, kind=kind)), Toy(TOKENIZER, drafts=0, kind=kind)
    )
    return judge(got, plain, **limits)


def failed(rows: list[GateRow]) -> dict[str, tuple[str, ...]]:
    return {row.name: row.faults for row in rows if row.faults}


@pytest.mark.parametrize("kind", ["reference", "trtllm"])
def test_an_honest_server_is_safe(kind: str) -> None:
    """An honest server gets SAFE, also with TensorRT-LLM's limits.

    As TensorRT-LLM it gives token ids without text, refuses prompt log-probabilities, fails at any
    of them under speculation, and is busy now and then.
    """
    rows = check("", kind)
    assert CheckVerdict(rows=tuple(rows)).word == "SAFE", rows


@pytest.mark.parametrize(
    ("row", "fault"), [(row, fault) for row, faults in FAULTS.items() for fault in faults]
)
def test_a_fault_fails_its_row_alone(row: str, fault: str) -> None:
    faults = failed(check(fault))
    assert faults.keys() - BESIDE.get(fault, "").split() == {row}, faults
    assert any(one.startswith(f"{FAULTS[row][fault]}: ") for one in faults[row]), faults


@pytest.mark.slow
@pytest.mark.parametrize(
    ("row", "fault"),
    [
        ("greedy", "relaxed-acceptance"),
        ("greedy", "stale-turn-2"),
        ("sampled", "temperature-ignored"),
        ("transport", "stream-altered"),
        ("acceptance", "collapse-warm"),
    ],
)
def test_a_fault_is_found_by_continuations_alone(row: str, fault: str) -> None:
    rows = check(fault, "trtllm")
    assert failed(rows).keys() == {row}


def test_what_is_refused_by_name_is_no_fault() -> None:
    got, plain = scored(recorded(Toy(TOKENIZER, "parameters-refused")), Toy(TOKENIZER, drafts=0))
    rows = judge(got, plain)
    assert "frequency_penalty (refused by the server)" in coverage(got, rows)
    assert CheckVerdict(rows=tuple(rows)).word == "SAFE"


@pytest.mark.parametrize(
    "fault", ["finish-wrong", "call-dropped", "other-template", "long-errors", "usage-inflated"]
)
def test_a_fault_of_the_plain_server_as_well_does_not_count(fault: str) -> None:
    got, plain = scored(recorded(Toy(TOKENIZER, fault)), Toy(TOKENIZER, fault, drafts=0))
    assert not failed(judge(got, plain))


def test_acceptance_below_the_floor_fails_and_none_is_not_proven() -> None:
    got, plain = honest()
    assert failed(judge(got, plain, min_acceptance=3.9)).keys() == {"acceptance"}
    assert "acceptance" in failed(check("collapse", min_acceptance=1.5))
    rows = judge(*scored(recorded(Toy(TOKENIZER, drafts=0)), Toy(TOKENIZER, drafts=0)))
    verdict = CheckVerdict(rows=tuple(rows))
    assert verdict.line == "NOT PROVEN: acceptance: 1.00 tokens per step: no draft was accepted"
    assert CheckVerdict(rows=tuple(rows), accepted=frozenset({"acceptance"})).word == "SAFE"


def test_a_scoring_server_that_speculates_is_refused_at_once() -> None:
    other = Toy(TOKENIZER)
    with pytest.raises(UsageError, match="speculates") as refused:
        scored(recorded(Toy(TOKENIZER)), other)
    assert "swap the URLs" in refused.value.remedy
    assert len(other.asked) == 4 and not any("logprobs" in body for body in other.asked)


@pytest.mark.parametrize(
    ("behind", "exact", "lone", "row"),
    [
        (1.5, False, False, ""),
        (2.5, False, False, "greedy"),
        (2.5, False, True, ""),
        (0.1, True, True, "greedy"),
    ],
)
def test_one_prompt_fails_beyond_two_nats_and_exact_takes_no_tie(
    behind: float, exact: bool, lone: bool, row: str
) -> None:
    got, plain = honest()
    one = next(one for one in got if one.kind == "text" and one.scores)
    off = (replace(one.scores[0], chosen=one.scores[0].top[0] - behind), *one.scores[1:])
    one_off = [
        replace(each, scores=off) if each is one or (each.key == one.key and not lone) else each
        for each in got
    ]
    assert " ".join(failed(judge(one_off, plain, exact=exact))) == row


def test_resampled_honest_checks_raise_no_alarm() -> None:
    got, plain = honest()
    dice = random.Random(1)
    for _ in range(150):
        keys = {*dice.sample(sorted({one.key for one in got}), 40)}
        chosen = [one for one in got if one.key in keys]
        assert not failed(judge(chosen, plain))


@pytest.mark.parametrize("points", [3, pytest.param(10, marks=pytest.mark.slow)])
@pytest.mark.clock
def test_a_recording_that_is_killed_again_and_again_asks_nothing_twice(
    tmp_path: Path, points: int
) -> None:
    """After `kill -9` and a torn line, check asks only what has not reached the journal."""
    server, file = Recorder(), tmp_path / "spec.jsonl"
    journal = tmp_path / "spec.jsonl.part"
    command = [
        sys.executable,
        "-m",
        "trtspec",
        "check",
        server.url,
        "--tokenizer",
        "kimi-nano",
        "--samples",
        "4",
        "--max-tokens",
        "12",
        "--context-tokens",
        "8",
        "--concurrency",
        "1",
        "--record",
    ]

    def asked(recording: Path) -> Counter[str]:
        """The requests of one whole run, told by its key.

        Requests of killed runs may arrive after it.
        """
        environment = {**os.environ, "OPENAI_API_KEY": recording.name}
        assert (
            subprocess.run(
                [*command, str(recording)], capture_output=True, env=environment
            ).returncode
            == 0
        )
        bodies = (
            body
            for _, sent, body in map(json.loads, server.requests)
            if sent == f"Bearer {recording.name}"
        )
        return counted(bodies)

    def counted(bodies: Iterable[dict[str, Any]]) -> Counter[str]:
        """What the client adds counts for nothing."""
        own = ("model", "stream_options")
        asked = (
            {key: value for key, value in body.items() if key not in own and value is not False}
            for body in bodies
        )
        return Counter(json.dumps(body, sort_keys=True) for body in asked)

    def kept() -> list[dict[str, Any]]:
        return (
            [json.loads(line)["exchange"] for line in journal.read_bytes().split(b"\n")[2:-1]]
            if journal.is_file()
            else []
        )

    whole = asked(tmp_path / "whole.jsonl")
    for point in range(1, points + 1):
        with subprocess.Popen([*command, str(file)], stderr=subprocess.PIPE) as process:
            while len(kept()) < point * whole.total() // (points + 2):
                assert process.poll() is None
                time.sleep(0.005)
            process.kill()
        journal.write_bytes(journal.read_bytes()[:-7])
    answered = counted(one["body"] for one in kept())
    assert asked(file) + answered == whole and answered.total() > whole.total() // 2
    server.shutdown()
    both = [
        [(one.name, one.content) for one in read_recording(path)]
        for path in (file, tmp_path / "whole.jsonl")
    ]
    assert both[0] == both[1] and not journal.exists()
