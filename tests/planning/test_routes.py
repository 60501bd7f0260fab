"""What TensorRT-LLM can run where: refusals name their reason, and the GPU tables agree."""

from dataclasses import replace

import pytest

from trtspec.checkpoint.hub import find_target
from trtspec.planning.layout import LONGEST_DRAFT, Layout, refusals
from trtspec.planning.memory import memory
from trtspec.specs import ModelSpec, gpu_spec

NVFP4, INT4, FP8 = (
    "nvidia/Kimi-K2.6-NVFP4",
    "moonshotai/Kimi-K2.6",
    "moonshotai/Kimi-K2-Instruct-0905",
)


def codes(target: str, gpu: str | None = "b200", tp_size: int = 8, **more: object) -> list[str]:
    found = refusals(
        find_target(target).spec, gpu=gpu_spec(gpu) if gpu else None, tp_size=tp_size, **more
    )  # type: ignore[arg-type]
    assert all(problem.severity == "error" and problem.remedy for problem in found)
    return [problem.code for problem in found]


@pytest.mark.parametrize("gpu", ["h100", "h200"])
def test_hopper_runs_fp8_and_neither_nvfp4_nor_int4(gpu: str) -> None:
    assert codes(NVFP4, gpu) == ["TS-ROUTE-GPU"] and codes(INT4, gpu) == ["TS-ROUTE-INT4"]
    assert codes(FP8, gpu) == []


def test_the_remedy_on_hopper_names_gpus_that_hold_the_model() -> None:
    model = find_target(FP8).spec
    held = {
        (gpu, n): memory(model, None, gpu_spec(gpu), Layout(n)).sequences(8192)
        for gpu in ("h100", "h200")
        for n in (8, 16)
    }
    assert held["h200", 8] > 0 and held["h100", 16] > 0 and held["h100", 8] == 0


@pytest.mark.parametrize("gpu", ["b200", "gb200", "b300", "gb300", None])
def test_blackwell_runs_nvfp4_and_fp8_and_no_gpu_runs_int4(gpu: str | None) -> None:
    assert codes(NVFP4, gpu) == codes(FP8, gpu) == [] and codes(INT4, gpu) == ["TS-ROUTE-INT4"]


def test_heads_and_experts_must_divide() -> None:
    assert codes(NVFP4, tp_size=6) == ["TS-ROUTE-HEADS", "TS-ROUTE-EXPERTS"]
    assert codes(NVFP4, tp_size=6, ep_size=6, attention_dp=True) == []
    assert codes(NVFP4, tp_size=8, ep_size=3) == ["TS-ROUTE-EXPERTS"]
    assert codes(NVFP4, tp_size=5, ep_size=5, attention_dp=True) == ["TS-ROUTE-EXPERTS"]
    assert codes(NVFP4, tp_size=64, ep_size=1) == []
    narrow: ModelSpec = replace(find_target(NVFP4).spec, moe_intermediate_size=64)
    assert refusals(narrow, gpu=None, tp_size=8), "64 / 8 is half a group of 16"


def test_lengths_beyond_the_model_or_any_sense() -> None:
    assert codes(NVFP4, tokens=262144) == [] and codes(NVFP4, tokens=262145) == ["TS-ROUTE-LENGTH"]
    assert codes(NVFP4, draft_len=LONGEST_DRAFT) == [] and codes(NVFP4, draft_len=99) == [
        "TS-ROUTE-DRAFT-LENGTH"
    ]
    accepted, draft_cost = 0.906, 0.04  # of a plain step; facts as in the constant's comment
    longer = sum(accepted**k for k in range(LONGEST_DRAFT + 1))
    assert accepted ** (LONGEST_DRAFT + 1) / longer < draft_cost
