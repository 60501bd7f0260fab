"""The conversations of a run: one file or several, each with the passes over it in an epoch, duplicates left out once,
and what is held out."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from trtspec.checkpoint.tokenizer import KimiTokenizer
from trtspec.errors import UsageError
from trtspec.heads.data.samples import BadRows, Sample, read_samples
from trtspec.heads.training.batches import DataOrder, TrainingData, split_data
from trtspec.heads.training.options import DataFiles, TrainOptions
from trtspec.records import note

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
