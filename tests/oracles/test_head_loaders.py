"""Head types x other projects' loaders: trtspec converts, their class loads and drafts two steps.

Printed is the largest difference of the logits from those of our reference, or the code of the
refusal. What a class does not load must be refused by `trtspec convert` first, or announced as
needing a newer version.

TRTSPEC_ORACLE_SOURCES names a folder with checkouts of TorchSpec, SpecForge and EAGLE;
TRTSPEC_ORACLE_PYTHON a Python with transformers 4 (`make test-oracles` makes one), which the three
were written for; TRTSPEC_SPECULATORS_PYTHON and TRTSPEC_VLLM_PYTHON Pythons with these packages;
TRTSPEC_TRTLLM_LOADERS folders with TensorRT-LLM's sources, the newest first (engine_loaders.py says
which files). A loader whose place is not named is skipped. SGLang is its rules, written anew: known
by reading.
"""

import itertools
import json
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.cases import slow
from tests.command_line import ran
from tests.heads.convert.foreign_heads import stored
from tests.json_files import write_json
from tests.tiny import make_head, make_target, write_tensors
from trtspec.checkpoint.hub import resolve
from trtspec.heads.convert.conversion import HeadConversion, Options, convert_head
from trtspec.models.head_weights import load_head
from trtspec.models.weights import load_target

CLASSES = Path(__file__).with_name("head_classes.py")
TOLERANCE = 1e-4
SOURCES = os.environ.get("TRTSPEC_ORACLE_SOURCES", "")
ENGINES = os.environ.get("TRTSPEC_TRTLLM_LOADERS", "").split(os.pathsep)
needs_engine = pytest.mark.skipif(not ENGINES[0], reason="TRTSPEC_TRTLLM_LOADERS names no sources")
OLD_TRANSFORMERS = os.environ.get("TRTSPEC_ORACLE_PYTHON", sys.executable)


@dataclass(frozen=True)
class HeadKind:
    """`make_head`'s options, and what is changed of its config and tensors."""

    name: str
    attention: str
    eagle: str = "3"
    draft_vocab: int | None = None
    layers: tuple[int, ...] | None = None
    norm_before_fc: bool = False
    norm_output: bool = False
    yarn: bool = False
    lm_head: bool = True


KINDS = [
    HeadKind(f"{attention} {eagle} {'pruned' if vocab else 'full'}", attention, eagle, vocab)
    for attention, eagle, vocab in itertools.product(("mha", "mla"), ("3", "3.1"), (None, 128))
] + [
    HeadKind("mha, four states", "mha", layers=(1, 2, 3, 5)),
    HeadKind("mla, four states", "mla", layers=(1, 2, 3, 5)),
    HeadKind("mha, YaRN", "mha", yarn=True),
    HeadKind("mha, norm_before_fc", "mha", norm_before_fc=True),
    HeadKind("mha, norm_before_fc, norm_output", "mha", norm_before_fc=True, norm_output=True),
    HeadKind("mla, norm_before_fc", "mla", norm_before_fc=True),
    HeadKind("mha, the target's lm_head", "mha", lm_head=False),
    HeadKind("mla, the target's lm_head", "mla", lm_head=False),
]
LOADERS = ("sglang", "vllm", "speculators", "torchspec", "specforge", "safeailab")
NEEDS = {"torchspec": "TorchSpec", "specforge": "SpecForge", "safeailab": "EAGLE"}


def python_of(loader: str) -> str:
    """The Python that runs a loader's class; skips the test where it is not there."""
    if loader in NEEDS:
        if not SOURCES or not (Path(SOURCES) / NEEDS[loader]).is_dir():
            pytest.skip(f"TRTSPEC_ORACLE_SOURCES names no checkout of {NEEDS[loader]}")
        if loader == "torchspec" and sys.executable == OLD_TRANSFORMERS:
            pytest.skip("TRTSPEC_ORACLE_PYTHON names no Python with transformers 4")
        return OLD_TRANSFORMERS
    if loader in ("vllm", "speculators"):
        name = f"TRTSPEC_{loader.upper()}_PYTHON"
        if not os.environ.get(name):
            pytest.skip(f"{name} names no Python with {loader}")
        return os.environ[name]
    return sys.executable


