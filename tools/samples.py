"""Makes the sample report and the pictures of README and site, in about five minutes:

    TRTSPEC_CHROMIUM=/usr/bin/chromium PYTHONPATH=. python tools/samples.py

Everything shown is the output of the commands named beside it, run here on kimi-nano and its
shipped head. The report is the page that `trtspec prove` writes.
"""

from __future__ import annotations

import asyncio
import io
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.terminal_theme import MONOKAI
from rich.text import Text

from trtspec.cli import demo
from trtspec.launch.processes import served

SAMPLES = Path(__file__).resolve().parent.parent / "docs" / "samples"
WIDTH = 104
FIRST_PORT = 18611
PROOF = ("--backend", "reference", "--samples", "32", "--max-tokens", "96", "--concurrency", "1,4")
# a key of another engine, and sampling that this release would not do
MISTAKEN = """\
max_batch_size: 32
max_seq_len: 4096
moe_config:
  backend: TRTLLM
kv_cache_config:
  dtype: fp8
  enable_block_reuse: false
speculative_config:
  decoding_type: Eagle
  max_draft_length: 3
  speculative_model: nvidia/Kimi-K2.5-Eagle3
"""
# rich's own template without the font that it fetches from another site
FONT = re.compile(r"@font-face \{.*?\}\s*", re.DOTALL)


def recorder() -> Console:
    return Console(
        width=WIDTH, record=True, file=io.StringIO(), force_terminal=True, highlight=False
    )


def save(console: Console, name: str, title: str) -> None:
    svg = console.export_svg(title=title, theme=MONOKAI, unique_id=name)
    text = FONT.sub("", svg).replace("Fira Code", "ui-monospace, Menlo, Consolas")
    (SAMPLES / f"{name}.svg").write_text(text, encoding="utf-8")


def picture_of_first_answer(plain: str, eagle: str) -> None:
    """The demo's first stage, once both answers are complete."""
    found = [asyncio.run(demo.ask(url, lambda text: None)) for url in (plain, eagle)]
    console = recorder()
    lines = [demo.QUESTION, *(answer.text for answer in found), demo.verdict(*found)]
    console.print(Text("\n\n".join(lines)))
    save(console, "first-answer", "make demo: the first answer")


def picture_of_lint(directory: Path) -> None:
    (directory / "engine.yml").write_text(MISTAKEN, encoding="utf-8")
    command = ["lint", "engine.yml", "--target", "nvidia/Kimi-K2.5-NVFP4"]
    environment = {**os.environ, "FORCE_COLOR": "1", "COLUMNS": str(WIDTH), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "trtspec", *command],
        cwd=directory,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    shown = f"$ trtspec {shlex.join(command)}"
    console = recorder()
    console.print(Text(shown, style="bold"))
    console.print(Text.from_ansi(done.stdout.rstrip() + "\n" + done.stderr.rstrip()))
    save(console, "lint", "trtspec lint")


def picture_of_report(chromium: str) -> None:
    """The top of the report, as on a desktop."""
    from tools.browser import Browser

    with Browser(chromium) as browser:
        browser.screen(1120, 900)
        browser.visit((SAMPLES / "report.html").as_uri())
        browser.screenshot(SAMPLES / "report.png")


def main() -> None:
    SAMPLES.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        picture_of_lint(directory)
        urls = [f"http://127.0.0.1:{FIRST_PORT + offset}" for offset in (0, 1)]
        nano = ("serve", "kimi-nano", "--backend", "reference", "--port")
        head = ("--head", "kimi-nano-eagle3")
        with (
            served((*nano, str(FIRST_PORT)), urls[0], directory / "plain.log", 180),
            served((*nano, str(FIRST_PORT + 1), *head), urls[1], directory / "eagle3.log", 180),
        ):
            picture_of_first_answer(*urls)
        words = (
            "prove",
            "kimi-nano",
            *head,
            *PROOF,
            "-o",
            str(directory / "proof"),
        )
        subprocess.run([sys.executable, "-m", "trtspec", *words], check=True)
        shutil.copyfile(directory / "proof" / "report.html", SAMPLES / "report.html")
    picture_of_report(os.environ["TRTSPEC_CHROMIUM"])


if __name__ == "__main__":
    main()
