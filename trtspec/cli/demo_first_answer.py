"""The demo's first stage: one streamed answer without and with speculation, side by side."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

from trtspec.client.client import Answer, RequestSampling, chat_body, new_client, stream_answer
from trtspec.data_files import kimi_nano_dir
from trtspec.errors import TrtspecError

KIND = "story"  # long enough to watch
TOKENS = 160
TITLES = ("without speculation", "with Eagle3")
REFRESH = 12  # drawings a second


def question() -> list[dict[str, Any]]:
    """The messages that are asked: the first held-out prompt of KIND."""
    with (kimi_nano_dir() / "prompts_heldout.jsonl").open(encoding="utf-8") as lines:
        rows = map(json.loads, lines)
        return next(row["messages"] for row in rows if row["category"] == KIND)


def answers(plain_url: str, eagle_url: str, quiet: bool) -> list[Answer]:
    """Asks both servers the same question, greedily, one after the other, and draws the answers beside each other
    while they arrive. Raises TrtspecError when a server fails."""
    from rich.console import Console
    from rich.live import Live

    console, messages = Console(file=sys.stdout, quiet=quiet), question()
    console.print(f"\n{messages[-1]['content']}\n", markup=False, highlight=False, style="dim")
    found: list[Answer] = []
    # on anything but a terminal, rich draws once at the end
    with Live(console=console, refresh_per_second=REFRESH) as live:
        for url in (plain_url, eagle_url):

            def draw(so_far: Answer) -> None:
                live.update(panels([*found, so_far]))

            found.append(asyncio.run(_ask(url, messages, draw)))
    if not console.is_terminal:
        console.line()
    return found


async def _ask(url: str, messages: list[dict[str, Any]], draw: Any) -> Answer:
    async with new_client(url, 1, headers={}) as client:
        body = chat_body("kimi-nano", messages, RequestSampling(TOKENS), 0)
        found = await stream_answer(client, body, "first", "demo", limit_s=120, on_event=draw)
    if found.error:
        raise TrtspecError(f"{url} stopped answering: {found.error}", "see its log in the demo's directory")
    return found


def decode_rate(answer: Answer) -> float | None:
    """Tokens a second after the first one; None while there is none."""
    spent = answer.chunks[-1][0] - answer.chunks[0][0] if answer.chunks else 0.0
    return (answer.completion_tokens - 1) / spent if spent else None


def figures(answer: Answer) -> str:
    tokens, rate = answer.completion_tokens, decode_rate(answer)
    if rate is None:
        return f"{tokens} tokens"
    # passes of the target after the prompt's
    steps = (answer.spec_decode or {}).get("steps")
    passes = f", {(tokens - 1) / steps:.2f} tokens per pass" if steps else ""
    return f"{rate:.0f} tokens/s{passes}"


def verdict(pair: list[Answer]) -> str:
    """How much faster, and whether the text is the same."""
    (plain, eagle), rates = pair, [decode_rate(answer) for answer in pair]
    same = "the same text" if plain.text == eagle.text else "DIFFERENT text, which the proof judges"
    if not rates[0] or not rates[1]:
        return f"{figures(plain)}; {figures(eagle)}; {same}"
    return f"{rates[0]:.0f} and {rates[1]:.0f} tokens/s: {same}, {rates[1] / rates[0]:.1f} times as fast"


def panels(so_far: list[Answer]) -> Any:
    from rich.panel import Panel
    from rich.table import Table
    from rich.text import Text

    grid = Table.grid(expand=True)
    for _ in TITLES:
        grid.add_column(ratio=1)
    cells = list[Panel]()
    for title, answer in zip(TITLES, so_far, strict=False):
        cells.append(Panel(Text(answer.text), title=title, title_align="left", subtitle=figures(answer)))
    grid.add_row(*cells)
    return grid
