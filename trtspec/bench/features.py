"""Rows of the gate on what clients ask for: tools and what follows them, forms, stop strings, images, parameters."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from trtspec.bench.asking import HONOURED, NO_EFFECT, NOT_ASKED, NOT_SENT, REFUSED
from trtspec.bench.battery import FORM_SCHEMA, TOOL, stop_word
from trtspec.bench.gate import SHOWN, CheckResult, pass_or_fail, result
from trtspec.bench.transcript import Recording, ToolReply, Transcript

TOOL_MARKERS = ("<|tool_call", "<tool_call", "[TOOL_CALLS]")
TOOL_REMEDY = "send the request by hand with speculation off; check --tool_parser and the chat template"


def asked(replies: Sequence[ToolReply]) -> list[ToolReply]:
    """Without those that were not sent because the server had failed before."""
    return [reply for reply in replies if reply.error != NOT_ASKED]


def check_tool_calls(got: Recording, expected: Recording | None) -> CheckResult:
    """Requests with a tool yield well-formed calls, and the same ones as without speculation."""
    name, code = "tool-call", "TS-CHECK-TOOL-CALL"
    mine, theirs = asked(got.tools), {reply.question: reply for reply in expected.tools} if expected else {}
    if not mine:
        return result(name, "skipped", "no request with a tool was sent")
    faults = [(reply, fault) for reply in mine for fault in _tool_faults(reply, theirs.get(reply.question), mine)]
    pairs = [
        (r, theirs[r.question]) for r in mine if r.question in theirs and not theirs[r.question].error and not r.error
    ]
    other = [r.question for r, old in pairs if r.calls and old.calls and _arguments_of(r) != _arguments_of(old)]
    detail: dict[str, Any] = {
        "got": [asdict(reply) for reply in mine[:3]],
        "expected": [asdict(reply) for reply in theirs.values()][:3],
        "faults": [f"{reply.question}: {fault}" for reply, fault in faults][:SHOWN],
        "other_arguments": other[:SHOWN],
    }
    if faults:
        message = f"{len(faults)} of {len(mine)} tool calls: {faults[0][1]} ({faults[0][0].question})"
        return result(name, "fail", message, code, TOOL_REMEDY, **detail)
    refused = [reply for reply in mine if reply.error]
    if refused:
        message = f"not shown: the server refuses requests with tools, as the plain one does: {refused[0].error}"
        message = message if theirs else f"not shown: the server refused a request with tools: {refused[0].error}"
        return result(name, "skipped", message, **detail)
    if not any(reply.calls for reply in mine):
        return result(name, "skipped", f"not shown: {why_not_shown(mine)}", **detail)
    good = [reply for reply in mine if reply.calls and not any(call_fault(call) for call in reply.calls)]
    if not good:
        return result(name, "skipped", "not shown: the calls are malformed on both servers", **detail)
    both = sum(bool(r.calls and old.calls) for r, old in pairs)
    message = f"{len(good)} of {len(mine)} requests with a tool yield well-formed calls"
    message += f", {both - len(other)} of {both} as without speculation" if both else ""
    message += ", and none can be compared: the plain server makes no call" if pairs and not both else ""
    return result(name, "pass", message, seen=len(good), **detail)


def check_tool_streams(got: Recording, expected: Recording | None) -> CheckResult:
    """A call put together from a stream is the call that comes unstreamed: names, arguments, index, finish_reason."""
    name, code = "tool-stream", "TS-CHECK-TOOL-STREAM"
    mine = {reply.question: reply for reply in asked(got.streamed_tools)}
    theirs = _stream_pairs(expected) if expected else {}
    faults, moved, also = [], [], []
    pairs = _stream_pairs(got)
    for question, (whole, streamed) in pairs.items():
        fault = stream_fault(whole, streamed)
        if fault is None:
            continue
        again = next((reply for reply in got.confirmed_tools if reply.question == question and not reply.error), None)
        if question in theirs and stream_fault(*theirs[question]) == fault:
            also.append(question)
        elif again is not None and stream_fault(again, streamed) is None:
            moved.append(
                question
            )  # asked again unstreamed, the answer is the stream's: the answer changed, not the form
        else:
            faults.append(f"{question}: {fault}")
    detail: dict[str, Any] = {"faults": faults[:SHOWN], "changed": moved, "also_without_speculation": also}
    if faults:
        message = f"{len(faults)} of {len(pairs)} streamed tool calls are not the unstreamed ones: {faults[0]}"
        remedy = (
            "look at the chunks of one call (curl -N); check --tool_parser, which parses streams in a way of its own"
        )
        return result(name, "fail", message, code, remedy, **detail)
    judged = len(pairs) - len(moved) - len(also)
    if not judged:
        reason = "no request with a tool brought a call" if mine else "no request with a tool was streamed"
        reason = "streamed calls differ on both servers, or the answers change" if pairs else reason
        return result(name, "skipped", f"not shown: {reason}", **detail)
    message = f"{judged} of {len(pairs)} streamed tool calls are the unstreamed ones, put together"
    return result(name, "pass", message, seen=judged, **detail)


def _stream_pairs(recording: Recording) -> dict[str, tuple[ToolReply, ToolReply]]:
    """(unstreamed, streamed) by question, where the unstreamed reply is a well-formed call."""
    whole = {
        reply.question: reply
        for reply in recording.tools
        if not reply.error and reply.calls and not any(call_fault(call) for call in reply.calls)
    }
    return {r.question: (whole[r.question], r) for r in asked(recording.streamed_tools) if r.question in whole}


def stream_fault(whole: ToolReply, streamed: ToolReply) -> str | None:
    """How a streamed reply departs from the unstreamed one, or None."""
    if streamed.error:
        return f"the stream failed: {streamed.error}"
    if not streamed.calls:
        return "the call is missing in the stream"
    if streamed.unindexed:
        return f"{streamed.unindexed} pieces of calls have no index"
    if _names(streamed) != _names(whole):
        return f"it calls {', '.join(_names(streamed)) or 'nothing'} in place of {', '.join(_names(whole))}"
    if _arguments_of(streamed) != _arguments_of(whole):
        place = next(
            i for i, (a, b) in enumerate(zip(_arguments_of(streamed), _arguments_of(whole), strict=True)) if a != b
        )
        texts = (streamed.calls[place]["arguments"][:80], whole.calls[place]["arguments"][:80])
        return f"its arguments are {texts[0]!r} in place of {texts[1]!r}"
    if streamed.finish_reason != whole.finish_reason:
        return f"finish_reason is {streamed.finish_reason!r} in place of {whole.finish_reason!r}"
    return None


def _tool_faults(reply: ToolReply, plain: ToolReply | None, mine: Sequence[ToolReply]) -> Iterator[str]:
    """What is wrong with one reply; what the plain server does as well is the model's way, or its set-up."""
    if reply.error:
        if (plain is not None and not plain.error) or any(other.calls for other in mine):
            yield f"refused, though others are answered: {reply.error}"
        return
    faults = [fault for call in reply.calls if (fault := call_fault(call))]
    if faults and not (plain and any(call_fault(call) for call in plain.calls)):
        yield f"malformed: {faults[0]}"
    elif not reply.calls and plain and plain.calls:
        yield "the call of the plain server vanished with speculation"
    elif not reply.calls and not reply.content.strip() and not (plain and not plain.content.strip()):
        yield "neither a call nor text came"
    elif plain and plain.calls and _names(reply) != _names(plain):
        yield "other tools are called with speculation than without"


