"""The gate: honest servers pass, near-ties are told from defects, and every cheat is found by its code."""

from __future__ import annotations

import json
import xml.etree.ElementTree as xml
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.bench import cheats
from tests.bench.cheating_server import ACCEPTANCE_CHEATS, CHEATS, LONG_CHEATS, TEXT_CHEATS, TOKEN_CHEATS
from tests.command_line import Done, trtspec
from trtspec.bench.arguments import compare_turns
from trtspec.bench.asking import Asker
from trtspec.bench.battery import stop_word
from trtspec.bench.check import check_degenerate
from trtspec.bench.drafting import check_acceptance
from trtspec.bench.endings import check_finish, check_stops
from trtspec.bench.features import (
    check_follow_ups,
    check_image,
    check_tool_calls,
    check_tool_streams,
)
from trtspec.bench.forms import check_forms
from trtspec.bench.lossless import compare_transcripts, first_divergence, tokens_show
from trtspec.bench.parameters import NO_ANSWER, check_parameters
from trtspec.bench.parameters import REFUSED as DECLINED
from trtspec.bench.transcript import ParameterReply, Recording, Token, ToolReply, Transcript, visible_text
from trtspec.bench.visible import check_stream, check_visible_text
from trtspec.client.servers import FROM_COUNTERS

FEW = 6
# what each cheat is caught by: one of these codes is among those of the verdict
CAUGHT_BY = {
    "text-altered": {"TEXT", "NOT-LOSSLESS"},
    "text-emptied": {"TEXT"},
    "text-truncated": {"TEXT", "NOT-LOSSLESS"},
    "stream-altered": {"STREAM"},
    "sampling": {"NOT-LOSSLESS", "NOT-REPEATABLE"},
    "different-tokens": {"NOT-LOSSLESS"},
    "loops": {"DEGENERATE", "NOT-LOSSLESS"},
    "tool-dropped": {"TOOL-CALL"},
    "tool-malformed": {"TOOL-CALL"},
    "tool-arguments": {"TOOL-CALL"},
    "tool-stream-altered": {"TOOL-STREAM"},
    "tool-stream-dropped": {"TOOL-STREAM"},
    "tool-unindexed": {"TOOL-STREAM"},
    "follow-up-refused": {"TOOL-FOLLOW-UP"},
    "follow-up-empty": {"TOOL-FOLLOW-UP"},
    "follow-up-calls": {"TOOL-FOLLOW-UP"},
    "forced-constant": {"FORCED-ACCEPTANCE"},
    "forced-fractional": {"FORCED-ACCEPTANCE"},
    "claimed": {"CLAIM"},
    "claimed-against-usage": {"CLAIM"},
    "inflated-usage": {"USAGE"},
    "collapse-burst": {"ACCEPTANCE-BURST"},
    "collapse-warm": {"ACCEPTANCE-WARM"},
    "collapse-long": {"ACCEPTANCE-LONG"},
    "slow-later": {"SLOWER"},
    "slower": {"SLOWER"},
    "buffering": {"BUFFERED"},
    "pieces": {"BUFFERED"},
    "hang": {"ANSWERS"},
    "http-429": {"ANSWERS"},
    "http-503": {"ANSWERS"},
    "reset": {"ANSWERS"},
    "html": {"ANSWERS"},
    "cut-stream": {"ANSWERS"},
    "form-broken": {"STRUCTURED"},
    "form-altered": {"STRUCTURED"},
    "stop-ignored": {"STOP"},
    "stop-altered": {"STOP"},
    "finish-wrong": {"FINISH-REASON"},
    "features-error": {"TOOL-CALL", "TOOL-FOLLOW-UP"},
    "probe-kills": {"ANSWERS"},
    "not-utf8": {"DEGENERATE", "NOT-LOSSLESS"},
    "other-context": {"CONTEXT"},
    "long-altered": {"NOT-LOSSLESS"},
    "long-errors": {"ANSWERS"},
    "warm-truncated": {"CONTEXT"},
    "system-refused": {"ANSWERS"},
}
# looked for in few answers only, so a fault in 5 % of them is not promised to show: the verdict's power says so
FEW_ASKED = {"form-broken", "form-altered", "stop-ignored", "stop-altered", "probe-kills", "system-refused"}
OF_A_PASS = {"slower"}  # a single answer takes three times as long wherever another process works beside it
# What a server that tells nothing but text is caught by instead, and what it hides: the row that would show the lie is
# skipped, for this reason. Of all other kinds and cheats, CAUGHT_BY says what catches them.
OTHERWISE = {("unknown", "text-emptied"): {"NOT-LOSSLESS"}}
NO_STEPS = "neither the answers nor their streams tell how many steps they took"
HIDDEN = {
    ("unknown", "forced-constant"): ("forced-acceptance", NO_STEPS),
    ("unknown", "forced-fractional"): ("forced-acceptance", NO_STEPS),
    ("unknown", "claimed"): ("acceptance-claims", "neither the answers nor counters claim anything"),
    ("unknown", "claimed-against-usage"): ("acceptance-claims", "neither the answers nor counters claim anything"),
    ("unknown", "inflated-usage"): ("usage", "the server tells no completion_tokens"),
    ("unknown", "collapse-burst"): ("acceptance-after-burst", NO_STEPS),
    ("unknown", "collapse-warm"): ("acceptance-warm", NO_STEPS),
    ("unknown", "collapse-long"): ("acceptance-long-context", NO_STEPS),
    ("unknown", "other-context"): ("context", "a server does not tell prompt_tokens"),
}
# lies about what is measured are told by each kind; the others show in the text and calls that all kinds have, so that
# the two kinds whose fields are those of no other one tell them once between them
MEASURED = (*TEXT_CHEATS, *TOKEN_CHEATS, *ACCEPTANCE_CHEATS, "other-context")
CASES = [
    (kind, cheat)
    for cheat in CHEATS
    for kind in ("reference", "trtllm", "vllm", "unknown")
    if kind != "unknown" or cheat in MEASURED
]
UNTOLD = {"context", "visible-text", "usage", "acceptance", "acceptance-claims", "forced-acceptance", "acceptance-warm",
          "acceptance-after-burst", "acceptance-long-context"}  # fmt: skip
QUICK = [("reference", "text-altered"), ("trtllm", "stream-altered"), ("trtllm", "tool-malformed"),
         ("trtllm", "tool-stream-altered"),
         ("trtllm", "forced-fractional"), ("reference", "http-503")]  # fmt: skip


def check(*words: object) -> tuple[Done, dict[str, Any]]:
    done = trtspec("check", *words, "--json")
    return done, json.loads(done.stdout) if done.stdout else {}


def row(verdict: dict[str, Any], name: str) -> dict[str, Any]:
    return next(entry for entry in verdict["results"] if entry["name"] == name)


@pytest.fixture(scope="session")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("prompts") / "questions.jsonl"
    path.write_text("".join(json.dumps({"id": q.id, "turns": list(q.turns)}) + "\n" for q in cheats.questions(4)))
    return path


