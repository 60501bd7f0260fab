"""The command line as a whole: what is listed, how fast and how light it starts, how it fails."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.tiny import make_target
from trtspec import errors
from trtspec.cli import app as application

COMMANDS = (
    "demo", "doctor", "inspect", "explain", "quantize", "calibrate", "synthesize", "train", "convert", "plan",
    "build-config", "lint", "serve", "bench", "check", "prove", "watch",
)  # fmt: skip


def trtspec(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """One run in a process of its own, with a wide terminal so that tables do not wrap."""
    variables = {**os.environ, "COLUMNS": "200", **environment}
    start = "import sys; sys.argv[0] = 'trtspec'; from trtspec.cli.app import main; main()"
    command = [sys.executable, "-c", start, *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=variables, timeout=120)


def test_help_lists_every_command() -> None:
    done = trtspec("--help")
    assert done.returncode == 0
    for command in COMMANDS:
        assert f" {command} " in done.stdout, command
    listed = [name for names in application.COMMANDS.values() for name in names]
    assert sorted(listed) == sorted(COMMANDS)


def test_help_imports_no_torch() -> None:
    script = (
        "import sys\n"
        "sys.argv = ['trtspec', '--help']\n"
        "from trtspec.cli.app import main\n"
        "try:\n"
        "    main()\n"
        "except SystemExit as done:\n"
        "    assert done.code == 0, done.code\n"
        "heavy = {'torch', 'numpy', 'transformers', 'modelopt', 'fastapi', 'huggingface_hub', 'httpx'}\n"
        "loaded = heavy & set(sys.modules)\n"
        "assert not loaded, loaded\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_a_help_page(command: str) -> None:
    done = CliRunner().invoke(application.app, [command, "--help"], prog_name="trtspec")
    assert done.exit_code == 0
    assert f"Usage: trtspec {command}" in done.stdout


def test_the_shell_completes_commands_and_options() -> None:
    for words, place, wanted in (("trtspec bu", "1", "build-config"), ("trtspec inspect --ag", "2", "--against")):
        done = trtspec(_TRTSPEC_COMPLETE="complete_bash", COMP_WORDS=words, COMP_CWORD=place)
        assert wanted in done.stdout.split(), words


def test_every_command_is_in_the_readme() -> None:
    readme = (Path(__file__).parent.parent.parent / "README.md").read_text(encoding="utf-8")
    for command in COMMANDS:
        assert f"trtspec {command}" in readme, f"trtspec {command} is not in the README"


def test_version() -> None:
    done = trtspec("--version")
    assert done.returncode == 0
    assert done.stdout.startswith("trtspec ")


def status(*arguments: str, **environment: str) -> int:
    return CliRunner().invoke(application.app, list(arguments), env=environment).exit_code


def test_usage_errors_exit_with_2() -> None:
    assert status("no-such-command") == 2
    assert status("inspect") == 2
    assert status("inspect", "x", "--no-such-option") == 2


def test_underscores_are_accepted_everywhere() -> None:
    assert status("build_config", "--help") == 0
    assert status("lint", "--trtllm_version", "1.2.1", "--help") == 0
    assert status("lint", "--trtllm+version", "1.2.1", "--help") == 2


def test_an_option_can_come_from_the_environment() -> None:
    assert status("inspect", "nvidia/Kimi-K2.5-NVFP4", TRTSPEC_INSPECT_JSON="true") == 0
    assert status("inspect", "nvidia/Kimi-K2.5-NVFP4", TRTSPEC_INSPECT_JSON="perhaps") == 2


def raise_usage(**_: object) -> None:
    raise errors.UsageError("the thing is wrong", "run the other thing")


def raise_check(**_: object) -> None:
    raise errors.CheckFailed("3 of 5 checks failed")


def raise_interrupt(**_: object) -> None:
    raise KeyboardInterrupt


def raise_unexpected(**_: object) -> None:
    raise ZeroDivisionError("division by zero")


def raise_missing(**_: object) -> None:
    raise ModuleNotFoundError("no torch", name="torch.nn")


def raise_with_a_code(**_: object) -> None:
    raise errors.TrtspecError("TS-DATA-ROW data.jsonl:3: not a JSON object", "repair or remove the line")


@pytest.mark.parametrize(
    ("failure", "status", "code"),
    [
        (raise_usage, 2, "TS-ERROR-USAGE"),
        (raise_check, 3, "TS-ERROR-CHECK"),
        (raise_missing, 4, "TS-ERROR-MISSING"),
        (raise_interrupt, 130, "TS-ERROR-INTERRUPTED"),
        (raise_unexpected, 1, "TS-ERROR-UNEXPECTED"),
        (raise_with_a_code, 1, "TS-DATA-ROW"),
    ],
)
def test_with_json_a_failure_is_an_object_on_stdout(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    failure: Callable[..., None], status: int, code: str,
) -> None:  # fmt: skip
    monkeypatch.setattr(application, "app", failure)
    monkeypatch.setattr(sys, "argv", ["trtspec", "lint", "x.yml", "--json"])
    with pytest.raises(SystemExit) as stopped:
        application.main()
    printed = json.loads(capsys.readouterr().out)
    assert stopped.value.code == status
    assert (
        set(printed) == {"ok", "problems", "error"}
        and printed["problems"] == []
        and set(printed["error"]) == {"code", "message", "remedy"}
    )
    assert printed["error"]["code"] == code


@pytest.mark.parametrize("command", [name for name in COMMANDS if name != "demo"])
def test_every_reporting_command_answers_in_json_when_it_is_typed_wrongly(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    monkeypatch.setattr(sys, "argv", ["trtspec", command, "--json", "--no-such-option"])
    with pytest.raises(SystemExit) as stopped:
        application.main()
    printed = capsys.readouterr()
    assert stopped.value.code == 2
    assert json.loads(printed.out)["error"]["remedy"] == f"see `trtspec {command} --help`"
    assert "--no-such-option" in printed.err


def test_a_report_is_never_followed_by_a_second_object(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """A check that fails has printed its own object already."""
    engine = tmp_path / "engine.yml"
    engine.write_text("no_such_key: 1\n")
    monkeypatch.setattr(sys, "argv", ["trtspec", "lint", str(engine), "--trtllm-version", "1.2.1", "--json"])
    with pytest.raises(SystemExit) as stopped:
        application.main()
    assert stopped.value.code == 3
    assert json.loads(capsys.readouterr().out)["ok"] is False


@pytest.mark.parametrize(
    ("failure", "status", "says"),
    [
        (raise_usage, 2, "Usage error: the thing is wrong\n-> run the other thing\n"),
        (raise_check, 3, "Check failed: 3 of 5 checks failed\n"),
        (raise_interrupt, 130, "Interrupted: stopped by Ctrl-C\n"),
        (raise_unexpected, 1, "unexpected ZeroDivisionError: division by zero\n-> set TRTSPEC_DEBUG=1"),
    ],
)
def test_failures_are_one_message_and_a_status(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    failure: Callable[..., None], status: int, says: str,
) -> None:  # fmt: skip
    monkeypatch.setattr(application, "app", failure)
    monkeypatch.delenv("TRTSPEC_DEBUG", raising=False)
    with pytest.raises(SystemExit) as stopped:
        application.main()
    printed = capsys.readouterr()
    assert stopped.value.code == status
    assert says in printed.err and "Traceback" not in printed.err
    assert printed.out == ""


def test_a_missing_optional_package_names_its_extra(tmp_path: Path) -> None:
    """An interpreter in which torch cannot be imported, as after installing the base package alone."""
    target = make_target(tmp_path / "target")
    script = "import sys; sys.modules['torch'] = None; from trtspec.cli.app import main; main()"
    command = [sys.executable, "-c", script, "quantize", str(target), "-o", str(tmp_path / "nvfp4"), "--device", "cuda"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 4, done.stderr
    assert done.stderr == 'Missing: this command needs torch\n-> pip install "trtspec[reference]"\n'
    assert not (tmp_path / "nvfp4").exists()


def test_the_traceback_is_there_when_asked_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(application, "app", raise_unexpected)
    monkeypatch.setenv("TRTSPEC_DEBUG", "1")
    with pytest.raises(SystemExit):
        application.main()
    assert "Traceback" in capsys.readouterr().err


def test_an_interrupt_of_a_running_command_exits_with_130(monkeypatch: pytest.MonkeyPatch) -> None:
    """Through Typer itself: the signal arrives inside a command."""
    monkeypatch.setattr("trtspec.cli.doctor.examine", raise_interrupt)
    monkeypatch.setattr(sys, "argv", ["trtspec", "doctor"])
    with pytest.raises(SystemExit) as stopped:
        application.main()
    assert stopped.value.code == 130


DRAW = """
from trtspec.report import progress_bar
with progress_bar("training", 13300, "steps") as bar:
    bar.advance(12345, "loss 10.02  agree 0.72 0.71 0.70  2500 tok/s  held out 9.35")
"""


def test_bar_and_note_fit_eighty_columns():
    environment = os.environ | {"TRTSPEC_PROGRESS": "1", "COLUMNS": "80", "TERM": "dumb"}
    environment.pop("TRTSPEC_QUIET", None)
    done = subprocess.run([sys.executable, "-c", DRAW], capture_output=True, text=True, env=environment, check=True)
    lines = done.stderr.splitlines()
    assert done.stdout == ""
    assert all(len(line) <= 80 for line in lines)
    (bar,) = [line for line in lines if line.startswith("training")][-1:]
    assert "12345/13300 steps" in bar
    assert "eta" in bar
    assert any("held out 9.35" in line for line in lines)
