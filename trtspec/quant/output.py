"""The output directory of a conversion: whose it is, what may be replaced in it, whether the disk has room, and what is
written beside the weights: configs, carried files, the model card."""

from __future__ import annotations

import contextlib
import copy
import errno
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from trtspec import machine
from trtspec.checkpoint.headers import HF_QUANT_NAME, INDEX_NAME
from trtspec.checkpoint.writer import recorded_keys
from trtspec.errors import TrtspecError, UsageError
from trtspec.formats import NVFP4_BLOCK
from trtspec.quant.conversion import Conversion, LinearErrors
from trtspec.quant.policy import Policy
from trtspec.report import fsync_directory, refuse_overwrite, write_atomic, write_json
from trtspec.specs import ModelSpec

JOURNAL_NAME = ".trtspec-quantize.jsonl"
SPARE_BYTES = 64 << 20  # configs, tokenizer and headers
OWN_PREFIX = ".trtspec-"
TEMPORARY = (".partial", ".tmp")
DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO)
MOST_NAMES = 5  # of files that a message lists


@contextmanager
def disk_errors(output: Path) -> Iterator[None]:
    """Whatever the disk refuses is one message; what is finished is kept."""
    try:
        yield
    except OSError as error:
        if error.errno not in DISK_ERRORS:
            raise
        remedy = "free space on that disk, then run the command again: finished shards are kept"
        raise TrtspecError(f"cannot write {output}: {error.strerror}", remedy) from error


def check_output(conversion: Conversion, *, restart: bool, force: bool) -> bool:
    """Whether an earlier run is resumed in `conversion.output`; reads only, so a dry run does it too.

    Raises UsageError if the directory contains files that quantize did not write, TrtspecError if there is no room.
    """
    output = conversion.output
    begun = (output / JOURNAL_NAME).exists()
    if not begun:
        _refuse_foreign(conversion, force)
    present = {path.name for path in output.glob("*.safetensors")}
    if strays := sorted(present - _ours(conversion)):
        raise UsageError(
            f"{output} also holds {_listed(strays)}, which a loader would take for part of the checkpoint",
            "move it away, or choose another --output",
        )
    _check_space(conversion)
    return begun and not restart


def claim_output(conversion: Conversion, *, restart: bool, force: bool) -> bool:
    """Makes the output directory ours, or says why it cannot be. True when a new conversion begins there."""
    output = conversion.output
    try:
        output.mkdir(parents=True, exist_ok=True)
        probe = output / f"{OWN_PREFIX}{os.getpid()}.partial"
        probe.touch()
        probe.unlink(missing_ok=True)  # another run that begins there may have tidied up
    except OSError as error:
        raise TrtspecError(f"cannot write {output}: {error.strerror}", "choose another --output") from None
    return not check_output(conversion, restart=restart, force=force)


def clear_output(conversion: Conversion, fresh: bool) -> None:
    """Removes what a killed run left half-written and, for a new conversion, the weights that were there before."""
    output = conversion.output
    names = ["config.json", INDEX_NAME] if fresh else []
    if fresh:
        names += [name for name in _ours(conversion) if name.endswith(".safetensors")]
    patterns = (".*.partial", *(f".{name}.*.tmp" for name in REPLACED))
    for path in (*(path for pattern in patterns for path in output.glob(pattern)), *(output / name for name in names)):
        path.unlink(missing_ok=True)


def _refuse_foreign(conversion: Conversion, force: bool) -> None:
    """Without a journal the directory must be empty, or --force given for what a finished conversion left."""
    output = conversion.output
    if not output.is_dir():
        refuse_overwrite(output, force)
        return
    present = [path.name for path in output.iterdir() if not _is_temporary(path.name)]
    if present and not force:
        raise UsageError(
            f"{output} already exists and would be overwritten", "pass --force, or choose another --output"
        )
    foreign = sorted(set(present) - (_ours(conversion) if _provenance(output) else set()))
    if foreign:
        raise UsageError(
            f"{output} holds {_listed(foreign)}, which `trtspec quantize` did not write",
            "move that away, or choose another --output; --force replaces only what quantize wrote",
        )


