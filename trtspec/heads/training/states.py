"""The target's states that a head learns from, in memory or in dumps, and their batches.

A token has the state after the final norm, which gives the target's distribution, and the captured
layer outputs. They are bf16, (1 + n_aux) * H * 2 bytes.

A dump directory holds one <conversation_id>.pt per conversation in ModelOpt's offline format, which
its scripts write with TensorRT-LLM, vLLM or transformers: input_ids [S], hidden_states [S, H],
aux_hidden_states [S, n_aux*H], loss_mask [S], conversation_id. Every dump is checked once when the
run begins, and read when a step needs it. Reading a dump runs no code.
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
    """The states of all samples. A subclass knows where they are."""

    def __init__(self, samples: list[Sample], hidden_size: int, num_aux: int) -> None:
        self.samples = samples
        self.hidden_size = hidden_size
        self.num_aux = num_aux

    @abstractmethod
    def states(self, index: int) -> tuple[Tensor, Tensor]:
        """(hidden [S, H], aux [S, n_aux*H]) of sample `index`, bf16."""

    def expect(self, indices: list[int]) -> None:  # noqa: B027 (most have nothing to fetch)
        """Begins to fetch the states of these samples, which a step will need soon."""

    def close(self) -> None:  # noqa: B027
        """Releases the connections that the states come through. Later calls of `states` fail."""


@dataclass
class TrainingBatch:
    """Samples of one batch, padded on the right.

    Args:
        tokens: int64 [B, S].
        hidden: bf16 [B, S, H].
        aux: bf16 [B, S, n_aux*H].
        positions: int64 [N], indices in the flattened batch, ascending: the positions that count
            and have a row before them.
    """

    tokens: Tensor
    hidden: Tensor
    aux: Tensor
    positions: Tensor


def collate(
    features: Features, indices: list[int], answer_only: bool, device: str = "cpu"
) -> TrainingBatch:
    """Gathers the states of these samples. Nothing waits for the device.

    The positions that count are found on the host. The number of ones in a mask on a GPU would have
    to be read back.
    """
    length = max(len(features.samples[index].tokens) for index in indices)
    features.expect(indices)
    states = [features.states(index) for index in indices]
    hidden_width, aux_width = (state.shape[-1] for state in states[0])
    rows = len(indices)
    tokens = torch.zeros(rows, length, dtype=torch.int64)
    hidden = torch.zeros(rows, length, hidden_width, dtype=torch.bfloat16)
    aux = torch.zeros(rows, length, aux_width, dtype=torch.bfloat16)
    positions: list[int] = []
    for row, index in enumerate(indices):
        sample = features.samples[index]
        count = len(sample.tokens)
        tokens[row, :count] = torch.tensor(sample.tokens)
        hidden[row, :count], aux[row, :count] = states[row]
        mask = loss_mask(sample, answer_only)
        begin = row * length
        positions += [begin + offset for offset in range(1, count) if mask[offset]]
    tensors = (tokens, hidden, aux, torch.tensor(positions, dtype=torch.int64))
    return TrainingBatch(*(tensor.to(device, non_blocking=True) for tensor in tensors))


class HeldFeatures(Features):
    """States in memory, by sample."""

    def __init__(self, samples: list[Sample], hidden_size: int, num_aux: int) -> None:
        super().__init__(samples, hidden_size, num_aux)
        self.held: dict[int, tuple[Tensor, Tensor]] = {}

    def states(self, index: int) -> tuple[Tensor, Tensor]:
        return self.held[index]


def bytes_per_token(spec: ModelSpec, num_aux: int) -> int:
    """Bytes of a token's states."""
    return (1 + num_aux) * spec.hidden_size * 2


def compute_features(
    target: KimiModel,
    samples: list[Sample],
    aux_layers: tuple[int, ...],
    advance: Callable[[int], None] = lambda _: None,
) -> HeldFeatures:
    """Runs the target once over every sample, in right-padded batches of similar length.

    `advance` gets the number of tokens after each batch.
    """
    features = HeldFeatures(samples, target.spec.hidden_size, len(aux_layers))
    device = target.embed.weight.device
    lengths = [len(sample.tokens) for sample in samples]
    for batch in similar_length(lengths):
        tokens = padded([samples[index].tokens for index in batch]).to(device)
        with torch.inference_mode():
            output = target(tokens, None, None, aux_layers=aux_layers, last_only=True)
        for row, index in enumerate(batch):
            count = lengths[index]
            # Copies, so that the padding of the batch is freed.
            hidden = output.hidden[row, :count].to("cpu", torch.bfloat16, copy=True)
            aux = output.aux[row, :count].to("cpu", torch.bfloat16, copy=True)
            features.held[index] = (hidden, aux)
        advance(sum(lengths[index] for index in batch))
    return features


