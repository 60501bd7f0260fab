"""`trtspec inspect HEAD --against TARGET --run`: the head drafts for its target in the reference engine, and what it is
worth is judged. What has to agree and what may be wrong is in `trtspec.engine.head_check`."""

from __future__ import annotations

import random
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

from trtspec import files, report
from trtspec.cli.options import directory_of
from trtspec.errors import MissingDependency, Problem, UsageError

if TYPE_CHECKING:
    from trtspec.bench.statistics import AcceptanceSummary
    from trtspec.checkpoint.hub import Resolved
    from trtspec.engine.head_check import Trial

ANSWER_TOKENS = 32  # many short answers tell more than few long ones: the comparison is paired by text
MOST_PROMPT_TOKENS = 4096
FEWEST_TEXTS = 16  # with fewer, only the largest fault differs from chance
SPARE = 1.15  # times the weights: caches and states beside them
WEAK_SHARE = 0.7  # of the drafts accepted elsewhere
WEAK_FIRST = 0.4  # published heads have 0.78 to 0.89 of their first drafts accepted (data/acceptance_lengths.yaml)
CHANCE_FIRST = 0.1  # a head that was never trained, or one that drafts a frequent token, has less
Verdict = Literal["healthy", "weak", "broken"]


@dataclass(frozen=True)
class Expectation:
    """The acceptance length that was measured elsewhere: the lowest and the highest of its workloads."""

    low: float
    high: float
    draft_len: int
    source: str


@dataclass(frozen=True)
class HeadRun:
    """What drafting showed. `acceptance` has bench's keys and definitions."""

    verdict: Verdict
    texts: int
    prompts: str
    answer_tokens: int
    draft_len: int
    seed: int
    device: str
    dtype: str
    acceptance: AcceptanceSummary
    expected: Expectation | None
    trials: list[Trial]  # the named and best first
    problems: list[Problem] = field(repr=False)

    def to_dict(self) -> dict[str, Any]:
        """The key `run` of the JSON contract."""
        from trtspec.engine.head_check import FALSE_ALARMS, LEAST_GAIN

        plain = {name: value for name, value in vars(self).items() if name not in ("trials", "problems")}
        return plain | {
            "acceptance": asdict(self.acceptance),
            "expected": asdict(self.expected) if self.expected else None,
            "faults": [_trial_dict(trial) for trial in self.trials[:1] if trial.named],
            "tried": [_trial_dict(trial) for trial in self.trials],
            "false_alarm_rate": FALSE_ALARMS,
            "least_gain": LEAST_GAIN,
        }


def _trial_dict(trial: Trial) -> dict[str, Any]:
    one = trial.suspicion
    figures = {"before": round(trial.before, 4), "after": round(trial.after, 4), "chance": float(f"{trial.chance:.2g}")}
    return {"kind": one.kind, "detail": one.detail, **figures, "named": trial.named}


def run_head(
    head: Resolved, target: Resolved, *, prompts: str | None, samples: int, draft_len: int, seed: int, device: str
) -> HeadRun:
    """Drafts and judges. Raises TrtspecError where a head cannot draft for the target at all, MissingDependency where
    memory does not suffice, UsageError for weights that are elsewhere and for too few prompts."""
    from trtspec.bench.statistics import summarize
    from trtspec.checkpoint.tokenizer import KimiTokenizer
    from trtspec.client.servers import TurnCounts
    from trtspec.engine.head_check import draft_freely, trials
    from trtspec.models.head_weights import open_head, read_tensors
    from trtspec.models.memory import check_device, free_bytes, head_bytes, target_bytes
    from trtspec.models.precision import default_dtype, dtype_name
    from trtspec.models.weights import load_target

    head_path, target_path = directory_of(head), directory_of(target)
    check_device(device)
    shape, dtype = target.target_spec(), default_dtype(device)
    checkpoint, spec = open_head(head_path, shape)
    needed = SPARE * (target_bytes(target_path, shape, dtype, device) + head_bytes(checkpoint, dtype))
    if needed > (free := free_bytes(device)):
        text = f"the target and the head take {needed / 2**30:.1f} GiB on {device}, {free / 2**30:.1f} are free"
        raise MissingDependency(f"TS-HEAD-RUN-MEMORY {text}", "use a machine or a --device with more memory")
    tensors = read_tensors(checkpoint, dtype, device)
    names, asked = _prompts(KimiTokenizer(target_path), prompts, samples, seed)
    model = load_target(target_path, dtype=dtype, device=device)
    done = draft_freely(model, spec, tensors, asked, draft_len, ANSWER_TOKENS)
    with report.progress_bar("faults undone", None, "trials") as bar:
        tried = trials(spec, tensors, model, asked, done, draft_len=draft_len, advance=bar.advance)
    counted = [(len(one.token_ids), one.stats) for one in done]
    acceptance = summarize([
        TurnCounts(name, "all", tokens, stats.steps, stats.accepted, stats.drafted, tuple(stats.histogram),
                   source="the reference engine")
        for name, (tokens, stats) in zip(names, counted, strict=True)
    ])  # fmt: skip
    expected = expectation(head)
    verdict, problems = judge(str(head_path), acceptance, expected, tried[0], draft_len)
    return HeadRun(
        verdict, len(done), prompts or "kimi-nano's held-out prompts", ANSWER_TOKENS, draft_len,
        seed, device, dtype_name(dtype), acceptance, expected, tried, problems,
    )  # fmt: skip


