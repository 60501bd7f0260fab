"""Activation scales for NVFP4 from real text, by ModelOpt's quantizers, one layer at a time.

The scale is measured as `mtq.quantize` with its `max` algorithm does on the whole model: the
largest |x| that each quantized linear reads, while nothing is quantized yet. Linears that read the
same input share one scale (gate and up, q_a and kv_a). So do all experts of a layer for each of
their two inputs, as ModelOpt's export makes them. An expert that no calibration token reached
therefore has its layer's scale, and is counted.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NotRequired, TypedDict

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trtspec import machine
from trtspec.checkpoint.conversations import REMEDY, read_conversations
from trtspec.checkpoint.hub import commit_record, source_name
from trtspec.checkpoint.identity import identity
from trtspec.checkpoint.output import OutputDirectory
from trtspec.checkpoint.rendering import Rendering, render
from trtspec.checkpoint.tokenizer import KimiTokenizer
from trtspec.checkpoint.writer import Journal, write_shard
from trtspec.errors import UsageError
from trtspec.models.k2 import DecoderLayer
from trtspec.models.moe import Experts, MoE, dispatch
from trtspec.models.precision import default_dtype
from trtspec.models.stream import LayerStream, States, StatesRecord
from trtspec.models.weights import layer_layout
from trtspec.quant.modelopt import InputObserver
from trtspec.quant.policy import METADATA_KEY, Policy, default_policy
from trtspec.report import (
    OutputOptions,
    ProgressBar,
    file_sha256,
    note,
    peak_rss,
    provenance,
    versions,
    write_json,
)

MIN_TOKENS = 2  # minimum number of tokens of a text
# Roles of parameters that are not linears, and of routers, which are never quantized.
NO_LINEARS = ("norms", "router", "router bias")
FORMAT_VERSION = 3  # raised if a change of the code gives other scales for the same options
STATES_SHARE = 0.5  # fraction of the free memory for hidden states, which are otherwise on disk
FORWARD_TOKENS = 4096  # maximum number of tokens of a batch of texts of equal length
LOAD_THREADS = 8


@dataclass(frozen=True)
class CalibrationOptions:
    """Options of a calibration.

    Args:
        samples: maximum number of texts.
        seq_len: maximum number of tokens of a text.
        dtype: compute dtype. None: the default of the device.
    """

    samples: int = 512
    seq_len: int = 512
    device: str = "cpu"
    dtype: torch.dtype | None = None


def calibrate_checkpoint(
    source: Path,
    data: Path,
    output: Path,
    policy: Policy | None,
    options: CalibrationOptions = CalibrationOptions(),
    output_options: OutputOptions = OutputOptions(),
    bar: ProgressBar = ProgressBar(),
) -> CalibrationResult:
    """Measures the activation scales of the model `source` on the texts of `data`.

    A dry run only makes the checks and estimates memory and disk. After a kill the same call
    resumes at the layer that was not finished, and writes the same file as an uninterrupted run.
    Raises TrtspecError or UsageError before the first layer if headers, data, options, disk or
    permissions prevent a calibration.

    Args:
        data: file or directory of texts or conversations.
        output: safetensors file to write, with `<hub name of the linear>.input_scale`.
        policy: quantization policy. None: the policy of the source's release.
        bar: progress bar of the layers.
    """
    start = time.monotonic()
    calibration = prepare(source, data, output, policy, options)
    with calibration.stream:
        if output_options.dry_run:
            return _estimate(calibration, calibration.work.check(output_options))
        with calibration.work.claim(calibration.header, output_options) as journal:
            resumed = _measure(calibration, journal, bar)
            layers: list[LayerScales] = list(journal.done.values())
            _finish(calibration, layers)
        return _result(calibration, layers, resumed, start)


@dataclass(frozen=True, kw_only=True)
class CalibrationResult:
    """The result of a calibration or of a dry run. The fields of the other result are None.

    Args:
        texts: number of texts.
        tokens: number of tokens of all texts.
        layers: number of decoder layers.
        linears: number of linears that become NVFP4.
        experts: number of routed experts in all layers.
        experts_unreached: number of experts that no token was routed to.
        unreached: numbers of the experts that no token was routed to, by layer.
        dead_inputs: inputs that were always zero.
        input_scale: min, median and max of the scales.
        layers_resumed: number of layers that an earlier, interrupted run had done.
        layer_bytes: size of the largest decoded layer in bytes.
        states_bytes: size of the hidden states between two layers in bytes.
        disk_bytes: bytes on disk that the calibration needs while it runs.
        resumes: whether the output has an interrupted run that would resume.
    """

    output: str
    policy: str
    dtype: str
    device: str
    texts: int
    tokens: int
    layers: int
    linears: int
    # fields of a calibration
    sha256: str | None = None
    experts: int | None = None
    experts_unreached: int | None = None
    unreached: dict[str, list[int]] | None = None
    dead_inputs: list[str] | None = None
    input_scale: dict[str, float] | None = None
    layers_resumed: int | None = None
    seconds: float | None = None
    peak_rss_bytes: int | None = None
    # fields of a dry run
    layer_bytes: int | None = None
    states_bytes: int | None = None
    memory_bytes_estimate: int | None = None
    disk_bytes: int | None = None
    free_bytes: int | None = None
    resumes: bool | None = None
    dry_run: bool | None = None


class DecisiveOptions(TypedDict):
    """The options that decide the scales."""

    policy: dict[str, Any]
    samples: int
    seq_len: int
    dtype: str
    device: str
    format_version: int


class CalibrationHeader(TypedDict):
    """Header of the journal, which a resume must repeat.

    Args:
        source: fingerprint of the checkpoint.
        data: digest of the texts.
    """

    source: dict[str, Any]
    options: DecisiveOptions
    data: str


class LayerScales(TypedDict):
    """The journal's entry of a layer.

    Args:
        scales: input scale of each input point.
        dead: input points whose input was always zero.
        unreached: numbers of the experts that no token was routed to.
        states: facts about the file with the hidden states after the layer.
    """

    scales: dict[str, float]
    dead: list[str]
    unreached: list[int]
    states: NotRequired[StatesRecord]


@dataclass(frozen=True)
class Calibration:
    """The checked inputs of a calibration, before anything is written.

    Args:
        linears: hub names of the linears that become NVFP4.
        texts: token ids of each text.
        batches: texts of equal length, int64 [B, T].
        output: safetensors file to write.
        data: file or directory that the texts come from.
    """

    stream: LayerStream
    policy: Policy
    linears: set[str]
    texts: list[tuple[int, ...]]
    batches: list[Tensor]
    output: Path
    options: CalibrationOptions
    data: Path

    @cached_property
    def header(self) -> CalibrationHeader:
        """Header of the journal: everything that decides the scales, which a resume must repeat."""
        policy = self.policy
        options = self.options
        stream = self.stream
        recorded_options: DecisiveOptions = {
            "policy": {"name": policy.name, "quantize": policy.quantize},
            "samples": options.samples,
            "seq_len": options.seq_len,
            "dtype": str(stream.dtype).removeprefix("torch."),
            "device": options.device.partition(":")[0],  # without the number of the GPU
            "format_version": FORMAT_VERSION,
        }
        texts = repr(self.texts)
        data_digest = hashlib.sha256(texts.encode()).hexdigest()
        checkpoint = stream.checkpoint
        source = identity(checkpoint) | commit_record(checkpoint.path)
        return {"source": source, "options": recorded_options, "data": data_digest}

    @property
    def work(self) -> OutputDirectory:
        """Directory next to the output, with the journal and states of an unfinished calibration.

        The directory holds the hidden states of two layers at most.
        """
        states_bytes = 2 * self.states().bytes
        return OutputDirectory.beside(self.output, "calibrate", states_bytes)

    @property
    def provenance_path(self) -> Path:
        return self.output.with_name(f"{self.output.name}.provenance.json")

    @property
    def tokens(self) -> int:
        return sum(len(text) for text in self.texts)

    def states(self) -> States:
        """Makes the storage for the hidden states of all texts.

        The states are in memory if STATES_SHARE of the free memory is enough. Each layer's states
        are also written to the work directory, so that a killed calibration can resume.
        """
        budget = STATES_SHARE * machine.free_memory()
        directory = OutputDirectory.beside(self.output, "calibrate").path
        size = (self.stream.spec.hidden_size, self.stream.dtype)
        return States(self.batches, *size, budget=budget, directory=directory, durable=True)

    def result(self, **fields: Any) -> CalibrationResult:
        """Makes a result of the common fields and of `fields`."""
        return CalibrationResult(
            output=str(self.output),
            policy=self.policy.name,
            dtype=self.header["options"]["dtype"],
            device=self.options.device,
            texts=len(self.texts),
            tokens=self.tokens,
            layers=self.stream.num_layers,
            linears=len(self.linears),
            **fields,
        )


def prepare(
    source: Path, data: Path, output: Path, policy: Policy | None, options: CalibrationOptions
) -> Calibration:
    """Opens the model and the data of a calibration, and tokenizes the texts.

    Raises TrtspecError if the model has an error. Raises UsageError if the data have no text, or if
    a row is not a conversation. `policy` None means the policy of the source's release.
    """
    stream = LayerStream(
        source,
        activation="decoded",
        dtype=options.dtype or default_dtype(options.device),
        device=options.device,
        threads=min(LOAD_THREADS, torch.get_num_threads()),
    )
    spec = stream.spec
    policy = policy or default_policy(spec, source_name(stream.checkpoint.path))
    linears = {
        name.removesuffix(".weight")
        for name, part in spec.family.tensors(spec)
        if part.role in policy.quantize
    }
    texts = read_texts(data, KimiTokenizer(source), options.samples, options.seq_len)
    batches = equal_length_batches(texts)
    return Calibration(stream, policy, linears, texts, batches, output, options, data)


def read_texts(
    data: Path, tokenizer: KimiTokenizer, samples: int, seq_len: int
) -> list[tuple[int, ...]]:
    """Reads the first `samples` texts of `data` as token ids, each cut to `seq_len` tokens.

    A text is a rendering of a conversation (see `render`). Skips texts of fewer than MIN_TOKENS
    tokens, and rows that cannot be rendered. Raises UsageError naming the row if a row is not a
    conversation, or if no text is left.
    """
    refused: list[UsageError] = []
    renderings = _renderings(data, tokenizer, refused)
    texts_cut = (tuple(rendering.tokens[:seq_len]) for rendering in renderings)
    long_enough = (ids for ids in texts_cut if len(ids) >= MIN_TOKENS)
    texts = list(itertools.islice(long_enough, samples))
    if not texts:
        raise refused[0] if refused else UsageError(f"{data} holds no text", REMEDY)
    if refused:
        note(f"{data}: {len(refused)} rows refused, first: {refused[0].message}")
    return texts


def _renderings(
    data: Path, tokenizer: KimiTokenizer, refused: list[UsageError]
) -> Iterator[Rendering]:
    """Yields the renderings of each conversation of `data`.

    Appends the error of a row that cannot be rendered to `refused`.
    """
    for conversation in read_conversations(data):
        try:
            yield from render(conversation, tokenizer)
        except UsageError as error:
            refused.append(error)


def equal_length_batches(texts: Sequence[tuple[int, ...]]) -> list[Tensor]:
    """Groups texts of equal length into batches int64 [B, T], shorter texts first.

    The batches have no padding, because its activations would count in the scales.
    """
    batches: list[Tensor] = []
    for length, group in itertools.groupby(sorted(texts, key=len), len):
        rows = list(group)
        batch_size = max(1, FORWARD_TOKENS // length)
        for begin in range(0, len(rows), batch_size):
            batches.append(torch.tensor(rows[begin : begin + batch_size]))
    return batches


def input_points(stream: LayerStream, index: int) -> dict[str, list[str]]:
    """Finds the inputs of decoder layer `index` whose activations are measured.

    Returns, by input point, the hub names of the linears that read that input. An input point is
    the name of a linear in the model, which may fuse several linears of the checkpoint.
    """
    points = {}
    for source in layer_layout(stream.spec, index):
        if source.role not in NO_LINEARS:
            point = source.parameter.removesuffix(".weight")
            linears = [name.removesuffix(".weight") for name in source.names]
            points[point] = linears
    return points


class LayerObserver:
    """Observers of the input points of one decoder layer.

    The observers are attached to `layer` before its first batch, and read after its last batch. The
    attribute `experts` is None if the layer is dense.
    """

    def __init__(self, calibration: Calibration, index: int, layer: DecoderLayer) -> None:
        observers: dict[str, InputObserver] = {}
        for point, linears in input_points(calibration.stream, index).items():
            # Linears that the policy leaves unquantized need no scale.
            linear = next((name for name in linears if name in calibration.linears), None)
            if linear:
                observers[point] = InputObserver(linear)
        self.observers = observers
        self.experts: ObservedExperts | None = None

        # A method would make a reference cycle: the experts hold it, and this object the experts.
        def see(point: str, x: Tensor) -> None:
            """Shows the input x of a point to the point's observer, if it has one."""
            if point in observers:
                observers[point].see(x)

        mlp = layer.mlp
        if isinstance(mlp, MoE):
            experts = mlp.experts
            assert isinstance(experts, Experts)
            self.experts = ObservedExperts(experts, see)
            mlp.experts = self.experts
        for point in observers:
            # The experts show their own inputs.
            if not point.startswith("mlp.experts."):
                _attach(layer, point, see)

    def record(self) -> LayerScales:
        """Returns the journal's entry of the layer."""
        scales = {}
        dead = []
        for point, observer in self.observers.items():
            scales[point], was_nonzero = observer.finish()
            if not was_nonzero:
                dead.append(point)
        unreached: list[int] = []
        if self.experts:
            unreached = (self.experts.tokens_per_expert == 0).nonzero().flatten().tolist()
        return {"scales": scales, "dead": dead, "unreached": unreached}


