"""Types that describe a family of Kimi models: its record, its tensors and its sizes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import groupby
from typing import Literal, NamedTuple

# purpose of a tensor in the model, by which policies, formats and memory estimates treat it
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
    """Sizes of a model with multi-head latent attention, named as in the config.json of Kimi-K2."""

    hidden_size: int
    num_attention_heads: int
    q_lora_rank: int = 0
    kv_lora_rank: int = 0
    qk_nope_head_dim: int = 0
    qk_rope_head_dim: int = 0
    v_head_dim: int = 0


@dataclass(frozen=True, kw_only=True)
class Sizes(LatentSizes):
    """Sizes of a text model, named as in the config.json of Kimi-K2."""

    num_hidden_layers: int
    intermediate_size: int
    moe_intermediate_size: int
    n_routed_experts: int
    n_shared_experts: int
    first_k_dense_replace: int
    vocab_size: int


class Part(NamedTuple):
    """Tensor of a published checkpoint, or the same tensor of every expert of a layer.

    name: name without the prefix of the layer. `{}` is the number of an expert.
    shape: shape of the plain matrix. A checkpoint may store it packed in several tensors.
    role: purpose of the tensor in the model.
    parameter: name of the parameter of trtspec's own model that holds its rows. All parts of a
        parameter read the same input.
    copies: number of experts that have such a tensor. 1 outside the experts.
    """

    name: str
    shape: tuple[int, ...]
    role: Role
    parameter: str
    copies: int = 1


@dataclass(frozen=True, kw_only=True, eq=False)
class Family:
    """Record of a family of Kimi models.

    name: name that engines give the family.
    model_types: values of model_type at the top level of config.json.
    text_types: values of model_type in text_config. Empty if config.json has no text_config.
    classes: values of `architectures` that engines load.
    optional_keys: keys of config.json that no tensor shows and that decide what is computed. A
        value must be one that the family publishes.
    required_keys: keys like optional_keys that must not be absent, because readers of a config
        assume different values for them.
    renamed: keys of config.json by the size of `ModelSpec` that they hold, if the names differ.
    prefix: prefix of the names of all text tensors.
    ends: function that yields the parts outside the layers.
    layer: function that yields the parts of a layer by its index.
    fused: shared names by the name of each linear that engines compute together with another. They
        read the same input and share their scales.
    vision_parameters: number of parameters in the vision tower and its projector.
    mixed: whether checkpoints may have several formats.
    tool_parser: name that engines give the parser of tool calls.
    reasoning_parsers: names of the parser of reasoning by engine.
    thinks: whether every model of the family reasons before it answers.
    version: function that names the release from the sizes, the ids that end an answer, and whether
        weights are packed.
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
        """Returns the key of config.json that holds a size of `ModelSpec`."""
        return self.renamed.get(size, size)

    def stem(self, index: int) -> str:
        """Returns the prefix of the names of a decoder layer's tensors."""
        return f"{self.prefix}model.layers.{index}."

    def parts(self, sizes: Sizes) -> Iterator[tuple[str, Part]]:
        """Yields each part of the text model after the prefix of its name."""
        for part in self.ends(sizes):
            yield self.prefix, part
        for index in range(sizes.num_hidden_layers):
            for part in self.layer(sizes, index):
                yield self.stem(index), part

    def tensors(self, sizes: Sizes) -> Iterator[tuple[str, Part]]:
        """Yields name and part of each tensor of the text model, one expert after the other."""
        # The matrices of a layer's experts follow each other and are the only parts with copies.
        groups = groupby(self.parts(sizes), lambda item: (item[0], item[1].copies))
        for (stem, experts), group in groups:
            parts = [part for _, part in group]
            for expert in range(experts):
                for part in parts:
                    yield stem + part.name.format(expert), part

    def partners(self, module: str) -> list[str]:
        """Names of the other linears that read the same input and share their scales."""
        stem, _, leaf = module.rpartition(".")
        fused_name = self.fused.get(leaf)
        return [
            f"{stem}.{other}"
            for other, name in self.fused.items()
            if name == fused_name and other != leaf
        ]
