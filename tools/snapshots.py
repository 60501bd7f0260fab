"""For those who add a release: writes what a source says of the engine's classes.

trtspec/trtllm/snapshots has the files. `python tools/snapshots.py documented PAGES` reads class
pages of the documentation, as JSON: release, class, whether the page is complete, and its fields.
`installed` reads the classes and options of the engine that is installed here. `compare` prints
each difference between a page and what the sources before it say, one line each. `judge PAGES
--without RELEASE` judges the pages of a release by all other sources.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import importlib
import json
import re
import sys
import types
import typing
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import Any

from packaging.version import Version
from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from trtspec.errors import MissingDependency, TrtspecError
from trtspec.report import write_atomic
from trtspec.trtllm import schema as schemas
from trtspec.trtllm.schema import DISCRIMINATORS, OPTIONS, SNAPSHOTS, UNKNOWN, snapshots

Facts = dict[str, Any]
# classes of the engine by the mappings of the YAML that they describe; `path:kind` where a key
# chooses among several
PATHS = {
    "TorchLlmArgs": [""],
    "Eagle3DecodingConfig": ["speculative_config:Eagle3"],
    "EagleDecodingConfig": ["speculative_config:Eagle"],
    "MTPDecodingConfig": ["speculative_config:MTP"],
    "DFlashDecodingConfig": ["speculative_config:DFlash"],
    "DSparkDecodingConfig": ["speculative_config:DSpark"],
    "PARDDecodingConfig": ["speculative_config:PARD"],
    "SADecodingConfig": ["speculative_config:SA"],
    "NGramDecodingConfig": ["speculative_config:NGram"],
    "AutoDecodingConfig": ["speculative_config:AUTO"],
    "SaveHiddenStatesDecodingConfig": ["speculative_config:SaveState"],
    "SAEnhancerConfig": ["speculative_config.sa_config"],
    "KvCacheConfig": ["kv_cache_config"],
    "BlockReuseConfig": ["kv_cache_config.block_reuse_config"],
    "KVEventsConfig": ["kv_cache_config.kv_events_config"],
    "CacheTransceiverConfig": ["cache_transceiver_config"],
    "MoeConfig": ["moe_config"],
    "DecodeCudaGraphConfig": ["cuda_graph_config:decode"],
    "EncodeCudaGraphConfig": ["cuda_graph_config:encode", "encoder_cuda_graph_config"],
    "TorchCompileConfig": ["torch_compile_config"],
    "AttentionDpConfig": ["attention_dp_config"],
    "SchedulerConfig": ["scheduler_config"],
    "MultimodalConfig": ["multimodal_config"],
    "DeepSeekSparseAttentionConfig": ["sparse_attention_config:dsa"],
    "DeepSeekV4SparseAttentionConfig": ["sparse_attention_config:deepseek_v4"],
}
# keys that a class takes and its page does not show, beside the one that it does
ALIASES = {"speculative_model": "speculative_model_dir"}
PLAIN = {
    "int": "int",
    "float": "float",
    "bool": "bool",
    "str": "str",
    "Path": "str",
    "None": "null",
}
NATIVE = {int: "int", float: "float", bool: "bool", str: "str", type(None): "null"}
MARKS = {"ge": "min", "le": "max", "gt": "above", "lt": "below"}
LIMITS = {"min", "max", "above", "below"}
DEEPEST = 6  # levels of nested objects; the engine has four
# line breaks of a snapshot's text
LINES = {
    '{"release"': '{\n "release"',
    '], "classes": {': '],\n "classes": {\n  ',
    ', "source"': ',\n "source"',
    '"fields": {"': '"fields": {\n   "',
    '}}, "': '}},\n  "',
    '}, "': '},\n   "',
}
# a class by the one that is derived from it, and so has every key of it (llm_args.py)
BASES = {"speculative_config:Eagle3": "speculative_config:Eagle"}


def documented(pages: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """A snapshot for each release whose class pages are listed."""
    for release, listed in pages.items():
        if not re.fullmatch(r"\d+\.\d+\.\d+\S*", release):
            continue  # pages of no known release
        snapshots.cache_clear()  # the release before may have been written since
        classes: dict[str, Any] = {}
        for name, page in sorted(listed.items()):
            for owner in PATHS.get(name, ()):
                classes[owner] = page_class(owner, page, classes)
        for path, shown in pages["telemetry_pages"].get(release, {}).get("fields", {}).items():
            parent, _, name = path.rpartition(".")
            if parent not in classes:
                classes[parent] = {"whole": False, "fields": {}}
            if name not in classes[parent]["fields"]:
                classes[parent]["fields"][name] = telemetry_facts(shown) if parent else {}
        for derived, base in BASES.items():
            if classes.get(derived, {}).get("whole") and base not in classes:
                refuses = sorted({*schemas._names(base)} - {*classes[derived]["fields"]})
                classes[base] = {"whole": False, "refuses": refuses, "fields": {}}
        for owner, read in classes.items():
            for name, facts in read["fields"].items():
                read["fields"][name] = with_earlier(owner, name, facts, Version(release))
        source = [f"documentation of {release}, class pages"]
        yield {
            "release": release,
            "source": source,
            "classes": classes,
        }


def with_earlier(owner: str, name: str, facts: Facts, release: Version) -> Facts:
    """The facts of a page, with what the last source before it says that pages do not state.

    It is a validator's limits, for example, where the page has none.
    """
    before: Facts = {}
    for snapshot in snapshots():
        fields = snapshot["classes"].get(owner, {}).get("fields", {})
        if Version(snapshot["release"]) < release:
            before = fields.get(name, before)
    limits = [] if LIMITS.isdisjoint(facts) else list(LIMITS)
    kept = {key: value for key, value in before.items() if key not in limits}
    return kept | facts


def page_class(owner: str, page: dict[str, Any], classes: dict[str, Any]) -> dict[str, Any]:
    """One class of a page.

    An object whose own page is missing becomes a class of which nothing is known.
    """
    path = owner.partition(":")[0]
    fields: dict[str, Facts] = {}
    for name, shown in page["fields"].items():
        if name == DISCRIMINATORS.get(path):
            continue
        fields[name] = page_facts(shown)
        if name in ALIASES:
            fields[ALIASES[name]] = fields[name]
        if re.search(r"\w+(Config|Spec)\b", shown["type"]) and "ict[" not in shown["type"]:
            classes.setdefault(f"{path}.{name}".lstrip("."), {"whole": False, "fields": {}})
    return {"whole": page["complete"], "fields": dict(sorted(fields.items()))}


def page_facts(shown: dict[str, Any]) -> Facts:
    """What a page states of a field, in the words of the snapshots."""
    if shown["type"] == "(cut)":
        return {"type": "any"}
    facts: Facts = {"type": page_type(shown["type"])}
    whole = "float" not in facts["type"]
    for limit in ("min", "max", "above", "below"):
        if shown.get(limit) is not None:
            facts[limit] = shown[limit]
    if whole and "above" in facts:
        facts["min"] = facts.pop("above") + 1
    if shown.get("allowed"):
        facts["allowed"] = shown["allowed"]
    if shown.get("min_length"):
        facts["not_empty"] = True
    default = page_default(str(shown.get("default")), facts["type"])
    return facts if default is UNKNOWN else {**facts, "default": default}


def page_type(text: str) -> str:
    """A union of the snapshots' types."""
    kinds: list[str] = []
    for member in split(text, "|"):
        annotated = re.fullmatch(r"Annotated\[(.*)\]", member)
        inner = page_type(split(annotated[1], ",")[0]) if annotated else page_member(member)
        kinds += inner.split("|")
    return "|".join(dict.fromkeys(kinds))


