"""Prompts, and the target's answers to them through an OpenAI endpoint.

The id of a prompt depends on its text alone. Requests run concurrently. Each finished conversation
is journalled before it counts, so a killed run never asks for it again. The output is written from
the journal in the order of the prompts, in ModelOpt's data format.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import random
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, NotRequired, TypedDict, TypeVar

import httpx
from pydantic import Field

from trtspec.checkpoint.conversations import (
    Conversation,
    answer_of,
    read_conversations,
    with_call_ids,
)
from trtspec.checkpoint.output import OutputDirectory
from trtspec.checkpoint.writer import Journal
from trtspec.client.addresses import bearer, server_url
from trtspec.client.client import (
    CHAT,
    OWNED,
    RequestFailed,
    complete,
    new_client,
    refuse_owned,
    remedy_for,
)
from trtspec.client.servers import DetectedServer, detect_server
from trtspec.client.text_quality import degeneration
from trtspec.errors import TrtspecError, UsageError
from trtspec.report import (
    OutputOptions,
    ProgressBar,
    file_sha256,
    provenance,
    write_atomic,
    write_json,
)

T = TypeVar("T")
RETRY_STATUS = (408, 409, 425, 429, 500, 502, 503, 504)
MAX_RETRIES = 6  # retries of a request, with exponential backoff and jitter
FIRST_DELAY_S = 0.5
REFUSED_STATUS = (401, 403, 404)  # HTTP statuses that every other request would get, too
# This many failed requests in a row mean that the server is gone.
MAX_FAILED_IN_A_ROW = 8
# Request keys that options or prompts set. Provenance records them, so `extra_body` must not.
SYNTHESIS_OWNED = {
    **OWNED,
    "messages": "give PROMPTS",
    "prompt": "give PROMPTS",
    "tools": "give PROMPTS that have tools",
    "top_p": "give `top_p`",
    "seed": "leave it out: the seed follows from each prompt's text",
    "stream": "leave it out: answers are not streamed",
    "stream_options": "leave it out: answers are not streamed",
}
ANSWER_FAULTS = ("empty", "noise", "loop", "cut off")  # faults that a head should not learn
REMEDY = "give rows with prompt, messages, conversations or turns"


@dataclass(frozen=True)
class Prompt:
    """The user's side of a conversation.

    Args:
        id: first 16 hex digits of the SHA-256 of the turns and tools.
        turns: messages before each answer. A system message belongs to the first user turn. A tool
            call of the source and its result precede the answer that they led to.
        category: category of the conversation in the source.
        tools: tools that the target may call.
    """

    id: str
    turns: tuple[tuple[dict[str, Any], ...], ...]
    category: str = ""
    tools: tuple[dict[str, Any], ...] = ()

    @property
    def seed(self) -> int:
        """Sampling seed of 31 bits, which depends on the prompt alone, not on run or shard."""
        return int(self.id[:8], 16) % 2**31


def read_prompts(source: Path | str, split: str | None = None, limit: int = 0) -> list[Prompt]:
    """Reads the prompts of a file, a directory or a hub data set (see `read_conversations`).

    Keeps the order of the source, and drops answers and duplicate prompts. Raises UsageError naming
    the row if a row has no prompt, or if the source is empty.

    Args:
        split: split of a hub data set. None: its default split.
        limit: maximum number of prompts. 0: all prompts.
    """
    prompts = distinct(read_conversations(source, split), set())
    chosen = list(islice(prompts, limit or None))
    if not chosen:
        raise UsageError(f"TS-PROMPTS-EMPTY {source} holds no prompt", REMEDY)
    return chosen


def distinct(conversations: Iterable[Conversation], seen: set[str]) -> Iterator[Prompt]:
    """Yields the prompt of each conversation, without duplicate prompts.

    Args:
        seen: ids of earlier prompts, which are left out. The id of each yielded prompt is added.
    """
    for conversation in conversations:
        prompt = prompt_of(conversation)
        if prompt.id not in seen:
            seen.add(prompt.id)
            yield prompt


def prompt_of(conversation: Conversation) -> Prompt:
    """Makes a prompt of a conversation. Raises UsageError if the conversation has no user turn."""
    turns = tuple(map(tuple, _turns(conversation)))
    if not turns:
        raise UsageError(f"TS-PROMPTS-ROW {conversation.where}: no user turn to answer", REMEDY)
    text = json.dumps([turns, conversation.tools], sort_keys=True)
    digest = hashlib.sha256(text.encode()).hexdigest()
    return Prompt(digest[:16], turns, conversation.category, conversation.tools)


def _turns(conversation: Conversation) -> Iterator[list[dict[str, Any]]]:
    """Yields the messages before each answer of a conversation, without the answers.

    Messages that no answer follows (such as a system message at the end) are dropped.
    """
    pending: list[dict[str, Any]] = []
    awaits_answer = False  # whether `pending` ends in a message that an answer follows
    for message in conversation.messages:
        # The reasoning is another model's. The target writes its own.
        message = {key: value for key, value in message.items() if key != "reasoning_content"}
        role = message["role"]
        is_answer = role == "assistant" and not message.get("tool_calls")
        # In a source without answers one user message follows another. Each gets an answer.
        if awaits_answer and (is_answer or role == "user"):
            yield pending
            pending = []
            awaits_answer = False
        # An empty system message would differ from a conversation without one.
        if not is_answer and (role != "system" or message["content"]):
            pending.append(message)
            awaits_answer = role in ("user", "tool")
    if awaits_answer:
        yield pending


def shard(prompts: list[Prompt], text: str | None) -> list[Prompt]:
    """Selects the prompts of one shard.

    The id of a prompt decides its shard, so shards never overlap, even if prompts are added later.
    Raises UsageError if `text` is not i/n.

    Args:
        text: shard i of n as "i/n", with i counted from 0. None: all prompts are selected.
    """
    if text is None:
        return prompts
    try:
        index, count = map(int, text.split("/"))
    except ValueError:
        index = count = 0  # an invalid shard, which the next check refuses
    if not 0 <= index < count:
        message = f"`shard` {text!r} is not i/n with 0 <= i < n"
        raise UsageError(message, "pass, for example, `shard` 0/4")
    return [prompt for prompt in prompts if int(prompt.id, 16) % count == index]


@dataclass(frozen=True)
class AnswerSampling:
    """Sampling options that every request sends.

    Raises UsageError if `extra_body` has a key that an option or the prompts set.

    Args:
        model: name of the model on the server. None: the server's only model.
        max_tokens: maximum number of tokens of an answer.
        extra_body: further keys of the request's JSON.
    """

    model: str | None = None
    max_tokens: int = 512
    temperature: float = 1.0
    top_p: float = 1.0
    extra_body: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        refuse_owned(self.extra_body, SYNTHESIS_OWNED)


@dataclass(frozen=True)
class TargetEndpoint:
    """The OpenAI-compatible endpoint of the target.

    Raises UsageError if `base_url` is not a URL, or if the key is invalid in an HTTP header.

    Args:
        base_url: URL of the server, with or without /v1.
        concurrency: number of prompts that are answered at the same time.
        timeout: timeout of a request in seconds.
    """

    base_url: str
    api_key: str = field(default="none", repr=False)
    concurrency: int = 16
    timeout: float = 600.0

    def __post_init__(self) -> None:
        server_url(self.base_url, "`base_url`")
        bearer(self.api_key, "the key of `api_key` or OPENAI_API_KEY")


class AnsweredRow(TypedDict):
    """A conversation of the data set.

    Args:
        finish_reason: reason why the last answer ended, as the server reports it.
        conversations: messages of the conversation.
    """

    conversation_id: str
    category: NotRequired[str]
    finish_reason: NotRequired[str]
    tools: NotRequired[list[dict[str, Any]]]
    conversations: list[dict[str, Any]]


@dataclass
class Outcome:
    """The result of one call of `synthesize`.

    Args:
        answered: number of conversations that this call has answered.
        resumed: number of conversations that were already in the journal.
        failed: error message by prompt id. The output lacks these prompts.
        tokens: number of completion tokens of this call.
        seconds: duration of this call.
        server: identity of the server that answered.
        rows: conversations of the whole data set, as written to the output.
    """

    answered: int = 0
    resumed: int = 0
    failed: dict[str, str] = field(default_factory=dict)
    tokens: int = 0
    seconds: float = 0.0
    server: dict[str, str] = field(default_factory=dict)
    rows: list[AnsweredRow] = field(default_factory=list)


@dataclass(frozen=True)
class RowMessage:
    """A message of a conversation in the data set."""

    role: str
    content: str
    reasoning_content: str = ""
    tool_calls: tuple[Any, ...] = ()


@dataclass(frozen=True)
class ChatRow:
    """A conversation of the data set, in ModelOpt's format."""

    conversation_id: str
    conversations: Annotated[list[RowMessage], Field(min_length=1)]


