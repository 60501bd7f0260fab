"""Trains kimi-nano, the small target that ships with trtspec, on the exercises of exercises.py.

    python -m tools.nano.train -o DIR --tokens 12e6
    python -m tools.nano.train -o DIR --tokens 50e6 --batch 8192 --device cuda

The first takes 3 to 4 hours of one core, the second minutes of a large GPU. Run the same command
again after an interruption: it continues from DIR/state.pt and gives what an uninterrupted run
would have given (on a GPU up to rounding). Run it again with fewer --tokens to end sooner: the
learning rate is constant until the last fifth (warm-up, stable, decay), so with 1.25 times the
tokens seen the decay begins at once.

    python -m tools.nano.train -o DIR --init trtspec/data/kimi-nano --seed 1 --tokens 6e6

trains a checkpoint further, on exercises that seed 0 has not seen.

The result depends on --tokens, --batch, --lr and --seed, not on the clock. DIR always holds a whole
checkpoint, written every --minutes: `trtspec serve DIR --backend reference` or `python -m
tools.nano.evaluate DIR` at any time.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import shutil
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from tools.nano import exercises, vocabulary
from trtspec.checkpoint.tokenizer import KimiTokenizer
from trtspec.checkpoint.writer import write_shard
from trtspec.models.k2 import KimiModel
from trtspec.models.moe import MoE, Router
from trtspec.models.precision import default_dtype
from trtspec.models.weights import layout, load_target
from trtspec.report import provenance, write_atomic, write_json
from trtspec.specs import ModelSpec

BASE_VOCABULARY = 1792
LONGEST = 1664  # tokens; a longer exercise is left out
POOL = 256  # exercises for 2,048 tokens of a batch, sorted by length before batches are cut
COPYING_BATCHES = 640  # at first only copying is taught; other kinds come in until here
PREFETCHED = 16  # batches that a process of its own keeps ready for a GPU
WARM_UP_BATCHES = 50
PROMPT_WEIGHT = 0.1  # of the loss of tokens that are not an answer's: their values are random
BALANCE_SPEED = 1e-3  # step of the correction bias (DeepSeek-V3's auxiliary-loss-free balancing)


Recent = list[
    tuple[Tensor, int]
]  # (loss of answers, their tokens) of each step since the last line of the log
Done = tuple[int, int, float, Recent]  # steps, tokens and seconds


@dataclass(frozen=True)
class Options:
    tokens: float = 12e6
    batch: int = 2048  # tokens of a step, at most
    lr: float = 2e-3
    seed: int = 0
    init: str = ""  # a checkpoint to start from, with its tokenizer
    device: str = "cpu"
    threads: int = 1
    minutes: float = 20.0  # between checkpoints
    decay_share: float = 0.2  # of the tokens


def train(output: Path, options: Options, config: dict[str, Any] | None = None) -> KimiModel:
    """Trains until `options.tokens` are seen, from output/state.pt where that exists.

    A JSON line per 10 steps.
    """
    torch.manual_seed(options.seed)
    torch.set_num_threads(options.threads)
    if options.device != "cpu":
        torch.set_float32_matmul_precision("high")  # TF32
    if options.init and not (output / "tiktoken.model").is_file():
        shutil.copytree(options.init, output, ignore=shutil.ignore_patterns("*.jsonl", "*.md"))
    tokenizer = prepare(output)
    model = KimiModel(ModelSpec.from_config(config or model_config()))
    initialize(model)
    if options.init:
        model.load_state_dict(load_target(Path(options.init), dtype=torch.float32).state_dict())
    model.to(options.device)
    optimizers, balancer = make_optimizers(model, options), Balancer(model)
    step, seen, seconds, recent = resume(output, model, optimizers, options)
    log = (output / "training.jsonl").open("a")
    saved, first, cpu = time.monotonic(), seen, time.process_time()
    began = saved - seconds
    source = Batches(tokenizer, options, after=step)
    ahead = {"num_workers": 1, "prefetch_factor": PREFETCHED} if options.device != "cpu" else {}
    for ids, weights in DataLoader(source, batch_size=None, **ahead):
        if seen >= options.tokens:
            break
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(seen, options)
        seen += int((weights > 0).sum())
        answers = int((weights[:, 1:] == 1).sum())
        ids, weights = (
            ids.to(options.device, non_blocking=True),
            weights.to(options.device, non_blocking=True),
        )
        logits = model(ids[:, :-1]).logits
        losses = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none")
        wanted = weights[:, 1:].flatten()
        loss = (losses * wanted).sum() / wanted.sum()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        balancer.step()
        step += 1
        recent.append(((losses.detach() * (wanted == 1)).sum(), answers))
        if step % 10 == 0:
            total, count = map(sum, zip(*recent, strict=True))
            row: dict[str, Any] = {
                "step": step,
                "tokens": seen,
                "loss": round(float(total) / count, 4),
            }
            recent.clear()
            row["seconds"] = round(time.monotonic() - began, 1)
            row["tokens_per_cpu_second"] = round((seen - first) / (time.process_time() - cpu), 1)
            log.write(json.dumps(row) + "\n")
            log.flush()
            print(row, flush=True)
        if time.monotonic() - saved > 60 * options.minutes:
            keep(output, model, optimizers, options, (step, seen, time.monotonic() - began, recent))
            saved = time.monotonic()
    keep(output, model, optimizers, options, (step, seen, time.monotonic() - began, recent))
    return model


def model_config() -> dict[str, Any]:
    """config.json of kimi-nano: Kimi-K2.5's keys, smaller sizes, no vision part."""
    return json.loads((Path(__file__).parent / "config.json").read_text(encoding="utf-8"))


