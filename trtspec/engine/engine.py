"""The reference engine: continuous batching and speculative decoding, one target pass per round.

`Engine._round` is the whole method on one screen: draft, verify, accept, commit, emit.
docs/reference-engine.md walks through it. A pass changes no state that cannot be overwritten:
models/state.py has the rule for the memory of layers.
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

PREFILL_TOKENS = 512  # per step, so that a long prompt does not stall the rows that decode
OVERTAKEN_BY = 256  # later requests, by a request that may keep others waiting


@dataclass(frozen=True)
class EngineOptions:
    """Limits of an engine, and how it drafts.

    Args:
        draft_len: drafts that a round verifies, with a head.
        max_seq_len: tokens of a prompt and its output together.
        record_gaps: keep, per emitted token, the lead of the best logit and of the chosen experts.
        draft_sampling: how the drafts of sampled requests are chosen.
        prefill_tokens: of prompts in one pass, and in one step unless `max_num_tokens` is given.
        max_num_tokens: of a step, prompts and rounds together.
        prefix_bytes: size of the prefix cache (prefix.py). 0: no prefix is reused.
        block_tokens: tokens of a block of the prefix cache.
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
    """Generates for many requests at once.

    Not thread-safe: one thread submits, cancels and steps. A `tokenizer` gives the outputs their
    text and is needed for stop strings. A failure in one request ends that request, with finish
    reason "error". An exception that `step` raises concerns all requests, and the engine is dead.
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
        # drafts of a row that is nearly full reach beyond its end
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
        # the prompt that is partly computed, and its row of the caches
        self.prefilling: Sequence | None = None
        self.prefill_row = 0
        # ids of requests that end at the next step; unknown ones are ignored
        self.cancelled: set[str] = set()
        self.submitted = 0
        self.reset_counters()

    def reset_counters(self) -> None:
        self.totals = Totals(histogram=[0] * (self.draft_len + 1))
        if self.prefix is not None:
            self.prefix.stats = PrefixStats()

    def submit(self, request: GenerationRequest) -> None:
        """Checks and queues a request. Raises RequestRefused if it can never run."""
        self.check(request)
        self.enqueue(request)

    def check(self, request: GenerationRequest) -> None:
        """Raises RequestRefused for a request that can never run.

        Reads nothing that a step changes.
        """
        check_request(
            request, self.max_seq_len, self.target.spec.vocab_size, self.tokenizer is not None
        )

    def enqueue(self, request: GenerationRequest, earlier: int = 0) -> None:
        """Queues a request that passed `check`, after `earlier` requests of the same call.

        Each of these, and the request's own grammar, lets OVERTAKEN_BY later requests go first, so
        that neither keeps others waiting.
        """
        sequence = Sequence(
            request,
            draft_len=self.draft_len,
            max_seq_len=self.max_seq_len,
            eos_ids=self.eos_ids,
            tokenizer=self.tokenizer,
            seed=self.options.seed + self.submitted + 1,
        )
        has_grammar = request.grammar is not None and request.grammar.size > 0
        sequence.turn = self.submitted + (earlier + has_grammar) * OVERTAKEN_BY
        self.submitted += 1
        insort(self.waiting, sequence, key=lambda sequence: sequence.turn)

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.prefilling or self.batch.sequences)

    @torch.inference_mode()
    def step(self) -> list[Output]:
        """Computes prompt tokens within the step's budget, then one round for all decoding rows."""
        outputs: list[Output] = []
        if self.cancelled:
            outputs = self._drop_cancelled()
        prompt_tokens = self._prefill(outputs)
        if len(self.batch):
            self._round(outputs)
        self.totals.record(outputs, prompt_tokens)
        return outputs

    def _round(self, outputs: list[Output]) -> None:
        """Speculative decoding: every row advances by its accepted drafts plus one token."""
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

        # Commit: each row's last token and accepted drafts are text now. The pass changed nothing.
        self.cache.commit(accepted + 1)

        # Learn: the drafter reads the target's states of the tokens that the longest row emits.
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
        """Returns (tokens int64 [B, T], accepted int64 [B]).

        `logits` [B, T, V] are those after the last token and after each of the T-1 drafts.
        """
        batch = self.batch
        width = drafts.shape[1]
        logits = steered(batch.sequences, logits, drafts)
        counts = None  # every row offers all drafts
        if min(offered) != width:
            counts = on_device(offered, self.device)
        tokens = logits.argmax(-1)
        accepted = leading(tokens[:, :-1] == drafts, counts)
        sampling = batch.sampling
        if sampling is not None:
            rows = sampling.rows
            uniform = batch.uniform[rows][:, batch.draft_len :]
            draft_probs = batch.draft_probs
            if draft_probs is not None:
                draft_probs = draft_probs[rows, :width]
            if counts is not None:
                counts = counts[rows]
            tokens[rows], accepted[rows] = accept_sampled(
                sampling.probabilities(logits[rows]),
                drafts[rows],
                draft_probs,
                torch.cat((uniform[:, :width], uniform[:, -1:]), 1),
                draft_ids=self.drafter.draft_ids,
                counts=counts,
            )
        return tokens, accepted

    def _emit(
        self, row: int, tokens: list[int], offered: int | None, logits: Tensor, margins: Tensor
    ) -> Output:
        """Hands a row its tokens, and returns the output. An error ends the request.

        Args:
            offered: as in `Sequence.emit`.
            logits: [T, V], row j predicted token j.
            margins: [T], the experts' margin at each row of `logits`.
        """
        sequence = self.batch.sequences[row]
        try:
            output = sequence.emit(tokens, offered)
            if self.prefix is not None and output.finish_reason:
                text = sequence.request.prompt_ids + sequence.token_ids
                self.prefix.save(text[:-1], row)  # the last token was never computed
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
        """Runs the requests to their end. Raises the error of the first request that fails.

        A request begins as soon as a row of the batch is free.
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
        """Advances prompts, several in a pass. Returns how many of their tokens were computed.

        The prompts use the cache rows after the batch.
        """
        options = self.options
        budget = options.prefill_tokens
        if options.max_num_tokens is not None:
            budget = options.max_num_tokens - len(self.batch) * (1 + self.draft_len)
        unspent = budget
        while chunks := self._next_chunks(unspent):
            unspent -= sum(map(len, chunks))
            self._prefill_pass(chunks, outputs)
        return budget - unspent

    def _next_chunks(self, budget: int) -> list[Chunk]:
        """Returns the chunks of the next pass. [] if nothing waits or nothing fits.

        The prompt that was begun goes first, then waiting prompts while there is room. Only the
        last chunk may end within its prompt. `budget`: tokens that are left of the step.
        """
        room = min(budget, self.options.prefill_tokens)
        chunks: list[Chunk] = []
        if self.prefilling is not None:
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

    def _next_prompt(self, row: int, beside: list[Chunk]) -> Sequence | None:
        """Takes the next prompt from the queue and loads its known prefix into `row`.

        None if no prompt may begin now. A prompt waits if a chunk `beside` it computes more of its
        prefix.
        """
        if not self.waiting or row >= self.max_batch_size:
            return None
        request = self.waiting[0].request
        prompt = request.prompt_ids
        prefix = None if request.prompt_logprobs else self.prefix
        if prefix is not None:
            for chunk in beside:
                if prefix.worth_waiting(prompt, chunk.prompt, chunk.sequence.cached_tokens):
                    return None
        sequence = self.waiting.popleft()
        if prefix is not None:
            cached_tokens = prefix.load(prompt, row)
            sequence.prefilled = cached_tokens
            sequence.cached_tokens = cached_tokens
        return sequence

    def _prefill_pass(self, chunks: list[Chunk], outputs: list[Output]) -> None:
        """Runs one pass over the chunks. If it fails, runs each alone: only faulty ones fail."""
        try:
            aux, following = self._compute(chunks)
            self.drafter.prompts(aux, following, [chunk.piece for chunk in chunks])
            self.cache.commit([len(chunk) for chunk in chunks])
        except Exception as error:
            if len(chunks) == 1:
                outputs.append(chunks[0].sequence.fail(error))
            else:
                for chunk in chunks:
                    self._prefill_pass([chunk], outputs)
            return
        for chunk in chunks:
            outputs += self._advance_prompt(chunk)

    def _compute(self, chunks: list[Chunk]) -> tuple[Tensor | None, Tensor]:
        """Fills the cache's rows of the chunks.

        Returns the captured states [1, T, n_aux*H] and the token that follows each position, int64
        [1, T]. The chunks follow each other in a single row of tokens, without padding. Every
        product takes all of them at once, so that a weight is read once. Only attention goes from
        text to text.
        """
        tokens: list[int] = []
        scored: list[int] = []  # positions in `tokens` whose logits are needed
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
        first_tokens = iter(self._first_tokens([chunk for chunk in chunks if chunk.done]))
        shifted: list[int] = []
        for chunk in chunks:
            chunk.following = next(first_tokens) if chunk.done else chunk.prompt[chunk.piece.end]
            shifted += chunk.prompt[chunk.piece.begin + 1 : chunk.piece.end]
            shifted.append(chunk.following)
        return out.aux, on_device([shifted], self.device)

    def _advance_prompt(self, chunk: Chunk) -> list[Output]:
        """Takes the chunk's result. Returns [] inside a prompt.

        At its end: the output with the first token of a new row. If the request fails: its error.
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
        """Chooses the token after each prompt that is computed to its end."""
        if not done:
            return []
        sequences = [chunk.sequence for chunk in done]
        logits = torch.stack([chunk.logits for chunk in done])
        logits = steered(sequences, logits.unsqueeze(1), logits.new_empty(len(sequences), 0))[:, 0]
        tokens = logits.argmax(-1)
        sampling = BatchSampling.of(sequences, self.device)
        if sampling is not None:
            numbers = torch.cat([sequence.uniform(1) for sequence in sequences if sequence.sampled])
            probabilities = sampling.probabilities(logits[sampling.rows])
            tokens[sampling.rows] = draw(probabilities, numbers.to(self.device, non_blocking=True))
        emitted = on_host(tokens.unsqueeze(1), torch.zeros_like(tokens))
        return [token for (token,) in emitted]

    def _remove(self, row: int) -> None:
        """Takes a row out of the batch."""
        moved = self.batch.remove(row)
        if moved != row:
            self._move(moved, row, self.batch.sequences[row].length)

    def _move(self, source: int, target: int, length: int) -> None:
        if source == target:
            return
        self.cache.move(source, target, length)
        self.drafter.move(source, target, length)

    def _drop_cancelled(self) -> list[Output]:
        """Ends the cancelled requests. Returns their last outputs."""
        ids = self.cancelled
        self.cancelled = set()
        dropped = [sequence for sequence in self.waiting if sequence.id in ids]
        self.waiting = deque(sequence for sequence in self.waiting if sequence.id not in ids)
        if self.prefilling and self.prefilling.id in ids:
            dropped.append(self.prefilling)
            self.prefilling = None
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
