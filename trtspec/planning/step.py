"""Times of one decode step, of verifying k + 1 tokens per sequence, and of drafting them.

A step is layers x (attention + shared expert + router + routed experts + collectives) + dense
layers + lm_head. Verifying k + 1 tokens runs the same kernels on k + 1 times the tokens. It costs
more than one token because more distinct experts are read. The latent cache is read once for all k
+ 1 tokens. Norms and other element-wise kernels, sampling, the host, and overlap between kernels
are left out.

Latencies are measured on one GPU (data/kernels), looked up and interpolated. Nothing is fitted.
Formula and tables: docs/plan-model.md.
"""

from __future__ import annotations

import bisect
import json
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple, NotRequired, TypedDict

from trtspec.data_files import DATA
from trtspec.formats import KV_ELEMENT_BYTES
from trtspec.planning.layout import Layout
from trtspec.specs import GpuSpec, HeadSpec, ModelSpec

ROUTING = "power_law_1.01"  # how tokens choose experts in the tables
HEADS = 64  # attention heads of every Kimi-K2; the tables are keyed by the ranks that share them
# MoE kernels by preference: the first one that was measured for a format is used.
MOE_KERNELS = ("TRTLLM", "CUTLASS", "DEEPGEMM", "MARLIN")
# share of the peak bandwidth that streaming kernels reach (aiconfigurator systems/*.yaml)
BANDWIDTH_SHARE = 0.8
LAUNCH_US = 3.0  # microseconds, the least time of one kernel (same source)
QUERY_TILE = 128  # rows (queries x local heads) for which the attention kernel reads the cache once
EMPTY_CONTEXT = 2  # tokens; the shortest context in the tables


