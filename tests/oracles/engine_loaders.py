"""Runs TensorRT-LLM's own weight loaders on a CPU as judges of checkpoints and heads.

    python tests/oracles/engine_loaders.py SOURCES CHECKPOINT ... > JSON

SOURCES is a folder of its sources with the files of REAL, or their classes that build and load a
model. Whatever else they import is a stand-in: what has the same name here, or takes anything. The
layers among the stand-ins record what they are given. No kernel is imitated, and the vision tower
is left out.

Each checkpoint of a target is loaded by every rank of tensor parallel 1, 2 and 4. The JSON has a
list of answers for each, or the text of what the loader raised. An answer has

- `places`: tensor, module, position among the module's matrices; no module where the loader
  itself splits or fuses it;
- `quantized`: the modules built for NVFP4; `empty`: the parameters that were not written;
- `moved`: parameters of linear layers that are not the rows, columns and scales that the
  definition gives this rank;
- `captured`: the layers whose states a head gets by default, and the order of 1, 3 and -1;
- `kv_cache`, and `auto`: the runtime of the cache transceiver and whether cache manager V2 is
  taken, by its backend.

Names are without `language_model.`, which the Kimi wrapper strips.
"""

import enum
import importlib
import json
import operator
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from engine_classes import Anything, Finder
from engine_classes import StrictBaseModel as StrictBaseModel
from head_loaders import GatedMlp, GroupedAttention, Make, MultiLatentAttention, linear
from safetensors.torch import load_file
from torch import Tensor, nn

MODELS = "tensorrt_llm._torch.models"
LINEAR = "tensorrt_llm._torch.modules.linear"
REAL = f"""
tensorrt_llm.models.modeling_utils
tensorrt_llm.quantization.modelopt_config
tensorrt_llm.llmapi.llm_utils
tensorrt_llm._torch.configs
tensorrt_llm._torch.model_config
tensorrt_llm._torch.pyexecutor.config_utils
tensorrt_llm._torch.attention.backends.interface
tensorrt_llm._torch.speculative.eagle3
{LINEAR}
{MODELS}.modeling_utils
{MODELS}.modeling_speculative
{MODELS}.modeling_deepseekv3
{MODELS}.modeling_kimi_k25
{MODELS}.checkpoints.base_weight_loader
{MODELS}.checkpoints.base_weight_mapper
{MODELS}.checkpoints.hf.weight_mapper
""".split()
KIMI_LAYERS = 61
Tensors = dict[str, Tensor]
Place = tuple[str, str, int]


class Mapping(Anything):
    """One rank; questions about other ways to deal a model are answered with no."""

    cp_size, cp_rank, dp_size, gpus_per_node, enable_attention_dp = 1, 0, 1, 8, False

    def __init__(self, ranks: int = 1, rank: int = 0) -> None:
        self.tp_size, self.tp_rank = ranks, rank


@dataclass
class SpecMetadata(Anything):
    num_layers: int = 0


class QuantMode(Anything):
    def __init__(self, algorithm: str | None = None, cache: str | None = None) -> None:
        self.algorithm = algorithm

    def has_nvfp4(self, exclude_kv_cache: bool = False) -> bool:
        return self.algorithm == "NVFP4"

    has_any_quant = has_nvfp4


QuantMode.from_quant_algo = QuantMode


class Names(type):
    """Of a class whose members are their names."""

    def __getattr__(cls, name: str) -> str:
        return name


class Words(metaclass=Names):
    from_string = str


class QuantAlgo(enum.StrEnum):
    NVFP4 = "NVFP4"
    NVFP4_ARC = "NVFP4_ARC"
    W4A16_NVFP4 = "W4A16_NVFP4"
    FP8 = "FP8"
    FP8_BLOCK_SCALES = "FP8_BLOCK_SCALES"
    MIXED_PRECISION = "MIXED_PRECISION"


class Recorder(nn.Module):
    """Keeps what it is given to load: one table of tensors for each matrix in it."""

    given: list[Tensors] = []

    def load_weights(self, weights: list[Tensors], allow_partial_loading: bool = False) -> None:
        self.given = weights


class Embedding(Recorder):
    """Also lm_head, whole on each rank."""

    def __init__(self, rows: int, columns: int, *, dtype: Any = None, **_: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty((rows, columns), dtype=dtype), requires_grad=False)

    def load_weights(self, weights: list[Tensors], allow_partial_loading: bool = False) -> None:
        self.given = weights
        self.weight.data = weights[0]["weight"]

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight)


