"""Faults of every kind, tensor, field and position in small but complete Kimi checkpoints.

A fault is a change to a `Draft` (tensors, config.json, hf_quant_config.json) or to the written
files. Nothing here uses trtspec's readers: what must be found is decided by what was spoiled. Tests
count how many are found.

A new fault is a line of the generator for its sort (tensors, values, config, scheme, files), with
its kind, the tensor or field that a finding must name, and the change:

    yield Fault("scheme", "targets", lambda d: _group(d).update(targets=["re:.*experts.*"]))
"""

import copy
import json
import shutil
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import yaml
from safetensors.torch import load_file

from tests.tiny import make_target, write_json, write_shards
from tests.tiny_formats import FP8_CONFIG

KINDS = {
    "bf16 nested": {"format": "bf16", "nested": True, "vision": True},
    "bf16 flat": {"format": "bf16", "nested": False},
    "fp8-block": {"format": "fp8-block", "nested": False},
    "int4": {"format": "int4", "nested": True, "vision": True},
    "int4 flat": {"format": "int4", "nested": False},
    "nvfp4 all MLP": {"format": "nvfp4", "nested": True, "vision": True},
    "nvfp4 experts only": {"format": "nvfp4", "nested": False},
}
PLAIN = (torch.bfloat16, torch.float32, torch.float16)


@dataclass
class Draft:
    """A checkpoint in memory. `after` are changes to the written files."""

    tensors: dict[str, torch.Tensor]
    config: dict[str, Any]
    quant: dict[str, Any] | None
    files: Path  # tokenizer, template and others, copied along
    after: list[Callable[[Path], None]] = field(default_factory=list)

    @property
    def text(self) -> dict[str, Any]:
        return self.config.get("text_config", self.config)

    @property
    def block(self) -> dict[str, Any]:
        """The quantization_config, wherever it stands."""
        return self.config.get("quantization_config") or self.text["quantization_config"]

    def copied(self) -> "Draft":
        return Draft(
            dict(self.tensors), copy.deepcopy(self.config), copy.deepcopy(self.quant), self.files
        )

    def write(self, directory: Path, shards: int = 2) -> Path:
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir(parents=True)
        for path in self.files.iterdir():
            if path.suffix not in (".safetensors",) and not path.name.endswith("index.json"):
                shutil.copyfile(path, directory / path.name)
        write_json(directory / "config.json", self.config)
        if self.quant is not None:
            write_json(directory / "hf_quant_config.json", self.quant)
        write_shards(
            directory, {name: value.contiguous() for name, value in self.tensors.items()}, shards
        )
        for change in self.after:
            change(directory)
        return directory


@dataclass(frozen=True)
class Fault:
    """`kind` is counted by, `name` is the tensor, field or place that a finding must be about."""

    kind: str
    name: str
    spoil: Callable[[Draft], None]
    values: bool = False  # seen only by who reads values


def make_drafts(directory: Path) -> dict[str, Draft]:
    drafts = {}
    for number, (kind, words) in enumerate(KINDS.items()):
        path = directory / f"clean-{number}"
        make_target(path, layers=3, experts=4, hidden=64, shards=1, seed=number, **words)
        quant = path / "hf_quant_config.json"
        draft = Draft(
            load_file(path / "model.safetensors"),
            json.loads((path / "config.json").read_text()),
            json.loads(quant.read_text()) if quant.is_file() else None,
            path,
        )
        _more_vision(draft)
        if kind == "nvfp4 experts only":
            _experts_only(draft, words)
        drafts[kind] = draft
    return drafts


def _more_vision(draft: Draft) -> None:
    """A second block, as every published tower has several."""
    vision = draft.config.get("vision_config")
    if vision and any(name.startswith("vision_tower") for name in draft.tensors):
        vision["vt_num_hidden_layers"] = 2
        first = "vision_tower.encoder.blocks.0."
        for name in [name for name in draft.tensors if name.startswith(first)]:
            draft.tensors[name.replace("blocks.0.", "blocks.1.")] = draft.tensors[name].clone()


