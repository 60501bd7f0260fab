"""Every fault that a head's files can show is named alone, and refused by all who would use it.

TRTSPEC_SEED chooses another slice for the default test.
"""

import os
import random
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.checkpoint.heads.faults import REFUSED, Fault, changed, faults
from tests.checkpoint.target_faults import edit_header, header_changes
from tests.command_line import inspected
from tests.heads.convert.foreign_heads import DIALECTS, expressible, store, stored, write_head
from tests.tiny import make_target
from trtspec.checkpoint.headers import Checkpoint
from trtspec.checkpoint.heads.read import head_spec
from trtspec.checkpoint.hub import resolve
from trtspec.checkpoint.values import head_value_problems
from trtspec.errors import Problem, TrtspecError, has_errors
from trtspec.heads.convert.conversion import (
    DESTINATION_CODES,
    REPAIRED_CODES,
    Options,
    convert_head,
)
from trtspec.heads.training.training_plan import check_initial
from trtspec.models.head_weights import load_head
from trtspec.models.weights import load_target

KINDS = (("mha", "3", 128), ("mha", "3.1", None), ("mla", "3", None), ("mla", "3.1", 128))
HEADS = [
    (dialect, *kind)
    for dialect in DIALECTS
    for kind in KINDS
    if expressible(dialect, kind[0], kind[1])
]
RANK = {"info": 0, "warning": 1, "error": 2}
# by convert, from what the head itself holds
MENDED = REPAIRED_CODES | DESTINATION_CODES | {"TS-HEAD-D2T-MISSING"}
# what a clean head of a kind has above info: TensorRT-LLM's own layout, and its loader
CLEAN = {("modelopt", "mla", 128): {"TS-HEAD-PRUNED-MLA"}}


class Judge:
    """Gives heads one fault each and asks inspect, convert, train --init and the engine."""

    def __init__(self, room: Path) -> None:
        self.room = room
        self.target = make_target(room / "target", layers=8)
        self.model = load_target(self.target, dtype=torch.float32)
        self.heads: dict[tuple[Any, ...], tuple[dict[str, Any], dict[str, torch.Tensor]]] = {}
        self.seen: Counter[str] = Counter()
        self.found: Counter[str] = Counter()
        self.missed: defaultdict[str, list[str]] = defaultdict(list)
        self.noise: list[str] = []
        self.accepted: list[str] = []
        self.refusals: Counter[str] = Counter()
        self.mended = 0

    def clean(self, head: tuple[Any, ...]) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
        if head not in self.heads:
            dialect, attention, eagle, vocab = head
            path = self.room / "-".join(map(str, head))
            write_head(
                path, self.target, dialect, attention=attention, eagle=eagle, draft_vocab=vocab
            )
            self.heads[head] = stored(path)
        return self.heads[head]

    def all(self) -> list[tuple[tuple[Any, ...], Fault]]:
        return [(head, fault) for head in HEADS for fault in faults(*self.clean(head))]

    def judge(self, head: tuple[Any, ...], fault: Fault) -> None:
        config, tensors = changed(fault, *self.clean(head))
        path = self.room / "faulty"
        path.mkdir(exist_ok=True)
        store(path, config, tensors)
        self.ask(
            path, "-".join(map(str, head)), fault, CLEAN.get((head[0], head[1], head[3]), set())
        )

    def ask(self, path: Path, head: str, fault: Fault, usual: set[str]) -> None:
        self.seen[fault.kind] += 1
        name = f"{head}: {fault.kind}, {fault.what}"
        problems = self.inspected(path)
        right = [
            one
            for one in problems
            if one.code in fault.codes and RANK[one.severity] >= RANK[fault.severity]
        ]
        if right or (problems and problems[0].code == REFUSED):
            self.found[fault.kind] += 1
        else:
            self.missed[fault.kind].append(f"{name} -> {[one.code for one in problems]}")
        told = [one for one in problems if one.severity != "info" and one.code not in usual]
        if len(told) > 1:
            self.noise.append(f"{name} -> {[(one.code, one.where) for one in told]}")
        errors = {one.code for one in told if one.severity == "error"}
        if errors:
            self.refuse(path, name, errors)

    def inspected(self, path: Path) -> list[Problem]:
        try:
            return inspected(str(path), str(self.target), sample=0).problems
        except TrtspecError as error:
            return [Problem(REFUSED, "error", str(path), error.message, error.remedy)]

    def refuse(self, path: Path, name: str, errors: set[str]) -> None:
        """Whoever would spend time on the head refuses an error; convert may mend it instead."""
        target = resolve(str(self.target))
        users = {
            "convert": lambda: convert_head(
                resolve(str(path)), path.parent / "out", Options("vllm", dry_run=True), target
            ),
            "train --init": lambda: check_initial(path, head_spec(Checkpoint.open(path))),
            "serve --backend reference": lambda: load_head(path, self.model, dtype=torch.float32),
        }
        for user, use in users.items():
            if user == "train --init" and all(code.startswith("TS-PAIR") for code in errors):
                continue  # it takes neither the embedding nor the layers from the head
            try:
                result: Any = use()
            except TrtspecError:
                self.refusals[user] += 1
                continue
            if user == "convert" and any(one.severity == "error" for one in result.problems):
                self.refusals[user] += 1
            elif user == "convert" and errors <= MENDED:
                self.mended += 1
            else:
                self.accepted.append(f"{user} took {name} ({', '.join(sorted(errors))})")

    def report(self) -> str:
        lines = [f"{sum(self.seen.values())} faults in {len(self.heads)} heads"]
        for kind, seen in self.seen.items():
            lines.append(
                f"{kind:26} {self.found[kind]:5} of {seen:5} found, "
                f"{100 * self.found[kind] / seen:.1f} %"
            )
        lines.append(f"refused by {dict(self.refusals)}, mended by convert {self.mended}")
        lines += [f"missed: {one}" for kind in self.missed for one in self.missed[kind][:8]]
        lines += [f"more than one finding ({len(self.noise)}): {one}" for one in self.noise[:40]]
        lines += [f"accepted ({len(self.accepted)}): {one}" for one in self.accepted[:20]]
        return "\n".join(lines)

    @property
    def perfect(self) -> bool:
        return not (any(self.missed.values()) or self.noise or self.accepted)