@pytest.fixture(scope="session")
def recording(cheating: str, prompts: Path) -> Path:
    """The plain server, recorded by the command."""
    path = prompts.with_name("plain.json")
    done, verdict = check(cheats.at(cheating, "plain"), "--record", path, "--dataset", prompts, "--contexts", "300")
    assert done.status == 0 and row(verdict, "lossless")["status"] == "skipped", done.stderr
    return path


@pytest.mark.parametrize(
    ("kind", "untold"),
    [
        ("reference", set()),
        ("trtllm", {"visible-text"}),
        pytest.param("vllm", set(), marks=pytest.mark.slow),
        pytest.param("unknown", UNTOLD, marks=pytest.mark.slow),
    ],
)
def test_honest_servers_pass(cheating: str, kind: str, untold: set[str]) -> None:
    got = cheats.recorded(cheats.at(cheating, kind), FEW, contexts=(2048,))
    floor = None if "acceptance" in untold else 2.0
    verdict = cheats.judged(got, cheats.plain(cheating, FEW, (2048,)), min_acceptance=floor)
    assert not verdict.failed, [found for found in verdict.results if found.status == "fail"]
    skipped = {name for name, status in cheats.statuses(verdict).items() if status == "skipped"}
    assert skipped - {"streaming"} == {"image"} | untold


@pytest.mark.parametrize(("kind", "cheat"), QUICK)
def test_a_cheat_is_caught_by_its_code(cheating: str, kind: str, cheat: str) -> None:
    got = cheats.recorded(cheats.at(cheating, kind, cheat), FEW)
    found = cheats.codes(cheats.judged(got, cheats.plain(cheating, FEW)))
    assert found & {f"TS-CHECK-{code}" for code in CAUGHT_BY[cheat]}


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "cheat"), CASES)
def test_every_cheat_is_caught(cheating: str, kind: str, cheat: str) -> None:
    """Or the row that would show it is skipped, and says why."""
    url = cheats.at(cheating, kind, cheat)
    got = cheats.recorded(url, FEW, contexts=(2048,), timeout=2.0 if cheat == "hang" else 20.0)
    verdict = cheats.judged(got, cheats.plain(cheating, FEW, (2048,)))
    if (kind, cheat) in HIDDEN:
        name, reason = HIDDEN[kind, cheat]
        hidden = next(found for found in verdict.results if found.name == name)
        assert hidden.status == "skipped" and reason in hidden.message, hidden
        return
    found, wanted = cheats.codes(verdict), OTHERWISE.get((kind, cheat), CAUGHT_BY[cheat])
    assert found & {f"TS-CHECK-{code}" for code in wanted}, f"{cheat}: {found}"


def test_counters_of_a_server_that_answers_nothing_are_no_measure(cheating: str) -> None:
    """vLLM's counters can be read while every answer fails: neither command may divide by the answers."""
    url = cheats.at(cheating, "vllm", "http-503")
    checked = trtspec("check", url, "--samples", 2, "--max-tokens", 8, "--contexts", 0)
    benched = trtspec("bench", url, "--samples", 2, "--max-tokens", 8, "--concurrency", 1, "--warmup", 0)
    assert checked.status in (1, 3) and benched.status == 1, (checked.stderr, benched.stderr)
    assert not [done for done in (checked, benched) if "unexpected" in done.stderr or "Traceback" in done.stderr]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["reference", "trtllm"])
@pytest.mark.parametrize("cheat", [cheat for cheat in CHEATS if cheat not in FEW_ASKED | OF_A_PASS])
def test_every_cheat_is_caught_in_5_percent_of_the_answers(cheating: str, kind: str, cheat: str) -> None:
    """60 answers of each sort show a fault in 5 % of them with 95 %; the dice of the servers are fixed, so a test
    passes or fails for good."""
    long, samples = (30, 30) if cheat == "collapse-long" or cheat in LONG_CHEATS else (3, 60)
    long = 60 if cheat == "warm-truncated" else long  # it shows in those that are asked again
    got = cheats.recorded(
        cheats.at(cheating, kind, cheat, 0.05), samples, contexts=(2048,), per_context=long,
        timeout=2.0 if cheat == "hang" else 20.0,
    )  # fmt: skip
    verdict = cheats.judged(got, cheats.plain(cheating, samples, (2048,), long))
    assert cheats.codes(verdict) & {f"TS-CHECK-{code}" for code in CAUGHT_BY[cheat]}, cheats.codes(verdict)


def test_drafts_accepted_past_the_end_of_answers_are_taken_out(cheating: str) -> None:
    """vLLM's counters hold them; the reference server tells of the same steps without them."""
    counted, told = (cheats.recorded(cheats.at(cheating, kind), FEW) for kind in ("vllm", "reference"))
    found, truth = (check_acceptance(each, None) for each in (counted, told))
    assert found.detail["source"] == FROM_COUNTERS and counted.counts[0].surplus > 0
    assert found.detail["acceptance_length"] == truth.detail["acceptance_length"]
    assert f"over {len(counted.answered)} greedy answers" in found.message


def test_near_ties_pass_and_are_listed(cheating: str) -> None:
    far = (2048,)
    plain = cheats.recorded(cheats.at(cheating, "plain", "honest", 1, "rounding"), FEW, True, far, per_context=6)
    swapped = cheats.at(cheating, "reference", "honest", 1, "swapped", "rounding")
    got = cheats.recorded(swapped, FEW, contexts=far, per_context=6)
    verdict = cheats.judged(got, plain)
    long = next(row for row in verdict.results if row.name == "long-context")
    assert long.status == "pass" and "0 part at" not in long.message and not long.detail["real"], long.message
    tools = next(row for row in verdict.results if row.name == "tool-call")
    assert tools.status == "pass" and tools.detail["arguments"]["near_ties"] == ["open_file", "sort_rows"], tools
    behind = next(row for row in verdict.results if row.name == "tool-follow-up")
    assert behind.status == "pass" and behind.detail["texts"]["near_ties"], behind
    found = next(row for row in verdict.results if row.name == "lossless")
    assert found.status == "pass" and found.detail["near_ties"] > 2 and found.detail["rounding"]["positions"] > 300
    assert found.detail["rounding"]["source"] == "the plain server's own passes"
    assert all(entry["gap_expected"] <= entry["bound"] < 0.01 for entry in found.detail["divergences"])


@pytest.mark.slow
def test_wild_rounding_excuses_nothing(cheating: str) -> None:
    """Log-probabilities that move by 3 nats are no rounding, whoever moves them: every divergence counts."""

    def asked(kind: str, *options: str) -> Recording:
        return cheats.recorded(cheats.at(cheating, kind, "honest", 1, *options), 3, kind == "plain")

    wild, noisy, defect = asked("plain", "wild"), asked("reference", "swapped", "wild"), asked("reference", "defect")
    for plain, got in ((wild, noisy), (wild, defect), (cheats.plain(cheating, FEW), noisy)):
        found = next(row for row in cheats.judged(got, plain).results if row.name == "lossless")
        assert found.status == "fail" and found.detail["real"] > 0 and found.detail["near_ties"] == 0
        assert found.detail["rounding"]["wild"] == (plain is wild) == ("excuses nothing" in found.message)
    same = cheats.judged(replace(wild, counts=[]), wild)
    assert cheats.statuses(same)["lossless"] == "pass", "equal answers need no excuse"


