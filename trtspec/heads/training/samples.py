"""Training text: conversations answered by the target, as the token ids that the target saw and wrote, and which of
them make up which step of a run.

Messages go through the target's chat template; a prompt with its completion is text that no template surrounds. One
file or several, each with its passes in an epoch, duplicates left out once, some held out: a pure function of the seed,
so a resumed run continues the sequence.
"""

from __future__ import annotations

import hashlib
import math
import random
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from trtspec.checkpoint.conversations import Conversation, read_conversations
from trtspec.checkpoint.tokenizer import KimiTokenizer
from trtspec.errors import TrtspecError, UsageError
from trtspec.heads.training.options import DataFiles, TrainOptions
from trtspec.report import note

MAX_HELD_OUT = 64  # sequences per evaluation
MOST_EMPTY = 1000  # epochs without a sample, after which there is none to come
WINDOW_BATCHES = 16  # samples are sorted by length within this many batches: little padding, much shuffling
SHOWN = 3  # skipped rows that are named


@dataclass(frozen=True)
class Sample:
    """One sequence. `answer[i]` is 1 where token i was written by the target, `prompt` counts the tokens before the
    last answer."""

    id: str
    tokens: tuple[int, ...]
    answer: tuple[int, ...]
    prompt: int
    category: str = ""


@dataclass
class BadRows:
    """Rows that cannot be read and are skipped, `limit` at most; `found` says of each where it is and what is wrong."""

    limit: int
    found: list[str] = field(default_factory=list)

    def skip(self, error: UsageError) -> None:
        """Counts a row. Raises its error where nothing may be skipped, or no more."""
        if not self.limit:
            raise error
        if len(self.found) >= self.limit:
            message = f"{error.message}; {self.limit} rows that cannot be read were skipped before it"
            raise UsageError(message, "repair the data, or allow more with `skip_bad_rows`")
        self.found.append(error.message)


def read_samples(
    source: Path | str, tokenizer: KimiTokenizer, seq_len: int, min_len: int = 8, bad: BadRows | None = None
) -> list[Sample]:
    """All conversations of a source (see `read_conversations`), tokenized and cut to `seq_len`; shorter ones than
    `min_len` are left out, and rows that cannot be read while `bad` takes them.

    Raises UsageError naming the line of a row that is no conversation, TrtspecError when nothing is left.
    """
    samples, bad = [], bad or BadRows(0)
    for conversation in read_conversations(source, on_bad=bad.skip):
        try:
            sample = sample_of(conversation, tokenizer)
        except UsageError as error:
            bad.skip(error)
            continue
        if len(sample.tokens) >= min_len:
            samples.append(_cut(sample, seq_len))
    if not samples:
        message = f"TS-DATA-EMPTY {source} holds no conversation to train on"
        raise TrtspecError(message, "run `trtspec synthesize` first")
    return samples


def sample_of(conversation: Conversation, tokenizer: KimiTokenizer) -> Sample:
    """The whole conversation as ids; a row without an id is called by its line. Raises UsageError for text that nobody
    wrote as an answer."""
    name = conversation.id or str(conversation.line)
    if conversation.completion is not None:
        prompt = tokenizer.encode(conversation.text)
        tokens = prompt + tokenizer.encode(conversation.completion)
        answer = [0] * len(prompt) + [1] * (len(tokens) - len(prompt))
    elif conversation.messages:
        prompt, tokens = _render(conversation, tokenizer)
        answer = answer_mask(tokens, tokenizer)
    else:
        raise UsageError(
            f"TS-DATA-ROW {conversation.where} is raw text, which the target did not write",
            "make the data with `trtspec synthesize`",
        )
    return Sample(name, tuple(tokens), tuple(answer), len(prompt), conversation.category)


def _render(conversation: Conversation, tokenizer: KimiTokenizer) -> tuple[list[int], list[int]]:
    """(prompt ids, all ids). A plain last answer follows the generation prompt, exactly as it was generated."""
    *before, last = conversation.messages
    tools = list(conversation.tools) or None
    if last["role"] != "assistant":
        tokens = tokenizer.apply_chat_template(conversation.messages, tools, add_generation_prompt=False)
        return tokens, tokens
    prompt = tokenizer.apply_chat_template(before, tools)
    if last.get("tool_calls") or last.get("reasoning_content"):
        return prompt, tokenizer.apply_chat_template(conversation.messages, tools, add_generation_prompt=False)
    tokens = prompt + tokenizer.encode(last["content"], allow_special=True)
    if conversation.finish_reason != "length":
        tokens.append(tokenizer.special_id("<|im_end|>"))
    return prompt, tokens


