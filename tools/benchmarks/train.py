"""Training speed: our loop beside ModelOpt's own and SpecForge's.

    python -m tools.benchmarks.train --answers answers.jsonl [--steps 6] [--batch-size 4]
        [--seq-len 256] [--rounds 1]
        [--specforge DIR]     DIR: `pip install --no-deps --target DIR specforge`

All train an MHA EAGLE-3 head of one shape over the whole vocabulary, on the same target, batches
and initial weights: three training-time-test steps, float32, one thread, whole sequences, AdamW and
clipping; losses of equal steps are printed so that nobody wins by doing less. Each contestant runs
in a process of its own, in turn. tokens/s is by CPU time, which other work on the machine disturbs
less than wall time: the median over steps without the first, over rounds.

    ours        the target's forward, then one step; "cached" is the step alone, as in every
                epoch but the first
    ModelOpt    transformers' target inside ModelOpt's converted model, as its examples' Trainer
                calls it
    SpecForge   its OnlineEagle3Model and Llama draft after transformers' forward of the same
                target. Its loss is a Triton kernel, which has no CPU backend, so a plain
                log-softmax replaces it and Triton is a stub
"""

from __future__ import annotations

import argparse
import importlib.machinery
import itertools
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from trtspec import data_files
from trtspec.checkpoint.hub import resolve
from trtspec.checkpoint.tokenizer import KimiTokenizer
from trtspec.heads.training.samples import Sample, read_samples
from trtspec.heads.training.train_options import TrainOptions, new_head_spec

TTT, DECAY, RATE = 3, 0.9, 1e-3


