"""Proofs without servers: what leaves the machine, what a bundle must be, what verdict and plan say of figures."""

from __future__ import annotations

import copy
import json
import os
import shutil
import subprocess
import tarfile
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from tests.command_line import trtspec
from trtspec.bench.acceptance import TurnCounts, summarize
from trtspec.bench.battery import make_battery
from trtspec.bench.datasets import load_dataset
from trtspec.bench.gate import answers_needed
from trtspec.bench.prove import (
    CHECKED,
    LONG_LOSS,
    MIN_ACCEPTANCE,
    URL,
    WARM_LOSS,
    WORK,
    ProveLine,
    ProveSetup,
    ProveStep,
    judge,
    launches,
    plan_findings,
    prompts_of,
    serve_words,
    steps_of,
    taken,
)
from trtspec.bench.prove_bundle import prove_html, read_bundle, request_outcomes, tables_of, write_bundle
from trtspec.bench.prove_redaction import Redactor, redactor
from trtspec.bench.prove_words import ENGINE_OPTIONS, refuse_own_options
from trtspec.checkpoint.writer import Journal
from trtspec.cli.prove_inputs import absolute_data, proof_header
from trtspec.cli.prove_run import ProofRun, prove_all, run_proof, tied
from trtspec.errors import TrtspecError, UsageError
from trtspec.planning.points import HOST_US
from trtspec.report import json_text
from trtspec.trtllm.schema import schema_for
from trtspec.vllm import vllm_options

PAIR = ("nvidia/Kimi-K2.5-NVFP4", "nvidia/Kimi-K2.5-Eagle3")
SETUP = ProveSetup(*PAIR, "trtllm", 2, "b200", 4, "nano", 8, 64, (1, 4), (100, 300))


def level(concurrency: int, rate: float, gap: float, length: float | None) -> dict[str, Any]:
    through = {"steady_tokens_per_s": rate, "tokens_per_s": rate, "inter_token_s": {"mean": gap}}
    return {"concurrency": concurrency, "throughput": through, "acceptance_length": length, "drafted": 300}


def results(length: float | None, **categories: float) -> dict[str, Any]:
    return {
        "acceptance_length": length,
        "steps": 400,
        "server": {"version": "1.3.0rc20"},
        "problems": [],
        "categories": {name: {"acceptance_length": value, "steps": 100} for name, value in categories.items()},
    }


@pytest.fixture
def evidence() -> dict[str, Any]:
    """Four B200 that do what their plan says."""
    points = [{"concurrency": c, "draft_len": k, "step_ms": 5.0 + k + 0.1 * c} for c in (1, 4) for k in (0, 1, 2)]
    per_gpu = {"weights": 150e9, "head": 1e9, "kv": 29e9, "reserve": 9e9}
    speed = {
        launch: {str(c): {"tokens_per_s": 100.0 * c * (1 + k / 2), "acceptance_length": 1 + k / 2,
                          "step_ms": 5.0 + k + 0.1 * c} for c in (1, 4)}
        for k, launch in enumerate(("plain", "k1", "k2"))
    }  # fmt: skip
    memory = {launch: {"seconds": 500.0, "per_gpu": [int(180e9)] * 4, "resident": 10**9} for launch in speed}
    ok: dict[str, Any] = {"problems": []}
    outputs = {
        "doctor": ok, "inspect-target": ok, "inspect-head": ok, "lint-plain": ok | {"version": "1.3.0rc20"},
        "lint-head": ok | {"version": "1.3.0rc20"},
        "check": {"results": [{"name": "lossless", "status": "pass", "message": "equal"}]},
        "plan": {"gpu": "b200", "gpus": 4, "points": points, "per_gpu": per_gpu},
        "bench-plain": results(None), "bench-k1": results(1.5, code=1.6, docs=1.4),
        "bench-k2": results(2.0, code=2.2, docs=1.8), "bench-sampled": results(1.6, code=1.6),
        "bench-cold": results(2.0, cold=2.0), "bench-warm": results(1.98, warm=1.0),
        "bench-long-100": results(2.0), "bench-long-300": results(1.8),
    }  # fmt: skip
    gpus = [{"name": "NVIDIA B200", "memory": "183359 MiB", "driver": "580.1", "compute_capability": "10.0"}] * 4
    setup = {
        "target": PAIR[0],
        "head": PAIR[1],
        "dataset": "nano",
        "samples": 8,
        "max_tokens": 64,
        "contexts": [100, 300],
    }
    return {"schema": 1, "setup": setup, "backend": "trtllm", "engine": "1.3.0rc20", "gpus": gpus, "speed": speed,
            "memory": memory, "journal": [], "outputs": outputs, "versions": {"trtspec": "0.1.0"}}  # fmt: skip


