"""A request on its way through the engine: tokens, text and end. Sums over all requests."""

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
MAX_MASKS_S = 0.1  # of processor time for the grammars' masks of one step
MIN_TEMPERATURE = 1e-30  # below, a request is greedy: float32 cannot divide by it


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Natural-log probabilities under the model (temperature 1).

    A server keeps millions of alternatives: 25 bytes each in arrays, 140 in a list of pairs.

    token, logprob: the chosen token.
    ids, values: the likeliest tokens, best first.
    """

    token: int
    logprob: float
    ids: array[int]
    values: array[float]


@dataclass
class Stats:
    """Speculation counters of a request. The prefill is not a step.

    histogram: `histogram[j]` steps accepted j drafts.
    """

    steps: int = 0
    drafted: int = 0
    accepted: int = 0
    histogram: list[int] = field(default_factory=list)

    def count(self, offered: int, accepted: int) -> None:
        self.steps += 1
        self.drafted += offered
        self.accepted += accepted
        self.histogram[accepted] += 1


@dataclass
class Output:
    """The tokens that one engine step added to a request, or all of its steps, joined by `add`.

    finish_reason, stats: in the last output of a request.
    round: drafts offered and accepted in this step. None for a prefill.
    cached_tokens: prompt tokens that needed no computation. In the first output.
    gaps: with record_gaps, best minus second-best logit of each token.
    margins: with record_gaps, the least lead of the experts of each token.
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
        """Output tokens per engine iteration, prefill included: 1.0 without drafts.

        The name is trtllm-serve's.
        """
        if not self.token_ids:
            return 0.0
        return len(self.token_ids) / (1 + self.stats.steps)


class Sequence:
    """Engine-side state of a request: its tokens, text, random numbers and counters."""

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
        ends = set(request.stop_token_ids)
        if not request.ignore_eos:
            ends |= set(eos_ids)
        self.ends = frozenset(ends)
        self.text = TextStream(tokenizer, request.stop)
        self.steering = Steering(request, self.ends) if request.constrained else None
        self.prompt_logprobs: list[TokenLogprobs] = []
        self.stats = Stats(histogram=[0] * (draft_len + 1))
        self.sampled = request.temperature >= MIN_TEMPERATURE
        if request.seed is not None:
            seed = request.seed
        self.generator = torch.Generator().manual_seed(seed)
        self.turn = 0  # in the queue
        self.prefilled = 0  # prompt tokens in the caches
        self.cached_tokens = 0  # prefilled tokens that another request computed
        self.failure: Exception | None = None  # of its constraints; `emit` raises it
        self.finish_reason: FinishReason | None = None

    @property
    def length(self) -> int:
        return len(self.request.prompt_ids) + len(self.token_ids)

    @property
    def remaining(self) -> int:
        return self.limit - len(self.token_ids)

    def uniform(self, count: int) -> torch.Tensor:
        """The request's next `count` random numbers in [0, 1), float32."""
        return torch.rand(count, generator=self.generator)

    def fail(self, error: Exception) -> Output:
        """Ends the request with an error, in its last output."""
        self.finish_reason = "error"
        return Output(self.id, finish_reason="error", stats=self.stats, error=error)

    def emit(self, tokens: list[int], offered: int | None = None) -> Output:
        """Takes the tokens of a step, at most `remaining`, and cuts them at the end of the request.

        Raises the failure of the request's constraints.

        offered: how many drafts were verified. None after a prefill, which is not a speculation
            step.
        """
        if self.failure is not None:
            raise self.failure
        accepted = len(tokens) - 1
        reason: FinishReason | None = None
        if not self.ends.isdisjoint(tokens):
            end = next(index for index, token in enumerate(tokens) if token in self.ends)
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
    """Applies each sequence's constraints to logits [B, T, V].

    Returns the same tensor if no sequence has constraints.

    A sequence whose constraints fail keeps the failure until it takes its tokens. All sequences
    wait for the masks of grammars. So after MAX_MASKS_S of a step, sequences whose grammar was slow
    before are refused.

    logits: after each sequence's last token and each of its drafts.
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

    With stop strings, tokens are read one by one, so a generation ends at the same token whatever
    number a step brings. Text that may be the beginning of a stop string is held back.
    """

    def __init__(self, tokenizer: KimiTokenizer | None, stop: Rows[str] = ()) -> None:
        self._detokenizer = Detokenizer(tokenizer) if tokenizer else None
        self.stop = tuple(stop)
        self._pending = ""
        self.stopped = False

    def push(self, ids: list[int]) -> tuple[str, int]:
        """Returns (text that is now certain, number of `ids` in the output).

        A stop string ends the output.
        """
        if self._detokenizer is None:
            return "", len(ids)
        if not self.stop:
            return self._detokenizer.push(ids), len(ids)
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
        """The held-back text, "" after a stop string. Half a character becomes U+FFFD."""
        if self.stopped or self._detokenizer is None:
            return ""
        text = self._pending + self._detokenizer.flush()
        self._pending = ""
        return text


@dataclass
class Totals(Stats):
    """Sums over all requests since the engine started."""

    iterations: int = 0
    requests: int = 0
    prompt_tokens: int = 0
    tokens: int = 0

    def record(self, outputs: Iterable[Output], prompt_tokens: int) -> None:
        """Adds one engine step, which computed `prompt_tokens` tokens of prompts."""
        self.iterations += 1
        self.prompt_tokens += prompt_tokens
        for output in outputs:
            self.tokens += len(output.token_ids)
            self.requests += output.finish_reason is not None
            if output.round is not None:
                self.count(*output.round)