@pytest.mark.slow
def test_a_server_that_log_probabilities_end_lives_through_check_and_bench(prompts: Path, tmp_path: Path) -> None:
    """Before the release candidates of April 2026 one such request under speculation ended the engine. This process
    really exits; recorded as the baseline by mistake, a few answers show its drafts."""
    common = ("--dataset", prompts, "--contexts", "0")
    with cheats.running(tmp_path) as base:
        old = cheats.at(base, "trtllm", "honest", 1, "deadly", "version=1.2.1")
        done, _ = check(old, "--record", tmp_path / "a.json", *common)
        assert done.status == 0 and json.loads((tmp_path / "a.json").read_text())["withheld"], done.stderr
        plain = cheats.at(base, "trtllm", "honest", 1, "undrafted", "version=1.2.1")
        done, _ = check(plain, "--record", tmp_path / "c.json", *common)
        assert json.loads((tmp_path / "c.json").read_text())["withheld"], "its averages may be those of a broken head"
        done, _ = check(plain, "--record", tmp_path / "b.json", "--logprobs", *common)
        assert done.status == 0 and json.loads((tmp_path / "b.json").read_text())["withheld"] is None
        done, verdict = check(old, "--against", tmp_path / "b.json")
        assert done.status == 0 and row(verdict, "lossless")["status"] == "pass", done.stderr
        assert row(verdict, "visible-text")["status"] == "skipped"
        words = ("bench", old, "--dataset", prompts, "--samples", 2, "--concurrency", 1, "--extra-body")
        for body, says in (({"logprobs": True}, "ends the engine"), ({"min_length": 3}, "ignores min_length")):
            bench = trtspec(*words, json.dumps(body))
            assert says in bench.stdout + bench.stderr and (bench.status == 2) == ("logprobs" in body)
        with pytest.raises(httpx.HTTPError):  # what it is spared from
            httpx.post(f"{old}/v1/chat/completions", json={"messages": [], "logprobs": True}, trust_env=False)


@pytest.mark.slow
def test_without_any_log_probabilities_nobody_can_judge(cheating: str) -> None:
    plain = cheats.recorded(cheats.at(cheating, "plain", "honest", 1, "no-logprobs"), FEW, baseline=True)
    verdict = cheats.judged(cheats.recorded(cheats.at(cheating, "trtllm", "honest", 1, "swapped"), FEW), plain)
    found = next(row for row in verdict.results if row.name == "lossless")
    assert found.status == "fail" and found.detail["unjudged"] > 0


@pytest.mark.slow
def test_what_the_plain_server_refused_does_not_fail_the_other_one(cheating: str) -> None:
    plain = cheats.recorded(cheats.at(cheating, "plain", "follow-up-refused", 1, "no-tools"), FEW, baseline=True)
    for options in ((), ("no-tools",)):
        verdict = cheats.judged(cheats.recorded(cheats.at(cheating, "reference", "honest", 1, *options), FEW), plain)
        assert not verdict.failed
        assert cheats.statuses(verdict)["tool-call"] == ("skipped" if options else "pass")


@pytest.mark.slow
def test_a_server_that_is_silent_as_the_plain_one_is_passes(cheating: str) -> None:
    plain = cheats.recorded(cheats.at(cheating, "plain", "honest", 1, "silent", "looping", "no-calls"), FEW, True)
    got = cheats.recorded(cheats.at(cheating, "reference", "honest", 1, "silent", "looping", "no-calls"), FEW)
    verdict = cheats.judged(got, plain)
    assert not verdict.failed and cheats.statuses(verdict)["tool-call"] == "skipped"
    assert "the target itself is like this" in next(r.message for r in verdict.results if r.name == "degenerate-output")


def replied(calls: list[str], content: str = "", **more: Any) -> ToolReply:
    made = [{"name": "lookup", "arguments": arguments} for arguments in calls]
    return ToolReply(made, content, question="q", finish_reason="tool_calls" if calls else "stop", **more)


CALL, MALFORMED, WRITES, SILENT = ['{"name": "a"}'], ['{"name": "a'], "It reads a file.", ""
FORM = '{"name": "a", "count": 1}'


@pytest.mark.parametrize(
    ("got", "plain", "wanted"),
    [
        (replied(CALL), replied(CALL), "pass"),
        (replied(CALL), replied([], WRITES), "pass"),  # the plain server never calls: the form alone is judged
        (replied(CALL), ToolReply(error="HTTP 400", question="q"), "pass"),
        (replied(MALFORMED), replied(CALL), "fail"),
        (replied([], WRITES), replied(CALL), "fail"),
        (replied(MALFORMED), replied([], WRITES), "fail"),
        (replied([], SILENT), replied([], WRITES), "fail"),
        (replied(MALFORMED), replied(MALFORMED), "skipped"),
        (replied([], WRITES), replied([], WRITES), "skipped"),
        (replied([], SILENT), replied([], SILENT), "skipped"),
        (ToolReply(error="HTTP 400", question="q"), ToolReply(error="HTTP 400", question="q"), "skipped"),
    ],
)
def test_a_tool_call_is_judged_beside_the_plain_server(got: ToolReply, plain: ToolReply, wanted: str) -> None:
    """Nothing that the plain server does as well fails, and nothing passes of which no sound call was seen."""
    found = check_tool_calls(*(Recording("u", {}, 8, [], tools=[reply]) for reply in (got, plain)), limit=0.5)
    assert found.status == wanted, found.message
    assert (found.seen == 1) == (wanted == "pass")
    if got.calls and not plain.calls and not plain.error and wanted == "pass":
        assert "the plain server makes no call" in found.message


REFUSED = ToolReply(error="HTTP 400: no", question="q")
BROKEN = ToolReply(error="HTTP 500: broken", question="q")
CUT = ToolReply(reasoning="The user wants", finish_reason="length", question="q")
EMPTY = ToolReply(reasoning="The user wants this.", finish_reason="stop", question="q")
TAGGED = "<think>The user wants this.</think>"  # where no parser takes the reasoning out
OPEN = replace(CUT, reasoning="", content="<think>The user wants")


