"""An engine YAML, executed by the reference backend: what each key means there, with the meaning of one release.

Every key is honoured, listed as not applicable with the reason, or refused; reference.yaml says which. The file is
judged by lint first, for the deployment that it was written for.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import yaml

from trtspec.errors import Problem, UsageError, has_errors
from trtspec.files import read_yaml_text
from trtspec.trtllm.deployment import LENGTH, Deployment, Finding, deployment_of, eagle3, finding_at, head_in, method_of
from trtspec.trtllm.document import Document
from trtspec.trtllm.lint.linter import FRONT_KEYS, as_the_engine_sees_it, lint
from trtspec.trtllm.lint.speculation import (
    CONCURRENCY,
    HOST,
    REJECTION,
    REUSE,
    SCHEDULE,
    blinds_draft,
    schedule_of,
    separate_cache,
)
from trtspec.trtllm.schema import UNKNOWN

CODE = "TS-SERVE-REFERENCE-KEY"
SIZES = ("max_batch_size", "max_num_tokens", "max_seq_len")
CHUNKED, KV_DTYPE, BLOCK = "enable_chunked_prefill", "kv_cache_config.dtype", "kv_cache_config.tokens_per_block"
RANKS = "tensor_parallel_size"  # of the deployment that the file is for; the command line decides here
CACHE_TYPES = ("auto", "fp8")


@dataclass(frozen=True)
class ReferenceSettings:
    """What the reference backend takes from a file; None leaves the choice to the server. `draft_schedule` holds pairs
    of a batch size and the draft length from there on."""

    max_batch_size: int | None = None
    max_num_tokens: int | None = None
    max_seq_len: int | None = None
    chunked_prefill: bool = True
    head: str | None = None
    draft_len: int | None = None
    draft_schedule: tuple[tuple[int, int], ...] = ()
    draft_sampling: Literal["argmax", "probabilistic"] = "argmax"
    kv_cache_dtype: Literal["auto", "fp8"] = "auto"
    prefix_reuse: Literal["warm", "blind", "off"] = "off"
    prefix_bytes: int | None = None
    block_tokens: int | None = None


@dataclass(frozen=True)
class Executed:
    """A file as the reference backend runs it. `honoured` and `not_applicable` pair keys with what they are here and
    why they are nothing here."""

    path: str
    version: str
    reason: str
    settings: ReferenceSettings
    honoured: dict[str, str]
    not_applicable: dict[str, str]
    problems: list[Problem]

    def to_dict(self) -> dict[str, Any]:
        return {
            "version": self.version,
            "version_reason": self.reason,
            "honoured": self.honoured,
            "not_applicable": self.not_applicable,
            "problems": [problem.to_dict() for problem in self.problems],
        }

    def lines(self) -> list[str]:
        """For a person, keys with the same reason together."""
        reasons: dict[str, list[str]] = {}
        for key, reason in self.not_applicable.items():
            reasons.setdefault(reason, []).append(key)
        lines = [f"{self.path}, as TensorRT-LLM {self.version} means it ({self.reason})", "  honoured:"]
        lines += [f"    {key}: {value}" for key, value in self.honoured.items()]
        if reasons:
            lines.append("  not applicable here:")
        return lines + [f"    {', '.join(keys)}: {reason}" for reason, keys in reasons.items()]


def execute(path: Path, version: str | None) -> Executed:
    """Raises UsageError for a file that cannot be read or is none for one server; all else that is wrong is a problem
    of the answer."""
    document = Document.parse(read_yaml_text(path), str(path))
    if isinstance(document.value, dict) and FRONT_KEYS & set(document.value):
        message = f"{path} is the front of several servers, and the reference backend is one"
        raise UsageError(message, "pass the file of a context or generation server")
    deployment, reason, _ = deployment_of(document, version=version, target=None, head=None)
    found = lint(document, deployment)
    if any(finding.severity == "error" for finding in found) or document.error:
        return Executed(str(path), deployment.version, reason, ReferenceSettings(), {}, {}, _problems(path, found))
    seen = as_the_engine_sees_it(document, deployment.schema)
    seen = replace(seen, entries={path: entry for path, entry in seen.entries.items() if document.has(path)})
    found += _refused(seen, deployment)
    wrong = any(finding.severity == "error" for finding in found)
    return Executed(
        str(path),
        deployment.version,
        reason,
        ReferenceSettings() if wrong else _settings(seen, deployment),
        dict(_honoured(seen, deployment)),
        dict(_idle(seen)),
        _problems(path, found),
    )


def _problems(path: Path, found: list[Finding]) -> list[Problem]:
    return [finding.problem(str(path)) for finding in found]


def _settings(document: Document, deployment: Deployment) -> ReferenceSettings:
    """Of a file without errors."""
    speculating = method_of(document) is not None
    length = document.get(LENGTH)
    return ReferenceSettings(
        **{key: deployment.setting(document, key) for key in SIZES},
        chunked_prefill=bool(document.get(CHUNKED, default_of(deployment, CHUNKED, False))),
        head=head_in(document) if speculating else None,
        draft_len=length if speculating else None,
        draft_schedule=schedule(document, deployment) if speculating else (),
        draft_sampling="probabilistic" if document.get(REJECTION) else "argmax",
        kv_cache_dtype=document.get(KV_DTYPE) or "auto",
        prefix_reuse=reuse(document, deployment),
        prefix_bytes=document.get(HOST) or None,
        block_tokens=document.get(BLOCK),
    )


def default_of(deployment: Deployment, key: str, otherwise: Any) -> Any:
    """The release's default of a key."""
    field = deployment.schema.fields.get(key)
    return otherwise if field is None or field.default is UNKNOWN else field.default


