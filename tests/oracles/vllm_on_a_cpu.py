"""What vLLM's CPU wheel lacks for kimi-nano, as a plug-in of vLLM (group vllm.general_plugins).

Latent attention of its sizes, sampling with drafts, and, with TRTSPEC_ORACLE_NVFP4=1, NVFP4 in
float32 by vLLM's own emulation. `register` is called in every process of the server.
"""

import os
from typing import Any


def register() -> None:
    latent_attention()
    sampled_drafts()
    if os.environ.get("TRTSPEC_ORACLE_NVFP4") == "1":
        nvfp4_experts()


def latent_attention() -> None:
    """Replaces the CPU backend's decode, for 512 + 64 latent elements, by plain PyTorch.

    It takes any number of them.
    """
    import torch
    from vllm.model_executor.layers.attention import mla_attention
    from vllm.v1.attention.backends.mla import cpu_mla

    torch.cpu._is_amx_tile_supported = lambda: (
        False
    )  # vLLM prefers AMX where a processor has it: no float32 there
    sizes = staticmethod(lambda: [96, 320, 576])
    mla_attention.MLACommonBackend.get_supported_head_sizes = sizes
    cpu_mla.CPUMLABackend.get_supported_head_sizes = sizes

    def forward_mqa(self: Any, q: Any, kv_cache: Any, attn_metadata: Any, layer: Any) -> Any:
        q = torch.cat(q, dim=-1) if isinstance(q, tuple) else q
        tables, lengths = (
            attn_metadata.decode.block_table.long(),
            attn_metadata.decode.seq_lens.tolist(),
        )
        block = kv_cache.shape[1]
        out = q.new_zeros(q.shape[0], q.shape[1], self.kv_lora_rank)
        for row, length in enumerate(lengths):
            if length > 0:
                kept = (
                    kv_cache[tables[row, : -(-length // block)]]
                    .reshape(-1, kv_cache.shape[-1])[:length]
                    .float()
                )
                weights = torch.softmax(q[row].float() @ kept.T * self.scale, dim=-1)
                out[row] = (weights @ kept[:, : self.kv_lora_rank]).to(q.dtype)
        return out, None

    cpu_mla.CPUMLAImpl.forward_mqa = forward_mqa


def sampled_drafts() -> None:
    """Repairs sampling with drafts.

    The wheel fills each draft's temperature, top_k and top_p into a copy, so that sampling reads
    memory that was never written. Greedy answers in the same batch are damaged too.
    """
    from vllm.v1.sample import rejection_sampler

    def expand(
        x: Any, cu_num_tokens: Any, num_tokens: int, replace_from: int = 0, replace_to: int = 0
    ) -> Any:
        counts = cu_num_tokens.diff(prepend=cu_num_tokens.new_zeros(1))
        expanded = x.repeat_interleave(counts, output_size=num_tokens)
        return (
            expanded.masked_fill(expanded == replace_from, replace_to)
            if replace_from != replace_to
            else expanded
        )

    rejection_sampler.expand_batch_to_tokens = expand


def nvfp4_experts() -> None:
    """Computes NVFP4 experts and linears by vLLM's reference functions: a CPU has no kernel."""
    import torch
    import torch.nn.functional as F
    from vllm.model_executor.kernels import linear
    from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase
    from vllm.model_executor.layers.quantization import modelopt
    from vllm.model_executor.layers.quantization.utils import nvfp4_emulation_utils as emulation
    from vllm.platforms import PlatformEnum

    dtypes = classmethod(lambda cls: [torch.bfloat16, torch.float16, torch.float32])
    for base in modelopt.ModelOptNvFp4Config.__mro__[:-1]:
        if "get_supported_act_dtypes" in vars(base) or base is modelopt.ModelOptNvFp4Config:
            base.get_supported_act_dtypes = dtypes
    linear._POSSIBLE_NVFP4_KERNELS[PlatformEnum.CPU] = [linear.EmulationNvFp4LinearKernel]

    def init(self: Any, quant_config: Any, moe_config: Any) -> None:
        FusedMoEMethodBase.__init__(self, moe_config)
        self.quant_config, self.use_a16, self.per_token_activation = quant_config, False, False
        self.use_global_sf = False

    def process(self: Any, layer: Any) -> None:
        def decoded(weight: Any, scale: Any, second: Any) -> Any:
            return emulation.dequantize_to_dtype(
                weight.data, scale.data, second.data, torch.float32, swizzle=False
            )

        layer.w13_f = decoded(
            layer.w13_weight, layer.w13_weight_scale, layer.w13_weight_scale_2[:, 0]
        )
        layer.w2_f = decoded(layer.w2_weight, layer.w2_weight_scale, layer.w2_weight_scale_2)

    def apply(
        self: Any, layer: Any, x: Any, topk_weights: Any, topk_ids: Any, *_: Any, **__: Any
    ) -> Any:
        out = torch.zeros_like(x, dtype=torch.float32)
        for expert in topk_ids.unique().tolist():
            token, choice = (topk_ids == expert).nonzero(as_tuple=True)
            scale = 1.0 / layer.w13_input_scale[expert].max().reshape(())
            hidden = emulation.ref_nvfp4_quant_dequant(x[token].float(), scale, 16)
            gate, up = F.linear(hidden, layer.w13_f[expert]).chunk(2, -1)
            scale = 1.0 / layer.w2_input_scale[expert].reshape(())
            hidden = emulation.ref_nvfp4_quant_dequant(F.silu(gate) * up, scale, 16)
            share = topk_weights[token, choice, None].float()
            out.index_add_(0, token, F.linear(hidden, layer.w2_f[expert]) * share)
        return out.to(x.dtype)

    method = modelopt.ModelOptNvFp4FusedMoE
    method.__init__, method.process_weights_after_loading, method.apply = init, process, apply
    method.get_fused_moe_quant_config = lambda self, layer: None
