"""What a release does with request parameters under speculation: each is sent alone, in one harmless request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from trtspec.bench.asking import MISSHAPEN, Asker, declined, read_answer
from trtspec.bench.gate import CheckResult, Status, result
from trtspec.bench.load.findings import RequestLimits
from trtspec.bench.transcript import ParameterReply, Recording, Transcript
from trtspec.errors import TrtspecError

HONOURED, NO_EFFECT, REFUSED, NOT_SENT = "honoured", "no effect", "refused", "not sent"
NO_ANSWER = "no answer"  # not even a refusal: the request failed
MORE = 8  # tokens that min_tokens asks for beyond the answer's own end


@dataclass(frozen=True)
class ParameterProbe:
    """`fields` are sent with a prompt whose greedy answer is known."""

    name: str
    fields: dict[str, Any]


NOTED = {"bad": "bad_words", "min_tokens": "min_length"}


def noted(parameter: str) -> str:
    """What release notes call a request parameter."""
    return NOTED.get(parameter, parameter)


CHANGES = (
    ParameterProbe("frequency_penalty", {"frequency_penalty": 2.0}),
    ParameterProbe("presence_penalty", {"presence_penalty": 2.0}),
    ParameterProbe("repetition_penalty", {"repetition_penalty": 1.5}),
)
TEMPERATURE = ({"temperature": 1.0, "seed": 7}, {"temperature": 1.0, "seed": 8}, {"temperature": 1.0, "seed": 7})


async def probe_parameters(asker: Asker, answered: Sequence[Transcript], limits: RequestLimits) -> list[ParameterReply]:
    """One row per parameter. Those that end an engine of this release are not sent."""
    longest = max(answered, key=lambda transcript: len(transcript.text))
    found = [await _changed(asker, probe, longest, limits) for probe in CHANGES]
    found.append(await _bad_word(asker, longest, limits))
    found.append(await _min_tokens(asker, answered, limits))
    found += await _sampling(asker, longest)
    return found


async def _changed(asker: Asker, probe: ParameterProbe, base: Transcript, limits: RequestLimits) -> ParameterReply:
    """A penalty, or a word that must not come, changes a long answer; where it does not, it was dropped, or nothing in
    the answer repeats."""
    if (deadly := _deadly(probe, limits)) is not None:
        return deadly
    got = await _ask(asker, base, probe.fields)
    if isinstance(got, str):
        return _unanswered(probe.name, got)
    return ParameterReply(probe.name, NO_EFFECT if got.text == base.text else HONOURED)


async def _bad_word(asker: Asker, base: Transcript, limits: RequestLimits) -> ParameterReply:
    words = [word for word in base.content.split() if word.isalpha() and len(word) > 2]
    if not words:
        return ParameterReply("bad", NOT_SENT, "no answer holds a word")
    return await _changed(asker, ParameterProbe("bad", {"bad": f" {words[-1]}"}), base, limits)


async def _min_tokens(asker: Asker, answered: Sequence[Transcript], limits: RequestLimits) -> ParameterReply:
    ended = [t for t in answered if t.finish_reason == "stop" and 0 < (t.completion_tokens or 0) < asker.max_tokens]
    if not ended:
        return ParameterReply("min_tokens", NOT_SENT, "no answer ends by itself within --max-tokens")
    base = min(ended, key=lambda transcript: transcript.completion_tokens or 0)
    least = min(asker.max_tokens, (base.completion_tokens or 0) + MORE)
    probe = ParameterProbe("min_tokens", {"min_tokens": least})
    if (deadly := _deadly(probe, limits)) is not None:
        return deadly
    got = await _ask(asker, base, probe.fields)
    if isinstance(got, str):
        return _unanswered(probe.name, got)
    return ParameterReply(probe.name, HONOURED if (got.completion_tokens or 0) >= least else NO_EFFECT)


async def _sampling(asker: Asker, base: Transcript) -> list[ParameterReply]:
    """Two seeds differ where the temperature is honoured, one seed twice does not where the seed is."""
    replies = [await _ask(asker, base, fields) for fields in TEMPERATURE]
    refused = next((reply for reply in replies if isinstance(reply, str)), None)
    if refused is not None:
        return [_unanswered(name, refused) for name in ("temperature", "seed")]
    first, other, again = (reply.text for reply in replies if not isinstance(reply, str))
    if first == other == base.text:
        return [ParameterReply("temperature", NO_EFFECT, "sampled answers are the greedy one"),
                ParameterReply("seed", NOT_SENT, "the temperature has no effect")]  # fmt: skip
    return [ParameterReply("temperature", HONOURED), ParameterReply("seed", HONOURED if first == again else NO_EFFECT)]


def _unanswered(name: str, reason: str) -> ParameterReply:
    return ParameterReply(name, REFUSED if declined(reason) else NO_ANSWER, reason)


async def _ask(asker: Asker, base: Transcript, fields: dict[str, Any]) -> Transcript | str:
    """The answer, or why there is none."""
    try:
        return read_answer(base.prompt, await asker.reply(asker.body(base.messages, {**base.extra, **fields})))
    except TrtspecError as error:
        return error.message
    except MISSHAPEN as error:
        return f"no chat completion ({type(error).__name__}: {error})"


def _deadly(probe: ParameterProbe, limits: RequestLimits) -> ParameterReply | None:
    deadly = limits.get("end_engine", ())
    if not {probe.name, noted(probe.name)} & set(deadly):
        return None
    return ParameterReply(probe.name, NOT_SENT, "it ends a speculating engine of this release")


def check_parameters(got: Recording, expected: Recording | None) -> CheckResult:
    """What became of each request parameter; a table, which fails nothing: releases say what they drop. Whether the
    server is still there afterwards is the business of the row `answers`."""
    mine = got.parameters
    theirs = {reply.name: reply for reply in expected.parameters} if expected else {}
    if not mine:
        return result("parameters", "skipped", "no parameter was sent")
    table = [
        {"parameter": r.name, "outcome": r.outcome, "words": r.words[:200],
         "without_speculation": theirs[r.name].outcome if r.name in theirs else None}
        for r in mine
    ]  # fmt: skip
    kinds = {HONOURED: "honoured", NO_EFFECT: "without effect", REFUSED: "refused", NO_ANSWER: "no answer to",
             NOT_SENT: "not sent"}  # fmt: skip
    named = {said: [r.name for r in mine if r.outcome == outcome] for outcome, said in kinds.items()}
    words = [f"{said}: {', '.join(names)}" for said, names in named.items() if names]
    worse = [r.name for r in mine if r.outcome in (NO_EFFECT, REFUSED, NO_ANSWER)]
    lost = [name for name in worse if name in theirs and theirs[name].outcome == HONOURED]
    message = "; ".join(words) + (f"; lost with speculation: {', '.join(lost)}" if lost else "")
    failed = [r for r in mine if r.outcome == NO_ANSWER]
    message += f" ({failed[0].words[:120]})" if failed else ""
    status: Status = "skipped" if len(failed) == sum(r.outcome != NOT_SENT for r in mine) > 0 else "pass"
    return result("parameters", status, message, table=table, lost=lost)
