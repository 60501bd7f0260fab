"""States read from dumps when a step needs them: a directory of any size, made by us or by an engine.

Our dumps carry a hash of their tokens in the name; those of ModelOpt's scripts (TensorRT-LLM, vLLM, transformers) are
called `<conversation_id>.pt`. Every file is checked once when the run begins and loaded without running code.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from trtspec.errors import TrtspecError
from trtspec.heads.data import Sample
from trtspec.heads.features import Features, bytes_per_token, dump_path, read_dump
from trtspec.specs import ModelSpec


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
