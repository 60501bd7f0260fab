"""Activation scales for NVFP4 from real text: ModelOpt's quantizers on a target that runs one layer at a time.

What is measured is what `mtq.quantize` with its `max` algorithm measures on the whole model: the largest |x| that each
quantized linear reads, while nothing is quantized yet. Linears that read the same input share one scale (gate and up,
q_a and kv_a), and so do all experts of a layer for each of their two inputs, as ModelOpt's export makes them. An expert
that no calibration token reached therefore has its layer's scale, and is counted.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trtspec import machine
from trtspec.checkpoint.conversations import REMEDY, Conversation, read_conversations
from trtspec.checkpoint.identity import identity
from trtspec.checkpoint.output import OutputDirectory
from trtspec.checkpoint.tokenizer import KimiTokenizer
from trtspec.checkpoint.writer import Journal, write_shard
from trtspec.errors import TrtspecError, UsageError
from trtspec.models.kimi import DecoderLayer
from trtspec.models.moe import Experts, MoE, dispatch
from trtspec.models.precision import default_dtype
from trtspec.models.stream import LayerStream, States
from trtspec.quant.modelopt import InputObserver
from trtspec.quant.policy import METADATA_KEY, Policy, source_name
from trtspec.report import (
    OutputOptions,
    file_sha256,
    peak_rss,
    provenance,
    versions,
    write_json,
)

MIN_TOKENS = 2
FORMAT_VERSION = 2  # raised when the same options would give other scales
FORWARD_TOKENS = 4096  # texts of equal length run together up to this many tokens
Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class CalibrationOptions:
    """`states_budget` in bytes: hidden states beyond it are read back from disk instead of kept in memory.

    `load_ahead`: see LayerStream; the scales are the same either way.
    """

    samples: int = 512
    seq_len: int = 512
    device: str = "cpu"
    dtype: torch.dtype | None = None
    states_budget: float | None = None
    load_ahead: bool | None = None

    @property
    def compute_dtype(self) -> torch.dtype:
        return self.dtype or default_dtype(self.device)


@dataclass(frozen=True, kw_only=True)
class CalibrationResult:
    """What was measured, or with `dry_run` what a run would read, hold and write; None: not part of that answer.

    `unreached`: by layer, the experts that no token was given; `dead_inputs` were always zero; `input_scale`: min,
    median and max.
    """

    output: str
    policy: str
    dtype: str
    device: str
    texts: int
    tokens: int
    layers: int
    linears: int
    # of a run
    sha256: str | None = None
    experts: int | None = None
    experts_unreached: int | None = None
    unreached: dict[str, list[int]] | None = None
    dead_inputs: list[str] | None = None
    input_scale: dict[str, float] | None = None
    layers_resumed: int | None = None
    seconds: float | None = None
    peak_rss_bytes: int | None = None
    # of a dry run
    layer_bytes: int | None = None
    states_bytes: int | None = None
    memory_bytes_estimate: int | None = None
    disk_bytes: int | None = None
    free_bytes: int | None = None
    resumes: bool | None = None
    dry_run: bool | None = None


@dataclass
class Calibration:
    """One request, checked: nothing has been written yet."""

    stream: LayerStream
    policy: Policy
    texts: list[tuple[int, ...]]
    batches: list[Tensor]
    output: Path
    options: CalibrationOptions
    data: Path
    header: dict[str, Any] = field(default_factory=dict)

    @property
    def work(self) -> OutputDirectory:
        """Journal and states of a run that is not finished, beside the output; two layers' states at the most."""
        return OutputDirectory.beside(self.output, "calibrate", 2 * self.states().bytes)

    @property
    def tokens(self) -> int:
        return sum(len(text) for text in self.texts)

    def states(self) -> States:
        """Hidden states of all texts, in memory up to the budget; each layer's are kept in the work directory."""
        stated = self.options.states_budget
        budget = machine.free_memory() / 2 if stated is None else stated
        directory = OutputDirectory.beside(self.output, "calibrate").path
        size = (self.stream.spec.hidden_size, self.stream.dtype)
        return States(self.batches, *size, budget=budget, directory=directory, durable=True)


