"""Rewrites an Eagle3 head from one project's layout to another's, or says why not.

The source is read into the canonical record (HeadSpec). Names, maps, config keys and layer ids are
then written for the destination. Weights pass through unchanged, a chunk at a time, so memory does
not grow with them. data/dialects.yaml lists the properties of a head that a dialect cannot express,
each with its reason.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from trtspec.checkpoint.headers import Checkpoint
from trtspec.checkpoint.heads.config import DIALECT_TABLE, Verifier, shared_config, write_config
from trtspec.checkpoint.heads.dialects import DIALECTS, OPTIONS, Dialect
from trtspec.checkpoint.heads.pairing import pair_problems
from trtspec.checkpoint.heads.problems import ROPE_BASE
from trtspec.checkpoint.heads.read import head_facts, no_eagle3_head, read_head
from trtspec.checkpoint.heads.shapes import canonical_names
from trtspec.checkpoint.hub import Resolved, commit_record
from trtspec.checkpoint.identity import recorded
from trtspec.checkpoint.output import HEAD_FILES, OutputDirectory, carried_names, carry_files
from trtspec.checkpoint.target_problems import sound
from trtspec.checkpoint.values import embedding_problems, head_value_problems
from trtspec.errors import CheckFailed, Problem, UsageError, errors_in, has_errors
from trtspec.heads.card import conversion_card, serving_commands
from trtspec.heads.convert.head_tensors import (
    EMBED,
    Choice,
    OutputTensor,
    SharedWeights,
    plan_tensors,
    sizes,
    vocabulary_targets,
    with_ownership,
    write_tensors,
)
from trtspec.report import (
    OutputOptions,
    ProgressBar,
    peak_rss,
    provenance,
    write_atomic,
    write_json,
)
from trtspec.specs import HeadSpec, ModelSpec


@dataclass(frozen=True)
class Options:
    """Options of a conversion.

    Args:
        to: name of the destination's dialect, a key of trtspec.checkpoint.heads.dialects.OPTIONS.
        from_: name of the source's dialect, a key of OPTIONS. None: the dialect is detected.
        embed_tokens: choice of the embedding that is written (see `plan_tensors`).
        rope_theta: rope base that replaces the source's. None: the source's is kept.
    """

    to: str
    from_: str | None = None
    embed_tokens: Choice = "auto"
    rope_theta: float | None = None
    dry_run: bool = False
    force: bool = False


def convert_head(
    source: Resolved,
    output: Path,
    options: Options,
    target: Resolved | None = None,
    bar: ProgressBar = ProgressBar(),
) -> HeadConversion:
    """Converts a head to another dialect, and writes it to `output`.

    Nothing is written in a dry run, or if the problems of the result have errors. A dry run makes
    every check of a conversion, and reads every value of every tensor. Raises CheckFailed if the
    source is not an Eagle3 head. Raises UsageError if `output` is the source or is in use. Raises
    TrtspecError if the disk is too small.

    Args:
        target: target of the head. None: checks that need the target are left out.
    """
    start = time.monotonic()
    checkpoint = source.checkpoint
    path = checkpoint.path
    source_path = path.resolve()
    output_path = output.resolve()
    if output_path == source_path or output_path in source_path.parents:
        message = f"{output} is, or holds, the head that is converted"
        raise UsageError(message, "choose another `output`")
    licences = carried_names(path, "LICENSE*")
    names = frozenset((*HEAD_FILES, *licences))
    directory = OutputDirectory(output, "convert", names, size=0)
    # A killed conversion starts over, because it keeps no state to resume from.
    output_options = OutputOptions(options.dry_run, restart=True, force=options.force)
    directory.check(output_options)
    refusal = no_eagle3_head(checkpoint.config, checkpoint.tensors)
    if refusal is not None:
        raise CheckFailed(f"{source.name}: {refusal.message}", refusal.remedy, refusal.code)
    planned, entries = _plan(checkpoint, output, options, target)
    # The size of the output is known only now, so the free disk is checked a second time.
    directory = replace(directory, size=planned.bytes_out)
    refused = has_errors(planned.problems)
    if not refused:
        directory.check(output_options)
    if refused or options.dry_run:
        return replace(planned, seconds=round(time.monotonic() - start, 3))
    conversion = replace(planned, output=output)
    with directory.claim({}, output_options):
        tensors = write_tensors(output / "model.safetensors", entries, bar)
        carry_files(path, output, licences)
        record = _provenance(conversion, source, target, options, tensors)
        write_json(output / "provenance.json", record)
        card = conversion_card(conversion.head, conversion.to_json(), record)
        write_atomic(output / "README.md", card)
        # config.json comes last, because a directory without it is not a head.
        write_json(output / "config.json", conversion.config)
        directory.finish()
    seconds = round(time.monotonic() - start, 3)
    return replace(conversion, seconds=seconds, peak_rss_bytes=peak_rss())


def _provenance(
    conversion: HeadConversion,
    source: Resolved,
    target: Resolved | None,
    options: Options,
    tensors: dict[str, dict[str, Any]],
) -> dict[str, Any]:
    """Returns the provenance record of a written head.

    Args:
        tensors: source and digest of each tensor (see `write_tensors`).
    """
    checkpoint = source.checkpoint
    origin = {
        "head": source.name,
        "dialect": conversion.source_dialect,
        "config": checkpoint.config,
        "provenance": recorded(checkpoint.path) or None,
        "target": target.name if target else None,
        **commit_record(checkpoint.path),
    }
    chosen = {
        "to": options.to,
        "from": options.from_,
        "embed_tokens": options.embed_tokens,
        "rope_theta": options.rope_theta,
    }
    repairs = [problem.to_dict() for problem in conversion.repairs]
    dialect = conversion.head.dialect
    record: dict[str, Any] = provenance(
        "convert", origin, chosen, dialect=dialect, tensors=tensors, repairs=repairs
    )
    return record


@dataclass(frozen=True)
class HeadConversion:
    """The result of a conversion or of a dry run.

    Args:
        output: directory of the written head. None in a dry run, and if the problems have errors.
        to: name of the destination's dialect.
        problems: errors, warnings and notes about the conversion.
        repairs: errors and warnings of the source that the written head no longer has.
        source_dialect: name of the source's dialect.
        head: specification of the head as it is written.
        config: contents of the written config.json. Empty if the problems have errors.
        tensors: number of tensors.
        parameters: number of parameters, without the vocabulary maps.
        bytes_out: size of all tensors in bytes.
        capture: layer outputs that TensorRT-LLM needs in its configuration. None if its default is
            right or the layers are unknown.
        target_default_layers: layer outputs that engines capture by default for the target. None
            without a target.
        serve: command that serves the written head, by engine.
    """

    output: Path | None
    to: str
    dry_run: bool
    problems: list[Problem]
    repairs: list[Problem]
    source_dialect: str
    head: HeadSpec
    config: dict[str, Any]
    tensors: int
    parameters: int
    bytes_out: int
    capture: list[int] | None
    target_default_layers: list[int] | None
    serve: dict[str, str]
    seconds: float = 0.0
    peak_rss_bytes: int | None = None

    def to_json(self) -> dict[str, Any]:
        """Returns the fields of the output of `trtspec convert --json`, except `problems`."""
        facts: dict[str, Any] = {}
        if self.config:
            facts = head_facts(self.head, self.config)
        rope = self.head.rope
        result = facts | {
            "output": str(self.output) if self.output else None,
            "from": self.source_dialect,
            "repairs": [problem.to_dict() for problem in self.repairs],
            "rope": {"type": rope.rope_type, "theta": rope.theta},
            "eagle3_layers_to_capture": self.capture,
            "seconds": self.seconds,
            "to": self.to,
            "dry_run": self.dry_run,
            "tensors": self.tensors,
            "parameters": self.parameters,
            "bytes_out": self.bytes_out,
            "target_default_layers": self.target_default_layers,
            "serve": self.serve,
            "config": self.config,
        }
        if self.peak_rss_bytes is not None:
            result["peak_rss_bytes"] = self.peak_rss_bytes
        return result


def _plan(
    checkpoint: Checkpoint, output: Path, options: Options, target: Resolved | None
) -> tuple[HeadConversion, dict[str, OutputTensor]]:
    """Plans a conversion without writing anything.

    Returns the conversion with all problems, and the tensors by their names in the destination.
    """
    stated_dialect = OPTIONS[options.from_] if options.from_ else None
    source_spec, source_problems = read_head(checkpoint, stated_dialect)
    dialect = OPTIONS[options.to]
    target_spec = None
    default_layers = None
    if target is not None:
        target_spec = target.target_spec()
        default_layers = list(target_spec.default_aux_layers)
    problems = _unrepaired(checkpoint, source_spec, source_problems, options)
    repairs = [
        problem
        for problem in source_problems
        if problem not in problems and problem.code not in DESTINATION_CODES
    ]
    spec = source_spec
    if options.rope_theta is not None:
        rope = replace(spec.rope, theta=options.rope_theta)
        spec = replace(spec, rope=rope)
    if target_spec is not None:
        # A source without layer ids is taken to capture the target's three default layers.
        if spec.aux_layers is None and spec.num_aux == 3:
            spec = replace(spec, aux_layers=target_spec.default_aux_layers)
        problems += errors_in(pair_problems(spec, target_spec))
    shared_weights = _shared_weights(target, target_spec)
    problems += refusals(spec, dialect, target_spec)
    refused = has_errors(problems)
    if refused:
        shared_weights = None  # an error in the headers is enough, so no weight is read
    entries, tensor_problems = plan_tensors(
        checkpoint, spec, dialect, shared_weights, options.embed_tokens
    )
    if not refused:
        problems += tensor_problems
        problems += _value_problems(checkpoint, entries, shared_weights, options.dry_run)
    config: dict[str, Any] = {}
    if not has_errors(problems):
        problems += cautions(spec, dialect)
        spec = with_ownership(spec, dialect, entries)
        config = _config(checkpoint, spec, dialect, entries, target)
    parameters, size = sizes(entries)
    # TensorRT-LLM captures the target's default layers unless its configuration names others.
    capture = None
    if spec.aux_layers is not None and sorted(spec.aux_layers) != default_layers:
        capture = list(spec.aux_layers)
    target_name = target.name if target else None
    conversion = HeadConversion(
        output=None,
        to=options.to,
        dry_run=options.dry_run,
        problems=problems,
        repairs=repairs,
        source_dialect=source_spec.dialect,
        head=spec,
        config=config,
        tensors=len(entries),
        parameters=parameters,
        bytes_out=size,
        capture=capture,
        target_default_layers=default_layers,
        serve=serving_commands(spec, str(output), target_name, capture),
    )
    return conversion, entries


def _config(
    source: Checkpoint,
    spec: HeadSpec,
    dialect: Dialect,
    entries: dict[str, OutputTensor],
    target: Resolved | None,
) -> dict[str, Any]:
    """Returns the contents of config.json of the written head."""
    # Some dialects have the target's name and architectures in their config.
    verifier = Verifier()
    if target:
        architectures = target.config().get("architectures") or ()
        verifier = Verifier(target.name, tuple(architectures))
    shared = shared_config(source.config, spec, entries["fc.weight"].dtype)
    layer_ids = dialect.ids(spec.aux_layers)
    return write_config(dialect.config, shared, spec, layer_ids, verifier)


def _unrepaired(
    checkpoint: Checkpoint, spec: HeadSpec, problems: list[Problem], options: Options
) -> list[Problem]:
    """Returns the problems of the source that the conversion does not fix."""
    repaired = REPAIRED_CODES | DESTINATION_CODES
    if options.rope_theta is not None:
        # The option decides between two rope bases that contradict each other.
        base_twice = ("TS-HEAD-ROPE-TWICE", ROPE_BASE)
        problems = [problem for problem in problems if (problem.code, problem.where) != base_twice]
    tensors = canonical_names(checkpoint.tensors)
    # A missing d2t is rebuilt from t2d, if t2d has as many tokens as the draft vocabulary.
    if "d2t" not in tensors and "t2d" in tensors:
        targets = vocabulary_targets(checkpoint, tensors)
        if targets is not None and len(targets) == spec.draft_vocab_size:
            repaired = repaired | {"TS-HEAD-D2T-MISSING"}
    return [problem for problem in problems if problem.code not in repaired]


# Codes of problems of the source that every conversion fixes.
REPAIRED_CODES = {
    "TS-HEAD-MODEL-PREFIX", "TS-HEAD-CONFIG", "TS-HEAD-ROPE-THETA", "TS-HEAD-T2D-VALUES",
    # Neither an `auto_map` nor a Python file of the source is written.
    "TS-HEAD-CODE", "TS-CODE-REFERENCE", "TS-CODE-REPOSITORY", "TS-CODE-ABSENT", "TS-CODE-LINK",
    "TS-NAME-NOT-PLAIN",
}  # fmt: skip
# Codes of problems that matter only to some destinations. `refusals` judges them by dialect.
DESTINATION_CODES = {"TS-HEAD-NORM-RESIDUAL", "TS-HEAD-ROPE-MLA"}


def _shared_weights(target: Resolved | None, model: ModelSpec | None) -> SharedWeights | None:
    """Opens the target's own embedding and lm_head. None if its weights are not on this machine."""
    if target is None or model is None or target.weights is None:
        return None
    return SharedWeights(sound(target.target).checkpoint, model)


