"""Bytes, GPUs and peak memory that a training run needs, before it runs.

way     source of the target's states
online  The target is in GPU memory beside the head. Possible if one GPU holds both.
stream  Each GPU runs the target one decoder layer at a time, over its part of a chunk of samples.
dumps   An engine at tensor parallel N has written the states. Each epoch reads them again.
server  A live engine hands over the states while the head trains. Nothing is stored.
"""

from __future__ import annotations

import json
import math
import shlex
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NotRequired, TypedDict

from trtspec.checkpoint.hub import Resolved, resolve
from trtspec.checkpoint.target_problems import require_target
from trtspec.errors import Problem, TrtspecError
from trtspec.heads.training.loop import LOGIT_BYTES, chunk_positions, peak_learning_rate
from trtspec.heads.training.streamed import CHUNK_BYTES
from trtspec.heads.training.train_options import (
    FeatureSource,
    TrainingRecipe,
    TrainingRun,
    TrainOptions,
)
from trtspec.heads.training.training_plan import (
    TrainingPlan,
    check_run,
    make_plan,
    plan_without_data,
)
from trtspec.planning.layout import refusals
from trtspec.specs import GpuSpec, ModelSpec

USABLE_SHARE = 0.9  # fraction of a GPU's memory
ENGINE_MEMORY = 1.15  # GPU memory of an engine, as a multiple of the size of the target's weights
OPTIMIZER_BYTES = 16  # per parameter: float32 weight, gradient and two moments
# Number of hidden-sized bf16 activations that a head's layer keeps per token for the backward pass.
LAYER_COPIES = 24
OTHER_WAYS = (
    "pass `features` stream, a directory of dumps, or a server's URL: `dry_run` compares them"
)


def dry_run(
    target: str,
    data: tuple[str, ...],
    features: FeatureSource,
    run: TrainingRun,
    options: TrainOptions,
    recipe: TrainingRecipe,
    gpu: GpuSpec,
) -> dict[str, Any]:
    """Makes every check of a training run, and plans the run without training.

    Returns the plan, the estimates of `needs`, and the settings of the run. Raises TrtspecError or
    UsageError if the run would fail.

    Args:
        recipe: sizes of the data, used if the target or the data are not on this machine.
        gpu: GPU type that the run is planned for.
    """
    resolved = resolve(target, weights=False)
    spec = resolved.target_spec()
    options = options.for_device(run.device)
    path = resolved.path
    if path is not None and all(Path(name).exists() for name in data):
        measured = True
        spec = require_target(path).spec
        plan = make_plan(path, spec, data, options, features)
        result = plan.to_dict() | check_run(replace(run, target_dir=path), plan, options)
    else:
        measured = False
        plan = plan_without_data(spec, options, recipe, run.data, features)
        result = plan.to_dict()
    seconds_left = None
    if run.deadline is not None:
        # Rounded to ten seconds, because the deadline was set some time ago.
        seconds_left = round(run.deadline - time.monotonic(), -1)
    result |= {
        "measured": measured,
        "output": str(run.output),
        "device": run.device,
        "init": str(run.init) if run.init else None,
        "save_every": run.save_every,
        "max_seconds": seconds_left,
        "options": asdict(options) | {"lr": peak_learning_rate(options, spec.hidden_size)},
        "warnings": plan.warnings,
    }
    needed = needs(plan, spec, options, stored_bytes(resolved), gpu, target, run.data)
    online: WayNeeds = needed["ways"]["online"]
    if features.text == "memory" and not online["possible"]:
        message = f"TS-TRAIN-FIT `features` memory on {gpu.name}: {online['why']}"
        raise TrtspecError(message, OTHER_WAYS)
    return result | needed


def stored_bytes(resolved: Resolved) -> int:
    """Size of the target's weights in bytes. 0 if unknown.

    Measures the files on this machine. Without files, the published size is returned.
    """
    size = 0
    if resolved.path:
        size = sum(path.stat().st_size for path in resolved.path.glob("*.safetensors"))
    if not size and resolved.known:
        size = resolved.known.bytes or 0
    return size


class WayNeeds(TypedDict):
    """The needs of one way to get the target's states.

    Args:
        possible: whether the peak fits into one GPU.
        gpus: least number of GPUs.
        disk_bytes: bytes on disk.
        peak_bytes: peak memory of one GPU in bytes.
        why: reason why the way is not possible. Absent if it is possible.
        chunks: number of chunks of samples. Only for a streamed target.
        read_bytes: bytes of weights that all chunks read. Only for a streamed target.
    """

    possible: bool
    gpus: int
    disk_bytes: int
    peak_bytes: int
    why: NotRequired[str]
    chunks: NotRequired[int]
    read_bytes: NotRequired[int]


