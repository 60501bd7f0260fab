"""Time of one decode step, of verifying k + 1 tokens per sequence, and of drafting them, from measured kernels.

step = layers x (attention + shared expert + router + routed experts + collectives) + dense layers + lm_head.
Verifying k + 1 tokens runs the same kernels on (k + 1) times the tokens: more distinct experts are read, which is what
makes it dearer than one token; the latent cache is read once for all of them. Not in it: norms and other element-wise
kernels, sampling, the host, and overlap between kernels. Formula and tables: docs/plan-model.md. Latencies are those of
one GPU (data/kernels), looked up and interpolated; nothing is fitted.
"""

from __future__ import annotations

import bisect
import json
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

from trtspec.data_files import DATA
from trtspec.formats import KV_ELEMENT_BYTES
from trtspec.planning.layout import Layout
from trtspec.specs import GpuSpec, HeadSpec, ModelSpec

ROUTING = "power_law_1.01"
HEADS = 64  # attention heads of every Kimi-K2; the tables are keyed by the ranks that share them
MOE_KERNELS = (
    "TRTLLM",
    "CUTLASS",
    "DEEPGEMM",
    "MARLIN",
)  # the first that was measured for a format is taken
BANDWIDTH_SHARE = 0.8  # of the peak, reached by streaming kernels (aiconfigurator systems/*.yaml)
LAUNCH_US = 3.0  # least time of one kernel (same source)


@dataclass(frozen=True)
class StepModel:
    """Times in microseconds. `context` is the number of tokens that a sequence holds, on average over its answer."""

    model: ModelSpec
    head: HeadSpec | None
    layout: Layout
    kernels: Kernels
    context: int
    host_us: float = 0.0

    @property
    def cache_bytes(self) -> int:
        """Bytes of one element of the KV cache."""
        return KV_ELEMENT_BYTES[self.model.quant.kv_cache or "bf16"]

    def parts(self, sequences: int, queries: int) -> dict[str, float]:
        """The target's step by kernel, all layers, for `queries` tokens of each of `sequences` sequences."""
        model, kernels, layout = self.model, self.kernels, self.layout
        tokens = sequences * queries
        here = layout.sequences_per_rank(sequences)
        mine = here * queries
        ranks, layers = layout.attention_tp, model.num_hidden_layers
        moe = layers - model.first_k_dense_replace
        shared = model.n_shared_experts * model.moe_intermediate_size / ranks
        wide = model.intermediate_size / ranks
        return {
            "attention": layers
            * kernels.attention(ranks, here, mine, self.context, self.cache_bytes),
            "experts": moe * kernels.moe(layout.moe, tokens),
            "shared": moe * self._mlp(mine, shared) if model.n_shared_experts else 0.0,
            "router": moe * kernels.from_hidden(mine, model.n_routed_experts),
            "collectives": self._collectives(tokens),
            "dense": model.first_k_dense_replace * self._mlp(mine, wide),
            "lm_head": kernels.from_hidden(mine, model.vocab_size / ranks),
            "host": self.host_us,
        }

    def step(self, sequences: int, queries: int = 1) -> float:
        return sum(self.parts(sequences, queries).values())

    def _mlp(self, tokens: int, width: float) -> float:
        return self.kernels.from_hidden(tokens, 2 * width) + self.kernels.to_hidden(tokens, width)

    def _collectives(self, tokens: int) -> float:
        """Two all-reduces per layer; with attention DP one exchange of all tokens before the experts and one after,
        together as dear as one all-reduce of them."""
        each = self.kernels.allreduce(self.layout.gpus, tokens * self.model.hidden_size)
        layers, moe = (
            self.model.num_hidden_layers,
            self.model.num_hidden_layers - self.model.first_k_dense_replace,
        )
        return moe * each if self.layout.attention_dp else 2 * layers * each

    def draft(self, sequences: int, length: int) -> float:
        """Drafting `length` tokens per sequence: one pass over the tokens just verified, then one token at a time."""
        if self.head is None or length == 0:
            return 0.0
        head, layout = self.head, self.layout
        here = layout.sequences_per_rank(sequences)
        first = here * (length + 1)
        fc = head.num_aux * self.kernels.to_hidden(
            first, head.target_hidden_size / layout.attention_tp
        )
        return (
            fc
            + self._draft_pass(head, here, first)
            + (length - 1) * self._draft_pass(head, here, here)
        )

    def _draft_pass(self, head: HeadSpec, sequences: int, tokens: int) -> float:
        ranks, kernels = self.layout.attention_tp, self.kernels
        mlp = self._mlp(tokens, head.intermediate_size / ranks)
        logits = kernels.from_hidden(sequences, head.draft_vocab_size / ranks)
        collectives = 3 * kernels.allreduce(
            ranks, tokens * head.hidden_size
        )  # attention, MLP, best token over ranks
        return self._draft_attention(head, sequences, tokens) + mlp + logits + collectives

    def _draft_attention(self, head: HeadSpec, sequences: int, tokens: int) -> float:
        """Microseconds. MLA: the target's module plus its down-projection once more, as its input is twice as wide.
        MHA: the products of its own widths, and the cache at the bandwidth that kernels reach."""
        ranks, kernels = self.layout.attention_tp, self.kernels
        if head.is_mla:
            once_more = kernels.from_hidden(
                tokens, head.q_lora_rank + head.kv_lora_rank + head.qk_rope_head_dim
            )
            return (
                kernels.attention(ranks, sequences, tokens, self.context, self.cache_bytes)
                + once_more
            )
        width = head.num_attention_heads * head.head_dim / ranks
        cached = 2 * head.num_key_value_heads * head.head_dim / ranks  # keys and values
        read = sequences * self.context * cached * self.cache_bytes
        products = 2 * kernels.from_hidden(
            tokens, width + cached
        )  # an input of twice the hidden size
        return products + kernels.to_hidden(tokens, width) + kernels.stream(read) + LAUNCH_US

    def cost_ratio(self, sequences: int, length: int) -> float:
        """(verify + draft) / plain step: the acceptance length at which speculation neither wins nor loses."""
        return self.whole(sequences, length) / self.step(sequences)

    def whole(self, sequences: int, length: int) -> float:
        """Drafting `length` tokens per sequence and verifying them."""
        return self.step(sequences, length + 1) + self.draft(sequences, length)

    def prefill(self, tokens: int, prompts: int = 1) -> float:
        """`prompts` prompts of `tokens` tokens each, at once and without their answers; the head's own prefill is left
        out. With attention DP every rank computes the attention of its own prompts."""
        here = self.layout.sequences_per_rank(prompts)
        attention = here * self.kernels.prefill_attention(self.layout.attention_tp, tokens)
        parts = self.parts(prompts, tokens) | {
            "attention": self.model.num_hidden_layers * attention
        }
        return sum(time for name, time in parts.items() if name not in ("lm_head", "host"))


