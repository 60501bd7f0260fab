"""Faults of Eagle3 heads by tensor, key and position, made from a clean head's config and tensors.

A fault knows the codes by which it may be named and the least severity that it deserves.
`disguised` has those that most files cannot show: two tensors of one shape exchanged, a map that is
off by one but still rises.
"""

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

IDS = "eagle_aux_hidden_state_layer_ids"
Config = dict[str, Any]
Tensors = dict[str, torch.Tensor]
Change = Callable[[Config, Tensors], None]
MAPS = ("d2t", "t2d")
TWINS = (
    ("gate_proj", "up_proj"),
    ("k_proj", "v_proj"),
    ("input_layernorm", "post_attention_layernorm"),
    ("fc_norm.0", "fc_norm.2"),
    ("experts.0.", "experts.1."),
    ("layers.1.", "layers.2."),
)
SHAPE = ("TS-HEAD-TENSOR-SHAPE", "TS-HEAD-SHAPE", "TS-HEAD-FC-WIDTH", "TS-HEAD-CONFIG")
MAP = (
    "TS-HEAD-D2T-VALUES",
    "TS-HEAD-D2T-ZERO",
    "TS-HEAD-T2D-VALUES",
    "TS-HEAD-MAP-DTYPE",
    "TS-HEAD-TENSOR-SHAPE",
)
ROPE = (
    "TS-HEAD-ROPE-TWICE",
    "TS-HEAD-ROPE-VALUES",
    "TS-HEAD-ROPE-THETA",
    "TS-HEAD-ROPE-MLA",
    "TS-PAIR-ROPE",
)
LAYERS = ("TS-HEAD-LAYER-ORDER", "TS-HEAD-LAYER-IDS", "TS-HEAD-FC-WIDTH", "TS-PAIR-LAYER-RANGE")
REFUSED = "a message"  # in place of a code: the file cannot be read as what it says it is


@dataclass(frozen=True)
class Fault:
    kind: str
    what: str
    change: Change
    codes: tuple[str, ...]
    severity: str = "error"


def places(config: Config, key: str) -> list[Config]:
    """The mappings of config.json in which a key stands."""
    inner = [config.get(name) or {} for name in ("transformer_layer_config", "eagle_config")]
    return [place for place in (config, *inner) if key in place]


def layer_config(config: Config) -> Config:
    return config.get("transformer_layer_config") or config


def faults(config: Config, tensors: Tensors) -> Iterator[Fault]:
    """Every fault of a head, in an order that does not change."""
    yield from _absent(config, tensors)
    yield from _values(tensors)
    yield from _shapes(tensors)
    yield from _maps(config, tensors)
    yield from _sizes(config, tensors)
    yield from _words(config, tensors)
    yield from _rope(config)
    yield from _layers(config)
    yield from _names(config, tensors)


def _set(name: str, make: Callable[[torch.Tensor], torch.Tensor]) -> Change:
    return lambda config, tensors: tensors.update({name: make(tensors[name]).contiguous()})


def _absent(config: Config, tensors: Tensors) -> Iterator[Fault]:
    pruned = "d2t" in tensors and len(tensors["d2t"]) < layer_config(config)["vocab_size"]
    for name in tensors:
        codes: tuple[str, ...] = ("TS-HEAD-TENSOR-MISSING",)
        if name in ("embed_tokens.weight", "t2d") or (
            name in ("d2t", "lm_head.weight") and not pruned
        ):
            continue  # borrowed or rebuilt
        if name in ("d2t", "lm_head.weight"):
            codes = ("TS-HEAD-D2T-MISSING", "TS-HEAD-LM-HEAD")
        if name.startswith("fc_norm"):
            codes = ("TS-HEAD-FC-NORM", "TS-HEAD-FC-WIDTH")
        yield Fault(
            "tensor absent",
            name,
            lambda config, tensors, name=name: tensors.__delitem__(name),
            codes,
        )