def _is_temporary(name: str) -> bool:
    """Of a run that begins beside this one, or of one that was killed."""
    return name.startswith(".") and (name.startswith(OWN_PREFIX) or name.endswith(TEMPORARY))


def _ours(conversion: Conversion) -> set[str]:
    """The names that this conversion, and earlier ones by their journal and provenance.json, write."""
    output, found = conversion.output, set(conversion.checkpoint.shards) | set(REPLACED)
    if (output / JOURNAL_NAME).exists():
        found |= recorded_keys(output / JOURNAL_NAME)
    provenance = _provenance(output)
    found |= set(provenance.get("shards", {})) | set(provenance.get("carried", []))
    return found | {path.name for path in carried_files(conversion.checkpoint.path)}


def _provenance(output: Path) -> dict[str, Any]:
    """provenance.json of an earlier conversion; empty where there is none."""
    with contextlib.suppress(OSError, ValueError):
        found = json.loads((output / "provenance.json").read_text(encoding="utf-8"))
        if isinstance(found, dict) and found.get("command") == "quantize":
            return found
    return {}


def _listed(names: list[str]) -> str:
    more = len(names) - MOST_NAMES
    return ", ".join(names[:MOST_NAMES]) + (f" and {more} more" if more > 0 else "")


def _check_space(conversion: Conversion) -> None:
    """Shards of ours that are there already make room for their successors."""
    output = conversion.output
    free = machine.free_disk(output)
    present = sum(path.stat().st_size for plan in conversion.plans if (path := output / plan.shard).exists())
    if free + present < conversion.bytes_out + SPARE_BYTES:
        raise TrtspecError(
            f"{output} needs {conversion.bytes_out:,} bytes and its disk has {free:,} free",
            "free space, or choose an --output on another disk",
        )


# The layout is ModelOpt's, version for version; loaders look for this name. provenance.json says who wrote the file.
PRODUCER = {"name": "modelopt", "version": "0.47.0"}
WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".msgpack", ".h5", ".onnx")
REPLACED = ("config.json", HF_QUANT_NAME, INDEX_NAME, "README.md", "provenance.json")


def quantization_config(exclude: list[str], kv_cache: str | None) -> dict[str, Any]:
    """The block that published NVFP4 checkpoints have in config.json."""
    numbers = {"dynamic": False, "num_bits": 4, "type": "float", "group_size": NVFP4_BLOCK}
    group = {"input_activations": numbers, "weights": dict(numbers), "targets": ["Linear"]}
    block: dict[str, Any] = {"config_groups": {"group_0": group}, "ignore": exclude, "quant_algo": "NVFP4"}
    if kv_cache == "fp8":
        block["kv_cache_scheme"] = {"dynamic": False, "num_bits": 8, "type": "float"}
    return block | {"producer": PRODUCER, "quant_method": "modelopt"}


def hf_quant_config(exclude: list[str], kv_cache: str | None) -> dict[str, Any]:
    """hf_quant_config.json, which TensorRT-LLM reads first. FP8 KV is the scale-free cast: no scale tensors."""
    quantization = {
        "quant_algo": "NVFP4",
        "kv_cache_quant_algo": "FP8" if kv_cache == "fp8" else None,
        "group_size": NVFP4_BLOCK,
        "exclude_modules": exclude,
    }
    return {"producer": PRODUCER, "quantization": quantization}


def quantized_config(config: dict[str, Any], exclude: list[str], kv_cache: str | None) -> dict[str, Any]:
    """The source's config.json with its own quantization removed, also inside text_config, and ours on top."""
    result = copy.deepcopy(config)
    result.pop("quantization_config", None)
    if isinstance(result.get("text_config"), dict):
        result["text_config"].pop("quantization_config", None)
    return result | {"quantization_config": quantization_config(exclude, kv_cache)}


def carried_files(source: Path) -> list[Path]:
    """Tokenizer, template, remote code, generation config, licences: every file that is not weights or replaced."""
    return sorted(
        path
        for path in source.iterdir()
        if path.is_file()
        and not path.name.startswith(".")
        and path.name not in REPLACED
        and not path.name.endswith((*WEIGHT_SUFFIXES, ".index.json"))
    )


