"""Nothing that was answered is lost: signals, a kill, a server that dies, garbage, silence.

Fuzzed input of every kind ends in words.
"""

import asyncio
import json
import random
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests import command_line
from tests.bench.conftest import STAND_IN, answering
from tests.bench.test_malformed_metadata import WORKLOAD, mutated, pages, served
from tests.command_line import TRTSPEC, free_port, printed, ran, wait_for
from tests.json_files import write_lines
from trtspec.bench.load.journal import RunJournal
from trtspec.bench.load.measure import measure
from trtspec.bench.questions.datasets import Dataset, Question, load_dataset
from trtspec.bench.results import read_results
from trtspec.client.client import (
    RequestSampling,
    chat_body,
    new_client,
    stream_answer,
)
from trtspec.errors import UsageError
from trtspec.report import ProgressBar

Start = Callable[..., str]
PATIENCE = 300


def answered(directory: Path) -> list[dict[str, Any]]:
    """What answers.jsonl holds of answers, a line torn by a kill left out."""
    path = directory / "answers.jsonl"
    lines = path.read_bytes().split(b"\n")[:-1] if path.is_file() else []
    return [entry for entry in map(json.loads, lines) if "answer" in entry]


def bench(url: str, dataset: Path, *more: str) -> list[str]:
    return [
        *TRTSPEC,
        "bench",
        url,
        "--dataset",
        str(dataset),
        "--concurrency",
        "2",
        "--max-tokens",
        "48",
        *more,
    ]


@pytest.mark.slow
def test_a_run_that_is_stopped_again_and_again_loses_nothing(
    stand_in: Start, dataset: Path, tmp_path: Path
) -> None:
    """Ctrl-C, SIGTERM and ten kills, each with --resume, end in the figures of one whole run."""
    url, out, whole = stand_in(step_s=0.02), tmp_path / "out", tmp_path / "whole"
    resume: tuple[str, ...] = ()
    for number in (signal.SIGINT, signal.SIGTERM, *[signal.SIGKILL] * 10):
        before = len(answered(out))
        command = bench(url, dataset, "-o", str(out), *resume)
        process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        wait_for(lambda enough=before + 1: len(answered(out)) >= enough, PATIENCE)
        process.send_signal(number)
        errors = process.communicate(timeout=PATIENCE)[1]
        assert process.returncode == (-9 if number is signal.SIGKILL else 130), errors
        if number is not signal.SIGKILL:
            assert "--resume" in errors and str(out) in errors
        assert before + 1 <= len(answered(out)) < 39 and not (out / "results.json").exists()
        resume = ("--resume",)
    for wrong, says in (
        ((), "--resume"),
        (("--resume", "--seed", "5"), "started with something else"),
    ):
        refused = ran(*bench(url, dataset, "-o", str(out), *wrong))
        assert refused.status == 2 and says in refused.stderr
    printed(*bench(url, dataset, "-o", str(out), "--resume"))
    asked = [(entry["answer"]["question"], entry["answer"]["turn"]) for entry in answered(out)]
    assert len(set(asked)) == len(asked) == 39, "what reached the journal is not asked again"
    printed(*bench(url, dataset, "-o", str(whole)))
    results, expected = read_results(out), read_results(whole)
    for key in (
        "turns",
        "tokens",
        "steps",
        "drafted",
        "accepted",
        "histogram",
        "per_question_mean",
    ):
        assert getattr(results, key) == getattr(expected, key), key
    assert (
        results.concurrency[0].throughput.requests == 39
        and results.concurrency[0].throughput.errors == 0
    )


class Stopped(Exception):
    """Ends a run from inside."""


class StopsAtThree(ProgressBar):
    heard = 0

    def advance(self, amount: float, note: str = "") -> None:
        self.heard += 1
        if self.heard == 3:
            raise Stopped


def test_finished_turns_of_a_conversation_that_was_stopped_are_kept(tmp_path: Path) -> None:
    """Of five turns, a run that stops after the third has kept three and not asked the fourth."""
    asked: list[Any] = []
    path, bar = tmp_path / "answers.jsonl", StopsAtThree()
    question = Question("long", "c", tuple(f"Turn {n}?" for n in range(5)))
    load = replace(WORKLOAD, dataset=Dataset("one", "0" * 64, (question,)))
    with RunJournal(path, {}) as raw, pytest.raises(ExceptionGroup):
        asyncio.run(
            served(
                pages("vllm").get,
                lambda url: measure({"e": url}, load, journal=raw, bar=bar),
                asked,
            )
        )
    kept = answered(tmp_path)
    assert [entry["answer"]["turn"] for entry in kept] == [0, 1, 2] and len(asked) == 3
    assert asked[2]["messages"][1] == {"role": "assistant", "content": kept[0]["answer"]["text"]}


@pytest.mark.slow
def test_a_server_that_dies_halfway(dataset: Path, tmp_path: Path) -> None:
    port, out = free_port(), tmp_path / "out"
    command = [sys.executable, str(STAND_IN), str(port), '{"step_s": 0.01}']
    with command_line.served(port, *command) as (url, server):
        process = subprocess.Popen(
            bench(url, dataset, "-o", str(out)), stdout=subprocess.PIPE, text=True
        )
        wait_for(lambda: len(answered(out)) >= 6, PATIENCE)
        server.kill()
    process.communicate(timeout=PATIENCE)
    assert process.returncode == 3
    results = read_results(out)
    assert "TS-BENCH-ERRORS" in {problem.code for problem in results.problems}
    speed = results.concurrency[0].throughput
    assert speed.errors >= 30 - 3 - 10 and speed.requests - speed.errors >= 6
    with command_line.served(port, *command):
        printed(*bench(url, dataset, "-o", str(out), "--resume"))
    assert read_results(out).concurrency[0].throughput.errors == 0 and read_results(out).turns == 39