@dataclass(frozen=True)
class RowRecord:
    """A record of the journal, with the fields that a valid record must have."""

    row: ChatRow


def synthesize(
    prompts: list[Prompt],
    output: Path,
    endpoint: TargetEndpoint,
    sampling: AnswerSampling,
    output_options: OutputOptions = OutputOptions(),
    bar: ProgressBar = ProgressBar(),
) -> Outcome:
    """Asks the target for the answers that the journal lacks, then writes all answers to `output`.

    The journal stays until the caller finishes `work_directory(output)`. Raises TrtspecError if the
    server is unreachable or fails too often. Raises UsageError if the server refuses the key or the
    model, or if the journal was made with other sampling options or another server.
    """
    header = {"sampling": asdict(sampling)}
    with work_directory(output).claim(header, output_options) as journal:
        journal.entries(RowRecord)  # raises if a record is invalid
        outcome = asyncio.run(_answer_all(prompts, endpoint, sampling, journal, bar))
        done = journal.done
        outcome.rows = [done[prompt.id]["row"] for prompt in prompts if prompt.id in done]
        lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in outcome.rows]
        write_atomic(output, "".join(lines))
    return outcome


def work_directory(output: Path) -> OutputDirectory:
    """Directory next to `output` that holds the journal while answers are missing."""
    return OutputDirectory.beside(output, "synthesize")


