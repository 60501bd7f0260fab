"""The reference engine: continuous batching and speculative decoding, one target pass per round.

`Engine._round` shows speculative decoding on one screen: draft, verify, accept, commit, emit.
docs/reference-engine.md explains the steps of a round. A pass of the target writes only state that
a later pass may overwrite. models/state.py has this rule.
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from trtspec.checkpoint.tokenizer import KimiTokenizer
from trtspec.engine.batch import Chunk, DecodeBatch
from trtspec.engine.drafters import Drafter, DraftSampling, Eagle3Drafter
from trtspec.engine.prefix import BLOCK_TOKENS, PrefixCache, PrefixStats
from trtspec.engine.request import GenerationRequest, check_request
from trtspec.engine.sampling import (
    BatchSampling,
    accept_sampled,
    draw,
    leading,
    on_device,
    on_host,
    token_logprobs,
)
from trtspec.engine.sequence import Output, Sequence, Totals, steered
from trtspec.errors import UsageError
from trtspec.models.fast import prepare_for_decoding
from trtspec.models.state import State, TextPiece

if TYPE_CHECKING:
    from trtspec.models.eagle3 import Eagle3Head
    from trtspec.models.k2 import KimiModel

PREFILL_TOKENS = 512  # per engine step, so that a long prompt does not stall the decoding rows
# Number of later requests that may overtake a request that would keep others waiting.
OVERTAKEN_BY = 256


@dataclass(frozen=True)
class EngineOptions:
    """Limits and settings of an engine.

    Args:
        draft_len: number of drafts per sequence and round. An engine without a head ignores it.
        max_batch_size: number of sequences that decode at once.
        max_seq_len: largest number of tokens of a prompt and its output together.
        seed: seed of sampled requests that have no seed. The number of the request is added.
        record_gaps: whether outputs have the logit gap and the expert margin of each token.
        draft_sampling: choice of the drafts of sampled requests, see `Eagle3Drafter`.
        prefill_tokens: largest number of prompt tokens in one pass of the target. Without
            `max_num_tokens` also in one engine step.
        max_num_tokens: largest number of tokens in one engine step, of prompts, last tokens and
            drafts together. None: only `prefill_tokens` limits a step.
        prefix_bytes: size of the prefix cache in bytes. 0: no prefix is reused.
        block_tokens: number of tokens in a block of the prefix cache.
    """

    draft_len: int = 3
    max_batch_size: int = 16
    max_seq_len: int = 2048
    seed: int = 0
    record_gaps: bool = False
    draft_sampling: DraftSampling = "argmax"
    prefill_tokens: int = PREFILL_TOKENS
    max_num_tokens: int | None = None
    prefix_bytes: int = 0
    block_tokens: int = BLOCK_TOKENS


class Engine:
    """Generates text for many requests at once.

    The engine is not thread-safe: one thread must submit, cancel and step. Without a `tokenizer`
    outputs have no text, and stop strings are refused. A failure in one request ends only that
    request, with finish reason "error". An exception raised by `step` ends all requests, and the
    engine cannot be used any more.
    """

    def __init__(
        self,
        target: KimiModel,
        head: Eagle3Head | None = None,
        options: EngineOptions | None = None,
        tokenizer: KimiTokenizer | None = None,
    ) -> None:
        self.options = options = options or EngineOptions()
        prepare_for_decoding(target)
        self.target = target
        self.tokenizer = tokenizer
        if options.record_gaps:
            target.record_margins()
        self.max_seq_len = options.max_seq_len
        self.max_batch_size = options.max_batch_size
        self.draft_len = options.draft_len if head is not None else 0
        self.eos_ids = tokenizer.eos_ids if tokenizer else target.spec.eos_token_ids
        self.device = target.embed.weight.device
        # A row that is nearly full still drafts `draft_len` tokens, also beyond its end.
        cache_len = options.max_seq_len + self.draft_len
        self.cache: State = target.new_cache(options.max_batch_size, cache_len)
        self.drafter = Drafter()
        if head is not None:
            if options.draft_len < 1:
                message = f"draft length {options.draft_len} drafts nothing"
                raise UsageError(message, "use a `draft_len` of 1 or more, or no head")
            prepare_for_decoding(head)
            self.drafter = Eagle3Drafter(
                head, target, options.max_batch_size, cache_len, options.draft_sampling
            )
        self.prefix: PrefixCache | None = None
        if options.prefix_bytes:
            self.prefix = PrefixCache(
                self.cache, self.drafter.cache, options.prefix_bytes, options.block_tokens
            )
        self.batch = DecodeBatch(options.max_batch_size, self.draft_len, self.device)
        self.waiting: deque[Sequence] = deque()
        # The sequence whose prompt is partly computed, and its row in the caches.
        self.prefilling: Sequence | None = None
        self.prefill_row = 0
        # Ids of requests that the next step ends. Unknown ids are ignored.
        self.cancelled: set[str] = set()
        self.submitted = 0
        self.reset_counters()

    def reset_counters(self) -> None:
        """Sets the totals and the statistics of the prefix cache to zero."""
        self.totals = Totals(histogram=[0] * (self.draft_len + 1))
        if self.prefix is not None:
            self.prefix.stats = PrefixStats()

    def submit(self, request: GenerationRequest) -> None:
        """Checks and queues a request. Raises RequestRefused if the engine can never run it."""
        self.check(request)
        self.enqueue(request)

    def check(self, request: GenerationRequest) -> None:
        """Raises RequestRefused if the engine can never run the request.

        Other threads may call this method, because it reads nothing that a step changes.
        """
        check_request(
            request, self.max_seq_len, self.target.spec.vocab_size, self.tokenizer is not None
        )

    def enqueue(self, request: GenerationRequest, earlier: int = 0) -> None:
        """Queues a request that passed `check`.

        A request that is not the first of its API call, or that has a grammar of its own, could
        keep other clients waiting. So later requests may overtake it.

        Args:
            earlier: number of requests of the same API call that were queued before. Each lets
                OVERTAKEN_BY later requests overtake, and so does a grammar.
        """
        sequence = Sequence(
            request,
            draft_len=self.draft_len,
            max_seq_len=self.max_seq_len,
            eos_ids=self.eos_ids,
            tokenizer=self.tokenizer,
            seed=self.options.seed + self.submitted + 1,
        )
        delays = earlier
        # A grammar of size 0 was compiled for another request and costs nothing.
        if request.grammar is not None and request.grammar.size > 0:
            delays += 1
        sequence.turn = self.submitted + delays * OVERTAKEN_BY
        self.submitted += 1
        insort(self.waiting, sequence, key=lambda sequence: sequence.turn)

    @property
    def has_work(self) -> bool:
        """Whether a request waits, is prefilled or decodes."""
        return bool(self.waiting or self.prefilling or self.batch.sequences)

    @torch.inference_mode()
    def step(self) -> list[Output]:
        """Runs one engine step: prompt chunks, and one speculative round of all decoding rows.

        Returns the outputs of the requests that got tokens, ended or failed in this step. A request
        whose prompt ends may have two: its first token, and the result of its first round.
        """
        outputs: list[Output] = []
        if self.cancelled:
            outputs = self._drop_cancelled()
        prompt_tokens = self._prefill(outputs)
        if len(self.batch):
            self._round(outputs)
        self.totals.record(outputs, prompt_tokens)
        return outputs

    def _round(self, outputs: list[Output]) -> None:
        """Advances every row by its accepted drafts plus one token, and appends the outputs."""
        batch = self.batch
        drafter = self.drafter
        rows = len(batch)

        # Draft: guesses at each row's next tokens. A row offers none that it could not emit.
        proposed = drafter.propose(batch)
        offered = [
            min(count, sequence.remaining - 1)
            for count, sequence in zip(proposed, batch.sequences, strict=True)
        ]

        # Verify: one pass of the target over each row's last token and its drafts.
        block = batch.block[:rows, : 1 + max(offered)]
        end = batch.reach + max(offered)
        out = self.target(block, batch.start[:rows], self.cache, 0, drafter.aux_layers, length=end)

        # Accept: the drafts that the target would have chosen itself, then one token of its own.
        tokens, accepted = self._accept(out.logits, block[:, 1:], offered)
        emitted = on_host(tokens, accepted)  # the round's one wait for the device

        # Commit: each row's last token and accepted drafts are text now. The pass only wrote state
        # that a later pass may overwrite.
        self.cache.commit(accepted + 1)

        # Learn: the drafter reads the target's states, as many per row as the longest row emits.
        drafter.learn(batch, out.aux, tokens[:, : max(map(len, emitted))], accepted)
        batch.advance(tokens, accepted)

        # Emit: rows that end leave from the last one on: each gives its place to the last row.
        results = [
            self._emit(row, emitted[row], offered[row], out.logits[row], out.margins[row])
            for row in range(rows)
        ]
        for row in reversed(range(rows)):
            if results[row].finish_reason:
                self._remove(row)
        outputs += results

    def _accept(self, logits: Tensor, drafts: Tensor, offered: list[int]) -> tuple[Tensor, Tensor]:
        """Decides how many drafts of each row are accepted.

        Returns tokens (int64 [B, T]) and accepted (int64 [B]). Row b emits its first
        accepted[b] + 1 tokens: the accepted drafts, and one token of the target.

        Args:
            logits: [B, T, V], after each row's last token and after each of its T-1 drafts.
            drafts: int64 [B, T-1].
            offered: number of drafts of each row that may be accepted.
        """
        batch = self.batch
        width = drafts.shape[1]
        logits = steered(batch.sequences, logits, drafts)
        counts = None  # None: every row offers all drafts, so nothing is copied to the device
        if min(offered) != width:
            counts = on_device(offered, self.device)
        # Greedy rows. The results of sampled rows are replaced below.
        tokens = logits.argmax(-1)
        accepted = leading(tokens[:, :-1] == drafts, counts)
        sampling = batch.sampling
        if sampling is not None:
            rows = sampling.rows
            # The first `draft_len` random numbers of a row were for the drafter.
            uniform = batch.uniform[rows][:, batch.draft_len :]
            for_drafts = uniform[:, :width]
            for_final_token = uniform[:, -1:]
            draft_probs = batch.draft_probs
            if draft_probs is not None:
                draft_probs = draft_probs[rows, :width]
            if counts is not None:
                counts = counts[rows]
            tokens[rows], accepted[rows] = accept_sampled(
                sampling.probabilities(logits[rows]),
                drafts[rows],
                draft_probs,
                torch.cat((for_drafts, for_final_token), 1),
                draft_ids=self.drafter.draft_ids,
                counts=counts,
            )
        return tokens, accepted

    def _emit(
        self, row: int, tokens: list[int], offered: int | None, logits: Tensor, margins: Tensor
    ) -> Output:
        """Gives a row's sequence its new tokens, and returns the output of this step.

        An exception ends this request only.

        Args:
            offered: number of drafts that were verified. None after a prefill.
            logits: [T, V]. Entry j predicted token j.
            margins: [T], the lead of the chosen experts at each position of `logits`.
        """
        sequence = self.batch.sequences[row]
        try:
            output = sequence.emit(tokens, offered)
            if self.prefix is not None and output.finish_reason:
                text = sequence.request.prompt_ids + sequence.token_ids
                self.prefix.save(text[:-1], row)  # no pass has read the last token
            logits = logits[: len(output.token_ids)]
            if self.options.record_gaps:
                first, second = logits.topk(2, -1).values.unbind(-1)
                output.gaps = (first - second).tolist()
                output.margins = margins[: len(logits)].tolist()
            if sequence.request.logprobs:
                output.logprobs = token_logprobs(
                    logits.log_softmax(-1), output.token_ids, sequence.request.logprobs
                )
            return output
        except Exception as error:
            return sequence.fail(error)

    def generate(self, requests: list[GenerationRequest]) -> dict[str, Output]:
        """Runs all requests to their end, and returns the complete outputs by request id.

        Raises the error of the first request that fails.
        """
        completions = {request.id: Output(request.id) for request in requests}
        for request in requests:
            self.submit(request)
        while self.has_work:
            for output in self.step():
                if output.error is not None:
                    raise output.error
                completions[output.id].add(output)
        return completions

    def _prefill(self, outputs: list[Output]) -> int:
        """Computes chunks of prompts within the step's budget, and appends the outputs.

        Returns the number of prompt tokens that were computed. Prompts use the rows of the caches
        after the rows of the batch.
        """
        options = self.options
        budget = options.prefill_tokens
        if options.max_num_tokens is not None:
            decoding_tokens = len(self.batch) * (1 + self.draft_len)
            budget = options.max_num_tokens - decoding_tokens
        unspent = budget
        while chunks := self._next_chunks(unspent):
            unspent -= sum(map(len, chunks))
            self._prefill_pass(chunks, outputs)
        return budget - unspent

    def _next_chunks(self, budget: int) -> list[Chunk]:
        """Returns the chunks of the next pass. [] if no prompt waits or no token fits.

        A partly computed prompt is first, and waiting prompts follow. Only the last chunk may end
        before its prompt does.

        Args:
            budget: number of prompt tokens that this step may still compute.
        """
        room = min(budget, self.options.prefill_tokens)
        chunks: list[Chunk] = []
        if self.prefilling is not None:
            # The batch may have grown or shrunk since the last pass: prompts follow its last row.
            self._move(self.prefill_row, len(self.batch), self.prefilling.prefilled)
        while room > 0:
            row = len(self.batch) + len(chunks)
            sequence = self.prefilling or self._next_prompt(row, chunks)
            if sequence is None:
                break
            self.prefilling = None
            begin = sequence.prefilled
            end = min(begin + room, len(sequence.request.prompt_ids))
            chunks.append(Chunk(sequence, TextPiece(row, begin, end)))
            room -= end - begin
        return chunks

    def _next_prompt(self, row: int, chunks: list[Chunk]) -> Sequence | None:
        """Takes the next sequence from the queue and loads its cached prefix into cache row `row`.

        None if the queue is empty, or if the batch is full. Also None if `chunks` of this pass
        compute more of the prompt's prefix, which the prompt can reuse in the next pass.
        """
        if not self.waiting or row >= self.max_batch_size:
            return None
        request = self.waiting[0].request
        prompt = request.prompt_ids
        # Log-probabilities of the prompt need a pass over all its tokens, so no prefix is reused.
        prefix = None if request.prompt_logprobs else self.prefix
        if prefix is not None:
            for chunk in chunks:
                if prefix.worth_waiting(prompt, chunk.prompt, chunk.sequence.cached_tokens):
                    return None
        sequence = self.waiting.popleft()
        if prefix is not None:
            cached_tokens = prefix.load(prompt, row)
            sequence.prefilled = cached_tokens
            sequence.cached_tokens = cached_tokens
        return sequence

    def _prefill_pass(self, chunks: list[Chunk], outputs: list[Output]) -> None:
        """Runs one pass over the chunks, and appends their outputs.

        If the pass fails, each chunk gets a pass of its own, so that only faulty requests fail.
        """
        try:
            aux, following = self._compute(chunks)
            self.drafter.prompts(aux, following, [chunk.piece for chunk in chunks])
            self.cache.commit([len(chunk) for chunk in chunks])
        except Exception as error:
            if len(chunks) == 1:
                outputs.append(chunks[0].sequence.fail(error))
            else:
                # Repeating is safe, because a pass writes only state that may be overwritten.
                for chunk in chunks:
                    self._prefill_pass([chunk], outputs)
            return
        for chunk in chunks:
            outputs += self._advance_prompt(chunk)

    def _compute(self, chunks: list[Chunk]) -> tuple[Tensor | None, Tensor]:
        """Runs the target over the chunks: fills the cache and the chunks' results.

        Returns the captured hidden states [1, T, n_aux*H], None without a head. Also returns the
        token that follows each position, int64 [1, T]. The chunks are concatenated without padding,
        so each weight is read once for all of them. Only attention computes each chunk separately.
        """
        tokens: list[int] = []
        scored: list[int] = []  # indices in `tokens` of the positions whose logits are needed
        for chunk in chunks:
            tokens += chunk.prompt[chunk.piece.begin : chunk.piece.end]
            scored += range(len(tokens) - chunk.scored, len(tokens))
        pieces = [chunk.piece for chunk in chunks]
        ids = on_device([tokens], self.device)
        out = self.target.prompts(ids, pieces, self.cache, self.drafter.aux_layers, scored)
        counts = [chunk.scored for chunk in chunks]
        by_chunk = zip(
            chunks, out.logits[0].split(counts), out.margins[0].split(counts), strict=True
        )
        for chunk, logits, margins in by_chunk:
            chunk.logits = logits[-1]
            chunk.margins = margins[-1:]
            if chunk.sequence.request.prompt_logprobs:
                following = chunk.prompt[chunk.piece.begin + 1 : chunk.piece.end + 1]
                scores = logits[: len(following)].log_softmax(-1)
                alternatives = max(1, chunk.sequence.request.logprobs)
                chunk.logprobs = token_logprobs(scores, following, alternatives)
        return out.aux, on_device([self._following_tokens(chunks)], self.device)

    def _following_tokens(self, chunks: list[Chunk]) -> list[int]:
        """Returns the token after each position of the chunks, and sets `following` of each chunk.

        A chunk that ends its prompt is followed by the first token of the output.
        """
        first_tokens = iter(self._first_tokens([chunk for chunk in chunks if chunk.done]))
        tokens: list[int] = []
        for chunk in chunks:
            chunk.following = next(first_tokens) if chunk.done else chunk.prompt[chunk.piece.end]
            tokens += chunk.prompt[chunk.piece.begin + 1 : chunk.piece.end]
            tokens.append(chunk.following)
        return tokens

    def _advance_prompt(self, chunk: Chunk) -> list[Output]:
        """Records a computed chunk. A chunk that ends its prompt becomes a row of the batch.

        Returns [] if the prompt continues. Returns the output with the first token if the prompt
        ends, or the failed output if the request fails.
        """
        sequence = chunk.sequence
        piece = chunk.piece
        row = len(self.batch)
        sequence.prompt_logprobs += chunk.logprobs
        sequence.prefilled = piece.end
        try:
            if self.prefix is not None:
                self.prefix.save(chunk.prompt[: piece.end], piece.row)
            if not chunk.done:
                self.prefilling = sequence
                self.prefill_row = piece.row
                return []
            self._move(piece.row, row, len(chunk.prompt))
            self.batch.append(sequence, chunk.following)
        except Exception as error:
            return [sequence.fail(error)]
        output = self._emit(row, [chunk.following], None, chunk.logits.unsqueeze(0), chunk.margins)
        output.prompt_logprobs = sequence.prompt_logprobs
        output.cached_tokens = sequence.cached_tokens
        if output.finish_reason:
            self._remove(row)
        return [output]

    def _first_tokens(self, done: list[Chunk]) -> list[int]:
        """Returns the first output token of each chunk in `done`, whose prompts are complete."""
        if not done:
            return []
        sequences = [chunk.sequence for chunk in done]
        logits = torch.stack([chunk.logits for chunk in done])
        no_drafts = logits.new_empty(len(sequences), 0)
        logits = steered(sequences, logits.unsqueeze(1), no_drafts)[:, 0]
        tokens = logits.argmax(-1)
        sampling = BatchSampling.of(sequences, self.device)
        if sampling is not None:
            numbers = torch.cat([sequence.uniform(1) for sequence in sequences if sequence.sampled])
            numbers = numbers.to(self.device, non_blocking=True)
            probabilities = sampling.probabilities(logits[sampling.rows])
            tokens[sampling.rows] = draw(probabilities, numbers)
        emitted = on_host(tokens.unsqueeze(1), torch.zeros_like(tokens))
        return [token for (token,) in emitted]

    def _remove(self, row: int) -> None:
        """Removes a row from the batch. The last row takes its index, in the caches too."""
        moved = self.batch.remove(row)
        if moved != row:
            self._move(moved, row, self.batch.sequences[row].length)

    def _move(self, source: int, target: int, length: int) -> None:
        """Copies `length` tokens of row `source` to row `target`, in cache and drafter."""
        if source == target:
            return
        self.cache.move(source, target, length)
        self.drafter.move(source, target, length)

    def _drop_cancelled(self) -> list[Output]:
        """Removes the cancelled requests, and returns their final outputs."""
        ids = self.cancelled
        self.cancelled = set()
        dropped = [sequence for sequence in self.waiting if sequence.id in ids]
        self.waiting = deque(sequence for sequence in self.waiting if sequence.id not in ids)
        if self.prefilling and self.prefilling.id in ids:
            dropped.append(self.prefilling)
            self.prefilling = None
        # From the last row on, because the last row takes the index of a removed one.
        for row in reversed(range(len(self.batch))):
            if self.batch.sequences[row].id in ids:
                dropped.append(self.batch.sequences[row])
                self._remove(row)
        return [
            Output(
                sequence.id,
                text=sequence.text.finish(),
                finish_reason="cancelled",
                stats=sequence.stats,
            )
            for sequence in dropped
        ]
