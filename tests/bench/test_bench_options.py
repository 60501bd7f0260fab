"""Options of `bench` that would name a figure for something else than what was measured."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.command_line import succeeded, trtspec
from trtspec.bench.load.assemble import goodput
from trtspec.bench.results import ServiceLevel
from trtspec.cli.options import GoodputLimits
from trtspec.client.client import Answer

NOWHERE = ("bench", "http://127.0.0.1:9")


def answer(tokens: int, *chunks: float) -> Answer:
    """One that began at 0 and ended with its last chunk."""
    return Answer(
        "q", "c", 0, 0.0, chunks[-1], [(when, 50) for when in chunks], completion_tokens=tokens
    )


def test_an_answer_in_one_piece_does_not_keep_a_promise_between_tokens() -> None:
    """A proxy that holds everything back and sends it at once: its users waited 19 s."""
    promise = ServiceLevel(tpot=0.02)
    assert (
        not promise.met(answer(100, 19.0))
        and goodput([answer(100, 19.0)] * 4, 19.0, promise).share == 0
    )
    assert promise.met(answer(100, 1.9)), "19 ms for each token, the first one's wait included"
    assert promise.met(answer(1, 19.0)), "there is nothing between"
    assert not promise.met(answer(0, 1.0, 2.0)), "nobody counted its tokens"
    assert promise.met(answer(100, 19.0, 19.5)) and not promise.met(answer(100, 1.0, 19.0))


def test_a_promise_is_made_once_of_what_is_measured_and_above_zero() -> None:
    assert GoodputLimits.parse("ttft:500, tpot:20").promise == ServiceLevel(ttft=0.5, tpot=0.02)
    wrong = {
        "ttft:500,ttft:50": "ttft is given twice",
        "itl:5": "'itl' is none of ttft, tpot, e2el",
    }
    no_numbers = ("-5", "0", "nan", "inf", "1e999", "", "fast")
    wrong |= {
        f"tpot:20,ttft:{limit}": "not a number of milliseconds above 0" for limit in no_numbers
    }
    for text, says in wrong.items():
        done = trtspec(*NOWHERE, "--goodput", text)
        assert (
            done.status == 2 and says in done.stderr and "--goodput ttft:500,tpot:20" in done.stderr
        )


def test_an_empty_limit_of_regression_is_refused(tmp_path: Path) -> None:
    done = trtspec(*NOWHERE, "--max-regression=", "--compare", tmp_path)
    assert done.status == 2 and "Invalid value for '--max-regression'" in done.stderr


REFUSED: tuple[tuple[dict[str, Any], tuple[str, ...], str], ...] = (
    ({"temperature": 1.0}, (), "--temperature"),
    ({"max_tokens": 5}, (), "--max-tokens"),
    ({"messages": [], "model": "zzz"}, (), "--dataset"),
    ({"model": "zzz"}, (), "--model"),
    ({"stream_options": None}, (), "leave it out"),
    ({"stream": False}, (), "leave it out"),
    ({"n": 2}, (), "one answer"),
    ({"seed": None}, (), "--seed"),
    ({"top_k": 3, "chat_template_kwargs": {"thinking": False}}, ("--thinking", "on"), "--thinking"),
    ({"chat_template_kwargs": None}, ("--thinking", "on"), "--thinking"),
    ({"reasoning_effort": "low"}, ("--thinking", "on"), "--thinking"),
)


@pytest.mark.parametrize(("body", "more", "remedy"), REFUSED, ids=lambda value: str(value)[:40])
def test_an_extra_body_does_not_override_what_names_the_figures(
    body: dict[str, Any], more: tuple[str, ...], remedy: str, tmp_path: Path
) -> None:
    done = trtspec(*NOWHERE, "--extra-body", json.dumps(body), *more, "-o", tmp_path / "out")
    assert (
        done.status == 2 and "--extra-body must not set " in done.stderr and remedy in done.stderr
    ), done.stderr
    assert not (tmp_path / "out").exists()


def test_other_keys_of_an_extra_body_are_sent(stand_in: Callable[..., str], dataset: Path) -> None:
    body = {"top_k": 3, "ignore_eos": False}
    words = ("--dataset", dataset, "--samples", 1, "--concurrency", 1, "--max-tokens", 8, "--json")
    done = succeeded(
        "bench", stand_in(), *words, "--thinking", "on", "--extra-body", json.dumps(body)
    )
    stated = done.json["workload"]["extra_body"]
    assert stated == {**body, "chat_template_kwargs": {"thinking": True}}
    assert math.isclose(done.json["workload"]["temperature"], 0.0)
    done = succeeded(
        "bench", stand_in(), *words, "--extra-body", '{"chat_template_kwargs": {"thinking": false}}'
    )