def _experts_only(draft: Draft, words: dict[str, Any]) -> None:
    """Shared experts and the dense layer in BF16, as nvidia's K2.6 and K2.7 have them."""
    plain = draft.files.parent / "plain"
    make_target(
        plain, layers=3, experts=4, hidden=64, shards=1, seed=6, **(words | {"format": "bf16"})
    )
    bf16 = load_file(plain / "model.safetensors")
    left = [
        name
        for name in bf16
        if ".mlp." in name and ".experts." not in name and name.endswith("_proj.weight")
    ]
    for name in left:
        for suffix in ("weight", "weight_scale", "weight_scale_2", "input_scale"):
            draft.tensors.pop(f"{name.removesuffix('.weight')}.{suffix}")
        draft.tensors[name] = bf16[name]
    ignore = [*draft.block["ignore"], "model.layers.0*"]
    ignore += [f"model.layers.{layer}.mlp.shared_experts*" for layer in (1, 2)]
    draft.block["ignore"] = sorted(ignore)
    assert draft.quant is not None
    draft.quant["quantization"]["exclude_modules"] = sorted(ignore)


def is_vision(name: str) -> bool:
    return name.startswith(("vision_tower.", "mm_projector."))


def linears(draft: Draft) -> list[str]:
    ends = (".weight", ".weight_packed")
    stems = [
        name.rpartition(".")[0]
        for name in draft.tensors
        if name.endswith(ends) and not is_vision(name)
    ]
    return [stem for stem in stems if stem.endswith(("_proj", "_mqa", "lm_head"))]


def tensor_faults(draft: Draft) -> Iterator[Fault]:
    """Each tensor missing, misnamed, of another shape or type; siblings and strangers."""
    for name, tensor in draft.tensors.items():
        if is_vision(name) and ".blocks." not in name:
            continue  # not known by name; see test_what_is_not_judged
        yield Fault("tensor missing", name, lambda d, n=name: _drop(d.tensors, n))
        yield Fault(
            "tensor misnamed", name, lambda d, n=name: d.tensors.update({f"{n}s": d.tensors.pop(n)})
        )
        if is_vision(name):
            continue
        if tensor.dim() and min(tensor.shape) > 1:
            for axis in range(tensor.dim()):
                yield Fault("shape", name, lambda d, n=name, a=axis: _narrow(d, n, a))
        else:
            yield Fault(
                "shape",
                name,
                lambda d, n=name: d.tensors.update({n: d.tensors[n].reshape(-1).repeat(3)}),
            )
        other = torch.int8 if tensor.dtype in PLAIN else torch.float64
        if tensor.dtype in (torch.uint8, torch.float8_e4m3fn, torch.int32, torch.int64):
            other = torch.int16
        yield Fault(
            "type",
            name,
            lambda d, n=name, o=other: d.tensors.update({n: d.tensors[n].to(torch.float32).to(o)}),
        )
    for stem in linears(draft):
        for suffix in (
            "weight_zero_point",
            "weight_g_idx",
            "weight_foo",
            "bias",
            "qzeros",
            "weight_scale_3",
        ):
            yield Fault("sibling", f"{stem}.{suffix}", lambda d, n=f"{stem}.{suffix}": _add(d, n))
    prefix = "language_model." if "text_config" in draft.config else ""
    for name in (
        "model.layers.3.input_layernorm.weight",
        "model.layers.1.mlp.experts.4.up_proj.weight",
        "model.layers.1.mlp.experts.4.up_proj.weight_scale",
        "model.layers.2.self_attn.k_norm.weight",
        "model.layers.1.mlp.gate.bias",
        "model.layers.1.mlp.up_proj.weight",
        "model.embed_positions",
    ):
        yield Fault("extra tensor", prefix + name, lambda d, n=prefix + name: _add(d, n))
    yield Fault("unknown tensor", "mystery.weight", lambda d: _add(d, "mystery.weight"))


