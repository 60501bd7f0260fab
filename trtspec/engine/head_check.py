"""Does a head draft as a trained one would? What no header shows, measured on answers of its target.

Each setting that may be wrong is undone, one at a time, and the head drafts again for the same answers. What makes its
drafts better by more than chance is named. The comparison is paired by answer, because positions of one answer are not
independent.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from statistics import fmean, stdev

import torch
from torch import Tensor

from trtspec.engine.engine import Engine, EngineOptions
from trtspec.engine.request import GenerationRequest
from trtspec.engine.sequence import Completion
from trtspec.models.eagle3 import Eagle3Head
from trtspec.models.head_weights import assemble
from trtspec.models.kimi import KimiModel
from trtspec.models.layers import Linear
from trtspec.specs import HeadSpec, RopeSpec

FALSE_ALARMS = 0.01  # of checks of a sound head: chance that anything is named; kinds share it equally
LEAST_GAIN = 0.01  # of agreement; less is not worth a finding
# of the share of drafts accepted: a head that was trained briefly without the final norm may gain 0.013 from it by
# chance, and one that was trained with it loses 0.28 and more without
LEAST_LATER_GAIN = 0.05
DEFAULT_THETA = 10000.0  # what readers fall back to that do not find rope_theta
HeadTensors = dict[str, Tensor]


@dataclass(frozen=True)
class Suspicion:
    """A fault that the head may have; `spec` and `tensors` are the head with it undone. `what` and `undone` make the
    sentence "WHAT: agreement 0.36 -> 0.83 UNDONE". `later`: only drafts after the first depend on it."""

    kind: str
    detail: str
    what: str
    undone: str
    remedy: str
    spec: HeadSpec
    tensors: HeadTensors
    later: bool = False


@dataclass(frozen=True)
class Trial:
    """One suspicion tried. `before` and `after`: share of drafts that agree, as the file is and with it undone."""

    suspicion: Suspicion
    before: float
    after: float
    chance: float  # of a gain like this when undoing it changes nothing
    named: bool


@dataclass(frozen=True)
class Answer:
    """A text that the target wrote from position `begin` on; row t of each tensor belongs to position t. tokens int64
    [S]; choices int64 [S]: the target's likeliest token after each position; states: outputs [S, H] by layer."""

    tokens: Tensor
    begin: int
    choices: Tensor
    states: dict[int, Tensor]


def _head(target: KimiModel, spec: HeadSpec, tensors: HeadTensors) -> Eagle3Head:
    weight = tensors["fc.weight"]
    return assemble(spec, tensors, target, dtype=weight.dtype, device=str(weight.device))


def draft_freely(
    target: KimiModel, spec: HeadSpec, tensors: HeadTensors, prompts: list[list[int]], draft_len: int, max_tokens: int
) -> list[Completion]:
    """Greedy answers of the target to prompts of token ids, drafted for by the head; with the counts of each."""
    options = EngineOptions(draft_len, min(8, len(prompts)), max(map(len, prompts)) + max_tokens + 1)
    engine = Engine(target, _head(target, spec, tensors), options)
    done = engine.generate([GenerationRequest(str(at), prompt, max_tokens) for at, prompt in enumerate(prompts)])
    return [done[str(at)] for at in range(len(prompts))]


@torch.inference_mode()
def read_again(target: KimiModel, tokens: list[int], begin: int, layers: Iterable[int]) -> Answer:
    """Runs the target once over a text that it wrote."""
    layers = tuple(sorted(layers))
    output = target(torch.tensor([tokens], device=target.embed.weight.device), aux_layers=layers)
    assert output.aux is not None
    states = dict(zip(layers, output.aux[0].chunk(len(layers), -1), strict=True))
    return Answer(torch.tensor(tokens), begin, output.logits[0].argmax(-1).cpu(), states)


@torch.inference_mode()
def agreements(target: KimiModel, spec: HeadSpec, tensors: HeadTensors, answers: list[Answer]) -> list[float]:
    """For each answer, the share of its tokens after which the first draft is what the target takes.

    Row t of the head pairs the state at t with the token at t+1 and drafts the token at t+2.
    """
    head, weight, found = _head(target, spec, tensors), tensors["fc.weight"], []
    for one in answers:
        aux = torch.cat([one.states[layer] for layer in spec.aux_layers or target.spec.default_aux_layers], -1)
        fused = head.fuse(aux[None, :-1].to(weight.device, weight.dtype))
        _, normed = head(fused, one.tokens[None, 1:].to(weight.device), None, None)
        drafts = head.to_target_ids(head.logits(normed[0, one.begin - 1 :]).argmax(-1)).cpu()
        found.append(float((drafts == one.choices[one.begin :]).float().mean()))
    return found