def _values(tensors: Tensors) -> Iterator[Fault]:
    for name in (name for name in tensors if name not in MAPS):
        zero = ("TS-PAIR-EMBED-RANDOM",) if name.startswith("embed") else ("TS-HEAD-ZERO",)
        yield Fault("tensor of zeros", name, _set(name, torch.zeros_like), zero)
        last = tensors[name].numel() - 1
        bad = (torch.nan, torch.inf, -torch.inf)
        for position, value in zip((0, last // 2, last), bad, strict=True):
            put = _set(name, _at(position, lambda *_, value=value: value))
            yield Fault("NaN or infinity", f"{name} at {position}", put, ("TS-HEAD-NOT-FINITE",))
        for dtype in (torch.float64, torch.float8_e4m3fn, torch.int32):
            to = _set(name, lambda tensor, dtype=dtype: tensor.to(dtype))
            yield Fault("not stored as a float", f"{name} as {dtype}", to, ("TS-HEAD-DTYPE",))


def _shapes(tensors: Tensors) -> Iterator[Fault]:
    for name in (name for name in tensors if name not in MAPS):
        rows = tensors[name].shape[0]
        changes: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
            "one row less": lambda tensor: tensor[:-1],
            "one row more": lambda tensor: torch.cat((tensor, tensor[:1])),
            "half the rows": lambda tensor, rows=rows: tensor[: rows // 2],
            "one dimension more": lambda tensor: tensor[None],
            "empty": lambda tensor: tensor[:0],
        }
        if tensors[name].dim() == 2:
            changes |= {
                "one column less": lambda tensor: tensor[:, :-1],
                "one column more": lambda tensor: torch.cat((tensor, tensor[:, :1]), 1),
                "half the columns": lambda tensor: tensor[:, : tensor.shape[1] // 2],
                "flat": lambda tensor: tensor.reshape(-1),
            }
            if tensors[name].shape[0] != tensors[name].shape[1]:
                changes["transposed"] = lambda tensor: tensor.T
        for what, change in changes.items():
            yield Fault("tensor of another shape", f"{name}: {what}", _set(name, change), SHAPE)


def _at(
    position: int, change: Callable[[torch.Tensor, int], Any]
) -> Callable[[torch.Tensor], torch.Tensor]:
    def changed(tensor: torch.Tensor) -> torch.Tensor:
        tensor = tensor.clone()
        tensor.view(-1)[position] = change(tensor, position)
        return tensor

    return changed


def _maps(config: Config, tensors: Tensors) -> Iterator[Fault]:
    vocabulary = layer_config(config)["vocab_size"]
    for name in (name for name in MAPS if name in tensors):
        size = len(tensors[name])
        flat: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
            "one entry less": lambda tensor: tensor[:-1],
            "one entry more": lambda tensor: torch.cat((tensor, tensor[-1:])),
            "of floats": lambda tensor: tensor.float(),
            "in two dimensions": lambda tensor: tensor[None],
        }
        for position in (0, size // 2, size - 1):
            if name == "t2d":
                flat[f"flipped at {position}"] = _at(position, lambda tensor, i: ~tensor[i])
                continue
            flat[f"beyond the vocabulary at {position}"] = _at(
                position, lambda tensor, i: vocabulary - i
            )
            flat[f"negative at {position}"] = _at(position, lambda tensor, i: -i - 1)
            other = position - 1 if position else 1
            flat[f"twice the same at {position}"] = _at(
                position, lambda tensor, i, j=other: tensor[j] + j - i
            )
        if name == "d2t":
            flat["reversed"] = lambda tensor: (
                (tensor + torch.arange(len(tensor))).flip(0) - torch.arange(len(tensor))
            )
            flat["target ids, not offsets"] = lambda tensor: tensor + torch.arange(len(tensor))
            flat["below the vocabulary"] = lambda tensor: tensor - vocabulary
            if size < vocabulary:
                flat["nothing but zeros"] = torch.zeros_like
        for what, change in flat.items():
            yield Fault("vocabulary map", f"{name}: {what}", _set(name, change), MAP)


def _key(key: str, value: Any) -> Change:
    """Another value wherever the key stands (at the top, where it stands nowhere)."""

    def change(config: Config, tensors: Tensors) -> None:
        for place in places(config, key) or [config]:
            place[key] = value

    return change


def _sizes(config: Config, tensors: Tensors) -> Iterator[Fault]:
    layer = layer_config(config)
    mla = "kv_lora_rank" in layer
    keys = ["hidden_size", "intermediate_size", "num_attention_heads", "vocab_size"]
    keys += (
        ["q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"]
        if mla
        else []
    )
    keys += [] if mla else ["num_key_value_heads", "head_dim"]
    for key in keys:
        for value in (2 * layer[key], layer[key] + 1, max(layer[key] // 2, 1)):
            codes = (
                (*SHAPE, "TS-PAIR-VOCAB", "TS-HEAD-D2T-MISSING", "TS-HEAD-LM-HEAD")
                if key == "vocab_size"
                else SHAPE
            )
            yield Fault("size in config.json", f"{key}: {value}", _key(key, value), codes)
    rows: list[tuple[str, Any, tuple[str, ...]]] = []
    if "d2t" in tensors and len(tensors["d2t"]) < layer["vocab_size"]:
        draft = len(tensors["d2t"])
        rows += [("draft_vocab_size", value, SHAPE) for value in (draft * 2, draft + 1, None)]
    states = tensors["fc.weight"].shape[1] // layer["hidden_size"]
    rows += [
        ("target_hidden_size", layer["hidden_size"] // 2, (*SHAPE, "TS-PAIR-WIDTH")),
        ("num_aux_hidden_states", states + 1, (*SHAPE, "TS-PAIR-WIDTH")),
        ("target_hidden_size", None, ("TS-HEAD-CONFIG",)),
        ("num_hidden_layers", 2, ("TS-HEAD-FUNCTION",)),
    ]
    rows += [("rms_norm_eps", value, ("TS-HEAD-EPSILON",)) for value in (0.1, 1e-3, -1.0)]
    for key, value, codes in rows:
        yield Fault("size in config.json", f"{key}: {value}", _key(key, value), codes)


def _words(config: Config, tensors: Tensors) -> Iterator[Fault]:
    layer = layer_config(config)
    other = {"model_type": "llama", "architectures": ["LlamaForCausalLMEagle3"]}
    if "kv_lora_rank" not in layer:
        other = {"model_type": "kimi_k2", "architectures": ["Eagle3DeepseekV2ForCausalLM"]}
    for key, name in other.items():
        for value in (name, None, "NoSuchClass" if key == "model_type" else ["NoSuchClass"]):
            if key in config or value == name:
                yield Fault(
                    "class in config.json", f"{key}: {value}", _key(key, value), ("TS-HEAD-CONFIG",)
                )
    aux = (config.get("eagle_config") or {}) | {"use_aux_hidden_state": False}
    normed = any(name.startswith("fc_norm") for name in tensors)
    quantized = {"quant_method": "modelopt", "quant_algo": "NVFP4"}
    rows: list[tuple[str, str, Any, str]] = [
        ("word", "hidden_act", "gelu", "TS-HEAD-FUNCTION"),
        ("word", "hidden_act", "relu", "TS-HEAD-FUNCTION"),
        ("word", "hidden_act", "gelu_pytorch_tanh", "TS-HEAD-FUNCTION"),
        ("word", "attention_bias", True, "TS-HEAD-FUNCTION"),
        ("word", "mlp_bias", True, "TS-HEAD-FUNCTION"),
        ("word", "tie_word_embeddings", True, "TS-HEAD-CONFIG"),
        ("word", "eagle_config", aux, "TS-HEAD-CONFIG"),
        ("word", "quantization_config", quantized, "TS-HEAD-CONFIG"),
        ("word", "torch_dtype", "float16", "TS-HEAD-CONFIG"),
        ("word", "torch_dtype", None, "TS-HEAD-CONFIG"),
        ("norm", "fc_norm", not normed, "TS-HEAD-FC-NORM"),
        ("norm", "norm_output", not config.get("norm_output"), "TS-HEAD-NORM-OUTPUT"),
        ("norm", "norm_before_fc", True, "TS-HEAD-FC-NORM"),
        ("norm", "norm_before_residual", True, "TS-HEAD-NORM-RESIDUAL"),
    ]
    for kind, key, value, code in rows:
        severity = "warning" if key in ("torch_dtype", "norm_output") else "error"
        change = _key(key, value)
        yield Fault(f"{kind} in config.json", f"{key}: {value}", change, (code,), severity)


def _rope(config: Config) -> Iterator[Fault]:
    layer = layer_config(config)
    yarn = bool(layer.get("rope_scaling"))

    def within(place: str, **values: Any) -> Change:
        def change(config: Config, tensors: Tensors) -> None:
            inner = layer_config(config)
            inner[place] = (inner.get(place) or {}) | values

        return change

    def everywhere(**values: Any) -> Change:
        def change(config: Config, tensors: Tensors) -> None:
            inner = layer_config(config)
            for place in ("rope_scaling", "rope_parameters"):
                if inner.get(place):
                    inner[place] |= values
            inner |= {key: value for key, value in values.items() if key == "rope_theta"}

        return change

    theta = layer["rope_theta"]
    yield Fault("rope told twice", "theta", within("rope_parameters", rope_theta=5 * theta), ROPE)
    yield Fault(
        "rope told twice",
        "theta at the top",
        lambda c, t: layer_config(c).update(rope_theta=5 * theta),
        ROPE,
    )
    if yarn:
        for key, value in (
            ("factor", 8.0),
            ("original_max_position_embeddings", 1024),
            ("beta_fast", 8.0),
            ("mscale_all_dim", 0.5),
            ("mscale", 2.0),
            ("rope_type", "default"),
        ):
            yield Fault("rope told twice", key, within("rope_parameters", **{key: value}), ROPE)
        for key, value in (
            ("factor", 8.0),
            ("original_max_position_embeddings", 1024),
            ("rope_theta", 5 * theta),
        ):
            yield Fault("rope not the target's", key, everywhere(**{key: value}), ROPE, "warning")
        yield Fault("rope without sense", "factor", everywhere(factor=0.5), ROPE)
        yield Fault("rope without sense", "beta_fast", everywhere(beta_fast=0.1), ROPE)

        def plain(config: Config, tensors: Tensors) -> None:
            inner = layer_config(config)
            inner["rope_scaling"] = None
            inner["rope_parameters"] = {"rope_type": "default", "rope_theta": theta}

        yield Fault("rope without sense", "an MLA head without YaRN", plain, ROPE)
    else:
        stretch = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}
        yield Fault("rope told twice", "type", within("rope_scaling", **stretch), ROPE)
    yield Fault("rope without sense", "theta below one", everywhere(rope_theta=0.5), ROPE)
    yield Fault("rope without sense", "negative theta", everywhere(rope_theta=-1e4), ROPE)


def _layers(config: Config) -> Iterator[Fault]:
    stored = places(config, IDS)
    if not stored:
        return
    ids = list(stored[0][IDS])
    wrong = [ids[::-1], [*ids, 6]]
    for position in range(len(ids)):
        wrong += [
            [*ids[:position], other, *ids[position + 1 :]] for other in (99, -5, ids[position - 1])
        ]
        wrong.append(ids[:position] + ids[position + 1 :])
    for layers in wrong:
        yield Fault("layer ids", f"{layers}", _key(IDS, layers), LAYERS)
    for odd in (7, 0, "7", [1.5], [True, 2, 3], {"0": 1}):
        yield Fault("layer ids that are no list of integers", f"{odd}", _key(IDS, odd), (REFUSED,))


def _names(config: Config, tensors: Tensors) -> Iterator[Fault]:
    layer = next(name for name in tensors if name.endswith("hidden_norm.weight")).removesuffix(
        "hidden_norm.weight"
    )
    first = "q_a_proj" if f"{layer}self_attn.q_a_proj.weight" in tensors else "q_proj"
    width = tensors["fc.weight"].shape[0]

    def prefix(config: Config, tensors: Tensors) -> None:
        for name in list(tensors):
            tensors[f"model.{name}"] = tensors.pop(name)

    def add(name: str, *shape: int) -> Change:
        return lambda config, tensors: tensors.update(
            {name: torch.ones(*shape, dtype=torch.bfloat16)}
        )

    yield Fault("tensor names", "model. in front", prefix, ("TS-HEAD-MODEL-PREFIX",))
    for part in (f"self_attn.{first}", "self_attn.o_proj", "mlp.up_proj"):
        yield Fault(
            "tensor names", f"{part}.bias", add(f"{layer}{part}.bias", width), ("TS-HEAD-FUNCTION",)
        )
    yield Fault("tensor names", "fc.bias", add("fc.bias", width), ("TS-HEAD-FUNCTION",))
    for part in ("q_norm", "k_norm"):
        yield Fault(
            "tensor names", part, add(f"{layer}self_attn.{part}.weight", 16), ("TS-HEAD-FUNCTION",)
        )
    more = add("layers.1.mlp.up_proj.weight", 2 * width, width)
    yield Fault("tensor names", "a second layer", more, ("TS-HEAD-FUNCTION",))
    codes = ("TS-HEAD-TENSOR-UNKNOWN",)
    yield Fault(
        "tensor names", "one that nobody reads", add("midway.weight", 4, 4), codes, "warning"
    )


def exchange(first: str, second: str, config: Config, tensors: Tensors) -> None:
    for name in [name for name in tensors if first in name]:
        other = name.replace(first, second)
        tensors[name], tensors[other] = tensors[other], tensors[name]


def unprefix(config: Config, tensors: Tensors) -> None:
    for name in list(tensors):
        tensors[name.replace("layers.", "")] = tensors.pop(name)


def disguised(config: Config, tensors: Tensors) -> Iterator[Fault]:
    """Faults that leave number, types and mostly names and shapes of the tensors as they are."""
    for first, second in TWINS:
        if any(first in name for name in tensors):
            yield Fault(f"exchanged: {first}", second, partial(exchange, first, second), ())
    yield Fault("alias lost", "layers.", unprefix, ())
    square = next(name for name in tensors if name.endswith("o_proj.weight"))
    yield Fault(
        "transposed", square, lambda _, tensors: tensors.update({square: tensors[square].mT}), ()
    )
    if "d2t" in tensors:
        later = lambda _, tensors: tensors.update(d2t=tensors["d2t"] + 1)  # noqa: E731
        yield Fault("d2t shifted", "by 1", later, ())
    if eagle := config.get("eagle_config"):
        ids = [layer + 1 for layer in eagle[IDS]]
        later = lambda config, _: config["eagle_config"].update({IDS: ids})  # noqa: E731
        yield Fault("layer ids shifted", "by 1", later, ())


def changed(fault: Fault, config: Config, tensors: Tensors) -> tuple[Config, Tensors]:
    """The head with the fault; what was given stays as it is."""
    config, tensors = copy.deepcopy(config), dict(tensors)
    fault.change(config, tensors)
    return config, tensors
