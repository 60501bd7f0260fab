"""Makes the sample report and the pictures of README and site, in about five minutes:

    TRTSPEC_CHROMIUM=/usr/bin/chromium PYTHONPATH=. python tools/samples.py

Everything shown is the output of the commands named beside it, run here on kimi-nano and its shipped head. The report
is the one that `trtspec bench` writes.
"""

from __future__ import annotations

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

from trtspec import data_files
from trtspec.cli import demo_first_answer as first_answer
from trtspec.cli.demo_process import Chain

SAMPLES = Path(__file__).resolve().parent.parent / "docs" / "samples"
WIDTH = 104
FIRST_PORT = 18611
DRAFT = ("--draft-len", "3")
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
    return Console(width=WIDTH, record=True, file=io.StringIO(), force_terminal=True, highlight=False)


def save(console: Console, name: str, title: str) -> None:
    svg = console.export_svg(title=title, theme=MONOKAI, unique_id=name)
    text = FONT.sub("", svg).replace("Fira Code", "ui-monospace, Menlo, Consolas")
    (SAMPLES / f"{name}.svg").write_text(text, encoding="utf-8")


def picture_of_first_answer(plain: str, eagle: str) -> None:
    """The demo's first stage, once both answers are complete."""
    found = first_answer.answers(plain, eagle, quiet=True)
    console = recorder()
    console.print(first_answer.panels([first_answer.StreamedAnswer(**answer) for answer in found["answers"]]))
    console.print(Text(first_answer.verdict(found)))
    save(console, "first-answer", "make demo: the first answer")


def picture_of_lint(directory: Path) -> None:
    (directory / "engine.yml").write_text(MISTAKEN, encoding="utf-8")
    command = ["lint", "engine.yml", "--target", "nvidia/Kimi-K2.5-NVFP4"]
    environment = {**os.environ, "FORCE_COLOR": "1", "COLUMNS": str(WIDTH), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "trtspec", *command], cwd=directory, env=environment, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
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
        browser.visit((SAMPLES / "bench-report.html").as_uri())
        browser.screenshot(SAMPLES / "bench-report.png")


def main() -> None:
    SAMPLES.mkdir(exist_ok=True)
    target, head = str(data_files.kimi_nano_dir()), str(data_files.kimi_nano_head_dir())
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        (directory / "logs").mkdir()
        picture_of_lint(directory)
        chain = Chain(directory, 1)
        serve = [target, "--backend", "reference"]
        sampled = ["--draft-sampling", "probabilistic"]  # drafts from the head's distribution, as the report says
        with (
            chain.server("plain", serve, FIRST_PORT) as plain,
            chain.server("eagle3", [*serve, "--head", head, *DRAFT, *sampled], FIRST_PORT + 1) as eagle,
        ):
            picture_of_first_answer(plain, eagle)
            # text sampled at temperature 1 does not loop; greedy answers of a model this small often do
            command = ["bench", f"eagle3={eagle}", "--against-url", f"plain={plain}", "--temperature", "1"]
            command += ["--concurrency", "1,4", "--samples", "12,24", "--max-tokens", "96"]
            command += ["-o", str(directory / "run")]
            chain.run(command, "bench", 120, allowed=(0, 3))
        shutil.copyfile(directory / "run" / "report.html", SAMPLES / "bench-report.html")
    picture_of_report(os.environ["TRTSPEC_CHROMIUM"])
    for path in sorted(SAMPLES.iterdir()):
        print(f"{path}: {path.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    main()
