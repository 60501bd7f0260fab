"""Drafters: speculation with an Eagle3 head, and plain decoding without drafts."""

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
    """Interface of drafters. This class itself proposes no drafts, which is plain decoding.

    The engine calls `prompts` for each pass over prompts. In each round it calls `propose` before
    the verification, and `learn` after the verification. It calls `move` if a row changes its
    index.

    aux_layers: indices of the target's layers whose hidden states the drafter reads.
    draft_ids: int64 [Vd], target id of each token of the draft vocabulary. None: both vocabularies
        are the same.
    cache: state of the head. None without a head.
    """

    aux_layers: tuple[int, ...] = ()
    draft_ids: Tensor | None = None
    cache: State | None = None

    def prompts(self, aux: Tensor | None, tokens: Tensor, pieces: list[TextPiece]) -> None:
        """Reads the target's hidden states of parts of prompts.

        Args:
            aux: [1, T, n_aux*H], hidden states of all parts, concatenated. None without a head.
            tokens: int64 [1, T], token that follows each position.
            pieces: cache row, begin and end of each part.
        """

    def propose(self, batch: DecodeBatch) -> list[int]:
        """Writes up to `batch.draft_len` drafts per row to `batch.block`.

        Returns the number of drafts of each row.
        """
        return [0] * len(batch)

    def learn(
        self, batch: DecodeBatch, aux: Tensor | None, tokens: Tensor, accepted: Tensor
    ) -> None:
        """Reads the result of a verification, before the rows advance.

        Args:
            batch: the batch.
            aux: [B, T or more, n_aux*H], target's hidden states of each row's last token and
                drafts. None without a head.
            tokens: int64 [B, T], token that follows each state.
            accepted: int64 [B], number of accepted drafts of each row.
        """

    def move(self, source: int, target: int, length: int) -> None:
        """Copies the drafter's state of `length` tokens from row `source` to row `target`."""


class Eagle3Drafter(Drafter):
    """Drafts a chain of tokens with an Eagle3 head, which has a KV cache of its own.

    The head's input at position t is the target's hidden state at t and the token at t + 1. A chain
    of drafts uses the head's outputs in place of the target's states, and writes cache entries for
    them. After a verification, entries from the target's states overwrite these entries.

    With `draft_sampling` "argmax", drafts are the head's likeliest tokens, as in vLLM and
    TensorRT-LLM. In sampled requests they are accepted with the target's probability p. With
    "probabilistic", drafts of sampled requests are drawn from the head's distribution q, and
    accepted with probability min(1, p/q). Both leave the target's distribution unchanged.
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
        # The head's outputs at the last position of each row that has a target's state. `normed`
        # gives the logits of the first draft, `feedback` is the hidden input for the second draft.
        self.feedback = weight.new_zeros(rows, 1, hidden)
        self.normed = weight.new_zeros(rows, hidden)

    def prompts(self, aux: Tensor | None, tokens: Tensor, pieces: list[TextPiece]) -> None:
        """Runs the head over parts of prompts, and keeps its outputs at their last positions."""
        assert aux is not None
        feedback, normed = self.head.prompts(self.head.fuse(aux), tokens, pieces, self.cache)
        rows = on_device([piece.row for piece in pieces], tokens.device)
        self.feedback[rows, 0] = feedback[0]
        self.normed[rows] = normed[0]

    def propose(self, batch: DecodeBatch) -> list[int]:
        """Drafts a chain of tokens. The head's output of each step is the input of the next."""
        rows = len(batch)
        x = self.feedback[:rows]
        normed = self.normed[:rows]
        drafts = batch.block[:rows, 1:]
        drafts[:, 0] = self._choose(batch, 0, self.head.logits(normed))
        for step in range(1, batch.draft_len):
            # Index of the draft that this step reads. It is also the distance of the head's input
            # position from the row's last token.
            before = step - 1
            start = batch.start[:rows] + before
            end = batch.reach + before
            x, states = self.head(x, drafts[:, before:step], start, self.cache, length=end)
            drafts[:, step] = self._choose(batch, step, self.head.logits(states[:, 0]))
        return [batch.draft_len] * rows

    def learn(
        self, batch: DecodeBatch, aux: Tensor | None, tokens: Tensor, accepted: Tensor
    ) -> None:
        """Runs the head over the target's states, and keeps its output at each row's last state."""
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
        """Chooses a draft of each row from the head's logits. Returns target ids, int64 [B].

        Args:
            batch: the batch, which also stores the distributions of random drafts.
            step: index of the draft in its chain.
            logits: [B, Vd], logits of the head.
        """
        ids = logits.argmax(-1)
        sampling = batch.sampling
        if sampling is not None and self.draws:
            probs = sampling.probabilities(logits[sampling.rows])
            ids[sampling.rows] = draw(probs, batch.uniform[sampling.rows, step])
            batch.store_draft_probs(step, sampling.rows, probs)
        return self.head.to_target_ids(ids)
