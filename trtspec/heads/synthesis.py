"""Prompts, each with an id of its text alone, and the answers of the target through an OpenAI endpoint: concurrent,
resumable, in order.

Each finished conversation is journalled before it counts, so a killed run never asks for it again. The output is
written from the journal in the order of the prompts, in ModelOpt's data format.
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
from typing import Annotated, Any, TypeVar

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
from trtspec.client.servers import detect_server
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
RETRIES = 6  # of one request, with exponential backoff and jitter
FIRST_DELAY_S = 0.5
REFUSED_STATUS = (401, 403, 404)  # which every other request would get, too
MAX_FAILED_IN_A_ROW = 8  # then the server is gone, not one request unlucky
# keys of a request that options or the prompts set, and the provenance states
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
ANSWER_FAULTS = ("empty", "noise", "loop", "cut off")
REMEDY = "each row has prompt, messages, conversations or turns"


@dataclass(frozen=True)
class Prompt:
    """`turns` are the messages before each answer: a system message, if any, belongs to the first user turn, and a
    tool call of the source with its result precedes the answer that it led to."""

    id: str
    turns: tuple[tuple[dict[str, Any], ...], ...]
    category: str = ""
    tools: tuple[dict[str, Any], ...] = ()

    @property
    def seed(self) -> int:
        """Of the sampling: the same prompt gets the same seed in every run and shard."""
        return int(self.id[:8], 16) % 2**31


def read_prompts(source: Path | str, split: str | None = None, limit: int = 0) -> list[Prompt]:
    """Prompts of a file, a directory or a hub data set (see `read_conversations`), in order, each text once, at most
    `limit` (0: all). Answers are dropped. Raises UsageError naming the row that is no prompt."""
    prompts = distinct(read_conversations(source, split), set())
    chosen = list(islice(prompts, limit or None))
    if not chosen:
        raise UsageError(f"TS-PROMPTS-EMPTY {source} holds no prompt", REMEDY)
    return chosen


def distinct(conversations: Iterable[Conversation], seen: set[str]) -> Iterator[Prompt]:
    """The prompt of each conversation, the first of equal ones; `seen` are ids of earlier ones."""
    for conversation in conversations:
        prompt = prompt_of(conversation)
        if prompt.id not in seen:
            seen.add(prompt.id)
            yield prompt


def prompt_of(conversation: Conversation) -> Prompt:
    """Raises UsageError (TS-PROMPTS-ROW) where nobody asks anything."""
    turns = tuple(tuple(turn) for turn in _turns(conversation))
    if not turns:
        raise UsageError(f"TS-PROMPTS-ROW {conversation.where}: no user turn to answer", REMEDY)
    digest = hashlib.sha256(
        json.dumps([turns, conversation.tools], sort_keys=True).encode()
    ).hexdigest()[:16]
    return Prompt(digest, turns, conversation.category, conversation.tools)


def _turns(conversation: Conversation) -> Iterator[list[dict[str, Any]]]:
    """The user's side of a conversation, cut into what precedes each answer."""
    pending: list[dict[str, Any]] = []
    asked = False  # whether `pending` ends in what an answer follows
    for message in conversation.messages:
        message = {key: value for key, value in message.items() if key != "reasoning_content"}
        answered = message["role"] == "assistant" and not message.get("tool_calls")
        # in a source without answers, each question gets one
        if asked and (answered or message["role"] == "user"):
            yield pending
            pending = []
            asked = False
        if not answered and (message["role"] != "system" or message["content"]):
            pending.append(message)
            asked = message["role"] in ("user", "tool")
    if asked:
        yield pending


def shard(prompts: list[Prompt], text: str | None) -> list[Prompt]:
    """`i/n` (i from 0): the prompts whose id falls to part i, so that shards never overlap whatever is added."""
    if text is None:
        return prompts
    try:
        index, count = (int(part) for part in text.split("/"))
    except ValueError:
        index, count = -1, 0
    if not 0 <= index < count:
        raise UsageError(f"`shard` {text!r} is not i/n with 0 <= i < n", "for example `shard` 0/4")
    return [prompt for prompt in prompts if int(prompt.id, 16) % count == index]


@dataclass(frozen=True)
class AnswerSampling:
    """What is sent with every request."""

    model: str | None = None
    max_tokens: int = 512
    temperature: float = 1.0
    top_p: float = 1.0
    extra_body: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        refuse_owned(self.extra_body, SYNTHESIS_OWNED)