def trials(
    spec: HeadSpec,
    tensors: HeadTensors,
    target: KimiModel,
    prompts: list[list[int]],
    done: list[Completion],
    *,
    draft_len: int,
    advance: Callable[[int], None] = lambda _: None,
) -> list[Trial]:
    """Tries every suspicion of a head that drafted `done` for `prompts`; the named and best first. `advance` gets 1 for
    each."""
    suspected, default = suspicions(spec, tensors, target), target.spec.default_aux_layers
    layers = {layer for one in (spec, *(one.spec for one in suspected)) for layer in one.aux_layers or default}
    answers = [
        read_again(target, prompt + one.token_ids, len(prompt), layers)
        for prompt, one in zip(prompts, done, strict=True)
    ]
    longest = max(len(one.token_ids) for one in done)

    def shares(done: list[Completion]) -> list[float]:
        return [one.stats.accepted / max(1, one.stats.steps) / draft_len for one in done]

    kinds, own, made = Counter(one.kind for one in suspected), agreements(target, spec, tensors, answers), []
    for one in suspected:
        if one.later:
            before = shares(done)
            after = shares(draft_freely(target, one.spec, one.tensors, prompts, draft_len, longest))
        else:
            before, after = own, agreements(target, one.spec, one.tensors, answers)
        chance = chance_of_gain(after, before)
        enough = fmean(after) - fmean(before) >= (LEAST_LATER_GAIN if one.later else LEAST_GAIN)
        named = enough and chance < FALSE_ALARMS / len(kinds) / kinds[one.kind]
        made.append(Trial(one, fmean(before), fmean(after), chance, named))
        advance(1)
    return sorted(made, key=lambda trial: (not trial.named, trial.before - trial.after))


def chance_of_gain(better: list[float], worse: list[float]) -> float:
    """One-sided p of Student's paired t-test that the mean of `better` is above that of `worse`.

    The tail is the normal's at Wallace's transformation of t (Biometrika 46, 1959, (8n+1)/(8n+3) sqrt(n log(1+t^2/n))),
    right to a few per cent of itself.
    """
    differences = [one - other for one, other in zip(better, worse, strict=True)]
    spread = stdev(differences) / math.sqrt(len(differences))
    mean = fmean(differences)
    if mean <= 0:
        return 1.0
    freedom = len(differences) - 1
    square = (mean / spread) ** 2 if spread else math.inf
    if square == math.inf:
        return 0.0
    z = (8 * freedom + 1) / (8 * freedom + 3) * math.sqrt(freedom * math.log1p(square / freedom))
    return math.erfc(z / math.sqrt(2)) / 2


def suspicions(spec: HeadSpec, tensors: HeadTensors, target: KimiModel) -> list[Suspicion]:
    """What may be wrong: the rope, the layer ids, the head's own lm_head, the final norm of the state fed back."""
    shape, own, found = target.spec, spec.rope, []
    thetas = own.theta, shape.rope.theta, DEFAULT_THETA
    ropes = [*(replace(own, theta=theta) for theta in thetas), shape.rope, *(RopeSpec(theta) for theta in thetas)]
    for shown, rope in {_shown(rope): rope for rope in ropes if _shown(rope) != _shown(own)}.items():
        remedy = "write the rope that the head was trained with into config.json (rope_theta, rope_scaling)"
        text = f"{_shown(own)} looks wrong", f"with {shown}", remedy
        found.append(Suspicion("rope", shown, *text, replace(spec, rope=rope), tensors))
    layers, default = spec.aux_layers or shape.default_aux_layers, shape.default_aux_layers
    ids = {"-1": tuple(layer - 1 for layer in layers), "+1": tuple(layer + 1 for layer in layers)}
    if len(layers) == len(default) and default not in (layers, *ids.values()):
        ids["default"] = default
    for detail, other in ids.items():
        if min(other) >= 0 and max(other) < shape.num_hidden_layers:
            listed = ", ".join(map(str, other))
            remedy = f"the head reads layer outputs {listed} (counted from 0); correct the ids in its config.json"
            text = f"the layer ids {', '.join(map(str, layers))} look wrong", f"with {listed}", remedy
            found.append(Suspicion("layer-ids", detail, *text, replace(spec, aux_layers=other), tensors))
    if "lm_head.weight" in tensors and spec.hidden_size == shape.hidden_size and isinstance(target.lm_head, Linear):
        rows, weight = "the target's", target.lm_head.weight.data
        if "d2t" in tensors and spec.draft_vocab_size != spec.vocab_size:
            weight = weight[tensors["d2t"].long().cpu() + torch.arange(spec.draft_vocab_size)]
            rows += " rows of the draft vocabulary"
        text = "the head's own lm_head looks wrong", f"with {rows}", "export the head again with the target's lm_head"
        found.append(Suspicion("lm-head", "", *text, spec, tensors | {"lm_head.weight": weight}))
    fed, right = ("with", "without") if spec.norm_output else ("without", "with")
    remedy = f"set norm_output to {str(not spec.norm_output).lower()} in config.json"
    text = f"the state looks fed back {fed} the final norm by mistake", f"{right} it", remedy
    changed = replace(spec, norm_output=not spec.norm_output)
    return [*found, Suspicion("norm-output", "", *text, changed, tensors, later=True)]


def _shown(rope: RopeSpec) -> str:
    """YaRN with factor 1 is plain rope."""
    scaling = f"{rope.rope_type} factor {rope.factor:g}" if rope.factor != 1.0 else "no scaling"
    return f"rope theta {rope.theta:g}, {scaling}"
