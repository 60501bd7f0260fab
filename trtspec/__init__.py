"""The Python API: the verbs of the command line as functions.

Each is imported when it is first used, so that `import trtspec` loads nothing else. A verb has the options of its
command's record, prints nothing and never exits. It returns a `Result`, with the problems of what was looked at, and
raises `trtspec.errors.TrtspecError` for what could not be done. The signatures for editors and mypy are in
__init__.pyi, which tools/generate.py writes. See docs/python-api.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trtspec.report import Result

COMMANDS = ["build_config", "convert", "doctor", "explain", "inspect", "plan", "quantize"]
PLACES = {"Engine": "trtspec.engine.engine", "TrtspecError": "trtspec.errors", "Result": "trtspec.report"}
__all__ = ["Engine", "Result", "TrtspecError", "__version__", "lint", *COMMANDS]  # noqa: PLE0604  # names, all of them text


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return import_module("importlib.metadata").version("trtspec")
    if name in COMMANDS:
        return import_module("trtspec.records").verb(getattr(import_module(f"trtspec.cli.{name}"), name))
    if name not in PLACES:
        raise AttributeError(f"module 'trtspec' has no attribute {name!r}")
    return getattr(import_module(PLACES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])


def lint(
    config: Mapping[str, Any] | str | Path,
    *,
    trtllm_version: str | None = None,
    target: str | Path | None = None,
    head: str | Path | None = None,
    gpu: str | None = None,
    options: tuple[str, ...] = (),
) -> Result:
    """Judges an engine configuration: a mapping, YAML text, or the path of a file. Text has a line break or a colon
    followed by a space; every other string is a path. `options`: of trtllm-serve, used with the file."""
    from trtspec.cli.lint import lint_configuration

    pair = [None if one is None else str(one) for one in (target, head)]
    return lint_configuration(config, options, trtllm_version=trtllm_version, target=pair[0], head=pair[1], gpu=gpu)
