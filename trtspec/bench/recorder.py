"""Asks one server everything that the gate judges, in an order in which each part keeps its meaning.

The prompts cold and not streamed; a baseline once more at another concurrency; the same prompts as streams (now warm);
the long prompts twice; tools, follow-ups, forms, stop strings; a burst; and the prompts as streams again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from trtspec.bench import battery
from trtspec.bench.arguments import at_limit, cut_off
from trtspec.bench.asking import PAIR, TOP, Asker, declined
from trtspec.bench.battery import Battery
from trtspec.bench.features import stream_fault
from trtspec.bench.load.findings import RequestLimits
from trtspec.bench.parameters import probe_parameters
from trtspec.bench.statistics import without_surplus
from trtspec.bench.transcript import (
    AskedPrompt,
    BurstReply,
    ParameterReply,
    RecordedPass,
    Recording,
    ToolReply,
    Transcript,
)  # fmt: skip
from trtspec.client import servers
from trtspec.client.client import Endpoint, new_client
from trtspec.client.servers import Counters, TurnCounts
from trtspec.errors import TrtspecError

FATES = {
    "end_engine": "they can end a speculating engine of release {} (--logprobs sends them to a plain one)",
    "ignored": "release {} leaves them out under speculation, and may hang over them",
    "refused": "release {} refuses them under speculation",
}
PROBES = 4  # answers that show whether a server speculates
FEW = 3  # tool requests without a call after which no more are sent
REPEAT = 4  # a repeated pass has as many rows in a step as verification of three drafts
BURST = 8  # requests at once, for each that is usually in flight
BURST_TOKENS = 16
ROOM = 1024  # tokens for an answer that was cut off while it reasoned, where fewer are asked for


@dataclass(frozen=True, kw_only=True)
class RecorderOptions:
    """`baseline`: the server should run without speculation, and its own rounding is measured. `logprobs`: ask for
    log-probabilities whatever is known of the release. `timeout`: seconds for one answer."""

    concurrency: int = 4
    model: str | None = None
    limits: Callable[[servers.DetectedServer], RequestLimits] = lambda server: {}
    baseline: bool = False
    logprobs: bool = False
    timeout: float = 120.0


async def record(url: str, asked: Battery, options: RecorderOptions) -> Recording:
    """Raises TrtspecError where the server lists no model; every later failure is part of the recording."""
    async with new_client(url, options.concurrency * max(REPEAT, BURST), options.timeout) as client:
        server = await servers.detect_server(client, options.model)
        endpoint = Endpoint(url, server.model)
        asker = Asker(client, endpoint, asked.max_tokens, options.timeout, options.concurrency)
        watching = asyncio.create_task(asker.watch_clock())
        try:
            return await _record(asker, server, asked, options)
        finally:
            watching.cancel()


async def _record(asker: Asker, server: servers.DetectedServer, asked: Battery, options: RecorderOptions) -> Recording:
    limits, client = options.limits(server), asker.client
    withheld = None if options.logprobs else await _reason_to_withhold(asker, server, limits, asked, options)
    asker.logprobs = withheld is None
    before = await servers.read_counters(client, server)
    cold = await _cold(asker, asked)
    after = await servers.read_counters(client, server)
    counts = counts_of_transcripts(cold)
    counts = counts or _pooled(before, after, cold)
    counts = counts or await servers.running_mean(client, server, sum(item.completion_tokens or 0 for item in cold))
    if withheld is None and not any(transcript.tokens for transcript in cold):
        withheld = "the server gives none"
    found = Recording(asker.endpoint.base_url, server.to_dict(), asked.max_tokens, cold, counts=counts,
                  withheld=withheld, concurrency=options.concurrency)  # fmt: skip
    if options.baseline:
        repeated = await asker.all(asked.prompts, False, REPEAT * options.concurrency)
        found = replace(found, repeats=[RecordedPass(REPEAT * options.concurrency, repeated)])
    found = await _streams(asker, server, asked, found)
    found = await _features(asker, asked, found, limits)
    if options.baseline:
        found = await _long_whole(asker, found)
        called = {reply.question for reply in found.tools if reply.calls}
        asks = [_roomy(asker, ask) if ask[2] in called else ask for ask in _tool_asks(asked.each)]
        found = replace(
            found,
            repeated_tools=await _told_again(asker, asks if called else [], cut_off),
            repeated_follow_ups=await _told_again(asker, _follow_up_asks(asked.each), cut_off),
            repeated_forms=await _told_again(asker, _form_asks(asked.each), at_limit),
        )
    return replace(found, stopped=asker.stopped)


async def _reason_to_withhold(
    asker: Asker, server: servers.DetectedServer, limits: RequestLimits, asked: Battery, options: RecorderOptions
) -> str | None:
    """Why log-probabilities are not asked for, or None where the release is known to survive it, or where a few answers
    show that it drafts nothing; a baseline that does not tell is taken for plain. Nothing shows that where they can end
    the engine: a head of which no draft is accepted has the averages of a plain server."""
    fate = next((kind for kind in FATES if "logprobs" in limits.get(kind, ())), None)
    if server.adapter.survives_logprobs or (limits and fate is None):
        return None
    if fate == "end_engine":
        return FATES[fate].format(server.version)
    few = await asker.all(asked.prompts[:PROBES], streamed=False)
    counts = counts_of_transcripts(few)
    plain = not any(found.accepted or found.drafted for found in counts) if counts else options.baseline
    if plain and (options.baseline or counts):
        return None
    if fate is not None:
        return FATES[fate].format(server.version)
    return f"it is not known whether a speculating server of this kind ({server.kind}) survives them (--logprobs)"


def counts_of_transcripts(transcripts: Sequence[Transcript]) -> list[TurnCounts]:
    """What the answers themselves say about speculation; nothing of those that say nothing or nonsense."""
    found = []
    for transcript in transcripts:
        tokens, average = transcript.completion_tokens or 0, transcript.average
        counts = servers.counts_of(transcript.question, transcript.category, tokens, transcript.spec_decode, average)
        if counts is not None and transcript.error is None:
            found.append(counts)
    return found


def _pooled(before: Counters | None, after: Counters | None, answers: Sequence[Transcript]) -> list[TurnCounts]:
    """A server's counters around these answers as one entry, or nothing where one failed, whose steps are in them."""
    told = [item for item in answers if item.completion_tokens]
    if before is None or after is None or not told or any(item.error for item in answers):
        return []
    pooled = servers.counts_between(before, after, "all", sum(item.completion_tokens or 0 for item in told))
    return [without_surplus(pooled, len(told), len(told))] if pooled else []


