"""A tiny target with answers to train on, shared by the tests of this room."""

import json
import random
from pathlib import Path

import pytest
import torch

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
    path = tmp_path_factory.mktemp("data") / "answers.jsonl"
    rows = []
    for number in range(40):
        question, answer = (
            " ".join(shuffle.choices(WORDS, k=shuffle.randint(3, 9))) for _ in range(2)
        )
        turns = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        rows.append(
            {"conversation_id": f"c{number}", "category": "ab"[number % 2], "conversations": turns}
        )
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


@pytest.fixture(scope="session")
def target(target_dir):
    return load_target(target_dir, dtype=torch.float32)
