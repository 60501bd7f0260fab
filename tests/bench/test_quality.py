"""Graded tasks and the statistics of the gate: against scipy and simulated runs."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path

import pytest

from trtspec.bench import gate
from trtspec.bench.check import check_tasks
from trtspec.bench.quality import GradedTask, final_answer, grade, load_tasks, refuse_other_tasks
from trtspec.bench.transcript import Recording, TaskReply
from trtspec.errors import UsageError


@pytest.mark.parametrize(
    ("answer", "text", "right"),
    [
        ("72", "He sells 48 + 24 = 72.\n#### 72", True),
        ("72", "So the answer is 72 clips.", True),
        ("1234", r"\boxed{1,234.00}", True),
        ("72", "72 is wrong, the answer is 71", False),
        ("-5", "#### -5", True),
        ("0.5", "#### .50", True),
        ("72", "", False),
        ("72", "#### seventy-two", False),
    ],
)
def test_numbers_are_graded(answer: str, text: str, right: bool) -> None:
    assert grade(GradedTask("1", "?", answer, "number"), text) is right


def test_other_graders() -> None:
    assert grade(GradedTask("1", "?", "B", "choice"), "It cannot be A.\nAnswer: B")
    assert not grade(GradedTask("1", "?", "B", "choice"), "Answer: A, not B")
    assert grade(GradedTask("1", "?", "Paris", "exact"), "The answer is **Paris**.")
    assert grade(GradedTask("1", "?", "Paris", "contains"), "I think of paris in spring")
    assert final_answer("a #### 1\nb #### 2") == "2"


def test_tasks_of_gsm8k_and_of_lm_eval(tmp_path: Path) -> None:
    rows = [{"question": "2 and 3?", "answer": "2+3=5\n#### 5"}, {"question": "A or B?", "answer": "B"}]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = load_tasks(tmp_path / "rows.jsonl", 64).tasks
    assert [(task.answer, task.grader) for task in found] == [("5", "number"), ("B", "choice")]
    task = tmp_path / "task.yaml"
    task.write_text(
        "task: sums\ndataset_path: json\ndataset_kwargs:\n  data_files:\n    test: rows.jsonl\n"
        'doc_to_text: "Q: {{question}}\\nA:"\ndoc_to_target: "{{answer.split(\'####\')[-1].strip()}}"\n'
    )
    assert load_tasks(task, 64).tasks[0].question == "Q: 2 and 3?\nA:"
    for line in ("process_docs: !function x.y\n", "fewshot_split: train\n", "num_fewshot: 5\n"):
        other = tmp_path / "other.yaml"
        other.write_text(task.read_text() + line)
        with pytest.raises(UsageError, match="task"):
            load_tasks(other, 64)
    for bad in ("[1]", '{"question": "x"}', '{"question": "x", "answer": "y", "grader": "oracle"}', ""):
        (tmp_path / "bad.jsonl").write_text(bad)
        with pytest.raises(UsageError):
            load_tasks(tmp_path / "bad.jsonl", 64)


def test_exact_tests_agree_with_scipy() -> None:
    stats = pytest.importorskip("scipy.stats")
    for lost, won in ((0, 0), (5, 1), (10, 10), (30, 12)):
        wanted = stats.binomtest(lost, lost + won, 0.5, "greater").pvalue if lost + won else 1.0
        assert math.isclose(gate.mcnemar(lost, won), wanted, rel_tol=1e-9)
    assert math.isclose(gate.binomial_at_least(7, 20, 0.2), stats.binom.sf(6, 20, 0.2), rel_tol=1e-9)
    for found, asked, usual, among in ((3, 60, 0, 60), (4, 4, 0, 4), (0, 5, 2, 9), (7, 12, 3, 20)):
        table = [[found, asked - found], [usual, among - usual]]
        wanted = stats.fisher_exact(table, "greater").pvalue
        assert math.isclose(gate.more_often(found, asked, usual, among), wanted, rel_tol=1e-9)


def test_60_answers_show_a_fault_in_5_percent_of_them() -> None:
    assert gate.answers_needed() == 59 and gate.answers_needed(power=0.99) == 90
    dice = random.Random(1)
    seen = sum(any(dice.random() < 0.05 for _ in range(60)) for _ in range(4000)) / 4000
    assert abs(seen - gate.chance_to_see(60)) < 0.015


def runs(pairs: int, before: float, now: float, seed: int) -> tuple[Recording, Recording]:
    dice = random.Random(seed)
    made = [[TaskReply(str(i), dice.random() < share) for i in range(pairs)] for share in (before, now)]
    plain, got = (Recording("u", {}, 8, [], tasks=tasks) for tasks in made)
    return plain, got


@pytest.mark.parametrize("count", [400, pytest.param(1000, marks=pytest.mark.slow)])
def test_76_for_90_percent_is_found_with_the_proposed_number(count: int) -> None:
    pairs = gate.pairs_needed(0.90, 0.76)
    assert pairs < 200
    found = [check_tasks(*reversed(runs(pairs, 0.90, 0.76, seed)), 0.14).status for seed in range(count)]
    assert found.count("fail") / count > 0.88, f"found in {found.count('fail')} of {count} runs of {pairs} tasks"
    equal = [check_tasks(*reversed(runs(pairs, 0.90, 0.90, seed)), 0.14).status for seed in range(count)]
    assert equal.count("fail") / count < 0.06


def test_too_few_tasks_are_no_pass() -> None:
    plain, got = runs(20, 0.9, 0.9, 3)
    verdict = check_tasks(got, plain, 0.14)
    assert verdict.status == "skipped" and f"needs {verdict.detail['pairs_needed']} tasks" in verdict.message


def test_tasks_that_nobody_solves_show_no_fall() -> None:
    plain, got = (
        Recording("u", {}, 8, [], tasks=[TaskReply(str(i), False, cut=True) for i in range(200)]) for _ in "ab"
    )
    verdict = check_tasks(got, plain, 0.1)
    assert verdict.status == "skipped" and "cut off at --task-tokens: 200 answers, 200 before" in verdict.message
    few = Recording("u", {}, 8, [], tasks=[TaskReply(str(index), index < 10) for index in range(200)])
    assert "cannot show" in check_tasks(few, few, 0.1).message


def test_tasks_that_fail_are_not_solved() -> None:
    """150 failures of 400, and the other server none; a few are left out, as on both."""

    def judged(failed: int, failed_before: int = 0) -> tuple[str, str]:
        def made(first: int, failed: int) -> Recording:
            tasks = [TaskReply(str(i), i % 10 != 0) for i in range(400)]
            tasks[first : first + failed] = [
                TaskReply(task.id, False, error="HTTP 500: boom") for task in tasks[first : first + failed]
            ]
            return Recording("u", {}, 8, [], tasks=tasks)

        found = check_tasks(made(0, failed), made(200, failed_before), 0.1)
        return found.status, found.message

    status, message = judged(150)
    assert status == "fail" and message.startswith("225 of 400 tasks solved, 360 before (135 lost"), message
    assert "150 failed, 0 before" in message and "count as not solved: HTTP 500: boom" in message
    for few, before in ((5, 0), (60, 60), (20, 12)):
        status, message = judged(few, before)
        assert status == "pass" and f"{few} failed, {before} before" in message and "left out" in message, message


def test_a_recording_of_other_tasks_is_refused(tmp_path: Path) -> None:
    def written(*questions: str) -> Path:
        path = tmp_path / f"{questions[0]}.jsonl"
        path.write_text("".join(json.dumps({"question": text, "answer": "5"}) + "\n" for text in questions))
        return path

    first, other, longer = written("2 and 3?", "1 and 4?"), written("9 less 4?"), written("2 and 3? ")
    asked = load_tasks(first, 64)
    recorded = [TaskReply(task.id, True, digest=task.digest, max_tokens=64) for task in asked.tasks]
    refuse_other_tasks(recorded, asked)
    refuse_other_tasks(recorded, load_tasks(first, 64, samples=1))
    refuse_other_tasks([TaskReply(task.id, True) for task in asked.tasks], load_tasks(other, 16))  # an older recording
    for path in (other, longer):
        with pytest.raises(UsageError, match="task 1 of .* is not the recording's task"):
            refuse_other_tasks(recorded, load_tasks(path, 64))
    with pytest.raises(UsageError, match="had 64 tokens .*, not 16"):
        refuse_other_tasks(recorded, load_tasks(first, 16))
