"""The reference server of a target with a recurrent state, whose memory is of a class with a fault, or of
HybridState: python -m tests.engine.faulty_states CLASS serve ..."""

import sys
from typing import Any

import torch
from torch import Tensor

from tests.recurrent import RECURRENT, HybridModel, HybridState, Record
from trtspec.cli.app import main
from trtspec.engine import server

load_target = server.load_target


class WindowForgotten(HybridState):
    def remembered(self, *args: Any) -> Record:
        window, state = super().remembered(*args)
        return Record(window * 0, state)


class StateOfAnotherRow(HybridState):
    def remembered(self, *args: Any) -> Record:
        window, state = super().remembered(*args)
        return Record(window, state.roll(1, 0))


class StateInBfloat16(HybridState):
    def remembered(self, *args: Any) -> Record:
        window, state = super().remembered(*args)
        return Record(window, state.bfloat16().to(state.dtype))


class RejectedDraftsKept(HybridState):
    def commit(self, counts: Any) -> None:
        whole = self.call[RECURRENT[0]][0].states.shape[1] - 1
        super().commit(torch.full_like(counts, whole) if isinstance(counts, Tensor) else counts)


class SnapshotOfAnotherBlock(HybridState):
    def restore(self, row: int, snapshots: Any, length: int) -> int:
        reused = super().restore(row, snapshots, length)
        self.rows[row] = (self.nothing, *snapshots)[len(snapshots) // 2][:2]
        return reused


if __name__ == "__main__":
    fault = globals()[sys.argv.pop(1)]

    def load(*args: Any, **more: Any) -> HybridModel:
        return HybridModel(load_target(*args, **more), fault)

    server.load_target = load  # type: ignore[assignment]
    main()
