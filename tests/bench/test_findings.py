"""What a measurement cannot say is named, and an honest one is left alone."""

from dataclasses import replace
from typing import Any

import pytest

from trtspec.bench.load import assemble
from trtspec.bench.load.journal import LoadLevel, Round
from trtspec.bench.statistics import summarize, without_surplus
from trtspec.client import servers
from trtspec.client.client import Answer
from trtspec.client.servers import TurnCounts

WORDS = (
    "the report says that the river rose again after the storm "
    "and the bridge was closed for a week "
)


def answer(steps: int = 30, accepted: int = 45, **more: Any) -> Answer:
    """An honest answer of 1 + steps + accepted tokens, a chunk per step, as an engine writes it."""
    tokens = 1 + steps + accepted
    text = (WORDS * (1 + tokens // 18))[: 5 * tokens]
    chunks = [(0.1 + 0.01 * place, len(text) // (steps + 1)) for place in range(steps + 1)]
    histogram = [steps - accepted // 3 - (accepted % 3 > 0), 0, 0, accepted // 3]
    histogram[accepted % 3] += accepted % 3 > 0
    spec = {"steps": steps, "drafted": 3 * steps, "accepted": accepted, "histogram": histogram}
    found = Answer("q", "c", 0, started=0.0, finished=0.1 + 0.01 * steps, chunks=chunks, text=text,
                   completion_tokens=tokens, finish_reason="stop", spec_decode=spec,
                   tokens_per_iteration=tokens / (steps + 1))  # fmt: skip
    return replace(found, **more)


def codes(found: assemble.Findings) -> list[str]:
    return [code for code, *_ in found]


def test_an_average_below_one_is_no_acceptance() -> None:
    """An average of 0.5 tokens is refused: 152 steps of 76 tokens would accept -76.

    A rounded 1 and a 0, which is no count, are honest.
    """
    faults: list[str] = []
    low = [answer(spec_decode=None, tokens_per_iteration=average) for average in (0.5, 1e-9)]
    assert (
        servers.all_counts(low, faults) == [] and "avg_decoded_tokens_per_iter is 0.5" in faults[0]
    )
    plain, untold = (
        answer(30, 0, spec_decode=None, tokens_per_iteration=average) for average in (0.999, 0.0)
    )
    assert [
        (count.steps, count.accepted) for count in servers.all_counts([plain, untold], faults)
    ] == [(30, 0)]


def counters(tokens: int, steps: int, accepted: int, answers: int) -> TurnCounts:
    return without_surplus(
        TurnCounts("all", "all", tokens, steps, accepted, 3 * steps, None, "c"), answers, answers
    )


def test_drafts_accepted_past_the_end_are_taken_out() -> None:
    """474 steps, 1024 accepted: vLLM tells 3.16, and 1,487 tokens in 24 answers make it 3.09."""
    found = counters(1487, 474, 1024, 24)
    assert found.surplus == 1024 - 989 and 1 + found.accepted / found.steps == pytest.approx(
        3.087, abs=0.001
    )
    summary = summarize([found])
    assert (
        summary.acceptance_length == pytest.approx(3.0865, abs=1e-3)
        and summary.turns == summary.questions == 24
    )
    assert summary.per_question_mean is None
    assert counters(1600, 474, 1024, 24).surplus == 0, "tokens without drafts: the counter stands"


def test_counters_of_somebody_else_are_named() -> None:
    assert not codes(assemble.in_counts([counters(1487, 474, 1024, 24)], []))
    others = [counters(24 * 76, 3000, 4000, 24), counters(24 * 76, 24 * 30, 24 * 45 + 500, 24)]
    assert all(codes(assemble.in_counts([one], [])) == ["TS-BENCH-COUNTERS"] for one in others)


def test_answers_that_are_tool_calls_are_not_empty() -> None:
    places = (
        "Rome, near the river",
        "Oslo in winter",
        "a village behind the hills",
        "Lima",
        "Kyoto at night",
    )
    calls = [
        [{"name": "get_weather", "arguments": '{"place": "' + place + '"}'}] for place in places
    ]
    called = [answer(text="", tool_calls=call) for call in calls]
    assert not codes(assemble.in_answers(called))
    silent = [replace(one, tool_calls=[]) for one in called]
    assert codes(assemble.in_answers(silent)) == ["TS-BENCH-DEGENERATE"]


def test_too_few_steps_are_said() -> None:
    turns = [TurnCounts(str(i), "c", 40, 10, 3 + 9 * (i % 3), 30, None, "s") for i in range(6)]
    found = list(assemble.too_few(turns))
    assert codes(found) == ["TS-BENCH-FEW-STEPS"] and "6 questions are too few" in found[0][2]
    many = [TurnCounts(str(i), "c", 40, 10, 14 + i % 3, 30, None, "s") for i in range(60)]
    assert not codes(assemble.too_few(many))


def test_a_rate_that_the_server_cannot_keep_is_named() -> None:
    def run(growth: float) -> Round:
        answers = []
        for i in range(40):
            start, late = 0.1 * i, growth * i
            chunks = [(start + 0.2 + late, 5)]
            answers.append(
                Answer(str(i), "c", 0, started=start, finished=start + 1 + late, chunks=chunks)
            )
        return Round(level=LoadLevel(0, 10.0), number=0, answers=answers, seconds=9.0)

    assert codes(assemble.overloaded([run(0.1)])) == ["TS-BENCH-OVERLOAD"]
    assert not codes(assemble.overloaded([run(0.0)]))


def test_a_load_that_the_questions_do_not_reach_is_named() -> None:
    def run(load: int, questions: int, rate: float | None = None) -> Round:
        answers = [Answer(str(i), "c", 0, started=0.0) for i in range(questions)]
        return Round(level=LoadLevel(load, rate), number=0, answers=answers, seconds=9.0)

    found = list(assemble.underfilled([run(4, 80), run(256, 80), run(100, 80)]))
    assert (
        codes(found) == ["TS-BENCH-FEW-QUESTIONS"]
        and "concurrency 256: a round had 80 questions" in found[0][2]
    )
    assert not codes(assemble.underfilled([run(80, 80), run(256, 80, rate=2.0)]))
    parts = [
        replace(run(8, 8), answers=run(8, 8).answers[half]) for half in (slice(5), slice(5, 8))
    ]
    assert not codes(assemble.underfilled(parts)), "a round that was resumed"