def _value_problems(
    checkpoint: Checkpoint,
    entries: dict[str, OutputTensor],
    shared_weights: SharedWeights | None,
    everything: bool,
) -> list[Problem]:
    """Finds problems in the values of the tensors that are copied from the head.

    Compares the head's embedding with the target's too, if the embedding is copied.

    Args:
        everything: whether all values are read. Otherwise a sample of each tensor is read.
    """
    copied = {}
    for name, entry in entries.items():
        if entry.info and entry.checkpoint is checkpoint:
            copied[name] = entry.info
    problems = head_value_problems(checkpoint, copied, everything=everything)
    if EMBED in copied and shared_weights:
        compared = embedding_problems(
            checkpoint, copied[EMBED], shared_weights.checkpoint, shared_weights.spec
        )
        problems += errors_in(compared)
    return problems


def features(spec: HeadSpec) -> list[str]:
    """Names of the properties of this head that a dialect must be able to express."""
    mla = spec.is_mla
    fc_norm = spec.fc_norm
    norm_before_fc = spec.norm_before_fc
    yarn = spec.rope.is_yarn
    layers = spec.aux_layers or ()
    needed_by_feature: dict[str, bool] = {
        "mla": mla,
        "mla without yarn": mla and not yarn,
        "pruned mla": mla and spec.is_pruned,
        "yarn": yarn,
        "fc_norm": fc_norm,
        "norm_output": spec.norm_output,
        "norm_output alone": spec.norm_output and not fc_norm,
        "norm_before_fc": norm_before_fc,
        "norm_before_fc with mla": norm_before_fc and mla,
        "two norms before fc": norm_before_fc and fc_norm,
        "norm_before_residual": spec.norm_before_residual,
        "number of states": spec.num_aux != 3,
        "final state": -1 in layers,
        "first layer": bool(layers) and min(layers) == 0,
        "head size": not mla and spec.head_dim * spec.num_attention_heads != spec.hidden_size,
        "other width": spec.target_hidden_size != spec.hidden_size,
    }
    return [name for name, needed in needed_by_feature.items() if needed]


