"""Rules about speculation: what its method needs, what the release does with a schedule, a tree or a second engine, and
what deployers met in the field: settings that the engine takes and that cost acceptance, memory or the server. Which
releases do so, and who says it, is among the behaviours of the schema files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from trtspec.errors import Problem, Severity
from trtspec.trtllm.deployment import LENGTH, SPEC, Deployment, eagle3, method_of
from trtspec.trtllm.document import Document
from trtspec.trtllm.schema import Schema

SCHEDULE = f"{SPEC}.draft_len_schedule"


def method_for_kimi(document: Document, deployment: Deployment) -> Iterator[Problem]:
    """Ways to speculate that do not run with a Kimi, or that nobody has run."""
    key, method = f"{SPEC}.decoding_type", method_of(document)
    if (
        method is None
        or method.kimi["runs"] == "yes"
        or (deployment.target is None and method.pytorch)
    ):
        return
    why, remedy = (
        method.kimi["why"],
        f"use an Eagle3 head: `decoding_type: {eagle3().spellings[0]}`",
    )
    if method.kimi["runs"] == "no":
        yield Problem(method.kimi["code"], "error", key, why, remedy)
    else:
        message = f"{method.name} with a Kimi: {why}"
        yield Problem("TS-LINT-UNTESTED", "warning", key, message)


def schedule_of(document: Document) -> dict[int, int] | None:
    """The schedule, as the engine reads it; None where there is none or the engine refuses it."""
    written = document.get(SCHEDULE)
    if not isinstance(written, dict) or not all(
        isinstance(item, int) for pair in written.items() for item in pair
    ):
        return None
    return written


def schedule(document: Document, deployment: Deployment) -> Iterator[Problem]:
    """What a release wants of the values of a schedule, and on which side of a batch size its keys are."""
    schedule, schema = schedule_of(document), deployment.schema
    meanings = schema.behaviours["draft_len_schedule"]
    if not schedule:
        return
    if len(meanings) > 1:
        either = " or ".join(meaning["bounds"] for meaning in meanings)
        message = f"the keys of the schedule are {either} bounds of the batch size (changed "
        message += f"{schema.intervals['draft_len_schedule']})"
        yield Problem("TS-LINT-SCHEDULE-MEANING", "warning", SCHEDULE, message)
    longest, lengths = document.get(LENGTH), schedule.values()
    if (
        min(schedule) < 1
        or min(lengths) < 0
        or (isinstance(longest, int) and max(lengths) > longest)
    ):
        message = (
            f"batch sizes start at 1 and draft lengths lie between 0 and max_draft_len ({longest})"
        )
        yield Problem(
            "TS-LINT-BAD-SCHEDULE", "error", SCHEDULE, message, "correct the entries out of range"
        )
    for meaning in meanings:
        key = min(schedule) if meaning["first"] == "smallest" else meaning["first"]
        if isinstance(longest, int) and schedule.get(key) != longest:
            severity: Severity = "error" if len(meanings) == 1 else "warning"
            message = f"key {key} must have the value of max_draft_len, {longest}"
            yield Problem("TS-LINT-BAD-SCHEDULE", severity, SCHEDULE, message)


def schedule_reaches_zero(document: Document, deployment: Deployment) -> bool:
    """Whether some batch that the server may run drafts nothing."""
    schedule = schedule_of(document)
    if not schedule:
        return False
    beyond = deployment.schema.behaviour("draft_len_schedule").get("beyond") == "zero"
    return 0 in schedule.values() or (
        beyond and max(schedule) < deployment.size(document, "max_batch_size", 2048)
    )


REUSE, V2 = "kv_cache_config.enable_block_reuse", "kv_cache_config.use_kv_cache_manager_v2"
TRANSFER = "cache_transceiver_config.backend"


def reuse_blinds_draft(schema: Schema, manager: Any = None) -> Mapping[str, Any]:
    """What was measured where a reused prefix hides from the draft; empty where it does not. `manager` is the value of
    use_kv_cache_manager_v2, None or "auto" where the engine chooses."""
    chosen = manager in (None, "auto") and all(schema.behaviours["cache_manager_auto"])
    mended = (manager is True or chosen) and all(schema.behaviours["draft_kv_reuse_v2"])
    return {} if mended else schema.behaviour("prefix_reuse_blinds_draft")


def prefix_reuse(document: Document, deployment: Deployment) -> Iterator[Problem]:
    """A reused prefix hides from the draft where it has a cache manager of its own, except under cache manager V2 of a
    release that fixed it."""
    method, separate = (
        method_of(document),
        deployment.schema.behaviour("separate_draft_cache").get("unless"),
    )
    if (
        method is None
        or not method.own_cache
        or separate is None
        or deployment.setting(document, separate) is True
    ):
        return
    alone = deployment.setting(document, "pipeline_parallel_size", 1) in (None, 1)
    blind = reuse_blinds_draft(
        deployment.schema, deployment.setting(document, V2) if alone else False
    )
    # a transceiver makes the engine keep the draft's layers in the target's cache
    if (
        not blind
        or deployment.setting(document, TRANSFER)
        or document.get(REUSE, True) in (False, None)
    ):
        return
    message = f"over a reused prefix the draft sees nothing ({blind['measured']}): every multi-turn chat is such a case"
    message += f" ({blind['source']})"
    remedy = (
        "write `enable_block_reuse: false`, or true if prompts that repeat matter more than drafts"
    )
    if fixed := deployment.schema.behaviour("draft_kv_reuse_v2"):
        remedy = f"write `use_kv_cache_manager_v2: true`, which fixes this ({fixed['source']}), or {remedy[6:]}"
    # who writes it has decided; who leaves it out may not know that it is on
    yield Problem(
        "TS-LINT-PREFIX-REUSE", "info" if document.has(REUSE) else "warning", REUSE, message, remedy
    )


RULES = (method_for_kimi, schedule, prefix_reuse)


def request_limits(schema: Schema, penalties: bool = False) -> dict[str, tuple[str, ...]]:
    """What a release does with request parameters under one-model speculation: those that end the engine, those it
    ignores, and those it refuses; where the release is in doubt, a parameter is in each that it may belong to."""
    needs_a_key = schema.behaviours["penalties_need_a_key"]
    settable = needs_a_key[0].get("parameters", ()) if len(needs_a_key) == 1 else ()
    limits: dict[str, tuple[str, ...]] = {}
    for name in ("end_engine", "ignored", "refused"):
        listed = [
            parameter
            for state in schema.behaviours[f"requests_{name}"]
            for parameter in state.get("parameters", ())
            if name != "ignored" or parameter not in settable
        ]
        asked = needs_a_key[-1].get("parameters", ()) if name == "refused" and not penalties else ()
        limits[name] = tuple(dict.fromkeys([*listed, *asked]))
    return limits