def _narrow(draft: Draft, name: str, axis: int) -> None:
    tensor = draft.tensors[name]
    draft.tensors[name] = tensor.narrow(axis, 0, tensor.shape[axis] - 1)


def _add(draft: Draft, name: str) -> None:
    draft.tensors[name] = torch.ones(4, 4, dtype=torch.bfloat16)


def value_faults(draft: Draft) -> Iterator[Fault]:
    """NaN and infinity at the first, a middle and the last position, and invalid scales.

    Each float tensor gets them.
    """
    for name, tensor in draft.tensors.items():
        if not tensor.is_floating_point():
            continue
        for position in sorted({0, tensor.numel() // 2, tensor.numel() - 1}):
            for value in (
                ("nan",) if tensor.dtype == torch.float8_e4m3fn else ("nan", "inf", "-inf")
            ):
                spoil = lambda d, n=name, p=position, v=value: _put(d, n, p, float(v))  # noqa: E731
                yield Fault("NaN or infinity", f"{name}[{position}] {value}", spoil, values=True)
        suffix = name.rpartition(".")[2]
        if suffix in ("weight_scale_inv", "weight_scale", "weight_scale_2", "input_scale"):
            yield Fault("negative scale", name, lambda d, n=name: _put(d, n, 0, -0.5), values=True)
        if suffix in ("weight_scale_2", "input_scale"):
            yield Fault("zero scale", name, lambda d, n=name: _put(d, n, 0, 0.0), values=True)
        if suffix == "weight_scale_2":
            for factor in (1.1, 0.9, 1.001, 1.5, 2.0):
                kind = f"weight_scale_2 x {factor}"
                yield Fault(kind, name, lambda d, n=name, f=factor: _times(d, n, f), values=True)
        if suffix == "input_scale":
            for factor in (1e-6, 1e6, 1e36):
                spoil = lambda d, n=name, f=factor: _times(d, n, f)  # noqa: E731
                yield Fault(f"input_scale x {factor:g}", name, spoil, values=True)
    for name in [name for name in draft.tensors if name.endswith("weight_shape")]:
        spoil = lambda d, n=name: d.tensors.update(  # noqa: E731
            {n: d.tensors[n].flip(0) + torch.tensor([8, 0])}
        )
        yield Fault("weight_shape", name, spoil, values=True)


def _put(draft: Draft, name: str, position: int, value: float) -> None:
    tensor = draft.tensors[name].clone()
    tensor.view(-1)[position] = torch.tensor(value).to(tensor.dtype)
    draft.tensors[name] = tensor


def _times(draft: Draft, name: str, factor: float) -> None:
    draft.tensors[name] = draft.tensors[name] * factor


DECIDE = (  # fields whose value decides what is computed or which tensors there are
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "q_lora_rank",
    "kv_lora_rank",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "v_head_dim",
    "intermediate_size",
    "moe_intermediate_size",
    "n_routed_experts",
    "n_shared_experts",
    "first_k_dense_replace",
    "vocab_size",
)
NEED = (
    *DECIDE,
    "num_experts_per_tok",
    "max_position_embeddings",
    "rms_norm_eps",
    "n_group",
    "topk_group",
    "norm_topk_prob",
    "routed_scaling_factor",
    "rope_theta",
    "model_type",
)
TABLES = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text())


def pairs(table: dict[str, list[Any]]) -> list[tuple[str, Any]]:
    return [(key, value) for key, values in table.items() for value in values]


def config_faults(draft: Draft) -> Iterator[Fault]:
    def setting(kind: str, key: str, value: Any) -> Fault:
        return Fault(kind, key, lambda d: d.text.update({key: value}))

    flat = draft.config is draft.text
    for key in NEED:
        if key == "n_shared_experts" or key in draft.text:
            yield Fault("field absent", key, lambda d, k=key: _drop(d.text, k))
            yield setting("field null", key, None)
            yield setting("field of another kind", key, ["x"])
    for key in DECIDE:
        value = draft.text[key]
        yield setting("field negative", key, -value or -1)
        yield setting("field absurd", key, 10**12)
        yield setting("field off by one", key, value + 1)
        yield setting("field doubled", key, 2 * value)
        yield setting("field of another kind", key, str(value))
    for key, value in pairs(TABLES["wrong"]):
        yield setting("field absurd or contradicting", key, value)
    for key in draft.text["rope_scaling"]:
        spoil = lambda d, k=key: _drop(d.text["rope_scaling"], k)  # noqa: E731
        yield Fault("rope word absent", key, spoil)
        yield Fault(
            "rope word of another kind",
            key,
            lambda d, k=key: d.text["rope_scaling"].update({k: [1]}),
        )
    for key, value in pairs(TABLES["rope"]):
        yield Fault(
            "rope word", key, lambda d, k=key, v=value: d.text["rope_scaling"].update({k: v})
        )
    yield Fault(
        "architecture",
        "architectures",
        lambda d: d.config.update(architectures=["LlamaForCausalLM"]),
    )
    yield Fault("architecture", "architectures", lambda d: _drop(d.config, "architectures"))
    yield Fault("model type", "model_type", lambda d: d.config.update(model_type="kimi_k3"))
    yield Fault(
        "nesting",
        "model_type",
        lambda d: d.config.update(model_type="kimi_k25" if flat else "kimi_k2"),
    )
    if not flat:
        yield Fault(
            "nesting", "text_config", lambda d: d.config.update(d.config.pop("text_config"))
        )
        yield Fault("nesting", "text_config", lambda d: d.text.update(model_type="llama"))
        yield Fault(
            "tied", "tie_word_embeddings", lambda d: d.config.update(tie_word_embeddings=True)
        )
        yield Fault(
            "vision",
            "text_hidden_size",
            lambda d: d.config["vision_config"].update(text_hidden_size=99),
        )
    yield from scheme_faults(draft)


def scheme_faults(draft: Draft) -> Iterator[Fault]:
    """Words of quantization_config and hf_quant_config.json."""
    block = draft.config.get("quantization_config") or draft.text.get("quantization_config")
    if not block:
        yield Fault(
            "format", "quantization_config", lambda d: d.text.update(quantization_config=FP8_CONFIG)
        )
        return
    holder = "text" if "quantization_config" in draft.text else "config"
    yield Fault("format", "quantization_config", lambda d: _unquantized(getattr(d, holder), d))
    yield Fault("format", "quant_method", lambda d: d.block.update(quant_method="awq"))
    yield Fault("format", "quant_method", lambda d: _drop(d.block, "quant_method"))
    top, changes = map(pairs, TABLES["schemes"][block["quant_method"]])
    if draft.quant is not None:
        top = [*top, ("ignore", block["ignore"][1:])]
        for key, value in pairs(TABLES["hf_quant"]):
            spoil = lambda d, k=key, v=value: d.quant["quantization"].update({k: v})  # noqa: E731
            yield Fault("hf_quant_config", key, spoil)
    for key, value in top:
        yield Fault("scheme", key, lambda d, k=key, v=value: d.block.update({k: v}))
    for key, value in changes:
        yield Fault("scheme", key, lambda d, k=key, v=value: _group(d)["weights"].update({k: v}))
    if changes:
        yield Fault("scheme", "targets", lambda d: _group(d).update(targets=["re:.*experts.*"]))
        more = lambda d: d.block["config_groups"].update(  # noqa: E731
            group_1=copy.deepcopy(_group(d))
        )
        yield Fault("scheme", "config_groups", more)
        spoil = lambda d: _group(d).update(  # noqa: E731
            input_activations={"num_bits": 8, "type": "int"}
        )
        yield Fault("scheme", "input_activations", spoil)


def _drop(mapping: dict[str, Any], key: str) -> None:
    del mapping[key]


def _unquantized(holder: dict[str, Any], draft: Draft) -> None:
    del holder["quantization_config"]
    draft.quant = None


def _group(draft: Draft) -> dict[str, Any]:
    return draft.block["config_groups"]["group_0"]


def file_faults(draft: Draft) -> Iterator[Fault]:
    """Shards, their headers and the index."""

    def after(kind: str, name: str, change: Callable[[Path], None]) -> Fault:
        return Fault(kind, name, lambda d: d.after.append(change))

    for number in (1, 2):
        shard = f"model-{number:05d}-of-00002.safetensors"
        yield after("shard missing", shard, lambda d, s=shard: (d / s).unlink())
        yield after(
            "shard missing, no index",
            shard,
            lambda d, s=shard: (_index(d).unlink(), (d / s).unlink())[0],
        )
        yield after(
            "still downloading",
            shard,
            lambda d, s=shard: (d / s).rename(d / f"{s}.incomplete") and None,
        )
        yield after("empty shard", shard, lambda d, s=shard: (d / s).write_bytes(b"") and None)
        pointer = (
            b"version https://git-lfs.github.com/spec/v1\noid sha256:"
            + b"0" * 64
            + b"\nsize 12345\n"
        )
        yield after(
            "LFS pointer", shard, lambda d, s=shard, p=pointer: (d / s).write_bytes(p) and None
        )
        yield after(
            "stray file",
            shard,
            lambda d, s=shard: shutil.copyfile(d / s, d / "consolidated.safetensors") and None,
        )
        for size in (1, 8, 100, 5000):
            yield after("shard shorter", shard, lambda d, s=shard, n=size: _cut(d / s, n))
            yield after("shard longer", shard, lambda d, s=shard, n=size: _grow(d / s, n))
        for name, change in header_changes().items():
            yield after(
                "header", f"{shard}: {name}", lambda d, s=shard, c=change: edit_header(d / s, c)
            )
        for length in (0, 1, 7, 2**40, 2**63, 2**64 - 1):
            yield after("header length", shard, lambda d, s=shard, n=length: _length(d / s, n))
        for name, raw in (
            ("not UTF-8", b'{"\xff\xfe": 1}'),
            ("deep", b'{"a":' * 2000 + b"1" + b"}" * 2000),
            ("no JSON", b"<html>404</html>"),
            ("a list", b"[]"),
            ("utf-16", '{"a":1}'.encode("utf-16")),
            ("cut", b'{"a": {"dtype"'),
        ):
            yield after(
                "header", f"{shard}: {name}", lambda d, s=shard, r=raw: _raw_header(d / s, r)
            )
    first = next(iter(draft.tensors))
    yield after(
        "index",
        "a tensor too many",
        lambda d: _edit_index(d, lambda m: m.update({"ghost.weight": m[first]})),
    )
    yield after("index", "a tensor too few", lambda d: _edit_index(d, lambda m: m.pop(first)))
    elsewhere = lambda m: next(shard for shard in m.values() if shard != m[first])  # noqa: E731
    yield after(
        "index",
        "another shard",
        lambda d: _edit_index(d, lambda m: m.update({first: elsewhere(m)})),
    )
    yield after(
        "index",
        "outside",
        lambda d: _edit_index(d, lambda m: m.update({first: "../x.safetensors"})),
    )
    yield after(
        "index",
        "a file too many",
        lambda d: _edit_index(d, lambda m: m.update({"x": "model-3.safetensors"})),
    )
    yield after("index", "empty", lambda d: _index(d).write_text('{"weight_map": {}}') and None)
    yield after("index", "no JSON", lambda d: _index(d).write_text("{") and None)
    yield after("index", "not a string", lambda d: _edit_index(d, lambda m: m.update({first: 7})))
    yield after("twice in two shards", first, _twice)


def header_changes() -> dict[str, Callable[[dict[str, Any]], Any]]:
    """Lies in a header's entries; the data stays as it is."""

    def pick(header: dict[str, Any], number: int = 0) -> dict[str, Any]:
        return [entry for name, entry in header.items() if name != "__metadata__"][number]

    def shift(header: dict[str, Any], by: int) -> None:
        entry = pick(header, -1)
        entry["data_offsets"] = [offset + by for offset in entry["data_offsets"]]

    def overlap(header: dict[str, Any]) -> None:
        first, second = sorted(
            (pick(header, 0), pick(header, 1)), key=lambda entry: entry["data_offsets"][0]
        )
        size = second["data_offsets"][1] - second["data_offsets"][0]
        second["data_offsets"] = [first["data_offsets"][0], first["data_offsets"][0] + size]

    return {
        "overlap": overlap,
        "gap": lambda h: shift(h, 8),
        "shifted back": lambda h: shift(h, -8),
        "out of range": lambda h: shift(h, 2**40),
        "reversed": lambda h: pick(h)["data_offsets"].reverse(),
        "negative": lambda h: pick(h).update(data_offsets=[-8, 0]),
        "three offsets": lambda h: pick(h)["data_offsets"].append(1),
        "no offsets": lambda h: pick(h).pop("data_offsets"),
        "unknown type": lambda h: pick(h).update(dtype="BF17"),
        "no type": lambda h: pick(h).pop("dtype"),
        "larger shape": lambda h: pick(h).update(shape=[2, *pick(h)["shape"]]),
        "negative shape": lambda h: pick(h).update(shape=[-1]),
        "shape of floats": lambda h: pick(h).update(
            shape=[float(n) for n in (pick(h)["shape"] or [1])]
        ),
        "shape of strings": lambda h: pick(h).update(
            shape=[str(n) for n in (pick(h)["shape"] or [1])]
        ),
        "entry is null": lambda h: h.update({next(n for n in h if n != "__metadata__"): None}),
        "tensor left out": lambda h: h.pop(next(n for n in h if n != "__metadata__")),
        "metadata of numbers": lambda h: h.update(__metadata__={"format": 1}),
        "doubled": lambda h: "doubled",
    }


def edit_header(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    raw = path.read_bytes()
    header = json.loads(raw[8 : 8 + struct.unpack("<Q", raw[:8])[0]])
    if change(header) == "doubled":
        name = next(name for name in header if name != "__metadata__")
        text = json.dumps(header)[:-1] + f", {json.dumps(name)}: {json.dumps(header[name])}}}"
    else:
        text = json.dumps(header)
    _raw_header(path, text.encode())


def _raw_header(path: Path, header: bytes) -> None:
    raw = path.read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    path.write_bytes(struct.pack("<Q", len(header)) + header + raw[8 + length :])


def _length(path: Path, length: int) -> None:
    path.write_bytes(struct.pack("<Q", length) + path.read_bytes()[8:])


def _cut(path: Path, count: int) -> None:
    path.write_bytes(path.read_bytes()[:-count])


def _grow(path: Path, count: int) -> None:
    path.write_bytes(path.read_bytes() + bytes(count))


def _index(directory: Path) -> Path:
    return directory / "model.safetensors.index.json"


def _edit_index(directory: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    index = json.loads(_index(directory).read_text())
    change(index["weight_map"])
    _index(directory).write_text(json.dumps(index))


def _twice(directory: Path) -> None:
    """Both shards hold the same tensors, and there is no index that would choose."""
    shards = sorted(directory.glob("*.safetensors"))
    _index(directory).unlink()
    shutil.copyfile(shards[0], shards[1])


def all_faults(draft: Draft) -> Iterator[Fault]:
    yield from tensor_faults(draft)
    yield from value_faults(draft)
    yield from config_faults(draft)
    yield from file_faults(draft)
