"""Row of the gate on answers that must have a form: JSON of a schema."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from trtspec.bench.arguments import (
    EndComparison,
    Replies,
    at_limit,
    compare_ends,
    compare_texts,
    parsed,
    replies_by_question,
)
from trtspec.bench.battery import FORM_SCHEMA
from trtspec.bench.features import also_refused, asked, how_it_failed, not_compared, refused_alone, reply_to
from trtspec.bench.gate import SHOWN, CheckResult, result
from trtspec.bench.transcript import Recording, ToolReply
from trtspec.bench.visible import own_rounding


def check_forms(got: Recording, expected: Recording | None, limit: float) -> CheckResult:
    """Answers that must be JSON of a schema are, and they are the plain server's, up to near-ties under `limit`; those
    cut off before their end are judged by how often."""
    name, code = "structured-output", "TS-CHECK-STRUCTURED"
    remedy = "check guided_decoding_backend and the engine's log; ask with speculation off"
    mine, theirs = asked(got.forms), expected.forms if expected else []
    if not mine:
        return result(name, "skipped", "not shown: nothing was asked")
    known = replies_by_question(theirs, expected.repeated_forms) if expected else {}
    ends = compare_ends(mine, (theirs, expected.repeated_forms) if expected else (), at_limit)
    good, faults, kinds = _sorted(mine, theirs, known, ends)
    cut, both = kinds["cut"], kinds["both"]
    message = f"{len(good)} of {len(mine)} answers have the form that was asked for"
    message += f", {cut} were cut off before their end and are not judged" if cut else ""
    message += f", {both} have it on neither server" if both else ""
    if faults:
        return result(name, "fail", f"{message}; {faults[0]}", code, remedy, faults=faults[:SHOWN], ends=asdict(ends))
    unknown = not_compared(mine, theirs, known)
    message += also_refused(mine) + unknown.message
    if not good:
        refused = f"the server refused response_format: {mine[0].error}"
        return result(name, "skipped", f"not shown: {message if cut or both else refused}")
    sound = {q: [r for r in one if parsed(r.content) is not None and not form_fault(r)] for q, one in known.items()}
    compared = compare_texts(good, sound, own_rounding(expected), limit)
    detail: dict[str, Any] = {"texts": asdict(compared), "ends": asdict(ends)}
    message += compared.message
    if compared.wrong:
        return result(name, "fail", message, code, "compare the texts of both servers in their recordings", **detail)
    if unknown.most or compared.unjudged:
        return result(name, "skipped", message, **detail)
    return result(name, "pass", message, seen=len(good), **detail)


def _sorted(
    mine: Sequence[ToolReply], theirs: Sequence[ToolReply], known: Replies, ends: EndComparison
) -> tuple[list[ToolReply], list[str], Counter[str]]:
    """The good ones, the faults, and how many others there are: `cut` off, or wrong on `both` servers."""
    good, faults, kinds = [], [], Counter[str]()
    for reply in mine:
        plain, passes, fault = reply_to(theirs, reply.question), known.get(reply.question, []), form_fault(reply)
        if reply.error:
            alone = refused_alone(reply, plain, mine)
            faults += [f"{reply.question}: {how_it_failed(reply)}: {reply.error}"] if alone else []
        elif reply.question in ends.wrong:
            faults.append(f"{reply.question}: {ends.fault}")
        elif at_limit(reply) or (fault and any(each and at_limit(each) for each in [plain, *passes])):
            kinds["cut"] += 1
        elif fault and any(form_fault(other) for other in passes):
            kinds["both"] += 1
        elif fault:
            faults.append(f"{reply.question}: {fault}")
        else:
            good.append(reply)
    return good, faults, kinds


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
