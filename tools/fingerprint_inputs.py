"""The inputs of tools/fingerprint.py, made once for both sides.

    python tools/fingerprint_inputs.py DIRECTORY [--whole]

They are checkpoints, heads, texts and engine files. Everything follows from seeds. The makers are
those of the tests of this checkout, whatever is compared.
"""

from __future__ import annotations

import copy
import datetime
import itertools
import json
import random
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
import yaml

HERE = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(HERE))

from tests.heads.convert.foreign_heads import DIALECTS, expressible, write_head  # noqa: E402
from tests.tiny import (  # noqa: E402
    make_head,
    make_target,
    make_tokenizer,
    target_config,
    text_config,
    text_tensors,
    write_json,
    write_shards,
)
from tests.tiny_formats import FP8_CONFIG, INT4_CONFIG, quantize_tensors  # noqa: E402

DATA = HERE / "trtspec" / "data"
HEAD_KINDS = list(itertools.product(("mha", "mla"), ("3", "3.1"), (None, 128)))
FULL_SIZE = {"experts": 12, "hidden": 7168, "inner": 2048}
MUTATIONS = {False: 100, True: 1000}
WORDS = [
    "the",
    "quick",
    "brown",
    "fox",
    "jumps",
    "over",
    "a",
    "lazy",
    "dog",
    "while",
    "def",
    "return",
    "import",
]
ODD: list[Any] = [
    None,
    True,
    False,
    0,
    1,
    -1,
    3,
    8192,
    0.5,
    1.5,
    -0.5,
    float("inf"),
    "true",
    "8",
    " 8 ",
    "0x10",
    "1e3",
    "text",
    "",
    [],
    [1, 2],
    [-1],
    ["8"],
    [None],
    [[1]],
    {},
    {"a": 1},
    {4: 3, 8: 1},
    {"key": None},
    datetime.date(2026, 1, 31),
]


def main() -> None:
    root, whole = Path(sys.argv[1]), "--whole" in sys.argv
    torch.set_num_threads(1)
    targets(root / "targets", whole)
    heads(root / "heads", root / "targets" / "bf16")
    texts(root / "data")
    kimi_nano(root, whole)
    engine_files(root / "lint", MUTATIONS[whole])
    broken(root / "broken", root)


def targets(root: Path, whole: bool) -> None:
    for format in ("bf16", "int4", "fp8-block", "nvfp4"):
        make_target(root / format, format=format, layers=8, hidden=128)
    make_target(root / "flat", nested=False, layers=8)
    make_target(root / "vision", vision=True, shards=4)
    for format in ("bf16", "int4", "fp8-block") if whole else ():
        full_size(root / f"full-{format}", format)


def full_size(directory: Path, format: str) -> None:
    """One layer of 12 routed experts at the size of Kimi-K2, beside one dense layer."""
    text = text_config(layers=2, hidden=FULL_SIZE["hidden"], experts=FULL_SIZE["experts"])
    text |= {"moe_intermediate_size": FULL_SIZE["inner"], "intermediate_size": FULL_SIZE["inner"]}
    config = target_config(text, nested=True)
    if format != "bf16":
        config["quantization_config"] = INT4_CONFIG if format == "int4" else FP8_CONFIG
    make_tokenizer(directory)
    write_json(directory / "config.json", config)
    tensors = quantize_tensors(text_tensors(text, 0), format)
    write_shards(
        directory, {f"language_model.{name}": tensor for name, tensor in tensors.items()}, 2
    )


def heads(root: Path, target: Path) -> None:
    """A random head of each type as each project writes it.

    Its name is dialect-attention-eagle-vocabulary.
    """
    root.mkdir()
    for dialect, (attention, eagle, vocab) in itertools.product(DIALECTS, HEAD_KINDS):
        if expressible(dialect, attention, eagle):
            options = {"attention": attention, "eagle": eagle, "draft_vocab": vocab}
            write_head(
                root / f"{dialect}-{attention}-{eagle}-{vocab or 'full'}",
                target,
                dialect,
                **options,
            )


def texts(root: Path) -> None:
    root.mkdir()
    shuffle, lines = random.Random(0), []
    for number in range(24):
        question, answer = (
            " ".join(shuffle.choices(WORDS, k=shuffle.randint(3, 9))) for _ in range(2)
        )
        turns = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        lines.append(
            {"conversation_id": f"c{number}", "category": "ab"[number % 2], "conversations": turns}
        )
    write_lines(root / "answers.jsonl", lines)
    write_lines(
        root / "prompts.jsonl",
        [{"id": n, "prompt": f"def {WORDS[n % 13]}_{n}("} for n in range(24)],
    )


def kimi_nano(root: Path, whole: bool) -> None:
    """The shipped model and head, and random heads of other types; trained ones if `whole`."""
    nano = shutil.copytree(DATA / "kimi-nano", root / "nano")
    made = root / "nano-heads"
    shutil.copytree(DATA / "kimi-nano-eagle3", made / "shipped")
    asked = [
        json.loads(line)["messages"]
        for line in (nano / "prompts_train.jsonl").read_text().splitlines()
    ]
    turns = [
        [*messages, {"role": "assistant", "content": messages[-1]["content"]}] for messages in asked
    ]
    rows = [
        {"conversation_id": str(number), "conversations": turn} for number, turn in enumerate(turns)
    ]
    write_lines(root / "data" / "nano.jsonl", rows[::6])
    for attention, eagle, vocab in HEAD_KINDS:
        place = made / f"{attention}-{eagle}-{vocab or 'full'}"
        if not whole:
            make_head(place, nano, attention=attention, eagle=eagle, draft_vocab=vocab and 1024)
            continue
        line = (
            f"train {nano} {root}/data/nano.jsonl -o {place} "
            f"--attention {attention} --eagle {eagle}"
        )
        line += " --steps 100 --seq-len 96 --acceptance-prompts 0"
        line += " --draft-vocab-size 1024" if vocab else ""
        command = [sys.executable, "-m", "trtspec", *line.split()]
        subprocess.run(command, check=True, capture_output=True, cwd=HERE)


