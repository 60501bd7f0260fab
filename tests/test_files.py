"""Reading a user's file ends in a value or in one named error, whatever the file is."""

import os
import socket
from pathlib import Path

import pytest

from trtspec.errors import TrtspecError, UsageError
from trtspec.files import load_file, parse_json, read_yaml_text
from trtspec.specs import Values, check_kinds


def test_what_is_no_text_file_cannot_be_read(tmp_path: Path) -> None:
    fifo, loop, unix = tmp_path / "fifo", tmp_path / "loop", tmp_path / "socket"
    os.mkfifo(fifo)
    loop.symlink_to(loop)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(unix))
    latin, large, disk = tmp_path / "latin", tmp_path / "large", tmp_path / "disk"
    latin.write_bytes(b"a: 1\nb: \xe9\n")
    large.open("wb").truncate(2**40)
    disk.symlink_to("/proc/self/mem")  # as one that fails
    for path, words in {
        tmp_path: "directory",
        fifo: "pipe",
        loop: "symbolic link",
        unix: "",
        latin: "line 2 is not UTF-8",
        large: "more than",
        disk: "error",
        Path("/dev/zero"): "a device",
        tmp_path / "none": "no such file",
        tmp_path / "latin" / "x": "Not a directory",
        tmp_path / ("x" * 300): "too long",
    }.items():
        with pytest.raises(UsageError, match="cannot be read") as error:
            read_yaml_text(path)
        assert words in error.value.message and error.value.code == "TS-ERROR-FILE"
    with pytest.raises(UsageError, match="cannot be read"):
        read_yaml_text("nul\0byte")


def test_a_byte_order_mark_and_line_ends_are_kept_out_of_the_values(tmp_path: Path) -> None:
    file = tmp_path / "file.yml"
    file.write_bytes(b"\xef\xbb\xbfa: 1\r\nb: x\r\n")
    assert read_yaml_text(file) == "a: 1\r\nb: x\r\n"
    assert load_file(file) == {"a": 1, "b": "x"}
    file.write_text("a: [1\n")
    with pytest.raises(UsageError, match=r"file\.yml:2 is not valid YAML"):
        load_file(file)


def test_json_that_nothing_could_print_or_hold_is_refused() -> None:
    for text in ('{"a": "\\ud800"}', "[" * 100_000, "9" * 10_000):
        with pytest.raises(ValueError):
            parse_json(text)


def test_a_value_of_another_kind_is_named_by_its_key() -> None:
    for config in (
        {"eagle_config": 3},
        {"architectures": "x"},
        {"text_config": {"rope_scaling": []}},
    ):
        with pytest.raises(TrtspecError, match="eagle_config|architectures|rope_scaling"):
            check_kinds(config, "config.json")
    for value in ([1], "8", float("nan"), 10**40, -1, True, 1.5):
        with pytest.raises(TrtspecError, match="hidden_size is .*: Input should be"):
            Values({"hidden_size": value}).whole("hidden_size", least=1)
