"""Names, links and texts that somebody else wrote, in every field where a command reads one.

Nothing outside the output changes, each is refused by name or harmless, and nothing reaches the
terminal raw. An audit hook stops whatever would be removed or renamed outside the test's directory,
so that a fault costs the machine nothing.
"""

import hashlib
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.command_line import Done, succeeded, trtspec
from tests.json_files import edit_json, read_json, write_json, write_lines
from tests.tiny import make_target
from trtspec.data_files import DATA
from trtspec.errors import UNPRINTABLE

PATHS = {
    "parent": "../precious",
    "parent of itself": "..",
    "itself": ".",
    "nothing": "",
    "below": "logs/precious",
    "backslash": "..\\precious",
    "nul": "pre\0cious",
    "long": "n" * 300,
    "escape": "\x1b]52;c;Y3VybA==\x07\x1b[2J",
    "line": "a\nSAFE: the same output",
    "surrogate": "\ud800",
    "csi": "\x9b2J",
    "number": 7,
    "null": None,
    "list": ["../precious"],
    "mapping": {"../precious": 1},
}
TEXTS = {name: text for name, text in PATHS.items() if isinstance(text, str)} | {
    "direction": "\u202egnp.exe",
    "latin": "caf\xe9",
}
Damage = Callable[[Path, Any], None]
REMOVALS = ("os.remove", "os.rmdir", "os.rename", "shutil.rmtree", "os.truncate", "shutil.move")
guarded: list[Path] = []  # the directory in which files may be removed, while a test runs


def guard(event: str, arguments: tuple[Any, ...]) -> None:
    """An audit hook.

    `rmtree` is judged at its top: what it removes below has a directory's descriptor.
    """
    if (
        not guarded
        or event not in REMOVALS
        or (event != "shutil.rmtree" and -1 not in arguments[1:])
    ):
        return
    path = Path(os.path.realpath(os.path.dirname(os.path.abspath(os.fsdecode(arguments[0])))))
    if not path.is_relative_to(guarded[0]):
        raise AssertionError(f"{event} of {arguments[0]}, outside the test")


sys.addaudithook(guard)


def journal(room: Path, name: Any) -> None:
    lines = [{"header": {}}, {"key": name, "sha256": "0"}]
    write_lines(room / "out/.trtspec-quantize.jsonl", lines)


def config_key(room: Path, text: Any) -> None:
    edit_json(room / "src/config.json", architectures=[text], model_type=text)


def noted_problem(room: Path, text: Any) -> None:
    problem = dict.fromkeys(("code", "where", "message", "remedy"), text) | {"severity": "warning"}
    edit_json(room / "src/provenance.json", command="quantize", problems=[problem])


def tokenizer_name(room: Path, text: Any) -> None:
    edit_json(
        room / "src/tokenizer_config.json", tokenizer_class=text, added_tokens_decoder={text: text}
    )


def index(room: Path, name: Any) -> None:
    path = room / "src/model.safetensors.index.json"
    weight_map = read_json(path)["weight_map"]
    edit_json(path, weight_map=dict.fromkeys(weight_map, name))


def code(room: Path, name: Any) -> None:
    for file in ("src/config.json", "head/config.json"):
        edit_json(room / file, auto_map={"AutoConfig": name})


def row(room: Path, text: Any) -> None:
    messages = [{"role": text, "content": text}, {"role": "assistant", "content": text}]
    write_lines(room / "rows.jsonl", [{"id": text, "messages": messages, str(text): text}])


def engine_file(room: Path, text: Any) -> None:
    write_json(room / "engine.yml", {"kv_cache_config": {text: text}, "backend": text, text: 1})


def measured(room: Path, text: Any) -> None:
    write_json(room / "results.json", {"server": text, "categories": {str(text): text}})


