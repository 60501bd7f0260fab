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
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

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
from trtspec.models.stream import LayerStream, States
from trtspec.models.weights import layer_layout
from trtspec.quant.modelopt import InputObserver
from trtspec.quant.policy import METADATA_KEY, Policy, default_policy
from trtspec.report import (
    Bar,
    OutputOptions,
    file_sha256,
    note,
    peak_rss,
    provenance,
    versions,
    write_json,
)

MIN_TOKENS = 2
NO_LINEARS = ("norms", "router", "router bias")  # roles of what reads no input, and of routers
FORMAT_VERSION = 3  # raised when the same options would give other scales
STATES_SHARE = 0.5  # of the free memory for hidden states; others are read back from disk
FORWARD_TOKENS = 4096  # texts of equal length run together up to this many tokens


@dataclass(frozen=True)
class CalibrationOptions:
    samples: int = 512
    seq_len: int = 512
    device: str = "cpu"
    dtype: torch.dtype | None = None


@dataclass(frozen=True, kw_only=True)
class CalibrationResult:
    """What was measured, or with `dry_run` what a run would read, hold and write; None: not part of that answer.
    `unreached`: by layer, the experts that no token was given; `dead_inputs` were always zero; `input_scale`: min,
    median and max."""

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


@dataclass(frozen=True)
class Calibration:
    """One request, checked: nothing has been written yet. `linears` are those that the policy quantizes."""

    stream: LayerStream
    policy: Policy
    linears: set[str]
    texts: list[tuple[int, ...]]
    batches: list[Tensor]
    output: Path
    options: CalibrationOptions
    data: Path

    @cached_property
    def header(self) -> dict[str, Any]:
        """What the journal is begun with: all that decides the scales."""
        options = {
            "policy": {"name": self.policy.name, "quantize": list(self.policy.quantize)},
            "samples": self.options.samples,
            "seq_len": self.options.seq_len,
            "dtype": str(self.stream.dtype).removeprefix("torch."),
            "device": self.options.device.partition(":")[0],
            "format_version": FORMAT_VERSION,
        }
        data = hashlib.sha256(repr(self.texts).encode()).hexdigest()
        checkpoint = self.stream.checkpoint
        source = identity(checkpoint) | commit_record(checkpoint.path)
        return {"source": source, "options": options, "data": data}

    @property
    def work(self) -> OutputDirectory:
        """Journal and states of a run that is not finished, beside the output; two layers' states at the most."""
        return OutputDirectory.beside(self.output, "calibrate", 2 * self.states().bytes)

    @property
    def tokens(self) -> int:
        return sum(len(text) for text in self.texts)

    def states(self) -> States:
        """Hidden states of all texts, in memory up to the budget; each layer's are kept in the work directory."""
        budget = STATES_SHARE * machine.free_memory()
        directory = OutputDirectory.beside(self.output, "calibrate").path
        size = (self.stream.spec.hidden_size, self.stream.dtype)
        return States(self.batches, *size, budget=budget, directory=directory, durable=True)

    def result(self, **more: Any) -> CalibrationResult:
        """What a run and a dry run both tell, and `more`."""
        return CalibrationResult(
            output=str(self.output),
            policy=self.policy.name,
            dtype=self.header["options"]["dtype"],
            device=self.options.device,
            texts=len(self.texts),
            tokens=self.tokens,
            layers=self.stream.num_layers,
            linears=len(self.linears),
            **more,
        )


def calibrate_checkpoint(
    source: Path,
    data: Path,
    output: Path,
    policy: Policy | None,
    options: CalibrationOptions = CalibrationOptions(),
    again: OutputOptions = OutputOptions(),
    bar: Bar = Bar(),
) -> CalibrationResult:
    """Writes `output`, safetensors with `<hub name of the linear>.input_scale`; a dry run writes nothing.

    Run again after a kill it resumes with the layer that it stopped in, and the file is the one that an uninterrupted
    run writes. `bar` shows the layers that are done. Raises TrtspecError or UsageError before the first layer for
    what the source's headers, the data, the options, disk and permissions can tell.
    """
    start = time.monotonic()
    calibration = prepare(source, data, output, policy, options)
    with calibration.stream:
        if again.dry_run:
            return _what_a_run_takes(calibration, calibration.work.check(again))
        with calibration.work.claim(calibration.header, again) as journal:
            resumed = _measure(calibration, journal, bar)
            layers = list(journal.done.values())
            _finish(calibration, layers)
        return _result(calibration, layers, resumed, start)


def prepare(
    source: Path, data: Path, output: Path, policy: Policy | None, options: CalibrationOptions
) -> Calibration:
    """Opens source and data and checks them against policy and options. `policy` None: that of the source's release."""
    stream = LayerStream(
        source,
        activation="decoded",
        dtype=options.dtype or default_dtype(options.device),
        device=options.device,
        threads=min(8, torch.get_num_threads()),
    )
    policy = policy or default_policy(stream.spec, source_name(stream.checkpoint.path))
    linears = {
        name.removesuffix(".weight")
        for name, part in stream.spec.family.tensors(stream.spec)
        if part.role in policy.quantize
    }
    texts = read_texts(data, KimiTokenizer(source), options.samples, options.seq_len)
    return Calibration(
        stream, policy, linears, texts, equal_length_batches(texts), output, options, data
    )