@pytest.fixture(scope="module")
def judge(room: Path) -> Judge:
    return Judge(room)


@pytest.mark.parametrize(
    "count", [140, pytest.param(None, marks=[pytest.mark.slow, pytest.mark.timeout(3600)])]
)
def test_faults_are_found_alone_and_refused(judge: Judge, count: int | None) -> None:
    """All, or `count` of them: one of each kind and its codes, and some more."""
    every = judge.all()[:: 1 if count else int(os.environ.get("TRTSPEC_FAULT_STEP", "1"))]
    if count is not None:
        random.Random(int(os.environ.get("TRTSPEC_SEED", "7"))).shuffle(every)
        first = {(fault.kind, fault.codes): (head, fault) for head, fault in every}
        every = [*first.values(), *every[: count - len(first)]]
    for head, fault in every:
        judge.judge(head, fault)
    print(f"\n{judge.report()}")
    assert judge.perfect, judge.report()


@pytest.mark.parametrize("lie", header_changes())
def test_a_header_that_lies_is_refused(judge: Judge, lie: str) -> None:
    """By inspect, and by who loads the head; the bytes behind the header are untouched."""
    path = write_head(judge.room / "lying", judge.target, "modelopt", attention="mla")
    edit_header(path / "model.safetensors", header_changes()[lie])
    assert has_errors(judge.inspected(path))
    with pytest.raises(TrtspecError):
        load_head(path, judge.model)


def test_one_flipped_bit_of_a_converted_head_is_found(judge: Judge) -> None:
    """In every tensor, maps included, at its first, middle and last byte."""
    source = write_head(
        judge.room / "flip", judge.target, "specforge", attention="mha", draft_vocab=128
    )
    path = judge.room / "flipped"
    convert_head(resolve(str(source)), path, Options("torchspec"), resolve(str(judge.target)))
    assert not [one for one in judge.inspected(path) if one.severity != "info"]
    data = (path / "model.safetensors").read_bytes()
    seen = found = 0
    for name, info in Checkpoint.open(path).tensors.items():
        for position in (info.begin, (info.begin + info.end) // 2, info.end - 1):
            bits = bytearray(data)
            bits[position] ^= 1
            (path / "model.safetensors").write_bytes(bits)
            opened = Checkpoint.open(path)
            problems = head_value_problems(opened, opened.tensors)
            seen, found = seen + 1, found + ([one.where for one in problems] == [name])
    assert (seen, found) == (seen, seen)
    assert seen >= 3 * 16
    with pytest.raises(TrtspecError, match="TS-HEAD-"):
        load_head(path, judge.model)