def why_not_shown(replies: Sequence[ToolReply]) -> str:
    if any(marker in reply.content for reply in replies for marker in TOOL_MARKERS):
        return "tool-call markers appear in the text, so the server runs without the model's tool parser"
    return "this model makes no tool call here, with or without speculation"


def call_fault(call: dict[str, str]) -> str | None:
    """What is wrong with a call of the tool that was offered, or None."""
    offered: Any = TOOL["function"]
    if call["name"] != offered["name"]:
        return f"it names {call['name']!r}, the tool offered is {offered['name']!r}"
    arguments = parsed(call["arguments"])
    if not isinstance(arguments, dict):
        return f"its arguments are not a JSON object: {call['arguments'][:80]!r}"
    missing = [key for key in offered["parameters"]["required"] if not isinstance(arguments.get(key), str)]
    return f"its arguments lack {', '.join(missing)}" if missing else None


def _names(reply: ToolReply) -> list[str]:
    return [call["name"] for call in reply.calls]


def _arguments_of(reply: ToolReply) -> list[Any]:
    return [parsed(call["arguments"]) for call in reply.calls]


def check_follow_ups(got: Recording, expected: Recording | None) -> CheckResult:
    """After the tool has answered, the model writes: text, and not only reasoning."""
    name, code = "tool-follow-up", "TS-CHECK-TOOL-FOLLOW-UP"
    mine, theirs = asked(got.follow_ups), {reply.question: reply for reply in expected.follow_ups} if expected else {}
    if not mine:
        return result(name, "skipped", "no follow-up was sent")
    answered = [reply for reply in mine if not reply.error]
    faults = []
    for reply in mine:
        plain = theirs.get(reply.question)
        if reply.error and (answered or (plain and not plain.error)):
            faults.append((reply, f"refused: {reply.error}"))
        elif not reply.error and _silent(reply) and not (plain and not plain.error and _silent(plain)):
            where = "behind the reasoning" if reply.reasoning.strip() else "altogether"
            faults.append((reply, f"the answer is empty {where}"))
    detail: dict[str, Any] = {"faults": [f"{reply.question}: {fault}" for reply, fault in faults][:SHOWN]}
    if faults:
        message = f"{len(faults)} of {len(mine)} follow-ups of a tool: {faults[0][1]} ({faults[0][0].question})"
        remedy = "check the reasoning parser and the chat template: Kimi-K2.6 ends many such answers behind </think>"
        return result(name, "fail", message, code, remedy, **detail)
    if not answered:
        also = " as the plain server does" if theirs else ""
        return result(name, "skipped", f"not shown: the server refuses follow-ups{also}: {mine[0].error}", **detail)
    silent = sum(_silent(reply) for reply in answered)
    message = f"{len(answered) - silent} of {len(mine)} follow-ups of a tool are answered in text"
    message += f", {silent} are empty on both servers" if silent else ""
    return result(name, "pass", message, seen=len(answered), **detail)


