"""What a training run costs by each way of getting the target's states (hours by phase, bytes, peak memory).

Hours are ranges: counted multiplications at a share of the GPUs' dense rate that is assumed and said, because nothing
here was measured on a GPU; a published run stands beside them. Bytes are counted. The ways:

    online   the target in GPU memory beside the head: only where one GPU holds both
    stream   each GPU runs the target one decoder layer at a time, over its part of a chunk of samples
    dumps    states written by an engine at tensor parallel N, read again in every epoch
    server   a live engine hands over the states while the head trains; nothing is stored
"""

from __future__ import annotations

import json
import math
import shlex
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from trtspec.checkpoint.hub import Resolved, resolve
from trtspec.checkpoint.target_problems import require_target
from trtspec.checkpoint.target_tensors import linear_shapes
from trtspec.data_files import gpu_spec
from trtspec.errors import TrtspecError
from trtspec.heads.training.options import (
    Dumped,
    FeatureSource,
    InMemory,
    Served,
    Streamed,
    TrainingRecipe,
    TrainOptions,
    TrainRequest,
    check_trackers,
)
from trtspec.heads.training.plan import TrainingPlan, check_run, estimated_seconds, make_plan, plan_without_data
from trtspec.heads.training.processes import TrainingNodes, launch_text
from trtspec.specs import GpuSpec, ModelSpec

TRAINING_SHARE, FORWARD_SHARE = (0.1, 0.4), (0.1, 0.5)  # of the dense bf16 rate: slow and fast
DISK_BYTES_PER_SECOND = (1e9, 5e9)  # of a node: a network file system, a local NVMe drive
# Tokens per second that a server of 8 GPUs writes. Kimi-K2.5 INT4 in vLLM at 64 requests: 1,088 on H200, 1,664 on B200
# (InferenceX); more requests at once give several times that.
ANSWER_RATE = (1_000, 5_000)
USABLE = 0.9  # of a GPU's memory
CHUNK_BYTES = 256 * 2**30  # of host memory or disk that a chunk's states may take while layers are streamed
OPTIMIZER_BYTES = 16  # per parameter: float32 weight, gradient and two moments
LAYER_COPIES = 24  # hidden-sized activations that a head's layer keeps per token for its backward, in bf16
PUBLISHED_GPU, PUBLISHED_GPU_HOURS = "h200", 32 * 14
PUBLISHED = {
    "what": "lightseekorg/kimi-k2.5-eagle3-mla: 4 nodes of 8 H200, half of them training, the other half the target at "
    "tensor parallel 8; about 14 hours a phase",
    "gpus": 32, "hours": 14, "gpu_hours": PUBLISHED_GPU_HOURS,
    "source": "the model card, which does not tell how many tokens that were",
}  # fmt: skip
OTHER_WAYS = "pass --features stream, a directory of dumps, or a server's URL: `--dry-run` compares them"
SERVER = "http://HOST:8000"
Range = tuple[float, float]  # least, most


@dataclass(frozen=True)
class UsersCommand:
    """What the user typed: `words` makes the arguments of `trtspec train` again, with some fields replaced."""

    target: str
    data: str
    words: Callable[..., list[str]]