def carry_files(source: Path, output: Path) -> list[str]:
    """Copies them byte for byte and returns their names."""
    files = carried_files(source)
    for path in files:
        temporary = output / f".{path.name}.carried.partial"
        try:
            shutil.copyfile(path, temporary)
            temporary.replace(output / path.name)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
    fsync_directory(output)
    return [path.name for path in files]


def write_configs(output: Path, config: dict[str, Any], exclude: list[str], kv_cache: str | None) -> None:
    """config.json last: a directory without it is no checkpoint to any loader."""
    write_json(output / HF_QUANT_NAME, hf_quant_config(exclude, kv_cache))
    write_json(output / "config.json", quantized_config(config, exclude, kv_cache))


LICENCES = """\
Kimi-K2 models come under the Modified MIT licence: products with more than 100 million monthly active users or
20 million US dollars of monthly revenue must show the model's name prominently. A derived checkpoint keeps that duty;
licence files of the source, where it has any, lie beside this card.
"""
CARD = """\
---
base_model: {base}
license: other
license_name: modified-mit
library_name: tensorrt-llm
tags: [nvfp4, modelopt, trtspec]
---

# {title}, NVFP4

{architecture} with {layers} layers, from a {format} checkpoint.

- {quantized:,} linears are NVFP4 (4-bit E2M1 values, an E4M3 scale per 16, an FP32 scale per tensor), computed W4A4;
  {decoded:,} tensors were decoded to BF16 and {copied:,} are unchanged
- policy `{policy}`: {summary}
{published}
- KV cache: {kv}
- activation scales: {scales}; weight scales: {weight_scales}
- {size} bytes, from {size_in}

NVFP4 takes as many bytes as Kimi's own INT4 (4.5 bits per weight). The benefit is FP4 tensor-core
kernels and engine support; the cost is the rounding error below.

## Rounding error

Relative Frobenius error of the dequantized weight against the source's, on the first {rows} rows of every tensor.

| linears | tensors | relative error | all-zero blocks |
|---|---:|---:|---:|
{errors}
{zeros}
## Serving

    trtspec serve {output} --trust-remote-code
    trtllm-serve {output} --backend pytorch --trust_remote_code
    vllm serve {output} --trust-remote-code

The last two are the engines' own commands; set the tensor parallel size to your GPUs.

## Licence

{licence}"""


def publication(policy: Policy, deviations: list[str]) -> str:
    """Lines of the card: where the policy was published, whose bytes these are, what was done otherwise."""
    lines = []
    if policy.source:
        lines.append(f"- the policy is that of {policy.source}")
    if policy.recipe:
        lines.append(f"- recipe of ModelOpt: `modelopt_recipes/{policy.recipe}.yaml`")
    if policy.modelopt:
        lines.append(f"- the bytes equal those of ModelOpt's export for the same amax: {', '.join(policy.modelopt)}")
    lines += [f"- **otherwise than published**: {text}" for text in deviations]
    return "\n".join(lines) or "- the policy is the user's own"


def model_card(spec: ModelSpec, facts: dict[str, Any], classes: dict[str, LinearErrors], zeros: list[str]) -> str:
    """README.md of the output; nothing in it depends on when or how fast the conversion ran."""
    rows = [
        f"| {name} | {entry.tensors:,} | {entry.relative_error:.4f} | {entry.zero_blocks:,} |"
        for name, entry in sorted(classes.items())
    ]
    dead = ""
    if zeros:
        dead = f"\n{len(zeros)} tensors are entirely zero (scale_2 set to 1/2688): {', '.join(zeros[:8])}\n"
    return CARD.format(
        **facts,
        architecture=spec.architecture,
        layers=spec.num_hidden_layers,
        errors="\n".join(rows),
        zeros=dead,
        licence=LICENCES,
    )


def write_card(output: Path, text: str) -> None:
    write_atomic(output / "README.md", text)