def prompt_source(prompts: str, chosen: list[Prompt]) -> dict[str, Any]:
    """Returns the name and the hash of the prompts for the provenance of the data set.

    `prompts_sha256` is the hash of the prompt file. For a directory or a hub data set it is the
    hash of the ids of the prompts.

    Args:
        prompts: path or hub name of the prompts.
        chosen: prompts that were to be answered.
    """
    file = Path(prompts)
    if file.is_file():
        digest = file_sha256(file)
    else:
        ids = "".join(prompt.id for prompt in chosen)
        digest = hashlib.sha256(ids.encode()).hexdigest()
    return {"prompts": file.name, "prompts_sha256": digest}


def write_provenance(
    output: Path,
    source: dict[str, Any],
    endpoint: TargetEndpoint,
    sampling: AnswerSampling,
    server: dict[str, str],
    options: dict[str, Any],
    summary: dict[str, Any],
) -> None:
    """Writes the provenance of the data set to `<output>.provenance.json`.

    Args:
        source: name and hash of the prompts (see `prompt_source`).
        server: identity of the server that answered.
        options: further options of the command.
        summary: further fields of the record.
    """
    source = {**source, "endpoint": endpoint.base_url, "server": server}
    sampled = sampling.__dict__ | {"model": server.get("model")}
    record = provenance("synthesize", source, {"sampling": sampled, **options}, **summary)
    write_json(output.with_name(f"{output.name}.provenance.json"), record)


