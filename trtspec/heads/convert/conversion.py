"""Rewrites an Eagle3 head from one project's layout to another's, or says why the other cannot express it.

The source is read into the canonical record (HeadSpec); names, maps, config keys and the counting of layers are then
written anew for the destination. Weights pass through unchanged, a piece at a time, so memory does not grow with them.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from trtspec.checkpoint.describe import head_facts
from trtspec.checkpoint.headers import Checkpoint, TensorInfo
from trtspec.checkpoint.heads.config import Verifier, shared_config
from trtspec.checkpoint.heads.dialects import OPTIONS, Dialect, recorded
from trtspec.checkpoint.heads.pairing import pair_problems
from trtspec.checkpoint.heads.problems import ROPE_BASE
from trtspec.checkpoint.heads.read import no_eagle3_head, read_head
from trtspec.checkpoint.heads.shapes import canonical_names
from trtspec.checkpoint.heads.values import value_problems
from trtspec.checkpoint.hub import Resolved
from trtspec.errors import Problem, UsageError, has_errors
from trtspec.heads.card import conversion_card, serving_commands
from trtspec.heads.convert.pickles import opened
from trtspec.heads.convert.rules import CURED, DEPENDS, cautions, refusals
from trtspec.heads.convert.tensors import (
    Choice,
    Lender,
    OutputTensor,
    plan_tensors,
    vocabulary_targets,
    with_ownership,
    write_tensors,
)  # fmt: skip
from trtspec.report import fsync_directory, peak_rss, provenance, refuse_overwrite, write_atomic, write_json
from trtspec.specs import HeadSpec, ModelSpec

OWN_FILES = ("config.json", "provenance.json", "README.md", "LICENSE", "model.safetensors.index.json")


@dataclass(frozen=True)
class Options:
    """`to` and `from_` are names of trtspec.checkpoint.heads.dialects.OPTIONS; `from_` None detects."""

    to: str
    from_: str | None = None
    lm_head: Choice = "auto"
    embed_tokens: Choice = "auto"
    rope_theta: float | None = None
    dry_run: bool = False
    force: bool = False


def convert_head(
    source: Resolved,
    output: Path,
    options: Options,
    target: Resolved | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, Any]:
    """Converts and returns what was done; with errors among `problems` nothing is written and `output` is None.

    Keys: output, from, to, tensors, parameters, bytes_out, seconds, peak_rss_bytes, eagle3_layers_to_capture, serve,
    problems (Problem objects) and the facts of `trtspec inspect`. Raises UsageError for an output that is in the way.
    """
    begun = time.monotonic()
    path = _local(source)
    check_output(output, path, options.force)
    with ExitStack() as stack:
        checkpoint = stack.enter_context(opened(path, output.parent if output.parent.is_dir() else None))
        wrong = no_eagle3_head(checkpoint.config, checkpoint.tensors)
        if wrong is not None:
            return {"output": None, "from": None, "to": options.to, "dry_run": options.dry_run, "problems": [wrong]}
        plan = _plan(checkpoint, path, options, target)
        result = _facts(plan, output, options, target)
        if has_errors(plan.problems) or options.dry_run:
            return result | {"output": None, "seconds": round(time.monotonic() - begun, 3)}
        _write(plan, output, result, source, target, options, progress)
    return result | {"seconds": round(time.monotonic() - begun, 3), "peak_rss_bytes": peak_rss()}


@dataclass(frozen=True)
class ConversionPlan:
    """All that is known before anything is written."""

    source: Checkpoint
    path: Path
    dialect: Dialect
    found: HeadSpec  # as read
    spec: HeadSpec  # as written
    entries: dict[str, OutputTensor]
    config: dict[str, Any]
    problems: list[Problem]


def _plan(checkpoint: Checkpoint, path: Path, options: Options, target: Resolved | None) -> ConversionPlan:
    found, problems = read_head(checkpoint, OPTIONS[options.from_] if options.from_ else None)
    dialect = OPTIONS[options.to]
    model = target.target_spec() if target is not None else None
    spec, problems = found, _left(checkpoint, found, problems, options)
    if options.rope_theta is not None:
        spec = replace(spec, rope=replace(spec.rope, theta=options.rope_theta))
    if spec.aux_layers is None and model is not None and spec.num_aux == 3:
        spec = replace(spec, aux_layers=model.default_aux_layers)
    if model is not None:
        problems += [problem for problem in pair_problems(spec, model) if problem.severity == "error"]
    lender = _lender(target, model)
    entries, about_tensors = plan_tensors(checkpoint, spec, dialect, lender, options.lm_head, options.embed_tokens)
    if not has_errors(problems):
        problems += about_tensors
        problems += value_problems(checkpoint, _copied(entries, checkpoint))
    problems += refusals(spec, dialect, model)
    config: dict[str, Any] = {}
    if not has_errors(problems):
        problems += cautions(spec, dialect)
        spec = with_ownership(spec, dialect, entries)
        verifier = Verifier(target.name, tuple(target.config().get("architectures") or ())) if target else Verifier()
        shared = shared_config(checkpoint.config, spec, entries["fc.weight"].dtype)
        config = dialect.write(shared, spec, dialect.ids(spec.aux_layers), verifier)
    return ConversionPlan(checkpoint, path, dialect, found, spec, entries, config, problems)


def _copied(entries: dict[str, OutputTensor], source: Checkpoint) -> dict[str, TensorInfo]:
    return {name: entry.info for name, entry in entries.items() if entry.info and entry.checkpoint is source}


def _left(checkpoint: Checkpoint, found: HeadSpec, problems: list[Problem], options: Options) -> list[Problem]:
    """The problems that writing anew does not mend by itself."""
    mended = CURED | DEPENDS
    if found.has_lm_head:
        mended = mended | {"TS-HEAD-TIED"}
    if options.rope_theta is not None:
        problems = [one for one in problems if (one.code, one.where) != ("TS-HEAD-ROPE-TWICE", ROPE_BASE)]
    tensors = canonical_names(checkpoint.tensors)
    if "d2t" not in tensors and "t2d" in tensors:
        targets = vocabulary_targets(checkpoint, tensors)
        if targets is not None and len(targets) == found.draft_vocab_size:
            mended = mended | {"TS-HEAD-D2T-MISSING"}
    return [problem for problem in problems if problem.code not in mended]


def _lender(target: Resolved | None, model: ModelSpec | None) -> Lender | None:
    if target is None or model is None or target.path is None or not any(target.path.glob("*.safetensors")):
        return None
    return Lender(Checkpoint.open(target.path), model)


def _facts(plan: ConversionPlan, output: Path, options: Options, target: Resolved | None) -> dict[str, Any]:
    spec, model = plan.spec, target.target_spec() if target is not None else None
    layers = list(spec.aux_layers) if spec.aux_layers is not None else None
    default = list(model.default_aux_layers) if model is not None else None
    needed = layers if layers is not None and sorted(layers) != default else None
    facts = head_facts(spec, plan.config) if plan.config else {}
    return facts | {
        "output": str(output),
        "from": plan.found.dialect,
        "to": options.to,
        "dry_run": options.dry_run,
        "tensors": len(plan.entries),
        "parameters": sum(_count(entry) for name, entry in plan.entries.items() if name not in ("d2t", "t2d")),
        "bytes_out": sum(_bytes(entry) for entry in plan.entries.values()),
        "rope": {"type": spec.rope.rope_type, "theta": spec.rope.theta},
        "eagle3_layers_to_capture": needed,
        "target_default_layers": default,
        "serve": serving_commands(spec, str(output), target.name if target else None, needed),
        "config": plan.config,
        "problems": plan.problems,
    }


def _count(entry: OutputTensor) -> int:
    size = 1
    for length in entry.shape:
        size *= length
    return size


def _bytes(entry: OutputTensor) -> int:
    if entry.info is not None:
        return entry.info.nbytes
    assert entry.values is not None
    return entry.values.numel() * entry.values.element_size()


def _write(
    plan: ConversionPlan,
    output: Path,
    result: dict[str, Any],
    source: Resolved,
    target: Resolved | None,
    options: Options,
    progress: Callable[[int, int], None] | None,
) -> None:
    """Everything goes to a directory beside `output` that takes its name when it is complete."""
    partial = _parent(output) / f".{output.name}.{os.getpid()}.partial"
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        digests = write_tensors(partial / "model.safetensors", plan.entries, progress)
        origin: dict[str, Any] = {"head": source.name, "dialect": plan.found.dialect, "config": plan.source.config}
        origin |= {"provenance": recorded(plan.path) or None, "target": target.name if target else None}
        chosen = {"to": options.to, "from": options.from_, "lm_head": options.lm_head,
                  "embed_tokens": options.embed_tokens, "rope_theta": options.rope_theta}  # fmt: skip
        record = provenance("convert", origin, chosen, dialect=plan.dialect.name, tensors=digests)
        write_json(partial / "provenance.json", record)
        write_atomic(partial / "README.md", conversion_card(plan.spec, result, record))
        for licence in sorted(plan.path.glob("LICENSE*")):
            write_atomic(partial / licence.name, licence.read_bytes())
        write_json(partial / "config.json", plan.config)
        _swap(partial, output)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def _swap(partial: Path, output: Path) -> None:
    """Renames `partial` to `output`; what was there is set aside first and removed last."""
    old = partial.with_suffix(".old")
    if output.exists():
        os.rename(output, old)
    os.rename(partial, output)
    fsync_directory(output.parent)
    shutil.rmtree(old, ignore_errors=True)


def check_output(output: Path, source: Path, force: bool) -> None:
    """Raises UsageError where writing would overwrite; with `force`, only a head checkpoint may be replaced."""
    if output.resolve() == source.resolve() or output.resolve() in source.resolve().parents:
        raise UsageError(f"{output} is, or holds, the head that is converted", "choose another --output")
    refuse_overwrite(output, force)
    if not output.is_dir():
        return
    strangers = [file.name for file in output.iterdir() if file.suffix != ".safetensors" and file.name not in OWN_FILES]
    if strangers:
        raise UsageError(
            f"{output} holds more than a head checkpoint ({sorted(strangers)[0]}), so --force does not replace it",
            "choose another --output, or remove the directory yourself",
        )


def _parent(output: Path) -> Path:
    output.parent.mkdir(parents=True, exist_ok=True)
    return output.parent.resolve()


def _local(source: Resolved) -> Path:
    if source.path is None:
        raise UsageError(f"{source.name} is not on this machine", f"run `hf download {source.hub_id}` first")
    return source.path
