"""Rows of the gate on what clients ask for: tools and what follows them, forms, images."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from trtspec.bench.arguments import (
    EndComparison,
    Replies,
    ReplyComparison,
    answer_verdict,
    arguments_of,
    at_limit,
    compare_arguments,
    compare_ends,
    compare_texts,
    compare_turns,
    cut_off,
    left_in_text,
    names_of,
    parsed,
    replies_by_question,
    same_answer,
    silent,
    writes,
)
from trtspec.bench.asking import NOT_ASKED, declined
from trtspec.bench.battery import TOOL
from trtspec.bench.gate import SHOWN, UNLIKELY, CheckResult, more_often, result
from trtspec.bench.lossless import RoundingBound, what_rare_is
from trtspec.bench.transcript import Recording, ToolReply
from trtspec.bench.visible import VERDICTS, own_rounding

TOOL_REMEDY = "send the request by hand with speculation off; check --tool_parser and the chat template"


def asked(replies: Sequence[ToolReply]) -> list[ToolReply]:
    """Without those that were not sent because the server had failed before."""
    return [reply for reply in replies if reply.error != NOT_ASKED]


def check_tool_calls(got: Recording, expected: Recording | None, limit: float) -> CheckResult:
    """Requests with a tool yield well-formed calls, and the same ones as without speculation, up to near-ties under
    `limit`."""
    name, code = "tool-call", "TS-CHECK-TOOL-CALL"
    mine, theirs = asked(got.tools), {reply.question: reply for reply in expected.tools} if expected else {}
    if not mine:
        return result(name, "skipped", "no request with a tool was sent")
    known = _tool_passes(expected)
    turns, ends = _tool_turns(mine, known, own_rounding(expected), limit), _tool_ends(mine, expected)
    faults = [(reply, fault) for reply in mine for fault in _tool_faults(reply, expected, known, mine, turns)]
    faults += [(reply, ends.fault) for reply in mine if reply.question in ends.wrong]
    pairs = [
        (r, theirs[r.question]) for r in mine if r.question in theirs and not theirs[r.question].error and not r.error
    ]
    compared = compare_arguments(got, expected, limit) if expected else None
    detail: dict[str, Any] = {
        "got": [asdict(reply) for reply in mine[:3]],
        "expected": [asdict(reply) for reply in theirs.values()][:3],
        "faults": [f"{reply.question}: {fault}" for reply, fault in faults][:SHOWN],
        "arguments": asdict(compared) if compared else None,
        "turns": asdict(turns),
        "ends": asdict(ends),
    }
    if faults:
        message = f"{len(faults)} of {len(mine)} tool calls: {faults[0][1]} ({faults[0][0].question})"
        return result(name, "fail", message, code, TOOL_REMEDY, **detail)
    refused = [reply for reply in mine if reply.error]
    if len(refused) == len(mine):
        message = f"not shown: the server refuses requests with tools, as the plain one does: {refused[0].error}"
        message = message if theirs else f"not shown: the server refused a request with tools: {refused[0].error}"
        return result(name, "skipped", message, **detail)
    if not any(reply.calls for reply in mine):
        return result(name, "skipped", f"not shown: {why_not_shown(mine)}{also_refused(mine)}", **detail)
    good = [reply for reply in mine if reply.calls and not any(call_fault(call) for call in reply.calls)]
    if not good:
        return result(name, "skipped", "not shown: the calls are malformed on both servers", **detail)
    both = any(r.calls and old.calls for r, old in pairs)
    message = f"{len(good)} of {len(mine)} requests with a tool yield well-formed calls"
    message += (compared.message if compared else "") + turns.parted
    message += ", and none can be compared: the plain server makes no call" if pairs and not both else ""
    unknown = not_compared(mine, expected.tools if expected else [], known)
    message += _not_ended(mine) + also_refused(mine) + unknown.message
    if compared and compared.wrong:
        return result(name, "fail", message, code, TOOL_REMEDY, **detail)
    if unknown.most or (compared and (compared.unjudged or turns.unjudged)):
        return result(name, "skipped", message, **detail)
    return result(name, "pass", message, seen=len(good), **detail)


def check_tool_streams(got: Recording, expected: Recording | None, limit: float) -> CheckResult:
    """A call put together from a stream is the call that comes unstreamed: names, arguments, index, finish_reason. One
    that parts from it at a near-tie, by the tokens that the plain server told, is no fault of the form, nor is text
    that does; `limit` as for calls."""
    name, code = "tool-stream", "TS-CHECK-TOOL-STREAM"
    pairs = _stream_pairs(got)
    faults = {question: fault for question, pair in pairs.items() if (fault := stream_fault(*pair))}
    before = {q: stream_fault(*pair) for q, pair in _stream_pairs(expected).items()} if expected else {}
    also = [question for question, fault in faults.items() if before.get(question) == fault]
    parted = {question: pairs[question][1] for question in faults if question not in also}
    again = {reply.question: reply for reply in got.confirmed_tools if reply.question in parted and not reply.error}
    changed = {question: reply for question, reply in again.items() if _as_the_stream(reply, parted[question])}
    moved = _other_answers(parted, changed, len(pairs), expected or got, limit)
    wrong = [
        f"{question}: {'each further time another answer than the first: ' if question in changed else ''}{fault}"
        for question, fault in faults.items()
        if question not in (*also, *moved)
    ]
    detail: dict[str, Any] = {"faults": wrong[:SHOWN], "changed": moved, "also_without_speculation": also}
    if wrong:
        message = f"{len(wrong)} of {len(pairs)} streamed tool calls are not the unstreamed ones: {wrong[0]}"
        remedy = (
            "look at the chunks of one call (curl -N); check --tool_parser, which parses streams in a way of its own"
        )
        return result(name, "fail", message, code, remedy, **detail)
    judged = len(pairs) - len(moved) - len(also)
    if not judged:
        reason = f"no request with a tool {'brought a call' if asked(got.streamed_tools) else 'was streamed'}"
        reason = "streamed calls differ on both servers, or the answers change" if pairs else reason
        return result(name, "skipped", f"not shown: {reason}", **detail)
    message = f"{judged} of {len(pairs)} streamed tool calls are the unstreamed ones, put together"
    return result(name, "pass", message, seen=judged, **detail)


def _other_answers(
    parted: Mapping[str, ToolReply],
    changed: Mapping[str, ToolReply],
    compared: int,
    plain: Recording,
    limit: float,
) -> list[str]:
    """Questions of `parted` streams, of so many `compared`, that brought another answer and no fault of the form:

    - one of the plain server's own, or one that parts from those at a near-tie;
    - one of `changed`, which came unstreamed as well, where no token tells why and the plain server changes its own
      answers about as often."""
    known, rounding = _tool_passes(plain), own_rounding(plain)
    found: dict[str, list[str]] = {verdict: [] for verdict in ("same", *VERDICTS)}
    for question, reply in {**parted, **changed}.items():
        judged = _other_answer(reply)
        verdict = answer_verdict(reply, known.get(question, []), rounding, limit) if judged else "unjudged"
        found[verdict].append(question)
    moved = found["same"] + found["near-tie"]
    moved += found["rare"] if what_rare_is(found["rare"], compared, rounding, limit) == "near-tie" else []
    unsure = [question for question in found["unjudged"] if question in changed]
    own = [any(not same_answer(one[0], other) for other in one) for one in known.values() if one[1:]]
    chance = more_often(len(unsure), compared, sum(own), len(own)) >= UNLIKELY
    return moved + (unsure if chance else [])


def _other_answer(reply: ToolReply) -> bool:
    """Whether it is a whole answer, with another call or in text, which rounding may bring; it leaves out no index and
    no end."""
    if not reply.calls:
        return writes(reply) and reply.finish_reason != "tool_calls"
    good = not reply.error and not reply.unindexed and reply.finish_reason == "tool_calls"
    return good and not any(call_fault(call) for call in reply.calls)


def _as_the_stream(again: ToolReply, streamed: ToolReply) -> bool:
    """Whether the same request unstreamed brings the stream's answer; half a call in the text may be taken out of a
    stream."""
    if streamed.error or again.calls or streamed.calls:
        return stream_fault(again, streamed) is None
    return writes(again) and (same_answer(again, streamed) or (left_in_text(again) and silent(streamed)))


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
    if names_of(streamed) != names_of(whole):
        return f"it calls {', '.join(names_of(streamed)) or 'nothing'} in place of {', '.join(names_of(whole))}"
    if arguments_of(streamed) != arguments_of(whole):
        place = next(
            i for i, (a, b) in enumerate(zip(arguments_of(streamed), arguments_of(whole), strict=True)) if a != b
        )
        texts = (streamed.calls[place]["arguments"][:80], whole.calls[place]["arguments"][:80])
        return f"its arguments are {texts[0]!r} in place of {texts[1]!r}"
    if streamed.finish_reason != whole.finish_reason and not at_limit(whole):  # streams are asked for with more room
        return f"finish_reason is {streamed.finish_reason!r} in place of {whole.finish_reason!r}"
    return None


def _tool_turns(
    mine: Sequence[ToolReply], known: Replies, rounding: RoundingBound | None, limit: float
) -> ReplyComparison:
    """Whether each reply calls as the plain server does in one of its passes; where that never calls, calls are judged
    by their form alone. If no call is left, no statistics are needed."""
    calls = any(reply.calls for one in known.values() for reply in one)
    turns = compare_turns(mine, known if calls else {}, rounding, limit)
    return turns if any(reply.calls for reply in mine) else replace(turns, p=0.0)


def _tool_ends(mine: Sequence[ToolReply], expected: Recording | None) -> EndComparison:
    passes = (expected.tools, expected.repeated_tools, expected.confirmed_tools) if expected else ()
    return compare_ends(mine, passes, cut_off)


def _not_ended(mine: Sequence[ToolReply]) -> str:
    cut = sum(map(cut_off, mine))
    return f", {cut} were cut off while the model reasoned or called and are not judged" if cut else ""


def _tool_passes(expected: Recording | None) -> Replies:
    return replies_by_question(expected.tools, expected.repeated_tools, expected.confirmed_tools) if expected else {}


def _tool_faults(
    reply: ToolReply, expected: Recording | None, known: Replies, mine: Sequence[ToolReply], turns: ReplyComparison
) -> Iterator[str]:
    """What is wrong with one reply; what the plain server does as well is the model's way, or its set-up."""
    plain = reply_to(expected.tools, reply.question) if expected else None
    passes = known.get(reply.question, [])
    if reply.error:
        if refused_alone(reply, plain, mine):
            yield f"{how_it_failed(reply)}, though others are answered: {reply.error}"
        return
    if cut_off(reply):
        return
    faults = [fault for call in reply.calls if (fault := call_fault(call))]
    if faults and not any(call_fault(call) for other in passes for call in other.calls):
        yield f"malformed: {faults[0]}"
    elif reply.question in turns.wrong:
        yield _other_turn(reply, passes)
    elif silent(reply) and not (
        any(map(silent, passes)) or reply.question in turns.near_ties or (plain and (plain.error or cut_off(plain)))
    ):
        yield "neither a call nor text came"