def main() -> None:
    arguments = parsed()
    torch.set_num_threads(1)
    if arguments.only:
        print(json.dumps(CONTESTANTS[arguments.only](arguments, batches(arguments))))
        return
    names = [name for name in CONTESTANTS if name != "specforge" or arguments.specforge]
    with tempfile.TemporaryDirectory() as room:
        text_only(arguments.target, Path(room))
        runs: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
        for _, name in itertools.product(range(arguments.rounds), names):
            runs[name].append(in_own_process(name, room))
    report(runs, arguments)


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--answers", type=Path, required=True)
    parser.add_argument("--target", type=Path, default=data_files.kimi_nano_dir())
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--seq-len", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--specforge", type=Path)
    parser.add_argument("--only", choices=CONTESTANTS, help=argparse.SUPPRESS)
    parser.add_argument("--room", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


def in_own_process(name: str, room: str) -> dict[str, Any]:
    command = [
        sys.executable,
        "-m",
        "tools.benchmarks.train",
        *sys.argv[1:],
        "--only",
        name,
        "--room",
        room,
    ]
    done = subprocess.run(
        command, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"}
    )
    if done.returncode:
        sys.exit(f"{name} failed:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def report(runs: dict[str, list[dict[str, Any]]], arguments: argparse.Namespace) -> None:
    tokens = arguments.batch_size * arguments.seq_len
    speed = {
        name: tokens / statistics.median(run["seconds"] for run in many)
        for name, many in runs.items()
    }
    speed["ours, cached"] = tokens / statistics.median(
        run["cached_seconds"] for run in runs["ours"]
    )
    best = max(value for name, value in speed.items() if not name.startswith("ours"))
    for name, value in speed.items():
        run = runs["ours" if name.startswith("ours") else name][0]
        losses = " ".join(f"{loss:.4f}" for loss in run["losses"])
        print(
            f"{name:13} {value:7.0f} tokens/s, {value / best:.2f}x the best peer, "
            f"peak memory {run['peak'] / 2**20:.0f} MiB "
            f"({(run['peak'] - run['before']) / 2**20:.0f} over imports), losses {losses}"
        )


def batches(arguments: argparse.Namespace) -> list[list[Sample]]:
    """Whole sequences cut from the answers, end to end."""
    read = read_samples(arguments.answers, KimiTokenizer(arguments.target), 10**6)
    ids = list(itertools.chain.from_iterable(sample.tokens for sample in read))
    size, count = arguments.seq_len, arguments.batch_size * arguments.steps
    cut = [tuple(ids[i * size : (i + 1) * size]) for i in range(count)]
    if any(len(part) < size for part in cut):
        sys.exit(
            f"the answers hold {len(ids)} tokens, {count * size} are needed: pass fewer --steps"
        )
    samples = [Sample(str(number), part, (1,) * size, 0) for number, part in enumerate(cut)]
    return [samples[i : i + arguments.batch_size] for i in range(0, count, arguments.batch_size)]


def measured(step: Callable[[int], float], steps: int, before: int, **more: Any) -> dict[str, Any]:
    """Runs the steps; the first one warms up."""
    seconds, losses = [], []
    for number in range(steps):
        began = time.process_time()
        losses.append(step(number))
        seconds.append(time.process_time() - began)
    median = statistics.median(seconds[1:] or seconds)
    return {"seconds": median, "losses": losses, "before": before, "peak": peak_memory(), **more}


def peak_memory() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def our_head(arguments: argparse.Namespace) -> tuple[Any, Any, TrainOptions]:
    """(target, a fresh training module, its options).

    The others begin with the weights that this one saves.
    """
    from trtspec.heads.training import module as train
    from trtspec.models.weights import load_target

    options = TrainOptions(
        attention="mha",
        ttt_steps=TTT,
        lr=RATE,
        warmup=0.0,
        precision="fp32",
        batch_size=arguments.batch_size,
    )
    target = load_target(arguments.target, dtype=torch.float32)
    spec = new_head_spec(target.spec, TrainOptions(attention="mha", eagle="3"))
    torch.manual_seed(0)
    return (
        target,
        train.build(spec, target.spec, target.embed.weight, target.lm_head.weight),
        options,
    )


def ours(arguments: argparse.Namespace, data: list[list[Sample]]) -> dict[str, Any]:
    from trtspec.heads.training.loop import Stepper
    from trtspec.heads.training.ranks import Ranks
    from trtspec.heads.training.states import compute_features

    before = peak_memory()
    target, module, options = our_head(arguments)
    torch.save(module.eagle_module.state_dict(), arguments.room / "start.pt")
    layers = target.spec.default_aux_layers
    gathering: list[float] = []
    step_seconds: list[float] = []
    stepper: Stepper | None = None

    def step(number: int) -> float:
        nonlocal stepper
        began = time.process_time()
        features = compute_features(target, data[number], layers)
        gathering.append(time.process_time() - began)
        if stepper is None:
            stepper = Stepper(module, features, options, 10**9, Ranks())
        stepper.features = features
        began = time.process_time()
        loss = stepper.step(number + 1, [list(range(len(data[number])))]).loss
        step_seconds.append(time.process_time() - began)
        return loss

    found = measured(step, len(data), before)
    return found | {"cached_seconds": statistics.median(step_seconds[1:] or step_seconds)}


def text_only(target: Path, room: Path) -> None:
    """The target's text model under the names and config that transformers' own class reads."""
    config = json.loads((target / "config.json").read_text())
    text = {
        **config.get("text_config", config),
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
    }
    tensors = {}
    for shard in sorted(target.glob("*.safetensors")):
        tensors |= {
            name.removeprefix("language_model."): value for name, value in load_file(shard).items()
        }
    save_file(tensors, room / "model.safetensors", {"format": "pt"})
    (room / "config.json").write_text(json.dumps(text))


def transformers_target(arguments: argparse.Namespace) -> Any:
    from transformers import DeepseekV3ForCausalLM

    return DeepseekV3ForCausalLM.from_pretrained(arguments.room, dtype=torch.float32)


def optimizer_of(parameters: list[Any]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=RATE, betas=(0.9, 0.95), weight_decay=0.0, fused=True)


def update(loss: Tensor, parameters: list[Any], optimizer: torch.optim.Optimizer) -> float:
    loss.backward()
    torch.nn.utils.clip_grad_norm_(parameters, 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return loss.item()


def tokens_of(samples: list[Sample]) -> Tensor:
    return torch.tensor([sample.tokens for sample in samples])


def modelopt(arguments: argparse.Namespace, data: list[list[Sample]]) -> dict[str, Any]:
    import modelopt.torch.speculative as mtsp

    from trtspec.heads.training import module as train

    before = peak_memory()
    target = resolve(str(arguments.target)).target_spec()
    spec = new_head_spec(target, TrainOptions(attention="mha", eagle="3"))
    architecture = train._eagle_architecture(spec, target) | {"_attn_implementation": "sdpa"}
    model = transformers_target(arguments)
    given = {
        "eagle_ttt_steps": TTT,
        "eagle_use_torch_compile": False,
        "eagle_loss_decay_factor": DECAY,
    }
    model = mtsp.convert(model, [("eagle", given | {"eagle_architecture_config": architecture})])
    model.eagle_module.load_state_dict(torch.load(arguments.room / "start.pt"))
    model.train()
    parameters = [value for value in model.parameters() if value.requires_grad]
    optimizer = optimizer_of(parameters)

    def step(number: int) -> float:
        ids = tokens_of(data[number])
        output = model(input_ids=ids, attention_mask=torch.ones_like(ids), labels=ids)
        return update(output.loss, parameters, optimizer)

    return measured(step, len(data), before)


def specforge(arguments: argparse.Namespace, data: list[list[Sample]]) -> dict[str, Any]:
    # before triton is a stub
    import transformers.models.deepseek_v3.modeling_deepseek_v3  # noqa: F401
    from transformers import LlamaConfig

    before = peak_memory()
    target = resolve(str(arguments.target)).target_spec()
    head = new_head_spec(target, TrainOptions(attention="mha", eagle="3"))
    start = {
        k.replace("layers.0.", "midlayer."): v
        for k, v in torch.load(arguments.room / "start.pt").items()
    }
    draft_class, model_class, padding = import_specforge(arguments.specforge)
    base = transformers_target(arguments).eval().requires_grad_(False)
    config = LlamaConfig(
        hidden_size=target.hidden_size,
        intermediate_size=head.intermediate_size,
        num_hidden_layers=1,
        num_attention_heads=head.num_attention_heads,
        num_key_value_heads=head.num_key_value_heads,
        head_dim=head.head_dim,
        vocab_size=target.vocab_size,
        rms_norm_eps=target.rms_norm_eps,
        pad_token_id=0,
        max_position_embeddings=2048,
    )
    config.draft_vocab_size, config.target_hidden_size = target.vocab_size, target.hidden_size
    config.rope_theta, config.rope_scaling = target.rope.theta, None
    draft = draft_class(config, attention_backend="sdpa")
    missing = draft.load_state_dict(start, strict=False).missing_keys
    assert all(name.startswith(("embed_tokens", "t2d", "d2t")) for name in missing), missing
    draft.embed_tokens.weight.data.copy_(base.get_input_embeddings().weight)
    draft.embed_tokens.weight.requires_grad_(False)
    if hasattr(draft, "t2d"):
        draft.t2d.fill_(True)
        draft.d2t.zero_()
    model = model_class(draft, length=TTT, attention_backend="sdpa")
    parameters = [value for value in draft.parameters() if value.requires_grad]
    optimizer = optimizer_of(parameters)

    def step(number: int) -> float:
        ids = tokens_of(data[number])
        mask = torch.ones_like(ids)
        with torch.no_grad():
            states = base(ids, output_hidden_states=True)
        aux = torch.cat(
            [states.hidden_states[layer + 1] for layer in target.default_aux_layers], -1
        )
        output = model(
            input_ids=padding(ids, left=False),
            attention_mask=mask,
            target=padding(states.logits, left=False),
            loss_mask=mask[..., None],
            hidden_states=aux,
        )
        losses = next(
            part
            for part in output
            if isinstance(part, list) and torch.is_tensor(part[0]) and part[0].requires_grad
        )
        return update(sum(DECAY**k * loss for k, loss in enumerate(losses)), parameters, optimizer)

    return measured(step, len(data), before)


def import_specforge(directory: Path) -> tuple[Any, Any, Any]:
    """(draft class, training class, padding), with Triton and its loss replaced.

    Triton is a stub, and the loss is the same formula.
    """
    os.environ["TORCHDYNAMO_DISABLE"] = "1"
    triton, language = types.ModuleType("triton"), types.ModuleType("triton.language")
    triton.jit, triton.next_power_of_2 = (  # type: ignore[attr-defined]
        lambda kernel: kernel,
        lambda n: 1 << (n - 1).bit_length(),
    )
    language.constexpr, triton.language = int, language  # type: ignore[attr-defined]
    for module in (triton, language):
        module.__spec__ = importlib.machinery.ModuleSpec(module.__name__, None)
        sys.modules[module.__name__] = module
    sys.path.insert(0, str(directory))
    for name in (
        "specforge.algorithms",
        "specforge.algorithms.eagle3",
    ):  # their __init__ registers every engine
        package = types.ModuleType(name)
        package.__path__ = [str(directory / name.replace(".", "/"))]
        sys.modules[name] = package
    import specforge.algorithms.eagle3.model as eagle3
    import specforge.core.loss as loss
    from specforge.modeling.draft.llama3_eagle import LlamaForCausalLMEagle3
    from specforge.utils import padding

    class PlainLoss:
        @staticmethod
        def apply(logits: Tensor, target: Tensor, mask: Tensor) -> Tensor:
            return -(target * logits.float().log_softmax(-1) * mask).sum(-1).mean()

    loss.LogSoftmaxLoss = eagle3.LogSoftmaxLoss = PlainLoss
    return LlamaForCausalLMEagle3, eagle3.OnlineEagle3Model, padding


CONTESTANTS = {"ours": ours, "ModelOpt": modelopt, "specforge": specforge}

if __name__ == "__main__":
    main()
