"""What a training run needs, before it runs: bytes and peak memory. There are four ways of getting the target's states:

online   The target is in GPU memory beside the head: only where one GPU holds both.
stream   Each GPU runs the target one decoder layer at a time, over its part of a chunk of samples.
dumps    An engine at tensor parallel N has written the states; each epoch reads them again.
server   A live engine hands over the states while the head trains; nothing is stored.
"""

from __future__ import annotations

import json
import math
import shlex
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

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

USABLE = 0.9  # of a GPU's memory
OPTIMIZER_BYTES = 16  # per parameter: float32 weight, gradient and two moments
LAYER_COPIES = (
    24  # hidden-sized activations that a head's layer keeps per token for its backward, in bf16
)
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
    """Sizes, after every check that the run makes. A target that is not on this machine, or data not made yet, are
    taken from the recipe."""
    resolved = resolve(target, weights=False)
    spec, options = resolved.target_spec(), options.for_device(run.device)
    here = resolved.path is not None and all(Path(name).exists() for name in data)
    if here:
        assert resolved.path is not None
        spec = require_target(resolved.path).spec
        plan = make_plan(resolved.path, spec, data, options, features)
        found = plan.to_dict() | check_run(replace(run, target_dir=resolved.path), plan, options)
    else:
        plan = plan_without_data(spec, options, recipe, run.data, features)
        found = plan.to_dict()
    about = {
        "output": str(run.output),
        "device": run.device,
        "init": str(run.init) if run.init else None,
        "save_every": run.save_every,
        "max_seconds": None if run.deadline is None else round(run.deadline - time.monotonic(), -1),
        "options": asdict(options) | {"lr": peak_learning_rate(options, spec.hidden_size)},
        "warnings": plan.warnings,
    }
    needed = needs(plan, spec, options, stored_bytes(resolved), gpu, target, run.data)
    online = needed["ways"]["online"]
    if features.text == "memory" and not online["possible"]:
        raise TrtspecError(
            f"TS-TRAIN-FIT `features` memory on {gpu.name}: {online['why']}", OTHER_WAYS
        )
    return found | {"measured": here, **about, **needed}


def stored_bytes(resolved: Resolved) -> int:
    """Of the target's weights: here, or as published."""
    stored = (
        sum(path.stat().st_size for path in resolved.path.glob("*.safetensors"))
        if resolved.path
        else 0
    )
    return stored or (resolved.known.bytes if resolved.known else None) or 0


def needs(
    plan: TrainingPlan,
    target: ModelSpec,
    options: TrainOptions,
    stored: int,
    gpu: GpuSpec,
    name: str,
    data: str,
) -> dict[str, Any]:
    """`stored`: bytes of the target `name` as it is stored. Returns {gpu, epochs, storage, phases, ways, dump_commands,
    server_commands}. Of each way: the least number of GPUs, the disk, and the peak memory of one GPU."""
    epochs = (
        plan.steps
        * options.batch_size
        * options.accumulation
        / max(1, plan.counted or len(plan.samples))
    )
    memory = gpu.memory_bytes * USABLE
    trainers, peak = _trainers(plan, target, options, memory)
    parallel = 2 ** max(
        0, math.ceil(math.log2(max(stored / memory * 1.15, 1e-9)))
    )  # GPUs that hold the target
    layer = decoded_layer_bytes(target)
    refused = refusals(target, gpu=gpu, tp_size=parallel, ep_size=parallel)
    per_engine, chunks = (
        max(stored / parallel, peak),
        max(1, math.ceil(plan.feature_bytes / CHUNK_BYTES)),
    )

    def way(gpus: int, disk: float, most: float, what: str) -> dict[str, Any]:
        found = {
            "possible": most <= memory,
            "gpus": gpus,
            "disk_bytes": round(disk),
            "peak_bytes": round(most),
        }
        reason = f"one GPU would have to hold {what}, and has {memory / 1e9:,.0f} GB to use"
        return found if most <= memory else found | {"why": reason}

    part = "its part of the target, or the head and one sequence"
    peak_streamed, layers = max(2 * layer, peak), "two layers, or the head and one sequence"
    streamed = way(trainers, min(plan.feature_bytes, 2 * CHUNK_BYTES), peak_streamed, layers)
    return {
        "gpu": gpu.name,
        "epochs": round(epochs, 3),
        "storage": {
            "target_bytes": stored,
            "decoded_layer_bytes": [
                layer,
                2 * layer,
            ],  # in bfloat16; two where the next one is decoded ahead
            "state_bytes_per_token": plan.feature_bytes // max(1, plan.tokens),
            "tokens": plan.tokens,
            "state_bytes": plan.feature_bytes,
            "saved_state_bytes": 3 * 4 * plan.parameters,  # float32 weights and two moments
            "head_bytes": 2 * plan.parameters,
        },
        "phases": {"training": {"least_gpus": trainers, "peak_bytes": round(peak)}},
        "ways": {
            "online": way(trainers, 0, stored + peak, "target and head"),
            "stream": streamed | {"chunks": chunks, "read_bytes": chunks * stored},
            "dumps": way(max(parallel, trainers), plan.feature_bytes, per_engine, part),
            "server": way(parallel + trainers, 0, per_engine, part),
        },
        "dump_commands": dump_commands(name, data, plan, options, parallel, refused),
        "server_commands": server_commands(name, plan, target, options, parallel),
    }


