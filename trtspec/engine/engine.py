"""The reference engine: continuous batching and speculative decoding around one target forward per round.

A round: the target runs over each row's last token and drafts; verification decides which drafts stand; the drafter
learns the true states and proposes again. Rejected positions leave stale cache entries behind, which the next round's
own writes cover before anything can see them.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from trtspec.checkpoint.tokenizer import KimiTokenizer
from trtspec.engine.batch import DecodeBatch
from trtspec.engine.drafters import Drafter, DrafterName, DraftSampling, Eagle3Drafter, NoDrafter, PromptLookupDrafter
from trtspec.engine.sampling import draw, probabilities
from trtspec.engine.sequence import Completion, GenerationRequest, Output, Sequence, TokenLogprobs
from trtspec.engine.stats import Iteration, Totals
from trtspec.engine.verify import accept_greedy, accept_sampled
from trtspec.errors import UsageError
from trtspec.models.decoding import prepare_for_decoding

if TYPE_CHECKING:
    from trtspec.models.eagle3 import Eagle3Head
    from trtspec.models.kimi import KimiModel

PREFILL_TOKENS = 512  # per step, so that a long prompt does not stall the rows that decode


@dataclass(frozen=True)
class EngineOptions:
    """`draft_len` drafts are verified per round (0 without a drafter). `max_seq_len` bounds prompt plus output, in
    tokens; `prefill_tokens` the share of a prompt that one step takes. `draft_sampling` is how the drafts of sampled
    requests are chosen. `record_gaps` keeps, per emitted token, how far
    the best logit was ahead of the second."""

    drafter: DrafterName | None = None
    draft_len: int = 3
    max_batch_size: int = 16
    max_seq_len: int = 2048
    seed: int = 0
    record_gaps: bool = False
    draft_sampling: DraftSampling = "argmax"
    prefill_tokens: int = PREFILL_TOKENS


class Engine:
    """Generates for many requests at once; not thread-safe: one thread submits, cancels and steps. A `tokenizer` gives
    the outputs their text and is needed for stop strings. What fails in one request ends that request, with finish
    reason "error"; an exception that `step` raises concerns them all, and the engine cannot go on."""

    def __init__(
        self,
        target: KimiModel,
        head: Eagle3Head | None = None,
        options: EngineOptions | None = None,
        tokenizer: KimiTokenizer | None = None,
    ) -> None:
        options = options or EngineOptions()
        drafter, max_batch_size, max_seq_len = options.drafter, options.max_batch_size, options.max_seq_len
        prepare_for_decoding(target)
        if head is not None:
            prepare_for_decoding(head)
        self.target = target
        self.tokenizer = tokenizer
        self.max_seq_len, self.max_batch_size = max_seq_len, max_batch_size
        self.draft_len = options.draft_len if drafter else 0
        self.seed, self.record_gaps = options.seed, options.record_gaps
        self.draft_sampling = options.draft_sampling
        self.prefill_tokens = options.prefill_tokens
        self.eos_ids = tokenizer.eos_ids if tokenizer else target.spec.eos_token_ids
        self.device = target.embed.weight.device
        cache_len = max_seq_len + self.draft_len  # drafts of a row that is nearly full reach beyond its end
        self.cache = target.new_cache(max_batch_size, cache_len)
        self.drafter = make_drafter(options, head, target, cache_len)
        self.batch = DecodeBatch(max_batch_size, self.draft_len, self.device)
        self.waiting: deque[Sequence] = deque()
        self.prefilling: Sequence | None = None
        self.cancelled: set[str] = set()
        self.submitted = 0
        self.totals = Totals(histogram=[0] * (self.draft_len + 1))
        self.iteration: Iteration | None = None

    def submit(self, request: GenerationRequest) -> None:
        """Queues a request. Raises UsageError for one that can never run."""
        check_request(request, self.max_seq_len, self.target.spec.vocab_size, self.tokenizer is not None)
        self.submitted += 1
        sequence = Sequence(
            request,
            draft_len=self.draft_len,
            max_seq_len=self.max_seq_len,
            eos_ids=self.eos_ids,
            tokenizer=self.tokenizer,
            seed=self.seed + self.submitted,
        )
        self.waiting.append(sequence)

    def cancel(self, request_id: str) -> None:
        """Ends a request at the next step, with finish reason "cancelled"; an unknown or finished id is ignored."""
        self.cancelled.add(request_id)

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.prefilling or self.batch.sequences)

    @torch.inference_mode()
    def step(self) -> list[Output]:
        """One iteration: prefill up to `prefill_tokens` prompt tokens, then one round for all decoding rows."""
        began = time.perf_counter()
        outputs = self._drop_cancelled() if self.cancelled else []
        prompt_tokens = self._prefill(outputs)
        decoding = len(self.batch)
        if decoding:
            self._round(outputs)
        self.iteration = self.totals.record(
            outputs,
            decoding=decoding,
            active=len(self.batch) + (self.prefilling is not None),
            queued=len(self.waiting),
            prompt_tokens=prompt_tokens,
            seconds=time.perf_counter() - began,
        )
        return outputs

    def generate(self, requests: list[GenerationRequest]) -> dict[str, Completion]:
        """Runs the requests to their end, in slots that are refilled as they become free.

        Raises what any of the requests raised.
        """
        completions = {request.id: Completion(request.id) for request in requests}
        for request in requests:
            self.submit(request)
        while self.has_work:
            for output in self.step():
                if output.error is not None:
                    raise output.error
                completions[output.id].add(output)
        return completions

    def _prefill(self, outputs: list[Output]) -> int:
        """Advances prompts, one at a time, in cache row len(batch) or above; returns the tokens done."""
        budget = self.prefill_tokens
        while budget > 0:
            if self.prefilling is None:
                if not self.waiting or len(self.batch) >= self.max_batch_size:
                    break
                self.prefilling = self.waiting.popleft()
                self.prefill_row = len(self.batch)
            sequence = self.prefilling
            begin = sequence.prefilled
            end = min(begin + budget, len(sequence.request.prompt_ids))
            budget -= end - begin
            try:
                self._prefill_chunk(sequence, begin, end, outputs)
            except Exception as error:
                self.prefilling = None
                if sequence in self.batch.sequences:
                    self._remove(self.batch.sequences.index(sequence))
                outputs.append(sequence.fail(error))
        return self.prefill_tokens - budget

    def _prefill_chunk(self, sequence: Sequence, begin: int, end: int, outputs: list[Output]) -> None:
        prompt, row = sequence.request.prompt_ids, self.prefill_row
        start = torch.tensor([begin], device=self.device)
        tokens = torch.tensor([prompt[begin:end]], device=self.device)
        scored = sequence.request.prompt_logprobs
        out = self.target(tokens, start, self.cache, row, self.drafter.aux_layers, last_only=not scored)
        done = end == len(prompt)
        first = self._first_token(sequence, out.logits[:, -1]) if done else prompt[end]
        if scored:
            count = max(1, sequence.request.logprobs)
            known = prompt[begin + 1 : end + 1]
            sequence.prompt_logprobs += token_logprobs(out.logits[0, : len(known)].log_softmax(-1), known, count)
        following = torch.tensor([[*prompt[begin + 1 : end], first]], device=self.device)
        self.drafter.prompt(out.aux, following, start, row)
        sequence.prefilled = end
        if not done:
            return
        self.prefilling = None
        output = sequence.emit([first])
        output.prompt_logprobs = sequence.prompt_logprobs
        self._annotate(output, sequence, out.logits[0, -1:])
        outputs.append(output)
        if output.finish_reason is None:
            if row != len(self.batch):
                self.cache.move(row, len(self.batch))
                self.drafter.move(row, len(self.batch))
            row = self.batch.append(sequence, first)
            if sequence.sampled:
                self.batch.uniform[row] = sequence.uniform(self.batch.uniform.shape[1])
            self.drafter.begin(self.batch, row)

    def _first_token(self, sequence: Sequence, logits: Tensor) -> int:
        """The token after the prompt, from logits [1, V]."""
        if sequence.steering is not None:
            logits = sequence.steering.apply(logits.float().clone(), [])
        if not sequence.sampled:
            return int(logits.argmax(-1))
        request = sequence.request
        temperature, top_p = torch.tensor([[request.temperature], [request.top_p]], device=self.device)
        top_k = torch.tensor([request.top_k], device=self.device)
        return int(draw(probabilities(logits, temperature, top_p, top_k), sequence.uniform(1).to(self.device)))

    def _round(self, outputs: list[Output]) -> None:
        batch, drafter = self.batch, self.drafter
        rows = len(batch)
        drafter.propose(batch)
        offered = self._offered()
        width = max(offered)
        block, start = batch.block[:rows, : width + 1], batch.start[:rows].clone()
        out = self.target(block, start, self.cache, 0, drafter.aux_layers)
        tokens, accepted = self._verify(self._steered(out.logits, block[:, 1:]), block[:, 1:], offered)
        batch.block[:rows, 0] = tokens[batch.row_index[:rows], accepted]
        batch.start[:rows] += accepted + 1
        batch.refill_uniform()
        drafter.follow(batch, out.aux, tokens, start, accepted)
        host = torch.cat((tokens, accepted.unsqueeze(1)), 1).tolist()
        finished = []
        for row, sequence in enumerate(batch.sequences):
            *emitted, stand = host[row]
            try:
                output = sequence.emit(emitted[: stand + 1], offered[row])
                if self.record_gaps or sequence.request.logprobs:
                    self._annotate(output, sequence, out.logits[row])
            except Exception as error:
                output = sequence.fail(error)
            outputs.append(output)
            if output.finish_reason:
                finished.append(row)
        for row in reversed(finished):
            self._remove(row)

    def _steered(self, logits: Tensor, drafts: Tensor) -> Tensor:
        """Logits [B, T, V] as the rows with wishes of their own want them; the same tensor where there are none."""
        steered = [row for row, sequence in enumerate(self.batch.sequences) if sequence.steering is not None]
        if not steered:
            return logits
        logits = logits.float().clone()
        for row in steered:
            steering = self.batch.sequences[row].steering
            assert steering is not None
            steering.apply(logits[row], drafts[row].tolist())
        return logits

    def _offered(self) -> list[int]:
        """Drafts to verify per row: those proposed, but none that could not be emitted any more."""
        if not self.draft_len:
            return [0] * len(self.batch)
        counts = self.batch.counts.tolist()
        return [min(counts[row], sequence.remaining - 1) for row, sequence in enumerate(self.batch.sequences)]

    def _verify(self, logits: Tensor, drafts: Tensor, offered: list[int]) -> tuple[Tensor, Tensor]:
        """(tokens int64 [B, T], accepted int64 [B]) of logits [B, T, V] after the last token and the T-1 drafts."""
        batch, width = self.batch, drafts.shape[1]
        counts = None if min(offered) == width else torch.tensor(offered, device=self.device)
        best = logits.argmax(-1)
        accepted = accept_greedy(best, drafts, counts)
        sampling = batch.sampling
        if sampling is None:
            return best, accepted
        rows = sampling.rows
        uniform = batch.uniform[rows][:, batch.draft_len :]
        best[rows], accepted[rows] = accept_sampled(
            probabilities(logits[rows], sampling.temperature, sampling.top_p, sampling.top_k),
            drafts[rows],
            None if batch.draft_probs is None else batch.draft_probs[rows, :width],
            torch.cat((uniform[:, :width], uniform[:, -1:]), 1),
            draft_ids=self.drafter.draft_ids,
            counts=None if counts is None else counts[rows],
        )
        return best, accepted

    def _annotate(self, output: Output, sequence: Sequence, logits: Tensor) -> None:
        """Adds gaps and log-probabilities of the emitted tokens; row j of logits [T, V] predicted token j."""
        logits = logits[: len(output.token_ids)]
        if self.record_gaps:
            first, second = logits.topk(2, -1).values.unbind(-1)
            output.gaps = (first - second).tolist()
        if sequence.request.logprobs:
            output.logprobs = token_logprobs(logits.log_softmax(-1), output.token_ids, sequence.request.logprobs)

    def _remove(self, row: int) -> None:
        moved = self.batch.remove(row)
        if moved != row:
            self.cache.move(moved, row)
            self.drafter.move(moved, row)

    def _drop_cancelled(self) -> list[Output]:
        gone = self.cancelled
        self.cancelled = set()
        dropped = [sequence for sequence in self.waiting if sequence.id in gone]
        self.waiting = deque(sequence for sequence in self.waiting if sequence.id not in gone)
        if self.prefilling and self.prefilling.id in gone:
            dropped.append(self.prefilling)
            self.prefilling = None
        for row in reversed(range(len(self.batch))):
            if self.batch.sequences[row].id in gone:
                dropped.append(self.batch.sequences[row])
                self._remove(row)
        return [Output(s.id, [], s.text.finish(), "cancelled", stats=s.stats) for s in dropped]


def token_logprobs(scores: Tensor, tokens: list[int], count: int) -> list[TokenLogprobs]:
    """The chosen tokens' scores [T, V] and the `count` best ones of each row."""
    chosen = scores.gather(-1, torch.tensor(tokens, device=scores.device).unsqueeze(-1)).squeeze(-1).tolist()
    top = scores.topk(min(count, scores.shape[-1]), -1)
    ids, values = top.indices.tolist(), top.values.tolist()
    return [
        TokenLogprobs(token, chosen[row], list(zip(ids[row], values[row], strict=True)))
        for row, token in enumerate(tokens)
    ]


