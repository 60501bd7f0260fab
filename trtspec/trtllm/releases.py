"""Which release of TensorRT-LLM can do what, and what nobody has checked: releases.yaml with an answer per version."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml
from packaging.version import Version

from trtspec.specs import HeadSpec, ModelSpec

State = Literal["yes", "no", "unknown"]


@dataclass(frozen=True)
class Gate:
    """`what` is possible from `by` on, is known to be impossible up to `after`, and unknown between the two."""

    name: str
    what: str
    after: str
    by: str
    source: str

    def state(self, version: Version) -> State:
        if version <= Version(self.after):
            return "no"
        return "yes" if version >= Version(self.by) else "unknown"

    @property
    def interval(self) -> str:
        return f"after {self.after}, by {self.by}"


@functools.cache
def _data() -> dict[str, Any]:
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    return yaml.load(Path(__file__).with_name("releases.yaml").read_text(encoding="utf-8"), Loader=loader)


def gate(name: str) -> Gate:
    return Gate(name=name, **_data()["gates"][name])


def reports(version: Version, target: ModelSpec, head: HeadSpec) -> list[dict[str, Any]]:
    """What users reported for exactly this release with such a model and head."""
    return [
        entry
        for entry in _data()["reports"]
        if (Version(entry["version"]), entry["family"], entry["attention"]) == (version, family(target), head.attention)
    ]


def dynamo_releases() -> dict[str, str]:
    """Releases of Dynamo, newest first, with the engine version that the image of each carries."""
    return _data()["dynamo"]["releases"]


def dynamo_release(version: str) -> str | None:
    """The release of Dynamo that carries exactly this engine; None where none is known to."""
    return next((name for name, engine in dynamo_releases().items() if Version(engine) == Version(version)), None)


def driver_for(version: Version) -> tuple[int, str]:
    """The oldest major driver version for a release, and why."""
    entry = next(e for e in reversed(_data()["drivers"]) if version >= Version(e["from"]))
    return entry["driver"], entry["source"]


def family(target: ModelSpec) -> str:
    """The key of `verified`: models of type deepseek_v3 with Kimi's shape are K2 and K2-Thinking."""
    return "kimi_k25" if target.model_type == "kimi_k25" else "kimi_k2"


def default_version(target: ModelSpec, head: HeadSpec | None) -> tuple[str, str]:
    """The newest version known to run this model with this kind of head, and who says so."""
    entry = _data()["verified"][family(target)]
    if head is not None and head.eagle == "3.1":
        needed = gate("eagle31")
        if needed.state(Version(entry["version"])) != "yes":
            return needed.by, needed.source
    return entry["version"], entry["source"]
