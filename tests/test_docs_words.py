"""Budgets of the pages: words by page and in all, length of sentences.

`python -m tools.pages` prints them.
"""

from pathlib import Path

import pytest

from tools.pages import WRITTEN, commands, count_words, long_sentences, name, words_allowed

ALL_WORDS, LONGEST, LONG_SENTENCES = 30_000, 45, 60


@pytest.mark.parametrize("page", WRITTEN, ids=name)
def test_words_of_the_page(page: Path) -> None:
    assert count_words(page) <= words_allowed(page)


def test_words_in_all() -> None:
    assert sum(map(count_words, WRITTEN)) <= ALL_WORDS


def test_sentences_are_short() -> None:
    found = [sentence for page in WRITTEN for sentence in long_sentences(page)]
    assert not [one for one in found if one.words > LONGEST]
    assert len(found) < LONG_SENTENCES


def test_command_pages_show_output() -> None:
    """Captured output, which test_docs_commands.py or test_docs_run.py compares."""
    pages = [page for page in WRITTEN if page.parent.name == "commands"]
    assert not [page.stem for page in pages if not any(command.shown for command in commands(page))]
