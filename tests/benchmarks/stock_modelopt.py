"""What the norm that stock ModelOpt applies twice costs: a head trained and exported by it against ours.

    python -m tests.benchmarks.stock_modelopt --answers answers.jsonl [--steps 200] [--lr 0.004] [--prompts 24]

Same target, answers, order, steps, rate, initial weights and objective; an MHA EAGLE-3 head, which both can make,
float32. The stock module is ModelOpt's own conversion, decoder layer, masks, loss and exporter with its defaults; only
the loop around it is shared. Accepted in the reference engine, which computes what servers compute:

    ours             trained once normed, exported
    stock export     as `export_speculative_decoding` writes it: trained twice normed, YaRN injected into its config
    stock, own rope  the same with the rope it was trained with: the double norm alone

`agreement` is what each training module reports about itself on held-out answers, so that a worse head cannot pass for
a worse export. The gains of `input_layernorm` start at one, so the damage grows with training: their spread is printed.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch

from tests.benchmarks.head_matrix import cell
from tests.benchmarks.small_heads import Workshop, held_out_messages
from trtspec import data_files
from trtspec.heads import train
from trtspec.heads.architecture import head_config
from trtspec.heads.export import write_head
from trtspec.heads.options import TrainOptions
from trtspec.models.head_weights import load_head
from trtspec.report import write_json


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--answers", type=Path, required=True)
    parser.add_argument("--target", type=Path, default=data_files.kimi_nano_dir())
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--seq-len", type=int, default=192)
    parser.add_argument("--lr", type=float, default=4e-3)
    parser.add_argument("--prompts", type=int, default=24)
    parser.add_argument("--max-tokens", type=int, default=48)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    shop = Workshop.open(
        arguments.target, arguments.answers, arguments.seq_len, whole=True
    )  # its masks know one length
    options = TrainOptions(
        attention="mha", eagle="3", steps=arguments.steps, batch_size=arguments.batch_size, lr=arguments.lr,
        seq_len=arguments.seq_len, seed=arguments.seed, precision="fp32",
    ).checked()  # fmt: skip
    with tempfile.TemporaryDirectory() as directory:
        rows = compare(shop, options, Path(directory), arguments)
    print(
        f"\n{'head':16} {'gain spread':>11} {'agreement by step':>20}  "
        + "  ".join(f"{name:>20}" for name in rows[0][3])
    )
    for name, spread, agreement, found in rows:
        shares = " ".join(f"{value:.3f}" for value in agreement)
        print(f"{name:16} {spread:11.3f} {shares:>20}  " + "  ".join(f"{cell(one):>20}" for one in found.values()))
    print(f"{arguments.prompts} held-out prompts, at most {arguments.max_tokens} new tokens, {arguments.steps} steps")


def compare(shop: Workshop, options: TrainOptions, directory: Path, arguments: argparse.Namespace) -> list[Any]:
    spec = shop.spec(options)
    ours = shop.module(options)
    start = {name: value.clone() for name, value in ours.eagle_module.state_dict().items()}
    ours_agreement = trained(shop, ours, options, directory / "work-ours")
    write_head(directory / "ours", train.head_tensors(ours), spec, shop.target.spec)

    stock = stock_module(shop, options, start)
    stock_agreement = trained(shop, stock, options, directory / "work-stock")
    export_stock(stock, directory / "stock")
    shutil.copytree(directory / "stock", directory / "stock-rope")
    write_json(directory / "stock-rope" / "config.json", head_config(spec, shop.target.spec))

    rows = held_out_messages(arguments.target / "prompts_heldout.jsonl", arguments.prompts)
    prompts = [shop.tokenizer.apply_chat_template(row["messages"]) for row in rows]
    results = []
    for name, folder, agreement in (
        ("ours", "ours", ours_agreement),
        ("stock export", "stock", stock_agreement),
        ("stock, own rope", "stock-rope", stock_agreement),
    ):
        head = load_head(directory / folder, shop.target, dtype=torch.float32)
        found = {
            f"length {length}, T={t:g}": shop.acceptance(head, prompts, length, t, arguments.max_tokens)
            for length in (3, 7)
            for t in (0.0, 1.0)
        }
        results.append((name, float(head.input_layernorm.weight.std()), agreement, found))
    return results


def trained(shop: Workshop, module: train.TrainingModule, options: TrainOptions, work: Path) -> list[float]:
    """Trains; the module's own agreement with the target on held-out answers, per training-time-test step."""
    shop.train(module, options, work)
    points = [json.loads(line) for line in (work / "training.jsonl").read_text().splitlines()]
    return next(point["held_out"]["accuracy"] for point in reversed(points) if "held_out" in point)


def stock_module(shop: Workshop, options: TrainOptions, start: dict[str, torch.Tensor]) -> train.TrainingModule:
    """ModelOpt as it comes, beginning with the same weights."""
    import modelopt.torch.speculative as mtsp

    spec, target = shop.spec(options), shop.target
    stub = train.TargetStub(train._stub_config(spec, target.spec), target.embed.weight, target.lm_head.weight)
    architecture = train._eagle_architecture(spec, target.spec) | {"_attn_implementation": "sdpa"}
    given = {"eagle_offline": True, "eagle_ttt_steps": options.ttt_steps, "eagle_use_torch_compile": False}
    model = mtsp.convert(stub, [("eagle", given | {"eagle_architecture_config": architecture})])
    model.eagle_module.load_state_dict(start)
    return model.train()


def export_stock(stock: train.TrainingModule, directory: Path) -> None:
    from modelopt.torch.export import export_speculative_decoding

    stock.eagle_module.to(torch.bfloat16)
    export_speculative_decoding(stock, export_dir=directory)


if __name__ == "__main__":
    main()