def judge_answers(rows: list[AnsweredRow]) -> tuple[dict[str, int], dict[str, str]]:
    """Looks for one of ANSWER_FAULTS in the last answer of each conversation of the data set.

    Returns two dicts. The first has the number of `answers`, and the number of answers with each
    fault. The second has the fault of each faulty conversation by conversation id.
    """
    faults = {}
    for row in rows:
        last = row["conversations"][-1]
        text = last.get("reasoning_content", "") + last["content"]
        fault = None
        # An answer that only calls tools has no text to judge.
        if text or not last.get("tool_calls"):
            fault = degeneration(text)
        if row.get("finish_reason") == "length":
            fault = fault or "cut off"
        if fault:
            faults[row["conversation_id"]] = fault
    counts = {"answers": len(rows)}
    listed = list(faults.values())
    for name in ANSWER_FAULTS:
        counts[name] = listed.count(name)
    return counts, faults


async def _answer_all(
    prompts: list[Prompt],
    endpoint: TargetEndpoint,
    sampling: AnswerSampling,
    journal: Journal,
    bar: ProgressBar,
) -> Outcome:
    """Answers the prompts that the journal lacks, and records each finished conversation.

    Raises TrtspecError if the server is unreachable, or after MAX_FAILED_IN_A_ROW failed requests.
    Raises UsageError if the server refuses the key or the model.
    """
    missing = [prompt for prompt in prompts if prompt.id not in journal.done]
    resumed = len(prompts) - len(missing)
    outcome = Outcome(resumed=resumed)
    bar.advance(resumed, f"{resumed} were answered before" if resumed else "")
    start = time.monotonic()
    queue = iter(missing)
    failed_in_a_row = 0
    url = server_url(endpoint.base_url)
    headers = bearer(endpoint.api_key)
    async with new_client(
        url, endpoint.concurrency, endpoint.timeout, headers, proxies=True
    ) as client:
        if missing:
            server = await _find_server(client, sampling.model)
            journal.answered_by({"server": server.identity})
            sampling = replace(sampling, model=server.model)
        outcome.server = journal.servers.get("server", {})

        async def work() -> None:
            """Answers prompts of the shared queue until it is empty."""
            nonlocal failed_in_a_row
            for prompt in queue:
                try:
                    row, tokens = await converse(client, prompt, sampling)
                except RequestFailed as failure:
                    if failure.status in REFUSED_STATUS:
                        message = f"{endpoint.base_url}: {failure.message}"
                        remedy = "check `base_url`, `model` and `api_key`"
                        raise UsageError(message, remedy) from None
                    failed_in_a_row += 1
                    outcome.failed[prompt.id] = failure.message
                    if failed_in_a_row >= MAX_FAILED_IN_A_ROW:
                        raise _server_gone(failure) from None
                    continue
                failed_in_a_row = 0
                journal.record(prompt.id, row=row)
                outcome.answered += 1
                outcome.tokens += tokens
                bar.advance(1, f"{outcome.tokens:,} tokens")

        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(min(endpoint.concurrency, len(missing))):
                    group.create_task(work())
        except ExceptionGroup as failed:  # the first error ended all tasks
            raise failed.exceptions[0] from None
    outcome.seconds = time.monotonic() - start
    return outcome


async def _find_server(client: httpx.AsyncClient, model: str | None) -> DetectedServer:
    """Asks the server for its identity and the name of its model.

    Raises TrtspecError if the server does not answer or lacks the model.

    Args:
        model: name of the model that the server must have. None: the server's only model.
    """
    try:
        return await _with_retries(lambda: detect_server(client, model))
    except RequestFailed as failure:
        message = f"TS-SYNTH-SERVER {failure.message}"
        raise TrtspecError(message, failure.remedy) from None