@pytest.mark.parametrize(
    ("got", "plain", "wanted", "seen"),
    [
        ([CUT] * 8, None, "skipped", None),
        ([CUT, WRITES], None, "pass", 1),
        ([OPEN] * 8, None, "skipped", None),
        ([f"{TAGGED}\n\n", WRITES], [WRITES] * 2, "fail", None),
        ([f"{TAGGED}{WRITES}"] * 2, None, "pass", 2),
        ([EMPTY, WRITES], None, "fail", None),
        ([EMPTY, WRITES], [WRITES] * 2, "fail", None),
        ([EMPTY, WRITES], [EMPTY, WRITES], "pass", 2),
        ([EMPTY, WRITES], [CUT, WRITES], "pass", 1),  # whether the model itself ends there is not known
        ([WRITES, REFUSED, WRITES], [WRITES, REFUSED, WRITES], "pass", 2),
        ([WRITES, REFUSED, WRITES], [REFUSED], "pass", 2),  # the plain server was not asked again
        ([WRITES, REFUSED, WRITES], [WRITES] * 3, "fail", None),
        ([WRITES, REFUSED, WRITES], None, "fail", None),
        ([REFUSED], [REFUSED], "skipped", None),
        ([BROKEN], None, "fail", None),  # no refusal
        ([BROKEN], [BROKEN], "skipped", None),
    ],
)
def test_follow_ups_are_judged_one_by_one(got: list[Any], plain: list[Any] | None, wanted: str, seen: int) -> None:
    sides = [None if one is None else Recording("u", {}, 8, [], follow_ups=numbered(one)) for one in (got, plain)]
    found = check_follow_ups(*sides, limit=0.5)  # type: ignore[arg-type]
    assert (found.status, found.seen) == (wanted, seen), found.message
    tools = [replace(reply, calls=replied(CALL).calls) if reply.content else reply for reply in numbered(got)]
    beside = None if plain is None else Recording("u", {}, 8, [], tools=numbered(plain))
    if REFUSED in got or BROKEN in got:
        assert check_tool_calls(Recording("u", {}, 8, [], tools=tools), beside, 0.5).status == wanted


def numbered(replies: list[Any]) -> list[ToolReply]:
    """Replies to questions 0, 1 ...; a text is one that ends by itself."""
    made = [replied([], reply) if isinstance(reply, str) else reply for reply in replies]
    return [replace(reply, question=str(place)) for place, reply in enumerate(made)]


@pytest.mark.parametrize(
    ("got", "plain", "wanted", "seen"),
    [
        ([CUT] * 8, None, "skipped", None),
        ([CUT, FORM], None, "pass", 1),
        (["nonsense"] * 7 + [REFUSED], None, "fail", None),
        (["nonsense"] * 7 + [REFUSED], [FORM] * 7 + [REFUSED], "fail", None),
        (["nonsense"] * 7 + [REFUSED], ["nonsense"] * 7 + [REFUSED], "skipped", None),
        ([FORM] * 7 + [REFUSED], [FORM] * 7 + [REFUSED], "pass", 7),
        ([FORM] * 7 + [REFUSED], [FORM] * 8, "fail", None),
        ([REFUSED], None, "skipped", None),
        ([BROKEN], None, "fail", None),  # no refusal
        ([BROKEN], [BROKEN], "skipped", None),
    ],
)
def test_forms_are_judged_one_by_one(got: list[Any], plain: list[Any] | None, wanted: str, seen: int) -> None:
    sides = [None if one is None else Recording("u", {}, 8, [], forms=numbered(one)) for one in (got, plain)]
    found = check_forms(*sides, limit=0.5)  # type: ignore[arg-type]
    assert (found.status, found.seen) == (wanted, seen), found.message


@pytest.mark.slow
def test_answers_that_think_long_are_given_room(cheating: str) -> None:
    """With 128 tokens, none of these answers would get behind its reasoning, where the empty ones are."""
    got, empty = (
        cheats.recorded(cheats.at(cheating, "unknown", cheat, 1, "thinks-long"), FEW)
        for cheat in ("honest", "follow-up-empty")
    )
    found = [check_follow_ups(got, None, 0.5), check_forms(got, None, 0.5), check_tool_calls(got, None, 0.5)]
    found.append(check_tool_streams(got, None, 0.5))
    assert [(row.status, row.seen) for row in found] == [("pass", FEW)] * 4, found
    assert check_follow_ups(empty, got, 0.5).status == "fail"


TIMEOUT = ToolReply(error="no answer within 120 s (--timeout)", question="q")


@pytest.mark.parametrize(
    ("got", "plain", "wanted"),
    [
        (TIMEOUT, None, "fail"),
        (TIMEOUT, replied([], WRITES), "fail"),
        (REFUSED, replied([], WRITES), "fail"),
        (REFUSED, None, "skipped"),
        (TIMEOUT, REFUSED, "skipped"),
        (replied([]), replied([]), "skipped"),
        (replied([]), replied([], WRITES), "fail"),
        (replied([], WRITES), TIMEOUT, "pass"),
    ],
)
def test_an_image_that_fails_is_not_text_only(got: ToolReply, plain: ToolReply | None, wanted: str) -> None:
    expected = None if plain is None else Recording("u", {}, 8, [], image=plain)
    assert check_image(Recording("u", {}, 8, [], image=got), expected).status == wanted


LONGER = "It reads all of the files that the list names and sorts what they hold"
CUTS = "It reads all of the"  # `files that the` is the stop string


@pytest.mark.parametrize(
    ("got", "plain", "wanted"),
    [
        ([CUTS, CUTS], None, "pass"),
        ([LONGER, CUTS], [CUTS, CUTS], "fail"),
        ([LONGER, CUTS], [LONGER, CUTS], "pass"),
        ([BROKEN] * 2, None, "fail"),
        ([REFUSED] * 2, None, "skipped"),
        ([BROKEN] * 2, [CUTS, CUTS], "fail"),
        ([BROKEN] * 2, [BROKEN] * 2, "skipped"),
        ([CUTS, REFUSED], [CUTS, CUTS], "fail"),
    ],
)
def test_stop_strings_are_judged_beside_the_plain_server(got: list[Any], plain: list[Any] | None, wanted: str) -> None:
    whole = [replace(transcript(None, LONGER), question=str(index)) for index in range(2)]
    sides = [None if one is None else Recording("u", {}, 8, whole, stops=numbered(one)) for one in (got, plain)]
    found = check_stops(*sides, limit=0.5)  # type: ignore[arg-type]
    assert found.status == wanted, found.message


def test_another_text_before_the_stop_string_is_judged_as_other_answers_are() -> None:
    spelled: list[tuple[str, str | None, float]] = [(f"{word} ", "and", 2.0) for word in LONGER.split()]
    whole = [replace(transcript(spelled), question=str(index)) for index in range(8)]
    untold = [replace(item, tokens=None) for item in whole]

    def judged(stops: list[Any], answers: list[Transcript] = untold, plain: list[Any] | None = None) -> str:
        sides = [Recording("u", {}, 8, answers, stops=numbered(each)) for each in (stops, plain or [CUTS] * 8)]
        return check_stops(*sides, limit=0.5).status

    garbage, honest = "Bananas are yellow", [CUTS] * 7
    assert judged([CUTS] * 8) == "pass"
    assert judged([CUTS, *[garbage] * 7]) == "fail", "the plain server never takes another way"
    assert judged([garbage, *honest]) == "skipped", "no log-probabilities tell why"
    assert judged([garbage, *honest], whole) == "fail", "the target is sure of itself"
    assert judged([garbage, *honest], plain=[garbage, *honest]) == "pass", "it is the plain server's own"
    tied = [replace(item, tokens=[Token("It ", "Bananas", 1e-5), *(item.tokens or [])[1:]]) for item in whole]
    assert judged([garbage, *honest], tied) == "pass"


