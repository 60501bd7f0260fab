"""What deployers met in the field with speculation: settings that the engine takes and that cost acceptance, memory or
the server. Which releases do so, and who says it, stands among the behaviours of the schema files."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

from trtspec.trtllm.document import Document, add_key, delete_key, set_value
from trtspec.trtllm.lint.finding import Deployment, Finding, Fix
from trtspec.trtllm.lint.speculation import reaches_zero, schedule_of
from trtspec.trtllm.schema import Behaviour
from trtspec.trtllm.speculation import SPEC, SpeculationMethod, method_of

REUSE, V2 = "kv_cache_config.enable_block_reuse", "kv_cache_config.use_kv_cache_manager_v2"
HOST, TRANSFER = "kv_cache_config.host_cache_size", "cache_transceiver_config.backend"
REJECTION = f"{SPEC}.use_rejection_sampling"


def check_traps(document: Document, deployment: Deployment) -> Iterator[Finding]:
    method = method_of(document)
    if method is None:
        return
    if separate_cache(document, deployment, method):
        yield from _prefix_reuse(document, deployment)
        yield from _memory(document, deployment)
        yield from _transfer(document, deployment)
    yield from _guided(document, deployment)
    yield from _sampled_acceptance(document, deployment, method)
    yield from _requests(document, deployment, method)
    yield from _pruned_head(document, deployment, method)


def separate_cache(document: Document, deployment: Deployment, method: SpeculationMethod) -> bool:
    """Whether this release gives the draft a cache manager of its own."""
    separate = deployment.schema.behaviour("separate_draft_cache")
    unless = separate.values.get("unless") or separate.otherwise.get("unless")
    return method.own_cache and unless is not None and deployment.setting(document, unless) is not True


def blinds_draft(document: Document, deployment: Deployment) -> Behaviour | None:
    """The behaviour, where a reused prefix of this server hides from the draft; None where it does not."""
    blind, mended = (deployment.schema.behaviour(name) for name in ("prefix_reuse_blinds_draft", "draft_kv_reuse_v2"))
    if not blind and not blind.otherwise:
        return None
    chosen = deployment.setting(document, V2)
    spread = deployment.setting(document, "pipeline_parallel_size", 1)
    if mended and not mended.interval and chosen is True and spread in (None, 1):
        return None
    # a transceiver makes the engine keep the draft's layers in the target's cache
    return None if deployment.setting(document, TRANSFER) else blind


def _at(
    document: Document, code: str, severity: Any, key: str, message: str, remedy: str, fix: Fix | None = None
) -> Finding:
    return Finding(code, severity, key, message, remedy, document.line(key), fix)


def _doubt(deployment: Deployment, one: Behaviour) -> str:
    return f"; whether {deployment.version} does so is not known (changed {one.interval})" if one.interval else ""


def _prefix_reuse(document: Document, deployment: Deployment) -> Iterator[Finding]:
    blind = blinds_draft(document, deployment)
    if blind is None or document.get(REUSE, True) in (False, None):
        return
    words = blind.values or blind.otherwise
    message = f"over a reused prefix the draft sees nothing ({words['measured']}): every multi-turn chat is such a case"
    message += f"{_doubt(deployment, blind)} ({blind.source})"
    remedy = "write `enable_block_reuse: false`, or true if prompts that repeat matter more than drafts"
    mended = deployment.schema.behaviour("draft_kv_reuse_v2")
    if mended and not mended.interval:
        remedy = f"write `use_kv_cache_manager_v2: true`, which has this mended ({mended.source}), or {remedy[6:]}"
    # who writes it has decided; who leaves it out may not know that it is on
    severity = "info" if document.has(REUSE) else "warning"
    yield _at(document, "TS-LINT-PREFIX-REUSE", severity, REUSE, message, remedy)


def _memory(document: Document, deployment: Deployment) -> Iterator[Finding]:
    claims = deployment.schema.behaviour("draft_claims_host_cache")
    size = document.get(HOST)
    if (claims or claims.otherwise) and isinstance(size, int) and size > 0:
        message = f"the draft's cache takes host_cache_size once more: {2 * size / 2**30:.0f} GiB of host memory are "
        message += f"pinned{_doubt(deployment, claims)} ({claims.source})"
        yield _at(document, "TS-LINT-HOST-CACHE-TWICE", "warning", HOST, message, "halve it, or plan for twice of it")
    claims = deployment.schema.behaviour("draft_claims_gpu_budget")
    if (claims or claims.otherwise) and document.get(V2) is True:
        message = "cache manager V2 gives the whole GPU budget to the target and to the draft: out of memory under load"
        message += f"{_doubt(deployment, claims)} ({claims.source})"
        fix = partial(delete_key, path=V2)
        yield _at(document, "TS-LINT-CACHE-BUDGET-TWICE", "warning", V2, message, f"remove {V2}", fix)


def _transfer(document: Document, deployment: Deployment) -> Iterator[Finding]:
    lost = deployment.schema.behaviour("draft_cache_not_transferred")
    words = lost.values or lost.otherwise
    if words and deployment.setting(document, TRANSFER):
        message = f"a draft cache of its own is not handed over between servers ({words['measured']})"
        message += f"{_doubt(deployment, lost)} ({lost.source})"
        remedy = "measure acceptance on long prompts with `trtspec bench`, or use attention DP, which shares the cache"
        yield _at(document, "TS-LINT-DRAFT-CACHE-LOST", "info", TRANSFER, message, remedy)


def _guided(document: Document, deployment: Deployment) -> Iterator[Finding]:
    """A grammar masks one row per draft token; graphs of a draft length of 0 have none."""
    crash, schedule = deployment.schema.behaviour("guided_schedule_crashes"), schedule_of(document)
    key = "guided_decoding_backend"
    if not (crash or crash.otherwise) or not deployment.setting(document, key) or not schedule:
        return
    if reaches_zero(document, deployment, schedule):
        message = "guided decoding with a draft_len_schedule that reaches 0 crashes while CUDA graphs are recorded"
        message += f"{_doubt(deployment, crash)} ({crash.source})"
        severity = "warning" if crash.interval else "error"
        remedy = "leave the schedule out, or keep every length at 1 or more"
        place = f"{SPEC}.draft_len_schedule"
        fix = partial(delete_key, path=place)
        yield _at(document, "TS-LINT-GUIDED-SCHEDULE", severity, place, message, remedy, fix)


def _sampled_acceptance(document: Document, deployment: Deployment, method: SpeculationMethod) -> Iterator[Finding]:
    """Said to those whose file speaks of sampling; greedy decoding is not concerned."""
    rule = deployment.schema.behaviour("rejection_sampling")
    concerned = document.get(REJECTION) is False or document.has(f"{SPEC}.advanced_sampling_mode")
    if not rule or not method.one_model or not concerned or document.get(REJECTION) is True:
        return
    message = "without use_rejection_sampling a sampled draft is accepted only where the target's own sample equals "
    message += f"it: acceptance falls with temperature ({rule.source})"
    remedy = "measure at your temperature, with use_rejection_sampling on and off"
    key = REJECTION if document.has(REJECTION) else f"{SPEC}.advanced_sampling_mode"
    yield _at(document, "TS-LINT-SAMPLED-ACCEPTANCE", "info", key, message, remedy)


def request_limits(deployment: Deployment, penalties: bool = False) -> dict[str, tuple[str, ...]]:
    """What this release does with request parameters under one-model speculation: those that end the engine, those it
    ignores, and those it refuses; in an unknown interval a parameter stands in each that it may belong to."""
    found: dict[str, tuple[str, ...]] = {}
    for name in ("requests_end_engine", "requests_ignored", "requests_refused"):
        one = deployment.schema.behaviour(name)
        both = [*one.values.get("parameters", ()), *one.otherwise.get("parameters", ())]
        found[name.removeprefix("requests_")] = tuple(dict.fromkeys(both))
    key = deployment.schema.behaviour("penalties_need_a_key")
    asked = tuple(key.values.get("parameters", ()))
    found["ignored"] = tuple(name for name in found["ignored"] if name not in asked or key.interval)
    if key and not penalties:
        found["refused"] += asked
    return found


def _requests(document: Document, deployment: Deployment, method: SpeculationMethod) -> Iterator[Finding]:
    """Requests that would end the engine: what is refused or ignored costs only its own caller, and check says it."""
    if not method.one_model:
        return
    ends = deployment.schema.behaviour("requests_end_engine")
    if ends or ends.otherwise:
        listed = ", ".join(request_limits(deployment)["end_engine"])
        message = f"under speculation a request that asks for {listed} ends the engine for everybody"
        message += f"{_doubt(deployment, ends)} ({ends.source})"
        until = ends.interval and ends.interval.rpartition("by ")[2]
        remedy = "refuse such requests in front of the server" + (f", or use {until} or later" if until else "")
        yield _at(document, "TS-LINT-REQUEST-ENDS-ENGINE", "info", SPEC, message, remedy)
    key = deployment.schema.behaviour("penalties_need_a_key")
    if key and not key.interval and document.get(key.values["key"]) is False:
        names = ", ".join(key.values["parameters"])
        message = f"requests with {names} are refused while enable_penalty is off ({key.source})"
        fix = partial(set_value if document.has(key.values["key"]) else add_key, path=key.values["key"], value=True)
        yield _at(document, "TS-LINT-PENALTIES-OFF", "info", key.values["key"], message, "turn it on", fix)


def _pruned_head(document: Document, deployment: Deployment, method: SpeculationMethod) -> Iterator[Finding]:
    head, target = deployment.head, deployment.target
    rule = deployment.schema.behaviour("pruned_mla_head")
    if not rule or head is None or target is None or not method.reads_target or head.attention != "mla":
        return
    if head.draft_vocab_size is not None and head.draft_vocab_size < target.vocab_size:
        message = f"an MLA head of {head.draft_vocab_size:,} of {target.vocab_size:,} tokens: the engine's loader for "
        message += f"such heads meets d2t and fails ({rule.source})"
        remedy = "train a head with the full vocabulary, or an MHA head"
        yield _at(document, "TS-LINT-PRUNED-MLA-HEAD", "error", SPEC, message, remedy)
