"""Fast forms against plain ones, and packed weights: the identity's product has every bit."""

import copy
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trtspec.data_files import kimi_nano_dir
from trtspec.models import fast
from trtspec.models.fast import (
    MIN_PACKED_ELEMENTS,
    FoldedLatentAttention,
    FoldedRMSNorm,
    GroupedExperts,
    PackedLinear,
    StackedMoE,
    pack,
    prepare_for_decoding,
)
from trtspec.models.layers import Linear, RMSNorm
from trtspec.models.precision import has_native_bf16
from trtspec.models.weights import load_target

IN, OUT = 256, 512
PACKS = "fbgemm" in torch.backends.quantized.supported_engines
needs_fbgemm = pytest.mark.skipif(not PACKS, reason="FBGEMM is x86 only")


def stored_as_bf16(seed: int, exponent: int = 0) -> torch.Tensor:
    weight = (
        torch.randn(OUT, IN, generator=torch.Generator().manual_seed(seed)) * 0.02 * 2.0**exponent
    )
    return weight.to(torch.bfloat16).float()


@needs_fbgemm
@settings(max_examples=25)
@given(seed=st.integers(0, 2**31), exponent=st.integers(-90, 90))
def test_every_bf16_weight_comes_back(seed: int, exponent: int) -> None:
    weight = stored_as_bf16(seed, exponent)
    weight[0, 0] = 0.0
    weight[1, :8] = weight.abs().max() * 2.0 ** -torch.arange(20.0, 28.0)  # far below the largest
    packed = pack(weight)
    assert packed is not None
    assert torch.equal(packed.product(torch.eye(IN)), weight.t())


@needs_fbgemm
@pytest.mark.parametrize("rows", [1, 3, 4, 7, 16, 64])
def test_products_are_float32s(rows: int) -> None:
    weight, x = (
        stored_as_bf16(0),
        torch.randn(2, rows, IN, generator=torch.Generator().manual_seed(1)),
    )
    packed = pack(weight)
    assert packed is not None
    error = (packed.product(x) - x.double() @ weight.double().t()).abs()
    bound = 4 * torch.finfo(torch.float32).eps * (x.double().abs() @ weight.double().abs().t())
    assert (error <= bound).all()  # sums in FP16 would be off by a thousand times that


@needs_fbgemm
def test_rows_do_not_depend_on_their_number() -> None:
    """Greedy texts may depend on the batch by rounding, to which a packed product adds nothing."""
    packed, x = (
        pack(stored_as_bf16(2)),
        torch.randn(6, IN, generator=torch.Generator().manual_seed(3)),
    )
    assert packed is not None
    together = packed.product(x)
    for row in range(len(x)):
        torch.testing.assert_close(
            packed.product(x[row : row + 1])[0], together[row], rtol=1e-6, atol=1e-6
        )


def test_what_would_not_be_exact_or_not_pay_is_left_alone() -> None:
    weight = stored_as_bf16(4)
    spread = weight.clone()
    spread[0, 0] = weight.abs().max() * 2.0**-40
    infinite = torch.where(weight == weight.max(), torch.inf, weight)
    trained = torch.randn(OUT, IN)  # 24 significant bits
    for refused in (
        spread,
        infinite,
        trained,
        torch.zeros(OUT, IN),
        weight[: MIN_PACKED_ELEMENTS // OUT],
        weight.half(),
    ):
        assert pack(refused) is None
    assert (pack(weight.bfloat16()) is not None) == (PACKS and not has_native_bf16())


@pytest.mark.skipif(has_native_bf16() or not PACKS, reason="bfloat16 is native here")
@pytest.mark.parametrize("rows", [1, 4, 200])
def test_bfloat16_without_its_instructions_is_float32_rounded(rows: int) -> None:
    weight = stored_as_bf16(7).bfloat16()
    x = torch.randn(rows, IN, generator=torch.Generator().manual_seed(8)).bfloat16()
    linear = Linear(IN, OUT)
    linear.weight.data = weight
    prepare_for_decoding(linear)
    with torch.no_grad():
        product = linear(x)
    assert product.dtype == torch.bfloat16
    exact = x.double() @ weight.double().t()
    assert (
        (product.double() - exact).abs() <= exact.abs() * 2**-8 + 1e-5
    ).all()  # half a unit in the last place


# of the largest output, in float32; the weights are kimi-nano's, which has a place for every form
BOUNDS = {
    PackedLinear: 2e-6,
    FoldedRMSNorm: 1e-6,
    FoldedLatentAttention: 5e-6,
    GroupedExperts: 2e-6,
    StackedMoE: 5e-6,
}


@needs_fbgemm
@torch.inference_mode()
def test_each_fast_form_equals_its_plain_form(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fast, "after_loading", lambda model: None)
    plain = load_target(kimi_nano_dir(), dtype=torch.float32)
    prepared = copy.deepcopy(plain)
    monkeypatch.undo()
    fast.after_loading(prepared)
    prepare_for_decoding(prepared)
    prepare_for_decoding(prepared)
    worst = dict.fromkeys(BOUNDS, 0.0)

    def compare(name: str, inputs: Any, expected: torch.Tensor) -> None:
        form = prepared.get_submodule(name)
        if type(form) in BOUNDS:
            difference = (form(*inputs) - expected).abs().max() / expected.abs().max()
            worst[type(form)] = max(worst[type(form)], float(difference))

    for name, module in plain.named_modules():
        module.register_forward_hook(lambda _, *seen, name=name: compare(name, *seen))
    for tokens in (3, 80):  # stacked experts and packed products are for few
        plain(torch.randint(300, (1, tokens), generator=torch.Generator().manual_seed(tokens)))
    for form, difference in worst.items():
        print(f"{form.__name__}: {difference:.1e} of the largest output, bound {BOUNDS[form]}")
    assert all(0 < worst[form] < bound for form, bound in BOUNDS.items())


def test_a_folded_norm_has_the_epsilon() -> None:
    norm = RMSNorm(IN, 1e-5)
    x = torch.full((1, IN), 1e-6)
    plain = norm(x).detach()
    FoldedRMSNorm.replace(norm)
    torch.testing.assert_close(norm(x), plain)
