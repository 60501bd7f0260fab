"""`trtspec inspect HEAD --against TARGET --run`: the head drafts, and what it is worth is judged and told.

The target writes answers to prompts in the reference engine where it fits in memory; where it does not, its states come
from files that a run captured (`--states`). What has to agree and what may be wrong is in `trtspec.engine.head_check`.
"""

from __future__ import annotations

import random
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from trtspec import files, report
from trtspec.errors import MissingDependency, Problem, UsageError

if TYPE_CHECKING:
    import torch

    from trtspec.bench.acceptance import AcceptanceSummary
    from trtspec.checkpoint.headers import Checkpoint
    from trtspec.checkpoint.hub import Resolved
    from trtspec.engine.head_check import CapturedText, HeadCheck, Trial
    from trtspec.models.kimi import KimiModel
    from trtspec.specs import HeadSpec

ANSWER_TOKENS = 32  # many short answers tell more than few long ones: the comparison is paired by text
MOST_PROMPT_TOKENS = 4096
FEWEST_TEXTS = 16  # below, nothing but the crudest fault could be told from chance
SPARE = 1.15  # times the weights: caches and states beside them
WEAK_SHARE = 0.7  # of the drafts accepted elsewhere
WEAK_FIRST = 0.4  # published heads have 0.78 to 0.89 of their first drafts accepted (data/acceptance_lengths.yaml)
SURE = 0.001  # chance below which a lead over a baseline counts
Verdict = Literal["healthy", "weak", "broken"]


@dataclass(frozen=True, kw_only=True)
class InspectRun:
    """A head drafts for its target in the reference engine."""

    path: str
    against: str
    sample: int | None
    hashes: bool
    run: bool
    prompts: str | None
    samples: int
    draft_len: int
    seed: int
    device: str
    json_: bool


@dataclass(frozen=True, kw_only=True)
class InspectStates:
    """A head drafts on captured states of its target."""

    path: str
    against: str
    sample: int | None
    hashes: bool
    run: bool
    states: Path
    samples: int
    draft_len: int
    seed: int
    device: str
    json_: bool


def run_head(options: InspectRun | InspectStates, head: Resolved, target: Resolved) -> HeadRun:
    """Drafts and judges. Raises TrtspecError where a head cannot draft for the target at all, MissingDependency where
    memory does not suffice, UsageError for too few prompts or states."""
    from trtspec.bench.acceptance import summarize
    from trtspec.engine.head_check import check_head
    from trtspec.models.head_weights import open_head, read_tensors
    from trtspec.models.memory import check_device
    from trtspec.models.precision import default_dtype, dtype_name
    from trtspec.report import progress_bar

    head_path, target_path = _local(head), _local(target)
    check_device(options.device)
    checkpoint, spec = open_head(head_path, target.target_spec())
    dtype = default_dtype(options.device)
    _check_memory(options, target, target_path, checkpoint, spec, dtype)
    tensors = read_tensors(checkpoint, dtype, options.device)
    if isinstance(options, InspectRun):
        gathered = _drafted(options, target_path, spec, tensors)
    else:
        gathered = _captured(options, target_path, spec, tensors)
    texts, turns, ends, prompts = gathered
    with progress_bar("faults undone", None, "trials") as bar:
        check = check_head(
            spec, tensors, ends, texts, draft_len=options.draft_len, seed=options.seed, advance=bar.advance
        )
    acceptance, expected = summarize(turns), expectation(head)
    verdict, problems = judge(str(head_path), acceptance, expected, check, options.draft_len)
    return HeadRun(
        verdict=verdict,
        source="engine" if isinstance(options, InspectRun) else "states",
        texts=len(texts),
        prompts=prompts,
        answer_tokens=ANSWER_TOKENS,
        draft_len=options.draft_len,
        greedy=isinstance(options, InspectRun),
        seed=options.seed,
        device=options.device,
        dtype=dtype_name(dtype),
        acceptance=acceptance,
        expected=expected,
        check=check,
        problems=problems,
    )


def _local(resolved: Resolved) -> Path:
    if resolved.path is None or not any(resolved.path.glob("*.safetensors")):
        raise UsageError(
            f"--run needs the weights of {resolved.name} on this machine",
            f"run `hf download {resolved.hub_id or resolved.name}` and pass its directory",
        )
    return resolved.path


