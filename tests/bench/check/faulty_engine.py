"""The reference server with one fault in its engine: python faulty_engine.py FAULT serve ..."""

from __future__ import annotations

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

    def kept(target: torch.Tensor, drafts: torch.Tensor, probs: Any, uniform: torch.Tensor, **more: Any) -> Any:
        width = drafts.shape[1]
        p = target[:, :width].gather(-1, drafts.unsqueeze(-1)).squeeze(-1)
        uniform = torch.cat((torch.where(p > 0.1, 0.0, uniform[:, :width]), uniform[:, width:]), 1)
        return exact(target, drafts, probs, uniform, **more)

    engine.accept_sampled = kept  # type: ignore[attr-defined]


def wrong_residual() -> None:
    """Behind a rejected draft the token is drawn from p in place of max(p - q, 0)."""
    sampling.residual = lambda p, q: p


def one_draft_too_many() -> None:
    exact = sampling.accept_greedy

    def more(best: torch.Tensor, drafts: torch.Tensor, counts: torch.Tensor | None = None) -> torch.Tensor:
        most = torch.full((len(drafts),), drafts.shape[1]) if counts is None else counts
        return torch.minimum(exact(best, drafts, counts) + 1, most)

    engine.accept_greedy = more  # type: ignore[attr-defined]


if __name__ == "__main__":
    if fault := sys.argv.pop(1):
        globals()[fault]()
    main()