def needs(
    plan: TrainingPlan,
    target: ModelSpec,
    options: TrainOptions,
    stored: int,
    gpu: GpuSpec,
    name: str,
    data: str,
) -> dict[str, Any]:
    """Estimates the GPUs, disk and memory that each way to get the target's states needs.

    `ways` in the result has, for each way, the least number of GPUs, the bytes on disk, and the
    peak bytes of one GPU. The other keys are `gpu`, `epochs`, `storage`, `phases`, `dump_commands`
    and `server_commands`.

    Args:
        stored: size of the target's weights as stored, in bytes.
        name: name of the target in commands.
        data: name of the data in commands.
    """
    samples = plan.counted or len(plan.samples)
    tokens = plan.tokens
    feature_bytes = plan.feature_bytes
    epochs = plan.steps * options.batch_size * options.accumulation / max(1, samples)
    memory = gpu.memory_bytes * USABLE_SHARE
    trainers, peak = _trainers(plan, target, options, memory)
    # An engine's tensor parallelism is the smallest power of two of GPUs that hold the target. The
    # size of the target may be 0 (unknown), which has no logarithm.
    gpus_for_target = stored / memory * ENGINE_MEMORY
    doublings = math.ceil(math.log2(max(gpus_for_target, 1e-9)))
    parallel = 2 ** max(0, doublings)
    layer = decoded_layer_bytes(target)
    refused = refusals(target, gpu=gpu, tp_size=parallel, ep_size=parallel)
    chunks = max(1, math.ceil(feature_bytes / CHUNK_BYTES))
    online = _way(trainers, 0, stored + peak, memory, "target and head")
    stream_disk = min(feature_bytes, 2 * CHUNK_BYTES)
    stream_contents = "two layers, or the head and one sequence"
    stream = _way(trainers, stream_disk, max(2 * layer, peak), memory, stream_contents)
    engine_peak = max(stored / parallel, peak)
    engine_contents = "its part of the target, or the head and one sequence"
    # The engine and the training use the same GPUs, one after the other.
    dumps_gpus = max(parallel, trainers)
    dumps = _way(dumps_gpus, feature_bytes, engine_peak, memory, engine_contents)
    server = _way(parallel + trainers, 0, engine_peak, memory, engine_contents)
    return {
        "gpu": gpu.name,
        "epochs": round(epochs, 3),
        "storage": {
            "target_bytes": stored,
            # The second size applies if the next layer is decoded while one computes.
            "decoded_layer_bytes": [layer, 2 * layer],
            "state_bytes_per_token": feature_bytes // max(1, tokens),
            "tokens": tokens,
            "state_bytes": feature_bytes,
            "saved_state_bytes": 3 * 4 * plan.parameters,  # float32 weights and two moments
            "head_bytes": 2 * plan.parameters,  # bf16
        },
        "phases": {"training": {"least_gpus": trainers, "peak_bytes": round(peak)}},
        "ways": {
            "online": online,
            "stream": stream | {"chunks": chunks, "read_bytes": chunks * stored},
            "dumps": dumps,
            "server": server,
        },
        "dump_commands": dump_commands(name, data, plan, options, parallel, refused),
        "server_commands": server_commands(name, plan, target, options, parallel),
    }


def _way(gpus: int, disk: float, peak_bytes: float, memory: float, contents: str) -> WayNeeds:
    """Returns the sizes of one way to get the states, and `why` if one GPU is too small for it.

    Args:
        gpus: least number of GPUs.
        disk: bytes on disk.
        peak_bytes: peak memory of one GPU.
        memory: usable bytes of one GPU.
        contents: objects that take the peak memory, for the message.
    """
    facts: WayNeeds = {
        "possible": peak_bytes <= memory,
        "gpus": gpus,
        "disk_bytes": round(disk),
        "peak_bytes": round(peak_bytes),
    }
    if peak_bytes > memory:
        facts["why"] = (
            f"one GPU would have to hold {contents}, and has {memory / 1e9:,.0f} GB to use"
        )
    return facts


def decoded_layer_bytes(target: ModelSpec) -> int:
    """Number of bytes of the largest decoder layer in bfloat16, the dtype of a streaming process.

    Norms and other vectors are left out, because they are small.
    """
    sizes = []
    for index in range(target.num_hidden_layers):
        matrices = [
            tensor for tensor in target.family.layer(target, index) if len(tensor.shape) == 2
        ]
        sizes.append(sum(2 * matrix.copies * math.prod(matrix.shape) for matrix in matrices))
    return max(sizes)