def _prompts(tokenizer: Any, prompts: str | None, samples: int, seed: int) -> tuple[list[str], list[list[int]]]:
    """(names, token ids) of `samples` prompts, drawn by the seed and spread over their categories."""
    from trtspec.bench.questions.datasets import NANO, left_out, load_dataset, spread

    questions = list(load_dataset(prompts or NANO).questions)
    if any(question.has_pictures for question in questions):
        message = f"questions of {prompts} have pictures, which the target's text model does not read"
        raise UsageError(message, "pass --prompts of text")
    if missing := left_out(questions):
        report.announce(f"{prompts}: {missing}")
    random.Random(seed).shuffle(questions)
    rendered = {}
    for place, question in enumerate(questions):
        messages, tools = question.first_request()
        rendered[place] = tokenizer.apply_chat_template(messages, tools or None)
    fitting = [place for place, ids in rendered.items() if len(ids) <= MOST_PROMPT_TOKENS]
    chosen = spread([replace(questions[place], id=str(place)) for place in fitting], samples)
    if len(chosen) < FEWEST_TEXTS:
        raise UsageError(
            f"{prompts or 'the shipped prompt file'} gives {len(chosen)} texts, too few to tell a fault from chance",
            f"give at least {FEWEST_TEXTS}, better 64 or more",
        )
    return [one.id for one in chosen], [rendered[int(one.id)] for one in chosen]


def expectation(head: Resolved) -> Expectation | None:
    """What its maker measured: in the head's own provenance.json, or in its published card."""
    record = {}
    if head.path is not None and (head.path / "provenance.json").is_file():
        record = files.read_object(head.path / "provenance.json", remedy="restore the file, or remove it")
    earlier = (record.get("source") or {}).get("provenance") or {}
    if measured := record.get("acceptance") or earlier.get("acceptance"):
        lengths = [row["acceptance_length"] for row in measured["rows"]]
        source = f"provenance.json, {measured['prompts']} held-out prompts"
    elif measured := (head.known or {}).get("acceptance"):
        lengths, source = list(measured["values"].values()), f"its card ({measured['workload']})"
    else:
        return None
    return Expectation(min(lengths), max(lengths), measured["draft_len"], source)


def judge(
    where: str, acceptance: AcceptanceSummary, expected: Expectation | None, best: Trial, draft_len: int
) -> tuple[Verdict, list[Problem]]:
    """The verdict and what speaks for it. `broken`: a fault is named, or the head drafts no better than chance."""
    length, interval = acceptance.acceptance_length, acceptance.acceptance_length_interval
    first = (acceptance.cumulative or [0.0])[0]
    text = f"{first:.2f} of the first drafts are accepted, 0.78 and more of published heads"
    if best.named:
        one = best.suspicion
        measure = "share of drafts accepted" if one.later else "agreement"
        text = f"{one.what}: {measure} {best.before:.3f} -> {best.after:.3f} {one.undone}"
        return "broken", [Problem("TS-HEAD-RUN-FAULT", "error", where, text, one.remedy)]
    if first < CHANCE_FIRST:
        remedy = "check that the head was trained for this target, and export it again"
        return "broken", [Problem("TS-HEAD-RUN-CHANCE", "error", where, text, remedy)]
    weak = first < WEAK_FIRST
    if expected is not None and expected.draft_len == draft_len and interval is not None:
        weak = interval[1] < 1 + WEAK_SHARE * (expected.low - 1)
        text = f"acceptance length {length:.2f}, {expected.low:.2f} and more by {expected.source}"
    if not weak:
        return "healthy", []
    remedy = "measure with `trtspec bench` on your own prompts"
    return "weak", [Problem("TS-HEAD-RUN-WEAK", "warning", where, text, remedy)]


def rows(run: HeadRun) -> list[tuple[str, str]]:
    """Label and text of each line."""
    measured, best, expected = run.acceptance, run.trials[0], run.expected
    interval = measured.acceptance_length_interval
    spread = f" [{interval[0]:.2f}, {interval[1]:.2f}]" if interval else ""
    positions = ", ".join(f"{share:.2f}" for share in measured.cumulative or [])
    lines = [
        ("verdict", run.verdict),
        ("drafted on", f"{run.texts} texts of {run.prompts}, {run.answer_tokens} tokens each, draft length "
         f"{run.draft_len}, greedy, {run.dtype} on {run.device}, seed {run.seed}"),
        ("acceptance", f"{measured.acceptance_length or 1:.3f}{spread}, by position {positions}"),
    ]  # fmt: skip
    if expected is not None:
        span = f"{expected.low:.2f} to {expected.high:.2f} at draft length {expected.draft_len}"
        lines.append(("elsewhere", f"{span}: {expected.source}"))
    shown = f"best {best.before:.3f} -> {best.after:.3f} ({best.suspicion.kind})"
    return [*lines, ("faults undone", f"{len(run.trials)}, {int(best.named)} named; {shown}")]
