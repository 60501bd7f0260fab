"""Proofs: commands of the script, refusals before a launch, verdict, bundle, kills and resumes."""

import json
import os
import shlex
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from importlib import import_module
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.bench.conftest import measured, timed
from tests.command_line import ROOT, TRTSPEC, free_port, succeeded, trtspec
from tests.json_files import write_json
from trtspec.bench.prove import (
    PLAIN,
    SPECULATING,
    ProveSetup,
    gathered,
    pooled_results,
    proof_html,
    script,
    sentence,
    serve_words,
    shell_text,
)  # fmt: skip
from trtspec.bench.results import SpeedUp
from trtspec.bench.statistics import Ratio
from trtspec.cli.prove import OWN_OPTIONS
from trtspec.records import parse, record_of

PAIR = ("nvidia/Kimi-K2.5-NVFP4", "nvidia/Kimi-K2.5-Eagle3")
SETUP = ProveSetup(*PAIR, "trtllm", 2, "b200", 4, "nano", 8, 64, (1, 4), 8310, ("sampled",))
NANO = ("prove", "kimi-nano", "--head", "kimi-nano-eagle3", "--backend", "reference")
SMALL = ("--samples", "6", "--max-tokens", "32", "--concurrency", "1,2")


def test_the_script_is_made_of_commands_that_exist(tmp_path: Path) -> None:
    """Every line parses as the command it names, and launches differ only in head and port."""
    steps = script(replace(SETUP, thinking="medium", card=True), tmp_path)
    assert [step.name for step in steps] == ["plan", "bench-spec", "record", "bench-plain", "score"]
    twice = [(step.name, step.servers) for step in script(replace(SETUP, launches=2), tmp_path)]
    assert twice[5:] == [("bench-spec-2", ("spec-2",)), ("bench-plain-2", ("plain-2",))]
    for words in (
        *(step.words for step in steps),
        *(serve_words(SETUP, launch) for launch in (SPECULATING, PLAIN)),
    ):
        command = getattr(import_module(f"trtspec.cli.{words[0]}"), words[0])
        parse(record_of(command), list(words[1:]), words[0])
    speculating, plain = (set(serve_words(SETUP, launch)) for launch in (SPECULATING, PLAIN))
    assert speculating - plain == {"--head", PAIR[1], "--draft-len", "2", "8310"}
    assert plain - speculating == {"8311"}
    subprocess.run(["bash", "-n", "-c", shell_text(SETUP, tmp_path, steps)], check=True)


def test_a_dry_run_prints_the_script(tmp_path: Path) -> None:
    done = succeeded(*NANO, "-o", tmp_path / "proof", "--dry-run", *SMALL)
    lines = done.stdout.splitlines()
    assert lines[0].startswith("mkdir -p ") and not (tmp_path / "proof").exists()
    assert [shlex.split(line)[1] for line in lines if line.startswith("trtspec ")] == [
        "serve", "serve", "bench", "check", "check",
    ]  # fmt: skip


