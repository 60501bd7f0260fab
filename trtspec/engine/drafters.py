"""Where drafts come from: an Eagle3 head, transformers' prompt lookup, or nowhere."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, Protocol

import torch
from torch import Tensor

from trtspec.engine.batch import BatchSampling, DecodeBatch
from trtspec.engine.sampling import draw, probabilities
from trtspec.engine.sequence import Sequence
from trtspec.errors import MissingDependency

if TYPE_CHECKING:
    from trtspec.models.eagle3 import Eagle3Head
    from trtspec.models.kimi import KimiModel

DrafterName = Literal["eagle3", "prompt-lookup"]
DraftSampling = Literal["argmax", "probabilistic"]


class Drafter(Protocol):
    """What the engine asks of a drafter.

    The engine calls `prompt` for each prefilled chunk, `begin` when a sequence joins the batch, `follow` after each
    verification (device state), `propose` before each round (host state), and `move` when a row changes its place.
    """

    aux_layers: tuple[int, ...]
    draft_ids: Tensor | None

    def prompt(self, aux: Tensor | None, tokens: Tensor, start: Tensor, row: int) -> None: ...
    def begin(self, batch: DecodeBatch, row: int) -> None: ...
    def follow(
        self, batch: DecodeBatch, aux: Tensor | None, tokens: Tensor, start: Tensor, accepted: Tensor
    ) -> None: ...
    def propose(self, batch: DecodeBatch) -> None: ...
    def move(self, source: int, target: int) -> None: ...


class NoDrafter:
    """Plain decoding: one token per round."""

    aux_layers: tuple[int, ...] = ()
    draft_ids: Tensor | None = None

    def prompt(self, aux: Tensor | None, tokens: Tensor, start: Tensor, row: int) -> None:
        pass

    def begin(self, batch: DecodeBatch, row: int) -> None:
        pass

    def follow(self, batch: DecodeBatch, aux: Tensor | None, tokens: Tensor, start: Tensor, accepted: Tensor) -> None:
        pass

    def propose(self, batch: DecodeBatch) -> None:
        pass

    def move(self, source: int, target: int) -> None:
        pass


class Eagle3Drafter(NoDrafter):
    """Chain drafting with an Eagle3 head and its own KV cache.

    Row t of the head pairs the target's state at position t with the token at t+1. Rows of true states are written
    for the prompt and after each verification; the rows a chain adds beyond them are overwritten by the next ones.

    The drafts of a sampled request are the head's likeliest tokens (`argmax`, as vLLM and TensorRT-LLM draft), accepted
    with the probability that the target gives them, or drawn from the head's distribution q (`probabilistic`) and
    accepted with min(1, p/q). Both leave the target's distribution unchanged.
    """

    def __init__(
        self, head: Eagle3Head, target: KimiModel, rows: int, max_len: int, draft_sampling: DraftSampling
    ) -> None:
        self.head = head
        self.draws = draft_sampling == "probabilistic"
        self.aux_layers = tuple(head.spec.aux_layers or target.spec.default_aux_layers)
        self.draft_ids = head.draft_to_target
        self.cache = head.new_cache(rows, max_len)
        self._last: tuple[Tensor, Tensor] | None = None

    def prompt(self, aux: Tensor | None, tokens: Tensor, start: Tensor, row: int) -> None:
        assert aux is not None
        feedback, normed = self.head(self.head.fuse(aux), tokens, start, self.cache, row)
        self._last = feedback[:, -1:], normed[:, -1]

    def begin(self, batch: DecodeBatch, row: int) -> None:
        assert self._last is not None
        sampling = batch.sampling.of_row(row) if self.draws and batch.sampling is not None else None
        self._chain(batch, *self._last, row, 1, sampling)

    def follow(self, batch: DecodeBatch, aux: Tensor | None, tokens: Tensor, start: Tensor, accepted: Tensor) -> None:
        assert aux is not None
        known = int(accepted.max()) + 1  # states after a rejected draft belong to no text
        feedback, normed = self.head(self.head.fuse(aux[:, :known]), tokens[:, :known], start, self.cache)
        rows = batch.row_index[: len(accepted)]
        last = feedback[rows, accepted].unsqueeze(1), normed[rows, accepted]
        self._chain(batch, *last, 0, len(accepted), batch.sampling if self.draws else None)

    def move(self, source: int, target: int) -> None:
        self.cache.move(source, target)

    def _chain(
        self, batch: DecodeBatch, x: Tensor, normed: Tensor, row: int, count: int, sampling: BatchSampling | None
    ) -> None:
        """Writes drafts for batch rows [row, row+count); x [count, 1, H] and normed [count, H] are the last true row's.

        A draft step's own row stands at the position of the token before its draft. `sampling` holds the rows that draw
        their drafts, with the request's own parameters; the others take the likeliest token.
        """
        start, drafts = batch.start[row : row + count], batch.block[row : row + count, 1:]
        for step in range(batch.draft_len):
            if step:
                x, normed_step = self.head(x, drafts[:, step - 1 : step], start + (step - 1), self.cache, row)
                normed = normed_step[:, 0]
            logits = self.head.logits(normed)
            ids = logits.argmax(-1)
            if sampling is not None:
                here = sampling.rows - row
                probs = probabilities(logits[here], sampling.temperature, sampling.top_p, sampling.top_k)
                ids[here] = draw(probs, batch.uniform[sampling.rows, step])
                batch.store_draft_probs(step, sampling.rows, probs)
            drafts[:, step] = self.head.to_target_ids(ids)
        batch.counts[row : row + count] = batch.draft_len


class PromptLookupDrafter(NoDrafter):
    """transformers' own n-gram lookup in the text so far, row by row, with its default n-gram size of 2."""

    def __init__(self, draft_len: int) -> None:
        try:
            from transformers.generation.candidate_generator import PromptLookupCandidateGenerator
        except ImportError:
            raise MissingDependency(
                "drafter prompt-lookup is transformers' own, and transformers is not installed",
                "pip install 'trtspec[reference]'",
            ) from None
        self._lookup: Any = PromptLookupCandidateGenerator(num_output_tokens=draft_len, max_length=2**31)

    def propose(self, batch: DecodeBatch) -> None:
        for row, sequence in enumerate(batch.sequences):
            found = self._candidates(sequence)
            batch.counts[row] = len(found)
            if len(found):
                batch.block[row, 1 : 1 + len(found)] = found

    def _candidates(self, sequence: Sequence) -> Tensor:
        known = torch.tensor([sequence.request.prompt_ids + sequence.token_ids])
        candidates, _ = self._lookup.get_candidates(known)
        return candidates[0, known.shape[1] :]
