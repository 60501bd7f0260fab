"""plan against what others published: sizes, what fits, cache capacities, speed-ups.

Nothing here is fitted.
"""

import math
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.cases import table
from tests.command_line import succeeded, trtspec
from tests.json_files import edit_json, write_json
from trtspec.bench.statistics import by_category, summarize
from trtspec.checkpoint.hub import find_target, load_head
from trtspec.client.servers import TurnCounts
from trtspec.errors import UsageError
from trtspec.planning.acceptance import Acceptance, other_model, parse_acceptance
from trtspec.planning.layout import Layout, layout_of
from trtspec.planning.memory import checkpoint_bytes, head_parameters, memory
from trtspec.planning.points import Setting, Workload, plan_layout
from trtspec.planning.step import Series, StepModel, interpolate, kernels
from trtspec.specs import gpu_spec

GIB, GB = 2**30, 1e9
TARGET = "nvidia/Kimi-K2.6-NVFP4"
MLA, MHA = "nvidia/Kimi-K2.6-Eagle3", "lightseekorg/kimi-k2.5-eagle3"
NO_CARD = "lightseekorg/kimi-k2.6-eagle3"


@pytest.mark.parametrize(
    ("name", "published"),
    [
        ("moonshotai/Kimi-K2-Instruct", 958.5 * GIB),  # FP8, hub listing 958.52 GiB
        ("moonshotai/Kimi-K2.5", 595 * GB),  # INT4, vLLM's recipe
        ("nvidia/Kimi-K2.6-NVFP4", 554 * GIB),  # a public runner
        ("nvidia/Kimi-K2.5-NVFP4", 551 * GIB),  # ModelOpt's launcher
    ],
)
def test_checkpoint_sizes(name: str, published: float) -> None:
    assert checkpoint_bytes(find_target(name).spec) == pytest.approx(published, rel=0.005)


def test_parameters_and_heads_have_the_published_size() -> None:
    spec = find_target("moonshotai/Kimi-K2-Instruct").spec
    parts = [part for _, part in spec.family.parts(spec)]
    language = sum(part.copies * math.prod(part.shape) for part in parts)
    assert language == 1_026_408_232_448
    assert head_parameters(load_head(MLA).spec) == pytest.approx(
        1.8e9, rel=0.03
    )  # the card says 1.8 x 10^9


# GPU, GPUs, attention DP -> KV tokens of the group, NVFP4 of K2.6 with the MLA head, FP8 cache,
# fraction 0.9
WORKED = {
    ("b200", 4, False): 786_720, ("b200", 4, True): 1_260_728, ("b200", 8, False): 2_663_323,
    ("b200", 8, True): 16_905_565, ("gb200", 4, False): 948_234, ("gb200", 8, True): 18_197_682,
    ("b300", 4, False): 3_209_464, ("b300", 8, True): 36_287_520, ("gb300", 4, False): 3_451_736,
    ("h200", 8, False): 1_633_377, ("h200", 8, True): 8_665_999,
}  # fmt: skip


@pytest.mark.parametrize(("gpu", "gpus", "dp"), WORKED)
def test_kv_capacity(gpu: str, gpus: int, dp: bool) -> None:
    layout = Layout(gpus, dp, dp)
    found = memory(
        find_target(TARGET).spec, load_head(MLA).spec, gpu_spec(gpu), layout, fraction=0.9
    )
    assert found.kv_tokens == pytest.approx(WORKED[gpu, gpus, dp], rel=0.05)


def test_four_b200_hold_it_and_four_h200_do_not() -> None:
    target, head = find_target(TARGET).spec, load_head(MLA).spec
    card = Workload(4096, 4096, (32,))
    for gpu, wanted in (
        ("b200", True),
        ("gb200", True),
        ("b300", True),
        ("h200", False),
        ("h100", False),
    ):
        for model in (target, find_target("nvidia/Kimi-K2.5-NVFP4").spec):
            assert (
                plan_layout(Layout(4), Setting("", model, "", head, gpu_spec(gpu), card)).fits
                is wanted
            ), gpu
    on_b200 = memory(target, head, gpu_spec("b200"), Layout(4))
    assert (on_b200.sequences(8192), on_b200.sequences(131072), on_b200.sequences(262144)) == (
        96,
        6,
        3,
    )


def test_vllm_reports_the_same_cache_for_k2_thinking_on_eight_h200() -> None:
    """vLLM: 715,072 tokens in BF16 at 0.9 of the whole memory, which is not TensorRT-LLM's rule."""
    found = memory(
        find_target("moonshotai/Kimi-K2-Thinking").spec, None, gpu_spec("h200"), Layout(8)
    )
    pool = 0.9 * found.capacity - found.weights_total - found.reserve
    assert pool / found.kv_bytes_per_token == pytest.approx(715_072, rel=0.05)


