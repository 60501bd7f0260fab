"""Which tensors become NVFP4 and which exclude list says so; the rules are data (data/policies.yaml)."""

from __future__ import annotations

import re
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from trtspec.data_files import load_yaml
from trtspec.errors import UsageError
from trtspec.files import load_file
from trtspec.specs import ModelSpec

TEXT_PREFIX = "language_model."
# Modules that read the same input share a scale: the larger amax of the group serves all of it.
SHARED_INPUT = (("gate_proj", "up_proj"), ("q_a_proj", "kv_a_proj_with_mqa"))


@dataclass(frozen=True)
class Policy:
    """`patterns` choose modules; `exclude` and `exclude_vision` are templates of the published ignore list."""

    name: str
    summary: str
    patterns: tuple[str, ...]
    exclude: tuple[str, ...]
    exclude_vision: tuple[str, ...] = ()

    def quantizes(self, name: str) -> bool:
        """Whether the module or weight of this stored name becomes NVFP4."""
        module = name.removeprefix(TEXT_PREFIX).removesuffix(".weight")
        return any(fnmatchcase(module, pattern) for pattern in self.patterns)

    def exclude_patterns(self, spec: ModelSpec) -> list[str]:
        """The ignore list for this model, written and ordered as the published one."""
        dense, last = spec.first_k_dense_replace, spec.num_hidden_layers
        layers = {"{layer}": range(last), "{dense}": range(dense), "{moe}": range(dense, last)}
        entries = set(self.exclude_vision) if spec.has_vision else set()
        for template in self.exclude:
            text = template.replace("{prefix}", spec.name_prefix)
            slot = next((slot for slot in layers if slot in text), None)
            entries |= {text} if slot is None else {_numbered(text, slot, layer, last) for layer in layers[slot]}
        return sorted(entries)


def _numbered(template: str, slot: str, layer: int, last: int) -> str:
    """Fills in the layer; `layers.1*` would also match layers 10 to 19, so a star right behind it becomes `.*`."""
    ambiguous = template.endswith(f"{slot}*") and layer > 0 and layer * 10 < last
    return template.replace(slot + "*" if ambiguous else slot, f"{layer}.*" if ambiguous else str(layer))


def shared_partners(module: str) -> list[str]:
    """The other modules that read the same input as `module` and so share its amax."""
    stem, _, leaf = module.rpartition(".")
    group = next((group for group in SHARED_INPUT if leaf in group), ())
    return [f"{stem}.{other}" for other in group if other != leaf]


def load_policy(name: str) -> Policy:
    """A shipped policy by name, or one from a YAML file with the keys of a shipped one."""
    shipped = load_yaml("policies.yaml")["policies"]
    if name in shipped:
        return _policy(name, shipped[name])
    if not Path(name).is_file():
        raise UsageError(
            f"policy {name!r} is neither one of {', '.join(shipped)} nor a file",
            "see `trtspec quantize --help`",
        )
    try:
        return _policy(Path(name).stem, load_file(name))
    except (KeyError, TypeError) as error:
        raise UsageError(f"{name} is not a policy: {error!r}", "give it `summary`, `quantize` and `exclude`") from None


def _policy(name: str, entry: dict[str, Any]) -> Policy:
    lists = (tuple(entry["quantize"]), tuple(entry["exclude"]), tuple(entry.get("exclude_vision", ())))
    return Policy(name, entry["summary"], *lists)


def default_policy(*names: str) -> Policy:
    """The policy of the family that one of `names` (hub id, path, config name) tells, else the table's default.

    In a path the last part that tells a family counts, so that a hub cache's `models--org--Kimi-K2.5/snapshots/...`
    is recognised.
    """
    table = load_yaml("policies.yaml")
    for name in names:
        for part in reversed(re.split(r"[/\\]", name)):
            for key, entry in table["policies"].items():
                if re.search(entry["family"], part, re.IGNORECASE):
                    return _policy(key, entry)
    return _policy(table["default"], table["policies"][table["default"]])
