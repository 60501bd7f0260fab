"""Rules about speculative_config itself: what must be there, what excludes what, and what changed its meaning."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

from trtspec.trtllm.document import Document, add_key, delete_key, set_value
from trtspec.trtllm.lint.finding import Deployment, Finding
from trtspec.trtllm.releases import gate

SPEC = "speculative_config"
EAGLE = ("Eagle", "Eagle3")
MODEL_KEYS = (f"{SPEC}.speculative_model_dir", f"{SPEC}.speculative_model")


def kind(document: Document) -> str | None:
    value = document.get(f"{SPEC}.decoding_type")
    return value if isinstance(value, str) else None


def draft_length(document: Document) -> int:
    """Draft tokens per step that the file asks for; 0 without speculation."""
    value = document.get(f"{SPEC}.max_draft_len")
    return value if isinstance(value, int) and not isinstance(value, bool) and kind(document) else 0


def check_speculation(document: Document, deployment: Deployment) -> Iterator[Finding]:
    if isinstance(document.get(SPEC), dict) and kind(document) is None:
        message = "speculative_config has no decoding_type"
        yield _finding(document, "TS-LINT-NO-DECODING-TYPE", "error", SPEC, message, "add `decoding_type: Eagle`")
    if kind(document) in EAGLE:
        yield from _required(document)
        yield from _eagle_modes(document, deployment)
    yield from _schedule(document, deployment)
    yield from _switch_off(document)
    yield from _sampling(document, deployment)
    yield from _backend(document)


def _finding(
    document: Document, code: str, severity: Any, key: str, message: str, remedy: str = "", fix: Any = None
) -> Finding:
    return Finding(code, severity, key, message, remedy, document.line(key), fix)


def _required(document: Document) -> Iterator[Finding]:
    if not any(document.get(key) for key in MODEL_KEYS):
        message = "an Eagle head is asked for and none is named: the engine stops with `Draft model must be provided`"
        remedy = "add `speculative_model_dir: <head>`"
        yield _finding(document, "TS-LINT-EAGLE-NO-HEAD", "error", SPEC, message, remedy)
    key = f"{SPEC}.max_draft_len"
    if document.get(key) in (None, 0):
        message = "max_draft_len must be above 0 for Eagle"
        change = set_value if document.has(key) else add_key
        fix = partial(change, path=key, value=3)
        yield _finding(document, "TS-LINT-EAGLE-NO-DRAFT-LEN", "error", key, message, "write `max_draft_len: 3`", fix)
    key = f"{SPEC}.num_eagle_layers"
    if document.has(key):
        message = "num_eagle_layers is overwritten by max_draft_len; it belongs to the TensorRT-engine backend"
        fix = partial(delete_key, path=key)
        yield _finding(document, "TS-LINT-NO-EFFECT", "warning", key, message, "remove it", fix)
    if all(document.has(key) for key in MODEL_KEYS):
        message = "speculative_model and speculative_model_dir are two names of one setting"
        remedy = "keep speculative_model_dir, which every version takes"
        fix = partial(delete_key, path=MODEL_KEYS[1])
        yield _finding(document, "TS-LINT-DUPLICATE-KEY", "error", MODEL_KEYS[1], message, remedy, fix)


def _eagle_modes(document: Document, deployment: Deployment) -> Iterator[Finding]:
    key = f"{SPEC}.eagle3_one_model"
    if document.get(key) is False:
        fix = partial(delete_key, path=key)
        mla = deployment.head is not None and deployment.head.attention == "mla"
        if mla:
            # the newest classes ignore the key; which release was the first to do so is not known
            ignored = deployment.schema.line == "1.4"
            message = "two-model mode has no class for an MLA head: `Unknown architecture for AutoModelForCausalLM`"
            message += "; later releases ignore the key and use one model" if ignored else ""
            severity = "warning" if ignored else "error"
            yield _finding(document, "TS-LINT-MLA-TWO-MODEL", severity, key, message, "remove eagle3_one_model", fix)
        else:
            message = "two-model mode is deprecated, loses accuracy on long prompts in some releases and the overlap"
            remedy = "remove eagle3_one_model: one model is the default"
            yield _finding(document, "TS-LINT-TWO-MODEL", "warning", key, f"{message} scheduler", remedy, fix)
    key = f"{SPEC}.use_dynamic_tree"
    if document.get(key) is True:
        message = "dynamic trees are not supported for targets with latent attention, which every Kimi-K2 has"
        fix = partial(delete_key, path=key)
        yield _finding(document, "TS-LINT-DYNAMIC-TREE", "error", key, message, f"remove {key}", fix)
        if document.get(f"{SPEC}.eagle_choices"):
            message = "eagle_choices and use_dynamic_tree exclude each other"
            yield _finding(
                document, "TS-LINT-EXCLUSIVE-KEYS", "error", f"{SPEC}.eagle_choices", message, "keep neither"
            )
    key = f"{SPEC}.eagle3_model_arch"
    if document.get(key) == "mistral_large3":
        message = "mistral_large3 names another head class; llama3 covers the MHA and MLA heads of Kimi"
        fix = partial(delete_key, path=key)
        yield _finding(document, "TS-LINT-HEAD-ARCH", "error", key, message, "remove eagle3_model_arch", fix)


def _schedule(document: Document, deployment: Deployment) -> Iterator[Finding]:
    key, concurrency = f"{SPEC}.draft_len_schedule", f"{SPEC}.max_concurrency"
    schedule = document.get(key)
    upper_bounds = deployment.schema.line in ("1.3", "1.4")
    if document.get(concurrency) and upper_bounds:
        message = "above max_concurrency the draft length is 0, and acceptance may stay collapsed after a burst"
        yield _finding(document, "TS-LINT-SCHEDULE-ENDS-AT-ZERO", "warning", concurrency, message, "leave it out")
        if schedule:
            message = "max_concurrency and draft_len_schedule exclude each other"
            yield _finding(document, "TS-LINT-EXCLUSIVE-KEYS", "error", concurrency, message, "keep one of the two")
    if not isinstance(schedule, dict) or not schedule or not all(isinstance(k, int) for k in schedule):
        return
    if deployment.schema.neighbour is not None and {deployment.schema.line, deployment.schema.neighbour.line} == {
        "1.2",
        "1.3",
    }:
        message = "the keys turned from lower bounds into upper bounds of the batch size, and it is not known whether "
        message += f"{deployment.version} is before or after ({deployment.schema.boundary})"
        yield _finding(document, "TS-LINT-SCHEDULE-MEANING", "error", key, message, f"remove {key}")
        return
    yield from _schedule_values(document, schedule, upper_bounds)


def _schedule_values(document: Document, schedule: dict[int, int], upper_bounds: bool) -> Iterator[Finding]:
    key, longest = f"{SPEC}.draft_len_schedule", document.get(f"{SPEC}.max_draft_len")
    lengths = [length for length in schedule.values() if isinstance(length, int)]
    if min(schedule) < 1 or min(lengths, default=0) < 0 or (isinstance(longest, int) and max(lengths) > longest):
        message = f"batch sizes start at 1 and draft lengths lie between 0 and max_draft_len ({longest})"
        yield _finding(document, "TS-LINT-BAD-SCHEDULE", "error", key, message, "mend the entries out of range")
    first = schedule[min(schedule)] if upper_bounds else schedule.get(1)
    if first != longest:
        wanted = "the smallest key" if upper_bounds else "key 1"
        message = f"{wanted} must have the value of max_draft_len ({longest}), not {first}"
        yield _finding(document, "TS-LINT-BAD-SCHEDULE", "error", key, message, f"write {wanted}: {longest}")
    if upper_bounds or schedule[max(schedule)] == 0:
        message = "large batches draft nothing, and acceptance may stay collapsed after the burst"
        remedy = "leave the schedule out, or let its last key cover max_batch_size with a value of 1 or more"
        if not upper_bounds or max(schedule) < (document.get("max_batch_size") or 2048) or 0 in schedule.values():
            yield _finding(document, "TS-LINT-SCHEDULE-ENDS-AT-ZERO", "warning", key, message, remedy)


def _switch_off(document: Document) -> Iterator[Finding]:
    for name in ("acceptance_rate_threshold", "acceptance_length_threshold"):
        key = f"{SPEC}.{name}"
        if document.get(key):
            message = f"once acceptance falls below {name}, speculation stays off until the server is restarted"
            fix = partial(delete_key, path=key)
            remedy = "leave it out, and watch acceptance from outside"
            yield _finding(document, "TS-LINT-SWITCHES-OFF", "warning", key, message, remedy, fix)


def _sampling(document: Document, deployment: Deployment) -> Iterator[Finding]:
    """One-model speculation that ignores temperature: decisive in the 1.2 line, nothing in the later ones."""
    key = f"{SPEC}.allow_advanced_sampling"
    needed = gate("sampled_speculation")
    state = needed.state(deployment.schema.version)
    known = key in deployment.schema.fields
    if kind(document) in EAGLE and known and state != "yes" and document.get(key) is not True:
        message = "without allow_advanced_sampling one-model speculation decodes greedily whatever a request asks"
        if state == "unknown":
            message += f" (mended {needed.interval}; not known for {deployment.version})"
        change = set_value if document.has(key) else add_key
        fix = partial(change, path=key, value=True)
        remedy = "add `allow_advanced_sampling: true`"
        yield _finding(document, "TS-LINT-GREEDY-ONLY", "warning", key, message, remedy, fix)


def _backend(document: Document) -> Iterator[Finding]:
    value = document.get("backend")
    if kind(document) and value in ("tensorrt", "trt", "_autodeploy"):
        message = f"backend {value} does not run Eagle3 heads on Blackwell"
        fix = partial(delete_key, path="backend")
        yield _finding(document, "TS-LINT-BACKEND", "error", "backend", message, "use the pytorch backend", fix)
    if kind(document) and (document.get("max_beam_width") or 1) > 1:
        message = "nobody has examined beam search together with speculation"
        yield _finding(document, "TS-LINT-UNTESTED", "warning", "max_beam_width", message, "leave it at 1")
    if kind(document) and (document.get("pipeline_parallel_size") or 1) > 1:
        message = "no published recipe runs an Eagle3 head with pipeline parallelism"
        yield _finding(
            document, "TS-LINT-UNTESTED", "warning", "pipeline_parallel_size", message, "use tensor parallel"
        )