def split(text: str, mark: str) -> list[str]:
    """Parts of an annotation, split outside brackets."""
    parts, depth = [""], 0
    for letter in text:
        depth += (letter in "[(") - (letter in "])")
        if letter == mark and depth == 0:
            parts.append("")
        else:
            parts[-1] += letter
    return [part.strip() for part in parts]


def page_member(text: str) -> str:
    if text in PLAIN:
        return PLAIN[text]
    if text.startswith("Literal["):
        values = ast.literal_eval(f"[{text[8:-1]}]")
        return NATIVE[type(values[0])]
    inner = re.fullmatch(r"(?:List|Set|list|set)\[(.*)\]", text)
    if inner is not None:
        return f"list[{page_type(inner[1])}]"
    mapping = re.fullmatch(r"[Dd]ict\[(\w+), (\w+)\]", text)
    if mapping is not None and mapping[1] in PLAIN and mapping[2] in PLAIN:
        return f"dict[{PLAIN[mapping[1]]},{PLAIN[mapping[2]]}]"
    if mapping is not None and mapping[2].endswith("Config"):
        return f"dict[{PLAIN[mapping[1]]},object]"
    if "ict[" in text or text == "object" or re.search(r"Config\b", text):
        return "object"
    return "str"  # an enum


def page_default(text: str, kind: str) -> Any:
    """UNKNOWN for a default that the page does not spell out."""
    if text == "<factory>":
        return "object" if "object" in kind.split("|") else UNKNOWN
    if re.fullmatch(r"\w+\.\w+", text) and not re.fullmatch(r"[\d.]+", text):
        return UNKNOWN  # a member of an enum
    try:
        return ast.literal_eval(text)
    except (SyntaxError, ValueError):
        return UNKNOWN


