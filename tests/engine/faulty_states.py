"""The reference server of a target with a recurrent state and a fault in it (`honest`: none).

`python -m tests.engine.faulty_states FAULT serve ...` runs it.
"""

import sys
from typing import Any

from torch import Tensor

from tests.bench.check.faulty_engine import Patch, wrap
from tests.recurrent import DeltaAttention, HybridModel, HybridState
from trtspec.cli.app import main
from trtspec.engine import server


def honest() -> None:
    pass


def window_forgotten() -> None:
    @wrap(DeltaAttention, "run")
    def _(exact: Patch, self: Any, x: Tensor, window: Tensor, state: Tensor) -> Any:
        return exact(self, x, window * 0, state)


def state_of_another_row() -> None:
    @wrap(DeltaAttention, "run")
    def _(exact: Patch, self: Any, x: Tensor, window: Tensor, state: Tensor) -> Any:
        return exact(self, x, window, state.roll(1, 0))


def state_in_bfloat16() -> None:
    @wrap(DeltaAttention, "run")
    def _(exact: Patch, self: Any, x: Tensor, window: Tensor, state: Tensor) -> Any:
        return exact(self, x, window, state.bfloat16().to(state.dtype))


def rejected_drafts_kept() -> None:
    @wrap(HybridState, "commit")
    def _(exact: Patch, self: HybridState, counts: Any) -> None:
        exact(self, counts * 0 + 99 if isinstance(counts, Tensor) else counts)


def snapshot_of_another_block() -> None:
    @wrap(HybridState, "restore")
    def _(exact: Patch, self: HybridState, row: int, snapshots: Any, length: int) -> int:
        reused = exact(self, row, snapshots, length)
        if reused:
            self.rows[row] = snapshots[0][:2]
        return reused


if __name__ == "__main__":
    globals()[sys.argv.pop(1)]()
    load_target = server.load_target
    server.load_target = lambda *args, **more: HybridModel(load_target(*args, **more))
    main()
