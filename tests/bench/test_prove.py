"""Proofs without servers: the commands, what is refused, what a resume needs, what verdict and page say of figures."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from trtspec.bench.battery import make_battery
from trtspec.bench.gate import answers_needed

from tests.command_line import trtspec
from trtspec.bench.acceptance import summarize
from trtspec.bench.datasets import load_dataset
from trtspec.bench.prove import (
    CHECKED,
    LONG_LOSS,
    MIN_ACCEPTANCE,
    URL,
    WARM_LOSS,
    WORK,
    ProveEvidence,
    ProveLine,
    ProveSetup,
    ProveStep,
    judge,
    launches,
    prompts_of,
    serve_words,
    steps_of,
    taken,
)
from trtspec.bench.prove_page import prove_html, tables_of
from trtspec.checkpoint.writer import Journal
from trtspec.cli.prove import absolute
from trtspec.cli.prove_run import (
    ENGINE_OPTIONS,
    OWN_OPTIONS,
    ProofRun,
    proof_header,
    prove_all,
    refuse_own_options,
    run_proof,
    tied,
)
from trtspec.client.servers import TurnCounts
from trtspec.errors import UsageError
from trtspec.trtllm.schema import schema_for

PAIR = ("nvidia/Kimi-K2.5-NVFP4", "nvidia/Kimi-K2.5-Eagle3")
SETUP = ProveSetup(*PAIR, "trtllm", 2, "b200", 4, "nano", 8, 64, (1, 4), (100, 300))
PROVE = ("prove", PAIR[0], "--head", PAIR[1])


def results(length: float | None, **categories: float) -> dict[str, Any]:
    return {
        "acceptance_length": length,
        "steps": 400,
        "server": {"version": "1.3.0rc20"},
        "problems": [],
        "categories": {name: {"acceptance_length": value, "steps": 100} for name, value in categories.items()},
    }


@pytest.fixture
def evidence() -> ProveEvidence:
    """Four B200 that do what their plan says."""
    points = [{"concurrency": c, "draft_len": k, "step_ms": 5.0 + k + 0.1 * c} for c in (1, 4) for k in (0, 1, 2)]
    per_gpu = {"weights": 150e9, "head": 1e9, "kv": 29e9, "reserve": 9e9}
    speed = {
        launch: {str(c): {"tokens_per_s": 100.0 * c * (1 + k / 2), "acceptance_length": 1 + k / 2,
                          "step_ms": 5.0 + k + 0.1 * c} for c in (1, 4)}
        for k, launch in enumerate(("plain", "k1", "k2"))
    }  # fmt: skip
    memory = {launch: {"seconds": 500.0, "per_gpu": [int(180e9)] * 4, "resident": 10**9} for launch in speed}
    gpus = [{"name": "NVIDIA B200", "memory": "183359 MiB", "driver": "580.1", "compute_capability": "10.0"}] * 4
    ok: dict[str, Any] = {"problems": []}
    outputs = {
        "doctor": ok | {"gpus": gpus}, "inspect-target": ok, "inspect-head": ok,
        "lint-plain": ok | {"version": "1.3.0rc20"}, "lint-head": ok | {"version": "1.3.0rc20"},
        "check": {"results": [{"name": "lossless", "status": "pass", "message": "equal"}]},
        "plan": {"gpu": "b200", "gpus": 4, "points": points, "per_gpu": per_gpu},
        "bench-plain": results(None), "bench-k1": results(1.5, code=1.6, docs=1.4),
        "bench-k2": results(2.0, code=2.2, docs=1.8), "bench-sampled": results(1.6, code=1.6),
        "bench-cold": results(2.0, cold=2.0), "bench-warm": results(1.98, warm=1.0),
        "bench-long-100": results(2.0), "bench-long-300": results(1.8),
    }  # fmt: skip
    return ProveEvidence(SETUP, outputs, speed, memory)


def judged(evidence: ProveEvidence) -> dict[str, ProveLine]:
    return {line.name: line for line in judge(evidence)}


def not_passed(evidence: ProveEvidence) -> dict[str, str]:
    return {line.name: line.status for line in judge(evidence) if line.status != "pass"}


def test_the_steps_are_the_commands_that_a_person_would_type() -> None:
    steps = {step.name: step for step in steps_of(SETUP)}
    assert launches(SETUP) == ["plain", "k2", "k1"]
    assert {"doctor", "plan", "lint-plain", "lint-head", "record", "bench-plain", "check", "bench-sampled",
            "bench-cold", "bench-warm", "bench-long-100", "bench-long-300", "bench-k1"} <= set(steps)  # fmt: skip
    assert "--installed" in steps["lint-head"].words and steps["record"].launch == "plain"
    assert steps["check"].launch == "k2" and "--against" in steps["check"].words
    told = json.loads(trtspec(*PROVE, "--dry-run", "--json", "--gpu", "b200").stdout)
    names = [row["step"] for row in told["steps"]]
    assert told["seconds"] == round(sum(row["seconds"] for row in told["steps"]))
    assert names.index("serve-plain") < names.index("check")
    for words in (PROVE[:1], PROVE[:2], PROVE):
        assert trtspec(*words).status == 2, words


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


def warm_line(setup: ProveSetup, url: str, work: Path, bench: str, *more: str) -> ProveLine:
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
    return judged(ProveEvidence(setup, outputs, {}, {}))["acceptance: warm"]


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
    setup = replace(SETUP, backend="vllm", samples=4, max_tokens=48, concurrency=(1,))
    line = warm_line(setup, stand_in(kind=kind, reuse=reuse), tmp_path, "bench-k2")
    assert line.status == status, line
    told = "0% and 100% of prompt" if kind == "reference" and reuse else "does not tell what it took from its cache"
    assert told in line.message


@pytest.mark.parametrize(("cached", "why"), [(0, "reuses no prefix"), (4000, "cached already")])
def test_a_warm_prompt_that_was_not_cached_shows_nothing(evidence: ProveEvidence, cached: int, why: str) -> None:
    through = {"cached_prompt_tokens": cached, "prompt_tokens": {"mean": 600.0}, "requests": 8, "errors": 0}
    for name in ("cold", "warm"):
        evidence.outputs[f"bench-{name}"]["concurrency"] = [{"throughput": through}]
    line = judged(evidence)["acceptance: warm"]
    assert line.status == "skipped" and why in line.message


def test_the_verdict_names_what_fails_and_what_was_not_looked_at(evidence: ProveEvidence) -> None:
    assert not not_passed(evidence)
    changed = {
        "bench-warm": results(1.2),
        "check": {"results": [{"name": "lossless", "status": "fail", "message": "departs"}]},
        "inspect-head": {"problems": [{"severity": "error", "code": "TS-X", "message": "wrong"}]},
    }
    outputs = {**evidence.outputs, **changed, "bench-long-300": None, "lint-head": None}
    slow = {"4": {"tokens_per_s": 90.0}}
    speed = {launch: {**levels, **(slow if launch != "plain" else {})} for launch, levels in evidence.speed.items()}
    assert not_passed(replace(evidence, outputs=outputs, speed=speed)) == {
        "head and pair": "fail", "lint --installed: head": "skipped", "check: lossless": "fail",
        "acceptance: warm": "fail", "acceptance: long": "skipped", "speed at concurrency 4": "fail",
    }  # fmt: skip


def test_nothing_is_proved_without_installation_pair_check_and_speed(evidence: ProveEvidence) -> None:
    bare = judge(replace(evidence, outputs={}, speed={}))
    failed = {line.name for line in bare if line.status == "fail"}
    needed = {"installation", "target", "head and pair", "check", "speed at concurrency 1", "speed at concurrency 4"}
    assert failed == needed and not [line for line in bare if line.status == "pass"], bare
    evidence.outputs["check"]["results"].clear()
    evidence.outputs["doctor"].clear()
    evidence.outputs["doctor"]["error"] = {"message": "no doctor"}
    evidence.speed["plain"]["4"]["tokens_per_s"] = None  # type: ignore[index]
    failed = {line.name for line in judge(evidence) if line.status == "fail"}
    assert failed == {"installation", "check", "speed at concurrency 4"}


def test_step_times_and_memory_are_compared_with_the_plan_of_the_same_gpus(evidence: ProveEvidence) -> None:
    """Memory of another job on four further GPUs refutes no plan, nor do GPUs of another type."""
    assert sum(name.startswith("plan: ") for name in judged(evidence)) == 9
    evidence.outputs["plan"]["points"][5]["step_ms"] *= 1.4
    line = judged(evidence)["plan: step time, k2, concurrency 4 (ms)"]
    assert (line.status, line.message) == ("fail", "planned 10.36, measured 7.4 (x 0.71)")
    gb, idle = 10**9, [10**9] * 4 + [170 * 10**9] * 4
    assert taken(idle, [181 * gb] * 4 + [171 * gb] * 4) == [180 * gb] * 4
    assert taken([gb] * 8, [gb] * 8) is None and taken(None, idle) is None and taken(idle[:4], idle) is None
    evidence.memory["plain"]["per_gpu"][4:] = [170 * gb] * 4  # type: ignore[index]
    line = judged(evidence)["plan: memory of one GPU, plain (bytes)"]
    assert line.status == "skipped" and "8 GPUs, the plan is for 4" in line.message
    evidence.outputs["doctor"]["gpus"][0] = {"name": "NVIDIA H200"}
    assert judged(evidence)["plan"].status == "skipped"


def test_a_step_whose_output_cannot_be_read_is_run_again_and_not_proved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One real, quick command in place of `doctor`; no servers. After a power loss the journal may know of more than
    the disk: an empty output, or none at all."""
    begun: list[str] = []
    step = ProveStep("doctor", ("inspect", PAIR[0], "--json"))
    monkeypatch.setattr("trtspec.cli.prove_run.steps_of", lambda setup: [step])

    def run(self: ProofRun, step: ProveStep, url: str = "", run: Callable[..., None] = ProofRun.run) -> None:
        begun.append(step.name)
        run(self, step, url)

    monkeypatch.setattr(ProofRun, "run", run)
    monkeypatch.setattr(ProofRun, "serve", lambda self, launch: None)
    setup = replace(SETUP, backend="reference", gpu=None)
    proof, out = tmp_path / "proof", tmp_path / "proof" / "work" / "doctor.out"
    assert run_proof(setup, proof, 1.0, False).done("doctor") and begun
    for lose in (out.unlink, lambda: out.write_bytes(b"")):
        lose()
        begun.clear()
        again = run_proof(setup, proof, 1.0, False)
        assert begun and again.done("doctor") and "problems" in json.loads(out.read_text())
    begun.clear()
    shutil.rmtree(proof / "work")
    monkeypatch.setattr(ProofRun, "run", lambda self, step, url="": begun.append(step.name))
    failed = {line.name for line in prove_all(setup, proof, 1.0, False) if line.status == "fail"}
    assert begun and {"installation", "check", "speed at concurrency 1"} <= failed
    assert not json.loads((proof / "verdict.json").read_text())["ok"]


