"""Long answers are judged as short ones are: their text, errors, loops and counts, beside the plain server's own."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from trtspec.bench.asking import NOT_ASKED
from trtspec.bench.check import check_degenerate
from trtspec.bench.transcript import BurstReply, Recording, Token, Transcript
from trtspec.bench.visible import check_answers, check_context, check_long_answers, check_usage

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


CANNOT = "HTTP 400: this template has no system messages"


def variants(**more: Any) -> list[Transcript]:
    return [replace(item, group="system", **more) for item in SENSE[:8]]


@pytest.mark.parametrize(
    ("got", "plain", "wanted"),
    [
        (variants(error=CANNOT), variants(), "fail"),
        (variants(error=CANNOT), None, "pass"),
        (variants(error=CANNOT), variants(error=CANNOT), "pass"),
        (variants(error="HTTP 500: broken"), None, "fail"),
    ],
)
def test_variants_that_the_plain_server_answers_are_not_optional(
    got: list[Transcript], plain: list[Transcript] | None, wanted: str
) -> None:
    sides = [None if one is None else Recording("u", {}, 8, one) for one in (got, plain)]
    found = check_answers(*sides)  # type: ignore[arg-type]
    assert found.status == wanted and ("8 variants refused" in found.message) == (plain is None and wanted == "pass")


def test_what_the_plain_server_fails_at_is_looked_up_pass_by_pass() -> None:
    bad = [replace(item, text="", error="HTTP 400: no streams") for item in SENSE]
    plain = Recording("u", {}, 8, SENSE, streamed=bad)
    assert check_answers(plain, plain).status == "pass"
    found = check_answers(replace(plain, streamed=SENSE, later=bad), plain)
    assert found.status == "fail" and found.detail["failed"] == 12
    assert "24 of 36 requests answered" in found.message, "what is answered here counts"
    assert check_answers(plain, Recording("u", {}, 8, SENSE)).status == "fail", "an old recording without streams"
    stopped = replace(plain, later=[replace(item, error=NOT_ASKED) for item in bad], stopped="8 requests failed")
    assert check_answers(stopped, stopped).status == "skipped" and check_answers(stopped, plain).status == "fail"
    assert check_answers(replace(plain, later=bad), stopped).status == "fail", "it was not asked there"


@pytest.mark.parametrize(
    ("failed", "usual", "wanted"), [(0, 32, "pass"), (32, 32, "pass"), (1, 0, "fail"), (32, 1, "fail")]
)
def test_a_burst_that_fails_on_the_plain_server_too(failed: int, usual: int, wanted: str) -> None:
    sides = [Recording("u", {}, 8, SENSE, burst=BurstReply(32, 0, count, "HTTP 504")) for count in (failed, usual)]
    assert check_answers(*sides).status == wanted


def test_prompts_that_are_cut_when_they_are_asked_again() -> None:
    """Beside the plain server, and alone: then beside the server's own first pass."""
    whole = [replace(item, prompt_tokens=8000) for item in SENSE]
    plain, cut = server(*whole), [replace(item, text="Of 500 tokens.", prompt_tokens=500) for item in whole]
    got = replace(plain, long_warm=cut)
    for expected in (plain, None):
        found = check_context(got, expected)
        assert found.status == "fail" and "asked again: 8000 tokens" in found.message, found.message
        assert check_context(plain, expected).status == ("pass" if expected else "skipped")
    streamed = Recording("u", {}, 8, whole, streamed=cut)
    assert check_context(streamed, Recording("u", {}, 8, whole)).status == "fail"
    assert check_context(got, got).status == "pass", "the plain server cuts them as well"
    found = check_long_answers(got, plain, 0.5)
    assert found.status == "skipped" and "12 answers are left out" in found.message and found.detail["left_out"]


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
