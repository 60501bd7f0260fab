"""Training text: conversations answered by the target, as the token ids that the target saw and wrote, and which of
them make up which step of a run.

Messages go through the target's chat template. Duplicates are left out and some samples are held out: a pure function
of the seed, so a resumed run continues the sequence.
"""

from __future__ import annotations

import hashlib
import math
import random
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import compress, count, islice
from pathlib import Path
from typing import Any

from trtspec.checkpoint.conversations import Conversation, read_conversations
from trtspec.checkpoint.data_rows import CODE
from trtspec.checkpoint.rendering import render
from trtspec.checkpoint.tokenizer import KimiTokenizer
from trtspec.errors import TrtspecError, UsageError
from trtspec.heads.training.train_options import TrainOptions

MAX_HELD_OUT = 64  # sequences per evaluation
MAX_REFUSALS = 10  # messages that are kept of a file
WINDOW_BATCHES = (
    16  # samples are sorted by length within this many batches: little padding, much shuffling
)


@dataclass(frozen=True)
class Sample:
    """One sequence. `answer[i]` is 1 where token i was written by the target, `prompt` counts the tokens before the
    last answer.

    `repeated`: tokens at the beginning that an earlier sample of the conversation has trained. `conversation`: its
    name, where it has several samples.
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
    """All conversations of a source (see `read_conversations`), tokenized and cut to `seq_len`.

    `refused` gets an error for each row of which nothing is learned, and `names` the names that are taken. Raises
    UsageError naming the line of a row that is no conversation, TrtspecError when nothing is left.
    """
    refused = [] if refused is None else refused
    names = set() if names is None else names
    samples: list[Sample] = []
    for conversation in read_conversations(source):
        try:
            parts = samples_of(conversation, tokenizer, seq_len, min_len)
        except TrtspecError as error:
            refused.append(error)
            continue
        name = _unused_name(conversation, names)
        samples += [
            replace(part, id=f"{name}.{number}" if number else name, conversation=name)
            for number, part in enumerate(parts)
        ]
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
    """The conversation's renderings.

    Raises UsageError naming the row if no position of an answer is left within `seq_len`.
    """
    row = f"{CODE} {conversation.where}"
    parts = [part for part in render(conversation, tokenizer) if any(part.answer)]
    if not parts:
        remedy = f"make answers: `trtspec synthesize {conversation.file} -o answers.jsonl`"
        raise UsageError(f"{row} has no answer", remedy)
    samples = [
        Sample(
            conversation.id,
            tuple(part.tokens[:seq_len]),
            tuple(part.answer[:seq_len]),
            part.prompt,
            conversation.category,
            part.repeated,
        )
        for part in parts
    ]
    samples = [part for part in samples if any(part.answer) and len(part.tokens) >= min_len]
    if not samples:
        size = f"of {len(parts[0].tokens)} tokens, the first {parts[0].prompt} its prompt"
        message = f"{row} {size}: no answer within {min_len} to {seq_len} tokens"
        raise UsageError(message, "raise `seq_len`, or leave the row out")
    return samples


def _unused_name(conversation: Conversation, names: set[str]) -> str:
    """A name that no earlier conversation has: rows without an id are called by their line, in every file alike."""
    name = conversation.id or str(conversation.line)
    if name in names:
        name = f"{Path(conversation.file).stem}:{name}"
    while name in names:
        name += "+"
    names.add(name)
    return name


def draft_vocabulary(samples: list[Sample], size: int, vocab_size: int) -> list[int]:
    """The `size` token ids that the target wrote most often (prompts break ties, then low ids), ascending."""
    written, seen = (
        _written(samples),
        Counter(token for sample in samples for token in sample.tokens),
    )
    ranked = sorted(range(vocab_size), key=lambda token: (-written[token], -seen[token], token))
    return sorted(ranked[:size])


def coverage(samples: list[Sample], ids: list[int]) -> float:
    """Share of the target's written tokens that the draft vocabulary holds."""
    written = _written(samples)
    return sum(written[token] for token in set(ids)) / max(written.total(), 1)


