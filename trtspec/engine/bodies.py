"""Request bodies of the OpenAI API: the fields and values that the reference server honours.

Any other field or value is refused with an error that names it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any, ClassVar, Literal, Self, TypeVar

from fastapi import HTTPException
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    StringConstraints,
    ValidationError,
    model_validator,
)

from trtspec import files
from trtspec.engine.grammars import compact_schema
from trtspec.engine.request import Sampling, StrictModel, TokenId

StopString = Annotated[str, Field(max_length=1000)]
TokenName = Annotated[str, StringConstraints(pattern=r"^[0-9]{1,7}$")]  # a token id as a JSON key
Item = TypeVar("Item")
# Lists stop at the first wrong item, because a long list could give millions of errors.
Items = Annotated[list[Item], Field(fail_fast=True)]
Prompts = Annotated[list[Item], Field(min_length=1, fail_fast=True)]
# Fields of a message that are accepted even if the chat template does not read them. Templates
# leave some out on purpose, such as the reasoning of earlier turns. Any other field is refused
# unless the template reads it.
MESSAGE_FIELDS = frozenset(
    {
        "role",
        "content",
        "name",
        "tool_calls",
        "tool_call_id",
        "reasoning_content",
        "reasoning",
        "annotations",
    }
)


class ApiError(HTTPException):
    """An error that the client gets as JSON in OpenAI's format.

    Args:
        message: text for the client.
        status: HTTP status.
        param: name of the faulty field of the body.
        code: OpenAI's code of the error.
        retry_after: seconds until the client may try again, for the header `Retry-After`.
    """

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        param: str | None = None,
        code: str | None = None,
        retry_after: int | None = None,
    ) -> None:
        headers = None
        if retry_after:
            headers = {"Retry-After": str(retry_after)}
        super().__init__(status, message, headers)
        self.message = message
        self.status = status
        self.param = param
        self.code = code

    def to_dict(self) -> dict[str, Any]:
        """Returns the JSON body of the response: OpenAI's `error` object."""
        error_type = "server_error" if self.status >= 500 else "invalid_request_error"
        return {
            "error": {
                "message": self.message,
                "type": error_type,
                "param": self.param,
                "code": self.code,
            }
        }


@dataclass(frozen=True)
class Form:
    """The form that an answer must have.

    syntax: language of the grammar: "json" (a JSON schema), "regex" or "lark".
    text: source text of the grammar.
    param: name of the body's field that demands the form, for errors.
    """

    syntax: str
    text: str
    param: str


def parse_body(model: type[BaseModel], raw: bytes) -> Any:
    """Returns the body `raw` as a validated `model`.

    Raises ApiError 400 if the body is not valid. As in OpenAI's API, the error names one field.
    """
    try:
        value = files.parse_json(raw, nan=False)
        if not isinstance(value, dict):
            raise ApiError("the body is not a JSON object")
        return model.model_validate(value)
    except ValidationError as error:
        raise _field_error(error) from None
    except ValueError as error:
        message = f"the body is not JSON in UTF-8, which has no NaN or Infinity: {error}"
        raise ApiError(message) from None


def _field_error(error: ValidationError) -> ApiError:
    """Returns the error for one faulty field, named by its path such as `messages[0].content`.

    If a field may have several types, pydantic reports a fault for each of them. The fault with the
    longest path is of the type that fits the value best.
    """
    faults = error.errors(include_context=False, include_input=False)
    deepest = max(faults, key=lambda fault: len(fault["loc"]))
    *path, last = deepest["loc"] or ("body",)
    # pydantic's path also has the types that it tried (`str`, `list[TextPart]`, `NamedTool`). The
    # client knows only the lower-case field names and the indices.
    kept = [
        step
        for step in path
        if isinstance(step, int) or step.isidentifier() and step.islower() and step != "str"
    ]
    # An unknown or missing field may itself be named like a type.
    is_field_name = deepest["type"] in ("extra_forbidden", "missing")
    if is_field_name or last not in ("str", "[key]"):
        kept.append(last)
    steps = [f"[{step}]" if isinstance(step, int) else f".{step}" for step in kept]
    param = "".join(steps).removeprefix(".")
    if deepest["type"] == "extra_forbidden":
        return ApiError(f"Unrecognized request argument supplied: {param}", param=param)
    return ApiError(f"{param}: {deepest['msg']}", param=param)


