"""The rules that are data (`trtspec.trtllm.schema.Rule`), applied to a file and to what is known beside it."""

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

# codes about what a release can do with a pair: it is too old, and others
TOO_OLD = ("-OLD-ENGINE", "-MODEL-TOO-NEW")
SUPPORT = (*TOO_OLD, "-KNOWN-ISSUE", "-DEPRECATED")


def facts(document: Document, deployment: Deployment) -> dict[str, Any]:
    """What the rules of the schema's files may ask beside settings; a fact that is not known is absent."""
    target, head, method = deployment.target, deployment.head, method_of(document)
    behaviours = deployment.schema.behaviours
    found: dict[str, Any] = {
        f"release.{name}": True for name, states in behaviours.items() if any(states)
    }
    found["command.known"] = deployment.options is not None
    found["schedule.reaches_zero"] = schedule_reaches_zero(document, deployment)
    if deployment.gpu is not None:
        found["gpu.major"] = int(deployment.gpu.partition(".")[0])
    if method is not None:
        found |= {f"method.{name}": value for name, value in vars(method).items()}
    if target is not None:
        found |= {"target.family": target.family.name, "target.remote_code": target.remote_code}
        found["target.fp4"] = target.quant.format.is_fp4
        found["target.plain_attention"] = any(
            "self_attn" in item for item in target.quant.exclude
        )  # not quantized
    if head is not None:
        found |= {f"head.{name}": value for name, value in vars(head).items()}
        found["head.eagle"] = head.eagle
        if target is not None:
            # which the engine ignores: it shares the target's where the widths are equal
            found["head.own_embedding"] = (
                head.has_embed_tokens and head.target_hidden_size == head.hidden_size
            )
            found["head.pruned"] = (
                head.draft_vocab_size is not None and head.draft_vocab_size < target.vocab_size
            )
    return found


def check_rows(document: Document, deployment: Deployment) -> Iterator[Problem]:
    schema, known = deployment.schema, facts(document, deployment)

    def holds(conditions: Mapping[str, Any]) -> bool:
        return all(
            _holds(document, deployment, known, path, wanted) for path, wanted in conditions.items()
        )

    def written(rule: Rule) -> list[str]:
        return [path for path in rule.when if document.has(path) or path in deployment.argv]

    def applies(rule: Rule) -> bool:
        if any(schema.current(path) not in schema.fields for path in written(rule)):
            return False  # the key itself is refused
        return holds(rule.when) and not (rule.unless and holds(rule.unless))

    def finding(rule: Rule) -> Problem:
        key = next(iter(rule.when)) if rule.at is None else rule.at
        message, fix = f"{rule.message} ({rule.source})", _fix(document, rule)
        beside = tuple(written(rule))
        return Problem(rule.code, rule.severity, key, message, rule.remedy, fix, beside=beside)

    for name, states in schema.rules.items():
        spoken = [finding(rule) for rule in states if rule is not None and applies(rule)]
        if not spoken:
            continue
        said = max(spoken, key=lambda each: SEVERITIES.index(each.severity))
        if len(spoken) < len(states):  # in doubt for this release
            severity: Severity = "info" if said.severity == "info" else "warning"
            message = f"{said.message} (changed {schema.intervals[name]})"
            said = replace(said, severity=severity, message=message)
        yield said


def support_problems(
    schema: Schema, target: ModelSpec, head: HeadSpec | None = None
) -> list[Problem]:
    """What a release cannot do, does wrong or no longer tests of a pair, whatever its file says."""
    document = Document.parse("speculative_config: {decoding_type: Eagle}" if head else "{}")
    findings = check_rows(document, Deployment(schema, target, head=head))
    where = f"TensorRT-LLM {schema.version}"
    return [
        replace(each, key=f"{where} {each.key}", fix=None)
        for each in findings
        if each.code.endswith(SUPPORT)
    ]


def first_release(target: ModelSpec, head: HeadSpec) -> str | None:
    """The oldest release that is known not to be too old for a pair."""
    for release in releases():
        found = support_problems(schema_for(str(release)), target, head)
        if not any(problem.code.endswith(TOO_OLD) for problem in found):
            return str(release)
    return None


def _fix(document: Document, rule: Rule) -> Fix | None:
    if document.has(rule.fix.get("drop", "")):
        return partial(delete_key, path=rule.fix["drop"])
    for path, value in rule.fix.get("write", {}).items():
        return partial(set_value if document.has(path) else add_key, path=path, value=value)
    return None


def _holds(
    document: Document, deployment: Deployment, known: Mapping[str, Any], path: str, wanted: Any
) -> bool:
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
    if isinstance(wanted, dict):
        (word, other), *_ = wanted.items()
        if word == "written":
            return written and _same(value, other)
        if word == "unlike":  # of lists the items, in any order
            both = [value, _setting(document, deployment, other)]
            one, other = ({*map(str, each)} if isinstance(each, list) else each for each in both)
            return None not in both and not _same(one, other)
        if word in ("above", "below"):
            return isinstance(value, (int, float)) and (
                value > other if word == "above" else value < other
            )
        return not any(_same(value, item) for item in (other if word == "outside" else [other]))
    return any(_same(value, item) for item in (wanted if isinstance(wanted, list) else [wanted]))


def _setting(document: Document, deployment: Deployment, path: str) -> Any:
    """What the engine takes; where the file says nothing, the default, if the object around it is there by default."""
    parent, field = (
        path.rpartition(".")[0],
        deployment.schema.fields.get(deployment.schema.current(path)),
    )
    around = deployment.schema.fields.get(parent)
    absent = parent and not document.has(parent) and (around is None or around.default != "object")
    if field is None or field.default is UNKNOWN or "object" in field.types or absent:
        return deployment.setting(document, path, None)
    return deployment.setting(document, path, field.default)


def _same(value: Any, wanted: Any) -> bool:
    if isinstance(wanted, bool):
        return value is wanted
    if isinstance(value, str) and isinstance(wanted, str):
        return value.lower() == wanted.lower()
    return value == wanted