def test_the_steps_are_the_commands_that_a_person_would_type() -> None:
    steps = {step.name: step for step in steps_of(SETUP)}
    assert launches(SETUP) == ["plain", "k2", "k1"]
    assert {"doctor", "plan", "schema", "lint-plain", "lint-head", "record", "bench-plain", "check", "bench-sampled",
            "bench-cold", "bench-warm", "bench-long-100", "bench-long-300", "bench-k1"} <= set(steps)  # fmt: skip
    assert "--installed" in steps["lint-head"].words and steps["record"].launch == "plain"
    assert steps["check"].launch == "k2" and "--against" in steps["check"].words
    done = trtspec("prove", PAIR[0], "--head", PAIR[1], "--dry-run", "--json", "--gpu", "b200")
    told = json.loads(done.stdout)
    assert done.status == 0 and told["seconds"] == round(sum(row["seconds"] for row in told["steps"]))
    assert [row["step"] for row in told["steps"]].index("serve-plain") < [row["step"] for row in told["steps"]].index(
        "check"
    )
    for words in ((), (PAIR[0],), (PAIR[0], "--head", PAIR[1]), ("--import", "nowhere.tar.gz")):
        assert trtspec("prove", *words).status == 2, words


def test_made_prompts_have_their_lengths_and_begin_like_nothing_that_was_asked_before() -> None:
    questions = load_dataset("nano").questions[:40]
    rows = prompts_of(SETUP, [question.turns[0] for question in questions])
    assert [row["prompt"] for row in rows["cold"]] == [row["prompt"] for row in rows["warm"]]
    for size in (100, 300):
        assert all(4 * size <= len(row["prompt"]) - len(q.turns[0]) < 4 * size + 50
                   for row, q in zip(rows[f"long-{size}"], questions, strict=False))  # fmt: skip
    made = [row["prompt"] for name in ("cold", "long-100", "long-300") for row in rows[name]]
    battery = make_battery(questions, 64, SETUP.contexts, 4)
    before = [str(message["content"]) for asked in battery.prompts + battery.long for message in asked.messages]
    for n, prompt in enumerate(made):
        for other in [*made[:n], *before, *(question.turns[0] for question in questions)]:
            assert len(os.path.commonprefix([prompt, other])) < 32, (prompt[:40], other[:40])


