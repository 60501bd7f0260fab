"""Requests to the engine: the range of every field, and the check of a request."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from trtspec.errors import UsageError

MAX_INT32 = 2**31 - 1
TokenId = Annotated[int, Field(ge=0, le=MAX_INT32)]
Penalty = Annotated[float, Field(ge=-2, le=2)]


class RequestRefused(UsageError):
    """A request that cannot be served as it is. `param` names the field."""

    def __init__(self, message: str, remedy: str = "", param: str | None = None) -> None:
        super().__init__(message, remedy)
        self.param = param


class PromptTooLong(RequestRefused):
    """The prompt leaves no room for an answer."""


class StrictModel(BaseModel):
    """Refuses unknown fields, and values of another type."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class Sampling(StrictModel):
    """How tokens are chosen: the fields that a body and the engine's request share.

    Names and order are vLLM's: biases, `min_tokens`, then the penalties. Penalties count output
    tokens, and the repetition penalty counts prompt tokens too. `temperature` 0 is greedy. `top_k`
    0 and -1 and `top_p` 1 are off. `seed` fixes a sampled request's random numbers whatever else is
    in the batch. Infinity and NaN are outside of every range.
    """

    temperature: float = Field(1.0, ge=0, le=100)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=-1, le=MAX_INT32)
    seed: int | None = Field(None, ge=-(2**63), le=2**63 - 1)
    ignore_eos: bool = False
    stop_token_ids: list[TokenId] = Field([], max_length=64)
    min_tokens: int = Field(0, ge=0, le=MAX_INT32)
    frequency_penalty: Penalty = 0.0
    presence_penalty: Penalty = 0.0
    repetition_penalty: float = Field(1.0, ge=0.01, le=10)  # below, logits become infinite


class GenerationRequest(Sampling):
    """A prompt, and how to continue it: greedy unless a temperature is given.

    Raises RequestRefused for a field outside its range.

    Args:
        stop: strings that end the output and are not part of it. They need an engine with a
            tokenizer.
        logprobs: alternatives to report per token. 0: none.
        prompt_logprobs: report them for the prompt's tokens too, from the second on.
        grammar: each answer follows its own copy.
        grammar_after: the token after which the grammar applies. None: from the first token on.
    """

    id: str
    prompt_ids: list[int]
    max_tokens: int = Field(ge=1)
    temperature: float = Field(0.0, ge=0, le=100)
    stop: list[str] = []
    logprobs: int = 0
    prompt_logprobs: bool = False
    logit_bias: dict[int, float] = {}
    grammar: Any = None
    grammar_after: int | None = None

    def __init__(self, id: str, prompt_ids: list[int], max_tokens: int, **fields: Any) -> None:
        try:
            super().__init__(
                **{"id": id, "prompt_ids": prompt_ids, "max_tokens": max_tokens, **fields}
            )
        except ValidationError as error:
            first = error.errors()[0]
            param = str(first["loc"][0])
            raise RequestRefused(f"{param}: {first['msg']}", param=param) from None

    @property
    def constrained(self) -> bool:
        """Whether logits are changed before the sampling."""
        penalties = self.frequency_penalty or self.presence_penalty or self.repetition_penalty != 1
        return bool(penalties or self.min_tokens or self.logit_bias or self.grammar)


def check_request(
    request: GenerationRequest, max_seq_len: int, vocab_size: int, has_tokenizer: bool
) -> None:
    """Raises RequestRefused for a request that cannot run in this engine.

    `max_seq_len` bounds prompt plus output, in tokens.
    """
    length = len(request.prompt_ids)
    if not length:
        raise RequestRefused("the prompt has no tokens", "send at least one token", "prompt")
    if length >= max_seq_len:
        message = f"{length} prompt tokens leave no room in a context of {max_seq_len} tokens"
        raise PromptTooLong(message, "shorten the prompt or raise `max_seq_len`", "prompt")
    fields = {
        "prompt": request.prompt_ids,
        "stop_token_ids": request.stop_token_ids,
        "logit_bias": request.logit_bias,
    }
    for param, tokens in fields.items():
        if not all(0 <= token < vocab_size for token in tokens):
            message = f"a token of {param} is outside the vocabulary of {vocab_size}"
            raise RequestRefused(message, "check the tokenizer", param)
    if request.stop and not has_tokenizer:
        raise RequestRefused(
            "stop strings need an engine with a tokenizer", "pass tokenizer= to the engine", "stop"
        )
    if request.stop and request.min_tokens:
        raise RequestRefused(
            "min_tokens does not hold back stop strings", "leave one of them out", "min_tokens"
        )
