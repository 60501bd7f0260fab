"""A thousand damaged targets: each command ends in one clear message, and no damage passes.

Nothing is half-written. A conversion may be refused, without an output that a loader would take for
a checkpoint. It may succeed, if its output equals the clean one except in the tensor whose bytes
were changed and the partner that shares its scale. A damaged value that is as plausible as the
right one cannot be refused; it must not spread. TRTSPEC_SEED chooses other damage.
"""

import json
import random
import shutil
import struct
from collections import Counter
from pathlib import Path

import pytest
from safetensors import safe_open

from tests.command_line import SEED
from tests.hostile.inputs import Damage
from tests.hostile.test_malformed import SLOW, Runner, runner  # noqa: F401  # a fixture
from tests.json_files import read_json
from tests.tiny import make_target

pytestmark = pytest.mark.clock
FORMATS = ("bf16", "int4", "fp8-block")


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


def may_differ(tensor: str, damaged: str) -> bool:
    """Whether a changed tensor decides another: one of its module, or gate with up."""
    module, changed = tensor.rpartition(".")[0], damaged.rpartition(".")[0]
    return module == changed or module.replace("gate_proj", "up_proj") == changed.replace(
        "gate_proj", "up_proj"
    )


class Targets:
    """Clean sources with outputs, and a runner of inspect and quantize on damaged copies."""

    def __init__(self, room: Path, run: Runner) -> None:
        self.room, self.run, self.said = room, run, room / "said"
        self.said.mkdir()
        self.clean = {
            f: make_target(room / f"clean-{f}", format=f, layers=2, experts=2, vision=True)
            for f in FORMATS
        }
        self.outputs = {}
        for name, source in self.clean.items():
            status, wrong = run.ended(
                self.said, "quantize", source, "-o", room / f"out-{name}", "--policy", "k2.6"
            )
            assert status == 0 and not wrong, wrong
            self.outputs[name] = contents(room / f"out-{name}")
        self.outcomes: Counter[str] = Counter()

    def damaged(self, source: Path, damage: Damage) -> tuple[Path, str, str]:
        """A copy with one thing wrong, what that is, and the tensor whose bytes changed or ""."""
        target, draw = self.room / "damaged", damage.rng
        shutil.rmtree(target, ignore_errors=True)
        shutil.copytree(source, target)
        way = draw.choice(("tensor", "tensor", "header", "header", "config", "index", "file"))
        names = {"config": "config.json", "index": "model.safetensors.index.json"}
        shards = sorted(path.name for path in target.glob("*.safetensors"))
        anything = sorted(path.name for path in target.iterdir())
        file = target / (names.get(way) or draw.choice(anything if way == "file" else shards))
        if way == "tensor":
            name = damage._tensor(file, file.read_bytes())
            return target, way, name
        if way == "file":
            what = damage._nature(file)
        else:
            what = (damage._safetensors if way == "header" else damage._json)(
                file, file.read_bytes()
            )
        return target, f"{way}: {file.name} {what}", ""

    def judge(self, number: int, seed: int) -> str:
        """What is wrong with how inspect and quantize took one damage, or ""."""
        draw = random.Random(f"{seed}-{number}")
        name = draw.choice(FORMATS)
        target, what, touched = self.damaged(self.clean[name], Damage(draw))
        out = self.room / "out"
        shutil.rmtree(out, ignore_errors=True)
        found, wrong = self.run.ended(self.said, "inspect", target, "--json")
        status = None
        if not wrong:
            status, wrong = self.run.ended(
                self.said, "quantize", target, "-o", out, "--policy", "k2.6"
            )
        self.outcomes[f"{what.partition(':')[0]}: inspect {found}, quantize {status}"] += 1
        if not wrong and status == 0 and found not in (0, 3):
            wrong = f"quantize took what inspect refused ({found})"
        wrong = wrong or self.spread(name, touched, status, out)
        return f"{number} {name} {what} {touched}: {wrong}" if wrong else ""

    def spread(self, name: str, touched: str, status: object, out: Path) -> str:
        if status != 0:
            return (
                ""
                if not (out / "config.json").exists() or status == 3 and named(out)
                else "half-written output"
            )
        clean, made = self.outputs[name], contents(out)
        if clean.keys() != made.keys():
            return f"other tensors: {sorted(clean.keys() ^ made.keys())[:3]}"
        spread = [
            tensor
            for tensor in clean
            if clean[tensor] != made[tensor] and not may_differ(tensor, touched)
        ]
        left = [path.name for path in out.iterdir() if path.name.endswith((".partial", ".tmp"))]
        return (
            f"silent change of {spread[:3]}" if spread else f"left behind: {left}" if left else ""
        )


def named(out: Path) -> bool:
    """Whether provenance.json of a finished output names an error of its source."""
    problems = read_json(out / "provenance.json")["problems"]
    return any(problem["severity"] == "error" for problem in problems)


@pytest.mark.parametrize("count", [15, pytest.param(1000, marks=SLOW)])
def test_damaged_targets(tmp_path: Path, runner: Runner, count: int) -> None:  # noqa: F811
    targets = Targets(tmp_path, runner)
    wrong = [found for number in range(count) if (found := targets.judge(number, SEED))]
    print(
        f"\nseed {SEED}, {count} damages, {len(wrong)} wrong",
        *sorted(targets.outcomes.items()),
        sep="\n  ",
    )
    assert not wrong, "\n".join(wrong[:20])
