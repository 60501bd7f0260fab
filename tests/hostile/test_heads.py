"""Damaged heads through inspect and convert: runs end with a reason, and leave nothing by halves.

A conversion that succeeds must have written what the undamaged head becomes, unless `inspect` names
what is different. TRTSPEC_SEED chooses other damage for the slow test (1 without).
"""

import json
import random
import shutil
from collections import Counter
from pathlib import Path

import pytest

from tests.checkpoint.heads.faults import changed, faults
from tests.command_line import SEED
from tests.heads.convert.foreign_heads import store, stored, write_head
from tests.hostile.inputs import Inputs
from tests.hostile.test_malformed import SLOW, Runner, runner  # noqa: F401  # a fixture
from tests.tiny import make_target
from trtspec.checkpoint.headers import Checkpoint
from trtspec.checkpoint.heads.read import compare_heads

pytestmark = pytest.mark.clock
KINDS = (
    ("modelopt", {"attention": "mla"}),
    ("vllm", {"attention": "mha", "draft_vocab": 128}),
    ("specforge", {"attention": "mha", "eagle": "3.1"}),
    ("torchspec", {"attention": "mla", "eagle": "3.1", "draft_vocab": 128}),
)
WRITTEN = {"config.json", "model.safetensors", "provenance.json", "README.md"}


class Damage:
    """Clean heads, what they become, and copies with one thing wrong."""

    def __init__(self, room: Path, run: Runner, seed: int) -> None:
        self.room, self.run, self.rng = room, run, random.Random(seed)
        self.target = make_target(room / "target", layers=8)
        self.inputs = Inputs(room, self.target, self.target, "", seed)
        self.heads: list[Path] = []
        self.usual: list[set[str]] = []
        self.outcomes: Counter[str] = Counter()
        self.bad: list[str] = []
        for dialect, options in KINDS:
            head = write_head(
                room / f"clean-{dialect}",
                self.target,
                dialect,
                **options,  # type: ignore[arg-type]
            )
            self.heads.append(head)
            assert self.convert(head, room, room / f"good-{dialect}") == 0
            self.usual.append(self.findings(head, room))

    def ended(self, place: Path, *words: object) -> int | None:
        """The status of a command; a bad end is noted."""
        status, what = self.run.ended(place, *words, "--json")
        if what:
            self.bad.append(f"{place.name} {words[0]}: {what}")
        return status

    def convert(self, head: Path, place: Path, output: Path) -> int | None:
        return self.ended(
            place, "convert", head, "--output", output, "--to", "vllm", "--target", self.target
        )

    def findings(self, head: Path, place: Path) -> set[str]:
        self.ended(place, "inspect", head, "--against", self.target, "--sample", 0)
        text = (place / "stdout").read_text()
        try:
            told = json.loads(text)
        except ValueError:
            return {text[:80]}
        errors = {str(told["error"])} if "error" in told else set()
        return errors | {problem["code"] for problem in told.get("problems", [])}

    def spoil(self, head: Path) -> str:
        """One thing is wrong with the config, the header, a tensor or the file itself."""
        way = self.rng.random()
        if way < 0.35:
            file = head / "config.json"
            return self.inputs._json(file, file.read_bytes())
        if way < 0.6:
            file = head / "model.safetensors"
            return self.inputs._safetensors(file, file.read_bytes())
        if way < 0.9:
            config, tensors = stored(head)
            fault = self.rng.choice(list(faults(config, tensors)))
            store(head, *changed(fault, config, tensors))
            return f"{fault.kind}: {fault.what}"
        file = self.rng.choice(sorted(head.iterdir()))
        data = file.read_bytes()
        at = self.rng.randrange(len(data))
        file.write_bytes(data[:at])
        return f"{file.name} cut at {at}"

    def one(self, number: int) -> None:
        which = self.rng.randrange(len(self.heads))
        place = self.room / f"case{number}"
        place.mkdir()
        head = place / "head"
        shutil.copytree(self.heads[which], head)
        name = f"{number} {self.heads[which].name}: {self.spoil(head)}"
        codes = self.findings(head, place)
        status = self.convert(head, place, place / "out")
        left = {path.name for path in place.iterdir()} - {"head", "out", "stdout", "stderr"}
        if left:
            self.bad.append(f"{name}: left {sorted(left)}")
        if status != 0:
            self.outcomes[f"refused, status {status}"] += 1
            if (place / "out").exists():
                self.bad.append(f"{name}: status {status} and an output")
        else:
            self.succeeded(name, which, place / "out", codes - self.usual[which])
        shutil.rmtree(place)

    def succeeded(self, name: str, which: int, output: Path, codes: set[str]) -> None:
        if {path.name for path in output.iterdir()} != WRITTEN:
            self.bad.append(f"{name}: wrote {sorted(path.name for path in output.iterdir())}")
            return
        good = self.room / f"good-{KINDS[which][0]}"
        found = compare_heads(Checkpoint.open(output), Checkpoint.open(good))
        if not found.problems and not found.absent:
            self.outcomes["mended, or of no effect"] += 1
        elif codes:
            self.outcomes["another head, and inspect says so"] += 1
        else:
            self.bad.append(
                f"{name}: silent: {[problem.message for problem in found.problems][:2]}"
            )

    def report(self) -> str:
        return "\n".join([f"{dict(self.outcomes)}, {len(self.bad)} bad", *self.bad])


@pytest.mark.parametrize(("seed", "count"), [(5, 4), pytest.param(SEED, 1000, marks=SLOW)])
def test_damaged_heads(tmp_path: Path, runner: Runner, seed: int, count: int) -> None:  # noqa: F811
    damage = Damage(tmp_path, runner, seed)
    for number in range(count):
        damage.one(number)
    print(f"\nseed {seed}, {count} damaged heads: {damage.report()}")
    assert not damage.bad, damage.report()
