"""The demo empties its own directory only, asks a readable question and runs to its end."""

import contextlib
import random
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from tests.command_line import process
from tests.json_files import read_json
from trtspec.cli.demo import STAGES, prepare, verdict
from trtspec.client.client import Answer
from trtspec.errors import TrtspecError, UsageError
from trtspec.launch.processes import require_free_ports


def test_the_first_answer_says_how_much_faster_and_whether_the_text_is_the_same() -> None:
    plain = Answer("first", "demo", 0, 0.0, 4.0, text="a b c", completion_tokens=96)
    eagle = replace(plain, finished=2.0)
    assert verdict(plain, eagle) == "24 and 48 tokens/s: the same text, 2.0 times as fast"
    assert "DIFFERENT" in verdict(plain, replace(eagle, text="a b d"))


def test_only_a_demo_directory_is_ever_emptied(tmp_path: Path) -> None:
    mine = tmp_path / "thesis"
    mine.mkdir()
    (mine / "chapter.txt").write_text("dear to me")
    with pytest.raises(UsageError):
        prepare(mine, force=False)
    (mine / "logs").mkdir()
    with pytest.raises(UsageError, match=r"chapter.txt, which a demo did not write"):
        prepare(mine, force=True)
    assert (mine / "chapter.txt").exists()
    fresh = tmp_path / "demo"
    prepare(fresh, force=False)
    (fresh / "report.html").write_text("x")
    with pytest.raises(UsageError):
        prepare(fresh, force=False)
    prepare(fresh, force=True)
    assert not (fresh / "report.html").exists() and (fresh / "logs").is_dir()


def lasting_ports() -> int:
    """The first of ports that the system gives to no outgoing connection minutes later."""
    for first in range(20000 + random.randrange(5000), 32000, 2):
        with contextlib.suppress(TrtspecError):
            require_free_ports(first, 2)
            return first
    raise AssertionError("no ports are free")


@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_the_demo_runs_through(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Every stage in order, to a page whose sentence is the proof's; nothing is left running."""
    out = tmp_path / "demo"
    done = process("demo", "-o", out, "--port", lasting_ports(), HF_HUB_OFFLINE="1")
    assert done.status == 0, done
    for stage in range(1, STAGES + 1):
        assert f"[{stage}/{STAGES}]" in done.stdout
    evidence = read_json(out / "proof" / "evidence.json")
    page = (out / "report.html").read_text()
    assert (
        evidence["verdict"] == "SAFE"
        and evidence["sentence"] in page
        and evidence["sentence"] in done.stdout
    )
    assert evidence["setup"]["head"] == "kimi-nano-eagle3"
    assert "Second result: the head that this demo trained" in page and "fresh-head: " in page
    assert all(
        f"trtspec {name}" in page
        for name in ("quantize", "synthesize", "train", "prove", "build-config", "lint")
    )
    left = [
        p for p in psutil.process_iter(["cmdline"]) if str(out) in " ".join(p.info["cmdline"] or [])
    ]
    assert not left
    with capsys.disabled():
        print(f"\n{done.stdout}")