def answer_mask(tokens: list[int], tokenizer: KimiTokenizer) -> list[int]:
    """1 for the tokens of an assistant turn between <|im_middle|> and <|im_end|>, the end mark included."""
    assistant, middle, end = (tokenizer.special_id(f"<|im_{name}|>") for name in ("assistant", "middle", "end"))
    mask, inside, speaking = [], False, False
    for token in tokens:
        mask.append(int(speaking))
        if token == assistant:
            inside = True
        elif token == middle:
            speaking = inside
        elif token == end:
            inside = speaking = False
    return mask


def _cut(sample: Sample, seq_len: int) -> Sample:
    if len(sample.tokens) <= seq_len:
        return sample
    return Sample(sample.id, sample.tokens[:seq_len], sample.answer[:seq_len], sample.prompt, sample.category)


def draft_vocabulary(samples: list[Sample], size: int, vocab_size: int) -> list[int]:
    """The `size` token ids that the target wrote most often (prompts break ties, then low ids), ascending."""
    written, seen = [0] * vocab_size, [0] * vocab_size
    for sample in samples:
        for token, mine in zip(sample.tokens, sample.answer, strict=True):
            seen[token] += 1
            written[token] += mine
    ranked = sorted(range(vocab_size), key=lambda token: (-written[token], -seen[token], token))
    return sorted(ranked[:size])


def coverage(samples: list[Sample], ids: list[int]) -> float:
    """Share of the target's written tokens that the draft vocabulary holds."""
    kept = set(ids)
    total = inside = 0
    for sample in samples:
        for token, mine in zip(sample.tokens, sample.answer, strict=True):
            total += mine
            inside += mine and token in kept
    return inside / max(total, 1)


def split_held_out(ids: list[str], share: float, seed: int) -> tuple[list[int], list[int]]:
    """(training indices, held-out indices): the samples whose ids hash lowest, `share` of them, one at the least when
    there are ten; a sample's place does not depend on the order of the data."""

    def rank(index: int) -> bytes:
        return hashlib.sha256(f"{seed}:{ids[index]}".encode()).digest()

    count = round(share * len(ids))
    if share > 0 and count == 0 and len(ids) >= 10:
        count = 1
    held = sorted(sorted(range(len(ids)), key=rank)[:count])
    chosen = set(held)
    return [index for index in range(len(ids)) if index not in chosen], held


def batches_of_epoch(lengths: list[int], indices: list[int], batch_size: int, seed: int, epoch: int) -> list[list[int]]:
    """Every index once: shuffled, sorted by length within windows, cut into batches, the batches shuffled."""
    shuffler = random.Random(f"{seed}:{epoch}")
    order = list(indices)
    shuffler.shuffle(order)
    window = WINDOW_BATCHES * batch_size
    batches = []
    for begin in range(0, len(order), window):
        part = sorted(order[begin : begin + window], key=lambda index: lengths[index])
        batches += [part[i : i + batch_size] for i in range(0, len(part), batch_size)]
    shuffler.shuffle(batches)
    return batches


@dataclass(frozen=True)
class DataOrder:
    """Which samples make up which step of a run: a pure function of the lengths, the passes and the seed, which does
    not depend on how many steps the run has, so a longer one begins like a shorter one.

    `passes`: by sample, how often it comes in an epoch on average; 0 for those held out.
    """

    lengths: list[int]
    passes: list[float]
    options: TrainOptions

    def epoch(self, number: int) -> list[list[list[int]]]:
        """The steps of one epoch, each a list of batches. The last step takes what is left."""
        options = self.options
        chosen = [index for index, times in enumerate(self._times(number)) for _ in range(times)]
        batches = batches_of_epoch(self.lengths, chosen, options.batch_size, options.seed, number)
        return [batches[begin : begin + options.accumulation] for begin in range(0, len(batches), options.accumulation)]

    def _times(self, epoch: int) -> list[int]:
        """How often each sample comes in this epoch. A fraction is spread evenly, over the epochs for each sample and
        over the samples of equal weight for each epoch."""
        seen: Counter[float] = Counter()
        counts = Counter(self.passes)
        found = []
        for times in self.passes:
            offset = (seen[times] + 0.5) / counts[times]
            seen[times] += 1
            found.append(math.floor((epoch + 1) * times + offset) - math.floor(epoch * times + offset))
        return found

    @cached_property
    def total(self) -> int:
        """Steps of the whole run."""
        return self.options.steps or sum(len(self.epoch(number)) for number in range(self.options.epochs))

    def steps(self) -> Iterator[tuple[int, list[list[int]]]]:
        """(step from 1, its batches), epoch after epoch until `total`."""
        step = number = empty = 0
        while step < self.total and empty < MOST_EMPTY:
            windows = self.epoch(number)
            empty = 0 if windows else empty + 1
            for window in windows[: self.total - step]:
                step += 1
                yield step, window
            number += 1