def test_equal_texts_end_alike() -> None:
    def judged(reasons: tuple[str | None, str | None], plain: str | None, **more: Any) -> str:
        one = transcript(None, LONGER)
        mine, streamed = (replace(one, finish_reason=reason, **more) for reason in reasons)
        got, told = Recording("u", {}, 9, [mine], streamed=[streamed]), replace(one, finish_reason=plain)
        return check_finish(got, Recording("u", {}, 9, [told], streamed=[told])).status

    assert judged(("stop", "stop"), "stop") == judged((None, None), None) == "pass"
    for wrong in ((None, "stop"), ("stop", "length"), ("length", "stop"), ("stop", None)):
        assert judged(wrong, "stop") == "fail", wrong
    assert judged(("length", "length"), "stop", completion_tokens=9) == "pass", "its end has the last place there is"
    assert judged(("stop", "stop"), "length", completion_tokens=9) == "fail"
    calls = [Recording("u", {}, 9, [], tools=[replace(replied(CALL), finish_reason=reason)],
                       streamed_tools=[replied(CALL)]) for reason in ("stop", "tool_calls", "length")]  # fmt: skip
    assert check_finish(calls[0], calls[0]).status == "pass", "streams and whole calls are compared with their like"
    assert check_finish(calls[0], calls[1]).status == check_finish(calls[2], calls[1]).status == "fail"
    assert check_finish(calls[1], calls[2]).status == "pass", "cut off behind its call, and asked again with room"
    alone = Recording(
        "u", {}, 9, [transcript(None, LONGER)], streamed=[replace(transcript(None, LONGER), finish_reason="length")]
    )
    assert (
        check_finish(alone, None).status == "fail"
        and check_finish(replace(alone, streamed=[]), None).status == "skipped"
    )


def test_a_probe_that_fails_is_no_refusal() -> None:
    words = "All connection attempts failed"
    got = Recording("u", {}, 9, [], parameters=[ParameterReply("seed", NO_ANSWER, words)])
    assert check_parameters(got, None).status == "skipped"
    got = replace(got, parameters=[*got.parameters, ParameterReply("bad", DECLINED, "HTTP 400: unknown")])
    found = check_parameters(got, None)
    assert found.status == "pass" and found.message == f"refused: bad; no answer to: seed ({words})"


def test_a_stop_string_stands_in_no_reasoning() -> None:
    """The engine would stop there."""
    plain = transcript(None, LONGER)
    thinking = replace(plain, text=f"Which files that the list names? {LONGER}", reasoned=33)
    assert thinking.content == LONGER and stop_word(plain) == "files that the"
    assert str(stop_word(thinking)) not in thinking.text[:33]


def named(*arguments: str, **more: Any) -> list[ToolReply]:
    return [replace(replied([f'{{"name": "{name}"}}'], **more), question=str(i)) for i, name in enumerate(arguments)]


def test_arguments_of_calls_are_compared() -> None:
    """Without log-probabilities by how often the plain server's own calls differ, with them one by one."""

    def judged(got: list[ToolReply], **passes: list[ToolReply]) -> tuple[str, str]:
        expected = Recording("u", {}, 8, [], **passes)  # type: ignore[arg-type]
        found = check_tool_calls(Recording("u", {}, 8, [], tools=got), expected, 0.5)
        return found.status, found.message

    same, other = named(*"abcdefghijkl"), named(*"mnopqrstuvwx")
    assert judged(same, tools=same, streamed_tools=same)[0] == "pass"
    assert judged(other, tools=same, streamed_tools=same)[0] == "fail"
    assert judged([*other[:1], *same[1:]], tools=same, streamed_tools=same)[0] == "skipped"
    assert judged(other, tools=same, streamed_tools=named(*"ABCDEFGHIJKL"))[0] == "skipped", "its own calls differ"
    assert judged(other, tools=same, streamed_tools=other)[0] == "pass", "they are the plain server's own"
    for gap, wanted in ((1e-5, "pass"), (2.0, "fail")):
        sure = [Token(text, "no", 3.0) for text in ("</think>", '{"name": "', "a", '"}')]
        told = [replace(same[0], tokens=[*sure[:2], Token("a", "m", gap), sure[3]])]
        status, message = judged([*other[:1], *same[1:]], tools=same, repeated_tools=told)
        assert (status, " at a near-tie" in message) == (wanted, wanted == "pass"), message
        assert judged([*named("z"), *same[1:]], tools=same, repeated_tools=told)[0] == "fail", "z is no runner-up"
        thought = [replace(same[0], reasoning="hm"), *same[1:]]
        told = [replace(thought[0], tokens=[Token("hm ", "so ", gap), *sure])]
        parted, only = replace(other[0], reasoning="so what"), replace(other[0], reasoning="hm\n")
        assert judged([parted, *same[1:]], tools=thought, repeated_tools=told)[0] == wanted, "the reasoning parts first"
        assert judged([only, *same[1:]], tools=thought, repeated_tools=told)[0] == "fail"


def test_texts_behind_a_tools_result_are_compared() -> None:
    def judged(got: list[ToolReply], plain: list[ToolReply], again: list[ToolReply]) -> str:
        expected = Recording("u", {}, 8, [], follow_ups=plain, repeated_follow_ups=again)
        return check_follow_ups(Recording("u", {}, 8, [], follow_ups=got), expected, 0.5).status

    same, other = numbered([WRITES] * 12), numbered(["It sorts a file."] * 12)
    assert judged(same, same, same) == "pass" == judged(other, same, other)
    assert judged(other, same, same) == "fail"
    assert judged([*other[:1], *same[1:]], same, same) == judged(other, same, []) == "skipped"
    for gap, wanted in ((1e-5, "pass"), (2.0, "fail")):
        tokens = [Token(text, second, gap) for text, second in (("It ", "no"), ("reads ", "sorts "), ("a file.", "no"))]
        told = [replace(same[0], tokens=tokens)]
        assert judged([*other[:1], *same[1:]], same, told) == wanted


def told_answer(reply: ToolReply, *tokens: tuple[str, str, float]) -> ToolReply:
    return replace(reply, tokens=[Token(*token) for token in tokens])


