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

MIN_TOKENS = 2  # of a text
# Roles of parameters that read no input, and of routers.
NO_LINEARS = ("norms", "router", "router bias")
FORMAT_VERSION = 3  # raised when the same options would give other scales
STATES_SHARE = 0.5  # of the free memory for hidden states; others are read back from disk
FORWARD_TOKENS = 4096  # texts of equal length run together up to this many tokens
LOAD_THREADS = 8


@dataclass(frozen=True)
class CalibrationOptions:
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
    """Measures activation scales of `source` on `data`. A dry run writes nothing.

    After a kill the same call resumes with the layer that it stopped in, and writes the same file
    as an uninterrupted run. Checks headers, data, options, disk and permissions before the first
    layer. Raises TrtspecError or UsageError.

    Args:
        data: rows of text or conversations.
        output: safetensors file with `<hub name of the linear>.input_scale`.
        policy: None for the policy of the source's release.
        bar: shows the layers that are done.
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
    """The result of a run, or of a dry run. None: not a field of that result.

    Args:
        unreached: by layer, the experts that no token was routed to.
        dead_inputs: inputs that were always zero.
        input_scale: min, median and max of the scales.
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


class DecisiveOptions(TypedDict):
    """The options that decide the scales."""

    policy: dict[str, Any]
    samples: int
    seq_len: int
    dtype: str
    device: str
    format_version: int


class CalibrationHeader(TypedDict):
    """The journal's header. `source`: its fingerprint. `data`: the digest of the texts."""

    source: dict[str, Any]
    options: DecisiveOptions
    data: str


class LayerScales(TypedDict):
    """The journal's record of a layer.

    Args:
        scales: input_scale by point.
        dead: points whose input was always zero.
        unreached: experts without a token.
        states: of the texts after the layer.
    """

    scales: dict[str, float]
    dead: list[str]
    unreached: list[int]
    states: NotRequired[StatesRecord]


@dataclass(frozen=True)
class Calibration:
    """A checked request: nothing has been written yet. `linears`: those that become NVFP4."""

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
        """The journal's header: everything that decides the scales."""
        options: DecisiveOptions = {
            "policy": {"name": self.policy.name, "quantize": self.policy.quantize},
            "samples": self.options.samples,
            "seq_len": self.options.seq_len,
            "dtype": str(self.stream.dtype).removeprefix("torch."),
            "device": self.options.device.partition(":")[0],
            "format_version": FORMAT_VERSION,
        }
        texts = repr(self.texts)
        data_digest = hashlib.sha256(texts.encode()).hexdigest()
        checkpoint = self.stream.checkpoint
        source = identity(checkpoint) | commit_record(checkpoint.path)
        return {"source": source, "options": options, "data": data_digest}

    @property
    def work(self) -> OutputDirectory:
        """Directory beside the output with journal and states of a run that is not finished.

        It holds the states of two layers at most.
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
        """Hidden states of all texts, in memory up to the budget.

        The states of each layer are kept in the work directory.
        """
        budget = STATES_SHARE * machine.free_memory()
        directory = OutputDirectory.beside(self.output, "calibrate").path
        size = (self.stream.spec.hidden_size, self.stream.dtype)
        return States(self.batches, *size, budget=budget, directory=directory, durable=True)

    def result(self, **fields: Any) -> CalibrationResult:
        """The result of a run or of a dry run, whose own fields are `fields`."""
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
    """Opens source and data, and checks them against policy and options.

    Raises TrtspecError or UsageError. `policy` None: the policy of the source's release.
    """
    stream = LayerStream(
        source,
        activation="decoded",
        dtype=options.dtype or default_dtype(options.device),
        device=options.device,
        threads=min(LOAD_THREADS, torch.get_num_threads()),
    )
    policy = policy or default_policy(stream.spec, source_name(stream.checkpoint.path))
    linears = {
        name.removesuffix(".weight")
        for name, part in stream.spec.family.tensors(stream.spec)
        if part.role in policy.quantize
    }
    texts = read_texts(data, KimiTokenizer(source), options.samples, options.seq_len)
    batches = equal_length_batches(texts)
    return Calibration(stream, policy, linears, texts, batches, output, options, data)


def read_texts(
    data: Path, tokenizer: KimiTokenizer, samples: int, seq_len: int
) -> list[tuple[int, ...]]:
    """The first `samples` renderings of `data` (see `render`) as token ids, each cut to `seq_len`.

    Skips texts of fewer than 2 tokens, and rows that cannot be rendered. Raises UsageError naming
    the row if a row is not a conversation, or if no text is left.
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
    """Renders each row. Appends the error of a row that cannot be rendered to `refused`."""
    for conversation in read_conversations(data):
        try:
            yield from render(conversation, tokenizer)
        except UsageError as error:
            refused.append(error)


