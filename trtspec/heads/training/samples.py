"""Training text: conversations answered by the target, as the token ids that the target saw and wrote, and which of
them make up which step of a run.

Messages go through the target's chat template; a prompt with its completion is text that no template surrounds.
Duplicates are left out and some samples are held out: a pure function of the seed, so a resumed run continues the
sequence.
"""

from __future__ import annotations

import hashlib
import math
import random
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import compress, count, islice
from pathlib import Path
from typing import Any

from trtspec.checkpoint.conversations import Conversation, read_conversations
from trtspec.checkpoint.rendering import render
from trtspec.checkpoint.rows import CODE
from trtspec.checkpoint.tokenizer import KimiTokenizer
from trtspec.errors import TrtspecError, UsageError
from trtspec.heads.training.options import TrainOptions

MAX_HELD_OUT = 64  # sequences per evaluation
MAX_REFUSALS = 10  # messages that are kept of a file
WINDOW_BATCHES = (
    16  # samples are sorted by length within this many batches: little padding, much shuffling
)


@dataclass(frozen=True)
class Sample:
    """One sequence. `answer[i]` is 1 where token i was written by the target, `prompt` counts the tokens before the
    last answer.

    `repeated`: tokens at the beginning that an earlier sample of the conversation has trained. `first`: id of the
    conversation's first sample, empty in that one.
    """

    id: str
    tokens: tuple[int, ...]
    answer: tuple[int, ...]
    prompt: int
    category: str = ""
    repeated: int = 0
    first: str = ""

    @property
    def conversation(self) -> str:
        return self.first or self.id


def read_samples(
    source: Path | str,
    tokenizer: KimiTokenizer,
    seq_len: int,
    min_len: int = 8,
    refused: list[TrtspecError] | None = None,
) -> list[Sample]:
    """All conversations of a source (see `read_conversations`), tokenized and cut to `seq_len`.

    `refused` gets an error for each row of which nothing is learned. Raises UsageError naming the line of a row that
    is no conversation, TrtspecError when nothing is left.
    """
    refused = [] if refused is None else refused
    samples: list[Sample] = []
    for conversation in read_conversations(source):
        try:
            samples += samples_of(conversation, tokenizer, seq_len, min_len)
        except TrtspecError as error:
            refused.append(error)
    if not samples and refused:
        count = f" (and {len(refused) - 1} rows more)" if len(refused) > 1 else ""
        first = refused[0]
        raise TrtspecError(f"{first.message}{count}", first.remedy, first.code)
    if not samples:
        message = f"TS-DATA-EMPTY {source} holds no conversation to train on"
        raise TrtspecError(message, "run `trtspec synthesize` first")
    return samples


def samples_of(
    conversation: Conversation, tokenizer: KimiTokenizer, seq_len: int, min_len: int
) -> list[Sample]:
    """The conversation's renderings; a row without an id is called by its line.

    Raises UsageError naming the row if no position of an answer is left within `seq_len`.
    """
    name = conversation.id or str(conversation.line)
    row = f"{CODE} {conversation.where}"
    renderings = [each for each in render(conversation, tokenizer) if any(each.answer)]
    if not renderings:
        remedy = f"make answers: `trtspec synthesize {conversation.file} -o answers.jsonl`"
        raise UsageError(f"{row} has no answer", remedy)
    samples = []
    for number, rendering in enumerate(renderings, 1):
        tokens, answer = rendering.tokens[:seq_len], rendering.answer[:seq_len]
        if any(answer) and len(tokens) >= min_len:
            identity, first = (name, "") if number == 1 else (f"{name}.{number}", name)
            samples.append(
                Sample(
                    identity,
                    tuple(tokens),
                    tuple(answer),
                    rendering.prompt,
                    conversation.category,
                    rendering.repeated,
                    first,
                )
            )
    if not samples:
        size = f"of {len(renderings[0].tokens)} tokens, the first {renderings[0].prompt} its prompt"
        message = f"{row} {size}: no answer within {min_len} to {seq_len} tokens"
        raise UsageError(message, "raise `seq_len`, or leave the row out")
    return samples


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

    @cached_property
    def total(self) -> int:
        """Steps of the whole run."""
        return self.options.steps or self.options.epochs * len(self.epoch(0))

    def steps(self) -> Iterator[tuple[int, list[list[int]]]]:
        """(step from 1, its batches), epoch after epoch until `total`."""
        every = (window for number in count() for window in self.epoch(number))
        yield from enumerate(islice(every, self.total), 1)


def split_data(samples: list[Sample], options: TrainOptions) -> TrainingData:
    """Holds out the `held_out` share; every other sample comes once in an epoch."""
    trained, held = split_held_out(
        [sample.conversation for sample in samples], options.held_out, options.seed
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
        renamed: dict[str, str] = {}
        conversations = 0
        duplicates = 0
        for sample in read_samples(file, tokenizer, options.seq_len, refused=refused):
            if sample.tokens in seen:
                duplicates += 1
                continue
            seen.add(sample.tokens)
            name = _unused_name(sample.id, file, names)
            renamed[sample.id] = name
            conversations += not sample.first
            samples.append(replace(sample, id=name, first=renamed.get(sample.first, "")))
        messages = [error.message for error in refused]
        counted.append(
            {
                "file": file,
                "conversations": conversations,
                "duplicates": duplicates,
                "refused": len(messages),
                "refusals": messages[:MAX_REFUSALS],
            }
        )
    return samples, counted


def _unused_name(name: str, source: str, names: set[str]) -> str:
    """An id that no earlier sample has: rows without one are called by their line, in every file alike."""
    if name in names:
        name = f"{Path(source).stem}:{name}"
    while name in names:
        name += "+"
    names.add(name)
    return name
