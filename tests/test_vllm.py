"""`trtspec serve --backend vllm` without vLLM: published commands, releases, and refusals."""

import json
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from packaging.version import Version

from tests.cases import table
from tests.command_line import program, succeeded, trtspec
from tests.tiny import make_head, make_target
from trtspec.checkpoint.heads.dialects import DIALECTS
from trtspec.checkpoint.hub import Head, find_target, load_head
from trtspec.data_files import documented, load_yaml
from trtspec.errors import UsageError
from trtspec.formats import WeightFormat
from trtspec.launch.serve_options import ServeOptions
from trtspec.vllm import ENGINE, PROGRAM, _head_problems, plan_vllm

CASES = table(__file__)

ADDRESS = ["--host", "localhost", "--port", "8000"]
KIMI = [
    "--tool-call-parser",
    "kimi_k2",
    "--enable-auto-tool-choice",
    "--reasoning-parser",
    "kimi_k2",
]
# as published: the head's card; vllm-project/recipes for K2.6 at 0cc59121; the announcement of
# EAGLE 3.1 (2026-05-26)
PUBLISHED = {
    "lightseek, K2.5": (
        "vllm serve moonshotai/Kimi-K2.5 --tensor-parallel-size 8 --speculative-config "
        """'{"model": "lightseekorg/kimi-k2.5-eagle3-mla", "method": "eagle3", """
        """"num_speculative_tokens": 3}' """
        "--trust-remote-code"
    ),
    "lightseek, K2.6": (
        "vllm serve moonshotai/Kimi-K2.6 --tensor-parallel-size 8 --speculative-config "
        """'{"model":"lightseekorg/kimi-k2.6-eagle3-mla","method":"eagle3","""
        """"num_speculative_tokens":3}' """
        "--trust-remote-code"
    ),
    "EAGLE 3.1": (
        "vllm serve nvidia/Kimi-K2.6-NVFP4 --tensor-parallel-size 4 --speculative-config "
        """'{"model":"lightseekorg/kimi-k2.6-eagle3.1-mla","method":"eagle3","""
        """"num_speculative_tokens":3}' """
        "--trust-remote-code"
    ),
}


def dry(*words: str) -> dict[str, Any]:
    split = words.index("--") if "--" in words else len(words)
    answer = trtspec(
        "serve", *words[:split], "--backend", "vllm", "--dry-run", "--json", *words[split:]
    )
    return {"status": answer.status, **answer.json}


def codes(answer: dict[str, Any], severity: str = "error") -> set[str]:
    return {problem["code"] for problem in answer["problems"] if problem["severity"] == severity}


def meaning(words: list[str]) -> list[Any]:
    return [json.loads(word) if word.startswith("{") else word for word in words]


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_dry_run_begins_with_the_published_command(name: str) -> None:
    """A dry run has the published command's words, JSON by meaning, and then its defaults."""
    published = shlex.split(PUBLISHED[name])
    settings = json.loads(published[6])
    answer = dry(
        published[2], "--head", settings["model"], "--tp-size", published[4], "--trust-remote-code"
    )
    assert answer["status"] == 0, answer["problems"]
    assert meaning(answer["argv"]) == meaning([*published, *ADDRESS, *KIMI])
    assert answer["config"] == {"speculative_config": settings} and not codes(answer)
    assert answer["env"]["VLLM_NO_USAGE_STATS"] == "1"


def test_instruct_gets_no_reasoning_parser_and_words_of_the_user_come_last() -> None:
    argv = dry("moonshotai/Kimi-K2-Instruct", "--trust-remote-code", "--", "--max_logprobs", "5")[
        "argv"
    ]
    assert "--reasoning-parser" not in argv and argv[-2:] == ["--max_logprobs", "5"]
    own = dry("moonshotai/Kimi-K2.5", "--trust-remote-code", "--", "--tool-call-parser", "hermes")[
        "argv"
    ]
    assert own.count("--tool-call-parser") == 1 and "--enable-auto-tool-choice" not in own


@pytest.mark.parametrize(
    ("words", "found"),
    CASES["errors"],
)
def test_what_cannot_start_is_an_error_before_the_launch(
    words: list[str], found: list[str]
) -> None:
    answer = dry("moonshotai/Kimi-K2.6", "--trust-remote-code", *words)
    assert codes(answer) == set(found) and answer["status"] == (3 if found else 0)


