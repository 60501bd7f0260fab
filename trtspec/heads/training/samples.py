"""Training text, as the token ids that the target saw and wrote, and the samples of each step.

The text is conversations that the target answered. Messages go through the target's chat template.
Duplicates are left out, and some samples are held out. Both depend on the data and the seed alone,
so a resumed run continues the sequence.
"""

from __future__ import annotations

import hashlib
import math
import random
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, compress, count, islice
from pathlib import Path
from typing import TypedDict

from trtspec.checkpoint.conversations import Conversation, read_conversations
from trtspec.checkpoint.data_rows import CODE
from trtspec.checkpoint.rendering import render
from trtspec.checkpoint.tokenizer import KimiTokenizer
from trtspec.errors import TrtspecError, UsageError
from trtspec.heads.training.train_options import TrainOptions

MAX_HELD_OUT = 64  # sequences per evaluation
MAX_REFUSALS = 10  # messages kept per file
# Samples are sorted by length within this many batches: little padding, much shuffling.
WINDOW_BATCHES = 16
MIN_NAMES_TO_HOLD_OUT = 10  # conversations: from here on a positive share holds out at least one


@dataclass(frozen=True)
class Sample:
    """One sequence.

    Args:
        answer: `answer[i]` is 1 if the target wrote token i, else 0.
        prompt: tokens before the last answer.
        repeated: tokens at the beginning that an earlier sample of the conversation has trained.
        conversation: name of the conversation, which may have several samples.
    """

    id: str
    tokens: tuple[int, ...]
    answer: tuple[int, ...]
    prompt: int
    category: str = ""
    repeated: int = 0
    conversation: str = ""


def read_samples(
    source: Path | str,
    tokenizer: KimiTokenizer,
    seq_len: int,
    min_len: int = 8,
    refused: list[TrtspecError] | None = None,
    names: set[str] | None = None,
) -> list[Sample]:
    """Tokenizes all conversations of a source (see `read_conversations`), cut to `seq_len`.

    Raises UsageError naming the line if a row is not a conversation. Raises TrtspecError if no
    sample is left.

    Args:
        refused: gets an error for each row that has nothing to learn.
        names: names that are taken. Gets the new ones.
    """
    if refused is None:
        refused = []
    if names is None:
        names = set()
    samples: list[Sample] = []
    for conversation in read_conversations(source):
        try:
            unnamed = samples_of(conversation, tokenizer, seq_len, min_len)
        except TrtspecError as error:
            refused.append(error)
            continue
        name = _unused_name(conversation, names)
        for number, sample in enumerate(unnamed):
            sample_id = f"{name}.{number}" if number else name
            samples.append(replace(sample, id=sample_id, conversation=name))
    if refused and not samples:
        first = refused[0]
        raise TrtspecError(f"{first.message} ({len(refused)} rows)", first.remedy, first.code)
    if not samples:
        message = f"TS-DATA-EMPTY {source} holds no conversation to train on"
        raise TrtspecError(message, "run `trtspec synthesize` first")
    return samples


def samples_of(
    conversation: Conversation, tokenizer: KimiTokenizer, seq_len: int, min_len: int
) -> list[Sample]:
    """The conversation's renderings, cut to `seq_len`.

    Leaves out samples without an answer and samples of fewer than `min_len` tokens. Raises
    UsageError naming the row if no sample is left.
    """
    row = f"{CODE} {conversation.where}"
    answered = [rendering for rendering in render(conversation, tokenizer) if any(rendering.answer)]
    if not answered:
        remedy = f"make answers: `trtspec synthesize {conversation.file} -o answers.jsonl`"
        raise UsageError(f"{row} has no answer", remedy)
    samples = []
    for rendering in answered:
        tokens = tuple(rendering.tokens[:seq_len])
        answer = tuple(rendering.answer[:seq_len])
        if any(answer) and len(tokens) >= min_len:
            sample = Sample(
                conversation.id,
                tokens,
                answer,
                rendering.prompt,
                conversation.category,
                rendering.repeated,
            )
            samples.append(sample)
    if not samples:
        first = answered[0]
        size = f"of {len(first.tokens)} tokens, the first {first.prompt} its prompt"
        message = f"{row} {size}: no answer within {min_len} to {seq_len} tokens"
        raise UsageError(message, "raise `seq_len`, or leave the row out")
    return samples


def _unused_name(conversation: Conversation, names: set[str]) -> str:
    """A name that no earlier conversation has, made of the row's id or line. Adds it to `names`."""
    name = conversation.id or str(conversation.line)
    if name in names:
        name = f"{Path(conversation.file).stem}:{name}"
    while name in names:
        name += "+"
    names.add(name)
    return name


def draft_vocabulary(samples: list[Sample], size: int, vocab_size: int) -> list[int]:
    """The `size` token ids that the target wrote most often, ascending.

    Ties go to tokens that prompts have more often, then to low ids.
    """
    written = _written(samples)
    seen: Counter[int] = Counter()
    for sample in samples:
        seen.update(sample.tokens)
    ranked = sorted(range(vocab_size), key=lambda token: (-written[token], -seen[token], token))
    return sorted(ranked[:size])


def coverage(samples: list[Sample], ids: list[int]) -> float:
    """Share of the target's written tokens that the draft vocabulary holds."""
    written = _written(samples)
    return sum(written[token] for token in set(ids)) / max(written.total(), 1)


def _written(samples: list[Sample]) -> Counter[int]:
    """Counts how often the target wrote each token."""
    written: Counter[int] = Counter()
    for sample in samples:
        written.update(compress(sample.tokens, sample.answer))
    return written


