"""The gate beside a plain server that ends, that failed, or that splits its answers: counted by hand, judged by row."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.bench import cheats
from tests.command_line import trtspec
from trtspec.bench.baseline import failures
from trtspec.bench.check import GateLimits, check_degenerate, check_lossless
from trtspec.bench.features import check_follow_ups, check_image, check_tool_calls
from trtspec.bench.forms import check_forms
from trtspec.bench.gate import CheckResult
from trtspec.bench.transcript import BurstReply, RecordedPass, Recording, ToolReply, Transcript, read_recording
from trtspec.bench.visible import check_answers, check_stream

FORM = ToolReply(content='{"name": "a", "count": 1}', finish_reason="stop")
LONG_FORM = ToolReply(content='{"name": "a", "count": 1' + "\n" * 900, finish_reason="length")
CALL = ToolReply([{"name": "lookup", "arguments": '{"name": "a"}'}], finish_reason="tool_calls")
TEXT = ToolReply(content="It reads a file.", reasoning="I read.", finish_reason="stop")
LOOP = ToolReply(reasoning="I look it up. " * 200, finish_reason="length")
SILENT = ToolReply(reasoning="I read.", finish_reason="stop")
BUSY, REFUSED = ToolReply(error="HTTP 503: busy"), ToolReply(error="HTTP 400: no")


def numbered(*parts: tuple[ToolReply, int]) -> list[ToolReply]:
    replies = [reply for reply, count in parts for _ in range(count)]
    return [replace(reply, question=str(place)) for place, reply in enumerate(replies)]


def rows(got: list[ToolReply], plain: list[ToolReply]) -> dict[str, CheckResult]:
    """The same replies as tool requests, follow-ups and forms."""
    sides = [
        Recording("u", {}, 8, [], tools=one, repeated_tools=again, follow_ups=one, repeated_follow_ups=again,
                  forms=one, repeated_forms=again)
        for one, again in ((got, []), (plain, plain))
    ]  # fmt: skip
    found = (check_tool_calls(*sides, 0.5), check_follow_ups(*sides, 0.5), check_forms(*sides, 0.5))
    return {row.name: row for row in found}


@pytest.mark.parametrize(
    ("row", "sound", "endless", "among"),
    [("tool-call", CALL, LOOP, 60), ("tool-follow-up", TEXT, LOOP, 60), ("structured-output", FORM, LONG_FORM, 8)],
)
def test_replies_that_do_not_end_where_the_plain_servers_do_fail(
    row: str, sound: ToolReply, endless: ToolReply, among: int
) -> None:
    """Fisher's exact test: 7 of 60 for 0 of 60 has p = 0.0064, 6 of 60 p = 0.014; 6 of 8 for 0 of 8 p = 0.0035, 5 of 8
    p = 0.013."""
    ends = numbered((sound, among))
    least = 6 if among == 8 else 7
    for count in (among, least):
        found = rows(numbered((sound, among - count), (endless, count)), ends)[row]
        assert found.status == "fail" and f"{count} of {among} do not, and 0 of {among}" in found.message, found.message
    few = rows(numbered((sound, among - least + 1), (endless, least - 1)), ends)[row]
    assert few.status == "pass" and f"{least - 1} were cut off" in few.message, few.message
    as_before = numbered((sound, among - least), (endless, least))
    assert rows(as_before, as_before)[row].status == "pass", "the plain server does not end there either"


@pytest.mark.parametrize(
    ("row", "wrong"),
    [
        ("tool-call", replace(CALL, calls=[{"name": "lookup", "arguments": '{"name": "WRONG"}'}])),
        ("tool-follow-up", replace(TEXT, content="garbage")),
        ("structured-output", replace(FORM, content='{"name": "WRONG", "count": 9}')),
    ],
)
def test_what_the_recording_failed_to_get_is_compared_with_nothing(row: str, wrong: ToolReply) -> None:
    got, right = numbered((wrong, 20)), replace(wrong)
    for plain in ([replace(BUSY, question="0")], numbered((BUSY, 20)), numbered((BUSY, 11), (right, 9))):
        found = rows(got, plain)[row]
        assert found.status == "skipped" and "holds HTTP 503: busy" in found.message, found.message
    some = rows(got, numbered((BUSY, 4), (right, 16)))[row]
    assert some.status == "pass" and "4 of 20 are not compared" in some.message, some.message
    assert rows(got, [replace(REFUSED, question="0")])[row].status == "pass", "a refusal is no lost comparison"


def test_what_the_plain_server_refused_may_be_answered_empty() -> None:
    for plain in (REFUSED, BUSY):
        found = rows(numbered((TEXT, 3), (SILENT, 1)), numbered((TEXT, 3), (plain, 1)))["tool-follow-up"]
        assert found.status == "pass" and found.seen == 3, found.message
        alone = rows(numbered((SILENT, 4)), numbered((plain, 4)))["tool-follow-up"]
        assert alone.status == "skipped" and "the plain server gave none" in alone.message, alone.message
    assert image(ToolReply(), REFUSED) == "skipped" and image(ToolReply(), TEXT) == "fail"


def image(got: ToolReply, plain: ToolReply) -> str:
    sides: list[Any] = [Recording("u", {}, 8, [], image=replace(each, question="image")) for each in (got, plain)]
    return check_image(*sides).status


THOUGHT, SAID = "The list is short, so it loops.", "It sorts."


def answers(count: int, reasoned: int = len(THOUGHT), wrong: int = 0, ends: str = "stop") -> list[Transcript]:
    """The first `wrong` of them give all of it out as reasoning."""
    text = THOUGHT + SAID
    return [
        Transcript(str(i), "c", [], text, ends, None, reasoned=len(text) if i < wrong else reasoned)
        for i in range(count)
    ]


def seams(whole: list[Transcript], streams: list[Transcript], plain: Recording | None) -> tuple[str, str]:
    got = Recording("u", {}, 99, whole, streamed=streams, later=streams)
    return check_lossless(got, plain, GateLimits()).status, check_stream(got, plain, 0.5)[0].status


def test_reasoning_given_out_as_the_answer_is_found() -> None:
    sound = answers(60)
    plain = Recording("u", {}, 99, sound, repeats=[RecordedPass(16, sound)], streamed=sound)
    assert seams(sound, sound, plain) == ("pass", "pass")
    assert seams(sound, answers(60, 0), plain) == ("pass", "fail"), "all streams leak"
    assert seams(answers(60, wrong=3), answers(60, wrong=3), plain) == ("fail", "fail"), "three answers are not shown"
    late = answers(60, len(THOUGHT + SAID) - 3)
    assert seams(late, late, plain) == ("fail", "fail"), "all but three characters is reasoning"
    assert seams(sound, answers(60, 0), None) == ("skipped", "fail") and seams(late, late, None)[1] == "pass"
    spaced = [replace(item, text=f"{THOUGHT}\n\n{SAID}", reasoned=len(THOUGHT)) for item in sound]
    assert seams(sound, spaced, plain) == ("pass", "pass"), "white space at the seam is none of either"


def test_what_the_plain_servers_parser_does_as_well_is_no_fault() -> None:
    """Without </think>, a parser of whole answers may take all for content, and one of streams all for reasoning."""
    cut, cut_stream = answers(60, 0, ends="length"), answers(60, len(THOUGHT + SAID), ends="length")
    plain = Recording("u", {}, 99, cut, streamed=cut_stream)
    assert seams(cut, cut_stream, plain) == ("pass", "pass") == seams(cut, cut_stream, replace(plain, streamed=[]))
    assert seams(cut, cut_stream, None)[1] == "pass"
    assert seams(cut, cut, plain)[1] == "fail", "the plain server's streams give it out as reasoning"


def test_empty_answers_are_counted_beside_the_plain_servers() -> None:
    """7 of 120 questions for none: p = 0.007, and 5.8 % of the answers; 6 have p = 0.014."""
    nothing = [replace(item, text="", reasoned=0) for item in answers(7)]
    plain = Recording("u", {}, 99, answers(120), streamed=answers(120))
    for count, wanted in ((7, "fail"), (6, "pass")):
        mine = [*nothing[:count], *answers(120)[count:]]
        assert check_degenerate(Recording("u", {}, 99, mine, streamed=mine), plain).status == wanted


def test_a_recording_of_few_answers_is_no_baseline() -> None:
    failed = [replace(item, text="", error="HTTP 500: x") for item in answers(60)]
    got = Recording("u", {}, 99, answers(60))
    for few, wanted in ((3, "skipped"), (29, "skipped"), (30, "pass")):
        plain = Recording("u", {}, 99, [*answers(few), *failed[few:]], stopped="8 requests failed")
        found = check_lossless(got, plain, GateLimits())
        assert found.status == wanted and ("of 60 answers" in found.message) == (wanted == "skipped"), found.message
        assert check_answers(got, plain).message.startswith("60 of 60 requests answered"), "those too were asked"


@pytest.mark.parametrize(
    ("mine", "plain", "wanted"),
    [(32, None, "fail"), (31, None, "pass"), (32, 0, "fail"), (32, 32, "pass"), (20, 0, "fail"), (8, 0, "pass"),
     (20, 14, "pass"), (32, 31, "pass")],
)  # fmt: skip
def test_a_burst_that_is_refused(mine: int, plain: int | None, wanted: str) -> None:
    """Some may be refused, as a full server does; not all of them, nor most where the plain server takes them."""
    sides = [Recording("u", {}, 9, answers(2), burst=BurstReply(32, count or 0, 0)) for count in (mine, plain)]
    assert check_answers(sides[0], None if plain is None else sides[1]).status == wanted


def test_a_recording_with_failures_says_so(cheating: str, tmp_path: Path) -> None:
    """Requests with tools and follow-ups get HTTP 500 here; the first failure stops none of the others."""
    path = tmp_path / "plain.json"
    url = cheats.at(cheating, "plain", "features-error")
    done = trtspec("check", url, "--record", path, "--samples", 2, "--max-tokens", 16, "--contexts", 0)
    found = read_recording(path)
    assert "is no whole baseline, record it again: " in done.stderr and "next: " not in done.stderr, done.stderr
    assert len(found.tools) == len(found.follow_ups) == 2 and all(reply.error for reply in found.tools)
    assert failures(replace(found, tools=[REFUSED], follow_ups=[], forms=[])) is None
