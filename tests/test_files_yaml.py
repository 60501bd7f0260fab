"""Reading a user's YAML ends in a value or in one named error, whatever the file is; the oracle is yaml.safe_load."""

import os
import random
import socket
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from trtspec import files
from trtspec.errors import TrtspecError, UsageError
from trtspec.files import MOST_VALUES, YamlError, load_file, load_text, read_yaml_text
from trtspec.specs import Values, check_kinds

ALIAS_BOMB = "a0: &a0 [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 30)
)
MERGE_BOMB = "a0: &a0 {x: 1, y: 2}\n" + "".join(
    f"a{n}: &a{n} {{<<: [{', '.join([f'*a{n - 1}'] * 9)}]}}\n" for n in range(1, 30)
)
# each ended in a signal, a hang, or an "unexpected" error before
BAD = {
    "50,000 opening brackets": "[" * 50_000,
    "50,000 opening braces": "{a: " * 50_000,
    "50,000 nested lists": "- " * 50_000,
    "aliases of aliases": ALIAS_BOMB,
    "merges of merges": MERGE_BOMB,
    "a list within itself": "a: &a [*a]\n",
    "a mapping within itself": "a: &a {b: *a}\n",
    "a merge of itself": "a: &a {<<: *a}\n",
    "no float": "a: !!float y\n",
    "no timestamp": "a: !!timestamp x\n",
    "no day of any year": "a: 2001-99-99\n",
    "no truth value": "a: !!bool maybe\n",
    "no base64": "a: !!binary a\n",
    "no list of pairs": "a: !!omap 3\n",
    "a set": "a: !!set {x, y}\n",
    "an object of Python": "a: !!python/object/apply:os.system [x]\n",
    "a number of 5,000 digits": f"a: {'9' * 5000}\n",
    "a number to the base 60": f"a: 1{':1' * 50_000}\n",
    "a list as key": "? [a]\n: b\n",
    "a key of 10,000 characters": f"? {'k' * 10_000}\n: b\n",
    "two documents": "a: 1\n---\nb: 2\n",
    "a control character": "a: \0\n",
    "a tab as indentation": "a:\n\tb: 1\n",
    "an open bracket": "a: [1\n",
    "an alias of nothing": "a: *b\n",
    "an anchor twice": "a: &a 1\nb: &a 2\n",
    "a merge of a number": "<<: 3\n",
    "a value of an unknown tag": "a: =\n",
    "too many values": f"[{'1, ' * MOST_VALUES}]\n",
}


@pytest.mark.parametrize("text", BAD.values(), ids=BAD.keys())
def test_every_malformed_text_is_a_named_error_at_once(text: str) -> None:
    began = time.perf_counter()
    with pytest.raises(YamlError) as error:
        load_text(text)
    assert error.value.message and 1 <= error.value.line <= text.count("\n") + 1
    assert len(error.value.message) < 250
    assert time.perf_counter() - began < 4


GOOD = [
    "", "# only a comment\n", "a: 1e400\n", "a: 1.0e+400\n", "a: &x {b: 1}\nc: {<<: *x, d: 2, b: 3}\n",
    "<<: [{a: 1}, {a: 2, b: 3}]\nc: 1\n", "~: 1\ntrue: 2\n1: 3\n1.5: 4\n", "=: 3\n", "a: 0x1F\n",
    "%YAML 1.1\n---\na: 1\n...\n", "&k a: &v b\nc: *v\n*k : 3\n", "a: 190:20:30\n",
    "é: \"ü\" # 𝒳\nb: 𝒳\n", "a: b\u2028c: 2\n", "a: |\n  text\n\n# c\nb: >-\n  x\n  y\n",
    "a:\nb: ''\n", "{a, b: [c]}\n",
]  # fmt: skip


@pytest.mark.parametrize("text", GOOD)
def test_values_are_those_of_safe_load(text: str) -> None:
    assert repr(load_text(text)) == repr(yaml.safe_load(text))


def test_mutated_texts_agree_with_safe_load() -> None:
    """Every text that safe_load takes has the same value here, and what it refuses is refused here too."""
    rng, agreed = random.Random(0), 0
    pieces = ["a: ", "- ", "[", "]", "{", "}", ", ", "\n", "  ", "&x ", "*x", "<<: ", "!!str ", "1", "yes", "# c",
              '"', "'", "|\n", "? "]  # fmt: skip
    for _ in range(3000):
        text = "".join(rng.choice(pieces) for _ in range(rng.randint(1, 12)))
        try:
            wanted: Any = yaml.safe_load(text)
        except yaml.YAMLError:
            with pytest.raises(YamlError):
                load_text(text)
            continue
        except (RecursionError, ValueError, TypeError, AttributeError):
            continue
        try:
            assert repr(load_text(text)) == repr(wanted), text
            agreed += 1
        except YamlError as error:
            assert "inside the value" in error.message or "defined twice" in error.message, (text, error.message)
    assert agreed > 200


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
        tmp_path: "directory", fifo: "pipe", loop: "symbolic link", unix: "", latin: "line 2 is not UTF-8",
        large: "more than", disk: "error", Path("/dev/zero"): "a device", tmp_path / "none": "no such file",
        tmp_path / "latin" / "x": "Not a directory", tmp_path / ("x" * 300): "too long",
    }.items():  # fmt: skip
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
            files.parse_json(text)
    with pytest.raises(YamlError, match="surrogate"):
        load_text('a: "\\ud800"')


def test_a_value_of_another_kind_is_named_by_its_key() -> None:
    for config in ({"eagle_config": 3}, {"architectures": "x"}, {"text_config": {"rope_scaling": []}}):
        with pytest.raises(TrtspecError, match="eagle_config|architectures|rope_scaling"):
            check_kinds(config, "config.json")
    for value in ([1], "8", float("nan"), 10**40, -1, True, 1.5):
        with pytest.raises(TrtspecError, match="hidden_size is .*: Input should be"):
            Values({"hidden_size": value}).whole("hidden_size", least=1)
