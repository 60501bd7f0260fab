"""The records of a training run: rows of training.jsonl and provenance.json beside a head."""

from __future__ import annotations

from typing import Any, NotRequired, TypedDict


class Evaluation(TypedDict):
    """Figures on held-out samples.

    Args:
        accuracy: fraction of drafts that are the target's best token, for each training-time-test
            step.
        acceptance_length: tokens per verification (see `simulate_acceptance`). Absent if
            there was no verification.
    """

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
    """A summary of training.jsonl (see `curve.summary`).

    Args:
        tokens_seen: number of tokens of all steps.
        loss: mean loss of the last twentieth of the steps.
        accuracy: mean accuracy of these steps, for each training-time-test step.
        curve: all evaluations. Absent without held-out samples.
        estimated_acceptance_length: acceptance length of the last evaluation.
    """

    tokens_seen: int
    loss: float
    accuracy: list[float]
    held_out_loss: NotRequired[float]
    held_out_accuracy: NotRequired[list[float]]
    curve: NotRequired[list[EvaluationAtStep]]
    estimated_acceptance_length: NotRequired[float]


class TrainingProgress(TypedDict):
    """The progress of the run that wrote a head.

    Args:
        steps: number of optimizer steps that are done.
        total: number of optimizer steps of the whole run.
        stopped: reason why the run ended before its last step. Absent for a head in `best`.
        held_out_figures: evaluation of a head in `best`. Absent for the last head.
    """

    steps: int
    total: int
    finished: bool
    stopped: NotRequired[str | None]
    held_out_figures: NotRequired[Evaluation | None]


class TrainingFigures(CurveSummary, TrainingProgress):
    """The object `training` of the record.

    Args:
        samples: number of samples that are trained on.
        held_out: number of held-out samples.
        peak_lr: peak learning rate.
        processes: number of training processes.
        draft_vocabulary_coverage: fraction of the tokens written by the target that are in the
            draft vocabulary. Absent if the head drafts from the whole vocabulary.
    """

    samples: int
    held_out: int
    peak_lr: float
    processes: int
    draft_vocabulary_coverage: NotRequired[float]


class AcceptanceRow(TypedDict):
    """The measured acceptance of a category.

    Args:
        acceptance_length_interval: 95 % confidence interval over prompts. None for fewer than 3
            prompts.
    """

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

    Args:
        held_out: ids of the held-out samples.
    """

    command: NotRequired[str]
    source: NotRequired[dict[str, Any]]
    options: NotRequired[dict[str, Any]]
    versions: NotRequired[dict[str, str]]
    parameters: NotRequired[int]
    training: NotRequired[TrainingFigures]
    held_out: NotRequired[list[str]]
    acceptance: NotRequired[MeasuredAcceptance]
