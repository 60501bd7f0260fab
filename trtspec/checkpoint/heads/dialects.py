"""The dialects in which Eagle3 heads are stored, and the engines that serve heads.

Each dialect and engine is a record of data/dialects.yaml, which holds all differences between them.
No other file knows a dialect by its name.

Layer ids have two conventions. Some projects count layer outputs from 0 (ModelOpt, TensorRT-LLM,
SpecForge, TorchSpec). Others count the layers that already ran, which is one more (SafeAILab, vLLM,
speculators). SGLang reads ids that start with 1 in the first convention and all others in the
second. `HeadSpec.aux_layers` always counts outputs from 0.
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
    """Engine that serves heads, as data/dialects.yaml describes it.

    title: name for messages.
    tensor_parallel: number of GPUs in the example command.
    eagle31: version from which the engine serves EAGLE-3.1 heads.
    command: template of the shell command that serves a pair.
    guesses_ids: whether the engine infers the convention of layer ids from the first id.
    theta_at_top: whether the engine reads rope_theta only at the top level of config.json.
    pruned_mla: reason why the engine fails on an MLA head with a pruned vocabulary. "" if it does
        not.
    flags: keys of config.json from which the engine reads a flag of `HeadSpec`, by flag.
    """

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
        """Reason why this engine fails on such a head in any layout.

        "" if it does not fail.
        """
        return self.pruned_mla if spec.is_mla and spec.is_pruned else ""

    def start(self, head: str, target: str, capture: list[int] | None) -> str:
        """Returns the shell command that serves a pair.

        Args:
            head: path or id of the head, or a placeholder such as <HEAD>.
            target: path or id of the target, or a placeholder.
            capture: layer outputs for the configuration of TensorRT-LLM, which never reads them
                from the head. None if its default is right or the layers are unknown.
        """
        quoted_head = _quoted(head)
        # A name that needs quotes in a shell needs JSON's quotes in YAML.
        head_in_yaml = head
        if quoted_head != head:
            head_in_yaml = json.dumps(head)
        layers = ""
        if capture:
            layers = f"\n    eagle3_layers_to_capture: {capture}"
        return self.command.format(
            head=quoted_head,
            head_in_yaml=head_in_yaml,
            target=_quoted(target),
            gpus=self.tensor_parallel,
            draft_len=DRAFT_LEN,
            tokens=DRAFT_LEN + 1,
            layers=layers,
            speculation=shlex.quote(json.dumps(vllm_speculation(head))),
        )


def _quoted(name: str) -> str:
    """Returns the name quoted for a shell. A placeholder such as <HEAD> is returned unquoted."""
    return name if name.startswith("<") else shlex.quote(name)


def vllm_speculation(head: str, draft_len: int | None = None) -> dict[str, Any]:
    """Returns the value of vLLM's --speculative-config for a head.

    `draft_len`: number of draft tokens. None: the published default.
    """
    return {"model": head, "method": "eagle3", "num_speculative_tokens": draft_len or DRAFT_LEN}


@dataclass(frozen=True)
class Dialect:
    """Layout in which one project writes, reads and trains heads.

    data/dialects.yaml explains every field in its first lines.
    """

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
        """Returns stored layer ids as indices of layer outputs, which count from 0."""
        counts_run = self.counts == "layers run"
        if self.counts == "by first id":
            counts_run = min(ids) != 1
        return tuple(number - 1 for number in ids) if counts_run else ids

    def capture(self, config: dict[str, Any]) -> tuple[tuple[int, ...] | None, str]:
        """Returns the layer outputs that the head was trained on, and how two statements differ.

        The outputs are None if config.json does not state them. The text is "" if no statements
        differ. Ids at the top level count the layers that ran. Ids in eagle_config that differ from
        ids at the top level count outputs already.
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
        """Returns layer outputs as this dialect stores them. None if `outputs` is None."""
        if outputs is None:
            return None
        counts_run = self.counts == "layers run"
        if self.counts == "by first id":
            counts_run = outputs[0] != 1
        return [layer + 1 for layer in outputs] if counts_run else list(outputs)

    def served_by(self, engine: HeadEngine, spec: HeadSpec) -> bool:
        """Whether `engine` computes a head correctly from this layout, layer ids included."""
        # An engine that guesses takes outputs for layers that ran unless the first id is 1.
        starts_elsewhere = spec.aux_layers and spec.aux_layers[0] != 1
        misread = engine.guesses_ids and self.counts == "outputs" and starts_elsewhere
        return engine.name in self.read_by and not misread and not engine.cannot_load(spec)


