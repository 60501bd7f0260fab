"""The gate beside a plain server that ends, that failed, or that splits its answers: counted by hand, judged by row."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from trtspec.bench.features import check_follow_ups, check_image, check_tool_calls
from trtspec.bench.forms import check_forms
from trtspec.bench.gate import CheckResult
from trtspec.bench.transcript import Recording, ToolReply

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
