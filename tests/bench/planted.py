"""The reference server with a defect of drafting: CAUSE PORT."""

import sys
from pathlib import Path
from typing import Any

from trtspec import data_files
from trtspec.engine import drafters, prefix
from trtspec.engine.server import ServerOptions, run

CAUSE, PORT = sys.argv[1:]
load, start = prefix.PrefixCache.load, drafters.Eagle3Drafter.__init__


def blind(self: prefix.PrefixCache, tokens: Any, row: int) -> int:
    """The head has not seen what was reused."""
    reused = load(self, tokens, row)
    self.stores[1].cache[:, row, :reused] = 0
    return reused


def shifted(self: drafters.Eagle3Drafter, *given: Any) -> None:
    """The states are those of the layers below."""
    start(self, *given)
    self.aux_layers = tuple(layer - 1 for layer in self.aux_layers)


if CAUSE == "blind prefix":
    prefix.PrefixCache.load = blind  # type: ignore[method-assign]
if CAUSE == "shifted layers":
    drafters.Eagle3Drafter.__init__ = shifted  # type: ignore[method-assign]
run(
    data_files.kimi_nano_dir(),
    Path(data_files.DATA / "kimi-nano-eagle3"),
    ServerOptions(port=int(PORT)),
)
