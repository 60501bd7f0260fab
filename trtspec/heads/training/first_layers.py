"""Checks that states from an engine are the wanted layers of this target.

The states of a server or a dump have the right shape whatever model and layers it captured. So the
first layers are computed here for one sample. The engine's states are compared with the outputs of
all layers up to the one after the wanted layer.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from trtspec.errors import TrtspecError
from trtspec.heads.training.samples import Sample
from trtspec.models.stream import LayerStream
from trtspec.report import say

MAX_TOKENS = 32  # tokens of the sample that are compared
# States are not compared if the first captured layer is this layer or a later one, because all
# layers before it would have to be decoded.
MAX_LAYER = 4
# Relative difference (fraction of the norm). The states of quantized and plain weights of one model
# differ by less, the states of two models by more.
MAX_DIFFERENCE = 0.2


def check_first_layers(
    target_dir: Path, sample: Sample, aux: Tensor, layers: tuple[int, ...], dtype: torch.dtype
) -> float | None:
    """Compares an engine's states of one sample with the target's layer outputs, computed here.

    Returns the relative difference at the first captured layer, as a fraction of the output's norm.
    None if that layer is too late to be computed here. Raises TrtspecError if the states match
    another layer better, or no early layer.

    Args:
        aux: states of `sample` from the engine, [S, n_aux*H].
        layers: 0-based layers whose outputs `aux` should hold.
    """
    layer = min(layers)
    if layer >= MAX_LAYER:
        say(f"The states are not compared with the target: the first captured layer is {layer}")
        return None
    count = min(MAX_TOKENS, len(sample.tokens))
    with LayerStream(target_dir, dtype=dtype) as stream:
        # The layer after is compared too, because engines may number layers from 1.
        compared = min(layer + 2, stream.num_layers)
        outputs = first_outputs(stream, sample.tokens[:count], compared)
        # `aux` begins with the lowest captured layer.
        captured = aux[:count, : stream.spec.hidden_size].float()
    differences = []
    for output in outputs:
        distance = (output - captured).norm()
        differences.append(float(distance / output.norm()))
    nearest = min(range(len(differences)), key=differences.__getitem__)
    smallest = differences[nearest]
    if smallest > MAX_DIFFERENCE:
        message = (
            f"TS-FEATURES-OTHER the states of {sample.id} match no early layer of "
            f"{target_dir.name}: the nearest differs by {smallest:.0%} of its norm"
        )
        raise TrtspecError(message, "serve this target, or dump its states")
    difference = differences[layer]
    if nearest != layer:
        message = (
            f"TS-FEATURES-OTHER the states of {sample.id} labelled as layer {layer} are the "
            f"outputs of layer {nearest} ({smallest:.1%} apart, layer {layer} {difference:.1%})"
        )
        remedy = "capture the layers that `trtspec train --dry-run` prints: vLLM counts one more"
        raise TrtspecError(message, remedy)
    say(f"States compared with the target: layer {layer} differs by {difference:.1%} of its norm")
    return difference


def first_outputs(stream: LayerStream, tokens: tuple[int, ...], layers: int) -> list[Tensor]:
    """Computes the outputs of the first `layers` layers for one sequence, float32 [S, H] each."""
    ids = torch.tensor([tokens])
    output = stream.model_without_layers("embed.weight").embed(ids)
    outputs = []
    for index in range(layers):
        output = stream.load(index)(output, stream.attention_step(ids))
        outputs.append(output[0].float())
    return outputs
