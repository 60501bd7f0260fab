"""Recorded requests of both APIs against the reference server, sound and with planted causes of low acceptance."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.bench.conftest import measured
from tests.bench.test_reference import counters
from tests.command_line import free_port, served
from trtspec import data_files
from trtspec.bench.results import BY_LENGTH, BY_REUSE, SliceResult

PLANTED = Path(__file__).with_name("planted.py")
pytestmark = pytest.mark.slow


def bodies(count: int) -> list[dict[str, Any]]:
    """Chat requests, every second one behind a system prompt that all of these share, and texts."""
    rows = (data_files.kimi_nano_dir() / "prompts_heldout.jsonl").read_text().splitlines()
    asked = [json.loads(row)["messages"][0]["content"] for row in rows]
    asked = [text for text in asked if isinstance(text, str)]
    shared = [{"role": "system", "content": "\n".join(asked[-60:])}]
    requests = []
    for index, text in enumerate(asked[:count]):
        chat = {"messages": [*shared[: index % 2], {"role": "user", "content": text}]}
        requests.append({**chat, "max_completion_tokens": 40, "temperature": 0})
        if index % 4 == 0:
            requests.append({"prompt": text, "max_tokens": 30, "temperature": 0.5, "seed": index})
    return [{"model": "recorded", **request} for request in requests]


@pytest.mark.parametrize("cause", ["none", "blind prefix", "shifted layers"])
def test_the_tables_equal_the_counters_and_show_the_cause(tmp_path: Path, cause: str) -> None:
    recorded = tmp_path / "bodies.jsonl"
    recorded.write_text("".join(json.dumps(body) + "\n" for body in bodies(64)))
    port = free_port()
    with served(port, sys.executable, PLANTED, cause, port) as (url, _):
        before = counters(url)
        results = measured({"e": url}, recorded, warmup=0)
        after = counters(url)
    parts: dict[str, dict[int, SliceResult]] = {}
    for part in results.slices:
        parts.setdefault(part.by, {})[part.value] = part
        print(part.by, part.value, part.answers, part.steps, part.acceptance_length)
    names = {"steps": "steps", "drafted": "draft_tokens", "accepted": "accepted_tokens"}
    for table in parts.values():
        for figure, name in names.items():
            counter = f"spec_decode_{name}"
            told = sum(getattr(part, figure) for part in table.values())
            assert told == after[counter] - before[counter], figure
    assert len(parts[BY_LENGTH]) >= 2
    fresh, reused = (parts[BY_REUSE][value].acceptance_length for value in (0, 75))
    print(cause, fresh, reused)