def test_a_step_that_leaves_nothing_is_not_done(tmp_path: Path) -> None:
    """Status 0 alone says nothing of its output."""
    (tmp_path / "work").mkdir()
    with Journal(tmp_path / "journal.jsonl", {}) as journal:
        run = ProofRun(SETUP, tmp_path, 1.0, journal)
        run.run(ProveStep("help", ("doctor", "--json", "--help")))
        run.run(ProveStep("file", ("build-config", PAIR[0], "--dry-run", "-o", f"{WORK}/file.yml")))
        assert not journal.done and "not valid JSON" in run.broken["help"], run.broken
        assert "file.yml is missing" in run.broken["file"], run.broken


def test_words_for_serve_and_its_engine_do_not_change_what_is_proved() -> None:
    """In every spelling that the engines have for an option that a proof rules out."""
    given = (*PROVE, "--dry-run", "--json", "--", "--max-seq-len", "512")
    done = trtspec(*given, "--draft-len", "7")
    assert done.status == 2 and "--draft-len cannot be passed to the servers of a proof" in done.stderr, done.stderr
    assert trtspec(*given, "--", "--draft-len", "7").status == 0  # the engine's own
    engines = ("--speculative-config", "--speculative_config.method=ngram", "-sc", "--tensor_parallel_size=8",
               "--tp_size", "--pp_size=2", "-dp", "--server_role", "--extra_llm_api_options")  # fmt: skip
    refused = [(flag, "7") for flag in OWN_OPTIONS] + [(f"{flag}=7",) for flag in OWN_OPTIONS]
    for words in refused + [("--trust-remote-code", "--", "--seed", "7", flag, "2") for flag in engines]:
        with pytest.raises(UsageError, match="cannot be passed to the servers of a proof"):
            refuse_own_options(words)
    refuse_own_options(("--prefix-cache-mib", "0", "--max-batch-size=8", "--served-model-name", "head", "--dtype=auto"))
    refuse_own_options(("--", "--enable_attention_dp", "--ep_size", "4", "--reasoning-parser", "tp"))
    short = {"-sc": "speculative-config", "-tp": "tensor-parallel-size", "-pp": "pipeline-parallel-size",
             "-dp": "data-parallel-size"}  # fmt: skip
    spellings = [{flag, f"--{name}"} for flag, name in short.items()]
    spellings += [set(option.flags) for option in schema_for("1.3.0rc20").options.values()]
    for spelled in ({flag.lstrip("-").replace("_", "-") for flag in flags} for flags in spellings):
        assert spelled <= set(ENGINE_OPTIONS) or not spelled & set(ENGINE_OPTIONS), spelled


