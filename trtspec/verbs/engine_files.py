"""Which engine a configuration file is for, by its keys."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from trtspec.launch.serve_options import ENGINE, VLLM
from trtspec.records import Mode
from trtspec.trtllm.carriers import is_engine_file
from trtspec.vllm import is_vllm_file, known_options


def engine_of(keys: Iterable[Any]) -> Mode | None:
    """The mode of `trtspec serve` that reads a file with these keys. None if they do not tell."""
    names = [*map(str, keys)]
    if not is_vllm_file(names):
        return ENGINE if is_engine_file(names) else None
    # both engines have keys such as tensor_parallel_size
    options = known_options()
    others = [name for name in names if name.replace("_", "-") not in options]
    return ENGINE if is_engine_file(others) else VLLM
