"""Ways to speculate, from speculation.yaml: what each needs, and what a file says about its own."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import yaml

from trtspec.trtllm.document import Document

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
