"""The dialects that Eagle3 heads are stored in and the engines that serve them, one complete row each. Everything that
differs between them is asked of the row; no other file knows a dialect by its name.

Layer ids have two conventions. One counts layer outputs from 0 (ModelOpt, TensorRT-LLM, SpecForge, TorchSpec); the
other counts the layers that already ran, one more (SafeAILab, vLLM, speculators). SGLang takes ids that start with 1
for the first and all others for the second. `HeadSpec.aux_layers` always holds outputs.

To add a dialect: a row here, and a writer in `config` where none of those there fits.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from trtspec.checkpoint.headers import Checkpoint
from trtspec.checkpoint.heads import config as layout
from trtspec.checkpoint.heads.shapes import layer_prefix
from trtspec.checkpoint.identity import recorded
from trtspec.specs import HeadSpec

DRAFT_LEN = 3


@dataclass(frozen=True)
class HeadEngine:
    """An engine that serves heads. `command` is filled in by `start`.

    `guesses_ids`: layer ids that start with 1 are taken for layer outputs, all others for the number of layers that
    ran. `eagle31`: the first version that computes EAGLE-3.1's two norms. `theta_at_top`: the RoPE base is read from
    the top level of config.json only. `pruned_mla`: why an MLA head with a pruned vocabulary cannot be loaded, "" where
    it can.
    """

    name: str
    title: str
    tensor_parallel: int
    eagle31: str
    command: str
    guesses_ids: bool = False
    theta_at_top: bool = False
    pruned_mla: str = ""

    def cannot_load(self, spec: HeadSpec) -> str:
        """Why this engine fails on such a head, whatever its layout; "" where it does not."""
        return self.pruned_mla if spec.attention == "mla" and spec.draft_vocab_size != spec.vocab_size else ""

    def start(self, head: str, target: str, capture: list[int] | None) -> str:
        """The shell command that serves a pair. `capture`: the layer outputs that TensorRT-LLM needs in its
        configuration, since it never reads them from the head; None where its default is right or unknown."""
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
    """For a shell, a placeholder as it is."""
    return name if name.startswith("<") else shlex.quote(name)


def vllm_speculation(head: str, draft_len: int | None = None) -> dict[str, Any]:
    """What vLLM's --speculative-config says of a head."""
    return {"model": head, "method": "eagle3", "num_speculative_tokens": draft_len or DRAFT_LEN}


START_TRTLLM = """\
cat > extra-llm-api-config.yml <<'END'
speculative_config:
    decoding_type: Eagle
    max_draft_len: {draft_len}
    speculative_model_dir: {head_in_yaml}{layers}
END
trtllm-serve {target} --host 0.0.0.0 --port 8000 --backend pytorch --max_batch_size 32 --max_num_tokens 8192 \
--max_seq_len 8192 --tp_size {gpus} --extra_llm_api_options extra-llm-api-config.yml"""
START_VLLM = """\
vllm serve {target} --tensor-parallel-size {gpus} --speculative-config {speculation} --trust-remote-code"""
START_SGLANG = """\
python -m sglang.launch_server --model-path {target} --tp-size {gpus} --trust-remote-code \
--speculative-algorithm EAGLE3 --speculative-draft-model-path {head} --speculative-num-steps {draft_len} \
--speculative-eagle-topk 1 --speculative-num-draft-tokens {tokens}"""
# read in every version of its sources that could be had, and never run
PRUNED_MLA = (
    "TensorRT-LLM cannot load an MLA head with a pruned vocabulary: where the model holds d2t, its loader of MLA "
    "weights copies every parameter below by name, and the fused ones are not in the file under theirs (read, never "
    "run; a head with the whole vocabulary, or an MHA head, loads)"
)
ENGINES = {
    engine.name: engine
    for engine in (
        HeadEngine(
            "trtllm", "TensorRT-LLM", 4, "TensorRT-LLM with the EAGLE-3.1 change of June 2026", START_TRTLLM,
            theta_at_top=True, pruned_mla=PRUNED_MLA,
        ),
        HeadEngine("vllm", "vLLM", 8, "vLLM 0.22.0 or newer", START_VLLM),
        HeadEngine("sglang", "SGLang", 8, "SGLang of June 2026 or newer", START_SGLANG, guesses_ids=True),
    )
}  # fmt: skip
Counting = Literal["outputs", "layers run", "by first id"]
Feature = Literal[
    "mla", "mla without yarn", "yarn", "fc_norm", "norm_output", "norm_output alone", "norm_before_fc",
    "norm_before_fc with mla", "two norms before fc", "norm_before_residual", "number of states", "final state",
    "first layer", "head size", "other width", "pruned mla",
]  # fmt: skip


