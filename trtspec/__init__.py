"""The Python API: the verbs of the command line as functions.

Each is imported when it is first used, so that `import trtspec` loads nothing else. A verb has the
options of its command's record, prints nothing and never exits. It returns a `Result` with the
problems of its input, and raises `trtspec.errors.TrtspecError` if it fails. The signatures for
editors and mypy are in __init__.pyi, which tools/generate.py writes. See docs/python-api.md.
"""

from __future__ import annotations

from pkgutil import resolve_name
from typing import Any

COMMANDS = ["build_config", "convert", "doctor", "explain", "inspect", "plan", "quantize", "train"]
OTHERS = {
    "Engine": "trtspec.engine.engine:Engine",
    "Result": "trtspec.report:Result",
    "TrtspecError": "trtspec.errors:TrtspecError",
    "lint": "trtspec.cli.lint:lint_configuration",
}
__all__ = ["__version__", *OTHERS, *COMMANDS]  # noqa: PLE0604  # names, all of them text


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return resolve_name("importlib.metadata:version")("trtspec")
    if name in COMMANDS:
        return resolve_name("trtspec.records:verb")(resolve_name(f"trtspec.cli.{name}:{name}"))
    if name in OTHERS:
        return resolve_name(OTHERS[name])
    raise AttributeError(f"module 'trtspec' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