def test_a_key_travels_in_the_environment_and_is_never_shown() -> None:
    words = ("moonshotai/Kimi-K2.5", "--trust-remote-code", "--api-key", "sesame")
    plan = plan_vllm(
        ServeOptions(target=words[0], backend="vllm", api_key="sesame"), launching=False
    )
    assert plan.secrets == {"VLLM_API_KEY": "sesame"} and plan.endpoint.api_key == "sesame"
    assert "sesame" not in repr(plan) + json.dumps(plan.to_dict()) + plan.text()
    assert dry(*words)["env"]["VLLM_API_KEY"] == "(not shown)"


def test_code_of_the_checkpoint_is_refused_until_it_is_trusted() -> None:
    start = ServeOptions(target="moonshotai/Kimi-K2.5", backend="vllm")
    launched = plan_vllm(start, launching=True).problems
    assert "TS-SERVE-REMOTE-CODE" in {one.code for one in launched if one.severity == "error"}
    assert "TS-SERVE-REMOTE-CODE" in codes(dry("moonshotai/Kimi-K2.5"), "warning")


@pytest.mark.parametrize(
    ("words", "says"),
    CASES["contradictions"],
)
def test_what_contradicts_itself_is_refused_by_name(words: list[str], says: str) -> None:
    split = words.index("--") if "--" in words else len(words)
    before, after = words[:split], words[split:]
    answer = trtspec(
        "serve", "moonshotai/Kimi-K2.5", *before, "--backend", "vllm", "--dry-run", *after
    )
    assert answer.status == 2 and says in answer.stderr, answer.stderr


def test_options_of_the_user_go_to_vllm_as_they_are() -> None:
    """In every spelling that vLLM reads; what it does not know is its own to refuse."""
    words = shlex.split(
        "--cudagraph_capture_sizes 1 2 4 --no-enable-prefix-caching --kv_cache_dtype=fp8 --seed -1 "
        "-cc.mode 3 --max-nun-seqs 3 --block-size"
    )
    answer = dry("moonshotai/Kimi-K2.6", "--trust-remote-code", "--", *words)
    assert answer["status"] == 0 and answer["argv"][-len(words) :] == words
    split = (
        "--tp-size",
        "3",
        "--",
        "-ep",
    )  # experts as a whole: only the attention heads still have to divide
    messages = [
        one["message"]
        for one in dry("moonshotai/Kimi-K2.6", "--trust-remote-code", *split)["problems"]
    ]
    (message,) = [message for message in messages if "divide" in message]
    assert message == "the 64 attention heads do not divide by tensor-parallel size 3"


def test_the_file_of_releases_is_whole() -> None:
    data = load_yaml("vllm.yaml")
    assert Version(data["oldest"]) < Version(data["newest"])
    assert set(data["formats"]) == {format.value for format in WeightFormat}
    assert {code for code in documented() if code.startswith("TS-VLLM-")}


def test_a_head_of_this_machine_is_judged_by_its_file(tmp_path: Path) -> None:
    target = make_target(tmp_path / "target", layers=8)
    head = make_head(tmp_path / "head", target, attention="mla")
    answer = dry(str(target), "--head", str(head), "--tp-size", "1")
    assert "TS-VLLM-HEAD-LAYOUT" in codes(answer)
    remedy = next(
        one["remedy"] for one in answer["problems"] if one["code"] == "TS-VLLM-HEAD-LAYOUT"
    )
    words = shlex.split(remedy.partition(",")[0].replace("HEAD-vllm", str(tmp_path / "converted")))
    succeeded(*words[1:])
    assert not codes(dry(str(target), "--head", str(tmp_path / "converted"), "--tp-size", "1"))


