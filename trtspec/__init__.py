"""The Python API: the verbs of the command line as functions.

Each is imported when it is first used, so that `import trtspec` loads nothing else; none prints, none exits. They
return typed records and raise `trtspec.errors.TrtspecError`. See docs/python-api.md.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trtspec.api import build_config, convert, inspect, lint, plan, quantize
    from trtspec.engine.engine import Engine
    from trtspec.errors import TrtspecError

__all__ = ["Engine", "TrtspecError", "build_config", "convert", "inspect", "lint", "plan", "quantize"]
PLACES = {"Engine": "trtspec.engine.engine", "TrtspecError": "trtspec.errors"}  # of what is not in trtspec.api


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'trtspec' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(PLACES.get(name, "trtspec.api")), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