class StreamOptions(StrictModel):
    include_usage: bool = False
    continuous_usage_stats: bool = False
    include_obfuscation: Literal[False] = False


class JsonSchema(StrictModel):
    name: str = ""
    description: str | None = None
    schema_: dict[str, Any] = Field({}, alias="schema")
    strict: bool | None = None


class ResponseFormat(StrictModel):
    """The format of an answer: any text, a JSON object, JSON of a schema, or text of a regex."""

    type: Literal["text", "json_object", "json_schema", "regex"]
    json_schema: JsonSchema | None = None
    regex: str | None = Field(None, max_length=10_000)

    @model_validator(mode="after")
    def _check_fields_of_type(self) -> Self:
        """Raises ApiError if the field of the type is missing or a field of another is given."""
        for name in ("json_schema", "regex"):
            is_given = getattr(self, name) is not None
            is_needed = self.type == name
            if is_given != is_needed:
                verb = "has a" if is_given else "lacks its"
                message = f"response_format of type {self.type} {verb} {name}"
                raise ApiError(message, param="response_format")
        return self


def _allow_null(schema: dict[str, Any]) -> None:
    """Lets optional fields be null in a body's JSON schema, which the OpenAPI document shows."""
    for name, field in schema["properties"].items():
        if name not in schema.get("required", []):
            schema["properties"][name] = {"anyOf": [field, {"type": "null"}]}


class GenerationBody(Sampling):
    """The fields that the bodies of both endpoints have.

    The fields from `user` on have no effect on the answer. They are accepted because common clients
    send them.
    """

    chat: ClassVar[bool]
    model_config = ConfigDict(json_schema_extra=_allow_null)

    model: str | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    stop: StopString | Annotated[list[StopString], Field(max_length=64)] | None = None
    n: int = Field(1, ge=1, le=16)
    logit_bias: dict[TokenName, Annotated[float, Field(ge=-100, le=100)]] = Field(
        {}, max_length=1024
    )
    response_format: ResponseFormat | None = None
    return_token_ids: bool = False
    user: Any = None
    metadata: Any = None
    store: Any = None
    service_tier: Any = None
    safety_identifier: Any = None
    prompt_cache_key: Any = None

    @model_validator(mode="before")
    @classmethod
    def _drop_null(cls, body: Any) -> Any:
        """Removes the fields that are null. In OpenAI's API, null means "not given"."""
        if isinstance(body, dict):
            body = {key: value for key, value in body.items() if value is not None}
        return body

    @model_validator(mode="after")
    def _check_combinations(self) -> Self:
        """Raises ApiError if fields contradict each other, or if the form is not valid."""
        if self.stream_options is not None and not self.stream:
            raise ApiError("stream_options are for streams", param="stream_options")
        # The form is cached. Building it takes a while, and validation runs outside the event loop.
        if self.form is not None and self.ignore_eos:
            message = "an answer with a form ends when that is complete: omit ignore_eos"
            raise ApiError(message, param="ignore_eos")
        return self

    @property
    def usage_wanted(self) -> Literal["no", "last", "each"]:
        """Chunks of a stream that report token counts: no chunk, the last or each chunk."""
        options = self.stream_options or StreamOptions()
        if options.continuous_usage_stats:
            return "each"
        return "last" if options.include_usage else "no"

    @property
    def choices(self) -> int:
        """Number of generations that the request asks for."""
        return self.n

    @property
    def stops(self) -> list[str]:
        """The stop strings that are not empty."""
        stops = self.stop or []
        if isinstance(stops, str):
            stops = [stops]
        return [stop for stop in stops if stop]

    @cached_property
    def form(self) -> Form | None:
        """The form of `response_format`. None if any text may be answered."""
        response_format = self.response_format
        if response_format is None or response_format.type == "text":
            return None
        if response_format.regex is not None:
            return Form("regex", response_format.regex, "response_format")
        schema: dict[str, Any] = {"type": "object"}
        if response_format.json_schema is not None:
            schema = response_format.json_schema.schema_
        return Form("json", json.dumps(schema), "response_format")