@dataclass(frozen=True)
class Traces:
    """What a head's config.json and tensor names (without `model.`) show of the project that wrote them."""

    config: dict[str, Any]
    names: frozenset[str]

    @property
    def midlayer(self) -> bool:
        return any(name.startswith("midlayer.") for name in self.names)

    @property
    def embedding(self) -> bool:
        return "embed_tokens.weight" in self.names

    @property
    def modelopt_keys(self) -> bool:
        """Of every ModelOpt export since 0.40; TorchSpec writes neither."""
        eagle = self.config.get("eagle_config") or {}
        return "next_layer_regular" in eagle or "parallel_draft_step" in eagle

    @property
    def mla_class(self) -> bool:
        return self.config.get("model_type") == "kimi_k2"

    @property
    def ids(self) -> tuple[int, ...]:
        nested, top = layout.stated_ids(self.config)
        return top or nested


@dataclass(frozen=True)
class Dialect:
    """How one project writes, reads and trains heads.

    Files: `prefix` of the decoder layer's tensors; `counts`, how layer ids count, and `stores_ids`, whether they are
    stored at all; `d2t` and `t2d`, when the vocabulary maps are written; `embed_tokens`, whether its own writer stores
    the embedding; `write`, its config.json.
    Readers: `option` of `trtspec convert --to`; `uses_embedding`, whether they draft with the stored embedding;
    `needs_lm_head`, whether they cannot borrow the target's; `read_by`, the engines that serve it as it is;
    `expresses`, what it can say of a head; `eagle31` and `since`, the versions from which it can.
    `mha_needs`: what must be installed with it for an MHA head.
    Meaning: `norm_before_residual` where the key is absent; `norm_output_since`, the date from which `norm_output`
    without fc_norm means EAGLE-3.1's feedback ("": always).
    What its files may say wrongly: `injected_rope` is (exporter, factor, original_max_position_embeddings) of the YaRN
    that is written whatever the head was trained with; `fixed_rope_base` (trainer, base) of the one that MLA heads are
    trained with whatever rope_theta says; `double_norm` the versions that train with one norm too many.
    Detection: the rows are asked in the order of `rank`, and the first whose `wrote` says yes is the one.
    """

    name: str
    title: str
    option: str
    prefix: Literal["layers.0.", "midlayer."]
    counts: Counting
    write: layout.Writer
    wrote: Callable[[Traces], bool]
    rank: int
    expresses: frozenset[Feature]
    read_by: tuple[str, ...] = ()
    stores_ids: bool = True
    d2t: Literal["always", "pruned"] = "pruned"
    t2d: Literal["always", "pruned", "never"] = "never"
    embed_tokens: bool = False
    uses_embedding: bool = True
    trains_embedding: bool = False
    needs_lm_head: bool = False
    eagle31: str = ""
    since: dict[Feature, str] = field(default_factory=dict)
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
        """(layer outputs that the head was trained on, None where config.json does not say; how two statements of
        them contradict each other, "" where they do not, which `inspect` makes an error).

        Ids at the top level count the layers that ran. Nested ids that differ from them are outputs already."""
        nested, top = layout.stated_ids(config)
        if not top:
            return self.outputs(nested) if nested else None, ""
        by_top = tuple(number - 1 for number in top)
        by_dialect = self.outputs(top) if nested in ((), top) else nested
        if by_dialect == by_top:
            return by_top, ""
        where = "eagle_config" if nested else f"{self.title} layout"
        return by_dialect, (
            f"config.json states layer ids twice: {list(top)} at the top level are the outputs {list(by_top)} (ids "
            f"there count the layers that ran), {list(nested or top)} in {where} are the outputs {list(by_dialect)}"
        )

    def ids(self, outputs: tuple[int, ...] | None) -> list[int] | None:
        """Layer outputs as this dialect stores them; None when they are not known."""
        if outputs is None:
            return None
        ran = self.counts == "layers run" or (self.counts == "by first id" and outputs[0] != 1)
        return [layer + 1 for layer in outputs] if ran else list(outputs)

    def served_by(self, engine: HeadEngine, spec: HeadSpec) -> bool:
        """Whether `engine` computes a head from this layout as it is, layer ids included."""
        misread = engine.guesses_ids and self.counts == "outputs" and bool(spec.aux_layers) and spec.aux_layers[0] != 1  # type: ignore[index]
        return engine.name in self.read_by and not misread and not engine.cannot_load(spec)


