"""How long drafts would be accepted, from agreement on held-out answers: no engine, no generation.

Greedy decoding of an answer is walked through as a server would do it. At each verification, the head's drafts count
up to the first that is not the target's best token, the target adds one, and the next verification begins behind
them. Drafts after the first were made with the answer's own tokens in place of the head's, which are the same as long
as all before agreed and the answer is what the target says greedily. Acceptance length = 1 + accepted / verifications,
as everywhere here; the draft length is the number of training-time-test steps.
"""

from __future__ import annotations

from collections.abc import Sequence

from trtspec.errors import UsageError
from trtspec.heads.data.samples import Sample


def walk(agree: Sequence[Sequence[bool]], answer: Sequence[int]) -> tuple[int, int]:
    """(verifications, accepted drafts) over one sample.

    agree[k][q]: whether the draft of step k at row q is the target's best token; answer[t]: 1 where token t was
    written by the target. The first token of an answer comes from the prompt's own pass.
    """
    steps = accepted = place = 0
    while place < len(answer):
        end = place
        while end < len(answer) and answer[end]:
            end += 1
        known = max(place, 1)  # the last token that is known; the row before it drafts
        while known < end - 1:
            count = 0
            while count < min(len(agree), end - 1 - known) and agree[count][known - 1 + count]:
                count += 1
            steps += 1
            accepted += count
            known += count + 1
        place = end + 1
    return steps, accepted


def best_by(asked: str, samples: Sequence[Sample], held: Sequence[int]) -> str | None:
    """By which figure the best head is kept, None for no such head or where nothing is held out. UsageError where the
    figure that was asked for cannot be had."""
    if asked == "acceptance" and not any(any(samples[index].answer) for index in held):
        raise UsageError(
            "--best-by acceptance needs held-out conversations with answers of the target, and there are none",
            "pass --eval-data or --held-out, or --best-by loss",
        )
    return asked if held and asked != "none" else None
