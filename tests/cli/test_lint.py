"""`trtspec lint` as a command: excerpts, many files, --strict, --fix, --diff, --json on failure."""

import io
import os
import stat
import sys
import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from tests.command_line import Done, problem_codes, ran, trtspec

VERSION = ("--trtllm-version", "1.3.0rc20")
CLEAN = "stream_interval: 2\n"
WARNS = "gms_config: {tag: weights}\n"
RENAMED = "kv_cache_dtype: fp8  # as measured\n"


def lint(*words: str, text: str = "", **environment: str) -> Done:
    """The command in this process; `text` is its standard input."""
    with mock.patch.object(sys, "stdin", io.TextIOWrapper(io.BytesIO(text.encode()))):
        return trtspec("lint", *words, **environment)


@pytest.fixture
def files(tmp_path: Path) -> dict[str, str]:
    texts = {"clean": CLEAN, "warns": WARNS, "renamed": RENAMED}
    texts |= {"broken": "a: [1\n", "typo": "# c\nmax_batch_sise: 8\n", "others": "prompt: a\n"}
    for name, text in texts.items():
        (tmp_path / f"{name}.yml").write_text(text)
    return {name: str(tmp_path / f"{name}.yml") for name in [*texts, "missing"]}


def answer(*words: str, **more: Any) -> tuple[int, dict[str, Any]]:
    done = lint(*words, "--json", **more)
    return done.status, done.json


def test_each_problem_shows_its_line_with_carets(files: dict[str, str]) -> None:
    done = lint(files["typo"], *VERSION)
    assert done.status == 3 and "\x1b" not in done.stdout
    lines = done.stdout.splitlines()
    assert lines[0].startswith(f"error   TS-LINT-UNKNOWN-KEY {files['typo']}:2:1 max_batch_sise: ")
    below = ["2 | max_batch_sise: 8", "| ^^^^^^^^^^^^^^", "-> did you mean max_batch_size?"]
    assert [line.strip() for line in lines[1:4]] == below
    assert lines[1].index("max_batch_sise") == lines[2].index("^")


def test_colour_on_a_terminal_and_none_with_no_color(files: dict[str, str]) -> None:
    command = f"{sys.executable} -m trtspec lint {files['typo']} {' '.join(VERSION)}"
    for no_color, coloured in (("", True), ("1", False)):
        environment = {**os.environ, "TERM": "xterm-256color"} | (
            {"NO_COLOR": no_color} if no_color else {}
        )
        done = ran("script", "-qec", command, "/dev/null", env=environment)
        assert done.status == 3 and ("\x1b[1;31m" in done.stdout) == coloured


def test_several_files_are_judged_and_one_that_is_missing_hides_none(files: dict[str, str]) -> None:
    names = [files[name] for name in ("clean", "typo", "missing", "broken")]
    done = lint(*names, *VERSION)
    assert done.status == 2 and f"{files['missing']}: not judged" in done.stderr
    for part in ("no errors for", "TS-LINT-UNKNOWN-KEY", "TS-LINT-SYNTAX"):
        assert part in done.stdout
    assert "not judged" not in done.stdout
    status, found = answer(*names, *VERSION)
    assert status == 2 and found["ok"] is False and found["version"] is None
    assert [item["ok"] for item in found["files"]] == [True, False, False, False]
    assert found["files"][2]["error"]["code"] == "TS-ERROR-FILE"
    assert problem_codes(found) == {
        "TS-LINT-UNKNOWN-KEY",
        "TS-LINT-SYNTAX",
    }
    assert lint(files["clean"], files["typo"], *VERSION).status == 3
    done = lint(files["clean"], files["others"])
    assert done.status == 3 and "its keys (prompt) are another tool's" in done.stdout
    assert lint(files["clean"], files["warns"], *VERSION).status == 0


def test_one_file_keeps_its_contract(files: dict[str, str]) -> None:
    status, found = answer(files["typo"], *VERSION)
    assert status == 3 and {"ok", "version", "version_reason", "problems", "fixed"} <= set(found)
    assert {"code", "severity", "where", "message", "remedy"} <= set(found["problems"][0])
    assert (found["ok"], found["version"]) == (False, VERSION[1])
    place = {key: found["problems"][0][key] for key in ("line", "column", "key", "fixable")}
    assert place == {"line": 2, "column": 1, "key": "max_batch_sise", "fixable": False}