def dry_run(
    request: TrainRequest,
    options: TrainOptions,
    recipe: TrainingRecipe,
    cluster: TrainingNodes,
    gpu: GpuSpec,
    words: Callable[..., list[str]],
) -> dict[str, Any]:
    """Sizes and costs, after every check that the run makes. A target that is not on this machine, or data not made
    yet, are taken from the recipe. `words`: see `UsersCommand`."""
    resolved = resolve(request.target, allow_download=False)
    run = request.run
    spec, options = resolved.target_spec(), options.for_device(run.device)
    stored = stored_bytes(resolved)
    here = resolved.path is not None and not request.data.missing()
    check_trackers(run.log_with)
    if here:
        assert resolved.path is not None
        spec = require_target(resolved.path).spec
        plan = make_plan(resolved.path, spec, request.data, options, request.features)
        found = plan.to_dict() | {"estimated_seconds": round(estimated_seconds(plan, options), 1)}
        found |= check_run(replace(run, target_dir=resolved.path), plan, options)
    else:
        plan = plan_without_data(spec, options, recipe, Path(str(request.data)), request.features)
        found = plan.to_dict()
    about = {
        "output": str(run.output),
        "device": run.device,
        "init": str(run.init) if run.init else None,
        "save_every": run.save_every,
        "export_every": run.exports,
        "keep": run.keep,
        "best_by": run.best_by,
        "keep_state": run.keep_state,
        "max_seconds": None if run.deadline is None else round(run.deadline - time.monotonic(), -1),
        "activation_checkpointing": run.activation_checkpointing,
        "log_with": list(run.log_with),
        "acceptance_prompts": request.acceptance_prompts,
        "options": options.to_dict() | {"lr": options.peak_lr(spec.hidden_size)},
        "warnings": plan.warnings,
    }
    typed = UsersCommand(request.target, str(request.data), words)
    costs = forecast(plan, spec, options, stored, gpu, cluster, typed)
    if str(request.features) != "auto":
        require_way(request.features, costs)
    return found | {"measured": here, **about, **costs}


def stored_bytes(resolved: Resolved) -> int:
    """Of the target's weights: here, or as published."""
    stored = sum(path.stat().st_size for path in resolved.path.glob("*.safetensors")) if resolved.path else 0
    return stored or int((resolved.known or {}).get("bytes") or 0)


def forecast(
    plan: TrainingPlan,
    target: ModelSpec,
    options: TrainOptions,
    target_bytes: int,
    gpu: GpuSpec,
    cluster: TrainingNodes,
    command: UsersCommand,
) -> dict[str, Any]:
    """`target_bytes`: of the stored target. Returns {gpu, nodes, epochs, assumptions, published, storage, phases, ways,
    dump_commands, server_commands}; a way is `possible` where the cluster can go it, else says why not."""
    rows = plan.steps * options.batch_size * options.accumulation
    epochs = rows / max(1, plan.counted or len(plan.samples))
    memory = gpu.memory_bytes * USABLE
    trainers, peak = _trainers(plan, target, options, memory)
    parallel = _power_of_two(target_bytes / memory * 1.15)
    training_work = plan.tokens * epochs * training_flops(plan, target, options)
    training = _hours(training_work / gpu.bf16_flops, TRAINING_SHARE)
    forward = _hours(plan.tokens * forward_flops(target, options.seq_len) / gpu.bf16_flops, FORWARD_SHARE)
    sizes = StorageNeeds(plan, target, target_bytes, parallel, trainers, peak)
    return {
        "gpu": gpu.name,
        "nodes": cluster.nodes,
        "gpus_per_node": cluster.gpus_per_node,
        "epochs": round(epochs, 3),
        "assumptions": assumptions(),
        "published": PUBLISHED | {"tokens_by_these_assumptions": _published_tokens(plan, forward, training, gpu)},
        "storage": sizes.storage(),
        "phases": {
            "answers": {"server_hours": _shown(_hours(plan.tokens, ANSWER_RATE)), "what": "trtspec synthesize"},
            "states": {"gpu_hours": _shown(forward), "what": "the target over every token, once"},
            "training": {"gpu_hours": _shown(training), "least_gpus": trainers, "peak_bytes": round(peak)},
        },
        "ways": ways(sizes, cluster, forward, training, memory, options.batch_size),
        "dump_commands": dump_commands(command, plan, options, parallel)
        | {"then": launched(command.words(data=Path("dumps"), features=None), cluster, options.batch_size)},
        "server_commands": server_commands(command.target, plan, target, options, parallel)
        | {"then": launched(command.words(features=SERVER), cluster, min(options.batch_size, cluster.gpus - parallel))},
    }


def way_of(features: FeatureSource) -> str:
    """Which of the ways `--features` goes. A directory is taken for one of dumps that an engine writes."""
    match features:
        case InMemory():
            return "online"
        case Dumped():
            return "dumps"
        case Streamed():
            return "stream"
        case Served():
            return "server"


