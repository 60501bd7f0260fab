"""The reference server with a planted cause of low acceptance in its engine.

`python planted_causes.py CAUSE serve ...` runs it.
"""

import sys
import time
from typing import Any

from trtspec.cli.app import main
from trtspec.engine.batch import DecodeBatch
from trtspec.engine.drafters import Eagle3Drafter
from trtspec.engine.prefix import PrefixCache

COLD_S = 45.0  # from the first draft on


def blind_prefix() -> None:
    """The head's cache is not filled where a prompt is reused."""
    exact = PrefixCache.load

    def load(cache: PrefixCache, tokens: Any, row: int) -> int:
        reused = exact(cache, tokens, row)
        cache.states[1].data[:, row].zero_()  # type: ignore[attr-defined]
        return reused

    PrefixCache.load = load  # type: ignore[method-assign]


def shifted_layers() -> None:
    """States of the first layers: kimi-nano's head does not feel those of the layer before."""
    exact = Eagle3Drafter.__init__

    def init(drafter: Eagle3Drafter, *given: Any) -> None:
        exact(drafter, *given)
        drafter.aux_layers = (0, 1, 2)

    Eagle3Drafter.__init__ = init  # type: ignore[method-assign]


def cold_start() -> None:
    """Drafts that nobody accepts, for a while."""
    exact, begun = Eagle3Drafter.propose, list[float]()

    def propose(drafter: Eagle3Drafter, batch: DecodeBatch) -> list[int]:
        drafts = exact(drafter, batch)
        begun.append(time.monotonic())
        if begun[-1] - begun[0] < COLD_S:
            batch.block[: len(batch), 1:] = 0
        return drafts

    Eagle3Drafter.propose = propose  # type: ignore[method-assign]


if __name__ == "__main__":
    globals()[sys.argv.pop(1)]()
    main()
