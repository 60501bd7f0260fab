"""Malformed inputs for every command that reads files, from a seed.

A case is its fault, the command line and the files. It stands in a directory of its own, a copy of
a small valid target, head, engine YAML, prompts, results and recording, of which one is spoilt.
"""

import json
import os
import random
import shutil
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tests.bench.test_malformed_results import RECORDING
from tests.bench.test_statistics import run_of
from tests.trtllm.test_nodes import BAD, GOOD

SWAPPED = ("empty", "list", "word")  # given to every command that reads a file of this kind
VERSIONS = ("1.2.1", "1.3.0rc20", "1.4.0rc1")

CHECKPOINT_COMMANDS = """inspect {broken}
inspect {broken} --json
inspect {head} --against {target}
inspect {target} --against {target}
convert {head} --to {dialect} --target {target} --output {out}
convert {head} --to trtllm --output {out} --dry-run --json
build-config {target} --head {head} --trtllm-version {version}
build-config {target} --trtllm-version {version} --json --output {out}.yml
plan {target} --head {head}
plan {target} --json
serve {target} --head {head} --dry-run --trtllm-version {version}
serve {target} --backend reference --dry-run""".splitlines()
YAML_COMMANDS = """lint {file} --trtllm-version {version}
lint {file} --trtllm-version {version} --json
lint {file} --trtllm-version {version} --target {target} --head {head} --fix
serve {target} --config {file} --dry-run --trtllm-version {version}
serve {target} --head {head} --config {file} --dry-run
serve {target} --disaggregated {file} --dry-run""".splitlines()
SHORT = "--output {out} --samples 2 --max-tokens 4"
MEASURED_COMMANDS = {
    "prompts.jsonl": [
        f"bench {{url}} --dataset {{file}} {SHORT} --concurrency 1",
        f"bench {{url}} {SHORT} --extra-body {{wrong}}",
        "check {url} --dataset {file} --samples 2 --max-tokens 4 --min-acceptance 1",
    ],
    "results.json": [
        f"bench {{url}} --compare {{file}} {SHORT} --concurrency 1",
        "plan {target} --head {head} --acceptance {file}",
    ],
    "recording.json": [
        "check {url} --against {file}",
        "check {url} --score {file} --json",
        "check http://127.0.0.1:9 --score {file}",  # the discard port: nothing listens there
    ],
    "acceptance.json": ["plan {target} --head {head} --acceptance {file}"],
}
DEEP = 60_000
TEXTS: dict[str, bytes] = {
    "empty": b"",
    "blank": b" \n\t\n",
    "nul bytes": b"\0" * 64,
    "not utf-8": b"\xff\xfe\x80 key: \xc3\x28\n",
    "utf-16": "key: value\n".encode("utf-16"),
    "byte order mark": b"\xef\xbb\xbf{}",
    "cut string": b'{"a": "b',
    "list": b"[1, 2, 3]",
    "number": b"42",
    "null": b"null",
    "word": b"text",
    "infinity": b'{"a": 1e400, "b": -1e400, "c": NaN, "d": Infinity}',
    "huge integer": b'{"a": ' + b"9" * 5000 + b"}",
    "deep list": b"[" * DEEP,
    "deep closed list": b"[" * DEEP + b"]" * DEEP,
    "deep object": b'{"a":' * DEEP,
    "duplicate keys": b'{"a": 1, "a": {"a": []}, "a": null}',
    "lone surrogate": b'{"\\ud800": "\\udfff"}',
    "raw surrogate": b'{"\xed\xa0\x80": 1}',
    "control characters": b'{"a": "\x01\x02\x1b[31m"}',
    "many keys": json.dumps({f"key{i}": i for i in range(20_000)}).encode(),
    "long string": json.dumps({"a": "x" * 3_000_000}).encode(),
    "many lines": b"{}\n" * 50_000,
}
ODD_NUMBERS = {
    "float of a word": "!!float y",
    "int of a word": "!!int y",
    "no day": "2026-99-99",
    "sexagesimal": "190:20:30",
}
YAMLS: dict[str, bytes] = {
    **{name: text.encode() for name, text in (BAD | {text[:20]: text for text in GOOD}).items()},
    **{name: f"max_batch_size: {text}\n".encode() for name, text in ODD_NUMBERS.items()},
    "own tag": b"a: !mine {b: 1}\n",
    "null key": b"null: 1\n~: 2\n: 3\n",
    "mapping key": b"? {a: b}\n: 1\n",
    "deep block": b"".join(b" " * i + b"a:\n" for i in range(2_000)),
    "anchor flood": b"".join(b"k%d: &a%d 1\n" % (i, i) for i in range(4_000)),
    "directive": b"%YAML 9.9\n---\na: 1\n",
    "nan": b"kv_cache_config: {free_gpu_memory_fraction: .nan}\n",
    "infinite": b"max_batch_size: .inf\nmax_num_tokens: -.inf\nmax_seq_len: 1e999\n",
    "wrong types": (
        b"speculative_config: 3\nkv_cache_config: []\nmoe_config: text\ncuda_graph_config: [1]\n"
    ),
    "strings for numbers": (
        b"max_batch_size: many\n"
        b"max_num_tokens: '8k'\n"
        b"tensor_parallel_size: four\n"
        b"pipeline_parallel_size: two\n"
        b"moe_expert_parallel_size: [1]\n"
    ),
    "odd schedule": b"speculative_config: {max_draft_len: x, draft_len_schedule: {a: b, 1: [2]}}\n",
    "odd lists": b"speculative_config: {decoding_type: [Eagle], eagle3_layers_to_capture: {a: 1}}\n"
    b"cuda_graph_config: {batch_sizes: [a, null, {}]}\n",
    "nulls": (
        b"speculative_config: null\n"
        b"kv_cache_config: null\n"
        b"moe_config: null\n"
        b"cuda_graph_config: null\n"
        b"max_batch_size: null\n"
        b"max_num_tokens: null\n"
    ),
    "front": b"context_servers: 3\ngeneration_servers: {urls: 7}\n",
    "half a front": (
        b"hostname: [1]\nport: nowhere\ncontext_servers: {num_instances: many, urls: [1, null]}\n"
    ),
}
ODD: list[Any] = [
    None,
    True,
    False,
    0,
    -1,
    1,
    2,
    7,
    10**18,
    10**40,
    -(10**40),
    0.5,
    -0.0,
    1e308,
    float("inf"),
    float("nan"),
    "",
    "x",
    "\ud800",
    "\x00",
    "../../etc/passwd",
    "8",
    "é" * 40,
    [],
    [None],
    [[]],
    [1, 2, 3],
    ["x"],
    [{}],
    {},
    {"a": None},
    {"": []},
    [0] * 3000,
    {str(i): i for i in range(300)},
]
NAMES = [
    "",
    ".",
    "..",
    "model.layers.99999999.x",
    "model.layers.-1.w",
    "layers.x.y",
    "\ud800",
    "a" * 5000,
]


