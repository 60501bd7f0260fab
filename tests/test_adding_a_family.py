"""Adds a family to a copy of the package.

Other names of tensors and keys, MXFP4 under INT4's suffixes, and checkpoints of two formats. What
is checked of a Kimi-K2 stays checked.
"""

import json
import math
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

from tests.json_files import read_json, write_json
from tests.package_copy import copy_package, run_copy, touched
from tests.quant.test_adding_a_format import CONFIG, edit, pack_mxfp4, with_mxfp4
from tests.tiny import make_target
from tests.tiny_formats import pack_fp8_block, pack_nvfp4

FAMILY = '''"""Kimi-X: a K2 with other names."""

from collections.abc import Iterator
from dataclasses import replace

from trtspec.families.family import Part, Sizes
from trtspec.families.kimi_k2 import KIMI_K25, layer

NAMES = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}


def layer_x(sizes: Sizes, index: int) -> Iterator[Part]:
    for part in layer(sizes, index):
        words = part.name.replace("mlp.", "moe.").split(".")
        words = [NAMES.get(word, word) if "experts" in words else word for word in words]
        yield part._replace(name=".".join(words))


KIMI_X = replace(
    KIMI_K25,
    name="kimi_x",
    model_types=("kimi_x",),
    text_types=("kimi_x_text",),
    classes=("KimiX",),
    renamed={"n_routed_experts": "num_experts", "num_experts_per_tok": "num_experts_per_token"},
    layer=layer_x,
    fused=KIMI_K25.fused | {"w1": "w1_w3", "w3": "w1_w3"},
    mixed=True,
    version=lambda sizes, ends, packed: "x",
)
'''
FILES = [
    "data/models.yaml",
    "families/kimi_x.py",
    "families/known.py",
    "formats.py",
    "quant/decode.py",
]
KEYS = {"n_routed_experts": "num_experts", "num_experts_per_tok": "num_experts_per_token"}
LEAVES = {"gate": "w1", "up": "w3", "down": "w2"}
FACTOR = {"routed_scaling_factor": 1.5}  # which no K2 has


