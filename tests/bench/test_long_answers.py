"""Long answers are judged as short ones are: their text, errors, loops and counts, beside the plain server's own."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from trtspec.bench.check import check_degenerate
from trtspec.bench.transcript import Recording, Token, Transcript
from trtspec.bench.visible import check_answers, check_long_answers, check_usage

SENTENCE = "so the notes say that a reader of many long files wants an index with one line for each of them first"
WORDS = SENTENCE.split()
LOOP = "the " * 40


def answer(index: int, text: str | None = None, gaps: dict[int, float] | None = None, **more: Any) -> Transcript:
    """The answer to one prompt of 8192 tokens; with `gaps` it has tokens, whose runner-up is `other`."""
    tokens = None
    if gaps is not None:
        tokens = [Token(f"{word} ", "other ", gaps.get(place, 2.0)) for place, word in enumerate(WORDS)]
    text = " ".join(WORDS) + f" {index}" if text is None else text
    text = "".join(token.text for token in tokens) if tokens else text
    return Transcript(f"8192 tokens: {index}", "long context", [], text, "stop", tokens, "8192", **more)


def server(*long: Transcript, **more: Any) -> Recording:
    return Recording("u", {}, 128, [], long_cold=list(long), long_warm=list(long), **more)


SENSE = [answer(index) for index in range(12)]
PLAIN = server(*SENSE)
OLD = "record the plain server again"


def test_text_of_long_answers_is_compared() -> None:
    """Without log-probabilities, by how often the plain server's own answers differ."""
    assert check_long_answers(PLAIN, PLAIN, 0.5).status == "pass"
    assert check_long_answers(PLAIN, None, 0.5).status == "skipped"
    looping = server(*[replace(item, text=LOOP) for item in SENSE])
    found = check_long_answers(looping, PLAIN, 0.5)
    assert (found.status, found.code) == ("fail", "TS-CHECK-NOT-LOSSLESS") and OLD in found.message
    one = server(replace(SENSE[0], text=LOOP), *SENSE[1:])
    found = check_long_answers(one, PLAIN, 0.5)
    assert found.status == "skipped" and "1 of 12 prompts have another answer" in found.message
    moving = replace(PLAIN, long_warm=[replace(item, text=f"{item.text}.") for item in SENSE])
    assert check_long_answers(looping, moving, 0.5).status == "skipped", "the plain server moves as often"
    other = server(*[replace(item, prompt_tokens=9) for item in looping.long_cold])
    assert check_long_answers(other, server(*[replace(i, prompt_tokens=8) for i in SENSE]), 0.5).status == "skipped"


@pytest.mark.parametrize(("place", "gap", "wanted"), [(5, 2.0, "fail"), (5, 1e-5, "pass"), (12, 1e-5, "fail")])
def test_a_near_tie_in_a_long_answer_is_excused(place: int, gap: float, wanted: str) -> None:
    """One answer of twelve is enough where log-probabilities tell; its stream has white space at the end."""
    whole = [answer(0, gaps={5: gap, 12: 2.0})]
    streams = [replace(item, tokens=None, text=f" {item.text}") for item in whole]
    plain = replace(server(*streams), long_whole=whole)
    parted = " ".join([*WORDS[:place], "other", "words", "follow"])
    got = server(replace(streams[0], text=f"{parted}\n"))
    assert check_long_answers(plain, plain, 0.5).status == "pass"
    found = check_long_answers(got, plain, 0.5)
    assert found.status == wanted and found.seen == 2, found


def failing(error: str) -> Recording:
    broken = [replace(item, text="", error=error) for item in SENSE]
    return Recording("u", {}, 128, [], long_cold=broken[:1])


@pytest.mark.parametrize(
    ("error", "plain", "wanted"),
    [
        ("HTTP 500: CUDA illegal memory access", PLAIN, "fail"),
        ("HTTP 500: CUDA illegal memory access", None, "fail"),
        ("HTTP 400: longer than the context", PLAIN, "fail"),
        ("HTTP 400: longer than the context", None, "pass"),
        ("HTTP 400: longer than the context", failing("HTTP 400: longer than the context"), "pass"),
    ],
)
def test_errors_of_long_prompts_count(error: str, plain: Recording | None, wanted: str) -> None:
    found = check_answers(failing(error), plain)
    assert found.status == wanted, found.message


def test_what_the_plain_server_was_not_asked_does_not_count() -> None:
    """After the refusal of a length's first prompt it was not asked the others."""
    got = server(*SENSE[:3])
    got = replace(got, long_warm=[*SENSE[:2], replace(SENSE[2], error="HTTP 500: broken")])
    assert check_answers(got, failing("HTTP 400: longer than the context")).status == "pass"
    assert check_answers(got, PLAIN).status == "fail"


def test_long_loops_are_not_lost_among_short_answers() -> None:
    short = [
        replace(item, question=f"{item.question} {place}", group="prompts") for item in SENSE for place in range(9)
    ]
    plain = replace(PLAIN, transcripts=short)
    for loops, wanted in ((1, "pass"), (2, "fail"), (4, "fail")):
        long = [replace(item, text=LOOP) if place < loops else item for place, item in enumerate(SENSE)]
        got = replace(server(*long), transcripts=short)
        assert check_degenerate(got, plain).status == wanted
        assert check_degenerate(got, got).status == "pass", "the target itself is like this"


def test_counts_of_long_answers_are_those_of_the_plain_server() -> None:
    counted = server(*[replace(item, completion_tokens=20) for item in SENSE])
    inflated = server(*[replace(item, completion_tokens=40) for item in SENSE])
    assert check_usage(counted, counted).status == "pass"
    assert check_usage(inflated, counted).code == "TS-CHECK-USAGE"
