"""Loads Eagle3 heads into the classes of other projects and drafts two steps with each.

It is a process of its own:

    python tests/oracles/head_classes.py < requests > answers

A request is one JSON line, {"loader", "head": directory, "inputs": file, "output": file,
"captured", "sources"}; its answer {"why": ""}, or the reason why the class did not load the head.
`inputs` is a safetensors file: `states` [T, n * Ht], `tokens` and `again` int64 [T], the target's
`embed_tokens.weight` and `lm_head.weight`. `output` gets `first` and `second`, the logits [T, Vd]
of the two steps, and `ids` int64 [Vd]. All in float32.

`sources` is a folder with checkouts of TorchSpec, SpecForge and EAGLE, or one with TensorRT-LLM's
sources. vLLM and speculators are packages of the Python that runs this. Attention kernels of vLLM
are replaced by plain ones: what is judged is how its classes read, name, fuse, norm, rotate and
scale.
"""

import contextlib
import functools
import importlib
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

Steps = tuple[Tensor, Tensor, Tensor]
Tensors = dict[str, Tensor]


def floats(head: Path) -> dict[str, Tensor]:
    tensors = load_file(head / "model.safetensors")
    return {
        name: value.float() if value.is_floating_point() else value
        for name, value in tensors.items()
    }


def causal(length: int) -> Tensor:
    return torch.full((1, 1, length, length), torch.finfo(torch.float32).min).triu(1)


def read_config(head: Path) -> dict[str, Any]:
    return json.loads((head / "config.json").read_text())


def ids_of(tensors: dict[str, Tensor], vocabulary: int) -> Tensor:
    offsets = tensors.get("d2t", torch.zeros(vocabulary, dtype=torch.int64))
    return offsets.long() + torch.arange(len(offsets))


def package(place: Path, name: str, *folders: str) -> None:
    """Makes a checkout's package importable without its __init__ files running."""
    if not place.is_dir():
        raise FileNotFoundError(f"no sources of {name}")
    for folder in ("", *folders):
        module = ModuleType(".".join((name, folder)).rstrip("."))
        module.__path__ = [str(place / name / folder.replace(".", "/"))]
        sys.modules.setdefault(module.__name__, module)


def sglang(request: dict[str, Any], head: Path, inputs: Tensors) -> Steps:
    """Its rules, written anew in head_loaders.py."""
    from head_loaders import load_sglang

    config = read_config(head)
    model = load_sglang(config, floats(head), inputs, request["captured"])
    first, feedback = model(model.fuse(inputs["states"]), inputs["tokens"])
    return first, model(feedback, inputs["again"])[0], model.ids


@functools.cache
def trtllm_loaders(sources: str) -> Any:
    from engine_loaders import Loaders

    return Loaders(Path(sources))


def trtllm(request: dict[str, Any], head: Path, inputs: Tensors) -> Steps:
    loaders = trtllm_loaders(request["sources"])
    return loaders.two_steps(head, request["captured"], floats(head), inputs)


def torchspec(request: dict[str, Any], head: Path, inputs: Tensors) -> Steps:
    package(
        Path(request["sources"]) / "TorchSpec",
        "torchspec",
        "models",
        "models.draft",
        "models.ops",
        "utils",
    )
    sys.modules.setdefault(
        "torchspec.utils.wandb", ModuleType("torchspec.utils.wandb")
    )  # a service it reports to
    auto = importlib.import_module("torchspec.models.draft.auto")
    config = auto.AutoDraftModelConfig.from_file(str(head / "config.json"))
    model = auto.AutoEagle3DraftModel.from_config(config).float()
    model.load_state_dict(floats(head), strict=True)
    length = len(inputs["tokens"])

    def step(x: Tensor, tokens: Tensor) -> Tensor:
        embedded = model.embed_input_ids(tokens[None])
        return model.backbone(embedded, x, causal(length), torch.arange(length)[None])[0]

    y = step(model.project_hidden_states(inputs["states"][None]), inputs["tokens"])
    again = step(y, inputs["again"])
    ids = ids_of(floats(head), config.vocab_size)
    return model.compute_logits(y)[0], model.compute_logits(again)[0], ids


