# Written by tools/generate.py; edit the records of the commands instead.
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from trtspec.engine.engine import Engine as Engine
from trtspec.errors import TrtspecError as TrtspecError
from trtspec.report import Result as Result

__version__: str

def build_config(
    target: str | Path,
    *,
    head: str | Path | None = None,
    trtllm_version: str | Path = '',
    goal: Literal['latency', 'throughput'] = 'latency',
    tp_size: int = 4,
    max_batch_size: int | None = None,
    max_num_tokens: int | None = None,
    max_seq_len: int | None = None,
    draft_len: int = 3,
    nodes: int = 1,
    gpu: Literal['b200', 'b300', 'gb200', 'gb300', 'h100', 'h200'] | None = None,
    role: Literal['context', 'generation', 'front'] | None = None,
    ep_size: int | None = None,
    isl: int | None = None,
    osl: int | None = None,
    concurrency: int | None = None,
    attention_dp: bool | None = None,
    context_url: str | Path | Sequence[str | Path] = (),
    generation_url: str | Path | Sequence[str | Path] = (),
    set: str | Path | Sequence[str | Path] = (),
    trust_remote_code: bool = False,
    format: Literal['yaml', 'helm-values', 'dynamo', 'vllm'] = 'yaml',
    like: str | Path | None = None,
    image: str | Path | None = None,
    quantize_from: str | Path | None = None,
    output: str | Path | None = None,
    disaggregated: str | Path | None = None,
    dry_run: bool = False,
    force: bool = False,
) -> Result:
    """Write the engine YAML for exactly one TensorRT-LLM version."""

def convert(
    head: str | Path,
    output: str | Path,
    to: Literal['trtllm', 'vllm', 'sglang', 'speculators', 'torchspec', 'specforge', 'safeailab'],
    *,
    from_: Literal['trtllm', 'vllm', 'sglang', 'speculators', 'torchspec', 'specforge', 'safeailab'] | None = None,
    target: str | Path | None = None,
    embed_tokens: Literal['auto', 'target'] = 'auto',
    rope_theta: float | None = None,
    dry_run: bool = False,
    force: bool = False,
) -> Result:
    """Rewrite an Eagle3 head from one project's layout to another's."""

def doctor(
) -> Result:
    """Report what is installed, what each command lacks, and what hardware this machine has."""

def explain(
    code: str | Path,
) -> Result:
    """Say what a problem code means, why, and what to do."""

def inspect(
    path: str | Path,
    *,
    against: str | Path | None = None,
    sample: int | None = None,
    hashes: bool = False,
) -> Result:
    """Report what a target or head checkpoint is and what is wrong with it."""

def plan(
    target: str | Path,
    *,
    head: str | Path | None = None,
    gpu: Literal['b200', 'b300', 'gb200', 'gb300', 'h100', 'h200'] = 'b200',
    gpus: int = 4,
    tp_size: int | None = None,
    ep_size: int | None = None,
    attention_dp: bool = False,
    isl: int = 1024,
    osl: int = 1024,
    concurrency: str | float | Sequence[float] = '1,4,16,64',
    acceptance: str | Path | None = None,
    ttft: float | None = None,
    tpot: float | None = None,
    max_draft: int | None = None,
    kv_fraction: float | None = None,
) -> Result:
    """Estimate whether a target fits, how fast it runs and what speculation gains."""

def quantize(
    source: str | Path,
    output: str | Path,
    *,
    policy: Literal['k2.5', 'k2.6', 'k2.7-code'] | None = None,
    kv_cache: Literal['fp8', 'none'] = 'fp8',
    input_scales: str | Path = 'one',
    weight_scales: Literal['max', 'mse'] | None = None,
    workers: int = 0,
    device: str | Path = 'cpu',
    engine: Literal['stream', 'modelopt'] = 'stream',
    dry_run: bool = False,
    restart: bool = False,
    force: bool = False,
) -> Result:
    """Convert BF16, FP8-block or INT4 weights to NVFP4, keeping the names and files of the hub."""

def train(
    output: str | Path,
    *,
    attention: Literal['mha', 'mla'] = 'mla',
    eagle: Literal['3', '3.1'] = '3',
    draft_vocab_size: int | None = None,
    intermediate_size: int | None = None,
    aux_layers: str | float | Sequence[float] | None = None,
    ttt_steps: int = 3,
    ttt_decay: float = 0.9,
    answer_only: bool = False,
    epochs: int = 3,
    steps: int | None = None,
    batch_size: int = 8,
    accumulation: int = 1,
    seq_len: int = 2048,
    lr: float | None = None,
    schedule: Literal['cosine', 'constant'] = 'cosine',
    warmup: float = 0.05,
    weight_decay: float = 0.0,
    grad_clip: float = 1.0,
    precision: Literal['auto', 'bf16', 'fp32'] = 'auto',
    seed: int = 0,
    held_out: float = 0.05,
    eval_every: int | None = None,
    target: str | Path | None = None,
    data: str | Path | Sequence[str | Path] = (),
    init: str | Path | None = None,
    features: str | Path = 'auto',
    config: str | Path | None = None,
    save_every: int = 100,
    max_time: float | None = None,
    device: str | Path = 'cpu',
    acceptance_prompts: int = 48,
    gpu: Literal['b200', 'b300', 'gb200', 'gb300', 'h100', 'h200'] = 'b200',
    dry_run: bool = False,
    restart: bool = False,
    force: bool = False,
) -> Result:
    """Train an Eagle3 draft head with ModelOpt on answers written by the target itself."""

def lint(
    config: Mapping[str, Any] | str | Path,
    *,
    trtllm_version: str | None = None,
    target: str | Path | None = None,
    head: str | Path | None = None,
    gpu: str | None = None,
    options: tuple[str, ...] = (),
) -> Result:
    """Checks an engine configuration: a mapping, YAML text, or the path of a file."""