class RMSNorm(nn.RMSNorm):
    def __init__(self, *, hidden_size: int, eps: float, **_: Any) -> None:
        super().__init__(hidden_size, eps)
        self.weight.data = torch.empty(hidden_size)

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Any:
        if residual is None:
            return super().forward(x)
        x = x + residual
        return super().forward(x), x


def linears(config: Any, dtype: Any, mapping: Any = None) -> Make:
    settings = {
        "dtype": dtype,
        "mapping": mapping or config.mapping,
        "quant_config": config.get_quant_config(),
        "skip_create_weights_in_init": config.skip_create_weights_in_init,
    }
    make = importlib.import_module(LINEAR).Linear
    return lambda inputs, outputs, split=None: make(
        inputs, outputs, False, tensor_parallel_mode=split, **settings
    )


class GatedMLP(GatedMlp):
    def __init__(
        self, *, hidden_size: int, intermediate_size: int, dtype: Any, config: Any,
        overridden_tp_size: int | None = None, **_: Any,
    ) -> None:  # fmt: skip
        ranks = overridden_tp_size or config.mapping.tp_size
        mapping = Mapping(ranks, config.mapping.tp_rank % ranks)
        super().__init__(hidden_size, intermediate_size, linears(config, dtype, mapping))
        self.gate_up_proj.weights_loading_config.weight_mode = "fused_gate_up_linear"


class Experts(Recorder):
    def __init__(self, *, override_quant_config: Any, **_: Any) -> None:
        super().__init__()
        self.quant_config = override_quant_config
        self.register_parameter("w3_w1_weight", None)  # a module that loads has one


class DeepSeekV3MoeRoutingMethod(nn.Module):
    """The router of a mixture inherits it in the oldest sources."""

    def __init__(self, **_: Any) -> None:
        super().__init__()


def rope_of(settings: Any) -> tuple[float, dict[str, Any]]:
    scaling = vars(settings.rope) | {
        "rope_type": settings.rope.scale_type.replace("none", "default"),
        "factor": settings.rope.scale,
        "original_max_position_embeddings": settings.rope.original_max_positions,
    }
    return settings.rope.theta, scaling


class Attention(GroupedAttention):
    def __init__(self, *, pos_embd_params: Any, dtype: Any, config: Any, **sizes: Any) -> None:
        sizes["head_dim"] = config.pretrained_config.head_dim
        super().__init__(sizes, *rope_of(pos_embd_params), linears(config, dtype))
        self.qkv_proj.weights_loading_config.weight_mode = "fused_qkv_linear"
        self.hidden_size = sizes["hidden_size"]
        self.q_size = self.heads * self.size
        self.kv_size = self.kv_heads * self.size


class MLA(MultiLatentAttention):
    is_lite = False

    def __init__(self, *, pos_embd_params: Any, dtype: Any, config: Any, **sizes: Any) -> None:
        sizes["rms_norm_eps"] = config.pretrained_config.rms_norm_eps
        make = linears(config, dtype)
        super().__init__(sizes, *rope_of(pos_embd_params), "kv_a_proj_with_mqa", make)
        self.q_lora_rank, self.kv_lora_rank, self.qk_rope_head_dim = self.ranks
        heads = self.heads // config.mapping.tp_size
        for name, shape in (
            ("k_b_proj_trans", (heads, self.kv_lora_rank, self.nope)),
            ("v_b_proj", (heads, self.value, self.kv_lora_rank)),
        ):
            self.register_parameter(name, nn.Parameter(torch.empty(shape)))

    def keys_and_values(self, latent: Tensor) -> tuple[Tensor, ...]:
        keys = torch.einsum("tr,hrn->thn", latent, self.k_b_proj_trans)
        return keys, torch.einsum("tr,hvr->thv", latent, self.v_b_proj)


def get_hf_rope_theta(config: Any, default: float) -> float:
    parameters = config.rope_parameters or {}
    return getattr(config, "rope_theta", None) or parameters.get("rope_theta", default)


AuxStreamType = EventType = RotaryScalingType = Words
DecoderLayer, LMHead, create_moe = nn.Module, Embedding, Experts
QuantModeWrapper = operator.itemgetter(0)
BufferKind, get_sm_version = SimpleNamespace(DEFAULT=0), int
pad_up = lambda size, block: size + -size % block  # noqa: E731
float4_e2m1x2 = float4_sf_dtype = torch.uint8
logger = Anything()


