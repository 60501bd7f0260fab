"""How a model is spread over GPUs, and whether TensorRT-LLM can run it there at all.

If `refusals` has a reason, `plan` does not recommend the layout and `build-config` does not write
the file. Facts of one release are in releases.yaml and the schemas. The rules of this file hold for
every known release.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from trtspec.errors import Problem, UsageError
from trtspec.formats import WeightFormat
from trtspec.specs import GpuSpec, ModelSpec

KV_FRACTION = 0.9  # share of the free memory for the KV cache: the engine's default
# The share that build-config writes for attention DP, which needs memory to exchange tokens.
ATTENTION_DP_KV_FRACTION = 0.75
# The highest acceptance published for a Kimi head is 0.906 per draft token (MT-Bench math, draft
# length 3). Even at that acceptance the 17th draft token adds 2 % to the tokens of a step. Drafting
# the token takes 4 % of a plain step (B200, tensor parallel 4), without its verification.
LONGEST_DRAFT = 16


@dataclass(frozen=True)
class Layout:
    """The way in which the ranks of one server share a model.

    Args:
        gpus: number of ranks, one per GPU.
        ep: whether each expert is whole on one rank, not split over all ranks.
        attention_dp: whether every rank has the whole attention and serves requests of its own,
            so that attention is not split over its heads.
    """

    gpus: int
    ep: bool = False
    attention_dp: bool = False

    @property
    def attention_tp(self) -> int:
        """Number of ranks that share one attention layer."""
        return 1 if self.attention_dp else self.gpus

    @property
    def caches(self) -> int:
        """Number of KV caches for different requests.

        Ranks that share attention have one together.
        """
        return self.gpus if self.attention_dp else 1

    @property
    def moe(self) -> str:
        """Name of the experts' layout in the kernel tables, such as "tp4" or "ep8"."""
        return f"{'ep' if self.ep else 'tp'}{self.gpus}"

    @property
    def short(self) -> str:
        """Name for people.

        TP4 splits attention and experts, TEP4 keeps experts whole, DEP4 adds attention DP.
        """
        attention = "D" if self.attention_dp else "T"
        experts = "E" if self.ep else ""
        return f"{attention}{experts}P{self.gpus}"

    def sequences_per_rank(self, sequences: int) -> int:
        """Number of sequences on the busiest rank, out of `sequences` on the server."""
        return -(-sequences // self.caches)


def layout_of(gpus: int, tp: int | None, ep: int | None, attention_dp: bool) -> Layout:
    """Layout of one server on a machine with `gpus` GPUs.

    Raises UsageError for sizes that contradict each other or that were not measured.

    Args:
        tp: number of ranks of the server. None for all GPUs.
        ep: number of ranks that experts are spread over. None or 1 to split every expert.
    """
    tp = tp or gpus
    if tp > gpus:
        message = f"`tp_size` {tp} is more than the {gpus} GPUs"
        raise UsageError(message, "raise `gpus`, or lower `tp_size`")
    servers, remainder = divmod(gpus, tp)
    if remainder:
        message = f"{gpus} GPUs do not divide into servers of {tp}"
        raise UsageError(message, f"use `gpus` {tp * servers}")
    if ep not in (None, 1, tp):
        measured = f"`ep_size` {tp} (whole experts) and 1 (split ones)"
        message = f"experts over {ep} of {tp} ranks: only {measured} were measured"
        raise UsageError(message, f"use `ep_size` {tp} or `ep_size` 1")
    return Layout(tp, ep == tp and tp > 1, attention_dp)


def refusals(
    model: ModelSpec,
    *,
    gpu: GpuSpec | None,
    tp_size: int,
    ep_size: int | None = None,
    attention_dp: bool = False,
    tokens: int | None = None,
    draft_len: int = 0,
) -> list[Problem]:
    """Reasons why a server cannot run, or why its drafts cannot pay. Every reason is an error.

    Whether the model fits into the memory is judged in memory.py.

    Args:
        gpu: GPU of the server. None if it is not known, so that the format is judged for any GPU.
        ep_size: number of ranks that experts are spread over. None or 1 to split every expert.
        tokens: length of the longest request, prompt and answer together. None to judge no length.
    """
    capability = None
    gpu_name = ""
    if gpu:
        capability = gpu.compute_capability
        gpu_name = gpu.name.upper()
    problems = []
    refused = format_refusal(model, capability, gpu_name)
    if refused:
        problems.append(refused)
    problems += layout_refusals(model, tp_size, ep_size or 1, attention_dp)
    limit = model.max_position_embeddings
    if tokens is not None and tokens > limit:
        message = f"requests of {tokens:,} tokens are longer than the model's {limit:,} positions"
        problems.append(Problem("TS-ROUTE-LENGTH", "error", "max_seq_len", message))
    if draft_len > LONGEST_DRAFT:
        message = (
            f"a draft of {draft_len} tokens cannot pay: beyond {LONGEST_DRAFT}, even at the "
            "highest acceptance published for a Kimi head, a further token costs more time than it "
            "saves"
        )
        problems.append(Problem("TS-ROUTE-DRAFT-LENGTH", "error", "draft_len", message))
    return problems


def layout_refusals(
    model: ModelSpec, tp_size: int, ep_size: int, attention_dp: bool
) -> Iterator[Problem]:
    """Yields the reasons why a model does not divide over that many ranks."""
    heads = model.num_attention_heads
    if heads % tp_size and not attention_dp:
        message = f"the {heads} attention heads do not divide by tensor-parallel size {tp_size}"
        fitting = max(size for size in range(1, tp_size + 1) if heads % size == 0)
        remedy = f"use `tp_size` {fitting}, or `attention_dp`, which copies attention to every rank"
        yield Problem("TS-ROUTE-HEADS", "error", "tp_size", message, remedy)
    experts = model.n_routed_experts
    width = model.moe_intermediate_size
    split = tp_size // ep_size  # ranks that share an expert
    group = model.quant.group_size or 1  # weights that share a scale, which ranks cannot divide
    if tp_size % ep_size:
        message = f"experts cannot be spread evenly over {ep_size} of {tp_size} ranks"
        remedy = "give `ep_size` a divisor of `tp_size`"
    elif experts % ep_size:
        message = f"the {experts} experts do not divide by expert-parallel size {ep_size}"
        remedy = "give `ep_size` a divisor of both the experts and `tp_size`"
    elif width % split or width // split % group:
        message = f"an expert of width {width} does not divide into {split} equal parts"
        if group > 1:
            message += f" of whole groups of {group}"
        remedy = (
            f"use `ep_size` {tp_size}, which keeps every expert whole; "
            "`trtspec build-config` writes it"
        )
    else:
        return
    yield Problem("TS-ROUTE-EXPERTS", "error", "ep_size", message, remedy)


# The oldest compute capability whose tensor cores multiply this weight format in TensorRT-LLM. INT4
# is absent: its loader does not read Kimi's compressed-tensors experts (aiconfigurator PR 757, on
# 1.2.0rc5; no later support seen).
OLDEST_CAPABILITY = {
    WeightFormat.NVFP4: (10, 0),
    WeightFormat.FP8_BLOCK: (9, 0),
    WeightFormat.BF16: (8, 0),
}
HOPPER = (
    "use B200, GB200, B300 or GB300. On Hopper TensorRT-LLM runs the Kimi targets with FP8 weights "
    "(moonshotai/Kimi-K2-Instruct and Kimi-K2-Instruct-0905, on 8 H200 or 16 H100 and more); "
    "K2-Thinking and later exist as INT4 there, which vLLM runs (`trtspec serve TARGET --backend "
    "vllm`)"
)


def format_refusal(model: ModelSpec, capability: str | None, name: str = "") -> Problem | None:
    """Reason why weights of the model's format do not run on a GPU. None if they run.

    Args:
        capability: compute capability of the GPU, as "10.0". None for any GPU.
        name: name of the GPU for the message, "" if it is not known.
    """
    oldest = OLDEST_CAPABILITY.get(model.quant.format)
    if oldest is None:
        message = (
            "TensorRT-LLM does not load Kimi's native INT4 weights "
            "(reported for 1.2.0rc5; no later support seen)"
        )
        remedy = (
            "run `trtspec quantize` to NVFP4, or "
            "serve it with vLLM (`trtspec serve TARGET --backend vllm`)"
        )
        oldest_for_nvfp4 = OLDEST_CAPABILITY[WeightFormat.NVFP4]
        if capability is not None and _parse_capability(capability) < oldest_for_nvfp4:
            remedy = HOPPER
        return Problem("TS-ROUTE-INT4", "error", "target", message, remedy)
    if capability is None or _parse_capability(capability) >= oldest:
        return None
    subject = f"compute capability {capability}"
    if name:
        subject = f"{name}, {subject},"
    message = (
        f"{subject} has no tensor cores for {model.quant.format} weights, which TensorRT-LLM runs "
        f"from {'.'.join(map(str, oldest))} on"
    )
    return Problem("TS-ROUTE-GPU", "error", "gpu", message, HOPPER)


def _parse_capability(capability: str) -> tuple[int, int]:
    """Major and minor number of a compute capability such as "10.0"."""
    major, _, minor = capability.partition(".")
    return int(major), int(minor or 0)


EVERY_FORMAT = frozenset(OLDEST_CAPABILITY)
HOPPER_GPUS = ((9, 0),)
BLACKWELL_GPUS = ((10, 0), (10, 3))
BLACKWELL_AND_WORKSTATIONS = (*BLACKWELL_GPUS, (12, 0), (12, 1))
# TensorRT-LLM's MoE kernels, each with the weight formats and compute capabilities that its
# `can_implement` accepts, and the source. A format that a kernel leaves to CUTLASS with a warning
# counts as accepted (create_moe.py).
EXPERT_KERNELS = {
    "TRTLLM": (EVERY_FORMAT, BLACKWELL_GPUS, "fused_moe_trtllm_gen.py"),
    "CUTEDSL": (
        EVERY_FORMAT,
        BLACKWELL_AND_WORKSTATIONS,
        "fused_moe_cute_dsl.py, for 12.x fused_moe_cute_dsl_b12x.py",
    ),
    "DEEPGEMM": (
        {WeightFormat.FP8_BLOCK},
        BLACKWELL_GPUS,
        "fused_moe_deepgemm.py, Dynamo pull request 8410",
    ),
    "DENSEGEMM": ({WeightFormat.NVFP4}, BLACKWELL_GPUS, "fused_moe_densegemm.py"),
    "TRITON": ({WeightFormat.BF16}, HOPPER_GPUS, "fused_moe_triton.py"),
    "MARLIN": ({WeightFormat.NVFP4}, ((8, 9), *HOPPER_GPUS), "fused_moe_marlin.py"),
    "MEGAMOE_DEEPGEMM": (set[WeightFormat](), (), "mega_moe_deepgemm.py"),  # MXFP4 weights
}


def kernel_refusal(kernel: str, format: WeightFormat | None, capability: str | None) -> str | None:
    """Reason why a MoE kernel does not run experts of a format on a GPU.

    None if there is no reason.

    A kernel, `format` or `capability` that is not known, or None, is not judged.
    """
    if kernel not in EXPERT_KERNELS:
        return None
    formats, capabilities, source = EXPERT_KERNELS[kernel]
    if format in EVERY_FORMAT and format not in formats:
        loaded = " and ".join(sorted(formats)) or "MXFP4"  # the only format without a WeightFormat
        return f"the {kernel} kernels load {loaded} experts; these are {format} ({source})"
    if capability and capabilities and _parse_capability(capability) not in capabilities:
        listed = ", ".join(f"{major}.{minor}" for major, minor in capabilities)
        message = f"the {kernel} kernels are for compute capabilities {listed}"
        return f"{message}; this GPU has {capability} ({source})"
    return None
