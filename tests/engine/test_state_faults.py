"""check against servers of a target with a recurrent state, in float32: its faults are named, honest ones pass.

TRTSPEC_HONEST_CHECKS (3) checks of honest servers, each with questions of its own.
"""

import contextlib
import os
import random
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.command_line import free_port, served, succeeded, trtspec
from tests.tiny import make_head, make_target
from trtspec.data_files import kimi_nano_dir

CHECKS = int(os.environ.get("TRTSPEC_HONEST_CHECKS", "3"))
FAULTS = (
    "WindowForgotten", "RejectedDraftsKept", "SnapshotOfAnotherBlock", "StateOfAnotherRow", "StateInBfloat16",
)  # fmt: skip
SMALL = ("--samples", 6, "--max-tokens", 32, "--context-tokens", 200)


@contextlib.contextmanager
def serving(memory: str, target: Path, *options: object) -> Iterator[str]:
    port = free_port()
    words = ("serve", target, "--backend", "reference", "--dtype", "float32", "--port", port)
    with served(
        port, sys.executable, "-m", "tests.engine.faulty_states", memory, *words, *options
    ) as (url, _):
        yield url


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_state_faults_are_named_and_honest_servers_pass(tmp_path: Path) -> None:
    target = make_target(tmp_path / "target")
    head = ("--head", make_head(tmp_path / "head", target, attention="mla", eagle="3.1"))
    for memory in ("RecurrentState", *FAULTS):
        with serving(memory, target, *head) as url:
            for turn in range(CHECKS if memory == "RecurrentState" else 1):
                recording = tmp_path / f"{memory} {turn}.jsonl"
                succeeded(
                    "check",
                    url,
                    *SMALL,
                    *questions(tmp_path, turn),
                    "--tokenizer",
                    target,
                    "--record",
                    recording,
                )
    judged = ("greedy", "sampled", "parameters")
    with serving("RecurrentState", target) as plain:
        for recording in sorted(tmp_path.glob("*.jsonl")):
            done = trtspec(
                "check", plain, "--score", recording, "--exact", "--tokenizer", target, "--json"
            )
            faults = {row["name"]: row["faults"] for row in done.json["results"] if row["faults"]}
            print(recording.stem, faults)
            honest = recording.stem.startswith("RecurrentState")
            assert not faults if honest else faults.keys() & judged


def questions(directory: Path, turn: int) -> tuple[str, Path]:
    path = directory / f"{turn}.ndjson"
    lines = (kimi_nano_dir() / "prompts_heldout.jsonl").read_text(encoding="utf-8").splitlines(True)
    path.write_text("".join(random.Random(turn).sample(lines, 60)), encoding="utf-8")
    return "--dataset", path
