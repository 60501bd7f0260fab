"""The families that trtspec serves, and the family of a config.json."""

from __future__ import annotations

from typing import Any

from trtspec.errors import TrtspecError
from trtspec.families.family import Family
from trtspec.families.kimi_k2 import KIMI_K2, KIMI_K25

FAMILIES = (KIMI_K2, KIMI_K25)
REFUSED_TYPES = ("kimi_k3", "kimi_linear")  # targets too, but not served


def model_types() -> dict[str, Family]:
    """The family of each model_type that config.json may have at its top level."""
    return {name: family for family in FAMILIES for name in family.model_types}


def family_of(config: dict[str, Any]) -> Family:
    """The family of a target, by its config.json alone.

    Raises TrtspecError if no family has its model_type.
    """
    known = model_types()
    model_type = config.get("model_type", "")
    if model_type not in known:
        message = f"model_type {model_type!r} is not a Kimi-K2 model (known: {', '.join(known)})"
        remedy = "pass a Kimi-K2, K2-Thinking, K2.5, K2.6 or K2.7-Code checkpoint"
        raise TrtspecError(message, remedy, "TS-TARGET-MODEL-TYPE")
    return known[model_type]
