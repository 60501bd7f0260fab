"""Values of a config.json, each of the type and size that it can have; the error for any other names the key."""

from __future__ import annotations

from typing import Any

from trtspec.errors import TrtspecError

REQUIRED = object()
MOST = 2**31 - 1  # of a size
REMEDY = "correct config.json, or download it again"
SHOWN = 60
NESTED = ("text_config", "transformer_layer_config", "eagle_config", "quantization_config", "quantization")
MAPPINGS = (
    *NESTED,
    "vision_config",
    "speculators_config",
    "rope_scaling",
    "rope_parameters",
    "auto_map",
    "config_groups",
)
TEXTS = ("model_type", "speculators_model_type", "quant_method", "quant_algo", "kv_cache_quant_algo", "format")
LISTS_OF_TEXT = ("architectures", "ignore", "exclude_modules")
LISTS_OF_WHOLES = ("eagle_aux_hidden_state_layer_ids", "eos_token_id", "weight_block_size")


class Values:
    """One mapping of a config.json, read key by key. `where` says in messages which one."""

    def __init__(self, values: Any, where: str = "config.json") -> None:
        if not isinstance(values, dict):
            raise TrtspecError(f"{where} is {_shown(values)}, not a mapping", REMEDY)
        self.values, self.where = values, where

    def whole(self, key: str, default: Any = REQUIRED, least: int = 0, most: int = MOST) -> int:
        """An integer within its limits; absent, null and 0 give the default where there is one."""
        value = self._value(key, default)
        number = int(value) if _is_number(value) and value == value and abs(value) <= MOST else None
        if number is None or number != value or not least <= number <= most:
            raise self._wrong(key, f"an integer from {least} to {most}", value)
        return number

    def number(self, key: str, default: Any = REQUIRED) -> float:
        value = self._value(key, default)
        if not _is_number(value) or not abs(value) < 1e300:
            raise self._wrong(key, "a number", value)
        return float(value)

    def text(self, key: str, default: str) -> str:
        value = self.values.get(key)
        if value is None:
            return default
        if not isinstance(value, str):
            raise self._wrong(key, "a string", value)
        return value

    def mapping(self, key: str) -> Values:
        """The mapping at a key; an empty one where it is absent or null."""
        value = self.values.get(key)
        return Values({} if value is None else value, f"{self.where}: {key}")

    def wholes(self, key: str) -> tuple[int, ...]:
        """A list of integers, or one integer; () where it is absent or null."""
        value = self.values.get(key)
        if value is None:
            return ()
        listed = value if isinstance(value, list) else [value]
        if not all(isinstance(item, int) and not isinstance(item, bool) and abs(item) <= MOST for item in listed):
            raise self._wrong(key, "a list of integers", value)
        return tuple(listed)

    def texts(self, key: str) -> tuple[str, ...]:
        """A list of strings; () where it is absent or null."""
        value = self.values.get(key)
        if value is None:
            return ()
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise self._wrong(key, "a list of strings", value)
        return tuple(value)

    def _value(self, key: str, default: Any) -> Any:
        if default is REQUIRED:
            if key not in self.values:
                raise TrtspecError(f"{self.where} has no key {key!r}", REMEDY)
            return self.values[key]
        value = self.values.get(key)
        return default if value is None or value == 0 else value

    def _wrong(self, key: str, what: str, value: Any) -> TrtspecError:
        return TrtspecError(f"{self.where}: {key} must be {what}, not {_shown(value)}", REMEDY)


def check_kinds(config: dict[str, Any], where: str) -> dict[str, Any]:
    """The same config.json, of which mappings are mappings and lists are lists wherever readers rely on it. Raises
    TrtspecError naming the first key that is something else."""
    values = Values(config, where)
    for key in MAPPINGS:
        inner = values.mapping(key)
        if key in NESTED and inner.values:
            check_kinds(inner.values, inner.where)
    for key in TEXTS:
        values.text(key, "")
    for key in LISTS_OF_TEXT:
        values.texts(key)
    for key in LISTS_OF_WHOLES:
        values.wholes(key)
    for group in values.mapping("config_groups").values:
        values.mapping("config_groups").mapping(group).mapping("weights").whole("group_size", 0, least=-1)
    return config


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _shown(value: Any) -> str:
    text = ascii(value)
    return text if len(text) <= SHOWN else f"{text[:SHOWN]} ..."
