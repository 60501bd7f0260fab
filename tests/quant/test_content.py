"""What quantize says of damaged sources of four families, seeded; clean ones raise no finding."""

import random
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests.command_line import problem_codes, trtspec
from tests.json_files import read_json, write_json
from tests.tiny import make_target
from trtspec.checkpoint.headers import Checkpoint, TensorInfo
from trtspec.errors import Problem, TrtspecError, has_errors
from trtspec.quant.content import content_problems
from trtspec.quant.conversion_plan import ConversionOptions
from trtspec.quant.policy import load_policy
from trtspec.quant.run import Quantized, quantize_checkpoint
from trtspec.report import file_sha256

FAMILIES = {
    "K2": {"format": "fp8-block", "nested": False},
    "K2-Thinking": {"format": "int4", "nested": False},
    "K2.5": {"format": "int4", "vision": True},
    "BF16": {"format": "bf16", "shards": 1},  # gate and up are in one file
}
Bytes = dict[str, np.ndarray]  # shard -> its bytes, mapped for writing
Damage = Callable[[random.Random, Checkpoint, Bytes], None]


def hole(draw: random.Random, source: Checkpoint, files: Bytes) -> None:
    """Pages that a download never filled, behind the header."""
    shard = draw.choice(source.shards)
    begin = min(info.begin for info in source.tensors.values() if info.shard == shard)
    first = draw.randrange(begin // 4096 + 1, len(files[shard]) // 4096 - 1)
    last = draw.randrange(first + 1, len(files[shard]) // 4096 + 1)
    files[shard][first * 4096 : last * 4096] = 0


def flip(bits: tuple[int, ...], scales: bool = False) -> Damage:
    """One bit of a value of BF16 or F32, counted from the sign (0)."""

    def damage(draw: random.Random, source: Checkpoint, files: Bytes) -> None:
        infos = [
            info
            for info in source.tensors.values()
            if info.dtype in ("BF16", "F32") and info.numel > 1
        ]
        found = (
            [info for info in infos if info.name.endswith(("_scale", "_scale_inv"))]
            if scales
            else []
        )
        values = of(draw.choice(found or infos), files)
        index = draw.choice(np.flatnonzero(values << 1))
        values[index] ^= values.dtype.type(1 << 8 * values.itemsize - 1 - draw.choice(bits))

    return damage


def of(info: TensorInfo, files: Bytes) -> np.ndarray:
    return files[info.shard][info.begin : info.end].view(
        {"BF16": "<u2", "F32": "<u4"}.get(info.dtype, "u1")
    )


def vanished(draw: random.Random, source: Checkpoint, files: Bytes) -> None:
    """Scales of a linear that became 0; where the source has none, values that became tiny."""
    scales = [
        info for info in source.tensors.values() if info.name.endswith(("_scale", "_scale_inv"))
    ]
    if not scales:
        return flip((2,))(draw, source, files)
    values = of(draw.choice(scales), files)
    values[draw.sample(range(values.size), draw.randint(1, values.size))] = 0


def repeated(draw: random.Random, source: Checkpoint, files: Bytes) -> None:
    """The tensors of one layer, again as those of another."""
    one, other = draw.sample(range(1, 4), 2)
    for name, info in source.tensors.items():
        if f".layers.{one}." in name:
            of(source.tensors[name.replace(f".layers.{one}.", f".layers.{other}.")], files)[:] = of(
                info, files
            )


def copying(old: str, new: str) -> Damage:
    """The tensors of one linear, again as those of another."""

    def damage(draw: random.Random, source: Checkpoint, files: Bytes) -> None:
        for name, info in source.tensors.items():
            if f".{old}." in name:
                of(source.tensors[name.replace(f".{old}.", f".{new}.")], files)[:] = of(info, files)

    return damage


def random_bytes(draw: random.Random, source: Checkpoint, files: Bytes) -> None:
    info = draw.choice([info for info in source.tensors.values() if info.nbytes >= 256])
    first = info.begin + draw.randrange(info.nbytes - 64)
    files[info.shard][first : first + 64] = np.frombuffer(draw.randbytes(64), "u1")


def exchanged(draw: random.Random, source: Checkpoint, files: Bytes) -> None:
    """Two experts' tensors change places."""
    names = [name for name in source.tensors if ".experts.0.down_proj." in name]
    for name in names:
        one, other = (
            of(source.tensors[name], files),
            of(source.tensors[name.replace("rts.0.", "rts.1.")], files),
        )
        one[:], other[:] = other.copy(), one.copy()


NAMED: dict[str, Damage] = {
    "holes": hole,
    "vanished scales": vanished,
    "two top exponent bits": flip((1, 2)),
    "the same of scales": flip((1, 2), scales=True),
    "repeated shards": repeated,
}
OTHERS: dict[str, Damage] = {
    "third exponent bit": flip((3,)),
    "low exponent bits": flip((6, 7, 8)),
    "signs": flip((0,)),
    "random bytes": random_bytes,
    "exchanged experts": exchanged,
}


class Sources:
    """The families, each damaged in place and restored."""

    def __init__(self, room: Path) -> None:
        self.room, self.clean = room, dict[str, Checkpoint]()
        for name, options in FAMILIES.items():
            path = make_target(
                room / name,
                layers=4,
                experts=2,
                **{"shards": 3} | options,  # type: ignore[arg-type]
            )
            self.clean[name] = Checkpoint.open(path)
            shutil.copytree(path, room / f"{name}-damaged")

    def path(self, family: str) -> Path:
        return self.room / f"{family}-damaged"

    def damage(self, family: str, damage: Damage, seed: int) -> None:
        clean, path = self.clean[family], self.path(family)
        files = {shard: np.fromfile(clean.path / shard, "u1") for shard in clean.shards}
        damage(random.Random(seed), clean, files)
        for shard, data in files.items():
            (path / shard).write_bytes(data.tobytes())

    def record_hashes(self, family: str, known: bool) -> None:
        place = self.path(family) / "provenance.json"
        shards = {
            shard: file_sha256(self.clean[family].path / shard)
            for shard in self.clean[family].shards
        }
        write_json(place, {"shards": shards if known else {}})

    def problems(self, family: str, policy: str = "k2.6") -> list[Problem]:
        """What quantize names; a refusal counts as an error."""
        out = self.room / "out"
        shutil.rmtree(out, ignore_errors=True)
        try:
            done = quantize_checkpoint(
                self.path(family), out, load_policy(policy), ConversionOptions(workers=1)
            )
        except TrtspecError as error:
            return [Problem(error.code, "error", "", error.message)]
        assert isinstance(done, Quantized)
        return done.problems


@pytest.fixture(scope="module")
def sources(room: Path) -> Sources:
    return Sources(room)


def rates(
    sources: Sources, kinds: dict[str, Damage], count: int, hashes: bool
) -> dict[str, tuple[int, int]]:
    """Of `count` damages of each kind, how many quantize names."""
    named: Counter[str] = Counter()
    for number, (kind, damage) in enumerate(kinds.items()):
        for seed in range(count):
            family = list(FAMILIES)[(number + seed) % len(FAMILIES)]
            sources.record_hashes(family, hashes)
            sources.damage(family, damage, 1000 * number + seed)
            named[kind] += has_errors(sources.problems(family))
    return {kind: (named[kind], count) for kind in kinds}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_clean_source_raises_no_alarm(sources: Sources, family: str) -> None:
    for hashes in (False, True):
        sources.record_hashes(family, hashes)
        sources.damage(family, lambda *_: None, 0)
        assert [problem.code for problem in sources.problems(family)] == []


TWINS = [
    ("BF16", "k2.5", "layers.0.mlp.gate_proj", "layers.0.mlp.up_proj"),
    ("BF16", "k2.6", "layers.2.mlp.experts.0.gate_proj", "layers.2.mlp.experts.0.up_proj"),
    ("BF16", "k2.6", "layers.2.mlp.experts.0.up_proj", "layers.2.mlp.experts.1.up_proj"),
]


@pytest.mark.parametrize(("family", "policy", "old", "new"), TWINS)
def test_twins_in_groups_that_share_a_scale(sources, family, policy, old, new) -> None:
    sources.record_hashes(family, False)
    sources.damage(family, copying(old, new), 0)
    assert "TS-CONTENT-REPEATED" in [problem.code for problem in sources.problems(family, policy)]


def test_some_damages_are_named(sources: Sources) -> None:
    found = rates(sources, NAMED, 4, hashes=False)
    assert found == {kind: (4, 4) for kind in NAMED}
    assert rates(sources, {"exchanged experts": exchanged}, 2, hashes=True) == {
        "exchanged experts": (2, 2)
    }


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_thousand_damages(sources: Sources) -> None:
    found = {"without SHA-256": rates(sources, NAMED | OTHERS, 80, hashes=False),
             "with SHA-256": rates(sources, NAMED | OTHERS, 20, hashes=True)}  # fmt: skip
    for how, kinds in found.items():
        print(f"\n{how}")
        for kind, (named, count) in kinds.items():
            print(f"  {kind:24} {named:4} of {count:4} named")
    assert all(named == count for named, count in found["with SHA-256"].values())
    assert sum(found["without SHA-256"][kind][0] for kind in NAMED) >= 0.99 * 80 * len(NAMED)


def test_what_is_found_is_named_again_and_ends_with_3(sources: Sources) -> None:
    """A finding is named by quantize, in JSON, provenance.json and inspect; serve refuses."""
    sources.record_hashes("BF16", False)
    sources.damage("BF16", flip((1,)), 3)
    out = sources.room / "named"
    done = trtspec("quantize", sources.path("BF16"), "-o", out, "--policy", "k2.6", "--json")
    assert done.status == 3
    told = {one["code"] for one in done.json["problems"] if one["severity"] == "error"}
    assert told and told == {one["code"] for one in read_json(out / "provenance.json")["problems"]}
    again = trtspec("inspect", out, "--json")
    assert again.status == 3 and told <= problem_codes(again.json)
    served = trtspec("serve", out, "--backend", "reference", "--dry-run")
    assert served.status != 0 and next(iter(told)) in served.stdout + served.stderr


def test_only_whole_experts_may_be_zero() -> None:
    expert = [
        ("TS-TARGET-ZERO", f"model.layers.1.mlp.experts.7.{part}_proj.weight")
        for part in ("gate", "up", "down")
    ]
    assert [one.severity for one in content_problems(expert)] == ["warning"]
    assert [one.severity for one in content_problems(expert[:2])] == ["error"]