# Features of MLA heads only. A dialect without "mla" gets an error for "mla" and none for these.
MLA_FEATURES = ("mla without yarn", "norm_before_fc with mla", "pruned mla")


def refusals(spec: HeadSpec, dialect: Dialect, target: ModelSpec | None) -> list[Problem]:
    """Returns one error for each property of the head that `dialect` cannot express.

    The remedy names the dialects that can express all properties. Also returns an error if
    `dialect` stores no layer ids and the head's layers may differ from the target's default layers.
    """
    needed = features(spec)
    capable = [other.option for other in DIALECTS.values() if other.expresses.issuperset(needed)]
    remedy = f"convert to {' or '.join(capable)}" if capable else "serve the head as it is"
    if "mla" not in dialect.expresses:
        needed = [name for name in needed if name not in MLA_FEATURES]
    reasons = DIALECT_TABLE["features"]
    problems = []
    for name in needed:
        if name not in dialect.expresses:
            entry = reasons[name]
            message = f"{dialect.title} {entry['reason']}"
            problems.append(Problem(entry["code"], "error", entry["where"], message, remedy))
    # An engine whose checkpoints hold no layer ids captures the target's default layers.
    default = None
    if target is not None:
        default = target.default_aux_layers
    if dialect.stores_ids or spec.aux_layers in (None, default):
        return problems
    layers = list(spec.aux_layers or ())
    if default is None:
        message = f"{dialect.title} stores no layer ids, and may capture other layers than {layers}"
        remedy = "pass `target`, so that its default layers are known"
    else:
        message = f"{dialect.title} always captures {list(default)}, not {layers}"
        remedy = "convert to another dialect"
    return [*problems, Problem("TS-CONVERT-LAYERS", "error", "layer ids", message, remedy)]