def read_texts(
    data: Path, tokenizer: KimiTokenizer, samples: int, seq_len: int
) -> list[tuple[int, ...]]:
    """The first `samples` renderings of `data` (see `render`) as token ids, each cut to `seq_len`.

    Texts of fewer than 2 tokens and rows that cannot be rendered are passed over. Raises UsageError naming the row
    that is no conversation, or when nothing is left.
    """
    refused: list[UsageError] = []
    renderings = _renderings(data, tokenizer, refused)
    found = (tuple(rendering.tokens[:seq_len]) for rendering in renderings)
    texts = list(itertools.islice((ids for ids in found if len(ids) >= MIN_TOKENS), samples))
    if not texts:
        raise refused[0] if refused else UsageError(f"{data} holds no text", REMEDY)
    if refused:
        note(f"{data}: {len(refused)} rows refused, first: {refused[0].message}")
    return texts


def _renderings(
    data: Path, tokenizer: KimiTokenizer, refused: list[UsageError]
) -> Iterator[Rendering]:
    for conversation in read_conversations(data):
        try:
            yield from render(conversation, tokenizer)
        except UsageError as error:
            refused.append(error)


def equal_length_batches(texts: Sequence[tuple[int, ...]]) -> list[Tensor]:
    """int64 [B, T] without padding, which would be calibrated on: texts of one length together, short ones first."""
    batches: list[Tensor] = []
    for length, group in itertools.groupby(sorted(texts, key=len), len):
        rows, step = list(group), max(1, FORWARD_TOKENS // length)
        batches += [torch.tensor(rows[begin : begin + step]) for begin in range(0, len(rows), step)]
    return batches


def input_points(stream: LayerStream, index: int) -> dict[str, list[str]]:
    """Linears of decoder layer `index`, as the model fuses them -> hub names of those that read its input."""
    return {
        source.parameter.removesuffix(".weight"): [
            name.removesuffix(".weight") for name in source.names
        ]
        for source in layer_layout(stream.spec, index)
        if source.role not in NO_LINEARS
    }


class ObservedExperts(nn.Module):
    """Routed experts whose two inputs are observed, and the tokens of each expert counted."""

    def __init__(self, experts: Experts, observe: Callable[[str, Tensor], None]) -> None:
        super().__init__()
        self.experts, self.observe = experts, observe
        self.tokens_per_expert = torch.zeros(len(experts.down), dtype=torch.int64)

    def forward(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """As `Experts.forward`: x [tokens, H], ids and weights [tokens, k] -> [tokens, H]."""
        self.observe("mlp.experts.gate_up", x)
        count = len(self.tokens_per_expert)
        self.tokens_per_expert += torch.bincount(ids.flatten().cpu(), minlength=count)
        return dispatch(x, ids, weights, count, self.one_expert)

    def one_expert(self, expert: int, x: Tensor) -> Tensor:
        gate, up = F.linear(x, self.experts.gate_up[expert]).chunk(2, -1)
        active = F.silu(gate) * up
        self.observe("mlp.experts.down", active)
        return F.linear(active, self.experts.down[expert])


class LayerObserver:
    """The quantizers of one decoder layer: put on before its first batch, read after its last."""

    def __init__(self, calibration: Calibration, index: int, layer: DecoderLayer) -> None:
        observers = dict[str, InputObserver]()
        for point, modules in input_points(calibration.stream, index).items():
            quantized = [module for module in modules if module in calibration.linears]
            if quantized:
                observers[point] = InputObserver(quantized[0])
        self.observers, self.experts = observers, None

        def see(
            point: str, x: Tensor
        ) -> None:  # no method: the experts would hold their observer, which holds them
            if point in observers:
                observers[point].see(x)

        attention, mlp = layer.self_attn, layer.mlp
        if isinstance(mlp, MoE):
            assert isinstance(mlp.experts, Experts)
            mlp.experts = self.experts = ObservedExperts(mlp.experts, see)
        for point in observers:
            if point.startswith("mlp.experts."):
                continue
            module = layer.get_submodule(point)
            if module is attention.kv_b_proj:
                # its product is folded into the queries, so its input is seen at its source
                attention.kv_a_layernorm.register_forward_hook(
                    lambda _, __, x, point=point: see(point, x)
                )
            else:
                module.register_forward_pre_hook(lambda _, args, point=point: see(point, args[0]))

    def record(self) -> dict[str, Any]:
        """For the journal: input_scale by point, points that were always zero, experts without a token."""
        scales, dead = {}, []
        for point, observer in self.observers.items():
            scales[point], alive = observer.finish()
            dead += [] if alive else [point]
        tokens: list[int] = (
            self.experts.tokens_per_expert.tolist() if self.experts is not None else []
        )
        return {
            "scales": scales,
            "dead": dead,
            "unreached": [e for e, count in enumerate(tokens) if not count],
        }


def _measure(calibration: Calibration, journal: Journal, bar: Bar) -> int:
    """Runs the layers that the journal lacks; returns how many it had."""
    stream, total = calibration.stream, calibration.stream.num_layers
    with calibration.states() as states:
        first = len(journal.done)
        if 0 < first < total and not states.restore(journal.done[f"layer {first - 1}"]["states"]):
            first = 0  # what the last recorded layer left is damaged
        bar.show(first, total)
        if first == 0:
            stream.embed(calibration.batches, states)
        observers: dict[int, LayerObserver] = {}  # of the layer that runs, whose experts it holds

        def on_layer(index: int, layer: DecoderLayer) -> None:
            observers[index] = LayerObserver(calibration, index, layer)

        def after_layer(index: int) -> None:
            journal.record(f"layer {index}", **observers.pop(index).record(), states=states.record)
            states.drop_older()
            bar.show(index + 1, total)

        stream.run(
            calibration.batches, states, first=first, on_layer=on_layer, after_layer=after_layer
        )
    return first


def _finish(calibration: Calibration, layers: list[dict[str, Any]]) -> None:
    """provenance.json, then the file, then the work directory's end: a kill in between leaves a run that resumes."""
    output = calibration.output
    for pattern in (f".{output.name}.*.partial", f".{output.name}.provenance.json.*.tmp"):
        for path in output.parent.glob(pattern):  # a killed run's half-written file
            path.unlink()
    tensors = {
        f"{name}.input_scale": torch.tensor(scale)
        for name, scale in _scales(calibration, layers).items()
    }
    header, checkpoint, spec = (
        calibration.header,
        calibration.stream.checkpoint,
        calibration.stream.spec,
    )
    about = {
        "command": "calibrate",
        "options": header["options"],
        "data": header["data"],
        "texts": len(calibration.texts),
        "tokens": calibration.tokens,
        "unreached_experts": sum(len(layer["unreached"]) for layer in layers),
        "source": source_name(checkpoint.path),
        "fingerprint": header["source"],
        "model": [spec.model_type, spec.num_hidden_layers, spec.n_routed_experts],
        "modelopt": versions().get("nvidia-modelopt"),
    }
    source = {"path": str(checkpoint.path), **header["source"]}
    kept = [{key: layer[key] for key in ("scales", "dead", "unreached")} for layer in layers]
    text = {"name": calibration.data.name, "sha256": header["data"]}
    record = provenance("calibrate", source, header["options"], data=text, layers=kept)
    write_json(_provenance_path(output), record)
    write_shard(output, tensors, {"format": "pt", METADATA_KEY: json.dumps(about, sort_keys=True)})
    calibration.work.finish()


def _provenance_path(output: Path) -> Path:
    return output.with_name(f"{output.name}.provenance.json")


def _scales(calibration: Calibration, layers: list[dict[str, Any]]) -> dict[str, float]:
    """Hub name of every quantized linear -> its input scale."""
    found: dict[str, float] = {}
    for index, layer in enumerate(layers):
        points = input_points(calibration.stream, index)
        for point, scale in layer["scales"].items():
            found |= {module: scale for module in points[point] if module in calibration.linears}
    return found


def _result(
    calibration: Calibration, layers: list[dict[str, Any]], resumed: int, start: float
) -> CalibrationResult:
    scales = list(_scales(calibration, layers).values())
    spec = calibration.stream.spec
    unreached = {
        str(index): layer["unreached"] for index, layer in enumerate(layers) if layer["unreached"]
    }
    return calibration.result(
        sha256=file_sha256(calibration.output),
        experts=spec.n_routed_experts * (spec.num_hidden_layers - spec.first_k_dense_replace),
        experts_unreached=sum(len(ids) for ids in unreached.values()),
        unreached=unreached,
        dead_inputs=[
            f"layer {index} {point}"
            for index, layer in enumerate(layers)
            for point in layer["dead"]
        ],
        input_scale={"min": min(scales), "median": statistics.median(scales), "max": max(scales)},
        layers_resumed=resumed,
        seconds=round(time.monotonic() - start, 3),
        peak_rss_bytes=peak_rss(),
    )


def _what_a_run_takes(calibration: Calibration, resumes: bool) -> CalibrationResult:
    stream, states = calibration.stream, calibration.states()
    layer_bytes = max(
        map(stream.layer_bytes, {0, stream.num_layers - 1})
    )  # one that is dense, one with experts
    return calibration.result(
        layer_bytes=layer_bytes,
        states_bytes=states.bytes,
        memory_bytes_estimate=(1 + stream.load_ahead) * layer_bytes
        + (states.bytes if states.in_memory else 0),
        disk_bytes=2 * states.bytes,  # read while those of the next layer are written
        free_bytes=machine.free_disk(calibration.output.parent),
        resumes=resumes,
        dry_run=True,
    )
