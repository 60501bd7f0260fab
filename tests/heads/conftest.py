"""A tiny target with answers to train on, shared by the tests of this room."""

import random
from pathlib import Path

import pytest
import torch

from tests.json_files import write_lines
from trtspec.models.weights import load_target

WORDS = [
    "the",
    "quick",
    "brown",
    "fox",
    "jumps",
    "over",
    "a",
    "lazy",
    "dog",
    "while",
    "def",
    "return",
    "import",
]


@pytest.fixture(scope="session")
def data(tmp_path_factory) -> Path:
    """40 short conversations in ModelOpt's format, two categories."""
    shuffle = random.Random(0)
    rows = []
    for number in range(40):
        question, answer = (
            " ".join(shuffle.choices(WORDS, k=shuffle.randint(3, 9))) for _ in range(2)
        )
        turns = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        rows.append(
            {"conversation_id": f"c{number}", "category": "ab"[number % 2], "conversations": turns}
        )
    return write_lines(tmp_path_factory.mktemp("data") / "answers.jsonl", rows)


@pytest.fixture(scope="session")
def target(target_dir):
    return load_target(target_dir, dtype=torch.float32)
