"""The target's states that a head learns from, whoever computed them: kept in memory or read from dumps, and gathered
into batches.

Per token: the state after the final norm (it gives the target's distribution) and the captured layer outputs, in bf16,
(1 + n_aux) * H * 2 bytes.

A dump directory holds one <conversation_id>.pt per conversation in ModelOpt's offline format, which its scripts write
with TensorRT-LLM, vLLM or transformers: input_ids [S], hidden_states [S, H], aux_hidden_states [S, n_aux*H], loss_mask
[S], conversation_id. Every dump is checked once when the run begins, read when a step needs it, and runs no code.
"""

from __future__ import annotations

import zipfile
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from trtspec.errors import TrtspecError
from trtspec.heads.training.samples import Sample, loss_mask
from trtspec.models.k2 import KimiModel
from trtspec.models.stream import padded, similar_length
from trtspec.specs import ModelSpec


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


@dataclass
class TrainingBatch:
    """tokens [B, S]; hidden [B, S, H]; aux [B, S, n_aux*H]; padded on the right. places int64 [N]: the positions that
    count and have a row before them, as places in the flattened batch, ascending."""

    tokens: Tensor
    hidden: Tensor
    aux: Tensor
    places: Tensor


def collate(
    features: Features, indices: list[int], answer_only: bool, device: str = "cpu"
) -> TrainingBatch:
    """Gathers the samples' states. What counts is found here, on the host: a mask on a GPU would have to be read back
    for the number of its ones. Nothing waits for the device."""
    length = max(len(features.samples[index].tokens) for index in indices)
    tokens = torch.zeros(len(indices), length, dtype=torch.int64)
    places: list[int] = []
    features.expect(indices)
    states = [features.states(index) for index in indices]
    hidden, aux = (
        torch.zeros(len(indices), length, part.shape[-1], dtype=torch.bfloat16)
        for part in states[0]
    )
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
    """States in memory, by sample."""

    def __init__(self, samples: list[Sample], hidden_size: int, num_aux: int) -> None:
        super().__init__(samples, hidden_size, num_aux)
        self.held: dict[int, tuple[Tensor, Tensor]] = {}

    def states(self, index: int) -> tuple[Tensor, Tensor]:
        return self.held[index]


def bytes_per_token(spec: ModelSpec, num_aux: int) -> int:
    return (1 + num_aux) * spec.hidden_size * 2


def compute_features(
    target: KimiModel,
    samples: list[Sample],
    aux_layers: tuple[int, ...],
    advance: Callable[[int], None] = lambda _: None,
) -> HeldFeatures:
    """Runs the target once over every sample (right-padded batches of similar length); `advance` gets token counts."""
    features = HeldFeatures(samples, target.spec.hidden_size, len(aux_layers))
    for batch in similar_length([len(sample.tokens) for sample in samples]):
        tokens = padded([samples[index].tokens for index in batch]).to(target.embed.weight.device)
        with torch.inference_mode():
            output = target(tokens, None, None, aux_layers=aux_layers, last_only=True)
        for row, index in enumerate(batch):
            rows = slice(len(samples[index].tokens))
            # copies, so that the padding of the batch is let go
            hidden, aux = (
                part[row, rows].to("cpu", torch.bfloat16, copy=True)
                for part in (output.hidden, output.aux)
            )
            features.held[index] = hidden, aux
        advance(sum(len(samples[index].tokens) for index in batch))
    return features


def dumps_of(
    samples: list[Sample], directory: Path, spec: ModelSpec, num_aux: int
) -> DumpedFeatures:
    """The dumps of exactly these samples, each found by its conversation id. Raises TrtspecError when one is missing.

    The tokens of a dump may differ from ours (another template, a cut). Then they are trained on, because the states
    belong to them.
    """
    paths = [directory / f"{sample.id}.pt" for sample in samples]
    missing = [path.name for path in paths if not path.is_file()]
    if missing:
        raise TrtspecError(
            f"TS-FEATURES-NONE {directory} lacks the dumps of {len(missing)} of {len(samples)} conversations, first "
            f"{missing[0]}",
            "dump them with an engine (`dry_run` prints its command), or pass `features` stream:DIR",
        )
    dumped = [read_dump(path, spec, num_aux)[0] for path in paths]
    kept = [
        ours if ours.tokens == theirs.tokens else theirs
        for ours, theirs in zip(samples, dumped, strict=True)
    ]
    return DumpedFeatures(kept, paths, spec, num_aux)


def read_dump(path: Path, spec: ModelSpec, num_aux: int) -> tuple[Sample, dict[str, Tensor]]:
    """(its sample, its tensors, mapped from the file); weights_only: a dump runs no code.

    Raises TrtspecError when it is no dump, its widths are not the target's, or its states have no final norm.
    """
    try:
        record = torch.load(path, weights_only=True, map_location="cpu", mmap=True)
        tokens = tuple(record["input_ids"].flatten().tolist())
        hidden, aux = record["hidden_states"], record["aux_hidden_states"]
    except Exception as error:  # torch.load raises many kinds for a damaged or foreign file
        reason = str(error).partition("\n")[0][
            :200
        ]  # not torch's advice to load without weights_only
        raise TrtspecError(
            f"TS-FEATURES-DUMP {path}: not a dump ({reason})", "dump the states again"
        ) from None
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
    return Sample(
        str(record.get("conversation_id", path.stem)), tokens, answer, len(tokens)
    ), record


def check_content(path: Path, states: tuple[Tensor, ...]) -> None:
    """Raises TrtspecError for bytes that are not those that were written (torch.save stores a CRC-32 of each tensor),
    and for NaN or infinity."""
    try:
        with zipfile.ZipFile(path) as archive:
            damaged = archive.testzip()
    except (OSError, zipfile.BadZipFile) as error:
        damaged = str(error)
    if damaged:
        raise TrtspecError(
            f"TS-FEATURES-DUMP {path} is damaged ({damaged})", "dump these states again"
        )
    if not all(torch.isfinite(part).all() for part in states):
        raise TrtspecError(
            f"TS-FEATURES-NAN {path} holds NaN or infinity",
            "dump these states again, or leave them out",
        )


class DumpedFeatures(Features):
    """`Features` whose states stay in their files; sample i is `paths[i]`."""

    def __init__(
        self, samples: list[Sample], paths: list[Path], spec: ModelSpec, num_aux: int
    ) -> None:
        super().__init__(samples, spec.hidden_size, num_aux)
        self.paths, self.spec = paths, spec
        self._checked: set[int] = set()

    def states(self, index: int) -> tuple[Tensor, Tensor]:
        """As `Features.states`, from the file, whose content is checked the first time."""
        _, record = read_dump(self.paths[index], self.spec, self.num_aux)
        count = len(self.samples[index].tokens)
        hidden, aux = (
            record[key][:count].to(torch.bfloat16) for key in ("hidden_states", "aux_hidden_states")
        )
        if index not in self._checked:
            check_content(self.paths[index], (hidden, aux))
            self._checked.add(index)
        return hidden, aux