class Loaders:
    """The model classes of one folder of sources."""

    def __init__(self, sources: Path) -> None:
        os.environ["TLLM_MULTIMODAL_DISAGGREGATED"] = "1"  # no vision tower
        os.environ["TRT_LLM_DISABLE_LOAD_WEIGHTS_IN_PARALLEL"] = "1"
        for name in ("Stream", "Event", "set_device"):
            setattr(torch.cuda, name, Anything)
        replaced = ("tensorrt_llm", "triton")
        sys.meta_path.insert(0, Finder(sources, REAL, replaced, lambda _: globals()))
        backends = importlib.import_module("tensorrt_llm._torch.attention.backends.interface")
        sys.modules["tensorrt_llm._torch.attention_backend.interface"] = backends  # its other name
        importlib.import_module(f"{MODELS}.modeling_kimi_k25")
        self.config = sys.modules["tensorrt_llm._torch.model_config"].ModelConfig
        self.classes = sys.modules[f"{MODELS}.modeling_utils"].MODEL_CLASS_MAPPING
        self.mapper = importlib.import_module(f"{MODELS}.checkpoints.hf.weight_mapper")
        self.weights = sys.modules[f"{MODELS}.checkpoints.base_weight_loader"].ConsumableWeightsDict
        self.capture = importlib.import_module("tensorrt_llm._torch.speculative.eagle3")
        self.auto = importlib.import_module("tensorrt_llm.llmapi.llm_utils")
        self.looked_up: set[str] = set()
        look_up = self.weights.__getitem__

        def note(weights: Any, key: str) -> Tensor:
            self.looked_up.add(key)
            return look_up(weights, key)

        self.weights.__getitem__ = note
        layer = sys.modules[LINEAR].Linear
        load = layer.load_weights

        def keep(module: Any, weights: list[Tensors], **settings: Any) -> None:
            module.given = weights
            load(module, weights, **settings)

        layer.load_weights, layer.forward, layer.given = keep, Embedding.forward, []
        self.linear = layer
        torch.ops.trtllm.block_scale_interleave = padded

    def two_steps(
        self, head: Path, captured: int, tensors: Tensors, inputs: Tensors
    ) -> tuple[Tensor, ...]:
        """The logits of two draft steps and the target's id of each draft id."""
        spec = SimpleNamespace(
            num_capture_layers=captured, tokens_per_gen_step=4, max_total_draft_tokens=3
        )
        config = self.config.from_pretrained(head, mapping=Mapping(), spec_config=spec)
        config.pretrained_config.torch_dtype = torch.float32
        model = self.classes["EAGLE3LlamaForCausalLM"](config)
        mapper = self.mapper.HfWeightMapper()
        mapper.init_model_and_config(model, config)
        model.load_weights(tensors, mapper)
        embedding = nn.Embedding.from_pretrained(inputs["embed_tokens.weight"])
        lm_head = linear(1, 1)
        lm_head.weight.data = inputs["lm_head.weight"]
        body = SimpleNamespace(embed_tokens=embedding)
        model.load_weights_from_target_model(SimpleNamespace(model=body, lm_head=lm_head))
        x = model.apply_eagle3_fc(inputs["states"])
        logits = []
        for key in ("tokens", "again"):
            normed, x = model.model(
                Anything(), inputs[key], spec_metadata=Anything(), hidden_states=x
            )
            logits.append(model.lm_head(normed))
        ids = torch.arange(logits[0].shape[-1])
        return logits[0], logits[1], ids + getattr(model.model, "d2t", torch.zeros_like(ids))

    def resolved(self, model: nn.Module) -> Iterator[tuple[str, Any]]:
        for backend in (None, "NIXL", "UCX"):
            transfer = SimpleNamespace(backend=backend, transceiver_runtime="auto")
            transfer._resolve_default_backend = lambda chosen=backend: (chosen, "")
            cache = SimpleNamespace(use_kv_cache_manager_v2="auto")
            args = SimpleNamespace(kv_cache_config=cache, cache_transceiver_config=transfer)
            self.auto._resolve_transceiver_runtime_auto(args, type(model))
            self.auto._resolve_kv_cache_manager_v2_auto(args, type(model))
            yield transfer.transceiver_runtime, cache.use_kv_cache_manager_v2

    def answer(self, checkpoint: str, mapping: Mapping) -> dict[str, Any]:
        files: Tensors = {}
        for file in Path(checkpoint).glob("*.safetensors"):
            for name, tensor in load_file(file).items():
                files[name.removeprefix("language_model.")] = tensor
        self.looked_up.clear()
        config = self.config.from_pretrained(
            checkpoint,
            mapping=mapping,
            skip_create_weights_in_init=True,  # as AutoModelForCausalLM
        )
        model = self.classes[config.pretrained_config.architectures[0]](config)
        model.load_weights(self.weights(dict(files)))
        capture = partial(self.capture.Eagle3OneModelSpecMetadata, KIMI_LAYERS)
        quantized, places = [], [(key, "", 0) for key in self.looked_up]
        for name, module in model.named_modules():
            name = name.removeprefix("llm.")
            config = getattr(module, "quant_config", None)
            if config and config.quant_algo == "NVFP4":
                quantized.append(name)
            places += found_in(name, module, files)
        moved = []
        for name, layer in model.named_modules():
            if isinstance(layer, MLA):
                wanted = absorbed(layer, name.removeprefix("llm."), files, mapping)
            else:
                wanted = dealt(layer) if isinstance(layer, self.linear) and layer.given else {}
            for key, value in wanted.items():
                found = layer.get_parameter(key)
                if not torch.equal(found.flatten(), value.flatten().to(found.dtype)):
                    moved.append(f"{name}.{key}")
        return {
            "quantized": quantized,
            "places": places,
            "empty": [name for name, value in model.named_parameters() if value.isnan().any()],
            "moved": moved,
            "captured": [
                capture(layers_to_capture=ids).layers_to_capture for ids in (None, {1, 3, -1})
            ],
            "kv_cache": model.model_config.quant_config.kv_cache_quant_algo,
            "auto": [*self.resolved(model)],
        }

    def answers(self, checkpoint: str) -> list[dict[str, Any]] | str:
        try:
            return [
                self.answer(checkpoint, Mapping(ranks, rank))
                for ranks in (1, 2, 4)
                for rank in range(ranks)
            ]
        except Exception as error:  # whatever the engine raises is the answer
            return f"{type(error).__name__}: {error}"