def test_whether_an_answer_calls_is_judged_beside_all_passes_of_the_plain_server() -> None:
    """What a pass did is accepted; else its tokens tell whether the decision was a near-tie, or frequency does."""

    def judged(got: list[ToolReply], plain: list[ToolReply], again: list[ToolReply]) -> list[str]:
        mine = Recording("u", {}, 8, [], tools=got, follow_ups=got)
        tools = Recording("u", {}, 8, [], tools=plain, repeated_tools=again)
        texts = Recording("u", {}, 8, [], follow_ups=plain, repeated_follow_ups=again)
        return [check_tool_calls(mine, tools, 0.5).status, check_follow_ups(mine, texts, 0.5).status]

    calls, text = named(*"abcdefghijkl"), numbered([WRITES] * 12)
    flipped, both = [text[0], *calls[1:]], [replace(calls[0], calls=calls[0].calls * 2), *calls[1:]]
    assert judged(flipped, calls, flipped) == judged(both, calls, both) == ["pass", "pass"]
    assert judged(flipped, calls, calls) == judged(both, calls, calls) == ["skipped", "skipped"]
    assert judged([*text[:8], *calls[8:]], calls, calls) == ["fail", "fail"]
    assert judged(text, calls, []) == ["fail", "skipped"]
    assert judged(calls, text, text) == ["pass", "fail"], "where the plain server never calls, calls are judged by form"
    assert judged([calls[0], *text[1:]], text, text)[1] == "skipped"
    for gap, wanted in ((1e-5, "pass"), (2.0, "fail")):
        opens, first = ("<|call|>", "It", gap), ("It ", "<|call|>", gap)
        behind = ('{"name": "a"}', "no", 3.0)
        told = [told_answer(calls[0], ("</think>", "no", 3.0), opens, behind), *calls[1:]]
        assert judged(flipped, calls, told) == [wanted, wanted]
        ends = [told_answer(calls[0], opens, behind, ("<|end|>", "<|call|>", gap)), *calls[1:]]
        assert judged(both, calls, ends) == [wanted, wanted]
        told = [told_answer(text[0], first, ("reads a file.", "no", 3.0)), *text[1:]]
        assert judged([calls[0], *text[1:]], text, told)[1] == wanted
        told = [told_answer(text[0], ("</think>", "no", 3.0), first, ("reads a file.", "no", 3.0)), *text[1:]]
        quiet = [replied([], SILENT, reasoning=""), *text[1:]]
        assert judged([replace(quiet[0], question="0"), *text[1:]], text, told)[1] == wanted


def test_what_forms_hold_is_compared() -> None:
    def judged(got: list[Any], plain: list[Any], again: list[Any]) -> str:
        expected = Recording("u", {}, 8, [], forms=numbered(plain), repeated_forms=numbered(again))
        return check_forms(Recording("u", {}, 8, [], forms=numbered(got)), expected, 0.5).status

    other, spaced = '{"name": "b", "count": 2}', '{"name":"a","count":1}'
    assert judged([FORM] * 8, [FORM] * 8, [FORM] * 8) == judged([spaced] * 8, [FORM] * 8, [FORM] * 8) == "pass"
    assert judged([other] * 8, [FORM] * 8, [FORM] * 8) == "fail"
    assert judged([other] * 8, [FORM] * 8, [other] * 8) == "pass", "it is the plain server's own"
    assert judged([other] * 8, [FORM] * 8, []) == "skipped"
    assert judged(["nonsense", *[FORM] * 7], [FORM] * 8, ["nonsense", *[FORM] * 7]) == "pass"
    for gap, wanted in ((1e-5, "pass"), (2.0, "fail")):
        tokens = ('{"name": "', "no", 3.0), ("a", "b", gap), ('", "count": 1}', "no", 3.0)
        told = [told_answer(replied([], FORM), *tokens), *[FORM] * 7]
        assert judged(['{"name": "b", "count": 1}', *[FORM] * 7], [FORM] * 8, told) == wanted


def test_a_streamed_call_is_put_together_and_compared() -> None:
    def judged(streamed: ToolReply, again: ToolReply | None = None) -> str:
        confirmed = [again] if again else []
        made = Recording("u", {}, 8, [], tools=[replied(CALL)], streamed_tools=[streamed], confirmed_tools=confirmed)
        return check_tool_streams(made, None, 0.5).status

    assert judged(replied(['{ "name":"a"}'])) == "pass", "JSON is compared, not its spaces"
    for wrong in (replied(['{"name": "b"}']), replied(MALFORMED), replied([]), replied(CALL * 2),
                  replied(CALL, unindexed=1), replace(replied(CALL), finish_reason="stop"),
                  ToolReply(error="cut", question="q")):  # fmt: skip
        assert judged(wrong) == judged(wrong, replied(CALL)) == "fail", wrong
    moved = replied(['{"name": "b"}'])
    assert judged(moved, moved) == "skipped", "the answer changed, streamed or not"
    assert check_tool_streams(Recording("u", {}, 8, [], tools=[replied([], WRITES)]), None, 0.5).status == "skipped"
    cut = Recording(
        "u", {}, 8, [], tools=[replace(replied(CALL), finish_reason="length")], streamed_tools=[replied(CALL)]
    )
    assert check_tool_streams(cut, None, 0.5).status == "pass", "the stream had more room"


def test_a_call_that_the_limit_cuts_off_is_not_judged() -> None:
    """What a parser gives back as text ends within the call, which another answer of as many tokens ended."""
    half = '<|tool_call_begin|>functions.lookup:0<|tool_call_argument_begin|>{"name": "a_very_lo'
    cut = replace(replied([], half), finish_reason="length")
    for got, wanted in (([cut], "pass"), ([cut] * 7, "fail"), ([replied([], half)], "skipped")):
        mine = numbered([*got, *[replied(CALL)] * (12 - len(got))])
        plain = Recording("u", {}, 8, [], tools=numbered([replied(CALL)] * 12))
        found = check_tool_calls(Recording("u", {}, 8, [], tools=mine), plain, 0.5)
        assert found.status == wanted, found.message


def test_a_streamed_call_may_part_at_a_near_tie() -> None:
    """Asked again, the server may repeat its unstreamed answer: then the tokens of the plain server tell."""
    other = replied(['{"name": "b"}'])

    def judged(streamed: ToolReply, *plain: ToolReply) -> str:
        mine = Recording(
            "u", {}, 8, [], tools=[replied(CALL)], streamed_tools=[streamed], confirmed_tools=[replied(CALL)]
        )
        alone = replace(mine, repeated_tools=list(plain))
        beside = Recording("u", {}, 8, [], tools=[replied(CALL)], repeated_tools=list(plain))
        found = {check_tool_streams(alone, None, 0.5).status, check_tool_streams(mine, beside, 0.5).status}
        assert len(found) == 1, found
        return found.pop()

    assert judged(other) == judged(other, replied(CALL)) == "fail", "nothing tells why"
    assert judged(other, other) == "skipped", "the plain server calls so as well"
    for gap, wanted in ((1e-5, "skipped"), (2.0, "fail")):
        told = told_answer(replied(CALL), ('{"name": "', "no", 3.0), ("a", "b", gap), ('"}', "no", 3.0))
        assert judged(other, told) == wanted
        for wrong in (replied(MALFORMED), replied([]), replied(['{"name": "b"}'], unindexed=1),
                      replace(other, finish_reason="stop"), ToolReply(error="cut", question="q")):  # fmt: skip
            assert judged(wrong, told) == "fail", wrong


SECTION, BEGIN = "<|tool_calls_section_begin|>", "<|tool_call_begin|>functions.lookup:0<|tool_call_argument_begin|>"


