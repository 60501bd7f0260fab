"""Time of one decode step, of verifying k + 1 tokens per sequence, and of drafting them.

step = layers x (attention + shared expert + router + routed experts + collectives) + dense layers +
lm_head. Verifying k + 1 tokens runs the same kernels on (k + 1) times the tokens. More distinct
experts are read, which is what makes it dearer than one token. The latent cache is read once for
all of them. Not in it: norms and other element-wise kernels, sampling, the host, and overlap
between kernels. Formula and tables: docs/plan-model.md. Latencies are measured ones of one GPU
(data/kernels), looked up and interpolated. Nothing is fitted.
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

ROUTING = "power_law_1.01"
HEADS = 64  # attention heads of every Kimi-K2; the tables are keyed by the ranks that share them
# The first of them that was measured for a format is taken.
MOE_KERNELS = ("TRTLLM", "CUTLASS", "DEEPGEMM", "MARLIN")
BANDWIDTH_SHARE = 0.8  # of the peak, reached by streaming kernels (aiconfigurator systems/*.yaml)
LAUNCH_US = 3.0  # least time of one kernel (same source)
QUERY_TILE = 128  # rows (queries x local heads) for which the attention kernel reads the cache once
EMPTY_CONTEXT = 2  # tokens; the shortest context in the tables


@dataclass(frozen=True)
class StepModel:
    """Times of a server's steps in microseconds.

    `context`: tokens that a sequence holds, on average over its answer. `host_us`: time of the host
    in every step.
    """

    model: ModelSpec
    head: HeadSpec | None
    layout: Layout
    kernels: Kernels
    context: int
    host_us: float = 0.0

    def step(self, sequences: int, queries: int = 1) -> float:
        """The target's step for `queries` tokens of each of `sequences` sequences."""
        return sum(self.times_by_kernel(sequences, queries).values())

    def speculative_step(self, sequences: int, length: int) -> float:
        """Drafting `length` tokens per sequence and verifying them."""
        return self.step(sequences, length + 1) + self.draft(sequences, length)

    def cost_ratio(self, sequences: int, length: int) -> float:
        """(verify + draft) / plain step.

        At this acceptance length speculation neither wins nor loses.
        """
        return self.speculative_step(sequences, length) / self.step(sequences)

    def times_by_kernel(self, sequences: int, queries: int) -> dict[str, float]:
        """The target's step by kernel, summed over all layers."""
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
        """Bytes of one element of the KV cache."""
        return KV_ELEMENT_BYTES[self.model.quant.kv_cache or "bf16"]

    def _mlp(self, tokens: int, width: float) -> float:
        return self.kernels.from_hidden(tokens, 2 * width) + self.kernels.to_hidden(tokens, width)

    def _collectives(self, tokens: int) -> float:
        """Two all-reduces per layer.

        With attention DP all tokens are exchanged before the experts and after them. Together that
        is as dear as one all-reduce of them.
        """
        elements = tokens * self.model.hidden_size
        allreduce = self.kernels.allreduce(self.layout.gpus, elements)
        layers = self.model.num_hidden_layers
        if self.layout.attention_dp:
            return (layers - self.model.first_k_dense_replace) * allreduce
        return 2 * layers * allreduce

    def draft(self, sequences: int, length: int) -> float:
        """Drafting `length` tokens per sequence. 0 without a head.

        The head passes over the tokens just verified, then over one token at a time.
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
        """One pass of the head over `tokens` tokens, with logits for one token per sequence."""
        ranks = self.layout.attention_tp
        if head.is_mla:
            attention = self._mla_draft_attention(head, sequences, tokens)
        else:
            attention = self._mha_draft_attention(head, sequences, tokens)
        mlp = self._mlp(tokens, head.intermediate_size / ranks)
        logits = self.kernels.from_hidden(sequences, head.draft_vocab_size / ranks)
        # Of attention, of the MLP, and of the best token over all ranks.
        collectives = 3 * self.kernels.allreduce(ranks, tokens * head.hidden_size)
        return attention + mlp + logits + collectives

    def _mla_draft_attention(self, head: HeadSpec, sequences: int, tokens: int) -> float:
        """The target's module, and its down-projection once more: its input is twice as wide."""
        latent_width = head.q_lora_rank + head.kv_lora_rank + head.qk_rope_head_dim
        down_projection = self.kernels.from_hidden(tokens, latent_width)
        module = self.kernels.attention(
            self.layout.attention_tp, sequences, tokens, self.context, self.cache_bytes
        )
        return module + down_projection

    def _mha_draft_attention(self, head: HeadSpec, sequences: int, tokens: int) -> float:
        """The products of the head's own widths, and its cache at the bandwidth of kernels."""
        ranks = self.layout.attention_tp
        query_width = head.num_attention_heads * head.head_dim / ranks
        key_value_width = 2 * head.num_key_value_heads * head.head_dim / ranks
        # The input is twice as wide as the hidden size.
        projections = 2 * self.kernels.from_hidden(tokens, query_width + key_value_width)
        output = self.kernels.to_hidden(tokens, query_width)
        cache = sequences * self.context * key_value_width * self.cache_bytes
        return projections + output + self.kernels.stream(cache) + LAUNCH_US

    def prefill(self, tokens: int, prompts: int = 1) -> float:
        """`prompts` prompts of `tokens` tokens each, computed at once, without their answers.

        The head's own prefill is left out. With attention DP every rank computes the attention of
        its own prompts.
        """
        prompts_per_rank = self.layout.sequences_per_rank(prompts)
        attention = self.kernels.prefill_attention(self.layout.attention_tp, tokens)
        times = self.times_by_kernel(prompts, tokens)
        times["attention"] = self.model.num_hidden_layers * (prompts_per_rank * attention)
        return sum(time for kernel, time in times.items() if kernel not in ("lm_head", "host"))


