"""What can be wrong with a head although every shape is right, and how to undo each.

Two tensors of one shape under each other's names, the blocks of fc in another order, a vocabulary map that is off by
one, another rope, layer ids that count from the other end of a layer: nothing in a header or a config shows it, and all
it costs is acceptance. A suspicion is the head with one such fault undone; drafting tells whether it was one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import combinations, permutations

import torch
from torch import Tensor

from trtspec.models.kimi import KimiModel
from trtspec.models.layers import Linear
from trtspec.specs import HeadSpec, ModelSpec, RopeSpec

HeadTensors = dict[str, Tensor]
NORMS = ("input_layernorm", "hidden_norm", "post_attention_layernorm", "norm")
ALL_ORDERS = 3  # captured states up to which every order is tried; beyond, exchanges of two and the reverse
DEFAULT_THETA = 10000.0  # what readers fall back to that do not find rope_theta
FETCH = "fetch the head again, or export it again with the tool that wrote it"


@dataclass(frozen=True)
class Suspicion:
    """One possible fault. `spec` and `tensors()` are the head with it undone; `kind` is stable, `detail` tells several
    of one kind apart. `what` and `undone` make the sentence "WHAT: agreement 0.36 -> 0.83 UNDONE".

    `later`: the first draft does not depend on it, the following ones do.
    """

    kind: str
    detail: str
    what: str
    undone: str
    remedy: str
    spec: HeadSpec
    tensors: Callable[[], HeadTensors]
    later: bool = False


def suspicions(spec: HeadSpec, tensors: HeadTensors, target: KimiModel) -> list[Suspicion]:
    """All that this head's shapes allow. `spec` has its layer ids; `target` may lack its decoder layers."""
    found = [*_exchanged_tensors(spec, tensors), *_states_in_another_order(spec, tensors)]
    found += [*_vocabulary_map(spec, tensors), *_other_rope(spec, tensors, target.spec)]
    found += [*_other_layers(spec, tensors, target.spec), *_borrowed(spec, tensors, target)]
    read = "without" if spec.norm_output else "with"
    return [
        *found,
        Suspicion(
            "norm-output",
            "",
            f"the state looks fed back {'without' if read == 'with' else 'with'} the final norm by mistake",
            f"{read} it",
            f"set norm_output to {str(not spec.norm_output).lower()} in config.json",
            replace(spec, norm_output=not spec.norm_output),
            lambda: tensors,
            later=True,
        ),
    ]


def _exchanged_tensors(spec: HeadSpec, tensors: HeadTensors) -> Iterator[Suspicion]:
    layer = spec.layer_prefix

    def swap(kind: str, first: str, second: str, change: Callable[[], HeadTensors] | None = None) -> Suspicion:
        names = tuple(name.rpartition(".")[2] for name in (first, second))
        undo = change or (lambda: _exchange(tensors, f"{first}.weight", f"{second}.weight"))
        what = f"{names[0]} and {names[1]} look swapped"
        return Suspicion(kind, ",".join(names), what, "when exchanged", FETCH, spec, undo)

    yield swap("gate-up", f"{layer}mlp.gate_proj", f"{layer}mlp.up_proj")
    attention = f"{layer}self_attn."
    if spec.attention == "mha":
        yield swap("k-v", f"{attention}k_proj", f"{attention}v_proj")
    elif spec.qk_nope_head_dim == spec.v_head_dim:
        name = f"{attention}kv_b_proj.weight"
        halves = Suspicion(
            "k-v",
            "kv_b_proj",
            "the key and value halves of each head in kv_b_proj look swapped",
            "when exchanged",
            FETCH,
            spec,
            lambda: tensors | {name: _swapped_halves(tensors[name], spec.num_attention_heads)},
        )
        yield halves
    for first, second in combinations([name if name == "norm" else f"{layer}{name}" for name in NORMS], 2):
        yield swap("norms", first, second)


def _exchange(tensors: HeadTensors, first: str, second: str) -> HeadTensors:
    return tensors | {first: tensors[second], second: tensors[first]}


def _swapped_halves(weight: Tensor, heads: int) -> Tensor:
    """kv_b_proj [heads * (nope + v), C] with the two parts of each head exchanged; they have one size."""
    return weight.unflatten(0, (heads, 2, -1)).flip(1).flatten(0, 2).contiguous()


def _states_in_another_order(spec: HeadSpec, tensors: HeadTensors) -> Iterator[Suspicion]:
    """fc's blocks alone, and, where each state has a norm of its own, together with the norms."""
    alone, together = "the blocks of fc look out of order", "the captured states look out of order (fc with its norms)"
    forms: list[tuple[str, tuple[str, ...]]] = [(alone, ("fc",))]
    if spec.fc_norm or spec.norm_before_fc:
        forms.append((together, ("fc", "fc_norm" if spec.fc_norm else "input_norm")))
    for order in _orders(spec.num_aux):
        shown = ", ".join(str(place + 1) for place in order)
        for what, names in forms:
            undo = _reordered(tensors, names, order)
            detail = f"{'+'.join(names)} {shown}"
            yield Suspicion("fc-order", detail, what, f"in the order {shown}", FETCH, spec, undo)


def _orders(count: int) -> list[tuple[int, ...]]:
    same = tuple(range(count))
    if count <= ALL_ORDERS:
        return [order for order in permutations(same) if order != same]
    pairs = []
    for first, second in combinations(same, 2):
        order = list(same)
        order[first], order[second] = second, first
        pairs.append(tuple(order))
    return [*pairs, same[::-1]]


