"""check names faults of a recurrent state in float32, and passes honest servers.

TRTSPEC_HONEST_CHECKS (3) checks of an honest server, each with questions of its own.
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
    "window_forgotten",
    "rejected_drafts_kept",
    "snapshot_of_another_block",
    "state_of_another_row",
    "state_in_bfloat16",
)
SMALL = ("--samples", 8, "--max-tokens", 64, "--context-tokens", 256)


@contextlib.contextmanager
def serving(fault: str, target: Path, *options: object) -> Iterator[str]:
    port = free_port()
    words = ("serve", target, "--backend", "reference", "--dtype", "float32", "--port", port)
    command = (sys.executable, "-m", "tests.engine.faulty_states", fault, *words, *options)
    with served(port, *command) as (url, _):
        yield url


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_state_faults_are_named_and_honest_servers_pass(tmp_path: Path) -> None:
    target, questions = make_target(tmp_path / "target"), tmp_path / "questions.ndjson"
    head = make_head(tmp_path / "head", target, attention="mla", eagle="3.1")
    lines = (kimi_nano_dir() / "prompts_heldout.jsonl").read_text().splitlines(keepends=True)
    for fault in ("honest", *FAULTS):
        with serving(fault, target, "--head", head) as url:
            for turn in range(CHECKS if fault == "honest" else 1):
                questions.write_text("".join(random.Random(turn).sample(lines, 60)))
                asked = ("--dataset", questions, "--tokenizer", target, *SMALL)
                succeeded("check", url, *asked, "--record", tmp_path / f"{fault} {turn}.jsonl")
    with serving("honest", target) as plain:
        for recording in sorted(tmp_path.glob("*.jsonl")):
            words = ("--score", recording, "--exact", "--tokenizer", target, "--json")
            verdict = trtspec("check", plain, *words).json
            faults = {row["name"]: row["faults"] for row in verdict["results"] if row["faults"]}
            print(recording.stem, verdict["verdict"], faults)
            if recording.stem.startswith("honest"):
                assert faults == {}
            else:
                assert faults.keys() & {"greedy", "sampled", "parameters"}