def calibrate_checkpoint(
    source: Path,
    data: Path,
    output: Path,
    policy: Policy,
    options: CalibrationOptions | None = None,
    again: OutputOptions | None = None,
    progress: Progress | None = None,
) -> CalibrationResult:
    """Writes `output`, safetensors with `<hub name of the linear>.input_scale`; a dry run writes nothing.

    Run again after a kill it resumes with the layer that it stopped in, and the file is the one that an uninterrupted
    run writes. `progress` gets layers done and in all. Raises TrtspecError or UsageError before the first layer for
    what the source's headers, the data, the options, disk and permissions can tell.
    """
    start, again = time.monotonic(), again or OutputOptions()
    calibration = prepare(source, data, output, policy, options or CalibrationOptions())
    with calibration.stream:
        work = calibration.work
        done = not again.force and _is_finished(calibration)
        if done and not again.restart:
            if again.dry_run:
                return _estimate(calibration, resumes=True)
            work.finish()  # of a run killed after its last rename
            return _result(calibration, _provenance(output)["layers"], calibration.stream.num_layers, start)
        again = replace(again, force=again.force or done)  # `restart` may replace what this very request wrote
        if again.dry_run:
            return _estimate(calibration, work.check(again))
        with work.claim(calibration.header, again) as journal:
            resumed = _measure(calibration, journal, progress)
            layers = [journal.done[_key(index)] for index in range(calibration.stream.num_layers)]
            _finish(calibration, layers)
        return _result(calibration, layers, resumed, start)


def prepare(source: Path, data: Path, output: Path, policy: Policy, options: CalibrationOptions) -> Calibration:
    """Opens source and data and checks them against policy and options."""
    if options.device != "cpu" and not torch.cuda.is_available():
        raise UsageError(f"`device` {options.device}, and torch sees no such device", "pass `device` cpu")
    stream = LayerStream(
        source,
        activation="decoded",
        dtype=options.compute_dtype,
        device=options.device,
        threads=min(8, torch.get_num_threads()),
        load_ahead=options.load_ahead,
    )
    if not any(policy.quantizes(module) for module in _linears(stream)):
        raise UsageError(f"policy {policy.name} quantizes no linear of {source}", "choose another `policy`")
    texts = read_texts(data, KimiTokenizer(source), options.samples, options.seq_len)
    vocabulary = stream.spec.vocab_size
    if max(max(text) for text in texts) >= vocabulary:
        raise TrtspecError(
            f"the tokenizer of {source} has ids beyond the model's {vocabulary}", "repair the checkpoint"
        )
    calibration = Calibration(stream, policy, texts, equal_length_batches(texts), output, options, data)
    calibration.header = {
        "source": identity(stream.checkpoint),
        "options": {
            "policy": {"name": policy.name, "quantize": list(policy.quantize)},
            "samples": options.samples,
            "seq_len": options.seq_len,
            "dtype": str(stream.dtype).removeprefix("torch."),
            "device": options.device.partition(":")[0],
            "format_version": FORMAT_VERSION,
        },
        "data": hashlib.sha256(repr(texts).encode()).hexdigest(),
    }
    return calibration


def read_texts(data: Path, tokenizer: KimiTokenizer, samples: int, seq_len: int) -> list[tuple[int, ...]]:
    """The first `samples` texts of `data` (see `read_conversations`) as token ids, each cut to `seq_len`; those of
    fewer than 2 tokens are passed over. Raises UsageError naming the row that is none, or when nothing is left."""
    found = (_token_ids(conversation, tokenizer)[:seq_len] for conversation in read_conversations(data))
    texts = [tuple(ids) for ids in itertools.islice((ids for ids in found if len(ids) >= MIN_TOKENS), samples)]
    if not texts:
        raise UsageError(f"{data} holds no text", REMEDY)
    return texts


