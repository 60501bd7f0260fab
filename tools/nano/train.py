"""Trains kimi-nano, the small Kimi-shaped target that ships with trtspec: `python -m tools.nano.train -o DIR`.

Everything is as in Kimi-K2.5 except the sizes; the corpus is the standard library of the running Python (3.11 for
the shipped file). The result depends on the number of steps, not on the clock: --tokens says how much is seen.
The shipped file was made in two runs, the second with --init on conversations alone; provenance.json has the options.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tools.nano import corpus
from trtspec.checkpoint.tokenizer import KimiTokenizer
from trtspec.checkpoint.writer import write_shard
from trtspec.models.kimi import KimiModel
from trtspec.models.moe import MoE, Router
from trtspec.models.weights import checkpoint_tensors, load_target
from trtspec.report import provenance, write_atomic, write_json
from trtspec.specs import ModelSpec

BASE_VOCABULARY = 1792
PROMPT_FILES = ("prompts_train.jsonl", "prompts_heldout.jsonl")
SEQUENCE = 384
DECAY_SHARE = 0.2
BALANCE_SPEED = 1e-3  # step of the correction bias (DeepSeek-V3's auxiliary-loss-free balancing)


def model_config() -> dict[str, Any]:
    """config.json of kimi-nano: Kimi-K2.5's keys, smaller sizes, no vision part."""
    return json.loads((Path(__file__).parent / "config.json").read_text(encoding="utf-8"))


def initialize(model: KimiModel) -> None:
    """Normal(0, 0.02); projections that end a residual branch are scaled down by sqrt(2 * layers)."""
    depth = math.sqrt(2 * model.spec.num_hidden_layers)
    for name, parameter in model.named_parameters():
        if parameter.dim() < 2:
            continue
        final = name.endswith(("o_proj.weight", "down_proj.weight", "experts.down"))
        nn.init.normal_(parameter, std=0.02 / depth if final else 0.02)


def documents(tokenizer: KimiTokenizer, modules: list[corpus.Module], seed: int, files: bool) -> list[list[int]]:
    """Token ids of conversations (tool calls among them) and, if asked, of source files, shuffled."""
    chats = [chat for module in modules for chat in corpus.conversations(module)]
    tools = [chat for module in modules for chat in corpus.tool_conversations(module)]
    rng = random.Random(seed)
    chats += rng.sample(tools, min(len(tools), len(chats) // 6))
    encoded = [
        tokenizer.apply_chat_template(corpus.messages(chat), list(chat.tools) or None, add_generation_prompt=False)
        for chat in chats
    ]
    if files:
        encoded += [tokenizer.encode(module.text) + [tokenizer.special_id("[EOS]")] for module in modules]
    rng.shuffle(encoded)
    return encoded


class Balancer:
    """Counts how often each expert is chosen and moves the selection bias against the imbalance."""

    def __init__(self, model: KimiModel) -> None:
        self.counts: dict[Router, Tensor] = {}
        for module in model.modules():
            if isinstance(module, MoE):
                module.gate.register_forward_hook(self.count)

    def count(self, gate: Router, _: Any, output: tuple[Tensor, Tensor]) -> None:
        chosen = torch.bincount(output[0].flatten(), minlength=gate.spec.n_routed_experts).float()
        self.counts[gate] = self.counts.get(gate, torch.zeros(())) + chosen

    def step(self) -> None:
        for gate, counts in self.counts.items():
            gate.e_score_correction_bias.data += BALANCE_SPEED * torch.sign(counts.mean() - counts)
        self.counts.clear()


def learning_rate(step: int, steps: int, peak: float) -> float:
    """Linear warm-up over 100 steps, constant, then linear down to 2 % of the peak over the last fifth."""
    warm = min(1.0, (step + 1) / 100)
    cool = min(1.0, (steps - step) / (DECAY_SHARE * steps))
    return peak * warm * max(0.02, cool)


def train(
    model: KimiModel, stream: Tensor, steps: int, batch: int, peak: float, seed: int, output: Path, dtype: str
) -> int:
    """AdamW on random windows of the token stream, products in `dtype`, float32 weights; one JSON line per 20 steps.

    Returns the number of steps done. A file `finish` in `output` makes the run end early by starting the decay at once,
    which gives what a run of that many steps from the start would have given.
    """
    generator = torch.Generator().manual_seed(seed)
    decayed = [p for p in model.parameters() if p.requires_grad and p.dim() >= 2]
    plain = [p for p in model.parameters() if p.requires_grad and p.dim() < 2]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=peak, betas=(0.9, 0.95), fused=True)
    balancer = Balancer(model)
    began = time.monotonic()
    step = 0
    with (output / "training.jsonl").open("w") as out:
        while step < steps:
            if (output / "finish").exists() and step < (1 - DECAY_SHARE) * steps:
                steps = int(step / (1 - DECAY_SHARE))
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(step, steps, peak)
            begin = torch.randint(0, len(stream) - SEQUENCE - 1, (batch,), generator=generator)
            window = torch.stack([stream[i : i + SEQUENCE + 1] for i in begin.tolist()])
            with torch.autocast("cpu", torch.bfloat16, enabled=dtype == "bfloat16"):
                logits = model(window[:, :-1]).logits
            loss = F.cross_entropy(logits.flatten(0, 1), window[:, 1:].flatten())
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            balancer.step()
            if step % 20 == 0 or step == steps - 1:
                seen = (step + 1) * batch * SEQUENCE
                row = {
                    "step": step,
                    "loss": round(loss.item(), 4),
                    "tokens": seen,
                    "seconds": round(time.monotonic() - began, 1),
                }
                out.write(json.dumps(row) + "\n")
                out.flush()
                print(row, flush=True)
            step += 1
    return steps


def write_prompts(path: Path, chats: list[corpus.Exchange], answers: bool) -> None:
    """One JSON object a line: id, category, messages; `reference` is the corpus's answer (held-out prompts)."""
    rows = []
    for chat in chats:
        row: dict[str, Any] = {"id": chat.id, "category": chat.category}
        row["messages"] = [{"role": "user", "content": chat.question}]
        if answers:
            row["reference"] = chat.answer
        rows.append(json.dumps(row, ensure_ascii=False) + "\n")
    write_atomic(path, "".join(rows))


def sampled(modules: list[corpus.Module], count: int, seed: int) -> list[corpus.Exchange]:
    return corpus.sample([chat for module in modules for chat in corpus.conversations(module)], count, seed)


def save(model: KimiModel, directory: Path, options: dict[str, Any]) -> None:
    """Writes the checkpoint in bf16 (the correction bias in float32) with config, generation config and provenance."""
    tensors = {
        name: tensor if name.endswith("e_score_correction_bias") else tensor.to(torch.bfloat16)
        for name, tensor in checkpoint_tensors(model).items()
    }
    write_shard(directory / "model.safetensors", tensors, {"format": "pt"})
    config = model_config()
    write_json(directory / "config.json", config)
    write_json(
        directory / "generation_config.json",
        {"bos_token_id": config["bos_token_id"], "eos_token_id": [config["eos_token_id"], BASE_VOCABULARY + 1]},
    )
    write_json(
        directory / "provenance.json",
        provenance("python -m tools.nano.train", {"text": "Python standard library"}, options),
    )


def start_model(init: Path | None) -> KimiModel:
    """A fresh model, or the weights of an earlier run in float32."""
    if init is None:
        model = KimiModel(ModelSpec.from_config(model_config()))
        initialize(model)
        return model
    model = load_target(init, dtype=torch.float32).train()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not name.endswith("e_score_correction_bias"))
    return model


