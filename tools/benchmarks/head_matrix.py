"""Every kind of head, trained alike: is the export the trained function, what is accepted, what does EAGLE-3.1 buy?

    python -m tools.benchmarks.head_matrix --answers answers.jsonl -o DIR [--only mha-3-full mla-3.1-pruned]

{MHA, MLA} x {EAGLE-3, EAGLE-3.1} x {full, pruned vocabulary} on kimi-nano's own answers (made by `trtspec synthesize`),
equal data, steps, rate and seed, float32, one thread. First table: largest difference of any draft logit between the
training module and the exported head in the reference engine's definition, both with the bf16 weights of the export;
then acceptance lengths at draft length 3 and 7, free running on held-out prompts. Second table: EAGLE-3.1 against
EAGLE-3 at draft length 7 on contexts four times as long as the longest trained on, behind a system prompt and under
another template. Brackets hold 95 % intervals over prompts, for one training run each: a second seed moves the figures.

Every training (resumable) and every measurement is kept in DIR and not made again; `--only` makes those heads and the
tables show all that are there. The options belong to DIR: other options need another directory.
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from tests.heads.training.test_exported_equals_trained import (
    ROWS,
    TTT,
    drafted_logits,
    record_logits,
)
from tools.benchmarks.small_heads import Workshop, held_out_messages, kept, last_agreement
from trtspec import data_files
from trtspec.heads.training import module as train
from trtspec.heads.training.options import TrainOptions
from trtspec.heads.training.run import write_head
from trtspec.models.eagle3 import Eagle3Head
from trtspec.models.head_weights import load_head

SYSTEM = "You are a terse reviewer of Python code. Answer in the voice of a release note and never apologise."
PLAIN = "### Instruction:\n{question}\n\n### Response:\n"
LONGER = 4


def main() -> None:
    arguments = parsed()
    torch.set_num_threads(1)
    settings = {
        k: v for k, v in vars(arguments).items() if k not in ("only", "output", "answers", "target")
    }
    found = kept(arguments.output / "settings.json", lambda: settings)
    if found != json.loads(json.dumps(settings)):
        raise SystemExit(
            f"{arguments.output} was made with {found}: pass those, or another directory"
        )
    shop = Workshop.open(arguments.target, arguments.answers, arguments.seq_len)
    contexts = prompt_sets(shop, arguments)
    rows = []
    for kind in kinds(arguments.draft_vocab_size):
        directory = arguments.output / name_of(*kind)
        if directory.name in arguments.only or (directory / "done.json").is_file():
            rows.append(one_kind(shop, contexts, arguments, directory, *kind))
    print_matrix(rows, arguments)
    print_robustness(rows, contexts, arguments)
    seconds = sum(
        row["cpu_seconds"] + sum(one["cpu_seconds"] for one in row["acceptance"].values())
        for row in rows
    )
    print(
        f"{len(shop.features.samples)} answers; {len(rows)} heads took {seconds:.0f} s of processor time"
    )


def parsed() -> argparse.Namespace:
    every = [name_of(*kind) for kind in kinds(1)]
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--answers", type=Path, required=True)
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument(
        "--only", nargs="+", choices=every, default=every, metavar="HEAD", help=" ".join(every)
    )
    parser.add_argument("--target", type=Path, default=data_files.kimi_nano_dir())
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--seq-len", type=int, default=256)
    parser.add_argument("--ttt-steps", type=int, default=3)
    parser.add_argument("--lr", type=float, default=4e-3)
    parser.add_argument("--draft-vocab-size", type=int, default=512)
    parser.add_argument("--prompts", type=int, default=24)
    parser.add_argument("--max-tokens", type=int, default=48)
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 1.0])
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def name_of(attention: str, eagle: str, draft_vocab: int | None) -> str:
    return f"{attention}-{eagle}-{'pruned' if draft_vocab else 'full'}"


def kinds(pruned: int) -> list[tuple[str, str, int | None]]:
    return list(itertools.product(("mha", "mla"), ("3", "3.1"), (None, pruned)))


def prompt_sets(shop: Workshop, arguments: argparse.Namespace) -> dict[str, list[list[int]]]:
    """Token ids of the held-out prompts in each kind of context."""
    longest = max(len(sample.tokens) for sample in shop.features.samples)
    rows = held_out_messages(arguments.target / "prompts_heldout.jsonl", arguments.prompts)

    def chat(messages: list[dict[str, Any]]) -> list[int]:
        return shop.tokenizer.encode_chat(messages)[1]

    plain = [PLAIN.format(question=row["messages"][-1]["content"]) for row in rows]
    return {
        "as trained": [chat(row["messages"]) for row in rows],
        f"{LONGER}x longer": [
            long_context(shop, rows, i, LONGER * longest) for i in range(len(rows))
        ],
        "system prompt": [
            chat([{"role": "system", "content": SYSTEM}, *row["messages"]]) for row in rows
        ],
        "plain template": [shop.tokenizer.encode(text) for text in plain],
    }


def long_context(shop: Workshop, rows: list[dict[str, Any]], index: int, length: int) -> list[int]:
    """The question after as many earlier turns (other questions, the library's own answers) as fill `length` tokens."""
    messages = list(rows[index]["messages"])
    ids: list[int] = []
    for distance in range(1, len(rows)):
        other = rows[(index + distance) % len(rows)]
        messages = [
            *other["messages"],
            {"role": "assistant", "content": other["reference"]},
            *messages,
        ]
        ids = shop.tokenizer.encode_chat(messages)[1]
        if len(ids) >= length:
            break
    return ids


def one_kind(
    shop: Workshop, contexts: dict[str, list[list[int]]], arguments: argparse.Namespace, directory: Path,
    attention: Any, eagle: Any, draft_vocab: int | None,
) -> dict[str, Any]:  # fmt: skip
    """One head's row, from what `directory` holds and what is made now."""
    options = TrainOptions(
        attention=attention, eagle=eagle, draft_vocab_size=draft_vocab, epochs=arguments.epochs,
        batch_size=arguments.batch_size, seq_len=arguments.seq_len, ttt_steps=arguments.ttt_steps, lr=arguments.lr,
        seed=arguments.seed, precision="fp32",
    )  # fmt: skip
    row = kept(directory / "trained.json", lambda: trained(shop, options, directory)) | {
        "acceptance": {}
    }
    head = load_head(directory / "head", shop.target, dtype=torch.float32)
    names = list(contexts) if draft_vocab is None else ["as trained"]
    for name, draft_len, temperature in itertools.product(names, (3, 7), arguments.temperatures):
        if draft_len == 7 or name == "as trained":
            key = f"{name}/{draft_len}/{temperature:g}"
            measured = partial(
                timed,
                shop.acceptance,
                head,
                contexts[name],
                draft_len,
                temperature,
                arguments.max_tokens,
            )
            row["acceptance"][key] = kept(
                directory / f"{key.replace('/', '_').replace(' ', '-')}.json", measured
            )
            print(f"{directory.name}: {key} {cell(row['acceptance'][key])}", flush=True)
    return kept(directory / "done.json", lambda: row)


def timed(measure: Callable[..., dict[str, Any]], *arguments: Any) -> dict[str, Any]:
    began = time.process_time()
    return measure(*arguments) | {"cpu_seconds": time.process_time() - began}


def trained(shop: Workshop, options: TrainOptions, directory: Path) -> dict[str, Any]:
    """Trains or resumes; writes the head; compares it with its training module."""
    module = shop.module(options)
    began = time.process_time()
    result = shop.train(module, options, directory / "work")
    seconds = time.process_time() - began
    write_head(directory / "head", train.head_tensors(module), shop.spec(options), shop.target.spec)
    head = load_head(directory / "head", shop.target, dtype=torch.float32)
    return {
        "attention": options.attention,
        "eagle": options.eagle,
        "draft_vocab": shop.spec(options).draft_vocab_size,
        "pruned": options.draft_vocab_size is not None,
        "difference": difference(shop, module, head),
        "agreement": last_agreement(directory / "work" / "training.jsonl"),
        "steps": result.steps,
        "tokens": result.tokens,
        "cpu_seconds": seconds,  # of this process: less than the whole after a kill
    }


@torch.no_grad()
def difference(shop: Workshop, module: train.TrainingModule, head: Eagle3Head) -> float:
    """Largest |training module - exported head| over the draft logits of four steps, on held-out answers."""
    for value in module.eagle_module.parameters():
        value.copy_(value.to(torch.bfloat16))
    module.eagle_ttt_steps = TTT
    samples = [sample.tokens for sample in shop.features.samples if len(sample.tokens) >= ROWS][-2:]
    tokens = torch.tensor([ids[-ROWS:] for ids in samples])
    output = shop.target(tokens, None, None, aux_layers=head.spec.aux_layers)
    trained = record_logits(module, tokens, output.hidden, output.aux)
    worst = 0.0
    for context in (1, 7, ROWS - len(trained) - 1):
        for step, logits in enumerate(
            drafted_logits(head, tokens, output.aux, context, len(trained))
        ):
            worst = max(worst, float((logits - trained[step][:, context - 1 + step]).abs().max()))
    return worst


def print_matrix(rows: list[dict[str, Any]], arguments: argparse.Namespace) -> None:
    columns = list(itertools.product((3, 7), arguments.temperatures))
    titles = [f"length {length}, T={temperature:g}" for length, temperature in columns]
    print(
        f"\n{'head':28} {'max diff':>9} {'agreement by step':>20}  "
        + "  ".join(f"{title:>20}" for title in titles)
    )
    for row in rows:
        cells = [cell(row["acceptance"][f"as trained/{length}/{t:g}"]) for length, t in columns]
        name = f"{row['attention'].upper()} EAGLE-{row['eagle']}, {row['draft_vocab']} tokens"
        shares = " ".join(f"{value:.3f}" for value in row["agreement"][:3])
        print(
            f"{name:28} {row['difference']:9.1e} {shares:>20}  "
            + "  ".join(f"{text:>20}" for text in cells)
        )
    print(
        f"acceptance length, {arguments.prompts} held-out prompts, at most {arguments.max_tokens} new tokens"
    )


def print_robustness(
    rows: list[dict[str, Any]], contexts: dict[str, list[list[int]]], arguments: argparse.Namespace
) -> None:
    print("\nEAGLE-3.1 against EAGLE-3, draft length 7, full vocabulary")
    full = {(row["attention"], row["eagle"]): row for row in rows if not row["pruned"]}
    both = [kind for kind in ("mha", "mla") if (kind, "3") in full and (kind, "3.1") in full]
    for attention, name, temperature in itertools.product(both, contexts, arguments.temperatures):
        key = f"{name}/7/{temperature:g}"
        old, new = (full[attention, eagle]["acceptance"][key] for eagle in ("3", "3.1"))
        lengths = sorted(map(len, contexts[name]))
        print(
            f"{attention.upper()}  {name:15} T={temperature:g}  {cell(old)} -> {cell(new)}  "
            f"drafts accepted x{(new['length'] - 1) / max(old['length'] - 1, 1e-9):.2f}, "
            f"length x{new['length'] / old['length']:.2f}; median prompt {lengths[len(lengths) // 2]} tokens, "
            f"distinct 4-grams {'-' if old['distinct'] is None else round(old['distinct'], 2)}"
        )


def cell(found: dict[str, Any]) -> str:
    low, high = found["interval"] or (0, 0)
    return f"{found['length']:.2f} [{low:.2f} {high:.2f}]"


if __name__ == "__main__":
    main()