@pytest.mark.slow
def test_every_kind_of_failure_is_recorded_with_its_reason(
    paced: Callable[..., str], dataset: Path, tmp_path: Path
) -> None:
    kinds = ["", "503", "html", "garbage", "cut", "reset", "hang", ""]
    url, out = paced(ttft_s=0.01, gap_s=0.001, tokens=48, faults=kinds), tmp_path / "out"
    options = ("--timeout", "10", "--warmup", "0", "--samples", "16")
    done = ran(*bench(url, dataset, "-o", str(out), *options))
    assert done.status == 3 and "TS-BENCH-ERRORS" in done.stdout, done
    errors = [entry["answer"]["error"] or "" for entry in answered(out)]
    cut = "without a finish_reason"
    for said in (
        "HTTP 503: busy",
        cut,
        "key must be a string",
        "incomplete",
        "not complete after 10 s",
        "disconnect",
    ):
        assert any(said in error for error in errors), errors
    assert errors.count("") >= 2


EVENT: dict[str, Any] = {
    "choices": [
        {
            "index": 0,
            "delta": {
                "content": "alpha",
                "reasoning_content": None,
                "tool_calls": [{"index": 0, "function": {"name": "f", "arguments": "{}"}}],
            },
            "finish_reason": "stop",
            "avg_decoded_tokens_per_iter": 2.0,
            "spec_decode": {"steps": 1, "drafted": 3, "accepted": 1, "histogram": [0, 1]},
        }
    ],
    "usage": {
        "prompt_tokens": 3,
        "completion_tokens": 3,
        "prompt_tokens_details": {"cached_tokens": 1},
    },
}


def test_fuzzed_answers_end_in_words() -> None:
    """500 nearly valid streams give an answer, with or without an error, and never an exception."""
    rng = random.Random(0)
    bodies = []
    for _ in range(500):
        events = [json.dumps(mutated(EVENT, rng)).encode() for _ in range(rng.randint(1, 3))]
        data = b"".join(b"data: " + event + b"\n\n" for event in events) + b"data: [DONE]\n\n"
        if rng.random() < 0.1:
            place = rng.randrange(len(data))
            data = data[:place] + bytes([rng.randrange(256)]) + data[place + 1 :]
        bodies.append(data)

    async def ask(url: str) -> list[Any]:
        async with new_client(url, 1) as client:
            asked = [
                chat_body("m", [{"role": "user", "content": "x"}], RequestSampling(), n)
                for n in range(500)
            ]
            return [await stream_answer(client, body, "q", "c", limit_s=60) for body in asked]

    answers = asyncio.run(answering(lambda path, body: bodies[body["seed"]], ask))
    failed = sum(answer.error is not None for answer in answers)
    print(
        f"{failed} of {len(answers)} fuzzed answers are failures, "
        f"{len(answers) - failed} are answers"
    )
    assert len(answers) == 500 and 50 < failed < 500
    json.dumps([vars(answer) for answer in answers], ensure_ascii=False).encode("utf-8")


ROWS: list[dict[str, Any]] = [
    {"question_id": 1, "category": "a", "turns": ["One?", "Two?"]},
    {
        "messages": [
            {"role": "system", "content": "s"},
            {"role": "user", "content": [{"type": "text", "text": "x"}]},
        ],
        "tools": [
            {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
        ],
    },
    {"prompt": "Why?", "images": ["https://x/y.png"]},
    {
        "messages": [
            {"role": "user", "content": "x"},
            {"role": "assistant", "content": "y", "tool_calls": []},
        ]
    },
]


def test_fuzzed_data_sets_are_read_or_refused_in_words(tmp_path: Path) -> None:
    rng, file = random.Random(1), tmp_path / "rows.jsonl"
    read = refused = 0
    for trial in range(500):
        rows = [mutated(rng.choice(ROWS), rng) for _ in range(2)]
        write_lines(file, rows)
        name = rng.choice(["", "gsm8k=", "mt-bench=", "speed-bench="])
        try:
            load_dataset(f"{name}{file}")
            read += 1
        except UsageError as error:
            assert error.remedy, (trial, error)
            refused += 1
    print(f"{read} data sets read, {refused} refused")
    assert read > 20 and refused > 50


def test_fuzzed_results_are_read_or_refused_in_words(tmp_path: Path) -> None:
    rng, file = random.Random(2), tmp_path / "results.json"
    level = {"concurrency": 1, "rounds": [1.0]}
    turn = {"question": "q", "category": "c", "tokens": 3, "steps": 1, "accepted": 1, "drafted": 3,
            "histogram": [0, 1], "source": "s"}  # fmt: skip
    good = {
        "name": "n",
        "url": "u",
        "server": {},
        "workload": {},
        "categories": {},
        "concurrency": [level],
        "turns_detail": [turn],
        "questions_detail": [],
    }
    for _ in range(500):
        file.write_text(json.dumps(mutated(good, rng)), encoding="utf-8")
        try:
            read_results(file)
        except UsageError as error:
            assert "is not a result of `trtspec bench`" in error.message