def specforge(request: dict[str, Any], head: Path, inputs: Tensors) -> Steps:
    package(Path(request["sources"]) / "SpecForge", "specforge", "modeling", "modeling.draft")
    from transformers import LlamaConfig

    draft = importlib.import_module("specforge.modeling.draft.llama3_eagle")
    config = LlamaConfig.from_pretrained(head)
    model = draft.LlamaForCausalLMEagle3(config, attention_backend="sdpa").float()
    model.load_state_dict(floats(head), strict=True)
    length, flag = len(inputs["tokens"]), read_config(head).get("norm_output", False)

    def step(x: Tensor, tokens: Tensor) -> Tensor:
        embedded = model.embed_input_ids(tokens[None])
        return model.backbone(embedded, x, [[], []], causal(length), torch.arange(length)[None])

    y = step(model.project_hidden_states(inputs["states"][None]), inputs["tokens"])
    # since its change 879 the state that is fed back is the normed one; this checkout feeds back y
    again = step(model.norm(y) if flag else y, inputs["again"])
    return (
        model.compute_logits(y)[0],
        model.compute_logits(again)[0],
        ids_of(floats(head), config.vocab_size),
    )


def safeailab(request: dict[str, Any], head: Path, inputs: Tensors) -> Steps:
    package(Path(request["sources"]) / "EAGLE", "eagle", "model")
    from transformers import LlamaConfig

    nets = importlib.import_module("eagle.model.cnets")
    config = LlamaConfig.from_pretrained(head)
    config.pretraining_tp, config.rope_scaling = 1, None  # as its own config class has them
    config.rope_theta = read_config(head)["rope_theta"]
    model = nets.Model(config).float()
    missing, unexpected = model.load_state_dict(floats(head), strict=False)
    # its class holds both maps; ea_model.py deletes them where the vocabulary is not pruned
    if unexpected or set(missing) - {"embed_tokens.weight", "d2t", "t2d"}:
        raise RuntimeError(f"missing {missing}, unexpected {unexpected}")
    model.embed_tokens.weight.data = inputs[
        "embed_tokens.weight"
    ]  # which it reads from the target's files
    y = model(inputs["states"][None], inputs["tokens"][None])
    again = model(y, inputs["again"][None])
    logits = [model.lm_head(model.norm(value))[0] for value in (y, again)]
    return logits[0], logits[1], ids_of(floats(head), config.vocab_size)


def speculators(request: dict[str, Any], head: Path, inputs: Tensors) -> Steps:
    from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig

    config = Eagle3SpeculatorConfig.from_pretrained(head)
    config.transformer_layer_config._attn_implementation = "eager"
    model = Eagle3DraftModel(config).float()
    missing, unexpected = model.load_state_dict(floats(head), strict=False)
    if unexpected or {name.partition(".")[0] for name in missing} - {
        "verifier_norm",
        "verifier_lm_head",
        "d2t",
        "t2d",
    }:
        raise RuntimeError(f"missing {missing}, unexpected {unexpected}")
    length = len(inputs["tokens"])
    positions = torch.arange(length)[None]

    def step(x: Tensor, tokens: Tensor) -> Tensor:
        both = torch.cat((model.embed_tokens(tokens[None]), x), -1)
        rope = model.rotary_emb(both, positions)
        return model.layers[0](
            both, attention_mask=causal(length), position_ids=positions, position_embeddings=rope
        )

    states = inputs["states"][None]
    if getattr(model, "input_norm", None) is not None:
        states = model.input_norm(states)
    if model.fc_norm is not None:
        parts = states.chunk(len(model.fc_norm), -1)
        states = torch.cat(
            [norm(part) for norm, part in zip(model.fc_norm, parts, strict=True)], -1
        )
    y = step(model.fc(states), inputs["tokens"])
    normed = model.norm(y)
    again = step(normed if config.norm_output else y, inputs["again"])
    logits = [model.lm_head(value)[0] for value in (normed, model.norm(again))]
    return logits[0], logits[1], ids_of(floats(head), config.transformer_layer_config.vocab_size)


class PlainAttention(torch.nn.Module):
    """vLLM's attention layer without its cache: causal, over the rows of one call."""

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        **_: Any,
    ) -> None:
        super().__init__()
        self.heads, self.size, self.scale, self.kv_heads = (
            num_heads,
            head_size,
            scale,
            num_kv_heads or num_heads,
        )

    def forward(self, query: Tensor, key: Tensor, value: Tensor, **_: Any) -> Tensor:
        from head_loaders import attend

        q = query.view(-1, self.heads, self.size)
        k, v = (part.view(-1, self.kv_heads, self.size) for part in (key, value))
        return attend(q, k, v, self.scale)


