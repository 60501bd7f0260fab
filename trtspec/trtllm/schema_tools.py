"""For those who add a version: `python -m trtspec.trtllm.schema_tools diff A B | from-installed`.

A and B are lines (1.4), versions (1.3.0rc20) or files that `from-installed` wrote. docs/adding-a-version.md says how
the two fit together.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from trtspec.errors import MissingDependency, TrtspecError, UsageError
from trtspec.report import write_atomic
from trtspec.trtllm.schema import LINES, Entries, line_of, merged, newest_known

Entry = dict[str, Any]
ORDER = (
    "flags", "type", "min", "max", "above", "below", "not_empty", "allowed", "choices", "case_insensitive", "strict",
    "default", "required", "is_flag", "multiple", "variants", "status", "key", "open", "since", "note",
)  # fmt: skip
# what the engine's classes do not tell: written by hand, so a difference is no change of the engine
BY_HAND = ("case_insensitive", "strict", "key", "open", "since", "note")
COMPARED = tuple(name for name in ORDER if name not in BY_HAND)
HEADER = """\
line: "{line}"
label: "{label}"
{inherits}versions: {{from: {version}, {begins}seen: {version}, newest: {version}}}
sources:
  - "the classes of tensorrt_llm {version}, read where it is installed"
"""


def load(name: str) -> Entries:
    """(fields, removed, options) of a line, a version or a file; raises UsageError for anything else."""
    if Path(name).is_file():
        return merged(yaml.safe_load(Path(name).read_text(encoding="utf-8")))
    line = name if name in LINES else line_of(name)
    return merged({"inherits": line, "fields": {}})


def differences(old: Entries, new: Entries) -> Iterator[str]:
    """One line each: + added, - gone, ~ changed attributes; fields first, then options."""
    for title, before, after in (("", old[0], new[0]), ("--", old[2], new[2])):
        for path in sorted({*before, *after}):
            if path not in before:
                yield f"+ {title}{path}: {flow(after[path])}"
            elif path not in after:
                renamed = new[1].get(path, {}).get("renamed_to")
                yield f"- {title}{path}" + (f" (now {renamed})" if renamed else "")
            else:
                changed = changes(before[path], after[path])
                if changed:
                    listed = ", ".join(
                        f"{key} {before[path].get(key)!r} -> {value!r}" for key, value in changed.items()
                    )
                    yield f"~ {title}{path}: {listed}"


def changes(before: Entry, after: Entry) -> Entry:
    """The attributes of `after` that differ; the order of listed values and of a union's members does not count."""
    return {key: after.get(key) for key in COMPARED if _plain(before.get(key)) != _plain(after.get(key))}


def _plain(value: Any) -> Any:
    if isinstance(value, str) and "|" in value:
        return sorted(value.split("|"))
    if isinstance(value, (list, tuple)):
        return sorted(map(str, value))
    return None if value in (False, "stable") else value


def installed_entries(package: str) -> tuple[Entries, str]:
    """What the installed engine's classes and options say, and its version."""
    from trtspec.trtllm.schema_reader import fields_of, options_of

    try:
        engine = importlib.import_module(package)
        module = importlib.import_module(f"{package}.llmapi.llm_args")
    except ImportError as error:
        remedy = "run this inside NVIDIA's TensorRT-LLM image"
        raise MissingDependency(f"{package} cannot be imported here ({error})", remedy) from None
    kind = getattr(module, "TorchLlmArgs", None) or module.LlmArgs
    serve = importlib.import_module(f"{package}.commands.serve").main.commands["serve"]
    return (fields_of(kind), {}, options_of(serve), {}), engine.__version__


def as_file(entries: Entries, version: str, line: str, inherits: str | None) -> str:
    """The schema file of `entries`: whole, or only what differs from the line that it inherits."""
    fields, removed, options, gone = entries[0], {}, entries[2], []
    if inherits is not None:
        old = load(inherits)
        since = {"after": inherits, "by": line, "evidence": "verified"}
        removed = {path: {"last": inherits, "evidence": "verified"} for path in old[0] if path not in fields}
        gone = [name for name in old[2] if name not in options]
        fields, options = (dict(_changed(part, was, since)) for part, was in ((fields, old[0]), (options, old[2])))
    text = HEADER.format(
        line=line, label=f"{line}, read from {version}", version=version,
        inherits=f'inherits: "{inherits}"\n' if inherits else "",
        begins=f"begins: {{after: {newest_known()}, by: {version}}}, " if inherits else "",
    )  # fmt: skip
    for title, part in (("fields", fields), ("removed", removed), ("options", options)):
        text += f"{title}:{'' if part else ' {}'}\n" + "".join(f"  {key}: {flow(part[key])}\n" for key in sorted(part))
    return text + (f"removed_options: {flow(gone)}\n" if gone else "")


def _changed(part: dict[str, Entry], was: dict[str, Entry], since: Entry) -> Iterator[tuple[str, Entry]]:
    """New entries whole, others by what the classes say anew; limits and listed values that stand in validators, and
    what click does not tell, stay as they were."""
    for path, entry in part.items():
        if path not in was:
            yield path, {**entry, "since": since}
            continue
        changed = {key: value for key, value in changes(was[path], entry).items() if key in entry}
        if was[path].get("variants") and "variants" not in entry:
            changed["variants"] = []
        if was[path].get("required") and "required" not in entry:
            changed["required"] = False
        if changed:
            yield path, changed


def flow(value: Any) -> str:
    """One line of YAML, attributes in the order of the schema files."""
    if isinstance(value, dict):
        value = {key: value[key] for key in sorted(value, key=lambda key: ORDER.index(key) if key in ORDER else 99)}
    text = yaml.safe_dump(value, default_flow_style=True, width=10**6, allow_unicode=True, sort_keys=False)
    return text.removesuffix("\n").removesuffix("\n...")


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m trtspec.trtllm.schema_tools", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    diff = commands.add_parser("diff", help="what B has other than A")
    diff.add_argument("a")
    diff.add_argument("b")
    read = commands.add_parser("from-installed", help="write the schema of the engine that is installed here")
    read.add_argument("--line", help="name of the new line (default: major.minor of the version)")
    read.add_argument("--inherits", choices=LINES, help="write only what differs from this line")
    read.add_argument("--package", default="tensorrt_llm")
    read.add_argument("-o", "--output", type=Path, help="file to write (default: standard output)")
    given = parser.parse_args(words)
    try:
        return _diff(given.a, given.b) if given.command == "diff" else _read(given)
    except TrtspecError as error:
        sys.stderr.write(f"{error.message}\n-> {error.remedy}\n")
        return error.exit_code


def _diff(a: str, b: str) -> int:
    for name in (a, b):
        if name.endswith((".yaml", ".yml")) and not Path(name).is_file():
            raise UsageError(f"{name} is not a file here", "write it with from-installed -o")
    sys.stdout.writelines(f"{line}\n" for line in differences(load(a), load(b)))
    return 0


def _read(given: argparse.Namespace) -> int:
    entries, version = installed_entries(given.package)
    line = given.line or ".".join(version.split(".")[:2])
    text = as_file(entries, version, line, given.inherits)
    if given.output is None:
        sys.stdout.write(text)
    else:
        write_atomic(given.output, text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
