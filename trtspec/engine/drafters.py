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
    """The interface of a drafter, and plain decoding: no drafts, one token per round.

    The engine calls `prompts` for each pass over prompts. In each round it calls `propose` before
    the verification and `learn` after it. It calls `move` when a row of the batch moves.
    """

    aux_layers: tuple[int, ...] = ()
    draft_ids: Tensor | None = None
    cache: State | None = None

    def prompts(self, aux: Tensor | None, tokens: Tensor, pieces: list[TextPiece]) -> None:
        """Takes the target's states of pieces of prompts.

        aux: [1, T, n_aux*H].
        tokens: int64 [1, T], the token that follows each position.
        """

    def propose(self, batch: DecodeBatch) -> list[int]:
        """Writes up to `batch.draft_len` drafts of each row to `batch.block`. Returns how many."""
        return [0] * len(batch)

    def learn(
        self, batch: DecodeBatch, aux: Tensor | None, tokens: Tensor, accepted: Tensor
    ) -> None:
        """Takes the result of a verification, before the rows advance.

        aux: [B, T or more, n_aux*H], the target's states of each row's last token and its drafts.
        tokens: int64 [B, T], the token that follows each state.
        accepted: int64 [B], the accepted drafts.
        """

    def move(self, source: int, target: int, length: int) -> None:
        """Copies the memory of a row of `length` tokens to another row."""


class Eagle3Drafter(Drafter):
    """Chain drafting with an Eagle3 head and its own KV cache.

    The head's input at position t is the target's state there and the token at t + 1. Cache entries
    of true states are written for the prompt and after each verification, over the entries that a
    chain of drafts added.

    `argmax`: the drafts of a sampled request are the head's likeliest tokens, as vLLM and
    TensorRT-LLM draft. They are accepted with the target's probability p. `probabilistic`: they are
    drawn from the head's distribution q, and accepted with min(1, p/q). Both leave the target's
    distribution unchanged.
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
        weight = head.fc.weight
        hidden = head.spec.hidden_size
        # The head's outputs at each row's last true state: `feedback` is the input of the first
        # draft step, `normed` gives the logits of the first draft.
        self.feedback = weight.new_zeros(rows, 1, hidden)
        self.normed = weight.new_zeros(rows, hidden)

    def prompts(self, aux: Tensor | None, tokens: Tensor, pieces: list[TextPiece]) -> None:
        assert aux is not None
        feedback, normed = self.head.prompts(self.head.fuse(aux), tokens, pieces, self.cache)
        rows = on_device([piece.row for piece in pieces], tokens.device)
        self.feedback[rows, 0] = feedback[0]
        self.normed[rows] = normed[0]

    def propose(self, batch: DecodeBatch) -> list[int]:
        """Drafts a chain from the last true state: each step's output is the next one's input."""
        rows = len(batch)
        x = self.feedback[:rows]
        normed = self.normed[:rows]
        drafts = batch.block[:rows, 1:]
        drafts[:, 0] = self._choose(batch, 0, self.head.logits(normed))
        for step in range(1, batch.draft_len):
            # the draft that this step reads, and its distance from the row's last token
            before = step - 1
            start = batch.start[:rows] + before
            end = batch.reach + before
            x, states = self.head(x, drafts[:, before:step], start, self.cache, length=end)
            drafts[:, step] = self._choose(batch, step, self.head.logits(states[:, 0]))
        return [batch.draft_len] * rows

    def learn(
        self, batch: DecodeBatch, aux: Tensor | None, tokens: Tensor, accepted: Tensor
    ) -> None:
        """Runs the head over the true states, and keeps its output at each row's last one."""
        assert aux is not None
        rows, width = tokens.shape
        x = self.head.fuse(aux[:, :width])
        end = batch.reach + width - 1
        feedback, normed = self.head(
            x, tokens, batch.start[:rows], self.cache, length=end, at=accepted
        )
        self.feedback[:rows] = feedback
        self.normed[:rows] = normed[:, 0]

    def move(self, source: int, target: int, length: int) -> None:
        self.cache.move(source, target, length)
        for state in (self.feedback, self.normed):
            state[target] = state[source]

    def _choose(self, batch: DecodeBatch, step: int, logits: Tensor) -> Tensor:
        """Chooses draft `step` of each row from logits [B, Vd]. Returns target ids, int64 [B].

        The likeliest, or in sampled rows of a drafter that draws: a random one.
        """
        ids = logits.argmax(-1)
        sampling = batch.sampling
        if sampling is not None and self.draws:
            probs = sampling.probabilities(logits[sampling.rows])
            ids[sampling.rows] = draw(probs, batch.uniform[sampling.rows, step])
            batch.store_draft_probs(step, sampling.rows, probs)
        return self.head.to_target_ids(ids)
