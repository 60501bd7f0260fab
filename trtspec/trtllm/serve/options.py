"""The options of `trtspec serve` that each kind of TensorRT-LLM server uses, and the limits that both have."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class EngineStart:
    """The options of `trtspec serve` that a TensorRT-LLM engine uses; None: not given. Times in seconds."""

    target: str
    passed: tuple[str, ...] = ()
    head: str | None = None
    config: Path | None = None
    trtllm_version: str | None = None
    host: str = "localhost"
    port: int = 8000
    goal: str | None = None
    tp_size: int | None = None
    max_batch_size: int | None = None
    max_num_tokens: int | None = None
    max_seq_len: int | None = None
    draft_len: int | None = None
    served_model_name: str | None = None
    trust_remote_code: bool = False
    launcher: str = "direct"
    nodes: int | None = None
    gpus_per_node: int | None = None
    launcher_args: str = ""
    role: str | None = None
    startup_timeout: float = 7200.0
    generation_timeout: float = 300.0
    stop_grace: float = 30.0
    health_interval: float = 15.0
    health_failures: int = 8

    def sizes(self) -> dict[str, int]:
        """What was given, by YAML path."""
        sizes = {
            "tensor_parallel_size": self.tp_size,
            "max_batch_size": self.max_batch_size,
            "max_num_tokens": self.max_num_tokens,
            "max_seq_len": self.max_seq_len,
        }
        return {key: value for key, value in sizes.items() if value is not None}


@dataclass(frozen=True, kw_only=True)
class FrontStart:
    """The options that the front of a disaggregated deployment uses; its address stands in the file."""

    target: str
    disaggregated: Path
    startup_timeout: float = 7200.0
    generation_timeout: float = 300.0
    stop_grace: float = 30.0
    health_interval: float = 15.0
    health_failures: int = 8