TRAIN = ("train", "src", "rows.jsonl", "-o", "out")
QUANTIZE = ("quantize", "src", "-o", "out", "--policy", "k2.5")
CONVERT = ("convert", "head", "-o", "out", "--to", "vllm", "--target", "kimi-nano")
SERVE = ("serve", "src", "--dry-run", "--trust-remote-code")
NAMES: dict[str, tuple[tuple[str, ...], Damage]] = {
    "carried by quantize": (
        (*QUANTIZE, "--force"),
        lambda room, name: edit_json(
            room / "out/provenance.json", command="quantize", carried=[name]
        ),
    ),
    "carried by convert": (
        (*CONVERT, "--force"),
        lambda room, name: edit_json(
            room / "out/provenance.json", command="convert", carried=[name]
        ),
    ),
    "carried, not a list": (
        (*QUANTIZE, "--force"),
        lambda room, name: edit_json(
            room / "out/provenance.json", command="quantize", carried=name
        ),
    ),
    "shards": (
        (*QUANTIZE, "--force"),
        lambda room, name: edit_json(
            room / "out/provenance.json", command="quantize", shards=[name]
        ),
    ),
    "journal": ((*QUANTIZE, "--restart"), journal),
    "index, quantize": (QUANTIZE, index),
    "index, inspect": (("inspect", "src"), index),
    "index, calibrate": (("calibrate", "src", "rows.jsonl", "-o", "out/scales"), index),
    "index, train": (TRAIN, index),
    "code, inspect": (("inspect", "src"), code),
    "code, serve": ((*SERVE, "--head", "head"), code),
    "row, train": (TRAIN, row),
    "row, calibrate": (("calibrate", "src", "rows.jsonl", "-o", "out/scales"), row),
    "row, synthesize": (("synthesize", "rows.jsonl", "-o", "out/answers.jsonl"), row),
    "measured, plan": (("plan", "src", "--head", "head", "--acceptance", "results.json"), measured),
    "measured, bench": (
        ("bench", "http://127.0.0.1:9", "--compare", "results.json", "-o", "out/b"),
        measured,
    ),
    "baseline, watch": (
        ("watch", "http://127.0.0.1:9", "--once", "--baseline", "results.json"),
        measured,
    ),
    "recorded, check": (
        ("check", "http://127.0.0.1:9", "--against", "results.json"),
        measured,
    ),
}
SHOWN: dict[str, tuple[tuple[str, ...], Damage]] = {
    "config, inspect": (("inspect", "src"), config_key),
    "config, serve": (SERVE, config_key),
    "config, plan": (("plan", "src"), config_key),
    "problem, inspect": (("inspect", "src"), noted_problem),
    "problem, JSON": (("inspect", "src", "--json"), noted_problem),
    "tokenizer, inspect": (("inspect", "src"), tokenizer_name),
    "config, build-config": (("build-config", "src", "-o", "out/engine.yml"), config_key),
    "engine file, lint": (("lint", "engine.yml"), engine_file),
    "engine file, serve": ((*SERVE, "--config", "engine.yml"), engine_file),
    "code, explain": (("explain", "TS-\x1b[2J"), engine_file),
}
CASES = [
    pytest.param(words, damage, value, id=f"{field}, {kind}")
    for fields, values in ((NAMES, PATHS), (SHOWN, TEXTS))
    for field, (words, damage) in fields.items()
    for kind, value in values.items()
]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("source") / "src"
    return make_target(directory, layers=2, experts=2, hidden=32, shards=2)


@pytest.fixture
def place(
    room: Path, source: Path, tmp_path_factory: Any, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Path]:
    """A directory with a target, a head, an output and what the user holds dear beside them."""
    place = room / f"case-{len(list(room.iterdir()))}"
    for name in ("out", "precious/sub", "logs/precious"):
        (place / name).mkdir(parents=True)
        (place / name / "file").write_text("dear")
    (place / "out/file").unlink()
    shutil.copytree(source, place / "src")
    shutil.copytree(DATA / "kimi-nano-eagle3", place / "head")
    monkeypatch.chdir(place)
    monkeypatch.setattr(tempfile, "tempdir", str(room))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)  # a first import renames it into place
    guarded.append(room.resolve())
    yield place
    guarded.clear()


