"""The dialects that Eagle3 heads are stored in and the engines that serve them.

Each is a row of data/dialects.yaml. All that differs between them is asked of the row. No file
knows a dialect by its name.

Layer ids have two conventions. One counts layer outputs from 0 (ModelOpt, TensorRT-LLM, SpecForge,
TorchSpec). The other counts the layers that already ran, one more (SafeAILab, vLLM, speculators).
SGLang takes ids that start with 1 for the first and all others for the second.
`HeadSpec.aux_layers` always holds outputs.
"""

from __future__ import annotations

import json
import shlex
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from trtspec.checkpoint.headers import Checkpoint
from trtspec.checkpoint.heads.config import (
    DIALECT_TABLE,
    Verifier,
    shared_config,
    stated_ids,
    write_config,
)
from trtspec.checkpoint.heads.shapes import layer_prefix
from trtspec.checkpoint.identity import recorded
from trtspec.checkpoint.published import DRAFT_LEN
from trtspec.errors import UsageError
from trtspec.specs import HeadSpec, ModelSpec


@dataclass(frozen=True)
class HeadEngine:
    """An engine that serves heads. data/dialects.yaml says what the fields mean."""

    name: str
    title: str
    tensor_parallel: int
    eagle31: str
    command: str
    guesses_ids: bool = False
    theta_at_top: bool = False
    pruned_mla: str = ""
    flags: dict[str, list[str]] = field(default_factory=dict)

    def cannot_load(self, spec: HeadSpec) -> str:
        """Why this engine fails on such a head, whatever its layout. "" if it does not."""
        return self.pruned_mla if spec.is_mla and spec.is_pruned else ""

    def start(self, head: str, target: str, capture: list[int] | None) -> str:
        """The shell command that serves a pair.

        `capture`: the layer outputs that TensorRT-LLM needs in its configuration, since it never
        reads them from the head. None if its default is right or unknown.
        """
        return self.command.format(
            head=_quoted(head),
            head_in_yaml=json.dumps(head) if _quoted(head) != head else head,
            target=_quoted(target),
            gpus=self.tensor_parallel,
            draft_len=DRAFT_LEN,
            tokens=DRAFT_LEN + 1,
            layers=f"\n    eagle3_layers_to_capture: {capture}" if capture else "",
            speculation=shlex.quote(json.dumps(vllm_speculation(head))),
        )


def _quoted(name: str) -> str:
    """The name quoted for a shell, or a placeholder as it is."""
    return name if name.startswith("<") else shlex.quote(name)


def vllm_speculation(head: str, draft_len: int | None = None) -> dict[str, Any]:
    """The value of vLLM's --speculative-config for a head."""
    return {"model": head, "method": "eagle3", "num_speculative_tokens": draft_len or DRAFT_LEN}


@dataclass(frozen=True)
class Dialect:
    """How one project writes, reads and trains heads. data/dialects.yaml explains the fields."""

    name: str
    title: str
    prefix: Literal["layers.0.", "midlayer."]
    expresses: frozenset[str]
    rank: int
    wrote: tuple[list[str], ...]
    option: str
    config: dict[str, Any] = field(default_factory=dict)
    counts: Literal["outputs", "layers run", "by first id"] = "outputs"
    read_by: tuple[str, ...] = ()
    stores_ids: bool = True
    d2t: Literal["always", "pruned"] = "pruned"
    t2d: Literal["always", "pruned", "never"] = "never"
    embed_tokens: bool = False
    uses_embedding: bool = True
    trains_embedding: bool = False
    needs_lm_head: bool = False
    eagle31: str = ""
    since: dict[str, str] = field(default_factory=dict)
    mha_needs: str = ""
    norm_before_residual: bool = False
    norm_output_since: str = ""
    injected_rope: tuple[str, float, int] | None = None
    fixed_rope_base: tuple[str, float] | None = None
    double_norm: str = ""

    def outputs(self, ids: tuple[int, ...]) -> tuple[int, ...]:
        """Stored layer ids as layer outputs counted from 0."""
        ran = self.counts == "layers run" or (self.counts == "by first id" and min(ids) != 1)
        return tuple(number - 1 for number in ids) if ran else ids

    def capture(self, config: dict[str, Any]) -> tuple[tuple[int, ...] | None, str]:
        """(layer outputs that the head was trained on, how two statements of them differ).

        None if config.json does not state outputs. "" if no statements differ. `inspect` makes a
        difference an error. Ids at the top level count the layers that ran. Nested ids that differ
        from them are outputs already.
        """
        nested, top = stated_ids(config)
        if not top:
            return self.outputs(nested) if nested else None, ""
        by_top = tuple(number - 1 for number in top)
        by_dialect = self.outputs(top) if nested in ((), top) else nested
        if by_dialect == by_top:
            return by_top, ""
        where = "eagle_config" if nested else f"{self.title} layout"
        return by_dialect, (
            f"config.json states layer ids twice: {list(top)} at the top level are the outputs "
            f"{list(by_top)} (ids there count the layers that ran), {list(nested or top)} in "
            f"{where} are the outputs {list(by_dialect)}"
        )

    def ids(self, outputs: tuple[int, ...] | None) -> list[int] | None:
        """Layer outputs as this dialect stores them. None if they are not known."""
        if outputs is None:
            return None
        ran = self.counts == "layers run" or (self.counts == "by first id" and outputs[0] != 1)
        return [layer + 1 for layer in outputs] if ran else list(outputs)

    def served_by(self, engine: HeadEngine, spec: HeadSpec) -> bool:
        """Whether `engine` computes a head from this layout as it is, layer ids included."""
        not_first = spec.aux_layers and spec.aux_layers[0] != 1
        misread = engine.guesses_ids and self.counts == "outputs" and not_first
        return engine.name in self.read_by and not misread and not engine.cannot_load(spec)


