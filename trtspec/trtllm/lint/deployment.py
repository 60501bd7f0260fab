"""Who a file is judged for: what the user says, else what the file itself says."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from trtspec.data_files import gpu_names, gpu_spec
from trtspec.errors import Problem, UsageError
from trtspec.trtllm.document import Document
from trtspec.trtllm.intent import parse_intent
from trtspec.trtllm.lint.finding import Deployment
from trtspec.trtllm.names import choose_version, findable, load_head, load_target
from trtspec.trtllm.schema import Schema, schema_for
from trtspec.trtllm.speculation import head_in


def deployment_of(
    document: Document | str,
    *,
    version: str | None,
    target: str | None,
    head: str | None,
    gpu: str | None = None,
    passed: list[str] | None = None,
    environ: Mapping[str, str] | None = None,
) -> tuple[Deployment, str, list[Problem]]:
    """The deployment, why this version, and what is wrong with `passed`, the options of trtllm-serve (None: not known).

    A head or target that only the file names is used where it can be found. Raises UsageError for an unknown GPU.
    """
    if isinstance(document, str):
        document = Document.parse(document)
    written = parse_intent(document.text)
    named_head = head_in(document)
    named_target = written.known_target if written else ""
    target_name = target or (named_target if named_target and findable(named_target) else None)
    head_name = head or (named_head if named_head and findable(named_head) else None)
    target_spec = load_target(target_name).spec if target_name else None
    head_spec = load_head(head_name).spec if head_name else None
    if version is None and written is not None:
        chosen, reason = written.version, "the file's first line"
    else:
        chosen, reason = choose_version(version, target_spec, head_spec)
    schema = schema_for(chosen)
    sizes = written.settings_in_argv() if written is not None else {}
    argv = {key: value for key, value in sizes.items() if not document.has(key)}
    options, problems = _options(schema, passed)
    argv |= {key: value for name, value in (options or {}).items() if (key := schema.options[name].key) is not None}
    deployment = Deployment(
        schema, target_spec, target_name or "", head_spec, head_name or "", argv,
        options=options, gpu=compute_capability(gpu) if gpu else None, environ=environ or {},
    )  # fmt: skip
    return deployment, reason, problems


def _options(schema: Schema, passed: list[str] | None) -> tuple[dict[str, Any] | None, list[Problem]]:
    if passed is None:
        return None, []
    from trtspec.trtllm.serve.command import parse_passed

    options, problems = parse_passed(schema, passed)
    return {item.option.name: item.value for item in options}, problems


def compute_capability(gpu: str) -> str:
    """ "10.0" of b200 or sm100; raises UsageError for a GPU that is not known."""
    plain = re.fullmatch(r"sm_?(\d+)(\d)[af]?", gpu.lower())
    if plain:
        return f"{plain[1]}.{plain[2]}"
    if gpu.lower() not in gpu_names():
        listed = ", ".join(gpu_names())
        raise UsageError(f"the GPU {gpu!r} is not known", f"choose one of {listed}, or a capability such as sm120")
    return gpu_spec(gpu).compute_capability
