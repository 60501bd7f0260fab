"""Options after `--` against the schema, and one place for each setting."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cases import table
from trtspec.checkpoint.hub import find_target
from trtspec.trtllm.deployment import parse_passed
from trtspec.trtllm.document import Document
from trtspec.trtllm.intent import Intent
from trtspec.trtllm.schema import schema_for
from trtspec.trtllm.serve.command import build_command

TARGET = "nvidia/Kimi-K2.6-NVFP4"


def codes(words: list[str], version: str = "1.3.0rc20") -> list[str]:
    return [problem.code for problem in parse_passed(schema_for(version), words)[1]]


@pytest.mark.parametrize(
    ("words", "expected"),
    table(__file__),
)
def test_passed_options_are_checked(words: list[str], expected: list[str]) -> None:
    assert codes(words) == expected


def test_an_option_that_nobody_has_seen_in_this_line_is_a_warning() -> None:
    assert codes(["--served_model_name", "kimi"], "1.2.1") == ["TS-SERVE-OPTION-UNCERTAIN"]
    assert codes(["--num_serve_frontends", "2"], "1.4.0rc1") == []


def command(
    passed: list[str],
    text: str = "",
    explicit: dict[str, int] | None = None,
    version: str = "1.3.0rc20",
) -> list[str]:
    return build_command(
        Intent(target=TARGET, version=version, trust_remote_code=True),
        find_target(TARGET).spec,
        Document.parse(text, "c"),
        sizes=explicit,
        passed=passed,
    )


def test_a_passed_option_replaces_ours() -> None:
    argv = command(["--max_seq_len", "100", "--reasoning_parser", "auto"])
    assert argv.count("--max_seq_len") == 1 and argv[argv.index("--max_seq_len") + 1] == "100"
    assert (
        argv.count("--reasoning_parser") == 1
        and argv[argv.index("--reasoning_parser") + 1] == "auto"
    )


def test_what_stands_in_the_file_is_not_repeated_unless_typed() -> None:
    text = "max_batch_size: 8\ntensor_parallel_size: 8\ntrust_remote_code: true\n"
    argv = command([], text)
    assert not {"--max_batch_size", "--tp_size", "--trust_remote_code"} & set(argv)
    assert "--max_batch_size" in command([], text, {"max_batch_size": 16})


def test_every_argv_parses_with_the_schema_of_its_version() -> None:
    for version in ("1.2.1", "1.3.0rc9", "1.3.0rc20", "1.4.0rc1"):
        words = command([], version=version)[2:]
        passed, problems = parse_passed(schema_for(version), words)
        assert not problems and len(passed) >= 8


def test_parsers_follow_the_model() -> None:
    def parser(target: str) -> str | None:
        intent = Intent(target=target, version="1.4.0rc1")
        argv = build_command(intent, find_target(target).spec, Document.parse("", "c"))
        assert argv[argv.index("--tool_parser") + 1] == "kimi_k2"
        return argv[argv.index("--reasoning_parser") + 1] if "--reasoning_parser" in argv else None

    assert parser("nvidia/Kimi-K2.7-Code-NVFP4") == "kimi_k25"
    assert parser("nvidia/Kimi-K2-Thinking-NVFP4") == "kimi_k2"
    assert parser("moonshotai/Kimi-K2-Instruct") is None
    assert "kimi_k25" not in command([], version="1.3.0rc9")  # not known to have this one


SLOW = ("torch", "transformers", "huggingface_hub", "httpx", "rich.console", "numpy", "safetensors")
GOOD = """\
speculative_config: {decoding_type: Eagle, max_draft_len: 3, \
speculative_model_dir: nvidia/Kimi-K2.6-Eagle3}
moe_config: {backend: TRTLLM}
"""


def test_lint_imports_nothing_slow(tmp_path: Path) -> None:
    file = tmp_path / "engine.yml"
    file.write_text(GOOD)
    code = f"""
import sys
from trtspec.cli.app import main
sys.argv = ["trtspec", "lint", {str(file)!r}, "--trtllm-version", "1.4.0rc1", \
"--target", "nvidia/Kimi-K2.6-NVFP4"]
try:
    main()
except SystemExit:
    pass
sys.stderr.write("loaded " + " ".join(name for name in {SLOW!r} if name in sys.modules))
"""
    environment = {**os.environ, "HF_HOME": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True
    )
    assert "no errors" in done.stdout
    assert done.stderr.rpartition("loaded ")[2].split() == []