def _silent(reply: ToolReply) -> bool:
    """No text and no further call; an answer that was cut off while it reasoned says nothing either way."""
    return not reply.content.strip() and not reply.calls and not (reply.reasoning and reply.finish_reason == "length")


def check_forms(got: Recording, expected: Recording | None) -> CheckResult:
    """Answers that must be JSON of a schema are."""
    name = "structured-output"
    theirs = {reply.question: reply for reply in expected.forms} if expected else {}
    mine = asked(got.forms)
    refused = [reply for reply in mine if reply.error]
    if refused or not mine:
        plain = theirs.get(refused[0].question) if refused else None
        if plain is not None and not plain.error:
            message = f"refused with speculation only: {refused[0].error}"
            return result(
                name, "fail", message, "TS-CHECK-STRUCTURED", "check guided_decoding_backend and the engine's log"
            )
        said = f"the server refused response_format: {refused[0].error}" if refused else "nothing was asked"
        return result(name, "skipped", f"not shown: {said}")
    faults = [(reply, fault) for reply in mine if (fault := form_fault(reply))]
    faults = [(r, fault) for r, fault in faults if not (r.question in theirs and form_fault(theirs[r.question]))]
    message = f"{len(mine) - len(faults)} of {len(mine)} answers have the form that was asked for"
    message += f"; {faults[0][0].question}: {faults[0][1]}" if faults else ""
    remedy = "check guided_decoding_backend; ask the same with speculation off"
    return pass_or_fail(name, faults, message, "TS-CHECK-STRUCTURED", remedy, len(mine))


