"""Values and phrasings of kimi-nano's exercises.

Each belongs to training or to the held-out side, by its own hash.

A `Draw` hands out only those of its side, so no held-out name, word, date, sum or phrasing is ever
trained on.
"""

from __future__ import annotations

import datetime
import random
import re
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import yaml

HELDOUT_VALUES = 7  # one value in seven
HELDOUT_PHRASES = 5  # one phrasing in five
# of the names and things of training: a model knows a few hundred by heart and copies no others
MADE_UP = 0.65
HALVES = 0.6  # of what is made up: halves of two listed ones; the others are letters
MORE_FORMS = 0.75  # of the phrasings of training that have further forms
T = TypeVar("T")
CONSONANTS = "bbcddfgghjkllmmnnnpqrrrsssttttvwxyz"
CHOICE = re.compile(r"\{([^{}]*)\}")

TEXT = yaml.safe_load((Path(__file__).parent / "text.yaml").read_text(encoding="utf-8"))
WORDS: dict[str, list[str]] = {name: words.split() for name, words in TEXT["words"].items()}


def held(text: str, share: int) -> bool:
    """Whether a value or phrasing belongs to the held-out side, one in `share` of them."""
    return zlib.crc32(text.encode()) % share == 0


def plural(noun: str) -> str:
    if noun.endswith(("s", "x", "ch", "sh", "to", "go")):
        return noun + "es"
    return noun[:-1] + "ies" if noun.endswith("y") and noun[-2] not in "aeiou" else noun + "s"


class Draw:
    """Random choices of one exercise.

    `keys` collects its values and `phrases` its phrasings, all of one side.

    `made_up` is the share of names and things that no list has; the held-out side has none.
    """

    def __init__(self, seed: str, heldout: bool, made_up: float = MADE_UP) -> None:
        self.random, self.heldout = random.Random(seed), heldout
        self.made_up = 0.0 if heldout else made_up
        self.keys: list[str] = []
        self.phrases: list[str] = []

    def chance(self, share: float) -> bool:
        return self.random.random() < share

    def number(self, low: int, high: int) -> int:
        return self.random.randint(low, high)

    def pick(self, pool: Sequence[T]) -> T:
        return self.random.choice(pool)

    def side(self, make: Callable[[], str], share: int, known: Sequence[str] = ()) -> str:
        """What `make` gives, made again until it is of this side and not `known`."""
        for _ in range(5000):
            found = make()
            if held(found, share) == self.heldout and found not in known:
                return found
        raise ValueError(f"nothing more like {found!r} on this side (heldout={self.heldout})")

    def value(self, make: Callable[[], str], again: bool = False) -> str:
        """A value of this side; a new one unless `again` allows one of this exercise."""
        self.keys.append(found := self.side(make, HELDOUT_VALUES, () if again else self.keys))
        return found

    def thing(self, make: Callable[[], str], again: bool = False) -> str:
        """A name or thing of this side, or one made up: halves of two, or letters."""

        def listed_or_made_up() -> str:
            if not self.made_up or not self.chance(self.made_up):
                return make()
            one, other = self.side(make, HELDOUT_VALUES), self.side(make, HELDOUT_VALUES)
            if self.chance(HALVES):
                return one[: self.number(1, len(one) - 1)] + other[self.number(1, len(other) - 1) :]
            first = self.number(0, 1)  # whether a vowel begins
            letters = [
                self.pick("aeiou" if (at + first) % 2 else CONSONANTS)
                for at in range(self.number(3, 9))
            ]
            return "".join(letters).capitalize() if one[0].isupper() else "".join(letters)

        return self.value(listed_or_made_up, again)

    def phrase(self, name: str, /, **values: object) -> str:
        """A phrasing of text.yaml, or a pattern itself, with one of each `{a|b}`, filled in.

        The whole phrasing belongs to this side (training or held-out).
        """
        pattern = TEXT["phrases"].get(name, name)
        if self.made_up and name in TEXT["more"] and self.chance(MORE_FORMS):
            pattern = TEXT["more"][name]
        self.phrases.append(found := self.side(lambda: self.expand(pattern), HELDOUT_PHRASES))
        return fill(found, values)

    def free(self, name: str, /, **values: object) -> str:
        """As `phrase`, for text that both sides may share."""
        return fill(self.expand(TEXT["phrases"].get(name, name)), values)

    def expand(self, pattern: str) -> str:
        while "{" in pattern:
            pattern = CHOICE.sub(lambda match: self.pick(match[1].split("|")), pattern)
        return pattern

    def adjective(self) -> str:
        return self.thing(lambda: self.pick(WORDS["adjectives"]))

    def noun(self) -> str:
        return self.thing(lambda: self.pick(WORDS["nouns"]))

    def word(self) -> str:
        """A noun, an adjective, or an invented word: what is copied cannot be known by heart."""
        kind = self.random.random()
        if kind < 0.3:
            return self.adjective()
        return self.noun() if kind < 0.7 else self.invented()

    def invented(self) -> str:
        return self.value(
            lambda: "".join(self.random.choices(WORDS["syllables"], k=self.number(3, 4)))
        )

    def first(self, again: bool = False) -> str:
        return self.thing(lambda: self.pick(WORDS["first"]), again)

    def person(self) -> str:
        return f"{self.first(again=True)} {self.last()}"

    def last(self) -> str:
        return self.thing(lambda: self.pick(WORDS["last_begin"]) + self.pick(WORDS["last_end"]))

    def place(self) -> str:
        return self.thing(lambda: self.pick(WORDS["place_begin"]) + self.pick(WORDS["place_end"]))

    def code(self) -> str:
        """An order number such as K7-3921."""
        letters = "ABCDEFGHKLMNPRSTVWXZ"
        return self.value(
            lambda: f"{self.pick(letters)}{self.number(1, 9)}-{self.number(1000, 9999)}"
        )

    def job(self) -> str:
        return self.pick(WORDS["jobs"])

    def date(self) -> datetime.date:
        return datetime.date.fromisoformat(self.value(lambda: self.some_day().isoformat()))

    def dates(self, low: int, high: int) -> tuple[datetime.date, datetime.date]:
        """A day and another one so many days later, which in training is not held out either."""
        start = self.date()
        while True:
            end = start + datetime.timedelta(self.number(low, high))
            if self.heldout or not held(end.isoformat(), HELDOUT_VALUES):
                return start, end

    def some_day(self) -> datetime.date:
        return datetime.date(2024, 1, 1) + datetime.timedelta(self.number(0, 6 * 365))

    def pair(self, sign: str, high: int = 99) -> tuple[int, int]:
        """Operands of a sum, a difference (not negative) or a product with one digit.

        The others have at least two digits.
        """
        while True:
            a, b = (
                self.number(10, high),
                self.number(2, 9) if sign == "*" else self.number(10, high),
            )
            a, b = (max(a, b), min(a, b)) if sign == "-" else (a, b)
            key = f"{a} {sign} {b}"
            if held(key, HELDOUT_VALUES) == self.heldout and key not in self.keys:
                self.keys.append(key)
                return a, b


def fill(phrase: str, values: dict[str, object]) -> str:
    for name, value in values.items():
        phrase = phrase.replace(f"<{name}>", str(value))
    return re.sub(r"\ba (?=[aeiou])", "an ", phrase)