@pytest.mark.parametrize("backend", ["trtllm", "vllm"])
def test_without_the_engine_it_ends_before_the_first_launch(
    backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    done = trtspec(
        "prove", PAIR[0], "--head", PAIR[1], "--backend", backend, "-o", tmp_path / "proof"
    )
    assert (
        done.status == 4
        and "not installed here" in done.stderr
        and not (tmp_path / "proof").exists()
    )


def test_options_that_would_change_what_is_proved_are_refused(tmp_path: Path) -> None:
    for flag in OWN_OPTIONS:
        done = trtspec(*NANO, "-o", tmp_path / "proof", "--dry-run", "--", f"{flag}=7")
        assert done.status == 2 and f"{flag} cannot be passed to the servers" in done.stderr, (
            done.stderr
        )
    engines = ("--max-batch-size", "8")
    succeeded(*NANO, "-o", "x", "--dry-run", "--", *engines)
    for words in (NANO[:2], (*NANO, "-o", tmp_path, "--dataset", "nowhere.jsonl")):
        assert trtspec(*words).status == 2, words


def test_the_protocol_of_a_card_is_measured_without_the_network(tmp_path: Path) -> None:
    """What is given comes before the card; a data set that it does not have is refused."""

    def dry(*words: str) -> Any:
        pair = (PAIR[0], "--head", PAIR[1], "-o", tmp_path / "proof")
        return trtspec("prove", *pair, "--card", "--dry-run", *words)

    (line,) = [line for line in dry().stdout.splitlines() if "bench spec=" in line]
    protocol = (
        f"--dataset mt-bench --samples 80 --max-tokens 4096 --thinking medium --card {PAIR[1]} "
    )
    assert protocol in line and "--draft-len 3" in dry().stdout
    assert "--max-tokens 64 --thinking off" in dry("--max-tokens", "64", "--thinking", "off").stdout
    done = dry("--dataset", "gsm8k")
    assert done.status == 2 and "on gsm8k" in done.stderr and "mt-bench" in done.stderr


def test_the_sentence_says_verdict_and_speed() -> None:
    ups = [SpeedUp(of="a", over="b", level=f"concurrency {c}", ratio=Ratio(r, r - 0.1, r + 0.1, 8),
                   questions=32, rounds=8) for c, r in ((1, 1.4), (4, 1.28))]  # fmt: skip
    said = sentence("SAFE", "SAFE: the same output as without speculation", ups)
    speeds = (
        "1.40 times as fast (1.30 to 1.50) at concurrency 1, 1.28 (1.18 to 1.38) at concurrency 4"
    )
    over = "95 % intervals over 32 questions in 8 rounds of one launch"
    assert said == f"SAFE: the same output, {speeds}; {over}"
    slow = replace(ups[1], ratio=Ratio(0.65, 0.6, 0.71, 8))
    said = sentence("SAFE", "", [ups[0], slow])
    assert said.startswith("SAFE but slower at concurrency 4: the same output, 1.40 times as fast")
    assert (
        sentence("NOT SAFE", "NOT SAFE: greedy: x", [])
        == "NOT SAFE: greedy: x; the speed was not measured"
    )


def test_the_page_and_the_bundle_hold_what_was_found(
    stand_in: Callable[..., str], dataset: Path, tmp_path: Path
) -> None:
    """Two measurements with given times give verdict, ranges, step times and a row that fails."""
    urls = {"spec": stand_in(), "plain": stand_in(kind="plain")}
    results = {
        name: timed(
            measured({name: url}, dataset, samples=12, max_tokens=48, concurrency=(1, 4)), 0.05
        )
        for name, url in urls.items()
    }
    for name, one in results.items():
        (tmp_path / name).mkdir()
        write_json(tmp_path / name / "results.json", one.to_dict())
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "serve-spec.log").write_text("the key is s3cret")
    rows = [
        {
            "name": "greedy",
            "status": "pass",
            "seen": 8,
            "of": 8,
            "faults": [],
            "why": "largest difference 0.01 nats",
        }
    ]
    plan = {
        "points": [
            {"concurrency": c, "draft_len": k, "step_ms": 70.7 + k} for c in (1, 4) for k in (0, 2)
        ]
    }
    scored = {
        "verdict": "SAFE",
        "message": "SAFE: the same output as without speculation",
        "results": rows,
    }
    setup = replace(SETUP, serve_words=("--api-key", "s3cret"))
    more: dict[str, Any] = {
        "identities": {},
        "engine": "1.3.0rc20",
        "dataset_sha256": "0",
    }
    evidence = gathered(setup, {"plan": plan, "score": scored}, tmp_path, **more)
    page = proof_html(evidence, pooled_results(setup, tmp_path), tmp_path)
    assert evidence.sentence.startswith("SAFE: the same output, ") and evidence.sentence in page
    assert "s3cret" not in page + json.dumps(asdict(evidence))
    shown = (
        "70.70",
        "72.70",
        "tokens per step",
        "12 questions of one launch",
        "another launch can differ by more",
        "--draft-len 2 ...",
        "largest difference 0.01 nats",
        'class="sentence pass"',
    )
    assert all(words in page for words in shown), page
    slow = [replace(up, ratio=replace(up.ratio, high=0.9)) for up in evidence.speedups[1:]]
    slower = replace(evidence, speedups=[evidence.speedups[0], *slow])
    assert evidence.proved and slow and not slower.proved
    assert 'class="sentence unmeasured"' in proof_html(
        slower, pooled_results(SETUP, tmp_path), tmp_path
    )
    failed = {"verdict": "NOT SAFE", "message": "NOT SAFE: greedy: 1 fault", "results": rows}
    evidence = gathered(SETUP, {"score": failed}, tmp_path, **more)
    page = proof_html(evidence, pooled_results(SETUP, tmp_path), tmp_path)
    assert (
        'class="sentence fail"' in page
        and "NOT SAFE: greedy: 1 fault" in page
        and "70.70" not in page
    )
    bad = replace(results["spec"].degeneration, degenerate=True)
    levels = [replace(level, degeneration=bad) for level in results["spec"].concurrency]
    loops = replace(results["spec"], degeneration=bad, concurrency=levels)
    write_json(tmp_path / "spec" / "results.json", loops.to_dict())
    evidence = gathered(SETUP, {"score": scored}, tmp_path, **more)
    assert (
        evidence.sentence == "NOT PROVEN: the same output; the speed was not measured"
        and not evidence.proved
    )