def _written(samples: list[Sample]) -> Counter[int]:
    """How often the target wrote each token."""
    return Counter(token for sample in samples for token in compress(sample.tokens, sample.answer))


def split_held_out(
    conversations: list[str], share: float, seed: int
) -> tuple[list[int], list[int]]:
    """(training indices, held-out indices): `conversations` names that of each sample. Held out are those whose names
    hash lowest, `share` of them, at least one of ten, and never all. The order of the data changes nothing."""

    def rank(name: str) -> bytes:
        return hashlib.sha256(f"{seed}:{name}".encode()).digest()

    names = sorted(dict.fromkeys(conversations), key=rank)
    size = round(share * len(names))
    if share > 0 and size == 0 and len(names) >= 10:
        size = 1
    chosen = set(names[: min(size, len(names) - 1)])
    held = [index for index, name in enumerate(conversations) if name in chosen]
    return [index for index, name in enumerate(conversations) if name not in chosen], held


def batches_of_epoch(
    lengths: list[int], indices: list[int], batch_size: int, seed: int, epoch: int
) -> list[list[int]]:
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
class TrainingData:
    """Which samples make up which step of a run, and which are held out: a pure function of the samples and the seed.

    The order does not depend on how many steps the run has, so a longer one begins like a shorter one. `lengths` in
    tokens, of all samples; `trained` and `held`: indices of the samples.
    """

    lengths: list[int]
    trained: list[int]
    held: list[int]
    options: TrainOptions

    def epoch(self, number: int) -> list[list[list[int]]]:
        """The steps of one epoch, each a list of batches. The last step takes what is left."""
        options = self.options
        batches = batches_of_epoch(
            self.lengths, self.trained, options.batch_size, options.seed, number
        )
        return [
            batches[begin : begin + options.accumulation]
            for begin in range(0, len(batches), options.accumulation)
        ]

    @property
    def total(self) -> int:
        """Steps of the whole run."""
        return steps_of(len(self.trained), self.options)

    def steps(self) -> Iterator[tuple[int, list[list[int]]]]:
        """(step from 1, its batches), epoch after epoch until `total`."""
        every = (window for number in count() for window in self.epoch(number))
        yield from enumerate(islice(every, self.total), 1)


def split_data(samples: list[Sample], options: TrainOptions) -> TrainingData:
    """Holds out the `held_out` share; every other sample comes once in an epoch."""
    trained, held = split_held_out(
        [sample.conversation or sample.id for sample in samples], options.held_out, options.seed
    )
    return TrainingData([len(sample.tokens) for sample in samples], trained, held, options)


def steps_of(samples: int, options: TrainOptions) -> int:
    """Optimizer steps of a run over this many samples, each once in an epoch."""
    return options.steps or options.epochs * math.ceil(
        math.ceil(samples / options.batch_size) / options.accumulation
    )


def loss_mask(sample: Sample, answer_only: bool) -> list[int]:
    """1 where the distribution at that position counts: behind the repeated tokens, or before a token of the target."""
    if answer_only:
        return [*sample.answer[1:], 0]
    return [0] * sample.repeated + [1] * (len(sample.tokens) - sample.repeated)


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


def read_files(
    files: Sequence[str], tokenizer: KimiTokenizer, options: TrainOptions
) -> tuple[list[Sample], list[dict[str, Any]]]:
    """(the samples of all files in order, what became of each file). Of conversations with the same training tokens
    the first is kept."""
    seen: set[tuple[int, ...]] = set()
    names: set[str] = set()
    samples: list[Sample] = []
    counted = []
    for file in files:
        refused: list[TrtspecError] = []
        read = read_samples(file, tokenizer, options.seq_len, refused=refused, names=names)
        kept = []
        for sample in read:
            if sample.tokens not in seen:
                seen.add(sample.tokens)
                kept.append(sample)
        samples += kept
        counted.append(
            {
                "file": file,
                "conversations": len({part.conversation for part in kept}),
                "duplicates": len(read) - len(kept),
                "refused": len(refused),
                "refusals": [error.message for error in refused[:MAX_REFUSALS]],
            }
        )
    return samples, counted
