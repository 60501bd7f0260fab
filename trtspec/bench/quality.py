"""Accuracy on tasks with known answers, paired by task: does the served model still solve what the other one solved?

Tasks come from a file: rows with a question and an answer (GSM8K's own rows among them), or a task of lm-eval whose
data lie beside it. Answers are graded here, by the last thing that each calls its answer; the two servers are compared
by McNemar's exact test.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Any, Literal

from trtspec import files
from trtspec.bench.asking import Asker
from trtspec.bench.gate import UNLIKELY, more_often
from trtspec.bench.transcript import AskedPrompt, TaskReply
from trtspec.checkpoint.rows import read_rows
from trtspec.errors import UsageError

QUESTION_FIELDS, ANSWER_FIELDS = ("question", "prompt", "problem", "input"), ("answer", "target", "solution")
HINTS = {
    "number": "\n\nThink step by step. End with a line that reads: #### and the number.",
    "choice": "\n\nEnd with a line that reads: Answer: and the letter.",
    "exact": "",
    "contains": "",
}
YAML_SUFFIXES = (".yaml", ".yml")
# what a task of lm-eval may say here; anything else could change what is asked or how it is graded
READ_KEYS = {
    "task", "dataset_path", "dataset_kwargs", "test_split", "doc_to_text", "doc_to_target", "generation_kwargs",
    "output_type", "num_fewshot", "metric_list", "tag", "metadata", "repeats",
}  # fmt: skip
REMEDY = 'rows read {"question": "...", "answer": "...", "grader": "number|choice|exact|contains"}'
Grader = Literal["number", "choice", "exact", "contains"]
GRADERS: tuple[Grader, ...] = ("number", "choice", "exact", "contains")
NUMBER = re.compile(r"-?(?:\d[\d,]*\.?\d*|\.\d+)")
MARKED = re.compile(r"####\s*(.+)")  # where GSM8K writes the answer of a row
BOXED = re.compile(r"\\boxed\{([^{}]*)\}")
SAID = re.compile(r"(?:final answer|answer)\s*(?:is|:|=)\s*\**\s*([^\n]+)", re.IGNORECASE)
LETTER = re.compile(r"\b([A-J])\b")


@dataclass(frozen=True)
class GradedTask:
    """One question with the answer that is right."""

    id: str
    question: str
    answer: str
    grader: Grader

    @property
    def digest(self) -> str:
        """By which two servers are known to have been asked the same: an id may be only a line's number."""
        return hashlib.sha256(json.dumps([self.question, self.answer, self.grader]).encode()).hexdigest()


@dataclass(frozen=True)
class TaskSet:
    """The tasks of a file and how long an answer may be."""

    name: str
    tasks: list[GradedTask]
    max_tokens: int


def load_tasks(path: Path, max_tokens: int, samples: int | None = None) -> TaskSet:
    """Raises UsageError for a file without tasks, and for what is not understood in it."""
    found = _lm_eval(path) if path.suffix in YAML_SUFFIXES else _rows(path)
    if not found:
        raise UsageError(f"{path} holds no task", REMEDY)
    twice = len(found) - len({task.id for task in found})
    if twice:
        raise UsageError(f"{path} holds {twice} ids twice", "give each task an id of its own, or none")
    return TaskSet(path.name, found[:samples], max_tokens)


def _rows(path: Path) -> list[GradedTask]:
    return [_task_of(row.value, str(row.line), f"{row.file}:{row.line}") for row in read_rows(str(path))]


def _task_of(row: Any, place: str, where: str) -> GradedTask:
    if not isinstance(row, dict):
        raise UsageError(f"{where} is no object", REMEDY)
    question = next((row[key] for key in QUESTION_FIELDS if isinstance(row.get(key), str)), None)
    answer = next((row[key] for key in ANSWER_FIELDS if isinstance(row.get(key), (str, int, float))), None)
    if not question or answer is None or isinstance(answer, bool):
        raise UsageError(f"{where} has no question or no answer", REMEDY)
    grader = row.get("grader") or _grader_for(str(answer))
    if grader not in GRADERS:
        raise UsageError(f"{where}: no grader is called {grader!r}", REMEDY)
    marked = MARKED.search(str(answer))
    right = marked[1].strip() if marked else str(answer).strip()
    if grader == "number" and number(right) is None:
        raise UsageError(f"{where}: the answer {right[:40]!r} is not a number", REMEDY)
    return GradedTask(str(row.get("id", place)), question + HINTS[grader], right, grader)


def _grader_for(answer: str) -> Grader:
    marked = MARKED.search(answer)
    text = (marked[1] if marked else answer).strip()
    if re.fullmatch(r"[A-J]", text):
        return "choice"
    return "number" if number(text) is not None and not re.search(r"[^\W\d]", text) else "exact"