def _rows(section: str) -> dict[str, dict[str, Any]]:
    """Rows of data/dialects.yaml by name, with their lists as tuples."""
    rows: dict[str, dict[str, Any]] = {}
    for name, row in DIALECT_TABLE[section].items():
        rows[name] = {
            key: tuple(value) if isinstance(value, list) else value for key, value in row.items()
        }
    return rows


ENGINES = {name: HeadEngine(name, **row) for name, row in _rows("engines").items()}
DIALECTS = {
    name: Dialect(name, **{"option": name} | row | {"expresses": frozenset(row["expresses"])})
    for name, row in _rows("dialects").items()
}  # in the order in which they are offered
OPTIONS = {
    row.option: row for row in DIALECTS.values()
} | DIALECTS  # by the name that convert takes, or their own
DEFAULT = DIALECTS["modelopt"]  # what names and keys do not tell, and what `trtspec train` writes


def detect_dialect(config: dict[str, Any], names: set[str]) -> tuple[Dialect, bool]:
    """(the dialect, whether a key shows it that only one writer leaves).

    names: of the tensors, without `model.`. They tell some dialects apart.
    """
    nested, top = stated_ids(config)
    ids = top or nested
    keys = {*config, *(f"eagle_config.{key}" for key in config.get("eagle_config") or ())}
    keys |= {*(config.get("architectures") or ())}
    shown = keys | {str(config.get("model_type"))}
    shown |= {name.split(".")[0] for name in names}
    if ids:
        shown.add("ids")
        if min(ids) == 1:
            shown.add("ids from 1")
    for row in sorted(DIALECTS.values(), key=lambda row: row.rank):
        for words in row.wrote:
            if all((word.removeprefix("!") in shown) != word.startswith("!") for word in words):
                return row, not keys.isdisjoint(words)
    return DEFAULT, False


def training_record(path: Path) -> dict[str, Any]:
    """The provenance of the `trtspec train` that made a head, also if `trtspec convert` rewrote it.

    {} for a head of another trainer.
    """
    record = recorded(path)
    while record.get("command") == "convert":
        record = (record.get("source") or {}).get("provenance") or {}
    return record if record.get("command") == "train" else {}


def dialect_of(checkpoint: Checkpoint, asked: Dialect | None = None) -> Dialect:
    """The dialect that `trtspec convert` noted, else `asked`, else the detected one.

    A note counts if the tensor names fit it.

    Some dialects have the same names and keys, and count layers differently. Raises UsageError if
    `asked` is another one than the note or a key that only one writer leaves behind.
    """
    names = {name.removeprefix("model.") for name in checkpoint.tensors}
    shown, certain = detect_dialect(checkpoint.config, names)
    noted = DIALECTS.get(str(recorded(checkpoint.path).get("dialect")))
    if noted is not None and noted.prefix == layer_prefix(checkpoint.tensors):
        shown = noted
        certain = True
    if asked and asked is not shown and certain:
        message = (
            f"`from_` {asked.option} contradicts {checkpoint.path}, whose layout is {shown.option}"
        )
        raise UsageError(message, f"leave `from_` out, or pass `from_` {shown.option}")
    return asked or shown


def head_config(spec: HeadSpec, target: ModelSpec) -> dict[str, Any]:
    """config.json of a new head as `trtspec train` writes it."""
    stop_ids = list(target.eos_token_ids)
    eos: list[int] | int | None = stop_ids
    if len(stop_ids) < 2:
        eos = stop_ids[0] if stop_ids else None
    carried = {
        "bos_token_id": target.bos_token_id,
        "eos_token_id": eos,
        "pad_token_id": target.pad_token_id,
        "initializer_range": 0.02,
        "use_cache": True,
    }
    ids = DEFAULT.ids(spec.aux_layers or target.default_aux_layers)
    shared = shared_config(carried, spec, "BF16")
    return write_config(DEFAULT.config, shared, spec, ids, Verifier())
