"""Rewrites an Eagle3 head from one project's layout to another's, or says why the other cannot express it.

The source is read into the canonical record (HeadSpec); names, maps, config keys and the counting of layers are then
written for the destination. Weights pass through unchanged, a piece at a time, so memory does not grow with them.
What a dialect cannot express of a head is in data/dialects.yaml, each with its reason.
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
    Lender,
    OutputTensor,
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
    """`to` and `from_` are names of trtspec.checkpoint.heads.dialects.OPTIONS; `from_` None detects."""

    to: str
    from_: str | None = None
    embed_tokens: Choice = "auto"
    rope_theta: float | None = None
    dry_run: bool = False
    force: bool = False


@dataclass(frozen=True)
class HeadConversion:
    """What was done, or would be. `output` is None where nothing was written: in a dry run, and with errors among the
    problems. `head` is the record of the head as it is written.

    `repairs`: errors and warnings of the source that the written head no longer has. `capture`: the layer outputs that
    TensorRT-LLM needs in its configuration; `serve`: engine -> command.
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
        """The keys of `trtspec convert --json`, but for `problems`."""
        same = (
            "to",
            "dry_run",
            "tensors",
            "parameters",
            "bytes_out",
            "target_default_layers",
            "serve",
            "config",
        )
        about = {
            "output": str(self.output) if self.output else None,
            "from": self.source_dialect,
            "repairs": [one.to_dict() for one in self.repairs],
            "rope": {"type": self.head.rope.rope_type, "theta": self.head.rope.theta},
            "eagle3_layers_to_capture": self.capture,
            "seconds": self.seconds,
        }
        facts = head_facts(self.head, self.config) if self.config else {}
        peak = {} if self.peak_rss_bytes is None else {"peak_rss_bytes": self.peak_rss_bytes}
        return facts | about | {name: getattr(self, name) for name in same} | peak


def convert_head(
    source: Resolved,
    output: Path,
    options: Options,
    target: Resolved | None = None,
    bar: ProgressBar = ProgressBar(),
) -> HeadConversion:
    """Converts and says what was done. With errors among the problems nothing is written. A dry run checks all that a
    run checks, every value of every tensor too. Raises CheckFailed for what is no Eagle3 head, UsageError for an output
    that is in the way, TrtspecError for one that has no room."""
    begun = time.monotonic()
    checkpoint = source.checkpoint
    path = checkpoint.path
    if output.resolve() == path.resolve() or output.resolve() in path.resolve().parents:
        raise UsageError(
            f"{output} is, or holds, the head that is converted", "choose another `output`"
        )
    licences = carried_names(path, "LICENSE*")
    names = frozenset((*HEAD_FILES, *licences))
    directory = OutputDirectory(output, "convert", names, size=0)
    again = OutputOptions(
        options.dry_run, restart=True, force=options.force
    )  # a killed conversion starts over
    directory.check(again)
    wrong = no_eagle3_head(checkpoint.config, checkpoint.tensors)
    if wrong is not None:
        raise CheckFailed(f"{source.name}: {wrong.message}", wrong.remedy, wrong.code)
    found, entries = _plan(checkpoint, output, options, target)
    directory = replace(directory, size=found.bytes_out)
    if not has_errors(found.problems):
        directory.check(again)
    if has_errors(found.problems) or options.dry_run:
        return replace(found, seconds=round(time.monotonic() - begun, 3))
    done = replace(found, output=output)
    with directory.claim({}, again):
        tensors = write_tensors(output / "model.safetensors", entries, bar)
        carry_files(path, output, licences)
        origin = {
            "head": source.name, "dialect": done.source_dialect, "config": checkpoint.config,
            "provenance": recorded(path) or None, "target": target.name if target else None,
            **commit_record(path),
        }  # fmt: skip
        more = {
            "dialect": done.head.dialect,
            "tensors": tensors,
            "repairs": done.to_json()["repairs"],
        }
        chosen = {"to": options.to, "from": options.from_, "embed_tokens": options.embed_tokens,
                  "rope_theta": options.rope_theta}  # fmt: skip
        record = provenance("convert", origin, chosen, **more)
        write_json(output / "provenance.json", record)
        write_atomic(output / "README.md", conversion_card(done.head, done.to_json(), record))
        write_json(output / "config.json", done.config)  # last: without it the directory is no head
        directory.finish()
    return replace(done, seconds=round(time.monotonic() - begun, 3), peak_rss_bytes=peak_rss())