def _rows(section: str) -> dict[str, dict[str, Any]]:
    """Returns the records of a section of data/dialects.yaml by name.

    Lists become tuples, because the records are immutable.
    """
    rows: dict[str, dict[str, Any]] = {}
    for name, row in DIALECT_TABLE[section].items():
        rows[name] = {
            key: tuple(value) if isinstance(value, list) else value for key, value in row.items()
        }
    return rows


ENGINES = {name: HeadEngine(name, **row) for name, row in _rows("engines").items()}
# dialects by name, in the order in which they are offered
DIALECTS = {
    name: Dialect(name, **{"option": name} | row | {"expresses": frozenset(row["expresses"])})
    for name, row in _rows("dialects").items()
}
# dialects by the value of `trtspec convert --to`, and by their own name
OPTIONS = {dialect.option: dialect for dialect in DIALECTS.values()} | DIALECTS
# dialect of a head whose names and keys show none, and of `trtspec train`
DEFAULT = DIALECTS["modelopt"]


def detect_dialect(config: dict[str, Any], names: set[str]) -> tuple[Dialect, bool]:
    """Returns the dialect of a head, and whether a config key of one project only proves it.

    Args:
        config: config.json of the head.
        names: names of the head's tensors without `model.`, which distinguish some dialects.
    """
    nested, top = stated_ids(config)
    ids = top or nested
    keys = {*config, *(f"eagle_config.{key}" for key in config.get("eagle_config") or ())}
    keys |= {*(config.get("architectures") or ())}
    # the words by which `wrote` in data/dialects.yaml describes a head
    traits = keys | {str(config.get("model_type"))}
    traits |= {name.split(".")[0] for name in names}
    if ids:
        traits.add("ids")
        if min(ids) == 1:
            traits.add("ids from 1")
    for dialect in sorted(DIALECTS.values(), key=lambda dialect: dialect.rank):
        for words in dialect.wrote:
            # A head must have each word, and must not have a word that starts with "!".
            if all((word.removeprefix("!") in traits) != word.startswith("!") for word in words):
                return dialect, not keys.isdisjoint(words)
    return DEFAULT, False


def training_record(path: Path) -> dict[str, Any]:
    """Returns the provenance of the `trtspec train` that made a head.

    `trtspec convert` keeps the record of its source, so the record is found through any number of
    conversions. {} if another tool trained the head.
    """
    record = recorded(path)
    while record.get("command") == "convert":
        record = (record.get("source") or {}).get("provenance") or {}
    return record if record.get("command") == "train" else {}


def dialect_of(checkpoint: Checkpoint, requested: Dialect | None = None) -> Dialect:
    """Returns the dialect of a head.

    The record of `trtspec convert` in provenance.json decides if the tensor names agree with it.
    Without such a record `requested` decides, and without both the detected dialect. Raises
    UsageError if `requested` contradicts the record, or a config key that only one project writes.

    `requested`: dialect that the user states, because some dialects have the same names and keys
    and count layers differently. None if the user states none.
    """
    names = {name.removeprefix("model.") for name in checkpoint.tensors}
    detected, certain = detect_dialect(checkpoint.config, names)
    noted = DIALECTS.get(str(recorded(checkpoint.path).get("dialect")))
    # Other names mean that the tensors were rewritten since.
    if noted is not None and noted.prefix == layer_prefix(checkpoint.tensors):
        detected = noted
        certain = True
    if requested and requested is not detected and certain:
        contradiction = f"`from_` {requested.option} contradicts {checkpoint.path}"
        message = f"{contradiction}, whose layout is {detected.option}"
        raise UsageError(message, f"leave `from_` out, or pass `from_` {detected.option}")
    return requested or detected


def head_config(spec: HeadSpec, target: ModelSpec) -> dict[str, Any]:
    """Returns the config.json of a new head, as `trtspec train` writes it."""
    # A config.json states one id as a number and several as a list.
    stop_ids = list(target.eos_token_ids)
    eos: list[int] | int | None = stop_ids
    if len(stop_ids) < 2:
        eos = stop_ids[0] if stop_ids else None
    target_keys = {
        "bos_token_id": target.bos_token_id,
        "eos_token_id": eos,
        "pad_token_id": target.pad_token_id,
        "initializer_range": 0.02,
        "use_cache": True,
    }
    ids = DEFAULT.ids(spec.aux_layers or target.default_aux_layers)
    shared = shared_config(target_keys, spec, "BF16")
    return write_config(DEFAULT.config, shared, spec, ids, Verifier())
