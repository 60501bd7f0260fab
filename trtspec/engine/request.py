"""What may be asked of the engine: the ranges of every field, the request itself, and the one check of it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from trtspec.errors import UsageError

Penalty = Annotated[float, Field(ge=-2, le=2)]


class RequestRefused(UsageError):
    """A request that cannot be served as it is; `param` names the field."""

    def __init__(self, message: str, remedy: str = "", param: str | None = None) -> None:
        super().__init__(message, remedy)
        self.param = param


class PromptTooLong(RequestRefused):
    """The prompt leaves no room for an answer."""


class Ranges(BaseModel):
    """Read from a JSON body, or from the attributes of a record. Infinity and NaN are outside of every range."""

    model_config = ConfigDict(extra="forbid", strict=True, from_attributes=True, allow_inf_nan=False)


class SamplingRanges(Ranges):
    """Fields of a `GenerationRequest`."""

    temperature: float = Field(1.0, ge=0, le=100)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=-1, le=2**31 - 1)
    seed: int | None = Field(None, ge=-(2**63), le=2**63 - 1)


class ConstraintRanges(Ranges):
    """Fields of `LogitsConstraints`. A repetition penalty below 0.01 would make logits infinite."""

    frequency_penalty: Penalty = 0.0
    presence_penalty: Penalty = 0.0
    repetition_penalty: float = Field(1.0, ge=0.01, le=10)
    min_p: float = Field(0.0, ge=0, le=1)
    min_tokens: int = Field(0, ge=0, le=2**31 - 1)


@dataclass(frozen=True)
class LogitsConstraints:
    """What is asked of the tokens beyond the sampling; the defaults ask for nothing. Names and order are vLLM's:
    biases, `min_tokens`, then the penalties, which count output tokens (repetition: those of the prompt too), and
    `min_p` after the temperature.

    `grammar` is a `Grammar` of this request alone; it begins to count after the token `grammar_after` where that is
    given.
    """

    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    min_p: float = 0.0
    min_tokens: int = 0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    grammar: Any = None
    grammar_after: int | None = None


@dataclass(frozen=True)
class GenerationRequest:
    """What to generate. `temperature` 0 is greedy; `top_k` 0 and `top_p` 1 are off.

    `stop` strings need an engine with a tokenizer and are not part of the output. `logprobs` is how many alternatives
    to report per token (0: none), with `prompt_logprobs` for those of the prompt as well, from its second. `seed` fixes
    a sampled request's random numbers whatever else is in the batch.
    """

    id: str
    prompt_ids: list[int]
    max_tokens: int
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    stop: list[str] = field(default_factory=list)
    ignore_eos: bool = False
    logprobs: int = 0
    stop_token_ids: tuple[int, ...] = ()
    constraints: LogitsConstraints | None = None
    prompt_logprobs: bool = False


def check_request(request: GenerationRequest, max_seq_len: int, vocab_size: int, has_tokenizer: bool) -> None:
    """Raises RequestRefused for a request that cannot run, or not as it is. `max_seq_len` bounds prompt plus output, in
    tokens."""

    def check_tokens(tokens: Iterable[int], param: str) -> None:
        if not all(0 <= token < vocab_size for token in tokens):
            message = f"a token of {param} is outside the vocabulary of {vocab_size}"
            raise RequestRefused(message, "check the tokenizer", param)

    _check_ranges(SamplingRanges, request)
    length = len(request.prompt_ids)
    if not length:
        raise RequestRefused("the prompt has no tokens", "send at least one token", "prompt")
    if length >= max_seq_len:
        message = f"{length} prompt tokens leave no room in a context of {max_seq_len} tokens"
        raise PromptTooLong(message, "shorten the prompt or raise `max_seq_len`", "prompt")
    if request.max_tokens < 1:
        raise RequestRefused(f"max_tokens is {request.max_tokens}", "ask for at least one token", "max_tokens")
    check_tokens(request.prompt_ids, "prompt")
    check_tokens(request.stop_token_ids, "stop_token_ids")
    if request.stop and not has_tokenizer:
        raise RequestRefused("stop strings need an engine with a tokenizer", "pass tokenizer= to the engine", "stop")
    if request.constraints is None:
        return
    _check_ranges(ConstraintRanges, request.constraints)
    check_tokens(request.constraints.logit_bias, "logit_bias")
    if request.constraints.min_tokens and request.stop:
        raise RequestRefused("min_tokens does not hold back stop strings", "leave one of them out", "min_tokens")


def _check_ranges(ranges: type[Ranges], record: object) -> None:
    try:
        ranges.model_validate(record)
    except ValidationError as error:
        first = error.errors()[0]
        param = str(first["loc"][0])
        raise RequestRefused(f"{param}: {first['msg']}", param=param) from None
