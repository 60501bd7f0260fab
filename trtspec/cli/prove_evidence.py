"""What a proof amounts to: evidence, verdict and page from the outputs of its steps, packed as a bundle."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from trtspec import files, report
from trtspec.bench.prove import ProveLine, ProveSetup, ProveStep, judge, launches, speed_of, steps_of
from trtspec.bench.prove_bundle import Redactor, prove_html, redactor, write_bundle
from trtspec.cli.prove_run import ProofRun, run_proof
from trtspec.errors import TrtspecError


@dataclass
class Proof:
    """What a run made: the verdict, and the bundle with its digest."""

    lines: list[ProveLine]
    bundle: str
    sha256: str

    @property
    def failed(self) -> list[str]:
        return [line.name for line in self.lines if line.status == "fail"]

    def to_dict(self) -> dict[str, Any]:
        shown = [asdict(line) for line in self.lines]
        return {"ok": not self.failed, "results": shown, "bundle": self.bundle, "sha256": self.sha256}


def prove_all(setup: ProveSetup, directory: Path, startup: float, restart: bool) -> Proof:
    """Runs what is not done yet, then writes verdict, page and bundle. `startup`: seconds for a server
    to become ready."""
    return finish(run_proof(setup, directory, startup, restart))


def finish(run: ProofRun) -> Proof:
    """Verdict, page and bundle from what the work directory holds."""
    setup = run.setup
    redact = redactor(
        {setup.target: "<target>", setup.head: "<head>", str(run.directory): "<proof>", setup.dataset: "<dataset>"}
    )
    evidence = redact.value(evidence_of(run))
    lines = [
        *(ProveLine(name, "fail", redact.text(why)) for name, why in run.broken.items()),
        *judge(evidence),
    ]
    verdict = {"ok": not any(line.status == "fail" for line in lines), "results": [asdict(line) for line in lines]}
    page = prove_html(evidence, lines)
    report.write_json(run.directory / "verdict.json", verdict)
    report.write_atomic(run.directory / "report.html", page)
    kept = {"evidence.json": report.json_text(evidence), "verdict.json": report.json_text(verdict), "report.html": page}
    bundle = run.directory / "proof.tar.gz"
    digest = write_bundle(bundle, kept | _texts(run, redact), redact)
    return Proof(lines, str(bundle), digest)


def _texts(run: ProofRun, redact: Redactor) -> dict[str, str]:
    """Files of the work directory that belong in a bundle as they are."""
    names = ("schema.yaml", "engine-plain.yml", "engine-head.yml")
    return {name: redact.text((run.work / name).read_text()) for name in names if (run.work / name).exists()}


def evidence_of(run: ProofRun) -> dict[str, Any]:
    """evidence.json before it is redacted: the outputs of the steps, and the figures that are compared."""
    outputs = {step.name: found for step in steps_of(run.setup) if (found := _output(run, step)) is not None}
    benches = {name.removeprefix("bench-"): found for name, found in outputs.items() if name.startswith("bench-")}
    served = launches(run.setup)
    version = (outputs.get("lint-plain") or {}).get("version") if run.setup.dated else None
    return {
        "schema": 1,
        "setup": asdict(run.setup),
        "backend": run.setup.backend,
        "engine": version or (benches.get("plain") or {}).get("server", {}).get("version"),
        "gpus": (outputs.get("doctor") or {}).get("gpus", []),
        "speed": {launch: speed_of(benches[launch]) for launch in served if launch in benches},
        "memory": {name: run.journal.done[f"serve-{name}"] for name in served if run.done(f"serve-{name}")},
        "journal": list(run.journal.done.values()),
        "outputs": outputs,
        "versions": report.package_versions(),
    }


def _output(run: ProofRun, step: ProveStep) -> Any:
    """What a step that is done left: its results.json, else the object on its stdout."""
    if not run.done(step.name):
        return None
    results = run.work / step.name / "results.json"
    path = results if results.exists() else run.work / f"{step.name}.out"
    try:
        return files.read_object(path)
    except (TrtspecError, OSError):
        return None
