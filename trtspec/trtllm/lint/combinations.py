"""Settings that exclude, require or undo each other: what the schema files say of the release (`exclusive` and `when`
among its behaviours), and the few that compare values."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

from trtspec.trtllm.document import Document, add_key, delete_key, set_value
from trtspec.trtllm.lint.finding import Deployment, Finding, Fix
from trtspec.trtllm.schema import UNKNOWN, Behaviour

CONNECTOR = "kv_connector_config"


def check_combinations(document: Document, deployment: Deployment) -> Iterator[Finding]:
    for one in deployment.schema.combinations():
        finding = _of_release(document, deployment, one)
        if finding is not None:
            yield finding
    yield from _connector(document)
    yield from _helix(document)
    yield from _lists(document)


def _of_release(document: Document, deployment: Deployment, one: Behaviour) -> Finding | None:
    """What a release says of settings beside each other; a warning with the interval where it is not known."""
    words = one.values or one.otherwise
    pair = words.get("exclusive", ())
    when = words.get("when") or dict.fromkeys(pair, "set")
    written = [path for path in when if document.has(path) or path in deployment.argv]
    if any(deployment.schema.current(path) not in deployment.schema.fields for path in written):
        return None  # the key itself is refused
    if not all(_holds(document, deployment, path, wanted) for path, wanted in when.items()):
        return None
    unless = words.get("unless", {})
    if unless and all(_holds(document, deployment, path, wanted) for path, wanted in unless.items()):
        return None
    names = [path.rpartition(".")[2] for path in pair]
    message = words.get("message") or f"{' and '.join(names)} exclude each other"
    severity = words.get("severity", "error")
    if one.interval:
        message += f" (changed {one.interval}; not known for {deployment.version})"
        severity = "warning" if severity == "error" else severity
    key = words.get("at") or next(iter(when))
    code, remedy = words.get("code", "TS-LINT-COMBINATION"), words.get("remedy", "keep one of the two")
    return Finding(code, severity, key, f"{message} ({one.source})", remedy, document.line(key), _fix(document, words))


def _fix(document: Document, words: Any) -> Fix | None:
    if "drop" in words and document.has(words["drop"]):
        return partial(delete_key, path=words["drop"])
    for path, value in words.get("write", {}).items():
        return partial(set_value if document.has(path) else add_key, path=path, value=value)
    return None


def _holds(document: Document, deployment: Deployment, path: str, wanted: Any) -> bool:
    value = deployment.setting(document, path, _default(document, deployment, path))
    if wanted in ("given", "empty"):
        written = document.has(path) or path in deployment.argv
        return written and (wanted == "given" or value is None)
    if wanted == "some":
        return bool(value)
    if wanted in ("set", "unset"):
        return (value not in (None, False, 0, "")) == (wanted == "set")  # an empty mapping is an object
    if isinstance(wanted, dict):
        (word, other), *_ = wanted.items()
        if word in ("above", "below"):
            return isinstance(value, (int, float)) and (value > other if word == "above" else value < other)
        return not any(_same(value, item) for item in (other if word == "outside" else [other]))
    return any(_same(value, item) for item in (wanted if isinstance(wanted, list) else [wanted]))


def _default(document: Document, deployment: Deployment, path: str) -> Any:
    """What the engine takes where the file says nothing; an object that is not written has no settings."""
    parent, field = path.rpartition(".")[0], deployment.schema.fields.get(deployment.schema.current(path))
    if field is None or field.default is UNKNOWN or field.is_object or (parent and not document.has(parent)):
        return None
    return field.default


def _same(value: Any, wanted: Any) -> bool:
    if isinstance(wanted, bool):
        return value is wanted
    if isinstance(value, str) and isinstance(wanted, str):
        return value.lower() == wanted.lower()
    return value == wanted


def _at(
    document: Document, code: str, severity: Any, key: str, message: str, remedy: str = "", fix: Any = None
) -> Finding:
    return Finding(code, severity, key, message, remedy, document.line(key), fix)


def _connector(document: Document) -> Iterator[Finding]:
    if not isinstance(document.get(CONNECTOR), dict):
        return
    parts = [
        f"{CONNECTOR}.{name}" for name in ("connector_module", "connector_scheduler_class", "connector_worker_class")
    ]
    if not document.get(f"{CONNECTOR}.connector") and not all(document.get(part) for part in parts):
        message = "a KV connector is a preset (`connector`) or a module with both of its classes"
        remedy = "write `connector: kvbm`, or all three"
        yield _at(document, "TS-LINT-KV-CONNECTOR", "error", CONNECTOR, message, remedy)


def _helix(document: Document) -> Iterator[Finding]:
    blocks = document.get("cp_config.tokens_per_block")
    own = document.get("kv_cache_config.tokens_per_block", 32)
    if document.get("cp_config.cp_type") == "HELIX" and blocks is not None and blocks != own:
        message = f"HELIX needs equal blocks: cp_config.tokens_per_block is {blocks}, kv_cache_config's is {own}"
        yield _at(document, "TS-LINT-COMBINATION", "error", "cp_config.tokens_per_block", message, f"write {own}")


def _lists(document: Document) -> Iterator[Finding]:
    """Lists whose items must fit each other, and a largest size that must be the largest listed."""
    for path, entry in document.entries.items():
        buckets = entry.value if path.startswith("prometheus_metrics_config.") else None
        if isinstance(buckets, list) and _numbers(buckets) and any(a >= b for a, b in pairwise(buckets)):
            yield _at(document, "TS-LINT-COMBINATION", "error", path, f"{entry.name} must increase", "sort it")
    for sizes, largest in (("num_tokens", "max_num_token"), ("seq_lens", "max_seq_len")):
        for parent in ("cuda_graph_config", "encoder_cuda_graph_config"):
            listed, most = document.get(f"{parent}.{sizes}"), document.get(f"{parent}.{largest}")
            if _numbers(listed) and isinstance(most, int) and most not in (0, max(listed)):
                message = f"{largest} {most} and the largest of {sizes}, {max(listed)}, must be equal"
                fix = partial(delete_key, path=f"{parent}.{largest}")
                place = f"{parent}.{largest}"
                yield _at(document, "TS-LINT-GRAPH-SIZES", "error", place, message, f"keep {sizes} only", fix)
    old, new = document.get("torch_compile_config.capture_num_tokens"), document.get("prefill_capture_num_tokens")
    if isinstance(old, list) and isinstance(new, list) and set(old) != set(new):
        message = "capture_num_tokens and prefill_capture_num_tokens are two names of one setting and differ"
        key = "torch_compile_config.capture_num_tokens"
        fix = partial(delete_key, path=key)
        yield _at(document, "TS-LINT-COMBINATION", "error", key, message, "keep prefill_capture_num_tokens", fix)
    balancer, place = "moe_config.load_balancer", "kv_cache_config.disk_cache_path"
    assigned = document.get(f"{balancer}.initial_global_assignments")
    if isinstance(assigned, dict) and not all(isinstance(layer, int) for layer in assigned):
        message = "initial_global_assignments maps the number of each layer to its experts"
        key = f"{balancer}.initial_global_assignments"
        yield _at(document, "TS-LINT-COMBINATION", "error", key, message, "write numbers of layers as keys")
    size, folder = document.get("kv_cache_config.disk_cache_size"), document.get(place)
    if isinstance(size, int) and size > 0 and isinstance(folder, str) and folder and not Path(folder).is_dir():
        message = f"{folder} is not a directory here; the engine stops where it is missing"
        yield _at(document, "TS-LINT-DISK-CACHE-PATH", "warning", place, message, "make it on the machine that serves")
    ratios = document.get("kv_cache_config.pool_ratio")
    if _numbers(ratios) and (min(ratios) <= 0 or not math.isclose(sum(ratios), 1, rel_tol=0, abs_tol=1e-6)):
        message = "pool_ratio values must be above 0 and add up to 1"
        yield _at(document, "TS-LINT-COMBINATION", "error", "kv_cache_config.pool_ratio", message, "correct the shares")


def _numbers(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(item, (int, float)) for item in value)