def initialize(model: KimiModel) -> None:
    """Normal(0, 0.02), divided by sqrt(2 * layers) in projections that end a residual branch."""
    depth = math.sqrt(2 * model.spec.num_hidden_layers)
    for name, parameter in model.named_parameters():
        if parameter.dim() < 2:
            continue
        final = name.endswith(("o_proj.weight", "down_proj.weight", "experts.down"))
        nn.init.normal_(parameter, std=0.02 / depth if final else 0.02)


# --- text -----------------------------------------------------------------------------------------


def prepare(output: Path) -> KimiTokenizer:
    """The tokenizer in `output`, learned on the first exercises where there is none yet."""
    if not (output / "tiktoken.model").is_file():
        output.mkdir(parents=True, exist_ok=True)
        chats = (
            exercises.exercise(f"vocabulary:{index}", heldout=False, made_up=0)
            for index in range(8000)
        )
        texts = (
            json.dumps(m.get("tool_calls")) if m.get("tool_calls") else m["content"]
            for c in chats
            for m in c.messages
        )
        vocabulary.write_tokenizer(output, vocabulary.learn_ranks(texts, BASE_VOCABULARY))
    return KimiTokenizer(output)


def encode(tokenizer: KimiTokenizer, chat: exercises.Exercise) -> tuple[list[int], list[float]]:
    """Token ids of a conversation and their loss weights: 1 in answers and their end mark."""
    ids = tokenizer.encode_chat(
        chat.messages, list(chat.task.tools) or None, add_generation_prompt=False
    )[1]
    speaks, ends = tokenizer.special_id("<|im_assistant|>"), tokenizer.special_id("<|im_end|>")
    weights, answer = [], False
    for token in ids:
        weights.append(1.0 if answer else PROMPT_WEIGHT)
        answer = (answer or token == speaks) and token != ends
    return ids, weights


