"""An Eagle3 head inside ModelOpt's training module.

No other file of this room imports modelopt.

part               from      why it is replaced
fc, norms, d2t     ModelOpt
attention's input  ModelOpt  (2H wide: the normed token embedding, then the normed hidden state)
export layout      ModelOpt
decoder layer      ours      ModelOpt's norms the hidden state a second time, which no server does.
                             For MLA it downloads code. Ours contains transformers' Llama or
                             DeepSeek-V3 attention.
rope scaling       ours      ModelOpt writes a YaRN block into the config of a head without YaRN.
EAGLE-3.1          ours      ModelOpt lacks it: a norm per captured state, the normed state fed
                             back.
later steps        ours      ModelOpt's masked scores grow k times longer. Ours are one matrix and k
                             diagonals.
training loop      ours      ModelOpt keeps all logits of a batch in memory. `loop.Objective` is the
                             same function.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable
from typing import Any, ClassVar
from unittest.mock import patch

import modelopt.torch.speculative as mtsp
import torch
import torch.nn.functional as F
from modelopt.torch.speculative.plugins import hf_eagle
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface, DeepseekV3Config, LlamaConfig, PreTrainedModel
from transformers.models.deepseek_v3.modeling_deepseek_v3 import (
    DeepseekV3Attention,
    DeepseekV3MLP,
    DeepseekV3RMSNorm,
    DeepseekV3RotaryEmbedding,
)
from transformers.models.llama.modeling_llama import (
    LlamaAttention,
    LlamaMLP,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
)

from trtspec.checkpoint.heads.config import architecture_config, rope_scaling
from trtspec.errors import MissingDependency, TrtspecError
from trtspec.heads.training.samples import Sample
from trtspec.specs import HeadSpec, ModelSpec

TTT_ATTENTION = "trtspec_ttt"
# Attention scores of a later training-time-test step in memory. More are computed in parts.
MAX_SCORES = 2**26
MIN_QUERIES = 16  # minimum number of queries of a part
# Type of the target stub after ModelOpt has given it the head, `eagle_module`.
TrainingModule = Any


class DraftLayer(nn.Module):
    """The decoder layer of a head: y' = x + Attn(concat(LN(E), LN(x))), y = y' + MLP(LN(y')).

    E is the token embedding and x the hidden state. ModelOpt's hook on the layer applies the two
    norms and the concat before Attn. A subclass sets `parts`, the classes of transformers for
    attention, MLP, norm and rope.
    """

    parts: ClassVar[tuple[Callable[..., Any], ...]]

    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__()
        attention, mlp, norm, rope = self.parts
        self.self_attn = attention(config, layer_idx)
        self.mlp = mlp(config)
        self.input_layernorm = norm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = norm(config.hidden_size, config.rms_norm_eps)
        # In __dict__ the rope is not a submodule, so its buffers are not part of the state dict.
        self.__dict__["rope"] = rope(config)

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: object | None = None,
        **_: object,
    ) -> Tensor:
        """Computes the residual stream [B, S, H] before the head's final norm.

        Transformers' and ModelOpt's other keyword arguments have no effect.
        """
        position_embeddings = self.__dict__["rope"](hidden_states.float(), position_ids)
        attended, _weights = self.self_attn(
            hidden_states=hidden_states,
            attention_mask=attention_mask,
            past_key_values=past_key_values,
            position_embeddings=position_embeddings,
        )
        hidden_states = hidden_states + attended
        output: Tensor = hidden_states + self.mlp(self.post_attention_layernorm(hidden_states))
        return output


class LlamaDraftLayer(DraftLayer):
    """The decoder layer of an MHA head."""

    parts = (LlamaAttention, LlamaMLP, LlamaRMSNorm, LlamaRotaryEmbedding)


class MlaDraftLayer(DraftLayer):
    """The decoder layer of an MLA head."""

    parts = (DeepseekV3Attention, DeepseekV3MLP, DeepseekV3RMSNorm, DeepseekV3RotaryEmbedding)


def ttt_attention(
    module: nn.Module,
    query: Tensor,
    key: tuple[Tensor, ...],
    value: tuple[Tensor, ...],
    attention_mask: Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    **_: object,
) -> tuple[Tensor, None]:
    """Computes the attention of training-time-test step k over the keys of the steps 0 to k.

    The states move to the next index of the sequence at each step. At step k the state at index q
    drafts for the context that ends at index q-k. So this state attends to the keys of step 0 up to
    index q-k. In each step i >= 1 the state attends to a single key, at index q-(k-i). Step 0 needs
    a full score matrix, and each later step a diagonal.

    Padding is on the right, which causal attention never reads, so `attention_mask` is not used.
    Returns [B, S, h, d], and None for the weights, as transformers' interface demands.

    Args:
        query: queries of step k, [B, h, S, d].
        key: keys of each step, k + 1 times [B, kv, S, d].
        value: values of each step, k + 1 times [B, kv, S, d].
        scaling: factor of the scores.
    """
    step = len(key) - 1
    groups = query.shape[1] // key[0].shape[1]
    if groups > 1:
        key = tuple(tensor.repeat_interleave(groups, 1) for tensor in key)
        value = tuple(tensor.repeat_interleave(groups, 1) for tensor in value)
    if step == 0:
        attended = _causal(query, key[0], value[0], scaling)
    else:
        diagonals: list[Tensor] = []
        for index in range(1, step + 1):
            shift = step - index
            diagonals += [key[index].roll(shift, 2), value[index].roll(shift, 2)]
        attended = _later_step(query * scaling, key[0], value[0], diagonals)
    return attended.transpose(1, 2), None


AttentionInterface.register(TTT_ATTENTION, ttt_attention)


def _causal(query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
    """Computes plain causal attention, [B, h, S, d of the values]."""
    # The fused kernel wants equal widths, and MLA's values are narrower than its keys.
    missing = query.shape[-1] - value.shape[-1]
    if missing > 0:
        value = F.pad(value, (0, missing))
    attended = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling)
    if missing > 0:
        attended = attended[..., :-missing]
    return attended


def _later_step(query: Tensor, key: Tensor, value: Tensor, diagonals: list[Tensor]) -> Tensor:
    """Computes the attention of a training-time-test step after the first, [B, h, S, d].

    A long sequence is computed a few queries at a time, and the backward pass computes their scores
    again. So memory grows with the length, not with its square.

    Args:
        query: scaled queries [B, h, S, d].
        key: keys of step 0, [B, h, S, d].
        value: values of step 0, [B, h, S, d].
        diagonals: keys and values of step 1, keys and values of step 2, and so on, [B, h, S, d].
            Each tensor is shifted, so that the only key a query attends to is at the query's index.
    """
    batch, heads, rows, _ = query.shape
    scores_per_row = batch * heads * rows
    if scores_per_row * rows <= MAX_SCORES:
        return _some_rows(0, query, key, value, *diagonals)
    # A quarter of MAX_SCORES, because masks, softmax and backward pass make tensors of this size.
    count = max(MIN_QUERIES, MAX_SCORES // 4 // scores_per_row)
    attended = []
    for begin in range(0, rows, count):
        end = begin + count
        span = slice(begin, end)
        seen = slice(0, min(rows, end))  # a query attends to no later key
        inputs = [query[:, :, span], key[:, :, seen], value[:, :, seen]]
        inputs += [tensor[:, :, span] for tensor in diagonals]
        attended.append(checkpoint(_some_rows, begin, *inputs, use_reentrant=False))
    return torch.cat(attended, 2)


def _some_rows(begin: int, query: Tensor, key: Tensor, value: Tensor, *diagonals: Tensor) -> Tensor:
    """Computes the attention of some queries, which start at index `begin` of the sequence.

    With n later steps, the query at index q attends to the keys of step 0 up to index q - n. In
    each later step the query attends to a single key.

    Args:
        query: scaled queries, [B, h, rows, d].
        key: keys of step 0 up to the last query's index, [B, h, columns, d].
        value: values of step 0 up to the last query's index.
        diagonals: keys and values of step 1, keys and values of step 2, and so on, shifted so that
            each query's only key is at the query's index, [B, h, rows, d].
    """
    steps = len(diagonals) // 2
    row = torch.arange(begin, begin + query.shape[2], device=query.device)
    column = torch.arange(key.shape[2], device=query.device)
    is_later = column > row[:, None] - steps
    scores = [(query @ key.transpose(2, 3)).masked_fill(is_later, -torch.inf)]
    for step, step_key in enumerate(diagonals[::2], 1):
        score = (query * step_key).sum(-1, keepdim=True)
        # The first rows of a shifted key come from the end of the sequence.
        is_absent = row < steps - step
        scores.append(score.masked_fill(is_absent[:, None], -torch.inf))
    weights = torch.softmax(torch.cat(scores, -1), dim=-1).to(query.dtype)
    count = len(column)
    attended = weights[..., :count] @ value
    for index, step_value in enumerate(diagonals[1::2], count):
        attended = attended + weights[..., index, None] * step_value
    return attended


class TargetStub(PreTrainedModel):
    """The target as ModelOpt needs it for training: embedding and lm_head, without layers.

    The layers are not needed, because the target's states are computed before.
    """

    def __init__(self, config: Any, embed: torch.Tensor, lm_head: torch.Tensor) -> None:
        super().__init__(config)
        self.model = nn.Module()
        self.model.layers = nn.ModuleList()
        # ModelOpt creates the head in this dtype. Master weights must be float32.
        self.model.dtype = torch.float32
        self.embed_tokens = nn.Embedding.from_pretrained(embed)
        self.lm_head = nn.Linear(lm_head.shape[1], lm_head.shape[0], bias=False, device="meta")
        self.lm_head.weight = nn.Parameter(lm_head, requires_grad=False)

    def forward(self, *_: Any, **__: Any) -> Any:
        """Raises TrtspecError, because the stub cannot compute states."""
        message = "the target's states must be computed before training"
        raise TrtspecError(message, "pass features for every batch")


def build(
    spec: HeadSpec,
    target: ModelSpec,
    embed: torch.Tensor,
    lm_head: torch.Tensor,
    *,
    target_ids: torch.Tensor | None = None,
) -> TrainingModule:
    """Builds ModelOpt's training module with a new float32 head, on the device of `lm_head`.

    The head's own lm_head starts as a copy of the target's rows. The module keeps these rows in
    `target_rows` [Vd, H].

    Args:
        spec: specification of the head.
        embed: frozen embedding of the target, [V, H].
        lm_head: frozen lm_head weight of the target, [V, H].
        target_ids: int64 [Vd], target id of each draft id, ascending. None: the whole vocabulary.
    """
    stub = TargetStub(_stub_config(spec, target), embed, lm_head)
    options = {
        "eagle_decoder_type": "kimik2" if spec.is_mla else "llama",
        "eagle_offline": True,
        "eagle_use_torch_compile": False,
        "eagle_export_rope_scaling": {},
        "eagle_architecture_config": _eagle_architecture(spec, target),
    }
    # ModelOpt looks up its decoder class by these two names. Its own class for MLA downloads code.
    with (
        patch.object(hf_eagle, "LlamaDecoderLayer", LlamaDraftLayer),
        patch.object(hf_eagle, "_setup_kimi_k2_decoder", lambda: MlaDraftLayer),
        _silence(),
    ):
        model = mtsp.convert(stub, [("eagle", options)])
    rows = lm_head if target_ids is None else lm_head[target_ids]
    _finish_head(model.eagle_module, spec, rows, target_ids)
    model.target_rows = rows.detach()
    model.train()
    return model


def _stub_config(spec: HeadSpec, target: ModelSpec) -> Any:
    """Returns the transformers config of the target stub."""
    config_class = DeepseekV3Config if spec.is_mla else LlamaConfig
    return config_class(
        vocab_size=target.vocab_size,
        hidden_size=target.hidden_size,
        num_hidden_layers=target.num_hidden_layers,
        max_position_embeddings=target.max_position_embeddings,
        rms_norm_eps=target.rms_norm_eps,
        rope_parameters=rope_scaling(spec.rope),
        tie_word_embeddings=False,
        **_special_ids(target),
    )


def _special_ids(target: ModelSpec) -> dict[str, Any]:
    """Returns the target's special token ids under their keys in a transformers config."""
    return {
        "bos_token_id": target.bos_token_id,
        "eos_token_id": list(target.eos_token_ids) or None,
        "pad_token_id": target.pad_token_id,
    }


def _eagle_architecture(spec: HeadSpec, target: ModelSpec) -> dict[str, Any]:
    """Returns the head's config as ModelOpt reads it (`eagle_architecture_config`)."""
    return {
        **architecture_config(spec),
        **_special_ids(target),
        "rope_scaling": rope_scaling(spec.rope),
        "rope_theta": spec.rope.theta,
        "has_lm_head": True,
        "use_aux_hidden_state": True,
        "use_last_layernorm": True,
        "eagle_aux_hidden_state_layer_ids": list(spec.aux_layers or target.default_aux_layers),
        "_attn_implementation": TTT_ATTENTION,
    }


def _silence() -> contextlib.redirect_stdout[io.StringIO]:
    """Discards ModelOpt's messages on stdout, which is reserved for the command's data."""
    return contextlib.redirect_stdout(io.StringIO())


def _finish_head(
    head: Any, spec: HeadSpec, rows: torch.Tensor, target_ids: torch.Tensor | None
) -> None:
    """Sets what ModelOpt's conversion leaves out: d2t, lm_head, norms of EAGLE-3.1, eps of MLA.

    Raises TrtspecError if the head is pruned and `target_ids` does not have a target id for each
    draft id.

    Args:
        head: ModelOpt's head, changed in place.
        rows: initial weight of the head's lm_head, [Vd, H].
    """
    size = spec.draft_vocab_size
    if spec.has_d2t:
        if target_ids is None or target_ids.shape != (size,):
            raise TrtspecError(f"a draft vocabulary of {size} needs that many target ids")
        head.d2t.copy_(target_ids - torch.arange(size, device=target_ids.device))
    with torch.no_grad():
        head.lm_head.weight.copy_(rows)
    # The decoder layer has its own rope. ModelOpt would compute another that is never read.
    head.rotary_emb = lambda *_: None
    attention = head.layers[0].self_attn
    eps = spec.rms_norm_eps
    if spec.is_mla:
        # These two norms have a constant eps in transformers, and the config's eps in servers.
        attention.q_a_layernorm.variance_epsilon = eps
        attention.kv_a_layernorm.variance_epsilon = eps
    if spec.fc_norm:
        norms = [
            nn.RMSNorm(spec.target_hidden_size, eps, device=rows.device)
            for _ in range(spec.num_aux)
        ]
        head.fc_norm = nn.ModuleList(norms)
        head.fc.register_forward_pre_hook(lambda _, args: (_norm_states(head.fc_norm, args[0]),))
    if spec.norm_output:
        head.register_forward_hook(lambda _, __, output: (output[0], output[0], output[2]))


def _norm_states(norms: nn.ModuleList, aux: torch.Tensor) -> torch.Tensor:
    """Applies a norm of its own to each of the n captured states in aux [B, S, n*H]."""
    states = aux.chunk(len(norms), -1)
    pairs = zip(norms, states, strict=True)
    normed = [norm(state.float()).to(state.dtype) for norm, state in pairs]
    return torch.cat(normed, -1)


def state_client(
    urls: tuple[str, ...], model: str, longest: int
) -> Callable[[Sample], torch.Tensor | None]:
    """Makes ModelOpt's client of servers that stream hidden states. Each thread needs its own.

    The returned function fetches the captured layer outputs of a sample, [S, layers + 1, H]. The
    function returns None if the server dropped the outputs. The function raises httpx.HTTPError or
    OSError if the server is unreachable, and RuntimeError if the server saw other tokens or its
    slots are too small. Raises MissingDependency if NIXL is not installed.

    Args:
        model: name of the model on the servers.
        longest: number of tokens of the longest sample.
    """
    try:
        import nixl._api  # noqa: F401
        from modelopt.torch.speculative.plugins import hf_streaming_dataset as streaming
    except ImportError as missing:
        message = f"states from a server come over NIXL ({missing})"
        raise MissingDependency(message, "install it: pip install nixl") from None
    config = streaming.EagleVllmStreamingConfig(
        server_urls=list(urls), model=model, max_seq_len=longest
    )
    with _silence():
        dataset = streaming.EagleVllmStreamingDataset([{}], tokenizer=None, config=config)

    def fetch(sample: Sample) -> torch.Tensor | None:
        # ModelOpt's client expects a loss mask. The mask of the training is made elsewhere.
        mask = torch.ones(len(sample.tokens), dtype=torch.int64)
        request = {"cid": sample.id, "token_ids": list(sample.tokens), "loss_mask": mask}
        answer = dataset._fetch(request)
        return None if answer is None else answer["hidden_states"]

    return fetch


def head_tensors(
    model: TrainingModule, dtype: torch.dtype = torch.bfloat16
) -> dict[str, torch.Tensor]:
    """Copies the head's tensors to the CPU in ModelOpt's exported layout, floats in `dtype`.

    The layout has names with `layers.0.`, and `d2t` if the vocabulary is pruned.
    """
    tensors = {}
    for name, value in model.eagle_module.state_dict().items():
        if value.is_floating_point():
            value = value.to(dtype)
        tensors[name] = value.cpu().contiguous()
    return tensors
