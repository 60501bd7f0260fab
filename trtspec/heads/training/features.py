"""The target's states that a head learns from: computed once per token, kept in memory or as ModelOpt's dumps,
and gathered into batches.

Per token: the state after the final norm (it gives the target's distribution) and the captured layer outputs, in bf16,
(1 + n_aux) * H * 2 bytes. A dump directory holds one .pt per conversation in ModelOpt's offline format:
input_ids [S], hidden_states [S, H], aux_hidden_states [S, n_aux*H], loss_mask [S], conversation_id. Our dumps carry a
hash of their tokens in the name; those of ModelOpt's scripts (TensorRT-LLM, vLLM, transformers) are called
`<conversation_id>.pt`. Every dump is checked once when the run begins, read when a step needs it, and runs no code.
"""

from __future__ import annotations

import hashlib
import re
import zipfile
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from trtspec import machine
from trtspec.checkpoint.identity import identity_digest
from trtspec.errors import TrtspecError
from trtspec.heads.training.samples import Sample, loss_mask
from trtspec.models.stream import similar_length
from trtspec.report import file_sha256
from trtspec.specs import ModelSpec

VOCABULARIES = ("tiktoken.model", "tokenizer.json")
STATES_OF = "states_of"  # in our dumps; those of engines say nothing about their target


class CapturingTarget(Protocol):
    """The part of models.kimi.KimiModel that features need."""

    spec: ModelSpec

    def __call__(self, tokens: Tensor, start: None, cache: None, *, aux_layers: tuple[int, ...], last_only: bool): ...


class Features(ABC):
    """The states of all samples, wherever they are until a step asks for them."""

    def __init__(self, samples: list[Sample], hidden_size: int, num_aux: int) -> None:
        self.samples, self.hidden_size, self.num_aux = samples, hidden_size, num_aux

    @abstractmethod
    def states(self, index: int) -> tuple[Tensor, Tensor]:
        """hidden [S, H] and aux [S, n_aux*H] of sample `index`, bf16."""

    def expect(self, indices: list[int]) -> None:  # noqa: B027 (most have nothing to fetch)
        """Tells which samples are asked for soon; a chance to fetch them meanwhile."""

    def close(self) -> None:  # noqa: B027
        """Gives back what the states came through; none can be asked for afterwards."""

    @property
    def bytes(self) -> int:
        tokens = sum(len(sample.tokens) for sample in self.samples)
        return tokens * (1 + self.num_aux) * self.hidden_size * 2


@dataclass
class TrainingBatch:
    """tokens [B, S]; hidden [B, S, H]; aux [B, S, n_aux*H]; padded on the right. places int64 [N]: the positions that
    count and have a row before them, as places in the flattened batch, ascending."""

    tokens: Tensor
    hidden: Tensor
    aux: Tensor
    places: Tensor


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


class HeldFeatures(Features):
    """States in memory, end to end: hidden [N, H], aux [N, n_aux*H], sample i at offsets[i]..offsets[i+1]."""

    def __init__(self, samples: list[Sample], hidden_size: int, num_aux: int) -> None:
        super().__init__(samples, hidden_size, num_aux)
        self.offsets = list(accumulate((len(sample.tokens) for sample in samples), initial=0))
        self.hidden = torch.empty(self.offsets[-1], hidden_size, dtype=torch.bfloat16)
        self.aux = torch.empty(self.offsets[-1], num_aux * hidden_size, dtype=torch.bfloat16)

    def rows(self, index: int) -> slice:
        return slice(self.offsets[index], self.offsets[index + 1])

    def states(self, index: int) -> tuple[Tensor, Tensor]:
        return self.hidden[self.rows(index)], self.aux[self.rows(index)]


def bytes_per_token(spec: ModelSpec, num_aux: int) -> int:
    return (1 + num_aux) * spec.hidden_size * 2


def compute_features(
    target: CapturingTarget,
    samples: list[Sample],
    aux_layers: tuple[int, ...],
    advance: Callable[[int], None] = lambda _: None,
) -> HeldFeatures:
    """Runs the target once over every sample (right-padded batches of similar length); `advance` gets token counts."""
    features = HeldFeatures(samples, target.spec.hidden_size, len(aux_layers))
    for batch in similar_length([len(sample.tokens) for sample in samples]):
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


@dataclass(frozen=True)
class StatesOf:
    """What dumped states belong to. `target` is its `identity_digest`, `tokenizer` of its vocabulary."""

    target: str
    tokenizer: str
    layers: tuple[int, ...]

    def other(self, stored: dict[str, Any]) -> str:
        """What a dump says that is otherwise, or nothing."""
        mine = asdict(self) | {"layers": list(self.layers)}
        wrong = [name for name, value in mine.items() if stored.get(name, value) != value]
        if "layers" in wrong:
            return f"layers {stored['layers']}, and this head reads {mine['layers']}"
        return f"another {' and '.join(wrong)}" if wrong else ""


