"""`trtspec serve`, `lint` and `build-config` as commands: statuses, streams, and what a dry run promises."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from tests.command_line import problem_codes, trtspec
from trtspec.data_files import DATA, kimi_nano_dir
from trtspec.errors import CheckFailed
from trtspec.launch.options import ServeOptions
from trtspec.trtllm.serve.start import plan_engine

K25 = ["nvidia/Kimi-K2.5-NVFP4", "--head", "nvidia/Kimi-K2.5-Eagle3"]
RECIPE = str(Path(__file__).parents[2] / "configs" / "kimi-k2.5-nvfp4-eagle3-4xb200-latency.yml")


@pytest.fixture(autouse=True)
def no_variables_of_trtllm(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("TLLM_")]:
        monkeypatch.delenv(name)


def dry(*words: str, **env: str) -> dict[str, Any]:
    answer = trtspec("serve", "--dry-run", "--json", *words, **env)
    return {"status": answer.status, **json.loads(answer.stdout)}


def test_dry_run_prints_the_model_cards_command() -> None:
    answer = trtspec("serve", *K25, "--host", "0.0.0.0", "--tp-size", "4", "--dry-run")
    assert answer.status == 0, answer.stderr
    first = answer.stdout.splitlines()[0]
    assert first.startswith(
        "trtllm-serve nvidia/Kimi-K2.5-NVFP4 --host 0.0.0.0 --port 8000 --backend pytorch --max_batch_size 32 "
        "--max_num_tokens 8192 --max_seq_len 8192 --tp_size 4 "
    )
    assert first.endswith("--extra_llm_api_options extra-llm-api-config.yml")
    assert "speculative_model_dir: nvidia/Kimi-K2.5-Eagle3" in answer.stdout
    assert "TS-SERVE-REMOTE-CODE" in answer.stderr


def test_the_line_of_a_model_card_is_taken_as_it_is(tmp_path: Path) -> None:
    file = tmp_path / "extra.yml"
    file.write_text("moe_config: {backend: TRTLLM}\n")
    card = "nvidia/Kimi-K2.5-NVFP4 --backend pytorch --max_num_tokens 8192 --tp_size 4 --extra_llm_api_options"
    answer = dry(*card.split(), str(file), "--trust_remote_code")
    assert answer["status"] == 0 and answer["argv"][-2:] == ["--extra_llm_api_options", str(file)]


def test_dry_run_json_has_the_contracts_keys() -> None:
    answer = dry(*K25, "--trust-remote-code")
    assert {"argv", "env", "config", "problems"} <= set(answer)
    assert answer["config"]["speculative_config"]["max_draft_len"] == 3
    assert "--trust_remote_code" in answer["argv"]
    assert "TS-SERVE-REMOTE-CODE" not in problem_codes(answer)


@pytest.mark.parametrize(
    ("release", "status"), [("1.4.0rc1", 0), ("1.3.0rc26", 3), ("1.3.0rc20", 3)]
)
def test_an_unknown_key_is_refused_only_by_a_release_that_was_read(
    tmp_path: Path, release: str, status: int
) -> None:
    file = tmp_path / "engine.yml"
    file.write_text("kv_cache_config: {brand_new_key: 3}\n")
    answer = dry(K25[0], "--config", str(file), "--trtllm-version", release, "--trust-remote-code")
    severity = {p["code"]: p["severity"] for p in answer["problems"]}[
        "TS-LINT-UNKNOWN-KEY" if status else "TS-LINT-KEY-UNCERTAIN"
    ]
    assert (answer["status"], severity) == (status, "error" if status else "warning")


def test_a_recipe_brings_its_sizes(tmp_path: Path) -> None:
    file = tmp_path / "c.yml"
    written = trtspec(
        "build-config", *K25, "--tp-size", "8", "--max-batch-size", "16", "-o", str(file)
    )
    assert written.status == 0, written.stderr
    argv = dry(K25[0], "--config", str(file))["argv"]
    assert (
        argv[argv.index("--tp_size") + 1] == "8"
        and argv[argv.index("--max_batch_size") + 1] == "16"
    )
    assert argv[-1] == str(file)
    typed = dry(K25[0], "--config", str(file), "--tp-size", "4")["argv"]
    assert typed[typed.index("--tp_size") + 1] == "4"


@pytest.mark.parametrize(
    ("head", "dry_run", "launch"),
    [
        ("nvidia/Kimi-K2.5-Eagle3", None, None),
        ("/nowhere/head", "warning", "error"),
        ("<eagle3 checkpoint>", "error", "error"),
        ("nvidia/Kimi-K2.5-Eagel3", "error", "error"),
    ],
)
def test_a_head_that_only_the_file_names_is_looked_up(
    head: str, dry_run: str | None, launch: str | None, tmp_path: Path
) -> None:
    file = tmp_path / "engine.yml"
    file.write_text(json.dumps({"speculative_config": {
        "decoding_type": "Eagle", "max_draft_len": 3, "speculative_model_dir": head}}))  # fmt: skip
    options = ServeOptions(target=K25[0], config=file)
    for launching, severity in ((False, dry_run), (True, launch)):
        found = [
            p
            for p in plan_engine(options, launching=launching).problems
            if p.code.startswith("TS-NAME-")
        ]
        assert [problem.severity for problem in found] == ([severity] if severity else []), found


def test_a_shipped_model_is_its_directory_for_an_engine() -> None:
    for backend in ("trtllm", "vllm"):
        argv = dry(
            "kimi-nano", "--head", "kimi-nano-eagle3", "--backend", backend, "--tp-size", "1"
        )
        words = json.dumps(argv)
        assert str(kimi_nano_dir()) in words and str(DATA / "kimi-nano-eagle3") in words
        assert '"kimi-nano"' not in json.dumps([*argv["argv"][:3], argv["config"]])


def test_a_commit_is_the_revision_of_a_target_and_a_directory_of_a_head() -> None:
    pinned = "nvidia/Kimi-K2.6-NVFP4@v1"
    argv = dry(pinned, "--trust-remote-code")["argv"]
    assert argv[1] == "nvidia/Kimi-K2.6-NVFP4" and argv[argv.index("--revision") + 1] == "v1"
    for words, says in (
        ([pinned, "--", "--revision", "v2"], "names its revision"),
        ([pinned, "--head", "nvidia/Kimi-K2.6-Eagle3@v1"], "--revision v1"),
        ([pinned, "--trtllm-version", "1.2.0"], "hf download nvidia/Kimi-K2.6-NVFP4 --revision v1"),
    ):
        refused = dry(*words)
        error = refused["error"]
        assert refused["status"] == 2 and says in f"{error['message']} {error['remedy']}"


def test_a_bad_request_is_told_at_once_and_ends_with_3() -> None:
    answer = dry(
        *K25, "--", "--no_such_option", "1", TLLM_SPEC_DECODE_FORCE_NUM_ACCEPTED_TOKENS="2"
    )
    codes = problem_codes(answer)
    assert answer["status"] == 3
    assert {"TS-SERVE-OPTION-UNCERTAIN", "TS-LINT-FORCED-ACCEPTANCE"} <= codes


def test_a_setting_in_file_and_option_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "c.yml"
    file.write_text("max_batch_size: 8\n")
    answer = dry(
        K25[0], "--config", str(file), "--max-batch-size", "32", "--trtllm-version", "1.4.0rc1"
    )
    assert answer["status"] == 3 and "TS-LINT-SET-TWICE" in problem_codes(answer)


@pytest.mark.parametrize(
    ("words", "status", "says"),
    [
        (["serve", K25[0]], 4, "trtllm-serve is not on PATH"),
        (["serve", K25[0], "--head", K25[0], "--dry-run"], 2, "TS-HEAD-FULL-MODEL"),
        (
            ["serve", K25[0], "--backend", "reference", "--head", K25[0], "--dry-run"],
            2,
            "TS-HEAD-FULL-MODEL",
        ),
        (["lint", RECIPE, "--head", K25[0]], 2, "TS-HEAD-FULL-MODEL"),
        (
            ["serve", K25[0], "--trtllm-version", "new", "--dry-run"],
            2,
            "not a TensorRT-LLM version",
        ),
        (["serve", K25[0], "--config", "/nowhere.yml", "--dry-run"], 2, "cannot be read"),
        (["serve", "moonshotai/Kimi-K3", "--dry-run"], 1, "K3"),
        (["serve", K25[2], "--backend", "reference"], 2, "is a draft head, not a target"),
        (["serve", K25[0], "--port", "0", "--dry-run"], 2, "port"),
        (["build-config", K25[0], "--set", "max_batch_size=3"], 2, "--max-batch-size"),
        (
            ["build-config", "nvidia/Kimi-K2.6-NVFP4", "--trtllm-version", "1.2.1"],
            3,
            "TS-LINT-MODEL-TOO-NEW",
        ),
    ],
)
def test_errors_are_one_message_with_their_status(words: list[str], status: int, says: str) -> None:
    answer = trtspec(*words, PATH="/usr/bin:/bin")
    assert answer.status == status, answer.stderr
    assert says in answer.stderr and "Traceback" not in answer.stderr
    assert answer.stdout == ""


def test_reference_dry_run_names_every_choice() -> None:
    answer = dry(
        *K25, "--backend", "reference", "--port", "9", "--draft-len", "2", "--dtype", "float32"
    )
    assert answer["status"] == 0
    words = " ".join(answer["argv"])
    assert "--head nvidia/Kimi-K2.5-Eagle3 --backend reference" in words
    assert "--draft-len 2" in words and "--dtype float32" in words


def test_build_config_refuses_to_overwrite_and_dry_run_writes_nothing(tmp_path: Path) -> None:
    file = tmp_path / "c.yml"
    assert (
        trtspec("build-config", *K25, "-o", str(file), "--dry-run").status == 0
        and not file.exists()
    )
    file.write_text("mine\n")
    refused = trtspec("build-config", *K25, "-o", str(file))
    assert refused.status == 2 and file.read_text() == "mine\n"
    assert trtspec("build-config", *K25, "-o", str(file), "--force").status == 0
    assert file.read_text().startswith("# TensorRT-LLM ")


WORLD = ["--tp-size", "8", "--trust-remote-code"]


def test_a_leader_pod_names_its_group_and_starts_one_rank_per_gpu() -> None:
    group = {
        "LWS_LEADER_ADDRESS": "kimi-0.kimi.ns",
        "LWS_GROUP_SIZE": "2",
        "TRITON_CACHE_DIR": "/mine",
    }
    answer = dry(
        *K25,
        *WORLD,
        "--launcher",
        "lws",
        "--nodes",
        "2",
        "--launcher-args",
        "--bind-to 'a b'",
        **group,
    )
    argv = answer["argv"]
    assert argv[:7] == [
        "mpirun",
        "-np",
        "8",
        "-N",
        "4",
        "--host",
        "kimi-0.kimi.ns:4,kimi-0-1.kimi.ns:4",
    ]
    engine = argv.index("trtllm-llmapi-launch")
    assert argv[engine - 4 : engine + 2] == [
        "-x",
        argv[engine - 3],
        "--bind-to",
        "a b",
        argv[engine],
        "trtllm-serve",
    ]
    assert answer["status"] == 0 and answer["env"]["TRITON_CACHE_DIR"] == "/mine"
    assert "-x TRITON_CACHE_DIR -x FLASHINFER_WORKSPACE_BASE" in " ".join(argv)


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["--nodes", "2"], "TS-SERVE-LAUNCHER"),
        (["--nodes", "2", "--gpus-per-node", "8", "--launcher", "lws"], "TS-SERVE-WORLD"),
        (
            ["--nodes", "2", "--launcher", "lws", "--", "--chat_template", "a b.jinja"],
            "TS-SERVE-SPLIT-WORD",
        ),
    ],
)
def test_a_cluster_that_cannot_work_is_refused(words: list[str], code: str) -> None:
    answer = dry(*K25, *WORLD, *words)
    errors = {problem["code"] for problem in answer["problems"] if problem["severity"] == "error"}
    assert answer["status"] == 3 and errors == {code}


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--draft-len", "3"], "--draft-len is not used without --head"),
        (["--backend", "reference", "--draft-len", "3"], "--draft-len is not used without --head"),
        (
            ["--launcher-args", "--hostfile h"],
            "--launcher-args is not used without --launcher lws",
        ),
        (["--launcher", "lws", "--launcher-args", "'"], "does not parse"),
        (["--config", "FILE", "--draft-len", "3"], "--draft-len is not used with --config"),
        (["--", "--host", "1.2.3.4"], "--host is not used after --"),
        (["--", "--config", "other.yml"], "is not used after --: --config decides it"),
        (["--", "--served_model_name", "kimi"], "--served_model_name is not used after --"),
        (
            ["--max-batch-size", "4", "--", "--max_batch_size", "8"],
            "--max_batch_size is given before -- and after it",
        ),
        (["--config", "FILE", "--head", K25[2]], "has no speculative_config"),
        (["--config", "WRITTEN", "--goal", "throughput"], "--goal is not used with --config"),
        (["--config", "-"], "--config - : the engine reads its configuration from a file"),
        (["--disaggregated", "-"], "--disaggregated - : the front reads its file itself"),
        (["--config", "PIPE"], "PIPE cannot be read: it is a pipe"),
        (["--disaggregated", "PIPE"], "PIPE cannot be read: it is a pipe"),
        (["--disaggregated", "CUT"], "CUT:1 cannot be used"),
    ],
)
def test_options_that_contradict_each_other_are_refused(
    tmp_path: Path, words: list[str], says: str
) -> None:
    file, written = tmp_path / "c.yml", tmp_path / "w.yml"
    file.write_text("print_iter_log: true\n")
    written.write_text(
        f"# TensorRT-LLM 1.3.0rc20: trtspec build-config {K25[0]}\nprint_iter_log: true\n"
    )
    pipe, cut = tmp_path / "PIPE", tmp_path / "CUT"
    os.mkfifo(pipe)
    cut.write_text("a: [")
    places = {"FILE": str(file), "WRITTEN": str(written), "PIPE": str(pipe), "CUT": str(cut)}
    answer = trtspec("serve", K25[0], *(places.get(word, word) for word in words), "--dry-run")
    assert answer.status == 2 and says in answer.stderr, answer.stderr


def test_json_is_printed_for_a_failure_too() -> None:
    launched = trtspec("serve", K25[0], "--json", PATH="/usr/bin:/bin")
    assert launched.status == 4 and json.loads(launched.stdout)["argv"][0] == "trtllm-serve"


CONTEXT, GENERATION = "context_servers: {urls: ['a:1']}\n", "generation_servers: {urls: ['b:1']}\n"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (CONTEXT, "generation_servers: Field required"),
        (
            "context_servers: {num_instances: 2, urls: ['a:1']}\n" + GENERATION,
            "is 2 and there are 1 urls",
        ),
        ("context_servers: {urls: ['http://a:1']}\n" + GENERATION, "'http://a:1' is not host:port"),
        ("context_servers: {urls: ['a:70000']}\n" + GENERATION, "'a:70000' is not host:port"),
        (CONTEXT + "generation_servers: {urls: ['a:1']}\n", "a:1 is listed twice"),
        ("port: high\n" + CONTEXT + GENERATION, "port: Input should be a valid integer"),
        ("port: true\n" + CONTEXT + GENERATION, "port: Input should be a valid integer"),
        (
            "context_servers: {urls: []}\n" + GENERATION,
            "context_servers.urls: List should have at least 1 item",
        ),
        ("hostname: [1]\n" + CONTEXT + GENERATION, "hostname: Input should be a valid string"),
        ("hostname: a\nport: 1\n" + CONTEXT + GENERATION, "a:1 is listed twice"),
    ],
)
def test_the_file_of_a_front_is_checked(text: str, says: str) -> None:
    from trtspec.trtllm.serve.front import read_front

    with pytest.raises(CheckFailed) as refused:
        read_front(text, Path("front.yml"))
    assert (
        says in refused.value.message
        and refused.value.code == "TS-SERVE-FRONT"
        and refused.value.remedy
    )


@pytest.mark.parametrize(
    ("target", "text", "status", "says"),
    [
        (K25[0], CONTEXT + GENERATION, 0, "TS-SERVE-FRONT-WAITS"),
        (K25[0], CONTEXT, 3, "generation_servers: Field required"),
        (K25[0], "- a\n", 3, "valid dictionary"),
        # its name decides which servers are called foreign, so a misspelt one would blame them all
        ("/nowhere/at/all", CONTEXT + GENERATION, 2, "neither a directory nor a hub id"),
        (K25[2], CONTEXT + GENERATION, 2, "is a draft head, not a target"),
    ],
)
def test_a_front_as_a_command(
    tmp_path: Path, target: str, text: str, status: int, says: str
) -> None:
    file = tmp_path / "front.yml"
    file.write_text(text)
    answer = trtspec("serve", target, "--disaggregated", str(file), "--dry-run")
    assert answer.status == status and says in answer.stderr and "Traceback" not in answer.stderr