def half_call_tokens(gap: float, ended: bool) -> list[Token]:
    """Of a call whose JSON is as good as wrong behind its name: the plain server ended it well, or did not."""
    ends = ("<|tool_call_end|>", ",") if ended else (",", "<|tool_call_end|>")
    rest = "<|tool_calls_section_end|>" if ended else " and on"
    steps = [(SECTION, "no", 9.0), (BEGIN, "no", 9.0), (CALL[0], "no", 3.0), (*ends, gap), (rest, "no", 3.0)]
    return [Token(*step) for step in steps]


@pytest.mark.parametrize(("gap", "wanted"), [(1e-5, "near-tie"), (2.0, "real")])
def test_half_a_call_may_part_from_a_call_at_a_near_tie(gap: float, wanted: str) -> None:
    """kimi-nano ended a call in one shape of a pass and wrote on in the other: the parser gives back text."""
    calls, half = replied(CALL), replied([], f"{BEGIN}{CALL[0]}, and on")
    for plain, got in ((calls, half), (half, calls)):
        told = replace(plain, tokens=half_call_tokens(gap, bool(plain.calls)))
        turns = compare_turns([got], {"q": [plain, told]}, None, 0.5)
        assert (turns.near_ties == ["q"], turns.real == ["q"]) == (wanted == "near-tie", wanted == "real"), turns
    told = replace(calls, tokens=half_call_tokens(gap, True))
    for leaked in (f"{BEGIN}{CALL[0]}<|tool_call_end|>", f"{SECTION}{BEGIN}{CALL[0]}<|tool_call_end|>"):
        turns = compare_turns([replied([], leaked)], {"q": [told]}, None, 0.5)
        assert turns.real == ["q"], "a whole call that the parser leaves in the text is no half one"


def test_a_stream_may_hold_text_where_a_call_came_before() -> None:
    """Where the same request unstreamed brings that text as well, or the plain server's tokens tell of a near-tie."""
    calls, half = replied(CALL), replied([], f"{BEGIN}{CALL[0]}, and on")
    text, silent = replied([], "It is a list."), replied([], "")

    def judged(streamed: ToolReply, again: ToolReply, *plain: ToolReply) -> str:
        mine = Recording("u", {}, 8, [], tools=[calls], streamed_tools=[streamed], confirmed_tools=[again])
        return check_tool_streams(mine, Recording("u", {}, 8, [], tools=list(plain)), 0.5).status

    for answer in (half, text):
        assert judged(answer, answer) == "skipped", "it is the answer that changed"
        assert judged(answer, calls) == judged(answer, silent) == "fail"
        assert judged(answer, calls, answer) == "skipped", "the plain server wrote that as well"
    assert judged(silent, half) == "skipped", "a parser took half a call out of the stream"
    assert judged(silent, calls) == judged(silent, silent) == judged(silent, text) == judged(text, half) == "fail"
    for gap, wanted in ((1e-5, "skipped"), (2.0, "fail")):
        told = replace(calls, tokens=half_call_tokens(gap, True))
        assert judged(half, calls, told) == judged(half, half, told) == judged(silent, half, told) == wanted
        opens = told_answer(calls, (SECTION, "It", gap), (BEGIN, "no", 9.0), (CALL[0], "no", 9.0))
        assert judged(text, calls, opens) == judged(text, text, opens) == wanted
        assert judged(replace(text, finish_reason="tool_calls"), calls, opens) == "fail"
    for changed, wanted in ((3, "pass"), (9, "fail")):  # nothing tells why, so that their number counts
        tools, again = numbered([calls] * 12), numbered([text] * changed)
        mine = Recording("u", {}, 8, [], tools=tools, streamed_tools=[*again, *tools[changed:]], confirmed_tools=again)
        beside = Recording("u", {}, 8, [], tools=tools, repeated_tools=tools)
        found = check_tool_streams(mine, beside, 0.5)
        assert found.status == wanted, found.message
    leaked = replied([], f"{SECTION}{BEGIN}{CALL[0]}<|tool_call_end|>")
    assert judged(leaked, calls, replace(calls, tokens=half_call_tokens(1e-5, True))) == "fail"


