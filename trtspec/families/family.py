"""What tells one family of Kimi models from another: the type of its record, and of the tensors and sizes in it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import groupby
from typing import Literal, NamedTuple

Role = Literal["experts", "attention, by heads", "attention, latent", "shared experts", "dense layers", "embedding",
               "lm_head", "router", "router bias", "norms"]  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class LatentSizes:
    """Of a model with latent attention, by their names in a K2's config.json."""

    hidden_size: int
    num_attention_heads: int
    q_lora_rank: int = 0
    kv_lora_rank: int = 0
    qk_nope_head_dim: int = 0
    qk_rope_head_dim: int = 0
    v_head_dim: int = 0


@dataclass(frozen=True, kw_only=True)
class Sizes(LatentSizes):
    """Of a text model."""

    num_hidden_layers: int
    intermediate_size: int
    moe_intermediate_size: int
    n_routed_experts: int
    n_shared_experts: int
    first_k_dense_replace: int
    vocab_size: int


class Part(NamedTuple):
    """One tensor, or `copies` of it: `{}` in its name, which is that of the hub, is the number of an expert. A
    matrix may be stored packed, in several tensors below its module.

    `parameter` is the one of our own model that it becomes rows of: the parts of one read the same input.
    """

    name: str
    shape: tuple[int, ...]
    role: Role
    parameter: str
    copies: int = 1


@dataclass(frozen=True, kw_only=True, eq=False)
class Family:
    """One record. `name` is what engines call it, `model_types` are those of config.json's top level and `text_types`
    those of its text_config (none: the config is flat). `classes` are the architectures that engines load.

    `optional_keys` and `required_keys` decide what is computed and show in no tensor: they must have a value that the
    family publishes. An absent required key is a problem, because readers of a config fill in different values.
    `renamed` has the key of each size that config.json does not call as `ModelSpec` does.

    `prefix` precedes the names of all text tensors. `ends` and `layer`, by its index, give their parts. `fused` joins
    the names of linears that read the same input: engines compute them as one, so they share their scales.
    `vision_parameters` are those of the tower and its projector. `mixed`: checkpoints may have several formats.

    `reasoning_parsers` are by engine, and `thinks` says whether every model reasons. `version` names a release from
    its sizes, the ids that end an answer and whether weights are packed.
    """

    name: str
    model_types: tuple[str, ...]
    text_types: tuple[str, ...] = ()
    classes: tuple[str, ...]
    optional_keys: tuple[str, ...]
    required_keys: tuple[str, ...]
    renamed: dict[str, str] = field(default_factory=dict)
    prefix: str = ""
    ends: Callable[[Sizes], Iterable[Part]]
    layer: Callable[[Sizes, int], Iterable[Part]]
    fused: dict[str, str]
    vision_parameters: int = 0
    mixed: bool = False
    tool_parser: str
    reasoning_parsers: dict[str, str]
    thinks: bool
    version: Callable[[Sizes, tuple[int, ...], bool], str]

    def key(self, size: str) -> str:
        """What config.json calls a size of `ModelSpec`."""
        return self.renamed.get(size, size)

    def stem(self, index: int) -> str:
        """What precedes the names of a decoder layer's parts."""
        return f"{self.prefix}model.layers.{index}."

    def parts(self, sizes: Sizes) -> Iterator[tuple[str, Part]]:
        """The parts of the text model, each with what precedes its name."""
        for part in self.ends(sizes):
            yield self.prefix, part
        for index in range(sizes.num_hidden_layers):
            for part in self.layer(sizes, index):
                yield self.stem(index), part

    def tensors(self, sizes: Sizes) -> Iterator[tuple[str, Part]]:
        """Hub name and part of each tensor of the text model, one expert after the other."""
        for (stem, copies), group in groupby(
            self.parts(sizes), lambda item: (item[0], item[1].copies)
        ):
            parts = [part for _, part in group]
            for number in range(copies):
                for part in parts:
                    yield stem + part.name.format(number), part

    def partners(self, module: str) -> list[str]:
        """The other modules that read the same input, whose scales are the same therefore."""
        stem, _, leaf = module.rpartition(".")
        whole = self.fused.get(leaf)
        return [
            f"{stem}.{other}"
            for other, name in self.fused.items()
            if name == whole and other != leaf
        ]
