"""What one server answered, as its users see it: the records that the gate compares, and the file that holds them."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from trtspec import files
from trtspec.client.servers import TurnCounts
from trtspec.errors import TrtspecError, UsageError

SCHEMA = 3  # of a recording
THINKING, THOUGHT = "<think>", "</think>"  # around the reasoning, where no parser of the server takes it out
TOOL_MARKERS = ("<|tool_call", "<tool_call", "[TOOL_CALLS]")  # what a call begins with, and a parser takes out


def visible_text(content: str) -> str:
    """What of an answer's content is meant for a user: all behind the last </think>, nothing while <think> is open.

    Servers without a reasoning parser leave the reasoning in the content; templates may put <think> in the prompt, so
    that the content holds its end alone."""
    text = content.rpartition(THOUGHT)[2]
    return "" if text.lstrip().startswith(THINKING) else text


@dataclass(frozen=True)
class Token:
    """One emitted token, the runner-up, and the gap between the best and the second logprob in nats.

    `others` says of each other token that the server told how far it is behind the best, in nats, and `behind` the same
    of this token, which a greedy server leaves at 0.
    """

    text: str
    second: str | None
    gap: float | None
    others: dict[str, float] = field(default_factory=dict)
    behind: float = 0.0

    @property
    def alternatives(self) -> dict[str, float | None]:
        """Every token that was told beside this one, and how far apart they are: the larger distance from the best."""
        if self.others:
            return {text: max(gap, self.behind) for text, gap in self.others.items()}
        return {} if self.second is None else {self.second: self.gap}


@dataclass(frozen=True)
class AskedPrompt:
    """One question as it is sent. `group` says what it is for; `extra` are request fields beside the messages."""

    question: str
    category: str
    messages: list[dict[str, Any]]
    group: str = "prompts"
    extra: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class AnswerTiming:
    """Seconds from the request to the first and the last piece, and to the end; `started` since the check began, `lag`
    how long this process itself was held up meanwhile."""

    started: float
    first: float | None
    last: float | None
    total: float
    lag: float = 0.0


@dataclass(frozen=True)
class Transcript:
    """One greedy answer. `text` is all that a user sees, the first `reasoned` characters of it as reasoning.

    `tokens` is None where the server gives no logprobs; `spelled` is the text of these tokens where it is known.
    `average` and `spec_decode` are what the server claims about its steps, `counted` its tokens so far at each piece of
    a stream, `pieces` how many there were, `arrivals` at how many times they came. `error` says why there is no answer.
    """

    question: str
    category: str
    messages: list[dict[str, Any]]
    text: str
    finish_reason: str | None
    tokens: list[Token] | None
    group: str = "prompts"
    extra: dict[str, Any] = field(default_factory=dict)
    reasoned: int = 0
    spelled: str | None = None
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    average: float | None = None
    spec_decode: dict[str, Any] | None = None
    counted: list[int] = field(default_factory=list)
    pieces: int | None = None
    arrivals: int | None = None
    timing: AnswerTiming | None = None
    error: str | None = None

    @property
    def content(self) -> str:
        return self.text[self.reasoned :]

    @property
    def visible(self) -> str:
        """Its content without any reasoning in it."""
        return visible_text(self.content)

    @property
    def trimmed(self) -> str:
        """What answers are compared by. vLLM takes white space away around the reasoning of a whole answer, and leaves
        it in the stream of the same tokens."""
        return self.text[: self.reasoned].strip() + self.content.strip()

    @property
    def prompt(self) -> AskedPrompt:
        return AskedPrompt(self.question, self.category, self.messages, self.group, self.extra)


@dataclass(frozen=True)
class ToolReply:
    """What came back for a request with tools, or for one that must have a form. `error` holds the server's refusal,
    `unindexed` the number of streamed pieces of calls that did not say which call they belong to, `tokens` the whole
    answer with the markers of its calls where log-probabilities were asked for."""

    calls: list[dict[str, str]] = field(default_factory=list)
    content: str = ""
    error: str | None = None
    question: str = ""
    reasoning: str = ""
    finish_reason: str | None = None
    unindexed: int = 0
    tokens: list[Token] | None = None

    @property
    def visible(self) -> str:
        """Its content without any reasoning in it."""
        return visible_text(self.content)

    @property
    def transcript(self) -> Transcript:
        """Its text, as that of other answers is compared."""
        text, reasoned = self.reasoning + self.content, len(self.reasoning)
        return Transcript(self.question, "tools", [], text, self.finish_reason, self.tokens, reasoned=reasoned)


@dataclass(frozen=True)
class ParameterReply:
    """What one request parameter did: `honoured`, `no effect`, `refused`, `no answer`, or `not sent`, and why."""

    name: str
    outcome: str
    words: str = ""


@dataclass(frozen=True)
class RecordedPass:
    """All prompts once more at another concurrency: how far the server's own rounding reaches."""

    concurrency: int
    transcripts: list[Transcript]


@dataclass(frozen=True)
class BurstReply:
    """How a burst of short requests ended: a server may refuse some of it, and must answer the rest."""

    asked: int
    refused: int
    failed: int
    first_failure: str = ""


