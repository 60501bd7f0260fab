"""`trtspec inspect`: what a checkpoint is and what is wrong with it."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from trtspec.cli.options import directory_of
from trtspec.errors import CheckFailed, Problem, UsageError
from trtspec.records import JsonOption, Mode, Modes, argument, checked, option
from trtspec.report import Result, Table

if TYPE_CHECKING:
    from trtspec.checkpoint.describe import CheckpointReport, TargetFacts
    from trtspec.checkpoint.heads.read import HeadComparison, HeadFacts
    from trtspec.checkpoint.hub import Resolved
    from trtspec.quant.verify import CheckpointComparison

COMPARED = 64  # tensors that are compared with a source where nobody says how many


TARGET = Mode("`inspect TARGET`", "`inspect TARGET`")
HEAD = Mode("`inspect HEAD`", "`inspect HEAD`")
PAIR = Mode("`inspect HEAD --against ...`", "`inspect HEAD --against TARGET`")
DERIVED = Mode("`inspect TARGET --against SOURCE`", "`inspect TARGET --against SOURCE`")


@dataclass(frozen=True, kw_only=True)
class InspectOptions:
    path: Annotated[str, argument("Target or Eagle3 head: a checkpoint directory or a hub id.")]
    against: Annotated[
        str | None,
        option("For a head, its target. For a quantized or converted checkpoint, the source to re-read it against."),
    ] = None
    sample: Annotated[
        int | None,
        option(
            "Number of large tensors to read; 0 reads all. Default: 64 with --against, else none; small tensors are "
            "always read. For a head, only 0 applies: check every value.",
            min=0,
        ),
        Modes(TARGET, DERIVED, value="[!0]*"),
    ] = None
    hashes: Annotated[
        bool, option("Read every byte and compare the files' SHA-256 with provenance.json or the hub's records.")
    ] = False
    json_: JsonOption = False


@dataclass(frozen=True)
class Inspected:
    """All that was found: `values` by the keys of the JSON contract, without `problems`; `rows` of label and text."""

    values: dict[str, Any]
    problems: list[Problem]
    rows: list[tuple[str, str]]


def inspect(options: InspectOptions) -> Result:
    """Report what a target or head checkpoint is and what is wrong with it.

    Reads headers, configs, a target's small tensors and samples of a head's values, so a terabyte takes seconds;
    --sample, --against and --hashes read more. Published models that are not on this machine are answered from the
    built-in catalogue. Exits with status 3 when it finds an error.
    """
    found = look(options)
    errors = sum(problem.severity == "error" for problem in found.problems)
    message = f"{options.path} has {errors} error{'s' * (errors != 1)}"
    wrong = CheckFailed(message, "follow the remedy of each above") if errors else None
    table = Table(options.path, (), found.rows, text_columns=frozenset({0, 1}), ruled=False)
    clean = [] if found.problems else ["no problems found"]
    return Result(found.values, found.problems, [table], ["", *clean], wrong)


def look(options: InspectOptions) -> Inspected:
    from trtspec.checkpoint.describe import describe
    from trtspec.checkpoint.hub import resolve

    resolved = resolve(options.path, allow_download=False)
    read = options.sample if options.against is None else None  # what is compared with a source is read there
    report = describe(resolved, all_values=options.sample == 0, sample=read, hashes=options.hashes)
    mode = _mode(options, report.kind)
    options = checked(options, mode)
    values = {key: value for key, value in report.to_dict().items() if key not in ("ok", "problems")}
    found = Inspected(values, list(report.problems), report_rows(report))
    if options.against is None:
        return found
    other = resolve(options.against, allow_download=False)
    values["against"] = other.name
    if report.kind == "head" and other.kind == "target":
        return compare_pair(found, report, resolved, other)
    if report.kind != other.kind:
        remedy = "turn them around: inspect HEAD --against TARGET"
        raise UsageError(f"{resolved.name} is a target and {other.name} a head", remedy)
    return compare_derived(found, report.kind, directory_of(resolved), directory_of(other), options)


def _mode(options: InspectOptions, kind: str) -> Mode:
    if kind == "target":
        return TARGET if options.against is None else DERIVED
    if options.against is None:
        return HEAD
    return PAIR


def compare_pair(found: Inspected, report: CheckpointReport, resolved: Resolved, other: Resolved) -> Inspected:
    """A head against its target; a draft of another type has nothing to compare. Layers that look shifted are an
    error."""
    from trtspec.checkpoint.headers import Checkpoint
    from trtspec.checkpoint.heads import pairing
    from trtspec.checkpoint.heads.read import read_head
    from trtspec.checkpoint.heads.shapes import canonical_names
    from trtspec.checkpoint.values import embedding_problems

    if report.facts is None:
        return found
    target = other.target_spec()
    checkpoint = Checkpoint.open(resolved.path) if report.source == "files" and resolved.path else None
    head = read_head(checkpoint)[0] if checkpoint is not None else resolved.head_spec()
    more = pairing.pair_problems(head, target, head_id=resolved.hub_id, target_id=other.hub_id)
    more = [replace(one, severity="error") if one.code == pairing.SHIFTED else one for one in more]
    more += pairing.config_problems(resolved.config(), other.config())
    more += pairing.yarn_problems(head, target) if checkpoint is not None else []
    own = canonical_names(checkpoint.tensors).get("embed_tokens.weight") if checkpoint is not None else None
    if checkpoint is not None and own and other.path and any(other.path.glob("*.safetensors")):
        more += embedding_problems(checkpoint, own, Checkpoint.open(other.path), target)
    sizes, problems = pairing.tensor_parallel_sizes(head), pairing.told_once(found.problems + more)
    return Inspected(
        found.values | {"tensor_parallel_sizes": sizes},
        problems,
        [*found.rows, ("tensor parallel", f"{sizes} divide the head")],
    )


def compare_derived(found: Inspected, kind: str, made: Path, source: Path, options: InspectOptions) -> Inspected:
    """A converted head against the head that it was made from, all bytes; a target against its source, tensor by
    tensor."""
    result: HeadComparison | CheckpointComparison
    if kind == "head":
        from trtspec.checkpoint.headers import Checkpoint
        from trtspec.checkpoint.heads.read import compare_heads

        result = compare_heads(Checkpoint.open(made), Checkpoint.open(source))
    else:
        from trtspec.quant.verify import compare

        result = compare(made, source, COMPARED if options.sample is None else options.sample)
    values = found.values | {"comparison": result.to_dict()}
    return Inspected(values, found.problems + result.problems, found.rows + comparison_rows(result))


def report_rows(report: CheckpointReport) -> list[tuple[str, str]]:
    """Label and text of each line; figures that are not known are left out."""
    lines = facts_rows(report.facts)
    if report.parameters:
        lines.append(("parameters", f"{report.parameters:,}"))
    if report.bytes:
        shards = f" in {report.shards} file{'s' * (report.shards != 1)}" if report.shards else ""
        lines.append(("bytes", f"{report.bytes:,} ({report.bytes / 1e9:.3g} GB){shards}"))
    if report.dtypes:
        lines.append(("stored as", ", ".join(f"{code} {size / 1e6:,.1f} MB" for code, size in report.dtypes.items())))
    if report.trained_with:
        lines.append(("trained with", report.trained_with))
    if report.catalogue is not None and report.source == "catalogue":
        lines += [("licence", report.catalogue.licence)] if report.catalogue.licence else []
        lines += [("published for", ", ".join(report.catalogue.targets))] if report.catalogue.targets else []
        lines.append(("source", "trtspec's catalogue; the files are not on this machine"))
        lines.append(("not verified", ", ".join(report.catalogue.unverified) or "nothing"))
    if report.hashes_verified is not None:
        lines.append(("SHA-256", f"{report.hashes_verified} of {report.shards} files are as recorded"))
    return lines


def facts_rows(facts: TargetFacts | HeadFacts | None) -> list[tuple[str, str]]:
    """What it is."""
    from trtspec.checkpoint.heads.read import HeadFacts

    if facts is None:
        return [("kind", "no Eagle3 head")]
    architecture = ("architecture", f"{facts.architecture} ({facts.model_type})")
    if isinstance(facts, HeadFacts):
        layers = facts.aux_layers
        return [
            ("kind", "Eagle3 draft head"),
            architecture,
            ("eagle", f"{facts.eagle}, {facts.attention.upper()} attention, {facts.dialect} layout"),
            ("reads layers", ", ".join(map(str, layers)) if layers else "not said; the target's default"),
            ("draft vocabulary", f"{facts.draft_vocab_size:,} of {facts.vocab_size:,}"),
        ]
    return [
        ("kind", "target"),
        architecture,
        ("family", facts.family),
        ("format", f"{facts.format}, KV cache {facts.kv_cache or 'not quantized'}"),
        ("layers", f"{facts.layers}, default capture {facts.default_aux_layers}"),
        ("end of text", ", ".join(map(str, facts.eos_token_ids))),
    ]


def comparison_rows(comparison: HeadComparison | CheckpointComparison) -> list[tuple[str, str]]:
    """What re-reading a derived checkpoint against its source found."""
    from trtspec.checkpoint.heads.read import HeadComparison

    more = "; --sample 0 reads the others too" if comparison.compared < comparison.tensors else ""
    lines = [("re-read", f"{comparison.compared:,} of {comparison.tensors:,} tensors{more}")]
    if isinstance(comparison, HeadComparison):
        return lines
    for name, found in comparison.classes.items():
        error = f"relative error {found.relative_error:.4f}, worst {found.worst:.4f}, {found.tensors} tensors"
        lines.append((name, error))
    for name, found in comparison.layers.items():
        known = math.isfinite(found.relative_error)
        bar = "\u2588" * round(200 * found.relative_error) if known else ""  # one for every half per cent
        lines.append((f"layer {name}", f"{found.relative_error:.4f} {bar}"))
    if comparison.classes:
        lines.append(("all-zero blocks", f"{comparison.zero_blocks:,}"))
    if comparison.repacked_alike:
        lines.append(("packed again", f"{comparison.repacked_alike} tensors are what the source gives, to the bit"))
    return lines
