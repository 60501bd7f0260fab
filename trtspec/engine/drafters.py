"""Where drafts come from: an Eagle3 head, or nowhere."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from torch import Tensor

from trtspec.engine.batch import DecodeBatch
from trtspec.engine.sampling import draw, on_device
from trtspec.models.state import State, TextPiece

if TYPE_CHECKING:
    from trtspec.models.eagle3 import Eagle3Head
    from trtspec.models.k2 import KimiModel

DraftSampling = Literal["argmax", "probabilistic"]


class Drafter:
    """What the engine asks of a drafter, and plain decoding: no drafts, one token per round.

    The engine calls `prompts` for each pass over prompts; in each round `propose` before the verification and `learn`
    after it; and `move` when a row changes its place.
    """

    aux_layers: tuple[int, ...] = ()
    draft_ids: Tensor | None = None
    cache: State | None = None

    def prompts(self, aux: Tensor | None, tokens: Tensor, pieces: list[TextPiece]) -> None:
        """Takes the target's states [1, N, n_aux*H] of pieces of prompts with the tokens [1, N] that follow each."""

    def propose(self, batch: DecodeBatch) -> list[int]:
        """Writes up to `batch.draft_len` drafts of each row behind its last token; returns how many."""
        return [0] * len(batch)

    def learn(
        self, batch: DecodeBatch, aux: Tensor | None, tokens: Tensor, accepted: Tensor
    ) -> None:
        """Takes what a verification says of the batch's rows, before they advance: the captured states
        [B, T, n_aux*H] of the block's tokens, the tokens int64 [B, T] that follow each, and accepted drafts int64 [B].
        """

    def move(self, source: int, target: int, length: int) -> None:
        """Copies what is kept of a row of `length` tokens to another row."""


class Eagle3Drafter(Drafter):
    """Chain drafting with an Eagle3 head and its own KV cache.

    Row t of the head pairs the target's state at position t with the token at t+1. Rows of true states are written
    for the prompt and after each verification; the rows a chain adds beyond them are overwritten by the next ones.

    The drafts of a sampled request are the head's likeliest tokens (`argmax`, as vLLM and TensorRT-LLM draft): the
    target's probability p accepts them. Or they are drawn from the head's distribution q (`probabilistic`): min(1, p/q)
    accepts them. Both leave the target's distribution unchanged.
    """

    def __init__(
        self,
        head: Eagle3Head,
        target: KimiModel,
        rows: int,
        max_len: int,
        draft_sampling: DraftSampling,
    ) -> None:
        self.head = head
        self.draws = draft_sampling == "probabilistic"
        self.aux_layers = tuple(head.spec.aux_layers or target.spec.default_aux_layers)
        self.draft_ids = head.target_ids
        self.cache: State = head.new_cache(rows, max_len)
        weight, hidden = head.fc.weight, head.spec.hidden_size
        self.feedback = weight.new_zeros(
            rows, 1, hidden
        )  # of each row's last true state: the first step's input,
        self.normed = weight.new_zeros(rows, hidden)  # and what its first draft is read from

    def prompts(self, aux: Tensor | None, tokens: Tensor, pieces: list[TextPiece]) -> None:
        assert aux is not None
        feedback, normed = self.head.prompts(self.head.fuse(aux), tokens, pieces, self.cache)
        rows = on_device([piece.row for piece in pieces], tokens.device)
        self.feedback[rows, 0], self.normed[rows] = feedback[0], normed[0]

    def propose(self, batch: DecodeBatch) -> list[int]:
        """A chain from the last true state: each step's output is the next one's input.

        A step's own row has the position of the token before its draft.
        """
        rows, length = len(batch), batch.draft_len
        x, normed = self.feedback[:rows], self.normed[:rows]
        start, drafts = batch.start[:rows], batch.block[:rows, 1:]
        for step in range(length):
            if step:
                x, steps = self.head(
                    x,
                    drafts[:, step - 1 : step],
                    start + (step - 1),
                    self.cache,
                    length=batch.reach + step - 1,
                )
                normed = steps[:, 0]
            drafts[:, step] = self._choose(batch, step, self.head.logits(normed))
        return [length] * rows

    def learn(
        self, batch: DecodeBatch, aux: Tensor | None, tokens: Tensor, accepted: Tensor
    ) -> None:
        """Runs the head over the true states."""
        rows, end = len(batch), batch.reach + tokens.shape[1] - 1
        assert aux is not None
        feedback, normed = self.head(
            self.head.fuse(aux), tokens, batch.start[:rows], self.cache, length=end, at=accepted
        )
        self.feedback[:rows], self.normed[:rows] = feedback, normed[:, 0]

    def move(self, source: int, target: int, length: int) -> None:
        self.cache.move(source, target, length)
        for state in (self.feedback, self.normed):
            state[target] = state[source]

    def _choose(self, batch: DecodeBatch, step: int, logits: Tensor) -> Tensor:
        """Draft `step` of each row in target ids, from logits [B, Vd]: the likeliest, or drawn where the row draws."""
        ids, sampling = logits.argmax(-1), batch.sampling
        if sampling is not None and self.draws:
            probs = sampling.probabilities(logits[sampling.rows])
            ids[sampling.rows] = draw(probs, batch.uniform[sampling.rows, step])
            batch.store_draft_probs(step, sampling.rows, probs)
        return self.head.to_target_ids(ids)
