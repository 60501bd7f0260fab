"""Commodity GPUs without one: for a card's memory and compute capability, what the preflight says of a target."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

from tests.tiny import make_target
from trtspec import data_files
from trtspec.checkpoint.headers import Checkpoint
from trtspec.checkpoint.heads.read import read_head
from trtspec.checkpoint.target_problems import target_spec
from trtspec.errors import MissingDependency
from trtspec.models import memory
from trtspec.models.memory import MemoryLoad, footprint, ranks_that_fit, require_fitting, target_bytes
from trtspec.models.precision import dtype_name, dtype_of_capability
from trtspec.models.sharding import Sharding
from trtspec.models.weights import load_target
from trtspec.specs import ModelSpec

GIB = 2**30
RESERVED = 0.6 * GIB  # what the CUDA context and the desktop take of a small card


@dataclass(frozen=True)
class Card:
    """Memory and capability as published by NVIDIA (CUDA GPUs, compute capability)."""

    name: str
    gib: int
    capability: tuple[int, int]

    @property
    def free(self) -> int:
        return int(self.gib * GIB - RESERVED)


CARDS = [
    Card("GTX 1080 (Pascal)", 8, (6, 1)), Card("Tesla P100 (Pascal)", 16, (6, 0)), Card("RTX 2070 (Turing)", 8, (7, 5)),
    Card("T4 (Turing)", 16, (7, 5)), Card("RTX 3060 (Ampere)", 12, (8, 6)), Card("RTX 3090 (Ampere)", 24, (8, 6)),
    Card("RTX 4060 (Ada)", 8, (8, 9)), Card("RTX 4080 (Ada)", 16, (8, 9)), Card("RTX 4090 (Ada)", 24, (8, 9)),
]  # fmt: skip
ROWS, LENGTH = 4, 4096


def load(card: Card, ranks: int = 1) -> MemoryLoad:
    return MemoryLoad("cuda", dtype_of_capability(card.capability), ROWS, LENGTH, 3, ranks=ranks)


@pytest.fixture(scope="module")
def nano() -> ModelSpec:
    return target_spec(Checkpoint.open(data_files.kimi_nano_dir()))


@pytest.fixture(scope="module")
def medium(nano: ModelSpec) -> ModelSpec:
    """The sizes of Moonlight-16B-A3B, the small published model of this architecture, with Kimi-K2's query latents."""
    sizes = {"hidden_size": 2048, "num_hidden_layers": 27, "num_attention_heads": 16, "q_lora_rank": 1536}
    sizes |= {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
    sizes |= {"intermediate_size": 11264, "moe_intermediate_size": 1408, "n_routed_experts": 64, "n_shared_experts": 2}
    return replace(nano, **sizes, num_experts_per_tok=6, vocab_size=163840)


def fitting(card: Card, spec: ModelSpec, gpus: int) -> tuple[int, str]:
    """(ranks, what they hold): the fewest that hold ROWS x LENGTH, or as many as there are."""
    ranks = ranks_that_fit(Path(), spec, None, load(card), card.free, gpus) or gpus
    found = footprint(Path(), spec, None, load(card, ranks))
    if rows := found.rows_in(card.free):
        return ranks, f"{rows} x {LENGTH}"
    length = found.length_in(card.free)
    return ranks, f"1 x {length}" if length else f"no: {found.weights / GIB:.1f} GiB of weights each"


@pytest.mark.slow
def test_what_fits_on_small_cards(nano: ModelSpec, medium: ModelSpec) -> None:
    """Bounds by hand: 16.0e9 weights (14.4 in experts) of 2 or 4 bytes, 5 % to spare, shared by the ranks."""
    print("\n| card | GB | type | kimi-nano, 1 card | 16B, 1 card | 16B, 2 cards | 16B, 4 cards |")
    print("|---|---|---|---|---|---|---|")
    for card in CARDS:
        kind = dtype_of_capability(card.capability)
        told = [fitting(card, nano, 1)[1]]
        for gpus in (1, 2, 4):
            ranks, holds = fitting(card, medium, gpus)
            told.append(holds if holds.startswith("no") else f"{holds}, `--tp-size {ranks}`")
            least = 1.05 * 16.0e9 * kind.itemsize / ranks
            assert holds.startswith("no") == (least > card.free), (card, gpus, holds)
        print(f"| {card.name} | {card.gib} | {dtype_name(kind)} | {' | '.join(told)} |")
    kinds = {card.name.split("(")[1][:-1]: load(card).dtype for card in CARDS if "P100" not in card.name}
    halves = {"Turing": torch.float16, "Ampere": torch.bfloat16, "Ada": torch.bfloat16}
    assert kinds == {"Pascal": torch.float32, **halves}


def test_several_small_cards_are_proposed(medium: ModelSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    card = Card("RTX 3060", 12, (8, 6))
    monkeypatch.setattr(memory, "free_bytes", lambda device: card.free)
    for gpus, proposed in ((2, "do not fit"), (4, "use --tp-size 4"), (8, "use --tp-size 4")):
        monkeypatch.setattr(torch.cuda, "device_count", lambda gpus=gpus: gpus)
        with pytest.raises(MissingDependency, match="on cuda") as caught:
            require_fitting(Path("target"), medium, None, load(card))
        assert proposed in (caught.value.remedy or "")
    require_fitting(Path("target"), medium, None, load(card, 4))


def test_the_head_counts(nano: ModelSpec) -> None:
    checkpoint = Checkpoint.open(data_files.DATA / "kimi-nano-eagle3")
    head = checkpoint, read_head(checkpoint)[0]
    alone, both = (footprint(Path(), nano, given, load(CARDS[0])) for given in (None, head))
    assert both.weights - alone.weights == 4 * sum(info.numel for info in checkpoint.tensors.values())
    assert both.row > alone.row


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=dtype_name)
@pytest.mark.parametrize("ranks", [1, 2])
def test_an_nvfp4_target_is_counted_as_it_is_held(tmp_path: Path, dtype: torch.dtype, ranks: int) -> None:
    """Against the tensors of the loaded model, which are those of each rank: not the bytes of the files."""
    path = make_target(tmp_path, format="nvfp4", shards=1)
    spec = target_spec(Checkpoint.open(path))
    for rank in range(ranks):
        sharding = Sharding(rank, ranks)
        model = load_target(path, dtype=dtype, sharding=sharding)
        held = sum(tensor.nbytes for tensor in [*model.parameters(), *model.buffers()])
        counted = target_bytes(path, spec, dtype, "cuda", sharding)
        assert counted == pytest.approx(held, rel=0.03), (counted, held)
    stored = sum(file.stat().st_size for file in path.glob("*.safetensors")) // ranks
    print(f"\n{dtype_name(dtype)}, {ranks} ranks: counted {counted}, held {held}, stored {stored}")


def test_each_rank_on_a_cpu_keeps_prefixes(nano: ModelSpec) -> None:
    asked = MemoryLoad("cpu", torch.float32, ROWS, LENGTH, 3, ranks=4)
    without, beside = (footprint(Path(), nano, None, replace(asked, prefix_bytes=size)) for size in (0, GIB))
    assert beside.kept - without.kept == beside.prefixes == 4 * GIB
    gpu = replace(asked, device="cuda", prefix_bytes=GIB)
    assert footprint(Path(), nano, None, gpu).prefixes == GIB