def _other_turn(reply: ToolReply, known: Sequence[ToolReply]) -> str:
    if not reply.calls:
        return "the call of the plain server vanished with speculation"
    if not any(other.calls for other in known):
        return "a call came in place of the plain server's text"
    return "other tools are called with speculation than without"


def why_not_shown(replies: Sequence[ToolReply]) -> str:
    if all(cut_off(reply) for reply in replies if not reply.error):
        return "all answers were cut off while the model reasoned or called (--max-tokens)"
    if any(map(left_in_text, replies)):
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


def check_follow_ups(got: Recording, expected: Recording | None, limit: float) -> CheckResult:
    """After the tool has answered, the model writes: text, and not only reasoning, and the plain server's, up to
    near-ties under `limit`."""
    name, code = "tool-follow-up", "TS-CHECK-TOOL-FOLLOW-UP"
    mine, theirs = asked(got.follow_ups), expected.follow_ups if expected else []
    if not mine:
        return result(name, "skipped", "no follow-up was sent")
    known = replies_by_question(theirs, expected.repeated_follow_ups) if expected else {}
    turns = compare_turns(mine, known, own_rounding(expected), limit)
    ends = compare_ends(mine, (theirs, expected.repeated_follow_ups) if expected else (), cut_off)
    faults, kinds = [], Counter[str]()
    for reply in mine:
        plain, passes = reply_to(theirs, reply.question), known.get(reply.question, [])
        if reply.error:
            kinds["refused"] += 1
            faults += [(reply, f"{how_it_failed(reply)}: {reply.error}")] if refused_alone(reply, plain, mine) else []
        elif reply.question in ends.wrong:
            faults.append((reply, ends.fault))
        elif cut_off(reply) or (silent(reply) and plain and cut_off(plain)):
            kinds["cut"] += 1
        elif silent(reply) and plain and plain.error:
            kinds["empty, and refused before"] += 1
        elif silent(reply) and (any(map(silent, passes)) or reply.question in turns.near_ties):
            kinds["silent"] += 1
        elif silent(reply):
            where = "behind the reasoning" if (reply.reasoning + reply.content).strip() else "altogether"
            faults.append((reply, f"the answer is empty {where}"))
        elif reply.question in turns.wrong:
            faults.append((reply, _other_turn(reply, passes)))
        else:
            kinds["text" if not reply.calls else "call" if passes else "unknown call"] += 1
    detail: dict[str, Any] = {"faults": [f"{reply.question}: {fault}" for reply, fault in faults][:SHOWN]}
    detail |= {"turns": asdict(turns), "ends": asdict(ends)}
    if faults:
        message = f"{len(faults)} of {len(mine)} follow-ups of a tool: {faults[0][1]} ({faults[0][0].question})"
        remedy = "check the reasoning parser and the chat template: Kimi-K2.6 ends many such answers behind </think>"
        return result(name, "fail", message, code, remedy, **detail)
    seen = kinds["text"] + kinds["silent"] + kinds["call"]
    if not seen:
        return result(name, "skipped", f"not shown: {_no_text(mine, kinds, bool(theirs))}", **detail)
    compared = compare_texts(mine, known, own_rounding(expected), limit) if expected else None
    message = f"{kinds['text']} of {len(mine)} follow-ups of a tool are answered in text"
    message += f", {kinds['silent']} are empty on both servers" if kinds["silent"] else ""
    message += f", {kinds['call']} bring another call as on the plain server" if kinds["call"] else ""
    message += f", {kinds['unknown call']} bring another call and are not judged" if kinds["unknown call"] else ""
    message += (
        f", {kinds['cut']} were cut off while the model reasoned or called and are not judged" if kinds["cut"] else ""
    )
    unknown = not_compared(mine, theirs, known)
    message += (compared.message if compared else "") + turns.parted + also_refused(mine) + unknown.message
    detail["texts"] = asdict(compared) if compared else None
    if compared and compared.wrong:
        return result(name, "fail", message, code, "compare the texts of both servers in their recordings", **detail)
    if unknown.most or (compared and (compared.unjudged or turns.unjudged)):
        return result(name, "skipped", message, **detail)
    return result(name, "pass", message, seen=seen, **detail)


