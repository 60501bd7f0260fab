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
    """The target's hidden states of all samples. Each subclass has its own source of the states.

    Args:
        num_aux: number of captured layer outputs per token.
    """

    def __init__(self, samples: list[Sample], hidden_size: int, num_aux: int) -> None:
        self.samples = samples
        self.hidden_size = hidden_size
        self.num_aux = num_aux

    @abstractmethod
    def states(self, index: int) -> tuple[Tensor, Tensor]:
        """Returns the states of sample `index` in bf16.

        The first tensor [S, H] is after the target's final norm. The second [S, n_aux*H] has the
        captured layer outputs.
        """

    def expect(self, indices: list[int]) -> None:  # noqa: B027 (most have nothing to fetch)
        """Begins to fetch the states of these samples, which training will need soon."""

    def close(self) -> None:  # noqa: B027
        """Releases the connections to the source. Later calls of `states` fail."""


@dataclass
class TrainingBatch:
    """Tokens and hidden states of one batch of samples, padded on the right.

    Args:
        tokens: token ids, int64 [B, S].
        hidden: states after the target's final norm, bf16 [B, S, H].
        aux: captured layer outputs, bf16 [B, S, n_aux*H].
        positions: int64 [N], ascending indices in the flattened batch of the positions that count
            in the loss. The first position of a sample is left out, because no state drafts for it.
    """

    tokens: Tensor
    hidden: Tensor
    aux: Tensor
    positions: Tensor


def collate(
    features: Features, indices: list[int], answer_only: bool, device: str = "cpu"
) -> TrainingBatch:
    """Builds the padded batch of the samples `indices` on `device`.

    Finds the positions that count in the loss on the host, because a mask on a GPU would make the
    host wait for their number.
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
    moved = [tensor.to(device, non_blocking=True) for tensor in tensors]
    return TrainingBatch(*moved)


class HeldFeatures(Features):
    """Hidden states in memory, by sample index."""

    def __init__(self, samples: list[Sample], hidden_size: int, num_aux: int) -> None:
        super().__init__(samples, hidden_size, num_aux)
        self.held: dict[int, tuple[Tensor, Tensor]] = {}

    def states(self, index: int) -> tuple[Tensor, Tensor]:
        """Returns the final states and the captured layer outputs of sample `index`."""
        return self.held[index]


def bytes_per_token(spec: ModelSpec, num_aux: int) -> int:
    """Number of bytes that the hidden states of a token take in bf16."""
    return (1 + num_aux) * spec.hidden_size * 2


def compute_features(
    target: KimiModel,
    samples: list[Sample],
    aux_layers: tuple[int, ...],
    advance: Callable[[int], None] = lambda _: None,
) -> HeldFeatures:
    """Runs the target once over every sample, in right-padded batches of similar length.

    Args:
        aux_layers: 0-based layers whose outputs are captured, in ascending order.
        advance: function that gets the number of tokens of each finished batch.
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
    """Finds and checks the hidden-state dump of each sample in `directory`.

    A dump's file is named after the sample's id. A dump may have other tokens than its sample, from
    another template or length limit. The dump's tokens replace the sample's in that case, because
    the states belong to the dump's tokens. Raises TrtspecError if a dump is missing or invalid.
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
    """Reads a hidden-state dump, and checks that the dump fits the target.

    Returns the tokens as a sample, and the tensors mapped from the file. Raises TrtspecError if the
    file is not a dump, has the widths or tokens of another target, or has states from before the
    final norm.
    """
    try:
        # With `weights_only` a dump from a stranger cannot run code.
        record = torch.load(path, weights_only=True, map_location="cpu", mmap=True)
        tokens = tuple(record["input_ids"].flatten().tolist())
        hidden_shape = tuple(record["hidden_states"].shape)
        aux_shape = tuple(record["aux_hidden_states"].shape)
        answer = (1,) * len(tokens)
        mask = record.get("loss_mask")
        if mask is not None:
            answer = tuple(mask.flatten().tolist())
    except Exception as error:  # torch.load raises many types for a damaged or foreign file
        # Only torch's first line, because its other lines advise to load without weights_only.
        reason = str(error).partition("\n")[0]
        message = f"TS-FEATURES-DUMP {path}: not a dump ({reason[:200]})"
        raise TrtspecError(message, "dump the states again") from None
    hidden_wanted = (len(tokens), spec.hidden_size)
    aux_wanted = (len(tokens), num_aux * spec.hidden_size)
    masked = len(answer)
    if (hidden_shape, aux_shape, masked) != (hidden_wanted, aux_wanted, len(tokens)):
        message = (
            f"TS-FEATURES-DUMP {path}: states {hidden_shape} and {aux_shape}, loss_mask {masked}, "
            f"wanted {hidden_wanted}, {aux_wanted} and {len(tokens)}"
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
    """Hidden states in the files of a dump directory.

    Args:
        paths: file of each sample.
    """

    def __init__(
        self, samples: list[Sample], paths: list[Path], spec: ModelSpec, num_aux: int
    ) -> None:
        super().__init__(samples, spec.hidden_size, num_aux)
        self.paths = paths
        self.spec = spec
        self._checked: set[int] = set()

    def states(self, index: int) -> tuple[Tensor, Tensor]:
        """Reads the states of sample `index`, and checks the file's content at the first call.

        Raises TrtspecError if the file is damaged or has NaN or infinity.
        """
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
    """Raises TrtspecError if bytes of a dump have changed, or if `states` hold NaN or infinity.

    The check compares the CRC-32 that torch.save stores for each tensor.
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