def test_strict_counts_warnings(files: dict[str, str]) -> None:
    assert lint(files["warns"], *VERSION).status == 0
    done = lint(files["warns"], *VERSION, "--strict")
    assert done.status == 3 and "--strict" in done.stderr
    assert lint(files["warns"], *VERSION, TRTSPEC_LINT_STRICT="1").status == 3
    assert lint(files["clean"], *VERSION, "--strict").status == 0


def test_diff_alone_writes_nothing_and_with_fix_it_does(files: dict[str, str]) -> None:
    path = Path(files["renamed"])
    path.chmod(0o600)
    done = lint(files["renamed"], *VERSION, "--diff")
    assert done.status == 3 and path.read_text() == RENAMED
    wanted = [
        "-kv_cache_dtype: fp8  # as measured",
        "+# as measured",
        "+kv_cache_config: {dtype: fp8}",
    ]
    assert done.stdout.splitlines()[3:6] == wanted
    assert answer(files["renamed"], *VERSION)[1]["problems"][0]["fixable"] is True
    link = path.with_name("link.yml")
    link.symlink_to(path)
    done = lint(str(link), *VERSION, "--diff", "--fix")
    assert done.status == 0 and done.stdout.splitlines()[3:6] == wanted
    assert path.read_text() == "# as measured\nkv_cache_config: {dtype: fp8}\n"
    assert link.is_symlink() and stat.S_IMODE(path.stat().st_mode) == 0o600


def test_standard_input(files: dict[str, str]) -> None:
    status, found = answer("-", *VERSION, text=RENAMED)
    assert status == 3 and found["file"] == "<stdin>"
    assert lint("-", *VERSION, text=CLEAN).status == 0
    assert lint("-", *VERSION, "--fix", text=CLEAN).status == 2


def test_options_of_trtllm_serve_follow_two_dashes(files: dict[str, str]) -> None:
    words = ["--", "--max_batch_size", "8", "--nonsense", "1"]
    done = lint("--json", *VERSION, files["clean"], files["warns"], *words)
    found = done.json
    assert done.status == 3 and len(found["files"]) == 2
    assert {problem["key"] for problem in found["problems"] if problem["severity"] == "error"} == {
        "--nonsense"
    }
    assert lint(*VERSION, *words).status == 2


@pytest.mark.parametrize(
    "words", [("--bogus",), (), ("--gpu", "b9000"), ("--trtllm-version", "one")]
)
def test_json_is_printed_on_every_failure(files: dict[str, str], words: tuple[str, ...]) -> None:
    status, found = answer(
        *([files["clean"]] if words else []), *VERSION[: 0 if len(words) == 2 else 2], *words
    )
    assert (
        status == 2
        and found["ok"] is False
        and set(found["error"]) == {"code", "message", "remedy"}
    )


LONG = "x" * 5000
MALFORMED = {
    "brackets": "[" * 50_000,  # and what else is no YAML: tests/trtllm/test_nodes.py
    "beyond floats": (
        "max_batch_size: 1.0e+400\nkv_cache_config: {free_gpu_memory_fraction: .nan}\n"
    ),
    "many digits": f"max_batch_size: {'9' * 390}\nmax_seq_len: 0x{'f' * 390}\n",
    "many unknown keys": "".join(f"key_{n}: {n}\n" for n in range(14_000)),
    "odd keys": "~: 1\ntrue: 2\n1.5: 3\n'': 4\n'a.b': 5\n",
    "odd values": (
        "speculative_config: !!set {a, b}\n"
        "moe_config: !!omap [{a: 1}]\n"
        "kv_cache_config: 2001-01-01\n"
    ),
    "long names": (
        f"moe_config: {{load_balancer: {LONG}}}\n"
        f"speculative_config: {{speculative_model_dir: {LONG}}}\n"
    ),
    "a first line that is cut off": (
        "# TensorRT-LLM 1.4.0rc1: trtspec build-config 'x\nstream_interval: 2\n"
    ),
}


@pytest.mark.parametrize("text", MALFORMED.values(), ids=MALFORMED.keys())
@pytest.mark.clock
def test_no_file_ends_in_a_traceback_or_takes_long(tmp_path: Path, text: str) -> None:
    file = tmp_path / "engine.yml"
    file.write_text(text)
    began = time.process_time()
    done = lint(str(file), *VERSION, "--json")
    assert time.process_time() - began < 5
    assert done.status in (0, 2, 3), done.stderr[:200]
    assert "unexpected" not in done.stderr and isinstance(done.json["ok"], bool)
