"""What a proof leaves behind: its page, with the tables of a model card, and its bundle, one archive to be given away.

What names a person, a machine or a secret is replaced, and the finished files are searched for it again; a bundle that
still holds it is not written.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import tarfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trtspec.bench.parameters import HONOURED, NOT_SENT, noted
from trtspec.bench.prove import PLAIN, ProveLine, degenerate, long_parts, mode_words, plan_findings, reused
from trtspec.bench.prove_redaction import Redactor
from trtspec.bench.tables import BLANK, DEFINITION, number
from trtspec.errors import TrtspecError, UsageError
from trtspec.report import Table, write_atomic

MOST_BYTES = 64 * 2**20


def prove_html(evidence: Mapping[str, Any], lines: Sequence[ProveLine]) -> str:
    """One self-contained page. What was not measured has no table."""
    from trtspec.bench.report import environment

    setup, failed = evidence["setup"], [line for line in lines if line.status == "fail"]
    skipped = sum(line.status == "skipped" for line in lines)
    gpus = ", ".join(sorted({gpu["name"] for gpu in evidence["gpus"]})) or "no GPU"
    return (
        environment()
        .get_template("prove.html.j2")
        .render(
            title=f"{setup['target']} with {setup['head']}: {'not proved' if failed else 'proved'}",
            about=f"{evidence['backend']} {evidence['engine'] or ''} on {len(evidence['gpus'])} GPUs ({gpus}); "
            f"dataset {setup['dataset']}, {setup['samples']} questions, at most {setup['max_tokens']} tokens"
            f"{mode_words(evidence)}",
            keys=[
                {"value": str(sum(line.status == "pass" for line in lines)), "label": "passed"},
                {"value": str(len(failed)), "label": "failed"},
                {"value": str(skipped), "label": "skipped"},
            ],
            lines=lines,
            tables=[table for table in tables_of(evidence) if table.rows],
            created="",
            versions=evidence["versions"],
            plots=False,
        )
    )


def tables_of(evidence: Mapping[str, Any]) -> list[Table]:
    """Acceptance by category for each draft length, by our definition and by NVIDIA's, speed by concurrency, other
    workloads, the plan."""
    by_category = [_by_category(evidence), _as_published(evidence)]
    return [*by_category, _speed(evidence), _workloads(evidence), _launches(evidence), _plan(evidence)]


def _number(value: float | None, digits: int = 3) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _heads(evidence: Mapping[str, Any]) -> list[str]:
    return sorted(launch for launch in evidence["speed"] if launch != PLAIN)


def _by_category(evidence: Mapping[str, Any]) -> Table:
    outputs, heads = evidence["outputs"], _heads(evidence)
    results = {launch: outputs[f"bench-{launch}"] for launch in heads}
    names = list(dict.fromkeys(name for found in results.values() for name in found["categories"]))
    rows = [
        [name, *(_acceptance(results[k], results[k]["categories"].get(name), name) for k in heads)] for name in names
    ]
    if rows:
        rows.append(["all", *(_acceptance(results[k], results[k]) for k in heads)])
    columns = ["category", *(f"{k.removeprefix('k')} drafts" for k in heads)]
    title = f"Acceptance length by category, greedy{mode_words(evidence)}"
    return Table(title, columns, rows, "1 + accepted / steps over all answers")


def _acceptance(results: Mapping[str, Any], group: Mapping[str, Any] | None, category: str | None = None) -> str:
    """Of a step's answers, or of those of a category; blank where they are degenerate."""
    return BLANK if degenerate(results, category) else _number((group or {}).get("acceptance_length"))


def _as_published(evidence: Mapping[str, Any]) -> Table:
    """The layout of NVIDIA's cards: one row per draft length, one column per category, the mean over all questions."""
    results = {launch: evidence["outputs"][f"bench-{launch}"] for launch in _heads(evidence)}
    names = list(dict.fromkeys(name for found in results.values() for name in found["categories"]))
    rows = []
    for launch, found in results.items():
        if found.get("per_question_mean") is None:
            continue
        cells = [BLANK if degenerate(found, name) else _question_mean(found["categories"].get(name)) for name in names]
        average = BLANK if degenerate(found) else _question_mean(found)
        rows.append([f"{launch.removeprefix('k')} drafts", *cells, average])
    title = f"Acceptance by category in the definition of NVIDIA's model cards, greedy{mode_words(evidence)}"
    return Table(title, ["", *names, "average"], rows, DEFINITION)


def _question_mean(group: Mapping[str, Any] | None) -> str:
    return number(group.get("per_question_mean"), 2) if group else BLANK


def _speed(evidence: Mapping[str, Any]) -> Table:
    speed = evidence["speed"]
    levels = list(dict.fromkeys(level for figures in speed.values() for level in figures))
    rows = [
        [level, *(_number((speed[launch].get(level) or {}).get("tokens_per_s"), 1) for launch in speed)]
        for level in levels
    ]
    title = f"Output tokens per second by concurrency{mode_words(evidence)}"
    return Table(title, ["concurrency", *speed], rows)


def _workloads(evidence: Mapping[str, Any]) -> Table:
    outputs = evidence["outputs"]
    parts = {name: outputs.get(f"bench-{name}") for name in ("sampled", "cold", "warm")} | long_parts(evidence)
    rows = []
    for name, found in parts.items():
        if found:
            share = reused(found)
            cached = "-" if share is None else f"{share:.0%}"
            rows.append([name, _acceptance(found, found), str(found.get("steps") or "-"), cached])
    note = (
        "sampled: temperature 1; cold: prompts sent for the first time; warm: the same prompts, sent before; then by "
        "prompt length, sent for the first time"
    )
    columns = ["workload", "acceptance length", "steps", "prompt from the cache"]
    return Table(f"Acceptance length on other workloads{mode_words(evidence)}", columns, rows, note)


