"""The reference server with one fault in its engine: python faulty_engine.py FAULT serve ..."""

import sys
from typing import Any

import torch

from trtspec.cli.app import main
from trtspec.engine import engine, sampling, sequence


def temperature_ignored() -> None:
    sequence.COLDEST = float("inf")  # type: ignore[misc]


def drafts_kept() -> None:
    """Drafts are kept where the target gives them more than 0.1."""
    exact = sampling.accept_sampled

    def kept(
        target: torch.Tensor, drafts: torch.Tensor, probs: Any, uniform: torch.Tensor, **more: Any
    ) -> Any:
        width = drafts.shape[1]
        p = target[:, :width].gather(-1, drafts.unsqueeze(-1)).squeeze(-1)
        uniform = torch.cat((torch.where(p > 0.1, 0.0, uniform[:, :width]), uniform[:, width:]), 1)
        return exact(target, drafts, probs, uniform, **more)

    engine.accept_sampled = kept  # type: ignore[attr-defined]


def one_draft_too_many() -> None:
    exact = engine.Engine._accept

    def more(
        self: engine.Engine, logits: torch.Tensor, drafts: torch.Tensor, offered: list[int]
    ) -> Any:
        tokens, accepted = exact(self, logits, drafts, offered)
        # JSON stays whole, so that one row of the gate is at fault
        free = torch.tensor([sequence.steering is None for sequence in self.batch.sequences])
        return tokens, torch.where(
            free, torch.minimum(accepted + 1, torch.tensor(offered)), accepted
        )

    engine.Engine._accept = more  # type: ignore[method-assign]


if __name__ == "__main__":
    if fault := sys.argv.pop(1):
        globals()[fault]()
    main()
