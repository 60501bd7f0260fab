"""Classes like the engine's: strict, with discriminators, aliases, limits and validators."""

from enum import StrEnum
from typing import Annotated, Any, Literal

from pydantic import (
    AliasChoices,
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeInt,
    PositiveInt,
    field_validator,
    model_validator,
)


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Policy(StrEnum):
    EVICT = "MAX_UTILIZATION"
    KEEP = "GUARANTEED_NO_EVICT"


class KvCacheConfig(Strict):
    free_gpu_memory_fraction: float | None = Field(default=0.9, ge=0, le=1)
    tokens_per_block: int = 32
    dtype: str = "auto"
    enable_block_reuse: bool = True
    host_cache_size: int | None = None
    pools: list[PositiveInt] | None = Field(default=None, min_length=1)


class SchedulerConfig(Strict):
    capacity_scheduler_policy: Policy = Policy.KEEP


class DecodingBase(Strict):
    max_draft_len: NonNegativeInt | None = None
    speculative_model: str | None = Field(
        default=None, validation_alias=AliasChoices("speculative_model", "speculative_model_dir")
    )
    draft_len_schedule: dict[int, int] | None = None


class EagleConfig(DecodingBase):
    decoding_type: Literal["Eagle"] = "Eagle"
    eagle3_layers_to_capture: set[int] | None = None

    @model_validator(mode="after")
    def needs_a_head(self) -> "EagleConfig":
        if self.speculative_model is None:
            raise ValueError("Draft model must be provided for EAGLE")
        return self


class NGramConfig(DecodingBase):
    decoding_type: Literal["NGram"] = "NGram"
    max_matching_ngram_size: PositiveInt = 2


class TorchLlmArgs(Strict):
    model: str
    skip_tokenizer_init: bool = False
    tensor_parallel_size: int = 1
    max_batch_size: int | None = 2048
    backend: Literal["pytorch"] = Field(
        default="pytorch", json_schema_extra={"status": "deprecated"}
    )
    load_format: str = "auto"
    cuda_graph_config: dict[str, Any] | None = None
    stream_interval: PositiveInt = 1
    ratio: float = Field(default=1.25, gt=1, lt=2)
    env_overrides: dict[str, str] | None = None
    kv_cache_config: KvCacheConfig = Field(default_factory=KvCacheConfig)
    scheduler_config: SchedulerConfig = Field(default_factory=SchedulerConfig)
    speculative_config: (
        Annotated[EagleConfig | NGramConfig, Field(discriminator="decoding_type")] | None
    ) = None
    brand_new_key: bool = Field(default=False, json_schema_extra={"status": "prototype"})

    @field_validator("env_overrides", mode="before")
    @classmethod
    def as_text(cls, value: Any) -> Any:
        return (
            {str(key): str(item) for key, item in value.items()}
            if isinstance(value, dict)
            else value
        )

    @field_validator("load_format")
    @classmethod
    def known_format(cls, value: Any) -> Any:
        if value not in ("auto", "dummy"):
            raise ValueError(f"Invalid LoadFormat: {value}")
        return value