@dataclass(frozen=True)
class StepModel:
    """Times of a server's decode steps, in microseconds.

    Args:
        head: shapes of the draft head. None for plain decoding.
        kernels: latencies of the GPU's kernels.
        context: number of tokens that a sequence holds, on average over its answer.
        host_us: time of the host in every step, in microseconds.
    """

    model: ModelSpec
    head: HeadSpec | None
    layout: Layout
    kernels: Kernels
    context: int
    host_us: float = 0.0

    def step(self, sequences: int, queries: int = 1) -> float:
        """Time of one target step, in microseconds, for `queries` tokens of each sequence."""
        return sum(self.times_by_kernel(sequences, queries).values())

    def speculative_step(self, sequences: int, length: int) -> float:
        """Time to draft `length` tokens per sequence and verify them, in microseconds."""
        return self.step(sequences, length + 1) + self.draft(sequences, length)

    def cost_ratio(self, sequences: int, length: int) -> float:
        """Time of a speculative step divided by the time of a plain step.

        It is also the acceptance length at which speculation neither wins nor loses.
        """
        return self.speculative_step(sequences, length) / self.step(sequences)

    def times_by_kernel(self, sequences: int, queries: int) -> dict[str, float]:
        """Times of one target step by kernel, in microseconds, each summed over all layers.

        Args:
            sequences: number of sequences on the server.
            queries: number of tokens per sequence that the step computes.
        """
        model = self.model
        kernels = self.kernels
        ranks = self.layout.attention_tp
        layers = model.num_hidden_layers
        dense_layers = model.first_k_dense_replace
        moe_layers = layers - dense_layers
        tokens = sequences * queries
        rank_sequences = self.layout.sequences_per_rank(sequences)
        rank_tokens = rank_sequences * queries
        attention = kernels.attention(
            ranks, rank_sequences, rank_tokens, self.context, self.cache_bytes
        )
        shared = 0.0
        if model.n_shared_experts:
            shared_width = model.n_shared_experts * model.moe_intermediate_size / ranks
            shared = self._mlp(rank_tokens, shared_width)
        return {
            "attention": layers * attention,
            "experts": moe_layers * kernels.moe(self.layout.moe, tokens),
            "shared": moe_layers * shared,
            "router": moe_layers * kernels.from_hidden(rank_tokens, model.n_routed_experts),
            "collectives": self._collectives(tokens),
            "dense": dense_layers * self._mlp(rank_tokens, model.intermediate_size / ranks),
            "lm_head": kernels.from_hidden(rank_tokens, model.vocab_size / ranks),
            "host": self.host_us,
        }

    @property
    def cache_bytes(self) -> int:
        """Size of one element of the KV cache, in bytes."""
        return KV_ELEMENT_BYTES[self.model.quant.kv_cache or "bf16"]

    def _mlp(self, tokens: int, width: float) -> float:
        """Time of one gated MLP of intermediate size `width` on one rank, in microseconds."""
        return self.kernels.from_hidden(tokens, 2 * width) + self.kernels.to_hidden(tokens, width)

    def _collectives(self, tokens: int) -> float:
        """Time of all exchanges between ranks in one target step, in microseconds.

        Each layer has two all-reduces. With attention DP all tokens are exchanged before and after
        the experts of a layer, which takes as long as one all-reduce.
        """
        elements = tokens * self.model.hidden_size
        allreduce = self.kernels.allreduce(self.layout.gpus, elements)
        layers = self.model.num_hidden_layers
        if self.layout.attention_dp:
            return (layers - self.model.first_k_dense_replace) * allreduce
        return 2 * layers * allreduce

    def draft(self, sequences: int, length: int) -> float:
        """Time to draft `length` tokens per sequence, in microseconds. 0 without a head.

        The head's first pass is over the tokens just verified. Each further pass is over one token.
        """
        head = self.head
        if head is None or length == 0:
            return 0.0
        rank_sequences = self.layout.sequences_per_rank(sequences)
        verified = rank_sequences * (length + 1)
        state_width = head.target_hidden_size / self.layout.attention_tp
        fusion = head.num_aux * self.kernels.to_hidden(verified, state_width)
        first_pass = self._draft_pass(head, rank_sequences, verified)
        further_passes = (length - 1) * self._draft_pass(head, rank_sequences, rank_sequences)
        return fusion + first_pass + further_passes

    def _draft_pass(self, head: HeadSpec, sequences: int, tokens: int) -> float:
        """Time of one pass of the head over `tokens` tokens of all sequences, in microseconds.

        Logits are computed for one token per sequence.
        """
        ranks = self.layout.attention_tp
        if head.is_mla:
            attention = self._mla_draft_attention(head, sequences, tokens)
        else:
            attention = self._mha_draft_attention(head, sequences, tokens)
        mlp = self._mlp(tokens, head.intermediate_size / ranks)
        logits = self.kernels.from_hidden(sequences, head.draft_vocab_size / ranks)
        # one after the attention, one after the MLP, one to find the best token over all ranks
        collectives = 3 * self.kernels.allreduce(ranks, tokens * head.hidden_size)
        return attention + mlp + logits + collectives

    def _mla_draft_attention(self, head: HeadSpec, sequences: int, tokens: int) -> float:
        """Time of an MLA head's attention, in microseconds.

        It is the target's module with a second down-projection, because the head's input is twice
        as wide.
        """
        latent_width = head.q_lora_rank + head.kv_lora_rank + head.qk_rope_head_dim
        down_projection = self.kernels.from_hidden(tokens, latent_width)
        module = self.kernels.attention(
            self.layout.attention_tp, sequences, tokens, self.context, self.cache_bytes
        )
        return module + down_projection

    def _mha_draft_attention(self, head: HeadSpec, sequences: int, tokens: int) -> float:
        """Time of an MHA head's attention, in microseconds.

        It is the time of the projections, and of reading the head's cache at the bandwidth of
        kernels.
        """
        ranks = self.layout.attention_tp
        query_width = head.num_attention_heads * head.head_dim / ranks
        key_value_width = 2 * head.num_key_value_heads * head.head_dim / ranks
        # twice, because the input is twice as wide as the hidden size
        projections = 2 * self.kernels.from_hidden(tokens, query_width + key_value_width)
        output = self.kernels.to_hidden(tokens, query_width)
        cache = sequences * self.context * key_value_width * self.cache_bytes
        return projections + output + self.kernels.stream(cache) + LAUNCH_US

    def prefill(self, tokens: int, prompts: int = 1) -> float:
        """Time to compute `prompts` prompts of `tokens` tokens each at once, in microseconds.

        The head's own prefill is left out. With attention DP every rank computes the attention of
        the prompts that it serves.
        """
        prompts_per_rank = self.layout.sequences_per_rank(prompts)
        attention = self.kernels.prefill_attention(self.layout.attention_tp, tokens)
        times = self.times_by_kernel(prompts, tokens)
        times["attention"] = self.model.num_hidden_layers * (prompts_per_rank * attention)
        # a prompt needs logits of its last token alone, and a long step hides the host's time
        return sum(time for kernel, time in times.items() if kernel not in ("lm_head", "host"))


