"""From token ids to the text that a client sees: stop strings are cut out exactly, and never shown by half."""

from __future__ import annotations

from collections.abc import Sequence

from trtspec.checkpoint.tokenizer import Detokenizer, KimiTokenizer


class TextStream:
    """The growing text of one request.

    With stop strings, tokens are looked at one by one, so the generation ends at the same token whether tokens
    arrive singly or several per step; text that may be the beginning of a stop string is held back.
    """

    def __init__(
        self,
        tokenizer: KimiTokenizer | None,
        stop: Sequence[str] = (),
        include_stop: bool = False,
        skip_special: bool = True,
    ) -> None:
        self._detokenizer = Detokenizer(tokenizer, skip_special) if tokenizer else None
        self._include_stop = include_stop
        self.stop = tuple(stop)
        self._pending = ""
        self.stopped = False

    def push(self, ids: list[int]) -> tuple[str, int]:
        """(text that is now certain, how many of `ids` belong to the output): fewer than all after a stop string."""
        if self._detokenizer is None:
            return "", len(ids)
        if not self.stop:
            return self._detokenizer.push(ids), len(ids)
        for used, token in enumerate(ids, 1):
            self._pending += self._detokenizer.push((token,))
            found = find_stop(self._pending, self.stop)
            if found >= 0:
                self.stopped = True
                if self._include_stop:
                    found += next(len(word) for word in self.stop if self._pending.startswith(word, found))
                text, self._pending = self._pending[:found], ""
                return text, used
        keep = held_back(self._pending, self.stop)
        cut = len(self._pending) - keep
        text, self._pending = self._pending[:cut], self._pending[cut:]
        return text, len(ids)

    def finish(self) -> str:
        """What was held back, when no stop string ended the generation; U+FFFD for half a character."""
        if self.stopped or self._detokenizer is None:
            return ""
        text, self._pending = self._pending + self._detokenizer.flush(), ""
        return text


def find_stop(text: str, stop: Sequence[str]) -> int:
    """Position of the earliest stop string in `text`, -1 if there is none."""
    found = [position for position in (text.find(word) for word in stop) if position >= 0]
    return min(found, default=-1)


def held_back(text: str, stop: Sequence[str]) -> int:
    """Length of the longest suffix of `text` that is a proper prefix of a stop string."""
    longest = min(len(text), max(len(word) for word in stop) - 1)
    for size in range(longest, 0, -1):
        tail = text[-size:]
        if any(word.startswith(tail) for word in stop):
            return size
    return 0