def _trainers(
    plan: TrainingPlan, target: ModelSpec, options: TrainOptions, memory: float
) -> tuple[int, float]:
    """Finds the least number of training processes (one GPU each) whose share of a batch fits.

    Returns the number of processes, a power of two, and the peak bytes of each. The number stops
    growing at one sequence per process, even if that does not fit.

    Args:
        memory: usable bytes of one GPU.
    """
    processes = 1
    while True:
        rows = math.ceil(options.batch_size / processes)
        peak = training_bytes(plan, target, options, rows)
        if peak <= memory or rows == 1:
            return processes, peak
        processes *= 2


def training_bytes(
    plan: TrainingPlan, target: ModelSpec, options: TrainOptions, rows: int
) -> float:
    """Peak memory in bytes of one GPU that trains on `rows` sequences at a time.

    The GPU holds the head with its optimizer state, and the target's embedding and lm_head. For the
    backward pass it holds activations of every token, and logits of one chunk of positions.
    """
    tokens = rows * options.seq_len
    outer_weights = 2 * 2 * target.vocab_size * target.hidden_size  # embedding and lm_head, bf16
    vocabulary = plan.spec.draft_vocab_size
    chunk = min(tokens, chunk_positions(vocabulary, "cuda"))
    logits = LOGIT_BYTES * vocabulary * chunk
    activations_per_token = 2 * LAYER_COPIES * options.ttt_steps * target.hidden_size  # bf16
    activations = tokens * activations_per_token
    return OPTIMIZER_BYTES * plan.parameters + outer_weights + logits + activations


def dump_commands(
    name: str,
    data: str,
    plan: TrainingPlan,
    options: TrainOptions,
    parallel: int,
    refused: list[Problem],
) -> dict[str, str]:
    """Commands that write hidden-state dumps, by engine.

    The commands run ModelOpt's scripts in examples/speculative_decoding/collect_hidden_states.

    Args:
        parallel: tensor parallelism of the engine.
        refused: reasons why TensorRT-LLM cannot run the target. The first reason replaces the
            command as a shell comment.
    """
    layers = ",".join(map(str, plan.spec.aux_layers or ()))
    flags = (
        f"--input-data {shlex.quote(data)} --output-dir dumps "
        f"--max-seq-len {options.seq_len} --tp {parallel}"
    )
    trtllm = (
        f"python compute_hidden_states_trtllm.py --model {name} {flags} "
        f"--moe-ep {parallel} --aux-layers {layers}"
    )
    if refused:
        trtllm = f"# {refused[0].message}"
    return {
        "trtllm": trtllm,
        "vllm": f"python compute_hidden_states_vllm.py --model {name} {flags} --trust_remote_code",
    }


def server_commands(
    name: str, plan: TrainingPlan, target: ModelSpec, options: TrainOptions, parallel: int
) -> dict[str, str]:
    """Command of a vLLM server that sends hidden states with ModelOpt's connector, under `vllm`.

    ModelOpt must be installed in vLLM's environment. Chunked prefill and prefix caching are off,
    because the states of a prompt are complete only if the prompt is computed as a whole.
    """
    # vLLM's id of a state is the number of layers before it. Ours counts layer outputs from 0.
    ids = [layer + 1 for layer in plan.spec.aux_layers or ()]
    ids.append(target.num_hidden_layers)
    speculative = {
        "method": "extract_hidden_states",
        "num_speculative_tokens": 1,
        "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": ids}},
    }
    connector = {
        "kv_connector": "RdmaHiddenStatesConnector",
        "kv_connector_module_path": (
            "modelopt.torch.speculative.plugins.rdma_hidden_states_connector"
        ),
        "kv_role": "kv_producer",
        "kv_connector_extra_config": {"pool_slots": "16", "max_tokens": str(options.seq_len)},
    }
    flags = (
        "--enforce-eager --no-enable-chunked-prefill --no-enable-prefix-caching "
        "--max-num-seqs 16 --trust-remote-code"
    )
    return {
        "vllm": (
            f"vllm serve {name} --tensor-parallel-size {parallel} "
            f"--max-model-len {options.seq_len + 1} {flags} "
            f"--speculative-config '{json.dumps(speculative)}' "
            f"--kv-transfer-config '{json.dumps(connector)}'"
        )
    }
