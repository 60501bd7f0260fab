"""A published target's whole layout with holes as data, and the cost of reading its headers.

    python -m tools.benchmarks.full_layout DIRECTORY [LAYERS ...]

The package is the one on PYTHONPATH, else this one. Kimi-K2.6 has 208,550 tensors as published and
277,670 in NVFP4. Small tensors hold plausible values, large ones are holes, so that 595 GB take
about 1 GB of disk. Each command runs in a process of its own.
"""

from __future__ import annotations

import base64
import copy
import shutil
import struct
import subprocess
import sys
import time
from pathlib import Path

from trtspec.checkpoint.headers import DTYPE_BITS
from trtspec.checkpoint.published import catalogue
from trtspec.checkpoint.target_tensors import vision_shapes
from trtspec.checkpoint.writer import _header as shard_header
from trtspec.checkpoint.writer import byte_count, write_index
from trtspec.data_files import DATA
from trtspec.files import read_object
from trtspec.foreign import without_code
from trtspec.report import write_json
from trtspec.specs import ModelSpec

NVFP4, INT4 = "nvidia/Kimi-K2.6-NVFP4", "moonshotai/Kimi-K2.6"
COMMANDS = {
    NVFP4: ("inspect PATH", "serve PATH --trtllm-version 1.4.0rc1 --trust-remote-code --dry-run"),
    INT4: ("inspect PATH", "quantize PATH -o OUT --dry-run"),  # ends with: no room for the output
}
# a small process in between, because Linux counts the memory of the process that starts another as
# the other's
RUN = """\
import resource, subprocess, sys
status = subprocess.run([sys.executable, "-m", "trtspec", *sys.argv[1:]], \
stdout=sys.stderr).returncode
used = resource.getrusage(resource.RUSAGE_CHILDREN)
print(f"processor {used.ru_utime + used.ru_stime:5.2f} s, peak {used.ru_maxrss / 1e3:3.0f} MB, \
status {status}")
"""
SMALL_BYTES = 1 << 16
Entry = tuple[str, tuple[int, ...]]


def main() -> None:
    for layers in map(int, sys.argv[2:] or ["61"]):
        for name, lines in COMMANDS.items():
            path = Path(sys.argv[1]) / f"{name.replace('/', '--')}-{layers}"
            print(f"{name}, {layers} layers, {write_layout(name, path, layers):,} tensors")
            for line in lines:
                words = line.replace("PATH", str(path)).replace("OUT", f"{path}-out").split()
                began = time.monotonic()
                command = [sys.executable, "-c", RUN, *words]
                used = subprocess.run(command, capture_output=True, text=True, check=True).stdout
                wall = time.monotonic() - began
                print(f"  {words[0]:9} wall {wall:5.2f} s, {used}", end="", flush=True)


def write_layout(name: str, path: Path, layers: int) -> int:
    """Writes the checkpoint unless it is there; returns the number of its tensors."""
    config = copy.deepcopy(catalogue().targets[name].config)
    config["vision_config"] |= {"init_pos_emb_height": 64, "init_pos_emb_width": 64}
    config.get("text_config", config)["num_hidden_layers"] = layers
    spec = ModelSpec.from_config(config, None, remote_code=True)
    shards: dict[str, dict[str, Entry]] = {}
    for entry_name, entry in entries(config, spec).items():
        layer = entry_name.partition(".layers.")[2].partition(".")[0]
        shards.setdefault(f"model-{int(layer or layers):05}.safetensors", {})[entry_name] = entry
    weight_map = {name: shard for shard, layout in shards.items() for name in layout}
    if path.is_dir():
        return len(weight_map)
    path.mkdir(parents=True)
    for shard, layout in shards.items():
        write_holes(path / shard, layout, spec)
    total = sum(byte_count(*entry) for layout in shards.values() for entry in layout.values())
    write_index(path, weight_map, total)
    write_tokenizer(path, spec.vocab_size)
    write_json(path / "config.json", without_code(config))
    return len(weight_map)


def entries(config: dict[str, object], spec: ModelSpec) -> dict[str, Entry]:
    """Name -> dtype and shape of every stored tensor."""
    found: dict[str, Entry] = {}
    quant = spec.quant
    for name, part in spec.family.tensors(spec):
        module = name.removesuffix(".weight")
        if len(part.shape) != 2:
            found[name] = ("F32" if part.role == "router bias" else "BF16", part.shape)
            continue
        stored = quant.format_of(module, part.role)
        shapes = stored.part_shapes(*part.shape, quant.group_size, quant.block_size)
        parts = zip(stored.storage.all_parts, stored.storage.dtypes, strict=True)
        found |= {f"{module}.{suffix}": (dtypes[0], shapes[suffix][0]) for suffix, dtypes in parts}
    return found | {name: ("BF16", shape) for name, shape in vision_shapes(config)}


def write_holes(file: Path, layout: dict[str, Entry], spec: ModelSpec) -> None:
    """Scales are 1/2688, norms 1, shapes as they are. Everything above SMALL_BYTES is a hole."""
    shapes = {f"{name}_shape": part.shape for name, part in spec.family.tensors(spec)}
    header, ends, size = shard_header(layout, None)
    with open(file, "wb") as stream:
        stream.write(header)
        for name, entry in layout.items():
            code, shape = entry
            count = byte_count(*entry)
            number = 1 / 2688 if "scale" in name else 1.0
            data = struct.pack("<f", number)[4 - DTYPE_BITS[code] // 8 :]
            if name in shapes:
                data = struct.pack("<2q", *shapes[name])
            if count <= SMALL_BYTES:
                stream.seek(ends[name] - count)
                stream.write(data * (count // len(data)))
        stream.truncate(size)


def write_tokenizer(path: Path, vocab_size: int) -> None:
    """As many ranks as the model needs, with kimi-nano's special tokens at the end."""
    nano = DATA / "kimi-nano"
    shutil.copy(nano / "chat_template.jinja", path)
    config = read_object(nano / "tokenizer_config.json")
    tokens = config["added_tokens_decoder"]
    shift = vocab_size - 1 - max(map(int, tokens))
    config["added_tokens_decoder"] = {str(int(key) + shift): value for key, value in tokens.items()}
    write_json(path / "tokenizer_config.json", config)
    ranks = [number.to_bytes(1 if number < 256 else 3, "big") for number in range(vocab_size - 256)]
    lines = [f"{base64.b64encode(token).decode()} {rank}\n" for rank, token in enumerate(ranks)]
    (path / "tiktoken.model").write_text("".join(lines))


if __name__ == "__main__":
    main()