def test_latents_are_copied_and_heads_are_divided() -> None:
    target, gpu = find_target(TARGET).spec, gpu_spec("b200")
    mla, mha = load_head(MLA).spec, load_head(MHA).spec
    per_token = {
        (kind, n, dp): memory(target, head, gpu, Layout(n, dp, dp)).kv_bytes_per_token
        for kind, head in (("mla", mla), ("mha", mha)) for n in (4, 8) for dp in (False, True)
    }  # fmt: skip
    assert {per_token["mla", n, dp] for n in (4, 8) for dp in (False, True)} == {61 * 576 + 576}
    assert per_token["mha", 8, False] == 61 * 576 + 2 * 64 * 128 / 8
    assert per_token["mha", 4, False] == 61 * 576 + 2 * 64 * 128 / 4
    assert per_token["mha", 8, True] == 61 * 576 + 2 * 64 * 128


def steps(
    gpu: str, head: str | None = MLA, layout: Layout | None = None, context: int = 2048
) -> StepModel:
    target = find_target(TARGET).spec
    found = kernels(gpu_spec(gpu), target.quant.format)
    assert found is not None
    return StepModel(
        target, load_head(head).spec if head else None, layout or Layout(4), found, context
    )


@pytest.mark.parametrize(("concurrency", "published"), [(1, 2.03), (4, 1.71), (16, 1.66)])
def test_published_speed_ups_within_ten_percent(concurrency: int, published: float) -> None:
    """The head card's speed-ups are met: EAGLE 3.1, 4 GB200, Kimi-K2.6-NVFP4, SPEED-Bench coding.

    It has 3.013 tokens per step at 3 drafts.
    """
    for context in (512, 2048, 4096):
        model = steps("gb200", "lightseekorg/kimi-k2.6-eagle3.1-mla", context=context)
        assert 3.013 / model.cost_ratio(concurrency, 3) == pytest.approx(published, rel=0.10)


@given(sequences=st.sampled_from([1, 3, 4, 16, 50, 128]), queries=st.integers(1, 8))
@settings(max_examples=40)
def test_more_work_never_costs_less(sequences: int, queries: int) -> None:
    for layout in (Layout(4), Layout(8, True), Layout(8, True, True)):
        model = steps("b200", layout=layout)
        here = model.step(sequences, queries)
        # the tables are measurements: neighbouring rows differ by a few percent of noise
        assert here <= 1.05 * model.step(sequences, queries + 1)
        assert here <= 1.05 * model.step(sequences + 1, queries)
        assert here <= 1.05 * steps("b200", layout=layout, context=8192).step(sequences, queries)
        assert model.draft(sequences, queries) < model.draft(sequences, queries + 1)


def test_tables_are_read_as_they_are() -> None:
    found = kernels(gpu_spec("b200"), "nvfp4")
    assert found and found.moe_kernel == "TRTLLM"
    cutlass = replace(found, moe_kernel="CUTLASS")
    for layout, at, expected in (("tp4", 1, 24.5), ("tp4", 64, 253.6), ("ep8", 4, 28.6)):
        assert found.moe(layout, at) == expected
    assert (cutlass.moe("tp4", 1), cutlass.moe("ep4", 16)) == (73.6, 174.8)
    assert found.allreduce(4, 8192) == 5.5 and found.allreduce(8, 65536) == 6.3
    assert kernels(gpu_spec("h200"), "nvfp4") is None
    series = Series((1, 4, 8), (2.0, 5.0, 5.0))
    assert [interpolate(series, at) for at in (0.5, 1, 2, 4, 6, 16)] == [
        2.0,
        2.0,
        3.0,
        5.0,
        5.0,
        5.0,
    ]


def bench_file(directory: Path, histograms: dict[str, tuple[int, ...]]) -> Path:
    """results.json with what bench's own summary says of one answer per category."""
    turns = [
        TurnCounts(
            name, name, 100, 100, sum(i * n for i, n in enumerate(counts)), 300, counts, "test"
        )
        for name, counts in histograms.items()
    ]
    path = directory / "results.json"
    categories = {name: vars(found) for name, found in by_category(turns).items()}
    served = {"kind": "trtllm", "model": "Kimi-K2.5-NVFP4"}
    write_json(path, {**vars(summarize(turns)), "server": served, "categories": categories})
    return path


def test_a_bench_file_gives_the_curve(tmp_path: Path) -> None:
    path = bench_file(tmp_path, {"chat": (40, 30, 20, 10), "code": (10, 10, 10, 70)})
    found = parse_acceptance(str(path))
    assert found.length(3) == pytest.approx(
        1 + (100 + 240) / 200, abs=1e-3
    )  # accepted drafts over steps
    assert found.known == pytest.approx((150 / 200, 110 / 150, 80 / 110), abs=1e-3)
    assert found.measured_lengths == [1, 2, 3]
    assert len(parse_acceptance(str(tmp_path)).known) == 3
    assert "served as Kimi-K2.5-NVFP4: " in found.source, (
        "a plan for another model shows that it is"
    )