def _modelopt(traces: Traces) -> bool:
    other = traces.embedding if traces.midlayer else layout.IDS_KEY in traces.config
    return traces.modelopt_keys and not other


def _vllm(traces: Traces) -> bool:
    """TorchSpec's export for vLLM counts too, where its class made it add one to the ids."""
    shifted = traces.embedding and traces.mla_class and min(traces.ids, default=1) != 1
    return not traces.midlayer and (layout.IDS_KEY in traces.config or shifted)


def _safeailab(traces: Traces) -> bool:
    return traces.midlayer and (traces.config.get("architectures") or [""])[0] == "LlamaForCausalLM"


def _specforge(traces: Traces) -> bool:
    torchspec = "_torchspec_version" in traces.config or traces.mla_class
    return traces.midlayer and "t2d" in traces.names and not torchspec


_LLAMA: frozenset[Feature] = frozenset({"yarn", "fc_norm", "norm_output", "head size", "first layer"})
_SERVED: frozenset[Feature] = _LLAMA | {"mla", "pruned mla", "norm_output alone", "number of states", "other width"}

# in the order in which they are offered
_ROWS = (
    Dialect(
        "modelopt", "TensorRT-LLM (ModelOpt's layout)", "trtllm", "layers.0.", "outputs",
        layout.write_modelopt, _modelopt, rank=3,
        expresses=_SERVED - {"pruned mla"} | {"norm_before_fc", "norm_before_fc with mla", "final state"},
        read_by=("trtllm", "sglang"), uses_embedding=False,
        eagle31="TensorRT-LLM from its change of June 2026 (1.3 line)",
        injected_rope=("ModelOpt 0.44+", 32.0, 2048), double_norm="ModelOpt 0.41 to 0.47",
    ),
    Dialect(
        "vllm", "vLLM", "vllm", "layers.0.", "layers run",
        layout.write_vllm, _vllm, rank=4,
        expresses=_SERVED | {"norm_before_fc", "two norms before fc", "norm_before_residual"},
        read_by=("vllm", "trtllm", "sglang"), embed_tokens=True, eagle31="vLLM 0.22.0",
    ),
    Dialect(
        "sglang", "SGLang", "sglang", "layers.0.", "by first id",
        layout.write_sglang, lambda traces: bool(traces.ids), rank=6,
        expresses=_SERVED - {"first layer"} | {"mla without yarn", "norm_before_fc"},
        read_by=("sglang", "trtllm"), uses_embedding=False, eagle31="SGLang of 2026-06",
        since={
            "norm_before_fc": "an SGLang with its change 32334",
            "number of states": "an SGLang that reads num_aux_hidden_states, as it does since EAGLE-3.1",
        },
    ),
    Dialect(
        "speculators", "speculators", "speculators", "layers.0.", "layers run",
        layout.write_speculators, rank=0,
        wrote=lambda traces: bool({"transformer_layer_config", "speculators_model_type"} & traces.config.keys()),
        expresses=_LLAMA | {"norm_output alone", "norm_before_fc", "norm_before_residual", "number of states"},
        read_by=("vllm",), t2d="pruned", embed_tokens=True, needs_lm_head=True, norm_before_residual=True,
        eagle31="speculators that knows fc_norm, served by vLLM 0.25.1",
    ),
    Dialect(
        "torchspec", "TorchSpec", "torchspec", "midlayer.", "outputs",
        layout.write_torchspec, lambda traces: traces.midlayer or traces.embedding, rank=5,
        expresses=_SERVED | {"mla without yarn"},
        read_by=("sglang", "trtllm"), t2d="pruned", embed_tokens=True, trains_embedding=True, needs_lm_head=True,
        eagle31="TorchSpec after its change 97",
        since={"number of states": "a TorchSpec that reads num_aux_hidden_states (that of 2026-04-28 takes three)"},
        mha_needs="transformers 4: its Llama layer asks the config for rope_theta, which transformers 5 keeps "
        "elsewhere, so that plain rope fails to load there and YaRN turns with base 10000",
        fixed_rope_base=("TorchSpec (at least to 2026-04-28)", 10000.0),
    ),
    Dialect(
        "specforge", "SpecForge", "specforge", "midlayer.", "outputs",
        layout.write_specforge, _specforge, rank=2,
        expresses=_LLAMA | {"other width"},
        read_by=("sglang", "trtllm"), d2t="always", t2d="always", embed_tokens=True, needs_lm_head=True,
        eagle31="SpecForge after its change 879 (2026-09-15)", norm_output_since="2026-09-15",
    ),
    Dialect(
        "safeailab", "SafeAILab's EAGLE", "safeailab", "midlayer.", "outputs",
        layout.write_safeailab, _safeailab, rank=1,
        expresses=frozenset({"other width"}),
        stores_ids=False, t2d="pruned", uses_embedding=False, needs_lm_head=True,
    ),
)  # fmt: skip
DIALECTS = {row.name: row for row in _ROWS}
OPTIONS = {row.option: row for row in _ROWS} | DIALECTS  # by the name that `trtspec convert` takes, or their own
DEFAULT = DIALECTS["modelopt"]  # what names and keys do not tell, and what `trtspec train` writes


def detect_dialect(config: dict[str, Any], names: set[str]) -> Dialect:
    """The dialect by the tensor names (unprefixed by `model.`) and the keys that only one writer leaves behind."""
    traces = Traces(config, frozenset(names))
    ranked = sorted(DIALECTS.values(), key=lambda row: row.rank)
    return next((row for row in ranked if row.wrote(traces)), DEFAULT)


def training_record(path: Path) -> dict[str, Any]:
    """The provenance of the `trtspec train` that made a head, also when `trtspec convert` rewrote it since; {} for
    another's head."""
    record = recorded(path)
    while record.get("command") == "convert":
        record = (record.get("source") or {}).get("provenance") or {}
    return record if record.get("command") == "train" else {}


def dialect_of(checkpoint: Checkpoint) -> Dialect:
    """The dialect that `trtspec convert` noted, as long as the tensor names fit it; else the detected one.

    Some dialects have the same names and keys, and count layers differently.
    """
    noted = DIALECTS.get(str(recorded(checkpoint.path).get("dialect")))
    if noted is not None and noted.prefix == layer_prefix(checkpoint.tensors):
        return noted
    return detect_dialect(checkpoint.config, {name.removeprefix("model.") for name in checkpoint.tensors})
