"""Keys of a request that options of a command set, and that `--extra-body` may not: what is written of a request
(the figures of `bench`, the provenance of `synthesize`) names it by its options."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trtspec.errors import UsageError

# key -> what to do in place of giving it; each command adds those of its own
OWNED = {
    "model": "give --model",
    "max_tokens": "give --max-tokens",
    "max_completion_tokens": "give --max-tokens",
    "temperature": "give --temperature",
    "n": "leave it out: one answer is read of each request",
    "best_of": "leave it out: one answer is read of each request",
}


def refuse_owned(extra_body: Mapping[str, Any], owned: Mapping[str, str]) -> None:
    """Raises UsageError for the first key of `extra_body` that is in `owned`."""
    for key in extra_body:
        if key in owned:
            raise UsageError(f"--extra-body sets {key}, which is not its to set", owned[key])