def _launches(evidence: Mapping[str, Any]) -> Table:
    rows = []
    for launch, entry in evidence["memory"].items():
        used = [f"{size / 2**30:.1f}" for size in entry["per_gpu"] or ()]
        rows.append([launch, f"{entry['seconds']:.0f}", " ".join(used) or "-", f"{entry['resident'] / 2**30:.1f}"])
    return Table("Launches", ["launch", "ready after (s)", "GiB by GPU", "GiB of host memory"], rows)


def _plan(evidence: Mapping[str, Any]) -> Table:
    rows = [
        [f.what, f"{f.planned:.4g}", f"{f.measured:.4g}", f"{f.ratio:.2f}", f.status] for f in plan_findings(evidence)
    ]
    return Table("Against the plan", ["figure", "planned", "measured", "ratio", ""], rows)


def request_outcomes(evidence: Mapping[str, Any]) -> dict[str, str]:
    """What a release of TensorRT-LLM did under speculation with request parameters that it honoured without, as check
    saw it; {} of another engine."""
    results = (evidence["outputs"].get("check") or {}).get("results", ())
    if evidence["backend"] != "trtllm" or not evidence["engine"]:
        return {}
    rows = [row for found in results if found["name"] == "parameters" for row in found["detail"].get("table", ())]
    shown = [row for row in rows if row["without_speculation"] == HONOURED and row["outcome"] != NOT_SENT]
    return {noted(row["parameter"]): row["outcome"] for row in shown}


def write_bundle(path: Path, files: Mapping[str, str], redact: Redactor) -> str:
    """Writes the redacted files as one archive, the same bytes for the same files. Returns its SHA-256.

    Raises TrtspecError, and writes nothing, where a name is still in them.
    """
    left = {name: redact.left_in(text) for name, text in files.items()}
    first = next(((name, found) for name, found in left.items() if found), None)
    if first:
        message = f"{first[0]} of the bundle still holds {', '.join(first[1])}"
        raise TrtspecError(message, "report this as a bug; the outputs in work/ stay on this machine")
    listed = {name: hashlib.sha256(text.encode()).hexdigest() for name, text in sorted(files.items())}
    whole = {**files, "manifest.json": json.dumps({"schema": 1, "sha256": listed}, indent=2) + "\n"}
    packed = io.BytesIO()
    with gzip.GzipFile(fileobj=packed, mode="wb", mtime=0) as zipped, tarfile.open(fileobj=zipped, mode="w") as archive:
        for name, text in sorted(whole.items()):
            data = text.encode()
            entry = tarfile.TarInfo(f"trtspec-proof/{name}")
            entry.size, entry.mode = len(data), 0o644
            archive.addfile(entry, io.BytesIO(data))
    write_atomic(path, packed.getvalue())
    return hashlib.sha256(packed.getvalue()).hexdigest()


@dataclass(frozen=True)
class ProofBundle:
    """A bundle as read: who it is (the SHA-256 of the archive), what was measured, and the engine's schema if any."""

    name: str
    sha256: str
    evidence: dict[str, Any]
    verdict: dict[str, Any]
    schema: str


def read_bundle(path: Path) -> ProofBundle:
    """Raises UsageError for what is no bundle, and for one whose files are not those of its manifest."""
    from trtspec.files import parse_json, read_bytes

    try:
        data = read_bytes(path, MOST_BYTES)
        files = _unpacked(data)
        listed = parse_json(files["manifest.json"])["sha256"]
        for name, digest in listed.items():
            if hashlib.sha256(files[name].encode()).hexdigest() != digest:
                raise UsageError(f"{path}: {name} was changed after the proof", "ask for the bundle again")
        evidence, verdict = (parse_json(files[name]) for name in ("evidence.json", "verdict.json"))
        for key in ("backend", "engine", "gpus", "outputs", "setup", "speed", "memory"):
            evidence[key]
        verdict["ok"]
        for line in verdict["results"]:
            line["name"], line["status"]
    except FileNotFoundError:
        raise UsageError(f"{path} does not exist", "pass the proof.tar.gz that `trtspec prove` wrote") from None
    except (tarfile.TarError, EOFError, OSError, ValueError, KeyError, TypeError) as error:
        remedy = "pass the proof.tar.gz that `trtspec prove` wrote"
        raise UsageError(f"{path} is not a bundle of `trtspec prove`: {error}", remedy) from None
    return ProofBundle(path.name, hashlib.sha256(data).hexdigest(), evidence, verdict, files.get("schema.yaml", ""))


def _unpacked(data: bytes) -> dict[str, str]:
    """Regular files by name, never written anywhere, together at most MOST_BYTES."""
    found: dict[str, str] = {}
    left = MOST_BYTES
    with tarfile.open(fileobj=io.BytesIO(data), mode="r:gz") as archive:
        for entry in archive:
            stream = archive.extractfile(entry) if entry.isreg() else None
            if stream is None or entry.size > left:
                raise ValueError(f"{entry.name[:80]!r} is no plain file of a bundle")
            left -= entry.size
            found[entry.name.removeprefix("trtspec-proof/")] = stream.read().decode("utf-8")
    return found
