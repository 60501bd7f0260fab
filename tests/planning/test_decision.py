"""The choice that plan makes: ranked, within targets, and a command that build-config accepts."""

import itertools
import re
import shlex
from contextlib import redirect_stdout
from dataclasses import replace
from io import StringIO

import pytest
from typer.testing import CliRunner, Result

from trtspec.checkpoint.hub import load_head
from trtspec.cli.app import app
from trtspec.cli.plan import PlanOptions, choose_layout
from trtspec.data_files import gpu_names, load_yaml
from trtspec.planning.decision import Decision, command, decide
from trtspec.planning.layout import Layout
from trtspec.planning.tables import no_choice, tables_and_lines
from trtspec.records import parse
from trtspec.report import print_tables

NVFP4, HEAD = "nvidia/Kimi-K2.6-NVFP4", "nvidia/Kimi-K2.6-Eagle3"
TARGETS = sorted(load_yaml("models.yaml")["targets"])
PAIRS = [(NVFP4, HEAD), ("nvidia/Kimi-K2.5-NVFP4", "lightseekorg/kimi-k2.5-eagle3"), (NVFP4, None)]


def run(line: str | list[str]) -> Result:
    return CliRunner().invoke(app, shlex.split(line)[1:] if isinstance(line, str) else line)


def decided(*words: str) -> tuple[Decision, str]:
    """The decision of `trtspec plan` with these words, and what it prints."""
    options = parse(PlanOptions, list(words), "plan")
    decision = choose_layout(options)
    with redirect_stdout(StringIO()) as output:
        print_tables(*tables_and_lines(decision))
    return decision, output.getvalue()


def printed_command(text: str) -> str | None:
    found = re.search(r"^  (trtspec build-config .*)$", text, re.MULTILINE)
    return found[1] if found else None


@pytest.mark.parametrize("gpu", gpu_names())
def test_build_config_accepts_every_command_that_is_printed(gpu: str) -> None:
    """Every published target, every number of GPUs; what is not recommended names its reason."""
    recommended = 0
    for target, gpus in itertools.product(TARGETS, (1, 2, 4, 8, 16)):
        decision, printed = decided(
            target, "--gpu", gpu, "--gpus", str(gpus), "--concurrency", "1,32"
        )
        line = printed_command(printed)
        assert (line is None) == (decision.best is None) and (
            line or decision.refused or "NOT fit" in printed or "speed is not known" in printed
        ), printed
        if line:
            recommended += 1
            result = run(line)
            assert result.exit_code == 0, f"{line}: {result.exception}\n{result.output}"
    assert recommended or gpu == "h100", "something runs on each of them"


@pytest.mark.parametrize(("target", "head"), PAIRS)
@pytest.mark.parametrize("sizes", [("1024", "1024"), ("60000", "4000"), ("200000", "60000")])
def test_the_marked_row_is_the_printed_command(
    target: str, head: str | None, sizes: tuple[str, str]
) -> None:
    words = ["--head", head, "--acceptance", "2.62@3"] if head else []
    for gpu, gpus in (("b200", "4"), ("b200", "8"), ("gb300", "4")):
        size = ("--isl", sizes[0], "--osl", sizes[1])
        decision, printed = decided(
            target, *words, "--gpu", gpu, "--gpus", gpus, *size, "--concurrency", "1,4,16"
        )
        line = printed_command(printed)
        assert line is not None and run(line).exit_code == 0
        (row,) = (row.split() for row in printed.splitlines() if row.split()[1:2] == ["best"])
        concurrency, _, layout, drafts = row[:4]
        assert f"--concurrency {concurrency}" in line and f"--tp-size {gpus}" in line
        assert ("--attention-dp" in line.split()) == layout.startswith("D")
        assert (f"--ep-size {gpus}" in line) == ("E" in layout)
        assert (f"--draft-len {drafts}" in line) == (drafts != "0")
        assert decision.best is not None and decision.rows[0] is decision.best


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ((NVFP4, "--gpu", "h200", "--gpus", "8"), "no tensor cores for nvfp4"),
        ((NVFP4, "--gpu", "h100", "--gpus", "16"), "no tensor cores for nvfp4"),
        (("moonshotai/Kimi-K2.6", "--gpu", "h200", "--gpus", "8"), "INT4"),
        (("moonshotai/Kimi-K2.6", "--gpu", "b200", "--gpus", "8"), "INT4"),
        ((NVFP4, "--isl", "300000", "--gpu", "b300"), "262,144 positions"),
    ],
)
def test_what_build_config_refuses_is_never_recommended(
    words: tuple[str, ...], reason: str
) -> None:
    decision, printed = decided(*words)
    failure = no_choice(decision)
    assert decision.best is None and failure is not None and reason in failure.message
    assert (
        "trtspec build-config" not in printed and run(["plan", *words]).exit_code == 1
    )  # raised: status 3 of main
    assert decision.fits, "memory is not the reason"


def test_a_head_of_another_target_is_never_recommended() -> None:
    options = parse(PlanOptions, [NVFP4, "--head", HEAD, "--acceptance", "2.62@3"], "plan")
    head = replace(load_head(HEAD).spec, target_hidden_size=4096)
    decision = decide([Layout(4)], replace(choose_layout(options).setting, head=head))
    assert decision.best is None and {problem.code for problem in decision.refused} == {
        "TS-PAIR-WIDTH"
    }
    failure = no_choice(decision)
    assert failure is not None and failure.message.startswith("the head fuses states of width 4096")


