"""The gate of `trtspec check`: each function judges one property of a recording and returns one result."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

from trtspec.bench.acceptance import summarize
from trtspec.bench.lossless import compare_transcripts
from trtspec.bench.text_quality import RUN_SHARE, judge_run
from trtspec.bench.transcript import TOOL, Recording, ToolReply

Status = Literal["pass", "fail", "skipped"]
TOOL_MARKERS = ("<|tool_call", "<tool_call", "[TOOL_CALLS]")
SHOWN_DIVERGENCES = 20


@dataclass(frozen=True)
class CheckResult:
    """One line of the verdict; `code` and `remedy` only where it failed."""

    name: str
    status: Status
    message: str
    code: str = ""
    remedy: str = ""
    detail: dict[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        found = asdict(self)
        return found if self.status == "fail" else {k: v for k, v in found.items() if k not in ("code", "remedy")}


def result(name: str, status: Status, message: str, code: str = "", remedy: str = "", **detail: Any) -> CheckResult:
    return CheckResult(name, status, message, code, remedy, detail)


@dataclass(frozen=True, kw_only=True)
class GateVerdict:
    """What the gate says of a server; `against`: the one that it was compared with."""

    url: str
    server: dict[str, Any]
    against: dict[str, Any] | None
    prompts: int
    max_tokens: int
    results: list[CheckResult]

    @property
    def failed(self) -> list[str]:
        return [found.name for found in self.results if found.status == "fail"]

    def to_dict(self) -> dict[str, Any]:
        """The JSON contract of `check`: ok where nothing failed."""
        return {"ok": not self.failed, **vars(self), "results": [found.to_dict() for found in self.results]}


def run_checks(got: Recording, expected: Recording | None, min_acceptance: float | None, limit: float) -> GateVerdict:
    """`expected` is the same model without speculation."""
    return GateVerdict(
        url=got.url,
        server=got.server,
        against={"url": expected.url, "server": expected.server} if expected else None,
        prompts=len(got.transcripts),
        max_tokens=got.max_tokens,
        results=[
            check_lossless(got, expected, limit),
            check_degenerate(got, expected),
            check_tool_call(got.tool, expected.tool if expected else None),
            check_acceptance(got, min_acceptance),
        ],
    )


def check_lossless(got: Recording, expected: Recording | None, limit: float) -> CheckResult:
    """Greedy answers equal those of the other server, up to near-ties."""
    if expected is None:
        return result("lossless", "skipped", "nothing to compare with: pass --against FILE or URL of the plain server")
    found = compare_transcripts(expected.transcripts, got.transcripts, limit)
    first = sorted(found.divergences, key=lambda d: d.verdict != "real")[:SHOWN_DIVERGENCES]
    detail = asdict(replace(found, divergences=first))
    summary = (
        f"{found.identical} of {found.compared} greedy answers identical, {found.near_ties} part at a "
        f"near-tie (bound {found.bound:g} nats, measured over {found.rounding.positions} positions)"
    )
    if not found.compared:
        return result("lossless", "skipped", "the two recordings share no question", **detail)
    if found.real:
        summary += f", {found.real} part where the target is sure of itself"
    if found.unjudged:
        summary += f", {found.unjudged} cannot be judged because neither server gives logprobs"
        summary += f" (none were asked for: {got.withheld})" if got.withheld else ""
    bad = found.real or found.unjudged
    remedy = "compare the divergences in --json; serve without speculation until the cause is found"
    return result("lossless", "fail" if bad else "pass", summary, "TS-CHECK-NOT-LOSSLESS", remedy, **detail)


def check_degenerate(got: Recording, expected: Recording | None) -> CheckResult:
    """Answers are text that goes somewhere. A model that loops without speculation too is reported, not failed."""
    mine = judge_run([transcript.text for transcript in got.transcripts])
    theirs = judge_run([transcript.text for transcript in expected.transcripts]) if expected else None
    summary = f"{mine.loop} loops, {mine.empty} empty, {mine.noise} noise in {mine.answers} answers"
    worse = mine.degenerate
    if theirs:
        summary += f"; without speculation {theirs.loop}, {theirs.empty}, {theirs.noise}"
        worse = mine.share > theirs.share + RUN_SHARE
        if mine.degenerate and not worse:
            summary += ": the target itself is like this"
    remedy = "read the answers; check chat template, quantization and the speculation settings"
    return result(
        "degenerate-output",
        "fail" if worse else "pass",
        summary,
        "TS-CHECK-DEGENERATE",
        remedy,
        output=asdict(mine),
        without_speculation=asdict(theirs) if theirs else None,
    )


def check_tool_call(got: ToolReply, expected: ToolReply | None) -> CheckResult:
    """A request with a tool yields a well-formed call, and the same one as without speculation."""
    name, code = "tool-call", "TS-CHECK-TOOL-CALL"
    remedy = "send the request by hand with speculation off; check --tool_parser and the chat template"
    detail: dict[str, Any] = {
        "got": got.calls,
        "expected": expected.calls if expected else None,
        "content": got.content[:200],
    }
    if got.error:
        if expected and not expected.error:
            return result(name, "fail", f"refused with speculation only: {got.error}", code, remedy, **detail)
        return result(name, "skipped", f"not shown: the server refused a request with tools: {got.error}", **detail)
    faults = [fault for call in got.calls if (fault := call_fault(call))]
    if faults and not (expected and [f for call in expected.calls if (f := call_fault(call))]):
        return result(name, "fail", f"malformed tool call: {faults[0]}", code, remedy, **detail)
    if expected and expected.calls and not got.calls:
        return result(
            name, "fail", "the tool call of the plain server vanished with speculation", code, remedy, **detail
        )
    if expected and not expected.error and expected.content.strip() and not got.content.strip() and not got.calls:
        return result(name, "fail", "empty answer where the plain server writes one", code, remedy, **detail)
    if faults or not got.calls:
        return result(name, "skipped", f"not shown: {why_not_shown(got)}", **detail)
    if expected is None:
        return result(name, "pass", f"well-formed call of {got.calls[0]['name']}", **detail)
    if [call["name"] for call in got.calls] != [call["name"] for call in expected.calls]:
        return result(name, "fail", "other tools are called with speculation than without", code, remedy, **detail)
    same = [_arguments(c) for c in got.calls] == [_arguments(c) for c in expected.calls]
    words = "the same call as without speculation" if same else "the same tool as without speculation, other arguments"
    return result(name, "pass", words, **detail)


def why_not_shown(reply: ToolReply) -> str:
    if any(marker in reply.content for marker in TOOL_MARKERS):
        return "tool-call markers appear in the text, so the server runs without the model's tool parser"
    return "this model makes no well-formed tool call here, with or without speculation"


def call_fault(call: dict[str, str]) -> str | None:
    """What is wrong with a call of the tool that was offered, or None."""
    offered: Any = TOOL["function"]
    if call["name"] != offered["name"]:
        return f"it names {call['name']!r}, the tool offered is {offered['name']!r}"
    arguments = _arguments(call)
    if not isinstance(arguments, dict):
        return f"its arguments are not a JSON object: {call['arguments'][:80]!r}"
    missing = [key for key in offered["parameters"]["required"] if not isinstance(arguments.get(key), str)]
    return f"its arguments lack {', '.join(missing)}" if missing else None


def check_acceptance(got: Recording, floor: float | None) -> CheckResult:
    """Acceptance length at or above the floor; always with a word on the output it was measured on."""
    found = summarize(got.counts)
    length = found.acceptance_length
    looping = judge_run([transcript.text for transcript in got.transcripts]).degenerate
    told = ("acceptance_length", "steps", "drafted", "accepted", "histogram", "source")
    detail = {key: getattr(found, key) for key in told}
    if length is None or not (found.drafted or found.accepted):
        status: Status = "fail" if floor is not None else "skipped"
        message = "the server tells nothing about speculation, or runs without it"
    else:
        status = "skipped" if floor is None else "pass" if length >= floor else "fail"
        against = "no floor given (--min-acceptance)" if floor is None else f"floor {floor:g}"
        message = f"acceptance length {length:.3f} over {found.turns} greedy answers, {against}"
        if looping:
            message += "; the output is degenerate (see above), which flatters acceptance"
    remedy = "trtspec bench URL for acceptance by category; trtspec inspect HEAD --against TARGET"
    return result("acceptance", status, message, "TS-CHECK-ACCEPTANCE", remedy, **detail)


def _arguments(call: dict[str, str]) -> Any:
    try:
        return json.loads(call["arguments"])
    except ValueError:
        return None
