"""What the servers of proofs say about gates, by which a release can do something from then on, and about the weight
formats and options of an engine whose evidence is inferred: as findings, and as a patch of the file that has them.

A server that answered shows that its release can do what it was asked for. One that did not start shows nothing, since
memory, files and our own refusals end launches too: where a gate says that it can, the finding is doubted; an interval
is never moved by it, and nothing is verified by it.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from packaging.version import InvalidVersion, Version

import trtspec
from trtspec.bench.prove import MIN_ACCEPTANCE, PLAIN, degenerate
from trtspec.bench.prove_bundle import ProofBundle
from trtspec.data_files import Gate
from trtspec.formats import WeightFormat

GateWeight = Literal["refuted", "doubted", "narrowed", "verified", "supported"]
# gates by what needs them: the target, and so every server, or the head; the others are not seen from outside
OF_TARGET = ("kimi_k25", "kimi_nvfp4")
OF_HEAD = ("mla_head", "head_layers_prefix", "kimi_eagle3")
GUIDED = "kimi_k25_guided"
TOLD = (*OF_TARGET, *OF_HEAD, GUIDED)
INFERRED, VERIFIED = "evidence: inferred", "evidence: verified"


@dataclass(frozen=True)
class GateFile:
    """One engine's file: `path` in the repository and its lines, its gates, and `rows`, the entries of other sections
    that take a line each and whose evidence is inferred, by section."""

    backend: str
    path: str
    text: str
    gates: tuple[Gate, ...]
    rows: Mapping[str, Mapping[str, str]]

    @classmethod
    def read(cls, backend: str, path: Path, gates: tuple[Gate, ...]) -> GateFile:
        """`path` lies in the package; its one-line entries whose evidence is inferred become the rows."""
        text, section = path.read_text(encoding="utf-8"), ""
        rows: dict[str, dict[str, str]] = {}
        for line in text.splitlines():
            name, colon, value = line.strip().partition(": ")
            if line.endswith(":") and not line.startswith(" "):
                section = line.removesuffix(":")
            elif colon and value.startswith("{") and INFERRED in value:
                rows.setdefault(section, {})[name] = line
        return cls(backend, path.relative_to(Path(trtspec.__file__).parents[1]).as_posix(), text, gates, rows)

    def weighed(self) -> int:
        """Gates and rows that a proof can tell of."""
        return sum(map(len, self.rows.values())) + sum(gate.name in TOLD for gate in self.gates)

    def not_weighed(self) -> int:
        """Gates that are not known to be right, and of which the server of a proof tells nothing."""
        return sum(gate.name not in TOLD and not gate.source.startswith("verified") for gate in self.gates)


@dataclass(frozen=True)
class ServedRelease:
    """What the servers of one proof show of their release: whether what a gate stands for `worked`, by gate, and the
    entries of other sections that a server was started with, `used`, as (section, name)."""

    version: Version
    bundle: str
    worked: Mapping[str, bool]
    used: Collection[tuple[str, str]] = ()


@dataclass(frozen=True)
class GateFinding:
    """What proofs say about one entry of an engine's file. `replacement` is the line that changes, as it is and as it
    should be; None where nothing changes."""

    file: str
    entry: str
    weight: GateWeight
    message: str
    replacement: tuple[str, str] | None = None


def served_release(bundle: ProofBundle, options: Callable[[Version], Sequence[str]]) -> ServedRelease | None:
    """What a bundle shows; `options` names the engine's own options that its servers were started with. None where the
    release is not known."""
    evidence, outputs = bundle.evidence, bundle.evidence["outputs"]
    try:
        version = Version(Version(evidence["engine"] or "").public)
    except InvalidVersion:
        return None
    if version.is_devrelease:  # between two releases, and no end of an interval
        return None
    plain, failed = outputs.get(f"bench-{PLAIN}"), _not_started(bundle)
    worked = {}
    for gate, by_target in _needs(evidence).items():
        works = plain if by_target else _drafted(evidence)
        fails = PLAIN in failed if by_target else plain and failed
        if works or fails:
            worked[gate] = bool(works)
    if _guided(evidence):
        worked[GUIDED] = True
    used = [("options", name) for name in options(version)] if plain else []
    if plain and evidence["gpus"] and not degenerate(plain):  # a CPU emulates kernels that it has not
        used.append(("formats", str((outputs.get("inspect-target") or {}).get("format"))))
    return ServedRelease(version, f"{bundle.name} {bundle.sha256[:12]}", worked, used)


def _not_started(bundle: ProofBundle) -> list[str]:
    """Launches that failed."""
    rows = [row["name"] for row in bundle.verdict["results"] if row["status"] == "fail"]
    return [name.removeprefix("serve-") for name in rows if name.startswith("serve-")]


def _drafted(evidence: Mapping[str, Any]) -> bool:
    """Whether drafts of the head were accepted, on output that is neither noise nor loops: an engine that skips tensors
    that it does not know serves, too."""
    benches = [found for name, found in evidence["outputs"].items() if re.fullmatch(r"bench-(k\d+|sampled)", name)]
    return any((one["acceptance_length"] or 0) >= MIN_ACCEPTANCE and not degenerate(one) for one in benches)


def _needs(evidence: Mapping[str, Any]) -> dict[str, bool]:
    """The gates that the pair of a proof needs, and whether the target alone does."""
    from trtspec.checkpoint.heads.dialects import DIALECTS

    target, head = (evidence["outputs"].get(f"inspect-{name}") or {} for name in ("target", "head"))
    newer = target.get("model_type") == "kimi_k25"
    dialect = DIALECTS.get(head.get("dialect", ""))
    needed = {
        "kimi_k25": newer,
        "kimi_nvfp4": target.get("format") in {str(item) for item in WeightFormat if item.is_fp4},
        "mla_head": head.get("attention") == "mla",
        "head_layers_prefix": dialect is not None and dialect.prefix == "layers.0.",
        "kimi_eagle3": newer and head.get("kind") == "head",
    }
    return {name: name in OF_TARGET for name, there in needed.items() if there}


def _guided(evidence: Mapping[str, Any]) -> bool:
    """Whether forms were kept to by a Kimi-K2.5 or newer under speculation."""
    rows = (evidence["outputs"].get("check") or {}).get("results", ())
    kept = any(row["name"] == "structured-output" and row["status"] == "pass" for row in rows)
    return kept and (evidence["outputs"].get("inspect-target") or {}).get("model_type") == "kimi_k25"


def weigh_gates(file: GateFile, served: Sequence[ServedRelease]) -> list[GateFinding]:
    """Findings on every gate and row of an engine's file that its proofs tell of. Refuted ones first."""
    found = [finding for gate in file.gates for finding in _weigh_gate(file, gate, served)]
    found += _weigh_rows(file, served)
    order = ("refuted", "doubted", "narrowed", "verified", "supported")
    return sorted(found, key=lambda finding: (order.index(finding.weight), finding.entry))