def require_room(request: TrainRequest, gpu: GpuSpec) -> None:
    """Raises TrtspecError where the target would have to lie in each GPU's memory and does not fit, and for
    one that is neither here nor a known id."""
    stored = stored_bytes(resolve(request.target, allow_download=False))
    if way_of(request.features) == "online" and stored > gpu.memory_bytes * USABLE:
        raise TrtspecError(
            f"TS-TRAIN-FIT the target's {stored:,} bytes would lie in each {gpu.name}, which has "
            f"{gpu.memory_bytes * USABLE:,.0f} to give",
            OTHER_WAYS,
        )


def require_way(features: FeatureSource, costs: dict[str, Any]) -> None:
    """Raises TrtspecError where the cluster cannot go the way that was asked for."""
    way = costs["ways"][way_of(features)]
    if not way["possible"]:
        cluster = f"{costs['nodes']} x {costs['gpus_per_node']} {costs['gpu']}"
        raise TrtspecError(f"TS-TRAIN-FIT --features {features} on {cluster}: {way['why']}", OTHER_WAYS)


def assumptions() -> dict[str, Any]:
    """What stands behind the ranges."""
    return {
        "training": f"{_shares(TRAINING_SHARE)} of the dense bf16 rate",
        "states": f"{_shares(FORWARD_SHARE)} of the dense bf16 rate",
        "answers": f"{ANSWER_RATE[0]:,} to {ANSWER_RATE[1]:,} tokens/s from a server of 8 GPUs, all tokens answers",
        "reading": f"{DISK_BYTES_PER_SECOND[0] / 1e9:.0f} to {DISK_BYTES_PER_SECOND[1] / 1e9:.0f} GB/s for each node",
        "measured_on_a_gpu": False,
    }


class StorageNeeds:
    """Bytes that a run needs, by where they lie."""

    def __init__(
        self, plan: TrainingPlan, target: ModelSpec, stored: int, parallel: int, trainers: int, peak: float
    ) -> None:
        self.plan, self.stored, self.parallel, self.trainers, self.peak = plan, stored, parallel, trainers, peak
        self.layer = decoded_layer_bytes(target)
        self.chunks = max(1, math.ceil(plan.feature_bytes / CHUNK_BYTES))

    def storage(self) -> dict[str, Any]:
        """`decoded_layer_bytes`: one layer in bfloat16, and two where the next one is decoded ahead."""
        return {
            "target_bytes": self.stored,
            "decoded_layer_bytes": [self.layer, 2 * self.layer],
            "state_bytes_per_token": self.plan.feature_bytes // max(1, self.plan.tokens),
            "tokens": self.plan.tokens,
            "state_bytes": self.plan.feature_bytes,
            "saved_state_bytes": 3 * 4 * self.plan.parameters,  # float32 weights and two moments
            "head_bytes": 2 * self.plan.parameters,
        }


def decoded_layer_bytes(target: ModelSpec) -> int:
    """The largest decoder layer in bfloat16, which a streaming process holds whatever format it is stored in."""
    layers: dict[str, int] = {}
    for module, (rows, columns) in linear_shapes(target):
        if ".layers." in module:
            layer = module.partition(".layers.")[2].partition(".")[0]
            layers[layer] = layers.get(layer, 0) + 2 * rows * columns
    return max(layers.values())