@dataclass(frozen=True)
class Recording:
    """All answers of one server at temperature 0; written by --record, read by --against. `withheld` says why no
    log-probabilities were asked for.

    `counts` are of the first pass; `streamed_counts` are the server's counters around `streamed`, where it has any.
    `repeats` are further passes of a baseline, `streamed` the same prompts as streams, `later` as streams after a
    burst. `long_cold` and `long_warm` ask the long prompts twice; `long_whole` holds a baseline's unstreamed answers to
    them, and each of `repeats` one more. `confirmed` are unstreamed answers to those questions
    whose streamed answer differs; `streamed_tools` and `confirmed_tools` are the same of requests with a tool, and
    `repeated_tools` those of a baseline asked again, with log-probabilities, as `repeated_follow_ups` and
    `repeated_forms` are. `after_probes` is one plain answer behind the probes of parameters, which may end an engine.
    """

    url: str
    server: dict[str, Any]
    max_tokens: int
    transcripts: list[Transcript]
    counts: list[TurnCounts] = field(default_factory=list)
    withheld: str | None = None
    concurrency: int = 1
    repeats: list[RecordedPass] = field(default_factory=list)
    streamed: list[Transcript] = field(default_factory=list)
    confirmed: list[Transcript] = field(default_factory=list)
    later: list[Transcript] = field(default_factory=list)
    long_cold: list[Transcript] = field(default_factory=list)
    long_warm: list[Transcript] = field(default_factory=list)
    long_whole: list[Transcript] = field(default_factory=list)
    tools: list[ToolReply] = field(default_factory=list)
    streamed_tools: list[ToolReply] = field(default_factory=list)
    confirmed_tools: list[ToolReply] = field(default_factory=list)
    repeated_tools: list[ToolReply] = field(default_factory=list)
    follow_ups: list[ToolReply] = field(default_factory=list)
    repeated_follow_ups: list[ToolReply] = field(default_factory=list)
    forms: list[ToolReply] = field(default_factory=list)
    repeated_forms: list[ToolReply] = field(default_factory=list)
    stops: list[ToolReply] = field(default_factory=list)
    image: ToolReply | None = None
    burst: BurstReply | None = None
    parameters: list[ParameterReply] = field(default_factory=list)
    after_probes: list[Transcript] = field(default_factory=list)
    stopped: str | None = None
    streamed_counts: list[TurnCounts] = field(default_factory=list)

    @property
    def answered(self) -> list[Transcript]:
        return [transcript for transcript in self.transcripts if transcript.error is None]

    @property
    def long(self) -> list[Transcript]:
        """Answers to the long prompts, as users get them: as streams."""
        return [item for item in [*self.long_cold, *self.long_warm] if item.error is None]

    @property
    def streams(self) -> list[Transcript]:
        """Every answer that came as a stream."""
        return [*self.streamed, *self.later, *self.long_cold, *self.long_warm]

    def to_dict(self) -> dict[str, Any]:
        return {"schema": SCHEMA, **asdict(self)}


def read_recording(path: Path) -> Recording:
    """A file of --record. Raises UsageError when it is something else."""
    try:
        raw = files.read_object(path)
        if raw.get("schema") != SCHEMA:
            raise ValueError(f"its schema is {str(raw.get('schema'))[:20]!r}, and this release reads {SCHEMA}")
        read = TypeAdapter(Recording).validate_json(json.dumps(raw, allow_nan=False), strict=True)
        replies = [*read.tools, *read.streamed_tools, *read.follow_ups]
        replies += [*read.confirmed_tools, *read.repeated_tools, *read.repeated_follow_ups, *read.forms]
        replies += [*read.repeated_forms, *read.stops]
        if any({"name", "arguments"} - set(call) for reply in replies for call in reply.calls):
            raise ValueError("a tool call has no name or no arguments")
        asked = [item.messages[-1]["content"] for item in [*read.transcripts, *read.long_cold]]
        if not asked or not all(isinstance(text, (str, list)) for text in asked) or read.max_tokens < 1:
            raise ValueError("it holds no prompt that was answered")
        _refuse_twice(read)
    except ValidationError as error:
        raise _no_recording(path, files.first_fault(error)) from None
    except KeyError as error:
        raise _no_recording(path, f"{error} is missing") from None
    except (OSError, TrtspecError, ValueError, IndexError, RecursionError) as error:
        raise _no_recording(path, str(error)) from None
    return read


def _refuse_twice(read: Recording) -> None:
    """Raises ValueError where two answers of one pass have the same question: they are looked up by it."""
    for answers in (read.transcripts, read.long_cold, *(again.transcripts for again in read.repeats)):
        most = Counter(item.question for item in answers).most_common(1)
        if most and most[0][1] > 1:
            raise ValueError(f"it holds {most[0][1]} answers to the question {most[0][0][:40]!r}")


def _no_recording(path: Path, reason: str) -> UsageError:
    return UsageError(
        f"{path} is not a recording of `trtspec check --record`: {reason}",
        "record one on the server without speculation: trtspec check URL --record FILE",
    )
