"""The demo's first stage: one streamed answer without and with speculation, side by side."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

from trtspec.errors import TrtspecError

QUESTION = "completion:idlelib/format.py:untabify_region_event:334"  # a held-out one whose greedy answer does not loop
TOKENS = 96
REFRESH = 12  # drawings a second


@dataclass
class StreamedAnswer:
    """One answer as it arrives. Seconds count from the request; `steps` are passes of the target after the prompt's."""

    title: str
    text: str = ""
    tokens: int = 0
    steps: int | None = None
    first_token: float | None = None
    seconds: float = 0.0

    @property
    def decode_rate(self) -> float | None:
        """Tokens a second after the first one."""
        spent = self.seconds - (self.first_token or 0)
        return (self.tokens - 1) / spent if self.first_token is not None and self.tokens > 1 and spent > 0 else None

    @property
    def figures(self) -> str:
        if self.decode_rate is None:
            return f"{self.tokens} tokens"
        parts = [f"{self.tokens} tokens, {self.decode_rate:.0f} tokens/s"]
        if self.steps:
            parts.append(f"{(self.tokens - 1) / self.steps:.2f} tokens per pass")
        return ", ".join(parts)

    def line(self) -> str:
        return f"{self.title}: {self.figures}"


def question() -> dict[str, Any]:
    """The held-out prompt that is asked: id and messages."""
    from trtspec import data_files

    with (data_files.kimi_nano_dir() / "prompts_heldout.jsonl").open(encoding="utf-8") as lines:
        return next(row for row in map(json.loads, lines) if row["id"] == QUESTION)


def answers(plain_url: str, eagle_url: str, quiet: bool) -> dict[str, Any]:
    """Asks both servers the same question, greedily, one after the other, and shows the text as it arrives.

    Returns {question, answers, same_text}. Raises TrtspecError when a server fails.
    """
    asked = question()
    pair = [StreamedAnswer("without speculation"), StreamedAnswer("with Eagle3")]
    prompt = str(asked["messages"][-1]["content"])
    with _shown(pair, prompt, quiet) as refresh:
        for answer, url in zip(pair, (plain_url, eagle_url), strict=True):
            asyncio.run(_ask(answer, url, asked["messages"], refresh))
    found = [asdict(answer) for answer in pair]
    return {"question": prompt, "answers": found, "same_text": pair[0].text == pair[1].text}


def verdict(found: dict[str, Any]) -> str:
    """One line for the terminal: how much faster, and whether the text is the same."""
    plain, eagle = (StreamedAnswer(**answer) for answer in found["answers"])
    same = "the same text" if found["same_text"] else "DIFFERENT text, which check below judges"
    if not plain.decode_rate or not eagle.decode_rate:
        return f"{plain.line()}; {eagle.line()}; {same}"
    return f"{plain.line()}\n    {eagle.line()}\n    {same}, {eagle.decode_rate / plain.decode_rate:.1f} times as fast"


async def _ask(answer: StreamedAnswer, url: str, messages: list[dict[str, Any]], refresh: Callable[[], None]) -> None:
    """Fills `answer`, and refreshes after every event. Raises TrtspecError when the server fails."""
    from trtspec.client.client import Answer, Endpoint, RequestSampling, new_client, request_body, stream_answer

    def take(so_far: Answer) -> None:
        if so_far.chunks:
            answer.first_token = so_far.chunks[0][0] - so_far.started
            answer.seconds = so_far.chunks[-1][0] - so_far.started
        answer.text, answer.tokens = so_far.text, so_far.completion_tokens
        answer.steps = (so_far.spec_decode or {}).get("steps") or answer.steps
        refresh()

    endpoint = Endpoint(url, "kimi-nano", limit_s=120)
    async with new_client(url, 1, headers={}) as client:
        body = request_body(endpoint, messages, RequestSampling(TOKENS), 0)
        found = await stream_answer(client, endpoint, body, QUESTION, "demo", 0, take)
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
            console.print(f"--- {answer.line()}\n{answer.text}", markup=False, highlight=False, soft_wrap=True)
        return
    with Live(console=console, refresh_per_second=REFRESH, transient=False) as live:
        yield lambda: live.update(panels(pair))


def panels(pair: list[StreamedAnswer]) -> Any:
    from rich.table import Table

    grid = Table.grid(expand=True)
    for _ in pair:
        grid.add_column(ratio=1)
    grid.add_row(*(_panel(answer) for answer in pair))
    return grid


def _panel(answer: StreamedAnswer) -> Any:
    """The name above, the figures below: each fits half a terminal."""
    from rich.panel import Panel
    from rich.text import Text

    return Panel(
        Text(answer.text), title=answer.title, title_align="left", subtitle=answer.figures, subtitle_align="left"
    )