class Series(NamedTuple):
    """Measured points, both ascending in x."""

    xs: tuple[float, ...]
    ys: tuple[float, ...]


def interpolate(series: Series, x: float) -> float:
    """Linear between measured points.

    Flat below the first point, and beyond the last in proportion to its slope.
    """
    xs, ys = series
    if x <= xs[0] or len(xs) == 1:
        return ys[0]
    right = min(bisect.bisect_left(xs, x), len(xs) - 1)
    left = right - 1
    return ys[left] + (ys[right] - ys[left]) * (x - xs[left]) / (xs[right] - xs[left])


class Grid(NamedTuple):
    """A series for each of several ascending values of another quantity."""

    xs: tuple[float, ...]
    rows: tuple[Series, ...]

    def row(self, x: float) -> Series | None:
        return self.rows[self.xs.index(x)] if x in self.xs else None


def interpolate_twice(grid: Grid, outer: float, inner: float) -> float:
    """Along each series first, then between the two series that enclose `outer`."""
    right = min(max(1, bisect.bisect_left(grid.xs, outer)), len(grid.xs) - 1)
    enclosing = slice(right - 1, right + 1)
    values = tuple(interpolate(row, inner) for row in grid.rows[enclosing])
    return interpolate(Series(grid.xs[enclosing], values), outer)


