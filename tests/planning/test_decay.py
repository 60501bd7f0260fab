"""Acceptance beyond the measured positions: published curves that were held out are the judge."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tools.plan_checks import CURVES, KIMI, fit, mean, rates_of
from trtspec.checkpoint.hub import find_target, load_head
from trtspec.planning.acceptance import (
    Acceptance,
    Decay,
    lengths,
    other_decays,
    parse_acceptance,
    published_decay,
)
from trtspec.planning.layout import Layout
from trtspec.planning.points import Setting, Workload, plan_layout
from trtspec.specs import gpu_spec

KNOWN = 3  # K = 1 .. 3 are shown, the rest scores
rates = st.floats(0.05, 0.999)


def minimax() -> Decay:
    """From curves of another model and head: it saw nothing of Kimi."""
    return fit(mean([curve for name, curve in CURVES.items() if name not in KIMI]))


def test_the_stored_decays_are_those_of_the_curves() -> None:
    fitted = {name: fit(curve) for name, curve in CURVES.items()}
    assert set(other_decays()) == set(fitted)
    pairs = [(other_decays()[name], found) for name, found in fitted.items()]
    for stored, found in [*pairs, (published_decay(), fit(mean([CURVES[name] for name in KIMI])))]:
        assert (stored.first, stored.second, stored.ratio) == pytest.approx(
            (found.first, found.second, found.ratio), abs=1e-6
        )


@pytest.mark.parametrize("name", KIMI)
def test_from_three_positions_without_any_kimi_curve(name: str) -> None:
    known = rates_of(CURVES[name][:KNOWN])
    found = lengths([*known, *minimax().beyond(known, 8)])
    assert found[KNOWN:] == pytest.approx(CURVES[name][KNOWN:], rel=0.02)


@pytest.mark.parametrize(("name", "other"), [KIMI, KIMI[::-1]])
def test_grown_from_three_positions_of_one_curve_it_predicts_the_other(
    name: str, other: str
) -> None:
    known = rates_of(CURVES[name][:KNOWN])
    grown = fit(lengths([*known, *minimax().beyond(known, 8)]))
    start = rates_of(CURVES[other][:KNOWN])
    assert lengths([*start, *grown.beyond(start, 8)]) == pytest.approx(CURVES[other], rel=0.02)
    one_length = Acceptance("", length_at=(CURVES[other][2], 3))
    assert lengths(one_length.rates(8, grown)) == pytest.approx(CURVES[other], rel=0.04)


@pytest.mark.parametrize("name", KIMI)
@pytest.mark.parametrize(
    ("gpu", "layout"),
    [("b200", Layout(4)), ("b300", Layout(4)), ("b200", Layout(8)), ("b300", Layout(8, True))],
)
def test_the_draft_length_from_three_positions_loses_at_most_two_percent(
    name: str, gpu: str, layout: Layout
) -> None:
    """The best draft length by published lengths is at most 2 % faster.

    Beyond K = 3 nothing of Kimi was seen.
    """
    model, head = (
        find_target("nvidia/Kimi-K2.5-NVFP4").spec,
        load_head("lightseekorg/kimi-k2.5-eagle3-mla").spec,
    )
    acceptance = Acceptance("test", tuple(rates_of(CURVES[name][:KNOWN])), decay=minimax())
    workload = Workload(1024, 1024, (1, 4, 16, 64))
    setting = Setting("", model, "", head, gpu_spec(gpu), workload, acceptance, longest_draft=8)
    plan = plan_layout(layout, setting)
    for concurrency in workload.concurrency:
        truth = {
            p.draft_len: [1.0, *CURVES[name]][p.draft_len] / p.step_ms for p in plan.at(concurrency)
        }
        assert truth[plan.best(concurrency).draft_len] >= 0.98 * max(truth.values())


@given(known=st.lists(rates, min_size=1, max_size=6), drafts=st.integers(1, 16))
@settings(max_examples=80)
def test_what_is_measured_is_kept_and_the_rest_only_falls(known: list[float], drafts: int) -> None:
    found = Acceptance("test", tuple(known))
    all_rates = found.rates(drafts)
    assert all_rates[: len(known)] == known[:drafts]
    beyond = all_rates[len(known) :]
    assert beyond == sorted(beyond, reverse=True) and all(0 <= rate <= 1 for rate in beyond)
    assert found.length(drafts) == pytest.approx(lengths(all_rates)[-1])


@given(length=st.floats(1.01, 3.99), drafts=st.integers(1, 8))
@settings(max_examples=60)
def test_a_longer_draft_never_accepts_less(length: float, drafts: int) -> None:
    found = Acceptance("test", length_at=(length, 3))
    assert found.length(drafts) <= found.length(drafts + 1) + 1e-9
    assert lengths(found.rates(3))[-1] == pytest.approx(length, abs=1e-6)


def test_positions_that_were_never_or_always_accepted() -> None:
    assert Acceptance("test", (0.8, 0.0)).rates(4) == [0.8, 0.0, 0.0, 0.0]
    assert Acceptance("test", (1.0, 1.0)).rates(4) == [1.0] * 4
    assert parse_acceptance("1@3").length(8) == pytest.approx(1.0, abs=1e-6)
    assert parse_acceptance("4@3").length(8) == pytest.approx(9.0, abs=1e-6)


def test_it_says_what_is_extrapolated() -> None:
    by_position = Acceptance("test", (0.8, 0.7, 0.7))
    assert by_position.measured_lengths == [1, 2, 3]
    assert by_position.decays(3) == {} and set(by_position.decays(4)) == set(CURVES)
    assert parse_acceptance("2.62@3").measured_lengths == [3]
    assert published_decay().ratio < 1 and len(other_decays()) == len(CURVES)