def test_overrides_of_the_plan_reach_the_command() -> None:
    _, printed = decided(NVFP4, "--kv-fraction", "0.8", "--concurrency", "8")
    line = printed_command(printed)
    assert line is not None and "free_gpu_memory_fraction=0.8" in line
    assert "free_gpu_memory_fraction: 0.8" in run(line).output


def test_targets_are_met_with_the_best_throughput() -> None:
    words = (NVFP4, "--head", HEAD, "--acceptance", "2.62@3", "--gpus", "8", "--isl", "4096")
    words = (*words, "--concurrency", "1,2,3,4,6,8,12,16,24,32")
    decision, printed = decided(*words, "--tpot", "8", "--ttft", "500")
    best = decision.best
    assert best is not None and best.tpot_ms is not None and best.ttft_ms is not None
    assert best.tpot_ms <= 8 and best.ttft_ms <= 500
    meeting = [row for row in decision.servable if row.meets_limits and row.trust == "measured"]
    assert (
        best.tokens_per_s == max(row.tokens_per_s or 0 for row in meeting) and best.concurrency > 1
    )
    tighter, _ = decided(*words, "--tpot", "5", "--ttft", "500")
    assert tighter.best is not None and (tighter.best.tokens_per_s or 0) < (best.tokens_per_s or 0)
    assert run(printed_command(printed) or "").exit_code == 0


def test_targets_that_nothing_meets_are_named() -> None:
    words = (NVFP4, "--head", HEAD, "--acceptance", "2.2@3", "--isl", "8192", "--osl", "1000")
    decision, printed = decided(*words, "--tpot", "3")
    failure = no_choice(decision)
    assert decision.best is None and printed_command(printed) is None
    assert failure is not None and "nothing on 4 x B200 meets TPOT 3 ms" in failure.message


def test_a_prompt_costs_the_others_time() -> None:
    decision, _ = decided(NVFP4, "--isl", "16384", "--concurrency", "1,2,16", "--tp", "4")
    rows = {row.concurrency: row for row in decision.rows}
    alone = rows[1].point
    assert alone is not None and rows[1].tpot_ms == pytest.approx(
        alone.step_ms
    )  # nobody else's prompt stops it
    assert all(
        (rows[c].tpot_ms or 0) > (rows[c].point.step_ms if rows[c].point else 0) for c in (2, 16)
    )
    ttfts = [rows[c].ttft_ms or 0 for c in (1, 2, 16)]
    assert ttfts == sorted(ttfts)


def test_lengths_that_cannot_be_told_apart_are_the_shortest() -> None:
    """Never more than half a percent given up, and no shorter draft is as close."""
    for length, gpus, gpu in itertools.product((2.2, 2.6, 3.2), ("4", "8"), ("b200", "gb200")):
        words = (NVFP4, "--head", HEAD, "--acceptance", f"{length}@3", "--gpus", gpus, "--gpu", gpu)
        words = (*words, "--max-draft", "8")
        decision, _ = decided(*words, "--concurrency", "1,2,4,8,16,32,64")
        for row in decision.servable:
            if row.point is not None:  # attention DP over two trays
                rates = [point.decode_rate or 0 for point in row.plan.at(row.concurrency)]
                assert (row.point.decode_rate or 0) >= 0.995 * max(rates)
                assert all(rate < 0.995 * max(rates) for rate in rates[: row.point.draft_len])


def test_trust_and_range() -> None:
    words = ("--acceptance", "3.19@3", "--concurrency", "1", "--tp", "4", "--max-draft", "8")
    decision, _ = decided(NVFP4, "--head", HEAD, *words)
    plan = decision.plans[0]
    spreads = {point.draft_len: plan.speedup_range(point) for point in plan.at(1)[1:]}
    assert decision.rows[0].trust == "extrapolated" and plan.best(1).draft_len > 3
    for point in plan.at(1)[1:]:
        low, high = spreads[point.draft_len] or (0.0, 0.0)
        assert low <= (point.acceptance_length or 0) / point.cost_ratio <= high
        assert (point.speedup is None) == (point.draft_len != 3)
    width = {k: (spread[1] / spread[0]) for k, spread in spreads.items() if spread}
    assert width[8] > width[3], "what is extrapolated is less certain"


def test_a_layout_whose_speed_is_not_known_gets_no_command() -> None:
    decision, printed = decided(NVFP4, "--gpu", "b200", "--gpus", "16", "--concurrency", "64")
    assert decision.best is None and decision.servable and "speed is not known" in printed
    assert printed_command(printed) is None
    _, printed = decided(NVFP4, "--gpu", "gb200", "--gpus", "8")
    assert "--nodes 2" in (printed_command(printed) or "")


def test_the_command_quotes_what_a_shell_would_split() -> None:
    options = parse(PlanOptions, [NVFP4], "plan")
    setting = replace(choose_layout(options).setting, target="/models/my kimi")
    best = decide([Layout(4)], setting).best
    assert best is not None and "'/models/my kimi'" in command(best)


def test_what_was_not_measured_between_trays_is_not_ranked() -> None:
    """Experts across trays are not ranked, since nobody measured them.

    aiconfigurator's wide expert parallelism takes nearly twice what the kernels of one node would
    give.
    """
    decision, printed = decided(
        NVFP4, "--gpu", "gb200", "--gpus", "8", "--isl", "8192", "--concurrency", "4,2000"
    )
    assert [plan.layout.short for plan in decision.plans if plan.points] == ["TP8", "TEP8"]
    assert (
        "DEP8 holds it, its speed is not known" in printed
        or "no layout's cache holds it" in printed
    )
    assert decision.best is not None and decision.best.concurrency == 4
    assert decided(NVFP4, "--gpus", "8")[0].best.layout.short == "DEP8"  # type: ignore[union-attr]