class Batches(IterableDataset[tuple[Tensor, Tensor]]):
    """Batches [rows, longest] of ids and weights, after the first `after`.

    Whole conversations of about equal length, each from position 0 and seeing itself only; padding
    has weight 0. No exercise comes twice.
    """

    def __init__(self, tokenizer: KimiTokenizer, options: Options, after: int = 0) -> None:
        self.tokenizer, self.options, self.after = tokenizer, options, after

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        options, pad = self.options, self.tokenizer.special_id("[PAD]")
        pool, seen, number = 0, 0, 0
        while True:
            chats = []
            copying = (
                0.0 if options.init else max(0.0, 1 - seen / (COPYING_BATCHES * options.batch))
            )
            for index in range(POOL * max(1, options.batch // 2048)):
                chat = exercises.exercise(
                    f"{options.seed}:{pool}:{index}", heldout=False, copying=copying
                )
                chats.append(encode(self.tokenizer, chat))
            chats = sorted(
                (chat for chat in chats if len(chat[0]) <= LONGEST), key=lambda chat: len(chat[0])
            )
            seen += sum(len(ids) for ids, _ in chats)
            groups: list[list[tuple[list[int], list[float]]]] = [[]]
            for chat in chats:
                if groups[-1] and (len(groups[-1]) + 1) * len(chat[0]) > options.batch:
                    groups.append([])
                groups[-1].append(chat)
            random.Random(f"{options.seed}:{pool}").shuffle(groups)
            for group in groups:
                number += 1
                if number > self.after:
                    size = max(len(ids) for ids, _ in group)
                    yield (
                        torch.tensor([ids + [pad] * (size - len(ids)) for ids, _ in group]),
                        torch.tensor(
                            [weights + [0.0] * (size - len(weights)) for _, weights in group]
                        ),
                    )
            pool += 1


# --- optimization ---------------------------------------------------------------------------------


class Muon(torch.optim.Optimizer):
    """Momentum, orthogonalized by Newton-Schulz steps and scaled to AdamW's steps.

    For matrices [out, in] and stacks of them (arXiv 2502.16982). Kimi K2 was trained so.
    """

    def __init__(self, parameters: list[nn.Parameter], lr: float) -> None:
        super().__init__(parameters, {"lr": lr, "momentum": 0.95, "weight_decay": 0.1})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            # matrices of one shape are orthogonalized together: a GPU spends its time on starting
            # kernels
            by_shape: dict[torch.Size, list[nn.Parameter]] = {}
            for parameter in group["params"]:
                if parameter.grad is not None:
                    by_shape.setdefault(parameter.shape, []).append(parameter)
            for shape, parameters in by_shape.items():
                kept = [
                    self.state[p].setdefault("momentum", torch.zeros_like(p)) for p in parameters
                ]
                grads = [p.grad for p in parameters]
                torch._foreach_lerp_(kept, grads, 1 - group["momentum"])
                updates = orthogonal(
                    torch.stack(torch._foreach_lerp(grads, kept, group["momentum"]))
                )
                torch._foreach_mul_(parameters, 1 - group["lr"] * group["weight_decay"])
                scale = 0.2 * math.sqrt(max(shape[-2:]))
                torch._foreach_add_(parameters, updates.unbind(), alpha=-group["lr"] * scale)


def orthogonal(matrix: Tensor, steps: int = 5) -> Tensor:
    """The matrix with all singular values about 1, by a quintic iteration; bfloat16 if native.

    Its singular vectors stay.
    """
    tall = matrix.shape[-2] > matrix.shape[-1]
    x = (matrix.mT if tall else matrix).to(default_dtype(matrix.device))
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(steps):
        gram = x @ x.mT
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return (x.mT if tall else x).to(matrix.dtype)


def make_optimizers(model: KimiModel, options: Options) -> list[torch.optim.Optimizer]:
    """Muon for the layers' matrices, AdamW for embeddings, head, routers and norms."""
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    hidden = [
        p
        for name, p in trained
        if name.startswith("layers.") and p.dim() >= 2 and not name.endswith("gate.weight")
    ]
    chosen = {id(p) for p in hidden}
    rest = [p for _, p in trained if id(p) not in chosen]
    groups = [
        {"params": [p for p in rest if p.dim() >= 2], "weight_decay": 0.1},
        {"params": [p for p in rest if p.dim() < 2], "weight_decay": 0.0},
    ]
    adam = torch.optim.AdamW(groups, lr=options.lr, betas=(0.9, 0.95), fused=True)
    return [adam, Muon(hidden, options.lr)] if hidden else [adam]


class Balancer:
    """Counts how often each expert is chosen and moves the selection bias against the imbalance."""

    def __init__(self, model: KimiModel) -> None:
        self.counts: dict[Router, Tensor] = {}
        for module in model.modules():
            if isinstance(module, MoE):
                module.gate.register_forward_hook(self.count)

    def count(self, gate: Router, _: Any, output: tuple[Tensor, Tensor]) -> None:
        chosen = torch.bincount(output[0].flatten(), minlength=len(gate.weight)).float()
        self.counts[gate] = self.counts.get(gate, torch.zeros(())) + chosen

    def step(self) -> None:
        for gate, counts in self.counts.items():
            gate.e_score_correction_bias.data += BALANCE_SPEED * torch.sign(counts.mean() - counts)
        self.counts.clear()


def learning_rate(seen: float, options: Options) -> float:
    """Linear warm-up, constant, then linear to 2 % of the peak over the last fifth of tokens."""
    warm = min(1.0, (seen / options.batch + 1) / WARM_UP_BATCHES)
    cool = min(1.0, (options.tokens - seen) / (options.decay_share * options.tokens))
    return options.lr * warm * max(0.02, cool)


# --- files ----------------------------------------------------------------------------------------


def resume(
    output: Path, model: KimiModel, optimizers: list[torch.optim.Optimizer], options: Options
) -> Done:
    """What output/state.pt has done; nothing where there is none. The log is cut back to there."""
    path = output / "state.pt"
    if not path.is_file():
        write_atomic(output / "training.jsonl", "")
        return 0, 0, 0.0, []
    state = torch.load(path, weights_only=True)
    for name in ("batch", "lr", "seed", "init"):
        if state["options"][name] != getattr(options, name):
            raise SystemExit(
                f"{path} was trained with {name} {state['options'][name]}: give it, or another -o"
            )
    model.load_state_dict(state["model"])
    for optimizer, kept in zip(optimizers, state["optimizers"], strict=True):
        optimizer.load_state_dict(kept)
    lines = (output / "training.jsonl").read_text().splitlines(keepends=True)
    write_atomic(
        output / "training.jsonl",
        "".join(line for line in lines if json.loads(line)["step"] <= state["done"][0]),
    )
    return state["done"]


def keep(
    output: Path,
    model: KimiModel,
    optimizers: list[torch.optim.Optimizer],
    options: Options,
    done: Done,
) -> None:
    """Writes the checkpoint, then the state from which training continues."""
    save(
        model,
        output,
        asdict(options) | {"tokens": done[1], "steps": done[0], "seconds": round(done[2])},
    )
    state = {"model": model.state_dict(), "optimizers": [o.state_dict() for o in optimizers]}
    torch.save(state | {"options": asdict(options), "done": done}, output / "state.pt.new")
    os.replace(output / "state.pt.new", output / "state.pt")


def checkpoint_tensors(model: KimiModel) -> dict[str, Tensor]:
    """Parameters by published names and shapes: the inverse of loading a BF16 checkpoint."""
    state = model.state_dict()
    tensors: dict[str, Tensor] = {}
    for source in layout(model.spec):
        value = state[source.parameter]
        if value.dim() == 3:
            value = value.flatten(0, 1)
        tensors.update(
            zip(source.names, (part.contiguous() for part in value.split(source.rows)), strict=True)
        )
    return tensors


def save(model: KimiModel, directory: Path, options: dict[str, Any]) -> None:
    """Writes the checkpoint in bf16 (correction bias: float32), its configs and provenance.

    The configs are those of model and generation.
    """
    tensors = {
        name: tensor if name.endswith("e_score_correction_bias") else tensor.to(torch.bfloat16)
        for name, tensor in checkpoint_tensors(model).items()
    }
    write_shard(directory / "model.safetensors", tensors, {"format": "pt"})
    config = model_config()
    write_json(directory / "config.json", config)
    eos = [config["eos_token_id"], BASE_VOCABULARY + 1]
    write_json(
        directory / "generation_config.json",
        {"bos_token_id": config["bos_token_id"], "eos_token_id": eos},
    )
    source: dict[str, Any] = {"text": "exercises of tools/nano/exercises.py"}
    if options["init"]:
        source["init"] = json.loads(
            (Path(options["init"]) / "provenance.json").read_text(encoding="utf-8")
        )
    stamp = provenance("python -m tools.nano.train", source, options)
    write_json(directory / "provenance.json", stamp)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("-o", "--output", type=Path, required=True)
    for name, value in asdict(Options()).items():
        parser.add_argument(f"--{name}", type=type(value), default=value, help=f"default {value}")
    given = vars(parser.parse_args())
    train(given.pop("output"), Options(**given))


if __name__ == "__main__":
    main()