def test_the_command_against_a_recording(
    cheating: str, recording: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    junit = tmp_path / "check.xml"
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    url = cheats.at(cheating, "reference")
    done, verdict = check(url, "--against", recording, "--min-acceptance", 2.0, "--junit", junit)
    assert done.status == 0 and verdict["ok"], done.stderr
    power = row(verdict, "lossless")["power"]
    assert power["answers_for_95_percent"] == 59 and power["chance_to_see_it"] == round(1 - 0.95 ** power["answers"], 4)
    suite = xml.parse(junit).getroot()
    assert suite.get("failures") == "0" and len(suite.findall(".//testcase")) == len(verdict["results"])
    assert "::notice title=check%3A image not measured::" in done.stderr and "::error" not in done.stderr
    done, verdict = check(url, "--against", recording, "--min-acceptance", 3.9, "--junit", junit, "--force")
    assert done.status == 3 and row(verdict, "acceptance")["code"] == "TS-CHECK-ACCEPTANCE"
    assert xml.parse(junit).find(".//failure").get("type") == "TS-CHECK-ACCEPTANCE"  # type: ignore[union-attr]
    assert "::error title=TS-CHECK-ACCEPTANCE::acceptance" in done.stderr


def test_what_is_required_and_not_measured_fails(cheating: str, recording: Path) -> None:
    url = cheats.at(cheating, "reference")
    done, verdict = check(url, "--against", recording, "--require", "image", "--require", "lossless")
    assert done.status == 3 and row(verdict, "image")["code"] == "TS-CHECK-REQUIRED"
    assert row(verdict, "lossless")["status"] == "pass" and row(verdict, "acceptance")["status"] == "skipped"
    done, _ = check(url, "--against", recording, "--require", "all-of-it")
    assert done.status == 2 and "the rows are answers, context" in done.stderr


def test_a_hanging_server_ends_the_check_soon(cheating: str, recording: Path) -> None:
    done, verdict = check(cheats.at(cheating, "trtllm", "hang"), "--against", recording, "--timeout", 0.5)
    assert done.status == 3 and "no answer within 0.5 s" in row(verdict, "answers")["message"]


def test_recording_is_refused_when_it_is_not_one(cheating: str, tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_text("{}")
    assert check(cheats.at(cheating, "plain"), "--against", path)[0].status == 2
    assert check(cheats.at(cheating, "plain"), "--against", tmp_path / "missing.json")[0].status == 2


@pytest.mark.parametrize(
    ("kind", "version", "baseline", "asked"),
    [("trtllm", "1.2.1", False, False), ("trtllm", "1.3.0rc13", False, False), ("trtllm", "1.4.0rc1", False, False),
     ("unknown", "1.0", False, False), ("plain", "1.0", True, True), ("reference", "1.0", False, True)],
)  # fmt: skip
def test_log_probabilities_are_asked_for_where_they_are_survived(
    cheating: str, kind: str, version: str, baseline: bool, asked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    bodies = []
    reply = Asker.reply

    async def heard(self: Asker, body: dict[str, Any]) -> dict[str, Any]:
        bodies.append(body)
        return await reply(self, body)

    monkeypatch.setattr(Asker, "reply", heard)
    got = cheats.recorded(cheats.at(cheating, kind, "honest", 1, f"version={version}"), 2, baseline)
    assert any(body.get("logprobs") for body in bodies) == asked == (got.withheld is None)


def transcript(tokens: list[tuple[str, str | None, float]] | None, text: str | None = None) -> Transcript:
    made = [Token(*token) for token in tokens] if tokens is not None else None
    return Transcript("q", "c", [], "".join(t for t, _, _ in tokens or []) if text is None else text, "stop", made)


def test_a_call_that_a_parser_takes_out_leaves_no_text() -> None:
    """vLLM takes out half a call that nobody asked for: 32 tokens, and an empty text."""

    def judged(first: str) -> str:
        whole = transcript([(first, None, 0.0), *[("on", None, 0.0)] * 31], "")
        stream = replace(whole, tokens=None, completion_tokens=32)
        return check_visible_text(Recording("u", {}, 32, [], streamed=[stream]), Recording("u", {}, 32, [whole])).status

    assert (judged("<|tool_calls_section_begin|>"), judged("def")) == ("skipped", "fail")


def test_white_space_around_reasoning_is_no_other_text() -> None:
    """vLLM's parser of thinking takes it away from a whole answer and leaves it in the stream: 3 of 27 answers."""

    def rows(stream: str) -> dict[str, str]:
        whole = replace(transcript(None, "It loops.Yes"), reasoned=9)
        streamed = replace(whole, text=stream, reasoned=stream.index("Yes"))
        got = Recording("u", {}, 9, [whole] * 9, streamed=[streamed] * 9, later=[streamed], confirmed=[whole] * 9)
        return {found.name: found.status for found in check_stream(got, None, 0.5)}

    assert rows("It loops.\n   Yes\n") == {"stream": "pass", "repeatable": "pass"}
    assert rows("It  loops.Yes") != rows("It loops.Yes") == rows("\nIt loops. Yes")


@pytest.mark.parametrize(
    ("content", "seen"),
    [
        ("Yes.", "Yes."),
        ("<think>Is it?</think>\n\nYes.", "\n\nYes."),
        ("Is it?</think>Yes.", "Yes."),  # the template has put <think> in the prompt
        ("<think>Is it?</think>\n", "\n"),
        ("\n<think>Is it? I must", ""),
        ("<think>Is it?</think><think>Once more", ""),
        ("Write <think> first.", "Write <think> first."),
    ],
)
def test_reasoning_in_the_content_is_not_what_a_user_reads(content: str, seen: str) -> None:
    assert visible_text(content) == seen == ToolReply(content=content).visible
    assert replace(transcript(None, f"hm{content}"), reasoned=2).visible == seen


@pytest.mark.parametrize("parser", [True, False])
@pytest.mark.parametrize(("finish", "wanted"), [("stop", "fail"), ("length", "pass")])
def test_answers_that_end_behind_the_reasoning_are_empty(parser: bool, finish: str, wanted: str) -> None:
    text = LONGER if parser else f"<think>{LONGER}" + ("</think>\n\n" if finish == "stop" else "")
    empty = replace(transcript(None, text), reasoned=len(text) * parser, finish_reason=finish)
    got = Recording("u", {}, 8, [empty] * 60)
    assert check_degenerate(got, None).status == wanted
    assert check_degenerate(got, got).status == "pass", "the target itself is like this"
    assert check_degenerate(got, Recording("u", {}, 8, [transcript(None, LONGER)] * 60)).status == wanted


def test_an_answer_that_ends_early_is_a_divergence() -> None:
    whole = transcript([("a", "x", 2.0), ("b", "x", 2.0), ("c", "x", 2.0)])
    short = transcript([("a", "x", 2.0), ("b", "x", 2.0)])
    found = first_divergence(whole, short)
    assert found and found.position == 2 and found.got == "(end of the answer)"
    assert compare_transcripts([whole], [short], 0.5).real == 1


def test_a_small_gap_between_other_tokens_is_no_tie() -> None:
    """Both gaps are tiny, but the token that came is not the runner-up: something else is wrong."""
    expected = transcript([("a", "b", 1e-5)])
    got = transcript([("z", "a", 1e-5)])
    assert compare_transcripts([expected], [got], 0.5).real == 1
    assert compare_transcripts([expected], [transcript([("b", "a", 1e-5)])], 0.5).near_ties == 1


def test_the_visible_text_decides_and_not_the_tokens() -> None:
    tokens: list[tuple[str, str | None, float]] = [("so ", "a", 2.0), ("it ", "b", 2.0), ("is", "c", 2.0)]
    honest, altered = transcript(tokens), transcript(tokens, "so it was")
    assert tokens_show(honest) is True and tokens_show(altered) is False
    assert compare_transcripts([honest], [altered], 0.5).real == 1
    thinking = transcript([("hm", "a", 2.0), ("</think>", "b", 2.0), ("\n\nyes", "c", 2.0)], "hmyes")
    assert tokens_show(thinking) is True


def test_a_runner_up_is_found_in_text_alone() -> None:
    """Where one side has no tokens, its text shows whether the other side's runner-up came, even when one token is the
    beginning of the other."""
    plain = transcript([("see ", "a", 2.0), ("foo", "foobar", 1e-5), ("(x)", "b", 2.0)])
    assert compare_transcripts([plain], [transcript(None, "see foobar and so on")], 0.5, [[plain]]).near_ties == 1
    assert compare_transcripts([plain], [transcript(None, "see fool")], 0.5, [[plain]]).real == 1


def test_the_bound_is_of_the_place_and_from_the_plain_server() -> None:
    """A large difference late in an answer makes nothing a near-tie before it, and nothing in other answers."""

    def passes(noise: float) -> Transcript:
        return transcript([("a", "x", 2.0), ("b", "y", 0.02), *[("c", "z", 2.0)] * 200, ("d", "w", 1.0 + noise)])

    first, again = passes(0.0), passes(0.04)
    early = transcript([("a", "x", 2.0), ("y", "b", 0.02)])
    late = transcript([("a", "x", 2.0), ("b", "y", 0.02), *[("c", "z", 2.0)] * 200, ("w", "d", 0.05)])
    assert compare_transcripts([first], [early], 0.5, [[again]]).rare == 1
    first = replace(first, tokens=[*(first.tokens or [])[:-1], Token("d", "w", 0.05)])
    again = replace(again, tokens=[*(again.tokens or [])[:-1], Token("d", "w", 0.09)])
    assert compare_transcripts([first], [late], 0.5, [[again]]).near_ties == 1


def test_contexts_that_differ_are_left_out() -> None:
    expected = replace(transcript([("a", "b", 2.0)]), prompt_tokens=7)
    found = compare_transcripts([expected], [replace(transcript([("z", "b", 2.0)]), prompt_tokens=9)], 0.5)
    assert found.contexts == ["q"] and found.compared == 0
