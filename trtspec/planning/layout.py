"""How a model is spread over GPUs: tensor, expert and attention-data parallelism."""

from __future__ import annotations

from dataclasses import dataclass

from trtspec.errors import UsageError
from trtspec.specs import ModelSpec

KV_FRACTION = 0.9  # of what is free: the engine's default
ATTENTION_DP_KV_FRACTION = 0.75  # what build-config writes: attention DP and the exchange of tokens need room


@dataclass(frozen=True)
class Layout:
    """`gpus` ranks share the experts (tensor parallel, or whole experts with `ep`). Attention is split over its heads,
    or, with `attention_dp`, copied to every rank, which then serves its own requests."""

    gpus: int
    ep: bool = False
    attention_dp: bool = False

    @property
    def attention_tp(self) -> int:
        """Ranks that share one attention layer."""
        return 1 if self.attention_dp else self.gpus

    @property
    def moe(self) -> str:
        """Name of the MoE layout in the kernel tables."""
        return f"{'ep' if self.ep else 'tp'}{self.gpus}"

    @property
    def name(self) -> str:
        attention = "attention DP" if self.attention_dp else "tensor parallel"
        return f"{attention} {self.gpus}, experts {'whole' if self.ep else 'split'}"

    @property
    def short(self) -> str:
        """TP4: attention and experts split; TEP4: experts whole; DEP4: attention DP, experts whole."""
        attention = "D" if self.attention_dp else "T"
        return f"{attention}{'E' if self.ep else ''}P{self.gpus}"

    def sequences_per_rank(self, sequences: int) -> int:
        return -(-sequences // self.gpus) if self.attention_dp else sequences


def layout_of(model: ModelSpec, gpus: int, tp: int | None, ep: int | None, attention_dp: bool) -> Layout:
    """Raises UsageError where the model or the engine cannot be spread like that."""
    tp = tp or gpus
    if tp > gpus:
        raise UsageError(f"--tp {tp} is more than the {gpus} GPUs", "raise --gpus, or lower --tp")
    if gpus % tp:
        raise UsageError(f"{gpus} GPUs do not divide into servers of {tp}", f"use --gpus {tp * (gpus // tp)}")
    if model.num_attention_heads % tp and not attention_dp:
        message = f"{model.num_attention_heads} attention heads do not divide by {tp}"
        raise UsageError(message, "use a power of two, or --attention-dp")
    if ep not in (None, 1, tp):
        raise UsageError(
            f"experts over {ep} of {tp} ranks: only whole experts (--ep {tp}) and split ones (--ep 1) were measured",
            f"use --ep {tp} or --ep 1",
        )
    return Layout(tp, ep == tp and tp > 1, attention_dp)