def ways(
    sizes: StorageNeeds, cluster: TrainingNodes, forward: Range, training: Range, memory: float, batch: int
) -> dict[str, dict[str, Any]]:
    """Each way on this cluster, in hours from start to end. At most as many GPUs train as a batch has rows."""
    plan, gpus, parallel = sizes.plan, cluster.gpus, sizes.parallel
    rows, engines = min(gpus, batch), gpus // parallel
    reading = _hours(sizes.chunks * sizes.stored, DISK_BYTES_PER_SECOND)
    streamed = (max(forward[0] / rows, reading[0]), max(forward[1] / rows, reading[1]))
    per_engine = max(sizes.stored / parallel, sizes.peak)
    whole = sizes.stored + sizes.peak
    beside = min(gpus - parallel, batch)  # of a live engine

    def way(
        needed: int, states: Range, trainers: int, disk: float, peak: float, together: bool = False
    ) -> dict[str, Any]:
        if gpus < needed:
            return {"possible": False, "gpus": needed, "why": f"it needs {needed} GPUs, the cluster has {gpus}"}
        parts = {"states": states, "training": _over(training, trainers)}
        join = max if together else sum
        total = (join(part[0] for part in parts.values()), join(part[1] for part in parts.values()))
        hours = {name: _shown(part) for name, part in (parts | {"total": total}).items()}
        found = {"hours": hours, "disk_bytes": round(disk), "peak_bytes": round(peak)}
        return {"possible": True, "gpus": needed, "training_gpus": trainers, **found}

    online = way(sizes.trainers, _over(forward, rows), rows, 0, whole)
    if whole > memory:
        reason = f"one GPU would have to hold the target and the head, {whole:,.0f} bytes of {memory:,.0f}"
        online = {"possible": False, "gpus": sizes.trainers, "peak_bytes": round(whole), "why": reason}
    stream = way(
        sizes.trainers, streamed, rows, min(plan.feature_bytes, 2 * CHUNK_BYTES), max(2 * sizes.layer, sizes.peak)
    )
    together = min(rows, cluster.gpus_per_node)
    stream |= {
        "chunks": sizes.chunks,
        "read_bytes": sizes.chunks * sizes.stored,
        "host_bytes_per_node": [together * sizes.layer, 2 * together * sizes.layer],
    }
    return {
        "online": online,
        "stream": stream,
        "dumps": way(
            max(parallel, sizes.trainers), _over(forward, engines * parallel), rows, plan.feature_bytes, per_engine
        ),
        "server": way(parallel + sizes.trainers, _over(forward, parallel), beside, 0, per_engine, together=True),
    }


def launched(words: list[str], cluster: TrainingNodes, batch: int) -> str:
    """The user's own command on as many of the cluster's GPUs as a batch has rows."""
    return launch_text("torchrun", words, cluster.holding(max(1, batch)), Path.cwd())


def _hours(work: float, rates: Range) -> Range:
    """(least, most) hours of `work` at the (slow, fast) rates per second."""
    return work / rates[1] / 3600, work / rates[0] / 3600


def _over(hours: Range, gpus: int) -> Range:
    return hours[0] / max(1, gpus), hours[1] / max(1, gpus)


def _shown(hours: Range) -> list[float]:
    """Two digits: the range has no more of them."""
    return [float(f"{value:.2g}") for value in hours]


def _shares(shares: Range) -> str:
    return f"{shares[0]:.0%} to {shares[1]:.0%}"


def _published_tokens(plan: TrainingPlan, forward: Range, training: Range, gpu: GpuSpec) -> list[float]:
    """How many tokens of this run's kind the published GPU hours take by the same assumptions, on the GPU of that run:
    what to judge the assumptions by."""
    faster = gpu_spec(PUBLISHED_GPU).bf16_flops / gpu.bf16_flops
    each = [(states + steps) / faster / plan.tokens for states, steps in zip(forward, training, strict=True)]
    return [float(f"{PUBLISHED_GPU_HOURS / hours:.2g}") for hours in reversed(each)]


def _trainers(plan: TrainingPlan, target: ModelSpec, options: TrainOptions, memory: float) -> tuple[int, float]:
    """(processes, peak bytes of each): the fewest, doubling, over which a batch fits; at most one sequence each."""
    processes = 1
    while True:
        rows = math.ceil(options.batch_size / processes)
        peak = training_bytes(plan, target, options, rows)
        if peak <= memory or rows == 1:
            return processes, peak
        processes *= 2


def _power_of_two(ratio: float) -> int:
    return 2 ** max(0, math.ceil(math.log2(max(ratio, 1e-9))))


