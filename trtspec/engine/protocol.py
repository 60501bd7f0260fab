"""Request bodies of the OpenAI API as far as the reference server honours them; everything else is refused by name."""

from __future__ import annotations

import json
import re
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from trtspec.engine.request import (
    MAX_INT32,
    MAX_STOPS,
    Bias,
    SamplingRanges,
    StopString,
    TokenId,
    TokenName,
    WishRanges,
)


class ApiError(Exception):
    """An answer in OpenAI's error shape."""

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        param: str | None = None,
        code: str | None = None,
        retry_after: int | None = None,
    ) -> None:
        super().__init__(message)
        self.message, self.status, self.param, self.code = message, status, param, code
        self.retry_after = retry_after  # seconds

    def to_dict(self) -> dict[str, Any]:
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


class StreamOptions(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)
    include_usage: bool = False
    continuous_usage_stats: bool = False
    include_obfuscation: Literal[False] = False


# Fields of the API without effect on what is generated; accepted so that ordinary clients work.
INERT = ("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key")
# Fields this server cannot honour, with the only values that change nothing.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "add_special_tokens": (None, False, True),  # Kimi's tokenizer adds none
    "best_of": (None, 1),
    "suffix": (None, ""),
    "use_beam_search": (None, False),
    "length_penalty": (None, 1),
    "early_stopping": (None, False),
    "no_repeat_ngram_size": (None, 0),
}
TEXT_PART = {
    "type": "object",
    "required": ["type", "text"],
    "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
}
ROLES = ("system", "developer", "user", "assistant", "tool")
# Fields of a message that are taken whatever the template does with them: some of no template's business, some that
# templates leave out on purpose (the reasoning of earlier turns). Any other must be read by the template.
MESSAGE_FIELDS = frozenset(
    {"role", "content", "name", "tool_calls", "tool_call_id", "reasoning_content", "reasoning", "annotations"}
)
# An answer that goes on where a message ends: these ask for it at other servers.
CONTINUATIONS = ("partial", "prefix")
MESSAGE_SCHEMA: dict[str, Any] = {
    "type": "object",
    "required": ["role"],
    "properties": {
        "role": {"enum": list(ROLES)},
        **{name: {"enum": [False, None]} for name in CONTINUATIONS},
        "content": {"anyOf": [{"type": ["string", "null"]}, {"type": "array", "items": TEXT_PART}]},
    },
}
FUNCTION_NAME = r"^[A-Za-z0-9_.-]{1,128}$"
TOOL_SCHEMA: dict[str, Any] = {
    "type": "object",
    "required": ["type", "function"],
    "additionalProperties": False,
    "properties": {
        "type": {"const": "function"},
        "function": {
            "type": "object",
            "required": ["name"],
            "additionalProperties": False,
            "properties": {
                "name": {"type": "string", "pattern": FUNCTION_NAME},
                "description": {"type": ["string", "null"]},
                "parameters": {"type": ["object", "null"]},
                "strict": {"type": ["boolean", "null"]},
            },
        },
    },
}


class JsonSchema(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)
    name: str = ""
    description: str | None = None
    schema_: dict[str, Any] = Field({}, alias="schema")
    strict: bool | None = None


class ResponseFormat(BaseModel):
    """What an answer looks like: any text, any JSON object, JSON of a schema, or text of a regular expression."""

    model_config = ConfigDict(extra="forbid", strict=True)
    type: Literal["text", "json_object", "json_schema", "regex"]
    json_schema: JsonSchema | None = None
    regex: str | None = Field(None, max_length=10_000)

    @model_validator(mode="after")
    def _nothing_of_another_type(self) -> Self:
        for name in ("json_schema", "regex"):
            given = getattr(self, name) is not None
            if given != (self.type == name):
                told = "has a" if given else "lacks its"
                raise ApiError(f"response_format of type {self.type} {told} {name}", param="response_format")
        return self