def telemetry_facts(shown: dict[str, Any]) -> Facts:
    """Of a telemetry page: the listed values, where they are all that the engine takes."""
    literal = "literal" in shown["type"]
    return {"allowed": shown["allowed"]} if literal and shown.get("allowed") else {}


def installed(package: str) -> dict[str, Any]:
    """The snapshot of the engine that is installed here, every class of it whole."""
    try:
        engine = importlib.import_module(package)
        module = importlib.import_module(f"{package}.llmapi.llm_args")
    except ImportError as error:
        remedy = "run this inside NVIDIA's TensorRT-LLM image"
        raise MissingDependency(f"{package} cannot be imported here ({error})", remedy) from None
    arguments = getattr(module, "TorchLlmArgs", None) or module.LlmArgs
    serve = importlib.import_module(f"{package}.commands.serve").main.commands["serve"]
    classes: dict[str, Any] = {}
    read_class("", arguments, classes)
    options = {each.name: option(each) for each in serve.params if each.param_type_name == "option"}
    classes[OPTIONS] = {"whole": True, "fields": options}
    release = engine.__version__
    return {
        "release": release,
        "source": [f"the classes of tensorrt_llm {release}, read where it is installed"],
        "classes": classes,
    }


def read_class(owner: str, model: type[BaseModel], classes: dict[str, Any], depth: int = 0) -> None:
    """Adds a class and those of its fields."""
    path = owner.partition(":")[0]
    fields: dict[str, Facts] = {}
    for name, info in model.model_fields.items():
        shape = Shape()
        shape.add(info.annotation, info.metadata)
        entry = field_facts(shape, info)
        alias = info.validation_alias or info.alias
        spellings = getattr(alias, "choices", None) or ([alias] if alias else [name])
        for spelling in spellings:
            if spelling != DISCRIMINATORS.get(path):
                fields[spelling] = entry
            child = f"{path}.{spelling}".lstrip(".")
            if depth < DEEPEST:
                read_objects(child, shape.models, classes, depth + 1)
    classes[owner] = {"whole": True, "fields": fields}


def read_objects(
    path: str, models: list[type[BaseModel]], classes: dict[str, Any], depth: int
) -> None:
    """The classes of an object: one, or several that its discriminator tells apart."""
    key = DISCRIMINATORS.get(path)
    if key is None and len(models) == 1:
        read_class(path, models[0], classes, depth)
    if key is None or not models:
        return
    kinds = [typing.get_args(model.model_fields[key].annotation)[0] for model in models]
    for kind, model in zip(kinds, models, strict=True):
        read_class(f"{path}:{kind}", model, classes, depth)
    classes[path] = {"whole": True, "fields": {key: {"type": "str", "allowed": kinds}}}