def decoded_layer_bytes(target: ModelSpec) -> int:
    """The largest decoder layer in bfloat16, which a streaming process holds whatever format it is stored in."""
    return max(
        sum(2 * part.copies * math.prod(part.shape) for part in layer if len(part.shape) == 2)
        for layer in (
            target.family.layer(target, index) for index in range(target.num_hidden_layers)
        )
    )


def _trainers(
    plan: TrainingPlan, target: ModelSpec, options: TrainOptions, memory: float
) -> tuple[int, float]:
    """(processes, peak bytes of each): doubled until a process's share of a batch fits, or is one sequence."""
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
    """Peak of one GPU that trains on `rows` sequences at a time: optimizer, frozen ends, and what the backward needs.

    The backward needs the layer's activations of every token, and logits over the draft vocabulary for one chunk.
    """
    tokens = rows * options.seq_len
    ends = 2 * 2 * target.vocab_size * target.hidden_size
    vocabulary = plan.spec.draft_vocab_size
    logits = LOGIT_BYTES * vocabulary * min(tokens, chunk_positions(vocabulary, "cuda"))
    layer = 2 * LAYER_COPIES * options.ttt_steps * target.hidden_size
    return OPTIMIZER_BYTES * plan.parameters + ends + logits + tokens * layer


def dump_commands(
    name: str,
    data: str,
    plan: TrainingPlan,
    options: TrainOptions,
    parallel: int,
    refused: list[Problem],
) -> dict[str, str]:
    """How ModelOpt's example scripts (examples/speculative_decoding/collect_hidden_states) write the dumps.

    `refused`: why TensorRT-LLM does not run the target there. The reason then replaces its command.
    """
    layers = ",".join(map(str, plan.spec.aux_layers or ()))
    where = f"--input-data {shlex.quote(data)} --output-dir dumps --max-seq-len {options.seq_len} --tp {parallel}"
    trtllm = f"python compute_hidden_states_trtllm.py --model {name} {where} --moe-ep {parallel} --aux-layers {layers}"
    return {
        "trtllm": f"# {refused[0].message}" if refused else trtllm,
        "vllm": f"python compute_hidden_states_vllm.py --model {name} {where} --trust_remote_code",
    }


def server_commands(
    name: str, plan: TrainingPlan, target: ModelSpec, options: TrainOptions, parallel: int
) -> dict[str, str]:
    """How vLLM serves states with ModelOpt's connector (which must be installed beside it), and what then trains.

    vLLM counts the layers before a state, not layer outputs from 0: its ids are ours plus one, the last one is the
    state after all layers. A prompt must be computed whole, without a cached prefix, or its states are missing.
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
        "--enforce-eager --no-enable-chunked-prefill --no-enable-prefix-caching "
        "--max-num-seqs 16 --trust-remote-code"
    )
    return {
        "vllm": f"vllm serve {name} --tensor-parallel-size {parallel} --max-model-len {options.seq_len + 1} {flags} "
        f"--speculative-config '{json.dumps(speculative)}' --kv-transfer-config '{json.dumps(connector)}'",
    }