class PlainLatentAttention(torch.nn.Module):
    """vLLM's MLA layer without a cache: it gets query, normed latent and rotated key."""

    def __init__(self, **settings: Any) -> None:
        super().__init__()
        self.settings = settings
        self.layer_name = settings.get("prefix", "")

    def forward(self, q: Tensor, latent: Tensor, k_rope: Tensor, **_: Any) -> Tensor:
        from head_loaders import attend

        heads, nope, value = (
            self.settings[key] for key in ("num_heads", "qk_nope_head_dim", "v_head_dim")
        )
        kv = self.settings["kv_b_proj"](latent)[0].view(-1, heads, nope + value)
        k_rope = k_rope.view(-1, 1, k_rope.shape[-1]).expand(-1, heads, -1)
        k = torch.cat((kv[..., :nope], k_rope), -1)
        return attend(q.view(-1, heads, q.shape[-1]), k, kv[..., nope:], self.settings["scale"])


def vllm(request: dict[str, Any], head: Path, inputs: Tensors) -> Steps:
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.utils import process_weights_after_loading
    from vllm.model_executor.models import ModelRegistry

    settings = _vllm_settings(request["target"], str(head))
    with set_current_vllm_config(settings):
        _vllm_parallel()
        import vllm.model_executor.layers.mla as mla
        import vllm.model_executor.models.llama as llama

        llama.Attention, mla.MLAAttention = PlainAttention, PlainLatentAttention
        draft = settings.speculative_config.draft_model_config
        cls, _ = ModelRegistry.resolve_model_cls(draft.architectures, draft)
        model = cls(vllm_config=settings)
        model.load_weights(load_file(head / "model.safetensors").items())
        if not getattr(model, "has_own_embed_tokens", False):
            model.model.embed_tokens.weight.data.copy_(inputs["embed_tokens.weight"])
        if not getattr(model, "has_own_lm_head", False):
            model.lm_head.weight.data.copy_(inputs["lm_head.weight"])
        process_weights_after_loading(model, draft, torch.device("cpu"))
        positions = torch.arange(len(inputs["tokens"]))
        x = model.combine_hidden_states(inputs["states"])
        normed, feedback = model(inputs["tokens"], positions, x)
        again, _ = model(inputs["again"], positions, feedback)
        logits = [model.compute_logits(value) for value in (normed, again)]
    offsets = model.draft_id_to_target_id
    ids = (
        torch.arange(logits[0].shape[1])
        if offsets is None
        else torch.arange(len(offsets)) + offsets
    )
    return logits[0][:, ids], logits[1][:, ids], ids


def _vllm_settings(target: str, head: str) -> Any:
    from vllm.engine.arg_utils import EngineArgs

    speculative = {"model": head, "method": "eagle3", "num_speculative_tokens": 3}
    arguments = EngineArgs(
        model=target,
        dtype="float32",
        enforce_eager=True,
        skip_tokenizer_init=True,
        speculative_config=speculative,
        max_model_len=512,
        trust_remote_code=False,
    )
    return arguments.create_engine_config()


def _vllm_parallel() -> None:
    from vllm.distributed import parallel_state

    if not parallel_state.model_parallel_is_initialized():
        place = f"file:///tmp/head-classes-{os.getpid()}"
        parallel_state.init_distributed_environment(1, 0, place, 0, "gloo")
        parallel_state.initialize_model_parallel(1, 1)


LOADERS: dict[str, Callable[[dict[str, Any], Path, Tensors], Steps]] = {
    "trtllm": trtllm, "sglang": sglang, "torchspec": torchspec, "specforge": specforge,
    "safeailab": safeailab, "speculators": speculators, "vllm": vllm,
}  # fmt: skip


@torch.no_grad()
def answer(request: dict[str, Any]) -> dict[str, str]:
    try:
        inputs = load_file(request["inputs"])
        first, second, ids = LOADERS[request["loader"]](request, Path(request["head"]), inputs)
    except Exception as error:  # whatever another project raises is the answer
        return {"why": f"{type(error).__name__}: {error}"[:2000]}
    tensors = {"first": first, "second": second, "ids": ids}
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, request["output"])
    return {"why": ""}


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    torch.set_num_threads(1)
    for line in sys.stdin:
        with contextlib.redirect_stdout(sys.stderr):
            found = answer(json.loads(line))
        print(json.dumps(found), flush=True)