def test_a_start_that_the_release_refuses_ends_with_its_status_and_the_cause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A program called vllm that says what vLLM says to an option it does not have."""
    (tmp_path / "lib" / "python3.11" / "site-packages" / "vllm-0.32.0+cpu.dist-info").mkdir(
        parents=True
    )
    vllm = program(
        tmp_path / "bin" / "vllm", "echo 'vllm: error: unrecognized arguments: -x'\nexit 2"
    )
    monkeypatch.setenv("PATH", f"{vllm.parent}:/usr/bin:/bin")
    assert PROGRAM.version() == "0.32.0"
    target = make_target(tmp_path / "target", layers=2)
    words = ("serve", str(target), "--backend", "vllm", "--tp-size", "1", "--port", "21311")
    answer = trtspec(*words)
    assert answer.status == 2 and "refuses an option of the command line" in answer.stderr, (
        answer.stderr
    )
    asked = trtspec(*words, "--vllm-version", "0.31.0")
    assert asked.status == 3 and "TS-SERVE-OTHER-ENGINE" in asked.stderr
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    missing = trtspec(*words)
    assert missing.status == 4 and "vllm is not on PATH" in missing.stderr


def test_a_plan_of_python_raises_what_the_command_prints() -> None:
    with pytest.raises(UsageError, match="draft head, not a target"):
        plan_vllm(ServeOptions(target="nvidia/Kimi-K2.5-Eagle3", backend="vllm"), launching=False)


def test_the_file_that_build_config_writes_starts_the_same_server(tmp_path: Path) -> None:
    pair = ["nvidia/Kimi-K2.6-NVFP4", "--head", "lightseekorg/kimi-k2.6-eagle3.1-mla"]
    sizes = ["--tp-size", "4", "--max-seq-len", "32768", "--trust-remote-code"]
    path = tmp_path / "vllm.yml"
    succeeded("build-config", *pair, *sizes, "--format", "vllm", "-o", path)
    by_options, by_file = dry(*pair, *sizes), dry(pair[0], "--config", str(path))
    assert by_file["status"] == 0 and sorted(meaning(by_file["argv"]), key=str) == sorted(
        meaning(by_options["argv"]), key=str
    )
    assert by_file["config"] == by_options["config"]


def test_commits_are_revisions_of_the_engine_also_from_its_file(tmp_path: Path) -> None:
    pair = ["nvidia/Kimi-K2.6-NVFP4@v1", "--head", "lightseekorg/kimi-k2.6-eagle3.1-mla@abc1234"]
    pair += ["--tp-size", "8"]
    path = tmp_path / "vllm.yml"
    succeeded("build-config", *pair, "--format", "vllm", "-o", path)
    by_options, by_file = dry(*pair), dry(pair[0], "--config", str(path))
    assert (
        by_options["argv"][2] == "nvidia/Kimi-K2.6-NVFP4" and by_options["argv"] == by_file["argv"]
    )
    assert by_options["argv"][by_options["argv"].index("--revision") + 1] == "v1"
    speculation = by_options["config"]["speculative_config"]
    assert (speculation["model"], speculation["revision"]) == (pair[2].partition("@")[0], "abc1234")
    other = dry("nvidia/Kimi-K2.6-NVFP4@v2", "--config", str(path))
    assert other["status"] == 2 and "nvidia/Kimi-K2.6-NVFP4@v1" in other["error"]["message"]


@pytest.mark.parametrize(
    ("text", "says"),
    CASES["files"],
)
def test_what_a_file_cannot_say_is_refused(text: str, says: str, tmp_path: Path) -> None:
    (tmp_path / "vllm.yml").write_text(text)
    answer = dry("moonshotai/Kimi-K2.6", "--config", str(tmp_path / "vllm.yml"), "--tp-size", "8")
    assert (
        answer["status"] == 2
        and says in f"{answer['error']['message']} {answer['error']['remedy']}"
    )


def test_a_head_here_is_judged_by_its_file_and_not_by_where_it_was_published(
    tmp_path: Path,
) -> None:
    """A cached copy of a head that was published for vLLM, in a layout that vLLM does not read."""
    known = load_head("lightseekorg/kimi-k2.5-eagle3-mla")
    target = find_target("moonshotai/Kimi-K2.5")
    other = next(name for name in DIALECTS if not DIALECTS[name].served_by(ENGINE, known.spec))
    here = Head(replace(known.resolved, path=tmp_path), replace(known.spec, dialect=other))
    options = ServeOptions(target="moonshotai/Kimi-K2.5", head=known.resolved.name, backend="vllm")
    found = {problem.code for problem in _head_problems(options, here, target)}
    assert "TS-VLLM-HEAD-LAYOUT" in found
