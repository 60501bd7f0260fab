"""Commands that ask each question once send all of its first request, and say what of a set they leave out."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from tests.bench import cheats
from tests.bench.test_datasets import PNG, write
from tests.bench.test_prove import SETUP
from tests.command_line import trtspec
from trtspec.bench.battery import make_battery
from trtspec.bench.questions.datasets import Question, left_out, load_dataset
from trtspec.checkpoint.tokenizer import KimiTokenizer
from trtspec.checkpoint.writer import Journal
from trtspec.cli.inspect_run import _prompts
from trtspec.cli.prove_run import ProofRun, prepare
from trtspec.data_files import kimi_nano_dir
from trtspec.errors import UsageError

TURNS = {"question_id": 1, "category": "math", "turns": ["One?", "Two?"]}
STAR = {"index": 0, "question": "What is it?", "image": {"bytes": PNG, "path": "0.png"}, "category": "x"}
FUNCTION = {"name": "area", "description": "Area.", "parameters": {"type": "object", "properties": {}}}
COUNT = 16
OWN = {
    "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Area?"}],
    "tools": [{"type": "function", "function": FUNCTION}],
}


@pytest.fixture
def sets(tmp_path: Path) -> dict[str, str]:
    rows = {"mt-bench": TURNS, "mmstar": STAR, "own": OWN}
    files = {name: tmp_path / f"{name}{'.parquet' if name == 'mmstar' else '.jsonl'}" for name in rows}
    written = {name: write(files[name], [row] * COUNT) for name, row in rows.items()}
    return {name: str(file) if name == "own" else f"{name}={file}" for name, file in written.items()}


def questions(name: str) -> list[Question]:
    return list(load_dataset(name).questions)


def test_a_question_gives_its_first_request_whole(sets: dict[str, str]) -> None:
    found = {name: questions(words) for name, words in sets.items()}
    messages = {name: asked[0].first_request()[0] for name, asked in found.items()}
    assert [message["role"] for message in messages["own"]] == ["system", "user"]
    assert [part["type"] for part in messages["mmstar"][0]["content"]] == ["text", "image_url"]
    assert found["own"][0].first_request()[1][0]["function"]["name"] == "area"
    assert left_out(found["mt-bench"]) == "the requests after the first of 16 of 16 questions are not asked"
    assert "the tools of 16 of 16" in left_out(found["own"], tools=False) and not left_out(found["own"])
    for name, asked in found.items():
        battery = make_battery(asked, 16, [64], 1)
        assert battery.prompts[0].messages == messages[name] and "base64" not in str(battery.long)


@pytest.mark.slow
def test_check_says_what_it_does_not_ask(sets: dict[str, str], cheating: str, tmp_path: Path) -> None:
    for name, says in (("mt-bench", "the requests after the first of 2 of 2"), ("own", "the tools of 2 of 2")):
        out = tmp_path / f"{name}.json"
        words = ("--dataset", sets[name], "--contexts", "0", "--samples", 2, "--record", out, "--json")
        done = trtspec("check", cheats.at(cheating, "plain"), *words)
        assert says in done.stderr and done.status in (0, 3) and len(json.loads(out.read_text())["transcripts"]) > 2


def test_the_proof_makes_prompts_of_every_set_and_says_what_they_lack(
    sets: dict[str, str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    for name in ("mt-bench", "mmstar"):
        with Journal(tmp_path / name / "journal.jsonl", {}) as journal:
            prepare(ProofRun(replace(SETUP, dataset=sets[name]), tmp_path / name, 1.0, journal), False)
        row = json.loads((tmp_path / name / "work" / "warm.jsonl").read_text().splitlines()[0])
        assert row["prompt"].endswith("One?" if name == "mt-bench" else "What is it?")
    said = capfd.readouterr().err
    assert "the requests after the first of 16 of 16" in said and "the pictures of 16 of 16" in said


def test_a_head_is_run_on_the_tools_of_a_question_and_not_on_pictures(
    sets: dict[str, str], capfd: pytest.CaptureFixture[str]
) -> None:
    tokenizer = KimiTokenizer(kimi_nano_dir())
    names, rendered = _prompts(tokenizer, sets["own"], COUNT, 0)
    assert len(names) == COUNT and all("Area." in tokenizer.decode(ids) for ids in rendered)
    with pytest.raises(UsageError, match="have pictures"):
        _prompts(tokenizer, sets["mmstar"], COUNT, 0)