class KernelTables(TypedDict):
    """The measured latencies of a GPU.

    `moe`: by weight format and kernel, the tables of the kernel by routing and its `source`.
    `mla_decode`, `mla_prefill`: by `tpN`. `same_links_as`: a GPU with the same links between GPUs.
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
    """Latencies in microseconds. `moe_kernel` is the engine's name of the MoE backend."""

    gpu: GpuSpec
    tables: KernelTables
    format: str
    moe_kernel: str
    routing: str = ROUTING

    @property
    def experts(self) -> dict[str, Any]:
        """The tables of the MoE kernel by routing, and their `source`."""
        return self.tables["moe"][self.format][self.moe_kernel]

    @property
    def sources(self) -> list[str]:
        return [self.tables["source"], f"MoE: {self.experts['source']}"]

    def has(self, moe_layout: str, attention_ranks: int, ranks: int) -> bool:
        """Whether all kernels of such a layout were measured."""
        has_moe = moe_layout in self.experts[self.routing]
        has_attention = f"tp{attention_ranks}" in self.tables["mla_decode"]
        # The links of another GPU do not count for the exchange of tokens with attention DP, which
        # takes other kernels between trays.
        if attention_ranks < ranks:
            allreduce = self.tables["allreduce"].row(ranks)
        else:
            allreduce = allreduce_row(self.tables, ranks)
        has_collectives = ranks == 1 or allreduce is not None
        return has_moe and has_attention and has_collectives

    def moe(self, layout: str, tokens: int) -> float:
        """The routed experts of one layer on one rank, for `tokens` tokens of the whole group."""
        return interpolate(self.experts[self.routing][layout], tokens)

    def attention(
        self, ranks: int, sequences: int, tokens: int, context: int, cache_bytes: int = 1
    ) -> float:
        """One MLA module on one rank.

        Projections cost what that many tokens cost at an empty cache. The cache is read once per
        sequence for all its queries, if queries x local heads fit one tile of 128 rows, and once
        more per further tile.

        Args:
            ranks: ranks that share the module.
            tokens: queries of all sequences.
            context: tokens that each sequence holds.
            cache_bytes: bytes of a cache element. The tables are for an FP8 cache, and a larger
                element takes that many times as long to read.
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
        """One MLA module for one prompt.

        Beyond the longest measured prompt: linear and quadratic cost as in the last two.
        """
        measured = self.tables["mla_prefill"][f"tp{ranks}"]
        x0, x1 = measured.xs[-2:]
        y0, y1 = measured.ys[-2:]
        if tokens <= x1:
            return interpolate(measured, tokens)
        quadratic = max(0.0, (y1 / x1 - y0 / x0) / (x1 - x0))
        return tokens * (y1 / x1 + quadratic * (tokens - x1))

    def allreduce(self, ranks: int, elements: int) -> float:
        """One all-reduce of BF16 elements. `has` tells whether it was measured."""
        if ranks == 1:
            return 0.0
        row = allreduce_row(self.tables, ranks)
        assert row is not None
        return interpolate(row, elements)

    def from_hidden(self, tokens: int, width: float) -> float:
        """A BF16 linear layer that reads the model's width and writes `width`."""
        return interpolate_twice(self.tables["gemm_from_hidden"], tokens, width)

    def to_hidden(self, tokens: int, width: float) -> float:
        """A BF16 linear layer that reads `width` and writes the model's width."""
        return interpolate_twice(self.tables["gemm_to_hidden"], tokens, width)

    def stream(self, size: float) -> float:
        """Time to read `size` bytes at the bandwidth that kernels reach."""
        return size / (BANDWIDTH_SHARE * self.gpu.memory_bandwidth) * 1e6


def kernels(gpu: GpuSpec, format: str) -> Kernels | None:
    """The tables for weights of this format, with the first of MOE_KERNELS that they have.

    None if nobody measured the format on that GPU.
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
    """The kernel tables of a GPU. None if nobody measured its kernels."""
    path = DATA / "kernels" / f"{gpu}.json"
    if not path.is_file():
        return None
    tables: KernelTables = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=_as_table)
    return tables


def _as_table(pairs: list[tuple[str, Any]]) -> Any:
    """A Series for a mapping from numbers to numbers, a Grid for one from numbers to Series.

    Other mappings are dicts. tools/kernel_tables.py writes both in ascending order.
    """
    if not pairs or not pairs[0][0].isdigit():
        return dict(pairs)
    keys = tuple(float(key) for key, _ in pairs)
    values = tuple(value for _, value in pairs)
    if isinstance(values[0], Series):
        return Grid(keys, values)
    return Series(keys, values)


def allreduce_row(tables: KernelTables, ranks: int) -> Series | None:
    """Latencies of one all-reduce over that many ranks.

    If this GPU was not measured, the tables name a GPU with the same links. None without either.
    """
    row = tables["allreduce"].row(ranks)
    if row is None and "same_links_as" in tables:
        twin = read_tables(tables["same_links_as"])
        if twin is not None:
            return twin["allreduce"].row(ranks)
    return row