def test_what_bench_doubted_is_repeated(tmp_path: Path) -> None:
    path = bench_file(tmp_path, {"chat": (40, 30, 20, 10)})
    degenerate = {
        "code": "X",
        "severity": "warning",
        "where": "",
        "message": "the answers repeat themselves",
        "remedy": "",
    }
    edit_json(path, problems=[degenerate])
    done = trtspec(
        "plan",
        TARGET,
        "--head",
        MLA,
        "--concurrency",
        "1",
        "--max-draft",
        "3",
        "--acceptance",
        path,
    )
    assert "bench doubted this measurement: the answers repeat themselves" in done.stdout
    assert (
        "trtspec build-config nvidia/Kimi-K2.6-NVFP4 --head nvidia/Kimi-K2.6-Eagle3 "
        "--draft-len 2 --gpu b200"
    ) in done.stdout


def test_a_bench_file_with_a_length_alone(tmp_path: Path) -> None:
    path = bench_file(tmp_path, {"chat": (40, 30, 20, 10)})
    edit_json(path, conditional=None)
    found = parse_acceptance(str(path))
    assert found.length_at == (2.0, 3) and found.length(3) == pytest.approx(2.0, abs=1e-3)


@pytest.mark.parametrize("text", ["", "x", "5", "0", "2.6@0", "1.2@99999999x", "-1"])
def test_a_bad_acceptance_is_a_usage_error(text: str) -> None:
    with pytest.raises(UsageError):
        parse_acceptance(text)


def test_a_bench_file_without_acceptance_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    write_json(path, {**vars(summarize([])), "categories": {}})
    with pytest.raises(UsageError, match="holds no acceptance"):
        parse_acceptance(str(path))
    for text in ("[]", "{", "{}"):
        path.write_text(text)
        with pytest.raises(UsageError, match="not a results.json"):
            parse_acceptance(str(path))


def test_layouts_that_cannot_be() -> None:
    assert layout_of(8, None, 8, False) == Layout(8, True)
    for arguments in ((4, 8, None, False), (8, 3, None, False), (8, None, 2, False)):
        with pytest.raises(UsageError):
            layout_of(*arguments)


def test_the_command_keeps_its_contract() -> None:
    done = succeeded(
        "plan",
        TARGET,
        "--head",
        MLA,
        "--concurrency",
        "1,16",
        "--acceptance",
        "2.62@3",
        "--max-draft",
        "8",
        "--json",
    )
    report = done.json
    assert {"fits", "per_gpu", "kv_tokens", "points", "recommended"} <= set(report)
    assert {"weights", "head", "kv", "reserve"} <= set(report["per_gpu"])
    wanted = {"concurrency", "draft_len", "acceptance_length", "cost_ratio", "speedup"}
    assert all(wanted <= set(point) for point in report["points"]) and len(report["points"]) == 18
    point = next(p for p in report["points"] if (p["concurrency"], p["draft_len"]) == (1, 3))
    assert point["speedup"] == pytest.approx(
        point["acceptance_length"] / point["cost_ratio"], rel=1e-3
    )
    assert report["fits"] and set(report["recommended"]) == {"1", "16"}
    assert report["best"]["command"].startswith("trtspec build-config ")


def test_a_published_head_is_planned_with_the_figure_of_its_card() -> None:
    words = ("--head", MLA, "--concurrency", "1", "--json")
    report = trtspec("plan", TARGET, *words).json
    best = report["recommended"]["1"]
    assert (best["draft_len"], best["trust"]) == (3, "model card") and "mt-bench" in report[
        "acceptance"
    ]["source"]
    assert best["tokens_per_s_per_user"] == pytest.approx(1000 / best["tpot_ms"], rel=0.02)
    assert not report["problems"]
    other = trtspec("plan", "nvidia/Kimi-K2.5-NVFP4", *words).json
    assert [problem["code"] for problem in other["problems"]] == [
        "TS-PAIR-OTHER-TARGET"
    ] and not other["acceptance"]


def test_acceptance_of_another_model_is_doubted() -> None:
    measured = Acceptance("bench", (0.7,), model="/models/kimi-nano/")
    assert [found.code for found in other_model(measured, "nvidia/Kimi-K2.6-NVFP4")] == [
        "TS-PLAN-OTHER-MODEL"
    ]
    assert not other_model(measured, "/elsewhere/Kimi-nano/")
    assert not other_model(measured, "org/kimi-nano@v1")


def test_without_acceptance_no_speed_up_is_claimed() -> None:
    done = succeeded("plan", TARGET, "--head", NO_CARD, "--concurrency", "1")
    assert "never assumed" in done.stdout and "wins there above" in done.stdout
    report = trtspec("plan", TARGET, "--head", NO_CARD, "--concurrency", "1", "--json").json
    assert all(point["speedup"] is None for point in report["points"] if point["draft_len"])
    assert (
        report["recommended"]["1"]["draft_len"] is None
        and report["recommended"]["1"]["speedup"] is None
    )


@pytest.mark.parametrize(
    ("arguments", "status", "says"),
    table(__file__),
)
def test_what_it_refuses(arguments: tuple[str, ...], status: int, says: str) -> None:
    done = trtspec("plan", *arguments)
    assert done.status == status and says in done.stderr and "Traceback" not in done.stderr
