"""The families that trtspec serves, and the lookup of a family by config.json."""

from __future__ import annotations

from typing import Any

from trtspec.errors import TrtspecError
from trtspec.families.family import Family
from trtspec.families.kimi_k2 import KIMI_K2, KIMI_K25

FAMILIES = (KIMI_K2, KIMI_K25)
REFUSED_TYPES = ("kimi_k3", "kimi_linear")  # Kimi targets that trtspec does not serve


def model_types() -> dict[str, Family]:
    """Returns the family of each model_type that config.json may have at its top level."""
    families: dict[str, Family] = {}
    for family in FAMILIES:
        families |= dict.fromkeys(family.model_types, family)
    return families


def family_of(config: dict[str, Any]) -> Family:
    """Returns the family of a target, by the model_type of its config.json.

    Raises TrtspecError if no family has this model_type.
    """
    known = model_types()
    model_type = config.get("model_type", "")
    if model_type not in known:
        message = f"model_type {model_type!r} is not a Kimi-K2 model (known: {', '.join(known)})"
        remedy = "pass a Kimi-K2, K2-Thinking, K2.5, K2.6 or K2.7-Code checkpoint"
        raise TrtspecError(message, remedy, "TS-TARGET-MODEL-TYPE")
    return known[model_type]
