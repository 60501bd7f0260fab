"""The rules that schema files state as rows (`trtspec.trtllm.schema.Rule`), applied to a file."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

from trtspec.trtllm.deployment import Deployment, Finding, Fix
from trtspec.trtllm.document import Document, add_key, delete_key, set_value
from trtspec.trtllm.schema import UNKNOWN, Rule


def check_rows(document: Document, deployment: Deployment) -> Iterator[Finding]:
    schema = deployment.schema
    for rule in schema.rules.values():
        written = [path for path in rule.when if document.has(path) or path in deployment.argv]
        if any(schema.current(path) not in schema.fields for path in written):
            continue  # the key itself is refused
        if not all(_holds(document, deployment, path, wanted) for path, wanted in rule.when.items()):
            continue
        if rule.unless and all(_holds(document, deployment, path, wanted) for path, wanted in rule.unless.items()):
            continue
        key, message = rule.at or next(iter(rule.when)), f"{rule.message} ({rule.source})"
        fix = _fix(document, rule)
        at = document.line(key)
        yield Finding(rule.code, rule.severity, key, message, rule.remedy, at, fix, beside=tuple(written))


def _fix(document: Document, rule: Rule) -> Fix | None:
    if document.has(rule.fix.get("drop", "")):
        return partial(delete_key, path=rule.fix["drop"])
    for path, value in rule.fix.get("write", {}).items():
        return partial(set_value if document.has(path) else add_key, path=path, value=value)
    return None


def _holds(document: Document, deployment: Deployment, path: str, wanted: Any) -> bool:
    value = deployment.setting(document, path, _default(document, deployment, path))
    if wanted in ("given", "filled", "empty"):
        written = document.has(path) or path in deployment.argv
        return written and (wanted == "given" or (value is None) == (wanted == "empty"))
    if wanted in ("set", "unset"):
        return (value not in (None, False, 0, "")) == (wanted == "set")  # an empty mapping is an object
    if isinstance(wanted, dict):
        (word, other), *_ = wanted.items()
        if word in ("above", "below"):
            return isinstance(value, (int, float)) and (value > other if word == "above" else value < other)
        return not any(_same(value, item) for item in (other if word == "outside" else [other]))
    return any(_same(value, item) for item in (wanted if isinstance(wanted, list) else [wanted]))


def _default(document: Document, deployment: Deployment, path: str) -> Any:
    """What the engine takes where the file says nothing; an object that is not written has no settings."""
    parent, field = path.rpartition(".")[0], deployment.schema.fields.get(deployment.schema.current(path))
    if field is None or field.default is UNKNOWN or field.is_object or (parent and not document.has(parent)):
        return None
    return field.default


def _same(value: Any, wanted: Any) -> bool:
    if isinstance(wanted, bool):
        return value is wanted
    if isinstance(value, str) and isinstance(wanted, str):
        return value.lower() == wanted.lower()
    return value == wanted
