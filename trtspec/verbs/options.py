"""Declares options that several commands share, and types of option values that parse text."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self

from trtspec.bench.check.kinds import CODES
from trtspec.data_files import load_yaml
from trtspec.records import DryRunOption, ForceOption, RestartOption, argument, option
from trtspec.report import OutputOptions

if TYPE_CHECKING:
    PolicyName = str  # a type checker does not read the names from the file
else:
    PolicyName = Literal[tuple(load_yaml("policies.yaml")["policies"])]

MAX_NUMBER = 1e6  # limit for the numbers in a list; larger ones are mistakes
SourceArgument = Annotated[
    str, argument("Kimi checkpoint: a directory or a hub id.", metavar="SRC")
]
ThinkingOption = Annotated[
    Literal["on", "off", "low", "medium", "high"] | None,
    option(
        "Thinking: on or off by Kimi's chat template, else a reasoning effort.",
        default="the server's",
    ),
]
WaitReadyOption = Annotated[
    float, option("Seconds to wait for the server to name its model.", group="Requests", min=0.0)
]
PolicyOption = Annotated[
    PolicyName | None,
    option("What to quantize and how.", default="the published policy of the model family"),
]


@dataclass(frozen=True)
class OutputFlags(OutputOptions):
    """Options of a command that accepts --dry-run, --restart and --force."""

    dry_run: DryRunOption = False
    restart: RestartOption = False
    force: ForceOption = False


@dataclass(frozen=True)
class IntList:
    """List of whole numbers above 0 without repetitions.

    what: noun for a valid text, in messages.
    example: valid text, in remedies.
    metavar: placeholder on help pages.
    number: type of the numbers.
    """

    values: tuple[Any, ...]
    what: ClassVar = "a list of whole numbers above 0"
    example: ClassVar = "1,4,16"
    metavar: ClassVar = "N,N,..."
    number: ClassVar[type] = int

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parses numbers with commas between them. Raises ValueError for any other text."""
        return cls(tuple(dict.fromkeys(_numbers(text, cls.number, above=0))))

    def __str__(self) -> str:
        return ",".join(map(str, self.values)) or "0"


class RateList(IntList):
    """List of requests per second, above 0, without repetitions."""

    what = "a list of requests per second"
    example = "0.5,1,2"
    number = float


class CountList(IntList):
    """List of whole numbers from 0, with repetitions."""

    what = "a list of numbers"
    example = "1,29,57"

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parses numbers with commas between them. Raises ValueError for any other text."""
        return cls(_numbers(text, int, above=-1))


def _numbers(text: str, number: type, above: int) -> tuple[Any, ...]:
    """Parses numbers of the type `number` with commas between them.

    Raises ValueError for another text, or a number that is not between `above` and MAX_NUMBER.
    """
    try:
        values = tuple(number(word) for word in text.split(","))
    except ValueError:
        raise ValueError from None  # without a text, because `parsed` writes the message
    if not all(above < value < MAX_NUMBER for value in values):
        raise ValueError
    return values


class RowName(str):
    """Name of a row of the table that check prints."""

    what: ClassVar = f"one of {', '.join(CODES)}"
    example: ClassVar = "ROW"

    @classmethod
    def parse(cls, text: str) -> Self:
        """Returns the name. Raises ValueError if check has no row of this name."""
        if text not in CODES:
            raise ValueError
        return cls(text)


@dataclass(frozen=True)
class JsonObject:
    """JSON object, as the text of the user and as a parsed value."""

    text: str
    value: dict[str, Any] = field(compare=False)
    what: ClassVar = "a JSON object"
    example: ClassVar = """'{"top_k": 20}'"""

    @classmethod
    def parse(cls, text: str) -> JsonObject:
        """Parses a JSON object. Raises ValueError for any other text."""
        value = json.loads(text)
        if not isinstance(value, dict):
            raise ValueError
        return cls(text, value)

    def __str__(self) -> str:
        return self.text


ExtraBody = Annotated[
    JsonObject,
    option("JSON object merged into every request, of keys that no option sets.", group="Requests"),
]


@dataclass(frozen=True)
class NamedUrl:
    """URL of an endpoint, and the name that the user gave to the endpoint (may be empty)."""

    name: str
    url: str
    what: ClassVar = "a URL with a name"
    example: ClassVar = "NAME=URL"

    @classmethod
    def parse(cls, text: str) -> NamedUrl:
        """Parses NAME=URL. Any other text is a URL without a name."""
        named = re.fullmatch(r"(\w[\w.-]*)=(.+)", text)
        return cls(named[1], named[2]) if named else cls("", text)

    def __str__(self) -> str:
        return f"{self.name}={self.url}" if self.name else self.url