class CompletionBody(GenerationBody):
    """Body of POST /v1/completions.

    `prompt` is a text, a list of token ids, or a list of several texts or token id lists. The names
    of special tokens in a text are encoded as ordinary text.
    """

    chat: ClassVar[bool] = False
    prompt: str | Prompts[TokenId] | Prompts[str] | Prompts[Prompts[TokenId]]
    max_tokens: int = Field(16, ge=0)
    logprobs: int | None = Field(None, ge=0, le=20)
    echo: bool = False
    best_of: int = Field(1, ge=1, le=1)
    suffix: Literal[""] = ""

    @model_validator(mode="after")
    def _check_output(self) -> Self:
        """Raises ApiError if the answer would be empty."""
        if not self.max_tokens and not self.echo:
            message = "max_tokens is 0 and echo is off: nothing would be answered"
            raise ApiError(message, param="max_tokens")
        return self

    @property
    def choices(self) -> int:
        """Number of generations that the request asks for, of all prompts together."""
        return self.n * len(self.prompts)

    @property
    def top(self) -> int | None:
        """Number of alternatives to list per token. None if no log-probabilities are wanted."""
        return self.logprobs

    @property
    def shown(self) -> bool:
        """Whether generated tokens are shown. False if the answer only echoes the prompt."""
        return self.max_tokens > 0

    @property
    def prompts(self) -> list[str | list[int]]:
        """The prompts as a list, also if the body has a single prompt."""
        single = isinstance(self.prompt, str) or isinstance(self.prompt[0], int)
        return [self.prompt] if single else list(self.prompt)  # type: ignore[list-item,arg-type]


class TextPart(StrictModel):
    type: Literal["text"]
    text: str


class Message(BaseModel):
    """A message of a conversation. Other fields are kept for the chat template."""

    model_config = ConfigDict(extra="allow", strict=True)
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Items[TextPart] | None = None
    # Other servers continue a message that has `partial` or `prefix`. Here only false is valid.
    partial: Literal[False] | None = None
    prefix: Literal[False] | None = None

    def to_dict(self) -> dict[str, Any]:
        """Returns the message for the chat template, with text parts joined.

        The role "developer" becomes "system", which is its older name.
        """
        # Clients send fields that they do not use as null, false or empty. Such a field is dropped,
        # because it would be refused if the template does not read it.
        message = {
            key: value
            for key, value in self
            if value or key in MESSAGE_FIELDS and value is not None
        }
        if isinstance(self.content, list):
            message["content"] = "".join(part.text for part in self.content)
        if self.role == "developer":
            message["role"] = "system"
        if "reasoning" in message:  # vLLM's name of `reasoning_content`
            message.setdefault("reasoning_content", message.pop("reasoning"))
        return message


class Function(StrictModel):
    name: str = Field(pattern=r"^[A-Za-z0-9_.-]{1,128}$")
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(StrictModel):
    type: Literal["function"]
    function: Function


class FunctionName(StrictModel):
    name: str


class NamedTool(StrictModel):
    type: Literal["function"]
    function: FunctionName


