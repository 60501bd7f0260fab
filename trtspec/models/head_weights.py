"""Loads an Eagle3 head checkpoint into `Eagle3Head`, with all problems in one error."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

from trtspec.checkpoint.headers import Checkpoint
from trtspec.checkpoint.heads.pairing import pair_problems
from trtspec.checkpoint.heads.problems import uncomputed
from trtspec.checkpoint.heads.read import read_head
from trtspec.checkpoint.heads.shapes import tensor_names
from trtspec.checkpoint.tensors import LazyTensors
from trtspec.checkpoint.values import compare_embeddings, embedding_rows, head_value_problems
from trtspec.errors import Problem, TrtspecError, errors_in
from trtspec.families.kimi_k2 import FUSED
from trtspec.models.eagle3 import Eagle3Head
from trtspec.models.k2 import KimiModel
from trtspec.models.layers import Linear
from trtspec.specs import HeadSpec, ModelSpec

# Module of a tensor in a checkpoint -> module of the model that has the tensor among its rows.
STACKED = FUSED | dict.fromkeys(("q_proj", "k_proj", "v_proj"), "qkv_proj")
Tensors = LazyTensors | dict[str, Tensor]  # tensors by their names in the checkpoint


def load_head(
    path: Path | str, target: KimiModel, *, dtype: torch.dtype = torch.bfloat16, device: str = "cpu"
) -> Eagle3Head:
    """Loads an Eagle3 head that drafts for `target`.

    The head uses the embedding and the lm_head of `target` if the checkpoint has none. The layer's
    tensors may be named `layers.0.` (ModelOpt) or `midlayer.`. Raises TrtspecError with all
    problems if the head cannot draft for `target`, or if servers do not compute the head
    (norm_before_residual).
    """
    checkpoint, spec = open_head(path, target.spec)
    _refuse(path, _embedding(checkpoint, target))
    with LazyTensors(checkpoint) as tensors:
        return assemble(spec, tensors, target, dtype=dtype, device=device)


def open_head(path: Path | str, target: ModelSpec) -> tuple[Checkpoint, HeadSpec]:
    """Opens a head's checkpoint, and checks that the head can draft for `target`.

    The head's own embedding is not compared with the target's. Raises TrtspecError with all
    problems if the head cannot draft for `target`.
    """
    checkpoint = Checkpoint.open(Path(path))
    spec, problems = read_head(checkpoint)
    problems = problems + pair_problems(spec, target)
    errors = errors_in(problems) + uncomputed(checkpoint.config)
    _refuse(path, errors or head_value_problems(checkpoint, checkpoint.tensors))
    return checkpoint, spec


def _refuse(path: Path | str, errors: list[Problem]) -> None:
    """Raises TrtspecError with all errors if there are any."""
    if errors:
        listed = "; ".join(f"[{error.code}] {error.where}: {error.message}" for error in errors)
        raise TrtspecError(f"{path} cannot draft for this target: {listed}", errors[0].remedy)


def _embedding(checkpoint: Checkpoint, target: KimiModel) -> list[Problem]:
    """Compares a sample of rows of the head's own embedding with the target's.

    Returns the errors. The list is empty if the head has no embedding of its own.
    """
    name = "embed_tokens.weight"
    if name not in checkpoint.tensors:
        return []
    with LazyTensors(checkpoint) as stored:
        weight = stored[name]
        rows = torch.from_numpy(embedding_rows(len(weight)))
        head_rows = weight[rows].double().numpy()
    target_rows = target.embed.weight.detach().cpu()[rows].double().numpy()
    return errors_in(compare_embeddings(head_rows, target_rows))


def assemble(
    spec: HeadSpec,
    tensors: Tensors,
    target: KimiModel,
    *,
    dtype: torch.dtype = torch.bfloat16,
    device: str = "cpu",
) -> Eagle3Head:
    """Builds a head from its tensors, with the target's embedding or lm_head if one is missing."""
    with torch.device("meta"):
        head = Eagle3Head(spec)
    for parameter, names in layout(spec).items():
        parts = [tensors[name] for name in names]
        # fc_norm has one row for each captured layer. Other parameters join rows of matrices.
        value = torch.stack(parts) if parameter == "fc_norm" else torch.cat(parts)
        owner, _, leaf = parameter.rpartition(".")
        stored = nn.Parameter(value.to(device=device, dtype=dtype), False)
        setattr(head.get_submodule(owner), leaf, stored)
    if "lm_head.weight" in tensors:
        head.lm_head = Linear(spec.hidden_size, spec.draft_vocab_size)
        head.lm_head.weight = nn.Parameter(
            tensors["lm_head.weight"].to(device=device, dtype=dtype), False
        )
    else:
        head.lm_head = target.lm_head
    head.embed = target.embed
    if "embed_tokens.weight" in tensors:
        weight = tensors["embed_tokens.weight"].to(device=device, dtype=dtype)
        head.embed = nn.Embedding.from_pretrained(weight)
    if "d2t" in tensors and spec.is_pruned:
        # d2t is an offset in every Eagle3 format: target id = draft id + d2t[draft id].
        offsets = tensors["d2t"].long().to(device)
        head.target_ids = offsets + torch.arange(len(offsets), device=device)
    return head.eval().requires_grad_(False)


def layout(spec: HeadSpec) -> dict[str, tuple[str, ...]]:
    """Names the checkpoint tensors of each parameter of `Eagle3Head`, by parameter.

    All tensors are required. The tensors of a parameter are joined along dimension 0.
    """
    table: dict[str, tuple[str, ...]] = {}
    for name in tensor_names(spec):
        plain = name.removeprefix("layer.")
        modules = plain.split(".")
        parameter = ".".join(STACKED.get(module, module) for module in modules)
        # The norms of all captured states are one parameter of the model.
        if name.startswith("fc_norm."):
            parameter = "fc_norm"
        # Only the layer's tensors have the prefix, which differs between dialects.
        stored = name if plain == name else spec.layer_prefix + plain
        earlier_parts = table.get(parameter, ())
        table[parameter] = (*earlier_parts, stored)
    return table
