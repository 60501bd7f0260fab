"""TorchLlmArgs, made of the schema's entries."""

from __future__ import annotations

import json
import os
from typing import Annotated, Any, Literal, Optional, Union

from pydantic import BaseModel, ConfigDict, Field, create_model

import tensorrt_llm
from trtspec.trtllm.schema_evidence import expected

ENTRIES = {path: dict(entry) for path, entry in expected(tensorrt_llm.__version__)[0].items()}
for planted, attributes in json.loads(os.environ.get("STANDIN_PLANTED", "{}")).items():
    if attributes is None:
        ENTRIES.pop(planted)
    else:
        ENTRIES[planted] = ENTRIES.get(planted, {}) | attributes
PLAIN = {"int": int, "float": float, "bool": bool, "str": str, "dict[int,int]": dict[int, int],
         "dict[str,str]": dict[str, str], "list[int]": list[int]}  # fmt: skip


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", protected_namespaces=())


def limited(kind: Any, entry: dict[str, Any]) -> Any:
    names = {"min": "ge", "max": "le", "above": "gt", "below": "lt"}
    limits = {short: entry[name] for name, short in names.items() if name in entry}
    return Annotated[kind, Field(**limits)] if limits and kind in (int, float) else kind


def annotation(path: str, entry: dict[str, Any]) -> Any:
    kinds = []
    for word in entry["type"].split("|"):
        if word == "null":
            continue
        if word == "str" and entry.get("allowed") and not entry.get("case_insensitive"):
            kinds.append(Literal[tuple(entry["allowed"])])
            continue
        if word == "object":
            nested = children(path) or entry.get("default") == "object"
            kinds.append(model_of(path) if nested else dict[str, Any])
        elif word.startswith("list["):
            kinds.append(list[limited(PLAIN.get(word[5:-1], dict[str, Any]), entry)])  # type: ignore[misc]
        else:
            kinds.append(limited(PLAIN.get(word, dict[str, Any]), entry))
    whole = Union[tuple(kinds)] if kinds else Any  # noqa: UP007
    return Optional[whole] if "null" in entry["type"].split("|") else whole  # noqa: UP045


def children(path: str) -> list[str]:
    prefix = f"{path}." if path else ""
    return [p for p in ENTRIES if p.startswith(prefix) and "." not in p[len(prefix) :]]


def model_in(kind: Any) -> Any:
    """The model of an annotation that may be a union with None."""
    return kind if isinstance(kind, type) else next(part for part in kind.__args__ if part is not type(None))


def model_of(path: str) -> type[BaseModel]:
    fields: dict[str, Any] = {}
    for child in children(path):
        entry, name = ENTRIES[child], child.rpartition(".")[2]
        default = entry.get("default")
        kind = annotation(child, entry)
        if name.startswith("_"):  # pydantic takes no such name; an alias is what is read
            fields[name.strip("_")] = (kind, Field(default=default, validation_alias=name))
        elif default == "object":
            fields[name] = (kind, Field(default_factory=model_in(kind)))
        else:
            fields[name] = (kind, Field(default=default))
    return create_model(path.replace(".", "_") or "TorchLlmArgs", __base__=Strict, **fields)


TorchLlmArgs = model_of("")
