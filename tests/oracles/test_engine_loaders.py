"""Heads, NVFP4 checkpoints and faults in them, in TensorRT-LLM's own loaders.

engine_loaders.py runs them. TRTSPEC_TRTLLM_LOADERS names folders with its sources, the newest
first; without it these tests are skipped.

Not run:

- the loaders of mixtures, norms, embeddings and attention: a wrong scale, shape or type in a
  mixture passes here;
- the kernel that interleaves block scales (padded here, row by row), and quantized q_a_proj and
  kv_a_proj, which no policy has, and an exclude list that matches kv_b_proj alone, like `*`
  (dequantized on a GPU);
- the buffers of captured states, the vision tower, MTP layers, attention data parallelism,
  pipelines, and files from disk to tensors;
- of the older states, all but modeling_speculative.py, modeling_deepseekv3.py and eagle3.py;
  linear.py is of one state in all folders.

PASSES and INVISIBLE have what passes both. `inspect --against` the source shows it of a target; of
a head, `bench`.
"""

import re
import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoint.heads.faults import TWINS, changed, disguised, faults
from tests.checkpoint.target_faults import Fault as TargetFault
from tests.checkpoint.target_faults import make_drafts, scheme_faults, tensor_faults, value_faults
from tests.checkpoint.test_target_faults import INVISIBLE, spoiled
from tests.checkpoint.test_target_faults import inspected as target_problems
from tests.command_line import inspected, printed_json, problem_codes, trtspec
from tests.heads.convert.foreign_heads import store, stored, write_head
from tests.json_files import write_json
from tests.oracles.test_head_loaders import (
    ENGINES,
    KINDS,
    HeadKind,
    Room,
    ask,
    compared,
    converted,
    needs_engine,
    request_for,
)
from tests.oracles.test_head_loaders import room as room
from tests.tiny import make_target
from trtspec.checkpoint.headers import Checkpoint
from trtspec.checkpoint.hub import resolve
from trtspec.errors import TrtspecError
from trtspec.quant.policy import load_policy
from trtspec.quant.run import quantize_checkpoint

# about which the folders stand, by their names; a43 is older than any that lint knows
RELEASES = {
    "new": "1.4.0rc1",
    "mid": "1.3.0rc22",
    "old": "1.3.0rc16",
    "s69587": "1.3.0rc16",
    "s43085": "1.3.0rc5",
}
# where the YAML says auto, or nothing: without a transceiver's backend, with NIXL, with another
AUTO = [["auto", True], ["PYTHON", True], ["PYTHON", False]]
# upstream writes it for single matrices only, and does not read it here
UNREAD = "gate_up_proj.inv_input_scale"
LOADERS = Path(__file__).with_name("engine_loaders.py")
PASSES = {"transposed", "d2t shifted", *(f"exchanged: {first}" for first, _ in TWINS)}
NVFP4 = ("weight", "weight_scale", "weight_scale_2", "input_scale")
# kimi-nano's down_proj has 48 columns, which INT4's groups of 32 do not divide
MADE = [("", "k2.5"), ("", "k2.6"), ("", "k2.7-code"), ("int4", "k2.6")]


def place(tensor: str) -> tuple[str, str, int]:
    """The module of the engine that a tensor belongs to, and its position there."""
    module = tensor.rpartition(".")[0]
    if re.search("(q_a|kv_b)_proj$|kv_a_proj_with_mqa$", module):
        return tensor, "", 0
    if ".experts." in module:
        return tensor, re.sub(r"(?<=\.experts)\..*", "", module), 0
    fused = re.sub(r"(?<=\.)(gate|up)_proj$", "gate_up_proj", module)
    return tensor, fused, int(module.endswith(".up_proj"))


@needs_engine
@pytest.mark.parametrize(("format", "policy"), MADE)
def test_each_tensor_reaches_its_place_once(tmp_path: Path, format: str, policy: str) -> None:
    source = resolve("kimi-nano").path
    if format:
        source = make_target(tmp_path / "in", format=format, layers=3)
    quantize_checkpoint(source, tmp_path / "out", load_policy(policy))
    tensors = Checkpoint.open(tmp_path / "out").tensors
    wanted = sorted(place(name.removeprefix("language_model.")) for name in tensors)
    scaled = {module for name, module, _ in wanted if name.endswith("weight_scale_2")}
    of_scaled = {name for name, module, _ in wanted if module in scaled}
    matrices = {name.rpartition(".")[0] for name in of_scaled}
    assert of_scaled == {f"{matrix}.{suffix}" for matrix in matrices for suffix in NVFP4}
    for sources in ENGINES:
        [answers] = printed_json(sys.executable, LOADERS, sources, tmp_path / "out")
        assert len(answers) == 7
        for answer in answers:
            assert sorted(map(tuple, answer["places"])) == wanted
            found = set(answer["quantized"]), answer["kv_cache"], answer["captured"], answer["auto"]
            assert found == (scaled, "FP8", [[1, 29, 57], [-1, 1, 3]], AUTO)
            assert not answer["moved"] + [name for name in answer["empty"] if UNREAD not in name]