def prove(out: Path, port: int, *words: str) -> subprocess.Popen[str]:
    command = [*TRTSPEC, *NANO, "-o", str(out), "--port", str(port), *SMALL, *words]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env
    )


def lines_of(file: Path) -> list[str]:
    """Its whole lines."""
    return file.read_text().split("\n")[:-1] if file.exists() else []


@pytest.mark.slow
@pytest.mark.timeout(2400)
@pytest.mark.clock
def test_a_proof_killed_at_five_points_is_resumed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A proof is resumed after each of five kills.

    They come before the first server is ready, in the first round, rounds later, while check
    records, and while it scores.
    """
    out, port, seen = tmp_path / "proof", free_port(), ""
    journal, passed = out / "journal.jsonl", ("--", "--max-queue", "77")
    answered, table = out / "spec" / "answers.jsonl", ["done before the kill | answers kept"]
    for noted, lines in ((1, 0), (1, 2), (1, 15), (2, 0), (3, 0)):
        process = prove(out, port, *passed)
        while process.poll() is None and (
            len(lines_of(journal)) < noted or len(lines_of(answered)) < lines
        ):
            time.sleep(0.05)
        time.sleep(0.5)
        assert process.poll() is None
        family = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(signal.SIGKILL)
        process.communicate()
        _, alive = psutil.wait_procs(family, timeout=300)
        assert not alive, "what it started outlives it"
        assert journal.read_text().startswith(seen), "what was done was done again"
        seen = journal.read_text().rpartition("\n")[0]
        done_before = [json.loads(line)["key"] for line in lines_of(journal)[1:]]
        table.append(f"{done_before} | {len(lines_of(answered))}")
    done = prove(out, port, "--json", *passed)
    said, errors = done.communicate()
    assert done.returncode in (0, 3), errors
    found = json.loads(said)
    steps = [json.loads(line)["key"] for line in lines_of(journal)[1:]]
    assert steps == ["bench-spec", "record", "score"]
    evidence, page = (out / "evidence.json").read_text(), (out / "report.html").read_text()
    assert (
        json.loads(evidence)["sentence"] == found["sentence"]
        and found["sentence"].split(",")[0] in page
    )
    assert found["verdict"] in ("SAFE", "NOT PROVEN"), found["sentence"]  # never a false alarm
    for text in (evidence, page, journal.read_text()):
        assert "--max-queue" not in text, "words for the servers may hold a key"
    with capsys.disabled():
        print("", *table, found["sentence"], sep="\n")
    other = prove(out, port, "--samples", "7", *passed)
    assert "was started with something else: proof.samples was 6, now 7" in other.communicate()[1]