def split_held_out(
    conversations: list[str], share: float, seed: int
) -> tuple[list[int], list[int]]:
    """(training indices, held-out indices). `conversations`: the conversation's name by sample.

    Holds out the `share` of the conversations whose names hash lowest, at least one of ten, never
    all. The choice does not depend on the order of the data.
    """

    def rank(name: str) -> bytes:
        return hashlib.sha256(f"{seed}:{name}".encode()).digest()

    names = sorted(dict.fromkeys(conversations), key=rank)
    size = round(share * len(names))
    if share > 0 and size == 0 and len(names) >= MIN_NAMES_TO_HOLD_OUT:
        size = 1
    chosen = set(names[: min(size, len(names) - 1)])
    trained = []
    held = []
    for index, name in enumerate(conversations):
        if name in chosen:
            held.append(index)
        else:
            trained.append(index)
    return trained, held


def batches_of_epoch(
    lengths: list[int], indices: list[int], batch_size: int, seed: int, epoch: int
) -> list[list[int]]:
    """The batches of one epoch, with every index once.

    Shuffles the indices, sorts them by length within windows, cuts them into batches, and shuffles
    the batches.
    """
    shuffler = random.Random(f"{seed}:{epoch}")
    order = list(indices)
    shuffler.shuffle(order)
    window = WINDOW_BATCHES * batch_size
    batches = []
    for begin in range(0, len(order), window):
        by_length = sorted(order[begin : begin + window], key=lambda index: lengths[index])
        for first in range(0, len(by_length), batch_size):
            batches.append(by_length[first : first + batch_size])
    shuffler.shuffle(batches)
    return batches


@dataclass(frozen=True)
class TrainingData:
    """The samples of each step, and the held-out samples.

    Both depend on the samples and the seed alone. A longer run begins like a shorter run.

    Args:
        lengths: tokens of each sample.
        trained: indices of the samples that are trained on.
        held: indices of the held-out samples.
    """

    lengths: list[int]
    trained: list[int]
    held: list[int]
    options: TrainOptions

    def epoch(self, number: int) -> list[list[list[int]]]:
        """The steps of one epoch, each a list of batches. The last step may have fewer batches."""
        options = self.options
        batches = batches_of_epoch(
            self.lengths, self.trained, options.batch_size, options.seed, number
        )
        size = options.accumulation
        return [batches[begin : begin + size] for begin in range(0, len(batches), size)]

    @property
    def total(self) -> int:
        """Steps of the whole run."""
        return steps_of(len(self.trained), self.options)

    def steps(self) -> Iterator[tuple[int, list[list[int]]]]:
        """Yields (step from 1, its batches), epoch after epoch until `total`."""
        windows = chain.from_iterable(map(self.epoch, count()))
        yield from enumerate(islice(windows, self.total), 1)


def split_data(samples: list[Sample], options: TrainOptions) -> TrainingData:
    """Holds out the `held_out` share. Every other sample comes once in an epoch."""
    names = [sample.conversation or sample.id for sample in samples]
    trained, held = split_held_out(names, options.held_out, options.seed)
    lengths = [len(sample.tokens) for sample in samples]
    return TrainingData(lengths, trained, held, options)


def steps_of(samples: int, options: TrainOptions) -> int:
    """Optimizer steps of a run over this many samples, each once in an epoch."""
    if options.steps:
        return options.steps
    batches = math.ceil(samples / options.batch_size)
    return options.epochs * math.ceil(batches / options.accumulation)


def loss_mask(sample: Sample, answer_only: bool) -> list[int]:
    """1 for each position whose distribution counts in the loss, else 0.

    `answer_only`: the position before each token that the target wrote. Otherwise all positions
    after the repeated tokens.
    """
    if answer_only:
        return [*sample.answer[1:], 0]
    return [0] * sample.repeated + [1] * (len(sample.tokens) - sample.repeated)


def counted_positions(samples: Iterable[Sample], ttt_steps: int, answer_only: bool) -> list[int]:
    """How many positions count at each training-time-test step.

    At step k the rows from k on draft, each for the position after it.
    """
    totals = [0] * ttt_steps
    for sample in samples:
        mask = loss_mask(sample, answer_only)
        counted = sum(mask)
        for step, first in zip(range(ttt_steps), mask, strict=False):
            counted -= first
            totals[step] += counted
    return totals


class FileCounts(TypedDict):
    """Rows of a data file. `refusals`: the first reasons."""

    file: str
    conversations: int
    duplicates: int
    refused: int
    refusals: list[str]


def read_files(
    files: Sequence[str], tokenizer: KimiTokenizer, options: TrainOptions
) -> tuple[list[Sample], list[FileCounts]]:
    """(the samples of all files in order, the counts of each file).

    Keeps the first of conversations with the same training tokens.
    """
    seen: set[tuple[int, ...]] = set()
    names: set[str] = set()
    samples: list[Sample] = []
    counts: list[FileCounts] = []
    for file in files:
        refused: list[TrtspecError] = []
        read = read_samples(file, tokenizer, options.seq_len, refused=refused, names=names)
        kept = []
        for sample in read:
            if sample.tokens not in seen:
                seen.add(sample.tokens)
                kept.append(sample)
        samples += kept
        conversations = {sample.conversation for sample in kept}
        counts.append(
            {
                "file": file,
                "conversations": len(conversations),
                "duplicates": len(read) - len(kept),
                "refused": len(refused),
                "refusals": [error.message for error in refused[:MAX_REFUSALS]],
            }
        )
    return samples, counts
