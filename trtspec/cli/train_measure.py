"""The measurement that ends `trtspec train`: the new head drafts freely on prompts that training never saw."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trtspec.heads.training.plan import TrainingPlan
    from trtspec.models.kimi import KimiModel

ACCEPTANCE_TOKENS = 64


def measure_acceptance(
    target_dir: Path,
    model: KimiModel,
    head_dir: Path,
    plan: TrainingPlan,
    held_out: list[str],
    prompts: int,
    *,
    draft_len: int = 3,
    max_tokens: int = ACCEPTANCE_TOKENS,
) -> dict[str, Any]:
    """Greedy generation with the head on held-out prompts: acceptance length by category, acceptance by position."""
    from trtspec.checkpoint.tokenizer import KimiTokenizer
    from trtspec.engine.engine import Engine, EngineOptions, GenerationRequest
    from trtspec.models.head_weights import load_head
    from trtspec.models.precision import dtype_name
    from trtspec.report import say

    wanted = set(held_out)
    chosen = [sample for sample in plan.samples if sample.id in wanted and sample.prompt > 0][:prompts]
    say(f"Measuring acceptance on {len(chosen)} held-out prompts")
    head = load_head(head_dir, model, dtype=model.dtype, device=str(model.embed.weight.device))
    longest = max((sample.prompt for sample in chosen), default=0) + max_tokens
    engine = Engine(
        model,
        head,
        EngineOptions(draft_len=draft_len, max_batch_size=8, max_seq_len=longest + draft_len),
        tokenizer=KimiTokenizer(target_dir),
    )
    requests = [GenerationRequest(sample.id, list(sample.tokens[: sample.prompt]), max_tokens) for sample in chosen]
    done = engine.generate(requests)
    categories = sorted({sample.category for sample in chosen if sample.category})
    groups = [("all", chosen)] + [(name, [s for s in chosen if s.category == name]) for name in categories]
    rows = [_acceptance_row(name, [done[s.id].stats for s in samples], draft_len) for name, samples in groups]
    return {
        "draft_len": draft_len,
        "temperature": 0.0,
        "max_tokens": max_tokens,
        "dtype": dtype_name(model.dtype),
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
