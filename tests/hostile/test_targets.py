"""A thousand damaged targets: every command ends in one clear message, nothing is half-written, nothing damaged passes.

Bytes of headers, values of configs and bytes of tensors are changed at random. What may happen to a conversion:

- it is refused, by a message of ours, without an output that any loader would take for a checkpoint;
- it succeeds, and the output equals the clean one except in what the changed bytes decide: the tensor that they lie in
  (and its partner, which shares a scale), or config words that are carried along.

A damaged value that is as plausible as the right one cannot be refused; it must not spread.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import struct
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open

from tests.hostile.test_malformed import complaint
from tests.tiny import make_target

FORMATS = ("bf16", "int4", "fp8-block")
SECONDS = 5
SOME, ALL = 40, 1000
WORDS = (
    None,
    -1,
    0,
    1,
    2**31,
    10**30,
    1e400,
    "",
    "x",
    "yarn",
    [],
    [1],
    {},
    {"a": 1},
    True,
    "\x00",
    [None],
    "../../etc",
)


class Damage:
    """One change to a copy of a clean checkpoint: `kind`, and the tensors whose bytes changed."""

    def __init__(self, clean: Path, directory: Path, draw: random.Random) -> None:
        self.draw, self.path = draw, directory
        shutil.rmtree(directory, ignore_errors=True)
        shutil.copytree(clean, directory)
        self.kind = draw.choice(
            ("header", "header value", "config", "config word", "index", "tensor", "tensor", "file")
        )
        self.touched: set[str] = set()
        getattr(self, self.kind.replace(" ", "_"))()

    def _shard(self) -> Path:
        return self.draw.choice(sorted(self.path.glob("*.safetensors")))

    def header(self) -> None:
        """Random bytes of a header."""
        path = self._shard()
        raw = bytearray(path.read_bytes())
        (length,) = struct.unpack("<Q", raw[:8])
        for _ in range(self.draw.choice((1, 1, 2, 8))):
            raw[self.draw.randrange(0, 8 + length)] = self.draw.choice(
                (0, 0x22, 0x7B, 0x30, 0x39, self.draw.randrange(256))
            )
        path.write_bytes(raw)

    def header_value(self) -> None:
        """A value somewhere in a header replaced."""
        path = self._shard()
        raw = path.read_bytes()
        (length,) = struct.unpack("<Q", raw[:8])
        header = json.loads(raw[8 : 8 + length])
        self._replace(header)
        text = json.dumps(header).encode()
        path.write_bytes(struct.pack("<Q", len(text)) + text + raw[8 + length :])

    def config(self) -> None:
        """Random bytes of a JSON file."""
        path = self.path / self.draw.choice(
            ("config.json", "config.json", "generation_config.json", "tokenizer_config.json")
        )
        raw = bytearray(path.read_bytes())
        for _ in range(self.draw.choice((1, 2, 5))):
            raw[self.draw.randrange(len(raw))] = self.draw.randrange(256)
        path.write_bytes(raw)

    def config_word(self) -> None:
        path = self.path / "config.json"
        config = json.loads(path.read_text())
        self._replace(config)
        path.write_text(json.dumps(config))

    def index(self) -> None:
        path = self.path / "model.safetensors.index.json"
        index = json.loads(path.read_text())
        self._replace(index["weight_map"] if self.draw.random() < 0.7 else index)
        path.write_text(json.dumps(index))

    def tensor(self) -> None:
        """One to four bytes of one tensor."""
        path = self._shard()
        raw = bytearray(path.read_bytes())
        (length,) = struct.unpack("<Q", raw[:8])
        header = {name: entry for name, entry in json.loads(raw[8 : 8 + length]).items() if name != "__metadata__"}
        name = self.draw.choice(sorted(header))
        begin, end = header[name]["data_offsets"]
        for _ in range(self.draw.choice((1, 1, 4))):
            raw[8 + length + self.draw.randrange(begin, end)] ^= 1 << self.draw.randrange(8)
        path.write_bytes(raw)
        self.touched.add(name)

    def file(self) -> None:
        """A file cut, grown, emptied, removed or made a directory."""
        path = self.draw.choice(sorted(self.path.iterdir()))
        raw = path.read_bytes()
        change = self.draw.randrange(5)
        if change == 0:
            path.write_bytes(raw[: self.draw.randrange(len(raw))])
        elif change == 1:
            path.write_bytes(raw + bytes(self.draw.randrange(1, 100)))
        elif change == 2:
            path.write_bytes(b"")
        else:
            path.unlink()
            if change == 3:
                path.mkdir()

    def _replace(self, value: Any) -> None:
        """Somewhere in a tree of mappings and lists: another value, a key removed or renamed."""
        holder = value
        while True:
            keys = list(holder) if isinstance(holder, dict) else list(range(len(holder)))
            key = self.draw.choice(keys)
            inner = holder[key]
            if isinstance(inner, (dict, list)) and inner and self.draw.random() < 0.85:
                holder = inner
                continue
            change = self.draw.random()
            if isinstance(holder, dict) and change < 0.2:
                del holder[key]
            elif isinstance(holder, dict) and change < 0.3:
                holder[f"{key}_"] = holder.pop(key)
            elif isinstance(inner, int) and not isinstance(inner, bool) and change < 0.6:
                holder[key] = inner + self.draw.choice((-1, 1, 8, -inner, inner, 2**40))
            else:
                holder[key] = self.draw.choice(WORDS)
            return


def contents(directory: Path) -> dict[str, bytes]:
    """Tensor -> bytes, whatever shard it lies in."""
    found = {}
    for shard in sorted(directory.glob("*.safetensors")):
        raw = shard.read_bytes()
        (length,) = struct.unpack("<Q", raw[:8])
        for name, entry in json.loads(raw[8 : 8 + length]).items():
            if name != "__metadata__":
                begin, end = entry["data_offsets"]
                found[name] = raw[8 + length + begin : 8 + length + end]
        with safe_open(shard, "np") as theirs:  # as a loader that nobody here wrote opens it
            assert set(theirs.keys()) <= set(found)
    return found


def allowed(touched: set[str]) -> set[str]:
    """Modules whose tensors may differ: those touched, and gate with up."""
    modules = {name.rpartition(".")[0] for name in touched}
    pairs = (("gate_proj", "up_proj"), ("up_proj", "gate_proj"))
    return modules | {module.removesuffix(a) + b for module in modules for a, b in pairs if module.endswith(a)}


class Case:
    """What `complaint` reads."""

    def __init__(self, directory: Path, argv: list[str]) -> None:
        self.directory, self.argv = directory, argv


class Bench:
    """Clean sources with their outputs, and a worker that runs commands in killable children. It is a process of its
    own: a child's memory is bounded with what it was forked from, and a test process holds much."""

    def __init__(self, room: Path) -> None:
        self.room = room
        words, root = [sys.executable, "-m", "tests.hostile.worker"], Path(__file__).parents[2]
        self.worker = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=root)
        self.clean = {f: make_target(room / f"clean-{f}", format=f, layers=2, experts=2, vision=True) for f in FORMATS}
        self.outputs, self.configs = {}, {}
        for name, source in self.clean.items():
            out = room / f"out-{name}"
            answer = self.run(["quantize", str(source), "-o", str(out), "--policy", "k2.6"])
            assert answer["status"] == 0, (room / "said" / "stderr").read_text()
            self.outputs[name] = contents(out)
        self.ended: Counter[str] = Counter()

    def run(self, argv: list[str]) -> dict[str, object]:
        said = self.room / "said"
        said.mkdir(exist_ok=True)
        assert self.worker.stdin is not None and self.worker.stdout is not None
        self.worker.stdin.write(json.dumps({"argv": argv, "out": str(said), "process": False}) + "\n")
        self.worker.stdin.flush()
        answer: dict[str, object] = json.loads(self.worker.stdout.readline())
        return answer

    def judge(self, number: int, seed: int) -> str:
        """What is wrong with how inspect and quantize took one damage, or ""."""
        draw = random.Random(f"{seed}-{number}")
        name = draw.choice(FORMATS)
        damage, out = Damage(self.clean[name], self.room / "damaged", draw), self.room / "out"
        shutil.rmtree(out, ignore_errors=True)
        found = self.run(["inspect", str(damage.path), "--json"])
        wrong = complaint(Case(self.room / "said", ["inspect", "--json"]), found)  # type: ignore[arg-type]
        if wrong:
            return f"{number} {name} {damage.kind}: inspect: {wrong}"
        ended = self.run(["quantize", str(damage.path), "-o", str(out), "--policy", "k2.6"])
        wrong = complaint(Case(self.room / "said", ["quantize"]), ended) or self._output(
            name, damage, ended["status"], out
        )
        refused = f"inspect {found['status']}, quantize {ended['status']}"
        self.ended[f"{damage.kind}: {refused}"] += 1
        if not wrong and ended["status"] == 0 and found["status"] not in (0, 3):
            wrong = f"quantize took what inspect refused ({found['status']})"
        return f"{number} {name} {damage.kind} {sorted(damage.touched)}: quantize: {wrong}" if wrong else ""

    def _output(self, name: str, damage: Damage, status: object, out: Path) -> str:
        if status != 0:
            return "half-written output" if (out / "config.json").exists() else ""
        clean, made = self.outputs[name], contents(out)
        if clean.keys() != made.keys():
            return f"other tensors: {sorted(clean.keys() ^ made.keys())[:3]}"
        may = allowed(damage.touched)
        spread = [tensor for tensor in clean if clean[tensor] != made[tensor] and tensor.rpartition(".")[0] not in may]
        if spread:
            return f"silent change of {spread[:3]}"
        left = [path.name for path in out.iterdir() if path.name.endswith((".partial", ".tmp"))]
        return f"left behind: {left}" if left else ""


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    bench = Bench(tmp_path)
    yield bench
    bench.worker.kill()
    bench.worker.wait()


def fuzz(bench: Bench, count: int, report: Callable[[str], None] = print) -> None:
    seed = int(os.environ.get("TRTSPEC_SEED", "1"))
    wrong = [found for number in range(count) if (found := bench.judge(number, seed))]
    report(f"\nseed {seed}, {count} damages, {len(wrong)} wrong")
    for ended, times in sorted(bench.ended.items()):
        report(f"  {ended:48} {times}")
    assert not wrong, "\n".join(wrong[:20])


def test_some_damaged_targets(bench: Bench) -> None:
    fuzz(bench, SOME)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_thousand_damaged_targets(bench: Bench) -> None:
    fuzz(bench, ALL)