@dataclass(frozen=True)
class TargetEndpoint:
    """`base_url` with or without /v1; UsageError for one that is no URL, or a key that no header can carry."""

    base_url: str
    api_key: str = field(default="none", repr=False)
    concurrency: int = 16
    timeout: float = 600.0

    def __post_init__(self) -> None:
        server_url(self.base_url, "`base_url`")
        bearer(self.api_key, "the key of `api_key` or OPENAI_API_KEY")


@dataclass
class Outcome:
    """Counts of one run. `resumed` conversations came from the journal; `failed` ids are left out of the output."""

    answered: int = 0
    resumed: int = 0
    failed: dict[str, str] = field(default_factory=dict)
    tokens: int = 0
    seconds: float = 0.0
    server: dict[str, str] = field(default_factory=dict)  # what is known of the one that answered
    rows: list[dict[str, Any]] = field(default_factory=list)  # the whole data set, as written


@dataclass(frozen=True)
class RowMessage:
    role: str
    content: str
    reasoning_content: str = ""
    tool_calls: tuple[Any, ...] = ()


@dataclass(frozen=True)
class ChatRow:
    conversation_id: str
    conversations: Annotated[list[RowMessage], Field(min_length=1)]


@dataclass(frozen=True)
class RowRecord:
    """A record of the journal. The row may have more fields."""

    row: ChatRow


def synthesize(
    prompts: list[Prompt],
    output: Path,
    endpoint: TargetEndpoint,
    sampling: AnswerSampling,
    again: OutputOptions = OutputOptions(),
    bar: ProgressBar = ProgressBar(),
) -> Outcome:
    """Answers every prompt that the journal lacks, then writes `output`. The caller finishes `work_directory`.

    Raises TrtspecError if the server is gone or refuses, UsageError if the journal is another sampling's or server's.
    """
    with work_directory(output).claim({"sampling": asdict(sampling)}, again) as journal:
        journal.entries(RowRecord)
        outcome = asyncio.run(_answer_all(prompts, endpoint, sampling, journal, bar))
        outcome.rows = [
            journal.done[prompt.id]["row"] for prompt in prompts if prompt.id in journal.done
        ]
        write_atomic(
            output, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in outcome.rows)
        )
    return outcome


def work_directory(output: Path) -> OutputDirectory:
    """Holds the journal while answers are missing."""
    return OutputDirectory.beside(output, "synthesize")


def write_provenance(
    output: Path,
    prompts: str,
    chosen: list[Prompt],
    endpoint: TargetEndpoint,
    sampling: AnswerSampling,
    server: dict[str, str],
    options: dict[str, Any],
    summary: dict[str, Any],
) -> None:
    """The data set's provenance, beside it; of prompts from a directory or a hub data set the ids are hashed."""
    ids = hashlib.sha256("".join(prompt.id for prompt in chosen).encode()).hexdigest()
    file = Path(prompts)
    digest = file_sha256(file) if file.is_file() else ids
    source = {
        "prompts": file.name,
        "prompts_sha256": digest,
        "endpoint": endpoint.base_url,
        "server": server,
    }
    used = {"sampling": sampling.__dict__ | {"model": server.get("model")}, **options}
    path = output.with_name(f"{output.name}.provenance.json")
    write_json(path, provenance("synthesize", source, used, **summary))


def judge_answers(rows: list[dict[str, Any]]) -> tuple[dict[str, int], dict[str, str]]:
    """(counts of what a head should not learn much of, the reason by row): answers that are empty, noise or a loop, or
    that the token limit cut off."""
    found = {}
    for row in rows:
        last = row["conversations"][-1]
        text = last.get("reasoning_content", "") + last["content"]
        reason = None if last.get("tool_calls") and not text else degeneration(text)
        if reason or row.get("finish_reason") == "length":
            found[row["conversation_id"]] = reason or "cut off"
    reasons = list(found.values())
    return {"answers": len(rows)} | {name: reasons.count(name) for name in ANSWER_FAULTS}, found


