"""The package's own data files."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from trtspec.errors import UsageError, documented

if TYPE_CHECKING:
    from trtspec.specs import GpuSpec

DATA = Path(__file__).parent / "data"


def load_yaml(name: str) -> Any:
    """Parses a file of trtspec/data, for example `models.yaml`."""
    import yaml  # here, because `trtspec --help` needs none

    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # ten times faster, where libyaml is built in
    return yaml.load((DATA / name).read_text(encoding="utf-8"), Loader=loader)


def kimi_nano_dir() -> Path:
    """The small Kimi-shaped target that ships with the package: checkpoint, tokenizer, template, prompts."""
    return DATA / "kimi-nano"


def gpu_names() -> list[str]:
    return sorted(load_yaml("gpus.yaml")["gpus"])


def catalogue(name: str) -> list[str]:
    """Of `targets`, `heads`, `datasets`, `releases` or problem `codes`."""
    if name == "codes":
        return list(documented())
    if name == "releases":
        return sorted({str(gate["since"]["by"]) for gate in load_yaml("../trtllm/releases.yaml")["gates"].values()})
    if name == "datasets":
        return ["nano", *load_yaml("datasets.yaml")["datasets"]]
    own = {"targets": "kimi-nano", "heads": "kimi-nano-eagle3"}[name]
    return [own, *load_yaml("models.yaml")[name]]


def gpu_spec(name: str) -> GpuSpec:
    """The row of gpus.yaml called `name` (b200, gb300, ..); raises UsageError listing the known ones."""
    data = load_yaml("gpus.yaml")
    row = data["gpus"].get(name.lower())
    if row is None:
        raise UsageError(f"there are no figures for the GPU {name!r}", f"choose one of {', '.join(data['gpus'])}")
    from trtspec.specs import GpuSpec

    row = dict(row)
    memory = row.pop("memory_mib") * 2**20
    return GpuSpec(name=name.lower(), memory_bytes=memory, source=data["source"], **row)
