"""Datasets that somebody else wrote: each line is a question, or an error that names the line."""

from __future__ import annotations

from pathlib import Path

import pytest

from trtspec.bench.datasets import DatasetChoice, load_dataset
from trtspec.errors import UsageError


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ('{"turns": ""}', "has turns that are no list"),
        ('{"turns": 3}', "has turns that are no list"),
        ('{"turns": []}', "has turns that are no list, or an empty one"),
        ('{"turns": [null]}', "has an empty or non-text prompt"),
        ('{"messages": {"role": "user"}}', "has messages that are no list"),
        ('{"messages": ["hello"]}', "has a message that is no object"),
        ('{"messages": [{"role": "system"}]}', "role system without content"),
        ('{"messages": [{"role": "system", "content": "x"}]}', "has no user message"),
        ('{"messages": [{"role": "user", "content": ""}]}', "has an empty or non-text prompt"),
        ('{"messages": [{"role": "user", "content": "x"}, {"role": "tool", "content": "y"}]}', "ends in a message"),
        ('{"prompt": "x", "tools": [{}]}', "has a tool without function.name"),
        ('{"text": "x"}', "has no user message"),
        ('{"prompt": [1, 2]}', "gives token ids"),
    ],
)
def test_a_line_that_is_no_prompt_is_refused(tmp_path: Path, line: str, says: str) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text(f'{{"prompt": "Why?"}}\n{line}\n')
    with pytest.raises(UsageError, match=says):
        load_dataset(str(file))


@pytest.mark.parametrize("name", ["nano", "{file}", "{directory}", "gsm8k={file}", "bfcl"])
def test_a_split_of_what_has_none_is_refused(tmp_path: Path, name: str) -> None:
    file = tmp_path / "test.jsonl"
    file.write_text('{"prompt": "Why?", "question": "Why?", "answer": "4"}\n')
    source = name.format(file=file, directory=tmp_path)
    with pytest.raises(UsageError, match=r"--split train is not used: the data set .* is "):
        load_dataset(source, choice=DatasetChoice(split="train"))