async def _answer_all(
    prompts: list[Prompt],
    endpoint: TargetEndpoint,
    sampling: AnswerSampling,
    journal: Journal,
    bar: ProgressBar,
) -> Outcome:
    todo = [prompt for prompt in prompts if prompt.id not in journal.done]
    outcome = Outcome(resumed=len(prompts) - len(todo))
    bar.advance(
        outcome.resumed, f"{outcome.resumed} were answered before" if outcome.resumed else ""
    )
    began = time.monotonic()
    queue = iter(todo)
    in_a_row = 0
    url, headers = server_url(endpoint.base_url), bearer(endpoint.api_key)
    async with new_client(
        url, endpoint.concurrency, endpoint.timeout, headers, proxies=True
    ) as client:
        if todo:
            try:
                server = await _with_retries(lambda: detect_server(client, sampling.model))
            except RequestFailed as failure:
                message = f"TS-SYNTH-SERVER {failure.message}"
                raise TrtspecError(message, failure.remedy) from None
            journal.answered_by({"server": server.identity})
            sampling = replace(sampling, model=server.model)
        outcome.server = journal.servers.get("server", {})

        async def work() -> None:
            nonlocal in_a_row
            for prompt in queue:
                try:
                    row, tokens = await converse(client, prompt, sampling, endpoint)
                except RequestFailed as failure:
                    if failure.status in REFUSED_STATUS:
                        message = f"{endpoint.base_url}: {failure.message}"
                        remedy = "check `base_url`, `model` and `api_key`"
                        raise UsageError(message, remedy) from None
                    in_a_row += 1
                    outcome.failed[prompt.id] = failure.message
                    if in_a_row >= MAX_FAILED_IN_A_ROW:
                        then = remedy_for(failure.message, "look at the server")
                        raise TrtspecError(
                            f"TS-SYNTH-SERVER {MAX_FAILED_IN_A_ROW} requests in a row failed, last: {failure.message}",
                            f"{then}, then run the same command again: finished answers are kept",
                        ) from None
                    continue
                in_a_row = 0
                journal.record(prompt.id, row=row)
                outcome.answered += 1
                outcome.tokens += tokens
                bar.advance(1, f"{outcome.tokens:,} tokens")

        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(min(endpoint.concurrency, len(todo))):
                    group.create_task(work())
        except ExceptionGroup as failed:  # the first error ended all tasks
            raise failed.exceptions[0] from None
    outcome.seconds = time.monotonic() - began
    return outcome


async def converse(
    client: httpx.AsyncClient, prompt: Prompt, sampling: AnswerSampling, endpoint: TargetEndpoint
) -> tuple[dict[str, Any], int]:
    """(row of the data set, completion tokens): every turn answered by the target, its answers fed back as context.

    An answer that the token limit cut off ends its conversation: what follows would rest on half an answer, and a
    template would close a turn that the target did not end.
    """
    record: dict[str, Any] = {"conversation_id": prompt.id}
    if prompt.category:
        record["category"] = prompt.category
    messages: list[dict[str, Any]] = []
    tools = {"tools": list(prompt.tools)} if prompt.tools else {}
    total = 0
    choice: dict[str, Any] = {}
    for number, turn in enumerate(prompt.turns):
        messages += turn
        body = {"messages": messages, **tools}
        choice, tokens = await _ask(client, body, prompt.seed + number, sampling, endpoint)
        total += tokens
        messages = with_call_ids([*messages, _answer(choice)])
        if choice.get("finish_reason") == "length":
            break
    if choice.get("finish_reason"):
        record["finish_reason"] = choice["finish_reason"]
    return record | tools | {"conversations": messages}, total


def _answer(choice: dict[str, Any]) -> dict[str, Any]:
    """The assistant's message as the data set holds it, in the words of the one reader. Reasoning is in a field of
    its own (`reasoning` in newer servers), or in the text of servers without a reasoning parser."""
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
    target: TargetEndpoint,
) -> tuple[dict[str, Any], int]:
    """(the first choice, completion tokens)."""
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
        return reply["choices"][0], int((reply.get("usage") or {}).get("completion_tokens") or 0)
    except (AttributeError, TypeError, ValueError):
        raise RequestFailed(f"the answer is no completion: {str(reply)[:200]}") from None


async def _with_retries(send: Callable[[], Awaitable[T]]) -> T:
    """What `send` returns. Connection errors and busy statuses are tried again, other statuses are final."""
    attempt = 0
    while True:
        try:
            return await send()
        except RequestFailed as failure:
            if attempt == RETRIES or failure.status not in (None, *RETRY_STATUS):
                raise
        await asyncio.sleep(FIRST_DELAY_S * 2**attempt * random.uniform(0.5, 1.0))
        attempt += 1