def states_of(target_dir: Path, layers: tuple[int, ...]) -> StatesOf:
    """Of the target in a directory and these capture layers."""
    vocabulary = next((target_dir / name for name in VOCABULARIES if (target_dir / name).is_file()), None)
    tokenizer = file_sha256(vocabulary) if vocabulary else ""
    return StatesOf(identity_digest(target_dir), tokenizer, tuple(sorted(layers)))


def dump_path(directory: Path, sample: Sample) -> Path:
    """File of a sample: its id made safe, and a hash of its tokens, so that stale dumps are never taken for it."""
    digest = hashlib.sha256(repr(sample.tokens).encode()).hexdigest()[:12]
    return directory / f"{re.sub(r'[^A-Za-z0-9_.-]', '_', sample.id)[:80]}-{digest}.pt"


def dump_features(
    target: CapturingTarget,
    samples: list[Sample],
    directory: Path,
    of: StatesOf,
    advance: Callable[[int], None] = lambda _: None,
    part: slice = slice(None),
) -> None:
    """Computes states and writes one .pt per sample, a batch at a time, so memory holds no more than that.

    Of several processes each takes its `part` of the batches. A batch whose files are there is not computed again, and
    because batches are made of all samples, a resumed run writes the same bytes.
    """
    directory.mkdir(parents=True, exist_ok=True)
    for batch in list(similar_length([len(sample.tokens) for sample in samples]))[part]:
        chosen = [samples[index] for index in batch]
        if not all(dump_path(directory, sample).exists() for sample in chosen):
            write_dumps(compute_features(target, chosen, of.layers), directory, of)
        advance(sum(len(sample.tokens) for sample in chosen))


def check_room(directory: Path, size: int, tokens: int) -> None:
    """Raises TrtspecError where the states, of which some may be there already, do not fit the disk."""
    place = machine.existing(directory)
    there = sum(path.stat().st_size for path in directory.glob("*.pt")) if directory.is_dir() else 0
    free = machine.free_disk(place)
    if size - there > free:
        raise TrtspecError(
            f"TS-FEATURES-DISK the states of {tokens:,} tokens take {size:,} bytes, {there:,} of them are in "
            f"{directory}, and the disk of {place} has {free:,} free",
            "pass a directory on a larger disk, less data, or `features` stream or URL, which keep no states",
        )


def write_dumps(features: HeldFeatures, directory: Path, of: StatesOf | None = None) -> None:
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
        if of:
            record[STATES_OF] = asdict(of) | {"layers": list(of.layers)}
        partial = path.with_suffix(".partial")
        try:
            torch.save(record, partial)
            partial.replace(path)
        except (OSError, RuntimeError) as error:
            partial.unlink(missing_ok=True)
            raise TrtspecError(f"cannot write {path}: {error}", "free space there; finished dumps are kept") from None


def read_dump(
    path: Path, spec: ModelSpec, num_aux: int, of: StatesOf | None = None
) -> tuple[Sample, dict[str, Tensor]]:
    """(its sample, its tensors, mapped from the file); weights_only: a dump runs no code.

    Raises TrtspecError when it is no dump, its widths are not the target's, or it says that it is of something else.
    """
    try:
        record = torch.load(path, weights_only=True, map_location="cpu", mmap=True)
        tokens = tuple(record["input_ids"].flatten().tolist())
        hidden, aux = record["hidden_states"], record["aux_hidden_states"]
    except Exception as error:  # torch.load raises many kinds for a damaged or foreign file
        reason = str(error).partition("\n")[0][:200]  # not torch's advice to load without weights_only
        raise TrtspecError(f"TS-FEATURES-DUMP {path}: not a dump ({reason})", "dump the states again") from None
    if of and (other := of.other(record.get(STATES_OF) or {})):
        raise TrtspecError(
            f"TS-FEATURES-OTHER {path}: states of {other}", "dump the states of this target and these capture layers"
        )
    wanted = ((len(tokens), spec.hidden_size), (len(tokens), num_aux * spec.hidden_size))
    if (tuple(hidden.shape), tuple(aux.shape)) != wanted:
        raise TrtspecError(
            f"TS-FEATURES-DUMP {path}: states {tuple(hidden.shape)} and {tuple(aux.shape)}, wanted {wanted[0]} and "
            f"{wanted[1]}",
            "dump the states of this target and these capture layers",
        )
    if max(tokens, default=0) >= spec.vocab_size or min(tokens, default=0) < 0:
        raise TrtspecError(
            f"TS-FEATURES-OTHER {path}: token ids beyond the target's vocabulary of {spec.vocab_size}",
            "dump the states of this target with its own tokenizer",
        )
    if record.get("hidden_states_prenorm"):
        raise TrtspecError(
            f"TS-FEATURES-PRENORM {path}: hidden_states are from before the target's final norm",
            "dump the normed state, or apply the final norm to the dumps",
        )
    mask = record.get("loss_mask")
    answer = (1,) * len(tokens) if mask is None else tuple(mask.flatten().tolist())
    return Sample(str(record.get("conversation_id", path.stem)), tokens, answer, len(tokens)), record


