"""What a training run costs by each way of getting the target's states: tokens, bytes, GPU hours, peak memory.

Estimates from counted multiplications and the GPU's published rates; a real run depends on its engine, disks and
network. Nothing here was measured on a GPU. The ways:

    online   the target in GPU memory beside the head: only where one GPU holds both
    stream   one GPU, one decoder layer of the target in memory at a time, prompts in chunks
    dumps    states written by an engine at tensor parallel N, read again in every epoch
    server   a live engine hands over the states while the head trains; nothing is stored
"""

from __future__ import annotations

import json
import math
from typing import Any

from trtspec.checkpoint.target_shapes import linear_shapes
from trtspec.heads.training.options import TrainOptions
from trtspec.heads.training.plan import TrainingPlan
from trtspec.specs import GpuSpec, ModelSpec

EFFICIENCY = 0.35  # of the GPU's dense rate, in training and in prefill
USABLE = 0.9  # of a GPU's memory
DISK_BYTES_PER_SECOND = 5e9  # one NVMe drive
CHUNK_BYTES = 256 * 2**30  # of host memory or disk that a chunk's states may take while layers are streamed
OPTIMIZER_BYTES = 16  # per parameter: float32 weight, gradient and two moments
LAYER_COPIES = 24  # hidden-sized activations that a head's layer keeps per token for its backward, in bf16


def forecast(
    plan: TrainingPlan, target: ModelSpec, options: TrainOptions, target_bytes: int, gpu: GpuSpec, name: str
) -> dict[str, Any]:
    """`target_bytes`: of the stored target. Returns {gpu, epochs, head_training, ways, dump_commands, server_commands};
    a way is `possible` where this command can go it on that GPU."""
    epochs = plan.steps * options.batch_size / max(1, plan.counted or len(plan.samples))
    rate = gpu.bf16_flops * EFFICIENCY
    training = plan.tokens * epochs * training_flops(plan, target, options) / rate / 3600
    forward = plan.tokens * forward_flops(target, options.seq_len) / rate / 3600
    memory = gpu.memory_bytes * USABLE
    trainers, peak = _trainers(plan, target, options, memory)
    parallel = _power_of_two(target_bytes / memory * 1.15)
    layer = target_bytes / target.num_hidden_layers
    chunks = math.ceil(plan.feature_bytes / CHUNK_BYTES)
    reading = chunks * target_bytes / DISK_BYTES_PER_SECOND / 3600
    alone = target_bytes + peak <= memory
    ways = {
        "online": _way(trainers, forward + training, 0, target_bytes + peak) | {"possible": alone},
        "stream": _way(
            trainers, max(forward, reading) + training, min(plan.feature_bytes, CHUNK_BYTES), max(2 * layer, peak)
        )
        | {"possible": True, "chunks": chunks, "read_bytes": chunks * target_bytes},
        "dumps": _way(
            max(parallel, trainers), forward + training, plan.feature_bytes, max(target_bytes / parallel, peak)
        )
        | {"possible": True},
        "server": _way(parallel + trainers, forward + training, 0, max(target_bytes / parallel, peak))
        | {"possible": True},
    }
    return {
        "gpu": gpu.name,
        "epochs": round(epochs, 3),
        "head_training": {"gpus": trainers, "gpu_hours": round(training, 2), "peak_bytes": round(peak)},
        "ways": ways,
        "dump_commands": dump_commands(name, plan, options, parallel),
        "server_commands": server_commands(name, plan, target, options, parallel),
    }


def _trainers(plan: TrainingPlan, target: ModelSpec, options: TrainOptions, memory: float) -> tuple[int, float]:
    """(processes, peak bytes of each): the fewest, doubling, over which a batch fits; at most one sequence each."""
    processes = 1
    while True:
        rows = math.ceil(options.batch_size / processes)
        peak = training_bytes(plan, target, options, rows)
        if peak <= memory or rows == 1:
            return processes, peak
        processes *= 2


def _way(gpus: int, hours: float, disk: float, peak: float) -> dict[str, Any]:
    """`gpu_hours` of the target and the head together; `peak_bytes` of the fullest GPU."""
    return {"gpus": gpus, "gpu_hours": round(hours, 2), "disk_bytes": round(disk), "peak_bytes": round(peak)}


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


def dump_commands(name: str, plan: TrainingPlan, options: TrainOptions, parallel: int) -> dict[str, str]:
    """How ModelOpt's example scripts (examples/speculative_decoding/collect_hidden_states) write the dumps."""
    layers = ",".join(map(str, plan.spec.aux_layers or ()))
    where = f"--input-data answers.jsonl --output-dir dumps --max-seq-len {options.seq_len} --tp {parallel}"
    return {
        "trtllm": f"python compute_hidden_states_trtllm.py --model {name} {where} --moe-ep {parallel} "
        f"--aux-layers {layers}",
        "vllm": f"python compute_hidden_states_vllm.py --model {name} {where} --trust_remote_code",
        "then": f"trtspec train {name} dumps -o head",
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
        "then": f"trtspec train {name} answers.jsonl -o head --features http://HOST:8000",
    }