def _attach(layer: DecoderLayer, point: str, see: Callable[[str, Tensor], None]) -> None:
    """Attaches a hook to `layer` that calls `see` with the input of the linear `point`."""
    attention = layer.self_attn
    module = layer.get_submodule(point)
    if module is attention.kv_b_proj:
        # The model folds kv_b_proj into the queries and never calls the linear, whose input is the
        # output of the norm.
        attention.kv_a_layernorm.register_forward_hook(lambda _, __, x: see(point, x))
    else:
        module.register_forward_pre_hook(lambda _, args: see(point, args[0]))


class ObservedExperts(nn.Module):
    """Routed experts that show their two inputs to observers, and count the tokens of each expert.

    Args:
        observe: function that gets an input point and its input.
    """

    def __init__(self, experts: Experts, observe: Callable[[str, Tensor], None]) -> None:
        super().__init__()
        self.experts = experts
        self.observe = observe
        self.tokens_per_expert = torch.zeros(len(experts.down), dtype=torch.int64)

    def forward(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """Computes the same as `Experts.forward`, [tokens, H].

        x is [tokens, H]. The expert ids and weights are [tokens, k].
        """
        self.observe("mlp.experts.gate_up", x)
        count = len(self.tokens_per_expert)
        self.tokens_per_expert += torch.bincount(ids.flatten().cpu(), minlength=count)
        return dispatch(x, ids, weights, count, self.run_expert)

    def run_expert(self, expert: int, x: Tensor) -> Tensor:
        """Computes the output [n, H] of one expert for its tokens x [n, H]."""
        gate, up = F.linear(x, self.experts.gate_up[expert]).chunk(2, -1)
        active = F.silu(gate) * up
        self.observe("mlp.experts.down", active)
        return F.linear(active, self.experts.down[expert])


def _measure(calibration: Calibration, journal: Journal, bar: ProgressBar) -> int:
    """Runs the layers that the journal lacks, and records the scales of each layer.

    Returns the number of layers that were not run, because the journal had them.
    """
    stream = calibration.stream
    total = stream.num_layers
    batches = calibration.batches
    with calibration.states() as states:
        first = len(journal.done)
        if 0 < first < total:
            states_record: StatesRecord = journal.done[f"layer {first - 1}"]["states"]
            if not states.restore(states_record):
                first = 0  # without the states of the last recorded layer all layers run again
        bar.show(first, total)
        if first == 0:
            stream.embed(batches, states)
        # Holds the observer of the current layer only, because an observer keeps the experts alive.
        observers: dict[int, LayerObserver] = {}

        def on_layer(index: int, layer: DecoderLayer) -> None:
            observers[index] = LayerObserver(calibration, index, layer)

        def after_layer(index: int) -> None:
            record = observers.pop(index).record()
            journal.record(f"layer {index}", **record, states=states.record)
            states.drop_older()
            bar.show(index + 1, total)

        stream.run(batches, states, first=first, on_layer=on_layer, after_layer=after_layer)
    return first


def _finish(calibration: Calibration, layers: list[LayerScales]) -> None:
    """Writes the provenance, then the scales, then removes the work directory.

    A kill before the end leaves a calibration that resumes.

    Args:
        layers: journal's entry of each layer.
    """
    output = calibration.output
    for pattern in (f".{output.name}.*.partial", f".{output.name}.provenance.json.*.tmp"):
        for path in output.parent.glob(pattern):  # incomplete file of a killed calibration
            path.unlink()
    header = calibration.header
    checkpoint = calibration.stream.checkpoint
    source = {"path": str(checkpoint.path), **header["source"]}
    measured = [
        {"scales": layer["scales"], "dead": layer["dead"], "unreached": layer["unreached"]}
        for layer in layers
    ]
    data = {"name": calibration.data.name, "sha256": header["data"]}
    record = provenance("calibrate", source, header["options"], data=data, layers=measured)
    write_json(calibration.provenance_path, record)
    scales = _scales(calibration, layers)
    tensors = {f"{linear}.input_scale": torch.tensor(scale) for linear, scale in scales.items()}
    metadata = json.dumps(_metadata(calibration, layers), sort_keys=True)
    write_shard(output, tensors, {"format": "pt", METADATA_KEY: metadata})
    calibration.work.finish()


def _metadata(calibration: Calibration, layers: list[LayerScales]) -> dict[str, Any]:
    """Returns the facts about the calibration that the header of the output keeps.

    Args:
        layers: journal's entry of each layer.
    """
    stream = calibration.stream
    spec = stream.spec
    header = calibration.header
    return {
        "command": "calibrate",
        "options": header["options"],
        "data": header["data"],
        "texts": len(calibration.texts),
        "tokens": calibration.tokens,
        "unreached_experts": sum(len(layer["unreached"]) for layer in layers),
        "source": source_name(stream.checkpoint.path),
        "fingerprint": header["source"],
        "model": [spec.model_type, spec.num_hidden_layers, spec.n_routed_experts],
        "modelopt": versions().get("nvidia-modelopt"),
    }


def _scales(calibration: Calibration, layers: list[LayerScales]) -> dict[str, float]:
    """Returns the input scale of every quantized linear by its hub name.

    Args:
        layers: journal's entry of each layer.
    """
    scales: dict[str, float] = {}
    for index, layer in enumerate(layers):
        points = input_points(calibration.stream, index)
        for point, scale in layer["scales"].items():
            quantized = [linear for linear in points[point] if linear in calibration.linears]
            scales |= dict.fromkeys(quantized, scale)
    return scales


def _result(
    calibration: Calibration, layers: list[LayerScales], resumed: int, start: float
) -> CalibrationResult:
    """Makes the result of a finished calibration.

    Args:
        layers: journal's entry of each layer.
        resumed: number of layers that were not run, because the journal had them.
        start: value of time.monotonic() at the start of the call.
    """
    scales = list(_scales(calibration, layers).values())
    spec = calibration.stream.spec
    moe_layers = spec.num_hidden_layers - spec.first_k_dense_replace
    unreached = {}
    dead_inputs = []
    for index, layer in enumerate(layers):
        dead_inputs += [f"layer {index} {point}" for point in layer["dead"]]
        layer_unreached = layer["unreached"]
        if layer_unreached:
            unreached[str(index)] = layer_unreached
    experts_unreached = sum(len(ids) for ids in unreached.values())
    input_scale = {
        "min": min(scales),
        "median": statistics.median(scales),
        "max": max(scales),
    }
    return calibration.result(
        sha256=file_sha256(calibration.output),
        experts=spec.n_routed_experts * moe_layers,
        experts_unreached=experts_unreached,
        unreached=unreached,
        dead_inputs=dead_inputs,
        input_scale=input_scale,
        layers_resumed=resumed,
        seconds=round(time.monotonic() - start, 3),
        peak_rss_bytes=peak_rss(),
    )


def _estimate(calibration: Calibration, resumes: bool) -> CalibrationResult:
    """Makes the result of a dry run. `resumes`: whether an interrupted calibration would resume."""
    stream = calibration.stream
    states = calibration.states()
    # The first layer is dense, the last has experts.
    layer_bytes = max(map(stream.layer_bytes, {0, stream.num_layers - 1}))
    memory_bytes = (1 + stream.load_ahead) * layer_bytes
    states_bytes = states.bytes
    if states.in_memory:
        memory_bytes += states_bytes
    return calibration.result(
        layer_bytes=layer_bytes,
        states_bytes=states_bytes,
        memory_bytes_estimate=memory_bytes,
        # The states of one layer are read while the states of the next layer are written.
        disk_bytes=2 * states_bytes,
        free_bytes=machine.free_disk(calibration.output.parent),
        resumes=resumes,
        dry_run=True,
    )
