"""A target that says a text again: the engine drafts against captured states where the target itself does not fit."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from trtspec.engine.engine import Engine, EngineOptions
from trtspec.engine.request import GenerationRequest
from trtspec.engine.sequence import Stats
from trtspec.models.cache import LatentCache
from trtspec.models.captured import CapturedText
from trtspec.models.eagle3 import Eagle3Head
from trtspec.models.kimi import KimiModel, TargetOutput
from trtspec.models.layers import TextPiece

BATCH = 8  # texts at a time


class ReplayTarget(KimiModel):
    """Answers each prompt with its text, whatever is drafted; the states are the captured ones.

    A cache row holds the number of the text that lives in it, so that it moves with the row. Prompts arrive in the
    order of `texts`.
    """

    def __init__(self, ends: KimiModel, layers: tuple[int, ...], texts: list[CapturedText]) -> None:
        """`ends` lends its embedding; it may lack its decoder layers."""
        with torch.device("meta"):
            super().__init__(ends.spec, layers=0)
        self.embed, self.lm_head, self.norm = ends.embed, nn.Identity(), nn.Identity()  # type: ignore[assignment]
        self.texts, self.captured = texts, layers
        self._next = 0

    def new_cache(self, rows: int, max_len: int) -> LatentCache:
        """One number for each row."""
        return LatentCache(1, rows, max_len, 1, torch.int64, self.embed.weight.device)

    def forward(
        self,
        tokens: Tensor,
        start: Tensor | None = None,
        cache: LatentCache | None = None,
        row: int = 0,
        aux_layers: tuple[int, ...] = (),
        last_only: bool = False,
        length: int | None = None,
    ) -> TargetOutput:
        """As KimiModel's; after each position the next token of the text is certain, whatever `tokens` are.

        The states behind a rejected draft are not its own; nothing reads them.
        """
        assert start is not None and cache is not None
        weight, states, following = self.embed.weight, [], []
        for index in range(len(tokens)):
            text = self.texts[int(cache.layer(0)[row + index, 0, 0])]
            end = len(text.tokens) - 1
            places = (int(start[index]) + torch.arange(tokens.shape[1])).clamp(max=end)
            states.append(text.aux(self.captured)[places].to(weight.device, weight.dtype))
            following.append(text.tokens[(places + 1).clamp(max=end)])
        said = torch.stack(following).to(weight.device)[:, -1 if last_only else 0 :]
        certain = torch.zeros(*said.shape, self.spec.vocab_size, device=weight.device).scatter_(2, said[..., None], 1.0)
        aux = torch.stack(states)
        return TargetOutput(certain, aux, aux)

    def prompts(
        self,
        tokens: Tensor,
        pieces: Sequence[TextPiece],
        cache: LatentCache,
        aux_layers: tuple[int, ...],
        kept: Sequence[int],
    ) -> TargetOutput:
        """As KimiModel's; each prompt that begins is the next text's."""
        logits, states, end = [], [], 0
        for piece in pieces:
            if piece.begin == 0:
                cache.layer(0)[piece.row, 0] = self._next
                self._next += 1
            begin, end = end, end + piece.end - piece.begin
            start = torch.tensor([piece.begin], device=tokens.device)
            out = self.forward(tokens[:, begin:end], start, cache, piece.row)
            logits.append(out.logits)
            states.append(out.hidden)
        aux = torch.cat(states, 1)
        return TargetOutput(torch.cat(logits, 1)[:, kept], aux[:, kept], aux)


def drafted_on(texts: list[CapturedText], ends: KimiModel, head: Eagle3Head, draft_len: int) -> list[Stats]:
    """What the head's drafts are worth on each text: a draft stands where the text goes on with it."""
    layers = tuple(head.spec.aux_layers or ends.spec.default_aux_layers)
    longest = max(len(text.tokens) for text in texts)
    options = EngineOptions("eagle3", draft_len, min(BATCH, len(texts)), longest + 1)
    engine = Engine(ReplayTarget(ends, layers, texts), head, options)
    requests = []
    for number, text in enumerate(texts):
        prompt, count = text.tokens[: text.begin].tolist(), len(text.tokens) - text.begin
        requests.append(GenerationRequest(str(number), prompt, count, ignore_eos=True))
    done = engine.generate(requests)
    return [done[request.id].stats for request in requests]