class Shape:
    """An annotation as types of the snapshots, values, limits, and its objects' classes."""

    def __init__(self) -> None:
        self.kinds: list[str] = []
        self.allowed: list[Any] = []
        self.limits: Facts = {}
        self.models: list[type[BaseModel]] = []

    def add(self, annotation: Any, metadata: typing.Iterable[Any] = ()) -> None:
        for mark in metadata:
            for name, limit in MARKS.items():
                if getattr(mark, name, None) is not None:
                    self.limits[limit] = getattr(mark, name)
            if getattr(mark, "min_length", None):
                self.limits["not_empty"] = True
        origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
        if origin is typing.Annotated:
            self.add(arguments[0], arguments[1:])
        elif origin in (typing.Union, types.UnionType):
            for argument in arguments:
                self.add(argument)
        elif origin is typing.Literal:
            self.allowed += arguments
            self.kinds += [NATIVE.get(type(value), "str") for value in arguments]
        elif origin in (list, set, tuple, frozenset):
            inner = Shape()
            inner.add(arguments[0] if arguments else str)
            self.allowed += inner.allowed
            self.limits |= inner.limits
            self.kinds.append(f"list[{inner.kinds[0]}]")
        elif origin is dict:
            pair = ",".join(NATIVE.get(argument, "?") for argument in arguments)
            self.kinds.append(f"dict[{pair}]" if pair in ("int,int", "str,str") else "object")
        elif annotation in NATIVE:
            self.kinds.append(NATIVE[annotation])
        elif isinstance(annotation, type) and issubclass(annotation, Enum):
            self.kinds.append("str")
            self.allowed += [member.value for member in annotation]
        else:
            self.kinds.append("object")
            if isinstance(annotation, type) and issubclass(annotation, BaseModel):
                self.models.append(annotation)


def field_facts(shape: Shape, info: Any) -> Facts:
    facts: Facts = {"type": "|".join(dict.fromkeys(shape.kinds)), **shape.limits}
    if shape.allowed:
        facts["allowed"] = list(dict.fromkeys(shape.allowed))
    default = info.default_factory() if info.default_factory is not None else info.default
    if isinstance(default, BaseModel):
        default = "object"
    if isinstance(default, Enum):
        default = default.value
    if isinstance(default, (set, frozenset)):
        default = sorted(default)
    facts |= {"required": True} if default is PydanticUndefined else {"default": default}
    extra = info.json_schema_extra if isinstance(info.json_schema_extra, dict) else {}
    status = extra.get("status") or ("deprecated" if info.deprecated else None)
    return facts | ({"status": status} if status else {})


def option(param: Any) -> Facts:
    kind = {"integer": "int", "float": "float", "boolean": "bool"}.get(param.type.name, "str")
    plain = param.default is None or isinstance(param.default, (bool, int, float, str))
    facts: Facts = {
        "flags": sorted([*param.opts, *param.secondary_opts]),
        "type": kind,
        "default": param.default if plain else None,  # click's marker for "not given"
        "is_flag": param.is_flag,
        "multiple": param.multiple,
    }
    choices = list(getattr(param.type, "choices", ()))
    return facts | ({"choices": choices} if choices else {})


def compare() -> Iterator[str]:
    """Each difference between a source and what the sources before it say, with its source."""
    for snapshot in snapshots()[1:]:
        release, source = Version(snapshot["release"]), snapshot["source"][0]
        for owner in snapshot["classes"]:
            before = [one for one in schemas.classes()[owner] if one.release < release]
            if before:
                now = next(one for one in schemas.classes()[owner] if one.release == release)
                for line in class_differences(before, now):
                    yield f"{snapshot['release']} `{owner or 'top level'}` {line} ({source})"


