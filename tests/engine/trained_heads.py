"""Small heads of every kind that really draft for kimi-nano.

The shipped head is MLA and EAGLE-3.1; the others begin with what they share with it and are trained
within a minute or two by the plainest loop there is: cross entropy against the target's choices on
the first two drafts. A pruned head keeps the rows of lm_head that are used most.
"""

import json
from dataclasses import dataclass, replace
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trtspec.checkpoint.tensors import LazyTensors
from trtspec.checkpoint.tokenizer import KimiTokenizer
from trtspec.data_files import DATA, kimi_nano_dir
from trtspec.heads.training.train_options import TrainOptions, new_head_spec
from trtspec.models.eagle3 import Eagle3Head
from trtspec.models.head_weights import assemble, layout, open_head
from trtspec.models.k2 import KimiModel
from trtspec.models.weights import load_target
from trtspec.specs import HeadSpec

SHIPPED = DATA / "kimi-nano-eagle3"
STEPS, TEXTS, LENGTH, BATCH = 200, 256, 96, 8
PRUNED = 1024  # of 2048 tokens
HeadTensors = dict[str, Tensor]
Head = tuple[HeadSpec, HeadTensors]


@dataclass(frozen=True)
class Text:
    """Row t of each tensor belongs to position t.

    tokens int64 [S]; choices int64 [S]: the target's likeliest token after each position; states:
    layer outputs [S, n * H], those of the default layers side by side.
    """

    tokens: Tensor
    choices: Tensor
    states: Tensor


@cache
def nano() -> KimiModel:
    torch.set_num_threads(1)
    return load_target(kimi_nano_dir(), dtype=torch.float32)


@cache
def trained(attention: str, eagle: str, pruned: bool) -> Head:
    """(shape, tensors by their checkpoint names) of a head that drafts well enough to be judged."""
    if pruned:
        return prune(*trained(attention, eagle, False))
    if (attention, eagle) == ("mla", "3.1"):
        checkpoint, spec = open_head(SHIPPED, nano().spec)
        with LazyTensors(checkpoint) as stored:
            tensors = {name: stored[name] for name in stored.names()}
        return spec, {
            name: value.float() if value.is_floating_point() else value
            for name, value in tensors.items()
        }
    spec = new_head_spec(
        nano().spec, TrainOptions(attention=attention, eagle=eagle, intermediate_size=1024)
    )  # type: ignore[arg-type]
    return spec, train(spec)


@cache
def training_tokens() -> list[list[int]]:
    tokenizer = KimiTokenizer(kimi_nano_dir())
    lines = (kimi_nano_dir() / "prompts_train.jsonl").read_text(encoding="utf-8").splitlines()
    found = []
    for line in lines[:: len(lines) // TEXTS]:
        record = json.loads(line)
        ids = tokenizer.encode_chat(record["messages"])[1]
        found.append(ids + tokenizer.encode(record.get("reference") or ""))
    return found


@cache
@torch.inference_mode()
def training_texts() -> list[Text]:
    found = []
    for ids in (ids[:LENGTH] for ids in training_tokens() if len(ids) >= LENGTH):
        output = nano()(torch.tensor([ids]), aux_layers=nano().spec.default_aux_layers)
        found.append(Text(torch.tensor(ids), output.logits[0].argmax(-1), output.aux[0]))
    return found


def train(spec: HeadSpec) -> HeadTensors:
    target, generator = nano(), torch.Generator().manual_seed(0)
    head = Eagle3Head(spec)
    head.embed, head.lm_head = (
        target.embed,
        nn.Linear(spec.hidden_size, spec.vocab_size, bias=False),
    )
    known = shipped_parameters()
    for name, value in head.named_parameters():
        if name.startswith("embed."):
            continue
        value.requires_grad_(True)
        if name in known and known[name].shape == value.shape:
            value.data = known[name].clone()
        else:
            value.data = torch.randn(value.shape, generator=generator) / value.shape[-1] ** 0.5
    if not spec.fc_norm:
        head.fc.weight.data *= mean_norms()
    parameters = [value for value in head.parameters() if value.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=2e-3, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, STEPS, pct_start=0.1)
    texts = training_texts()
    for _ in range(STEPS):
        batch = [texts[at] for at in torch.randint(len(texts), (BATCH,), generator=generator)]
        loss = two_drafts(head, batch)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        schedule.step()
    return stored(head)


@cache
def shipped_parameters() -> dict[str, Tensor]:
    head = assemble(*trained("mla", "3.1", False), nano(), dtype=torch.float32)
    return {
        name: value.detach()
        for name, value in head.named_parameters()
        if not name.startswith("embed.")
    }


def mean_norms() -> Tensor:
    """[n_aux * Ht]: what the shipped head's norms multiply the captured states by, on average."""
    states = torch.cat([text.states for text in training_texts()[:16]])
    sizes = states.unflatten(-1, (3, -1)).square().mean((0, 2)).sqrt()
    return (shipped_parameters()["fc_norm"] / sizes[:, None]).flatten()


def two_drafts(head: Eagle3Head, batch: list[Text]) -> Tensor:
    tokens = torch.stack([text.tokens for text in batch])
    choices = torch.stack([text.choices for text in batch])
    states = torch.stack([text.states for text in batch])
    feedback, normed = head(head.fuse(states[:, :-1]), tokens[:, 1:], None, None)
    first = F.cross_entropy(head.logits(normed).flatten(0, 1), choices[:, 1:].flatten())
    _, normed = head(feedback[:, :-1], tokens[:, 2:], None, None)
    return first + 0.8 * F.cross_entropy(
        head.logits(normed).flatten(0, 1), choices[:, 2:].flatten()
    )


def stored(head: Eagle3Head) -> HeadTensors:
    """The tensors as a checkpoint names them."""
    spec, tensors = head.spec, {"lm_head.weight": head.lm_head.weight.detach()}
    sizes = {
        "self_attn.qkv_proj.weight": [spec.num_attention_heads * spec.head_dim]
        + 2 * [spec.num_key_value_heads * spec.head_dim],
        "self_attn.qkv_a_proj.weight": [
            spec.q_lora_rank,
            spec.kv_lora_rank + spec.qk_rope_head_dim,
        ],
        "mlp.gate_up_proj.weight": 2 * [spec.intermediate_size],
    }
    for parameter, names in layout(spec).items():
        value = head.get_parameter(parameter).detach()
        parts = (
            value.split(sizes[parameter])
            if parameter in sizes
            else list(value)
            if len(names) > 1
            else [value]
        )
        tensors |= {name: part.clone() for name, part in zip(names, parts, strict=True)}
    return tensors


def prune(spec: HeadSpec, tensors: HeadTensors) -> Head:
    used = torch.tensor([token for ids in training_tokens() for token in ids]).bincount(
        minlength=spec.vocab_size
    )
    ids = (
        used[:-1].topk(PRUNED).indices.sort().values
    )  # without the last token, so that d2t + 1 stays in range
    spec = replace(spec, draft_vocab_size=PRUNED, has_d2t=True)
    rows = tensors["lm_head.weight"][ids]
    return spec, tensors | {"lm_head.weight": rows, "d2t": ids - torch.arange(PRUNED)}
