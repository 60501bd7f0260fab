"""The types of a family of Kimi models: its record, its tensors and its sizes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import groupby
from typing import Literal, NamedTuple

Role = Literal[
    "experts",
    "attention, by heads",
    "attention, latent",
    "shared experts",
    "dense layers",
    "embedding",
    "lm_head",
    "router",
    "router bias",
    "norms",
]


@dataclass(frozen=True, kw_only=True)
class LatentSizes:
    """Sizes of a model with latent attention, by their names in a K2's config.json."""

    hidden_size: int
    num_attention_heads: int
    q_lora_rank: int = 0
    kv_lora_rank: int = 0
    qk_nope_head_dim: int = 0
    qk_rope_head_dim: int = 0
    v_head_dim: int = 0


@dataclass(frozen=True, kw_only=True)
class Sizes(LatentSizes):
    """Sizes of a text model."""

    num_hidden_layers: int
    intermediate_size: int
    moe_intermediate_size: int
    n_routed_experts: int
    n_shared_experts: int
    first_k_dense_replace: int
    vocab_size: int


class Part(NamedTuple):
    """One tensor of a published checkpoint, or `copies` of it.

    `{}` in its name is the number of an expert. A matrix may be stored packed, in several tensors
    below its module. `parameter`: the parameter of our own model that holds its rows. All parts of
    a parameter read the same input.
    """

    name: str
    shape: tuple[int, ...]
    role: Role
    parameter: str
    copies: int = 1


@dataclass(frozen=True, kw_only=True, eq=False)
class Family:
    """The record of a family.

    `name`: the engines' name for it. `model_types`: values of that key at the top level of
    config.json. `text_types`: its values in text_config, () if the config is flat. `classes`: the
    architectures that engines load.

    `optional_keys` and `required_keys` decide what is computed and show in no tensor: they must
    have a value that the family publishes. An absent required key is a problem, because readers of
    a config fill in different values. `renamed`: the key of each size whose name in config.json is
    not its name in `ModelSpec`.

    `prefix` precedes the names of all text tensors. `ends` gives the parts outside the layers,
    `layer` the parts of a layer by its index. `fused`: the shared name of linears that read the
    same input. Engines compute them as one, so they share their scales. `vision_parameters`: number
    of parameters in the tower and its projector. `mixed`: checkpoints may have several formats.

    `reasoning_parsers`: the parser by engine. `thinks`: whether every model reasons. `version`
    names a release from its sizes, the ids that end an answer and whether weights are packed.
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
        """The key in config.json of a size of `ModelSpec`."""
        return self.renamed.get(size, size)

    def stem(self, index: int) -> str:
        """The prefix of the names of a decoder layer's parts."""
        return f"{self.prefix}model.layers.{index}."

    def parts(self, sizes: Sizes) -> Iterator[tuple[str, Part]]:
        """Yields the parts of the text model, each after the prefix of its name."""
        for part in self.ends(sizes):
            yield self.prefix, part
        for index in range(sizes.num_hidden_layers):
            for part in self.layer(sizes, index):
                yield self.stem(index), part

    def tensors(self, sizes: Sizes) -> Iterator[tuple[str, Part]]:
        """Yields hub name and part of each tensor of the text model, one expert after the other."""
        for (stem, copies), group in groupby(
            self.parts(sizes), lambda item: (item[0], item[1].copies)
        ):
            parts = [part for _, part in group]
            for number in range(copies):
                for part in parts:
                    yield stem + part.name.format(number), part

    def partners(self, module: str) -> list[str]:
        """The other modules that read the same input, and so have the same scales."""
        stem, _, leaf = module.rpartition(".")
        fused = self.fused.get(leaf)
        return [
            f"{stem}.{other}"
            for other, name in self.fused.items()
            if name == fused and other != leaf
        ]
