"""What the fields of a request may hold: one table for the HTTP API, its OpenAPI document and callers of the engine."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from trtspec.errors import UsageError

MAX_INT32, MAX_INT64 = 2**31 - 1, 2**63 - 1
MAX_STOPS = 64
TokenId = Annotated[int, Field(ge=0, le=MAX_INT32)]
StopString = Annotated[str, Field(max_length=1000)]
TokenName = Annotated[str, Field(pattern=r"^[0-9]{1,7}$")]  # a token id as a JSON key
Penalty = Annotated[float, Field(ge=-2, le=2)]
Bias = Annotated[float, Field(ge=-100, le=100)]


class RequestRefused(UsageError):
    """A request that cannot be served as it is; `param` names the field."""

    def __init__(self, message: str, remedy: str = "", param: str | None = None) -> None:
        super().__init__(message, remedy)
        self.param = param


class Ranges(BaseModel):
    """Read from a JSON body, or from the attributes of a record. Infinity and NaN are outside of every range."""

    model_config = ConfigDict(extra="forbid", strict=True, from_attributes=True, allow_inf_nan=False)


class SamplingRanges(Ranges):
    """Fields of a `GenerationRequest`."""

    temperature: float = Field(1.0, ge=0, le=100)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=-1, le=MAX_INT32)
    seed: int | None = Field(None, ge=-MAX_INT64 - 1, le=MAX_INT64)


class WishRanges(Ranges):
    """Fields of `Wishes`. A repetition penalty below 0.01 would make logits infinite."""

    frequency_penalty: Penalty = 0.0
    presence_penalty: Penalty = 0.0
    repetition_penalty: float = Field(1.0, ge=0.01, le=10)
    min_p: float = Field(0.0, ge=0, le=1)
    min_tokens: int = Field(0, ge=0, le=MAX_INT32)
