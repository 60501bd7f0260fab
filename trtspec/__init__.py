"""Python API: commands of the command line as functions.

A function is imported when it is first used, so `import trtspec` is fast. A function has the
options of its command, prints nothing and never exits. It returns a `Result` with the problems of
its input, and raises `trtspec.errors.TrtspecError` if it fails. The signatures for editors and mypy
are in __init__.pyi, which tools/generate.py writes. See docs/python-api.md.
"""

from __future__ import annotations

from pkgutil import resolve_name
from typing import Any

# commands whose functions become Python functions, and other public names with their definitions
COMMANDS = ["build_config", "convert", "doctor", "explain", "inspect", "plan", "quantize", "train"]
OTHERS = {
    "Engine": "trtspec.engine.engine:Engine",
    "Result": "trtspec.report:Result",
    "TrtspecError": "trtspec.errors:TrtspecError",
    "lint": "trtspec.cli.lint:lint_configuration",
}
__all__ = ["__version__", *OTHERS, *COMMANDS]  # noqa: PLE0604  # all of these are strings


def __getattr__(name: str) -> Any:
    """Imports a public name at its first use.

    Raises AttributeError if the package has no such name.
    """
    if name == "__version__":
        return resolve_name("importlib.metadata:version")("trtspec")
    if name in COMMANDS:
        return resolve_name("trtspec.records:verb")(resolve_name(f"trtspec.cli.{name}:{name}"))
    if name in OTHERS:
        return resolve_name(OTHERS[name])
    raise AttributeError(f"module 'trtspec' has no attribute {name!r}")


def __dir__() -> list[str]:
    """Returns the names for completion, including names that are not imported yet."""
    return sorted([*globals(), *__all__])
