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
from trtspec.checkpoint.tokenizer import KimiTokenizer
from trtspec.errors import TrtspecError, UsageError
from trtspec.heads.training.options import TrainOptions

MAX_HELD_OUT = 64  # sequences per evaluation
WINDOW_BATCHES = (
    16  # samples are sorted by length within this many batches: little padding, much shuffling
)


@dataclass(frozen=True)
class Sample:
    """One sequence. `answer[i]` is 1 where token i was written by the target, `prompt` counts the tokens before the
    last answer."""

    id: str
    tokens: tuple[int, ...]
    answer: tuple[int, ...]
    prompt: int
    category: str = ""


def read_samples(
    source: Path | str, tokenizer: KimiTokenizer, seq_len: int, min_len: int = 8
) -> list[Sample]:
    """All conversations of a source (see `read_conversations`), tokenized and cut to `seq_len`; shorter ones than
    `min_len` are left out.

    Raises UsageError naming the line of a row that is no conversation, TrtspecError when nothing is left.
    """
    samples = [sample_of(conversation, tokenizer) for conversation in read_conversations(source)]
    samples = [
        replace(sample, tokens=sample.tokens[:seq_len], answer=sample.answer[:seq_len])
        for sample in samples
        if len(sample.tokens) >= min_len
    ]
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
        tokens = tokenizer.apply_chat_template(
            conversation.messages, tools, add_generation_prompt=False
        )
        return tokens, tokens
    prompt = tokenizer.apply_chat_template(before, tools)
    if last.get("tool_calls") or last.get("reasoning_content"):
        return prompt, tokenizer.apply_chat_template(
            conversation.messages, tools, add_generation_prompt=False
        )
    tokens = prompt + tokenizer.encode(last["content"], allow_special=True)
    if conversation.finish_reason != "length":
        tokens.append(tokenizer.special_id("<|im_end|>"))
    return prompt, tokens


def answer_mask(tokens: list[int], tokenizer: KimiTokenizer) -> list[int]:
    """1 for the tokens of an assistant turn between <|im_middle|> and <|im_end|>, the end mark included."""
    assistant, middle, end = (
        tokenizer.special_id(f"<|im_{name}|>") for name in ("assistant", "middle", "end")
    )
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


def split_held_out(ids: list[str], share: float, seed: int) -> tuple[list[int], list[int]]:
    """(training indices, held-out indices): the samples whose ids hash lowest, `share` of them, one at the least when
    there are ten and all but one at most; a sample's place does not depend on the order of the data."""

    def rank(index: int) -> bytes:
        return hashlib.sha256(f"{seed}:{ids[index]}".encode()).digest()

    size = round(share * len(ids))
    if share > 0 and size == 0 and len(ids) >= 10:
        size = 1
    held = sorted(sorted(range(len(ids)), key=rank)[: min(size, len(ids) - 1)])
    chosen = set(held)
    return [index for index in range(len(ids)) if index not in chosen], held


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
        [sample.id for sample in samples], options.held_out, options.seed
    )
    return TrainingData([len(sample.tokens) for sample in samples], trained, held, options)


def steps_of(samples: int, options: TrainOptions) -> int:
    """Optimizer steps of a run over this many samples, each once in an epoch."""
    return options.steps or options.epochs * math.ceil(
        math.ceil(samples / options.batch_size) / options.accumulation
    )


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
        read = read_samples(file, tokenizer, options.seq_len)
        before = len(samples)
        for sample in read:
            if sample.tokens not in seen:
                seen.add(sample.tokens)
                samples.append(_named(sample, file, names))
        kept = len(samples) - before
        counted.append({"file": file, "conversations": kept, "duplicates": len(read) - kept})
    return samples, counted


def _named(sample: Sample, source: str, names: set[str]) -> Sample:
    """With an id that no earlier sample has: rows without one are called by their line, in every file alike."""
    name = sample.id if sample.id not in names else f"{Path(source).stem}:{sample.id}"
    while name in names:
        name += "+"
    names.add(name)
    return replace(sample, id=name)