def filled(line: str, names: dict[str, Any]) -> list[str]:
    """The words of a command line, each with what it names in its place."""
    return [word.format(**names) for word in line.split()]


@dataclass(frozen=True)
class Case:
    name: str
    argv: list[str]
    directory: Path


class Damage:
    """Makes files wrong, each time in one way, drawn by `rng`. Each method says which."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng

    def _spoil(self, file: Path, texts: dict[str, bytes] | None = None) -> str:
        """Makes the file wrong in one way, and says which."""
        before = file.read_bytes() if file.is_file() else b"{}"
        file.unlink(missing_ok=True)
        ways: list[Callable[[Path, bytes], str]] = [
            self._text,
            lambda file, _: self._nature(file),
            self._bytes,
        ]
        if file.suffix in (".json", ".jsonl"):
            ways += [self._json] * 5
        if file.suffix == ".safetensors":
            ways += [self._safetensors] * 6
        if texts is not None:
            name = self.rng.choice(sorted(texts))
            file.write_bytes(texts[name])
            return name
        return self.rng.choice(ways)(file, before)

    def _text(self, file: Path, before: bytes) -> str:
        name = self.rng.choice(sorted(TEXTS))
        file.write_bytes(TEXTS[name])
        return name

    def _bytes(self, file: Path, before: bytes) -> str:
        """Cut, with a byte changed, or with a piece repeated."""
        at = self.rng.randrange(len(before) + 1)
        way = self.rng.choice(["cut", "changed", "repeated"])
        if way == "cut":
            file.write_bytes(before[:at])
        elif way == "changed" and before:
            data = bytearray(before)
            data[at - 1] = self.rng.randrange(256)
            file.write_bytes(data)
        else:
            file.write_bytes(
                before[:at] + before[: self.rng.randrange(len(before) + 1)] + before[at:]
            )
        return f"{way} at {at}"

    def _nature(self, path: Path) -> str:
        """Not a file at all, or not one that can be read."""
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
        natures = "missing directory FIFO loop dangling unreadable huge forbidden"
        nature = self.rng.choice(natures.split())
        if nature == "directory":
            path.mkdir()
        elif nature == "FIFO":
            os.mkfifo(path)
        elif nature == "loop":
            path.symlink_to(path)
        elif nature == "dangling":
            path.symlink_to("nowhere")
        elif nature == "unreadable":
            path.symlink_to("/proc/self/mem")  # opens, and fails when it is read, for root too
        elif nature == "huge":
            with path.open("wb") as file:
                file.truncate(40 * 2**30)  # no bytes on the disk
        elif nature == "forbidden":
            path.write_bytes(b"{}")
            path.chmod(0)
        return nature

    def _json(self, file: Path, before: bytes) -> str:
        """One value, somewhere inside, becomes something odd, is lost or is renamed."""
        lines = before.decode().splitlines() if file.suffix == ".jsonl" else [before.decode()]
        try:
            value = json.loads(lines[0])
        except ValueError:
            return self._text(file, before)
        what = self._change(value)
        file.write_text("\n".join([json.dumps(value), *lines[1:]]) + "\n")
        return what

    def _change(self, value: Any) -> str:
        path = ""
        while True:
            if not isinstance(value, (dict, list)) or not value:
                return f"{path} as it was"
            key: Any = self.rng.choice(
                sorted(value) if isinstance(value, dict) else range(len(value))
            )
            path += f".{key}"
            if isinstance(value[key], (dict, list)) and value[key] and self.rng.random() < 0.7:
                value = value[key]
                continue
            way = self.rng.random()
            if way < 0.8:
                value[key] = self.rng.choice(ODD)
                return f"{path} = {str(value[key])[:40]!r}"
            lost = value.pop(key)
            if way < 0.9 and isinstance(value, dict):
                value[f"{key}_"] = lost
                return f"{path} renamed"
            return f"{path} lost"

    def _safetensors(self, file: Path, before: bytes) -> str:
        """A header that lies about its length, the types, the shapes or the places of tensors."""
        length = struct.unpack("<Q", before[:8])[0]
        header, data = json.loads(before[8 : 8 + length]), before[8 + length :]
        way = self.rng.choice(
            ["length", "text", "entry", "entry", "entry", "names", "metadata", "no data"]
        )
        if way == "length":
            claimed = self.rng.choice(
                [0, 1, 7, length - 1, length + 1, 2**31, 2**40, 2**63, 2**64 - 1]
            )
            file.write_bytes(struct.pack("<Q", claimed) + before[8:])
            return f"header of {claimed} bytes"
        text = json.dumps(header).encode()
        if way == "text":
            name = self.rng.choice(sorted(TEXTS))
            text, way = TEXTS[name], f"header is {name}"
        elif way == "entry":
            name = self.rng.choice([key for key in header if key != "__metadata__"])
            part = self.rng.choice(["dtype", "shape", "data_offsets", "whole"])
            sizes = ([2, -1], [2**62, 4], [8, 4], [10**30, 10**30], [0, 0])
            odd = self.rng.choice([*ODD, "F4", "BF16", "F8_E4M3", *sizes])
            if part == "whole":
                header[name] = odd
            else:
                header[name][part] = odd
            text, way = json.dumps(header).encode(), f"{name} {part} = {str(odd)[:40]!r}"
        elif way == "names":
            moved = {
                self.rng.choice(NAMES) if self.rng.random() < 0.3 else key: v
                for key, v in header.items()
            }
            text = json.dumps(moved).encode()
        elif way == "metadata":
            header["__metadata__"] = self.rng.choice(ODD)
            text = json.dumps(header).encode()
        elif way == "no data":
            data = data[: self.rng.randrange(len(data))]
        file.write_bytes(struct.pack("<Q", len(text)) + text + data)
        return way

    def _tensor(self, file: Path, before: bytes) -> str:
        """One or four bits of one tensor's bytes; returns its name."""
        length = struct.unpack("<Q", before[:8])[0]
        header = {
            name: entry
            for name, entry in json.loads(before[8 : 8 + length]).items()
            if name != "__metadata__"
        }
        name = self.rng.choice(sorted(header))
        begin, end = header[name]["data_offsets"]
        data = bytearray(before)
        for _ in range(self.rng.choice((1, 1, 4))):
            data[8 + length + self.rng.randrange(begin, end)] ^= 1 << self.rng.randrange(8)
        file.write_bytes(data)
        return name


