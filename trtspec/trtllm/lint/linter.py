"""All problems of an engine YAML at once, for exactly one version; and the corrected text."""

from __future__ import annotations

from collections.abc import Iterator

from packaging.version import Version

from trtspec.trtllm.document import Document
from trtspec.trtllm.lint.combinations import check_combinations
from trtspec.trtllm.lint.engine import check_engine
from trtspec.trtllm.lint.finding import Deployment, Finding
from trtspec.trtllm.lint.keys import check_keys
from trtspec.trtllm.lint.machine import check_machine
from trtspec.trtllm.lint.model import check_model
from trtspec.trtllm.lint.speculation import check_speculation
from trtspec.trtllm.schema import newest_known

RULES = (check_keys, check_speculation, check_model, check_engine, check_combinations, check_machine)
FRONT_KEYS = {"context_servers", "generation_servers"}
ORDER = {"error": 0, "warning": 1, "info": 2}
MOST_FIXES = 100  # far above any real file; a fix that brings its own problem back would otherwise never end


def lint(text: str, deployment: Deployment) -> list[Finding]:
    """Every finding about `text`, errors first, then by line."""
    document = Document.parse(text)
    if document.error:
        return [Finding("TS-LINT-SYNTAX", "error", "", document.error, "mend the YAML", document.error_line)]
    if document.value is None:
        document = Document(text, {})
    if not isinstance(document.value, dict):
        message = f"the file holds {type(document.value).__name__}, not a mapping of options"
        return [Finding("TS-LINT-SYNTAX", "error", "", message, "write `key: value` lines", 1)]
    if FRONT_KEYS & set(document.value):
        message = "this is the front of disaggregated servers, which has no engine settings to judge"
        remedy = "check it with `trtspec serve TARGET --disaggregated FILE --dry-run`"
        return [Finding("TS-LINT-FRONT-FILE", "info", "", message, remedy)]
    found = [*_version(deployment), *(finding for rule in RULES for finding in rule(document, deployment))]
    return sorted(found, key=lambda f: (ORDER[f.severity], f.line or 0, f.key, f.code))


def _version(deployment: Deployment) -> Iterator[Finding]:
    newest = newest_known()
    if deployment.schema.version > newest:
        message = f"TensorRT-LLM {deployment.version} is newer than the newest version known here, {newest}"
        yield Finding("TS-LINT-VERSION-NEWER", "warning", "", message, "judged as the newest known line")
    if deployment.schema.line == "1.0" and deployment.schema.version >= Version("1.0.1"):
        message = f"no release {deployment.version} is known"
        yield Finding("TS-LINT-VERSION-NEWER", "warning", "", message, "judged as 1.0")


def fix(text: str, deployment: Deployment) -> tuple[str, list[Finding]]:
    """The text with every fixable error and warning mended, and what was mended in that order."""
    mended: list[Finding] = []
    for _ in range(MOST_FIXES):
        finding = next((f for f in lint(text, deployment) if f.fix is not None and f.severity != "info"), None)
        if finding is None or finding.fix is None:
            break
        text = finding.fix(Document.parse(text))
        mended.append(finding)
    return text, mended