class Series(NamedTuple):
    """Measured values `ys` at ascending quantities `xs`."""

    xs: tuple[float, ...]
    ys: tuple[float, ...]


def interpolate(series: Series, x: float) -> float:
    """Value of a series at x, linear between measured points.

    It is constant below the first point. Beyond the last point it continues with the last slope.
    """
    xs, ys = series
    if x <= xs[0] or len(xs) == 1:
        return ys[0]
    right = min(bisect.bisect_left(xs, x), len(xs) - 1)
    left = right - 1
    return ys[left] + (ys[right] - ys[left]) * (x - xs[left]) / (xs[right] - xs[left])


class Grid(NamedTuple):
    """Measured values over two quantities: a series for each of the ascending quantities `xs`."""

    xs: tuple[float, ...]
    rows: tuple[Series, ...]

    def row(self, x: float) -> Series | None:
        """Series measured at exactly x. None if there is no such series."""
        return self.rows[self.xs.index(x)] if x in self.xs else None


def interpolate_twice(grid: Grid, outer: float, inner: float) -> float:
    """Value of a grid, along each series first, and between the two series that enclose `outer`."""
    right = min(max(1, bisect.bisect_left(grid.xs, outer)), len(grid.xs) - 1)
    enclosing = slice(right - 1, right + 1)
    values = tuple(interpolate(row, inner) for row in grid.rows[enclosing])
    return interpolate(Series(grid.xs[enclosing], values), outer)


class KernelTables(TypedDict):
    """The measured latencies of a GPU, in microseconds.

    Args:
        source: source of the tables without one of their own.
        same_links_as: name of a GPU with the same links between GPUs.
        moe: by weight format and kernel, the kernel's tables by routing, and their `source`.
        mla_decode: tables by `tpN` for N ranks that share one attention layer.
        mla_prefill: series by `tpN`, too.
    """

    source: str
    same_links_as: NotRequired[str]
    moe: dict[str, dict[str, dict[str, Any]]]
    mla_decode: dict[str, Grid]
    mla_prefill: dict[str, Series]
    allreduce: Grid
    gemm_from_hidden: Grid
    gemm_to_hidden: Grid


