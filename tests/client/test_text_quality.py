"""Loops, noise and random prompts are told from text; ordinary text is not accused."""

import inspect
import json
import textwrap

import pytest

from trtspec.client import text_quality as quality

PROSE = inspect.getdoc(json) or ""
CODE = inspect.getsource(textwrap)[:2000]
CHINESE = "推测解码让一个小模型先写几个词,再由大模型一次检查,因此输出不变而速度更快。" * 2


@pytest.mark.parametrize("text", [PROSE[:1500], CODE, "A short answer.", CHINESE])
def test_ordinary_text_is_not_degenerate(text: str) -> None:
    assert quality.degeneration(text) is None


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("  \n", "empty"),
        ("the cat sat on the mat. " * 20, "loop"),
        ("A fair beginning of an answer, then " + "and so on and on " * 12, "loop"),
        ("\ufffd\ufffd\x00 a \ufffd" * 4, "noise"),
    ],
)
def test_degenerate_text_is_named(text: str, reason: str) -> None:
    assert quality.degeneration(text) == reason


def test_distinct_ratio_counts_4grams() -> None:
    assert quality.distinct_ratio(list(range(40))) == 1.0
    assert quality.distinct_ratio([1, 2, 3, 4] * 10) == pytest.approx(4 / 37)
    assert quality.distinct_ratio([1, 2, 3]) is None


def test_run_is_degenerate_only_above_the_share() -> None:
    good, loop = CODE, "no no " * 40
    assert not quality.judge_run([good] * 19 + [loop]).degenerate
    assert quality.judge_run([good] * 8 + [loop] * 2).degenerate
