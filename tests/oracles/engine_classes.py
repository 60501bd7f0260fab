"""Runs TensorRT-LLM's own configuration classes, from its sources, as judges of engine YAML.

    python -m tests.oracles.engine_classes SOURCES < requests > answers

SOURCES holds `tensorrt_llm/llmapi/llm_args.py` and what it takes its classes from
(`usage/config.py`, the LoRA configuration, the registry of KV connectors). Everything else that
those files import is replaced by stand-ins, so that neither a GPU nor the engine's binaries are
needed. A request is one JSON line, {"text": YAML}; its answer is {"accepts": bool, "why": str}. The
first line that is written names the fields of the class, as {"fields": [...]}.

A file is judged as trtllm-serve does: `yaml.safe_load`, merged over the options' defaults by the
release's own `update_llm_args_with_extra_dict`, then handed to `TorchLlmArgs`.
"""

import enum
import importlib.abc
import importlib.machinery
import json
import logging
import signal
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

SECONDS = 5.0  # of one file
STANDIN_MODEL = "/models/target"
REAL = (
    "tensorrt_llm.llmapi.llm_args",
    "tensorrt_llm.usage.config",
    "tensorrt_llm.lora_helper",
    "tensorrt_llm._torch.peft.lora.config",
    "tensorrt_llm._torch.pyexecutor.connectors.registry",
)
REPLACED = ("tensorrt_llm", "torch", "transformers", "strenum", "ray")


class StrictBaseModel(BaseModel):
    """The base of every configuration class: a key that it does not have is refused."""

    model_config = ConfigDict(extra="forbid")


class Mode(enum.Enum):
    """How drafts are made; the classes ask for these names and for whether a schedule works."""

    EAGLE3 = "EAGLE3"
    EAGLE3_ONE_MODEL = "EAGLE3_ONE_MODEL"
    MTP = "MTP"
    MTP_EAGLE = "MTP_EAGLE"
    MTP_EAGLE_ONE_MODEL = "MTP_EAGLE_ONE_MODEL"
    NGRAM = "NGRAM"
    SA = "SA"
    PARD = "PARD"
    DFLASH = "DFLASH"
    DSPARK = "DSPARK"
    DRAFT_TARGET = "DRAFT_TARGET"
    DRAFT_TARGET_ONE_MODEL = "DRAFT_TARGET_ONE_MODEL"
    SAVE_HIDDEN_STATES = "SAVE_HIDDEN_STATES"
    USER_PROVIDED = "USER_PROVIDED"
    AUTO = "AUTO"

    @classmethod
    def from_string(cls, name: str) -> "Mode":
        return cls[name]

    def support_dynamic_draft_len(self) -> bool:
        return self in (
            Mode.EAGLE3_ONE_MODEL,
            Mode.MTP_EAGLE_ONE_MODEL,
            Mode.MTP,
            Mode.PARD,
            Mode.DFLASH,
            Mode.SA,
        )

    def __getattr__(self, name: str) -> Any:
        if name.startswith("is_"):
            return lambda: self.name == name.removeprefix("is_").upper()
        raise AttributeError(name)


