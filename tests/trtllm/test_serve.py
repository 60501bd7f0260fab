"""`trtspec serve`, `lint` and `build-config` as commands: statuses, streams, dry runs."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from tests.cases import table
from tests.command_line import problem_codes, trtspec
from trtspec.data_files import DATA, kimi_nano_dir
from trtspec.errors import CheckFailed
from trtspec.launch.serve_options import ServeOptions
from trtspec.verbs.serve import plan_engine

CASES = table(__file__)

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
        "trtllm-serve nvidia/Kimi-K2.5-NVFP4 --host 0.0.0.0 --port 8000 --backend pytorch "
        "--max_batch_size 32 --max_num_tokens 8192 --max_seq_len 8192 --tp_size 4 "
    )
    assert first.endswith("--extra_llm_api_options extra-llm-api-config.yml")
    assert "speculative_model_dir: nvidia/Kimi-K2.5-Eagle3" in answer.stdout
    assert "TS-SERVE-REMOTE-CODE" in answer.stderr


def test_the_line_of_a_model_card_is_taken_as_it_is(tmp_path: Path) -> None:
    file = tmp_path / "extra.yml"
    file.write_text("moe_config: {backend: TRTLLM}\n")
    card = (
        "nvidia/Kimi-K2.5-NVFP4 --backend pytorch --max_num_tokens 8192 --tp_size 4 "
        "--extra_llm_api_options"
    )
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
    [*CASES["errors"], (["lint", RECIPE, "--head", K25[0]], 2, "TS-HEAD-FULL-MODEL")],
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
    CASES["clusters"],
)
def test_a_cluster_that_cannot_work_is_refused(words: list[str], code: str) -> None:
    answer = dry(*K25, *WORLD, *words)
    errors = {problem["code"] for problem in answer["problems"] if problem["severity"] == "error"}
    assert answer["status"] == 3 and errors == {code}


@pytest.mark.parametrize(
    ("words", "says"),
    CASES["contradictions"],
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
    vllm = tmp_path / "VLLM"
    vllm.write_text("max-num-seqs: 8\n")
    places = {"FILE": file, "WRITTEN": written, "PIPE": pipe, "CUT": cut, "VLLM": vllm}
    answer = trtspec("serve", K25[0], *(places.get(word, word) for word in words), "--dry-run")
    assert answer.status == 2 and says in answer.stderr, answer.stderr


def test_json_is_printed_for_a_failure_too() -> None:
    launched = trtspec("serve", K25[0], "--json", PATH="/usr/bin:/bin")
    assert launched.status == 4 and json.loads(launched.stdout)["argv"][0] == "trtllm-serve"


CONTEXT, GENERATION = "context_servers: {urls: ['a:1']}\n", "generation_servers: {urls: ['b:1']}\n"


@pytest.mark.parametrize(
    ("text", "says"),
    CASES["fronts"],
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
    CASES["front_commands"],
)
def test_a_front_as_a_command(
    tmp_path: Path, target: str, text: str, status: int, says: str
) -> None:
    file = tmp_path / "front.yml"
    file.write_text(text)
    answer = trtspec("serve", target, "--disaggregated", str(file), "--dry-run")
    assert answer.status == status and says in answer.stderr and "Traceback" not in answer.stderr
