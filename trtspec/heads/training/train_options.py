"""The options of a training run, and the shape of the head that they give on a target.

Two runs with equal options and data have the same loss curve. An MLA head has the shape of the
published Kimi heads: the target's ranks and heads, one dense layer, the target's rope. An MHA head
is a Llama layer with plain rope, which every server loads.
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
# Key-value heads of a new MHA head. Eight heads can be split over 8 GPUs, and need an eighth of the
# KV cache of 64 heads.
MAX_KV_HEADS = 8


@dataclass(frozen=True)
class TrainOptions:
    """Options that decide the loss curve. A None value is derived from the target or the run."""

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
        """Torch dtype of the target's frozen weights and of the matrix products.

        `precision` must not be `auto`.
        """
        import torch

        dtype: torch.dtype = getattr(torch, DTYPES[self.precision])
        return dtype

    def for_device(self, device: str) -> TrainOptions:
        """Returns the options with `auto` precision replaced by the best precision of `device`.

        The record of a run names the precision, so that a resumed run on another device keeps it.
        """
        from trtspec.models.precision import has_native_bf16

        if self.precision != "auto":
            return self
        return replace(self, precision="bf16" if has_native_bf16(device) else "fp32")


@dataclass(frozen=True)
class FeatureSource:
    """The source of the target's hidden states.

    way     source
    memory  The whole target computes the states in memory before the head trains.
    stream  The target runs one decoder layer at a time over chunks of samples. The chunks are
            kept in `directory`, or in the output if `directory` is None.
    dumps   An engine has written the states to `directory`.
    server  Live engines at `urls` send the states while the head trains.

    Args:
        text: value of the option `features`.
    """

    text: str
    way: Literal["memory", "stream", "dumps", "server"]
    directory: Path | None = None
    urls: tuple[str, ...] = ()

    @property
    def with_layers(self) -> bool:
        """Whether the target's decoder layers are loaded if they fit into memory.

        Acceptance can be measured after training only if the layers are loaded.
        """
        return self.way in ("memory", "dumps")


def feature_source(text: str) -> FeatureSource:
    """Parses the option `features`.

    `text` is auto, memory, stream, stream:DIR, a directory of dumps, or URLs separated by commas.
    Raises UsageError if a URL is invalid.
    """
    if text in ("auto", "memory"):
        return FeatureSource(text, "memory")
    if text.startswith(("http://", "https://")):
        urls = tuple(server_url(url.strip(), "`features`") for url in text.split(","))
        return FeatureSource(text, "server", urls=urls)
    way, _, directory = text.partition(":")
    if way == "stream":
        return FeatureSource(text, "stream", Path(directory) if directory else None)
    return FeatureSource(text, "dumps", Path(text))


@dataclass(frozen=True)
class TrainingRun:
    """Paths and settings of a run that do not change the loss curve, and the initial head.

    Args:
        data: name of the data in the provenance record.
        init: directory of the head to start from. None: a fresh head.
        save_every: number of optimizer steps between saved states.
        deadline: value of time.monotonic() at which the run must end. None: no time limit.
    """

    target_dir: Path
    data: str
    output: Path
    init: Path | None = None
    save_every: int = 100
    deadline: float | None = None
    device: str = "cpu"
    output_options: OutputOptions = OutputOptions()

    @property
    def work(self) -> Path:
        """Directory of the run's saved state."""
        return self.output / WORK_NAME

    @property
    def curve(self) -> Path:
        """File of the learning curve."""
        return self.output / CURVE_NAME


@dataclass(frozen=True)
class TrainingRecipe:
    """Keys of a config file that are not options of the command.

    The keys describe the data, so that --dry-run can plan a run before the data exist.

    Args:
        samples: number of samples.
        mean_tokens: mean number of tokens per sample.
    """

    samples: int | None = None
    mean_tokens: int | None = None


def new_head_spec(target: ModelSpec, options: TrainOptions) -> HeadSpec:
    """Returns the specification of a new one-layer head, as wide as the target.

    Raises UsageError if the capture layers or the draft vocabulary do not fit the target.
    """
    layers = options.aux_layers or target.default_aux_layers
    _check_layers(layers, target)
    vocab_size = target.vocab_size
    draft_vocab_size = options.draft_vocab_size or vocab_size
    if not 0 < draft_vocab_size <= vocab_size:
        message = f"a draft vocabulary of {draft_vocab_size} does not fit the target's {vocab_size}"
        raise UsageError(message, f"pass `draft_vocab_size` between 1 and {vocab_size}")
    heads = target.num_attention_heads
    rope = RopeSpec(theta=target.rope.theta)
    if options.attention == "mla":
        # TensorRT-LLM computes YaRN for every MLA draft. Factor 1 is plain rope.
        rope = replace(rope, rope_type="yarn", factor=1.0)
        if target.rope.is_yarn:
            rope = target.rope
        kv_heads = heads
        head_dim = target.qk_head_dim
        latent = {name: getattr(target, name) for name in LATENT}
    else:
        kv_heads = min(MAX_KV_HEADS, heads)
        head_dim = target.v_head_dim
        latent = {}
    is_eagle31 = options.eagle == "3.1"
    return HeadSpec(
        attention=options.attention,
        dialect=DEFAULT.name,
        hidden_size=target.hidden_size,
        target_hidden_size=target.hidden_size,
        intermediate_size=options.intermediate_size or target.intermediate_size,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        vocab_size=vocab_size,
        draft_vocab_size=draft_vocab_size,
        rms_norm_eps=target.rms_norm_eps,
        rope=rope,
        num_aux=len(layers),
        aux_layers=tuple(layers),
        **latent,
        max_position_embeddings=target.max_position_embeddings,
        fc_norm=is_eagle31,
        norm_output=is_eagle31,
        has_d2t=draft_vocab_size != vocab_size,
    )


def _check_layers(layers: tuple[int, ...], target: ModelSpec) -> None:
    """Raises UsageError if the capture layers are not ascending layers of the target."""
    layer_count = target.num_hidden_layers
    unknown = [layer for layer in layers if not 0 <= layer < layer_count]
    if unknown or list(layers) != sorted(set(layers)):
        message = (
            f"capture layers {list(layers)} are not ascending layer outputs of a target with "
            f"{layer_count} layers"
        )
        remedy = f"use 0-based outputs, for example {list(target.default_aux_layers)}"
        raise UsageError(message, remedy)
