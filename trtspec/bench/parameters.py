"""What a release does with request parameters under speculation: each is sent alone, in one harmless request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from trtspec.bench.asking import MISSHAPEN, Asker, read_answer
from trtspec.bench.findings import RequestLimits
from trtspec.bench.transcript import ParameterReply, Transcript
from trtspec.errors import TrtspecError

HONOURED, NO_EFFECT, REFUSED, NOT_SENT = "honoured", "no effect", "refused", "not sent"
MORE = 8  # tokens that min_tokens asks for beyond the answer's own end


@dataclass(frozen=True)
class ParameterProbe:
    """`fields` are sent with a prompt whose greedy answer is known. `limit`: what release notes call the parameter."""

    name: str
    fields: dict[str, Any]
    limit: str = ""


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
        return ParameterReply(probe.name, REFUSED, got)
    return ParameterReply(probe.name, NO_EFFECT if got.text == base.text else HONOURED)


async def _bad_word(asker: Asker, base: Transcript, limits: RequestLimits) -> ParameterReply:
    words = [word for word in base.content.split() if word.isalpha() and len(word) > 2]
    if not words:
        return ParameterReply("bad", NOT_SENT, "no answer holds a word")
    return await _changed(asker, ParameterProbe("bad", {"bad": f" {words[-1]}"}, "bad_words"), base, limits)


async def _min_tokens(asker: Asker, answered: Sequence[Transcript], limits: RequestLimits) -> ParameterReply:
    ended = [t for t in answered if t.finish_reason == "stop" and 0 < (t.completion_tokens or 0) < asker.max_tokens]
    if not ended:
        return ParameterReply("min_tokens", NOT_SENT, "no answer ends by itself within --max-tokens")
    base = min(ended, key=lambda transcript: transcript.completion_tokens or 0)
    least = min(asker.max_tokens, (base.completion_tokens or 0) + MORE)
    probe = ParameterProbe("min_tokens", {"min_tokens": least}, "min_length")
    if (deadly := _deadly(probe, limits)) is not None:
        return deadly
    got = await _ask(asker, base, probe.fields)
    if isinstance(got, str):
        return ParameterReply(probe.name, REFUSED, got)
    return ParameterReply(probe.name, HONOURED if (got.completion_tokens or 0) >= least else NO_EFFECT)


async def _sampling(asker: Asker, base: Transcript) -> list[ParameterReply]:
    """Two seeds differ where the temperature is honoured, one seed twice does not where the seed is."""
    replies = [await _ask(asker, base, fields) for fields in TEMPERATURE]
    refused = next((reply for reply in replies if isinstance(reply, str)), None)
    if refused is not None:
        return [ParameterReply(name, REFUSED, refused) for name in ("temperature", "seed")]
    first, other, again = (reply.text for reply in replies if not isinstance(reply, str))
    if first == other == base.text:
        return [ParameterReply("temperature", NO_EFFECT, "sampled answers are the greedy one"),
                ParameterReply("seed", NOT_SENT, "the temperature has no effect")]  # fmt: skip
    return [ParameterReply("temperature", HONOURED), ParameterReply("seed", HONOURED if first == again else NO_EFFECT)]


async def _ask(asker: Asker, base: Transcript, fields: dict[str, Any]) -> Transcript | str:
    """The answer, or the server's refusal."""
    try:
        return read_answer(base.prompt, await asker.reply(asker.body(base.messages, {**base.extra, **fields})))
    except TrtspecError as error:
        return error.message
    except MISSHAPEN as error:
        return f"no chat completion ({type(error).__name__}: {error})"


def _deadly(probe: ParameterProbe, limits: RequestLimits) -> ParameterReply | None:
    deadly = limits.get("end_engine", ())
    if probe.name not in deadly and (probe.limit or probe.name) not in deadly:
        return None
    return ParameterReply(probe.name, NOT_SENT, "it ends a speculating engine of this release")
