"""The target's states that a head learns from: computed once per token, kept in memory or as ModelOpt's dumps.

Per token: the state after the final norm (it gives the target's distribution) and the captured layer outputs, in bf16,
(1 + n_aux) * H * 2 bytes. A dump directory holds one .pt per conversation in ModelOpt's offline format:
input_ids [S], hidden_states [S, H], aux_hidden_states [S, n_aux*H], loss_mask [S], conversation_id. Our dumps carry a
hash of their tokens in the name; those of ModelOpt's scripts (TensorRT-LLM, vLLM, transformers) are called
`<conversation_id>.pt`. Every dump is checked once when the run begins, read when a step needs it, and runs no code.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from trtspec.errors import TrtspecError
from trtspec.heads.data.samples import Sample
from trtspec.specs import ModelSpec

FORWARD_TOKENS = 2048  # per forward of the target: large enough for full matrix multiplications


class CapturingTarget(Protocol):
    """The part of models.kimi.KimiModel that features need."""

    spec: ModelSpec

    def __call__(self, tokens: Tensor, start: None, cache: None, *, aux_layers: tuple[int, ...], last_only: bool): ...


@dataclass
class Features:
    """States of all samples end to end: hidden [N, H], aux [N, n_aux*H], sample i at offsets[i]..offsets[i+1]."""

    samples: list[Sample]
    offsets: list[int]
    hidden: Tensor
    aux: Tensor

    def rows(self, index: int) -> slice:
        return slice(self.offsets[index], self.offsets[index + 1])

    def states(self, index: int) -> tuple[Tensor, Tensor]:
        """hidden [S, H] and aux [S, n_aux*H] of sample `index`, bf16."""
        return self.hidden[self.rows(index)], self.aux[self.rows(index)]

    def expect(self, indices: list[int]) -> None:
        """Tells which samples are asked for soon; a chance to fetch them meanwhile."""

    def close(self) -> None:
        """Gives back what the states came through; none can be asked for afterwards."""

    @property
    def bytes(self) -> int:
        return sum(part.numel() * part.element_size() for part in (self.hidden, self.aux))


def bytes_per_token(spec: ModelSpec, num_aux: int) -> int:
    return (1 + num_aux) * spec.hidden_size * 2


def empty_features(samples: list[Sample], hidden_size: int, num_aux: int) -> Features:
    offsets = [0]
    for sample in samples:
        offsets.append(offsets[-1] + len(sample.tokens))
    hidden = torch.empty(offsets[-1], hidden_size, dtype=torch.bfloat16)
    aux = torch.empty(offsets[-1], num_aux * hidden_size, dtype=torch.bfloat16)
    return Features(samples, offsets, hidden, aux)


def compute_features(
    target: CapturingTarget,
    samples: list[Sample],
    aux_layers: tuple[int, ...],
    advance: Callable[[int], None] = lambda _: None,
) -> Features:
    """Runs the target once over every sample (right-padded batches of similar length); `advance` gets token counts."""
    features = empty_features(samples, target.spec.hidden_size, len(aux_layers))
    for batch in similar_length(samples):
        tokens = padded([samples[index] for index in batch])
        with torch.inference_mode():
            output = target(tokens, None, None, aux_layers=aux_layers, last_only=True)
        for row, index in enumerate(batch):
            place, count = features.rows(index), len(samples[index].tokens)
            features.hidden[place] = output.hidden[row, :count].to(torch.bfloat16)
            features.aux[place] = output.aux[row, :count].to(torch.bfloat16)
        advance(sum(len(samples[index].tokens) for index in batch))
    return features


def padded(samples: list[Sample]) -> Tensor:
    """int64 [B, longest], zeros on the right."""
    tokens = torch.zeros(len(samples), max(len(sample.tokens) for sample in samples), dtype=torch.int64)
    for row, sample in enumerate(samples):
        tokens[row, : len(sample.tokens)] = torch.tensor(sample.tokens)
    return tokens


def similar_length(samples: list[Sample]) -> Iterator[list[int]]:
    """Indices in batches, short samples first, at most FORWARD_TOKENS padded tokens each."""
    batch: list[int] = []
    for index in sorted(range(len(samples)), key=lambda i: len(samples[i].tokens)):
        if batch and (len(batch) + 1) * len(samples[index].tokens) > FORWARD_TOKENS:
            yield batch
            batch = []
        batch.append(index)
    if batch:
        yield batch


def dump_path(directory: Path, sample: Sample) -> Path:
    """File of a sample: its id made safe, and a hash of its tokens, so that stale dumps are never taken for it."""
    digest = hashlib.sha256(repr(sample.tokens).encode()).hexdigest()[:12]
    return directory / f"{re.sub(r'[^A-Za-z0-9_.-]', '_', sample.id)[:80]}-{digest}.pt"


def write_dumps(features: Features, directory: Path) -> None:
    """One .pt per sample, each appearing whole; files that are there already are left alone."""
    directory.mkdir(parents=True, exist_ok=True)
    for index, sample in enumerate(features.samples):
        path, rows = dump_path(directory, sample), features.rows(index)
        if path.exists():
            continue
        record = {
            "conversation_id": sample.id,
            "input_ids": torch.tensor(sample.tokens),
            "hidden_states": features.hidden[rows].clone(),
            "aux_hidden_states": features.aux[rows].clone(),
            "loss_mask": torch.tensor(sample.answer),
        }
        partial = path.with_suffix(".partial")
        torch.save(record, partial)
        partial.replace(path)


def read_dump(path: Path, spec: ModelSpec, num_aux: int) -> tuple[Sample, dict[str, Tensor]]:
    """(its sample, its tensors, mapped from the file); weights_only: a dump runs no code.

    Raises TrtspecError when it is no dump, or its widths are not the target's.
    """
    try:
        record = torch.load(path, weights_only=True, map_location="cpu", mmap=True)
        tokens = tuple(record["input_ids"].flatten().tolist())
        hidden, aux = record["hidden_states"], record["aux_hidden_states"]
    except Exception as error:  # torch.load raises many kinds for a damaged or foreign file
        raise TrtspecError(f"TS-FEATURES-DUMP {path}: not a dump ({error})", "dump the states again") from None
    wanted = ((len(tokens), spec.hidden_size), (len(tokens), num_aux * spec.hidden_size))
    if (tuple(hidden.shape), tuple(aux.shape)) != wanted:
        raise TrtspecError(
            f"TS-FEATURES-DUMP {path}: states {tuple(hidden.shape)} and {tuple(aux.shape)}, wanted {wanted[0]} and "
            f"{wanted[1]}",
            "dump the states of this target and these capture layers",
        )
    if record.get("hidden_states_prenorm"):
        raise TrtspecError(
            f"TS-FEATURES-PRENORM {path}: hidden_states are from before the target's final norm",
            "dump the normed state, or apply the final norm to the dumps",
        )
    mask = record.get("loss_mask")
    answer = (1,) * len(tokens) if mask is None else tuple(mask.flatten().tolist())
    return Sample(str(record.get("conversation_id", path.stem)), tokens, answer, len(tokens)), record


class DumpedFeatures(Features):
    """`Features` whose states stay in their files; sample i is `paths[i]`."""

    def __init__(self, samples: list[Sample], paths: list[Path], spec: ModelSpec, num_aux: int) -> None:
        empty = torch.empty(0, spec.hidden_size, dtype=torch.bfloat16)
        super().__init__(samples, [], empty, empty.new_empty(0, num_aux * spec.hidden_size))
        self.paths, self.spec, self.num_aux = paths, spec, num_aux

    def rows(self, index: int) -> slice:
        raise NotImplementedError("the states of dumps are not in one tensor; ask for `states`")

    @property
    def bytes(self) -> int:
        return sum(len(sample.tokens) for sample in self.samples) * bytes_per_token(self.spec, self.num_aux)

    def states(self, index: int) -> tuple[Tensor, Tensor]:
        """As `Features.states`, from the file."""
        _, record = read_dump(self.paths[index], self.spec, self.num_aux)
        count = len(self.samples[index].tokens)
        return tuple(record[key][:count].to(torch.bfloat16) for key in ("hidden_states", "aux_hidden_states"))  # type: ignore[return-value]


def all_dumps(directory: Path, spec: ModelSpec, num_aux: int) -> DumpedFeatures:
    """Every dump of a directory, whoever wrote it.

    Raises TrtspecError when there is none, when one is no dump, or its widths are not the target's.
    """
    paths = sorted(directory.glob("*.pt"))
    if not paths:
        raise TrtspecError(f"TS-FEATURES-NONE {directory} holds no .pt dumps", "pass a directory of ModelOpt dumps")
    return DumpedFeatures([read_dump(path, spec, num_aux)[0] for path in paths], paths, spec, num_aux)


def find_dumps(samples: list[Sample], directory: Path, spec: ModelSpec, num_aux: int) -> DumpedFeatures | None:
    """The dumps of these samples under whatever names they have, or None when the directory lacks one."""
    if not any(directory.glob("*.pt")):
        return None
    named = dumps_of(samples, directory, spec, num_aux)
    if named is None and len(samples) == sum(1 for _ in directory.glob("*.pt")):
        every = all_dumps(directory, spec, num_aux)
        return every if every.samples == samples else None
    return named


def dumps_of(samples: list[Sample], directory: Path, spec: ModelSpec, num_aux: int) -> DumpedFeatures | None:
    """The dumps of exactly these samples, or None when the directory lacks one.

    An engine's dump counts by its conversation id; where it saw other tokens than we would make of that conversation
    (another template, a cut), the tokens of the dump are trained on, because its states belong to them.
    """
    found, paths = [], []
    for sample in samples:
        ours, engines = dump_path(directory, sample), directory / f"{sample.id}.pt"
        path = ours if ours.exists() else engines
        if not path.exists():
            return None
        dumped = read_dump(path, spec, num_aux)[0]
        found.append(sample if dumped.tokens == sample.tokens else dumped)
        paths.append(path)
    return DumpedFeatures(found, paths, spec, num_aux) if found else None
