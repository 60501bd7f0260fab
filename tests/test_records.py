"""A record, its command line, its variables and the words that make it again."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal

import pytest
import typer
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.command_line import trtspec
from trtspec.errors import UsageError
from trtspec.records import Mode, click_command, narrow, parse, unknown_variables, words


@dataclass(frozen=True, kw_only=True)
class Options:
    target: Annotated[str, typer.Argument(help="Target.")]
    mode: Annotated[Literal["near", "far"], typer.Option()] = "near"
    ranks: Annotated[int, typer.Option("--tp-size", "--tp", min=1)] = 4
    spread: Annotated[bool | None, typer.Option("--attention-dp/--no-attention-dp")] = None
    settings: Annotated[tuple[str, ...], typer.Option("--set")] = ()
    output: Annotated[Path | None, typer.Option("--output", "-o")] = None
    json_: Annotated[bool, typer.Option("--json")] = False


@dataclass(frozen=True, kw_only=True)
class Near:
    target: str
    ranks: int


@dataclass(frozen=True, kw_only=True)
class Far:
    target: str
    output: Path | None


MODES = [Mode("the near mode", Near, "--mode near"), Mode("the far mode", Far, "--mode far")]


def run(arguments: list[str]) -> list[object]:
    seen: list[object] = []

    def body(options: Options) -> None:
        seen.append(options)
        seen.append(narrow(options, MODES[options.mode == "far"], MODES, selecting=("mode",)))

    click_command("try-it", Options, body).main(arguments, standalone_mode=False)
    return seen


def test_a_mode_gets_what_it_uses() -> None:
    assert run(["x", "--tp", "8"])[1] == Near(target="x", ranks=8)
    assert run(["x", "--mode", "far", "-o", "y"])[1] == Far(target="x", output=Path("y"))


def test_what_a_mode_does_not_use_is_refused_by_its_flag() -> None:
    with pytest.raises(UsageError, match="--output is not used by the near mode") as raised:
        run(["x", "-o", "y"])
    assert raised.value.remedy == "leave it out, or use --mode far"
    with pytest.raises(UsageError, match="--tp-size is not used by the far mode"):
        run(["x", "--mode", "far", "--tp", "4"])  # also where it says the default


def test_variables_follow_the_long_flag(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("TRTSPEC_TRY_IT_TP_SIZE", "2")
    monkeypatch.setenv("TRTSPEC_TRY_IT_OUTPUT", "y")
    assert run(["x"])[1] == Near(target="x", ranks=2)
    assert capsys.readouterr().err == "note: TRTSPEC_TRY_IT_OUTPUT is not used by the near mode\n"
    command = click_command("try-it", Options, print)
    assert unknown_variables(command, ["TRTSPEC_TRY_IT_TP_SIZE", "TRTSPEC_TRY_IT_TP", "PATH"]) == ["TRTSPEC_TRY_IT_TP"]


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
@settings(max_examples=60, deadline=None)
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
    [
        ("watch", ["--listen="]),
        ("check", ["--model=", "--require=", "--dataset=", "--against="]),
        ("prove", ["--dataset=", "--thinking=", "--concurrency="]),
        ("synthesize", ["--model=", "--base-url=", "--extra-body=", "--shard="]),
    ],
)
def test_an_option_with_an_empty_text_is_refused(command: str, options: list[str], tmp_path: Path) -> None:
    """As the variable of a CI job is that was not set: nothing takes it for an option that was left out."""
    more = {"synthesize": ["-o", tmp_path / "out"]}.get(command, [])
    for option in options:
        done = trtspec(command, "http://127.0.0.1:9", option, *more)
        assert done.status == 2 and f"{option[:-1]} is empty" in done.stderr, done.stderr
