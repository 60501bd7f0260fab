"""Applies the rules of the schema files (`Rule` of schema.py) to a file and its deployment."""

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

# ends of the codes of rules that find a release too old for a target and head
TOO_OLD = ("-OLD-ENGINE", "-MODEL-TOO-NEW")
SUPPORT = (*TOO_OLD, "-KNOWN-ISSUE", "-DEPRECATED")  # ends of all codes about support


def check_rows(document: Document, deployment: Deployment) -> Iterator[Problem]:
    """Yields a problem for each rule of the release that applies to the file.

    A rule that is in doubt for the release is at most a warning.
    """
    schema = deployment.schema
    known = facts(document, deployment)

    def hold(conditions: Mapping[str, Any]) -> bool:
        """Whether all conditions hold, each by the path of its setting or fact."""
        return all(
            _holds(document, deployment, known, path, wanted) for path, wanted in conditions.items()
        )

    def written(rule: Rule) -> list[str]:
        """Paths among the rule's conditions that the file or the command line sets."""
        return [path for path in rule.when if document.has(path) or path in deployment.argv]

    def applies(rule: Rule) -> bool:
        """Whether the rule finds a fault in this file."""
        if any(schema.current(path) not in schema.fields for path in written(rule)):
            return False  # because the release refuses the key, there is a finding already
        return hold(rule.when) and not (rule.unless and hold(rule.unless))

    def problem_of(rule: Rule) -> Problem:
        """Problem that the rule reports."""
        key = next(iter(rule.when)) if rule.at is None else rule.at
        message = f"{rule.message} ({rule.source})"
        fix = _fix(document, rule)
        beside = tuple(written(rule))
        return Problem(rule.code, rule.severity, key, message, rule.remedy, fix, beside=beside)

    for name, states in schema.rules.items():
        problems = [problem_of(rule) for rule in states if rule is not None and applies(rule)]
        if not problems:
            continue
        # the mildest, because only one of the possible states is this release's
        problem = max(problems, key=lambda each: SEVERITIES.index(each.severity))
        if len(problems) < len(states):  # so the rule is in doubt for this release
            severity: Severity = "info" if problem.severity == "info" else "warning"
            message = f"{problem.message} (changed {schema.intervals[name]})"
            problem = replace(problem, severity=severity, message=message)
        yield problem


def facts(document: Document, deployment: Deployment) -> dict[str, Any]:
    """Facts that conditions of rules can name like settings, by name.

    They are about the release, command, schedule, GPU, method, target and head. An unknown fact is
    absent.
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
        # whether the attention is not quantized
        known["target.plain_attention"] = any("self_attn" in item for item in quant.exclude)
    if head is not None:
        known |= {f"head.{name}": value for name, value in vars(head).items()}
        known["head.eagle"] = head.eagle
        if target is not None:
            # the engine ignores this embedding, and shares the target's, if the widths are equal
            same_width = head.target_hidden_size == head.hidden_size
            known["head.own_embedding"] = head.has_embed_tokens and same_width
            draft_vocabulary = head.draft_vocab_size
            is_pruned = draft_vocabulary is not None and draft_vocabulary < target.vocab_size
            known["head.pruned"] = is_pruned
    return known


def support_problems(
    schema: Schema, target: ModelSpec, head: HeadSpec | None = None
) -> list[Problem]:
    """Problems that a release has with a target and head in any file.

    The pair does not run, gives wrong results, or is no longer tested.
    """
    document = Document.parse("speculative_config: {decoding_type: Eagle}" if head else "{}")
    release = f"TensorRT-LLM {schema.version}"
    problems = []
    for problem in check_rows(document, Deployment(schema, target, head=head)):
        if problem.code.endswith(SUPPORT):
            problems.append(replace(problem, key=f"{release} {problem.key}", fix=None))
    return problems


def first_release(target: ModelSpec, head: HeadSpec) -> str | None:
    """Oldest known release that is not too old for a target and head. None if every release is."""
    for release in releases():
        problems = support_problems(schema_for(str(release)), target, head)
        if not any(problem.code.endswith(TOO_OLD) for problem in problems):
            return str(release)
    return None


def _fix(document: Document, rule: Rule) -> Fix | None:
    """Edit that the rule's `fix` describes. None if there is nothing to drop or write."""
    if document.has(rule.fix.get("drop", "")):
        return partial(delete_key, path=rule.fix["drop"])
    for path, value in rule.fix.get("write", {}).items():
        edit = set_value if document.has(path) else add_key
        return partial(edit, path=path, value=value)
    return None


def _holds(
    document: Document, deployment: Deployment, known: Mapping[str, Any], path: str, wanted: Any
) -> bool:
    """Whether the setting or fact at `path` fulfils the condition `wanted` of a rule.

    `known`: facts by name. `Rule` lists the forms of a condition.
    """
    written = document.has(path) or path in deployment.argv
    value = known.get(path, _setting(document, deployment, path))
    is_set = value not in (None, False, 0, "")  # an empty mapping counts as set
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
    (operator, operand), *_ = wanted.items()
    if operator == "written":
        return written and _same(value, operand)
    if operator == "unlike":
        other = _setting(document, deployment, operand)
        return None not in (value, other) and not _same(_unordered(value), _unordered(other))
    if operator in ("above", "below"):
        if not isinstance(value, (int, float)):
            return False
        is_beyond: bool = value > operand if operator == "above" else value < operand
        return is_beyond
    excluded = operand if operator == "outside" else [operand]  # else the operator is `not`
    return not any(_same(value, item) for item in excluded)


def _setting(document: Document, deployment: Deployment, path: str) -> Any:
    """Value of a setting that the engine uses: the written value, or the default without one.

    None if the default is not known, or if the mapping around the key is absent by default.
    """
    fields = deployment.schema.fields
    field = fields.get(deployment.schema.current(path))
    parent = path.rpartition(".")[0]
    mapping = fields.get(parent)
    absent_by_default = mapping is None or mapping.default != "object"
    is_absent = parent and not document.has(parent) and absent_by_default
    default = None
    if not (field is None or field.default is UNKNOWN or "object" in field.types or is_absent):
        default = field.default
    return deployment.setting(document, path, default)


def _unordered(value: Any) -> Any:
    """The items of a list as a set of texts, to compare lists in any order.

    Other values as they are.
    """
    if isinstance(value, list):
        return set(map(str, value))
    return value


def _same(value: Any, wanted: Any) -> bool:
    """Whether a value equals the wanted one. Texts are equal in any case, and 1 is not true."""
    if isinstance(wanted, bool):
        return value is wanted
    if isinstance(value, str) and isinstance(wanted, str):
        return value.lower() == wanted.lower()
    is_equal: bool = value == wanted
    return is_equal