async def _cold(asker: Asker, asked: Battery) -> list[Transcript]:
    """The first pass. A server that refuses log-probabilities with a plain error is asked for fewer, then without."""
    first = await asker.ask(asked.prompts[0])
    if first.error and asker.logprobs:
        asker.top = PAIR
        first = await asker.ask(asked.prompts[0])
        asker.top = TOP if first.error else PAIR
    if first.error and asker.logprobs:
        asker.logprobs = False
        again = await asker.ask(asked.prompts[0])
        asker.logprobs = again.error is not None  # it was not for them
        first = again
    rest = await asker.all(asked.prompts[1:], streamed=False)
    return [first, *rest]


async def _streams(asker: Asker, server: servers.DetectedServer, asked: Battery, found: Recording) -> Recording:
    """The prompts as streams, the long ones twice, and the prompts again behind a burst."""
    prompts = [transcript.prompt for transcript in found.answered]
    if prompts:
        first = await asker.stream(prompts[0])
        if first.error:  # some servers refuse options of streams that they do not know
            asker.per_chunk = False
    before = await servers.read_counters(asker.client, server)
    streamed = await asker.all(prompts, streamed=True)
    counts = _pooled(before, await servers.read_counters(asker.client, server), streamed)
    confirmed = await asker.all(differing(found.answered, streamed), streamed=False)
    cold, warm = await _long(asker, asked.long)
    burst = await _burst(asker, prompts)
    later = await asker.all([prompt for prompt in prompts if prompt.group == "prompts"], streamed=True)
    return replace(
        found,
        streamed=streamed,
        streamed_counts=counts,
        confirmed=confirmed,
        long_cold=cold,
        long_warm=warm,
        burst=burst,
        later=later,
    )


