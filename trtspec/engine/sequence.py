"""State of a request in the engine: tokens, text and end. Also totals over all requests."""

from __future__ import annotations

import time
from array import array
from collections.abc import Iterable
from collections.abc import Sequence as Rows
from dataclasses import dataclass, field
from typing import Literal

import torch

from trtspec.checkpoint.chat_parser import held_back
from trtspec.checkpoint.tokenizer import Detokenizer, KimiTokenizer
from trtspec.engine.request import GenerationRequest, RequestRefused
from trtspec.engine.steering import Steering

FinishReason = Literal["stop", "length", "cancelled", "error"]
MAX_MASKS_S = 0.1  # seconds of processor time for all grammar masks of one engine step
MIN_TEMPERATURE = 1e-30  # Lower temperatures are greedy. The lowest ones would be 0 in float32.


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Natural-log probabilities at one position, under the model at temperature 1.

    A server keeps millions of alternatives. In arrays they take 25 bytes each, in a list of pairs
    140 bytes.

    token: id of the chosen token.
    logprob: log-probability of the chosen token.
    ids: ids of the likeliest tokens, likeliest first.
    values: log-probabilities of the tokens in `ids`.
    """

    token: int
    logprob: float
    ids: array[int]
    values: array[float]


@dataclass
class Stats:
    """Counters of speculative decoding.

    steps: number of verifications. A prefill is not a verification.
    drafted: number of drafts that were verified.
    accepted: number of drafts that were accepted.
    histogram: entry j is the number of verifications that accepted j drafts.
    """

    steps: int = 0
    drafted: int = 0
    accepted: int = 0
    histogram: list[int] = field(default_factory=list)

    def count(self, offered: int, accepted: int) -> None:
        """Counts one verification: `offered` drafts were verified, and `accepted` accepted."""
        self.steps += 1
        self.drafted += offered
        self.accepted += accepted
        self.histogram[accepted] += 1


@dataclass
class Output:
    """An output of an engine step for a request. `add` joins several outputs.

    id: id of the request.
    token_ids: ids of the new tokens.
    text: text that became certain in this step.
    finish_reason: reason of the request's end. None before its last output.
    logprobs: log-probabilities of the new tokens, if requested.
    gaps: best minus second-best logit of each token, with the option `record_gaps`.
    margins: least lead of the chosen experts of each token, with the option `record_gaps`.
    stats: counters of the whole request, in its last output.
    round: numbers of offered and of accepted drafts of this step. None after a prefill.
    error: exception that ended the request. None if the request did not fail.
    prompt_logprobs: log-probabilities of the prompt's tokens, in the first output, if requested.
    cached_tokens: number of prompt tokens whose state came from the prefix cache, in the first
        output.
    """

    id: str
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: FinishReason | None = None
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    margins: list[float] = field(default_factory=list)
    stats: Stats = field(default_factory=Stats)
    round: tuple[int, int] | None = None
    error: Exception | None = None
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    cached_tokens: int = 0

    def add(self, step: Output) -> None:
        """Appends a later output of the same request."""
        self.token_ids += step.token_ids
        self.text += step.text
        self.logprobs += step.logprobs
        self.prompt_logprobs += step.prompt_logprobs
        self.gaps += step.gaps
        self.margins += step.margins
        self.cached_tokens += step.cached_tokens
        if step.finish_reason:
            self.finish_reason = step.finish_reason
            self.stats = step.stats
            self.error = step.error

    @property
    def avg_decoded_tokens_per_iter(self) -> float:
        """Number of output tokens per engine step, with the prefill as one step.

        1.0 without drafts, and 0.0 without tokens. The name is trtllm-serve's.
        """
        if not self.token_ids:
            return 0.0
        return len(self.token_ids) / (1 + self.stats.steps)


class Sequence:
    """State of one request in the engine: its tokens, text, random numbers and counters."""

    def __init__(
        self,
        request: GenerationRequest,
        *,
        draft_len: int,
        max_seq_len: int,
        eos_ids: Rows[int],
        tokenizer: KimiTokenizer | None,
        seed: int,
    ) -> None:
        self.request = request
        self.id = request.id
        self.token_ids: list[int] = []
        self.limit = min(request.max_tokens, max_seq_len - len(request.prompt_ids))
        end_ids = set(request.stop_token_ids)
        if not request.ignore_eos:
            end_ids |= set(eos_ids)
        self.end_ids = frozenset(end_ids)
        self.text = TextStream(tokenizer, request.stop)
        self.steering = Steering(request, self.end_ids) if request.constrained else None
        self.prompt_logprobs: list[TokenLogprobs] = []
        self.stats = Stats(histogram=[0] * (draft_len + 1))
        self.sampled = request.temperature >= MIN_TEMPERATURE
        if request.seed is not None:
            seed = request.seed
        self.generator = torch.Generator().manual_seed(seed)
        self.turn = 0  # position in the queue: lower turns are first
        self.prefilled = 0  # number of prompt tokens in the caches
        self.cached_tokens = 0  # number of prefilled tokens that an earlier request computed
        # Failure of the request's constraints in this step. `emit` raises it.
        self.failure: Exception | None = None
        self.finish_reason: FinishReason | None = None

    @property
    def length(self) -> int:
        """Number of tokens of prompt and output together."""
        return len(self.request.prompt_ids) + len(self.token_ids)

    @property
    def remaining(self) -> int:
        """Number of tokens that the output may still get."""
        return self.limit - len(self.token_ids)

    def uniform(self, count: int) -> torch.Tensor:
        """Returns the request's next `count` random numbers in [0, 1), float32 [count]."""
        return torch.rand(count, generator=self.generator)

    def fail(self, error: Exception) -> Output:
        """Ends the request, and returns its last output, which holds `error`."""
        self.finish_reason = "error"
        return Output(self.id, finish_reason="error", stats=self.stats, error=error)

    def emit(self, tokens: list[int], offered: int | None = None) -> Output:
        """Appends the tokens of a step, and returns the output of this step.

        Tokens after an end token or a stop string are dropped. Raises `failure` if it is set.

        Args:
            tokens: ids of the new tokens, at most `remaining`.
            offered: number of drafts that were verified. None after a prefill, which is not
                counted as a speculative step.
        """
        if self.failure is not None:
            raise self.failure
        accepted = len(tokens) - 1
        reason: FinishReason | None = None
        if not self.end_ids.isdisjoint(tokens):
            end = next(index for index, token in enumerate(tokens) if token in self.end_ids)
            tokens = tokens[: end + 1]
            reason = "stop"
        text, used = self.text.push(tokens)
        if self.text.stopped:
            tokens = tokens[:used]
            reason = "stop"
        self.token_ids += tokens
        if self.steering is not None:
            self.steering.advance(tokens)
        if reason is None and self.remaining == 0:
            reason = "length"
        output = Output(self.id, tokens, text, reason)
        if offered is not None:
            output.round = offered, min(accepted, len(tokens))
            self.stats.count(*output.round)
        if reason:
            self.finish_reason = reason
            output.text += self.text.finish()
            output.stats = self.stats
        return output


