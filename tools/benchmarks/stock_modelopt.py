"""What the norm that stock ModelOpt applies twice costs, over the course of training: its export against ours.

    python -m tools.benchmarks.stock_modelopt --answers answers.jsonl -o DIR [--steps 1600] [--at 100 400 1600]

Same target, answers, order, steps, rate, initial weights and objective; an MHA EAGLE-3 head, which both can make,
float32. The stock module is ModelOpt's own conversion, decoder layer, masks, loss and exporter with its defaults; only
the loop around it is shared. Accepted in the reference engine, which computes what servers compute:

    ours              trained once normed, exported
    stock, as trained stock weights with the function they were trained with (which no server computes): the second norm
                      added to the engine. Equal to ours if the two trainings are
    stock, own rope   stock weights as servers compute them, with the rope they were trained with: the double norm alone
    stock export      as `export_speculative_decoding` writes it: YaRN injected into its config too

Trained LN(LN(x; g1); g2) against served LN(x; g2): the second normalisation undoes the scale of the first, so that the
two differ by the gains g1 alone, channel by channel. g1 belongs to the embedding's norm and starts at one: the damage
is zero at first and grows with the spread of g1. Printed for each number of steps in `--at`: that spread; how far a
draft logit of the training module is from the engine's for the same weights, and how often their best tokens differ (on
answers, no sampling noise); acceptance with 95 % intervals over prompts.

Trainings (resumable), heads and measurements are kept in DIR and not made again.
"""

from __future__ import annotations

import argparse
import itertools
import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn

from tests.heads.training.test_exported_equals_trained import drafted_logits, record_logits
from tools.benchmarks.head_matrix import cell
from tools.benchmarks.small_heads import Workshop, held_out_messages, kept, last_agreement
from trtspec import data_files
from trtspec.checkpoint.heads.dialects import head_config
from trtspec.heads.training import module as train
from trtspec.heads.training.curve import CurvePoint
from trtspec.heads.training.options import TrainOptions
from trtspec.heads.training.run import write_head
from trtspec.models.eagle3 import Eagle3Head
from trtspec.models.head_weights import load_head
from trtspec.report import write_json

SIDES = ("ours", "stock")
STEPS_COMPARED, ROWS_COMPARED = 4, 48


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--answers", type=Path, required=True)
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("--target", type=Path, default=data_files.kimi_nano_dir())
    parser.add_argument("--steps", type=int, default=1600)
    parser.add_argument(
        "--at", type=int, nargs="+", help="steps at which the heads are compared [--steps]"
    )
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--seq-len", type=int, default=96)
    parser.add_argument("--lr", type=float, default=4e-3)
    parser.add_argument("--prompts", type=int, default=24)
    parser.add_argument("--max-tokens", type=int, default=48)
    parser.add_argument("--lengths", type=int, nargs="+", default=[3])
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 1.0])
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    arguments.at = sorted(
        {step for step in arguments.at or () if step < arguments.steps} | {arguments.steps}
    )
    torch.set_num_threads(1)
    shop = Workshop.open(  # ModelOpt's masks know one length: whole samples
        arguments.target, arguments.answers, arguments.seq_len, whole=True
    )
    options = TrainOptions(
        attention="mha", eagle="3", steps=arguments.steps, batch_size=arguments.batch_size, lr=arguments.lr,
        seq_len=arguments.seq_len, seed=arguments.seed, precision="fp32",
    )  # fmt: skip
    for side in SIDES:
        trained(shop, side, options, arguments)
    tables(shop, options, arguments)


def trained(
    shop: Workshop, side: str, options: TrainOptions, arguments: argparse.Namespace
) -> None:
    """Trains one side, keeping its weights after the steps of `--at`."""
    directory = arguments.output / side
    if weights_path(directory, arguments.steps).is_file():
        return
    module = modules(shop, options)[side]()

    def keep(point: CurvePoint) -> None:
        if point.step in arguments.at:
            save_file(module.eagle_module.state_dict(), weights_path(directory, point.step))

    directory.mkdir(parents=True, exist_ok=True)
    shop.train(module, options, directory / "work", on_step=keep)


def weights_path(directory: Path, step: int) -> Path:
    return directory / f"step-{step}.safetensors"


def modules(shop: Workshop, options: TrainOptions) -> dict[str, Callable[[], train.TrainingModule]]:
    """The training module of each side, beginning with the same weights."""
    return {"ours": partial(shop.module, options), "stock": partial(stock_module, shop, options)}


def stock_module(shop: Workshop, options: TrainOptions) -> train.TrainingModule:
    """ModelOpt with its defaults."""
    import modelopt.torch.speculative as mtsp

    spec, target = shop.spec(options), shop.target
    stub = train.TargetStub(
        train._stub_config(spec, target.spec), target.embed.weight, target.lm_head.weight
    )
    architecture = train._eagle_architecture(spec, target.spec) | {"_attn_implementation": "sdpa"}
    given = {
        "eagle_offline": True,
        "eagle_ttt_steps": options.ttt_steps,
        "eagle_use_torch_compile": False,
    }
    model = mtsp.convert(stub, [("eagle", given | {"eagle_architecture_config": architecture})])
    model.eagle_module.load_state_dict(shop.module(options).eagle_module.state_dict())
    return model.train()