def _plan(
    checkpoint: Checkpoint, output: Path, options: Options, target: Resolved | None
) -> tuple[HeadConversion, dict[str, OutputTensor]]:
    """(what would be done and every reason against it, where the bytes of each tensor come from)."""
    found, all_found = read_head(checkpoint, OPTIONS[options.from_] if options.from_ else None)
    dialect = OPTIONS[options.to]
    model = target.target_spec() if target is not None else None
    spec, problems = found, _left(checkpoint, found, all_found, options)
    repairs = [one for one in all_found if one not in problems and one.code not in DEPENDS]
    if options.rope_theta is not None:
        spec = replace(spec, rope=replace(spec.rope, theta=options.rope_theta))
    if spec.aux_layers is None and model is not None and spec.num_aux == 3:
        spec = replace(spec, aux_layers=model.default_aux_layers)
    if model is not None:
        problems += errors_in(pair_problems(spec, model))
    lender = _lender(target, model)
    problems += refusals(spec, dialect, model)
    refused = has_errors(problems)  # by headers alone, so no weight is read
    if refused:
        lender = None
    entries, about_tensors = plan_tensors(checkpoint, spec, dialect, lender, options.embed_tokens)
    if not refused:
        problems += about_tensors
        copied = {
            name: entry.info
            for name, entry in entries.items()
            if entry.info and entry.checkpoint is checkpoint
        }
        problems += head_value_problems(checkpoint, copied, everything=options.dry_run)
        own = entries.get(EMBED)
        if own and own.info and own.checkpoint is checkpoint and lender:
            against = embedding_problems(checkpoint, own.info, lender.checkpoint, lender.spec)
            problems += errors_in(against)
    config: dict[str, Any] = {}
    if not has_errors(problems):
        problems += cautions(spec, dialect)
        spec = with_ownership(spec, dialect, entries)
        verifier = (
            Verifier(target.name, tuple(target.config().get("architectures") or ()))
            if target
            else Verifier()
        )
        shared = shared_config(checkpoint.config, spec, entries["fc.weight"].dtype)
        config = write_config(dialect.config, shared, spec, dialect.ids(spec.aux_layers), verifier)
    parameters, size = sizes(entries)
    layers = list(spec.aux_layers) if spec.aux_layers is not None else None
    default = list(model.default_aux_layers) if model is not None else None
    needed = layers if layers is not None and sorted(layers) != default else None
    planned = HeadConversion(
        output=None,
        to=options.to,
        dry_run=options.dry_run,
        problems=problems,
        repairs=repairs,
        source_dialect=found.dialect,
        head=spec,
        config=config,
        tensors=len(entries),
        parameters=parameters,
        bytes_out=size,
        capture=needed,
        target_default_layers=default,
        serve=serving_commands(spec, str(output), target.name if target else None, needed),
    )
    return planned, entries


def _left(
    checkpoint: Checkpoint, found: HeadSpec, problems: list[Problem], options: Options
) -> list[Problem]:
    """The problems that rewriting does not fix."""
    repaired = CURED | DEPENDS
    if options.rope_theta is not None:
        problems = [
            one for one in problems if (one.code, one.where) != ("TS-HEAD-ROPE-TWICE", ROPE_BASE)
        ]
    tensors = canonical_names(checkpoint.tensors)
    if "d2t" not in tensors and "t2d" in tensors:
        targets = vocabulary_targets(checkpoint, tensors)
        if targets is not None and len(targets) == found.draft_vocab_size:
            repaired = repaired | {"TS-HEAD-D2T-MISSING"}
    return [problem for problem in problems if problem.code not in repaired]


def _lender(target: Resolved | None, model: ModelSpec | None) -> Lender | None:
    if target is None or model is None or target.weights is None:
        return None
    return Lender(sound(target.target).checkpoint, model)


