"""The page about the engine shows the code that runs."""

from __future__ import annotations

import inspect
import textwrap
from pathlib import Path

from trtspec.engine.engine import Engine

PAGE = Path(__file__).parents[2] / "docs" / "reference-engine.md"


def test_the_page_shows_the_round_as_it_is() -> None:
    source = textwrap.dedent(inspect.getsource(Engine._round)).rstrip()
    assert f"```python\n{source}\n```" in PAGE.read_text(encoding="utf-8")
    assert len(source.splitlines()) <= 40, "one screen"