def _token_ids(conversation: Conversation, tokenizer: KimiTokenizer) -> list[int]:
    """Raw text as it is; messages through the chat template, with the generation prompt when the user speaks last."""
    if not conversation.messages:
        return tokenizer.encode(conversation.text + (conversation.completion or ""))
    asked = conversation.messages[-1]["role"] != "assistant"
    return tokenizer.apply_chat_template(
        conversation.messages, list(conversation.tools) or None, add_generation_prompt=asked
    )


def equal_length_batches(texts: Sequence[tuple[int, ...]]) -> list[Tensor]:
    """int64 [B, T] without padding, which would be calibrated on: texts of one length together, short ones first."""
    batches: list[Tensor] = []
    lengths: dict[int, list[tuple[int, ...]]] = {}
    for text in texts:
        lengths.setdefault(len(text), []).append(text)
    for length, group in sorted(lengths.items()):
        step = max(1, FORWARD_TOKENS // length)
        batches += [torch.tensor(group[begin : begin + step]) for begin in range(0, len(group), step)]
    return batches


def _linears(stream: LayerStream) -> Iterator[str]:
    for index in range(stream.num_layers):
        for modules in input_points(stream, index).values():
            yield from modules


def input_points(stream: LayerStream, index: int) -> dict[str, list[str]]:
    """The inputs of decoder layer `index` -> hub names of the linears that read each (experts: `experts.N.`)."""
    spec = stream.spec
    layer = f"{spec.name_prefix}model.layers.{index}."
    attention = {"qkv_a": ("q_a_proj", "kv_a_proj_with_mqa"), "q_b": ("q_b_proj",), "kv_b": ("kv_b_proj",)}
    points = {name: [f"{layer}self_attn.{leaf}" for leaf in leaves] for name, leaves in attention.items()}
    points["o"] = [f"{layer}self_attn.o_proj"]
    if index < spec.first_k_dense_replace:
        mlps = {"dense": [f"{layer}mlp."]}
    else:
        experts = [f"{layer}mlp.experts.{expert}." for expert in range(spec.n_routed_experts)]
        mlps = {"experts": experts, "shared": [f"{layer}mlp.shared_experts."]}
    for name, stems in mlps.items():
        points[f"{name}.gate_up"] = [f"{stem}{leaf}" for stem in stems for leaf in ("gate_proj", "up_proj")]
        points[f"{name}.down"] = [f"{stem}down_proj" for stem in stems]
    return points


class ObservedExperts(nn.Module):
    """Routed experts whose two inputs are observed; `tokens` counts what each expert was given."""

    def __init__(self, experts: Experts, observers: dict[str, InputObserver]) -> None:
        super().__init__()
        self.experts, self.observers = experts, observers
        self.tokens = torch.zeros(len(experts.down), dtype=torch.int64)

    def forward(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """As `Experts.forward`: x [tokens, H], ids and weights [tokens, k] -> [tokens, H]."""
        self._see("experts.gate_up", x)
        self.tokens += torch.bincount(ids.flatten().cpu(), minlength=len(self.tokens))
        return dispatch(x, ids, weights, len(self.tokens), self.one_expert)

    def one_expert(self, expert: int, x: Tensor) -> Tensor:
        gate, up = F.linear(x, self.experts.gate_up[expert]).chunk(2, -1)
        active = F.silu(gate) * up
        self._see("experts.down", active)
        return F.linear(active, self.experts.down[expert])

    def _see(self, point: str, x: Tensor) -> None:
        if point in self.observers:
            self.observers[point].see(x)


class LayerObserver:
    """The quantizers of one decoder layer: put on before its first batch, read after its last."""

    def __init__(self, calibration: Calibration, index: int, layer: DecoderLayer) -> None:
        points = input_points(calibration.stream, index)
        quantizes = calibration.policy.quantizes
        self.modules = {name: [m for m in modules if quantizes(m)] for name, modules in points.items()}
        wanted = [name for name, modules in self.modules.items() if modules]
        self.observers = {name: InputObserver() for name in wanted}
        self.experts: ObservedExperts | None = None
        self._watch(layer)

    def _watch(self, layer: DecoderLayer) -> None:
        attention = layer.self_attn
        self._input("qkv_a", attention.qkv_a_proj)
        self._input("q_b", attention.q_b_proj)
        self._input("o", attention.o_proj)
        if "kv_b" in self.observers:  # its product is folded into the queries, so its input is seen at its source
            attention.kv_a_layernorm.register_forward_hook(lambda _, __, x: self.observers["kv_b"].see(x))
        if isinstance(layer.mlp, MoE):
            assert isinstance(layer.mlp.experts, Experts)
            layer.mlp.experts = self.experts = ObservedExperts(layer.mlp.experts, self.observers)
            name, mlp = "shared", layer.mlp.shared_experts
        else:
            name, mlp = "dense", layer.mlp
        self._input(f"{name}.gate_up", mlp.get_submodule("gate_up_proj"))
        self._input(f"{name}.down", mlp.get_submodule("down_proj"))

    def _input(self, point: str, module: nn.Module) -> None:
        if point in self.observers:
            module.register_forward_pre_hook(lambda _, args: self.observers[point].see(args[0]))

    def record(self) -> dict[str, Any]:
        """For the journal: input_scale by point, points that were always zero, experts without a token."""
        scales, dead = {}, []
        for point, observer in self.observers.items():
            try:
                scales[point], alive = observer.finish()
            except TrtspecError as error:
                raise TrtspecError(f"{self.modules[point][0]}: {error.message}", error.remedy) from None
            dead += [] if alive else [point]
        tokens: list[int] = self.experts.tokens.tolist() if self.experts is not None else []
        return {"scales": scales, "dead": dead, "unreached": [e for e, count in enumerate(tokens) if not count]}


def _key(index: int) -> str:
    return f"layer {index}"


def _measure(calibration: Calibration, journal: Journal, progress: Progress | None) -> int:
    """Runs the layers that the journal lacks; returns how many it had."""
    stream, total = calibration.stream, calibration.stream.num_layers
    with calibration.states() as states:
        first = _resume(states, journal, total)
        if progress:
            progress(first, total)
        if first == total:
            return first
        if first == 0:
            stream.embed(calibration.batches, states)
        observer: LayerObserver | None = None

        def on_layer(index: int, layer: DecoderLayer) -> None:
            nonlocal observer
            observer = LayerObserver(calibration, index, layer)

        def after_layer(index: int) -> None:
            nonlocal observer
            assert observer is not None
            journal.record(_key(index), **observer.record(), states=states.record)
            states.drop_older()
            observer = None  # it holds the layer's experts
            if progress:
                progress(index + 1, total)

        stream.run(calibration.batches, states, first=first, on_layer=on_layer, after_layer=after_layer)
    return first


def _resume(states: States, journal: Journal, total: int) -> int:
    """The layer to resume with: the one behind the last recorded, when the states that it left are intact, else 0."""
    done = 0
    while _key(done) in journal.done:
        done += 1
    if done == total or (done and states.restore(journal.done[_key(done - 1)]["states"])):
        return done
    return 0


def _finish(calibration: Calibration, layers: list[dict[str, Any]]) -> None:
    """provenance.json, then the file, then the work directory's end: a kill in between leaves a run that resumes."""
    output = calibration.output
    for pattern in (f".{output.name}.*.partial", f".{output.name}.provenance.json.*.tmp"):
        for path in output.parent.glob(pattern):  # a killed run's half-written file
            path.unlink()
    tensors = {f"{name}.input_scale": torch.tensor(scale) for name, scale in _scales(calibration, layers).items()}
    options = calibration.header["options"]
    about = {"command": "calibrate", "options": options, "data": calibration.header["data"]}
    about["texts"], about["tokens"] = len(calibration.texts), calibration.tokens
    about["unreached_experts"] = sum(len(layer["unreached"]) for layer in layers)
    spec = calibration.stream.spec
    checkpoint = calibration.stream.checkpoint
    about |= {"source": source_name(checkpoint.path), "fingerprint": calibration.header["source"]}
    about["model"] = [spec.model_type, spec.num_hidden_layers, spec.n_routed_experts]
    about["modelopt"] = versions().get("nvidia-modelopt")
    source = {"path": str(calibration.stream.checkpoint.path), **calibration.header["source"]}
    kept = [{key: layer[key] for key in ("scales", "dead", "unreached")} for layer in layers]
    text = {"name": calibration.data.name, "sha256": calibration.header["data"]}
    more = {"data": text, "request": calibration.header, "layers": kept}
    write_json(_provenance_path(calibration.output), provenance("calibrate", source, options, **more))
    write_shard(calibration.output, tensors, {"format": "pt", METADATA_KEY: json.dumps(about, sort_keys=True)})
    calibration.work.finish()


def _scales(calibration: Calibration, layers: list[dict[str, Any]]) -> dict[str, float]:
    """Hub name of every quantized linear -> its input scale."""
    found: dict[str, float] = {}
    for index, layer in enumerate(layers):
        points = input_points(calibration.stream, index)
        for point, scale in layer["scales"].items():
            found |= {module: scale for module in points[point] if calibration.policy.quantizes(module)}
    return found


def _provenance_path(output: Path) -> Path:
    return output.with_name(f"{output.name}.provenance.json")


def _provenance(output: Path) -> dict[str, Any]:
    try:
        return json.loads(_provenance_path(output).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}


def _is_finished(calibration: Calibration) -> bool:
    """Whether the output is what this very request writes."""
    if calibration.work.journal.exists() or not calibration.output.is_file():
        return False
    return _provenance(calibration.output).get("request") == json.loads(json.dumps(calibration.header))


def _result(calibration: Calibration, layers: list[dict[str, Any]], resumed: int, start: float) -> CalibrationResult:
    scales = list(_scales(calibration, layers).values())
    spec = calibration.stream.spec
    unreached = {str(index): layer["unreached"] for index, layer in enumerate(layers) if layer["unreached"]}
    return replace(
        _sizes(calibration),
        sha256=file_sha256(calibration.output),
        experts=spec.n_routed_experts * (spec.num_hidden_layers - spec.first_k_dense_replace),
        experts_unreached=sum(len(ids) for ids in unreached.values()),
        unreached=unreached,
        dead_inputs=[f"layer {index} {point}" for index, layer in enumerate(layers) for point in layer["dead"]],
        input_scale={"min": min(scales), "median": statistics.median(scales), "max": max(scales)},
        layers_resumed=resumed,
        seconds=round(time.monotonic() - start, 3),
        peak_rss_bytes=peak_rss(),
    )


def _sizes(calibration: Calibration) -> CalibrationResult:
    """What a run and a dry run both tell."""
    return CalibrationResult(
        output=str(calibration.output),
        policy=calibration.policy.name,
        dtype=calibration.header["options"]["dtype"],
        device=calibration.options.device,
        texts=len(calibration.texts),
        tokens=calibration.tokens,
        layers=calibration.stream.num_layers,
        linears=sum(calibration.policy.quantizes(module) for module in _linears(calibration.stream)),
    )


def _estimate(calibration: Calibration, resumes: bool) -> CalibrationResult:
    stream, states = calibration.stream, calibration.states()
    layer = max(stream.layer_bytes(index) for index in {0, stream.num_layers - 1})
    return replace(
        _sizes(calibration),
        layer_bytes=layer,
        states_bytes=states.bytes,
        memory_bytes_estimate=(1 + stream.load_ahead) * layer + (states.bytes if states.in_memory else 0),
        disk_bytes=2 * states.bytes,
        free_bytes=machine.free_disk(calibration.output.parent),
        resumes=resumes,
        dry_run=True,
    )