@pytest.fixture(scope="module")
def copied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the package with one family and one format more."""
    copy = with_mxfp4(copy_package(tmp_path_factory.mktemp("copy")))
    (copy / "families/kimi_x.py").write_text(FAMILY)
    known, imports = copy / "families/known.py", "import KIMI_K2, KIMI_K25\n"
    edit(known, imports, f"{imports}from trtspec.families.kimi_x import KIMI_X\n")
    edit(known, "(KIMI_K2, KIMI_K25)", "(KIMI_K2, KIMI_K25, KIMI_X)")
    source, _ = make_x(copy.parent / "published")
    config = read_json(source / "config.json")
    row = {
        "family": "x", "format": "mxfp4", "licence": None, "thinks": True, "sources": {},
        "unverified": [], "config": config,
    }  # fmt: skip
    text = yaml.safe_dump(row, default_flow_style=True, width=math.inf)
    edit(copy / "data/models.yaml", "\ntargets:\n", f"\ntargets:\n  x/Kimi-X: {text}")
    return copy


def set_text(source: Path, **values: object) -> None:
    config = read_json(source / "config.json")
    config["text_config"] |= values
    write_json(source / "config.json", config)


def make_x(
    directory: Path, packed: Callable[[str, torch.Tensor], dict | None] = lambda name, tensor: None
) -> tuple[Path, int]:
    """A Kimi-X and its parameters; `packed` gives the stored parts of a tensor, None for BF16."""
    source = make_target(directory, layers=2, shards=1)
    path, stored, count = source / "model.safetensors", {}, 0
    for name, tensor in load_file(path).items():
        name = re.sub(r"(experts\.\d+\.)(\w+)_proj", lambda at: at[1] + LEAVES[at[2]], name)
        name = name.replace(".mlp.", ".moe.")
        stem, parts, count = (
            name.removesuffix(".weight"),
            packed(name, tensor),
            count + tensor.numel(),
        )
        stored |= {f"{stem}.{key}": value for key, value in (parts or {}).items()} or {name: tensor}
    save_file(stored, path, {"format": "pt"})
    config = read_json(source / "config.json")
    text = {KEYS.get(key, key): value for key, value in config["text_config"].items()}
    names = {"model_type": "kimi_x", "architectures": ["KimiX"]}
    write_json(source / "config.json", config | names | {"text_config": text})
    set_text(source, model_type="kimi_x_text", **FACTOR)
    return source, count


def inspected(copy: Path, source: Path) -> tuple[dict, list[str]]:
    """The report, and the codes of what is wrong."""
    script = "import json, sys, trtspec; print(json.dumps(trtspec.inspect(sys.argv[1]).to_dict()))"
    found = json.loads(run_copy(copy, "-c", script, source))
    return found, [each["code"] for each in found["problems"] if each["severity"] != "info"]


@pytest.mark.slow
def test_a_family_is_four_edited_files_and_one_new(copied: Path, tmp_path: Path) -> None:
    """Then it is inspected, and what is loaded equals a K2 with the same weights."""
    assert touched(copied) == FILES
    source, count = make_x(
        tmp_path / "x", lambda name, t: pack_mxfp4(t.shape)[0] if ".experts." in name else None
    )
    left_alone = [*CONFIG["ignore"], r"re:.*moe\.(gate|up|down)_proj.*"]
    set_text(source, quantization_config=CONFIG | {"ignore": left_alone})
    found, wrong = inspected(copied, source)
    assert (found["family"], found["format"], found["parameters"], wrong) == (
        "x",
        "mxfp4",
        count,
        [],
    )
    same = (
        "import sys, torch; from trtspec.models.weights import load_target;"
        "x, k2 = (load_target(path, dtype=torch.float32).state_dict() for path in sys.argv[1:]);"
        "assert x.keys() == k2.keys() and all(torch.equal(x[name], k2[name]) for name in x)"
    )
    k2 = make_target(tmp_path / "k2", layers=2, shards=1)
    run_copy(copied, "-c", same, make_x(tmp_path / "plain")[0], k2)


@pytest.mark.slow
def test_another_family_loosens_no_check_of_a_k2(copied: Path, tmp_path: Path) -> None:
    """A K2 may have neither what the new family publishes nor its format.

    The format's values lie under INT4's suffixes.
    """
    source = make_target(tmp_path / "k2", format="int4", layers=2, shards=1)
    path = source / "model.safetensors"
    stored = load_file(path)
    stem = next(name for name in stored if name.endswith("_packed")).removesuffix("_packed")
    shape = stored.pop(f"{stem}_shape").tolist()
    stored |= {
        stem + key.removeprefix("weight"): part for key, part in pack_mxfp4(shape)[0].items()
    }
    assert inspected(copied, source)[1] == []
    save_file(stored, path, {"format": "pt"})
    assert inspected(copied, source)[1] == ["TS-TARGET-FORMAT"]
    other = make_target(tmp_path / "other", layers=2)
    set_text(other, **FACTOR)
    assert inspected(copied, other)[1] == ["TS-TARGET-CONFIG"]


@pytest.mark.slow
def test_a_checkpoint_of_two_formats(copied: Path, tmp_path: Path) -> None:
    """Experts in NVFP4 and attention in FP8 blocks follow ModelOpt's list of layers.

    A wrong list is found, and no K2 has one.
    """
    algorithms: dict[str, str] = {}

    def packed(name: str, tensor: torch.Tensor) -> dict | None:
        if ".experts." in name:
            algorithms[name.removesuffix(".weight")] = "NVFP4"
            return pack_nvfp4(tensor, torch.tensor(1.0))
        if ".self_attn." in name and tensor.dim() == 2:
            algorithms[name.removesuffix(".weight")] = "FP8_PB_WO"
            return pack_fp8_block(tensor)
        return None

    def list_layers(source: Path) -> None:
        layers = {module: {"quant_algo": word} for module, word in algorithms.items()}
        block = {
            "quant_method": "modelopt",
            "quant_algo": "MIXED_PRECISION",
            "quantized_layers": layers,
        }
        config = read_json(source / "config.json")
        write_json(source / "config.json", config | {"quantization_config": block})

    source, count = make_x(tmp_path / "x", packed)
    list_layers(source)
    found, wrong = inspected(copied, source)
    assert (found["format"], found["parameters"], wrong) == ("nvfp4", count, [])
    algorithms |= dict.fromkeys(algorithms, "NVFP4")
    list_layers(source)
    assert inspected(copied, source)[1] == ["TS-TARGET-FORMAT"]
    k2 = make_target(tmp_path / "k2", layers=2)
    list_layers(k2)
    refused = run_copy(copied, "-m", "trtspec", "inspect", k2, status=1)
    assert "no kimi_k25 is published so" in refused