def _check_memory(
    options: InspectRun | InspectStates,
    target: Resolved,
    path: Path,
    checkpoint: Checkpoint,
    spec: HeadSpec,
    dtype: torch.dtype,
) -> None:
    """Raises MissingDependency with the bytes needed and free."""
    from trtspec.models.memory import free_bytes, head_bytes, target_bytes

    shape = target.target_spec()
    if isinstance(options, InspectRun):
        weights = target_bytes(path, shape, dtype, options.device)
    else:
        weights = 2 * shape.vocab_size * shape.hidden_size * dtype.itemsize  # embedding and lm_head
    needed = int(SPARE * (weights + head_bytes(checkpoint, dtype)))
    free = free_bytes(options.device)
    if needed <= free:
        return
    layers = ",".join(map(str, spec.aux_layers or shape.default_aux_layers))
    remedy = (
        f"capture its states where it runs (`trtspec train {target.name} DATA -o OUT --aux-layers {layers} --features "
        "stream:DIR`, or the dump commands of `--dry-run`), then pass --states DIR"
    )
    what = "the target and the head" if isinstance(options, InspectRun) else "the target's lm_head and the head"
    text = f"TS-HEAD-RUN-MEMORY {what} take {needed / 2**30:.1f} GiB on {options.device}, {free / 2**30:.1f} are free"
    raise MissingDependency(text, remedy if isinstance(options, InspectRun) else "use a machine with more memory")


Gathered = tuple[list["CapturedText"], list[Any], "KimiModel", str]  # texts, bench's counts of each, target, from where


def _drafted(options: InspectRun, target_path: Path, spec: HeadSpec, tensors: dict[str, torch.Tensor]) -> Gathered:
    """The target answers prompts with the head's help, and runs once more over each answer for its states."""
    from trtspec.checkpoint.tokenizer import KimiTokenizer
    from trtspec.engine.head_check import capture, draft_freely
    from trtspec.models.head_faults import suspicions
    from trtspec.models.head_weights import assemble
    from trtspec.models.weights import load_target

    tokenizer = KimiTokenizer(target_path)
    names, prompts = _prompts(options, tokenizer)
    dtype = tensors["fc.weight"].dtype
    target = load_target(target_path, dtype=dtype, device=options.device)
    head = assemble(spec, tensors, target, dtype=dtype, device=options.device)
    done = draft_freely(target, head, prompts, draft_len=options.draft_len, max_tokens=ANSWER_TOKENS)
    default = target.spec.default_aux_layers
    read = {layer for one in suspicions(spec, tensors, target) for layer in one.spec.aux_layers or default}
    texts = [
        capture(target, prompt + answer.token_ids, len(prompt), tuple(sorted(read | set(spec.aux_layers or default))))
        for prompt, answer in zip(prompts, done, strict=True)
    ]
    turns = [_turn(name, len(one.token_ids), one.stats) for name, one in zip(names, done, strict=True)]
    return texts, turns, target, options.prompts or "kimi-nano's held-out prompts"


def _prompts(options: InspectRun, tokenizer: Any) -> tuple[list[str], list[list[int]]]:
    """(names, token ids) of `samples` prompts, drawn by the seed and spread over their categories."""
    from trtspec.bench.datasets import NANO, left_out, load_dataset, spread

    questions = list(load_dataset(options.prompts or NANO).questions)
    if any(question.has_pictures for question in questions):
        message = f"questions of {options.prompts} have pictures, which the target's text model does not read"
        raise UsageError(message, "pass --prompts of text")
    if missing := left_out(questions):
        report.announce(f"{options.prompts}: {missing}")
    random.Random(options.seed).shuffle(questions)
    rendered = {}
    for place, question in enumerate(questions):
        messages, tools = question.first_request()
        rendered[place] = tokenizer.apply_chat_template(messages, tools or None)
    fitting = [place for place, ids in rendered.items() if len(ids) <= MOST_PROMPT_TOKENS]
    chosen = spread([replace(questions[place], id=str(place)) for place in fitting], options.samples)
    _enough(len(chosen), options.prompts or "the shipped prompt file")
    return [one.id for one in chosen], [rendered[int(one.id)] for one in chosen]


def _captured(options: InspectStates, target_path: Path, spec: HeadSpec, tensors: dict[str, torch.Tensor]) -> Gathered:
    """The head drafts along texts whose states lie in files; of the target, embedding and lm_head are read."""
    from trtspec.engine.head_check import drafted_on
    from trtspec.heads.training.features_stream import kept_features
    from trtspec.models.head_weights import assemble
    from trtspec.models.stream import LayerStream

    dtype = tensors["fc.weight"].dtype
    with LayerStream(target_path, dtype=dtype, device=options.device) as stream:
        ends = stream.ends()
    layers = tuple(spec.aux_layers or ends.spec.default_aux_layers)
    features = kept_features(options.states, ends.spec, layers)
    order = list(range(len(features.samples)))
    random.Random(options.seed).shuffle(order)
    texts: list[CapturedText] = []
    names = []
    for index in order:
        text = _text(features, index, ends, layers) if len(texts) < options.samples else None
        if text is not None:
            texts.append(text)
            names.append(features.samples[index].id)
    _enough(len(texts), str(options.states))
    head = assemble(spec, tensors, ends, dtype=dtype, device=options.device)
    stats = drafted_on(texts, ends, head, options.draft_len)
    turns = [_turn(name, len(text.wanted), one) for name, text, one in zip(names, texts, stats, strict=True)]
    return texts, turns, ends, str(options.states)


