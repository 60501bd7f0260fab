"""The demo's first stage: one streamed answer without and with speculation, side by side."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from trtspec.client.client import Answer, RequestSampling, chat_body, new_client, stream_answer
from trtspec.errors import TrtspecError

KIND = "story"  # long enough to watch
TOKENS = 160
REFRESH = 12  # drawings a second


@dataclass
class StreamedAnswer:
    """One answer as it arrives. `steps` are passes of the target after the prompt's."""

    title: str
    text: str = ""
    tokens: int = 0
    steps: int | None = None
    decode_rate: float | None = None  # tokens a second after the first one

    def take(self, so_far: Answer) -> None:
        self.text, self.tokens = so_far.text, so_far.completion_tokens
        self.steps = (so_far.spec_decode or {}).get("steps") or self.steps
        spent = so_far.chunks[-1][0] - so_far.chunks[0][0] if so_far.chunks else 0.0
        self.decode_rate = (self.tokens - 1) / spent if spent and self.tokens > 1 else None

    @property
    def figures(self) -> str:
        if self.decode_rate is None:
            return f"{self.tokens} tokens"
        passes = f", {(self.tokens - 1) / self.steps:.2f} tokens per pass" if self.steps else ""
        return f"{self.tokens} tokens, {self.decode_rate:.0f} tokens/s{passes}"


def question() -> dict[str, Any]:
    """The held-out prompt that is asked: the first of its kind."""
    from trtspec.data_files import kimi_nano_dir

    with (kimi_nano_dir() / "prompts_heldout.jsonl").open(encoding="utf-8") as lines:
        rows = [json.loads(line) for line in lines]
    return next((row for row in rows if row["category"] == KIND), rows[0])


def answers(plain_url: str, eagle_url: str, quiet: bool) -> list[StreamedAnswer]:
    """Asks both servers the same question, greedily, one after the other, and shows the text as it arrives. Raises
    TrtspecError when a server fails."""
    messages = question()["messages"]
    pair = [StreamedAnswer("without speculation"), StreamedAnswer("with Eagle3")]
    with _shown(pair, str(messages[-1]["content"]), quiet) as refresh:
        for answer, url in zip(pair, (plain_url, eagle_url), strict=True):
            asyncio.run(_ask(answer, url, messages, refresh))
    return pair


def verdict(pair: list[StreamedAnswer]) -> str:
    """How much faster, and whether the text is the same."""
    plain, eagle = pair
    same = "the same text" if plain.text == eagle.text else "DIFFERENT text, which the proof judges"
    if not plain.decode_rate or not eagle.decode_rate:
        return f"{plain.figures}; {eagle.figures}; {same}"
    faster = eagle.decode_rate / plain.decode_rate
    return f"{plain.decode_rate:.0f} and {eagle.decode_rate:.0f} tokens/s: {same}, {faster:.1f} times as fast"


async def _ask(answer: StreamedAnswer, url: str, messages: list[dict[str, Any]], refresh: Callable[[], None]) -> None:
    """Fills `answer`, and refreshes after every event. Raises TrtspecError when the server fails."""

    def take(so_far: Answer) -> None:
        answer.take(so_far)
        refresh()

    async with new_client(url, 1, headers={}) as client:
        body = chat_body("kimi-nano", messages, RequestSampling(TOKENS), 0)
        found = await stream_answer(client, body, "first", "demo", limit_s=120, on_event=take)
    if found.error:
        raise TrtspecError(f"{url} stopped answering: {found.error}", "see its log in the demo's directory")


@contextmanager
def _shown(pair: list[StreamedAnswer], prompt: str, quiet: bool) -> Iterator[Callable[[], None]]:
    """Draws the two answers beside each other while they arrive; on anything but a terminal, once at the end."""
    from rich.console import Console
    from rich.live import Live

    console = Console(file=sys.stdout)
    if quiet:
        yield lambda: None
        return
    console.print(f"\n{prompt}\n", markup=False, highlight=False, style="dim")
    if not console.is_terminal:
        yield lambda: None
        for answer in pair:
            console.print(f"--- {answer.title}: {answer.figures}\n{answer.text}", markup=False, highlight=False)
        return
    with Live(console=console, refresh_per_second=REFRESH, transient=False) as live:
        yield lambda: live.update(panels(pair))


def panels(pair: list[StreamedAnswer]) -> Any:
    from rich.panel import Panel
    from rich.table import Table
    from rich.text import Text

    grid = Table.grid(expand=True)
    for _ in pair:
        grid.add_column(ratio=1)
    sides = {"title_align": "left", "subtitle_align": "left"}
    grid.add_row(*(Panel(Text(a.text), title=a.title, subtitle=a.figures, **sides) for a in pair))  # type: ignore[arg-type]
    return grid