def reuse(document: Document, deployment: Deployment) -> Literal["warm", "blind", "off"]:
    """Whether prompts reuse what was computed, and whether the draft sees it in this release."""
    if not document.get(REUSE, default_of(deployment, REUSE, True)):
        return "off"
    method = method_of(document)
    blind = method is not None and separate_cache(document, deployment, method) and blinds_draft(document, deployment)
    return "blind" if blind else "warm"


def schedule(document: Document, deployment: Deployment) -> tuple[tuple[int, int], ...]:
    """Pairs of a batch size and the draft length from there on, the first for size 1; empty: the length is fixed.

    A release reads the keys as the largest batch of a length (and drafts nothing beyond the last) or as the smallest.
    `max_concurrency` is a schedule of one key.
    """
    longest, concurrency = document.get(LENGTH), document.get(CONCURRENCY)
    written = schedule_of(document)
    if written is None:
        if concurrency is None:
            return ()
        return ((1, longest), (concurrency + 1, 0)) if concurrency else ((1, 0),)
    meaning = deployment.schema.behaviour("draft_len_schedule")
    steps = sorted(written.items())
    if meaning.get("bounds") == "lower":
        return tuple(steps)
    begins = [1, *(key + 1 for key, _ in steps)]
    lengths = [*(length for _, length in steps), 0 if meaning.get("beyond") == "zero" else steps[-1][1]]
    return tuple(zip(begins, lengths, strict=True))


def _honoured(document: Document, deployment: Deployment) -> Iterator[tuple[str, str]]:
    for key in SIZES:
        if (value := deployment.setting(document, key)) is not None:
            yield key, str(value) if document.has(key) else f"{value} (the file's first line)"
    for key in _table()["honoured"]:
        if key not in SIZES and document.has(key):
            yield key, _shown(document, deployment, key)
    if not document.has(REUSE) and reuse(document, deployment) != "off":
        yield REUSE, f"{_shown(document, deployment, REUSE)} (the release's default)"
    if not document.has(CHUNKED) and not default_of(deployment, CHUNKED, False):
        yield CHUNKED, "false (the release's default): longer prompts than max_num_tokens are refused"


def _shown(document: Document, deployment: Deployment, key: str) -> str:
    value = document.get(key)
    if key in (SCHEDULE, CONCURRENCY) and value is not None:
        parts = [f"{length} drafts from {first} rows" for first, length in schedule(document, deployment)]
        return f"{value}: {', '.join(parts)}"
    if key == REUSE:
        words = {"warm": "", "blind": ", blind: in this release the draft sees nothing of a reused prefix", "off": ""}
        return f"{str(value if value is not None else True).lower()}{words[reuse(document, deployment)]}"
    return str(value).lower() if isinstance(value, bool) else str(value)


def _idle(document: Document) -> Iterator[tuple[str, str]]:
    reasons = {key: reason for reason, keys in _table()["not_applicable"].items() for key in keys}
    only = _table()["only"]
    for path in _leaves(document):
        if (key := _covering(path, reasons)) is not None:
            yield path, reasons[key]
        elif path in only:
            yield path, "this is what is always done"


def _refused(document: Document, deployment: Deployment) -> list[Finding]:
    """Keys that would change what is computed, and that the reference backend has nothing for."""
    table = _table()
    known = [*table["honoured"], *(key for keys in table["not_applicable"].values() for key in keys)]
    found = []
    for path in _leaves(document):
        value = document.get(path)
        if path in table["only"]:
            if value is not None and value not in table["only"][path]:
                found.append(_refusal(document, path, f"{value} is not what the reference backend does"))
        elif _covering(path, known) is None and value not in (None, default_of(deployment, path, None)):
            found.append(_refusal(document, path, "the reference backend has nothing of the kind"))
    method = method_of(document)
    if method is not None and method != eagle3():
        found.append(_refusal(document, "speculative_config.decoding_type", f"it does not draft by {method.name}"))
    if (dtype := document.get(KV_DTYPE)) not in (None, *CACHE_TYPES):
        found.append(_refusal(document, KV_DTYPE, f"its cache is {' or '.join(CACHE_TYPES)}, not {dtype}"))
    if schedule_of(document) and deployment.schema.behaviour("draft_len_schedule").get("bounds") is UNKNOWN:
        message = f"whether {deployment.version} reads the keys as upper or lower bounds is not known"
        found.append(_refusal(document, SCHEDULE, message))
    return found


def _refusal(document: Document, path: str, message: str) -> Finding:
    remedy = "remove the key, or serve the file with TensorRT-LLM"
    return finding_at(document, CODE, "error", path, message, remedy)


def _leaves(document: Document) -> list[str]:
    """Paths that hold a value of their own; a schedule is one."""
    whole = (SCHEDULE,)
    inside = tuple(f"{path}." for path in whole)
    return [
        path
        for path, entry in document.entries.items()
        if not path.startswith(inside) and (path in whole or not isinstance(entry.value, dict) or not entry.value)
    ]


def _covering(path: str, keys: Any) -> str | None:
    """The longest of `keys` that is the path or one above it."""
    found = [key for key in keys if path == key or path.startswith(f"{key}.")]
    return max(found, key=len, default=None)


@functools.cache
def _table() -> dict[str, Any]:
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    return yaml.load(Path(__file__).with_name("reference.yaml").read_text(encoding="utf-8"), Loader=loader)


def refuse_errors(executed: Executed) -> None:
    """Raises UsageError with every error of the file."""
    errors = [problem for problem in executed.problems if problem.severity == "error"]
    if has_errors(executed.problems):
        listed = "\n".join(f"{problem.where}: {problem.message} [{problem.code}]" for problem in errors)
        raise UsageError(f"{executed.path} cannot be served here:\n{listed}", errors[0].remedy)
