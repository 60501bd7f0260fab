"""One request on its way through the engine: what was asked, what was produced, why it ended."""

from __future__ import annotations

from collections.abc import Sequence as Rows
from dataclasses import dataclass, field
from typing import Literal

import torch

from trtspec.checkpoint.tokenizer import KimiTokenizer
from trtspec.engine.request import GenerationRequest
from trtspec.engine.steering import Steering
from trtspec.engine.text import TextStream

FinishReason = Literal["stop", "length", "cancelled", "error"]
COLDEST = 1e-30  # a temperature below it is greedy: float32 cannot divide by it


@dataclass(frozen=True)
class TokenLogprobs:
    """Natural-log probabilities under the model (temperature 1): the chosen token's and the likeliest ones'."""

    token: int
    logprob: float
    top: list[tuple[int, float]]


@dataclass
class Stats:
    """Speculation counters of a request: `histogram[j]` steps accepted j drafts; the prefill is not a step."""

    steps: int = 0
    drafted: int = 0
    accepted: int = 0
    histogram: list[int] = field(default_factory=list)

    def count(self, offered: int, accepted: int) -> None:
        self.steps += 1
        self.drafted += offered
        self.accepted += accepted
        self.histogram[accepted] += 1

    def to_dict(self) -> dict[str, int | list[int]]:
        return {
            "steps": self.steps,
            "drafted": self.drafted,
            "accepted": self.accepted,
            "histogram": list(self.histogram),
        }


@dataclass
class Output:
    """What one engine step added to one request. The last one of a request has a finish reason and the statistics.

    `round` is (drafts offered, drafts accepted) of this step, None for a prefill. `cached_tokens` of the prompt needed
    no computation, and the first chunk of it was taken up at `scheduled` (monotonic seconds); the first output says so.
    """

    id: str
    token_ids: list[int]
    text: str
    finish_reason: FinishReason | None = None
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    stats: Stats | None = None
    round: tuple[int, int] | None = None
    error: Exception | None = None
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    cached_tokens: int = 0
    scheduled: float = 0.0


@dataclass
class Completion:
    """A whole answer. `gaps` (with record_gaps): best minus second-best logit at each emitted token."""

    id: str
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: FinishReason | None = None
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    stats: Stats = field(default_factory=Stats)
    error: Exception | None = None
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    cached_tokens: int = 0

    def add(self, output: Output) -> None:
        self.token_ids += output.token_ids
        self.text += output.text
        self.logprobs += output.logprobs
        self.prompt_logprobs += output.prompt_logprobs
        self.gaps += output.gaps
        self.cached_tokens += output.cached_tokens
        if output.finish_reason:
            self.finish_reason = output.finish_reason
        if output.stats:
            self.stats = output.stats
        if output.error:
            self.error = output.error

    @property
    def avg_decoded_tokens_per_iter(self) -> float:
        """Output tokens per engine iteration, the prefill's included (trtllm-serve's name): 1.0 without drafts."""
        return len(self.token_ids) / (1 + self.stats.steps) if self.token_ids else 0.0


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
        self.ends = frozenset(ends if request.ignore_eos else ends | set(eos_ids))
        self.text = TextStream(tokenizer, request.stop, request.include_stop, request.skip_special)
        self.steering = None
        if request.wishes is not None:
            self.steering = Steering(request.wishes, request.prompt_ids, self.ends, request.temperature)
        self.prompt_logprobs: list[TokenLogprobs] = []
        self.stats = Stats(histogram=[0] * (draft_len + 1))
        self.sampled = request.temperature >= COLDEST
        self.generator = torch.Generator().manual_seed(request.seed if request.seed is not None else seed)
        self.prefilled = 0
        self.failure: Exception | None = None
        self.scheduled = 0.0
        self.cached_tokens = 0
        self.finish_reason: FinishReason | None = None

    @property
    def text_ids(self) -> list[int]:
        """Prompt and answer so far."""
        return self.request.prompt_ids + self.token_ids

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
        """The last output of a request that something went wrong in."""
        self.finish_reason = "error"
        return Output(self.id, [], "", "error", stats=self.stats, error=error)

    def emit(self, tokens: list[int], offered: int | None = None) -> Output:
        """Takes the tokens a step produced, cut at the token that ends the request; `offered` drafts were verified.

        There are at most `remaining` tokens, as no more drafts are offered. `offered` is None for the token that comes
        out of the prefill, which is no speculation step.
        """
        if self.failure is not None:
            raise self.failure
        accepted = len(tokens) - 1
        reason: FinishReason | None = None
        if not self.ends.isdisjoint(tokens):
            end = next(i for i, token in enumerate(tokens) if token in self.ends)
            tokens, reason = tokens[: end + 1], "stop"
        text, used = self.text.push(tokens)
        if self.text.stopped:
            tokens, reason = tokens[:used], "stop"
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
    """Logits [B, T, V] after the last token and the drafts [B, T-1], as sequences with wishes of their own want them;
    the same tensor where there are none. One whose wishes fail keeps the failure until it takes its tokens."""
    if all(sequence.steering is None for sequence in sequences):
        return logits
    logits = logits.float().clone()
    for row, sequence in enumerate(sequences):
        if sequence.steering is None:
            continue
        try:
            sequence.steering.apply(logits[row], drafts[row].tolist())
        except Exception as error:
            sequence.failure = error
    return logits