def _server_gone(last: RequestFailed) -> TrtspecError:
    """Makes the error about MAX_FAILED_IN_A_ROW failed requests. `last`: the last failure."""
    message = (
        f"TS-SYNTH-SERVER {MAX_FAILED_IN_A_ROW} requests in a row failed, last: {last.message}"
    )
    remedy = remedy_for(last.message, "look at the server")
    remedy = f"{remedy}, then run the same command again: finished answers are kept"
    return TrtspecError(message, remedy)


async def converse(
    client: httpx.AsyncClient, prompt: Prompt, sampling: AnswerSampling
) -> tuple[dict[str, Any], int]:
    """Asks the target for the answer to every turn, with its earlier answers as context.

    Returns the conversation as an entry of the data set, and the number of completion tokens.
    Raises RequestFailed if a request fails after all retries.
    """
    record: dict[str, Any] = {"conversation_id": prompt.id}
    if prompt.category:
        record["category"] = prompt.category
    messages: list[dict[str, Any]] = []
    tools = {}
    if prompt.tools:
        tools["tools"] = list(prompt.tools)
    total = 0
    choice: dict[str, Any] = {}
    for number, turn in enumerate(prompt.turns):
        messages += turn
        body = {"messages": messages, **tools}
        choice, tokens = await _ask(client, body, prompt.seed + number, sampling)
        total += tokens
        messages = with_call_ids([*messages, _answer(choice)])
        # Later answers would continue from an incomplete answer, and the chat template would end a
        # turn that the target did not end.
        if choice.get("finish_reason") == "length":
            break
    if choice.get("finish_reason"):
        record["finish_reason"] = choice["finish_reason"]
    return record | tools | {"conversations": messages}, total


def _answer(choice: dict[str, Any]) -> dict[str, Any]:
    """Returns the assistant's message as the data set holds it (see `answer_of`).

    Raises RequestFailed if `choice` has no valid message.

    Args:
        choice: a choice of the server's response, of any JSON type.
    """
    answer = choice.get("message") if isinstance(choice, dict) else None
    if not isinstance(answer, dict):
        raise RequestFailed(f"the answer holds no message: {str(choice)[:200]}")
    try:
        return answer_of(answer)
    except ValueError as error:
        raise RequestFailed(f"the answer {error}") from None


async def _ask(
    client: httpx.AsyncClient,
    body: dict[str, Any],
    seed: int,
    sampling: AnswerSampling,
) -> tuple[dict[str, Any], int]:
    """Sends one chat request.

    Returns the first choice of the response, and the number of completion tokens. The number is 0
    if the server does not report usage. Raises RequestFailed if the request fails after all
    retries, or if the response is not a completion.
    """
    body = {
        "model": sampling.model,
        "max_tokens": sampling.max_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "seed": seed,
        **sampling.extra_body,
        **body,
    }
    reply = await _with_retries(lambda: complete(client, CHAT, body))
    try:
        choice = reply["choices"][0]
        usage = reply.get("usage") or {}
        return choice, int(usage.get("completion_tokens") or 0)
    except (AttributeError, TypeError, ValueError):
        raise RequestFailed(f"the answer is not a completion: {str(reply)[:200]}") from None


async def _with_retries(send: Callable[[], Awaitable[T]]) -> T:
    """Calls `send` until it succeeds, and returns its result.

    Retries connection errors and the statuses RETRY_STATUS up to MAX_RETRIES times. Raises
    RequestFailed after the last retry, or at once for any other status.
    """
    attempt = 0
    while True:
        try:
            return await send()
        except RequestFailed as failure:
            # The status of a connection error is None.
            if attempt == MAX_RETRIES or failure.status not in (None, *RETRY_STATUS):
                raise
        delay_s = FIRST_DELAY_S * 2**attempt
        await asyncio.sleep(delay_s * random.uniform(0.5, 1.0))
        attempt += 1