async def _long(asker: Asker, prompts: Sequence[AskedPrompt]) -> tuple[list[Transcript], list[Transcript]]:
    """Each length first cold, then warm; a length whose first prompt is refused is not asked again."""
    cold: list[Transcript] = []
    warm: list[Transcript] = []
    for length in dict.fromkeys(prompt.group for prompt in prompts):
        group = [prompt for prompt in prompts if prompt.group == length]
        first = await asker.stream(group[0])
        cold.append(first)
        if first.error:
            continue
        cold += await asker.all(group[1:], streamed=True)
        warm += await asker.all(group, streamed=True)
    return cold, warm


async def _long_whole(asker: Asker, found: Recording) -> Recording:
    """A baseline's gaps in long answers, twice: streams have none. In smaller batches, since the prompts are long."""
    prompts = [item.prompt for item in found.long_cold if item.error is None]
    whole = await asker.all(prompts, streamed=False)
    asker, fewer = replace(asker), max(1, asker.concurrency // 2)  # what fails here stops nothing
    again = RecordedPass(fewer, await asker.all(prompts, False, fewer))
    return replace(found, long_whole=whole, repeats=[*found.repeats, again] if prompts else found.repeats)


def differing(expected: Sequence[Transcript], got: Sequence[Transcript]) -> list[AskedPrompt]:
    """The prompts whose answers are not the same."""
    texts = {transcript.question: transcript.trimmed for transcript in got if transcript.error is None}
    return [item.prompt for item in expected if texts.get(item.question, item.trimmed) != item.trimmed]


async def _burst(asker: Asker, prompts: Sequence[AskedPrompt]) -> BurstReply | None:
    """Many short requests at once. A server may refuse some of them (429, 503), and must live on."""
    size = BURST * asker.concurrency
    if not prompts or asker.stopped:
        return None
    bodies = [asker.body(prompts[i % len(prompts)].messages, {"max_tokens": BURST_TOKENS}) for i in range(size)]
    replies = await asyncio.gather(*(asker.reply(body) for body in bodies), return_exceptions=True)
    failures = [str(reply) for reply in replies if isinstance(reply, TrtspecError)]
    unforeseen = [
        reply for reply in replies if isinstance(reply, BaseException) and not isinstance(reply, TrtspecError)
    ]
    if unforeseen:
        raise unforeseen[0]
    refused = [text for text in failures if text.startswith(("HTTP 429", "HTTP 503"))]
    failed = [text for text in failures if text not in refused]
    return BurstReply(size, len(refused), len(failed), failed[0] if failed else "")


async def _features(asker: Asker, asked: Battery, found: Recording, limits: RequestLimits) -> Recording:
    """Tools, follow-ups, forms, stop strings, an image, and request parameters one at a time."""
    tools, streamed_tools, confirmed_tools = await _tools(asker, asked.each)
    follow_ups = await _with_room(asker, _follow_up_asks(asked.each), cut_off)
    forms = await _with_room(asker, _form_asks(asked.each), at_limit)
    stops = await _replies(asker.tool, [
        (transcript.messages, {**transcript.extra, "stop": [word]}, transcript.question)
        for transcript in found.answered if (word := battery.stop_word(transcript))
    ][: min(battery.FEW, asked.each)], asker.concurrency)  # fmt: skip
    image = await asker.tool(battery.image_question(), {"max_tokens": BURST_TOKENS}, "image")
    parameters: list[ParameterReply] = []
    after_probes: list[Transcript] = []
    if found.answered and not asker.stopped:
        parameters = await probe_parameters(asker, found.answered, limits)
        after_probes.append(await asker.ask(found.answered[0].prompt))
    return replace(
        found,
        tools=tools,
        streamed_tools=streamed_tools,
        confirmed_tools=confirmed_tools,
        follow_ups=follow_ups,
        forms=forms,
        stops=stops,
        image=image,
        parameters=parameters,
        after_probes=after_probes,
    )


async def _tools(asker: Asker, count: int) -> tuple[list[ToolReply], list[ToolReply], list[ToolReply]]:
    """Requests with a tool, the same as streams, and unstreamed again where these differ; only a few where the first
    ones bring no call."""
    asks = _tool_asks(count)
    found = await _with_room(asker, asks[:FEW], cut_off)
    if not any(reply.calls for reply in found):
        return found, [], []
    found += await _with_room(asker, asks[FEW:], cut_off)
    whole = {reply.question: reply for reply in found if reply.calls}
    called = [_roomy(asker, ask) for ask in asks if ask[2] in whole]  # the greedy answer ends where it ended
    streamed = await _replies(asker.streamed_tool, called, asker.concurrency)
    other = {reply.question for reply in streamed if stream_fault(whole[reply.question], reply)}
    again = await _replies(asker.tool, [ask for ask in called if ask[2] in other], asker.concurrency)
    return found, streamed, again


def _tool_asks(count: int) -> list[AskedOnce]:
    offered: dict[str, Any] = {"tools": [battery.TOOL], "tool_choice": "auto"}
    return [
        ([{"role": "user", "content": battery.tool_question(i)}], offered, battery.tool_name(i)) for i in range(count)
    ]


def _follow_up_asks(count: int) -> list[AskedOnce]:
    return [(battery.follow_up(i), {"tools": [battery.TOOL]}, battery.tool_name(i)) for i in range(count)]


def _form_asks(count: int) -> list[AskedOnce]:
    form = {"type": "json_schema", "json_schema": {"name": "described", "schema": battery.FORM_SCHEMA}}
    few = range(min(battery.FEW, count))
    return [(battery.form_question(i), {"response_format": form}, battery.tool_name(i)) for i in few]


async def _told_again(
    asker: Asker, asks: Sequence[AskedOnce], unfinished: Callable[[ToolReply], bool]
) -> list[ToolReply]:
    """A baseline's replies at another concurrency, with log-probabilities where the server gives them with tools."""
    faster = replace(asker, concurrency=REPEAT * asker.concurrency)
    found: list[ToolReply] = []
    if asker.logprobs:
        told = {"logprobs": True, "top_logprobs": asker.top}
        telling = [(messages, {**extra, **told}, name) for messages, extra, name in asks]
        found = await _with_room(faster, telling, unfinished)
    if any(not reply.error for reply in found):
        return found
    return await _with_room(faster, asks, unfinished)


AskedOnce = tuple[list[dict[str, Any]], dict[str, Any], str]  # messages, further fields, the question's name


async def _replies(
    ask: Callable[[list[dict[str, Any]], dict[str, Any], str], Awaitable[ToolReply]],
    asks: Sequence[AskedOnce],
    concurrency: int,
) -> list[ToolReply]:
    slots = asyncio.Semaphore(concurrency)

    async def one(messages: list[dict[str, Any]], extra: dict[str, Any], question: str) -> ToolReply:
        async with slots:
            return await ask(messages, extra, question)

    first = [await one(*asks[0])] if asks else []
    if first and declined(first[0].error):
        return first  # refused: so would be the others
    return first + list(await asyncio.gather(*(one(*each) for each in asks[1:])))


async def _with_room(
    asker: Asker, asks: Sequence[AskedOnce], unfinished: Callable[[ToolReply], bool]
) -> list[ToolReply]:
    """Replies; those that were cut off are asked for again with more tokens, if that helps one of the first."""
    found = await _replies(asker.tool, asks, asker.concurrency)
    cut = {reply.question for reply in found if unfinished(reply)}
    again = [_roomy(asker, ask) for ask in asks if ask[2] in cut]
    if not again or asker.max_tokens >= ROOM:
        return found
    longer = await _replies(asker.tool, again[:FEW], asker.concurrency)
    if any(not reply.error and not unfinished(reply) for reply in longer):
        longer += await _replies(asker.tool, again[FEW:], asker.concurrency)
    finished = {reply.question: reply for reply in longer if not reply.error}
    return [finished.get(reply.question, reply) for reply in found]


def _roomy(asker: Asker, ask: AskedOnce) -> AskedOnce:
    messages, extra, question = ask
    return messages, {**extra, "max_tokens": max(ROOM, asker.max_tokens)}, question