def _no_text(mine: Sequence[ToolReply], kinds: Counter[str], compared: bool) -> str:
    """Why no follow-up is judged."""
    if kinds["unknown call"]:
        return f"{kinds['unknown call']} of {len(mine)} follow-ups bring another call, and none is answered in text"
    if kinds["cut"]:
        return f"{kinds['cut']} of {len(mine)} follow-ups were cut off while the model reasoned (--max-tokens)"
    if kinds["empty, and refused before"]:
        return "the answers are empty, and the plain server gave none"
    return f"the server refuses follow-ups{' as the plain server does' if compared else ''}: {mine[0].error}"


def reply_to(replies: Sequence[ToolReply], question: str) -> ToolReply | None:
    """The plain server's reply; after a refusal of the first request it was not asked the others."""
    found = next((reply for reply in replies if reply.question == question), None)
    return replies[0] if found is None and replies and all(reply.error for reply in replies) else found


@dataclass(frozen=True)
class UnknownReplies:
    """Answered requests to which the recording of the plain server holds a failure that is no refusal. `most`: they are
    more than half, so that the row would rest on nothing."""

    message: str = ""
    most: bool = False


def not_compared(mine: Sequence[ToolReply], theirs: Sequence[ToolReply], known: Replies) -> UnknownReplies:
    answered = [reply for reply in mine if not reply.error and reply.question not in known]
    found = [plain for reply in answered if (plain := reply_to(theirs, reply.question)) and plain.error]
    failed = [plain.error for plain in found if not declined(plain.error)]
    if not failed:
        return UnknownReplies()
    message = f"; {len(failed)} of {len(mine)} are not compared: the plain server's recording holds {failed[0]}"
    return UnknownReplies(message, 2 * len(failed) > len(mine))


