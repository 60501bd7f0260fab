"""Requests to the engine: their fields with valid ranges, and the check against an engine."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from trtspec.errors import UsageError

MAX_INT32 = 2**31 - 1
TokenId = Annotated[int, Field(ge=0, le=MAX_INT32)]
Penalty = Annotated[float, Field(ge=-2, le=2)]


class RequestRefused(UsageError):
    """Error: the request cannot be served. `param`: name of the faulty field, or None."""

    def __init__(self, message: str, remedy: str = "", param: str | None = None) -> None:
        super().__init__(message, remedy)
        self.param = param


class PromptTooLong(RequestRefused):
    """Error: the prompt leaves no room for an answer in the context."""


class StrictModel(BaseModel):
    """Base of pydantic models that refuse unknown fields, values of another type, and NaN."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class Sampling(StrictModel):
    """The fields that decide how tokens are chosen. API bodies and engine requests have them.

    Names are vLLM's, and so is the order of their effects: biases, `min_tokens`, penalties.

    temperature: 0 is greedy.
    top_p: mass of the likeliest tokens that are kept. 1 is off.
    top_k: number of the likeliest tokens that are kept. 0 and -1 are off.
    seed: seed of the request's random numbers, which do not depend on other requests.
    ignore_eos: whether the output continues after an end-of-sequence token.
    stop_token_ids: ids of further tokens that end the output.
    min_tokens: number of output tokens before which no end token is allowed.
    frequency_penalty: amount subtracted from a logit per occurrence of the token in the output.
    presence_penalty: amount subtracted from the logits of all tokens in the output.
    repetition_penalty: divisor of the positive logits of tokens in prompt or output. Negative
        logits are multiplied by it.
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
    # Below 0.01, logits could become infinite.
    repetition_penalty: float = Field(1.0, ge=0.01, le=10)


class GenerationRequest(Sampling):
    """A request to continue a prompt, greedily unless a temperature is given.

    Raises RequestRefused if a field is outside its range.

    Args:
        id: id of the request, unique in its engine.
        prompt_ids: token ids of the prompt.
        max_tokens: largest number of tokens to generate.
        stop: strings that end the output and are not part of it. They need an engine with a
            tokenizer.
        logprobs: number of alternatives to report per token. 0: no log-probabilities.
        prompt_logprobs: whether to report log-probabilities of the prompt's tokens too, from the
            second token on.
        logit_bias: number to add to the logit of a token, by token id.
        grammar: Grammar that the output follows. None: any text.
        grammar_after: id of the token after which the grammar applies. None: the grammar applies
            from the first token on.
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
        """Whether a penalty, bias, minimum length or grammar changes the logits."""
        penalties = self.frequency_penalty or self.presence_penalty or self.repetition_penalty != 1
        return bool(penalties or self.min_tokens or self.logit_bias or self.grammar)


def check_request(
    request: GenerationRequest, max_seq_len: int, vocab_size: int, has_tokenizer: bool
) -> None:
    """Raises RequestRefused if the request cannot run in an engine with these properties.

    Args:
        request: the request.
        max_seq_len: largest number of tokens of prompt and output together.
        vocab_size: number of tokens in the target's vocabulary.
        has_tokenizer: whether the engine has a tokenizer.
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