def _weigh_gate(file: GateFile, gate: Gate, served: Sequence[ServedRelease]) -> Iterator[GateFinding]:
    entry, past = f"gates.{gate.name}", ""
    inside: list[ServedRelease] = []
    for one in served:
        state, works = gate.state(one.version), one.worked.get(gate.name)
        shown = f"{one.version} ({one.bundle})"
        if works and state == "no":
            yield GateFinding(file.path, entry, "refuted", f"works in {shown}, where the file has it {gate.interval}")
        elif works and state == "unknown":
            inside.append(one)
        elif works:
            past = f"works in {shown}"
        elif works is False and state == "yes":
            message = f"no server started in {shown}, where the file has it {gate.interval}; the verdict says why"
            yield GateFinding(file.path, entry, "doubted", message)
    if inside:
        first = min(inside, key=lambda one: one.version)
        message = f"works in {first.version}, inside {gate.interval} ({first.bundle})"
        moved = (f"    by: {gate.by}", f"    by: {first.version}")
        yield GateFinding(file.path, entry, "narrowed", message, moved)
    elif past:
        yield GateFinding(file.path, entry, "supported", past)


def _weigh_rows(file: GateFile, served: Sequence[ServedRelease]) -> Iterator[GateFinding]:
    for section, rows in file.rows.items():
        for name, line in rows.items():
            one = next((one for one in served if (section, name) in one.used), None)
            if one is not None:
                message = f"a server of {one.version} was started with it and answered ({one.bundle})"
                changed = line.replace(INFERRED, VERIFIED)
                yield GateFinding(file.path, f"{section}.{name}", "verified", message, (line, changed))


def gate_patch(file: GateFile, findings: Sequence[GateFinding]) -> str:
    """A unified diff of the engine's file, for review; "" where nothing changes."""
    before = file.text.splitlines()
    after = list(before)
    for finding in findings:
        if finding.replacement is not None:
            old, new = finding.replacement
            section, _, name = finding.entry.partition(".")
            begin = after.index(f"{section}:")
            at = next(n for n in range(begin, len(after)) if after[n].startswith(f"  {name}:"))
            after[after.index(old, at)] = new
    made = difflib.unified_diff(before, after, f"a/{file.path}", f"b/{file.path}", lineterm="", n=1)
    return "".join(f"{row}\n" for row in made)
