"""Applies the rules that are data (`trtspec.trtllm.schema.Rule`) to a file and its deployment."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from trtspec.errors import SEVERITIES, Problem, Severity
from trtspec.specs import HeadSpec, ModelSpec
from trtspec.trtllm.deployment import Deployment, Fix, method_of
from trtspec.trtllm.document import Document, add_key, delete_key, set_value
from trtspec.trtllm.rules.speculation import schedule_reaches_zero
from trtspec.trtllm.schema import UNKNOWN, Rule, Schema, releases, schema_for

# codes of releases that are too old for a pair, and other codes about its support
TOO_OLD = ("-OLD-ENGINE", "-MODEL-TOO-NEW")
SUPPORT = (*TOO_OLD, "-KNOWN-ISSUE", "-DEPRECATED")


def check_rows(document: Document, deployment: Deployment) -> Iterator[Problem]:
    """Yields a problem for each rule of the release that applies.

    A rule that is in doubt for the release is at most a warning.
    """
    schema = deployment.schema
    known = facts(document, deployment)

    def hold(conditions: Mapping[str, Any]) -> bool:
        return all(
            _holds(document, deployment, known, path, wanted) for path, wanted in conditions.items()
        )

    def written(rule: Rule) -> list[str]:
        return [path for path in rule.when if document.has(path) or path in deployment.argv]

    def applies(rule: Rule) -> bool:
        if any(schema.current(path) not in schema.fields for path in written(rule)):
            return False  # the key itself is refused
        return hold(rule.when) and not (rule.unless and hold(rule.unless))

    def problem_of(rule: Rule) -> Problem:
        key = next(iter(rule.when)) if rule.at is None else rule.at
        message = f"{rule.message} ({rule.source})"
        fix = _fix(document, rule)
        beside = tuple(written(rule))
        return Problem(rule.code, rule.severity, key, message, rule.remedy, fix, beside=beside)

    for name, states in schema.rules.items():
        problems = [problem_of(rule) for rule in states if rule is not None and applies(rule)]
        if not problems:
            continue
        problem = max(problems, key=lambda each: SEVERITIES.index(each.severity))
        if len(problems) < len(states):  # in doubt for this release
            severity: Severity = "info" if problem.severity == "info" else "warning"
            message = f"{problem.message} (changed {schema.intervals[name]})"
            problem = replace(problem, severity=severity, message=message)
        yield problem


def facts(document: Document, deployment: Deployment) -> dict[str, Any]:
    """Facts beside settings that the rules of the schema's files may ask, by name.

    A fact that is not known is absent.
    """
    target = deployment.target
    head = deployment.head
    method = method_of(document)
    known: dict[str, Any] = {}
    for name, states in deployment.schema.behaviours.items():
        if any(states):
            known[f"release.{name}"] = True
    known["command.known"] = deployment.options is not None
    known["schedule.reaches_zero"] = schedule_reaches_zero(document, deployment)
    if deployment.gpu is not None:
        known["gpu.major"] = int(deployment.gpu.partition(".")[0])
    if method is not None:
        known |= {f"method.{name}": value for name, value in vars(method).items()}
    if target is not None:
        quant = target.quant
        known["target.family"] = target.family.name
        known["target.remote_code"] = target.remote_code
        known["target.fp4"] = quant.format.is_fp4
        # attention that is not quantized
        known["target.plain_attention"] = any("self_attn" in item for item in quant.exclude)
    if head is not None:
        known |= {f"head.{name}": value for name, value in vars(head).items()}
        known["head.eagle"] = head.eagle
        if target is not None:
            # the engine ignores it: it shares the target's embedding if the widths are equal
            same_width = head.target_hidden_size == head.hidden_size
            known["head.own_embedding"] = head.has_embed_tokens and same_width
            rows = head.draft_vocab_size
            known["head.pruned"] = rows is not None and rows < target.vocab_size
    return known


def support_problems(
    schema: Schema, target: ModelSpec, head: HeadSpec | None = None
) -> list[Problem]:
    """Problems of a pair on a release with any file: not possible, wrong, or no longer tested."""
    document = Document.parse("speculative_config: {decoding_type: Eagle}" if head else "{}")
    release = f"TensorRT-LLM {schema.version}"
    problems = []
    for problem in check_rows(document, Deployment(schema, target, head=head)):
        if problem.code.endswith(SUPPORT):
            problems.append(replace(problem, key=f"{release} {problem.key}", fix=None))
    return problems


def first_release(target: ModelSpec, head: HeadSpec) -> str | None:
    """The oldest known release that is not too old for a pair. None if every release is."""
    for release in releases():
        problems = support_problems(schema_for(str(release)), target, head)
        if not any(problem.code.endswith(TOO_OLD) for problem in problems):
            return str(release)
    return None


def _fix(document: Document, rule: Rule) -> Fix | None:
    if document.has(rule.fix.get("drop", "")):
        return partial(delete_key, path=rule.fix["drop"])
    for path, value in rule.fix.get("write", {}).items():
        edit = set_value if document.has(path) else add_key
        return partial(edit, path=path, value=value)
    return None


def _holds(
    document: Document, deployment: Deployment, known: Mapping[str, Any], path: str, wanted: Any
) -> bool:
    """Whether a setting or fact fulfils the condition `wanted` of a rule."""
    written = document.has(path) or path in deployment.argv
    value = known.get(path, _setting(document, deployment, path))
    is_set = value not in (None, False, 0, "")  # an empty mapping is an object
    states = {
        "given": written,
        "absent": not written,
        "filled": written and value is not None,
        "empty": written and value is None,
        "set": is_set,
        "unset": not is_set,
    }
    if isinstance(wanted, str) and wanted in states:
        return states[wanted]
    if not isinstance(wanted, dict):
        values = wanted if isinstance(wanted, list) else [wanted]
        return any(_same(value, item) for item in values)
    (word, operand), *_ = wanted.items()
    if word == "written":
        return written and _same(value, operand)
    if word == "unlike":
        other = _setting(document, deployment, operand)
        return None not in (value, other) and not _same(_unordered(value), _unordered(other))
    if word in ("above", "below"):
        if not isinstance(value, (int, float)):
            return False
        is_beyond: bool = value > operand if word == "above" else value < operand
        return is_beyond
    excluded = operand if word == "outside" else [operand]
    return not any(_same(value, item) for item in excluded)


def _setting(document: Document, deployment: Deployment, path: str) -> Any:
    """The setting that the engine takes, or its default if the file has none.

    None if the default is not known, or if the object around the key is absent by default.
    """
    fields = deployment.schema.fields
    field = fields.get(deployment.schema.current(path))
    parent = path.rpartition(".")[0]
    around = fields.get(parent)
    absent = parent and not document.has(parent) and (around is None or around.default != "object")
    default = None
    if not (field is None or field.default is UNKNOWN or "object" in field.types or absent):
        default = field.default
    return deployment.setting(document, path, default)


def _unordered(value: Any) -> Any:
    """The value, or the items of a list as texts in any order."""
    if isinstance(value, list):
        return set(map(str, value))
    return value


def _same(value: Any, wanted: Any) -> bool:
    if isinstance(wanted, bool):
        return value is wanted
    if isinstance(value, str) and isinstance(wanted, str):
        return value.lower() == wanted.lower()
    is_equal: bool = value == wanted
    return is_equal
