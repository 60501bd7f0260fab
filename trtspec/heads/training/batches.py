"""The conversations of a run and which of them make up which step: one file or several, each with its passes in an
epoch, duplicates left out once, some held out. A pure function of the seed: a resumed run continues the sequence."""

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

import torch
from torch import Tensor

from trtspec.checkpoint.tokenizer import KimiTokenizer
from trtspec.errors import UsageError
from trtspec.heads.data.samples import BadRows, Sample, read_samples
from trtspec.heads.training.features import Features
from trtspec.heads.training.options import DataFiles, TrainOptions
from trtspec.records import note

MAX_HELD_OUT = 64  # sequences per evaluation
MOST_EMPTY = 1000  # epochs without a sample, after which there is none to come
WINDOW_BATCHES = 16  # samples are sorted by length within this many batches: little padding, much shuffling


@dataclass
class TrainingBatch:
    """tokens [B, S]; hidden [B, S, H]; aux [B, S, n_aux*H]; padded on the right. places int64 [N]: the positions that
    count and have a row before them, as places in the flattened batch, ascending."""

    tokens: Tensor
    hidden: Tensor
    aux: Tensor
    places: Tensor


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


def split_data(samples: list[Sample], options: TrainOptions) -> TrainingData:
    """Every sample once in an epoch, but the `held_out` share."""
    train, held = split_held_out([sample.id for sample in samples], options.held_out, options.seed)
    passes = [0.0] * len(samples)
    for index in train:
        passes[index] = 1.0
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


def collate(features: Features, indices: list[int], answer_only: bool, device: str = "cpu") -> TrainingBatch:
    """Gathers the samples' states. What counts is found here, on the host: a mask on a GPU would have to be read back
    for the number of its ones. Nothing waits for the device."""
    length = max(len(features.samples[index].tokens) for index in indices)
    tokens = torch.zeros(len(indices), length, dtype=torch.int64)
    places: list[int] = []
    features.expect(indices)
    states = [features.states(index) for index in indices]
    hidden, aux = (torch.zeros(len(indices), length, part.shape[-1], dtype=torch.bfloat16) for part in states[0])
    for row, index in enumerate(indices):
        sample = features.samples[index]
        count = len(sample.tokens)
        tokens[row, :count] = torch.tensor(sample.tokens)
        hidden[row, :count], aux[row, :count] = states[row]
        mask = loss_mask(sample, answer_only)
        places += [row * length + at for at in range(1, count) if mask[at]]
    parts = (tokens, hidden, aux, torch.tensor(places, dtype=torch.int64))
    return TrainingBatch(*(part.to(device, non_blocking=True) for part in parts))


SHOWN = 3  # skipped rows that are named


@dataclass
class Mixture:
    """`told`: what became of each file, for the record. The order of samples is that of the files."""

    samples: list[Sample]
    data: TrainingData
    told: list[dict[str, Any]] = field(default_factory=list)


def read_mixture(files: DataFiles, tokenizer: KimiTokenizer, options: TrainOptions) -> Mixture:
    """Reads and tokenizes every file. A conversation that stands twice, by its tokens as they are trained on, is kept
    where it stands first; one that the evaluations ask for is not trained on."""
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
        return Mixture(samples, _split(samples, passes, options), told)
    told.append({"file": files.evaluation, "passes": 0, "conversations": len(held)} | evaluated)
    lengths = [len(sample.tokens) for sample in samples + held]
    order = DataOrder(lengths, passes + [0.0] * len(held), options)
    return Mixture(samples + held, TrainingData(order, list(range(len(samples), len(lengths)))), told)


def _split(samples: list[Sample], passes: list[float], options: TrainOptions) -> TrainingData:
    """As `split_data`, each sample with its passes."""
    plain = split_data(samples, options)
    if all(times == 1 for times in passes):
        return plain
    held = set(plain.held)
    weighed = [0.0 if index in held else times for index, times in enumerate(passes)]
    return TrainingData(replace(plain.order, passes=weighed), plain.held)


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