class AnyAttribute(type):
    """A class of which any method can be asked for."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return Anything()


class Anything(metaclass=AnyAttribute):
    """Takes any argument and has any attribute, as stand-in of bindings and runtime classes."""

    __members__: dict[str, Any] = {}

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Anything()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return None


def _names(**members: Any) -> Any:
    return types.SimpleNamespace(**members)


DTYPES = ("bfloat16", "float16", "float32", "int64", "int32", "int8", "bool", "fp8")
ATTRIBUTES: dict[str, dict[str, Any]] = {
    "strenum": {"StrEnum": enum.StrEnum},
    "torch": {
        "cuda": _names(
            device_count=lambda: 8,
            is_available=lambda: False,
            get_device_capability=lambda: (10, 0),
            get_device_properties=lambda index: _names(major=10, minor=0),
        )
    },
    "tensorrt_llm._utils": {
        "_str_to_torch_dtype_dict": dict.fromkeys(DTYPES),
        "is_sm_100f": lambda: True,
        "mpi_rank": lambda: 0,
        "prefer_pinned": lambda: True,
    },
    "tensorrt_llm.bindings.internal.batch_manager": {
        "LinearCacheType": _names(RECURRENT_STATES=_names(value=-2147483647))
    },
    "tensorrt_llm.mapping": {
        "CpType": enum.StrEnum(
            "CpType", {name: name for name in ("ULYSSES", "STAR", "RING", "HELIX")}
        )
    },
    "tensorrt_llm.logger": {"logger": logging.getLogger("engine")},
    "tensorrt_llm.tokenizer": {"TOKENIZER_ALIASES": {}},
    "tensorrt_llm.llmapi.tokenizer": {"tokenizer_factory": lambda given=None, **kwargs: given},
    "tensorrt_llm.llmapi.utils": {
        "StrictBaseModel": StrictBaseModel,
        "generate_api_docs_as_docstring": lambda kind, indent="": "",
        "get_type_repr": str,
    },
    "tensorrt_llm._torch.speculative.interface": {"SpeculativeDecodingMode": Mode},
    "tensorrt_llm._torch.flashinfer_utils": {"IS_FLASHINFER_AVAILABLE": True},
    "tensorrt_llm._torch.virtual_memory": {
        "RestoreMode": enum.Enum("RestoreMode", "NONE MEMSET CPU PINNED")
    },
}


class StandIn(types.ModuleType):
    """A module whose names are looked up in `known`, and else are classes that take anything."""

    def __init__(self, name: str, known: Mapping[str, Any]) -> None:
        super().__init__(name)
        self.__known__ = known

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        made = self.__known__.get(name)
        if made is None:
            made = type(name, (Anything,), {})
        setattr(self, name, made)
        return made


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the real files of `real`, and stand-ins for other modules of `replaced`.

    `known` gives the names of a stand-in that are not anything.
    """

    def __init__(
        self,
        sources: Path,
        real: Sequence[str],
        replaced: Sequence[str],
        known: Callable[[str], Mapping[str, Any]],
    ) -> None:
        self.sources = sources
        self.real = real
        self.replaced = replaced
        self.known = known

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: Any = None) -> Any:
        if name.partition(".")[0] not in self.replaced:
            return None
        if name.startswith("ray"):
            raise ModuleNotFoundError(name, name=name)
        if name in self.real:
            file = self.sources.joinpath(*name.split(".")).with_suffix(".py")
            if file.is_file():
                return importlib.machinery.ModuleSpec(
                    name, importlib.machinery.SourceFileLoader(name, str(file)), origin=str(file)
                )
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return StandIn(spec.name, self.known(spec.name))

    def exec_module(self, module: types.ModuleType) -> None:
        pass


class Engine:
    """The classes of one folder of sources."""

    def __init__(self, sources: Path) -> None:
        known = lambda name: ATTRIBUTES.get(name, {})  # noqa: E731
        sys.meta_path.insert(0, Finder(sources, REAL, REPLACED, known))
        self.module = importlib.import_module("tensorrt_llm.llmapi.llm_args")

    def fields(self) -> list[str]:
        return sorted(self.module.TorchLlmArgs.model_fields)

    def refusal(self, text: str) -> str:
        """Why the release refuses `text`; "" where it takes it."""
        import yaml

        module = self.module
        signal.setitimer(
            signal.ITIMER_REAL, SECONDS
        )  # an absurd graph size is counted up to, forever
        try:
            given = yaml.safe_load(text)
            values = {} if given is None else given
            options = {
                "model": STANDIN_MODEL,
                "kv_cache_config": module.KvCacheConfig(free_gpu_memory_fraction=0.9),
                "telemetry_config": module.TelemetryConfig(disabled=True),
            }
            merged = module.update_llm_args_with_extra_dict(options, values)
            merged.pop("build_config", None)  # dropped by trtllm-serve for the PyTorch backend
            module.TorchLlmArgs(**merged)
        except Exception as error:  # whatever it raises, the server does not start
            return f"{type(error).__name__}: {error}"[:500]
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
        return ""


def _too_long(*_: Any) -> None:
    raise TimeoutError(f"not judged within {SECONDS} s")


def main() -> None:
    signal.signal(signal.SIGALRM, _too_long)
    engine = Engine(Path(sys.argv[1]))
    sys.stdout.write(json.dumps({"fields": engine.fields()}) + "\n")
    for line in sys.stdin:
        why = engine.refusal(json.loads(line)["text"])
        sys.stdout.write(json.dumps({"accepts": not why, "why": why}) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