def refused_alone(reply: ToolReply, plain: ToolReply | None, mine: Sequence[ToolReply]) -> bool:
    """Whether a failure is this server's own: the plain server answered, or, where it was not asked, this one answered
    others, or it is no refusal (HTTP 4xx) at all."""
    if plain is not None:
        return not plain.error
    return bool(reply.error) and (not declined(reply.error) or any(not other.error for other in mine))


def how_it_failed(reply: ToolReply) -> str:
    return "refused" if declined(reply.error) else "failed"


def also_refused(mine: Sequence[ToolReply]) -> str:
    refused = [reply for reply in mine if reply.error]
    return f"; {len(refused)} are refused, as by the plain server: {refused[0].error}" if refused else ""


def check_image(got: Recording, expected: Recording | None) -> CheckResult:
    """An image is taken, where the server takes images."""
    name, remedy = "image", "send an image by hand with speculation off"
    reply, plain = got.image, expected.image if expected else None
    if reply is None or not asked([reply]):
        return result(name, "skipped", "no image was sent")
    if reply.error:
        if plain is not None and not plain.error:
            message = f"an image is refused with speculation only: {reply.error[:120]}"
            return result(name, "fail", message, "TS-CHECK-IMAGE", remedy)
        if plain is None and not declined(reply.error):
            message = f"an image brings no answer and no refusal: {reply.error[:120]}"
            return result(name, "fail", message, "TS-CHECK-IMAGE", remedy)
        why = "neither server answers" if plain is not None else "the server takes text only"
        return result(name, "skipped", f"not shown: {why} ({reply.error[:120]})")
    if not _shown(reply):
        if plain is not None and not _shown(plain):
            why = f"the plain server gives none ({plain.error[:120]})" if plain.error else "so is the plain server's"
            return result(name, "skipped", f"not shown: the answer is empty, and {why}")
        return result(name, "fail", "an image is taken and the answer is empty", "TS-CHECK-IMAGE", remedy)
    return result(name, "pass", "a request with an image is answered in text")


def _shown(reply: ToolReply) -> bool:
    return bool(reply.content.strip() or reply.reasoning.strip())