class Inputs(Damage):
    """Makes cases below `room`, from the valid `target` and `head` directories.

    `url` is a server that answers.
    """

    def __init__(self, room: Path, target: Path, head: Path, url: str, seed: int) -> None:
        super().__init__(random.Random(seed))
        self.room, self.target, self.head, self.url = room, target, head, url

    def case(self, number: int) -> Case:
        directory = self.room / f"case{number}"
        directory.mkdir()
        target, head = (
            self._copy(self.target, directory / "target"),
            self._copy(self.head, directory / "head"),
        )
        ways = (*[self._checkpoint] * 4, *[self._yaml] * 3, *[self._measured] * 2)
        return self.rng.choice(ways)(directory, target, head)

    def _copy(self, source: Path, place: Path) -> Path:
        shutil.copytree(source, place, copy_function=os.link)
        return place

    def _checkpoint(self, directory: Path, target: Path, head: Path) -> Case:
        broken = self.rng.choice([target, head])
        name = self.rng.choice(sorted(path.name for path in broken.iterdir()))
        if self.rng.random() < 0.12:  # a file that is there only sometimes
            sometimes = (
                "hf_quant_config.json",
                "provenance.json",
                "special_tokens_map.json",
                "tokenizer.json",
            )
            name = self.rng.choice(sometimes)
        wrong = self._spoil(broken / name)
        if self.rng.random() < 0.05:
            wrong = f"the directory is {self._nature(broken)}"
        version = self.rng.choice(VERSIONS)
        names = {"broken": broken, "head": head, "target": target, "version": version}
        names["out"] = directory / "out"
        names["dialect"] = self.rng.choice(["trtllm", "vllm", "sglang", "speculators"])
        commands = [filled(line, names) for line in CHECKPOINT_COMMANDS]
        argv = self.rng.choice(
            [words for words in commands if any(str(broken) in word for word in words)]
        )
        return Case(f"{broken.name}/{name}: {wrong}", argv, directory)

    def _yaml(self, directory: Path, target: Path, head: Path) -> Case:
        file = directory / "engine.yml"
        valid = b"max_batch_size: 8\nspeculative_config: {decoding_type: Eagle, max_draft_len: 3}\n"
        file.write_bytes(valid)
        wrong = (
            self._spoil(file, {**TEXTS, **YAMLS}) if self.rng.random() < 0.9 else self._nature(file)
        )
        version = self.rng.choice(VERSIONS)
        names = {"file": file, "version": version, "target": target, "head": head}
        argv = filled(self.rng.choice(YAML_COMMANDS), names)
        return Case(f"engine YAML: {wrong}", argv, directory)

    def _measured(self, directory: Path, target: Path, head: Path) -> Case:
        """Prompts, results and recordings, for bench, check and plan."""
        rows = [{"question_id": 1, "category": "code", "turns": ["Sort this."]}, {"prompt": "Why?"}]
        acceptance = {
            "schema_version": 1,
            "acceptance": {"overall": {"length": 2.4, "by_position": [0.7, 0.5, 0.2]}},
        }
        valid = {
            "prompts.jsonl": rows,
            "results.json": [
                run_of(np.random.default_rng(0), ["a", "b"], np.zeros(2), 0.0).to_dict()
            ],
            "recording.json": [RECORDING],
            "acceptance.json": [acceptance],
        }
        file = directory / self.rng.choice(sorted(valid))
        file.write_text("\n".join(map(json.dumps, valid[file.name])) + "\n")
        wrong = self._spoil(file)
        of_file = MEASURED_COMMANDS[file.name]
        lines = self.rng.choice(list(MEASURED_COMMANDS.values())) if wrong in SWAPPED else of_file
        names = {"url": self.url, "file": file, "target": target, "head": head, "wrong": wrong}
        argv = filled(self.rng.choice(lines), names | {"out": directory / "out"})
        return Case(f"{file.name}: {wrong}", argv, directory)
