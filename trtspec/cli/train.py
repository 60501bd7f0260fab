"""`trtspec train`: an Eagle3 head from a target and its own answers, measured in the reference engine at the end."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from trtspec.cli.options import DryRunOption, ForceOption, JsonOption
from trtspec.errors import UsageError

if TYPE_CHECKING:
    from trtspec.heads.options import TrainOptions
    from trtspec.heads.plan import Plan
    from trtspec.models.kimi import KimiModel

ACCEPTANCE_PROMPTS = 48
ACCEPTANCE_TOKENS = 64


def train(
    target: Annotated[str, typer.Argument(help="The target: a checkpoint directory or hub id.")],
    data: Annotated[Path, typer.Argument(help="Conversations answered by the target (jsonl), or ModelOpt dumps.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="Directory of the new head.")],
    attention: Annotated[Literal["mha", "mla"] | None, typer.Option(help="Attention of the head [mla].")] = None,
    eagle: Annotated[Literal["3", "3.1"] | None, typer.Option(help="EAGLE version [3].")] = None,
    draft_vocab_size: Annotated[
        int | None, typer.Option(min=1, help="Draft from the most frequent tokens only.")
    ] = None,
    intermediate_size: Annotated[int | None, typer.Option(min=1, help="Width of the MLP [the target's].")] = None,
    aux_layers: Annotated[str | None, typer.Option(help="Captured layer outputs, 0-based [1,L//2-1,L-4].")] = None,
    ttt_steps: Annotated[int | None, typer.Option(min=1, help="Training-time-test steps [3].")] = None,
    features: Annotated[
        str, typer.Option(help="Where the target's states are kept: auto, memory or a directory.")
    ] = "auto",
    epochs: Annotated[int | None, typer.Option(min=1, help="Passes over the data [3].")] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Optimizer steps, in place of epochs.")] = None,
    lr: Annotated[float | None, typer.Option(help="Peak learning rate [by width: 2e-3 at 256, 7e-5 at 7168].")] = None,
    seq_len: Annotated[int | None, typer.Option(min=8, help="Longest sequence in tokens [2048].")] = None,
    batch_size: Annotated[int | None, typer.Option(min=1, help="Sequences per step [8].")] = None,
    seed: Annotated[int | None, typer.Option(help="Of the initial weights and the order of the data [0].")] = None,
    answer_only: Annotated[
        bool | None,
        typer.Option("--answer-only/--all-tokens", help="Count the loss on the target's own tokens only [all]."),
    ] = None,
    init: Annotated[Path | None, typer.Option(help="Start from this head's weights.")] = None,
    config: Annotated[Path | None, typer.Option(help="YAML file of these options; the command line wins.")] = None,
    save_every: Annotated[int, typer.Option(min=1, help="Steps between saved states.")] = 100,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    acceptance_prompts: Annotated[
        int, typer.Option(min=0, help="Held-out prompts of the final measurement; 0 leaves it out.")
    ] = ACCEPTANCE_PROMPTS,
    restart: Annotated[bool, typer.Option("--restart", help="Forget an interrupted run.")] = False,
    dry_run: DryRunOption = False,
    force: ForceOption = False,
    json_output: JsonOption = False,
) -> None:
    """Train an Eagle3 draft head with ModelOpt on answers that the target itself wrote.

    The target runs once over the data and its states are reused in every epoch. An interrupted run goes on when the
    same command is given again. At the end the head drafts freely on held-out prompts in the reference engine.
    """
    from trtspec.checkpoint.hub import resolve
    from trtspec.heads.options import read_options
    from trtspec.report import print_json

    overrides = {
        "attention": attention,
        "eagle": eagle,
        "draft_vocab_size": draft_vocab_size,
        "intermediate_size": intermediate_size,
        "aux_layers": _layers(aux_layers),
        "ttt_steps": ttt_steps,
        "epochs": epochs,
        "steps": steps,
        "lr": lr,
        "seq_len": seq_len,
        "batch_size": batch_size,
        "seed": seed,
        "answer_only": answer_only,
    }
    options = read_options(config, overrides)
    # OpenMP reads this when torch is loaded. Threads that spin long for each other stop the run where cores are shared.
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")
    if not dry_run:
        _prepare(output, restart, force)
    resolved = resolve(target)
    assert resolved.path is not None
    from trtspec.heads.plan import make_plan  # only now: importing torch takes seconds

    options = options.for_device(device)
    plan = make_plan(resolved.path, resolved.target_spec(), data, options, features)
    if dry_run:
        print_json(_forecast(plan, options))
        return
    where = {"data": data, "init": init, "save_every": save_every, "device": device}
    record = _run(resolved.path, plan, options, output, where, acceptance_prompts)
    if json_output:
        print_json({"output": str(output), **record})
    else:
        _show(output, record)


def _layers(text: str | None) -> tuple[int, ...] | None:
    if text is None:
        return None
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise UsageError(
            f"--aux-layers {text!r} is not a list of numbers", "for example --aux-layers 1,29,57"
        ) from None


def _forecast(plan: Plan, options: TrainOptions) -> dict[str, Any]:
    from trtspec.heads.plan import estimated_seconds

    return plan.to_dict() | {"estimated_seconds": round(estimated_seconds(plan, options), 1)}


def _prepare(output: Path, restart: bool, force: bool) -> None:
    """Refuses to write over a finished head; leaves an interrupted run of this output alone unless told otherwise."""
    import shutil

    from trtspec.heads.options import WORK_NAME
    from trtspec.report import refuse_overwrite

    running = (output / WORK_NAME).is_dir()
    if not running and output.is_dir() and [p for p in output.iterdir() if p.name != "training.jsonl"]:
        refuse_overwrite(output, force)
    if restart or (force and not running):
        shutil.rmtree(output / WORK_NAME, ignore_errors=True)


def _run(
    target_dir: Path, plan: Plan, options: TrainOptions, output: Path, where: dict[str, Any], acceptance_prompts: int
) -> dict[str, Any]:
    import torch

    from trtspec.heads.export import write_record
    from trtspec.heads.progress import progress_bar
    from trtspec.heads.run import run_training
    from trtspec.models.weights import load_target
    from trtspec.report import say

    say(
        f"Training an EAGLE-{plan.spec.eagle} {plan.spec.attention.upper()} head of {plan.parameters / 1e6:.1f} M "
        f"parameters on {plan.tokens:,} tokens, {plan.steps} steps"
    )
    dtype = torch.bfloat16 if options.precision == "bf16" else torch.float32
    model = load_target(target_dir, dtype=dtype, device=where["device"])
    with progress_bar("training", plan.steps, "steps") as advance:
        shown = 0

        def on_step(point: Any) -> None:
            nonlocal shown
            shares = " ".join(f"{value:.2f}" for value in point.accuracy)
            advance(
                point.step - shown, f"loss {point.loss:.2f}  agreement {shares}  {point.tokens_per_second:.0f} tok/s"
            )
            shown = point.step

        record = run_training(target_dir, model, plan, options, output, on_step=on_step, **where)
    if acceptance_prompts and record["held_out"]:
        record["acceptance"] = measure_acceptance(
            target_dir, model, output, plan, record["held_out"], acceptance_prompts
        )
        write_record(output, plan.spec, record)
    return record


def measure_acceptance(
    target_dir: Path,
    model: KimiModel,
    head_dir: Path,
    plan: Plan,
    held_out: list[str],
    prompts: int,
    *,
    draft_len: int = 3,
    max_tokens: int = ACCEPTANCE_TOKENS,
) -> dict[str, Any]:
    """Greedy generation with the head on held-out prompts: acceptance length by category, acceptance by position."""
    from trtspec.checkpoint.tokenizer import KimiTokenizer
    from trtspec.engine.engine import Engine, Request
    from trtspec.models.head_weights import load_head
    from trtspec.report import say

    wanted = set(held_out)
    chosen = [sample for sample in plan.samples if sample.id in wanted and sample.prompt > 0][:prompts]
    say(f"Measuring acceptance on {len(chosen)} held-out prompts")
    head = load_head(head_dir, model, dtype=model.dtype, device=str(model.embed.weight.device))
    longest = max((sample.prompt for sample in chosen), default=0) + max_tokens
    engine = Engine(
        model,
        head,
        drafter="eagle3",
        draft_len=draft_len,
        max_batch_size=8,
        max_seq_len=longest + draft_len,
        tokenizer=KimiTokenizer(target_dir),
    )
    requests = [Request(sample.id, list(sample.tokens[: sample.prompt]), max_tokens) for sample in chosen]
    done = engine.generate(requests)
    categories = sorted({sample.category for sample in chosen if sample.category})
    groups = [("all", chosen)] + [(name, [s for s in chosen if s.category == name]) for name in categories]
    rows = [_acceptance_row(name, [done[s.id].stats for s in samples], draft_len) for name, samples in groups]
    return {
        "draft_len": draft_len,
        "temperature": 0.0,
        "max_tokens": max_tokens,
        "dtype": str(model.dtype).removeprefix("torch."),
        "prompts": len(chosen),
        "rows": rows,
    }


def _acceptance_row(name: str, stats: list[Any], draft_len: int) -> dict[str, Any]:
    """Pooled over prompts. `by_position[i]`: share of the steps whose draft i+1 was accepted."""
    steps = sum(one.steps for one in stats)
    accepted = sum(one.accepted for one in stats)
    histogram = [sum(one.histogram[count] for one in stats) for count in range(draft_len + 1)]
    share = [sum(histogram[position + 1 :]) / max(steps, 1) for position in range(draft_len)]
    return {
        "category": name,
        "prompts": len(stats),
        "steps": steps,
        "accepted": accepted,
        "histogram": histogram,
        "acceptance_length": 1 + accepted / max(steps, 1),
        "by_position": share,
    }


def _show(output: Path, record: dict[str, Any]) -> None:
    training = record["training"]
    shares = ", ".join(f"{value:.3f}" for value in training.get("held_out_accuracy", training["accuracy"]))
    print(f"head        {output}")
    print(f"parameters  {record['parameters']:,}")
    print(f"trained     {training['steps']} steps, {training['tokens_seen']:,} tokens, {training['seconds']:.0f} s")
    print(f"agreement   {shares} per training-time-test step")
    for row in record.get("acceptance", {}).get("rows", []):
        positions = ", ".join(f"{share:.2f}" for share in row["by_position"])
        where = f"{row['category']}, {row['prompts']} prompts; by draft {positions}"
        print(f"acceptance  {row['acceptance_length']:.3f} ({where})")