class Series(NamedTuple):
    """Measured points, both ascending in x."""

    xs: tuple[float, ...]
    ys: tuple[float, ...]


def interpolate(series: Series, at: float) -> float:
    """Linear between measured points, flat below the first, and beyond the last in proportion to its slope."""
    xs, ys = series
    if at <= xs[0] or len(xs) == 1:
        return ys[0]
    right = min(bisect.bisect_left(xs, at), len(xs) - 1)
    x0, y0 = xs[right - 1], ys[right - 1]
    return y0 + (ys[right] - y0) * (at - x0) / (xs[right] - x0)


class Grid(NamedTuple):
    """A series for each of several ascending values of another quantity."""

    xs: tuple[float, ...]
    rows: tuple[Series, ...]

    def row(self, at: float) -> Series | None:
        return self.rows[self.xs.index(at)] if at in self.xs else None


def interpolate_twice(grid: Grid, outer: float, inner: float) -> float:
    """Along each series first, then between the two that enclose `outer`."""
    right = min(max(1, bisect.bisect_left(grid.xs, outer)), len(grid.xs) - 1)
    values = tuple(interpolate(row, inner) for row in grid.rows[right - 1 : right + 1])
    return interpolate(Series(grid.xs[right - 1 : right + 1], values), outer)


@dataclass(frozen=True)
class Kernels:
    """Latencies in microseconds. `moe_kernel` is the engine's name of the MoE backend."""

    gpu: GpuSpec
    tables: dict[str, Any]
    format: str
    moe_kernel: str
    routing: str = ROUTING

    @property
    def experts(self) -> dict[str, Any]:
        """What was measured of the MoE kernel, by routing, and its `source`."""
        found: dict[str, Any] = self.tables["moe"][self.format][self.moe_kernel]
        return found

    @property
    def sources(self) -> list[str]:
        return [self.tables["source"], f"MoE: {self.experts['source']}"]

    def has(self, moe_layout: str, attention_ranks: int, ranks: int) -> bool:
        """Whether all kernels of such a layout were measured. Links of another GPU count for an all-reduce, but not for
        the exchange of tokens with attention DP, which between trays takes other kernels."""
        moe = self.experts[self.routing]
        attention = f"tp{attention_ranks}" in self.tables["mla_decode"]
        own = self.tables["allreduce"].row(ranks)
        collective = own if attention_ranks < ranks else allreduce_row(self.tables, ranks)
        return moe_layout in moe and attention and (ranks == 1 or collective is not None)

    def moe(self, layout: str, tokens: int) -> float:
        """The routed experts of one layer on one rank, for `tokens` tokens of the whole group."""
        return interpolate(self.experts[self.routing][layout], tokens)

    def attention(
        self, ranks: int, sequences: int, tokens: int, context: int, cache_bytes: int = 1
    ) -> float:
        """One MLA module on one rank: `tokens` queries of `sequences` sequences that hold `context` tokens each.

        Projections cost what that many tokens cost at an empty cache; the cache is read once per sequence, for all its
        queries, as long as queries x local heads fit one tile of 128 rows, and once more per further tile. The tables
        are for an FP8 cache; a cache of `cache_bytes` bytes per element takes that many times as long to read.
        """
        tiles = max(1, -(-tokens * HEADS // max(1, sequences) // ranks // 128))
        empty, read = (
            self._attention(ranks, sequences, 2),
            self._attention(ranks, sequences, context),
        )
        return self._attention(ranks, tokens, 2) + max(0.0, read - empty) * tiles * cache_bytes

    def _attention(self, ranks: int, sequences: int, context: int) -> float:
        return interpolate_twice(self.tables["mla_decode"][f"tp{ranks}"], context, sequences)

    def prefill_attention(self, ranks: int, tokens: int) -> float:
        """One MLA module for one prompt. Beyond the longest measured prompt: linear and quadratic cost as in the last
        two measured ones."""
        measured: Series = self.tables["mla_prefill"][f"tp{ranks}"]
        (x0, x1), (y0, y1) = measured.xs[-2:], measured.ys[-2:]
        if tokens <= x1:
            return interpolate(measured, tokens)
        square = max(0.0, (y1 / x1 - y0 / x0) / (x1 - x0))
        return tokens * (y1 / x1 + square * (tokens - x1))

    def allreduce(self, ranks: int, elements: int) -> float:
        if ranks == 1:
            return 0.0
        row = allreduce_row(self.tables, ranks)
        assert row is not None  # `has_ranks` is asked first
        return interpolate(row, elements)

    def from_hidden(self, tokens: int, width: float) -> float:
        """A BF16 linear layer that reads the model's width and writes `width`."""
        return self._gemm("gemm_from_hidden", tokens, width)

    def to_hidden(self, tokens: int, width: float) -> float:
        """A BF16 linear layer that reads `width` and writes the model's width."""
        return self._gemm("gemm_to_hidden", tokens, width)

    def _gemm(self, name: str, tokens: int, width: float) -> float:
        return interpolate_twice(self.tables[name], tokens, width)

    def stream(self, number_of_bytes: float) -> float:
        """Microseconds to read that many bytes at the bandwidth that kernels reach."""
        return number_of_bytes / (BANDWIDTH_SHARE * self.gpu.memory_bandwidth) * 1e6


@cache
def read_tables(gpu: str) -> dict[str, Any] | None:
    """None for a GPU whose kernels nobody measured."""
    path = DATA / "kernels" / f"{gpu}.json"
    return (
        json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=_read)
        if path.is_file()
        else None
    )


def _read(pairs: list[tuple[str, Any]]) -> Any:
    """A mapping from numbers to numbers is a Series, one from numbers to Series a Grid; tools/kernel_tables.py writes
    both in ascending order."""
    if not pairs or not pairs[0][0].isdigit():
        return dict(pairs)
    keys, values = tuple(float(key) for key, _ in pairs), tuple(value for _, value in pairs)
    return Grid(keys, values) if isinstance(values[0], Series) else Series(keys, values)


def allreduce_row(tables: dict[str, Any], ranks: int) -> Series | None:
    """Latencies of one all-reduce over that many ranks: of this GPU, else of the one with the same links that the
    tables name."""
    own: Series | None = tables["allreduce"].row(ranks)
    twin = (
        read_tables(tables["same_links_as"]) if own is None and "same_links_as" in tables else None
    )
    return twin["allreduce"].row(ranks) if twin else own


def kernels(gpu: GpuSpec, format: str) -> Kernels | None:
    """The tables for weights of this format, with the first of MOE_KERNELS that they have; None when nobody measured
    that on that GPU."""
    tables = read_tables(gpu.name)
    measured = tables["moe"].get(format, {}) if tables else {}
    found = [name for name in MOE_KERNELS if name in measured]
    return Kernels(gpu, tables, format, found[0]) if tables and found else None