def forward_flops(target: ModelSpec, seq_len: int) -> float:
    """Of the target's layers per token: 2 per active weight, and attention over half of `seq_len`."""
    share = target.num_experts_per_tok / max(1, target.n_routed_experts)
    active = 0.0
    for module, (rows, columns) in linear_shapes(target):
        if "embed_tokens" not in module and "lm_head" not in module:
            active += rows * columns * (share if ".experts." in module else 1.0)
    width = target.num_attention_heads * (target.qk_head_dim + target.v_head_dim)
    return 2 * active + 2 * target.num_hidden_layers * width * seq_len / 2


def training_flops(plan: TrainingPlan, target: ModelSpec, options: TrainOptions) -> float:
    """Per token and epoch: forward and backward of the head in every training-time-test step, and the target's own
    lm_head once, for the distribution to learn."""
    return 6 * plan.parameters * options.ttt_steps + 2 * target.vocab_size * target.hidden_size


def training_bytes(plan: TrainingPlan, target: ModelSpec, options: TrainOptions, rows: int) -> float:
    """Peak of one GPU that trains on `rows` sequences at a time: optimizer, frozen ends, and what the backward needs.

    Per token: the target's distribution and its logits, each step's log-probabilities (float32) and logits (bf16), one
    gradient of logits; and the layer's activations.
    """
    tokens = rows * options.seq_len
    ends = 2 * 2 * target.vocab_size * target.hidden_size
    over_vocabulary = 4 * target.vocab_size + plan.spec.draft_vocab_size * (8 + 6 * options.ttt_steps)
    layer = 2 * LAYER_COPIES * options.ttt_steps * target.hidden_size
    return OPTIMIZER_BYTES * plan.parameters + ends + tokens * (over_vocabulary + layer)


def dump_commands(command: UsersCommand, plan: TrainingPlan, options: TrainOptions, parallel: int) -> dict[str, str]:
    """How ModelOpt's example scripts (examples/speculative_decoding/collect_hidden_states) write the dumps."""
    layers = ",".join(map(str, plan.spec.aux_layers or ()))
    where = (
        f"--input-data {shlex.quote(command.data)} --output-dir dumps --max-seq-len {options.seq_len} --tp {parallel}"
    )
    return {
        "trtllm": f"python compute_hidden_states_trtllm.py --model {command.target} {where} --moe-ep {parallel} "
        f"--aux-layers {layers}",
        "vllm": f"python compute_hidden_states_vllm.py --model {command.target} {where} --trust_remote_code",
    }


def server_commands(
    name: str, plan: TrainingPlan, target: ModelSpec, options: TrainOptions, parallel: int
) -> dict[str, str]:
    """How vLLM serves states with ModelOpt's connector (which must be installed beside it), and what then trains.

    vLLM counts the layers before a state, not layer outputs from 0: its ids are ours plus one, the last one is the
    state after all layers. A prompt must be computed whole and anew, or its states are missing.
    """
    ids = [layer + 1 for layer in plan.spec.aux_layers or ()] + [target.num_hidden_layers]
    capture = {"draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": ids}}}
    speculative = {"method": "extract_hidden_states", "num_speculative_tokens": 1} | capture
    connector = {
        "kv_connector": "RdmaHiddenStatesConnector",
        "kv_connector_module_path": "modelopt.torch.speculative.plugins.rdma_hidden_states_connector",
        "kv_role": "kv_producer",
        "kv_connector_extra_config": {"pool_slots": "16", "max_tokens": str(options.seq_len)},
    }
    flags = (
        "--enforce-eager --no-enable-chunked-prefill --no-enable-prefix-caching --max-num-seqs 16 --trust-remote-code"
    )
    return {
        "vllm": f"vllm serve {name} --tensor-parallel-size {parallel} --max-model-len {options.seq_len + 1} {flags} "
        f"--speculative-config '{json.dumps(speculative)}' --kv-transfer-config '{json.dumps(connector)}'",
    }
