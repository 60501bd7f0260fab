"""What a training run depends on: its options, and the shape of the head they ask for on a given target.

Two runs with equal options and data have the same loss curve. An MLA head has the shape of the published Kimi heads:
the target's ranks and heads, one dense layer, the target's rope. An MHA head is a Llama layer with plain rope, which
every server loads.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from trtspec.checkpoint.heads.config import LATENT
from trtspec.checkpoint.heads.dialects import DEFAULT
from trtspec.client.addresses import server_url
from trtspec.errors import UsageError
from trtspec.heads.training.curve import CURVE_NAME, WORK_NAME
from trtspec.records import Excludes, option
from trtspec.report import OutputOptions
from trtspec.specs import Attention, HeadSpec, ModelSpec, RopeSpec

if TYPE_CHECKING:
    import torch

Schedule = Literal["cosine", "constant"]
EagleVersion = Literal["3", "3.1"]
Precision = Literal["auto", "bf16", "fp32"]
DTYPES = {"bf16": "bfloat16", "fp32": "float32"}  # torch's name of each `precision`
MAX_KV_HEADS = 8  # of a new MHA head: splits over 8 GPUs, an eighth of the KV cache of 64 heads


@dataclass(frozen=True)
class TrainOptions:
    """What decides the loss curve, as the command declares it. None: derived from the target or from the run."""

    attention: Annotated[Attention, option("Attention of the head.", group="Head")] = "mla"
    eagle: Annotated[EagleVersion, option("EAGLE version.", group="Head")] = "3"
    draft_vocab_size: Annotated[
        int | None,
        option(
            "Draft only from this many most frequent tokens.",
            default="the whole vocabulary",
            min=1,
            group="Head",
        ),
    ] = None
    intermediate_size: Annotated[
        int | None, option("MLP width of the head.", default="the target's", min=1, group="Head")
    ] = None
    aux_layers: tuple[int, ...] | None = None
    ttt_steps: Annotated[
        int, option("Training-time-test steps.", min=1, max=16, group="Training")
    ] = 3
    ttt_decay: Annotated[
        float,
        option(
            "Weight of each of these steps in the loss, relative to the step before.",
            min=0.01,
            max=1,
            group="Training",
        ),
    ] = 0.9
    answer_only: Annotated[
        bool,
        option(
            "Compute the loss on the target's own tokens only, or on all tokens.",
            "--answer-only/--all-tokens",
            group="Training",
        ),
    ] = False
    epochs: Annotated[
        int,
        option(
            "Passes over the data; more than a finished run had extend it.", min=1, group="Training"
        ),
        Excludes("steps"),
    ] = 3
    steps: Annotated[
        int | None, option("Optimizer steps; replaces --epochs.", min=1, group="Training")
    ] = None
    batch_size: Annotated[
        int, option("Sequences per batch, across all processes.", min=1, group="Training")
    ] = 8
    accumulation: Annotated[int, option("Batches per optimizer step.", min=1, group="Training")] = 1
    seq_len: Annotated[
        int, option("Maximum sequence length in tokens.", min=18, group="Training")
    ] = 2048
    lr: Annotated[
        float | None,
        option(
            "Peak learning rate.",
            default="by hidden size: 2e-3 at 256, 7e-5 at 7168",
            min=1e-8,
            max=1,
            group="Training",
        ),
    ] = None
    schedule: Annotated[
        Schedule, option("Learning-rate schedule after the warm-up.", group="Training")
    ] = "cosine"
    warmup: Annotated[
        float,
        option(
            "Warm-up: a share of all steps, or from 1 on a number of steps.",
            min=0,
            group="Training",
        ),
    ] = 0.05
    weight_decay: Annotated[float, option("AdamW's weight decay.", min=0, group="Training")] = 0.0
    grad_clip: Annotated[
        float, option("Largest norm of the gradient.", min=1e-6, group="Training")
    ] = 1.0
    precision: Annotated[
        Precision,
        option(
            "Precision of matrix products; auto: bf16 where the device supports it natively.",
            group="Training",
        ),
    ] = "auto"
    seed: Annotated[
        int, option("Random seed for weight initialisation and data order.", group="Training")
    ] = 0
    held_out: Annotated[
        float,
        option(
            "Share of the conversations that is held out for evaluations.",
            min=0,
            max=0.99,
            group="Data",
        ),
    ] = 0.05
    eval_every: Annotated[
        int | None,
        option("Steps between evaluations.", default="a tenth of the run", min=1, group="Data"),
    ] = None

    @property
    def dtype(self) -> torch.dtype:
        """What the target's frozen ends are kept in and the step computes in; `precision` must not be `auto`."""
        import torch

        return getattr(torch, DTYPES[self.precision])

    def for_device(self, device: str) -> TrainOptions:
        """The same options with `auto` precision settled for this device, so that records and resumes name it."""
        from trtspec.models.precision import has_native_bf16

        if self.precision != "auto":
            return self
        return replace(self, precision="bf16" if has_native_bf16(device) else "fp32")


