"""What the preflight says of a target by a card's memory and compute capability, without a GPU."""

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
from trtspec.models.footprint import MemoryLoad, footprint, require_fitting, target_bytes
from trtspec.models.precision import dtype_name
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

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.capability >= (8, 0) else torch.float32


CARDS = [
    Card("GTX 1080 (Pascal)", 8, (6, 1)),
    Card("Tesla P100 (Pascal)", 16, (6, 0)),
    Card("RTX 2070 (Turing)", 8, (7, 5)),
    Card("T4 (Turing)", 16, (7, 5)),
    Card("RTX 3060 (Ampere)", 12, (8, 6)),
    Card("RTX 3090 (Ampere)", 24, (8, 6)),
    Card("RTX 4060 (Ada)", 8, (8, 9)),
    Card("RTX 4080 (Ada)", 16, (8, 9)),
    Card("RTX 4090 (Ada)", 24, (8, 9)),
]
ROWS, LENGTH = 4, 4096


def load(card: Card) -> MemoryLoad:
    return MemoryLoad("cuda", card.dtype, ROWS, LENGTH, 3)


@pytest.fixture(scope="module")
def nano() -> ModelSpec:
    return target_spec(Checkpoint.open(data_files.kimi_nano_dir()))


@pytest.fixture(scope="module")
def medium(nano: ModelSpec) -> ModelSpec:
    """Sizes of Moonlight-16B-A3B, the small published model of this architecture.

    It has Kimi-K2's query latents here.
    """
    sizes = {
        "hidden_size": 2048,
        "num_hidden_layers": 27,
        "num_attention_heads": 16,
        "q_lora_rank": 1536,
    }
    sizes |= {
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
    }
    sizes |= {
        "intermediate_size": 11264,
        "moe_intermediate_size": 1408,
        "n_routed_experts": 64,
        "n_shared_experts": 2,
    }
    return replace(nano, **sizes, num_experts_per_tok=6, vocab_size=163840)


@pytest.mark.slow
def test_what_fits_on_small_cards(nano: ModelSpec, medium: ModelSpec) -> None:
    """By hand, 16.0e9 weights of 2 or 4 bytes with 5 % to spare fit on none of the cards."""
    print("\n| card | GB | type | kimi-nano |\n|---|---|---|---|")
    for card in CARDS:
        rows, _ = footprint(Path(), nano, None, load(card)).fitting(card.free)
        print(f"| {card.name} | {card.gib} | {dtype_name(card.dtype)} | {rows} x {LENGTH} |")
        assert rows > 300
        large = footprint(Path(), medium, None, load(card))
        assert large.needed(0) >= 1.05 * 16.0e9 * card.dtype.itemsize > card.free
        assert large.fitting(card.free) == (0, 0)


def test_what_does_not_fit_is_refused(
    nano: ModelSpec, medium: ModelSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    card = CARDS[4]
    monkeypatch.setattr("trtspec.models.footprint.free_bytes", lambda device: card.free)
    require_fitting(Path("target"), nano, None, load(card))
    many = replace(load(card), rows=10**6)
    fitting, _ = footprint(Path("target"), nano, None, many).fitting(card.free)
    for spec, asked, remedy in (
        (medium, load(card), "its weights alone do not fit"),
        (nano, many, f"use `max_batch_size` {fitting}, or"),
        (nano, replace(many, rows=1, length=10**9), "use `max_batch_size` 1"),
    ):
        with pytest.raises(MissingDependency, match="on cuda") as caught:
            require_fitting(Path("target"), spec, None, asked)
        assert remedy in (caught.value.remedy or "")


def test_the_head_and_prefixes_count(nano: ModelSpec) -> None:
    checkpoint = Checkpoint.open(data_files.DATA / "kimi-nano-eagle3")
    head = checkpoint, read_head(checkpoint)[0]
    alone, both = (footprint(Path(), nano, given, load(CARDS[0])) for given in (None, head))
    assert both.weights - alone.weights == 4 * sum(
        info.numel for info in checkpoint.tensors.values()
    )
    assert both.row > alone.row
    assert (
        footprint(Path(), nano, None, replace(load(CARDS[0]), prefix_bytes=GIB)).kept - alone.kept
        == GIB
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=dtype_name)
def test_an_nvfp4_target_is_counted_as_it_is_held(tmp_path: Path, dtype: torch.dtype) -> None:
    """Against the tensors of the loaded model: not the bytes of the files."""
    path = make_target(tmp_path, format="nvfp4", shards=1)
    model = load_target(path, dtype=dtype)
    held = sum(tensor.nbytes for tensor in [*model.parameters(), *model.buffers()])
    assert target_bytes(path, target_spec(Checkpoint.open(path)), dtype, "cuda") == pytest.approx(
        held, rel=0.03
    )