class GenerationBody(SamplingRanges, WishRanges):
    """What both endpoints share. `top_k` (0 and -1: off), `ignore_eos` and `stop_token_ids` are extensions."""

    model: str | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    stop: StopString | Annotated[list[StopString], Field(max_length=MAX_STOPS)] | None = None
    stop_token_ids: list[TokenId] = Field([], max_length=MAX_STOPS)
    ignore_eos: bool = False
    n: int = Field(1, ge=1, le=16)
    logit_bias: dict[TokenName, Bias] = Field({}, max_length=1024)
    bad: StopString | Annotated[list[StopString], Field(max_length=MAX_STOPS)] | None = None
    bad_words: StopString | Annotated[list[StopString], Field(max_length=MAX_STOPS)] | None = None
    truncate_prompt_tokens: int | None = Field(None, ge=1, le=MAX_INT32)
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    return_token_ids: bool = False
    response_format: ResponseFormat | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = Field(None, max_length=10_000)

    @model_validator(mode="before")
    @classmethod
    def _refuse_what_would_be_ignored(cls, body: Any) -> Any:
        if not isinstance(body, dict):
            return body
        for name, neutral in NEUTRAL.items():
            if name in body and not any(_same(body[name], value) for value in neutral):
                raise ApiError(f"{name} is not supported by this server", param=name, code="unsupported_parameter")
        dropped = {*NEUTRAL, *INERT}
        # null means "not given" in the API, whatever the field's default is
        return {key: value for key, value in body.items() if key not in dropped and value is not None}

    @model_validator(mode="after")
    def _streams_only(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise ApiError("stream_options are for streams", param="stream_options")
        if self.bad is not None and self.bad_words is not None:
            raise ApiError("bad and bad_words are two names of one field", param="bad_words")
        return self

    @property
    def usage_wanted(self) -> Literal["no", "last", "each"]:
        """In which chunks of a stream the token counts stand."""
        options = self.stream_options or StreamOptions()
        return "each" if options.continuous_usage_stats else "last" if options.include_usage else "no"

    @property
    def choices(self) -> int:
        """How many generations the request asks for."""
        return self.n

    @property
    def stops(self) -> list[str]:
        """Stop strings, without empty ones."""
        return _words(self.stop)

    @property
    def banned(self) -> list[str]:
        """Texts that the answer must not contain: `bad` to TensorRT-LLM, `bad_words` to vLLM."""
        return _words(self.bad if self.bad_words is None else self.bad_words)

    @property
    def grammar(self) -> tuple[str, str] | None:
        """(kind, text) of what the answer must look like, as `Grammars.matcher` takes it; None for any text.

        Raises ApiError where it is told twice.
        """
        asked = self.response_format
        found: list[tuple[str, str]] = []
        if self.guided_json is not None:
            schema = self.guided_json
            found.append(("json", schema if isinstance(schema, str) else json.dumps(schema)))
        if self.guided_regex is not None:
            found.append(("regex", self.guided_regex))
        if asked is not None and asked.type == "json_object":
            found.append(("json", '{"type": "object"}'))
        if asked is not None and asked.json_schema is not None:
            found.append(("json", json.dumps(asked.json_schema.schema_)))
        if asked is not None and asked.regex is not None:
            found.append(("regex", asked.regex))
        if len(found) > 1:
            raise ApiError("the response format is specified more than once", param="response_format")
        if found and self.ignore_eos:
            raise ApiError("an answer with a form ends when that is complete: omit ignore_eos", param="ignore_eos")
        return found[0] if found else None


def _same(given: Any, value: Any) -> bool:
    """Equal as JSON has it, where true is not 1."""
    return given is value or isinstance(given, bool) == isinstance(value, bool) and bool(given == value)


def _words(given: str | list[str] | None) -> list[str]:
    found = [given] if isinstance(given, str) else given or []
    return [word for word in found if word]


Item = TypeVar("Item")
Prompts = Annotated[list[Item], Field(min_length=1)]


class CompletionBody(GenerationBody):
    """POST /v1/completions. `prompt` is text or token ids, one or several. Names of special tokens in a text stand for
    them only with `allow_special_tokens`, an extension; in a chat only the template writes special tokens."""

    allow_special_tokens: bool = False
    prompt: str | Prompts[TokenId] | Prompts[str] | Prompts[Prompts[TokenId]]
    max_tokens: int = Field(16, ge=0)
    logprobs: int | None = Field(None, ge=0, le=20)
    echo: bool = False

    @model_validator(mode="after")
    def _answers_something(self) -> Self:
        if not self.max_tokens and not self.echo:
            raise ApiError("max_tokens is 0 and echo is off: nothing would be answered", param="max_tokens")
        return self

    @property
    def choices(self) -> int:
        return self.n * len(self.prompts)

    @property
    def prompts(self) -> list[str | list[int]]:
        if isinstance(self.prompt, str):
            return [self.prompt]
        if isinstance(self.prompt[0], int):
            return [self.prompt]
        return list(self.prompt)


class FunctionChoice(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)
    name: str


class NamedTool(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)
    type: Literal["function"]
    function: FunctionChoice


class ChatBody(GenerationBody):
    """POST /v1/chat/completions."""

    messages: list[dict[str, Any]] = Field(min_length=1, json_schema_extra={"items": MESSAGE_SCHEMA})
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool = False
    top_logprobs: int = Field(0, ge=0, le=20)
    tools: list[dict[str, Any]] = Field([], json_schema_extra={"items": TOOL_SCHEMA})
    tool_choice: Literal["none", "auto", "required"] | NamedTool = "auto"
    parallel_tool_calls: bool = True
    chat_template_kwargs: dict[str, Any] = {}

    @field_validator("messages")
    @classmethod
    def _joined(cls, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """The messages as templates expect them: text parts joined, no null fields, and a developer's message is
        the system's, since OpenAI renamed that role."""
        return [_plain(message, index) for index, message in enumerate(messages)]

    @field_validator("tools")
    @classmethod
    def _functions(cls, tools: list[dict[str, Any]]) -> list[dict[str, Any]]:
        for index, tool in enumerate(tools):
            function = tool.get("function")
            if unknown := tool.keys() - {"type", "function"}:
                raise ApiError(f"tools[{index}] has an unknown {min(unknown)}", param=f"tools[{index}].{min(unknown)}")
            if tool.get("type") != "function" or not isinstance(function, dict):
                raise ApiError(f"tools[{index}] is no function", param=f"tools[{index}]")
            where = f"tools[{index}].function"
            if unknown := function.keys() - {"name", "description", "parameters", "strict"}:
                raise ApiError(f"{where} has an unknown {min(unknown)}", param=f"{where}.{min(unknown)}")
            for field, kind in (("description", str), ("strict", bool)):
                if not isinstance(function.get(field), kind | None):
                    raise ApiError(f"{where}: {field} is not a {kind.__name__}", param=f"{where}.{field}")
            name = function.get("name")
            if not isinstance(name, str) or not re.fullmatch(FUNCTION_NAME, name):
                raise ApiError(f"tools[{index}] has no name a call could have", param=f"{where}.name")
            if not isinstance(function.get("parameters", {}), dict | None):
                raise ApiError(f"tools[{index}]: parameters are no schema", param=f"{where}.parameters")
        return tools

    @model_validator(mode="after")
    def _one_meaning(self) -> Self:
        if self.top_logprobs and not self.logprobs:
            raise ApiError("top_logprobs need logprobs: true", param="top_logprobs")
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.max_completion_tokens:
            raise ApiError("max_tokens and max_completion_tokens differ: leave one of them out", param="max_tokens")
        if self.ignore_eos and (self.demanded_tools or self.strict_tools):
            raise ApiError("a tool call of a form ends when it is complete: omit ignore_eos", param="ignore_eos")
        return self

    @property
    def offered_tools(self) -> list[dict[str, Any]] | None:
        """Tools to show to the model."""
        return None if self.tool_choice == "none" or not self.tools else self.tools

    @property
    def demanded_tools(self) -> list[dict[str, Any]]:
        """The tools of which one must be called: all with `required`, one where it is named, else none."""
        if self.tool_choice == "required":
            if not self.tools:
                raise ApiError("tool_choice is required and there are no tools", param="tool_choice")
            return self.tools
        if not isinstance(self.tool_choice, NamedTool):
            return []
        name = self.tool_choice.function.name
        named = [tool for tool in self.tools if tool["function"]["name"] == name]
        if not named:
            raise ApiError(f"tool_choice names {name!r}, which is not among the tools", param="tool_choice")
        return named[:1]

    @property
    def strict_tools(self) -> list[dict[str, Any]]:
        """The offered tools, where a call is left to the model and its arguments must follow the schema of at least
        one; those that are not strict take any object."""
        tools = self.offered_tools or []
        if self.tool_choice != "auto" or not any(tool["function"].get("strict") for tool in tools):
            return []
        return [
            tool if tool["function"].get("strict") else {"function": {"name": tool["function"]["name"]}}
            for tool in tools
        ]


def _plain(message: dict[str, Any], index: int) -> dict[str, Any]:
    role = message.get("role")
    if role not in ROLES:
        told = f"a role that is none of {', '.join(ROLES)}" if role else "no role"
        raise ApiError(f"messages[{index}] has {told}", param=f"messages[{index}].role")
    for name in CONTINUATIONS:
        if message.get(name):
            raise ApiError(
                f"messages[{index}].{name} is not supported by this server: an answer begins a turn of its own",
                param=f"messages[{index}].{name}",
            )
    # of fields that only some templates read, nothing is left of what asks for nothing
    message = {key: value for key, value in message.items() if value or key in MESSAGE_FIELDS and value is not None}
    if role == "developer":
        message["role"] = "system"
    if "reasoning" in message:  # vLLM's name of it
        message.setdefault("reasoning_content", message.pop("reasoning"))
    content = message.get("content")
    if content is not None and not isinstance(content, (str, list)):
        raise ApiError(
            f"messages[{index}].content is neither text nor a list of parts", param=f"messages[{index}].content"
        )
    if not isinstance(content, list):
        return message
    texts = [part["text"] for part in content if isinstance(part, dict) and isinstance(part.get("text"), str)]
    if len(texts) != len(content) or any(part.get("type") != "text" for part in content):
        raise ApiError(
            f"messages[{index}].content holds a part that is not text; this server has no vision tower",
            param=f"messages[{index}].content",
        )
    return {**message, "content": "".join(texts)}


def parse_body(kind: type[GenerationBody], body: Any) -> Any:
    """A validated body. Raises ApiError 400, naming the first field that is wrong, as OpenAI does."""
    if not isinstance(body, dict):
        raise ApiError("the body is not a JSON object")
    try:
        return kind.model_validate(body)
    except ValidationError as error:
        first = error.errors()[0]
        param = str(first["loc"][0]) if first["loc"] else None
        if first["type"] == "extra_forbidden":
            raise ApiError(f"Unrecognized request argument supplied: {param}", param=param) from None
        raise ApiError(f"{param}: {first['msg']}", param=param) from None
