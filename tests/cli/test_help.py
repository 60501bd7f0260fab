"""What `--help` says: every default, and every bracket as it is written."""

import re
import typing

import pytest

from tests.cli.test_matrix import NAMES
from tests.cli.test_matrix import record_of as record
from tests.command_line import ROOT, trtspec
from trtspec.data_files import load_yaml
from trtspec.records import OptionField, fields_of, parse


def page(command: str) -> str:
    """The help page as one line of text. No line of it is wider than a terminal of 80 columns."""
    text = trtspec(command, "--help", COLUMNS="80").stdout
    assert max(map(len, text.splitlines())) <= 80
    return " ".join(text.split())


def options(command: str) -> list[OptionField]:
    return [field for field in fields_of(record(command)).values() if not field.is_argument]


@pytest.mark.parametrize("command", NAMES)
def test_every_default_is_on_the_page(command: str) -> None:
    shown = page(command)
    for field in options(command):
        assert field.typed in shown
        if isinstance(field.info.show_default, str):
            assert f"[default: ({field.info.show_default})]" in shown, field.typed
        elif field.default not in (None, False, True, (), "", field.empty):
            assert f"[default: {field.default}]" in shown, field.typed


@pytest.mark.parametrize("command", NAMES)
def test_every_help_text_is_on_the_page_as_it_is_written(command: str) -> None:
    shown = page(command)
    for field in options(command):
        assert " ".join(field.info.help.split()) in shown, field.typed


@pytest.mark.parametrize("command", NAMES)
def test_two_examples_are_on_the_page_and_parse(command: str) -> None:
    examples = load_yaml("examples.yaml")[command]
    assert len(examples) == 2
    shown = page(command)
    for example in examples:
        assert example in shown and example.startswith(f"trtspec {command}")
        assert parse(record(command), example.removeprefix(f"trtspec {command}"))


@pytest.mark.parametrize("command", NAMES)
def test_switches_show_no_type(command: str) -> None:
    assert not options(command) or "<bool>" not in page(command)


def test_texts_name_only_backends_that_serve_has() -> None:
    """A remedy that the next command refuses is none."""
    from trtspec.launch.serve_options import ServeOptions

    field = typing.get_type_hints(ServeOptions)["backend"]
    pages = [page for place, kind in (("trtspec", "*.py"), ("trtspec", "*.yaml"), ("docs", "*.md"))
             for page in (ROOT / place).rglob(kind)]  # fmt: skip
    said = re.compile(r"(?<!trtllm-)\bserve [^`\n]*--backend (\w+)")
    named = {name for page in pages for name in said.findall(page.read_text(encoding="utf-8"))}
    assert "reference" in named and named <= set(typing.get_args(field))