@dataclass(frozen=True)
class FeatureSource:
    """Where the target's states come from; `text` is what the option `features` says.

    memory    The target computes them beside the head.
    stream    It runs one decoder layer at a time over chunks of samples, kept in `directory` where one is named.
    dumps     An engine wrote them to `directory`.
    server    Live engines at `urls` send them while the head trains.
    """

    text: str
    way: Literal["memory", "stream", "dumps", "server"]
    directory: Path | None = None
    urls: tuple[str, ...] = ()

    @property
    def with_layers(self) -> bool:
        """Whether the target's layers are loaded where they fit, so that acceptance can be measured at the end."""
        return self.way in ("memory", "dumps")


def feature_source(text: str) -> FeatureSource:
    """What `features` names: auto, memory, a directory, `stream`, `stream:DIR`, or URLs with commas between.

    Raises UsageError for an invalid URL."""
    if text in ("auto", "memory"):
        return FeatureSource(text, "memory")
    if text.startswith(("http://", "https://")):
        return FeatureSource(
            text,
            "server",
            urls=tuple(server_url(url.strip(), "`features`") for url in text.split(",")),
        )
    way, _, place = text.partition(":")
    if way == "stream":
        return FeatureSource(text, "stream", Path(place) if place else None)
    return FeatureSource(text, "dumps", Path(text))


@dataclass(frozen=True)
class TrainingRun:
    """What is trained on what, where it goes and how: all that the loss curve does not depend on, and the head to start
    from. `data` is what the record calls it; `deadline` of time.monotonic()."""

    target_dir: Path
    data: str
    output: Path
    init: Path | None = None
    save_every: int = 100  # steps between saved states
    deadline: float | None = None
    device: str = "cpu"
    again: OutputOptions = OutputOptions()

    @property
    def work(self) -> Path:
        """The state of the run."""
        return self.output / WORK_NAME

    @property
    def curve(self) -> Path:
        return self.output / CURVE_NAME


@dataclass(frozen=True)
class TrainingRecipe:
    """What a config file may say beside the command's options: `samples` and `mean_tokens` (per sample) describe data
    that are not made yet, for --dry-run."""

    samples: int | None = None
    mean_tokens: int | None = None


def new_head_spec(target: ModelSpec, options: TrainOptions) -> HeadSpec:
    """Returns the record of a one-layer head of the target's width; UsageError when a size does not fit the target."""
    layers = options.aux_layers or target.default_aux_layers
    bad = [layer for layer in layers if not 0 <= layer < target.num_hidden_layers]
    if bad or list(layers) != sorted(set(layers)):
        raise UsageError(
            f"capture layers {list(layers)} are not ascending layer outputs of a target with "
            f"{target.num_hidden_layers} layers",
            f"use 0-based outputs, for example {list(target.default_aux_layers)}",
        )
    draft = options.draft_vocab_size or target.vocab_size
    if not 0 < draft <= target.vocab_size:
        raise UsageError(
            f"a draft vocabulary of {draft} does not fit the target's {target.vocab_size}",
            f"pass `draft_vocab_size` between 1 and {target.vocab_size}",
        )
    mla = options.attention == "mla"
    rope = RopeSpec(theta=target.rope.theta)
    if mla:  # TensorRT-LLM computes YaRN for every MLA draft; factor 1 is plain rope
        rope = target.rope if target.rope.is_yarn else replace(rope, rope_type="yarn", factor=1.0)
    return HeadSpec(
        attention=options.attention,
        dialect=DEFAULT.name,
        hidden_size=target.hidden_size,
        target_hidden_size=target.hidden_size,
        intermediate_size=options.intermediate_size or target.intermediate_size,
        num_attention_heads=target.num_attention_heads,
        num_key_value_heads=target.num_attention_heads
        if mla
        else min(MAX_KV_HEADS, target.num_attention_heads),
        head_dim=target.qk_head_dim if mla else target.v_head_dim,
        vocab_size=target.vocab_size,
        draft_vocab_size=draft,
        rms_norm_eps=target.rms_norm_eps,
        rope=rope,
        num_aux=len(layers),
        aux_layers=tuple(layers),
        **{name: getattr(target, name) for name in LATENT if mla},
        max_position_embeddings=target.max_position_embeddings,
        fc_norm=options.eagle == "3.1",
        norm_output=options.eagle == "3.1",
        has_d2t=draft != target.vocab_size,
    )
