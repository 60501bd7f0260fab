"""Request bodies of the OpenAI API, as far as the reference server honours them.

Every other field or value is refused by name.
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
# a long list with many wrong items gives one error, not one for each
Items = Annotated[list[Item], Field(fail_fast=True)]
Prompts = Annotated[list[Item], Field(min_length=1, fail_fast=True)]
# Fields of a message that are taken whether the template reads them or not. Some are of no
# template's business, some are left out on purpose (the reasoning of earlier turns). Any other
# field must be read by the template.
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
    """An answer in OpenAI's error shape. `retry_after`: seconds."""

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
    """The form that an answer must have, from the field `param` of a body.

    `syntax` and `text` are the arguments of `Grammars.compiled`.
    """

    syntax: str
    text: str
    param: str


def parse_body(model: type[BaseModel], raw: bytes) -> Any:
    """A validated body. Raises ApiError 400 that names the first wrong field, as OpenAI does."""
    try:
        value = files.parse_json(raw, nan=False)
        if not isinstance(value, dict):
            raise ApiError("the body is not a JSON object")
        return model.model_validate(value)
    except ValidationError as error:
        raise _named(error) from None
    except ValueError as error:
        message = f"the body is not JSON in UTF-8, which has no NaN or Infinity: {error}"
        raise ApiError(message) from None


def _named(error: ValidationError) -> ApiError:
    """The deepest fault. If a value may be of several types, the fault is of the closest type."""
    faults = error.errors(include_context=False, include_input=False)
    deepest = max(faults, key=lambda fault: len(fault["loc"]))
    *path, last = deepest["loc"] or ("body",)
    # Between field names and indices, pydantic names the types that it tried: `str`,
    # `list[TextPart]`, `NamedTool`.
    kept = [
        step
        for step in path
        if isinstance(step, int) or step.isidentifier() and step.islower() and step != "str"
    ]
    if (
        isinstance(last, int)
        or deepest["type"] in ("extra_forbidden", "missing")
        or last not in ("str", "[key]")
    ):
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
    """The format of an answer: any text, a JSON object, JSON of a schema, a regular expression."""

    type: Literal["text", "json_object", "json_schema", "regex"]
    json_schema: JsonSchema | None = None
    regex: str | None = Field(None, max_length=10_000)

    @model_validator(mode="after")
    def _nothing_of_another_type(self) -> Self:
        for name in ("json_schema", "regex"):
            given = getattr(self, name) is not None
            if given != (self.type == name):
                verb = "has a" if given else "lacks its"
                message = f"response_format of type {self.type} {verb} {name}"
                raise ApiError(message, param="response_format")
        return self


def _null_is_absent(schema: dict[str, Any]) -> None:
    for name, field in schema["properties"].items():
        if name not in schema.get("required", []):
            schema["properties"][name] = {"anyOf": [field, {"type": "null"}]}