def cautions(spec: HeadSpec, dialect: Dialect) -> list[Problem]:
    """Returns notes and warnings about properties that only some versions of an engine support."""
    problems = []
    if spec.eagle == "3.1":
        message = (
            f"EAGLE-3.1 needs {dialect.eagle31}; "
            "an older version computes another function and accepts few drafts"
        )
        problems.append(Problem("TS-CONVERT-VERSION", "info", "fc_norm, norm_output", message))
    for feature in features(spec):
        if feature in dialect.since:
            message = f"{feature} needs {dialect.since[feature]}"
            problems.append(Problem("TS-CONVERT-VERSION", "info", feature, message))
    if dialect.mha_needs and not spec.is_mla:
        message = f"{dialect.title} needs {dialect.mha_needs}"
        remedy = f"install transformers 4 beside {dialect.title}, or continue training elsewhere"
        problems.append(Problem("TS-CONVERT-VERSION", "warning", "rope_theta", message, remedy))
    # Some trainers have a fixed YaRN base in their code.
    theta = spec.rope.theta
    if spec.is_mla and dialect.fixed_rope_base:
        trainer, base = dialect.fixed_rope_base
        if theta != base:
            message = f"{trainer} would continue training with YaRN base {base:g}, not {theta:g}"
            problems.append(Problem("TS-CONVERT-THETA", "warning", "rope_theta", message))
    return problems