def prepare(output: Path, init: Path | None, training: list[corpus.Module], heldout: list[corpus.Module]) -> None:
    """Tokenizer and prompt files: learned and drawn, or those of the earlier run."""
    output.mkdir(parents=True, exist_ok=True)
    if init is not None:
        kept = ("tiktoken.model", "tokenizer_config.json", "preprocessor_config.json", "chat_template.jinja")
        for name in (*kept, *PROMPT_FILES):
            write_atomic(output / name, (init / name).read_bytes())
        return
    ranks = corpus.learn_ranks((module.text for module in training[::2]), BASE_VOCABULARY)
    corpus.write_tokenizer(output, ranks)
    write_prompts(output / PROMPT_FILES[0], sampled(training, 2000, seed=1), answers=False)
    write_prompts(output / PROMPT_FILES[1], sampled(heldout, 250, seed=2), answers=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument(
        "--init", type=Path, help="an earlier run's directory: continue from it, on conversations alone"
    )
    parser.add_argument("--tokens", type=float, default=6e6, help="tokens to see")
    parser.add_argument("--batch", type=int, default=8, help="sequences of 384 tokens a step")
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16"),
        default="float32",
        help="of matrix products; bfloat16 is twice as fast where the CPU has it and many times slower where not",
    )
    options = parser.parse_args()
    torch.manual_seed(options.seed)
    torch.set_num_threads(options.threads)

    modules = corpus.modules()
    training = [module for module in modules if not module.heldout]
    prepare(options.output, options.init, training, [module for module in modules if module.heldout])
    tokenizer = KimiTokenizer(options.output)
    chosen = documents(tokenizer, training, options.seed, files=options.init is None)
    stream = torch.tensor([token for document in chosen for token in document])
    model = start_model(options.init)
    parameters = sum(p.numel() for p in model.parameters())
    print(f"{parameters / 1e6:.2f}M parameters, {len(stream) / 1e6:.2f}M tokens of text", flush=True)
    steps = int(options.tokens / (options.batch * SEQUENCE))
    done = train(model, stream, steps, options.batch, options.lr, options.seed, options.output, options.dtype)
    used = vars(options) | {"tokens": done * options.batch * SEQUENCE}
    earlier = json.loads((options.init / "provenance.json").read_text())["options"] if options.init else None
    save(model, options.output, {k: v for k, v in used.items() if k not in ("output", "init")} | {"init": earlier})


if __name__ == "__main__":
    main()
