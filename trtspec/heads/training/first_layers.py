"""Whether states that an engine made are those of the wanted layers of this target.

What a server or an engine's dump sends has the right shape whatever model and layers it captured; so the first layers
are computed here for one sample, and what came is compared with the outputs of the wanted layer and of its neighbours.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from trtspec.errors import TrtspecError
from trtspec.heads.training.samples import Sample
from trtspec.models.stream import LayerStream
from trtspec.report import say

TOKENS = 32  # of the sample; every token of a layer costs little beside decoding its weights
DEEPEST = 4  # layers that are decoded for this; a head that reads later ones first is not checked
MOST_APART = 0.2  # of the norm: quantized and plain weights of one model differ by less, other models by more


def check_first_layers(
    target_dir: Path, sample: Sample, aux: Tensor, layers: tuple[int, ...], dtype: torch.dtype
) -> float | None:
    """The relative difference of the first captured plane from the target's own; None where it was not looked at.

    aux [S, n_aux*H] as a head gets it. Raises TrtspecError when another layer or another model fits better.
    """
    layer = min(layers)
    if layer >= DEEPEST:
        say(f"The states are not compared with the target: the first captured layer is {layer}")
        return None
    count = min(TOKENS, len(sample.tokens))
    with LayerStream(target_dir, dtype=dtype) as stream:
        ours = first_outputs(stream, sample.tokens[:count], min(layer + 2, stream.num_layers))
        came = aux[:count, : stream.spec.hidden_size].float()
    apart = [float((own - came).norm() / own.norm()) for own in ours]
    nearest = min(range(len(apart)), key=apart.__getitem__)
    if apart[nearest] > MOST_APART:
        raise TrtspecError(
            f"TS-FEATURES-OTHER the states of {sample.id} are of no early layer of {target_dir.name}: the nearest "
            f"differs by {apart[nearest]:.0%} of its norm",
            "serve this target, or dump its states",
        )
    if nearest != layer:
        raise TrtspecError(
            f"TS-FEATURES-OTHER the states of {sample.id} labelled as layer {layer} are the outputs of layer "
            f"{nearest} ({apart[nearest]:.1%} apart, layer {layer} {apart[layer]:.1%})",
            "capture the layers that `trtspec train --dry-run` prints: vLLM counts one more",
        )
    say(f"States compared with the target: layer {layer} differs by {apart[layer]:.1%} of its norm")
    return apart[layer]


def first_outputs(stream: LayerStream, tokens: tuple[int, ...], layers: int) -> list[Tensor]:
    """Outputs [S, H] of the first layers for one sequence, float32."""
    ids = torch.tensor([tokens])
    output = stream.model_without_layers("embed.weight").embed(ids)
    outputs = []
    for index in range(layers):
        output = stream.load(index)(output, stream.attention_step(ids))
        outputs.append(output[0].float())
    return outputs
