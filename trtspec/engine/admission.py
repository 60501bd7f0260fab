"""The one check of a request: whether an engine of a given size can run it as it is."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from pydantic import ValidationError

from trtspec.engine.ranges import Ranges, RequestRefused, SamplingRanges, WishRanges
from trtspec.engine.sequence import GenerationRequest


class PromptTooLong(RequestRefused):
    """The prompt leaves no room for an answer."""


@dataclass(frozen=True)
class EngineLimits:
    """`max_seq_len` bounds prompt plus output, in tokens; without a tokenizer there are no stop strings. `longest_step`
    bounds a prompt that must be computed in one step."""

    max_seq_len: int
    vocab_size: int
    has_tokenizer: bool
    longest_step: int | None = None


def check_request(request: GenerationRequest, limits: EngineLimits) -> None:
    """Raises RequestRefused for a request that cannot run, or not as it is."""
    _check_ranges(SamplingRanges, request)
    length = len(request.prompt_ids)
    if not length:
        raise RequestRefused("the prompt has no tokens", "send at least one token", "prompt")
    if length >= limits.max_seq_len:
        raise PromptTooLong(
            f"{length} prompt tokens leave no room in a context of {limits.max_seq_len} tokens",
            "shorten the prompt or raise --max-seq-len",
            "prompt",
        )
    if limits.longest_step is not None and length > limits.longest_step:
        raise PromptTooLong(
            f"{length} prompt tokens do not fit in a step of {limits.longest_step}",
            "shorten the prompt, raise --max-num-tokens, or switch chunked prefill on",
            "prompt",
        )
    if request.max_tokens < 1:
        raise RequestRefused(f"max_tokens is {request.max_tokens}", "ask for at least one token", "max_tokens")
    _check_tokens(request.prompt_ids, limits, "prompt")
    _check_tokens(request.stop_token_ids, limits, "stop_token_ids")
    if request.stop and not limits.has_tokenizer:
        raise RequestRefused("stop strings need an engine with a tokenizer", "pass tokenizer= to the engine", "stop")
    wishes = request.wishes
    if wishes is None:
        return
    _check_ranges(WishRanges, wishes)
    _check_tokens(wishes.logit_bias, limits, "logit_bias")
    if wishes.min_tokens and request.stop:
        raise RequestRefused("min_tokens does not hold back stop strings", "leave one of them out", "min_tokens")


def _check_ranges(ranges: type[Ranges], record: object) -> None:
    try:
        ranges.model_validate(record)
    except ValidationError as error:
        first = error.errors()[0]
        param = str(first["loc"][0])
        raise RequestRefused(f"{param}: {first['msg']}", param=param) from None


def _check_tokens(tokens: Iterable[int], limits: EngineLimits, param: str) -> None:
    if not all(0 <= token < limits.vocab_size for token in tokens):
        raise RequestRefused(
            f"a token of {param} is outside the vocabulary of {limits.vocab_size}", "check the tokenizer", param
        )