def _lm_eval(path: Path) -> list[GradedTask]:
    """The tasks of an lm-eval YAML with `dataset_path: json`, templates in place of code, and no shots."""
    from jinja2 import StrictUndefined
    from jinja2.exceptions import TemplateError
    from jinja2.sandbox import SandboxedEnvironment

    remedy = "write the tasks as rows, one JSON object a line; lm-eval itself runs what needs code or shots"
    try:
        config = files.load_text(files.read_yaml_text(path))
    except files.YamlError as error:
        raise UsageError(f"{path} is no task of lm-eval: {error}", remedy) from None
    if not isinstance(config, dict):
        raise UsageError(f"{path} is no task of lm-eval", remedy)
    unread = sorted(str(key) for key in config if key not in READ_KEYS)
    settings = config.get("dataset_kwargs")
    data = settings.get("data_files") if isinstance(settings, dict) else None
    split = config.get("test_split", "test")
    name = data.get(split) if isinstance(data, dict) and isinstance(split, str) else data
    texts = config.get("doc_to_text"), config.get("doc_to_target")
    generates = config.get("output_type", "generate_until") == "generate_until"
    if unread or config.get("dataset_path") != "json" or config.get("num_fewshot") or not generates:
        what = (
            f"it has {', '.join(unread)}" if unread else "it has shots, choices by likelihood, or data from elsewhere"
        )
        raise UsageError(f"{path} is a task that is not read here: {what}", remedy)
    if not isinstance(name, str) or not all(isinstance(text, str) for text in texts):
        raise UsageError(f"{path} names no data file, or no doc_to_text and doc_to_target", remedy)
    environment = SandboxedEnvironment(undefined=StrictUndefined, keep_trailing_newline=True)  # as lm-eval
    found = []
    try:
        asked, right = (environment.from_string(str(text)) for text in texts)
        for row in read_rows(str(path.parent / name)):
            if not isinstance(row.value, dict):
                raise UsageError(f"{row.file}:{row.line} is no object", remedy)
            answer = right.render(row.value).strip()
            question = asked.render(row.value)
            task = _task_of({"question": question, "answer": answer}, str(row.line), f"{row.file}:{row.line}")
            found.append(replace(task, question=question))
    except TemplateError as error:
        raise UsageError(f"{path}: a template does not render: {error}", remedy) from None
    return found


def grade(task: GradedTask, text: str) -> bool:
    """Whether an answer is right; the last thing that it calls its answer counts."""
    if task.grader == "contains":
        return _plain(task.answer) in _plain(text)
    said = final_answer(text)
    if task.grader == "number":
        return number(said, last=True) == number(task.answer) is not None
    if task.grader == "choice":
        letters = LETTER.findall(said)
        return bool(letters) and letters[0] == task.answer
    return _plain(said) == _plain(task.answer)


def final_answer(text: str) -> str:
    """Behind the last ####, in the last \\boxed{}, behind the last `answer is`; else the whole text."""
    for pattern in (MARKED, BOXED, SAID):
        found = pattern.findall(text)
        if found:
            return str(found[-1]).strip()
    return text.strip()


def number(text: str, last: bool = False) -> Decimal | None:
    """The only number in a text, or its last one; thousands may be separated by commas."""
    found = NUMBER.findall(text)
    if not found or (len(found) > 1 and not last):
        return None
    try:
        return Decimal(found[-1].replace(",", "").rstrip(".")).normalize()
    except InvalidOperation:
        return None


def _plain(text: str) -> str:
    return " ".join(text.casefold().split()).strip(" .*`\"'")


async def ask_tasks(asker: Asker, asked: TaskSet) -> list[TaskReply]:
    """Each task once, at temperature 0. What was cut off is graded as what came."""
    slots = asyncio.Semaphore(asker.concurrency)
    plain = replace(asker, logprobs=False, max_tokens=asked.max_tokens)

    async def one(task: GradedTask) -> TaskReply:
        async with slots:
            found = await plain.ask(
                AskedPrompt(task.id, "tasks", [{"role": "user", "content": task.question}], "tasks")
            )
        correct = found.error is None and grade(task, found.content)
        cut = found.finish_reason == "length"
        return TaskReply(task.id, correct, found.text, found.error, cut, task.digest, asked.max_tokens)

    return list(await asyncio.gather(*(one(task) for task in asked.tasks)))


def refuse_other_tasks(recorded: Sequence[TaskReply], asked: TaskSet) -> None:
    """Raises UsageError where a recording answers other tasks under the same ids, or had another limit of tokens."""
    before = {task.id: task for task in recorded}
    remedy = "pass the file and the limit that the recording was made with, or record the plain server again"
    for task in asked.tasks:
        old = before.get(task.id)
        if old is not None and old.digest not in (None, task.digest):
            raise UsageError(f"task {task.id} of {asked.name} is not the recording's task of that id", remedy)
        if old is not None and old.max_tokens not in (None, asked.max_tokens):
            limits = f"the recording's tasks had {old.max_tokens} tokens (--task-tokens), not {asked.max_tokens}"
            raise UsageError(limits, remedy)


@dataclass(frozen=True, kw_only=True)
class PairedTasks:
    """Tasks that the other server answered: how many it solved, and how many were lost and won. `failed` are tasks that
    brought no answer, here and there; `p` is the chance of so many more here. Where that is no accident, they count as
    not solved, else they are left out, as the other server's are."""

    pairs: int
    before: int
    lost: list[str]
    won: int
    failed: int
    failed_before: int
    p: float

    @property
    def fails(self) -> bool:
        return self.p < UNLIKELY


def paired(expected: Sequence[TaskReply], got: Sequence[TaskReply]) -> PairedTasks:
    before = {task.id: task for task in expected}
    both = [(before[task.id], task) for task in got if task.id in before]
    earlier, failed = (sum(pair[side].error is not None for pair in both) for side in (0, 1))
    p = more_often(failed, len(both), earlier, len(both))
    pairs = [(old, new) for old, new in both if old.error is None and (new.error is None or p < UNLIKELY)]
    return PairedTasks(
        pairs=len(pairs),
        before=sum(old.correct for old, _ in pairs),
        lost=[new.id for old, new in pairs if old.correct and not new.correct],
        won=sum(new.correct and not old.correct for old, new in pairs),
        failed=failed,
        failed_before=earlier,
        p=p,
    )