def equal_length_batches(texts: Sequence[tuple[int, ...]]) -> list[Tensor]:
    """int64 [B, T]: texts of one length together, short ones first.

    There is no padding, because it would be calibrated on.
    """
    batches: list[Tensor] = []
    for length, group in itertools.groupby(sorted(texts, key=len), len):
        rows = list(group)
        step = max(1, FORWARD_TOKENS // length)
        for begin in range(0, len(rows), step):
            batches.append(torch.tensor(rows[begin : begin + step]))
    return batches


def input_points(stream: LayerStream, index: int) -> dict[str, list[str]]:
    """Input points of decoder layer `index` -> hub names of the linears that read the input.

    A point is a linear as the model fuses it, which may be several linears of the checkpoint.
    """
    points = {}
    for source in layer_layout(stream.spec, index):
        if source.role not in NO_LINEARS:
            point = source.parameter.removesuffix(".weight")
            linears = [name.removesuffix(".weight") for name in source.names]
            points[point] = linears
    return points


class LayerObserver:
    """The quantizers of one decoder layer: attached before its first batch, read after its last."""

    def __init__(self, calibration: Calibration, index: int, layer: DecoderLayer) -> None:
        observers: dict[str, InputObserver] = {}
        for point, modules in input_points(calibration.stream, index).items():
            linear = next((name for name in modules if name in calibration.linears), None)
            if linear:
                observers[point] = InputObserver(linear)
        self.observers = observers
        self.experts: ObservedExperts | None = None

        # As a method it would make the experts hold this object, which holds them.
        def see(point: str, x: Tensor) -> None:
            if point in observers:
                observers[point].see(x)

        mlp = layer.mlp
        if isinstance(mlp, MoE):
            assert isinstance(mlp.experts, Experts)
            self.experts = ObservedExperts(mlp.experts, see)
            mlp.experts = self.experts
        attention = layer.self_attn
        for point in observers:
            if point.startswith("mlp.experts."):
                continue
            module = layer.get_submodule(point)
            if module is attention.kv_b_proj:
                # Its product is folded into the queries, so its input is seen at its source.
                attention.kv_a_layernorm.register_forward_hook(
                    lambda _, __, x, point=point: see(point, x)
                )
            else:
                module.register_forward_pre_hook(lambda _, args, point=point: see(point, args[0]))

    def record(self) -> LayerScales:
        """For the journal: input_scale by point, points always zero, experts without a token."""
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


class ObservedExperts(nn.Module):
    """Routed experts whose two inputs are observed, and the tokens of each expert counted."""

    def __init__(self, experts: Experts, observe: Callable[[str, Tensor], None]) -> None:
        super().__init__()
        self.experts = experts
        self.observe = observe
        self.tokens_per_expert = torch.zeros(len(experts.down), dtype=torch.int64)

    def forward(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """Computes `Experts.forward`: x [tokens, H], ids and weights [tokens, k] -> [tokens, H]."""
        self.observe("mlp.experts.gate_up", x)
        count = len(self.tokens_per_expert)
        self.tokens_per_expert += torch.bincount(ids.flatten().cpu(), minlength=count)
        return dispatch(x, ids, weights, count, self.run_expert)

    def run_expert(self, expert: int, x: Tensor) -> Tensor:
        """The output of one expert for its tokens x [n, H] -> [n, H]."""
        gate, up = F.linear(x, self.experts.gate_up[expert]).chunk(2, -1)
        active = F.silu(gate) * up
        self.observe("mlp.experts.down", active)
        return F.linear(active, self.experts.down[expert])


def _measure(calibration: Calibration, journal: Journal, bar: ProgressBar) -> int:
    """Runs the layers that the journal lacks. Returns how many it had."""
    stream = calibration.stream
    total = stream.num_layers
    batches = calibration.batches
    with calibration.states() as states:
        first = len(journal.done)
        if 0 < first < total:
            states_record: StatesRecord = journal.done[f"layer {first - 1}"]["states"]
            if not states.restore(states_record):
                first = 0  # the states of the last recorded layer are damaged
        bar.show(first, total)
        if first == 0:
            stream.embed(batches, states)
        # The observer of the layer that runs. It holds the layer's experts.
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
    """Writes provenance.json, then the scales, then removes the work directory.

    A kill in between leaves a run that resumes.
    """
    output = calibration.output
    for pattern in (f".{output.name}.*.partial", f".{output.name}.provenance.json.*.tmp"):
        for path in output.parent.glob(pattern):  # a killed run's half-written file
            path.unlink()
    header = calibration.header
    fingerprint = header["source"]
    options = header["options"]
    data_digest = header["data"]
    checkpoint = calibration.stream.checkpoint
    spec = calibration.stream.spec
    unreached_experts = sum(len(layer["unreached"]) for layer in layers)
    model = [spec.model_type, spec.num_hidden_layers, spec.n_routed_experts]
    metadata = {
        "command": "calibrate",
        "options": options,
        "data": data_digest,
        "texts": len(calibration.texts),
        "tokens": calibration.tokens,
        "unreached_experts": unreached_experts,
        "source": source_name(checkpoint.path),
        "fingerprint": fingerprint,
        "model": model,
        "modelopt": versions().get("nvidia-modelopt"),
    }
    source = {"path": str(checkpoint.path), **fingerprint}
    measured = [
        {"scales": layer["scales"], "dead": layer["dead"], "unreached": layer["unreached"]}
        for layer in layers
    ]
    data = {"name": calibration.data.name, "sha256": data_digest}
    record = provenance("calibrate", source, options, data=data, layers=measured)
    write_json(calibration.provenance_path, record)
    scales = _scales(calibration, layers)
    tensors = {f"{linear}.input_scale": torch.tensor(scale) for linear, scale in scales.items()}
    metadata_text = json.dumps(metadata, sort_keys=True)
    write_shard(output, tensors, {"format": "pt", METADATA_KEY: metadata_text})
    calibration.work.finish()


def _scales(calibration: Calibration, layers: list[LayerScales]) -> dict[str, float]:
    """Hub name of every quantized linear -> its input scale."""
    scales: dict[str, float] = {}
    for index, layer in enumerate(layers):
        points = input_points(calibration.stream, index)
        for point, scale in layer["scales"].items():
            scales |= {module: scale for module in points[point] if module in calibration.linears}
    return scales


def _result(
    calibration: Calibration, layers: list[LayerScales], resumed: int, start: float
) -> CalibrationResult:
    """The result of a run that began at `start` (monotonic seconds)."""
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
    """The result of a dry run."""
    stream = calibration.stream
    states = calibration.states()
    # The first layer is dense, the last has experts.
    layer_bytes = max(map(stream.layer_bytes, {0, stream.num_layers - 1}))
    memory_bytes = (1 + stream.load_ahead) * layer_bytes
    if states.in_memory:
        memory_bytes += states.bytes
    return calibration.result(
        layer_bytes=layer_bytes,
        states_bytes=states.bytes,
        memory_bytes_estimate=memory_bytes,
        # States are read while those of the next layer are written.
        disk_bytes=2 * states.bytes,
        free_bytes=machine.free_disk(calibration.output.parent),
        resumes=resumes,
        dry_run=True,
    )
