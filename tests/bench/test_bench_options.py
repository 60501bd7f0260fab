"""Options of `bench` that would name a figure for something else than what was measured."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.cases import table
from tests.command_line import succeeded, trtspec

NOWHERE = ("bench", "http://127.0.0.1:9")


def test_an_empty_limit_of_regression_is_refused(tmp_path: Path) -> None:
    done = trtspec(*NOWHERE, "--max-regression=", "--compare", tmp_path)
    assert done.status == 2 and "--max-regression" in done.stderr


@pytest.mark.parametrize(
    ("body", "more", "remedy"), table(__file__), ids=lambda value: str(value)[:40]
)
def test_an_extra_body_does_not_override_what_names_the_figures(
    body: dict[str, Any], more: list[str], remedy: str, tmp_path: Path
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
