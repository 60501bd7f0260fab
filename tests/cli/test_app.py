"""The command line as a whole: what is listed, how fast and how light it starts, how it fails."""

import os
import sys
from pathlib import Path

import pytest

from tests.cases import table
from tests.command_line import Done, printed, ran, succeeded, trtspec
from trtspec import errors
from trtspec.cli import app as application

COMMANDS = (
    "demo",
    "doctor",
    "inspect",
    "explain",
    "quantize",
    "calibrate",
    "synthesize",
    "train",
    "convert",
    "plan",
    "build-config",
    "lint",
    "serve",
    "bench",
    "check",
    "prove",
    "watch",
)


def test_help_lists_every_command() -> None:
    done = succeeded("--help")
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
        "heavy = {'torch', 'numpy', 'transformers', 'modelopt', 'fastapi', 'huggingface_hub', "
        "'httpx'}\n"
        "loaded = heavy & set(sys.modules)\n"
        "assert not loaded, loaded\n"
    )
    printed(sys.executable, "-c", script, timeout=900)


def test_the_shell_completes_commands_and_options() -> None:
    for words, place, wanted in (
        ("trtspec bu", "1", "build-config"), ("trtspec inspect --ag", "2", "--against"),
    ):  # fmt: skip
        done = trtspec(_TRTSPEC_COMPLETE="complete_bash", COMP_WORDS=words, COMP_CWORD=place)
        assert wanted in done.stdout.split(), words


def test_every_command_is_in_the_readme() -> None:
    readme = (Path(__file__).parent.parent.parent / "README.md").read_text(encoding="utf-8")
    for command in COMMANDS:
        assert f"trtspec {command}" in readme, f"trtspec {command} is not in the README"


def test_underscores_are_accepted_everywhere() -> None:
    succeeded("build_config", "--help")
    succeeded("lint", "--trtllm_version", "1.2.1", "--help")
    assert trtspec("lint", "--trtllm+version", "1.2.1", "--help").status == 2


def test_an_option_can_come_from_the_environment() -> None:
    succeeded("inspect", "nvidia/Kimi-K2.5-NVFP4", TRTSPEC_INSPECT_JSON="true")
    assert trtspec("inspect", "nvidia/Kimi-K2.5-NVFP4", TRTSPEC_INSPECT_JSON="perhaps").status == 2


def failing(monkeypatch: pytest.MonkeyPatch, failure: BaseException, *words: str) -> Done:
    """The command `lint` where it raises this."""

    def raising(**_: object) -> None:
        raise failure

    monkeypatch.setattr(application, "app", raising)
    return trtspec("lint", "x.yml", *words)


FAILURES: tuple[tuple[BaseException, int, str, str], ...] = (
    (
        errors.UsageError("it is wrong", "run that"),
        2,
        "TS-ERROR-USAGE",
        "Usage error: it is wrong\n-> run that\n",
    ),
    (
        errors.CheckFailed("3 of 5 checks failed"),
        3,
        "TS-ERROR-CHECK",
        "Check failed: 3 of 5 checks failed",
    ),
    (
        ModuleNotFoundError("no torch", name="torch.nn"),
        4,
        "TS-ERROR-MISSING",
        "Missing: this command needs torch",
    ),
    (KeyboardInterrupt(), 130, "TS-ERROR-INTERRUPTED", "Interrupted: stopped by Ctrl-C"),
    (
        ZeroDivisionError("division by zero"),
        1,
        "TS-ERROR-UNEXPECTED",
        "unexpected ZeroDivisionError: division by zero\n-> set TRTSPEC_DEBUG=1",
    ),
    (
        errors.TrtspecError("TS-DATA-ROW data.jsonl:3: not a JSON object"),
        1,
        "TS-DATA-ROW",
        "Error: TS-DATA-ROW data",
    ),
)


@pytest.mark.parametrize(("failure", "status", "code", "says"), FAILURES)
def test_failures_are_one_message_and_a_status_and_with_json_an_object_on_stdout(
    monkeypatch: pytest.MonkeyPatch, failure: BaseException, status: int, code: str, says: str
) -> None:
    monkeypatch.delenv("TRTSPEC_DEBUG", raising=False)
    done = failing(monkeypatch, failure)
    assert done.status == status and done.stdout == ""
    assert says in done.stderr and "Traceback" not in done.stderr
    done = failing(monkeypatch, failure, "--json")
    found = done.json
    assert (
        done.status == status
        and set(found) == {"ok", "problems", "error"}
        and found["problems"] == []
    )
    assert set(found["error"]) == {"code", "message", "remedy"} and found["error"]["code"] == code


@pytest.mark.parametrize("command", [name for name in COMMANDS if name != "demo"])
def test_every_reporting_command_answers_in_json_when_it_is_typed_wrongly(command: str) -> None:
    done = trtspec(command, "--json", "--no-such-option")
    assert done.status == 2 and "--no-such-option" in done.stderr
    assert f"`trtspec {command} " in done.json["error"]["remedy"]


def test_a_missing_optional_package_names_its_extra(tmp_path: Path) -> None:
    """Without torch, as in a base install, the message names the extra to install."""
    script = "import sys; sys.modules['torch'] = None; from trtspec.cli.app import main; main()"
    output = str(tmp_path / "head")
    words = ("convert", "kimi-nano-eagle3", "-o", output, "--to", "vllm")
    done = ran(sys.executable, "-c", script, *words, timeout=900)
    assert done.status == 4, done
    assert done.stderr == 'Missing: this command needs torch\n-> pip install "trtspec[reference]"\n'
    assert not Path(output).exists()


def test_the_traceback_is_there_when_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRTSPEC_DEBUG", "1")
    assert "Traceback" in failing(monkeypatch, ZeroDivisionError("division by zero")).stderr


def test_an_interrupt_of_a_running_command_exits_with_130(monkeypatch: pytest.MonkeyPatch) -> None:
    """Through Typer itself: the signal arrives inside a command."""

    def interrupted() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("trtspec.verbs.doctor.examine", interrupted)
    assert trtspec("doctor").status == 130


DRAW = """
from trtspec.report import progress_bar
with progress_bar("training", 13300, "steps") as bar:
    bar.advance(12345, "loss 10.02  agree 0.72 0.71 0.70  2500 tok/s  held out 9.35")
"""


def test_bar_and_note_fit_eighty_columns():
    environment = os.environ | {"TRTSPEC_PROGRESS": "1", "COLUMNS": "80", "TERM": "dumb"}
    environment.pop("TRTSPEC_QUIET", None)
    done = ran(sys.executable, "-c", DRAW, env=environment)
    lines = done.stderr.splitlines()
    assert (done.status, done.stdout) == (0, "")
    assert all(len(line) <= 80 for line in lines)
    (bar,) = [line for line in lines if line.startswith("training")][-1:]
    assert "12345/13300 steps" in bar
    assert "eta" in bar
    assert any("held out 9.35" in line for line in lines)


@pytest.mark.parametrize(
    ("words", "says"),
    table(__file__),
)
def test_a_wrong_word_is_answered_with_the_right_one(
    words: tuple[str, ...], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRTSPEC_PLAN_GPUS", "four" if words[-1] == "kimi-nano" else "4")
    done = trtspec(*words)
    assert done.status == 2 and says in done.stderr, done
