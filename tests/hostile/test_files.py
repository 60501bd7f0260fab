"""What is not a regular file of text is one named error, at once."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from trtspec import files
from trtspec.errors import TrtspecError
from trtspec.files import YamlError, compose, construct
from trtspec.specs import Values, check_kinds


def test_a_pipe_a_loop_a_directory_and_a_failing_disk_are_named(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "disk").symlink_to("/proc/self/mem")
    (tmp_path / "huge").open("wb").truncate(2**40)
    for name, reason in (("pipe", "a pipe"), ("loop", "symbolic links"), ("", "a directory"), ("disk", "error"),
                         ("huge", "more than")):  # fmt: skip
        with pytest.raises(TrtspecError, match=reason):
            files.read_text(tmp_path / name)


def test_json_that_nothing_could_print_or_hold_is_refused() -> None:
    for text in ('{"a": "\\ud800"}', "[" * 100_000, "9" * 10_000):
        with pytest.raises(ValueError):
            files.parse_json(text)
    with pytest.raises(YamlError, match="surrogate"):
        construct(compose('a: "\\ud800"').root)


def test_a_value_of_another_kind_is_named_by_its_key() -> None:
    for config in ({"eagle_config": 3}, {"architectures": "x"}, {"text_config": {"rope_scaling": []}}):
        with pytest.raises(TrtspecError, match="eagle_config|architectures|rope_scaling"):
            check_kinds(config, "config.json")
    for value in ([1], "8", float("nan"), 10**40, -1, True, 1.5):
        with pytest.raises(TrtspecError, match="hidden_size must be an integer"):
            Values({"hidden_size": value}).whole("hidden_size", least=1)