def padded(scales: Tensor) -> Tensor:
    """As the kernel pads them, but row by row."""
    rows, columns = scales.shape
    return F.pad(scales, (0, -columns % 4, 0, -rows % 128)).flatten()


def dealt(layer: Any) -> Tensors:
    """What the definition gives a rank of the matrices in a layer, one below the other."""
    axis, parts = int(layer.tp_mode == "row"), {}
    for key, first in layer.given[0].items():
        parts[key] = first
        if first.ndim > 1:
            dealers = layer.tp_size if layer.tp_mode else 1
            own = [part[key].chunk(dealers, axis)[layer.tp_rank % dealers] for part in layer.given]
            parts[key] = torch.cat(own)
    if layer.has_nvfp4 and "input_scale" in parts:
        parts["alpha"] = parts["input_scale"] * parts["weight_scale_2"]
        parts["input_scale"] = 1 / parts["input_scale"]
        parts["weight_scale"] = padded(parts["weight_scale"].view(torch.uint8))
    return parts


def absorbed(layer: MLA, name: str, files: Tensors, mapping: Mapping) -> Tensors:
    q, latent, pairs = (
        files[f"{name}.{part}.weight"] for part in ("q_a_proj", "kv_a_proj_with_mqa", "kv_b_proj")
    )
    own = pairs.unflatten(0, (layer.heads, -1)).chunk(mapping.tp_size)[mapping.tp_rank]
    keys, values = own.split([layer.nope, layer.value], 1)
    return {
        "kv_a_proj_with_mqa.weight": torch.cat((q, latent)),
        "kv_b_proj.weight": torch.cat((keys.flatten(0, 1), values.flatten(0, 1))),
        "k_b_proj_trans": keys.mT,
        "v_b_proj": values,
    }


def found_in(module: str, layer: nn.Module, files: Tensors) -> Iterator[Place]:
    """The tensors that a module was given, or that its parameters are copies of."""
    names = {id(tensor): name for name, tensor in files.items()}
    given = getattr(layer, "given", [])
    for index, part in enumerate(given):
        yield from ((names[id(tensor)], module, index) for tensor in part.values())
    for key, value in layer._parameters.items():
        tensor = files.get(f"{module}.{key}")
        if not given and tensor is not None and torch.equal(tensor, value.to(tensor.dtype)):
            yield f"{module}.{key}", module, 0


@torch.no_grad()
def main(sources: str, *checkpoints: str) -> None:
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)  # what is not written stays NaN
    loaders = Loaders(Path(sources))
    print(json.dumps(list(map(loaders.answers, checkpoints))))


if __name__ == "__main__":
    main(*sys.argv[1:])