class GenerationBody(Sampling):
    """The fields that both endpoints share.

    The last fields have no effect on the answer. They are taken so that ordinary clients work.
    """

    chat: ClassVar[bool]
    model_config = ConfigDict(json_schema_extra=_null_is_absent)

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
        # In the API null means "not given", whatever the default is.
        if isinstance(body, dict):
            body = {key: value for key, value in body.items() if value is not None}
        return body

    @model_validator(mode="after")
    def _streams_only(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise ApiError("stream_options are for streams", param="stream_options")
        # The form is made here, beside the event loop.
        if self.form is not None and self.ignore_eos:
            message = "an answer with a form ends when that is complete: omit ignore_eos"
            raise ApiError(message, param="ignore_eos")
        return self

    @property
    def usage_wanted(self) -> Literal["no", "last", "each"]:
        """Which chunks of a stream have the token counts."""
        options = self.stream_options or StreamOptions()
        if options.continuous_usage_stats:
            return "each"
        return "last" if options.include_usage else "no"

    @property
    def choices(self) -> int:
        """How many generations the request asks for."""
        return self.n

    @property
    def stops(self) -> list[str]:
        """Stop strings, without empty ones."""
        stops = self.stop or []
        if isinstance(stops, str):
            stops = [stops]
        return [stop for stop in stops if stop]

    @cached_property
    def form(self) -> Form | None:
        """The form of `response_format`. None if any text may be answered."""
        form = self.response_format
        if form is None or form.type == "text":
            return None
        if form.regex is not None:
            return Form("regex", form.regex, "response_format")
        schema: dict[str, Any] = {"type": "object"}
        if form.json_schema is not None:
            schema = form.json_schema.schema_
        return Form("json", json.dumps(schema), "response_format")


class CompletionBody(GenerationBody):
    """POST /v1/completions. `prompt` is text or token ids, one or several.

    The names of special tokens in a text are ordinary text.
    """

    chat: ClassVar[bool] = False
    prompt: str | Prompts[TokenId] | Prompts[str] | Prompts[Prompts[TokenId]]
    max_tokens: int = Field(16, ge=0)
    logprobs: int | None = Field(None, ge=0, le=20)
    echo: bool = False
    best_of: int = Field(1, ge=1, le=1)
    suffix: Literal[""] = ""

    @model_validator(mode="after")
    def _answers_something(self) -> Self:
        if not self.max_tokens and not self.echo:
            message = "max_tokens is 0 and echo is off: nothing would be answered"
            raise ApiError(message, param="max_tokens")
        return self

    @property
    def choices(self) -> int:
        return self.n * len(self.prompts)

    @property
    def top(self) -> int | None:
        """Alternatives that each log-probability comes with. None without log-probabilities."""
        return self.logprobs

    @property
    def shown(self) -> bool:
        """Whether more than the prompt is answered."""
        return self.max_tokens > 0

    @property
    def prompts(self) -> list[str | list[int]]:
        single = isinstance(self.prompt, str) or isinstance(self.prompt[0], int)
        return [self.prompt] if single else list(self.prompt)  # type: ignore[list-item,arg-type]


class TextPart(StrictModel):
    type: Literal["text"]
    text: str


class Message(BaseModel):
    """A turn. Fields beyond these are the template's business."""

    model_config = ConfigDict(extra="allow", strict=True)
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Items[TextPart] | None = None
    # With these two, other servers continue where the message ends.
    partial: Literal[False] | None = None
    prefix: Literal[False] | None = None

    def to_dict(self) -> dict[str, Any]:
        """The message for templates: text parts are joined, and null fields left out.

        A developer's message becomes the system's, since OpenAI renamed that role.
        """
        given = {
            key: value
            for key, value in self
            if value or key in MESSAGE_FIELDS and value is not None
        }
        if isinstance(self.content, list):
            given["content"] = "".join(part.text for part in self.content)
        if self.role == "developer":
            given["role"] = "system"
        if "reasoning" in given:  # vLLM's name of it
            given.setdefault("reasoning_content", given.pop("reasoning"))
        return given


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
    """POST /v1/chat/completions.

    Kimi has no levels of reasoning: any `reasoning_effort` but "none" is thinking.
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
    def _one_meaning(self) -> Self:
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
        return self.top_logprobs if self.logprobs else None

    @property
    def offered_tools(self) -> list[dict[str, Any]] | None:
        """Tools to show to the model."""
        if self.tool_choice == "none" or not self.tools:
            return None
        return [tool.model_dump(exclude_unset=True) for tool in self.tools]

    @property
    def demanded_tools(self) -> list[Function]:
        """The functions that the answer must choose from. [] if it need not call one.

        With `required` these are all functions. If one is named, it is that one alone.
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
        return named[:1]

    @property
    def strict_tools(self) -> list[Function]:
        """The offered functions, if the model chooses whether to call and one of them is strict.

        Else []. A function that is not strict takes any object.
        """
        functions = [tool.function for tool in self.tools]
        if self.tool_choice != "auto" or not any(function.strict for function in functions):
            return []
        return [
            function if function.strict else Function(name=function.name) for function in functions
        ]

    @cached_property
    def form(self) -> Form | None:
        """The form of `response_format`, or of a call of the demanded or strict functions."""
        asked = super().form
        functions = self.demanded_tools or self.strict_tools
        if not functions:
            return asked
        if asked is not None:
            named = "a demanded tool call" if self.demanded_tools else "a strict function"
            message = f"{named} and response_format exclude each other"
            raise ApiError(message, param="response_format")
        several = self.parallel_tool_calls and isinstance(self.tool_choice, str)
        try:
            text = tool_call_grammar(functions, several, opened=not self.demanded_tools)
        except ValueError as error:
            raise ApiError(f"no answer can have this form: {error}", param="tools") from None
        return Form("lark", text, "tools")


def tool_call_grammar(functions: Sequence[Function], several: bool, opened: bool = False) -> str:
    """Lark grammar of a Kimi tool-call section that calls these functions.

    Its marks are special tokens. A call's id is `functions.NAME:NUMBER`. Arguments follow the
    function's own schema.

    Args:
        several: allow more than one call.
        opened: the section's first mark is already there, and the grammar begins after it.
    """
    lines = []
    for index, function in enumerate(functions):
        schema = compact_schema(json.dumps(function.parameters or {"type": "object"}))
        lines += [
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
    return "\n".join([start, f"call: {calls}", *lines])
