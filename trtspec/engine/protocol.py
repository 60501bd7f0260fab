"""Request bodies of the OpenAI API as far as the reference server honours them; everything else is refused by name."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator


class ApiError(Exception):
    """An answer in OpenAI's error shape."""

    def __init__(self, message: str, *, status: int = 400, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message, self.status, self.param, self.code = message, status, param, code

    def to_dict(self) -> dict[str, Any]:
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


class StreamOptions(BaseModel):
    model_config = ConfigDict(extra="ignore")
    include_usage: bool = False


# Fields of the API without effect on what is generated; accepted so that ordinary clients work.
INERT = ("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "parallel_tool_calls")
# Fields this server cannot honour, with the only values that change nothing.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "frequency_penalty": (None, 0),
    "presence_penalty": (None, 0),
    "repetition_penalty": (None, 1),
    "min_p": (None, 0),
    "logit_bias": (None, {}),
    "best_of": (None, 1),
    "echo": (None, False),
    "suffix": (None, ""),
    "response_format": (None, {"type": "text"}),
    "guided_json": (None,),
    "guided_regex": (None,),
}


class GenerationBody(BaseModel):
    """What both endpoints share. `top_k` (0 off), `ignore_eos` and `stop_token_ids` are extensions."""

    model_config = ConfigDict(extra="forbid")
    model: str | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    temperature: float = Field(1.0, ge=0, le=100)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = 0
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] = []
    ignore_eos: bool = False
    n: int = Field(1, ge=1, le=16)

    @model_validator(mode="before")
    @classmethod
    def _refuse_what_would_be_ignored(cls, body: Any) -> Any:
        if not isinstance(body, dict):
            return body
        for name, neutral in NEUTRAL.items():
            if name in body and body[name] not in neutral:
                raise ApiError(f"{name} is not supported by this server", param=name, code="unsupported_parameter")
        dropped = {*NEUTRAL, *INERT}
        # null means "not given" in the API, whatever the field's default is
        return {key: value for key, value in body.items() if key not in dropped and value is not None}

    @property
    def stops(self) -> list[str]:
        """Stop strings, without empty ones."""
        found = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return [word for word in found if word]


class CompletionBody(GenerationBody):
    """POST /v1/completions. `prompt` is text or token ids, one or several."""

    prompt: str | list[int] | list[str] | list[list[int]]
    max_tokens: int = Field(16, ge=1)
    logprobs: int | None = Field(None, ge=0, le=20)

    @property
    def prompts(self) -> list[str | list[int]]:
        if isinstance(self.prompt, str):
            return [self.prompt]
        if not self.prompt:
            raise ApiError("prompt is empty", param="prompt")
        if isinstance(self.prompt[0], int):
            return [self.prompt]
        return list(self.prompt)


class ChatBody(GenerationBody):
    """POST /v1/chat/completions."""

    messages: list[dict[str, Any]] = Field(min_length=1)
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool = False
    top_logprobs: int = Field(0, ge=0, le=20)
    tools: list[dict[str, Any]] = []
    tool_choice: Literal["none", "auto", "required"] | dict[str, Any] = "auto"
    chat_template_kwargs: dict[str, Any] = {}

    @property
    def plain_messages(self) -> list[dict[str, Any]]:
        """The messages with text parts joined, as templates expect them. Raises ApiError for images."""
        return [_plain(message, index) for index, message in enumerate(self.messages)]

    @property
    def offered_tools(self) -> list[dict[str, Any]] | None:
        """Tools to show to the model. Raises ApiError where the choice would need constrained decoding."""
        if self.tool_choice == "none" or not self.tools:
            return None
        if self.tool_choice != "auto":
            raise ApiError(
                "tool_choice 'required' or a named tool needs constrained decoding, which this server does not have",
                param="tool_choice",
                code="unsupported_parameter",
            )
        return self.tools


def _plain(message: dict[str, Any], index: int) -> dict[str, Any]:
    if not isinstance(message.get("role"), str):
        raise ApiError(f"messages[{index}] has no role", param=f"messages[{index}].role")
    content = message.get("content")
    if not isinstance(content, list):
        return message
    texts = [str(part.get("text", "")) for part in content if isinstance(part, dict) and part.get("type") == "text"]
    if len(texts) != len(content):
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
