"""Recognizes the engine of a configuration file by its keys."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from trtspec.launch.serve_options import ENGINE, VLLM
from trtspec.records import Mode
from trtspec.trtllm.carriers import is_engine_file
from trtspec.vllm import known_options


def engine_of(keys: Iterable[Any]) -> Mode | None:
    """Returns the mode of `trtspec serve` for a file with these top-level keys. None if unknown."""
    names = [*map(str, keys)]
    options = known_options()
    # of the two engines, only vLLM has options with dashes
    dashed = {name for name in names if "-" in name}
    if not dashed.isdisjoint(options):
        # without keys of both engines, such as tensor_parallel_size
        names = [name for name in names if name.replace("_", "-") not in options]
        if not is_engine_file(names):
            return VLLM
    if is_engine_file(names):
        return ENGINE
    return None
