"""Questions for checks of honest servers. Repeated checks with the same questions show one and the same draw of
rounding differences: 47 of them once passed where other questions failed."""

from __future__ import annotations

import os
from pathlib import Path

from trtspec.data_files import kimi_nano_dir

CHECKS = int(os.environ.get("TRTSPEC_HONEST_CHECKS", "20"))  # half of them with the head


def question_files(directory: Path) -> list[Path]:
    """For every two checks, held-out prompts of kimi-nano of all categories, 23 for 20 checks; none is in two files."""
    lines = (kimi_nano_dir() / "prompts_heldout.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    files = [directory / f"questions-{number}.jsonl" for number in range(max(1, CHECKS // 2))]
    for number, file in enumerate(files):
        file.write_text("".join(lines[number :: len(files)]), encoding="utf-8")
    return files