def dumps_of(
    samples: list[Sample], directory: Path, spec: ModelSpec, num_aux: int
) -> DumpedFeatures:
    """The dumps of exactly these samples, by conversation id.

    The tokens of a dump may differ from the sample's (another template, a cut). Then the dump's
    tokens are trained on, because the states belong to them. Raises TrtspecError if a dump is
    missing or invalid.
    """
    paths = [directory / f"{sample.id}.pt" for sample in samples]
    missing = [path.name for path in paths if not path.is_file()]
    if missing:
        message = (
            f"TS-FEATURES-NONE {directory} lacks the dumps of {len(missing)} of {len(samples)} "
            f"conversations, first {missing[0]}"
        )
        remedy = (
            "dump them with an engine (`dry_run` prints its command), or pass `features` stream:DIR"
        )
        raise TrtspecError(message, remedy)
    dumped = [read_dump(path, spec, num_aux)[0] for path in paths]
    kept = []
    for sample, dump in zip(samples, dumped, strict=True):
        kept.append(sample if sample.tokens == dump.tokens else dump)
    return DumpedFeatures(kept, paths, spec, num_aux)


def read_dump(path: Path, spec: ModelSpec, num_aux: int) -> tuple[Sample, dict[str, Tensor]]:
    """(the dump's sample, its tensors, mapped from the file).

    Raises TrtspecError if the file is not a dump, if its widths or tokens are not the target's, or
    if its states have no final norm.
    """
    try:
        # weights_only: a dump runs no code
        record = torch.load(path, weights_only=True, map_location="cpu", mmap=True)
        tokens = tuple(record["input_ids"].flatten().tolist())
        hidden_shape = tuple(record["hidden_states"].shape)
        aux_shape = tuple(record["aux_hidden_states"].shape)
        answer = (1,) * len(tokens)
        mask = record.get("loss_mask")
        if mask is not None:
            answer = tuple(mask.flatten().tolist())
    except Exception as error:  # torch.load raises many types for a damaged or foreign file
        # The first line. The others advise to load without weights_only.
        reason = str(error).partition("\n")[0]
        message = f"TS-FEATURES-DUMP {path}: not a dump ({reason[:200]})"
        raise TrtspecError(message, "dump the states again") from None
    hidden_wanted = (len(tokens), spec.hidden_size)
    aux_wanted = (len(tokens), num_aux * spec.hidden_size)
    if hidden_shape != hidden_wanted or aux_shape != aux_wanted:
        message = (
            f"TS-FEATURES-DUMP {path}: states {hidden_shape} and {aux_shape}, "
            f"wanted {hidden_wanted} and {aux_wanted}"
        )
        raise TrtspecError(message, "dump the states of this target and these capture layers")
    if max(tokens, default=0) >= spec.vocab_size or min(tokens, default=0) < 0:
        message = (
            f"TS-FEATURES-OTHER {path}: token ids beyond the target's vocabulary "
            f"of {spec.vocab_size}"
        )
        raise TrtspecError(message, "dump the states of this target with its own tokenizer")
    if record.get("hidden_states_prenorm"):
        message = (
            f"TS-FEATURES-PRENORM {path}: hidden_states are from before the target's final norm"
        )
        remedy = "dump the normed state, or apply the final norm to the dumps"
        raise TrtspecError(message, remedy)
    name = str(record.get("conversation_id", path.stem))
    return Sample(name, tokens, answer, len(tokens)), record


class DumpedFeatures(Features):
    """`Features` whose states stay in their files. The states of sample i are in `paths[i]`."""

    def __init__(
        self, samples: list[Sample], paths: list[Path], spec: ModelSpec, num_aux: int
    ) -> None:
        super().__init__(samples, spec.hidden_size, num_aux)
        self.paths = paths
        self.spec = spec
        self._checked: set[int] = set()

    def states(self, index: int) -> tuple[Tensor, Tensor]:
        """Reads the states from the file, whose content is checked the first time."""
        path = self.paths[index]
        _, record = read_dump(path, self.spec, self.num_aux)
        count = len(self.samples[index].tokens)
        hidden = record["hidden_states"][:count].to(torch.bfloat16)
        aux = record["aux_hidden_states"][:count].to(torch.bfloat16)
        if index not in self._checked:
            check_content(path, (hidden, aux))
            self._checked.add(index)
        return hidden, aux


def check_content(path: Path, states: tuple[Tensor, ...]) -> None:
    """Raises TrtspecError for changed bytes, and for NaN or infinity.

    torch.save stores a CRC-32 of each tensor.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            damaged = archive.testzip()
    except (OSError, zipfile.BadZipFile) as error:
        damaged = str(error)
    if damaged:
        message = f"TS-FEATURES-DUMP {path} is damaged ({damaged})"
        raise TrtspecError(message, "dump these states again")
    if not all(torch.isfinite(state).all() for state in states):
        message = f"TS-FEATURES-NAN {path} holds NaN or infinity"
        raise TrtspecError(message, "dump these states again, or leave them out")