class ChatBody(GenerationBody):
    """Body of POST /v1/chat/completions.

    Kimi has no levels of reasoning. Any `reasoning_effort` other than "none" enables thinking.
    """

    chat: ClassVar[bool] = True
    echo: ClassVar[bool] = False
    shown: ClassVar[bool] = True
    messages: Prompts[Message]
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool = False
    top_logprobs: int = Field(0, ge=0, le=20)
    tools: Items[Tool] = []
    tool_choice: Literal["none", "auto", "required"] | NamedTool = "auto"
    parallel_tool_calls: bool = True
    chat_template_kwargs: dict[str, Any] = {}
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None
    modalities: Annotated[list[Literal["text"]], Field(min_length=1, max_length=1)] = ["text"]
    verbosity: Literal["medium"] = "medium"

    @model_validator(mode="after")
    def _check_ambiguity(self) -> Self:
        """Raises ApiError if two fields contradict each other."""
        if self.top_logprobs and not self.logprobs:
            raise ApiError("top_logprobs need logprobs: true", param="top_logprobs")
        if (
            None not in (self.max_tokens, self.max_completion_tokens)
            and self.max_tokens != self.max_completion_tokens
        ):
            message = "max_tokens and max_completion_tokens differ: leave one of them out"
            raise ApiError(message, param="max_tokens")
        if self.reasoning_effort and "thinking" in self.chat_template_kwargs:
            message = "reasoning_effort and thinking are two names of one thing"
            raise ApiError(message, param="reasoning_effort")
        return self

    @property
    def top(self) -> int | None:
        """Number of alternatives to list per token. None if no log-probabilities are wanted."""
        return self.top_logprobs if self.logprobs else None

    @property
    def offered_tools(self) -> list[dict[str, Any]] | None:
        """The tools for the chat template. None if the model gets no tools."""
        if self.tool_choice == "none" or not self.tools:
            return None
        return [tool.model_dump(exclude_unset=True) for tool in self.tools]

    @property
    def demanded_tools(self) -> list[Function]:
        """Functions that the answer must choose a call from. [] if no call is demanded.

        Raises ApiError if `tool_choice` demands a function that is not among the tools.
        """
        functions = [tool.function for tool in self.tools]
        if self.tool_choice == "required":
            if not functions:
                message = "tool_choice is required and there are no tools"
                raise ApiError(message, param="tool_choice")
            return functions
        if not isinstance(self.tool_choice, NamedTool):
            return []
        name = self.tool_choice.function.name
        named = [function for function in functions if function.name == name]
        if not named:
            message = f"tool_choice names {name!r}, which is not among the tools"
            raise ApiError(message, param="tool_choice")
        return named[:1]  # a client may send two functions of the same name

    @property
    def strict_tools(self) -> list[Function]:
        """All functions of the tools if a call is optional and at least one function is strict.

        [] if a call is demanded or forbidden, or if no function is strict. Functions that are not
        strict have no parameter schema in this list.
        """
        functions = [tool.function for tool in self.tools]
        if self.tool_choice != "auto" or not any(function.strict for function in functions):
            return []
        # Without a schema a function accepts any JSON object.
        return [
            function if function.strict else Function(name=function.name) for function in functions
        ]

    @cached_property
    def form(self) -> Form | None:
        """The form of a call of the demanded or strict functions, or of `response_format`.

        None if any text may be answered. Raises ApiError if functions and `response_format` both
        demand a form, or if no grammar can describe the call.
        """
        response_form = super().form
        functions = self.demanded_tools or self.strict_tools
        if not functions:
            return response_form
        if response_form is not None:
            demand = "a demanded tool call" if self.demanded_tools else "a strict function"
            message = f"{demand} and response_format exclude each other"
            raise ApiError(message, param="response_format")
        # A named function is called once.
        several = self.parallel_tool_calls and isinstance(self.tool_choice, str)
        try:
            text = tool_call_grammar(functions, several, opened=not self.demanded_tools)
        except ValueError as error:
            raise ApiError(f"no answer can have this form: {error}", param="tools") from None
        return Form("lark", text, "tools")


def tool_call_grammar(functions: Sequence[Function], several: bool, opened: bool = False) -> str:
    """Returns the Lark grammar of a Kimi tool-call section with calls of `functions`.

    The section's marks are special tokens. The id of a call is `functions.NAME:NUMBER`. The
    arguments of a call follow the schema of its function.

    Args:
        functions: functions that may be called.
        several: whether the section may have more than one call.
        opened: whether the model writes the section's first mark before the grammar applies.
    """
    rules = []
    for index, function in enumerate(functions):
        schema = compact_schema(json.dumps(function.parameters or {"type": "object"}))
        rules += [
            f"call{index}: <|tool_call_begin|> name{index} "
            f"<|tool_call_argument_begin|> args{index} <|tool_call_end|>",
            f"name{index}: {json.dumps('functions.' + function.name + ':')} /[0-9]{{1,3}}/",
            f"args{index}: %json {schema}",
        ]
    calls = " | ".join(f"call{index}" for index in range(len(functions)))
    begin = "<|tool_calls_section_begin|> "
    if opened:
        begin = ""
    call = "call+" if several else "call"
    start = f"start: {begin}{call} <|tool_calls_section_end|>"
    return "\n".join([start, f"call: {calls}", *rules])
