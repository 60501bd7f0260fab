"""The reference server of a target with a recurrent state, whose memory is of a class with a fault, or of
RecurrentState: python -m tests.engine.faulty_states CLASS serve ..."""

import sys
from typing import Any

import torch
from torch import Tensor

from tests.recurrent import HybridModel, Record, RecurrentState
from trtspec.cli.app import main
from trtspec.engine import server

load_target = server.load_target


class WindowForgotten(RecurrentState):
    def seen(self, *args: Any) -> Record:
        windows, states = super().seen(*args)
        return Record(windows * 0, states)


class StateOfAnotherRow(RecurrentState):
    def seen(self, *args: Any) -> Record:
        return Record(*(part.roll(1, 0) for part in RecurrentState.seen(self, *args)))


class StateInBfloat16(RecurrentState):
    def seen(self, *args: Any) -> Record:
        windows, states = super().seen(*args)
        return Record(windows, states.bfloat16().to(states.dtype))


class RejectedDraftsKept(RecurrentState):
    def commit(self, counts: Tensor | list[int]) -> None:
        whole = self.call[self.layers[0]][0].states.shape[1] - 1
        super().commit(torch.full_like(counts, whole) if isinstance(counts, Tensor) else counts)


class SnapshotOfAnotherBlock(RecurrentState):
    def restore(self, row: int, snapshots: Any, length: int) -> int:
        reused = super().restore(row, snapshots, length)
        self.rows[row] = (self.nothing, *snapshots)[len(snapshots) // 2]
        return reused


if __name__ == "__main__":
    fault = globals()[sys.argv.pop(1)]

    def load(*args: Any, **more: Any) -> HybridModel:
        return HybridModel(load_target(*args, **more), (0, 1, 2, 4, 5), fault)

    server.load_target = load  # type: ignore[assignment]
    main()
