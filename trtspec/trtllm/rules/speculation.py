"""Rules about speculation.

They judge the needs of its method, the schedule of draft lengths, and settings that the engine
accepts although they cost acceptance, memory or the server. The behaviours in the schema files name
the releases concerned, and the sources.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from trtspec.errors import Problem, Severity
from trtspec.trtllm.deployment import LENGTH, SPEC, Deployment, eagle3, method_of
from trtspec.trtllm.document import Document
from trtspec.trtllm.schema import Schema

SCHEDULE = f"{SPEC}.draft_len_schedule"


def method_for_kimi(document: Document, deployment: Deployment) -> Iterator[Problem]:
    """Yields a problem if the file's method of speculation does not run with a Kimi target.

    A method that nobody is known to have run with a Kimi is a warning.
    """
    key = f"{SPEC}.decoding_type"
    method = method_of(document)
    # without a known target, only a method that the PyTorch backend lacks is a problem
    if method is None or (deployment.target is None and method.pytorch):
        return
    runs = method.kimi["runs"]
    if runs == "yes":
        return
    why = method.kimi["why"]
    if runs == "no":
        remedy = f"use an Eagle3 head: `decoding_type: {eagle3().spellings[0]}`"
        yield Problem(method.kimi["code"], "error", key, why, remedy)
    else:
        message = f"{method.name} with a Kimi: {why}"
        yield Problem("TS-LINT-UNTESTED", "warning", key, message)


def schedule_of(document: Document) -> dict[int, int] | None:
    """Draft length by batch size, as the file has it. None without a schedule of integers."""
    written = document.get(SCHEDULE)
    if not isinstance(written, dict):
        return None
    numbers = [*written, *written.values()]
    if not all(isinstance(number, int) for number in numbers):
        return None
    return written


def schedule(document: Document, deployment: Deployment) -> Iterator[Problem]:
    """Checks the draft lengths of a schedule, and on which side its batch sizes are bounds."""
    schedule = schedule_of(document)
    if not schedule:
        return
    schema = deployment.schema
    meanings = schema.behaviours["draft_len_schedule"]
    if len(meanings) > 1:
        either = " or ".join(meaning["bounds"] for meaning in meanings)
        message = (
            f"the keys of the schedule are {either} bounds of the batch size (changed "
            f"{schema.intervals['draft_len_schedule']})"
        )
        yield Problem("TS-LINT-SCHEDULE-MEANING", "warning", SCHEDULE, message)
    max_draft_len = document.get(LENGTH)
    lengths = schedule.values()
    too_long = isinstance(max_draft_len, int) and max(lengths) > max_draft_len
    if too_long or min(schedule) < 1 or min(lengths) < 0:
        message = (
            "batch sizes start at 1 and draft lengths lie "
            f"between 0 and max_draft_len ({max_draft_len})"
        )
        remedy = "correct the entries out of range"
        yield Problem("TS-LINT-BAD-SCHEDULE", "error", SCHEDULE, message, remedy)
    for meaning in meanings:
        key = meaning["first"]  # batch size whose draft length must be the longest
        if key == "smallest":
            key = min(schedule)
        if isinstance(max_draft_len, int) and schedule.get(key) != max_draft_len:
            severity: Severity = "error" if len(meanings) == 1 else "warning"
            message = f"key {key} must have the value of max_draft_len, {max_draft_len}"
            yield Problem("TS-LINT-BAD-SCHEDULE", severity, SCHEDULE, message)


def schedule_reaches_zero(document: Document, deployment: Deployment) -> bool:
    """Whether the schedule turns drafts off for some batch size that the server may run."""
    schedule = schedule_of(document)
    if not schedule:
        return False
    if 0 in schedule.values():
        return True
    # in some releases batches beyond the last key have no drafts
    beyond = deployment.schema.behaviour("draft_len_schedule").get("beyond")
    return beyond == "zero" and max(schedule) < deployment.size(document, "max_batch_size", 2048)


REUSE = "kv_cache_config.enable_block_reuse"
MANAGER_V2 = "kv_cache_config.use_kv_cache_manager_v2"
TRANSFER = "cache_transceiver_config.backend"


def reuse_blinds_draft(schema: Schema, manager: Any = None) -> Mapping[str, Any]:
    """State of the behaviour that hides a reused prefix from the draft, with its measured effect.

    {} if the release does not hide it. `manager`: value of use_kv_cache_manager_v2, None or "auto"
    if the engine chooses.
    """
    chosen = manager in (None, "auto") and all(schema.behaviours["cache_manager_auto"])
    is_v2 = manager is True or chosen
    fixed = is_v2 and all(schema.behaviours["draft_kv_reuse_v2"])
    return {} if fixed else schema.behaviour("prefix_reuse_blinds_draft")


def prefix_reuse(document: Document, deployment: Deployment) -> Iterator[Problem]:
    """Checks that the reuse of prefixes is off if it hides a reused prefix from the draft.

    Only a draft with a KV cache manager of its own cannot see the prefix. Cache manager V2 of some
    releases shows it to the draft.
    """
    method = method_of(document)
    schema = deployment.schema
    separate = schema.behaviour("separate_draft_cache").get("unless")
    if method is None or not method.own_cache or separate is None:
        return
    if deployment.setting(document, separate) is True:
        return
    manager = False  # under pipeline parallelism no release's manager V2 fixes it
    if deployment.setting(document, "pipeline_parallel_size", 1) in (None, 1):
        manager = deployment.setting(document, MANAGER_V2)
    blind = reuse_blinds_draft(schema, manager)
    # a transceiver makes the engine keep the draft's layers in the target's cache
    if not blind or deployment.setting(document, TRANSFER):
        return
    if document.get(REUSE, True) in (False, None):
        return
    message = (
        f"over a reused prefix the draft sees nothing ({blind['measured']}): "
        f"every multi-turn chat is such a case ({blind['source']})"
    )
    off = "`enable_block_reuse: false`, or true if prompts that repeat matter more than drafts"
    remedy = f"write {off}"
    fixed = schema.behaviour("draft_kv_reuse_v2")
    if fixed:
        remedy = (
            f"write `use_kv_cache_manager_v2: true`, which fixes this ({fixed['source']}), or {off}"
        )
    # a file that sets the key has decided, while the author of another may not know the default
    severity: Severity = "info" if document.has(REUSE) else "warning"
    yield Problem("TS-LINT-PREFIX-REUSE", severity, REUSE, message, remedy)


RULES = (method_for_kimi, schedule, prefix_reuse)


def request_limits(schema: Schema, penalties: bool = False) -> dict[str, tuple[str, ...]]:
    """Request parameters that do not work under one-model speculation, by what happens to them.

    The keys are end_engine (the engine ends), ignored, and refused. If the release is in doubt, a
    parameter is in each list that it may belong to. `penalties`: whether the file has the key that
    penalties need.
    """
    needs_a_key = schema.behaviours["penalties_need_a_key"]
    settable: Sequence[str] = ()  # parameters that certainly work with the key
    if len(needs_a_key) == 1:
        settable = needs_a_key[0].get("parameters", ())
    limits: dict[str, tuple[str, ...]] = {}
    for name in ("end_engine", "ignored", "refused"):
        parameters: list[str] = []
        for state in schema.behaviours[f"requests_{name}"]:
            parameters += state.get("parameters", ())
        if name == "ignored":
            parameters = [parameter for parameter in parameters if parameter not in settable]
        elif name == "refused" and not penalties:
            parameters += needs_a_key[-1].get("parameters", ())
        limits[name] = tuple(dict.fromkeys(parameters))
    return limits