class Room:
    """A target, heads of every kind, and what the reference computes for them."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.target = make_target(directory / "target", layers=8, nested=False)
        self.model = load_target(self.target, dtype=torch.float32)

    def source(self, kind: HeadKind) -> Path:
        """In ModelOpt's layout, with a RoPE base that is nobody's default."""
        path = self.directory / "source" / kind.name
        if path.is_dir():
            return path
        make_head(
            path,
            self.target,
            attention=kind.attention,
            eagle=kind.eagle,
            draft_vocab=kind.draft_vocab,
            aux_layers=kind.layers,
        )
        config, tensors = stored(path)
        config["rope_theta"] = 50000.0
        if kind.yarn:
            config["rope_scaling"] = {
                "rope_type": "yarn",
                "type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 512,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
            }
        if kind.norm_before_fc:
            config["eagle_config"]["norm_before_fc"] = config["norm_before_fc"] = True
            width = tensors["fc.weight"].shape[1]
            tensors["input_norm.weight"] = torch.linspace(0.7, 1.4, width).to(torch.bfloat16)
        if kind.norm_output:
            config["norm_output"] = True
        if not kind.lm_head:
            del tensors["lm_head.weight"]
            config.pop("draft_vocab_size", None)
        write_json(path / "config.json", config)
        write_tensors(path, tensors)
        return path

    def inputs(self, kind: HeadKind) -> dict[str, torch.Tensor]:
        torch.manual_seed(3)
        states = torch.randn(9, len(kind.layers or (1, 2, 3)) * 64)
        tokens = {name: torch.randint(0, 512, (9,)) for name in ("tokens", "again")}
        return {
            "states": states,
            **tokens,
            "embed_tokens.weight": self.model.embed.weight.detach(),
            "lm_head.weight": self.model.lm_head.weight.detach(),
        }

    def ours(self, head: Path, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        model = load_head(head, self.model, dtype=torch.float32)
        x = model.fuse(inputs["states"][None])
        feedback, normed = model(x, inputs["tokens"][None], None, None)
        again = model(feedback, inputs["again"][None], None, None)[1]
        draft = model.logits(normed).shape[-1]
        ids = torch.arange(draft) if model.target_ids is None else model.target_ids
        return {"first": model.logits(normed)[0], "second": model.logits(again)[0], "ids": ids}


@pytest.fixture(scope="module")
def room() -> Iterator[Room]:
    with TemporaryDirectory(
        dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    ) as directory:
        yield Room(Path(directory))


def converted(room: Room, kind: HeadKind, loader: str) -> HeadConversion:
    """Converts with base 10000 for TorchSpec's MLA layer, which ignores the file's base."""
    theta = 10000.0 if loader == "torchspec" and kind.attention == "mla" else None
    output = room.directory / loader / kind.name
    output.parent.mkdir(exist_ok=True)
    options = Options(loader, rope_theta=theta, force=True)
    return convert_head(resolve(str(room.source(kind))), output, options, resolve(str(room.target)))


def request_for(
    room: Room, loader: str, kind: HeadKind, head: Path, sources: str = SOURCES
) -> dict[str, Any]:
    """What head_classes.py is asked; the inputs are written."""
    place = room.directory / "io" / loader / head.name
    place.mkdir(parents=True, exist_ok=True)
    save_file(room.inputs(kind), place / "inputs.safetensors")
    return {
        "loader": loader,
        "head": str(head),
        "inputs": str(place / "inputs.safetensors"),
        "output": str(place / "outputs.safetensors"),
        "sources": sources,
        "target": str(room.target),
        "captured": len(kind.layers or (1, 2, 3)),
    }


def ask(loader: str, requests: list[dict[str, Any]], python: str = "") -> list[dict[str, str]]:
    environment = {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "OMP_NUM_THREADS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "PYTHONPATH": "",
    }
    text = "".join(json.dumps(request) + "\n" for request in requests)
    done = ran(python or python_of(loader), CLASSES, input=text, env=environment)
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(answers) == len(requests), done.stderr[-3000:]
    return answers


@pytest.mark.parametrize(
    "loader",
    [name if name == "sglang" else slow(name) for name in LOADERS],
)
def test_heads_in_the_classes_of_others(room: Room, loader: str) -> None:
    python_of(loader)
    asked, wrong = {}, []
    for kind in KINDS:
        result = converted(room, kind, loader)
        if result.output is not None:
            asked[kind] = result
            continue
        codes = {problem.code for problem in result.problems if problem.severity == "error"}
        print(f"{loader}, {kind.name}: refused, {sorted(codes)}")
        assert all(problem.remedy for problem in result.problems)
    requests = [
        request_for(room, loader, kind, Path(str(result.output))) for kind, result in asked.items()
    ]
    for (kind, result), request, told in zip(
        asked.items(), requests, ask(loader, requests), strict=True
    ):
        cell = _cell(room, kind, result, request, told["why"])
        print(f"{loader}, {kind.name}: {cell}")
        if not cell[0].isdigit() and not cell.startswith("newer one"):
            wrong.append(f"{kind.name}: {cell}")
    assert not wrong
    assert len(asked) >= 2


def _cell(
    room: Room, kind: HeadKind, result: HeadConversion, request: dict[str, Any], why: str
) -> str:
    if why:
        newer = [problem for problem in result.problems if problem.code == "TS-CONVERT-VERSION"]
        return "newer one needed, as convert says" if newer else why[:300]
    return compared(request, room.ours(Path(str(result.output)), room.inputs(kind)))


def compared(request: dict[str, Any], ours: dict[str, torch.Tensor]) -> str:
    """The largest difference of the logits, or how they differ."""
    found = load_file(request["output"])
    if not torch.equal(found["ids"], ours["ids"]):
        return "other target ids"
    difference = max(float((found[name] - ours[name]).abs().max()) for name in ("first", "second"))
    return f"{difference:.1e}" if difference < TOLERANCE else f"differs by {difference:.1e}"


def test_torchspec_s_llama_layer_needs_transformers_4(room: Room) -> None:
    """convert says that it needs transformers 4.

    Under transformers 5 it raises for plain rope, and silently turns YaRN with another base.
    """
    python_of("torchspec")
    for kind, why in (("mha 3 full", "Unknown RoPE scaling type default"), ("mha, YaRN", "")):
        kind = next(one for one in KINDS if one.name == kind)
        result = converted(room, kind, "torchspec")
        said = [problem for problem in result.problems if problem.code == "TS-CONVERT-VERSION"]
        assert ["transformers 4" in problem.message for problem in said] == [True]
        request = request_for(room, "torchspec", kind, Path(str(result.output)))
        answer = ask("torchspec", [request], sys.executable)[0]["why"]
        assert why in answer if why else answer == ""
        if not why:
            assert _cell(room, kind, result, request, "").startswith("differs")
