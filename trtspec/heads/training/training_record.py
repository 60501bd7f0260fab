"""The records of a training run: rows of training.jsonl and provenance.json beside a head."""

from __future__ import annotations

from typing import Any, NotRequired, TypedDict


class Evaluation(TypedDict):
    """Figures on held-out samples. `accuracy`: top-1 agreement by training-time-test step."""

    loss: float
    accuracy: list[float]
    acceptance_length: NotRequired[float]


class EvaluationAtStep(Evaluation):
    step: int


class CurveRow(TypedDict):
    """A row of training.jsonl: the figures of a step, or the evaluation after it."""

    step: int
    loss: NotRequired[float]
    accuracy: NotRequired[list[float]]
    tokens: NotRequired[int]
    lr: NotRequired[float]
    grad_norm: NotRequired[float]
    held_out: NotRequired[Evaluation]


class CurveSummary(TypedDict):
    """Means over the end of the curve, and the last evaluation if there is one."""

    tokens_seen: int
    loss: float
    accuracy: list[float]
    held_out_loss: NotRequired[float]
    held_out_accuracy: NotRequired[list[float]]
    curve: NotRequired[list[EvaluationAtStep]]
    estimated_acceptance_length: NotRequired[float]


class TrainingProgress(TypedDict):
    """The progress of the run that wrote a head.

    `total`: all steps of the run. `stopped`: why it ended early. `held_out_figures`: the evaluation
    of a head in `best`.
    """

    steps: int
    total: int
    finished: bool
    stopped: NotRequired[str | None]
    held_out_figures: NotRequired[Evaluation | None]


class TrainingFigures(CurveSummary, TrainingProgress):
    """The object `training` of the record. `samples`, `held_out`: their numbers."""

    samples: int
    held_out: int
    peak_lr: float
    processes: int
    draft_vocabulary_coverage: NotRequired[float]


class AcceptanceRow(TypedDict):
    """The measured acceptance of a category. None: no interval for fewer than 3 prompts."""

    category: str
    prompts: int
    steps: int
    accepted: int
    histogram: list[int]
    acceptance_length: float
    acceptance_length_interval: list[float] | None
    by_position: list[float]


class MeasuredAcceptance(TypedDict):
    draft_len: int
    temperature: float
    max_tokens: int
    dtype: str
    prompts: int
    rows: list[AcceptanceRow]


class TrainingRecord(TypedDict):
    """provenance.json beside a trained head. Empty in a process that writes no head.

    `held_out`: ids of samples.
    """

    command: NotRequired[str]
    source: NotRequired[dict[str, Any]]
    options: NotRequired[dict[str, Any]]
    versions: NotRequired[dict[str, str]]
    parameters: NotRequired[int]
    training: NotRequired[TrainingFigures]
    held_out: NotRequired[list[str]]
    acceptance: NotRequired[MeasuredAcceptance]