def _text(features: Any, index: int, ends: KimiModel, layers: tuple[int, ...]) -> CapturedText | None:
    """The start of a sample's first answer, or of its second half where no answer is marked; None where there is none
    behind a prompt of a bearable length."""
    import torch

    from trtspec.engine.head_check import CapturedText

    sample = features.samples[index]
    marked = [place for place, mine in enumerate(sample.answer) if mine]
    begin = marked[0] if marked and marked[0] else len(sample.tokens) // 2
    end = begin
    while end < min(len(sample.tokens), begin + ANSWER_TOKENS) and sample.answer[end]:
        end += 1
    if not 0 < begin <= MOST_PROMPT_TOKENS or end - begin < 2:
        return None
    hidden, aux = features.states(index)
    weight = ends.lm_head.weight
    choices = torch.zeros(end, dtype=torch.int64)
    choices[begin:] = ends.lm_head(hidden[begin:end].to(weight.device, weight.dtype)).argmax(-1).cpu()
    parts = aux[:end].chunk(len(layers), -1)
    return CapturedText(torch.tensor(sample.tokens[:end]), begin, choices, dict(zip(layers, parts, strict=True)))


def _enough(count: int, source: str) -> None:
    if count < FEWEST_TEXTS:
        raise UsageError(
            f"{source} gives {count} texts, too few to tell a fault from chance",
            f"give at least {FEWEST_TEXTS}, better 64 or more",
        )


def _turn(name: str, tokens: int, stats: Any) -> Any:
    """The counts of one text as bench keeps them, so that its formulas apply."""
    from trtspec.bench.acceptance import TurnCounts

    counts = stats.steps, stats.accepted, stats.drafted, tuple(stats.histogram)
    return TurnCounts(name, "all", tokens, *counts, source="the reference engine")


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
    source: Literal["engine", "states"]
    texts: int
    prompts: str
    answer_tokens: int
    draft_len: int
    greedy: bool
    seed: int
    device: str
    dtype: str
    acceptance: AcceptanceSummary
    expected: Expectation | None
    check: HeadCheck
    problems: list[Problem] = field(repr=False)

    def to_dict(self) -> dict[str, Any]:
        """The key `run` of the JSON contract."""
        from trtspec.engine.head_check import FALSE_ALARMS, LEAST_GAIN

        plain = {name: value for name, value in vars(self).items() if name not in ("check", "problems", "expected")}
        return plain | {
            "acceptance": asdict(self.acceptance),
            "expected": asdict(self.expected) if self.expected else None,
            "positions": self.check.positions,
            "agreement": round(self.check.agreement, 4),
            "baselines": {name: round(one.agreement, 4) for name, one in self.check.baselines.items()},
            "faults": [_trial_dict(trial) for trial in self.check.faults],
            "tried": [_trial_dict(trial) for trial in self.check.trials],
            "untried": sorted({f"{one.kind} {one.detail}".strip() for one in self.check.untried}),
            "false_alarm_rate": FALSE_ALARMS,
            "least_gain": LEAST_GAIN,
        }


def expectation(head: Resolved) -> Expectation | None:
    """What its maker measured: in the head's own provenance.json, or in its published card."""
    record = {}
    if head.path is not None and (head.path / "provenance.json").is_file():
        record = files.read_object(head.path / "provenance.json", remedy="restore the file, or remove it")
    earlier = (record.get("source") or {}).get("provenance") or {}
    measured = record.get("acceptance") or earlier.get("acceptance")
    if measured:
        lengths = [row["acceptance_length"] for row in measured["rows"]]
        source = f"provenance.json, {measured['prompts']} held-out prompts"
        return Expectation(min(lengths), max(lengths), measured["draft_len"], source)
    published = (head.known or {}).get("acceptance")
    if published:
        lengths = list(published["values"].values())
        return Expectation(min(lengths), max(lengths), published["draft_len"], f"its card ({published['workload']})")
    return None