def warm_line(setup: ProveSetup, url: str, work: Path, backend: str, bench: str, *more: str) -> ProveLine:
    """What a proof says of warm prefixes, of its steps `bench`, cold and warm run with `more` options against a server
    at `url`."""
    for name, rows in prompts_of(setup, [q.turns[0] for q in load_dataset("nano").questions]).items():
        (work / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    outputs = {}
    for step in steps_of(setup):
        if step.name in (bench, "bench-cold", "bench-warm"):
            done = trtspec(*(word.replace(URL, url).replace(WORK, str(work)) for word in step.words), *more)
            assert done.status in step.statuses, done.stderr
            outputs[step.name] = json.loads((work / step.name / "results.json").read_text())
    evidence = {"outputs": outputs, "setup": asdict(setup), "backend": backend, "speed": {}, "gpus": []}
    return next(line for line in judge(evidence) if line.name == "acceptance: warm")


@pytest.mark.parametrize(
    ("kind", "reuse", "status"), [
        ("vllm", "blind", "fail"), pytest.param("vllm", "warm", "pass", marks=pytest.mark.slow),
        *(pytest.param("reference", *more, marks=pytest.mark.slow)
          for more in (("blind", "fail"), ("warm", "pass"), (None, "pass"))),
    ]
)  # fmt: skip
def test_a_head_that_is_blind_over_a_reused_prefix_is_found(
    kind: str, reuse: str | None, status: str, stand_in: Callable[..., str], tmp_path: Path
) -> None:
    """The last server says nothing of what it reuses."""
    url, setup = stand_in(kind=kind, reuse=reuse), replace(SETUP, samples=4, max_tokens=48, concurrency=(1,))
    line = warm_line(setup, url, tmp_path, "vllm", bench="bench-k2")
    assert line.status == status, line
    told = "0% and 100% of prompt" if kind == "reference" and reuse else "does not tell what it took from its cache"
    assert told in line.message


def test_a_warm_prompt_that_was_not_cached_shows_nothing(evidence: dict[str, Any]) -> None:
    through = {"cached_prompt_tokens": 0, "prompt_tokens": {"mean": 600.0}, "requests": 8, "errors": 0}
    for name in ("cold", "warm"):
        evidence["outputs"][f"bench-{name}"]["concurrency"] = [{"throughput": through}]
    line = next(line for line in judge(evidence) if line.name == "acceptance: warm")
    assert line.status == "skipped" and "reuses no prefix" in line.message
    cached = through | {"cached_prompt_tokens": 4000}
    for name in ("cold", "warm"):
        evidence["outputs"][f"bench-{name}"]["concurrency"] = [{"throughput": cached}]
    line = next(line for line in judge(evidence) if line.name == "acceptance: warm")
    assert line.status == "skipped" and "cached already" in line.message


SECRET = {
    "HF_TOKEN": "hf_abcdefghijklmnop",
    "DB_PASSWORD": "correct-horse",
    "LOGNAME": "marguerite",
    "HOSTNAME": "rack7-node3",
    "OPENAI_API_KEY": "sk-abcdefgh12345678",
    "SHELL": "/bin/bash",
}


@pytest.mark.parametrize(
    "text",
    [
        "401 for token hf_abcdefghijklmnop",
        "hf_other1234567890abcdef, hf_revision aside, is not ours",
        "Authorization: Bearer abc.def.ghi",
        "password correct-horse",
        "/home/marguerite/models/k2/config.json",
        "~/models/k2",
        "see ../secret/place.txt",
        "http://10.1.2.3:8000/v1/models",
        "connect to 192.168.0.7 failed",
        "https://marguerite:pw@example.org/x",
        "written by marguerite@corp.example",
        "node rack7-node3 of RACK7-NODE3.cluster",
        "GPU-12345678-90ab-cdef-1234-567890abcdef",
        "de:ad:be:ef:00:01",
        "http://rack7-node3.internal:9000/metrics",
        "/mnt/nfs/team/rack7-node3/log",
        "sk-abcdefgh12345678",
        "nvapi-ABCDEFGHIJKL",
        '{"argv": ["/opt/venv/bin/python", "--ckpt=/scratch/marguerite/x"]}',
    ],
)
def test_what_names_a_person_a_machine_or_a_secret_is_replaced(text: str) -> None:
    redact = redactor({"/scratch/marguerite/x": "<target>"}, SECRET)
    cleaned = redact.text(text)
    for word in (
        "hf_a",
        "hf_o",
        "correct-horse",
        "marguerite",
        "rack7",
        "10.1.2.3",
        "192.168",
        "sk-abc",
        "12345678-90ab",
        "be:ef",
        "/home",
        "/mnt",
        "/opt",
        "secret/place",
        "abc.def",
        "nvapi-A",
        "models/k2",
    ):
        assert word.lower() not in cleaned.lower(), cleaned
    assert not redact.left_in(cleaned)


@pytest.mark.parametrize(
    "text",
    [
        "hf_revision: {type: str}",
        "TensorRT-LLM 1.3.0rc20, torch 2.8.0+cpu",
        "nvidia/Kimi-K2.5-NVFP4",
        "lightseekorg/kimi-k2.5-eagle3",
        "GET /v1/models",
        "tokens/s",
        "https://github.com/NVIDIA/TensorRT-LLM/pull/1",
        "3.14 of 2/3 passed",
        "TS-CHECK-TOOL-CALL",
        "12:30:05",
    ],
)
def test_what_a_reader_needs_stays(text: str) -> None:
    assert redactor({}, SECRET).text(text) == text


def test_answers_and_prompts_never_leave() -> None:
    value = {"turns_detail": [1], "transcripts": [{"text": "x"}], "kept": [{"text": "private"}, {"steps": 3}]}
    assert redactor({}, {}).value(value) == {"kept": [{}, {"steps": 3}]}


def test_a_bundle_is_the_same_for_the_same_files_and_is_not_written_with_a_name_in_it(tmp_path: Path) -> None:
    redact = Redactor({"marguerite": "<user>"})
    files = {"evidence.json": "{}", "verdict.json": "{}"}
    assert write_bundle(tmp_path / "a", files, redact) == write_bundle(tmp_path / "b", files, redact)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    with pytest.raises(TrtspecError, match="still holds <user>"):
        write_bundle(tmp_path / "c", files | {"report.html": "xMargueritex"}, redact)
    assert not (tmp_path / "c").exists()


def bundle(path: Path, evidence: dict[str, Any], **more: str) -> Path:
    files = {"evidence.json": json_text(evidence), "verdict.json": json_text({"ok": True, "results": []})}
    write_bundle(path, files | more, Redactor({}))
    return path


def test_a_bundle_that_was_changed_and_what_is_none_are_refused(tmp_path: Path, evidence: dict[str, Any]) -> None:
    good = bundle(tmp_path / "proof.tar.gz", evidence)
    assert read_bundle(good).evidence == evidence
    with tarfile.open(good) as archive:
        archive.extractall(tmp_path, filter="data")
    inner = tmp_path / "trtspec-proof" / "evidence.json"
    inner.write_text(inner.read_text().replace("5.1", "4.1"))
    with tarfile.open(tmp_path / "changed.tar.gz", "w:gz") as archive:
        archive.add(tmp_path / "trtspec-proof", "trtspec-proof")
    (tmp_path / "text.tar.gz").write_text("no archive")
    (tmp_path / "cut.tar.gz").write_bytes(good.read_bytes()[:200])
    os.mkfifo(tmp_path / "pipe")
    for name in ("changed.tar.gz", "text.tar.gz", "cut.tar.gz", "pipe", "nowhere"):
        with pytest.raises(UsageError):
            read_bundle(tmp_path / name)


def test_figures_that_hold_are_verified_and_a_planted_difference_is_found(
    tmp_path: Path, evidence: dict[str, Any]
) -> None:
    assert {finding.status for finding in plan_findings(evidence)} == {"verified"}
    assert len(plan_findings(evidence)) == 9
    planted = copy.deepcopy(evidence)
    point = next(p for p in planted["outputs"]["plan"]["points"] if (p["concurrency"], p["draft_len"]) == (4, 2))
    point["step_ms"] *= 1.4
    done = trtspec("prove", "--import", bundle(tmp_path / "proof.tar.gz", planted), "--json", "-o", tmp_path / "out")
    refuted = [f for f in json.loads(done.stdout)["plan"] if f["status"] == "refuted"]
    assert [f["what"] for f in refuted] == ["step time, k2, concurrency 4 (ms)"]
    assert refuted[0]["ratio"] == pytest.approx(1 / 1.4, abs=1e-3)
    assert json.loads((tmp_path / "out" / "findings.json").read_text()) == json.loads(done.stdout)
    other = copy.deepcopy(evidence)
    other["gpus"][0] = {**other["gpus"][0], "name": "NVIDIA H200"}
    assert plan_findings(other) == [], "figures of other GPUs say nothing about this plan"


def test_a_host_time_that_is_refuted_is_part_of_the_patch(tmp_path: Path, evidence: dict[str, Any]) -> None:
    for level, figures in evidence["speed"]["plain"].items():
        figures["step_ms"] = 5.0 + 0.1 * int(level) + 1.5
    path = bundle(tmp_path / "proof.tar.gz", evidence)
    told = json.loads(trtspec("prove", "--import", path, "--json").stdout)
    assert f"+HOST_US = {HOST_US + 500.0}" in told["patch"] and "a/trtspec/planning/points.py" in told["patch"]
    (tmp_path / "schemas.patch").write_text(told["patch"])
    root = Path(__file__).parents[2]
    done = subprocess.run(["git", "apply", "--check", str(tmp_path / "schemas.patch")], cwd=root, capture_output=True)
    assert done.returncode == 0, done.stderr
    evidence["speed"]["plain"]["4"]["step_ms"] += 3.0  # by another time: no single constant
    other = bundle(tmp_path / "other.tar.gz", evidence)
    assert not json.loads(trtspec("prove", "--import", other, "--json").stdout)["patch"]


def test_the_verdict_names_what_fails_and_what_was_not_looked_at(evidence: dict[str, Any]) -> None:
    good = {line.name: line for line in judge(evidence)}
    assert not [line for line in good.values() if line.status != "pass"], good
    evidence["outputs"]["bench-warm"] = results(1.2)
    evidence["outputs"]["check"]["results"][0] = {"name": "lossless", "status": "fail", "message": "departs"}
    evidence["outputs"]["inspect-head"] = {"problems": [{"severity": "error", "code": "TS-X", "message": "wrong"}]}
    evidence["speed"]["k1"]["4"]["tokens_per_s"] = evidence["speed"]["k2"]["4"]["tokens_per_s"] = 90.0
    del evidence["outputs"]["bench-long-300"], evidence["outputs"]["lint-head"]
    bad = {line.name: line.status for line in judge(evidence) if line.status != "pass"}
    assert bad == {
        "head and pair": "fail", "lint --installed: head": "skipped", "check: lossless": "fail",
        "acceptance: warm": "fail", "acceptance: long": "skipped", "speed at concurrency 4": "fail",
    }  # fmt: skip


def test_nothing_is_proved_without_installation_pair_check_and_speed(evidence: dict[str, Any]) -> None:
    evidence["setup"]["concurrency"] = [1, 4]
    bare = judge(evidence | {"outputs": {}, "speed": {}})
    failed = {line.name for line in bare if line.status == "fail"}
    needed = {"installation", "target", "head and pair", "check", "speed at concurrency 1", "speed at concurrency 4"}
    assert failed == needed and not [line for line in bare if line.status == "pass"], bare
    evidence["outputs"]["check"]["results"].clear()
    evidence["outputs"]["doctor"] = {"error": {"message": "no doctor"}}
    evidence["speed"]["plain"]["4"]["tokens_per_s"] = None
    failed = {line.name for line in judge(evidence) if line.status == "fail"}
    assert failed == {"installation", "check", "speed at concurrency 4"}


def test_a_step_whose_output_cannot_be_read_is_run_again_and_not_proved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One real, quick command (json.tool, whose --json-lines may be cut short) in place of `doctor`; no servers. After
    a power loss the journal may know of more than the disk: an empty output, or none at all."""
    begun: list[str] = []
    (tmp_path / "given.json").write_text('{"problems": []}')
    step = ProveStep("doctor", ("--json", str(tmp_path / "given.json")), module="json.tool")
    monkeypatch.setattr("trtspec.cli.prove_run.steps_of", lambda setup: [step])

    def run(self: ProofRun, step: ProveStep, url: str = "", run: Callable[..., None] = ProofRun.run) -> None:
        begun.append(step.name)
        run(self, step, url)

    monkeypatch.setattr(ProofRun, "run", run)
    monkeypatch.setattr(ProofRun, "serve", lambda self, launch: None)
    setup = replace(SETUP, backend="reference", gpu=None)
    proof, out = tmp_path / "proof", tmp_path / "proof" / "work" / "doctor.out"
    assert run_proof(setup, proof, 1.0, False).done("doctor") and "doctor" in begun
    for lose in (out.unlink, lambda: out.write_bytes(b"")):
        lose()
        begun.clear()
        again = run_proof(setup, proof, 1.0, False)
        assert "doctor" in begun and again.done("doctor") and "problems" in json.loads(out.read_text())
    begun.clear()
    shutil.rmtree(proof / "work")
    monkeypatch.setattr(ProofRun, "run", lambda self, step, url="": begun.append(step.name))
    made = prove_all(setup, proof, 1.0, False)
    assert "doctor" in begun and {"installation", "check", "speed at concurrency 1"} <= set(made.failed)
    assert not json.loads((proof / "verdict.json").read_text())["ok"]


def test_a_step_that_leaves_nothing_is_not_done(tmp_path: Path) -> None:
    """Status 0 alone says nothing of its output."""
    work = tmp_path / "work"
    work.mkdir()
    with Journal(tmp_path / "journal.jsonl", {}) as journal:
        run = ProofRun(SETUP, tmp_path, 1.0, journal)
        run.run(ProveStep("zen", ("--json",), module="this"))
        run.run(ProveStep("file", ("-o", f"{WORK}/file.yml"), module="this"))
        assert (
            not journal.done and "not valid JSON" in run.broken["zen"] and "file.yml is missing" in run.broken["file"]
        )


def test_words_for_serve_do_not_change_what_is_proved() -> None:
    given = ("prove", PAIR[0], "--head", PAIR[1], "--dry-run", "--json", "--", "--max-seq-len", "512")
    done = trtspec(*given, "--draft-len", "7")
    assert done.status == 2 and "--draft-len cannot be passed to the servers of a proof" in done.stderr, done.stderr
    assert trtspec(*given, "--", "--draft-len", "7").status == 0  # the engine's own
    for flag in ("--head", "--draft-len", "--backend", "--tp-size", "--host", "--port", "--speculation", "--config",
                 "--disaggregated", "--role", "--launcher", "--nodes", "--gpus-per-node", "--draft-sampling",
                 "--dry-run"):  # fmt: skip
        for words in ((flag, "7"), (f"{flag}=7",)):
            with pytest.raises(UsageError, match=f"{flag} cannot be passed"):
                refuse_own_options(words)
    refuse_own_options(("--prefix-reuse", "off", "--max-batch-size=8", "--served-model-name", "k2", "--dtype=auto"))


def test_a_proof_takes_no_file_because_serve_takes_none_with_a_draft_length(tmp_path: Path) -> None:
    (tmp_path / "engine.yml").write_text("enable_chunked_prefill: true\n")
    words = serve_words(replace(SETUP, serve_words=("--config", str(tmp_path / "engine.yml"))), "k2")
    done = trtspec("serve", *words, "--dry-run")
    assert done.status == 2 and "--draft-len is not used with --config" in done.stderr, done.stderr


def test_words_for_the_engine_do_not_change_what_is_proved() -> None:
    """In every spelling that the engines have for an option that a proof rules out."""
    for flag in ("--speculative-config", "--speculative_config.method=ngram", "-sc", "--tensor_parallel_size=8",
                 "--tp_size", "--pp_size=2", "-dp", "--server_role", "--extra_llm_api_options"):  # fmt: skip
        with pytest.raises(UsageError, match=f"{flag.partition('=')[0]} cannot be passed"):
            refuse_own_options(("--trust-remote-code", "--", "--seed", "7", flag, "2"))
    refuse_own_options(("--", "--enable_attention_dp", "--ep_size", "4", "--reasoning-parser", "tp"))
    spellings = [{option.name, *option.also} for option in vllm_options().values()]
    spellings += [set(option.flags) for option in schema_for("1.3.0rc20").options.values()]
    for spelled in ({flag.lstrip("-").replace("_", "-") for flag in flags} for flags in spellings):
        assert spelled <= set(ENGINE_OPTIONS) or not spelled & set(ENGINE_OPTIONS), spelled


def test_variables_of_serve_do_not_give_the_plain_server_a_head(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRTSPEC_SERVE_HEAD", PAIR[1])
    monkeypatch.setenv("TRTSPEC_SERVE_CONFIG", "speculating.yml")
    monkeypatch.setenv("TRTSPEC_SERVE_API_KEY", "kept")
    assert not {"TRTSPEC_SERVE_HEAD", "TRTSPEC_SERVE_CONFIG"} & set(tied()["env"])
    assert tied()["env"]["TRTSPEC_SERVE_API_KEY"] == "kept"


def test_the_page_has_nvidias_definition_beside_ours_under_its_own_name(evidence: dict[str, Any]) -> None:
    """Two turns of a question are pooled: 1 + 6 accepted / (2 steps + 2 prefills), and 1 + 0 / (4 + 1)."""
    turns = [TurnCounts("a", "code", 6, 1, 4, 3, None, "x"), TurnCounts("a", "code", 4, 1, 2, 3, None, "x"),
             TurnCounts("b", "code", 5, 4, 0, 12, None, "x")]  # fmt: skip
    found = asdict(summarize(turns))
    evidence["outputs"]["bench-k2"] |= found | {"categories": {"code": found, "docs": found}}
    evidence["outputs"]["bench-k2"]["quality"] = {"docs": {"degenerate": True}}
    table = next(table for table in tables_of(evidence) if "NVIDIA" in table.title)
    assert table.columns == ["", "code", "docs", "average"] and table.rows == [["2 drafts", "1.75", "", "1.75"]]
    ours = next(table for table in tables_of(evidence) if table.title.startswith("Acceptance length by category"))
    assert ours.rows == [["code", "1.600", "2.000"], ["docs", "1.400", ""], ["all", "1.500", "2.000"]]
    page = prove_html(evidence, judge(evidence))
    assert "definition of NVIDIA" in page and "turns pooled" in page


def test_acceptance_on_degenerate_output_is_no_figure_and_passes_nothing(evidence: dict[str, Any]) -> None:
    """Loops and noise: the figures of their steps stand in no table, and their lines are skipped."""
    outputs = evidence["outputs"]
    for name in ("bench-k1", "bench-sampled", "bench-warm", "bench-long-300"):
        outputs[name]["degeneration"] = {"degenerate": True}
    outputs["bench-k1"]["quality"] = {"docs": {"degenerate": True}, "code": {"degenerate": True}}
    lines = {line.name: line for line in judge(evidence) if line.name.startswith("acceptance")}
    assert len(lines) == 3 and all(line.status == "skipped" for line in lines.values()), lines
    assert all(line.message.startswith("degenerate output") for line in lines.values()), lines
    assert "bench" not in lines["acceptance: warm"].message and "warm" in lines["acceptance: warm"].message
    by_category, _, _, workloads = tables_of(evidence)[:4]
    assert by_category.rows == [["code", "", "2.200"], ["docs", "", "1.800"], ["all", "", "2.000"]]
    shown = {row[0]: row[1] for row in workloads.rows}
    assert shown == {"sampled": "", "cold": "2.000", "warm": "", "100 tokens": "2.000", "300 tokens": ""}


def test_the_page_of_the_command_has_the_limits_of_the_code() -> None:
    page = " ".join((Path(__file__).parents[2] / "docs" / "commands" / "prove.md").read_text().split())
    for words in (
        f"at most {CHECKED} questions", f"fewer than the {answers_needed()} that show", f"length of {MIN_ACCEPTANCE}",
        f"more than {LONG_LOSS:.0%} from the shortest".replace("%", " %"),
        f"more than {WARM_LOSS:.0%} from cold".replace("%", " %"),
    ):  # fmt: skip
        assert words in page, words
    assert answers_needed() > CHECKED


def test_only_parameters_that_are_honoured_without_speculation_tell_of_it(evidence: dict[str, Any]) -> None:
    outcomes = (("bad", "refused", "honoured"), ("min_tokens", "no effect", "honoured"), ("seed", "refused", None),
                ("temperature", "not sent", "honoured"), ("presence_penalty", "no effect", "no effect"))  # fmt: skip
    table = [{"parameter": name, "outcome": out, "without_speculation": plain} for name, out, plain in outcomes]
    row = {"name": "parameters", "status": "pass", "message": "", "detail": {"table": table}}
    evidence["outputs"]["check"]["results"].append(row)
    assert request_outcomes(evidence) == {"bad_words": "refused", "min_length": "no effect"}
    assert request_outcomes(evidence | {"backend": "vllm"}) == {}


def test_the_mode_is_part_of_every_figures_name_and_of_every_request(evidence: dict[str, Any]) -> None:
    asked = {step.name: step.words for step in steps_of(replace(SETUP, thinking="medium")) if step.words[0] == "bench"}
    assert len(asked) == 8 and all("--thinking medium" in " ".join(words) for words in asked.values())
    evidence["setup"]["thinking"] = "medium"
    mode = ", medium reasoning"
    assert all(mode in table.title for table in tables_of(evidence)[:4])
    names = [line.name for line in judge(evidence) if line.name.startswith(("acceptance", "speed", "plan: step"))]
    assert len(names) == 11 and all(mode in name for name in names), names


def test_a_run_in_another_mode_is_refused(tmp_path: Path) -> None:
    Journal(tmp_path / "proof" / "journal.jsonl", proof_header(SETUP)).close()
    words = ("prove", PAIR[0], "--head", PAIR[1], "--backend", "trtllm", "--draft-len", "2", "--gpu", "b200",
             "--gpus", "4", "--samples", "8", "--max-tokens", "64", "--concurrency", "1,4", "--contexts",
             "100,300")  # fmt: skip
    done = trtspec(*words, "--thinking", "on", "-o", tmp_path / "proof")
    assert done.status == 2 and "proof.thinking" in done.stderr, done.stderr


def test_a_resume_with_another_head_data_set_or_engine_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Small files are known by their hash, so that a copy of the same bytes goes on; large ones by size and time."""
    monkeypatch.setattr("trtspec.cli.prove_inputs.SMALL", 64)
    monkeypatch.setattr("trtspec.cli.prove_run.steps_of", lambda setup: [])
    monkeypatch.setattr(ProofRun, "serve", lambda self, launch: None)
    head, data = tmp_path / "head", tmp_path / "questions.jsonl"
    head.mkdir()
    config, weights = head / "config.json", head / "model.safetensors"
    config.write_text("{}")
    weights.write_bytes(b"w" * 100)
    data.write_text('{"prompt": "hello old", "category": "a"}\n')
    setup = replace(SETUP, target=str(tmp_path), head=str(head), dataset=str(data), backend="reference", gpu=None)

    def go_on(setup: ProveSetup = setup) -> None:
        run_proof(setup, tmp_path / "proof", 1.0, False)

    go_on()
    config.unlink()
    config.write_text("{}")
    go_on()
    for file, other in (
        (config, '{"changed": 1}'),
        (weights, "v" * 100),
        (data, '{"prompt": "hi", "category": "b"}\n'),
    ):
        about, was = file.stat(), file.read_text()
        file.write_text(other)
        os.utime(file, ns=(about.st_atime_ns, about.st_mtime_ns + 10**9))
        with pytest.raises(UsageError, match=file.name.replace(".", r"\.")):
            go_on()
        file.write_text(was)
        os.utime(file, ns=(about.st_atime_ns, about.st_mtime_ns))
        go_on()
    monkeypatch.setattr("trtspec.cli.prove_inputs.engine_version", lambda backend: "another")
    with pytest.raises(UsageError, match='engine was .* now "another"'):
        go_on()


def test_only_the_owner_may_read_the_logs_and_the_journal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine prints its own arguments; here also over files that an earlier release left open to others."""
    monkeypatch.setattr("trtspec.cli.prove_run.steps_of", lambda setup: [])
    monkeypatch.setattr("trtspec.cli.prove_run.launches", lambda setup: ["plain"])
    monkeypatch.setattr(ProofRun, "done", lambda self, name: False)
    setup = replace(SETUP, target=str(tmp_path / "missing"), backend="reference", gpu=None)
    proof = tmp_path / "proof"
    (proof / "work").mkdir(parents=True)
    files = [proof / "journal.jsonl", *(proof / "work" / name for name in ("zen.out", "zen.err", "serve-plain.log"))]
    before = os.umask(0)
    try:
        files[0].touch()
        files[-1].touch()
        run = run_proof(setup, proof, 0.1, False)
        run.run(ProveStep("zen", ("--json",), module="this"))
    finally:
        os.umask(before)
    assert set(run.broken) == {"serve-plain", "zen"}
    assert {file.name: oct(file.stat().st_mode & 0o777) for file in files} == {file.name: "0o600" for file in files}


def test_secrets_of_a_command_line_are_not_in_the_journal(tmp_path: Path) -> None:
    words = (
        "--max-seq-len",
        "512",
        "--api-key",
        "s3cr3tvalue99",
        "--",
        "--hf-token=hf_abcdefghijklmnop",
        "--seed",
        "7",
    )
    noted = proof_header(replace(SETUP, serve_words=words))["proof"]["serve_words"]
    assert "s3cr3tvalue99" not in str(noted) and "hf_abc" not in str(noted) and "--hf-token=sha256" in str(noted)
    assert [noted[n] for n in (0, 1, 2, 4, 6, 7)] == ["--max-seq-len", "512", "--api-key", "--", "--seed", "7"]
    other = proof_header(replace(SETUP, serve_words=(*words[:3], "another-value", *words[4:])))
    assert other["proof"]["serve_words"] != noted, "a change is still seen"


def test_a_resume_with_another_file_for_the_servers_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    template = tmp_path / "template.jinja"
    words = ("--", "--chat-template", "template.jinja", "--overrides", '{"a": "' + 300 * "b" + '"}')
    for given in (words, ("--", "--chat-template=template.jinja")):
        setup = replace(SETUP, serve_words=given)
        template.write_text("{{ messages }}")
        Journal(tmp_path / given[1] / "journal.jsonl", proof_header(setup)).close()
        Journal(tmp_path / given[1] / "journal.jsonl", proof_header(setup)).close()
        template.write_text("{{ tools }}")
        with pytest.raises(UsageError, match=r"files\.options\.template\.jinja"):
            Journal(tmp_path / given[1] / "journal.jsonl", proof_header(setup))


def test_relative_paths_are_known_as_what_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for directory in ("models/acme-secret-kimi", "customers"):
        (tmp_path / directory).mkdir(parents=True)
    for file in ("customers/bigbank.jsonl", "customers/template.jinja"):
        (tmp_path / file).write_text('{"prompt": "x"}\n')
    places = {"models/acme-secret-kimi": "<target>", "customers/bigbank.jsonl": "<dataset>", PAIR[1]: "<head>"}
    redact = redactor(places, {}, words=("--chat-template", "customers/template.jinja"))
    text = f"models/acme-secret-kimi/config.json of {PAIR[1]}, customers/bigbank.jsonl, --x=customers/template.jinja"
    assert redact.text(text) == f"<target>/config.json of {PAIR[1]}, <dataset>, --x=<path>"
    done = trtspec("prove", "models/acme-secret-kimi", "--head", PAIR[1], "--dataset", "customers/bigbank.jsonl",
                   "--backend", "reference", "--dry-run", "--json")  # fmt: skip
    commands = " ".join(row["command"] for row in json.loads(done.stdout)["steps"])
    assert f" {tmp_path}/models/acme-secret-kimi " in commands and f" {tmp_path}/customers/bigbank.jsonl" in commands
    assert " models/" not in commands and " customers/" not in commands and f" {PAIR[1]} " in commands
    assert absolute_data("mt-bench=customers/bigbank.jsonl") == f"mt-bench={tmp_path}/customers/bigbank.jsonl"
    assert (absolute_data("nano"), absolute_data("mt-bench")) == ("nano", "mt-bench")


def test_memory_of_other_jobs_refutes_no_plan(evidence: dict[str, Any]) -> None:
    """Eight GPUs, four of them another job's, 170 GB each; the launch takes what was planned of the others."""
    gb, idle = 10**9, [10**9] * 4 + [170 * 10**9] * 4
    assert taken(idle, [181 * gb] * 4 + [171 * gb] * 4) == [180 * gb] * 4
    assert taken([gb] * 8, [gb] * 8) is None and taken(None, idle) is None and taken(idle[:4], idle) is None
    evidence["memory"]["plain"]["per_gpu"] = [100 * gb] * 4 + [170 * gb] * 4  # as bundles were written before
    found = [finding for finding in plan_findings(evidence) if finding.what.startswith("memory")]
    assert [(f.what, f.status) for f in found] == [
        (f"memory of one GPU, {launch} (bytes)", "verified") for launch in ("k1", "k2")
    ]
    line = next(line for line in judge(evidence) if line.name == "plan: memory of one GPU, plain (bytes)")
    assert line.status == "skipped" and "8 GPUs, the plan is for 4" in line.message
    assert plan_findings(evidence | {"setup": evidence["setup"] | {"gpus": 8}}) == []


def test_a_plan_of_nothing_is_refused_by_name(tmp_path: Path, evidence: dict[str, Any]) -> None:
    evidence["outputs"]["plan"]["points"][0]["step_ms"] = 0
    done = trtspec("prove", "--import", bundle(tmp_path / "proof.tar.gz", evidence))
    assert done.status == 2 and "ZeroDivisionError" in done.stderr and "unexpected" not in done.stderr, done.stderr


def test_an_edited_review_is_not_overwritten(tmp_path: Path, evidence: dict[str, Any]) -> None:
    given = ("prove", "--import", bundle(tmp_path / "proof.tar.gz", evidence), "-o")
    edited = tmp_path / "review" / "schemas.patch"
    edited.parent.mkdir()
    edited.write_text("mine")
    done = trtspec(*given, edited.parent)
    assert done.status == 2 and "--force" in done.stderr and edited.read_text() == "mine"
    assert not (edited.parent / "findings.json").exists()
    for place in (edited, edited / "below"):
        done = trtspec(*given, place, "--force")
        assert done.status == 2 and f"{edited} is a file" in done.stderr and edited.read_text() == "mine", done.stderr
    assert trtspec(*given, edited.parent, "--force").status == 0 and edited.read_text() != "mine"
    assert trtspec(*given[:3], "--force").status == 2, "without -o there is nothing to replace"
    proof = trtspec("prove", PAIR[0], "--head", PAIR[1], "-o", edited)
    assert proof.status == 2 and f"{edited} is a file" in proof.stderr, proof.stderr


def test_the_page_has_the_cards_tables(evidence: dict[str, Any]) -> None:
    page = prove_html(evidence, judge(evidence))
    for words in (
        "by category, greedy",
        "tokens per second by concurrency",
        "other workloads",
        "Launches",
        "Against the plan",
        "proved",
        "NVIDIA B200",
        "2.200",
    ):
        assert words in page, words
