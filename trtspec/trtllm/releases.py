"""What TensorRT-LLM can do: releases.yaml says which release can do what, and what nobody has checked, with an answer
per version; speculation.yaml lists the ways to speculate, what each needs, and what a file says about its own."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import yaml
from packaging.version import Version

from trtspec.data_files import Gate
from trtspec.specs import HeadSpec, ModelSpec
from trtspec.trtllm.document import Document


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


SPEC = "speculative_config"
MODEL_KEYS = (f"{SPEC}.speculative_model_dir", f"{SPEC}.speculative_model")
LENGTH = f"{SPEC}.max_draft_len"


@dataclass(frozen=True)
class SpeculationMethod:
    """One row. Keys stand below `speculative_config`; the meaning of each column is at the top of speculation.yaml."""

    key: str
    spellings: tuple[str, ...]
    name: str
    draft: Literal["head", "model", "layers", "none"]
    tokens_per_step: str
    kimi: Mapping[str, str]
    source: str
    draft_required: bool = False
    length_required: bool = False
    capture: str | None = None
    capture_from_draft: bool = False
    trees: tuple[str, ...] = field(default=())
    width_is_tree: bool = False
    pytorch: bool = True
    own_cache: bool = False
    one_model: bool = False
    python_only: str | None = None

    @property
    def reads_target(self) -> bool:
        """Whether the draft was trained on certain layers of the target that the file must name."""
        return self.draft == "head" and self.capture is not None and not self.capture_from_draft

    @property
    def capture_key(self) -> str:
        return f"{SPEC}.{self.capture}"

    def step_tokens(self, length: int) -> int:
        """Tokens of one request in one step with this draft length."""
        return 1 if self.tokens_per_step == "1" else 2 * length if self.tokens_per_step == "2k" else length + 1


@functools.cache
def methods() -> dict[str, SpeculationMethod]:
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    rows = yaml.load(Path(__file__).with_name("speculation.yaml").read_text(encoding="utf-8"), Loader=loader)["methods"]
    found: dict[str, SpeculationMethod] = {}
    for key, row in rows.items():
        columns: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in row.items()}
        found[key] = SpeculationMethod(key, **columns)
    return found


def eagle3() -> SpeculationMethod:
    """The row of the heads that this project makes."""
    return methods()["eagle3"]


def decoding_type(document: Document) -> str | None:
    value = document.get(f"{SPEC}.decoding_type")
    return value if isinstance(value, str) else None


def method_of(document: Document) -> SpeculationMethod | None:
    """How a file speculates; None where it does not, or in a way that has no row."""
    written = decoding_type(document)
    return next((method for method in methods().values() if written in method.spellings), None)


def draft_length(document: Document) -> int:
    """Draft tokens per step that the file asks for; 0 without speculation."""
    value = document.get(LENGTH)
    return value if isinstance(value, int) and not isinstance(value, bool) and decoding_type(document) else 0


def step_tokens(document: Document) -> int:
    """Tokens of one request in one decode step."""
    length, method = draft_length(document), method_of(document)
    return method.step_tokens(length) if method is not None and length else length + 1


def head_in(document: Document) -> str | None:
    """The draft that a file names."""
    return next((str(document.get(key)) for key in MODEL_KEYS if document.get(key)), None)