@dataclass(frozen=True)
class Kernels:
    """Latencies of a GPU's kernels, in microseconds.

    Args:
        tables: measured latencies of the GPU, by kernel.
        format: weight format of the experts.
        moe_kernel: name of the MoE backend in the engine.
        routing: name of the distribution of tokens over experts in the tables.
    """

    gpu: GpuSpec
    tables: KernelTables
    format: str
    moe_kernel: str
    routing: str = ROUTING

    @property
    def experts(self) -> dict[str, Any]:
        """Tables of the MoE kernel by routing, with their `source`."""
        return self.tables["moe"][self.format][self.moe_kernel]

    @property
    def sources(self) -> list[str]:
        """Sources of the kernel tables, and of the MoE table in particular."""
        return [self.tables["source"], f"MoE: {self.experts['source']}"]

    def has(self, moe_layout: str, attention_ranks: int, ranks: int) -> bool:
        """Whether all kernels of a layout were measured.

        Args:
            moe_layout: name of the experts' layout in the tables, such as "ep8".
            attention_ranks: number of ranks that share one attention layer.
            ranks: number of all ranks.
        """
        has_moe = moe_layout in self.experts[self.routing]
        has_attention = f"tp{attention_ranks}" in self.tables["mla_decode"]
        # With attention DP, ranks exchange tokens by other kernels between trays, so that tables of
        # another GPU with the same links do not count.
        if attention_ranks < ranks:
            allreduce = self.tables["allreduce"].row(ranks)
        else:
            allreduce = allreduce_row(self.tables, ranks)
        has_collectives = ranks == 1 or allreduce is not None
        return has_moe and has_attention and has_collectives

    def moe(self, layout: str, tokens: int) -> float:
        """Time of one layer's routed experts on one rank, in microseconds.

        `tokens`: number of tokens of the whole group.
        """
        return interpolate(self.experts[self.routing][layout], tokens)

    def attention(
        self, ranks: int, sequences: int, tokens: int, context: int, cache_bytes: int = 1
    ) -> float:
        """Time of one MLA module on one rank, in microseconds.

        Projections take as long as with an empty cache. The cache is read once per sequence for all
        queries, if queries x local heads fit one tile of 128 rows. Each further tile reads the
        cache once more.

        Args:
            ranks: number of ranks that share the module.
            tokens: number of queries of all sequences.
            context: number of tokens that each sequence holds.
            cache_bytes: size of a cache element in bytes. The tables are for an FP8 cache, and a
                larger element takes that many times as long to read.
        """
        queries_per_tile = max(1, sequences) * ranks * QUERY_TILE
        tiles = max(1, -(-tokens * HEADS // queries_per_tile))
        table = self.tables["mla_decode"][f"tp{ranks}"]
        projections = interpolate_twice(table, EMPTY_CONTEXT, tokens)
        empty = interpolate_twice(table, EMPTY_CONTEXT, sequences)
        filled = interpolate_twice(table, context, sequences)
        read = max(0.0, filled - empty)
        return projections + read * tiles * cache_bytes

    def prefill_attention(self, ranks: int, tokens: int) -> float:
        """Time of one MLA module for one prompt of `tokens` tokens, in microseconds.

        Beyond the longest measured prompt it has the linear and quadratic cost of the last two.
        """
        measured = self.tables["mla_prefill"][f"tp{ranks}"]
        x0, x1 = measured.xs[-2:]
        y0, y1 = measured.ys[-2:]
        if tokens <= x1:
            return interpolate(measured, tokens)
        quadratic = max(0.0, (y1 / x1 - y0 / x0) / (x1 - x0))
        return tokens * (y1 / x1 + quadratic * (tokens - x1))

    def allreduce(self, ranks: int, elements: int) -> float:
        """Time of one all-reduce of BF16 elements, in microseconds.

        `has` tells whether it was measured.
        """
        if ranks == 1:
            return 0.0
        row = allreduce_row(self.tables, ranks)
        assert row is not None
        return interpolate(row, elements)

    def from_hidden(self, tokens: int, width: float) -> float:
        """Time of a BF16 linear layer from the model's width to `width`, in microseconds."""
        return interpolate_twice(self.tables["gemm_from_hidden"], tokens, width)

    def to_hidden(self, tokens: int, width: float) -> float:
        """Time of a BF16 linear layer from `width` to the model's width, in microseconds."""
        return interpolate_twice(self.tables["gemm_to_hidden"], tokens, width)

    def stream(self, size: float) -> float:
        """Time to read `size` bytes at the bandwidth that kernels reach, in microseconds."""
        return size / (BANDWIDTH_SHARE * self.gpu.memory_bandwidth) * 1e6


def kernels(gpu: GpuSpec, format: str) -> Kernels | None:
    """Kernel latencies of a GPU for weights of this format, with the preferred measured MoE kernel.

    None if nobody measured the format on the GPU.
    """
    tables = read_tables(gpu.name)
    if tables is None:
        return None
    measured = tables["moe"].get(format, {})
    for name in MOE_KERNELS:
        if name in measured:
            return Kernels(gpu, tables, format, name)
    return None


@cache
def read_tables(gpu: str) -> KernelTables | None:
    """Reads the kernel tables of a GPU. None if nobody measured its kernels."""
    path = DATA / "kernels" / f"{gpu}.json"
    if not path.is_file():
        return None
    tables: KernelTables = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=_as_table)
    return tables


def _as_table(pairs: list[tuple[str, Any]]) -> Any:
    """Makes a Series of a JSON object from numbers to numbers, or a Grid from numbers to Series.

    Any other object is a dict. tools/kernel_tables.py writes the numbers in ascending order.
    """
    if not pairs or not pairs[0][0].isdigit():
        return dict(pairs)
    keys = tuple(float(key) for key, _ in pairs)
    values = tuple(value for _, value in pairs)
    if isinstance(values[0], Series):
        return Grid(keys, values)
    return Series(keys, values)


def allreduce_row(tables: KernelTables, ranks: int) -> Series | None:
    """Latencies of one all-reduce over that many ranks, by number of elements.

    If this GPU was not measured, they are of a GPU with the same links. None if neither was
    measured.
    """
    row = tables["allreduce"].row(ranks)
    if row is None and "same_links_as" in tables:
        twin = read_tables(tables["same_links_as"])
        if twin is not None:
            row = twin["allreduce"].row(ranks)
    return row