def engine_files(root: Path, mutations: int) -> None:
    """The project's configurations, the known traps, and mutations of both; all names differ."""
    (root / "configs").mkdir(parents=True)
    (root / "traps").mkdir()
    (root / "mutations").mkdir()
    for file in sorted((HERE / "configs").glob("*.yml")):
        shutil.copy(file, root / "configs" / file.name)
    traps = yaml.safe_load((HERE / "tools" / "fingerprint_traps.yaml").read_text())
    for number, trap in enumerate(traps):
        (root / "traps" / f"trap-{number:03}.yml").write_text(
            yaml.safe_dump(trap.pop("values"), sort_keys=False)
        )
    write_json(root / "traps.json", traps)
    bases = [
        yaml.safe_load(file.read_text())
        for kind in ("configs", "traps")
        for file in sorted((root / kind).iterdir())
    ]
    generator = random.Random(0)
    keys = sorted({path for base in bases for path in leaves(base)} | set(known_keys()))
    for number in range(mutations):
        value = copy.deepcopy(generator.choice(bases))
        for _ in range(generator.randint(1, 2)):
            mutate(value, keys, generator)
        (root / "mutations" / f"mutation-{number:04}.yml").write_text(
            yaml.safe_dump(value, sort_keys=False)
        )


def known_keys() -> list[str]:
    files = sorted((HERE / "trtspec").rglob("snapshots/1.*.json"))
    found = [
        f"{owner.partition(':')[0]}.{key}".lstrip(".")
        for file in files
        for owner, read in json.loads(file.read_text())["classes"].items()
        for key in read["fields"]
        if owner != "--"
    ]
    if not found:
        sys.exit("fingerprint: no schema files; say where they are in tools/fingerprint_inputs.py")
    return found


def mutate(value: dict[str, Any], keys: list[str], generator: random.Random) -> None:
    """Makes one change: an odd value, or a known, misspelt, lost or moved key.

    The known key gets an odd value.
    """
    path, odd = generator.choice(leaves(value)), generator.choice(ODD)
    way = generator.choice(["odd", "known", "known", "misspelt", "lost", "moved"])
    if way in ("misspelt", "lost", "moved"):
        taken = place_of(value, path).pop(path.rpartition(".")[2])
        at = generator.randrange(len(path))
        if way == "misspelt":
            put(value, path[:at] + path[at + 1 :] or "x", taken)
        elif way == "moved":
            put(value, f"kv_cache_config.{path.rpartition('.')[2]}", taken)
    else:
        put(value, path if way == "odd" else generator.choice(keys), odd)


def leaves(value: dict[str, Any], prefix: str = "") -> list[str]:
    found = []
    for key, item in value.items():
        found.append(f"{prefix}{key}")
        if isinstance(item, dict) and all(
            isinstance(name, str) and "." not in name for name in item
        ):
            found += leaves(item, f"{prefix}{key}.")
    return found or ["nothing"]


def place_of(value: dict[str, Any], path: str) -> dict[str, Any]:
    """The mapping that holds the last part of the path; made where it is missing."""
    for part in path.split(".")[:-1]:
        if not isinstance(value.get(part), dict):
            value[part] = {}
        value = value[part]
    value.setdefault(path.rpartition(".")[2], None)
    return value


def put(value: dict[str, Any], path: str, item: Any) -> None:
    place_of(value, path)[path.rpartition(".")[2]] = item


def broken(root: Path, good: Path) -> None:
    """Inputs that every command must refuse."""
    root.mkdir()
    for name, change in BROKEN.items():
        change(shutil.copytree(good / "targets" / "bf16", root / name))
    for name in ("truncated", "no-config"):
        shutil.copytree(good / "heads" / "modelopt-mha-3-full", root / f"head-{name}")
    shorten(root / "head-truncated" / "model.safetensors")
    (root / "head-no-config" / "config.json").unlink()
    (root / "empty").mkdir()
    for name, text in {
        "syntax.yml": "a: [1,\nb: {",
        "list.yml": "- 1\n",
        "empty.jsonl": "",
        "bad.jsonl": "{]\n",
    }.items():
        (root / name).write_text(text)


def shorten(file: Path) -> None:
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def garble(file: Path) -> None:
    file.write_bytes(b"\xff" * 8 + file.read_bytes()[8:])


def without_experts(target: Path) -> None:
    config = json.loads((target / "config.json").read_text())
    del config["text_config"]["n_routed_experts"]
    write_json(target / "config.json", config)


SHARD = "model-00002-of-00002.safetensors"
BROKEN = {
    "truncated": lambda target: shorten(target / SHARD),
    "garbled": lambda target: garble(target / SHARD),
    "no-shard": lambda target: (target / SHARD).unlink(),
    "no-index": lambda target: (target / "model.safetensors.index.json").unlink(),
    "no-config": lambda target: (target / "config.json").unlink(),
    "bad-config": lambda target: (target / "config.json").write_text("{"),
    "no-tokenizer": lambda target: (target / "tiktoken.model").unlink(),
    "no-experts": without_experts,
}


def write_lines(file: Path, rows: list[dict[str, Any]]) -> None:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


if __name__ == "__main__":
    main()