def make_drafter(options: EngineOptions, head: Eagle3Head | None, target: KimiModel, max_len: int) -> Drafter:
    """The drafter that is asked for. Raises UsageError when it lacks its head or has nothing to draft."""
    name, draft_len = options.drafter, options.draft_len
    if name is None:
        return NoDrafter()
    if draft_len < 1:
        raise UsageError(f"draft length {draft_len} drafts nothing", "use a draft length of 1 or more, or no drafter")
    if name == "prompt-lookup":
        return PromptLookupDrafter(draft_len)
    if name != "eagle3":
        raise UsageError(f"drafter {name!r} does not exist", "use eagle3 or prompt-lookup")
    if head is None:
        raise UsageError("drafter eagle3 needs a head", "pass --head, or use the drafter prompt-lookup")
    return Eagle3Drafter(head, target, options.max_batch_size, max_len, options.draft_sampling)


def check_request(request: GenerationRequest, max_seq_len: int, vocab_size: int, has_tokenizer: bool) -> None:
    """Raises UsageError for a request that cannot run in an engine of this size."""
    length = len(request.prompt_ids)
    if not length:
        raise UsageError(f"request {request.id}: the prompt has no tokens", "send at least one token")
    if length >= max_seq_len:
        raise UsageError(
            f"request {request.id}: {length} prompt tokens leave no room in a context of {max_seq_len} tokens",
            "shorten the prompt or raise --max-seq-len",
        )
    if request.max_tokens < 1:
        raise UsageError(f"request {request.id}: max_tokens is {request.max_tokens}", "ask for at least one token")
    if not all(0 <= token < vocab_size for token in request.prompt_ids):
        raise UsageError(
            f"request {request.id}: a prompt token is outside the vocabulary of {vocab_size}", "check the tokenizer"
        )
    if request.stop and not has_tokenizer:
        raise UsageError(
            f"request {request.id}: stop strings need an engine with a tokenizer", "pass tokenizer= to the engine"
        )
