"""The verbs of the Python API: the commands that return a `Result`, with the options of their records.

None prints, none exits. Problems of what was looked at are in the result; a TrtspecError is raised for what could not
be done. The signatures for editors and mypy are in trtspec/__init__.pyi, which tools/generate.py writes.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from trtspec.errors import UsageError
from trtspec.records import verb
from trtspec.report import Result

VERBS = ("build_config", "convert", "doctor", "explain", "inspect", "plan", "quantize")


def __getattr__(name: str) -> Any:
    if name not in VERBS:
        raise AttributeError(f"module 'trtspec.api' has no attribute {name!r}")
    return verb(getattr(import_module(f"trtspec.cli.{name}"), name))


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
    from trtspec.cli.lint import LintOptions, judge_part
    from trtspec.trtllm.carriers import Carried

    name, document = _document(config)
    pair = [None if one is None else str(one) for one in (target, head)]
    asked = LintOptions(files=(name,), trtllm_version=trtllm_version, target=pair[0], head=pair[1], gpu=gpu)
    judged = judge_part(document, Carried(""), list(options) or None, asked)
    values = {"version": judged.version, "version_reason": judged.reason}
    return Result(values, [finding.problem(name) for finding in judged.findings])


def _document(config: Mapping[str, Any] | str | Path) -> tuple[str, Any]:
    from trtspec.trtllm.document import Document

    if isinstance(config, Mapping):
        import yaml

        try:
            text = yaml.safe_dump(dict(config), sort_keys=False)
        except yaml.YAMLError as error:
            raise UsageError(f"the configuration cannot be written as YAML: {error}", "use plain values") from None
        return "(dict)", Document.parse(text)
    if isinstance(config, str) and ("\n" in config or ": " in config):
        return "(text)", Document.parse(config)
    return str(config), Document.read(str(config))
