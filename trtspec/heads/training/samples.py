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
MAX_REFUSALS = 10  # messages of refused rows kept per file
# Samples are sorted by length within this many batches, for little padding in a random order.
WINDOW_BATCHES = 16
# Number of conversations from which a positive `held_out` share holds out at least one of them.
MIN_NAMES_TO_HOLD_OUT = 10


@dataclass(frozen=True)
class Sample:
    """A token sequence to train on, from one rendering of a conversation.

    Args:
        answer: `answer[i]` is 1 if the target wrote token i, else 0.
        prompt: number of tokens before the last answer.
        repeated: number of tokens at the beginning that an earlier sample of the conversation has.
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
    """Reads and tokenizes the conversations of a source (see `read_conversations`).

    Raises UsageError naming the line if a row is not a conversation. Raises TrtspecError if no
    sample is left.

    Args:
        seq_len: maximum length of a sample in tokens. Longer samples are cut.
        min_len: minimum length of a sample in tokens. Shorter samples are left out.
        refused: list to which an error is appended for each conversation without a sample.
        names: names of conversations that are in use. The new names are added.
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
    """Renders a conversation as samples of at most `seq_len` tokens.

    Leaves out samples without an answer and samples of fewer than `min_len` tokens. Raises
    UsageError naming the row if no sample is left.
    """
    row = f"{CODE} {conversation.where}"
    answered = [rendering for rendering in render(conversation, tokenizer) if any(rendering.answer)]
    if not answered:
        remedy = f"generate answers: `trtspec synthesize {conversation.file} -o answers.jsonl`"
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
        size = f"has {len(first.tokens)} tokens, the first {first.prompt} in its prompt"
        message = f"{row} {size}: no answer within {min_len} to {seq_len} tokens"
        raise UsageError(message, "raise `seq_len`, or leave the row out")
    return samples


def _unused_name(conversation: Conversation, names: set[str]) -> str:
    """Returns a unique name for a conversation, from its id or line number, and adds it to `names`.

    A name that is in use gets the file's name as a prefix, and "+" signs if that is in use too.
    """
    name = conversation.id or str(conversation.line)
    if name in names:
        name = f"{Path(conversation.file).stem}:{name}"
    while name in names:
        name += "+"
    names.add(name)
    return name


def draft_vocabulary(samples: list[Sample], size: int, vocab_size: int) -> list[int]:
    """Returns the `size` token ids that the target wrote most often, ascending.

    If the target wrote two tokens equally often, the more frequent one in all text comes first,
    then the lower id.
    """
    written = _written(samples)
    in_text: Counter[int] = Counter()
    for sample in samples:
        in_text.update(sample.tokens)
    ranked = sorted(range(vocab_size), key=lambda token: (-written[token], -in_text[token], token))
    return sorted(ranked[:size])


def coverage(samples: list[Sample], ids: list[int]) -> float:
    """Fraction of the tokens written by the target that are in the draft vocabulary `ids`."""
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
    """Splits the samples into training samples and held-out samples, by conversation.

    Returns the indices of the training samples and of the held-out samples. Holds out the
    conversations whose names hash lowest, so the choice does not depend on the order of the data.
    At least one conversation is left for training.

    Args:
        conversations: name of the conversation of each sample.
        share: fraction of the conversations to hold out. A positive share of
            MIN_NAMES_TO_HOLD_OUT conversations or more holds out at least one.
    """

    def rank(name: str) -> bytes:
        # The seed is hashed too, so that another seed holds out other conversations.
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
    """Returns the batches of one epoch, as lists of sample indices. Each index occurs once.

    Shuffles the indices, sorts them by length within windows of WINDOW_BATCHES batches, cuts them
    into batches, and shuffles the batches.

    Args:
        lengths: number of tokens of each sample.
        indices: indices of the samples to train on.
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
    """The samples of each optimizer step, and the held-out samples.

    The steps depend on the samples and the options only. A longer run begins with the steps of a
    shorter run.

    Args:
        lengths: number of tokens of each sample.
        trained: indices of the samples that are trained on.
        held: indices of the held-out samples.
    """

    lengths: list[int]
    trained: list[int]
    held: list[int]
    options: TrainOptions

    def epoch(self, number: int) -> list[list[list[int]]]:
        """Returns the batches of each optimizer step of an epoch, as lists of sample indices.

        The last step of an epoch may have fewer batches. `number` counts the epochs from 0.
        """
        options = self.options
        batches = batches_of_epoch(
            self.lengths, self.trained, options.batch_size, options.seed, number
        )
        size = options.accumulation
        return [batches[begin : begin + size] for begin in range(0, len(batches), size)]

    @property
    def total(self) -> int:
        """Number of optimizer steps of the whole run."""
        return steps_of(len(self.trained), self.options)

    def steps(self) -> Iterator[tuple[int, list[list[int]]]]:
        """Yields the number (from 1) and the batches of each optimizer step of the run.

        One epoch follows another until the run has `total` steps.
        """
        epochs = map(self.epoch, count())
        endless_steps = chain.from_iterable(epochs)
        yield from enumerate(islice(endless_steps, self.total), 1)


def split_data(samples: list[Sample], options: TrainOptions) -> TrainingData:
    """Holds out the share `options.held_out` of the conversations, and trains on the others."""
    # The samples of dumps have no conversation.
    names = [sample.conversation or sample.id for sample in samples]
    trained, held = split_held_out(names, options.held_out, options.seed)
    lengths = [len(sample.tokens) for sample in samples]
    return TrainingData(lengths, trained, held, options)


def steps_of(samples: int, options: TrainOptions) -> int:
    """Number of optimizer steps of a run over this many training samples."""
    if options.steps:
        return options.steps
    batches = math.ceil(samples / options.batch_size)
    return options.epochs * math.ceil(batches / options.accumulation)


def loss_mask(sample: Sample, answer_only: bool) -> list[int]:
    """Returns 1 for each position whose next-token distribution counts in the loss, else 0.

    With `answer_only`, the position before each token that the target wrote counts. Otherwise all
    positions after the repeated tokens count.
    """
    if answer_only:
        return [*sample.answer[1:], 0]
    return [0] * sample.repeated + [1] * (len(sample.tokens) - sample.repeated)


def counted_positions(samples: Iterable[Sample], ttt_steps: int, answer_only: bool) -> list[int]:
    """Number of positions that count in the loss at each training-time-test step.

    At training-time-test step k (from 0) no draft exists for the positions 0 to k.
    """
    totals = [0] * ttt_steps
    for sample in samples:
        mask = loss_mask(sample, answer_only)
        counted = sum(mask)
        # A sample shorter than `ttt_steps` counts in fewer steps, so zip may end early.
        for step, first in zip(range(ttt_steps), mask, strict=False):
            counted -= first
            totals[step] += counted
    return totals


class FileCounts(TypedDict):
    """Counts of a data file.

    Args:
        file: path or name of the data file, as it was given.
        conversations: number of conversations with a sample that is kept.
        duplicates: number of samples that are left out, because an earlier sample has their tokens.
        refused: number of conversations without a sample.
        refusals: messages about the first MAX_REFUSALS refused conversations.
    """

    file: str
    conversations: int
    duplicates: int
    refused: int
    refusals: list[str]


def read_files(
    files: Sequence[str], tokenizer: KimiTokenizer, options: TrainOptions
) -> tuple[list[Sample], list[FileCounts]]:
    """Reads the samples of several data files, without duplicates.

    The first of several samples with the same tokens is kept. Returns the samples of all files in
    order, and the counts of each file.
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
