"""The Python API: the verbs of the command line as functions.

Each is imported when it is first used, so that `import trtspec` loads nothing else; none prints, none exits. They
return a `Result` and raise `trtspec.errors.TrtspecError`. See docs/python-api.md.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

VERBS = ["build_config", "convert", "doctor", "explain", "inspect", "lint", "plan", "quantize"]
PLACES = {"Engine": "trtspec.engine.engine", "TrtspecError": "trtspec.errors", "Result": "trtspec.report"}
__all__ = ["Engine", "Result", "TrtspecError", "__version__", *VERBS]  # noqa: PLE0604  # names, all of them text


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return import_module("importlib.metadata").version("trtspec")
    if name not in __all__:
        raise AttributeError(f"module 'trtspec' has no attribute {name!r}")
    return getattr(import_module(PLACES.get(name, "trtspec.api")), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