def test_a_proof_takes_no_file_because_serve_takes_none_with_a_draft_length(tmp_path: Path) -> None:
    (tmp_path / "engine.yml").write_text("enable_chunked_prefill: true\n")
    words = serve_words(replace(SETUP, serve_words=("--config", str(tmp_path / "engine.yml"))), "k2")
    done = trtspec("serve", *words, "--dry-run")
    assert done.status == 2 and "--draft-len is not used with --config" in done.stderr, done.stderr


def test_variables_of_serve_do_not_give_the_plain_server_a_head(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HEAD", "CONFIG", "API_KEY"):
        monkeypatch.setenv(f"TRTSPEC_SERVE_{name}", "x")
    assert {name for name in tied()["env"] if name.startswith("TRTSPEC_SERVE_")} == {"TRTSPEC_SERVE_API_KEY"}


def test_the_page_has_nvidias_definition_beside_ours_under_its_own_name(evidence: ProveEvidence) -> None:
    """Two turns of a question are pooled: 1 + 6 accepted / (2 steps + 2 prefills), and 1 + 0 / (4 + 1)."""
    turns = [TurnCounts("a", "code", 6, 1, 4, 3, None, "x"), TurnCounts("a", "code", 4, 1, 2, 3, None, "x"),
             TurnCounts("b", "code", 5, 4, 0, 12, None, "x")]  # fmt: skip
    found = asdict(summarize(turns))
    evidence.outputs["bench-k2"] |= found | {"categories": {"code": found, "docs": found}}
    evidence.outputs["bench-k2"]["quality"] = {"docs": {"degenerate": True}}
    ours, table = tables_of(evidence)[:2]
    assert table.columns == ["", "code", "docs", "average"] and table.rows == [["2 drafts", "1.75", "", "1.75"]]
    assert ours.rows == [["code", "1.600", "2.000"], ["docs", "1.400", ""], ["all", "1.500", "2.000"]]
    page = prove_html(evidence, judge(evidence))
    for words in ("by category, greedy", "definition of NVIDIA", "turns pooled", "tokens per second by concurrency",
                  "other workloads", "Launches", ": proved", "NVIDIA B200", "trtllm 1.3.0rc20"):  # fmt: skip
        assert words in page, words


def test_acceptance_on_degenerate_output_is_no_figure_and_passes_nothing(evidence: ProveEvidence) -> None:
    """Loops and noise: the figures of their steps stand in no table, and their lines are skipped."""
    outputs = evidence.outputs
    for name in ("bench-k1", "bench-sampled", "bench-warm", "bench-long-300"):
        outputs[name]["degeneration"] = {"degenerate": True}
    outputs["bench-k1"]["quality"] = {"docs": {"degenerate": True}, "code": {"degenerate": True}}
    lines = {name: line for name, line in judged(evidence).items() if name.startswith("acceptance")}
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


def test_the_mode_is_part_of_every_figures_name_and_of_every_request(evidence: ProveEvidence) -> None:
    setup = replace(SETUP, thinking="medium")
    asked = {step.name: step.words for step in steps_of(setup) if step.words[0] == "bench"}
    assert len(asked) == 8 and all("--thinking medium" in " ".join(words) for words in asked.values())
    evidence, mode = replace(evidence, setup=setup), ", medium reasoning"
    assert all(mode in table.title for table in tables_of(evidence)[:4])
    names = [name for name in judged(evidence) if name.startswith(("acceptance", "speed", "plan: step"))]
    assert len(names) == 11 and all(mode in name for name in names), names


def test_a_run_with_other_options_or_over_a_file_is_refused(tmp_path: Path) -> None:
    Journal(tmp_path / "proof" / "journal.jsonl", proof_header(SETUP)).close()
    words = (*PROVE, "--backend", "trtllm", "--draft-len", "2", "--gpu", "b200", "--gpus", "4", "--samples", "8",
             "--max-tokens", "64", "--concurrency", "1,4", "--contexts", "100,300")  # fmt: skip
    for more, why in ((("--thinking", "on"), "proof.thinking"), (("--", "--dtype", "auto"), "proof.serve_words")):
        done = trtspec(*words, "-o", tmp_path / "proof", *more)
        assert done.status == 2 and why in done.stderr, done.stderr
    done = trtspec(*words, "-o", tmp_path / "proof" / "journal.jsonl")
    assert done.status == 2 and "journal.jsonl is a file" in done.stderr, done.stderr


def test_a_resume_with_another_file_or_engine_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Small files are known by their hash, so that a copy of the same bytes goes on; large ones by size and time."""
    monkeypatch.setattr("trtspec.cli.prove_run.SMALL", 64)
    monkeypatch.setattr("trtspec.cli.prove_run.steps_of", lambda setup: [])
    monkeypatch.setattr(ProofRun, "serve", lambda self, launch: None)
    monkeypatch.chdir(tmp_path)
    Path("head").mkdir()
    config, weights, data, template = (Path(name) for name in ("head/config.json", "head/model.safetensors",
                                                               "questions.jsonl", "template.jinja"))  # fmt: skip
    for file, text in ((config, "{}"), (weights, "w" * 100), (data, '{"prompt": "hello old", "category": "a"}\n'),
                       (template, "{{ messages }}")):  # fmt: skip
        file.write_text(text)
    words = ("--", "--chat-template=template.jinja", "--overrides", '{"a": "' + 300 * "b" + '"}')
    setup = replace(SETUP, target=str(tmp_path), head=absolute("head"), dataset=absolute("questions.jsonl"),
                    backend="reference", gpu=None, serve_words=words)  # fmt: skip

    def resume() -> None:
        run_proof(setup, tmp_path / "proof", 1.0, False)

    resume()
    config.unlink()
    config.write_text("{}")
    resume()
    for file, other in ((config, '{"changed": 1}'), (weights, "v" * 100), (template, "{{ tools }}"),
                        (data, '{"prompt": "hi", "category": "b"}\n')):  # fmt: skip
        about, was = file.stat(), file.read_text()
        file.write_text(other)
        os.utime(file, ns=(about.st_atime_ns, about.st_mtime_ns + 10**9))
        with pytest.raises(UsageError, match=file.name.replace(".", r"\.")):
            resume()
        file.write_text(was)
        os.utime(file, ns=(about.st_atime_ns, about.st_mtime_ns))
        resume()
    monkeypatch.setattr("trtspec.cli.prove_run.engine_version", lambda backend: "another")
    with pytest.raises(UsageError, match='engine was .* now "another"'):
        resume()


def test_what_a_proof_keeps_is_for_its_owner_and_has_no_secret_of_the_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine prints its own arguments; here also over files that an earlier release left open to others."""
    monkeypatch.setattr("trtspec.cli.prove_run.steps_of", lambda setup: [ProveStep("zen", ("--zen",))])
    monkeypatch.setattr("trtspec.cli.prove_run.launches", lambda setup: ["plain"])
    words = ("--max-seq-len", "512", "--api-key", "s3cr3tvalue99", "--", "--hf-token=hf_abcdefghijklmnop")
    setup = replace(SETUP, target=str(tmp_path / "missing"), backend="reference", gpu=None, serve_words=words)
    proof = tmp_path / "proof"
    (proof / "work").mkdir(parents=True)
    files = [proof / name for name in ("journal.jsonl", "verdict.json", "report.html")]
    files += [proof / "work" / name for name in ("zen.out", "zen.err", "serve-plain.log")]
    before = os.umask(0)
    try:
        files[0].touch()
        files[-1].touch()
        lines = prove_all(setup, proof, 0.1, False)
    finally:
        os.umask(before)
    assert [line.name for line in lines[:2]] == ["zen", "serve-plain"]
    assert {file.name: oct(file.stat().st_mode & 0o777) for file in files} == {file.name: "0o600" for file in files}
    assert "s3cr3tvalue99" not in files[0].read_text() and "hf_abc" not in files[0].read_text()


def test_relative_paths_are_known_as_what_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models" / "kimi").mkdir(parents=True)
    (tmp_path / "own.jsonl").write_text('{"prompt": "x"}\n')
    done = trtspec("prove", "models/kimi", "--head", PAIR[1], "--dataset", "own.jsonl", "--backend", "reference",
                   "--dry-run", "--json")  # fmt: skip
    commands = " ".join(row["command"] for row in json.loads(done.stdout)["steps"])
    assert f" {tmp_path}/models/kimi " in commands and f" {tmp_path}/own.jsonl" in commands
    assert " models/" not in commands and " own" not in commands and f" {PAIR[1]} " in commands
    assert absolute("mt-bench=own.jsonl") == f"mt-bench={tmp_path}/own.jsonl" and absolute("mt-bench") == "mt-bench"