def class_differences(before: list[Any], now: Any) -> Iterator[str]:
    names = {name for reading in before for name in reading.entries}
    for name in sorted(names | set(now.entries)):
        said = [entry for entry in (one.entry(name) for one in before) if entry is not UNKNOWN]
        new = now.entry(name)
        if not said or new is UNKNOWN or said[-1] == new:
            continue
        if new is None or said[-1] is None:
            yield f"`{name}`: {'gone' if new is None else 'new'}"
            continue
        changed = [
            f"{key} {getattr(said[-1], key)!r} -> {getattr(new, key)!r}"
            for key in vars(new)
            if getattr(said[-1], key) != getattr(new, key)
        ]
        yield f"`{name}`: {', '.join(changed)}".replace(repr(UNKNOWN), "unknown")


@contextlib.contextmanager
def without(release: str | None) -> Iterator[None]:
    """Inside, the sources of a release were never read."""
    cached = ("classes", "_key_support", "_names", "_variants", "option_names", "_schema")
    kept = tuple(one for one in snapshots() if one["release"] != release)
    try:
        schemas.snapshots = lambda: kept  # type: ignore[assignment]
        for name in cached:
            getattr(schemas, name).cache_clear()
        yield
    finally:
        schemas.snapshots = snapshots
        for name in cached:
            getattr(schemas, name).cache_clear()


def judged(pages: dict[str, Any], only: str | None) -> Iterator[str]:
    """Judges the fields of complete pages, and the keys that pages lack.

    A line for each class that is misjudged, and the sums. `only`: pages of one release.
    """
    refused = passed = fields = lacking = doubted = 0
    for snapshot in documented(pages):
        if only not in (None, snapshot["release"]):
            continue
        schema = schemas.schema_for(snapshot["release"])
        for owner, read in snapshot["classes"].items():
            if not read["whole"]:
                continue
            parent, _, kind = owner.partition(":")
            wrong, free = [], []
            for name in sorted({*schemas._names(owner), *read["fields"]}):
                support = schema.key_support(parent, name, kind or None)
                documented_here = name in read["fields"]
                fields += documented_here
                lacking += not documented_here
                settled_no = not support.taken and support.is_certain
                if documented_here and settled_no:
                    wrong.append(name)
                elif not documented_here and support.takes:
                    free.append(name)
                elif documented_here != support.takes:
                    doubted += 1
            refused, passed = refused + len(wrong), passed + len(free)
            if wrong or free:
                yield f"{snapshot['release']} {owner}: refused {wrong}, passed {free}"
    yield (
        f"{fields} documented fields: {refused} refused; {lacking} keys that pages lack: "
        f"{passed} passed; {doubted} warnings"
    )


def text_of(snapshot: dict[str, Any]) -> str:
    """JSON with one line for each class and each field, a mapping before what it holds."""
    parents_first = sorted(snapshot["classes"].items(), key=lambda item: item[0].split(":"))
    text = json.dumps(snapshot | {"classes": dict(parents_first)})
    for mark, lines in LINES.items():
        text = text.replace(mark, lines)
    return f"{text}\n"


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python tools/snapshots.py", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("documented").add_argument("pages", type=Path)
    commands.add_parser("installed").add_argument("--package", default="tensorrt_llm")
    for name in ("documented", "installed"):
        commands.choices[name].add_argument("-o", "--output", type=Path, default=SNAPSHOTS)
    commands.add_parser("compare")
    left = commands.add_parser("judge")
    left.add_argument("pages", type=Path)
    left.add_argument("--without", help="leave the sources of this release out")
    given = parser.parse_args(words)
    if given.command == "compare":
        sys.stdout.writelines(f"{line}\n" for line in compare())
    elif given.command == "judge":
        with without(given.without):
            lines = judged(json.loads(given.pages.read_text()), given.without)
            sys.stdout.writelines(f"{line}\n" for line in lines)
    else:
        written = (
            documented(json.loads(given.pages.read_text()))
            if given.command == "documented"
            else [installed(given.package)]
        )
        for snapshot in written:
            write_atomic(given.output / f"{snapshot['release']}.json", text_of(snapshot))
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except TrtspecError as error:
        sys.stderr.write(f"{error.message}\n-> {error.remedy}\n")
        sys.exit(error.exit_code)