def steered(sequences: list[Sequence], logits: torch.Tensor, drafts: torch.Tensor) -> torch.Tensor:
    """Returns the logits with each sequence's constraints applied, float32 [B, T, V].

    Returns `logits` itself if no sequence has constraints. A failure of constraints is stored in
    `Sequence.failure`, so that the other sequences continue.

    All sequences wait until the masks of all grammars are computed. So if they take longer than
    MAX_MASKS_S, further sequences with a slow grammar are refused.

    Args:
        logits: [B, T, V], after each sequence's last token and each of its drafts.
        drafts: int64 [B, T-1].
    """
    if all(sequence.steering is None for sequence in sequences):
        return logits
    logits = logits.float().clone()
    began = time.thread_time()
    for row, sequence in enumerate(sequences):
        if sequence.steering is None:
            continue
        grammar = sequence.request.grammar
        try:
            if grammar is not None and grammar.slow and time.thread_time() - began > MAX_MASKS_S:
                raise RequestRefused(
                    "the form of the answer takes too long to follow beside others: simplify it"
                )
            sequence.steering.apply(logits[row], drafts[row].tolist())
        except Exception as error:
            sequence.failure = error
    return logits


class TextStream:
    """The growing text of one request.

    Text that may be the beginning of a stop string is held back. Without a tokenizer the text is
    always empty.
    """

    def __init__(self, tokenizer: KimiTokenizer | None, stop: Rows[str] = ()) -> None:
        self._detokenizer = Detokenizer(tokenizer) if tokenizer else None
        self.stop = tuple(stop)
        self._pending = ""
        self.stopped = False

    def push(self, ids: list[int]) -> tuple[str, int]:
        """Adds tokens. Returns the text that became certain, and the number of tokens used.

        Tokens after the end of a stop string are not used. The stop string is not in the text.
        """
        if self._detokenizer is None:
            return "", len(ids)
        if not self.stop:
            return self._detokenizer.push(ids), len(ids)
        # Tokens are read one by one, so that an output ends at the same token whether a step
        # brings one token or several.
        for used, token in enumerate(ids, 1):
            self._pending += self._detokenizer.push((token,))
            positions = [self._pending.find(word) for word in self.stop if word in self._pending]
            if positions:
                self.stopped = True
                text = self._pending[: min(positions)]
                self._pending = ""
                return text, used
        cut = len(self._pending) - held_back(self._pending, self.stop)
        text = self._pending[:cut]
        self._pending = self._pending[cut:]
        return text, len(ids)

    def finish(self) -> str:
        """Returns the text that was held back. "" after a stop string or without a tokenizer.

        An incomplete UTF-8 character becomes U+FFFD.
        """
        if self.stopped or self._detokenizer is None:
            return ""
        text = self._pending + self._detokenizer.flush()
        self._pending = ""
        return text


@dataclass
class Totals(Stats):
    """Totals of all requests since the engine started.

    iterations: number of engine steps.
    requests: number of requests that ended.
    prompt_tokens: number of prompt tokens that were computed.
    tokens: number of generated tokens.
    """

    iterations: int = 0
    requests: int = 0
    prompt_tokens: int = 0
    tokens: int = 0

    def record(self, outputs: Iterable[Output], prompt_tokens: int) -> None:
        """Adds the outputs of one engine step, which computed `prompt_tokens` prompt tokens."""
        self.iterations += 1
        self.prompt_tokens += prompt_tokens
        for output in outputs:
            self.tokens += len(output.token_ids)
            if output.finish_reason is not None:
                self.requests += 1
            if output.round is not None:
                self.count(*output.round)