@needs_engine
@pytest.mark.parametrize("prefix", ["layers.0.", "midlayer."])
@pytest.mark.parametrize("sources", ENGINES)
def test_heads_by_commit(room: Room, tmp_path: Path, sources: str, prefix: str) -> None:
    """What a commit does not compute, lint names for its release."""
    two_norms = HeadKind("mha, two norms before fc", "mha", "3.1", norm_before_fc=True)
    kinds, requests, silent = [*KINDS, two_norms], [], []
    state = Path(sources).name
    release = RELEASES.get(state)
    for kind in kinds:
        head = converted(room, kind, "trtllm").output or room.source(kind)
        config, tensors = stored(head)
        (tmp_path / kind.name).mkdir()
        named = {name.replace("layers.0.", prefix): value for name, value in tensors.items()}
        store(tmp_path / kind.name, config, named)
        requests.append(request_for(room, "trtllm", kind, tmp_path / kind.name, sources))
    for kind, request, told in zip(kinds, requests, ask("trtllm", requests), strict=True):
        truth = room.ours(room.source(kind), room.inputs(kind))
        cell = told["why"][:80] or compared(request, truth)
        said = not release or lint(tmp_path, request["head"], room, release)
        print(f"{state}, {release}, {prefix} {kind.name}: {cell}; lint: {said}")
        if not cell[0].isdigit() and not said:
            silent.append(kind.name)
    assert not silent


def lint(directory: Path, head: str, room: Room, release: str) -> list[str]:
    """The codes by which a release does not take a head."""
    head_config = {"decoding_type": "Eagle3", "max_draft_len": 3, "speculative_model": head}
    path = directory / "engine.yml"
    write_json(path, {"speculative_config": head_config})
    options = ("--target", room.target, "--head", head, "--trtllm-version", release, "--json")
    codes = problem_codes(trtspec("lint", path, *options).json)
    return sorted(code for code in codes if re.search("PRUNED-MLA|OLD-ENGINE|HEAD-FUNCTION", code))


def of_each_kind(all_faults: Iterable[Any]) -> list[Any]:
    """The first and the last fault of each kind."""
    every = list(all_faults)
    first = {fault.kind: fault for fault in reversed(every)}
    last = {fault.kind: fault for fault in every}
    return list(dict.fromkeys([*first.values(), *last.values()]))


def missed(who: str, rows: list[tuple[Any, str, set[str]]]) -> set[str]:
    """Prints what the engine says of each fault, and our codes.

    Returns the kinds of faults without a code.
    """
    for fault, theirs, codes in rows:
        what = getattr(fault, "what", None) or fault.name
        print(f"{who}, {fault.kind}, {what}: {theirs or 'passes'}; {sorted(codes) or 'passes'}")
    counts = Counter((bool(theirs), bool(codes)) for _, theirs, codes in rows)
    print(f"{who}: {len(rows)} faults, by (the engine stops, trtspec names it): {dict(counts)}")
    return {fault.kind for fault, _, codes in rows if not codes}


def head_codes(head: Path | str, target: Path) -> set[str]:
    try:
        return {problem.code for problem in inspected(head, target).problems}
    except TrtspecError as error:
        return {error.code}


@needs_engine
@pytest.mark.parametrize("name", ["mla 3.1 full", "mha 3 pruned"])
def test_faults_of_heads(room: Room, tmp_path: Path, name: str) -> None:
    kind = next(kind for kind in KINDS if kind.name == name)
    options = {"attention": kind.attention, "eagle": kind.eagle, "draft_vocab": kind.draft_vocab}
    head = write_head(tmp_path / "clean", room.target, "modelopt", **options)
    clean, usual = stored(head), head_codes(head, room.target)
    spoilt, requests, rows = of_each_kind(faults(*clean)), [], []
    spoilt += disguised(*clean)
    for number, fault in enumerate(spoilt):
        path = tmp_path / str(number)
        path.mkdir()
        store(path, *changed(fault, *clean))
        requests.append(request_for(room, "trtllm", kind, path, ENGINES[0]))
    for fault, request, told in zip(spoilt, requests, ask("trtllm", requests), strict=True):
        codes = head_codes(request["head"], room.target) - usual
        rows.append((fault, told["why"][:70], codes))
    assert missed(name, rows) <= PASSES


@needs_engine
def test_faults_of_targets(tmp_path: Path) -> None:
    draft = make_drafts(tmp_path)["nvfp4 experts only"]
    spoilt = of_each_kind(
        fault for table in (tensor_faults, value_faults, scheme_faults) for fault in table(draft)
    )
    spoilt += [
        TargetFault(
            fault.kind,
            fault.what,
            lambda draft, change=fault.change: change(draft.config, draft.tensors),
        )
        for fault in disguised(draft.config, draft.tensors)
    ]
    paths = [
        spoiled(draft, fault, tmp_path / f"faulty-{number}") for number, fault in enumerate(spoilt)
    ]
    good = draft.write(tmp_path / "clean")
    clean, *answers = printed_json(sys.executable, LOADERS, ENGINES[0], good, *paths)
    assert isinstance(clean, list), clean
    rows = []
    for fault, path, answer in zip(spoilt, paths, answers, strict=True):
        codes = {problem.code for problem in target_problems(path) if problem.severity != "info"}
        rows.append((fault, answer[:70] if isinstance(answer, str) else "", codes))
    assert missed("target", rows) <= PASSES | INVISIBLE.keys()