def form_fault(reply: ToolReply) -> str | None:
    """Why a text is no object of FORM_SCHEMA; an answer that was cut off is judged by nothing."""
    schema: Any = FORM_SCHEMA
    if reply.error or reply.finish_reason == "length":
        return None
    found = parsed(reply.content)
    if not isinstance(found, dict):
        return f"it is not a JSON object: {reply.content[:60]!r}"
    kinds = {"string": str, "integer": int}
    for key in schema["required"]:
        if not isinstance(found.get(key), kinds[schema["properties"][key]["type"]]):
            return f"{key} is missing or of another type"
    extra = set(found) - set(schema["properties"])
    return f"it has {', '.join(sorted(extra))} beside what the schema allows" if extra else None


def check_stops(got: Recording) -> CheckResult:
    """An answer ends where a stop string begins, and not before."""
    name, remedy = "stop-strings", "ask with speculation off; a stop string may lie across the end of a draft"
    if not asked(got.stops):
        return result(name, "skipped", "no answer is long enough to be cut by a stop string")
    if all(reply.error for reply in got.stops):
        return result(name, "skipped", f"not shown: the server refused stop: {got.stops[0].error}")
    answers = {item.question: item for item in got.answered}
    faults, judged = [], 0
    for reply in asked(got.stops):
        whole = answers[reply.question]
        fault = _stop_fault(reply, whole)
        judged += fault is not None
        if fault:
            faults.append(f"{reply.question}: {fault}")
    if not judged:
        return result(name, "skipped", "every answer parted from the earlier one before its stop string")
    message = f"{judged - len(faults)} of {judged} answers end at their stop string"
    message += f"; {faults[0]}" if faults else ""
    return pass_or_fail(name, faults, message, "TS-CHECK-STOP", remedy, judged, faults=faults)


def _stop_fault(reply: ToolReply, whole: Transcript) -> str | None:
    """ "" where it is right, None where the answer took another way before."""
    word = stop_word(whole.content)
    if reply.error or word is None:
        return reply.error and f"refused: {reply.error}"
    wanted = whole.content[: whole.content.index(word)]
    if reply.content.rstrip() == wanted.rstrip() or reply.content == wanted + word:
        return ""
    if word in reply.content:
        return f"the stop string {word!r} is in the text"
    return "the answer ends before its stop string" if wanted.startswith(reply.content) else None


def check_image(got: Recording) -> CheckResult:
    """An image is taken, where the server takes images."""
    reply = got.image
    if reply is None or not asked([reply]):
        return result("image", "skipped", "no image was sent")
    if reply.error:
        return result("image", "skipped", f"not shown: the server takes text only ({reply.error[:120]})")
    if not reply.content.strip() and not reply.reasoning.strip():
        remedy = "send an image by hand with speculation off"
        return result("image", "fail", "an image is taken and the answer is empty", "TS-CHECK-IMAGE", remedy)
    return result("image", "pass", "a request with an image is answered in text")


def check_parameters(got: Recording, expected: Recording | None) -> CheckResult:
    """What became of each request parameter; a table, which fails nothing: releases say what they drop."""
    theirs = {reply.name: reply for reply in expected.parameters} if expected else {}
    if not got.parameters:
        return result("parameters", "skipped", "no parameter was sent")
    table = [
        {"parameter": r.name, "outcome": r.outcome, "words": r.words[:200],
         "without_speculation": theirs[r.name].outcome if r.name in theirs else None}
        for r in got.parameters
    ]  # fmt: skip
    words = []
    for outcome, said in (
        (HONOURED, "honoured"),
        (NO_EFFECT, "without effect"),
        (REFUSED, "refused"),
        (NOT_SENT, "not sent"),
    ):
        named = [reply.name for reply in got.parameters if reply.outcome == outcome]
        words += [f"{said}: {', '.join(named)}"] if named else []
    worse = [r.name for r in got.parameters if r.outcome in (NO_EFFECT, REFUSED)]
    lost = [name for name in worse if name in theirs and theirs[name].outcome == HONOURED]
    message = "; ".join(words) + (f"; lost with speculation: {', '.join(lost)}" if lost else "")
    return result("parameters", "pass", message, table=table, lost=lost)


def parsed(text: str) -> Any:
    """None for what is not JSON."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None