def surroundings(place: Path) -> dict[Path, str]:
    """Digest of every file but those of the output."""
    files = [
        path
        for path in place.rglob("*")
        if path.is_file() and not path.is_relative_to(place / "out")
    ]
    return {path: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def harmless(done: Done, refused: bool) -> None:
    assert done.status in ((1, 2, 3) if refused else (0, 1, 2, 3)), done
    assert "Error: unexpected" not in done.stderr and "Traceback" not in done.stderr, done.stderr
    shown = done.stdout + done.stderr
    raw = UNPRINTABLE.findall(shown)
    assert not raw, raw
    assert "\nSAFE" not in shown


@pytest.mark.parametrize(("words", "damage", "value"), CASES)
def test_nothing_foreign_is_obeyed(
    place: Path, words: tuple[str, ...], damage: Damage, value: Any
) -> None:
    damage(place, value)
    before = surroundings(place)
    done = trtspec(*words)
    not_json = not isinstance(value, str) or value == PATHS["surrogate"]
    is_nothing = damage is code and value is None
    unreadable_journal = damage is journal and not_json  # it starts over
    is_shown = damage in [item for _, item in SHOWN.values()]
    harmless(done, refused=not (is_shown or is_nothing or unreadable_journal))
    assert surroundings(place) == before


LINKS = {
    "file": lambda link, place: link.symlink_to(place / "precious/sub/file"),
    "relative": lambda link, place: link.symlink_to("../precious/sub/file"),
    "device": lambda link, place: link.symlink_to("/dev/zero"),
    "loop": lambda link, place: link.symlink_to(link.name),
    "folder": lambda link, place: link.symlink_to(place / "precious"),
}


@pytest.mark.parametrize("kind", LINKS)
def test_a_link_out_of_the_source_is_not_carried(place: Path, kind: str) -> None:
    LINKS[kind](place / "src/LICENSE-extra.md", place)
    done = trtspec(*QUANTIZE)
    if kind in ("file", "relative"):
        assert done.status == 1 and "src/LICENSE-extra.md is a link" in done.stderr, done
    assert not (place / "out/LICENSE-extra.md").exists()


@pytest.mark.parametrize(
    "name", [".trtspec-quantize.jsonl", "config.json", "provenance.json", "README.md"]
)
def test_a_link_in_the_output_is_not_written_through(place: Path, name: str) -> None:
    precious = place / "precious/sub/file"
    (place / "out" / name).symlink_to(precious)
    harmless(trtspec(*QUANTIZE, "--force"), refused=False)
    harmless(trtspec(*QUANTIZE, "--restart"), refused=False)
    assert precious.read_text() == "dear"


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
def test_a_journal_that_is_no_file_is_named(place: Path, make: Callable[[str], None]) -> None:
    make("out/.trtspec-quantize.jsonl")
    done = trtspec(*QUANTIZE)
    harmless(done, refused=True)
    assert ".trtspec-quantize.jsonl" in done.stderr


def test_shards_may_be_links_to_another_volume(place: Path) -> None:
    for shard in (place / "src").glob("*.safetensors"):
        shutil.move(shard, place / "precious" / shard.name)
        shard.symlink_to(place / "precious" / shard.name)
    succeeded(*QUANTIZE)


def test_a_snapshot_of_the_hub_links_to_its_blobs(place: Path) -> None:
    snapshot = place / "models--org--name/snapshots/0123"
    blobs = place / "models--org--name/blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for number, file in enumerate(sorted((place / "src").iterdir())):
        shutil.move(file, blobs / str(number))
        (snapshot / file.name).symlink_to(f"../../blobs/{number}")
    succeeded("quantize", snapshot, "-o", "out", "--policy", "k2.5")