# problems of the source that conversion itself fixes, and those that only matter to some destinations
CURED = {
    "TS-HEAD-MODEL-PREFIX", "TS-HEAD-CONFIG", "TS-HEAD-ROPE-THETA", "TS-HEAD-T2D-VALUES",
    # neither an `auto_map` nor a Python file of the source is written
    "TS-HEAD-CODE", "TS-CODE-REFERENCE", "TS-CODE-REPOSITORY", "TS-CODE-ABSENT", "TS-CODE-LINK", "TS-NAME-NOT-PLAIN",
}  # fmt: skip
DEPENDS = {"TS-HEAD-NORM-RESIDUAL", "TS-HEAD-ROPE-MLA"}


def features(spec: HeadSpec) -> list[str]:
    """What a dialect must be able to express for this head."""
    mla, yarn, layers = (
        spec.is_mla,
        spec.rope.is_yarn,
        spec.aux_layers or (),
    )
    needs: dict[str, bool] = {
        "mla": mla,
        "mla without yarn": mla and not yarn,
        "pruned mla": mla and spec.is_pruned,
        "yarn": yarn,
        "fc_norm": spec.fc_norm,
        "norm_output": spec.norm_output,
        "norm_output alone": spec.norm_output and not spec.fc_norm,
        "norm_before_fc": spec.norm_before_fc,
        "norm_before_fc with mla": spec.norm_before_fc and mla,
        "two norms before fc": spec.norm_before_fc and spec.fc_norm,
        "norm_before_residual": spec.norm_before_residual,
        "number of states": spec.num_aux != 3,
        "final state": -1 in layers,
        "first layer": bool(layers) and min(layers) == 0,
        "head size": not mla and spec.head_dim * spec.num_attention_heads != spec.hidden_size,
        "other width": spec.target_hidden_size != spec.hidden_size,
    }
    return [name for name, needed in needs.items() if needed]


OF_MLA = ("mla without yarn", "norm_before_fc with mla", "pruned mla")


def refusals(spec: HeadSpec, dialect: Dialect, target: ModelSpec | None) -> list[Problem]:
    """Returns one error per property that `dialect` cannot express. The remedy names the dialects that can."""
    needed = features(spec)
    if "mla" not in dialect.expresses:
        needed = [name for name in needed if name not in OF_MLA]
    able = [row.option for row in DIALECTS.values() if row.expresses.issuperset(features(spec))]
    remedy = f"convert to {' or '.join(able)}" if able else "serve the head as it is"
    rows = DIALECT_TABLE["features"]
    problems = [
        Problem(row["code"], "error", row["where"], f"{dialect.title} {row['reason']}", remedy)
        for row in (rows[name] for name in needed if name not in dialect.expresses)
    ]
    default = target.default_aux_layers if target is not None else None
    if dialect.stores_ids or spec.aux_layers in (None, default):
        return problems
    # a project whose checkpoints hold no ids captures the default layers
    if default is None:
        message = f"{dialect.title} stores no layer ids; whether {list(spec.aux_layers or ())} are its own is not known"
        remedy = "pass `target`, so that its default layers are known"
    else:
        message = (
            f"{dialect.title} always captures {list(default)}, not {list(spec.aux_layers or ())}"
        )
        remedy = "convert to another dialect"
    return [*problems, Problem("TS-CONVERT-LAYERS", "error", "layer ids", message, remedy)]


def cautions(spec: HeadSpec, dialect: Dialect) -> list[Problem]:
    """What works, but not with every version of the destination."""
    problems = []
    if spec.eagle == "3.1":
        message = f"EAGLE-3.1 needs {dialect.eagle31}; an older one computes another function and accepts little"
        problems.append(Problem("TS-CONVERT-VERSION", "info", "fc_norm, norm_output", message))
    for feature in features(spec):
        if feature in dialect.since:
            message = f"{feature} needs {dialect.since[feature]}"
            problems.append(Problem("TS-CONVERT-VERSION", "info", feature, message))
    if dialect.mha_needs and not spec.is_mla:
        message = f"{dialect.title} needs {dialect.mha_needs}"
        remedy = "install transformers below 5 there, or train the head on elsewhere"
        problems.append(Problem("TS-CONVERT-VERSION", "warning", "rope_theta", message, remedy))
    trainer, base = dialect.fixed_rope_base or ("", spec.rope.theta)
    if spec.is_mla and spec.rope.theta != base:
        message = (
            f"{trainer} would train this head on with YaRN base {base:g}, not {spec.rope.theta:g}"
        )
        problems.append(Problem("TS-CONVERT-THETA", "warning", "rope_theta", message))
    return problems