def _reordered(tensors: HeadTensors, names: tuple[str, ...], order: tuple[int, ...]) -> Callable[[], HeadTensors]:
    def undo() -> HeadTensors:
        changed = dict(tensors)
        for name in (f"{name}.weight" for name in names if name != "fc_norm"):
            blocks = tensors[name].unflatten(-1, (len(order), -1))
            changed[name] = blocks[..., list(order), :].flatten(-2).contiguous()
        if "fc_norm" in names:
            changed |= {f"fc_norm.{at}.weight": tensors[f"fc_norm.{place}.weight"] for at, place in enumerate(order)}
        return changed

    return undo


def _vocabulary_map(spec: HeadSpec, tensors: HeadTensors) -> Iterator[Suspicion]:
    """Only maps that still name different tokens of the target's vocabulary."""
    if "d2t" not in tensors or spec.draft_vocab_size == spec.vocab_size:
        return
    d2t = tensors["d2t"].long().cpu()
    rows = torch.arange(len(d2t))
    for detail, what, undone, other in (
        ("-1", "d2t looks one too high", "one lower", d2t - 1),
        ("+1", "d2t looks one too low", "one higher", d2t + 1),
        ("ids", "d2t looks like token ids instead of offsets", "with their offsets", d2t - rows),
    ):
        ids, mapped = other + rows, tensors | {"d2t": other}
        if int(ids.min()) >= 0 and int(ids.max()) < spec.vocab_size and len(ids.unique()) == len(ids):
            remedy = "write d2t again: entry i is (target id of draft token i) - i"
            yield Suspicion("d2t", detail, what, undone, remedy, spec, partial(dict, mapped))


def _other_rope(spec: HeadSpec, tensors: HeadTensors, target: ModelSpec) -> Iterator[Suspicion]:
    own = spec.rope
    candidates = [replace(own, theta=theta) for theta in (target.rope.theta, DEFAULT_THETA)]
    candidates += [target.rope, *(RopeSpec(theta=theta) for theta in (own.theta, target.rope.theta, DEFAULT_THETA))]
    seen = {_rotation(own)}
    for rope in candidates:
        if _rotation(rope) in seen:
            continue
        seen.add(_rotation(rope))
        what = f"{_shown(own)} looks wrong"
        remedy = "write the rope that the head was trained with into config.json (rope_theta, rope_scaling)"
        changed = replace(spec, rope=rope)
        yield Suspicion("rope", _shown(rope), what, f"with {_shown(rope)}", remedy, changed, lambda: tensors)


def _rotation(rope: RopeSpec) -> RopeSpec:
    """What it computes: YaRN with factor 1 is plain rope."""
    return RopeSpec(theta=rope.theta) if rope.factor == 1.0 else rope


def _shown(rope: RopeSpec) -> str:
    scaling = f", {rope.rope_type} factor {rope.factor:g}" if _rotation(rope).factor != 1.0 else ", no scaling"
    return f"rope theta {rope.theta:g}{scaling}"


def _other_layers(spec: HeadSpec, tensors: HeadTensors, target: ModelSpec) -> Iterator[Suspicion]:
    layers = spec.aux_layers or target.default_aux_layers
    tries = {"-1": tuple(layer - 1 for layer in layers), "+1": tuple(layer + 1 for layer in layers)}
    if len(layers) == len(target.default_aux_layers):
        tries["default"] = target.default_aux_layers
    seen = {layers}
    for detail, other in tries.items():
        if other in seen or other[0] < 0 or other[-1] >= target.num_hidden_layers:
            continue
        seen.add(other)
        what = f"the layer ids {', '.join(map(str, layers))} look wrong"
        listed = ", ".join(map(str, other))
        remedy = f"the head reads layer outputs {listed} (counted from 0); correct the ids in its config.json"
        changed = replace(spec, aux_layers=other)
        yield Suspicion("layer-ids", detail, what, f"with {listed}", remedy, changed, lambda: tensors)


def _borrowed(spec: HeadSpec, tensors: HeadTensors, target: KimiModel) -> Iterator[Suspicion]:
    """The target's embedding and lm_head instead of the head's own."""
    if spec.hidden_size != target.spec.hidden_size:
        return
    if "embed_tokens.weight" in tensors:
        rest = {name: value for name, value in tensors.items() if name != "embed_tokens.weight"}
        what = "the head's own embed_tokens looks wrong (vLLM drafts with it)"
        yield Suspicion("embedding", "", what, "with the target's", "remove embed_tokens", spec, lambda: rest)
    if "lm_head.weight" in tensors and isinstance(target.lm_head, Linear):
        ids = slice(None)
        if "d2t" in tensors and spec.draft_vocab_size != spec.vocab_size:
            ids = tensors["d2t"].long().cpu() + torch.arange(spec.draft_vocab_size)  # type: ignore[assignment]
        weight = target.lm_head.weight
        what, remedy = "the head's own lm_head looks wrong", "export the head again with the target's lm_head"
        rows = "the target's" if isinstance(ids, slice) else "the target's rows of the draft vocabulary"
        yield Suspicion(
            "lm-head", "", what, f"with {rows}", remedy, spec, lambda: tensors | {"lm_head.weight": weight[ids]}
        )