@dataclass(frozen=True)
class TrainingData:
    """What is trained on, in which order, and what is held out: indices of the samples."""

    order: DataOrder
    held: list[int]

    def of(self, options: TrainOptions) -> TrainingData:
        """The same for a run with these options."""
        return replace(self, order=replace(self.order, options=options))


def split_data(samples: list[Sample], options: TrainOptions, passes: list[float] | None = None) -> TrainingData:
    """Holds out the `held_out` share. Every other sample comes `passes` times in an epoch, by default once."""
    _, held = split_held_out([sample.id for sample in samples], options.held_out, options.seed)
    passes = list(passes) if passes else [1.0] * len(samples)
    for index in held:
        passes[index] = 0.0
    return TrainingData(DataOrder([len(sample.tokens) for sample in samples], passes, options), held)


def steps_of(samples: int, options: TrainOptions) -> int:
    """Optimizer steps of a run over this many samples, each once in an epoch."""
    return options.steps or options.epochs * math.ceil(math.ceil(samples / options.batch_size) / options.accumulation)


def loss_mask(sample: Sample, answer_only: bool) -> list[int]:
    """1 where the distribution at that position counts: everywhere, or where the token that follows is the target's."""
    return [*sample.answer[1:], 0] if answer_only else [1] * len(sample.tokens)


def counted_positions(samples: Iterable[Sample], ttt_steps: int, answer_only: bool) -> list[int]:
    """How many positions count at each training-time-test step: at step k the rows from k on draft, each for the
    position behind it."""
    totals = [0] * ttt_steps
    for sample in samples:
        mask = loss_mask(sample, answer_only)
        left = sum(mask)
        for step, first in zip(range(ttt_steps), mask, strict=False):
            left -= first
            totals[step] += left
    return totals


@dataclass
class Mixture:
    """`told`: what became of each file, for the record. The order of samples is that of the files."""

    samples: list[Sample]
    data: TrainingData
    told: list[dict[str, Any]] = field(default_factory=list)


def read_mixture(files: DataFiles, tokenizer: KimiTokenizer, options: TrainOptions) -> Mixture:
    """Reads and tokenizes every file. Of conversations with the same training tokens the first is kept; one
    that the evaluations use is not trained on."""
    seen: dict[bytes, str] = {}
    held: list[Sample] = []
    told: list[dict[str, Any]] = []
    bad = BadRows(options.skip_bad_rows)
    if files.evaluation:
        found = _unique(read_samples(files.evaluation, tokenizer, options.seq_len, bad=bad), seen, options.deduplicate)
        held = [replace(sample, id=f"eval:{sample.id}") for sample in found]
    leaked, evaluated = set(seen), {"bad_rows": len(bad.found)} if options.skip_bad_rows else {}
    samples: list[Sample] = []
    passes: list[float] = []
    names: set[str] = set()
    for name, times in files.files:
        skipped = len(bad.found)
        read = read_samples(name, tokenizer, options.seq_len, bad=bad)
        apart = [sample for sample in read if _digest(sample) not in leaked]
        kept = [_named(sample, name, names) for sample in _unique(apart, seen, options.deduplicate)]
        samples += kept
        passes += [times] * len(kept)
        told.append(
            {"file": name, "passes": times, "conversations": len(kept)}
            | {"duplicates": len(apart) - len(kept), "in_eval_data": len(read) - len(apart)}
            | ({"bad_rows": len(bad.found) - skipped} if options.skip_bad_rows else {})
        )
    for message in bad.found[:SHOWN]:
        note(f"skipped {message}")
    if not samples:
        raise UsageError(f"every conversation of {files} is in {files.evaluation} too", "give others to evaluate on")
    if not held:
        return Mixture(samples, split_data(samples, options, passes), told)
    told.append({"file": files.evaluation, "passes": 0, "conversations": len(held)} | evaluated)
    lengths = [len(sample.tokens) for sample in samples + held]
    order = DataOrder(lengths, passes + [0.0] * len(held), options)
    return Mixture(samples + held, TrainingData(order, list(range(len(samples), len(lengths)))), told)


def _unique(samples: list[Sample], seen: dict[bytes, str], deduplicate: bool) -> list[Sample]:
    """Those not `seen` before, which is added to."""
    kept = []
    for sample in samples:
        digest = _digest(sample)
        if not deduplicate or digest not in seen:
            kept.append(sample)
        seen.setdefault(digest, sample.id)
    return kept


def _digest(sample: Sample) -> bytes:
    return hashlib.sha256(repr(sample.tokens).encode()).digest()


def _named(sample: Sample, source: str, names: set[str]) -> Sample:
    """With an id that no earlier sample has: rows without one are called by their line, in every file alike."""
    name = sample.id if sample.id not in names else f"{Path(source).stem}:{sample.id}"
    while name in names:
        name += "+"
    names.add(name)
    return replace(sample, id=name)