def heads(
    shop: Workshop, options: TrainOptions, directory: Path, step: int
) -> dict[str, tuple[Eagle3Head, Any]]:
    """What serves after `step` steps, and the training module of the same (bf16) weights, by name of the row."""
    ours, stock = (make() for make in modules(shop, options).values())
    for side, module in zip(SIDES, (ours, stock), strict=True):
        weights = load_file(weights_path(directory / side, step))
        module.eagle_module.load_state_dict({k: rounded(v) for k, v in weights.items()})
    where = {name: directory / f"heads-{step}" / name for name in ("ours", "export", "rope")}
    write_head(where["ours"], train.head_tensors(ours), shop.spec(options), shop.target.spec)
    export_stock(stock, where["export"])
    shutil.copytree(where["export"], where["rope"], dirs_exist_ok=True)
    write_json(where["rope"] / "config.json", head_config(shop.spec(options), shop.target.spec))
    load = partial(load_head, target=shop.target, dtype=torch.float32)
    twice = load(where["rope"])
    twice.hidden_norm = nn.Sequential(
        twice.input_layernorm, twice.hidden_norm
    )  # what stock trained
    return {
        "ours": (load(where["ours"]), ours),
        "stock, as trained": (twice, stock),
        "stock, own rope": (load(where["rope"]), stock),
        "stock export": (load(where["export"]), stock),
    }


def rounded(value: torch.Tensor) -> torch.Tensor:
    """A weight at the precision of an export."""
    return value.bfloat16().float() if value.is_floating_point() else value


def export_stock(stock: train.TrainingModule, directory: Path) -> None:
    from modelopt.torch.export import export_speculative_decoding

    stock.eagle_module.to(torch.bfloat16)
    export_speculative_decoding(stock, export_dir=directory)
    stock.eagle_module.to(torch.float32)


@torch.no_grad()
def compared(shop: Workshop, module: train.TrainingModule, head: Eagle3Head) -> dict[str, float]:
    """Largest distance of a logit, and the share of drafts whose best token differs, training module against engine."""
    module.eagle_ttt_steps = STEPS_COMPARED
    tokens = torch.tensor([sample.tokens[:ROWS_COMPARED] for sample in shop.features.samples[-8:]])
    output = shop.target(tokens, None, None, aux_layers=head.spec.aux_layers)
    wanted = record_logits(module, tokens, output.hidden, output.aux)
    worst, other, count = 0.0, 0, 0
    for context in range(4, ROWS_COMPARED - STEPS_COMPARED, 4):
        for step, logits in enumerate(
            drafted_logits(head, tokens, output.aux, context, STEPS_COMPARED)
        ):
            want = wanted[step][:, context - 1 + step]
            worst = max(worst, float((logits - want).abs().max()))
            other += int((logits.argmax(-1) != want.argmax(-1)).sum())
            count += len(want)
    return {"worst": worst, "other": other / count}


def tables(shop: Workshop, options: TrainOptions, arguments: argparse.Namespace) -> None:
    rows = held_out_messages(arguments.target / "prompts_heldout.jsonl", arguments.prompts)
    prompts = [shop.tokenizer.encode_chat(row["messages"])[1] for row in rows]
    columns = list(itertools.product(arguments.lengths, arguments.temperatures))
    titles = "  ".join(f"{f'length {length}, T={t:g}':>17}" for length, t in columns)
    for side in SIDES:
        print(
            f"{side}: agreement at the end {last_agreement(arguments.output / side / 'work' / 'training.jsonl')}"
        )
    print(
        f"\n{'steps':>6} {'head':18} {'gain spread':>11} {'logit apart':>11} {'other best':>10}  {titles}"
    )
    for step in arguments.at:
        found = kept(
            arguments.output / f"measured-{step}.json",
            partial(measured, shop, options, arguments, step, prompts),
        )
        for name, row in found.items():
            cells = "  ".join(
                f"{cell(row['acceptance'][f'{length}/{t:g}']):>17}" for length, t in columns
            )
            print(
                f"{step:6} {name:18} {row['spread']:11.3f} {row['worst']:11.2g} {row['other']:10.3f}  {cells}"
            )
    print(f"{arguments.prompts} held-out prompts, at most {arguments.max_tokens} new tokens")


def measured(
    shop: Workshop,
    options: TrainOptions,
    arguments: argparse.Namespace,
    step: int,
    prompts: list[list[int]],
) -> dict[str, Any]:
    found = {}
    for name, (head, module) in heads(shop, options, arguments.output, step).items():
        found[name] = compared(shop, module, head) | {
            "spread": float(head.input_layernorm.weight.std()),
            "acceptance": {
                f"{length}/{t:g}": shop.acceptance(head, prompts, length, t, arguments.max_tokens)
                for length, t in itertools.product(arguments.lengths, arguments.temperatures)
            },
        }
        print(
            step,
            name,
            json.dumps({k: v for k, v in found[name].items() if k != "acceptance"}),
            flush=True,
        )
    return found


if __name__ == "__main__":
    main()