def judge(
    where: str, acceptance: AcceptanceSummary, expected: Expectation | None, check: HeadCheck, draft_len: int
) -> tuple[Verdict, list[Problem]]:
    """The verdict and what speaks for it. `broken`: a fault is named, or the head knows no more than no head."""
    problems = [_fault(where, trial) for trial in check.faults]
    for name, words in (("random_head", "a random head of its shape"), ("unigram", "the most frequent token")):
        baseline = check.baselines[name]
        if baseline.chance >= SURE:
            text = f"first drafts agree with the target at {check.agreement:.3f} of the positions, "
            text += f"{words} at {baseline.agreement:.3f}"
            remedy = "check that the head was trained for this target, and export it again"
            problems.append(Problem("TS-HEAD-RUN-CHANCE", "error", where, text, remedy))
            break
    if problems:
        return "broken", problems
    problems = [
        Problem("TS-HEAD-RUN-WEAK", "warning", where, text, "measure with `trtspec bench` on your own prompts")
        for text in weaknesses(acceptance, expected, check, draft_len)
    ]
    return ("weak" if problems else "healthy"), problems


def _fault(where: str, trial: Trial) -> Problem:
    """Named: what it looks like, and the agreement before and after."""
    one = trial.suspicion
    measure = "share of drafts accepted" if one.later else "agreement"
    text = f"{one.what}: {measure} {trial.before:.3f} -> {trial.after:.3f} {one.undone}"
    return Problem("TS-HEAD-RUN-FAULT", "error", where, text, one.remedy)


def weaknesses(
    acceptance: AcceptanceSummary, expected: Expectation | None, check: HeadCheck, draft_len: int
) -> list[str]:
    """Reasons to call a head weak that has no fault that can be named."""
    found = []
    length, interval = acceptance.acceptance_length, acceptance.acceptance_length_interval
    if expected is not None and expected.draft_len == draft_len and interval is not None:
        if interval[1] < 1 + WEAK_SHARE * (expected.low - 1):
            found.append(f"acceptance length {length:.2f}, {expected.low:.2f} and more by {expected.source}")
    elif acceptance.cumulative and acceptance.cumulative[0] < WEAK_FIRST:
        found.append(f"{acceptance.cumulative[0]:.2f} of the first drafts are accepted, at least 0.78 by published")
    bigram = check.baselines["bigram"]
    if bigram.chance >= SURE:
        text = (
            f"first drafts agree at {check.agreement:.3f} of the positions, a table of token pairs of the same texts "
        )
        found.append(text + f"at {bigram.agreement:.3f}")
    return found


def _trial_dict(trial: Trial) -> dict[str, Any]:
    one = trial.suspicion
    figures = {"before": round(trial.before, 4), "after": round(trial.after, 4), "chance": float(f"{trial.chance:.2g}")}
    return {"kind": one.kind, "detail": one.detail, **figures, "named": trial.named}


def rows(run: HeadRun) -> list[tuple[str, str]]:
    """Label and text of each line."""
    measured, check = run.acceptance, run.check
    interval = measured.acceptance_length_interval
    spread = f" [{interval[0]:.2f}, {interval[1]:.2f}]" if interval else ""
    positions = ", ".join(f"{share:.2f}" for share in measured.cumulative or [])
    how = "greedy" if run.greedy else "a draft is accepted when the captured text continues with it"
    others = ", ".join(f"{name.replace('_', ' ')} {one.agreement:.2f}" for name, one in check.baselines.items())
    lines = [
        ("verdict", run.verdict),
        ("drafted on", f"{run.texts} texts of {run.prompts}, {run.answer_tokens} tokens each, draft length "
         f"{run.draft_len}, {how}, {run.dtype} on {run.device}, seed {run.seed}"),
        ("acceptance", f"{measured.acceptance_length or 1:.3f}{spread}, by position {positions}"),
    ]  # fmt: skip
    if run.expected is not None:
        span = f"{run.expected.low:.2f} to {run.expected.high:.2f}"
        lines.append(("elsewhere", f"{span} at draft length {run.expected.draft_len}: {run.expected.source}"))
    lines.append(("first draft agrees", f"{check.agreement:.3f} of {check.positions:,} positions; {others}"))
    best = check.trials[0]
    shown = f"best {best.before:.3f} -> {best.after:.3f} ({best.suspicion.kind})"
    lines.append(("faults undone", f"{len(check.trials)}, {len(check.faults)} named; {shown}"))
    if check.untried:
        kinds = ", ".join(sorted({one.kind for one in check.untried}))
        lines.append(("not tried", f"{kinds}: no states of those layers were captured"))
    return lines
