"""A record, its command line, its variables and the words that make it again."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.cases import table
from tests.command_line import trtspec
from trtspec.errors import UsageError
from trtspec.records import (
    Excludes,
    Mode,
    Modes,
    Needs,
    argument,
    checked,
    click_command,
    option,
    parse,
    unknown_variables,
    words,
)

NEAR, FAR = Mode("the near mode", "--mode near"), Mode("the far mode", "--mode far", "far")


@dataclass(frozen=True, kw_only=True)
class Options:
    target: Annotated[str, argument("Target.")]
    mode: Annotated[Literal["near", "far"], option()] = "near"
    ranks: Annotated[int, option("", "--tp-size", "--tp", min=1), Modes(NEAR)] = 4
    spread: Annotated[
        bool | None, option("", "--attention-dp/--no-attention-dp"), Needs("settings", "ranks=8")
    ] = None
    settings: Annotated[tuple[str, ...], option("", "--set"), Excludes("ranks=1")] = ()
    output: Annotated[Path | None, option("File to write.", "--output", "-o"), Modes(FAR)] = None
    json_: Annotated[bool, option("", "--json"), Excludes("named_x")] = False
    format: Annotated[Literal["text", "page"], option(), Excludes("output", value="page")] = "text"

    @property
    def named_x(self) -> bool:
        """a target called x"""
        return self.target == "x"


def run(arguments: list[str]) -> Options:
    seen: list[Options] = []

    def body(options: Options) -> None:
        seen.append(checked(options, FAR if options.mode == "far" else NEAR))

    click_command("try-it", Options, body).main(arguments, standalone_mode=False)
    return seen[0]


@pytest.mark.parametrize(
    ("line", "message", "remedy"),
    [
        ("x -o y", "--output is not used by the near mode", "leave it out, or use --mode far"),
        # also where it says the default
        (
            "x --mode far --tp 4",
            "--tp-size is not used by the far mode",
            "leave it out, or use --mode near",
        ),
        (
            "x --attention-dp",
            "--attention-dp is not used without --set or --tp-size 8",
            "pass --set or --tp-size 8, or leave it out",
        ),
        (
            "x --mode far --attention-dp",
            "--attention-dp is not used without --set",
            "pass --set, or leave it out",
        ),
        ("x --tp 1 --set a=1", "--set is not used with --tp-size 1", "leave one of the two out"),
        ("x --json", "--json is not used with a target called x", "leave one of the two out"),
        (
            "y --mode far -o z --format page",
            "--format page is not used with --output",
            "leave one of the two out",
        ),
    ],
)
def test_what_is_not_used_is_refused_by_its_flag(line: str, message: str, remedy: str) -> None:
    with pytest.raises(UsageError) as raised:
        run(line.split())
    assert (raised.value.message, raised.value.remedy) == (message, remedy)


@pytest.mark.parametrize(
    "line",
    [
        "x --tp 8 --attention-dp",
        "x --set a=1 --no-attention-dp",
        "y --json",
        "y --mode far -o z --format text",
    ],
)
def test_what_is_used_passes_unchanged(line: str) -> None:
    assert run(line.split()) == parse(Options, line)


def test_a_record_of_python_is_checked_by_what_differs_from_the_defaults() -> None:
    assert checked(Options(target="x", mode="far"), FAR) == Options(target="x", mode="far")
    with pytest.raises(UsageError, match="`tp_size` is not used by the far mode"):
        checked(Options(target="x", ranks=8), FAR)


def test_help_names_the_modes_that_have_a_label(capsys: pytest.CaptureFixture[str]) -> None:
    click_command("try-it", Options, print).main(["--help"], standalone_mode=False)
    assert "With far." in capsys.readouterr().out


def test_variables_follow_the_long_flag(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TRTSPEC_TRY_IT_TP_SIZE", "2")
    monkeypatch.setenv("TRTSPEC_TRY_IT_OUTPUT", "y")
    assert run(["x"]) == Options(target="x", ranks=2)  # the other one has its default again
    assert capsys.readouterr().err == "note: TRTSPEC_TRY_IT_OUTPUT is not used by the near mode\n"
    command = click_command("try-it", Options, print)
    (message,) = unknown_variables(command, ["TRTSPEC_TRY_IT_TP_SIZE", "TRTSPEC_TRY_IT_TP", "PATH"])
    assert "TRTSPEC_TRY_IT_TP is set" in message and "mean TRTSPEC_TRY_IT_TP_SIZE?" in message


@given(
    st.builds(
        Options,
        target=st.sampled_from(["x", "a b"]),
        mode=st.sampled_from(["near", "far"]),
        ranks=st.integers(1, 64),
        spread=st.sampled_from([None, True, False]),
        settings=st.lists(st.sampled_from(["a=1", "b='x y'"]), max_size=2).map(tuple),
        output=st.sampled_from([None, Path("y z")]),
        json_=st.booleans(),
    )
)
@settings(max_examples=60)
def test_words_make_the_same_record_again(options: Options) -> None:
    assert parse(Options, words(options)) == options


def test_words_leave_defaults_out_unless_asked() -> None:
    assert words(Options(target="x")) == ["x"]
    assert words(replace(Options(target="x"), ranks=4), always={"ranks"}) == ["x", "--tp-size", "4"]


def test_a_line_that_does_not_parse_is_named() -> None:
    with pytest.raises(UsageError, match="x --gpus 2 does not parse"):
        parse(Options, "x --gpus 2")


@pytest.mark.parametrize(
    ("command", "options"),
    table(__file__),
)
def test_an_option_with_an_empty_text_is_refused(
    command: str, options: list[str], tmp_path: Path
) -> None:
    """An empty text, as of a CI variable that was not set, is not an option left out."""
    more = {"prove": ["--head=x"], "synthesize": ["-o", tmp_path / "out"]}.get(command, [])
    for typed in options:
        done = trtspec(command, "http://127.0.0.1:9", typed, *more)
        assert done.status == 2 and f"{typed[:-1]} is empty" in done.stderr, done
        assert "leave it out" in done.stderr