def check_content(path: Path, states: tuple[Tensor, ...]) -> None:
    """Raises TrtspecError for bytes that are not those that were written (torch.save stores a CRC-32 of each tensor),
    and for NaN or infinity."""
    try:
        with zipfile.ZipFile(path) as archive:
            damaged = archive.testzip()
    except (OSError, zipfile.BadZipFile) as error:
        damaged = str(error)
    if damaged:
        raise TrtspecError(f"TS-FEATURES-DUMP {path} is damaged ({damaged})", "dump these states again")
    if not all(torch.isfinite(part).all() for part in states):
        raise TrtspecError(
            f"TS-FEATURES-NAN {path} holds NaN or infinity", "dump these states again, or leave them out"
        )


class DumpedFeatures(Features):
    """`Features` whose states stay in their files; sample i is `paths[i]`."""

    def __init__(
        self, samples: list[Sample], paths: list[Path], spec: ModelSpec, num_aux: int, unnamed: int | None = None
    ) -> None:
        """unnamed: a sample whose dump does not say what it is of, as those of engines."""
        super().__init__(samples, spec.hidden_size, num_aux)
        self.paths, self.spec, self.unnamed = paths, spec, unnamed
        self._checked: set[int] = set()

    def states(self, index: int) -> tuple[Tensor, Tensor]:
        """As `Features.states`, from the file, whose content is checked the first time."""
        _, record = read_dump(self.paths[index], self.spec, self.num_aux)
        count = len(self.samples[index].tokens)
        hidden, aux = (record[key][:count].to(torch.bfloat16) for key in ("hidden_states", "aux_hidden_states"))
        if index not in self._checked:
            check_content(self.paths[index], (hidden, aux))
            self._checked.add(index)
        return hidden, aux


def all_dumps(directory: Path, spec: ModelSpec, num_aux: int, of: StatesOf | None = None) -> DumpedFeatures:
    """Every dump of a directory, whoever wrote it.

    Raises TrtspecError when there is none, when one is no dump, or its widths are not the target's.
    """
    paths = sorted(directory.glob("*.pt"))
    if not paths:
        raise TrtspecError(f"TS-FEATURES-NONE {directory} holds no .pt dumps", "pass a directory of ModelOpt dumps")
    return _opened(paths, spec, num_aux, of)


def find_dumps(
    samples: list[Sample], directory: Path, spec: ModelSpec, num_aux: int, of: StatesOf | None = None
) -> DumpedFeatures | None:
    """The dumps of these samples under whatever names they have, or None when the directory lacks one."""
    if not any(directory.glob("*.pt")):
        return None
    named = dumps_of(samples, directory, spec, num_aux, of)
    if named is None and len(samples) == sum(1 for _ in directory.glob("*.pt")):
        every = all_dumps(directory, spec, num_aux, of)
        return every if every.samples == samples else None
    return named


def dumps_of(
    samples: list[Sample], directory: Path, spec: ModelSpec, num_aux: int, of: StatesOf | None = None
) -> DumpedFeatures | None:
    """The dumps of exactly these samples, or None when the directory lacks one.

    An engine's dump counts by its conversation id. Its tokens may differ from ours (another template, a cut). Then the
    tokens of the dump are trained on, because its states belong to them.
    """
    paths = [
        ours if (ours := dump_path(directory, sample)).exists() else directory / f"{sample.id}.pt" for sample in samples
    ]
    if not paths or not all(path.exists() for path in paths):
        return None
    found = _opened(paths, spec, num_aux, of)
    pairs = zip(samples, found.samples, strict=True)
    found.samples = [ours if ours.tokens == dumped.tokens else dumped for ours, dumped in pairs]
    return found


def _opened(paths: list[Path], spec: ModelSpec, num_aux: int, of: StatesOf | None) -> DumpedFeatures:
    """Checks each dump; its record is let go again, because it maps the file."""
    samples, unnamed = [], None
    for index, path in enumerate(paths):
        sample, record = read_dump(path, spec, num_aux, of)
        samples.append(sample)
        unnamed = index if unnamed is None and STATES_OF not in record else unnamed
    return DumpedFeatures(samples, paths, spec, num_aux, unnamed)
